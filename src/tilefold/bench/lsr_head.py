"""The benchmark of ``tilefold.ops.lsr_head``: shapes, inputs, floor and gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench._lsr_head_baselines import BASELINES, runnable_head
from tilefold.bench._lsr_head_gate import LSRHeadGate
from tilefold.bench.registry import (
    DTYPES,
    BenchCase,
    BenchSpec,
    Implementation,
    Phase,
    Requirement,
    Runnable,
    Work,
)
from tilefold.ops._shared.impl import resolve_impl

_SPARSE_ACTIVE = 0.02  # share of positive scores that "2pct" aims at, that of a trained SPLADE model
_QUANTILE_COLUMNS = 256
_RAGGED_SHARES = (0.02, 0.64)  # sequence lengths as a share of S, evenly spread: 33% of the tokens are valid


@dataclass(frozen=True)
class LSRHeadInputs:
    """Inputs of one case, all on one device.

    Attributes:
        hidden: ``[B, S, D]``, requires a gradient; padding holds random numbers too.
        weight: ``[V, D]``, requires a gradient, scaled so that logits are close to N(0, 1).
        bias: ``[V]``, requires a gradient.
        attention_mask: ``[B, S]`` int64, padded on the right.
        grad_output: ``[B, V]``.
        active: share of positive scores, measured on a sample of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    attention_mask: Tensor
    grad_output: Tensor
    active: float

    @property
    def valid_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.attention_mask.sum().item())


def _attention_mask(case: BenchCase, device: torch.device, generator: torch.Generator) -> Tensor:
    B, S = case.dims["B"], case.dims["S"]
    if not case.variant.startswith("ragged"):
        return torch.ones(B, S, dtype=torch.int64, device=device)
    shares = torch.linspace(*_RAGGED_SHARES, B, device=device)
    order = torch.randperm(B, generator=generator, device=device)
    lengths = (shares[order] * S).round().long().clamp(min=1)
    return (torch.arange(S, device=device)[None, :] < lengths[:, None]).long()


def _sampled_maxima(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
    """``[B, C]`` fp32 maxima over valid tokens of the logits of some vocabulary entries."""
    logits = hidden.float() @ weight[columns].float().T + bias[columns].float()
    return logits.masked_fill(~mask.bool()[:, :, None], float("-inf")).amax(dim=1)


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> LSRHeadInputs:
    """Random inputs of ``case``; ``"2pct"`` variants shift the bias until 2% of the scores are positive."""
    B, S, D, V = (case.dims[name] for name in "BSDV")
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden = normal(B, S, D).to(dtype)
    weight = normal(V, D).mul_(D**-0.5).to(dtype)
    bias = normal(V).mul_(0.1)
    mask = _attention_mask(case, device, generator)
    columns = torch.randint(0, V, (min(_QUANTILE_COLUMNS, V),), generator=generator, device=device)
    if case.variant.endswith("2pct"):
        maxima = _sampled_maxima(hidden, weight, bias, mask, columns)
        kept = max(1, round(_SPARSE_ACTIVE * maxima.numel()))
        bias -= maxima.flatten().topk(kept).values[-1]
    bias = bias.to(dtype)
    active = (_sampled_maxima(hidden, weight, bias, mask, columns) > 0).float().mean().item()
    grad_output = normal(B, V).to(dtype)
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    return LSRHeadInputs(hidden, weight, bias, mask, grad_output, active)


def make_probe(case: BenchCase, device: torch.device, seed: int = 0) -> LSRHeadInputs:
    """The case with tiny dimensions: loads libraries and thread pools, allocates next to nothing."""
    tiny = BenchCase("probe", case.device, case.dtype, {"B": 2, "S": 8, "D": 32, "V": 96}, case.variant)
    return make_inputs(tiny, device, seed)


def work(case: BenchCase, inputs: LSRHeadInputs, phase: Phase) -> Work:
    """Least work: forward multiplies valid tokens with the vocabulary; backward moves rows, once each.

    Backward reads the scores' gradient, the scores and a two-byte winner, the hidden rows and the weight rows that have
    an active score, and writes all of both gradients; its arithmetic is negligible.
    """
    B, D, V = case.dims["B"], case.dims["D"], case.dims["V"]
    item = inputs.hidden.element_size()
    tokens = inputs.valid_tokens
    flops = 2.0 * tokens * D * V
    nbytes = float(item * (tokens * D + V * D + V + B * V))
    if phase == "forward_backward":
        active_rows = V * (1 - (1 - inputs.active) ** B)
        nbytes += 2 * B * V  # the winners, written by forward
        nbytes += B * V * (2 * item + 2) + item * D * (tokens + active_rows)
        nbytes += item * (inputs.hidden.numel() + V * D + V)
    return Work(flops, nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    B, S, D, V = (case.dims[name] for name in "BSDV")
    item = DTYPES[case.dtype].itemsize
    logits = B * S * V * item
    gradients = (B * S * D + V * D) * item
    copies = {"eager": 3, "compile": 2, "compile-max-first": 2, "reference": 4, "gemm-full": 1}
    return copies.get(impl, 0) * logits + gradients


def _ours(impl: str) -> Callable[[LSRHeadInputs], Runnable]:
    def build(inputs: LSRHeadInputs) -> Runnable:
        from tilefold.ops import lsr_head  # noqa: PLC0415

        def head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
            return lsr_head(hidden, weight, bias, attention_mask=attention_mask, impl=impl)

        return runnable_head(head, inputs, resolve_impl(impl, inputs.hidden.device))

    return build


def _case(B: int, S: int, D: int, V: int, variant: str, device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{S}x{D}x{V}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "S": S, "D": D, "V": V}, variant, quick)


CPU_TRAIN = _case(8, 256, 384, 30522, "dense", "cpu")

CASES = (
    _case(32, 512, 768, 30522, "dense", quick=True),
    _case(32, 512, 768, 30522, "2pct", quick=True),
    _case(32, 512, 768, 30522, "ragged", quick=True),
    _case(32, 512, 768, 30522, "ragged-2pct"),
    _case(16, 512, 768, 250002, "dense"),
    _case(16, 512, 768, 250002, "2pct"),
    _case(64, 256, 1024, 250002, "2pct"),
    _case(4, 8192, 768, 50368, "dense"),
    _case(64, 32, 768, 30522, "2pct", quick=True),
    CPU_TRAIN,
    _case(8, 256, 384, 30522, "2pct", "cpu"),
    _case(8, 256, 384, 30522, "ragged-2pct", "cpu"),
    _case(16, 32, 384, 30522, "2pct", "cpu", quick=True),
)

REQUIREMENTS = (
    Requirement(
        case=CPU_TRAIN.name,
        claim="forward takes at most 1.15x the time of the bare matrix product",
        left=("tilefold", "forward_p50_ms"),
        right=("gemm-full", "forward_p50_ms"),
        limit=1.15,
    ),
    Requirement(
        case=CPU_TRAIN.name,
        claim="peak memory of forward + backward is at least 8x below eager",
        left=("tilefold", "forward_backward_peak_mib"),
        right=("eager", "forward_backward_peak_mib"),
        limit=1 / 8,
    ),
)

SPEC = BenchSpec(
    op="lsr_head",
    cases=CASES,
    implementations=(
        Implementation("tilefold", _ours("auto"), "ours"),
        Implementation("tiled", _ours("tiled"), "ours", default_on=()),
        Implementation("reference", _ours("reference"), "ours", default_on=()),
        *BASELINES,
    ),
    baseline="eager",
    make_inputs=make_inputs,
    make_gate=LSRHeadGate,
    make_probe=make_probe,
    work=work,
    needs_bytes=needs_bytes,
    requirements=REQUIREMENTS,
)
