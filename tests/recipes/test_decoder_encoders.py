"""Encoders of causal language models, PROSPER, BGE-M3 and SPLATE from records."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.modules.tiny import QUERIES, TEXTS, tiny_masked_lm
from tests.recipes.decoder_models import tiny_causal_lm
from tilefold.modules import EchoTransformer, LexicalWindow, ProsperTransformer, SplateHead, TokenWeights, load_encoder
from tilefold.recipes import LsrRecipe, train
from tilefold.recipes.bge_m3 import load_sparse_linear
from tilefold.recipes.encoders import Base, EncoderSpec, build_encoder
from tilefold.retrieval.collection import Collection


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "causal": str(tiny_causal_lm(folder / "causal", texts=[*TEXTS, *QUERIES])),
        "masked": str(tiny_masked_lm(folder / "masked")),
    }


def built(base: str, document: EncoderSpec, query: EncoderSpec | None = None) -> Any:
    return build_encoder(query, document, Base(base, max_length=48, texts=TEXTS), device="cpu")


def vectors(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"convert_to_sparse_tensor": False, "show_progress_bar": False}
    return model.encode_query(QUERIES, **options), model.encode_document(TEXTS[:4], **options)


WINDOWS = {"top_k": 8, "normalize": "l2", "shared_network": True}


@pytest.mark.parametrize(
    ("base", "document", "query", "made"),
    [
        ("causal", EncoderSpec("causal", pooling="last"), None, None),
        ("causal", EncoderSpec("bidirectional", logit_scale=0.5, top_k=16), None, None),
        ("causal", EncoderSpec("echo"), EncoderSpec("echo", pooling="last", shared_network=True), EchoTransformer),
        ("causal", EncoderSpec("prosper", top_k=16), EncoderSpec("prosper", **WINDOWS), ProsperTransformer),
        ("masked", EncoderSpec("prosper", pooling="cls", literal_residual=False), None, LexicalWindow),
        ("masked", EncoderSpec("bge_m3"), None, TokenWeights),
        ("masked", EncoderSpec("splate"), None, SplateHead),
    ],
)  # fmt: skip
def test_every_kind_is_built_and_reloads(
    bases: dict[str, str], base: str, document: EncoderSpec, query: EncoderSpec | None, made: Any, tmp_path: Path
) -> None:
    if document.kind == "splate":
        document = EncoderSpec("splate", head_model=bases[base])
    model = built(bases[base], document, query)
    assert made is None or any(isinstance(module, made) for module in model.modules())
    found = vectors(model)
    assert all((rows > 0).any(dim=1).all() and torch.isfinite(rows).all() for rows in found)
    model.save_pretrained(str(tmp_path))
    for got, expected in zip(vectors(load_encoder(str(tmp_path), device="cpu")), found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert EncoderSpec.from_dict(document.to_dict()) == document


def test_training_reads_queries_in_the_form_that_encode_query_gives_them(
    bases: dict[str, str], collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str | None, bool]] = set()
    stock = EchoTransformer.preprocess

    def preprocess(self: Any, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        seen.add((kwargs.get("task"), all(text in collection.queries.values() for text in inputs)))
        return stock(self, inputs, prompt, **kwargs)

    monkeypatch.setattr(EchoTransformer, "preprocess", preprocess)
    small = {"max_steps": 1, "batch_size": 4, "max_length": 48, "bf16": False, "save_steps": 100, "fused": False}
    recipe = LsrRecipe("echo", bases["causal"], document=EncoderSpec("echo", lora=2), **small)
    train(recipe, collection, tmp_path / "model")
    assert {("query", True), ("document", False)} <= seen and not {("query", False), ("document", True)} & seen
    assert not any("lora" in name for name, _ in load_encoder(str(tmp_path / "model"), device="cpu").named_parameters())


def test_seeds_make_the_literal_matrix_and_lora_trains_alone(bases: dict[str, str]) -> None:
    first, second = (vectors(built(bases["masked"], EncoderSpec("prosper")))[1] for _ in range(2))
    assert torch.equal(first, second)
    model = built(bases["causal"], EncoderSpec("bidirectional", lora=2))
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name} == set()


def test_bge_m3_reads_its_published_head_and_weighs_tokens_by_hand(tmp_path: Path) -> None:
    base = tiny_masked_lm(tmp_path / "base")
    torch.manual_seed(0)
    state = {"weight": torch.randn(1, 32), "bias": torch.tensor([0.3])}
    torch.save(state, base / "sparse_linear.pt")
    model: Any = built(str(base), EncoderSpec("bge_m3"))
    assert torch.equal(model[1].linear.weight, state["weight"])
    features = model.preprocess(TEXTS[:2])
    hidden = model[0](dict(features))["token_embeddings"]
    weights = (hidden @ state["weight"][0] + 0.3).relu()
    expected = torch.zeros(2, model[1].vocab_size)
    for row, column in torch.nonzero(features["attention_mask"]).tolist():
        token = int(features["input_ids"][row, column])
        if token not in model.tokenizer.all_special_ids:
            expected[row, token] = max(float(expected[row, token]), float(weights[row, column].detach()))
    got = model.encode(TEXTS[:2], convert_to_sparse_tensor=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    (base / "sparse_linear.pt").unlink()
    save_file({"weight": torch.ones(1, 5), "bias": torch.ones(1)}, base / "sparse_linear.safetensors")
    with pytest.raises(ValueError, match=r"must fit states of width 32, got \[1, 5\]"):
        built(str(base), EncoderSpec("bge_m3"))


def test_bge_m3_holds_a_vocabulary_of_xlm_r() -> None:
    head = TokenWeights(8, 250_002, ignore_ids=[0, 1, 2, 3])
    features = {
        "token_embeddings": torch.randn(2, 3, 8),
        "input_ids": torch.tensor([[0, 250_001, 2], [0, 7, 249_999]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
    }
    rows = head(features)["sentence_embedding"]
    assert rows.shape == (2, 250_002) and not rows[:, [0, 1, 2, 3]].any()
    rows.sum().backward()


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def test_a_pickle_of_more_than_tensors_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sparse_linear.pt"
    torch.save({"weight": Harmful()}, path)
    with pytest.raises(ValueError, match=r"must hold tensors alone, .* it was not run\. Load it where you trust it"):
        load_sparse_linear(path)
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ValueError, match="must hold tensors alone"):
        load_sparse_linear(path)
    assert not (tmp_path / "harmed").exists()
    torch.save(torch.nn.Linear(4, 2).state_dict(), path)
    with pytest.raises(ValueError, match=r"must hold weight \[1, D\] and bias \[1\]"):
        load_sparse_linear(path)


def test_an_interrupted_training_of_adapters_goes_on(
    bases: dict[str, str], collection: Collection, tmp_path: Path
) -> None:
    small = {"max_steps": 3, "batch_size": 4, "max_length": 48, "bf16": False, "save_steps": 1, "learning_rate": 1e-2}
    recipe = LsrRecipe("causal-splade", bases["causal"], document=EncoderSpec("bidirectional", lora=2), **small)

    def stop(step: int, steps: int, loss: float | None) -> None:
        if step == 2:
            raise RuntimeError("stopped")

    train(recipe, collection, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        train(recipe, collection, tmp_path / "parts", progress=stop)
    assert train(recipe, collection, tmp_path / "parts").resumed_from > 0
    whole, parts = (vectors(load_encoder(str(tmp_path / name), device="cpu")) for name in ("whole", "parts"))
    for got, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert load_encoder(str(tmp_path / "parts"), device="cpu")[0].model.config.is_causal is False


def test_options_of_a_shared_network_stand_on_the_document_side(bases: dict[str, str]) -> None:
    for kind, option in (("prosper", "literal_residual"), ("prosper", "pooling"), ("causal", "lora")):
        value = {"literal_residual": False, "pooling": "cls", "lora": 2}[option]
        query = EncoderSpec(kind, shared_network=True, **{option: value})
        with pytest.raises(ValueError, match=f"{option}: set it on the document side"):
            built(bases["causal"], EncoderSpec(kind), query)
