"""``tilefold recipes``: lists the systems that ``tilefold train --recipe`` knows."""

from __future__ import annotations

from typing import Annotated

import typer

from tilefold.cli import _common


def recipes(
    name: Annotated[str | None, typer.Argument(help="Only this one, with its settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All settings as JSON on stdout.")] = False,
) -> None:
    """List the published systems that can be trained by name, what they need, and what their papers report."""
    from tilefold.recipes.catalogue import RECIPES

    if name is not None and name not in RECIPES:
        raise _common.UsageError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}.")
    chosen = [entry for entry in RECIPES.values() if name in (None, entry.name)]
    if as_json:
        found = [entry.to_dict() for entry in chosen]
        _common.print_json(found[0] if name else found)
        return
    from rich.table import Table

    table = Table(box=None)
    for column in ("recipe", "what it is", "needs", "paper", "published number"):
        table.add_column(column, overflow="fold")
    for entry in chosen:
        paper = f"arXiv {entry.paper}" if entry.paper else ""
        table.add_row(entry.name, entry.summary, ", ".join(entry.needs), paper, entry.publishes)
    _common.stdout().print(table)
    if name:
        for field, value in chosen[0].recipe.to_dict().items():
            said = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
            typer.echo(f"{field} = {said}")
        typer.echo(f"published: {chosen[0].published}")
