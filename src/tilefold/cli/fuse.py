"""``tilefold fuse``: fuses the runs of several retrievers, with weights chosen on a split if asked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tilefold.cli import _common, _scores
from tilefold.cli._common import Count, Place, Text, option

if TYPE_CHECKING:
    from tilefold.cli._scores import NamedRun
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Normalization

METHODS = ("rrf", "interpolation")
NORMALIZATIONS = ("min_max", "z_score", "none")


def fuse(
    run: Annotated[list[Path], option("A TREC run file, such as evaluate --save-run writes; twice or more.")],
    method: Annotated[
        str, option("rrf (reciprocal rank fusion), or interpolation (weighted sum of normalised scores).")
    ] = "rrf",
    weight: Annotated[
        list[float] | None, option("interpolation: one per run, in their order; by default equal ones.")
    ] = None,
    tune: Annotated[
        Text, option("interpolation: choose the weights on this split of --data, by the first measure.")
    ] = None,
    in_sample: Annotated[
        bool, option("Report queries that --tune chose the weights on, too, and say so.", "--in-sample")
    ] = False,
    normalization: Annotated[Text, option("interpolation: min_max (default), z_score or none, per query.")] = None,
    rrf_k: Annotated[Count, option("rrf: the constant of 1 / (k + rank); by default 60.")] = None,
    k: Annotated[int, option("Documents to keep per query; as many as the measures need at least.")] = 100,
    data: Annotated[
        Text, option("The collection of the runs, to measure the fusion: pydocs, or a BEIR folder.")
    ] = None,
    split: Annotated[list[str] | None, option(_scores.SPLIT_HELP)] = None,
    drop_unknown: Annotated[bool, option(_common.DROP_UNKNOWN_HELP, "--drop-unknown")] = False,
    measure: Annotated[list[str] | None, option(_scores.MEASURE_HELP)] = None,
    save_run: Annotated[Place, option(_scores.SAVE_RUN_HELP)] = None,
    as_json: Annotated[bool, option("Weights and measures as JSON on stdout.", "--json")] = False,
) -> None:
    """Fuse runs: measure the fusion with --data, write it with --save-run.

    To choose weights, make the runs with --split dev --split test, and give --method interpolation --tune dev.
    """
    _check(run, method, weight, normalization)
    _common.check_at_least_one(k=k, rrf_k=rrf_k)
    if data is None and save_run is None:
        raise _common.UsageError("give --data to measure the fusion, or --save-run to write it.")
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k if "k" in _common.given else None, deepest, save_run)
    _scores.check_writable(save_run, "--save-run")
    named = [_scores.read_run(path, "--run") for path in run]
    also = [] if tune is None else [tune]
    collection, splits = (None, []) if data is None else _scores.load_splits(data, split, drop_unknown, also)
    _check_runs(named, collection, [*splits, *also])

    from tilefold.retrieval.fusion import interpolate, reciprocal_rank_fusion
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.tuning import choose_weights

    weights, runs, depth = weight, [each.run for each in named], max(k, deepest)
    chosen = cast("Normalization", normalization or NORMALIZATIONS[0])
    result: dict[str, Any] = {"method": method, "runs": [str(path) for path in run], "weights": weights}
    shared: dict[str, int] = {}
    if tune is not None and collection is not None:
        shared = _in_sample(collection, tune, splits, in_sample)
        result |= {"tuned_on": tune, "in_sample": shared}
        judged = collection.qrels[tune]
        try:
            weights = list(choose_weights(runs, judged, measure=measures[0], normalization=chosen, k=depth)[0])
        except ValueError as error:
            raise _common.UsageError(f"--tune: {error}") from error
    if method == "rrf":
        whole = reciprocal_rank_fusion(runs, rrf_k or 60)
        found = {query: dict(list(scores.items())[:depth]) for query, scores in whole.items()}
    else:
        found = interpolate(runs, weights, chosen, k=depth)
    made_of = Provenance(texts_sha256=Provenance.shared(each.provenance for each in named).texts_sha256)
    fused = _scores.NamedRun("the fusion", found, made_of)
    _scores.save(fused, made_of, save_run)
    result["weights"] = weights
    scores = {} if collection is None else _scores.score(fused, collection, splits, measures, deepest)
    if as_json:
        _common.print_json(result | ({} if collection is None else _scores.facts(collection, scores)))
        return
    if weights is not None:
        typer.echo("weights: " + ", ".join(f"{path} {value:g}" for path, value in zip(run, weights, strict=True)))
    if collection is not None:
        _scores.print_table(collection, scores)
        for name, count in shared.items():
            of = f"{count} of the {len(collection.qrels[name])} queries of {name}"
            typer.echo(f"in sample: the weights were chosen on {of}")
    if save_run is not None:
        typer.echo(f"{len(fused.run)} queries: {save_run}")


def _check(run: list[Path], method: str, weight: list[float] | None, normalization: str | None) -> None:
    if len(run) < 2:
        raise _common.UsageError(f"--run: expected two runs or more, got {len(run)}.")
    _common.check_choice("--method", method, METHODS)
    if weight is not None and len(weight) != len(run):
        raise _common.UsageError(f"--weight: expected one for each of {len(run)} runs, got {len(weight)}.")
    _common.check_choice("--normalization", normalization, NORMALIZATIONS)


def _check_runs(named: list[NamedRun], collection: Collection | None, splits: list[str]) -> None:
    """Refuse runs of different collections or of another one, or without results for one of the splits."""
    for first, other in itertools.combinations(named, 2):
        if "texts_sha256" in first.provenance.differs(other.provenance):
            raise _common.CommandError(f"{first.name} and {other.name} were made from different collections.")
    if collection is None:
        return
    texts = _scores.texts_of(collection)
    for split in splits:
        _common.check_split(collection, split)
    for each in named:
        _scores.check_texts(each.name, each.provenance, collection, texts)
        _scores.check_answers(each, collection, splits)


def _in_sample(collection: Collection, tune: str, splits: list[str], asked: bool) -> dict[str, int]:
    """Split -> how many of its queries the weights are chosen on, of those that have any; refused unless asked for."""
    counts = {name: len(collection.qrels[name].keys() & collection.qrels[tune].keys()) for name in splits}
    shared = {name: count for name, count in counts.items() if count}
    if shared and not asked:
        name, count = next(iter(shared.items()))
        raise _common.UsageError(
            f"--tune: the weights would be chosen on {count} of the {len(collection.qrels[name])} queries of {name}, "
            "whose numbers are reported (--split): better than on new queries. Tune on a split of other queries, "
            "or give --in-sample."
        )
    return shared
