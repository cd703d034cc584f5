"""Options before the command's name, and how every command reads its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tilefold._version import __version__
from tilefold.cli._common import UsageError, given, note

_GIVEN = "tilefold.given"
# options of what a command works on: of two, one would be left out
INPUTS = frozenset(
    {"bm25", "data", "delete", "demo", "index", "model", "negatives", "queries", "run", "tokens", "vectors"}
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilefold {__version__}")
        raise typer.Exit


class Command(TyperCommand):
    """A command that says so where an option is given twice, but for lists, and refuses two inputs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left, as click returns them.

        Raises:
            UsageError: one of :data:`INPUTS` was given twice.
        """
        _, _, found = self.make_parser(ctx).parse_args(args=list(args))
        options: dict[str, str] = {}
        for parameter in found:
            option = "/".join((*parameter.opts, *parameter.secondary_opts))
            if parameter.name in options and not getattr(parameter, "multiple", False):
                if parameter.name in INPUTS:
                    raise UsageError(f"{option}: expected once, got it twice: leave one out.")
                note(f"{option} was given twice: the last one counts.")
            options[parameter.name] = option
        ctx.meta[_GIVEN] = options
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, which may ask for the options that were given."""
        given.update(ctx.meta[_GIVEN])
        try:
            return super().invoke(ctx)
        finally:
            given.clear()


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
