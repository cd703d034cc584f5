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

# Maximum number of shards that a rank has taken and not yet written. It is small, so that ranks
# finish at the same time, but larger than the number of batches that a stream holds back.
OPEN_SHARDS = IN_FLIGHT + 2

# Keys of the store.
MISSING_SHARDS = "missing_shards"  # shards to encode, and the manifest entry of a partial shard
FOLDER_IDENTITY = (
    "folder_identity"  # settings of the folder; rank 0 puts it when the folder is open
)


def _identity_key(rank: int) -> str:
    """Return the key of the settings with which `rank` writes."""
    return f"identity_of_{rank}"


class RankEncoder(Generic[M, V]):
    """Encodes shards on one rank of a process group.

    Each rank takes the next shard from a common counter when it is ready for it, and writes the
    shard with a receipt. Rank 0 holds the lock of the folder, adds the shards of all ranks to the
    manifest, and reports progress.

    Args:
        job: the model, the texts and the folder.
        store: the store that all ranks share.
    """

    def __init__(self, job: Job[M, V], store: RankStore) -> None:
        """Prepare to encode; the folder is opened by :meth:`run`."""
        self.job = job
        self.store = store
        self._shard_ids = job.shard_ids()
        self._writer: Any = None  # a ShardWriter, once the folder is open
        self._unregistered: list[int] = []  # on rank 0: shards that are not in the manifest
        self._n_reported = -1
        self._identities_agree = False
        self._shard_slots = threading.Semaphore(OPEN_SHARDS)

    def run(self) -> M:
        """Encode with the other ranks, and return the complete manifest."""
        return self._run_rank_0() if self.store.rank == 0 else self._run_other_rank()

    def _run_rank_0(self) -> M:
        """Encode, add the shards of all ranks to the manifest, and return it when all are added."""
        if self.job.defers_opening():
            # A new folder lacks all shards, so the ranks can start before it is open.
            self._announce_shards(list(range(len(self._shard_ids))), partial={})
            self._encode(open_folder=self._open_and_announce_folder)
        else:
            self._writer = self.job.open_writer(writes_manifest=True)
            missing = [
                number
                for number in range(len(self._shard_ids))
                if not self._writer.reuse_shard(number)
            ]
            self._announce_shards(missing, partial=self._writer.manifest.partial)
            self._announce_folder()
            self._encode(open_folder=None)
        self._register_received_shards()
        while self._unregistered:
            self._check_and_report()
            time.sleep(POLL_SECONDS)
            self._register_received_shards()
        self._check_and_report()
        manifest: M = self._writer.finish(len(self.job.texts))
        self.store.put(FINISHED, True)
        return manifest

    def _run_other_rank(self) -> M:
        """Encode, and return the complete manifest once rank 0 has registered all shards."""
        self._encode(open_folder=self._open_shared_folder)
        self.store.wait_for(FINISHED)
        manifest: M = self._writer.read_manifest()
        return manifest

    def _encode(self, *, open_folder: Callable[[], None] | None) -> None:
        """Encode and write the shards of this rank.

        Args:
            open_folder: opens the folder once the device has its first batch, to save time
                (:meth:`Job.defers_opening`). None if the folder is open.
        """
        with BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as writer_thread:
            updated_shards = encode_shards(
                self.job,
                self._take_shards(),
                write=self._write,
                writer_thread=writer_thread,
                open_folder=open_folder,
            )
            with closing(updated_shards):
                for _ in updated_shards:
                    self._check_and_report()

    def _announce_shards(self, missing: list[int], *, partial: Json) -> None:
        """On rank 0, tell all ranks which shards to encode.

        Args:
            missing: numbers of the shards.
            partial: manifest entry of the shard that an earlier run has finished in part; empty if
                there is none.
        """
        self._unregistered = missing
        self.store.put(MISSING_SHARDS, {"shards": missing, "partial": partial})

    def _open_and_announce_folder(self) -> None:
        """On rank 0, lock the folder, and let the other ranks write into it."""
        self._writer = self.job.open_writer(writes_manifest=True)
        self._announce_folder()

    def _announce_folder(self) -> None:
        """On rank 0, let the other ranks write into the folder."""
        self._check_and_report()
        self.store.put(FOLDER_IDENTITY, self._identity())

    def _open_shared_folder(self) -> None:
        """On another rank than 0, wait until rank 0 has opened the folder, and compare settings.

        Raises:
            RankError: if rank 0 has other settings.
        """
        self._writer = self.job.open_writer(writes_manifest=False)
        identity = self._identity()
        self.store.put(_identity_key(self.store.rank), identity)
        if self.store.wait_for(FOLDER_IDENTITY) != identity:
            self.store.wait_for(FINISHED)  # raises the error of rank 0, which names the differences

    def _identity(self) -> Json:
        """Return the settings of the folder as JSON stores them, so that ranks can compare them."""
        identity: Json = json.loads(json.dumps(self._writer.manifest.identity))
        return identity

    def _take_shards(self) -> Iterator[PendingShard[V] | None]:
        """Take shards for this rank from the counter that all ranks share.

        This runs in the thread that tokenises.

        Yields:
            A shard that no other rank has. None while ``OPEN_SHARDS`` shards of this rank are
            unwritten.
        """
        missing = self.store.wait_for(MISSING_SHARDS)
        numbers: list[int] = missing["shards"]
        while True:
            while not self._shard_slots.acquire(timeout=POLL_SECONDS):
                self.store.raise_failure()
                yield None
            position = self.store.count_up()  # unique across ranks
            if position >= len(numbers):
                return
            yield self._create_shard(numbers[position], missing["partial"])

    def _create_shard(self, number: int, partial: Json) -> PendingShard[V]:
        """Create a shard, and restore the part of it that an earlier run has saved.

        Args:
            number: number of the shard.
            partial: entry in the manifest of the shard that an earlier run has finished in part;
                empty if there is none.
        """
        shard: PendingShard[V] = PendingShard(number, self._shard_ids[number], self.job.texts)
        if partial.get("shard") == number:
            # The folder may not be open yet, so a separate writer reads the part. It does not read
            # the manifest, but gets the entry that rank 0 has read.
            writer: ShardWriter[M, V] = self.job.open_writer(writes_manifest=False)
            writer.manifest.partial = partial
            shard.restore(writer.read_partial(number))
        return shard

    def _write(self, shard: PendingShard[V]) -> None:
        """Write a shard with a receipt, a file by which rank 0 knows that the shard is complete.

        Rank 0 then adds the shard to the manifest. This runs in the background thread that writes.
        """
        self._shard_slots.release()  # this rank may take another shard
        vectors, failed = shard.assemble(self.job)
        self._writer.write_shard_with_receipt(shard.number, vectors, failed, shard.truncation)
        shard.mark_written()
        self._register_received_shards()

    def _check_and_report(self) -> None:
        """Raise the error of any rank that has failed. On rank 0, report progress."""
        self.store.raise_failure()
        n_texts = len(self.job.texts)
        n_done = n_texts - sum(len(self._shard_ids[number]) for number in self._unregistered)
        if self.store.rank == 0 and n_done > self._n_reported:
            self._n_reported = n_done
            self.job.output.report(n_done, n_texts)

    def _register_received_shards(self) -> None:
        """On rank 0, add shards to the manifest in order, up to the first one without a receipt.

        A rank writes a receipt when it has written a shard. Nothing is added before all ranks have
        opened the folder with the same settings.
        """
        while self._unregistered and self._check_identities():
            number = self._unregistered[0]
            receipt = Receipt.read(self._writer.path, number, self._writer.key)
            if receipt is None:
                return
            self._reject_failed_shard(number, receipt)
            self._writer.register_received([number])
            # A new list, because another thread may iterate over this one.
            self._unregistered = self._unregistered[1:]

    def _reject_failed_shard(self, number: int, receipt: Receipt) -> None:
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
                receipt.n_encoded,
                receipt.failed,
                leaves_no_vectors=is_last and self._writer.manifest.n_documents == 0,
            )
        except DataError:
            Receipt.file_of(self._writer.path, number).unlink()
            raise

    def _check_identities(self) -> bool:
        """On rank 0, return whether all ranks have opened the folder with the same settings.

        The settings of a rank include fingerprints of its model and its texts.

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
                    "the same model, texts and settings, or pass group=None to encode on a single "
                    "rank.",
                )
        self._identities_agree = True
        return True
