"""The walk-through of the Python document, run with a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.recipes.small import VOCABULARY, small_masked_lm

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("backbone")))


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
    assert f"(6, {VOCABULARY}) True" in printed and "fused {'nDCG@10'" in printed
    points = json.loads((tmp_path / "points.json").read_text())["points"]
    assert len(points) == 6 and points[0]["payload"] == {"document": "cards"}
    assert len((tmp_path / "articles.jsonl").read_text().splitlines()) == 6
    assert (
        not {"[CLS]", "[SEP]"} & json.loads((tmp_path / "articles.jsonl").read_text().splitlines()[0])["vector"].keys()
    )
