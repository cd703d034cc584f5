"""Gradients of the specifications, and of the tiled paths that have fp64 roots, agree with finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.base import ACTIVATIONS
from tests.ops.samples import Sample, attend, head, paired, scattered
from tilefold.ops import xtr_scores
from tilefold.testing.maxsim import PAIRINGS
from tilefold.testing.padding import LAYOUTS

F64 = torch.float64
POOLINGS = ("max", "sum", "mean", "cls", "last")
HOLES = [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
TOKENS = {"input_ids": [[1, 1, 2, 0, 1, 2], [3, 3, 3, 3, 0, 0], [0, 1, 2, 3, 0, 1]], "vocab_size": 4,
          "attention_mask": [[1] * 6, [0, 1, 0, 1, 1, 0], [0] * 6], "ignore_ids": (0,)}  # fmt: skip
LATE: list[dict[str, Any]] = [{"normalize": True}, {"temperature": 0.4}, {"mask_mode": "zero", "reduction": "mean"}]
SAMPLES = [
    *(head(pooling, 3, 4, 3, vocab=5, dtype=F64, activation=activation, logit_scale=-1.5, attention_mask=HOLES)
      for pooling, activation in itertools.product(POOLINGS, ACTIVATIONS)),
    *(Sample("token_scatter", scattered, ((3, 6),), TOKENS | {"reduce": reduce, "activation": activation}, F64)
      for reduce, activation in itertools.product(("max", "sum"), ACTIVATIONS)),
    *(paired(pairing, layout, 3, 2, 2, 4, 3, dtype=F64, **options)
      for pairing, layout, options in itertools.product(PAIRINGS, LAYOUTS, LATE)),
    *(paired("all", layout, 3, 3, 2, 4, 3, dtype=F64, function=xtr_scores, top_k=4, normalize=normalize, impl=impl)
      for layout, normalize, impl in itertools.product(LAYOUTS, (False, True), ("reference", "tiled"))),
    *(Sample("entmax_attention", attend, (*[(1, 2, 4, 3)] * 3, (2,)), {"causal": True, "impl": impl}, F64)
      for impl in ("reference", "tiled")),
]  # fmt: skip


@pytest.mark.skipif(triton_interpreted(), reason="nothing here depends on the kernels")
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.name} {sample.options}"[:60])
def test_gradients_agree_with_finite_differences(sample: Sample) -> None:
    options = {"impl": "reference"} | sample.given("cpu")
    assert torch.autograd.gradcheck(lambda *leaves: sample.function(*leaves, **options), sample.leaves("cpu"))
