"""Control of Python's cyclic garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collection within the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exempt_from_garbage_collection() -> None:
    """Exempt all objects that exist now from garbage collection.

    Modules and models live until the process ends. Otherwise the interpreter would search them for
    garbage again and again, and several times at its end.

    Nothing is exempted after the import of a library that is bound by nanobind, such as Triton from
    3.9 on: nanobind would report its types, which were not collected, as leaked in some forty
    lines.
    """
    metaclasses = type.__subclasses__(type)
    uses_nanobind = any(metaclass.__module__ == "nanobind" for metaclass in metaclasses)
    if not uses_nanobind:
        gc.freeze()
