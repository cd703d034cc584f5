"""Rules of options that go together: a table for each command, checked before it does any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilefold.cli._common import refuse

# A row has the options that are refused (parameters of the command), where they are, and what is said behind them.
# Where: NAME is given, !NAME is not, NAME=VALUE or NAME!=VALUE; of several all must hold, and of a|b one.
_Rules = tuple[tuple[str, str, str], ...]
_INDEX = "query_top_k query_cut heap_factor other_model"
_MIX = "prf_place prf_weight prf_normalization"
_ROCCHIO = "prf_alpha prf_beta prf_gamma prf_bottom"
_RERANK: _Rules = (
    ("rerank_model rerank_depth rerank_tail rerank_weight", "!rerank", "goes together with --rerank"),
    ("rerank_tail", "rerank_weight", "goes without --rerank-weight, under which every candidate keeps its share"),
)
_PRF: _Rules = (
    (f"prf_depth prf_terms {_ROCCHIO} prf_with {_MIX}", "!prf", "goes together with --prf"),
    (_ROCCHIO, "prf=average", "goes with --prf rocchio"),
    (_MIX, "!prf_with", "goes together with --prf-with"),
)
_TRAINING = (
    "epochs negatives batch_size learning_rate regularizer group_by_length train_max_length anneal_alpha bf16 fused "
    "graphs save_steps save_minutes"
)
_NEW, _CHANGES = "url collection weights overwrite", "with --update and --delete, which change an index of vectors"
OF_BACKEND = {
    "bm25": "language k1 b identifiers",
    "seismic": "n_postings centroid_fraction min_cluster_size summary_energy doc_cut query_cut heap_factor num_threads",
    "qdrant": f"{_NEW} update delete",
}
_USELESS = "does nothing {}: leave it out"

RULES: dict[str, _Rules] = {
    "search": (
        ("queries", "query", "goes without a query"),
        ("model data vectors", "!index", "goes with --index"),
        ("demo", "index", _USELESS.format("with --index")),
        *_RERANK[:1],
        *_PRF,
    ),
    "evaluate": (
        (_INDEX, "!index", "goes with --index"),
        ("max_length", "index|run", "goes with a dense --model, without --index"),
        ("k", "run", "goes with --index or a dense --model; for --rerank there is --rerank-depth"),
        ("vectors", "!prf", "goes together with --prf"),
        ("prf", "run", "goes with --index or a dense --model: a run has no vectors"),
        *_RERANK,
        *_PRF,
    ),
    "fuse": (
        ("weight tune normalization", "method=rrf", "goes with --method interpolation"),
        ("rrf_k", "method=interpolation", "goes with --method rrf"),
        ("tune", "weight", "chooses the weights, and goes without --weight"),
        ("in_sample", "!tune", "goes with --tune"),
        ("split drop_unknown measure tune", "!data", "goes with --data"),
    ),
    "mine": (
        (_INDEX, "!index !vectors", "goes with --index or --vectors"),
        ("max_length", "run|index|vectors", "goes with a dense --model alone"),
    ),
    "score": (("scale", "like", "goes without --like, which sets mean and deviation"),),
    "serve": (
        (f"data vectors bm25 name {_INDEX}", "!index", "goes with --index"),
        ("default_side max_batch_tokens auto_truncate", "index !model !tokens",
         _USELESS.format("for an index of words alone, without a model")),
        ("tokens_model", "!tokens", "goes with --tokens"),
    ),
    "train": (
        (_TRAINING, "steps=0", _USELESS.format("with --steps 0, which trains nothing")),
        ("epochs", "steps", _USELESS.format("with --steps, which says how many")),
    ),
    "export": (
        ("field_type dots", "to!=opensearch", "goes with --to opensearch"),
        ("document namespace", "to!=vespa", "goes with --to vespa"),
    ),
    "index": (
        *((options, f"backend!={name}", f"goes with --backend {name}") for name, options in OF_BACKEND.items()),
        (_NEW, "update|delete", "is for a new index; {output} says where this one is"),
        ("collection overwrite", "!url", "goes with --url, the address of a server"),
        ("data", "update|delete", _USELESS.format(_CHANGES)),
        ("vectors", "delete !update", "goes with --update, to put them into the index"),
        ("data", "backend!=bm25", "goes with --backend bm25; {backend} reads --vectors"),
        ("vectors", "backend=bm25", "goes with the backends exact, seismic and qdrant; bm25 reads --data"),
    ),
}  # fmt: skip


def check(command: str | None, values: Mapping[str, Any]) -> None:
    """Refuse options that the table has for a command, with these values of its parameters."""
    for options, where, why in RULES.get(command or "", ()):
        if all(any(_holds(each, values) for each in part.split("|")) for part in where.split()):
            refuse(options.split(), why.format_map(values))


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    name, equals, value = condition.lstrip("!").partition("=")
    if equals:
        return (str(values[name.removesuffix("!")]) == value) is not name.endswith("!")
    return (values[name] not in (None, ()) and values[name] is not False) is not condition.startswith("!")
