"""Writes a folder of vectors with all ranks of a process group: one manifest, and the bytes of one process alone.

Each rank takes the next shard when it is ready for one, so none waits while there is one, whatever their lengths, and
leaves it with a receipt. The first rank holds the folder, and lists shards in their order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tilefold._process_group import ranks_of
from tilefold.pipeline.rows import IN_FLIGHT
from tilefold.retrieval._made import Shard
from tilefold.retrieval._meeting import POLL_SECONDS, Meeting, meeting
from tilefold.retrieval._receipts import Receipt, check_some
from tilefold.retrieval._shards import Vectors, differences
from tilefold.retrieval._streamed import FolderShards, Job, encode_shards
from tilefold.retrieval.errors import DataError

# that a rank has taken and not yet encoded: few at the end of the work, but more than a stream holds back of one batch
OPEN_SHARDS = IN_FLIGHT + 2
V = TypeVar("V", bound=Vectors)


def write_folder(job: Job[V], group: object) -> Any:
    """Do a job with the ranks that `group` means, or alone; the complete manifest."""
    ranks = ranks_of(group)
    if ranks is None:
        return FolderShards(job).run()
    with meeting(ranks) as found, found.stopping():
        shards = RankShards(job, found)
        return shards.lead() if found.rank == 0 else shards.help()


class RankShards(Generic[V]):
    """Shards of one rank. Only whole ones are kept, and only the first rank reports.

    Args:
        job: the same on all ranks.
        ranks: all of them.
    """

    def __init__(self, job: Job[V], ranks: Meeting) -> None:
        self.job, self.ranks = job, ranks
        self.chunks = job.chunks()
        self.writer: Any = None  # a ShardWriter, once it is open
        self.left: list[int] = []  # at the first rank: shards that the manifest does not list
        self.reported = -1
        self._agreed = False
        self._places = threading.Semaphore(OPEN_SHARDS)

    def lead(self) -> Any:
        """Encode, list what all ranks leave, and report; the complete manifest."""
        late = self.job.opens_late()
        if not late:
            self.writer = self.job.open_writer(True)
        numbers = range(len(self.chunks))
        self.left = [number for number in numbers if self.writer is None or not self.writer.has_shard(number)]
        partial = {} if self.writer is None else self.writer.manifest.partial
        self.ranks.say("missing", {"shards": self.left, "partial": partial})
        if not late:
            self._open()
        self._encode(self._open if late else None)
        while self._list():
            self._step()
            time.sleep(POLL_SECONDS)
        self._step()
        manifest = self.writer.finish(len(self.job.texts))
        self.ranks.say("over", True)
        return manifest

    def help(self) -> Any:
        """Encode; the complete manifest, once the first rank has listed all."""
        self._encode(self._join)
        self.ranks.heard("over")
        return self.writer.listed()

    def _encode(self, open_late: Callable[[], None] | None) -> None:
        encode_shards(self.job, self._taken(), self._write, open_late=open_late, step=self._step, fail=self._fail)

    def _fail(self, error: BaseException, _: object) -> None:
        """Before the thread that works ahead ends, since that may wait for a place until it hears of it."""
        self.ranks.stop(error)

    def _open(self) -> None:
        self.writer = self.writer or self.job.open_writer(True)
        self._step()
        self.ranks.say("open", self._identity())

    def _join(self) -> None:
        """Another rank stores nothing before the first one has opened the folder, for the same."""
        self.writer = self.writer or self.job.open_writer(False)
        mine = self._identity()
        self.ranks.say(f"identity of {self.ranks.rank}", mine)
        if self.ranks.heard("open") != mine:
            self.ranks.heard("over")  # the first rank says what differs

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = json.loads(json.dumps(self.writer.identified(self.writer.manifest)))
        return identity

    def _taken(self) -> Iterator[Shard[V]]:
        """In the thread that works ahead."""
        missing = self.ranks.heard("missing")
        while True:
            while not self._places.acquire(timeout=POLL_SECONDS):
                self.ranks.check()
            place = self.ranks.count()
            if place >= len(missing["shards"]):
                return
            number = missing["shards"][place]
            shard: Shard[V] = Shard(number, self.chunks[number], self.job.texts)
            if number == missing["partial"].get("shard"):  # which an earlier run of one process kept
                writer = self.job.open_writer(False)
                writer.manifest.partial = missing["partial"]
                shard = shard.resumed(writer.read_partial(number))
            yield shard

    def _write(self, shard: Shard[V]) -> None:
        """In the thread that works behind."""
        self._places.release()
        vectors, failed = shard.assembled(self.job.maker)
        self.writer.leave_shard(shard.number, vectors, failed, shard.cut)
        shard.written()
        self._list()

    def _step(self, *_: object) -> None:
        self.ranks.check()
        done = len(self.job.texts) - sum(len(self.chunks[number]) for number in self.left)
        if self.ranks.rank == 0 and done > self.reported:  # only the first one knows what is left
            self.reported = done
            self.job.output.report(done, len(self.job.texts))

    def _list(self) -> bool:
        """At the first rank, list the shards that have receipts, in order; whether there are others."""
        if not self.left or not self._agree():
            return bool(self.left)
        folder, key = self.writer.path, self.writer.key
        while self.left and (receipt := Receipt.read(folder, self.left[0], key)) is not None:
            number, rows = self.left[0], int(receipt.shard["rows"])
            nothing_yet = number == len(self.chunks) - 1 and self.writer.manifest.n_documents == 0
            try:
                check_some(number, rows, receipt.failed, nothing_yet=nothing_yet)
            except DataError:
                Receipt.file_of(folder, number).unlink()
                raise
            self.writer.receive([number])
            self.left = self.left[1:]
        return bool(self.left)

    def _agree(self) -> bool:
        """Whether all ranks have said that they write the same.

        Raises:
            DataError: one writes something else.
        """
        others = self.ranks.others
        if self._agreed or not self.ranks.said(*(f"identity of {rank}" for rank in others)):
            return self._agreed
        for rank in others:
            changed = differences(
                self._identity(), self.ranks.heard(f"identity of {rank}"), "on rank 0", f"on rank {rank}"
            )
            if changed:
                raise DataError(
                    f"rank {rank} encodes something else ({changed}). Give all ranks of the group the same model, "
                    "texts and settings, or group=None to a rank on its own."
                )
        self._agreed = True
        return True
