"""The quantised head: ``tilefold::lsr_head_max_fp8``, for inference only."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import triton_or_tiled
from tilefold.ops._shared.impl import settled
from tilefold.ops._shared.library import define_op, is_plain, run
from tilefold.ops.lsr_head import _quantized
from tilefold.ops.lsr_head._layout import Plans, batch_size, length_bound
from tilefold.ops.lsr_head._library.common import LAYOUT, OPTIONS
from tilefold.ops.lsr_head._library.cu_seqlens import check_cu_seqlens, looks_are_free
from tilefold.ops.lsr_head._quantized import QUANTIZED_HEAD, QuantizedWeight, chosen_quantized_impl


@define_op(
    "lsr_head_max_fp8",
    f"(Tensor hidden, Tensor values, Tensor scale, Tensor? bias, {LAYOUT}, {OPTIONS}, ScalarType out_dtype, str impl)"
    " -> Tensor",
)
def _forward(
    hidden: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    impl: str,
    plans: Plans | None = None,
) -> Tensor:
    impl = settled(impl, chosen_quantized_impl(hidden, impl))
    if cu_seqlens is not None and looks_are_free(hidden, impl):
        check_cu_seqlens(cu_seqlens, hidden.size(0))
    place = (attention_mask, cu_seqlens)

    def tiled() -> Tensor:
        weight = QuantizedWeight(values, scale)
        return _quantized.max_forward(hidden, weight, bias, *place, activation, logit_scale, out_dtype)

    def kernels() -> Tensor:
        from tilefold.ops.lsr_head import _triton

        scores, _ = _triton.max_forward(
            hidden,
            values,
            bias,
            attention_mask,
            cu_seqlens,
            activation,
            logit_scale,
            out_dtype,
            hidden.dtype,
            with_winners=False,
            length_bound=length_bound(hidden),
            weight_scale=scale,
            plans=plans,
        )
        return scores

    return triton_or_tiled(QUANTIZED_HEAD, impl, hidden.device, kernels, tiled)


@torch.library.register_fake("tilefold::lsr_head_max_fp8")
def _(
    hidden: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    impl: str,
) -> Tensor:
    return hidden.new_empty((batch_size(hidden, cu_seqlens), values.size(0)), dtype=out_dtype)


def quantized_max_head(
    hidden: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    impl: str,
    plans: Plans | None = None,
) -> Tensor:
    """Max-pooled scores ``[B, V]`` of a quantised weight; no gradient."""
    place = (attention_mask, cu_seqlens)
    arguments = (hidden, weight.values, weight.scale, bias, *place, activation, logit_scale, out_dtype, impl)
    if is_plain(hidden, weight.values, weight.scale, bias, *place):
        return run(_forward, *arguments, plans)  # type: ignore[no-any-return]
    return torch.ops.tilefold.lsr_head_max_fp8(*arguments)  # type: ignore[no-any-return]
