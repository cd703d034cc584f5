"""A process without threads, from which worker processes are forked whenever one is needed.

A fork copies the locks of a process, but only the thread that forks. A lock that another thread
holds at that moment, such as the lock of a module that it imports, is never released in the copy. A
template process is forked once, before the threads of a job have work. It has no threads itself, so
that workers forked from it at any later time have no such locks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from tilefold._internal.processes import describe_exit
from tilefold.retrieval.errors import WorkerError

__all__ = ["RunWorker", "WorkerTemplate"]

_PARENT_CHECK_SECONDS = 2.0  # time after which the template checks whether its parent has ended

# Runs in a worker, with the number of the worker and its connection to the parent.
RunWorker = Callable[[int, Connection], None]


@dataclass(frozen=True)
class _StartRequest:
    """Asks the template to fork a worker. The descriptor of its connection follows.

    Attributes:
        number: number of the worker.
    """

    number: int


@dataclass(frozen=True)
class _EndRequest:
    """Asks the template to end a worker, and to answer with its exit code.

    Attributes:
        number: number of the worker.
    """

    number: int


@dataclass(frozen=True)
class _CloseRequest:
    """Asks the template to end, and all workers with it.

    Closing the connection would not do: a process that another thread has forked may have a copy.
    """


class WorkerTemplate:
    """A process that forks workers, as seen from its parent.

    The template has what its parent has in memory when it is created. It ends when it is closed, or
    when its parent ends, and its workers end with it.

    Args:
        run_worker: what a worker does.
        fork_lock: a lock that no other thread may hold while the template is forked.
    """

    def __init__(self, run_worker: RunWorker, fork_lock: threading.Lock) -> None:
        """Fork the template process.

        Args:
            run_worker: what a worker does.
            fork_lock: a lock that no other thread may hold while the template is forked.
        """
        context = multiprocessing.get_context("fork")
        self._requests, requests_of_template = context.Pipe()
        self._process: Any = context.Process(
            target=_fork_on_request,
            args=(requests_of_template, self._requests, run_worker, fork_lock),
            daemon=True,
        )
        with requests_of_template, warnings.catch_warnings(), fork_lock:
            # Python warns that a fork of a process with threads may deadlock. The template is
            # forked before these threads have work, and while none of them holds `fork_lock`.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            self._process.start()

    def start_worker(self, number: int) -> Connection:
        """Fork a worker, without waiting for it.

        Args:
            number: number of the worker, which no running worker has.

        Returns:
            The connection to the worker. It ends if the worker ends or cannot be started.
            :meth:`end_worker` then returns the exit code, or raises the error.

        Raises:
            WorkerError: if the template has ended.
            OSError: if this process has too many open files.
        """
        connection, connection_of_worker = multiprocessing.Pipe()
        with connection_of_worker:
            try:
                self._requests.send(_StartRequest(number))
                send_handle(self._requests, connection_of_worker.fileno(), self._process.pid)
            except ConnectionError:  # other errors do not mean that the template has ended
                self._raise_ended()
        return connection

    def end_worker(self, number: int) -> int:
        """End a worker, if it has not ended, and return its exit code.

        Args:
            number: number of the worker.

        Returns:
            The exit code; ``-N`` if signal ``N`` has ended the worker.

        Raises:
            OSError: if the worker could not be started.
            WorkerError: if the template has ended.
        """
        try:
            self._requests.send(_EndRequest(number))
            outcome: int | OSError = self._requests.recv()
        except (EOFError, OSError):
            self._raise_ended()
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def _raise_ended(self) -> NoReturn:
        """Raise the error of a template that has ended."""
        self._process.join()
        raise WorkerError(
            "the process that starts workers has ended unexpectedly "
            f"({describe_exit(self._process.exitcode)}). Finished work is kept: run the same "
            "command again to resume, with fewer workers if memory is short.",
        )

    def begin_close(self) -> None:
        """Let the template kill all workers and end, without waiting for it."""
        with suppress(OSError):  # it has ended already
            self._requests.send(_CloseRequest())

    def close(self) -> None:
        """Kill all workers, and wait until they and the template have ended."""
        self.begin_close()
        self._process.join()
        self._requests.close()


def _fork_on_request(
    requests: Connection,
    requests_of_parent: Connection,
    run_worker: RunWorker,
    fork_lock: threading.Lock,
) -> None:
    """Fork and end workers in the template process, until its parent closes or ends.

    Args:
        requests: connection to the parent.
        requests_of_parent: the parent's end of this connection.
        run_worker: what a worker does.
        fork_lock: the lock that the thread held which has forked this process.
    """
    fork_lock.release()
    # A copy of the parent's end would keep the connection open after the parent has ended.
    requests_of_parent.close()
    _set_signal_handlers()
    workers = _ForkedWorkers(requests, run_worker)
    parent_id = os.getppid()
    try:
        while os.getppid() == parent_id:
            if not requests.poll(_PARENT_CHECK_SECONDS):
                continue
            request: _StartRequest | _EndRequest | _CloseRequest = requests.recv()
            if isinstance(request, _StartRequest):
                workers.start(request.number, Connection(recv_handle(requests)))
            elif isinstance(request, _EndRequest):
                requests.send(workers.end(request.number))
            else:
                break
    except (EOFError, OSError):  # the parent has ended
        pass
    finally:
        workers.end_all()


def _set_signal_handlers() -> None:
    """Replace the signal handlers of the parent, in the template and so in its workers.

    A handler of the parent may raise an exception, or ignore the signal. A worker that is killed
    by SIGTERM would then have another exit code, and the page that it decodes would be blamed. If
    SIGCHLD is ignored, the system drops the exit codes of workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class _ForkedWorkers:
    """The workers of a template, in the template process.

    Args:
        requests: connection of the template to its parent, which workers do not have.
        run_worker: what a worker does.
    """

    def __init__(self, requests: Connection, run_worker: RunWorker) -> None:
        self._requests = requests
        self._run_worker = run_worker
        self._process_ids: dict[int, int] = {}  # by number of the worker
        self._start_errors: dict[int, OSError] = {}

    def start(self, number: int, connection: Connection) -> None:
        """Fork a worker.

        Args:
            number: number of the worker.
            connection: the worker's end of its connection to the parent.
        """
        # This process closes its copy of the connection, so that it ends with the worker.
        with connection:
            try:
                process_id = os.fork()
            except OSError as error:
                self._start_errors[number] = error
                return
            if process_id == 0:
                self._run(number, connection)
            self._process_ids[number] = process_id

    def _run(self, number: int, connection: Connection) -> NoReturn:
        """Run the worker in the forked process, and end the process.

        The exit code is 0, or 1 after an exception.

        Args:
            number: number of the worker.
            connection: the worker's end of its connection to the parent.
        """
        exit_code = 1
        try:
            # The copy of the template's connection, which a worker does not use.
            self._requests.close()
            self._run_worker(number, connection)
            exit_code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Otherwise this process would go on to run the code of the template that forked it.
            os._exit(exit_code)

    def end(self, number: int) -> int | OSError:
        """Kill a worker, if it has not ended.

        Returns:
            Its exit code, or the error with which its start failed.
        """
        error = self._start_errors.pop(number, None)
        if error is not None:
            return error
        process_id = self._process_ids.pop(number)
        _kill(process_id)
        return _wait_for(process_id)

    def end_all(self) -> None:
        """Kill all workers, then wait for them, because each takes a while to release memory."""
        for process_id in self._process_ids.values():
            _kill(process_id)
        for process_id in self._process_ids.values():
            _wait_for(process_id)


def _kill(process_id: int) -> None:
    """Kill a child process that was not waited for; one that has ended keeps its exit code."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


def _wait_for(process_id: int) -> int:
    """Wait for a child process, and return its exit code."""
    _, status = os.waitpid(process_id, 0)
    return os.waitstatus_to_exitcode(status)
