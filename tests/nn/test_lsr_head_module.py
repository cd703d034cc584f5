"""LSRHead: a module that owns parameters, shares them on request, and leaves the mathematics to the operator."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tilefold.nn import LSRHead
from tilefold.ops import lsr_head

HIDDEN = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 1, 0, 1, 0, 0, 1]])


def test_forward_is_the_operator_with_the_options_of_the_module() -> None:
    head = LSRHead(16, 50, pooling="mean", activation="softplus", logit_scale=0.5, impl="reference")
    expected = lsr_head(
        HIDDEN,
        head.weight,
        head.bias,
        attention_mask=MASK,
        pooling="mean",
        activation="softplus",
        logit_scale=0.5,
        impl="reference",
    )
    assert torch.equal(head(HIDDEN, MASK), expected)


def test_packed_and_padded_inputs_score_the_same() -> None:
    head = LSRHead(16, 50)
    lengths = MASK.sum(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    packed = head(HIDDEN[MASK.bool()], cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, head(HIDDEN, MASK), rtol=1e-6, atol=1e-6)


def test_the_state_dict_holds_weight_and_bias_only_and_loads_into_a_fresh_module() -> None:
    head, other = LSRHead(16, 50), LSRHead(16, 50)
    assert list(head.state_dict()) == ["weight", "bias"]
    assert list(LSRHead(16, 50, bias=False).state_dict()) == ["weight"]
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(HIDDEN, MASK), head(HIDDEN, MASK))


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_from_a_linear_layer_shares_its_parameters(bias: bool) -> None:
    linear = nn.Linear(16, 50, bias=bias)
    head = LSRHead.from_linear(linear, pooling="sum")
    assert head.weight is linear.weight and head.bias is linear.bias
    assert (head.hidden_size, head.vocab_size, head.pooling) == (16, 50, "sum")
    head(HIDDEN, MASK).sum().backward()
    assert linear.weight.grad is not None and linear.weight.grad.abs().sum() > 0


def test_tying_replaces_the_parameters_of_a_head() -> None:
    head, linear = LSRHead(16, 50), nn.Linear(16, 60, bias=False)
    head.tie_weights(linear)
    assert head.weight is linear.weight and head.bias is None and head.vocab_size == 60


def test_tying_to_something_else_names_the_argument_and_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"linear must be a torch.nn.Linear, got Embedding; pass the output"):
        LSRHead.from_linear(nn.Embedding(50, 16))  # type: ignore[arg-type]


def test_copies_and_pickles_score_the_same_with_parameters_of_their_own() -> None:
    head = LSRHead(16, 50, pooling="sum", activation="log1p_log1p_relu")
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):  # noqa: S301
        assert torch.equal(twin(HIDDEN, MASK), head(HIDDEN, MASK))
        assert twin.weight is not head.weight


def test_dtype_and_device_are_those_asked_for() -> None:
    head = LSRHead(16, 50, device="meta", dtype=torch.bfloat16)
    assert head.weight.device.type == "meta" and head.bias is not None and head.bias.dtype == torch.bfloat16


def test_its_repr_shows_the_options() -> None:
    assert repr(LSRHead(16, 50, bias=False)) == (
        "LSRHead(hidden_size=16, vocab_size=50, bias=False, pooling='max', activation='log1p_relu', "
        "logit_scale=1.0, impl='auto')"
    )
