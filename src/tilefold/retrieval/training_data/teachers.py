"""Scores of teachers for training rows, and one score from several teachers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_encoder,
    check_instance,
    check_mapping,
    path_of,
)
from tilefold._internal.files import atomic_file
from tilefold._internal.precision import inference_precision, scores_in_fp32
from tilefold._internal.typing import Model
from tilefold.pipeline.ragged import offsets_of
from tilefold.pipeline.truncation import counting_truncation, report_truncation
from tilefold.retrieval.common.files import require
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
SCALE = 30.0  # of scores after min-max normalisation
SHARD = 2048  # pairs of a cross-encoder that are saved together
_EPSILON = 1e-6
# Part of the name of saved scores. An earlier release rounded scores of cross-encoders to bf16.
_ROUNDING = "scores in fp32"
_PAIRS_PER_BLOCK = 8192  # pairs of vectors that are compared at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Teacher:
    """A model that scores pairs of a query and a document.

    Attributes:
        name: name of its column.
        kind: one of ``KINDS``.
        model: a ``CrossEncoder`` with one output, a ``SentenceTransformer``, a ``SparseEncoder``, a
            ``MultiVectorEncoder`` or a ``BM25Index``.
    """

    name: str
    kind: str
    model: Model

    def __post_init__(self) -> None:
        """Raise an error unless the model can be a teacher of its kind."""
        check_choice("kind", self.kind, KINDS)
        self._check_model()
        if self.kind == "cross-encoder" and self.model.num_labels != 1:
            raise ValueError(
                f"teacher {self.name}: expected a cross-encoder with one output, a relevance "
                f"score, got one with {self.model.num_labels} classes. Take a reranker.",
            )
        if self.kind == "bm25" and self.model.provenance.passages is not None:
            raise ValueError(
                f"teacher {self.name}: expected a BM25 index of whole documents, got one of "
                "passages.",
            )

    def _check_model(self) -> None:
        """Raise ``TypeError`` unless the model has the methods that a teacher of its kind needs."""
        if self.kind == "bm25":
            check_instance("model", self.model, BM25Index, "BM25Index.load(folder)")
        elif self.kind == "cross-encoder":
            if not hasattr(self.model, "num_labels"):
                raise TypeError(
                    f"model: expected a CrossEncoder, got {type(self.model).__name__}; pass a "
                    "loaded model.",
                )
        else:
            classes = {"dense": "SentenceTransformer", "sparse": "SparseEncoder"}
            check_encoder("model", self.model, classes.get(self.kind, "MultiVectorEncoder"))

    @property
    def fingerprint(self) -> str:
        """Digest of the weights and settings that its scores depend on."""
        if self.kind == "bm25":
            # An updated index has no fingerprint of its texts.
            texts = self.model.provenance.texts_sha256 or self.model.content_digest()
            settings = asdict(self.model.options) | {"texts": texts}
            return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return model_fingerprint(self.model)

    @property
    def language(self) -> str | None:
        """Language of the stop words and the stemmer of BM25; None for other teachers."""
        return str(self.model.options.language) if self.kind == "bm25" else None

    @property
    def precision(self) -> str | None:
        """Number type in which the model computes; None for BM25.

        The last layers of a cross-encoder, which compute its scores, always use fp32.
        """
        return None if self.kind == "bm25" else inference_precision(self.model)


def applied_scale(normalization: str, scale: float | None, like: str | None) -> float | None:
    """Return the factor by which :func:`ensemble` multiplies the mean of the teachers.

    Args:
        normalization, scale, like: as in :func:`ensemble`.

    Returns:
        `scale`, or its default; None with `like`, which replaces the factor.
    """
    if like is not None:
        return None
    if scale is not None:
        return float(scale)
    return SCALE if normalization == "min_max" else 1.0


class _Task:
    """Pairs of distinct texts to score, and where the results are saved.

    Distinct texts are numbered. The numbers, as strings, are the ids for encoding.

    Args:
        teacher: the scorer.
        rows: the training rows.
        collection: the texts of the rows.
        work_folder: folder of finished work.
        batch_size: texts or pairs per batch.
        report: called as ``report(done, total)``.

    Attributes:
        queries: number -> distinct query text.
        documents: number -> distinct document text.
        document_ids: an id of each distinct document.
        query: int64 ``[N]``, number of each row's query text.
        document: int64 ``[N]``, number of each row's document text.
        vectors_folder: folder of the documents' vectors.
        scores_file: file of the finished scores.
    """

    def __init__(
        self,
        teacher: Teacher,
        rows: TrainingRows,
        collection: Collection,
        work_folder: Path,
        batch_size: int,
        report: Progress,
    ) -> None:
        """Number the different texts of the rows, and name the files of saved work.

        Args:
            teacher: model that scores the rows.
            rows: training rows, each with a query and a document.
            collection: texts of the queries and documents.
            work_folder: folder of saved vectors and scores.
            batch_size: texts or pairs per batch.
            report: called with the number of texts or pairs that are done, and of all.
        """
        self.teacher = teacher
        self.batch_size = batch_size
        self.report = report
        self.queries, query_numbers = _number_distinct(
            [collection.queries[query] for query in rows.queries],
        )
        self.documents, document_numbers = _number_distinct(
            [collection.documents[document].contents for document in rows.documents],
        )
        _, first_positions = np.unique(document_numbers, return_index=True)
        self.document_ids = [rows.documents[position] for position in first_positions.tolist()]
        self.query = query_numbers[rows.query_of_row()]
        self.document = document_numbers[rows.document]
        # The digest has the precision, so that work of another precision is not continued.
        digest = hashlib.sha256(f"{teacher.fingerprint} {_ROUNDING} {teacher.precision}".encode())
        for texts in (self.queries, self.documents):
            digest.update(texts_digest(texts).encode())
        self.vectors_folder = work_folder / f"{digest.hexdigest()[:16]}-documents"
        for numbers in (self.query, self.document):
            digest.update(numbers.tobytes())
        self.scores_file = work_folder / f"{digest.hexdigest()[:16]}.npy"

    def blocks(self) -> Iterator[slice]:
        """Yield slices of rows that are compared at a time."""
        for start in range(0, len(self.query), _PAIRS_PER_BLOCK):
            yield slice(start, start + _PAIRS_PER_BLOCK)


def _number_distinct(texts: Sequence[str]) -> tuple[dict[str, str], npt.NDArray[np.int64]]:
    """Return number -> distinct text, and the number of each text."""
    number_of_text: dict[str, int] = {}
    numbers = np.array(
        [number_of_text.setdefault(text, len(number_of_text)) for text in texts],
        np.int64,
    )
    return {str(number): text for text, number in number_of_text.items()}, numbers


def score_rows(
    teacher: Teacher,
    rows: TrainingRows,
    collection: Collection,
    work: str | Path,
    *,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Floats:
    """Score each row with a teacher.

    Scores are as the model computes them: a cross-encoder's are taken before any activation, and
    are not rounded to 16 bits (:func:`tilefold._internal.precision.scores_in_fp32`). Each
    distinct text is encoded once.

    Args:
        teacher: the scorer.
        rows: the training rows.
        collection: the texts of the rows.
        work: folder that saves finished work, so that the same call continues it: 2,048 pairs at a
            time of a cross-encoder, vectors of a sparse or multi-vector model shard by shard, and
            every finished column.
        batch_size: texts or pairs per batch.
        progress: called as ``progress(done, total)`` with pairs or documents, at first with the
            work that was done before.

    Returns:
        float32 ``[N]``.

    Raises:
        DataError: if a text cannot be encoded, or a score is not finite; the message names it.
    """
    check_instance("teacher", teacher, Teacher, "Teacher(name, kind, model)")
    check_rows("rows", rows)
    check_instance("collection", collection, Collection, "load_collection(path)")
    rows.check_collection(collection)
    task = _Task(
        teacher=teacher,
        rows=rows,
        collection=collection,
        work_folder=path_of("work", work),
        batch_size=batch_size,
        report=progress or _ignore_progress,
    )
    saved_scores = _load_scores(task.scores_file, len(rows))
    if saved_scores is not None:
        task.report(len(rows), len(rows))
        return saved_scores
    scores = _SCORERS[teacher.kind](teacher.model, task)
    _check_finite(teacher, rows, scores)
    _save_scores(task.scores_file, scores)
    return scores


def _ignore_progress(done: int, total: int) -> None:
    pass


def _check_finite(teacher: Teacher, rows: TrainingRows, scores: Floats) -> None:
    """Raise ``DataError`` with the first row whose score is not finite.

    Args:
        teacher: the teacher that computed the scores.
        rows: training rows.
        scores: score of each row.
    """
    invalid_rows = np.flatnonzero(~np.isfinite(scores))
    if not invalid_rows.size:
        return
    row = int(invalid_rows[0])
    document = rows.documents[rows.document[row]]
    query = rows.queries[rows.query_of_row()[row]]
    raise DataError(
        f"teacher {teacher.name}: gave {scores[row]} to document {document!r} of query {query!r} "
        f"({invalid_rows.size} in all). Check the model.",
    )


def _load_scores(file: Path, count: int) -> Floats | None:
    """Return `count` saved scores, or None if there is no such file or it is damaged."""
    if not file.is_file():
        return None
    try:
        scores: Floats = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = scores.shape == (count,) and bool(np.isfinite(scores).all())
    return scores if is_valid else None


def _save_scores(file: Path, scores: Floats) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        np.save(stream, scores, allow_pickle=False)


def _score_cross_encoder(model: Model, task: _Task) -> Floats:
    """Score all pairs with a ``CrossEncoder``, in shards that are saved.

    A shard that an earlier, interrupted run has saved is not scored again.

    Args:
        model: the ``CrossEncoder``.
        task: pairs of a query and a document, and where scores are saved.

    Returns:
        The score of each pair.
    """
    n_pairs = len(task.query)
    shard_files = {
        start: task.scores_file.with_suffix(f".{start:012d}.npy")
        for start in range(0, n_pairs, SHARD)
    }
    saved_shards = {
        start: _load_scores(file, min(SHARD, n_pairs - start))
        for start, file in shard_files.items()
    }
    n_done = sum(len(shard) for shard in saved_shards.values() if shard is not None)
    task.report(n_done, n_pairs)
    scores = np.zeros(n_pairs, np.float32)
    for start, file in shard_files.items():
        rows = slice(start, min(start + SHARD, n_pairs))
        shard = saved_shards[start]
        if shard is None:
            shard = _predict_pairs(model, task, rows)
            _save_scores(file, shard)
            n_done += len(shard)
            task.report(n_done, n_pairs)
        scores[rows] = shard
    return scores


def _predict_pairs(model: Model, task: _Task, rows: slice) -> Floats:
    """Score some pairs with a ``CrossEncoder``, in fp32 and without an activation function.

    Args:
        model: the ``CrossEncoder``.
        task: pairs of a query and a document.
        rows: the pairs to score.
    """
    import torch  # the package is imported without it

    queries = [task.queries[str(number)] for number in task.query[rows].tolist()]
    documents = [task.documents[str(number)] for number in task.document[rows].tolist()]
    pairs = list(zip(queries, documents, strict=True))
    with counting_truncation() as truncation, scores_in_fp32(model):
        scores = model.predict(
            pairs,
            batch_size=task.batch_size,
            activation_fn=torch.nn.Identity(),
            apply_softmax=False,
            show_progress_bar=False,
        )
    report_truncation("pair", len(pairs), truncation)
    return np.asarray(scores, np.float32)


def _score_dense(model: Model, task: _Task) -> Floats:
    """Score all pairs with the similarity of a ``SentenceTransformer``.

    Each different query and document is encoded once, in memory.

    Args:
        model: the ``SentenceTransformer``.
        task: pairs of a query and a document.

    Returns:
        The score of each pair.
    """
    from tilefold.retrieval.encoding.dense import encode_dense  # loads torch

    task.report(0, len(task.documents))
    documents = encode_dense(
        model,
        task.documents,
        kind="document",
        batch_size=task.batch_size,
        progress=task.report,
    )
    queries = encode_dense(model, task.queries, kind="query", batch_size=task.batch_size)
    scores = [
        model.similarity_pairwise(queries[task.query[block]], documents[task.document[block]])
        for block in task.blocks()
    ]
    return np.concatenate([block_scores.float().cpu().numpy() for block_scores in scores])


def _score_sparse(model: Model, task: _Task) -> Floats:
    """Score all pairs with the dot product of the vectors of a ``SparseEncoder``.

    Vectors of the documents are saved in a folder, so that an interrupted run can be resumed.

    Args:
        model: the ``SparseEncoder``.
        task: pairs of a query and a document, and the folder.

    Returns:
        The score of each pair.

    Raises:
        ValueError: for a model with another similarity.
    """
    similarity = getattr(model, "similarity_fn_name", "dot")
    if similarity not in (None, "dot"):
        raise ValueError(
            f"teacher {task.teacher.name}: expected a sparse model that compares by dot product, "
            f"got {similarity!r}.",
        )
    manifest = encode_collection(
        model,
        task.documents,
        task.vectors_folder,
        batch_size=task.batch_size,
        progress=task.report,
    )
    _check_all_encoded(task, manifest)
    queries = encode_queries(model, task.queries, batch_size=task.batch_size)
    return _dot_products(queries, read_vectors(task.vectors_folder), task)


def _score_bm25(index: BM25Index, task: _Task) -> Floats:
    """Score the pairs with BM25."""
    documents = index.document_vectors()
    rows = [documents.row_of[document] for document in task.document_ids]
    return _dot_products(index.query_vectors(task.queries), documents.take(rows), task)


def _dot_products(queries: SparseVectors, documents: SparseVectors, task: _Task) -> Floats:
    """Return the dot product of each row, summed in float64."""
    query_matrix = _to_scipy(queries)
    document_matrix = _to_scipy(documents)
    scores = []
    for block in task.blocks():
        products = query_matrix[task.query[block]].multiply(document_matrix[task.document[block]])
        scores.append(np.asarray(products.sum(axis=1), np.float32))
    return np.concatenate(scores)


def _to_scipy(vectors: SparseVectors) -> Any:
    """Return vectors as a CSR matrix of scipy in float64."""
    sparse = require("scipy.sparse", "scipy", "Scores of sparse vectors")
    return sparse.csr_array(
        (vectors.data.astype(np.float64), vectors.indices, vectors.indptr),
        (len(vectors), vectors.vocab_size),
    )


def _score_late_interaction(model: Model, task: _Task) -> Floats:
    """Score all pairs with the MaxSim of the vectors of a ``MultiVectorEncoder``.

    Vectors of the documents are saved in a folder, so that an interrupted run can be resumed.

    Args:
        model: the ``MultiVectorEncoder``.
        task: pairs of a query and a document, and the folder.

    Returns:
        The score of each pair.
    """
    # These modules load torch.
    from tilefold.retrieval.encoding.tokens import encode_texts, encode_tokens
    from tilefold.retrieval.search.reranking import rerank
    from tilefold.retrieval.vectors.tokens import open_tokens

    manifest = encode_tokens(
        model,
        task.documents,
        task.vectors_folder,
        batch_size=task.batch_size,
        progress=task.report,
    )
    _check_all_encoded(task, manifest)
    queries = encode_texts(model, task.queries, kind="query", batch_size=task.batch_size)
    query_ids = [str(number) for number in task.query.tolist()]
    document_ids = [str(number) for number in task.document.tolist()]
    pairs = list(zip(query_ids, document_ids, strict=True))
    # A run of the pairs. Its scores of 0 are placeholders, which rerank() replaces.
    candidates: dict[str, dict[str, float]] = {}
    for query, document in pairs:
        candidates.setdefault(query, {})[document] = 0.0
    run = rerank(
        candidates,
        queries,
        open_tokens(task.vectors_folder),
        tail="drop",
        reduction="mean" if model.similarity_fn_name == "meanmaxsim" else "sum",
    )
    return np.array([run[query].get(document, np.nan) for query, document in pairs], np.float32)


def _check_all_encoded(task: _Task, manifest: Manifest) -> None:
    """Report truncated documents, and raise ``DataError`` if a document could not be encoded."""
    report_manifest_truncation("document", len(task.documents), manifest.truncated)
    if manifest.failed:
        first_reason = next(iter(manifest.failed.values()))
        raise DataError(
            f"teacher {task.teacher.name}: {len(manifest.failed)} texts could not be encoded, "
            f"{first_reason}.",
        )


_SCORERS: dict[str, Callable[[Any, _Task], Floats]] = {
    "cross-encoder": _score_cross_encoder,
    "dense": _score_dense,
    "sparse": _score_sparse,
    "multi-vector": _score_late_interaction,
    "bm25": _score_bm25,
}


def ensemble(
    rows: TrainingRows,
    teachers: Mapping[str, Floats],
    *,
    normalization: str = "min_max",
    scale: float | None = None,
    like: str | None = None,
) -> Floats:
    """Combine the scores of teachers into one score per row.

    With ``min_max``, the scores of each teacher become ``(s - min) / (max - min + 1e-6)`` over all
    rows of a query. The result is the mean over the teachers times `scale`, as for inference-free
    sparse retrievers (arXiv 2411.04403). With ``none``, the scores are not changed before the mean.

    Args:
        rows: the training rows.
        teachers: name -> float32 ``[N]``.
        normalization: ``"min_max"`` or ``"none"``.
        scale: factor of the mean; by default 30 with ``min_max``, and 1 with ``none``.
        like: a teacher to whose mean and standard deviation over all rows the result is mapped
            instead, as for SPLADE-v3 (arXiv 2403.06789).

    Returns:
        float32 ``[N]``.

    Raises:
        ValueError: if there is no teacher, a shape or an option is wrong, or `like` is used with
            equal scores.
    """
    check_rows("rows", rows)
    check_mapping("teachers", teachers, "name -> scores")
    if not teachers:
        raise ArgumentError("teachers", "expected at least one, got an empty mapping.")
    check_choice("normalization", normalization, NORMALIZATIONS)
    if like is not None and scale is not None:
        raise ArgumentError(("like", "scale"), "expected one of them, got both.")
    if like is not None and like not in teachers:
        raise ArgumentError(
            "like", f"expected one of the teachers {', '.join(teachers)}, got {like!r}."
        )
    if scale is not None and not 0 < scale < np.inf:
        raise ArgumentError("scale", f"expected a finite number above 0, got {scale!r}.")
    columns = [_scores_of_rows(name, scores, len(rows)) for name, scores in teachers.items()]
    if normalization == "min_max":
        columns = [_min_max(rows, scores) for scores in columns]
    mean = np.mean(columns, axis=0)
    factor = applied_scale(normalization, scale, like)
    if factor is not None:
        return np.asarray(mean * factor, np.float32)
    if not np.ptp(mean):  # the computed deviation of equal scores may be an error of rounding
        raise ArgumentError(
            "like",
            "expected scores that differ, got equal ones, which have no deviation to map.",
        )
    target = _scores_of_rows(str(like), teachers[str(like)], len(rows))
    standardized = (mean - mean.mean()) / mean.std()
    return np.asarray(standardized * target.std() + target.mean(), np.float32)


def _scores_of_rows(teacher: str, scores: object, n_rows: int) -> npt.NDArray[np.float64]:
    """Return the scores of a teacher, by position, as float64 ``[n_rows]``."""
    values = np.asarray(scores, np.float64)
    if values.shape != (n_rows,):
        raise ArgumentError(
            "teachers",
            f"expected {n_rows} scores of {teacher!r}, one per row, got shape "
            f"{list(values.shape)}.",
        )
    return values


def _min_max(rows: TrainingRows, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Normalise scores to [0, 1) over the rows of each query; every query has rows."""
    starts = rows.offsets[:-1]
    query_of_row = rows.query_of_row()
    lowest = np.minimum.reduceat(scores, starts)
    highest = np.maximum.reduceat(scores, starts)
    ranges = highest - lowest + _EPSILON
    normalized: npt.NDArray[np.float64] = (scores - lowest[query_of_row]) / ranges[query_of_row]
    return normalized


def with_relevant(rows: TrainingRows, collection: Collection, split: str) -> TrainingRows:
    """Add rows for relevant documents that are missing, before the other rows of their query.

    A mined file may be trained on with other judgements than it was mined with.

    Args:
        rows: mined training rows.
        collection: the collection that was searched.
        split: the split whose judgements say which documents are relevant.

    Returns:
        The rows with the added ones, or `rows` itself if no document is missing.

    Raises:
        TypeError: if `rows` or `collection` is of another kind.
        ValueError: if the rows are scored, because added rows would have no scores.
    """
    check_rows("rows", rows)
    check_instance("collection", collection, Collection, "load_collection(path)")
    qrels = collection.split_qrels(split)
    position_of_document = {document: position for position, document in enumerate(rows.documents)}
    insert_at = []  # row before which each missing document is inserted
    missing_documents = []
    n_rows = []  # of each query
    for group, start in zip(rows.groups(), rows.offsets[:-1].tolist(), strict=True):
        present = set(group.documents)
        missing = [
            document
            for document, grade in qrels.get(group.query, {}).items()
            if grade > 0 and document not in present
        ]
        for document in missing:
            position = position_of_document.setdefault(document, len(position_of_document))
            missing_documents.append(position)
            insert_at.append(start)
        n_rows.append(len(group.documents) + len(missing))
    if not missing_documents:
        return rows
    if rows.scored:
        raise ArgumentError(
            "rows",
            f"expected all relevant documents of {split} in scored rows, got some without "
            f"{len(missing_documents)}. Score the mined file again.",
        )
    return replace(
        rows,
        documents=list(position_of_document),
        offsets=offsets_of(n_rows),
        document=np.insert(rows.document, insert_at, np.array(missing_documents, np.int32)),
        relevant=np.insert(rows.relevant, insert_at, True),
        rank=np.insert(rows.rank, insert_at, 0),
        retrieved=np.insert(rows.retrieved, insert_at, np.nan),
        made_by=dict(rows.made_by),
    )
