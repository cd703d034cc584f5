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
