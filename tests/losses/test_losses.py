"""Losses on one process: values by hand, the losses of sentence-transformers, gradients, errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentence_transformers.sparse_encoder.losses import (
    FlopsLoss,
    SparseMarginMSELoss,
    SparseMultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from tilefold._internal.sigmoid import sigmoid
from tilefold.losses import (
    AntiZeroLoss,
    DFFlopsLoss,
    GlobalFlopsLoss,
    L1Loss,
    L2Loss,
    NoPenalty,
    PairwiseSoftmaxLoss,
    PositionSum,
    RegularizerSum,
    TermRecallLoss,
    WeightedLosses,
    activated_lm_loss,
    anti_zero,
    df_weights,
    flops,
    l1,
    l2,
)

SCORES = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 1.0]])
SHORT = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 2.0]])


def random_scores(rows: int = 5, columns: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores of which about half are zero, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return scores.relu().to(dtype)


@pytest.mark.parametrize(
    ("regularizer", "scores", "options", "expected"),
    [
        pytest.param(flops, SCORES, {}, 0.5**2 + 2.0**2, id="flops: squares of column means"),
        pytest.param(
            flops,
            SCORES,
            {"threshold": 1},
            0.5**2 + 1.5**2,
            id="flops: short rows are zero but count in the mean",
        ),
        pytest.param(
            flops,
            SCORES,
            {"weights": torch.tensor([2.0, 1.0, 0.5])},
            1.0**2 + 1.0**2,
            id="flops: weights are squared",
        ),
        pytest.param(flops, SHORT, {"threshold": 2}, 0, id="flops: short rows only"),
        pytest.param(l1, SCORES, {}, 2.5, id="l1: mean row sum"),
        pytest.param(l1, SHORT, {"threshold": 1}, 2, id="l1: short rows are spared"),
        pytest.param(l2, SHORT, {}, (10 + 4) / 2, id="l2: mean row sum of squares"),
        pytest.param(l2, SHORT, {"threshold": 1}, 5, id="l2: short rows are spared"),
        pytest.param(L2Loss(threshold=1), SHORT, {}, 5, id="l2: module"),
        pytest.param(NoPenalty(), SHORT, {}, 0, id="no penalty"),
    ],
)
def test_regularizers_by_hand(
    regularizer: Callable[..., Tensor],
    scores: Tensor,
    options: dict[str, Any],
    expected: float,
) -> None:
    assert regularizer(scores, **options).item() == pytest.approx(expected)


def test_anti_zero_is_the_inverse_square_of_the_sum() -> None:
    assert anti_zero(SCORES, epsilon=0.0).item() == pytest.approx(1 / 25)


def test_anti_zero_of_zeros_is_finite() -> None:
    zeros = torch.zeros(2, 3, requires_grad=True)
    value = anti_zero(zeros)
    value.backward()
    assert value.item() == pytest.approx(1e8)
    assert zeros.grad is not None
    assert torch.equal(zeros.grad, torch.zeros(2, 3))


def test_df_weights_rise_from_zero_over_one_half_at_alpha_to_one() -> None:
    weights = df_weights(torch.tensor([0.0, 0.01, 0.1, 0.5, 1.0], dtype=torch.float64))
    assert weights[0] == 0
    assert weights[2] == pytest.approx(0.5)
    assert weights[4] == 1
    assert (weights.diff() > 0).all()


def test_df_weights_by_hand() -> None:
    frequency = 0.2
    by_hand = 1 / (1 + (frequency ** (math.log(2) / math.log(0.3)) - 1) ** 4)
    weights = df_weights(torch.tensor([frequency]), alpha=0.3, beta=4)
    assert weights.item() == pytest.approx(by_hand)


@pytest.mark.parametrize("threshold", [None, 4])
def test_global_flops_of_one_process_is_flops_loss_of_sentence_transformers(
    threshold: int | None,
) -> None:
    def value_and_gradient(loss: Any) -> tuple[float, Tensor]:
        scores = random_scores().requires_grad_()
        value = loss.compute_loss_from_embeddings(scores)
        value.backward()
        assert scores.grad is not None
        return value.item(), scores.grad

    value, gradient = value_and_gradient(GlobalFlopsLoss(threshold))
    stock_value, stock_gradient = value_and_gradient(FlopsLoss(nn.Identity(), threshold))
    assert value == pytest.approx(stock_value, rel=1e-12)
    torch.testing.assert_close(gradient, stock_gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("function", [flops, l1, anti_zero])
def test_gradients_are_the_derivatives(function: object) -> None:
    scores = (random_scores() + 0.1).requires_grad_()  # away from the kink of the absolute value
    assert torch.autograd.gradcheck(function, (scores,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_of_half_precision_scores_are_fp32(dtype: torch.dtype) -> None:
    scores = random_scores(dtype=dtype)
    value = flops(scores)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(flops(scores.double()).item(), rel=1e-5)


def test_df_flops_starts_as_flops_and_weighs_columns_after_its_first_refresh() -> None:
    loss = DFFlopsLoss(refresh_every=2)
    first = random_scores(4)
    second = random_scores(4).flip(0, 1)
    assert loss(first).item() == pytest.approx(flops(first).item())
    frequency = (torch.cat([first, second]) > 0).double().mean(dim=0)
    for scores in (second, first):
        expected = flops(scores, weights=df_weights(frequency)).item()
        assert loss(scores).item() == pytest.approx(expected, rel=1e-6)


def test_df_flops_takes_frequencies_from_outside() -> None:
    loss = DFFlopsLoss(refresh_every=None)
    frequency = torch.linspace(0, 1, 11)
    loss.set_document_frequency(frequency)
    scores = random_scores()
    assert loss(scores).item() == pytest.approx(flops(scores, weights=df_weights(frequency)).item())


def test_df_flops_counts_nothing_in_eval_mode() -> None:
    loss = DFFlopsLoss(refresh_every=1).eval()
    loss(random_scores())
    assert loss.weights is None


def test_a_sum_of_regularizers_weighs_terms_of_both_libraries() -> None:
    total = RegularizerSum(
        [(FlopsLoss(nn.Identity()), 0.5), (AntiZeroLoss(), 2.0), (L1Loss(), 0.1)],
    )
    scores = random_scores()
    expected = 0.5 * flops(scores) + 2 * anti_zero(scores) + 0.1 * l1(scores)
    assert total.compute_loss_from_embeddings(scores).item() == pytest.approx(expected.item())


def test_every_position_of_a_group_is_penalised_by_itself() -> None:
    scores = random_scores(rows=6).requires_grad_()
    value = PositionSum(GlobalFlopsLoss(threshold=3), 3).compute_loss_from_embeddings(scores)
    position_penalties = [flops(position, threshold=3) for position in scores.split(2)]
    torch.testing.assert_close(value, sum(position_penalties))
    assert value > flops(scores, threshold=3), "terms of some documents only cost more"


def test_positions_with_the_same_scores_have_the_same_penalty() -> None:
    scores = random_scores(rows=2)
    groups = scores.repeat(3, 1)
    torch.testing.assert_close(PositionSum(FlopsLoss(None), 3)(groups), 3 * flops(scores))
    torch.testing.assert_close(PositionSum(L1Loss(), 1)(groups), l1(groups))


def test_regularizers_can_be_copied_and_add_nothing_to_a_state_dict() -> None:
    loss = DFFlopsLoss(refresh_every=1)
    loss(random_scores())
    copied = copy.deepcopy(loss)
    assert not loss.state_dict()
    assert torch.equal(copied.weights, loss.weights)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        pytest.param(
            flops,
            (torch.ones(2, 3, dtype=torch.int64),),
            {},
            TypeError,
            "scores must be a floating-point tensor, got",
            id="integer scores",
        ),
        *(
            pytest.param(
                function,
                (torch.eye(3).to_sparse(),),
                {},
                TypeError,
                r"scores must be a dense tensor, got layout .*; use scores.to_dense\(\)",
                id=f"sparse scores of {function.__name__}",
            )
            for function in (flops, l1, l2, anti_zero)
        ),
        pytest.param(
            l1,
            (torch.ones(3),),
            {},
            ValueError,
            r"scores must have shape \[B, V\], got \[3\]",
            id="scores of one row",
        ),
        pytest.param(
            flops,
            (SCORES,),
            {"weights": torch.ones(2)},
            ValueError,
            "weights must have shape",
            id="too few weights",
        ),
        pytest.param(
            flops,
            (SCORES,),
            {"weights": [1.0, 1.0, 1.0]},
            TypeError,
            r"weights must be a torch.Tensor, got list",
            id="list of weights",
        ),
        pytest.param(
            flops,
            (SCORES,),
            {"group": "all"},
            ValueError,
            "group must be a process group .* 'world' or None, got 'all'",
            id="unknown group",
        ),
        pytest.param(
            df_weights,
            (torch.ones(2),),
            {"alpha": 1.0},
            ValueError,
            "alpha must be between 0 and 1",
            id="alpha of 1",
        ),
        pytest.param(
            df_weights,
            (torch.ones(2),),
            {"beta": 0.0},
            ValueError,
            "beta must be positive",
            id="beta of 0",
        ),
        pytest.param(
            df_weights,
            ([0.1, 0.2],),
            {},
            TypeError,
            r"document_frequency must be a torch.Tensor, got list",
            id="list of frequencies",
        ),
        pytest.param(
            anti_zero,
            (SCORES,),
            {"epsilon": -1.0},
            ValueError,
            "epsilon",
            id="negative epsilon",
        ),
        pytest.param(
            DFFlopsLoss,
            (),
            {"refresh_every": 0},
            ValueError,
            "refresh_every must be a positive number of steps",
            id="refresh at no step",
        ),
        pytest.param(
            DFFlopsLoss,
            (),
            {"refresh_every": 1.5},
            ValueError,
            "refresh_every must be a positive number of steps",
            id="refresh at half a step",
        ),
        pytest.param(
            DFFlopsLoss,
            (),
            {"alpha": 2.0},
            ValueError,
            "alpha must be between 0 and 1",
            id="DF-FLOPS with an alpha of 2",
        ),
        pytest.param(
            DFFlopsLoss,
            (),
            {"beta": 0.0},
            ValueError,
            "beta must be positive",
            id="DF-FLOPS with a beta of 0",
        ),
        pytest.param(
            RegularizerSum,
            ([(nn.ReLU(), 1.0)],),
            {},
            TypeError,
            "terms must have compute_loss_from_embeddings, got ReLU",
            id="sum with a term that is no loss",
        ),
        pytest.param(
            RegularizerSum,
            ([],),
            {},
            ValueError,
            r"terms must be at least one pair of a regulariser .* got an empty list",
            id="sum without terms",
        ),
        pytest.param(
            PositionSum(GlobalFlopsLoss(), 4),
            (random_scores(rows=6),),
            {},
            ValueError,
            "multiple of positions=4, got 6",
            id="incomplete groups",
        ),
        pytest.param(
            PositionSum,
            (GlobalFlopsLoss(), 0),
            {},
            ValueError,
            "positions must be a whole number of at least 1, got 0",
            id="no positions",
        ),
        pytest.param(
            PositionSum,
            (nn.Linear(1, 1), 2),
            {},
            TypeError,
            "term must have compute_loss_from_embeddings, got Linear",
            id="positions of a term that is no loss",
        ),
        pytest.param(
            PositionSum,
            (DFFlopsLoss(), 2),
            {},
            TypeError,
            "must not be a DFFlopsLoss",
            id="positions of DF-FLOPS",
        ),
    ],
)
def test_wrong_arguments_are_named(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        function(*arguments, **options)


# Ranking losses

QUERIES = torch.tensor([[1.0, 0.0, 2.0]])
RELEVANT = torch.tensor([[0.5, 1.0, 0.0]])
NEGATIVE = torch.tensor([[0.0, 1.0, 0.25]])


def test_the_loss_of_epic_is_the_probability_of_the_negatives() -> None:
    value = PairwiseSoftmaxLoss().compute_loss_from_embeddings(
        [QUERIES, RELEVANT, NEGATIVE, 2 * NEGATIVE],
    )
    relevant_score = 0.5
    probabilities = [
        math.exp(score) / (math.exp(relevant_score) + math.exp(score)) for score in (0.5, 1.0)
    ]
    assert value.item() == pytest.approx(sum(probabilities) / 2)


def test_the_loss_of_epic_needs_a_negative() -> None:
    with pytest.raises(
        ValueError,
        match=r"at least 3 columns \(a query, a relevant document and negatives\), got 2",
    ):
        PairwiseSoftmaxLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])


MARGINS = [0.0, 1.0, 5.0, 15.0, 16.5, 17.0, 30.0, 60.0, 80.0]
BOTH_SIGNS = [*MARGINS, *(-margin for margin in MARGINS[1:])]


def loss_and_gradient(loss: nn.Module, margin: float, dtype: torch.dtype) -> tuple[float, float]:
    """Loss of one query whose negative wins by ``margin``, and its gradient by that margin."""
    query = torch.ones(1, 1, dtype=dtype)
    relevant = torch.zeros(1, 1, dtype=dtype)
    negative = torch.full((1, 1), margin, dtype=dtype, requires_grad=True)
    value = loss.compute_loss_from_embeddings([query, relevant, negative], torch.zeros(1))
    value.backward()
    return value.item(), negative.grad.item()


@pytest.mark.parametrize("margin", BOTH_SIGNS)
def test_the_loss_of_epic_has_its_gradient_in_fp64_for_any_margin(margin: float) -> None:
    _, gradient = loss_and_gradient(PairwiseSoftmaxLoss(), margin, torch.float64)
    exact_gradient = math.exp(-abs(margin)) / (1 + math.exp(-abs(margin))) ** 2
    assert gradient == pytest.approx(exact_gradient, rel=1e-9, abs=0)


@pytest.mark.parametrize("margin", BOTH_SIGNS)
@pytest.mark.parametrize(
    ("dtype", "budget"),
    [
        pytest.param(torch.float32, 1e-6, id="fp32"),
        pytest.param(torch.bfloat16, 2**-8, id="bf16"),  # the gradient of a leaf in bf16
    ],
)
def test_the_loss_of_epic_keeps_its_gradient_if_one_side_wins_by_far(
    margin: float,
    dtype: torch.dtype,
    budget: float,
) -> None:
    if torch.tensor(margin, dtype=dtype).item() != margin:
        pytest.skip("the dtype does not hold the margin")
    expected = loss_and_gradient(PairwiseSoftmaxLoss(), margin, torch.float64)
    result = loss_and_gradient(PairwiseSoftmaxLoss(), margin, dtype)
    assert result == pytest.approx(expected, rel=budget, abs=0)


@pytest.mark.parametrize("margin", BOTH_SIGNS)
@pytest.mark.parametrize(
    ("dtype", "budget"),
    [
        pytest.param(torch.float32, 1e-6, id="fp32"),
        pytest.param(torch.bfloat16, 2**-6, id="bf16"),  # the output and two roundings of the slope
    ],
)
def test_sigmoid_has_its_value_and_its_slope_for_every_argument(
    margin: float,
    dtype: torch.dtype,
    budget: float,
) -> None:
    x = torch.tensor(margin, dtype=dtype, requires_grad=True)
    exact = torch.tensor(x.item(), dtype=torch.float64)
    value = sigmoid(x)
    value.backward()
    slope = torch.sigmoid(exact) * torch.sigmoid(-exact)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(torch.sigmoid(exact).item(), rel=budget, abs=0)
    assert x.grad.item() == pytest.approx(slope.item(), rel=budget, abs=0)


def test_sigmoid_of_nan_is_nan() -> None:
    assert sigmoid(torch.tensor([math.nan, math.inf, -math.inf])).tolist()[1:] == [1.0, 0.0]
    assert sigmoid(torch.tensor(math.nan)).isnan()


@pytest.mark.parametrize("margin", BOTH_SIGNS)
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(SparseMultipleNegativesRankingLoss, id="infonce"),
        pytest.param(SparseMarginMSELoss, id="margin_mse"),
    ],
)
def test_losses_of_sentence_transformers_keep_the_gradient_of_a_negative_that_wins(
    loss: Callable[..., nn.Module],
    margin: float,
) -> None:
    """The losses of the recipes lose at most a gradient below the unit of fp32."""
    exact = loss_and_gradient(loss(nn.Identity()), margin, torch.float64)
    result = loss_and_gradient(loss(nn.Identity()), margin, torch.float32)
    assert result == pytest.approx(exact, rel=1e-5, abs=2**-23)


def test_the_loss_of_deepct_by_hand() -> None:
    value = TermRecallLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])
    # The third term is not in the document.
    assert value.item() == pytest.approx(((0.5 - 1) ** 2 + (1 - 0) ** 2) / 2)


def test_the_loss_of_deepct_is_least_at_the_recall_of_a_term() -> None:
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])

    def gradient(weights: list[float]) -> Tensor:
        documents = torch.tensor([weights] * 4, requires_grad=True)
        TermRecallLoss().compute_loss_from_embeddings([queries, documents]).backward()
        assert documents.grad is not None
        return documents.grad.sum(dim=0)

    assert gradient([0.5, 0.5]).abs().min() > 0.1
    assert gradient([0.75, 0.25]).abs().max() < 1e-6


class SumLoss(nn.Module):
    """A loss that is the sum of the labels, or of the first embeddings without labels."""

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        return embeddings[0].sum() if labels is None else labels.sum()


def test_a_weighted_sum_passes_labels_on() -> None:
    loss = WeightedLosses([(SumLoss(), 2.0), (PairwiseSoftmaxLoss(), 0.5)])
    labels = torch.tensor([4.0])
    value = loss.compute_loss_from_embeddings([QUERIES, RELEVANT, NEGATIVE], labels)
    assert value.item() == pytest.approx(2.0 * 4 + 0.5 * 0.5)


def test_a_weighted_sum_refuses_terms_that_are_no_losses_and_no_terms() -> None:
    with pytest.raises(ValueError, match=r"at least one pair .* got an empty list"):
        WeightedLosses([])
    with pytest.raises(TypeError, match="compute_loss_from_embeddings, got Linear"):
        WeightedLosses([(nn.Linear(1, 1), 1.0)])


# The next-token loss on activated logits


def loss_of_all_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    factor: float,
) -> Tensor:
    """The definition of the loss, on all logits at once.

    Args:
        hidden: ``[T, D]`` hidden states.
        weight: ``[V, D]``.
        labels: ``[T]`` next tokens, or -100 for none.
        bias: ``[V]`` or ``None``.
        factor: Weight of the loss on activated logits.
    """
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    labelled = labels != -100

    def mean_loss(scores: Tensor) -> Tensor:
        log_probabilities = scores.log_softmax(-1)[labelled]
        return -log_probabilities.gather(1, labels[labelled][:, None]).mean()

    return mean_loss(logits) + factor * mean_loss(logits.clamp(min=0).log1p())


def test_the_activated_loss_by_hand() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    weight = torch.tensor([[2.0, 1.0], [-1.0, 3.0]], dtype=torch.float64)
    # logits: [2, -1], [-1, -3]; activated: [ln 3, 0], [0, 0]
    loss = activated_lm_loss(hidden, weight, torch.tensor([0, 1]), activated_weight=0.5)
    plain = (math.log(1 + math.exp(-3)) + math.log(1 + math.exp(2))) / 2
    activated = (math.log(4 / 3) + math.log(2)) / 2
    assert float(loss.plain) == pytest.approx(plain, abs=1e-12)
    assert float(loss.activated) == pytest.approx(activated, abs=1e-12)
    assert float(loss.total.detach()) == pytest.approx(plain + 0.5 * activated, abs=1e-12)
    assert float(loss.alive) == 0.5


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_give_the_loss_and_gradients_of_one_pass(chunk: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = None
    leaves = [hidden, weight]
    if with_bias:
        bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
        leaves.append(bias)
    labels = torch.tensor([3, -100, 10, 0, 5, -100, 5])
    loss = activated_lm_loss(hidden, weight, labels, bias, activated_weight=0.7, chunk=chunk).total
    expected = loss_of_all_logits(hidden, weight, labels, bias, 0.7)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves),
        torch.autograd.grad(expected, leaves),
        rtol=1e-10,
        atol=1e-12,
    )


def test_logits_of_all_positions_never_exist_at_once() -> None:
    n_tokens = 64
    vocab_size = 5000
    hidden = torch.randn(n_tokens, 4, requires_grad=True)
    weight = torch.randn(vocab_size, 4, requires_grad=True)
    labels = torch.zeros(n_tokens, dtype=torch.int64)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        activated_lm_loss(hidden, weight, labels, chunk=4).total.backward()
    # Only allocations count: what is released may have been allocated elsewhere.
    largest_allocation = max(event.cpu_memory_usage for event in profile.function_events)
    logits_bytes = 4 * n_tokens * vocab_size
    assert largest_allocation < logits_bytes / 2


def test_the_activated_loss_without_labels_is_zero() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    loss = activated_lm_loss(hidden, torch.randn(5, 4), torch.full((3,), -100))
    loss.total.backward()
    assert float(loss.total.detach()) == 0
    assert hidden.grad is not None
    assert float(hidden.grad.abs().sum()) == 0


def test_the_activated_loss_of_no_positions_is_zero_and_has_a_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    loss = activated_lm_loss(hidden, torch.randn(5, 4), torch.zeros(0, dtype=torch.int64))
    loss.total.backward()
    assert float(loss.total.detach()) == 0
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 4)


def test_the_activated_loss_refuses_wrong_shapes_and_chunks() -> None:
    hidden = torch.randn(3, 4)
    weight = torch.randn(5, 4)
    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must fit together, got \[1, 3, 4\]"):
        activated_lm_loss(hidden[None], weight, labels)
    with pytest.raises(ValueError, match=r"bias must have shape \[V\] with V=5, got \[4\]"):
        activated_lm_loss(hidden, weight, labels, torch.zeros(4))
    with pytest.raises(
        TypeError, match=r"labels must have dtype int64, got int32; use labels.long"
    ):
        activated_lm_loss(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        activated_lm_loss(hidden, weight, labels, chunk=0)
