"""What every public function of MaxSim says to masked, empty, NaN and very large input; the
contrastive loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.refusals import refused
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import (
    QuantizedTokens,
    maxsim_contrastive_loss,
    maxsim_topk,
    quantize_tokens,
)
from tilefold.testing.maxsim import maxsim_inputs

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="the other files interpret the kernels",
)
Function = Callable[..., Any]


def quantized(kind: str) -> Function:
    """``maxsim`` against documents of one byte an entry."""

    def score(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
        return maxsim(queries, quantize_tokens(documents, kind), **options)

    return score


def best_two(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim_topk(queries, documents, 2, **options)[0]


def xtr(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return xtr_scores(queries, documents, top_k=3, **options)


FUNCTIONS: dict[str, Function] = {
    "maxsim": maxsim,
    "smooth": lambda q, d, **o: maxsim(q, d, temperature=0.5, **o),
    "mean": lambda q, d, **o: maxsim(q, d, reduction="mean", **o),
    "int8": quantized("int8"),
    "fp8": quantized("fp8"),
    "topk": best_two,
    "xtr": xtr,
    "imputed": lambda q, d, **o: xtr_scores(q, d, top_k=3, impute=True, **o),
    "loss": maxsim_contrastive_loss,
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture
def sides() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 16, generator=generator), torch.randn(4, 5, 16, generator=generator)


def on(target: Target, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(target.device) for tensor in tensors]


@every_function
def test_sides_without_a_kept_token_score_zero_and_a_loss_over_nothing_is_nan(
    target: Target,
    sides: tuple[Tensor, Tensor],
    name: str,
) -> None:
    queries, documents, *masks = on(target, *sides, torch.zeros(2, 3), torch.zeros(4, 5))
    nothing = torch.zeros(5, dtype=torch.int32, device=target.device)
    cases: list[tuple[Tensor, Tensor, dict[str, Any], tuple[int, int]]] = [
        (queries, documents, {"query_mask": masks[0]}, (2, 4)),
        (queries, documents, {"document_mask": masks[1]}, (2, 4)),
        (queries[:0], documents, {}, (0, 4)),
        (queries[:, :0], documents, {}, (2, 4)),
        (queries[:0], documents[:0], {}, (0, 0)),
        (queries, documents[:, :0], {}, (2, 4)),
        (queries, documents[0, :0], {"cu_seqlens_d": nothing}, (2, 4)),
    ]
    if name != "loss":
        cases.append((queries, documents[:0], {}, (2, 0)))
    for (q, d, layout, shape), impl in itertools.product(cases, (target.impl, "reference")):
        leaf = q.detach().requires_grad_(name not in ("int8", "fp8", "imputed"))
        found = FUNCTIONS[name](leaf, d, **layout, impl=impl)
        if name == "loss":
            assert (
                found.isnan()
                if shape[0] == 0
                else math.isclose(found.item(), math.log(4), rel_tol=1e-6)
            )
        else:
            assert (
                found.shape == (shape[0], min(shape[1], 2) if name == "topk" else shape[1])
                and not found.any()
            )
            assert found.dtype == torch.float32
        if found.requires_grad:
            found.sum().backward()
            assert leaf.grad is not None and leaf.grad.shape == q.shape


@every_function
def test_nan_is_seen_and_a_masked_one_is_not(
    target: Target,
    sides: tuple[Tensor, Tensor],
    name: str,
) -> None:
    queries, documents = on(target, *sides)
    documents[1, 2, 3] = math.nan
    mask = torch.ones(4, 5, device=target.device)
    found = FUNCTIONS[name](queries, documents, impl=target.impl)
    if name == "loss":
        assert found.isnan()
    elif name == "topk":
        assert found.isnan().tolist() == [[True, False]] * 2  # before any number
    else:
        assert found.isnan().tolist() == [[False, True, False, False]] * 2
    mask[1, 2] = 0
    assert bool(
        FUNCTIONS[name](queries, documents, document_mask=mask, impl=target.impl).isfinite().all(),
    )


def test_an_index_into_documents_without_tokens_is_checked_too() -> None:
    queries, documents = torch.ones(2, 3, 8), torch.ones(4, 0, 8)
    assert not maxsim(queries, documents, pairing=torch.tensor([[1, 3]])).any()
    with pytest.raises(ValueError, match=r"below the number of documents \(4\), got 9 in pair 1"):
        maxsim(queries, documents, pairing=torch.tensor([[1, 3], [0, 9]]))


def test_what_quantize_tokens_makes_of_nothing_nan_and_infinity() -> None:
    tokens = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0], [3.0, -6.0]])
    for kind in ("int8", "fp8"):
        assert quantize_tokens(tokens[:0], kind).values.shape == (0, 2)
        assert quantize_tokens(tokens[:, :0], kind).scales.tolist() == [0, 0, 0, 0]
        back = quantize_tokens(tokens, kind)
        assert back.dequantize().isnan().any(dim=1).tolist() == [True, True, False, False]
        assert not back.dequantize()[2].any()
        for impl in ("reference", "tiled"):
            scores = maxsim(
                torch.ones(1, 1, 2),
                QuantizedTokens(back.values[:, None], back.scales[:, None]),
                impl=impl,
            )
            assert scores.isnan().tolist() == [[True, True, False, False]]
    with pytest.raises(
        TypeError,
        match="documents must have dtype float16, bfloat16, float32, float64, got int8",
    ):
        quantize_tokens(torch.ones(2, 3, dtype=torch.int8))


def test_labels_and_groups_that_do_not_fit_are_named(sides: tuple[Tensor, Tensor]) -> None:
    queries, documents = sides
    for labels, kind, message in (
        (
            torch.tensor([0, 4]),
            ValueError,
            r"labels must be at least 0 and below the number of documents \(4\), got 4",
        ),
        (torch.tensor([-100, 1]), ValueError, r"labels must be at least 0 .* got -100"),
        (torch.tensor([0.0, 1.0]), TypeError, r"labels must have dtype int64, got float32"),
        ([0, 1], TypeError, r"labels must be a torch\.Tensor, got list"),
        (torch.tensor([0]), ValueError, r"labels must have shape \[2\], got \[1\]"),
    ):
        refused(kind, message, maxsim_contrastive_loss, queries, documents, labels)
    with pytest.raises(
        ValueError,
        match=r"documents must be at least as many as queries \(2\) without labels, got 1",
    ):
        maxsim_contrastive_loss(queries, documents[:1])
    with pytest.raises(ValueError, match="scale must be a finite Python number"):
        maxsim_contrastive_loss(queries, documents, scale=math.nan)
    for device in ("cpu", "meta"):
        nothing = documents[:0].to(device)
        with pytest.raises(
            ValueError,
            match="documents must be at least one with labels, got 0 for 2 queries",
        ):
            maxsim_contrastive_loss(
                queries.to(device),
                nothing,
                torch.zeros(2, dtype=torch.int64, device=device),
            )
    for group in ("all", 3):
        with pytest.raises(
            ValueError,
            match="group must be a process group that holds this rank, 'world' or None",
        ):
            maxsim_contrastive_loss(queries, documents, group=group)
    alone = maxsim_contrastive_loss(
        queries,
        documents,
        group="world",
    )  # no process group: the world is this process
    assert torch.equal(alone, maxsim_contrastive_loss(queries, documents))


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_more_than_two_to_the_31_elements_in_every_function() -> None:
    """16,500 documents of 1,024 tokens of 128 entries; all zero but the very last token."""
    documents = torch.zeros(16500, 1024, 128, dtype=torch.float16, device="cuda")
    documents[-1, -1] = 1
    queries = torch.ones(1, 4, 128, dtype=torch.float16, device="cuda")
    offsets = torch.arange(0, 16501, dtype=torch.int32, device="cuda") * 1024
    last = documents.size(0) - 1

    asking = torch.ones(1, 4, 128, dtype=torch.float16, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(maxsim(asking, documents, impl="triton")[:, -1].sum(), asking)
    assert bool((gradient == 1).all())
    leaf = documents.view(-1, 128).requires_grad_()
    maxsim(queries, leaf, cu_seqlens_d=offsets, impl="triton")[0, last].backward()
    assert bool((leaf.grad[-1] == 4).all()) and not leaf.grad[-1025:-1].any()
    assert not leaf.grad[:: 1024 * 100].any()
    leaf.requires_grad_(False).grad = None
    documents = leaf.view(16500, 1024, 128)

    best, which = maxsim_topk(queries, documents, 1)
    assert best.item() == 512 and which.item() == last
    assert (
        maxsim_contrastive_loss(queries, documents, torch.tensor([last], device="cuda")).item()
        < 1e-6
    )
    found = xtr_scores(queries, documents, top_k=1)
    assert found[0, last].item() == 128 and not found[0, :last].any()
    assert abs(maxsim(queries, quantize_tokens(documents))[0, last].item() - 512) < 0.1
    assert (
        maxsim(queries, documents, pairing=torch.tensor([[0, last]], device="cuda")).item() == 512
    )
    assert maxsim(queries[:1], documents[None], pairing="grouped")[0, last].item() == 512
    assert maxsim(queries, documents, temperature=0.1)[0, last].item() == pytest.approx(
        512,
        rel=1e-3,
    )


@pytest.mark.parametrize("mask_mode", ["exclude", "zero"])
@pytest.mark.parametrize("temperature", [0.3, 1e-4, 1e-30, 1e-300])
@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_a_smooth_maximum_of_any_temperature_is_exact_forward_and_backward(
    impl: str,
    temperature: float,
    mask_mode: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [30 * torch.randn(n, 9, 16, generator=generator) for n in (2, 3)]
    mask = torch.rand(3, 9, generator=generator) > 0.3

    def run(dtype: torch.dtype, impl: str) -> list[torch.Tensor]:
        q, d = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        scores = maxsim(
            q,
            d,
            document_mask=mask,
            temperature=temperature,
            mask_mode=mask_mode,
            impl=impl,
        )
        return [scores.detach(), *torch.autograd.grad(scores.sum(), (q, d))]

    for found, exact in zip(run(torch.float32, impl), run(torch.float64, "reference"), strict=True):
        assert (found.double() - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_long_queries_take_more_documents_than_65535_blocks_of_256() -> None:
    count = 65535 * 256 + 300
    documents = torch.zeros(count, 1, 16, dtype=torch.bfloat16, device="cuda")
    documents[-1] = 1
    queries = torch.ones(1, 200, 16, dtype=torch.bfloat16, device="cuda")
    scores = maxsim(queries, documents, impl="triton")
    assert scores[0, -1].item() == 200 * 16 and not scores[0, :-1].any()


@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_the_contrastive_loss_is_the_cross_entropy_of_the_scores(
    target: Target,
    layout: str,
) -> None:
    inputs = maxsim_inputs(3, 5, 4, 7, 16, layout=layout, device=target.device)
    inputs = dataclasses.replace(inputs, queries=inputs.queries.requires_grad_())
    options = inputs.layout
    del options["pairing"]
    labels = torch.tensor([4, 0, 2], device=target.device)
    for given, chosen in ((None, torch.arange(3, device=target.device)), (labels, labels)):
        loss = maxsim_contrastive_loss(
            inputs.queries,
            inputs.documents,
            given,
            scale=0.3,
            **options,
            impl=target.impl,
        )
        scores = maxsim(
            inputs.queries.double(),
            inputs.documents.double(),
            **options,
            impl="reference",
        )
        expected = -(0.3 * scores).log_softmax(dim=1).gather(1, chosen[:, None]).mean()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        (found,), (truth,) = (torch.autograd.grad(x, inputs.queries) for x in (loss, expected))
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-100, -1, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_label_out_of_range_that_nobody_may_look_at_gives_nan_and_the_device_lives_on(
    device: str,
    bad: int,
) -> None:
    queries = torch.randn(2, 3, 8, device=device, requires_grad=True)
    documents = torch.randn(4, 5, 8, device=device)

    def compiled(labels: Tensor) -> Tensor:
        return maxsim_contrastive_loss(2 * queries, documents, labels)

    for loss in (
        torch.compile(compiled, backend="eager", fullgraph=True),
        *[compiled] * (device == "cuda"),
    ):
        found = loss(torch.tensor([1, bad], device=device))
        (gradient,) = torch.autograd.grad(found, queries)
        assert found.isnan() and bool(gradient.isnan().all())
        fine = torch.tensor([1, 3], device=device)
        scores = maxsim(2 * queries, documents)
        torch.testing.assert_close(loss(fine), torch.nn.functional.cross_entropy(scores, fine))
