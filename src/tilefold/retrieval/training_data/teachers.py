"""Scores of teachers for training rows, and their combination into one score."""

from __future__ import annotations

import hashlib
import itertools
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
DEFAULT_MIN_MAX_SCALE = 30.0  # factor on scores after min-max normalization
PAIRS_PER_SHARD = 2048  # number of pairs whose scores a cross-encoder saves together
_EPSILON = 1e-6
# Part of the names of saved scores, because an earlier release rounded scores of cross-encoders to
# bf16.
_ROUNDING = "scores in fp32"
_PAIRS_PER_BLOCK = 8192  # pairs of vectors that are compared at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Teacher:
    """A model that scores pairs of a query and a document.

    Attributes:
        name: name of the teacher, and of the column with its scores.
        kind: kind of the model, one of ``KINDS``.
        model: a ``CrossEncoder`` with one output, a ``SentenceTransformer``, a ``SparseEncoder``, a
            ``MultiVectorEncoder`` or a ``BM25Index``.
    """

    name: str
    kind: str
    model: Model

    def __post_init__(self) -> None:
        """Raise an error if the model cannot be a teacher of its kind.

        A model must have the class of its kind. A cross-encoder must compute one score, and a BM25
        index must score whole documents.
        """
        check_choice("kind", self.kind, KINDS)
        self._check_model_class()
        if self.kind == "cross-encoder" and self.model.num_labels != 1:
            raise ValueError(
                f"teacher {self.name}: expected a cross-encoder with one output, a relevance "
                f"score, got one with {self.model.num_labels} classes. Use a reranker.",
            )
        # An index of passages records the settings by which documents were divided.
        if self.kind == "bm25" and self.model.provenance.passages is not None:
            raise ValueError(
                f"teacher {self.name}: expected a BM25 index of whole documents, got one of "
                "passages.",
            )

    def _check_model_class(self) -> None:
        """Raise ``TypeError`` if the model does not have the class of its kind.

        Classes of sentence-transformers are recognized by their attributes, because importing them
        would load torch.
        """
        encoder_classes = {
            "dense": "SentenceTransformer",
            "sparse": "SparseEncoder",
            "multi-vector": "MultiVectorEncoder",
        }
        if self.kind in encoder_classes:
            check_encoder("model", self.model, encoder_classes[self.kind])
        elif self.kind == "bm25":
            check_instance("model", self.model, BM25Index, "BM25Index.load(folder)")
        elif not hasattr(self.model, "num_labels"):
            raise TypeError(
                f"model: expected a CrossEncoder, got {type(self.model).__name__}; pass a loaded "
                "model.",
            )

    @property
    def fingerprint(self) -> str:
        """Digest of the weights and settings on which the scores depend."""
        if self.kind == "bm25":
            # An updated index has no digest of its texts, but one of its content.
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
        """Number format in which the model computes; None for BM25.

        The last layers of a cross-encoder, which compute its scores, always use fp32.
        """
        return None if self.kind == "bm25" else inference_precision(self.model)


def applied_scale(normalization: str, scale: float | None, like: str | None) -> float | None:
    """Return the factor by which :func:`ensemble` multiplies the mean of the teachers.

    Args:
        normalization: ``"min_max"`` or ``"none"``.
        scale: factor that was chosen by the user; ``None`` for the default of the normalization.
        like: teacher to whose mean and standard deviation the result is mapped instead of being
            multiplied by a factor; or ``None``.

    Returns:
        The factor; ``None`` if `like` is given.
    """
    if like is not None:
        return None
    if scale is not None:
        return float(scale)
    return DEFAULT_MIN_MAX_SCALE if normalization == "min_max" else 1.0


class _Task:
    """Scoring of N training rows by a teacher: distinct texts, pairs of them, and file names.

    Each distinct text has a number, so that it is encoded only once.

    Args:
        teacher: teacher that scores the rows.
        rows: the training rows.
        collection: collection with the texts of the rows.
        work_folder: folder of saved vectors and scores.
        batch_size: number of texts or pairs per batch.
        report: called as ``report(done, total)``.

    Attributes:
        query_texts: number, as a string -> distinct query text.
        document_texts: number, as a string -> distinct document text.
        document_ids: id of one document for each distinct document text.
        query_numbers: int64 ``[N]``, number of each row's query text.
        document_numbers: int64 ``[N]``, number of each row's document text.
        vectors_folder: folder for the vectors of documents.
        scores_file: file for the scores.
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
        """Number the distinct texts of the rows, and choose the names of files.

        Args:
            teacher: teacher that scores the rows.
            rows: training rows, each with a query and a document.
            collection: collection with the texts of the rows.
            work_folder: folder of saved vectors and scores.
            batch_size: number of texts or pairs per batch.
            report: called with the number of finished texts or pairs, and the total.
        """
        self.teacher = teacher
        self.batch_size = batch_size
        self.report = report
        self.query_texts, number_of_query = _number_distinct(
            [collection.queries[query] for query in rows.queries],
        )
        self.document_texts, number_of_document = _number_distinct(
            [collection.documents[document].contents for document in rows.documents],
        )
        _, first_positions = np.unique(number_of_document, return_index=True)
        self.document_ids = [rows.documents[position] for position in first_positions.tolist()]
        self.query_numbers = number_of_query[rows.query_of_row()]
        self.document_numbers = number_of_document[rows.document]
        # Names of files are digests of what results depend on. Precision is a part of it.
        settings = f"{teacher.fingerprint} {_ROUNDING} {teacher.precision}"
        vectors_digest = hashlib.sha256(settings.encode())
        vectors_digest.update(texts_digest(self.query_texts).encode())
        vectors_digest.update(texts_digest(self.document_texts).encode())
        scores_digest = vectors_digest.copy()
        scores_digest.update(self.query_numbers.tobytes())
        scores_digest.update(self.document_numbers.tobytes())
        self.vectors_folder = work_folder / f"{vectors_digest.hexdigest()[:16]}-documents"
        self.scores_file = work_folder / f"{scores_digest.hexdigest()[:16]}.npy"

    def blocks(self) -> Iterator[slice]:
        """Yield slices of the rows that are scored at a time."""
        for start in range(0, len(self.query_numbers), _PAIRS_PER_BLOCK):
            yield slice(start, start + _PAIRS_PER_BLOCK)


def _number_distinct(texts: Sequence[str]) -> tuple[dict[str, str], npt.NDArray[np.int64]]:
    """Number the distinct texts of a list.

    Args:
        texts: n texts, which may be equal.

    Returns:
        Number, as a string -> distinct text; and the number of each text, int64 ``[n]``.
    """
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
    """Score each training row with a teacher.

    Scores of cross-encoders are logits, before any activation, and are not rounded to 16 bits
    (:func:`tilefold._internal.precision.scores_in_fp32`). Each distinct text is encoded once.

    Args:
        teacher: teacher that scores the rows.
        rows: the N training rows.
        collection: collection with the texts of the rows.
        work: folder in which finished work is saved, so that an interrupted call can be repeated:
            scores of 2,048 pairs of a cross-encoder, shards of vectors of a sparse or multi-vector
            model, and all scores at the end.
        batch_size: number of texts or pairs per batch.
        progress: called as ``progress(done, total)`` with numbers of pairs or documents, including
            work that was saved before.

    Returns:
        Scores, float32 ``[N]``.

    Raises:
        DataError: if a text cannot be encoded, or a score is not finite.
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
    raise DataError(
        f"teacher {teacher.name}: gave {scores[row]} to {rows.describe_row(row)} "
        f"({invalid_rows.size} in all). Check the model.",
    )


def _load_scores(file: Path, count: int) -> Floats | None:
    """Return saved scores, or None if the file is missing or damaged.

    Args:
        file: the file.
        count: number of scores that the file must have.
    """
    if not file.is_file():
        return None
    try:
        scores: Floats = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = scores.shape == (count,) and bool(np.isfinite(scores).all())
    return scores if is_valid else None


def _save_scores(file: Path, scores: Floats) -> None:
    """Write scores to a file, which appears atomically."""
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        np.save(stream, scores, allow_pickle=False)


def _score_cross_encoder(model: Model, task: _Task) -> Floats:
    """Score all pairs with a ``CrossEncoder``, and save the scores in shards of consecutive pairs.

    Scores that an interrupted run has saved are read, and all missing shards are then computed.

    Args:
        model: the ``CrossEncoder``.
        task: pairs of a query and a document, and the file for their scores.

    Returns:
        The score of each pair.
    """
    n_pairs = len(task.query_numbers)
    scores = np.zeros(n_pairs, np.float32)
    missing_shards: dict[Path, slice] = {}  # file of a shard -> its pairs
    n_done = 0
    for start in range(0, n_pairs, PAIRS_PER_SHARD):
        pairs = slice(start, min(start + PAIRS_PER_SHARD, n_pairs))
        file = task.scores_file.with_suffix(f".{start:012d}.npy")
        saved_scores = _load_scores(file, pairs.stop - pairs.start)
        if saved_scores is None:
            missing_shards[file] = pairs
        else:
            scores[pairs] = saved_scores
            n_done += len(saved_scores)
    task.report(n_done, n_pairs)
    for file, pairs in missing_shards.items():
        scores[pairs] = _predict_pairs(model, task, pairs)
        _save_scores(file, scores[pairs])
        n_done += pairs.stop - pairs.start
        task.report(n_done, n_pairs)
    return scores


def _predict_pairs(model: Model, task: _Task, pairs: slice) -> Floats:
    """Score some pairs with a ``CrossEncoder``, in fp32 and without an activation function.

    Args:
        model: the ``CrossEncoder``.
        task: all pairs of a query and a document.
        pairs: the pairs to score.
    """
    import torch  # not needed to import this module

    queries = [task.query_texts[str(number)] for number in task.query_numbers[pairs].tolist()]
    documents = [
        task.document_texts[str(number)] for number in task.document_numbers[pairs].tolist()
    ]
    text_pairs = list(zip(queries, documents, strict=True))
    with counting_truncation() as truncation, scores_in_fp32(model):
        scores = model.predict(
            text_pairs,
            batch_size=task.batch_size,
            activation_fn=torch.nn.Identity(),
            apply_softmax=False,
            show_progress_bar=False,
        )
    report_truncation("pair", len(text_pairs), truncation)
    return np.asarray(scores, np.float32)


def _score_dense(model: Model, task: _Task) -> Floats:
    """Score all pairs with the similarity of a ``SentenceTransformer``.

    Each distinct text is encoded once, in memory.

    Args:
        model: the ``SentenceTransformer``.
        task: pairs of a query and a document.

    Returns:
        The score of each pair.
    """
    from tilefold.retrieval.encoding.dense import encode_dense  # loads torch

    task.report(0, len(task.document_texts))
    documents = encode_dense(
        model,
        task.document_texts,
        kind="document",
        batch_size=task.batch_size,
        progress=task.report,
    )
    queries = encode_dense(model, task.query_texts, kind="query", batch_size=task.batch_size)
    scores = []
    for block in task.blocks():
        block_scores = model.similarity_pairwise(
            queries[task.query_numbers[block]],
            documents[task.document_numbers[block]],
        )
        scores.append(block_scores.float().cpu().numpy())
    return np.concatenate(scores)


def _score_sparse(model: Model, task: _Task) -> Floats:
    """Score all pairs by dot products with a ``SparseEncoder``.

    Document vectors are saved in a folder, so that an interrupted run can be resumed.

    Args:
        model: the ``SparseEncoder``.
        task: pairs of a query and a document, and the folder for document vectors.

    Returns:
        The score of each pair.

    Raises:
        ValueError: if the model has another similarity than the dot product.
    """
    similarity = getattr(model, "similarity_fn_name", "dot")
    if similarity not in (None, "dot"):
        raise ValueError(
            f"teacher {task.teacher.name}: expected a sparse model that compares by dot product, "
            f"got {similarity!r}.",
        )
    manifest = encode_collection(
        model,
        task.document_texts,
        task.vectors_folder,
        batch_size=task.batch_size,
        progress=task.report,
    )
    _check_all_encoded(task, manifest)
    queries = encode_queries(model, task.query_texts, batch_size=task.batch_size)
    return _dot_products(queries, read_vectors(task.vectors_folder), task)


def _score_bm25(index: BM25Index, task: _Task) -> Floats:
    """Score all pairs with BM25, with the vectors of an index.

    Args:
        index: the index, which has all documents.
        task: pairs of a query and a document.
    """
    documents = index.document_vectors()
    rows = [documents.row_of[document] for document in task.document_ids]
    return _dot_products(index.query_vectors(task.query_texts), documents.take(rows), task)


def _dot_products(queries: SparseVectors, documents: SparseVectors, task: _Task) -> Floats:
    """Return the dot product of each pair, summed in float64.

    Args:
        queries: vectors of the distinct queries.
        documents: vectors of the distinct documents.
        task: pairs of a query and a document.
    """
    query_matrix = _to_scipy(queries)
    document_matrix = _to_scipy(documents)
    scores = []
    for block in task.blocks():
        query_rows = query_matrix[task.query_numbers[block]]
        document_rows = document_matrix[task.document_numbers[block]]
        products = query_rows.multiply(document_rows)
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
    """Score all pairs by MaxSim with a ``MultiVectorEncoder``.

    Document vectors are saved in a folder, so that an interrupted run can be resumed.

    Args:
        model: the ``MultiVectorEncoder``.
        task: pairs of a query and a document, and the folder for document vectors.

    Returns:
        The score of each pair.
    """
    # These modules load torch.
    from tilefold.retrieval.encoding.tokens import encode_texts, encode_tokens
    from tilefold.retrieval.search.reranking import rerank
    from tilefold.retrieval.vectors.tokens import open_tokens

    manifest = encode_tokens(
        model,
        task.document_texts,
        task.vectors_folder,
        batch_size=task.batch_size,
        progress=task.report,
    )
    _check_all_encoded(task, manifest)
    queries = encode_texts(model, task.query_texts, kind="query", batch_size=task.batch_size)
    # The ids of texts are their numbers as strings.
    query_ids = [str(number) for number in task.query_numbers.tolist()]
    document_ids = [str(number) for number in task.document_numbers.tolist()]
    pairs = list(zip(query_ids, document_ids, strict=True))
    # rerank() replaces the scores of 0.
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
    # rerank() drops documents without vectors. Their NaN becomes an error later.
    return np.array([run[query].get(document, np.nan) for query, document in pairs], np.float32)


def _check_all_encoded(task: _Task, manifest: Manifest) -> None:
    """Report truncated documents, and raise ``DataError`` if a document could not be encoded.

    Args:
        task: the task, with its teacher and the distinct documents.
        manifest: manifest of the document vectors.
    """
    report_manifest_truncation("document", len(task.document_texts), manifest.truncated)
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


def _check_scale_and_like(
    teachers: Mapping[str, Floats],
    scale: float | None,
    like: str | None,
) -> None:
    """Raise ``ValueError`` for a wrong `scale` or `like` of :func:`ensemble`, or for both.

    Args:
        teachers: name of a teacher -> its scores.
        scale: factor on the mean of the scores; None for the default.
        like: name of the teacher whose mean and deviation the result gets, or None.
    """
    if like is not None and scale is not None:
        raise ArgumentError(("like", "scale"), "expected one of them, got both.")
    if like is not None and like not in teachers:
        raise ArgumentError(
            "like", f"expected one of the teachers {', '.join(teachers)}, got {like!r}."
        )
    if scale is not None and not 0 < scale < np.inf:
        raise ArgumentError("scale", f"expected a finite number above 0, got {scale!r}.")


def ensemble(
    rows: TrainingRows,
    teachers: Mapping[str, Floats],
    *,
    normalization: str = "min_max",
    scale: float | None = None,
    like: str | None = None,
) -> Floats:
    """Combine the scores of teachers into one score per row.

    With ``"min_max"``, the scores of each teacher become ``(s - min) / (max - min + 1e-6)`` over
    all rows of a query. With ``"none"``, they are not changed. The result is the mean over the
    teachers times `scale`, as for inference-free sparse retrievers (arXiv 2411.04403).

    Args:
        rows: the N training rows.
        teachers: name of a teacher -> its scores, float32 ``[N]``.
        normalization: ``"min_max"`` or ``"none"``.
        scale: factor on the mean; by default 30 with ``"min_max"``, and 1 with ``"none"``.
        like: name of a teacher, or None. The means are then shifted and scaled until they have the
            average and the standard deviation of this teacher's scores over all rows, and are not
            multiplied by `scale`, as for SPLADE-v3 (arXiv 2403.06789).

    Returns:
        The combined scores, float32 ``[N]``.

    Raises:
        ValueError: if there is no teacher, a shape or an option is wrong, or `like` is given and
            the mean over the teachers is the same for all rows.
    """
    check_rows("rows", rows)
    check_mapping("teachers", teachers, "name -> scores")
    if not teachers:
        raise ArgumentError("teachers", "expected at least one, got an empty mapping.")
    check_choice("normalization", normalization, NORMALIZATIONS)
    _check_scale_and_like(teachers, scale, like)
    teacher_scores = [_scores_of_rows(name, scores, len(rows)) for name, scores in teachers.items()]
    if normalization == "min_max":
        teacher_scores = [_min_max(rows, scores) for scores in teacher_scores]
    mean = np.mean(teacher_scores, axis=0)  # over the teachers, for each row
    factor = applied_scale(normalization, scale, like)
    if factor is not None:  # None if `like` is given
        return np.asarray(mean * factor, np.float32)
    if not np.ptp(mean):  # rounding could make the standard deviation of equal numbers positive
        raise ArgumentError(
            "like",
            "needs scores that differ, got equal scores, whose standard deviation is 0.",
        )
    target = _scores_of_rows(str(like), teachers[str(like)], len(rows))
    standardized = (mean - mean.mean()) / mean.std()
    return np.asarray(standardized * target.std() + target.mean(), np.float32)


def _scores_of_rows(teacher: str, scores: object, n_rows: int) -> npt.NDArray[np.float64]:
    """Return the scores of a teacher as float64 ``[n_rows]``, after a check of their shape.

    Args:
        teacher: name of the teacher, for the error message.
        scores: the scores.
        n_rows: number of training rows.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (n_rows,):
        raise ArgumentError(
            "teachers",
            f"expected {n_rows} scores of {teacher!r}, one per row, got shape "
            f"{list(values.shape)}.",
        )
    return values


def _min_max(rows: TrainingRows, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Normalize scores to [0, 1) over the rows of each query.

    Args:
        rows: training rows, at least one for each query.
        scores: score of each row, ``[N]``.
    """
    starts = rows.offsets[:-1]
    query_of_row = rows.query_of_row()
    lowest = np.minimum.reduceat(scores, starts)
    highest = np.maximum.reduceat(scores, starts)
    ranges = highest - lowest + _EPSILON
    normalized: npt.NDArray[np.float64] = (scores - lowest[query_of_row]) / ranges[query_of_row]
    return normalized


def with_relevant(rows: TrainingRows, collection: Collection, split: str) -> TrainingRows:
    """Add rows for relevant documents that are missing, before the other rows of their query.

    Documents are missing if the negatives were mined for the judgements of another split.

    Args:
        rows: mined training rows.
        collection: collection that was searched.
        split: name of the judgements that determine which documents are relevant.

    Returns:
        The extended rows, or `rows` itself if no document is missing.

    Raises:
        TypeError: if `rows` or `collection` has another type.
        ValueError: if documents are missing in scored rows, because added rows have no scores.
    """
    check_rows("rows", rows)
    check_instance("collection", collection, Collection, "load_collection(path)")
    qrels = collection.split_qrels(split)
    missing_by_query = []
    for query_rows in rows.groups():
        present = set(query_rows.documents)
        grades = qrels.get(query_rows.query, {})
        missing_by_query.append(
            [
                document
                for document, grade in grades.items()
                if grade > 0 and document not in present
            ],
        )
    n_missing = np.array([len(missing) for missing in missing_by_query], np.int64)
    if not n_missing.any():
        return rows
    if rows.scored:
        raise ArgumentError(
            "rows",
            f"scored rows must have all relevant documents of {split}, but {n_missing.sum()}"
            " are missing. Score the mined file again.",
        )
    position_of_document = {document: position for position, document in enumerate(rows.documents)}
    missing_positions = [
        position_of_document.setdefault(document, len(position_of_document))
        for document in itertools.chain.from_iterable(missing_by_query)
    ]
    # The missing documents of a query are inserted before its first row.
    insert_at = np.repeat(rows.offsets[:-1], n_missing)
    return replace(
        rows,
        documents=list(position_of_document),
        offsets=offsets_of(np.diff(rows.offsets) + n_missing),
        document=np.insert(
            rows.document,
            insert_at,
            np.array(missing_positions, np.int32),
        ),
        relevant=np.insert(rows.relevant, insert_at, True),
        rank=np.insert(rows.rank, insert_at, 0),
        retrieved=np.insert(rows.retrieved, insert_at, np.nan),
        made_by=dict(rows.made_by),
    )
