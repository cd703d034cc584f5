"""Rerank the candidates of a retriever with exact late interaction (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

import itertools
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
from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model
from tilefold.ops import QuantizedTokens, maxsim
from tilefold.retrieval.common.provenance import (
    Provenance,
    model_fingerprint,
    warn_of_query_precision,
)
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.documents import Content, Document
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.encoding.tokens import encode_texts, token_dimension
from tilefold.retrieval.errors import ArgumentDataError, MissingDocumentError
from tilefold.retrieval.search.fusion import check_scores, interpolate
from tilefold.retrieval.search.passages import BestPassages, best_passages
from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

__all__ = ["TAILS", "Reranker", "Reranking", "Tail", "rerank"]


Tail = Literal["keep", "drop"]
TAILS: tuple[Tail, ...] = ("keep", "drop")
# Difference of scores between neighbours in the tail, relative to the largest score. trec_eval
# reads scores as fp32, which still tells them apart. 1,000 such steps hardly change the range of
# scores, which fusion normalises.
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
    """Score the best candidates of each query by MaxSim, and sort them by that score.

    ``score = sum over query tokens i of max over document tokens j of q_i . d_j``, exact, in fp32.
    A shard of a store is scored by one call over the pairs of queries and documents in it. On the
    CPU, its vectors are read in place, memory-mapped. On a GPU, only the candidates' rows are
    copied to it, each once.

    Args:
        run: query id -> document id -> score of the first retriever, in any order.
        queries: token vectors of all queries.
        documents: token vectors of all candidates, in memory or opened by ``open_tokens``.
        depth: number of candidates per query to score, those with the highest scores in `run`;
            None scores all.
        tail: treatment of the tail: the candidates that are not scored, because they are below
            `depth` or have no token vector (their text is empty or could not be encoded).
            ``"keep"`` ranks them last, in the order of `run`; ``"drop"`` leaves them out.
        reduction: ``"sum"``, or ``"mean"`` to divide by the number of query tokens, as models with
            ``"meanmaxsim"`` do.
        device: the device that computes; None uses a GPU if there is one.
        impl: the implementation, as in :func:`tilefold.ops.maxsim`.

    Returns:
        Query id -> document id -> score, best documents first. A kept tail has scores just below
        the lowest MaxSim, 5e-7 of the largest score apart. They give an order, are not
        similarities, and are too close to change a min-max normalisation.

    Raises:
        ValueError: if an option is wrong, if the dimensions of queries and documents differ, or if
            the vectors of queries are int8.
        DataError: if queries or candidates have no vectors.

    Examples:
        >>> import torch
        >>> from tilefold.retrieval import TokenVectors
        >>> tokens = torch.nn.functional.normalize(torch.randn(2, 12, 16), dim=-1)
        >>> documents = TokenVectors.pack(["a", "b"], list(tokens), 16, "fp32")
        >>> queries = TokenVectors.pack(["q"], [tokens[1, :4]], 16, "fp32")
        >>> run = rerank({"q": {"a": 2.0, "b": 1.0}}, queries, documents)
        >>> list(run["q"])
        ['b', 'a']
    """
    check_mapping("run", run, "query id -> scores by document")
    check_instance("queries", queries, TokenVectors, "encode_texts(model, queries, kind='query')")
    check_instance("documents", documents, (TokenStore, TokenVectors), "open_tokens(folder)")
    check_least_count("depth", depth)
    check_choice("tail", tail, TAILS)
    _check_vectors_fit(queries, documents)
    _check_run(run, queries)
    ranked_ids = _select_best(run, None)
    candidates = {query: document_ids[:depth] for query, document_ids in ranked_ids.items()}
    late_scores = _score_candidates(candidates, queries, documents, reduction, device, impl)
    return {
        query: _rank_with_tail(document_ids, late_scores[query], tail)
        for query, document_ids in ranked_ids.items()
    }


def _check_vectors_fit(queries: TokenVectors, documents: TokenStore | TokenVectors) -> None:
    """Raise ``ArgumentError`` if token vectors of queries and documents cannot be compared.

    Args:
        queries: token vectors of queries.
        documents: token vectors of documents.
    """
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


def _check_run(run: Mapping[str, Mapping[str, float]], queries: TokenVectors) -> None:
    """Check the scores of a run, and that all of its queries have token vectors.

    Args:
        run: query id -> document id -> score.
        queries: token vectors of the queries.

    Raises:
        ArgumentDataError: if a query has no token vectors.
        ValueError: if a score is NaN.
    """
    for query, query_scores in run.items():
        check_scores("run", query, query_scores, finite=False)
    query_ids = set(queries.ids)
    missing = [query for query in run if query not in query_ids]
    if missing:
        raise ArgumentDataError(
            "queries",
            f"no token vectors of {missing[0]!r} ({len(missing)} of {len(run)} queries have none). "
            "Encode these queries.",
        )


def _score_candidates(
    candidates: Mapping[str, list[str]],
    queries: TokenVectors,
    documents: TokenStore | TokenVectors,
    reduction: str,
    device: str | torch.device | None,
    impl: str,
) -> dict[str, dict[str, float]]:
    """Compute MaxSim of queries and their candidates, one shard of token vectors at a time.

    Args:
        candidates: query id -> ids of the documents to score.
        queries: token vectors of the queries.
        documents: token vectors of the candidates.
        reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        device: the device that computes; None uses a GPU if there is one.
        impl: the implementation, as in :func:`tilefold.ops.maxsim`.

    Returns:
        Query id -> document id -> score, without documents that have no token vectors.
    """
    compute_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    query_rows = {query: row for row, query in enumerate(queries.ids)}
    late_scores: dict[str, dict[str, float]] = {query: {} for query in candidates}
    for shard, pairs in sorted(_group_pairs_by_shard(documents, candidates).items()):
        vectors = documents if isinstance(documents, TokenVectors) else documents.shard(shard)
        lengths = vectors.offsets.diff().tolist()
        nonempty_pairs = [pair for pair in pairs if lengths[pair.row]]
        pair_rows = torch.tensor([[query_rows[pair.query], pair.row] for pair in nonempty_pairs])
        scores = _score_pairs(
            queries,
            vectors,
            pair_rows.reshape(-1, 2),
            compute_device,
            reduction,
            impl,
        )
        for pair, score in zip(nonempty_pairs, scores, strict=True):
            late_scores[pair.query][pair.document] = score
    return late_scores


@dataclass(frozen=True)
class Reranking:
    """Options of reranking candidates.

    Attributes:
        depth: number of candidates per query to score; None scores all.
        tail: treatment of the candidates that are not scored. ``"keep"`` ranks them last;
            ``"drop"`` leaves them out.
        weight: weight of MaxSim in an interpolation with the scores before reranking, both
            normalised to [0, 1] per query. Candidates below `depth` keep their share of the score
            before reranking. None orders by MaxSim only.

    Raises:
        ValueError: if a value is out of range.

    Examples:
        >>> from tilefold.retrieval import SearchRequest
        >>> request = SearchRequest(k=10, reranking=Reranking(depth=50, weight=0.6))
        >>> request.candidates
        50
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
        documents: id -> document. Their texts are encoded if there are no `tokens`.
        index_provenance: provenance of the index that the candidates come from.

    Warns:
        PrecisionWarning: if the model encodes queries in another precision than `tokens`.

    Raises:
        ValueError: if `tokens` are vectors of queries.
        DataError: if `tokens` were made from other documents than the index, or by another model.
    """

    model: Model
    tokens: TokenStore | None = None
    documents: Mapping[str, Document] = field(default_factory=dict)
    index_provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        """Raise an error if the stored token vectors do not match the index or the model."""
        if self.tokens is None:
            return
        manifest = self.tokens.manifest
        folder = self.tokens.folder
        if manifest.kind != "document":
            raise ArgumentError(
                "tokens",
                f"{folder} holds {manifest.kind} vectors; encode documents, without --queries.",
            )
        if "texts_sha256" in self.index_provenance.differing_fields(manifest.provenance):
            raise ArgumentDataError(
                "tokens",
                f"{folder} holds token vectors of other documents than the index (another "
                "collection, or one that has changed since). Encode the documents of the index: "
                "tilefold encode --model MULTI_VECTOR_MODEL",
            )
        dimension = token_dimension(self.model, "query")
        if dimension != manifest.dimension:
            raise ArgumentDataError(
                "model",
                f"makes vectors of dimension {dimension}, and {folder} holds vectors of dimension "
                f"{manifest.dimension}; pass the model that made them, or encode the documents "
                "with this one.",
            )
        if manifest.model_fingerprint not in (None, model_fingerprint(self.model)):
            raise ArgumentDataError(
                "model",
                f"is not the model that made {folder} (its weights or settings differ); "
                "pass that one.",
            )
        warn_of_query_precision(
            self.model,
            str(folder),
            manifest.precision,
            stacklevel=3,  # the caller of the generated __init__
        )

    @property
    def precisions(self) -> dict[str, str | None]:
        """Dtypes in which ``rerank_documents`` and ``rerank_queries`` are computed.

        The dtype of `tokens` is None if it was not recorded.
        """
        query_precision = inference_precision(self.model)
        document_precision: str | None = query_precision  # the model encodes the candidates
        if self.tokens is not None:
            document_precision = self.tokens.manifest.precision
        return {"rerank_documents": document_precision, "rerank_queries": query_precision}

    def __call__(
        self,
        queries: Mapping[str, str],
        run: Run,
        reranking: Reranking,
        query_vectors: TokenVectors | None = None,
        candidate_vectors: TokenVectors | None = None,
        *,
        by: str = "document",
        passages: BestPassages | None = None,
    ) -> RerankedRun:
        """Order the candidates of a run by MaxSim.

        If `tokens` holds passages, all passages of a document are scored, and the best one counts.
        Without `tokens`, the passage that the document was retrieved by is scored.

        Args:
            queries: query id -> text.
            run: query id -> id of a candidate -> score before reranking.
            reranking: options of the reranking.
            query_vectors: token vectors of the queries; None encodes their texts.
            candidate_vectors: token vectors of the candidates; None encodes their texts. Not used
                if there are `tokens`.
            by: what the ids of the run name, ``"document"`` or ``"passage"``.
            passages: query id -> document id -> passage that the document was retrieved by; None
                if no passages were searched.
        """
        run = {query: scores for query, scores in run.items() if scores}
        if not run:
            return RerankedRun(run, run, {})
        if query_vectors is None:
            query_texts = {query: queries[query] for query in run}
            query_vectors = encode_texts(self.model, query_texts, kind="query")
        documents = self.tokens if self.tokens is not None else candidate_vectors
        if documents is None:
            candidate_texts = self.texts_to_encode(run, reranking.depth, by, passages)
            documents = encode_texts(self.model, candidate_texts, kind="document")
        weight = reranking.weight
        # An interpolation keeps all candidates anyway, with their scores before reranking.
        tail: Tail = reranking.tail if weight is None else "drop"
        passage_ids = self._choose_passages(run, reranking.depth, by, passages)
        late_passages: BestPassages = {}
        if passage_ids is None:
            late_run = rerank(
                run,
                query_vectors,
                documents,
                depth=reranking.depth,
                tail=tail,
                reduction=self._reduction,
            )
        else:
            # Scores before reranking only choose candidates, which `depth` has already limited.
            passage_run = rerank(
                {query: dict.fromkeys(ids, 0.0) for query, ids in passage_ids.items()},
                query_vectors,
                documents,
                tail="drop",
                reduction=self._reduction,
            )
            document_run, late_passages = best_passages(passage_run)
            late_run = {
                query: _rank_with_tail(_sort_by_score(run[query]), scores, tail)
                for query, scores in document_run.items()
            }
        if weight is None:
            return RerankedRun(late_run, late_run, late_passages)
        n_candidates = max(len(scores) for scores in run.values())
        interpolated_run = interpolate([run, late_run], [1 - weight, weight], k=n_candidates)
        return RerankedRun(late_run, interpolated_run, late_passages)

    @property
    def _reduction(self) -> str:
        """How the model combines the maxima of the query tokens: ``"mean"`` or ``"sum"``."""
        return "mean" if self.model.similarity_fn_name == "meanmaxsim" else "sum"

    @property
    def passages(self) -> str | None:
        """How documents are divided into the passages of `tokens`.

        None if `tokens` holds whole documents, or if there are no `tokens`.
        """
        return None if self.tokens is None else self.tokens.manifest.provenance.passages

    def texts_to_encode(
        self,
        run: Run,
        depth: int | None,
        by: str = "document",
        passages: BestPassages | None = None,
    ) -> dict[str, Content]:
        """Return the texts or pages of the candidates of a run, or the passages that score them.

        Args:
            run: query id -> id of a candidate -> score before reranking.
            depth: number of candidates per query; None for all.
            by: what the ids of the run name, ``"document"`` or ``"passage"``.
            passages: query id -> document id -> passage that the document was retrieved by; None
                if no passages were searched.

        Returns:
            Id of a document or passage -> text or page.

        Raises:
            MissingDocumentError: if `documents` lacks a candidate.
        """
        passage_ids = self._choose_passages(run, depth, by, passages)
        if passage_ids is not None:
            return self._texts_of_passages(passage_ids)
        candidates = _select_best(run, depth)
        if by == "passage":
            return self._texts_of_passages(candidates)
        return {
            document_id: self._document(document_id).content
            for document_ids in candidates.values()
            for document_id in document_ids
        }

    def _texts_of_passages(self, passage_ids: Mapping[str, list[str]]) -> dict[str, Content]:
        """Return the text of each passage by its id.

        Args:
            passage_ids: query id -> ids of passages.
        """
        texts: dict[str, Content] = {}
        for query_passage_ids in passage_ids.values():
            for passage_id in query_passage_ids:
                passage = Passage.of(passage_id)
                document = self._document(passage.document)
                texts[passage.id] = passage.of_document(document).contents
        return texts

    def _document(self, document_id: str) -> Document:
        """Return a document by its id, or raise ``MissingDocumentError``."""
        document = self.documents.get(document_id)
        if document is None:
            raise MissingDocumentError("documents", document_id)
        return document

    def _choose_passages(
        self,
        run: Run,
        depth: int | None,
        by: str,
        passages: BestPassages | None,
    ) -> dict[str, list[str]] | None:
        """Choose the passages that are scored in place of the documents of a run.

        Args:
            run: query id -> id of a candidate -> score before reranking.
            depth: number of candidates per query; None for all.
            by: what the ids of the run name, ``"document"`` or ``"passage"``.
            passages: query id -> document id -> passage that the document was retrieved by.

        Returns:
            Query id -> ids of passages. None if the candidates themselves are scored.
        """
        if by == "passage":  # the candidates are passages already
            return None
        if self.tokens is None:
            # Candidates are encoded now: the passages that retrieved them, or else whole documents.
            if not passages:
                return None
            return self._retrieved_passages(passages, _select_best(run, depth))
        if self.passages is None:  # the stored token vectors are those of whole documents
            return None
        return self._stored_passages(self.tokens, _select_best(run, depth))

    def _stored_passages(
        self,
        tokens: TokenStore,
        candidates: Mapping[str, list[str]],
    ) -> dict[str, list[str]]:
        """Return all passages of the candidates that have token vectors.

        Args:
            tokens: token vectors of passages.
            candidates: query id -> document ids.

        Returns:
            Query id -> ids of passages. A document without passages is listed by its own id.
        """
        passage_ids: dict[str, list[str]] = {}
        for query, document_ids in candidates.items():
            passage_ids[query] = []
            for document_id in document_ids:
                passage_ids[query] += tokens.passages.get(document_id, [document_id])
        return passage_ids

    def _retrieved_passages(
        self,
        passages: BestPassages,
        candidates: Mapping[str, list[str]],
    ) -> dict[str, list[str]]:
        """Return the passage of each candidate that retrieved it.

        Args:
            passages: query id -> document id -> passage that the document was retrieved by. For a
                document that no passage retrieved, its full text is taken as one passage.
            candidates: query id -> document ids.

        Returns:
            Query id -> ids of passages.
        """
        passage_ids: dict[str, list[str]] = {}
        for query, document_ids in candidates.items():
            passage_of = passages.get(query, {})
            passage_ids[query] = [
                passage_of.get(document_id) or self._full_text_passage(document_id)
                for document_id in document_ids
            ]
        return passage_ids

    def _full_text_passage(self, document_id: str) -> str:
        """Return the id of the passage that is the full text of a document."""
        return Passage(document_id, 1, 0, len(self._document(document_id).text)).id


class RerankedRun(NamedTuple):
    """Result of reranking the candidates of a run.

    Attributes:
        late_run: the run ordered by MaxSim.
        run: the final run: `late_run`, or its interpolation with the scores before reranking.
        passages: query id -> document id -> the passage with the best MaxSim; empty if no passages
            were scored.
    """

    late_run: Run
    run: Run
    passages: BestPassages


def _select_best(run: Mapping[str, Mapping[str, float]], depth: int | None) -> dict[str, list[str]]:
    """Return the `depth` best ids of each query, best first; all of them if `depth` is None."""
    return {query: _sort_by_score(scores)[:depth] for query, scores in run.items()}


def _sort_by_score(scores: Mapping[str, float]) -> list[str]:
    """Return the ids in descending order of their scores."""
    return sorted(scores, key=lambda document_id: -scores[document_id])


class _Pair(NamedTuple):
    """A query, a candidate of it, and the row of the candidate's vectors in its shard."""

    query: str
    document: str
    row: int


def _group_pairs_by_shard(
    documents: TokenStore | TokenVectors,
    candidates: Mapping[str, list[str]],
) -> dict[int, list[_Pair]]:
    """Group the pairs of a query and a candidate by the shard that has the candidate's vectors.

    Candidates whose encoding failed are left out.

    Args:
        documents: token vectors. Vectors in memory count as shard 0.
        candidates: query id -> document ids.

    Returns:
        Number of the shard -> its pairs.

    Raises:
        ArgumentDataError: if candidates were never encoded.
    """
    shard_and_row: Mapping[str, tuple[int, int]]
    failed_ids: Collection[str] = ()
    if isinstance(documents, TokenStore):
        shard_and_row = documents.ids
        failed_ids = documents.manifest.failed
    else:
        shard_and_row = {document: (0, row) for row, document in enumerate(documents.ids)}
    # The distinct candidates, in the order of the queries.
    distinct_candidates = dict.fromkeys(itertools.chain.from_iterable(candidates.values()))
    missing = [
        document
        for document in distinct_candidates
        if document not in shard_and_row and document not in failed_ids
    ]
    if missing:
        raise ArgumentDataError(
            "documents",
            f"no token vectors of candidate {missing[0]!r} ({len(missing)} of "
            f"{len(distinct_candidates)} candidates have none). Encode the collection that they "
            "come from.",
        )
    pairs: dict[int, list[_Pair]] = {}
    for query, document_ids in candidates.items():
        for document in document_ids:
            if document in shard_and_row:
                shard, row = shard_and_row[document]
                pairs.setdefault(shard, []).append(_Pair(query, document, row))
    return pairs


def _score_pairs(
    queries: TokenVectors,
    documents: TokenVectors,
    pairs: Tensor,
    device: torch.device,
    reduction: str,
    impl: str,
) -> list[float]:
    """Compute MaxSim of pairs of queries and documents.

    Args:
        queries: token vectors of the queries.
        documents: token vectors of the documents.
        pairs: int64 ``[n, 2]``, the row of the query and the row of the document of each pair.
        device: the device that computes.
        reduction: ``"sum"`` or ``"mean"`` over query tokens.
        impl: the implementation, as in :func:`tilefold.ops.maxsim`.

    Returns:
        The score of each pair.
    """
    if not pairs.numel():
        return []
    if device.type != "cpu":
        # Only documents that occur in a pair are copied to the device.
        rows, positions = torch.unique(pairs[:, 1], return_inverse=True)
        documents = documents.take(rows.tolist())
        pairs = torch.stack([pairs[:, 0], positions], dim=1)
    packed = documents.packed()
    # Queries are converted to the dtype of the documents, or to fp32 for int8 documents.
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
            "expected finite token vectors, got NaN or infinite values. Encode them again.",
        )
    return list(scores.tolist())


def _rank_with_tail(
    document_ids: list[str], scores: dict[str, float], tail: Tail
) -> dict[str, float]:
    """Rank documents by their scores, and keep or drop the documents without a score (the tail).

    Documents of the tail get scores below the lowest score, in the order of `document_ids`.

    Args:
        document_ids: all candidates of a query. Equal scores are ranked in this order.
        scores: document id -> score of the candidates that were scored.
        tail: ``"keep"`` or ``"drop"``.

    Returns:
        Document id -> score, best first.
    """
    scored_ids = [document_id for document_id in document_ids if document_id in scores]
    ranked = {
        document_id: scores[document_id]
        for document_id in sorted(scored_ids, key=lambda document_id: -scores[document_id])
    }
    if tail == "drop":
        return ranked
    values = list(ranked.values()) or [0.0]  # no document may have a score
    highest = values[0]
    lowest = values[-1]
    # The step is relative to the largest score, so that rounding does not make neighbours equal.
    # If all scores are 0, the step is TAIL_STEP itself.
    step = TAIL_STEP * (max(abs(lowest), abs(highest)) or 1.0)
    tail_ids = [document_id for document_id in document_ids if document_id not in scores]
    for position, document_id in enumerate(tail_ids, start=1):
        ranked[document_id] = lowest - step * position
    return ranked
