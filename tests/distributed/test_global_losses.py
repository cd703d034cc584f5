"""Regularisers over the rows, and the columns, of several ranks: what one process with everything computes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers")

from tests.distributed import loss_jobs as jobs
from tests.distributed.ranks import Ranks


def test_averaged_gradients_of_unequal_ranks_are_those_of_all_rows(ranks: Ranks) -> None:
    ranks.run(jobs.averaged_gradients_are_those_of_all_rows)


def test_scores_with_a_sharded_vocabulary_give_the_value_and_gradient_of_the_whole(ranks: Ranks) -> None:
    ranks.run(jobs.vocabulary_shards_give_the_value_and_gradient_of_the_whole)


def test_rows_over_one_dimension_and_columns_over_another(ranks: Ranks) -> None:
    ranks.run(jobs.rows_and_columns_can_both_be_spread)


def test_ranks_that_cannot_be_told_are_asked_for(ranks: Ranks) -> None:
    for text in ranks.run(jobs.unclear_ranks_are_refused):
        assert "group must name the ranks" in text and "mesh['dp'].get_group()" in text
        assert "scores must be Shard(1)" in text


def test_document_frequencies_count_the_rows_of_all_ranks(ranks: Ranks) -> None:
    ranks.run(jobs.document_frequencies_are_those_of_all_ranks)


def test_stock_splade_loss_under_ddp_equals_one_process(ranks: Ranks, tiny_folder: Path) -> None:
    ranks.run(jobs.splade_loss_step, tiny_folder)
