"""Tiny SparseEncoder checkpoints that need no download and no packaged tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("sparse retrieval weighs the words of a vocabulary quick brown fox jumps over lazy dog again").split()  # noqa: SIM905
TEXTS = [
    "the quick brown fox",
    "jumps over a lazy dog again and again until the dog weighs words",
    "fox",
    "sparse retrieval weighs the words of a vocabulary",
    "a lazy dog again",
    "the vocabulary of a quick fox",
]
VOCABULARY = 131  # prime: no number of ranks divides it


def save_tiny_splade(kind: str, folder: Path) -> None:
    """Save a stock SparseEncoder: ``"bert"``, tied, or ``"modernbert-untied"``."""
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if kind == "bert":
        network: Any = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    else:
        ids = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
        config = transformers.ModernBertConfig(**sizes, **ids, attn_implementation="sdpa", tie_word_embeddings=False)
        network = transformers.ModernBertForMaskedLM(config)
    with torch.no_grad():
        network.get_output_embeddings().bias.normal_(std=0.1)
    plain = folder / "masked-lm"
    network.save_pretrained(str(plain))
    _tokenizer().save_pretrained(str(plain))
    SparseEncoder(
        modules=[Transformer(str(plain), transformer_task="fill-mask"), SpladePooling()], device="cpu"
    ).save_pretrained(str(folder))


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
