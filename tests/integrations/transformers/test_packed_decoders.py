"""Tests that transformers decoders compute the same from packed tokens as from padded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, masking_utils

from tests.integrations.decoder_models import DECODERS, VOCABULARY, WINDOW, WINDOWED, tiny_decoder
from tilefold.integrations import transformers
from tilefold.integrations.transformers import packed as packed_module
from tilefold.integrations.transformers.packed import (
    PACKED,
    packed_hidden_states,
    stop_packed,
    use_packed,
)
from tilefold.ops.packed_attention import packed_softmax_attention

# Random lengths: an empty sequence, one token, a few more than a window, and all positions.
LENGTHS = [7, 0, 1, 40, 12, WINDOW + 1, 128]
# Allowed differences of models in fp64, as fractions of the largest value.
FP64_BUDGET = 1e-11
# The same if a part of the model computes in fp32.
FP32_BUDGET = 1e-5


def decoder(kind: str, *, bidirectional: bool = False, **options: Any) -> Any:
    """Return a tiny decoder in eval mode, in fp64 if its stock attention supports that."""
    model = tiny_decoder(kind, **options).eval()
    if kind != "gemma2":  # with padding in fp64, transformers' eager attention returns NaN
        model.double()
    if bidirectional:
        model.config.is_causal = False
    return model


def budget_of(kind: str, side: str = "right") -> float:
    """Return the allowed difference of packed and padded texts.

    Rotary positions are rounded to fp32. With padding on the left, they begin after the padding.
    Norms of Gemma models compute in fp32.

    Args:
        kind: the kind of the decoder.
        side: the side of the padding.
    """
    has_fp32_part = kind.startswith("gemma") or side == "left"
    return FP32_BUDGET if has_fp32_part else FP64_BUDGET


def sequences(lengths: list[int], device: str = "cpu") -> list[Tensor]:
    """Return random token ids of each sequence, ``[L]``."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(5, VOCABULARY, (length,), generator=generator).to(device)
        for length in lengths
    ]


def packed_logits(model: Any, texts: list[Tensor]) -> Tensor:
    """Return the logits of all tokens of a pack, ``[T, V]``."""
    lengths = torch.tensor([0, *map(len, texts)], device=texts[0].device)
    offsets = lengths.cumsum(0).to(torch.int32)
    return packed_hidden_states(model, torch.cat(texts), offsets, max(map(len, texts)))


def logits_one_at_a_time(model: Any, texts: list[Tensor]) -> Tensor:
    """Return the stock logits of all tokens, of one sequence after the other, ``[T, V]``."""
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in texts if len(ids) > 0])


def padded_logits(model: Any, texts: list[Tensor], side: str) -> Tensor:
    """Return the stock logits of all tokens of a batch padded on one side, ``[T, V]``."""
    longest = max(map(len, texts))
    ids = texts[0].new_zeros(len(texts), longest)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        start = longest - len(text) if side == "left" else 0
        ids[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits[mask.bool()]


def with_gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Return logits, and the gradients of a weighted sum of them by the name of the parameter."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    (logits * weights.to(logits)).sum().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"logits": logits.detach(), **gradients}


def assert_equal(
    results: dict[str, Tensor],
    expected: dict[str, Tensor],
    budget: float,
) -> None:
    """Compare tensors by name. They may differ by a fraction of the largest expected value."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        error = float((results[name] - value).abs().max())
        assert error <= budget * scale, f"{name}: error {error:.1e}, values up to {scale:.1e}"


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_texts_have_the_logits_and_gradients_of_each_text_alone(
    kind: str,
    bidirectional: bool,
) -> None:
    model = decoder(kind, bidirectional=bidirectional)
    texts = sequences(LENGTHS)
    expected = with_gradients(model, logits_one_at_a_time(model, texts))
    assert use_packed(model, check=False) is None
    assert_equal(with_gradients(model, packed_logits(model, texts)), expected, budget_of(kind))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_texts_have_the_logits_and_gradients_of_padded_ones(
    kind: str,
    bidirectional: bool,
    side: str,
) -> None:
    model = decoder(kind, bidirectional=bidirectional)
    texts = [text for text in sequences(LENGTHS) if len(text) > 0]
    expected = with_gradients(model, padded_logits(model, texts, side))
    assert use_packed(model) is None
    packed = with_gradients(model, packed_logits(model, texts))
    assert_equal(packed, expected, budget_of(kind, side))


def assert_as_near_as_padded(
    packed: dict[str, Tensor],
    padded: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Compare the errors of packed and of padded texts.

    Both round the same operations, in another order. So the norm of the error of packed texts may
    be twice that of padded ones, and two roundings of the result more.

    Args:
        packed: results of packed texts, by name.
        padded: stock results of the same texts with padding.
        exact: the same in a larger dtype.
        dtype: the dtype of the model.
    """
    assert packed.keys() == exact.keys()
    for name, truth in exact.items():
        padded_error = float((padded[name] - truth).norm())
        packed_error = float((packed[name] - truth).norm())
        rounding = torch.finfo(dtype).eps * float(truth.norm())
        assert packed_error <= 2 * padded_error + 2 * rounding, name


@pytest.mark.parametrize("kind", DECODERS)
def test_packed_texts_in_bf16_are_as_near_to_fp64_as_padded_ones(kind: str) -> None:
    exact_model = decoder(kind).bfloat16().double()  # rounded weights
    model = copy.deepcopy(exact_model).bfloat16()
    texts = [text for text in sequences(LENGTHS) if len(text) > 0]
    exact = with_gradients(exact_model, padded_logits(exact_model, texts, "right"))
    padded = with_gradients(model, padded_logits(model, texts, "right"))
    assert use_packed(model) is None
    packed = with_gradients(model, packed_logits(model, texts))
    assert_as_near_as_padded(packed, padded, exact, torch.bfloat16)


def test_gemma_3_as_an_encoder_has_the_logits_and_gradients_of_each_text_alone() -> None:
    model = decoder("gemma3", use_bidirectional_attention=True)
    texts = sequences(LENGTHS)
    expected = with_gradients(model, logits_one_at_a_time(model, texts))
    assert use_packed(model) is None
    packed = with_gradients(model, packed_logits(model, texts))
    assert_equal(packed, expected, budget_of("gemma3"))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_packed_texts_have_the_same_gradients_with_gradient_checkpointing(kind: str) -> None:
    model = decoder(kind)
    texts = sequences(LENGTHS)
    expected = with_gradients(model, logits_one_at_a_time(model, texts))
    assert use_packed(model) is None
    model.train()  # checkpointing runs in training mode only; these models have no dropout
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(with_gradients(model, packed_logits(model, texts)), expected, budget_of(kind))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_padded_texts_run_as_before(kind: str, bidirectional: bool) -> None:
    model = decoder(kind, bidirectional=bidirectional)
    texts = [text for text in sequences(LENGTHS) if len(text) > 0]
    with torch.no_grad():
        expected = {
            "left": padded_logits(model, texts, "left"),
            "right": padded_logits(model, texts, "right"),
            "no padding": logits_one_at_a_time(model, texts),
        }
        assert use_packed(model) is None
        assert model.config._attn_implementation == PACKED
        results = {
            "left": padded_logits(model, texts, "left"),
            "right": padded_logits(model, texts, "right"),
            "no padding": logits_one_at_a_time(model, texts),
        }
    assert_equal(results, expected, budget_of(kind))


@pytest.mark.parametrize("kind", DECODERS)
def test_stop_packed_restores_the_attention(kind: str) -> None:
    model = decoder(kind)
    attention = model.config._attn_implementation
    assert use_packed(model) is None
    stop_packed(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("kind", DECODERS)
def test_no_mask_is_created_for_packed_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(kind)
    texts = sequences(LENGTHS)
    assert use_packed(model) is None

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("positions are compared, or a mask is created")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", fail)
    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, PACKED, fail)
    packed_logits(model, texts)


def test_keys_and_values_are_not_cached_for_packed_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    assert model.config.use_cache
    assert use_packed(model) is None
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    packed_logits(model, sequences([3, 2]))
    assert outputs[0].past_key_values is None


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_wrong_window_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(kind)
    attention = model.config._attn_implementation

    def one_key_less(module: Any, sliding_window: int | None, is_causal: bool) -> int | None:
        return None if sliding_window is None else sliding_window - 2

    monkeypatch.setattr(packed_module, "largest_distance", one_key_less)
    assert "disagree by" in str(use_packed(model))
    assert model.config._attn_implementation == attention


def test_causal_attention_that_is_not_causal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    monkeypatch.setattr(packed_module, "_is_causal_call", lambda module, is_causal: False)
    assert "disagree by" in str(use_packed(model))


@pytest.mark.parametrize(
    ("factor", "inexact_dtypes", "is_accepted"),
    [
        pytest.param(1.1, {torch.bfloat16}, True, id="small in bf16 only"),
        pytest.param(1.1, {torch.bfloat16, torch.float32}, False, id="small in fp32 too"),
        pytest.param(-1.0, {torch.bfloat16}, False, id="large in bf16 only"),
    ],
)
def test_a_copy_in_fp32_tells_rounding_in_bf16_from_an_error(
    factor: float,
    inexact_dtypes: set[torch.dtype],
    is_accepted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_decoder("llama").bfloat16().eval()

    def inexact_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = packed_softmax_attention(query, *args, **kwargs)
        return output * factor if query.dtype in inexact_dtypes else output

    monkeypatch.setattr(packed_module, "packed_softmax_attention", inexact_attention)
    reason = use_packed(model)
    assert (reason is None) == is_accepted
    assert is_accepted or "disagree by" in str(reason)
    assert next(model.parameters()).dtype == torch.bfloat16


def gpt_oss() -> Any:
    """Return a tiny GPT-OSS, whose attention has sinks."""
    config = GptOssConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return GptOssForCausalLM(config)


def chunked_llama() -> Any:
    """Return a Llama whose configuration lists a kind of layers that packed attention lacks."""
    model = decoder("llama")
    model.config.layer_types = ["chunked_attention"] * model.config.num_hidden_layers
    return model


@pytest.mark.parametrize(
    ("build_model", "reason"),
    [
        pytest.param(
            partial(decoder, "gemma2", attn_logit_softcapping=50.0),
            r"Gemma2ForCausalLM has soft-capped attention \(attn_logit_softcapping=50.0\)",
            id="soft cap",
        ),
        pytest.param(gpt_oss, "GptOssForCausalLM has attention sinks", id="sinks"),
        pytest.param(chunked_llama, "has layers of type chunked_attention", id="chunks"),
        pytest.param(
            partial(decoder, "llama", attn_implementation="eager"),
            "attn_implementation='eager' was chosen",
            id="eager attention",
        ),
    ],
)
def test_use_packed_names_what_it_does_not_support_and_does_not_change_the_model(
    build_model: Callable[[], Any],
    reason: str,
) -> None:
    model = build_model()
    attention = model.config._attn_implementation
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(use_packed(model))
    assert model.config._attn_implementation == attention


def test_packed_texts_without_the_arguments_of_a_decoder_are_refused() -> None:
    model = decoder("llama")
    assert use_packed(model) is None
    ids = torch.cat(sequences([3, 2]))
    with pytest.raises(
        ValueError, match=r"for a decoder pass the arguments of .*decoder_arguments"
    ):
        model(
            input_ids=ids[None],
            position_ids=torch.tensor([[0, 1, 2, 0, 1]]),
            cu_seq_lens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
            max_length_q=3,
            use_cache=False,
        )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_entmax_attention_takes_packed_texts_of_decoders(kind: str, bidirectional: bool) -> None:
    transformers.register()
    model = tiny_decoder(kind, attn_implementation="entmax").eval()
    if bidirectional:
        model.config.is_causal = False
    texts = sequences(LENGTHS)
    with torch.no_grad():
        expected = logits_one_at_a_time(model, texts)
        assert use_packed(model) is None
        assert model.config._attn_implementation == "entmax"
        packed = packed_logits(model, texts)
    assert_equal({"logits": packed}, {"logits": expected}, 1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_texts_on_a_gpu_are_as_near_as_padded_ones_without_synchronization(
    kind: str,
    bidirectional: bool,
    dtype: torch.dtype,
) -> None:
    model = decoder(kind, bidirectional=bidirectional).to("cuda", dtype)
    exact_model = copy.deepcopy(model).double()
    texts = [text for text in sequences(LENGTHS, "cuda") if len(text) > 0]
    exact = with_gradients(exact_model, logits_one_at_a_time(exact_model, texts))
    padded = with_gradients(model, padded_logits(model, texts, "right"))
    assert use_packed(model) is None
    packed_logits(model, texts)  # kernels are loaded
    longest = max(LENGTHS)
    ids = torch.cat(texts)
    offsets = torch.tensor([0, *map(len, texts)], device="cuda").cumsum(0).to(torch.int32)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        logits = packed_hidden_states(model, ids, offsets, longest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_as_near_as_padded(with_gradients(model, logits), padded, exact, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_texts_under_autocast_on_a_gpu_are_as_near_as_padded_ones(
    kind: str,
    dtype: torch.dtype,
) -> None:
    model = decoder(kind).to("cuda", torch.float32)
    exact_model = copy.deepcopy(model).double()
    texts = [text for text in sequences(LENGTHS, "cuda") if len(text) > 0]
    exact = with_gradients(exact_model, logits_one_at_a_time(exact_model, texts))
    with torch.autocast("cuda", dtype):
        padded = with_gradients(model, padded_logits(model, texts, "right"))
        assert use_packed(model) is None
        packed = with_gradients(model, packed_logits(model, texts))
    assert_as_near_as_padded(packed, padded, exact, dtype)
