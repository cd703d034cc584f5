"""LM heads with adapters (LoRA in every state, modules_to_save) and heads that are multiplied in
fp8.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from sentence_transformers import SparseEncoder

from tests.integrations.splade_models import (
    TEXTS,
    assert_close,
    assert_same_training,
    build_tiny_splade,
    fused_copy,
    scores_and_gradients,
    without_dropout,
)
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import _pooling, accelerate, encode_sparse, restore
from tilefold.ops import lsr_head
from tilefold.testing import relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`",
)  # peft, on a second adapter


def encode(model: SparseEncoder) -> torch.Tensor:
    return model.encode(TEXTS).to_dense()


def with_lora(folder: Path, *names: str, **options: Any) -> SparseEncoder:
    """A tiny untied model with LoRA adapters on its LM head and its attention, B away from zero."""
    model = build_tiny_splade("bert", folder, tie_word_embeddings=False)
    for name in names or ("default",):
        settings = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["query", "decoder"],
            "lora_dropout": 0.0,
            **options,
        }
        model.add_adapter(LoraConfig(**settings), name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.05)
    return model


ADAPTERS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    ((), {"r": 3}),
    ((), {"lora_bias": True}),
    ((), {"use_rslora": True}),
    (("one", "two"), {}),
    ((), {"target_modules": ["query"], "modules_to_save": ["decoder"]}),
    ((), {"target_modules": ["query"], "modules_to_save": ["decoder", "transform"]}),
]


@pytest.mark.parametrize(("names", "options"), ADAPTERS)
def test_an_adapted_head_trains_as_stock(
    names: tuple[str, ...],
    options: Any,
    tokenizer_folder: Path,
) -> None:
    stock = with_lora(tokenizer_folder, *names, **options)
    if names:
        stock.set_adapter(list(names))
    fused = fused_copy(stock)
    assert_same_training(without_dropout(stock), without_dropout(fused))
    _, gradients = scores_and_gradients(fused)
    trained = [name for name in gradients if "decoder" in name]
    assert (
        all("lora_" in name or "modules_to_save" in name for name in trained) and len(trained) >= 2
    )
    stock.disable_adapters()
    fused.disable_adapters()
    assert_close(encode(fused), encode(stock), 1e-5)


def test_dropout_inside_lora_is_exact(tokenizer_folder: Path) -> None:
    stock = with_lora(tokenizer_folder, lora_dropout=0.3)
    fused = fused_copy(stock, packed=False)  # packed tokens draw other numbers
    torch.manual_seed(9)
    expected, expected_gradients = scores_and_gradients(stock.train())
    torch.manual_seed(9)
    got, gradients = scores_and_gradients(fused.train())
    assert_close(got, expected, 1e-5)
    assert gradients.keys() == expected_gradients.keys()


def test_switching_disabling_and_merging_adapters_is_followed(tokenizer_folder: Path) -> None:
    stock = with_lora(tokenizer_folder, "one", "two")
    fused = fused_copy(stock)
    recorded = []
    for action in (
        lambda model: model.set_adapter("one"),
        lambda model: model.set_adapter("two"),
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
        lambda model: model.transformers_model.get_output_embeddings().merge(),
        lambda model: model.disable_adapters(),
    ):
        action(stock)
        action(fused)
        expected = encode(stock)
        assert_close(encode(fused), expected, 1e-5)
        recorded.append(expected)
    assert not torch.equal(recorded[0], recorded[1]) and not torch.equal(recorded[1], recorded[2])


def test_adapters_in_fp32_on_a_half_precision_model_score_as_stock(tokenizer_folder: Path) -> None:
    stock = with_lora(tokenizer_folder).bfloat16()
    for name, parameter in stock.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    assert_close(encode(fused_copy(stock)), encode(stock), 2**-6)


def test_an_adapter_added_afterwards_asks_for_another_call(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder, tie_word_embeddings=False)
    accelerate(model)
    model.add_adapter(LoraConfig(r=4, target_modules=["decoder"]))
    refused(
        RuntimeError,
        r"an adapter was added.*call accelerate\(model\) again",
        model.encode,
        TEXTS,
    )
    stock = copy.deepcopy(model)
    restore(stock)
    expected = encode(stock)
    accelerate(model)
    assert_close(encode(model), expected, 1e-5)


def test_variants_of_lora_are_refused(tokenizer_folder: Path) -> None:
    model = with_lora(tokenizer_folder, use_dora=True)
    refused(
        ValueError,
        r"must be a plain one, got a variant .*leave the LM head out",
        accelerate,
        model,
    )


FP8_SCORES = 0.05  # both operands rounded to 4 bits: about 3% of a logit, less of its logarithm


def test_encoding_rounds_and_training_does_not(model: SparseEncoder) -> None:
    exact = encode(model)
    with accelerate(model, quantize="fp8"):
        rounded = encode(model)
        torch.testing.assert_close(encode_sparse(model, TEXTS).to_dense(), rounded)
        model.eval()
        trained = model(model.preprocess(TEXTS))["sentence_embedding"]
    assert 0 < relative_error(rounded, exact) < FP8_SCORES
    assert trained.requires_grad
    assert relative_error(trained, exact) < 1e-5
    assert torch.equal(encode(model), exact)


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
    assert not torch.equal(after, before)
    assert torch.equal(after, encode(fused_copy(model, quantize="fp8")))


@pytest.mark.gpu
def test_a_model_that_moved_encodes_with_the_weight_it_has_there(model: SparseEncoder) -> None:
    accelerate(model, quantize="fp8")
    here = encode(model)
    assert relative_error(encode(model.to("cuda")).cpu(), here) < FP8_SCORES


def test_copies_and_pickles_carry_no_rounded_weight(model: SparseEncoder) -> None:
    accelerate(model, quantize="fp8")
    small, expected = len(pickle.dumps(model)), encode(model)
    stored = pickle.dumps(model)
    assert len(stored) < small + 10_000  # the weight in fp8 would be a megabyte
    for again in (pickle.loads(stored), copy.deepcopy(model)):  # noqa: S301
        assert torch.equal(encode(again), expected)


@pytest.mark.parametrize("asked", [{}, {"screen": True}, {"screen": False}])
def test_a_screen_is_asked_for_in_encode_and_in_training(
    model: SparseEncoder,
    asked: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []

    def watched(*head: Any, screen: bool, **options: Any) -> torch.Tensor:
        recorded.append(screen)
        return lsr_head(*head, screen=screen, **options)

    accelerate(model, **asked)
    monkeypatch.setattr(_pooling, "lsr_head", watched)
    model.encode(TEXTS)
    model(model.preprocess(TEXTS))
    assert set(recorded) == {asked.get("screen", True)} and len(recorded) > 1


def test_what_cannot_be_rounded_is_said(model: SparseEncoder) -> None:
    refused(
        TypeError,
        "screen must be True or False, got 'always'",
        accelerate,
        model,
        screen="always",
    )
    refused(
        ValueError,
        "quantize must be 'fp8' or None, got 'int4'",
        accelerate,
        model,
        quantize="int4",
    )
    model[1].pooling_strategy = "sum"
    refused(
        ValueError,
        "quantize must be None for pooling 'sum', got 'fp8'",
        accelerate,
        model,
        quantize="fp8",
    )
