"""Beside the real colpali-engine 0.3.18 (``make test-pylate``): functions, every late-interaction
loss, scoring.
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
def stock_afterwards() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    ours.restore()


def sequences(*shape: int) -> Tensor:
    """Unit vectors, with rows of zeros after, before and in the sequences, as the models make
    padding.
    """
    rows = torch.nn.functional.normalize(torch.randn(*shape), dim=-1)
    rows[0, ..., -2:, :], rows[1, ..., :1, :], rows[2, ..., 3, :] = 0, 0, 0
    return rows


def problem(name: str) -> list[Tensor]:
    return [
        sequences(4, 6, 16),
        sequences(4, 9, 16) if name == "maxsim_inbatch" else sequences(4, 2, 9, 16),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_begins_like_that_of_colpali_engine(name: str) -> None:
    theirs = list(inspect.signature(getattr(stock, name)).parameters.values())
    mine = list(inspect.signature(getattr(ours, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in mine[:2]] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert {p.kind for p in mine[2:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_those_of_colpali_engine(name: str) -> None:
    arguments = problem(name)
    mine, theirs = (
        results(getattr(module, name), arguments, padding=True) for module in (ours, stock)
    )
    assert_equal(mine, theirs)


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
    how = {"padding": True, "sides": len(arguments)}
    expected = results(loss, arguments, **how)
    with ours.accelerate():
        found = results(loss, arguments, **how)
    largest = max(part.abs().max().item() for part in expected[1:])
    scale = [1.0, *(largest for _ in arguments)]
    assert_equal(
        [p / s for p, s in zip(found, scale, strict=True)],
        [p / s for p, s in zip(expected, scale, strict=True)],
    )


def test_losses_take_gathered_documents_at_an_offset() -> None:
    loss = losses.ColbertLoss()
    arguments = [sequences(4, 6, 16), sequences(8, 9, 16)]
    expected = results(loss, arguments, padding=True, offset=4)
    with ours.accelerate():
        assert_equal(results(loss, arguments, padding=True, offset=4), expected, 1e-4)


def test_lists_of_pages_are_scored_in_blocks() -> None:
    queries = [torch.randn(n, 16) for n in (3, 6, 1, 4, 2)]
    pages = [torch.randn(n, 16) for n in (9, 2, 7, 5)]
    expected = BaseVisualRetrieverProcessor.score_multi_vector(
        queries,
        pages,
        batch_size=2,
        device="cpu",
    )
    with ours.accelerate(impl="tiled"):
        found = BaseVisualRetrieverProcessor.score_multi_vector(
            queries,
            pages,
            batch_size=2,
            device="cpu",
        )
    assert_equal([found], [expected])


def test_names_lead_to_the_functions_only_while_colpali_engine_is_accelerated() -> None:
    places = [
        (stock, "maxsim_inbatch"),
        (stock, "maxsim_kd"),
        (losses, "maxsim_inbatch"),
        (losses, "maxsim_kd"),
        (processing_utils, "maxsim_inbatch"),
        (losses.ColbertModule, "_inbatch_scores"),
    ]
    before = [getattr(*place) for place in places]
    handle = ours.accelerate()
    ours.accelerate(impl="reference")  # twice is once, with the last options
    assert ours.is_accelerated() and "colpali-engine, active=True" in repr(handle)
    assert not any(getattr(*place) is was for place, was in zip(places, before, strict=True))
    handle.restore()
    assert not ours.is_accelerated() and [getattr(*place) for place in places] == before
    with pytest.raises(KeyError), ours.accelerate():
        raise KeyError
    assert [getattr(*place) for place in places] == before


def test_a_version_without_the_names_is_refused_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(losses.ColbertModule, "_inbatch_scores")
    before = losses.maxsim_inbatch
    with pytest.raises(
        RuntimeError,
        match=r"colpali-engine must have .*ColbertModule\._inbatch_scores",
    ):
        ours.accelerate()
    assert losses.maxsim_inbatch is before and not ours.is_accelerated()
