"""Rerank the candidates of a retriever with exact late interaction (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_instance,
    check_least_count,
    check_mapping,
    check_share,
)
from tilefold._internal.typing import Model
from tilefold.ops import QuantizedTokens, maxsim
from tilefold.retrieval.common.provenance import (
    Provenance,
    model_fingerprint,
    warn_of_query_precision,
)
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.encoding.tokens import encode_texts, token_dimension
from tilefold.retrieval.errors import ArgumentDataError, MissingDocumentError
from tilefold.retrieval.search.fusion import check_scores, interpolate
from tilefold.retrieval.search.passages import BestPassages, best_passages
from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

__all__ = ["TAILS", "Reranker", "Reranking", "Tail", "rerank"]


Tail = Literal["keep", "drop"]
TAILS: tuple[Tail, ...] = ("keep", "drop")
# Steps between candidates that were not scored, as a share of the scores' magnitude: as small as
# fp32 keeps them apart, which is how trec_eval reads a run, so that 1,000 of them do not stretch
# the scores that fusion normalises.
TAIL_STEP = 2.0**-21


def rerank(
    run: Mapping[str, Mapping[str, float]],
    queries: TokenVectors,
    documents: TokenStore | TokenVectors,
    *,
    depth: int | None = None,
    tail: Tail = "keep",
    reduction: str = "sum",
    device: str | torch.device | None = None,
    impl: str = "auto",
) -> Run:
    """Score the best candidates of each query by MaxSim, and sort them by it.

    ``score = sum over query tokens i of max over document tokens j of q_i . d_j``, exact, in fp32.
    A shard of a store is scored by one call over the pairs of queries and documents in it. On the
    CPU, its vectors are read in place, memory-mapped. On a GPU, only the candidates' rows are
    copied to it, each once.

    Args:
        run: query id -> document id -> score of a first retriever, in any order.
        queries, documents: token vectors of all queries and candidates, in memory or of
            ``open_tokens``.
        depth: candidates per query to score, those with the highest first scores; None scores all.
        tail: treatment of candidates below `depth`, or without a token vector because their text
            is empty or could not be encoded. ``"keep"`` puts them after the others, in their first
            order; ``"drop"`` leaves them out.
        reduction: ``"mean"`` divides by the query's tokens, as models with ``"meanmaxsim"`` do;
            ``"sum"`` does not.
        device: where to compute; None takes a GPU if there is one.
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        The run, best documents first. A kept tail has scores just below the lowest MaxSim, 5e-7 of
        the scores' magnitude apart: an order and no measurement, too close to change a min-max
        normalisation.

    Raises:
        ValueError: for a wrong option, documents of another dimension than the queries, or int8
            vectors of queries.
        DataError: for queries or candidates without vectors; names the first and their number.
    """
    check_mapping("run", run, "query id -> scores by document")
    check_instance("queries", queries, TokenVectors, "encode_texts(model, queries, kind='query')")
    check_instance("documents", documents, (TokenStore, TokenVectors), "open_tokens(folder)")
    check_least_count("depth", depth)
    check_choice("tail", tail, TAILS)
    if queries.values.dtype == torch.int8:
        raise ArgumentError(
            "queries",
            "expected fp16 or fp32 vectors, got int8; encode them with storage='fp16'.",
        )
    if queries.dimension != documents.dimension:
        raise ArgumentError(
            "documents",
            f"expected token vectors of the queries' dimension {queries.dimension}, "
            f"got {documents.dimension}. Encode both with the same model.",
        )
    for query, query_scores in run.items():
        check_scores("run", query, query_scores, finite=False)
    query_rows = {query: row for row, query in enumerate(queries.ids)}
    missing = [query for query in run if query not in query_rows]
    if missing:
        raise ArgumentDataError(
            "queries",
            f"no token vectors of {missing[0]!r} ({len(missing)} in all). Encode these queries.",
        )
    ranked = {query: _names_by_score(scores) for query, scores in run.items()}
    candidates = {query: names[:depth] for query, names in ranked.items()}
    compute_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    late_scores: dict[str, dict[str, float]] = {query: {} for query in run}
    for shard, pairs in sorted(_pairs_by_shard(documents, candidates).items()):
        vectors = documents if isinstance(documents, TokenVectors) else documents.shard(shard)
        lengths = vectors.offsets.diff().tolist()
        scored = [pair for pair in pairs if lengths[pair.row]]
        pair_rows = torch.tensor([[query_rows[pair.query], pair.row] for pair in scored])
        scores = _maxsim_scores(
            queries,
            vectors,
            pair_rows.reshape(-1, 2),
            compute_device,
            reduction,
            impl,
        )
        for pair, score in zip(scored, scores, strict=True):
            late_scores[pair.query][pair.document] = score
    return {query: _with_tail(names, late_scores[query], tail) for query, names in ranked.items()}


@dataclass(frozen=True)
class Reranking:
    """Options of reranking candidates.

    Attributes:
        depth, tail: as in :func:`rerank`.
        weight: weight of MaxSim in an interpolation with the first scores, both normalised to
            [0, 1] per query. Candidates below `depth` keep their share of the first score. None
            orders by MaxSim only.

    Raises:
        ValueError: for a value out of range.
    """

    depth: int | None = None
    tail: Tail = "keep"
    weight: float | None = None

    def __post_init__(self) -> None:
        check_least_count("depth", self.depth)
        check_choice("tail", self.tail, TAILS)
        if self.weight is not None:
            check_share("weight", self.weight)


@dataclass(frozen=True)
class Reranker:
    """A late-interaction model with token vectors or texts of the documents that it reranks.

    Attributes:
        model: a ``MultiVectorEncoder``.
        tokens: token vectors of the documents by that model; None encodes the candidates.
        documents: id -> document, read if there are no `tokens`.
        searched: provenance of the index that the candidates come from.

    A model that encodes queries in another precision than `tokens` is a ``PrecisionWarning``.

    Raises:
        ValueError: for `tokens` of queries.
        DataError: for `tokens` of other documents than the searched ones, or by another model.
    """

    model: Model
    tokens: TokenStore | None = None
    documents: Mapping[str, Document] = field(default_factory=dict)
    searched: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        """Raise an error for stored token vectors that do not go with the index or the model."""
        if self.tokens is None:
            return
        manifest = self.tokens.manifest
        folder = self.tokens.folder
        if manifest.kind != "document":
            raise ArgumentError(
                "tokens",
                f"{folder} holds {manifest.kind} vectors; encode documents, without --queries.",
            )
        if "texts_sha256" in self.searched.differing_fields(manifest.provenance):
            raise ArgumentDataError(
                "tokens",
                f"{folder} holds token vectors of other documents (another collection, or changed "
                "since). Encode those searched: tilefold encode --model MULTI_VECTOR_MODEL",
            )
        dimension = token_dimension(self.model, "query")
        if dimension != manifest.dimension:
            raise ArgumentDataError(
                "model",
                f"makes vectors of dimension {dimension}, and {folder} holds vectors of "
                f"dimension {manifest.dimension}; give the model that made them, or encode the "
                "documents with this one.",
            )
        if manifest.model_fingerprint not in (None, model_fingerprint(self.model)):
            raise ArgumentDataError(
                "model",
                f"is not the model that made {folder} (its weights or settings differ); "
                "give that one.",
            )
        warn_of_query_precision(
            self.model,
            str(folder),
            manifest.precision,
            stacklevel=3,  # the caller of the generated __init__
        )

    def __call__(
        self,
        queries: Mapping[str, str],
        run: Run,
        reranking: Reranking,
        encoded: TokenVectors | None = None,
        candidates: TokenVectors | None = None,
        *,
        by: str = "document",
        passages: BestPassages | None = None,
    ) -> tuple[Run, Run, BestPassages]:
        """Order the candidates of a run by MaxSim.

        If `tokens` are of passages, all passages of a document are scored, and the best one counts.
        Without tokens, the passage that the document was retrieved by is scored.

        Args:
            queries: id -> text.
            run: candidates; of passages, which are ordered themselves, with ``by="passage"``.
            reranking: options.
            encoded: token vectors of the queries; None encodes their texts.
            candidates: token vectors of the candidates; None encodes their texts if there are no
                `tokens`.
            by: ``"document"`` or ``"passage"``, what the run ranks.
            passages: the passages that the documents of the run were retrieved by.

        Returns:
            The run ordered by MaxSim, the same mixed with the first scores if the options say so,
            and the best passages if passages were scored.
        """
        run = {query: scores for query, scores in run.items() if scores}
        if not run:
            return run, run, {}
        if encoded is None:
            query_texts = {query: queries[query] for query in run}
            encoded = encode_texts(self.model, query_texts, kind="query")
        documents = self.tokens if self.tokens is not None else candidates
        if documents is None:
            document_texts = self.candidates(run, reranking, by, passages)
            documents = encode_texts(self.model, document_texts, kind="document")
        weight = reranking.weight
        tail: Tail = reranking.tail if weight is None else "drop"
        reduction = "mean" if self.model.similarity_fn_name == "meanmaxsim" else "sum"
        passages_of = self._passages_to_score(run, reranking.depth, by, passages)
        late_passages: BestPassages = {}
        if passages_of is None:
            late_run = rerank(
                run,
                encoded,
                documents,
                depth=reranking.depth,
                tail=tail,
                reduction=reduction,
            )
        else:
            passage_run = rerank(
                _run_of_passages(passages_of),
                encoded,
                documents,
                tail="drop",
                reduction=reduction,
            )
            document_run, late_passages = best_passages(passage_run)
            late_run = {
                query: _with_tail(_names_by_score(run[query]), scores, tail)
                for query, scores in document_run.items()
            }
        if weight is None:
            return late_run, late_run, late_passages
        n_candidates = max(len(scores) for scores in run.values())
        mixed = interpolate([run, late_run], [1 - weight, weight], k=n_candidates)
        return late_run, mixed, late_passages

    @property
    def passages(self) -> str | None:
        """How documents are divided into the passages of `tokens`.

        None for token vectors of whole documents, and without `tokens`.
        """
        return None if self.tokens is None else self.tokens.manifest.provenance.passages

    def candidates(
        self,
        run: Run,
        reranking: Reranking,
        by: str = "document",
        passages: BestPassages | None = None,
    ) -> dict[str, str]:
        """Return the texts of the candidates, which must be encoded if there are no `tokens`.

        Args:
            run: query id -> id -> score of the ranking to rerank.
            reranking: options, of which ``depth`` is the number of candidates per query.
            by: ``"document"`` or ``"passage"``, which the ids of the run name.
            passages: query id -> document id -> passage that the document was retrieved by.

        Returns:
            Id -> text, of documents or of the passages that they were retrieved by.

        Raises:
            MissingDocumentError: for a candidate that `documents` lack.
        """
        passages_of = self._passages_to_score(run, reranking.depth, by, passages)
        if passages_of is not None:
            passage_run = _run_of_passages(passages_of)
            names = [name for scores in passage_run.values() for name in scores]
        else:
            names = [
                name
                for scores in run.values()
                for name in _names_by_score(scores)[: reranking.depth]
            ]
            if by == "document":
                return {name: self._document(name).contents for name in names}
        texts = {}
        for name in names:
            passage = Passage.of(name)
            texts[passage.id] = passage.of_document(self._document(passage.document)).contents
        return texts

    def _document(self, name: str) -> Document:
        document = self.documents.get(name)
        if document is None:
            raise MissingDocumentError("documents", name)
        return document

    def _passages_to_score(
        self,
        run: Run,
        depth: int | None,
        by: str,
        passages: BestPassages | None,
    ) -> dict[str, dict[str, list[str]]] | None:
        """Find the passages by which the candidates of each query are scored.

        Args:
            run: query id -> id -> score of the ranking to rerank.
            depth: documents per query to score; None scores all.
            by: ``"document"`` or ``"passage"``, which the ids of the run name.
            passages: query id -> document id -> passage that the document was retrieved by.

        Returns:
            Query id -> document id -> ids of its passages, whose best score it takes. None if the
            ids of the run are scored themselves.
        """
        if by == "passage":
            return None
        if self.tokens is not None and self.passages is None:
            return None
        if self.tokens is None and not passages:
            return None
        candidates = {query: _names_by_score(scores)[:depth] for query, scores in run.items()}
        if self.tokens is not None:
            passages_of = self.tokens.passages
            return {
                query: {name: passages_of.get(name, [name]) for name in names}
                for query, names in candidates.items()
            }
        retrieved_by = passages or {}
        result: dict[str, dict[str, list[str]]] = {}
        for query, names in candidates.items():
            passage_of = retrieved_by.get(query, {})
            result[query] = {
                name: [passage_of.get(name) or self._text_as_passage(name)] for name in names
            }
        return result

    def _text_as_passage(self, name: str) -> str:
        """Id of the passage that is the full text of a document, which was retrieved by none."""
        return Passage(name, 1, 0, len(self._document(name).text)).id


def _run_of_passages(passages_of: Mapping[str, Mapping[str, list[str]]]) -> Run:
    """Return a run, with scores of 0, of the passages to score for each query."""
    run: Run = {}
    for query, document_passages in passages_of.items():
        run[query] = {
            passage: 0.0 for passages in document_passages.values() for passage in passages
        }
    return run


def _names_by_score(scores: Mapping[str, float]) -> list[str]:
    """Return names, best first."""
    return sorted(scores, key=lambda name: -scores[name])


class _Pair(NamedTuple):
    """A query, a candidate of it, and the row of the candidate's vectors in its shard."""

    query: str
    document: str
    row: int


def _pairs_by_shard(
    documents: TokenStore | TokenVectors,
    candidates: Mapping[str, list[str]],
) -> dict[int, list[_Pair]]:
    """Return shard -> pairs to score, for candidates that have vectors.

    Args:
        documents: token vectors; those in memory count as shard 0.
        candidates: query id -> document ids.

    Raises:
        DataError: for candidates that were never encoded.
    """
    location_of: Mapping[str, tuple[int, int]]
    failed: Collection[str] = ()
    if isinstance(documents, TokenStore):
        location_of = documents.ids
        failed = documents.manifest.failed
    else:
        location_of = {name: (0, row) for row, name in enumerate(documents.ids)}
    names = dict.fromkeys(name for query_names in candidates.values() for name in query_names)
    missing = [name for name in names if name not in location_of and name not in failed]
    if missing:
        raise ArgumentDataError(
            "documents",
            f"no token vectors of candidate {missing[0]!r} ({len(missing)} of "
            f"{len(names)} candidates have none). Encode the collection they come from.",
        )
    pairs: dict[int, list[_Pair]] = {}
    for query, query_names in candidates.items():
        for name in query_names:
            if name in location_of:
                shard, row = location_of[name]
                pairs.setdefault(shard, []).append(_Pair(query, name, row))
    return pairs


def _maxsim_scores(
    queries: TokenVectors,
    documents: TokenVectors,
    pairs: Tensor,
    device: torch.device,
    reduction: str,
    impl: str,
) -> list[float]:
    """Compute MaxSim of pairs of queries and documents.

    Args:
        queries: token vectors.
        documents: token vectors.
        pairs: int64 ``[n, 2]``, rows of the query and the document.
        device: where to compute.
        reduction, impl: as in :func:`tilefold.ops.maxsim`.
    """
    if not pairs.numel():
        return []
    if device.type != "cpu":  # copies only rows that a pair needs
        rows, positions = torch.unique(pairs[:, 1], return_inverse=True)
        documents = documents.take(rows.tolist())
        pairs = torch.stack([pairs[:, 0], positions], dim=1)
    packed = documents.packed()
    dtype = torch.float32 if isinstance(packed, QuantizedTokens) else packed.dtype
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        scores = maxsim(
            queries.values.to(device, dtype),
            packed.to(device),
            cu_seqlens_q=queries.offsets.to(device, torch.int32),
            cu_seqlens_d=documents.offsets.to(device, torch.int32),
            pairing=pairs.to(device),
            reduction=reduction,
            impl=impl,
        )
    if not bool(scores.isfinite().all()):
        raise ArgumentDataError(
            ("queries", "documents"),
            "expected finite token vectors, got some that are not. Encode them again.",
        )
    return list(scores.tolist())


def _with_tail(names: list[str], scores: dict[str, float], tail: Tail) -> dict[str, float]:
    """Rank names by their scores, and keep or drop the names without a score (the tail).

    Names of the tail get scores below the lowest one, so that they keep their order.

    Args:
        names: ids in the order of the run, which is the order of equal scores and of the tail.
        scores: id -> score, of some of the names.
        tail: ``"keep"`` or ``"drop"``.

    Returns:
        Id -> score, best first.
    """
    position_of = {name: position for position, name in enumerate(names)}
    ranked_names = sorted(scores, key=lambda name: (-scores[name], position_of[name]))
    ranked = {name: scores[name] for name in ranked_names}
    if tail == "drop":
        return ranked
    highest = 0.0
    lowest = 0.0
    if ranked_names:
        highest = ranked[ranked_names[0]]
        lowest = ranked[ranked_names[-1]]
    # The step is relative to the scores, so that rounding does not make neighbours equal. Scores
    # that are all 0 count as 1.
    step = TAIL_STEP * (max(abs(lowest), abs(highest)) or 1.0)
    tail_names = [name for name in names if name not in scores]
    for position, name in enumerate(tail_names, start=1):
        ranked[name] = lowest - step * position
    return ranked
