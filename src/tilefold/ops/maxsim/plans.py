"""Launch plans of MaxSim and its gradients, for tensors of these layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.calls import ALIGNMENT
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.plan import (
    KernelFallback,
    Plan,
    Setting,
    Steps,
    TorchStep,
    cdiv,
    contiguous,
    power_of_two,
)
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim import configs
from tilefold.ops.maxsim._problem import (
    RESULTS,
    MaxSimOptions,
    MaxSimSaved,
    MaxSimTensors,
    Problem,
    XtrOptions,
    XtrSaved,
    no_winners,
)
from tilefold.ops.maxsim._triton import backward as gradients
from tilefold.ops.maxsim._triton import forward as scores
from tilefold.ops.maxsim._triton import norms, smooth
from tilefold.ops.maxsim._triton.device import ENDS
from tilefold.ops.maxsim._triton.shared import STRIP, shared_pass_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel

COMBINED = 256  # documents whose parts of sums a program adds up
MAX_SLICES = 65535  # of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = (
    4  # programs that share the tiles of a packed document, where lengths are not known
)
MANY_ROWS = 16384
MAX_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them
BLOCK_ROWS, BLOCK_COLUMNS = 16, 128  # of kernels that go over rows once
BY_POINTERS = KernelFallback(
    configs.BY_TMA,
    "Documents are read by pointers instead: the same scores, slower.",
)
WITHOUT_ROLES = KernelFallback(
    configs.BY_ROLES,
    "Others share the pass over the documents: the same scores to fp32, slower.",
)
SAVED_NORMS = {"query_factors": "query_norms", "document_factors": "document_norms"}
OFFSETS = ("cu_queries", "cu_documents", "pairs")


class MaxSimSteps(Steps):
    """The steps of a plan in the making: tensors are brought to the form that kernels read, then
    what is added.
    """

    def __init__(
        self,
        p: Problem,
        setting: Setting,
        tensors: Mapping[str, Tensor | None],
        *leading: TorchStep,
    ) -> None:
        self.problem, self.setting = p, setting
        values = {
            "Tq": p.queries.size(0),
            "Td": p.documents.size(0),
            "Nq": p.n_queries,
            "Nd": p.n_documents,
            "length_q": p.query_length,
            "length_d": p.document_length,
            "group": max(p.group, 1),
            "longest": p.longest_query,
            "temperature": p.temperature,
            "inverse_temperature": 1.0 / p.temperature if p.temperature else 0.0,
            "divisor": p.divisor,
            "one": 1,
            "D": p.queries.size(1),
            "UNIFORM_Q": p.cu_queries is None,
            "UNIFORM_D": p.cu_documents is None,
            "HAS_SCALE": p.normalize or p.document_scale is not None,
            "HAS_QMASK": p.query_mask is not None,
            "HAS_DMASK": p.document_mask is not None,
            "PAIRING": {"all": 0, "aligned": 1, "grouped": 1, "index": 2}[p.pairing],
        }
        super().__init__(values)
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.known = known = {name: tensor for name, tensor in given.items() if tensor.numel()}
        self.renamed |= {
            name: f"no_{name}" for name in given if name not in known
        }  # not made by the registered one
        # from a multiple of 16 bytes on: a copy costs less than another build of a kernel, and adds
        # up alike
        self.steps += (
            contiguous(**known)
            if setting.aligned
            else [TorchStep(name, _in_order, name) for name in known]
        )
        self.steps += leading
        wide = [name for name in OFFSETS if name in known and known[name].dtype == torch.int64]
        self.steps += [TorchStep(name, _in_int32, name) for name in wide]

    def over_rows(
        self,
        kernel: object,
        count: int,
        places: Mapping[str, str] = {},
        others: int = 0,
    ) -> None:
        """A launch that goes over ``count`` rows once, and over ``others``."""
        own = {
            "T": count,
            "BLOCK_R": BLOCK_ROWS,
            "BLOCK_D": BLOCK_COLUMNS,
            "num_warps": 4,
            "num_stages": 3,
        }
        self.launch(kernel, (cdiv(count, BLOCK_ROWS) + cdiv(others, BLOCK_ROWS),), own, places)

    def inverse_norms(self, results: bool) -> None:
        """``[Tq]`` and ``[Td]`` fp32 by which rows of norm 1 are made, in one launch, as results or
        buffers.
        """
        sides = self.problem.queries.size(0), self.problem.documents.size(0)
        if results:
            self.renamed |= SAVED_NORMS
        else:
            for name, count in zip(SAVED_NORMS, sides, strict=True):
                self.buffer(name, (count,))
        self.over_rows(norms.inverse_norms_kernel, sides[0], others=sides[1])


def _in_int32(offsets: Tensor) -> Tensor:
    """Offsets or indices as kernels read them: what int32 does not hold is no offset in it either."""
    return offsets.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- scores


def forward(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Scores, and what backward reads besides the tensors where ``training``."""
    p = Problem.of(tensors, options)
    check_interpreted(setting, p.queries.dtype)
    if p.empty or 0 in p.score_shape:
        return Plan((), dict.fromkeys(RESULTS[1:]), {"scores": 0})
    steps = MaxSimSteps(p, setting, tensors._asdict())
    steps.buffers |= dict.fromkeys(name for name in RESULTS if name not in p.result_names(training))
    if training and p.index is not None and p.cu_queries is not None:
        # no token writes the places past the end of a query shorter than the longest
        steps.torch("saved", lambda queries: no_winners(p, queries).view(p.saved_dtype), "queries")
    _add_scores(steps, training)
    return steps.plan()


def _add_scores(steps: MaxSimSteps, training: bool) -> None:
    p, setting = steps.problem, steps.setting
    everything, stored, dim = p.pairing == "all", p.documents.dtype, p.queries.size(1)
    rows = p.queries.size(0) if everything else p.query_length or p.queries.size(0)
    stream = shared = None
    slot = (
        power_of_two(p.query_length, STRIP.value) if p.query_length else 0
    )  # rows of a query that shares the pass
    if everything and not training and not p.temperature:
        if _add_roles_pass(steps, slot):
            return
        if stored == torch.int8:
            tokens = p.documents.size(0) // p.n_documents
            facts = {"capability": setting.capability, "rows": slot * p.n_queries, "tokens": tokens}
            shared = configs.pass_config(configs.SHARED_PASS, dim, slot, **facts)
        stream = shared or configs.stream_config(
            setting.capability,
            stored,
            dim,
            rows,
            p.queries.dtype,
        )
    dtype = (
        stored if stored == torch.int8 else p.queries.dtype
    )  # queries of int8 documents are rounded to int8 too
    winners_in = p.document_length if training else None
    config = stream or configs.forward_config(
        setting.capability,
        dtype,
        dim,
        rows,
        setting.tf32,
        winners_in,
    )
    tma = {}
    if (
        config["USE_TMA"]
        and rows_fit_descriptor(p.documents)
        and configs.BY_TMA not in setting.given_up
    ):
        block = [config["BLOCK_T"], config["BLOCK_K"]]
        tma["documents"] = Tma(
            p.documents.size(0),
            dim,
            functools.partial(TensorDescriptor, block_shape=block),
        )
    if p.document_scale is not None:
        steps.renamed["document_factors"] = "document_scale"
    if p.normalize:
        steps.inverse_norms(results=training)
    elif stored == torch.int8 and (shared or not stream):  # which rounds them itself
        _round_queries(steps)
    steps.values |= config | {
        "HAS_QSCALE": p.normalize or stored == torch.int8,
        "MASK_ZERO": p.mask_zero,
        "SMOOTH": p.temperature > 0,
        "WITH_SAVED": training,
        "NO_WINNER": 0 if p.temperature else no_winner(p.saved_dtype),
        "USE_TMA": bool(tma),
        "INTEGER": stored == torch.int8,
        "NORMALIZED": p.normalize,
    }
    if (
        p.document_mask is not None
        and not (stream or p.mask_zero)
        and p.document_length > config["BLOCK_T"]
    ):
        steps.buffer("ends", (p.n_documents,), torch.int32)
        steps.launch(
            scores.ends_kernel,
            (p.n_documents,),
            {"BLOCK": 256, "num_warps": 1, "num_stages": 2},
        )
        steps.renamed["cu_documents"], steps.values["UNIFORM_D"] = "ends", ENDS.value
    slots = setting.multiprocessors * config["PROGRAMS"]
    if shared:
        tiles = cdiv(p.n_queries * slot, config["BLOCK_Q"])
        splits = plan_splits(tiles, p.n_documents, slots)
        own = {"splits": splits, "ONE_TILE": 0 < p.document_length <= config["BLOCK_T"]}
        steps.launch(shared_pass_kernel, (tiles, splits), own, tma=tma, fallback=BY_POINTERS)
    elif stream:
        own = {"PREFETCH": config["PREFETCH"] if tma else 0}
        steps.launch(
            stream_kernel,
            (plan_splits(1, p.n_documents, slots),),
            own,
            tma=tma,
            fallback=BY_POINTERS,
        )
    elif everything:
        _add_all_pairs(steps, config["BLOCK_Q"], slots, tma)
    else:
        steps.launch(scores.listed_pairs_kernel, (p.n_pairs,), tma=tma, fallback=BY_POINTERS)


def _round_queries(steps: MaxSimSteps) -> None:
    p = steps.problem
    steps.buffer("int8_queries", p.queries.shape, torch.int8)
    steps.buffer("query_factors", p.queries.shape[:1])
    rounded = {"rows_ptr": "queries", "out_ptr": "int8_queries", "scale_ptr": "query_factors"}
    steps.over_rows(norms.quantize_kernel, p.queries.size(0), rounded)
    steps.renamed["queries"] = "int8_queries"


def _add_roles_pass(steps: MaxSimSteps, slot: int) -> bool:
    """Whether the warps of one kernel have roles: padded queries against many padded int8
    documents.
    """
    p, setting = steps.problem, steps.setting
    length, rows = p.document_length, slot * p.n_queries
    if p.documents.dtype != torch.int8 or not length or not rows_fit_descriptor(p.documents):
        return False
    facts = {
        "capability": setting.capability,
        "rows": rows,
        "documents": p.n_documents,
        "half": -rows % 512 >= 256,
    }
    config = configs.pass_config(configs.ROLES_PASS, p.queries.size(1), slot, **facts)
    if config is None or configs.BY_ROLES in setting.given_up or releases.why_no_warp_roles():
        return False
    from tilefold.ops.maxsim._triton import shared_hopper as hopper  # needs Gluon

    steps.renamed["document_factors"] = "document_scale"
    _round_queries(steps)
    tiles = cdiv(p.n_queries * slot, config["BLOCK_Q"])
    splits = max(1, min(cdiv(p.n_documents, hopper.GROUP.value), setting.multiprocessors // tiles))
    tma = {
        "documents": Tma(
            p.documents.size(0),
            p.documents.size(1),
            hopper.padded_descriptor(length),
        ),
    }
    own = config | {"MASK_ZERO": p.mask_zero, "MEAN": p.divisor != 1}
    steps.launch(hopper.shared_hopper_kernel, (tiles, splits), own, tma=tma, fallback=WITHOUT_ROLES)
    return True


def _add_all_pairs(steps: MaxSimSteps, block_q: int, slots: int, tma: Mapping[str, Tma]) -> None:
    p = steps.problem
    rows, length = p.queries.size(0), p.query_length
    direct = 0 < length <= block_q
    tile_rows = block_q // length * length if direct else block_q
    tiles = cdiv(rows, tile_rows)
    direct = direct or (not length and tiles == 1)
    splits = plan_splits(tiles, p.n_documents, slots)
    own = {
        "tile_rows": tile_rows,
        "splits": splits,
        "steps": p.n_queries.bit_length(),
        "DIRECT": direct,
    }
    own["LQ"] = length if direct and length and block_q % length == 0 else 0
    if not direct:  # partial sums of queries that several tiles share
        steps.buffer("parts", (tiles + p.n_queries, p.n_documents))
    steps.launch(scores.all_pairs_kernel, (tiles, splits), own, tma=tma, fallback=BY_POINTERS)
    if not direct:
        own = {"tile_rows": tile_rows, "BLOCK": COMBINED, "num_warps": 4, "num_stages": 3}
        steps.launch(scores.combine_kernel, (p.n_queries * cdiv(p.n_documents, COMBINED),), own)


def plan_splits(tiles: int, documents: int, slots: int) -> int:
    """Into how many parts the documents are dealt, each part of each tile a program, with ``slots``
    running at a time.

    The split that leaves the fewest documents to the busiest slot, at a price of 0.1 document per
    program.
    """
    limit = min(documents, 4 * cdiv(slots, tiles))
    return min(
        range(1, limit + 1),
        key=lambda n: cdiv(tiles * n, slots) * (cdiv(documents, n) + 0.1),
    )


def xtr_forward(
    tensors: MaxSimTensors,
    options: XtrOptions,
    training: bool,
    setting: Setting,
) -> None:
    """XTR scores are made of torch operations."""
    check_interpreted(setting, tensors.queries.dtype)


# ---- gradients


def xtr_backward(
    dscores: Tensor,
    saved: XtrSaved,
    options: XtrOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """The gradients of the maximum, of the winners that passed."""
    plan = backward(dscores / saved.divisor, saved.maximum, options.maximum, needs, setting)
    return plan._replace(steps=(TorchStep("dscores", torch.div, "dscores divisor"), *plan.steps))


def backward(
    dscores: Tensor,
    saved: MaxSimSaved,
    options: MaxSimOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """The gradients of queries and documents."""
    p = Problem.of(saved.tensors, options)
    if p.empty or saved.saved is None or saved.saved.numel() == 0:
        return Plan(fills={"dqueries": 0, "ddocuments": 0})
    everything, strides = p.pairing == "all", dscores.stride()
    usable = setting.aligned and (
        everything or dscores.dim() == 1 or dscores.is_contiguous() or not any(strides)
    )
    strides = (
        strides if usable else (dscores.size(-1), 1)
    )  # a copy at another address is contiguous
    given = saved._asdict() | ({} if usable else {"dscores": dscores})
    given |= {} if p.temperature else {"query_mask": None, "document_mask": None}
    has_largest = p.queries.dtype == torch.float16 and (
        needs[1] or p.temperature > 0
    )  # scales fp16 products
    norm = TorchStep(
        "largest",
        functools.partial(torch.linalg.vector_norm, ord=math.inf),
        "dscores",
    )
    steps = MaxSimSteps(p, setting, given, *[norm] * has_largest)
    steps.values |= {
        "stride_q": strides[0] if everything else 0,
        "stride_d": strides[-1],
        "factor": 1.0 / p.divisor,
        "HAS_LARGEST": has_largest,
        "NO_WINNER": no_winner(saved.saved.dtype),
    }
    if p.normalize and "query_norms" in steps.known:
        steps.renamed |= SAVED_NORMS
    elif p.normalize:
        steps.inverse_norms(results=False)
    if everything and p.cu_queries is not None and "row_query" not in steps.known:
        steps.renamed["row_query"] = "owners"
        steps.torch("owners", functools.partial(row_queries, p.queries.size(0)), "cu_queries")
    for side in (
        1,
        0,
    ):  # documents first: their lists of winners are gone when the queries' gradient is made
        if needs[side]:
            _add_gradient(steps, side)
    return steps.plan()


def row_queries(rows: int, offsets: Tensor) -> Tensor:
    """``[Tq]`` int32 query of each packed row, as the forward kernel finds it."""
    last_query = offsets.size(0) - 2
    return sequences_of_rows(offsets, rows, int32=True).clamp_(max=last_query)


def _first_pairs(side: int, count: int, index: Tensor, order: Tensor) -> Tensor:
    """Offsets of the pairs of each of ``count`` queries or documents in that order, and the end of
    the last one's.
    """
    # without sorter=, which has its values checked on the host
    return torch.searchsorted(
        index[:, side][order],
        torch.arange(count + 1, dtype=index.dtype, device=index.device),
    )


def _add_gradient(steps: MaxSimSteps, side: int) -> None:
    """The gradient of queries (0) or documents (1)."""
    p = steps.problem
    name, rows = ("documents", p.documents) if side else ("queries", p.queries)
    everything, dim = p.pairing == "all", p.queries.size(1)
    facts = steps.setting.capability, p.queries.dtype, steps.setting.tf32
    few = configs.backward_config("row", *facts)["FEW_ROWS"]
    kind, kernel = (
        ("smooth", smooth.smooth_ddocuments_kernel if side else smooth.smooth_dqueries_kernel)
        if p.temperature
        else ("listed", gradients.ddocuments_listed_kernel)
        if side and everything
        else ("documents", gradients.ddocuments_kernel)
        if side
        else ("row", gradients.dqueries_row_kernel)
        if everything and rows.size(0) <= few
        else ("rows", gradients.dqueries_kernel)
    )
    config = configs.backward_config(kind, *facts)
    # a kernel that has whole rows projects gradients of unit vectors itself
    projects = p.normalize and kind in ("row", "listed") and dim <= config["BLOCK_D"]
    # else that is done in fp32 afterwards, before the only rounding
    apart = p.normalize and not projects
    out = steps.buffer(f"unit_d{name}", rows.shape) if apart else f"d{name}"
    # rows that no sequence holds, should offsets be broken, have none; those of queries of all
    # pairs are written
    if p.cu_documents is not None if side else p.cu_queries is not None and not everything:
        if apart:
            steps.torch(out, Tensor.zero_, out)
        else:
            steps.fills[out] = 0
    if p.index is not None:
        count = p.n_documents if side else p.n_queries
        steps.torch(f"order{side}", lambda index: index[:, side].sort(stable=True).indices, "pairs")
        steps.torch(
            f"first{side}",
            functools.partial(_first_pairs, side, count),
            f"pairs order{side}",
        )
    columns = cdiv(dim, config["BLOCK_D"])
    if side:  # programs share a document's tiles
        slices = min(cdiv(p.document_length, config["BLOCK_T"]), MAX_SLICES) or TILES_OF_PACKED
        config |= {"tiles": slices, "slices": slices}
        grid = (p.n_documents, slices, columns)
    else:
        block = config.get("BLOCK_R") or config.get("BLOCK_Q") or 1
        grid = (cdiv(rows.size(0), block) if everything else p.n_queries, columns, 1)
    if kind == "listed":
        size = config["BLOCK_S_MANY" if p.queries.size(0) >= MANY_ROWS else "BLOCK_S"]
        config |= {"BLOCK_S": size, "CAPACITY": 2 * size, "ALIGNED": p.queries.size(0) % 8 == 0}
        grid = (min(p.n_documents * slices, MAX_PROGRAMS), columns, 1)
        steps.buffer("lists", (grid[0] * columns * 2 * size,), torch.int32)
    named = {
        "order_ptr": f"order{side}",
        "first_ptr": f"first{side}",
        "ddoc_ptr": out,
        "dquery_ptr": out,
    }
    steps.launch(kernel, grid, config | {"PROJECTS": projects}, named)
    if apart:
        factors = "document_factors" if side else "query_factors"
        named = {"rows_ptr": name, "scale_ptr": factors, "grad_ptr": out, "out_ptr": f"d{name}"}
        steps.over_rows(norms.unit_gradient_kernel, rows.size(0), named)
