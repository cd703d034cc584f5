"""Differences between the releases of Triton, beside those of tables; no other file asks which is
installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch

Release = tuple[int, int]

TESTED: tuple[Release, ...] = ((3, 4), (3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
# of every build: budgets of the numerics are those of fused multiply-adds
BUILD_OPTIONS = {"enable_fp_fusion": True}
ALL_REGISTERS = 255  # that a thread can have: no limit, but for assemblers that would give it fewer
INTERPRETER_FAULTS = {
    torch.bfloat16: "it multiplies the bits of bf16 as integers",
    torch.float8_e4m3fn: "it rounds some numbers to fp8 wrongly, by up to half",
}


@functools.cache
def release() -> Release:
    """Major and minor version of the Triton that is installed; ``(0, 0)`` where none is."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            major, minor = importlib.metadata.version(name).split("+")[0].split(".")[:2]
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return 0, 0


def why_no_warp_roles() -> str | None:
    """Why kernels whose warps load or compute cannot be built with this release, or ``None`` if
    they can.
    """
    if release() >= (3, 6):
        return None
    return f"Triton {release_name()} cannot give warps roles of their own, 3.6 and newer can"


def release_name() -> str:
    """The release, as people write it."""
    return ".".join(map(str, release()))


def interpreted_rows_count_elements() -> bool:
    """Whether interpreted descriptors ask that rows are multiples of 16 elements, instead of 16
    bytes.
    """
    return release() <= (3, 5)


def gluon_barrier() -> Any:
    """Gluon's barrier of the warps of a role."""
    from triton.experimental.gluon import language

    return getattr(language, "barrier" if release() >= (3, 7) else "thread_barrier")


def gluon_tma_load() -> Any:
    """Gluon's copy of a tile by TMA: ``(descriptor, place, barrier, destination)``."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_load if release() >= (3, 8) else tma.async_copy_global_to_shared


def gluon_reinterpret() -> Any:
    """Gluon's view of shared memory in another form: ``(memory, dtype, shape, layout)``."""
    from triton.experimental.gluon import language

    return getattr(
        language.shared_memory_descriptor,
        "reinterpret" if release() >= (3, 9) else "_reinterpret",
    )
