"""The contrastive loss of MaxSim scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tilefold.ops import maxsim
from tilefold.ops.maxsim import maxsim_contrastive_loss
from tilefold.testing.maxsim import maxsim_inputs


@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_the_contrastive_loss_is_the_cross_entropy_of_the_scores(target: Target, layout: str) -> None:
    inputs = maxsim_inputs(3, 5, 4, 7, 16, layout=layout, device=target.device)
    inputs = dataclasses.replace(inputs, queries=inputs.queries.requires_grad_())
    options = inputs.layout
    del options["pairing"]
    labels = torch.tensor([4, 0, 2], device=target.device)
    for given, chosen in ((None, torch.arange(3, device=target.device)), (labels, labels)):
        loss = maxsim_contrastive_loss(inputs.queries, inputs.documents, given, scale=0.3, **options, impl=target.impl)
        scores = maxsim(inputs.queries.double(), inputs.documents.double(), **options, impl="reference")
        log_shares = (0.3 * scores).log_softmax(dim=1)
        expected = -log_shares.gather(1, chosen[:, None]).mean()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        (found,), (truth,) = (torch.autograd.grad(x, inputs.queries) for x in (loss, expected))
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-100, -1, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_label_out_of_range_that_nobody_may_look_at_gives_nan_and_the_device_lives_on(device: str, bad: int) -> None:
    queries = torch.randn(2, 3, 8, device=device, requires_grad=True)
    documents = torch.randn(4, 5, 8, device=device)

    def compiled(labels: Tensor) -> Tensor:
        return maxsim_contrastive_loss(2 * queries, documents, labels)

    for loss in (torch.compile(compiled, backend="eager", fullgraph=True), *[compiled] * (device == "cuda")):
        found = loss(torch.tensor([1, bad], device=device))
        (gradient,) = torch.autograd.grad(found, queries)
        assert found.isnan() and bool(gradient.isnan().all())
        fine = torch.tensor([1, 3], device=device)
        scores = maxsim(2 * queries, documents)
        torch.testing.assert_close(loss(fine), torch.nn.functional.cross_entropy(scores, fine))


def test_labels_without_a_document_are_refused_on_every_device() -> None:
    for device in ("cpu", "meta"):
        queries, documents = torch.empty(2, 3, 8, device=device), torch.empty(0, 5, 8, device=device)
        with pytest.raises(ValueError, match="documents must be at least one with labels, got 0 for 2 queries"):
            maxsim_contrastive_loss(queries, documents, torch.zeros(2, dtype=torch.int64, device=device))


def test_labels_and_scales_that_do_not_fit_are_named() -> None:
    queries, documents = torch.randn(3, 2, 4), torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match=r"documents must be at least as many as queries \(3\) without labels, got 2"):
        maxsim_contrastive_loss(queries, documents)
    with pytest.raises(ValueError, match=r"labels must have shape \[3\], got \[2\]"):
        maxsim_contrastive_loss(queries, documents, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="scale must be a finite Python number"):
        maxsim_contrastive_loss(queries, documents, scale=float("nan"))
