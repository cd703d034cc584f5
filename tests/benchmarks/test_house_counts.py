"""The counts of the house: each rule on a file that breaks it, and a commit counted as the working tree is."""

from __future__ import annotations

import ast
import csv
import subprocess
from pathlib import Path

import pytest

from benchmarks import house_counts
from benchmarks.house_counts import Source, copies, count, main, private_names

SOURCE = """import torch
from typing import Any
from torch.autograd import forward_ad


@triton.jit
def kernel(a, b, c, d, e, f, g, h, i):
    pass


def plain(a, b, c, d, e, f, g, h, *rest, **more):  # noqa: X1
    return torch._C._cuda_getDevice(), forward_ad._current_level  # type: ignore[x]


def long(a, b, /, c, d, e, f, *, g, h, i) -> Any:
    "Any noqa type: ignore"
    return compiled.packed_metadata
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("src/tilefold/ops/lsr_head/_calls.py", "src/tilefold/cli.py", "tests/test_a.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE if "ops" in name else "x = 1\n")
    return tmp_path


def test_each_rule_counts_what_it_says(tree: Path) -> None:
    counts = count(tree)
    assert (counts["files", "src"], counts["lines", "src"], counts["lines", "tests"]) == (2, 18, 1)
    assert counts["functions with more than 8 parameters", "src, kernels"] == 1
    assert counts["functions with more than 8 parameters", "src, other"] == 1
    assert counts["Any", "src/tilefold/ops"] == 2
    assert counts["type: ignore", "src"] == counts["noqa", "src"] == 1
    assert counts["lines of launch machinery", "src/tilefold/ops"] == 17
    assert counts["private names", "src/tilefold/ops/lsr_head/_calls.py"] == 3
    assert counts["files with private names", "src"] == 1


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch._dynamo as d\nd.reset()", {"torch._dynamo", "torch._dynamo.reset"}),
        ("from torch._C import x", {"torch._C.x"}),
        ("import torch\ntorch.__version__, torch.nn.functional.relu", set()),
        ("import torch\nrun = super(torch.autograd.Function, F).apply", {"super"}),
        ("launcher = type(run).__name__ == 'CudaLauncher'", {"CudaLauncher"}),
        ("self._C._private", set()),
    ],
)
def test_private_names_are_found_whatever_they_are_imported_as(code: str, names: set[str]) -> None:
    assert set(private_names(ast.parse(code))) == names


def source(text: str, name: str = "b.py") -> Source:
    return Source(name, text, ast.parse(text))


def sizes(sources: list[Source]) -> list[int]:
    return [len(copy.lines) for copy in copies(sources)]


def test_a_copy_is_six_lines_or_more_whatever_stands_between() -> None:
    body = [f"    line_{i} = {i}" for i in range(8)]
    one = source("def f():\n" + "\n".join(body), "a.py")
    spaced = source(
        "def g(a,\n      b):\n    'words'\n" + "\n    # why\n\n".join(line.replace("=", " = ") for line in body)
    )
    assert sizes([one, source(one.text)]) == [8]
    assert sizes([one, source(one.text.replace("line_4", "other"))]) == []
    assert sizes([source("x = 1\n" * 20)]) == [14], "lines overlap with nothing"
    assert sizes([one, spaced]) == [8]
    halves = "def g():\n" + "\n".join(body[:4]) + "\ndef h():\n" + "\n".join(body[4:])
    assert sizes([one, source(halves)]) == [], "a signature ends a run"
    (copy,) = copies([one, spaced])
    assert str(copy) == "b.py:4-25 = a.py:2"


def test_places_are_shown_in_place_of_counts(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house_counts, "ROOT", tree)
    assert main(["--places"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "more than 8 parameters: src/tilefold/ops/lsr_head/_calls.py:15 long" in lines
    assert "private: src/tilefold/ops/lsr_head/_calls.py torch._C._cuda_getDevice (1)" in lines


def test_commits_are_counted_from_their_archives(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> None:
        command = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    (tree / "src/tilefold/cli.py").write_text("x = 1\ny = 2\n")
    monkeypatch.setattr(house_counts, "ROOT", tree)
    output = tree / "house" / "counts.csv"
    git("commit", "--quiet", "-am", "two")
    assert main(["--ref", "HEAD~1", "--ref", "HEAD", "--output", str(output)]) == 0
    with output.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ["measure", "place"] and len(header) == 4
    assert ["lines", "src", "18", "19"] in rows
    printed = capsys.readouterr().out
    assert main([]) == 0
    assert "working tree" in capsys.readouterr().out and "lines  src" in printed
    assert main(["--ref", "no-such-commit"]) == 2
    assert "--ref no-such-commit: git:" in capsys.readouterr().err
