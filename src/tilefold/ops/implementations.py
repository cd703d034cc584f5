"""Which implementation and which kernels of an operator run on a device, and why no faster ones."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch

from tilefold import ops
from tilefold._internal.public import PACKAGE_OF
from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.fallback import failure_of
from tilefold.ops._shared.impl import IMPLS, SWITCH, resolve_impl, switched_off, why_not_triton
from tilefold.ops._shared.internals import (
    copy_each,
    cpu_matmul_precision,
    matmul_precision,
    start_compiler,
    tf32_allowed,
)
from tilefold.ops.lsr_head import configs as head
from tilefold.ops.maxsim import configs as maxsim

__all__ = [
    "IMPLS",
    "SWITCH",
    "check_impl",
    "copy_each",
    "cpu_matmul_precision",
    "failure_of",
    "kernel_of",
    "matmul_precision",
    "operators",
    "releases",
    "resolve_impl",
    "start_compiler",
    "switched_off",
    "tf32_allowed",
    "why_not_triton",
]


def check_impl(impl: str) -> None:
    """Raise ``ValueError`` unless ``impl`` is one of :data:`IMPLS`."""
    check_choice("impl", impl, IMPLS)


def operators() -> dict[str, str]:
    """Return the operator whose kernels a public function runs, by the function's name.

    Only functions with an argument ``impl`` are listed.
    """
    return {
        name: package
        for name, package in PACKAGE_OF.items()
        if "impl" in inspect.signature(getattr(ops, name)).parameters
    }


class Kernels(NamedTuple):
    """The kernels of an operator that run on a device.

    Attributes:
        name: what the kernels are called, such as ``"portable kernels"``.
        limitation: why no faster kernels run, or ``None`` if these are the fastest.
    """

    name: str
    limitation: str | None


def kernel_of(
    operator: str,
    capability: tuple[int, int],
    device: torch.device | None = None,
) -> Kernels:
    """Return the kernels of an operator that would run in bf16.

    Args:
        operator: name of the operator.
        capability: compute capability of the device.
        device: the device, to leave out kernels that failed to build on it; ``None`` assumes that
            no kernel failed.
    """
    if operator == "lsr_head":
        return _head_kernel(capability, device)
    if operator == "maxsim":
        return _maxsim_kernel(capability, device)
    return Kernels("portable kernels", None)


def _head_kernel(capability: tuple[int, int], device: torch.device | None) -> Kernels:
    """Return the kernels of ``lsr_head`` that would run in bf16, and why no faster ones.

    Args:
        capability: compute capability of the device.
        device: the device, to leave out kernels that failed to build on it; ``None`` assumes that
            no kernel failed.
    """
    failures: dict[str, str] = {}  # why a kernel failed to build on the device, by its name
    for kernel in (head.BY_TMA, head.BY_ROLES):
        reason = None if device is None else failure_of(kernel, device)
        if reason is not None:
            failures[kernel] = reason
    kernel = head.fastest_kernel(torch.bfloat16, capability, failures.keys())
    limitation = None
    if failures:
        limitation = next(iter(failures.values()))
    elif capability == (9, 0):
        limitation = releases.why_no_warp_roles()
    elif kernel == head.PORTABLE:
        version = ".".join(map(str, capability))
        limitation = f"compute capability {version} has no TMA or little shared memory"
    return Kernels(kernel.removeprefix("lsr_head's "), limitation)


def _maxsim_kernel(capability: tuple[int, int], device: torch.device | None) -> Kernels:
    """Return the kernels of ``maxsim`` that would run in bf16, and why no faster ones."""
    config = maxsim.forward_config(capability, torch.bfloat16, 128, 4096, tf32=False)
    if not config["USE_TMA"]:
        return Kernels("kernels without TMA", None)
    failure = None if device is None else failure_of(maxsim.BY_TMA, device)
    if failure is not None:
        return Kernels("kernels without TMA", failure)
    return Kernels("kernels with TMA", None)
