"""Tests of evaluations during training: the best checkpoint, interruptions and patience."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from tests.cli.program import run_cli
from tests.recipes.runs import assert_equal_weights, read_log, stop_at, train_until
from tests.recipes.small import small_collection, tiny_masked_lm, with_dev
from tests.refusals import refused
from tilefold._internal.files import LOCK
from tilefold.recipes import ColbertRecipe, OutOfTimeError, get_recipe, train
from tilefold.recipes._evaluation import _sample_documents, create_evaluation
from tilefold.recipes.loading import newest_step
from tilefold.retrieval import SparseVectors, build_index, evaluate, hits_to_run
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.lazy_documents import LazyDocuments, open_lazy_documents
from tilefold.retrieval.data.passages import Passages, document_of
from tilefold.retrieval.training_data.passages import training_passages

# the learning rate rises to the end, and destroys the model late
LATE_COLLAPSE: dict[str, Any] = {
    "max_steps": 8,
    "batch_size": 4,
    "max_length": 24,
    "bf16": False,
    "warmup_ratio": 0.9,
    "evaluate_steps": 2,
    "save_steps": 3,
    "evaluate_documents": 12,
    "learning_rate": 0.3,
}


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny masked language model."""
    return str(tiny_masked_lm(tmp_path_factory.mktemp("base"), small_collection()))


def recipe_of(kind: str, base_model: str) -> Any:
    """Return a recipe whose best evaluation is not the last one."""
    if kind == "colbert":
        return ColbertRecipe(base_model, dimension=16, **LATE_COLLAPSE)
    return get_recipe("splade", base_model=base_model, **LATE_COLLAPSE)


@dataclass(frozen=True)
class EvaluatedRun:
    """A run that nothing interrupted.

    Attributes:
        recipe: its recipe.
        result: its result.
        progress: what the run printed of each step.
    """

    recipe: Any
    result: Any
    progress: list[str]

    @property
    def measures(self) -> dict[int, float]:
        """nDCG@10 by step."""
        return {row["step"]: row["nDCG@10"] for row in self.result.evaluations}

    @property
    def best(self) -> float:
        """The largest nDCG@10."""
        return max(self.measures.values())


@pytest.fixture(scope="module", params=["splade", "colbert"])
def run(
    request: Any,
    base_model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> EvaluatedRun:
    """A run of SPLADE, and one of ColBERT."""
    recipe = recipe_of(request.param, base_model)
    folder = tmp_path_factory.mktemp(request.param) / "m"
    progress: list[str] = []

    def record_losses(step: int, steps: int, losses: Any) -> None:
        progress.append(str(losses))

    result = train(recipe, with_dev(), folder, progress=record_losses)
    return EvaluatedRun(recipe, result, progress)


def test_the_checkpoint_of_the_first_best_evaluation_is_kept(run: EvaluatedRun) -> None:
    # the penalties of a sparse model rise until step 4
    first_evaluation = 2 if run.recipe.late else 4
    assert run.result.steps == 8
    assert list(run.measures) == list(range(first_evaluation, 9, 2))
    steps_of_best = [step for step, measure in run.measures.items() if measure == run.best]
    assert run.result.kept_step == min(steps_of_best)
    assert run.measures[8] < run.best
    kept_rows = [row["step"] for row in run.result.evaluations if row["kept"]]
    assert kept_rows == [run.result.kept_step]


def test_the_saved_model_has_the_best_measure(run: EvaluatedRun) -> None:
    model_class = MultiVectorEncoder if run.recipe.late else SparseEncoder
    model = model_class(run.result.model_dir, device="cpu", local_files_only=True)
    evaluator, *_ = create_evaluation(run.recipe, with_dev())
    measure = evaluator(model)[evaluator.primary_metric]
    assert measure == pytest.approx(run.best, abs=1e-6)


def test_progress_log_and_card_have_the_evaluations(run: EvaluatedRun) -> None:
    kept_step = run.result.kept_step
    best = f"(best {run.best:.3f} at step {kept_step})"
    assert run.progress[-1].endswith(f", nDCG@10 {run.measures[6]:.3f} {best}")
    assert run.result.evaluated == "dev (4 queries, 12 documents)"
    folder = Path(run.result.model_dir)
    logged = [row for row in read_log(folder) if "nDCG@10" in row]
    assert logged == list(run.result.evaluations)
    card = (folder / "README.md").read_text()
    assert f"{run.best:.4f} at step {kept_step} (kept)" in card
    assert f"**{run.best:.4g}" in card.replace("*0*", "**")


def test_a_reused_run_has_its_evaluations(run: EvaluatedRun) -> None:
    reused = train(run.recipe, with_dev(), run.result.model_dir)
    assert reused.reused
    assert reused.evaluations == run.result.evaluations


def checkpoint_names(folder: Path) -> set[str]:
    """Return the names of the checkpoints of an unfinished run."""
    checkpoints = folder.with_name(f"{folder.name}.training")
    return {path.name for path in checkpoints.glob("checkpoint-*")}


def test_an_interrupted_run_keeps_its_best_checkpoint_and_ends_as_one_without_interruption(
    run: EvaluatedRun,
    tmp_path: Path,
) -> None:
    kept_step = run.result.kept_step
    checkpoint_every_step = replace(run.recipe, save_minutes=0.0)
    for last_step in (kept_step + 1, 8):
        train_until(last_step, checkpoint_every_step, with_dev(), tmp_path / "m")
        expected_names = {f"checkpoint-{last_step - 1}", f"checkpoint-{kept_step}"}
        assert checkpoint_names(tmp_path / "m") == expected_names
    (tmp_path / "m.training").rename(tmp_path / "moved.training")
    (tmp_path / "moved.training" / LOCK).unlink()  # the lock of this process
    result = train(run.recipe, with_dev(), tmp_path / "moved")
    assert result.resumed_from == 7
    assert result.evaluations == run.result.evaluations
    assert result.kept_step == kept_step
    assert_equal_weights(tmp_path / "moved", Path(run.result.model_dir))


def patient_recipe(base_model: str) -> Any:
    """Return a recipe of 40 steps that ends after an evaluation without an improvement."""
    recipe = recipe_of("splade", base_model)
    return replace(recipe, patience=1, learning_rate=0.1, max_steps=40)


def test_patience_ends_a_run(base_model: str, tmp_path: Path) -> None:
    result = train(patient_recipe(base_model), with_dev(), tmp_path / "m")
    assert result.steps < 40
    assert result.kept_step == result.steps - 2


@pytest.mark.slow
def test_patience_counts_on_when_a_run_resumes(base_model: str, tmp_path: Path) -> None:
    recipe = patient_recipe(base_model)
    expected = train(recipe, with_dev(), tmp_path / "uninterrupted")
    message = "hours are over"
    refused(OutOfTimeError, message, train, recipe, with_dev(), tmp_path / "m", hours=1e-9)
    assert train(recipe, with_dev(), tmp_path / "m").evaluations == expected.evaluations


@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, None])
def test_a_run_that_was_interrupted_while_it_saved_its_model_does_not_train_again(
    patience: int | None,
    base_model: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    recipe = patient_recipe(base_model)
    if patience is None:
        recipe = replace(
            recipe,
            patience=None,
            evaluate_steps=None,
            evaluate_documents=None,
            max_steps=5,
        )
    expected = train(recipe, with_dev(), tmp_path / "uninterrupted")
    save_pretrained = SparseEncoder.save_pretrained

    def interrupt_at_model(self: Any, path: str, *args: Any, **options: Any) -> None:
        if Path(path).name == "model":
            raise KeyboardInterrupt
        save_pretrained(self, path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SparseEncoder, "save_pretrained", interrupt_at_model)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, with_dev(), tmp_path / "m")
    assert newest_step(tmp_path / "m") == expected.steps
    result = train(recipe, with_dev(), tmp_path / "m", progress=stop_at(expected.steps + 1))
    assert result.steps == expected.steps
    assert result.evaluations == expected.evaluations
    assert_equal_weights(tmp_path / "m", tmp_path / "uninterrupted")


def test_a_missing_split_is_refused_before_the_model_is_loaded(
    base_model: str,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe_of("splade", base_model), base_model="no-such-model")
    message = (
        "evaluate_split: must be a split of 'small' with positive judgements, got 'dev'; the "
        "collection has judgements of: test, train. Add positive judgements"
    )
    refused(ValueError, message, train, recipe, small_collection(), tmp_path / "m")


def collection_with_valid_split() -> Collection:
    """Return a collection with the split "valid", in which a query has no relevant document."""
    collection = with_dev()
    collection.qrels["valid"] = collection.qrels.pop("dev") | {"q0": {"d0": 0}}
    return collection


def test_a_split_named_valid_is_evaluated_with_its_judged_documents(base_model: str) -> None:
    recipe = recipe_of("splade", base_model)
    evaluator, description, _ = create_evaluation(recipe, collection_with_valid_split())
    assert description == "valid (4 queries, 12 documents)"
    assert {"d0", "d8", "d9", "d10", "d11"} <= set(evaluator.corpus_ids)
    judged_only = replace(recipe, evaluate_documents=1)
    _, description, _ = create_evaluation(judged_only, collection_with_valid_split())
    assert description == "valid (4 queries, 5 documents)"


def test_the_sample_of_documents_depends_on_the_seed(base_model: str) -> None:
    recipe = recipe_of("splade", base_model)
    collection = collection_with_valid_split()
    *_, fingerprint = create_evaluation(recipe, collection)
    *_, other_fingerprint = create_evaluation(replace(recipe, seed=1), collection)
    assert fingerprint != other_fingerprint


def test_a_sample_of_documents_in_a_file_reads_no_other_documents(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [json.dumps({"_id": f"d{number}", "text": f"text {number}"}) for number in range(50)]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    documents = open_lazy_documents(file, tmp_path / "cache")
    assert documents is not None
    collection = Collection("lazy", documents, {"q": "question"}, {"dev": {"q": {"d7": 1}}})

    def read_all(_: object) -> None:
        raise AssertionError("all documents were read")

    monkeypatch.setattr(LazyDocuments, "pairs", read_all)
    sample = _sample_documents(collection, "dev", 10, seed=0)
    assert len(sample) == 10
    assert sample["d7"] == "text 7"


def test_a_recipe_rejects_patience_without_evaluations() -> None:
    message = "patience: must be None without evaluate_steps, got 2"
    refused(ValueError, message, get_recipe, "splade", patience=2)


@pytest.fixture
def train_two_steps(base_model: str, tmp_path: Path) -> tuple[str | Path, ...]:
    """The command that trains two steps on the collection with the split "dev"."""
    with_dev().save_beir(tmp_path / "data")
    return (
        "train",
        "--model",
        base_model,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "m",
        "--steps",
        "2",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--patience", "2"],
            "--patience requires --evaluate-steps",
            id="patience without evaluations",
        ),
        pytest.param(
            ["--evaluate-steps", "1", "--evaluate-split", "x"],
            "--evaluate-split: must be a split of",
            id="missing split",
        ),
    ],
)
def test_the_train_command_refuses_options_of_evaluations(
    train_two_steps: tuple[str | Path, ...],
    capsys: Any,
    options: list[str],
    message: str,
) -> None:
    assert run_cli(*train_two_steps, *options) == 2
    assert message in capsys.readouterr().err


def test_the_train_command_prints_the_kept_evaluation(
    train_two_steps: tuple[str | Path, ...],
    capsys: Any,
) -> None:
    assert run_cli(*train_two_steps, "--evaluate-steps", "1", "--json") == 0
    evaluations = json.loads(capsys.readouterr().out)["evaluations"]
    (kept,) = [row for row in evaluations if row["kept"]]
    assert run_cli(*train_two_steps, "--evaluate-steps", "1") == 0
    measure = f"nDCG@10 {kept['nDCG@10']:.3f} on dev (4 queries, 16 documents)"
    assert f"kept step {kept['step']} with {measure}" in capsys.readouterr().out


def encode_rows(model: Any, ids: list[str], texts: Mapping[str, str]) -> SparseVectors:
    """Encode texts as documents with sentence-transformers."""
    return SparseVectors.from_torch(ids, model.encode_document([texts[id_] for id_ in ids]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_evaluator_ignores_hits_with_the_id_of_the_query_as_beir_does(base_model: str) -> None:
    documents = with_dev().documents
    ids = [f"d{number}" for number in range(12)]
    texts = {id_: documents[id_].contents for id_ in ids}
    qrels = {id_: {judged: 1} for id_, judged in zip(ids, ids[::-1], strict=True)}
    collection = Collection("arguments", documents, texts, {"dev": qrels})
    recipe = replace(recipe_of("splade", base_model), evaluate_documents=len(ids))
    evaluator, description, _ = create_evaluation(recipe, collection)
    assert "hits with the query's own id ignored for 12 queries" in description
    model = SparseEncoder(base_model, device="cpu", local_files_only=True)
    measure = evaluator(model)[evaluator.primary_metric]
    vectors = encode_rows(model, evaluator.corpus_ids, texts)
    ranking = hits_to_run(vectors, build_index(vectors).search(vectors, len(vectors)))
    measures = ["nDCG@10"]
    without_query = evaluate(ranking, qrels, measures, ignore_identical_ids=True)["nDCG@10"]
    with_query = evaluate(ranking, qrels, measures, ignore_identical_ids=False)["nDCG@10"]
    assert measure == pytest.approx(without_query, abs=1e-5)
    assert with_query != pytest.approx(without_query, abs=1e-3)


def collection_of_passages(qrels: dict[str, dict[str, int]]) -> Collection:
    """Return passages of four documents, whose texts and ids are also those of the queries."""
    documents = {id_: with_dev().documents[id_] for id_ in PASSAGE_DOCUMENTS}
    queries = {id_: document.contents for id_, document in documents.items()}
    collection = Collection("arguments", documents, queries, {"dev": qrels})
    return training_passages(Passages(3), collection)


PASSAGE_DOCUMENTS = [f"d{number}" for number in range(4)]


def qrels_of_other_documents() -> dict[str, dict[str, int]]:
    """Return judgements by which all other documents are relevant to a query."""
    return {
        query: {document: 1 for document in PASSAGE_DOCUMENTS if document != query}
        for query in PASSAGE_DOCUMENTS
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_evaluator_ignores_passages_of_the_document_with_the_id_of_the_query(
    base_model: str,
) -> None:
    passages = collection_of_passages(qrels_of_other_documents())
    assert len(passages.documents) >= 8, "documents have several passages"
    recipe = replace(recipe_of("splade", base_model), evaluate_documents=len(passages.documents))
    evaluator, description, _ = create_evaluation(recipe, passages)
    assert "hits with the query's own id ignored for 4 queries" in description
    model = SparseEncoder(base_model, device="cpu", local_files_only=True)
    measure = evaluator(model)[evaluator.primary_metric]
    vectors = encode_rows(model, evaluator.corpus_ids, passages.contents())
    query_texts = [passages.queries[query] for query in PASSAGE_DOCUMENTS]
    queries = SparseVectors.from_torch(PASSAGE_DOCUMENTS, model.encode_query(query_texts))
    ranking = hits_to_run(queries, build_index(vectors).search(queries, len(vectors)))
    without_query = {
        query: {id_: score for id_, score in scores.items() if document_of(id_) != query}
        for query, scores in ranking.items()
    }
    expected = evaluate(without_query, passages.qrels["dev"], ["nDCG@10"])["nDCG@10"]
    with_query = evaluate(ranking, passages.qrels["dev"], ["nDCG@10"])["nDCG@10"]
    assert measure == pytest.approx(expected, abs=1e-5)
    assert with_query != pytest.approx(expected, abs=1e-3)


def test_hits_with_the_id_of_the_query_count_where_it_is_judged(base_model: str) -> None:
    documents = with_dev().documents
    ids = [f"d{number}" for number in range(12)]
    texts = {id_: documents[id_].contents for id_ in ids}
    qrels = {id_: {judged: 1} for id_, judged in zip(ids, ids[::-1], strict=True)}
    qrels["d0"]["d0"] = 1  # ids of queries and documents are numbered independently
    collection = Collection("numbered", documents, texts, {"dev": qrels})
    recipe = replace(recipe_of("splade", base_model), evaluate_documents=len(ids))
    _, description, _ = create_evaluation(recipe, collection)
    assert "ignored" not in description


def test_passages_of_the_document_with_the_id_of_the_query_count_where_it_is_judged(
    base_model: str,
) -> None:
    qrels = qrels_of_other_documents()
    qrels["d0"]["d0"] = 1
    passages = collection_of_passages(qrels)
    recipe = replace(recipe_of("splade", base_model), evaluate_documents=len(passages.documents))
    _, description, _ = create_evaluation(recipe, passages)
    assert "ignored" not in description
