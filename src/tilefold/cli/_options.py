"""Declaration of options, the base class of requests, and errors that name options."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo, ParameterInfo

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.termination import TERMINATED
from tilefold._version import __version__
from tilefold.cli._common import (
    CommandError,
    RanksInterruptedError,
    UsageError,
    document_fields,
    first_line,
    note,
)
from tilefold.distributed.ranks import INTERRUPTED, RENDEZVOUS, is_rank, run_ranks
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.errors import DataError

OPTION_COLUMNS = 26  # of the names of options in --help, whose texts begin after them

# Words of the command line that runs, without the name of the program.
command_line: list[str] = []

# Options of what a command reads. Of two values, one would be ignored.
INPUTS = frozenset(
    {
        "bm25",
        "data",
        "delete",
        "demo",
        "index",
        "model",
        "negatives",
        "queries",
        "run",
        "tokens",
        "vectors",
    },
)


def option(help: str, *flags: str, panel: str | None = None, **settings: Any) -> Any:
    """Declare an option of a command, for the ``Annotated`` type of a field of its request.

    Args:
        help: the text of ``--help``.
        flags: spellings of the option. By default the name of the field with dashes.
        panel: group of the option in ``--help``.
        settings: further arguments of ``typer.Option``.
    """
    return typer.Option(..., *flags, help=help, rich_help_panel=panel, **settings)


def _check_positive(parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the value of an option, or raise ``UsageError`` if it is below 1."""
    for number in value if isinstance(value, list) else [value]:
        if number is not None and number < 1:
            raise UsageError(f"{parameter.opts[0]}: expected at least 1, got {number}.")
    return value


def positive(help: str, *flags: str, **settings: Any) -> Any:
    """Declare an option whose value is at least 1."""
    return option(help, *flags, callback=_check_positive, **settings)


def argument(help: str) -> Any:
    """Declare a positional argument of a command."""
    return typer.Argument(help=help)


def is_given(value: object) -> bool:
    """Whether the value of an option without a default was given on the command line."""
    return value is not None and value is not False


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise ``UsageError`` for the first of `options` that was given.

    Args:
        options: value of each option by its spelling, such as ``{"--top-k": request.top_k}``. An
            option with a default is given as the comparison with it.
        reason: the rest of the message, which starts with the spelling.
    """
    for spelling, value in options.items():
        if is_given(value):
            raise UsageError(f"{spelling} {reason}.")


def declared_options(request_type: type[Any]) -> dict[str, ParameterInfo]:
    """Return the declarations of the options of a request by field.

    A field is annotated as ``Annotated[type, option(...)]``; its declaration is the second part.
    Fields of a request precede the fields of its base classes, as in ``--help``. Options without a
    group get the group ``HELP_PANEL`` of their class.

    Args:
        request_type: dataclass with the options of a command.
    """
    hints = get_type_hints(request_type, include_extras=True)
    declared: dict[str, ParameterInfo] = {}
    for base in request_type.__mro__:
        panel = vars(base).get("HELP_PANEL")
        for name in vars(base).get("__annotations__", {}):
            if name in declared or name == "HELP_PANEL":
                continue
            _, declaration = get_args(hints[name])
            info = copy.copy(declaration)
            if info.rich_help_panel is None:
                info.rich_help_panel = panel
            declared[name] = info
    return declared


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal`` or an optional ``Literal``; empty for other types."""
    for alternative in (annotation, *get_args(annotation)):
        if get_origin(alternative) is Literal:
            return get_args(alternative)
    return ()


def spellings(request_type: type[Any]) -> dict[str, str]:
    """Return the spelling of every option of a request by field, such as ``--resume/--fresh``."""
    return {
        name: "/".join(info.param_decls or ()) or f"--{name.replace('_', '-')}"
        for name, info in declared_options(request_type).items()
        if isinstance(info, OptionInfo)
    }


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of the requests of commands, and of groups of options that several share.

    A field is an option. Its type is ``Annotated`` with the declaration that :func:`option`,
    :func:`positive` or :func:`argument` returns. A request checks its values when it is made.

    Attributes:
        HELP_PANEL: title of the group in ``--help``.
    """

    HELP_PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ``UsageError`` for values an option does not accept, and for contradictions."""
        hints = get_type_hints(type(self))
        for name, spelling in spellings(type(self)).items():
            choices = choices_of(hints[name])
            if choices:
                check_choice(spelling, getattr(self, name), choices)


@dataclass(frozen=True, kw_only=True)
class DocumentFieldOptions(Options):
    """Options that name the fields of the documents of ``--data``."""

    HELP_PANEL: ClassVar[str | None] = "Fields of --data"

    id_field: Annotated[
        str | None,
        option("Field of documents that is the id, where it has no usual name."),
    ] = None
    title_field: Annotated[str | None, option("Field of documents that is the title.")] = None
    text_field: Annotated[str | None, option("Field of documents that is the text.")] = None

    def validate(self) -> None:
        """Raise ``UsageError`` for names of fields if ``--data`` names no file with such fields."""
        super().validate()
        options = {
            "--id-field": self.id_field,
            "--title-field": self.title_field,
            "--text-field": self.text_field,
        }
        data: str | None = getattr(self, "data")  # noqa: B009  # declared by each request
        if data is None:
            refuse_options(options, "goes together with --data")
        if data == "pydocs":
            refuse_options(options, "goes without --data pydocs, which has no files")

    def document_fields(self) -> DocumentFields:
        """Return the names of the fields."""
        return DocumentFields(self.id_field, self.title_field, self.text_field)


def as_command(function: Callable[[Any], None]) -> Callable[..., None]:
    """Return a function whose parameters are the fields of the request that `function` takes.

    typer makes a command of it, with an option for each parameter. The library's errors about
    arguments become errors about options: an argument with the name of a field is called by the
    option of the field.

    Args:
        function: takes one argument, ``request``, whose annotation is a subclass of
            :class:`Options`.
    """
    request_type = get_type_hints(function)["request"]
    option_of_argument = spellings(request_type)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        request = request_type(**values)
        field_names: AbstractContextManager[None] = nullcontext()
        if isinstance(request, DocumentFieldOptions):
            field_names = document_fields(request.document_fields())
        with option_errors(**option_of_argument), field_names:
            function(request)

    # typer reads the parameters from the signature.
    signature = inspect.Signature(_parameters(request_type))
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _parameters(request_type: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a request as the parameters of a function that typer reads.

    A choice (a ``Literal``) is declared as text. The request checks it, with a message that names
    the choices.

    Args:
        request_type: dataclass with the options of a command.
    """
    hints = get_type_hints(request_type, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(request_type)}
    parameters = []
    for name, info in declared_options(request_type).items():
        annotation = get_args(hints[name])[0]
        choices = choices_of(annotation)
        if choices:
            annotation = str | None
            info.metavar = "|".join(choices)
        default = defaults[name]
        parameter = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=Annotated[annotation, info],
        )
        parameters.append(parameter)
    return parameters


def read_text(path: Path, option: str, encoding: str = "utf-8") -> str:
    """Return the text of a file that an option names.

    Args:
        path: the file.
        option: spelling of the option, for the error.
        encoding: how the text is encoded.

    Raises:
        UsageError: for a file that cannot be read.
    """
    try:
        return path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {path} cannot be read ({first_line(error)}).") from error


def check_choice(option: str, value: str | None, allowed: Iterable[str]) -> None:
    """Raise ``UsageError`` unless the value of an option is one of `allowed`, or None."""
    choices = tuple(allowed)
    if value is not None and value not in choices:
        raise UsageError(f"{option}: expected one of {', '.join(choices)}, got {value!r}.")


@contextmanager
def option_errors(**spellings: str) -> Iterator[None]:
    """Raise errors of the library about its arguments as errors about options.

    ``depth: expected ...`` becomes ``--prf-depth: expected ...`` with ``depth="--prf-depth"``. An
    error about any other argument is raised unchanged. The command has such a context too, which
    maps its fields to options (:func:`as_command`).

    Args:
        spellings: option of each argument. The message begins with it and a colon. A value that
            has a colon already, such as ``"--bm25: FOLDER"``, gets no second one.

    Raises:
        CommandError: for wrong data.
        UsageError: for another wrong value.
    """
    try:
        yield
    except ArgumentError as error:
        if not all(argument in spellings for argument in error.arguments):
            raise
        subject = ", ".join(spellings[argument] for argument in error.arguments)
        if ":" not in subject:
            subject += ":"
        kind = CommandError if isinstance(error, DataError) else UsageError
        raise kind(f"{subject} {error.problem}") from error


def bm25_language(language: str | None) -> str:
    """Return the language of ``--language``, or the default one of BM25.

    Args:
        language: value of the option; None without it.

    Raises:
        UsageError: for a language that has no stemmer.
    """
    from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer

    options = BM25Options(BM25Options.language if language is None else language)
    with option_errors(language="--language"):
        Tokenizer(options)  # checks the language
    return options.language


def run_on_devices(devices: str | None) -> int | None:
    """Start this command again in one process per device, and wait until they have ended.

    Args:
        devices: value of ``--devices``: a number, or ``"all"`` GPUs of this machine.

    Returns:
        The exit code of the processes. None if no process was started and the caller does the work
        itself: for one device, without ``--devices``, and in the processes that were started.

    Raises:
        UsageError: for a number of devices that this machine does not have.
        RanksInterruptedError: after Ctrl-C or SIGTERM, once the processes have ended.
    """
    if devices is None or RENDEZVOUS in os.environ:
        return None
    if is_rank():
        raise UsageError("--devices: torchrun has started the ranks already; leave --devices out.")
    import torch

    n_gpus = torch.cuda.device_count()
    n_devices = 0
    if devices == "all":
        n_devices = max(1, n_gpus)
    elif devices.isdecimal():
        n_devices = int(devices)
    if n_devices < 1 or (n_gpus and n_devices > n_gpus):
        allowed = f"from 1 to {n_gpus}, the GPUs of this machine" if n_gpus else "1 or more"
        raise UsageError(
            f"--devices: expected 'all' or a whole number, {allowed}, got {devices!r}.",
        )
    if n_devices == 1:
        return None
    exit_code = run_ranks([sys.executable, "-m", "tilefold.cli", *command_line], n_devices)
    if exit_code in (INTERRUPTED, TERMINATED):
        raise RanksInterruptedError(exit_code)
    return exit_code


def _show_version(show: bool) -> None:
    """Print the version and end the command, if ``--version`` was given."""
    if show:
        typer.echo(f"tilefold {__version__}")
        raise typer.Exit


class Command(TyperCommand):
    """A command that refuses an input given twice, and notes other options given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that are left, as click does."""
        _, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
        self._check_repetitions(parameters)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help in groups of options.

        Names of options are never cut. The tables of typer would do so at 80 columns.

        Args:
            ctx: click's context of the command.
            formatter: click's formatter, which writes the help.
        """
        self.format_usage(ctx, formatter)
        self._format_description(formatter)
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_option = parameter.opts[0].startswith("-")
            default_group = "Options" if is_option else "Arguments"
            group = getattr(parameter, "rich_help_panel", None) or default_group
            groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=OPTION_COLUMNS)

    def _format_description(self, formatter: Any) -> None:
        """Write the docstring of a command, whose paragraphs are wrapped, but for its example."""
        with formatter.indentation():
            for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
                formatter.write_paragraph()
                if paragraph.startswith("Example:"):
                    for line in paragraph.splitlines():
                        formatter.write(f"  {line}\n")
                else:
                    formatter.write_text(" ".join(paragraph.split()))

    def _check_repetitions(self, parameters: Iterable[Any]) -> None:
        """Refuse inputs that are given twice, and note other options that are.

        Args:
            parameters: the parameters of a command line, in their order.

        Raises:
            UsageError: for an option of :data:`INPUTS`, of which the first value would be lost.
        """
        declared = {parameter.name for parameter in self.params}  # without click's own --help
        names: set[str] = set()
        for parameter in parameters:
            if parameter.name not in declared or getattr(parameter, "multiple", False):
                continue
            if parameter.name in names:
                spelling = "/".join((*parameter.opts, *parameter.secondary_opts))
                if parameter.name in INPUTS:
                    raise UsageError(f"{spelling}: expected once, got it twice: leave one out.")
                note(f"{spelling} was given twice: the last one counts.")
            names.add(parameter.name)


def root(
    version: Annotated[
        bool,
        option("Show the version and exit.", "--version", callback=_show_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, option("Show the whole traceback of an error.", "--debug")] = False,
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
