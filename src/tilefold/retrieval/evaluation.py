"""Evaluate runs with ir-measures; TREC run files; sparsity figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilefold._files import atomic_file
from tilefold.retrieval._files import require
from tilefold.retrieval._tables import numbered_lines
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.fusion import Run
from tilefold.retrieval.provenance import Provenance
from tilefold.retrieval.vectors import SparseVectors, check_same_vocabulary

__all__ = [
    "DEFAULT_MEASURES",
    "active_terms",
    "check_measures",
    "evaluate",
    "evaluate_per_query",
    "flops",
    "read_trec_provenance",
    "read_trec_run",
    "write_trec_run",
]

DEFAULT_MEASURES = ("nDCG@10", "R@100", "RR@10")

_RunLike = Mapping[str, Mapping[str, float]]
_QrelsLike = Mapping[str, Mapping[str, int]]


def evaluate(run: _RunLike, qrels: _QrelsLike, measures: Sequence[str] = DEFAULT_MEASURES) -> dict[str, float]:
    """Mean of each measure over **all** judged queries; a query without results counts as 0.

    Args:
        run: query id -> document id -> score. Queries that `qrels` does not judge are ignored.
        qrels: query id -> document id -> grade.
        measures: names as ir-measures writes them, such as ``nDCG@10``, ``R@100``, ``RR@10``, ``AP``.

    Returns:
        ``{measure: mean}`` in the order asked for.

    Raises:
        ValueError: empty `qrels`, an unknown measure, a score that is not a number.
    """
    table = evaluate_per_query(run, qrels, measures)
    return {name: math.fsum(row[name] for row in table.values()) / len(table) for name in measures}


def evaluate_per_query(
    run: _RunLike, qrels: _QrelsLike, measures: Sequence[str] = DEFAULT_MEASURES
) -> dict[str, dict[str, float]]:
    """``{query id: {measure: value}}`` for every judged query; see :func:`evaluate`."""
    if not any(qrels.values()):
        raise ValueError("qrels: expected at least one judged query, got none. Check the split.")
    for query_id, scores in run.items():
        if any(math.isnan(score) for score in scores.values()):
            raise ValueError(f"run: query {query_id!r} has a score that is not a number (NaN).")
    ir_measures, parsed = _parsed(measures)
    judged = {query_id: dict(grades) for query_id, grades in qrels.items() if grades}
    kept = {query_id: dict(run[query_id]) for query_id in judged if run.get(query_id)}
    table = {query_id: dict.fromkeys(measures, 0.0) for query_id in judged}
    if kept:
        for metric in ir_measures.iter_calc(list(dict.fromkeys(parsed)), judged, kept):
            for name, measure in zip(measures, parsed, strict=True):  # two names may denote one measure
                if measure == metric.measure:
                    table[metric.query_id][name] = float(metric.value)
    return table


def check_measures(measures: Sequence[str]) -> int:
    """Raise an error for unknown measures; returns the deepest cut-off, 0 if there is none.

    Raises:
        ValueError: an unknown measure, or a cut-off or another parameter that it does not have.
    """
    _, parsed = _parsed(measures)
    return max(int(measure.params.get("cutoff", 0)) for measure in parsed)


def _parsed(measures: Sequence[str]) -> tuple[Any, list[Any]]:
    """ir-measures, and the measures as it knows them."""
    if not measures or isinstance(measures, str):
        raise ValueError(f"measures: expected a list of names such as ['nDCG@10'], got {measures!r}.")
    ir_measures = require("ir_measures", "ir-measures", "Evaluation")
    return ir_measures, [_parse(ir_measures, name) for name in measures]


def _parse(ir_measures: Any, name: str) -> Any:
    """One measure; a cut-off of 0 would abort the interpreter where it is computed."""
    problem: object = "no installed package computes it"
    try:
        measure = ir_measures.parse_measure(name)
        cutoff, grade, recall = (measure.params.get(key, 1) for key in ("cutoff", "rel", "recall"))
        if cutoff < 1 or grade < 1 or not 0 <= recall <= 1:
            problem = "cut-offs and grades begin at 1, a recall lies in [0, 1]"
        elif ir_measures.DefaultPipeline.supports(measure):
            return measure
    except (NameError, ValueError, SyntaxError, TypeError, AssertionError) as error:
        problem = error
    raise ValueError(f"measures: expected names such as nDCG@10, R@100, RR@10 or AP, got {name!r} ({problem}).")


def write_trec_run(run: _RunLike, path: str | Path, tag: str = "tilefold") -> None:
    """Write ``query Q0 document rank score tag`` lines, best first, ranks from 1; atomically.

    Raises:
        ValueError: an id or the tag is empty or has white space, which the format cannot carry; a score is not finite.
    """
    _check_word("tag", tag)
    with atomic_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for query_id, scores in run.items():
            _check_word("query id", query_id)
            ranked = sorted(scores.items(), key=lambda item: -item[1])
            for rank, (document_id, score) in enumerate(ranked, start=1):
                _check_word("document id", document_id)
                if not math.isfinite(score):
                    raise ValueError(f"run: expected finite scores, got {score} for {document_id!r} and {query_id!r}.")
                stream.write(f"{query_id} Q0 {document_id} {rank} {float(score)!r} {tag}\n")


def _check_word(what: str, value: str) -> None:
    if not value or len(value.split()) != 1:
        raise ValueError(f"{what}: a TREC run needs words without white space, got {value!r}. Rename it.")


def read_trec_run(path: str | Path) -> Run:
    """Read a TREC run file into ``{query id: {document id: score}}``.

    Raises:
        FileNotFoundError: no such file.
        DataError: a line without 6 fields, a score that is not a finite number, a document given twice for a
            query; the message names file and line.
    """
    run: Run = {}
    for number, line in numbered_lines(_existing(path)):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 6:
            raise DataError(f"{path}:{number}: expected 6 fields (query Q0 doc rank score tag), got {len(fields)}.")
        query_id, _, document_id, _, text, _ = fields
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise DataError(f"{path}:{number}: expected a finite score, got {text!r}.")
        scores = run.setdefault(query_id, {})
        if document_id in scores:
            raise DataError(f"{path}:{number}: document {document_id!r} was already given for query {query_id!r}.")
        scores[document_id] = score
    return run


def read_trec_provenance(path: str | Path) -> Provenance:
    """The model and the texts behind a run, from the tag of its first line; unknown for runs of other programs."""
    fields = next((line.split() for _, line in numbered_lines(_existing(path)) if line.strip()), [])
    return Provenance.from_tag(fields[-1]) if len(fields) == 6 else Provenance()


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file with a run; evaluation writes one (--save-run, write_trec_run).")
    return Path(path)


def active_terms(vectors: SparseVectors) -> float:
    """Mean number of non-zero terms per vector; 0 when there is no vector."""
    return float(np.count_nonzero(vectors.data)) / len(vectors) if len(vectors) else 0.0


def flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Expected number of terms that a query and a document share: the FLOPS measure of arXiv 2004.05665.

    ``sum over terms v of P(query has v) * P(document has v)``: the multiplications that one score costs in an
    inverted index, on average over all pairs.
    """
    check_same_vocabulary(queries, documents, "queries", "documents")
    if not len(queries) or not len(documents):
        return 0.0
    counts = [
        np.bincount(side.indices[side.data != 0], minlength=side.vocab_size).astype(np.float64) / len(side)
        for side in (queries, documents)
    ]
    return float(counts[0] @ counts[1])
