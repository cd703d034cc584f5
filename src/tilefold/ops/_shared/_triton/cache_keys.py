"""Keys of Triton's cache on disk that are the same in every process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()


def compute_cache_key(kernel: Any) -> None:
    """Compute the part of a kernel's cache key that depends on its source.

    Triton hashes a function with the functions that it calls and their global constants. It takes
    the constants of a called function into account only if that function has been hashed before.
    The key of a kernel would then depend on which kernels a process has compiled earlier, and in
    which of its threads, and another process would not find the kernel in the cache. Here called
    functions are hashed first, by one thread at a time.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``. Triton keeps the key.
    """
    with _lock:
        for function in _functions_before_callers(kernel, visited=set()):
            function.cache_key  # noqa: B018 - a property that stores what it computes


def _functions_before_callers(function: Any, visited: set[int]) -> Iterator[Any]:
    """Iterate over a compiled function and those that it calls, each after all that it calls.

    Args:
        function: the function.
        visited: identities of functions that the iteration has reached.
    """
    visited.add(id(function))
    python_function = function.fn
    for name in python_function.__code__.co_names:
        called = python_function.__globals__.get(name)
        if _is_compiled(called) and id(called) not in visited:
            yield from _functions_before_callers(called, visited)
    yield function


def _is_compiled(value: object) -> bool:
    """Return whether Triton compiles this value, and hashes its source."""
    return hasattr(value, "cache_key") and hasattr(getattr(value, "fn", None), "__code__")
