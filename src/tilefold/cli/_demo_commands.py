"""The commands that repeat the rows of ``tilefold demo``, one by one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tilefold.cli import _demo_steps
from tilefold.cli._demo_data import DEV, TEST
from tilefold.cli._demo_plan import Plan, Size

BY_HAND = Path("by-hand")


def commands(folder: Path, plan: Plan, seed: int, late_weight: float) -> list[str]:
    """Shell lines, the first of which changes into the demo's `folder`.

    Args:
        folder: of the demo; its collection is in ``data``.
        plan: what the demo did.
        seed: of its training.
        late_weight: of MaxSim in the row of late interaction.
    """
    bm25, model, vectors, index, late, tokens = (
        str(BY_HAND / name) for name in ("bm25", "model", "vectors", "index", "late", "tokens")
    )
    runs = {name: str(BY_HAND / f"{name}.trec") for name in ("bm25", "dense", "splade")}
    data = ["--data", "data"]
    both = [*data, "--split", TEST, "--split", DEV]
    searched = ["--index", index, "--model", model, "--query-top-k", str(_demo_steps.QUERY_TERMS)]
    size = plan.size
    fused = [part for run in runs.values() for part in ("--run", run)]
    reranked = ["--rerank", tokens, "--rerank-depth", str(_demo_steps.RERANKED), "--rerank-weight", f"{late_weight:g}"]
    steps: list[Sequence[str]] = [
        ["index", "--backend", "bm25", *data, "--identifiers", "--output", bm25],
        ["evaluate", *both, "--index", bm25, "--save-run", runs["bm25"]],
        ["evaluate", *both, "--model", "minilm", "--max-length", str(size.dense_length), "--save-run", runs["dense"]],
        ["train", *data, *_training(size, plan.steps, seed), "--output", model],
        ["encode", *data, "--model", model, "--top-k", str(_demo_steps.DOCUMENT_TERMS), "--output", vectors],
        ["index", "--vectors", vectors, "--output", index],
        ["evaluate", *both, *searched, "--save-run", runs["splade"]],
        ["fuse", *data, *fused, "--method", "interpolation", "--tune", DEV],
        ["train", *data, *_token_states(size), "--output", late],
        ["encode", *data, "--model", late, "--storage", "int8", "--output", tokens],
        ["evaluate", *data, *searched, *reranked],
    ]
    return [shlex.join(["cd", str(folder)]), *(shlex.join(["tilefold", *step]) for step in steps)]


def _training(size: Size, steps: int, seed: int) -> list[str]:
    """The options of ``train`` that give the recipe of the demo."""
    recipe = _demo_steps.make_recipe(size, steps, seed)
    options = {
        "--model": recipe.base_model,
        "--steps": steps,
        "--batch-size": recipe.batch_size,
        "--lr": f"{recipe.learning_rate:g}",
        "--max-length": recipe.max_length,
        "--train-max-length": recipe.train_max_length,
        "--seed": seed,
    }
    named = [str(part) for option in options.items() for part in option]
    return [*named, *(["--group-by-length"] if recipe.group_by_length else [])]


def _token_states(size: Size) -> list[str]:
    """The options of ``train`` that save MiniLM's own token states as a late-interaction model."""
    length = str(size.dense_length)
    untrained = ["--recipe", "colbert", "--model", "minilm", "--steps", "0", "--dimension", "0", "--keep-punctuation"]
    return [*untrained, "--max-length", length, "--query-length", length]
