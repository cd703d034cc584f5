"""``tilefold fuse``: fuses the runs of several retrievers, with weights chosen on a split if asked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tilefold.cli import _common, _scores

if TYPE_CHECKING:
    from tilefold.cli._scores import NamedRun
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Normalization

METHODS = ("rrf", "interpolation")
NORMALIZATIONS = ("min_max", "z_score", "none")


def fuse(
    run: Annotated[
        list[Path], typer.Option(help="A TREC run file, such as evaluate --save-run writes; twice or more.")
    ],
    method: Annotated[
        str, typer.Option(help="rrf (reciprocal rank fusion), or interpolation (weighted sum of normalised scores).")
    ] = "rrf",
    weight: Annotated[
        list[float] | None, typer.Option(help="interpolation: one per run, in their order; by default equal ones.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(help="interpolation: choose the weights on this split of --data, by the first measure."),
    ] = None,
    in_sample: Annotated[
        bool, typer.Option("--in-sample", help="Report queries that --tune chose the weights on, too, and say so.")
    ] = False,
    normalization: Annotated[
        str | None, typer.Option(help="interpolation: min_max (default), z_score or none, per query.")
    ] = None,
    rrf_k: Annotated[int | None, typer.Option(help="rrf: the constant of 1 / (k + rank); by default 60.")] = None,
    k: Annotated[int, typer.Option(help="Documents to keep per query; as many as the measures need at least.")] = 100,
    data: Annotated[
        str | None, typer.Option(help="The collection of the runs, to measure the fusion: pydocs, or a BEIR folder.")
    ] = None,
    split: Annotated[list[str] | None, typer.Option(help=_scores.SPLIT_HELP)] = None,
    drop_unknown: Annotated[bool, typer.Option("--drop-unknown", help=_common.DROP_UNKNOWN_HELP)] = False,
    measure: Annotated[list[str] | None, typer.Option(help=_scores.MEASURE_HELP)] = None,
    save_run: Annotated[Path | None, typer.Option(help=_scores.SAVE_RUN_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Weights and measures as JSON on stdout.")] = False,
) -> None:
    """Fuse runs: measure the fusion with --data, write it with --save-run.

    To choose weights, make the runs with --split dev --split test, and give --method interpolation --tune dev.
    """
    _check(method, run, weight, normalization)
    _common.check_at_least_one(k=k, rrf_k=rrf_k)
    if data is None and save_run is None:
        raise _common.UsageError("give --data to measure the fusion, or --save-run to write it.")
    measures, deepest = _scores.check_measures(measure)
    _scores.say_depth(k if "k" in _common.given else None, deepest, save_run)
    _scores.check_writable(save_run, "--save-run")
    named = [_scores.read_run(path, "--run") for path in run]
    for first, other in itertools.combinations(named, 2):
        if "texts_sha256" in first.provenance.differs(other.provenance):
            raise _common.CommandError(f"{first.name} and {other.name} were made from different collections.")
    also = [] if tune is None else [tune]
    collection, splits = (None, []) if data is None else _scores.load_splits(data, split, drop_unknown, also)
    if collection is not None:
        _check_runs(named, collection, [*splits, *also])
    weights = weight
    tuned: dict[str, Any] = {}
    shared: dict[str, int] = {}
    if tune is not None and collection is not None:
        shared = _in_sample(collection, tune, splits, in_sample)
        tuned = {"tuned_on": tune, "in_sample": shared}
        weights = _tuned(named, collection, tune, measures[0], normalization, max(k, deepest))
    fused = _fused(method, named, weights, normalization, rrf_k, max(k, deepest))
    _scores.save(fused, fused.provenance, save_run)
    result: dict[str, Any] = {"method": method, "runs": [str(path) for path in run], "weights": weights} | tuned
    scores = {} if collection is None else _scores.score(fused, collection, splits, measures, deepest)
    if as_json:
        _common.print_json(result | ({} if collection is None else _scores.facts(collection, scores)))
        return
    if weights is not None:
        typer.echo("weights: " + ", ".join(f"{path} {value:g}" for path, value in zip(run, weights, strict=True)))
    if collection is not None:
        _scores.print_table(collection, scores)
        _say_in_sample(collection, shared)
    if save_run is not None:
        typer.echo(f"{len(fused.run)} queries: {save_run}")


def _check(method: str, run: list[Path], weight: list[float] | None, normalization: str | None) -> None:
    if len(run) < 2:
        raise _common.UsageError(f"--run: expected two runs or more, got {len(run)}.")
    if method not in METHODS:
        raise _common.UsageError(f"--method: expected one of {', '.join(METHODS)}, got {method!r}.")
    if weight is not None and len(weight) != len(run):
        raise _common.UsageError(f"--weight: expected one for each of {len(run)} runs, got {len(weight)}.")
    if normalization not in (None, *NORMALIZATIONS):
        raise _common.UsageError(
            f"--normalization: expected one of {', '.join(NORMALIZATIONS)}, got {normalization!r}."
        )


def _check_runs(named: list[NamedRun], collection: Collection, splits: list[str]) -> None:
    """Refuse runs of another collection, or without results for one of the splits."""
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


def _say_in_sample(collection: Collection, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        whole = len(collection.qrels[name])
        typer.echo(f"in sample: the weights were chosen on {count} of the {whole} queries of {name}")


def _tuned(
    named: list[NamedRun], collection: Collection, split: str, measure: str, normalization: str | None, k: int
) -> list[float]:
    from tilefold.retrieval.tuning import choose_weights

    runs = [each.run for each in named]
    try:
        weights, _ = choose_weights(
            runs, collection.qrels[split], measure=measure, normalization=_normalization(normalization), k=k
        )
    except ValueError as error:
        raise _common.UsageError(f"--tune: {error}") from error
    return list(weights)


def _normalization(name: str | None) -> Normalization:
    return cast("Normalization", name or NORMALIZATIONS[0])


def _fused(
    method: str,
    named: list[NamedRun],
    weights: list[float] | None,
    normalization: str | None,
    rrf_k: int | None,
    k: int,
) -> NamedRun:
    from tilefold.retrieval.fusion import interpolate, reciprocal_rank_fusion
    from tilefold.retrieval.provenance import Provenance

    runs = [each.run for each in named]
    if method == "rrf":
        whole = reciprocal_rank_fusion(runs, rrf_k or 60)
        run = {query: dict(list(scores.items())[:k]) for query, scores in whole.items()}
    else:
        run = interpolate(runs, weights, _normalization(normalization), k=k)
    made_of = Provenance(texts_sha256=Provenance.shared(each.provenance for each in named).texts_sha256)
    return _scores.NamedRun("the fusion", run, made_of)
