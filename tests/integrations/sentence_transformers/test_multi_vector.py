"""Scoring functions for MultiVectorEncoder losses equal the stock ones: scores, losses, gradients,
training runs.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.multi_vector_models import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    needs_stock,
    problem,
    results_of,
)
from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import multi_vector

scoring = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
similarity = pytest.importorskip("sentence_transformers.util.similarity")

NAMES = [name for name in multi_vector.__all__ if "colbert" in name]
XTR = ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"]
COLUMNS = [QUERIES, POSITIVES, NEGATIVES]
MARGINS = torch.tensor([0.3, -0.1, 1.2, 0.0])
TEACHER = torch.tensor([[2.0, 0.5], [1.0, 1.5], [0.1, 0.0], [3.0, -1.0]])
LOSSES: list[tuple[str, str, dict[str, Any], Tensor | None]] = [
    ("MultiVectorMultipleNegativesRankingLoss", "colbert_scores", {"scale": 0.5}, None),
    (
        "MultiVectorMultipleNegativesRankingLoss",
        "mean_colbert_scores",
        {"score_mini_batch_size": 3},
        None,
    ),
    (
        "CachedMultiVectorMultipleNegativesRankingLoss",
        "colbert_scores",
        {"mini_batch_size": 3},
        None,
    ),
    ("MultiVectorMarginMSELoss", "colbert_scores_pairwise", {}, MARGINS),
    ("MultiVectorMarginMSELoss", "mean_colbert_scores_pairwise", {}, MARGINS),
    ("MultiVectorDistillKLDivLoss", "colbert_kd_scores", {}, TEACHER),
    ("MultiVectorDistillKLDivLoss", "mean_colbert_kd_scores", {}, TEACHER),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*documents without any scoreable token.*")


@needs_stock
@pytest.mark.parametrize("name", [name for name in multi_vector.__all__ if name.islower()])
def test_the_signature_begins_like_that_of_the_stock_function(name: str) -> None:
    stock = inspect.signature(
        getattr(scoring, name, None) or getattr(similarity, name),
    ).parameters.values()
    mine = list(inspect.signature(getattr(multi_vector, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in mine[: len(stock)]] == [
        (p.name, p.kind, p.default) for p in stock
    ]
    assert [p.name for p in mine[len(stock) :]] == ["impl"]


@pytest.mark.parametrize("name", multi_vector.__all__[1:])
def test_a_function_is_documented_and_pickled_by_its_own_name(name: str) -> None:
    function: Any = getattr(multi_vector, name)
    assert function.__name__ == name and pickle.loads(pickle.dumps(function)) is function  # noqa: S301
    doc = inspect.getdoc(function)
    assert "Raises:" in doc and all(
        f"{key}" in doc for key in inspect.signature(function).parameters
    )


def stock_problem(name: str, masked: str, device: str = "cpu") -> dict[str, Any]:
    """A problem whose sides have masks, weights, or zero rows, which stock and fused functions then
    read as padding.
    """
    arguments = problem(name, device=device)
    for side in ("queries", "documents"):
        if masked not in ("both", "weights", side):
            arguments[f"{side}_embeddings"] *= arguments.pop(f"{side}_mask")[..., None]
    if masked == "weights":
        weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(3))
        arguments["queries_mask"] = arguments["queries_mask"] * weights
    return arguments


@needs_stock
@pytest.mark.parametrize("masked", ["both", "queries", "documents", "neither", "weights"])
@pytest.mark.parametrize("name", NAMES + XTR)
def test_scores_and_gradients_equal_those_of_the_stock_function(name: str, masked: str) -> None:
    arguments = stock_problem(name, masked)
    options = (
        [{"top_k": k} for k in (1, 7, 500)]
        if name in XTR
        else [{"length_normalize": n} for n in (False, True)]
    )
    for option in options:
        expected = results_of(getattr(scoring, name), arguments, **option)
        found = results_of(getattr(multi_vector, name), arguments, **option)
        assert (expected[0] < -1e7).any()
        torch.testing.assert_close(found[0], expected[0])
        kept = arguments.get("documents_mask", arguments["documents_embeddings"].any(dim=-1))
        # a document without a token: torch's maximum sends what no loss uses to an arbitrary one
        assert not found[2][~kept].any()
        for mine, stock in zip(found[1:], expected[1:], strict=True):
            assert_close(mine, stock, FP32_BUDGET, "gradients")


@needs_stock
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_fp32_for_every_dtype(name: str, dtype: torch.dtype) -> None:
    arguments = problem(name, dtype)
    found = getattr(multi_vector, name)(**arguments)
    widened = {k: v.float() if v.is_floating_point() else v for k, v in arguments.items()}
    expected = getattr(scoring, name)(**widened)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_stock
@pytest.mark.parametrize("name", NAMES)
def test_documents_without_any_place_for_a_token_score_as_empty(name: str) -> None:
    arguments = {key: value for key, value in problem(name).items() if key != "queries_mask"}
    for key in ("documents_embeddings", "documents_mask"):
        arguments[key] = arguments[key].narrow(len(arguments["documents_mask"].shape) - 1, 0, 0)
    torch.testing.assert_close(
        getattr(multi_vector, name)(**arguments),
        getattr(scoring, name)(**arguments),
    )


@needs_stock
def test_lists_of_encoded_texts_and_arrays_are_taken(colbert: Any) -> None:
    queries, documents = colbert.encode_query(QUERIES), colbert.encode_document(POSITIVES)
    for name in ("colbert_scores_pairwise", "mean_colbert_scores_pairwise"):
        expected = getattr(scoring, name)(queries, documents)
        torch.testing.assert_close(getattr(multi_vector, name)(queries, documents), expected)
    arrays = [t.numpy() for t in problem("colbert_scores").values()]
    tensors = [torch.from_numpy(array) for array in arrays[:2]]
    torch.testing.assert_close(
        multi_vector.colbert_scores(*arrays[:2]),
        scoring.colbert_scores(*tensors),
    )


@needs_stock
@pytest.mark.parametrize("name", NAMES)
def test_under_autocast_scores_stay_fp32_and_near_the_stock_ones(name: str) -> None:
    arguments = problem(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = getattr(scoring, name)(**arguments)
        found = getattr(multi_vector, name)(**arguments)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(
        found,
        expected,
        rtol=2e-2,
        atol=0.2,
    )  # stock rounds each similarity to bf16


@pytest.mark.parametrize("name", NAMES)
def test_the_functions_compile_whole(name: str) -> None:
    torch._dynamo.reset()
    function = getattr(multi_vector, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, expected in zip(
        results_of(compiled, problem(name)),
        results_of(function, problem(name)),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected)


def loss_and_gradients(
    model: Any,
    kind: str,
    function: Any,
    options: dict[str, Any],
    labels: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    from sentence_transformers.multi_vector_encoder import losses

    model.zero_grad(set_to_none=True)
    loss = getattr(losses, kind)(model, similarity_fct=function, **options)
    value = loss([dict(model.preprocess(texts)) for texts in COLUMNS], labels)
    value.backward()
    return value.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@needs_stock
@pytest.mark.filterwarnings("ignore:.*teacher.*")
@pytest.mark.parametrize(
    ("kind", "name", "options", "labels"),
    LOSSES,
    ids=[f"{kind}-{name}" for kind, name, *_ in LOSSES],
)
def test_losses_equal_stock(
    colbert: Any,
    kind: str,
    name: str,
    options: dict[str, Any],
    labels: Tensor | None,
) -> None:
    expected, expected_gradients = loss_and_gradients(
        colbert,
        kind,
        getattr(scoring, name),
        options,
        labels,
    )
    found, gradients = loss_and_gradients(
        colbert,
        kind,
        getattr(multi_vector, name),
        options,
        labels,
    )
    torch.testing.assert_close(found, expected)
    assert gradients.keys() == expected_gradients.keys()
    # some gradients vanish in exact arithmetic (a key bias before a softmax): a rounding of the
    # largest one is let pass
    scales = {name: gradient.abs().max().item() for name, gradient in expected_gradients.items()}
    rounding = torch.finfo(torch.float32).eps * max(scales.values())
    for parameter, gradient in gradients.items():
        error = (gradient - expected_gradients[parameter]).abs().max().item()
        allowed = max(FP32_BUDGET * scales[parameter], rounding)
        assert error <= allowed, (
            f"gradient of {parameter}: error {error:.2e}, allowed {allowed:.2e}"
        )


@needs_stock
def test_functions_with_options_of_their_own_are_named_in_a_loss_configuration_and_score_as_stock(
    colbert: Any,
) -> None:
    from sentence_transformers.multi_vector_encoder import losses

    function = functools.partial(multi_vector.colbert_scores, length_normalize=True)
    ranking = losses.MultiVectorMultipleNegativesRankingLoss(
        torch.nn.Identity(),
        similarity_fct=function,
    )
    assert ranking.get_config_dict()["similarity_fct"] == "colbert_scores(length_normalize=True)"
    for kind, name, labels in (
        ("MultiVectorMultipleNegativesRankingLoss", "XTRScores", None),
        ("MultiVectorDistillKLDivLoss", "XTRKDScores", TEACHER),
    ):
        both = [getattr(module, name)(top_k=8) for module in (scoring, multi_vector)]
        found = [loss_and_gradients(colbert, kind, function, {}, labels) for function in both]
        torch.testing.assert_close(found[1][0], found[0][0])
        weight = "1.linear.weight"
        assert_close(
            found[1][1][weight],
            found[0][1][weight],
            FP32_BUDGET,
            "gradient of the projection",
        )
        configs = [
            getattr(losses, kind)(colbert, similarity_fct=f).get_config_dict()["similarity_fct"]
            for f in both
        ]
        assert configs[0] == configs[1]


def test_arguments_that_do_not_fit_are_named() -> None:
    arguments = problem("colbert_scores")
    queries, documents, queries_mask, documents_mask = arguments.values()
    rows, one_each, cut = list(queries[0]), documents[:, 0], documents_mask[..., 1:]
    called = vars(multi_vector)
    for name, kind, message, given in (
        (
            "colbert_scores",
            ValueError,
            r"documents_embeddings must have shape \[B, N, L, D\], got \[3, 9, 16\]",
            (queries, one_each),
        ),
        (
            "colbert_kd_scores",
            ValueError,
            r"documents_mask must have shape \[3, 2, 9\].*got \[3, 2, 8\]",
            (queries, documents, queries_mask, cut),
        ),
        (
            "xtr_scores",
            ValueError,
            r"documents_mask must have shape \[3, 2, 9\]",
            (queries, documents, None, cut),
        ),
        (
            "colbert_scores",
            ValueError,
            r"queries_mask must have shape \[3, 5\].*got \[3, 4\]",
            (queries, documents, queries_mask[:, 1:], documents_mask),
        ),
        (
            "colbert_scores_pairwise",
            ValueError,
            "one document for each of the 0 queries, got 3",
            ([], one_each),
        ),
        (
            "colbert_kd_scores",
            ValueError,
            "one group for each of the 2 queries",
            (queries[:2], documents),
        ),
        (
            "xtr_kd_scores",
            ValueError,
            "one group for each of the 2 queries",
            (queries[:2], documents),
        ),
        (
            "colbert_scores_pairwise",
            ValueError,
            r"sequences of shape \[L, D\], got one of shape \[16\]",
            (rows, one_each),
        ),
        (
            "maxsim_pairwise",
            ValueError,
            "document for each of the 2 queries, got 3 documents",
            (queries[:2], queries),
        ),
        (
            "maxsim",
            ValueError,
            r"a_mask must have shape \[3, 5\].*got \[3, 6\]",
            (queries, queries, torch.ones(3, 6)),
        ),
        (
            "maxsim",
            ValueError,
            r"b must hold sequences of shape \[L, D\], got one of shape \[16\]",
            (queries, rows),
        ),
        (
            "maxsim",
            ValueError,
            r"a must have shape \[B, L, D\], got \[3, 2, 9, 16\]",
            (documents, queries),
        ),
        ("maxsim", TypeError, "dtype of queries", (queries, list(queries.bfloat16()))),
    ):
        refused(kind, message, called[name], *given)
    refused(
        RuntimeError,
        "impl='triton'",
        multi_vector.colbert_scores,
        queries,
        documents,
        impl="triton",
    )
    refused(
        ValueError,
        "top_k must be a positive integer, got 0",
        multi_vector.xtr_scores,
        **arguments,
        top_k=0,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES + XTR)
def test_on_a_gpu_scores_and_gradients_equal_the_reference_on_the_cpu(name: str) -> None:
    function = functools.partial(
        getattr(multi_vector, name),
        **({"top_k": 7} if name in XTR else {}),
    )
    expected = results_of(function, problem(name), impl="reference")
    for impl in ("auto",) if name in XTR else ("auto", "tiled"):
        for mine, truth in zip(
            results_of(function, problem(name, device="cuda"), impl=impl),
            expected,
            strict=True,
        ):
            torch.testing.assert_close(mine.cpu(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_on_a_gpu_the_peak_is_a_small_part_of_the_stock_one() -> None:
    peaks = []
    for function in (scoring.colbert_scores, multi_vector.colbert_scores):
        queries = torch.randn(64, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        documents = torch.randn(
            64,
            2,
            300,
            128,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        mask = torch.ones(64, 2, 300, dtype=torch.bool, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(queries, documents, documents_mask=mask).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] / 4, f"{peaks[1] / 2**20:.0f} MiB beside {peaks[0] / 2**20:.0f} MiB"
