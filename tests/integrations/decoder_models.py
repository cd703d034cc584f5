"""Tiny decoders with random weights: real classes of transformers, made from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.recipes.small import TEXTS, byte_pairs

VOCABULARY = 328  # a few more than the tokens of the tokenizer
WINDOW = 6  # keys that a query of a sliding layer sees, its own included
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # a text's tokens then differ in the keys that they attend to
}
# Class of the network, class of its configuration, and options of the configuration.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        {
            "local_attention": 2 * WINDOW,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}
DECODERS = list(_FAMILIES)
# Decoders with layers of sliding windows.
WINDOWED = ["mistral", "qwen2", "gemma3", "modernbert-decoder"]


def tiny_decoder(kind: str, **options: Any) -> Any:
    """Return a causal language model with random weights.

    Args:
        kind: one of :data:`DECODERS`.
        **options: further options of its configuration.
    """
    network_name, config_name, family_options = _FAMILIES[kind]
    sizes = {"vocab_size": VOCABULARY, **_SIZES}
    config = getattr(transformers, config_name)(**(sizes | family_options | options))
    torch.manual_seed(0)
    return getattr(transformers, network_name)(config)


def save_tiny_decoder(kind: str, folder: Path, **options: Any) -> Path:
    """Save a tiny decoder with a tokenizer of byte pairs, which encodes an empty text to no token.

    Args:
        kind: one of :data:`DECODERS`.
        folder: a folder, which is created.
        **options: further options of the configuration.
    """
    tiny_decoder(kind, **options).save_pretrained(str(folder))
    byte_pairs(TEXTS).save_pretrained(str(folder))
    return folder
