"""Evaluation of runs with ir-measures, choice of fusion weights, TREC run files, and sparsity."""

from __future__ import annotations

import itertools
import math
import operator
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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
from tilefold.retrieval.search.fusion import Normalization, check_scores, interpolate_by_each
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
    "usual_names",
    "write_trec_run",
]

DEFAULT_MEASURES = ("nDCG@10", "R@100", "RR@10")
# Largest number of combinations of weights that `choose_weights` evaluates.
MAX_TRIALS = 300
# trec_eval allocates a table with an entry for each grade up to the highest one.
MAX_GRADE = 1_000_000
# A line of a TREC run has the fields query, Q0, document, rank, score and tag.
_N_RUN_FIELDS = 6

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

    A query without results counts as 0. Equal scores are ranked as the original programs rank
    them. The measures of trec_eval (``nDCG``, ``AP``, ``R``, ``RR`` without a cut-off) rank them
    by descending document id, after rounding to fp32. ``RR@k``, which is MS MARCO's measure, and
    ``Judged@k`` rank them by ascending id. Two measures may therefore rank a tie differently.

    Args:
        run: query id -> document id -> score. Queries that `qrels` does not judge are ignored.
        qrels: query id -> document id -> grade. A document is relevant from grade 1 on. A negative
            grade means, as in trec_eval, that the document was pooled but not judged. Such a
            document is not relevant, and is left out by ``infAP``, ``Bpref`` and measures with
            ``judged_only=True``. Only ``Judged@k`` counts it as judged.
        measures: names of measures in the syntax of ir-measures, such as ``nDCG@10``, ``R@100``,
            ``RR@10`` or ``AP``, in any case. The result has them as they are given.
        ignore_identical_ids: whether to leave out hits whose document has the query's id, as BEIR
            does for collections whose queries are documents (ArguAna, Quora). None leaves them out
            if no document with its query's id is relevant in `qrels`. :func:`conventions` counts
            these hits.

    Returns:
        Name of the measure -> mean.

    Raises:
        ValueError: if `qrels` is empty, the run has none of its queries, a measure is unknown, a
            score is not a number, a grade is above 1,000,000, or an id contains a NUL character
            or a lone surrogate.
        TypeError: if an id is not a string, or a grade is not an integer.

    Examples:
        >>> run = {"q1": {"cards": 2.0, "pin": 1.0}, "q2": {"pin": 3.0, "limits": 1.5}}
        >>> qrels = {"q1": {"cards": 1}, "q2": {"limits": 1}}
        >>> evaluate(run, qrels, ["RR@10", "R@1"])
        {'RR@10': 0.75, 'R@1': 0.5}
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

    Examples:
        >>> run = {"q1": {"cards": 2.0}, "q2": {"pin": 3.0, "limits": 1.5}}
        >>> evaluate_per_query(run, {"q1": {"cards": 1}, "q2": {"limits": 1}}, ["RR@10"])
        {'q1': {'RR@10': 1.0}, 'q2': {'RR@10': 0.5}}
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
    numbered = _number_queries(grades, run)
    if not numbered.run:
        return table
    for result in _compute(metrics, numbered.grades, numbered.run):
        query_id = numbered.query_of_number[result.query_id]
        # Several names may denote the same measure.
        for name, metric in zip(measures, metrics, strict=True):
            if metric == result.measure:
                table[query_id][name] = float(result.value)
    return table


class _NumberedQueries(NamedTuple):
    """Judgements and a run whose queries have numbers as ids.

    Attributes:
        query_of_number: number, as a string -> query id.
        grades: number -> document id -> grade.
        run: number -> document id -> score, for queries with results.
    """

    query_of_number: dict[str, str]
    grades: dict[str, dict[str, int]]
    run: dict[str, dict[str, float]]


def _number_queries(grades: Mapping[str, dict[str, int]], run: _RunLike) -> _NumberedQueries:
    """Number the judged queries, because trec_eval mishandles a query with the id "no query".

    Args:
        grades: query id -> document id -> grade, at least one per query.
        run: query id -> document id -> score. Queries without grades are left out.
    """
    query_of_number = {str(number): query_id for number, query_id in enumerate(grades)}
    numbered = _NumberedQueries(query_of_number, grades={}, run={})
    for number, query_id in query_of_number.items():
        scores = run.get(query_id) or {}
        if scores:
            check_scores("run", query_id, scores, finite=False)
            numbered.run[number] = {document: float(score) for document, score in scores.items()}
        numbered.grades[number] = _with_nonnegative_grade(grades[query_id], scores)
    return numbered


def _check_scores_by_query(run: _RunLike) -> None:
    """Raise ``TypeError`` if `run` does not map queries to mappings."""
    check_mapping("run", run, "query id -> scores by document")
    for query_id, scores in run.items():
        check_mapping(f"run[{query_id!r}]", scores, "document id -> score")


def _judged_queries(qrels: _QrelsLike) -> dict[str, dict[str, int]]:
    """Check the grades of all queries, and leave out queries without grades.

    Args:
        qrels: query id -> document id -> grade.

    Returns:
        Query id -> document id -> grade, with at least one grade per query.

    Raises:
        TypeError: if a grade is not an integer, or an id is not a string.
        ValueError: if no query has a grade, or a grade is too large.
    """
    judged = {
        query_id: _checked_grades(query_id, grades) for query_id, grades in qrels.items() if grades
    }
    if not judged:
        queries = "no queries"
        if qrels:
            queries = f"only queries without grades, such as {next(iter(qrels))!r}"
        raise ArgumentError(
            "qrels",
            f"expected at least one judged query, got {queries}. Check the split.",
        )
    check_text_ids("qrels", judged)
    return judged


def _with_nonnegative_grade(
    grades: dict[str, int],
    scores: Mapping[str, float],
) -> dict[str, int]:
    """Add an unretrieved document of grade 0 to a query whose grades are all negative.

    Without a grade of at least 0, trec_eval writes out of the bounds of its table of grades.

    Args:
        grades: document id -> grade, for the query.
        scores: document id -> score, for the documents that were retrieved for the query.

    Returns:
        Document id -> grade.
    """
    if max(grades.values()) >= 0:
        return grades
    # An id longer than every other id cannot be equal to one of them.
    longest_id = max((*grades, *scores), key=len)
    return {**grades, f"{longest_id}+": 0}


def conventions(
    run: _RunLike,
    qrels: _QrelsLike,
    depth: int = 100,
    *,
    ignore_identical_ids: bool | None = None,
) -> dict[str, float]:
    """Count the cases in a run for which evaluation needs a convention.

    Args:
        run: query id -> document id -> score.
        qrels: query id -> document id -> grade.
        depth: number of documents per query among which ties are counted.
        ignore_identical_ids: whether hits with the query's own id are left out, as for
            :func:`evaluate`.

    Returns:
        A dictionary with these keys:

        - ``judged@10``: mean share of a query's first 10 documents that are judged. Documents that
          are not judged count as not relevant.
        - ``negative``: number of judgements with a grade below 0, which also count as not relevant.
        - ``tied``: number of judged queries with a tie, in fp32, among their best `depth` + 1
          documents. :func:`evaluate` says how ties are ranked.
        - ``ignored_identical_ids``: number of judged queries whose hit with their own id is left
          out.
        - ``counted_identical_ids``: number of judged queries whose hit with their own id counts
          like any other hit.
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
    with the largest weights for the first runs is chosen. The result is in sample, so report the
    measure on other queries.

    Args:
        runs: the runs to fuse, each query id -> document id -> score.
        qrels: query id -> document id -> grade.
        measure: the measure to maximise.
        step: difference between neighbouring weights, 1 divided by an integer.
        normalization: how scores are normalised.
        k: number of documents per query in the fused run.
        ignore_identical_ids: whether hits with the query's own id are left out of the runs before
            scores are normalised, as for :func:`evaluate`.

    Returns:
        The weights, one per run, and the value of the measure.

    Raises:
        ValueError: if `step` does not divide 1, if there are more than 300 combinations or no run,
            or if a run has no judged query.
    """
    ignores = ignores_identical_ids(qrels, ignore_identical_ids)
    for number, run in enumerate(runs):
        check_has_judged_query(f"runs[{number}]", run, qrels)
    judged_runs = [{query: run[query] for query in qrels if query in run} for run in runs]
    if ignores:
        judged_runs = [without_identical_ids(run) for run in judged_runs]
    all_weights = _weight_grid(len(runs), step)
    fused_runs = interpolate_by_each(judged_runs, all_weights, normalization, k)
    trials = []
    for weights, fused in zip(all_weights, fused_runs, strict=True):
        values = evaluate(fused, qrels, (measure,), ignore_identical_ids=ignores)
        trials.append((values[measure], weights))
    highest_value, best_weights = max(trials)
    return best_weights, highest_value


def _weight_grid(n_runs: int, step: float) -> list[tuple[float, ...]]:
    """List the weights of several runs that are multiples of a step and sum to 1.

    Args:
        n_runs: number of runs.
        step: difference between neighbouring weights, 1 divided by an integer.

    Returns:
        Tuples of `n_runs` weights.

    Raises:
        ValueError: if `step` does not divide 1, or if there is no combination or more than
            ``MAX_TRIALS``.
    """
    n_steps = round(1 / step) if 0 < step <= 1 else 0
    if not math.isclose(n_steps * step, 1):
        raise ArgumentError(
            "step", f"expected 1 divided by a whole number, such as 0.1, got {step!r}."
        )
    # Weights are counted in steps, so that their sums are exact.
    grid = [
        counts
        for counts in itertools.product(range(n_steps + 1), repeat=n_runs)
        if sum(counts) == n_steps
    ]
    if not grid or len(grid) > MAX_TRIALS:
        raise ArgumentError(
            "runs",
            f"expected 1 to {MAX_TRIALS} combinations of weights, got {len(grid)} for "
            f"{n_runs} runs at a step of {step:g}. Fuse fewer runs, or use a larger step in "
            "Python (choose_weights).",
        )
    return [tuple(count / n_steps for count in counts) for counts in grid]


def _compute(metrics: list[Any], grades: _QrelsLike, run: _RunLike) -> list[Any]:
    """Compute measures with the package ir-measures.

    Args:
        metrics: measures of ir-measures. A repeated measure is computed once.
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
    except subprocess.CalledProcessError as error:
        # ERR and nDCG(dcg='exp-log2') are the only measures that run a program, gdeval.pl.
        raise ArgumentError(
            "measures",
            "gdeval.pl, TREC's program for ERR and nDCG(dcg='exp-log2'), failed with code "
            f"{error.returncode}; it accepts grades up to 4, and ids without white space. Leave "
            "out these measures, or use such grades and ids.",
        ) from error


def check_has_judged_query(name: str, run: _RunLike, qrels: _QrelsLike) -> None:
    """Raise ``ValueError`` if a run has queries, but none of them is in `qrels`.

    Args:
        name: the argument with the run, for the error.
        run: query id -> document id -> score.
        qrels: query id -> document id -> grade.
    """
    check_text_ids(name, run)
    if run and not any(query_id in qrels for query_id in run):
        raise ArgumentError(
            name,
            "expected results for a judged query, but none of its queries is judged: its first "
            f"query is {next(iter(run))!r}, and the first judged query is "
            f"{next(iter(qrels), None)!r}. Use judgements of the same queries.",
        )


def _checked_grades(query_id: str, grades: Mapping[str, int]) -> dict[str, int]:
    """Check the grades of a query, and return them as Python integers.

    Args:
        query_id: the id of the query, for errors.
        grades: document id -> grade, at least one.

    Raises:
        TypeError: if a grade is not an integer, or an id is not a string.
        ValueError: if the absolute value of a grade exceeds ``MAX_GRADE``.
    """
    check_mapping(f"qrels[{query_id!r}]", grades, "document id -> grade")
    check_text_ids("qrels", grades)
    try:
        integers = {document: operator.index(grade) for document, grade in grades.items()}
    except TypeError:
        invalid = next(grade for grade in grades.values() if not hasattr(grade, "__index__"))
        raise TypeError(
            f"qrels: expected integer grades for query {query_id!r}, got {invalid!r}. Round the "
            "grades.",
        ) from None
    largest = max(integers.values(), key=abs)
    if abs(largest) > MAX_GRADE:
        raise ArgumentError(
            "qrels",
            f"expected grades between -{MAX_GRADE:,} and {MAX_GRADE:,} for query {query_id!r}, "
            f"got {largest}. Map them to smaller grades.",
        )
    return integers


def check_measures(measures: Sequence[str]) -> int:
    """Check the names of measures, and return their deepest cut-off, 0 if there is none.

    Raises:
        ValueError: if a measure is unknown, or has wrong parameters.
    """
    return max(int(metric.params.get("cutoff", 0)) for metric in _parse_measures(measures))


def usual_names(measures: Sequence[str]) -> list[str]:
    """Return the names under which measures are reported, each name once.

    Args:
        measures: names of measures, in any case, such as ``ndcg@10`` or ``MRR@10``.

    Returns:
        The names that ir-measures knows, such as ``MRR@10``, as they are. Others have the spelling
        of ir-measures, such as ``nDCG@10``.

    Raises:
        ValueError: if a measure is unknown, or has wrong parameters.
    """
    ir_measures = _import_ir_measures()
    names = [
        name if _with_registered_case(ir_measures, name) == name else str(measure)
        for name, measure in zip(measures, _parse_measures(measures), strict=True)
    ]
    return list(dict.fromkeys(names))


def _import_ir_measures() -> ModuleType:
    return require("ir_measures", "ir-measures", "Evaluation")


def _parse_measures(measures: Sequence[str]) -> list[Any]:
    """Return the measures with these names as objects of ir-measures."""
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
        name: the name of the measure, in any case.

    Returns:
        The measure, an object of ir-measures.

    Raises:
        ValueError: if the measure is unknown, or a parameter is out of range.
    """
    try:
        measure = ir_measures.parse_measure(_with_registered_case(ir_measures, name))
        _check_parameters(measure.params)
        is_supported = ir_measures.DefaultPipeline.supports(measure)
    except (NameError, ValueError, SyntaxError, TypeError, AssertionError) as error:
        raise _measure_error(name, str(error)) from error
    if not is_supported:
        raise _measure_error(name, "no installed package computes it")
    return measure


def _with_registered_case(ir_measures: ModuleType, name: str) -> str:
    """Spell a measure as ir-measures registers it: ``nDCG@10`` for ``ndcg@10``.

    ir-measures distinguishes case, but names that differ in case only are aliases of one measure.

    Args:
        ir_measures: the module ``ir_measures``.
        name: the name of a measure, with its parameters and cut-off, which are left as they are.

    Returns:
        The name in the registered case; `name` itself if the measure is unknown.
    """
    word = re.split(r"\W", name, maxsplit=1)[0]
    registered_names = ir_measures.measures.registry
    if word in registered_names:
        return name
    for registered_name in registered_names:
        if registered_name.lower() == word.lower():
            return f"{registered_name}{name[len(word) :]}"
    return name


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a parameter of a measure is out of range.

    Args:
        parameters: name -> value. Parameters that are not set are in range.
    """
    cutoff = parameters.get("cutoff", 1)
    min_grade = parameters.get("rel", 1)
    recall = parameters.get("recall", 1)
    highest_grade = max([min_grade, *parameters.get("gains", {}).values()])
    if cutoff < 1 or min_grade < 1:
        raise ValueError("cut-offs and grades must be at least 1")
    if not 0 <= recall <= 1:
        raise ValueError("a recall must be in [0, 1]")
    if highest_grade > MAX_GRADE:
        raise ValueError(f"grades and gains must be at most {MAX_GRADE:,}")


def _measure_error(name: str, problem: str) -> ArgumentError:
    """Return the error about a measure that cannot be computed."""
    return ArgumentError(
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
        path: path of the file.
        tag: the name of the run, one word.
        overwrite: whether to replace an existing file.

    Raises:
        FileExistsError: if the file exists and `overwrite` is False.
        TypeError: if an id or the tag is not a string.
        ValueError: if an id or the tag is empty or has white space, or a score is not finite.

    Examples:
        >>> from tilefold.retrieval import read_trec_run
        >>> write_trec_run({"q1": {"cards": 2.0, "pin": 1.0}}, "words.trec")
        >>> read_trec_run("words.trec")
        {'q1': {'cards': 2.0, 'pin': 1.0}}
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
    """Raise an error if `value` is not one word, as a line of a TREC run requires."""
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

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("words.trec").write_text("q1 Q0 cards 1 2.0 bm25")
        >>> read_trec_run("words.trec")
        {'q1': {'cards': 2.0}}
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
                f"{location}: document {document_id!r} was already given for query {query_id!r}. "
                "Keep one line of the two.",
            )
        scores[document_id] = score
    return run


def _parse_run_line(fields: list[str], location: str) -> tuple[str, str, float]:
    """Parse the fields of a line of a TREC run.

    Args:
        fields: ``query Q0 document rank score tag``. Q0, the rank and the tag are not used.
        location: the file and the line, for errors.

    Returns:
        Query id, document id and score.

    Raises:
        DataError: if the number of fields is wrong, or the score is not a finite number.
    """
    remedy = "Fix that line, or remove it if it names columns."
    if len(fields) != _N_RUN_FIELDS:
        raise DataError(
            f"{location}: expected {_N_RUN_FIELDS} fields (query Q0 doc rank score tag), got "
            f"{len(fields)}. {remedy}",
        )
    query_id, _, document_id, _, score_text, _ = fields
    try:
        score = float(score_text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{location}: expected a finite score, got {score_text!r}. {remedy}")
    return query_id, document_id, score


def read_trec_provenance(path: str | Path) -> Provenance:
    """Return the provenance of a run, from the tag of its first line.

    The provenance of a run that another program wrote is empty.
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
    """Return the mean number of non-zero terms per vector; 0 if there is no vector.

    Examples:
        >>> from tilefold.retrieval import SparseVectors
        >>> rows = {"d1": {0: 1.0, 2: 0.5}, "d2": {1: 2.0}}
        >>> active_terms(SparseVectors.from_rows(rows, vocab_size=3))
        1.5
    """
    check_vectors("vectors", vectors)
    if not len(vectors):
        return 0.0
    return float(np.count_nonzero(vectors.data)) / len(vectors)


def flops(queries: SparseVectors, documents: SparseVectors) -> float:
    """Return the expected number of terms that a query and a document share (arXiv 2004.05665).

    This FLOPS measure is ``sum over terms v of P(query has v) * P(document has v)``: the expected
    number of multiplications of a score in an inverted index.

    Args:
        queries: sparse vectors of queries.
        documents: sparse vectors of documents.
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
