"""The benchmark of ``tilefold.ops.token_scatter``: shapes, implementations, ground truth, least
work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold._internal.csr import to_csr
from tilefold.bench import spec
from tilefold.ops.token_scatter import chosen_impl, token_scatter, token_scatter_sparse

Scatter = Callable[[Tensor, Tensor, Tensor, int], Tensor]

SPECIAL_IDS = (0, 1, 2, 3)  # CLS, PAD, SEP and UNK, as XLM-R numbers them


@dataclass(frozen=True)
class CsrInputs(spec.Inputs):
    """Inputs whose scores are wanted in CSR form, for encoding, which has no gradient."""

    def bind(self, call: Scatter, label: str, train: Scatter | None = None) -> spec.Runnable:
        """``call`` without gradients, and its scores to CSR."""

        bound = super().bind(lambda *arguments: to_csr(call(*arguments)), label)
        return spec.Runnable(bound.forward, label=f"{label}, to_sparse_csr")


def zipf_ids(shape: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """Ids of which low ones are frequent, as the words of a text are: rank r about in proportion to
    1 / r.
    """
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return ((vocab + 1) ** uniform - 1).long().clamp_(0, vocab - 1)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Random ``weights [B, S]``, half of them negative, ``input_ids [B, S]``, the ids that score
    nothing, and V.

    Ids are as frequent as words, CLS first, SEP last; ``"ragged"`` ones are padded to three times
    their length.
    """
    batch, length, vocab = (case.dims[name] for name in "BSV")
    normal, generator = spec.random_tensors(device, seed)
    weights = normal(batch, length).to(spec.DTYPES[case.dtype])
    ids = zipf_ids((batch, length), vocab - len(SPECIAL_IDS), generator) + len(SPECIAL_IDS)
    lengths = torch.full((batch,), length, device=device)
    if case.variant == "ragged":
        lengths = spec.ragged_lengths(batch, length, device).clamp(min=2)
    places = torch.arange(length, device=device)
    ids[:, 0] = SPECIAL_IDS[0]
    ids = torch.where(places == lengths[:, None] - 1, SPECIAL_IDS[2], ids)
    ids = torch.where(places >= lengths[:, None], SPECIAL_IDS[1], ids)
    unused = torch.tensor(SPECIAL_IDS, device=device)
    counts = ~torch.isin(ids, unused)
    entry = (torch.arange(batch, device=device)[:, None] * vocab + ids)[counts & (weights > 0)]
    active = torch.unique(entry).numel() / (batch * vocab)
    grad_output = normal(batch, vocab).to(weights.dtype)
    make = CsrInputs if case.variant == "csr" else spec.Inputs
    return make(
        (weights.requires_grad_(),),
        (ids, unused, vocab),
        grad_output,
        int(counts.sum()),
        active,
    )


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Two whole sequences in fp64; where two tokens of one id have the same weight the gradient
    becomes zero.
    """
    rows = sorted({0, inputs.grad_output.size(0) - 1})
    truth = zip(*(_sequence_truth(inputs, row) for row in rows), strict=True)
    scores, dweights = (spec.Part(lambda t: t[rows], torch.stack(parts)) for parts in truth)
    return spec.Gate(inputs, case.dtype, {"out": scores}, {"dweights": dweights})


def _sequence_truth(inputs: spec.Inputs, b: int) -> tuple[Tensor, Tensor]:
    """Scores ``[V]`` and the gradient of the weights ``[S]`` of sequence ``b``."""
    (weights,), (every, unused, _), grad_output = inputs.leaves, inputs.others, inputs.grad_output
    ids = every[b]
    valid = ~torch.isin(ids, unused)
    entries, place = torch.unique(ids, return_inverse=True)
    weights = weights.detach()[b].double()
    holds = (place[:, None] == torch.arange(entries.numel(), device=place.device)) & valid[:, None]
    best = (
        torch.where(holds, weights[:, None], float("-inf"))
        .topk(min(2, weights.numel()), dim=0)
        .values
    )
    if best.size(0) == 2:
        grad_output[b, entries[(best[0] == best[1]) & (best[0] > 0)]] = 0
    leaf = weights[None].requires_grad_()
    found = token_scatter(
        leaf,
        place[None],
        entries.numel(),
        attention_mask=valid[None],
        impl="reference",
    )
    (grad,) = torch.autograd.grad(found, leaf, grad_output[b, entries].double()[None])
    scores = torch.zeros(grad_output.size(1), dtype=torch.float64, device=ids.device)
    scores[entries] = found.detach()[0]
    return scores, grad[0]


def membership_scatter(
    weights: Tensor,
    input_ids: Tensor,
    unused: Tensor,
    vocab_size: int,
) -> Tensor:
    """FlagEmbedding's training of BGE-M3 (and tevatron's uniCOIL): ``[B, S, V]`` zeros, a scatter,
    a maximum.
    """
    every = torch.zeros(*input_ids.shape, vocab_size, dtype=weights.dtype, device=weights.device)
    every = torch.scatter(
        every,
        dim=-1,
        index=input_ids.unsqueeze(-1),
        src=weights.relu().unsqueeze(-1),
    )
    return torch.max(every, dim=1).values.index_fill_(1, unused, 0)


def reduced_scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
    """FlagEmbedding's inference of BGE-M3: a ``scatter_reduce`` with amax, unused tokens cleared
    first for autograd.
    """
    used = weights.relu().masked_fill(torch.isin(input_ids, unused), 0)
    scores = torch.zeros(input_ids.size(0), vocab_size, dtype=weights.dtype, device=weights.device)
    return scores.scatter_reduce(dim=-1, index=input_ids, src=used, reduce="amax")


def _torch(scatter: Scatter, label: str) -> spec.Build:
    def build(inputs: spec.Inputs) -> spec.Runnable:
        if isinstance(inputs, CsrInputs) and scatter is membership_scatter:
            raise spec.NotApplicable("nobody makes CSR scores in this way")
        return inputs.bind(spec.compiled(scatter) if label == "torch.compile" else scatter, label)

    return build


def _csr(inputs: spec.Inputs) -> spec.Runnable:
    if not isinstance(inputs, CsrInputs):
        raise spec.NotApplicable("token_scatter_sparse returns CSR scores")

    def scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
        return token_scatter_sparse(weights, input_ids, vocab_size, ignore_ids=SPECIAL_IDS)

    return spec.Runnable(spec.Inputs.bind(inputs, scatter, "torch").forward, label="torch")


IMPLEMENTATIONS = (
    *spec.ours(
        lambda weights, ids, _, size, impl: token_scatter(
            weights,
            ids,
            size,
            ignore_ids=SPECIAL_IDS,
            impl=impl,
        ),
        chosen_impl,
        tiled_on=("cuda",),
    ),
    spec.Implementation("tilefold-csr", _csr, "ours"),
    *(
        spec.Implementation(f"{name}{end}", _torch(scatter, label), "baseline", where)
        for name, scatter in (
            ("scatter-reduce", reduced_scatter),
            ("membership", membership_scatter),
        )
        for end, label, where in (
            ("", "torch", ("cpu", "cuda")),
            ("-compile", "torch.compile", ("cuda",)),
        )
    ),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Least work: every id and every weight that counts is read, every score written; backward
    visits winners.
    """
    (weights,), input_ids, tokens = inputs.leaves, inputs.others[0], inputs.valid_tokens
    item, ids, scores = (
        weights.element_size(),
        input_ids.numel() * input_ids.element_size(),
        inputs.grad_output.numel(),
    )
    positive = (inputs.active or 0.0) * scores
    nbytes = float(ids + item * (tokens + scores))
    if isinstance(inputs, CsrInputs):  # a value and an int64 index per positive score
        nbytes = float(ids + item * tokens + (item + 8) * positive)
    if phase == "forward_backward":
        # one byte per token that says who won, written and read; one gradient read per winner, one
        # written per token
        nbytes += 2 * weights.numel() + item * (positive + weights.numel())
    return spec.Work(float(tokens), nbytes)


def _needs(case: spec.BenchCase, impl: str) -> int:
    batch, length, vocab = (case.dims[name] for name in "BSV")
    item = spec.DTYPES[case.dtype].itemsize
    copies = {"membership": 3, "membership-compile": 2}
    members = 8 * batch * length * vocab if impl == "reference" else 0
    return copies.get(impl, 0) * batch * length * vocab * item + members + batch * vocab * item


PROBE = {"B": 2, "S": 8, "V": 96}  # too small to matter
SPEC = spec.BenchSpec(
    "token_scatter",
    IMPLEMENTATIONS,
    "scatter-reduce",
    make_inputs,
    make_gate,
    PROBE,
    work,
    _needs,
)
