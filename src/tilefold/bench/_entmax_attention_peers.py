"""What entmax attention is compared with: softmax attention, and the published kernels of AdaSplash, if installed.

Softmax attention computes another function: it is shown as what a time means, and is not gated. The AdaSplash rows are
gated. Those that compile or tune for long before their first answer are marked slow, and run after all others.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilefold.bench.registry import Implementation, NotApplicable, Runnable

if TYPE_CHECKING:
    from tilefold.bench.entmax_attention import EntmaxAttentionBenchInputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Build = Callable[["EntmaxAttentionBenchInputs"], Runnable]
V1_STEPS = 3  # what the paper's benchmarks take; the package's default is 10


def attention_runnable(attend: Attend, inputs: EntmaxAttentionBenchInputs, label: str) -> Runnable:
    """Bind ``attend(q, k, v)`` to ``inputs``."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(inputs.q, inputs.k, inputs.v)

    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = attend(inputs.q, inputs.k, inputs.v)
        return out.detach(), torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)

    return Runnable(forward, forward_backward, label)


def _sdpa(backend: SDPBackend) -> Build:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=inputs.causal)

        return attention_runnable(attend, inputs, backend.name.lower())

    return build


def _flex(inputs: EntmaxAttentionBenchInputs) -> Runnable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: PLC0415

    block_mask = None
    if inputs.causal:
        n = inputs.q.size(2)
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=inputs.q.device.type)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return attention_runnable(attend, inputs, "flex_attention, compiled")


def _adasplash(function: str, **options: Any) -> Build:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        peer: Any = importlib.import_module("adasplash")
        known = dict(options)
        if function == "adasplash_v2":
            if not inputs.causal:
                raise NotApplicable("AdaSplash-2 is causal only")
        else:
            known["is_causal"] = inputs.causal

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = getattr(peer, function)(q, k, v, **known)
            return out

        steps = f"niter={options['niter']}" if options else "default niter"
        return attention_runnable(attend, inputs, f"{function}, {steps}")

    return build


_INSTALLED = ("cuda",) if importlib.util.find_spec("adasplash") is not None else ()

PEERS = (
    Implementation("softmax-fa2", _sdpa(SDPBackend.FLASH_ATTENTION), "bare"),
    Implementation("softmax-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), "bare", default_on=("cuda",)),
    Implementation("adasplash-v1", _adasplash("adasplash_v1", niter=V1_STEPS), "baseline", _INSTALLED, slow=True),
    Implementation(
        "adasplash-v1-no-mask",
        _adasplash("adasplash_no_block_mask", niter=V1_STEPS),
        "baseline",
        _INSTALLED,
        slow=True,
    ),
    Implementation("softmax-flex", _flex, "bare", default_on=("cuda",), slow=True),
    Implementation("adasplash-v2", _adasplash("adasplash_v2"), "baseline", _INSTALLED, slow=True),
)
