"""Search options (index, passages, feedback, reranking), and loading the files that they name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DtypeOptions, Options, option, positive, refuse_options
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.index import DENSE, LATE

if TYPE_CHECKING:
    from tilefold._internal.precision import Dtype
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

# A function that loads the texts of documents, by id.
AnyIndex: TypeAlias = "SparseIndex | BM25Index | DenseIndex | LateIndex"
QUERIES_AT_A_TIME = 1024
_BACKENDS_ON_DEVICES = ("exact", DENSE, LATE)  # the backends that a GPU can search
# A folder with one of these files holds a model of transformers or of sentence-transformers.
_MODEL_FILES = ("config.json", "modules.json")
MODEL_HELP = "The model that encoded --index; minilm for an index of encode --model minilm."
DENSE_LENGTH = positive(
    "Dense: maximum tokens per text; by default the maximum of the model.",
)
WHERE = option(
    "Only documents whose metadata match: lang=de, lang=de,en (either), lang!=de, year>=2000, or "
    "lang=null (without the field); may be repeated.",
)


@dataclass(frozen=True, kw_only=True)
class PassageOptions(Options):
    """Options that split documents into passages."""

    HELP_PANEL: ClassVar[str | None] = "Passages"

    passages: Annotated[
        int | None,
        option(
            "Largest number of words of a passage. Documents are split into passages, and a search "
            "ranks documents by their best passage.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        option(
            "Words from the start of a passage to the start of the next; by default --passages, "
            "without overlap.",
        ),
    ] = None
    cut: Annotated[
        Literal["sentences", "words"] | None,
        option(
            "Whether passages begin and end at sentences (default) or at words.",
        ),
    ] = None

    def validate(self) -> None:
        """Raise ``UsageError`` for options of passages without ``--passages``."""
        super().validate()
        if self.passages is None:
            refuse_options(
                {"--stride": self.stride, "--cut": self.cut},
                "requires --passages",
            )

    def passage_splitter(self) -> Passages | None:
        """Return the splitter of ``--passages``, or None if documents are not split."""
        if self.passages is None:
            return None
        from tilefold.retrieval.data.passages import Passages

        with _options.errors_name_options(length="--passages", stride="--stride", cut="--cut"):
            return Passages(
                self.passages,
                stride=self.stride,
                cut=self.cut or "sentences",
            )


@dataclass(frozen=True, kw_only=True)
class IndexOptions(DtypeOptions):
    """Options of a search in an index, or in encoded documents without an index.

    A command may declare `index`, `vectors` and `model` again with its own help.
    """

    HELP_PANEL: ClassVar[str | None] = "Search in the index"

    index: Annotated[
        Path | None,
        option("Index to search, with the --model that encoded it; BM25 needs no model."),
    ] = None
    vectors: Annotated[Path | None, option("The encoded documents of --index.")] = None
    model: Annotated[str | None, option(MODEL_HELP)] = None
    query_top_k: Annotated[
        int | None,
        positive("Sparse: keep only this many terms of a query."),
    ] = None
    query_cut: Annotated[
        int | None,
        option(
            "seismic: heaviest query terms that choose clusters; by default the index's number."
        ),
    ] = None
    heap_factor: Annotated[
        float | None,
        option("seismic: lower is slower and closer to exact; by default the index's factor."),
    ] = None
    candidates: Annotated[
        int | None,
        option(
            "late, on a CPU: documents to score, 0 for all; by default the index's number.",
            min=0,
        ),
    ] = None
    other_model: Annotated[
        bool,
        option(
            "Allow a model that did not encode the documents, such as a query encoder.",
            "--other-model",
        ),
    ] = False
    device: Annotated[
        str | None,
        option(
            "exact, dense, late: device, such as cuda, or several for exact and late, such as "
            "cuda:0,cuda:1; by default the CPU for exact, otherwise a GPU if there is one.",
        ),
    ] = None

    @property
    def searched_folder(self) -> Path:
        """The folder of the index, or of the encoded documents."""
        folder = self.vectors if self.index is None else self.index
        if folder is None:
            raise UsageError("--index: expected an index to search, got none.")
        return folder

    def refuse_index_options(self, reason: str) -> None:
        """Raise ``UsageError`` if an option of the search in an index was given.

        Args:
            reason: the predicate of the message, whose subject is the option.
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
        """Return the options of a search in an index that were given, by their names in Python.

        Args:
            backend: the backend (kind) of the index, such as ``"seismic"``.

        Raises:
            UsageError: if an option of another backend was given.
        """
        folder = self.searched_folder
        if backend != "seismic":
            refuse_options(
                {"--query-cut": self.query_cut, "--heap-factor": self.heap_factor},
                f"requires an index of backend seismic; {folder} has the backend {backend}",
            )
        if backend != LATE:
            refuse_options(
                {"--candidates": self.candidates},
                f"requires an index of backend {LATE}; {folder} has the backend {backend}",
            )
        options = {
            "query_cut": self.query_cut,
            "heap_factor": self.heap_factor,
            "candidates": self.candidates,
        }
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RerankOptions(Options):
    """Options of reranking by late interaction."""

    HELP_PANEL: ClassVar[str | None] = "Reranking"

    rerank: Annotated[
        str | None,
        option(
            "Rerank by late interaction: a folder of token vectors (tilefold encode), or a "
            "multi-vector model, which encodes the candidates; minilm takes the token states of "
            "the packaged model.",
        ),
    ] = None
    rerank_model: Annotated[
        str | None,
        option(
            "Multi-vector model that encodes the queries, or minilm; by default the model of the "
            "token vectors.",
        ),
    ] = None
    rerank_depth: Annotated[
        int | None,
        option("Candidates to rerank; by default 100, for evaluate --k or the whole run."),
    ] = None
    rerank_weight: Annotated[
        float | None,
        option(
            "Weight of MaxSim in a sum with the first scores, both scaled to [0, 1]; by default "
            "only MaxSim counts.",
        ),
    ] = None

    def validate(self) -> None:
        """Raise ``UsageError`` for options of reranking without ``--rerank``."""
        super().validate()
        if self.rerank is None:
            refuse_options(
                {
                    "--rerank-model": self.rerank_model,
                    "--rerank-depth": self.rerank_depth,
                    "--rerank-weight": self.rerank_weight,
                },
                "requires --rerank",
            )

    def reranking(
        self,
        depth: int | None = None,
        tail: Literal["keep", "drop"] = "keep",
    ) -> Reranking | None:
        """Return the options of reranking, or None without ``--rerank``.

        Args:
            depth: the default of ``--rerank-depth``; None takes that of :class:`Reranking`.
            tail: whether candidates below that depth are kept or dropped.
        """
        if self.rerank is None:
            return None
        from tilefold.retrieval.search.reranking import Reranking

        with _options.errors_name_options(
            depth="--rerank-depth",
            tail="--rerank-tail",
            weight="--rerank-weight",
        ):
            return Reranking(
                depth=depth if self.rerank_depth is None else self.rerank_depth,
                tail=tail,
                weight=self.rerank_weight,
            )


@dataclass(frozen=True, kw_only=True)
class FeedbackOptions(Options):
    """Options of pseudo-relevance feedback, and of a second ranking around it."""

    HELP_PANEL: ClassVar[str | None] = "Feedback"

    prf: Annotated[
        Literal["average", "rocchio"] | None,
        option(
            "Search again with each query moved towards its best documents.",
        ),
    ] = None
    prf_depth: Annotated[
        int | None,
        option("Number of best documents that are taken as relevant; by default 3, for rocchio 5."),
    ] = None
    prf_terms: Annotated[
        int | None,
        option("Sparse: number of heaviest query terms that are kept after --prf."),
    ] = None
    prf_alpha: Annotated[
        float | None,
        option("rocchio: weight of the query; by default 0.9, with vectors of equal length."),
    ] = None
    prf_beta: Annotated[
        float | None,
        option("rocchio: weight of the best documents; by default 0.1."),
    ] = None
    prf_equal_lengths: Annotated[
        bool | None,
        option(
            "Scale the documents' vectors to the query's length first; by default only for rocchio "
            "without given weights.",
            "--prf-equal-lengths/--no-prf-equal-lengths",
        ),
    ] = None
    prf_gamma: Annotated[
        float | None,
        option("rocchio: weight of the last documents, which are subtracted; by default 0."),
    ] = None
    prf_bottom: Annotated[
        int | None,
        option("rocchio: number of last documents, of 1,000, that --prf-gamma subtracts."),
    ] = None
    prf_with: Annotated[
        Path | None,
        option("A second ranking to interpolate with: a BM25 index, or a TREC run."),
    ] = None
    prf_place: Annotated[
        Literal["before", "after", "both"] | None,
        option(
            "Interpolate before feedback, after it, or both (default).",
        ),
    ] = None
    prf_weight: Annotated[
        float | None,
        option("Weight of --prf-with, from 0 to 1; by default 0.5."),
    ] = None
    prf_normalization: Annotated[
        Literal["min_max", "z_score", "none"] | None,
        option(
            "Normalisation of the scores before interpolation; by default min_max.",
        ),
    ] = None

    def validate(self) -> None:
        """Raise ``UsageError`` if an option of feedback has no effect.

        Options of feedback require ``--prf``, options of Rocchio's method ``--prf rocchio``, and
        options of the second ranking ``--prf-with``.
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
        if self.prf is None:
            refuse_options(
                {
                    "--prf-depth": self.prf_depth,
                    "--prf-terms": self.prf_terms,
                    **rocchio_options,
                    "--prf-equal-lengths": self.prf_equal_lengths is not None,
                    "--prf-with": self.prf_with,
                    **second_ranking_options,
                },
                "requires --prf",
            )
        if self.prf == "average":
            refuse_options(rocchio_options, "requires --prf rocchio")
        if self.prf_with is None:
            refuse_options(second_ranking_options, "requires --prf-with")
        if (self.prf_gamma is None) != (self.prf_bottom is None):
            raise UsageError(
                "--prf-gamma and --prf-bottom must be given together: the weight of the last "
                "documents, and their number.",
            )

    def feedback(self) -> Feedback | None:
        """Return the options of pseudo-relevance feedback, or None without ``--prf``.

        Raises:
            UsageError: if a value is out of range.
        """
        from tilefold.retrieval.search.feedback import Feedback

        if self.prf is None:
            return None
        with _options.errors_name_options(
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
                gamma=self.prf_gamma or 0.0,
                bottom=self.prf_bottom or 0,
                top_terms=self.prf_terms,
                equal_lengths=self.prf_equal_lengths,
            )

    def interpolation(self) -> Interpolation | None:
        """Return how the ranking of ``--prf-with`` is interpolated, or None without that option.

        Its scores are mixed with those of the search before or after pseudo-relevance feedback, or
        both.

        Raises:
            UsageError: if a value is out of range.
        """
        from tilefold.retrieval.search.feedback import Interpolation

        if self.prf_with is None:
            return None
        with _options.errors_name_options(
            place="--prf-place",
            weight="--prf-weight",
            normalization="--prf-normalization",
        ):
            # An option that was not given has the default value of its field.
            return Interpolation(
                place=self.prf_place or Interpolation.place,
                weight=Interpolation.weight if self.prf_weight is None else self.prf_weight,
                normalization=self.prf_normalization or Interpolation.normalization,
            )


@dataclass(frozen=True)
class LoadedIndex:
    """An index, the model that encodes queries for it, and search options.

    Attributes:
        index: the index, of any backend.
        model: the model; None for a BM25 index.
        search_options: name -> value of search options that were given, such as ``query_cut``.
    """

    index: AnyIndex
    model: Model | None
    search_options: Mapping[str, int | float]


def load_index(request: IndexOptions, fast: tuple[str, ...] = ("sparse",)) -> LoadedIndex:
    """Load the index of ``--index`` or ``--vectors``, and the model of ``--model``.

    Args:
        request: the options that name the index and the model.
        fast: the kinds of models, such as ``"dense"``, that run with tilefold's kernels.

    Raises:
        CommandError: if the index was made by a different model and ``--other-model`` is not given.
        UsageError: if options do not fit the index.
    """
    index = move_to_device(_open_index(request), request.device, request.searched_folder)
    check_index_options(request, index.backend)
    if index.backend == "bm25":
        return LoadedIndex(index, None, {})
    model_name = str(request.model)
    encoder = _load_query_encoder(request, model_name, index, fast)
    _models.print_precision(model_name, encoder)
    _check_model_of_index(request, model_name, encoder, index.provenance)
    return LoadedIndex(index, encoder, request.search_options(index.backend))


def reopen_index(request: IndexOptions, opened: AnyIndex) -> LoadedIndex:
    """Open the index of ``--index`` again after its folder has changed, without loading its model.

    Args:
        request: the options that name the index and the model.
        opened: the index as it was opened before, whose unchanged parts are used again.

    Raises:
        UsageError: if options do not fit the index.
    """
    from tilefold.retrieval.index.opening import open_index

    folder = request.searched_folder
    index = move_to_device(open_index(folder, opened=opened), request.device, folder)
    check_index_options(request, index.backend)
    return LoadedIndex(index, None, request.search_options(index.backend))


def check_index_options(request: IndexOptions, backend: str) -> None:
    """Check that options fit the backend of the index that they name.

    Args:
        request: the options that name the index and the model.
        backend: the backend of the index, such as ``"exact"``.

    Raises:
        UsageError: if an option is of another backend, or an index of vectors has no ``--model``.
    """
    request.search_options(backend)  # raises an error for an option of another backend
    if backend == "bm25":
        refuse_options(
            {
                "--model": request.model,
                "--query-top-k": request.query_top_k,
                "--other-model": request.other_model,
            },
            f"has no effect: {request.searched_folder} is a BM25 index, which reads words",
        )
        if not _loads_reranker(request):
            request.refuse_dtype(
                f"has no effect: {request.searched_folder} is a BM25 index, which needs no model",
            )
    elif request.model is None:
        raise UsageError(
            f"--index: {request.searched_folder} holds vectors; name the model that made them with "
            "--model.",
        )


def _loads_reranker(request: IndexOptions) -> bool:
    """Return whether a command loads a model that reranks, besides the model of its index."""
    if isinstance(request, RerankOptions):
        return request.rerank is not None
    return getattr(request, "tokens", None) is not None  # `tilefold serve` has --tokens instead


def _open_index(request: IndexOptions) -> Any:
    """Open the index of ``--index``, or build one from the encoded documents of ``--vectors``."""
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
    index_provenance: Provenance,
) -> None:
    """Check that a model encoded the documents of an index, by its fingerprint.

    With ``--other-model``, a different model is accepted, and a note is printed.

    Args:
        request: the options that name the index.
        model_name: the value of ``--model``.
        encoder: the model.
        index_provenance: what the index was made from, with the fingerprint of its model.

    Raises:
        CommandError: if it is a different model and ``--other-model`` is not given.
    """
    from tilefold.retrieval.search.searcher import check_model

    folder = request.searched_folder
    try:
        is_recorded = check_model(index_provenance, encoder, model_name, f"the index {folder}")
    except ValueError as error:
        if not request.other_model:
            # The text begins with "model: ", which becomes the option.
            raise CommandError(f"--{error}") from error
        note(f"--model: {model_name} is not the model that made the index {folder}")
        return
    if not is_recorded:
        note(
            f"--index: {folder} does not record which model made it, so {model_name} could not be "
            "checked",
        )


def _load_query_encoder(
    request: IndexOptions,
    model_name: str,
    index: Any,
    fast: tuple[str, ...],
) -> Model:
    """Load the model that encodes queries for an index of vectors.

    Args:
        request: the options that name the index.
        model_name: the value of ``--model``.
        index: the index.
        fast: the kinds of models, such as ``"dense"``, that run with tilefold's kernels.
    """
    if index.backend in (DENSE, LATE):  # an index of dense vectors, or of token vectors
        kind = "dense" if index.backend == DENSE else "multi-vector"
        reason = f"{request.searched_folder} holds {_models.VECTORS[kind]}"
        _refuse_sparse_options(request, index.backend, reason)
        model, _ = _models.load_model(
            model_name,
            kinds=(kind,),
            fast=fast,
            dtype=request.dtype,
        )
        encoder: Model = model
        return encoder
    return _models.load_encoder(model_name, request.dtype)


def _refuse_sparse_options(request: IndexOptions, backend: str, reason: str) -> None:
    """Raise ``UsageError`` for options of sparse vectors, with an index of dense or token vectors.

    Args:
        request: the options.
        backend: ``"dense"``, or ``"late"`` for an index of token vectors.
        reason: why the options do not fit, for the message.
    """
    options: dict[str, object] = {"--query-top-k": request.query_top_k}
    if isinstance(request, FeedbackOptions):
        if backend == DENSE:
            options["--prf-terms"] = request.prf_terms
        else:  # token vectors have no feedback at all
            options["--prf"] = request.prf
    if backend == LATE:
        options["--vectors"] = request.vectors
    refuse_options(options, f"cannot be used, because {reason}")


def device_names(device: str) -> list[str]:
    """Return the devices of ``--device``, which have commas between them."""
    return [name.strip() for name in device.split(",")]


def move_to_device(index: Any, device: str | None, path: Path) -> Any:
    """Return an index whose data was moved to the device of ``--device``.

    Args:
        index: the index.
        device: the value of ``--device``, a device or several with commas between them; None
            leaves the index where it is.
        path: the folder of the index, for messages.

    Raises:
        UsageError: if only a CPU or only one device can search the index, or if a device does not
            exist or has too little memory.
    """
    if device is None:
        return index
    if index.backend not in _BACKENDS_ON_DEVICES:
        raise UsageError(
            f"--device requires an exact, dense or late index; {path} has the backend "
            f"{index.backend}.",
        )
    try:
        with _options.errors_name_options(device="--device"):
            return index.on(device_names(device))
    except (RuntimeError, AssertionError) as error:  # torch raises both
        raise UsageError(
            f"--device: {path} cannot be searched on {device} ({_common.first_line(error)}).",
        ) from error


@dataclass(frozen=True)
class SearcherParts:
    """Optional parts of a searcher, in addition to its index and its model.

    Attributes:
        documents: the documents by id, whose titles and passages hits show.
        vectors: the folder of the encoded documents, for feedback and matched terms.
        second: the ranking of ``--prf-with``, which is interpolated with that of the index.
        late: the multi-vector model that reranks by late interaction.
        tokens: the token vectors of the documents, for reranking.
    """

    documents: Mapping[str, Document] | None = None
    vectors: Path | None = None
    second: BM25Index | Run | None = None
    late: Model | None = None
    tokens: TokenStore | None = None


def open_searcher(
    request: IndexOptions,
    load_parts: Callable[[Provenance], SearcherParts],
) -> Searcher:
    """Load an index and its model, and return the searcher that encodes and searches queries.

    Args:
        request: the options that name the index, the model and how it is searched.
        load_parts: a function that loads what else the searcher needs, such as a reranker. Its
            argument is the provenance of the index: the fingerprints of its documents and model.

    Raises:
        UsageError: if options do not fit the index.
    """
    from tilefold.retrieval.search.searcher import Searcher

    loaded = load_index(request)
    parts = load_parts(loaded.index.provenance)
    feedback_method = None
    second_ranking = None
    if isinstance(request, FeedbackOptions):
        feedback_method = request.prf
        second_ranking = request.prf_with
    if loaded.index.backend == DENSE and request.index is not None:
        refuse_options(
            {"--vectors": request.vectors},
            f"has no effect: {request.index} holds its own vectors",
        )
    elif loaded.model is not None and feedback_method is not None and parts.vectors is None:
        raise UsageError(
            "--prf reads the vectors of the best documents: give them with --vectors.",
        )
    option_errors = _options.errors_name_options(
        vectors="--vectors",
        second=f"--prf-with: {second_ranking}",
        tokens="--rerank",
        model="--rerank-model",
    )
    with option_errors, _common.precision_warnings_as_notes():
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
            other_model=True,  # accepts any model, because load_index has checked it
        )


def parse_filter(conditions: list[str] | None, searcher: Searcher) -> Filter | None:
    """Parse the conditions of ``--where`` into a filter, and check them against the index.

    A note is printed if no document matches.

    Args:
        conditions: the values of ``--where``; None returns None.
        searcher: the searcher, whose index holds the metadata of the documents.

    Raises:
        UsageError: if a condition cannot be parsed, or has an unknown field.
    """
    from tilefold.retrieval.data.metadata import Filter

    if not conditions:
        return None
    retriever: Any = searcher.retriever
    index = retriever.index
    with _options.errors_name_options(where="--where"):
        where = Filter.parse(conditions, _field_kinds(index))
        matching = count_matching(index, where)
    if not matching:
        note(
            f"--where: none of the {index.n_documents} documents of the index matches; texts are "
            "compared exactly, with upper and lower case",
        )
    return where


def _field_kinds(index: Any) -> Mapping[str, Sequence[str]] | None:
    """Return metadata field -> kinds of its values, such as "number"; None without metadata."""
    if index.backend == "qdrant":
        kinds: Mapping[str, Sequence[str]] | None = index.collection.field_kinds
        return kinds
    return None if index.metadata is None else index.metadata.kinds


def count_matching(index: Any, where: Where) -> int:
    """Return the number of documents of an index that match a filter."""
    from tilefold.retrieval.data.metadata import allowed_by

    if index.backend == "qdrant":
        return int(index.collection.count(where))
    allowed = allowed_by(index.metadata, where)
    return index.n_documents if allowed is None else int(allowed.sum())


def reason_without_hits(searcher: Searcher, where: Where) -> str:
    """Return why a query has no hits: no documents, no match of the filter, or no common term.

    Args:
        searcher: the searcher that ran the query.
        where: the filter of the search; None without one.
    """
    retriever: Any = searcher.retriever
    index = retriever.index
    if not index.n_documents:
        return "the index has no documents"
    if where is None:
        return "no document shares a term with this query"
    if not count_matching(index, where):
        return "no hits"  # a note has said that no document matches --where
    return "no document that matches --where shares a term with this query"


class QueryRanking(NamedTuple):
    """The ranked documents of a query.

    Attributes:
        query: the id of the query.
        scores: document id -> score, with the best documents first.
        ignored_identical_id: whether a hit with the query's own id was left out.
    """

    query: str
    scores: dict[str, float]
    ignored_identical_id: bool


def iterate_rankings(
    searcher: Searcher,
    queries: Mapping[str, str],
    request: SearchRequest,
) -> Iterator[QueryRanking]:
    """Search queries, rerank their documents if requested, and yield the ranking of each query.

    Many queries are searched at a time, because that is faster than one by one.

    A progress bar shows the number of queries.

    Args:
        searcher: the searcher.
        queries: query id -> text.
        request: the options of the search.

    Yields:
        The first ``request.k`` documents of each query.
    """
    remaining = iter(queries.items())
    n_done = 0
    with _common.progress_bar("searching") as update:
        while chunk := dict(itertools.islice(remaining, QUERIES_AT_A_TIME)):
            ranking = searcher.rank(chunk, request)
            ignored_identical_ids = ranking.ignored_identical_ids
            if request.reranking is not None:
                ranking = searcher.rerank(chunk, ranking, request.reranking)
            for query, scores in ranking.run.items():
                first_scores = dict(itertools.islice(scores.items(), request.k))
                yield QueryRanking(query, first_scores, query in ignored_identical_ids)
            n_done += len(chunk)
            update(n_done, len(queries))


def read_documents(path: Path | None) -> Any:
    """Read the encoded documents of ``--vectors``.

    Args:
        path: the value of ``--vectors``.

    Returns:
        ``SparseVectors`` or ``DenseVectors``.

    Raises:
        UsageError: if the option is missing, or the folder holds encoded queries.
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
    """Raise ``UsageError`` if a folder holds vectors of queries instead of documents."""
    if kind != "document":
        raise UsageError(
            f"--vectors: {path} holds {kind} vectors; encode documents without --queries.",
        )


def read_tokens(path: Path | None) -> Any:
    """Read the token vectors of ``--tokens``: a folder of ``tilefold encode``, or a file."""
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
    """Encode documents with the dense model of ``--model``, and return their searcher.

    Args:
        request: the options of the search.
        texts: document id -> text.
        max_length: the maximum tokens per text; None takes the maximum of the model.
        second: another ranking, of ``--prf-with``, whose scores are interpolated with those of
            the dense model before or after feedback.

    Raises:
        UsageError: if an option has no effect on a dense model.
    """
    from tilefold.retrieval.search.searcher import Searcher

    if isinstance(request, FeedbackOptions):
        refuse_options(
            {"--prf-terms": request.prf_terms},
            "requires a sparse model, and --model is a dense one",
        )
    refuse_options(
        {"--vectors": request.vectors},
        "has no effect: --model is a dense model, which encodes the documents itself",
    )
    model, _ = _models.load_model(
        str(request.model),
        kinds=("dense",),
        fast=_models.FUSED,
        dtype=request.dtype,
    )
    _models.limit_length(model, max_length)
    _models.print_precision(str(request.model), model)
    with _common.progress_bar("encoding") as update:
        index = retrieval.encoded_index(model, texts, progress=update)
        return Searcher(index, model, second=second)


def load_second_ranking(
    path: Path,
    queries: Mapping[str, str],
    documents_provenance: Provenance,
) -> BM25Index | Run:
    """Load the ranking of ``--prf-with``: a BM25 index, or a TREC run.

    Its scores are interpolated with those of the searched index before or after pseudo-relevance
    feedback.

    Args:
        path: the folder of the BM25 index, or the file of the run.
        queries: query id -> text.
        documents_provenance: the fingerprint of the searched documents.

    Returns:
        The BM25 index, or the results of the run for these queries: query id -> document id ->
        score.

    Raises:
        CommandError: if the index or run was made from other documents, or the run has results for
            none of the queries.
        UsageError: if the folder has an index of vectors.
    """
    if path.is_dir():
        index = load_second_index(path)
        _check_documents_of_second_ranking(path, index.provenance, documents_provenance)
        return index
    named_run = _scores.read_run(path, "--prf-with")
    _check_documents_of_second_ranking(path, named_run.provenance, documents_provenance)
    run = {query: named_run.run[query] for query in queries if query in named_run.run}
    if not run:
        raise CommandError(f"{named_run.name}: no result for any of the {len(queries)} queries.")
    if len(run) < len(queries):
        note(f"{named_run.name}: results for {len(run)} of the {len(queries)} queries")
    return run


def load_second_index(path: Path) -> BM25Index:
    """Load the BM25 index of ``--prf-with``.

    Raises:
        UsageError: if the index is of vectors.
    """
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.index.opening import open_index

    index = open_index(path)
    if isinstance(index, BM25Index):
        return index
    raise UsageError(
        f"--prf-with: {path} is an index of vectors; give a BM25 index, or save the run of this "
        "index and give that: tilefold evaluate --save-run.",
    )


def _check_documents_of_second_ranking(
    path: Path,
    ranking_provenance: Provenance,
    documents_provenance: Provenance,
) -> None:
    """Raise ``CommandError`` if the ranking of ``--prf-with`` is of other documents.

    Args:
        path: the BM25 index or the run of ``--prf-with``, for messages.
        ranking_provenance: the fingerprint of its documents.
        documents_provenance: the fingerprint of the searched documents.
    """
    # `texts_sha256` is the digest of the documents.
    if "texts_sha256" in documents_provenance.differing_fields(ranking_provenance):
        raise CommandError(
            f"--prf-with: {path} was made from other documents than those that are searched.",
        )


def load_reranker(
    source: str,
    model_name: str | None,
    documents: Mapping[str, Document],
    provenance: Provenance,
    dtype: Dtype,
) -> Reranker:
    """Load the reranker of ``--rerank``.

    Args:
        source: the value of ``--rerank``: a folder of token vectors, or a multi-vector model.
        model_name: the value of ``--rerank-model``; None if it was not given.
        documents: the documents by id. If `source` is a model, it encodes their texts.
        provenance: the fingerprint of the documents, which stored token vectors must have.
        dtype: the value of ``--dtype``.
    """
    from tilefold.retrieval.search.reranking import Reranker

    model, tokens = load_reranking_model(source, model_name, dtype, has_texts=True)
    option_errors = _options.errors_name_options(tokens="--rerank", model="--rerank-model")
    with option_errors, _common.precision_warnings_as_notes():
        return Reranker(model, tokens, documents, provenance)


class RerankingModel(NamedTuple):
    """A multi-vector model that reranks documents.

    Attributes:
        model: the model.
        tokens: the stored token vectors of the documents; None if the model encodes their texts.
    """

    model: Any
    tokens: TokenStore | None


def load_reranking_model(
    source: str,
    model_name: str | None,
    dtype: Dtype,
    has_texts: bool,
    option: str = "--rerank",
    fast: tuple[str, ...] = (),
) -> RerankingModel:
    """Load a multi-vector model for reranking, and open the documents' token vectors if stored.

    Args:
        source: the value of `option`: a folder of token vectors, or a multi-vector model.
        model_name: the model that encoded the token vectors, of the option with the suffix
            ``-model``; None reads it from their folder.
        dtype: the value of ``--dtype``.
        has_texts: whether the command has the texts of the documents, which a model without stored
            token vectors encodes.
        option: the option that names `source`, for messages.
        fast: the kinds of models, such as ``"multi-vector"``, that run with tilefold's kernels.

    Raises:
        UsageError: if `source` is neither token vectors nor a multi-vector model, or `model_name`
            or the texts do not fit it.
    """
    folder = Path(source)
    is_packaged = source == _models.PACKAGED
    if not is_packaged and (folder / "manifest.json").is_file():
        store = retrieval.open_tokens(folder)
        encoder_name = model_name or _recorded_model(store, option)
        encoder, _ = _models.load_model(
            encoder_name,
            f"{option}-model",
            ("multi-vector",),
            fast,
            dtype=dtype,
        )
        _models.print_precision(encoder_name, encoder)
        return RerankingModel(encoder, store)
    # A source that is not a folder is a name on the Hugging Face hub.
    holds_model = is_packaged or any((folder / name).is_file() for name in _MODEL_FILES)
    if folder.is_dir() and not holds_model:
        raise UsageError(
            f"{option}: {source} holds neither token vectors nor a model; make token vectors with: "
            "tilefold encode --model MULTI_VECTOR_MODEL",
        )
    if model_name is not None:
        raise UsageError(
            f"{option}-model requires a folder of token vectors, but {option} is a model.",
        )
    if not has_texts:
        raise UsageError(
            f"{option} with a model encodes the texts of the candidates: give the collection with "
            "--data.",
        )
    encoder, _ = _models.load_model(source, option, ("multi-vector",), fast, dtype=dtype)
    _models.print_precision(source, encoder)
    return RerankingModel(encoder, None)


def _recorded_model(store: TokenStore, option: str) -> str:
    """Return the name or folder of the model that encoded token vectors.

    Args:
        store: the token vectors.
        option: the option that names the token vectors, for messages.

    Raises:
        UsageError: if the model was not recorded, or has been moved.
    """
    name = store.manifest.model_source
    remedy = f"name it with {option}-model"
    if name is None:
        raise UsageError(
            f"{option}: {store.folder} does not record the model that made it; {remedy}.",
        )
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise UsageError(
            f"{option}: the model that made {store.folder} is no longer in {name}; {remedy}.",
        )
    return name
