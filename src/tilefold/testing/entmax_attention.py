"""Inputs of alpha-entmax attention, its results, and their comparison with the reference in fp64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.entmax_attention import EntmaxStats, entmax_attention
from tilefold.testing import assert_within_budget, budget, relative_error
from tilefold.testing.padding import LAYOUTS


@dataclasses.dataclass(frozen=True)
class EntmaxAttentionInputs:
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

    def cast(self, dtype: torch.dtype) -> EntmaxAttentionInputs:
        """This problem in ``dtype``."""
        fields = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "dout")}
        return dataclasses.replace(self, **fields)


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
        layout: ``"full"`` (no mask), ``"right"`` or ``"left"`` padding, ``"holes"`` anywhere (both with a sequence
            without keys from B = 2 on), or ``"packed"`` (with an empty sequence from B = 2 on).
        correlated: neighbouring keys are alike, so that few blocks are live.
        sharpness: standard deviation of the scores.
        dtype, device: of the tensors.
        seed: of the random numbers.

    Raises:
        ValueError: for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")
    generator = torch.Generator().manual_seed(seed)
    nk, kv_heads = nq if nk is None else nk, heads if kv_heads is None else kv_heads
    q = sharpness * torch.randn(batch, heads, nq, dim, generator=generator)
    k, v = (torch.randn(batch, kv_heads, nk, dim, generator=generator) for _ in range(2))
    if correlated:
        phase = 6.28 * torch.rand(kv_heads, 1, dim, generator=generator)
        speed = 0.12 * torch.randn(1, 1, dim, generator=generator)
        wave = 1.4 * torch.cos(phase + speed * torch.arange(max(nq, nk))[:, None])
        k = wave[:, :nk].expand(batch, -1, -1, -1).clone()
        q = sharpness * wave[:, :nq].repeat_interleave(heads // kv_heads, dim=0).expand(batch, -1, -1, -1).clone()
    dout = torch.randn(batch, heads, nq, dim, generator=generator)
    tensors = [t.to(device, dtype) for t in (q, k, v, dout)]
    if layout == "packed":
        return _packed(tensors, generator)
    given: dict[str, Any] = {}
    if layout != "full":
        lengths = torch.randint(1, nk + 1, (batch, 1), generator=generator)
        places = torch.arange(nk)
        mask = places < lengths if layout == "right" else places >= nk - lengths
        if layout == "holes":
            mask = torch.rand(batch, nk, generator=generator) < 0.6
        if layout != "right" and batch >= 2:
            mask[batch // 2] = False
        given["key_padding_mask"] = mask.to(device)
    return EntmaxAttentionInputs(tensors[0], tensors[1], tensors[2], tensors[3], given)


def _packed(tensors: list[Tensor], generator: torch.Generator) -> EntmaxAttentionInputs:
    parts: list[Tensor] = []
    offsets: list[Tensor] = []
    for sides in (tensors[:1], tensors[1:3], tensors[3:]):
        batch, longest = sides[0].size(0), sides[0].size(2)
        if len(offsets) < 2:
            lengths = torch.randint(1, longest + 1, (batch,), generator=generator)
            lengths[0] = longest
            if batch >= 2:
                lengths[batch // 2] = 0
            offsets.append(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
        else:
            lengths = offsets[0].diff()
        for tensor in sides:
            rows = [tensor[b, :, : int(n)].transpose(0, 1) for b, n in enumerate(lengths)]
            parts.append(torch.cat(rows).contiguous())
    device = tensors[0].device
    given = {"cu_seqlens_q": offsets[0].int().to(device), "cu_seqlens_k": offsets[1].int().to(device)}
    return EntmaxAttentionInputs(parts[0], parts[1], parts[2], parts[3], given)


def entmax_attention_results(
    inputs: EntmaxAttentionInputs, *, needs: Sequence[str] = ("q", "k", "v"), dropout_seed: int = 0, **options: Any
) -> dict[str, Tensor]:
    """``out``, the statistics of every row, and the gradients ``dq``, ``dk``, ``dv``, ``dalpha`` asked for.

    Args:
        inputs: the problem.
        needs: which of q, k and v want a gradient; a tensor ``alpha`` always gets one.
        dropout_seed: of the generator that dropout draws its seed from.
        options: of :func:`tilefold.ops.entmax_attention`.
    """
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in needs) for name in ("q", "k", "v")}
    if isinstance(options.get("alpha"), Tensor):
        leaves["alpha"] = options["alpha"] = options["alpha"].detach().requires_grad_()
    if options.get("dropout_p"):
        options["generator"] = torch.Generator(inputs.q.device).manual_seed(dropout_seed)
    result = entmax_attention(leaves["q"], leaves["k"], leaves["v"], **inputs.layout, **options, return_stats=True)
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = result
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), inputs.dout.to(out.dtype)) if wanted else ()
    given = {name: value for name, value in EntmaxStats(*stats)._asdict().items() if value is not None}
    found = {"out": out.detach(), **given}
    return found | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


def assert_entmax_attention_matches(
    inputs: EntmaxAttentionInputs,
    *,
    kind: str = "gradient_bound",
    needs: Sequence[str] = ("q", "k", "v"),
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation and hold its results to their budgets; return them.

    The output passes two roundings in 16 bits, of the weights and of itself, and gradients the rounding of a second
    output more: they are held to the budget ``kind``, the output to ``"gradient"``. The gradient of alpha is a small
    difference of large sums, so its budget is ten times that.
    """
    results = entmax_attention_results(inputs, needs=needs, **options)
    exact = dict(options, impl="reference")
    if isinstance(exact.get("alpha"), Tensor):
        exact["alpha"] = exact["alpha"].double()
    truth = entmax_attention_results(inputs.cast(torch.float64), needs=needs, **exact)
    if results.keys() != truth.keys():
        raise AssertionError(f"results must be {list(truth)}, got {list(results)}.")
    dtype = inputs.q.dtype
    assert_within_budget(results["out"], truth["out"], kind="gradient", name="out")
    if float(results["residual"].max()) > 1e-4:
        raise AssertionError(f"residual {float(results['residual'].max()):.1e} is over 1e-4.")
    for name in ("dq", "dk", "dv"):
        if name in results and float(truth[name].norm()) > 1e-9 * math.sqrt(truth[name].numel()):
            assert_within_budget(results[name], truth[name], dtype, kind, name=name)
    if "dalpha" in results:
        error, allowed = relative_error(results["dalpha"], truth["dalpha"]), 10 * budget(dtype, kind)
        if error > allowed:
            raise AssertionError(f"dalpha: relative error {error:.1e} is over {allowed:.1e}.")
    return results
