"""Numbers and objects in filters: every backend finds what a comparison in Python finds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.retrieval.conftest import dense_folder
from tilefold import retrieval as r
from tilefold.retrieval import Filter
from tilefold.retrieval.data.metadata import kept_fields
from tilefold.retrieval.data.numbers import (
    INT64,
    floats_within,
    integers_rounding_to,
    integers_within,
    rounded_range,
)
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection

Search = Callable[[Filter], set[str]]
BACKENDS = ["exact", "seismic", "bm25", "dense", "late", "qdrant"]
PACKAGES = {"seismic": "seismic", "qdrant": "qdrant_edge"}
LARGE = 2**53
VALUES: list[Any] = [
    0,
    0.0,
    -0.0,
    5,
    5.0,
    4.5,
    -5,
    LARGE - 1,
    LARGE,
    LARGE + 1,
    LARGE + 2,
    LARGE + 3,
    float(LARGE),
    float(LARGE + 2),
    -LARGE - 1,
    2**62 + 1,
    2.0**62,
    INT64[-1],
    INT64[0],
    2.0**63,
    1e300,
    5e-324,
    True,
    "5",
    None,
    {"k": 5},
    {"k": LARGE + 1},
    [],
    [5, LARGE + 1],
    [[0, 5], [LARGE]],
    [[[1]]],
    [{"k": 5}, {"k": 0}],
]
NUMBERS = [value for value in VALUES if isinstance(value, int | float) and value is not True]


def numbers_of(value: object) -> list[int | float]:
    """Numbers that a condition on a field with this value looks at."""
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def matches(value: object, condition: Any) -> bool:
    """Python's own answer, whose comparison of integers and floats is exact."""
    if condition is None:
        return value is None or value == []
    if isinstance(condition, Mapping):
        compare = {
            "gt": lambda number, bound: number > bound,
            "gte": lambda number, bound: number >= bound,
            "lt": lambda number, bound: number < bound,
            "lte": lambda number, bound: number <= bound,
        }
        return any(
            all(compare[name](number, bound) for name, bound in condition.items())
            for number in numbers_of(value)
        )
    wanted = condition if isinstance(condition, list) else [condition]
    return any(number in wanted for number in numbers_of(value))


@pytest.fixture(scope="module")
def fields() -> dict[str, dict[str, Any]]:
    return {
        f"d{row}": {"n": value, "all": 1, "name": f"x{row}", "by": {"name": "x"}}
        for row, value in enumerate(VALUES)
    }


@pytest.fixture(scope="module", params=BACKENDS)
def search(
    request: pytest.FixtureRequest,
    fields: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Search]:
    """Ids of the documents that a backend finds; without a filter a query finds all."""
    backend = request.param
    pytest.importorskip(PACKAGES.get(backend, "numpy"))
    ids = list(fields)
    queries: Any
    if backend == "bm25":
        queries = {"q": "word"}
        index: Any = r.BM25Index.build(dict.fromkeys(ids, "word"), metadata=fields)
    elif backend == "dense":
        folder = dense_folder(tmp_path_factory.mktemp("dense"), ids, 0)
        index = r.DenseIndex.build(folder, metadata=fields)
        queries = torch.ones(1, 8)
    elif backend == "late":
        tokens = r.TokenVectors.pack(ids, [torch.ones(2, 4)] * len(ids), 4, "fp32")
        folder = tmp_path_factory.mktemp("late") / "index"
        index = r.LateIndex.build(tokens, folder, metadata=fields)
        queries = r.TokenVectors.pack(["q"], [torch.ones(1, 4)], 4, "fp32")
    else:
        vectors = r.SparseVectors.from_torch(ids, torch.ones(len(ids), 2), "f")
        index = r.build_index(vectors, backend, metadata=fields)
        queries = r.SparseVectors.from_torch(["q"], torch.ones(1, 2), "f")

    def matching_ids(where: Filter) -> set[str]:
        rows = index.search(queries, len(ids), where=where)
        return set(rows["q"]) if isinstance(rows, dict) else {hit.id for hit in rows[0]}

    yield matching_ids
    if backend == "qdrant":
        index.close()


def conditions() -> list[Any]:
    """Missing, equal, one of several, and one or two bounds: drawn from the values themselves."""
    draw = random.Random(0)  # noqa: S311
    integers = [number for number in NUMBERS if isinstance(number, int)]
    bounds = ("gt", "gte", "lt", "lte")
    result: list[Any] = [None, *integers, *({name: n} for name in bounds for n in NUMBERS)]
    result += [draw.sample(integers, 3) for _ in range(10)]
    for _ in range(60):
        names = draw.sample(bounds, 2)
        result.append({name: draw.choice([*NUMBERS, 2**63, -(2**70), 0.5]) for name in names})
    return result


def test_every_backend_compares_numbers_as_python_does(
    search: Search,
    fields: dict[str, dict[str, Any]],
) -> None:
    for condition in conditions():
        expected = {name for name, row in fields.items() if matches(row["n"], condition)}
        assert search(Filter({"n": condition})) == expected, condition
        remaining = search(Filter({"all": 1}, {"n": condition}))
        assert remaining == set(fields) - expected, condition


def test_fields_of_an_object_are_found_by_their_path(search: Search) -> None:
    by_value = {repr(value): f"d{row}" for row, value in enumerate(VALUES)}
    assert search(Filter({"n.k": 5})) == {by_value["{'k': 5}"]}
    assert search(Filter({"n.k": {"gt": LARGE}})) == {by_value[repr({"k": LARGE + 1})]}
    assert search(Filter({"n[].k": 0})) == {by_value["[{'k': 5}, {'k': 0}]"]}


@pytest.mark.parametrize("seed", range(20))
def test_intervals_agree_with_exact_comparison(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311

    def number() -> int | float:
        exponent = draw.choice([3, 52, 53, 54, 60, 62, 63])
        value = draw.choice([-1, 1]) * (2**exponent + draw.randint(-1500, 1500))
        return draw.choice([value, float(value), value / 2])

    names = draw.sample(("gt", "gte", "lt", "lte"), draw.randint(1, 2))
    bounds = {name: number() for name in names}
    integers, floats, rounded = (
        integers_within(bounds),
        floats_within(bounds),
        rounded_range(bounds),
    )
    near = [n + step for n in map(int, bounds.values()) for step in range(-1100, 1100, 7)]
    for integer in (n for n in near if n in INT64):
        assert (integer in integers) == matches(integer, bounds)
        stored = float(integer)
        actual = (
            (rounded.interval is not None and stored in rounded.interval)
            or integer in rounded.integers
            or any(stored == value and integer not in out for value, out in rounded.boundaries)
        )
        assert actual == matches(integer, bounds), (integer, bounds)
    for value in map(float, near):
        assert (value in floats) == matches(value, bounds)


def test_integers_rounding_to_a_float_are_all_that_do() -> None:
    assert integers_rounding_to(5.0) == [5]
    assert integers_rounding_to(4.5) == []
    assert integers_rounding_to(float(LARGE)) == [LARGE, LARGE + 1]
    assert integers_rounding_to(2.0**63) == list(range(2**63 - 512, 2**63))
    assert integers_rounding_to(1e300) == integers_rounding_to(float("inf")) == []


@pytest.mark.parametrize(
    ("value", "same"),
    [
        pytest.param(np.int64(5), 5, id="integer"),
        pytest.param(np.str_("5"), "5", id="text"),
        pytest.param(np.bool_(True), True, id="boolean"),
        pytest.param([np.int64(5), np.int32(0)], [5, 0], id="list"),
        pytest.param(np.array([5, 0]), [5, 0], id="array"),
        pytest.param({"gte": np.int64(5)}, {"gte": 5}, id="integer as a bound"),
        pytest.param({"lt": np.float32(4.75)}, {"lt": 4.75}, id="float as a bound"),
    ],
)
def test_a_condition_takes_scalars_of_numpy(search: Search, value: Any, same: Any) -> None:
    assert search(Filter({"n": value})) == search(Filter({"n": same}))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param({"all": "1"}, "'all', which is integer, got '1'", id="text for a number"),
        pytest.param({"name": {"gt": 1}}, "'name', which is text, got a range", id="range"),
        pytest.param({"name": 5}, "'name', which is text, got 5", id="number for a text"),
        pytest.param({"al": 1}, "expected a field of the index, .*; got 'al'", id="no such field"),
        pytest.param({"by": 5}, "expected a field of the index, .*; got 'by'", id="object"),
        pytest.param({"al": None}, "expected a field of the index, .*; got 'al'", id="missing"),
    ],
)
@pytest.mark.parametrize("negated", [False, True], ids=["must", "must not"])
def test_every_backend_refuses_a_field_or_a_kind_of_values_that_no_document_has(
    search: Search,
    where: dict[str, Any],
    message: str,
    negated: bool,
) -> None:
    condition = Filter(must_not=where) if negated else Filter(where)
    with pytest.raises(ValueError, match=f"where: .*{message}"):
        search(condition)


def test_a_qdrant_collection_refuses_no_field_that_another_process_has_written(
    tmp_path: Path,
) -> None:
    pytest.importorskip("qdrant_edge")
    dense = np.ones((1, 2), np.float32)
    with QdrantCollection.embedded(tmp_path / "collection", Layout(dense=2)) as collection:
        assert collection.count({"n": 5}) == 0, "there are no documents"
        documents = Documents(["a"], dense=dense, payloads={"a": {"m": "x"}})
        collection.add(documents)
        assert collection.field_kinds == {"m": ["text"]}
        added = Documents(["b"], dense=dense, payloads={"b": {"n": 5}})
        collection._engine.upsert(added.points([0]))
        assert collection.count({"n": 5}) == 1
        assert collection.count({"n": 6}) == 0
        assert collection.count(Filter(must_not={"n": None})) == 1
        with pytest.raises(ValueError, match="where: expected a field of the index, m"):
            collection.count({"n": 5, "k": 1})
        collection.delete(["a", "b"])
    with QdrantCollection.embedded(tmp_path / "collection") as collection:
        assert collection.field_kinds == {"m": ["text"]}
        assert collection.count({"m": "x"}) == 0


def test_a_qdrant_collection_without_recorded_fields_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    dense = np.ones((1, 2), np.float32)
    with QdrantCollection.embedded(tmp_path / "collection", Layout(dense=2)) as collection:
        collection.add(Documents(["a"], dense=dense, payloads={"a": {"m": "x"}}))
    record_file = tmp_path / "collection" / "collection.json"
    record = json.loads(record_file.read_text(encoding="utf-8"))
    del record["kinds"], record["precisions"], record["checksum"]
    record_file.write_text(json.dumps(record), encoding="utf-8")
    with QdrantCollection.embedded(tmp_path / "collection") as collection:
        collection.upsert(Documents(["b"], dense=dense, payloads={"b": {"n": 5}}))
        assert collection.field_kinds is None
        assert collection.count({"other": 5}) == 0


def test_numpy_numbers_and_tuples_are_stored() -> None:
    values = {"i": np.int64(5), "f": np.float32(0.5), "b": np.bool_(True), "t": (1, (2, 3))}
    assert kept_fields(values) == {"i": 5, "f": 0.5, "b": True, "t": [1, 2, 3]}


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({"gt": 10**400}, id="integer above the largest float"),
        pytest.param({"gt": float("inf")}, id="infinity"),
        pytest.param({"gt": True}, id="boolean"),
        pytest.param({}, id="no bound"),
    ],
)
def test_bounds_that_are_no_finite_numbers_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="where: expected numbers under gt, gte, lt, lte for 'n'"):
        Filter({"n": bounds})


def test_qdrant_refuses_a_fraction_in_a_field_that_is_indexed_as_integers(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    layout = Layout(dense=2, fields={"n": "integer"})
    dense = np.ones((2, 2), np.float32)
    with QdrantCollection.embedded(tmp_path / "collection", layout) as collection:
        collection.add(Documents(["a"], dense=dense[:1], payloads={"a": {"n": 5.0}}))
        assert collection.count({"n": 5}) == 1
        with pytest.raises(DataError, match=r"integers in the field 'n', got 1.5 for 'b'"):
            collection.add(Documents(["b"], dense=dense[:1], payloads={"b": {"n": 1.5}}))
