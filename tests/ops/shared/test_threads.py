"""Any thread may call any operator, also one that has no context on the GPU yet."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.ops.contracts import cases
from tests.ops.maxsim.matching import maxsim_results
from tests.ops.samples import Sample
from tilefold.ops import maxsim
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.testing.maxsim import maxsim_inputs

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


SAMPLES: dict[str, Sample] = cases("threads")


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_thread_without_a_context_may_make_any_call_of_an_operator(sample: Sample) -> None:
    MAXSIM.calls.clear()
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        leaves = sample.leaves(device)
        arguments = sample.arguments(device) | {"impl": "triton"}
        torch.cuda.synchronize(device)
        results = []
        # The first call, the one that is remembered, and those that repeat it: each in a new
        # thread.
        for _ in range(4):
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(sample.results, leaves, arguments).result())
        results.append(sample.results(leaves, arguments))
        for first, second in itertools.pairwise(results):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_thread_without_a_context_repeats_a_call_with_tensors_at_other_addresses() -> None:
    inputs = maxsim_inputs(5, 7, 33, 41, 64, dtype=BF16, device="cuda")
    for _ in range(3):
        expected = maxsim_results(inputs)
    moved = maxsim_inputs(5, 7, 33, 41, 64, dtype=BF16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            actual = pool.submit(maxsim_results, moved).result()
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_the_first_call_of_a_thread_may_be_captured() -> None:
    inputs = maxsim_inputs(5, 7, 33, 41, 64, dtype=BF16, device="cuda")
    for _ in range(3):
        expected = maxsim(inputs.queries, inputs.documents)
    torch.cuda.synchronize()

    def captured() -> Tensor:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scores = maxsim(inputs.queries, inputs.documents.clone())
        for _ in range(2):
            graph.replay()
        return scores.clone()

    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(captured).result(), expected)
