"""Models and data of the training benchmark: encoders with random weights, and pairs of made texts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

MAX_LENGTH = 256  # tokens that are read of a text
QUERY_CHARACTERS = 60
RAGGED = (50.0, 0.85)  # median and spread of lognormal lengths: 28% of 256 tokens on average
FULL_LENGTH = 240


def load_tokenizer(path: Path | None) -> Any:
    """The tokenizer in a folder; by default that of the packaged MiniLM (WordPiece of 30,522)."""
    from transformers import AutoTokenizer

    if path is None:
        from tilefold.recipes.backbone import minilm_path

        path = minilm_path()
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer must be a folder that transformers can load, got {path}: {error}",
        ) from error


def words_of(tokenizer: Any) -> list[str]:
    """Words of the tokenizer's vocabulary."""
    pieces = sorted(piece.lstrip("\u2581") for piece in tokenizer.get_vocab())
    return [
        piece
        for piece in dict.fromkeys(pieces)
        if piece.isascii() and piece.isalpha() and len(piece) > 2
    ]


def made_pairs(tokenizer: Any, count: int, ragged: bool, seed: int = 0) -> dict[str, list[str]]:
    """Queries of about 60 characters, and documents of ragged length or of at least ``FULL_LENGTH``
    tokens.
    """
    generator = np.random.default_rng(seed)
    words = np.array(words_of(tokenizer))
    sample = list(words[generator.integers(len(words), size=2000)])
    per_word = (
        len(tokenizer(" ".join(sample), add_special_tokens=False, verbose=False)["input_ids"])
    ) / len(sample)
    lengths = np.full(count, FULL_LENGTH * 1.15)  # cut to FULL_LENGTH tokens by the model
    if ragged:
        lengths = np.minimum(
            generator.lognormal(np.log(RAGGED[0]), RAGGED[1], count),
            1.15 * MAX_LENGTH,
        )
    numbers = np.maximum(1, (lengths - 2) / per_word).astype(int)
    queries = [
        " ".join(words[generator.integers(len(words), size=12)])[:QUERY_CHARACTERS]
        for _ in range(count)
    ]
    documents = [" ".join(words[generator.integers(len(words), size=number)]) for number in numbers]
    return {"query": queries, "document": documents}


def valid_share(tokenizer: Any, documents: list[str], batch: int, length: int) -> float:
    """Share of the tokens of padded batches that are no padding, over the first few batches."""
    shares = []
    for start in range(0, min(len(documents), 4 * batch), batch):
        texts = documents[start : start + batch]
        found = [
            len(ids)
            for ids in tokenizer(texts, truncation=True, max_length=length, verbose=False)[
                "input_ids"
            ]
        ]
        shares.append(sum(found) / (len(found) * max(found)))
    return float(np.mean(shares))


BASE, TINY = (768, 12, 12, 3072), (64, 2, 2, 256)  # hidden, layers, heads, intermediate


def make_encoder(
    kind: str,
    vocab: int,
    sizes: tuple[int, int, int, int],
    tokenizer: Any,
    length: int,
    *,
    roberta: bool | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """A stock model with random weights, loaded by sentence-transformers from a folder as users do.

    Fresh weights make about half of all logits positive, hence every score of a text of some
    length: the most expensive case for a backward pass that follows the winners.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        vocab: V.
        sizes: hidden, layers, heads and intermediate, such as ``BASE``.
        tokenizer: its ids must lie below ``vocab``.
        length: tokens that are read of a text, at most 512.
        roberta: XLM-R's kind of embeddings in place of BERT's; by default from V = 100,000 on.
        device: where the weights are made and the model ends up.

    Raises:
        ValueError: for a tokenizer with more entries than the vocabulary, or a length out of range.
    """
    import transformers
    from sentence_transformers.base.modules import Transformer

    if len(tokenizer) > vocab:
        raise ValueError(f"tokenizer must have at most {vocab} entries, got {len(tokenizer)}.")
    if not 2 < length <= 512:
        raise ValueError(f"length must be from 3 to 512 tokens, got {length}.")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    pad = tokenizer.pad_token_id
    roberta = vocab >= 100_000 if roberta is None else roberta
    # RoBERTa's positions begin behind the padding's id
    kinds = (
        (transformers.BertConfig, 512)
        if not roberta
        else (transformers.XLMRobertaConfig, 513 + pad)
    )
    config: Any = kinds[0](
        vocab_size=vocab,
        pad_token_id=pad,
        max_position_embeddings=kinds[1],
        **dict(zip(names, sizes, strict=True)),
    )
    auto = transformers.AutoModelForMaskedLM if kind == "splade" else transformers.AutoModel
    torch.manual_seed(0)
    with torch.device(device):  # normal numbers for 190 million entries take seconds on a CPU
        network = auto.from_config(config)
    tokenizer.model_max_length = length
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del network
        task = "fill-mask" if kind == "splade" else "feature-extraction"
        transformer = Transformer(
            folder,
            transformer_task=task,
            max_seq_length=length,
            model_kwargs={"local_files_only": True, "dtype": torch.float32},
            processor_kwargs={"local_files_only": True},
        )
        model = (
            _splade(transformer, device) if kind == "splade" else _colbert(transformer, sizes[0])
        ).to(device)
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    model.model_card_data.widget = [{"text": "a"}]
    return model


def _splade(transformer: Any, device: torch.device | str) -> Any:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return SparseEncoder(modules=[transformer, SpladePooling("max")], device=str(device))


def _colbert(transformer: Any, hidden: int) -> Any:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    dense = Dense(
        hidden,
        128,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [
        transformer,
        dense,
        MultiVectorMask(),
        Normalize(module_input_name="token_embeddings"),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu")
