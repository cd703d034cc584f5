"""Rerank the candidates of any retriever with exact late interaction (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tilefold._internal.arguments import (
    check_choice,
    check_instance,
    check_least,
    check_mapping,
    check_share,
)
from tilefold._internal.typing import Model
from tilefold.ops import QuantizedTokens, maxsim
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.encoding.tokens import encode_texts, token_dimension
from tilefold.retrieval.errors import DataError, MissingDocumentError
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
    A shard of a store is scored by one call over the pairs that are in it: on the CPU in place,
    memory-mapped; on a GPU only the candidates' rows are copied there, each once.

    Args:
        run: query id -> document id -> score of a first retriever, in any order.
        queries, documents: token vectors of all queries and candidates, in memory or of
            ``open_tokens``.
        depth: candidates per query to score, those with the highest first scores; all of them when
            None.
        tail: what becomes of candidates below `depth` or without a token vector (empty, or failed
            when encoded):
            ``"keep"`` puts them after the others, in their first order; ``"drop"`` leaves them out.
        reduction: ``"mean"`` divides by the query's tokens, as models with ``"meanmaxsim"`` do;
            ``"sum"`` does not.
        device, impl: by default a GPU if there is one; as in :func:`tilefold.ops.maxsim`.

    Documents come best first. A kept tail has scores just below the lowest MaxSim, 5e-7 of the
    scores' magnitude apart: an order and no measurement, too close to change a min-max
    normalisation. A wrong option, vectors of other dimensions than the queries, or int8 vectors of
    queries are a ``ValueError``; a query or a candidate without vectors is a ``DataError`` that
    names the first and says how many.
    """
    check_mapping("run", run, "query id -> scores by document")
    check_instance("queries", queries, TokenVectors, "encode_texts(model, queries, kind='query')")
    check_instance("documents", documents, (TokenStore, TokenVectors), "open_tokens(folder)")
    check_least("depth", depth)
    check_choice("tail", tail, TAILS)
    if queries.values.dtype == torch.int8:
        raise ValueError(
            "queries: expected fp16 or fp32 vectors, got int8; encode them with storage='fp16'.",
        )
    if queries.dimension != (got := documents.dimension):
        dimension = f"token vectors of the queries' dimension {queries.dimension}"
        raise ValueError(
            f"documents: expected {dimension}, got {got}. Encode both with the same model.",
        )
    for query, first in run.items():
        check_scores("run", query, first, finite=False)
    ordered = {query: _ordered(scores) for query, scores in run.items()}
    chosen = {query: names[:depth] for query, names in ordered.items()}
    query_rows = {name: row for row, name in enumerate(queries.ids)}
    if missing := [query for query in run if query not in query_rows]:
        raise DataError(
            f"queries: no token vectors of {missing[0]!r} ({len(missing)} in all). Encode these queries.",
        )
    places = _places(documents, chosen)
    wanted: dict[int, list[tuple[str, str, int]]] = {}
    for query, names in chosen.items():
        for name in names:
            if name in places:
                shard, row = places[name]
                wanted.setdefault(shard, []).append((query, name, row))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found: dict[str, dict[str, float]] = {query: {} for query in run}
    for shard, pairs in sorted(wanted.items()):
        vectors = documents if isinstance(documents, TokenVectors) else documents.shard(shard)
        lengths = vectors.offsets.diff().tolist()
        scored = [pair for pair in pairs if lengths[pair[2]]]
        index = torch.tensor([[query_rows[query], row] for query, _, row in scored]).reshape(-1, 2)
        scores = _scores(queries, vectors, index, where, reduction, impl)
        for (query, name, _), score in zip(scored, scores, strict=True):
            found[query][name] = score
    return {query: _completed(names, found[query], tail) for query, names in ordered.items()}


@dataclass(frozen=True)
class Reranking:
    """Options of reranking candidates; a value out of range is a ``ValueError``.

    Attributes:
        depth, tail: as in :func:`rerank`.
        weight: of MaxSim in an interpolation with the first scores, both from 0 to 1 per query,
            where candidates below `depth` keep their share; None takes MaxSim alone.
    """

    depth: int | None = None
    tail: Tail = "keep"
    weight: float | None = None

    def __post_init__(self) -> None:
        check_least("depth", self.depth)
        check_choice("tail", self.tail, TAILS)
        if self.weight is not None:
            check_share("weight", self.weight)


@dataclass(frozen=True)
class Reranker:
    """A late-interaction model, and the token vectors of documents by it or the texts that it
    encodes.

    `tokens` of queries are a ``ValueError``; of other documents than `made_of`, or by another
    model, a ``DataError``.
    """

    model: Model
    tokens: TokenStore | None = None
    documents: Mapping[str, Document] = field(
        default_factory=dict,
    )  # read where there are no `tokens`
    made_of: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        if self.tokens is None:
            return
        manifest, folder = self.tokens.manifest, self.tokens.folder
        if manifest.kind != "document":
            raise ValueError(
                f"tokens: {folder} holds {manifest.kind} vectors; encode documents, without --queries.",
            )
        if "texts_sha256" in self.made_of.differs(manifest.provenance):
            said = f"{folder} holds token vectors of other documents (another collection, or changed since)"
            raise DataError(
                f"tokens: {said}. Encode those searched: tilefold encode --model MULTI_VECTOR_MODEL",
            )
        if (dimension := token_dimension(self.model, "query")) != manifest.dimension:
            held = f"{folder} holds vectors of dimension {manifest.dimension}"
            remedy = "give the model that made them, or encode the documents with this one"
            raise DataError(f"model: makes vectors of dimension {dimension}, and {held}; {remedy}.")
        if manifest.model_fingerprint not in (None, model_fingerprint(self.model)):
            differ = "its weights or settings differ"
            raise DataError(
                f"model: is not the model that made {folder} ({differ}); give that one.",
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
        """`run` ordered by MaxSim, and mixed with the first scores; which passages were the best,
        where some were read.

        `encoded` queries and `candidates` spare encoding. Of a document, all its passages are
        scored where `tokens` are of such, and the best one counts; without tokens, the one that it
        was found by, of `passages`. With ``by="passage"``, `run` names passages, which are ordered
        themselves.
        """
        if not (run := {query: scores for query, scores in run.items() if scores}):
            return run, run, {}
        depth, weight = reranking.depth, reranking.weight
        if encoded is None:
            encoded = encode_texts(
                self.model,
                {query: queries[query] for query in run},
                kind="query",
            )
        documents = self.tokens if self.tokens is not None else candidates
        if documents is None:
            documents = encode_texts(
                self.model,
                self.candidates(run, reranking, by, passages),
                kind="document",
            )
        tail: Tail = reranking.tail if weight is None else "drop"
        reduction = "mean" if self.model.similarity_fn_name == "meanmaxsim" else "sum"
        parts = self._parts(run, depth, by, passages)
        found: BestPassages = {}
        if parts is None:
            late = rerank(run, encoded, documents, depth=depth, tail=tail, reduction=reduction)
        else:
            asked = {
                query: {part: 0.0 for names in of.values() for part in names}
                for query, of in parts.items()
            }
            scores = rerank(asked, encoded, documents, tail="drop", reduction=reduction)
            found = best_passages(scores)[1]
            late = {}
            for query, best in found.items():
                best_scores = {name: scores[query][part] for name, part in best.items()}
                late[query] = _completed(_ordered(run[query]), best_scores, tail)
        if weight is None:
            return late, late, found
        return (
            late,
            interpolate([run, late], [1 - weight, weight], k=max(map(len, run.values()))),
            found,
        )

    @property
    def passages(self) -> str | None:
        """Cut of the documents whose passages have token vectors; None for whole documents, and
        without `tokens`.
        """
        return None if self.tokens is None else self.tokens.manifest.provenance.passages

    def candidates(
        self,
        run: Run,
        reranking: Reranking,
        by: str = "document",
        passages: BestPassages | None = None,
    ) -> dict[str, str]:
        """Texts to encode where there are no `tokens`: id -> text of documents, or of passages that
        they were found by.

        A document that is not there is a ``MissingDocumentError``.
        """
        if (parts := self._parts(run, reranking.depth, by, passages)) is None and by == "document":
            best = dict.fromkeys(
                name for scores in run.values() for name in _ordered(scores)[: reranking.depth]
            )
            return {name: self._document(name).contents for name in best}
        if parts is None:
            parts = {
                q: {name: [name] for name in _ordered(scores)[: reranking.depth]}
                for q, scores in run.items()
            }
        chosen = [
            Passage.of(part) for of in parts.values() for names in of.values() for part in names
        ]
        return {
            passage.id: passage.of_document(self._document(passage.document)).contents
            for passage in chosen
        }

    def _document(self, name: str) -> Document:
        if (document := self.documents.get(name)) is None:
            raise MissingDocumentError("documents", name)
        return document

    def _parts(
        self,
        run: Run,
        depth: int | None,
        by: str,
        passages: BestPassages | None,
    ) -> dict[str, dict[str, list[str]]] | None:
        """Passages that are scored for the best documents of each query; None where documents are
        scored as `run`.
        """
        if by == "passage" or (self.passages is None and (self.tokens is not None or not passages)):
            return None
        best = {query: _ordered(scores)[:depth] for query, scores in run.items()}
        if self.tokens is None:
            found: dict[str, dict[str, list[str]]] = {}
            for query, names in best.items():
                given = (passages or {}).get(
                    query,
                    {},
                )  # and of documents that were found as a whole, all as a passage
                whole = {
                    n: Passage(n, 1, 0, len(self._document(n).text)).id
                    for n in names
                    if not given.get(n)
                }
                found[query] = {name: [given.get(name) or whole[name]] for name in names}
            return found
        held = self.tokens.passages
        return {
            query: {name: held.get(name, [name]) for name in names} for query, names in best.items()
        }


def _ordered(scores: Mapping[str, float]) -> list[str]:
    """Names, best first."""
    return sorted(scores, key=lambda name: -scores[name])


def _places(
    documents: TokenStore | TokenVectors,
    chosen: Mapping[str, list[str]],
) -> dict[str, tuple[int, int]]:
    """(shard, row) of every candidate that has vectors."""
    if isinstance(documents, TokenStore):
        known, failed = documents.ids, documents.manifest.failed
    else:
        known, failed = {name: (0, row) for row, name in enumerate(documents.ids)}, {}
    candidates = dict.fromkeys(name for names in chosen.values() for name in names)
    if missing := [name for name in candidates if name not in known and name not in failed]:
        lacking = f"{missing[0]!r} ({len(missing)} of {len(candidates)} candidates have none)"
        raise DataError(
            f"documents: no token vectors of candidate {lacking}. Encode the collection they come from.",
        )
    return {name: known[name] for name in candidates if name in known}


def _scores(
    queries: TokenVectors,
    documents: TokenVectors,
    index: Tensor,
    device: torch.device,
    reduction: str,
    impl: str,
) -> list[float]:
    if not index.numel():
        return []
    if device.type != "cpu":  # only rows that a pair needs are copied
        rows, inverse = torch.unique(index[:, 1], return_inverse=True)
        documents, index = documents.take(rows.tolist()), torch.stack([index[:, 0], inverse], dim=1)
    packed = documents.packed()
    dtype = torch.float32 if isinstance(packed, QuantizedTokens) else packed.dtype
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        mine, theirs = (side.offsets.to(device, torch.int32) for side in (queries, documents))
        options: dict[str, Any] = {
            "pairing": index.to(device),
            "reduction": reduction,
            "impl": impl,
        }
        tokens = queries.values.to(device, dtype), packed.to(device)
        scores = maxsim(*tokens, cu_seqlens_q=mine, cu_seqlens_d=theirs, **options)
    if not bool(scores.isfinite().all()):
        raise DataError(
            "queries, documents: expected finite token vectors, got some that are not. Encode them again.",
        )
    return list(scores.tolist())


def _completed(names: list[str], scores: dict[str, float], tail: Tail) -> dict[str, float]:
    """`scores`, best first, equal ones in the order of `names`; then, if kept, the names without a
    score.
    """
    place = {name: at for at, name in enumerate(names)}
    best = sorted(scores, key=lambda name: (-scores[name], place[name]))
    ranked = {name: scores[name] for name in best}
    if tail == "drop":
        return ranked
    floor, top = (ranked[best[-1]], ranked[best[0]]) if best else (0.0, 0.0)
    step = TAIL_STEP * (max(abs(floor), abs(top)) or 1.0)
    rest = (name for name in names if name not in scores)
    return ranked | {name: floor - step * after for after, name in enumerate(rest, start=1)}
