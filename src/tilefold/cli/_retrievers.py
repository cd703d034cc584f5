"""Options of searches: index, passages, feedback (--prf) and reranking; and loading their files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import Options, option, positive, refuse_options
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.index import DENSE, LATE

if TYPE_CHECKING:
    from tilefold._internal.typing import Model
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Document
    from tilefold.retrieval.data.metadata import Filter, Where
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.search.feedback import Feedback, Interpolation
    from tilefold.retrieval.search.reranking import Reranker, Reranking
    from tilefold.retrieval.search.searcher import Searcher, SearchRequest
    from tilefold.retrieval.vectors.tokens import TokenStore

# Loads the texts of documents, by id.
Texts = Callable[[], Mapping[str, str]]
AnyIndex: TypeAlias = "SparseIndex | BM25Index | DenseIndex | LateIndex"
QUERIES_AT_A_TIME = 1024
# Files of a folder that holds a model of transformers or of sentence-transformers.
_MODEL_FILES = ("config.json", "modules.json")
MODEL_HELP = "The model that made --index; minilm for an index of encode --model minilm."
DENSE_LENGTH = positive(
    "Dense: tokens read of a text, at most; by default as many as the model reads.",
)
WHERE = option(
    "Only documents whose metadata match: lang=de, lang=de,en (one of them), lang!=de, year>=2000, "
    "or lang=null (without the field); may be repeated.",
)


@dataclass(frozen=True, kw_only=True)
class PassageOptions(Options):
    """Options that split documents into passages."""

    HELP_PANEL: ClassVar[str | None] = "Passages"

    passages: Annotated[
        int | None,
        option(
            "Cut texts into passages of at most so many words; documents are then found by their "
            "best one.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        option(
            "Words from the beginning of a passage to that of the next; by default --passages, "
            "without overlap.",
        ),
    ] = None
    cut: Annotated[
        Literal["sentences", "words"] | None,
        option(
            "Where passages begin and end; by default sentences.",
        ),
    ] = None

    def validate(self) -> None:
        """Refuse options of passages without ``--passages``."""
        super().validate()
        if self.passages is None:
            refuse_options(
                {"--stride": self.stride, "--cut": self.cut},
                "goes together with --passages",
            )

    def passage_splitter(self) -> Passages | None:
        """Return how documents are split, or None without ``--passages``."""
        if self.passages is None:
            return None
        from tilefold.retrieval.data.passages import Passages

        with _options.option_errors(length="--passages", stride="--stride", cut="--cut"):
            return Passages(
                self.passages,
                stride=self.stride,
                cut=self.cut or "sentences",
            )


@dataclass(frozen=True, kw_only=True)
class IndexOptions(Options):
    """Options of a search in an index, or in encoded documents.

    Each command declares `index`, `vectors` and `model` again with its own help.
    """

    HELP_PANEL: ClassVar[str | None] = "Search in the index"

    index: Annotated[
        Path | None,
        option("Index to search, with the --model that made it; BM25 has none."),
    ] = None
    vectors: Annotated[Path | None, option("The encoded documents of --index.")] = None
    model: Annotated[str | None, option(MODEL_HELP)] = None
    query_top_k: Annotated[
        int | None,
        positive("Sparse: keep only this many terms of a query."),
    ] = None
    query_cut: Annotated[
        int | None,
        option("seismic: heaviest terms of a query that choose clusters; by default the index's."),
    ] = None
    heap_factor: Annotated[
        float | None,
        option("seismic: lower is slower and closer to exact; by default the index's."),
    ] = None
    candidates: Annotated[
        int | None,
        option("late, on a CPU: documents to score, 0 for all; by default the index's.", min=0),
    ] = None
    other_model: Annotated[
        bool,
        option(
            "Take a model that did not make the vectors, such as a query encoder.",
            "--other-model",
        ),
    ] = False
    device: Annotated[
        str | None,
        option(
            "exact, dense, late: such as cuda; by default the CPU for exact, else a GPU if any.",
        ),
    ] = None

    @property
    def searched_folder(self) -> Path:
        """Folder of the index, or of the encoded documents."""
        folder = self.vectors if self.index is None else self.index
        if folder is None:
            raise UsageError("--index: expected an index to search, got none.")
        return folder

    def refuse_index_options(self, reason: str) -> None:
        """Raise ``UsageError`` if an option of the search in an index was given.

        Args:
            reason: the rest of the message, which starts with the option.
        """
        refuse_options(
            {
                "--query-top-k": self.query_top_k,
                "--query-cut": self.query_cut,
                "--heap-factor": self.heap_factor,
                "--candidates": self.candidates,
                "--other-model": self.other_model,
                "--device": self.device,
            },
            reason,
        )

    def search_options(self, backend: str) -> dict[str, int | float]:
        """Return the options of the search of an index, as :class:`Searcher` takes them.

        Args:
            backend: backend of the index, such as ``"seismic"``.

        Raises:
            UsageError: if an option of another backend was given.
        """
        searched_as = f"{self.searched_folder} is searched as {backend}"
        if backend != "seismic":
            refuse_options(
                {"--query-cut": self.query_cut, "--heap-factor": self.heap_factor},
                f"is for seismic indexes, and {searched_as}",
            )
        if backend != LATE:
            refuse_options(
                {"--candidates": self.candidates},
                f"is for {LATE} indexes, and {searched_as}",
            )
        options: dict[str, int | float] = {}
        if self.query_cut is not None:
            options["query_cut"] = self.query_cut
        if self.heap_factor is not None:
            options["heap_factor"] = self.heap_factor
        if self.candidates is not None:
            options["candidates"] = self.candidates
        return options


@dataclass(frozen=True, kw_only=True)
class RerankOptions(Options):
    """Options of reranking by late interaction."""

    HELP_PANEL: ClassVar[str | None] = "Reranking"

    rerank: Annotated[
        str | None,
        option(
            "Rerank by late interaction: token vectors (tilefold encode), or a multi-vector model, "
            "which encodes candidates; minilm takes the token states of the packaged one.",
        ),
    ] = None
    rerank_model: Annotated[
        str | None,
        option(
            "Multi-vector model of the queries, or minilm; by default that of the token vectors."
        ),
    ] = None
    rerank_depth: Annotated[
        int | None,
        option("Candidates to rerank; by default 100, of evaluate --k or a whole run."),
    ] = None
    rerank_weight: Annotated[
        float | None,
        option(
            "Weight of MaxSim beside the first scores, both in [0, 1]; by default MaxSim alone."
        ),
    ] = None

    def validate(self) -> None:
        """Refuse options of reranking without ``--rerank``."""
        super().validate()
        if self.rerank is None:
            refuse_options(
                {
                    "--rerank-model": self.rerank_model,
                    "--rerank-depth": self.rerank_depth,
                    "--rerank-weight": self.rerank_weight,
                },
                "goes together with --rerank",
            )

    def reranking(
        self,
        depth: int | None = None,
        tail: Literal["keep", "drop"] | None = None,
    ) -> Reranking | None:
        """Return the options of reranking, or None without ``--rerank``.

        Args:
            depth: number of candidates without ``--rerank-depth``.
            tail: what becomes of candidates below that depth, ``"keep"`` (default) or ``"drop"``.
        """
        if self.rerank is None:
            return None
        from tilefold.retrieval.search.reranking import Reranking

        with _options.option_errors(
            depth="--rerank-depth",
            tail="--rerank-tail",
            weight="--rerank-weight",
        ):
            return Reranking(
                depth=depth if self.rerank_depth is None else self.rerank_depth,
                tail=tail or "keep",
                weight=self.rerank_weight,
            )


@dataclass(frozen=True, kw_only=True)
class FeedbackOptions(Options):
    """Options of pseudo-relevance feedback, and of a second ranking around it."""

    HELP_PANEL: ClassVar[str | None] = "Feedback"

    prf: Annotated[
        Literal["average", "rocchio"] | None,
        option(
            "Search again with each query moved towards what it found.",
        ),
    ] = None
    prf_depth: Annotated[
        int | None,
        option("Best documents taken as relevant; by default 3, and 5 for rocchio."),
    ] = None
    prf_terms: Annotated[
        int | None,
        option("Sparse: heaviest terms kept of a query after --prf."),
    ] = None
    prf_alpha: Annotated[
        float | None,
        option("rocchio: weight of the query; by default 0.9 of vectors of equal length."),
    ] = None
    prf_beta: Annotated[
        float | None,
        option("rocchio: weight of the best documents; by default 0.1."),
    ] = None
    prf_equal_lengths: Annotated[
        bool | None,
        option(
            "Bring documents' vectors to the query's length first; by default for rocchio without "
            "weights.",
            "--prf-equal-lengths/--no-prf-equal-lengths",
        ),
    ] = None
    prf_gamma: Annotated[
        float | None,
        option("rocchio: weight of the last documents, subtracted (0)."),
    ] = None
    prf_bottom: Annotated[
        int | None,
        option("rocchio: how many last documents, of 1,000, --prf-gamma is for."),
    ] = None
    prf_with: Annotated[
        Path | None,
        option("A second ranking to interpolate with: a BM25 index, or a TREC run."),
    ] = None
    prf_place: Annotated[
        Literal["before", "after", "both"] | None,
        option(
            "Where to interpolate around feedback; by default both.",
        ),
    ] = None
    prf_weight: Annotated[
        float | None,
        option("Weight of --prf-with in [0, 1], beside the other one (0.5)."),
    ] = None
    prf_normalization: Annotated[
        Literal["min_max", "z_score", "none"] | None,
        option(
            "Before interpolation; by default min_max.",
        ),
    ] = None

    def validate(self) -> None:
        """Raise ``UsageError`` for options of feedback that others make useless.

        Options of feedback go with ``--prf``, options of Rocchio's method with ``--prf rocchio``,
        and options of the second ranking with ``--prf-with``.
        """
        super().validate()
        rocchio_options: dict[str, object] = {
            "--prf-alpha": self.prf_alpha,
            "--prf-beta": self.prf_beta,
            "--prf-gamma": self.prf_gamma,
            "--prf-bottom": self.prf_bottom,
        }
        second_ranking_options: dict[str, object] = {
            "--prf-place": self.prf_place,
            "--prf-weight": self.prf_weight,
            "--prf-normalization": self.prf_normalization,
        }
        sets_equal_lengths = self.prf_equal_lengths is not None
        if self.prf is None:
            refuse_options(
                {
                    "--prf-depth": self.prf_depth,
                    "--prf-terms": self.prf_terms,
                    **rocchio_options,
                    "--prf-equal-lengths/--no-prf-equal-lengths": sets_equal_lengths,
                    "--prf-with": self.prf_with,
                    **second_ranking_options,
                },
                "goes together with --prf",
            )
        if self.prf == "average":
            refuse_options(rocchio_options, "goes with --prf rocchio")
        if self.prf_with is None:
            refuse_options(second_ranking_options, "goes together with --prf-with")
        if (self.prf_gamma is None) != (self.prf_bottom is None):
            raise UsageError(
                "--prf-gamma and --prf-bottom go together: a weight, and how many documents.",
            )

    def feedback(self) -> Feedback | None:
        """Return the options of pseudo-relevance feedback, or None without ``--prf``.

        Raises:
            UsageError: for a value out of range.
        """
        from tilefold.retrieval.search.feedback import Feedback

        if self.prf is None:
            return None
        with _options.option_errors(
            depth="--prf-depth",
            alpha="--prf-alpha",
            beta="--prf-beta",
            gamma="--prf-gamma",
            bottom="--prf-bottom",
            top_terms="--prf-terms",
            equal_lengths="--prf-equal-lengths",
        ):
            return Feedback(
                self.prf,
                depth=self.prf_depth,
                alpha=self.prf_alpha,
                beta=self.prf_beta,
                gamma=0.0 if self.prf_gamma is None else self.prf_gamma,
                bottom=0 if self.prf_bottom is None else self.prf_bottom,
                top_terms=self.prf_terms,
                equal_lengths=self.prf_equal_lengths,
            )

    def interpolation(self) -> Interpolation | None:
        """Return the options of interpolation with a second ranking, or None without one.

        Raises:
            UsageError: for a value out of range.
        """
        from tilefold.retrieval.search.feedback import Interpolation

        if self.prf_with is None:
            return None
        with _options.option_errors(
            place="--prf-place",
            weight="--prf-weight",
            normalization="--prf-normalization",
        ):
            return Interpolation(
                place=self.prf_place or "both",
                weight=0.5 if self.prf_weight is None else self.prf_weight,
                normalization=self.prf_normalization or "min_max",
            )


@dataclass(frozen=True)
class LoadedIndex:
    """An index, the model that encodes queries for it, and options of its search.

    Attributes:
        index: of any backend.
        model: None for BM25, which reads words.
        search_options: options of the search that were given, as :class:`Searcher` takes them.
    """

    index: AnyIndex
    model: Model | None
    search_options: Mapping[str, int | float]


def load_index(request: IndexOptions, texts: Texts | None) -> LoadedIndex:
    """Load the index of ``--index`` or ``--vectors``, and the model of ``--model``.

    Args:
        request: names the index and the model.
        texts: loads the documents of ``--data``, from which the untrained start is made again if it
            is not in the cache. None without ``--data``.

    Raises:
        CommandError: if another model made the index, without ``--other-model``.
        UsageError: for options that do not fit the index.
    """
    index = move_to_device(_open_index(request), request.device, request.searched_folder)
    search_options = request.search_options(index.backend)
    if index.backend == "bm25":
        refuse_options(
            {
                "--model": request.model,
                "--query-top-k": request.query_top_k,
                "--other-model": request.other_model,
            },
            f"does nothing here: {request.searched_folder} is a BM25 index, which reads words",
        )
        return LoadedIndex(index, None, {})
    model_name = request.model
    if model_name is None:
        raise UsageError(
            f"--index: {request.searched_folder} holds vectors; name the model that made them with "
            "--model.",
        )
    encoder = _load_query_encoder(request, model_name, index.backend, index.provenance, texts)
    _check_model_of_index(request, model_name, encoder, index.provenance)
    return LoadedIndex(index, encoder, search_options)


def _open_index(request: IndexOptions) -> Any:
    """Open the index of ``--index``, or build one of the encoded documents of ``--vectors``."""
    from tilefold.retrieval.index.opening import open_index

    if request.index is not None:
        return open_index(request.index)
    vectors = read_documents(request.vectors)
    if isinstance(vectors, retrieval.SparseVectors):
        return retrieval.build_index(vectors)
    return retrieval.DenseIndex.build(vectors)


def _check_model_of_index(
    request: IndexOptions,
    model_name: str,
    encoder: Model,
    made_by: Provenance,
) -> None:
    """Refuse a model that did not make the vectors of an index, or note it with ``--other-model``.

    Args:
        request: names the index.
        model_name: value of ``--model``.
        encoder: the model.
        made_by: provenance of the index.
    """
    from tilefold.retrieval.search.searcher import check_model

    folder = request.searched_folder
    try:
        is_recorded = check_model(made_by, encoder, model_name, f"the index {folder}")
    except ValueError as error:
        if not request.other_model:
            raise CommandError(f"--{error}") from error
        note(f"--model: {model_name} is not the model that made the index {folder}")
        return
    if not is_recorded:
        note(
            f"--index: {folder} does not say which model made it, so that {model_name} could not "
            "be compared with it",
        )


def _load_query_encoder(
    request: IndexOptions,
    model: str,
    backend: str,
    made_by: Provenance,
    texts: Texts | None,
) -> Model:
    """Load the model that encodes queries for an index of vectors.

    Args:
        request: names the index.
        model: the name of the model.
        backend: the backend of the index.
        made_by: provenance of the index.
        texts: loads the documents of ``--data``, from which the untrained start is made again.
    """
    source = request.searched_folder
    if backend in (DENSE, LATE):
        kind = "dense" if backend == DENSE else "multi-vector"
        _refuse_sparse_options(request, backend, f"{source} holds {_models.VECTORS[kind]}")
        encoder: Model = _models.load_model(model, kinds=(kind,))[0]
        return encoder
    if model != _models.PACKAGED:
        return _models.load_encoder(model)
    if made_by.texts_sha256 is None:
        raise UsageError(
            f"--model: {model} is the untrained start for the documents of an index, and {source} "
            "does not say which those are: give the folder of the model that made it.",
        )
    return _models.load_untrained(made_by.texts_sha256, texts, f"the documents of {source}")


def _refuse_sparse_options(request: IndexOptions, backend: str, reason: str) -> None:
    """Refuse options of sparse queries for an index of dense or token vectors."""
    options: dict[str, object] = {"--query-top-k": request.query_top_k}
    if backend == DENSE and isinstance(request, FeedbackOptions):
        options["--prf-terms"] = request.prf_terms
    if backend == LATE:
        if isinstance(request, FeedbackOptions):
            options["--prf"] = request.prf
        options["--vectors"] = request.vectors
    refuse_options(options, f"is for sparse queries, and {reason}")


def move_to_device(index: Any, device: str | None, path: Path) -> Any:
    """Return an index whose data is on a device, as ``--device`` says.

    Args:
        index: the index.
        device: value of ``--device``; None leaves the index where it is.
        path: folder of the index, for messages.

    Raises:
        UsageError: for an index that is searched on the CPU only, or a device that does not exist
            or has too little memory.
    """
    if device is None:
        return index
    if index.backend not in ("exact", DENSE, LATE):
        raise UsageError(
            f"--device goes with exact, dense and late indexes; {path} is searched as "
            f"{index.backend}.",
        )
    try:
        return index.on(device)
    except (RuntimeError, AssertionError) as error:  # torch raises both
        raise UsageError(
            f"--device: {path} cannot be searched on {device} ({_common.first_line(error)}).",
        ) from error


@dataclass(frozen=True)
class SearcherParts:
    """Optional parts of a searcher, as :class:`Searcher` takes them."""

    documents: Mapping[str, Document] | None = None
    vectors: Path | None = None
    second: BM25Index | Run | None = None
    late: Model | None = None
    tokens: TokenStore | None = None


def open_searcher(
    request: IndexOptions,
    texts: Texts | None,
    load: Callable[[Provenance], SearcherParts],
) -> Searcher:
    """Load an index and its model, and open a searcher of them with its optional parts.

    Args:
        request: names the index, the model and the options of the search.
        texts: loads the documents of ``--data``.
        load: loads the optional parts, such as documents or a reranker, given the provenance of the
            index.

    Raises:
        UsageError: for options that do not fit the index.
    """
    from tilefold.retrieval.search.searcher import Searcher

    loaded = load_index(request, texts)
    parts = load(loaded.index.provenance)
    prf = None
    second = None
    if isinstance(request, FeedbackOptions):
        prf = request.prf
        second = request.prf_with
    if loaded.index.backend == DENSE and request.index is not None:
        refuse_options(
            {"--vectors": request.vectors},
            f"does nothing here: {request.index} holds its own vectors",
        )
    elif loaded.model is not None and prf is not None and parts.vectors is None:
        raise UsageError(
            "--prf reads the vectors of the documents found: give them with --vectors.",
        )
    option_errors = _options.option_errors(
        vectors="--vectors",
        second=f"--prf-with: {second}",
        tokens="--rerank",
        model="--rerank-model",
    )
    with option_errors, _common.noting_precisions():
        return Searcher(
            loaded.index,
            loaded.model,
            documents=parts.documents,
            vectors=parts.vectors,
            second=parts.second,
            late=parts.late,
            tokens=parts.tokens,
            query_top_k=request.query_top_k,
            options=loaded.search_options,
            other_model=True,  # load_index has checked the model
        )


def parse_filter(conditions: list[str] | None, searcher: Searcher) -> Filter | None:
    """Parse the conditions of ``--where`` into a filter, and check them against the index.

    A note is printed if no document matches.

    Args:
        conditions: values of ``--where``; None returns None.
        searcher: its index knows the fields of the documents' metadata, and their types.

    Raises:
        UsageError: for a condition that cannot be parsed, or on an unknown field.
    """
    from tilefold.retrieval.data.metadata import Filter

    if not conditions:
        return None
    index: Any = getattr(searcher.retriever, "index", None)
    with _options.option_errors(where="--where"):
        where = Filter.parse(conditions, _field_kinds(index))
        matching = count_matching(index, where)
    if not matching:
        note(f"--where: none of the {index.n_documents} documents of the index matches")
    return where


def _field_kinds(index: Any) -> Mapping[str, Sequence[str]] | None:
    """Return field -> kinds of its values in an index; None if they are unknown."""
    if index.backend == "qdrant":
        kinds: Mapping[str, Sequence[str]] | None = index.collection.field_kinds
        return kinds
    return None if index.metadata is None else index.metadata.kinds


def count_matching(index: Any, where: Where) -> int:
    """Number of documents of an index that match a filter."""
    from tilefold.retrieval.data.metadata import allowed_by

    if index.backend == "qdrant":
        return int(index.collection.count(where))
    allowed = allowed_by(index.metadata, where)
    return index.n_documents if allowed is None else int(allowed.sum())


def reason_without_hits(searcher: Searcher, where: Where) -> str:
    """Return why a query has no hits: no documents, none that matches, or none with its terms.

    Args:
        searcher: searched the index.
        where: the filter of the search; None without one.
    """
    index: Any = getattr(searcher.retriever, "index", None)
    if not index.n_documents:
        return "the index has no documents"
    if where is None:
        return "no document shares a term with this query"
    if not count_matching(index, where):
        return "no document matches --where"
    return "no document that matches --where shares a term with this query"


def ranked(
    searcher: Searcher,
    queries: Mapping[str, str],
    request: SearchRequest,
    ignored_identical_ids: set[str] | None = None,
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Rank queries in chunks, and yield the documents of each query with their scores.

    They are reranked if the request asks for it. A progress bar shows the number of queries.

    Args:
        searcher: what searches.
        queries: query id -> text.
        request: options of the search.
        ignored_identical_ids: set to which queries are added whose document of the same id was
            left out; None adds none.

    Yields:
        Query id, and document id -> score of its first ``request.k`` documents.
    """
    remaining = iter(queries.items())
    n_done = 0
    with _common.progress_bar("searching") as update:
        while chunk := dict(itertools.islice(remaining, QUERIES_AT_A_TIME)):
            ranking = searcher.rank(chunk, request)
            if ignored_identical_ids is not None:
                ignored_identical_ids |= ranking.ignored_identical_ids
            if request.reranking is not None:
                ranking = searcher.rerank(chunk, ranking, request.reranking)
            for query, scores in ranking.run.items():
                yield query, dict(itertools.islice(scores.items(), request.k))
            n_done += len(chunk)
            update(n_done, len(queries))


def read_documents(path: Path | None) -> Any:
    """Read the encoded documents of ``--vectors``.

    Args:
        path: folder of the vectors; None is refused.

    Returns:
        ``SparseVectors`` or ``DenseVectors``.

    Raises:
        UsageError: for a folder of queries, or no folder.
    """
    from tilefold.retrieval.vectors.sparse_files import layout_of

    if path is None:
        raise UsageError("--vectors: expected a folder of encoded documents, got none.")
    if layout_of(path) == "dense":
        vectors = retrieval.open_dense(path)
        _check_are_documents(path, vectors.manifest.kind)
        return vectors
    _check_are_documents(path, retrieval.read_manifest(path).kind)
    return retrieval.read_vectors(path)


def _check_are_documents(path: Path, kind: str) -> None:
    """Raise ``UsageError`` unless the vectors in a folder are of documents."""
    if kind != "document":
        raise UsageError(
            f"--vectors: {path} holds {kind} vectors; encode documents without --queries.",
        )


def read_tokens(path: Path | None) -> Any:
    """Return the token vectors of ``--tokens``: a folder of ``tilefold encode``, or one file."""
    if path is None:
        raise UsageError("--backend late indexes token vectors: give them with --tokens.")
    if path.is_file():
        from tilefold.retrieval.vectors.token_files import read_token_file

        return read_token_file(path)
    return retrieval.open_tokens(path)


def open_dense(
    request: IndexOptions,
    texts: Mapping[str, str],
    max_length: int | None,
    second: BM25Index | Run | None = None,
) -> Searcher:
    """Encode `texts` with the dense model of ``--model``, and return a searcher of them.

    Args:
        request: names the model.
        texts: documents by id.
        max_length: tokens read of a text. None reads as many as the model does.
        second: a second ranking of the same documents.
    """
    from tilefold.retrieval.search.searcher import Searcher

    if isinstance(request, FeedbackOptions):
        refuse_options(
            {"--prf-terms": request.prf_terms},
            "is for sparse queries, and this model is dense",
        )
    refuse_options(
        {"--vectors": request.vectors},
        "does nothing here: --model is a dense model, which encodes the documents itself",
    )
    model, _ = _models.load_model(str(request.model), kinds=("dense",))
    _models.limit_length(model, max_length)
    with _common.progress_bar("encoding") as update:
        index = retrieval.encoded_index(model, texts, progress=update)
        return Searcher(index, model, second=second)


def second_ranking(
    path: Path | None,
    queries: Mapping[str, str],
    texts: Provenance,
) -> BM25Index | Run | None:
    """Load the second ranking of ``--prf-with``: a BM25 index, or a run of the queries.

    Args:
        path: the index or the run. None returns None.
        queries: texts of the queries by id, whose rankings are taken from a run.
        texts: provenance of the documents that are searched; an empty one is not compared.

    Raises:
        CommandError: if it was made from other documents, or a run has none of the queries.
        UsageError: for an index of vectors.
    """
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.index.opening import open_index

    if path is None:
        return None
    second = open_index(path) if path.is_dir() else _scores.read_run(path, "--prf-with")
    if "texts_sha256" in texts.differing_fields(second.provenance):
        raise CommandError(
            f"--prf-with: {path} was made from other documents than those that are searched.",
        )
    if isinstance(second, BM25Index):
        return second
    if not isinstance(second, _scores.NamedRun):
        remedy = "give a BM25 index, or save its run and give that: tilefold evaluate --save-run."
        raise UsageError(f"--prf-with: {path} is an index of vectors; {remedy}")
    run = {query: second.run[query] for query in queries if query in second.run}
    if not run:
        raise CommandError(f"{second.name}: no result for any of the {len(queries)} queries.")
    if len(run) < len(queries):
        note(f"{second.name}: results for {len(run)} of the {len(queries)} queries")
    return run


def load_reranker(
    source: str,
    model: str | None,
    documents: Mapping[str, Document],
    texts: Provenance,
) -> Reranker:
    """Load the reranker of ``--rerank``.

    Args:
        source: a folder of token vectors, or a multi-vector model.
        model: the model of ``--rerank-model``.
        documents: documents by id, whose texts are encoded without token vectors.
        texts: provenance of the documents.
    """
    from tilefold.retrieval.search.reranking import Reranker

    late, tokens = load_late(source, model, has_texts=True)
    option_errors = _options.option_errors(tokens="--rerank", model="--rerank-model")
    with option_errors, _common.noting_precisions():
        return Reranker(late, tokens, documents, texts)


def load_late(
    source: str,
    model: str | None,
    has_texts: bool,
    option: str = "--rerank",
) -> tuple[Any, TokenStore | None]:
    """Load a multi-vector model that reranks, and the token vectors of documents that it made.

    Args:
        source: value of the option: a folder of token vectors, or a multi-vector model.
        model: name of the model that made the token vectors; None reads it from their folder.
        has_texts: whether the command has the texts of documents, which a model without token
            vectors encodes.
        option: the option that names `source`, for messages. That of `model` ends in ``-model``.

    Returns:
        The model, and the token vectors; None in their place if `source` is a model.

    Raises:
        UsageError: for a source that holds neither, and for options that do not fit it.
    """
    folder = Path(source)
    is_packaged = source == _models.PACKAGED
    if not is_packaged and (folder / "manifest.json").is_file():
        store = retrieval.open_tokens(folder)
        made_by = model or _recorded_model(store, option)
        encoder, _ = _models.load_model(made_by, f"{option}-model", ("multi-vector",))
        return encoder, store
    # A source that is no folder is a name on the Hugging Face hub.
    holds_model = is_packaged or any((folder / name).is_file() for name in _MODEL_FILES)
    if folder.is_dir() and not holds_model:
        remedy = "make token vectors with: tilefold encode --model MULTI_VECTOR_MODEL"
        raise UsageError(f"{option}: {source} holds neither token vectors nor a model; {remedy}")
    if model is not None:
        raise UsageError(
            f"{option}-model goes with token vectors in {option}, which here is a model itself.",
        )
    if not has_texts:
        raise UsageError(
            f"{option} with a model encodes the candidates' texts: give the collection with "
            "--data.",
        )
    encoder, _ = _models.load_model(source, option, ("multi-vector",))
    return encoder, None


def _recorded_model(store: TokenStore, option: str) -> str:
    """Return the name or folder of the model that made token vectors.

    Args:
        store: the token vectors.
        option: the option that names them, for messages.

    Raises:
        UsageError: if it is not recorded, or no longer in its folder.
    """
    name = store.manifest.model_source
    if name is None:
        state = "unknown"
    elif Path(name).is_absolute() and not Path(name).is_dir():
        state = f"no longer in {name}"
    else:
        return name
    raise UsageError(
        f"{option}: the model that made {store.folder} is {state}; name it with {option}-model.",
    )
