"""The data of a training: the pairs of a collection's ``"train"`` split, mined negatives, and teacher scores."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.recipes._training import Examples, training_pairs

if TYPE_CHECKING:
    from tilefold.recipes._sparse_recipes import LsrRecipe
    from tilefold.retrieval.collection import Collection

__all__ = ["make_examples"]

MAX_TEXTS = 1 << 20  # of the documents in a dataset that holds several draws of negatives


@dataclass(frozen=True)
class _Judged:
    """The rows of one training query: negatives by rank, and what the teachers say of every document."""

    negatives: list[str]
    target: dict[str, float]


def make_examples(recipe: LsrRecipe, collection: Collection, file: str | Path | None) -> Examples:
    """The columns that the losses of sentence-transformers read.

    ``query``, ``positive``, ``negative_1`` to ``negative_n``, and ``label``: the teachers' scores of the positive and
    the negatives. A query's negatives are drawn anew for each pass over the pairs, as far as memory allows, without
    repetition within a row where the file has enough of them.

    Raises:
        ValueError: no pairs, or no file where the recipe needs one; the message has the command that makes it.
        DataError: a file of another collection, or without rows of the training queries.
    """
    texts = training_pairs(collection)
    if not recipe.negatives:
        if file is not None:
            raise ValueError(
                f"negatives: the recipe {recipe.name!r} takes none from a file (its negatives are 0); leave the file "
                "out, or set negatives to at least 1."
            )
        queries, documents = zip(*texts, strict=True)
        return Examples({"query": list(queries), "positive": list(documents)}, len(texts))
    if file is None:
        raise ValueError(_how_to_make(recipe, collection))
    judged = _read(recipe, collection, Path(file))
    pairs = [
        (query, document)
        for query, document in collection.pairs("train")
        if query in judged and (not recipe.needs_scores or document in judged[query].target)
    ]
    what = "negatives and scored relevant documents" if recipe.needs_scores else "negatives"
    if not pairs:
        raise ValueError(
            f"negatives: {file} has no {what} of the training queries of {collection.name!r}; "
            f"{_how_to_make(recipe, collection)}"
        )
    left_out = len(texts) - len(pairs)
    note = (
        f"{left_out} of {len(texts)} training pairs were left out: {file} has no {what} for them." if left_out else ""
    )
    return Examples(_draw(recipe, collection, pairs, judged), len(pairs), note)


def _how_to_make(recipe: LsrRecipe, collection: Collection) -> str:
    mine = f"tilefold mine --data {collection.name} --index INDEX --output negatives.parquet"
    score = f"tilefold score negatives.parquet --data {collection.name} --teacher MODEL --output scores.parquet"
    what, made, commands = "mined negatives", "negatives.parquet", mine
    if recipe.needs_scores:
        what, made, commands = "mined negatives with teachers' scores", "scores.parquet", f"{mine}, then {score}"
    return (
        f"the recipe {recipe.name!r} needs {what}: make them with {commands}, and give it the file: "
        f"--negatives {made}, in Python negatives={made}"
    )


def _read(recipe: LsrRecipe, collection: Collection, file: Path) -> dict[str, _Judged]:
    """Query id -> its rows, for the training queries with negatives."""
    from tilefold.retrieval.training_rows import read_training_rows

    rows = read_training_rows(file)
    rows.check_collection(collection)
    if recipe.needs_scores and not rows.scored:
        raise ValueError(f"negatives: {file} has no teachers' scores; {_how_to_make(recipe, collection)}")
    judged = collection.qrels["train"]
    found = {}
    for group in rows.groups():
        if group.query not in judged:
            continue
        relevant = {name for name, grade in judged[group.query].items() if grade > 0}
        pool = [
            name
            for name, marked in zip(group.documents, group.relevant.tolist(), strict=True)
            if not marked and name not in relevant
        ]
        target = () if group.target is None else zip(group.documents, group.target.tolist(), strict=True)
        if pool:
            found[group.query] = _Judged(pool, dict(target))
    return found


def _draw(
    recipe: LsrRecipe, collection: Collection, pairs: Sequence[tuple[str, str]], judged: dict[str, _Judged]
) -> dict[str, list[Any]]:
    """Rows of every pair, with new negatives in each pass."""
    chance = random.Random(recipe.seed)  # noqa: S311 - a reproducible draw, no secret
    count = recipe.negatives
    columns: dict[str, list[Any]] = {
        name: [] for name in ("query", "positive", *(f"negative_{i + 1}" for i in range(count)))
    }
    labels: list[list[float]] = []
    for _ in range(_draws(recipe, len(pairs))):
        for query, document in pairs:
            rows = judged[query]
            drawn = _some(rows.negatives, count, chance)
            names = [document, *drawn]
            for column, text in zip(
                columns.values(),
                (collection.queries[query], *(collection.documents[name].contents for name in names)),
                strict=True,
            ):
                column.append(text)
            if recipe.needs_scores:
                labels.append([rows.target[name] for name in names])
    return columns | ({"label": labels} if recipe.needs_scores else {})


def _draws(recipe: LsrRecipe, pairs: int) -> int:
    """Passes over the pairs that get negatives of their own."""
    passes = recipe.epochs
    if recipe.max_steps is not None:
        passes = recipe.max_steps * recipe.batch_size / pairs
    return max(1, min(math.ceil(passes), MAX_TEXTS // (pairs * (1 + recipe.negatives))))


def _some(pool: list[str], count: int, chance: random.Random) -> list[str]:
    if len(pool) >= count:
        return chance.sample(pool, count)
    return pool + chance.choices(pool, k=count - len(pool))
