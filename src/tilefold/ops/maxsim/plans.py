"""Launch plans of MaxSim and its gradients, for tensors of these layouts."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import Plan, Setting, TorchStep
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim._problem import (
    RESULTS,
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
)
from tilefold.ops.maxsim._steps import Steps
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.norms import quantize_kernel, unit_gradient_kernel
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel
from tilefold.ops.maxsim.configs import BY_TMA, backward_config, forward_config, stream_config

COMBINED = 256  # documents whose parts of sums a program adds up
MAX_SLICES = 65535  # of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, where lengths are not known
MANY_ROWS = 16384
MAX_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them


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
    tma: dict[str, Tma] = {}
    if config.use_tma and rows_fit_descriptor(p.documents) and BY_TMA not in setting.given_up:
        block = [config.block_t, config.block_k]
        tma = {"documents": Tma(p.documents.size(0), dim, functools.partial(_descriptor, block))}
    if p.document_scale is not None:
        steps.stands["document_factors"] = "document_scale"
    if p.normalize:
        steps.inverse_norms(results=training)
    elif stored == torch.int8 and not stream:  # which rounds them itself
        steps.buffer("int8_queries", p.queries.shape, torch.int8)
        steps.buffer("query_factors", p.queries.shape[:1], torch.float32)
        rounded = {"rows_ptr": "queries", "out_ptr": "int8_queries", "scale_ptr": "query_factors"}
        steps.over_rows(quantize_kernel, p.queries.size(0), rounded)
        steps.stands["queries"] = "int8_queries"
    steps.values |= {
        "BLOCK_Q": config.block_q, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "HAS_QSCALE": p.normalize or stored == torch.int8, "MASK_ZERO": p.mask_zero, "SMOOTH": p.temperature > 0,
        "WITH_SAVED": training, "NO_WINNER": 0 if p.temperature else no_winner(p.saved_dtype),
        "USE_TMA": bool(tma), "PRECISION": config.precision, "INTEGER": stored == torch.int8,
        "NORMALIZED": p.normalize, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    slots = setting.multiprocessors * config.programs
    if stream:
        own = {} if config.registers is None else {"maxnreg": config.registers}
        own["PREFETCH"] = config.prefetch if tma else 0
        steps.launch(stream_kernel, (plan_splits(1, p.n_documents, slots), 1, 1), own, tma=tma)
    elif everything:
        _add_all_pairs(steps, config.block_q, slots, tma)
    else:
        steps.launch(listed_pairs_kernel, (p.n_pairs, 1, 1), {}, tma=tma)


def _add_all_pairs(steps: Steps, block_q: int, slots: int, tma: dict[str, Tma]) -> None:
    p = steps.problem
    rows, length = p.queries.size(0), p.query_length
    direct = 0 < length <= block_q
    tile_rows = block_q // length * length if direct else block_q
    tiles = cdiv(rows, tile_rows)
    direct = direct or (not length and tiles == 1)
    splits = plan_splits(tiles, p.n_documents, slots)
    own = {"tile_rows": tile_rows, "splits": splits, "steps": p.n_queries.bit_length(), "DIRECT": direct}
    own["LQ"] = length if direct and length and block_q % length == 0 else 0
    if not direct:  # partial sums of queries that several tiles share
        steps.buffer("parts", (tiles + p.n_queries, p.n_documents), torch.float32)
    steps.launch(all_pairs_kernel, (tiles, splits, 1), own, tma=tma)
    if not direct:
        grid = (p.n_queries * cdiv(p.n_documents, COMBINED), 1, 1)
        own = {"tile_rows": tile_rows, "BLOCK": COMBINED, "num_warps": 4, "num_stages": 3}
        steps.launch(combine_kernel, grid, own)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, value: float, like: Tensor) -> Tensor:
    if dtype == torch.uint16:  # few operations know it: every bit set is what -1 is in signed integers
        return like.new_full(shape, value, dtype=torch.int16).view(dtype)
    return like.new_full(shape, value, dtype=dtype)


def _descriptor(block: list[int], rows: Tensor) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), [rows.size(1), 1], block)


@functools.lru_cache(maxsize=4096)
def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots`` running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document per program.
    """
    limit = min(documents, 4 * cdiv(slots, tiles))
    return min(range(1, limit + 1), key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1))


# ---- gradients


def backward(
    dscores: Tensor, saved: MaxSimSaved, options: MaxSimOptions, needs: tuple[bool, ...], setting: Setting
) -> Plan:
    """The gradients of queries and documents."""
    p = Problem.of(saved.tensors, options)
    steps = Steps(p, setting)
    if p.empty or saved.saved is None or saved.saved.numel() == 0:
        steps.fills |= {"dqueries": 0, "ddocuments": 0}
        return steps.plan()
    given = {name: tensor for name, tensor in saved._asdict().items() if tensor is None or tensor.numel()}
    # what forward did not leave is empty in the registered operator
    steps.stands |= {name: f"no_{name}" for name in saved._fields if name not in given}
    strides, given["dscores"] = _strides(p, dscores, setting.aligned)
    if not p.temperature:
        del given["query_mask"], given["document_mask"]
    steps.take(given)
    steps.given("dscores", "dqueries", "ddocuments")
    has_largest = p.queries.dtype == torch.float16 and (needs[1] or p.temperature > 0)  # scales fp16 products
    steps.values |= {
        "stride_q": strides[0], "stride_d": strides[1], "factor": 1.0 / p.divisor, "HAS_LARGEST": has_largest,
        "NO_WINNER": no_winner(saved.saved.dtype),
    }  # fmt: skip
    if p.normalize and given.get("query_norms") is None:
        steps.inverse_norms(results=False)
    elif p.normalize:
        steps.stands |= {"query_factors": "query_norms", "document_factors": "document_norms"}
    if p.pairing == "all" and p.cu_queries is not None and given.get("row_query") is None:
        steps.row_queries()
    if has_largest:
        steps.torch("largest", _largest, "dscores", first=True)
    for side in (1, 0):  # documents first: their lists of winners are gone when the queries' gradient is made
        if needs[side]:
            _add_gradient(steps, side)
    return steps.plan()


def _strides(p: Problem, dscores: Tensor, aligned: bool) -> tuple[tuple[int, int], Tensor | None]:
    """Strides of the scores' gradient over queries, and over documents or pairs; it, where it must be contiguous."""
    everything, strides = p.pairing == "all", dscores.stride()
    usable = everything or dscores.dim() == 1 or dscores.is_contiguous() or not any(strides)
    if not aligned or not usable:  # a copy at another address is contiguous
        return ((dscores.size(1), 1) if everything else (0, 1)), dscores
    return ((strides[0], strides[1]) if everything else (0, strides[-1])), None


def _largest(dscores: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(dscores, math.inf)
    return largest


def _sorted_pairs(side: int, index: Tensor) -> Tensor:
    """The pairs of an index in the order of their queries (0) or documents (1)."""
    return index[:, side].sort(stable=True).indices


def _first_pairs(side: int, count: int, index: Tensor, order: Tensor) -> Tensor:
    """Offsets of the pairs of each of ``count`` queries or documents in that order, and the end of the last one's."""
    which = torch.arange(count + 1, dtype=index.dtype, device=index.device)
    # without sorter=, which has its values checked on the host
    return torch.searchsorted(index[:, side][order], which)


def _add_gradient(steps: Steps, side: int) -> None:
    """The gradient of queries (0) or documents (1)."""
    p = steps.problem
    name, rows = ("documents", p.documents) if side else ("queries", p.queries)
    everything, dim = p.pairing == "all", p.queries.size(1)
    capability, tf32 = steps.setting.capability, steps.setting.tf32
    few = backward_config("row", capability, p.queries.dtype, tf32).pop("FEW_ROWS")
    kind = (
        "smooth" if p.temperature
        else ("listed" if everything else "documents") if side
        else "row" if everything and rows.size(0) <= few else "rows"
    )  # fmt: skip
    config = backward_config(kind, capability, p.queries.dtype, tf32)
    # a kernel that has whole rows projects gradients of unit vectors itself
    projects = p.normalize and kind in ("row", "listed") and dim <= config["BLOCK_D"]
    # else that is done in fp32 afterwards, before the only rounding
    apart = p.normalize and not projects
    out = steps.buffer(f"unit_d{name}", rows.shape, torch.float32) if apart else f"d{name}"
    # rows that no sequence holds, should offsets be broken, have none; those of queries of all pairs are written
    if p.cu_documents is not None if side else p.cu_queries is not None and not everything:
        if apart:
            steps.torch(out, Tensor.zero_, out)
        else:
            steps.fills[out] = 0
    if p.index is not None:
        count = p.n_documents if side else p.n_queries
        steps.torch(f"order{side}", functools.partial(_sorted_pairs, side), "pairs")
        steps.torch(f"first{side}", functools.partial(_first_pairs, side, count), f"pairs order{side}")
    columns = cdiv(dim, config["BLOCK_D"])
    named = {"order_ptr": f"order{side}", "first_ptr": f"first{side}", "ddoc_ptr": out, "dquery_ptr": out}
    if side:
        # programs that share a document's tiles
        slices = (
            TILES_OF_PACKED
            if p.cu_documents is not None
            else min(cdiv(p.document_length, config["BLOCK_T"]), MAX_SLICES)
        )
        config |= {"tiles": slices, "slices": slices}
        grid = (p.n_documents, slices, columns)
    else:
        block = config.get("BLOCK_R") or config.get("BLOCK_Q") or 1
        grid = (cdiv(rows.size(0), block) if everything else p.n_queries, columns, 1)
    if kind == "listed":
        many = p.queries.size(0) >= MANY_ROWS
        config["BLOCK_S"] = config["BLOCK_S_MANY"] if many else config["BLOCK_S"]
        config |= {"CAPACITY": 2 * config["BLOCK_S"], "ALIGNED": p.queries.size(0) % 8 == 0}
        grid = (min(p.n_documents * slices, MAX_PROGRAMS), columns, 1)
        steps.buffer("lists", (grid[0] * columns * config["CAPACITY"],), torch.int32)
    kernels = {
        "row": dqueries_row_kernel, "rows": dqueries_kernel, "documents": ddocuments_kernel,
        "listed": ddocuments_listed_kernel, "smooth": smooth_ddocuments_kernel if side else smooth_dqueries_kernel,
    }  # fmt: skip
    steps.launch(kernels[kind], grid, config | {"PROJECTS": projects}, named)
    if apart:
        factors = "document_factors" if side else "query_factors"
        named = {"rows_ptr": name, "scale_ptr": factors, "grad_ptr": out, "out_ptr": f"d{name}"}
        steps.over_rows(unit_gradient_kernel, rows.size(0), named)
