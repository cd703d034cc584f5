"""Captures of CUDA graphs that nothing else in the process disturbs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tilefold._internal.cuda_graphs import GraphMemory


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Make Python collect garbage after nearly every new object."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)


def capture(memory: GraphMemory, numbers: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture ``numbers + 1``, with new Python objects in the meantime."""
    graph = torch.cuda.CUDAGraph()
    with memory.warming_up():
        numbers + 1
    with memory.capturing(graph):
        assert len([[] for _ in range(1000)]) == 1000
        numbers + 1
    return graph


@pytest.mark.gpu
@pytest.mark.usefixtures("eager_collector")
def test_a_graph_that_is_garbage_is_not_deleted_during_a_capture() -> None:
    """CUDA ends a capture if another graph is deleted in it, as happened between two models."""
    numbers = torch.zeros(8, device="cuda")
    gc.disable()
    cycle: list[object] = [capture(GraphMemory(), numbers)]
    cycle.append(cycle)  # only the garbage collector can delete it
    del cycle
    gc.enable()
    graph = capture(GraphMemory(), numbers)
    graph.replay()
    torch.cuda.synchronize()
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_capture_leaves_the_cached_memory_of_other_threads_alone() -> None:
    """Freeing it would wait for the GPU, and the other threads would allocate it again."""
    numbers = torch.zeros(8, device="cuda")
    torch.cuda.empty_cache()
    cached = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    del cached
    reserved_bytes = torch.cuda.memory_reserved()
    graph = capture(GraphMemory(), numbers)
    assert torch.cuda.memory_reserved() >= reserved_bytes
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("releases_cache", "free_bytes"),
    [
        pytest.param(True, None, id="for a large graph"),
        pytest.param(False, 1 << 20, id="when most free memory is cached"),
    ],
)
def test_a_capture_releases_cached_memory(
    releases_cache: bool,
    free_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs cannot use cached memory, so that too little would be left for them."""
    if free_bytes is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 40))
    numbers = torch.zeros(8, device="cuda")
    torch.cuda.empty_cache()
    cached = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    del cached
    reserved_bytes = torch.cuda.memory_reserved()
    memory = GraphMemory()
    graph = torch.cuda.CUDAGraph()
    with memory.capturing(graph, releases_cache=releases_cache):
        result = numbers + 1
    assert torch.cuda.memory_reserved() < reserved_bytes
    graph.replay()
    assert result.tolist() == [1.0] * 8


@pytest.mark.gpu
def test_an_error_in_a_capture_is_raised_and_later_captures_work() -> None:
    numbers = torch.zeros(8, device="cuda")
    with (
        pytest.raises(ValueError, match="of the context"),
        GraphMemory().capturing(torch.cuda.CUDAGraph()),
    ):
        numbers + 1
        raise ValueError("error of the context")
    assert gc.isenabled()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    graph = torch.cuda.CUDAGraph()
    with GraphMemory().capturing(graph):
        result = numbers + 1
    graph.replay()
    assert result.tolist() == [1.0] * 8


@pytest.mark.gpu
def test_graphs_are_captured_after_all_earlier_ones_were_deleted() -> None:
    """torch frees the memory pool of graphs with the last one of them."""
    numbers = torch.zeros(8, device="cuda")
    memory = GraphMemory()
    first = capture(memory, numbers)
    second = capture(memory, numbers)
    del first, second
    third = capture(memory, numbers)
    fourth = capture(memory, numbers)
    third.replay()
    fourth.replay()
    torch.cuda.synchronize()
