"""Division of the token tiles among program instances of the head's forward kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="configurations of kernels")

from tests.ops.base import Setting
from tilefold.ops.lsr_head import configs

H200 = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
A100 = Setting((8, 0), 108, tf32=False, aligned=True, failed_kernels=frozenset())
LANGUAGE_MODELS = [
    pytest.param(8, 512, 4096, 128256, id="Llama 8B"),
    pytest.param(32, 256, 4096, 32000, id="Mistral 7B"),
    pytest.param(8, 512, 2048, 128256, id="Llama 1B"),
]


def bf16_work(
    batch: int,
    length: int,
    dim: int,
    vocab: int,
    ragged: bool = False,
) -> configs.ForwardWork:
    """The product of bf16 operands in tiles of the kernel for Hopper GPUs."""
    return configs.ForwardWork(
        n_rows=batch * length,
        uniform_length=0 if ragged else length,
        vocab=vocab,
        dim=dim,
        dtype=torch.bfloat16,
        block_v=128,
        block_t=256,
    )


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize(("batch", "length", "dim", "vocab"), LANGUAGE_MODELS)
def test_instances_share_vocabulary_tiles_that_the_cache_cannot_hold(
    batch: int,
    length: int,
    dim: int,
    vocab: int,
    ragged: bool,
) -> None:
    work = bf16_work(batch, length, dim, vocab, ragged)
    splits = configs.plan_splits(work, H200)
    vocabulary_tiles_in_use = H200.multiprocessors / splits.number
    bytes_in_use = vocabulary_tiles_in_use * work.block_v * dim * work.dtype.itemsize
    assert bytes_in_use < configs.L2_BYTES / 2


@pytest.mark.parametrize(
    ("batch", "length", "dim", "vocab", "expected"),
    [
        pytest.param(32, 512, 768, 30522, (16, 2), id="BERT-base"),
        pytest.param(16, 512, 768, 250002, (1, 2), id="XLM-R"),
        pytest.param(16, 512, 1024, 151936, (1, 2), id="Qwen3 0.6B"),
        pytest.param(4, 8192, 768, 50368, (1, 1), id="long texts"),
    ],
)
def test_short_rows_are_split_for_equal_work_alone(
    batch: int,
    length: int,
    dim: int,
    vocab: int,
    expected: tuple[int, int],
) -> None:
    assert configs.plan_splits(bf16_work(batch, length, dim, vocab), H200) == expected


def test_splits_of_whole_sequences_consist_of_whole_sequences() -> None:
    splits = configs.plan_splits(bf16_work(8, 512, 4096, 128256), H200)
    assert splits.multiple == 2  # a sequence of 512 tokens has two tiles
    assert splits.number <= 8


def test_few_rows_are_one_split() -> None:
    splits = configs.plan_splits(bf16_work(1, 16, 4096, 128256), H200)
    assert splits == configs.Splits(number=1, multiple=1)


def test_reads_are_counted_where_they_were_measured_only() -> None:
    work = bf16_work(32, 256, 4096, 32000, ragged=True)
    on_hopper = configs.constants_of(configs.SPLIT_COSTS, work.dtype, H200, dim=work.dim)
    before_hopper = configs.constants_of(configs.SPLIT_COSTS, work.dtype, A100, dim=work.dim)
    assert on_hopper["READ"] > before_hopper["READ"] == 0
