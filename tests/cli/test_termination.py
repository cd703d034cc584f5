"""SIGTERM, by which Kubernetes, Slurm and systemd end a process, is treated as Ctrl-C is."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.cli.program import Call
from tilefold.retrieval import read_manifest

READY_SECONDS = 600  # until a command has finished a part; Ray takes minutes to start on a busy CPU
N_DOCUMENTS = 20_000  # which take far longer to encode than a signal to arrive
RESUMABLE = "Ended by SIGTERM. Finished work is kept: run the same command again to resume.\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is long enough to be interrupted."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number in range(N_DOCUMENTS):
            row = {"_id": f"d{number}", "title": "", "text": f"document number {number}"}
            lines.write(json.dumps(row) + "\n")
    return file


def end_when(
    is_ready: Callable[[], bool],
    arguments: tuple[object, ...],
    log: Path,
    *,
    repeats: int = 1,
) -> tuple[int, str]:
    """Run a command, send SIGTERM once it is ready, and return its exit code and stderr.

    Args:
        is_ready: whether the command has finished a part of its work.
        arguments: the command and its options.
        log: file for stderr.
        repeats: how often the signal is sent.
    """
    with programs.start("-m", "tilefold.cli", *map(str, arguments), stderr=log) as process:
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not is_ready():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            for _ in range(repeats):
                process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        finally:
            process.kill()
    return code, log.read_text()


def n_encoded(folder: Path) -> int:
    """Return the number of documents that the manifest of a folder lists."""
    if not (folder / "manifest.json").exists():
        return 0
    return read_manifest(folder).n_documents


@pytest.mark.slow
def test_sigterm_keeps_shards_of_ray(corpus: Path, masked_lm: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    output = tmp_path / "vectors"
    command = ("encode", "--model", masked_lm, "--data", corpus, "--output", output)
    on_ray = ("--engine", "ray", "--workers", 1, "--shard-size", 64)

    def has_shards() -> bool:
        return len(list(output.glob("*.receipt.json"))) >= 2

    code, stderr = end_when(has_shards, (*command, *on_ray), tmp_path / "log")
    assert code == 128 + signal.SIGTERM
    assert stderr.endswith(RESUMABLE)
    assert has_shards()
    assert not list(output.glob("*.shared.tmp"))  # the notes for the workers are removed


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param((), id="one-process"),
        pytest.param(("--devices", 2), id="two-ranks", marks=pytest.mark.slow),
    ],
)
def test_sigterm_keeps_encoded_shards(
    devices: tuple[object, ...],
    corpus: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    output = tmp_path / "vectors"
    command = ("encode", "--model", masked_lm, "--data", corpus, "--output", output)
    options = ("--shard-size", 64, "--batch-size", 8, "--top-k", 8)
    code, stderr = end_when(
        lambda: n_encoded(output) > 0,
        (*command, *options, *devices),
        tmp_path / "stderr",
        repeats=2,  # of a process group and of the parent
    )
    assert code == 143, stderr
    assert stderr.endswith(RESUMABLE) and stderr.count("Ended by SIGTERM") == 1, stderr
    assert "Nothing was kept" not in stderr and "Traceback" not in stderr
    assert 0 < n_encoded(output) < N_DOCUMENTS


@pytest.mark.slow
def test_sigterm_keeps_checkpoints(shared: Path, masked_lm: str, tmp_path: Path) -> None:
    command = ("train", "--data", shared / "data", "--model", masked_lm, "--steps", 10**5)
    options = ("--batch-size", 4, "--save-minutes", 0, "--output", tmp_path / "m")
    code, stderr = end_when(
        lambda: bool(list(tmp_path.glob("m.training/checkpoint-*/tilefold_whole.json"))),
        (*command, *options),
        tmp_path / "stderr",
    )
    assert code == 143, stderr
    resumes = (
        r"resume\. It resumes at step \d+: --save-steps or --save-minutes save more often\.\n$"
    )
    assert re.search(resumes, stderr) and "Traceback" not in stderr
    assert list(tmp_path.glob("m.training/checkpoint-*/tilefold_whole.json"))


@pytest.mark.slow
def test_sigterm_keeps_scores_of_finished_teachers(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "scored.parquet"
    command: tuple[Any, ...] = ("score", shared / "mined.parquet", "--data", shared / "data")
    options = ("--teacher", "bm25", "--teacher", "minilm", "--output", output)
    code, stderr = end_when(
        # A file that is still written has another folder.
        lambda: bool(list(tmp_path.glob(".*.scoring/*.npy"))),
        (*command, *options),
        tmp_path / "stderr",
    )
    assert code == 143, stderr
    assert stderr.endswith(RESUMABLE) and not output.exists()
    assert call(*command, *options).code == 0 and output.exists()
