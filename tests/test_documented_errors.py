"""The messages on the page of errors are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUE = "…"


def template(node: ast.AST) -> str | None:
    """Return the text of a string literal, with ``…`` for the values of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
        )
    return None


def templates(path: Path) -> list[str]:
    """Return the text of every string literal of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [text for text in map(template, nodes) if text]


def templates_of_the_source() -> list[str]:
    """Return the text of every string literal of the package."""
    paths = (ROOT / "src" / "tilefold").rglob("*.py")
    return [text for path in paths for text in templates(path)]


def documented_messages() -> Iterator[str]:
    """Yield the messages in the first cells of the tables of docs/errors.md."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for line in page.splitlines():
        message = re.match(r"\| `([^`]+)` \|", line)
        if message:
            yield message[1]


def contains(text: str, message: str) -> bool:
    """Whether a literal has the parts of a message, in their order."""
    position = 0
    for part in message.split(VALUE):
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def test_messages_on_the_page_of_errors_are_in_the_source() -> None:
    messages = list(documented_messages())
    assert len(messages) >= 40
    literals = templates_of_the_source()
    unknown = [
        message for message in messages if not any(contains(text, message) for text in literals)
    ]
    assert unknown == [], "the source has no such messages; write the new wording"


def test_messages_on_the_page_of_errors_are_listed_once() -> None:
    messages = list(documented_messages())
    assert sorted(set(messages)) == sorted(messages)
