"""What the LSR head is compared with: the stock head eager and compiled, and the matrix product that none can avoid."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilefold.bench.lsr_head.inputs import LSRHeadInputs
from tilefold.bench.runnables import Runnable, compiled
from tilefold.bench.spec import Implementation

GEMM_CHUNK_BYTES = 64 * 2**20


def stock_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """The operations of a masked-LM decoder followed by sentence-transformers' SPLADE max pooling, ``[B, V]``."""
    logits = linear(hidden, weight, bias)
    masked = (logits * attention_mask.unsqueeze(-1).to(logits.dtype)).relu_()
    activated = masked.log1p() if torch.is_grad_enabled() else masked.log1p_()
    return torch.max(activated, dim=1).values


def max_first_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """The same function with the activation moved behind the maximum, with which it commutes."""
    logits = linear(hidden, weight, bias)
    masked = logits * attention_mask.unsqueeze(-1).to(logits.dtype)
    return torch.max(masked, dim=1).values.relu().log1p()


def _gemm_operands(inputs: LSRHeadInputs) -> tuple[Tensor, Tensor]:
    """Valid rows ``[T, D]`` and the weight with V padded to a multiple of 8, ``[V8, D]``."""
    rows = inputs.hidden.detach()[inputs.attention_mask.bool()].contiguous()
    return rows, pad(inputs.weight.detach(), (0, 0, 0, -inputs.weight.size(0) % 8))


def build_gemm(inputs: LSRHeadInputs) -> Runnable:
    """The product alone, chunk by chunk over the vocabulary into one 64 MB buffer that is overwritten."""
    rows, weight = _gemm_operands(inputs)
    width = max(8, GEMM_CHUNK_BYTES // (rows.element_size() * max(rows.size(0), 1)) // 8 * 8)
    chunks = torch.split(weight, width)
    buffer = torch.empty(rows.size(0) * min(width, weight.size(0)), dtype=rows.dtype, device=rows.device)

    def forward() -> None:
        for chunk in chunks:
            out = buffer[: rows.size(0) * chunk.size(0)].view(rows.size(0), chunk.size(0))
            torch.mm(rows, chunk.T, out=out)

    return Runnable(forward, None, f"torch.mm, {len(chunks)} chunks")


def build_gemm_full(inputs: LSRHeadInputs) -> Runnable:
    """The product alone in one call, into a buffer of all logits that is allocated beforehand."""
    rows, weight = _gemm_operands(inputs)
    buffer = torch.empty(rows.size(0), weight.size(0), dtype=rows.dtype, device=rows.device)

    def forward() -> None:
        torch.mm(rows, weight.T, out=buffer)

    return Runnable(forward, None, "torch.mm")


def _eager(inputs: LSRHeadInputs) -> Runnable:
    return inputs.bind(stock_head, "torch")


def _compiled(inputs: LSRHeadInputs) -> Runnable:
    return inputs.bind(compiled(stock_head), "torch.compile")


def _compiled_max_first(inputs: LSRHeadInputs) -> Runnable:
    return inputs.bind(compiled(max_first_head), "torch.compile")


BASELINES = (
    Implementation("eager", _eager, "baseline"),
    Implementation("compile", _compiled, "baseline", default_on=("cuda",)),
    Implementation("compile-max-first", _compiled_max_first, "baseline", default_on=("cuda",)),
    Implementation("gemm", build_gemm, "bare"),
    Implementation("gemm-full", build_gemm_full, "bare"),
)
