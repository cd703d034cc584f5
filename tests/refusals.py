"""Refusals in a line: what is refused, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    kind: type[BaseException],
    message: str,
    call: Callable[..., Any],
    /,
    *args: Any,
    **options: Any,
) -> None:
    """Expect that `call` of the arguments raises an error of this kind, whose text matches
    `message`.
    """
    with pytest.raises(kind, match=message):
        call(*args, **options)
