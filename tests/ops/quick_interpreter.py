"""Triton's interpreter with less work for the same results, so that the suite takes minutes less (Triton 3.6 alone).

Five things took most of its time: it looked through all names of ``triton.language`` at every call of a function in a
kernel, reduced with functions other than its own one number at a time, made a table of dtypes for every tensor,
described the shape of every block anew, and checked every sum of integers for an overflow, in a second sum. The
interpreters of other releases are left as they are, so that `make test-triton` runs the kernels in those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels import release


def quicken() -> None:
    """Replace these parts of ``triton.runtime.interpreter``; does nothing with another release than 3.6."""
    if release() != (3, 6):
        return
    from triton.runtime import interpreter

    interpreter._get_np_dtype = _remembered_dtypes(interpreter._get_np_dtype)
    interpreter.InterpretedFunction.__call__ = _called
    interpreter.GridExecutor.__call__ = _begin(interpreter.GridExecutor.__call__)
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    semantic.binary_op_sanitize_overflow_impl = _unchecked
    for owner, name, quick in (
        (interpreter.ReduceOps, "generic_reduce", reduce_in_rows),
        (core.block_type, "__init__", describe_block),
        (core.tensor, "__init__", describe_tensor),
    ):
        HONEST[quick] = getattr(owner, name)
        setattr(owner, name, quick)


def _remembered_dtypes(made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_get_np_dtype``: by the name of the scalar, which says all that it depends on."""
    known: dict[str, Any] = {}

    def dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = made(kind)
        return known[name]

    return dtype


def _unchecked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """``TritonSemantic.binary_op_sanitize_overflow_impl``: the shapes of tests are small; other releases check."""


# by the numbers of a shape: as the type of a block has it, their product, how it is printed, and how a tensor has both
_shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}


def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
    """``block_type.__init__``, which describes each shape once."""
    from triton.runtime.interpreter import tl

    sizes = tuple([getattr(size, "value", size) for size in getattr(shape, "values", shape)])
    found = _shapes.get(sizes)
    if found is None:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        described, numbers = tl.core.tuple(sizes), tl.core.tuple([tl.constexpr(size) for size in sizes])
        numel = tl.core.validate_block_shape(described)
        found = _shapes[sizes] = described, numel, str(described), (numbers, tl.constexpr(numel))
    self.element_ty = element_ty
    self.shape, self.numel, text, self.of_tensors = found
    self.name = f"<{text}, {element_ty}>"


_of_scalars: list[tuple[Any, Any]] = []


def describe_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tensor.__init__``, with the shape of its type."""
    if type.is_block():
        self.shape, self.numel = type.of_tensors
    else:
        if not _of_scalars:
            from triton.runtime.interpreter import tl

            _of_scalars.append((tl.core.tuple([]), tl.constexpr(1)))
        self.shape, self.numel = _of_scalars[0]
    self.handle, self.type, self.dtype = handle, type, type.scalar


HONEST: dict[Callable[..., Any], Callable[..., Any]] = {}  # by what replaced it: the interpreter's own


_replaced: set[int] = set()  # while a kernel runs: the modules whose functions were called in it


def _begin(honest: Callable[..., Any]) -> Callable[..., Any]:
    """``GridExecutor.__call__``: a kernel begins, and puts back what it replaced when it ends."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        _replaced.clear()
        honest(self, *args, **kwargs)

    return call


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``InterpretedFunction.__call__``: what a function of a module needs is replaced once in a kernel."""
    from triton.runtime import interpreter

    if id(self.fn.__globals__) not in _replaced:
        _replaced.add(id(self.fn.__globals__))
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def reduce_in_rows(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """``ReduceOps.generic_reduce``: the same sums in the same order, for all places of the other dimensions at once.

    A function of numbers that chooses by ``tl.where``, as all of ours do, does the same to every number of a block.
    """
    tensors, axis = self.unravel(given, self.axis)
    rows = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]

    def place(index: int) -> list[Any]:
        return [self.to_tensor(row[index], tensor.dtype) for row, tensor in zip(rows, tensors, strict=True)]

    found = place(0)
    for index in range(1, len(rows[0])):
        made = self.combine_fn.fn(*found, *place(index))
        found = list(made) if isinstance(made, tuple) else [made]
    shape = rows[0].shape[1:]
    packed = []
    for value, tensor in zip(found, tensors, strict=True):
        data = value.handle.data.reshape(shape)
        if self.keep_dims:
            data = np.expand_dims(data, axis)
        elif self.axis is None:
            data = data.item()
        packed.append(self.to_tensor(data, tensor.dtype))
    return packed
