"""The contrastive loss of MaxSim over the documents of several ranks: what one process with everything computes."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed import ring_jobs as jobs
from tests.distributed.ranks import Ranks

CASES: list[dict[str, Any]] = [
    {},
    {"layout": "full", "impl": "reference"},
    {"layout": "packed", "temperature": 0.7},
    {"layout": "holes", "reduction": "mean", "normalize": True, "scale": 20},
    {"layout": "left", "dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "temperature": 0.5, "reduction": "mean"},
]


def test_loss_and_gradients_of_uneven_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    ranks.run(jobs.equals_one_process, CASES)


def test_two_ranks_of_the_cpu_form_a_ring_too(two_ranks: Ranks) -> None:
    two_ranks.run(jobs.equals_one_process, CASES[:2])


def test_gradients_averaged_by_ddp_are_those_of_one_process(ranks: Ranks) -> None:
    ranks.run(jobs.averaged_gradients_are_those_of_one_process)


def test_two_runs_agree_in_every_bit(ranks: Ranks) -> None:
    ranks.run(jobs.two_runs_agree_in_every_bit)


def test_a_rank_holds_two_blocks_of_others_at_most(ranks: Ranks) -> None:
    ranks.run(jobs.a_rank_holds_two_blocks_of_others_at_most)


def test_ranks_without_queries_or_documents_take_part(ranks: Ranks) -> None:
    ranks.run(jobs.shards_may_be_empty)


def test_nan_of_one_rank_is_seen_by_all_and_inference_keeps_no_graph(ranks: Ranks) -> None:
    ranks.run(jobs.nan_is_seen_and_inference_keeps_no_graph)


def test_gradients_of_one_side_alone(ranks: Ranks) -> None:
    ranks.run(jobs.gradients_of_one_side)


def test_compiled_code_may_call_it(two_ranks: Ranks) -> None:
    two_ranks.run(jobs.compiled_code_may_call_it)


def test_a_group_may_be_some_of_the_ranks_or_one(ranks: Ranks) -> None:
    ranks.run(jobs.a_group_of_some_ranks)


def test_what_does_not_fit_on_one_rank_raises_on_every_rank(ranks: Ranks) -> None:
    answers = ranks.run(jobs.errors_are_raised_on_every_rank)
    expected = [
        ("document_mask must have shape [4, 5], got [4, 6]", True),
        ("queries must be a torch.Tensor, got list", True),
        ("labels must have shape [2], got [3]", True),
        ("queries must have the same D on every rank of group, got 8, 6", False),
        ("queries must have the same dtype on every rank of group, got float32, float16", False),
        ("scale, reduction, mask_mode, temperature and normalize must be the same on every rank of group", False),
        ("queries must require a gradient on all ranks or on none", False),
        ("documents must be at least as many as queries (2) without labels, got 1", True),
        ("labels must be at least 0 and below the number of documents (4), got 4", True),
        ("cu_seqlens_d[-1] = 19 with 20 rows", True),
    ]
    for number, texts in enumerate(answers):
        assert len(texts) >= 8
        for text, (problem, local) in zip(texts, expected, strict=False):
            assert problem in text, (number, text)
            if local and number != 1:
                assert "arguments must fit on every rank of group, got on rank 1: " in text
