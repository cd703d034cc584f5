"""Alpha-entmax, public functions: checks and dispatch."""

from __future__ import annotations

import importlib
import math
from functools import partial

import torch
from torch import Tensor

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_dtype, check_same_device, check_tensor
from tilefold.ops._shared.entmax_root import alpha_number, check_alphas
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.entmax import _reference, _tiled
from tilefold.ops.entmax._problem import (
    ALPHA_IS_TENSOR,
    EntmaxOptions,
    EntmaxSaved,
    EntmaxTensors,
    outputs,
)

ENTMAX = Operator(
    "entmax",
    EntmaxTensors,
    EntmaxOptions,
    EntmaxSaved,
    results=("p", "support"),
    outputs=outputs,
    gradients={"x": "p", "alpha": "alpha"},
    plans=partial(importlib.import_module, "tilefold.ops.entmax.plans"),  # needs Triton
    tiled=_tiled,
    reference=_reference.entmax,
    check_values=lambda tensors, options: check_alphas(tensors.alpha),
)


def chosen_impl(x: Tensor, impl: str = "auto") -> str:
    """Return the implementation of ``entmax(x, ..., impl=impl)``.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that can run the
    kernels, and else ``"tiled"``.
    """
    return ENTMAX.chosen_impl(x, impl)


def entmax(
    x: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    return_support_size: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute alpha-entmax along a dimension: a softmax whose small entries are exactly 0.

    Alpha-entmax (Peters et al., arXiv 1905.05702) is
    ``p_i = [(alpha - 1) x_i - tau]_+^(1 / (alpha - 1))`` with the ``tau`` for which the row sums to
    1. Alpha = 1 is softmax, and alpha = 2 is sparsemax. fp16 and bf16 are computed in fp32.

    The root is found by Halley's method on the norm of the row, safeguarded by bisection: the
    hybrid of AdaSplash (arXiv 2502.12082), changed to converge for any row. Probabilities are then
    divided by their sum. A number that is added to all entries of a row has no influence but on
    rounding.

    An entry of ``-inf`` gets probability 0. A row of ``-inf`` only is 0, without a gradient. A row
    with NaN or ``+inf`` is NaN. Gradients are those of Correia et al. (arXiv 1909.00015), in a form
    that is finite down to alpha = 1. Only ``impl="reference"`` can be differentiated twice.

    Args:
        x: scores; fp16, bf16, fp32 or fp64.
        alpha: a number in [1, 2], or a differentiable tensor that broadcasts to ``x`` with size 1
            in ``dim`` (one alpha per row or head, or for all). On a GPU, where a check would
            synchronise, a tensor's value outside [1, 2] makes its rows NaN instead of raising an
            error.
        dim: the dimension along which probabilities sum to 1.
        return_support_size: whether to return the number of positive entries of each row, too.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see
            :func:`tilefold.ops.entmax.chosen_impl`.

    Returns:
        Probabilities shaped like ``x``, in its dtype. With ``return_support_size`` also the int32
        sizes, of that shape without ``dim``.

    Raises:
        TypeError: if an argument is not a tensor, or has an unsupported dtype.
        ValueError: if alpha is outside [1, 2], or shapes, devices or ``dim`` are inconsistent.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, -1.0])
        >>> entmax(scores, alpha=1.5)  # the smallest entry is exactly 0
        tensor([0.8307, 0.1693, 0.0000])
        >>> entmax(scores, alpha=1.0)  # softmax
        tensor([0.7054, 0.2595, 0.0351])
    """
    if isinstance(alpha, Tensor):
        tensors = EntmaxTensors(x, alpha)
        alpha_value = ALPHA_IS_TENSOR
    else:
        tensors = EntmaxTensors(x, None)
        alpha_value = alpha
    p, support = ENTMAX(tensors, (alpha_value, dim), impl, _check_arguments)
    if support is None:  # the reference returns probabilities only
        support = (p > 0).sum(dim=-1, dtype=torch.int32)
    moved_shape = x.movedim(dim, -1).shape
    p = p.view(moved_shape).movedim(-1, dim)
    return (p, support.view(moved_shape[:-1])) if return_support_size else p


def sparsemax(x: Tensor, dim: int = -1, *, impl: str = "auto") -> Tensor:
    """Sparsemax (Martins and Astudillo, arXiv 1602.02068): :func:`entmax` with alpha = 2.

    Args:
        x: scores; fp16, bf16, fp32 or fp64.
        dim: the dimension along which probabilities sum to 1.
        impl: implementation; see :func:`entmax`.

    Returns:
        The Euclidean projection of every row onto the probability simplex, shaped like ``x``.

    Raises:
        TypeError, ValueError, RuntimeError: as in :func:`entmax`.

    Examples:
        >>> import torch
        >>> sparsemax(torch.tensor([0.5, 0.3, -1.0]))
        tensor([0.6000, 0.4000, 0.0000])
    """
    # without return_support_size, the result is a tensor
    p = entmax(x, 2.0, dim, impl=impl)
    return p if isinstance(p, Tensor) else p[0]


def _check_arguments(tensors: EntmaxTensors, alpha_value: float, dim: int) -> Checked:
    """Check everything that can be checked without reading a value of a tensor.

    Args:
        tensors: scores of any shape, and a tensor of alphas or ``None``.
        alpha_value: the caller's alpha if it is a number.
        dim: the dimension along which probabilities sum to 1.

    Returns:
        The options of the operator, and the function that reshapes the tensors to the 2-D rows that
        implementations take.
    """
    x, alpha = tensors
    check_tensor("x", x)
    check_dtype("x", x, FLOAT_DTYPES, "cast it with .float() or another of these.")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got shape []; use x.view(1).")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim must be an integer in [{-x.dim()}, {x.dim() - 1}] for x of {x.dim()} dims, got "
            f"{dim!r}.",
        )
    if alpha is None:
        options = EntmaxOptions(alpha_number(alpha_value))
    else:
        _check_alpha(alpha, x, dim)
        options = EntmaxOptions(ALPHA_IS_TENSOR)
    return Checked(options, prepare=partial(_as_rows, dim))


def _as_rows(dim: int, tensors: EntmaxTensors) -> EntmaxTensors:
    """Return ``x`` as rows ``[R, n]`` along ``dim``, and the alphas of the rows ``[R]``."""
    x, alpha = tensors
    moved = x.movedim(dim, -1)
    *outer_shape, row_length = moved.shape
    if alpha is not None:
        # As `_with_leading_ones`, but inline: every call of the operator runs this, and a function
        # call takes time.
        alpha = alpha.view((1,) * (x.dim() - alpha.dim()) + tuple(alpha.shape))
        alpha = alpha.movedim(dim, -1).expand(*outer_shape, 1).reshape(-1)
    return EntmaxTensors(moved.reshape(math.prod(outer_shape), row_length), alpha)


def _with_leading_ones(tensor: Tensor, dims: int) -> tuple[int, ...]:
    """Return a shape of ``dims`` dimensions, with leading sizes of 1 as broadcasting adds them."""
    return (1,) * (dims - tensor.dim()) + tuple(tensor.shape)


def _check_alpha(alpha: Tensor, x: Tensor, dim: int) -> None:
    """Check that a tensor of alphas broadcasts to one alpha for each row of ``x``.

    Its dtype and device are checked, too.

    Args:
        alpha: alphas, which must broadcast to ``x`` with size 1 in ``dim``.
        x: scores.
        dim: the dimension of ``x`` along which probabilities are normalized.
    """
    check_dtype("alpha", alpha, FLOAT_DTYPES, "cast it with .float().")
    check_same_device("x", x, {"alpha": alpha})
    shape = _with_leading_ones(alpha, x.dim())
    target_shape = list(x.shape)
    target_shape[dim] = 1
    broadcasts = len(shape) == x.dim() and all(
        # Not `size in (1, target)`: torch.compile answers that without looking at symbolic sizes.
        size == 1 or size == target  # noqa: PLR1714
        for size, target in zip(shape, target_shape, strict=True)
    )
    if not broadcasts:
        raise ValueError(
            f"alpha must broadcast to {target_shape} (x with size 1 in dim {dim}), got shape "
            f"{list(alpha.shape)}; reshape it, for instance to [heads, 1, 1].",
        )
