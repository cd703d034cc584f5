"""``tilefold encode --devices``: several processes, one result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.cli.program import run_cli
from tilefold import _ranks


def test_two_processes_write_what_one_writes_and_say_it_once(tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text(
        "".join(json.dumps({"_id": f"d{i}", "text": "cats sleep " * (i % 5 + 1)}) + "\n" for i in range(20))
    )
    asked = ("encode", "--model", "minilm", "--data", data, "--shard-size", "4", "--top-k", "16", "--json")
    assert run_cli(*asked, "--output", tmp_path / "one") == 0
    done = programs.run("-m", "tilefold.cli", *asked, "--output", tmp_path / "two", "--devices", "2")
    assert (done.returncode, done.stderr) == (0, "")  # the ranks are interpreters of their own, which say nothing
    said = json.loads(done.stdout)
    assert (said["n"], said["shards"]) == (20, 5)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_a_number_of_devices_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("encode", "--model", "minilm", "--output", tmp_path / "v", "--devices")
    for devices in ("0", "none", "1.5"):
        assert run_cli(*asked, devices) == 2
        gpus = torch.cuda.device_count()
        most = f"from 1 to {gpus}, the GPUs of this machine" if gpus else "1 or more"
        error = f"--devices: expected 'all' or a whole number, {most}, got '{devices}'"
        assert error in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert run_cli(*asked, "2") == 2 and "leave --devices out" in capsys.readouterr().err


FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
print("broken", file=sys.stderr)
sys.exit(3)
"""


def test_what_a_later_rank_says_is_shown_where_the_first_cannot(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ranks, "_GRACE_SECONDS", 0.2)
    assert _ranks.run_ranks([sys.executable, "-c", FAILS], 2) == 3
    assert capfd.readouterr().err.count("broken") == 1
