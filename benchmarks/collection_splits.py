"""Training and evaluation splits of a collection, and smaller copies of it."""

from __future__ import annotations

import random
from collections.abc import Mapping

from tilefold.retrieval.data.collection import Collection

# Without training judgements, every fourth query is held out for evaluation.
HELD_OUT_STRIDE = 4

Judgements = dict[str, dict[str, int]]


def evaluation_split(collection: Collection) -> str:
    """Return the split to evaluate on: ``"test"`` if there is one, else ``"dev"``.

    Raises:
        ValueError: if the collection has neither.
    """
    for split in ("test", "dev"):
        if split in collection.qrels:
            return split
    raise ValueError(
        f"data must have a test or dev split, got {sorted(collection.qrels)} in {collection.name}.",
    )


def with_splits(collection: Collection, limit: int | None = None) -> Collection:
    """Return the collection with a training and an evaluation split.

    A collection that lacks one of them gives every fourth judged query to evaluation and the
    others to training.

    Args:
        collection: the collection to split.
        limit: the number of documents, and of evaluation queries, to reduce it to. ``None`` keeps
            all.
    """
    qrels = dict(collection.qrels)
    has_evaluation_split = "test" in qrels or "dev" in qrels
    if "train" not in qrels or not has_evaluation_split:
        judged: Judgements = {}
        for split in sorted(qrels):
            judged.update(qrels[split])
        held_out = set(list(judged)[::HELD_OUT_STRIDE])
        qrels = {
            "train": {query: grades for query, grades in judged.items() if query not in held_out},
            "test": {query: grades for query, grades in judged.items() if query in held_out},
        }
    split_collection = Collection(
        collection.name,
        collection.documents,
        collection.queries,
        qrels,
    )
    if limit is None:
        return split_collection
    return subset(split_collection, n_documents=limit, n_queries=limit)


def subset(
    collection: Collection,
    n_documents: int,
    n_queries: int,
    seed: int = 0,
) -> Collection:
    """Return a smaller collection in which the kept queries have all their relevant documents.

    Documents are chosen in this order until there are `n_documents`: those relevant to the chosen
    evaluation queries, those relevant to training queries, then any. Judgements of documents that
    were not chosen are dropped, and so are queries without judgements.

    Args:
        collection: a collection with a training and an evaluation split.
        n_documents: the largest number of documents.
        n_queries: the largest number of evaluation queries.
        seed: the seed of the random choice.
    """
    split = evaluation_split(collection)
    generator = random.Random(seed)  # noqa: S311 - a reproducible sample, no secret
    query_ids, document_ids = _evaluation_queries(
        collection.qrels[split],
        n_documents,
        n_queries,
        generator,
    )
    training_documents = sorted(
        {
            document
            for grades in collection.qrels["train"].values()
            for document, grade in grades.items()
            if grade > 0
        },
    )
    candidates = generator.sample(training_documents, len(training_documents))
    candidates += generator.sample(sorted(collection.documents), len(collection.documents))
    for document in candidates:
        if len(document_ids) >= n_documents:
            break
        document_ids.add(document)
    training_qrels = _restricted(
        collection.qrels["train"],
        list(collection.qrels["train"]),
        document_ids,
    )
    evaluation_qrels = _restricted(collection.qrels[split], query_ids, document_ids)
    judged_queries = training_qrels.keys() | evaluation_qrels.keys()
    return Collection(
        collection.name,
        {name: text for name, text in collection.documents.items() if name in document_ids},
        {query: text for query, text in collection.queries.items() if query in judged_queries},
        {"train": training_qrels, split: evaluation_qrels},
    )


def _evaluation_queries(
    judged: Mapping[str, Mapping[str, int]],
    n_documents: int,
    n_queries: int,
    generator: random.Random,
) -> tuple[list[str], set[str]]:
    """Choose evaluation queries at random; return their ids and those of relevant documents.

    Relevant documents fill at most half of `n_documents`, so that documents of training pairs have
    space in the corpus too.

    Args:
        judged: grades of documents, by query.
        n_documents: size of the corpus.
        n_queries: the largest number of queries.
        generator: source of random numbers.
    """
    query_ids: list[str] = []
    document_ids: set[str] = set()
    for query in generator.sample(sorted(judged), len(judged)):
        relevant = {document for document, grade in judged[query].items() if grade > 0}
        fits = len(document_ids | relevant) <= max(1, n_documents // 2)
        if len(query_ids) < n_queries and fits:
            query_ids.append(query)
            document_ids |= relevant
    return query_ids, document_ids


def _restricted(
    qrels: Mapping[str, Mapping[str, int]],
    query_ids: list[str],
    document_ids: set[str],
) -> Judgements:
    """Return the judgements of some queries about some documents, without empty queries.

    Args:
        qrels: grades of documents, by query.
        query_ids: queries to keep.
        document_ids: documents to keep.
    """
    restricted: Judgements = {}
    for query in query_ids:
        grades = {
            document: grade for document, grade in qrels[query].items() if document in document_ids
        }
        if grades:
            restricted[query] = grades
    return restricted
