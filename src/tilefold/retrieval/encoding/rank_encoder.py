"""Encoding into a folder by the ranks of a process group, which take shards one by one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Generic

from tilefold.distributed.rank_store import FINISHED, POLL_SECONDS, RankStore
from tilefold.pipeline.rows import IN_FLIGHT
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.encoding.job import Job
from tilefold.retrieval.encoding.pending_shards import WAITING_SHARDS, PendingShard, encode_shards
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import (
    M,
    Receipt,
    ShardWriter,
    V,
    check_not_all_failed,
    differences,
)

__all__ = ["RankEncoder"]

# Shards that a rank has taken and not yet written, at most. There are few, so that ranks finish at
# the same time, but more than a stream holds back of one batch.
OPEN_SHARDS = IN_FLIGHT + 2

# Keys of the store.
MISSING_SHARDS = "missing_shards"  # numbers of the shards to encode, and the partial one
FOLDER_IDENTITY = "folder_identity"  # put by rank 0 when the folder is open


def _identity_key(rank: int) -> str:
    """Return the key of the identity that `rank` writes with."""
    return f"identity_of_{rank}"


class RankEncoder(Generic[M, V]):
    """Encodes shards on one rank, which takes the next one of all ranks when it is ready for it.

    Rank 0 holds the folder, lists the shards that all ranks leave there, and reports progress.

    Args:
        job: the model, the texts and the folder.
        store: the store that all ranks share.
    """

    def __init__(self, job: Job[M, V], store: RankStore) -> None:
        self.job = job
        self.store = store
        self._shard_ids = job.shard_ids()
        self._writer: Any = None  # a ShardWriter, once the folder is open
        self._unlisted: list[int] = []  # on rank 0: shards that the manifest does not list
        self._n_reported = -1
        self._identities_agree = False
        self._open_shards = threading.Semaphore(OPEN_SHARDS)

    def run(self) -> M:
        """Encode with the other ranks, and return the complete manifest."""
        return self._run_rank_0() if self.store.rank == 0 else self._run_other_rank()

    def _run_rank_0(self) -> M:
        """Encode, list the shards of all ranks, and return the complete manifest."""
        if self.job.defers_opening():
            self._unlisted = list(range(len(self._shard_ids)))
            self.store.put(MISSING_SHARDS, {"shards": self._unlisted, "partial": {}})
            self._encode(open_folder=self._open_listing_folder)
        else:
            self._writer = self.job.open_writer(lists=True)
            self._unlisted = [
                number
                for number in range(len(self._shard_ids))
                if not self._writer.has_shard(number)
            ]
            missing = {"shards": self._unlisted, "partial": self._writer.manifest.partial}
            self.store.put(MISSING_SHARDS, missing)
            self._announce_folder()
            self._encode(open_folder=None)
        while self._list_received():
            self._check_and_report()
            time.sleep(POLL_SECONDS)
        self._check_and_report()
        manifest: M = self._writer.finish(len(self.job.texts))
        self.store.put(FINISHED, True)
        return manifest

    def _run_other_rank(self) -> M:
        """Encode, and return the complete manifest once rank 0 has listed all shards."""
        self._encode(open_folder=self._open_shared_folder)
        self.store.wait_for(FINISHED)
        manifest: M = self._writer.listed()
        return manifest

    def _encode(self, *, open_folder: Callable[[], None] | None) -> None:
        """Encode and write the shards of this rank.

        Args:
            open_folder: opens the folder when the first batch is on the device. None if the folder
                is open.
        """
        with (
            BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as writer_thread,
            closing(
                encode_shards(
                    self.job,
                    self._take_shards(),
                    self._write,
                    writer_thread,
                    open_folder,
                ),
            ) as updated_shards,
        ):
            for _ in updated_shards:
                self._check_and_report()

    def _open_listing_folder(self) -> None:
        """On rank 0, open the folder as the rank that lists shards."""
        self._writer = self.job.open_writer(lists=True)
        self._announce_folder()

    def _announce_folder(self) -> None:
        """On rank 0, let the other ranks write into the folder."""
        self._check_and_report()
        self.store.put(FOLDER_IDENTITY, self._identity())

    def _open_shared_folder(self) -> None:
        """On another rank, wait until rank 0 has opened the folder with the same identity."""
        self._writer = self.job.open_writer(lists=False)
        identity = self._identity()
        self.store.put(_identity_key(self.store.rank), identity)
        if self.store.wait_for(FOLDER_IDENTITY) != identity:
            self.store.wait_for(FINISHED)  # raises the error of rank 0, which names the differences

    def _identity(self) -> Json:
        """Return the identity of the folder after a round trip through JSON."""
        identity: Json = json.loads(json.dumps(self._writer.manifest.identity))
        return identity

    def _take_shards(self) -> Iterator[PendingShard[V] | None]:
        """Take shards for this rank from the counter that all ranks share.

        This runs in the thread that tokenises.

        Yields:
            A shard that no other rank has, or None while this rank has enough unwritten shards.
        """
        missing = self.store.wait_for(MISSING_SHARDS)
        numbers: list[int] = missing["shards"]
        while True:
            while not self._open_shards.acquire(timeout=POLL_SECONDS):
                self.store.raise_failure()
                yield None
            position = self.store.count_up()  # another number for each call of any rank
            if position >= len(numbers):
                return
            yield self._create_shard(numbers[position], missing["partial"])

    def _create_shard(self, number: int, partial: Json) -> PendingShard[V]:
        """Create a shard, with the part of it that an earlier run of one process saved.

        Args:
            number: number of the shard.
            partial: entry of the partial shard in the manifest; empty if there is none.
        """
        shard: PendingShard[V] = PendingShard(number, self._shard_ids[number], self.job.texts)
        if partial.get("shard") == number:
            reader: ShardWriter[M, V] = self.job.open_writer(lists=False)
            reader.manifest.partial = partial
            shard.restore(reader.read_partial(number))
        return shard

    def _write(self, shard: PendingShard[V]) -> None:
        """Write a shard with a receipt, by which rank 0 lists it in the manifest.

        This runs in the background thread that writes.
        """
        self._open_shards.release()  # this rank may take another shard
        vectors, failed = shard.assemble(self.job)
        self._writer.leave_shard(shard.number, vectors, failed, shard.truncation)
        shard.mark_written()
        self._list_received()

    def _check_and_report(self) -> None:
        """Raise the error of any rank that has failed. On rank 0, report progress."""
        self.store.raise_failure()
        n_texts = len(self.job.texts)
        n_done = n_texts - sum(len(self._shard_ids[number]) for number in self._unlisted)
        if self.store.rank == 0 and n_done > self._n_reported:
            self._n_reported = n_done
            self.job.output.report(n_done, n_texts)

    def _list_received(self) -> bool:
        """On rank 0, list the shards that have receipts, in order, up to the first without one.

        Nothing is listed before all ranks have opened the folder with the same identity.

        Returns:
            Whether shards are left to list. False on other ranks.
        """
        if not self._unlisted or not self._check_identities():
            return bool(self._unlisted)
        while self._unlisted:
            number = self._unlisted[0]
            receipt = Receipt.read(self._writer.path, number, self._writer.key)
            if receipt is None:
                break
            self._check_receipt(number, receipt)
            self._writer.receive([number])
            self._unlisted = self._unlisted[1:]
        return bool(self._unlisted)

    def _check_receipt(self, number: int, receipt: Receipt) -> None:
        """Raise ``DataError`` if all texts of a shard failed, and remove its receipt.

        Without the receipt, the next run encodes the shard again.

        Args:
            number: number of the shard.
            receipt: receipt of the shard.
        """
        is_last = number == len(self._shard_ids) - 1
        try:
            check_not_all_failed(
                number,
                int(receipt.shard["rows"]),
                receipt.failed,
                nothing_yet=is_last and self._writer.manifest.n_documents == 0,
            )
        except DataError:
            Receipt.file_of(self._writer.path, number).unlink()
            raise

    def _check_identities(self) -> bool:
        """On rank 0, return whether all ranks have opened the folder with the same identity.

        Raises:
            DataError: if a rank has another model, other texts or other settings.
        """
        if self._identities_agree:
            return True
        other_ranks = self.store.watched_ranks
        if not self.store.has(*(_identity_key(rank) for rank in other_ranks)):
            return False
        for rank in other_ranks:
            identity = self.store.wait_for(_identity_key(rank))
            changed = differences(self._identity(), identity, "on rank 0", f"on rank {rank}")
            if changed:
                raise DataError(
                    f"rank {rank} encodes something else ({changed}). Give all ranks of the group "
                    "the same model, texts and settings, or group=None to one alone.",
                )
        self._identities_agree = True
        return True
