"""Benchmarks of whole jobs, as users run them: what `tilefold bench` takes beside the operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilefold.bench.registry import module_of

__all__ = ["JOB_MODULES", "Job", "JobCase", "JobOptions", "get_job", "job_names"]

Row = Mapping[str, object]

JOB_MODULES: dict[str, str] = {
    "encode": "tilefold.bench.encode.job",
    "search": "tilefold.bench.search.job",
    "train": "tilefold.bench.train.job",
}


@dataclass(frozen=True)
class JobCase:
    """One setting of a job.

    Attributes:
        name: what `--shape` asks for.
        devices: device types that it runs on by default.
        quick: whether `--quick` has it.
        numbers: sizes and choices, by name.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobOptions:
    """How to run: the device, which implementations (all if None), whether to be quick, a tokenizer's folder."""

    device: torch.device
    impls: Sequence[str] | None = None
    quick: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Job:
    """A job: its cases, and what measures one.

    Attributes:
        name: of the job.
        cases: its settings.
        key: columns whose values name a row of the results.
        shown: columns that are printed.
        run: yields rows as they are measured. ``row["gate"]`` is ``"ok"``, or says what was wrong; then the row has no
            times, and the command exits with 1.
    """

    name: str
    cases: tuple[JobCase, ...]
    key: tuple[str, ...]
    shown: tuple[str, ...]
    run: Callable[[JobCase, JobOptions], Iterator[Row]]

    def chosen(self, names: Sequence[str] | None, device: str, quick: bool) -> list[JobCase]:
        """The cases of these names; without names those of the device, or its quick ones.

        Raises:
            ValueError: for a name that no case has.
        """
        if not names:
            return [case for case in self.cases if device in case.devices and (case.quick or not quick)]
        known = {case.name: case for case in self.cases}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"shape must be one of {', '.join(known)}, got {unknown[0]!r}.")
        return [known[name] for name in names]


def job_names() -> tuple[str, ...]:
    """Names of the jobs that have a benchmark."""
    return tuple(JOB_MODULES)


def get_job(name: str) -> Job:
    """The benchmark of job ``name``, whose module is imported now.

    Raises:
        ValueError: for a job without a benchmark.
    """
    job: Job = module_of(JOB_MODULES, "job", name).JOB
    return job
