"""Echo inputs: every text twice, the second copy pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.tiny import TEXTS, dense, tiny_causal_lm
from tilefold.modules.echo import EchoTransformer
from tilefold.recipes.decoders import causal_splade


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_causal_lm(tmp_path_factory.mktemp("causal"))


def copies(echo: Any, features: dict[str, Any], row: int) -> tuple[list[int], list[int], list[int]]:
    """All valid tokens of a row, those that are pooled, and as many before the words between."""
    ids, mask, pooled = (features[name][row] for name in ("input_ids", "attention_mask", "pooling_mask"))
    tokens, second = ids[mask == 1].tolist(), ids[pooled == 1].tolist()
    before = len(echo._ids("Document:"))
    return tokens, second, tokens[before : before + len(second)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_copies_are_equal_whatever_the_length(base: Path, side: str) -> None:
    echo: Any = causal_splade(base, "echo", max_length=48, device="cpu")[0]
    echo.tokenizer.padding_side = side
    texts = [*TEXTS, " ".join(TEXTS * 5), ""]
    features = echo.preprocess(texts)
    assert features["input_ids"].shape == features["pooling_mask"].shape and features["input_ids"].size(1) <= 48
    for row, text in enumerate(texts):
        tokens, second, first = copies(echo, features, row)
        assert first == second == echo._ids(text)[: len(second)]
        assert tokens[-1] == echo.tokenizer.eos_token_id
        middle = echo._ids("\nDocument again:")
        assert tokens == [*echo._ids("Document:"), *second, *middle, *second, echo.tokenizer.eos_token_id]
    assert int(features["pooling_mask"][4].sum()) == (48 - len(echo._ids("Document:")) - len(middle) - 1) // 2
    padded = features["attention_mask"][2]
    assert padded[0 if side == "left" else -1] == 0


def test_the_vector_is_that_of_the_second_copy_by_hand_with_padding_on_either_side(base: Path) -> None:
    model = causal_splade(base, "echo", max_length=64, device="cpu")
    echo: Any = model[0]
    start, text, middle = (echo._ids(part) for part in ("Query:", TEXTS[0], "\nQuery again:"))
    ids = [*start, *text, *middle, *text, echo.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = echo.model(input_ids=torch.tensor([ids])).logits[0]
    place = len(start) + len(text) + len(middle)
    expected = logits[place : place + len(text)].amax(0).relu().log1p()
    torch.testing.assert_close(dense(model, TEXTS[:1], "query")[0], expected, rtol=0, atol=1e-6)
    left = dense(model, TEXTS)
    model.tokenizer.padding_side = "right"
    torch.testing.assert_close(dense(model, TEXTS), left, rtol=0, atol=1e-6)


def test_a_prompt_stands_before_the_template_once(base: Path) -> None:
    echo: Any = causal_splade(base, "echo", max_length=64, device="cpu")[0]
    tokens, second, _ = copies(echo, echo.preprocess(["fox"], prompt="Find {text}. "), 0)
    assert tokens[: len(echo._ids("Find {text}. Document:"))] == echo._ids("Find {text}. Document:")
    assert second == echo._ids("fox")


def test_templates_travel_with_the_checkpoint_and_features_are_left_alone(base: Path, tmp_path: Path) -> None:
    template = "{text} | {text}"
    model = causal_splade(base, "echo", query_template=template, device="cpu")
    echo: Any = model[0]
    echo.save(str(tmp_path))
    again = EchoTransformer.load(str(tmp_path), local_files_only=True)
    assert (again.query_template, again.document_template) == (template, echo.document_template)
    features = echo.preprocess(TEXTS, task="query")
    kept = {name: value.clone() for name, value in features.items() if isinstance(value, torch.Tensor)}
    out = echo(features)
    assert torch.equal(out["attention_mask"], kept["pooling_mask"])
    assert all(torch.equal(features[name], value) for name, value in kept.items())


def test_what_cannot_be_echoed_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match=r"query_template must hold \{text\} twice, got '\{text\}'"):
        causal_splade(base, "echo", query_template="{text}")
    echo: Any = causal_splade(base, "echo", max_length=12, device="cpu")[0]
    with pytest.raises(ValueError, match="max_seq_length must leave room for two copies"):
        echo.preprocess(TEXTS)
    with pytest.raises(TypeError, match="inputs must be texts, got dict"):
        echo.preprocess([{"text": "x"}])
    with pytest.raises(ValueError, match="features must hold pooling_mask"):
        echo({"input_ids": torch.tensor([[1]])})
