"""Implementations that operators run, with which kernels, and why no faster ones do."""

from __future__ import annotations

import inspect

import torch

from tilefold import ops
from tilefold._public import ROOM_OF
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
    """Raise ``ValueError`` unless the operators take this ``impl``."""
    check_choice("impl", impl, IMPLS)


def operators() -> dict[str, str]:
    """The public functions that take ``impl``, each with the operator whose kernels it runs."""
    return {
        name: room
        for name, room in ROOM_OF.items()
        if "impl" in inspect.signature(getattr(ops, name)).parameters
    }


def kernel_of(
    operator: str,
    capability: tuple[int, int],
    device: torch.device | None = None,
) -> tuple[str, str | None]:
    """Kernels that ``operator`` runs in bf16 on a compute capability, and why no faster ones do."""
    if operator == "lsr_head":
        failed = (
            {}
            if device is None
            else {kernel: given_up(kernel, device) for kernel in (head.BY_ROLES, head.BY_TMA)}
        )
        setting = Setting(
            capability,
            1,
            tf32=False,
            aligned=True,
            given_up=frozenset(filter(failed.get, failed)),
        )
        name = head.kernel_name(head.max_forward(torch.bfloat16, setting)).removeprefix(
            "lsr_head's ",
        )
        why = releases.why_no_warp_roles() if capability == (9, 0) else None
        why = failed.get(head.BY_TMA) or failed.get(head.BY_ROLES) or why
    elif operator == "maxsim":
        tma = maxsim.forward_config(capability, torch.bfloat16, 128, 4096, tf32=False)["USE_TMA"]
        why = given_up(maxsim.BY_TMA, device) if device is not None and tma else None
        name = "kernels with TMA" if tma and why is None else "kernels without TMA"
    else:
        return "portable kernels", None
    if why is None and "TMA" not in name and "load or compute" not in name:
        why = f"compute capability {'.'.join(map(str, capability))} has no TMA or little shared memory"
    return name, why
