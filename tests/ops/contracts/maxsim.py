"""Contract of ``maxsim``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.contracts.contract import (
    GrowingCall,
    KernelCase,
    OffsetCall,
    OperatorContract,
    RepeatedCall,
    TypedCall,
)
from tests.ops.samples import FP32, Sample, Shape
from tilefold.ops import maxsim, quantize_tokens
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
BF16 = torch.bfloat16
QUERIES: Shape = (2, 17, 16)
DOCUMENTS: Shape = (3, 5, 16)
ALIGNED_DOCUMENTS: Shape = (2, 5, 16)
GROUPED_DOCUMENTS: Shape = (2, 2, 5, 16)
PAIRS = [[0, 1], [1, 1], [1, 0]]  # one document twice
HOLES = (torch.arange(63).view(3, 21) % 3 != 0).tolist()
# Nq, Nd, Lq, Ld, D
SMALL = (3, 4, 5, 9, 16)


def maxsim_sample(
    queries: Shape,
    documents: Shape,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> Sample:
    """A call of :func:`tilefold.ops.maxsim` with tensors of these shapes."""
    return Sample("maxsim", maxsim, (queries, documents), options, dtype)


def layout_sample(
    pairing: str,
    layout: str,
    sizes: tuple[int, int, int, int, int] = SMALL,
    dtype: torch.dtype = FP32,
    function: Callable[..., Any] = maxsim,
    **options: Any,
) -> Sample:
    """A call with the masks, offsets and pairing of a test problem.

    Args:
        pairing: A name of :data:`tilefold.testing.maxsim.PAIRINGS`.
        layout: A name of :data:`tilefold.testing.padding.LAYOUTS`.
        sizes: Numbers of queries and documents, their lengths, and the dimension.
        dtype: Data type of the token vectors.
        function: :func:`tilefold.ops.maxsim` or one that takes its masks and offsets.
        options: More keyword arguments.
    """
    inputs = maxsim_inputs(*sizes, pairing=pairing, layout=layout)
    arguments: dict[str, Any] = {}
    for name, value in inputs.layout.items():
        arguments[name] = value.tolist() if isinstance(value, Tensor) else value
    if function is not maxsim:
        del arguments["pairing"]
    shapes = (tuple(inputs.queries.shape), tuple(inputs.documents.shape))
    return Sample(function.__name__, function, shapes, arguments | options, dtype)


def score_int8_documents(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "int8"), **options)


def score_fp8_documents(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "fp8"), **options)


def int8_sample(
    queries: Shape,
    documents: Shape,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> Sample:
    shapes = (queries, documents)
    return Sample("maxsim", score_int8_documents, shapes, options, dtype, inference=True)


REPEATED = {
    "maxsim": RepeatedCall(
        maxsim_sample(QUERIES, DOCUMENTS),
        (3,),
        ({}, {"reduction": "mean"}, {"temperature": 1}, {"temperature": 2.0}),
    ),
    "maxsim masked, temperature": RepeatedCall(
        maxsim_sample(QUERIES, (3, 21, 16), document_mask=HOLES, temperature=0.5),
        (3 + INTERPRETED,),
        ({}, {"mask_mode": "zero"}),
    ),
    # A tile of a GPU holds all queries. One document is empty.
    "maxsim packed": RepeatedCall(
        maxsim_sample(
            (34, 16),
            (20, 16),
            cu_seqlens_q=[0, 20, 34],
            cu_seqlens_d=[0, 7, 7, 20],
        ),
        (3 + INTERPRETED,),
        ({"reduction": "mean"}, {}),
    ),
    "maxsim grouped, normalised": RepeatedCall(
        maxsim_sample(QUERIES, GROUPED_DOCUMENTS, pairing="grouped"),
        (6,),
        ({"normalize": True}, {"normalize": False}),
    ),
    "maxsim normalised": RepeatedCall(
        maxsim_sample(QUERIES, DOCUMENTS),
        (4, 5),
        ({"normalize": True}, {"normalize": False, "reduction": "mean"}),
    ),
    "maxsim aligned": RepeatedCall(
        maxsim_sample(QUERIES, ALIGNED_DOCUMENTS),
        (3,),
        ({"pairing": "aligned"}, {"pairing": "all"}),
    ),
    "maxsim listed pairs": RepeatedCall(
        maxsim_sample(QUERIES, DOCUMENTS, pairing=PAIRS),
        (3,),
        ({}, {"mask_mode": "zero"}),
    ),
}

KERNELS = {
    "backward.ddocuments_kernel": KernelCase(
        maxsim_sample(QUERIES, GROUPED_DOCUMENTS, pairing="grouped"),
    ),
    "backward.ddocuments_listed_kernel": KernelCase(maxsim_sample(QUERIES, DOCUMENTS)),
    "backward.dqueries_kernel": KernelCase(
        maxsim_sample(QUERIES, ALIGNED_DOCUMENTS, pairing="aligned"),
    ),
    "backward.dqueries_row_kernel": KernelCase(maxsim_sample((2, 5, 16), DOCUMENTS)),
    "forward.all_pairs_kernel": KernelCase(maxsim_sample(QUERIES, DOCUMENTS)),
    "forward.combine_kernel": KernelCase(maxsim_sample((2, 300, 16), DOCUMENTS)),
    "forward.ends_kernel": KernelCase(
        maxsim_sample(QUERIES, (2, 300, 16), document_mask=[[1] * 200 + [0] * 100] * 2),
    ),
    "forward.listed_pairs_kernel": KernelCase(
        maxsim_sample(QUERIES, ALIGNED_DOCUMENTS, pairing="aligned"),
    ),
    "norms.inverse_norms_kernel": KernelCase(
        maxsim_sample(QUERIES, DOCUMENTS, normalize=True),
    ),
    "norms.quantize_kernel": KernelCase(
        int8_sample(QUERIES, ALIGNED_DOCUMENTS, pairing="aligned"),
    ),
    "norms.unit_gradient_kernel": KernelCase(
        maxsim_sample(QUERIES, GROUPED_DOCUMENTS, pairing="grouped", normalize=True),
    ),
    "smooth.smooth_ddocuments_kernel": KernelCase(
        maxsim_sample(QUERIES, DOCUMENTS, temperature=0.5),
    ),
    "smooth.smooth_dqueries_kernel": KernelCase(
        maxsim_sample(QUERIES, DOCUMENTS, temperature=0.5, mask_mode="zero"),
    ),
    "shared.shared_pass_kernel": KernelCase(int8_sample(QUERIES, DOCUMENTS)),
    "shared_hopper.shared_hopper_kernel": KernelCase(
        int8_sample((5, 32, 16), (65536, 3, 16)),
        hopper_only=True,
    ),
    "stream.stream_kernel": KernelCase(
        Sample("maxsim", score_fp8_documents, (QUERIES, DOCUMENTS), inference=True),
    ),
}

TOKENS = torch.zeros(2, 3, 4)
PACKED_TOKENS = TOKENS.flatten(0, 1)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
ROWS_OF_SIX = torch.ones(6, 8)
FIXED_TOKENS = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0))

FINITE_DIFFERENCE_OPTIONS: list[dict[str, Any]] = [
    {"normalize": True},
    {"temperature": 0.4},
    {"mask_mode": "zero", "reduction": "mean"},
]
SMOOTH = {"temperature": 0.5, "reduction": "mean", "normalize": True}


def compiled_samples() -> list[Sample]:
    samples = []
    for pairing, layout in itertools.product(PAIRINGS, ("full", "holes", "packed")):
        if (pairing, layout) == ("index", "packed"):
            continue  # its longest query is a value, which breaks a graph
        samples.append(layout_sample(pairing, layout))
        samples.append(layout_sample(pairing, layout, **SMOOTH))
    return samples


def growing_padded(count: int, length: int) -> Sample:
    return maxsim_sample((count, 4, 16), (count + 1, length, 16))


def growing_packed(count: int, length: int) -> Sample:
    return maxsim_sample(
        (4 * count, 16),
        (length * (count + 1), 16),
        cu_seqlens_q=[*range(0, 4 * count + 1, 4)],
        cu_seqlens_d=[*range(0, length * (count + 1) + 1, length)],
    )


def thread_sample(length: int, **options: Any) -> Sample:
    """Documents of a length of their own, which are read through a TMA descriptor."""
    documents = 5 if options else 7
    return maxsim_sample((5, 33, 64), (documents, length, 64), BF16, **options)


def exact_integer_samples() -> dict[str, Sample]:
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    sizes = (16, 24, 32, 180, 128) if on_gpu else (3, 4, 5, 9, 32)
    _, documents, query_length, document_length, dim = sizes
    one_query = (1, documents, query_length, document_length, dim)
    long_queries = (2, documents, 8 * query_length, document_length, dim)
    return {
        "maxsim all full": layout_sample("all", "full", sizes),
        "maxsim all packed": layout_sample("all", "packed", sizes),
        "maxsim aligned full": layout_sample("aligned", "full", sizes),
        "maxsim grouped holes": layout_sample("grouped", "holes", sizes),
        "maxsim index packed": layout_sample("index", "packed", sizes),
        "maxsim of one query": layout_sample("all", "full", one_query),
        "maxsim of long queries": layout_sample("all", "full", long_queries),
    }


THREAD_HOLES = (torch.arange(7 * 43).view(7, 43) % 3 != 0).tolist()
LONGEST_QUERY_SAMPLES = (
    layout_sample("index", "packed"),
    layout_sample("index", "packed", **SMOOTH),
)

CONTRACT = OperatorContract(
    name=MAXSIM.name,
    operator=MAXSIM,
    repeated=REPEATED,
    repeated_in_interpreter=("maxsim aligned",),
    kernels={f"maxsim/{name}": case for name, case in KERNELS.items()},
    typed_calls=(
        TypedCall(
            maxsim,
            {"queries": TOKENS, "documents": TOKENS},
            {"query_mask": torch.ones(2, 3), "document_mask": torch.ones(2, 3)},
            same_dtype=("documents",),
        ),
        TypedCall(
            maxsim,
            {"queries": PACKED_TOKENS, "documents": PACKED_TOKENS},
            {"cu_seqlens_q": ENDS, "cu_seqlens_d": ENDS},
            same_dtype=("documents",),
        ),
        TypedCall(
            maxsim,
            {"queries": TOKENS, "documents": TOKENS},
            {"pairing": torch.zeros(3, 2, dtype=torch.int64)},
            same_dtype=("documents",),
        ),
    ),
    offset_calls=(
        OffsetCall(
            "cu_seqlens_q",
            "rows",
            "queries",
            lambda offsets, impl: maxsim(
                ROWS_OF_SIX,
                FIXED_TOKENS,
                cu_seqlens_q=offsets,
                impl=impl,
            ),
        ),
        OffsetCall(
            "cu_seqlens_d",
            "rows",
            "documents",
            lambda offsets, impl: maxsim(
                FIXED_TOKENS,
                ROWS_OF_SIX,
                cu_seqlens_d=offsets,
                impl=impl,
            ),
        ),
    ),
    unhashable_options={
        maxsim: ("pairing", "reduction", "mask_mode", "impl", "temperature"),
    },
    calls={"maxsim": lambda x, impl: maxsim(x, FIXED_TOKENS.flip(0), impl=impl)},
    finite_differences=tuple(
        layout_sample(pairing, layout, (3, 2, 2, 4, 3), torch.float64, **options)
        for pairing, layout, options in itertools.product(
            PAIRINGS,
            LAYOUTS,
            FINITE_DIFFERENCE_OPTIONS,
        )
    ),
    strided={
        f"maxsim {pairing}": layout_sample(pairing, "holes", (3, 2, 5, 21, 24))
        for pairing in PAIRINGS
    },
    tolerance=1e-5,
    compiled=tuple(compiled_samples()),
    opchecked=(*LONGEST_QUERY_SAMPLES, int8_sample((3, 5, 16), (4, 9, 16))),
    elsewhere=LONGEST_QUERY_SAMPLES,
    growing={
        "maxsim": GrowingCall(growing_padded, compilations=2),
        "maxsim, packed": GrowingCall(growing_packed, compilations=2),
    },
    threads={
        "maxsim": thread_sample(41),
        "maxsim, holes, fp16": maxsim_sample(
            (5, 33, 64),
            (7, 43, 64),
            torch.float16,
            document_mask=THREAD_HOLES,
        ),
        "maxsim, long queries": maxsim_sample((2, 201, 64), (5, 45, 64), BF16),
        "maxsim, normalised": thread_sample(47, normalize=True),
        "maxsim, smooth": thread_sample(49, temperature=0.5),
        "maxsim, aligned": thread_sample(51, pairing="aligned"),
        "maxsim, inference": replace(thread_sample(53), inference=True),
        "maxsim, int8": int8_sample((3, 13, 64), (11, 17, 64), BF16),
    },
    captured=(
        maxsim_sample((3, 33, 64), (5, 41, 64), BF16),
        maxsim_sample((3, 33, 64), (5, 41, 64), BF16, temperature=0.5),
        maxsim_sample((3, 33, 64), (5, 41, 64), BF16, normalize=True),
    ),
    exact_integers=exact_integer_samples(),
    benchmarks=(
        ("in-batch", {"Nq": 3, "Lq": 5, "Nd": 4, "Ld": 12, "D": 16}),
        ("packed", {"Nq": 3, "Lq": 5, "Nd": 4, "Ld": 12, "D": 16}),
    ),
    interpreted_files=(
        "maxsim/test_implementations.py",
        "maxsim/test_properties.py",
        "maxsim/test_quantized.py",
        "maxsim/test_plans.py",
    ),
    interpreted_least=102,
)
