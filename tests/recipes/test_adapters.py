"""Adapters of PEFT: models that were saved with theirs are trained on, and merging is exact."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.small import (
    TEXTS,
    causal_splade,
    dense,
    small_collection,
    tiny_causal_lm,
    tiny_masked_lm,
)
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes import get_recipe, train
from tilefold.recipes.adaptation import AdaptationRecipe, adapt
from tilefold.recipes.adapters import check_trainable, count_weights, merge_adapters

peft = pytest.importorskip("peft")

BERT_ATTENTION = ["query", "value"]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("masked")
    return str(tiny_masked_lm(folder, small_collection(), layers=2, bias=0.1))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("causal")
    return str(tiny_causal_lm(folder, "qwen2", tie_word_embeddings=True))


def masked_splade(base: str) -> SparseEncoder:
    modules = [Transformer(base, transformer_task="fill-mask"), SpladePooling()]
    return SparseEncoder(modules=modules, device="cpu")


def add_random_adapter(model: SparseEncoder, config: Any) -> None:
    """Add an adapter, and give all that it trains random values."""
    network: Any = model[0].model
    network.add_adapter(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"target_modules": BERT_ATTENTION}, id="attention"),
        pytest.param({"target_modules": [*BERT_ATTENTION, "decoder"]}, id="tied-head"),
        pytest.param({"target_modules": ["word_embeddings"]}, id="embeddings"),
        pytest.param({"target_modules": ["word_embeddings", "decoder"]}, id="both-tied"),
        pytest.param(
            {"target_modules": BERT_ATTENTION, "modules_to_save": ["decoder"]},
            id="head-copy",
        ),
        pytest.param({"target_modules": BERT_ATTENTION, "use_dora": True}, id="dora"),
        pytest.param({"target_modules": BERT_ATTENTION, "bias": "all"}, id="biases"),
    ],
)
def test_merged_adapters_of_a_masked_model_give_the_same_rows(
    options: dict[str, Any],
    masked: str,
    tmp_path: Path,
) -> None:
    model = masked_splade(masked)
    add_random_adapter(model, peft.LoraConfig(r=4, **options))
    expected = dense(model, TEXTS)
    assert merge_adapters(model) > 0
    torch.testing.assert_close(dense(model, TEXTS), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(str(tmp_path / "m"))
    again = SparseEncoder(str(tmp_path / "m"), device="cpu")
    torch.testing.assert_close(dense(again, TEXTS), expected, rtol=1e-4, atol=1e-4)
    names = load_file(tmp_path / "m/model.safetensors").keys()
    assert not [name for name in names if "lora" in name or "modules_to_save" in name]


def test_an_accelerated_model_is_stock_again_before_adapters_are_merged(masked: str) -> None:
    model = masked_splade(masked)
    add_random_adapter(
        model,
        peft.LoraConfig(r=4, target_modules=BERT_ATTENTION, modules_to_save=["decoder"]),
    )
    with accelerate(model):
        expected = dense(model, TEXTS)
        with pytest.raises(ValueError, match="model must not be accelerated while adapters"):
            merge_adapters(model)
        assert torch.equal(dense(model, TEXTS), expected)
    merge_adapters(model)
    with accelerate(model):
        torch.testing.assert_close(dense(model, TEXTS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, id="tied-head"),
        pytest.param(
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            id="head-copy",
        ),
        pytest.param(
            {
                "target_modules": ["q_proj"],
                "modules_to_save": ["lm_head"],
                "ensure_weight_tying": True,
            },
            id="tied-copies",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_merged_adapters_of_a_causal_model_give_the_same_rows(
    options: dict[str, Any],
    causal: str,
    tmp_path: Path,
) -> None:
    model = causal_splade(causal, device="cpu")
    add_random_adapter(model, peft.LoraConfig(r=4, **options))
    expected = dense(model, TEXTS)
    assert merge_adapters(model) > 0
    torch.testing.assert_close(dense(model, TEXTS), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(str(tmp_path / "m"))
    again = SparseEncoder(str(tmp_path / "m"), device="cpu")
    torch.testing.assert_close(dense(again, TEXTS), expected, rtol=1e-4, atol=1e-4)


def exact_sums(network: Any) -> dict[str, torch.Tensor]:
    """Return each adapted weight with its update, in fp64, by the name that it has once merged."""
    sums = {}
    for name, module in network.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            first = module.lora_A["default"].weight.double()
            second = module.lora_B["default"].weight.double()
            update = module.scaling["default"] * second @ first
            sums[f"{name}.weight"] = module.get_base_layer().weight.double() + update
    return sums


def half_a_unit_in_the_last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance of neighbours in a dtype, around values."""
    _, exponents = torch.frexp(values)
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps / 4), exponents)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, None], ids=["fp32-adapter", "all-alike"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_weights_in_16_bits_are_rounded_once_when_adapters_are_merged(
    dtype: torch.dtype,
    adapter_dtype: torch.dtype | None,
    masked: str,
) -> None:
    model = masked_splade(masked).to(dtype)
    add_random_adapter(model, peft.LoraConfig(r=4, target_modules=BERT_ATTENTION))
    network: Any = model[0].model
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype or dtype)
    expected = exact_sums(network)
    n_modules = merge_adapters(model)
    assert n_modules == len(expected) == 4
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    for name, exact in expected.items():
        merged = network.get_parameter(name)
        bound = half_a_unit_in_the_last_place(exact, dtype)
        # the sum is fp32: its own rounding is added to that of the storage
        bound += 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert ((merged.double() - exact).abs() <= bound).all()


def test_a_merged_network_whose_weights_overflow_fp16_is_kept_in_fp32(masked: str) -> None:
    model = masked_splade(masked).to(torch.float16)
    add_random_adapter(model, peft.LoraConfig(r=4, target_modules=BERT_ATTENTION))
    network: Any = model[0].model
    name = "bert.encoder.layer.1.attention.self.value"
    layer = network.get_submodule(name)
    for factor in (layer.lora_A["default"], layer.lora_B["default"]):
        factor.weight.data[0, 0] = 600.0  # whose product is above 65,504
    expected = exact_sums(network)[f"{name}.weight"]
    with pytest.warns(UserWarning, match=f"{name}.weight has a value .* too large for fp16"):
        merge_adapters(model)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    merged = network.get_parameter(f"{name}.weight")
    torch.testing.assert_close(merged, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            peft.IA3Config(target_modules=BERT_ATTENTION, feedforward_modules=[]),
            "must be LoRA or modules_to_save to be merged exactly, got Linear at",
            id="another-kind",
        ),
        pytest.param(
            peft.LoraConfig(target_modules=BERT_ATTENTION, trainable_token_indices=[3]),
            "must be LoRA or modules_to_save to be merged exactly, got TrainableTokens",
            id="tokens",
        ),
    ],
)
def test_adapters_that_cannot_be_merged_exactly_are_refused_unchanged(
    config: Any,
    message: str,
    masked: str,
) -> None:
    model = masked_splade(masked)
    model[0].model.add_adapter(config)
    model.eval()
    expected = dense(model, TEXTS)
    with pytest.raises(ValueError, match=message):
        merge_adapters(model)
    assert torch.equal(dense(model, TEXTS), expected)


def test_disabled_adapters_are_not_merged(masked: str) -> None:
    model = masked_splade(masked)
    add_random_adapter(model, peft.LoraConfig(target_modules=BERT_ATTENTION))
    model[0].model.disable_adapters()
    with pytest.raises(ValueError, match="must be active to be merged"):
        merge_adapters(model)


@pytest.mark.parametrize(
    "modules_to_save",
    [
        pytest.param(None, id="lora", marks=pytest.mark.slow),
        pytest.param(["decoder"], id="lora-and-head"),
    ],
)
def test_a_model_that_was_saved_with_its_adapter_is_trained_on(
    modules_to_save: list[str] | None,
    masked: str,
    tmp_path: Path,
) -> None:
    model = masked_splade(masked)
    config = peft.LoraConfig(r=4, target_modules=BERT_ATTENTION, modules_to_save=modules_to_save)
    model[0].model.add_adapter(config)
    model.save_pretrained(str(tmp_path / "base"))
    trained_weights, _ = count_weights(model)
    recipe = get_recipe(
        "splade",
        base_model=str(tmp_path / "base"),
        max_steps=4,
        batch_size=4,
        learning_rate=1e-2,
        warmup_ratio=0.0,
        bf16=False,
        save_steps=2,
    )
    result = train(recipe, small_collection(), tmp_path / "m")
    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("base", "m")
    )
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert result.trained_weights == trained_weights
    assert any("base_model has adapters (default)" in text for text in result.warnings)
    card = (tmp_path / "m/README.md").read_text()
    assert f"| trained weights | {trained_weights:,} of " in card

    def stop(step: int, *_: object) -> None:
        if step == 3:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(recipe, small_collection(), tmp_path / "parts", progress=stop)
    assert train(recipe, small_collection(), tmp_path / "parts").resumed_from == 2
    resumed = load_file(tmp_path / "parts/adapter_model.safetensors")
    for name, expected in after.items():
        torch.testing.assert_close(resumed[name], expected, rtol=0, atol=1e-5)


def test_a_model_of_which_nothing_would_be_trained_is_refused(masked: str) -> None:
    model = masked_splade(masked)
    check_trainable(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="must have weights to train, got a model whose"):
        check_trainable(model)


def test_a_loaded_adapter_is_trained_by_adaptation(causal: str, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(causal)
    network.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    network.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(causal)
    loaded.load_adapter(str(tmp_path))
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    recipe = AdaptationRecipe(
        steps=2,
        batch_size=2,
        length=16,
        learning_rate=1e-2,
        warmup_steps=0,
        chunk=8,
        bf16=False,
    )
    adapt(loaded, AutoTokenizer.from_pretrained(causal), TEXTS * 4, recipe)
    changed = [
        name
        for name, tensor in loaded.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]
    assert changed and all("lora_" in name for name in changed)


@pytest.mark.parametrize(
    "error",
    [pytest.param(KeyboardInterrupt(), id="ctrl-c"), pytest.param(ValueError("bad"), id="error")],
)
def test_a_run_that_ends_before_training_releases_its_folder(
    error: BaseException,
    masked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = get_recipe("splade", base_model=masked, max_steps=1, batch_size=4, bf16=False)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as during, pytest.raises(type(error)):
        during.setattr(type(recipe), "build_model", fail)
        train(recipe, small_collection(), tmp_path / "m")
    assert not (tmp_path / "m.training").exists()


def test_the_error_before_training_stays_if_its_folder_cannot_be_removed(
    masked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = get_recipe("splade", base_model=masked, max_steps=1, batch_size=4, bf16=False)

    def fail(*_: object) -> None:
        raise ValueError("no such model")

    remove_folder = shutil.rmtree

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if Path(path).name == "m.training":
            raise PermissionError("read-only")
        remove_folder(path, *arguments, **options)

    monkeypatch.setattr(type(recipe), "build_model", fail)
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(ValueError, match="no such model"):
        train(recipe, small_collection(), tmp_path / "m")
    assert "m.training could not be removed: read-only" in caplog.text
