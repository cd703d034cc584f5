"""Launch plans of MaxSim, for tensors of these layouts; its gradients are in :mod:`._gradient_plans`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import Instead, Plan, Setting, TorchStep
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim._gradient_plans import backward
from tilefold.ops.maxsim._problem import RESULTS, MaxSimOptions, MaxSimTensors, Problem, XtrOptions, XtrSaved
from tilefold.ops.maxsim._steps import PAIRINGS, Steps, layout_flags
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.norms import quantize_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim.configs import BY_TMA, ForwardConfig, forward_config, stream_config

__all__ = ["backward", "forward", "xtr_backward", "xtr_forward"]

BY_POINTERS = Instead(BY_TMA, "Documents are read by pointers instead: the same scores, slower.")
UNUSED_IN_STREAM = ("SMOOTH", "WITH_SAVED", "NO_WINNER", "NORMALIZED", "HAS_QSCALE")
OPERANDS = "queries documents query_mask document_mask query_factors document_factors cu_queries cu_documents"


def forward(tensors: MaxSimTensors, options: MaxSimOptions, training: bool, setting: Setting) -> Plan:
    """Scores, and what backward reads besides the tensors where ``training``."""
    p = Problem.of(tensors, options)
    if setting.capability == (0, 0):
        check_interpreted("triton", torch.device("cpu"), p.queries.dtype)
    steps = Steps(p, setting)
    nothing = p.empty or 0 in p.score_shape
    made = [
        training and not nothing, training and p.normalize, training and p.normalize,
        training and p.pairing == "all" and p.cu_queries is not None,
    ]  # fmt: skip
    steps.given("scores", *[name for name, is_made in zip(RESULTS[1:], made, strict=True) if is_made])
    steps.without(name for name, is_made in zip(RESULTS[1:], made, strict=True) if nothing or not is_made)
    if nothing:
        steps.fills["scores"] = 0
        return steps.plan()
    steps.take(tensors._asdict())
    if training and p.index is not None and p.cu_queries is not None:
        # no token writes the places past the end of a query shorter than the longest
        value = math.inf if p.temperature else -1
        steps.torch("saved", functools.partial(_filled, p.saved_shape, p.saved_dtype, value), "queries")
    _add_scores(steps, training)
    return steps.plan()


def xtr_forward(tensors: MaxSimTensors, options: XtrOptions, training: bool, setting: Setting) -> None:
    """XTR scores are made of torch operations."""
    if setting.capability == (0, 0):
        check_interpreted("triton", torch.device("cpu"), tensors.queries.dtype)


def xtr_backward(
    dscores: Tensor, saved: XtrSaved, options: XtrOptions, needs: tuple[bool, ...], setting: Setting
) -> Plan:
    """The gradients of the maximum, of the winners that passed."""
    plan = backward(dscores / saved.divisor, saved.maximum, options.maximum, needs, setting)
    return plan._replace(steps=(TorchStep("dscores", torch.div, "dscores divisor"), *plan.steps))


def _add_scores(steps: Steps, training: bool) -> None:
    p, setting = steps.problem, steps.setting
    everything, stored, dim = p.pairing == "all", p.documents.dtype, p.queries.size(1)
    rows = p.queries.size(0) if everything else p.query_length or p.queries.size(0)
    stream = None
    if everything and not training and not p.temperature:
        stream = stream_config(setting.capability, stored, dim, rows, p.queries.dtype)
    dtype = stored if stored == torch.int8 else p.queries.dtype  # queries of int8 documents are rounded to int8 too
    winners_in = p.document_length if training else None
    config = stream or forward_config(setting.capability, dtype, dim, rows, setting.tf32, winners_in)
    tma = None
    if config.use_tma and rows_fit_descriptor(p.documents) and BY_TMA not in setting.given_up:
        tma = Tma(p.documents.size(0), dim, functools.partial(_descriptor, [config.block_t, config.block_k]))
    if p.document_scale is not None:
        steps.stands["document_factors"] = "document_scale"
    if p.normalize and training:
        steps.inverse_norms("query_norms", "document_norms")
    elif p.normalize:
        sides = ("query_factors", p.queries), ("document_factors", p.documents)
        steps.inverse_norms(*[steps.buffer(name, (side.size(0),), torch.float32) for name, side in sides])
    elif stored == torch.int8 and not stream:  # which rounds them itself
        steps.buffer("int8_queries", p.queries.shape, torch.int8)
        steps.buffer("query_factors", p.queries.shape[:1], torch.float32)
        steps.over_rows(quantize_kernel, "queries int8_queries query_factors", p.queries.size(0))
        steps.stands["queries"] = "int8_queries"
    constants = _constants(p, config, training, tma is not None)
    add = _add_stream if stream else _add_all_pairs if everything else _add_listed_pairs
    add(steps, config, constants, {} if tma is None else {"tma": {"documents": tma}, "instead": BY_POINTERS})


def _filled(shape: tuple[int, ...], dtype: torch.dtype, value: float, like: Tensor) -> Tensor:
    if dtype == torch.uint16:  # few operations know it: every bit set is what -1 is in signed integers
        return like.new_full(shape, value, dtype=torch.int16).view(dtype)
    return like.new_full(shape, value, dtype=dtype)


def _descriptor(block: list[int], rows: Tensor) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), [rows.size(1), 1], block)


def _constants(p: Problem, config: ForwardConfig, training: bool, use_tma: bool) -> dict[str, Any]:
    return layout_flags(p) | {
        "BLOCK_Q": config.block_q,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "HAS_QMASK": p.query_mask is not None,
        "HAS_DMASK": p.document_mask is not None,
        "HAS_QSCALE": p.normalize or p.documents.dtype == torch.int8,
        "MASK_ZERO": p.mask_zero,
        "SMOOTH": p.temperature > 0,
        "WITH_SAVED": training,
        "NO_WINNER": 0 if p.temperature else no_winner(p.saved_dtype),
        "USE_TMA": use_tma,
        "PRECISION": config.precision,
        "INTEGER": p.documents.dtype == torch.int8,
        "NORMALIZED": p.normalize,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _sizes(p: Problem) -> tuple[int, ...]:
    return p.queries.size(0), p.documents.size(0), p.n_queries, p.n_documents, p.query_length, p.document_length


def _add_stream(steps: Steps, config: ForwardConfig, constants: dict[str, Any], tma: dict[str, Any]) -> None:
    constants = {name: value for name, value in constants.items() if name not in UNUSED_IN_STREAM}
    constants["PREFETCH"] = config.prefetch if tma else 0
    if config.registers is not None:
        constants["maxnreg"] = config.registers
    programs = plan_splits(1, steps.problem.n_documents, steps.setting.multiprocessors * config.programs)
    names = "queries documents documents query_mask document_mask document_factors cu_queries cu_documents scores"
    steps.launch(stream_kernel, (programs, 1, 1), names, _sizes(steps.problem), constants, **tma)


def _add_listed_pairs(steps: Steps, config: ForwardConfig, constants: dict[str, Any], tma: dict[str, Any]) -> None:
    p = steps.problem
    constants["PAIRING"] = PAIRINGS[p.pairing]
    numbers = (*_sizes(p), max(p.group, 1), p.longest_query, *_temperatures(p), p.divisor)
    names = f"{OPERANDS} pairs scores saved"
    steps.launch(listed_pairs_kernel, (p.n_pairs, 1, 1), names, numbers, constants, **tma)


def _add_all_pairs(steps: Steps, config: ForwardConfig, constants: dict[str, Any], tma: dict[str, Any]) -> None:
    p = steps.problem
    rows, length = p.queries.size(0), p.query_length
    direct = 0 < length <= config.block_q
    tile_rows = config.block_q // length * length if direct else config.block_q
    tiles = cdiv(rows, tile_rows)
    direct = direct or (not length and tiles == 1)
    splits = plan_splits(tiles, p.n_documents, steps.setting.multiprocessors * config.programs)
    constants["LQ"] = length if direct and length and config.block_q % length == 0 else 0
    constants["DIRECT"] = direct
    if not direct:  # partial sums of queries that several tiles share
        steps.buffer("parts", (tiles + p.n_queries, p.n_documents), torch.float32)
    numbers = (*_sizes(p), tile_rows, splits, p.n_queries.bit_length(), *_temperatures(p), p.divisor)
    names = f"{OPERANDS} scores parts saved row_query"
    steps.launch(all_pairs_kernel, (tiles, splits, 1), names, numbers, constants, **tma)
    if not direct:
        constants = {"BLOCK": 256, "UNIFORM_Q": p.cu_queries is None, "num_warps": 4, "num_stages": 3}
        grid = (p.n_queries * cdiv(p.n_documents, 256), 1, 1)
        numbers = (rows, *p.score_shape, length, tile_rows, p.divisor)
        steps.launch(combine_kernel, grid, "parts cu_queries scores", numbers, constants)


def _temperatures(p: Problem) -> tuple[float, float]:
    return p.temperature, 1.0 / p.temperature if p.temperature else 0.0


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document per program.
    """
    limit = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, limit + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))
