"""The precision that models train and run in on this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["fast_inference", "run_fast", "supports_bf16"]


def supports_bf16() -> bool:
    """Whether bf16 autocast is worth it on this machine: a GPU that has it, or a CPU with AMX or AVX512-BF16."""
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    # one that torch uses as one with AVX2 alone (ATEN_CPU_CAPABILITY=avx2) would emulate bf16
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    probes = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(probe() for probe in probes if probe is not None)


@contextmanager
def fast_inference() -> Iterator[None]:
    """bf16 autocast where the hardware has it; weights and scores stay fp32."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=supports_bf16()):
        yield


def run_fast(model: nn.Module) -> None:
    """Let every forward pass of `model` run in :func:`fast_inference`: a text has one vector in every command."""
    stock = model.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with fast_inference():
            return stock(*args, **kwargs)

    model.forward = forward
