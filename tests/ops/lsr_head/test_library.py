"""The LSR head under torch.compile and autocast, and what memory it takes; opcheck:
``shared/test_compiled.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.base import Buffer, Setting, _reset_resident_peak
from tests.ops.base import head_problem as _problem
from tests.ops.base import head_tiles as _tiles
from tests.ops.lsr_head.helpers import F16, F32, F64, INTERPRETED, POOLINGS, leaves_of
from tests.ops.matching import assert_lsr_head_matches
from tilefold.bench.timing import in_fresh_process, resident_peak_mib
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget
from tilefold.testing.lsr_head import (
    LSRHeadInputs,
    lsr_head_inputs,
    lsr_head_results,
    lsr_head_truth,
    with_one_answer,
)

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("device", DEVICES)
def test_inductor_compiles_the_head_among_others(
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # its usual cache may hold code for the instructions of another run's (emulated) CPU, which then
    # gives NaN
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # four small kernels are built sooner than the headers that they would share, or than trials of
    # each instruction set
    for config, name, value in (
        (torch._inductor.config, "cpp_cache_precompile_headers", False),
        (torch._inductor.config.cpp, "vec_isa_ok", True),
    ):
        monkeypatch.setattr(config, name, value, raising=False)
    inputs = lsr_head_inputs(3, 9, 16, 21, layout="right", device=device)

    @torch.compile(fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scores = lsr_head(torch.nn.functional.gelu(hidden), weight, bias, **inputs.layout)
        return (scores.mean(dim=0) ** 2).sum()

    mine, stock_result = leaves_of(inputs), leaves_of(inputs)
    loss(*mine).backward()
    scores = lsr_head(torch.nn.functional.gelu(stock_result[0]), *stock_result[1:], **inputs.layout)
    (scores.mean(dim=0) ** 2).sum().backward()
    for a, b in zip(mine, stock_result, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_changing_scale_does_not_break_the_graph() -> None:
    inputs = lsr_head_inputs(3, 8, 16, 21)
    compiled = torch.compile(lsr_head, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 0.5, 0.25, 0.125):
        expected = lsr_head(inputs.hidden, inputs.weight, logit_scale=scale)
        torch.testing.assert_close(
            compiled(inputs.hidden, inputs.weight, logit_scale=scale),
            expected,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_autocast_sets_the_dtype_of_scores_and_not_of_gradients(
    pooling: str,
    device: str,
    dtype: torch.dtype,
) -> None:
    inputs = with_one_answer(
        lsr_head_inputs(5, 9, 16, 21, layout="right", device=device).cast(dtype).cast(F32),
        pooling,
    )
    hidden = inputs.hidden.to(
        dtype,
    ).requires_grad_()  # what layers before the head hand out under autocast
    _, weight, bias = leaves_of(inputs)
    with torch.autocast(device, dtype=dtype):
        scores = lsr_head(hidden, weight, bias, pooling=pooling, **inputs.layout)
    scores.backward(inputs.dscores.to(dtype))
    assert scores.dtype == dtype
    truth = lsr_head_truth(inputs, pooling=pooling)
    assert_within_budget(scores, truth["scores"])
    for name, leaf, kind in (
        ("dhidden", hidden, dtype),
        ("dweight", weight, F32),
        ("dbias", bias, F32),
    ):
        assert leaf.grad.dtype == kind
        assert_within_budget(leaf.grad, truth[name], dtype, "gradient_bound", name=name)


def test_autocast_leaves_fp64_alone() -> None:
    inputs = lsr_head_inputs(2, 3, 8, 5, dtype=F64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lsr_head(inputs.hidden, inputs.weight).dtype == F64
        with pytest.raises(TypeError, match="weight must have the dtype of hidden"):
            lsr_head(inputs.hidden.float(), inputs.weight)


# The bound of memory that the README of the room states (the peaks of a process that does nothing
# else), and parts of long sequences put together

MIB = 2**20

VOCAB, DIM = 4096, 4
# pooling, with gradients, lengths
CASES: dict[str, tuple[str, bool, list[int]]] = {
    "one long": ("max", False, [20_000]),
    "one long among short": ("max", False, [1] * 300 + [20_000]),
    "winners": ("max", True, [45_000, 3]),
    "winners of odd lengths": ("max", True, [17] * 60),  # copied before the winner is looked for
    "sum": ("sum", True, [10_000]),
    "mean of ragged": ("mean", False, [*range(40), 20_000]),
}


def a_call(
    pooling: str,
    training: bool,
    lengths: list[int],
    vocab: int = VOCAB,
) -> Callable[[], None]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    hidden = torch.randn(int(offsets[-1]), DIM, requires_grad=training)
    weight = torch.randn(vocab, DIM, requires_grad=training)

    def run() -> None:
        scores = lsr_head(hidden, weight, cu_seqlens=offsets, pooling=pooling)
        if training:
            scores.backward(torch.ones_like(scores))

    return run


def peaks() -> dict[str, float]:
    """MiB of each case, in a process that did nothing else."""
    torch.set_num_threads(1)
    for pooling, training, _ in CASES.values():
        a_call(pooling, training, [3, 40], 8)()  # what is loaded and started once
    return {name: resident_peak_mib(a_call(*case)) for name, case in CASES.items()}


def stated_bound(lengths: list[int], lists: bool) -> float:
    """MiB that the README of the room states, in fp32, with the scores and gradients that are
    handed out.
    """
    tokens, batch = sum(lengths), len(lengths)
    held = 4 * (3 * tokens * DIM + 32_768 * DIM + 12 * batch * VOCAB)
    results = 4 * (tokens * DIM + VOCAB * DIM + batch * VOCAB)
    return (held + results) / MIB + (320 if lists else 96)


@pytest.mark.slow  # in a fresh process, with a real vocabulary
@pytest.mark.skipif(not _reset_resident_peak(), reason="the peak of a process cannot be reset here")
def test_memory_stays_below_the_stated_bound_in_every_layout() -> None:
    actual = in_fresh_process(peaks)
    for name, (pooling, training, lengths) in CASES.items():
        bound = stated_bound(lengths, lists=training and pooling == "max")
        assert actual[name] <= bound, name
        # else the case would pass with all logits in memory
        assert bound < sum(lengths) * VOCAB * 4 / MIB or max(lengths) < 10_000, name


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "BLOCK_V", 16)
    monkeypatch.setattr(_tiles, "TILE_ELEMENTS", 16 * 20)  # 20 tokens a tile


@pytest.mark.parametrize("layout", ["full", "right", "holes", "packed"])
@pytest.mark.parametrize("length", [20, 21, 40, 75])
@pytest.mark.parametrize("pooling", ["max", "sum", "mean"])
def test_parts_of_sequences_are_joined(
    monkeypatch: pytest.MonkeyPatch,
    pooling: str,
    length: int,
    layout: str,
) -> None:
    cut_small(monkeypatch)
    inputs = lsr_head_inputs(5, length, 8, 40, layout=layout)
    assert_lsr_head_matches(inputs, pooling=pooling, impl="tiled")
    scores_alone = lsr_head_results(inputs, pooling=pooling, impl="tiled", needs=())["scores"]
    assert torch.equal(
        scores_alone,
        lsr_head_results(inputs, pooling=pooling, impl="tiled")["scores"],
    )


def test_ties_and_nan_across_the_parts_of_a_sequence_are_settled_as_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_small(monkeypatch)
    hidden = torch.randint(-2, 3, (3, 90, 3), generator=torch.Generator().manual_seed(0)).float()
    hidden[1, 50] = hidden[1, 70] = torch.nan
    hidden[2] = 1.0  # every token ties
    dscores = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    weight = torch.randint(-2, 3, (30, 3), generator=torch.Generator().manual_seed(2)).float()
    inputs = LSRHeadInputs(hidden, weight, None, None, None, dscores)
    results = lsr_head_results(inputs, impl="tiled", needs=("hidden",), activation="none")
    truth = lsr_head_results(inputs, impl="reference", needs=("hidden",), activation="none")
    for name, value in truth.items():
        torch.testing.assert_close(results[name], value, equal_nan=True)


@pytest.mark.parametrize(("batch", "blocks"), [(64, 2), (1, 1)])
def test_lists_of_the_hidden_gradient_are_gone_before_that_of_the_weight_is_allocated(
    batch: int,
    blocks: int,
) -> None:
    pytest.importorskip("triton", reason="plans name kernels")
    from tests.ops.launching import Program
    from tilefold.ops.lsr_head import plans

    hidden, weight, scores = (
        torch.empty(shape, device="meta") for shape in ((batch, 16, 8), (9000, 8), (batch, 9000))
    )
    saved = _problem.HeadSaved(hidden, None, None, weight, None, scores, scores.to(torch.uint16))
    options = _problem.HeadOptions("max", "relu", 1.0, torch.float32, torch.float32, torch.float32)
    setting = Setting((9, 0), 4, tf32=False, aligned=True, failed_kernels=frozenset())
    plan = plans.backward(scores, saved, options, (True, True, False), setting)
    results = {
        "dhidden": Buffer((batch, 16, 8), torch.float32),
        "dweight": Buffer((9000, 8), torch.float32),
    }
    program = Program(
        plan,
        ("dscores", *saved._fields),
        results | {"dbias": None},
        torch.device("cpu"),
        True,
    )
    made = [tuple(each.shape) for turn in program.steps for each in turn.templates]
    order = [shape for shape in made if len(shape) > 1]
    assert order == [(batch, 16, 8), (9000, 8)]
    if blocks == 1:  # all at once, and scratch in a block
        assert [len(turn.templates) for turn in program.steps] == [3] + [0] * (len(plan.steps) - 1)
    else:
        alone = [
            turn
            for turn in program.steps
            if turn.templates and turn.templates[0].shape == (9000, 8)
        ]
        assert (
            alone
            and sum(len(turn.released) for turn in program.steps[: program.steps.index(alone[0])])
            >= 3
        )
