"""Triton's interpreter with less work for the same results, so that the suite takes minutes less
(Triton 3.6 alone).

Four things took most of its time: it looked through all names of ``triton.language`` at every call
of a function in a kernel, made a table of dtypes for every tensor, described the shape of every
block anew, and checked every sum of integers for an overflow, in a second sum. The interpreters of
other releases are left as they are, so that `make test-triton` runs the kernels in those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.kernels import release


def quicken() -> None:
    """Replace these parts of ``triton.runtime.interpreter``; does nothing with another release than
    3.6.
    """
    if release() != (3, 6):
        return
    from triton.runtime import interpreter

    made, dtypes = interpreter._get_np_dtype, dict[str, Any]()  # by the name of the scalar
    interpreter._get_np_dtype = lambda kind: (
        dtypes.get(kind.scalar.name) or dtypes.setdefault(kind.scalar.name, made(kind))
    )
    interpreter.InterpretedFunction.__call__ = _called
    interpreter.GridExecutor.__call__ = _begin(interpreter.GridExecutor.__call__)
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = _unchecked
    interpreter.tl.core.block_type.__init__ = describe_block
    interpreter.tl.core.tensor.__init__ = describe_tensor


def _unchecked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """``TritonSemantic.binary_op_sanitize_overflow_impl``: the shapes of tests are small; other
    releases check.
    """


# by the numbers of a shape: as the type of a block has it, their product, how it is printed, and
# how a tensor has both
_shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}


def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
    """``block_type.__init__``, which describes each shape once."""
    from triton.runtime.interpreter import tl

    sizes = tuple([getattr(size, "value", size) for size in getattr(shape, "values", shape)])
    result = _shapes.get(sizes)
    if result is None:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        described, numbers = (
            tl.core.tuple(sizes),
            tl.core.tuple([tl.constexpr(size) for size in sizes]),
        )
        numel = tl.core.validate_block_shape(described)
        result = _shapes[sizes] = described, numel, str(described), (numbers, tl.constexpr(numel))
    self.element_ty = element_ty
    self.shape, self.numel, text, self.of_tensors = result
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


_replaced: set[int] = set()  # while a kernel runs: the modules whose functions were called in it


def _begin(honest: Callable[..., Any]) -> Callable[..., Any]:
    """``GridExecutor.__call__``: a kernel begins, and puts back what it replaced when it ends."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        _replaced.clear()
        honest(self, *args, **kwargs)

    return call


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``InterpretedFunction.__call__``: what a function of a module needs is replaced once in a
    kernel.
    """
    from triton.runtime import interpreter

    if id(self.fn.__globals__) not in _replaced:
        _replaced.add(id(self.fn.__globals__))
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
