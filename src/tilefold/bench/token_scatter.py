"""The benchmark of ``tilefold.ops.token_scatter``: shapes, implementations, truth, least work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold._internal.csr import to_csr
from tilefold.bench import spec
from tilefold.ops.token_scatter import chosen_impl, token_scatter, token_scatter_sparse

# a function of weights, token ids, ignored ids and the size of the vocabulary that returns scores
Scatter = Callable[[Tensor, Tensor, Tensor, int], Tensor]

# ids of XLM-R's special tokens
_CLS_ID, _PAD_ID, _SEP_ID, _UNK_ID = 0, 1, 2, 3
SPECIAL_IDS = (_CLS_ID, _PAD_ID, _SEP_ID, _UNK_ID)
# of a column in a CSR matrix
_INT64_BYTES = 8


@dataclass(frozen=True)
class CsrInputs(spec.Inputs):
    """Inputs of a case whose scores are returned in CSR form, for encoding without a gradient."""

    def bind(self, call: Scatter, label: str, train: Scatter | None = None) -> spec.Runnable:
        """Bind a function that returns dense scores, and convert them to CSR.

        Args:
            call: the function.
            label: what actually runs.
            train: not used.
        """

        def scatter_to_csr(weights: Tensor, ids: Tensor, ignored: Tensor, vocab: int) -> Tensor:
            return to_csr(call(weights, ids, ignored, vocab))

        runnable = super().bind(scatter_to_csr, label)
        return spec.Runnable(runnable.forward, label=f"{label}, to_sparse_csr")


def zipf_ids(shape: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """Draw ids that are as frequent as the words of a text.

    Args:
        shape: of the result.
        vocab: number of ids. The r-th id is drawn with a probability that is proportional to about
            1 / r (Zipf's law).
        generator: of the random numbers.

    Returns:
        int64 ids from 0 to ``vocab - 1``.
    """
    # the inverse of the distribution function log(r) / log(vocab + 1)
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return ((vocab + 1) ** uniform - 1).long().clamp_(0, vocab - 1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Create random weights, half of them negative, of tokens that are as frequent as words.

    Every sequence begins with CLS and ends with SEP.

    Args:
        case: its variant ``"ragged"`` has sequences that are padded to about three times their
            length. ``"csr"`` has scores in CSR form.
        device: of the tensors.
        seed: of the random numbers.

    Returns:
        The leaf is the weights ``[B, S]``. The constants are the token ids ``[B, S]``, the ids
        that do not score, and the size of the vocabulary.
    """
    batch, length, vocab = (case.dims[name] for name in "BSV")
    normal, generator = spec.random_tensors(device, seed)
    weights = normal(batch, length).to(spec.DTYPES[case.dtype])
    n_special = len(SPECIAL_IDS)
    ids = zipf_ids((batch, length), vocab - n_special, generator) + n_special
    lengths = torch.full((batch,), length, device=device)
    if case.variant == "ragged":
        lengths = spec.ragged_lengths(batch, length, device).clamp(min=2)
    positions = torch.arange(length, device=device)
    ids[:, 0] = _CLS_ID
    ids = torch.where(positions == lengths[:, None] - 1, _SEP_ID, ids)
    ids = torch.where(positions >= lengths[:, None], _PAD_ID, ids)
    ignored = torch.tensor(SPECIAL_IDS, device=device)
    counts = ~torch.isin(ids, ignored)
    # the scores [B, V], numbered row by row, that some positive weight of a token reaches
    score_positions = torch.arange(batch, device=device)[:, None] * vocab + ids
    active_scores = torch.unique(score_positions[counts & (weights > 0)])
    inputs_class = CsrInputs if case.variant == "csr" else spec.Inputs
    return inputs_class(
        leaves=(weights.requires_grad_(),),
        constants=(ids, ignored, vocab),
        grad_output=normal(batch, vocab).to(weights.dtype),
        valid_tokens=int(counts.sum()),
        active=active_scores.numel() / (batch * vocab),
    )


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Compute the ground truth of the first and the last sequence in fp64.

    Where two tokens of one id have the same weight, either may receive the gradient. Such scores
    get the gradient 0 in ``inputs.grad_output``, which this function changes.
    """
    checked_rows = sorted({0, inputs.grad_output.size(0) - 1})
    scores = []
    dweights = []
    for row in checked_rows:
        row_scores, row_dweights = _sequence_truth(inputs, row)
        scores.append(row_scores)
        dweights.append(row_dweights)

    def select_rows(tensor: Tensor) -> Tensor:
        return tensor[checked_rows]

    return spec.Gate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={"out": spec.CheckedSlice(select_rows, torch.stack(scores))},
        gradients={"dweights": spec.CheckedSlice(select_rows, torch.stack(dweights))},
    )


def _sequence_truth(inputs: spec.Inputs, row: int) -> tuple[Tensor, Tensor]:
    """Compute one sequence in fp64, over the ids that it has instead of the whole vocabulary.

    Scores with a tie get the gradient 0 in ``inputs.grad_output``.

    Args:
        inputs: the inputs of the case.
        row: position of the sequence.

    Returns:
        The scores ``[V]``, and the gradient of the weights ``[S]``.
    """
    grad_output = inputs.grad_output
    all_ids, ignored, vocab = inputs.constants
    ids = all_ids[row]
    is_valid = ~torch.isin(ids, ignored)
    weights = inputs.leaves[0].detach()[row].double()
    # the ids of the sequence, and for each token the position of its id among them
    unique_ids, id_positions = torch.unique(ids, return_inverse=True)

    columns = torch.arange(unique_ids.numel(), device=ids.device)
    has_id = (id_positions[:, None] == columns) & is_valid[:, None]  # [S, unique ids]
    weights_by_id = torch.where(has_id, weights[:, None], float("-inf"))
    largest = weights_by_id.topk(min(2, weights.numel()), dim=0).values
    if largest.size(0) == 2:
        is_tied = (largest[0] == largest[1]) & (largest[0] > 0)
        grad_output[row, unique_ids[is_tied]] = 0

    leaf = weights[None].requires_grad_()
    unique_scores = token_scatter(
        leaf,
        id_positions[None],
        unique_ids.numel(),
        attention_mask=is_valid[None],
        impl="reference",
    )
    unique_gradient = grad_output[row, unique_ids].double()[None]
    (dweights,) = torch.autograd.grad(unique_scores, leaf, unique_gradient)
    scores = torch.zeros(vocab, dtype=torch.float64, device=ids.device)
    scores[unique_ids] = unique_scores.detach()[0]
    return scores, dweights[0]


def membership_scatter(
    weights: Tensor,
    input_ids: Tensor,
    ignored: Tensor,
    vocab_size: int,
) -> Tensor:
    """Compute scores as FlagEmbedding's training of BGE-M3 and tevatron's uniCOIL do.

    Every token is scattered into a row of the vocabulary of its own, and the maximum is taken over
    the tokens.

    Args:
        weights: ``[B, S]``.
        input_ids: ``[B, S]``.
        ignored: ids that do not score.
        vocab_size: V.

    Returns:
        Scores ``[B, V]``.
    """
    token_scores = torch.zeros(
        *input_ids.shape,
        vocab_size,
        dtype=weights.dtype,
        device=weights.device,
    )
    token_scores = torch.scatter(
        token_scores,
        dim=-1,
        index=input_ids.unsqueeze(-1),
        src=weights.relu().unsqueeze(-1),
    )
    return torch.max(token_scores, dim=1).values.index_fill_(1, ignored, 0)


def reduced_scatter(weights: Tensor, input_ids: Tensor, ignored: Tensor, vocab_size: int) -> Tensor:
    """Compute scores as FlagEmbedding's inference of BGE-M3 does, by ``scatter_reduce``.

    Ignored tokens are cleared before it, so that they have no gradient.

    Args:
        weights: ``[B, S]``.
        input_ids: ``[B, S]``.
        ignored: ids that do not score.
        vocab_size: V.

    Returns:
        Scores ``[B, V]``.
    """
    counted = weights.relu().masked_fill(torch.isin(input_ids, ignored), 0)
    scores = torch.zeros(input_ids.size(0), vocab_size, dtype=weights.dtype, device=weights.device)
    return scores.scatter_reduce(dim=-1, index=input_ids, src=counted, reduce="amax")


def _build_membership(inputs: spec.Inputs, compiled: bool) -> spec.Runnable:
    """Bind :func:`membership_scatter`.

    Raises:
        spec.NotApplicable: for CSR scores.
    """
    if isinstance(inputs, CsrInputs):
        raise spec.NotApplicable("nobody makes CSR scores in this way")
    return _bind_torch(inputs, membership_scatter, compiled)


def _build_reduced(inputs: spec.Inputs, compiled: bool) -> spec.Runnable:
    """Bind :func:`reduced_scatter`."""
    return _bind_torch(inputs, reduced_scatter, compiled)


def _bind_torch(inputs: spec.Inputs, scatter: Scatter, compiled: bool) -> spec.Runnable:
    """Bind a function of torch operations, under ``torch.compile`` if ``compiled``."""
    if compiled:
        return inputs.bind(spec.compiled(scatter), "torch.compile")
    return inputs.bind(scatter, "torch")


def _build_sparse(inputs: spec.Inputs) -> spec.Runnable:
    """Bind tilefold's scatter that returns CSR scores.

    Raises:
        spec.NotApplicable: for dense scores.
    """
    if not isinstance(inputs, CsrInputs):
        raise spec.NotApplicable("token_scatter_sparse returns CSR scores")
    (weights,) = inputs.leaves
    ids, _, vocab = inputs.constants

    def forward() -> Tensor:
        with torch.no_grad():
            return token_scatter_sparse(weights, ids, vocab, ignore_ids=SPECIAL_IDS)

    return spec.Runnable(forward, label="torch")


def _token_scatter(weights: Tensor, ids: Tensor, _: Tensor, vocab: int, impl: str) -> Tensor:
    """Call tilefold's scatter with the leaf and the constants of a case.

    The ids that do not score are constants of the Python function, not the tensor.
    """
    return token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, impl=impl)


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_token_scatter, chosen_impl, tiled_on=("cuda",)),
    spec.Implementation("tilefold-csr", _build_sparse, "ours"),
    spec.Implementation(
        "scatter-reduce",
        functools.partial(_build_reduced, compiled=False),
        "baseline",
    ),
    spec.gpu_implementation(
        "scatter-reduce-compile",
        functools.partial(_build_reduced, compiled=True),
        "baseline",
    ),
    spec.Implementation(
        "membership",
        functools.partial(_build_membership, compiled=False),
        "baseline",
    ),
    spec.gpu_implementation(
        "membership-compile",
        functools.partial(_build_membership, compiled=True),
        "baseline",
    ),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Return the least work of a scatter: operations, and bytes that are read and written.

    Forward reads every id and every weight that counts, compares each weight once, and writes the
    scores: all of them, or in CSR form the positive ones with their columns. Training also writes
    a byte per token that says whether its weight is the score of its id. Backward reads these and
    the gradients of positive scores, and writes a gradient for each token.

    Args:
        case: unused, since the tensors have all sizes.
        inputs: tensors of the case, the number of tokens that count, and the share of positive
            scores.
        phase: forward, or forward and backward.
    """
    (weights,) = inputs.leaves
    input_ids = inputs.constants[0]
    item_bytes = weights.element_size()
    n_tokens = weights.numel()
    n_scores = inputs.grad_output.numel()
    n_positive_scores = (inputs.active or 0.0) * n_scores

    read_bytes = input_ids.numel() * input_ids.element_size() + item_bytes * inputs.valid_tokens
    if isinstance(inputs, CsrInputs):
        score_bytes = (item_bytes + _INT64_BYTES) * n_positive_scores  # value and column
    else:
        score_bytes = item_bytes * n_scores
    total_bytes = float(read_bytes + score_bytes)
    if phase == "forward_backward":
        winner_bytes = n_tokens  # one byte each
        gradient_bytes = item_bytes * (n_positive_scores + n_tokens)
        # winners are written by forward and read by backward
        total_bytes += 2 * winner_bytes + gradient_bytes
    n_comparisons = float(inputs.valid_tokens)
    return spec.Work(n_comparisons, total_bytes)


def needs_bytes(case: spec.BenchCase, impl: str) -> int:
    """Estimate the memory of an implementation from below.

    Args:
        case: the shape.
        impl: name of the implementation.

    Returns:
        Bytes of the scores ``[B, V]``, and of all tensors ``[B, S, V]`` that the implementation
        stores, which are fp64 in the reference.
    """
    batch, length, vocab = (case.dims[name] for name in "BSV")
    item_bytes = spec.DTYPES[case.dtype].itemsize
    score_bytes = batch * vocab * item_bytes
    token_score_bytes = batch * length * vocab * item_bytes
    if impl == "reference":
        token_score_bytes = batch * length * vocab * torch.float64.itemsize
    # tensors of that shape that are alive at once
    copies_of_token_scores = {"membership": 3, "membership-compile": 2, "reference": 1}
    return score_bytes + copies_of_token_scores.get(impl, 0) * token_score_bytes


SPEC = spec.BenchSpec(
    op="token_scatter",
    implementations=IMPLEMENTATIONS,
    baseline="scatter-reduce",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"B": 2, "S": 8, "V": 96},
    work=work,
    needs_bytes=needs_bytes,
)
