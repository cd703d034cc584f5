"""Launch plans of MaxSim and its gradients, from the layouts of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.calls import ALIGNMENT
from tilefold.ops._shared.fallback import KernelFallback
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.plan import (
    Constants,
    Plan,
    PlanBuilder,
    Setting,
    TorchStep,
    cdiv,
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

COMBINED = 256  # documents whose partial sums one program adds up
MAX_SLICES = 65535  # limit of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, of unknown length
MANY_ROWS = 16384  # query rows from which winners are read in larger pieces
MAX_PROGRAMS = 4096  # programs that hold a list of winners each; the work is divided among them

# Tile of kernels that read rows once.
BLOCK_ROWS = 16
BLOCK_COLUMNS = 128

BY_POINTERS = KernelFallback(
    configs.BY_TMA,
    "Documents are read by pointers instead: the same scores, slower.",
)
WITHOUT_ROLES = KernelFallback(
    configs.BY_ROLES,
    "Others share the pass over the documents: the same scores to fp32, slower.",
)
# Results that take the place of scratch: inverse norms that backward reads.
SAVED_NORMS = {"query_factors": "query_norms", "document_factors": "document_norms"}
OFFSETS = ("cu_queries", "cu_documents", "pairs")


class MaxSimPlanBuilder(PlanBuilder):
    """Builder of a plan that begins with bringing tensors into the form that kernels read.

    Args:
        problem: the problem.
        setting: facts about the device.
        tensors: tensors by name. Those without elements count as ``None``, since a registered
            operator cannot return ``None``.
        leading: steps after the first copies.

    Attributes:
        non_empty: the tensors that have elements, by name.
    """

    def __init__(
        self,
        problem: Problem,
        setting: Setting,
        tensors: Mapping[str, Tensor | None],
        *leading: TorchStep,
    ) -> None:
        """Collect the numbers that kernels share, and copy tensors that they cannot read.

        Args:
            problem: the problem.
            setting: facts about the device.
            tensors: tensors by name.
            leading: steps after the first copies.
        """
        self.problem = problem
        self.setting = setting
        temperature = problem.temperature
        super().__init__(
            {
                "Tq": problem.queries.size(0),
                "Td": problem.documents.size(0),
                "Nq": problem.n_queries,
                "Nd": problem.n_documents,
                "length_q": problem.query_length,
                "length_d": problem.document_length,
                "group": max(problem.group, 1),
                "longest": problem.longest_query,
                "temperature": temperature,
                "inverse_temperature": 1.0 / temperature if temperature else 0.0,
                "divisor": problem.divisor,
                "one": 1,
                "D": problem.queries.size(1),
                "UNIFORM_Q": problem.cu_queries is None,
                "UNIFORM_D": problem.cu_documents is None,
                "HAS_SCALE": problem.normalize or problem.document_scale is not None,
                "HAS_QMASK": problem.query_mask is not None,
                "HAS_DMASK": problem.document_mask is not None,
                "PAIRING": {"all": 0, "aligned": 1, "grouped": 1, "index": 2}[problem.pairing],
            },
        )
        self.non_empty: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.numel():
                self.non_empty[name] = tensor
            else:
                self.replace_tensor(name, by=f"no_{name}")
        if setting.aligned:
            self.make_contiguous(self.non_empty)
        else:
            # Kernels are built for tensors that begin at multiples of 16 bytes. A copy costs less
            # than another build, and gives the same sums.
            for name in self.non_empty:
                self.add_torch_step(_aligned, [name], output=name)
        for step in leading:
            self.add_torch_step(*step)
        for name in OFFSETS:
            if name in self.non_empty and self.non_empty[name].dtype == torch.int64:
                self.add_torch_step(_to_int32, [name], output=name)

    def over_rows(
        self,
        kernel: object,
        n_rows: int,
        tensors: Mapping[str, str] = {},
        n_other_rows: int = 0,
    ) -> None:
        """Add the launch of a kernel in which each program instance reads a block of rows once.

        Args:
            kernel: the ``triton.jit`` function.
            n_rows: number of rows.
            tensors: names of tensors by the names of the kernel's parameters.
            n_other_rows: number of rows of a second tensor, which further instances read.
        """
        n_programs = cdiv(n_rows, BLOCK_ROWS) + cdiv(n_other_rows, BLOCK_ROWS)
        parameters = {
            "T": n_rows,
            "BLOCK_R": BLOCK_ROWS,
            "BLOCK_D": BLOCK_COLUMNS,
            "num_warps": 4,
            "num_stages": 3,
        }
        self.add_launch(kernel, grid=(n_programs,), parameters=parameters, tensors=tensors)

    def use_saved_norms(self) -> None:
        """Let later steps use the inverse norms that backward reads, not those in scratch."""
        for name, saved_name in SAVED_NORMS.items():
            self.replace_tensor(name, by=saved_name)

    def inverse_norms(self, results: bool) -> None:
        """Add the launch that computes inverse norms ``[Tq]`` and ``[Td]`` in fp32.

        Args:
            results: whether the norms are results, which backward reads. Otherwise they are
                scratch.
        """
        n_query_rows = self.problem.queries.size(0)
        n_document_rows = self.problem.documents.size(0)
        if results:
            self.use_saved_norms()
        else:
            self.add_buffer("query_factors", (n_query_rows,))
            self.add_buffer("document_factors", (n_document_rows,))
        self.over_rows(
            norms.inverse_norms_kernel,
            n_query_rows,
            n_other_rows=n_document_rows,
        )


def _to_int32(offsets: Tensor) -> Tensor:
    """Convert offsets or indices to int32. Values that do not fit stay invalid."""
    return offsets.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is not contiguous or not aligned."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# Scores


def forward(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Plan the forward pass: the scores, and what backward reads in addition to the tensors.

    Args:
        tensors: layouts of the tensors.
        options: checked options.
        training: whether backward may follow. Otherwise only scores are computed.
        setting: facts about the device.
    """
    problem = Problem.of(tensors, options)
    check_interpreted(setting, problem.queries.dtype)
    if problem.empty or 0 in problem.score_shape:
        return Plan(fills={"scores": 0}, skipped_results=frozenset(RESULTS[1:]))
    builder = MaxSimPlanBuilder(problem, setting, tensors._asdict())
    for name in RESULTS:
        if name not in problem.result_names(training):
            builder.skip_result(name)
    if training and problem.index is not None and problem.cu_queries is not None:
        # No token writes the entries past the end of a query that is shorter than the longest.
        builder.add_torch_step(
            lambda queries: no_winners(problem, queries).view(problem.saved_dtype),
            ["queries"],
            output="saved",
        )
    _add_scores(builder, training)
    return builder.build()


def _add_scores(builder: MaxSimPlanBuilder, training: bool) -> None:
    """Add the launches that compute the scores, with the kernel that fits the shapes.

    Before the kernel of the scores, inverse norms are computed, queries are rounded to int8, or the
    ends of documents are found, if the call needs it.
    """
    problem = builder.problem
    is_int8 = problem.documents.dtype == torch.int8
    # Rows of a query in the tiles of a pass that queries share, 0 for packed queries.
    slot = power_of_two(problem.query_length, STRIP.value) if problem.query_length else 0
    if _is_inference_of_all_pairs(problem, training) and _add_roles_pass(builder, slot):
        return
    kind, config = _score_config(builder, training, slot)
    tma = _document_descriptor(builder, config)
    if problem.document_scale is not None:
        builder.replace_tensor("document_factors", by="document_scale")
    if problem.normalize:
        builder.inverse_norms(results=training)
    elif is_int8 and kind != "stream":  # the streaming kernel rounds queries itself
        _round_queries(builder)
    builder.set_parameters(**config)
    builder.set_parameters(
        HAS_QSCALE=problem.normalize or is_int8,
        MASK_ZERO=problem.mask_zero,
        SMOOTH=problem.temperature > 0,
        WITH_SAVED=training,
        NO_WINNER=0 if problem.temperature else no_winner(problem.saved_dtype),
        USE_TMA=bool(tma),
        INTEGER=is_int8,
        NORMALIZED=problem.normalize,
    )
    if (
        problem.document_mask is not None
        and kind in ("tiles", "pairs")
        and not problem.mask_zero
        and problem.document_length > config["BLOCK_T"]
    ):
        _add_document_ends(builder)
    _launch_scores(builder, kind, config, slot, tma)


def _is_inference_of_all_pairs(problem: Problem, training: bool) -> bool:
    """Return whether kernels for inference with all pairs may serve, which save no winners."""
    return problem.pairing == "all" and not training and not problem.temperature


def _score_config(builder: MaxSimPlanBuilder, training: bool, slot: int) -> tuple[str, Constants]:
    """Choose the kernel of the scores.

    Args:
        builder: the plan so far.
        training: whether backward may follow.
        slot: rows of a query in the tiles of a pass that queries share.

    Returns:
        Name of the kernel, and its constants. The names are:

        - ``"shared"``: a pass over int8 documents that queries share
        - ``"stream"``: a stream of 8-bit documents past few query tokens
        - ``"tiles"``: tiles of query tokens and documents, for all pairs
        - ``"pairs"``: a program for each pair, for other pairings
    """
    problem = builder.problem
    setting = builder.setting
    is_int8 = problem.documents.dtype == torch.int8
    dim = problem.queries.size(1)
    n_query_rows = problem.queries.size(0)
    if _is_inference_of_all_pairs(problem, training):
        if is_int8:
            shared_config = configs.pass_config(
                configs.SHARED_PASS,
                dim,
                slot,
                capability=setting.capability,
                rows=slot * problem.n_queries,
                tokens=problem.documents.size(0) // problem.n_documents,
            )
            if shared_config is not None:
                return "shared", shared_config
        stream_config = configs.stream_config(
            setting.capability,
            problem.documents.dtype,
            dim,
            n_query_rows,
            problem.queries.dtype,
        )
        if stream_config is not None:
            return "stream", stream_config
    all_pairs = problem.pairing == "all"
    rows_that_share_a_tile = n_query_rows if all_pairs else problem.query_length or n_query_rows
    config = configs.forward_config(
        setting.capability,
        torch.int8 if is_int8 else problem.queries.dtype,  # int8 documents: queries are rounded
        dim,
        rows_that_share_a_tile,
        setting.tf32,
        problem.document_length if training else None,
    )
    return "tiles" if all_pairs else "pairs", config


def _launch_scores(
    builder: MaxSimPlanBuilder,
    kind: str,
    config: Constants,
    slot: int,
    tma: Mapping[str, Tma],
) -> None:
    """Add the launch of the kernel that :func:`_score_config` chose.

    Args:
        builder: the plan so far.
        kind: name of the kernel.
        config: its constants.
        slot: rows of a query in the tiles of a pass that queries share.
        tma: how documents are described to TMA, empty if kernels read them by pointers.
    """
    problem = builder.problem
    max_programs = builder.setting.multiprocessors * config["PROGRAMS"]
    if kind == "shared":
        n_tiles = cdiv(problem.n_queries * slot, config["BLOCK_Q"])
        splits = plan_splits(n_tiles, problem.n_documents, max_programs)
        one_tile = 0 < problem.document_length <= config["BLOCK_T"]
        builder.add_launch(
            shared_pass_kernel,
            grid=(n_tiles, splits),
            parameters={"splits": splits, "ONE_TILE": one_tile},
            tma=tma,
            fallback=BY_POINTERS,
        )
    elif kind == "stream":
        builder.add_launch(
            stream_kernel,
            grid=(plan_splits(1, problem.n_documents, max_programs),),
            parameters={"PREFETCH": config["PREFETCH"] if tma else 0},
            tma=tma,
            fallback=BY_POINTERS,
        )
    elif kind == "tiles":
        _add_all_pairs(builder, config["BLOCK_Q"], max_programs, tma)
    else:
        builder.add_launch(
            scores.listed_pairs_kernel,
            grid=(problem.n_pairs,),
            tma=tma,
            fallback=BY_POINTERS,
        )


def _document_descriptor(builder: MaxSimPlanBuilder, config: Constants) -> dict[str, Tma]:
    """Describe the documents to TMA, which loads tiles of a matrix on Hopper GPUs and newer ones.

    Returns:
        The description by the name of the tensor. It is empty if the configuration does not use
        TMA, if the strides do not fit it, or if TMA was given up on the device.
    """
    documents = builder.problem.documents
    if (
        not config["USE_TMA"]
        or not rows_fit_descriptor(documents)
        or configs.BY_TMA in builder.setting.given_up
    ):
        return {}
    descriptor = functools.partial(
        TensorDescriptor,
        block_shape=[config["BLOCK_T"], config["BLOCK_K"]],
    )
    return {"documents": Tma(documents.size(0), documents.size(1), descriptor)}


def _add_document_ends(builder: MaxSimPlanBuilder) -> None:
    """Add the launch that finds the last unmasked token of each document.

    Later kernels then do not read the padding: they take the ends for offsets of packed documents.
    """
    n_documents = builder.problem.n_documents
    builder.add_buffer("ends", (n_documents,), torch.int32)
    builder.add_launch(
        scores.ends_kernel,
        grid=(n_documents,),
        parameters={"BLOCK": 256, "num_warps": 1, "num_stages": 2},
    )
    builder.replace_tensor("cu_documents", by="ends")
    builder.set_parameters(UNIFORM_D=ENDS.value)


def _round_queries(builder: MaxSimPlanBuilder) -> None:
    """Add the launch that rounds queries to int8, with fp32 factors."""
    queries = builder.problem.queries
    builder.add_buffer("int8_queries", queries.shape, torch.int8)
    builder.add_buffer("query_factors", queries.shape[:1])
    builder.over_rows(
        norms.quantize_kernel,
        queries.size(0),
        {"rows_ptr": "queries", "out_ptr": "int8_queries", "scale_ptr": "query_factors"},
    )
    builder.replace_tensor("queries", by="int8_queries")


def _add_roles_pass(builder: MaxSimPlanBuilder, slot: int) -> bool:
    """Add the pass over int8 documents by warps with roles, if it can run and is fast.

    It serves padded queries against many padded int8 documents.

    Args:
        builder: the plan so far.
        slot: rows of a query in a tile.

    Returns:
        Whether the pass was added.
    """
    problem = builder.problem
    setting = builder.setting
    documents = problem.documents
    if (
        documents.dtype != torch.int8
        or not problem.document_length
        or not rows_fit_descriptor(documents)
    ):
        return False
    n_rows = slot * problem.n_queries
    config = configs.pass_config(
        configs.ROLES_PASS,
        problem.queries.size(1),
        slot,
        capability=setting.capability,
        rows=n_rows,
        documents=problem.n_documents,
        half=-n_rows % 512 >= 256,
    )
    if config is None or configs.BY_ROLES in setting.given_up or releases.why_no_warp_roles():
        return False
    from tilefold.ops.maxsim._triton import shared_hopper  # needs Gluon

    builder.replace_tensor("document_factors", by="document_scale")
    _round_queries(builder)
    n_tiles = cdiv(n_rows, config["BLOCK_Q"])
    n_document_groups = cdiv(problem.n_documents, shared_hopper.GROUP.value)
    splits = max(1, min(n_document_groups, setting.multiprocessors // n_tiles))
    builder.add_launch(
        shared_hopper.shared_hopper_kernel,
        grid=(n_tiles, splits),
        parameters={**config, "MASK_ZERO": problem.mask_zero, "MEAN": problem.divisor != 1},
        tma={
            "documents": Tma(
                documents.size(0),
                documents.size(1),
                shared_hopper.padded_descriptor(problem.document_length),
            ),
        },
        fallback=WITHOUT_ROLES,
    )
    return True


def _add_all_pairs(
    builder: MaxSimPlanBuilder,
    block_q: int,
    max_programs: int,
    tma: Mapping[str, Tma],
) -> None:
    """Add the launches that compute scores of all pairs in tiles.

    A tile that holds whole queries writes their scores directly. If queries are split over tiles,
    partial sums are written, and a second kernel adds them up.

    Args:
        builder: the plan so far.
        block_q: query tokens of a tile.
        max_programs: programs that run at a time.
        tma: how documents are described to TMA.
    """
    problem = builder.problem
    n_rows = problem.queries.size(0)
    length = problem.query_length
    tiles_hold_queries = 0 < length <= block_q
    tile_rows = block_q
    if tiles_hold_queries:
        tile_rows = block_q // length * length  # rows of the queries that fit
    n_tiles = cdiv(n_rows, tile_rows)
    is_single_tile_of_packed = not length and n_tiles == 1
    direct = tiles_hold_queries or is_single_tile_of_packed
    splits = plan_splits(n_tiles, problem.n_documents, max_programs)
    if not direct:
        builder.add_buffer("parts", (n_tiles + problem.n_queries, problem.n_documents))
    builder.add_launch(
        scores.all_pairs_kernel,
        grid=(n_tiles, splits),
        parameters={
            "tile_rows": tile_rows,
            "splits": splits,
            "steps": problem.n_queries.bit_length(),
            "DIRECT": direct,
            "LQ": length if tiles_hold_queries and block_q % length == 0 else 0,
        },
        tma=tma,
        fallback=BY_POINTERS,
    )
    if not direct:
        builder.add_launch(
            scores.combine_kernel,
            grid=(problem.n_queries * cdiv(problem.n_documents, COMBINED),),
            parameters={"tile_rows": tile_rows, "BLOCK": COMBINED, "num_warps": 4, "num_stages": 3},
        )


def plan_splits(n_tiles: int, n_documents: int, max_programs: int) -> int:
    """Choose the number of parts that the documents are divided into.

    Each pair of a tile and a part is computed by one program instance. Instances run in rounds of
    ``max_programs``. The choice minimizes the documents that are read one after another: the rounds
    times the documents of a part. The start of an instance costs as much as 0.1 document.

    Args:
        n_tiles: number of tiles of query tokens.
        n_documents: number of documents.
        max_programs: programs that run at a time.
    """
    limit = min(n_documents, 4 * cdiv(max_programs, n_tiles))

    def cost(splits: int) -> float:
        n_rounds = cdiv(n_tiles * splits, max_programs)
        return n_rounds * (cdiv(n_documents, splits) + 0.1)

    return min(range(1, limit + 1), key=cost)


def xtr_forward(
    tensors: MaxSimTensors,
    options: XtrOptions,
    training: bool,
    setting: Setting,
) -> None:
    """Return no plan: XTR scores are computed by torch operations."""
    check_interpreted(setting, tensors.queries.dtype)


# Gradients


def xtr_backward(
    dscores: Tensor,
    saved: XtrSaved,
    options: XtrOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the gradients of the maximum, for the winners that were retrieved."""
    plan = backward(dscores / saved.divisor, saved.maximum, options.maximum, needs, setting)
    division = TorchStep(torch.div, ("dscores", "divisor"), output="dscores")
    return plan._replace(steps=(division, *plan.steps))


def backward(
    dscores: Tensor,
    saved: MaxSimSaved,
    options: MaxSimOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the gradients of queries and documents."""
    problem = Problem.of(saved.tensors, options)
    if problem.empty or saved.saved is None or saved.saved.numel() == 0:
        return Plan(fills={"dqueries": 0, "ddocuments": 0})
    all_pairs = problem.pairing == "all"
    tensors = saved._asdict()
    # Kernels read the gradient of the scores of all pairs with any strides, and that of other pairs
    # with one stride for all pairs.
    strides = dscores.stride()
    readable = setting.aligned and (
        all_pairs or dscores.dim() == 1 or dscores.is_contiguous() or not any(strides)
    )
    if not readable:
        tensors["dscores"] = dscores  # which makes a contiguous copy
        strides = (dscores.size(-1), 1)
    if not problem.temperature:  # winners are unmasked
        tensors |= {"query_mask": None, "document_mask": None}
    need_queries, need_documents = needs
    # The largest gradient scales products in fp16.
    has_largest = problem.queries.dtype == torch.float16 and (
        need_documents or problem.temperature > 0
    )
    leading = []
    if has_largest:
        largest_entry = functools.partial(torch.linalg.vector_norm, ord=math.inf)
        leading.append(TorchStep(largest_entry, ("dscores",), output="largest"))
    builder = MaxSimPlanBuilder(problem, setting, tensors, *leading)
    builder.set_parameters(
        stride_q=strides[0] if all_pairs else 0,
        stride_d=strides[-1],
        factor=1.0 / problem.divisor,
        HAS_LARGEST=has_largest,
        NO_WINNER=no_winner(saved.saved.dtype),
    )
    if problem.normalize and "query_norms" in builder.non_empty:
        builder.use_saved_norms()
    elif problem.normalize:
        builder.inverse_norms(results=False)
    if all_pairs and problem.cu_queries is not None and "row_query" not in builder.non_empty:
        builder.replace_tensor("row_query", by="owners")
        builder.add_torch_step(
            functools.partial(row_queries, problem.queries.size(0)),
            ["cu_queries"],
            output="owners",
        )
    # Documents come first: their lists of winners are freed before the gradient of the queries.
    if need_documents:
        _add_gradient(builder, of_documents=True)
    if need_queries:
        _add_gradient(builder, of_documents=False)
    return builder.build()


def row_queries(n_rows: int, offsets: Tensor) -> Tensor:
    """Return the ``[Tq]`` int32 query of each packed row, as the forward kernel finds it."""
    last_query = offsets.size(0) - 2
    return sequences_of_rows(offsets, n_rows, int32=True).clamp_(max=last_query)


def _pair_order(column: int, pairs: Tensor) -> Tensor:
    """Return the order of pairs by query (column 0) or by document (column 1)."""
    return pairs[:, column].sort(stable=True).indices


def _pair_offsets(column: int, count: int, pairs: Tensor, order: Tensor) -> Tensor:
    """Return where the pairs of each query or document begin in an order.

    Args:
        column: 0 for queries, 1 for documents.
        count: number of queries or documents.
        pairs: ``[P, 2]``.
        order: ``[P]`` order of the pairs.

    Returns:
        ``[count + 1]`` offsets.
    """
    # Without `sorter=`, whose values torch checks on the CPU.
    return torch.searchsorted(
        pairs[:, column][order],
        torch.arange(count + 1, dtype=pairs.dtype, device=pairs.device),
    )


def _gradient_kernel(problem: Problem, of_documents: bool, few_rows: int) -> tuple[str, Any]:
    """Choose the kernel of a gradient.

    Args:
        problem: the problem.
        of_documents: whether the gradient is that of documents.
        few_rows: query rows of all pairs up to which each row has a program.

    Returns:
        The name of its configuration, and the kernel.
    """
    all_pairs = problem.pairing == "all"
    if problem.temperature:
        if of_documents:
            return "smooth", smooth.smooth_ddocuments_kernel
        return "smooth", smooth.smooth_dqueries_kernel
    if of_documents:
        if all_pairs:
            return "listed", gradients.ddocuments_listed_kernel
        return "documents", gradients.ddocuments_kernel
    if all_pairs and problem.queries.size(0) <= few_rows:
        return "row", gradients.dqueries_row_kernel
    return "rows", gradients.dqueries_kernel


def _gradient_grid(
    builder: MaxSimPlanBuilder,
    kind: str,
    of_documents: bool,
    config: Constants,
) -> tuple[int, int, int]:
    """Return the grid of a gradient's kernel, and add what follows from it to ``config``.

    Args:
        builder: the plan so far, which gets the scratch of the kernel "listed".
        kind: the kernel's name from :func:`_gradient_kernel`.
        of_documents: whether the gradient is that of documents.
        config: constants of the kernel, to which some are added.
    """
    problem = builder.problem
    n_query_rows, dim = problem.queries.shape
    n_column_blocks = cdiv(dim, config["BLOCK_D"])
    if not of_documents:
        if problem.pairing != "all":
            return problem.n_queries, n_column_blocks, 1
        block_rows = config.get("BLOCK_R") or config.get("BLOCK_Q") or 1
        return cdiv(n_query_rows, block_rows), n_column_blocks, 1
    # Programs share the tiles of a document. Packed documents have the length 0 here.
    n_tiles = cdiv(problem.document_length, config["BLOCK_T"])
    slices = min(n_tiles, MAX_SLICES) or TILES_OF_PACKED
    config["tiles"] = slices
    config["slices"] = slices
    if kind != "listed":
        return problem.n_documents, slices, n_column_blocks
    if n_query_rows >= MANY_ROWS:
        config["BLOCK_S"] = config["BLOCK_S_MANY"]
    config["CAPACITY"] = 2 * config["BLOCK_S"]
    config["ALIGNED"] = n_query_rows % 8 == 0
    n_programs = min(problem.n_documents * slices, MAX_PROGRAMS)
    list_elements = n_programs * n_column_blocks * config["CAPACITY"]
    builder.add_buffer("lists", (list_elements,), torch.int32)
    return n_programs, n_column_blocks, 1


def _add_gradient(builder: MaxSimPlanBuilder, of_documents: bool) -> None:
    """Add the launches that compute the gradient of documents, or of queries."""
    problem = builder.problem
    setting = builder.setting
    name = "documents" if of_documents else "queries"
    rows = problem.documents if of_documents else problem.queries
    n_rows, dim = rows.shape
    all_pairs = problem.pairing == "all"
    few_rows = configs.backward_config(
        "row",
        setting.capability,
        problem.queries.dtype,
        setting.tf32,
    )["FEW_ROWS"]
    kind, kernel = _gradient_kernel(problem, of_documents, few_rows)
    config = configs.backward_config(
        kind,
        setting.capability,
        problem.queries.dtype,
        setting.tf32,
    )
    # A kernel that has all of a row turns gradients of unit vectors into those of the rows itself.
    # Otherwise that is done afterwards in fp32, before the only rounding.
    kernel_projects = problem.normalize and kind in ("row", "listed") and dim <= config["BLOCK_D"]
    project_afterwards = problem.normalize and not kernel_projects
    out = f"d{name}"
    if project_afterwards:
        out = builder.add_buffer(f"unit_d{name}", rows.shape)
    # Should offsets be broken, there are rows of no sequence, which have no gradient. The kernels
    # for queries of all pairs write every row.
    if of_documents:
        may_have_unwritten_rows = problem.cu_documents is not None
    else:
        may_have_unwritten_rows = problem.cu_queries is not None and not all_pairs
    if may_have_unwritten_rows and project_afterwards:
        builder.add_torch_step(Tensor.zero_, [out], output=out)
    elif may_have_unwritten_rows:
        builder.fill(out, 0)
    if problem.index is not None:
        column = 1 if of_documents else 0
        count = problem.n_documents if of_documents else problem.n_queries
        builder.add_torch_step(
            functools.partial(_pair_order, column),
            ["pairs"],
            output=f"{name}_order",
        )
        builder.add_torch_step(
            functools.partial(_pair_offsets, column, count),
            ["pairs", f"{name}_order"],
            output=f"{name}_first",
        )
    grid = _gradient_grid(builder, kind, of_documents, config)
    builder.add_launch(
        kernel,
        grid=grid,
        parameters={**config, "PROJECTS": kernel_projects},
        tensors={
            "order_ptr": f"{name}_order",
            "first_ptr": f"{name}_first",
            "ddoc_ptr": out,
            "dquery_ptr": out,
        },
    )
    if project_afterwards:
        builder.over_rows(
            norms.unit_gradient_kernel,
            n_rows,
            {
                "rows_ptr": name,
                "scale_ptr": "document_factors" if of_documents else "query_factors",
                "grad_ptr": out,
                "out_ptr": f"d{name}",
            },
        )
