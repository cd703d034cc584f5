"""Packed batches: tables of tiles, and offsets that describe no rows, which the host does not look at on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tilefold.ops import entmax_attention
from tilefold.ops._shared import operator
from tilefold.ops._shared.impl import triton_interpreted

no_interpreter = pytest.mark.skipif(triton_interpreted(), reason="needs no interpreter")


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
            out = entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, max_seqlen_k=bound)
            assert isinstance(out, Tensor) and bool(out.isnan().all()) == broken == bool(out.isnan().any())


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 2**32 + 20]),  # cut to 32 bits these two describe the rows
        torch.tensor([0, 7 - 2**32, 20]),
        torch.tensor([0, 2**31 - 1, -2, 20], dtype=torch.int32),  # in 32 bits no difference is negative
    ],
    ids=["too large", "too small", "wraps"],
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_offsets_beyond_32_bits_give_nan_and_no_plausible_number(
    target: Target, monkeypatch: pytest.MonkeyPatch, bad: Tensor, side: str
) -> None:
    if target.impl != "triton":
        pytest.skip("the host looks")
    # on the CPU too it must not look, as it does not on a GPU
    monkeypatch.setattr(operator, "may_look", lambda first: False)
    rows = torch.randn(20, 1, 16, device=target.device, requires_grad=True)
    good = torch.arange(bad.numel()).clamp(max=1) * 20
    cu_q, cu_k = (bad if side in (name, "both") else good for name in "qk")
    offsets = {"cu_seqlens_q": cu_q.to(target.device), "cu_seqlens_k": cu_k.to(target.device)}
    out = entmax_attention(rows, rows, rows, impl=target.impl, **offsets)
    assert isinstance(out, Tensor) and bool(out.isnan().all())
    out.sum().backward()  # reads nothing elsewhere


def torch_table(offsets: Tensor, block: int, tiles: int) -> tuple[Tensor, Tensor]:
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    every = torch.arange(tiles, device=offsets.device)
    of_tile = torch.searchsorted(ends, every, right=True)
    return of_tile.to(torch.int32), torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@pytest.mark.parametrize("keys", [32, 0])
@pytest.mark.parametrize("lengths", [[5], [0, 70, 0, 16, 15, 0], [33] * 70, [20, -7, 40], []], ids=str)
def test_tables_of_packed_batches(target: Target, lengths: list[int], keys: int) -> None:
    if target.impl != "triton":
        pytest.skip("only the kernels need tables")
    from tilefold.ops._shared._triton.launch import launch
    from tilefold.ops.entmax_attention._triton.packing import tables_kernel

    cu_q = torch.tensor([0, *lengths], device=target.device).cumsum(0).to(torch.int32)
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
    launch(tables_kernel, grid, (cu_q, cu_k, *tables, batch, sizes[0], sizes[1] if keys else 0), constants)
    assert all(torch.equal(found, table) for found, table in zip(made, wanted, strict=True))
