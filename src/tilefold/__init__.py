"""Fused heads and scorers for neural retrieval: big score matrices are folded tile by tile, never stored.

``tilefold.lsr_head``, ``tilefold.maxsim``, ``tilefold.token_scatter``, ``tilefold.entmax`` and
``tilefold.entmax_attention`` are the operators; ``tilefold.nn`` has modules.
Importing the package is cheap: torch loads with the first operator, kernels and integrations at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilefold._version import __version__

if TYPE_CHECKING:
    from tilefold import nn
    from tilefold.ops import (
        QuantizedTokens,
        QuantizedWeight,
        entmax,
        entmax_attention,
        lsr_head,
        lsr_head_sparse,
        maxsim,
        maxsim_contrastive_loss,
        maxsim_topk,
        quantize_tokens,
        quantize_weight,
        sparsemax,
        token_scatter,
        token_scatter_sparse,
        xtr_scores,
    )

__all__ = [
    "QuantizedTokens",
    "QuantizedWeight",
    "__version__",
    "entmax",
    "entmax_attention",
    "lsr_head",
    "lsr_head_sparse",
    "maxsim",
    "maxsim_contrastive_loss",
    "maxsim_topk",
    "nn",
    "quantize_tokens",
    "quantize_weight",
    "sparsemax",
    "token_scatter",
    "token_scatter_sparse",
    "xtr_scores",
]

_OPERATORS = (
    "QuantizedTokens",
    "QuantizedWeight",
    "entmax",
    "entmax_attention",
    "lsr_head",
    "lsr_head_sparse",
    "maxsim",
    "maxsim_contrastive_loss",
    "maxsim_topk",
    "quantize_tokens",
    "quantize_weight",
    "sparsemax",
    "token_scatter",
    "token_scatter_sparse",
    "xtr_scores",
)


def __getattr__(name: str) -> Any:
    # resolved at first use, so that `tilefold --help` and `--version` do not wait for torch
    import importlib  # noqa: PLC0415

    if name in _OPERATORS:
        value = getattr(importlib.import_module("tilefold.ops"), name)
    elif name == "nn":
        value = importlib.import_module("tilefold.nn")
    else:
        raise AttributeError(f"module 'tilefold' has no attribute {name!r}; public names: {', '.join(__all__)}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
