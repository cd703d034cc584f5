"""Count the rows whose bits depend on the batch, and time ``accelerate(invariant=True)``.

    python -m benchmarks.invariance --device cuda --output results.csv

Rows: sparse vectors of a SPLADE model of random weights, or of the weights of MiniLM, for texts of
1 to 512 tokens, of which some are truncated and some occur twice. Each text is encoded alone, then
in random compositions: of 1 to 512 texts on a GPU, in random order, with a prompt or without, as
one batch or as a stream with a random number of tokens per batch.

Timed: all texts in bulk, and one query of 12 tokens, with ``accelerate(model)`` and with
``accelerate(model, invariant=True)`` in turns. On a CPU, the times are CPU times.

Gate: no row of the invariant model differs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor

from tilefold._internal.precision import Dtype, set_precision
from tilefold.bench.results import collect, write_csv
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.recipes.backbone import minilm_path, minilm_splade

VOCABULARY = 30522  # of the tokenizer of MiniLM
# Ids of its special tokens.
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 101,
    "cls_token_id": 101,
    "eos_token_id": 102,
    "sep_token_id": 102,
}
LONGEST = 512
PROMPT = "query: "
QUERY = "read a file line by line and sort the numbers of it"
WORDS = ("read", "write", "file", "line", "list", "sort", "text", "number", "a", "of", ",", "1755")
TOP_K = 256
N_PAIRS = 7
N_QUERIES = 20
# Options of a Transformer whose network is a decoder with an LM head.
DECODER_OPTIONS: dict[str, Any] = {
    "transformer_task": "text-generation",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
    "processing_kwargs": {"text": {"logits_to_keep": 0}},
}


@dataclass(frozen=True)
class Network:
    """A network of random weights.

    Attributes:
        config: the class of its configuration in transformers.
        sizes: the sizes of the network.
        cpu_layers: layers on a CPU, where more would only take longer.
        is_decoder: whether it is a decoder.
    """

    config: str
    sizes: dict[str, int]
    cpu_layers: int
    is_decoder: bool = False


NETWORKS = {
    "tiny": Network(
        "BertConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        },
        cpu_layers=2,
    ),
    "bert": Network(
        "BertConfig",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
        },
        cpu_layers=2,
    ),
    "modernbert": Network(
        "ModernBertConfig",
        {
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
        },
        cpu_layers=4,
    ),
    "llama": Network(
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 16,
        },
        cpu_layers=1,
        is_decoder=True,
    ),
}
MINILM = "minilm"  # has the packaged weights
NAMES = (MINILM, *NETWORKS)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        n_texts: the number of texts.
        n_compositions: the number of random batches.
        most_texts: the largest number of texts of a batch.
    """

    n_texts: int
    n_compositions: int
    most_texts: int


DEFAULT_SIZES = {
    "cpu": Sizes(n_texts=80, n_compositions=40, most_texts=32),
    "cuda": Sizes(n_texts=2048, n_compositions=10_000, most_texts=512),
}


@dataclass(frozen=True)
class InvarianceRow:
    """A row of the results.

    Attributes:
        network: the name of the network.
        layers: its layers.
        dtype: the dtype in which it computes.
        compositions: the number of random batches.
        rows: the number of compared rows, of both models.
        differing: how many of them differ from the row of the text alone, with ``accelerate``.
        invariant_differing: the same with ``invariant=True``.
        bulk_ms: median time per text in bulk, in milliseconds.
        invariant_bulk_ms: the same with ``invariant=True``.
        throughput: median over pairs of the first time divided by the second one.
        query_ms: median time of one query.
        invariant_query_ms: the same with ``invariant=True``.
        query_time: median over pairs of the second time divided by the first one.
    """

    network: str
    layers: int
    dtype: str
    compositions: int
    rows: int
    differing: int
    invariant_differing: int
    bulk_ms: float
    invariant_bulk_ms: float
    throughput: float
    query_ms: float
    invariant_query_ms: float
    query_time: float


def make_model(name: str, device: str) -> SparseEncoder:
    """Return a SPLADE model that is not accelerated.

    Args:
        name: the name of the network.
        device: the device.
    """
    if name == MINILM:
        return minilm_splade(make_texts(32), device=device).eval()
    network = NETWORKS[name]
    config = getattr(transformers, network.config)(
        **network.sizes,
        **TOKENS,
        vocab_size=VOCABULARY,
        max_position_embeddings=LONGEST,
    )
    if device == "cpu":
        config.num_hidden_layers = network.cpu_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: network.cpu_layers]
    torch.manual_seed(0)
    head = transformers.AutoModelForCausalLM if network.is_decoder else None
    auto_class = head or transformers.AutoModelForMaskedLM
    with tempfile.TemporaryDirectory() as folder:
        auto_class.from_config(config).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(str(minilm_path())).save_pretrained(folder)
        if network.is_decoder:
            options = {**DECODER_OPTIONS, "processor_kwargs": {"padding_side": "left"}}
        else:
            options = {"transformer_task": "fill-mask"}
        transformer = Transformer(folder, max_seq_length=LONGEST, **options)
    return SparseEncoder(modules=[transformer, SpladePooling()], device=device).eval()


def make_texts(n_texts: int) -> list[str]:
    """Return texts of 1 to somewhat more than 512 tokens, with log-uniform lengths, and duplicates.

    Args:
        n_texts: the number of texts.
    """
    generator = np.random.default_rng(0)
    n_distinct = n_texts - n_texts // 16
    n_words = np.exp(generator.uniform(0, np.log(1.2 * LONGEST), n_distinct)).astype(int)
    texts = [" ".join(generator.choice(WORDS, count)) for count in n_words]
    return texts + texts[: n_texts - n_distinct]


def compositions(sizes: Sizes, seed: int = 1) -> Iterator[tuple[list[int], bool, int | None]]:
    """Yield random batches.

    Args:
        sizes: the sizes of the run.
        seed: equal seeds give equal batches.

    Yields:
        Positions of texts, whether they get a prompt, and the number of tokens per batch; None
        encodes all texts as the default does.
    """
    generator = np.random.default_rng(seed)
    for _ in range(sizes.n_compositions):
        n_texts = int(np.exp(generator.uniform(0, np.log(sizes.most_texts))))
        positions = generator.integers(0, sizes.n_texts, n_texts).tolist()
        batch_tokens = None
        if generator.random() < 0.5:
            batch_tokens = int(generator.integers(LONGEST, 16 * LONGEST))
        yield positions, bool(generator.random() < 0.5), batch_tokens


def count_differing(model: SparseEncoder, texts: Sequence[str], sizes: Sizes) -> tuple[int, int]:
    """Encode texts alone and in random batches, and count the rows and those that differ.

    Args:
        model: an accelerated model.
        texts: the texts.
        sizes: the sizes of the run.
    """
    alone: dict[tuple[int, bool], bytes] = {}
    n_rows = 0
    n_differing = 0
    for positions, has_prompt, batch_tokens in compositions(sizes):
        prompt = PROMPT if has_prompt else None
        for position in positions:
            key = position, has_prompt
            if key not in alone:
                rows = encode_sparse(model, [texts[position]], prompt=prompt, top_k=TOP_K)
                (alone[key],) = bits_of_rows(rows)
        batch = [texts[position] for position in positions]
        rows = encode_sparse(
            model,
            batch,
            prompt=prompt,
            top_k=TOP_K,
            batch_tokens=batch_tokens,
        )
        for position, bits in zip(positions, bits_of_rows(rows), strict=True):
            n_rows += 1
            n_differing += bits != alone[position, has_prompt]
    return n_rows, n_differing


def bits_of_rows(rows: Tensor) -> list[bytes]:
    """Return the columns and the values of each row of a CSR matrix as bytes."""
    offsets = rows.crow_indices().tolist()
    columns = rows.col_indices().numpy()
    values = rows.values().view(torch.int32 if rows.dtype == torch.float32 else torch.int16).numpy()
    return [
        columns[start:stop].tobytes() + values[start:stop].tobytes()
        for start, stop in itertools.pairwise(offsets)
    ]


def timed(run: Callable[[], object], device: str) -> float:
    """Return the milliseconds of a call: CPU time on a CPU, otherwise wall-clock time.

    Args:
        run: the call.
        device: the device.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    started = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (clock() - started)


def time_pairs(
    ordinary: Callable[[], object],
    invariant: Callable[[], object],
    device: str,
) -> tuple[float, float, float]:
    """Time two calls in turns.

    Args:
        ordinary: the first call.
        invariant: the second call.
        device: the device.

    Returns:
        The median times in milliseconds, and the median of the first divided by the second.
    """
    for run in (ordinary, invariant):
        run()  # warm up
    pairs = [(timed(ordinary, device), timed(invariant, device)) for _ in range(N_PAIRS)]
    first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first, second, statistics.median(one / other for one, other in pairs)


def measure(name: str, dtype: Dtype, device: str, sizes: Sizes) -> InvarianceRow:
    """Count differing rows of a network, and time it.

    Args:
        name: the name of the network.
        dtype: the dtype in which it computes.
        device: the device.
        sizes: the sizes of the run.
    """
    ordinary = make_model(name, device)
    invariant = copy.deepcopy(ordinary)
    for model in (ordinary, invariant):
        set_precision(model, dtype)
    accelerate(ordinary)
    accelerate(invariant, invariant=True)
    texts = make_texts(sizes.n_texts)
    n_rows, n_differing = count_differing(ordinary, texts, sizes)
    _, n_invariant_differing = count_differing(invariant, texts, sizes)

    def bulk(model: SparseEncoder) -> Callable[[], object]:
        return lambda: encode_sparse(model, texts, top_k=TOP_K)

    def queries(model: SparseEncoder) -> Callable[[], object]:
        return lambda: [encode_sparse(model, [QUERY], top_k=TOP_K) for _ in range(N_QUERIES)]

    bulk_ms, invariant_bulk_ms, throughput = time_pairs(bulk(ordinary), bulk(invariant), device)
    query_ms, invariant_query_ms, speed = time_pairs(queries(ordinary), queries(invariant), device)
    return InvarianceRow(
        network=name,
        layers=ordinary[0].model.config.num_hidden_layers,
        dtype=dtype,
        compositions=sizes.n_compositions,
        rows=n_rows,
        differing=n_differing,
        invariant_differing=n_invariant_differing,
        bulk_ms=round(bulk_ms / len(texts), 3),
        invariant_bulk_ms=round(invariant_bulk_ms / len(texts), 3),
        throughput=round(throughput, 3),
        query_ms=round(query_ms / N_QUERIES, 3),
        invariant_query_ms=round(invariant_query_ms / N_QUERIES, 3),
        query_time=round(1 / speed, 3),
    )


def main() -> int:
    """Measure networks in dtypes, and return 1 if a row of an invariant model differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEFAULT_SIZES, default="cpu")
    parser.add_argument("--network", choices=NAMES, action="append", help="by default all but tiny")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), action="append")
    parser.add_argument("--compositions", type=int, help="number of random batches")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device: str = arguments.device
    sizes = DEFAULT_SIZES[device]
    if arguments.compositions is not None:
        sizes = Sizes(sizes.n_texts, arguments.compositions, sizes.most_texts)
    default_dtypes: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    if device == "cpu":
        default_dtypes = ("fp32", "bf16")
    dtypes: Sequence[Dtype] = arguments.dtype or default_dtypes
    n_failed = 0
    for name in arguments.network or [name for name in NAMES if name != "tiny"]:
        for dtype in dtypes:
            row = measure(name, dtype, device, sizes)
            n_failed += row.invariant_differing > 0
            print(row, flush=True)
            if arguments.output is not None:
                provenance = collect(torch.device(device))
                write_csv(arguments.output, [asdict(row)], provenance, ("network", "dtype"))
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
