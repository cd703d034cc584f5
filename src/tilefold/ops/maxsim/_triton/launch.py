"""Plans of the forward kernels, and their launch."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import Step, rows_fit_descriptor
from tilefold.ops._shared._triton.offsets import int32_step
from tilefold.ops._shared._triton.tensors import cdiv, sm_count
from tilefold.ops._shared.call_cache import CallCache, call_key, is_aligned
from tilefold.ops._shared.fallback import KernelUnavailableError, give_up, given_up
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim._problem import Operands, Problem
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.plan import Derive, Make, Plan, Run, Stage
from tilefold.ops.maxsim._triton.rows import RowFacts, int8_queries, inverse_norms, row_facts
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim.configs import BY_TMA, ForwardConfig, forward_config, stream_config

RESULTS = (at.SCORES, at.SAVED, at.ROW_FACTS)
PAIRINGS = {"all": 0, "grouped": 1, "index": 2}
UNUSED_IN_STREAM = ("SMOOTH", "WITH_SAVED", "NO_WINNER", "NORMALIZED", "HAS_QSCALE")
READ_DOCUMENTS = ("stream_kernel", "all_pairs_kernel", "listed_pairs_kernel")  # by TMA, or by pointers
PLANS: CallCache[Plan] = CallCache()  # of the registered operator's calls


def forward(problem: Problem, with_saved: bool) -> tuple[Tensor, Tensor]:
    """Scores in fp32, and what backward needs (empty unless asked for)."""
    operands = problem.operands
    key = call_key(operands, (problem.options, with_saved))
    plan = PLANS.find(key)
    if plan is None:
        aligned = key is not None and is_aligned(key)
        plan = plan_forward(problem, operands, with_saved, problem.score_shape, aligned)
        if key is not None:
            PLANS.keep(key, plan)
    try:
        scores, saved, _ = plan(*operands)
    except KernelUnavailableError as error:
        if not plan.by_tma or error.kernel not in READ_DOCUMENTS:
            raise
        instead = "Documents are read by pointers instead: the same scores, slower."
        give_up(BY_TMA, problem.queries.device, str(error), instead)
        return forward(problem, with_saved)
    return scores, scores.new_empty(0, 0, dtype=problem.saved_dtype) if saved is None else saved


def plan_forward(
    problem: Problem,
    operands: Operands,
    with_saved: bool,
    shape: tuple[int, ...],
    aligned: bool,
    divisor: float = 1.0,
) -> Plan:
    """How tensors like the ``operands`` of a problem are scored.

    Args:
        problem: the operands as rows; only what makes a call's key is looked at.
        operands: as the plan will get them.
        with_saved: whether what backward needs is kept.
        shape: of the scores, which lie in the order of ``problem.score_shape``.
        aligned: whether all operands are known to begin at multiples of 16 bytes.
        divisor: of all scores; 1 with quantized documents.
    """
    queries, device, dim = problem.queries, problem.queries.device, problem.queries.size(1)
    stages: list[Stage] = [*copies(operands), Make(at.SCORES, queries, shape, torch.float32)]
    if with_saved:
        stages.append(_make_saved(problem))
    if 0 in shape:
        return Plan(tuple(stages), RESULTS, aligned)
    everything = problem.pairing == "all"
    rows = queries.size(0) if everything else problem.query_length or queries.size(0)
    stored = problem.documents.dtype
    stream = None
    if everything and not with_saved and not problem.temperature:
        stream = stream_config(stored, dim, rows, device, queries.dtype)
    dtype = stored if stored == torch.int8 else queries.dtype  # queries of int8 documents are rounded to int8 too
    config = stream or forward_config(dtype, dim, rows, device, problem.document_length if with_saved else None)
    tma = None
    if config.use_tma and rows_fit_descriptor(problem.documents) and given_up(BY_TMA, device) is None:
        tma = Tma(problem.documents.size(0), dim, functools.partial(_descriptor, [config.block_t, config.block_k]))
    constants = _constants(problem, config, with_saved, tma is not None)
    if problem.normalize or (with_saved and row_facts(problem)):
        stages.append(RowFacts(problem, found=False))
    if problem.normalize:
        stages.append(inverse_norms(problem))
    elif stored == torch.int8 and not stream:  # which rounds them itself
        stages += int8_queries(queries)
    described = () if tma is None else (None, tma)
    if stream:
        _add_stream(stages, problem, config, constants, described)
    else:
        add = _add_all_pairs if everything else _add_listed_pairs
        add(stages, problem, config, constants, described, divisor)
    return Plan(tuple(stages), RESULTS, aligned, tma is not None)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def copies(operands: Operands, masks: bool = True) -> list[Stage]:
    """What brings operands to the form that kernels read: contiguous, offsets and pairs in int32."""
    stages: list[Stage] = []
    for place, tensor in enumerate(operands):
        if tensor is None or (place in (at.QUERY_MASK, at.DOCUMENT_MASK) and not masks):
            continue
        if not tensor.is_contiguous():
            stages.append(Derive(place, Tensor.contiguous, place))
        if place in (at.CU_QUERIES, at.CU_DOCUMENTS, at.INDEX) and tensor.dtype == torch.int64 and tensor.numel():
            stages.append(Make(at.NARROW, tensor, tensor.shape, torch.int32))
            stages.append(Run(int32_step(tensor.numel()), (place, at.NARROW)))
            stages.append(Derive(place, _itself, at.NARROW))
    return stages


def layout_flags(problem: Problem) -> dict[str, Any]:
    """The constants that every kernel takes."""
    return {
        "D": problem.queries.size(1),
        "UNIFORM_Q": problem.cu_queries is None,
        "UNIFORM_D": problem.cu_documents is None,
        "HAS_SCALE": problem.normalize or problem.document_scale is not None,
    }


def _descriptor(block: list[int], rows: Tensor) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), [rows.size(1), 1], block)


def _make_saved(problem: Problem) -> Make:
    fill = None
    if problem.index is not None and problem.cu_queries is not None:
        # no token writes the places past the end of a query shorter than the longest
        fill = math.inf if problem.temperature else -1
    return Make(at.SAVED, problem.queries, problem.saved_shape, problem.saved_dtype, fill)


def _constants(problem: Problem, config: ForwardConfig, with_saved: bool, use_tma: bool) -> dict[str, Any]:
    return layout_flags(problem) | {
        "BLOCK_Q": config.block_q,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "HAS_QMASK": problem.query_mask is not None,
        "HAS_DMASK": problem.document_mask is not None,
        "HAS_QSCALE": problem.normalize or problem.documents.dtype == torch.int8,
        "MASK_ZERO": problem.mask_zero,
        "SMOOTH": problem.temperature > 0,
        "WITH_SAVED": with_saved,
        "NO_WINNER": 0 if problem.temperature else no_winner(problem.saved_dtype),
        "USE_TMA": use_tma,
        "PRECISION": config.precision,
        "INTEGER": problem.documents.dtype == torch.int8,
        "NORMALIZED": problem.normalize,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _operands(problem: Problem) -> tuple[int, ...]:
    """The places of what the kernels of batches and listed pairs take first."""
    queries = at.INT8_QUERIES if problem.documents.dtype == torch.int8 else at.QUERIES
    return (
        queries, at.DOCUMENTS, at.QUERY_MASK, at.DOCUMENT_MASK, at.QUERY_SCALE, at.DOCUMENT_SCALE, at.CU_QUERIES,
        at.CU_DOCUMENTS,
    )  # fmt: skip


def _sizes(problem: Problem) -> tuple[int, ...]:
    p = problem
    return (
        p.queries.size(0), p.documents.size(0), p.n_queries, p.n_documents, p.query_length, p.document_length,
    )  # fmt: skip


def _add_stream(
    stages: list[Stage], problem: Problem, config: ForwardConfig, constants: dict[str, Any], tma: tuple[Tma | None, ...]
) -> None:
    constants = {name: value for name, value in constants.items() if name not in UNUSED_IN_STREAM}
    constants["PREFETCH"] = config.prefetch if tma else 0
    if config.registers is not None:
        constants["maxnreg"] = config.registers
    programs = plan_splits(1, problem.n_documents, sm_count(problem.queries.device) * config.programs)
    step = Step(stream_kernel, (programs, 1, 1), _sizes(problem), constants, tma)
    places = (
        at.QUERIES, at.DOCUMENTS, at.DOCUMENTS, at.QUERY_MASK, at.DOCUMENT_MASK, at.DOCUMENT_SCALE, at.CU_QUERIES,
        at.CU_DOCUMENTS, at.SCORES,
    )  # fmt: skip
    stages.append(Run(step, places))


def _add_listed_pairs(
    stages: list[Stage], problem: Problem, config: ForwardConfig, constants: dict[str, Any],
    tma: tuple[Tma | None, ...], divisor: float,
) -> None:  # fmt: skip
    constants["PAIRING"] = PAIRINGS[problem.pairing]
    numbers = (*_sizes(problem), max(problem.group, 1), problem.longest_query, *_temperatures(problem), divisor)
    step = Step(listed_pairs_kernel, (problem.score_shape[0], 1, 1), numbers, constants, tma)
    stages.append(Run(step, (*_operands(problem), at.INDEX, at.SCORES, at.SAVED)))


def _add_all_pairs(
    stages: list[Stage], problem: Problem, config: ForwardConfig, constants: dict[str, Any],
    tma: tuple[Tma | None, ...], divisor: float,
) -> None:  # fmt: skip
    rows, length = problem.queries.size(0), problem.query_length
    direct = 0 < length <= config.block_q
    tile_rows = config.block_q // length * length if direct else config.block_q
    tiles = cdiv(rows, tile_rows)
    direct = direct or (not length and tiles == 1)
    splits = plan_splits(tiles, problem.n_documents, sm_count(problem.queries.device) * config.programs)
    constants["LQ"] = length if direct and length and config.block_q % length == 0 else 0
    constants["DIRECT"] = direct
    steps = problem.n_queries.bit_length()
    numbers = (*_sizes(problem), tile_rows, splits, steps, *_temperatures(problem), divisor)
    step = Step(all_pairs_kernel, (tiles, splits, 1), numbers, constants, tma)
    stages.append(Run(step, (*_operands(problem), at.SCORES, at.PARTS, at.SAVED, at.ROW_QUERY)))
    if direct:
        return
    # partial sums of queries that several tiles share
    stages.insert(-1, Make(at.PARTS, problem.queries, (tiles + problem.n_queries, problem.n_documents), torch.float32))
    constants = {"BLOCK": 256, "UNIFORM_Q": problem.cu_queries is None, "num_warps": 4, "num_stages": 3}
    numbers = (rows, *problem.score_shape, length, tile_rows, divisor)
    step = Step(combine_kernel, (problem.n_queries * cdiv(problem.n_documents, 256), 1, 1), numbers, constants)
    stages.append(Run(step, (at.PARTS, at.CU_QUERIES, at.SCORES)))


def _temperatures(problem: Problem) -> tuple[float, float]:
    return problem.temperature, 1.0 / problem.temperature if problem.temperature else 0.0


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document per program.
    """
    limit = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, limit + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))
