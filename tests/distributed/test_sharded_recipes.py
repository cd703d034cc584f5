"""Recipes on decoders whose weights are divided among ranks train like one process.

Functions that take a :class:`Rank` run in every process of a group.
"""

from __future__ import annotations

import shutil
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator,
)
from transformers import AutoModelForCausalLM

from tests.distributed.ranks import SECONDS, Rank, Ranks
from tests.distributed.test_recipes import (
    SMALL,
    assert_near,
    assert_same_losses,
    logged_losses,
    run_recipe,
    run_with_evaluation,
    run_with_killed_rank,
    train_until_interrupted,
)
from tests.recipes.small import small_collection, tiny_causal_lm, with_dev
from tilefold.distributed.world import RESUME_HINT
from tilefold.recipes import ColbertRecipe, decoders, get_recipe, train
from tilefold.recipes._run import newest_step
from tilefold.recipes._sharding import ShardedModel

pytest.importorskip("datasets")


@pytest.fixture(scope="session")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama in fp64, whose LM head has a weight of its own."""
    folder = tmp_path_factory.mktemp("untied-decoder")
    return exact_causal_lm(folder, family="llama", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama in fp64, whose LM head has the weight of the embeddings."""
    folder = tmp_path_factory.mktemp("tied-decoder")
    return exact_causal_lm(folder, family="llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def gemma_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Gemma 3 in fp64, which has tied weights and multiplies embeddings by a factor."""
    folder = tmp_path_factory.mktemp("gemma")
    return exact_causal_lm(folder, family="gemma3_text", head_dim=16)


def exact_causal_lm(folder: Path, **options: Any) -> str:
    """Save a tiny causal language model in fp64, and return its folder.

    In fp32 the gradients of some terms are nothing but rounding, and Adam makes whole steps of
    them.
    """
    tiny_causal_lm(folder, **options)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    network.save_pretrained(folder)
    return str(folder)


def causal_recipe(base: str, *, lora: int | None = None, **options: Any) -> Any:
    """Return a short training run of SPLADE on a decoder."""
    settings = {**SMALL, "query_regularizer": 0.3, "document_regularizer": 0.2, **options}
    recipe = get_recipe("causal-splade", base_model=base, **settings)
    return replace(recipe, document=replace(recipe.document, lora=lora))


def run_without_lora_dropout(rank: Rank, recipe: Any, folder: Path) -> Any:
    """:func:`run_recipe` without dropout, which would differ between ranks."""
    with without_lora_dropout():
        return run_recipe(rank, recipe, folder)


def run_and_measure_share(rank: Rank, recipe: Any, folder: Path) -> tuple[Any, float]:
    """:func:`run_recipe`, and the share of the trained weights that this rank stores."""
    shares = []
    attach = ShardedModel.attach

    def attach_and_measure(self: Any, trainer: Any) -> None:
        attach(self, trainer)
        parameters = list(self.model.parameters())
        n_stored = sum(parameter.to_local().numel() for parameter in parameters)
        shares.append(n_stored / sum(parameter.numel() for parameter in parameters))

    with mock.patch.object(ShardedModel, "attach", attach_and_measure):
        result = run_recipe(rank, recipe, folder)
    return result, shares[0]


def run_colbert(rank: Rank, recipe: Any, folder: Path) -> tuple[Any, int, int]:
    """Run a ColBERT without LoRA dropout, and count what this rank evaluates and saves.

    Returns:
        The result, the number of evaluations, and how often this rank has saved the projection.
    """
    saves_projection = mock.patch.object(Dense, "save", autospec=True, side_effect=Dense.save)
    with without_lora_dropout(), saves_projection as saves:
        result, n_evaluations = run_with_evaluation(
            rank,
            recipe,
            folder,
            MultiVectorInformationRetrievalEvaluator,
        )
    return result, n_evaluations, saves.call_count


def without_lora_dropout() -> Any:
    """Create a context in which recipes add LoRA updates without dropout."""
    return mock.patch.object(decoders, "add_lora", partial(decoders.add_lora, dropout=0.0))


def assert_loads_with_the_weights_of(folder: Path, expected_folder: Path) -> None:
    """Check that sentence-transformers loads a trained model, and that another one equals it."""
    texts = list(small_collection().queries.values())[:3]
    vectors, expected_vectors = (
        SparseEncoder(str(path), device="cpu").encode(texts).to_dense()
        for path in (folder, expected_folder)
    )
    assert (expected_vectors > 0).any()
    torch.testing.assert_close(vectors, expected_vectors)
    assert_near(folder, expected_folder)


@pytest.mark.slow
def test_sharded_ranks_resume_where_one_process_stopped_and_end_with_its_model(
    two_ranks: Ranks,
    untied_base: str,
    tmp_path: Path,
) -> None:
    recipe = causal_recipe(untied_base, log_steps=1)
    train(recipe, small_collection(), tmp_path / "one")
    train_until_interrupted(recipe, tmp_path / "two", last_step=3)
    sharded_recipe = replace(recipe, fsdp=True)
    for result, share in two_ranks.run(run_and_measure_share, sharded_recipe, tmp_path / "two"):
        assert (result["ranks"], result["resumed_from"], result["steps"]) == (2, 2, 6)
        assert share == pytest.approx(1 / 2, abs=0.01)
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert_loads_with_the_weights_of(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_sharded_lora_with_mini_batches_and_checkpointing_has_the_losses_of_one_batch(
    two_ranks: Ranks,
    gemma_base: str,
    tmp_path: Path,
) -> None:
    recipe = causal_recipe(gemma_base, lora=2)
    with without_lora_dropout():
        train(recipe, small_collection(), tmp_path / "one")
    smaller_steps = replace(recipe, mini_batch_size=2, gradient_checkpointing=True, fsdp=True)
    results = two_ranks.run(run_without_lora_dropout, smaller_steps, tmp_path / "two")
    assert [result["ranks"] for result in results] == [2, 2]
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert_loads_with_the_weights_of(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("base_fixture", "lora"),
    [
        pytest.param("untied_base", None, id="all weights"),
        pytest.param("tied_base", None, id="tied weights", marks=pytest.mark.slow),
        pytest.param("gemma_base", 2, id="LoRA on scaled embeddings", marks=pytest.mark.slow),
    ],
)
def test_a_split_vocabulary_has_the_losses_of_one_process(
    two_ranks: Ranks,
    base_fixture: str,
    lora: int | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    recipe = causal_recipe(request.getfixturevalue(base_fixture), lora=lora, log_steps=1)
    with without_lora_dropout():
        train(recipe, small_collection(), tmp_path / "one")
    split_recipe = replace(
        recipe,
        fsdp=True,
        split_vocabulary=True,
        mini_batch_size=2,
        gradient_checkpointing=True,
    )
    results = two_ranks.run(run_without_lora_dropout, split_recipe, tmp_path / "two")
    assert [result["ranks"] for result in results] == [2, 2]
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert_loads_with_the_weights_of(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(None, id="all weights"), pytest.param(2, id="LoRA")])
def test_a_killed_rank_ends_the_others_and_one_process_resumes(
    two_ranks: Ranks,
    lora: int | None,
    untied_base: str,
    tmp_path: Path,
) -> None:
    recipe = causal_recipe(untied_base, lora=lora, fsdp=True)
    output = tmp_path / "m"
    with without_lora_dropout():
        train(recipe, small_collection(), tmp_path / "one")
    futures = two_ranks.start(run_with_killed_rank_without_lora_dropout, recipe, output)
    error, message = futures[0].result(timeout=SECONDS)
    with pytest.raises(BrokenProcessPool, match="terminated abruptly"):
        futures[1].result()
    two_ranks.close()
    assert error == "RankError"
    assert message.startswith("rank 0: another rank ended, or")
    assert RESUME_HINT in message
    assert newest_step(output) == 4
    SparseEncoder(str(output.with_name("m.training") / "checkpoint-4"), device="cpu")
    with without_lora_dropout():
        assert train(recipe, small_collection(), output).resumed_from == 4
    assert_loads_with_the_weights_of(output, tmp_path / "one")


def run_with_killed_rank_without_lora_dropout(rank: Rank, recipe: Any, folder: Path) -> Any:
    """:func:`run_with_killed_rank`, in which rank 1 dies after step 5, without dropout."""
    with without_lora_dropout():
        return run_with_killed_rank(rank, recipe, folder, killed_rank=1, step=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "split_vocabulary"),
    [
        pytest.param(None, False, id="all weights"),
        pytest.param(2, False, id="LoRA"),
        pytest.param(None, True, id="split vocabulary"),
    ],
)
def test_sharded_weights_in_bf16_have_about_the_losses_of_one_process(
    two_ranks: Ranks,
    lora: int | None,
    split_vocabulary: bool,
    untied_base: str,
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    shutil.copytree(untied_base, base)
    network = AutoModelForCausalLM.from_pretrained(untied_base, dtype=torch.bfloat16)
    network.save_pretrained(base)
    recipe = causal_recipe(str(base), lora=lora, bf16=True)
    with without_lora_dropout():
        train(recipe, small_collection(), tmp_path / "one")
    sharded_recipe = replace(recipe, fsdp=True, split_vocabulary=split_vocabulary)
    for result in two_ranks.run(run_without_lora_dropout, sharded_recipe, tmp_path / "two"):
        assert result["ranks"] == 2
    pairs = zip(logged_losses(tmp_path / "two"), logged_losses(tmp_path / "one"), strict=True)
    for step, expected in pairs:
        assert step["loss"] == pytest.approx(expected["loss"], rel=5e-2)


@pytest.mark.parametrize(
    "split_vocabulary",
    [
        pytest.param(False, id="whole head"),
        pytest.param(True, id="split vocabulary", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_evaluate_a_sharded_model_and_keep_the_best_step_of_one_process(
    two_ranks: Ranks,
    split_vocabulary: bool,
    untied_base: str,
    tmp_path: Path,
) -> None:
    recipe = causal_recipe(untied_base, batch_size=4, evaluate_steps=2)
    expected = train(recipe, with_dev(), tmp_path / "one")
    assert expected.kept_step is not None
    sharded_recipe = replace(recipe, fsdp=True, split_vocabulary=split_vocabulary)
    for result, n_evaluations in two_ranks.run(
        run_with_evaluation,
        sharded_recipe,
        tmp_path / "two",
    ):
        assert n_evaluations == len(expected.evaluations) == 3
        assert result["kept_step"] == expected.kept_step
        for measures, expected_measures in zip(
            result["evaluations"],
            expected.evaluations,
            strict=True,
        ):
            assert measures == pytest.approx(expected_measures)
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert_loads_with_the_weights_of(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all weights"),
        pytest.param(
            {"mini_batch_size": 2, "gradient_checkpointing": True},
            id="mini-batches",
            marks=pytest.mark.slow,
        ),
        pytest.param({"lora": 2}, id="LoRA", marks=pytest.mark.slow),
    ],
)
def test_a_sharded_colbert_has_the_losses_and_evaluations_of_one_process(
    two_ranks: Ranks,
    options: dict[str, Any],
    untied_base: str,
    tmp_path: Path,
) -> None:
    settings = {**SMALL, "batch_size": 4, "evaluate_steps": 2, "log_steps": 1, **options}
    recipe = ColbertRecipe(untied_base, dimension=16, **settings)
    with without_lora_dropout():
        expected = train(recipe, with_dev(), tmp_path / "one")
    sharded_recipe = replace(recipe, fsdp=True)
    results = two_ranks.run(run_colbert, sharded_recipe, tmp_path / "two")
    # A rank other than rank 0 would replace the trained projection by its own.
    assert [n_saves > 0 for _, _, n_saves in results] == [True, False]
    for result, n_evaluations, _ in results:
        assert (result["ranks"], n_evaluations) == (2, 3)
        assert result["kept_step"] == expected.kept_step
        assert result["evaluations"] == expected.evaluations
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert_near(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_vocabulary_with_another_pooling_is_not_split(
    two_ranks: Ranks,
    untied_base: str,
    tmp_path: Path,
) -> None:
    recipe = causal_recipe(untied_base, fsdp=True, split_vocabulary=True)
    other_pooling = replace(recipe.document, drop_special_tokens=True)
    recipe = replace(recipe, document=other_pooling)
    for error, message in two_ranks.run(run_recipe, recipe, tmp_path / "m"):
        assert error == "ArgumentError"
        assert message.startswith("split_vocabulary: expected a decoder on packed tokens")
