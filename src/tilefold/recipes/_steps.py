"""Numbers of steps and pairs of a training run: the expected ones, and the actual ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilefold._internal.arguments import ArgumentError
from tilefold.recipes._rows import Column, Examples
from tilefold.recipes._settings import TrainingSettings

FEW_STEPS = 20  # fewer steps hardly change a model
MIN_MISSING_SHARE = 0.01  # of the pairs; fewer missing pairs hardly change a training


@dataclass(frozen=True)
class PairCounts:
    """Numbers of pairs in the steps of a training run, over all ranks.

    Attributes:
        steps: number of steps.
        total: number of pairs of all steps.
        fewest: number of pairs of the smallest step, 0 before the first step.
        most: number of pairs of the largest step, 0 before the first step.
        single: number of steps with a single pair.
    """

    steps: int = 0
    total: int = 0
    fewest: int = 0
    most: int = 0
    single: int = 0

    def add_step(self, pairs: int) -> PairCounts:
        """Return the counts after one more step, which had this number of pairs."""
        return PairCounts(
            steps=self.steps + 1,
            total=self.total + pairs,
            fewest=min(self.fewest or pairs, pairs),
            most=max(self.most, pairs),
            single=self.single + (pairs == 1),
        )

    @classmethod
    def from_json(cls, values: object) -> PairCounts:
        """Create the counts from their fields; counts of no steps if `values` is not an object."""
        return cls(**values) if isinstance(values, dict) else cls()


def total_steps(recipe: TrainingSettings, n_pairs: int) -> int:
    """Return the optimiser steps of a recipe for a number of pairs."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    return max(1, math.ceil(recipe.epochs * math.ceil(n_pairs / recipe.batch_size)))


def expected_pairs(steps: int, n_rows: int, batch_size: int) -> int:
    """Return the number of pairs of all steps, if only the last batch of an epoch is short.

    A pair counts once for each epoch in which it is trained.

    Args:
        steps: number of steps.
        n_rows: number of rows of an epoch.
        batch_size: number of rows of a full batch.
    """
    epochs, steps_of_last_epoch = divmod(steps, math.ceil(n_rows / batch_size))
    return epochs * n_rows + min(n_rows, steps_of_last_epoch * batch_size)


class TextCounts:
    """Counts of equal texts in the training rows, by column.

    They limit how many batches without repeated texts are possible.

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
        """Return the name of the column with the fewest distinct texts, and their number.

        No batch without repeated texts has more rows than this number.
        """
        sizes = {name: len(counts) for name, counts in self._columns.items()}
        name = min(sizes, key=lambda column: sizes[column])
        return name, sizes[name]

    def fewest_distinct_texts(self) -> tuple[str, int]:
        """Return whether queries or documents have the fewest distinct texts, and their number.

        The kind is ``"queries"`` or ``"documents"``.
        """
        column, n_distinct = self.fewest_distinct()
        return ("queries" if column == "query" else "documents"), n_distinct

    def max_full_batches(self, batch_size: int) -> int:
        """Return an upper bound on the number of full batches of an epoch."""
        return min(
            _max_full_batches(counts, self._n_rows, batch_size) for counts in self._columns.values()
        )

    def max_distinct_rows(self, n_batches: int) -> int:
        """Return an upper bound on the number of different rows in `n_batches` batches.

        A text that occurs in many rows can occur only once in each batch.
        """
        return min(int(np.minimum(counts, n_batches).sum()) for counts in self._columns.values())


def _max_full_batches(counts: Any, n_rows: int, batch_size: int) -> int:
    """Return how many full batches are possible if no text may occur twice in a batch.

    A text fills at most one row of a batch, and so at most ``min(count, k)`` rows of k batches.
    Together the texts must fill ``k * batch_size`` rows. The largest such k is found by bisection.

    Args:
        counts: number of rows ``[n_texts]`` in which each distinct text occurs.
        n_rows: number of rows, the sum of `counts`.
        batch_size: number of rows of a full batch.
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
) -> str:
    """Check before training that the batches of a recipe can be made from the training rows.

    Several ranks and the field ``fill_batches`` need full batches.

    Args:
        recipe: the recipe, with the batch size.
        examples: the training rows.
        ranks: number of processes that share each batch.

    Returns:
        A warning about batches that cannot be full; empty if all of them can be.

    Raises:
        ValueError: if the ranks cannot share a batch evenly, or if full batches are required and
            impossible.
    """
    batch_size = recipe.batch_size
    if batch_size % ranks:
        divisible = ranks * max(1, batch_size // ranks)
        raise ArgumentError(
            "batch_size",
            f"must be a multiple of the {ranks} ranks, got {batch_size}; use {divisible}, or "
            "another number of ranks.",
        )
    n_rows = len(next(iter(examples.columns.values()), ()))
    if not n_rows:
        return ""
    counts = TextCounts(examples) if recipe.distinct_texts else None
    needs_full_batches = ranks > 1 or recipe.fill_batches
    if needs_full_batches:
        reason = "several ranks" if ranks > 1 else "fill_batches"
        _check_full_batches(batch_size, n_rows, counts, reason)
    if counts is None:
        return ""
    texts, n_distinct = counts.fewest_distinct_texts()
    if n_distinct < batch_size:
        return (
            f"no batch can be full: the training pairs have {n_distinct:,} different {texts}, "
            f"fewer than batch_size ({batch_size:,}), and none occurs twice in a batch. Set "
            f"batch_size to at most {n_distinct:,}."
        )
    n_full_batches = n_rows // batch_size
    max_full_batches = counts.max_full_batches(batch_size)
    if max_full_batches >= n_full_batches:
        return ""
    if needs_full_batches:
        return _omitted_pairs_warning(counts, n_rows, batch_size)
    return (
        f"at most {max_full_batches:,} of {n_full_batches:,} batches can be full: some queries or "
        "documents occur in very many pairs, but can occur only once per batch. Set fill_batches "
        "(--fill-batches) to fill short batches with pairs that an epoch has already had."
    )


def _check_full_batches(
    batch_size: int,
    n_rows: int,
    counts: TextCounts | None,
    reason: str,
) -> None:
    """Raise ``ValueError`` if the data are too few for one full batch.

    Args:
        batch_size: number of rows of a full batch.
        n_rows: number of training rows.
        counts: counts of equal texts; ``None`` if a text may occur twice in a batch.
        reason: what needs full batches, for the error.
    """
    if n_rows < batch_size:
        raise ArgumentError(
            "batch_size",
            f"must be at most the {n_rows} rows of the data, because {reason} need "
            f"full batches, got {batch_size}.",
        )
    if counts is None:
        return
    texts, n_distinct = counts.fewest_distinct_texts()
    if n_distinct < batch_size:
        raise ArgumentError(
            "batch_size",
            f"must be at most the {n_distinct} different {texts} of the training pairs, "
            f"because {reason} need full batches in which none occurs twice, got {batch_size}.",
        )


def _omitted_pairs_warning(counts: TextCounts, n_rows: int, batch_size: int) -> str:
    """Return a warning that an epoch of full batches leaves out some pairs and repeats others.

    Args:
        counts: number of rows in which each text occurs.
        n_rows: number of rows.
        batch_size: number of rows of a full batch.
    """
    n_batches = math.ceil(n_rows / batch_size)
    max_distinct_rows = counts.max_distinct_rows(n_batches)
    return (
        f"an epoch of {n_batches:,} full batches has at most {max_distinct_rows:,} of the "
        f"{n_rows:,} pairs, and repeats some of them: some queries or documents occur in very many "
        "pairs, but can occur only once per batch."
    )


def step_warnings(
    counts: PairCounts,
    *,
    expected_pairs: int,
    n_pairs: int,
    batch_size: int,
    negatives_in_step: Callable[[int], int],
) -> tuple[str, ...]:
    """Return warnings about a finished training with few steps, short batches or no negatives.

    Args:
        counts: number of steps, and numbers of pairs in them.
        expected_pairs: number of pairs of all steps, if no batch is short except for the last one
            of each epoch.
        n_pairs: number of training pairs.
        batch_size: number of pairs of a full batch.
        negatives_in_step: takes the number of pairs of a step, and returns the number of negatives
            of each of its queries.
    """
    most_pairs_of_step = counts.most
    n_steps_of_one_pair = counts.single
    warnings = []
    if counts.steps < FEW_STEPS:
        warnings.append(
            f"the training had {format_count(counts.steps, 'step')}, which hardly change a model: "
            "train for more epochs or steps, with smaller batches, or on more pairs.",
        )
    if n_pairs < batch_size:
        warnings.append(
            f"the data have {n_pairs:,} pairs, fewer than batch_size ({batch_size:,}): no step was "
            f"full, and a query had at most {negatives_in_step(most_pairs_of_step):,} negatives.",
        )
    n_missing_pairs = expected_pairs - counts.total
    if n_missing_pairs > 0 and n_missing_pairs >= MIN_MISSING_SHARE * expected_pairs:
        warnings.append(
            f"{format_count(counts.steps, 'step')} trained with {counts.total:,} pairs instead of "
            f"{expected_pairs:,}, counting a pair once per epoch: batches were short because a "
            "text may occur only once in a batch. Set fill_batches (--fill-batches) to fill them, "
            "or use a smaller batch_size (--batch-size).",
        )
    if n_steps_of_one_pair and not negatives_in_step(1):
        warnings.append(
            f"{format_count(n_steps_of_one_pair, 'step')} of {counts.steps:,} had a single pair "
            "and no negative: their ranking loss is 0, and nothing was learnt from them. Set "
            "fill_batches (--fill-batches) to fill them.",
        )
    return tuple(warnings)


def describe_steps(result: Any) -> str:
    """Describe how many steps a :class:`TrainResult` has, and how many pairs were in them."""
    steps = format_count(result.steps, "step")
    if not result.pairs:
        return steps
    pairs = format_range(result.fewest_pairs, result.pairs)
    return f"{steps} of {pairs} pairs, {result.trained_pairs:,} in all"


def describe_negatives(result: Any) -> str:
    """Describe the number of negatives of a query in the steps of a :class:`TrainResult`."""
    if result.negatives is None:
        return ""
    return format_range(result.fewest_negatives, result.negatives)


def format_range(fewest: int | None, most: int) -> str:
    """Return a range of numbers in words; a single number if both ends are equal."""
    return f"{most:,}" if fewest in (None, most) else f"{fewest:,} to {most:,}"


def format_count(count: int, name: str) -> str:
    """Return a number with its noun, which gets an "s" unless the number is 1."""
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
