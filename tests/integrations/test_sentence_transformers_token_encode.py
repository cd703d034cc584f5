"""Many texts through ``encode`` of an accelerated MultiVectorEncoder: the vectors of the stock one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.small import small_masked_lm
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.sentence_transformers.stream import VectorStream
from tilefold.recipes.colbert import ColbertRecipe, load_base_model

TEXTS = [f"text {i}: " + "cats sleep, dogs run. " * (i % 9) for i in range(40)] + ["", "!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_masked_lm(tmp_path_factory.mktemp("late"))


@pytest.fixture(params=[False, True], ids=["packed", "expanded queries"])
def model(folder: Path, request: pytest.FixtureRequest) -> Any:
    recipe = ColbertRecipe(base_model=str(folder), dimension=16, max_length=24, expand_queries=request.param)
    return load_base_model(recipe).to("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """The texts of a batch, at most, of each stream that runs."""
    seen: list[int | None] = []
    call = VectorStream.__call__

    def counted(self: VectorStream, windows: Any) -> Any:
        seen.append(self.batch_size)
        return call(self, windows)

    monkeypatch.setattr(VectorStream, "__call__", counted)
    yield seen


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 5}, {"convert_to_numpy": True}, {"normalize_embeddings": True}, {"prompt": "find: "}],
    ids=str,
)
@pytest.mark.parametrize("side", ["query", "document"])
def test_vectors_are_those_of_stock(model: Any, streams: list[Any], side: str, options: dict[str, Any]) -> None:
    stock = copy.deepcopy(model)
    accelerate(model)
    name = f"encode_{side}"
    expected, got = getattr(stock, name)(TEXTS, **options), getattr(model, name)(TEXTS, **options)
    assert streams == [options.get("batch_size")]
    assert isinstance(got, list) and [type(one) for one in got] == [type(one) for one in expected]
    assert [one.shape for one in got] == [one.shape for one in expected]
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(right), atol=2e-5)


def test_what_the_stream_does_not_serve_is_stock_and_restore_takes_it_away(model: Any, streams: list[Any]) -> None:
    handle = accelerate(model)
    assert model.encode_document("one text").dim() == 2
    assert len(model.encode_document(TEXTS[:3])) == 3
    assert isinstance(model.encode(TEXTS, output_value=None)[0], dict)
    with pytest.raises(ValueError, match="convert_to_tensor"):
        model.encode(TEXTS, convert_to_tensor=True)
    assert streams == []
    again = copy.deepcopy(model)
    assert again.encode.model is again
    handle.restore()
    assert "encode" not in vars(model)


def test_a_text_that_cannot_be_encoded_raises_its_error(model: Any) -> None:
    accelerate(model)
    with pytest.raises((TypeError, UnicodeError)):
        model.encode_document([*TEXTS, "cats \ud800"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_stay_on_the_gpu(model: Any, dtype: torch.dtype) -> None:
    model.to("cuda", dtype)
    expected = copy.deepcopy(model).encode_document(TEXTS)
    accelerate(model)
    got = model.encode_document(TEXTS)
    assert {(one.device.type, one.dtype) for one in got} == {("cuda", dtype)}
    for one, right in zip(got, expected, strict=True):
        torch.testing.assert_close(one, right, atol=5e-2 if dtype == torch.bfloat16 else 1e-3, rtol=0)
