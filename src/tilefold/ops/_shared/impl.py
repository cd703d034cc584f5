"""Choice of an operator's implementation.

``"auto"`` chooses by device. An explicit name is used, or refused with an error.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from tilefold.ops._shared._triton.releases import INTERPRETER_FAULTS, release_name
from tilefold.ops._shared.checks import check_choice, dtype_name
from tilefold.ops._shared.fallback import failure_of
from tilefold.ops._shared.internals import in_forward_mode, in_function_transform
from tilefold.ops._shared.plan import Setting

IMPLS = ("auto", "reference", "tiled", "triton")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SWITCH = "TILEFOLD_DISABLE"


@functools.cache
def triton_installed() -> bool:
    """Return whether the ``triton`` package can be imported (it is not imported here)."""
    return importlib.util.find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Return whether Triton runs its kernels in Python on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def switched_off() -> bool:
    """Return whether ``TILEFOLD_DISABLE`` is set in the environment, with a warning the first time.

    Models and libraries are then not accelerated, and ``"auto"`` runs plain torch.
    """
    if os.environ.get(SWITCH, "0") in {"", "0"}:
        return False
    _warn_switched_off()
    return True


@functools.cache
def _warn_switched_off() -> None:
    """Warn that the environment variable has switched tilefold off."""
    warnings.warn(
        f"{SWITCH} is set: accelerate() leaves models and libraries stock, and impl='auto' runs "
        "plain torch. Unset it to use tilefold again.",
        stacklevel=4,
    )


@functools.cache
def _why_device_is_too_old(device: torch.device) -> str | None:
    # cached, since every call needs this, and the driver takes as long as for a launch
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, or 3 if kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device, or ``(0, 0)`` if kernels are interpreted."""
    compiled = device.type == "cuda" and not triton_interpreted()
    return torch.cuda.get_device_capability(device) if compiled else (0, 0)


def why_not_triton(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on ``device``, or ``None`` if they can."""
    # The device comes first: without a GPU, an installation of triton makes nothing faster.
    if device.type != "cuda" and not triton_interpreted():
        return (
            f"tensors are on {device.type!r}, and the kernels need a CUDA device "
            "(or TRITON_INTERPRET=1)"
        )
    if not triton_installed():
        return "the package triton is not installed (pip install triton)"
    return _why_device_is_too_old(device) if device.type == "cuda" else None


def takes_kernels(device: torch.device) -> bool:
    """Whether ``"auto"`` chooses the Triton kernels on ``device``, unless they have failed."""
    return device.type == "cuda" and not switched_off() and why_not_triton(device) is None


def impl_with_fallback(impl: str, chosen: str) -> str:
    """Return ``"auto"`` if the kernels may fall back to the tiled path, else ``chosen``.

    Args:
        impl: the implementation that the caller named.
        chosen: the implementation that was chosen for that name.
    """
    return "auto" if impl == "auto" and chosen == "triton" else chosen


def resolve_impl(impl: str, device: torch.device, operator: str = "") -> str:
    """Turn ``impl`` into ``"reference"``, ``"tiled"`` or ``"triton"``, for any dtype.

    Args:
        impl: one of :data:`IMPLS`.
        device: device of the tensors.
        operator: name of the operator, to find out whether its kernels failed to build.

    Raises:
        RuntimeError: if ``"triton"`` cannot run, or if forward mode or ``torch.func`` would
            differentiate anything but the reference.
        ValueError: if the name is unknown.
    """
    check_choice("impl", impl, IMPLS)
    _check_transforms(impl)
    if impl == "auto":
        has_kernels = takes_kernels(device) and failure_of(operator, device) is None
        return "triton" if has_kernels else "tiled"
    reason = why_not_triton(device) if impl == "triton" else None
    if reason is not None:
        raise RuntimeError(
            f"impl='triton' cannot run here: {reason}. Use impl='auto' or impl='tiled'.",
        )
    return impl


def _check_transforms(impl: str) -> None:
    """Raise ``RuntimeError`` if ``torch.func`` or forward mode differentiates an operator.

    Only ``"reference"`` supports them. A registered operator would silently have tangents of zeros.
    """
    if impl != "reference" and in_forward_mode():
        raise RuntimeError(
            "impl must be 'reference' in forward-mode differentiation (torch.func.jvp, "
            f"forward_ad), got {impl!r}; the other implementations have gradients only.",
        )
    if impl != "reference" and in_function_transform():
        raise RuntimeError(
            f"impl must be 'reference' under torch.func.grad, vjp and jacrev, got {impl!r}; "
            "torch.autograd.grad and backward() work with every implementation.",
        )


def chosen_impl(operator: str, name: str, tensor: Tensor, impl: str = "auto") -> str:
    """Return the implementation that runs: ``"reference"``, ``"tiled"`` or ``"triton"``.

    ``"auto"`` chooses ``"triton"`` for fp16, bf16 and fp32 on a CUDA device that can run the
    kernels, unless they failed to build there before, and ``"tiled"`` otherwise.

    Args:
        operator: name of the operator, to find out whether its kernels failed to build.
        name: name of the argument ``tensor``, for the error's text.
        tensor: the tensor whose device and dtype decide.
        impl: one of :data:`IMPLS`.

    Raises:
        RuntimeError: if ``impl`` cannot run on this device, or if forward mode or ``torch.func``
            would differentiate anything but the reference.
        TypeError: if the kernels do not support the dtype, for ``"triton"``.
        ValueError: if the name is unknown.
    """
    resolved = resolve_impl(impl, tensor.device, operator)
    if resolved == "triton" and tensor.dtype not in TRITON_DTYPES:
        if impl == "auto":
            return "tiled"
        names = ", ".join(map(dtype_name, TRITON_DTYPES))
        raise TypeError(
            f"{name} must have dtype {names} for impl='triton', got {dtype_name(tensor.dtype)}; "
            "use impl='auto' or impl='tiled'.",
        )
    return resolved


def host_may_read(device: torch.device, impl: str) -> bool:
    """Return whether the CPU may read values of tensors on a device.

    On a GPU this synchronises, which only the tiled path does, and not while a CUDA graph is
    captured.
    """
    if device.type != "cuda":
        return True
    return impl == "tiled" and not torch.cuda.is_current_stream_capturing()


def check_interpreter_dtypes(setting: Setting, *dtypes: torch.dtype) -> None:
    """Raise ``RuntimeError`` for dtypes that Triton's interpreter silently computes wrongly.

    Args:
        setting: the device; compiled kernels support all of their dtypes.
        *dtypes: dtypes of the tensors.
    """
    if not setting.is_interpreted:
        return
    for dtype in dtypes:
        fault = INTERPRETER_FAULTS.get(dtype)
        if fault is not None:
            raise RuntimeError(
                "dtypes must be float16 or float32 for impl='triton' under TRITON_INTERPRET=1, "
                f"got {dtype_name(dtype)}: {fault} (Triton {release_name()}). Use those, or "
                "impl='tiled'.",
            )
