"""The similarities of ``MultiVectorEncoder`` computed by ``maxsim``: functions, and their installation on a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._sides import Side, scores_of_sides

TOLERANCE = 2**-6  # of the largest score: error of the stock function from rounding similarities to bf16

_ARGUMENTS = """

    Args:
        a: queries: a list of ``[Lq_i, D]`` tensors or arrays, as ``encode_query`` returns them; ``[Nq, Lq, D]`` padded;
            or one ``[Lq, D]``. Lists are packed, not padded.
        b: documents, likewise, of the same dtype.
        a_mask, b_mask: ``[Nq, Lq]`` and ``[Nd, Ld]``, or lists; nonzero = keep, and a floating ``a_mask`` weighs the
            similarities of its tokens. Without one, rows of zeros of a padded tensor are padding.
        chunk_elements: numbers of either side that are packed, or moved to ``device``, at a time; by default 100
            million. Similarities are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's tokens (at least 1).
        device: where to score; by default where the documents are, and that is where the scores come back to.
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        fp32 scores, {shape}. A document without a token scores -1e9 before any division.

    Raises:
        ValueError, TypeError: for shapes or dtypes that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """


class SimilarityFunction(Protocol):
    """A function of ``sentence_transformers.util.similarity`` with an argument ``impl``."""

    def __call__(
        self,
        a: Any,
        b: Any,
        a_mask: Any = None,
        b_mask: Any = None,
        chunk_elements: int | None = None,
        length_normalize: bool = ...,
        device: str | torch.device | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor: ...


def _function(name: str, pairing: str, mean: bool, summary: str) -> SimilarityFunction:
    """The function with this name: its pairs, its default of ``length_normalize``, its docstring."""

    def similarity(
        a: Any,
        b: Any,
        a_mask: Any = None,
        b_mask: Any = None,
        chunk_elements: int | None = None,
        length_normalize: bool = mean,
        device: str | torch.device | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor:
        queries, documents = Side("a", a, a_mask, weighted=True), Side("b", b, b_mask, weighted=False)
        return scores_of_sides(queries, documents, pairing, length_normalize, impl, chunk_elements, device)

    similarity.__name__ = similarity.__qualname__ = name
    similarity.__doc__ = summary + _ARGUMENTS.format(shape="``[Nq, Nd]``" if pairing == "all" else "``[N]``")
    return similarity


maxsim = _function("maxsim", "all", False, "MaxSim of every query with every document (ColBERT, arXiv 2004.12832).")
mean_maxsim = _function("mean_maxsim", "all", True, "``maxsim`` divided by the number of each query's tokens.")
maxsim_pairwise = _function("maxsim_pairwise", "aligned", False, "MaxSim of query ``i`` with document ``i``.")
mean_maxsim_pairwise = _function(
    "mean_maxsim_pairwise", "aligned", True, "``maxsim_pairwise`` divided by the number of each query's tokens."
)


class FusedSimilarity:
    """Replaces ``similarity`` or ``similarity_pairwise`` of one model, and reads its ``similarity_fn_name``.

    Args:
        model: the ``MultiVectorEncoder``.
        pairwise: which of the two methods.
        impl: implementation of :func:`tilefold.ops.maxsim`.
    """

    def __init__(self, model: Model, pairwise: bool, impl: str) -> None:
        self.model = model
        self.pairwise = pairwise
        self.impl = impl

    def __call__(self, embeddings1: Any, embeddings2: Any, **options: Any) -> Tensor:
        """Scores, with the keywords of the stock function."""
        mean = self.model.similarity_fn_name == "meanmaxsim"
        function = maxsim_pairwise if self.pairwise else maxsim
        return function(embeddings1, embeddings2, **{"length_normalize": mean, "impl": self.impl, **options})


def is_multi_vector(model: object) -> bool:
    """Whether ``model`` is a ``MultiVectorEncoder``, compared by name, because earlier versions do not have it."""
    return any(
        kind.__name__ == "MultiVectorEncoder" and kind.__module__.startswith("sentence_transformers.")
        for kind in type(model).__mro__
    )


def fuse_similarity(model: Model, impl: str, check: bool) -> None:
    """Put :class:`FusedSimilarity` on the instance.

    Raises:
        ValueError: if the model's methods were replaced, or the fused scores differ from its own.
        RuntimeError: if the model cannot run on its device.
    """
    names = ("similarity", "similarity_pairwise")
    stock = next(kind for kind in type(model).__mro__ if kind.__name__ == "MultiVectorEncoder")
    for name in names:
        if name in vars(model) or getattr(type(model), name) is not getattr(stock, name):
            raise ValueError(
                f"model must score with MultiVectorEncoder.{name}, got a {type(model).__name__} with another one; call "
                "tilefold.ops.maxsim in it."
            )
    fused = [FusedSimilarity(model, name == "similarity_pairwise", impl) for name in names]
    if check:
        for name, function in zip(names, fused, strict=True):
            _check(model, name, function)
    for name, function in zip(names, fused, strict=True):
        setattr(model, name, function)


def unfuse_similarity(model: Model) -> None:
    """Remove :class:`FusedSimilarity` from the instance, if it is there."""
    for name in ("similarity", "similarity_pairwise"):
        if isinstance(vars(model).get(name), FusedSimilarity):
            delattr(model, name)


def has_fused_similarity(model: object) -> bool:
    """Whether the instance scores with :class:`FusedSimilarity`."""
    return isinstance(vars(model).get("similarity"), FusedSimilarity)


def _check(model: Model, name: str, function: FusedSimilarity) -> None:
    """Compare both on a few vectors, on the model's device and in its dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(1))
    wave = torch.arange(10 * 16, dtype=torch.float32).sin().view(10, 16).to(parameter.device, parameter.dtype)
    queries, documents = [wave[:3], wave[3:4]], [wave[4:8], wave[8:]]
    try:
        with torch.no_grad():
            expected, got = getattr(model, name)(queries, documents), function(queries, documents)
        difference = (got - expected.float()).abs().max().item() if got.shape == expected.shape else float("nan")
        allowed = TOLERANCE * expected.abs().max().item()
    except Exception as error:
        raise RuntimeError(
            f"model must be able to score four short sequences on {parameter.device} for the check of accelerate(), "
            f"but it raised {type(error).__name__}: {error}; move it to its device first, or pass check=False."
        ) from error
    if not difference <= allowed:
        raise ValueError(
            f"fused scores must equal those of model.{name} within {allowed:.3g} on four short sequences, got a "
            f"difference of {difference:.3g} (shapes {list(got.shape)} and {list(expected.shape)}); a changed "
            "model._similarity does this: leave such a model stock."
        )
