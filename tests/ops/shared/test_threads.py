"""Any thread may call any operator: a thread that has done nothing on the GPU has no context there."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.maxsim.matching import maxsim_results
from tests.ops.samples import (
    Sample,
    attend,
    dout,
    entmax_rows,
    head,
    late,
    quantized_documents,
    scatter,
)
from tilefold.ops import maxsim
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.testing.maxsim import maxsim_inputs

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def of_rows(rows: int, **options: Any) -> Sample:
    """MaxSim that reads documents through a TMA descriptor, with a number of rows that no other
    has.
    """
    return late((5, 33, 64), (5 if options else 7, rows, 64), BF16, **options)


HOLES = (torch.arange(7 * 43).view(7, 43) % 3 != 0).tolist()
SAMPLES = {
    "maxsim": of_rows(41),
    "maxsim, holes, fp16": late((5, 33, 64), (7, 43, 64), torch.float16, document_mask=HOLES),
    "maxsim, long queries": late((2, 201, 64), (5, 45, 64), BF16),
    "maxsim, normalised": of_rows(47, normalize=True),
    "maxsim, smooth": of_rows(49, temperature=0.5),
    "maxsim, aligned": of_rows(51, pairing="aligned"),
    "maxsim, inference": replace(of_rows(53), inference=True),
    "maxsim, int8": Sample(
        "maxsim",
        quantized_documents,
        ((3, 13, 64), (11, 17, 64)),
        {},
        BF16,
        inference=True,
    ),
    "lsr_head": head("max", 3, 37, 64, vocab=1024, dtype=BF16),
    "lsr_head, sum": head("sum", 3, 37, 64, vocab=1024, dtype=BF16),
    "lsr_head, inference": replace(head("max", 3, 37, 64, vocab=1024, dtype=BF16), inference=True),
    "entmax_attention": Sample("entmax_attention", attend, ((2, 2, 37, 64),) * 3, {}, BF16),
    "entmax": Sample("entmax", entmax_rows, ((37, 129),)),
    "token_scatter": scatter(),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_thread_without_a_context_may_make_any_call_of_an_operator(sample: Sample) -> None:
    MAXSIM.calls.clear()
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        leaves, options = sample.leaves(device), sample.given(device)

        def call(leaves: list[Tensor] = leaves, options: dict[str, Any] = options) -> list[Tensor]:
            scores = sample.function(*leaves, **options, impl="triton")
            return [
                scores.detach(),
                *([] if sample.inference else torch.autograd.grad(scores, leaves, dout(scores))),
            ]

        torch.cuda.synchronize(device)
        rounds = []
        for _ in range(
            4,
        ):  # the first call, the one that is remembered, and what repeats it: each in a new thread
            with ThreadPoolExecutor(1) as pool:
                rounds.append(pool.submit(call).result())
        rounds.append(call())
        for found, expected in itertools.pairwise(rounds):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_thread_without_a_context_repeats_what_another_one_called_with_tensors_at_other_addresses() -> (
    None
):
    inputs = maxsim_inputs(5, 7, 33, 41, 64, dtype=BF16, device="cuda")
    for _ in range(3):
        expected = maxsim_results(inputs)
    moved = maxsim_inputs(5, 7, 33, 41, 64, dtype=BF16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(maxsim_results, moved).result()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


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
