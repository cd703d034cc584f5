"""Public functions of operators compile whole, with gradients like those of eager calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.samples import MASK, OFFSETS, Sample, attention, rows, scatter

SCATTERS = [
    scatter(reduce=reduce, ignore_ids=(2,), **layout)
    for reduce in ("max", "sum")
    for layout in ({}, {"attention_mask": MASK}, {"cu_seqlens": OFFSETS})
]
CALLS = [rows(), rows((1,)), attention(causal=True), attention(learned=True, key_padding_mask=MASK), *SCATTERS]


@pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sample", CALLS, ids=lambda sample: f"{sample.name} {' '.join(sample.options)}")
def test_a_public_function_compiles_whole_with_gradients(sample: Sample, device: str) -> None:
    given = sample.given(device)

    def loss(*leaves: Tensor) -> Tensor:
        scores: Tensor = sample.function(*(2 * leaf for leaf in leaves), **given)
        return ((scores + 1) ** 2).sum()

    torch._dynamo.reset()
    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = sample.leaves(device)
        function(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*grads)
