"""Tiny causal language models with a real byte-level BPE tokenizer of 320 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "the quick brown fox",
    "jumps over a lazy dog again and again, until it is tired",
    "x",
    "sparse retrieval weighs the words of a vocabulary",
]
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def byte_pairs(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, without special tokens around a text, as that of Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def tiny_causal_lm(folder: Path, family: str = "qwen2", texts: list[str] | None = None, **options: Any) -> Path:
    """A causal language model of two narrow layers, with more rows than tokens, as published ones have."""
    if Version(sentence_transformers.__version__) < Version("6.2"):
        pytest.skip("sentence-transformers keeps one token of causal logits before 6.2")
    tokenizer = byte_pairs(TEXTS if texts is None else texts)
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer) + 8, **_SIZES, **options)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def dense(model: Any, texts: list[str], task: str | None = None) -> torch.Tensor:
    """Vectors ``[B, V]`` of a SparseEncoder."""
    encode = {"query": model.encode_query, "document": model.encode_document}.get(task or "", model.encode)
    return encode(texts, convert_to_sparse_tensor=False)  # type: ignore[no-any-return]
