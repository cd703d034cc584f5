"""Teacher scores for the recipes that need them, made offline: BM25 mines, BM25 and the dense MiniLM teach."""

# ruff: noqa: PLC0415 - heavy packages are imported when the rows are made

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tilefold.retrieval.bm25 import BM25Index
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.training_rows import TrainingRows, write_training_rows

SCALE = 30.0  # of the ensemble, as OpenSearch scales it (arXiv 2411.04403)


def make_scores(
    collection: Collection, path: Path, candidates: int, language: str = "english", teacher: str = "minilm"
) -> Path:
    """Write the rows of the training queries: BM25's best documents and the relevant ones, scored by two teachers.

    The score to train with is the ensemble: each teacher between 0 and 1 within a query, their mean, times `SCALE`.
    """
    queries = collection.split_queries("train")
    contents = collection.contents()
    index = BM25Index.build(contents, language=language)
    found = index.search(queries, candidates)
    names: list[list[str]] = []
    for query in queries:
        relevant = [name for name, grade in collection.qrels["train"][query].items() if grade > 0]
        names.append(list(dict.fromkeys([*found[query], *relevant])))
    lexical = _lexical(index, queries, names)
    scores = {"bm25": lexical}
    if teacher:
        scores[teacher] = _dense(teacher, contents, queries, names)
    counts = np.array([len(row) for row in names])
    place = {name: i for i, name in enumerate(contents)}
    judged = [collection.qrels["train"][query] for query in queries]
    write_training_rows(
        TrainingRows(
            list(queries),
            list(contents),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array([place[name] for row in names for name in row], np.int32),
            np.array([grades.get(name, 0) > 0 for grades, row in zip(judged, names, strict=True) for name in row]),
            np.array(
                [
                    rank + 1 if name in found[query] else 0
                    for query, row in zip(queries, names, strict=True)
                    for rank, name in enumerate(row)
                ],
                np.int32,
            ),
            lexical,
            scores,
            ensemble(list(scores.values()), counts),
            {
                "command": "benchmarks.recipes",
                "texts_sha256": texts_digest(contents),
                "candidates": candidates,
                "teachers": list(scores),
                "scale": SCALE,
            },
        ),
        path,
    )
    return path


def ensemble(teachers: list[Any], counts: Any) -> Any:
    """``SCALE * mean_t (s_t - min_t) / (max_t - min_t)`` ``[n]``, minimum and maximum over the rows of a query."""
    total = np.zeros(int(counts.sum()))
    starts = np.concatenate([[0], np.cumsum(counts)])
    for scores in teachers:
        for low, high in pairwise(starts.tolist()):
            row = scores[low:high].astype(np.float64)
            total[low:high] += (row - row.min()) / max(row.max() - row.min(), 1e-6)
    return (SCALE * total / len(teachers)).astype(np.float32)


def _lexical(index: BM25Index, queries: dict[str, str], names: list[list[str]]) -> Any:
    """BM25's score of every row, of documents beyond its best ones too."""
    documents, asked = index.document_vectors(), index.query_vectors(queries)
    place = {name: i for i, name in enumerate(documents.ids)}
    scores = []
    for i, row in enumerate(names):
        weight_of = dict(zip(*(values.tolist() for values in asked.row(i)), strict=True))
        for name in row:
            terms, weights = documents.row(place[name])
            pairs = zip(terms.tolist(), weights.tolist(), strict=True)
            scores.append(sum(weight * weight_of.get(term, 0.0) for term, weight in pairs))
    return np.array(scores, np.float32)


def _dense(teacher: str, contents: dict[str, str], queries: dict[str, str], names: list[list[str]]) -> Any:
    from sentence_transformers import SentenceTransformer

    from tilefold.recipes.backbone import load_dense_minilm
    from tilefold.retrieval.dense import encode_dense

    model = load_dense_minilm() if teacher == "minilm" else SentenceTransformer(teacher, trust_remote_code=False)
    wanted = {name: contents[name] for name in dict.fromkeys(name for row in names for name in row)}
    documents = encode_dense(model, wanted, kind="document")
    asked = encode_dense(model, queries, kind="query")
    place = {name: i for i, name in enumerate(wanted)}
    parts = [
        model.similarity(asked[i : i + 1], documents[[place[name] for name in row]])[0].float().cpu().numpy()
        for i, row in enumerate(names)
    ]
    return np.concatenate(parts).astype(np.float32)
