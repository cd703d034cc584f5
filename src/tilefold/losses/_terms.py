"""Weighted sums of modules with ``compute_loss_from_embeddings``, checked where they are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def checked_terms(
    terms: Iterable[tuple[nn.Module, float]], what: str, remedy: str
) -> tuple[nn.ModuleList, list[float]]:
    """Modules and weights; `what` and `remedy` are for messages: ``"a loss"``, ``"losses that SpladeLoss takes"``."""
    pairs = list(terms)
    if not pairs:
        raise ValueError(f"terms must be at least one pair of {what} and its weight, got an empty list.")
    for term, _ in pairs:
        check_term("terms", term, remedy)
    return nn.ModuleList(term for term, _ in pairs), [float(weight) for _, weight in pairs]


def check_term(name: str, term: Any, remedy: str) -> None:
    """Raise ``TypeError`` for a module that is no term of ``SpladeLoss``."""
    if not callable(getattr(term, "compute_loss_from_embeddings", None)):
        raise TypeError(f"{name} must have compute_loss_from_embeddings, got {type(term).__name__}; pass {remedy}.")


def weighted_sum(terms: nn.ModuleList, weights: Iterable[float], *arguments: Any) -> Tensor:
    """``sum_i weight_i * term_i(*arguments)``, a scalar."""
    values = [
        weight * term.compute_loss_from_embeddings(*arguments)  # type: ignore[operator]
        for term, weight in zip(terms, weights, strict=True)
    ]
    return torch.stack(values).sum()
