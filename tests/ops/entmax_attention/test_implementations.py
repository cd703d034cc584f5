"""Every implementation of alpha-entmax attention within its error budget of the reference.

The same tests serve the tiled path on the CPU, the kernels on a GPU, and the kernels interpreted on
the CPU, where the tiles are small: the scores of 32 keys are resident on chip, and 40 keys are
walked in blocks of 16. On a GPU the tiles are large, so that the lengths of a test would take one
strategy only. Some tests force each strategy in turn.
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
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:
    DTYPES.append(torch.bfloat16)
LENGTHS = (20, 40) if INTERPRETED else (50, 150)  # resident, and by blocks
BLOCKWISE = LENGTHS[1:] if INTERPRETED else LENGTHS  # interpreting takes seconds a case
LONG = 44 if INTERPRETED else 330
# Limits of the numbers of keys that choose a strategy.
STRATEGIES = {
    "short": {"max_resident_keys": 0, "max_short_keys": 1 << 20},
    "listed": {"max_resident_keys": 0, "max_short_keys": 0},
}
# With the interpreter, other tests walk lists.
FORCED = ["short"] if INTERPRETED else list(STRATEGIES)
WINDOWS = [2**31 - 1] if INTERPRETED else [2**30, 2**31 - 1, 2**31, 2**70]
DIMENSIONS = [16, 72] if INTERPRETED else [16, 72, 80, 96, 128, 256]
NEGATIVE_LEVELS = [4e4] if INTERPRETED else [2.5e3, 4e4, 1e5]
STATISTICS_ALPHAS = [1.4] if INTERPRETED else [1.0, 1.4, 1.5, 2.0]
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
without_interpreter = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


@pytest.fixture
def strategy(
    request: pytest.FixtureRequest,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    empty_call_caches: None,
) -> None:
    """Force the kernels to walk keys by a strategy, unless its name is ``"by length"``."""
    if request.param not in STRATEGIES:
        return
    if target.impl != "triton":
        pytest.skip("only the kernels have strategies")
    forced = ConfigRow({}, STRATEGIES[request.param], "forced")
    monkeypatch.setattr(configs, "TABLE", (*configs.TABLE, forced))


def lengths_and_strategies(*lengths: int) -> pytest.MarkDecorator:
    """Parametrize with these lengths, and with each strategy forced upon a longer one."""
    cases = [("by length", n) for n in lengths]
    cases += [(name, LONG) for name in FORCED]
    return pytest.mark.parametrize(("strategy", "n"), cases, indirect=["strategy"])


@lengths_and_strategies(*LENGTHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(target: Target, strategy: None, options: dict[str, Any], n: int) -> None:
    inputs = entmax_attention_inputs(1, 1 if INTERPRETED else 2, n, 16, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, **options)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_wider_than_any_sequence_hides_nothing(target: Target, window: int) -> None:
    inputs = entmax_attention_inputs(1, 1, LENGTHS[1], 16, device=target.device)
    windowed = entmax_attention_results(inputs, impl=target.impl, window=window)
    assert_same_bits(windowed, entmax_attention_results(inputs, impl=target.impl))


@lengths_and_strategies(*BLOCKWISE)
@pytest.mark.parametrize("layout", ("left", "holes", "packed") if INTERPRETED else LAYOUTS)
def test_every_layout_with_groups_of_heads_and_more_keys_than_queries(
    target: Target,
    strategy: None,
    layout: str,
    n: int,
) -> None:
    if INTERPRETED and n == LONG and layout == "left":
        pytest.skip("interpreting takes seconds a case")
    inputs = entmax_attention_inputs(
        2 if INTERPRETED else 3,
        2,
        n - 7,
        24,
        nk=n,
        kv_heads=1,
        layout=layout,
        device=target.device,
    )
    assert_entmax_attention_matches(inputs, impl=target.impl, causal=layout in ("left", "packed"))


@pytest.mark.parametrize("n", BLOCKWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(target: Target, dtype: torch.dtype, n: int) -> None:
    inputs = entmax_attention_inputs(1, 2, n, 32, dtype=dtype, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl)


@pytest.mark.parametrize("dim", DIMENSIONS)
def test_head_dimensions_need_not_be_powers_of_two(target: Target, dim: int) -> None:
    inputs = entmax_attention_inputs(1, 1, LENGTHS[0] - 1, dim, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl)


@pytest.mark.parametrize("n", LENGTHS)
def test_alphas_of_heads_get_their_gradients(target: Target, n: int) -> None:
    alpha = torch.tensor([1.1, 1.9] if INTERPRETED else [1.1, 1.5, 1.9], device=target.device)
    batch = 1 if INTERPRETED else 2
    inputs = entmax_attention_inputs(batch, alpha.numel(), n, 16, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, alpha=alpha)


# Interpreted, one length is enough: one alpha of all heads becomes one per head at once.
@pytest.mark.parametrize("n", LENGTHS[:1] if INTERPRETED else LENGTHS)
def test_one_alpha_of_all_heads_has_a_gradient_of_its_shape(target: Target, n: int) -> None:
    heads = 2 if INTERPRETED else 3
    inputs = entmax_attention_inputs(1, heads, n, 16, device=target.device)
    alpha = torch.tensor(1.3, device=target.device)
    results = entmax_attention_results(inputs, impl=target.impl, alpha=alpha)
    assert results["dalpha"].shape == ()


@pytest.mark.parametrize("n", BLOCKWISE)
@pytest.mark.parametrize("alpha", [1.2, 1.8, "per head"])
def test_any_alpha_in_16_bits(target: Target, alpha: float | str, n: int) -> None:
    # Numbers below and above 1.5 and tensors have code of their own. 1.001 is near enough to 1
    # that a series is used.
    per_head = torch.tensor([1.001, 1.7], device=target.device)
    value = alpha if isinstance(alpha, float) else per_head
    heads = 1 if isinstance(alpha, float) else 2
    inputs = entmax_attention_inputs(1, heads, n, 16, dtype=torch.float16, device=target.device)
    results = assert_entmax_attention_matches(inputs, impl=target.impl, alpha=value)
    assert float(results["residual"].max()) <= 2e-5


def test_subnormal_weights_leave_alpha_a_finite_gradient(target: Target) -> None:
    alpha = torch.tensor([1.004], device=target.device)
    inputs = entmax_attention_inputs(1, 1, LENGTHS[0], 16, sharpness=30.0, device=target.device)
    results = assert_entmax_attention_matches(inputs, impl=target.impl, alpha=alpha)
    assert results["dalpha"].isfinite().all()


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


@lengths_and_strategies()
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("scale", [0.25, 0.2, 1e-3])
def test_any_scale_of_the_scores(
    target: Target,
    strategy: None,
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
    results = assert_entmax_attention_matches(inputs, impl=target.impl, scale=scale)
    assert float(results["residual"].max()) <= 2e-5


@pytest.mark.parametrize("level", NEGATIVE_LEVELS)
@pytest.mark.parametrize("n", LENGTHS)
def test_weights_of_very_negative_scores_sum_to_one(target: Target, n: int, level: float) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, sharpness=0.0, device=target.device)
    # Every score is near -level.
    q = torch.full_like(inputs.q, level / 400)
    k = inputs.k * 0.01 - 100.0
    out = entmax_attention(q, k, torch.ones_like(inputs.v), impl=target.impl)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("needs", ["q", "k", "v", "kv"])
def test_any_of_the_operands_may_need_a_gradient(target: Target, needs: str, n: int) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
    assert_entmax_attention_matches(inputs, impl=target.impl, needs=tuple(needs))


@pytest.mark.parametrize("n", LENGTHS)
def test_masked_keys_are_never_read_and_rows_without_keys_are_zero(target: Target, n: int) -> None:
    batch = 2 if INTERPRETED else 3
    inputs = entmax_attention_inputs(batch, 1, n, 16, layout="holes", device=target.device)
    expected = entmax_attention_results(inputs, impl=target.impl)
    masked_keys = (inputs.layout["key_padding_mask"] == 0)[:, None, :, None]
    for tensor in (inputs.k, inputs.v):
        tensor[masked_keys.expand_as(tensor)] = math.nan
    results = entmax_attention_results(inputs, impl=target.impl)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name], expected[name]), name
    sequence_without_keys = 1
    assert (results["out"][sequence_without_keys] == 0).all()
    assert results["tau"][sequence_without_keys].isnan().all()
    assert (results["support"][sequence_without_keys] == 0).all()


@pytest.mark.parametrize("n", LENGTHS)
def test_nan_in_a_query_makes_its_row_nan_and_no_other(target: Target, n: int) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
    inputs.q[0, 0, 3, 5] = math.nan
    results = entmax_attention_results(inputs, impl=target.impl)
    rows_with_nan = results["out"].isnan().any(dim=-1)[0, 0]
    assert rows_with_nan[3]
    assert int(rows_with_nan.sum()) == 1
    assert results["dq"][0, 0, 3].isnan().all()


@pytest.mark.parametrize("n", LENGTHS[:1] if INTERPRETED else LENGTHS)
def test_results_repeat_bit_for_bit(target: Target, n: int) -> None:
    inputs = entmax_attention_inputs(1, 2, n, 16, kv_heads=1, device=target.device)
    first = entmax_attention_results(inputs, impl=target.impl, dropout_p=0.2)
    second = entmax_attention_results(inputs, impl=target.impl, dropout_p=0.2)
    assert_same_bits(second, first)


def test_dropout_with_a_seed_drops_the_weights_that_the_reference_drops(target: Target) -> None:
    inputs = entmax_attention_inputs(1, 2, LENGTHS[1], 16, sharpness=0.1, device=target.device)
    options: dict[str, Any] = {"alpha": 1.0, "dropout_p": 0.5, "dropout_seed": 3}
    results = entmax_attention_results(inputs, impl=target.impl, **options)
    expected = entmax_attention_results(inputs, impl="reference", **options)
    torch.testing.assert_close(results["out"], expected["out"], rtol=1e-4, atol=1e-5)


def test_dropout_without_a_seed_differs_from_call_to_call(target: Target) -> None:
    inputs = entmax_attention_inputs(1, 2, LENGTHS[1], 16, sharpness=0.1, device=target.device)

    def attention() -> Any:
        return entmax_attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, impl=target.impl)

    assert not torch.allclose(attention(), attention(), atol=1e-2)


@pytest.mark.parametrize("alpha", STATISTICS_ALPHAS)
@pytest.mark.parametrize("n", LENGTHS)
def test_statistics_are_those_of_the_reference(target: Target, n: int, alpha: float) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, device=target.device)
    results = entmax_attention_results(inputs, impl=target.impl, alpha=alpha)
    truth = entmax_attention_results(inputs.cast(torch.float64), impl="reference", alpha=alpha)
    torch.testing.assert_close(results["tau"], truth["tau"], rtol=1e-4, atol=1e-5)
    assert int((results["support"] - truth["support"]).abs().max()) <= 1
    assert results["residual"].max() <= 1e-4


@without_interpreter
@pytest.mark.parametrize("causal", [False, True])
def test_alpha_1_is_the_attention_of_torch(causal: bool) -> None:
    inputs = entmax_attention_inputs(2, 2, 40, 16, nk=40)
    out = entmax_attention(inputs.q, inputs.k, inputs.v, alpha=1, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        is_causal=causal,
    )
    torch.testing.assert_close(out, expected)


@without_interpreter
def test_decoding_one_query_at_a_time_is_causal_attention() -> None:
    inputs = entmax_attention_inputs(1, 2, 12, 16)
    expected: Any = entmax_attention(inputs.q, inputs.k, inputs.v, causal=True)
    for i in range(12):
        step = entmax_attention(
            inputs.q[:, :, i : i + 1],
            inputs.k[:, :, : i + 1],
            inputs.v[:, :, : i + 1],
            causal=True,
        )
        torch.testing.assert_close(step, expected[:, :, i : i + 1])


@lengths_and_strategies()
def test_all_strategies_agree_on_the_support(target: Target, strategy: None, n: int) -> None:
    inputs = entmax_attention_inputs(1, 1, n, 16, dtype=torch.float16, device=target.device)
    results = entmax_attention_results(inputs, impl=target.impl, needs=())
    truth = entmax_attention_results(inputs.cast(torch.float64), impl="reference", needs=())
    assert int((results["support"] - truth["support"]).abs().max()) <= 1


def skip_unless_on_gpu(target: Target) -> None:
    if target.device == "cpu" or target.impl != "triton":
        pytest.skip("the host reads the offsets")


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("broken", [[0, 40, 99], [1, 40, 100], [0, 120, 100]], ids=str)
def test_broken_offsets_on_a_gpu_make_everything_nan_at_every_call(
    target: Target,
    broken: list[int],
    side: str,
) -> None:
    skip_unless_on_gpu(target)
    rows = torch.randn(100, 2, 16, device=target.device)
    good_offsets = torch.tensor([0, 40, 100], device=target.device)
    broken_offsets = torch.tensor(broken, device=target.device)
    for _ in range(2):
        out = entmax_attention(
            rows,
            rows,
            rows,
            cu_seqlens_q=broken_offsets if side == "queries" else good_offsets,
            cu_seqlens_k=broken_offsets if side == "keys" else good_offsets,
        )
        assert isinstance(out, Tensor)
        assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("max_seqlen_k", "is_broken"),
    [
        pytest.param(59, True, id="too small"),
        pytest.param(60, False, id="exact"),
        pytest.param(None, False, id="none"),
    ],
)
def test_a_longer_sequence_than_max_seqlen_k_on_a_gpu_makes_everything_nan_at_every_call(
    target: Target,
    max_seqlen_k: int | None,
    is_broken: bool,
) -> None:
    skip_unless_on_gpu(target)
    rows = torch.randn(100, 2, 16, device=target.device)
    offsets = torch.tensor([0, 40, 100], device=target.device)
    for _ in range(2):
        out = entmax_attention(
            rows,
            rows,
            rows,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_k=max_seqlen_k,
        )
        assert isinstance(out, Tensor)
        assert bool(out.isnan().all()) == is_broken
        assert bool(out.isnan().any()) == is_broken


@pytest.mark.parametrize(
    "broken",
    [
        # Truncated to 32 bits, the first two describe the rows.
        pytest.param(torch.tensor([0, 2**32 + 20]), id="too large"),
        pytest.param(torch.tensor([0, 7 - 2**32, 20]), id="too small"),
        # In 32 bits no difference is negative.
        pytest.param(torch.tensor([0, 2**31 - 1, -2, 20], dtype=torch.int32), id="wraps"),
    ],
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_offsets_beyond_32_bits_give_nan_and_no_plausible_number(
    kernels: Target,
    host_reads_no_values: None,
    broken: Tensor,
    side: str,
) -> None:
    rows = torch.randn(20, 1, 16, device=kernels.device, requires_grad=True)
    good = torch.arange(broken.numel()).clamp(max=1) * 20
    cu_seqlens_q = good if side == "k" else broken
    cu_seqlens_k = good if side == "q" else broken
    out = entmax_attention(
        rows,
        rows,
        rows,
        impl="triton",
        cu_seqlens_q=cu_seqlens_q.to(kernels.device),
        cu_seqlens_k=cu_seqlens_k.to(kernels.device),
    )
    assert isinstance(out, Tensor)
    assert bool(out.isnan().all())
    out.sum().backward()  # must not read outside of the rows


def expected_table(offsets: Tensor, block: int, n_tiles: int) -> tuple[Tensor, Tensor]:
    """Sequence of each tile, and first tile of each sequence.

    Args:
        offsets: ``[B + 1]`` offsets of the sequences.
        block: Rows of a tile.
        n_tiles: Length of the first table.

    Returns:
        ``[n_tiles]`` and ``[B + 1]`` int32.
    """
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    tiles = torch.arange(n_tiles, device=offsets.device)
    sequences = torch.searchsorted(ends, tiles, right=True)
    starts = torch.nn.functional.pad(ends, (1, 0))
    return sequences.to(torch.int32), starts.to(torch.int32)


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
    n_query_tiles = int(cu_q.max()) // 16 + batch + 2
    n_key_tiles = int(cu_k.max()) // 32 + batch + 3
    expected = [*expected_table(cu_q, 16, n_query_tiles)]
    if keys:
        expected += expected_table(cu_k, keys, n_key_tiles)
    tables = [torch.full_like(table, -1) for table in expected]
    key_tables = tables[2:] if keys else [None, None]
    launch.launch(
        tables_kernel,
        (max(n_query_tiles, n_key_tiles) // 64 + 1, 2 if keys else 1, 1),
        (cu_q, cu_k, *tables[:2], *key_tables, batch, n_query_tiles, n_key_tiles if keys else 0),
        {"ROWS": 16, "KEYS": keys, "BLOCK": 64, "num_warps": 4, "num_stages": 1},
    )
    for table, expected_values in zip(tables, expected, strict=True):
        assert torch.equal(table, expected_values)
