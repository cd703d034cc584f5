"""Launching kernels: Triton binds the arguments of a call once for each kind of call, and not again.

Binding some forty arguments takes Triton longer on the host than many of these kernels take on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import JITFunction

# A kind of call: the kernel, its constants and what Triton would specialise on. Its value is the compiled kernel and
# the constants that follow the arguments, in the kernel's order.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """``kernel[grid](*arguments, **constants)`` on the current device and stream.

    ``arguments`` are tensors, descriptors, numbers and ``None``; every ``constexpr`` parameter comes after them and is
    in ``constants``, with ``num_warps`` and ``num_stages``.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*arguments, **constants)
        return
    kind = _kind(kernel, arguments, constants)
    known = _COMPILED.get(kind)
    if known is not None:
        compiled, tail = known
        compiled[grid](*arguments, *tail)
        return
    compiled = kernel[grid](*arguments, **constants)
    if hasattr(compiled, "result"):  # compiled beside the program
        compiled = compiled.result()
    _COMPILED[kind] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _kind(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    kind: list[Any] = [kernel, torch.cuda.current_device()]
    kind += constants.items()
    for position, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            kind.append(argument.dtype)
            kind.append(argument.data_ptr() % 16 == 0)
        elif argument is None or isinstance(argument, (bool, float)):
            kind.append(type(argument))
        elif isinstance(argument, int):
            # without its value an integer is 32 or 64 bits wide
            plain = kernel.params[position].do_not_specialize
            kind.append(argument.bit_length() > 31 if plain else argument)
        else:
            kind += (type(argument), argument.base.dtype, tuple(argument.block_shape), argument.padding)
    return tuple(kind)
