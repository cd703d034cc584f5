"""Runs of a benchmark in processes of their own, none of which ends the others; and ``NAME=VALUE``
arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Job = TypeVar("Job")
Outcome = tuple[Job, "dict[str, Any] | None", str]


def run_all(
    jobs: Sequence[Job],
    run: Callable[[Job], dict[str, Any]],
    processes: int,
) -> Iterator[Outcome[Job]]:
    """Yield ``(job, run(job) or None, error)`` as runs end, in so many processes at a time, or here
    for one.

    `run` is a function of a module, which the processes import. They share the cores:
    ``OMP_NUM_THREADS`` is set if it is not.
    """
    if processes == 1:
        for job in jobs:
            yield _attempt(run, job)
        return
    # otherwise every process starts one thread per core
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_attempt, run, job): job for job in jobs}
        for future in as_completed(futures):
            error = future.exception()  # the process was killed
            yield (
                future.result()
                if error is None
                else (futures[future], None, f"{type(error).__name__}: {error}")
            )


def _attempt(run: Callable[[Job], dict[str, Any]], job: Job) -> Outcome[Job]:
    try:
        return job, run(job), ""
    except Exception as error:  # the failure of one run must not end the others
        return job, None, f"{type(error).__name__}: {error}"


def take_named(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: Iterable[str],
) -> None:
    """Make dictionaries of the lists of ``NAME=VALUE`` in these options; a usage error for anything
    else.
    """
    for name in names:
        pairs = [item.partition("=") for item in getattr(options, name)]
        if not all(key and value for key, _, value in pairs):
            parser.error(f"--{name} must be NAME=VALUE, got {getattr(options, name)}")
        setattr(options, name, {key: value for key, _, value in pairs})
