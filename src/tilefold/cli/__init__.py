"""The ``tilefold`` command: one file per subcommand."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tilefold._internal.garbage import exempt_from_garbage_collection
from tilefold._internal.termination import TERMINATED, TerminationHandler

__all__ = ["app", "main"]

# Title of a group in the help -> its commands.
COMMAND_GROUPS = {
    "Start": ("demo", "info"),
    "Search your documents": ("encode", "index", "search", "serve"),
    "Train a model": ("train", "recipes", "mine", "score"),
    "Measure rankings": ("evaluate", "compare", "fuse"),
    "Maintain vectors and indexes": ("verify", "merge", "migrate", "export"),
    "Operators on this machine": ("bench", "warmup"),
}
COMMANDS = tuple(command for commands in COMMAND_GROUPS.values() for command in commands)
# Typer prints each paragraph of an epilog as one line.
FIRST_SEARCH = """Search a file of your own, such as FILE.jsonl or FILE.csv:

tilefold index --backend bm25 --data FILE --output INDEX

tilefold search "a query" --index INDEX --data FILE"""
# Names of other programs, such as those of a trainer's arguments -> the option of tilefold.
OPTIONS_BY_OTHER_NAME = {
    "--learning-rate": "--lr",
    "--max-steps": "--steps",
    "--num-train-epochs": "--epochs",
    "--per-device-train-batch-size": "--batch-size",
    "--top-k": "--k",
    "--limit": "--k",
    "--input": "--data",
    "--out": "--output",
    "--output-dir": "--output",
}
WRONG_USAGE = 2  # exit codes
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    The code is 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C and 143 after
    SIGTERM. Finished work is kept after either signal.

    Args:
        args: the words of the command line after ``tilefold``; None takes them from ``sys.argv``.
    """
    # OpenMP threads wait without spinning. On a busy machine, spinning would make small operations
    # tens of times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command_line = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in command_line
    exit_code = _run_until_signal([arg for arg in command_line if arg != "--debug"], debug)
    if args is None:
        exempt_from_garbage_collection()  # the process ends sooner
    sys.exit(exit_code)


def _run_until_signal(args: list[str], debug: bool) -> int:
    """Run a command until it ends, or until Ctrl-C or SIGTERM, and return its exit code.

    SIGTERM ends a command as Ctrl-C does. Only ``tilefold serve`` handles it itself while it
    listens, because it first answers the pending requests.

    Args:
        args: the words of the command line, without ``--debug``.
        debug: whether unexpected errors are raised, so that their traceback is shown.
    """
    with TerminationHandler() as handler:
        try:
            return _run(args, debug, handler)
        except KeyboardInterrupt:  # before the command started, while modules were imported
            sys.stderr.write(f"{_cause_of_interruption(by_sigterm=handler.received)}. ")
            sys.stderr.write("Nothing was kept.\n")
            return TERMINATED if handler.received else INTERRUPTED


def _run(args: list[str], debug: bool, termination: TerminationHandler) -> int:
    """Run a command, report its error or interruption, and return its exit code.

    Args:
        args: the words of the command line, without ``--debug``.
        debug: whether unexpected errors are raised, so that their traceback is shown.
        termination: the handler that records whether SIGTERM has interrupted the command.
    """
    try:
        import typer
    except ImportError:
        sys.stderr.write(
            'Error: the tilefold command needs typer and rich: pip install "tilefold[cli]"\n',
        )
        return 1
    from tilefold.cli import _common, _options

    # Tests run several commands in one process: the lists may hold entries of an earlier command.
    _common.finished_work_checks.clear()
    _common.resume_notes.clear()
    _options.command_line[:] = [*args, "--debug"] if debug else args
    try:
        exit_code = _run_command(args)
    except typer.Exit as leave:
        exit_code = leave.exit_code
    except _common.RanksInterruptedError as interruption:
        return interruption.exit_code  # rank 0 has printed the message
    except (typer.Abort, KeyboardInterrupt):
        exit_code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        return _report_error(error)
    if exit_code != INTERRUPTED:  # typer turns Ctrl-C into this code
        return exit_code
    with suppress(KeyboardInterrupt):  # of a second Ctrl-C: the command has ended already
        _report_interruption(by_sigterm=termination.received)
    return TERMINATED if termination.received else INTERRUPTED


def _report_interruption(*, by_sigterm: bool) -> None:
    """Print that a command was interrupted, and whether running it again resumes.

    Args:
        by_sigterm: whether SIGTERM has interrupted the command, instead of Ctrl-C.
    """
    from tilefold.cli import _common

    outcome = "Nothing was kept."
    if any(has_finished_work() for has_finished_work in _common.finished_work_checks):
        outcome = "Finished work is kept: run the same command again to resume."
    cause = _cause_of_interruption(by_sigterm=by_sigterm)
    sentences = [f"{cause}. {outcome}", *(describe() for describe in _common.resume_notes)]
    _common.note(" ".join(sentences))


def _cause_of_interruption(*, by_sigterm: bool) -> str:
    """Return the words for the signal that has interrupted a command."""
    return "Ended by SIGTERM" if by_sigterm else "Interrupted"


def _run_command(args: list[str]) -> int:
    """Run a command, report how many texts were truncated, and return its exit code.

    Args:
        args: the words of the command line after ``tilefold``. Without any, the help is printed
            and the exit code is 2.
    """
    import typer

    from tilefold.cli import _common
    from tilefold.retrieval.encoding.truncation import tally_truncation

    # Without a known command as first word, typer needs all commands for its help or its error.
    only_command = args[0] if args and args[0] in COMMANDS else None
    command = typer.main.get_command(_create_app(only_command))
    with tally_truncation() as tally:
        result = command(args or ["--help"], prog_name="tilefold", standalone_mode=False)
    for line in tally.sentences():
        _common.note(line)
    if not args:
        return WRONG_USAGE
    return result if isinstance(result, int) else 0


def _report_error(error: Exception) -> int:
    """Print an error as one line, with a hint if there is one, and return the exit code.

    Errors of usage, of data and of the system are expected. The line of any other error begins with
    its class.

    Returns:
        2 for wrong usage, and 1 for any other error.
    """
    from tilefold.cli._common import CommandError, UsageError, note, text_of

    if hasattr(error, "format_message"):  # only errors of typer have this method
        _report_typer_error(error)
        return WRONG_USAGE
    text = " ".join(text_of(error).split())
    class_name = type(error).__name__
    expected_errors = (CommandError, ValueError, OSError, ImportError, RuntimeError)
    is_expected = isinstance(error, expected_errors)
    if not text:
        text = class_name
    elif not is_expected:
        text = f"{class_name}: {text}"
    note(f"Error: {text}", style="bold red")
    if not is_expected:
        note("This is not expected. The same command with --debug shows where it happened.")
    return WRONG_USAGE if isinstance(error, UsageError) else 1


def _report_typer_error(error: Any) -> None:
    """Print an error that typer raised for a command line, and the command that shows the help."""
    from tilefold.cli._common import note

    text = " ".join(error.format_message().split())
    # Compared by name, because the class is click's or that of the copy of click in typer.
    if type(error).__name__ == "MissingParameter":
        text = f"{text} {error.param.help}"
    elif type(error).__name__ == "NoSuchOption":
        option = OPTIONS_BY_OTHER_NAME.get(error.option_name)
        if option in {spelling for param in error.ctx.command.params for spelling in param.opts}:
            text = f"No such option: {error.option_name}; here it is {option}"
        text += _hint_at_double_dash(error)
    elif text.startswith("Got unexpected extra argument"):
        text += ': put text of several words in quotes, such as "lost card"'
    note(f"Error: {text}", style="bold red")
    if error.ctx is not None:
        note(f"Try: {error.ctx.command_path} --help")


def _hint_at_double_dash(error: Any) -> str:
    """Return how to pass a word that begins with a dash as the argument of a command.

    Args:
        error: error of typer for a word that it has read as an unknown option. It names only the
            first letter of a word with one dash.

    Returns:
        A sentence with the word; empty if the command takes no argument, or if the word looks like
        a misspelled option.
    """
    from tilefold.cli._options import command_line

    name = error.option_name
    word = next((word for word in command_line if word.startswith(name)), name)
    looks_like_option = word.startswith("--") and len(word.split()) == 1  # all have two dashes
    parameters = error.ctx.command.params
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    if looks_like_option or not arguments:
        return ""
    return (
        f". If {shlex.quote(word)} is the {arguments[0].name}, pass it last: -- {shlex.quote(word)}"
    )


@functools.cache
def _create_app(command: str | None = None) -> Any:
    """Create the typer application, which parses the command line.

    Args:
        command: the name of the only command that it gets, so that the files of other commands
            are not imported; None for all commands.
    """
    import typer

    from tilefold.cli._options import Command, as_command, root

    app = typer.Typer(
        name="tilefold",
        help="Train, encode, index, search, evaluate, fuse and export neural retrievers.",
        epilog=FIRST_SEARCH,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(root)
    for group, names in COMMAND_GROUPS.items():
        for name in names:
            if command in (None, name):
                function = as_command(_import_command(name))
                app.command(cls=Command, rich_help_panel=group)(function)
    return app


def _import_command(command: str) -> Callable[..., None]:  # noqa: PLR0911, PLR0912 - one per command
    """Import the function of a command, but not the files of other commands.

    Each import is a statement of its own, so that a test can check the imports of the package.

    Args:
        command: one of :data:`COMMANDS`.
    """
    if command == "demo":
        from tilefold.cli.demo import demo

        return demo
    if command == "train":
        from tilefold.cli.train import train

        return train
    if command == "recipes":
        from tilefold.cli.train import recipes

        return recipes
    if command == "encode":
        from tilefold.cli.encode import encode

        return encode
    if command == "verify":
        from tilefold.cli.verify import verify

        return verify
    if command == "merge":
        from tilefold.cli.index import merge

        return merge
    if command == "index":
        from tilefold.cli.index import index

        return index
    if command == "migrate":
        from tilefold.cli.migrate import migrate

        return migrate
    if command == "search":
        from tilefold.cli.search import search

        return search
    if command == "evaluate":
        from tilefold.cli.evaluate import evaluate

        return evaluate
    if command == "compare":
        from tilefold.cli.compare import compare

        return compare
    if command == "export":
        from tilefold.cli.export import export

        return export
    if command == "fuse":
        from tilefold.cli.evaluate import fuse

        return fuse
    if command == "mine":
        from tilefold.cli.mine import mine

        return mine
    if command == "score":
        from tilefold.cli.mine import score

        return score
    if command == "serve":
        from tilefold.cli.serve import serve

        return serve
    if command == "bench":
        from tilefold.cli.bench import bench

        return bench
    if command == "warmup":
        from tilefold.cli.bench import warmup

        return warmup
    from tilefold.cli.info import info

    return info


def __getattr__(name: str) -> Any:
    """Create the attribute ``app``, the typer application of all commands, when it is read."""
    if name == "app":
        return _create_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
