"""The reference of the Python API: every public name is on one page of the site, with a summary."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
reference = load_script(ROOT / "docs" / "site" / "api_reference.py")
GROUPS = [group for page in reference.PAGES.values() for group in page.groups]
# What a package needs that is not installed with the development tools.
OPTIONAL = {
    "tilefold.integrations.langchain": "langchain_qdrant",
    "tilefold.integrations.llama_index": "llama_index",
    "tilefold.integrations.haystack": "haystack",
}
# Constants, aliases of types and bound methods, whose definitions have no docstring.
WITHOUT_SUMMARY = {
    "tilefold.integrations.colpali.is_accelerated",
    "tilefold.integrations.colpali.restore",
    "tilefold.integrations.pylate.is_accelerated",
    "tilefold.integrations.pylate.restore",
    "tilefold.recipes.catalogue.RECIPES",
    "tilefold.retrieval.common.runs.Run",
}


@pytest.mark.parametrize("package", sorted({group.package for group in GROUPS}))
def test_each_public_name_of_a_package_is_in_one_group(package: str) -> None:
    needed = OPTIONAL.get(package)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    module = importlib.import_module(package)
    paths = [
        path for group in GROUPS if group.package == package for path in reference.names_of(group)
    ]
    names = Counter(path.rpartition(".")[2] for path in paths)
    assert set(names.values()) == {1}
    assert set(names) == set(getattr(module, "__all__", names))
    for path in paths:
        home, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(home), name) is getattr(module, name)


def test_packages_with_public_names_have_a_page() -> None:
    packages = {
        ".".join(path.parent.relative_to(reference.SOURCES).parts)
        for path in (reference.SOURCES / "tilefold").rglob("__init__.py")
        if "__all__" in path.read_text(encoding="utf-8")
    }
    # The operators again, the commands, and names that `tilefold.retrieval` exports.
    packages -= {"tilefold", "tilefold.cli", "tilefold.retrieval.index"}
    private = {package for package in packages if "._" in package}
    operators = {package for package in packages if package.startswith("tilefold.ops.")}
    assert packages - private - operators <= {group.package for group in GROUPS}


def test_each_name_has_a_summary_of_one_sentence() -> None:
    summaries = {
        path: reference.summary(path) for group in GROUPS for path in reference.names_of(group)
    }
    assert {path for path, summary in summaries.items() if not summary} == WITHOUT_SUMMARY
    too_long = [text for text in summaries.values() if "\n" in text or len(text) > 250]
    cut = [text for text in summaries.values() if text.count("(") != text.count(")")]
    assert too_long == []
    assert cut == [], "the end of a sentence is not the stop of an abbreviation"


def test_a_page_lists_its_names_and_shows_each_docstring_once() -> None:
    page = reference.api_pages()["reference/python/losses.md"]
    assert page.startswith("# Losses\n\nLosses and regularizers of learned sparse retrieval.\n")
    path = "tilefold.losses.functional.flops"
    assert f"| [`flops`][{path}] | " in page
    assert page.count(f"::: {path}\n") == 1
    assert "## Functions { #functions }" in page
