"""Evaluate runs with ir-measures; weights of a fusion, chosen on judged queries; TREC run files;
sparsity figures.
"""

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

from tilefold._internal.arguments import check_mapping, list_of, path_of
from tilefold._internal.files import atomic_file
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
]
__all__ += [
    "evaluate_per_query",
    "flops",
    "read_trec_provenance",
    "read_trec_run",
    "write_trec_run",
]

DEFAULT_MEASURES = ("nDCG@10", "R@100", "RR@10")
MAX_TRIALS = 300
MAX_GRADE = 1_000_000  # trec_eval counts documents in a table that is as long as the highest grade

_RunLike = Mapping[str, Mapping[str, float]]
_QrelsLike = Mapping[str, Mapping[str, int]]


def evaluate(
    run: _RunLike,
    qrels: _QrelsLike,
    measures: Sequence[str] = DEFAULT_MEASURES,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, float]:
    """Mean of each measure over **all** judged queries; a query without results counts as 0.

    Equal scores are ranked as the original programs do: by descending document id, after rounding
    to fp32, in the measures of trec_eval (``nDCG``, ``AP``, ``R``, ``RR`` without a cut-off); by
    ascending id in ``RR@k``, which is MS MARCO's, and in ``Judged@k``. One table may therefore rank
    a tie in two ways.

    Args:
        run: query id -> document id -> score. Queries that `qrels` does not judge are ignored.
        qrels: query id -> document id -> grade; a document is relevant from grade 1 on. Negative
            grades are read as trec_eval does, to which such a document is one of the pool that
            nobody judged: not relevant, and left out by ``infAP``, ``Bpref`` and measures with
            ``judged_only=True``. Only ``Judged@k`` counts it as judged.
        measures: names as ir-measures writes them, such as ``nDCG@10``, ``R@100``, ``RR@10``,
            ``AP``.
        ignore_identical_ids: leave out hits whose document has the query's id, as BEIR does for
            collections whose queries are documents (ArguAna, Quora). None does so unless `qrels`
            call such a document relevant; :func:`conventions` says how many there were.

    Raises:
        ValueError: empty `qrels`, a run that answers none of their queries, an unknown measure, a
            score that is not a number, a grade above 1,000,000, an id that UTF-8 or C cannot hold.
        TypeError: an id that is not a string, a grade that is not an integer.
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
    """``{query id: {measure: value}}`` for every judged query; see :func:`evaluate`."""
    check_mapping("run", run, "query id -> scores by document")
    for query_id, scores in run.items():
        check_mapping(f"run[{query_id!r}]", scores, "document id -> score")
    check_mapping("qrels", qrels, "query id -> grades by document")
    measures = list_of("measures", measures)
    judged = {
        query_id: _checked_grades(query_id, grades) for query_id, grades in qrels.items() if grades
    }
    if not judged:
        got = f"no grade for any of {len(qrels)}, {list(qrels)[:3]} first" if qrels else "no query"
        raise ValueError(f"qrels: expected at least one judged query, got {got}. Check the split.")
    check_text_ids("qrels", judged)
    check_answers("run", run, judged)
    if ignores_identical_ids(judged, ignore_identical_ids):
        run = without_identical_ids(run)
    parsed = _parsed(measures)
    table = {query_id: dict.fromkeys(measures, 0.0) for query_id in judged}
    # trec_eval, which remembers the last query, would take one with the id "no query" for one that
    # it has answered.
    numbered = {str(number): query_id for number, query_id in enumerate(judged)}
    found: dict[str, dict[str, float]] = {}
    for number, query_id in numbered.items():
        if run.get(query_id):
            check_scores("run", query_id, run[query_id], finite=False)
            found[number] = {
                name: float(score) for name, score in run[query_id].items()
            }  # Python's numbers
    grades = {number: judged[query_id] for number, query_id in numbered.items()}
    for (
        number,
        own,
    ) in (
        grades.items()
    ):  # without a grade of 0 or more, trec_eval writes outside of its table of grades
        if max(own.values()) < 0:
            grades[number] = own | {max((*own, *found.get(number, {})), key=len) + "+": 0}
    if found:
        for metric in _computed(parsed, grades, found):
            for name, measure in zip(
                measures,
                parsed,
                strict=True,
            ):  # two names may denote one measure
                if measure == metric.measure:
                    table[numbered[metric.query_id]][name] = float(metric.value)
    return table


def conventions(
    run: _RunLike,
    qrels: _QrelsLike,
    depth: int = 100,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, float]:
    """Conventions that bear on the measures of a run, each with how often it was needed.

    Args:
        run: query id -> document id -> score.
        qrels: query id -> document id -> grade.
        depth: documents per query among which equal scores are looked for.
        ignore_identical_ids: as for :func:`evaluate`.

    Returns:
        ``judged@10``: mean share of the first 10 documents of a query that somebody judged; others
        are not relevant. ``negative``: judgements with a grade below 0, which are not relevant
        either. ``tied``: judged queries with equal scores, in fp32, among their best `depth`
        documents and the next one, whose order :func:`evaluate` says. ``ignored_identical_ids`` and
        ``counted_identical_ids``: hits of judged queries with the query's own id, which are left
        out, or count as any other.
    """
    ignores = ignores_identical_ids(qrels, ignore_identical_ids)
    identical = len(queries_with_identical_ids(run) & qrels.keys())
    if ignores:
        run = without_identical_ids(run)
    judged = evaluate(run, qrels, ["Judged@10"], ignore_identical_ids=ignores)["Judged@10"]
    tied = 0
    for query_id in qrels:
        with np.errstate(over="ignore"):
            scores = np.array([*run.get(query_id, {}).values()], np.float64).astype(np.float32)
        best = np.sort(scores)[::-1][: depth + 1]
        tied += bool((best[1:] == best[:-1]).any())
    negative = sum(grade < 0 for grades in qrels.values() for grade in grades.values())
    return {
        "judged@10": judged,
        "negative": negative,
        "tied": tied,
        "ignored_identical_ids": identical if ignores else 0,
        "counted_identical_ids": 0 if ignores else identical,
    }


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
    """Weights of :func:`tilefold.retrieval.interpolate` with the best `measure` on `qrels`, and
    that measure.

    All weights that are multiples of `step` and sum to 1 are tried; of equal ones, the largest for
    the first runs wins. The measure is in sample: report other queries. A step that does not divide
    1, more than 300 combinations, no run, or one that answers no judged query is a ``ValueError``.
    Hits with the query's own id are left out of the runs before they are normalised, where
    `ignore_identical_ids` says so (see :func:`evaluate`).
    """
    ignores = ignores_identical_ids(qrels, ignore_identical_ids)
    for number, run in enumerate(runs):
        check_answers(f"runs[{number}]", run, qrels)
    parts = round(1 / step) if 0 < step <= 1 else 0
    if not math.isclose(parts * step, 1):
        raise ValueError(f"step: expected 1 divided by a whole number, such as 0.1, got {step!r}.")
    mine = [{query: run[query] for query in qrels if query in run} for run in runs]
    if ignores:
        mine = [without_identical_ids(run) for run in mine]
    grid = [
        counts
        for counts in itertools.product(range(parts + 1), repeat=len(runs))
        if sum(counts) == parts
    ]
    if not grid or len(grid) > MAX_TRIALS:
        got = f"{len(grid)} for {len(runs)} runs at a step of {step:g}. Fuse fewer, or take a larger step"
        raise ValueError(f"runs: expected 1 to {MAX_TRIALS} combinations of weights, got {got}.")
    trials = []
    for counts in grid:
        weights = tuple(count / parts for count in counts)
        values = evaluate(
            interpolate(mine, weights, normalization, k),
            qrels,
            (measure,),
            ignore_identical_ids=ignores,
        )
        trials.append((values[measure], weights))
    score, best = max(trials)
    return best, score


def _computed(parsed: list[Any], grades: _QrelsLike, run: _RunLike) -> list[Any]:
    try:
        return list(_package().iter_calc(list(dict.fromkeys(parsed)), grades, run))
    except subprocess.CalledProcessError as error:  # gdeval.pl
        said = f"failed with code {error.returncode}; it takes grades up to 4, and ids without white space"
        remedy = "Leave these measures out, or change grades or ids."
        raise ValueError(
            f"measures: TREC's program for ERR and nDCG(dcg='exp-log2') {said}. {remedy}",
        ) from error


def check_answers(name: str, run: _RunLike, qrels: _QrelsLike) -> None:
    """Raise an error for a run that has queries, but none of those of `qrels`."""
    check_text_ids(name, run)
    if run and not any(query_id in qrels for query_id in run):
        first = f"its first query is {next(iter(run))!r}, that of the judgements {next(iter(qrels), None)!r}"
        raise ValueError(
            f"{name}: expected results for a judged query, got those of others: {first}. Give the same.",
        )


def _checked_grades(query_id: str, grades: Mapping[str, int]) -> dict[str, int]:
    """The grades of a query as Python's integers."""
    check_mapping(f"qrels[{query_id!r}]", grades, "document id -> grade")
    check_text_ids("qrels", grades)
    try:
        found = {name: operator.index(grade) for name, grade in grades.items()}
    except TypeError:
        wrong = next(grade for grade in grades.values() if not hasattr(grade, "__index__"))
        raise TypeError(
            f"qrels: expected integer grades for query {query_id!r}, got {wrong!r}. Round them.",
        ) from None
    if abs(worst := max(found.values(), key=abs)) > MAX_GRADE:
        most = f"grades of at most {MAX_GRADE:,} for query {query_id!r}"
        raise ValueError(f"qrels: expected {most}, got {worst}. Map them.")
    return found


def check_measures(measures: Sequence[str]) -> int:
    """Deepest cut-off of measures, 0 if there is none; a ``ValueError`` for an unknown one or wrong
    parameters.
    """
    return max(int(measure.params.get("cutoff", 0)) for measure in _parsed(measures))


def _package() -> ModuleType:
    return require("ir_measures", "ir-measures", "Evaluation")


def _parsed(measures: Sequence[str]) -> list[Any]:
    if not measures or isinstance(measures, str):
        raise ValueError(
            f"measures: expected a list of names such as ['nDCG@10'], got {measures!r}.",
        )
    return [_parse(_package(), name) for name in measures]


def _parse(ir_measures: ModuleType, name: str) -> Any:
    """One measure; a cut-off of 0, or a huge gain, would end the interpreter where it is computed."""
    problem: object = "no installed package computes it"
    try:
        measure = ir_measures.parse_measure(name)
        cutoff, grade, recall = (measure.params.get(key, 1) for key in ("cutoff", "rel", "recall"))
        highest = max([grade, *measure.params.get("gains", {}).values()])
        if cutoff < 1 or grade < 1 or not 0 <= recall <= 1:
            problem = "cut-offs and grades begin at 1, a recall lies in [0, 1]"
        elif highest > MAX_GRADE:
            problem = f"grades and gains are at most {MAX_GRADE:,}"
        elif ir_measures.DefaultPipeline.supports(measure):
            return measure
    except (NameError, ValueError, SyntaxError, TypeError, AssertionError) as error:
        problem = error
    raise ValueError(
        f"measures: expected names such as nDCG@10, R@100, RR@10 or AP, got {name!r} ({problem}).",
    )


def write_trec_run(run: _RunLike, path: str | Path, tag: str = "tilefold") -> None:
    """Write ``query Q0 document rank score tag`` lines, best first, ranks from 1; atomically.

    An id or tag that is empty or has white space, or a score that is not finite, is a
    ``ValueError``.
    """
    check_mapping("run", run, "query id -> scores by document")
    check_word("tag", tag)
    with (
        atomic_file(path_of("path", path)) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
    ):
        for query_id, scores in run.items():
            check_text_ids("run", [query_id])
            check_scores("run", query_id, scores)
            check_word("query id", query_id)
            for rank, (document_id, score) in enumerate(
                sorted(scores.items(), key=lambda item: -item[1]),
                start=1,
            ):
                check_word("document id", document_id)
                stream.write(f"{query_id} Q0 {document_id} {rank} {float(score)!r} {tag}\n")


def check_word(what: str, value: str) -> None:
    """Raise an error for what a line of a TREC run cannot hold."""
    if not value or len(value.split()) != 1:
        raise ValueError(
            f"{what}: a TREC run needs words without white space, got {value!r}. Rename it.",
        )


def read_trec_run(path: str | Path) -> Run:
    """Read a TREC run file into ``{query id: {document id: score}}``.

    A line without 6 fields, a score that is not finite, or a document given twice is a
    ``DataError`` that names it.
    """
    run, remedy = Run(), "Fix that line, or remove it if it names columns."
    for number, line in numbered_lines(_existing(path)):
        if not (fields := line.split()):
            continue
        if len(fields) != 6:
            expected = "6 fields (query Q0 doc rank score tag)"
            raise DataError(f"{path}:{number}: expected {expected}, got {len(fields)}. {remedy}")
        query_id, _, document_id, _, text, _ = fields
        score = math.nan
        with suppress(ValueError):
            score = float(text)
        if not math.isfinite(score):
            raise DataError(f"{path}:{number}: expected a finite score, got {text!r}. {remedy}")
        scores = run.setdefault(query_id, {})
        if document_id in scores:
            raise DataError(
                f"{path}:{number}: document {document_id!r} was already given for query {query_id!r}.",
            )
        scores[document_id] = score
    return run


def read_trec_provenance(path: str | Path) -> Provenance:
    """The model and the texts behind a run, from the tag of its first line; unknown for runs of
    other programs.
    """
    fields = next((line.split() for _, line in numbered_lines(_existing(path)) if line.strip()), [])
    return Provenance.from_tag(fields[-1]) if len(fields) == 6 else Provenance()


def _existing(path: str | Path) -> Path:
    if not path_of("path", path).is_file():
        raise FileNotFoundError(
            f"{path}: no such file with a run; evaluation writes one (--save-run, write_trec_run).",
        )
    return Path(path)


def active_terms(vectors: SparseVectors) -> float:
    """Mean number of non-zero terms per vector; 0 when there is no vector."""
    check_vectors("vectors", vectors)
    return float(np.count_nonzero(vectors.data)) / len(vectors) if len(vectors) else 0.0


def flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Expected number of terms that a query and a document share: the FLOPS measure of arXiv
    2004.05665.

    ``sum over terms v of P(query has v) * P(document has v)``: the multiplications of a score in an
    inverted index.
    """
    check_vectors("queries", queries)
    check_vectors("documents", documents)
    check_same_vocabulary(queries, documents, "queries", "documents")
    if not len(queries) or not len(documents):
        return 0.0
    counts = [
        np.bincount(side.indices[side.data != 0], minlength=side.vocab_size).astype(np.float64)
        / len(side)
        for side in (queries, documents)
    ]
    return float(counts[0] @ counts[1])
