from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tilefold.recipes import ColbertRecipe
from tilefold.recipes.colbert import load_base_model, train
from tilefold.retrieval.collection import Collection


@pytest.fixture(scope="module")
def recipe(masked_lm: str) -> ColbertRecipe:
    return ColbertRecipe(
        base_model=masked_lm, max_steps=4, batch_size=4, max_length=24, dimension=16, save_steps=2, bf16=False
    )


@pytest.fixture(scope="module")
def trained(recipe: ColbertRecipe, collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colbert") / "m"
    result = train(recipe, collection, folder)
    assert (result.steps, result.reused, result.resumed_from, result.fused) == (4, False, 0, True)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = (load_file(folder / name / "model.safetensors") for name in ("", "1_Dense"))
    return {f"{i}.{name}": value for i, part in enumerate(parts) for name, value in part.items()}


def test_training_leaves_a_stock_model_that_changed_and_no_other_files(recipe, trained: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    assert [path.name for path in trained.parent.iterdir()] == ["m"]
    model = MultiVectorEncoder(str(trained), device="cpu", local_files_only=True)
    assert [type(module).__name__ for module in model] == ["Transformer", "Dense", "MultiVectorMask", "Normalize"]
    assert (model[0].document_length, model[0].query_length, model.get_embedding_dimension()) == (24, 32, 16)
    start = load_base_model(recipe).cpu().state_dict()
    assert all(not torch.equal(start[name], value) for name, value in model.state_dict().items() if "linear" in name)
    (vectors,) = model.encode_document(["one, two!"])
    assert vectors.shape == (4, 16)  # punctuation has no vector
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 4, abs=1e-5)


def test_an_interrupted_run_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(
    recipe, collection, trained: Path, tmp_path: Path
) -> None:
    def stop(step: int, steps: int, loss: float | None) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, collection, tmp_path / "m", progress=stop)
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match=r"interrupted run with other settings.*dimension"):
        train(replace(recipe, dimension=8), collection, tmp_path / "m")
    steps: list[int] = []
    result = train(recipe, collection, tmp_path / "m", progress=lambda step, *_: steps.append(step))
    assert (result.resumed_from, steps) == (2, [3, 4])
    whole, resumed = weights(trained), weights(tmp_path / "m")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert train(recipe, collection, tmp_path / "m").reused


def test_fused_and_plain_training_end_with_nearly_the_same_weights(recipe, collection, trained, tmp_path: Path) -> None:
    train(replace(recipe, fused=False), collection, tmp_path / "plain")
    fused, plain = weights(trained), weights(tmp_path / "plain")
    # Adam divides a gradient by its size: where that is rounding noise, every step may differ by 2 * lr
    assert max((fused[name] - plain[name]).abs().max().item() for name in fused) <= 8 * recipe.learning_rate * 1.01


def test_an_untrained_projection_keeps_lengths_up_to_its_rows_and_needs_no_training_to_load(recipe) -> None:
    model = load_base_model(replace(recipe, expand_queries=True, query_length=8, skip_punctuation=False))
    weight = model[1].linear.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(16, device=weight.device), atol=1e-5, rtol=0)
    assert [len(rows) for rows in model.encode_query(["one", "one two three four five six seven eight nine"])] == [8, 8]
    assert len(model.encode_document(["one, two!"])[0]) == 6
    wide = load_base_model(replace(recipe, dimension=None))
    assert [type(module).__name__ for module in wide] == ["Transformer", "MultiVectorMask", "Normalize"]
    assert wide.get_embedding_dimension() == 32
    again = load_base_model(recipe)[1].linear.weight
    assert torch.equal(again, load_base_model(recipe)[1].linear.weight)
    assert not torch.equal(again, load_base_model(replace(recipe, seed=1))[1].linear.weight)


def test_a_trained_multi_vector_model_and_a_dense_one_are_starting_points_too(recipe, trained: Path) -> None:
    again: Any = load_base_model(replace(recipe, base_model=str(trained), dimension=64))
    assert torch.equal(again[1].linear.weight.cpu(), weights(trained)["1.linear.weight"])
    assert again[0].document_length == 24
    minilm = load_base_model(ColbertRecipe(max_length=512))
    assert minilm.get_embedding_dimension() == 128
    assert minilm[0].document_length == minilm.max_seq_length <= 512
