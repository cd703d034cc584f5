"""Helpers for networks: check of the argument `model`, eval mode, comparison of outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from tilefold._internal.arguments import check_instance


def check_network(model: object) -> None:
    """Raise ``TypeError`` if a model is not a module, for example if it is a name or a path."""
    check_instance("model", model, nn.Module, "a loaded model")


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode within a context, and restore every submodule's mode on exit.

    Args:
        *models: the models. Their submodules may be in different modes.
    """
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def largest_difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of two tensors, or NaN if their shapes differ."""
    if result.shape != expected.shape:
        return float("nan")
    return float((result.float() - expected.float()).abs().max())
