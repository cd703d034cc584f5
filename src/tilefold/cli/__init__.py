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

WRONG_USAGE = 2  # exit codes
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    The code is 0, 1 for failures, 2 for usage, 130 after Ctrl-C and 143 after SIGTERM. Both signals
    keep finished work.

    Args:
        args: words of the command line after ``tilefold``; None takes those of this process.
    """
    # Threads of OpenMP wait without spinning. On a busy machine, spinning would make small
    # operations tens of times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command_line = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in command_line
    exit_code = _run_until_signal([arg for arg in command_line if arg != "--debug"], debug)
    if args is None and not _has_nanobind_types():
        # Objects are exempt from garbage collection now. At its end, the interpreter would search
        # all models and libraries for garbage several times.
        gc.freeze()
    sys.exit(exit_code)


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
    """Run a command, report its error or interruption, and return its exit code.

    Args:
        args: words of the command line, without ``--debug``.
        debug: raise unexpected errors, for their traceback.
        termination: records whether SIGTERM has interrupted the command.
    """
    try:
        import typer
    except ImportError:
        sys.stderr.write(
            'Error: the tilefold command needs typer and rich: pip install "tilefold[cli]"\n',
        )
        return 1
    from tilefold.cli import _common, _options

    _common.finished_work_checks.clear()
    _options.command_line[:] = [*args, "--debug"] if debug else args
    try:
        exit_code = _run_command(args)
    except typer.Exit as leave:
        exit_code = leave.exit_code
    except _common.RanksInterruptedError as interruption:
        return interruption.exit_code  # rank 0 has reported what is kept
    except (typer.Abort, KeyboardInterrupt):
        exit_code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        return _report(error)
    if exit_code != INTERRUPTED:  # typer turns Ctrl-C into this code
        return exit_code
    outcome = "Nothing was kept."
    if any(has_finished_work() for has_finished_work in _common.finished_work_checks):
        outcome = "Finished work is kept: run the same command again to resume."
    cause = "Ended by SIGTERM" if termination.received else "Interrupted"
    _common.note(f"{cause}. {outcome}")
    return TERMINATED if termination.received else INTERRUPTED


def _run_command(args: list[str]) -> int:
    """Run a command, note the texts that were truncated, and return its exit code.

    Args:
        args: words of the command line after ``tilefold``. Without any, the help is printed, and
            the exit code is that of wrong usage.
    """
    import typer

    from tilefold.cli import _common
    from tilefold.retrieval.encoding.truncation import tally_truncation

    command = typer.main.get_command(_app())
    with tally_truncation() as tally:
        result = command(args or ["--help"], prog_name="tilefold", standalone_mode=False)
    for line in tally.sentences():
        _common.note(line)
    if not args:
        return WRONG_USAGE
    return result if isinstance(result, int) else 0


def _report(error: Exception) -> int:
    """Print an error in one line, with a hint where there is one, and return the exit code.

    Errors of usage, of data and of the system are expected. The text of any other error begins with
    its class.

    Returns:
        2 for wrong usage, and 1 for other errors.
    """
    from tilefold.cli._common import CommandError, UsageError, note, text_of

    format_message = getattr(error, "format_message", None)  # a method of typer's own errors
    is_from_typer = format_message is not None
    message = text_of(error) if format_message is None else format_message()
    text = " ".join(message.split())
    # Compared by name, because the class is click's or that of the copy of click in typer.
    if type(error).__name__ == "MissingParameter":
        text = f"{text} {error.param.help}"  # type: ignore[attr-defined]
    expected_errors = (CommandError, ValueError, OSError, ImportError, RuntimeError)
    is_expected = is_from_typer or isinstance(error, expected_errors)
    if not is_expected or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    note(f"Error: {text}", style="bold red")
    context = getattr(error, "ctx", None)
    if context is not None:
        note(f"Try: {context.command_path} --help")
    elif not is_expected:
        note("This is not expected. The same command with --debug shows where it happened.")
    return WRONG_USAGE if is_from_typer or isinstance(error, UsageError) else 1


@functools.cache
def _app() -> Any:
    """Return the application of typer with all commands."""
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
