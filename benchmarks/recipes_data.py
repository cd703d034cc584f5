"""Teacher scores for the recipes that need them, made offline: BM25 mines, BM25 and a dense model
teach.
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
    """Write the rows of the training queries, as `tilefold mine` and `tilefold score` do.

    Args:
        collection: with a split ``"train"``.
        path: the Parquet file.
        candidates: documents of BM25 per query.
        language: of BM25.
        teacher: a dense model beside BM25: ``"minilm"``, a folder or a name; ``"none"`` for BM25
            alone.
    """
    index = BM25Index.build(collection.contents(), language=language)
    found = index.search(collection.split_queries("train"), candidates)
    mined = mine_negatives(found.items(), collection, "train", [Window(1, candidates, candidates)])
    made_by = {
        "kind": "scored",
        "retriever": "bm25",
        "candidates": candidates,
        "teachers": ["bm25", teacher],
    }
    rows = mined.rows(made_by | {"texts_sha256": texts_digest(collection.contents())})
    teachers = [Teacher("bm25", "bm25", index)]
    if teacher != "none":
        teachers.append(_dense(teacher))
    scores = {
        each.name: score_rows(each, rows, collection, path.with_suffix(".work"))
        for each in teachers
    }
    scored = replace(rows, teachers=scores, target=ensemble(rows, scores))
    write_training_rows(scored, path, overwrite=True)
    return path


def _dense(name: str) -> Teacher:
    from sentence_transformers import SentenceTransformer

    from tilefold.recipes.backbone import load_dense_minilm

    model = (
        load_dense_minilm()
        if name == "minilm"
        else SentenceTransformer(name, trust_remote_code=False)
    )
    return Teacher(Path(name).name, "dense", model)
