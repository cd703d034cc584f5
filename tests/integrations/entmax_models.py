"""Tiny BERT, RoBERTa, ModernBERT and GPT-2 models with entmax attention, and a batch with padding for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

from tilefold.integrations.transformers import register, unregister

NAMES = ["bert", "roberta", "modernbert", "gpt2"]
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                         "vocab_size": 99, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


def model(name: str, implementation: str = "entmax", **changes: Any) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=64, bos_token_id=1,
                            eos_token_id=2, pad_token_id=0, **changes)  # fmt: skip
        made: Any = GPT2LMHeadModel._from_config(config, attn_implementation=implementation)
    elif name == "modernbert":
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        config = ModernBertConfig(**SMALL, **special, local_attention=8, global_attn_every_n_layers=2, **changes)
        made = ModernBertModel._from_config(config, attn_implementation=implementation)
    else:
        kinds: dict[str, Any] = {"bert": (BertConfig, BertModel), "roberta": (RobertaConfig, RobertaModel)}
        kind, cls = kinds[name]
        made = cls._from_config(kind(**SMALL, pad_token_id=0, **changes), attn_implementation=implementation)
    return made.eval()


def sentence_model(tokenizer_folder: Path, folder: Path, **options: Any) -> Any:
    """A SentenceTransformer of a tiny BERT with the real tokenizer, by way of a checkpoint in `folder`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    BertModel(config).save_pretrained(str(folder))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    modules = [Transformer(str(folder), max_seq_length=32), Pooling(32)]
    return SentenceTransformer(modules=modules, device="cpu", **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 99, (3, 20), generator=generator)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = 0
    mask[2, 3:] = 0
    return tokens, mask


def output(made: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    result = made(input_ids=tokens, attention_mask=mask)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state
