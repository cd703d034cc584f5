"""Inputs of MaxSim's benchmark: token vectors of queries and documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable, bind
from tilefold.bench.spec import BenchCase

Score = Callable[[Tensor, Tensor], Tensor]

_PACKED_SHARE = 1 / 6  # shortest document of a packed case as a share of the longest; lengths are evenly spread


@dataclass(frozen=True)
class MaxSimBenchInputs:
    """Inputs of one case, all on one device; token vectors have norm 1.

    Attributes:
        queries: ``[Nq, Lq, D]``, requires a gradient.
        documents: ``[Nd, Ld, D]``, or ``[T, D]`` packed, requires a gradient.
        cu_seqlens_d: ``[Nd + 1]`` int32 of a packed case, else ``None``.
        grad_output: ``[Nq, Nd]`` fp32.
    """

    queries: Tensor
    documents: Tensor
    cu_seqlens_d: Tensor | None
    grad_output: Tensor

    def bind(self, score: Score, label: str, train: Score | None = None) -> Runnable:
        """``score(queries, documents)`` of these inputs; ``train``, if given, runs where gradients are asked for."""
        leaves = (self.queries, self.documents)
        return bind(score, leaves, leaves, self.grad_output, label, train)

    @property
    def document_tokens(self) -> int:
        """Number of document tokens."""
        return self.documents.shape[:-1].numel()

    @property
    def valid_tokens(self) -> int:
        """Number of tokens of both sides."""
        return self.document_tokens + self.queries.shape[:-1].numel()


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> MaxSimBenchInputs:
    """Random unit vectors of ``case``."""
    dims, dtype = case.dims, DTYPES[case.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)

    def unit(*size: int) -> Tensor:
        rows = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
        return torch.nn.functional.normalize(rows, dim=-1).to(dtype)

    queries = unit(dims["Nq"], dims["Lq"], dims["D"])
    cu_seqlens = None
    if case.variant == "packed":
        shares = torch.linspace(_PACKED_SHARE, 1, dims["Nd"], device=device)
        order = torch.randperm(dims["Nd"], generator=generator, device=device)
        lengths = (shares[order] * dims["Ld"]).round().int()
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        documents = unit(int(cu_seqlens[-1]), dims["D"])
    else:
        documents = unit(dims["Nd"], dims["Ld"], dims["D"])
    grad_output = torch.randn(dims["Nq"], dims["Nd"], generator=generator, device=device)
    return MaxSimBenchInputs(queries.requires_grad_(), documents.requires_grad_(), cu_seqlens, grad_output)
