"""Comparison with the real colpali-engine 0.3.18: functions, late-interaction losses and scoring.

``make test-pylate`` runs it.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("colpali_engine") is None:
    pytest.skip(
        "colpali-engine is not installed; make test-pylate brings it in an environment of its own",
        allow_module_level=True,
    )

from colpali_engine.loss import late_interaction_losses as losses
from colpali_engine.utils import maxsim as stock
from colpali_engine.utils import processing_utils
from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

from tests.integrations.multi_vector_models import assert_equal, results
from tilefold.integrations import colpali as ours

NAMES = ["maxsim_inbatch", "maxsim_kd"]
IN_BATCH = ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"]
WITH_NEGATIVES = ["ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_smooth_max": True, "normalize_scores": False},
    {"pos_aware_negative_filtering": True},
    {"temperature": 0.5, "normalize_scores": False},
]


@pytest.fixture(autouse=True)
def seeded_and_restored() -> Iterator[None]:
    """Seed torch before each test, and restore colpali-engine afterwards."""
    torch.manual_seed(0)
    yield
    ours.restore()


def sequences(*shape: int) -> Tensor:
    """Unit vectors, with rows of zeros as the models make padding.

    The first sequence ends with two of them, the second begins with one, the third has one inside.
    """
    rows = torch.nn.functional.normalize(torch.randn(*shape), dim=-1)
    rows[0, ..., -2:, :] = 0
    rows[1, ..., :1, :] = 0
    rows[2, ..., 3, :] = 0
    return rows


def problem(name: str) -> list[Tensor]:
    """Queries, and documents that all queries or each of them is scored with."""
    queries = sequences(4, 6, 16)
    if name == "maxsim_inbatch":
        return [queries, sequences(4, 9, 16)]
    return [queries, sequences(4, 2, 9, 16)]


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_begins_like_that_of_colpali_engine(name: str) -> None:
    parameters = parameters_of(getattr(ours, name))
    assert parameters[:2] == parameters_of(getattr(stock, name))
    assert {kind for _, kind, _ in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_those_of_colpali_engine(name: str) -> None:
    arguments = problem(name)
    assert_equal(
        results(getattr(ours, name), arguments, padding=True),
        results(getattr(stock, name), arguments, padding=True),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "smooth", "filtered", "plain"])
@pytest.mark.parametrize("kind", [*IN_BATCH, *WITH_NEGATIVES])
def test_losses_and_gradients_equal_those_of_colpali_engine(
    kind: str,
    options: dict[str, Any],
) -> None:
    loss = getattr(losses, kind)(**options)
    arguments = [sequences(4, 6, 16), sequences(4, 9, 16)]
    if kind in WITH_NEGATIVES:
        arguments.append(sequences(4, 2, 7, 16))
    expected = results(loss, arguments, padding=True, sides=len(arguments))
    with ours.accelerate():
        values = results(loss, arguments, padding=True, sides=len(arguments))
    largest_gradient = max(gradient.abs().max().item() for gradient in expected[1:])
    scales = [1.0] + [largest_gradient] * len(arguments)
    assert_equal(
        [value / scale for value, scale in zip(values, scales, strict=True)],
        [value / scale for value, scale in zip(expected, scales, strict=True)],
    )


def test_losses_take_gathered_documents_at_an_offset() -> None:
    loss = losses.ColbertLoss()
    arguments = [sequences(4, 6, 16), sequences(8, 9, 16)]
    expected = results(loss, arguments, padding=True, offset=4)
    with ours.accelerate():
        assert_equal(results(loss, arguments, padding=True, offset=4), expected, 1e-4)


def test_lists_of_pages_are_scored_in_blocks() -> None:
    queries = [torch.randn(length, 16) for length in (3, 6, 1, 4, 2)]
    pages = [torch.randn(length, 16) for length in (9, 2, 7, 5)]

    def scores() -> Tensor:
        return BaseVisualRetrieverProcessor.score_multi_vector(
            queries,
            pages,
            batch_size=2,
            device="cpu",
        )

    expected = scores()
    with ours.accelerate(impl="tiled"):
        assert_equal([scores()], [expected])


REPLACED = [
    (stock, "maxsim_inbatch"),
    (stock, "maxsim_kd"),
    (losses, "maxsim_inbatch"),
    (losses, "maxsim_kd"),
    (processing_utils, "maxsim_inbatch"),
    (losses.ColbertModule, "_inbatch_scores"),
]


def replaced_functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in REPLACED]


def test_functions_are_replaced_only_while_colpali_engine_is_accelerated() -> None:
    before = replaced_functions()
    handle = ours.accelerate()
    ours.accelerate(impl="reference")  # a second call replaces the options of the first
    assert ours.is_accelerated()
    assert "colpali-engine, active=True" in repr(handle)
    for function, stock_function in zip(replaced_functions(), before, strict=True):
        assert function is not stock_function
    handle.restore()
    assert not ours.is_accelerated()
    assert replaced_functions() == before


def test_functions_are_restored_after_an_exception() -> None:
    before = replaced_functions()
    with pytest.raises(KeyError), ours.accelerate():
        raise KeyError
    assert replaced_functions() == before


def test_a_version_without_the_names_is_refused_and_left_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(losses.ColbertModule, "_inbatch_scores")
    before = losses.maxsim_inbatch
    with pytest.raises(
        RuntimeError,
        match=r"colpali-engine must have .*ColbertModule\._inbatch_scores",
    ):
        ours.accelerate()
    assert losses.maxsim_inbatch is before
    assert not ours.is_accelerated()
