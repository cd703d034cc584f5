"""Masked, empty, NaN and very large input of every public function of MaxSim; contrastive loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
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


def int8(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "int8"), **options)


def fp8(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "fp8"), **options)


def smooth(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, documents, temperature=0.5, **options)


def mean(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, documents, reduction="mean", **options)


def imputed(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return xtr_scores(queries, documents, top_k=3, impute=True, **options)


def best_two(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    scores, _ = maxsim_topk(queries, documents, 2, **options)
    return scores


def xtr(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return xtr_scores(queries, documents, top_k=3, **options)


FUNCTIONS: dict[str, Function] = {
    "maxsim": maxsim,
    "smooth": smooth,
    "mean": mean,
    "int8": int8,
    "fp8": fp8,
    "topk": best_two,
    "xtr": xtr,
    "imputed": imputed,
    "loss": maxsim_contrastive_loss,
}
WITHOUT_GRADIENT = ("int8", "fp8", "imputed")
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def documents() -> Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))


class EmptyInput(NamedTuple):
    """How a test of empty input changes the queries and documents.

    Attributes:
        queries: Index of the queries to take.
        documents: Index of the documents to take.
        options: Masks and offsets, as lists.
        shape: Numbers of queries and documents that are left.
    """

    queries: Any
    documents: Any
    options: dict[str, list[Any]]
    shape: tuple[int, int]


ALL = slice(None)
NONE = slice(0)
EMPTY_INPUTS = [
    pytest.param(
        EmptyInput(ALL, ALL, {"query_mask": [[0] * 3] * 2}, (2, 4)),
        id="masked queries",
    ),
    pytest.param(
        EmptyInput(ALL, ALL, {"document_mask": [[0] * 5] * 4}, (2, 4)),
        id="masked documents",
    ),
    pytest.param(EmptyInput(NONE, ALL, {}, (0, 4)), id="no queries"),
    pytest.param(EmptyInput((ALL, NONE), ALL, {}, (2, 4)), id="queries without tokens"),
    pytest.param(EmptyInput(NONE, NONE, {}, (0, 0)), id="no queries and documents"),
    pytest.param(EmptyInput(ALL, (ALL, NONE), {}, (2, 4)), id="documents without tokens"),
    pytest.param(
        EmptyInput(ALL, (0, NONE), {"cu_seqlens_d": [0] * 5}, (2, 4)),
        id="packed documents without tokens",
    ),
    pytest.param(EmptyInput(ALL, NONE, {}, (2, 0)), id="no documents"),
]


@every_function
@pytest.mark.parametrize("empty", EMPTY_INPUTS)
@pytest.mark.parametrize("use_reference", [False, True], ids=["target", "reference"])
def test_empty_sides_score_zero_and_a_loss_over_no_query_is_nan(
    target: Target,
    queries: Tensor,
    documents: Tensor,
    name: str,
    empty: EmptyInput,
    use_reference: bool,
) -> None:
    n_queries, n_documents = empty.shape
    if name == "loss" and n_documents == 0 and n_queries > 0:
        pytest.skip("a loss needs a document for every query")
    options: dict[str, Any] = {"impl": "reference" if use_reference else target.impl}
    for argument, values in empty.options.items():
        dtype = torch.int32 if argument == "cu_seqlens_d" else torch.float32
        options[argument] = torch.tensor(values, dtype=dtype, device=target.device)
    leaf = queries.to(target.device)[empty.queries].requires_grad_(name not in WITHOUT_GRADIENT)
    result = FUNCTIONS[name](leaf, documents.to(target.device)[empty.documents], **options)
    if name == "loss" and n_queries == 0:
        assert result.isnan()
    elif name == "loss":
        assert math.isclose(result.item(), math.log(4), rel_tol=1e-6)
    else:
        n_scores = min(n_documents, 2) if name == "topk" else n_documents
        assert result.shape == (n_queries, n_scores)
        assert not result.any()
        assert result.dtype == torch.float32
    if result.requires_grad:
        result.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


@every_function
def test_nan_in_a_document_shows_in_its_scores_only(
    target: Target,
    queries: Tensor,
    documents: Tensor,
    name: str,
) -> None:
    documents[1, 2, 3] = math.nan
    result = FUNCTIONS[name](
        queries.to(target.device),
        documents.to(target.device),
        impl=target.impl,
    )
    if name == "loss":
        assert result.isnan()
    elif name == "topk":
        assert result.isnan().tolist() == [[True, False]] * 2  # NaN ranks before any number
    else:
        assert result.isnan().tolist() == [[False, True, False, False]] * 2


@every_function
def test_nan_in_a_masked_token_does_not_show(
    target: Target,
    queries: Tensor,
    documents: Tensor,
    name: str,
) -> None:
    documents[1, 2, 3] = math.nan
    mask = torch.ones(4, 5, device=target.device)
    mask[1, 2] = 0
    result = FUNCTIONS[name](
        queries.to(target.device),
        documents.to(target.device),
        document_mask=mask,
        impl=target.impl,
    )
    assert bool(result.isfinite().all())


def test_an_index_into_documents_without_tokens_is_checked_too() -> None:
    queries = torch.ones(2, 3, 8)
    documents = torch.ones(4, 0, 8)
    assert not maxsim(queries, documents, pairing=torch.tensor([[1, 3]])).any()
    with pytest.raises(ValueError, match=r"below the number of documents \(4\), got 9 in pair 1"):
        maxsim(queries, documents, pairing=torch.tensor([[1, 3], [0, 9]]))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_tokens_keep_nan_infinity_zero_and_empty_shapes(kind: str) -> None:
    tokens = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [0.0, 0.0], [3.0, -6.0]])
    assert quantize_tokens(tokens[:0], kind).values.shape == (0, 2)
    assert quantize_tokens(tokens[:, :0], kind).scales.tolist() == [0, 0, 0, 0]
    quantized = quantize_tokens(tokens, kind)
    dequantized = quantized.dequantize()
    assert dequantized.isnan().any(dim=1).tolist() == [True, True, False, False]
    assert not dequantized[2].any()
    documents = QuantizedTokens(quantized.values[:, None], quantized.scales[:, None])
    for impl in ("reference", "tiled"):
        scores = maxsim(torch.ones(1, 1, 2), documents, impl=impl)
        assert scores.isnan().tolist() == [[True, True, False, False]]


def test_integer_tokens_cannot_be_quantized() -> None:
    with pytest.raises(
        TypeError,
        match="documents must have dtype float16, bfloat16, float32, float64, got int8",
    ):
        quantize_tokens(torch.ones(2, 3, dtype=torch.int8))


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        pytest.param(
            torch.tensor([0, 4]),
            ValueError,
            r"labels must be at least 0 and below the number of documents \(4\), got 4",
            id="too large",
        ),
        pytest.param(
            torch.tensor([-100, 1]),
            ValueError,
            r"labels must be at least 0 .* got -100",
            id="negative",
        ),
        pytest.param(
            torch.tensor([0.0, 1.0]),
            TypeError,
            r"labels must have dtype int64, got float32",
            id="floats",
        ),
        pytest.param(
            [0, 1],
            TypeError,
            r"labels must be a torch\.Tensor, got list",
            id="list",
        ),
        pytest.param(
            torch.tensor([0]),
            ValueError,
            r"labels must have shape \[2\], got \[1\]",
            id="too few",
        ),
    ],
)
def test_wrong_labels_of_a_loss_are_refused(
    queries: Tensor,
    documents: Tensor,
    labels: Any,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        maxsim_contrastive_loss(queries, documents, labels)


def test_a_loss_without_labels_needs_a_document_for_every_query(
    queries: Tensor,
    documents: Tensor,
) -> None:
    with pytest.raises(
        ValueError,
        match=r"documents must be at least as many as queries \(2\) without labels, got 1",
    ):
        maxsim_contrastive_loss(queries, documents[:1])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loss_with_labels_needs_a_document(
    queries: Tensor,
    documents: Tensor,
    device: str,
) -> None:
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(
        ValueError,
        match="documents must be at least one with labels, got 0 for 2 queries",
    ):
        maxsim_contrastive_loss(queries.to(device), documents[:0].to(device), labels)


def test_the_scale_of_a_loss_must_be_finite(queries: Tensor, documents: Tensor) -> None:
    with pytest.raises(ValueError, match="scale must be a finite Python number"):
        maxsim_contrastive_loss(queries, documents, scale=math.nan)


@pytest.mark.parametrize("group", ["all", 3])
def test_an_unknown_process_group_is_refused(
    queries: Tensor,
    documents: Tensor,
    group: Any,
) -> None:
    with pytest.raises(
        ValueError,
        match="group must be a process group that holds this rank, 'world' or None",
    ):
        maxsim_contrastive_loss(queries, documents, group=group)


def test_without_a_process_group_the_world_is_this_process(
    queries: Tensor,
    documents: Tensor,
) -> None:
    loss = maxsim_contrastive_loss(queries, documents, group="world")
    assert torch.equal(loss, maxsim_contrastive_loss(queries, documents))


N_LARGE = 16500
LARGE_LENGTH = 1024


@pytest.fixture
def large_documents() -> Tensor:
    """More than 2^31 entries on the GPU, which are zero except in the very last token."""
    documents = torch.zeros(N_LARGE, LARGE_LENGTH, 128, dtype=torch.float16, device="cuda")
    documents[-1, -1] = 1
    return documents


@pytest.fixture
def query_of_ones() -> Tensor:
    """A query of four tokens, whose score with the last of the large documents is 4 * 128."""
    return torch.ones(1, 4, 128, dtype=torch.float16, device="cuda")


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_more_than_two_to_the_31_elements_have_gradients(
    large_documents: Tensor,
    query_of_ones: Tensor,
) -> None:
    query = query_of_ones.clone().requires_grad_()
    score = maxsim(query, large_documents, impl="triton")[:, -1].sum()
    (query_gradient,) = torch.autograd.grad(score, query)
    assert bool((query_gradient == 1).all())
    packed = large_documents.view(-1, 128).requires_grad_()
    offsets = torch.arange(0, N_LARGE + 1, dtype=torch.int32, device="cuda") * LARGE_LENGTH
    maxsim(query_of_ones, packed, cu_seqlens_d=offsets, impl="triton")[0, -1].backward()
    assert packed.grad is not None
    assert bool((packed.grad[-1] == 4).all())
    assert not packed.grad[-LARGE_LENGTH - 1 : -1].any()
    assert not packed.grad[:: LARGE_LENGTH * 100].any()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_more_than_two_to_the_31_elements_in_every_function(
    large_documents: Tensor,
    query_of_ones: Tensor,
) -> None:
    query = query_of_ones
    last = N_LARGE - 1
    best_scores, indices = maxsim_topk(query, large_documents, 1)
    assert best_scores.item() == 512
    assert indices.item() == last
    labels = torch.tensor([last], device="cuda")
    assert maxsim_contrastive_loss(query, large_documents, labels).item() < 1e-6
    scores = xtr_scores(query, large_documents, top_k=1)
    assert scores[0, last].item() == 128
    assert not scores[0, :last].any()
    quantized_scores = maxsim(query, quantize_tokens(large_documents))
    assert abs(quantized_scores[0, last].item() - 512) < 0.1
    pairing = torch.tensor([[0, last]], device="cuda")
    assert maxsim(query, large_documents, pairing=pairing).item() == 512
    grouped_scores = maxsim(query, large_documents[None], pairing="grouped")
    assert grouped_scores[0, last].item() == 512
    smooth_scores = maxsim(query, large_documents, temperature=0.1)
    assert smooth_scores[0, last].item() == pytest.approx(512, rel=1e-3)


@pytest.mark.parametrize("mask_mode", ["exclude", "zero"])
@pytest.mark.parametrize("temperature", [0.3, 1e-4, 1e-30, 1e-300])
@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_a_smooth_maximum_of_any_temperature_is_exact_forward_and_backward(
    impl: str,
    temperature: float,
    mask_mode: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = 30 * torch.randn(2, 9, 16, generator=generator)
    documents = 30 * torch.randn(3, 9, 16, generator=generator)
    mask = torch.rand(3, 9, generator=generator) > 0.3

    def run(dtype: torch.dtype, impl: str) -> list[Tensor]:
        leaves = [side.to(dtype).requires_grad_() for side in (queries, documents)]
        scores = maxsim(
            *leaves,
            document_mask=mask,
            temperature=temperature,
            mask_mode=mask_mode,
            impl=impl,
        )
        return [scores.detach(), *torch.autograd.grad(scores.sum(), leaves)]

    exact_results = run(torch.float64, "reference")
    for result, exact in zip(run(torch.float32, impl), exact_results, strict=True):
        assert (result.double() - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_long_queries_take_more_documents_than_65535_blocks_of_256() -> None:
    count = 65535 * 256 + 300
    documents = torch.zeros(count, 1, 16, dtype=torch.bfloat16, device="cuda")
    documents[-1] = 1
    queries = torch.ones(1, 200, 16, dtype=torch.bfloat16, device="cuda")
    scores = maxsim(queries, documents, impl="triton")
    assert scores[0, -1].item() == 200 * 16 and not scores[0, :-1].any()


@pytest.mark.parametrize("with_labels", [False, True], ids=["first documents", "labels"])
@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_the_contrastive_loss_is_the_cross_entropy_of_the_scores(
    target: Target,
    layout: str,
    with_labels: bool,
) -> None:
    inputs = maxsim_inputs(3, 5, 4, 7, 16, layout=layout, device=target.device)
    queries = inputs.queries.requires_grad_()
    options = inputs.layout
    del options["pairing"]
    positives = torch.tensor([4, 0, 2] if with_labels else [0, 1, 2], device=target.device)
    loss = maxsim_contrastive_loss(
        queries,
        inputs.documents,
        positives if with_labels else None,
        scale=0.3,
        **options,
        impl=target.impl,
    )
    scores = maxsim(queries.double(), inputs.documents.double(), **options, impl="reference")
    expected = torch.nn.functional.cross_entropy(0.3 * scores, positives)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, queries),
        torch.autograd.grad(expected, queries),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("wrong_label", [-100, -1, 4])
@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        pytest.param("cpu", True, id="compiled on the CPU"),
        pytest.param("cuda", True, id="compiled on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda", False, id="eager on a GPU", marks=pytest.mark.gpu),
    ],
)
def test_a_label_out_of_range_that_is_not_read_gives_nan_and_breaks_no_later_call(
    device: str,
    compiled: bool,
    wrong_label: int,
) -> None:
    queries = torch.randn(2, 3, 8, device=device, requires_grad=True)
    documents = torch.randn(4, 5, 8, device=device)

    def eager_loss(labels: Tensor) -> Tensor:
        return maxsim_contrastive_loss(2 * queries, documents, labels)

    loss = eager_loss
    if compiled:
        loss = torch.compile(eager_loss, backend="eager", fullgraph=True)
    wrong = loss(torch.tensor([1, wrong_label], device=device))
    (gradient,) = torch.autograd.grad(wrong, queries)
    assert wrong.isnan()
    assert bool(gradient.isnan().all())
    labels = torch.tensor([1, 3], device=device)
    expected = torch.nn.functional.cross_entropy(maxsim(2 * queries, documents), labels)
    torch.testing.assert_close(loss(labels), expected)
