"""The benchmark of ``tilefold.ops.lsr_head``: shapes, implementations, truth, least work."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilefold.bench import spec
from tilefold.ops.lsr_head import chosen_impl, lsr_head
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_truth, with_one_answer

# share of positive scores that variant "2pct" aims at, as of a trained SPLADE model
_SPARSE_SHARE = 0.02
# vocabulary entries that the share of positive scores is measured on
_N_SAMPLED_ENTRIES = 256
# vocabulary entries that are checked for every sequence
_N_CHECKED_ENTRIES = 256
# fp64 logits in memory at a time
_CHUNK_BYTES = 2**27
# logits of one product of the implementation "gemm"
_GEMM_CHUNK_BYTES = 64 * 2**20
# libraries want the number of columns of a product to be a multiple of this
_GEMM_ALIGNMENT = 8
_FP64_BYTES = 8
_INT16_BYTES = 2


def _sampled_maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    entries: Tensor,
) -> Tensor:
    """Compute the largest logit of each sequence for some vocabulary entries.

    Args:
        hidden: ``[B, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``.
        mask: ``[B, S]``, nonzero for tokens that are not padding.
        entries: vocabulary entries ``[C]``.

    Returns:
        Maxima over the valid tokens, fp32 ``[B, C]``.
    """
    logits = hidden.float() @ weight[entries].float().T + bias[entries].float()
    is_padding = ~mask.bool()[:, :, None]
    return logits.masked_fill(is_padding, float("-inf")).amax(dim=1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Create random inputs with logits close to N(0, 1), in padding too.

    Args:
        case: its variant may begin with ``"ragged"``, for sequences of different lengths. It may
            end with ``"2pct"``, for a bias that makes 2% of the scores positive.
        device: of the tensors.
        seed: of the random numbers.

    Returns:
        The leaves are hidden states ``[B, S, D]``, the weight ``[V, D]`` and the bias ``[V]``. The
        constant is the attention mask ``[B, S]``.
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
    # the share of positive scores is measured on a sample of the vocabulary
    n_sampled = min(_N_SAMPLED_ENTRIES, V)
    entries = torch.randint(0, V, (n_sampled,), generator=generator, device=device)
    if case.variant.endswith("2pct"):
        # A score is positive if the largest logit of its sequence is. The bias is lowered until
        # this holds for 2% of the sampled maxima.
        maxima = _sampled_maxima(hidden, weight, bias, mask, entries)
        n_positive = max(1, round(_SPARSE_SHARE * maxima.numel()))
        smallest_positive = maxima.flatten().topk(n_positive).values[-1]
        bias -= smallest_positive
    bias = bias.to(dtype)
    is_active = _sampled_maxima(hidden, weight, bias, mask, entries) > 0
    return spec.Inputs(
        leaves=(hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()),
        constants=(mask,),
        grad_output=normal(B, V).to(dtype),
        valid_tokens=int(mask.sum()),
        active=is_active.float().mean().item(),
    )


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Compute slices of the scores and gradients in fp64.

    The slices are some vocabulary entries for all sequences, and the first and the last sequence
    for the whole vocabulary. A gradient depends on which token has the largest logit, and on
    whether that is positive. Scores for which rounding may decide this get the gradient 0 in
    ``inputs.grad_output``, which this function changes.
    """
    B, V = inputs.grad_output.shape
    device = inputs.grad_output.device
    all_sequences = torch.arange(B, device=device)
    checked_sequences = torch.tensor(sorted({0, B - 1}), device=device)
    n_checked = min(_N_CHECKED_ENTRIES, V)
    evenly_spread = torch.linspace(0, V - 1, n_checked, dtype=torch.float64, device=device)
    checked_entries = evenly_spread.round().long()

    _clear_ambiguous_gradients(inputs, all_sequences, checked_entries)
    for chunk in _vocabulary_chunks(inputs, checked_sequences):
        _clear_ambiguous_gradients(inputs, checked_sequences, chunk)

    truth = lsr_head_truth(_subproblem(inputs, all_sequences, checked_entries))
    score_chunks: list[Tensor] = []
    dhidden = torch.zeros_like(inputs.leaves[0][checked_sequences], dtype=torch.float64)
    for chunk in _vocabulary_chunks(inputs, checked_sequences):
        chunk_problem = _subproblem(inputs, checked_sequences, chunk)
        chunk_truth = lsr_head_truth(chunk_problem, needs=("hidden",))
        score_chunks.append(chunk_truth["scores"])
        dhidden += chunk_truth["dhidden"]

    def select_entries(tensor: Tensor) -> Tensor:
        return tensor[checked_entries]

    def select_sequences(tensor: Tensor) -> Tensor:
        return tensor[checked_sequences]

    return spec.Gate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={
            "out[:, v]": spec.CheckedSlice(
                lambda scores: scores[:, checked_entries],
                truth["scores"],
            ),
            "out[b, :]": spec.CheckedSlice(select_sequences, torch.cat(score_chunks, dim=1)),
        },
        gradients={
            "dhidden": spec.CheckedSlice(select_sequences, dhidden),
            "dweight": spec.CheckedSlice(select_entries, truth["dweight"]),
            "dbias": spec.CheckedSlice(select_entries, truth["dbias"]),
        },
    )


def _clear_ambiguous_gradients(inputs: spec.Inputs, sequences: Tensor, entries: Tensor) -> None:
    """Set the gradient of scores to 0 where rounding may decide which token receives it.

    Args:
        inputs: the inputs of the case, whose ``grad_output`` changes.
        sequences: positions of the sequences.
        entries: vocabulary entries.
    """
    unambiguous = with_one_answer(_subproblem(inputs, sequences, entries))
    inputs.grad_output[sequences[:, None], entries] = unambiguous.dscores


def _vocabulary_chunks(inputs: spec.Inputs, sequences: Tensor) -> Iterator[Tensor]:
    """Split the vocabulary so that the fp64 logits of some sequences fit into ``_CHUNK_BYTES``.

    Args:
        inputs: the inputs of the case.
        sequences: positions of the sequences.

    Yields:
        Consecutive vocabulary entries.
    """
    n_tokens = sequences.numel() * inputs.leaves[0].size(1)
    entries_per_chunk = max(1, _CHUNK_BYTES // (_FP64_BYTES * n_tokens))
    vocab_size = inputs.grad_output.size(1)
    entries = torch.arange(vocab_size, device=sequences.device)
    yield from torch.split(entries, entries_per_chunk)


def _subproblem(inputs: spec.Inputs, sequences: Tensor, entries: Tensor) -> LSRHeadInputs:
    """Return the problem of some sequences and vocabulary entries.

    Args:
        inputs: the inputs of the case.
        sequences: positions of the sequences.
        entries: vocabulary entries.
    """
    hidden, weight, bias = (leaf.detach() for leaf in inputs.leaves)
    (mask,) = inputs.constants
    return LSRHeadInputs(
        hidden=hidden[sequences],
        weight=weight[entries],
        bias=bias[entries],
        attention_mask=mask[sequences],
        cu_seqlens=None,
        dscores=inputs.grad_output[sequences[:, None], entries],
    )


def stock_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """Compute scores with the operations of sentence-transformers' SPLADE max pooling.

    Args:
        hidden: ``[B, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``.
        attention_mask: ``[B, S]``.

    Returns:
        Scores ``[B, V]``.
    """
    logits = linear(hidden, weight, bias)
    masked = (logits * attention_mask.unsqueeze(-1).to(logits.dtype)).relu_()
    activated = masked.log1p() if torch.is_grad_enabled() else masked.log1p_()
    return torch.max(activated, dim=1).values


def max_first_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """Compute the scores of :func:`stock_head` with the activation after the maximum.

    Both are monotonic, so they commute, and the activation runs once per score.
    """
    logits = linear(hidden, weight, bias)
    masked = logits * attention_mask.unsqueeze(-1).to(logits.dtype)
    return torch.max(masked, dim=1).values.relu().log1p()


def _build_gemm(inputs: spec.Inputs, chunk_bytes: float) -> spec.Runnable:
    """Bind the product of the valid tokens and the vocabulary alone.

    Products of chunks of the vocabulary overwrite one buffer.

    Args:
        inputs: the inputs of the case.
        chunk_bytes: size of the buffer. Infinity for one product into a buffer for all logits.
    """
    hidden, weight, _ = (leaf.detach() for leaf in inputs.leaves)
    (mask,) = inputs.constants
    rows = hidden[mask.bool()].contiguous()
    n_rows = rows.size(0)
    padding = -weight.size(0) % _GEMM_ALIGNMENT
    weight = pad(weight, (0, 0, 0, padding))
    entries_per_chunk = weight.size(0)
    if chunk_bytes < rows.element_size() * n_rows * weight.size(0):
        entries = int(chunk_bytes) // (rows.element_size() * max(n_rows, 1))
        aligned_entries = entries // _GEMM_ALIGNMENT * _GEMM_ALIGNMENT
        entries_per_chunk = max(_GEMM_ALIGNMENT, aligned_entries)
    chunks = torch.split(weight, entries_per_chunk)
    buffer = torch.empty(n_rows * entries_per_chunk, dtype=rows.dtype, device=rows.device)

    def forward() -> None:
        for chunk in chunks:
            logits = buffer[: n_rows * chunk.size(0)].view(n_rows, chunk.size(0))
            torch.mm(rows, chunk.T, out=logits)

    label = "torch.mm" if math.isinf(chunk_bytes) else f"torch.mm, {len(chunks)} chunks"
    return spec.Runnable(forward, None, label)


def _lsr_head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, impl: str) -> Tensor:
    """Call tilefold's head with the leaves and the constant of a case."""
    return lsr_head(hidden, weight, bias, attention_mask=mask, impl=impl)


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_lsr_head, chosen_impl),
    spec.Implementation("eager", spec.bound(stock_head), "baseline"),
    spec.gpu_implementation("compile", spec.bound_compiled(stock_head), "baseline"),
    spec.gpu_implementation("compile-max-first", spec.bound_compiled(max_first_head), "baseline"),
    spec.Implementation(
        "gemm",
        functools.partial(_build_gemm, chunk_bytes=_GEMM_CHUNK_BYTES),
        "bare",
    ),
    spec.Implementation(
        "gemm-full",
        functools.partial(_build_gemm, chunk_bytes=math.inf),
        "bare",
    ),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Return the least work of the head: operations, and bytes that are read and written.

    Forward multiplies every valid token with every vocabulary entry. It reads hidden states,
    weight and bias once and writes the scores. Training also writes the position of the token with
    the largest logit for each score. The backward pass has no products: a score adds one row of
    the weight to one token's gradient, and one token's hidden state to one row of the weight's
    gradient. It reads only rows of the weight with a positive score in some sequence.

    Args:
        case: the shape: ``B`` sequences, ``D`` numbers of a hidden state, ``V`` vocabulary entries.
        inputs: tensors of the case, the number of valid tokens, and the share of positive scores.
        phase: forward, or forward and backward.
    """
    B, D, V = (case.dims[name] for name in "BDV")
    n_scores = B * V
    item_bytes = inputs.grad_output.element_size()
    hidden_bytes = item_bytes * inputs.valid_tokens * D
    weight_bytes = item_bytes * V * D
    bias_bytes = item_bytes * V
    score_bytes = item_bytes * n_scores
    # a multiplication and an addition for each number of the hidden states and each entry
    flops = 2.0 * inputs.valid_tokens * D * V
    forward_bytes = float(hidden_bytes + weight_bytes + bias_bytes + score_bytes)
    if phase == "forward":
        return spec.Work(flops, forward_bytes)

    winner_bytes = _INT16_BYTES * n_scores  # positions within a sequence
    # A row of the weight is read if its score is positive in at least one of B sequences. The
    # sequences are assumed to be independent.
    active_share = inputs.active or 0.0
    n_active_rows = V * (1 - (1 - active_share) ** B)
    backward_reads = (
        2 * score_bytes  # scores, from which the slope follows, and their gradients
        + winner_bytes
        + hidden_bytes
        + item_bytes * n_active_rows * D
    )
    # gradients of hidden states (of padding too), weight and bias
    backward_writes = item_bytes * sum(leaf.numel() for leaf in inputs.leaves)
    return spec.Work(flops, forward_bytes + winner_bytes + backward_reads + backward_writes)


def needs_bytes(case: spec.BenchCase, impl: str) -> int:
    """Estimate the memory of an implementation from below.

    Args:
        case: the shape.
        impl: name of the implementation.

    Returns:
        Bytes of hidden states and weight, and of all logits ``[B, S, V]`` as often as the
        implementation stores them.
    """
    B, S, D, V = (case.dims[name] for name in "BSDV")
    # in units of one tensor of that shape in the dtype of the case
    copies_of_logits = {
        "eager": 3,
        "compile": 2,
        "compile-max-first": 2,
        "reference": 4,
        "gemm-full": 1,
    }
    n_logits = copies_of_logits.get(impl, 0) * B * S * V
    n_operands = B * S * D + V * D
    return spec.DTYPES[case.dtype].itemsize * (n_logits + n_operands)


SPEC = spec.BenchSpec(
    op="lsr_head",
    implementations=IMPLEMENTATIONS,
    baseline="eager",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"B": 2, "S": 8, "D": 32, "V": 96},
    work=work,
    needs_bytes=needs_bytes,
)
