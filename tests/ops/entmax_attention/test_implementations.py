"""Every implementation of alpha-entmax attention within its error budget of the reference: options,
layouts, dtypes.

The same tests serve the tiled path on the CPU, the kernels on a GPU, and the kernels interpreted on
the CPU, where the tiles are small: 32 keys are resident, 40 are walked by blocks of 16. On a GPU
the tiles are large, so that lengths of a test would take one way only: some tests force each in
turn.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import ConfigRow
from tests.ops.conftest import Target
from tests.ops.matching import assert_entmax_attention_matches
from tests.ops.samples import assert_same_bits
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention import configs
from tilefold.testing.entmax_attention import entmax_attention_inputs, entmax_attention_results
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
DTYPES = (
    (torch.float32, torch.float16)
    if INTERPRETED
    else (torch.float32, torch.float16, torch.bfloat16)
)
LENGTHS = (20, 40) if INTERPRETED else (50, 150)  # resident, and by blocks
BLOCKWISE = LENGTHS[1:] if INTERPRETED else LENGTHS  # interpreting takes seconds a case
LONG = 44 if INTERPRETED else 330
WAYS = {"short": {"resident": 0, "short": 1 << 20}, "listed": {"resident": 0, "short": 0}}
FORCED = ["short"] if INTERPRETED else [*WAYS]  # interpreted, other tests walk lists
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": 0.3},
    {"window": 7},
    {"causal": True, "window": 5},
    {"alpha": 1.0, "scale": -0.2},
    {"alpha": 1.25, "scale": 0.3},
    {"alpha": 1.3, "causal": True},
    {"alpha": 2.0},
    {"dropout_p": 0.3},
]
here_only = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


@pytest.fixture
def way(
    request: pytest.FixtureRequest,
    target: Target,
    monkeypatch: Any,
    empty_call_caches: None,
) -> None:
    """The way that rows take, where the test names one."""
    if request.param in WAYS:
        if target.impl != "triton":
            pytest.skip("only the kernels have ways")
        monkeypatch.setattr(
            configs,
            "TABLE",
            (*configs.TABLE, ConfigRow({}, WAYS[request.param], "forced")),
        )


def ways(*lengths: int) -> pytest.MarkDecorator:
    """Test with these lengths, and with each way forced upon a longer one."""
    cases = [*(("any way", n) for n in lengths), *((name, LONG) for name in FORCED)]
    return pytest.mark.parametrize(("way", "n"), cases, indirect=["way"])


@ways(*LENGTHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(target: Target, way: None, options: dict[str, Any], n: int) -> None:
    inputs = entmax_attention_inputs(1, 1 if INTERPRETED else 2, n, 16, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, **options)


@pytest.mark.parametrize("window", [2**31 - 1] if INTERPRETED else [2**30, 2**31 - 1, 2**31, 2**70])
def test_a_window_wider_than_any_sequence_hides_nothing(target: Target, window: int) -> None:
    inputs = entmax_attention_inputs(1, 1, LENGTHS[1], 16, device=target.device)
    wide = entmax_attention_results(inputs, impl=target.impl, window=window)
    assert_same_bits(wide, entmax_attention_results(inputs, impl=target.impl))


@ways(*BLOCKWISE)
@pytest.mark.parametrize("layout", ("left", "holes", "packed") if INTERPRETED else LAYOUTS)
def test_every_layout_with_groups_of_heads_and_more_keys_than_queries(
    target: Target,
    way: None,
    layout: str,
    n: int,
) -> None:
    if INTERPRETED and n == LONG and layout == "left":
        pytest.skip("interpreting takes seconds a case")
    size = (2 if INTERPRETED else 3, 2)
    inputs = entmax_attention_inputs(
        *size,
        n - 7,
        24,
        nk=n,
        kv_heads=size[1] // 2,
        layout=layout,
        device=target.device,
    )
    assert_entmax_attention_matches(inputs, impl=target.impl, causal=layout in ("left", "packed"))


@pytest.mark.parametrize("n", BLOCKWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(target: Target, dtype: torch.dtype, n: int) -> None:
    inputs = entmax_attention_inputs(1, 2, n, 32, dtype=dtype, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl)


@pytest.mark.parametrize("dim", [16, 72, *([] if INTERPRETED else [80, 96, 128, 256])])
def test_head_dimensions_that_are_no_powers_of_two(target: Target, dim: int) -> None:
    inputs = entmax_attention_inputs(1, 1, LENGTHS[0] - 1, dim, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl)


@pytest.mark.parametrize("n", LENGTHS)
def test_one_alpha_a_head_gets_its_gradient(target: Target, n: int) -> None:
    alpha = torch.tensor([1.1, 1.9] if INTERPRETED else [1.1, 1.5, 1.9], device=target.device)
    inputs = entmax_attention_inputs(
        1 if INTERPRETED else 2,
        alpha.numel(),
        n,
        16,
        device=target.device,
    )
    assert_entmax_attention_matches(inputs, impl=target.impl, alpha=alpha)
    if INTERPRETED and n > LENGTHS[0]:
        return  # one alpha for all heads is one a head by then
    one = entmax_attention_results(
        inputs,
        impl=target.impl,
        alpha=torch.tensor(1.3, device=target.device),
    )
    assert one["dalpha"].shape == ()


@pytest.mark.parametrize("n", BLOCKWISE)
@pytest.mark.parametrize("alpha", [1.2, 1.8, "per head"])
def test_any_alpha_in_16_bits(target: Target, alpha: float | str, n: int) -> None:
    # numbers to and beyond 1.5 and tensors are forms of their own there; alphas as near to 1 as
    # 1.001 take a series
    given = alpha if isinstance(alpha, float) else torch.tensor([1.001, 1.7], device=target.device)
    heads = 1 if isinstance(alpha, float) else 2
    inputs = entmax_attention_inputs(1, heads, n, 16, dtype=torch.float16, device=target.device)
    found = assert_entmax_attention_matches(inputs, impl=target.impl, alpha=given)
    assert float(found["residual"].max()) <= 2e-5


def test_weights_below_the_normal_numbers_leave_alpha_a_gradient(target: Target) -> None:
    alpha = torch.tensor([1.004], device=target.device)
    inputs = entmax_attention_inputs(1, 1, LENGTHS[0], 16, sharpness=30.0, device=target.device)
    assert (
        assert_entmax_attention_matches(inputs, impl=target.impl, alpha=alpha)["dalpha"]
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("sharpness", [0.05, 8.0])
def test_correlated_flat_and_peaked_scores(target: Target, sharpness: float) -> None:
    n = LENGTHS[1] if INTERPRETED else 2 * LENGTHS[1]
    inputs = entmax_attention_inputs(
        1,
        1,
        n,
        16,
        correlated=True,
        sharpness=sharpness,
        device=target.device,
    )
    assert_entmax_attention_matches(inputs, impl=target.impl)


@ways()
@pytest.mark.parametrize(
    ("scale", "correlated"),
    [(s, c) for s in (0.25, 0.2, 1e-3) for c in (False, True)],
)
def test_any_scale_of_the_scores(
    target: Target,
    way: None,
    n: int,
    scale: float,
    correlated: bool,
) -> None:
    if INTERPRETED and (scale < 0.2 or correlated):
        pytest.skip("interpreting takes seconds a case")
    inputs = entmax_attention_inputs(
        1,
        1,
        n,
        16,
        correlated=correlated,
        sharpness=6.0,
        device=target.device,
    )
    found = assert_entmax_attention_matches(inputs, impl=target.impl, scale=scale)
    assert float(found["residual"].max()) <= 2e-5


def test_very_negative_and_very_shifted_scores_still_sum_to_one(target: Target) -> None:
    for n in LENGTHS:
        inputs = entmax_attention_inputs(1, 1, n, 16, sharpness=0.0, device=target.device)
        for level in (4e4,) if INTERPRETED else (2.5e3, 4e4, 1e5):
            q, k = (
                torch.full_like(inputs.q, level / 400),
                inputs.k * 0.01 - 100.0,
            )  # every score near -level
            out = entmax_attention(q, k, torch.ones_like(inputs.v), impl=target.impl)
            torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("needs", ["q", "k", "v", "kv"])
def test_any_of_the_operands_may_want_a_gradient_alone(target: Target, needs: str) -> None:
    for n in LENGTHS:
        inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
        assert_entmax_attention_matches(inputs, impl=target.impl, needs=tuple(needs))


def test_masked_keys_are_never_read_and_rows_without_keys_are_zero(target: Target) -> None:
    for n in LENGTHS:
        inputs = entmax_attention_inputs(
            2 if INTERPRETED else 3,
            1,
            n,
            16,
            layout="holes",
            device=target.device,
        )
        hidden = inputs.layout["key_padding_mask"] == 0
        clean = entmax_attention_results(inputs, impl=target.impl)
        for tensor in (inputs.k, inputs.v):
            tensor[hidden[:, None, :, None].expand_as(tensor)] = math.nan
        dirty = entmax_attention_results(inputs, impl=target.impl)
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(clean[name], dirty[name]), name
        assert (
            (dirty["out"][1] == 0).all()
            and dirty["tau"][1].isnan().all()
            and (dirty["support"][1] == 0).all()
        )


def test_nan_in_a_query_makes_its_row_nan_and_no_other(target: Target) -> None:
    for n in LENGTHS:
        inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
        inputs.q[0, 0, 3, 5] = math.nan
        found = entmax_attention_results(inputs, impl=target.impl)
        bad = found["out"].isnan().any(dim=-1)[0, 0]
        assert bad[3] and int(bad.sum()) == 1 and found["dq"][0, 0, 3].isnan().all()


def test_results_repeat_bit_for_bit(target: Target) -> None:
    for n in LENGTHS[: 1 if INTERPRETED else 2]:
        inputs = entmax_attention_inputs(1, 2, n, 16, kv_heads=1, device=target.device)
        runs = [entmax_attention_results(inputs, impl=target.impl, dropout_p=0.2) for _ in range(2)]
        assert_same_bits(runs[1], runs[0])


def test_dropout_drops_the_same_weights_everywhere(target: Target) -> None:
    inputs = entmax_attention_inputs(1, 2, LENGTHS[1], 16, sharpness=0.1, device=target.device)
    results = [
        entmax_attention_results(inputs, impl=impl, alpha=1.0, dropout_p=0.5, dropout_seed=3)["out"]
        for impl in (target.impl, "reference")
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    outs: Any = [
        entmax_attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, impl=target.impl)
        for _ in range(2)
    ]
    assert not torch.allclose(*outs, atol=1e-2)  # every call draws


def test_statistics_say_what_the_rows_are(target: Target) -> None:
    for n in LENGTHS:
        for alpha in (1.4,) if INTERPRETED else (1.0, 1.4, 1.5, 2.0):
            inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
            found = entmax_attention_results(inputs, impl=target.impl, alpha=alpha)
            truth = entmax_attention_results(
                inputs.cast(torch.float64),
                impl="reference",
                alpha=alpha,
            )
            torch.testing.assert_close(found["tau"], truth["tau"], rtol=1e-4, atol=1e-5)
            assert int((found["support"] - truth["support"]).abs().max()) <= 1
            assert found["residual"].max() <= 1e-4


@here_only
def test_softmax_is_what_torch_computes() -> None:
    inputs = entmax_attention_inputs(2, 2, 40, 16, nk=40)
    for causal in (False, True):
        mine = entmax_attention(inputs.q, inputs.k, inputs.v, alpha=1, causal=causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            is_causal=causal,
        )
        torch.testing.assert_close(mine, theirs)


@here_only
def test_decoding_one_query_at_a_time_is_causal_attention() -> None:
    inputs = entmax_attention_inputs(1, 2, 12, 16)
    whole: Any = entmax_attention(inputs.q, inputs.k, inputs.v, causal=True)
    for i in range(12):
        step = entmax_attention(
            inputs.q[:, :, i : i + 1],
            inputs.k[:, :, : i + 1],
            inputs.v[:, :, : i + 1],
            causal=True,
        )
        torch.testing.assert_close(step, whole[:, :, i : i + 1])


@ways()
def test_all_ways_agree_on_the_support(target: Target, way: None, n: int) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, dtype=torch.float16, device=target.device)
    found = entmax_attention_results(inputs, impl=target.impl, needs=())
    truth = entmax_attention_results(inputs.cast(torch.float64), impl="reference", needs=())
    assert int((found["support"] - truth["support"]).abs().max()) <= 1


def test_broken_offsets_of_a_gpu_make_everything_nan_at_every_call(target: Target) -> None:
    if target.device == "cpu" or target.impl != "triton":
        pytest.skip("the host looks")
    rows = torch.randn(100, 2, 16, device=target.device)
    good = torch.tensor([0, 40, 100], device=target.device)
    for _ in range(2):
        for bad in ([0, 40, 99], [1, 40, 100], [0, 120, 100]):
            wrong = torch.tensor(bad, device=target.device)
            for pair in ((wrong, good), (good, wrong)):
                out = entmax_attention(rows, rows, rows, cu_seqlens_q=pair[0], cu_seqlens_k=pair[1])
                assert isinstance(out, Tensor) and bool(out.isnan().all())
        for bound, broken in ((59, True), (60, False), (None, False)):  # the longest has 60 keys
            out = entmax_attention(
                rows,
                rows,
                rows,
                cu_seqlens_q=good,
                cu_seqlens_k=good,
                max_seqlen_k=bound,
            )
            assert isinstance(out, Tensor) and bool(out.isnan().all()) == broken == bool(
                out.isnan().any(),
            )


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 2**32 + 20]),  # cut to 32 bits these two describe the rows
        torch.tensor([0, 7 - 2**32, 20]),
        torch.tensor(
            [0, 2**31 - 1, -2, 20],
            dtype=torch.int32,
        ),  # in 32 bits no difference is negative
    ],
    ids=["too large", "too small", "wraps"],
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_offsets_beyond_32_bits_give_nan_and_no_plausible_number(
    kernels: Target,
    host_reads_no_values: None,
    bad: Tensor,
    side: str,
) -> None:
    rows = torch.randn(20, 1, 16, device=kernels.device, requires_grad=True)
    good = torch.arange(bad.numel()).clamp(max=1) * 20
    cu_q, cu_k = (bad if side in (name, "both") else good for name in "qk")
    offsets = {"cu_seqlens_q": cu_q.to(kernels.device), "cu_seqlens_k": cu_k.to(kernels.device)}
    out = entmax_attention(rows, rows, rows, impl="triton", **offsets)
    assert isinstance(out, Tensor) and bool(out.isnan().all())
    out.sum().backward()  # reads nothing elsewhere


def torch_table(offsets: Tensor, block: int, tiles: int) -> tuple[Tensor, Tensor]:
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    every = torch.arange(tiles, device=offsets.device)
    of_tile = torch.searchsorted(ends, every, right=True)
    return of_tile.to(torch.int32), torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@pytest.mark.parametrize("keys", [32, 0])
@pytest.mark.parametrize(
    "lengths",
    [[5], [0, 70, 0, 16, 15, 0], [33] * 70, [20, -7, 40], []],
    ids=str,
)
def test_tables_of_packed_batches(kernels: Target, lengths: list[int], keys: int) -> None:
    from tests.ops.launching import launch, tables_kernel

    cu_q = torch.tensor([0, *lengths], device=kernels.device).cumsum(0).to(torch.int32)
    cu_k = 2 * cu_q
    batch = len(lengths)
    sizes = (int(cu_q.max()) // 16 + batch + 2, int(cu_k.max()) // 32 + batch + 3)
    wanted: tuple[Tensor, ...] = torch_table(cu_q, 16, sizes[0])
    if keys:
        wanted += torch_table(cu_k, keys, sizes[1])
    made = [torch.full_like(table, -1) for table in wanted]
    tables = (*made, None, None)[:4]
    constants = {"ROWS": 16, "KEYS": keys, "BLOCK": 64, "num_warps": 4, "num_stages": 1}
    grid = (max(sizes) // 64 + 1, 2 if keys else 1, 1)
    launch.launch(
        tables_kernel,
        grid,
        (cu_q, cu_k, *tables, batch, sizes[0], sizes[1] if keys else 0),
        constants,
    )
    assert all(torch.equal(found, table) for found, table in zip(made, wanted, strict=True))
