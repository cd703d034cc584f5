"""The head over a sharded vocabulary, on real worlds: scores and gradients equal those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import head_jobs as jobs
from tests.distributed.ranks import Ranks

CASES: list[dict[str, Any]] = [
    {},
    {"size": (3, 7, 16, 24), "layout": "packed"},
    {"layout": "full", "bias": False},
    {"dtype": torch.bfloat16, "activation": "softplus", "logit_scale": 0.5},
    {"dtype": torch.float64, "activation": "none"},
    {"pooling": "sum"},
    {"pooling": "mean", "layout": "packed", "dtype": torch.bfloat16},
    {"pooling": "cls", "activation": "log1p_log1p_relu"},
    {"pooling": "last", "layout": "packed"},
    {"out_dtype": torch.float32, "dtype": torch.bfloat16},
    {"impl": "reference"},
]


def test_scores_and_gradients_of_a_sharded_vocabulary_are_within_budget(ranks: Ranks) -> None:
    ranks.run(jobs.equals_the_truth, CASES)


def test_two_ranks_of_the_cpu_share_a_vocabulary_too(two_ranks: Ranks) -> None:
    two_ranks.run(jobs.equals_the_truth, CASES[:2])


def test_uneven_shards_and_fewer_rows_than_ranks_are_within_budget(ranks: Ranks) -> None:
    sizes = [(4, 6, 16, vocab) for vocab in (29, 4, 2, 1)]
    ranks.run(jobs.equals_the_truth, [{"size": size, "dtype": torch.float64} for size in sizes])
    ranks.run(jobs.equals_the_truth, [{"size": sizes[1], "layout": "packed"}, {"size": sizes[2]}])


def test_a_bert_vocabulary_divides_over_the_ranks(ranks: Ranks) -> None:
    ranks.run(jobs.equals_the_truth, [{"size": (2, 5, 16, 30522), "layout": "right"}])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_hidden_are_rounded_once_as_on_one_device(ranks: Ranks, dtype: torch.dtype) -> None:
    for errors in ranks.run(jobs.equals_one_device, (6, 20, 32, 600), dtype):
        for name, (sharded, whole) in errors.items():
            # partial sums are added in fp32: rounding once more would add 40% in bf16
            assert sharded <= 1.05 * whole + (1e-6 if dtype == torch.float32 else 1e-5), (name, sharded, whole)


@pytest.mark.gpu
def test_kernels_on_two_gpus_are_as_exact_as_on_one_at_a_real_size(two_gpus: Ranks) -> None:
    for errors in two_gpus.run(jobs.equals_one_device, (8, 128, 768, 30522), torch.bfloat16):
        for name, (sharded, whole) in errors.items():
            assert sharded <= 1.05 * whole + 1e-5, (name, sharded, whole)


@pytest.mark.gpu
def test_the_default_compiler_takes_the_sharded_head(two_gpus: Ranks) -> None:
    two_gpus.run(jobs.compiles_in_one_graph, "inductor")


def test_two_runs_agree_in_every_bit(ranks: Ranks) -> None:
    ranks.run(jobs.repeats_in_every_bit)


def test_the_benchmark_measures_what_it_has_checked(ranks: Ranks) -> None:
    for names in ranks.run(jobs.benchmark_rows):
        assert "whole, forward + backward" in names and "shared, forward + backward" in names


def test_other_dimensions_of_the_mesh_may_replicate(ranks: Ranks) -> None:
    ranks.run(jobs.works_on_a_mesh_of_two_dimensions)


def test_frozen_parts_get_no_gradient_and_inference_keeps_no_graph(ranks: Ranks) -> None:
    ranks.run(jobs.gives_only_the_gradients_that_are_asked_for)


def test_autocast_keeps_the_gradients_in_the_dtype_of_the_parameters(ranks: Ranks) -> None:
    ranks.run(jobs.works_under_autocast)


def test_a_sharded_main_grad_takes_the_gradient_of_the_weight(ranks: Ranks) -> None:
    ranks.run(jobs.a_main_grad_shard_takes_the_weight_gradient)


def test_a_sharded_head_compiles_in_one_graph(ranks: Ranks) -> None:
    ranks.run(jobs.compiles_in_one_graph, "aot_eager")
    ranks.run(jobs.a_parallelized_module_compiles, "aot_eager")


def test_sparse_rows_are_whole_and_equal_on_every_rank(ranks: Ranks) -> None:
    cases = [{"vocab": 53}, {"vocab": 53, "top_k": 3}, {"vocab": 53, "top_k": 100, "min_weight": 0.3}]
    ranks.run(jobs.sparse_rows_equal_one_device, cases)


def test_sparse_rows_of_ranks_without_columns(ranks: Ranks) -> None:
    ranks.run(jobs.sparse_rows_equal_one_device, [{"vocab": 4, "top_k": 2}, {"vocab": 4}, {"vocab": 29}])


@pytest.mark.parametrize("output", ["sharded", "gathered"])
def test_a_parallelized_module_trains_like_the_whole_one(ranks: Ranks, output: str) -> None:
    ranks.run(jobs.a_parallelized_module_trains_like_the_whole_one, output)


def test_plain_shards_add_up_when_the_caller_sums_the_gradient_of_hidden(ranks: Ranks) -> None:
    ranks.run(jobs.plain_shards_add_up)


def test_errors_name_the_argument_and_the_remedy(ranks: Ranks) -> None:
    expected = [
        ("hidden must be a DTensor where weight is one", "FSDP"),
        ("weight must be a DTensor where hidden", "distribute_tensor"),
        ("weight must be Shard(0)", "redistribute"),
        ("bias must be a DTensor where weight is one", "distribute_tensor"),
        ("bias must lie like weight", "redistribute"),
        ("hidden must be Replicate()", "redistribute"),
        ("hidden must lie on the mesh of weight", "redistribute"),
        ("weight must have the dtype of hidden (bfloat16)", "autocast"),
    ]
    for texts in ranks.run(jobs.errors_name_argument_and_remedy):
        for text, (problem, remedy) in zip(texts, expected, strict=True):
            assert problem in text and remedy in text, text


def test_the_style_is_for_heads_only(ranks: Ranks) -> None:
    assert all(
        "must be applied to a tilefold.nn.LSRHead" in text for text in ranks.run(jobs.a_style_refuses_other_modules)
    )


def test_fsdp_over_rows_goes_with_a_vocabulary_over_columns(ranks: Ranks) -> None:
    ranks.run(jobs.fsdp_around_tensor_parallelism, 1)
    ranks.run(jobs.fsdp_around_tensor_parallelism, ranks.size)
