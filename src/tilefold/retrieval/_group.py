"""Ranks of a process group that share the shards of one folder: who takes which, and who lists what was stored.

The first rank has a :class:`Desk`; every other one asks it through a socket of the machine, which closes when either
process ends, so that the others hear of it at once. Shards are handed out in order, the next one to whom asks first:
no rank waits while there is one, whatever their lengths. The desk lists stored shards in order, too.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tilefold.retrieval._shards import ShardWriter, differences
from tilefold.retrieval._streamed import check_some
from tilefold.retrieval.errors import DataError, RankError

KEPT = "What was reported is kept: run the same again, with any number of ranks, to go on."
_POLL_SECONDS = 0.2
_HEARD_SECONDS = 10.0


class Desk:
    """Hands out shards and lists them, at the first rank; its methods may be called from any thread.

    Args:
        shards: of the folder.
        others: how many other ranks there are. Nothing is listed before all have said what they would write.
    """

    rank = 0

    def __init__(self, shards: int, others: int = 0) -> None:
        self.shards = shards
        self._silent = set(range(1, others + 1))
        self._changed = threading.Condition()
        self._numbers: list[int] | None = None  # of the shards that the folder lacks, once that is known
        self._taken = self.listed = 0
        self._over = False
        self._stored: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
        self._identities: dict[int, dict[str, Any]] = {}
        self._writer: ShardWriter[Any, Any] | None = None
        self._problem: BaseException | None = None
        self.tell: list[Callable[[dict[str, str]], None]] = []  # the other ranks

    def begin(self, numbers: Sequence[int]) -> None:
        """Hand out these shards from now on."""
        with self._changed:
            self._numbers = list(numbers)
            self._changed.notify_all()

    def open(self, writer: ShardWriter[Any, Any]) -> None:
        """List with `writer` from now on."""
        with self._changed:
            self._writer = writer
            self._list()
            self._changed.notify_all()

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The next shard, with what the manifest says of a kept part; None without another one."""
        with self._changed:
            while self._numbers is None:
                self._raise()
                self._changed.wait(_POLL_SECONDS)
            self._raise()
            if self._taken == len(self._numbers):
                return None
            number = self._numbers[self._taken]
            self._taken += 1
            partial = {} if self._writer is None else self._writer.manifest.partial
            return number, dict(partial) if partial.get("shard") == number else {}

    def identify(self, rank: int, identity: dict[str, Any]) -> None:
        """What a rank would write; nothing is listed if it differs from what this one writes.

        Returns when the folder is open: until then no rank may store anything there.
        """
        with self._changed:
            self._identities[rank] = identity
            self._silent.discard(rank)
            while self._writer is None:
                self._raise()
                self._changed.wait(_POLL_SECONDS)
            self._list()

    def hand_in(self, number: int, stored: dict[str, Any], failed: dict[str, str]) -> None:
        """A shard was stored; it is listed when those before it are."""
        with self._changed:
            self._raise()
            self._stored[number] = stored, failed
            self._list()
            self._changed.notify_all()

    def _list(self) -> None:
        if self._writer is None or self._problem is not None:
            return
        try:
            self._check_identities(self._writer)
            while not self._silent and self.left and (number := self.left[0]) in self._stored:
                stored, failed = self._stored.pop(number)
                if failed and not stored["rows"]:
                    check_some(number, failed, self._writer.manifest.n_documents == 0 and number == self.shards - 1)
                self._writer.list_shard(number, stored, failed)
                self.listed += 1
        except Exception as error:  # belongs to the caller of encode_collection, whatever thread this is
            self.stop(error)

    def _check_identities(self, writer: ShardWriter[Any, Any]) -> None:
        mine = json.loads(json.dumps(writer.identified(writer.manifest)))
        for rank, identity in self._identities.items():
            changed = differences(mine, identity, "on rank 0", f"on rank {rank}")
            if changed:
                raise DataError(
                    f"rank {rank} encodes something else ({changed}). Give all ranks of the group the same model, "
                    "texts and settings, or group=None to a rank on its own."
                )
        self._identities.clear()

    @property
    def left(self) -> list[int]:
        """Shards that are not listed."""
        return [] if self._numbers is None else self._numbers[self.listed :]

    def stop(self, problem: BaseException) -> None:
        """End the work of all ranks; the first problem counts."""
        with self._changed:
            if self._problem is not None:
                return
            self._problem = problem
            self._changed.notify_all()
        told = _told(problem)
        for tell in self.tell:
            tell({"stop": told if told.startswith("rank ") else f"rank 0: {told}"})

    def over(self) -> None:
        """Tell the others that everything is listed."""
        with self._changed:
            self._over = True
        for tell in self.tell:
            tell({"over": ""})

    def left_by(self, rank: int) -> None:
        """A rank has ended, well or not."""
        with self._changed:
            over = self._over
        if not over:
            self.stop(RankError(f"rank {rank} ended before the work was done. {KEPT}"))

    def check(self) -> None:
        """Raise what ended the work, if something did."""
        with self._changed:
            self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def wait(self, report: Callable[[], None]) -> None:
        """Until all shards are listed."""
        while True:
            report()
            with self._changed:
                self._raise()
                if not self.left:
                    break
                self._changed.wait(_POLL_SECONDS)
        report()


class Line:
    """The other ranks' way to the desk, which has the methods of :class:`Desk` that they need.

    Args:
        rank: of this process.
        connection: to the first rank.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self._connection = connection
        self._asking = threading.Lock()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._over = threading.Event()
        self._problem: BaseException | None = None
        threading.Thread(target=self._listen, name="tilefold-rank", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message = json.loads(self._connection.recv_bytes())
                if "answer" in message:
                    self._answers.put(message["answer"])
                    continue
                self._end(problem_of(message["stop"]) if "stop" in message else None)
                return  # a thread that reads would keep the line open when this rank closes it
        except (EOFError, OSError):
            self._end(RankError(f"rank 0 ended before the work was done. {KEPT}"))

    def _end(self, problem: BaseException | None) -> None:
        if not self._over.is_set():
            self._problem = problem
            self._over.set()

    def _ask(self, *message: Any) -> Any:
        with self._asking:
            try:
                self._connection.send_bytes(json.dumps(message).encode())
            except OSError:  # the listener says why
                self._over.wait()
            while True:
                self.check()
                over = self._over.is_set()  # before the look: what is answered comes before the last word, or never
                try:
                    return self._answers.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    if over:  # the last shard was listed, and that was told before the question was answered
                        self.check()
                        return None

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """As :meth:`Desk.take`."""
        found = self._ask("take")
        return None if found is None else (found[0], found[1])

    def identify(self, rank: int, identity: dict[str, Any]) -> None:
        """As :meth:`Desk.identify`."""
        self._ask("identify", rank, identity)

    def hand_in(self, number: int, stored: dict[str, Any], failed: dict[str, str]) -> None:
        """As :meth:`Desk.hand_in`."""
        self._ask("hand_in", number, stored, failed)

    def stop(self, problem: BaseException) -> None:
        """Tell the others that this rank has failed."""
        if not self._over.is_set():
            try:
                self._connection.send_bytes(json.dumps(["stop", _told(problem)]).encode())
            except OSError:
                return
            self._over.wait(timeout=_HEARD_SECONDS)  # so that the message is read before the line closes
            self._end(problem)

    def check(self) -> None:
        """Raise what ended the work, if something did."""
        if self._over.is_set() and self._problem is not None:
            raise self._problem

    def wait(self) -> None:
        """Until the first rank says that everything is listed."""
        self._over.wait()
        self.check()


def serve(desk: Desk, rank: int, connection: Connection) -> threading.Thread:
    """Answer another rank's questions in a thread, until the work is over."""
    sending = threading.Lock()

    def send(message: Mapping[str, Any]) -> None:
        with sending:
            try:
                connection.send_bytes(json.dumps(message).encode())
            except OSError:
                return  # the reading thread hears of it

    asked: dict[str, Callable[..., Any]] = {"take": desk.take, "identify": desk.identify, "hand_in": desk.hand_in}

    def work() -> None:
        try:
            while True:
                what, *rest = json.loads(connection.recv_bytes())
                if what == "stop":
                    desk.stop(problem_of(f"rank {rank}: {rest[0]}"))
                    continue
                send({"answer": asked[what](*rest)})
        except (EOFError, OSError):
            desk.left_by(rank)
        except BaseException as error:
            desk.stop(error)

    desk.tell.append(send)
    thread = threading.Thread(target=work, name=f"tilefold-rank-{rank}", daemon=True)
    thread.start()
    return thread


def _told(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return text if isinstance(problem, RankError) else f"{type(problem).__name__}: {text}"


def problem_of(told: str) -> BaseException:
    """What a rank raises that was told why another one has stopped: Ctrl-C for all, else an error that names it."""
    if "KeyboardInterrupt: " in told:
        return KeyboardInterrupt()
    return RankError(told if KEPT in told else f"{told} {KEPT}")


def connection_of(sock: socket.socket) -> Connection:
    """Messages over a socket, which belongs to them from now on."""
    sock.setblocking(True)
    return Connection(sock.detach())
