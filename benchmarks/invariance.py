"""Count the rows whose bits depend on the batch, and time ``accelerate(invariant=True)``.

    python -m benchmarks.invariance --device cuda --output FOLDER
    python -m benchmarks.invariance --device cuda --only counts --network bert --layers 2

Rows: sparse vectors of a SPLADE model of random weights, or of the weights of MiniLM, for texts of
1 to 512 tokens, of which some are truncated and some occur twice. A row has the terms above the
256th weight of a query. So random weights give rows about as sparse as trained ones, and texts
alone run as CUDA graphs on a GPU.

Each text is encoded alone, then in random compositions: of texts up to a random length, in random
order, with a prompt or without, as one batch or as a stream with a random number of tokens per
batch. Nine of ten compositions have 1 to 16 texts, and the tenth 1 to 512, log-uniform: bits depend
most on few rows, and small batches let a run of minutes encode 10,000 compositions. A tenth of the
small compositions and half of the others are streams. The ordinary model encodes the first
compositions only. On a GPU, compositions of up to 32 texts that are no streams run as CUDA graphs,
and the others without.

Timed: all texts in bulk, and one query of 12 tokens (as a CUDA graph on a GPU), with
``accelerate(model)`` and with ``accelerate(model, invariant=True)`` in turns. On a CPU, the times
are CPU times.

Counts are written to ``invariance.csv``, and times to ``invariance_times.csv``.

Gate: no row of the invariant model differs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
QUERY_TERMS = 256  # terms of the row of the query
SMALL_SHARE = 0.9  # of the compositions
SMALL_TEXTS = 16  # largest number of texts of a small composition
SMALL_STREAM_SHARE = 0.1  # of the small compositions
LARGE_STREAM_SHARE = 0.5  # of the others
N_QUERIES = 20
COUNTS = "counts"
TIMES = "times"
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
    "minilm-random": Network(
        "BertConfig",
        {
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_attention_heads": 12,
            "num_hidden_layers": 6,
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
# The same architectures with the sizes of tests.
TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
NETWORKS["tiny-modernbert"] = Network("ModernBertConfig", TINY_SIZES, cpu_layers=2)
NETWORKS["tiny-llama"] = Network("LlamaConfig", TINY_SIZES, cpu_layers=2, is_decoder=True)
MINILM = "minilm"  # has the packaged weights
NAMES = (MINILM, *NETWORKS)
DEFAULT_NAMES = (MINILM, "bert", "modernbert", "llama")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        n_texts: the number of texts.
        n_compositions: the largest number of random batches.
        n_ordinary_compositions: how many of them the ordinary model encodes too.
        most_texts: the largest number of texts of a composition.
        n_pairs: the number of timed pairs.
    """

    n_texts: int
    n_compositions: int
    n_ordinary_compositions: int
    most_texts: int
    n_pairs: int


DEFAULT_SIZES = {
    "cpu": Sizes(
        n_texts=80,
        n_compositions=40,
        n_ordinary_compositions=40,
        most_texts=32,
        n_pairs=7,
    ),
    "cuda": Sizes(
        n_texts=512,
        n_compositions=10_000,
        n_ordinary_compositions=100,
        most_texts=512,
        n_pairs=3,
    ),
}


DEFAULT_DTYPES: dict[str, tuple[Dtype, ...]] = {
    "cpu": ("fp32", "bf16"),
    "cuda": ("bf16", "fp16", "fp32"),
}


class Composition(NamedTuple):
    """A random batch.

    Attributes:
        positions: the positions of its texts.
        has_prompt: whether they get a prompt.
        batch_tokens: the number of tokens per batch; None encodes all texts as the default does.
    """

    positions: list[int]
    has_prompt: bool
    batch_tokens: int | None


class Counts(NamedTuple):
    """How many rows differ from the row of the text alone.

    Attributes:
        compositions: the number of random batches.
        rows: the number of compared rows.
        differing: how many of them differ.
    """

    compositions: int
    rows: int
    differing: int


@dataclass(frozen=True)
class CountRow:
    """A row of the counts.

    Attributes:
        network: the name of the network.
        layers: its layers.
        dtype: the dtype in which it computes.
        compositions: the number of random batches that the invariant model has encoded.
        rows: their number of rows.
        invariant_differing: how many of them differ from the row of the text alone.
        ordinary_compositions: the number of random batches that the ordinary model has encoded.
        ordinary_rows: their number of rows.
        differing: how many of them differ from the row of the text alone.
    """

    network: str
    layers: int
    dtype: str
    compositions: int
    rows: int
    invariant_differing: int
    ordinary_compositions: int
    ordinary_rows: int
    differing: int


@dataclass(frozen=True)
class TimeRow:
    """A row of the times.

    Attributes:
        network: the name of the network.
        layers: its layers.
        dtype: the dtype in which it computes.
        texts: the number of texts in bulk.
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
    texts: int
    bulk_ms: float
    invariant_bulk_ms: float
    throughput: float
    query_ms: float
    invariant_query_ms: float
    query_time: float


def make_model(name: str, device: str, n_layers: int | None = None) -> SparseEncoder:
    """Return a SPLADE model that is not accelerated.

    Args:
        name: the name of the network.
        device: the device.
        n_layers: the number of layers of a network of random weights; by default that of the
            network, or on a CPU a smaller one.
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
    if n_layers is None and device == "cpu":
        n_layers = network.cpu_layers
    if n_layers is not None:
        config.num_hidden_layers = n_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:n_layers]
    torch.manual_seed(0)
    head = transformers.AutoModelForCausalLM if network.is_decoder else None
    auto_class = head or transformers.AutoModelForMaskedLM
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):  # a GPU draws many random weights faster
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


def lengths_of(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the number of words of each text."""
    return np.array([len(text.split()) for text in texts])


def compositions(texts: Sequence[str], sizes: Sizes, seed: int = 1) -> Iterator[Composition]:
    """Yield random batches.

    Args:
        texts: the texts.
        sizes: the sizes of the run.
        seed: equal seeds give equal batches.
    """
    generator = np.random.default_rng(seed)
    lengths = lengths_of(texts)
    for _ in range(sizes.n_compositions):
        is_small = generator.random() < SMALL_SHARE
        most_texts = min(SMALL_TEXTS, sizes.most_texts) if is_small else sizes.most_texts
        n_texts = int(np.exp(generator.uniform(0, np.log(most_texts + 1))))
        longest = np.exp(generator.uniform(np.log(lengths.min()), np.log(lengths.max())))
        candidates = np.flatnonzero(lengths <= np.ceil(longest))
        stream_share = SMALL_STREAM_SHARE if is_small else LARGE_STREAM_SHARE
        batch_tokens = None
        if generator.random() < stream_share:
            batch_tokens = int(generator.integers(LONGEST, 16 * LONGEST))
        yield Composition(
            positions=generator.choice(candidates, n_texts).tolist(),
            has_prompt=bool(generator.random() < 0.5),
            batch_tokens=batch_tokens,
        )


def count_differing(
    model: SparseEncoder,
    texts: Sequence[str],
    batches: Iterable[Composition],
    min_weight: float,
    seconds: float,
) -> Counts:
    """Encode texts alone and in random batches, and count the rows and those that differ.

    Args:
        model: an accelerated model.
        texts: the texts.
        batches: the random batches.
        min_weight: rows have the terms of larger weights.
        seconds: no batch begins after this time.
    """
    alone: dict[tuple[int, bool], bytes] = {}
    n_compositions = 0
    n_rows = 0
    n_differing = 0
    started = time.perf_counter()
    for composition in batches:
        if time.perf_counter() - started > seconds:
            break
        prompt = PROMPT if composition.has_prompt else ""
        for position in composition.positions:
            key = position, composition.has_prompt
            if key not in alone:
                rows = model.encode_sparse_batch([prompt + texts[position]], min_weight=min_weight)
                (alone[key],) = bits_of_rows(rows)
        rows = encode_sparse(
            model,
            [texts[position] for position in composition.positions],
            prompt=prompt,
            min_weight=min_weight,
            batch_tokens=composition.batch_tokens,
        )
        n_compositions += 1
        for position, bits in zip(composition.positions, bits_of_rows(rows), strict=True):
            n_rows += 1
            n_differing += bits != alone[position, composition.has_prompt]
    return Counts(n_compositions, n_rows, n_differing)


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
    n_pairs: int,
) -> tuple[float, float, float]:
    """Time two calls in turns.

    Args:
        ordinary: the first call.
        invariant: the second call.
        device: the device.
        n_pairs: the number of pairs.

    Returns:
        The median times in milliseconds, and the median of the first divided by the second.
    """
    for run in (ordinary, invariant):
        run()  # warm up
    pairs = [(timed(ordinary, device), timed(invariant, device)) for _ in range(n_pairs)]
    first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first, second, statistics.median(one / other for one, other in pairs)


class Pair(NamedTuple):
    """Two accelerated models of the same weights.

    Attributes:
        name: the name of the network.
        dtype: the dtype in which it computes.
        ordinary: the first model.
        invariant: the second model, with ``invariant=True``.
        min_weight: rows of both have the terms of larger weights.
    """

    name: str
    dtype: Dtype
    ordinary: SparseEncoder
    invariant: SparseEncoder
    min_weight: float

    @property
    def layers(self) -> int:
        """The number of layers."""
        n_layers: int = self.ordinary[0].model.config.num_hidden_layers
        return n_layers


def smallest_weight(stock: SparseEncoder) -> float:
    """Return the smallest of the ``QUERY_TERMS`` largest weights of the query.

    Args:
        stock: the model, not accelerated: CUDA graphs refuse dense rows of random weights for good.
    """
    row = stock.encode([QUERY], max_active_dims=QUERY_TERMS).coalesce()
    return float(row.values().min()) if row.values().numel() == QUERY_TERMS else 0.0


def make_pair(name: str, stock: SparseEncoder, dtype: Dtype) -> Pair:
    """Accelerate two copies of a model.

    Args:
        name: the name of its network.
        stock: the model, which is not changed.
        dtype: the dtype in which the copies compute.
    """
    min_weight = smallest_weight(stock)
    ordinary = copy.deepcopy(stock)
    set_precision(ordinary, dtype)
    invariant = copy.deepcopy(ordinary)
    accelerate(ordinary)
    accelerate(invariant, invariant=True)
    return Pair(name, dtype, ordinary, invariant, min_weight)


def count_rows(pair: Pair, sizes: Sizes, seconds: float) -> CountRow:
    """Count the differing rows of two models.

    Args:
        pair: the models.
        sizes: the sizes of the run.
        seconds: no batch of the invariant model begins after this time.
    """
    texts = make_texts(sizes.n_texts)
    batches = compositions(texts, sizes)
    invariant = count_differing(pair.invariant, texts, batches, pair.min_weight, seconds)
    first_batches = itertools.islice(compositions(texts, sizes), sizes.n_ordinary_compositions)
    ordinary = count_differing(pair.ordinary, texts, first_batches, pair.min_weight, seconds)
    return CountRow(
        network=pair.name,
        layers=pair.layers,
        dtype=pair.dtype,
        compositions=invariant.compositions,
        rows=invariant.rows,
        invariant_differing=invariant.differing,
        ordinary_compositions=ordinary.compositions,
        ordinary_rows=ordinary.rows,
        differing=ordinary.differing,
    )


def time_models(pair: Pair, device: str, sizes: Sizes) -> TimeRow:
    """Time two models in turns, in bulk and for single queries.

    Args:
        pair: the models.
        device: the device.
        sizes: the sizes of the run.
    """
    texts = make_texts(sizes.n_texts)

    def bulk(model: SparseEncoder) -> Callable[[], object]:
        return lambda: encode_sparse(model, texts, min_weight=pair.min_weight)

    def queries(model: SparseEncoder) -> Callable[[], object]:
        def encode_queries() -> None:
            for _ in range(N_QUERIES):
                model.encode_sparse_batch([QUERY], min_weight=pair.min_weight)

        return encode_queries

    bulk_ms, invariant_bulk_ms, throughput = time_pairs(
        bulk(pair.ordinary),
        bulk(pair.invariant),
        device,
        sizes.n_pairs,
    )
    query_ms, invariant_query_ms, speed = time_pairs(
        queries(pair.ordinary),
        queries(pair.invariant),
        device,
        sizes.n_pairs,
    )
    return TimeRow(
        network=pair.name,
        layers=pair.layers,
        dtype=pair.dtype,
        texts=len(texts),
        bulk_ms=round(bulk_ms / len(texts), 4),
        invariant_bulk_ms=round(invariant_bulk_ms / len(texts), 4),
        throughput=round(throughput, 3),
        query_ms=round(query_ms / N_QUERIES, 3),
        invariant_query_ms=round(invariant_query_ms / N_QUERIES, 3),
        query_time=round(1 / speed, 3),
    )


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEFAULT_SIZES, default="cpu")
    parser.add_argument(
        "--network",
        choices=NAMES,
        action="append",
        help=f"by default {', '.join(DEFAULT_NAMES)}",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), action="append")
    parser.add_argument("--only", choices=(COUNTS, TIMES), help="by default both")
    parser.add_argument("--layers", type=int, help="layers of networks of random weights")
    parser.add_argument("--compositions", type=int, help="number of random batches")
    parser.add_argument(
        "--ordinary-compositions",
        type=int,
        help="how many of them the ordinary model encodes",
    )
    parser.add_argument("--texts", type=int, help="number of texts")
    parser.add_argument("--most-texts", type=int, help="largest number of texts of a batch")
    parser.add_argument("--pairs", type=int, help="number of timed pairs")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="no random batch begins after this time; the rows say how many were encoded",
    )
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--output", type=Path, help="folder of the CSV files")
    return parser.parse_args()


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes of a run.

    Args:
        arguments: the arguments of the command line.
    """
    options = {
        "n_texts": arguments.texts,
        "n_compositions": arguments.compositions,
        "n_ordinary_compositions": arguments.ordinary_compositions,
        "most_texts": arguments.most_texts,
        "n_pairs": arguments.pairs,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    return replace(DEFAULT_SIZES[arguments.device], **chosen)


def report(row: CountRow | TimeRow, arguments: argparse.Namespace) -> None:
    """Print a row, and add it to its file.

    Args:
        row: the row.
        arguments: the arguments of the command line.
    """
    print(row, flush=True)
    if arguments.output is None:
        return
    name = "invariance.csv" if isinstance(row, CountRow) else "invariance_times.csv"
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(
        arguments.output / name,
        [asdict(row)],
        collect(torch.device(arguments.device)),
        ("network", "layers", "dtype", "threads", "triton"),
    )


def main() -> int:
    """Measure networks in dtypes, and return 1 if a row of an invariant model differs."""
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device: str = arguments.device
    sizes = sizes_of(arguments)
    dtypes: Sequence[Dtype] = arguments.dtype or DEFAULT_DTYPES[device]
    n_failed = 0
    for name in arguments.network or DEFAULT_NAMES:
        stock = make_model(name, device, arguments.layers)
        for dtype in dtypes:
            pair = make_pair(name, stock, dtype)
            if arguments.only != TIMES:
                counts = count_rows(pair, sizes, arguments.seconds)
                n_failed += counts.invariant_differing > 0
                report(counts, arguments)
            if arguments.only != COUNTS:
                report(time_models(pair, device, sizes), arguments)
            del pair  # frees its memory before the next one
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
