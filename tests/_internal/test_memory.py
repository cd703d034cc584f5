"""Free memory of a GPU."""

from __future__ import annotations

import pytest
import torch

from tilefold._internal.cuda_graphs import GraphMemory
from tilefold._internal.memory import free_device_bytes

N_BYTES = 256 << 20


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_cached_memory_is_free_but_not_that_of_a_cuda_graph() -> None:
    small = torch.zeros(8, device="cuda")
    torch.cuda.empty_cache()
    free_before = free_device_bytes("cuda")
    cached = torch.empty(N_BYTES, dtype=torch.uint8, device="cuda")
    assert free_device_bytes("cuda") < free_before - N_BYTES // 2
    del cached
    assert free_device_bytes("cuda") == pytest.approx(free_before, abs=N_BYTES // 8)
    graph = torch.cuda.CUDAGraph()
    with GraphMemory().capturing(graph):
        scratch = torch.zeros(N_BYTES, dtype=torch.uint8, device="cuda")
        small += scratch[:8]
        del scratch
    assert free_device_bytes("cuda") < free_before - N_BYTES // 2
    graph.replay()
    assert small.tolist() == [0.0] * 8
