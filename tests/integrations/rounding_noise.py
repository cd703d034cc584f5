"""How far rounding may carry the results of a whole model: Monte Carlo arithmetic, whatever the
order of summation.

An operation errs with a standard deviation of at most ``rounding_scale`` (derived in
:mod:`tilefold.testing`), for any order of summation and with fused multiply-adds or without. Run in
fp64 with every operation perturbed that much, at random, a model shows what such errors become at
its end: through layers, normalisations and cancelling sums, forward and backward (Parker's Monte
Carlo arithmetic, around an exact run). An implementation is right if it is no further from the
exact result than ``CONFIDENCE`` times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.testing import CONFIDENCE, rounding_scale

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
SUMS = {"sum", "mean", "embedding_dense_backward"}
# what moves or chooses numbers rounds nothing
EXACT = {
    "abs",
    "amax",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy",
    "_to_copy",
    "embedding",
    "fill",
    "full",
    "full_like",
    "gather",
    "index",
    "index_put",
    "index_select",
    "lift_fresh",
    "masked_fill",
    "max",
    "min",
    "neg",
    "new_zeros",
    "ones_like",
    "relu",
    "repeat",
    "scalar_tensor",
    "scatter",
    "select_backward",
    "slice_backward",
    "stack",
    "threshold_backward",
    "topk",
    "value_selecting_reduction_backward",
    "where",
    "zeros",
    "zeros_like",
}


class RoundingNoise(TorchDispatchMode):
    """Within it, fp64 operations err as those of ``dtype`` may."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        first = outs[0]
        if name in EXACT or not isinstance(first, Tensor) or first.dtype != torch.float64:
            return out
        if first.untyped_storage().data_ptr() in given:  # a view of an operand, or written into it
            return out
        for result, scale in zip(
            outs,
            self.scales(name, func, args, kwargs or {}, outs),
            strict=False,
        ):
            if result is not None and scale is not None:
                noise = scale * torch.randn(result.shape, generator=self.generator)
                result.add_(
                    torch.where(noise.isfinite(), noise, 0.0),
                )  # masks add -inf, or the lowest number
        return out

    def scales(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        outs: list[Any],
    ) -> list[Tensor | None]:
        """The standard deviation of each output's rounding error."""
        out = outs[0]
        if name in PRODUCTS or name in SUMS:
            squares = func(
                *(a * a if isinstance(a, Tensor) and a.is_floating_point() else a for a in args),
                **kwargs,
            )
            terms = (
                args[0].numel()
                if name == "embedding_dense_backward"
                else args[0].numel() // max(out.numel(), 1)
            )
            if name in PRODUCTS:
                terms = args[-2].size(-1) + len(args) - 2  # and the addition of a third operand
            return [self.sum(out, squares / terms if name == "mean" else squares, terms)]
        if name in ("_softmax", "_safe_softmax"):
            return [self.once(out, out.size(args[1]))]
        if name == "_softmax_backward_data":
            grad, weights, dim = args[:3]
            shares = grad * weights
            total, squares = shares.sum(dim, keepdim=True), (shares * shares).sum(dim, keepdim=True)
            return [weights * (self.once(grad) + self.sum(total, squares, out.size(dim)))]
        if name == "native_layer_norm":
            x, _, weight = args[:3]
            error = outs[2] * (self.once(x) + self.mean(x))
            return [
                (error if weight is None else error * weight.abs()) + self.once(out, x.size(-1)),
                None,
                None,
            ]
        if name == "native_layer_norm_backward":
            return self.normalization_gradients(*args[:6])
        return [self.once(result) if isinstance(result, Tensor) else None for result in outs]

    def normalization_gradients(
        self,
        grad: Tensor,
        x: Tensor,
        shape: Any,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
    ) -> list[Tensor | None]:
        """Of ``rstd * (g - mean(g) - unit * mean(g * unit))`` with ``unit = (x - mean) * rstd``,
        weight and bias.
        """
        unit = (x - mean) * rstd
        wide = grad if weight is None else grad * weight
        of_x = rstd * (self.once(wide) + self.mean(wide) + unit.abs() * self.mean(wide * unit))
        rows = [part.reshape(-1, x.size(-1)) for part in (grad * unit, grad)]
        return [of_x, *(self.sum(part.sum(0), (part * part).sum(0), len(part)) for part in rows)]

    def sum(self, total: Tensor, squares: Tensor | float, terms: int) -> Tensor:
        return rounding_scale(total, squares, terms, self.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Of the mean over the last dimension."""
        n = x.size(-1)
        return self.sum(x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True) / n, n)

    def once(self, result: Tensor, operations: int = 1) -> Tensor:
        return rounding_scale(result, 0.0, operations, self.dtype)


def exact_and_allowed(
    run: Callable[[], dict[str, Tensor]],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What ``run`` gives in fp64, and the Euclidean distance from it that rounding in ``dtype``
    allows each tensor.
    """
    with sdpa_kernel(SDPBackend.MATH):  # in operations whose rounding is known
        exact = run()
        with RoundingNoise(
            dtype,
            seed=0,
        ):  # once: tensors have 32 entries and more, so a norm is hardly left to chance
            noisy = run()
    return exact, {
        name: CONFIDENCE * float((noisy[name] - value).norm()) for name, value in exact.items()
    }
