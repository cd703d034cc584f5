"""What entmax attention and the token scatter launch, by shapes alone: no kernel runs and no tensor
has memory.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="plans name kernels")

from tests.ops.base import AttentionOptions as Options
from tests.ops.base import (
    AttentionSaved,
    AttentionTensors,
    Buffer,
    Launch,
    Plan,
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    Setting,
    TorchStep,
    releases,
)
from tests.ops.samples import meta
from tilefold.ops.entmax_attention import plans
from tilefold.ops.entmax_attention.api import live_shape, outputs
from tilefold.ops.token_scatter import plans as scatter_plans

HOPPER = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
WALKED = ["roots_kernel", "output_kernel"]


def problem(
    keys: int,
    packed: bool = False,
    alpha: float = 1.5,
    **options: Any,
) -> tuple[AttentionTensors, Options]:
    q = torch.empty(
        (keys, 2, 64) if packed else (1, 2, keys, 64),
        dtype=torch.bfloat16,
        device="meta",
    )
    offsets = torch.empty(4, dtype=torch.int32, device="meta") if packed else None
    asked = {
        "alpha_value": alpha,
        "causal": False,
        "window": -1,
        "scale": 0.125,
        "dropout_p": 0.0,
    } | options
    return AttentionTensors(q, q, q, None, None, offsets, offsets, None), Options(
        **asked,
        max_seqlen_k=keys,
    )


def launches(plan: Plan) -> dict[str, Launch]:
    return {step.kernel.__name__: step for step in plan.steps if isinstance(step, Launch)}


def gradients(tensors: AttentionTensors, options: Options, *needs: bool) -> Plan:
    live = torch.empty(
        live_shape(tensors, options, HOPPER.capability),
        dtype=torch.int32,
        device="meta",
    )
    saved = AttentionSaved(
        *tensors,
        tensors.q,
        torch.empty(4, *tensors.stats_shape, device="meta"),
        live,
    )
    return plans.backward(tensors.q, saved, options, needs, HOPPER)


@pytest.mark.parametrize(
    ("keys", "options", "capability", "kernels", "lists"),
    [
        (256, {}, (9, 0), ["resident_kernel"], False),
        (256, {"causal": True}, (9, 0), WALKED, False),
        (128, {"causal": True}, (9, 0), ["resident_kernel"], False),
        (4096, {"window": 32}, (9, 0), ["resident_kernel"], False),
        (128, {}, (10, 0), WALKED, False),
        (1024, {}, (9, 0), WALKED, False),
        (1025, {}, (9, 0), WALKED, True),
    ],
)
def test_the_way_of_rows_follows_the_keys_that_a_tile_sees(
    keys: int,
    options: dict[str, Any],
    capability: tuple[int, int],
    kernels: list[str],
    lists: bool,
) -> None:
    tensors, asked = problem(keys, **options)
    plan = plans.forward(tensors, asked, True, HOPPER._replace(capability=capability))
    assert list(launches(plan)) == kernels and ("live" not in plan.skipped_results) == lists
    assert (min(live_shape(tensors, asked, capability)) > 0) == lists


def test_the_lists_of_a_packed_gradient_grow_with_the_tokens_and_not_with_their_square() -> None:
    room = []
    for tokens in (1 << 16, 1 << 20):
        tensors, options = problem(tokens, packed=True)
        buffers = gradients(
            tensors,
            options._replace(max_seqlen_k=4096),
            True,
            True,
            True,
            False,
        ).buffers
        room.append(sum(math.prod(buffer.shape) for buffer in buffers.values()) / tokens)
    assert room[1] == pytest.approx(room[0], rel=0.01)


def test_what_nobody_reads_is_not_made() -> None:
    resident, walked = (plans.forward(*problem(keys), False, HOPPER) for keys in (128, 512))
    assert resident.skipped_results == {"out2", "stats", "live"}
    assert "stats" in walked.skipped_results and "rows" in walked.buffers  # between the two kernels
    counted = plans.forward(*problem(128, support=True), False, HOPPER)
    assert "stats" not in counted.skipped_results and "out2" in counted.skipped_results


def test_gradients_launch_what_is_needed_with_lists_where_there_is_a_map() -> None:
    for keys, lists in ((512, []), (4096, ["key_lists_kernel"])):
        assert list(launches(gradients(*problem(keys), True, False, False, False))) == [
            *lists,
            "dq_kernel",
        ]
    every = ["tables_kernel", "key_lists_kernel", "dq_kernel", "query_lists_kernel", "dkv_kernel"]
    assert list(launches(gradients(*problem(4096, packed=True), True, True, True, False))) == every


def test_a_last_dimension_of_other_strides_is_copied() -> None:
    tensors, options = problem(64)
    turned: Tensor = tensors.q.transpose(2, 3).contiguous().transpose(2, 3)
    plan = plans.forward(tensors._replace(q=turned), options, True, HOPPER)
    made = [
        step.output if isinstance(step, TorchStep) else step.kernel.__name__ for step in plan.steps
    ]
    assert made == ["q", "resident_kernel"]
    assert (
        outputs(tensors._replace(q=turned), options, True)[0].strides
        == tensors.q.contiguous().stride()
    )


@pytest.mark.parametrize(
    ("release", "option"),
    [((3, 8), None), ((3, 9), "--regAllocOptLevel=4")],
    ids=str,
)
def test_what_the_assembler_is_told_reaches_the_launches_of_releases_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
    release: tuple[int, int],
    option: str | None,
) -> None:
    monkeypatch.setattr(releases, "release", lambda: release)
    for keys in (512, 4096):
        steps = launches(plans.forward(*problem(keys), True, HOPPER))
        assert [steps[name].constants.get("ptx_options") for name in WALKED] == [option, option]
        assert [steps[name].constants["maxnreg"] for name in WALKED] == [128, 168]


def scattered(
    *shape: int,
    cu_seqlens: Tensor | None = None,
    training: bool = True,
    **options: Any,
) -> Plan:
    dtype = options.get("out_dtype", torch.float32)
    tensors = ScatterTensors(
        meta(*shape, dtype=dtype),
        meta(*shape, dtype=torch.int64),
        None,
        cu_seqlens,
    )
    asked = {
        "vocab_size": 40,
        "reduce": "max",
        "activation": "relu",
        "ignore_ids": (),
        "out_dtype": dtype,
    } | options
    return scatter_plans.forward(tensors, ScatterOptions(**asked), training, HOPPER)


@pytest.mark.parametrize(
    ("tokens", "dtype", "table"),
    [
        (65_536, torch.bfloat16, None),
        (65_537, torch.bfloat16, Buffer((1, 40), torch.int32)),
        (65_537, torch.float32, None),
        (65_537, torch.float64, None),
    ],
)
def test_the_scores_serve_as_the_table_where_they_can_hold_positions(
    tokens: int,
    dtype: torch.dtype,
    table: object,
) -> None:
    plan = scattered(1, tokens, out_dtype=dtype)
    assert plan.buffers.get("table") == table and plan.fills == {"scores": 0}
    assert launches(plan)["scatter_kernel"].tensors[4:6] == (
        "scores",
        "scores" if table is None else "table",
    )


def test_scratch_is_twelve_bytes_a_token_and_twenty_for_sums() -> None:
    for reduce, expected in (("max", 12), ("sum", 20)):
        buffers = scattered(3, 7, reduce=reduce).buffers.values()
        assert sum(buffer.shape[0] * buffer.dtype.itemsize for buffer in buffers) == expected * 21


def test_nothing_is_launched_for_nothing() -> None:
    for shape in ((0, 5), (2, 0)):
        assert scattered(*shape).steps == ()
    assert scattered(0, cu_seqlens=meta(1, dtype=torch.int32)).steps == ()
    assert scattered(0, cu_seqlens=meta(3, dtype=torch.int32)).steps  # tells broken offsets


def test_what_is_not_contiguous_is_copied_first() -> None:
    weights, ids = meta(5, 2)[:, 0][None], meta(1, 5, dtype=torch.int64)
    options = ScatterOptions(40, "max", "relu", (), torch.float32)
    copy, _ = scatter_plans.forward(
        ScatterTensors(weights, ids, None, None),
        options,
        True,
        HOPPER,
    ).steps
    assert isinstance(copy, TorchStep) and copy.output == "weights"
    saved = ScatterSaved(meta(1, 5), ids, meta(1, 5, dtype=torch.uint8), None)
    plan = scatter_plans.backward(meta(40, 1).T, saved, options, (True,), HOPPER)
    assert len(plan.steps) == 1 and launches(plan)["gather_kernel"].numbers == (
        1,
        5,
        5,
        1,
        1,
    )  # strides of the gradient are numbers
