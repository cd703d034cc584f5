"""Sequences and mappings that users pass: read by position, or refused by the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.inside import list_of_ids, list_of_texts
from tests.sequences import LabelledSeries

WORDS = ["one", "two", "three"]


def pandas_series() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.Series(WORDS, index=[2, 0, 1])


def dataset_column() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"text": WORDS})["text"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: list(WORDS), id="list"),
        pytest.param(lambda: tuple(WORDS), id="tuple"),
        pytest.param(lambda: iter(WORDS), id="generator"),
        pytest.param(lambda: np.array(WORDS), id="numpy array"),
        pytest.param(lambda: pa.array(WORDS), id="Arrow array"),
        pytest.param(lambda: pa.chunked_array([WORDS[:1], WORDS[1:]]), id="chunked Arrow array"),
        pytest.param(lambda: dict(enumerate(WORDS)).values(), id="values of a dictionary"),
        pytest.param(lambda: dict.fromkeys(WORDS).keys(), id="keys of a dictionary"),
        pytest.param(lambda: LabelledSeries(WORDS, [2, 0, 1]), id="series of permuted labels"),
        pytest.param(lambda: LabelledSeries(WORDS, [0, 7, 9]), id="series of labels with gaps"),
        pytest.param(pandas_series, id="pandas Series"),
        pytest.param(dataset_column, id="column of datasets"),
    ],
)
def test_sequences_are_read_by_position(make: Callable[[], Any]) -> None:
    texts = list_of_texts("texts", make())
    assert texts == WORDS
    assert {type(text) for text in texts} == {str}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param("one", r"texts: .* got one string; pass \['one'\]", id="one string"),
        pytest.param({"a": "one"}, r"texts: .* mapping \(dict\); pass its values", id="mapping"),
        pytest.param({"one"}, "texts: .* set, which has no order; pass sorted", id="set"),
        pytest.param(np.array([WORDS]), "ndarray of 2 dimensions; pass one column", id="table"),
        pytest.param(np.array("one"), "ndarray of 0 dimensions", id="scalar array"),
        pytest.param(None, "texts: expected a list, got NoneType", id="none"),
        pytest.param(3, "texts: expected a list, got int", id="number"),
        pytest.param(["a", None], "strings, got None .* position 1", id="missing value"),
        pytest.param([float("nan")], "strings, got nan .* position 0", id="not a number"),
    ],
)
def test_what_is_no_sequence_of_texts_is_refused_by_name(values: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        list_of_texts("texts", values)


def test_a_data_frame_is_refused_instead_of_read_as_the_names_of_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match="DataFrame of 2 dimensions"):
        list_of_texts("texts", pandas.DataFrame({"text": WORDS}))


def test_a_set_is_taken_where_the_order_does_not_matter() -> None:
    assert sorted(list_of_ids("delete", {"b", "a"})) == ["a", "b"]
    assert list_of_ids("delete", {"b": 1, "a": 2}) == ["b", "a"]
