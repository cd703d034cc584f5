"""TokenWeightHead: a linear layer to one weight a token, whose state dict is that of the linear layer."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from tilefold.nn import TokenWeightHead
from tilefold.ops import token_scatter

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(3, 7, 16, generator=GENERATOR)
IDS = torch.randint(0, 20, (3, 7), generator=GENERATOR)
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 1, 0, 1, 0, 0, 1]])


def test_forward_is_the_linear_layer_and_the_operator_with_the_options_of_the_module() -> None:
    options = {"reduce": "sum", "activation": "softplus", "ignore_ids": [0, 3]}
    head = TokenWeightHead(16, 20, **options)
    layer = nn.Linear(16, 1)
    layer.load_state_dict(head.state_dict())
    expected = token_scatter(layer(HIDDEN), IDS, 20, attention_mask=MASK, **options)
    assert torch.equal(head(HIDDEN, IDS, MASK), expected)


def test_packed_and_padded_inputs_score_the_same() -> None:
    head = TokenWeightHead(16, 20)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), MASK.sum(1).cumsum(0)]).int()
    packed = head(HIDDEN[MASK.bool()], IDS[MASK.bool()], cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, head(HIDDEN, IDS, MASK), rtol=1e-6, atol=1e-6)


def test_gradients_reach_the_layer_and_the_hidden_states() -> None:
    head, hidden = TokenWeightHead(16, 20), HIDDEN.clone().requires_grad_()
    head(hidden, IDS, MASK).sum().backward()
    assert head.weight.grad.abs().sum() > 0 and head.bias.grad.abs().sum() > 0
    assert hidden.grad.abs().sum() > 0 and not hidden.grad[MASK == 0].any()


def test_the_file_of_a_linear_layer_to_one_feature_loads_without_unpickling_code(tmp_path: Path) -> None:
    layer = nn.Linear(16, 1)  # what BGE-M3 ships as sparse_linear.pt
    torch.save(layer.state_dict(), tmp_path / "sparse_linear.pt")
    head = TokenWeightHead(16, 20)
    head.load_state_dict(torch.load(tmp_path / "sparse_linear.pt", weights_only=True))
    assert torch.equal(head.weight, layer.weight) and torch.equal(head.bias, layer.bias)
    assert list(TokenWeightHead(16, 20, bias=False).state_dict()) == ["weight"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_from_a_linear_layer_shares_its_parameters(bias: bool) -> None:
    layer = nn.Linear(16, 1, bias=bias)
    head = TokenWeightHead.from_linear(layer, 20, reduce="sum")
    assert head.weight is layer.weight and head.bias is layer.bias and head.reduce == "sum"
    head(HIDDEN, IDS, MASK).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0


def test_other_layers_are_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"layer must be a torch.nn.Linear, got Embedding; call tilefold.token_scatter"):
        TokenWeightHead.from_linear(nn.Embedding(50, 16), 20)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer must have one output, got 20; a decoder goes into LSRHead"):
        TokenWeightHead.from_linear(nn.Linear(16, 20), 20)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_encoding_gives_the_sparse_rows_of_forward() -> None:
    head = TokenWeightHead(16, 20, ignore_ids=[1])
    sparse = head.encode(HIDDEN, IDS, MASK)
    assert sparse.layout == torch.sparse_csr and not sparse.requires_grad
    assert torch.equal(sparse.to_dense(), head(HIDDEN, IDS, MASK))
    assert head.encode(HIDDEN, IDS, MASK, top_k=1).values().numel() <= 3


def test_copies_and_pickles_score_the_same_with_parameters_of_their_own() -> None:
    head = TokenWeightHead(16, 20, ignore_ids=range(3))
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):  # noqa: S301
        assert torch.equal(twin(HIDDEN, IDS, MASK), head(HIDDEN, IDS, MASK))
        assert twin.weight is not head.weight


def test_its_repr_shows_the_options() -> None:
    assert repr(TokenWeightHead(16, 20, bias=False, ignore_ids=[1])) == (
        "TokenWeightHead(hidden_size=16, vocab_size=20, bias=False, reduce='max', activation='relu', "
        "ignore_ids=(1,), impl='auto')"
    )
