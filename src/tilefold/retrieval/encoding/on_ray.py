"""Encode a collection on several machines: Ray Data with a pool of actors, each of which has a
model.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilefold._internal.arguments import check_instance, check_least
from tilefold._internal.typing import Model
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.passages import PassageTexts
from tilefold.retrieval.data.shard_texts import FileTexts, InMemoryTexts, ShardTexts, Texts
from tilefold.retrieval.encoding.streamed import (
    WAITING_SHARDS,
    Encoding,
    Job,
    Output,
    Shard,
    encode_shards,
    reason,
)
from tilefold.retrieval.encoding.truncation import limit_length
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import (
    M,
    Receipt,
    ShardWriter,
    V,
    check_not_all_failed,
    differences,
)

__all__ = ["ClusterError", "RayCluster", "encode_on_ray"]

SHARDS_PER_TASK = (
    16  # at most: within a task the next texts are tokenised while the last ones are encoded
)
_BEACON = ".shared.tmp"
HERE = "local"  # a Ray of its own on this machine
TRIES = 5  # of shards whose workers die
TRIED = ".tries.tmp"
PATIENCE = 10.0  # seconds for a file that another machine has written to appear here


class ClusterError(ConnectionError):
    """A Ray cluster cannot be reached, or has no room for a worker."""


@dataclass(frozen=True)
class RayCluster:
    """Ray cluster of the workers; a connection that the process has already is used as it is.

    Attributes:
        address: ``host:port`` of a cluster, ``"auto"`` for the one that this machine belongs to,
            ``"local"`` to start Ray on this machine alone; None takes the variable ``RAY_ADDRESS``,
            else ``"local"``.
        workers: at most; by default as many as fit when the command begins. More start when the
            cluster has grown.
        worker_gpus: of each worker; by default one where there are GPUs.
        worker_cpus: cores of each; by default its share beside the GPUs, and without any up to 4.
        patience: seconds to wait for an answer.
    """

    address: str | None = None
    workers: int | None = None
    worker_gpus: float | None = None
    worker_cpus: int | None = None
    patience: float = 20.0

    def __post_init__(self) -> None:
        check_least("workers", self.workers)
        check_least("worker_cpus", self.worker_cpus)
        check_least("worker_gpus", self.worker_gpus, 0)


@dataclass(frozen=True)
class Pool:
    """Workers: how many at the beginning and at most, and what each of them takes."""

    first: int
    most: int
    cpus: int
    gpus: float


def encode_on_ray(
    load: Callable[[], Model],
    texts: Mapping[str, str] | str | Path | Texts,
    output_dir: str | Path,
    encoding: Encoding,
    *,
    cluster: RayCluster | None = None,
    shard_size: int = 1024,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
) -> Any:
    """Encode texts into a folder that all machines of a Ray cluster share, resuming an earlier run
    of any engine.

    Shards, manifest and failed texts are those of :func:`tilefold.retrieval.encode_collection`,
    with the same bytes where workers have the same kind of device, the same releases, and on a CPU
    as many threads. A task is some shards, told as ranges of rows with a digest: a worker reads and
    encodes them, and leaves each in the folder with a receipt. If it is killed, another one gets
    the task, and a command goes on from the receipts of one that was killed.

    Args:
        load: makes the model, once in each worker and once here; a function that workers can
            import, or a pickled one.
        texts: id -> text in a fixed order, which are sent to the workers; or a file, folder or
            saved dataset as :func:`tilefold.retrieval.load_documents` reads, which all machines
            must see and which is read row by row.
        output_dir: the folder, at the same path on all machines.
        encoding: ``SparseEncoding`` or ``TokenEncoding``.
        cluster: where workers run; by default the machine alone.
        shard_size, progress, resume: as there.

    Raises:
        MissingPackageError: Ray is not installed.
        ClusterError: the cluster cannot be reached, has no room for a worker, or workers died again
            and again.
        DataError: as there; bad or repeated rows; a machine does not see the same folder, texts or
            model.
    """
    check_instance(
        "texts",
        texts,
        (Mapping, str, Path, InMemoryTexts, FileTexts),
        "the path of the documents",
    )
    output = Output(Path(output_dir).resolve(), shard_size, 0.0, None, resume)
    if not isinstance(texts, Texts):
        texts = InMemoryTexts(texts) if isinstance(texts, Mapping) else FileTexts(Path(texts))
    report = progress or (lambda done, total: None)
    with _connected(cluster or RayCluster()) as ray:
        pool = _pool_of(ray, cluster or RayCluster())
        survey = texts.plan_shards(shard_size)
        model = load()
        model = model.to("cpu") if hasattr(model, "to") else model  # the GPUs are for the workers
        cut = getattr(texts, "texts", None)  # passages know their documents
        made_of = (
            cut.provenance
            if isinstance(cut, PassageTexts)
            else Provenance(texts_sha256=survey.sha256)
        )
        job = encoding.job(model, {}, output, lambda: made_of)
        job.precision = None  # that of the workers counts, whose devices are others
        writer = job.open_writer(True)
        missing = {part.number: part for part in survey.ranges if not writer.has_shard(part.number)}
        with _beacon(writer.path) as beacon:
            work = Work(encoding, load, output, writer.manifest.identity, beacon, pool.cpus)
            finished = survey.count - sum(part.count for part in missing.values())
            report(finished, survey.count)
            for numbers in _written(ray, pool, work, list(missing.values())) if missing else ():
                _receive(writer, numbers)
                finished += sum(missing.pop(number).count for number in numbers)
                report(finished, survey.count)
    if missing:
        raise DataError(
            f"{writer.path}: {len(missing)} shards were not written. Start the command again.",
        )
    if writer.manifest.n_documents == 0:
        name, reason = next(iter(writer.manifest.failed.items()))
        raise DataError(
            f"texts: all {survey.count} failed, {name!r} first ({reason}). Check the model.",
        )
    return writer.finish(survey.count)


def _written(
    ray: ModuleType, pool: Pool, work: Work, missing: list[ShardTexts]
) -> Iterator[list[int]]:
    """Numbers of shards as they are written, some at a time."""
    size = max(1, min(SHARDS_PER_TASK, len(missing) // (2 * pool.most)))
    tasks = [{"ranges": missing[start : start + size]} for start in range(0, len(missing), size)]
    with _quiet_data(ray):
        actors = ray.data.ActorPoolStrategy(min_size=pool.first, max_size=pool.most)
        each = {"compute": actors, "num_cpus": pool.cpus, "num_gpus": pool.gpus or None}
        rows = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        rows = rows.map_batches(Worker, fn_constructor_args=(work,), batch_size=1, **each)
        try:
            for batch in rows.iter_batches(batch_size=None):
                if problem := next(filter(None, batch["problem"]), ""):
                    raise DataError(
                        f"a worker could not go on: {problem} What was written is kept.",
                    )
                yield [int(number) for number in batch["number"]]
        except ray.exceptions.RayError as error:
            said = f"the workers were lost ({' '.join(str(error).split())[:300]})"
            raise ClusterError(
                f"Ray: {said}. What was written is kept: run the same command again.",
            ) from error


def _receive(writer: ShardWriter[M, V], numbers: list[int]) -> None:
    left = set(numbers)

    def all_there() -> bool:
        left.difference_update(writer.receive(sorted(left)))
        return not left

    if not appears(all_there):
        said = f"shard {min(left)} was written by a worker, and is not there where the command runs"
        raise DataError(f"{writer.path}: {said}. Choose an output folder that all machines share.")


@contextmanager
def _beacon(folder: Path) -> Iterator[str]:
    """The name of a new file in a folder, by which other machines know it."""
    _remove_notes(folder)
    file = folder / f"{uuid.uuid4().hex}{_BEACON}"
    file.touch()
    try:
        yield file.name
    finally:
        _remove_notes(folder)


def _remove_notes(folder: Path) -> None:
    for left in (*folder.glob(f"*{_BEACON}"), *folder.glob(f"*{TRIED}")):
        left.unlink(missing_ok=True)


@contextmanager
def _connected(cluster: RayCluster) -> Iterator[ModuleType]:
    """``ray``, connected; what was started is ended."""
    purpose = "Encoding on several machines"
    require("ray.data", "ray[data]", purpose, extra="ray")
    ray = require("ray", "ray[data]", purpose, extra="ray")
    if ray.is_initialized():
        yield ray
        return
    if (address := cluster.address or os.environ.get("RAY_ADDRESS") or HERE) not in (HERE, "auto"):
        _check_reachable(address, cluster.patience)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    options = {"include_dashboard": False} if address == HERE else {}
    began = time.monotonic()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = (
            f"at {address} after {time.monotonic() - began:.0f} s ({' '.join(str(error).split())})"
        )
        remedy = "Is it running there, in the same release of Ray and Python?"
        raise ClusterError(f"Ray: no cluster could be used {said}. {remedy}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str, patience: float) -> None:
    host, colon, port = address.rpartition(":")
    if "://" in address:
        remedy = "Ray's client is not for Ray Data: run it on a machine of the cluster, or with `ray job submit`."
        raise ValueError(
            f"address: expected host:port, 'auto' or 'local', got {address!r}. {remedy}",
        )
    if not colon or not host or not port.isdigit():
        raise ValueError(f"address: expected host:port, 'auto' or 'local', got {address!r}.")
    began, problem = time.monotonic(), ""
    while (waited := time.monotonic() - began) < patience:
        try:
            with socket.create_connection((host, int(port)), timeout=max(0.1, patience - waited)):
                return
        except OSError as error:
            problem = str(error)
            time.sleep(min(1.0, patience / 10))
    said = f"after {time.monotonic() - began:.0f} s ({problem})"
    raise ClusterError(
        f"Ray: no answer from {address} {said}. Start it (ray start --head), or mend the address.",
    )


def _pool_of(ray: ModuleType, cluster: RayCluster) -> Pool:
    """The workers that `cluster` asks for; :class:`ClusterError` where there is no room for one."""
    has = ray.cluster_resources()
    cores, gpus = int(has.get("CPU", 0)), float(has.get("GPU", 0))
    of_gpus = cluster.worker_gpus if cluster.worker_gpus is not None else float(gpus >= 1)
    share = cores // int(gpus / of_gpus) if of_gpus and gpus >= of_gpus else min(4, cores)
    of_cores = cluster.worker_cpus or max(1, share)
    if not (room := min(cores // of_cores, int(gpus / of_gpus) if of_gpus else cores)):
        wanted, got = (
            f"a worker of {of_cores} cores and {of_gpus:g} GPUs",
            f"{cores} cores and {gpus:g} GPUs in all",
        )
        raise ClusterError(
            f"Ray: expected room for {wanted}, got {got}. Lower worker_cpus or worker_gpus.",
        )
    most = cluster.workers or room
    return Pool(min(room, most), most, of_cores, of_gpus)


@contextmanager
def _quiet_data(ray: ModuleType) -> Iterator[None]:
    """Ray Data without its bars and notes."""
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.print_on_execution_start, logger.level
    context.enable_progress_bars = context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before[:2]
        logger.setLevel(before[2])


@dataclass(frozen=True)
class Work:
    """The work that all workers of a command share."""

    encoding: Encoding
    load: Callable[[], Model]  # makes the model
    output: Output  # at the same path everywhere
    identity: Json  # of the folder, as the command knows it
    beacon: str  # name of a file that the command has put into the folder
    threads: int  # of torch on a CPU


class Worker:
    """An actor of the pool; what goes wrong is told as a row, so that the command can say it in its
    words.
    """

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
            said = f"is not the folder of the command on the machine {socket.gethostname()}"
            raise FileNotFoundError(
                f"{work.output.folder}: {said}. Choose an output folder that all machines share.",
            )
        torch.set_num_threads(work.threads)
        made_of = Provenance.from_dict(work.identity)
        self.job: Job[Any, Any] = work.encoding.job(work.load(), {}, work.output, lambda: made_of)
        self.writer = self.job.open_writer(False)
        limit_length(self.job.model, work.encoding.kind, work.encoding.max_length)
        if changed := differences(
            work.identity,
            self.writer.manifest.identity,
            "in the command",
            "here",
        ):
            said = f"the machine {socket.gethostname()} would encode something else ({changed})"
            raise ValueError(
                f"{said}. Give all machines the same folder, or the same release, of the model.",
            )

    def __call__(self, batch: Mapping[str, Sequence[Sequence[ShardTexts]]]) -> dict[str, list[Any]]:
        """Write the shards of a task; rows of a number and a problem, which is empty where the
        shard is written.
        """
        (ranges,) = batch["ranges"]
        if not (problem := self.problem):
            try:
                self._write(ranges)
            except Exception as error:
                problem = reason(error)
        numbers = [part.number for part in ranges]
        return {"number": numbers, "problem": [problem] * len(numbers)}

    def _write(self, ranges: Sequence[ShardTexts]) -> None:
        folder, key = self.writer.path, self.writer.key
        if missing := [part for part in ranges if Receipt.read(folder, part.number, key) is None]:
            tried = self._tried(missing)
            with BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as behind:
                list(encode_shards(self.job, map(self._read, missing), self._leave, behind))
            tried.unlink(missing_ok=True)

    def _read(self, part: ShardTexts) -> Shard[Any]:
        """In the thread that works ahead."""
        texts = part.read()
        return Shard(part.number, list(texts), texts)

    def _leave(self, shard: Shard[Any]) -> None:
        vectors, failed = shard.assembled(self.job)
        check_not_all_failed(shard.number, len(vectors), failed, nothing_yet=False)
        if not (self.writer.path / self.work.beacon).is_file():
            raise FileNotFoundError("the command has ended, and what comes late is not written.")
        self.writer.leave_shard(shard.number, vectors, failed, shard.cut)
        shard.written()

    def _tried(self, missing: Sequence[ShardTexts]) -> Path:
        """Count how often workers have begun here: Ray repeats a task without end when its worker
        dies.
        """
        first = missing[0]
        file = self.writer.path / f"{first.number:05d}{TRIED}"
        count = int(file.read_text()) if file.is_file() else 0
        if count >= TRIES:
            ids = list(first.read())
            cause = f"A text of {ids[0]!r} to {ids[-1]!r} probably does it: take it out, or give workers more memory."
            raise RuntimeError(
                f"shards {first.number} to {missing[-1].number} have ended {count} workers. {cause}",
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
