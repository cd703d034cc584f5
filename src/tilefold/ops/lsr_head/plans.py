"""Launch plans of the LSR head and its gradients, from the layouts of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import (
    Constants,
    Plan,
    PlanBuilder,
    Setting,
    cdiv,
    power_of_two,
)
from tilefold.ops._shared.tuning import lookup
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs
from tilefold.ops.lsr_head._slabs import (
    add_dhidden,
    product_in_fp32,
    rescale,
    unit_of_dlogits,
    write_slab,
)
from tilefold.ops.lsr_head._triton import (
    max_backward,
    one_token,
    pack,
    quantize,
    screen,
    sum_pooling,
)
from tilefold.ops.lsr_head._triton.max_forward import combine_kernel, max_forward_kernel

STORE_BLOCK_B = 4  # rows that an instance of the kernel that stores gradients takes
COMBINE_BLOCK = 1024  # columns that an instance of the combining kernel takes
# Counts up to which every program instance adds them up itself, which saves launches.
MAX_COUNTS_ADDED_IN_KERNEL = 8192
PARAMETER_TENSORS = {  # tensors by the names of kernels' parameters
    "rows_ptr": "hidden",
    "rows_src": "hidden",
    "rows_desc": "hidden",
    "mask_ptr": "attention_mask",
    "cu_ptr": "cu_seqlens",
    "winner_ptr": "winners",
    "out_ptr": "scores",
}


class HeadPlanBuilder(PlanBuilder):
    """Builder of a plan of the head, with the values that its kernels share.

    Args:
        tensors: layouts of the tensors, of a forward or a backward pass.
        options: the checked options.
        setting: facts about the device.

    Attributes:
        tokens: the token states and their division into sequences.
        quantized: whether the weight is a quantised one.
        dtype: dtype of the operands of products. With a quantised weight it is that of ``hidden``.
    """

    def __init__(
        self,
        tensors: HeadTensors | HeadSaved,
        options: HeadOptions,
        setting: Setting,
    ) -> None:
        """Collect the values that the kernels of the head share.

        Args:
            tensors: layouts of the tensors, of a forward or a backward pass.
            options: the checked options.
            setting: facts about the device.
        """
        self.tensors = tensors
        self.options = options
        self.setting = setting
        self.tokens = tensors.tokens
        self.quantized = isinstance(tensors, HeadTensors) and tensors.weight_scale is not None
        self.dtype = self.tokens.hidden.dtype if self.quantized else options.compute_dtype
        has_mask = tensors.attention_mask is not None
        is_packed = tensors.cu_seqlens is not None
        # Backward of one-token poolings reads winners, which exist where a mask selected the token.
        winners = tensors.winners if isinstance(tensors, HeadSaved) else None
        vocab, dim = tensors.weight.shape
        values = {
            "length": self.tokens.length,
            "uniform_length": self.tokens.length,
            "S": self.tokens.length,
            "B": self.tokens.batch,
            "V": vocab,
            "D": dim,
            "N": self.tokens.n_rows,
            "T": self.tokens.n_rows,
            "logit_scale": options.logit_scale,
            "ACTIVATION": options.activation,
            "NO_WINNER": no_winner(winner_dtype(self.tokens.length_bound)),
            "HAS_BIAS": tensors.bias is not None,
            "HAS_MASK": has_mask,
            "PACKED": is_packed,
            "MASKED": has_mask if winners is None else winners.size(0) > 0,
            "UNIFORM": not is_packed,
            "LAST": options.pooling == "last",
            "MEAN": options.pooling == "mean",
            "SCALED": self.dtype == torch.float16,
        }
        super().__init__(values, PARAMETER_TENSORS)


def forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Plan the forward pass: scores, and winners if backward may follow.

    Args:
        tensors: layouts of the tensors.
        options: the checked options.
        training: whether backward may follow.
        setting: facts about the device.
    """
    tokens = tensors.tokens
    builder = HeadPlanBuilder(tensors, options, setting)
    check_interpreted(setting, builder.dtype, options.out_dtype)
    if tokens.batch == 0 or (tokens.cu_seqlens is None and tokens.length == 0):
        return Plan(fills={"scores": 0, "winners": no_winner(winner_dtype(tokens.length_bound))})
    builder.make_contiguous({"hidden": tensors.hidden}, dtype=builder.dtype)
    builder.make_contiguous(
        {"weight": tensors.weight},
        dtype=None if builder.quantized else builder.dtype,
    )
    builder.make_contiguous(
        {
            "attention_mask": tensors.attention_mask,
            "cu_seqlens": tensors.cu_seqlens,
            "weight_scale": tensors.weight_scale,
            "bias": tensors.bias,
        },
    )
    PASSES[options.pooling].forward(builder, training)
    return builder.build()


def backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the backward pass: the gradients of hidden, weight and bias that are needed.

    Args:
        dscores: layout of the gradient of the scores, with any strides.
        saved: layouts of the saved tensors.
        options: the checked options.
        needs: which gradients are computed.
        setting: facts about the device.
    """
    needed = Needs(*needs)
    builder = HeadPlanBuilder(saved, options, setting)
    if saved.tokens.batch == 0 or saved.tokens.n_rows == 0:
        return Plan(fills={"dhidden": 0, "dweight": 0, "dbias": 0})
    stride_b, stride_v = dscores.stride()
    builder.set_parameters(stride_db=stride_b, stride_dv=stride_v)
    builder.set_parameters(NEED_WEIGHT=needed.weight)
    builder.set_parameters(NEED_BIAS=needed.bias)
    builder.make_contiguous(
        {
            "attention_mask": saved.attention_mask,
            "cu_seqlens": saved.cu_seqlens,
            "bias": saved.bias,
            "scores": saved.scores,
            "winners": saved.winners,
        },
    )
    computes_logits = options.pooling in ("sum", "mean")
    if needed.hidden or computes_logits:
        builder.make_contiguous({"weight": saved.weight}, dtype=builder.dtype)
    if needed.weight or needed.bias or computes_logits:
        builder.make_contiguous({"hidden": saved.hidden}, dtype=builder.dtype)
    PASSES[options.pooling].backward(builder, needed)
    return builder.build()


# ---- max pooling


def _max_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Plan the persistent kernel of max pooling, and the kernel that combines its splits.

    Rows are packed first, unless every sequence consists of whole groups of rows.
    """
    tensors = builder.tensors
    setting = builder.setting
    vocab, dim = tensors.weight.shape
    dtype = tensors.weight.dtype if builder.quantized else builder.dtype
    _check_warp_roles(dtype, setting)
    can_use_tma = setting.aligned and rows_fit_descriptor(tensors.weight.to(dtype))
    config = configs.max_forward(dtype, setting, can_use_tma)
    block_t = config["BLOCK_T"]
    builder.set_parameters(WITH_WINNERS=training)
    builder.set_parameters(GROUP=config["GROUP"])
    n_packed_rows = _pack(builder, config["GROUP"], training)
    if n_packed_rows is None:
        n_rows = builder.tokens.n_rows
        length = builder.tokens.length
    else:
        n_rows = n_packed_rows
        length = 0
    splits, multiple = configs.plan_splits(
        n_rows,
        vocab,
        length,
        config["BLOCK_V"],
        block_t,
        setting.multiprocessors,
    )
    builder.set_parameters(
        T=n_rows,
        uniform_length=length,
        splits=splits,
        multiple=multiple,
        UNIFORM=n_packed_rows is None,
        HAS_POSITIONS=n_packed_rows is not None and training,
        QUANTIZED=builder.quantized,
        BLOCK_T=block_t,
        HAS_SCALE=builder.options.logit_scale != 1.0,
    )
    if not training:
        builder.skip_result("winners")
    if builder.quantized:
        _quantize_rows(builder, n_rows, dim, block_t, dtype)

    # A sequence that is split over program instances has partial maxima.
    has_partial_maxima = splits > 1 and (not length or multiple * block_t % length != 0)
    part_size = 2 * splits * vocab if has_partial_maxima else 0
    builder.add_buffer("part", (part_size,))
    builder.add_buffer("part_winner", (part_size if training else 0,), torch.int32)
    _launch_max_forward(builder, config, n_rows, length, dtype)
    if has_partial_maxima:
        builder.add_launch(
            combine_kernel,
            grid=(builder.tokens.batch, cdiv(vocab, COMBINE_BLOCK)),
            parameters={"BLOCK": COMBINE_BLOCK},
        )


def _check_warp_roles(dtype: torch.dtype, setting: Setting) -> None:
    """Raise :class:`KernelUnavailableError` if Triton is too old for the kernel of Hopper GPUs.

    The pass is then planned again, with that kernel given up.
    """
    is_for_hopper = setting.capability == (9, 0) and dtype != torch.float32
    reason = releases.why_no_warp_roles()
    if is_for_hopper and reason is not None and configs.BY_ROLES not in setting.given_up:
        raise KernelUnavailableError(
            "max_forward_hopper_kernel",
            reason,
            configs.FALLBACKS[configs.BY_ROLES],
        )


def _quantize_rows(
    builder: HeadPlanBuilder,
    n_rows: int,
    dim: int,
    block_t: int,
    dtype: torch.dtype,
) -> None:
    """Plan the quantisation of token states, for products with a quantised weight.

    Args:
        builder: the plan so far.
        n_rows: rows of ``hidden``, packed if they have to be.
        dim: numbers of a row.
        block_t: rows of a tile of the kernel that reads them.
        dtype: dtype of the quantised weight.
    """
    n_scales = cdiv(n_rows, block_t) * block_t  # whole tiles, as the kernel reads them
    builder.add_buffer("row_scale", (n_scales,))
    builder.add_launch(
        quantize.quantize_rows_kernel,
        grid=(cdiv(n_scales, quantize.BLOCK_ROWS),),
        parameters={"N": n_scales, **quantize.row_constants(dim)},
    )
    builder.add_buffer("values", (n_rows, dim), dtype)
    builder.replace_tensor("hidden", by="values")


def _launch_max_forward(
    builder: HeadPlanBuilder,
    config: Constants,
    n_rows: int,
    length: int,
    dtype: torch.dtype,
) -> None:
    """Plan the launch of the persistent kernel, after a screen where that may save work.

    Args:
        builder: the plan so far.
        config: constants of the kernel, which this changes.
        n_rows: rows of ``hidden``, packed if they have to be.
        length: S if rows are not packed, else 0.
        dtype: dtype of the operands.
    """
    setting = builder.setting
    vocab, dim = builder.tensors.weight.shape
    kernel_name = configs.kernel_name(config)
    kernel: Any = max_forward_kernel
    weight_block = config["BLOCK_V"]
    make_descriptor: Callable[[int, int, torch.dtype], Callable[..., Any]] = _descriptor
    if config["WARP_ROLES"]:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # needs Gluon

        kernel = hopper.max_forward_hopper_kernel
        weight_block = hopper.HALF_V.value
        make_descriptor = hopper.hopper_descriptor
        config["STAGES"] = config.pop("num_stages")
    tma: dict[str, Tma] = {}
    if kernel_name != configs.PORTABLE:
        block_t = config["BLOCK_T"]
        block_k = config["BLOCK_K"]
        tma["weight"] = Tma(vocab, dim, make_descriptor(weight_block, block_k, dtype))
        tma["hidden"] = Tma(n_rows, dim, make_descriptor(block_t, block_k, dtype))
    is_interpreted = setting.capability == (0, 0)
    builder.set_parameters(SCREENED=False, sample_limit=0, limit=0)
    if config["WARP_ROLES"] and configs.may_screen(builder.options, setting, n_rows, vocab, dim):
        _screen(builder, n_rows, length)
    builder.add_launch(
        kernel,
        grid=(setting.multiprocessors,),
        parameters=config,
        tma=tma,
        fallback=None if is_interpreted else configs.FALLBACKS.get(kernel_name),
    )


def _screen(builder: HeadPlanBuilder, n_rows: int, length: int) -> None:
    """Plan the launches that compute only the scores which can be positive.

    The kernel after them computes all scores, and returns at once unless too many can be positive.

    Args:
        builder: the plan so far.
        n_rows: rows of ``hidden``, packed if they have to be.
        length: S if rows are not packed, else 0.
    """
    batch = builder.tokens.batch
    vocab, dim = builder.tensors.weight.shape
    n_programs = builder.setting.multiprocessors
    limits = lookup(configs.WHEN_SCREENED)
    # Samples of some sequences, in some blocks of the vocabulary, are counted first.
    n_sampled_sequences = min(batch, configs.SAMPLED)
    n_sampled_blocks = max(1, n_programs // n_sampled_sequences)
    n_samples = n_sampled_sequences * n_sampled_blocks
    n_sampled_scores = n_samples * configs.SAMPLE["BLOCK_V"]
    builder.set_parameters(
        SCREENED=True,
        limit=int(limits["MOST_KEPT"] * batch * vocab),
        BLOCK_D=power_of_two(dim),
        sample_limit=int(limits["MOST_SAMPLED"] * n_sampled_scores),
    )
    builder.add_buffer("rows8", (n_rows, dim), torch.int8)
    builder.add_buffer("weight8", (vocab, dim), torch.int8)
    builder.add_buffer("terms", (3, vocab))
    builder.add_buffer("list", (batch, vocab), torch.int32)
    builder.add_buffer(
        "state", (screen.STATE.value + screen.PER_SEQUENCE.value * batch,), torch.int32
    )
    builder.add_buffer("kept", (batch, vocab), torch.int8)
    builder.add_buffer("counts", (n_sampled_sequences, n_sampled_blocks), torch.int32)
    _add_rounding(builder, n_rows, n_sampled_sequences, n_sampled_blocks)
    _add_screening(builder, n_rows, length)


def _add_rounding(
    builder: HeadPlanBuilder,
    n_rows: int,
    n_sampled_sequences: int,
    n_sampled_blocks: int,
) -> None:
    """Add the launches that count positive scores in samples, and round both sides to int8.

    Args:
        builder: the plan so far.
        n_rows: rows of ``hidden``.
        n_sampled_sequences: sequences that are sampled.
        n_sampled_blocks: blocks of the vocabulary that are sampled for each sequence.
    """
    vocab = builder.tensors.weight.size(0)
    group = builder.parameters["GROUP"]
    n_groups = cdiv(n_rows, group)
    n_samples = n_sampled_sequences * n_sampled_blocks
    max_programs = builder.setting.multiprocessors * configs.ROUND["PROGRAMS"]
    builder.add_launch(
        screen.sample_kernel,
        grid=(n_sampled_sequences, n_sampled_blocks),
        parameters=configs.SAMPLE,
    )
    builder.add_launch(
        screen.largest_kernel,
        grid=(n_groups,),
        parameters={
            **configs.ROUND,
            "samples": n_samples,
            "BLOCK_SAMPLES": power_of_two(n_samples),
        },
    )
    builder.add_launch(
        screen.round_kernel,
        grid=(min(cdiv(vocab, group) + n_groups, max_programs),),
        parameters=configs.ROUND,
        tensors={"values_ptr": "rows8", "weight_values_ptr": "weight8"},
    )


def _add_screening(builder: HeadPlanBuilder, n_rows: int, length: int) -> None:
    """Add the launches that find, by int8 products, which scores can be positive, and compute them.

    Args:
        builder: the plan so far.
        n_rows: rows of ``hidden``.
        length: S if rows are not packed, else 0.
    """
    from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper
    from tilefold.ops.lsr_head._triton import screen_hopper

    batch = builder.tokens.batch
    vocab, dim = builder.tensors.weight.shape
    n_programs = builder.setting.multiprocessors
    block_t = configs.SCREEN["BLOCK_T"]
    block_k = configs.SCREEN["BLOCK_K"]
    half_v = hopper.HALF_V.value
    splits, multiple = configs.plan_splits(n_rows, vocab, length, 2 * half_v, block_t, n_programs)
    builder.add_launch(
        screen_hopper.screen_hopper_kernel,
        grid=(n_programs,),
        parameters={**configs.SCREEN, "splits": splits, "multiple": multiple},
        tensors={"weight_desc": "weight8", "rows_desc": "rows8"},
        tma={
            "weight8": Tma(vocab, dim, hopper.hopper_descriptor(half_v, block_k, torch.int8)),
            "rows8": Tma(n_rows, dim, hopper.hopper_descriptor(block_t, block_k, torch.int8)),
        },
        fallback=configs.FALLBACKS[configs.BY_SCREEN],
    )
    builder.add_launch(
        screen.list_kernel,
        grid=(batch, cdiv(vocab, screen.BLOCK_LIST)),
        parameters={"BLOCK": screen.BLOCK_LIST},
    )
    builder.add_launch(
        screen.refine_kernel,
        grid=(n_programs * configs.REFINE["PROGRAMS"],),
        parameters={**configs.REFINE, "BLOCK_B": min(1024, power_of_two(batch))},
    )


def _descriptor(rows: int, columns: int, dtype: torch.dtype) -> Callable[..., TensorDescriptor]:
    """Return a function that makes TMA descriptors with tiles ``[rows, columns]``."""
    return functools.partial(TensorDescriptor, block_shape=[rows, columns])


def _pack(builder: HeadPlanBuilder, group: int, training: bool) -> int | None:
    """Plan the packing of valid tokens, and the scores of empty sequences.

    The packed rows are ``rows``. The first ``offset[B]`` are used. Each sequence has whole
    groups of rows. With winners, ``position`` has the position of each row in its sequence.

    Args:
        builder: the plan so far, in which ``rows`` replaces ``hidden``.
        group: rows of a group.
        training: whether winners are needed.

    Returns:
        Number of rows that ``rows`` has memory for, or ``None`` if nothing needs to be packed.
    """
    tokens = builder.tokens
    mask = tokens.attention_mask
    batch = tokens.batch
    length = tokens.length
    if tokens.cu_seqlens is None and mask is None and length % group == 0:
        return None
    values = {
        "BLOCK_ROWS": pack.BLOCK_ROWS,
        "BLOCK_D": pack.BLOCK_D,
        "BLOCK_EMPTY": pack.BLOCK_EMPTY,
        "SCAN_B": 64,
    }
    kernel: Any
    if tokens.cu_seqlens is not None:
        n_rows = max(1, tokens.n_rows + batch * (group - 1))
        kernel = pack.copy_packed_kernel
        grid = (max(1, cdiv(tokens.n_rows, pack.BLOCK_ROWS)), 1)
    else:
        n_rows = batch * cdiv(length, group) * group
        kernel = pack.copy_padded_kernel
        grid = (batch, cdiv(length, pack.BLOCK_ROWS))
        # A small mask is read by every program instance. A large one is counted before.
        block_b = power_of_two(batch, 1)
        block_s = power_of_two(length)
        reads_mask = mask is not None and block_b * block_s <= pack.MAX_MASK
        if mask is not None and not reads_mask:
            builder.add_buffer("count", (batch,), torch.int32)
            builder.add_buffer("first", (batch,), torch.int32)
            builder.add_launch(pack.count_kernel, grid=(batch,), parameters={"SCAN": pack.SCAN})
        values["SCAN"] = pack.SCAN
        values["BLOCK_B"] = block_b if reads_mask else 0
        values["BLOCK_S"] = block_s if reads_mask else 0
    rows = builder.add_buffer("rows", (n_rows, tokens.hidden.size(-1)), builder.dtype)
    builder.add_buffer("offset", (batch + 1,), torch.int32)
    if training:
        builder.add_buffer("position", (n_rows,), torch.int32)
    builder.add_launch(kernel, grid=grid, parameters=values, tensors={"rows_ptr": rows})
    builder.replace_tensor("hidden", by=rows)
    return n_rows


def _max_backward(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Plan the gradients of max pooling.

    For ``dhidden``, the scores that each row of hidden won are listed, and multiplied with the
    weight. For ``dweight``, programs list the rows that each row of the weight won for themselves.
    """
    vocab = builder.tensors.weight.size(0)
    if vocab > max_backward.MAX_VOCAB:
        raise ValueError(
            f"weight must have at most {max_backward.MAX_VOCAB} rows for the Triton backward, got "
            f"{vocab}.",
        )
    builder.set_parameters(ALWAYS_ACTIVE=builder.options.activation in {"softplus", "none"})
    if needs.hidden:
        _max_dhidden(builder)
    if needs.weight or needs.bias:
        _max_dweight(builder, needs)


def _max_dhidden(builder: HeadPlanBuilder) -> None:
    """Plan the gradient of hidden states for max pooling.

    Three kernels work on tiles of rows: the first counts the scores that the rows won, the second
    lists them, and the third multiplies their gradients with rows of the weight. The first two
    split the vocabulary over program instances. Their counts are added up by the second kernel, or
    by torch if there are many.
    """
    dtype = builder.dtype
    tokens = builder.tokens
    vocab, dim = builder.tensors.weight.shape
    scan = configs.constants_of(configs.SCAN, dtype, builder.setting)
    product = configs.constants_of(configs.DHIDDEN, dtype, builder.setting)
    product["BLOCK_R"] = scan["BLOCK_R"]
    splits = cdiv(vocab, scan["SPLIT_V"])
    tiles = cdiv(tokens.n_rows, scan["BLOCK_R"])
    torch_adds_counts = tiles * splits > MAX_COUNTS_ADDED_IN_KERNEL
    builder.set_parameters(SPLITS=splits)
    builder.set_parameters(split_v=scan["SPLIT_V"])
    builder.set_parameters(ADDED_UP=torch_adds_counts)
    builder.add_launch(max_backward.count_kernel, grid=(tiles, splits), parameters=scan)
    if torch_adds_counts:
        builder.add_torch_step(lambda counts: counts.cumsum(0), ["count"], output="place")
    builder.add_launch(max_backward.list_kernel, grid=(tiles, splits), parameters=scan)
    builder.add_launch(
        max_backward.dhidden_kernel, grid=(tiles, cdiv(dim, product["BLOCK_D"])), parameters=product
    )
    builder.add_buffer("count", (tiles * splits,), torch.int32)
    builder.add_buffer("code", (tokens.batch * vocab,), torch.int32)
    grad_dtype = torch.float32 if dtype == torch.float16 else dtype
    builder.add_buffer("grad", (tokens.batch * vocab,), grad_dtype)


def _max_dweight(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Plan the gradients of weight and bias for max pooling, in one kernel.

    Each program instance computes tiles of the weight's gradient, one after another. It lists the
    winners of a tile in scratch memory of its own.
    """
    vocab, dim = builder.tensors.weight.shape
    setting = builder.setting
    config = configs.constants_of(
        configs.DWEIGHT,
        builder.dtype,
        setting,
        batch=builder.tokens.batch,
    )
    n_tiles = cdiv(vocab, config["BLOCK_V"])
    if needs.weight:
        n_tiles *= cdiv(dim, config["BLOCK_D"])
    n_programs = min(n_tiles, setting.multiprocessors * config["PROGRAMS"])
    n_entries = n_programs * config["BLOCK_B"] * config["BLOCK_V"]
    builder.add_buffer("code64", (n_entries,), torch.int64)
    gradients = builder.add_buffer("own_grad", (n_entries,), builder.dtype)
    builder.add_launch(
        max_backward.dweight_kernel,
        grid=(n_programs,),
        parameters={**config, "ACCUMULATE": "weight" in setting.accumulated},
        tensors={"grad_ptr": gradients},
    )


# ---- sums and means


def _sum_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Plan the scores of sum and mean pooling, which are NaN if ``cu_seqlens`` is invalid."""
    config = configs.constants_of(configs.SUM, builder.dtype, builder.setting)
    builder.skip_result("winners")
    if builder.tokens.cu_seqlens is not None:
        builder.add_buffer("ok", (1,), torch.int32)
        builder.add_launch(sum_pooling.check_offsets_kernel, grid=(1,))
    grid = builder.tokens.batch, cdiv(builder.parameters["V"], config["BLOCK_V"])
    builder.add_launch(sum_pooling.sum_forward_kernel, grid=grid, parameters=config)


def _sum_backward(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Plan the gradients of sum and mean pooling, from logits that are computed again.

    For few rows, the kernels of one-token pooling multiply the gradients of all logits. Torch's
    products of few rows are limited by the weight's gradient, which is stored in fp32 and then in
    its dtype, and by the CPU.
    """
    tokens = builder.tokens
    dtype = builder.dtype
    config = configs.constants_of(configs.SUM, dtype, builder.setting)
    has_equal_dtypes = tokens.hidden.dtype == builder.tensors.weight.dtype == dtype
    has_few_rows = tokens.n_rows <= config["FEW_ROWS"]
    if has_few_rows and has_equal_dtypes and dtype != torch.float16:
        _sum_backward_at_once(builder, needs, config)
    else:
        _sum_backward_by_slabs(builder, needs, config)


def _sum_backward_at_once(builder: HeadPlanBuilder, needs: Needs, config: Constants) -> None:
    """Plan the gradients of sum and mean pooling for few rows.

    One kernel computes the gradients of all logits. The kernels of one-token pooling then multiply
    them, as if each row were a sequence.
    """
    vocab = builder.tensors.weight.size(0)
    rows = _dlogits_buffers(builder, needs, vocab, n_sums=0)
    builder.set_parameters(stride_out=vocab)
    builder.set_parameters(scale=1.0)
    _launch_dlogits(builder, config, slice(0, vocab), copies_rows=rows == "clean", sums_bias=False)
    # Each row is a sequence of one token, and the slopes are in the gradients already.
    builder.set_parameters(
        B=builder.tokens.n_rows,
        length=1,
        stride_db=vocab,
        stride_dv=1,
        ACTIVATION="none",
        PACKED=False,
        MASKED=False,
        LAST=False,
        NO_WINNER=-1,
    )
    builder.replace_tensor("dscores", by="dlogits")
    builder.replace_tensor("scores", by="dlogits")
    builder.replace_tensor("hidden", by=rows)
    _row_gradients(builder, needs)


def _sum_backward_by_slabs(builder: HeadPlanBuilder, needs: Needs, config: Constants) -> None:
    """Plan the gradients of sum and mean pooling for many rows, one vocabulary slab at a time.

    A kernel computes the gradients of a slab's logits, and torch multiplies them.
    """
    tokens = builder.tokens
    vocab, dim = builder.tensors.weight.shape
    block_v = config["BLOCK_V"]
    slab_width = config["SLAB_ELEMENTS"] // max(tokens.n_rows, 1) // block_v * block_v
    # Rows of the buffer begin at multiples of 16 bytes for products of 16 bits, hence the 8.
    width = min(max(block_v, slab_width), cdiv(vocab, 8) * 8)
    rows = _dlogits_buffers(builder, needs, width, n_sums=tokens.batch if needs.bias else 0)
    if builder.dtype == torch.float16:
        _scale_dscores(builder, vocab)
    builder.set_parameters(stride_out=width)
    builder.set_parameters(scale=builder.options.logit_scale)
    if needs.weight:  # torch writes slabs of these
        builder.add_buffer("dweight", (vocab, dim), builder.tensors.weight.dtype)
    if needs.bias:
        builder.add_buffer("dbias", (vocab,), builder.options.bias_dtype or builder.dtype)
    for v_start in range(0, vocab, width):
        slab = slice(v_start, min(v_start + width, vocab))
        copies_rows = rows == "clean" and v_start == 0
        _launch_dlogits(builder, config, slab, copies_rows, sums_bias=needs.bias)
        _multiply_slab(builder, needs, slab, rows)
    if needs.hidden:
        hidden_shape = tuple(tokens.hidden.shape)
        hidden_dtype = tokens.hidden.dtype
        builder.add_torch_step(
            lambda drows, unit: rescale(drows, unit).to(hidden_dtype).view(hidden_shape),
            ["drows", "unit"],
            output="dhidden",
        )


def _dlogits_buffers(builder: HeadPlanBuilder, needs: Needs, width: int, n_sums: int) -> str:
    """Add the buffers that :func:`_launch_dlogits` writes.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        width: columns of a slab.
        n_sums: sequences whose gradients are summed for the bias.

    Returns:
        Name of the rows that the weight's gradient reads: with a mask, of a copy in which masked
        tokens are zero.
    """
    n_rows = builder.tokens.n_rows
    rows = "hidden"
    builder.add_buffer("dlogits", (n_rows, width), builder.dtype)
    if builder.tokens.attention_mask is not None and needs.weight:
        rows = builder.add_buffer("clean", (n_rows, builder.tensors.weight.size(1)), builder.dtype)
    builder.add_buffer("sum", (n_sums, width))
    return rows


def _launch_dlogits(
    builder: HeadPlanBuilder,
    config: Constants,
    slab: slice,
    copies_rows: bool,
    sums_bias: bool,
) -> None:
    """Plan the gradients of the logits of one vocabulary slab.

    Args:
        builder: the plan so far.
        config: constants of the kernel.
        slab: columns of the vocabulary.
        copies_rows: whether the rows are copied to ``clean``, with zeros for masked tokens.
        sums_bias: whether the gradients of each sequence are summed, for the bias.
    """
    builder.add_launch(
        sum_pooling.dlogits_kernel,
        grid=(builder.tokens.batch, cdiv(slab.stop - slab.start, config["BLOCK_V"])),
        parameters={
            **config,
            "v_start": slab.start,
            "v_end": slab.stop,
            "CLEAN": copies_rows,
            "NEED_BIAS": sums_bias,
        },
    )


def _scale_dscores(builder: HeadPlanBuilder, vocab: int) -> None:
    """Divide the gradients of the scores by a unit, so that fp16 holds the gradients of logits.

    Results are fp32 until they are multiplied by the unit. Sums, which are not yet divided by the
    sequence's length, would not fit into fp16 for a mean.
    """
    unit = functools.partial(
        unit_of_dlogits,
        mean=builder.options.pooling == "mean",
        length=builder.tokens.length,
        scale=builder.options.logit_scale,
    )
    builder.add_torch_step(
        lambda dscores: dscores.float().contiguous(),
        ["dscores"],
        output="dscores",
    )
    builder.add_torch_step(unit, ["dscores", "attention_mask", "cu_seqlens"], output="unit")
    builder.add_torch_step(torch.div, ["dscores", "unit"], output="dscores")
    builder.set_parameters(stride_db=vocab)
    builder.set_parameters(stride_dv=1)


def _multiply_slab(builder: HeadPlanBuilder, needs: Needs, slab: slice, rows: str) -> None:
    """Plan torch's products of the logits' gradients of one vocabulary slab.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        slab: columns of the vocabulary.
        rows: name of the rows of hidden, without masked tokens.
    """
    dim = builder.tensors.weight.size(1)
    if needs.hidden:
        builder.add_torch_step(
            functools.partial(add_dhidden, slab),
            ["drows", "dlogits", "weight"],
            output="drows",
        )
    if needs.weight:
        builder.add_torch_step(
            lambda dlogits, rows: product_in_fp32(dlogits.t(), rows.view(-1, dim)),
            ["dlogits", rows],
            output="product",
        )
        builder.add_torch_step(
            functools.partial(write_slab, slab),
            ["dweight", "product", "unit"],
            output="dweight",
        )
    if needs.bias:
        builder.add_torch_step(functools.partial(torch.sum, dim=0), ["sum"], output="total")
        builder.add_torch_step(
            functools.partial(write_slab, slab),
            ["dbias", "total", "unit"],
            output="dbias",
        )


# ---- one token per sequence


def _one_token_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Plan the scores of the first or the last valid tokens.

    Winners are the positions of these tokens. They are stored only if a mask determines them.
    """
    tokens = builder.tokens
    has_mask = builder.parameters["MASKED"]
    config = configs.constants_of(configs.ONE_TOKEN, builder.dtype, builder.setting)
    block_b = min(config["BLOCK_B"], power_of_two(tokens.batch))
    config["BLOCK_B"] = block_b
    # A small mask is searched by the product's kernel, a large one by a kernel before it.
    product_searches_mask = has_mask and block_b * tokens.length <= config["MAX_MASK"]
    if not (has_mask and training):
        builder.skip_result("winners")
    if has_mask and not product_searches_mask:
        if not training:  # winners that no backward reads are scratch
            dtype = winner_dtype(tokens.length_bound)
            builder.add_buffer("places", (tokens.batch, 1), dtype)
            builder.replace_tensor("winners", by="places")
        builder.add_launch(
            one_token.find_kernel, grid=(tokens.batch,), parameters={"BLOCK": config["FIND_BLOCK"]}
        )
    if not product_searches_mask:
        config["FIND"] = 0
    config["WITH_WINNERS"] = product_searches_mask and training
    grid = cdiv(builder.parameters["V"], config["BLOCK_V"]), cdiv(tokens.batch, block_b)
    builder.add_launch(one_token.forward_kernel, grid=grid, parameters=config)


def _row_gradients(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Plan the gradients of poolings of one token per sequence.

    The gradient of hidden sums over the vocabulary, which is split. A first kernel computes partial
    sums, and a second one adds them and writes 0 for the other tokens. A third one computes the
    gradients of weight and bias.
    """
    batch = builder.parameters["B"]
    vocab = builder.parameters["V"]
    dim = builder.parameters["D"]
    config = configs.constants_of(configs.ONE_TOKEN_GRADIENTS, builder.dtype, builder.setting)
    n_tiles_v = cdiv(vocab, config["BLOCK_V"])
    n_tiles_d = cdiv(dim, config["BLOCK_D"])
    n_tiles_b = cdiv(batch, config["BLOCK_B"])
    if needs.hidden:
        # The vocabulary is split, in whole tiles, to occupy all multiprocessors.
        n_programs = config["PROGRAMS"] * builder.setting.multiprocessors
        target_splits = min(n_tiles_v, cdiv(n_programs, n_tiles_d * n_tiles_b))
        split_v = cdiv(n_tiles_v, max(1, target_splits)) * config["BLOCK_V"]
        splits = cdiv(vocab, split_v)
        builder.add_buffer("part", (splits, batch, dim))
        builder.add_launch(
            one_token.split_gradient_kernel,
            grid=(n_tiles_d, splits, n_tiles_b),
            parameters={**config, "num_warps": config["HIDDEN_WARPS"], "split_v": split_v},
        )
        store_block_d = min(256, power_of_two(dim))
        builder.add_launch(
            one_token.store_rows_kernel,
            grid=(cdiv(batch, STORE_BLOCK_B), cdiv(dim, store_block_d)),
            parameters={"BLOCK_B": STORE_BLOCK_B, "BLOCK_D": store_block_d, "splits": splits},
        )
    if needs.weight or needs.bias:
        builder.add_launch(
            one_token.weight_gradient_kernel,
            grid=(n_tiles_v * n_tiles_d if needs.weight else n_tiles_v,),
            parameters={**config, "num_warps": config["WEIGHT_WARPS"]},
        )


class Passes(NamedTuple):
    """Functions that plan the forward and the backward pass of a pooling."""

    forward: Callable[[HeadPlanBuilder, bool], None]
    backward: Callable[[HeadPlanBuilder, Needs], None]


PASSES = {
    "max": Passes(_max_forward, _max_backward),
    "sum": Passes(_sum_forward, _sum_backward),
    "mean": Passes(_sum_forward, _sum_backward),
    "cls": Passes(_one_token_forward, _row_gradients),
    "last": Passes(_one_token_forward, _row_gradients),
}
