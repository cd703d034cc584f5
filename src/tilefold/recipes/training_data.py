"""The data of a training: pairs, mined negatives, teacher scores, and the order of batches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilefold.recipes._training import Examples, pair_examples, training_pairs

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

__all__ = ["length_grouped_batches", "make_examples"]

MAX_TEXTS = 1 << 20  # of the documents in a dataset that holds several draws of negatives
LsrRecipe = Any  # of the module that imports this one
POOL = 8  # batches whose texts are sorted by length together


class _Judged(NamedTuple):
    """The rows of one training query: negatives by rank, and what the teachers say of every document."""

    negatives: list[str]
    target: dict[str, float]


def make_examples(recipe: LsrRecipe, collection: Collection, file: str | Path | None) -> Examples:
    """The columns ``query``, ``positive``, ``negative_1`` to ``negative_n``, and ``label``: the teachers' scores.

    A query's negatives are drawn anew for each pass over the pairs, as far as memory allows, without repetition within
    a row where the file has enough of them.
    """
    if not recipe.negatives:
        if file is not None:
            raise ValueError(
                f"negatives: the recipe {recipe.name!r} takes none from a file (its negatives are 0); leave the file "
                "out, or set negatives to at least 1."
            )
        return pair_examples(collection, "positive")
    pairs_in_all = len(training_pairs(collection))
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
    left_out = pairs_in_all - len(pairs)
    note = f"{left_out} of {pairs_in_all} training pairs were left out: {file} has no {what} for them."
    return Examples(_draw(recipe, collection, pairs, judged), len(pairs), note if left_out else "")


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
        marked = zip(group.documents, group.relevant.tolist(), strict=True)
        pool = [name for name, is_relevant in marked if not is_relevant and name not in relevant]
        target = () if group.target is None else zip(group.documents, group.target.tolist(), strict=True)
        if pool:
            found[group.query] = _Judged(pool, dict(target))
    return found


def _draw(
    recipe: LsrRecipe, collection: Collection, pairs: list[tuple[str, str]], judged: dict[str, _Judged]
) -> dict[str, list[Any]]:
    """Rows of every pair, with new negatives in each pass."""
    chance = random.Random(recipe.seed)  # noqa: S311 - a reproducible draw, no secret
    count, steps = recipe.negatives, recipe.max_steps
    passes = recipe.epochs if steps is None else steps * recipe.batch_size / len(pairs)
    draws = max(1, min(math.ceil(passes), MAX_TEXTS // (len(pairs) * (1 + count))))
    names = ["query", "positive", *(f"negative_{place}" for place in range(1, count + 1))]
    rows: list[list[str]] = []
    labels: list[list[float]] = []
    for query, document in pairs * draws:
        drawn = [document, *_some(judged[query].negatives, count, chance)]
        rows.append([collection.queries[query], *(collection.documents[name].contents for name in drawn)])
        if recipe.needs_scores:
            labels.append([judged[query].target[name] for name in drawn])
    columns: dict[str, list[Any]] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return columns | ({"label": labels} if recipe.needs_scores else {})


def _some(pool: list[str], count: int, chance: random.Random) -> list[str]:
    if len(pool) >= count:
        return chance.sample(pool, count)
    return pool + chance.choices(pool, k=count - len(pool))


def length_grouped_batches(dataset: Any, batch_size: int, **settings: Any) -> Any:
    """A sampler for sentence-transformers: batches without duplicates, of documents of similar length."""
    from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler

    lengths = [len(text) for text in dataset["document" if "document" in dataset.column_names else "positive"]]
    # pools without a text twice: sorted by the length of documents, cut into batches, and these are shuffled
    pools = NoDuplicatesBatchSampler(dataset, batch_size=POOL * batch_size, **settings)

    class LengthGrouped(DefaultBatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            pools.set_epoch(self.epoch)
            shuffle = random.Random(self.seed + self.epoch).shuffle  # noqa: S311 - a reproducible order, no secret
            for pool in pools:
                ordered = sorted(pool, key=lambda row: lengths[row])
                batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
                shuffle(batches)
                yield from batches

        def __len__(self) -> int:
            return math.ceil(len(lengths) / batch_size)

    return LengthGrouped(dataset, batch_size=batch_size, **settings)
