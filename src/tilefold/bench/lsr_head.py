"""The benchmark of ``tilefold.ops.lsr_head``: inputs, implementations, fp64 truth, minimum work."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilefold.bench import spec
from tilefold.ops.lsr_head import chosen_impl, lsr_head
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_truth, with_one_answer

# share of positive scores of the variant "2pct", similar to that of a trained SPLADE model
_SPARSE_SHARE = 0.02
# size of the sample of the vocabulary on which the share of positive scores is measured
_N_SAMPLED_ENTRIES = 256
# number of vocabulary entries that are checked for every sequence
_N_CHECKED_ENTRIES = 256
# largest size of fp64 logits in memory
_CHUNK_BYTES = 2**27
# largest size of the logits of one product of the implementation "gemm"
_GEMM_CHUNK_BYTES = 64 * 2**20
# tensor cores are slow if the number of columns of a 16-bit product is not a multiple of this
_GEMM_ALIGNMENT = 8
_FP64_BYTES = 8
_INT16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class HeadInputs(spec.Inputs):
    """Inputs of the head.

    Attributes:
        hidden: hidden states ``[B, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``.
        attention_mask: ``[B, S]``, nonzero for tokens that are not padding.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    attention_mask: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Hidden states, weight and bias."""
        return (self.hidden, self.weight, self.bias)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The attention mask."""
        return (self.attention_mask,)


def _compute_sampled_maxima(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    entries: Tensor,
) -> Tensor:
    """Compute the largest logit of each sequence, for some entries of the vocabulary.

    Args:
        hidden: hidden states ``[B, S, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``.
        mask: ``[B, S]``, nonzero for tokens that are not padding.
        entries: positions of the sampled vocabulary entries ``[C]``.

    Returns:
        Maxima over the tokens that are not padding, fp32 ``[B, C]``.
    """
    logits = hidden.float() @ weight[entries].float().T + bias[entries].float()
    is_padding = ~mask.bool()[:, :, None]
    return logits.masked_fill(is_padding, float("-inf")).amax(dim=1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> HeadInputs:
    """Create random inputs whose logits are close to N(0, 1), with padding of short sequences.

    Args:
        case: shape, dtype and variant. A variant that begins with ``"ragged"`` has sequences of
            different lengths. One that ends with ``"2pct"`` has a bias that makes 2% of the scores
            positive.
        device: the device of the tensors.
        seed: seed of the random numbers.
    """
    B, S, D, V = (case.dims[name] for name in ("B", "S", "D", "V"))
    dtype = spec.DTYPES[case.dtype]
    normal, generator = spec.random_tensors(device, seed)
    hidden = normal(B, S, D).to(dtype)
    weight = normal(V, D).mul_(D**-0.5).to(dtype)  # logits are sums of D products
    bias = normal(V).mul_(0.1)
    mask = torch.ones(B, S, dtype=torch.int64, device=device)
    if case.variant.startswith("ragged"):
        order = torch.randperm(B, generator=generator, device=device)
        lengths = spec.ragged_lengths(B, S, device)[order].clamp(min=1)
        mask = (torch.arange(S, device=device)[None, :] < lengths[:, None]).long()
    n_sampled = min(_N_SAMPLED_ENTRIES, V)
    sample = torch.randint(0, V, (n_sampled,), generator=generator, device=device)
    if case.variant.endswith("2pct"):
        bias -= _choose_bias_reduction(_compute_sampled_maxima(hidden, weight, bias, mask, sample))
    bias = bias.to(dtype)
    # a score is positive if and only if the largest logit is
    is_active = _compute_sampled_maxima(hidden, weight, bias, mask, sample) > 0
    return HeadInputs(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        bias=bias.requires_grad_(),
        attention_mask=mask,
        grad_output=normal(B, V).to(dtype),
        valid_tokens=int(mask.sum()),
        active=is_active.float().mean().item(),
    )


def _choose_bias_reduction(maxima: Tensor) -> Tensor:
    """Return the amount to subtract from the bias so that about 2% of the scores are positive.

    Args:
        maxima: the largest logits ``[B, C]`` of a sample of the vocabulary.

    Returns:
        The smallest of the largest 2% of the maxima, a scalar.
    """
    n_positive = max(1, round(_SPARSE_SHARE * maxima.numel()))
    return maxima.flatten().topk(n_positive).values[-1]


def make_gate(case: spec.BenchCase, inputs: HeadInputs) -> spec.Gate:
    """Create the accuracy gate of a case, which implementations must pass before they are timed.

    The gate compares parts of the scores and gradients with their fp64 values: some vocabulary
    entries for all sequences, and the first and the last sequence for the whole vocabulary.

    A gradient depends on which token has the largest logit, and on whether that logit is positive.
    If rounding may change this for a score, its gradient in ``inputs.grad_output`` is set to 0.

    Args:
        case: shape, dtype and variant of the inputs.
        inputs: inputs of the case, whose ``grad_output`` is changed in place.
    """
    B, V = inputs.grad_output.shape
    device = inputs.grad_output.device
    all_sequences = torch.arange(B, device=device)
    checked_sequences = torch.tensor(sorted({0, B - 1}), device=device)
    n_checked = min(_N_CHECKED_ENTRIES, V)
    evenly_spread = torch.linspace(0, V - 1, n_checked, dtype=torch.float64, device=device)
    checked_entries = evenly_spread.round().long()

    _clear_ambiguous_gradients(inputs, all_sequences, checked_entries)
    for chunk in _split_vocabulary(inputs, checked_sequences):
        _clear_ambiguous_gradients(inputs, checked_sequences, chunk)

    entry_truth = lsr_head_truth(_select_inputs(inputs, all_sequences, checked_entries))
    sequence_scores, dhidden = _exact_sequence_scores_and_gradient(inputs, checked_sequences)

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
                entry_truth["scores"],
            ),
            "out[b, :]": spec.CheckedSlice(select_sequences, sequence_scores),
        },
        gradients={
            "dhidden": spec.CheckedSlice(select_sequences, dhidden),
            "dweight": spec.CheckedSlice(select_entries, entry_truth["dweight"]),
            "dbias": spec.CheckedSlice(select_entries, entry_truth["dbias"]),
        },
    )


def _exact_sequence_scores_and_gradient(
    inputs: HeadInputs,
    sequences: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute all scores of some sequences, and the gradient of their hidden states, in fp64.

    Args:
        inputs: the inputs of the case. Their ``grad_output`` is the gradient of the scores.
        sequences: positions of n sequences.

    Returns:
        The scores ``[n, V]``, and the gradient of the hidden states ``[n, S, D]``.
    """
    score_chunks: list[Tensor] = []
    dhidden = torch.zeros_like(inputs.hidden[sequences], dtype=torch.float64)
    for entries in _split_vocabulary(inputs, sequences):
        problem = _select_inputs(inputs, sequences, entries)
        truth = lsr_head_truth(problem, needs=("hidden",))
        score_chunks.append(truth["scores"])
        dhidden += truth["dhidden"]
    return torch.cat(score_chunks, dim=1), dhidden


def _clear_ambiguous_gradients(inputs: HeadInputs, sequences: Tensor, entries: Tensor) -> None:
    """Set the gradient of a score to 0 if rounding may decide which token receives it.

    Args:
        inputs: the inputs of the case, whose ``grad_output`` changes.
        sequences: positions of the sequences.
        entries: positions of the vocabulary entries.
    """
    # the same inputs, with gradients of 0 where rounding may decide
    unambiguous = with_one_answer(_select_inputs(inputs, sequences, entries))
    inputs.grad_output[sequences[:, None], entries] = unambiguous.dscores


def _split_vocabulary(inputs: HeadInputs, sequences: Tensor) -> Iterator[Tensor]:
    """Split the vocabulary into chunks, so that the fp64 logits of a chunk fit in memory.

    Args:
        inputs: the inputs of the case.
        sequences: positions of the sequences whose logits are computed.

    Yields:
        Positions of consecutive vocabulary entries.
    """
    length = inputs.hidden.size(1)
    n_tokens = sequences.numel() * length
    entries_per_chunk = max(1, _CHUNK_BYTES // (_FP64_BYTES * n_tokens))
    vocab_size = inputs.weight.size(0)
    entries = torch.arange(vocab_size, device=sequences.device)
    yield from torch.split(entries, entries_per_chunk)


def _select_inputs(inputs: HeadInputs, sequences: Tensor, entries: Tensor) -> LSRHeadInputs:
    """Restrict the inputs to some sequences and some vocabulary entries.

    Args:
        inputs: the inputs of the case.
        sequences: positions of the sequences.
        entries: positions of the vocabulary entries.
    """
    return LSRHeadInputs(
        hidden=inputs.hidden.detach()[sequences],
        weight=inputs.weight.detach()[entries],
        bias=inputs.bias.detach()[entries],
        attention_mask=inputs.attention_mask[sequences],
        cu_seqlens=None,
        dscores=inputs.grad_output[sequences[:, None], entries],
    )


def stock_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """Compute scores with the operations of sentence-transformers' SPLADE max pooling.

    Args:
        hidden: hidden states ``[B, S, D]``.
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
    """Compute SPLADE max pooling with the activation ``log1p(relu(x))`` after the maximum.

    The activation is monotonic, so the scores are those of the usual order. It then runs once per
    score instead of once per logit.
    """
    logits = linear(hidden, weight, bias)
    masked = logits * attention_mask.unsqueeze(-1).to(logits.dtype)
    return torch.max(masked, dim=1).values.relu().log1p()


def _build_gemm(inputs: HeadInputs, chunk_bytes: float) -> spec.Runnable:
    """Return the matrix product of the head alone, without pooling, as a call on the inputs.

    Padding is left out. The vocabulary is split into chunks, whose products overwrite one buffer.

    Args:
        inputs: the inputs of the case.
        chunk_bytes: largest size of the buffer; infinity for a buffer that holds all logits.
    """
    tokens = inputs.hidden.detach()[inputs.attention_mask.bool()].contiguous()
    n_tokens = tokens.size(0)
    weight = inputs.weight.detach()
    # rows of zeros up to a multiple of the alignment, with which tensor cores are fast
    weight = pad(weight, (0, 0, 0, -weight.size(0) % _GEMM_ALIGNMENT))
    entry_bytes = tokens.element_size() * max(n_tokens, 1)
    entries_per_chunk = _entries_per_chunk(weight.size(0), entry_bytes, chunk_bytes)
    chunks = torch.split(weight, entries_per_chunk)
    buffer = torch.empty(n_tokens * entries_per_chunk, dtype=tokens.dtype, device=tokens.device)

    def forward() -> None:
        for chunk in chunks:
            logits = buffer[: n_tokens * chunk.size(0)].view(n_tokens, chunk.size(0))
            torch.mm(tokens, chunk.T, out=logits)

    label = "torch.mm" if math.isinf(chunk_bytes) else f"torch.mm, {len(chunks)} chunks"
    return spec.Runnable(forward, None, label)


def _entries_per_chunk(vocab_size: int, entry_bytes: int, chunk_bytes: float) -> int:
    """Return for how many vocabulary entries the logits fit into a chunk of memory.

    Args:
        vocab_size: number of vocabulary entries, a multiple of ``_GEMM_ALIGNMENT``, with which
            tensor cores are fast.
        entry_bytes: bytes of the logits of one vocabulary entry.
        chunk_bytes: largest size of a chunk. It may be infinite.

    Returns:
        A multiple of ``_GEMM_ALIGNMENT``, at least one.
    """
    if vocab_size * entry_bytes <= chunk_bytes:
        return vocab_size
    aligned_bytes = _GEMM_ALIGNMENT * entry_bytes
    return _GEMM_ALIGNMENT * max(1, int(chunk_bytes) // aligned_bytes)


def _lsr_head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, impl: str) -> Tensor:
    """Return the scores of tilefold's head."""
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


def work(case: spec.BenchCase, inputs: HeadInputs, phase: spec.Phase) -> spec.Work:
    """Return a lower bound of the operations and of the memory traffic of the head.

    Forward multiplies every token but padding with every vocabulary entry. It reads hidden states,
    weight and bias once and writes the scores. Training also writes the position of the token with
    the largest logit for each score.

    Backward has no matrix products: a score adds one row of the weight to one token's gradient, and
    one token's hidden state to one row of the weight's gradient. It reads only rows of the weight
    with a positive score in some sequence.

    Args:
        case: the shape: ``B`` sequences, hidden states of width ``D``, ``V`` vocabulary entries.
        inputs: tensors of the case, the number of tokens that are not padding (``valid_tokens``),
            and the share of positive scores (``active``).
        phase: forward, or forward and backward.
    """
    B, D, V = (case.dims[name] for name in ("B", "D", "V"))
    n_scores = B * V
    item_bytes = inputs.hidden.element_size()
    hidden_bytes = item_bytes * inputs.valid_tokens * D
    weight_bytes = item_bytes * V * D
    bias_bytes = item_bytes * V
    score_bytes = item_bytes * n_scores
    # a logit is a sum of D products
    flops = 2.0 * inputs.valid_tokens * D * V
    forward_bytes = float(hidden_bytes + weight_bytes + bias_bytes + score_bytes)
    if phase == "forward":
        return spec.Work(flops, forward_bytes)

    winner_bytes = _INT16_BYTES * n_scores  # positions of the tokens with the largest logits
    # A row of the weight is read if its score is positive in at least one of B sequences. The
    # sequences are assumed to be independent.
    active_share = inputs.active or 0.0
    n_active_rows = V * (1 - (1 - active_share) ** B)
    backward_reads = (
        2 * score_bytes  # scores, which determine the slope, and their gradients
        + winner_bytes
        + hidden_bytes
        + item_bytes * n_active_rows * D
    )
    # gradients of hidden states (also of padding), weight and bias
    backward_writes = item_bytes * sum(leaf.numel() for leaf in inputs.leaves)
    return spec.Work(flops, forward_bytes + winner_bytes + backward_reads + backward_writes)


def min_bytes(case: spec.BenchCase, impl: str) -> int:
    """Return a lower bound of the memory of an implementation.

    Args:
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        Bytes of hidden states, weight, and all copies of the logits ``[B, S, V]`` that the
        implementation holds at a time.
    """
    B, S, D, V = (case.dims[name] for name in ("B", "S", "D", "V"))
    copies_of_logits = {
        "eager": 3,  # in training: logits, masked logits and activations
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
    min_bytes=min_bytes,
)
