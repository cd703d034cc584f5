"""Handling of SIGTERM like Ctrl-C, so that work that ends early keeps its finished results."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import ClassVar

__all__ = ["TERMINATED", "Terminated", "TerminationHandler", "raise_if_terminated"]

TERMINATED = 128 + signal.SIGTERM  # exit code of a process that SIGTERM ended, as shells report it
_REPEAT_SECONDS = 10.0  # another SIGTERM within this time is a repeat of the first one
_RETRY_SECONDS = 0.05  # until a signal is sent again whose exception Python has ignored


class Terminated(KeyboardInterrupt):
    """Raised at a SIGTERM, by which Kubernetes, Slurm and systemd end a process."""


class TerminationHandler:
    """Context in which SIGTERM raises :class:`Terminated` in the main thread.

    A process may get the signal twice, from its group and from its parent. A repeat within
    ``_REPEAT_SECONDS`` is ignored, so that it does not disturb the code that stores finished work.

    Python ignores an exception in a destructor or in a callback from C. If a SIGTERM, or the SIGINT
    of Ctrl-C, arrives there, it is sent again. A library may also catch the exception and go on:
    long work calls :func:`raise_if_terminated` between its parts.

    The context does nothing outside the main thread, or if the program handles or ignores SIGTERM
    itself. In a forked child, such as a worker that loads data, SIGTERM ends the process as usual.

    Attributes:
        entered: the object whose context this process is in; None outside of any.
        received: whether a SIGTERM has arrived.
    """

    entered: ClassVar[TerminationHandler | None] = None

    def __init__(self) -> None:
        """Create the context; nothing is installed until it is entered."""
        self.received = False
        self._raised_at = -math.inf  # time.monotonic() of the last Terminated
        self._process = os.getpid()
        self._is_installed = False
        self._previous_hook = sys.unraisablehook

    def __enter__(self) -> TerminationHandler:
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._previous_hook = sys.unraisablehook
            sys.unraisablehook = self._resend_ignored_signal
            self._is_installed = True
            TerminationHandler.entered = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the default handler of SIGTERM, if this object has replaced it."""
        if self._is_installed:
            TerminationHandler.entered = None
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.unraisablehook = self._previous_hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise :class:`Terminated` at a SIGTERM.

        A repeat within ``_REPEAT_SECONDS`` is ignored. A forked child, which inherits this handler,
        is ended by the signal instead.

        Args:
            number: the signal number.
            frame: the interrupted frame; unused.

        Raises:
            Terminated: if this is the process that installed the handler.
        """
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if now - self._raised_at < _REPEAT_SECONDS:
            return
        self.received = True
        self._raised_at = now
        raise Terminated

    def _resend_ignored_signal(self, ignored: sys.UnraisableHookArgs) -> None:
        """Send a signal again if Python has ignored the exception that the signal raised.

        This is a ``sys.unraisablehook``: Python calls it for an exception that cannot propagate,
        such as one in a destructor. Exceptions other than interrupts are passed to the previous
        hook.

        Args:
            ignored: the exception.
        """
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._previous_hook(ignored)
            return
        number = signal.SIGINT
        if issubclass(ignored.exc_type, Terminated):
            number = signal.SIGTERM
            self._raised_at = -math.inf  # so that _handle() does not ignore it as a repeat
        # A timer sends the signal, because the destructor must return first.
        timer = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def raise_if_terminated() -> None:
    """Raise :class:`Terminated` again if a SIGTERM has arrived and the program still runs.

    Code between the signal and the command may swallow the first exception, for example by a bare
    ``except`` of another library. Commands call this function whenever they report progress. It
    does nothing outside the main thread and outside a :class:`TerminationHandler`.

    Raises:
        Terminated: if a SIGTERM has arrived.
    """
    handler = TerminationHandler.entered
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and handler is not None and handler.received:
        raise Terminated
