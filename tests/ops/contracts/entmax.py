"""Contract of ``entmax``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.contracts.contract import KernelCase, OperatorContract, RepeatedCall
from tests.ops.samples import FP32, Sample, Shape
from tilefold.ops import entmax
from tilefold.ops.entmax.api import ENTMAX


def entmax_of_rows(x: Tensor, theta: Tensor | None = None, **options: Any) -> Any:
    """Entmax of rows; alpha is learned from ``theta`` if that is given."""
    if theta is not None:
        options["alpha"] = 1 + theta.sigmoid()
    return entmax(x, **options)


def entmax_sample(
    x: Shape = (2, 21),
    theta: Shape | None = None,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> Sample:
    """A call of :func:`tilefold.ops.entmax`; with ``theta``, of a learned alpha."""
    shapes = (x,) if theta is None else (x, theta)
    return Sample("entmax", entmax_of_rows, shapes, options, dtype)


CONTRACT = OperatorContract(
    name=ENTMAX.name,
    operator=ENTMAX,
    repeated={
        "entmax rows": RepeatedCall(entmax_sample(), (2,), ({}, {"dim": 0}, {"alpha": 2.0})),
        "entmax rows, learned alpha": RepeatedCall(entmax_sample(theta=(2, 1)), (2,)),
    },
    kernels={
        "entmax/rows._forward_kernel": KernelCase(entmax_sample(alpha=1.5)),
        "entmax/rows._backward_kernel": KernelCase(entmax_sample(alpha=1.7)),
    },
    calls={"entmax": lambda x, impl: entmax(x, impl=impl)},
    bf16_calls={"entmax": lambda x: entmax(x.to(torch.bfloat16), impl="triton")},
    compiled=(entmax_sample(), entmax_sample(theta=(1,))),
    threads={"entmax": entmax_sample((37, 129))},
    captured=(entmax_sample((7, 100), dtype=torch.bfloat16),),
    benchmarks=(("normal", {"R": 11, "N": 200}),),
    interpreted_files=("entmax/test_rows.py",),
    interpreted_least=30,
)
