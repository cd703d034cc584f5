"""Every file of the package is named in a table of its room's README, and every name there is a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.import_graph import PACKAGE

READMES = sorted(PACKAGE.rglob("README.md"))


def room(path: Path) -> Path:
    """The folder of the next README above a file."""
    return next(folder for folder in path.parents if (folder / "README.md").is_file())


def named(readme: Path) -> list[str]:
    """Names and patterns in the first cells of the tables whose first column is headed "file"."""
    found: list[str] = []
    in_table = False
    for line in readme.read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        in_table = bool(first) and (in_table or first == "file")
        found += re.findall(r"`([^`]+)`", first) if in_table else []
    return found


def missing(folder: Path) -> list[str]:
    """Files below a folder that the README of their room does not name."""
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    listed: dict[Path, set[Path]] = {room_folder: set() for room_folder in map(room, files)}
    for room_folder, paths in listed.items():
        paths.update(path for name in named(room_folder / "README.md") for path in room_folder.glob(name))
    return sorted(str(path.relative_to(PACKAGE)) for path in files if path not in listed[room(path)])


def test_every_file_is_named_in_the_table_of_its_room() -> None:
    assert missing(PACKAGE) == []


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(PACKAGE)))
def test_every_name_in_a_table_is_a_file(readme: Path) -> None:
    assert [name for name in named(readme) if not any(readme.parent.glob(name))] == []
