"""``--prf``: pseudo relevance feedback, for search and evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _scores

if TYPE_CHECKING:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.feedback import Feedback, Interpolation
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.provenance import Provenance

METHOD = Annotated[
    str | None,
    typer.Option("--prf", help="Search again with each query moved towards what it found: average, or rocchio."),
]
DEPTH = Annotated[int | None, typer.Option(help="Best documents taken as relevant; by default 3, and 5 for rocchio.")]
TERMS = Annotated[int | None, typer.Option(help="Sparse: heaviest terms kept of a query after --prf.")]
ALPHA = Annotated[float | None, typer.Option(help="rocchio: weight of the query (0.4).")]
BETA = Annotated[float | None, typer.Option(help="rocchio: weight of the best documents (0.6).")]
GAMMA = Annotated[float | None, typer.Option(help="rocchio: weight of the last documents, subtracted (0).")]
BOTTOM = Annotated[int | None, typer.Option(help="rocchio: how many last documents, of 1,000, --prf-gamma is for.")]
WITH = Annotated[Path | None, typer.Option(help="A second ranking to interpolate with: a BM25 index, or a TREC run.")]
PLACE = Annotated[str | None, typer.Option(help="Interpolate before feedback, after it, or both (default).")]
WEIGHT = Annotated[float | None, typer.Option(help="Weight of --prf-with in [0, 1], beside the other one (0.5).")]
NORMALIZATION = Annotated[str | None, typer.Option(help="Before interpolation: min_max (default), z_score or none.")]


def request(asked: Mapping[str, Any]) -> tuple[Feedback | None, Interpolation | None]:
    """Feedback and interpolation, None without --prf."""
    from tilefold.retrieval.feedback import METHODS, Feedback, Interpolation

    method = asked["prf"]
    if method is None:
        return None, None
    if method not in METHODS:
        raise _common.UsageError(f"--prf: expected one of {', '.join(METHODS)}, got {method!r}.")
    if (asked["prf_gamma"] is None) != (asked["prf_bottom"] is None):
        raise _common.UsageError("--prf-gamma and --prf-bottom go together: a weight, and how many documents.")
    own = {name: asked[f"prf_{name}"] for name in ("depth", "alpha", "beta", "gamma", "bottom")}
    mixed = {name: asked[f"prf_{name}"] for name in ("place", "weight", "normalization")}
    own["top_terms"] = asked["prf_terms"]
    options = {name: f"--prf-{name}" for name in (*own, *mixed)}
    with _common.as_options(**(options | {"top_terms": "--prf-terms"})):
        mix = None if asked["prf_with"] is None else Interpolation(**_common.known(mixed))
        return Feedback(method, **_common.known(own)), mix


def second(asked: Mapping[str, Any], queries: Mapping[str, str], made_of: Provenance) -> BM25Index | Run | None:
    """The BM25 index, or the run of `queries` over texts `made_of`, that --prf-with names."""
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.retrievers import open_index

    path = asked["prf_with"]
    if path is None:
        return None
    if path.is_dir():
        index = open_index(path)
        if isinstance(index, BM25Index):
            return index
        raise _common.UsageError(
            f"--prf-with: {path} is an index of vectors; give a BM25 index, or save its run and give that: "
            "tilefold evaluate --save-run."
        )
    named = _scores.read_run(path, "--prf-with")
    if "texts_sha256" in made_of.differs(named.provenance):
        raise _common.CommandError(f"--prf-with: {path} was made from other documents than those that are searched.")
    found = {query: named.run[query] for query in queries if query in named.run}
    if not found:
        raise _common.CommandError(f"{named.name}: no result for any of the {len(queries)} queries.")
    if len(found) < len(queries):
        _common.note(f"{named.name}: results for {len(found)} of the {len(queries)} queries")
    return found
