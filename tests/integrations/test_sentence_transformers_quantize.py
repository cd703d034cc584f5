"""An accelerated model whose LM head is multiplied in fp8 where no gradient is asked for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder

from tests.integrations.splade_models import TEXTS
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.testing import relative_error

FP8_SCORES = 0.05  # both operands rounded to 4 bits: about 3% of a logit, less of its logarithm


@pytest.fixture
def model(tiny_folder: Path) -> SparseEncoder:
    return SparseEncoder(str(tiny_folder), device="cpu")


def encode(model: SparseEncoder) -> torch.Tensor:
    return model.encode(TEXTS).to_dense()


def features(model: SparseEncoder) -> dict[str, torch.Tensor]:
    return dict(model.preprocess(TEXTS))


def test_encoding_rounds_and_training_does_not(model: SparseEncoder) -> None:
    exact = encode(model)
    with accelerate(model, quantize="fp8"):
        rounded = encode(model)
        model.eval()
        trained = model(features(model))["sentence_embedding"]
    assert 0 < relative_error(rounded, exact) < FP8_SCORES
    assert trained.requires_grad
    assert relative_error(trained, exact) < 1e-5
    assert torch.equal(encode(model), exact)


def test_sparse_rows_are_those_of_the_rounded_head(model: SparseEncoder) -> None:
    accelerate(model, quantize="fp8")
    torch.testing.assert_close(encode_sparse(model, TEXTS).to_dense(), encode(model))


def assigned(weight: torch.nn.Parameter) -> None:
    weight.data = weight.detach() * 2


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "data in place": lambda weight: weight.data.mul_(2),
    "data copied": lambda weight: weight.data.copy_(weight.data * 2),
    "data assigned": assigned,
    "numpy": lambda weight: weight.detach().numpy().__imul__(2),
    "optimiser": lambda weight: torch.optim.SGD([weight], lr=1.0).step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen_whatever_changed_it(model: SparseEncoder, change: str) -> None:
    accelerate(model, quantize="fp8")
    before = encode(model)
    weight = model[0].model.get_output_embeddings().weight
    weight.grad = torch.randn_like(weight)
    with torch.no_grad():
        CHANGES[change](weight)
    after = encode(model)
    fresh = copy.deepcopy(model)
    accelerate(fresh, quantize="fp8")
    assert not torch.equal(after, before)
    assert torch.equal(after, encode(fresh))


@pytest.mark.gpu
def test_a_model_that_moved_encodes_with_the_weight_it_has_there(model: SparseEncoder) -> None:
    accelerate(model, quantize="fp8")
    here = encode(model)
    there = encode(model.to("cuda"))
    assert relative_error(there.cpu(), here) < FP8_SCORES


def test_copies_and_pickles_carry_no_rounded_weight(model: SparseEncoder) -> None:
    accelerate(model, quantize="fp8")
    small = len(pickle.dumps(model))
    expected = encode(model)
    stored = pickle.dumps(model)
    other = copy.deepcopy(model)
    assert len(stored) < small + 10_000  # the weight in fp8 would be a megabyte
    for again in (pickle.loads(stored), other):  # noqa: S301
        assert torch.equal(encode(again), expected)


def test_what_cannot_be_rounded_is_said(model: SparseEncoder) -> None:
    with pytest.raises(ValueError, match="quantize must be 'fp8' or None, got 'int4'"):
        accelerate(model, quantize="int4")
    model[1].pooling_strategy = "sum"
    with pytest.raises(ValueError, match="quantize must be None for pooling 'sum', got 'fp8'"):
        accelerate(model, quantize="fp8")
