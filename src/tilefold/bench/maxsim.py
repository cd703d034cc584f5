"""The benchmark of ``tilefold.ops.maxsim``: inputs, implementations, fp64 truth, minimum work."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold import testing
from tilefold.bench import spec
from tilefold.bench.spec import BUDGETS
from tilefold.ops.maxsim import chosen_impl, maxsim, quantize_tokens

# length of the shortest packed document as a share of the longest one; lengths are evenly spaced
_SHORTEST_SHARE = 1 / 6
# number of documents whose scores with every query are checked
_N_CHECKED_DOCUMENTS = 4
# largest size of fp64 similarities in memory
_CHUNK_BYTES = 2**27
_FP64_BYTES = 8
_FP32_BYTES = 4
_INT16_BYTES = 2
# the order of summation in fp32 changes a similarity of unit vectors by less than this
_AMBIGUOUS_MARGIN = 2e-6
_QUANTIZED_BUDGET = spec.Budget(forward=BUDGETS["float32"].forward, gradient=0.0)


@dataclass(frozen=True, kw_only=True)
class MaxSimInputs(spec.Inputs):
    """Inputs of MaxSim.

    Attributes:
        queries: ``[Nq, Lq, D]``.
        documents: ``[Nd, Ld, D]``, or ``[T, D]`` if they are packed.
        cu_seqlens: offsets of packed documents, int32 ``[Nd + 1]``, or None.
    """

    queries: Tensor
    documents: Tensor
    cu_seqlens: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Queries and documents."""
        return (self.queries, self.documents)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The offsets of packed documents, or None."""
        return (self.cu_seqlens,)

    def token_rows(self, document: int) -> slice:
        """Return the rows of a document among the token vectors ``[T, D]`` of all documents."""
        if self.cu_seqlens is None:
            length = self.documents.size(1)
            return slice(document * length, (document + 1) * length)
        start, stop = self.cu_seqlens[document : document + 2].tolist()
        return slice(start, stop)

    def document_tokens(self, document: int) -> Tensor:
        """Return the token vectors ``[length, D]`` of a document."""
        all_tokens = self.documents.detach().flatten(0, -2)
        return all_tokens[self.token_rows(document)]


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> MaxSimInputs:
    """Create random unit vectors.

    Args:
        case: shape, dtype and variant. The variant ``"packed"`` has documents of different lengths
            without padding.
        device: the device of the tensors.
        seed: seed of the random numbers.
    """
    dims = case.dims
    dtype = spec.DTYPES[case.dtype]
    normal, generator = spec.random_tensors(device, seed)

    def unit_vectors(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1).to(dtype)

    queries = unit_vectors(dims["Nq"], dims["Lq"], dims["D"])
    cu_seqlens = None
    if case.variant == "packed":
        # evenly spaced lengths up to Ld, in random order
        shares = torch.linspace(_SHORTEST_SHARE, 1, dims["Nd"], device=device)
        order = torch.randperm(dims["Nd"], generator=generator, device=device)
        lengths = (shares[order] * dims["Ld"]).round().int()
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        documents = unit_vectors(int(cu_seqlens[-1]), dims["D"])
    else:
        documents = unit_vectors(dims["Nd"], dims["Ld"], dims["D"])
    n_tokens = queries.shape[:-1].numel() + documents.shape[:-1].numel()
    return MaxSimInputs(
        queries=queries.requires_grad_(),
        documents=documents.requires_grad_(),
        cu_seqlens=cu_seqlens,
        grad_output=normal(dims["Nq"], dims["Nd"]),
        valid_tokens=n_tokens,
    )


@dataclass(frozen=True)
class MaxSimGate(spec.Gate):
    """The accuracy gate of MaxSim, which also checks scores of quantized documents.

    Attributes:
        inputs: the inputs of the case.
        documents: positions of the documents whose scores with every query are checked.
    """

    inputs: MaxSimInputs
    documents: tuple[int, ...] = ()

    def check(self, runnable: spec.Runnable, kind: str) -> spec.GateResult:
        """Check an implementation for quantized documents, or else as for any operator."""
        if runnable.quantized_dtype is None:
            return super().check(runnable, kind)
        errors = {"out[:, d]": self._quantized_error(runnable.forward(), runnable.quantized_dtype)}
        return spec.GateResult(errors, _QUANTIZED_BUDGET)

    def _quantized_error(self, scores: Tensor | None, dtype: str) -> float:
        """Return the largest relative error of the scores of a checked document.

        The exact scores are those of the reference, which computes with the dequantized vectors.

        Args:
            scores: scores with quantized documents ``[Nq, Nd]``.
            dtype: ``"int8"`` or ``"fp8"``.

        Returns:
            The error, or infinity if any score is not finite.
        """
        if scores is None or not bool(scores.isfinite().all()):
            return float("inf")
        worst_error = 0.0
        for document in self.documents:
            tokens = self.inputs.document_tokens(document)
            quantized = quantize_tokens(tokens[None], dtype=dtype)
            expected = maxsim(self.inputs.queries.detach(), quantized, impl="reference")
            error = testing.relative_error(scores[:, document : document + 1], expected)
            worst_error = max(worst_error, error)
        return worst_error


@torch.no_grad()
def make_gate(case: spec.BenchCase, inputs: MaxSimInputs) -> MaxSimGate:
    """Create the accuracy gate of a case, which implementations must pass before they are timed.

    The gate compares parts of the scores and gradients with their fp64 values: the first and the
    last query with all documents, and a few documents with all queries.

    A gradient depends on which document token is the best match of a query token. If rounding may
    change this for a query and a document, their gradient in ``inputs.grad_output`` is set to 0.

    Args:
        case: shape, dtype and variant of the inputs.
        inputs: inputs of the case, whose ``grad_output`` is changed in place.
    """
    grad_output = inputs.grad_output
    n_queries, n_documents = grad_output.shape
    device = grad_output.device
    checked_queries = torch.tensor(sorted({0, n_queries - 1}), device=device)
    n_checked = min(_N_CHECKED_DOCUMENTS, n_documents)
    evenly_spread = torch.linspace(0, n_documents - 1, n_checked, dtype=torch.float64)
    checked_documents = evenly_spread.round().long().tolist()

    _clear_ambiguous_gradients(inputs, checked_queries, range(n_documents))
    all_queries = torch.arange(n_queries, device=device)
    # the fp64 similarities of the queries of a chunk with one document take at most _CHUNK_BYTES
    similarities_per_query = inputs.queries.size(1) * case.dims["Ld"]
    queries_per_chunk = max(1, _CHUNK_BYTES // (_FP64_BYTES * similarities_per_query))
    query_chunks = torch.split(all_queries, queries_per_chunk)
    for chunk in query_chunks:
        _clear_ambiguous_gradients(inputs, chunk, checked_documents)

    query_scores, dqueries = _exact_query_scores_and_gradient(inputs, checked_queries)
    document_scores = []
    ddocuments = []
    for document in checked_documents:
        scores, gradient = _exact_document_scores_and_gradient(inputs, document, query_chunks)
        document_scores.append(scores)
        ddocuments.append(gradient)

    def select_documents(documents: Tensor) -> Tensor:
        """Return the token rows of the checked documents, one document after another."""
        all_rows = documents.flatten(0, -2)
        return torch.cat([all_rows[inputs.token_rows(index)] for index in checked_documents])

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
            # scores of 16-bit tokens are fp32, and those of fp64 tokens are fp64
            forward=min(BUDGETS["float32"].forward, BUDGETS[case.dtype].forward),
            gradient=BUDGETS[case.dtype].gradient,
        ),
        documents=tuple(checked_documents),
    )


class BestMatches(NamedTuple):
    """The best match in one document of each token of n queries.

    Attributes:
        scores: sums of the largest similarities ``[n]``.
        positions: positions of the best document tokens ``[n, Lq]``.
        is_ambiguous: ``[n]``, True if the two best matches of a query token are nearly equal.
    """

    scores: Tensor
    positions: Tensor
    is_ambiguous: Tensor


def _find_best_matches(queries: Tensor, tokens: Tensor) -> BestMatches:
    """Find the document token with the largest similarity to each query token.

    Args:
        queries: ``[n, Lq, D]``.
        tokens: token vectors ``[Ld, D]`` of the document.
    """
    similarities = queries @ tokens.T  # [n, Lq, Ld]
    largest, positions = similarities.topk(min(2, similarities.size(-1)), dim=-1)
    is_ambiguous = torch.zeros(queries.size(0), dtype=torch.bool, device=queries.device)
    if largest.size(-1) == 2:
        margin = largest[..., 0] - largest[..., 1]
        is_ambiguous = (margin < _AMBIGUOUS_MARGIN).any(dim=1)
    return BestMatches(
        scores=largest[..., 0].sum(dim=1),
        positions=positions[..., 0],
        is_ambiguous=is_ambiguous,
    )


def _clear_ambiguous_gradients(
    inputs: MaxSimInputs,
    query_rows: Tensor,
    documents: Sequence[int],
) -> None:
    """Set the gradient of a score to 0 if rounding may decide which tokens receive it.

    Args:
        inputs: the inputs of the case, whose ``grad_output`` changes.
        query_rows: positions of the queries.
        documents: positions of the documents.
    """
    queries = inputs.queries.detach()[query_rows].double()
    for document in documents:
        matches = _find_best_matches(queries, inputs.document_tokens(document).double())
        inputs.grad_output[query_rows[matches.is_ambiguous], document] = 0


def _exact_query_scores_and_gradient(
    inputs: MaxSimInputs, query_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the scores of some queries, and the gradient of their token vectors, in fp64.

    Args:
        inputs: the inputs of the case. Their ``grad_output`` is the gradient of the scores.
        query_rows: positions of n queries.

    Returns:
        The scores with all documents ``[n, Nd]``, and the gradient of the queries ``[n, Lq, D]``.
    """
    queries = inputs.queries.detach()[query_rows].double()
    scores = torch.zeros_like(inputs.grad_output[query_rows], dtype=torch.float64)
    gradient = torch.zeros_like(queries)
    for document in range(scores.size(1)):
        tokens = inputs.document_tokens(document).double()
        matches = _find_best_matches(queries, tokens)
        scores[:, document] = matches.scores
        # each query token receives its best match, times the gradient of the score
        dscores = inputs.grad_output[query_rows, document, None, None].double()
        gradient += dscores * tokens[matches.positions]
    return scores, gradient


def _exact_document_scores_and_gradient(
    inputs: MaxSimInputs,
    document: int,
    query_chunks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute the scores of one document, and the gradient of its token vectors, in fp64.

    Args:
        inputs: the inputs of the case. Their ``grad_output`` is the gradient of the scores.
        document: position of the document.
        query_chunks: positions of all queries, in chunks that bound the memory of similarities.

    Returns:
        The scores with all queries ``[Nq]``, and the gradient of the document's token vectors
        ``[length, D]``.
    """
    tokens = inputs.document_tokens(document).double()
    gradient = torch.zeros_like(tokens)
    scores = []
    for query_rows in query_chunks:
        queries = inputs.queries.detach()[query_rows].double()
        matches = _find_best_matches(queries, tokens)
        scores.append(matches.scores)
        # each query token adds its vector, times the gradient of the score, to its best match
        dscores = inputs.grad_output[query_rows, document, None, None].double()
        contributions = dscores * queries
        gradient.index_add_(0, matches.positions.flatten(), contributions.flatten(0, 1))
    return torch.cat(scores), gradient


def materialised_scores(queries: Tensor, documents: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute MaxSim as late-interaction libraries do, with all similarities in memory at once.

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


def _create_einsum_call(inputs: MaxSimInputs) -> Callable[..., Tensor]:
    """Return a function that computes MaxSim as late-interaction libraries do, by an einsum.

    These libraries have no packed documents. Packed documents are therefore padded in each call.

    Returns:
        A function of queries, documents and document offsets. It ignores the offsets, because the
        layout of the padding is computed from ``inputs`` beforehand.
    """
    if inputs.cu_seqlens is None:
        return lambda queries, documents, _no_offsets: materialised_scores(queries, documents)
    lengths = inputs.cu_seqlens.diff()
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    valid = positions < lengths[:, None]  # [Nd, Ld]
    packed_positions = valid.nonzero(as_tuple=True)

    def pad_and_score(queries: Tensor, documents: Tensor, _offsets: Tensor) -> Tensor:
        padded = documents.new_zeros(*valid.shape, documents.size(1))
        padded = padded.index_put(packed_positions, documents)
        return materialised_scores(queries, padded, valid)

    return pad_and_score


def _build_einsum(inputs: MaxSimInputs) -> spec.Runnable:
    """Return MaxSim by the einsum of late-interaction libraries, as a call on the inputs."""
    return inputs.bind(_create_einsum_call(inputs), "torch")


def _build_compiled_einsum(inputs: MaxSimInputs) -> spec.Runnable:
    """Return the einsum of late-interaction libraries under ``torch.compile``."""
    return inputs.bind(torch.compile(_create_einsum_call(inputs), dynamic=False), "torch.compile")


def _build_flash_maxsim(inputs: MaxSimInputs) -> spec.Runnable:
    """Return MaxSim of the package ``flash_maxsim``, as a call on the inputs.

    The package scores packed documents with one query only, and without gradients. It has a faster
    function for one query and padded documents, which has no gradients: the function for several
    queries computes them.
    """
    package: Any = importlib.import_module("flash_maxsim")
    if inputs.cu_seqlens is not None:
        return _build_packed_flash_maxsim(inputs, inputs.cu_seqlens)

    # padded documents have no offsets
    def score_one(queries: Tensor, documents: Tensor, _no_offsets: None) -> Tensor:
        scores: Tensor = package.flash_maxsim(queries[0], documents)
        return scores[None]

    def score_batch(queries: Tensor, documents: Tensor, _no_offsets: None) -> Tensor:
        scores: Tensor = package.flash_maxsim_batched(queries, documents)
        return scores

    def train(queries: Tensor, documents: Tensor, _no_offsets: None) -> Tensor:
        scores: Tensor = package.flash_maxsim_batched_train(queries, documents)
        return scores

    if inputs.queries.size(0) == 1:
        return inputs.bind(score_one, "flash_maxsim", train)
    return inputs.bind(score_batch, "flash_maxsim_batched", train)


def _build_packed_flash_maxsim(inputs: MaxSimInputs, cu_seqlens: Tensor) -> spec.Runnable:
    """Return MaxSim of ``flash_maxsim`` with packed documents, which scores the first query alone.

    Args:
        inputs: the inputs of the case.
        cu_seqlens: offsets of the documents ``[Nd + 1]``.
    """
    package: Any = importlib.import_module("flash_maxsim")
    query = inputs.queries[0].detach()
    documents = inputs.documents.detach()
    longest = int(cu_seqlens.diff().max())

    def score() -> Tensor:
        scores: Tensor = package.flash_maxsim_packed(
            query,
            documents,
            cu_seqlens,
            max_seqlen_d=longest,
        )
        return scores[None]

    return spec.Runnable(score, None, "flash_maxsim_packed")


def _build_late_interaction_kernels(inputs: MaxSimInputs) -> spec.Runnable:
    """Return MaxSim of the package ``late_interaction_kernels``, as a call on the inputs.

    Padded documents are scored with all queries, and packed documents with the first query only.

    Args:
        inputs: the inputs of the case.
    """
    package: Any = importlib.import_module("late_interaction_kernels")
    if inputs.cu_seqlens is None:

        def score_padded(queries: Tensor, documents: Tensor, _no_offsets: None) -> Tensor:
            scores: Tensor = package.maxsim(queries, documents)
            return scores

        return inputs.bind(score_padded, "late_interaction_kernels.maxsim")
    query_length = inputs.queries.size(1)
    longest_document = int(inputs.cu_seqlens.diff().max())
    query_offsets = torch.tensor(
        [0, query_length],
        dtype=torch.int32,
        device=inputs.queries.device,
    )

    def score_packed(queries: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
        """Score the first query with all documents."""
        scores: Tensor = package.maxsim_varlen(
            queries[0],
            documents,
            query_offsets,
            document_offsets,
            max_seqlen_q=query_length,
            max_seqlen_d=longest_document,
        )
        return scores

    return inputs.bind(score_packed, "late_interaction_kernels.maxsim_varlen")


def _build_quantized(inputs: MaxSimInputs, dtype: str) -> spec.Runnable:
    """Return tilefold's MaxSim with documents that are quantized before the timed call.

    Args:
        inputs: the inputs of the case.
        dtype: ``"int8"`` or ``"fp8"``.
    """
    queries = inputs.queries.detach()
    quantized = quantize_tokens(inputs.documents.detach(), dtype=dtype)
    return spec.Runnable(
        forward=lambda: maxsim(queries, quantized, cu_seqlens_d=inputs.cu_seqlens),
        forward_backward=None,
        label=dtype,
        quantized_dtype=dtype,
    )


def _build_int8_graph(inputs: MaxSimInputs) -> spec.Runnable:
    """Return tilefold's MaxSim with int8 documents, captured as a CUDA graph."""
    return spec.captured(_build_quantized(inputs, "int8"))


def _maxsim(queries: Tensor, documents: Tensor, cu_seqlens: Tensor | None, impl: str) -> Tensor:
    """Return the scores of tilefold's MaxSim, with documents packed by ``cu_seqlens`` or padded."""
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


def work(case: spec.BenchCase, inputs: MaxSimInputs, phase: spec.Phase) -> spec.Work:
    """Return a lower bound of the operations and of the memory traffic of MaxSim.

    Forward multiplies every query token with every document token, reads all token vectors once
    and writes the scores. Training also writes the position of each best match, and reads it in
    the backward pass. Backward has no matrix products: it adds rows of token vectors, so that it
    reads all token vectors again and writes a gradient for each.

    Args:
        case: the shape: ``Nq`` queries of ``Lq`` tokens, ``Nd`` documents.
        inputs: tensors of the case. Documents may be packed.
        phase: forward, or forward and backward.
    """
    queries, documents = inputs.queries, inputs.documents
    n_query_tokens = case.dims["Nq"] * case.dims["Lq"]
    # each query token is multiplied with each number in the documents
    flops = 2.0 * n_query_tokens * documents.numel()
    token_bytes = float(queries.element_size() * (queries.numel() + documents.numel()))
    # scores of 16-bit tokens are fp32
    score_bytes = float(_FP32_BYTES * inputs.grad_output.numel())
    if phase == "forward":
        return spec.Work(flops, token_bytes + score_bytes)
    # the position of the best match in each document for each query token
    winner_bytes = float(_INT16_BYTES * n_query_tokens * case.dims["Nd"])
    total_bytes = (
        3 * token_bytes  # read by forward and backward; their gradients are written
        + 2 * score_bytes  # scores are written; their gradients are read
        + 2 * winner_bytes  # written by forward, read by backward
    )
    return spec.Work(flops, total_bytes)


def min_bytes(case: spec.BenchCase, impl: str) -> int:
    """Return a lower bound of the memory of an implementation.

    Args:
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        Bytes of the documents, and of all copies of the similarities ``[Nq, Nd, Lq, Ld]`` that the
        implementation holds at a time.
    """
    dims = case.dims
    item_bytes = spec.DTYPES[case.dtype].itemsize
    similarity_bytes = dims["Nq"] * dims["Lq"] * dims["Nd"] * dims["Ld"] * item_bytes
    document_bytes = dims["Nd"] * dims["Ld"] * dims["D"] * item_bytes
    # in the dtype of the case
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
    min_bytes=min_bytes,
)
