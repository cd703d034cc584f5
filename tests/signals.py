"""Signals in tests that interrupt their own process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_action() -> Iterator[None]:
    """Handle SIGTERM and SIGINT as Python does by default, whatever runs the tests.

    A shell starts programs in the background with SIGINT ignored.
    """
    previous_sigterm = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    previous_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_sigterm)
        signal.signal(signal.SIGINT, previous_sigint)
