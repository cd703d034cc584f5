"""Evaluation of a model while it trains, over a sample of documents that stays the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from tilefold._internal.arguments import ArgumentError
from tilefold.recipes._rows import PagesInMemory
from tilefold.recipes._settings import TrainingSettings
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.lazy_documents import LazyDocuments
from tilefold.retrieval.data.pages import Page

DEFAULT_DOCUMENTS = 10_000  # number of searched documents, if the recipe sets none
CUT_OFF = 10  # number of hits that are measured
MAX_SCORES = 2**26  # scores of queries and documents in memory at a time, 256 MiB in fp32
MAX_CHUNK_SIZE = 1000  # documents that are encoded and searched at a time


class Evaluation(NamedTuple):
    """Evaluation of a model while it trains.

    Attributes:
        evaluator: evaluator of sentence-transformers; ``None`` for no evaluation.
        description: split, and numbers of queries and documents, for the user.
        digest: digest of queries, documents, judgements and whether identical ids are ignored.
    """

    evaluator: Any = None
    description: str = ""
    digest: str = ""


def create_evaluation(recipe: TrainingSettings, collection: Collection) -> Evaluation:
    """Create the evaluation that is repeated during training, on one split of a collection.

    It searches all judged documents of the split, and a random sample of other documents.

    Args:
        recipe: the recipe. Without ``evaluate_steps`` there is no evaluation.
        collection: collection with judgements of the split.

    Returns:
        The evaluation. Its evaluator is ``None`` if the recipe does not evaluate.

    Raises:
        ValueError: if the split has no positive judgements.
    """
    if recipe.evaluate_steps is None or recipe.max_steps == 0:
        return Evaluation()
    split = recipe.evaluate_split or _default_split(collection)
    relevant = _relevant_documents(collection, split)
    queries = {query_id: collection.queries[query_id] for query_id in relevant}
    n_documents = recipe.evaluate_documents or DEFAULT_DOCUMENTS
    documents = _sample_documents(collection, split, n_documents, recipe.seed)
    description = f"{len(queries):,} queries, {len(documents):,} documents"
    judgements = {query_id: repr(sorted(names)) for query_id, names in relevant.items()}
    digest = texts_digest(queries) + texts_digest(documents) + texts_digest(judgements)
    evaluator_class = _evaluator_class(multi_vector=recipe.late)
    # In data sets such as ArguAna and Quora, queries are documents too. As in BEIR, such a query
    # must not retrieve itself, which is called its own hit here.
    document_of = collection.whole_document_of
    n_own_hits = _count_own_hits(queries, documents, document_of)
    if n_own_hits and not _is_relevant_to_itself(relevant, document_of):
        evaluator_class = _class_ignoring_own_hits(
            evaluator_class,
            document_of,
            max_own_hits=max(n_own_hits.values()),
        )
        n_queries = len(n_own_hits)
        description += f", hits with the query's own id ignored for {n_queries:,} queries"
        digest += "without identical ids"
    evaluator = _create_evaluator(evaluator_class, queries, documents, relevant, split)
    return Evaluation(evaluator, f"{split} ({description})", digest)


def _create_evaluator(
    evaluator_class: Any,
    queries: Mapping[str, str],
    documents: Mapping[str, Content],
    relevant: Mapping[str, Set[str]],
    split: str,
) -> Any:
    """Create an evaluator that computes nDCG@10 and the other measures of the first ten hits.

    Args:
        evaluator_class: an information retrieval evaluator of sentence-transformers.
        queries: query id -> text.
        documents: document id -> text or page.
        relevant: query id -> ids of its relevant documents.
        split: name of the split, which the names of the measures contain.
    """
    evaluator = evaluator_class(
        queries,
        documents,
        relevant,
        corpus_chunk_size=max(1, min(MAX_CHUNK_SIZE, MAX_SCORES // len(queries))),
        accuracy_at_k=[CUT_OFF],
        precision_recall_at_k=[CUT_OFF],
        map_at_k=[CUT_OFF],
        name=split,
        write_csv=False,
    )
    if any(isinstance(content, Page) for content in documents.values()):
        evaluator.corpus = _PageCorpus(PagesInMemory(documents.values()))
    return evaluator


class _PageCorpus(Sequence[Any]):
    """Documents of an evaluator, whose page images are read chunk by chunk.

    Args:
        pages: pages of the documents.
    """

    def __init__(self, pages: PagesInMemory) -> None:
        self._pages = pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return self._pages.at(range(*item.indices(len(self))))
        return self._pages.at([item])[0]


def _default_split(collection: Collection) -> str:
    """Return ``"dev"``, or the only split other than train and test."""
    splits = sorted({*collection.qrels} - {"train", "test"})
    if len(splits) == 1:
        return splits[0]
    return "dev"


def _relevant_documents(collection: Collection, split: str) -> dict[str, set[str]]:
    """Return the ids of the relevant documents of each query of a split.

    Args:
        collection: the collection.
        split: name of the split.

    Returns:
        Query id -> ids of its relevant documents, for queries that have any.

    Raises:
        ValueError: if the split has no positive judgements.
    """
    relevant: dict[str, set[str]] = {}
    if split in collection.qrels:
        for query_id, document_id in collection.pairs(split):
            relevant.setdefault(query_id, set()).add(document_id)
    if not relevant:
        splits = ", ".join(sorted(collection.qrels)) or "none"
        raise ArgumentError(
            "evaluate_split",
            f"must be a split of {collection.name!r} with positive judgements, got {split!r}; the "
            f"collection has judgements of: {splits}. Add positive judgements to its folder, as "
            "qrels/dev.tsv, or name another split.",
        )
    return relevant


def _sample_documents(
    collection: Collection,
    split: str,
    n_documents: int,
    seed: int,
) -> dict[str, Content]:
    """Return all judged documents of a split, and random other documents.

    Args:
        collection: the collection.
        split: name of the split.
        n_documents: number of documents in all. All judged documents are returned, even if they
            are more.
        seed: seed of the random documents.

    Returns:
        Id -> text or page.
    """
    judged_ids: dict[str, None] = {}  # a dictionary, as a set with an order
    for grades in collection.qrels[split].values():
        judged_ids.update(dict.fromkeys(grades))
    contents = collection.content()
    n_others = max(0, n_documents - len(judged_ids))
    # Judged documents among the draws are skipped, so as many more are drawn.
    n_draws = min(len(contents), n_others + len(judged_ids))
    generator = random.Random(seed)  # noqa: S311 - reproducible, no secret
    positions = generator.sample(range(len(contents)), n_draws)
    documents = {document_id: contents[document_id] for document_id in judged_ids}
    others = [
        (document_id, text)
        for document_id, text in _documents_at(contents, positions)
        if document_id not in judged_ids
    ]
    documents.update(others[:n_others])
    return documents


def _documents_at(
    contents: Mapping[str, Content],
    positions: Sequence[int],
) -> Iterable[tuple[str, Content]]:
    """Return the ids and texts, or pages, of the documents at the given positions.

    Args:
        contents: id -> text or page, for all documents in their order.
        positions: positions of the documents.

    Returns:
        Pairs ``(id, text or page)``.
    """
    if isinstance(contents, LazyDocuments):  # reads only these documents from a file
        return contents.pairs_at(positions)
    pairs = list(contents.items())
    return [pairs[position] for position in positions]


def _evaluator_class(*, multi_vector: bool) -> Any:
    """Return the evaluator class of sentence-transformers for multi-vector or sparse models.

    Args:
        multi_vector: whether the model computes a vector for each token (late interaction);
            otherwise it computes sparse vectors.
    """
    from sentence_transformers.multi_vector_encoder.evaluation import (
        MultiVectorInformationRetrievalEvaluator,
    )
    from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

    if multi_vector:
        return MultiVectorInformationRetrievalEvaluator
    return SparseInformationRetrievalEvaluator


def _count_own_hits(
    queries: Iterable[str],
    documents: Iterable[str],
    document_of: Callable[[str], str],
) -> dict[str, int]:
    """Count the documents whose id is the id of a query, or that are passages of such a document.

    Args:
        queries: ids of the queries.
        documents: ids of the sampled documents, or of their passages.
        document_of: maps the id of a passage to the id of its document.

    Returns:
        Query id -> number of documents, for queries with at least one.
    """
    counts = Counter(map(document_of, documents))
    return {query_id: counts[query_id] for query_id in queries if query_id in counts}


def _is_relevant_to_itself(
    relevant: Mapping[str, Iterable[str]],
    document_of: Callable[[str], str],
) -> bool:
    """Return whether a document with the id of a query is relevant to that query.

    If so, equal ids do not mean equal texts, and hits with the query's id must count.

    Args:
        relevant: query id -> ids of its relevant documents, or of their passages.
        document_of: maps the id of a passage to the id of its document.
    """
    return any(
        query_id in map(document_of, document_ids) for query_id, document_ids in relevant.items()
    )


def _class_ignoring_own_hits(
    evaluator_class: Any,
    document_of: Callable[[str], str],
    max_own_hits: int,
) -> Any:
    """Return an evaluator class that ignores hits with the id of the query, as BEIR does.

    Evaluators of sentence-transformers count such hits. The new class keeps the name of
    `evaluator_class`, because model cards and logs show it.

    Args:
        evaluator_class: an information retrieval evaluator of sentence-transformers.
        document_of: maps the id of a hit, which may be a passage, to the id of its document.
        max_own_hits: the largest number of hits that a query can have with its own id.
    """

    class EvaluatorIgnoringOwnHits(evaluator_class):
        """Evaluator that retrieves a few more hits, and ignores those with the id of the query."""

        map_at_k: list[int]
        measured_map_at_k: list[int]  # the cut-offs of MAP that are measured

        def __call__(self, *args: Any, **options: Any) -> Any:
            """Evaluate a model, with enough hits to replace the ignored ones.

            The evaluator retrieves as many hits as its largest cut-off. A larger cut-off of MAP is
            therefore added while it retrieves, and removed by :meth:`compute_metrics`.
            """
            self.measured_map_at_k = self.map_at_k
            cut_offs = (
                self.accuracy_at_k,
                self.precision_recall_at_k,
                self.mrr_at_k,
                self.ndcg_at_k,
                self.map_at_k,
            )
            largest_cut_off = max(max(values) for values in cut_offs)
            self.map_at_k = [*self.map_at_k, largest_cut_off + max_own_hits]
            try:
                return super().__call__(*args, **options)
            finally:  # an error may come before compute_metrics()
                self.map_at_k = self.measured_map_at_k

        def compute_metrics(self, queries_result_list: list[Any]) -> Any:
            """Compute the measures of the hits that do not have the id of the query.

            Args:
                queries_result_list: hits of each query, with the keys ``corpus_id`` and ``score``.
            """
            self.map_at_k = self.measured_map_at_k
            counted_hits = []
            for query_id, hits in zip(self.queries_ids, queries_result_list, strict=True):
                counted_hits.append(
                    [hit for hit in hits if document_of(hit["corpus_id"]) != query_id],
                )
            return super().compute_metrics(counted_hits)

    for attribute in ("__name__", "__qualname__", "__module__"):
        value = getattr(evaluator_class, attribute)
        setattr(EvaluatorIgnoringOwnHits, attribute, value)
    return EvaluatorIgnoringOwnHits
