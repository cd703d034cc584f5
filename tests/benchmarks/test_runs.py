"""Runs in processes of their own: failures and killed processes end no other run that is done."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from benchmarks.runs import run_all, take_named


def double(job: int) -> dict[str, Any]:
    if job == 0:
        raise ValueError("nothing to double")
    if job < 0:
        os._exit(3)
    return {"value": 2 * job, "process": os.getpid()}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_is_told_and_leaves_the_others(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # so that what is set is taken back
    found = {job: (row, error) for job, row, error in run_all([3, 0, 4], double, processes)}
    assert found.keys() == {3, 0, 4} and found[0] == (None, "ValueError: nothing to double")
    assert all(row is not None and row["value"] == 2 * job for job, (row, _) in found.items() if job)
    assert all((row["process"] == os.getpid()) == (processes == 1) for row, _ in found.values() if row is not None)


def test_a_killed_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    ((job, row, error),) = run_all([-1], double, 2)
    assert (job, row) == (-1, None) and error.startswith("BrokenProcessPool")


def test_named_values_are_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    options = argparse.Namespace(data=["a=b=c", "d=e"], base=[])
    take_named(parser, options, ("data", "base"))
    assert (options.data, options.base) == ({"a": "b=c", "d": "e"}, {})
    with pytest.raises(SystemExit):
        take_named(parser, argparse.Namespace(data=["a="]), ["data"])
    assert "--data must be NAME=VALUE" in capsys.readouterr().err
