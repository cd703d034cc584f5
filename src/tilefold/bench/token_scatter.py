"""The benchmark of ``tilefold.ops.token_scatter``: shapes, implementations, ground truth, least work and claims."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.gate import Gate, Part
from tilefold.bench.spec import (
    DTYPES,
    BenchCase,
    BenchSpec,
    Implementation,
    Inputs,
    NotApplicable,
    Phase,
    Requirement,
    Runnable,
    Work,
    compiled,
    ours,
    ragged_lengths,
    random_tensors,
)
from tilefold.ops.token_scatter import chosen_impl, token_scatter, token_scatter_sparse
from tilefold.testing.token_scatter import zipf_ids

Scatter = Callable[[Tensor, Tensor, Tensor, int], Tensor]

SPECIAL_IDS = (0, 1, 2, 3)  # CLS, PAD, SEP and UNK, as XLM-R numbers them


@dataclass(frozen=True)
class TokenScatterBenchInputs(Inputs):
    """Inputs of one case.

    Attributes:
        weights: ``[B, S]``, requires a gradient; half of them are negative, as before a relu.
        input_ids: ``[B, S]`` int64, as frequent as the words of a text; CLS first, SEP last, then PAD.
        unused: the special ids, which score nothing.
        grad_output: ``[B, V]``.
        valid_tokens: tokens that are not special.
        active: share of positive scores.
        csr: whether the scores are wanted in CSR form, for encoding, which has no gradient.
    """

    weights: Tensor
    input_ids: Tensor
    unused: Tensor
    grad_output: Tensor
    valid_tokens: int
    active: float
    csr: bool = False

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.weights,)

    @property
    def others(self) -> tuple[Tensor, Tensor, int]:  # type: ignore[override]
        return self.input_ids, self.unused, self.grad_output.size(1)

    def bind(self, call: Scatter, label: str, train: Scatter | None = None) -> Runnable:
        """``call(weights, input_ids, unused, vocab_size)``; its dense scores to CSR if asked for."""
        if not self.csr:
            return super().bind(call, label, train)
        return self.bind_csr(lambda *arguments: _to_csr(call(*arguments)), f"{label}, to_sparse_csr")

    def bind_csr(self, call: Scatter, label: str) -> Runnable:
        """The same for a function that returns CSR scores, which have no gradient."""
        return Runnable(super().bind(call, label).forward, label=label)


def _to_csr(scores: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return scores.to_sparse_csr()


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> TokenScatterBenchInputs:
    """Random inputs of ``case``; ``"ragged"`` ones are padded on the right to three times their length.

    Of ``"csr"`` ones the scores are wanted in CSR form.
    """
    batch, length, vocab = (case.dims[name] for name in "BSV")
    normal, generator = random_tensors(device, seed)
    weights = normal(batch, length).to(DTYPES[case.dtype])
    ids = zipf_ids((batch, length), vocab - len(SPECIAL_IDS), generator) + len(SPECIAL_IDS)
    lengths = torch.full((batch,), length, device=device)
    if case.variant == "ragged":
        lengths = ragged_lengths(batch, length, device).clamp(min=2)
    places = torch.arange(length, device=device)
    ids[:, 0] = SPECIAL_IDS[0]
    ids = torch.where(places == lengths[:, None] - 1, SPECIAL_IDS[2], ids)
    ids = torch.where(places >= lengths[:, None], SPECIAL_IDS[1], ids)
    unused = torch.tensor(SPECIAL_IDS, device=device)
    counts = ~torch.isin(ids, unused)
    entry = (torch.arange(batch, device=device)[:, None] * vocab + ids)[counts & (weights > 0)]
    active = torch.unique(entry).numel() / (batch * vocab)
    grad_output = normal(batch, vocab).to(weights.dtype)
    weights.requires_grad_()
    valid = int(counts.sum().item())
    return TokenScatterBenchInputs(weights, ids, unused, grad_output, valid, active, case.variant == "csr")


def make_gate(case: BenchCase, inputs: TokenScatterBenchInputs) -> Gate:
    """Two whole sequences in fp64, with only the entries that occur in them.

    Where two tokens of one id have the same weight, who takes the gradient is a convention, which baselines do not
    share: ``inputs.grad_output`` becomes zero there.
    """
    rows = sorted({0, inputs.grad_output.size(0) - 1})
    scores, gradients = zip(*(_sequence_truth(inputs, row) for row in rows), strict=True)
    return Gate(
        inputs,
        case.dtype,
        {"out": Part(lambda t: t[rows], torch.stack(scores))},
        {"dweights": Part(lambda t: t[rows], torch.stack(gradients))},
    )


def _sequence_truth(inputs: TokenScatterBenchInputs, b: int) -> tuple[Tensor, Tensor]:
    """Scores ``[V]`` and the gradient of the weights ``[S]`` of sequence ``b``."""
    ids, grad_output = inputs.input_ids[b], inputs.grad_output
    valid = ~torch.isin(ids, inputs.unused)
    entries, place = torch.unique(ids, return_inverse=True)
    weights = inputs.weights.detach()[b].double()
    holds = (place[:, None] == torch.arange(entries.numel(), device=place.device)) & valid[:, None]
    best = torch.where(holds, weights[:, None], float("-inf")).topk(min(2, weights.numel()), dim=0).values
    if best.size(0) == 2:
        grad_output[b, entries[(best[0] == best[1]) & (best[0] > 0)]] = 0
    leaf = weights[None].requires_grad_()
    found = token_scatter(leaf, place[None], entries.numel(), attention_mask=valid[None], impl="reference")
    (grad,) = torch.autograd.grad(found, leaf, grad_output[b, entries].double()[None])
    scores = torch.zeros(grad_output.size(1), dtype=torch.float64, device=ids.device)
    scores[entries] = found.detach()[0]
    return scores, grad[0]


def membership_scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
    """FlagEmbedding's training of BGE-M3 (and tevatron's uniCOIL): ``[B, S, V]`` zeros, a scatter, a maximum."""
    every = torch.zeros(*input_ids.shape, vocab_size, dtype=weights.dtype, device=weights.device)
    every = torch.scatter(every, dim=-1, index=input_ids.unsqueeze(-1), src=weights.relu().unsqueeze(-1))
    return torch.max(every, dim=1).values.index_fill_(1, unused, 0)


def reduced_scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
    """FlagEmbedding's inference of BGE-M3: a ``scatter_reduce`` with amax.

    It clears the unused columns of the result in place, which autograd forbids here; so their tokens are cleared, which
    is also less work.
    """
    used = weights.relu().masked_fill(torch.isin(input_ids, unused), 0)
    scores = torch.zeros(input_ids.size(0), vocab_size, dtype=weights.dtype, device=weights.device)
    return scores.scatter_reduce(dim=-1, index=input_ids, src=used, reduce="amax")


def _torch(scatter: Scatter, label: str) -> Callable[[TokenScatterBenchInputs], Runnable]:
    def build(inputs: TokenScatterBenchInputs) -> Runnable:
        if inputs.csr and scatter is membership_scatter:
            raise NotApplicable("nobody makes CSR scores in this way")
        return inputs.bind(compiled(scatter) if label == "torch.compile" else scatter, label)

    return build


def _ours(impl: str) -> Callable[[TokenScatterBenchInputs], Runnable]:
    def build(inputs: TokenScatterBenchInputs) -> Runnable:
        def scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
            return token_scatter(weights, input_ids, vocab_size, ignore_ids=SPECIAL_IDS, impl=impl)

        return inputs.bind(scatter, chosen_impl(inputs.weights, impl))

    return build


def _csr(inputs: TokenScatterBenchInputs) -> Runnable:
    if not inputs.csr:
        raise NotApplicable("token_scatter_sparse returns CSR scores")

    def scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
        return token_scatter_sparse(weights, input_ids, vocab_size, ignore_ids=SPECIAL_IDS)

    return inputs.bind_csr(scatter, "torch")


IMPLEMENTATIONS = (
    *ours(_ours, tiled_on=("cuda",)),
    Implementation("tilefold-csr", _csr, "ours"),
    *(
        Implementation(f"{name}{end}", _torch(scatter, label), "baseline", where)
        for name, scatter in (("scatter-reduce", reduced_scatter), ("membership", membership_scatter))
        for end, label, where in (("", "torch", ("cpu", "cuda")), ("-compile", "torch.compile", ("cuda",)))
    ),
)


def work(case: BenchCase, inputs: TokenScatterBenchInputs, phase: Phase) -> Work:
    """Least work: every id and every weight that counts is read, every score written; backward visits winners."""
    item, tokens = inputs.weights.element_size(), inputs.valid_tokens
    ids = inputs.input_ids.numel() * inputs.input_ids.element_size()
    scores = inputs.grad_output.numel()
    nbytes = float(ids + item * (tokens + scores))
    if inputs.csr:  # a value and an int64 index per positive score
        nbytes = float(ids + item * tokens + (item + 8) * inputs.active * scores)
    if phase == "forward_backward":
        # one byte per token that says who won, written and read; one gradient read per winner, one written per token
        winners = inputs.active * inputs.grad_output.numel()
        nbytes += 2 * inputs.weights.numel() + item * (winners + inputs.weights.numel())
    return Work(float(tokens), nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    batch, length, vocab = (case.dims[name] for name in "BSV")
    item = DTYPES[case.dtype].itemsize
    copies = {"membership": 3, "membership-compile": 2}
    members = 8 * batch * length * vocab if impl == "reference" else 0
    return copies.get(impl, 0) * batch * length * vocab * item + members + batch * vocab * item


def _case(B: int, S: int, V: int, variant: str = "max", device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{S}x{V}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "S": S, "V": V}, variant, quick)


CPU_TRAIN = _case(8, 256, 30522, device="cpu")

CASES = (
    _case(32, 512, 250002, quick=True),
    _case(32, 512, 250002, "ragged"),
    _case(32, 512, 30522, quick=True),
    _case(256, 512, 30522),
    _case(4, 8192, 250002),
    _case(32, 8192, 250002),
    _case(8, 8192, 250002),
    _case(8, 8192, 30522),
    *(_case(B, S, V, "csr") for B, S in ((32, 512), (8, 8192)) for V in (250002, 30522)),
    _case(64, 32, 30522, quick=True),
    CPU_TRAIN,
    _case(8, 256, 30522, "ragged", "cpu"),
    _case(32, 512, 30522, device="cpu"),
    _case(4, 512, 250002, device="cpu"),
    _case(4, 512, 250002, "csr", "cpu"),
    _case(16, 32, 30522, device="cpu", quick=True),
)

REQUIREMENTS = (
    Requirement(
        CPU_TRAIN.name,
        "peak memory of forward + backward is at least 20x below the [B, S, V] membership",
        left=("tilefold", "forward_backward_peak_mib"),
        right=("membership", "forward_backward_peak_mib"),
        limit=1 / 20,
    ),
    Requirement(
        CPU_TRAIN.name,
        "forward + backward takes no longer than scatter_reduce",
        left=("tilefold", "forward_backward_p50_ms"),
        right=("scatter-reduce", "forward_backward_p50_ms"),
        limit=1.0,
    ),
)

SPEC = BenchSpec(
    op="token_scatter",
    cases=CASES,
    implementations=IMPLEMENTATIONS,
    baseline="scatter-reduce",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"B": 2, "S": 8, "V": 96},
    work=work,
    needs_bytes=needs_bytes,
    requirements=REQUIREMENTS,
)
