"""Evaluation of a model while it trains, over a sample of documents that stays the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tilefold._internal.arguments import ArgumentError
from tilefold.recipes._settings import TrainingSettings
from tilefold.retrieval.common.identical_ids import ignores_identical_ids
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection

DEFAULT_DOCUMENTS = 10_000  # searched documents of a recipe that names no number
CUT_OFF = 10  # hits that the measures read
MAX_SCORES = 2**26  # scores of queries and documents in memory at a time, 256 MiB in fp32
MAX_CHUNK_SIZE = 1000  # documents that are encoded and searched at a time


class Evaluation(NamedTuple):
    """Evaluation of a model while it trains.

    Attributes:
        evaluator: evaluator of sentence-transformers; ``None`` for no evaluation.
        description: split, and numbers of queries and documents, in words.
        digest: digest of queries, documents and judgements.
    """

    evaluator: Any = None
    description: str = ""
    digest: str = ""


def create_evaluation(recipe: TrainingSettings, collection: Collection) -> Evaluation:
    """Create the evaluation that repeats while a model trains, on one split of a collection.

    The searched documents are all judged documents of the split, and others that the recipe's seed
    draws.

    Args:
        recipe: the recipe. Without ``evaluate_steps`` there is no evaluation.
        collection: collection with judgements of the split.

    Returns:
        The evaluator of sentence-transformers, its description for the user, and a digest that
        changes with anything that it measures.

    Raises:
        ValueError: if the split has no pairs.
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
    evaluator_class = _evaluator_class(late=recipe.late)
    # As BEIR does, a query that is a document itself must not retrieve itself.
    n_own_documents = _count_own_documents(collection, queries, documents)
    if n_own_documents and not _judges_own_documents(collection, relevant):
        evaluator_class = _ignoring_identical_ids(
            evaluator_class,
            collection.whole_document_of,
            max_own_hits=max(n_own_documents.values()),
        )
        n_queries = len(n_own_documents)
        description += f", hits with the query's own id ignored for {n_queries:,} queries"
        digest += "without identical ids"
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
    return Evaluation(evaluator, f"{split} ({description})", digest)


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
        ValueError: if the split has no pairs.
    """
    relevant: dict[str, set[str]] = {}
    if split in collection.qrels:
        for query_id, document_id in collection.pairs(split):
            relevant.setdefault(query_id, set()).add(document_id)
    if not relevant:
        splits = ", ".join(sorted(collection.qrels)) or "none"
        raise ArgumentError(
            "evaluate_split",
            f"expected pairs of {split!r} in {collection.name!r}, got {splits}. Add positive "
            "judgements to its folder, as qrels/dev.tsv, or name another split.",
        )
    return relevant


def _sample_documents(
    collection: Collection,
    split: str,
    n_documents: int,
    seed: int,
) -> dict[str, str]:
    """Return all judged documents of a split, and random other documents.

    Args:
        collection: the collection.
        split: name of the split.
        n_documents: number of documents of the sample. Judged documents are all in it, even if
            they are more.
        seed: seed of the random documents.

    Returns:
        Id -> text.
    """
    judged_ids: dict[str, None] = {}  # a dictionary, as a set with an order
    for grades in collection.qrels[split].values():
        judged_ids.update(dict.fromkeys(grades))
    contents = collection.contents()
    n_others = max(0, n_documents - len(judged_ids))
    # A draw may hit any judged document, which is skipped. This many draws suffice nevertheless.
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
    contents: Mapping[str, str],
    positions: Iterable[int],
) -> Iterable[tuple[str, str]]:
    """Return the ids and texts of the documents at positions of a collection.

    Args:
        contents: id -> text. It is a dictionary, or a file with a method ``pair`` that reads the
            id and text of a single document.
        positions: positions of the documents.

    Returns:
        Pairs ``(id, text)``.
    """
    read_pair = getattr(contents, "pair", None)
    if read_pair is not None:
        return map(read_pair, positions)
    pairs = list(contents.items())
    return [pairs[position] for position in positions]


def _evaluator_class(*, late: bool) -> Any:
    """Return the class of sentence-transformers that evaluates retrieval with a kind of model.

    Args:
        late: whether the model computes a vector for each token (late interaction); otherwise it
            computes sparse vectors.
    """
    from sentence_transformers.multi_vector_encoder.evaluation import (
        MultiVectorInformationRetrievalEvaluator,
    )
    from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

    if late:
        return MultiVectorInformationRetrievalEvaluator
    return SparseInformationRetrievalEvaluator


def _count_own_documents(
    collection: Collection,
    queries: Iterable[str],
    documents: Iterable[str],
) -> dict[str, int]:
    """Count the documents that have the same id as a query, or are passages of such a document.

    In data sets such as ArguAna and Quora, queries are documents too.

    Args:
        collection: its ``whole_document_of`` maps the id of a passage to that of its document.
        queries: ids of the queries.
        documents: ids of the sampled documents.

    Returns:
        Query id -> number of documents, for queries that have any.
    """
    n_passages = Counter(map(collection.whole_document_of, documents))
    return {query_id: n_passages[query_id] for query_id in queries if query_id in n_passages}


def _judges_own_documents(
    collection: Collection,
    relevant: Mapping[str, Iterable[str]],
) -> bool:
    """Return whether a query has a relevant document with the query's own id.

    The equal id is then an answer or a coincidence, and hits with it must count.

    Args:
        collection: its ``whole_document_of`` maps the id of a passage to that of its document.
        relevant: query id -> ids of its relevant documents.
    """
    judgements: dict[str, dict[str, int]] = {}
    for query_id, document_ids in relevant.items():
        judgements[query_id] = dict.fromkeys(map(collection.whole_document_of, document_ids), 1)
    return not ignores_identical_ids(judgements)


def _ignoring_identical_ids(
    evaluator_class: Any,
    whole_document_of: Callable[[str], str],
    max_own_hits: int,
) -> Any:
    """Return a class of evaluators that leaves out hits of the query's own document, as BEIR does.

    Stock evaluators count them. The class has the name of the stock one, by which model cards and
    logs call it.

    Args:
        evaluator_class: the class of stock evaluators.
        whole_document_of: returns the id of the document of a hit, which may be a passage.
        max_own_hits: the most hits that a query's own document can have.
    """

    class EvaluatorIgnoringIdenticalIds(evaluator_class):
        """Evaluator that collects more hits than it measures, and leaves out some."""

        map_at_k: list[int]

        def __call__(self, *args: Any, **options: Any) -> Any:
            """Evaluate a model, and raise the cut-off of MAP while its hits are collected.

            The stock evaluator collects as many hits as its largest cut-off. A larger one makes up
            for the hits of the query's own document, which ``compute_metrics`` leaves out. That
            method also restores the cut-off before it measures.
            """
            self._map_at_k = self.map_at_k
            cut_offs = (
                self.accuracy_at_k,
                self.precision_recall_at_k,
                self.mrr_at_k,
                self.ndcg_at_k,
                self.map_at_k,
            )
            largest = max(max(values) for values in cut_offs)
            self.map_at_k = [*self.map_at_k, largest + max_own_hits]
            try:
                return super().__call__(*args, **options)
            finally:
                self.map_at_k = self._map_at_k

        def compute_metrics(self, queries_result_list: list[Any]) -> Any:
            """Compute the measures of the hits without the query's own document."""
            self.map_at_k = self._map_at_k
            hits_of_others = []
            for query_id, hits in zip(self.queries_ids, queries_result_list, strict=True):
                hits_of_others.append(
                    [hit for hit in hits if whole_document_of(hit["corpus_id"]) != query_id],
                )
            return super().compute_metrics(hits_of_others)

    for attribute in ("__name__", "__qualname__", "__module__"):
        value = getattr(evaluator_class, attribute)
        setattr(EvaluatorIgnoringIdenticalIds, attribute, value)
    return EvaluatorIgnoringIdenticalIds
