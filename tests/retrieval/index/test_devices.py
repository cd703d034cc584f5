"""Several devices that divide the documents of an index search like one device."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.retrieval.conftest import dense_folder
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import retrieval as r
from tilefold.cli._common import UsageError
from tilefold.cli._retrievers import move_to_device
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.index import dense, late
from tilefold.retrieval.index.devices import DeviceCopies, copy_to_device
from tilefold.retrieval.index.exact import ExactIndex, Postings
from tilefold.retrieval.index.opening import gpus_of, open_index
from tilefold.retrieval.index.segments import Segments
from tilefold.retrieval.index.token_blocks import DeviceDocuments

MakeVectors = Callable[..., r.SparseVectors]
VOCAB_SIZE = 500
DIMENSION = 16
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
N_DEVICES = [
    pytest.param(2, id="two devices"),
    pytest.param(7, id="seven devices, which do not divide 300"),
]


def with_repeated_documents(vectors: r.SparseVectors) -> r.SparseVectors:
    """Return three times as many documents, so that each document ties with two others."""
    return replace(
        vectors,
        ids=[f"d{number}" for number in range(3 * len(vectors))],
        indptr=offsets_of(np.tile(np.diff(vectors.indptr), 3)),
        indices=np.tile(vectors.indices, 3),
        data=np.tile(vectors.data, 3),
    )


def dense_rows(vectors: r.SparseVectors) -> torch.Tensor:
    rows = torch.zeros(len(vectors), vectors.vocab_size)
    for row in range(len(vectors)):
        terms, weights = vectors.row(row)
        rows[row, terms.tolist()] = torch.from_numpy(weights.copy())
    return rows


def token_vectors(ids: list[str], seed: int, max_tokens: int) -> r.TokenVectors:
    """Return token vectors of norm 1, with 0 to `max_tokens` tokens per text."""
    generator = torch.Generator().manual_seed(seed)
    n_tokens = torch.randint(max_tokens + 1, (len(ids),), generator=generator).tolist()
    rows = [normalize(torch.randn(n, DIMENSION, generator=generator), dim=1) for n in n_tokens]
    return r.TokenVectors.pack(ids, rows, DIMENSION, "fp32")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("n_devices", N_DEVICES)
def test_a_divided_sparse_index_has_the_bits_of_one_device(
    device: str,
    n_devices: int,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(with_repeated_documents(make_vectors(100)))
    queries = make_vectors(20, seed=1, prefix="q")
    one_device = index.on(device)
    divided = index.on([device] * n_devices)
    mask = divided.mask(list(index.ids)[::3])

    assert divided.search(queries, 40) == one_device.search(queries, 40)
    assert divided.search(queries, 1000) == one_device.search(queries, 1000)
    assert divided.search(queries, 9, mask) == one_device.search(queries, 9, mask)
    for row in range(3):
        query = queries.take([row])
        assert divided.search(query, 9) == one_device.search(query, 9)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("n_queries", [pytest.param(1, id="one query"), pytest.param(5, id="five")])
def test_query_tensors_find_the_same_in_a_divided_sparse_index(
    device: str,
    n_queries: int,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(with_repeated_documents(make_vectors(100)))
    queries = dense_rows(make_vectors(n_queries, seed=1, prefix="q")).to(device)
    one_device = index.on(device)
    divided = index.on([device] * 3)
    mask = divided.mask(list(index.ids)[::3])

    for among in (None, mask):
        scores, positions = divided.search_tensor(queries, 40, among)
        expected_scores, expected_positions = one_device.search_tensor(queries, 40, among)
        assert torch.equal(scores, expected_scores)
        assert torch.equal(positions, expected_positions)


def test_a_device_scales_scores_by_the_largest_weights_of_all_devices(
    make_vectors: MakeVectors,
) -> None:
    """A part without the heaviest documents would otherwise round its products less."""
    vectors = make_vectors(40)
    data = vectors.data.copy()
    data[: vectors.indptr[20]] *= 1000
    index = ExactIndex.build(replace(vectors, data=data))
    queries = make_vectors(5, seed=1, prefix="q")

    assert index.on(["cpu", "cpu"]).search(queries, 40) == index.on("cpu").search(queries, 40)


def test_the_cpu_waits_for_the_tensors_that_it_reads(
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU may be one of several devices, and writes a copy after the call has returned."""
    copy_tensor = torch.Tensor.to
    devices_of_copies: list[str] = []

    def copy_with_wait(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        devices_of_copies.append(str(arguments[0]))
        assert not options.get("non_blocking")
        return copy_tensor(tensor, *arguments, **options)

    divided = ExactIndex.build(make_vectors(40)).on(["cpu", "cpu"])
    queries = dense_rows(make_vectors(5, seed=1, prefix="q"))
    mask = divided.mask(list(divided.ids)[::3])
    monkeypatch.setattr(torch.Tensor, "to", copy_with_wait)
    divided.search_tensor(queries, 10, mask)

    assert devices_of_copies.count("cpu") >= 4


def test_devices_without_documents_are_left_out(make_vectors: MakeVectors) -> None:
    index = ExactIndex.build(make_vectors(3))
    queries = make_vectors(5, seed=1, prefix="q")
    divided = index.on(["cpu"] * 8)

    assert len(divided.postings.devices) == 3
    assert divided.search(queries, 2) == index.on("cpu").search(queries, 2)


def test_postings_are_divided_into_consecutive_documents(make_vectors: MakeVectors) -> None:
    postings = Postings.from_vectors(make_vectors(50))

    parts = list(postings.divide([0, 11, 11, 50]))

    assert [part.n_documents for part in parts] == [11, 0, 39]
    rejoined = Postings.concatenate(parts)
    np.testing.assert_array_equal(rejoined.offsets, postings.offsets)
    np.testing.assert_array_equal(rejoined.documents, postings.documents)
    np.testing.assert_array_equal(rejoined.weights, postings.weights)


def test_an_updated_sparse_index_is_divided_without_its_removed_documents(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    metadata = {f"d{number}": {"parity": number % 2} for number in range(60)}
    r.build_index(make_vectors(50), metadata=metadata).save(tmp_path / "index")
    new_documents = make_vectors(20, seed=5).take(range(10, 20))
    r.update_index(tmp_path / "index", new_documents, ["d3"], metadata={})
    opened: Any = open_index(tmp_path / "index")
    queries = make_vectors(5, seed=1, prefix="q")
    divided = opened.on(["cpu"] * 3)
    one_device = opened.on("cpu")

    assert divided.search(queries, 60) == one_device.search(queries, 60)
    of_filter = divided.search(queries, 60, where={"parity": 1})
    assert of_filter == one_device.search(queries, 60, where={"parity": 1})
    found = {hit.id for hits in of_filter for hit in hits}
    assert "d5" in found
    assert not found & {"d3", "d4"}


@pytest.mark.parametrize("storage", ["int8", "fp16", "int4"])
@pytest.mark.parametrize("n_devices", [2, 7])
def test_a_divided_late_index_has_the_bits_of_one_device(
    storage: str,
    n_devices: int,
    tmp_path: Path,
) -> None:
    vectors = token_vectors([f"d{number}" for number in range(100)], seed=0, max_tokens=20)
    rows = [vectors.rows(row) for row in range(100)] * 2  # each document ties with another
    ids = [f"d{number}" for number in range(200)]
    documents = r.TokenVectors.pack(ids, rows, DIMENSION, "fp32")
    index = r.LateIndex.build(documents, tmp_path / "index", storage=storage)
    queries = token_vectors(["q0", "q1", "q2", "q3"], seed=1, max_tokens=8)
    allowed = np.arange(200) % 3 != 0
    divided = index.on(["cpu"] * n_devices)
    one_device = index.on("cpu")

    assert divided.search(queries, 15) == one_device.search(queries, 15)
    assert divided.search(queries, 500) == one_device.search(queries, 500)
    of_allowed = divided.search(queries, 15, allowed=allowed)
    assert of_allowed == one_device.search(queries, 15, allowed=allowed)


def test_a_late_index_of_fewer_documents_than_devices_is_searched(tmp_path: Path) -> None:
    documents = token_vectors(["a", "b", "c"], seed=4, max_tokens=9)
    index = r.LateIndex.build(documents, tmp_path / "index")
    queries = token_vectors(["q0", "q1"], seed=1, max_tokens=8)

    assert index.on(["cpu"] * 8).search(queries, 5) == index.on("cpu").search(queries, 5)


def test_every_part_of_an_updated_late_index_is_divided(tmp_path: Path) -> None:
    documents = token_vectors([f"d{number}" for number in range(30)], seed=0, max_tokens=9)
    r.LateIndex.build(documents, tmp_path / "index")
    new_documents = token_vectors([f"d{number}" for number in range(25, 40)], 2, max_tokens=9)
    r.update_index(tmp_path / "index", new_documents, ["d1"])
    opened: Any = open_index(tmp_path / "index")
    queries = token_vectors(["q0", "q1", "q2"], seed=1, max_tokens=8)

    assert opened.on(["cpu"] * 3).search(queries, 40) == opened.on("cpu").search(queries, 40)


def test_the_gpus_of_an_index_are_those_that_have_documents(tmp_path: Path) -> None:
    """A device ``"cuda"`` means all GPUs if the documents of a late index do not fit on one."""
    documents = token_vectors(["a", "b", "c"], seed=4, max_tokens=9)
    index = r.LateIndex.build(documents, tmp_path / "index")
    index.search(token_vectors(["q"], 1, max_tokens=8), 1, device="cpu")
    assert gpus_of(index) == []
    parts = [
        resident_on("cuda:0"),
        resident_on("cuda:1"),
        resident_on(None),  # these documents are searched block by block
    ]
    index._device_documents.get(("cuda:0", "cuda:1", "cuda:2"), lambda: parts)
    assert gpus_of(index) == ["cuda:0", "cuda:1"]
    assert gpus_of(Segments([index, index], [(), ()])) == ["cuda:0", "cuda:1"]


def resident_on(device: str | None) -> Any:
    """Return documents that the memory of a GPU has, which may be missing here; None for no GPU."""
    if device is None:
        return SimpleNamespace(resident=None)
    values = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(resident=SimpleNamespace(values=values))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_the_gpu_of_a_sparse_index_has_its_postings(
    device: str,
    n_devices: int,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(make_vectors(10)).on([device] * n_devices)
    assert gpus_of(index) == ([] if device == "cpu" else ["cuda:0"])


def test_an_index_of_dense_vectors_is_not_divided(tmp_path: Path) -> None:
    store = dense_folder(tmp_path / "vectors", ["a", "b", "c"], seed=0)
    index = r.DenseIndex.build(store, similarity="dot")

    with pytest.raises(ValueError, match=r"device: expected one device .* 'dense', got 2"):
        index.on(["cpu", "cpu"])


def test_an_empty_list_of_devices_is_refused(make_vectors: MakeVectors, tmp_path: Path) -> None:
    message = "device: expected a device or a list of at least one, got an empty list"
    with pytest.raises(ValueError, match=message):
        ExactIndex.build(make_vectors(3)).on([])
    index = r.LateIndex.build(token_vectors(["a", "b"], 4, max_tokens=9), tmp_path / "index")
    with pytest.raises(ValueError, match=message):
        index.on([])
    with pytest.raises(ValueError, match=message):
        index.search(token_vectors(["q"], 1, max_tokens=8), 1, device=[])


def test_the_command_line_divides_an_index_among_the_devices_of_a_list(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    index = ExactIndex.build(make_vectors(30))

    divided = move_to_device(index, "cpu,cpu", tmp_path)

    assert len(divided.postings.devices) == 2
    dense_index = r.DenseIndex.build(dense_folder(tmp_path / "v", ["a", "b"], seed=0))
    with pytest.raises(UsageError, match="--device: expected one device"):
        move_to_device(dense_index, "cpu,cpu", tmp_path)
    with pytest.raises(UsageError, match=r"--device: .* cannot be searched on cpu,nowhere"):
        move_to_device(index, "cpu,nowhere", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_a_large_tensor_is_copied_to_a_gpu_in_pieces(dtype: torch.dtype) -> None:
    """The copy is complete on return, also for another stream."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-100, 100, (300_001, 41), generator=generator).to(dtype)
    device = torch.device("cuda")
    rows_on_gpu = copy_to_device(rows, device)
    assert rows_on_gpu.dtype == dtype
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(rows_on_gpu.cpu(), rows)


@pytest.mark.gpu
def test_a_transposed_tensor_is_copied_to_a_gpu_in_pieces() -> None:
    rows = torch.arange(3_000_000).view(1000, 3000).T
    rows_on_gpu = copy_to_device(rows, torch.device("cuda"))
    assert torch.equal(rows_on_gpu.cpu(), rows)


def test_a_copy_to_the_cpu_is_the_tensor_itself() -> None:
    rows = torch.zeros(3_000_000)
    assert copy_to_device(rows, torch.device("cpu")) is rows


class SlowCopy:
    """Function that waits until a second search has begun, and counts its calls.

    Args:
        function: function that is called in the end.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.n_calls = 0
        self.second_search_began = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.n_calls += 1
        assert self.second_search_began.wait(WAIT_SECONDS)
        time.sleep(0.1)  # time in which the second search would begin a copy, too
        return self.function(*arguments, **options)

    def run_twice(self, search: Callable[[], Any]) -> tuple[Any, Any]:
        """Run a search in two threads, and return both results."""

        def second_search() -> Any:
            wait_until(lambda: self.n_calls > 0)
            self.second_search_began.set()
            return search()

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(search)
            second = pool.submit(second_search)
            return first.result(), second.result()


def test_two_first_searches_copy_dense_vectors_to_a_device_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The device "meta" stands for a GPU."""
    index = r.DenseIndex.build(dense_folder(tmp_path / "vectors", ["a", "b"], seed=0))
    slow_copy = SlowCopy(copy_to_device)
    monkeypatch.setattr(dense, "copy_to_device", slow_copy)
    monkeypatch.setattr(dense, "free_device_bytes", lambda device: 1 << 30)
    first, second = slow_copy.run_twice(lambda: index._copy_vectors_to(torch.device("meta")))
    assert slow_copy.n_calls == 1
    assert first[0] is second[0]
    assert first[0].device.type == "meta"


def test_two_first_searches_copy_token_vectors_to_a_device_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    documents = token_vectors(["a", "b", "c"], seed=4, max_tokens=9)
    index = r.LateIndex.build(documents, tmp_path / "index")
    queries = token_vectors(["q"], seed=1, max_tokens=8)
    slow_copy = SlowCopy(DeviceDocuments)
    monkeypatch.setattr(late, "DeviceDocuments", slow_copy)
    first, second = slow_copy.run_twice(lambda: index.search(queries, 3, device="cpu"))
    assert slow_copy.n_calls == 1
    assert first == second


def test_a_copy_that_failed_is_tried_again() -> None:
    copies: DeviceCopies[str] = DeviceCopies()

    def fail() -> str:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        copies.get("cuda", fail)
    assert copies.get("cuda", lambda: "copy") == "copy"
    assert copies.all() == ["copy"]


def test_copies_and_pickles_of_an_index_begin_without_copies_on_devices(tmp_path: Path) -> None:
    store = dense_folder(tmp_path / "vectors", ["a", "b"], seed=0)
    index = r.DenseIndex.build(store, similarity="dot")
    index._copies.get("cuda", lambda: (torch.zeros(1), None))
    for duplicate in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):  # noqa: S301
        assert not duplicate._copies.all()
        assert torch.equal(duplicate.vectors(["b"]), index.vectors(["b"]))
