"""Tests that transformers encoders compute the same from packed tokens as from padded ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import BartConfig, BartForConditionalGeneration
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from tests import programs
from tests.recipes.small import tiny_network
from tests.refusals import refused
from tilefold.integrations import transformers
from tilefold.integrations.transformers.packed import (
    PACKED,
    packed_hidden_states,
    position_ids_of,
    stop_packed,
    use_packed,
)

KINDS = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "albert"]
LENGTHS = [7, 1, 30, 12]


def network(kind: str, **options: Any) -> Any:
    """Return a tiny masked language model in fp64."""
    if kind == "modernbert":  # a window that the longest text exceeds, and both kinds of layers
        options = {"local_attention": 8, "global_attn_every_n_layers": 2, **options}
    return tiny_network(kind, vocab_size=300, **options).double()


def batch(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return padded token ids and their mask, ``[B, S]``, and offsets of the texts, ``[B + 1]``."""
    lengths = torch.tensor(LENGTHS, device=device)
    mask = (torch.arange(max(LENGTHS), device=device) < lengths[:, None]).long()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 300, mask.shape, generator=generator).to(device) * mask
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return ids, mask, offsets


def gradients(model: Any, output: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of an output by parameter."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    (output * weights.to(output)).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def padded_logits(model: Any, ids: Tensor, mask: Tensor, **inputs: Tensor) -> Tensor:
    """Return the logits of the tokens of a padded batch without padding, ``[T, V]``."""
    logits = model(input_ids=ids, attention_mask=mask, **inputs).logits
    return logits[mask.bool()]


def assert_packed_equals_padded(model: Any, expected: Tensor) -> None:
    """Compare outputs and gradients of packed texts with the padded model's output."""
    ids, mask, offsets = batch()
    expected_gradients = gradients(model, expected)
    packed = packed_hidden_states(model, ids[mask.bool()], offsets, max(LENGTHS))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-11)
    packed_gradients = gradients(model, packed)
    assert packed_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_texts_have_the_outputs_and_gradients_of_padded_ones(kind: str) -> None:
    model = network(kind).eval()
    ids, mask, _ = batch()
    expected = padded_logits(model, ids, mask)
    assert use_packed(model) is None
    assert_packed_equals_padded(model, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "albert"])
def test_packed_texts_equal_padded_ones_with_gradient_checkpointing(kind: str) -> None:
    model = network(kind).eval()
    ids, mask, _ = batch()
    expected = padded_logits(model, ids, mask)
    assert use_packed(model) is None
    model.train()  # checkpointing runs in training mode only
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_packed_equals_padded(model, expected)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_padded_inputs_run_as_before(kind: str) -> None:
    model = network(kind).eval()
    ids, mask, _ = batch()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        expected_of_one_text = model(input_ids=ids[2:3]).logits
        assert use_packed(model) is None
        assert model.config._attn_implementation == PACKED
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
        one_text = model(input_ids=ids[2:3]).logits
        torch.testing.assert_close(one_text, expected_of_one_text, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_stop_packed_restores_the_attention(kind: str) -> None:
    model = network(kind)
    assert use_packed(model) is None
    stop_packed(model)
    assert model.config._attn_implementation == "sdpa"


def test_positions_start_at_0_in_every_text() -> None:
    ids, mask, offsets = batch()
    expected = torch.cat([torch.arange(length) for length in LENGTHS])
    assert torch.equal(position_ids_of(ids[mask.bool()], offsets), expected)


def test_positions_with_a_padding_id_are_those_of_roberta() -> None:
    ids, mask, offsets = batch()
    ids[2, 4] = 1  # a token of the text that is the padding token
    ids = torch.where(mask.bool(), ids, 1)
    expected = RobertaEmbeddings.create_position_ids_from_input_ids(ids, 1)[mask.bool()]
    assert torch.equal(position_ids_of(ids[mask.bool()], offsets, 1), expected)


def test_token_types_reach_the_model() -> None:
    model = network("bert").eval()
    ids, mask, offsets = batch()
    token_types = (torch.arange(ids.size(1)) > 4).long().expand_as(ids).contiguous()
    assert use_packed(model) is None
    with torch.no_grad():
        expected = padded_logits(model, ids, mask, token_type_ids=token_types)
        packed = packed_hidden_states(
            model,
            ids[mask.bool()],
            offsets,
            max(LENGTHS),
            token_type_ids=token_types[mask.bool()],
        )
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-11)


def test_packed_texts_in_several_rows_are_refused() -> None:
    model = network("bert").eval()
    ids, _, offsets = batch()
    assert use_packed(model) is None
    with pytest.raises(ValueError, match=r"packed sequences must be one row \[1, T\]"):
        model(
            input_ids=ids,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=30,
            max_length_k=30,
        )


def network_that_mixes_tokens() -> Any:
    """Return a model whose embeddings depend on all tokens of a row."""
    model = network("bert")

    def add_mean(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output + output.mean(1, keepdim=True)

    model.bert.embeddings.register_forward_hook(add_mean)
    return model


def encoder_and_decoder() -> Any:
    """Return a tiny BART, whose decoder attends to the output of its encoder."""
    config = BartConfig(
        vocab_size=300,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    )
    return BartForConditionalGeneration(config)


def averaged_linear_layer() -> Any:
    """Return a wrapped module that is no transformers model."""
    return AveragedModel(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build_model", "reason"),
    [
        pytest.param(
            partial(network, "mpnet"),
            "does not use transformers' AttentionInterface",
            id="mpnet",
        ),
        pytest.param(encoder_and_decoder, "has an encoder and a decoder", id="encoder-decoder"),
        pytest.param(
            partial(network, "bert", attn_implementation="eager"),
            "attn_implementation='eager' was chosen",
            id="eager attention",
        ),
        pytest.param(network_that_mixes_tokens, "disagree by", id="embeddings that mix tokens"),
        pytest.param(averaged_linear_layer, "is not a transformers model", id="linear layer"),
    ],
)
def test_use_packed_returns_why_a_model_stays_padded_and_does_not_change_it(
    build_model: Callable[[], Any],
    reason: str,
) -> None:
    model = build_model()
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    assert reason in str(use_packed(model))
    assert getattr(config, "_attn_implementation", None) == attention


def test_entmax_attention_takes_packed_tokens_itself() -> None:
    transformers.register()
    model = network("bert", attn_implementation="entmax").float().eval()
    ids, mask, offsets = batch()
    with torch.no_grad():
        expected = padded_logits(model, ids, mask)
        assert use_packed(model) is None
        assert model.config._attn_implementation == "entmax"
        packed = packed_hidden_states(model, ids[mask.bool()], offsets, max(LENGTHS))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_import_registers_no_attention() -> None:
    code = (
        "import tilefold.integrations.transformers\n"
        "import transformers\n"
        "print(*transformers.AttentionInterface._global_mapping)"
    )
    process = programs.run("-c", code)
    assert process.returncode == 0, process.stderr
    assert "sdpa" in process.stdout
    assert "tilefold_packed" not in process.stdout


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "budget"),
    [
        pytest.param(torch.bfloat16, 0.03, id="bf16"),
        pytest.param(torch.float32, 1e-3, id="fp32"),
    ],
)
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_packed_texts_on_a_gpu_equal_padded_ones_without_synchronization(
    kind: str,
    dtype: torch.dtype,
    budget: float,
) -> None:
    model = network(kind).eval().to("cuda", dtype)
    ids, mask, offsets = batch("cuda")
    logits = padded_logits(model, ids, mask)
    expected = {"scores": logits.detach(), **gradients(model, logits)}
    assert use_packed(model) is None
    packed_ids = ids[mask.bool()]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        packed = packed_hidden_states(model, packed_ids, offsets, max(LENGTHS))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = {"scores": packed.detach(), **gradients(model, packed)}
    for name, exact in expected.items():
        error = float((results[name] - exact).abs().max())
        assert error <= budget * float(exact.abs().max()) + 1e-6, name


def set_alpha_of(model: Any) -> None:
    """Call ``set_alpha`` with a valid alpha."""
    transformers.set_alpha(model, 1.5)


def load_alpha_of(model: Any) -> None:
    """Call ``load_alpha`` with a folder."""
    transformers.load_alpha(model, "checkpoint")


def record_sparsity_of(model: Any) -> None:
    """Enter the block of ``record_sparsity``."""
    with transformers.record_sparsity(model):
        pass


@pytest.mark.parametrize(
    "function",
    [
        use_packed,
        stop_packed,
        transformers.use_entmax,
        transformers.use_softmax,
        transformers.runs_entmax,
        transformers.learn_alpha,
        pytest.param(set_alpha_of, id="set_alpha"),
        pytest.param(load_alpha_of, id="load_alpha"),
        pytest.param(record_sparsity_of, id="record_sparsity"),
    ],
)
def test_the_name_of_a_model_is_refused_as_a_model(function: Callable[[Any], Any]) -> None:
    refused(TypeError, "model: expected Module, got 'minilm'", function, "minilm")
