"""The benchmark of ``tilefold.ops.token_scatter``: inputs, implementations, truth, minimum work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold._internal.csr import to_csr
from tilefold.bench import spec
from tilefold.ops.token_scatter import chosen_impl, token_scatter, token_scatter_sparse

# a function of weights, token ids, ignored ids and vocabulary size that returns scores
Scatter = Callable[[Tensor, Tensor, Tensor, int], Tensor]

# ids of XLM-R's special tokens
_CLS_ID, _PAD_ID, _SEP_ID, _UNK_ID = 0, 1, 2, 3
SPECIAL_IDS = (_CLS_ID, _PAD_ID, _SEP_ID, _UNK_ID)
# size of a column index of a CSR matrix
_INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ScatterInputs(spec.Inputs):
    """Inputs of the scatter.

    Attributes:
        weights: token weights ``[B, S]``.
        ids: token ids ``[B, S]``.
        ignored_ids: token ids that get no score, such as those of padding.
        vocab_size: number V of token ids.
    """

    weights: Tensor
    ids: Tensor
    ignored_ids: Tensor
    vocab_size: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The weights."""
        return (self.weights,)

    @property
    def constants(self) -> tuple[Any, ...]:
        """Token ids, ignored ids and vocabulary size."""
        return (self.ids, self.ignored_ids, self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class CsrInputs(ScatterInputs):
    """Inputs of a case whose scores are returned in CSR form, for encoding without a gradient."""

    def bind(self, call: Scatter, label: str, train: Scatter | None = None) -> spec.Runnable:
        """Return the timed calls of an implementation: scores are computed and converted to CSR.

        There is no training, because the cases are for encoding.

        Args:
            call: an implementation, which returns dense scores ``[B, V]``.
            label: name of the implementation, for reports.
            train: ignored.
        """

        def scatter_to_csr(weights: Tensor, ids: Tensor, ignored: Tensor, vocab: int) -> Tensor:
            return to_csr(call(weights, ids, ignored, vocab))

        runnable = super().bind(scatter_to_csr, f"{label}, to_sparse_csr")
        return replace(runnable, forward_backward=None)


def zipf_ids(shape: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """Draw ids with the frequencies of words in a text.

    By Zipf's law, the probability of the r-th id is roughly proportional to 1 / r.

    Args:
        shape: shape of the result.
        vocab: number of ids.
        generator: source of the random numbers.

    Returns:
        int64 ids from 0 to ``vocab - 1``.
    """
    # the inverse of the distribution function log(r) / log(vocab + 1)
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return ((vocab + 1) ** uniform - 1).long().clamp_(0, vocab - 1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> ScatterInputs:
    """Create random weights, half of them negative, for tokens with the frequencies of words.

    Args:
        case: shape, dtype and variant. The variant ``"ragged"`` has sequences that are padded to
            about three times their length. ``"csr"`` has scores in CSR form.
        device: the device of the tensors.
        seed: seed of the random numbers.
    """
    batch, length, vocab_size = (case.dims[name] for name in ("B", "S", "V"))
    normal, generator = spec.random_tensors(device, seed)
    weights = normal(batch, length).to(spec.DTYPES[case.dtype])
    ids = _draw_ids(batch, length, vocab_size, case.variant == "ragged", generator)
    ignored_ids = torch.tensor(SPECIAL_IDS, device=device)
    is_scored = ~torch.isin(ids, ignored_ids)
    # Scores [B, V] are numbered row by row. The score of an id is positive if some token with this
    # id has a positive weight.
    score_positions = torch.arange(batch, device=device)[:, None] * vocab_size + ids
    active_scores = torch.unique(score_positions[is_scored & (weights > 0)])
    inputs_class = CsrInputs if case.variant == "csr" else ScatterInputs
    return inputs_class(
        weights=weights.requires_grad_(),
        ids=ids,
        ignored_ids=ignored_ids,
        vocab_size=vocab_size,
        grad_output=normal(batch, vocab_size).to(weights.dtype),
        valid_tokens=int(is_scored.sum()),
        active=active_scores.numel() / (batch * vocab_size),
    )


def _draw_ids(
    batch: int,
    length: int,
    vocab_size: int,
    is_ragged: bool,
    generator: torch.Generator,
) -> Tensor:
    """Draw token ids of sequences that begin with CLS and end with SEP.

    Args:
        batch: number of sequences.
        length: the padded length of a sequence.
        vocab_size: number of token ids.
        is_ragged: whether sequences are shorter than ``length``, and padded on the right.
        generator: source of the random numbers.

    Returns:
        int64 ``[batch, length]``.
    """
    device = generator.device
    n_special = len(SPECIAL_IDS)
    ids = zipf_ids((batch, length), vocab_size - n_special, generator) + n_special
    lengths = torch.full((batch,), length, device=device)
    if is_ragged:
        lengths = spec.ragged_lengths(batch, length, device).clamp(min=2)
    positions = torch.arange(length, device=device)
    ids[:, 0] = _CLS_ID
    ids = torch.where(positions == lengths[:, None] - 1, _SEP_ID, ids)
    return torch.where(positions >= lengths[:, None], _PAD_ID, ids)


def make_gate(case: spec.BenchCase, inputs: ScatterInputs) -> spec.Gate:
    """Compute scores and gradients of two sequences in fp64, to check implementations with them.

    These are the first and the last sequence.

    If two tokens with the same id have equal weights, either may receive the gradient of the score.
    The gradient of such a score in ``inputs.grad_output`` is set to 0.
    """
    checked_rows = sorted({0, inputs.grad_output.size(0) - 1})
    scores = []
    dweights = []
    for row in checked_rows:
        _clear_tied_gradients(inputs, row)
        row_scores, row_dweights = _exact_scores_and_gradient(inputs, row)
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


def _clear_tied_gradients(inputs: ScatterInputs, row: int) -> None:
    """Set the gradient of a score to 0 if the largest weight of its id occurs twice.

    Args:
        inputs: the inputs of the case, whose ``grad_output`` changes.
        row: position of the sequence.
    """
    ids = inputs.ids[row]
    is_scored = ~torch.isin(ids, inputs.ignored_ids)
    weights = inputs.weights.detach()[row]
    unique_ids = torch.unique(ids)
    has_id = (ids[:, None] == unique_ids) & is_scored[:, None]  # [S, unique ids]
    weights_by_id = torch.where(has_id, weights[:, None], float("-inf"))
    largest = weights_by_id.topk(min(2, weights.numel()), dim=0).values
    if largest.size(0) == 2:
        # only positive weights get a gradient, because scores are maxima of relu(weights)
        is_tied = (largest[0] == largest[1]) & (largest[0] > 0)
        inputs.grad_output[row, unique_ids[is_tied]] = 0


def _exact_scores_and_gradient(inputs: ScatterInputs, row: int) -> tuple[Tensor, Tensor]:
    """Compute the scores of one sequence, and the gradient of its token weights, in fp64.

    Only the ids that occur in the sequence are numbered as columns, since all other scores are 0.

    Args:
        inputs: the inputs of the case. Their ``grad_output`` is the gradient of the scores.
        row: position of the sequence.

    Returns:
        The scores ``[V]``, and the gradient of the weights ``[S]``.
    """
    ids = inputs.ids[row]
    is_scored = ~torch.isin(ids, inputs.ignored_ids)
    weights = inputs.weights.detach()[row].double()[None].requires_grad_()
    # for each token, the position of its id among the ids that occur
    unique_ids, id_positions = torch.unique(ids, return_inverse=True)
    unique_scores = token_scatter(
        weights,
        id_positions[None],
        unique_ids.numel(),
        attention_mask=is_scored[None],
        impl="reference",
    )
    dscores = inputs.grad_output[row, unique_ids].double()[None]  # gradient of unique_scores
    (dweights,) = torch.autograd.grad(unique_scores, weights, dscores)
    scores = torch.zeros(inputs.vocab_size, dtype=torch.float64, device=ids.device)
    scores[unique_ids] = unique_scores.detach()[0]
    return scores, dweights[0]


def one_row_per_token_scatter(
    weights: Tensor,
    input_ids: Tensor,
    ignored_ids: Tensor,
    vocab_size: int,
) -> Tensor:
    """Compute scores as FlagEmbedding's training of BGE-M3 and tevatron's uniCOIL do.

    Each token gets its own row over the vocabulary, and the maximum is taken over the tokens.

    Args:
        weights: ``[B, S]``.
        input_ids: ``[B, S]``.
        ignored_ids: token ids whose scores are set to 0.
        vocab_size: number V of token ids.

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
    return torch.max(token_scores, dim=1).values.index_fill_(1, ignored_ids, 0)


def scatter_reduce_max(
    weights: Tensor,
    input_ids: Tensor,
    ignored_ids: Tensor,
    vocab_size: int,
) -> Tensor:
    """Compute scores as FlagEmbedding's inference of BGE-M3 does, by ``scatter_reduce``.

    The weights of ignored tokens are set to 0 first, so that they get no gradient.

    Args:
        weights: ``[B, S]``.
        input_ids: ``[B, S]``.
        ignored_ids: token ids that get no score.
        vocab_size: number V of token ids.

    Returns:
        Scores ``[B, V]``.
    """
    scored = weights.relu().masked_fill(torch.isin(input_ids, ignored_ids), 0)
    scores = torch.zeros(input_ids.size(0), vocab_size, dtype=weights.dtype, device=weights.device)
    return scores.scatter_reduce(dim=-1, index=input_ids, src=scored, reduce="amax")


def _build_membership(inputs: ScatterInputs, compiled: bool) -> spec.Runnable:
    """Return the scatter that gives each token a row over the vocabulary, as a call on the inputs.

    Raises:
        spec.NotApplicable: for CSR scores.
    """
    if isinstance(inputs, CsrInputs):
        raise spec.NotApplicable("no library makes CSR scores in this way")
    return _bind_torch(inputs, one_row_per_token_scatter, compiled)


def _build_scatter_reduce(inputs: ScatterInputs, compiled: bool) -> spec.Runnable:
    """Return the scatter of BGE-M3's inference, by ``scatter_reduce``, as a call on the inputs."""
    return _bind_torch(inputs, scatter_reduce_max, compiled)


def _bind_torch(inputs: ScatterInputs, scatter: Scatter, compiled: bool) -> spec.Runnable:
    """Return a call that runs a function of torch operations on the inputs.

    Args:
        inputs: the inputs of the case.
        scatter: the function.
        compiled: whether to run the function under ``torch.compile``.
    """
    if compiled:
        return inputs.bind(spec.compiled(scatter), "torch.compile")
    return inputs.bind(scatter, "torch")


def _build_sparse(inputs: ScatterInputs) -> spec.Runnable:
    """Return tilefold's scatter to scores in CSR form, as a call on the inputs.

    Raises:
        spec.NotApplicable: for dense scores.
    """
    if not isinstance(inputs, CsrInputs):
        raise spec.NotApplicable("token_scatter_sparse needs a case with CSR scores")

    def forward() -> Tensor:
        with torch.no_grad():
            return token_scatter_sparse(
                inputs.weights,
                inputs.ids,
                inputs.vocab_size,
                ignore_ids=SPECIAL_IDS,
            )

    # the operator consists of torch operations
    return spec.Runnable(forward, label="torch")


def _token_scatter(
    weights: Tensor,
    ids: Tensor,
    _ignored_ids: Tensor,
    vocab_size: int,
    impl: str,
) -> Tensor:
    """Return the scores of tilefold's scatter.

    The ignored ids are passed as Python numbers, not as the tensor that baselines use.

    Args:
        weights: weights of the tokens.
        ids: ids of the tokens.
        _ignored_ids: not used.
        vocab_size: the number of columns.
        impl: the implementation.
    """
    return token_scatter(weights, ids, vocab_size, ignore_ids=SPECIAL_IDS, impl=impl)


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_token_scatter, chosen_impl, tiled_on=("cuda",)),
    spec.Implementation("tilefold-csr", _build_sparse, "ours"),
    spec.Implementation(
        "scatter-reduce",
        functools.partial(_build_scatter_reduce, compiled=False),
        "baseline",
    ),
    spec.gpu_implementation(
        "scatter-reduce-compile",
        functools.partial(_build_scatter_reduce, compiled=True),
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


def work(case: spec.BenchCase, inputs: ScatterInputs, phase: spec.Phase) -> spec.Work:
    """Return a lower bound of the operations and of the memory traffic of a scatter.

    Forward reads every id and every weight that is scored, compares each weight once, and writes
    the scores: all of them, or in CSR form the positive ones with their columns. Training also
    writes a byte per token: whether its weight is the score of its id. Backward reads these bytes
    and the gradients of positive scores, and writes a gradient for each token.

    Args:
        case: ignored; the sizes are those of the tensors.
        inputs: tensors of the case, the number of scored tokens, and the share of positive scores.
        phase: forward, or forward and backward.
    """
    item_bytes = inputs.weights.element_size()
    n_tokens = inputs.weights.numel()
    n_scores = inputs.grad_output.numel()
    n_positive_scores = (inputs.active or 0.0) * n_scores

    id_bytes = n_tokens * inputs.ids.element_size()
    weight_bytes = item_bytes * inputs.valid_tokens
    if isinstance(inputs, CsrInputs):
        score_bytes = (item_bytes + _INT64_BYTES) * n_positive_scores  # value and column
    else:
        score_bytes = item_bytes * n_scores
    total_bytes = float(id_bytes + weight_bytes + score_bytes)
    if phase == "forward_backward":
        winner_bytes = n_tokens  # one byte each
        gradient_bytes = item_bytes * (n_positive_scores + n_tokens)
        # winners are written by forward and read by backward
        total_bytes += 2 * winner_bytes + gradient_bytes
    n_comparisons = float(inputs.valid_tokens)
    return spec.Work(n_comparisons, total_bytes)


def min_bytes(case: spec.BenchCase, impl: str) -> int:
    """Return a lower bound of the memory of an implementation.

    Args:
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        Bytes of the scores ``[B, V]``, and of all tensors ``[B, S, V]`` that the implementation
        holds at a time.
    """
    batch, length, vocab_size = (case.dims[name] for name in ("B", "S", "V"))
    item_bytes = spec.DTYPES[case.dtype].itemsize
    n_token_scores = batch * length * vocab_size
    # "membership" gives each token a row over the vocabulary, in eager or in compiled torch, and
    # holds three or two tensors [B, S, V] at a time. Other implementations hold none.
    token_score_bytes = {
        "membership": 3 * n_token_scores * item_bytes,
        "membership-compile": 2 * n_token_scores * item_bytes,
        "reference": n_token_scores * torch.float64.itemsize,
    }
    score_bytes = batch * vocab_size * item_bytes
    return score_bytes + token_score_bytes.get(impl, 0)


SPEC = spec.BenchSpec(
    op="token_scatter",
    implementations=IMPLEMENTATIONS,
    baseline="scatter-reduce",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"B": 2, "S": 8, "V": 96},
    work=work,
    min_bytes=min_bytes,
)
