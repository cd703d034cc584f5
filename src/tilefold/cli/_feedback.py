"""``--prf``: pseudo relevance feedback, for search and evaluate."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tilefold.cli import _common, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.cli._retrievers import DenseRetriever, SparseRetriever
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.feedback import Feedback, Interpolation
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.vectors import SparseVectors

RANKED = 1000  # documents of a ranking that is interpolated, or whose last ones count

# parameter of a command -> field, and what typer makes of it
_OWN: dict[str, tuple[str, Any]] = {
    "prf_depth": (
        "depth",
        Annotated[
            int | None,
            typer.Option("--prf-depth", help="Best documents taken as relevant; by default 3, and 5 for rocchio."),
        ],
    ),
    "prf_terms": (
        "top_terms",
        Annotated[int | None, typer.Option("--prf-terms", help="Sparse: heaviest terms kept of a query after --prf.")],
    ),
    "prf_alpha": (
        "alpha",
        Annotated[float | None, typer.Option("--prf-alpha", help="rocchio: weight of the query (0.4).")],
    ),
    "prf_beta": (
        "beta",
        Annotated[float | None, typer.Option("--prf-beta", help="rocchio: weight of the best documents (0.6).")],
    ),
    "prf_gamma": (
        "gamma",
        Annotated[
            float | None, typer.Option("--prf-gamma", help="rocchio: weight of the last documents, subtracted (0).")
        ],
    ),
    "prf_bottom": (
        "bottom",
        Annotated[
            int | None,
            typer.Option("--prf-bottom", help="rocchio: how many last documents, of 1,000, --prf-gamma is for."),
        ],
    ),
}
_MIXED: dict[str, tuple[str, Any]] = {
    "prf_with": (
        "second",
        Annotated[
            Path | None,
            typer.Option("--prf-with", help="A second ranking to interpolate with: a BM25 index, or a TREC run."),
        ],
    ),
    "prf_place": (
        "place",
        Annotated[
            str | None, typer.Option("--prf-place", help="Interpolate before feedback, after it, or both (default).")
        ],
    ),
    "prf_weight": (
        "weight",
        Annotated[
            float | None,
            typer.Option("--prf-weight", help="Weight of --prf-with in [0, 1], beside the other one (0.5)."),
        ],
    ),
    "prf_normalization": (
        "normalization",
        Annotated[
            str | None,
            typer.Option("--prf-normalization", help="Before interpolation: min_max (default), z_score or none."),
        ],
    ),
}
_METHOD = Annotated[
    str | None,
    typer.Option("--prf", help="Search again with each query moved towards what it found: average, or rocchio."),
]


def takes_feedback(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of --prf, which get to it as its parameter ``feedback``, and stand in its place."""
    hints = get_type_hints(command, include_extras=True)
    options_of = {"prf": _METHOD, **{name: kind for name, (_, kind) in (_OWN | _MIXED).items()}}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name == "feedback":
            parameters += [
                Parameter(option, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
                for option, kind in options_of.items()
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def taking(**given: Any) -> None:
        own, mixed = ({field: given.pop(name) for name, (field, _) in group.items()} for group in (_OWN, _MIXED))
        feedback = options(given.pop("prf"), own, mixed)
        command(**given, feedback=feedback)

    taking.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return taking


@dataclass(frozen=True)
class FeedbackOptions:
    """Method and weights of --prf, and what is interpolated where."""

    feedback: Feedback
    second: Path | None
    mix: Interpolation | None


def options(prf: str | None, own: Mapping[str, Any], mixed: Mapping[str, Any]) -> FeedbackOptions | None:
    """The --prf options of a command, None without --prf.

    Args:
        prf: the method.
        own: field of :class:`Feedback` -> value or None.
        mixed: ``second`` and the fields of :class:`Interpolation` -> value or None.

    Raises:
        UsageError: an option that does nothing here, or a value out of range.
    """
    from tilefold.retrieval.feedback import METHODS, Feedback, Interpolation

    if prf not in (None, *METHODS):
        raise _common.UsageError(f"--prf: expected one of {', '.join(METHODS)}, got {prf!r}.")
    why = "goes together with --prf" if prf is None else "goes with --prf rocchio"
    for name, value in own.items():
        if prf is None or (prf == METHODS[0] and name not in ("depth", "top_terms")):
            _common.refuse(_option(name), value, why)
    for name, value in mixed.items():
        if prf is None or mixed["second"] is None:
            _common.refuse(_option(name), value, why if prf is None else "goes together with --prf-with")
    if prf is None:
        return None
    if (own["gamma"] is None) != (own["bottom"] is None):
        raise _common.UsageError("--prf-gamma and --prf-bottom go together: a weight, and how many documents.")
    given, second = _given(own), mixed["second"]
    try:
        mix = None if second is None else Interpolation(**_given({**mixed, "second": None}))
        return FeedbackOptions(Feedback(prf, **given), second, mix)  # type: ignore[arg-type]
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise _common.UsageError(f"{_option(name)}:{rest}") from error


def _option(name: str) -> str:
    return "--prf-" + {"top_terms": "terms", "second": "with"}.get(name, name)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Answers:
    """What came out: the ranking, the one with feedback alone, and sparse queries before and after."""

    run: Run
    own: Run
    before: SparseVectors | None = None
    after: SparseVectors | None = None


@dataclass(frozen=True)
class FeedbackRetriever:
    """A retriever that searches a second time, with the queries that its first answers expand.

    Attributes:
        retriever: of sparse vectors (BM25's among them), or dense.
        documents: the stored vectors of given documents, for a sparse one.
        options: of the command.
        second: answers the same queries, to be interpolated with.
    """

    retriever: SparseRetriever | DenseRetriever
    documents: Callable[[list[str]], SparseVectors] | None
    options: FeedbackOptions
    second: Callable[[Mapping[str, str], int], Run] | None

    @property
    def provenance(self) -> Provenance:
        return self.retriever.provenance

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        """The `k` best documents for each query."""
        return {query: dict(list(scores.items())[:k]) for query, scores in self.answers(queries, k).run.items()}

    def answers(self, queries: Mapping[str, str], k: int) -> Answers:
        """At least `k` documents for each query, as far as there are so many."""
        from tilefold.retrieval.feedback import expand_sparse, feedback_documents, with_feedback

        feedback = self.options.feedback
        whole = self.second is not None or feedback.bottom > 0
        depth = max(k, feedback.k, RANKED if whole else 0)
        second = None if self.second is None else self.second(queries, depth)
        own: Run = {}
        if self.documents is None:
            own_dense = self._dense(queries, depth, own)
            return Answers(with_feedback(*own_dense, depth, second, self.options.mix), own)
        sparse: Any = self.retriever
        encoded, expanded = sparse.encode(queries), []

        def again(basis: Run) -> Run:
            stored = self.documents(feedback_documents(basis, feedback))  # type: ignore[misc]
            expanded.append(expand_sparse(encoded, stored, basis, feedback))
            own.update(sparse.search_vectors(expanded[0], depth))
            return own

        run = with_feedback(sparse.search_vectors(encoded, depth), again, depth, second, self.options.mix)
        return Answers(run, own, encoded, expanded[0])

    def _dense(self, queries: Mapping[str, str], depth: int, own: Run) -> tuple[Run, Callable[[Run], Run]]:
        """The first ranking of a dense model, and the function that makes the next, also into `own`."""
        from tilefold.retrieval.feedback import expand_dense

        dense: Any = self.retriever
        vectors = dense.encode(queries)

        def again(basis: Run) -> Run:
            ids = list(dense.texts)
            expanded = expand_dense(vectors, list(queries), dense.vectors, ids, basis, self.options.feedback)
            own.update(dense.search_vectors(expanded, list(queries), depth))
            return own

        return dense.search_vectors(vectors, list(queries), depth), again


def with_options(
    options: FeedbackOptions, retriever: SparseRetriever | DenseRetriever | BM25Index, vectors: Path | None
) -> FeedbackRetriever:
    """The retriever with feedback; `vectors` are the encoded documents of an index of sparse vectors.

    Raises:
        UsageError: vectors are missing, or given where there are none; --prf-terms with a dense model.
        CommandError: what belongs to other documents, or was made by another model.
    """
    from tilefold.retrieval.vectors import read_rows

    second = None if options.second is None else _second(options.second, retriever.provenance)
    if isinstance(retriever, _retrievers.SparseRetriever):
        if vectors is None:
            raise _common.UsageError("--prf reads the vectors of the documents found: give them with --vectors.")
        _retrievers.check_vectors(vectors, retriever)
        return FeedbackRetriever(retriever, lambda names: read_rows(vectors, names), options, second)
    _common.refuse("--vectors", vectors, "goes with an index of sparse vectors")
    if isinstance(retriever, _retrievers.DenseRetriever):
        _common.refuse("--prf-terms", options.feedback.top_terms, "is for sparse queries, and this model is dense")
        return FeedbackRetriever(retriever, None, options, second)
    return FeedbackRetriever(*_words(retriever), options, second)


def _words(index: BM25Index) -> tuple[SparseRetriever, Callable[[list[str]], SparseVectors]]:
    """A BM25 index as one of sparse vectors, and the vectors of its documents."""
    from tilefold.retrieval.index import build_index

    vectors = index.document_vectors()
    row_of = {name: row for row, name in enumerate(vectors.ids)}
    retriever = _retrievers.SparseRetriever(build_index(vectors, "exact"), None, words=index)
    return retriever, lambda names: vectors.take([row_of[name] for name in names])


def _second(path: Path, made_of: Provenance) -> Callable[[Mapping[str, str], int], Run]:
    """What answers from --prf-with."""
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.index.protocol import read_description

    if path.is_dir():
        if read_description(path)["backend"] != BM25Index.backend:
            raise _common.UsageError(
                f"--prf-with: {path} is an index of vectors; give a BM25 index, or save its run and give that: "
                "tilefold evaluate --save-run."
            )
        index = BM25Index.load(path)
        _check(path, index.provenance, made_of)
        return index.search
    named = _scores.read_run(path, "--prf-with")
    _check(path, named.provenance, made_of)

    def answered(queries: Mapping[str, str], k: int) -> Run:
        found = {query: named.run[query] for query in queries if query in named.run}
        if not found:
            raise _common.CommandError(f"{named.name}: no result for any of the {len(queries)} queries.")
        if len(found) < len(queries):
            _common.note(f"{named.name}: results for {len(found)} of the {len(queries)} queries")
        return found

    return answered


def _check(path: Path, made_by: Provenance, made_of: Provenance) -> None:
    if "texts_sha256" in made_of.differs(made_by):
        raise _common.CommandError(f"--prf-with: {path} was made from other documents than those that are searched.")
