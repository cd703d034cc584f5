"""Waiting for what threads and processes do, on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable

# Time limit of a wait that ends as soon as its condition is true. It is reached only by a test that
# fails: on a busy machine a process may stand still for a minute at any line.
WAIT_SECONDS = 300.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; fail after ``WAIT_SECONDS``."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)
