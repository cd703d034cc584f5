"""Public functions compile whole, once for batches of all sizes, with gradients like those of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels import triton_interpreted
from tests.ops.samples import MASK, OFFSETS, Sample, attention, head, late, rows, scatter, scattered

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
POOLINGS = ("max", "sum", "mean", "cls", "last")
LAYOUTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((), {}), ((2, 21, 16), {"attention_mask": MASK}), ((32, 16), {"cu_seqlens": OFFSETS}),
]  # fmt: skip
SCATTERS = [scatter(reduce=reduce, ignore_ids=(2,), **layout) for reduce in ("max", "sum") for _, layout in LAYOUTS]
HEADS = [head(pooling, *shape, **layout) for pooling in POOLINGS for shape, layout in LAYOUTS]
CALLS = [rows(), rows((1,)), attention(causal=True), attention(learned=True, key_padding_mask=MASK)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sample", [*CALLS, *SCATTERS, *HEADS], ids=lambda each: f"{each.name} {[*each.options]}")
def test_a_public_function_compiles_whole_with_gradients(sample: Sample, device: str) -> None:
    given = sample.given(device)

    def loss(*leaves: Tensor) -> Tensor:
        scores: Tensor = sample.function(*(2 * leaf for leaf in leaves), **given)
        return ((scores + 1) ** 2).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = sample.leaves(device)
        with torch.no_grad():
            alone = function(*leaves)
        function(*leaves).backward()
        results.append([alone, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def holes(count: int, length: int) -> list[list[int]]:
    return (torch.arange(count * length).view(count, length) % 5).tolist()


def ends(count: int, length: int) -> list[int]:
    return [*range(0, count * length + 1, length)]


def a_head(pooling: str, packed: bool) -> Callable[[int, int], Sample]:
    def sample(count: int, length: int) -> Sample:
        if packed:
            return head(pooling, count * length, 16, logit_scale=0.5, cu_seqlens=ends(count, length))
        return head(pooling, count, length, 16, logit_scale=0.5, attention_mask=holes(count, length))

    return sample


def a_scatter(count: int, length: int) -> Sample:
    ids = (torch.arange(count * length).view(count, length) * 7 % 40).tolist()
    given = {"input_ids": ids, "attention_mask": holes(count, length)}
    return Sample("token_scatter", scattered, ((count, length),), given)


GROWING: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    **{f"lsr_head, {pooling}, {packed}": (a_head(pooling, packed == "packed"), 2)
       for pooling in ("max", "mean", "last") for packed in ("padded", "packed")},
    "maxsim": (lambda n, length: late((n, 4, 16), (n + 1, length, 16)), 2),
    "maxsim, packed": (lambda n, length: late((4 * n, 16), (length * n + length, 16), cu_seqlens_q=ends(n, 4),
                                              cu_seqlens_d=ends(n + 1, length)), 2),
    "token_scatter": (a_scatter, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_batches_of_other_sizes_reuse_one_dynamic_graph(name: str) -> None:
    make, most = GROWING[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make(3, 8).function, fullgraph=True, dynamic=True, backend=counter)
    for count, length in ((3, 8), (5, 13), (6, 21), (9, 40)):
        sample = make(count, length)
        leaves, given = sample.leaves("cpu"), sample.given("cpu")
        results = []
        for call in (compiled, sample.function):
            scores = call(*leaves, **given)
            results.append([scores, *torch.autograd.grad(scores.sum(), leaves)])
        torch.testing.assert_close(*results)
    assert counter.frame_count <= most, f"{counter.frame_count} compilations for four shapes"
