"""Heads own parameters, share them on request, and leave the mathematics to the operators."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilefold.nn import EntmaxAlpha, LSRHead, TokenWeightHead
from tilefold.ops import lsr_head, token_scatter

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(3, 7, 16, generator=GENERATOR)
IDS = torch.randint(0, 20, (3, 7), generator=GENERATOR)
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 1, 0, 1, 0, 0, 1]])
KEPT, OFFSETS = (
    MASK.bool(),
    torch.cat([torch.zeros(1, dtype=torch.int64), MASK.sum(1).cumsum(0)]).int(),
)
# by class: a head's size, and what it reads besides hidden states
HEADS: dict[type, tuple[int, tuple[torch.Tensor, ...]]] = {
    LSRHead: (50, ()),
    TokenWeightHead: (20, (IDS,)),
}
every_head = pytest.mark.parametrize("kind", HEADS)


def made(kind: Any, **options: Any) -> Any:
    return kind(16, HEADS[kind][0], **options)


def scores_of(head: Any, hidden: torch.Tensor = HIDDEN) -> torch.Tensor:
    return head(hidden, *HEADS[type(head)][1], MASK)


def test_forward_is_the_operator_with_the_options_of_the_module() -> None:
    options: dict[str, Any] = {
        "pooling": "mean",
        "activation": "softplus",
        "logit_scale": 0.5,
        "impl": "reference",
    }
    head = LSRHead(16, 50, **options)
    assert torch.equal(
        scores_of(head),
        lsr_head(HIDDEN, head.weight, head.bias, attention_mask=MASK, **options),
    )
    options = {"reduce": "sum", "activation": "softplus", "ignore_ids": [0, 3]}
    weights, layer = TokenWeightHead(16, 20, **options), nn.Linear(16, 1)
    layer.load_state_dict(weights.state_dict())
    assert torch.equal(
        scores_of(weights),
        token_scatter(layer(HIDDEN), IDS, 20, attention_mask=MASK, **options),
    )


@every_head
def test_packed_and_padded_inputs_score_the_same_and_gradients_reach_the_parameters(
    kind: type,
) -> None:
    head, hidden = made(kind), HIDDEN.clone().requires_grad_()
    packed = head(HIDDEN[KEPT], *[more[KEPT] for more in HEADS[kind][1]], cu_seqlens=OFFSETS)
    padded = scores_of(head, hidden)
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=1e-6)
    padded.sum().backward()
    assert head.weight.grad.abs().sum() > 0 and head.bias.grad.abs().sum() > 0
    assert hidden.grad.abs().sum() > 0 and not hidden.grad[MASK == 0].any()


@every_head
def test_the_state_dict_holds_weight_and_bias_only_and_copies_have_parameters_of_their_own(
    kind: type,
) -> None:
    head, other = (
        made(kind, activation="log1p_log1p_relu"),
        made(kind, activation="log1p_log1p_relu"),
    )
    assert list(head.state_dict()) == ["weight", "bias"]
    assert list(made(kind, bias=False).state_dict()) == ["weight"]
    other.load_state_dict(head.state_dict())
    for twin in (other, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):  # noqa: S301
        assert torch.equal(scores_of(twin), scores_of(head)) and twin.weight is not head.weight


def test_the_file_of_a_linear_layer_to_one_feature_loads_without_unpickling_code(
    tmp_path: Path,
) -> None:
    layer, head = nn.Linear(16, 1), TokenWeightHead(16, 20)  # what BGE-M3 ships as sparse_linear.pt
    torch.save(layer.state_dict(), tmp_path / "sparse_linear.pt")
    head.load_state_dict(torch.load(tmp_path / "sparse_linear.pt", weights_only=True))
    assert torch.equal(head.weight, layer.weight) and torch.equal(head.bias, layer.bias)


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_from_a_linear_layer_shares_its_parameters(bias: bool) -> None:
    decoder, layer = nn.Linear(16, 50, bias=bias), nn.Linear(16, 1, bias=bias)
    head, weights = (
        LSRHead.from_linear(decoder, pooling="sum"),
        TokenWeightHead.from_linear(layer, 20, reduce="sum"),
    )
    assert (head.hidden_size, head.vocab_size, head.pooling, weights.reduce) == (
        16,
        50,
        "sum",
        "sum",
    )
    for owner, shared in ((head, decoder), (weights, layer)):
        assert owner.weight is shared.weight and owner.bias is shared.bias
        scores_of(owner).sum().backward()
        assert shared.weight.grad is not None and shared.weight.grad.abs().sum() > 0
    head, decoder = LSRHead(16, 50), nn.Linear(16, 60, bias=False)
    head.tie_weights(decoder)
    assert head.weight is decoder.weight and head.bias is None and head.vocab_size == 60


def test_other_layers_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        TypeError,
        match=r"linear must be a torch.nn.Linear, got Embedding; pass the output",
    ):
        LSRHead.from_linear(nn.Embedding(50, 16))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError,
        match=r"layer must be .* got Embedding; for a layer of any other kind, call tilefold.token_scatter",
    ):
        TokenWeightHead.from_linear(nn.Embedding(50, 16), 20)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match="layer must have one output, got 20; for a decoder use LSRHead",
    ):
        TokenWeightHead.from_linear(nn.Linear(16, 20), 20)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_encoding_gives_the_sparse_rows_of_forward() -> None:
    head = TokenWeightHead(16, 20, ignore_ids=[1])
    sparse = head.encode(HIDDEN, IDS, MASK)
    assert sparse.layout == torch.sparse_csr and not sparse.requires_grad
    assert torch.equal(sparse.to_dense(), head(HIDDEN, IDS, MASK))
    assert head.encode(HIDDEN, IDS, MASK, top_k=1).values().numel() <= 3


def test_dtype_and_device_are_those_asked_for_and_repr_shows_the_options() -> None:
    head = LSRHead(16, 50, device="meta", dtype=torch.bfloat16)
    assert (
        head.weight.device.type == "meta"
        and head.bias is not None
        and head.bias.dtype == torch.bfloat16
    )
    assert repr(LSRHead(16, 50, bias=False)) == (
        "LSRHead(hidden_size=16, vocab_size=50, bias=False, pooling='max', "
        "activation='log1p_relu', logit_scale=1.0, impl='auto')"
    )
    assert repr(TokenWeightHead(16, 20, bias=False, ignore_ids=[1])) == (
        "TokenWeightHead(hidden_size=16, vocab_size=20, bias=False, reduce='max', "
        "activation='relu', ignore_ids=(1,), impl='auto')"
    )


def test_an_alpha_close_to_two_keeps_its_gradient() -> None:
    alpha = EntmaxAlpha(1)
    with torch.no_grad():
        alpha.theta.fill_(20.0)
    alpha().sum().backward()
    slope = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64)).item()
    assert alpha.theta.grad.item() == pytest.approx(slope, rel=1e-6, abs=0)
