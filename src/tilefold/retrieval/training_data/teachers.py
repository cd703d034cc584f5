"""Scores of teachers for training rows: cross-encoders, bi-encoders and BM25; one score from
several of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_choice, check_encoder, check_instance, check_mapping
from tilefold._internal.files import atomic_file
from tilefold._internal.precision import inference_precision, scores_in_fp32
from tilefold._internal.typing import Model
from tilefold.pipeline.ragged import offsets_of
from tilefold.pipeline.truncation import counting_truncation, report_truncation
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.common.provenance import model_fingerprint, texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.encoding.sparse import encode_collection, encode_queries
from tilefold.retrieval.encoding.truncation import report_manifest_truncation
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.training_data.rows import Floats, TrainingRows, check_rows
from tilefold.retrieval.vectors.shards import Manifest
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.retrieval.vectors.sparse_files import read_vectors

__all__ = ["KINDS", "NORMALIZATIONS", "Teacher", "ensemble", "score_rows", "with_relevant"]

KINDS = ("cross-encoder", "dense", "sparse", "multi-vector", "bm25")
NORMALIZATIONS = ("min_max", "none")
SCALE = 30.0
_EPSILON = 1e-6
SHARD = 2048  # pairs of a cross-encoder between two writes
_ROUNDING = "scores in fp32"  # before, those of cross-encoders were rounded to bf16
_PAIRS = 8192  # pairs compared at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Teacher:
    """A scorer of pairs of query and document."""

    name: str  # of its column
    kind: str  # one of KINDS
    model: Model  # CrossEncoder of one output, SentenceTransformer, SparseEncoder, MultiVectorEncoder or BM25Index

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        self._check_model()
        if self.kind == "cross-encoder" and self.model.num_labels != 1:
            wanted = "a cross-encoder with one output, a relevance score"
            got = f"one with {self.model.num_labels} classes. Take a reranker"
            raise ValueError(f"teacher {self.name}: expected {wanted}, got {got}.")
        if self.kind == "bm25" and self.model.provenance.passages is not None:
            raise ValueError(
                f"teacher {self.name}: expected a BM25 index of whole documents, got one of passages.",
            )

    def _check_model(self) -> None:
        """Raise ``TypeError`` unless the model has the methods that a teacher of its kind needs."""
        if self.kind == "bm25":
            check_instance("model", self.model, BM25Index, "BM25Index.load(folder)")
        elif self.kind == "cross-encoder":
            if not hasattr(self.model, "num_labels"):
                raise TypeError(
                    f"model: expected a CrossEncoder, got {type(self.model).__name__}; pass a loaded model.",
                )
        else:
            classes = {"dense": "SentenceTransformer", "sparse": "SparseEncoder"}
            check_encoder("model", self.model, classes.get(self.kind, "MultiVectorEncoder"))

    @property
    def fingerprint(self) -> str:
        """A digest of the weights and settings that its scores depend on."""
        if self.kind == "bm25":
            settings = asdict(self.model.options) | {"texts": self.model.provenance.texts_sha256}
            return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return model_fingerprint(self.model)

    @property
    def precision(self) -> str | None:
        """Number type in which the model runs now; None for BM25.

        The last layers of a cross-encoder, from which its scores come, run in fp32 nevertheless.
        """
        return None if self.kind == "bm25" else inference_precision(self.model)


class _Task:
    """Distinct texts of rows by number, and which of them each row compares; where and how they are
    scored.
    """

    def __init__(
        self,
        teacher: Teacher,
        rows: TrainingRows,
        collection: Collection,
        work: Path,
        size: int,
        report: Progress,
    ) -> None:
        self.teacher, self.size, self.report = teacher, size, report
        self.queries, query = _distinct([collection.queries[name] for name in rows.queries])
        self.documents, document = _distinct(
            [collection.documents[name].contents for name in rows.documents],
        )
        # of each distinct document the first id
        self.names = [
            rows.documents[at] for at in np.unique(document, return_index=True)[1].tolist()
        ]
        self.query, self.document = query[rows.query_of_row()], document[rows.document]
        # what was computed in another precision, here or on another machine, is not gone on with
        digest = hashlib.sha256(f"{teacher.fingerprint} {_ROUNDING} {teacher.precision}".encode())
        for texts in (self.queries, self.documents):
            digest.update(texts_digest(texts).encode())
        self.folder = work / f"{digest.hexdigest()[:16]}-documents"  # their vectors
        for array in (self.query, self.document):
            digest.update(array.tobytes())
        self.column = work / f"{digest.hexdigest()[:16]}.npy"


def _distinct(texts: Sequence[str]) -> tuple[dict[str, str], npt.NDArray[np.int64]]:
    """Number -> each distinct text, and the number of each text."""
    number: dict[str, int] = {}
    of = np.array([number.setdefault(text, len(number)) for text in texts], np.int64)
    return {str(at): text for text, at in number.items()}, of


def score_rows(
    teacher: Teacher,
    rows: TrainingRows,
    collection: Collection,
    work: str | Path,
    *,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Floats:
    """The score of `teacher` for each row: float32 ``[N]``, as it comes, a cross-encoder's before
    any activation, and not rounded to 16 bits (:func:`tilefold._internal.precision.scores_in_fp32`).

    Each distinct text is encoded once. The folder `work` keeps what is done, from which the same
    call goes on: 2,048 pairs at a time of a cross-encoder, the vectors of a sparse or multi-vector
    model shard by shard, and every finished column. `batch_size` are texts or pairs at a time;
    ``progress(done, total)`` counts pairs or documents, first what was done before. A text that
    cannot be encoded, or a score that is not finite, is a ``DataError`` that names it.
    """
    check_instance("teacher", teacher, Teacher, "Teacher(name, kind, model)")
    check_rows("rows", rows)
    check_instance("collection", collection, Collection, "load_collection(path)")
    rows.check_collection(collection)
    task = _Task(
        teacher,
        rows,
        collection,
        Path(work),
        batch_size,
        progress or (lambda done, total: None),
    )
    if (scores := _kept(task.column, len(rows))) is not None:
        task.report(len(rows), len(rows))
    else:
        scores = _SCORERS[teacher.kind](teacher.model, task)
        bad = np.flatnonzero(~np.isfinite(scores))
        if bad.size:
            at = int(bad[0])
            pair = f"document {rows.documents[rows.document[at]]!r} of query {rows.queries[rows.query_of_row()[at]]!r}"
            got = f"{scores[at]} to {pair} ({bad.size} in all)"
            raise DataError(f"teacher {teacher.name}: gave {got}. Check the model.")
        _keep(task.column, scores)
    return scores


def _kept(file: Path, n: int) -> Floats | None:
    if not file.is_file():
        return None
    try:
        values: Floats = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # damaged: scored again
        return None
    return values if values.shape == (n,) and bool(np.isfinite(values).all()) else None


def _keep(file: Path, values: Floats) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        np.save(stream, values, allow_pickle=False)


def _cross_encoder(model: Model, task: _Task) -> Floats:
    import torch  # the package is imported without it

    n = len(task.query)
    scores = np.zeros(n, np.float32)
    files = {low: task.column.with_suffix(f".{low:012d}.npy") for low in range(0, n, SHARD)}
    kept = {low: _kept(file, min(SHARD, n - low)) for low, file in files.items()}
    done = sum(len(shard) for shard in kept.values() if shard is not None)
    task.report(done, n)
    for low, file in files.items():
        part, shard = slice(low, min(low + SHARD, n)), kept[low]
        if shard is None:
            pairs = [
                (task.queries[str(q)], task.documents[str(d)])
                for q, d in zip(
                    task.query[part].tolist(),
                    task.document[part].tolist(),
                    strict=True,
                )
            ]
            with counting_truncation() as cut, scores_in_fp32(model):
                predicted = model.predict(
                    pairs,
                    batch_size=task.size,
                    activation_fn=torch.nn.Identity(),
                    apply_softmax=False,
                    show_progress_bar=False,
                )
            report_truncation("pair", len(pairs), cut)
            shard = np.asarray(predicted, np.float32)
            _keep(file, shard)
            done += len(shard)
            task.report(done, n)
        scores[part] = shard
    return scores


def _dense(model: Model, task: _Task) -> Floats:
    from tilefold.retrieval.encoding.dense import encode_dense  # loads torch

    task.report(0, len(task.documents))
    documents = encode_dense(
        model,
        task.documents,
        kind="document",
        batch_size=task.size,
        progress=task.report,
    )
    queries = encode_dense(model, task.queries, kind="query", batch_size=task.size)
    parts = [slice(low, low + _PAIRS) for low in range(0, len(task.query), _PAIRS)]
    scores = [
        model.similarity_pairwise(queries[task.query[part]], documents[task.document[part]])
        for part in parts
    ]
    return np.concatenate([part.float().cpu().numpy() for part in scores])


def _sparse(model: Model, task: _Task) -> Floats:
    if (compared := getattr(model, "similarity_fn_name", "dot")) not in (None, "dot"):
        wanted = "a sparse model that compares by dot product"
        raise ValueError(f"teacher {task.teacher.name}: expected {wanted}, got {compared!r}.")
    _check_all(
        task,
        encode_collection(
            model,
            task.documents,
            task.folder,
            batch_size=task.size,
            progress=task.report,
        ),
    )
    return _products(
        encode_queries(model, task.queries, batch_size=task.size),
        read_vectors(task.folder),
        task,
    )


def _words(index: BM25Index, task: _Task) -> Floats:
    documents = index.document_vectors()
    taken = documents.take([documents.row_of[name] for name in task.names])
    return _products(index.query_vectors(task.queries), taken, task)


def _products(queries: SparseVectors, documents: SparseVectors, task: _Task) -> Floats:
    """The inner product of each row, summed in float64."""
    sparse = require("scipy.sparse", "scipy", "Scores of sparse vectors")
    sides = [
        sparse.csr_array(
            (each.data.astype(np.float64), each.indices, each.indptr),
            (len(each), each.vocab_size),
        )
        for each in (queries, documents)
    ]
    parts = [slice(low, low + _PAIRS) for low in range(0, len(task.query), _PAIRS)]
    pairs = (
        (sides[0][task.query[part]], sides[1][task.document[part]]) for part in parts
    )  # one part at a time
    return np.concatenate(
        [np.asarray(asked.multiply(stored).sum(axis=1), np.float32) for asked, stored in pairs],
    )


def _late(model: Model, task: _Task) -> Floats:
    # These modules load torch.
    from tilefold.retrieval.encoding.tokens import encode_texts, encode_tokens
    from tilefold.retrieval.search.reranking import rerank
    from tilefold.retrieval.vectors.tokens import open_tokens

    _check_all(
        task,
        encode_tokens(
            model,
            task.documents,
            task.folder,
            batch_size=task.size,
            progress=task.report,
        ),
    )
    queries = encode_texts(model, task.queries, kind="query", batch_size=task.size)
    run: dict[str, dict[str, float]] = {}
    pairs = list(zip(map(str, task.query.tolist()), map(str, task.document.tolist()), strict=True))
    for query, document in pairs:
        run.setdefault(query, {})[document] = 0.0
    reduction = "mean" if model.similarity_fn_name == "meanmaxsim" else "sum"
    found = rerank(run, queries, open_tokens(task.folder), tail="drop", reduction=reduction)
    return np.array([found[query].get(document, np.nan) for query, document in pairs], np.float32)


def _check_all(task: _Task, manifest: Manifest) -> None:
    """Say what was cut of the documents; raise ``DataError`` where one could not be encoded."""
    report_manifest_truncation("document", len(task.documents), manifest.truncated)
    if failed := manifest.failed:
        said = f"{len(failed)} texts could not be encoded, {next(iter(failed.values()))}"
        raise DataError(f"teacher {task.teacher.name}: {said}.")


_SCORERS: dict[str, Callable[[Any, _Task], Floats]] = dict(
    zip(KINDS, (_cross_encoder, _dense, _sparse, _late, _words), strict=True),
)


def ensemble(
    rows: TrainingRows,
    teachers: Mapping[str, Floats],
    *,
    normalization: str = "min_max",
    scale: float | None = None,
    like: str | None = None,
) -> Floats:
    """One score per row from those of the `teachers`, name -> float32 ``[N]``: float32 ``[N]``.

    ``min_max``: each teacher becomes ``(s - min) / (max - min + 1e-6)`` over all rows of a query;
    then the mean over the teachers times `scale`, 30 by default, as for inference-free sparse
    retrievers (arXiv 2411.04403). ``none``: the mean as they are, times `scale`, 1 by default. With
    `like`, a teacher to whose mean and deviation over all rows their mean is mapped instead, as for
    SPLADE-v3 (arXiv 2403.06789).
    """
    check_rows("rows", rows)
    check_mapping("teachers", teachers, "name -> scores")
    if not teachers:
        raise ValueError("teachers: expected at least one, got an empty mapping.")
    check_choice("normalization", normalization, NORMALIZATIONS)
    if like is not None and scale is not None:
        raise ValueError("like, scale: expected one of them, got both.")
    if like is not None and like not in teachers:
        raise ValueError(f"like: expected one of the teachers {', '.join(teachers)}, got {like!r}.")
    if scale is not None and not 0 < scale < np.inf:
        raise ValueError(f"scale: expected a finite number above 0, got {scale!r}.")
    columns = [_scores_of_rows(name, scores, len(rows)) for name, scores in teachers.items()]
    if normalization == "min_max":
        columns = [_min_max(rows, scores) for scores in columns]
    mean = np.mean(columns, axis=0)
    if like is None:
        factor = scale if scale is not None else SCALE if normalization == "min_max" else 1.0
        return np.asarray(mean * factor, np.float32)
    if not np.ptp(mean):  # the deviation of equal scores may be a rounding
        raise ValueError(
            "like: expected scores that differ, got equal ones, which have no deviation to map.",
        )
    model = _scores_of_rows(like, teachers[like], len(rows))
    return np.asarray((mean - mean.mean()) / mean.std() * model.std() + model.mean(), np.float32)


def _scores_of_rows(teacher: str, scores: object, n_rows: int) -> npt.NDArray[np.float64]:
    """Return the scores of a teacher, by position, as float64 ``[n_rows]``."""
    values = np.asarray(scores, np.float64)
    if values.shape != (n_rows,):
        raise ValueError(
            f"teachers: expected {n_rows} scores of {teacher!r}, one per row, got shape "
            f"{list(values.shape)}.",
        )
    return values


def _min_max(rows: TrainingRows, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    starts, of = rows.offsets[:-1], rows.query_of_row()  # no query is without rows
    low, high = np.minimum.reduceat(scores, starts), np.maximum.reduceat(scores, starts)
    normalized: npt.NDArray[np.float64] = (scores - low[of]) / (high - low + _EPSILON)[of]
    return normalized


def with_relevant(rows: TrainingRows, collection: Collection, split: str) -> TrainingRows:
    """The rows with those relevant documents of `split` that their queries lack, before the others.

    ``ValueError`` for rows that are scored already, where the added ones would have no scores.
    """
    qrels = collection.split_qrels(split)
    documents = dict(zip(rows.documents, range(len(rows.documents)), strict=True))
    at, counts, missing = [], [], []
    for group, low in zip(rows.groups(), rows.offsets[:-1].tolist(), strict=True):
        own = set(group.documents)
        lacking = [
            name
            for name, grade in qrels.get(group.query, {}).items()
            if grade > 0 and name not in own
        ]
        missing += [documents.setdefault(name, len(documents)) for name in lacking]
        at += [low] * len(lacking)
        counts.append(len(group.documents) + len(lacking))
    if not missing:
        return rows
    if rows.scored:
        wanted = f"all relevant documents of {split} in scored rows"
        raise ValueError(
            f"rows: expected {wanted}, got some without {len(missing)}. Score the mined file again.",
        )
    added: Json = {
        "document": np.array(missing, np.int32),
        "relevant": True,
        "rank": 0,
        "retrieved": np.nan,
    }
    columns: Json = {
        name: np.insert(getattr(rows, name), at, value) for name, value in added.items()
    }
    return replace(
        rows,
        documents=list(documents),
        offsets=offsets_of(counts),
        made_by=dict(rows.made_by),
        **columns,
    )
