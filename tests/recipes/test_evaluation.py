"""Evaluations while a model trains: the best one is kept and told, after any interruption, and
patience ends a run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from tests.cli.program import run_cli
from tests.recipes.small import small_collection, tiny_masked_lm, with_dev
from tests.recipes.test_runs import assert_equal, rows_of, stop_at
from tests.refusals import refused
from tilefold._internal.files import LOCK
from tilefold.recipes import ColbertRecipe, OutOfTimeError, get_recipe, train
from tilefold.recipes._evaluation import create_evaluation
from tilefold.recipes.loading import newest_step
from tilefold.retrieval import SparseVectors, build_index, evaluate, hits_to_run
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.passages import Passages, document_of
from tilefold.retrieval.training_data.passages import training_passages

# the learning rate rises to the end, and destroys the model late
DESTROYED: dict[str, Any] = {
    "max_steps": 8,
    "batch_size": 4,
    "max_length": 24,
    "bf16": False,
    "warmup_ratio": 0.9,
}
DESTROYED |= {"evaluate_steps": 2, "save_steps": 3, "evaluate_documents": 12, "learning_rate": 0.3}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_masked_lm(tmp_path_factory.mktemp("base"), small_collection()))


def recipe_of(kind: str, base: str) -> Any:
    if kind == "colbert":
        return ColbertRecipe(base, dimension=16, **DESTROYED)
    return get_recipe("splade", base_model=base, **DESTROYED)


@pytest.fixture(scope="module", params=["splade", "colbert"])
def whole(
    request: Any,
    base: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Any, list[str]]:
    """A recipe, the result of a run of it that nothing interrupts, and what it said of each step."""
    recipe, said = recipe_of(request.param, base), list[str]()
    folder = tmp_path_factory.mktemp(request.param) / "m"
    return (
        recipe,
        train(
            recipe,
            with_dev(),
            folder,
            progress=lambda step, _, losses: said.append(str(losses)),
        ),
        said,
    )


def test_the_best_evaluation_is_kept_and_told_although_later_ones_are_worse(whole: Any) -> None:
    recipe, result, said = whole
    folder, found = (
        Path(result.model_dir),
        {row["step"]: row["nDCG@10"] for row in result.evaluations},
    )
    first = 2 if recipe.late else 4  # when the penalties have risen
    assert list(found) == list(range(first, 9, 2)) and result.steps == 8
    best = max(found.values())
    assert (
        result.kept_step == min(step for step in found if found[step] == best) and found[8] < best
    )
    assert said[-1].endswith(
        f", nDCG@10 {found[6]:.3f} (best {best:.3f} at step {result.kept_step})",
    )
    assert result.evaluated == "dev (4 queries, 12 documents)"
    model = (MultiVectorEncoder if recipe.late else SparseEncoder)(
        str(folder),
        device="cpu",
        local_files_only=True,
    )
    evaluator, *_ = create_evaluation(recipe, with_dev())
    assert evaluator(model)[evaluator.primary_metric] == pytest.approx(best, abs=1e-6)
    assert [row for row in rows_of(folder) if "nDCG@10" in row] == list(result.evaluations)
    assert [row["step"] for row in result.evaluations if row["kept"]] == [result.kept_step]
    card = (folder / "README.md").read_text()
    assert (
        f"{best:.4f} at step {result.kept_step} (kept)" in card
        and f"**{best:.4g}" in card.replace("*0*", "**")
    )
    reused = train(recipe, with_dev(), folder)
    assert reused.reused and reused.evaluations == result.evaluations


def test_an_interrupted_run_keeps_its_best_checkpoint_and_ends_as_a_whole_one(
    whole: Any,
    tmp_path: Path,
) -> None:
    recipe, expected, _ = whole
    often = replace(recipe, save_minutes=0.0)  # a checkpoint after every step
    for last in (expected.kept_step + 1, 8):
        refused(
            KeyboardInterrupt,
            "^$",
            train,
            often,
            with_dev(),
            tmp_path / "m",
            progress=stop_at(last),
        )
        kept = {f"checkpoint-{step}" for step in (last - 1, expected.kept_step)}
        assert {path.name for path in (tmp_path / "m.training").glob("check*")} == kept
    (tmp_path / "m.training").rename(tmp_path / "moved.training")
    (tmp_path / "moved.training" / LOCK).unlink()  # which ends with its process
    result = train(recipe, with_dev(), tmp_path / "moved")
    assert (result.resumed_from, result.evaluations, result.kept_step) == (
        7,
        expected.evaluations,
        expected.kept_step,
    )
    assert_equal(Path(expected.model_dir), tmp_path / "moved")


@pytest.mark.parametrize("patience", [1, None])
def test_a_run_that_was_over_is_not_trained_on(
    patience: int | None,
    base: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    recipe = replace(recipe_of("splade", base), patience=patience, learning_rate=0.1, max_steps=40)
    if patience is None:
        recipe = replace(recipe, evaluate_steps=None, evaluate_documents=None, max_steps=5)
    expected = train(recipe, with_dev(), tmp_path / "whole")
    assert expected.steps < 40 and (
        patience is None or expected.kept_step == expected.steps - 2 * patience
    )
    stock = SparseEncoder.save_pretrained

    def full(self: Any, path: str, *args: Any, **options: Any) -> None:
        if Path(path).name == "model":
            raise KeyboardInterrupt
        stock(self, path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SparseEncoder, "save_pretrained", full)
        refused(KeyboardInterrupt, "^$", train, recipe, with_dev(), tmp_path / "m")
    if patience:  # its count survives, too
        refused(
            OutOfTimeError,
            "hours are over",
            train,
            recipe,
            with_dev(),
            tmp_path / "hours",
            hours=1e-9,
        )
        assert train(recipe, with_dev(), tmp_path / "hours").evaluations == expected.evaluations
    assert newest_step(tmp_path / "m") == expected.steps
    result = train(recipe, with_dev(), tmp_path / "m", progress=stop_at(expected.steps + 1))
    assert (result.steps, result.evaluations) == (expected.steps, expected.evaluations)
    assert_equal(tmp_path / "whole", tmp_path / "m")


def test_a_split_that_is_missing_is_refused_before_a_model_is_loaded(
    base: str,
    tmp_path: Path,
    capsys: Any,
) -> None:
    recipe = replace(recipe_of("splade", base), base_model="no-such-model")
    told = "evaluate_split: expected pairs of 'dev' in 'small', got test, train. Add positive judgements"
    refused(ValueError, told, train, recipe, small_collection(), tmp_path / "m")
    other = with_dev()
    other.qrels["valid"] = other.qrels.pop("dev") | {"q0": {"d0": 0}}
    evaluator, told, _ = create_evaluation(recipe, other)
    assert told == "valid (4 queries, 12 documents)" and {"d0", "d8", "d9", "d10", "d11"} <= {
        *evaluator.corpus_ids,
    }
    assert (
        create_evaluation(recipe, other)[2] != create_evaluation(replace(recipe, seed=1), other)[2]
    )
    assert (
        create_evaluation(replace(recipe, evaluate_documents=1), other)[1]
        == "valid (4 queries, 5 documents)"
    )
    refused(
        ValueError,
        "patience: must be None without evaluate_steps, got 2",
        get_recipe,
        "splade",
        patience=2,
    )
    with_dev().save_beir(tmp_path / "data")
    command = (
        "train",
        "--model",
        base,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "m",
        "--steps",
        "2",
    )
    assert run_cli(*command, "--patience", "2") == 2
    assert "--patience goes together with --evaluate-steps" in capsys.readouterr().err
    assert run_cli(*command, "--evaluate-steps", "1", "--evaluate-split", "x") == 2
    assert "--evaluate-split: expected pairs of 'x'" in capsys.readouterr().err
    assert run_cli(*command, "--evaluate-steps", "1", "--json") == 0
    best = next(row for row in json.loads(capsys.readouterr().out)["evaluations"] if row["kept"])
    told = f"nDCG@10 {best['nDCG@10']:.3f} of dev (4 queries, 16 documents) at step {best['step']}, which was kept"
    assert run_cli(*command, "--evaluate-steps", "1") == 0 and told in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_evaluator_ignores_hits_with_the_id_of_the_query_as_beir_does(base: str) -> None:
    collection = with_dev()
    ids = [f"d{number}" for number in range(12)]
    queries = {name: collection.documents[name].contents for name in ids}
    judged = {name: {other: 1} for name, other in zip(ids, ids[::-1], strict=True)}
    documents = Collection("arguments", collection.documents, queries, {"dev": judged})
    recipe = replace(
        get_recipe("splade", base_model=base, **DESTROYED), evaluate_documents=len(ids)
    )
    evaluator, told, _ = create_evaluation(recipe, documents)
    assert "hits with the query's own id ignored for 12 queries" in told
    model = SparseEncoder(base, device="cpu", local_files_only=True)
    value = evaluator(model)[evaluator.primary_metric]
    names = evaluator.corpus_ids
    encoded = SparseVectors.from_torch(
        names,
        model.encode_document([queries[name] for name in names]),
    )
    run = hits_to_run(encoded, build_index(encoded).search(encoded, len(names)))
    expected, counted = (
        evaluate(run, judged, ["nDCG@10"], ignore_identical_ids=ignore)["nDCG@10"]
        for ignore in (True, False)
    )
    assert value == pytest.approx(expected, abs=1e-5)
    assert counted != pytest.approx(expected, abs=1e-3)
    judged["d0"]["d0"] = 1
    assert "ignored" not in create_evaluation(recipe, documents)[1], (
        "ids that are numbered independently"
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_evaluator_ignores_passages_of_the_document_with_the_id_of_the_query(base: str) -> None:
    collection = with_dev()
    ids = [f"d{number}" for number in range(4)]
    queries = {name: collection.documents[name].contents for name in ids}
    judged = {name: dict.fromkeys({*ids} - {name}, 1) for name in ids}
    documents = {name: collection.documents[name] for name in ids}
    whole = Collection("arguments", documents, queries, {"dev": judged})
    cut = training_passages(Passages(3), whole)
    assert len(cut.documents) >= 8, "documents of several passages"
    recipe = replace(
        get_recipe("splade", base_model=base, **DESTROYED), evaluate_documents=len(cut.documents)
    )
    evaluator, description, _ = create_evaluation(recipe, cut)
    assert "hits with the query's own id ignored for 4 queries" in description
    model = SparseEncoder(base, device="cpu", local_files_only=True)
    value = evaluator(model)[evaluator.primary_metric]
    names = evaluator.corpus_ids
    passages = SparseVectors.from_torch(
        names,
        model.encode_document([cut.contents()[name] for name in names]),
    )
    encoded_queries = SparseVectors.from_torch(
        ids,
        model.encode_query([queries[name] for name in ids]),
    )
    hits = build_index(passages).search(encoded_queries, len(names))
    run = hits_to_run(encoded_queries, hits)
    others = {
        query: {name: score for name, score in scores.items() if document_of(name) != query}
        for query, scores in run.items()
    }
    expected = evaluate(others, cut.qrels["dev"], ["nDCG@10"])["nDCG@10"]
    counted = evaluate(run, cut.qrels["dev"], ["nDCG@10"])["nDCG@10"]
    assert value == pytest.approx(expected, abs=1e-5)
    assert counted != pytest.approx(expected, abs=1e-3)
    judged["d0"]["d0"] = 1
    description = create_evaluation(recipe, training_passages(Passages(3), whole))[1]
    assert "ignored" not in description, "ids that are numbered independently"
