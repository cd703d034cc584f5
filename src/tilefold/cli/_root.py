"""Options before the command's name."""

from __future__ import annotations

from typing import Annotated

import typer

from tilefold._version import __version__


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilefold {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
