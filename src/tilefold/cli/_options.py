"""Options: their declaration, the table of those that go together, and errors that name them; those
of the program.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand

from tilefold._version import __version__
from tilefold.cli._common import CommandError, UsageError, document_fields, first_line, note
from tilefold.distributed.ranks import RENDEZVOUS, is_rank, run_ranks
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.errors import DataError

# types of options that may be left out
Text: TypeAlias = str | None
Count: TypeAlias = int | None
Number: TypeAlias = float | None
Place: TypeAlias = Path | None
Words: TypeAlias = list[str] | None
FIELDS_PANEL = "Fields of --data"  # of --help
_FIELD_OPTIONS = ("id_field", "title_field", "text_field")
# options of what a command works on: of two, one would be left out
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
# A row has the options that are refused (parameters of the command), where they are, and what is
# said behind them. Where: NAME is given, !NAME is not, NAME=VALUE or NAME!=VALUE; of several all
# must hold, and of a|b one.
_Rules = tuple[tuple[str, str, str], ...]
_INDEX = "query_top_k query_cut heap_factor candidates other_model device"
_MIX = "prf_place prf_weight prf_normalization"
_ROCCHIO = "prf_alpha prf_beta prf_gamma prf_bottom"
_RERANK: _Rules = (
    (
        "rerank_model rerank_depth rerank_tail rerank_weight",
        "!rerank",
        "goes together with --rerank",
    ),
    (
        "rerank_tail",
        "rerank_weight",
        "goes without --rerank-weight, under which every candidate keeps its share",
    ),
)
_PRF: _Rules = (
    (
        f"prf_depth prf_terms {_ROCCHIO} prf_equal_lengths prf_with {_MIX}",
        "!prf",
        "goes together with --prf",
    ),
    (_ROCCHIO, "prf=average", "goes with --prf rocchio"),
    (_MIX, "!prf_with", "goes together with --prf-with"),
)
_TRAINING = (
    "epochs negatives batch_size fill_batches mini_batch_size learning_rate regularizer group_by_length train_max_length "
    "anneal_alpha bf16 fused graphs save_steps save_minutes devices hours report_to evaluate_steps"
)
OF_BACKEND = {
    "bm25": "language k1 b identifiers",
    "seismic": "n_postings centroid_fraction min_cluster_size summary_energy doc_cut query_cut heap_factor num_threads",
    "qdrant": "url collection weights",
    "late": "storage pool_factor queries",
}
_BUILDS = " ".join((*OF_BACKEND.values(), "passages stride cut overwrite"))
_USELESS = "does nothing {}: leave it out"
_CUTS: _Rules = (("stride cut", "!passages", "goes together with --passages"),)

RULES: dict[str, _Rules] = {
    "encode": (
        *_CUTS,
        ("passages", "queries", "cuts documents, and --queries encodes queries"),
        ("split", "!queries", "chooses queries: give it together with --queries"),
        (
            "jsonl address worker_cpus save_minutes resume",
            "dry_run",
            _USELESS.format("with --dry-run, which writes nothing and measures here"),
        ),
        (
            "save_minutes",
            "engine=ray",
            _USELESS.format("where several processes share the work, which keep whole shards"),
        ),
        (
            "jsonl",
            "engine=ray",
            "is written from all vectors in memory: leave it out with --engine ray",
        ),
        (
            "overwrite",
            "!jsonl",
            "goes with --jsonl, which it replaces; to encode again there is --fresh",
        ),
        ("address worker_cpus", "engine=local", "is for --engine ray"),
        ("workers", "engine=local !dry_run", "is for --engine ray and --dry-run"),
        (
            "devices",
            "engine=ray|dry_run",
            "is for encoding in processes of this machine: with Ray give --workers",
        ),
    ),
    "search": (
        ("queries", "query", "goes without a query"),
        ("model data vectors", "!index", "goes with --index"),
        ("overwrite", "!save_run", "goes with --save-run"),
        ("demo", "index", _USELESS.format("with --index")),
        *_RERANK[:1],
        *_PRF,
    ),
    "evaluate": (
        (f"{_INDEX} where", "!index", "goes with --index"),
        ("max_length", "index|run", "goes with a dense --model, without --index"),
        ("k", "run", "goes with --index or a dense --model; for --rerank there is --rerank-depth"),
        ("vectors", "!prf", "goes together with --prf"),
        ("overwrite", "!save_run !per_query", "goes with --save-run and --per-query"),
        ("prf", "run", "goes with --index or a dense --model: a run has no vectors"),
        *_RERANK,
        *_PRF,
    ),
    "fuse": (
        ("weight tune normalization", "method=rrf", "goes with --method interpolation"),
        ("rrf_k", "method=interpolation", "goes with --method rrf"),
        ("tune", "weight", "chooses the weights, and goes without --weight"),
        ("in_sample", "!tune", "goes with --tune"),
        ("split drop_unknown measure tune", "!data", "goes with --data"),
        ("overwrite", "!save_run", "goes with --save-run"),
    ),
    "mine": (
        (_INDEX, "!index !vectors", "goes with --index or --vectors"),
        ("max_length", "run|index|vectors", "goes with a dense --model alone"),
    ),
    "compare": (("overwrite", "!plot", "goes with --plot"),),
    "score": (("scale", "like", "goes without --like, which sets mean and deviation"),),
    "serve": (
        (f"data vectors bm25 name {_INDEX}", "!index", "goes with --index"),
        (
            "default_side max_batch_tokens auto_truncate max_length",
            "index !model !tokens",
            _USELESS.format("for an index of words alone, without a model"),
        ),
        ("tokens_model", "!tokens", "goes with --tokens"),
    ),
    "train": (
        (_TRAINING, "steps=0", _USELESS.format("with --steps 0, which trains nothing")),
        (
            "evaluate_split evaluate_documents patience",
            "!evaluate_steps",
            "goes together with --evaluate-steps",
        ),
        ("epochs", "steps", _USELESS.format("with --steps, which says how many")),
        *_CUTS,
        ("negatives", "passages", "names whole documents, and goes without --passages"),
    ),
    "bench": (
        (
            "shape impl device dtype output quick seconds minutes",
            "listing",
            _USELESS.format("with --list, which runs nothing"),
        ),
    ),
    "export": (
        ("field_type dots", "to!=opensearch", "goes with --to opensearch"),
        ("document namespace", "to!=vespa", "goes with --to vespa"),
        ("quantize top_k", "to!=onnx", "goes with --to onnx"),
        ("overwrite", "to=onnx", "goes with --to opensearch and vespa; a graph needs a new folder"),
        (
            "vectors names data",
            "to=onnx",
            "goes with --to opensearch and vespa; onnx reads --model",
        ),
    ),
    "index": (
        (_BUILDS, "update|delete|merge", "is for a new index; {output} says how this one was made"),
        *(
            (options, f"backend!={name}", f"goes with --backend {name}")
            for name, options in OF_BACKEND.items()
        ),
        ("collection", "!url", "goes with --url, the address of a server"),
        (
            "data vectors tokens",
            "delete|merge !update",
            "goes with --update, to put them into the index",
        ),
        (
            "passages",
            "backend!=bm25",
            "goes with --backend bm25; vectors are cut by tilefold encode --passages",
        ),
        *_CUTS,
        (
            "vectors",
            "backend=bm25",
            "goes with the backends exact, seismic and qdrant; bm25 reads --data",
        ),
        (
            "vectors",
            "backend=late",
            "goes with the backends exact, seismic and qdrant; late reads --tokens",
        ),
        (
            "tokens",
            "backend!=late !update",
            "goes with --backend late; {backend} reads --vectors or --data",
        ),
    ),
}


def option(help: str, *flags: str, default: object = None, **settings: Any) -> Any:
    """An option of a command, under its parameter's name unless `flags` are given, with those of
    ``typer.Option``.

    A `metavar` such as ``"keep|drop"`` is shown by ``--help``, and has the only words that the
    option takes.
    """
    return typer.Option(default, *flags, help=help, **settings)


def preset(default: object, help: str, *flags: str, **settings: Any) -> Any:
    """An option with a default."""
    return option(help, *flags, default=default, **settings)


def _at_least_one(parameter: typer.CallbackParam, value: Any) -> Any:
    for each in value if isinstance(value, list) else [value]:
        if each is not None and each < 1:
            raise UsageError(f"{parameter.opts[0]}: expected at least 1, got {each}.")
    return value


required = functools.partial(option, default=...)
flag = functools.partial(option, default=False)
positive = functools.partial(option, callback=_at_least_one)


def argument(help: str, default: object = None) -> Any:
    """An argument of a command without an option's name."""
    return typer.Argument(default, help=help)


def with_options(
    *groups: Callable[..., None],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of functions that declare them; its last parameter, ``**more``,
    takes their values.
    """

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for function in (command, *groups):
            hints = get_type_hints(function)
            own = inspect.signature(function).parameters.values()
            parameters += [
                each.replace(annotation=hints[each.name])
                for each in own
                if each.kind != each.VAR_KEYWORD
            ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return extended


def _document_fields(
    id_field: Text = option(
        "Field of documents that is the id, where it has no usual name.",
        rich_help_panel=FIELDS_PANEL,
    ),
    title_field: Text = option(
        "Field of documents that is the title.",
        rich_help_panel=FIELDS_PANEL,
    ),
    text_field: Text = option(
        "Field of documents that is the text.",
        rich_help_panel=FIELDS_PANEL,
    ),
) -> None:
    """Declare the options that name the fields of documents."""


def with_document_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with --data the options that name the fields of its documents.

    Every collection that the command loads is read by these names. A command without --data is
    returned as it is.
    """
    parameters = dict(inspect.signature(command).parameters)
    if "data" not in parameters:
        return command

    @functools.wraps(command)
    def run(
        *,
        id_field: str | None,
        title_field: str | None,
        text_field: str | None,
        **values: Any,
    ) -> None:
        fields = DocumentFields(id_field, title_field, text_field)
        if fields.names and values["data"] is None:
            refuse(_FIELD_OPTIONS, "goes together with --data")
        if fields.names and values["data"] == "pydocs":
            refuse(_FIELD_OPTIONS, "goes without --data pydocs, which has no files")
        with document_fields(fields):
            command(**values)

    hints = get_type_hints(command)
    typed = [
        parameter.replace(annotation=hints.get(name, parameter.annotation))
        for name, parameter in parameters.items()
    ]
    field_hints = get_type_hints(_document_fields)
    named = [
        parameter.replace(annotation=field_hints[name])
        for name, parameter in inspect.signature(_document_fields).parameters.items()
    ]
    run.__signature__ = inspect.Signature([*typed, *named])  # type: ignore[attr-defined]
    return run


def read_text(path: Path, option: str, encoding: str = "utf-8") -> str:
    """The text of a file that an option names."""
    try:
        return path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {path} cannot be read ({first_line(error)}).") from error


arguments: list[str] = []  # of the command that runs
# Parameter -> option of the command that runs, also by value: "resume=False" -> "--fresh".
options: dict[str, str] = {}
given: dict[str, str] = {}  # those of them that are on the command line


def refuse(names: Iterable[str], why: str) -> None:
    """Raise an error for parameters whose options were given where they do nothing."""
    for name in names:
        if name in given:
            raise UsageError(f"{given[name]} {why}.")


def refuse_useless(names: Iterable[str], where: str) -> None:
    """Raise an error for parameters whose options were given and do nothing, such as ``"with
    --steps 0"``.
    """
    refuse(names, _USELESS.format(where))


def in_options(message: str) -> str:
    """`message` with options of this command for arguments of Python: at its start, spelled with an
    underscore, or with a truth value such as ``overwrite=True``.
    """
    values = {
        argument.rpartition("=")[2] for argument in arguments
    }  # files may be called like options

    def option(match: re.Match[str]) -> str:
        return match[0] if match[0] in values else options.get(match[0], match[0])

    message = message.replace(" or None, got ", ", or left out, got ")
    message = re.sub(r"(?<![\w/.-])[a-z]\w*=(?:True|False)\b", option, message)
    message = re.sub(r"^\w+(?=:| must)", option, message)
    return re.sub(r"(?<![\w/.-])[a-z]+_\w+(?![\w/-])", option, message)


def check_choice(option: str, value: str | None, allowed: Iterable[str]) -> None:
    """Raise an error for a value that is not one of those `allowed`."""
    if value is not None and value not in (allowed := tuple(allowed)):
        raise UsageError(f"{option}: expected one of {', '.join(allowed)}, got {value!r}.")


@contextmanager
def as_options(*same: str, **names: str) -> Iterator[None]:
    """Errors of library functions with options for their arguments, ``--prf-depth: ...`` for
    ``depth: ...``.

    `same` are arguments that are called like a parameter of the command. What files hold is a
    failure, a value that cannot be is an error of usage. A name with a colon, such as ``--bm25:
    FOLDER``, is the beginning of the sentence.
    """
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(":")
        known = {name: options[name] for name in same} | names
        if not all(name in known for name in argument.split(", ")):
            raise
        option = ", ".join(known[name] for name in argument.split(", "))
        kind = CommandError if isinstance(error, DataError) else UsageError
        raise kind(in_options(f"{option}{'' if ':' in option else ':'}{rest}")) from error


def on_devices(devices: str | None) -> int | None:
    """Run the command on so many devices; its exit code, or None where this process is to run it."""
    if devices is None or RENDEZVOUS in os.environ:
        return None
    if is_rank():
        raise UsageError("--devices: torchrun has started the ranks already; leave --devices out.")
    import torch

    gpus = torch.cuda.device_count()
    count = max(1, gpus) if devices == "all" else int(devices) if devices.isdecimal() else 0
    if count < 1 or (gpus and count > gpus):
        most = f"from 1 to {gpus}, the GPUs of this machine" if gpus else "1 or more"
        raise UsageError(f"--devices: expected 'all' or a whole number, {most}, got {devices!r}.")
    return (
        None if count == 1 else run_ranks([sys.executable, "-m", "tilefold.cli", *arguments], count)
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilefold {__version__}")
        raise typer.Exit


def _holds(condition: str, values: Mapping[str, object]) -> bool:
    name, equals, value = condition.lstrip("!").partition("=")
    if equals:
        return (str(values[name.removesuffix("!")]) == value) is not name.endswith("!")
    return (
        values[name] not in (None, ()) and values[name] is not False
    ) is not condition.startswith("!")


class Command(TyperCommand):
    """A command that says so where an option is given twice, but for lists, and refuses two inputs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left, as click returns them."""
        given.clear()
        options.clear()
        _, _, found = self.make_parser(ctx).parse_args(args=list(args))
        spelled = {each.name: "/".join((*each.opts, *each.secondary_opts)) for each in self.params}
        for parameter in self.params:
            if parameter.opts[0].startswith("--"):
                options[str(parameter.name)] = parameter.opts[0]
                options[f"{parameter.name}=True"] = parameter.opts[0]
            if parameter.secondary_opts:
                options[f"{parameter.name}=False"] = parameter.secondary_opts[0]
        for parameter in (each for each in found if each.name in spelled):  # --help is click's own
            option = spelled[parameter.name]
            if parameter.name in given and not getattr(parameter, "multiple", False):
                if parameter.name in INPUTS:
                    raise UsageError(f"{option}: expected once, got it twice: leave one out.")
                note(f"{option} was given twice: the last one counts.")
            given[parameter.name] = option
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless the table refuses its options, or one is none of the words of its
        metavar.
        """
        for each in (each for each in self.params if "|" in (each.metavar or "")):
            check_choice(
                options[str(each.name)],
                ctx.params[each.name],
                map(str.strip, str(each.metavar).split("|")),
            )
        for names, where, why in RULES.get(ctx.info_name or "", ()):
            if all(
                any(_holds(each, ctx.params) for each in part.split("|")) for part in where.split()
            ):
                refuse(names.split(), why.format_map(ctx.params))
        return super().invoke(ctx)


def root(
    version: bool = flag(
        "Show the version and exit.",
        "--version",
        callback=_show_version,
        is_eager=True,
    ),
    debug: bool = flag("Show the whole traceback of an error.", "--debug"),
) -> None:
    """Train, encode, index, search and evaluate neural retrievers. Start with: tilefold demo"""
