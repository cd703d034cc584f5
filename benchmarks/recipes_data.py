"""Negatives and teachers' scores for the recipes that need them, made offline.

BM25 mines the negatives. The teachers are BM25 and a dense model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.training_data.mining import Window, mine_negatives
from tilefold.retrieval.training_data.rows import write_training_rows
from tilefold.retrieval.training_data.teachers import Teacher, ensemble, score_rows


def make_scores(
    collection: Collection,
    path: Path,
    candidates: int,
    language: str = "english",
    teacher: str = "minilm",
) -> Path:
    """Write scored training rows, as `tilefold mine` and `tilefold score` do.

    Args:
        collection: a collection with a split ``"train"``.
        path: the Parquet file to write.
        candidates: the documents of BM25 per query.
        language: language of BM25.
        teacher: the dense model: ``"minilm"``, a folder or a name. ``"none"`` for BM25 alone.

    Returns:
        ``path``.
    """
    index = BM25Index.build(collection.contents(), language=language)
    run = index.search(collection.split_queries("train"), candidates)
    window = Window(1, candidates, candidates)
    mined = mine_negatives(run.items(), collection, "train", [window])
    rows = mined.rows(
        {
            "kind": "scored",
            "retriever": "bm25",
            "candidates": candidates,
            "teachers": ["bm25", teacher],
            "texts_sha256": texts_digest(collection.contents()),
        },
    )
    teachers = [Teacher("bm25", "bm25", index)]
    if teacher != "none":
        teachers.append(_dense_teacher(teacher))
    scores = {
        model.name: score_rows(model, rows, collection, path.with_suffix(".work"))
        for model in teachers
    }
    scored_rows = replace(rows, teachers=scores, target=ensemble(rows, scores))
    write_training_rows(scored_rows, path)
    return path


def _dense_teacher(name: str) -> Teacher:
    """Load a dense model as a teacher: ``"minilm"``, a folder or a name."""
    from sentence_transformers import SentenceTransformer

    from tilefold.recipes.backbone import load_dense_minilm

    if name == "minilm":
        model = load_dense_minilm()
    else:
        model = SentenceTransformer(name, trust_remote_code=False)
    return Teacher(Path(name).name, "dense", model)
