"""SIGTERM as an interrupt, so that work ends as after Ctrl-C and keeps what is finished."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

__all__ = ["TERMINATED", "Terminated", "TerminationHandler"]

TERMINATED = 128 + signal.SIGTERM  # exit code of a process that SIGTERM ended, as shells report it
_REPEAT_SECONDS = 10.0  # in which another SIGTERM repeats the first one
_RETRY_SECONDS = 0.05  # after an interrupt that was raised in a destructor, which ignores it


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which Kubernetes, Slurm and systemd end a process."""


class TerminationHandler:
    """Context in which SIGTERM raises :class:`Terminated` in the main thread.

    A process may get the signal twice, from its group and from its parent. A repeat within
    ``_REPEAT_SECONDS`` does not disturb the code that stores finished work.

    Python ignores an exception in a destructor or in a callback from C. A signal that arrives there
    is sent again, also the SIGINT of Ctrl-C.

    Nothing is installed outside of the main thread, or where the program handles or ignores the
    signal itself. A forked child, such as a worker that loads data, ends without an exception.

    Attributes:
        received: whether a SIGTERM has arrived.
    """

    def __init__(self) -> None:
        self.received = False
        self._raised_at = -math.inf  # of time.monotonic()
        self._process = os.getpid()
        self._is_installed = False
        self._previous_hook = sys.unraisablehook

    def __enter__(self) -> TerminationHandler:
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._previous_hook = sys.unraisablehook
            sys.unraisablehook = self._retry
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.unraisablehook = self._previous_hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM by raising :class:`Terminated`.

        A signal that repeats another one of the last seconds is ignored.

        Args:
            number: number of the signal.
            frame: frame that was interrupted; unused.

        Raises:
            Terminated: in the main thread.
        """
        # A forked child inherits this handler, and must end as if there were none.
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

    def _retry(self, ignored: sys.UnraisableHookArgs) -> None:
        """Send a signal again if Python has ignored the exception that it raised.

        This is a hook of ``sys.unraisablehook``: Python calls it for an exception in a destructor,
        which cannot be raised. Exceptions that no signal raised go to the previous hook.

        Args:
            ignored: the exception.
        """
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._previous_hook(ignored)
            return
        number = signal.SIGINT
        if issubclass(ignored.exc_type, Terminated):
            number = signal.SIGTERM
            self._raised_at = -math.inf  # so that the signal is not taken for a repeat
        # A timer sends it, because the destructor must return first.
        timer = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
