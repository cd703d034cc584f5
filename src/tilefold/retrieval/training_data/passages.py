"""Conversion of a collection to one whose documents are passages, for training."""

from __future__ import annotations

import numpy as np

from tilefold._internal.arguments import check_instance
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.passages import Passage, Passages, document_of
from tilefold.retrieval.index.bm25 import BM25Index, BM25Options

__all__ = ["training_passages"]


def training_passages(
    passages: Passages,
    collection: Collection,
    *,
    language: str = BM25Options.language,
) -> Collection:
    """Return a collection whose documents are the passages of another collection's documents.

    The passage of a relevant document that BM25 scores highest for the query inherits the grade of
    the document; ties go to the first passage. Other passages are not judged.

    Args:
        passages: settings that determine how documents are split into passages.
        collection: collection of whole documents, with judgements.
        language: language of BM25's stop words and stemmer, as in
            :class:`tilefold.retrieval.BM25Options`; ``"none"`` uses neither.

    Raises:
        TypeError: if `collection` is not a :class:`Collection`, or `passages` is not a
            :class:`Passages`.
        ValueError: if the language has no stemmer.
    """
    check_instance("passages", passages, Passages, "Passages(length)")
    check_instance("collection", collection, Collection, "load_collection(path)")
    texts = passages.of(collection.documents)
    index = BM25Index.build(texts, language=language)
    best_passage_of = _BestPassage(index, collection)
    qrels: dict[str, dict[str, dict[str, int]]] = {}
    for split, document_qrels in collection.qrels.items():
        qrels[split] = {}
        for query, grades in document_qrels.items():
            qrels[split][query] = {
                best_passage_of(query, document): grade
                for document, grade in grades.items()
                if grade > 0
            }
    documents = {}
    for passage_id in texts:
        passage = Passage.of(passage_id)
        documents[passage.id] = passage.of_document(collection.documents[passage.document])
    return Collection(collection.name, documents, collection.queries, qrels, str(passages))


class _BestPassage:
    """Function that finds the passage of a document that BM25 scores highest for a query.

    Args:
        index: index of all passages.
        collection: collection with the queries.
    """

    def __init__(self, index: BM25Index, collection: Collection) -> None:
        """Read the vectors of all passages and queries.

        Args:
            index: index of all passages.
            collection: collection with the queries.
        """
        self._vectors = index.document_vectors()
        self._queries = index.query_vectors(collection.queries)
        self._rows_of_document: dict[str, list[int]] = {}
        for row, passage in enumerate(self._vectors.ids):
            self._rows_of_document.setdefault(document_of(passage), []).append(row)
        # Dense weights of the current query, `[V]`. A call sets them and resets them to 0, because
        # a new array for each call would be slow with a large vocabulary.
        self._query_weights = np.zeros(self._vectors.vocab_size)

    def __call__(self, query: str, document: str) -> str:
        """Return the id of the best passage of a document.

        Args:
            query: id of the query.
            document: id of the document.
        """
        query_terms, query_weights = self._queries.row(self._queries.row_of[query])
        self._query_weights[query_terms] = query_weights
        rows = self._rows_of_document[document]
        scores = []
        for row in rows:
            terms, weights = self._vectors.row(row)
            scores.append(float(self._query_weights[terms] @ weights))
        self._query_weights[query_terms] = 0
        return self._vectors.ids[rows[int(np.argmax(scores))]]
