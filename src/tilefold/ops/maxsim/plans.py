"""Launch plans of MaxSim and its gradients, from the layouts of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.calls import ALIGNMENT
from tilefold.ops._shared.fallback import KernelFallback
from tilefold.ops._shared.impl import check_interpreter_dtypes
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
    new_saved_values,
)
from tilefold.ops.maxsim._triton import backward as gradients
from tilefold.ops.maxsim._triton import forward as scores
from tilefold.ops.maxsim._triton import norms, smooth
from tilefold.ops.maxsim._triton.device import ENDS
from tilefold.ops.maxsim._triton.shared import STRIP, shared_pass_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel

COMBINED = 256  # number of documents whose partial sums one program adds up
MAX_SLICES = 65535  # limit of a grid's second axis; a program then computes several tiles
PACKED_SLICES = 4  # number of programs that share the tiles of a packed document of unknown length
MANY_ROWS = 16384  # number of query rows from which winners are read in larger pieces
MAX_ROUNDS = 4  # more rounds of programs, with fewer documents each, are not considered
PROGRAM_COST = 0.1  # starting a program takes as long as reading this many documents
MAX_PROGRAMS = 4096  # largest number of programs that hold a list of winners each

# Tile, warps and stages of kernels that read rows once.
ROW_KERNEL = {"BLOCK_R": 16, "BLOCK_D": 128, "num_warps": 4, "num_stages": 3}

POINTER_FALLBACK = KernelFallback(
    configs.BY_TMA,
    "Documents are read by pointers instead: the same scores, slower.",
)
UNSPECIALIZED_FALLBACK = KernelFallback(
    configs.BY_ROLES,
    "Other kernels read the documents instead: the same scores up to fp32 rounding, slower.",
)
# Scratch buffers of inverse norms, and the results that replace them if backward reads the norms.
SAVED_NORMS = {"query_factors": "query_norms", "document_factors": "document_norms"}
OFFSETS = ("cu_queries", "cu_documents", "pairs")


class MaxSimPlanBuilder(PlanBuilder):
    """Builder of a plan that first converts tensors to the form that kernels read.

    Args:
        problem: tensors and options of the call.
        setting: facts about the device.
        tensors: tensors by name. A tensor without elements counts as ``None``, since a registered
            operator cannot return ``None``.
        leading: torch steps after the first copies.

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
        """Set the parameters that kernels share, and plan copies of tensors that they cannot read.

        Kernels read contiguous tensors that begin at multiples of 16 bytes, and int32 offsets.

        Args:
            problem: tensors and options of the call.
            setting: facts about the device.
            tensors: tensors by name.
            leading: torch steps that run between the copies and the conversion of offsets.
        """
        self.problem = problem
        self.setting = setting
        super().__init__(_kernel_parameters(problem))
        self.non_empty: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.numel():
                self.non_empty[name] = tensor
            else:
                # No tensor is called so. Kernels then get None.
                self.replace_tensor(name, by=f"no_{name}")
        if setting.aligned:
            self.make_contiguous(self.non_empty)
        else:
            # Kernels are built for tensors that begin at multiples of 16 bytes. A copy costs less
            # than another build, and gives the same sums.
            for name in self.non_empty:
                self.add_torch_step(_aligned_copy, [name], output=name)
        for step in leading:
            self.add_torch_step(*step)
        for name in OFFSETS:
            if name in self.non_empty and self.non_empty[name].dtype == torch.int64:
                self.add_torch_step(_to_int32, [name], output=name)

    def add_row_kernel(
        self,
        kernel: object,
        n_rows: int,
        tensors: Mapping[str, str] = {},
        n_other_rows: int = 0,
    ) -> None:
        """Add the launch of a kernel in which each program reads a block of rows once.

        Args:
            kernel: the ``triton.jit`` function.
            n_rows: number of rows of the first tensor.
            tensors: kernel parameter -> name of the tensor that it gets, if the names differ.
            n_other_rows: number of rows of a second tensor. The programs after those of the first
                tensor read it.
        """
        block_rows = ROW_KERNEL["BLOCK_R"]
        n_programs = cdiv(n_rows, block_rows) + cdiv(n_other_rows, block_rows)
        self.add_launch(
            kernel,
            grid=(n_programs,),
            parameters={"T": n_rows, **ROW_KERNEL},
            tensors=tensors,
        )

    def use_saved_norms(self) -> None:
        """Let later steps read and write inverse norms in the results that backward reads."""
        for name, saved_name in SAVED_NORMS.items():
            self.replace_tensor(name, by=saved_name)

    def add_inverse_norms(self, saved: bool) -> None:
        """Add the launch that computes the inverse norms ``[Tq]`` and ``[Td]`` in fp32.

        Args:
            saved: whether the norms are kept as results, for backward. Otherwise they are scratch.
        """
        n_query_rows = self.problem.queries.size(0)
        n_document_rows = self.problem.documents.size(0)
        if saved:
            self.use_saved_norms()
        else:
            self.add_buffer("query_factors", (n_query_rows,))
            self.add_buffer("document_factors", (n_document_rows,))
        self.add_row_kernel(
            norms.inverse_norms_kernel,
            n_query_rows,
            n_other_rows=n_document_rows,
        )


def _kernel_parameters(problem: Problem) -> dict[str, Any]:
    """Return the values that kernels of MaxSim share, by the names of the kernels' parameters.

    Args:
        problem: tensors and options of the call.
    """
    temperature = problem.temperature
    return {
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
        "one": 1,  # an argument, because the compiler must not know its value
        "D": problem.queries.size(1),
        "UNIFORM_Q": problem.cu_queries is None,
        "UNIFORM_D": problem.cu_documents is None,
        "HAS_SCALE": problem.normalize or problem.document_scale is not None,
        "HAS_QMASK": problem.query_mask is not None,
        "HAS_DMASK": problem.document_mask is not None,
        "PAIRING": {"all": 0, "aligned": 1, "grouped": 1, "index": 2}[problem.pairing],
    }


def _to_int32(offsets: Tensor) -> Tensor:
    """Convert offsets or indices to int32. A value that does not fit remains an invalid one."""
    return offsets.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)


def _aligned_copy(tensor: Tensor) -> Tensor:
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
    """Plan the forward pass: the scores, and the results that backward reads.

    A plan lists buffers and kernel launches as data.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: checked options.
        training: whether backward may follow. Otherwise only scores are computed.
        setting: facts about the device.
    """
    problem = Problem.of(tensors, options)
    check_interpreter_dtypes(setting, problem.queries.dtype)
    if problem.empty or 0 in problem.score_shape:
        return Plan(fills={"scores": 0}, skipped_results=frozenset(RESULTS[1:]))
    builder = MaxSimPlanBuilder(problem, setting, tensors._asdict())
    for name in RESULTS:
        if name not in problem.result_names(training):
            builder.skip_result(name)
    if training and problem.index is not None and problem.cu_queries is not None:
        # kernels do not write the columns past the end of a query in the matrix of winners
        builder.add_torch_step(
            lambda queries: new_saved_values(problem, queries).view(problem.saved_dtype),
            ["queries"],
            output="saved",
        )
    _add_scores(builder, training)
    return builder.build()


def _add_scores(builder: MaxSimPlanBuilder, training: bool) -> None:
    """Add the launches that compute the scores, with the kernel for the shapes.

    If the call needs it, earlier launches compute inverse norms, round queries to int8, or find the
    ends of documents.

    Args:
        builder: the plan so far.
        training: whether backward may follow.
    """
    problem = builder.problem
    is_int8 = problem.documents.dtype == torch.int8
    rows_per_query = _rows_per_query(problem)
    # On Hopper, a kernel whose warps either load or multiply can compute the scores on its own.
    if _is_inference_of_all_pairs(problem, training) and _add_warp_specialized_pass(
        builder, rows_per_query
    ):
        return
    kernel_name, config = _choose_score_kernel(builder, training, rows_per_query)
    tma = _describe_documents_to_tma(builder, config)
    if problem.document_scale is not None:
        builder.replace_tensor("document_factors", by="document_scale")
    if problem.normalize:
        builder.add_inverse_norms(saved=training)
    elif is_int8 and kernel_name != "stream":  # the streaming kernel rounds queries itself
        _add_rounding_of_queries(builder)
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
    if _padding_can_be_skipped(problem, kernel_name, config):
        _add_document_ends(builder)
    _launch_scores(builder, kernel_name, config, rows_per_query, tma)


def _rows_per_query(problem: Problem) -> int:
    """Return the rows of each query in a tile that queries share; 0 for packed queries."""
    if not problem.query_length:
        return 0
    return power_of_two(problem.query_length, STRIP.value)


def _padding_can_be_skipped(problem: Problem, kernel_name: str, config: Constants) -> bool:
    """Return whether the kernel can skip tiles after the last unmasked token of a document.

    In mode "zero", it must read them. If a document is a single tile, nothing would be skipped.

    Args:
        problem: tensors and options of the call.
        kernel_name: name of the kernel from :func:`_choose_score_kernel`.
        config: constants of the kernel.
    """
    return (
        problem.document_mask is not None
        and not problem.mask_zero
        and kernel_name in ("tiles", "pairs")
        and problem.document_length > config["BLOCK_T"]
    )


def _is_inference_of_all_pairs(problem: Problem, training: bool) -> bool:
    """Return whether kernels without winners can be used: for inference with all pairs."""
    return problem.pairing == "all" and not training and not problem.temperature


def _choose_score_kernel(
    builder: MaxSimPlanBuilder,
    training: bool,
    rows_per_query: int,
) -> tuple[str, Constants]:
    """Choose the kernel of the scores.

    Args:
        builder: the plan so far.
        training: whether backward may follow.
        rows_per_query: rows of a tile for each query, if queries share tiles.

    Returns:
        Name of the kernel, and its constants. The names are:

        - ``"shared"``: reads int8 documents once for several queries
        - ``"stream"``: reads 8-bit documents once for few query tokens
        - ``"tiles"``: computes tiles of query tokens and documents, for all pairs
        - ``"pairs"``: has a program for each pair, for other pairings
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
                rows_per_query,
                capability=setting.capability,
                rows=rows_per_query * problem.n_queries,
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
        saves_winners=training,
        document_length=problem.document_length,
    )
    return "tiles" if all_pairs else "pairs", config


def _launch_scores(
    builder: MaxSimPlanBuilder,
    kernel_name: str,
    config: Constants,
    rows_per_query: int,
    tma: Mapping[str, Tma],
) -> None:
    """Add the launch of the kernel that :func:`_choose_score_kernel` chose.

    Args:
        builder: the plan so far.
        kernel_name: name of the kernel.
        config: constants of the kernel.
        rows_per_query: rows of a tile for each query, if queries share tiles.
        tma: TMA description of the documents by the name of the tensor; empty if kernels read
            documents by pointers.
    """
    problem = builder.problem
    max_programs = builder.setting.multiprocessors * config["PROGRAMS"]
    if kernel_name == "shared":
        n_tiles = cdiv(problem.n_queries * rows_per_query, config["BLOCK_Q"])
        splits = plan_splits(n_tiles, problem.n_documents, max_programs)
        one_tile = 0 < problem.document_length <= config["BLOCK_T"]
        builder.add_launch(
            shared_pass_kernel,
            grid=(n_tiles, splits),
            parameters={"splits": splits, "ONE_TILE": one_tile},
            tma=tma,
            fallback=POINTER_FALLBACK,
        )
    elif kernel_name == "stream":
        builder.add_launch(
            stream_kernel,
            grid=(plan_splits(1, problem.n_documents, max_programs),),
            parameters={"PREFETCH": config["PREFETCH"] if tma else 0},
            tma=tma,
            fallback=POINTER_FALLBACK,
        )
    elif kernel_name == "tiles":
        _add_all_pairs(builder, config["BLOCK_Q"], max_programs, tma)
    else:
        builder.add_launch(
            scores.listed_pairs_kernel,
            grid=(problem.n_pairs,),
            tma=tma,
            fallback=POINTER_FALLBACK,
        )


def _describe_documents_to_tma(builder: MaxSimPlanBuilder, config: Constants) -> dict[str, Tma]:
    """Describe the documents to TMA, which loads tiles of a matrix on Hopper GPUs and newer ones.

    Args:
        builder: the plan so far.
        config: constants of the kernel of the scores.

    Returns:
        ``{"documents": description}``. It is empty if the configuration does not use TMA, if TMA
        cannot read the strides of the documents, or if a kernel with TMA could not be built on the
        device.
    """
    documents = builder.problem.documents
    if (
        not config["USE_TMA"]
        or not rows_fit_descriptor(documents)
        or configs.BY_TMA in builder.setting.failed_kernels
    ):
        return {}
    descriptor = functools.partial(
        TensorDescriptor,
        block_shape=[config["BLOCK_T"], config["BLOCK_K"]],
    )
    return {"documents": Tma(documents.size(0), documents.size(1), descriptor)}


def _add_document_ends(builder: MaxSimPlanBuilder) -> None:
    """Add the launch that finds the last unmasked token of each document.

    Later kernels then do not read the padding: they get the ends in place of the offsets of packed
    documents, and ``UNIFORM_D`` tells them so.
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


def _add_rounding_of_queries(builder: MaxSimPlanBuilder) -> None:
    """Add the launch that rounds queries to int8, with one fp32 factor per token."""
    queries = builder.problem.queries
    builder.add_buffer("int8_queries", queries.shape, torch.int8)
    builder.add_buffer("query_factors", queries.shape[:1])
    builder.add_row_kernel(
        norms.quantize_kernel,
        queries.size(0),
        {"rows_ptr": "queries", "out_ptr": "int8_queries", "scale_ptr": "query_factors"},
    )
    builder.replace_tensor("queries", by="int8_queries")


def _add_warp_specialized_pass(builder: MaxSimPlanBuilder, rows_per_query: int) -> bool:
    """Add the warp-specialized kernel for int8 documents, if it can run and is faster.

    It scores padded queries with many padded int8 documents.

    Args:
        builder: the plan so far.
        rows_per_query: rows of a tile for each query.

    Returns:
        Whether the kernel was added.
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
    n_rows = rows_per_query * problem.n_queries
    config = configs.pass_config(
        configs.ROLES_PASS,
        problem.queries.size(1),
        rows_per_query,
        capability=setting.capability,
        rows=n_rows,
        documents=problem.n_documents,
        tokens=problem.document_length,
        half=-n_rows % 512 >= 256,  # tiles of 512 rows would have 256 or more idle rows
    )
    if config is None or configs.BY_ROLES in setting.failed_kernels or releases.why_no_warp_roles():
        return False
    from tilefold.ops.maxsim._triton import shared_hopper  # needs Gluon

    builder.replace_tensor("document_factors", by="document_scale")
    _add_rounding_of_queries(builder)
    n_tiles = cdiv(n_rows, config["BLOCK_Q"])
    n_document_groups = cdiv(problem.n_documents, config["GROUP"])
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
        fallback=UNSPECIALIZED_FALLBACK,
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
        tma: how the GPU's tensor memory accelerator (TMA) copies tiles of the documents, by the
            name of their tensor. Empty without TMA.
    """
    problem = builder.problem
    n_rows = problem.queries.size(0)
    length = problem.query_length  # 0 if queries are packed
    tiles_hold_queries = 0 < length <= block_q
    tile_rows = block_q
    if tiles_hold_queries:
        tile_rows = block_q // length * length  # rows of the queries that fit
    n_tiles = cdiv(n_rows, tile_rows)
    is_single_tile_of_packed = not length and n_tiles == 1
    writes_scores = tiles_hold_queries or is_single_tile_of_packed
    splits = plan_splits(n_tiles, problem.n_documents, max_programs)
    if not writes_scores:
        # Row ``tile + query`` has the partial sums of the query's tokens in this tile.
        builder.add_buffer("parts", (n_tiles + problem.n_queries, problem.n_documents))
    tiles_are_full = tiles_hold_queries and block_q % length == 0
    builder.add_launch(
        scores.all_pairs_kernel,
        grid=(n_tiles, splits),
        parameters={
            "tile_rows": tile_rows,
            "splits": splits,
            "steps": problem.n_queries.bit_length(),  # of the bisection that finds a row's query
            "DIRECT": writes_scores,
            "LQ": length if tiles_are_full else 0,
        },
        tma=tma,
        fallback=POINTER_FALLBACK,
    )
    if not writes_scores:
        builder.add_launch(
            scores.combine_kernel,
            grid=(problem.n_queries * cdiv(problem.n_documents, COMBINED),),
            parameters={"tile_rows": tile_rows, "BLOCK": COMBINED, "num_warps": 4, "num_stages": 3},
        )


def plan_splits(n_tiles: int, n_documents: int, max_programs: int) -> int:
    """Choose the number of splits of the documents.

    Each tile of queries is computed with each split by one program. Programs run in rounds of
    ``max_programs``. The choice minimizes the number of rounds times the documents per split.

    Args:
        n_tiles: number of tiles of query tokens.
        n_documents: number of documents.
        max_programs: number of programs that run at a time.
    """
    max_splits = min(n_documents, MAX_ROUNDS * cdiv(max_programs, n_tiles))

    def cost(splits: int) -> float:
        n_rounds = cdiv(n_tiles * splits, max_programs)
        return n_rounds * (cdiv(n_documents, splits) + PROGRAM_COST)

    return min(range(1, max_splits + 1), key=cost)


def xtr_forward(
    tensors: MaxSimTensors,
    options: XtrOptions,
    training: bool,
    setting: Setting,
) -> None:
    """Return no plan: torch operations compute XTR scores. Only the dtype is checked.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: not used.
        training: not used.
        setting: facts about the device.
    """
    check_interpreter_dtypes(setting, tensors.queries.dtype)


# Gradients


def xtr_backward(
    dscores: Tensor,
    saved: XtrSaved,
    options: XtrOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the gradients of XTR scores: those of MaxSim, for the maxima that were retrieved.

    Args:
        dscores: layout of the gradient of the scores.
        saved: what the forward pass saved, on the meta device.
        options: checked options.
        needs: whether the gradients of queries and documents are needed.
        setting: facts about the device.
    """
    plan = backward(
        dscores / saved.divisor,
        saved.maxsim_saved,
        options.maxsim_options,
        needs,
        setting,
    )
    # the tensors here are only layouts; this step divides the values
    division = TorchStep(torch.div, ("dscores", "divisor"), output="dscores")
    return plan._replace(steps=(division, *plan.steps))


def backward(
    dscores: Tensor,
    saved: MaxSimSaved,
    options: MaxSimOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the gradients of queries and documents.

    Args:
        dscores: layout of the gradient of the scores.
        saved: what the forward pass saved, on the meta device.
        options: checked options.
        needs: whether the gradients of queries and of documents are needed.
        setting: facts about the device.
    """
    problem = Problem.of(saved.tensors, options)
    if problem.empty or saved.saved is None or saved.saved.numel() == 0:
        return Plan(fills={"dqueries": 0, "ddocuments": 0})
    all_pairs = problem.pairing == "all"
    tensors = saved._asdict()
    strides = dscores.stride()
    if not _is_readable(dscores, all_pairs, setting):
        tensors["dscores"] = dscores  # the builder adds a contiguous copy
        strides = (dscores.size(-1), 1)
    is_smooth = problem.temperature > 0
    if not is_smooth:  # masks are not read, because masked tokens have no maximum
        tensors["query_mask"] = None
        tensors["document_mask"] = None
    need_queries, need_documents = needs
    # Products in fp16 are scaled by the largest gradient, so that they neither overflow nor vanish.
    # The gradient of the queries has products only for the smooth maximum.
    has_products = need_documents or is_smooth
    needs_largest = problem.queries.dtype == torch.float16 and has_products
    first_steps = []
    if needs_largest:
        largest_entry = functools.partial(torch.linalg.vector_norm, ord=math.inf)
        first_steps.append(TorchStep(largest_entry, ("dscores",), output="largest"))
    builder = MaxSimPlanBuilder(problem, setting, tensors, *first_steps)
    builder.set_parameters(
        stride_q=strides[0] if all_pairs else 0,
        stride_d=strides[-1],
        factor=1.0 / problem.divisor,
        HAS_LARGEST=needs_largest,
        NO_WINNER=no_winner(saved.saved.dtype),
    )
    if problem.normalize and "query_norms" in builder.non_empty:
        builder.use_saved_norms()
    elif problem.normalize:
        builder.add_inverse_norms(saved=False)
    # The query of each row is computed if the forward pass has not saved it.
    if all_pairs and problem.cu_queries is not None and "row_query" not in builder.non_empty:
        builder.replace_tensor("row_query", by="owners")
        builder.add_torch_step(
            functools.partial(row_queries, problem.queries.size(0)),
            ["cu_queries"],
            output="owners",
        )
    # Documents come first, so that their lists of query tokens are freed before the next gradient.
    if need_documents:
        _add_gradient(builder, of_documents=True)
    if need_queries:
        _add_gradient(builder, of_documents=False)
    return builder.build()


def _is_readable(dscores: Tensor, all_pairs: bool, setting: Setting) -> bool:
    """Return whether kernels can read the gradient of the scores without a copy.

    For all pairs, kernels read ``[Nq, Nd]`` with any strides. For other pairings, they read one
    number per pair with a single stride.

    Args:
        dscores: layout of the gradient of the scores.
        all_pairs: whether all pairs are scored.
        setting: facts about the device.
    """
    if not setting.aligned:
        return False
    has_single_stride = dscores.dim() == 1 or dscores.is_contiguous() or not any(dscores.stride())
    return all_pairs or has_single_stride


def row_queries(n_rows: int, offsets: Tensor) -> Tensor:
    """Return the query of each packed row, int32 ``[Tq]``, as the forward kernel computes it.

    Args:
        n_rows: number of rows of all queries.
        offsets: ``[Nq + 1]`` offsets of the queries.
    """
    last_query = offsets.size(0) - 2
    return sequences_of_rows(offsets, n_rows, int32=True).clamp_(max=last_query)


def _pair_order(column: int, pairs: Tensor) -> Tensor:
    """Return the order ``[P]`` that sorts pairs by query (column 0) or by document (column 1)."""
    return pairs[:, column].sort(stable=True).indices


def _pair_offsets(column: int, count: int, pairs: Tensor, order: Tensor) -> Tensor:
    """Return CSR offsets of pairs that are sorted by query or by document.

    Args:
        column: 0 for queries, 1 for documents.
        count: number of queries or documents.
        pairs: ``[P, 2]`` queries and documents.
        order: ``[P]`` order that sorts the column.

    Returns:
        ``[count + 1]`` offsets.
    """
    # `sorter=order` would wait for the device: torch checks its values
    sorted_column = pairs[:, column][order]
    return torch.searchsorted(
        sorted_column,
        torch.arange(count + 1, dtype=pairs.dtype, device=pairs.device),
    )


class _GradientKernel(NamedTuple):
    """The kernel of a gradient.

    Attributes:
        kernel: the ``triton.jit`` function.
        config: constants of the kernel.
        grid: number of programs in three dimensions.
        projects: whether the kernel turns gradients of unit vectors into those of the rows itself.
    """

    kernel: Any
    config: Constants
    grid: tuple[int, int, int]
    projects: bool = False


def _backward_config(builder: MaxSimPlanBuilder, kernel: str) -> Constants:
    """Return the constants of a backward kernel for the device and the dtype of the call."""
    return configs.backward_config(
        kernel,
        builder.setting.capability,
        builder.problem.queries.dtype,
        builder.setting.tf32,
    )


def _choose_query_gradient_kernel(builder: MaxSimPlanBuilder) -> _GradientKernel:
    """Choose the kernel of the gradient of queries.

    For all pairs, a program has a block of query tokens, or a single one if there are few. For
    other pairings, a program has a query.
    """
    problem = builder.problem
    n_query_rows, dim = problem.queries.shape
    has_few_rows = n_query_rows <= _backward_config(builder, "row")["FEW_ROWS"]
    if problem.temperature:
        kernel = smooth.smooth_dqueries_kernel
        config = _backward_config(builder, "smooth")
        rows_of_program = config["BLOCK_Q"]
    elif problem.pairing == "all" and has_few_rows:
        kernel = gradients.dqueries_row_kernel
        config = _backward_config(builder, "row")
        rows_of_program = 1
    else:
        kernel = gradients.dqueries_kernel
        config = _backward_config(builder, "rows")
        rows_of_program = config["BLOCK_R"]
    n_programs = problem.n_queries
    if problem.pairing == "all":
        n_programs = cdiv(n_query_rows, rows_of_program)
    n_column_blocks = cdiv(dim, config["BLOCK_D"])
    has_complete_rows = kernel is gradients.dqueries_row_kernel and n_column_blocks == 1
    return _GradientKernel(
        kernel,
        config,
        grid=(n_programs, n_column_blocks, 1),
        projects=problem.normalize and has_complete_rows,
    )


def _choose_document_gradient_kernel(builder: MaxSimPlanBuilder) -> _GradientKernel:
    """Choose the kernel of the gradient of documents.

    Several programs share the tiles of a document.
    """
    problem = builder.problem
    if problem.pairing == "all" and not problem.temperature:
        return _choose_listed_gradient_kernel(builder)
    if problem.temperature:
        kernel = smooth.smooth_ddocuments_kernel
        config = _backward_config(builder, "smooth")
    else:
        kernel = gradients.ddocuments_kernel
        config = _backward_config(builder, "documents")
    slices = _slices_of_document(problem, config)
    return _GradientKernel(
        kernel,
        config={**config, "tiles": slices, "slices": slices},
        grid=(problem.n_documents, slices, cdiv(problem.queries.size(1), config["BLOCK_D"])),
    )


def _choose_listed_gradient_kernel(builder: MaxSimPlanBuilder) -> _GradientKernel:
    """Choose the kernel of the gradient of documents for all pairs, which lists query tokens first.

    A program lists the query tokens whose most similar document token is in its tile. The number of
    programs is limited to bound the memory of the lists. A program then computes several tiles.
    """
    problem = builder.problem
    n_query_rows, dim = problem.queries.shape
    config = _backward_config(builder, "listed")
    slices = _slices_of_document(problem, config)
    n_column_blocks = cdiv(dim, config["BLOCK_D"])
    n_programs = min(problem.n_documents * slices, MAX_PROGRAMS)
    block_rows = config["BLOCK_S_MANY"] if n_query_rows >= MANY_ROWS else config["BLOCK_S"]
    list_capacity = 2 * block_rows
    builder.add_buffer("lists", (n_programs * n_column_blocks * list_capacity,), torch.int32)
    return _GradientKernel(
        gradients.ddocuments_listed_kernel,
        config={
            **config,
            "tiles": slices,
            "slices": slices,
            "BLOCK_S": block_rows,
            "CAPACITY": list_capacity,
            "ALIGNED": n_query_rows % 8 == 0,
        },
        grid=(n_programs, n_column_blocks, 1),
        projects=problem.normalize and n_column_blocks == 1,
    )


def _slices_of_document(problem: Problem, config: Constants) -> int:
    """Return the number of programs that share the tiles of a document."""
    if not problem.document_length:  # packed documents
        return PACKED_SLICES
    return min(cdiv(problem.document_length, config["BLOCK_T"]), MAX_SLICES)


def _add_gradient(builder: MaxSimPlanBuilder, of_documents: bool) -> None:
    """Add the launches that compute the gradient of documents, or of queries.

    Args:
        builder: the plan so far.
        of_documents: whether the gradient is that of documents; otherwise that of queries.
    """
    problem = builder.problem
    name = "documents" if of_documents else "queries"
    rows = problem.documents if of_documents else problem.queries
    if of_documents:
        chosen = _choose_document_gradient_kernel(builder)
    else:
        chosen = _choose_query_gradient_kernel(builder)
    # A kernel that has all of a row turns gradients of unit vectors into those of the rows itself.
    # Otherwise a second kernel does so in fp32, before the only rounding.
    project_afterwards = problem.normalize and not chosen.projects
    out = f"d{name}"
    if project_afterwards:
        out = builder.add_buffer(f"unit_d{name}", rows.shape)
    # If offsets are broken, some rows belong to no sequence, and have no gradient. Only the kernels
    # for queries of all pairs write every row.
    if of_documents:
        may_have_unwritten_rows = problem.cu_documents is not None
    else:
        may_have_unwritten_rows = problem.cu_queries is not None and problem.pairing != "all"
    if may_have_unwritten_rows and project_afterwards:
        builder.add_torch_step(Tensor.zero_, [out], output=out)
    elif may_have_unwritten_rows:
        builder.fill(out, 0)
    if problem.index is not None:
        _add_pair_order(builder, of_documents)
    builder.add_launch(
        chosen.kernel,
        grid=chosen.grid,
        parameters={**chosen.config, "PROJECTS": chosen.projects},
        tensors={
            "order_ptr": f"{name}_order",
            "first_ptr": f"{name}_first",
            "ddoc_ptr": out,
            "dquery_ptr": out,
        },
    )
    if project_afterwards:
        builder.add_row_kernel(
            norms.unit_gradient_kernel,
            rows.size(0),
            {
                "rows_ptr": name,
                "scale_ptr": "document_factors" if of_documents else "query_factors",
                "grad_ptr": out,
                "out_ptr": f"d{name}",
            },
        )


def _add_pair_order(builder: MaxSimPlanBuilder, of_documents: bool) -> None:
    """Add the torch steps that sort listed pairs by document, or by query.

    Args:
        builder: the plan so far.
        of_documents: whether pairs are sorted by document; otherwise by query.
    """
    problem = builder.problem
    name = "documents" if of_documents else "queries"
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
