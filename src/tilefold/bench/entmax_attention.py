"""The benchmark of ``tilefold.ops.entmax_attention``, beside softmax attention (not gated) and
AdaSplash (which is).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilefold import testing
from tilefold.bench import spec
from tilefold.ops.entmax_attention import chosen_impl, entmax_attention
from tilefold.testing.entmax_attention import entmax_attention_inputs

ALPHA = 1.5
V1_STEPS = 3  # what the paper's benchmarks take; the package's default is 10
_SHARPNESS = {"iid": 1.0, "iid4": 4.0, "correlated": 2.0}
_GATE_ROWS = 1024  # queries of one head that are held against the reference
_GATE_MARGIN = 1.5  # of the error that unavoidable roundings make
_MAX_PAIRS = 1 << 22  # scores in fp64 of the gate's head on the CPU


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Random q, k, v ``[B, H, N, D]`` and whether they are causal; scores are independent or alike
    in a sequence.
    """
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    kind, _, causal = case.variant.partition("-")
    options: dict[str, Any] = {"dtype": spec.DTYPES[case.dtype], "device": device, "seed": seed}
    options |= {"correlated": kind == "correlated", "sharpness": _SHARPNESS[kind]}
    made = entmax_attention_inputs(batch, heads, n, dim, **options)
    return spec.Inputs(
        tuple(t.requires_grad_() for t in (made.q, made.k, made.v)),
        (causal == "causal",),
        made.dout,
    )


def _rounded_dq(head: Sequence[Tensor], dtype: torch.dtype, causal: bool) -> Tensor:
    """``[rows, D]`` dq of one head in fp64, but for what products in ``dtype`` must round: weights,
    O2 and dS.
    """
    q, k, v, dout, tau = head

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    scale = q.size(-1) ** -0.5
    u = ((ALPHA - 1) * scale * (q @ k.T) - tau.double()[:, None]).clamp_min(0)
    if causal:
        places = torch.arange(k.size(0), device=k.device)
        u = u.masked_fill(places > places[k.size(0) - q.size(0) :, None], 0)
    second = rounded(rounded(u) @ v / u.sum(dim=1, keepdim=True))
    ds = u * (dout @ v.T - (dout * second).sum(dim=1, keepdim=True))
    dq: Tensor = rounded(ds) @ k * scale
    return dq


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """The last queries of the first head, and, where that is all of them, its dk and dv, in fp64.

    Keys that are nearly alike cancel in dq, so that the roundings of any kernel with 16-bit
    products show. Where these alone, applied to exact numbers, exceed the budget, half as much
    again as they do is allowed.
    """
    (causal,), dout, dtype = inputs.others, inputs.grad_output, inputs.grad_output.dtype
    n = dout.size(2)
    first = n - min(n, _GATE_ROWS if dout.is_cuda else max(1, _MAX_PAIRS // n))
    q, k, v = (t.detach()[:1, :1].double() for t in inputs.leaves)
    leaves = [q[:, :, first:].clone().requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    found = entmax_attention(
        *leaves,
        alpha=ALPHA,
        causal=causal,
        impl="reference",
        return_stats=True,
    )
    if isinstance(found, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = found
    dout = dout[:1, :1, first:].double()
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    head = [t.detach()[0, 0] for t in (*leaves, dout, stats.tau)]
    unavoidable = testing.relative_error(_rounded_dq(head, dtype, causal), dq[0, 0])
    gradient = max(testing.budget(dtype, "gradient_bound"), _GATE_MARGIN * unavoidable)
    gradients = {
        "dq": spec.Part(lambda t: t[:1, :1, first:], dq),
        "dk": None if first else spec.Part(lambda t: t[:1, :1], dk),
        "dv": None if first else spec.Part(lambda t: t[:1, :1], dv),
    }
    outputs = {"out": spec.Part(lambda t: t[:1, :1, first:], out.detach())}
    return spec.Gate(
        inputs,
        case.dtype,
        outputs,
        gradients,
        spec.Budget(testing.budget(dtype, "gradient"), gradient),
    )


def _sdpa(backend: SDPBackend) -> spec.Build:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return spec.bound(attend, backend.name.lower())


def _flex(inputs: spec.Inputs) -> spec.Runnable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask, (n, device) = None, (inputs.grad_output.size(2), inputs.grad_output.device.type)
    if inputs.others[0]:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return inputs.bind(attend, "flex_attention, compiled")


def _adasplash(function: str, **options: Any) -> spec.Build:
    def build(inputs: spec.Inputs) -> spec.Runnable:
        package: Any = importlib.import_module("adasplash")
        known = dict(options)
        if function != "adasplash_v2":
            known["is_causal"] = inputs.others[0]
        elif not inputs.others[0]:
            raise spec.NotApplicable("AdaSplash-2 is causal only")

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            out: Tensor = getattr(package, function)(q, k, v, **known)
            return out

        steps = f"niter={options['niter']}" if options else "default niter"
        return inputs.bind(attend, f"{function}, {steps}")

    return build


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, impl: str) -> Tensor:
    out = entmax_attention(q, k, v, alpha=ALPHA, causal=causal, impl=impl)
    return out if isinstance(out, Tensor) else out[0]


IMPLEMENTATIONS = (
    *spec.ours(_attend, chosen_impl, graph=True),
    spec.Implementation("softmax-fa2", _sdpa(SDPBackend.FLASH_ATTENTION), "bare"),
    spec.on_gpu("softmax-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), "bare"),
    spec.Implementation("softmax-flex", _flex, "bare", default_on=("cuda",), slow=True),
    *spec.peer(
        "adasplash",
        {
            "adasplash-v1": _adasplash("adasplash_v1", niter=V1_STEPS),
            "adasplash-v1-no-mask": _adasplash("adasplash_no_block_mask", niter=V1_STEPS),
            "adasplash-v2": _adasplash("adasplash_v2"),
        },
        slow=True,
    ),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Least work: every score once (their signs must be known); weights and gradients may all but
    vanish.
    """
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    pairs = batch * heads * n * n / (2 if inputs.others[0] else 1)
    operand = inputs.grad_output.numel() * inputs.grad_output.element_size()
    nbytes = 4.0 * operand if phase == "forward" else 12.0 * operand
    return spec.Work(2.0 * dim * pairs, nbytes)


def _needs(case: spec.BenchCase, impl: str) -> int:
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    dense = 8 * batch * heads * n * n if impl == "reference" else 0
    return dense + 5 * batch * heads * n * dim * spec.DTYPES[case.dtype].itemsize


PROBE = {"B": 1, "H": 1, "N": 32}  # too small to matter
SPEC = spec.BenchSpec(
    "entmax_attention",
    IMPLEMENTATIONS,
    "softmax-fa2",
    make_inputs,
    make_gate,
    PROBE,
    work,
    _needs,
)
