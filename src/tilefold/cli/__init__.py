"""The ``tilefold`` command: one file per subcommand."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

from tilefold._internal.termination import TERMINATED, TerminationHandler

__all__ = ["app", "main"]

WRONG_USAGE, INTERRUPTED = 2, 130


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    The code is 0, 1 for failures, 2 for usage, 130 after Ctrl-C and 143 after SIGTERM. Both signals
    keep finished work.
    """
    # Threads that spin at OpenMP barriers make small operations tens of times slower on a busy
    # machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if args is None else args)
    code = _run_until_signal([arg for arg in given if arg != "--debug"], "--debug" in given)
    if args is None and not _has_nanobind_types():
        # the interpreter would look through all models and libraries for garbage, several times
        gc.freeze()
    sys.exit(code)


def _has_nanobind_types() -> bool:
    """Whether a library bound by nanobind was imported, such as Triton from 3.9 on.

    Its types belong to reference cycles, as all types of Python do. What the interpreter's last
    garbage collection leaves of them, nanobind reports at exit as leaked, in some forty lines.
    """
    metaclasses = type.__subclasses__(type)
    return any(metaclass.__module__ == "nanobind" for metaclass in metaclasses)


def _run_until_signal(args: list[str], debug: bool) -> int:
    """Run the command and return its exit code; SIGTERM ends it as Ctrl-C does.

    The server handles SIGTERM itself, because it first answers the requests that it has.
    """
    command = next((arg for arg in args if not arg.startswith("-")), None)
    handler = TerminationHandler()
    if command == "serve":
        return _run(args, debug, handler)
    with handler:
        return _run(args, debug, handler)


def _run(args: list[str], debug: bool, termination: TerminationHandler) -> int:
    try:
        import typer
    except ImportError:
        sys.stderr.write(
            'Error: the tilefold command needs typer and rich: pip install "tilefold[cli]"\n',
        )
        return 1
    from tilefold.cli import _common, _options

    _common.kept.clear()
    _options.command_line[:] = [*args, *(["--debug"] if debug else [])]
    try:
        from tilefold.retrieval.encoding.truncation import tally_truncation

        with tally_truncation() as cuts:
            outcome = typer.main.get_command(_app())(
                args or ["--help"],
                prog_name="tilefold",
                standalone_mode=False,
            )
        for line in cuts.lines():
            _common.note(line)
        code = outcome if isinstance(outcome, int) else 0
        if not args:  # the help shows the commands, of which one was expected
            code = WRONG_USAGE
    except typer.Exit as leave:
        code = leave.exit_code
    except _common.RanksInterruptedError as interruption:
        return interruption.exit_code  # rank 0 has reported what is kept
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        return _report(error)
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        outcome_text = "Nothing was kept."
        if any(check() for check in _common.kept):
            outcome_text = "Finished work is kept: run the same command again to resume."
        cause = "Ended by SIGTERM" if termination.received else "Interrupted"
        _common.note(f"{cause}. {outcome_text}")
        if termination.received:
            code = TERMINATED
    return code


def _report(error: Exception) -> int:
    from tilefold.cli._common import CommandError, UsageError, note, text_of

    formatted = getattr(error, "format_message", None)  # typer's own errors have it
    usage = formatted is not None
    text = " ".join((formatted() if formatted is not None else text_of(error)).split())
    if type(error).__name__ == "MissingParameter":  # of click, or of typer's copy of it
        text = f"{text} {error.param.help}"  # type: ignore[attr-defined]
    known = (
        isinstance(error, (CommandError, ValueError, OSError, ImportError, RuntimeError)) or usage
    )
    if not known or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    note(f"Error: {text}", style="bold red")
    if (context := getattr(error, "ctx", None)) is not None:
        note(f"Try: {context.command_path} --help")
    elif not known:
        note("This is not expected. The same command with --debug shows where it happened.")
    return WRONG_USAGE if usage or isinstance(error, UsageError) else 1


@functools.cache
def _app() -> Any:
    import typer

    from tilefold.cli._options import Command, as_command, root
    from tilefold.cli.bench import bench, warmup
    from tilefold.cli.compare import compare
    from tilefold.cli.demo import demo
    from tilefold.cli.encode import encode
    from tilefold.cli.evaluate import evaluate, fuse
    from tilefold.cli.export import export
    from tilefold.cli.index import index, merge
    from tilefold.cli.info import info
    from tilefold.cli.mine import mine, score
    from tilefold.cli.search import search
    from tilefold.cli.serve import serve
    from tilefold.cli.train import recipes, train

    app = typer.Typer(
        name="tilefold",
        help="Train, encode, index, search, evaluate, fuse and export neural retrievers.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(root)
    commands = (
        demo,
        train,
        recipes,
        encode,
        merge,
        index,
        search,
        evaluate,
        compare,
        export,
        fuse,
        mine,
        score,
        serve,
        bench,
        warmup,
        info,
    )
    for command in commands:
        app.command(cls=Command)(as_command(command))
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
