"""``tilefold migrate``: move an index to another model while it is searched and updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilefold import retrieval
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, option, refuse_options
from tilefold.cli.encode import EncodingOptions
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.encoding.throttle import lower_priority
from tilefold.retrieval.index import DENSE, LATE
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.index.protocol import read_description
from tilefold.retrieval.index.segments import PartList

if TYPE_CHECKING:
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.encoding.sparse import Encoding
    from tilefold.retrieval.evaluation.significance import Difference
    from tilefold.retrieval.index.migration import Migration, MigrationRecord
    from tilefold.serve.document_log import DocumentLog

# The share of the machine that encoding takes by default.
DEFAULT_SHARE = 0.5
# Documents per query that --preview compares, and the measure of judged queries.
PREVIEW_DEPTH = 10
PREVIEW_MEASURE = "nDCG@10"
# Fewest judged queries for a significance test.
MIN_JUDGED_QUERIES = 2
# Queries with another first document that --preview names.
SHOWN_QUERIES = 5
# Options of encoding that are recorded, so that a resumed migration needs no options.
RECORDED_OPTIONS = (
    "kind",
    "dtype",
    "top_k",
    "special_tokens",
    "max_length",
    "storage",
    "pool_factor",
    "dimension",
    "batch_size",
    "batch_tokens",
    "fp8",
    "invariant",
    "id_field",
    "title_field",
    "text_field",
)


# Backend of an index -> kind of its vectors.
_KIND_OF_BACKEND: dict[str, Literal["sparse", "tokens", "dense"]] = {
    "exact": "sparse",
    "seismic": "sparse",
    DENSE: "dense",
    LATE: "tokens",
}


@dataclass(frozen=True, kw_only=True)
class MigrateRequest(EncodingOptions, DocumentFieldOptions):
    """Options of ``tilefold migrate``."""

    index: Annotated[
        Path,
        option(
            "Index that moves to another model: exact, seismic, dense or late.",
        ),
    ]
    model: Annotated[
        str | None,
        option(
            "New model: a folder, a name or minilm; required to start, recorded to resume.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The documents of --index, without those that were added over HTTP; required to start, "
            "recorded to resume. " + _common.DOCUMENTS_HELP,
        ),
    ] = None
    kind: Annotated[
        Literal["sparse", "tokens", "dense"] | None,
        option(
            "Kind of the new vectors; by default that of the model, and sparse for minilm.",
        ),
    ] = None
    share: Annotated[
        float,
        option(
            "Share of the machine that encoding may take, above 0 and up to 1: of the CPU cores, "
            "or of the time of the GPU. Below 1, the process also has the lowest priority.",
        ),
    ] = DEFAULT_SHARE
    old_model: Annotated[
        str | None,
        option(
            "Model that encoded --index: --preview searches with it, and a server loads it again "
            "after --rollback; recorded if it is given at the start.",
        ),
    ] = None
    preview: Annotated[
        Path | None,
        option(
            "Only compare the first 10 documents of both indexes for these queries (.tsv of id "
            "and text, .jsonl, .txt), and nDCG@10 of those that --data judges.",
            panel="Preview",
        ),
    ] = None
    split: Annotated[
        str,
        option(
            "Split of the judgements for --preview.",
            panel="Preview",
        ),
    ] = "test"
    cut_over: Annotated[
        bool,
        option(
            "Let the new index take over by one atomic rename, once it has all documents.",
            "--cut-over",
            panel="Cut-over",
        ),
    ] = False
    rollback: Annotated[
        bool,
        option(
            "Let the old index take over again, with documents that have arrived since; these are "
            "encoded with --old-model and the options of encoding.",
            "--rollback",
            panel="Cut-over",
        ),
    ] = False
    discard: Annotated[
        bool,
        option(
            "Remove the index that is not searched, and everything else of the migration.",
            "--discard",
            panel="Cut-over",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        super().validate()
        actions = {
            "--preview": self.preview,
            "--cut-over": self.cut_over,
            "--rollback": self.rollback,
            "--discard": self.discard,
        }
        chosen_actions = [name for name, value in actions.items() if _options.is_given(value)]
        if len(chosen_actions) > 1:
            raise UsageError(
                f"{chosen_actions[0]} cannot be combined with {chosen_actions[1]}.",
            )
        if not 0 < self.share <= 1:
            raise UsageError(
                f"--share: expected a number above 0 and up to 1, got {self.share:g}.",
            )
        if self.rollback or self.discard or self.preview is not None:
            refuse_options(
                {"--model": self.model},
                f"has no effect with {chosen_actions[0]}, which works on a started migration",
            )
        if self.discard:
            refuse_options(
                {"--data": self.data, "--old-model": self.old_model},
                "has no effect with --discard",
            )
        if self.preview is None:
            refuse_options({"--split": self.split != "test"}, "requires --preview")

    def recorded_options(self) -> dict[str, Any]:
        """Return the options that a resumed migration takes from its record, by field."""
        return {name: getattr(self, name) for name in RECORDED_OPTIONS}

    def resumed(self, record: MigrationRecord) -> MigrateRequest:
        """Return the request, with the options that the migration was started with.

        Args:
            record: the file in which the migration has saved these options.

        Raises:
            UsageError: if an option was given again with another value.
        """
        spellings = _options.spellings(type(self))
        defaults = {field.name: field.default for field in fields(self)}
        for name, recorded in record.options.items():
            value = getattr(self, name)
            if value not in (defaults[name], recorded):  # an option at its default was left out
                raise UsageError(
                    f"{spellings[name]}: expected {recorded}, with which the migration was "
                    f"started, got {value}. Leave it out, or discard the migration (--discard).",
                )
        return replace(
            self,
            **record.options,
            model=self.model or record.model,
            data=self.data or record.data,
            old_model=self.old_model or record.old_model,
        )


def migrate(request: MigrateRequest) -> None:
    """Move an index to another model while it is searched and updated.

    The documents of --data are encoded with --model, at a --share of the machine, into a new index
    next to the old one. Run the same command again to resume after an interruption. Meanwhile,
    index --update adds documents to both indexes. --preview compares both, --cut-over lets the new
    one take over, and --rollback returns to the old one. A server that follows the index loads the
    model with it.

    Example:
        tilefold migrate --index INDEX --model NEW_MODEL --data DATA
    """
    if request.share < 1:
        lower_priority()  # before libraries start threads, which inherit it
    with _clear_permission_errors(request.index):
        if request.discard:
            _discard(request)
        elif request.preview is not None:
            _preview(request, request.preview)
        elif request.rollback:
            _roll_back(request)
        else:
            _build_and_cut_over(request)


@contextmanager
def _clear_permission_errors(index: Path) -> Iterator[None]:
    """Explain errors of missing permissions, with the folder that must be writable.

    Args:
        index: the value of ``--index``.
    """
    try:
        yield
    except PermissionError as error:
        raise CommandError(
            f"--index: {index.resolve().parent} must be writable, because the new index is built "
            f"next to {index} ({_common.text_of(error)}). The index that is searched was not "
            "changed.",
        ) from error


class ModelEncoder:
    """A model that encodes the documents of a migration, loaded at its first use.

    Args:
        request: the options of the command.
        model_name: the folder or the name of the model.
        option_name: the option that names the model, for messages.
    """

    def __init__(self, request: MigrateRequest, model_name: str, option_name: str) -> None:
        self._request = request
        self._name = model_name
        self._option_name = option_name

    @cached_property
    def _loaded(self) -> tuple[Model, Encoding]:
        """The model, and how it encodes texts, such as the tokens per batch.

        At the first access, the model is loaded, and the dtype in which it computes is printed.
        """
        _models.checked_model_name(self._name, self._option_name)  # the error names this option
        model, model_kind = _models.load_kind(
            self._name,
            self._request.kind,
            self._request.dtype,
            fp8=self._request.fp8,
            invariant=self._request.invariant,
        )
        _models.print_precision(self._name, model)
        with _options.errors_name_options(storage="--storage"):
            encoding = self._request.encoding(self._name, model_kind)
        return model, encoding

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the model."""
        from tilefold.retrieval.common.provenance import model_fingerprint

        model, _ = self._loaded
        return model_fingerprint(model)

    def encode(self, texts: Mapping[str, str], folder: Path) -> Any:
        """Encode texts, at a share of the machine, and return their vectors.

        Args:
            texts: document id -> text.
            folder: the folder for the vectors. What it already has is not encoded again.
        """
        from tilefold.retrieval.encoding.sparse import Output, encode_to_folder
        from tilefold.retrieval.encoding.throttle import Throttle

        model, encoding = self._loaded
        throttle = Throttle(self._request.share, on_gpu=model.device.type == "cuda")
        option_errors = _options.errors_name_options(
            max_length="--max-length", dimension="--dimension"
        )
        with _common.resumable_progress_bar("encoding") as show, option_errors:

            def report_and_pause(n_done: int, n_texts: int) -> None:
                """Show the progress, then leave the machine to other processes for a while."""
                show(n_done, n_texts)
                throttle.pause()

            output = Output(folder, progress=report_and_pause)
            manifest = encode_to_folder(encoding, model, texts, output)
        for name, reason in manifest.failed.items():
            note(f"not encoded: {name}: {reason}")
        if manifest.layout == "sparse":
            return retrieval.read_vectors(folder)
        if manifest.layout == "dense":
            return retrieval.open_dense(folder)
        return retrieval.open_tokens(folder)


def _build_and_cut_over(request: MigrateRequest) -> None:
    """Build an index with the new model, and with ``--cut-over`` let it replace the old index.

    Documents that were added to the old index meanwhile are added to the new one. A migration that
    was started already is resumed.

    Args:
        request: the options of the command.
    """
    from tilefold.retrieval.index.migration import (
        Migration,
        MigrationRecord,
        check_is_migratable,
    )

    record = MigrationRecord.read(request.index)
    migration = None
    if record is not None:
        migration = Migration(request.index, record)
        request = request.resumed(record)
    if request.model is None or request.data is None:
        missing = "--model" if request.model is None else "--data"
        raise UsageError(
            f"{missing}: required to start a migration, because an index stores neither the name "
            "of its model nor the texts of its documents.",
        )
    encoder = ModelEncoder(request, request.model, "--model")
    if record is None:
        check_is_migratable(request.index)  # raises an error before the model is loaded
        _ = encoder.fingerprint  # raises an error before anything is written
    elif _recorded_name(request.model) != record.model:
        _check_recorded_model(request, encoder, record)
    if migration is not None and migration.is_cut_over:
        _print_state(request, migration)
        return
    if migration is None:
        migration = _build(request, request.data, encoder)
    elif not migration.is_built:
        note(f"resuming the migration of {request.index} to {migration.record.model}")
        migration = _build(request, request.data, encoder)
    migration.catch_up(encoder)
    if request.cut_over:
        _models.checked_model_name(request.model, "--model")  # a server loads it next
        migration.exchange(encoder)
    _print_state(request, migration)


def _check_recorded_model(
    request: MigrateRequest,
    encoder: ModelEncoder,
    record: MigrationRecord,
) -> None:
    """Raise ``UsageError`` if ``--model`` is not the model with which the migration was started.

    Args:
        request: the options of the command.
        encoder: the model of ``--model``.
        record: the record of the migration.
    """
    if encoder.fingerprint != record.model_fingerprint:
        raise UsageError(
            f"--model: the migration of {request.index} was started with {record.model}, got "
            f"{request.model}. Leave it out, or discard the migration (--discard).",
        )


def _build(request: MigrateRequest, data: str, encoder: ModelEncoder) -> Migration:
    """Start or resume the migration, and build the new index.

    Its documents are those of ``--data``, and those that were added to the old index over HTTP.

    Args:
        request: the options of the command.
        data: the value of ``--data``.
        encoder: the new model.
    """
    from tilefold.retrieval.index.migration import Migration, MigrationRecord
    from tilefold.serve.document_log import DocumentLog

    with _common.document_fields(_recorded_document_fields(request.recorded_options())):
        collection = _common.load_data(
            data,
            documents_only=True,
            stored=_scores.STREAMED_FILE_BYTES,
        )
    log = DocumentLog(request.index.resolve())
    record = MigrationRecord.read(request.index)
    if record is None:
        migration = _start(request, collection, log, encoder)
    else:
        migration = Migration(request.index, record)
    # After an interruption, the user is told that the same command resumes.
    _common.finished_work_checks.append(lambda: True)
    generation = read_generation(request.index).id  # the committed state of the index
    migration.build(log.documents(collection.documents, generation), encoder)
    return migration


def _recorded_document_fields(options: Mapping[str, Any]) -> DocumentFields:
    """Return the names of the id, title and text fields that a migration has recorded."""
    return DocumentFields(options["id_field"], options["title_field"], options["text_field"])


def _start(
    request: MigrateRequest,
    collection: Collection,
    log: DocumentLog,
    encoder: ModelEncoder,
) -> Migration:
    """Start the migration of ``--index``.

    Args:
        request: the options of the command.
        collection: the documents of ``--data``.
        log: the log of documents that were added to the index, or deleted from it, over HTTP.
        encoder: the new model.

    Raises:
        CommandError: if the index was made from other texts.
        DataError: if the index has other documents than the collection.
    """
    from tilefold.retrieval.index.migration import Migration, check_same_documents

    data = str(request.data)
    if Path(data).exists():
        data = str(Path(data).resolve())
    provenance = Provenance.from_dict(read_description(request.index))
    # After updates, and also after their merge, an index has other documents than at its build.
    is_as_built = (
        provenance.texts_sha256 is not None and not PartList.read(request.index).is_updated
    )
    if is_as_built:
        check_same_documents(request.index, collection.documents, data)
        if _scores.provenance_of_documents(collection).differing_fields(provenance):
            raise CommandError(
                f"--data: {data} has the ids of {request.index}, but other texts or another order. "
                "Give the texts that the index was made from, or add the changed documents to the "
                "index first (tilefold index --update).",
            )
    old_model = request.old_model
    # The index does not have these documents yet, which the server has accepted.
    pending_ids = {change.document_id for change in log.pending(log.n_pending).values()}
    generation = read_generation(request.index).id  # the committed state of the index
    migration = Migration.start(
        request.index,
        log.documents(collection.documents, generation),
        encoder,
        model=_recorded_name(str(request.model)),
        data=data,
        old_model=None if old_model is None else _recorded_name(old_model),
        options=request.recorded_options(),
        absent=pending_ids | log.failed.keys(),
    )
    if old_model is None:
        note(
            "--old-model was not given: pass it to --preview, which requires it, and to --rollback "
            "if documents are added after the cut-over",
        )
    return migration


def _recorded_name(model: str) -> str:
    """Return the name of a model, or the absolute path of its folder, for the migration's record.

    The name of the packaged model stays, also if there is a folder of this name.
    """
    return model if model == _models.PACKAGED else _models.absolute(model)


def _print_state(
    request: MigrateRequest,
    migration: Migration,
    *,
    is_rolled_back: bool = False,
) -> None:
    """Print which of the two indexes is searched, where the other one is, and the next commands.

    Args:
        request: the options of the command.
        migration: the migration.
        is_rolled_back: whether the old index has just taken over again.
    """
    n_documents = migration.n_documents()
    standby = request.index.with_name(migration.folder.name) / migration.standby.name
    result = {
        "index": str(request.index),
        "model": migration.record.model,
        "documents": n_documents,
        "cut_over": migration.is_cut_over,
        "standby": str(standby),
    }
    state, actions = _describe_state(
        request,
        migration,
        n_documents,
        standby,
        is_rolled_back=is_rolled_back,
    )
    next_command = f"next: tilefold migrate --index {request.index} {actions}"
    _common.print_result(result, request.as_json, state, next_command)


def _describe_state(
    request: MigrateRequest,
    migration: Migration,
    n_documents: int,
    standby: Path,
    *,
    is_rolled_back: bool,
) -> tuple[str, str]:
    """Describe which index is searched, and what can be done next.

    Args:
        request: the options of the command.
        migration: the migration.
        n_documents: number of documents or passages of the index that is searched.
        standby: the folder of the index that is not searched.
        is_rolled_back: whether the old index has just taken over again.

    Returns:
        The state, and the options of the next commands.
    """
    index = request.index
    record = migration.record
    is_cut_over = migration.is_cut_over
    size = f"{n_documents:,} {migration.unit}"
    old_model = record.old_model or request.old_model
    old_folder, new_folder = migration.index, migration.standby
    if is_cut_over:
        old_folder, new_folder = new_folder, old_folder
    old_name = _kind_and_model(old_folder, old_model)
    new_name = _kind_and_model(new_folder, record.model)
    if is_cut_over:
        state = (
            f"{index} is the new index {new_name}, with {size}; the old one "
            f"{old_name} is in {standby}"
        )
        return state, "--rollback, or --discard to remove the old index"
    if is_rolled_back:
        state = (
            f"{index} is the old index again {old_name}, with {size}; the new "
            f"one {new_name} is in {standby}"
        )
        return state, "--cut-over, or --discard to remove the new index"
    state = (
        f"the new index {new_name} has all {size}: {standby}; "
        f"{index} is still the old one {old_name}"
    )
    old_model_option = " --old-model OLD_MODEL" if record.old_model is None else ""
    return state, f"--preview QUERIES{old_model_option}, or --cut-over"


def _kind_and_model(index: Path, model: str | None) -> str:
    """Return the kind and the model of an index in parentheses, such as ``"(sparse, minilm)"``.

    Args:
        index: the folder of the index.
        model: the folder or the name of its model; None if it is not known.
    """
    kind = _KIND_OF_BACKEND[read_description(index)["backend"]]
    return f"({kind})" if model is None else f"({kind}, {model})"


def _roll_back(request: MigrateRequest) -> None:
    """Let the old index take over again.

    Args:
        request: the options of the command.

    Raises:
        CommandError: if there is no migration, or if the new index has not taken over.
    """
    from tilefold.retrieval.index.migration import Migration, MigrationRecord

    record = MigrationRecord.read(request.index)
    if record is None:
        raise CommandError(
            f"--rollback: there is no old index to return to, because {request.index} has no "
            "migration; --discard removes the old index. Restore a backup, or start a migration "
            f"to the old model: tilefold migrate --index {request.index} --model OLD_MODEL "
            "--data DATA",
        )
    migration = Migration(request.index, record)
    if not migration.is_cut_over:
        raise CommandError(
            f"--rollback: {request.index} is the old index, because the new one has not taken "
            "over; --discard removes the new one.",
        )
    old_model = request.old_model or migration.record.old_model
    encoder = None  # encodes documents that were added since the new index took over, if any
    if old_model is not None:
        kind = _KIND_OF_BACKEND[read_description(migration.standby)["backend"]]
        encoder = ModelEncoder(replace(request, kind=kind), old_model, "--old-model")
    migration.exchange(encoder)
    _print_state(request, migration, is_rolled_back=True)


def _discard(request: MigrateRequest) -> None:
    """Remove the migration with the index that is not searched."""
    from tilefold.retrieval.index.migration import Migration

    migration = Migration.open(request.index)
    which = "old" if migration.is_cut_over else "new"
    migration.discard()
    _common.print_result(
        {"index": str(request.index), "discarded": which},
        request.as_json,
        f"the {which} index was removed; {request.index} was not changed",
    )


@dataclass(frozen=True)
class Preview:
    """How the results of queries change with the new index.

    Attributes:
        queries: number of queries.
        depth: number of compared documents per query.
        mean_changed: mean number of documents in the new top `depth` that are not in the old one.
        same_set: number of queries with the same documents, in any order.
        other_first: number of queries with another first document.
        other_first_queries: ids of these queries.
        changed: query id -> number of documents in the new top `depth` that are not in the old one.
    """

    queries: int
    depth: int
    mean_changed: float
    same_set: int
    other_first: int
    other_first_queries: list[str]
    changed: dict[str, int]

    @classmethod
    def of(cls, old_run: Run, new_run: Run, queries: Mapping[str, str], depth: int) -> Preview:
        """Compare two runs of the same queries.

        Args:
            old_run: the run of the old index, query id -> document id -> score, best first.
            new_run: the run of the new index.
            queries: query id -> text.
            depth: number of documents per query.
        """
        changed = {}
        other_first_queries = []
        for query in queries:
            old_ids = list(old_run.get(query, {}))[:depth]
            new_ids = list(new_run.get(query, {}))[:depth]
            changed[query] = len(set(new_ids).difference(old_ids))
            if old_ids[:1] != new_ids[:1]:
                other_first_queries.append(query)
        return cls(
            queries=len(queries),
            depth=depth,
            mean_changed=sum(changed.values()) / len(changed),
            same_set=sum(count == 0 for count in changed.values()),
            other_first=len(other_first_queries),
            other_first_queries=other_first_queries,
            changed=changed,
        )


def _preview(request: MigrateRequest, queries_file: Path) -> None:
    """Compare the results of the old and the new index for some queries.

    Args:
        request: the options of the command.
        queries_file: the value of ``--preview``.

    Raises:
        CommandError: if the new index is not built.
        UsageError: if the old model is not known, or there are no queries.
    """
    from tilefold.retrieval.index.migration import Migration

    migration = Migration.open(request.index)
    record = migration.record
    if not migration.is_built:
        raise CommandError(
            f"--preview: expected a complete new index, got one that is not built yet; run "
            f"tilefold migrate --index {request.index} first.",
        )
    old_model = request.old_model or record.old_model
    if old_model is None:
        raise UsageError(
            "--old-model: required for --preview, because an index does not store the name of its "
            "model.",
        )
    try:
        queries = retrieval.load_queries(queries_file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--preview: {_common.first_line(error)}") from error
    if not queries:
        raise UsageError(f"--preview: expected queries in {queries_file}, got none.")
    old_index, new_index = request.index, migration.standby
    if migration.is_cut_over:
        old_index, new_index = new_index, old_index
    old_run = _search(request, old_index, old_model, queries)
    new_run = _search(request, new_index, record.model, queries)
    preview = Preview.of(old_run, new_run, queries, PREVIEW_DEPTH)
    with _common.document_fields(_recorded_document_fields(record.options)):
        difference = _compare_on_judged_queries(
            request,
            record.data,
            queries,
            old_run,
            new_run,
        )
    result = {
        **asdict(preview),
        "judged": None if difference is None else difference.to_dict(),
    }
    _common.print_result(result, request.as_json, *_describe_preview(preview, difference))


def _search(
    request: MigrateRequest,
    index: Path,
    model: str,
    queries: Mapping[str, str],
) -> Run:
    """Search an index with its model, and return the first documents of each query.

    Args:
        request: the options of the command.
        index: the folder of the index.
        model: the folder or the name of the model.
        queries: query id -> text.
    """
    from tilefold.retrieval.search.searcher import SearchRequest

    searcher = _retrievers.open_searcher(
        _retrievers.IndexOptions(index=index, model=model, dtype=request.dtype),
        lambda _provenance_of_index: _retrievers.SearcherParts(),  # no reranker and no feedback
    )
    rankings = _retrievers.iterate_rankings(searcher, queries, SearchRequest(k=PREVIEW_DEPTH))
    return {ranking.query: ranking.scores for ranking in rankings}


def _compare_on_judged_queries(
    request: MigrateRequest,
    data: str,
    queries: Mapping[str, str],
    old_run: Run,
    new_run: Run,
) -> Difference | None:
    """Compare nDCG@10 of the old and the new index, on queries with relevance judgements.

    A query is judged if the collection has a query with its id and its text, and judgements of it.

    Args:
        request: the options of the command, with the split of the judgements.
        data: the collection of the migration.
        queries: query id -> text.
        old_run: the run of the old index.
        new_run: the run of the new index.

    Returns:
        The difference of the new run to the old one; None if fewer than two queries are judged.
    """
    if data != "pydocs" and not Path(data).is_dir():
        return None  # documents alone have no judgements
    collection = _common.load_data(data, drop_unknown=True, stored=_scores.STREAMED_FILE_BYTES)
    judged = collection.qrels.get(request.split, {})
    qrels = {
        query: judged[query]
        for query, text in queries.items()
        if query in judged and collection.queries.get(query) == text
    }
    if len(qrels) < MIN_JUDGED_QUERIES:
        return None
    measures = _scores.requested_measures([PREVIEW_MEASURE])
    judged_collection = replace(collection, qrels={request.split: qrels})
    ignores_identical_ids = _scores.ignores_identical_ids(None, judged_collection, [request.split])
    tables = {}
    for name, run in (("old", old_run), ("new", new_run)):
        scores = _scores.score(
            _scores.NamedRun(name, run, Provenance()),
            judged_collection,
            [request.split],
            measures,
            ignore_identical_ids=ignores_identical_ids,
        )
        tables[name] = scores.tables[request.split]
    differences: list[Difference] = retrieval.compare(tables, measures.names)
    return differences[0]


def _describe_preview(preview: Preview, difference: Difference | None) -> list[str]:
    """Describe a preview for the terminal, as lines.

    Args:
        preview: how the results change.
        difference: the difference on judged queries; None if too few are judged.
    """
    lines = [
        f"{preview.queries} queries: {preview.mean_changed:.1f} of the top {preview.depth} "
        f"documents change on average; {preview.same_set} queries keep all of them, and "
        f"{preview.other_first} have another first document",
    ]
    if preview.other_first:
        dots = ", ..." if preview.other_first > SHOWN_QUERIES else ""
        shown_ids = ", ".join(preview.other_first_queries[:SHOWN_QUERIES])
        lines.append(f"another first document: {shown_ids}{dots}")
    if difference is None:
        lines.append(f"{PREVIEW_MEASURE}: no judgements of these queries in --data")
    else:
        mark = "significant" if difference.different else "not significant"
        lines.append(
            f"{difference.measure} on {len(difference.by_query)} judged queries: "
            f"{_scores.cell(difference.difference, '+')} ({difference.wins} wins, "
            f"{difference.losses} losses, p {difference.p_randomisation:.4f}, {mark})",
        )
    return lines
