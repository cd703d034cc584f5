"""The stock evaluator of a model while it trains: queries of a split, and a sample of the documents
that stays.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilefold._internal.arguments import ArgumentError
from tilefold.recipes._settings import TrainingSettings
from tilefold.retrieval.common.identical_ids import ignores_identical_ids
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection


def choose(recipe: TrainingSettings, collection: Collection) -> tuple[Any, str, str]:
    """The evaluator of a recipe, None without ``evaluate_steps``; what it reads, in words; and its
    digests.
    """
    if recipe.evaluate_steps is None or recipe.max_steps == 0:
        return None, "", ""
    others = sorted({*collection.qrels} - {"train", "test"})
    split = recipe.evaluate_split or ("dev" if "dev" in others or len(others) != 1 else others[0])
    relevant: dict[str, set[str]] = {}
    for query, document in collection.pairs(split) if split in collection.qrels else ():
        relevant.setdefault(query, set()).add(document)
    if not relevant:
        got = ", ".join(sorted(collection.qrels)) or "none"
        remedy = "Add positive judgements to its folder, as qrels/dev.tsv, or name another split."
        raise ArgumentError(
            "evaluate_split",
            f"expected pairs of {split!r} in {collection.name!r}, got {got}. {remedy}",
        )
    from sentence_transformers.multi_vector_encoder.evaluation import (
        MultiVectorInformationRetrievalEvaluator,
    )
    from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

    judged = dict.fromkeys(name for grades in collection.qrels[split].values() for name in grades)
    contents, chance = collection.contents(), random.Random(recipe.seed)  # noqa: S311 - reproducible, no secret
    count = max(0, (recipe.evaluate_documents or 10_000) - len(judged))
    pair: Callable[[int], tuple[str, str]] = (
        getattr(contents, "pair", None) or list(contents.items()).__getitem__
    )
    drawn = map(pair, chance.sample(range(len(contents)), min(len(contents), count + len(judged))))
    rest = [(name, text) for name, text in drawn if name not in judged]
    queries = {query: collection.queries[query] for query in relevant}
    documents = {name: contents[name] for name in judged} | dict(rest[:count])
    evaluator_class: Any = (
        MultiVectorInformationRetrievalEvaluator
        if recipe.late
        else SparseInformationRetrievalEvaluator
    )
    # Entries of the sample by whole document, which may have several passages among them.
    entry_counts = Counter(map(collection.whole_document_of, documents))
    own_entry_counts = {query: entry_counts[query] for query in queries if query in entry_counts}
    relevant_documents = {
        query: {collection.whole_document_of(name): 1 for name in names}
        for query, names in relevant.items()
    }
    ignoring = bool(own_entry_counts) and ignores_identical_ids(relevant_documents)
    if ignoring:
        evaluator_class = _ignoring_identical_ids(
            evaluator_class,
            collection.whole_document_of,
            n_more=max(own_entry_counts.values()),
        )
    evaluator = evaluator_class(
        *(queries, documents, relevant),
        corpus_chunk_size=max(
            1,
            min(1000, 2**26 // len(queries)),
        ),  # of the scores in memory at a time
        **{name: [10] for name in ("accuracy_at_k", "precision_recall_at_k", "map_at_k")},
        name=split,
        write_csv=False,
    )
    sizes = f"{len(queries):,} queries, {len(documents):,} documents"
    judgements = {query: repr(sorted(names)) for query, names in relevant.items()}
    digests = "".join(map(texts_digest, (queries, documents, judgements)))
    if ignoring:
        sizes += f", hits with the query's own id ignored for {len(own_entry_counts):,} queries"
        digests += "without identical ids"
    return evaluator, f"{split} ({sizes})", digests


def _ignoring_identical_ids(
    evaluator_class: Any,
    whole_document_of: Callable[[str], str],
    n_more: int,
) -> Any:
    """Return a class of evaluators that leaves out hits of the query's own document, as BEIR does.

    Stock evaluators count them. The class has the name of the stock one, by which model cards and
    logs call it.

    Args:
        evaluator_class: the class of stock evaluators.
        whole_document_of: id of the document of a hit, which may be a passage.
        n_more: the most hits that a query's own document can have.
    """

    class Ignoring(evaluator_class):
        map_at_k: list[int]

        def __call__(self, *args: Any, **options: Any) -> Any:
            self._map_at_k = self.map_at_k
            cut_offs = (
                self.accuracy_at_k,
                self.precision_recall_at_k,
                self.mrr_at_k,
                self.ndcg_at_k,
                self.map_at_k,
            )
            deepest = max(max(values) for values in cut_offs)
            self.map_at_k = [*self.map_at_k, deepest + n_more]  # collects so many hits
            try:
                return super().__call__(*args, **options)
            finally:
                self.map_at_k = self._map_at_k

        def compute_metrics(self, queries_result_list: list[Any]) -> Any:
            self.map_at_k = self._map_at_k
            others = [
                [hit for hit in hits if whole_document_of(hit["corpus_id"]) != query]
                for query, hits in zip(self.queries_ids, queries_result_list, strict=True)
            ]
            return super().compute_metrics(others)

    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(Ignoring, attribute, getattr(evaluator_class, attribute))
    return Ignoring
