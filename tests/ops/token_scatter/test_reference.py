"""The specification of the token scatter by hand and by published formulas, and what it says about
arguments.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.matching import token_scatter_inputs
from tests.refusals import refused
from tilefold.ops import token_scatter, token_scatter_sparse

REDUCTIONS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu", "log1p_log1p_relu", "softplus", "none")


def scatter(weights: object, ids: object, vocab: int = 5, **options: object) -> Tensor:
    """The reference on nested lists, linear unless another activation is named."""
    options = {"activation": "none"} | options
    for name in ("attention_mask", "cu_seqlens"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return token_scatter(weights, torch.tensor(ids), vocab, impl="reference", **options)


BY_HAND = [
    ([[1.0, 2.0, 3.0]], [[4, 0, 2]], {}, [[2, 0, 3, 0, 1]]),  # absent entries score zero
    (
        [[1.0, 5.0, 2.0], [1.0, 2.0, 3.0]],
        [[1, 1, 1], [0, 1, 0]],
        {},
        [[0, 5, 0, 0, 0], [3, 2, 0, 0, 0]],
    ),
    ([[1.0, 5.0, 2.0]], [[1, 1, 1]], {"reduce": "sum"}, [[0, 8, 0, 0, 0]]),
    ([[-1.0, -2.0]], [[1, 3]], {}, [[0, 0, 0, 0, 0]]),  # a maximum is never below zero
    ([[-1.0, -2.0]], [[1, 3]], {"reduce": "sum"}, [[0, -1, 0, -2, 0]]),
    (
        [[1.0, -5.0, 3.0]],
        [[2, 2, 2]],
        {"reduce": "sum", "activation": "relu"},
        [[0, 0, 4, 0, 0]],
    ),  # each token first
    (
        [[1.0, 2.0]],
        [[-100, 1]],
        {"ignore_ids": (-100, 99)},
        [[0, 2, 0, 0, 0]],
    ),  # outside of the vocabulary
    (
        [[1.0, 2.0], [3.0, 4.0]],
        [[0, 1]] * 2,
        {"attention_mask": [[0, 0], [0, 1]]},
        [[0] * 5, [0, 4, 0, 0, 0]],
    ),
]


@pytest.mark.parametrize(("weights", "ids", "options", "expected"), BY_HAND)
def test_scores_by_hand(
    weights: object,
    ids: object,
    options: dict[str, Any],
    expected: list[list[int]],
) -> None:
    assert scatter(weights, ids, **options).tolist() == expected


def test_activations_are_what_their_names_say() -> None:
    for activation, expected in {
        "log1p_relu": [0.0, math.log(4)],
        "log1p_log1p_relu": [0.0, math.log1p(math.log(4))],
        "relu": [0.0, 3.0],
        "softplus": [math.log1p(math.exp(-2)), math.log1p(math.exp(3))],
        "none": [0.0, 3.0],
    }.items():
        out = scatter([[-2.0, 3.0]], [[0, 1]], vocab=3, activation=activation)
        assert out[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_masked_and_ignored_tokens_count_for_nothing_whatever_they_hold(reduce: str) -> None:
    weights = torch.tensor([[math.nan, 1.0, math.inf, 2.0, math.nan]], requires_grad=True)
    ids = torch.tensor([[0, 1, 2, 3, -7]])
    mask = torch.tensor([[0, 1, 1, 1, 0]])
    options = {"attention_mask": mask, "ignore_ids": [2, -1], "reduce": reduce, "impl": "reference"}
    out = token_scatter(weights, ids, 5, **options)
    assert out.tolist() == [[0, 1, 0, 2, 0]]
    out.sum().backward()
    assert weights.grad.tolist() == [[0, 1, 0, 1, 0]]


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("beyond", [2**63, -(2**63), -(2**63) - 1, 2**200])
def test_an_ignored_id_that_no_integer_tensor_can_hold_ignores_nothing(
    beyond: int,
    impl: str,
) -> None:
    weights, ids = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 1]])
    assert token_scatter(weights, ids, 3, ignore_ids=(beyond, 0), impl=impl).tolist() == [[0, 2, 0]]
    assert token_scatter_sparse(weights, ids, 3, ignore_ids=(beyond, 0)).to_dense().tolist() == [
        [0, 2, 0],
    ]


def test_ties_go_to_the_lowest_token_which_takes_the_whole_gradient() -> None:
    weights = torch.tensor([[1.0, 2.0, 2.0, 2.0], [-0.0, 0.0, 3.0, 3.0]], requires_grad=True)
    token_scatter(
        weights,
        torch.tensor([[1, 1, 1, 1], [0, 0, 2, 1]]),
        3,
        impl="reference",
    ).sum().backward()
    assert weights.grad.tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]


def test_weights_may_have_the_trailing_dimension_of_a_linear_layer() -> None:
    inputs = token_scatter_inputs(3, 7, 11)
    weights = inputs.weights[:, :, None].clone().requires_grad_()
    for impl in ("reference", "tiled"):
        out = token_scatter(weights, inputs.input_ids, 11, impl=impl)
        assert torch.equal(out, token_scatter(*inputs.operands, impl=impl))
    out.sum().backward()
    assert weights.grad.shape == (3, 7, 1)
    packed = inputs.packed()
    out = token_scatter(packed.weights[:, None], packed.input_ids, 11, cu_seqlens=packed.cu_seqlens)
    assert torch.equal(out, token_scatter(*inputs.operands))


def bge_m3(weights: Tensor, ids: Tensor, vocab: int, unused: list[int], training: bool) -> Tensor:
    """FlagEmbedding's formulas for M3: a [B, S, V] scatter and a maximum, or a scatter_reduce with
    amax.
    """
    if training:
        every = torch.zeros(*ids.shape, vocab, dtype=weights.dtype)
        scores = every.scatter(-1, ids[:, :, None], weights.relu()[:, :, None]).max(dim=1).values
    else:
        scores = torch.zeros(ids.size(0), vocab, dtype=weights.dtype)
        scores = scores.scatter_reduce(-1, ids, weights.relu(), reduce="amax")
    keep = torch.ones(vocab, dtype=weights.dtype)
    keep[unused] = 0
    return scores * keep


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_it_is_the_lexical_embedding_of_bge_m3(impl: str) -> None:
    inputs = token_scatter_inputs(4, 30, 40, dtype=torch.float64)
    unused = [0, 2, 1, 3]
    leaves = [inputs.weights.clone().requires_grad_() for _ in range(2)]
    mine = token_scatter(leaves[0], inputs.input_ids, 40, ignore_ids=unused, impl=impl)
    stock_result = bge_m3(leaves[1], inputs.input_ids, 40, unused, training=True)
    assert torch.equal(mine, stock_result)
    assert torch.equal(mine, bge_m3(inputs.weights, inputs.input_ids, 40, unused, training=False))
    mine.backward(inputs.dscores)
    stock_result.backward(inputs.dscores)
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    # its padding has a token of its own, which is not used
    inputs = token_scatter_inputs(4, 30, 40, layout="right")
    ids = inputs.input_ids.masked_fill(inputs.attention_mask == 0, 1)
    masked = token_scatter(
        *inputs.operands,
        attention_mask=inputs.attention_mask,
        ignore_ids=unused,
        impl=impl,
    )
    assert torch.equal(masked, bge_m3(inputs.weights, ids, 40, unused, training=False))


WEIGHTS, IDS, MASK = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
PACKED = {"weights": torch.zeros(6), "input_ids": torch.zeros(6, dtype=torch.int64)}
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)

SHAPES = [
    ({"input_ids": IDS[0]}, "input_ids must have shape [B, S], got [3]."),
    ({"input_ids": IDS, "cu_seqlens": OFFSETS}, "input_ids must have shape [T], got [2, 3]."),
    ({"weights": WEIGHTS[0]}, "weights must have shape [B, S] with B=2, S=3, got [3]."),
    ({"weights": WEIGHTS.T}, "weights must have shape [B, S] with B=2, S=3, got [3, 2]."),
    (
        {"weights": torch.zeros(2, 3, 2)},
        "weights must have shape [B, S] with B=2, S=3, got [2, 3, 2].",
    ),
    (
        PACKED | {"cu_seqlens": OFFSETS, "weights": torch.zeros(5)},
        "weights must have shape [T] with T=6, got [5].",
    ),
    (
        {"attention_mask": torch.ones(2, 4)},
        "attention_mask must have shape [B, S] with B=2, S=3, got [2, 4].",
    ),
    (
        PACKED | {"attention_mask": MASK, "cu_seqlens": OFFSETS},
        "attention_mask must be None with packed input, got a tensor; cu_seqlens already says "
        "which tokens belong to which sequence.",
    ),
    (PACKED | {"cu_seqlens": OFFSETS[:0]}, "cu_seqlens must have shape [B + 1], got [0]."),
    *[
        ({"vocab_size": n}, f"vocab_size must be a positive integer, got {n}.")
        for n in (0, -5, 2.0, True)
    ],
    ({"reduce": "mean"}, "reduce must be one of 'max', 'sum', got 'mean'."),
    (
        {"activation": "gelu"},
        "activation must be one of 'log1p_relu', 'log1p_log1p_relu', 'relu', 'softplus', 'none', "
        "got 'gelu'.",
    ),
    (
        {"ignore_ids": range(65)},
        "ignore_ids must be at most 64 ids, got 65; mask more of them: attention_mask = mask * "
        "~torch.isin(input_ids, ids).",
    ),
]
FLOATS = "float16, bfloat16, float32, float64"
TYPES = [
    ({"out_dtype": torch.int8}, f"out_dtype must be one of {FLOATS} or None, got torch.int8."),
    (
        {"ignore_ids": IDS[0]},
        "ignore_ids must be Python integers, got a Tensor; use ignore_ids.tolist().",
    ),
    (
        {"ignore_ids": [0, None]},
        "ignore_ids must be integers, got None among them; remove None for special tokens that the tokenizer does not have.",
    ),
]


@pytest.mark.parametrize("function", [token_scatter, token_scatter_sparse])
def test_arguments_that_do_not_fit(function: Any) -> None:
    for error, cases in ((ValueError, SHAPES), (TypeError, TYPES)):
        for changed, message in cases:
            given = {"weights": WEIGHTS, "input_ids": IDS, "vocab_size": 9} | changed
            refused(error, f"^{re.escape(message)}$", function, **given)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(wrong: int, impl: str) -> None:
    ids = IDS.clone()
    ids[1, 2] = wrong
    message = (
        f"input_ids must lie between 0 and vocab_size - 1 = 8, got {wrong} at [1, 2]; pass the "
        "vocab_size of the tokenizer, or mask that token."
    )
    refused(ValueError, f"^{re.escape(message)}$", token_scatter, WEIGHTS, ids, 9, impl=impl)
    assert not token_scatter(
        WEIGHTS,
        ids,
        9,
        attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        impl=impl,
    ).any()
    assert not token_scatter(WEIGHTS, ids, 9, ignore_ids=[wrong], impl=impl).any()
