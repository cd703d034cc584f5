"""The launchers: from a problem to kernels, with few launches, few allocations and no look at the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops.maxsim._problem import Problem, no_winner
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.norms import inverse_norm_kernel, quantize_kernel, unit_gradient_kernel
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim.configs import BackwardConfig, ForwardConfig, backward_config, forward_config

PAIRINGS = {"all": 0, "grouped": 1, "index": 2}
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document in backward, where lengths are not known
BLOCK_ROWS, BLOCK_COLUMNS = 16, 128  # of the kernels that go over rows once


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds a call on the host."""
    return -(-a // b)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_use_tma(rows: Tensor) -> bool:
    """Whether contiguous ``[T, D]`` rows can be read through a TMA descriptor: 16-byte aligned base and rows."""
    return rows.data_ptr() % 16 == 0 and rows.size(1) * rows.element_size() % 16 == 0


def _bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read: contiguous, and no bool."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _inverse_norms(rows: Tensor) -> Tensor:
    scale = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    inverse_norm_kernel[(cdiv(rows.size(0), BLOCK_ROWS),)](
        rows, scale, rows.size(0), D=rows.size(1), BLOCK_R=BLOCK_ROWS, BLOCK_D=BLOCK_COLUMNS
    )
    return scale


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8 and their scales ``[T]``."""
    rows = rows.contiguous()
    values = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    quantize_kernel[(cdiv(rows.size(0), BLOCK_ROWS),)](
        rows, values, scales, rows.size(0), D=rows.size(1), BLOCK_R=BLOCK_ROWS, BLOCK_D=BLOCK_COLUMNS
    )
    return values, scales


def _scales(problem: Problem, queries: Tensor, documents: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if problem.normalize:
        return _inverse_norms(queries), _inverse_norms(documents)
    return problem.query_scale, problem.document_scale


def _flags(problem: Problem) -> dict[str, Any]:
    return {
        "D": problem.queries.size(1),
        "UNIFORM_Q": problem.cu_queries is None,
        "UNIFORM_D": problem.cu_documents is None,
        "HAS_SCALE": problem.normalize or problem.query_scale is not None,
    }


def forward(problem: Problem, with_saved: bool) -> tuple[Tensor, Tensor]:
    """Scores in fp32, and what backward needs (empty unless asked for)."""
    queries, documents = problem.queries.contiguous(), problem.documents.contiguous()
    device, dim = queries.device, queries.size(1)
    n_queries, n_documents = problem.n_queries, problem.n_documents
    scores = torch.empty(problem.score_shape, dtype=torch.float32, device=device)
    saved = _room_for_saved(problem, with_saved)
    if scores.numel() == 0:
        return scores, saved
    everything = problem.pairing == "all"
    length = problem.query_length or queries.size(0)
    config = forward_config(queries.dtype, dim, queries.size(0) if everything else length, device)
    use_tma = config.use_tma and can_use_tma(documents)
    source: Any = documents
    if use_tma:
        block = [config.block_t, config.block_k]
        source = TensorDescriptor(documents, list(documents.shape), list(documents.stride()), block)
    operands = (
        queries, source, _bytes(problem.query_mask), _bytes(problem.document_mask),
        *_scales(problem, queries, documents), _contiguous(problem.cu_queries), _contiguous(problem.cu_documents),
    )  # fmt: skip
    sizes = (
        queries.size(0), documents.size(0), n_queries, n_documents, problem.query_length, problem.document_length
    )  # fmt: skip
    temperature = (problem.temperature, 1.0 / problem.temperature if problem.temperature else 0.0)
    flags = _flags(problem) | {
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
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if everything:
        _all_pairs(problem, config, operands, sizes, temperature, flags, scores, saved)
    else:
        listed_pairs_kernel[(scores.size(0),)](
            *operands, _contiguous(problem.index), scores, saved, *sizes, max(problem.group, 1), problem.longest_query,
            *temperature, PAIRING=PAIRINGS[problem.pairing], **flags,
        )  # fmt: skip
    return scores, saved


def _room_for_saved(problem: Problem, with_saved: bool) -> Tensor:
    shape = problem.saved_shape if with_saved else (0, 0)
    saved = torch.empty(shape, dtype=problem.saved_dtype, device=problem.queries.device)
    if with_saved and problem.index is not None and problem.cu_queries is not None:
        # no token writes the places past the end of a query shorter than the longest
        if problem.temperature:
            saved.fill_(float("inf"))
        else:  # every bit set is "no winner" in both dtypes
            saved.view(torch.int16).fill_(-1)
    return saved


def _all_pairs(
    problem: Problem,
    config: ForwardConfig,
    operands: tuple[Any, ...],
    sizes: tuple[int, ...],
    temperature: tuple[float, float],
    flags: dict[str, Any],
    scores: Tensor,
    saved: Tensor,
) -> None:
    rows, n_queries, n_documents = sizes[0], sizes[2], sizes[3]
    length = problem.query_length
    direct = 0 < length <= config.block_q
    tile_rows = config.block_q // length * length if direct else config.block_q
    tiles = cdiv(rows, tile_rows)
    splits = plan_splits(tiles, n_documents, sm_count(scores.device) * config.programs)
    parts = scores if direct else torch.empty(tiles + n_queries, n_documents, dtype=torch.float32, device=scores.device)
    all_pairs_kernel[(tiles, splits)](
        *operands, scores, parts, saved, *sizes, tile_rows, splits, *temperature,
        LQ=length if direct and config.block_q % length == 0 else 0, DIRECT=direct, **flags,
    )  # fmt: skip
    if not direct:
        combine_kernel[(n_queries, cdiv(n_documents, 256))](
            parts, operands[6], scores, rows, n_queries, n_documents, length, tile_rows,
            BLOCK=256, UNIFORM_Q=problem.cu_queries is None,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document a program.
    """
    most = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, most + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))


def _lists(owners: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by owner, and where each owner's begin ``[count + 1]``."""
    ordered, order = owners.sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device))
    return order, first


def backward(
    problem: Problem, dscores: Tensor, saved: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their dtypes."""
    queries, documents = problem.queries.contiguous(), problem.documents.contiguous()
    config = backward_config(queries.dtype, queries.device)
    scales = _scales(problem, queries, documents)
    row_query = None
    if problem.pairing == "all" and problem.cu_queries is not None:
        every_row = torch.arange(queries.size(0), dtype=problem.cu_queries.dtype, device=queries.device)
        row_query = torch.searchsorted(problem.cu_queries[1:].contiguous(), every_row, right=True).clamp_(
            max=problem.n_queries - 1
        )
    largest = None
    if queries.dtype == torch.float16 and dscores.numel() and (need_documents or problem.temperature):
        largest = dscores.abs().amax()
    grads: list[Tensor | None] = []
    for needed, rows, scale, launch in (
        (need_queries, queries, scales[0], _dqueries),
        (need_documents, documents, scales[1], _ddocuments),
    ):
        if not needed:
            grads.append(None)
            continue
        # a unit vector's gradient is projected in fp32, before the only rounding
        out = torch.empty(rows.shape, dtype=torch.float32 if problem.normalize else rows.dtype, device=rows.device)
        if saved.numel() == 0 or problem.cu_queries is not None or problem.cu_documents is not None:
            out.zero_()  # rows that no sequence holds, should offsets be broken
        if saved.numel():
            launch(problem, config, queries, documents, scales, dscores, saved, row_query, largest, out)
        grads.append(_project(rows, scale, out) if problem.normalize and scale is not None else out)
    return grads[0], grads[1]


def _project(rows: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    unit_gradient_kernel[(cdiv(rows.size(0), BLOCK_ROWS),)](
        rows, scale, grad, out, rows.size(0), D=rows.size(1), BLOCK_R=BLOCK_ROWS, BLOCK_D=BLOCK_COLUMNS
    )
    return out


def _shared_arguments(problem: Problem, dscores: Tensor) -> tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]:
    sizes = (
        problem.queries.size(0), problem.documents.size(0), problem.n_queries, problem.n_documents,
        problem.query_length, problem.document_length, max(problem.group, 1), problem.longest_query,
    )  # fmt: skip
    strides = dscores.stride() if problem.pairing == "all" else (0, *dscores.stride())
    return sizes, (strides[0], strides[1]), _flags(problem) | {"PAIRING": PAIRINGS[problem.pairing]}


def _dqueries(
    problem: Problem,
    config: BackwardConfig,
    queries: Tensor,
    documents: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    dscores: Tensor,
    saved: Tensor,
    row_query: Tensor | None,
    largest: Tensor | None,
    out: Tensor,
) -> None:
    sizes, strides, flags = _shared_arguments(problem, dscores)
    order = first = None
    if problem.index is not None:
        order, first = _lists(problem.index[:, 0], problem.n_queries)
    offsets = (_contiguous(problem.cu_queries), _contiguous(problem.cu_documents), row_query, order, first)
    index = _contiguous(problem.index)
    dim = queries.size(1)
    if problem.temperature:
        block_r, block_d = config.smooth_r, config.block_dd
    else:
        block_r, block_d = config.block_r, config.block_d
    grid = (cdiv(queries.size(0), block_r) if problem.pairing == "all" else problem.n_queries, cdiv(dim, block_d))
    if problem.temperature:
        smooth_dqueries_kernel[grid](
            dscores, saved, queries, documents, *scales, largest, _bytes(problem.document_mask), *offsets, index, out,
            *sizes, *strides, 1.0 / problem.temperature, BLOCK_Q=block_r, BLOCK_T=config.smooth_t,
            BLOCK_K=config.smooth_k, BLOCK_D=block_d, HAS_DMASK=problem.document_mask is not None,
            PRECISION=config.precision, num_warps=config.smooth_warps, num_stages=config.smooth_stages,
            HAS_LARGEST=largest is not None, **flags,
        )  # fmt: skip
    else:
        dqueries_kernel[grid](
            dscores, saved, documents, *scales, *offsets, index, out, *sizes, *strides, BLOCK_R=block_r,
            BLOCK_D=block_d, NO_WINNER=no_winner(saved.dtype), num_warps=config.warps_q, num_stages=config.stages_q,
            **flags,
        )  # fmt: skip


def _ddocuments(
    problem: Problem,
    config: BackwardConfig,
    queries: Tensor,
    documents: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    dscores: Tensor,
    saved: Tensor,
    row_query: Tensor | None,
    largest: Tensor | None,
    out: Tensor,
) -> None:
    sizes, strides, flags = _shared_arguments(problem, dscores)
    order = first = None
    if problem.index is not None:
        order, first = _lists(problem.index[:, 1], problem.n_documents)
    offsets = (_contiguous(problem.cu_queries), _contiguous(problem.cu_documents), row_query, order, first)
    index = _contiguous(problem.index)
    block_t = config.smooth_t if problem.temperature else config.block_t
    tiles = cdiv(problem.document_length, block_t) if problem.cu_documents is None else TILES_OF_PACKED
    grid = (problem.n_documents, tiles, cdiv(queries.size(1), config.block_dd))
    if problem.temperature:
        smooth_ddocuments_kernel[grid](
            dscores, saved, queries, documents, *scales, largest, _bytes(problem.query_mask),
            _bytes(problem.document_mask), *offsets, index, out, *sizes, tiles, *strides,
            1.0 / problem.temperature, BLOCK_Q=config.smooth_r, BLOCK_T=block_t, BLOCK_K=config.smooth_k,
            BLOCK_D=config.block_dd,
            HAS_QMASK=problem.query_mask is not None, HAS_DMASK=problem.document_mask is not None,
            PRECISION=config.precision, num_warps=config.smooth_warps, num_stages=config.smooth_stages,
            HAS_LARGEST=largest is not None, **flags,
        )  # fmt: skip
        return
    ddocuments_kernel[grid](
        dscores, saved, queries, scales[0], largest, *offsets, index, out, *sizes, tiles, *strides, BLOCK_T=block_t,
        BLOCK_E=config.block_e, BLOCK_D=config.block_dd, HAS_LARGEST=largest is not None,
        NO_WINNER=no_winner(saved.dtype), PRECISION=config.precision, num_warps=config.warps_d,
        num_stages=config.stages_d, **flags,
    )  # fmt: skip
