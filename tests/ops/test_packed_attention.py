"""Softmax attention of packed sequences equals that of each sequence alone, on every portable path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from tilefold.ops import packed_attention
from tilefold.ops._shared.fallback import FallbackWarning
from tilefold.ops.packed_attention import packed_softmax_attention, token_positions

LENGTHS = [5, 0, 1, 9, 5]
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def padded(
    *given: Any,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    attend = partial(scaled_dot_product_attention, dropout_p=dropout_p, scale=scale)
    query, key, value, cu_seqlens, longest = given
    return packed_attention._attend_padded((query, key, value), cu_seqlens, longest, window, attend)


def pack(dtype: torch.dtype, device: torch.device, dim: int = 8) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(sum(LENGTHS), 2, dim, generator=generator, dtype=torch.float64)
        for _ in range(3)
    ]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors], offsets.to(device)


def one_at_a_time(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    found = []
    for q, k, v in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True):
        places = torch.arange(len(q), device=q.device)
        mask = (places[:, None] - places).abs() <= (len(q) if window is None else window)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (
            q.size(2) ** -0.5 if scale is None else scale
        )
        found.append(
            torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v),
        )
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("attend", [packed_softmax_attention, padded])
def test_it_is_attention_within_each_sequence(
    attend: Callable[..., Tensor],
    window: int | None,
) -> None:
    tensors, offsets = pack(torch.float64, torch.device("cpu"))
    weights = torch.randn(tensors[0].shape, dtype=torch.float64)
    got = attend(*tensors, offsets, max(LENGTHS), scale=0.3, window=window)
    expected = one_at_a_time(*tensors, window=window, scale=0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad((got * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 12, 64])
def test_the_kernels_of_a_gpu_are_no_further_from_fp64_than_padded_attention(
    dtype: torch.dtype,
    window: int | None,
    dim: int,
) -> None:
    tensors, offsets = pack(dtype, torch.device("cuda"), dim)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weights = torch.randn(tensors[0].shape, dtype=torch.float64, device="cuda")

    def results(attend: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> list[Tensor]:
        out = attend(*inputs, **options)
        return [out, *torch.autograd.grad((out.double() * weights).sum(), inputs)]

    reference = [
        each.detach()
        for each in results(lambda *inputs: one_at_a_time(*inputs, window=window), *exact)
    ]
    got = results(
        lambda *inputs: packed_softmax_attention(*inputs, offsets, max(LENGTHS), window=window),
        *tensors,
    )
    other = results(lambda *inputs: padded(*inputs, offsets, max(LENGTHS), window=window), *tensors)
    for mine, theirs, right in zip(got, other, reference, strict=True):
        rounding = torch.finfo(dtype).eps * float(right.abs().max())
        allowed = 2 * float((theirs.detach().double() - right).abs().max()) + 2 * rounding
        assert float((mine.detach().double() - right).abs().max()) <= allowed


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_drops_weights_and_keeps_their_mean(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.zeros(64, 2, 8, device=device, dtype=dtype)
    value = torch.ones(64, 2, 8, device=device, dtype=dtype)
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    found = torch.stack(
        [
            packed_softmax_attention(query, query, value, offsets, 40, dropout_p=0.25)[..., 0]
            for _ in range(64)
        ],
    ).float()
    # a mean of 64 x 128 sums of at least 24 weights: its deviation is below .4 / sqrt(64 * 128 *
    # 24) = .001
    assert abs(float(found.mean()) - 1) < 0.005
    assert float(found.std(0).mean()) == pytest.approx((0.25 / 0.75 / 32) ** 0.5, rel=0.15)
    torch.testing.assert_close(packed_softmax_attention(query, query, value, offsets, 40), value)


def test_empty_sequences_are_skipped_nothing_gives_nothing_and_a_row_alone_is_sdpa() -> None:
    sequence, place = token_positions(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5)
    assert (sequence.tolist(), place.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    nothing = torch.zeros(0, 2, 8)
    for attend in (packed_softmax_attention, padded):
        for count in (1, 3):
            assert attend(
                nothing,
                nothing,
                nothing,
                torch.zeros(count, dtype=torch.int32),
                0,
            ).shape == (0, 2, 8)
    tensors = [torch.randn(6, 2, 8) for _ in range(3)]
    got = packed_softmax_attention(*tensors, torch.tensor([0, 6], dtype=torch.int32), 6)
    expected = scaled_dot_product_attention(*(tensor.transpose(0, 1)[None] for tensor in tensors))
    torch.testing.assert_close(got, expected[0].transpose(0, 1))


def test_wrong_arguments_are_named() -> None:
    ok = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"must have one shape \[T, H, D\]"):
        packed_softmax_attention(ok, ok[:, :1], ok, torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(
        ValueError,
        match=r"cu_seqlens must be int32 of shape \[B \+ 1\], got torch.int64",
    ):
        packed_softmax_attention(ok, ok, ok, torch.tensor([0, 4]), 4)


class NothingReplaced:
    """Handle of a flash attention whose kernels the tests put in place by themselves."""

    def remove(self) -> None:
        """Nothing was registered with torch's dispatcher."""


@contextmanager
def activated_flash_attention() -> Iterator[None]:
    """A flash attention named ``"stub"`` is activated, as FlashAttention-3 would be."""
    attention.register_flash_attention_impl("stub", register_fn=NothingReplaced)
    packed_attention._warn_of_replacement.cache_clear()
    attention.activate_flash_attention_impl("stub")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
        packed_attention._warn_of_replacement.cache_clear()


needs_registry = pytest.mark.skipif(
    not hasattr(attention, "activate_flash_attention_impl"),
    reason="torch before 2.11 has no other flash attention to activate",
)


def refuse(
    qkv: Any,
    cu_seqlens: Tensor,
    longest: int,
    dropout_p: float,
    *_: Any,
) -> Tensor:
    """Refuse packed attention as FlashAttention-3 does: with dropout, and on other devices."""
    reason = "dropout_p must be 0" if dropout_p else "FA3 requires compute capability 9.0"
    raise RuntimeError(f"FA3 flash_attention forward unsupported: {reason}")


@needs_registry
@pytest.mark.parametrize(
    ("dropout_p", "reason"),
    [
        pytest.param(0.1, "it has no dropout", id="dropout"),
        pytest.param(0.0, "requires compute capability 9.0", id="another device"),
    ],
)
@pytest.mark.parametrize("window", [None, 2])
def test_what_an_activated_flash_attention_refuses_runs_elsewhere_after_one_warning(
    dropout_p: float,
    reason: str,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, offsets = pack(torch.bfloat16, torch.device("cpu"))

    monkeypatch.setattr(packed_attention, "_flash_runs_on", lambda query: True)
    monkeypatch.setattr(packed_attention, "flash_attention_varlen", refuse)
    monkeypatch.setattr(packed_attention, "efficient_attention_varlen", lambda qkv, *_: qkv[2])

    def attend() -> Tensor | None:
        return packed_attention._attend_on_cuda(
            (tensors[0], tensors[1], tensors[2]),
            offsets,
            max(LENGTHS),
            dropout_p,
            None,
            window,
        )

    with activated_flash_attention():
        with pytest.warns(FallbackWarning, match=f"'stub'.*{reason}.*restore_flash_attention_impl"):
            out = attend()
        assert out is (tensors[2] if window is None else None)  # None is padded attention
        attend()  # warns no second time, which would be an error here


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
def test_training_with_dropout_goes_on_beside_an_activated_flash_attention_that_has_none(
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, offsets = pack(torch.bfloat16, torch.device("cuda"), 64)
    expected = packed_softmax_attention(*tensors, offsets, max(LENGTHS), window=window)
    monkeypatch.setattr(packed_attention, "flash_attention_varlen", refuse)
    with activated_flash_attention():
        with pytest.warns(FallbackWarning, match="'stub'.*it has no dropout"):
            dropped = packed_softmax_attention(
                *tensors,
                offsets,
                max(LENGTHS),
                window=window,
                dropout_p=0.1,
            )
        dropped.float().sum().backward()
        assert all(bool(tensor.grad.isfinite().all()) for tensor in tensors)
        with pytest.warns(FallbackWarning, match="'stub'.*requires compute capability 9.0"):
            got = packed_softmax_attention(*tensors, offsets, max(LENGTHS), window=window)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
