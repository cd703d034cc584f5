"""``tilefold info plan`` of decoders: activations as autograd saves them, and what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor

from tests.cli.program import Call, measured
from tests.integrations.decoder_models import tiny_decoder
from tilefold.bench import results
from tilefold.cli import _decoder_plan
from tilefold.cli._decoder_plan import (
    ALL_WEIGHTS_BYTES,
    LORA_BYTES,
    LORA_DROPOUT_BYTES,
    LayerBytes,
    decoder_shape,
)
from tilefold.cli._plan import GIB, PEAK_ROWS, TEXTS_PER_PAIR
from tilefold.integrations.transformers import packed_hidden_states, use_packed
from tilefold.recipes.decoders import LORA_DROPOUT, PROJECTIONS

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "nvidia-h200"
N_TOKENS = 250
TOKENS_PER_PAIR = 82  # mean of the ragged pairs of the benchmark
PLANNED_BYTES = {
    "all weights": ALL_WEIGHTS_BYTES,
    "lora": LORA_BYTES,
    "lora with dropout": LORA_DROPOUT_BYTES,
}
# The ratios of the sizes are those of a Llama of a billion weights.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 256,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def _dropout_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dropout save a mask of a byte for each value, as it does on a GPU."""

    def dropout(
        values: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if p == 0 or not training:
            return values
        return torch.native_dropout(values, p, training)[0]

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


def decoder(kind: str, way: str, n_layers: int) -> Any:
    """Return a small decoder that accepts packed tokens.

    Args:
        kind: a family of decoders.
        way: how it is trained: ``"all weights"`` in fp32, ``"bf16"`` weights, or ``"lora"`` or
            ``"lora with dropout"`` on frozen bf16 weights.
        n_layers: the number of layers.
    """
    options: dict[str, Any] = {**SIZES, "num_hidden_layers": n_layers}
    if kind == "gemma3":
        options["layer_types"] = ["full_attention"] * n_layers
    network = tiny_decoder(kind, max_position_embeddings=512, **options)
    if way != "all weights":
        network.to(torch.bfloat16)
    if way.startswith("lora"):
        dropout = LORA_DROPOUT if way == "lora with dropout" else 0.0
        network.add_adapter(
            LoraConfig(r=4, target_modules=list(PROJECTIONS), lora_dropout=dropout),
        )
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    assert use_packed(network, check=False) is None
    return network.train()


def saved_bytes(network: Any, *, is_recomputed: bool = False) -> float:
    """Return the bytes that autograd saves per token in the forward pass of a decoder.

    Args:
        network: the decoder.
        is_recomputed: whether its layers are recomputed in the backward pass.
    """
    if is_recomputed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    storages: dict[int, Any] = {}

    def save(tensor: Tensor) -> Tensor:
        """Count the storage of a tensor with a dimension of tokens, once."""
        if {N_TOKENS, N_TOKENS // 2} & set(tensor.shape):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    input_ids = torch.randint(3, 300, (N_TOKENS,))
    cu_seqlens = torch.tensor([0, N_TOKENS // 2, N_TOKENS], dtype=torch.int32)
    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        packed_hidden_states(network.model, input_ids, cu_seqlens, N_TOKENS // 2)
    return sum(storage.nbytes() for storage in storages.values()) / N_TOKENS


def saved_in_layer(kind: str, way: str, *, is_recomputed: bool = False) -> float:
    """Return the bytes that autograd saves per token in one layer of a small decoder."""
    two_layers, four_layers = (
        saved_bytes(decoder(kind, way, n_layers), is_recomputed=is_recomputed)
        for n_layers in (2, 4)
    )
    return (four_layers - two_layers) / 2


def config_of(kind: str, **options: Any) -> Any:
    """Return the configuration of a small decoder, as its checkpoint has it."""
    network = tiny_decoder(kind, **{**SIZES, **options})
    network.config.architectures = [type(network).__name__]
    return network.config


@pytest.mark.parametrize("way", PLANNED_BYTES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_layers_save_the_planned_bytes(kind: str, way: str) -> None:
    planned = _decoder_plan.layer_bytes(decoder_shape(config_of(kind)), PLANNED_BYTES[way])
    assert planned == pytest.approx(saved_in_layer(kind, way), rel=0.05)


@pytest.mark.parametrize(
    ("way", "coefficients"),
    [
        pytest.param("all weights", ALL_WEIGHTS_BYTES, id="all weights"),
        pytest.param("lora", LORA_BYTES, id="LoRA"),
    ],
)
def test_recomputed_layers_save_their_input(way: str, coefficients: LayerBytes) -> None:
    planned = coefficients.checkpoint * SIZES["hidden_size"]
    assert saved_in_layer("llama", way, is_recomputed=True) == pytest.approx(planned, rel=0.01)


def measured_row(case: str, work: str) -> Any:
    """Return the row of packed tokens that was measured on an H200."""
    (row,) = (
        row
        for row in results.read_csv(MEASURED / "decoders.csv")
        if (row["case"], row["work"], row["way"]) == (case, work, "packed")
    )
    return row


def llama_1b_shape() -> _decoder_plan.DecoderShape:
    """Return the sizes of the decoder that was measured."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    return decoder_shape(config)


def test_the_plan_of_lora_without_dropout_is_the_memory_that_was_measured_on_an_h200() -> None:
    row = measured_row("llama-1b-lora", "step of 64 pairs")
    plan = _decoder_plan.decoder_training(
        llama_1b_shape(),
        TOKENS_PER_PAIR,
        [140.0],
        mini_batch_size=64,
        lora_rank=64,
        lora_dropout=0.0,
        checkpointing=False,
    )
    fixed_gib = plan.weights_gib + plan.gradients_gib + plan.optimizer_gib
    planned = fixed_gib + 64 * plan.mib_a_pair / 1024
    assert planned == pytest.approx(float(row["peak_gib"]), rel=0.1)


def test_saved_bytes_explain_the_memory_that_was_measured_on_an_h200() -> None:
    row = measured_row("llama-1b", "step of 64 pairs")
    n_pairs = 64
    hidden, n_layers, n_parameters, vocab = 2048, 16, 1_498_482_688, 128_256
    layer = saved_in_layer("llama", "bf16") * hidden / SIZES["hidden_size"]
    activations = n_pairs * TOKENS_PER_PAIR * n_layers * layer
    rows = n_pairs * TEXTS_PER_PAIR * PEAK_ROWS * 4 * vocab
    weights_and_gradients = 4 * n_parameters  # both in bf16, and SGD has no state
    planned = (weights_and_gradients + activations + rows) / GIB
    assert planned == pytest.approx(float(row["peak_gib"]), rel=0.1)


def test_the_rate_of_encoding_is_that_of_the_row_it_was_fitted_to() -> None:
    row = measured_row("llama-1b", "encode")
    shape = llama_1b_shape()
    assert shape.parameters == 1_498_482_688
    rate = _decoder_plan.decoder_texts_per_second(shape, length=230)
    assert rate == pytest.approx(float(row["docs_s"]), rel=0.02)


def test_a_plan_of_a_decoder_compares_lora_and_all_weights(call: Call, tmp_path: Path) -> None:
    config_of("llama", dtype=torch.bfloat16).save_pretrained(str(tmp_path))
    command = ("info", "plan", "--model", str(tmp_path), "--mini-batch-size", "4")
    plan = measured(call(*command, "--json"))
    assert plan["gpu_memories"] == [80.0, 140.0]
    steps = {(step["lora_rank"], step["checkpointing"]): step for step in plan["trainings"]}
    lora, all_weights = steps[64, False], steps[None, False]
    assert lora["optimizer_gib"] == pytest.approx(2 * lora["gradients_gib"])
    assert all_weights["optimizer_gib"] == pytest.approx(2 * all_weights["gradients_gib"])
    assert plan["shape"]["weight_bytes"] == 2
    for (rank, checkpointing), step in steps.items():
        small, large = step["fits"]
        assert small["largest_batch"] < large["largest_batch"]
        if checkpointing:
            assert step["mib_a_pair"] < steps[rank, False]["mib_a_pair"]
    printed = call(*command, "--gpu-memory", "40").out
    assert "LoRA of rank 64" in printed
    assert "LoRA with dropout 0.05" in " ".join(printed.split())
    assert lora["lora_dropout"] == LORA_DROPOUT
    assert "all weights" in printed
    assert "40 GiB" in printed
    assert "no other decoder or GPU" in " ".join(printed.split())


def test_a_decoder_that_was_saved_without_its_head_is_planned_as_a_decoder(
    call: Call,
    tmp_path: Path,
) -> None:
    config_of("llama", architectures=["LlamaModel"]).save_pretrained(str(tmp_path))
    plan = measured(call("info", "plan", "--model", str(tmp_path), "--json"))
    assert {step["lora_rank"] for step in plan["trainings"]} == {None, 64}


def test_a_plan_of_a_mixture_of_experts_is_refused(call: Call, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=48,
        vocab_size=64,
        num_experts=2,
        moe_intermediate_size=16,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(str(tmp_path))
    result = call("info", "plan", "--model", str(tmp_path))
    assert result.code == 2
    message = "--model: expected an encoder like BERT, or a decoder whose layers have"
    assert message in " ".join(result.err.split())
