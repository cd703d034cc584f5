"""Alpha-entmax attention: symbolic shapes, memory, errors, the random words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tests.kernels import triton_interpreted
from tests.ops.base import AttentionOptions as Options
from tests.ops.base import AttentionTensors, philox_word
from tests.ops.samples import allocations
from tests.refusals import refused
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention.api import live_shape
from tilefold.testing.entmax_attention import entmax_attention_inputs

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")


def test_shapes_of_a_device_may_be_symbolic() -> None:
    symbols = ShapeEnv()

    def symbol(value: int) -> int | torch.SymInt:
        made = symbols.create_symbol(
            value,
            ConstantSource(f"n{value}"),
            DimDynamic.DYNAMIC,
            constraint_dim=None,
        )
        return symbols.create_symintnode(made, hint=value)

    def options(n: Any) -> Options:
        return Options(1.3, causal=False, window=-1, scale=0.125, dropout_p=0.0, max_seqlen_k=n)

    with FakeTensorMode(shape_env=symbols):
        shapes = [
            live_shape(
                AttentionTensors(*[torch.empty(2, 3, n, d)] * 3, *[None] * 5),
                options(n),
                (9, 0),
            )
            for n, d in ((2040, 64), (symbol(2040), symbol(64)))
        ]
    assert shapes[0] == tuple(int(size) for size in shapes[1])
    assert min(shapes[0]) > 0


def test_scores_never_exist_as_a_whole() -> None:
    n, heads = 2048, 2
    inputs = entmax_attention_inputs(1, heads, n, 8)
    sizes = allocations(lambda: entmax_attention(inputs.q, inputs.k, inputs.v))
    assert max(sizes) <= 4 * heads * n * n / 3


def test_random_words_are_those_of_philox() -> None:
    # the known answers of the generator's authors: 10 rounds, counter and key of zeros, and of ones
    zero = torch.zeros(1, dtype=torch.int64)
    assert int(philox_word(zero, zero, zero, zero)) == 0x6627E8D5
    words = philox_word(torch.tensor([7]), torch.arange(4096), zero, zero)
    assert words.unique().numel() > 4090 and abs(words.double().mean() / 2**32 - 0.5) < 0.02


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alpha": 2.5}, ValueError, r"alpha must be a number in \[1, 2\]"),
    (
        {"alpha": torch.tensor([0.5, 1.5])},
        ValueError,
        r"alpha must lie in \[1, 2\], got 0.5; parametrise it",
    ),
    ({"alpha": torch.ones(3)}, ValueError, r"alpha must hold one number or one per head \(2\)"),
    ({"window": -1}, ValueError, "window must be an integer of at least 0"),
    ({"scale": math.inf}, ValueError, "scale must be a finite Python number"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be a number in \[0, 1\)"),
    (
        {"key_padding_mask": torch.ones(2, 5)},
        ValueError,
        r"key_padding_mask must have shape \[B, Nk\]",
    ),
    ({"cu_seqlens_q": torch.tensor([0, 4])}, ValueError, r"q must have shape \[Tq, H, D\]"),
    ({"impl": "flash"}, ValueError, "impl must be one of"),
    ({"impl": "triton"}, RuntimeError, "impl='triton' cannot run here"),
    ({"k": torch.randn(2, 2, 9, 8)}, ValueError, "v must have shape"),
    ({"k": torch.randn(2, 2, 4, 7)}, ValueError, "k must have shape"),
    (
        {"k": torch.randn(2, 3, 4, 8), "v": torch.randn(2, 3, 4, 8)},
        ValueError,
        "H of q must be a multiple of Hkv",
    ),
    ({"v": torch.randn(2, 2, 4, 8).double()}, TypeError, "k and v must have the dtype of q"),
]


def test_errors_name_the_argument() -> None:
    for change, kind, text in ERRORS:
        given = {name: torch.randn(2, 2, 4, 8) for name in "qkv"} | change
        refused(kind, text, entmax_attention, **given)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_missing_offsets_and_bounds_that_are_too_small_raise_on_the_cpu(impl: str) -> None:
    q, good = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
    for cu_k, bound, text in (
        (None, None, "cu_seqlens_k must be given"),
        (good, 2, "max_seqlen_k must be at least 3, the longest sequence of keys, got 2"),
    ):
        options = {"cu_seqlens_q": good, "cu_seqlens_k": cu_k, "max_seqlen_k": bound, "impl": impl}
        refused(ValueError, text, entmax_attention, q, q, q, **options)
