"""The launchers of the forward kernels: few launches, few allocations and no look at the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import launch
from tilefold.ops.maxsim._problem import Problem, no_winner
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.norms import inverse_norm_kernel, quantize_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim.configs import ForwardConfig, forward_config, stream_config

PAIRINGS = {"all": 0, "grouped": 1, "index": 2}
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


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read: contiguous, and no bool."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor, if there is one, in contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def rows_grid(rows: Tensor) -> tuple[int, int, int]:
    """The grid of a kernel that goes over rows once."""
    return cdiv(rows.size(0), BLOCK_ROWS), 1, 1


def rows_constants(rows: Tensor) -> dict[str, Any]:
    """The constants of a kernel that goes over rows once."""
    return {"D": rows.size(1), "BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}


def inverse_norms(rows: Tensor) -> Tensor:
    """``[T]`` fp32, by which rows of norm 1 are made."""
    scale = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    launch(inverse_norm_kernel, rows_grid(rows), (rows, scale, rows.size(0)), rows_constants(rows))
    return scale


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8 and their scales ``[T]``."""
    rows = rows.contiguous()
    values = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    launch(quantize_kernel, rows_grid(rows), (rows, values, scales, rows.size(0)), rows_constants(rows))
    return values, scales


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
    device, dim = queries.device, queries.size(1)
    n_queries, n_documents = problem.n_queries, problem.n_documents
    scores = torch.empty(problem.score_shape, dtype=torch.float32, device=device)
    saved = _room_for_saved(problem, with_saved)
    if scores.numel() == 0:
        return scores, saved
    everything = problem.pairing == "all"
    length = problem.query_length or queries.size(0)
    rows = queries.size(0) if everything else length
    stream = None
    if everything and not with_saved and not problem.temperature:
        stream = stream_config(documents.dtype, dim, rows, device)
    winners_in = problem.document_length if with_saved else None
    config = stream or forward_config(queries.dtype, dim, rows, device, winners_in)
    use_tma = config.use_tma and can_use_tma(documents)
    source: Any = documents
    if use_tma:
        block = [config.block_t, config.block_k]
        source = TensorDescriptor(documents, list(documents.shape), list(documents.stride()), block)
    operands = (
        queries, source, as_bytes(problem.query_mask), as_bytes(problem.document_mask),
        *row_scales(problem, queries, documents), contiguous(problem.cu_queries), contiguous(problem.cu_documents),
    )  # fmt: skip
    sizes = (
        queries.size(0), documents.size(0), n_queries, n_documents, problem.query_length, problem.document_length
    )  # fmt: skip
    temperature = (problem.temperature, 1.0 / problem.temperature if problem.temperature else 0.0)
    flags = layout_flags(problem) | {
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
    if stream is not None:
        splits = plan_splits(1, n_documents, sm_count(device) * config.programs)
        for name in ("SMOOTH", "WITH_SAVED", "NO_WINNER"):
            del flags[name]
        launch(stream_kernel, (splits, 1, 1), (*operands, scores, *sizes), flags)
    elif everything:
        _all_pairs(problem, config, operands, sizes, temperature, flags, scores, saved)
    else:
        arguments = (
            *operands, contiguous(problem.index), scores, saved, *sizes, max(problem.group, 1), problem.longest_query,
            *temperature,
        )  # fmt: skip
        flags["PAIRING"] = PAIRINGS[problem.pairing]
        launch(listed_pairs_kernel, (scores.size(0), 1, 1), arguments, flags)
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
    flags["LQ"], flags["DIRECT"] = length if direct and config.block_q % length == 0 else 0, direct
    arguments = (*operands, scores, parts, saved, *sizes, tile_rows, splits, *temperature)
    launch(all_pairs_kernel, (tiles, splits, 1), arguments, flags)
    if not direct:
        launch(
            combine_kernel,
            (n_queries, cdiv(n_documents, 256), 1),
            (parts, operands[6], scores, rows, n_queries, n_documents, length, tile_rows),
            {"BLOCK": 256, "UNIFORM_Q": problem.cu_queries is None, "num_warps": 4, "num_stages": 3},
        )


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document a program.
    """
    most = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, most + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))
