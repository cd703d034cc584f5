"""Contract of ``token_scatter``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.contracts.contract import (
    GrowingCall,
    KernelCase,
    OffsetCall,
    OperatorContract,
    RepeatedCall,
    TypedCall,
)
from tests.ops.samples import FP32, MASK, OFFSETS, TOKEN_IDS, Sample
from tilefold.ops import token_scatter, token_scatter_sparse
from tilefold.ops._shared.activation import ACTIVATIONS
from tilefold.ops.token_scatter.api import SCATTER

REDUCTIONS = ("max", "sum")
LAYOUTS: list[dict[str, Any]] = [{}, {"attention_mask": MASK}, {"cu_seqlens": OFFSETS}]
# The packed tokens are the first 32 padded ones.
PACKED_IDS = [*TOKEN_IDS[0], *TOKEN_IDS[1]][:32]


def scatter(weights: Tensor, input_ids: Tensor, vocab_size: int = 40, **options: Any) -> Tensor:
    return token_scatter(weights, input_ids, vocab_size, **options)


def scatter_sample(dtype: torch.dtype = FP32, **options: Any) -> Sample:
    """A call of :func:`tilefold.ops.token_scatter` with padded or packed tokens."""
    if "cu_seqlens" in options:
        return Sample(
            "token_scatter", scatter, ((32,),), options | {"input_ids": PACKED_IDS}, dtype
        )
    return Sample("token_scatter", scatter, ((2, 21),), options | {"input_ids": TOKEN_IDS}, dtype)


def repeated(sample: Sample) -> RepeatedCall:
    options: tuple[dict[str, Any], ...] = (
        {},
        {"reduce": "sum"},
        {"activation": "softplus"},
        {"ignore_ids": (1, 2)},
        {"vocab_size": 48},
    )
    return RepeatedCall(sample, (2,), options)


def typed_calls() -> list[TypedCall]:
    weights = torch.zeros(2, 3)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    padded = {"vocab_size": 9, "input_ids": ids, "attention_mask": torch.ones(2, 3)}
    packed = {"vocab_size": 9, "input_ids": ids.flatten(), "cu_seqlens": ends}
    calls = []
    for function in (token_scatter, token_scatter_sparse):
        calls.append(TypedCall(function, {"weights": weights}, padded))
        calls.append(TypedCall(function, {"weights": weights.flatten()}, packed))
    return calls


IDS_OF_THREE = torch.tensor([[1, 2, 1], [4, 4, 0]])
IDS_OF_EIGHT = torch.tensor([[1, 2, 1, 0, 0, 3, 3, 3]] * 3)


def scatter_six(offsets: Tensor, impl: str) -> Tensor:
    ids = IDS_OF_EIGHT.flatten()[:6]
    return token_scatter(torch.ones(6), ids, 9, cu_seqlens=offsets, impl=impl)


def finite_difference_sample(reduce: str, activation: str) -> Sample:
    options = {
        "input_ids": [[1, 1, 2, 0, 1, 2], [3, 3, 3, 3, 0, 0], [0, 1, 2, 3, 0, 1]],
        "vocab_size": 4,
        "attention_mask": [[1] * 6, [0, 1, 0, 1, 1, 0], [0] * 6],
        "ignore_ids": (0,),
        "reduce": reduce,
        "activation": activation,
    }
    return Sample("token_scatter", scatter, ((3, 6),), options, torch.float64)


def growing_sample(count: int, length: int) -> Sample:
    positions = torch.arange(count * length).view(count, length)
    options = {
        "input_ids": (positions * 7 % 40).tolist(),
        "attention_mask": (positions % 5).tolist(),
    }
    return Sample("token_scatter", scatter, ((count, length),), options)


def captured_sample(reduce: str) -> Sample:
    ids = (torch.arange(99) * 7 % 257).view(3, 33).tolist()
    options = {"input_ids": ids, "vocab_size": 257, "reduce": reduce}
    return Sample("token_scatter", scatter, ((3, 33),), options, torch.bfloat16)


SCATTERS = [
    scatter_sample(reduce=reduce, ignore_ids=(2,), **layout)
    for reduce in REDUCTIONS
    for layout in LAYOUTS
]

CONTRACT = OperatorContract(
    name=SCATTER.name,
    operator=SCATTER,
    repeated={
        "token_scatter masked": repeated(scatter_sample(attention_mask=MASK)),
        "token_scatter packed": repeated(scatter_sample(cu_seqlens=OFFSETS)),
    },
    kernels={
        "token_scatter/scatter.gather_kernel": KernelCase(scatter_sample()),
        "token_scatter/scatter.scatter_kernel": KernelCase(scatter_sample(reduce="sum")),
    },
    typed_calls=tuple(typed_calls()),
    offset_calls=(OffsetCall("cu_seqlens", "tokens", "weights", scatter_six),),
    calls={
        "token_scatter": lambda x, impl: token_scatter(x[0], IDS_OF_EIGHT, 9, impl=impl),
    },
    whole_calls={"token_scatter": lambda x: token_scatter(x, IDS_OF_EIGHT, 9)},
    default_calls={
        "token_scatter": lambda x: token_scatter(x[:, :, 0], IDS_OF_THREE, 9, reduce="sum"),
        "token_scatter_sparse": lambda x: token_scatter_sparse(
            x[:, :, 0].detach(),
            IDS_OF_THREE,
            9,
        ),
    },
    finite_differences=tuple(
        finite_difference_sample(reduce, activation)
        for reduce, activation in itertools.product(REDUCTIONS, ACTIVATIONS)
    ),
    strided={
        f"token_scatter {reduce} {[*layout]}": scatter_sample(
            reduce=reduce,
            ignore_ids=(0,),
            **layout,
        )
        for reduce, layout in itertools.product(REDUCTIONS, LAYOUTS)
    },
    compiled=tuple(SCATTERS),
    opchecked=(
        replace(SCATTERS[4], dtype=torch.float16),
        replace(SCATTERS[5], dtype=torch.bfloat16, inference=True),
    ),
    growing={"token_scatter": GrowingCall(growing_sample, compilations=1)},
    threads={"token_scatter": scatter_sample()},
    captured=tuple(captured_sample(reduce) for reduce in REDUCTIONS),
    benchmarks=(("ragged", {"B": 3, "S": 40, "V": 60}),),
    interpreted_files=("token_scatter/test_implementations.py",),
    interpreted_least=108,
)
