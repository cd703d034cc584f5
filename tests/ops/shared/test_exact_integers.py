"""Results from small integers are exact: every product and every partial sum is a number of fp32.

So they are the same bits from every assembler. Releases of ptxas before 13.1 may give a register
away that an asynchronous product on Hopper still reads, and such a result is off by whole numbers.
``TRITON_PTXAS_PATH`` (with Triton 3.9 on Hopper ``TRITON_PTXAS_BLACKWELL_PATH``) names another
assembler, and ``TRITON_CACHE_DIR`` an empty folder for what it makes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.contracts import cases
from tests.ops.samples import Sample
from tilefold.ops import entmax_attention, lsr_head, maxsim, quantize_tokens, quantize_weight
from tilefold.ops.maxsim import xtr_scores
from tilefold.testing import nan_poisoned_empty

ON_GPU = torch.cuda.is_available() and not triton_interpreted()
DTYPES = [torch.float32, torch.float16] + ([] if triton_interpreted() else [torch.bfloat16])
HEAD_SHAPE = (4, 256, 192) if ON_GPU else (2, 16, 32)  # B, S, D; a power of two of tokens for means
VOCABULARY = 1000 if ON_GPU else 40
TOKENS = (16, 24, 32, 180, 128) if ON_GPU else (3, 4, 5, 9, 32)  # Nq, Nd, Lq, Ld, D
FP8_TOP, INT8_TOP = 448, 127  # largest numbers, to which the largest entry of a row is scaled
GROUP = 4  # keys of one score; a weight of 1/4 is exact

SAMPLES: dict[str, Sample] = cases("exact_integers")


def integers(shape: tuple[int, ...], target: Target, seed: int) -> Tensor:
    """Random numbers among -1, 0 and 1, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).double().to(target.device)


def results(
    sample: Sample,
    leaves: list[Tensor],
    arguments: dict[str, Any],
    gradient: Tensor,
    impl: str,
) -> list[Tensor]:
    """Return the output and the gradients of copies of the leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    arguments = arguments | {"impl": impl}
    with nan_poisoned_empty():
        output = sample.function(*leaves, **arguments)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def assert_exact(got: list[Tensor], expected: list[Tensor]) -> None:
    """Every result is the exact one, rounded once."""
    for index, (result, exact) in enumerate(zip(got, expected, strict=True)):
        rounded = exact.to(result.dtype)
        wrong = int((result != rounded).sum())
        worst = float((result.double() - rounded.double()).abs().max())
        assert wrong == 0, f"result {index}: {wrong} of {rounded.numel()}, by up to {worst}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAMPLES)
def test_results_and_gradients_of_small_integers_are_exact(
    target: Target,
    name: str,
    dtype: torch.dtype,
) -> None:
    sample = SAMPLES[name]
    arguments = sample.arguments(target.device)
    leaves = [integers(shape, target, seed) for seed, shape in enumerate(sample.shapes)]
    shape = sample.function(*leaves, **arguments, impl="reference").shape
    gradient = integers(tuple(shape), target, seed=7)
    expected = results(sample, leaves, arguments, gradient, "reference")
    got = results(sample, [leaf.to(dtype) for leaf in leaves], arguments, gradient, target.impl)
    assert_exact(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_xtr_scores_of_small_integers_are_exact_but_for_one_division(
    target: Target,
    dtype: torch.dtype,
) -> None:
    queries = integers((TOKENS[0], TOKENS[2], TOKENS[4]), target, 0)
    documents = integers((TOKENS[1], TOKENS[3], TOKENS[4]), target, 1)
    expected = xtr_scores(queries, documents, top_k=7, impute=True, impl="reference")
    got = xtr_scores(
        queries.to(dtype),
        documents.to(dtype),
        top_k=7,
        impute=True,
        impl=target.impl,
    )
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_small_integers_in_8_bits_are_exact(target: Target, dtype: torch.dtype) -> None:
    hidden = integers(HEAD_SHAPE, target, 0)
    weight = integers((VOCABULARY, HEAD_SHAPE[-1]), target, 1)
    queries = integers((TOKENS[0], TOKENS[2], TOKENS[4]), target, 2)
    documents = integers((TOKENS[1], TOKENS[3], TOKENS[4]), target, 3)
    for left, right, top in ((hidden, weight, FP8_TOP), (queries, documents, INT8_TOP)):
        left[..., :2] = torch.tensor([top, 0.0])  # the scale of every row is 1
        right[..., :2] = torch.tensor([0.0, top])
    rounded = [tensor.to(dtype) for tensor in (hidden, weight, queries, documents)]
    scores = lsr_head(
        rounded[0],
        quantize_weight(rounded[1]),
        activation="relu",
        impl=target.impl,
    )
    assert_exact([scores], [lsr_head(hidden, weight, activation="relu", impl="reference")])
    similarities = maxsim(rounded[2], quantize_tokens(rounded[3], "int8"), impl=target.impl)
    assert_exact([similarities], [maxsim(queries, documents, impl="reference")])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_to_equal_keys_is_their_mean_to_fp32_rounding(
    target: Target,
    dtype: torch.dtype,
    alpha: float,
    dim: int,
) -> None:
    heads = 2
    keys = GROUP * dim if ON_GPU else GROUP * 8
    groups = torch.arange(keys, device=target.device) // GROUP
    one_hot = torch.eye(dim, device=target.device, dtype=torch.float64)[groups]
    k = (4 * one_hot).expand(1, heads, keys, dim).contiguous()  # a key scores 16 with its group
    q = k.flip(2).contiguous()
    v = integers((1, heads, keys, dim), target, 1)
    gradient = integers((1, heads, keys, dim), target, 2)
    sample = Sample("entmax_attention", entmax_attention, ())
    options = {"alpha": alpha, "scale": 1.0}
    expected = results(sample, [q, k, v], options, gradient, "reference")
    leaves = [tensor.to(dtype) for tensor in (q, k, v)]
    got = results(sample, leaves, options, gradient, target.impl)
    root = 1e-5 if dtype != torch.float32 else 1e-6  # what the root of a row is found to
    for result, exact in zip(got, expected, strict=True):
        roundoff = 2 * torch.finfo(dtype).eps
        allowed = 4 * (root + roundoff) * float(exact.abs().max())
        assert float((result.double() - exact).abs().max()) <= allowed
