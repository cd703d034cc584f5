"""``encode --dry-run`` and ``--engine ray`` as far as no cluster is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.program import Outcome
from tilefold.retrieval.collection import Collection

Call = Callable[..., Outcome]


@pytest.fixture
def data(collection: Collection, tmp_path: Path) -> Path:
    collection.save_beir(tmp_path / "data")
    return tmp_path / "data"


def test_a_dry_run_says_what_it_would_be_and_writes_nothing(
    call: Call, masked_lm: str, data: Path, tmp_path: Path
) -> None:
    asked = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        data,
        "--output",
        tmp_path / "v",
        "--shard-size",
        "5",
        "--dry-run",
    )
    printed = call(*asked)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu with"
    assert printed.code == 0 and "16 texts in 4 shards of 5" in printed.out
    assert "with 1 worker (" in printed.out and f"measured here on {where}" in printed.out and "assumed:" in printed.out
    found = json.loads(call(*asked, "--json", "--engine", "ray", "--workers", "8", "--rate", "2").out)
    assert (found["texts"], found["shards"], found["workers"]) == (16, 4, 8)
    assert found["hours"] == pytest.approx(16 / (2 * 8) / 3600) and found["rate_from"] == "given with --rate"
    assert found["tokens"] == round(found["tokens_per_text"] * 16) and 8 < found["tokens_per_text"] < 30
    assert found["gigabytes"] == pytest.approx(found["bytes_per_text"] * 16 / 1e9)
    assert not (tmp_path / "v").exists()
    call("encode", "--model", masked_lm, "--data", data, "--output", tmp_path / "v")
    written = sum(file.stat().st_size for file in (tmp_path / "v").glob("*.parquet"))
    assert written / 16 == pytest.approx(found["bytes_per_text"], rel=0.01), "all texts are in the sample"


def test_a_dry_run_of_queries_and_of_pydocs_needs_no_table(call: Call, masked_lm: str, data: Path) -> None:
    asked = ("encode", "--model", masked_lm, "--data", data, "--output", "v", "--queries", "--split", "test")
    assert "4 texts in 1 shards" in call(*asked, "--dry-run").out


def test_a_dry_run_leaves_texts_out_that_the_tokenizer_refuses(call: Call, masked_lm: str, tmp_path: Path) -> None:
    rows = [{"_id": f"d{number}", "title": "", "text": f"cats sleep {number}"} for number in range(3)]
    rows.insert(1, {"_id": "half", "title": "", "text": "half a character \ud800"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ("encode", "--model", masked_lm, "--data", tmp_path / "rows.jsonl", "--output", "v", "--dry-run")
    printed = call(*asked)
    assert printed.code == 0 and "4 texts in 1 shards" in printed.out and "in 3 texts; 1 others are none" in printed.out
    assert json.loads(call(*asked, "--json").out)["refused_texts"] == 1
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]))
    refused = call(*asked)
    assert (
        refused.code == 1 and "--data: the tokenizer refuses all 1 texts of the sample (TextEncodeInput" in refused.err
    )


def test_the_rows_add_up_in_what_is_printed(call: Call, masked_lm: str, data: Path, tmp_path: Path) -> None:
    asked = ("encode", "--model", masked_lm, "--data", data, "--output", tmp_path / "v")
    assert "16 texts = 16 encoded + 0 not encoded" in call(*asked).out
    assert json.loads(call(*asked, "--json").out)["texts"] == 16
    assert json.loads((tmp_path / "v" / "manifest.json").read_text(encoding="utf-8"))["n_texts"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "spark"), "--engine: expected one of local, ray, got 'spark'"),
        (("--address", "here:1"), "--address is for --engine ray"),
        (("--worker-cpus", "2"), "--worker-cpus is for --engine ray"),
        (("--workers", "2"), "--workers is for --engine ray and --dry-run"),
        (("--engine", "ray", "--workers", "0"), "--workers: expected at least 1, got 0"),
        (("--engine", "ray", "--jsonl", "x.jsonl"), "--jsonl is written from all vectors in memory"),
        (("--rate", "5"), "--rate: expected a number above 0 together with --dry-run"),
        (("--dry-run", "--rate", "0"), "--rate: expected a number above 0"),
    ],
)
def test_options_that_do_nothing_are_refused(
    call: Call, masked_lm: str, options: tuple[str, ...], message: str
) -> None:
    outcome = call("encode", "--model", masked_lm, "--output", "v", *options)
    assert outcome.code == 2 and message in outcome.err


def test_the_packaged_sparse_model_is_of_one_process(call: Call, data: Path, tmp_path: Path) -> None:
    asked = ("--data", data, "--output", tmp_path / "v", "--engine", "ray")
    outcome = call("encode", "--model", "minilm", *asked)
    assert outcome.code == 2 and "tilefold train --steps 0" in outcome.err


def test_a_cluster_that_is_not_there_is_an_error_of_one_line(
    call: Call, masked_lm: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    asked = ("encode", "--model", masked_lm, "--data", data, "--output", tmp_path / "v", "--engine", "ray")
    outcome = call(*asked, "--address", "nowhere")
    assert outcome.code == 1 and "--address: expected host:port" in outcome.err
    monkeypatch.setitem(sys.modules, "ray.data", None)
    outcome = call(*asked)
    assert outcome.code == 1 and "pip install 'tilefold[ray]'" in outcome.err
    assert not (tmp_path / "v").exists()
