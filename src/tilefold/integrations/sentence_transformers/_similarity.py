"""The installation of fused similarities on a ``MultiVectorEncoder``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold._typing import Model
from tilefold.integrations.sentence_transformers.multi_vector import maxsim, maxsim_pairwise

TOLERANCE = 2**-6  # of the largest score: error of the stock function from rounding similarities to bf16
_METHODS = ("similarity", "similarity_pairwise")


class FusedSimilarity:
    """Replaces ``similarity`` or ``similarity_pairwise`` of one model, and reads its ``similarity_fn_name``."""

    def __init__(self, model: Model, name: str, impl: str) -> None:
        self.model, self.name, self.impl = model, name, impl

    def __call__(self, embeddings1: object, embeddings2: object, **options: Any) -> Tensor:
        """Scores, with the keywords of the stock function."""
        mean = self.model.similarity_fn_name == "meanmaxsim"
        function = maxsim if self.name == "similarity" else maxsim_pairwise
        return function(embeddings1, embeddings2, **{"length_normalize": mean, "impl": self.impl, **options})


def is_multi_vector(model: object) -> bool:
    """Whether ``model`` is a ``MultiVectorEncoder``, compared by name, because earlier versions do not have it."""
    return any(
        kind.__name__ == "MultiVectorEncoder" and kind.__module__.startswith("sentence_transformers.")
        for kind in type(model).__mro__
    )


def fuse_similarity(model: Model, impl: str, check: bool) -> None:
    """Put :class:`FusedSimilarity` on the instance, after a ``check`` against the model's own scores if asked for."""
    stock = next(kind for kind in type(model).__mro__ if kind.__name__ == "MultiVectorEncoder")
    for name in _METHODS:
        if name in vars(model) or getattr(type(model), name) is not getattr(stock, name):
            raise ValueError(
                f"model must score with MultiVectorEncoder.{name}, got a {type(model).__name__} with another one; call "
                "tilefold.ops.maxsim in it."
            )
    fused = [FusedSimilarity(model, name, impl) for name in _METHODS]
    for function in fused if check else []:
        _check(model, function)
    for function in fused:
        setattr(model, function.name, function)


def _check(model: Model, function: FusedSimilarity) -> None:
    """Compare both on a few vectors, on the model's device and in its dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(1))
    wave = torch.arange(10 * 16, dtype=torch.float32).sin().view(10, 16).to(parameter.device, parameter.dtype)
    queries, documents = [wave[:3], wave[3:4]], [wave[4:8], wave[8:]]
    try:
        with torch.no_grad():
            expected, got = getattr(model, function.name)(queries, documents), function(queries, documents)
        difference = (got - expected.float()).abs().max().item() if got.shape == expected.shape else float("nan")
        allowed = TOLERANCE * expected.abs().max().item()
    except Exception as error:
        raise RuntimeError(
            f"model must be able to score four short sequences on {parameter.device} for the check of accelerate(), "
            f"but it raised {type(error).__name__}: {error}; move it to its device first, or pass check=False."
        ) from error
    if not difference <= allowed:
        raise ValueError(
            f"fused scores must equal those of model.{function.name} within {allowed:.3g} on four short sequences, got "
            f"a difference of {difference:.3g} (shapes {list(got.shape)} and {list(expected.shape)}); a changed "
            "model._similarity does this: leave such a model stock."
        )
