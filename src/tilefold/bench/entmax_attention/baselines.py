"""What a time of entmax attention means: softmax attention, which computes another function and is not gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilefold.bench.entmax_attention.inputs import EntmaxAttentionBenchInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import Implementation


def _sdpa(backend: SDPBackend) -> Callable[[EntmaxAttentionBenchInputs], Runnable]:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=inputs.causal)

        return inputs.bind(attend, backend.name.lower())

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

    return inputs.bind(attend, "flex_attention, compiled")


BASELINES = (
    Implementation("softmax-fa2", _sdpa(SDPBackend.FLASH_ATTENTION), "bare"),
    Implementation("softmax-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), "bare", default_on=("cuda",)),
    Implementation("softmax-flex", _flex, "bare", default_on=("cuda",), slow=True),
)
