"""The walk-throughs of the documents, run on a small collection with a small model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import run_cli
from tests.recipes.small import small_collection, small_masked_lm

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("backbone")))


def section(document: str, heading: str) -> str:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_every_block_of_the_python_document_runs(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [body for kind, body in FENCE.findall((ROOT / "docs" / "python.md").read_text()) if kind == "python"]
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        small = re.sub(r"max_steps=\d+", "max_steps=2", block.replace('"minilm"', repr(backbone)))
        exec(compile(small, f"docs/python.md, block {number}", "exec"), namespace)  # noqa: S102
    printed = capsys.readouterr().out
    assert "(6, 30522) True" in printed and "fused {'nDCG@10'" in printed
    points = json.loads((tmp_path / "points.json").read_text())["points"]
    assert len(points) == 6 and points[0]["payload"] == {"document": "cards"}
    assert len((tmp_path / "articles.jsonl").read_text().splitlines()) == 6
    assert (
        not {"[CLS]", "[SEP]"} & json.loads((tmp_path / "articles.jsonl").read_text().splitlines()[0])["vector"].keys()
    )


def test_the_walk_through_of_the_command_line_runs(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_collection().save_beir("data")
    topics = "".join(
        f"<top><num>{name}</num><title>{text}</title></top>" for name, text in small_collection().queries.items()
    )
    Path("topics.trec").write_text(topics)
    Path("queries.txt").write_text("how do I work with sockets\n")
    parts = ("From a collection to nDCG", "BM25, dense retrieval and fusion", "Late interaction")
    lines = [
        line
        for part in parts
        for kind, body in FENCE.findall(section("cli.md", part))
        if kind == "sh"
        for line in body.splitlines()
    ]
    assert len(lines) > 15
    for line in lines:
        command, _, given = line.partition(" < ")
        words = ["data" if word == "pydocs" else word for word in shlex.split(command, comments=True)[1:]]
        if words[0] == "train":
            words += ["--model", backbone, "--steps", "2", "--batch-size", "4", "--max-length", "32"]
        with (Path(given) if given else Path("/dev/null")).open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert run_cli(*words) == 0, line
