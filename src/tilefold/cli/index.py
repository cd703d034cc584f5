"""``tilefold index`` builds and changes indexes, and ``tilefold merge`` merges encoded texts."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from tilefold import retrieval
from tilefold._internal.files import lock_path
from tilefold.cli import _common, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, Options, argument, option, refuse_options
from tilefold.retrieval.common.files import read_json_object
from tilefold.retrieval.common.provenance import ids_to_delete, unknown_ids
from tilefold.retrieval.data.passages import Passages, document_of
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import DENSE
from tilefold.retrieval.index.changes import ChangeLog
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import MANIFEST_NAME, read_description
from tilefold.retrieval.index.publishing import publishing
from tilefold.retrieval.vectors.shards import MANIFEST_NAME as VECTORS_MANIFEST
from tilefold.retrieval.vectors.shards import REMEDY as VECTORS_REMEDY

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.index.bm25 import BM25Options
    from tilefold.retrieval.index.checking import IndexCheck
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.index.merging import IndexUpdate
    from tilefold.retrieval.index.qdrant import Documents, QdrantCollection
    from tilefold.retrieval.vectors.sparse import SparseVectors
    from tilefold.retrieval.vectors.tokens import TokenVectors

# Up to this number of documents, an exact index is as fast as a Seismic one, smaller, and built in
# seconds. It was measured with 120 terms per document on two cores.
SEISMIC_DOCUMENTS = 100_000
# Terms per document above which a Seismic index becomes slow and large.
LONG_VECTOR = 256
BM25 = "bm25"
QDRANT = "qdrant"
LATE = "late"
SEISMIC = "seismic"
# Queries on which a late index measures its recall.
SAMPLED_QUERIES = 64
_MISSING_OUTPUT = "Missing option '--output'. Folder for the index."
# Ids that a note lists.
SHOWN_IDS = 5
_BACKEND_HELP = (
    "exact (fastest and smallest up to at least 100,000 documents), bm25 (words of --data, without "
    "a model), seismic (approximate, for much larger collections; encode with --top-k 128 or so), "
    "qdrant (exact, with frequent changes; in the folder, or on the server at --url), or late "
    "(late interaction over --tokens)."
)


@dataclass(frozen=True, kw_only=True)
class IndexRequest(_retrievers.PassageOptions, DocumentFieldOptions):
    """Options of ``tilefold index``."""

    output: Annotated[
        Path | None,
        option(
            "Folder for the index, or of the index to change; required unless --check is given.",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "exact, seismic, qdrant: a folder of tilefold encode; exact also takes dense vectors.",
        ),
    ] = None
    tokens: Annotated[
        Path | None,
        option(
            "late: token vectors in a folder of tilefold encode, or a .safetensors or .npz file.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "bm25: the documents to index; other backends: the encoded documents, whose metadata "
            "are kept. " + _common.DOCUMENTS_HELP,
        ),
    ] = None
    backend: Annotated[
        Literal["exact", "seismic", "qdrant", "bm25", "late"] | None,
        option(
            _BACKEND_HELP,
        ),
    ] = None
    language: Annotated[
        str | None,
        option(
            "bm25: language of the Snowball stemmer and stop words, or none for neither; by "
            "default english.",
            panel="BM25",
        ),
    ] = None
    k1: Annotated[
        float | None,
        option(
            "bm25: saturation of term frequencies; by default 1.5.",
            panel="BM25",
        ),
    ] = None
    b: Annotated[
        float | None,
        option(
            "bm25: normalisation of document length, 0 to 1; by default 0.75.",
            panel="BM25",
        ),
    ] = None
    identifiers: Annotated[
        bool,
        option(
            "bm25: split words at underscores and capitals, for source code.",
            "--identifiers",
            panel="BM25",
        ),
    ] = False
    n_postings: Annotated[
        int | None,
        option(
            "seismic: mean number of postings kept per term; by default it grows with the number "
            "of documents.",
            panel="Seismic",
        ),
    ] = None
    centroid_fraction: Annotated[
        float | None,
        option(
            "seismic: clusters of a term, as a fraction of its documents; by default 0.1.",
            panel="Seismic",
        ),
    ] = None
    min_cluster_size: Annotated[
        int | None,
        option(
            "seismic: minimum documents of a cluster; by default 10.",
            panel="Seismic",
        ),
    ] = None
    summary_energy: Annotated[
        float | None,
        option(
            "seismic: fraction of a cluster's weight that its summary keeps; by default 0.4.",
            panel="Seismic",
        ),
    ] = None
    doc_cut: Annotated[
        int | None,
        option(
            "seismic: number of heaviest document terms for the clustering; by default 15.",
            panel="Seismic",
        ),
    ] = None
    query_cut: Annotated[
        int | None,
        option(
            "seismic: query terms that choose clusters; by default 20, or 10 from a million "
            "documents on.",
            panel="Seismic",
        ),
    ] = None
    heap_factor: Annotated[
        float | None,
        option(
            "seismic: lower is slower and closer to exact; by default 0.7, or 0.8 from a million "
            "documents on.",
            panel="Seismic",
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        option(
            "seismic: number of threads; by default 0, one per core.",
            "--threads",
            panel="Seismic",
        ),
    ] = None
    storage: Annotated[
        Literal["int8", "fp16", "int4"] | None,
        option(
            "late: data type of the vectors; by default int8, and int4 is half as large.",
            panel="Late interaction",
        ),
    ] = None
    pool_factor: Annotated[
        int | None,
        option(
            "late: document tokens per kept vector, which is the mean of a cluster; by default 1.",
            panel="Late interaction",
        ),
    ] = None
    queries: Annotated[
        Path | None,
        option(
            "late: token vectors of queries, on which the recall of the candidates is measured.",
            panel="Late interaction",
        ),
    ] = None
    url: Annotated[
        str | None,
        option(
            "qdrant: address of a server, such as http://localhost:6333; its key is read from "
            "QDRANT_API_KEY.",
            panel="Qdrant",
        ),
    ] = None
    collection: Annotated[
        str | None,
        option(
            "qdrant: name of the collection on the server; by default the name of --output.",
            panel="Qdrant",
        ),
    ] = None
    weights: Annotated[
        Literal["float32", "float16"] | None,
        option(
            "qdrant: data type of the searched weights; by default float32.",
            panel="Qdrant",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            "Replace the index at --output; qdrant: also a collection of the server that holds "
            "other vectors.",
            "--overwrite",
        ),
    ] = False
    update: Annotated[
        bool,
        option(
            "Add --vectors (bm25: --data, late: --tokens) to the index at --output, and replace "
            "documents with the same id.",
            "--update",
            panel="Changes of an index",
        ),
    ] = False
    delete: Annotated[
        Path | None,
        option(
            "Remove the documents of this file, with an id per line, from the index at --output.",
            panel="Changes of an index",
        ),
    ] = None
    merge: Annotated[
        bool,
        option(
            "Merge the parts of the index at --output that updates have added.",
            "--merge",
            panel="Changes of an index",
        ),
    ] = False
    log_sequence: Annotated[
        int | None,
        option(
            "For tilefold serve: the last change in its log of documents that --update and "
            "--delete make.",
            hidden=True,
        ),
    ] = None
    check: Annotated[
        Path | None,
        option(
            "Only check this index: checksums, parts, files that belong to nothing, and what "
            "--merge would save; exit code 1 if it is damaged.",
            panel="Changes of an index",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        if self.check is not None:
            self._refuse_options_besides_check()
            return
        super().validate()
        if self.output is None:
            raise UsageError(_MISSING_OUTPUT)
        if self.changes_index:
            self._refuse_options_of_new_index()
        self._refuse_options_of_other_backends()
        if self.url is None:
            refuse_options({"--collection": self.collection}, "requires --url")
        if not self.changes_index:
            refuse_options({"--log-sequence": self.log_sequence}, "requires --update or --delete")
        if self.changes_index and not self.update:
            refuse_options(
                {"--data": self.data, "--vectors": self.vectors, "--tokens": self.tokens},
                "requires --update, which adds documents to the index",
            )
        if self.new_backend != BM25:
            refuse_options(
                {"--passages": self.passages},
                "requires --backend bm25; tilefold encode --passages splits encoded documents",
            )
        self._refuse_inputs_of_other_backends()

    def _refuse_inputs_of_other_backends(self) -> None:
        """Raise ``UsageError`` for vectors that the backend of the new index does not read."""
        backend = self.new_backend
        if backend in (BM25, LATE):
            needed = "--data" if backend == BM25 else "--tokens"
            refuse_options(
                {"--vectors": self.vectors},
                f"requires --backend exact, seismic or qdrant; {backend} reads {needed}",
            )
        if backend != LATE and not self.update:
            refuse_options(
                {"--tokens": self.tokens},
                f"requires --backend late; {backend} reads --vectors or --data",
            )

    def _refuse_options_besides_check(self) -> None:
        """Raise ``UsageError`` if another option than ``--json`` was given with ``--check``."""
        names = _options.spellings(type(self))
        for field in fields(self):
            if field.name in ("check", "as_json"):
                continue
            is_default = getattr(self, field.name) == field.default
            refuse_options(
                {names[field.name]: not is_default},
                "has no effect with --check, which changes nothing: leave it out",
            )

    @property
    def folder(self) -> Path:
        """The folder of ``--output``."""
        if self.output is None:
            raise UsageError(_MISSING_OUTPUT)
        return self.output

    @property
    def new_backend(self) -> str:
        """The backend of a new index."""
        return self.backend or "exact"

    @property
    def changes_index(self) -> bool:
        """Whether an existing index is changed, instead of a new one built."""
        return self.update or self.delete is not None or self.merge

    def _options_of_backends(self) -> dict[str, dict[str, object]]:
        """Return backend -> option -> value, for options that are only for a new index.

        Each of these options has an effect on a single backend.
        """
        return {
            BM25: {
                "--language": self.language,
                "--k1": self.k1,
                "--b": self.b,
                "--identifiers": self.identifiers,
            },
            SEISMIC: {
                "--n-postings": self.n_postings,
                "--centroid-fraction": self.centroid_fraction,
                "--min-cluster-size": self.min_cluster_size,
                "--summary-energy": self.summary_energy,
                "--doc-cut": self.doc_cut,
                "--query-cut": self.query_cut,
                "--heap-factor": self.heap_factor,
                "--threads": self.num_threads,
            },
            QDRANT: {
                "--url": self.url,
                "--collection": self.collection,
                "--weights": self.weights,
            },
            LATE: {
                "--storage": self.storage,
                "--pool-factor": self.pool_factor,
                "--queries": self.queries,
            },
        }

    def _refuse_options_of_new_index(self) -> None:
        """Raise ``UsageError`` for options of a new index, because an existing one is changed."""
        reason = f"requires a new index; {self.output} keeps the options that it was built with"
        for options in self._options_of_backends().values():
            refuse_options(options, reason)
        refuse_options(
            {
                "--passages": self.passages,
                "--stride": self.stride,
                "--cut": self.cut,
                "--overwrite": self.overwrite,
            },
            reason,
        )

    def _refuse_options_of_other_backends(self) -> None:
        """Raise ``UsageError`` for options that the backend of the new index does not have."""
        for backend, options in self._options_of_backends().items():
            if backend != self.new_backend:
                refuse_options(options, f"requires --backend {backend}")

    def bm25_options(self) -> BM25Options:
        """Return the options of a BM25 index; options that were not given have their defaults.

        Raises:
            UsageError: if a value is out of range, or there is no stemmer for the language.
        """
        from tilefold.retrieval.index.bm25 import BM25Options

        return BM25Options(
            language=_options.checked_bm25_language(self.language),
            k1=BM25Options.k1 if self.k1 is None else self.k1,
            b=BM25Options.b if self.b is None else self.b,
            identifiers=self.identifiers,
        )

    def seismic_options(self) -> dict[str, object]:
        """Return name -> value of the options of a Seismic index that were given.

        Raises:
            UsageError: if a value is out of range.
        """
        from tilefold.retrieval.index.seismic import SeismicOptions

        options: dict[str, object] = {}
        for field in fields(SeismicOptions):
            value = getattr(self, field.name)
            if value is not None:
                options[field.name] = value
        SeismicOptions.parse(options)  # raises an error for a value out of range
        return options


def index(request: IndexRequest) -> None:
    """Build an index of encoded documents, or of the words of a collection (--backend bm25).

    --backend exact searches dense vectors exhaustively, on a GPU if there is one. --backend late
    scores all documents on a GPU, and candidates on a CPU; their recall is printed.

    --update, --delete and --merge change the index at --output. An interrupted change leaves it
    intact. --check only reads an index.

    Example:
        tilefold index --vectors VECTORS --output INDEX
    """
    if request.check is not None:
        _check_index(request.check, as_json=request.as_json)
    elif request.changes_index:
        _change_index(request)
    else:
        _build_index(request)


def _check_index(folder: Path, *, as_json: bool) -> None:
    """Check an index, print the result, and exit with code 1 if the index is damaged.

    Args:
        folder: the folder of the index.
        as_json: whether JSON is printed.
    """
    from tilefold.retrieval.index.checking import check_index

    with _common.heartbeat("checking"):
        check = check_index(folder)
    _common.print_result(check.to_dict(), as_json, *_describe_check(check))
    if not check.is_intact:
        raise typer.Exit(1)


def _describe_check(check: IndexCheck) -> list[str]:
    """Return the lines that describe a checked index.

    They name its damage, its parts if updates have added any, the files that belong to no part
    (orphans), and what ``--merge`` would do.
    """
    state = "intact" if check.is_intact else f"damaged ({len(check.damage)})"
    lines = [
        f"{check.path}: {state}; {check.backend or 'unknown backend'}, "
        f"{check.n_documents:,} documents, {check.n_files} files checked",
    ]
    if check.generation is not None:
        lines.append(f"generation {check.generation}")
    lines += [f"damaged: {problem}" for problem in check.damage]
    if len(check.parts) > 1:
        for part in check.parts:
            lines.append(
                f"part {part.folder or 'first'}: {_common.counted(part.n_documents, 'document')}, "
                f"{part.n_removed:,} removed, {_common.format_size(part.n_bytes)}",
            )
    for orphan in check.orphans:
        lines.append(
            f"orphan: {orphan.path} ({_common.format_size(orphan.n_bytes)}) is in no manifest"
        )
    if check.is_being_written:
        lines.append("another process is writing the index, so orphans were not searched")
    merge = check.merge
    if merge is not None and (merge.n_segments or merge.n_removed):
        line = f"--merge would combine {_common.counted(merge.n_segments + 1, 'part')}"
        if merge.n_removed:
            line += (
                f", and delete {_common.counted(merge.n_removed, 'removed document')} "
                f"(about {_common.format_size(merge.n_bytes)})"
            )
        lines.append(line)
    return lines


def _change_index(request: IndexRequest) -> None:
    """Change the index at ``--output``, and print the numbers of written and removed documents."""
    started = time.monotonic()
    with _common.precision_warnings_as_notes():
        counts = _change(request)
    seconds = round(time.monotonic() - started, 3)
    summary = (
        f"{counts['n_documents']} documents: {counts['written']} written, {counts['deleted']} "
        f"removed in {seconds:.1f} s: {request.folder}"
    )
    failed = _read_failed_ids(request) if request.update else []
    result = {
        "output": str(request.folder),
        **counts,
        "failed_ids": failed,
        "seconds": seconds,
    }
    _common.print_result(result, request.as_json, summary)
    if counts["unknown_ids"]:
        _note_unknown_ids(request, counts["unknown_ids"])
    if failed:
        _note_failed(failed, _indexed_ids(request.folder))


def _note_unknown_ids(request: IndexRequest, unknown: Sequence[str]) -> None:
    """Print a note that ids of ``--delete`` are not in the index, with the first ones.

    Args:
        request: the options of the command.
        unknown: the ids.
    """
    subject = f"{len(unknown):,} ids of {request.delete} are"
    if len(unknown) == 1:
        subject = f"1 id of {request.delete} is"
    note(f"--delete: {subject} not in the index: {_first_ids(unknown)}")


def _first_ids(ids: Sequence[str]) -> str:
    """Return the first ids for a note, and whether there are more."""
    names = ", ".join(ids[:SHOWN_IDS])
    return f"{names}, ..." if len(ids) > SHOWN_IDS else names


def _read_failed_ids(request: IndexRequest) -> list[str]:
    """Return the ids of texts without vectors in --vectors or --tokens: encoding them has failed.

    Args:
        request: the options of the command, whose vectors were read.
    """
    folder = request.tokens if request.vectors is None else request.vectors
    if folder is None or not folder.is_dir():  # a file of token vectors does not list them
        return []
    manifest = read_json_object(folder / VECTORS_MANIFEST, VECTORS_REMEDY)
    return list(manifest.get("failed", []))  # other programs may write no such entry


def _indexed_ids(index: Path) -> set[str]:
    """Return the ids of the documents or passages of an index.

    Args:
        index: the folder of the index.
    """
    if read_description(index)["backend"] == QDRANT:
        from tilefold.retrieval.index.qdrant.index import QdrantIndex

        with QdrantIndex.load(index).collection as collection:
            return set(collection.ids())
    opened: Any = open_index(index)
    return set(opened.ids)


def _note_failed(failed: Sequence[str], indexed_ids: Container[str]) -> None:
    """Print notes about texts that could not be encoded, and are therefore not in ``--vectors``.

    An update keeps the vectors of an earlier text with the same id, so that no document is lost.

    Args:
        failed: the ids of the texts.
        indexed_ids: the ids in the index; none for a new index.
    """
    kept = [text_id for text_id in failed if text_id in indexed_ids]
    missing = [text_id for text_id in failed if text_id not in indexed_ids]
    if kept:
        note(
            f"could not be encoded, so that the index keeps the vectors of their earlier texts: "
            f"{_first_ids(kept)} ({len(kept):,}); encode these texts again, or remove them with "
            "--delete",
        )
    if missing:
        note(
            "could not be encoded, and are not in the index: "
            f"{_first_ids(missing)} ({len(missing):,})",
        )


def _build_index(request: IndexRequest) -> None:
    """Build a new index, save it at ``--output``, and print its size."""
    started = time.monotonic()
    if not request.overwrite:
        _refuse_existing_index(request.folder)
    if ChangeLog(request.folder).is_active:
        raise CommandError(
            f"--overwrite: expected an index without a migration, got {request.folder}, which "
            "moves to another model. Replace its documents with --update, or end the migration "
            "first (tilefold migrate --discard).",
        )
    splitter = request.passage_splitter()
    with (
        lock_path(request.folder),  # no other process changes the index meanwhile
        publishing(request.folder),  # records the new state of the folder at the end
        _common.heartbeat(f"indexing ({request.new_backend})"),
    ):
        built = _build(request, splitter)
        built.save(request.folder, overwrite=request.overwrite)
        n_documents = built.n_documents
        if request.new_backend == QDRANT:
            built.close()  # its files are open until then
    _print_new_index(request, built, n_documents, round(time.monotonic() - started, 3))
    _note_failed(_read_failed_ids(request), indexed_ids=())


def _build(request: IndexRequest, splitter: Passages | None) -> Any:
    """Build the index of ``--backend``.

    Args:
        request: the options of the command.
        splitter: the splitter of documents into passages, for BM25; None for whole documents.
    """
    if request.new_backend == LATE:
        return _build_late(request)
    if request.new_backend == BM25:
        return _build_bm25(request, splitter)
    return _build_vector_index(request)


def _print_new_index(request: IndexRequest, built: Any, n_documents: int, seconds: float) -> None:
    """Print a summary of a new index, and the command that searches it.

    Args:
        request: the options of the command.
        built: the index, of any backend. It has the ``provenance`` and the ``metadata`` of its
            documents, and for late interaction the ``options`` of its storage.
        n_documents: the number of its documents or passages.
        seconds: the time of building and saving.
    """
    backend = request.new_backend
    has_passages = bool(built.provenance.passages)
    result: dict[str, Any] = {
        "output": str(request.folder),
        "backend": backend,
        "n_documents": n_documents,
        "seconds": seconds,
    }
    unit = "passages" if has_passages else "documents"
    summary = f"{n_documents} {unit} indexed ({backend}) in {seconds:.1f} s: {request.folder}"
    if has_passages:
        result["passages"] = built.provenance.passages
    if backend == LATE:  # late interaction
        result.update(built.options)
        summary += f" ({_describe_late(built)})"
    if built.metadata is not None:
        result["metadata"] = built.metadata.kinds
        summary += f"; metadata: {_describe_metadata(built.metadata.kinds)}"
    search_words = ["search", "QUERY", "--index", request.folder]
    if backend != BM25:
        search_words += ["--model", "MODEL"]
    if request.data is not None:
        search_words += ["--data", request.data]
    search = _common.next_command(*search_words)
    _common.print_result(result, request.as_json, summary, search)


def _describe_late(built: LateIndex) -> str:
    """Describe the size of a late-interaction index, and its recall on a CPU if it was measured."""
    description = f"{_common.format_size(built.files.nbytes)} of {built.options['storage']}"
    if built.recall:
        description += (
            f"; on a CPU it scores {built.n_candidates} candidates, among them {built.recall:.1%} "
            "of the ten best"
        )
    return description


def _describe_metadata(kinds: Mapping[str, Sequence[str]]) -> str:
    """Describe the metadata of an index, such as ``lang (text), year (number)``.

    Args:
        kinds: field -> kinds of its values.
    """
    return ", ".join(f"{field} ({' or '.join(names)})" for field, names in kinds.items())


def _refuse_existing_index(output: Path) -> None:
    """Raise ``CommandError``, before any work, if a new index would replace an existing one.

    Args:
        output: the folder of the new index.
    """
    if not (output / MANIFEST_NAME).exists():
        return  # if the folder has other files, saving the index raises an error
    try:
        description = read_description(output)
    except (DataError, OSError) as error:
        raise CommandError(
            f"--output: {output} holds an index that cannot be read, and was not overwritten: "
            f"{error}",
        ) from error
    raise CommandError(
        f"--output: {output} holds an index already ({description['backend']}, "
        f"{description['n_documents']:,} documents). Use --update to add documents, --overwrite "
        "to replace it, or another folder; nothing was overwritten.",
    )


def _build_bm25(request: IndexRequest, splitter: Passages | None) -> Any:
    """Build a BM25 index of documents or passages.

    Args:
        request: the options of the command.
        splitter: the splitter of documents into passages; None indexes whole documents.
    """
    if request.data is None:
        raise UsageError("--backend bm25 indexes the words of a collection: give it with --data.")
    options = request.bm25_options()
    collection = _common.load_data(request.data, documents_only=True)
    texts = collection.contents()
    if splitter is not None:
        texts = splitter.of(collection.documents)
    return retrieval.BM25Index.build(
        texts,
        language=options.language,
        k1=options.k1,
        b=options.b,
        identifiers=options.identifiers,
        metadata=collection.metadata(),
    )


def _build_vector_index(request: IndexRequest) -> Any:
    """Build an index of sparse or dense vectors: exact, seismic or qdrant.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if the vectors are dense and the backend does not search dense vectors.
    """
    backend = request.new_backend
    seismic_options = request.seismic_options() if backend == SEISMIC else {}
    vectors = _read_vectors(request.vectors, backend)
    metadata = _load_metadata(request.data, request.vectors, vectors)
    if not isinstance(vectors, retrieval.SparseVectors):
        if backend != "exact":
            raise UsageError(
                f"--backend: {request.vectors} holds dense vectors, which only exact searches, got "
                f"{backend}.",
            )
        return retrieval.DenseIndex.build(vectors, metadata=metadata)
    if backend == QDRANT:
        return _build_qdrant(request, vectors, metadata)
    if backend == SEISMIC:
        _warn_about_seismic(vectors)
    return retrieval.build_index(vectors, backend, metadata=metadata, **seismic_options)


def _warn_about_seismic(vectors: SparseVectors) -> None:
    """Print a note if a Seismic index is a bad choice: for few documents, or for many terms."""
    n_documents = len(vectors)
    if n_documents < SEISMIC_DOCUMENTS:
        note(
            f"{n_documents} documents are few for seismic: below {SEISMIC_DOCUMENTS:,} documents, "
            "--backend exact is smaller, as fast, built in seconds, and misses nothing",
        )
    terms_per_document = len(vectors.indices) / max(1, n_documents)
    if terms_per_document > LONG_VECTOR:
        note(
            f"{terms_per_document:.0f} terms per document are many for seismic, whose time and "
            "size grow with them: tilefold encode --top-k 128 keeps the heaviest",
        )


def _read_vectors(vectors: Path | None, backend: str) -> Any:
    """Read the encoded documents of ``--vectors``, which the backend needs."""
    if vectors is None:
        raise UsageError(
            f"--backend {backend} indexes encoded documents: give them with --vectors (tilefold "
            "encode writes them), or search words without a model with --backend bm25.",
        )
    return _retrievers.read_documents(vectors)


def _load_metadata(
    data: str | None,
    folder: Path | None,
    vectors: Any,
) -> Mapping[str, Mapping[str, object]] | None:
    """Load the metadata of encoded documents, such as their language or year, from ``--data``.

    Args:
        data: the value of ``--data``; None if it was not given.
        folder: the folder of the vectors, for messages.
        vectors: the vectors of these documents, or of their passages.

    Returns:
        Document id -> field -> value; None without `data`.

    Raises:
        CommandError: if the vectors were made from other documents.
    """
    collection = _load_encoded_collection(data, folder, vectors)
    return None if collection is None else _read_metadata(collection, data)


def _read_metadata(
    collection: Collection,
    data: str | None,
) -> Mapping[str, Mapping[str, object]]:
    """Return the metadata of the documents of ``--data``; print a note if there are none.

    Args:
        collection: the collection of ``--data``.
        data: the value of ``--data``, for the note.

    Returns:
        Document id -> field -> value.
    """
    metadata = collection.metadata()
    if not metadata:
        _note_missing_metadata(data)
    return metadata


def _load_encoded_collection(
    data: str | None,
    folder: Path | None,
    vectors: Any,
) -> Collection | None:
    """Load the collection of ``--data``, and check that vectors were made from its documents.

    A note reports how many vectors are of documents that the collection does not have.

    Args:
        data: the value of ``--data``; None if it was not given.
        folder: the folder of the vectors, for messages; None if there are no vectors.
        vectors: the vectors of these documents, or of their passages.

    Returns:
        The collection; None without `data` or `folder`.

    Raises:
        CommandError: if the vectors were made from other documents.
    """
    if data is None or folder is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    # The provenance has the fingerprint of the encoded texts. Stored vectors have it in their
    # manifest; vectors in memory have no manifest, but the provenance itself.
    provenance = getattr(vectors, "manifest", vectors).provenance
    _scores.check_made_from(collection, str(folder), provenance)
    are_passages = provenance.passages is not None
    n_unknown = 0
    for vector_id in vectors.ids:
        document_id = document_of(vector_id) if are_passages else vector_id
        if document_id not in collection.documents:
            n_unknown += 1
    if n_unknown:
        note(
            f"--data: {n_unknown} of the {len(vectors.ids)} vectors in {folder} are of documents "
            f"that are not in {data}, and have no metadata",
        )
    return collection


def _note_missing_metadata(data: str | None) -> None:
    """Print a note that the documents of ``--data`` have no metadata."""
    note(
        f"--data: the documents of {data} have no metadata, only an id, a title and a text",
    )


def _build_late(request: IndexRequest) -> Any:
    """Build a late-interaction index of token vectors in the folder of ``--output``.

    Args:
        request: the options of the command. ``--queries`` names token vectors of queries, a sample
            on which the recall of a search on a CPU is measured.
    """
    queries = None
    if request.queries is not None:
        queries = _read_query_sample(request.queries)
    with _options.errors_name_options(
        storage="--storage",
        pool_factor="--pool-factor",
        queries="--queries",
        vectors="--tokens",
    ):
        vectors = _retrievers.read_tokens(request.tokens)
        return retrieval.LateIndex.build(
            vectors,
            request.folder,
            storage=request.storage or "int8",
            pool_factor=1 if request.pool_factor is None else request.pool_factor,
            queries=queries,
            metadata=_load_metadata(request.data, request.tokens, vectors),
            overwrite=request.overwrite,
        )


def _read_query_sample(folder: Path) -> TokenVectors:
    """Return the token vectors of a few queries, on which an index measures its recall.

    Args:
        folder: a folder of ``encode --queries``, whose first queries are read.

    Raises:
        UsageError: if the vectors are of documents, or are stored in int8.
    """
    store = retrieval.open_tokens(folder)
    if store.manifest.kind != "query" or store.manifest.storage == "int8":
        raise UsageError(
            f"--queries: expected query vectors in fp16 (tilefold encode --queries), got "
            f"{store.manifest.kind} vectors in {store.manifest.storage} in {folder}.",
        )
    vectors: TokenVectors = store.read(list(store.ids)[:SAMPLED_QUERIES])
    return vectors


def _build_qdrant(
    request: IndexRequest,
    vectors: Any,
    metadata: Mapping[str, Mapping[str, object]] | None,
) -> Any:
    """Build a Qdrant index in the folder of ``--output``, or on the server of ``--url``.

    Args:
        request: the options of the command.
        vectors: the sparse vectors of the documents.
        metadata: document id -> field -> value; None without metadata.
    """
    # After an interruption, the user is told whether the same command resumes from these documents.
    n_written = 0
    _common.finished_work_checks.append(lambda: n_written > 0)
    is_on_server = request.url is not None
    default_name = request.folder.resolve().name
    with (
        _options.errors_name_options(url="--url", weights="--weights", name="--collection"),
        _common.progress_bar("indexing") as update,
    ):

        def report_progress(done: int, total: int) -> None:
            nonlocal n_written
            n_written = done
            update(done, total)

        def report_resumption(done: int, total: int) -> None:
            note(f"indexing resumes: {done:,} of {total:,} were done before")

        return retrieval.build_index(
            vectors,
            QDRANT,
            metadata=metadata,
            folder=None if is_on_server else request.folder,
            url=request.url,
            collection=(request.collection or default_name) if is_on_server else None,
            weights=request.weights or "float32",
            overwrite=request.overwrite,
            progress=report_progress,
            resumes=report_resumption,
        )


def _change(request: IndexRequest) -> IndexUpdate:
    """Change an index: remove documents, add or replace documents, merge the parts of updates.

    Args:
        request: the options of the command, which name the index and the changes.

    Returns:
        The numbers of all, written and deleted documents, and the ids of ``--delete`` that are not
        in the index.

    Raises:
        UsageError: if options do not fit the index.
    """
    backend = read_description(request.folder)["backend"]
    _check_change_fits(request, backend)
    deleted_ids = [] if request.delete is None else _read_ids(request.delete)
    if backend == BM25:
        return _change_bm25(request, deleted_ids)
    if backend == QDRANT:
        return _change_qdrant(request, deleted_ids)
    return _change_segments(request, backend, deleted_ids)


def _check_change_fits(request: IndexRequest, backend: str) -> None:
    """Raise ``UsageError`` for options that do not fit the backend of the index to change.

    Args:
        request: the options of the command.
        backend: the backend of the index at ``--output``.
    """
    output = request.folder
    accepted_backends = {None, backend}
    if backend == DENSE:
        accepted_backends.add("exact")  # a new index of dense vectors is built with this value
    if request.backend not in accepted_backends:
        raise UsageError(
            f"--backend: {output} is an index of backend {backend}, got {request.backend}.",
        )
    if request.merge and backend in (QDRANT, BM25):
        raise UsageError(
            f"--merge requires an exact, dense, seismic or late index; {output} has the backend "
            f"{backend}.",
        )
    reason = f"has no effect: {output} is an index of backend {backend}"
    if backend in (BM25, LATE):
        refuse_options({"--vectors": request.vectors}, reason)
    if backend != LATE:
        refuse_options({"--tokens": request.tokens}, reason)
    if request.update:
        _check_has_new_documents(request, backend)


def _check_has_new_documents(request: IndexRequest, backend: str) -> None:
    """Raise ``UsageError`` if ``--update`` is given without the documents to add.

    Args:
        request: the options of the command.
        backend: the backend of the index at ``--output``.
    """
    options: dict[str, tuple[str, object]] = {
        BM25: ("--data", request.data),
        LATE: ("--tokens", request.tokens),
    }
    name, value = options.get(backend, ("--vectors", request.vectors))
    if value is not None:
        return
    remedy = f"give them with {name}"
    if request.delete is not None or request.merge:
        remedy += ", or leave out --update, which --delete and --merge do not need"
    raise UsageError(
        f"--update: expected documents to add to {request.folder}, got none: {remedy}."
    )


def _change_segments(
    request: IndexRequest,
    backend: str,
    deleted_ids: Sequence[str],
) -> IndexUpdate:
    """Change an index that gets a part (segment) by each update, and merge its parts on request.

    Args:
        request: the options of the command.
        backend: the backend of the index: exact, dense, seismic or late.
        deleted_ids: the ids of documents to remove.

    Returns:
        The numbers of all, written and deleted documents, and the ids of ``--delete`` that are not
        in the index.
    """
    from tilefold.retrieval.index.merging import merge_segments, update_index

    is_late = backend == LATE
    folder = request.tokens if is_late else request.vectors
    vectors = None
    if request.update:
        vectors = _retrievers.read_tokens(folder) if is_late else _read_vectors(folder, backend)
    collection = _load_encoded_collection(request.data, folder, vectors)
    metadata = None if collection is None else _read_metadata(collection, request.data)
    documents = None if collection is None else collection.documents
    counts: IndexUpdate = {"n_documents": 0, "written": 0, "deleted": 0, "unknown_ids": []}
    with _options.errors_name_options(
        metadata="--data",
        documents="--data",
        vectors="--tokens" if is_late else "--vectors",
        index="--output",
        path="--output",
    ):
        if request.update or request.delete is not None:
            counts = update_index(
                request.folder,
                vectors,
                deleted_ids,
                metadata=metadata,
                documents=documents,
                log_sequence=request.log_sequence,
            )
        if request.merge:
            counts["n_documents"] = merge_segments(request.folder)
    return counts


def _read_ids(path: Path) -> list[str]:
    """Read the ids of documents from a file with an id per line."""
    if not path.exists():
        raise UsageError(f"--delete: expected a file with one id per line, got no file {path}.")
    text = _options.read_text(path, "--delete", "utf-8-sig")  # with or without a byte order mark
    # `splitlines` would also divide an id at other characters, such as a form feed.
    return [line for line in text.split("\n") if line.strip()]


class _NewDocuments(NamedTuple):
    """The documents to add to a BM25 index.

    Attributes:
        texts: id of a document or passage -> text.
        metadata: document id -> field -> value.
    """

    texts: Mapping[str, str]
    metadata: Mapping[str, Mapping[str, object]]


def _change_bm25(request: IndexRequest, deleted_ids: Sequence[str]) -> IndexUpdate:
    """Remove documents from a BM25 index, and add or replace the documents of ``--data``.

    Args:
        request: the options that name the index and the data.
        deleted_ids: the ids of documents to remove.

    Returns:
        The numbers of all, written and deleted documents, and the ids of ``--delete`` that are not
        in the index.
    """
    output = request.folder
    with lock_path(output), _options.errors_name_options(index="--output", documents="--data"):
        index = retrieval.BM25Index.load(output)
        passages = index.provenance.passages  # how documents are split; None for whole documents
        documents = _NewDocuments({}, {})
        if request.data is not None:
            documents = _load_new_documents(request.data, passages)
            if index.metadata is not None and not documents.metadata:
                # Replaced documents lose their metadata.
                _note_missing_metadata(request.data)
        n_deleted = len(
            ids_to_delete(index.ids, set(deleted_ids), new_ids=(), passages=passages),
        )
        unknown = unknown_ids(index.ids, deleted_ids, passages)
        changed = index.updated(documents.texts, deleted_ids, documents.metadata)
        with publishing(output, request.log_sequence):  # records the new state of the folder
            changed.save(output, overwrite=True)
    return {
        "n_documents": changed.n_documents,
        "written": len(documents.texts),
        "deleted": n_deleted,
        "unknown_ids": unknown,
    }


def _load_new_documents(data: str, passages: str | None) -> _NewDocuments:
    """Load the documents of ``--data`` for a BM25 index.

    Args:
        data: the value of ``--data``.
        passages: how the index splits documents into passages; None for whole documents.
    """
    collection = _common.load_data(data, documents_only=True)
    texts = collection.contents()
    if passages is not None:
        texts = Passages.parse(passages).of(collection.documents)
    return _NewDocuments(texts, collection.metadata())


def _change_qdrant(request: IndexRequest, deleted_ids: list[str]) -> IndexUpdate:
    """Remove documents from a Qdrant index, and add or replace documents.

    Args:
        request: the options that name the index, the vectors and the data.
        deleted_ids: the ids of documents to remove.

    Returns:
        The numbers of all, written and deleted documents, and the ids of ``--delete`` that are not
        in the index.

    Raises:
        CommandError: if the index cannot hold the vectors.
        UsageError: if the index has metadata and the new documents have none.
    """
    from tilefold.retrieval.index.qdrant.index import QdrantIndex

    output = request.folder
    documents = _read_qdrant_documents(request) if request.update else None
    try:
        index = QdrantIndex.load(output)
        with index.collection as collection:
            # All checks come before the first change.
            if documents is not None:
                documents.check_compatible(collection.layout, collection.location)
                if request.data is None and collection.has_metadata():
                    raise UsageError(
                        "--data: expected the fields of the new documents, because the index "
                        "stores metadata, got none. Without them, filters would not find the "
                        "documents.",
                    )
            unknown = _ids_not_in_collection(collection, deleted_ids)
            n_deleted = collection.delete(_entries_to_delete(collection, deleted_ids, documents))
            if documents is not None:
                with _common.progress_bar("writing") as update:
                    collection.upsert(documents, progress=update)
            index.save(output, overwrite=True)
            n_documents = len(collection)
    except DataError as error:
        raise CommandError(f"--output: {error}") from error
    return {
        "n_documents": n_documents,
        "written": 0 if documents is None else len(documents),
        "deleted": n_deleted,
        "unknown_ids": unknown,
    }


def _read_qdrant_documents(request: IndexRequest) -> Documents:
    """Read the vectors that ``--update`` adds to a Qdrant index, and the documents' metadata.

    Qdrant stores the metadata as payloads of the vectors.

    Args:
        request: the options that name the vectors and the data.
    """
    from tilefold.retrieval.data.metadata import fields_by_id
    from tilefold.retrieval.index.qdrant import Documents

    vectors = _read_vectors(request.vectors, QDRANT)
    metadata = _load_metadata(request.data, request.vectors, vectors)
    payloads = fields_by_id(
        metadata or {},
        vectors.ids,
        ids_are_passages=vectors.provenance.passages is not None,
    )
    return Documents(vectors.ids, vectors, payloads=payloads)


def _ids_not_in_collection(collection: QdrantCollection, deleted_ids: Sequence[str]) -> list[str]:
    """Return the ids of ``--delete`` that name no document of a Qdrant index.

    If the index has passages, all their ids are read, because Qdrant cannot look up their document.

    Args:
        collection: the collection of the index.
        deleted_ids: the ids of documents to remove.
    """
    if not deleted_ids:
        return []
    passages = collection.layout.passages
    present_ids = collection.present(deleted_ids) if passages is None else collection.ids()
    return unknown_ids(present_ids, deleted_ids, passages)


def _entries_to_delete(
    collection: QdrantCollection,
    deleted_ids: list[str],
    documents: Documents | None,
) -> list[str]:
    """Return the ids of documents or passages to delete from Qdrant before new ones are written.

    For an index of passages, these are all passages of the removed and the replaced documents,
    because a new document may have fewer passages. All ids of the collection are read.

    Args:
        collection: the collection of the index.
        deleted_ids: the ids of documents to remove.
        documents: the new documents or passages; None if documents are only removed.
    """
    if collection.layout.passages is None:
        return deleted_ids
    changed_documents = set(deleted_ids)
    if documents is not None:
        changed_documents.update(map(document_of, documents.ids))
    return [entry for entry in collection.ids() if document_of(entry) in changed_documents]


@dataclass(frozen=True, kw_only=True)
class MergeRequest(Options):
    """Options of ``tilefold merge``."""

    folders: Annotated[
        list[Path],
        argument(
            "Folders of vectors of the same kind, encoded by one model with the same settings.",
        ),
    ]
    output: Annotated[
        Path,
        option(
            "Folder for the merged vectors.",
        ),
    ]
    overwrite: Annotated[
        bool,
        option(
            "Replace the vectors at --output.",
            "--overwrite",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False


def merge(request: MergeRequest) -> None:
    """Merge folders of sparse, dense or token vectors of different texts into one.

    Example:
        tilefold merge VECTORS MORE_VECTORS --output ALL_VECTORS
    """
    from tilefold.retrieval.index.merging import merge_vectors

    with (
        _options.errors_name_options(folders="FOLDERS:", output_dir="--output"),
        _common.heartbeat("merging"),
        _common.precision_warnings_as_notes(),
    ):
        manifest = merge_vectors(request.folders, request.output, overwrite=request.overwrite)
    result = {
        "output": str(request.output),
        "n": manifest.n_documents,
        "folders": [str(folder) for folder in request.folders],
    }
    _common.print_result(
        result,
        request.as_json,
        f"{manifest.n_documents} vectors of {len(request.folders)} folders: {request.output}",
    )
