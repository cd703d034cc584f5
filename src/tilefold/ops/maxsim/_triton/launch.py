"""The launchers of the forward kernels: few launches, few allocations and no look at the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import DESCRIPTOR_ALIGNMENT, launcher, rows_fit_descriptor
from tilefold.ops._shared._triton.offsets import in_int32
from tilefold.ops._shared.fallback import KernelUnavailableError, give_up, given_up
from tilefold.ops.maxsim._problem import REPLAY, TRAINING, Problem, no_winner
from tilefold.ops.maxsim._triton.direct import can_remember, second_time
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.replay import Combine, Plan, Replay
from tilefold.ops.maxsim._triton.rows import cdiv, inverse_norms
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim.configs import BY_TMA, ForwardConfig, forward_config, stream_config

PAIRINGS = {"all": 0, "grouped": 1, "index": 2}


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_use_tma(rows: Tensor) -> bool:
    """Whether contiguous ``[T, D]`` rows can be read through a TMA descriptor: 16-byte aligned base and rows."""
    return rows.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 and rows_fit_descriptor(rows)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read: contiguous, and no bool."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def row_scales(problem: Problem, queries: Tensor, documents: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """By what the rows of either side are multiplied."""
    if problem.normalize:
        return inverse_norms(queries), inverse_norms(documents)
    return problem.query_scale, problem.document_scale


def layout_flags(problem: Problem) -> dict[str, Any]:
    """The constants that every kernel takes."""
    return {
        "D": problem.queries.size(1),
        "UNIFORM_Q": problem.cu_queries is None,
        "UNIFORM_D": problem.cu_documents is None,
        "HAS_SCALE": problem.normalize or problem.query_scale is not None,
    }


def forward(problem: Problem, with_saved: bool) -> tuple[Tensor, Tensor]:
    """Scores in fp32, and what backward needs (empty unless asked for)."""
    queries, documents = problem.queries.contiguous(), problem.documents.contiguous()
    device = queries.device
    scores = torch.empty(problem.score_shape, dtype=torch.float32, device=device)
    saved = _room_for_saved(problem) if with_saved else scores.new_empty(0, 0, dtype=problem.saved_dtype)
    if scores.numel() == 0:
        return scores, saved
    plan = _planned(problem, queries, documents, scores.shape, with_saved)
    source: Any = documents
    if plan.block is not None:
        source = TensorDescriptor(documents, list(documents.shape), [documents.size(1), 1], plan.block)
    operands = (
        queries, source, as_bytes(problem.query_mask), as_bytes(problem.document_mask),
        *row_scales(problem, queries, documents), in_int32(problem.cu_queries), in_int32(problem.cu_documents),
    )  # fmt: skip
    if plan.kind == "stream":
        arguments: tuple[Any, ...] = (*operands, scores, *plan.numbers)
    elif plan.kind == "listed":
        arguments = (*operands, in_int32(problem.index), scores, saved, *plan.numbers)
    elif not plan.parts:
        arguments = (*operands, scores, scores, saved, *plan.numbers)
    else:
        parts = torch.empty(plan.parts, problem.n_documents, dtype=torch.float32, device=device)
        arguments = (*operands, scores, parts, saved, *plan.numbers)
    try:
        plan.run(plan.grid, arguments)
    except KernelUnavailableError as error:
        if plan.block is None:
            raise
        give_up(BY_TMA, device, str(error), "Documents are read by pointers instead: the same scores, slower.")
        if problem.plans is not None:
            problem.plans.pop(_plan_key(problem, queries, documents, scores.shape, with_saved), None)
        return forward(problem, with_saved)
    combine = None
    if plan.parts:
        combine = _combine(problem, plan, queries.size(0)), (arguments[9], operands[6], scores)
        combine[0].run(combine[0].grid, (*combine[1], *combine[0].numbers))
    if problem.plans is not None:
        _remember(problem, plan, arguments, saved if with_saved else None, combine)
    return scores, saved


def _combine(problem: Problem, plan: Plan, rows: int) -> Combine:
    constants = {"BLOCK": 256, "UNIFORM_Q": problem.cu_queries is None, "num_warps": 4, "num_stages": 3}
    grid = (problem.n_queries * cdiv(problem.n_documents, 256), 1, 1)
    numbers = (rows, *problem.score_shape, problem.query_length, plan.tile_rows)
    return Combine(launcher(combine_kernel, constants), grid, numbers)


def _remember(
    problem: Problem,
    plan: Plan,
    arguments: tuple[Any, ...],
    saved: Tensor | None,
    combine: tuple[Combine, tuple[Any, ...]] | None,
) -> None:
    name = REPLAY if saved is None else TRAINING
    if problem.plans is None or name in problem.plans or not second_time(problem.plans, name):
        return
    if can_remember(*arguments, problem.query_source, problem.cu_queries, problem.cu_documents):
        problem.plans[name] = Replay(problem, plan, arguments, saved, combine)


def _room_for_saved(problem: Problem) -> Tensor:
    saved = torch.empty(problem.saved_shape, dtype=problem.saved_dtype, device=problem.queries.device)
    if problem.index is not None and problem.cu_queries is not None:
        # no token writes the places past the end of a query shorter than the longest
        if problem.temperature:
            saved.fill_(float("inf"))
        else:  # every bit set is "no winner" in both dtypes
            saved.view(torch.int16).fill_(-1)
    return saved


def _planned(problem: Problem, queries: Tensor, documents: Tensor, shape: tuple[int, ...], with_saved: bool) -> Plan:
    if problem.plans is None:
        return _plan(problem, queries, documents, with_saved)
    key = _plan_key(problem, queries, documents, shape, with_saved)
    plan: Plan | None = problem.plans.get(key)
    if plan is None:
        plan = problem.plans[key] = _plan(problem, queries, documents, with_saved)
    return plan


def _plan_key(
    problem: Problem, queries: Tensor, documents: Tensor, shape: tuple[int, ...], with_saved: bool
) -> tuple[Any, ...]:
    tma, longest = can_use_tma(documents), problem.longest_query
    return "forward", with_saved, tma, longest, queries.shape, documents.shape, queries.dtype, shape


def _plan(problem: Problem, queries: Tensor, documents: Tensor, with_saved: bool) -> Plan:
    device, dim = queries.device, queries.size(1)
    everything = problem.pairing == "all"
    rows = queries.size(0) if everything else problem.query_length or queries.size(0)
    stream = None
    if everything and not with_saved and not problem.temperature:
        stream = stream_config(documents.dtype, dim, rows, device)
    winners_in = problem.document_length if with_saved else None
    config = stream or forward_config(queries.dtype, dim, rows, device, winners_in)
    use_tma = config.use_tma and can_use_tma(documents) and given_up(BY_TMA, device) is None
    constants = _constants(problem, config, queries, with_saved, use_tma)
    block = [config.block_t, config.block_k] if use_tma else None
    sizes = (
        queries.size(0), documents.size(0), problem.n_queries, problem.n_documents, problem.query_length,
        problem.document_length,
    )  # fmt: skip
    temperature = (problem.temperature, 1.0 / problem.temperature if problem.temperature else 0.0)
    slots = sm_count(device) * config.programs
    if stream is not None:
        unused = ("SMOOTH", "WITH_SAVED", "NO_WINNER", "NORMALIZED")
        constants = {name: constants[name] for name in constants if name not in unused}
        grid = (plan_splits(1, problem.n_documents, slots), 1, 1)
        return Plan("stream", launcher(stream_kernel, constants), grid, block, sizes)
    if not everything:
        constants["PAIRING"] = PAIRINGS[problem.pairing]
        numbers = (*sizes, max(problem.group, 1), problem.longest_query, *temperature)
        pairs = problem.score_shape[0]
        return Plan("listed", launcher(listed_pairs_kernel, constants), (pairs, 1, 1), block, numbers)
    length = problem.query_length
    direct = 0 < length <= config.block_q
    tile_rows = config.block_q // length * length if direct else config.block_q
    tiles = cdiv(queries.size(0), tile_rows)
    splits = plan_splits(tiles, problem.n_documents, slots)
    constants["LQ"] = length if direct and config.block_q % length == 0 else 0
    constants["DIRECT"] = direct
    numbers = (*sizes, tile_rows, splits, *temperature)
    parts = 0 if direct else tiles + problem.n_queries
    return Plan("all", launcher(all_pairs_kernel, constants), (tiles, splits, 1), block, numbers, parts, tile_rows)


def _constants(
    problem: Problem, config: ForwardConfig, queries: Tensor, with_saved: bool, use_tma: bool
) -> dict[str, Any]:
    return layout_flags(problem) | {
        "BLOCK_Q": config.block_q,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "HAS_QMASK": problem.query_mask is not None,
        "HAS_DMASK": problem.document_mask is not None,
        "MASK_ZERO": problem.mask_zero,
        "SMOOTH": problem.temperature > 0,
        "WITH_SAVED": with_saved,
        "NO_WINNER": 0 if problem.temperature else no_winner(problem.saved_dtype),
        "USE_TMA": use_tma,
        "PRECISION": config.precision,
        "INTEGER": queries.dtype == torch.int8,
        "NORMALIZED": problem.normalize,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document a program.
    """
    most = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, most + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))
