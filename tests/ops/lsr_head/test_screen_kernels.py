"""The screen's kernels one by one, with the integer product by torch: what is positive stays, with
its exact score.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

import triton
import triton.language as tl

from tests.kernels import triton_interpreted
from tests.ops.base import BUILD_OPTIONS
from tilefold.ops._shared.plan import cdiv, power_of_two
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head._triton import screen
from tilefold.testing import assert_within_budget

DEVICE = "cpu" if triton_interpreted() else "cuda"
pytestmark = pytest.mark.skipif(False, reason="") if triton_interpreted() else pytest.mark.gpu
OFFSETS = [0, 16, 64, 96]
D, V, BLOCK = 48, 40, 64
EDGES = ["both rounded", "rows rounded", "weight rounded"]
KINDS = [*EDGES, "trained", "outliers", "zeros", "small", "broken", "everything"]


@triton.jit
def _stays_kernel(
    best_ptr,
    state_ptr,
    terms_ptr,
    bias_ptr,
    kept_ptr,
    B,
    V,
    logit_scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    v = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + b * V + v, mask=v < V, other=0)
    bias = tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    stay = screen.may_be_positive(
        best, v, v < V, b, state_ptr, terms_ptr, bias, B, V, logit_scale, D, True
    )
    tl.store(kept_ptr + b * V + v, stay.to(tl.int8), mask=v < V)


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    rows, weight = (
        torch.randn(OFFSETS[-1], D, generator=generator),
        torch.randn(V, D, generator=generator) * 0.2,
    )
    bias = torch.full((V,), 0.0 if kind == "everything" else -4.0)
    for tensor, other in ((weight, "rows rounded"), (rows, "weight rounded")):
        if (
            kind == other
        ):  # integers of 7 bits with a scale that is a power of two: no error of their own
            tensor[:] = torch.randint(-127, 128, tensor.shape, generator=generator) / 512
            tensor[:, 0] = 127 / 512
    if kind == "outliers":
        rows[::7, 3] *= 60
        weight[::11, 5] *= 40
    elif kind == "zeros":
        rows[:16], weight[::7] = 0, 0
        bias[3] = 0.5
    elif kind == "small":
        rows[16:64] *= 1e-4
        weight[::5] *= 1e-3
        bias[::2] = 0
    elif kind == "broken":
        rows[0, 0], rows[20, 3], weight[5, 5], weight[6, 0], bias[8] = (
            float("nan"),
            float("inf"),
            float("nan"),
            float("-inf"),
            float("nan"),
        )
    rows, weight, bias = (each.half().to(DEVICE) for each in (rows, weight, bias))
    return rows, weight, bias


def empty_state(batch: int) -> Tensor:
    return torch.full(
        (screen.STATE.value + screen.PER_SEQUENCE.value * batch,),
        77,
        dtype=torch.int32,
        device=DEVICE,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uniform", [False, True])
def test_what_is_positive_stays_and_has_its_score(kind: str, uniform: bool) -> None:
    rows, weight, bias = inputs(kind)
    offsets = [0, 48, 96] if uniform else OFFSETS
    if (
        kind in EDGES
    ):  # scores of the first sequence are positive by less than rounding to 8 bits takes away
        bias = ((rows[: offsets[1]].double() @ weight.double().T).amax(0) * (2.0**-10 - 1)).half()
    B, length, T = len(offsets) - 1, 48 if uniform else 0, OFFSETS[-1]
    offset = None if uniform else torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    state, counts = empty_state(B), torch.full((B, 2), 77, dtype=torch.int32, device=DEVICE)
    rows8, weight8 = (
        torch.full(x.shape, 77, dtype=torch.int8, device=DEVICE) for x in (rows, weight)
    )
    terms = torch.full((3, V), float("nan"), device=DEVICE)
    constants = BUILD_OPTIONS | {"D": D, "BLOCK_D": BLOCK, "GROUP": 16, "UNIFORM": uniform}
    limits = (32 * B, B * V)
    kept = torch.full((B, V), -1, dtype=torch.int8, device=DEVICE)
    screen.sample_kernel[(B, 2)](
        weight,
        rows,
        bias,
        offset,
        state,
        counts,
        B,
        V,
        length,
        1.0,
        D=D,
        BLOCK_V=16,
        BLOCK_T=16,
        BLOCK_K=16,
        MOST_T=32,
        HAS_BIAS=True,
        UNIFORM=uniform,
        **BUILD_OPTIONS,
    )
    assert not state.any()
    screen.largest_kernel[(T // 16,)](
        rows,
        offset,
        state,
        counts,
        B,
        T,
        length,
        2 * B,
        limits[0],
        BLOCK_SAMPLES=8,
        **constants,
    )
    sampled = int(state[screen.N_SAMPLED.value]) / (32 * B)
    assert (
        sampled == 1 if kind == "everything" else sampled < 0.6 or kind not in ("trained", "small")
    )
    screen.round_kernel[(-(-V // 16) + T // 16 if uniform else 2,)](
        weight,
        rows,
        offset,
        state,
        weight8,
        rows8,
        terms,
        kept,
        B,
        V,
        T,
        length,
        limits[0],
        **constants,
    )
    assert bool((kept == 0).all())
    parts = [slice(*pair) for pair in itertools.pairwise(offsets)]
    best = torch.stack([(rows8[part].float() @ weight8.float().T).amax(0) for part in parts]).int()
    _stays_kernel[(B,)](
        best,
        state,
        terms,
        bias,
        kept,
        B,
        V,
        1.0,
        D=D,
        BLOCK=BLOCK,
        **BUILD_OPTIONS,
    )
    logits = [rows[part].double() @ weight.double().T + bias.double() for part in parts]
    exact = torch.stack([logit.amax(0) for logit in logits])
    assert bool(kept[~(exact <= 0)].all())  # NaN stays, too
    if kind in ("trained", "small"):
        assert kept.float().mean() < 0.6  # and the bound is of use

    entries = torch.full((B, V), -1, dtype=torch.int32, device=DEVICE)
    out, winner = (
        torch.full((B, V), 7.0, device=DEVICE),
        torch.full((B, V), 7, dtype=torch.int32, device=DEVICE),
    )
    screen.list_kernel[(B, 1)](
        kept,
        state,
        entries,
        offset,
        out,
        winner,
        B,
        V,
        length,
        *limits,
        BLOCK=BLOCK,
        UNIFORM=uniform,
        WITH_WINNERS=True,
        NO_WINNER=-1,
        **BUILD_OPTIONS,
    )
    screen.refine_kernel[(2,)](
        weight,
        rows,
        bias,
        offset,
        None,
        state,
        entries,
        out,
        winner,
        B,
        V,
        T,
        length,
        *limits,
        1.0,
        D=D,
        BLOCK_V=16,
        BLOCK_T=32,
        BLOCK_K=16,
        BLOCK_B=16,
        ACTIVATION="relu",
        HAS_BIAS=True,
        HAS_POSITIONS=False,
        HAS_SCALE=False,
        WITH_WINNERS=True,
        UNIFORM=uniform,
        **BUILD_OPTIONS,
    )
    expected = torch.where(exact > 0, exact, exact * 0)
    usual = expected.isfinite()
    assert torch.equal(out.isfinite(), usual) and torch.equal(out.isnan(), expected.isnan())
    assert_within_budget(out[usual], expected[usual], torch.float32)
    places = torch.stack([logit.argmax(0) for logit in logits])
    active = usual & (expected > 0)
    assert torch.equal(winner[active].long(), places[active])


def test_rows_after_empty_sequences_have_the_scale_of_their_own() -> None:
    rows, weight, _ = inputs("trained")
    rows[3] = 100.0  # of the first group alone
    offsets = [0, 0, 0, 48, 48, 96]
    B, T = len(offsets) - 1, OFFSETS[-1]
    offset = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    state, counts = empty_state(B).zero_(), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows8, weight8 = (
        torch.full(x.shape, 77, dtype=torch.int8, device=DEVICE) for x in (rows, weight)
    )
    terms, kept = (
        torch.empty(3, V, device=DEVICE),
        torch.empty(B, V, dtype=torch.int8, device=DEVICE),
    )
    constants = BUILD_OPTIONS | {"D": D, "BLOCK_D": BLOCK, "GROUP": 16, "UNIFORM": False}
    screen.largest_kernel[(T // 16,)](
        rows,
        offset,
        state,
        counts,
        B,
        T,
        0,
        1,
        B * V,
        BLOCK_SAMPLES=2,
        **constants,
    )
    screen.round_kernel[(-(-V // 16) + T // 16,)](
        weight,
        rows,
        offset,
        state,
        weight8,
        rows8,
        terms,
        kept,
        B,
        V,
        T,
        0,
        B * V,
        **constants,
    )
    largest = state[screen.STATE.value :][:B].view(torch.float32)
    parts = [rows[start:end].float().abs() for start, end in itertools.pairwise(offsets)]
    assert largest.tolist() == [float(part.max()) if len(part) else 0.0 for part in parts]
    scale = (largest / 127)[[2, 4]].repeat_interleave(48)[:, None]
    assert float((rows.float() - scale * rows8.float()).abs().div(scale).max()) < 0.51


@pytest.mark.parametrize("dim", [1008, 2048, 4096])
def test_norms_of_long_rows_are_upper_bounds(dim: int) -> None:
    n_columns, n_rows, batch = 9, 32, 2
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(n_rows, dim, generator=generator).half().to(DEVICE)
    weight = torch.randn(n_columns, dim, generator=generator).half().to(DEVICE)
    weight[3] = weight[3].abs().amax()  # the largest norm that integers of 7 bits can have
    rows_at_a_time = configs.rounded_rows(dim, group=16)
    constants = BUILD_OPTIONS | {
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "GROUP": rows_at_a_time,
        "UNIFORM": True,
    }
    length = n_rows // batch
    state = empty_state(batch).zero_()
    counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rounded_rows = torch.full_like(rows, 77, dtype=torch.int8)
    rounded_weight = torch.full_like(weight, 77, dtype=torch.int8)
    terms = torch.full((3, n_columns), float("nan"), device=DEVICE)
    kept = torch.full((batch, n_columns), -1, dtype=torch.int8, device=DEVICE)
    screen.largest_kernel[(n_rows // rows_at_a_time,)](
        rows,
        None,
        state,
        counts,
        batch,
        n_rows,
        length,
        1,
        0,
        BLOCK_SAMPLES=2,
        **constants,
    )
    n_groups = cdiv(n_columns, rows_at_a_time) + n_rows // rows_at_a_time
    screen.round_kernel[(n_groups,)](
        weight,
        rows,
        None,
        state,
        rounded_weight,
        rounded_rows,
        terms,
        kept,
        batch,
        n_columns,
        n_rows,
        length,
        0,
        **constants,
    )
    assert bool((kept == 0).all())
    weight_scale, weight_norm, weight_error = terms.double()
    quotient = weight.double() / weight_scale[:, None]
    integers = rounded_weight.double()
    assert float((quotient - integers).abs().max()) < 0.51
    assert bool((integers.norm(dim=1) <= weight_norm).all())
    assert bool((quotient.norm(dim=1) <= weight_norm).all())
    assert bool(((quotient - integers).norm(dim=1) <= weight_error).all())

    numbers = state[screen.STATE.value :].view(torch.float32).double().view(-1, batch)
    row_scale = (numbers[0] / 127).repeat_interleave(length)
    quotient = rows.double() / row_scale[:, None]
    error = (quotient - rounded_rows.double()).norm(dim=1).view(batch, length)
    assert bool((quotient.norm(dim=1).view(batch, length).amax(1) <= numbers[1]).all())
    assert bool((error.amax(1) <= numbers[2]).all())
    assert bool((weight_norm <= quotient.new_full((), 127.1 * dim**0.5)).all())  # and of use


@pytest.mark.parametrize("dim", [768, 4096])
def test_the_slack_of_a_norm_covers_squares_added_in_any_order(dim: int) -> None:
    squares = torch.full((dim,), 126.7, dtype=torch.float32).square()
    one_by_one = torch.zeros(())
    for square in squares:
        one_by_one += square
    exact = squares.double().sum().sqrt()
    norm = one_by_one.double().sqrt()
    slack = screen.SLACK.value + dim * screen.SUM_SLACK.value
    assert norm * (1 + slack) >= exact
    assert slack < 2.0**-10  # next to an error of one part in 250 by rounding
    assert dim == 768 or norm * (1 + screen.SLACK.value) < exact


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(48, 16), (768, 16), (1024, 16), (1040, 8), (2048, 8), (2064, 4), (4096, 4)],
)
def test_longer_rows_are_rounded_fewer_at_a_time(dim: int, expected: int) -> None:
    assert configs.rounded_rows(dim, group=16) == expected
