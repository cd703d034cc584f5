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

from tilefold._internal.arguments import ArgumentError, suggestion
from tilefold._internal.precision import Dtype
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
from tilefold.retrieval.data.pages import PageRanges
from tilefold.retrieval.errors import DataError

OPTION_COLUMNS = 26  # width of the column of option names in --help

# Words of the running command line, without the name of the program.
command_line: list[str] = []

# Options that name an input. If one is given twice, the first input would be ignored.
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
        flags: the spellings of the option; by default the name of the field with dashes.
        panel: the group of the option in ``--help``.
        settings: additional arguments of ``typer.Option``.
    """
    return typer.Option(..., *flags, help=help, rich_help_panel=panel, **settings)


def _check_positive(parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the value of an option, or raise ``UsageError`` if it is below 1.

    Args:
        parameter: the option.
        value: a number, a list of numbers, or None if the option was not given.
    """
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
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
    """Return whether an option was given whose default is None or False."""
    return value is not None and value is not False


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise ``UsageError`` for the first of some options that was given.

    ``refuse_options({"--stride": self.stride}, "requires --passages")`` raises ``--stride requires
    --passages.`` if ``self.stride`` was given.

    Args:
        options: option -> its value. An option counts as given if this is neither None nor False.
            For an option with another default, it is whether the value differs from the default.
        reason: the predicate of the message, whose subject is the option.
    """
    for spelling, value in options.items():
        if is_given(value):
            raise UsageError(f"{spelling} {reason}.")


def declared_options(request_type: type[Any]) -> dict[str, ParameterInfo]:
    """Return field -> declaration of its option, for the options of a command.

    A field is annotated as ``Annotated[type, option(...)]``, whose second part is the declaration.
    The fields of a class precede those of its base classes, as in ``--help``. An option that names
    no group of ``--help`` gets the group ``HELP_PANEL`` of its class.

    Args:
        request_type: the dataclass with the options of a command.
    """
    hints = get_type_hints(request_type, include_extras=True)
    declared: dict[str, ParameterInfo] = {}
    for base in request_type.__mro__:
        panel = vars(base).get("HELP_PANEL")
        for name in vars(base).get("__annotations__", {}):
            if name in declared or name == "HELP_PANEL":
                continue
            _, declaration = get_args(hints[name])
            info = copy.copy(declaration)  # several commands share a declaration
            if info.rich_help_panel is None:
                info.rich_help_panel = panel
            declared[name] = info
    return declared


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal`` or an optional ``Literal``; empty for any other type."""
    for alternative in (annotation, *get_args(annotation)):
        if get_origin(alternative) is Literal:
            return get_args(alternative)
    return ()


def spellings(request_type: type[Any]) -> dict[str, str]:
    """Return field -> spelling of the options of a request, such as ``--resume/--fresh``."""
    return {
        name: "/".join(info.param_decls or ()) or f"--{name.replace('_', '-')}"
        for name, info in declared_options(request_type).items()
        if isinstance(info, OptionInfo)
    }


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of command requests, and of groups of options that several commands share.

    Each field is an option. Its type is ``Annotated`` with the declaration that :func:`option`,
    :func:`positive` or :func:`argument` returns. A request validates its values on creation.

    Attributes:
        HELP_PANEL: the title of the group in ``--help``.
    """

    HELP_PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ``UsageError`` for invalid values of options, and for options that conflict."""
        hints = get_type_hints(type(self))
        for name, spelling in spellings(type(self)).items():
            choices = choices_of(hints[name])
            if choices:
                check_choice(spelling, getattr(self, name), choices)


@dataclass(frozen=True, kw_only=True)
class DtypeOptions(Options):
    """Option of the dtype in which the models of a command compute."""

    dtype: Annotated[
        Dtype,
        option(
            "Data type in which models compute: by default (auto) bf16 on GPUs that have it, and "
            "fp32 elsewhere.",
        ),
    ] = "auto"

    def refuse_dtype(self, reason: str) -> None:
        """Raise ``UsageError`` if a dtype was requested.

        Args:
            reason: the predicate of the message, whose subject is the option.
        """
        refuse_options({"--dtype": self.dtype != "auto"}, reason)


@dataclass(frozen=True, kw_only=True)
class DocumentFieldOptions(Options):
    """Options that name the fields of the documents of ``--data``."""

    HELP_PANEL: ClassVar[str | None] = "Fields of --data"

    id_field: Annotated[
        str | None,
        option("Field of the documents that holds the id, if it has no usual name."),
    ] = None
    title_field: Annotated[str | None, option("Field of the documents that holds the title.")] = (
        None
    )
    text_field: Annotated[str | None, option("Field of the documents that holds the text.")] = None
    page_ranges: Annotated[
        str | None,
        option("Pages of each PDF and TIFF in a folder of them, such as 1-10,15.", "--pages"),
    ] = None

    def validate(self) -> None:
        """Raise ``UsageError`` for field names without ``--data``, or if it has no files."""
        super().validate()
        options = {
            "--id-field": self.id_field,
            "--title-field": self.title_field,
            "--text-field": self.text_field,
            "--pages": self.page_ranges,
        }
        data: str | None = getattr(self, "data")  # noqa: B009  # declared by each request
        if data is None:
            refuse_options(options, "requires --data")
        if data == "pydocs":
            refuse_options(options, "cannot be combined with --data pydocs, which has no files")
        with errors_name_options(page_ranges="--pages"):
            self.parsed_page_ranges()

    def document_fields(self) -> DocumentFields:
        """Return the field names that the options set."""
        return DocumentFields(self.id_field, self.title_field, self.text_field)

    def parsed_page_ranges(self) -> PageRanges | None:
        """Return the pages of ``--pages``; None for all."""
        return None if self.page_ranges is None else PageRanges.parse(self.page_ranges)


def as_command(function: Callable[[Any], None]) -> Callable[..., None]:
    """Wrap the function of a command, so that it has a parameter for each of the command's options.

    typer turns each parameter into an option. If the library raises an error about an argument with
    the name of a field, the error names the option: ``--top-k`` for the argument ``top_k``.

    Args:
        function: the function of a command, whose only argument ``request`` is annotated with a
            subclass of :class:`Options`.
    """
    request_type = get_type_hints(function)["request"]
    option_of_argument = spellings(request_type)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        request = request_type(**values)
        with errors_name_options(**option_of_argument), _use_document_fields(request):
            function(request)

    # typer reads the parameters from the signature.
    signature = inspect.Signature(_create_parameters(request_type))
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _use_document_fields(request: Options) -> AbstractContextManager[None]:
    """Return a context in which ``--data`` is read with the field names of the options, if any."""
    if isinstance(request, DocumentFieldOptions):
        return document_fields(request.document_fields(), request.parsed_page_ranges())
    return nullcontext()


def _create_parameters(request_type: type[Any]) -> list[inspect.Parameter]:
    """Return a keyword parameter for each option of a command, from which typer makes the option.

    Args:
        request_type: the dataclass with the options of a command.
    """
    hints = get_type_hints(request_type)  # types without `Annotated`
    defaults = {field.name: field.default for field in dataclasses.fields(request_type)}
    return [
        _create_parameter(name, hints[name], defaults[name], declaration)
        for name, declaration in declared_options(request_type).items()
    ]


def _create_parameter(
    name: str,
    value_type: Any,
    default: object,
    declaration: ParameterInfo,
) -> inspect.Parameter:
    """Return the keyword parameter from which typer makes an option.

    An option with a few allowed values (a ``Literal``) is declared as optional text. The request
    checks the value instead of typer, and its error lists the allowed values.

    Args:
        name: the name of the field.
        value_type: the type of its values.
        default: its default, or ``dataclasses.MISSING``.
        declaration: the declaration of the option.
    """
    choices = choices_of(value_type)
    if choices:
        value_type = str | None
        declaration.metavar = "|".join(choices)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[value_type, declaration],
    )


def read_text(path: Path, option: str, encoding: str = "utf-8") -> str:
    """Return the text of a file that an option names.

    Args:
        path: the file.
        option: the option, for the error message.
        encoding: the encoding of the text.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        return path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {path} cannot be read ({first_line(error)}).") from error


def check_choice(option: str, value: str | None, allowed: Iterable[str]) -> None:
    """Raise ``UsageError`` unless the value of an option is one of `allowed`, or None."""
    choices = tuple(allowed)
    if value is not None and value not in choices:
        raise UsageError(
            f"{option}: expected one of {', '.join(choices)}, got {value!r}."
            f"{suggestion(value, choices)}",
        )


@contextmanager
def errors_name_options(**spellings: str) -> Iterator[None]:
    """Replace names of arguments by names of options, in errors that are raised in this context.

    With ``depth="--prf-depth"``, the message ``depth: expected ...`` becomes ``--prf-depth:
    expected ...``. Errors about any other argument are raised unchanged.

    Args:
        spellings: argument -> the text that replaces it. A colon is added to an option such as
            ``"--bm25"``, and not to an option with its value, such as ``"--bm25: FOLDER"``.

    Raises:
        CommandError: if the error is about data.
        UsageError: if the error is about any other value.
    """
    try:
        yield
    except ArgumentError as error:
        if not all(argument in spellings for argument in error.arguments):
            raise
        subject = ", ".join(spellings[argument] for argument in error.arguments)
        if ":" not in subject:
            subject += ":"
        error_class = CommandError if isinstance(error, DataError) else UsageError
        raise error_class(f"{subject} {error.problem}") from error


def checked_bm25_language(language: str | None) -> str:
    """Return the language of ``--language``, or the default language of BM25.

    Args:
        language: the value of the option; None if it was not given.

    Raises:
        UsageError: if BM25 has no stemmer for the language.
    """
    from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer

    options = BM25Options() if language is None else BM25Options(language)
    with errors_name_options(language="--language"):
        Tokenizer(options)  # raises an error for an unknown language
    return options.language


def run_on_devices(devices: str | None) -> int | None:
    """Run this command again in one process per device, and wait until all have ended.

    Nothing is started for a single device, or in a process that this function has started.

    Args:
        devices: the value of ``--devices``: a number, or ``"all"`` for all GPUs of this machine.

    Returns:
        The exit code of the processes, or None if the caller should do the work itself.

    Raises:
        UsageError: if this machine has fewer devices.
        RanksInterruptedError: after Ctrl-C or SIGTERM, once the processes have ended.
    """
    was_started_here = RENDEZVOUS in os.environ  # by an earlier call of this function
    if devices is None or was_started_here:
        return None
    if is_rank():  # torchrun sets other variables of the environment
        raise UsageError("--devices: torchrun has started the ranks already; leave --devices out.")
    import torch

    n_gpus = torch.cuda.device_count()
    n_devices = 0
    if devices == "all":
        n_devices = max(1, n_gpus)
    elif devices.isdecimal():
        n_devices = int(devices)
    has_too_few_gpus = n_gpus > 0 and n_devices > n_gpus
    if n_devices < 1 or has_too_few_gpus:
        allowed = f"from 1 to {n_gpus}, the GPUs of this machine" if n_gpus else "1 or more"
        raise UsageError(
            f"--devices: expected 'all' or a whole number, {allowed}, got {devices!r}.",
        )
    if n_devices == 1:
        return None
    this_command = [sys.executable, "-m", "tilefold.cli", *command_line]
    exit_code = run_ranks(this_command, n_devices)
    if exit_code in (INTERRUPTED, TERMINATED):
        raise RanksInterruptedError(exit_code)
    return exit_code


def _show_version(show: bool) -> None:
    """Print the version and end the command, if ``--version`` was given."""
    if show:
        typer.echo(f"tilefold {__version__}")
        raise typer.Exit


class Command(TyperCommand):
    """A command that checks for repeated options, and prints its options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of a command as click does, and check them for repeated options."""
        _, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
        self._check_repetitions(parameters)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of a command, with its options in groups.

        Unlike typer's tables, it does not cut the names of options at a width of 80 columns.

        Args:
            ctx: click's context of the command.
            formatter: click's formatter, which writes the help.
        """
        self.format_usage(ctx, formatter)
        self._format_description(formatter)
        for group, records in self.option_groups(ctx).items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=OPTION_COLUMNS)

    def option_groups(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return the arguments and options of this command by the title of their group.

        The reference of commands on the site is generated from them, too.

        Args:
            ctx: click's context of the command.

        Returns:
            title of a group -> its options in the order of ``--help``. An option is its spelling
            with the type of its value, and its text with the default.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_option = parameter.opts[0].startswith("-")
            default_group = "Options" if is_option else "Arguments"
            group = getattr(parameter, "rich_help_panel", None) or default_group
            groups.setdefault(group, []).append(record)
        return groups

    def _format_description(self, formatter: Any) -> None:
        """Write the docstring of a command; all paragraphs but its example are wrapped."""
        with formatter.indentation():
            for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
                formatter.write_paragraph()
                if paragraph.startswith("Example:"):
                    for line in paragraph.splitlines():
                        formatter.write(f"  {line}\n")
                else:
                    formatter.write_text(" ".join(paragraph.split()))

    def _check_repetitions(self, parameters: Iterable[Any]) -> None:
        """Reject repeated input options, and print a note about other repeated options.

        Args:
            parameters: the parameters of a command line, in their order.

        Raises:
            UsageError: if an option of :data:`INPUTS` is repeated: its first value would be lost.
        """
        declared = {parameter.name for parameter in self.params}  # without click's own --help
        given_before: set[str] = set()
        for parameter in parameters:
            may_be_repeated = getattr(parameter, "multiple", False)
            if parameter.name not in declared or may_be_repeated:
                continue
            if parameter.name in given_before:
                spelling = "/".join((*parameter.opts, *parameter.secondary_opts))
                if parameter.name in INPUTS:
                    raise UsageError(f"{spelling} was given twice: leave one out.")
                note(f"{spelling} was given twice: the last one counts.")
            given_before.add(parameter.name)


def root(
    version: Annotated[
        bool,
        option("Show the version and exit.", "--version", callback=_show_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, option("Show the whole traceback of an error.", "--debug")] = False,
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
