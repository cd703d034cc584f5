"""The next-token loss on activated logits."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.losses import activated_lm_loss


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, factor: float
) -> torch.Tensor:
    """The definition, on all logits at once."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    kept = labels != -100

    def mean_loss(scores: torch.Tensor) -> torch.Tensor:
        picked = scores.log_softmax(-1)[kept].gather(1, labels[kept][:, None])
        return -picked.mean()

    return mean_loss(logits) + factor * mean_loss(logits.clamp(min=0).log1p())


def test_by_hand() -> None:
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
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_logits_of_all_positions_never_exist() -> None:
    n, v = 64, 5000
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        activated_lm_loss(hidden, weight, torch.zeros(n, dtype=torch.int64), chunk=4).total.backward()
    # what is taken, not what is given back: that may be anything that was collected meanwhile
    largest = max(event.cpu_memory_usage for event in profile.function_events)
    assert largest < n * v * 4 / 2


def test_without_labels_all_is_zero_and_wrong_shapes_are_refused() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = activated_lm_loss(hidden, weight, torch.full((3,), -100))
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and float(hidden.grad.abs().sum()) == 0
    with pytest.raises(ValueError, match=r"must fit together, got \[1, 3, 4\]"):
        activated_lm_loss(hidden[None], weight, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        activated_lm_loss(hidden, weight, torch.zeros(3, dtype=torch.int64), chunk=0)
