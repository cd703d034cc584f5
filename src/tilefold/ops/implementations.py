"""Which implementation and which kernels an operator runs on a device, and why no faster ones."""

from __future__ import annotations

import inspect

import torch

from tilefold import ops
from tilefold._internal.public import PACKAGE_OF
from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.fallback import given_up
from tilefold.ops._shared.impl import IMPLS, SWITCH, resolve_impl, switched_off, why_not_triton
from tilefold.ops._shared.internals import copy_each, tf32_allowed
from tilefold.ops._shared.plan import Setting
from tilefold.ops.lsr_head import configs as head
from tilefold.ops.maxsim import configs as maxsim

__all__ = [
    "IMPLS",
    "SWITCH",
    "check_impl",
    "copy_each",
    "given_up",
    "kernel_of",
    "operators",
    "releases",
    "resolve_impl",
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


def kernel_of(
    operator: str,
    capability: tuple[int, int],
    device: torch.device | None = None,
) -> tuple[str, str | None]:
    """Describe the kernels of an operator in bf16, and say why no faster ones run.

    Args:
        operator: name of the operator.
        capability: compute capability of the device.
        device: the device, whose given-up kernels are considered; ``None`` considers none.

    Returns:
        Name of the kernels, and the reason why no faster ones run, or ``None``.
    """
    if operator == "lsr_head":
        return _head_kernel(capability, device)
    if operator == "maxsim":
        return _maxsim_kernel(capability, device)
    return "portable kernels", None


def _head_kernel(
    capability: tuple[int, int],
    device: torch.device | None,
) -> tuple[str, str | None]:
    """Describe the kernels of ``lsr_head``, for :func:`kernel_of`."""
    no_tma_reason = no_roles_reason = None
    if device is not None:
        no_tma_reason = given_up(head.BY_TMA, device)
        no_roles_reason = given_up(head.BY_ROLES, device)
    given_up_kernels = set()
    if no_tma_reason:
        given_up_kernels.add(head.BY_TMA)
    if no_roles_reason:
        given_up_kernels.add(head.BY_ROLES)
    setting = Setting(
        capability,
        multiprocessors=1,
        tf32=False,
        aligned=True,
        given_up=frozenset(given_up_kernels),
    )
    config = head.max_forward(torch.bfloat16, setting)
    name = head.kernel_name(config).removeprefix("lsr_head's ")
    reason = no_tma_reason or no_roles_reason
    if not reason and capability == (9, 0):
        reason = releases.why_no_warp_roles()
    if reason is None and "TMA" not in name and "load or compute" not in name:
        version = ".".join(map(str, capability))
        reason = f"compute capability {version} has no TMA or little shared memory"
    return name, reason


def _maxsim_kernel(
    capability: tuple[int, int],
    device: torch.device | None,
) -> tuple[str, str | None]:
    """Describe the kernels of ``maxsim``, for :func:`kernel_of`."""
    config = maxsim.forward_config(capability, torch.bfloat16, 128, 4096, tf32=False)
    if not config["USE_TMA"]:
        return "kernels without TMA", None
    reason = None if device is None else given_up(maxsim.BY_TMA, device)
    return ("kernels with TMA" if reason is None else "kernels without TMA"), reason
