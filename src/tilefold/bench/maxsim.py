"""The benchmark of ``tilefold.ops.maxsim``: shapes, implementations, truth, least work."""

from __future__ import annotations

import functools
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

# packed cases: their shortest document as a share of the longest; lengths are evenly spread
_SHORTEST_SHARE = 1 / 6
# documents that are checked against every query
_N_CHECKED_DOCUMENTS = 4
# fp64 similarities in memory at a time
_CHUNK_BYTES = 2**27
_FP64_BYTES = 8
_FP32_BYTES = 4
_INT16_BYTES = 2
# the order of evaluation in fp32 moves a similarity of unit vectors by less than this
_AMBIGUOUS_MARGIN = 2e-6
_QUANTIZED_DTYPES = ("int8", "fp8")
_QUANTIZED_BUDGET = spec.Budget(forward=BUDGETS["float32"].forward, gradient=0.0)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Create random unit vectors.

    Args:
        case: its variant ``"packed"`` has documents of different lengths without padding.
        device: of the tensors.
        seed: of the random numbers.

    Returns:
        The leaves are queries ``[Nq, Lq, D]`` and documents ``[Nd, Ld, D]``, or ``[T, D]`` if they
        are packed. The constant is their offsets ``[Nd + 1]`` in int32, or None.
    """
    dims = case.dims
    dtype = spec.DTYPES[case.dtype]
    normal, generator = spec.random_tensors(device, seed)

    def unit_vectors(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1).to(dtype)

    queries = unit_vectors(dims["Nq"], dims["Lq"], dims["D"])
    cu_seqlens = None
    if case.variant == "packed":
        shares = torch.linspace(_SHORTEST_SHARE, 1, dims["Nd"], device=device)
        order = torch.randperm(dims["Nd"], generator=generator, device=device)
        lengths = (shares[order] * dims["Ld"]).round().int()
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        documents = unit_vectors(int(cu_seqlens[-1]), dims["D"])
    else:
        documents = unit_vectors(dims["Nd"], dims["Ld"], dims["D"])
    n_tokens = queries.shape[:-1].numel() + documents.shape[:-1].numel()
    return spec.Inputs(
        leaves=(queries.requires_grad_(), documents.requires_grad_()),
        constants=(cu_seqlens,),
        grad_output=normal(dims["Nq"], dims["Nd"]),
        valid_tokens=n_tokens,
    )


def _token_rows(inputs: spec.Inputs, document: int) -> slice:
    """Return the rows of a document among the token vectors ``[T, D]`` of all documents."""
    (cu_seqlens,) = inputs.constants
    if cu_seqlens is None:
        length = inputs.leaves[1].size(1)
        return slice(document * length, (document + 1) * length)
    begin, end = cu_seqlens[document : document + 2].tolist()
    return slice(begin, end)


def _document_tokens(inputs: spec.Inputs, document: int) -> Tensor:
    """Return the token vectors ``[length, D]`` of a document."""
    all_tokens = inputs.leaves[1].detach().flatten(0, -2)
    return all_tokens[_token_rows(inputs, document)]


@dataclass(frozen=True)
class MaxSimGate(spec.Gate):
    """The gate of MaxSim, which also checks scores of quantised documents.

    Attributes:
        documents: positions of the documents that are checked against every query.
    """

    documents: tuple[int, ...] = ()

    def check(self, runnable: spec.Runnable, kind: str) -> spec.GateResult:
        """Check an implementation.

        Scores of quantised documents are compared with the reference on the dequantised numbers.
        They have no gradient.
        """
        quantized_dtype = runnable.label.partition(",")[0]
        if quantized_dtype not in _QUANTIZED_DTYPES:
            return super().check(runnable, kind)
        scores = runnable.forward()
        if scores is None or not bool(scores.isfinite().all()):
            return spec.GateResult({"out[:, d]": float("inf")}, _QUANTIZED_BUDGET)
        queries = self.inputs.leaves[0].detach()
        worst_error = 0.0
        for document in self.documents:
            tokens = _document_tokens(self.inputs, document)
            quantized = quantize_tokens(tokens[None], dtype=quantized_dtype)
            expected = maxsim(queries, quantized, impl="reference")
            error = testing.relative_error(scores[:, document : document + 1], expected)
            worst_error = max(worst_error, error)
        return spec.GateResult({"out[:, d]": worst_error}, _QUANTIZED_BUDGET)


@torch.no_grad()
def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> MaxSimGate:
    """Compute slices of the scores and gradients in fp64.

    The slices are the first and the last query with all documents, and a few documents with all
    queries. A gradient depends on which document token a query token matches best. Pairs of a
    query and a document in which rounding may decide this get the gradient 0 in
    ``inputs.grad_output``, which this function changes.
    """
    grad_output = inputs.grad_output
    n_queries, n_documents = grad_output.shape
    device = grad_output.device
    checked_queries = torch.tensor(sorted({0, n_queries - 1}), device=device)
    n_checked = min(_N_CHECKED_DOCUMENTS, n_documents)
    evenly_spread = torch.linspace(0, n_documents - 1, n_checked, dtype=torch.float64)
    checked_documents = evenly_spread.round().long().tolist()

    queries = inputs.leaves[0].detach()[checked_queries].double()
    query_scores = torch.zeros(len(queries), n_documents, dtype=torch.float64, device=device)
    dqueries = torch.zeros_like(queries)
    for document in range(n_documents):
        tokens = _document_tokens(inputs, document).double()
        query_scores[:, document], winners, is_ambiguous = _best_matches(queries, tokens)
        grad_output[checked_queries[is_ambiguous], document] = 0
        weights = grad_output[checked_queries, document, None, None].double()
        dqueries += weights * tokens[winners]

    bytes_per_query = _FP64_BYTES * inputs.leaves[0].size(1) * case.dims["Ld"]
    queries_per_chunk = max(1, _CHUNK_BYTES // bytes_per_query)
    document_scores = []
    ddocuments = []
    for document in checked_documents:
        scores, gradient = _document_truth(inputs, document, queries_per_chunk)
        document_scores.append(scores)
        ddocuments.append(gradient)

    def select_documents(documents: Tensor) -> Tensor:
        """Return the rows of the checked documents, one document after another."""
        all_rows = documents.flatten(0, -2)
        return torch.cat([all_rows[_token_rows(inputs, index)] for index in checked_documents])

    return MaxSimGate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={
            "out[q, :]": spec.CheckedSlice(lambda scores: scores[checked_queries], query_scores),
            "out[:, d]": spec.CheckedSlice(
                lambda scores: scores[:, checked_documents],
                torch.stack(document_scores, dim=1),
            ),
        },
        gradients={
            "dqueries": spec.CheckedSlice(lambda gradient: gradient[checked_queries], dqueries),
            "ddocuments": spec.CheckedSlice(select_documents, torch.cat(ddocuments)),
        },
        our_budget=spec.Budget(
            # scores of 16-bit tokens are fp32, those of fp64 tokens are fp64
            forward=min(BUDGETS["float32"].forward, BUDGETS[case.dtype].forward),
            gradient=BUDGETS[case.dtype].gradient,
        ),
        documents=tuple(checked_documents),
    )


def _best_matches(queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score queries with one document, and find the document token that each query token matches.

    Args:
        queries: ``[n, Lq, D]``.
        tokens: token vectors ``[Ld, D]`` of the document.

    Returns:
        The scores ``[n]``, the positions of the best document tokens ``[n, Lq]``, and whether a
        query has a token with two best matches up to rounding ``[n]``.
    """
    similarities = queries @ tokens.T  # [n, Lq, Ld]
    largest, positions = similarities.topk(min(2, similarities.size(-1)), dim=-1)
    is_ambiguous = torch.zeros(queries.size(0), dtype=torch.bool, device=queries.device)
    if largest.size(-1) == 2:
        margin = largest[..., 0] - largest[..., 1]
        is_ambiguous = (margin < _AMBIGUOUS_MARGIN).any(dim=1)
    return largest[..., 0].sum(dim=1), positions[..., 0], is_ambiguous


def _document_truth(
    inputs: spec.Inputs,
    document: int,
    queries_per_chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute the scores and the gradient of one document in fp64.

    Pairs whose best matches are ambiguous get the gradient 0 in ``inputs.grad_output``.

    Args:
        inputs: the inputs of the case.
        document: position of the document.
        queries_per_chunk: queries that are scored at a time, to bound memory.

    Returns:
        The scores with all queries ``[Nq]``, and the gradient of the document's token vectors
        ``[length, D]``.
    """
    grad_output = inputs.grad_output
    tokens = _document_tokens(inputs, document).double()
    gradient = torch.zeros_like(tokens)
    scores = []
    for begin in range(0, grad_output.size(0), queries_per_chunk):
        queries = inputs.leaves[0].detach()[begin : begin + queries_per_chunk].double()
        chunk_scores, winners, is_ambiguous = _best_matches(queries, tokens)
        rows = torch.arange(begin, begin + queries.size(0), device=grad_output.device)
        grad_output[rows[is_ambiguous], document] = 0
        scores.append(chunk_scores)
        # each query token adds its vector, times the gradient of the pair, to its best match
        contributions = grad_output[rows, document, None, None].double() * queries
        gradient.index_add_(0, winners.flatten(), contributions.flatten(0, 1))
    return torch.cat(scores), gradient


def materialised_scores(queries: Tensor, documents: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute MaxSim as late-interaction libraries do, with all similarities in memory.

    Args:
        queries: ``[Nq, Lq, D]``.
        documents: ``[Nd, Ld, D]``.
        valid: bool ``[Nd, Ld]``, False for padding.

    Returns:
        Scores ``[Nq, Nd]`` in fp32, or fp64 for fp64 tokens.
    """
    similarities = torch.einsum("qid,njd->qnij", queries, documents)
    if valid is not None:
        similarities = similarities.masked_fill(~valid[:, None], float("-inf"))
    accumulation_dtype = torch.promote_types(queries.dtype, torch.float32)
    return similarities.amax(dim=3).sum(dim=2, dtype=accumulation_dtype)


def _einsum_call(inputs: spec.Inputs) -> Callable[..., Tensor]:
    """Return the einsum of late-interaction libraries as a function of queries and documents.

    Packed documents are padded in each call, since such a library has no packed ones.
    """
    (cu_seqlens,) = inputs.constants
    if cu_seqlens is None:
        return lambda queries, documents, _: materialised_scores(queries, documents)
    lengths = cu_seqlens.diff()
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    valid = positions < lengths[:, None]
    packed_positions = valid.nonzero(as_tuple=True)

    def pad_and_score(queries: Tensor, documents: Tensor, _: Tensor) -> Tensor:
        padded = documents.new_zeros(*valid.shape, documents.size(1))
        padded = padded.index_put(packed_positions, documents)
        return materialised_scores(queries, padded, valid)

    return pad_and_score


def _build_einsum(inputs: spec.Inputs) -> spec.Runnable:
    """Bind the einsum of late-interaction libraries."""
    return inputs.bind(_einsum_call(inputs), "torch")


def _build_compiled_einsum(inputs: spec.Inputs) -> spec.Runnable:
    """Bind the einsum of late-interaction libraries under ``torch.compile``."""
    return inputs.bind(torch.compile(_einsum_call(inputs), dynamic=False), "torch.compile")


def _build_flash_maxsim(inputs: spec.Inputs) -> spec.Runnable:
    """Bind the function of the package ``flash_maxsim`` that fits the inputs.

    Packed documents are scored with the first query, and without gradients: the package has no
    more for them.
    """
    package: Any = importlib.import_module("flash_maxsim")
    queries, documents = inputs.leaves
    (cu_seqlens,) = inputs.constants
    if cu_seqlens is not None:
        query = queries[0].detach()
        longest = int(cu_seqlens.diff().max())

        def score_packed() -> Tensor:
            scores: Tensor = package.flash_maxsim_packed(
                query,
                documents.detach(),
                cu_seqlens,
                max_seqlen_d=longest,
            )
            return scores[None]

        return spec.Runnable(score_packed, None, "flash_maxsim_packed")

    def score_one(queries: Tensor, documents: Tensor, _: None) -> Tensor:
        scores: Tensor = package.flash_maxsim(queries[0], documents)
        return scores[None]

    def score_batch(queries: Tensor, documents: Tensor, _: None) -> Tensor:
        scores: Tensor = package.flash_maxsim_batched(queries, documents)
        return scores

    def train(queries: Tensor, documents: Tensor, _: None) -> Tensor:
        scores: Tensor = package.flash_maxsim_batched_train(queries, documents)
        return scores

    if queries.size(0) == 1:
        return inputs.bind(score_one, "flash_maxsim", train)
    return inputs.bind(score_batch, "flash_maxsim_batched", train)


def _build_late_interaction_kernels(inputs: spec.Inputs) -> spec.Runnable:
    """Bind the function of the package ``late_interaction_kernels`` that fits the inputs."""
    package: Any = importlib.import_module("late_interaction_kernels")
    (cu_seqlens,) = inputs.constants
    if cu_seqlens is None:
        return inputs.bind(
            lambda queries, documents, _: package.maxsim(queries, documents),
            "late_interaction_kernels.maxsim",
        )
    query_length = inputs.leaves[0].size(1)
    longest_document = int(cu_seqlens.diff().max())
    query_offsets = torch.tensor([0, query_length], dtype=torch.int32, device=cu_seqlens.device)

    def score_packed(queries: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
        scores: Tensor = package.maxsim_varlen(
            queries[0],
            documents,
            query_offsets,
            document_offsets,
            max_seqlen_q=query_length,
            max_seqlen_d=longest_document,
        )
        return scores

    return inputs.bind(score_packed, "maxsim_varlen")


def _build_quantized(inputs: spec.Inputs, dtype: str) -> spec.Runnable:
    """Bind tilefold's MaxSim with documents that are quantised before the timed call.

    Args:
        inputs: the inputs of the case.
        dtype: ``"int8"`` or ``"fp8"``. It becomes the label, from which the gate takes the dtype.
    """
    queries, documents = (leaf.detach() for leaf in inputs.leaves)
    (cu_seqlens,) = inputs.constants
    quantized = quantize_tokens(documents, dtype=dtype)
    return spec.Runnable(
        forward=lambda: maxsim(queries, quantized, cu_seqlens_d=cu_seqlens),
        forward_backward=None,
        label=dtype,
    )


def _build_int8_graph(inputs: spec.Inputs) -> spec.Runnable:
    """Bind tilefold's MaxSim with int8 documents as a CUDA graph."""
    return spec.captured(_build_quantized(inputs, "int8"))


def _maxsim(queries: Tensor, documents: Tensor, cu_seqlens: Tensor | None, impl: str) -> Tensor:
    """Call tilefold's MaxSim with the leaves and the constant of a case."""
    return maxsim(queries, documents, cu_seqlens_d=cu_seqlens, impl=impl)


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_maxsim, chosen_impl, graph=True),
    spec.gpu_implementation("tilefold-int8", functools.partial(_build_quantized, dtype="int8")),
    spec.gpu_implementation("tilefold-int8-graph", _build_int8_graph),
    spec.gpu_implementation("tilefold-fp8", functools.partial(_build_quantized, dtype="fp8")),
    spec.Implementation("eager", _build_einsum, "baseline"),
    spec.gpu_implementation("compile", _build_compiled_einsum, "baseline"),
    *spec.published_implementations(
        "flash_maxsim",
        {"flash-maxsim": _build_flash_maxsim},
    ),
    *spec.published_implementations(
        "late_interaction_kernels",
        {"late-interaction-kernels": _build_late_interaction_kernels},
    ),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Return the least work of MaxSim: operations, and bytes that are read and written.

    Forward multiplies every query token with every document token, reads all token vectors once
    and writes the scores. Training also writes which document token each query token matches, and
    reads this in the backward pass. The backward pass has no products: it adds rows of token
    vectors, so it reads all token vectors again and writes a gradient for each.

    Args:
        case: the shape: ``Nq`` queries of ``Lq`` tokens, ``Nd`` documents.
        inputs: tensors of the case. Documents may be packed.
        phase: forward, or forward and backward.
    """
    queries, documents = inputs.leaves
    n_query_tokens = case.dims["Nq"] * case.dims["Lq"]
    # a multiplication and an addition for each query token and each number in the documents
    flops = 2.0 * n_query_tokens * documents.numel()
    token_bytes = float(queries.element_size() * (queries.numel() + documents.numel()))
    score_bytes = float(_FP32_BYTES * inputs.grad_output.numel())
    if phase == "forward":
        return spec.Work(flops, token_bytes + score_bytes)
    # a position within a document for each query token and document
    winner_bytes = float(_INT16_BYTES * n_query_tokens * case.dims["Nd"])
    total_bytes = (
        3 * token_bytes  # read by forward and backward; their gradients are written
        + 2 * score_bytes  # scores are written; their gradients are read
        + 2 * winner_bytes  # written by forward, read by backward
    )
    return spec.Work(flops, total_bytes)


def needs_bytes(case: spec.BenchCase, impl: str) -> int:
    """Estimate the memory of an implementation from below.

    Args:
        case: the shape.
        impl: name of the implementation.

    Returns:
        Bytes of the documents, and of all similarities ``[Nq, Nd, Lq, Ld]`` as often as the
        implementation stores them.
    """
    dims = case.dims
    item_bytes = spec.DTYPES[case.dtype].itemsize
    similarity_bytes = dims["Nq"] * dims["Lq"] * dims["Nd"] * dims["Ld"] * item_bytes
    document_bytes = dims["Nd"] * dims["Ld"] * dims["D"] * item_bytes
    # in units of one tensor of that shape in the dtype of the case
    copies_of_similarities = {
        "eager": 1 if dims["Nq"] == 1 else 2,
        "compile": 1,
        "reference": 8,
    }
    return copies_of_similarities.get(impl, 0) * similarity_bytes + document_bytes


SPEC = spec.BenchSpec(
    op="maxsim",
    implementations=IMPLEMENTATIONS,
    baseline="eager",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"Nq": 2, "Nd": 3, "Lq": 4, "Ld": 8, "D": 16},
    work=work,
    needs_bytes=needs_bytes,
)
