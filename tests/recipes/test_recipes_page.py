"""The page of recipes says of each what the catalogue says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefold.recipes import RECIPES
from tilefold.recipes.catalogue import Entry

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", RECIPES.values(), ids=RECIPES)
def test_every_recipe_has_its_row(entry: Entry) -> None:
    paper = f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})" if entry.paper else ""
    cells = (f"`{entry.name}`", entry.summary, ", ".join(entry.needs), paper, entry.published, entry.publishes)
    assert f"| {' | '.join(cells)} |" in PAGE, "write the row anew from the catalogue"


def test_the_page_advises_on_every_recipe_or_one_of_its_kind() -> None:
    assert [name for name in RECIPES if f"`{name}`" not in PAGE] == []
