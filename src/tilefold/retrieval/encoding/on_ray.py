"""Encode a collection on several machines, with a pool of actors of Ray Data."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilefold._internal.arguments import (
    ArgumentError,
    check_callable,
    check_instance,
    check_least,
    check_least_count,
    check_number,
    check_optional_text,
    path_of,
)
from tilefold._internal.typing import Model
from tilefold.pipeline.threads import BackgroundWorker
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.passages import PassageTexts
from tilefold.retrieval.data.shard_texts import (
    FileTexts,
    InMemoryTexts,
    ShardPlan,
    ShardTexts,
    Texts,
)
from tilefold.retrieval.encoding.job import Encoding, Job, Output
from tilefold.retrieval.encoding.pending_shards import (
    WAITING_SHARDS,
    PendingShard,
    describe_error,
    encode_shards,
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

# Maximum number of shards per task. Within a task, the next texts are tokenised while earlier ones
# are encoded.
SHARDS_PER_TASK = 16
LOCAL = "local"  # address that starts Ray on this machine
MAX_ATTEMPTS = 5  # workers that may die while they encode the same shards
APPEAR_SECONDS = 10.0  # time until a file of another machine is visible in a shared folder

_BEACON_SUFFIX = ".shared.tmp"
ATTEMPTS_SUFFIX = ".tries.tmp"
_APPEAR_POLL_SECONDS = 0.2
_DEFAULT_CORES = 4  # maximum number of cores of a worker without a GPU
_MIN_CONNECT_SECONDS = 0.1  # shortest time-out of an attempt to connect
_RETRY_SECONDS = 1.0  # longest pause between two attempts to connect
_MIN_ATTEMPTS = 10  # a short time-out leaves time for about this many attempts


class ClusterError(ConnectionError):
    """A Ray cluster cannot be reached, or has no room for a worker."""


@dataclass(frozen=True)
class RayCluster:
    """The Ray cluster that workers run on. An open connection of this process is used.

    Attributes:
        address: ``host:port`` of a cluster, ``"auto"`` for the cluster of this machine, or
            ``"local"`` to start Ray on this machine. ``None`` reads the variable ``RAY_ADDRESS``,
            and is ``"local"`` without it.
        workers: maximum number of workers. As many start as fit on the cluster, and more when it
            grows. By default as many as fit when the command begins.
        worker_gpus: GPUs per worker. By default one if the cluster has GPUs.
        worker_cpus: cores per worker. By default an equal share for each GPU, and up to 4 without a
            GPU.
        patience: seconds to wait until the cluster answers.
    """

    address: str | None = None
    workers: int | None = None
    worker_gpus: float | None = None
    worker_cpus: int | None = None
    patience: float = 20.0

    def __post_init__(self) -> None:
        check_optional_text("address", self.address)
        check_least_count("workers", self.workers)
        check_least_count("worker_cpus", self.worker_cpus)
        check_least("worker_gpus", self.worker_gpus, 0)
        check_number("patience", self.patience)
        check_least("patience", self.patience, 0)


@dataclass(frozen=True)
class WorkerPool:
    """Number and size of the workers.

    Attributes:
        min_workers: number of workers that start at once.
        max_workers: number of workers if the cluster grows.
        cpus: cores per worker.
        gpus: GPUs per worker.
    """

    min_workers: int
    max_workers: int
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
    """Encode texts into a folder that all machines of a Ray cluster share.

    The folder has the same shards, manifest and failed texts as with
    :func:`tilefold.retrieval.encode_collection`. It has the same bytes if all workers have the same
    kind of device, the same releases and, on a CPU, the same number of threads. A run that began
    without Ray can be resumed with Ray, and the other way round.

    A task is a few shards, each described by ranges of rows and a digest. A worker reads and
    encodes them, and writes each shard into the folder with a receipt. If it is killed, another
    worker gets the task. If the command is killed, the next one continues from the receipts.

    Args:
        load: returns the model. It is called once in each worker and once in this process. It must
            be a function that workers can import, or that can be pickled.
        texts: id -> text in a fixed order, which is sent to the workers. Or a file, folder or saved
            dataset for :func:`tilefold.retrieval.load_documents`, which all machines must see. It
            is read row by row.
        output_dir: the folder, at the same path on all machines.
        encoding: ``SparseEncoding``, ``TokenEncoding`` or ``DenseEncoding``.
        cluster: where workers run; by default on this machine.
        shard_size: consecutive texts per shard.
        progress: called as ``progress(texts done, texts in all)``.
        resume: keep the complete shards of an earlier run.

    Returns:
        The complete manifest.

    Raises:
        MissingPackageError: if Ray is not installed.
        ClusterError: if the cluster cannot be reached or has no room for a worker, or workers died
            several times.
        DataError: if rows are malformed or repeated, or a machine has another folder, other texts
            or another model; and for the reasons of ``encode_collection``.
    """
    _check_arguments(load, texts, encoding, cluster, progress)
    output = Output(
        folder=path_of("output_dir", output_dir).resolve(),
        shard_size=shard_size,
        save_minutes=0.0,
        resume=resume,
    )
    report = progress or _ignore_progress  # not in `output`, which is sent to the workers
    source = _text_source(texts)
    cluster = cluster or RayCluster()
    with _connect(cluster) as ray:
        pool = _fit_workers(ray, cluster)
        plan = source.plan_shards(shard_size)
        model = load()
        if hasattr(model, "to"):
            model = model.to("cpu")  # the GPUs are for the workers
        provenance = _provenance_of(source, plan)
        # This process encodes no texts. It needs the job only to open the folder.
        job = encoding.create_job(model, {}, output, get_provenance=lambda: provenance)
        if not job.precision_is_requested:
            job.precision = None  # the workers record the precision of their devices
        writer = job.open_writer(writes_manifest=True)
        missing = {
            shard_texts.number: shard_texts
            for shard_texts in plan.ranges
            if not writer.reuse_shard(shard_texts.number)
        }
        with _beacon(writer.path) as beacon:
            config = WorkerConfig(
                encoding=encoding,
                load=load,
                output=output,
                identity=writer.manifest.identity,
                beacon=beacon,
                threads=pool.cpus,
            )
            n_done = plan.count - sum(shard_texts.count for shard_texts in missing.values())
            report(n_done, plan.count)
            for numbers in _encode_missing(ray, pool, config, list(missing.values())):
                _register_shards(writer, numbers)
                n_done += sum(missing.pop(number).count for number in numbers)
                report(n_done, plan.count)
    if missing:
        raise DataError(
            f"{writer.path}: {len(missing)} shards were not written. Start the command again.",
        )
    _check_some_encoded(writer.manifest, plan.count)
    return writer.finish(plan.count)


def _check_some_encoded(manifest: Any, n_texts: int) -> None:
    """Raise ``DataError`` if no text could be encoded.

    Args:
        manifest: manifest of the folder, with the reasons of the failed texts.
        n_texts: number of texts.
    """
    if manifest.n_documents == 0:
        text_id, failure = next(iter(manifest.failed.items()))
        raise DataError(
            f"texts: all {n_texts} failed; the first is {text_id!r} ({failure}). Check the "
            "texts and the model.",
        )


def _check_arguments(
    load: Callable[[], Model],
    texts: Mapping[str, str] | str | Path | Texts,
    encoding: Encoding,
    cluster: RayCluster | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Raise ``TypeError`` if an argument of :func:`encode_on_ray` has a wrong type.

    Args:
        load: loads the model.
        texts: the texts, or their file.
        encoding: options of encoding.
        cluster: the cluster; None for the default.
        progress: function that is called with the progress, or None.
    """
    check_instance(
        "texts",
        texts,
        (Mapping, str, Path, InMemoryTexts, FileTexts),
        "the path of the documents",
    )
    check_callable("load", load, "load()")
    check_instance("encoding", encoding, Encoding, "SparseEncoding()")
    if cluster is not None:
        check_instance("cluster", cluster, RayCluster, "RayCluster(address)")
    if progress is not None:
        check_callable("progress", progress, "progress(texts done, texts in all)")


def _ignore_progress(n_done: int, n_texts: int) -> None:
    """Report nothing; the function for a caller that passes no ``progress``."""


def _text_source(texts: Mapping[str, str] | str | Path | Texts) -> Texts:
    """Return an object from which workers read the texts of their shards.

    Args:
        texts: id -> text, the path of a file or folder of documents, or such an object.
    """
    if isinstance(texts, Texts):
        return texts
    if isinstance(texts, Mapping):
        return InMemoryTexts(texts)
    return FileTexts(Path(texts))


def _provenance_of(source: Texts, plan: ShardPlan) -> Provenance:
    """Return the provenance of the texts, which has their digest.

    Passages have the provenance of their documents. For other texts, the digest of the shards is
    used, which ``plan_shards`` has computed.

    Args:
        source: the texts.
        plan: the shards into which the texts are divided.
    """
    texts = getattr(source, "texts", None)
    if isinstance(texts, PassageTexts):
        return texts.provenance
    return Provenance(texts_sha256=plan.sha256)


def _encode_missing(
    ray: ModuleType,
    pool: WorkerPool,
    config: WorkerConfig,
    shards: list[ShardTexts],
) -> Iterator[list[int]]:
    """Encode shards in workers of the cluster.

    Args:
        ray: the module ``ray``, connected to the cluster.
        pool: number and size of the workers.
        config: configuration of each worker.
        shards: the shards to encode.

    Yields:
        Numbers of the shards of a task, when a worker has written them.

    Raises:
        DataError: if a worker reports an error.
        ClusterError: if workers were lost.
    """
    if not shards:
        return
    # At least two tasks per worker, so that workers finish at about the same time.
    task_size = max(1, min(SHARDS_PER_TASK, len(shards) // (2 * pool.max_workers)))
    tasks = [
        {"shards": shards[start : start + task_size]} for start in range(0, len(shards), task_size)
    ]
    with _quiet_ray_data(ray):
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        results = dataset.map_batches(
            Worker,
            fn_constructor_args=(config,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(
                min_size=pool.min_workers,
                max_size=pool.max_workers,
            ),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or None,
        )
        try:
            for batch in results.iter_batches(batch_size=None):
                _check_problems(batch["problem"])
                yield [int(number) for number in batch["number"]]
        except ray.exceptions.RayError as error:
            cause = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"Ray: the workers were lost ({cause}). Written shards are kept: run the same "
                "command again.",
            ) from error


def _check_problems(problems: Sequence[str]) -> None:
    """Raise ``DataError`` with the first problem of a worker, if there is one."""
    for problem in problems:
        if problem:
            raise DataError(f"a worker could not continue: {problem} Written shards are kept.")


def _register_shards(writer: ShardWriter[M, V], numbers: list[int]) -> None:
    """Wait until shards of a worker are visible on this machine, and add them to the manifest.

    Args:
        writer: writer of the folder, which reads the receipts.
        numbers: numbers of the shards.

    Raises:
        DataError: if the files are not visible within ``APPEAR_SECONDS``.
    """
    missing = set(numbers)

    def are_registered() -> bool:
        missing.difference_update(writer.register_received(sorted(missing)))
        return not missing

    if not becomes_true(are_registered, APPEAR_SECONDS):
        raise DataError(
            f"{writer.path}: shard {min(missing)} was written by a worker, but is not visible on "
            "the machine that runs the command. Choose an output folder that all machines share.",
        )


@contextmanager
def _beacon(folder: Path) -> Iterator[str]:
    """Create a file in the output folder for the duration of the block.

    A worker that finds the file knows that its folder is this one, also on another machine. Workers
    write only while the file exists.

    Yields:
        The name of the file.
    """
    _remove_temporary_files(folder)
    file = folder / f"{uuid.uuid4().hex}{_BEACON_SUFFIX}"
    file.touch()
    try:
        yield file.name
    finally:
        _remove_temporary_files(folder)


def _remove_temporary_files(folder: Path) -> None:
    """Remove beacons and counts of attempts, also those of an earlier command."""
    for suffix in (_BEACON_SUFFIX, ATTEMPTS_SUFFIX):
        for file in folder.glob(f"*{suffix}"):
            file.unlink(missing_ok=True)


@contextmanager
def _connect(cluster: RayCluster) -> Iterator[ModuleType]:
    """Connect to a Ray cluster, or start Ray on this machine.

    An existing connection of this process is used and stays open. A new one is closed after the
    block.

    Args:
        cluster: address of the cluster, and how long to wait for it.

    Yields:
        The module ``ray``.

    Raises:
        MissingPackageError: if Ray is not installed.
        ClusterError: if the cluster cannot be reached.
    """
    purpose = "Encoding on several machines"
    require("ray.data", "ray[data]", purpose, extra="ray")
    ray = require("ray", "ray[data]", purpose, extra="ray")
    if ray.is_initialized():
        yield ray
        return
    address = cluster.address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address not in (LOCAL, "auto"):
        _check_reachable(address, cluster.patience)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    start = time.monotonic()
    try:
        with _sigterm_handler_restored():
            if address == LOCAL:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    include_dashboard=False,
                )
            else:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ClusterError(
            f"Ray: no cluster could be used at {address} after {time.monotonic() - start:.0f} s "
            f"({cause}). Is it running there, in the same release of Ray and Python?",
        ) from error
    try:
        yield ray
    finally:
        with _sigterm_handler_restored():
            ray.shutdown()


@contextmanager
def _sigterm_handler_restored() -> Iterator[None]:
    """Restore the SIGTERM handler after the block.

    ``ray.init`` installs a handler that aborts the process, and ``ray.shutdown`` the default one.
    With either, the command would not report what is saved. A handler that was not installed from
    Python cannot be restored.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main_thread = threading.current_thread() is threading.main_thread()
        if handler is not None and is_main_thread:
            signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str, timeout: float) -> None:
    """Raise an error if no process accepts connections at an address.

    Args:
        address: ``host:port`` of the cluster. The caller handles ``"auto"`` and ``"local"``, which
            error messages offer to the user.
        timeout: seconds in which connecting is tried again and again.

    Raises:
        ValueError: if `address` is not ``host:port``.
        ClusterError: if no connection was accepted.
    """
    expected = f"expected host:port, 'auto' or 'local', got {address!r}."
    if "://" in address:
        raise ArgumentError(
            "address",
            f"{expected} Ray Data does not work over Ray's client. Run the command on a machine of "
            "the cluster, or with `ray job submit`.",
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ArgumentError("address", expected)
    start = time.monotonic()
    failure = ""
    while True:
        elapsed = time.monotonic() - start
        if elapsed >= timeout:
            raise ClusterError(
                f"Ray: no answer from {address} after {elapsed:.0f} s ({failure}). Start the "
                "cluster (ray start --head), or correct the address.",
            )
        try:
            # A connection needs some time even if nearly none is left.
            connect_timeout = max(_MIN_CONNECT_SECONDS, timeout - elapsed)
            with socket.create_connection((host, int(port)), timeout=connect_timeout):
                return
        except OSError as error:
            failure = str(error)
            time.sleep(min(_RETRY_SECONDS, timeout / _MIN_ATTEMPTS))


def _fit_workers(ray: ModuleType, cluster: RayCluster) -> WorkerPool:
    """Return the number and size of the workers that fit on the cluster.

    Args:
        ray: the module ``ray``, connected to the cluster.
        cluster: options of the caller. Those that are None are chosen by the cluster's resources.

    Raises:
        ClusterError: if not a single worker fits.
    """
    resources = ray.cluster_resources()
    cores = int(resources.get("CPU", 0))
    gpus = float(resources.get("GPU", 0))
    worker_gpus = cluster.worker_gpus
    if worker_gpus is None:
        worker_gpus = 1.0 if gpus >= 1 else 0.0
    worker_cpus = cluster.worker_cpus or _default_cpus(cores, gpus, worker_gpus)
    n_fitting = cores // worker_cpus
    if worker_gpus:
        n_fitting = min(n_fitting, int(gpus / worker_gpus))
    if not n_fitting:
        raise ClusterError(
            f"Ray: expected room for a worker of {worker_cpus} cores and {worker_gpus:g} GPUs, "
            f"got {cores} cores and {gpus:g} GPUs in all. Lower worker_cpus or worker_gpus.",
        )
    max_workers = cluster.workers or n_fitting  # may be more than fit now: the cluster may grow
    return WorkerPool(
        min_workers=min(n_fitting, max_workers),
        max_workers=max_workers,
        cpus=worker_cpus,
        gpus=worker_gpus,
    )


def _default_cpus(cores: int, gpus: float, worker_gpus: float) -> int:
    """Return the cores per worker: an equal share per GPU, or up to ``_DEFAULT_CORES`` without.

    Args:
        cores: cores of the cluster.
        gpus: GPUs of the cluster.
        worker_gpus: GPUs per worker.
    """
    if worker_gpus and gpus >= worker_gpus:
        n_gpu_workers = int(gpus / worker_gpus)
        return max(1, cores // n_gpu_workers)
    return max(1, min(_DEFAULT_CORES, cores))


@contextmanager
def _quiet_ray_data(ray: ModuleType) -> Iterator[None]:
    """Silence the progress bars and log messages of Ray Data in the block."""
    context = ray.data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    shows_progress = context.enable_progress_bars
    prints_start = context.print_on_execution_start
    level = logger.level
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = shows_progress
        context.print_on_execution_start = prints_start
        logger.setLevel(level)


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that the main process sends to all workers.

    Attributes:
        encoding: options of encoding.
        load: returns the model.
        output: the folder, at the same path on all machines.
        identity: settings of the folder in the main process, with the model's fingerprint.
        beacon: name of a file that the main process has created in the folder.
        threads: number of torch threads on a CPU.
    """

    encoding: Encoding
    load: Callable[[], Model]
    output: Output
    identity: Json
    beacon: str
    threads: int


class Worker:
    """Ray actor that encodes shards.

    Errors are returned as rows, because Ray would retry a task that raises them, or wrap them in
    messages of its own.

    Args:
        config: configuration of the main process.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.setup_error = ""  # why the worker could not start; empty if it could
        try:
            self._set_up()
        except Exception as error:
            self.setup_error = describe_error(error)

    def _set_up(self) -> None:
        """Load the model, and check that folder and model are the same as in the main process.

        Raises:
            FileNotFoundError: if this machine does not see the file that the main process has
                created in the folder.
            ValueError: if the model or a setting differs from the main process.
        """
        config = self.config
        machine = socket.gethostname()
        beacon = config.output.folder / config.beacon
        if not becomes_true(beacon.is_file, APPEAR_SECONDS):
            raise FileNotFoundError(
                f"{config.output.folder}: on the machine {machine}, this is a different folder "
                "than the command's. Choose an output folder that all machines share.",
            )
        torch.set_num_threads(config.threads)
        provenance = Provenance.from_dict(config.identity)
        self.job: Job[Any, Any] = config.encoding.create_job(
            config.load(),
            {},  # each task brings its texts
            config.output,
            get_provenance=lambda: provenance,
        )
        self.writer = self.job.open_writer(writes_manifest=False)
        limit_length(self.job.model, config.encoding.kind, config.encoding.max_length)
        identity = self.writer.manifest.identity
        changed = differences(config.identity, identity, "in the command", "here")
        if changed:
            raise ValueError(
                f"the machine {machine} would encode something else ({changed}). Give all machines "
                "the same folder, or the same release, of the model.",
            )

    def __call__(self, batch: Mapping[str, Sequence[Sequence[ShardTexts]]]) -> dict[str, list[Any]]:
        """Encode and write the shards of a task.

        Args:
            batch: column ``shards`` with one row, the texts of each shard of the task.

        Returns:
            A row per shard: its ``number``, and a ``problem``, which is empty if the task is done.
        """
        (shards,) = batch["shards"]
        problem = self.setup_error
        if not problem:
            try:
                self._encode_and_write(shards)
            except Exception as error:
                problem = describe_error(error)
        numbers = [shard_texts.number for shard_texts in shards]
        return {"number": numbers, "problem": [problem] * len(numbers)}

    def _encode_and_write(self, shards: Sequence[ShardTexts]) -> None:
        """Encode and write the shards of a task that have no receipt yet."""
        missing = [
            shard_texts
            for shard_texts in shards
            if Receipt.read(self.writer.path, shard_texts.number, self.writer.key) is None
        ]
        if not missing:
            return
        # If a text kills the worker, the file stays, and counts the workers that have died.
        attempts_file = self._count_attempt(missing)
        with BackgroundWorker(WAITING_SHARDS, "tilefold-writer") as writer_thread:
            pending_shards = map(self._read_shard, missing)
            for _ in encode_shards(self.job, pending_shards, self._write, writer_thread):
                pass
        attempts_file.unlink(missing_ok=True)

    def _read_shard(self, shard_texts: ShardTexts) -> PendingShard[Any]:
        """Read the texts of a shard, in the thread that tokenises."""
        texts = shard_texts.read()
        return PendingShard(shard_texts.number, list(texts), texts)

    def _write(self, shard: PendingShard[Any]) -> None:
        """Write a shard with a receipt for the main process, in the thread that writes."""
        vectors, failed = shard.assemble(self.job)
        check_not_all_failed(shard.number, len(vectors), failed, leaves_no_vectors=False)
        if not (self.writer.path / self.config.beacon).is_file():
            raise FileNotFoundError("the command has ended, so the shard is not written.")
        self.writer.write_shard_with_receipt(shard.number, vectors, failed, shard.truncation)
        shard.mark_written()

    def _count_attempt(self, shards: Sequence[ShardTexts]) -> Path:
        """Record in a file of the folder that a worker has begun a task.

        Ray repeats a task without end when its worker dies. The count stops this.

        Args:
            shards: the shards of the task that are not written.

        Returns:
            The file with the count, which is removed when the task is done.

        Raises:
            RuntimeError: if ``MAX_ATTEMPTS`` workers have died during this task.
        """
        first_shard = shards[0]
        file = self.writer.path / f"{first_shard.number:05d}{ATTEMPTS_SUFFIX}"
        n_attempts = int(file.read_text()) if file.is_file() else 0
        if n_attempts >= MAX_ATTEMPTS:
            ids = list(first_shard.read())
            raise RuntimeError(
                f"shards {first_shard.number} to {shards[-1].number} have killed {n_attempts} "
                f"workers. One of the texts {ids[0]!r} to {ids[-1]!r} is probably the cause: "
                "remove it, or give workers more memory.",
            )
        file.write_text(str(n_attempts + 1))
        return file


def becomes_true(condition: Callable[[], bool], timeout: float) -> bool:
    """Return whether a condition holds now or becomes true in time.

    Args:
        condition: the condition, such as that a file of another machine is visible in a shared
            folder.
        timeout: seconds to wait.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_APPEAR_POLL_SECONDS)
    return True
