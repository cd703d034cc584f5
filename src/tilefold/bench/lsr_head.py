"""The benchmark of ``tilefold.ops.lsr_head``: shapes, implementations, ground truth and least work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilefold.bench import spec
from tilefold.ops.lsr_head import chosen_impl, lsr_head
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_truth, with_one_answer

_SPARSE_ACTIVE = (
    0.02  # share of positive scores that "2pct" aims at, that of a trained SPLADE model
)
_QUANTILE_COLUMNS = 256
GEMM_CHUNK_BYTES = 64 * 2**20
COLUMNS = 256  # vocabulary entries that are checked for every sequence
CHUNK_BYTES = 2**27  # fp64 logits held at a time


def _sampled_maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    columns: Tensor,
) -> Tensor:
    """``[B, C]`` fp32 maxima over valid tokens of the logits of some vocabulary entries."""
    logits = hidden.float() @ weight[columns].float().T + bias[columns].float()
    return logits.masked_fill(~mask.bool()[:, :, None], float("-inf")).amax(dim=1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Random ``hidden [B, S, D]``, ``weight [V, D]``, ``bias [V]`` and ``attention_mask [B, S]``.

    Logits are close to N(0, 1), in padding too. ``"2pct"`` shifts the bias until 2% of a sample of
    scores are positive.
    """
    B, S, D, V = (case.dims[name] for name in "BSDV")
    dtype = spec.DTYPES[case.dtype]
    normal, generator = spec.random_tensors(device, seed)
    hidden = normal(B, S, D).to(dtype)
    weight = normal(V, D).mul_(D**-0.5).to(dtype)
    bias = normal(V).mul_(0.1)
    mask = torch.ones(B, S, dtype=torch.int64, device=device)
    if case.variant.startswith("ragged"):
        order = torch.randperm(B, generator=generator, device=device)
        lengths = spec.ragged_lengths(B, S, device)[order].clamp(min=1)
        mask = (torch.arange(S, device=device)[None, :] < lengths[:, None]).long()
    columns = torch.randint(0, V, (min(_QUANTILE_COLUMNS, V),), generator=generator, device=device)
    if case.variant.endswith("2pct"):
        maxima = _sampled_maxima(hidden, weight, bias, mask, columns)
        kept = max(1, round(_SPARSE_ACTIVE * maxima.numel()))
        bias -= maxima.flatten().topk(kept).values[-1]
    bias = bias.to(dtype)
    active = (_sampled_maxima(hidden, weight, bias, mask, columns) > 0).float().mean().item()
    leaves = (hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    return spec.Inputs(leaves, (mask,), normal(B, V).to(dtype), int(mask.sum()), active)


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Some vocabulary entries over all sequences, and two sequences over the whole vocabulary, in
    fp64.

    The gradient becomes zero where two logits, or a logit and zero, differ by less than the order
    of evaluation does.
    """
    B, V = inputs.grad_output.shape
    device = inputs.grad_output.device
    every = torch.arange(B, device=device)
    few = torch.tensor(sorted({0, B - 1}), device=device)
    columns = (
        torch.linspace(0, V - 1, min(COLUMNS, V), dtype=torch.float64, device=device).round().long()
    )
    for rows, some in [(every, columns), *((few, chunk) for chunk in _chunks(inputs, few))]:
        inputs.grad_output[rows[:, None], some] = with_one_answer(_part(inputs, rows, some)).dscores
    truth = lsr_head_truth(_part(inputs, every, columns))
    scores: list[Tensor] = []
    dhidden = torch.zeros_like(inputs.leaves[0][few], dtype=torch.float64)
    for chunk in _chunks(inputs, few):
        part = lsr_head_truth(_part(inputs, few, chunk), needs=("hidden",))
        scores.append(part["scores"])
        dhidden += part["dhidden"]
    outputs = {
        "out[:, v]": spec.Part(lambda t: t[:, columns], truth["scores"]),
        "out[b, :]": spec.Part(lambda t: t[few], torch.cat(scores, dim=1)),
    }
    gradients = {"dhidden": spec.Part(lambda t: t[few], dhidden)}
    gradients |= {
        name: spec.Part(lambda t: t[columns], truth[name]) for name in ("dweight", "dbias")
    }
    return spec.Gate(inputs, case.dtype, outputs, gradients)


def _chunks(inputs: spec.Inputs, sequences: Tensor) -> Iterator[Tensor]:
    """The vocabulary in parts whose logits for these sequences take ``CHUNK_BYTES``."""
    width = max(1, CHUNK_BYTES // (8 * sequences.numel() * inputs.leaves[0].size(1)))
    yield from torch.split(torch.arange(inputs.grad_output.size(1), device=sequences.device), width)


def _part(inputs: spec.Inputs, rows: Tensor, columns: Tensor) -> LSRHeadInputs:
    """Some sequences and vocabulary entries, as a problem of their own."""
    hidden, weight, bias = (leaf.detach() for leaf in inputs.leaves)
    grad = inputs.grad_output[rows[:, None], columns]
    return LSRHeadInputs(
        hidden[rows],
        weight[columns],
        bias[columns],
        inputs.others[0][rows],
        None,
        grad,
    )


def stock_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """The operations of a masked-LM decoder followed by sentence-transformers' SPLADE max pooling,
    ``[B, V]``.
    """
    logits = linear(hidden, weight, bias)
    masked = (logits * attention_mask.unsqueeze(-1).to(logits.dtype)).relu_()
    activated = masked.log1p() if torch.is_grad_enabled() else masked.log1p_()
    return torch.max(activated, dim=1).values


def max_first_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """The stock head with the activation moved behind the maximum, with which it commutes."""
    logits = linear(hidden, weight, bias)
    return (
        torch.max(logits * attention_mask.unsqueeze(-1).to(logits.dtype), dim=1)
        .values.relu()
        .log1p()
    )


def _gemm(chunk_bytes: float) -> spec.Build:
    """The product alone, chunk by chunk over the vocabulary into one buffer that is overwritten."""

    def build(inputs: spec.Inputs) -> spec.Runnable:
        hidden, weight, _ = (leaf.detach() for leaf in inputs.leaves)
        rows = hidden[inputs.others[0].bool()].contiguous()
        weight = pad(weight, (0, 0, 0, -weight.size(0) % 8))
        width = weight.size(0)
        if chunk_bytes < rows.element_size() * rows.size(0) * width:
            width = max(
                8,
                int(chunk_bytes) // (rows.element_size() * max(rows.size(0), 1)) // 8 * 8,
            )
        chunks = torch.split(weight, width)
        buffer = torch.empty(rows.size(0) * width, dtype=rows.dtype, device=rows.device)

        def forward() -> None:
            for chunk in chunks:
                out = buffer[: rows.size(0) * chunk.size(0)].view(rows.size(0), chunk.size(0))
                torch.mm(rows, chunk.T, out=out)

        label = "torch.mm" if chunk_bytes == float("inf") else f"torch.mm, {len(chunks)} chunks"
        return spec.Runnable(forward, None, label)

    return build


IMPLEMENTATIONS = (
    *spec.ours(
        lambda h, w, b, mask, impl: lsr_head(h, w, b, attention_mask=mask, impl=impl),
        chosen_impl,
    ),
    spec.Implementation("eager", spec.bound(stock_head), "baseline"),
    spec.on_gpu("compile", spec.bound_compiled(stock_head), "baseline"),
    spec.on_gpu(
        "compile-max-first",
        spec.bound_compiled(max_first_head),
        "baseline",
    ),
    spec.Implementation("gemm", _gemm(GEMM_CHUNK_BYTES), "bare"),
    spec.Implementation("gemm-full", _gemm(float("inf")), "bare"),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Least work: forward multiplies valid tokens with the vocabulary; backward moves rows, once
    each.
    """
    B, D, V = case.dims["B"], case.dims["D"], case.dims["V"]
    item, tokens = inputs.grad_output.element_size(), inputs.valid_tokens
    flops = 2.0 * tokens * D * V
    nbytes = float(item * (tokens * D + V * D + V + B * V))
    if phase == "forward_backward":
        active_rows = V * (1 - (1 - (inputs.active or 0.0)) ** B)
        nbytes += 2 * B * V  # the winners, written by forward
        nbytes += B * V * (2 * item + 2) + item * D * (tokens + active_rows)
        nbytes += item * sum(leaf.numel() for leaf in inputs.leaves)
    return spec.Work(flops, nbytes)


def _needs(case: spec.BenchCase, impl: str) -> int:
    B, S, D, V = (case.dims[name] for name in "BSDV")
    item = spec.DTYPES[case.dtype].itemsize
    copies = {"eager": 3, "compile": 2, "compile-max-first": 2, "reference": 4, "gemm-full": 1}
    return item * (copies.get(impl, 0) * B * S * V + B * S * D + V * D)


PROBE = {"B": 2, "S": 8, "D": 32, "V": 96}  # too small to matter
SPEC = spec.BenchSpec(
    "lsr_head",
    IMPLEMENTATIONS,
    "eager",
    make_inputs,
    make_gate,
    PROBE,
    work,
    _needs,
)
