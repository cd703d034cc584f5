"""Evaluation of runs with ir-measures, choice of fusion weights, TREC run files, and sparsity."""

from __future__ import annotations

import itertools
import math
import operator
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
    check_instance,
    check_mapping,
    list_of,
    path_of,
)
from tilefold._internal.files import exported_file
from tilefold.retrieval.common.files import check_text_ids, require
from tilefold.retrieval.common.identical_ids import (
    ignores_identical_ids,
    queries_with_identical_ids,
    without_identical_ids,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.tables import numbered_lines
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.search.fusion import Normalization, check_scores, interpolate
from tilefold.retrieval.vectors.sparse import check_vectors
from tilefold.retrieval.vectors.sparse_files import SparseVectors, check_same_vocabulary

__all__ = [
    "DEFAULT_MEASURES",
    "active_terms",
    "check_measures",
    "choose_weights",
    "conventions",
    "evaluate",
    "evaluate_per_query",
    "flops",
    "read_trec_provenance",
    "read_trec_run",
    "write_trec_run",
]

DEFAULT_MEASURES = ("nDCG@10", "R@100", "RR@10")
MAX_TRIALS = 300
MAX_GRADE = 1_000_000  # trec_eval has a table of documents that is as long as the highest grade
_N_RUN_FIELDS = 6  # of a line of a TREC run: query, Q0, document, rank, score, tag

_RunLike = Mapping[str, Mapping[str, float]]
_QrelsLike = Mapping[str, Mapping[str, int]]


def evaluate(
    run: _RunLike,
    qrels: _QrelsLike,
    measures: Sequence[str] = DEFAULT_MEASURES,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, float]:
    """Return the mean of each measure over **all** judged queries.

    A query without results counts as 0. Equal scores are ranked as the original programs do. The
    measures of trec_eval (``nDCG``, ``AP``, ``R``, ``RR`` without a cut-off) rank them by
    descending document id, after rounding to fp32. ``RR@k``, which is MS MARCO's, and ``Judged@k``
    rank them by ascending id. One table may therefore rank a tie in two ways.

    Args:
        run: query id -> document id -> score. Queries that `qrels` does not judge are ignored.
        qrels: query id -> document id -> grade. A document is relevant from grade 1 on. Negative
            grades are read as trec_eval does: the document belongs to the pool without a judgement.
            It is not relevant, and is left out by ``infAP``, ``Bpref`` and measures with
            ``judged_only=True``. Only ``Judged@k`` counts it as judged.
        measures: names as ir-measures writes them, such as ``nDCG@10``, ``R@100``, ``RR@10``,
            ``AP``.
        ignore_identical_ids: leave out hits whose document has the query's id, as BEIR does for
            collections whose queries are documents (ArguAna, Quora). None does so unless a document
            with its query's id is relevant in `qrels`. :func:`conventions` counts these hits.

    Raises:
        ValueError: if `qrels` is empty, the run has none of its queries, a measure is unknown, a
            score is not a number, a grade is above 1,000,000, or UTF-8 or C cannot hold an id.
        TypeError: if an id is not a string, or a grade is not an integer.
    """
    table = evaluate_per_query(
        run,
        qrels,
        measures,
        ignore_identical_ids=ignore_identical_ids,
    )
    return {name: math.fsum(row[name] for row in table.values()) / len(table) for name in measures}


def evaluate_per_query(
    run: _RunLike,
    qrels: _QrelsLike,
    measures: Sequence[str] = DEFAULT_MEASURES,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, dict[str, float]]:
    """Compute each measure for every judged query.

    The arguments and errors are those of :func:`evaluate`.

    Returns:
        Query id -> name of the measure -> value.
    """
    _check_scores_by_query(run)
    check_mapping("qrels", qrels, "query id -> grades by document")
    measures = list_of("measures", measures)
    grades = _judged_queries(qrels)
    check_has_judged_query("run", run, grades)
    if ignores_identical_ids(grades, ignore_identical_ids):
        run = without_identical_ids(run)
    metrics = _parse_measures(measures)
    table = {query_id: dict.fromkeys(measures, 0.0) for query_id in grades}
    # trec_eval, which remembers the last query, would take a query with the id "no query" for one
    # that it has evaluated. Queries get numbers as ids.
    query_of_number = {str(number): query_id for number, query_id in enumerate(grades)}
    numbered_run: dict[str, dict[str, float]] = {}
    numbered_grades: dict[str, dict[str, int]] = {}
    for number, query_id in query_of_number.items():
        scores = run.get(query_id)
        if scores:
            check_scores("run", query_id, scores, finite=False)
            numbered_run[number] = {document: float(score) for document, score in scores.items()}
        numbered_grades[number] = _with_nonnegative_grade(grades[query_id], scores or {})
    if not numbered_run:
        return table
    for result in _compute(metrics, numbered_grades, numbered_run):
        # Two names may denote one measure.
        for name, metric in zip(measures, metrics, strict=True):
            if metric == result.measure:
                table[query_of_number[result.query_id]][name] = float(result.value)
    return table


def _check_scores_by_query(run: _RunLike) -> None:
    """Raise ``TypeError`` unless `run` maps queries to mappings."""
    check_mapping("run", run, "query id -> scores by document")
    for query_id, scores in run.items():
        check_mapping(f"run[{query_id!r}]", scores, "document id -> score")


def _judged_queries(qrels: _QrelsLike) -> dict[str, dict[str, int]]:
    """Check the grades of all queries, and leave out queries without grades.

    Args:
        qrels: query id -> document id -> grade.

    Returns:
        Query id -> document id -> grade, at least one of each query.

    Raises:
        ValueError: if no query has a grade.
    """
    judged = {
        query_id: _checked_grades(query_id, grades) for query_id, grades in qrels.items() if grades
    }
    if not judged:
        problem = "no query"
        if qrels:
            problem = f"no grade for any of {len(qrels)}, {list(qrels)[:3]} first"
        raise ArgumentError(
            "qrels",
            f"expected at least one judged query, got {problem}. Check the split.",
        )
    check_text_ids("qrels", judged)
    return judged


def _with_nonnegative_grade(
    grades: dict[str, int],
    scores: Mapping[str, float],
) -> dict[str, int]:
    """Add a document of grade 0 that no run has, if all grades of a query are negative.

    Without a grade of 0 or more, trec_eval writes outside of its table of grades.

    Args:
        grades: document id -> grade of the query.
        scores: document id -> score of the query's results.
    """
    if max(grades.values()) >= 0:
        return grades
    # An id that is longer than all others equals none of them.
    longest_id = max((*grades, *scores), key=len)
    return {**grades, f"{longest_id}+": 0}


def conventions(
    run: _RunLike,
    qrels: _QrelsLike,
    depth: int = 100,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, float]:
    """Count how often each convention of evaluation was needed for a run.

    Args:
        run: query id -> document id -> score.
        qrels: query id -> document id -> grade.
        depth: documents per query among which equal scores are counted.
        ignore_identical_ids: as for :func:`evaluate`.

    Returns:
        ``judged@10``: mean share of the first 10 documents of a query that are judged; others are
        not relevant. ``negative``: judgements with a grade below 0, which are not relevant either.
        ``tied``: judged queries with equal scores, in fp32, among their best `depth` documents and
        the next one; :func:`evaluate` has their order. ``ignored_identical_ids`` and
        ``counted_identical_ids``: hits of judged queries with the query's own id, which are left
        out, or count as any other.
    """
    ignores = ignores_identical_ids(qrels, ignore_identical_ids)
    n_identical = len(queries_with_identical_ids(run) & qrels.keys())
    if ignores:
        run = without_identical_ids(run)
    judged = evaluate(run, qrels, ["Judged@10"], ignore_identical_ids=ignores)["Judged@10"]
    n_negative = 0
    for grades in qrels.values():
        n_negative += sum(grade < 0 for grade in grades.values())
    return {
        "judged@10": judged,
        "negative": n_negative,
        "tied": sum(_has_ties(run.get(query_id, {}), depth) for query_id in qrels),
        "ignored_identical_ids": n_identical if ignores else 0,
        "counted_identical_ids": 0 if ignores else n_identical,
    }


def _has_ties(scores: Mapping[str, float], depth: int) -> bool:
    """Return whether two of the `depth` + 1 highest scores are equal in fp32."""
    with np.errstate(over="ignore"):
        values = np.array(list(scores.values()), np.float64).astype(np.float32)
    highest = np.sort(values)[::-1][: depth + 1]
    return bool((highest[1:] == highest[:-1]).any())


def choose_weights(
    runs: Sequence[Run],
    qrels: Mapping[str, Mapping[str, int]],
    *,
    measure: str = "nDCG@10",
    step: float = 0.1,
    normalization: Normalization = "min_max",
    k: int = 100,
    ignore_identical_ids: bool | None = None,
) -> tuple[tuple[float, ...], float]:
    """Choose the weights of :func:`tilefold.retrieval.interpolate` on judged queries.

    All weights that are multiples of `step` and sum to 1 are evaluated. Of equal results, the one
    with the largest weights for the first runs is chosen. The result is in sample: report the
    measure on other queries.

    Args:
        runs: rankings to fuse, each query id -> document id -> score.
        qrels: query id -> document id -> grade.
        measure: the measure to maximise.
        step: difference of neighbouring weights, 1 divided by an integer.
        normalization: how scores are normalised.
        k: documents per query of the fused run.
        ignore_identical_ids: whether hits with the query's own id are left out of the runs before
            scores are normalised, as for :func:`evaluate`.

    Returns:
        The weights, one per run, and the value of the measure.

    Raises:
        ValueError: if `step` does not divide 1, there are more than 300 combinations or no run, or
            a run has no judged query.
    """
    ignores = ignores_identical_ids(qrels, ignore_identical_ids)
    for number, run in enumerate(runs):
        check_has_judged_query(f"runs[{number}]", run, qrels)
    judged_runs = [{query: run[query] for query in qrels if query in run} for run in runs]
    if ignores:
        judged_runs = [without_identical_ids(run) for run in judged_runs]
    trials = []
    for weights in _weight_grid(len(runs), step):
        fused = interpolate(judged_runs, weights, normalization, k)
        values = evaluate(fused, qrels, (measure,), ignore_identical_ids=ignores)
        trials.append((values[measure], weights))
    highest_value, best_weights = max(trials)
    return best_weights, highest_value


def _weight_grid(n_runs: int, step: float) -> list[tuple[float, ...]]:
    """List the weights of several runs that are multiples of a step and sum to 1.

    Args:
        n_runs: number of runs.
        step: difference of neighbouring weights, 1 divided by an integer.

    Returns:
        Tuples of `n_runs` weights.

    Raises:
        ValueError: for another step, and for no or more than ``MAX_TRIALS`` combinations.
    """
    n_steps = round(1 / step) if 0 < step <= 1 else 0
    if not math.isclose(n_steps * step, 1):
        raise ArgumentError(
            "step", f"expected 1 divided by a whole number, such as 0.1, got {step!r}."
        )
    # A weight is a count of steps, so that sums are exact.
    grid = [
        counts
        for counts in itertools.product(range(n_steps + 1), repeat=n_runs)
        if sum(counts) == n_steps
    ]
    if not grid or len(grid) > MAX_TRIALS:
        raise ArgumentError(
            "runs",
            f"expected 1 to {MAX_TRIALS} combinations of weights, got {len(grid)} for "
            f"{n_runs} runs at a step of {step:g}. Fuse fewer runs, or take a larger step in "
            "Python (choose_weights).",
        )
    return [tuple(count / n_steps for count in counts) for counts in grid]


def _compute(metrics: list[Any], grades: _QrelsLike, run: _RunLike) -> list[Any]:
    """Compute measures with the package ir-measures.

    Args:
        metrics: measures of ir-measures. A repeated one is computed once.
        grades: query id -> document id -> grade.
        run: query id -> document id -> score.

    Returns:
        Results with the attributes ``query_id``, ``measure`` and ``value``.

    Raises:
        ValueError: if a program of TREC fails.
    """
    distinct_metrics = list(dict.fromkeys(metrics))
    try:
        return list(_import_ir_measures().iter_calc(distinct_metrics, grades, run))
    except subprocess.CalledProcessError as error:  # gdeval.pl
        raise ArgumentError(
            "measures",
            "TREC's program for ERR and nDCG(dcg='exp-log2') failed with code "
            f"{error.returncode}; it takes grades up to 4, and ids without white space. Leave "
            "these measures out, or change grades or ids.",
        ) from error


def check_has_judged_query(name: str, run: _RunLike, qrels: _QrelsLike) -> None:
    """Raise ``ValueError`` for a run that has queries, but none of those in `qrels`."""
    check_text_ids(name, run)
    if run and not any(query_id in qrels for query_id in run):
        raise ArgumentError(
            name,
            f"expected results for a judged query, got those of others: its first query is "
            f"{next(iter(run))!r}, that of the judgements {next(iter(qrels), None)!r}. Give the "
            "same.",
        )


def _checked_grades(query_id: str, grades: Mapping[str, int]) -> dict[str, int]:
    """Check the grades of a query, and return them as Python integers.

    Args:
        query_id: id of the query, for errors.
        grades: document id -> grade, at least one.

    Raises:
        TypeError: for a grade that is not an integer, or an id that is not a string.
        ValueError: for a grade above ``MAX_GRADE`` in size.
    """
    check_mapping(f"qrels[{query_id!r}]", grades, "document id -> grade")
    check_text_ids("qrels", grades)
    try:
        integers = {document: operator.index(grade) for document, grade in grades.items()}
    except TypeError:
        invalid = next(grade for grade in grades.values() if not hasattr(grade, "__index__"))
        raise TypeError(
            f"qrels: expected integer grades for query {query_id!r}, got {invalid!r}. Round them.",
        ) from None
    largest = max(integers.values(), key=abs)
    if abs(largest) > MAX_GRADE:
        raise ArgumentError(
            "qrels",
            f"expected grades of at most {MAX_GRADE:,} for query {query_id!r}, got "
            f"{largest}. Map them.",
        )
    return integers


def check_measures(measures: Sequence[str]) -> int:
    """Return the deepest cut-off of measures, 0 if there is none.

    Raises:
        ValueError: if a measure is unknown, or has wrong parameters.
    """
    return max(int(metric.params.get("cutoff", 0)) for metric in _parse_measures(measures))


def _import_ir_measures() -> ModuleType:
    return require("ir_measures", "ir-measures", "Evaluation")


def _parse_measures(measures: Sequence[str]) -> list[Any]:
    """Return the objects of ir-measures with these names."""
    if not measures or isinstance(measures, str):
        raise ArgumentError(
            "measures",
            f"expected a list of names such as ['nDCG@10'], got {measures!r}.",
        )
    ir_measures = _import_ir_measures()
    return [_parse_measure(ir_measures, name) for name in measures]


def _parse_measure(ir_measures: ModuleType, name: str) -> Any:
    """Parse the name of a measure, such as ``nDCG@10``, and check its parameters.

    A cut-off of 0, or a huge gain, would crash the interpreter when the measure is computed.

    Args:
        ir_measures: the module ``ir_measures``.
        name: name of the measure.

    Returns:
        The measure, an object of ir-measures.

    Raises:
        ValueError: for an unknown measure, or a parameter out of range.
    """
    problem: object = "no installed package computes it"
    try:
        measure = ir_measures.parse_measure(name)
        cutoff = measure.params.get("cutoff", 1)
        min_grade = measure.params.get("rel", 1)
        recall = measure.params.get("recall", 1)
        highest_grade = max([min_grade, *measure.params.get("gains", {}).values()])
        if cutoff < 1 or min_grade < 1 or not 0 <= recall <= 1:
            problem = "cut-offs and grades begin at 1, a recall lies in [0, 1]"
        elif highest_grade > MAX_GRADE:
            problem = f"grades and gains are at most {MAX_GRADE:,}"
        elif ir_measures.DefaultPipeline.supports(measure):
            return measure
    except (NameError, ValueError, SyntaxError, TypeError, AssertionError) as error:
        problem = error
    raise ArgumentError(
        "measures",
        f"expected names such as nDCG@10, R@100, RR@10 or AP, got {name!r} ({problem}).",
    )


def write_trec_run(
    run: _RunLike,
    path: str | Path,
    tag: str = "tilefold",
    *,
    overwrite: bool = False,
) -> None:
    """Write a run as lines ``query Q0 document rank score tag``, atomically.

    Documents of a query are written by descending score, with ranks from 1.

    Args:
        run: query id -> document id -> score.
        path: the file.
        tag: name of the run, one word.
        overwrite: replace a file that exists.

    Raises:
        FileExistsError: if the file exists, without `overwrite`.
        TypeError: if an id or the tag is no string.
        ValueError: if an id or the tag is empty or has white space, or a score is not finite.
    """
    check_mapping("run", run, "query id -> scores by document")
    check_word("tag", tag)
    with (
        exported_file(path_of("path", path), overwrite=overwrite) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
    ):
        for query_id, scores in run.items():
            check_text_ids("run", [query_id])
            check_scores("run", query_id, scores)
            check_word("query id", query_id)
            ranked = sorted(scores.items(), key=lambda item: -item[1])
            for rank, (document_id, score) in enumerate(ranked, start=1):
                check_word("document id", document_id)
                stream.write(f"{query_id} Q0 {document_id} {rank} {float(score)!r} {tag}\n")


def check_word(name: str, value: str) -> None:
    """Raise an error unless a line of a TREC run can hold `value`, a string of one word."""
    check_instance(name, value, str, "a word")
    if not value or len(value.split()) != 1:
        raise ArgumentError(
            name,
            f"a TREC run needs words without white space, got {value!r}. Rename it.",
        )


def read_trec_run(path: str | Path) -> Run:
    """Read a TREC run file into ``{query id: {document id: score}}``.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: if a line does not have 6 fields, a score is not finite, or a query has a
            document twice. The message names the line.
    """
    run = Run()
    for number, line in numbered_lines(_existing_run(path)):
        fields = line.split()
        if not fields:
            continue
        location = f"{path}:{number}"
        query_id, document_id, score = _parse_run_line(fields, location)
        scores = run.setdefault(query_id, {})
        if document_id in scores:
            raise DataError(
                f"{location}: document {document_id!r} was already given for query {query_id!r}.",
            )
        scores[document_id] = score
    return run


def _parse_run_line(fields: list[str], location: str) -> tuple[str, str, float]:
    """Parse the fields of a line of a TREC run.

    Args:
        fields: ``query Q0 document rank score tag``. Q0, the rank and the tag are not used.
        location: file and line, for errors.

    Returns:
        Query id, document id and score.

    Raises:
        DataError: for another number of fields, or a score that is not finite.
    """
    remedy = "Fix that line, or remove it if it names columns."
    if len(fields) != _N_RUN_FIELDS:
        raise DataError(
            f"{location}: expected {_N_RUN_FIELDS} fields (query Q0 doc rank score tag), got "
            f"{len(fields)}. {remedy}",
        )
    query_id, _, document_id, _, score_text, _ = fields
    score = math.nan  # of a text that is no number
    with suppress(ValueError):
        score = float(score_text)
    if not math.isfinite(score):
        raise DataError(f"{location}: expected a finite score, got {score_text!r}. {remedy}")
    return query_id, document_id, score


def read_trec_provenance(path: str | Path) -> Provenance:
    """Return the provenance of a run, from the tag of its first line.

    Runs of other programs have an empty provenance.
    """
    for _, line in numbered_lines(_existing_run(path)):
        fields = line.split()
        if fields:
            tag = fields[-1]
            return Provenance.from_tag(tag) if len(fields) == _N_RUN_FIELDS else Provenance()
    return Provenance()


def _existing_run(path: str | Path) -> Path:
    """Return `path`, or raise ``FileNotFoundError`` if there is no such file."""
    if not path_of("path", path).is_file():
        raise FileNotFoundError(
            f"{path}: no such file with a run; evaluation writes one (--save-run, write_trec_run).",
        )
    return Path(path)


def active_terms(vectors: SparseVectors) -> float:
    """Return the mean number of non-zero terms per vector; 0 if there is no vector."""
    check_vectors("vectors", vectors)
    if not len(vectors):
        return 0.0
    return float(np.count_nonzero(vectors.data)) / len(vectors)


def flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Return the expected number of terms that a query and a document share (arXiv 2004.05665).

    This FLOPS measure is ``sum over terms v of P(query has v) * P(document has v)``: the expected
    number of multiplications of a score in an inverted index.
    """
    check_vectors("queries", queries)
    check_vectors("documents", documents)
    check_same_vocabulary(queries, documents, "queries", "documents")
    if not len(queries) or not len(documents):
        return 0.0
    return float(_term_probabilities(queries) @ _term_probabilities(documents))


def _term_probabilities(vectors: SparseVectors) -> npt.NDArray[np.float64]:
    """Return the share of vectors that have each term, ``[V]``."""
    terms = vectors.indices[vectors.data != 0]
    counts = np.bincount(terms, minlength=vectors.vocab_size)
    return counts.astype(np.float64) / len(vectors)
