"""Packed token ids, and batches cut by tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilefold.pipeline.ragged import TokenIds, cut_batches, offsets_of


def packed(lists: list[list[int]]) -> TokenIds:
    flat = np.array([token for row in lists for token in row], np.int64)
    return TokenIds(flat, flat + 1, offsets_of(np.array([len(row) for row in lists], np.int64)))


def rows(ids: TokenIds) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids.ids, ids.offsets[1:-1])] if len(ids) else []


@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=8), st.randoms())
def test_texts_are_taken_in_any_order(lists: list[list[int]], random: object) -> None:
    order = list(range(len(lists)))
    random.shuffle(order)  # type: ignore[attr-defined]
    taken = packed(lists).take(np.array(order, np.int64))
    assert rows(taken) == [lists[i] for i in order]
    assert (taken.positions == taken.ids + 1).all() and taken.lengths.tolist() == [len(lists[i]) for i in order]


@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 100),
    st.none() | st.integers(1, 7),
)
def test_every_text_is_in_one_batch_within_its_limits(lengths: list[int], budget: int, most: int | None) -> None:
    sizes = np.array(lengths, np.int64)
    batches = list(cut_batches(sizes, budget, most))
    assert sorted(np.concatenate([*batches, np.zeros(0, np.int64)]).tolist()) == list(range(len(lengths)))
    for batch in batches:
        held = sizes[batch]
        assert len(batch) == 1 or int(held.sum()) <= budget
        assert most is None or len(batch) <= most
        assert (np.diff(held) <= 0).all()


def test_batches_are_nearly_equal() -> None:
    sizes = np.full(100, 10, np.int64)
    assert [len(batch) for batch in cut_batches(sizes, 400)] == [34, 34, 32]
