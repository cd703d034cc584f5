"""A connection to Ray, and how many workers fit."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilefold.retrieval._files import require

HERE = "local"  # a Ray of its own on this machine


class ClusterError(ConnectionError):
    """A Ray cluster cannot be reached, or has no room for a worker."""


@dataclass(frozen=True)
class RayCluster:
    """Where workers run, and how many.

    Attributes:
        address: ``host:port`` of a cluster, ``"auto"`` for the one that this machine belongs to, ``"local"`` to start
            Ray on this machine alone; None takes the variable ``RAY_ADDRESS``, else ``"local"``. A connection that the
            process has already is used as it is.
        workers: at most; by default as many as fit when the command begins. More are started when the cluster has
            grown.
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
        for name in ("workers", "worker_cpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")
        if self.worker_gpus is not None and not self.worker_gpus >= 0:
            raise ValueError(f"worker_gpus: expected at least 0, got {self.worker_gpus}.")


@dataclass(frozen=True)
class Pool:
    """Workers: how many at the beginning and at most, and what each of them takes."""

    first: int
    most: int
    cpus: int
    gpus: float


def ray_module() -> Any:
    """``ray`` with ``ray.data``, or an error that says how to install it."""
    require("ray.data", "ray[data]", "Encoding on several machines", extra="ray")
    return require("ray", "ray[data]", "Encoding on several machines", extra="ray")


@contextmanager
def connected(cluster: RayCluster) -> Iterator[Any]:
    """``ray``, connected; what was started is ended.

    Raises:
        MissingPackageError: Ray is not installed.
        ClusterError: nobody answers.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    address = cluster.address or os.environ.get("RAY_ADDRESS") or HERE
    if address not in (HERE, "auto"):
        _check_reachable(address, cluster.patience)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == HERE:
        options["include_dashboard"] = False
    began = time.monotonic()
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray: no cluster could be used at {address} after {time.monotonic() - began:.0f} s "
            f"({' '.join(str(error).split())}). Is it running there, in the same release of Ray and Python?"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str, patience: float) -> None:
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise ValueError(
            f"address: expected host:port, 'auto' or 'local', got {address!r}. Ray's client cannot run Ray Data well: "
            "run the command on a machine of the cluster, or with `ray job submit`."
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
    raise ClusterError(
        f"Ray: no answer from {address} after {time.monotonic() - began:.0f} s ({problem}). "
        "Start the cluster (ray start --head), or mend the address."
    )


def pool_of(ray: Any, cluster: RayCluster) -> Pool:
    """The workers that `cluster` asks for.

    Raises:
        ClusterError: there is no room for one.
    """
    has = ray.cluster_resources()
    cores, gpus = int(has.get("CPU", 0)), float(has.get("GPU", 0))
    of_gpus = cluster.worker_gpus if cluster.worker_gpus is not None else float(gpus >= 1)
    share = cores // int(gpus / of_gpus) if of_gpus and gpus >= of_gpus else min(4, cores)
    of_cores = cluster.worker_cpus or max(1, share)
    room = cores // of_cores
    if of_gpus:
        room = min(room, int(gpus / of_gpus))
    if not room:
        raise ClusterError(
            f"Ray: expected a cluster with room for a worker of {of_cores} cores and {of_gpus:g} GPUs, got "
            f"{cores} cores and {gpus:g} GPUs in all. Ask for fewer with worker_cpus or worker_gpus."
        )
    most = cluster.workers or room
    return Pool(min(room, most), most, of_cores, of_gpus)


@contextmanager
def quiet_data(ray: Any) -> Iterator[None]:
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
