"""Options before the command's name, and how every command reads its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tilefold._version import __version__
from tilefold.cli import _common, _rules

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
        """The arguments that are left, as click returns them."""
        _common.given.clear()
        _common.options.clear()
        _, _, found = self.make_parser(ctx).parse_args(args=list(args))
        spelled = {each.name: "/".join((*each.opts, *each.secondary_opts)) for each in self.params}
        _common.options.update({name: text.partition("/")[0] for name, text in spelled.items() if text[:2] == "--"})
        for parameter in (each for each in found if each.name in spelled):  # --help is click's own
            option = spelled[parameter.name]
            if parameter.name in _common.given and not getattr(parameter, "multiple", False):
                if parameter.name in INPUTS:
                    raise _common.UsageError(f"{option}: expected once, got it twice: leave one out.")
                _common.note(f"{option} was given twice: the last one counts.")
            _common.given[parameter.name] = option
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, once its options go together."""
        _rules.check(ctx.info_name, ctx.params)
        return super().invoke(ctx)


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
