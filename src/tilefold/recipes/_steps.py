"""Steps and pairs of a training: how many were announced, and how many were done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilefold._internal.arguments import ArgumentError
from tilefold.recipes._rows import Column, Examples
from tilefold.recipes._settings import TrainingSettings

FEW_STEPS = 20  # below which a training hardly changes a model


@dataclass(frozen=True)
class PairCounts:
    """The pairs that steps trained with, on all ranks together.

    Attributes:
        steps: number of steps.
        total: pairs of all steps.
        fewest: pairs of the smallest step, 0 without a step.
        most: pairs of the largest step, 0 without a step.
        single: number of steps of a single pair.
    """

    steps: int = 0
    total: int = 0
    fewest: int = 0
    most: int = 0
    single: int = 0

    def add_step(self, pairs: int) -> PairCounts:
        """Return the counts with one more step of a number of pairs."""
        return PairCounts(
            steps=self.steps + 1,
            total=self.total + pairs,
            fewest=min(self.fewest or pairs, pairs),
            most=max(self.most, pairs),
            single=self.single + (pairs == 1),
        )

    @classmethod
    def from_json(cls, values: object) -> PairCounts:
        """Create counts from the JSON of ``dataclasses.asdict``; no steps for a missing record."""
        return cls(**values) if isinstance(values, dict) else cls()


def total_steps(recipe: TrainingSettings, n_pairs: int) -> int:
    """Return the optimiser steps of a recipe for a number of pairs."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    return max(1, math.ceil(recipe.epochs * math.ceil(n_pairs / recipe.batch_size)))


def announced_pairs(steps: int, n_rows: int, batch_size: int) -> int:
    """Return the number of pairs that a number of steps trains with.

    A pair counts once for each epoch that it is trained in. Only the last batch of an epoch is
    assumed to be short.

    Args:
        steps: number of steps.
        n_rows: number of rows of an epoch.
        batch_size: rows of a full batch.
    """
    epochs, steps_of_last_epoch = divmod(steps, math.ceil(n_rows / batch_size))
    return epochs * n_rows + min(n_rows, steps_of_last_epoch * batch_size)


class TextCounts:
    """Counts of equal texts in the rows of a training, by column.

    They bound how many batches without equal texts can be made.

    Args:
        examples: the rows.
    """

    def __init__(self, examples: Examples) -> None:
        self._columns: dict[str, Any] = {}
        for name, column in examples.columns.items():
            if isinstance(column, Column):
                keys = column.texts.text_keys[column.positions]
                _, counts = np.unique(keys, return_counts=True)
                self._columns[name] = counts
        self._n_rows = len(next(iter(examples.columns.values()), ()))

    def fewest_distinct(self) -> tuple[str, int]:
        """Return the column with the fewest distinct texts, and their number.

        No batch of distinct texts has more rows than this number.
        """
        sizes = {name: len(counts) for name, counts in self._columns.items()}
        name = min(sizes, key=lambda column: sizes[column])
        return name, sizes[name]

    def most_full_batches(self, batch_size: int) -> int:
        """Return an upper bound on the full batches of one epoch."""
        return min(
            _most_batches(counts, self._n_rows, batch_size) for counts in self._columns.values()
        )

    def most_distinct_rows(self, batches: int) -> int:
        """Return an upper bound on the number of different rows in a number of batches."""
        return min(int(np.minimum(counts, batches).sum()) for counts in self._columns.values())


def _most_batches(counts: Any, n_rows: int, batch_size: int) -> int:
    """Return how many full batches can be made such that no text occurs twice in a batch.

    A text fills at most one row of a batch, and so at most ``min(count, k)`` rows of k batches.
    Together the texts must fill ``k * batch_size`` rows. The largest such k is found by bisection.

    Args:
        counts: number of rows ``[n_texts]`` in which each distinct text of a column occurs.
        n_rows: number of rows.
        batch_size: rows of a batch.
    """
    possible = 0  # a number of batches that can be made
    upper_bound = n_rows // batch_size
    while possible < upper_bound:
        candidate = (possible + upper_bound + 1) // 2
        n_fillable_rows = np.minimum(counts, candidate).sum()
        if n_fillable_rows >= candidate * batch_size:
            possible = candidate
        else:
            upper_bound = candidate - 1
    return possible


def check_batches(
    recipe: TrainingSettings,
    examples: Examples,
    *,
    ranks: int,
    distinct_texts: bool,
) -> str:
    """Check before a training that its batches can be made.

    Args:
        recipe: the settings.
        examples: the rows.
        ranks: number of processes that share each batch.
        distinct_texts: whether no text may occur twice in a batch.

    Returns:
        A warning about batches that cannot be full; empty if there is none.

    Raises:
        ValueError: for batches that the ranks cannot share evenly, or that must be full and cannot
            be.
    """
    batch_size = recipe.batch_size
    if batch_size % ranks:
        divisible = ranks * max(1, batch_size // ranks)
        raise ArgumentError(
            "batch_size",
            f"must be a multiple of the {ranks} ranks, got {batch_size}; take {divisible}, or "
            "another number of ranks.",
        )
    n_rows = len(next(iter(examples.columns.values()), ()))
    if not n_rows:
        return ""
    needs_full_batches = ranks > 1 or recipe.fill_batches
    reason = "several ranks" if ranks > 1 else "fill_batches"
    if needs_full_batches and n_rows < batch_size:
        raise ArgumentError(
            "batch_size",
            f"must be at most the {n_rows} rows of the data, because {reason} need "
            f"full batches, got {batch_size}.",
        )
    if not distinct_texts:
        return ""
    counts = TextCounts(examples)
    column, n_distinct = counts.fewest_distinct()
    texts = "queries" if column == "query" else "documents"
    if n_distinct < batch_size:
        if needs_full_batches:
            raise ArgumentError(
                "batch_size",
                f"must be at most the {n_distinct} different {texts} of the training pairs, "
                f"because {reason} need full batches in which none occurs twice, got {batch_size}.",
            )
        return (
            f"no batch can be full: the training pairs have {n_distinct:,} different {texts}, "
            f"fewer than batch_size ({batch_size:,}), and none occurs twice in a batch. Set "
            f"batch_size to at most {n_distinct:,}."
        )
    return _short_batches_warning(counts, n_rows, batch_size, fills_batches=needs_full_batches)


def _short_batches_warning(
    counts: TextCounts,
    n_rows: int,
    batch_size: int,
    *,
    fills_batches: bool,
) -> str:
    """Return a warning if some texts are too frequent for all batches to be full.

    A text occurs at most once in a batch.

    Args:
        counts: how often each text occurs in the rows.
        n_rows: number of rows of an epoch.
        batch_size: rows of a full batch.
        fills_batches: whether short batches are filled with rows that the epoch has already had.

    Returns:
        The warning; empty if all batches but the last one can be full.
    """
    n_full_batches = n_rows // batch_size
    n_possible = counts.most_full_batches(batch_size)
    if n_possible >= n_full_batches:
        return ""
    if fills_batches:
        n_batches = math.ceil(n_rows / batch_size)
        n_distinct_rows = counts.most_distinct_rows(n_batches)
        return (
            f"an epoch of {n_batches:,} full batches has at most {n_distinct_rows:,} of the "
            f"{n_rows:,} pairs, and others more than once: some queries or documents occur in very "
            "many pairs, and in a batch only once."
        )
    return (
        f"at most {n_possible:,} of {n_full_batches:,} batches can be full: some queries or "
        "documents occur in very many pairs, and in a batch only once. Set fill_batches to fill "
        "the others with pairs that an epoch has already had."
    )


def step_warnings(
    counts: PairCounts,
    *,
    announced: int,
    n_pairs: int,
    batch_size: int,
    negatives_among: Callable[[int], int],
) -> tuple[str, ...]:
    """Return warnings about a finished training with few steps, short batches or no negatives.

    Args:
        counts: number of steps, and of the pairs that they trained with.
        announced: number of pairs in these steps if every batch but the last of an epoch is full.
        n_pairs: number of pairs of the data.
        batch_size: number of pairs of a full step.
        negatives_among: returns how many negatives a query has in a step of a number of pairs.
    """
    warnings = []
    if counts.steps < FEW_STEPS:
        warnings.append(
            f"the training had {count_of(counts.steps, 'step')}, which hardly change a model: "
            "train for more epochs or steps, with smaller batches, or on more pairs.",
        )
    if n_pairs < batch_size:
        warnings.append(
            f"the data have {n_pairs:,} pairs, fewer than batch_size ({batch_size:,}): no step was "
            f"full, and a query had at most {negatives_among(counts.most):,} negatives.",
        )
    if counts.total < announced:
        warnings.append(
            f"{count_of(counts.steps, 'step')} trained with {counts.total:,} pairs instead of "
            f"{announced:,}: texts that occur in many pairs, and in a batch only once, left "
            "batches short. Set fill_batches to fill them, or take a smaller batch_size.",
        )
    if counts.single and not negatives_among(1):
        warnings.append(
            f"{count_of(counts.single, 'step')} of {counts.steps:,} had a single pair and no "
            "negative: their ranking loss is 0, and nothing was learnt from them. Set fill_batches "
            "to fill them.",
        )
    return tuple(warnings)


def describe_steps(result: Any) -> str:
    """Describe the steps of a :class:`TrainResult`, with the pairs that they trained with."""
    steps = count_of(result.steps, "step")
    if not result.pairs:
        return steps
    pairs = range_of(result.fewest_pairs, result.pairs)
    return f"{steps} of {pairs} pairs, {result.trained_pairs:,} in all"


def describe_negatives(result: Any) -> str:
    """Describe the number of negatives of a query in the steps of a :class:`TrainResult`."""
    if result.negatives is None:
        return ""
    return range_of(result.fewest_negatives, result.negatives)


def range_of(fewest: int | None, most: int) -> str:
    """Return the sizes of steps in words: one number if all are alike."""
    return f"{most:,}" if fewest in (None, most) else f"{fewest:,} to {most:,}"


def count_of(count: int, name: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
