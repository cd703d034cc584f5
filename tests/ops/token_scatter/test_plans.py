"""What the token scatter launches, by shapes alone: no kernel runs and no tensor has memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="plans name kernels")

from tests.ops.base import Buffer, Launch, Plan, ScatterOptions, ScatterSaved, ScatterTensors, Setting, TorchStep, View
from tilefold.ops.token_scatter import plans

SETTING = Setting((9, 0), 132, tf32=False, aligned=True, given_up=frozenset())


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(*shape: int, cu_seqlens: Tensor | None = None, training: bool = True, **options: Any) -> Plan:
    dtype = options.get("out_dtype", torch.float32)
    tensors = ScatterTensors(meta(*shape, dtype=dtype), meta(*shape, dtype=torch.int64), None, cu_seqlens)
    asked = {"vocab_size": 40, "reduce": "max", "activation": "relu", "ignore_ids": (), "out_dtype": dtype} | options
    return plans.forward(tensors, ScatterOptions(**asked), training, SETTING)


def launch(plan: Plan) -> Launch:
    *_, last = plan.steps
    assert isinstance(last, Launch)
    return last


@pytest.mark.parametrize(
    ("tokens", "dtype", "table"),
    [
        (65_536, torch.bfloat16, View("scores", torch.uint16)),
        (65_537, torch.bfloat16, Buffer((1, 40), torch.int32)),
        (65_537, torch.float32, View("scores", torch.int32)),
        (65_537, torch.float64, View("scores", torch.int64)),
    ],
)
def test_the_scores_serve_as_the_table_where_they_can_hold_positions(
    tokens: int, dtype: torch.dtype, table: object
) -> None:
    plan = forward(1, tokens, out_dtype=dtype)
    assert plan.buffers["table"] == table and plan.fills == {"scores": 0}


def test_scratch_is_twelve_bytes_a_token_and_twenty_for_sums() -> None:
    for reduce, expected in (("max", 12), ("sum", 20)):
        buffers = [each for each in forward(3, 7, reduce=reduce).buffers.values() if isinstance(each, Buffer)]
        assert sum(each.shape[0] * each.dtype.itemsize for each in buffers) == expected * 21


def test_nothing_is_launched_for_nothing() -> None:
    for shape in ((0, 5), (2, 0)):
        assert forward(*shape).steps == ()
    assert forward(0, cu_seqlens=meta(1, dtype=torch.int32)).steps == ()
    assert forward(0, cu_seqlens=meta(3, dtype=torch.int32)).steps  # tells broken offsets


def test_what_is_not_contiguous_is_copied_first() -> None:
    weights, ids = meta(5, 2)[:, 0][None], meta(1, 5, dtype=torch.int64)
    options = ScatterOptions(40, "max", "relu", (), torch.float32)
    copy, _ = plans.forward(ScatterTensors(weights, ids, None, None), options, True, SETTING).steps
    assert isinstance(copy, TorchStep) and copy.makes == "weights"
    saved = ScatterSaved(meta(1, 5), ids, meta(1, 5, dtype=torch.uint8), None)
    plan = plans.backward(meta(40, 1).T, saved, options, (True,), SETTING)
    assert len(plan.steps) == 1 and launch(plan).numbers == (1, 5, 5, 1, 1)  # strides of the gradient are numbers
