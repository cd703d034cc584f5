"""Small transformers models with alpha-entmax attention, and a batch of texts for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tests.recipes.small import tiny_network
from tilefold.integrations.transformers import register, unregister

NAMES = ["bert", "roberta", "modernbert", "gpt2"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the attention during a test."""
    register()
    yield
    unregister()


def tiny_model(name: str, implementation: str = "entmax", **config_options: Any) -> Any:
    """Return a model of two layers with random weights.

    Args:
        name: architecture, one of ``NAMES``.
        implementation: attention that the model runs.
        config_options: further fields of its configuration.
    """
    options = {"attn_implementation": implementation, **config_options}
    if name == "gpt2":
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            vocab_size=99,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **options,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "modernbert":
        options.update(local_attention=8, global_attn_every_n_layers=2)
    return tiny_network(name, 99, **options).base_model.eval()


def sentence_model(tokenizer_folder: Path, folder: Path, **options: Any) -> Any:
    """Return a SentenceTransformer of a tiny BERT, whose checkpoint is written to ``folder``."""
    tiny_network("bert").base_model.save_pretrained(str(folder))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    modules = [Transformer(str(folder), max_seq_length=32), Pooling(32)]
    return SentenceTransformer(modules=modules, device="cpu", **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and the mask of three texts of 20, 12 and 3 tokens, ``[3, 20]`` each."""
    tokens = torch.randint(3, 99, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = 0
    mask[2, 3:] = 0
    return tokens, mask


def output(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits or last hidden states of a model, ``[B, S, V]`` or ``[B, S, D]``."""
    result = model(input_ids=tokens, attention_mask=mask)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state
