"""Free memory of a GPU, and memory that is freed while other threads run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tilefold._internal.cuda_graphs import GraphMemory
from tilefold._internal.memory import drop_memory, free_device_bytes
from tilefold.retrieval.vectors.tokens import read_tensors, save_tensors

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


def test_memory_is_dropped_after_a_tensor_without_storage() -> None:
    sparse = torch.eye(3).to_sparse()
    dense = torch.randn(4)
    drop_memory([sparse, dense])
    assert dense.numel() == 0


def test_other_threads_run_while_the_memory_of_a_file_is_dropped(tmp_path: Path) -> None:
    save_tensors(tmp_path / "vectors.safetensors", values=torch.zeros(N_BYTES, dtype=torch.uint8))
    n_steps = 0
    must_stop = threading.Event()

    def count_steps() -> None:
        nonlocal n_steps
        while not must_stop.is_set():
            n_steps += 1

    counting = threading.Thread(target=count_steps)
    counting.start()
    try:
        steps_of_attempts = []
        for _ in range(10):  # a busy machine may run no other thread in the meantime
            values = read_tensors(tmp_path / "vectors.safetensors", "values")["values"]
            values += 1  # the process has memory of its own now, which takes long to free
            n_before = n_steps
            drop_memory([values])
            steps_of_attempts.append(n_steps - n_before)
            assert values.numel() == 0
    finally:
        must_stop.set()
        counting.join()
    assert max(steps_of_attempts) > 1000
