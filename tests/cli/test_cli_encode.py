"""``tilefold encode`` in several processes, on Ray (without a cluster) and as a dry run; ``tilefold export``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.cli.program import Call, done, fails, measured, run_cli
from tests.inside import ranks
from tests.recipes.small import small_collection
from tilefold.retrieval import SparseVectors, read_vectors, write_vectors


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


def test_numbers_of_devices_that_make_no_sense_are_refused(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
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


def test_what_a_later_rank_says_is_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.2)
    assert ranks.run_ranks([sys.executable, "-c", FAILS], 2) == 3
    assert capfd.readouterr().err.count("broken") == 1


def test_a_dry_run_says_all_that_a_run_writes(call: Call, masked_lm: str, shared: Path, tmp_path: Path) -> None:
    place = ("encode", "--model", masked_lm, "--data", shared / "data", "--output", tmp_path / "v")
    asked = (*place, "--shard-size", "5", "--dry-run")
    printed = call(*asked)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu with"
    assert printed.code == 0 and "16 texts in 4 shards of 5" in printed.out
    assert "with 1 worker (" in printed.out and f"measured here on {where}" in printed.out and "assumed:" in printed.out
    found = measured(call(*asked, "--json", "--engine", "ray", "--workers", "8", "--rate", "2"))
    assert (found["texts"], found["shards"], found["workers"]) == (16, 4, 8)
    assert found["hours"] == pytest.approx(16 / (2 * 8) / 3600) and found["rate_from"] == "given with --rate"
    assert found["tokens"] == round(found["tokens_per_text"] * 16) and 8 < found["tokens_per_text"] < 30
    assert found["gigabytes"] == pytest.approx(found["bytes_per_text"] * 16 / 1e9)
    assert "4 texts in 1 shards" in call(*place, "--queries", "--split", "test", "--dry-run").out
    assert not (tmp_path / "v").exists()
    assert "16 texts = 16 encoded + 0 not encoded" in call(*place).out
    assert measured(call(*place, "--json"))["texts"] == 16
    assert json.loads((tmp_path / "v" / "manifest.json").read_text(encoding="utf-8"))["n_texts"] == 16
    written = sum(file.stat().st_size for file in (tmp_path / "v").glob("*.parquet"))
    assert written / 16 == pytest.approx(found["bytes_per_text"], rel=0.01), "all texts are in the sample"


def test_a_dry_run_leaves_texts_out_that_the_tokenizer_refuses(call: Call, masked_lm: str, tmp_path: Path) -> None:
    rows = [{"_id": f"d{number}", "title": "", "text": f"cats sleep {number}"} for number in range(3)]
    rows.insert(1, {"_id": "half", "title": "", "text": "half a character \ud800"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ("encode", "--model", masked_lm, "--data", tmp_path / "rows.jsonl", "--output", "v", "--dry-run")
    printed = done(call(*asked))
    assert "4 texts in 1 shards" in printed.out and "in 3 texts; 1 others are none" in printed.out
    assert measured(call(*asked, "--json"))["refused_texts"] == 1
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]))
    refused = call(*asked)
    assert (
        refused.code == 1 and "--data: the tokenizer refuses all 1 texts of the sample (TextEncodeInput" in refused.err
    )


def test_a_missing_cluster_is_said(call: Call, masked_lm: str, shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("ray")
    asked = ("encode", "--model", masked_lm, "--data", shared / "data", "--output", tmp_path / "v", "--engine", "ray")
    fails(call(*asked, "--address", "nowhere"), 1, "--address: expected host:port")
    monkeypatch.setitem(sys.modules, "ray.data", None)
    fails(call(*asked), 1, "pip install 'tilefold[ray]'")
    assert not (tmp_path / "v").exists()


def test_documents_are_exported_with_tokens_and_texts(call: Call, shared: Path, masked_lm: str, tmp_path: Path) -> None:
    places = ("--vectors", shared / "vectors", "--model", masked_lm, "--data", shared / "data")
    made = done(
        call("export", "--to", "vespa", *places, "--output", tmp_path / "vespa", "--document", "article", "--json")
    )
    vectors = read_vectors(shared / "vectors")
    report = json.loads(made.out)
    assert (report["n_documents"], report["n_weights"]) == (len(vectors), len(vectors.data))
    assert report["files"] == ["article.sd", "feed.jsonl"]
    puts = [json.loads(line) for line in (tmp_path / "vespa" / "feed.jsonl").read_bytes().splitlines()]
    assert [put["put"] for put in puts] == [f"id:tilefold:article::{name}" for name in vectors.ids]
    assert puts[0]["fields"]["text"] == small_collection().contents()[vectors.ids[0]]
    made = done(call("export", "--to", "opensearch", *places, "--output", tmp_path / "bulk", "--dots", "keep"))
    assert f"{len(vectors)} documents written for opensearch" in made.out
    source = json.loads((tmp_path / "bulk" / "bulk-00000.ndjson").read_bytes().splitlines()[1])
    assert {"id": vectors.ids[0], "sparse": puts[0]["fields"]["sparse"]["cells"]}.items() <= source.items()


def test_export_refuses_what_does_not_belong_together(call: Call, shared: Path, masked_lm: str, tmp_path: Path) -> None:
    here = ("--vectors", shared / "vectors", "--output", tmp_path / "out")
    wrong = {
        ("--to", "lucene"): "--to: expected one of opensearch, vespa, got 'lucene'",
        ("--to", "vespa"): "--model: give the model that made the vectors, or --names numbers",
        ("--to", "vespa", "--dots", "keep"): "--dots goes with --to opensearch",
        ("--to", "vespa", "--names", "words"): "--names: expected one of tokens, numbers, got 'words'",
        ("--to", "vespa", "--names", "numbers", "--field", "a.b"): "--field: expected letters",
        ("--to", "opensearch", "--names", "tokens", "--field-type", "sparse_vector"): "sparse_vector are numbers",
        ("--to", "opensearch", "--model", masked_lm, "--dots", "x"): "--dots: expected one of refuse, keep, got 'x'",
        ("--to", "opensearch", "--names", "numbers", "--dots", "keep"): "--dots does nothing where terms are called",
    }
    for options, message in wrong.items():
        fails(call("export", *options, *here), 2, message)
    other: Any = small_collection()
    other.documents.popitem()
    other.save_beir(tmp_path / "other")
    refused = call("export", "--to", "vespa", "--names", "numbers", *here, "--data", tmp_path / "other")
    assert (refused.code, "holds other texts than those" in refused.err) == (1, True)
    write_vectors(SparseVectors.from_rows({"a": {1012: 1.0}}, 30522), tmp_path / "dotted")
    out = ("--output", tmp_path / "out")
    refused = call("export", "--to", "opensearch", "--vectors", tmp_path / "dotted", *out, "--model", "minilm")
    assert refused.code == 1
    assert "holds a dot, got '.' (term 1012). Give --names numbers (or --dots keep" in refused.err
    write_vectors(SparseVectors.from_rows({"a": {7: 1.0}}, 30522, "0" * 64), tmp_path / "foreign")
    refused = call("export", "--to", "vespa", "--vectors", tmp_path / "foreign", *out, "--model", masked_lm)
    assert (refused.code, "(fingerprint 000000000000), got that of" in refused.err) == (1, True)
    assert not (tmp_path / "out").exists()
    done(call("export", "--to", "opensearch", "--field-type", "sparse_vector", *here))
