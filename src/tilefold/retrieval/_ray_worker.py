"""An actor of Ray: one model, loaded once, that writes shards of a shared folder."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilefold.pipeline.ahead import Behind
from tilefold.retrieval._made import Encoding, Job, Output, Shard, reason
from tilefold.retrieval._shards import Receipt, check_some, differences
from tilefold.retrieval._streamed import WAITING_SHARDS, encode_shards
from tilefold.retrieval.text_ranges import Range

TRIES = 5  # of shards whose workers die
TRIED = ".tries.tmp"
PATIENCE = 10.0  # seconds for a file that another machine has written to appear here


@dataclass(frozen=True)
class Work:
    """The work that all workers of a command share."""

    encoding: Encoding
    load: Callable[[], Any]  # makes the model
    output: Output  # at the same path everywhere
    identity: dict[str, Any]  # of the folder, as the command knows it
    beacon: str  # name of a file that the command has put into the folder
    threads: int  # of torch on a CPU


class Worker:
    """An actor of the pool; what goes wrong is told as a row, so that the command can say it in its words."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.problem = ""
        try:
            self._load()
        except Exception as error:
            self.problem = reason(error)

    def _load(self) -> None:
        work = self.work
        if not appears((work.output.folder / work.beacon).is_file):
            raise FileNotFoundError(
                f"{work.output.folder}: is not the folder of the command on the machine {socket.gethostname()}. "
                "Choose an output folder that all machines share."
            )
        torch.set_num_threads(work.threads)
        digest = str(work.identity.get("texts_sha256"))
        self.job: Job[Any] = work.encoding.job(work.load(), {}, work.output, lambda: digest)
        self.writer = self.job.open_writer(False)
        mine = self.writer.identified(self.writer.manifest)
        changed = differences(work.identity, mine, "in the command", "here")
        if changed:
            raise ValueError(
                f"the machine {socket.gethostname()} would encode something else ({changed}). Give all machines the "
                "same folder, or the same release, of the model."
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Write the shards of a task; rows of a number and a problem, which is empty where the shard is written."""
        (ranges,) = batch["ranges"]
        problem = self.problem
        if not problem:
            try:
                self._write(ranges)
            except Exception as error:
                problem = reason(error)
        numbers = [part.number for part in ranges]
        return {"number": numbers, "problem": [problem] * len(numbers)}

    def _write(self, ranges: Sequence[Range]) -> None:
        folder, key = self.writer.path, self.writer.key
        missing = [part for part in ranges if Receipt.read(folder, part.number, key) is None]
        if missing:
            tried = self._tried(missing)
            with Behind(WAITING_SHARDS, "tilefold-writer") as behind:
                list(encode_shards(self.job, map(self._read, missing), self._leave, behind))
            tried.unlink(missing_ok=True)

    def _read(self, part: Range) -> Shard[Any]:
        """In the thread that works ahead."""
        texts = part.read()
        return Shard(part.number, list(texts), texts)

    def _leave(self, shard: Shard[Any]) -> None:
        vectors, failed = shard.assembled(self.job)
        check_some(shard.number, len(vectors), failed, nothing_yet=False)
        self.writer.leave_shard(shard.number, vectors, failed, shard.cut)
        shard.written()

    def _tried(self, missing: Sequence[Range]) -> Path:
        """Count how often workers have begun here: Ray repeats a task without end when its worker dies."""
        first = missing[0]
        file = self.writer.path / f"{first.number:05d}{TRIED}"
        count = int(file.read_text()) if file.is_file() else 0
        if count >= TRIES:
            ids = list(first.read())
            raise RuntimeError(
                f"shards {first.number} to {missing[-1].number} have ended {count} workers. The text that does it is "
                f"probably one of {ids[0]!r} to {ids[-1]!r}: take it out, or give workers more memory."
            )
        file.write_text(str(count + 1))
        return file


def appears(there: Callable[[], bool]) -> bool:
    """Whether something is there, now or within the time that a shared folder may take to show it."""
    end = time.monotonic() + PATIENCE
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
