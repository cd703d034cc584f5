"""Softmax attention of packed sequences equals that of each sequence, on every portable path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.ops import packed_attention
from tilefold.ops._shared.fallback import FallbackWarning
from tilefold.ops._shared.internals import AttentionOptions, flash_attention_varlen
from tilefold.ops.packed_attention import packed_softmax_attention, token_positions

LENGTHS = [5, 0, 1, 9, 5]
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """The path that pads the sequences, with the arguments of the public function."""
    options = AttentionOptions(scale, window, causal)
    return packed_attention._attend_padded((query, key, value), cu_seqlens, longest, options)


def pack(
    dtype: torch.dtype,
    device: torch.device,
    dim: int = 8,
    *,
    heads: int = 2,
    key_heads: int = 2,
) -> tuple[list[Tensor], Tensor]:
    """Random queries, keys and values ``[T, H, dim]`` of :data:`LENGTHS`, and their offsets."""
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(sum(LENGTHS), n_heads, dim, generator=generator, dtype=torch.float64)
        for n_heads in (heads, key_heads, key_heads)
    ]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors], offsets.to(device)


def one_at_a_time(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """The definition of attention, of one sequence after the other."""
    if scale is None:
        scale = query.size(2) ** -0.5
    n_repeats = query.size(1) // key.size(1)
    key = key.repeat_interleave(n_repeats, dim=1)
    value = value.repeat_interleave(n_repeats, dim=1)
    outputs = []
    sequences = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
    for q, k, v in sequences:
        positions = torch.arange(len(q), device=q.device)
        distances = positions[:, None] - positions
        scores = scale * torch.einsum("ihd,jhd->hij", q, k)
        if window is not None:
            scores = scores.masked_fill(distances.abs() > window, float("-inf"))
        if causal:
            scores = scores.masked_fill(distances < 0, float("-inf"))
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v))
    return torch.cat(outputs)


HEADS = [
    pytest.param(2, 2, id="as many key heads"),
    pytest.param(6, 2, id="grouped heads"),
    pytest.param(4, 1, id="one key head"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize("attend", [packed_softmax_attention, padded])
def test_it_is_attention_within_each_sequence(
    attend: Callable[..., Tensor],
    heads: int,
    key_heads: int,
    window: int | None,
    causal: bool,
) -> None:
    tensors, offsets = pack(
        torch.float64,
        torch.device("cpu"),
        heads=heads,
        key_heads=key_heads,
    )
    weights = torch.randn(tensors[0].shape, dtype=torch.float64)
    out = attend(*tensors, offsets, max(LENGTHS), scale=0.3, window=window, causal=causal)
    expected = one_at_a_time(*tensors, window=window, scale=0.3, causal=causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad((out * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 12, 64, 256])
def test_the_kernels_of_a_gpu_are_as_near_to_fp64_as_padded_attention(
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    window: int | None,
    causal: bool,
    dim: int,
) -> None:
    tensors, offsets = pack(dtype, torch.device("cuda"), dim, heads=heads, key_heads=key_heads)
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weights = torch.randn(tensors[0].shape, dtype=torch.float64, device="cuda")

    def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad((out.double() * weights).sum(), inputs)
        return [result.detach().double() for result in (out, *gradients)]

    exact_out = one_at_a_time(*exact_tensors, window=window, causal=causal)
    exact = with_gradients(exact_out, exact_tensors)
    out = packed_softmax_attention(*tensors, offsets, max(LENGTHS), window=window, causal=causal)
    results = with_gradients(out, tensors)
    out = padded(*tensors, offsets, max(LENGTHS), window=window, causal=causal)
    padded_results = with_gradients(out, tensors)
    for result, padded_result, truth in zip(results, padded_results, exact, strict=True):
        rounding = torch.finfo(dtype).eps * float(truth.abs().max())
        padded_error = float((padded_result - truth).abs().max())
        assert float((result - truth).abs().max()) <= 2 * padded_error + 2 * rounding


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_drops_weights_and_keeps_their_mean(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.zeros(64, 2, 8, device=device, dtype=dtype)
    value = torch.ones(64, 2, 8, device=device, dtype=dtype)
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    runs = [
        packed_softmax_attention(query, query, value, offsets, 40, dropout_p=0.25)[..., 0]
        for _ in range(64)
    ]
    sums_of_weights = torch.stack(runs).float()
    # The mean is of 64 x 128 sums of at least 24 weights, so that its standard deviation is below
    # 0.4 / sqrt(64 * 128 * 24) = 0.001.
    assert abs(float(sums_of_weights.mean()) - 1) < 0.005
    deviation = float(sums_of_weights.std(0).mean())
    assert deviation == pytest.approx((0.25 / 0.75 / 32) ** 0.5, rel=0.15)
    torch.testing.assert_close(packed_softmax_attention(query, query, value, offsets, 40), value)


def test_token_positions_skip_empty_sequences() -> None:
    sequences, positions = token_positions(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5)
    assert sequences.tolist() == [0, 0, 2, 2, 2]
    assert positions.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("n_offsets", [1, 3])
@pytest.mark.parametrize("attend", [packed_softmax_attention, padded])
def test_no_tokens_give_no_output(attend: Callable[..., Tensor], n_offsets: int) -> None:
    no_tokens = torch.zeros(0, 2, 8)
    offsets = torch.zeros(n_offsets, dtype=torch.int32)
    assert attend(no_tokens, no_tokens, no_tokens, offsets, 0).shape == (0, 2, 8)


def test_one_sequence_is_scaled_dot_product_attention() -> None:
    tensors = [torch.randn(6, 2, 8) for _ in range(3)]
    out = packed_softmax_attention(*tensors, torch.tensor([0, 6], dtype=torch.int32), 6)
    expected = scaled_dot_product_attention(*(tensor.transpose(0, 1)[None] for tensor in tensors))
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("key_shape", "value_shape"),
    [
        pytest.param((4, 1, 8), (4, 2, 8), id="other heads of values"),
        pytest.param((4, 3, 8), (4, 3, 8), id="more key heads than query heads"),
        pytest.param((4, 0, 8), (4, 0, 8), id="no key heads"),
        pytest.param((3, 2, 8), (3, 2, 8), id="fewer keys than queries"),
        pytest.param((4, 2, 4), (4, 2, 4), id="smaller key heads"),
        pytest.param((4, 16), (4, 16), id="no dimension of heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    key_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
) -> None:
    query = torch.zeros(4, 2, 8)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must have one shape \[T, Hkv, D\], where Hkv divides H"):
        packed_softmax_attention(
            query,
            torch.zeros(key_shape),
            torch.zeros(value_shape),
            offsets,
            4,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_operands_are_cast_under_autocast(device: torch.device, dtype: torch.dtype) -> None:
    # Under autocast, a linear layer returns values in 16 bits, and rotary embeddings return queries
    # and keys in fp32.
    (query, key, value), offsets = pack(torch.float32, device, dim=64, heads=6, key_heads=2)
    with torch.autocast(device.type, dtype):
        out = packed_softmax_attention(query, key, value.to(dtype), offsets, max(LENGTHS))
    cast = [tensor.to(dtype) for tensor in (query, key, value)]
    expected = packed_softmax_attention(*cast, offsets, max(LENGTHS))
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    for gradient in torch.autograd.grad(out.sum(), [query, key, value]):
        assert gradient.dtype == torch.float32
        assert torch.isfinite(gradient).all()


def test_operands_of_several_dtypes_are_refused_without_autocast() -> None:
    rows = torch.zeros(4, 2, 8)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dtype of query \(float32\), got float32 and bfloat16"):
        packed_softmax_attention(rows, rows, rows.bfloat16(), offsets, 4)


def test_offsets_of_another_dtype_are_refused() -> None:
    rows = torch.zeros(4, 2, 8)
    offsets = torch.tensor([0, 4])
    with pytest.raises(
        ValueError,
        match=r"cu_seqlens must be int32 of shape \[B \+ 1\], got torch.int64",
    ):
        packed_softmax_attention(rows, rows, rows, offsets, 4)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5], r"got cu_seqlens\[-1\] = 5 with 4 tokens in query"),
        ([0, 3], r"got cu_seqlens\[-1\] = 3 with 4 tokens in query"),
        ([1, 4], r"got cu_seqlens\[0\] = 1"),
        ([0, 3, 1, 4], r"got cu_seqlens\[2\] = 1 after 3"),
        ([], r"cu_seqlens must be int32 of shape \[B \+ 1\], got torch.int32 of shape \[0\]"),
    ],
)
def test_offsets_that_do_not_describe_the_rows_are_refused(
    offsets: list[int],
    message: str,
) -> None:
    rows = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=message):
        packed_softmax_attention(rows, rows, rows, torch.tensor(offsets, dtype=torch.int32), 4)


class StubHandle:
    """Handle of an activated flash attention that has no kernels."""

    def remove(self) -> None:
        """Nothing was registered with torch's dispatcher."""


@contextmanager
def activated_flash_attention() -> Iterator[None]:
    """Activate a flash attention named ``"stub"``, as FlashAttention-3 would be."""
    attention.register_flash_attention_impl("stub", register_fn=StubHandle)
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


def refuse(qkv: Any, cu_seqlens: Tensor, longest: int, options: AttentionOptions) -> Tensor:
    """Refuse packed attention as FlashAttention-3 does: with dropout, and on other devices."""
    reason = "dropout_p must be 0" if options.dropout_p else "FA3 requires compute capability 9.0"
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
def test_a_fallback_runs_after_one_warning_if_an_activated_flash_attention_refuses(
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
            AttentionOptions(window=window, dropout_p=dropout_p),
        )

    with activated_flash_attention():
        with pytest.warns(FallbackWarning, match=f"'stub'.*{reason}.*restore_flash_attention_impl"):
            out = attend()
        assert out is (tensors[2] if window is None else None)  # None is padded attention
        attend()  # a second warning would be an error


@needs_registry
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
def test_training_with_dropout_works_with_an_activated_flash_attention_without_dropout(
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
            out = packed_softmax_attention(*tensors, offsets, max(LENGTHS), window=window)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_of_at_most_one_token_may_be_empty_with_shared_heads(
    device: torch.device,
) -> None:
    query = torch.randn(2, 4, 8, dtype=torch.bfloat16, device=device)
    key = torch.randn(2, 2, 8, dtype=torch.bfloat16, device=device)
    value = torch.randn(2, 2, 8, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor([0, 1, 1, 2], dtype=torch.int32, device=device)
    outputs = packed_softmax_attention(query, key, value, cu_seqlens, max_seqlen=1)
    torch.testing.assert_close(outputs, value.repeat_interleave(2, dim=1))


class _FlashArguments(TorchDispatchMode):
    """Records the longest sequences of queries and keys that torch's flash attention gets."""

    longest: tuple[int, ...] = ()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten._flash_attention_forward.default:
            return func(*args, **(kwargs or {}))
        self.longest = args[5:7]
        query = args[0]
        return query, query.new_empty(0), query.new_empty(0), query.new_empty(0), query.new_empty(0)


def test_torch_never_regroups_the_heads_of_sequences_of_one_token() -> None:
    heads = torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    with _FlashArguments() as arguments:
        flash_attention_varlen((heads, heads, heads), cu_seqlens, 1, AttentionOptions())
    assert arguments.longest == (2, 2)
