"""The benchmark of ``tilefold.ops.maxsim``: shapes, implementations, ground truth and least work."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold import testing
from tilefold.bench import spec
from tilefold.bench.spec import BUDGETS
from tilefold.ops.maxsim import chosen_impl, maxsim, quantize_tokens

_PACKED_SHARE = (
    1 / 6
)  # shortest document of a packed case as a share of the longest; lengths are evenly spread
DOCUMENTS = (
    4  # documents that are checked against every query, beside two queries against every document
)
CHUNK_BYTES = 2**27  # fp64 similarities held at a time
AMBIGUOUS = 2e-6  # fp32 evaluation order moves a similarity of unit vectors by less than this
QUANTIZED_BUDGET = spec.Budget(forward=BUDGETS["float32"].forward, gradient=0.0)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Random unit vectors ``[Nq, Lq, D]`` and ``[Nd, Ld, D]``, or ``[T, D]`` packed by int32
    offsets ``[Nd + 1]``.
    """
    dims, dtype = case.dims, spec.DTYPES[case.dtype]
    normal, generator = spec.random_tensors(device, seed)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1).to(dtype)

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
    grad_output = normal(dims["Nq"], dims["Nd"])
    tokens = sum(side.shape[:-1].numel() for side in (queries, documents))
    return spec.Inputs(
        (queries.requires_grad_(), documents.requires_grad_()),
        (cu_seqlens,),
        grad_output,
        tokens,
    )


def _places(inputs: spec.Inputs, document: int) -> slice:
    """The rows of a document's tokens among those of all."""
    (cu_seqlens,) = inputs.others
    if cu_seqlens is None:
        length = inputs.leaves[1].size(1)
        return slice(document * length, (document + 1) * length)
    return slice(*cu_seqlens[document : document + 2].tolist())


def _tokens(inputs: spec.Inputs, document: int) -> Tensor:
    return inputs.leaves[1].detach().flatten(0, -2)[_places(inputs, document)]


@dataclass(frozen=True)
class MaxSimGate(spec.Gate):
    """A gate that compares scores of int8 and fp8 documents with what the rounded numbers stand
    for.
    """

    documents: tuple[int, ...] = ()

    def check(self, runnable: spec.Runnable, kind: str) -> spec.GateResult:
        """Compare slices; quantised documents have no gradient."""
        if (stored := runnable.label.partition(",")[0]) not in ("int8", "fp8"):
            return super().check(runnable, kind)
        out, worst = runnable.forward(), 0.0
        if out is None or not bool(out.isfinite().all()):
            return spec.GateResult({"out[:, d]": float("inf")}, QUANTIZED_BUDGET)
        for document in self.documents:
            tokens = quantize_tokens(_tokens(self.inputs, document)[None], dtype=stored)
            truth = maxsim(self.inputs.leaves[0].detach(), tokens, impl="reference")
            worst = max(worst, testing.relative_error(out[:, document : document + 1], truth))
        return spec.GateResult({"out[:, d]": worst}, QUANTIZED_BUDGET)


@torch.no_grad()
def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> MaxSimGate:
    """Scores and gradients in fp64 of two queries with all documents, and of a few documents with
    all queries.

    The gradient of pairs with two best document tokens, up to the order of evaluation, becomes
    zero.
    """
    grad = inputs.grad_output
    device = grad.device
    few = torch.tensor(sorted({0, grad.size(0) - 1}), device=device)
    spread = torch.linspace(0, grad.size(1) - 1, min(DOCUMENTS, grad.size(1)), dtype=torch.float64)
    chosen = spread.round().long().tolist()
    some = inputs.leaves[0].detach()[few].double()
    scores = torch.zeros(len(few), grad.size(1), dtype=torch.float64, device=device)
    dqueries = torch.zeros_like(some)
    for document in range(grad.size(1)):
        tokens = _tokens(inputs, document).double()
        scores[:, document], winner, unclear = _winners(some, tokens)
        grad[few[unclear], document] = 0
        dqueries += grad[few, document, None, None].double() * tokens[winner]
    step = max(1, CHUNK_BYTES // (8 * inputs.leaves[0].size(1) * case.dims["Ld"]))
    columns, parts = zip(
        *(_document_truth(inputs, document, step) for document in chosen),
        strict=True,
    )

    def taken(documents: Tensor) -> Tensor:
        return torch.cat(
            [documents.flatten(0, -2)[_places(inputs, document)] for document in chosen],
        )

    outputs = {
        "out[q, :]": spec.Part(lambda t: t[few], scores),
        "out[:, d]": spec.Part(lambda t: t[:, chosen], torch.stack(columns, dim=1)),
    }
    gradients = {
        "dqueries": spec.Part(lambda t: t[few], dqueries),
        "ddocuments": spec.Part(taken, torch.cat(parts)),
    }
    # scores are fp32, and fp64 of fp64
    ours = spec.Budget(
        min(BUDGETS[name].forward for name in ("float32", case.dtype)),
        BUDGETS[case.dtype].gradient,
    )
    return MaxSimGate(inputs, case.dtype, outputs, gradients, ours=ours, documents=tuple(chosen))


def _winners(queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of some queries with a document, the winners, and which queries have a token with two
    best.
    """
    similarities = queries @ tokens.T  # [n, Lq, Ld]
    best, places = similarities.topk(min(2, similarities.size(-1)), dim=-1)
    unclear = torch.zeros(queries.size(0), dtype=torch.bool, device=queries.device)
    if best.size(-1) == 2:
        unclear = (best[..., 0] - best[..., 1] < AMBIGUOUS).any(dim=1)
    return best[..., 0].sum(dim=1), places[..., 0], unclear


def _document_truth(inputs: spec.Inputs, document: int, step: int) -> tuple[Tensor, Tensor]:
    """A document's scores with all queries and its gradient; the first slice settled its pairs by
    the same margin.
    """
    grad, tokens = inputs.grad_output, _tokens(inputs, document).double()
    gradient, values = torch.zeros_like(tokens), []
    for start in range(0, grad.size(0), step):
        queries = inputs.leaves[0].detach()[start : start + step].double()
        value, winner, unclear = _winners(queries, tokens)
        every = torch.arange(start, start + queries.size(0), device=grad.device)
        grad[every[unclear], document] = 0
        values.append(value)
        weighted = grad[every, document, None, None].double() * queries
        gradient.index_add_(0, winner.flatten(), weighted.flatten(0, 1))
    return torch.cat(values), gradient


def materialised_scores(queries: Tensor, documents: Tensor, valid: Tensor | None = None) -> Tensor:
    """The einsum of late-interaction libraries: every similarity ``[Nq, Nd, Lq, Ld]``, then maximum
    and sum.
    """
    similarities = torch.einsum("qid,njd->qnij", queries, documents)
    if valid is not None:
        similarities = similarities.masked_fill(~valid[:, None], float("-inf"))
    return similarities.amax(dim=3).sum(
        dim=2,
        dtype=torch.promote_types(queries.dtype, torch.float32),
    )


def _stock(inputs: spec.Inputs) -> Callable[..., Tensor]:
    """The einsum of these inputs; packed documents are padded and masked, as by a library without
    them.
    """
    (offsets,) = inputs.others
    if offsets is None:
        return materialised_scores
    lengths = offsets.diff()
    valid = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    place = valid.nonzero(as_tuple=True)

    def padded(queries: Tensor, documents: Tensor, _: Tensor) -> Tensor:
        tokens = documents.new_zeros(*valid.shape, documents.size(1)).index_put(place, documents)
        return materialised_scores(queries, tokens, valid)

    return padded


def _flash_maxsim(inputs: spec.Inputs) -> spec.Runnable:
    package: Any = importlib.import_module("flash_maxsim")
    (queries, documents), (offsets,) = inputs.leaves, inputs.others
    if offsets is not None:
        query, longest = queries[0].detach(), int(offsets.diff().max())

        def packed() -> Tensor:
            scores: Tensor = package.flash_maxsim_packed(
                query,
                documents.detach(),
                offsets,
                max_seqlen_d=longest,
            )
            return scores[None]

        return spec.Runnable(packed, None, "flash_maxsim_packed")
    name, score = "flash_maxsim_batched", package.flash_maxsim_batched
    if queries.size(0) == 1:
        name, score = "flash_maxsim", lambda q, d: package.flash_maxsim(q[0], d)[None]
    return inputs.bind(
        lambda q, d, _: score(q, d),
        name,
        lambda q, d, _: package.flash_maxsim_batched_train(q, d),
    )


def _late_interaction_kernels(inputs: spec.Inputs) -> spec.Runnable:
    package: Any = importlib.import_module("late_interaction_kernels")
    (offsets,), length = inputs.others, inputs.leaves[0].size(1)
    if offsets is None:
        return inputs.bind(lambda q, d, _: package.maxsim(q, d), "late_interaction_kernels.maxsim")
    query_offsets = torch.tensor([0, length], dtype=torch.int32, device=offsets.device)
    lengths = {"max_seqlen_q": length, "max_seqlen_d": int(offsets.diff().max())}

    def packed(queries: Tensor, documents: Tensor, offsets: Tensor) -> Tensor:
        scores: Tensor = package.maxsim_varlen(
            queries[0],
            documents,
            query_offsets,
            offsets,
            **lengths,
        )
        return scores

    return inputs.bind(packed, "maxsim_varlen")


def _quantized(dtype: str) -> spec.Build:
    def build(inputs: spec.Inputs) -> spec.Runnable:
        queries, documents = (leaf.detach() for leaf in inputs.leaves)
        stored = quantize_tokens(documents, dtype=dtype)
        return spec.Runnable(
            lambda: maxsim(queries, stored, cu_seqlens_d=inputs.others[0]),
            None,
            dtype,
        )

    return build


IMPLEMENTATIONS = (
    *spec.ours(
        lambda q, d, offsets, impl: maxsim(q, d, cu_seqlens_d=offsets, impl=impl),
        chosen_impl,
        graph=True,
    ),
    spec.on_gpu("tilefold-int8", _quantized("int8")),
    spec.on_gpu("tilefold-int8-graph", lambda inputs: spec.captured(_quantized("int8")(inputs))),
    spec.on_gpu("tilefold-fp8", _quantized("fp8")),
    spec.Implementation("eager", lambda inputs: inputs.bind(_stock(inputs), "torch"), "baseline"),
    spec.on_gpu(
        "compile",
        lambda inputs: inputs.bind(torch.compile(_stock(inputs), dynamic=False), "torch.compile"),
        "baseline",
    ),
    *spec.peer("flash_maxsim", {"flash-maxsim": _flash_maxsim}),
    *spec.peer("late_interaction_kernels", {"late-interaction-kernels": _late_interaction_kernels}),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Least work: all token pairs are multiplied and each token is read once; backward moves rows,
    once each.
    """
    rows = case.dims["Nq"] * case.dims["Lq"]
    queries, documents = inputs.leaves
    flops = 2.0 * rows * documents.numel()
    tokens = float(queries.element_size() * (queries.numel() + documents.numel()))
    scores = 4.0 * inputs.grad_output.numel()
    if phase == "forward":
        return spec.Work(flops, tokens + scores)
    return spec.Work(flops, 3 * tokens + 2 * scores + 2 * 2.0 * rows * case.dims["Nd"])


def _needs(case: spec.BenchCase, impl: str) -> int:
    d = case.dims
    item = spec.DTYPES[case.dtype].itemsize
    similarities = d["Nq"] * d["Lq"] * d["Nd"] * d["Ld"] * item
    copies = {"eager": 1 if d["Nq"] == 1 else 2, "compile": 1, "reference": 8}
    return copies.get(impl, 0) * similarities + d["Nd"] * d["Ld"] * d["D"] * item


PROBE = {"Nq": 2, "Nd": 3, "Lq": 4, "Ld": 8, "D": 16}  # too small to matter
SPEC = spec.BenchSpec(
    "maxsim",
    IMPLEMENTATIONS,
    "eager",
    make_inputs,
    make_gate,
    PROBE,
    work,
    _needs,
)
