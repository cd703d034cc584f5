"""Offsets of any stride: the same numbers as contiguous ones, and no warning from torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.base import sequences_of_rows
from tilefold.ops import entmax_attention, lsr_head, maxsim, token_scatter
from tilefold.ops.packed_attention import packed_softmax_attention, token_positions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OFFSETS = [0, 3, 3, 7]
INTEGERS = [torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Every warning is an error; those that torch gives once per process are given every time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


def strided_offsets(device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    offsets = torch.tensor(OFFSETS, dtype=dtype, device=device)
    strided = torch.stack([offsets, offsets], dim=1)[:, 0]
    assert not strided.is_contiguous()
    return strided


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_each_row_belongs_to_the_sequence_whose_offsets_enclose_it(
    device: str,
    dtype: torch.dtype,
) -> None:
    offsets = strided_offsets(device, dtype)
    sequences = sequences_of_rows(offsets, 9)
    assert sequences.dtype == torch.int64
    assert sequences.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 3]
    assert sequences_of_rows(offsets, 9, int32=True).dtype == torch.int32


@pytest.mark.parametrize("device", DEVICES)
def test_places_of_tokens_take_strided_offsets(device: str) -> None:
    sequences, places = token_positions(strided_offsets(device), 7)
    assert sequences.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert places.tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_softmax_attention_takes_strided_offsets_and_heads(
    device: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 7, 16, 2, device=device, dtype=dtype).transpose(2, 3)
    strided = packed_softmax_attention(query, key, value, strided_offsets(device), 4)
    plain = packed_softmax_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        strided_offsets(device).contiguous(),
        4,
    )
    assert torch.equal(strided, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_entmax_attention_takes_strided_offsets(
    device: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 7, 2, 16, device=device)
    offsets = strided_offsets(device, dtype)
    strided, strided_stats = entmax_attention(
        query,
        key,
        value,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        return_stats=True,
    )
    plain, plain_stats = entmax_attention(
        query,
        key,
        value,
        cu_seqlens_q=offsets.contiguous(),
        cu_seqlens_k=offsets.contiguous(),
        return_stats=True,
    )
    assert torch.equal(strided, plain)
    assert str(strided_stats) == str(plain_stats)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_maxsim_and_its_gradients_take_strided_offsets(
    device: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    gradients = []
    for offsets in (strided_offsets(device, dtype), strided_offsets(device, dtype).contiguous()):
        torch.manual_seed(0)
        queries = torch.randn(7, 16, device=device, requires_grad=True)
        documents = torch.randn(7, 16, device=device, requires_grad=True)
        scores = maxsim(queries, documents, cu_seqlens_q=offsets, cu_seqlens_d=offsets)
        gradients.append(torch.autograd.grad(scores.sum(), (queries, documents)))
    for strided, plain in zip(*gradients, strict=True):
        assert torch.equal(strided, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_heads_and_scatters_take_strided_offsets(
    device: str,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    offsets = strided_offsets(device, dtype)
    hidden = torch.randn(7, 16, device=device)
    weight = torch.randn(40, 16, device=device)
    assert torch.equal(
        lsr_head(hidden, weight, cu_seqlens=offsets),
        lsr_head(hidden, weight, cu_seqlens=offsets.contiguous()),
    )
    weights = torch.rand(7, device=device)
    input_ids = torch.randint(40, (7,), device=device)
    assert torch.equal(
        token_scatter(weights, input_ids, 40, cu_seqlens=offsets),
        token_scatter(weights, input_ids, 40, cu_seqlens=offsets.contiguous()),
    )
