"""SIGTERM and Ctrl-C as exceptions that no destructor can lose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import pytest

from tests.signals import default_action
from tilefold._internal.termination import (
    Terminated,
    TerminationHandler,
    raise_if_terminated,
)
from tilefold.cli import _common


class SignalledInDestructor:
    """An object whose destructor is interrupted by a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def wait(seconds: float = 5.0) -> None:
    """Run Python code for a while, so that a pending signal is handled."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_sigterm_is_an_interrupt_within_the_context_only() -> None:
    with default_action():
        handler = TerminationHandler()
        with pytest.raises(KeyboardInterrupt), handler:
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
        assert handler.received
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_repeated_sigterm_does_not_disturb_what_follows_the_first() -> None:
    with default_action(), TerminationHandler():
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
        os.kill(os.getpid(), signal.SIGTERM)
        wait(0.2)


@pytest.mark.parametrize(
    ("number", "exception"),
    [
        pytest.param(signal.SIGTERM, Terminated, id="SIGTERM"),
        pytest.param(signal.SIGINT, KeyboardInterrupt, id="ctrl-c"),
    ],
)
def test_a_signal_in_a_destructor_is_not_lost(
    number: int,
    exception: type[KeyboardInterrupt],
) -> None:
    with default_action(), pytest.raises(exception), TerminationHandler():
        interrupted = SignalledInDestructor(number)
        del interrupted
        wait()


def receive_sigterm_and_go_on() -> None:
    """Receive SIGTERM in code that swallows every exception, as a library may do."""
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
        wait()


def test_a_sigterm_that_a_library_swallowed_ends_the_work_between_its_parts() -> None:
    with default_action(), TerminationHandler():
        raise_if_terminated()
        receive_sigterm_and_go_on()
        with pytest.raises(Terminated):
            raise_if_terminated()
    raise_if_terminated()


@pytest.mark.parametrize("progress_bar", [_common.progress_bar, _common.resumable_progress_bar])
def test_a_command_ends_at_its_next_report_of_progress(
    progress_bar: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> None:
    with default_action(), TerminationHandler(), progress_bar("encoding") as update:
        update(1, 3)
        receive_sigterm_and_go_on()
        with pytest.raises(Terminated):
            update(2, 3)


def test_a_handler_of_the_program_stays() -> None:
    received = []
    with default_action():
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        with TerminationHandler():
            os.kill(os.getpid(), signal.SIGTERM)
            wait(0.2)
    assert received == [signal.SIGTERM]


def test_a_forked_child_ends_by_the_signal() -> None:
    with default_action(), TerminationHandler():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
            os._exit(1)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
