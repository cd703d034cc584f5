"""Differences between the releases of Triton.

Only this file, and rows of configuration tables, depend on the installed release.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch

Release = tuple[int, int]

TESTED: tuple[Release, ...] = ((3, 4), (3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
# Every kernel is compiled with fused multiply-adds, whose rounding the error budgets assume.
BUILD_OPTIONS = {"enable_fp_fusion": True}
# registers of a thread: no limit, except for assemblers whose default is lower
ALL_REGISTERS = 255
# what Triton's interpreter computes wrongly, by dtype
INTERPRETER_FAULTS = {
    torch.bfloat16: "it multiplies the bits of bf16 as integers",
    torch.float8_e4m3fn: "it rounds some numbers to fp8 wrongly, by up to half",
}


@functools.cache
def release() -> Release:
    """Major and minor version of the installed Triton, or ``(0, 0)`` if there is none."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            major, minor = importlib.metadata.version(name).split("+")[0].split(".")[:2]
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return 0, 0


def why_no_warp_roles() -> str | None:
    """Why kernels with warp roles cannot be built with this release, or ``None`` if they can.

    In such kernels some warps load, and others compute.
    """
    if release() >= (3, 6):
        return None
    return f"Triton {release_name()} cannot give warps roles of their own, 3.6 and newer can"


def why_no_async_loads() -> str | None:
    """Why kernels in Gluon cannot copy to shared memory in the background, or ``None`` if they can.

    Such copies (``cp.async``) need compute capability 8.0.
    """
    if release() >= (3, 5):
        return None
    return f"Triton {release_name()} cannot copy asynchronously in Gluon, 3.5 and newer can"


def release_name() -> str:
    """The release as text, such as ``"3.6"``."""
    return ".".join(map(str, release()))


def interpreted_rows_count_elements() -> bool:
    """Return whether interpreted TMA descriptors need rows of a multiple of 16 elements.

    Newer releases need a multiple of 16 bytes, as the hardware does.
    """
    return release() <= (3, 5)


def gluon_barrier() -> Any:
    """Gluon's barrier of the warps that have the same role."""
    from triton.experimental.gluon import language

    name = "barrier" if release() >= (3, 7) else "thread_barrier"
    return getattr(language, name)


def gluon_async_load() -> Any:
    """Gluon's copy of a tile to shared memory by ``cp.async``: ``(destination, pointers)``."""
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    name = "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared"
    return getattr(async_copy, name)


def gluon_tma_load() -> Any:
    """Gluon's copy of a tile by TMA: ``(descriptor, coordinates, barrier, destination)``."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return tma.async_load if release() >= (3, 8) else tma.async_copy_global_to_shared


def gluon_reinterpret() -> Any:
    """Gluon's view of shared memory in another form: ``(memory, dtype, shape, layout)``."""
    from triton.experimental.gluon import language

    name = "reinterpret" if release() >= (3, 9) else "_reinterpret"
    return getattr(language.shared_memory_descriptor, name)
