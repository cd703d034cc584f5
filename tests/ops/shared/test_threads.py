"""Any thread may call any operator: a thread that has done nothing on the GPU has no context there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.ops import maxsim, quantize_tokens
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.testing.entmax import entmax_results
from tilefold.testing.entmax_attention import entmax_attention_inputs, entmax_attention_results
from tilefold.testing.lsr_head import lsr_head_inputs, lsr_head_results
from tilefold.testing.maxsim import maxsim_inputs, maxsim_results
from tilefold.testing.token_scatter import token_scatter_inputs, token_scatter_results

pytestmark = pytest.mark.gpu


def maxsim_calls(device: str) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """MaxSim of every kind that reads documents through a TMA descriptor, with a number of rows that no other has."""

    def results(*shape: int, options: dict[str, Any], **layout: Any) -> Callable[[], dict[str, Tensor]]:
        return partial(maxsim_results, maxsim_inputs(*shape, device=device, **layout), **options)

    bf16, half = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
    inputs = maxsim_inputs(3, 11, 13, 17, 64, device=device, **bf16)
    tokens = quantize_tokens(inputs.documents, "int8")
    return {
        "maxsim": results(5, 7, 33, 41, 64, options={}, **bf16),
        "maxsim, holes, fp16": results(5, 7, 33, 43, 64, layout="holes", options={}, **half),
        "maxsim, long queries": results(2, 5, 201, 45, 64, options={}, **bf16),
        "maxsim, normalised": results(5, 7, 33, 47, 64, options={"normalize": True}, **bf16),
        "maxsim, smooth": results(5, 7, 33, 49, 64, options={"temperature": 0.5}, **bf16),
        "maxsim, aligned": results(5, 7, 33, 51, 64, pairing="aligned", options={}, **bf16),
        "maxsim, inference": results(5, 7, 33, 53, 64, options={"needs": ""}, **bf16),
        "maxsim, int8": lambda: {"scores": maxsim(inputs.queries, tokens)},
    }


def other_calls(device: str) -> dict[str, Callable[[], dict[str, Tensor]]]:
    def head(**options: Any) -> Callable[[], dict[str, Tensor]]:
        inputs = lsr_head_inputs(3, 37, 64, 1024, dtype=torch.bfloat16, device=device)
        return partial(lsr_head_results, inputs, **options)

    attention = entmax_attention_inputs(2, 2, 37, 64, dtype=torch.bfloat16, device=device)
    scatter = token_scatter_inputs(3, 37, 1024, device=device)
    x = torch.randn(37, 129, generator=torch.Generator().manual_seed(0)).to(device)
    return {
        "lsr_head": head(),
        "lsr_head, sum": head(pooling="sum"),
        "lsr_head, inference": head(needs=()),
        "entmax_attention": partial(entmax_attention_results, attention),
        "entmax": partial(entmax_results, x, 1.5, x.cos()),
        "token_scatter": partial(token_scatter_results, scatter),
    }


KINDS = [
    *("maxsim", "maxsim, holes, fp16", "maxsim, long queries", "maxsim, normalised", "maxsim, smooth"),
    *("maxsim, aligned", "maxsim, inference", "maxsim, int8", "lsr_head", "lsr_head, sum", "lsr_head, inference"),
    *("entmax_attention", "entmax", "token_scatter"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_without_a_context_may_make_any_call_of_an_operator(kind: str) -> None:
    MAXSIM.forget()
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        call = (maxsim_calls(device) | other_calls(device))[kind]
        torch.cuda.synchronize(device)
        rounds = []
        for _ in range(4):  # the first call, the one that is remembered, and what repeats it: each in a new thread
            with ThreadPoolExecutor(1) as pool:
                rounds.append(pool.submit(call).result())
        rounds.append(call())
        for found, expected in itertools.pairwise(rounds):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_thread_without_a_context_repeats_what_another_one_called_with_tensors_at_other_addresses() -> None:
    inputs = maxsim_inputs(5, 7, 33, 41, 64, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        expected = maxsim_results(inputs)
    moved = maxsim_inputs(5, 7, 33, 41, 64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(maxsim_results, moved).result()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_first_call_of_a_thread_may_be_captured() -> None:
    inputs = maxsim_inputs(5, 7, 33, 41, 64, dtype=torch.bfloat16, device="cuda")
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
