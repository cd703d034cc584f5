"""What the demo plans at given speeds, and how it states what it found."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from tilefold.cli._demo_claims import compare, mean_and_error, per_query
from tilefold.cli._demo_plan import FULL, FULL_SIZE, SIZES, Plan, Speed, Texts, Work, make_plan, refit, size_plan
from tilefold.cli._demo_report import SYSTEMS, figures

MINILM = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
WORK = Work.of(MINILM, 48)
TEXTS = Texts([20, 60, 200] * 2200, judged=2100, query_length=20.0)


def speed(gflops: float) -> Speed:
    return Speed(gflops * 1e9, gflops * 1e9, gflops * 1e9)


def at(gflops: float, minutes: float = 5.0) -> Plan:
    return make_plan(minutes, speed(gflops), WORK, TEXTS)


def total(plan: Plan) -> float:
    return sum(plan.seconds.values())


def test_the_operations_of_a_token_are_those_that_torch_counts() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=3000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = BertForMaskedLM._from_config(config, attn_implementation="eager")
    ids = torch.randint(3000, (5, 24))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    assert Work.of(config, 24).encoding * ids.numel() == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_a_backward_pass_costs_twice_the_forward_pass_of_the_encoder() -> None:
    assert WORK.training == WORK.encoding + 2 * WORK.encoder


def test_two_avx2_cores_have_a_plan_for_the_default_time() -> None:
    plan = at(0.75 * 130)  # bare products reach 130 GFLOP/s there, the model with all that is no product less
    assert plan.size == SIZES[0]
    assert plan.steps >= plan.size.fewest
    assert total(plan) <= 300


@pytest.mark.parametrize("gflops", [100, 130, 250, 500, 1000, 20_000, 1e9])
def test_a_plan_that_fits_stays_within_the_minutes(gflops: float) -> None:
    plan = at(gflops)
    assert total(plan) <= 300
    assert plan.size.fewest <= plan.steps <= plan.size.most


@pytest.mark.parametrize("gflops", [1e-3, 1, 10])
def test_a_machine_too_slow_gets_the_least_that_shows_a_result_and_its_true_time(gflops: float) -> None:
    plan = at(gflops)
    assert (plan.size, plan.steps, plan.head_shapes) == (SIZES[0], SIZES[0].fewest, 1)
    assert total(plan) > 300


def test_a_faster_machine_or_more_minutes_never_do_less() -> None:
    for plans in ([at(gflops) for gflops in (20, 60, 100, 200, 400, 2000)], [at(80, m) for m in (1, 3, 5, 9, 20, 60)]):
        assert all(a.documents <= b.documents for a, b in pairwise(plans))
        assert all(a.operations["training"] <= b.operations["training"] for a, b in pairwise(plans))
    assert at(2000).documents == len(TEXTS.lengths)
    assert at(2000).size.max_length == FULL_SIZE.max_length


def test_documents_that_queries_ask_for_are_never_left_out() -> None:
    texts = dataclasses.replace(TEXTS, judged=5000)
    assert make_plan(5.0, speed(1), WORK, texts).documents == 5000


def test_the_seconds_already_spent_count() -> None:
    assert at(100).steps > make_plan(5.0, speed(100), WORK, TEXTS, spent=20).steps


def test_a_stage_that_took_twice_its_time_leaves_fewer_steps_that_fit() -> None:
    plan = at(120)
    left = 300 - 2 * plan.seconds["dense"]
    slower = refit(plan, left, ("dense",), slowdown=2.0)
    assert plan.size.fewest <= slower.steps < plan.steps
    assert slower.documents == plan.documents
    faster = refit(plan, 300 - plan.seconds["dense"] / 2, ("dense",), slowdown=0.5)
    assert plan.steps <= faster.steps <= plan.size.most


def test_one_disturbed_stage_changes_what_is_expected_of_the_rest_by_no_more_than_a_factor_of_two() -> None:
    plan = at(100)
    for slowdown, factor in ((50.0, 2.0), (1.5, 1.5), (0.01, 0.5)):
        corrected = refit(plan, 300.0, ("dense",), slowdown)
        assert corrected.speed.encoding == pytest.approx(plan.speed.encoding / factor)


def test_after_training_the_steps_stay_and_the_comparison_of_heads_gives_way() -> None:
    plan = dataclasses.replace(at(400), head_shapes=3)
    late = refit(plan, 1.0, ("dense", "training", "encoding"), slowdown=1.0)
    assert (late.steps, late.head_shapes) == (plan.steps, 1)


def test_the_full_demo_is_the_same_on_every_machine() -> None:
    plans = [size_plan(FULL, FULL_SIZE, speed(gflops), WORK, TEXTS) for gflops in (1, 1e6)]
    for plan in plans:
        assert (plan.steps, plan.head_shapes, plan.documents) == (110, 3, len(TEXTS.lengths))
        assert refit(plan, 0.0, ("dense",), slowdown=9.0).steps == 110


def test_a_plan_survives_its_file() -> None:
    plan = at(100)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_mean_has_the_standard_error_of_its_sample() -> None:
    values = [0.0, 1.0, 0.5, 0.25, 1.0]
    assert mean_and_error(values) == pytest.approx((0.55, statistics.stdev(values) / math.sqrt(5)))
    assert mean_and_error([0.7]) == (0.7, 0.0)
    assert mean_and_error([3.09] * 11)[1] == 0.0, "whose mean is another number, by a rounding"


def test_a_difference_is_paired_by_query_and_says_when_it_may_be_chance() -> None:
    scores = {"a": [0.9, 0.5, 0.3, 0.8], "b": [0.8, 0.4, 0.2, 0.7], "c": [0.1, 1.0, 0.3, 0.7]}
    sure = compare("a", "b", scores)
    assert sure.difference == pytest.approx(0.1)
    assert sure.standard_error == pytest.approx(0.0, abs=1e-12)
    unsure = compare("a", "c", scores)
    assert unsure.standard_error == pytest.approx(statistics.stdev([0.8, -0.5, 0.0, 0.1]) / 2)
    assert "may be chance" in unsure.text
    assert "may be chance" not in sure.text
    assert unsure.text.startswith("a over c: +0.100 ± 0.268")


def test_claims_are_computed_over_every_judged_query_even_those_without_answers() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 1}}
    right = {"q1": {"a": 1.0}, "q2": {"b": 1.0}}
    half = {"q1": {"a": 1.0}, "unjudged": {"b": 1.0}}
    assert per_query(half, qrels, "nDCG@10") == [1.0, 0.0]
    found = figures(dict(zip(SYSTEMS, (half, half, right, right, right), strict=True)), qrels)
    assert found["queries"] == 2
    assert found["systems"][SYSTEMS[0]]["nDCG@10"] == 0.5
    assert found["systems"][SYSTEMS[0]]["standard_error"] == 0.5
    named = [(row["system"], row["over"], row["difference"]) for row in found["comparisons"]]
    assert named == [
        (SYSTEMS[2], SYSTEMS[0], 0.5),
        (SYSTEMS[2], SYSTEMS[1], 0.5),
        (SYSTEMS[3], SYSTEMS[2], 0.0),
        (SYSTEMS[4], SYSTEMS[2], 0.0),
    ]
