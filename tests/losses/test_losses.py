"""Losses on one process: hand-computed values, the classes of sentence-transformers, gradients,
errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from sentence_transformers.sparse_encoder.losses import (
    FlopsLoss,
    SparseMarginMSELoss,
    SparseMultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from tests.refusals import refused
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
    return (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        .relu()
        .to(dtype)
    )


BY_HAND = {
    "flops is the sum of squared column means": (lambda: flops(SCORES), 0.5**2 + 2.0**2),
    "a threshold zeroes sparse rows but keeps them in the mean": (
        lambda: flops(SCORES, threshold=1),
        0.5**2 + 1.5**2,
    ),
    "weights stand inside the square": (
        lambda: flops(SCORES, weights=torch.tensor([2.0, 1.0, 0.5])),
        1.0**2 + 1.0**2,
    ),
    "l1 is the mean row sum": (lambda: l1(SCORES), 2.5),
    "l2 is the mean row sum of squares": (lambda: l2(SHORT), (10 + 4) / 2),
    "l2 spares short rows": (lambda: l2(SHORT, threshold=1), 5),
    "l1 spares short rows": (lambda: l1(SHORT, threshold=1), 2),
    "flops spares short rows": (lambda: flops(SHORT, threshold=2), 0),
    "as a module": (lambda: L2Loss(threshold=1)(SHORT), 5),
    "no penalty": (lambda: NoPenalty()(SHORT), 0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_regularizers_by_hand(case: str) -> None:
    value, expected = BY_HAND[case]
    assert value().item() == pytest.approx(expected)


def test_anti_zero_is_the_inverse_square_of_the_sum_and_finite_without_any_score() -> None:
    assert anti_zero(SCORES, epsilon=0.0).item() == pytest.approx(1 / 25)
    nothing = torch.zeros(2, 3, requires_grad=True)
    value = anti_zero(nothing)
    value.backward()
    assert value.item() == pytest.approx(1e8)
    assert torch.equal(nothing.grad, torch.zeros(2, 3))


def test_df_weights_rise_from_zero_over_one_half_at_alpha_to_one() -> None:
    weights = df_weights(torch.tensor([0.0, 0.01, 0.1, 0.5, 1.0], dtype=torch.float64))
    assert weights[0] == 0 and weights[2] == pytest.approx(0.5) and weights[4] == 1
    assert (weights.diff() > 0).all()
    share = 0.2
    by_hand = 1 / (1 + (share ** (math.log(2) / math.log(0.3)) - 1) ** 4)
    assert df_weights(torch.tensor([share]), alpha=0.3, beta=4).item() == pytest.approx(by_hand)


@pytest.mark.parametrize("threshold", [None, 4])
def test_global_flops_of_one_process_is_flops_loss_of_sentence_transformers(
    threshold: int | None,
) -> None:
    results = []
    for loss in (GlobalFlopsLoss(threshold), FlopsLoss(nn.Identity(), threshold)):
        scores = random_scores().requires_grad_()
        value = loss.compute_loss_from_embeddings(scores)
        value.backward()
        results.append((value.detach(), scores.grad))
    assert results[0][0].item() == pytest.approx(results[1][0].item(), rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=0)


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
    first, second = random_scores(4), random_scores(4).flip(0, 1)
    assert loss(first).item() == pytest.approx(flops(first).item())
    frequency = (torch.cat([first, second]) > 0).double().mean(dim=0)
    assert loss(second).item() == pytest.approx(
        flops(second, weights=df_weights(frequency)).item(),
        rel=1e-6,
    )
    assert loss(first).item() == pytest.approx(
        flops(first, weights=df_weights(frequency)).item(),
        rel=1e-6,
    )


def test_df_flops_takes_frequencies_from_outside_and_counts_nothing_in_eval_mode() -> None:
    loss = DFFlopsLoss(refresh_every=None)
    frequency = torch.linspace(0, 1, 11)
    loss.set_document_frequency(frequency)
    scores = random_scores()
    assert loss(scores).item() == pytest.approx(flops(scores, weights=df_weights(frequency)).item())
    counting = DFFlopsLoss(refresh_every=1).eval()
    counting(scores)
    assert counting.weights is None


def test_a_sum_of_regularizers_weighs_its_terms_ours_and_stock() -> None:
    total = RegularizerSum(
        [(FlopsLoss(nn.Identity()), 0.5), (AntiZeroLoss(), 2.0), (L1Loss(), 0.1)],
    )
    scores = random_scores()
    expected = 0.5 * flops(scores) + 2 * anti_zero(scores) + 0.1 * l1(scores)
    assert total.compute_loss_from_embeddings(scores).item() == pytest.approx(expected.item())


def test_positions_of_a_group_are_penalised_by_themselves() -> None:
    scores = random_scores(rows=6).requires_grad_()
    value = PositionSum(GlobalFlopsLoss(threshold=3), 3).compute_loss_from_embeddings(scores)
    torch.testing.assert_close(
        value,
        sum(flops(scores[low : low + 2], threshold=3) for low in (0, 2, 4)),
    )
    assert value > flops(scores, threshold=3), "terms of some documents alone cost more"
    alike = random_scores(rows=2).repeat(3, 1)
    torch.testing.assert_close(PositionSum(FlopsLoss(None), 3)(alike), 3 * flops(alike[:2]))
    torch.testing.assert_close(PositionSum(L1Loss(), 1)(alike), l1(alike))


def test_regularizers_can_be_copied_and_add_nothing_to_a_state_dict() -> None:
    loss = DFFlopsLoss(refresh_every=1)
    loss(random_scores())
    twin = copy.deepcopy(loss)
    assert not loss.state_dict()
    assert torch.equal(twin.weights, loss.weights)


WRONG = [
    (
        TypeError,
        lambda: flops(torch.ones(2, 3, dtype=torch.int64)),
        "scores must be a floating-point tensor, got",
    ),
    (ValueError, lambda: l1(torch.ones(3)), r"scores must have shape \[B, V\], got \[3\]"),
    (ValueError, lambda: flops(SCORES, weights=torch.ones(2)), "weights must have shape"),
    (
        TypeError,
        lambda: flops(SCORES, weights=[1.0, 1.0, 1.0]),
        r"weights must be a torch.Tensor, got list",
    ),
    (
        ValueError,
        lambda: flops(SCORES, group="all"),
        "group must be a process group .* 'world' or None, got 'all'",
    ),
    (ValueError, lambda: df_weights(torch.ones(2), alpha=1.0), "alpha must be between 0 and 1"),
    (ValueError, lambda: df_weights(torch.ones(2), beta=0.0), "beta must be positive"),
    (
        TypeError,
        lambda: df_weights([0.1, 0.2]),
        r"document_frequency must be a torch.Tensor, got list",
    ),
    (ValueError, lambda: anti_zero(SCORES, epsilon=-1.0), "epsilon"),
    (
        ValueError,
        lambda: DFFlopsLoss(refresh_every=0),
        "refresh_every must be a positive number of steps",
    ),
    (
        ValueError,
        lambda: DFFlopsLoss(refresh_every=1.5),
        "refresh_every must be a positive number of steps",
    ),
    (ValueError, lambda: DFFlopsLoss(alpha=2.0), "alpha must be between 0 and 1"),
    (ValueError, lambda: DFFlopsLoss(beta=0.0), "beta must be positive"),
    (
        TypeError,
        lambda: RegularizerSum([(nn.ReLU(), 1.0)]),
        "terms must have compute_loss_from_embeddings, got ReLU",
    ),
    (
        ValueError,
        lambda: RegularizerSum([]),
        r"terms must be at least one pair of a regulariser .* got an empty list",
    ),
    (
        ValueError,
        lambda: PositionSum(GlobalFlopsLoss(), 4)(random_scores(rows=6)),
        "rows of 4 positions, as many of each, got 6",
    ),
    (
        ValueError,
        lambda: PositionSum(GlobalFlopsLoss(), 0),
        "positions must be a whole number of at least 1, got 0",
    ),
    (
        TypeError,
        lambda: PositionSum(nn.Linear(1, 1), 2),
        "term must have compute_loss_from_embeddings, got Linear",
    ),
    (TypeError, lambda: PositionSum(DFFlopsLoss(), 2), "must not be a DFFlopsLoss"),
]


@pytest.mark.parametrize(("error", "make", "said"), WRONG)
def test_wrong_arguments_are_named(
    error: type[Exception],
    make: Callable[[], object],
    said: str,
) -> None:
    refused(error, said, make)


# Ranking losses

QUERIES = torch.tensor([[1.0, 0.0, 2.0]])
RELEVANT = torch.tensor([[0.5, 1.0, 0.0]])
NEGATIVE = torch.tensor([[0.0, 1.0, 0.25]])


def test_the_loss_of_epic_is_the_probability_of_the_negatives() -> None:
    value = PairwiseSoftmaxLoss().compute_loss_from_embeddings(
        [QUERIES, RELEVANT, NEGATIVE, 2 * NEGATIVE],
    )
    pairs = [math.exp(score) / (math.exp(0.5) + math.exp(score)) for score in (0.5, 1.0)]
    assert value.item() == pytest.approx(sum(pairs) / 2)
    with pytest.raises(
        ValueError,
        match=r"at least 3 columns \(a query, a relevant document and negatives\), got 2",
    ):
        PairwiseSoftmaxLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])


MARGINS = [0.0, 1.0, 5.0, 15.0, 16.5, 17.0, 30.0, 60.0, 80.0]
BOTH_SIGNS = [*MARGINS, *(-margin for margin in MARGINS[1:])]


def _loss_and_gradient(loss: nn.Module, margin: float, dtype: torch.dtype) -> tuple[float, float]:
    """Loss of one query whose negative wins by ``margin``, and its gradient by that margin."""
    query, relevant = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    negative = torch.full((1, 1), margin, dtype=dtype, requires_grad=True)
    value = loss.compute_loss_from_embeddings([query, relevant, negative], torch.zeros(1))
    value.backward()
    return value.item(), negative.grad.item()


@pytest.mark.parametrize("margin", BOTH_SIGNS)
def test_the_loss_of_epic_keeps_its_gradient_where_one_side_wins_by_far(margin: float) -> None:
    expected = _loss_and_gradient(PairwiseSoftmaxLoss(), margin, torch.float64)
    exact_gradient = math.exp(-abs(margin)) / (1 + math.exp(-abs(margin))) ** 2
    assert expected[1] == pytest.approx(exact_gradient, rel=1e-9, abs=0)
    for dtype in (torch.float32, torch.bfloat16):
        if torch.tensor(margin, dtype=dtype).item() == margin:
            single = _loss_and_gradient(PairwiseSoftmaxLoss(), margin, dtype)
            budget = 1e-6 if dtype == torch.float32 else 2**-8  # the gradient of a leaf in bf16
            assert single == pytest.approx(expected, rel=budget, abs=0)


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
    """The stock losses of the recipes; what they lose at most is a gradient below fp32's unit."""
    exact = _loss_and_gradient(loss(nn.Identity()), margin, torch.float64)
    single = _loss_and_gradient(loss(nn.Identity()), margin, torch.float32)
    assert single == pytest.approx(exact, rel=1e-5, abs=2**-23)


def test_the_loss_of_deepct_is_least_at_the_recall_of_a_term() -> None:
    value = TermRecallLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])
    assert value.item() == pytest.approx(
        ((0.5 - 1) ** 2 + (1 - 0) ** 2) / 2,
    )  # the third term is not in the document
    document = torch.full((4, 2), 0.5, requires_grad=True)
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    TermRecallLoss().compute_loss_from_embeddings(
        [queries, document.mean(dim=0, keepdim=True).expand(4, 2)],
    ).backward()
    at_recall = torch.tensor([[0.75, 0.25]]).expand(4, 2).clone().requires_grad_()
    TermRecallLoss().compute_loss_from_embeddings([queries, at_recall]).backward()
    assert document.grad.sum(dim=0).abs().min() > 0.1
    assert at_recall.grad.sum(dim=0).abs().max() < 1e-6


class First(nn.Module):
    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        return embeddings[0].sum() if labels is None else labels.sum()


def test_a_weighted_sum_passes_labels_on_and_checks_its_terms() -> None:
    terms = [(First(), 2.0), (PairwiseSoftmaxLoss(), 0.5)]
    value = WeightedLosses(terms).compute_loss_from_embeddings(
        [QUERIES, RELEVANT, NEGATIVE],
        torch.tensor([4.0]),
    )
    assert value.item() == pytest.approx(8 + 0.5 * 0.5)
    refused(ValueError, r"at least one pair .* got an empty list", WeightedLosses, [])
    refused(
        TypeError,
        "compute_loss_from_embeddings, got Linear",
        WeightedLosses,
        [(nn.Linear(1, 1), 1.0)],
    )


# The next-token loss on activated logits


def whole(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    factor: float,
) -> Tensor:
    """The definition, on all logits at once."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    kept = labels != -100

    def mean_loss(scores: Tensor) -> Tensor:
        picked = scores.log_softmax(-1)[kept].gather(1, labels[kept][:, None])
        return -picked.mean()

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
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    labels = torch.tensor([3, -100, 10, 0, 5, -100, 5])
    loss = activated_lm_loss(hidden, weight, labels, bias, activated_weight=0.7, chunk=chunk).total
    expected = whole(hidden, weight, labels, bias, 0.7)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(loss, inputs),
        torch.autograd.grad(expected, inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_logits_of_all_positions_never_exist() -> None:
    n, v = 64, 5000
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        activated_lm_loss(
            hidden,
            weight,
            torch.zeros(n, dtype=torch.int64),
            chunk=4,
        ).total.backward()
    # what is taken, not what is given back: that may be anything that was collected meanwhile
    assert max(event.cpu_memory_usage for event in profile.function_events) < n * v * 4 / 2


def test_without_labels_all_is_zero_and_wrong_shapes_are_refused() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = activated_lm_loss(hidden, weight, torch.full((3,), -100))
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and float(hidden.grad.abs().sum()) == 0
    with pytest.raises(ValueError, match=r"must fit together, got \[1, 3, 4\]"):
        activated_lm_loss(hidden[None], weight, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        activated_lm_loss(hidden, weight, torch.zeros(3, dtype=torch.int64), chunk=0)
