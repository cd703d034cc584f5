"""Error budgets for tests and benchmarks.

Random inputs of an operator are in the module with its name.

**Budgets.** An error is ``||out - reference|| / ||reference||`` against the reference in fp64 on
the same, already rounded inputs. What a dtype allows follows from its unit roundoff ``u`` (half the
distance from 1 to the next number):

* ``"forward"``: products accumulate in fp32 and the score is rounded once, which is at most ``u``
  for every entry, so for the norm too. The fp32 work before it costs ``sqrt(D) * 2^-24`` times the
  condition of the products: 1e-5 covers D up to 4,096 at a condition of 2.
* ``"gradient"``: three roundings in a row: the saved score (from which the slope is taken), the
  logit's gradient, and the result. Rounding errors of many entries are independent, with root mean
  square 0.41 u, so three add up to 0.7 u; the slope of a score y multiplies the first by up to
  about 2 at usual scores: ``1.3 u`` in all, 5e-3 in bf16.
* ``"gradient_bound"``: the same roundings in a tensor that is too small to average (fewer than some
  hundred entries): the worst cases add up, ``4 u``.

A slope taken from a rounded score y is off by ``c u`` with ``c = |y s'(y) / s(y)|``, s(y) the
slope: ``y`` for log1p_relu, ``y (1 + e^y)`` for log1p_log1p_relu, below 1 for softplus, 0 for relu
and for none. The two gradient budgets are those of ``c = 2``; for larger ones they are ``1.3
sqrt((c^2 + 2) / 6) u`` with the root mean square of c over the entries, weighted by their
gradients, and ``(c + 2) u`` with the largest.

**Sums in any order.** Whatever the order of its additions, and with fused multiply-adds or without,
a sum of ``n`` products (or numbers) ``x_i`` is off by at most ``n u / (1 - n u) * sum |x_i|``
(Higham, *Accuracy and Stability of Numerical Algorithms*, 3.1).

If roundings are independent and have mean zero, an error has the variance ``u^2`` times the sum of
the squared partial sums. Let ``S`` be the sum and ``Q`` the sum of the squares. In an order that
does not depend on the values, the square of the k-th partial sum is on average at most
``(k / n)^2 S^2 + k (1 - k / n) / n * Q``. All of them add up to no more than
``n (S^2 / 3 + Q / 6)`` and the contribution of the last terms.

So ``u sqrt(n (S^2 + Q))`` bounds the standard deviation, with a factor of two in reserve for
roundings that are not quite independent.
:func:`rounding_scale` computes it in fp64. Comparisons allow ``CONFIDENCE = 8`` standard deviations
(two errors in ``10^15`` by a normal distribution).

In a norm over many entries the squares average, and products of random rows have ``||S|| =
||Q^(1/2)||``. One standard deviation is then ``u sqrt(2 D)``, 5.4e-6 at ``D = 4,096``, from which
the 1e-5 of the accumulation above follows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# value of poisoned integers, an invalid index into a small tensor
SENTINEL = 113
# error of sums of products in fp32
_ACCUMULATION = 1e-5
# error of sums of products in fp64, whose roundoff is 2^-29 times as large, with some reserve
_FP64_ACCUMULATION = 1e-13
# standard deviations of rounding that a comparison allows
CONFIDENCE = 8.0
# relative error of an activation's slope divided by that of the score, at usual scores
USUAL_SENSITIVITY = 2.0


def budget(
    dtype: torch.dtype,
    kind: str = "forward",
    *,
    sensitivity: float = USUAL_SENSITIVITY,
) -> float:
    """Return the largest relative error that correct results of ``dtype`` may have.

    It is ``factor * u`` plus the error of sums in fp32 (in fp64 for fp64). ``u`` is the unit
    roundoff: half the distance from 1 to the next number. The factor depends on the kind and on the
    sensitivity c:

    * ``"forward"``: 1, since a result is rounded once;
    * ``"gradient"``: ``1.3 sqrt((c^2 + 2) / 6)``, three independent roundings of many entries;
    * ``"gradient_bound"``: ``c + 2``, the worst case of three roundings.

    Args:
        dtype: dtype of the scores, or of the gradient.
        kind: ``"forward"``, ``"gradient"`` or ``"gradient_bound"``.
        sensitivity: c, the relative error of the activation's slope divided by the relative error
            of the score from which the slope is computed. Numbers below 2 are raised to 2.

    Returns:
        The largest allowed ``||out - reference|| / ||reference||``.

    Raises:
        ValueError: for an unknown kind.

    Examples:
        >>> import torch
        >>> budget(torch.bfloat16) < budget(torch.bfloat16, "gradient")
        True
    """
    c = max(sensitivity, USUAL_SENSITIVITY)
    factors = {
        "forward": 1.0,
        "gradient": 1.3 * math.sqrt((c**2 + 2) / 6),
        "gradient_bound": c + 2,
    }
    if kind not in factors:
        raise ValueError(f"kind must be one of {', '.join(map(repr, factors))}, got {kind!r}.")
    unit_roundoff = torch.finfo(dtype).eps / 2
    accumulation = _FP64_ACCUMULATION if dtype == torch.float64 else _ACCUMULATION
    # a gradient is computed by two sums: the logits, and the sum over the entries that they select
    n_sums = 1 if kind == "forward" else 2
    return factors[kind] * unit_roundoff + n_sums * accumulation


def rounding_scale(
    total: Tensor,
    squares: Tensor | float,
    terms: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Bound the standard deviation of the rounding errors of sums of n terms, in any order.

    The bound is ``u sqrt(n (S^2 + Q))`` for a sum S, the sum Q of the squares of its terms, and the
    unit roundoff u. The docstring of this module derives it.

    Args:
        total: the exact sums S, of any shape.
        squares: the sums Q of the squares of the terms.
        terms: number n of terms of a sum.
        dtype: the dtype of the additions, which determines u.

    Returns:
        The bound for each sum, with the shape of ``total``.
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    return math.sqrt(terms) * unit_roundoff * (total * total + squares).sqrt()


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Compute ``||out - reference|| / ||reference||`` in fp64.

    The error is 0 if both norms are 0. It is infinite if only the reference is zero, or if any
    value is not finite.

    Args:
        out: the result.
        reference: the exact result, of the same shape.

    Raises:
        ValueError: if the shapes differ.

    Examples:
        >>> import torch
        >>> relative_error(torch.tensor([1.1, 0.0]), torch.tensor([1.0, 0.0])) < 0.11
        True
    """
    if out.shape != reference.shape:
        raise ValueError(
            f"out must have the shape of reference {list(reference.shape)}, got {list(out.shape)}.",
        )
    reference = reference.detach().double()
    difference = float((out.detach().to(reference) - reference).norm())
    scale = float(reference.norm())
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def assert_within_budget(
    out: Tensor,
    reference: Tensor,
    dtype: torch.dtype | None = None,
    kind: str = "forward",
    *,
    name: str = "result",
    sensitivity: float = USUAL_SENSITIVITY,
) -> float:
    """Raise ``AssertionError`` if ``out`` is further from ``reference`` than :func:`budget` allows.

    Args:
        out: the result.
        reference: the exact result, of the same shape.
        dtype: the dtype whose budget applies. By default the dtype of ``out``.
        kind: ``"forward"``, ``"gradient"``, or ``"gradient_bound"`` for small gradients.
        name: name of ``out`` in the error message.
        sensitivity: relative error of the activation's slope divided by that of the score.

    Returns:
        The relative error.

    Examples:
        >>> import torch
        >>> reference = torch.randn(50, dtype=torch.float64)
        >>> error = assert_within_budget(reference.bfloat16(), reference)
        >>> assert_within_budget(1.1 * reference.bfloat16(), reference)
        Traceback (most recent call last):
            ...
        AssertionError: ...
    """
    dtype = out.dtype if dtype is None else dtype
    allowed = budget(dtype, kind, sensitivity=sensitivity)
    error = relative_error(out, reference)
    if error <= allowed:
        return error
    # The message names the entry with the largest error. A NaN counts as infinite.
    out_fp64 = out.detach().to(reference.device, torch.float64)
    distance = (out_fp64 - reference.detach().double()).abs()
    distance = torch.where(distance.isnan(), math.inf, distance)
    position = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    dtype_name = str(dtype).removeprefix("torch.")
    n_not_finite = int((~out_fp64.isfinite()).sum())
    raise AssertionError(
        f"{name}: relative error {error:.2e} is over the {kind} budget {allowed:.1e} of "
        f"{dtype_name}; furthest at {position}: {out_fp64[position].item():.6g} instead of "
        f"{reference[position].item():.6g}, shape {list(out.shape)}, {n_not_finite} not finite.",
    )


@contextlib.contextmanager
def nan_poisoned_empty() -> Iterator[None]:
    """Fill the results of ``torch.empty`` and its variants with NaN, or with 113 for integers.

    An element of the output that a kernel forgets to write is then NaN, and not by accident 0.

    The context manager replaces functions of torch, so that it is not thread-safe.
    """

    def poison(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that allocates a tensor like ``function``, and fills it."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = function(*args, **kwargs)
            if tensor.dtype != torch.bool:
                tensor.detach().fill_(math.nan if tensor.dtype.is_floating_point else SENTINEL)
            return tensor

        return call

    functions: list[tuple[Any, str]] = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ]
    originals = [getattr(owner, name) for owner, name in functions]
    try:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, poison(original))
        yield
    finally:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, original)
