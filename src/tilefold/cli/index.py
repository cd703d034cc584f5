"""``tilefold index``, of encoded documents or of their words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilefold import retrieval
from tilefold._internal.files import lock_path
from tilefold.cli import _common, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, Options, argument, option, refuse_options
from tilefold.retrieval.common.provenance import ids_to_delete
from tilefold.retrieval.data.passages import Passages, document_of
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import DENSE
from tilefold.retrieval.index.protocol import MANIFEST_NAME, read_description

if TYPE_CHECKING:
    from tilefold.retrieval.index.bm25 import BM25Options
    from tilefold.retrieval.index.qdrant import Documents, QdrantCollection
    from tilefold.retrieval.vectors.tokens import TokenVectors

# Measured with 120 terms per document on two cores: up to here exact search is as fast, smaller,
# and built in seconds.
SEISMIC_DOCUMENTS = 100_000
# Terms per document above which seismic becomes slow and large.
LONG_VECTOR = 256
BM25 = "bm25"
QDRANT = "qdrant"
LATE = "late"
SEISMIC = "seismic"
# Queries on which a late index measures its recall.
SAMPLED_QUERIES = 64
_BACKEND_HELP = (
    "exact (fastest and smallest up to 100,000 documents at least), bm25 (words, no model: give "
    "--data), seismic (approximate, for much larger collections; encode with --top-k 128 or so), "
    "qdrant (exact; to add to and delete from; in the folder, or on the server at --url), or late "
    "(late interaction: give --tokens)."
)


@dataclass(frozen=True, kw_only=True)
class IndexRequest(_retrievers.PassageOptions, DocumentFieldOptions):
    """Options of ``tilefold index``."""

    output: Annotated[
        Path,
        option(
            "Folder for the index.",
        ),
    ]
    vectors: Annotated[
        Path | None,
        option(
            "exact, seismic, qdrant: a folder of tilefold encode; exact takes dense vectors, too.",
        ),
    ] = None
    tokens: Annotated[
        Path | None,
        option(
            "late: token vectors, a folder of tilefold encode, or a .safetensors or .npz file.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "bm25: the documents; others: those of --vectors or --tokens, to keep their metadata. "
            + _common.DOCUMENTS_HELP,
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
            "bm25: of Snowball stemmer and stop words, or none for neither; by default english.",
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
            "bm25: split words at underscores and capitals, for programs.",
            "--identifiers",
            panel="BM25",
        ),
    ] = False
    n_postings: Annotated[
        int | None,
        option(
            "seismic: postings kept per term, on average; more for more documents by default.",
            panel="Seismic",
        ),
    ] = None
    centroid_fraction: Annotated[
        float | None,
        option(
            "seismic: clusters of a term, as a fraction of its documents (0.1).",
            panel="Seismic",
        ),
    ] = None
    min_cluster_size: Annotated[
        int | None,
        option(
            "seismic: documents of the smallest cluster (10).",
            panel="Seismic",
        ),
    ] = None
    summary_energy: Annotated[
        float | None,
        option(
            "seismic: fraction of a cluster's weight in its summary (0.4).",
            panel="Seismic",
        ),
    ] = None
    doc_cut: Annotated[
        int | None,
        option(
            "seismic: heaviest terms of a document used to cluster (15).",
            panel="Seismic",
        ),
    ] = None
    query_cut: Annotated[
        int | None,
        option(
            "seismic: query terms that choose clusters (20; 10 from a million documents on).",
            panel="Seismic",
        ),
    ] = None
    heap_factor: Annotated[
        float | None,
        option(
            "seismic: lower is slower and closer to exact (0.7; 0.8 from a million on).",
            panel="Seismic",
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        option(
            "seismic: threads, 0 for one per core (0).",
            "--threads",
            panel="Seismic",
        ),
    ] = None
    storage: Annotated[
        Literal["int8", "fp16", "int4"] | None,
        option(
            "late: by default int8; int4 takes half as much.",
            panel="Late interaction",
        ),
    ] = None
    pool_factor: Annotated[
        int | None,
        option(
            "late: keep a vector for so many tokens of a document, the mean of a cluster (1).",
            panel="Late interaction",
        ),
    ] = None
    queries: Annotated[
        Path | None,
        option(
            "late: token vectors of queries, to measure the recall of candidates on them.",
            panel="Late interaction",
        ),
    ] = None
    url: Annotated[
        str | None,
        option(
            "qdrant: a server, such as http://localhost:6333; its key is in QDRANT_API_KEY.",
            panel="Qdrant",
        ),
    ] = None
    collection: Annotated[
        str | None,
        option(
            "qdrant: name of the collection on the server; by default that of --output.",
            panel="Qdrant",
        ),
    ] = None
    weights: Annotated[
        Literal["float32", "float16"] | None,
        option(
            "qdrant: of what is searched; by default float32.",
            panel="Qdrant",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            "Replace the index at --output; qdrant: also other vectors in the collection of the "
            "server.",
            "--overwrite",
        ),
    ] = False
    update: Annotated[
        bool,
        option(
            "Put --vectors (bm25: --data, late: --tokens) into the index at --output, replacing "
            "documents of the same id.",
            "--update",
            panel="Changes of an index",
        ),
    ] = False
    delete: Annotated[
        Path | None,
        option(
            "Remove documents, an id per line of this file, from the index at --output.",
            panel="Changes of an index",
        ),
    ] = None
    merge: Annotated[
        bool,
        option(
            "Make one index of that at --output and what was added to it.",
            "--merge",
            panel="Changes of an index",
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
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.changes_index:
            self._refuse_options_of_new_index()
        self._refuse_options_of_other_backends()
        if self.url is None:
            refuse_options(
                {"--collection": self.collection},
                "goes with --url, the address of a server",
            )
        if (self.delete is not None or self.merge) and not self.update:
            refuse_options(
                {"--data": self.data, "--vectors": self.vectors, "--tokens": self.tokens},
                "goes with --update, to put them into the index",
            )
        backend = self.new_backend
        if backend != BM25:
            refuse_options(
                {"--passages": self.passages},
                "goes with --backend bm25; vectors are cut by tilefold encode --passages",
            )
        if backend == BM25:
            refuse_options(
                {"--vectors": self.vectors},
                "goes with the backends exact, seismic and qdrant; bm25 reads --data",
            )
        if backend == LATE:
            refuse_options(
                {"--vectors": self.vectors},
                "goes with the backends exact, seismic and qdrant; late reads --tokens",
            )
        elif not self.update:
            refuse_options(
                {"--tokens": self.tokens},
                f"goes with --backend late; {backend} reads --vectors or --data",
            )

    @property
    def new_backend(self) -> str:
        """Backend of a new index."""
        return self.backend or "exact"

    @property
    def changes_index(self) -> bool:
        """Whether an index that exists is changed, and no new one is built."""
        return self.update or self.delete is not None or self.merge

    def _options_of_backends(self) -> dict[str, dict[str, object]]:
        """Return backend -> spelling -> value of the options that only a new index of it has."""
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
        reason = f"is for a new index; {self.output} says how this one was made"
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
        """Refuse options of backends other than that of the new index."""
        for backend, options in self._options_of_backends().items():
            if backend != self.new_backend:
                refuse_options(options, f"goes with --backend {backend}")

    def bm25_options(self) -> BM25Options:
        """Return the options of a BM25 index; those that were not given have their defaults.

        Raises:
            UsageError: for a value out of range, or a language without a stemmer.
        """
        from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer

        with _options.option_errors(language="--language", k1="--k1", b="--b"):
            options = BM25Options(
                language=BM25Options.language if self.language is None else self.language,
                k1=BM25Options.k1 if self.k1 is None else self.k1,
                b=BM25Options.b if self.b is None else self.b,
                identifiers=self.identifiers,
            )
            Tokenizer(options)  # checks the language
        return options

    def seismic_options(self) -> dict[str, object]:
        """Return the options of a Seismic index that were given, by field of `SeismicOptions`.

        Raises:
            UsageError: for a value out of range.
        """
        from tilefold.retrieval.index.seismic import SeismicOptions

        options: dict[str, object] = {}
        for field in fields(SeismicOptions):
            value = getattr(self, field.name)
            if value is not None:
                options[field.name] = value
        with _options.option_errors(
            n_postings="--n-postings",
            centroid_fraction="--centroid-fraction",
            min_cluster_size="--min-cluster-size",
            summary_energy="--summary-energy",
            doc_cut="--doc-cut",
            query_cut="--query-cut",
            heap_factor="--heap-factor",
            num_threads="--threads",
        ):
            SeismicOptions.parse(options)  # checks the values
        return options


def index(request: IndexRequest) -> None:
    """Build an index of encoded documents, or of the words of a collection (bm25).

    late scores all documents on a GPU; on a CPU it scores candidates, whose recall is printed. Of
    dense vectors, exact searches all of them on a GPU if there is one.

    With --update and --delete, the index at --output is changed, whatever its backend; it stays
    whole if that is interrupted.

    Example:
        tilefold index --vectors VECTORS --output INDEX
    """
    started = time.monotonic()
    if request.changes_index:
        with _common.noting_precisions():
            counts = _change(request)
        seconds = round(time.monotonic() - started, 3)
        summary = (
            f"{counts['n_documents']} documents: {counts['written']} written, "
            f"{counts['deleted']} removed in {seconds:.1f} s: {request.output}"
        )
        result = {"output": str(request.output), **counts, "seconds": seconds}
        _common.print_result(result, request.as_json, summary)
        return
    if not request.overwrite:
        _check_new(request.output)
    splitter = request.passage_splitter()
    with lock_path(request.output), _common.heartbeat(f"indexing ({request.new_backend})"):
        built = _build(request, splitter)
        built.save(request.output, overwrite=request.overwrite)
        n_documents = built.n_documents
        if request.new_backend == QDRANT:
            built.close()
    _print_new_index(request, built, n_documents, round(time.monotonic() - started, 3))


def _build(request: IndexRequest, splitter: Passages | None) -> Any:
    """Build the index of a backend."""
    if request.new_backend == LATE:
        return _build_late(request)
    if request.new_backend == BM25:
        return _build_bm25(request, splitter)
    return _build_of_vectors(request)


def _print_new_index(request: IndexRequest, built: Any, n_documents: int, seconds: float) -> None:
    """Print the size of a new index, and the command that searches it.

    Args:
        request: options of the command.
        built: the index.
        n_documents: number of its documents or passages.
        seconds: time of building and saving.
    """
    backend = request.new_backend
    result: dict[str, Any] = {
        "output": str(request.output),
        "backend": backend,
        "n_documents": n_documents,
        "seconds": seconds,
    }
    unit = "documents"
    if built.provenance.passages:
        unit = "passages"
        result["passages"] = built.provenance.passages
    summary = f"{n_documents} {unit} indexed ({backend}) in {seconds:.1f} s: {request.output}"
    if backend == LATE:
        result.update(built.options)
        recall = ""
        if built.recall:
            recall = (
                f"; on a CPU it scores {built.n_candidates} candidates, "
                f"of the ten best {built.recall:.1%}"
            )
        size = _common.size(built.files.nbytes)
        summary += f" ({size} of {built.options['storage']}{recall})"
    if built.metadata is not None:
        result["metadata"] = built.metadata.kinds
        fields_of_metadata = [
            f"{name} ({' or '.join(kinds)})" for name, kinds in built.metadata.kinds.items()
        ]
        summary += f"; metadata: {', '.join(fields_of_metadata)}"
    search_words = ["search", "QUERY", "--index", request.output]
    if backend != BM25:
        search_words += ["--model", "MODEL"]
    search = _common.next_command(*search_words)
    _common.print_result(result, request.as_json, summary, search)


def _check_new(output: Path) -> None:
    """Raise ``CommandError`` if there is an index at ``--output``, which a new one would replace.

    Args:
        output: folder of the new index.
    """
    if not (output / MANIFEST_NAME).exists():
        return  # saving the index refuses a folder with other files
    try:
        description = read_description(output)
    except (DataError, OSError) as error:
        raise CommandError(
            f"--output: {output} holds an index that cannot be read, and was not overwritten: "
            f"{error}",
        ) from error
    raise CommandError(
        f"--output: {output} holds an index already ({description['backend']}, "
        f"{description['n_documents']:,} documents). Give --update to put documents into it, "
        "--overwrite to replace it, or another folder; nothing was overwritten.",
    )


def _build_bm25(request: IndexRequest, splitter: Passages | None) -> Any:
    """Build a BM25 index of the words of documents or passages.

    Args:
        request: options of the command.
        splitter: how documents are split into passages; None indexes whole documents.
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


def _build_of_vectors(request: IndexRequest) -> Any:
    """Build an index of sparse or dense vectors: exact, seismic or qdrant.

    Notes say where a Seismic index is a bad choice: for few documents, or for many terms.

    Args:
        request: options of the command.

    Raises:
        UsageError: for dense vectors and a backend that does not search them.
    """
    backend = request.new_backend
    seismic_options = request.seismic_options() if backend == SEISMIC else {}
    vectors = _read_vectors(request.vectors, backend)
    metadata = _metadata(request.data, request.vectors, vectors)
    if not isinstance(vectors, retrieval.SparseVectors):
        if backend != "exact":
            raise UsageError(
                f"--backend: {request.vectors} holds dense vectors, which exact alone searches, "
                f"got {backend}.",
            )
        return retrieval.DenseIndex.build(vectors, metadata=metadata)
    if backend == QDRANT:
        return _build_qdrant(request, vectors, metadata)
    n_documents = len(vectors)
    terms_per_document = len(vectors.indices) / max(1, n_documents)
    if backend == SEISMIC and n_documents < SEISMIC_DOCUMENTS:
        note(
            f"{n_documents} documents are few for seismic: up to {SEISMIC_DOCUMENTS:,} at least, "
            "--backend exact is built in seconds, smaller, as fast, and misses nothing",
        )
    if backend == SEISMIC and terms_per_document > LONG_VECTOR:
        note(
            f"{terms_per_document:.0f} terms per document are many for seismic, whose time and "
            "size grow with them: tilefold encode --top-k 128 keeps the heaviest",
        )
    return retrieval.build_index(vectors, backend, metadata=metadata, **seismic_options)


def _read_vectors(vectors: Path | None, backend: str) -> Any:
    """Read the encoded documents of ``--vectors``, which an index of the backend needs."""
    if vectors is None:
        raise UsageError(
            f"--backend {backend} indexes encoded documents: give them with --vectors.",
        )
    return _retrievers.read_documents(vectors)


def _metadata(
    data: str | None,
    folder: Path | None,
    vectors: Any,
) -> Mapping[str, Mapping[str, object]] | None:
    """Return the metadata of the documents of ``--data``.

    Args:
        data: value of ``--data``; None returns None.
        folder: folder of the vectors, for messages.
        vectors: vectors of these documents or of their passages.

    Raises:
        CommandError: if the vectors were made from other documents.
    """
    if data is None or folder is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    # Vectors in a folder have their provenance in the manifest.
    provenance = getattr(vectors, "manifest", vectors).provenance
    _scores.check_texts(str(folder), provenance, collection, _scores.texts_of(collection))
    are_passages = provenance.passages is not None
    n_unknown = 0
    for vector_id in vectors.ids:
        document_id = document_of(vector_id) if are_passages else vector_id
        if document_id not in collection.documents:
            n_unknown += 1
    if n_unknown:
        note(
            f"--data: {n_unknown} of the {len(vectors.ids)} of {folder} are not in {data}, and "
            "have no metadata",
        )
    metadata = collection.metadata()
    if not metadata:
        _note_missing_metadata(data)
    return metadata


def _note_missing_metadata(data: str) -> None:
    """Note that the documents of ``--data`` have no metadata."""
    note(
        f"--data: the documents of {data} have no metadata: no fields but an id, a title and a "
        "text",
    )


def _build_late(request: IndexRequest) -> Any:
    """Build an index of token vectors in the folder of ``--output``.

    Args:
        request: options of the command. ``--queries`` names token vectors of queries, on which the
            recall of the search on a CPU is measured.
    """
    queries = None
    if request.queries is not None:
        queries = _read_query_sample(request.queries)
    with _options.option_errors(
        storage="--storage",
        pool_factor="--pool-factor",
        queries="--queries",
        vectors="--tokens",
    ):
        vectors = _retrievers.read_tokens(request.tokens)
        return retrieval.LateIndex.build(
            vectors,
            request.output,
            storage=request.storage or "int8",
            pool_factor=1 if request.pool_factor is None else request.pool_factor,
            queries=queries,
            metadata=_metadata(request.data, request.tokens, vectors),
            overwrite=request.overwrite,
        )


def _read_query_sample(folder: Path) -> TokenVectors:
    """Return the token vectors of the first queries in a folder.

    Args:
        folder: folder of ``encode --queries``.

    Raises:
        UsageError: for vectors of documents, or in int8.
    """
    store = retrieval.open_tokens(folder)
    if store.manifest.kind != "query" or store.manifest.storage == "int8":
        raise UsageError(
            f"--queries: expected vectors in fp16 of encode --queries, got others in {folder}.",
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
        request: options of the command.
        vectors: sparse vectors of the documents.
        metadata: fields of documents by id; None without metadata.
    """
    n_written = 0  # documents; after an interruption, the same command goes on from them
    _common.finished_work_checks.append(lambda: n_written > 0)
    folder: Path | None = request.output
    collection = None
    if request.url is not None:
        folder = None
        collection = request.collection or request.output.resolve().name
    with (
        _options.option_errors(url="--url", weights="--weights", name="--collection"),
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
            folder=folder,
            url=request.url,
            collection=collection,
            weights=request.weights or "float32",
            overwrite=request.overwrite,
            progress=report_progress,
            resumes=report_resumption,
        )


def _change(request: IndexRequest) -> dict[str, int]:
    """Change an index: remove documents, add or replace documents, merge segments.

    Args:
        request: options of the command, which name the index and the changes.

    Returns:
        Numbers of documents: ``written`` and ``deleted``, and ``n_documents`` of the index now.

    Raises:
        UsageError: for options that do not fit the index.
    """
    output = request.output
    backend = read_description(output)["backend"]
    _check_change_fits(request, backend)
    deleted_ids = [] if request.delete is None else _read_ids(request.delete)
    if backend == BM25:
        return _change_words(request, deleted_ids)
    is_late = backend == LATE
    source = request.tokens if is_late else request.vectors
    vectors = None
    if request.update and is_late:
        vectors = _retrievers.read_tokens(source)
    elif request.update:
        vectors = _read_vectors(source, backend)
    metadata = _metadata(request.data, source, vectors)
    if backend == QDRANT:
        return _change_qdrant(output, vectors, deleted_ids, metadata)
    with _options.option_errors(
        metadata="--data",
        vectors="--tokens" if is_late else "--vectors",
        index="--output",
        path="--output",
    ):
        return _change_segments(request, vectors, deleted_ids, metadata)


def _check_change_fits(request: IndexRequest, backend: str) -> None:
    """Raise ``UsageError`` for options that do not fit the index that is changed.

    Args:
        request: options of the command.
        backend: backend of the index at ``--output``.
    """
    output = request.output
    accepted_backends = {None, backend}
    if backend == DENSE:
        accepted_backends.add("exact")
    if request.backend not in accepted_backends:
        raise UsageError(
            f"--backend: {output} is an index of backend {backend}, got {request.backend}.",
        )
    if request.merge and backend in (QDRANT, BM25):
        raise UsageError(
            f"--merge goes with exact, dense, seismic and late indexes; {output} ({backend}) is of "
            "one part.",
        )
    if backend == BM25:
        refuse_options(
            {"--vectors": request.vectors},
            f"does nothing here: {output} is a BM25 index, which reads --data",
        )
        return
    unused_options: dict[str, object] = {"--tokens": request.tokens}
    if backend == LATE:
        unused_options = {"--vectors": request.vectors}
    refuse_options(
        unused_options,
        f"does nothing here: {output} is an index of backend {backend}",
    )


def _change_segments(
    request: IndexRequest,
    vectors: Any,
    deleted_ids: Sequence[str],
    metadata: Mapping[str, Mapping[str, object]] | None,
) -> dict[str, int]:
    """Update an index of segments (exact, dense, seismic, late), and merge its segments.

    Args:
        request: options of the command.
        vectors: of the new documents; None adds none.
        deleted_ids: ids of documents to remove.
        metadata: fields of the new documents by id.

    Returns:
        Numbers of documents, see :func:`_change`.
    """
    from tilefold.retrieval.index.merging import merge_segments, update_index

    counts = {"written": 0, "deleted": 0}
    if request.update or request.delete is not None:
        counts = update_index(request.output, vectors, deleted_ids, metadata=metadata)
    if request.merge:
        counts["n_documents"] = merge_segments(request.output)
    return counts


def _read_ids(path: Path) -> list[str]:
    """Return the ids of documents in a file, one per line."""
    text = _options.read_text(path, "--delete", "utf-8-sig")  # with or without a byte order mark
    # `splitlines` would also divide an id at other characters, such as a form feed.
    return [line for line in text.split("\n") if line.strip()]


def _change_words(request: IndexRequest, deleted_ids: Sequence[str]) -> dict[str, int]:
    """Remove documents from a BM25 index, and add or replace the documents of ``--data``.

    Args:
        request: names the index and the data.
        deleted_ids: ids of documents to remove.

    Returns:
        Numbers of documents, see :func:`_change`.
    """
    output = request.output
    data = request.data if request.update else None
    if data is None and request.update:
        raise UsageError("--update: a BM25 index reads the new documents: give them with --data.")
    with lock_path(output), _options.option_errors(index="--output", documents="--data"):
        index = retrieval.BM25Index.load(output)
        passages = index.provenance.passages
        texts: Mapping[str, str] = {}
        metadata: Mapping[str, Mapping[str, object]] = {}
        if data is not None:
            collection = _common.load_data(data, documents_only=True)
            metadata = collection.metadata()
            if passages is None:
                texts = collection.contents()
            else:
                texts = Passages.parse(passages).of(collection.documents)
            if index.metadata is not None and not metadata:
                # Replaced documents lose their metadata.
                _note_missing_metadata(data)
        n_deleted = len(ids_to_delete(index.ids, set(deleted_ids), (), passages))
        changed = index.updated(texts, deleted_ids, metadata)
        changed.save(output, overwrite=True)
    return {"n_documents": changed.n_documents, "written": len(texts), "deleted": n_deleted}


def _change_qdrant(
    output: Path,
    vectors: Any,
    deleted_ids: list[str],
    metadata: Mapping[str, Mapping[str, object]] | None,
) -> dict[str, int]:
    """Remove documents from a Qdrant index, and add or replace documents.

    Args:
        output: folder of the index.
        vectors: of the new documents; None only removes documents.
        deleted_ids: ids of documents to remove.
        metadata: fields of the new documents by id.

    Returns:
        Numbers of documents, see :func:`_change`.

    Raises:
        CommandError: for vectors that the index cannot hold.
        UsageError: if the index has metadata and the new documents have none.
    """
    from tilefold.retrieval.data.metadata import fields_by_id
    from tilefold.retrieval.index.qdrant import Documents
    from tilefold.retrieval.index.qdrant.index import QdrantIndex

    documents = None
    if vectors is not None:
        documents = Documents(
            vectors.ids,
            vectors,
            payloads=fields_by_id(
                metadata or {},
                vectors.ids,
                ids_are_passages=vectors.provenance.passages is not None,
            ),
        )
    try:
        index = QdrantIndex.load(output)
        with index.collection as collection:
            if documents is not None:
                # Checked before anything is removed.
                documents.check(collection.layout, collection.place)
                if metadata is None and collection.has_metadata():
                    raise UsageError(
                        "--data: expected the fields of the new documents, because the index keeps "
                        "metadata, got none. Without them, filters would not find the documents.",
                    )
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
    }


def _entries_to_delete(
    collection: QdrantCollection,
    deleted_ids: list[str],
    documents: Documents | None,
) -> list[str]:
    """Return the ids of the entries that a change of a Qdrant index deletes first.

    Of an index of passages, these are all passages of the documents that are removed or replaced,
    because a new document may have fewer.

    Args:
        collection: of the index.
        deleted_ids: ids of documents to remove.
        documents: new documents or passages; None only removes documents.
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
            "Folders of vectors of one kind, of the same model and settings.",
        ),
    ]
    output: Annotated[
        Path,
        option(
            "Folder for all of them.",
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
    """Write folders of vectors of different texts as one: sparse, token or dense vectors.

    Example:
        tilefold merge VECTORS MORE_VECTORS --output ALL_VECTORS
    """
    from tilefold.retrieval.index.merging import merge_vectors

    with (
        _options.option_errors(folders="FOLDERS:", output_dir="--output"),
        _common.heartbeat("merging"),
        _common.noting_precisions(),
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
