"""Run the jobs of a benchmark in separate processes, so that none ends the others."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

JobT = TypeVar("JobT")
# a job, its result or None, and the error or ""
Outcome = tuple[JobT, "dict[str, Any] | None", str]


def run_all(
    jobs: Sequence[JobT],
    run: Callable[[JobT], dict[str, Any]],
    processes: int,
) -> Iterator[Outcome[JobT]]:
    """Run jobs, and yield their outcomes as they end.

    Args:
        jobs: the jobs.
        run: a function that runs a job. The processes import it, so it must belong to a module.
        processes: the number of processes. They share the cores: ``OMP_NUM_THREADS`` is set, unless
            the user has set it. With 1, all jobs run in this process.

    Yields:
        A job, its result or None, and the error or ``""``.
    """
    if processes == 1:
        for job in jobs:
            yield _run_job(run, job)
        return
    # otherwise every process starts one thread per core
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_run_job, run, job): job for job in jobs}
        for future in as_completed(futures):
            # set if the process was killed
            error = future.exception()
            if error is None:
                yield future.result()
            else:
                yield futures[future], None, f"{type(error).__name__}: {error}"


def _run_job(run: Callable[[JobT], dict[str, Any]], job: JobT) -> Outcome[JobT]:
    """Run a job, and return its error instead of raising it."""
    try:
        return job, run(job), ""
    except Exception as error:
        return job, None, f"{type(error).__name__}: {error}"


def take_named(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: Iterable[str],
) -> None:
    """Replace lists of ``NAME=VALUE`` by dictionaries.

    Anything else ends the program with a usage error.

    Args:
        parser: parser of the command line, for the error.
        options: parsed options, which change.
        names: the names of the options that are such lists.
    """
    for name in names:
        values: dict[str, str] = {}
        for item in getattr(options, name):
            key, _, value = item.partition("=")
            if not key or not value:
                parser.error(f"--{name} must be NAME=VALUE, got {getattr(options, name)}")
            values[key] = value
        setattr(options, name, values)
