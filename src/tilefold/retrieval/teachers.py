"""Scores of teachers for training rows: cross-encoders, bi-encoders of sentence-transformers, and BM25."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilefold._files import atomic_file
from tilefold._typing import Model
from tilefold.pipeline.truncated import tell, watching
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.bm25 import BM25Index
from tilefold.retrieval.encoding import encode_collection, encode_queries, model_fingerprint
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.training_rows import Floats, TrainingRows, offsets_of
from tilefold.retrieval.truncation import tell_truncated
from tilefold.retrieval.vectors import read_vectors

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

__all__ = ["KINDS", "Teacher", "score_rows", "with_relevant"]

KINDS = ("cross-encoder", "dense", "sparse", "multi-vector", "bm25")
SHARD = 2048  # pairs of a cross-encoder between two writes
_PAIRS = 8192  # pairs compared at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Teacher:
    """A scorer of pairs of query and document.

    Attributes:
        name: of its column.
        kind: one of :data:`KINDS`.
        model: a ``CrossEncoder`` with one output, ``SentenceTransformer``, ``SparseEncoder``,
            ``MultiVectorEncoder``, or :class:`BM25Index`.
    """

    name: str
    kind: str
    model: Model

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}.")
        if self.kind == "cross-encoder" and self.model.num_labels != 1:
            raise ValueError(
                f"teacher {self.name}: expected a cross-encoder with one output, a relevance score, got one with "
                f"{self.model.num_labels} classes. Take a reranker."
            )

    @property
    def fingerprint(self) -> str:
        """A digest of the weights and settings that its scores depend on."""
        if self.kind == "bm25":
            settings = asdict(self.model.options) | {"texts": self.model.provenance.texts_sha256}
            return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        if self.kind == "multi-vector":
            from tilefold.retrieval.token_encoding import token_model_fingerprint  # loads torch

            return token_model_fingerprint(self.model)
        return model_fingerprint(self.model)


@dataclass(frozen=True)
class _Task:
    """Distinct texts by number, the first id of each document's, and which of them each row compares."""

    queries: dict[str, str]
    documents: dict[str, str]
    names: list[str]
    query: npt.NDArray[np.int64]
    document: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: TrainingRows, collection: Collection) -> _Task:
        queries, query = _distinct([collection.queries[name] for name in rows.queries])
        documents, document = _distinct([collection.documents[name].contents for name in rows.documents])
        names = [rows.documents[at] for at in np.unique(document, return_index=True)[1].tolist()]
        return cls(queries, documents, names, query[rows.query_of_row()], document[rows.document])

    def pairs(self) -> Iterator[slice]:
        """Some rows at a time."""
        for low in range(0, len(self.query), _PAIRS):
            yield slice(low, low + _PAIRS)


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
    """The score of `teacher` for each row: float32 ``[N]``, as it comes, a cross-encoder's before any activation.

    Each distinct text is encoded once. `work` keeps what is done: 2,048 pairs at a time of a cross-encoder, the vectors
    of a sparse or multi-vector model shard by shard, and every finished column; the same call goes on from there. The
    vectors of a dense model are not kept until its column is done.

    Args:
        teacher: see there.
        rows: whose pairs are scored.
        collection: has their texts.
        work: a folder, made when missing; what it holds of other models, texts or rows is not touched.
        batch_size: texts or pairs at a time.
        progress: called as ``progress(done, total)`` in pairs or documents, first with what was done before.

    Raises:
        DataError: a text that cannot be encoded, or a score that is not finite; names it.
    """
    rows.check_collection(collection)
    task, folder = _Task.of(rows, collection), Path(work)
    digest = hashlib.sha256(teacher.fingerprint.encode())
    for part in (texts_digest(task.queries), texts_digest(task.documents)):
        digest.update(part.encode())
    texts_key = digest.hexdigest()[:16]
    for array in (task.query, task.document):
        digest.update(array.tobytes())
    column = folder / f"{digest.hexdigest()[:16]}.npy"
    report = progress or (lambda done, total: None)
    scores = _kept(column, len(rows))
    if scores is not None:
        report(len(rows), len(rows))
    else:
        scores = _SCORERS[teacher.kind](teacher, task, folder / f"{texts_key}-documents", column, batch_size, report)
        bad = np.flatnonzero(~np.isfinite(scores))
        if bad.size:
            at = int(bad[0])
            raise DataError(
                f"teacher {teacher.name}: gave {scores[at]} to document {rows.documents[rows.document[at]]!r} of query "
                f"{rows.queries[rows.query_of_row()[at]]!r} ({bad.size} in all). Check the model."
            )
        _keep(column, scores)
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


def _cross_encoder(
    teacher: Teacher, task: _Task, folder: Path, column: Path, batch_size: int, report: Progress
) -> Floats:
    import torch  # the package is imported without it

    n = len(task.query)
    scores = np.zeros(n, np.float32)
    files = {low: column.with_suffix(f".{low:012d}.npy") for low in range(0, n, SHARD)}
    kept = {low: _kept(file, min(SHARD, n - low)) for low, file in files.items()}
    done = sum(len(shard) for shard in kept.values() if shard is not None)
    report(done, n)
    for low, file in files.items():
        part, shard = slice(low, min(low + SHARD, n)), kept[low]
        if shard is None:
            pairs = [
                (task.queries[str(q)], task.documents[str(d)])
                for q, d in zip(task.query[part].tolist(), task.document[part].tolist(), strict=True)
            ]
            with watching() as cut:
                given = teacher.model.predict(
                    pairs, batch_size=batch_size, activation_fn=torch.nn.Identity(), show_progress_bar=False
                )
            tell("pair", len(pairs), cut)
            shard = np.asarray(given, np.float32)
            _keep(file, shard)
            done += len(shard)
            report(done, n)
        scores[part] = shard
    return scores


def _dense(teacher: Teacher, task: _Task, folder: Path, column: Path, batch_size: int, report: Progress) -> Floats:
    from tilefold.retrieval.dense import encode_dense  # loads torch

    report(0, len(task.documents))
    documents = encode_dense(teacher.model, task.documents, kind="document", batch_size=batch_size, progress=report)
    queries = encode_dense(teacher.model, task.queries, kind="query", batch_size=batch_size)
    scores = [
        teacher.model.similarity_pairwise(queries[task.query[part]], documents[task.document[part]])
        for part in task.pairs()
    ]
    return np.concatenate([part.float().cpu().numpy() for part in scores])


def _sparse(teacher: Teacher, task: _Task, folder: Path, column: Path, batch_size: int, report: Progress) -> Floats:
    compared = getattr(teacher.model, "similarity_fn_name", "dot")
    if compared not in (None, "dot"):
        raise ValueError(
            f"teacher {teacher.name}: expected a sparse model that compares by dot product, got {compared!r}."
        )
    manifest = encode_collection(teacher.model, task.documents, folder, batch_size=batch_size, progress=report)
    tell_truncated("document", len(task.documents), manifest.truncated)
    _check_all(teacher, manifest.failed)
    queries = encode_queries(teacher.model, task.queries, batch_size=batch_size)
    return _products(queries, read_vectors(folder), task)


def _words(teacher: Teacher, task: _Task, folder: Path, column: Path, batch_size: int, report: Progress) -> Floats:
    index: BM25Index = teacher.model
    documents = index.document_vectors()
    row_of = {name: row for row, name in enumerate(documents.ids)}
    taken = documents.take([row_of[name] for name in task.names])
    return _products(index.query_vectors(task.queries), taken, task)


def _products(queries: SparseVectors, documents: SparseVectors, task: _Task) -> Floats:
    """The inner product of each row, summed in float64."""
    scores = np.zeros(len(task.query), np.float32)
    weights = np.zeros(queries.vocab_size)
    order = np.argsort(task.query, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(task.query[order])) + 1):
        terms, values = queries.row(int(task.query[rows[0]]))
        weights[terms] = values
        distinct, which = np.unique(task.document[rows], return_inverse=True)  # two ids may have one text
        part = documents.take(distinct)
        owner = np.repeat(np.arange(len(part)), np.diff(part.indptr))
        scores[rows] = np.bincount(owner, weights[part.indices] * part.data, minlength=len(part))[which]
        weights[terms] = 0
    return scores


def _late(teacher: Teacher, task: _Task, folder: Path, column: Path, batch_size: int, report: Progress) -> Floats:
    from tilefold.retrieval import encode_texts, encode_tokens, open_tokens, rerank  # loads torch

    manifest = encode_tokens(teacher.model, task.documents, folder, batch_size=batch_size, progress=report)
    tell_truncated("document", len(task.documents), manifest.truncated)
    _check_all(teacher, manifest.failed)
    queries = encode_texts(teacher.model, task.queries, kind="query", batch_size=batch_size)
    run: dict[str, dict[str, float]] = {}
    pairs = list(zip(map(str, task.query.tolist()), map(str, task.document.tolist()), strict=True))
    for query, document in pairs:
        run.setdefault(query, {})[document] = 0.0
    reduction = "mean" if teacher.model.similarity_fn_name == "meanmaxsim" else "sum"
    found = rerank(run, queries, open_tokens(folder), tail="drop", reduction=reduction)
    return np.array([found[query].get(document, np.nan) for query, document in pairs], np.float32)


def _check_all(teacher: Teacher, failed: Mapping[str, str]) -> None:
    if failed:
        raise DataError(
            f"teacher {teacher.name}: {len(failed)} texts could not be encoded, {next(iter(failed.values()))}."
        )


_SCORERS: dict[str, Callable[..., Floats]] = {
    "cross-encoder": _cross_encoder,
    "dense": _dense,
    "sparse": _sparse,
    "multi-vector": _late,
    "bm25": _words,
}


def with_relevant(rows: TrainingRows, collection: Collection, split: str) -> TrainingRows:
    """The rows with those relevant documents of `split` that their queries lack, before the others.

    Raises:
        ValueError: rows that are scored already, where the added ones have no scores; an unknown split.
    """
    qrels = collection.split_qrels(split)
    documents = dict(zip(rows.documents, range(len(rows.documents)), strict=True))
    at, counts, missing = [], [], []
    for group, low in zip(rows.groups(), rows.offsets[:-1].tolist(), strict=True):
        own = set(group.documents)
        lacking = [name for name, grade in qrels.get(group.query, {}).items() if grade > 0 and name not in own]
        missing += [documents.setdefault(name, len(documents)) for name in lacking]
        at += [low] * len(lacking)
        counts.append(len(group.documents) + len(lacking))
    if not missing:
        return rows
    if rows.scored:
        raise ValueError(
            f"rows: expected all relevant documents of {split} in scored rows, got some without {len(missing)} of "
            "them. Score the mined file again."
        )
    return replace(
        rows,
        documents=list(documents),
        offsets=offsets_of(counts),
        document=np.insert(rows.document, at, np.array(missing, np.int32)),
        relevant=np.insert(rows.relevant, at, True),
        rank=np.insert(rows.rank, at, 0),
        retrieved=np.insert(rows.retrieved, at, np.nan),
        made_by=dict(rows.made_by),
    )
