"""Inputs of alpha-entmax attention, and its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.entmax_attention import EntmaxStats, entmax_attention
from tilefold.testing import padding


@dataclasses.dataclass(frozen=True)
class EntmaxAttentionInputs(padding.Problem):
    """One problem for :func:`tilefold.ops.entmax_attention`, with the gradient that comes back.

    Attributes:
        q, k, v: ``[B, H, Nq, D]`` and ``[B, Hkv, Nk, D]``, or packed ``[T, H, D]``.
        dout: like ``q``.
        layout: ``key_padding_mask`` or ``cu_seqlens_q`` and ``cu_seqlens_k``, as keyword arguments.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    layout: dict[str, Any]


def entmax_attention_inputs(
    batch: int,
    heads: int,
    nq: int,
    dim: int,
    *,
    nk: int | None = None,
    kv_heads: int | None = None,
    layout: str = "full",
    correlated: bool = False,
    sharpness: float = 2.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> EntmaxAttentionInputs:
    """Random inputs, the same on every device.

    Args:
        batch, heads, nq, dim: B, H, the (longest) number of queries, D.
        nk: keys; by default as many as queries.
        kv_heads: by default as many as heads.
        layout: of the keys, one of :data:`tilefold.testing.padding.LAYOUTS`; all but ``"full"`` and
            ``"right"`` have a sequence without keys from B = 2 on.
        correlated: neighbouring keys are alike, so that few blocks are live.
        sharpness: standard deviation of the scores.

    ``ValueError`` for an unknown layout.
    """
    padding.check_layout(layout)
    generator = torch.Generator().manual_seed(seed)
    nk, kv_heads = nq if nk is None else nk, heads if kv_heads is None else kv_heads
    q = sharpness * torch.randn(batch, heads, nq, dim, generator=generator)
    k, v = (torch.randn(batch, kv_heads, nk, dim, generator=generator) for _ in range(2))
    if correlated:
        phase = 6.28 * torch.rand(kv_heads, 1, dim, generator=generator)
        speed = 0.12 * torch.randn(1, 1, dim, generator=generator)
        wave = 1.4 * torch.cos(phase + speed * torch.arange(max(nq, nk))[:, None])
        k = wave[:, :nk].expand(batch, -1, -1, -1).clone()
        q = (
            sharpness
            * wave[:, :nq]
            .repeat_interleave(heads // kv_heads, dim=0)
            .expand(batch, -1, -1, -1)
            .clone()
        )
    dout = torch.randn(batch, heads, nq, dim, generator=generator)
    if layout == "packed":
        inputs = _packed(q, k, v, dout, generator)
    else:
        given: dict[str, Any] = {}
        if layout != "full":
            mask = padding.drawn_mask(layout, batch, nk, generator)
            if layout != "right" and batch >= 2:
                mask[batch // 2] = False
            given["key_padding_mask"] = mask
        inputs = EntmaxAttentionInputs(q, k, v, dout, given)
    there = {name: value.to(device) for name, value in inputs.layout.items()}
    return dataclasses.replace(inputs.cast(dtype).to(device), layout=there)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    generator: torch.Generator,
) -> EntmaxAttentionInputs:
    kept_q, kept_k = (_kept(side, generator) for side in (q, k))
    packed = [
        side.transpose(1, 2)[kept]
        for side, kept in ((q, kept_q), (k, kept_k), (v, kept_k), (dout, kept_q))
    ]
    given = {
        "cu_seqlens_q": padding.offsets(kept_q.sum(1)),
        "cu_seqlens_k": padding.offsets(kept_k.sum(1)),
    }
    return EntmaxAttentionInputs(packed[0], packed[1], packed[2], packed[3], given)


def _kept(padded: Tensor, generator: torch.Generator) -> Tensor:
    kept = padding.drawn_mask("packed", padded.size(0), padded.size(2), generator)
    kept[0] = True
    if len(kept) >= 2:
        kept[len(kept) // 2] = False
    return kept


def entmax_attention_results(
    inputs: EntmaxAttentionInputs,
    *,
    needs: Sequence[str] = ("q", "k", "v"),
    dropout_seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """``out``, the statistics of every row, and the gradients ``dq``, ``dk``, ``dv``, ``dalpha``
    asked for.

    ``needs`` says which of q, k and v want a gradient; a tensor ``alpha`` always gets one.
    ``dropout_seed`` is that of dropout's generator; options are the operator's.
    """
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_(name in needs)
        for name in ("q", "k", "v")
    }
    if isinstance(options.get("alpha"), Tensor):
        leaves["alpha"] = options["alpha"] = options["alpha"].detach().requires_grad_()
    if options.get("dropout_p"):
        options["generator"] = torch.Generator(inputs.q.device).manual_seed(dropout_seed)
    result = entmax_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        **inputs.layout,
        **options,
        return_stats=True,
    )
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = result
    given = {
        name: value for name, value in EntmaxStats(*stats)._asdict().items() if value is not None
    }
    return {"out": out.detach(), **given, **padding.gradients(out, leaves, inputs.dout)}
