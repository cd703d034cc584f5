"""Encoding into a folder by one process, which also saves parts of unfinished shards.

A shard is kept once the manifest lists it. Reported progress is ahead by at most a part of the
first unwritten shard. This part is saved after some minutes and on Ctrl-C.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Generic

from tilefold.pipeline.threads import BackgroundWorker
from tilefold.retrieval.encoding.job import Job
from tilefold.retrieval.encoding.pending_shards import WAITING_SHARDS, PendingShard, encode_shards
from tilefold.retrieval.vectors.shards import M, PartialShard, V, check_not_all_failed

__all__ = ["FolderEncoder"]


class FolderEncoder(Generic[M, V]):
    """Encodes the shards that a folder lacks, in one process.

    Args:
        job: the model, the texts and the folder.
    """

    def __init__(self, job: Job[M, V]) -> None:
        """Prepare to encode; the folder is opened by :meth:`run`."""
        self.job = job
        self._save_seconds = 60 * job.output.save_minutes
        self._n_texts = len(job.texts)
        self._writer: Any = None  # a ShardWriter, once the folder is open
        self._shards: deque[PendingShard[V]] = deque()  # not written at the last report
        self._n_written = 0  # texts of all other shards
        self._n_reported = 0  # texts that the last report counted as done

    def run(self) -> M:
        """Encode and write all shards, and return the complete manifest."""
        if self.job.defers_opening():
            self._shards.extend(self._all_shards())  # a new folder lacks all shards
            self._encode_or_save(open_folder=self._open_new_folder)
        else:
            self._open_folder_to_resume()
            self._encode_or_save(open_folder=None)
        self._report()
        manifest: M = self._writer.finish(self._n_texts)
        return manifest

    def _open_new_folder(self) -> None:
        """Open a folder that has nothing to resume."""
        self._writer = self.job.open_writer(writes_manifest=True)
        self.job.output.report(0, self._n_texts)

    def _open_folder_to_resume(self) -> None:
        """Open a folder that may have shards, and collect the missing ones."""
        self._writer = self.job.open_writer(writes_manifest=True)
        self._shards.extend(self._missing_shards())
        self._n_written = self._n_texts - sum(len(shard.ids) for shard in self._shards)
        self._n_reported = self._n_written
        if self._shards:
            self._n_reported += self._shards[0].n_saved
        self.job.output.report(self._n_reported, self._n_texts)

    def _encode_or_save(self, *, open_folder: Callable[[], None] | None) -> None:
        """Encode and write the shards. On Ctrl-C, save the finished texts.

        Args:
            open_folder: opens the folder once the device has its first batch; None if it is open.
        """
        try:
            self._encode(open_folder)
        except KeyboardInterrupt:  # the thread that writes has ended
            self._save_finished()
            raise

    def _encode(self, open_folder: Callable[[], None] | None) -> None:
        """Encode and write the shards.

        A background thread writes finished shards. If a shard takes longer than ``save_minutes``,
        the part of it that is finished is saved.

        Args:
            open_folder: opens the folder once the device has its first batch; None if it is open.
        """
        with BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as writer_thread:
            updated_shards = encode_shards(
                self.job,
                list(self._shards),
                write=self._write,
                writer_thread=writer_thread,
                open_folder=open_folder,
            )
            with closing(updated_shards):
                for shard in updated_shards:
                    is_due = time.monotonic() - shard.last_saved >= self._save_seconds
                    if is_due and not shard.is_finished:
                        writer_thread.drain()
                        self._save_part()
                    self._report()

    def _all_shards(self) -> Iterator[PendingShard[V]]:
        for number, ids in enumerate(self.job.shard_ids()):
            yield PendingShard(number, ids, self.job.texts)

    def _missing_shards(self) -> Iterator[PendingShard[V]]:
        """Yield the shards that the folder lacks, with the part that an earlier run saved."""
        for shard in self._all_shards():
            if not self._writer.reuse_shard(shard.number):
                shard.restore(self._writer.read_partial(shard.number))
                yield shard

    def _write(self, shard: PendingShard[V]) -> None:
        """Write a finished shard and add it to the manifest.

        This runs in the background thread that writes, or after that thread has ended.

        Raises:
            DataError: if all texts failed, either of the folder or of a shard that is not small.
        """
        vectors, failed = shard.assemble(self.job)
        is_last = (shard.number + 1) * self.job.output.shard_size >= self._n_texts
        check_not_all_failed(
            shard.number,
            len(vectors),
            failed,
            leaves_no_vectors=is_last and self._writer.manifest.n_documents == 0,
        )
        self._writer.write_shard(shard.number, vectors, failed, shard.truncation)
        shard.mark_written()

    def _first_unwritten(self) -> PendingShard[V] | None:
        return next((shard for shard in self._shards if not shard.is_written), None)

    def _save_part(self) -> None:
        """Save the finished texts of the first unwritten shard.

        A shard whose texts are all finished is not saved, because it is about to be written. The
        background thread that writes must be idle.
        """
        shard = self._first_unwritten()
        if shard is None or self._writer is None:
            return
        has_unsaved_texts = shard.n_finished > shard.n_saved
        if shard.encoded and has_unsaved_texts and not shard.is_finished:
            part = PartialShard(shard.concatenate(), shard.failed, shard.truncation)
            self._writer.write_partial(shard.number, part)
            shard.n_saved = shard.n_finished
        shard.last_saved = time.monotonic()

    def _save_finished(self) -> None:
        """Save the first unwritten shard after an interruption.

        No thread will write it any more. If the shard is finished, it is written. If it is
        unfinished, only its finished texts are saved.
        """
        shard = self._first_unwritten()
        if shard is None or self._writer is None:
            return
        if not shard.is_finished:
            self._save_part()
        elif shard.encoded:  # writing a shard whose texts all failed may raise an error
            self._write(shard)

    def _report(self) -> None:
        """Report how many texts are done, if the count has grown.

        These are the texts of written shards, and the finished texts of the next shard.
        """
        while self._shards and self._shards[0].is_written:
            self._n_written += len(self._shards.popleft().ids)
        n_done = self._n_written
        if self._shards:
            n_done += self._n_reportable(self._shards[0])
        if n_done > self._n_reported:
            self._n_reported = n_done
            self.job.output.report(n_done, self._n_texts)

    def _n_reportable(self, shard: PendingShard[V]) -> int:
        """Return how many texts of an unwritten shard count as done in a report of progress.

        The last text of a finished shard counts only when the shard is written. If a thread writes
        while the model goes on, the other texts are reported. Otherwise the shard is written before
        the next batch, so that nothing is reported until then.
        """
        if not shard.is_finished:
            return shard.n_finished
        return shard.n_finished - 1 if self.job.is_streaming else 0
