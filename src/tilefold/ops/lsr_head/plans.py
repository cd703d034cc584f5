"""Launch plans of the LSR head and its gradients, from the layouts of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import check_interpreter_dtypes
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
# Tensors of kernel parameters that do not have the names of their tensors.
PARAMETER_TENSORS = {
    "rows_ptr": "hidden",
    "rows_src": "hidden",
    "rows_desc": "hidden",
    "mask_ptr": "attention_mask",
    "cu_ptr": "cu_seqlens",
    "winner_ptr": "winners",
    "out_ptr": "scores",
}


class HeadPlanBuilder(PlanBuilder):
    """Builder of a plan of the head, with the parameters that its kernels share.

    Args:
        tensors: layouts of the tensors of a forward or a backward pass.
        options: the checked options.
        setting: the device and its precision settings.

    Attributes:
        tokens: the token states and their division into sequences.
        quantized: whether the weight is quantised.
        dtype: dtype of the operands of products. With a quantised weight it is the dtype of
            ``hidden``, which is quantised later.
    """

    def __init__(
        self,
        tensors: HeadTensors | HeadSaved,
        options: HeadOptions,
        setting: Setting,
    ) -> None:
        """Set the parameters that the kernels of the head share.

        Args:
            tensors: layouts of the tensors of a forward or a backward pass.
            options: the checked options.
            setting: the device and its precision settings.
        """
        self.tensors = tensors
        self.options = options
        self.setting = setting
        self.tokens = tensors.tokens
        self.quantized = isinstance(tensors, HeadTensors) and tensors.weight_scale is not None
        self.dtype = self.tokens.hidden.dtype if self.quantized else options.compute_dtype
        self.vocab, self.dim = tensors.weight.shape
        has_mask = tensors.attention_mask is not None
        is_packed = tensors.cu_seqlens is not None
        # Backward of one-token poolings reads the positions of the tokens from the winners, which
        # are saved only if a mask determined them.
        winners = tensors.winners if isinstance(tensors, HeadSaved) else None
        self.mask_selects_tokens = has_mask if winners is None else winners.size(0) > 0
        parameters = {
            "length": self.tokens.length,
            "uniform_length": self.tokens.length,
            "S": self.tokens.length,
            "B": self.tokens.batch,
            "V": self.vocab,
            "D": self.dim,
            "N": self.tokens.n_rows,
            "T": self.tokens.n_rows,
            "logit_scale": options.logit_scale,
            "ACTIVATION": options.activation,
            "NO_WINNER": no_winner(winner_dtype(self.tokens.length_bound)),
            "HAS_BIAS": tensors.bias is not None,
            "HAS_MASK": has_mask,
            "PACKED": is_packed,
            "MASKED": self.mask_selects_tokens,
            "UNIFORM": not is_packed,
            "LAST": options.pooling == "last",
            "MEAN": options.pooling == "mean",
            "SCALED": self.dtype == torch.float16,
        }
        super().__init__(parameters, PARAMETER_TENSORS)


def forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Record the plan of the forward pass: the scores, and the winners if backward may follow.

    A plan lists buffers and kernel launches as data. A winner is the token with the largest logit.

    Args:
        tensors: shapes, strides and dtypes of the tensors, on the meta device.
        options: the checked options.
        training: whether backward may follow.
        setting: the device and its precision settings.
    """
    tokens = tensors.tokens
    builder = HeadPlanBuilder(tensors, options, setting)
    check_interpreter_dtypes(setting, builder.dtype, options.out_dtype)
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
    PASSES[options.pooling].add_forward(builder, training)
    return builder.build()


def backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Record the plan of the backward pass: the gradients of hidden, weight and bias.

    Args:
        dscores: layout of the gradient of the scores, with any strides.
        saved: the saved tensors, without values, on the meta device.
        options: the checked options.
        needs: whether the gradients of hidden, weight and bias are needed.
        setting: the device and its precision settings.
    """
    if saved.tokens.batch == 0 or saved.tokens.n_rows == 0:
        return Plan(fills={"dhidden": 0, "dweight": 0, "dbias": 0})
    needed = Needs(*needs)
    stride_b, stride_v = dscores.stride()
    builder = HeadPlanBuilder(saved, options, setting)
    builder.set_parameters(
        stride_db=stride_b,
        stride_dv=stride_v,
        NEED_WEIGHT=needed.weight,
        NEED_BIAS=needed.bias,
    )
    builder.make_contiguous(
        {
            "attention_mask": saved.attention_mask,
            "cu_seqlens": saved.cu_seqlens,
            "bias": saved.bias,
            "scores": saved.scores,
            "winners": saved.winners,
        },
    )
    # Sums save no logits: hidden and weight are multiplied again to get the activation's slopes.
    recomputes_logits = options.pooling in ("sum", "mean")
    if needed.hidden or recomputes_logits:
        builder.make_contiguous({"weight": saved.weight}, dtype=builder.dtype)
    if needed.weight or needed.bias or recomputes_logits:
        builder.make_contiguous({"hidden": saved.hidden}, dtype=builder.dtype)
    PASSES[options.pooling].add_backward(builder, needed)
    return builder.build()


# ---- max pooling: scores


class _Rows(NamedTuple):
    """Token states as the kernels of max pooling read them, under the name ``hidden``.

    Attributes:
        n_rows: number of rows, of which packed ones may be unused.
        uniform_length: rows of every sequence, or 0 if the rows are packed.
    """

    n_rows: int
    uniform_length: int

    @property
    def are_packed(self) -> bool:
        """Whether the rows are a packed copy of the valid tokens."""
        return self.uniform_length == 0


def _add_max_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Add the kernels that compute the scores and the winners of max pooling.

    Valid tokens are packed first if necessary, so that every sequence begins at a multiple of
    ``GROUP`` rows. A persistent kernel then computes the scores. If it splits sequences over
    program instances, each instance writes maxima of its part, and a last kernel combines them.

    Args:
        builder: the plan so far.
        training: whether winners, the tokens with the largest logits, are needed.
    """
    setting = builder.setting
    vocab = builder.vocab
    weight = builder.tensors.weight
    dtype = weight.dtype if builder.quantized else builder.dtype
    _check_hopper_kernel(dtype, setting)
    can_use_tma = setting.aligned and rows_fit_descriptor(weight.to(dtype))
    config = configs.max_forward(dtype, setting, can_use_tma)
    block_t = config["BLOCK_T"]
    builder.set_parameters(WITH_WINNERS=training, GROUP=config["GROUP"])
    if not training:
        builder.skip_result("winners")
        # kernels do not read it, but would be compiled for each value
        builder.set_parameters(NO_WINNER=no_winner(torch.int32))
    rows = _add_packing(builder, config["GROUP"], training)
    work = configs.ForwardWork(
        n_rows=rows.n_rows,
        uniform_length=rows.uniform_length,
        vocab=vocab,
        dim=builder.dim,
        dtype=dtype,
        block_v=config["BLOCK_V"],
        block_t=block_t,
    )
    splits = configs.plan_splits(work, setting)
    builder.set_parameters(
        T=rows.n_rows,
        uniform_length=rows.uniform_length,
        splits=splits.number,
        multiple=splits.multiple,
        UNIFORM=not rows.are_packed,
        HAS_POSITIONS=rows.are_packed and training,
        QUANTIZED=builder.quantized,
        BLOCK_T=block_t,
        HAS_SCALE=builder.options.logit_scale != 1.0,
    )
    if builder.quantized:
        _add_row_quantization(builder, rows.n_rows, tile_rows=block_t, dtype=dtype)

    # The size of a split is a multiple of these rows: of a sequence's rows, if it has whole tiles.
    split_rows = splits.multiple * block_t
    splits_end_at_sequences = not rows.are_packed and split_rows % rows.uniform_length == 0
    has_partial_maxima = splits.number > 1 and not splits_end_at_sequences
    part_size = 2 * splits.number * vocab if has_partial_maxima else 0
    builder.add_buffer("part", (part_size,))
    builder.add_buffer("part_winner", (part_size if training else 0,), torch.int32)
    _add_max_kernel(builder, config, rows, dtype)
    if has_partial_maxima:
        builder.add_launch(
            combine_kernel,
            grid=(builder.tokens.batch, cdiv(vocab, COMBINE_BLOCK)),
            parameters={"BLOCK": COMBINE_BLOCK},
        )


def _check_hopper_kernel(dtype: torch.dtype, setting: Setting) -> None:
    """Raise an error if the kernel for Hopper GPUs should run, but this Triton cannot build it.

    The operator catches the error, warns once, and records the plan again without this kernel.

    Args:
        dtype: dtype of the products.
        setting: facts about the device.

    Raises:
        KernelUnavailableError: if Triton lacks warp specialisation.
    """
    is_for_hopper = setting.capability == (9, 0) and dtype != torch.float32
    reason = releases.why_no_warp_roles()
    if is_for_hopper and reason is not None and configs.BY_ROLES not in setting.failed_kernels:
        raise KernelUnavailableError(
            "max_forward_hopper_kernel",
            reason,
            configs.FALLBACKS[configs.BY_ROLES],
        )


def _add_row_quantization(
    builder: HeadPlanBuilder,
    n_rows: int,
    tile_rows: int,
    dtype: torch.dtype,
) -> None:
    """Add the kernel that quantises token states, for products with a quantised weight.

    Later kernels read the quantised states in place of ``hidden``.

    Args:
        builder: the plan so far.
        n_rows: number of token states, packed or not.
        tile_rows: rows of a tile of the kernel that reads them.
        dtype: dtype of the quantised weight.
    """
    n_scales = cdiv(n_rows, tile_rows) * tile_rows  # whole tiles, as the kernel reads them
    constants = quantize.row_constants(builder.dim)
    builder.add_buffer("values", (n_rows, builder.dim), dtype)
    builder.add_buffer("row_scale", (n_scales,))
    builder.add_launch(
        quantize.quantize_rows_kernel,
        grid=(cdiv(n_scales, constants["BLOCK_ROWS"]),),
        parameters={"N": n_scales, **constants},
    )
    builder.replace_tensor("hidden", by="values")


def _add_max_kernel(
    builder: HeadPlanBuilder,
    config: Constants,
    rows: _Rows,
    dtype: torch.dtype,
) -> None:
    """Add the launch of the persistent kernel of max pooling, after a screen if that may save work.

    A screen is a product of int8 that excludes the scores which cannot be positive.

    Args:
        builder: the plan so far.
        config: constants of the kernel, from :func:`configs.max_forward`.
        rows: the token states.
        dtype: dtype of the operands.
    """
    setting = builder.setting
    builder.set_parameters(SCREENED=False, sample_limit=0, limit=0)
    kernel: Any = max_forward_kernel
    weight_block = config["BLOCK_V"]
    make_descriptor: Callable[[int, int, torch.dtype], Callable[..., Any]] = _descriptor_maker
    constants = dict(config)
    if config["WARP_ROLES"]:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # needs Gluon

        kernel = hopper.max_forward_hopper_kernel
        weight_block = hopper.HALF_V.value
        make_descriptor = hopper.hopper_descriptor
        constants["STAGES"] = constants.pop("num_stages")
        if configs.may_screen(
            builder.options,
            setting,
            rows.n_rows,
            builder.vocab,
            builder.dim,
        ):
            _add_screen(builder, rows)
    kernel_name = configs.kernel_name(config)
    tma: dict[str, Tma] = {}
    if kernel_name != configs.PORTABLE:
        block_k = config["BLOCK_K"]
        tma["weight"] = Tma(
            builder.vocab,
            builder.dim,
            make_descriptor(weight_block, block_k, dtype),
        )
        tma["hidden"] = Tma(
            rows.n_rows,
            builder.dim,
            make_descriptor(config["BLOCK_T"], block_k, dtype),
        )
    builder.add_launch(
        kernel,
        grid=(setting.multiprocessors,),
        parameters=constants,
        tma=tma,
        fallback=None if setting.is_interpreted else configs.FALLBACKS.get(kernel_name),
    )


def _descriptor_maker(
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Callable[..., TensorDescriptor]:
    """Return a function that makes TMA descriptors with tiles ``[rows, columns]``."""
    return functools.partial(TensorDescriptor, block_shape=[rows, columns])


# ---- max pooling: the screen


def _add_screen(builder: HeadPlanBuilder, rows: _Rows) -> None:
    """Add the screen: kernels that compute only the scores that can be positive.

    1. Exact logits of a sample estimate how many scores can be positive.
    2. Token states and weight are rounded to int8.
    3. An int8 product bounds every logit from above, which marks the scores that can be positive.
    4. The marked scores are listed, and all others are set to 0.
    5. The listed scores are computed exactly.

    If too many scores can be positive, in the sample or after step 3, the rest of the screen does
    nothing, and the persistent kernel after it computes all scores. Otherwise that kernel does
    nothing. The GPU decides this, so that the CPU does not wait.

    Args:
        builder: the plan so far.
        rows: the token states.
    """
    batch = builder.tokens.batch
    vocab = builder.vocab
    dim = builder.dim
    limits = lookup(configs.WHEN_SCREENED)
    n_sampled_sequences = min(batch, configs.SAMPLED)
    n_sampled_blocks = max(1, builder.setting.multiprocessors // n_sampled_sequences)
    n_sampled_scores = n_sampled_sequences * n_sampled_blocks * configs.SAMPLE["BLOCK_V"]
    builder.set_parameters(
        SCREENED=True,
        limit=int(limits["MOST_KEPT"] * batch * vocab),
        sample_limit=int(limits["MOST_SAMPLED"] * n_sampled_scores),
        BLOCK_D=power_of_two(dim),
    )
    # counters, and the largest entry, norm, error and number of listed scores of each sequence
    builder.add_buffer(
        "state",
        (screen.STATE.value + screen.PER_SEQUENCE.value * batch,),
        torch.int32,
    )
    # number of scores in each block of the sample that can be positive
    builder.add_buffer("counts", (n_sampled_sequences, n_sampled_blocks), torch.int32)
    builder.add_buffer("rows8", (rows.n_rows, dim), torch.int8)  # rounded token states
    builder.add_buffer("weight8", (vocab, dim), torch.int8)  # rounded weight
    builder.add_buffer("terms", (3, vocab))  # scale, norm and error of each row of the weight
    builder.add_buffer("marks", (batch, vocab), torch.int8)  # marks of scores that can be positive
    builder.add_buffer("list", (batch, vocab), torch.int32)  # columns of these scores
    _add_sample(builder, rows, n_sampled_sequences, n_sampled_blocks)
    _add_rounding(builder, rows)
    _add_int8_product(builder, rows)
    _add_listed_scores(builder)


def _add_sample(
    builder: HeadPlanBuilder,
    rows: _Rows,
    n_sampled_sequences: int,
    n_sampled_blocks: int,
) -> None:
    """Add the kernels that count how many scores of a sample can be positive.

    The kernel that adds up the counts also finds the largest entry of each sequence, which
    determines the scale when the sequence is rounded to int8.

    Args:
        builder: the plan so far.
        rows: the token states.
        n_sampled_sequences: sequences that are sampled.
        n_sampled_blocks: blocks of the vocabulary that are sampled for each sequence.
    """
    n_samples = n_sampled_sequences * n_sampled_blocks
    rows_at_a_time = configs.rounded_rows(builder.dim, builder.parameters["GROUP"])
    builder.add_launch(
        screen.sample_kernel,
        grid=(n_sampled_sequences, n_sampled_blocks),
        parameters=configs.SAMPLE,
    )
    builder.add_launch(
        screen.largest_kernel,
        grid=(cdiv(rows.n_rows, rows_at_a_time),),
        parameters={
            "num_warps": configs.ROUND["num_warps"],
            "GROUP": rows_at_a_time,
            "samples": n_samples,
            "BLOCK_SAMPLES": power_of_two(n_samples),
        },
    )


def _add_rounding(builder: HeadPlanBuilder, rows: _Rows) -> None:
    """Add the kernel that rounds weight and token states to int8, some rows at a time."""
    rows_at_a_time = configs.rounded_rows(builder.dim, builder.parameters["GROUP"])
    n_groups = cdiv(builder.vocab, rows_at_a_time) + cdiv(rows.n_rows, rows_at_a_time)
    max_programs = builder.setting.multiprocessors * configs.ROUND["PROGRAMS"]
    builder.add_launch(
        screen.round_kernel,
        grid=(min(n_groups, max_programs),),
        parameters={"num_warps": configs.ROUND["num_warps"], "GROUP": rows_at_a_time},
        tensors={"values_ptr": "rows8", "weight_values_ptr": "weight8"},
    )


def _add_int8_product(builder: HeadPlanBuilder, rows: _Rows) -> None:
    """Add the kernel that marks the scores that can be positive, by a product of int8.

    Args:
        builder: the plan so far.
        rows: the packed token states.
    """
    from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper
    from tilefold.ops.lsr_head._triton import screen_hopper

    vocab = builder.vocab
    dim = builder.dim
    n_programs = builder.setting.multiprocessors
    constants = lookup(configs.SCREEN, dim=dim)
    block_t = constants["BLOCK_T"]
    block_k = constants["BLOCK_K"]
    half_v = hopper.HALF_V.value  # a tile has two halves, one for each group of computing warps
    work = configs.ForwardWork(
        n_rows=rows.n_rows,
        uniform_length=rows.uniform_length,
        vocab=vocab,
        dim=dim,
        dtype=torch.int8,
        block_v=2 * half_v,
        block_t=block_t,
    )
    splits = configs.plan_splits(work, builder.setting)
    builder.add_launch(
        screen_hopper.screen_hopper_kernel,
        grid=(n_programs,),
        parameters={
            **constants,
            "splits": splits.number,
            "multiple": splits.multiple,
        },
        tensors={"weight_desc": "weight8", "rows_desc": "rows8"},
        tma={
            "weight8": Tma(vocab, dim, hopper.hopper_descriptor(half_v, block_k, torch.int8)),
            "rows8": Tma(rows.n_rows, dim, hopper.hopper_descriptor(block_t, block_k, torch.int8)),
        },
        fallback=configs.FALLBACKS[configs.BY_SCREEN],
    )


def _add_listed_scores(builder: HeadPlanBuilder) -> None:
    """Add the kernels that list the marked scores of each sequence, and compute them exactly."""
    batch = builder.tokens.batch
    # Two values, for few and for many sequences, so that few variants of the kernel are compiled.
    sequences_at_a_time = 64 if batch <= 64 else 1024
    builder.add_launch(
        screen.list_kernel,
        grid=(batch, cdiv(builder.vocab, screen.BLOCK_LIST)),
        parameters={"BLOCK": screen.BLOCK_LIST},
    )
    builder.add_launch(
        screen.refine_kernel,
        grid=(builder.setting.multiprocessors * configs.REFINE["PROGRAMS"],),
        parameters={**configs.REFINE, "BLOCK_B": sequences_at_a_time},
    )


# ---- max pooling: packing


def _add_packing(builder: HeadPlanBuilder, group: int, training: bool) -> _Rows:
    """Add the kernels that pack valid tokens, unless there is no mask and ``group`` divides S.

    Later kernels read the packed rows in place of ``hidden``. In them each sequence begins at a
    multiple of ``group`` rows. The kernels also write the scores of empty sequences.

    Args:
        builder: the plan so far.
        group: number of rows at whose multiples sequences must begin.
        training: whether backward needs the tokens with the largest logits. The position of each
            packed row in its sequence is then stored, too.
    """
    tokens = builder.tokens
    is_padded = tokens.cu_seqlens is None
    if is_padded and tokens.attention_mask is None and tokens.length % group == 0:
        return _Rows(tokens.n_rows, tokens.length)
    if is_padded:
        n_rows = tokens.batch * cdiv(tokens.length, group) * group
    else:
        n_rows = max(1, tokens.n_rows + tokens.batch * (group - 1))
    builder.add_buffer("rows", (n_rows, builder.dim), builder.dtype)
    builder.add_buffer("offset", (tokens.batch + 1,), torch.int32)  # first rows of the sequences
    if training:
        builder.add_buffer("position", (n_rows,), torch.int32)  # of each row in its sequence
    builder.set_parameters(
        BLOCK_ROWS=pack.BLOCK_ROWS,
        BLOCK_D=pack.BLOCK_D,
        BLOCK_EMPTY=pack.BLOCK_EMPTY,
    )
    if is_padded:
        _add_packing_of_padded_rows(builder)
    else:
        builder.add_launch(
            pack.copy_packed_kernel,
            grid=(max(1, cdiv(tokens.n_rows, pack.BLOCK_ROWS)),),
            parameters={"SCAN_B": 64},
            tensors={"rows_ptr": "rows"},
        )
    builder.replace_tensor("hidden", by="rows")
    return _Rows(n_rows, uniform_length=0)


def _add_packing_of_padded_rows(builder: HeadPlanBuilder) -> None:
    """Add the kernel that copies the valid tokens of padded sequences to ``rows``.

    If the mask is small, each program instance counts all of its tokens itself, which is cheaper
    than a launch. For a large mask, another kernel counts them first.

    Args:
        builder: the plan so far.
    """
    tokens = builder.tokens
    has_mask = tokens.attention_mask is not None
    block_b = power_of_two(tokens.batch, 1)
    block_s = power_of_two(tokens.length)
    mask_is_small = block_b * block_s <= pack.MAX_MASK
    reads_mask = has_mask and mask_is_small
    if has_mask and not mask_is_small:
        builder.add_buffer("count", (tokens.batch,), torch.int32)  # valid tokens of a sequence
        builder.add_buffer("first", (tokens.batch,), torch.int32)  # position of the first one
        builder.add_launch(
            pack.count_kernel,
            grid=(tokens.batch,),
            parameters={"SCAN": pack.SCAN},
        )
    builder.add_launch(
        pack.copy_padded_kernel,
        grid=(tokens.batch, cdiv(tokens.length, pack.BLOCK_ROWS)),
        parameters={
            "SCAN": pack.SCAN,
            "BLOCK_B": block_b if reads_mask else 0,
            "BLOCK_S": block_s if reads_mask else 0,
        },
        tensors={"rows_ptr": "rows"},
    )


# ---- max pooling: gradients


def _add_max_backward(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Add the kernels that compute the gradients of max pooling.

    A score passes its gradient on only to its winner, the token whose logit is the maximum.

    Args:
        builder: the plan so far.
        needs: which gradients are needed.
    """
    if builder.vocab > max_backward.MAX_VOCAB:
        raise ValueError(
            f"weight must have at most {max_backward.MAX_VOCAB} rows for the Triton backward, got "
            f"{builder.vocab}.",
        )
    # These activations have a slope at every score. With the others, a score of 0 has none.
    always_active = builder.options.activation in {"softplus", "none"}
    builder.set_parameters(ALWAYS_ACTIVE=always_active)
    if needs.hidden:
        _add_max_dhidden(builder)
    if needs.weight or needs.bias:
        _add_max_dweight(builder, needs)


def _add_max_dhidden(builder: HeadPlanBuilder) -> None:
    """Add the kernels that compute the gradient of the token states for max pooling.

    Three kernels work on tiles of token states. The first counts the scores whose largest logit is
    that of a token in the tile. The second lists these scores. The third multiplies their gradients
    with their rows of the weight. The first two kernels split the vocabulary over program
    instances. An instance lists scores after those of all instances before it, so counts are added
    up: in the second kernel, or by torch if there are many.
    """
    dtype = builder.dtype
    tokens = builder.tokens
    scan = configs.constants_of(configs.SCAN, dtype, builder.setting)
    product = configs.constants_of(configs.DHIDDEN, dtype, builder.setting)
    product["BLOCK_R"] = scan["BLOCK_R"]
    n_splits = cdiv(builder.vocab, scan["SPLIT_V"])
    n_tiles = cdiv(tokens.n_rows, scan["BLOCK_R"])
    torch_adds_counts = n_tiles * n_splits > MAX_COUNTS_ADDED_IN_KERNEL
    builder.set_parameters(
        SPLITS=n_splits,
        split_v=scan["SPLIT_V"],
        HAS_PREFIX_SUMS=torch_adds_counts,
    )
    max_listed = tokens.batch * builder.vocab
    builder.add_buffer("count", (n_tiles * n_splits,), torch.int32)
    builder.add_buffer("code", (max_listed,), torch.int32)  # column, and row in the tile
    grad_dtype = torch.float32 if dtype == torch.float16 else dtype
    builder.add_buffer("grad", (max_listed,), grad_dtype)  # gradients of the listed scores
    builder.add_launch(max_backward.count_kernel, grid=(n_tiles, n_splits), parameters=scan)
    if torch_adds_counts:
        builder.add_torch_step(lambda count: count.cumsum(0), ["count"], output="prefix_sum")
    builder.add_launch(max_backward.list_kernel, grid=(n_tiles, n_splits), parameters=scan)
    builder.add_launch(
        max_backward.dhidden_kernel,
        grid=(n_tiles, cdiv(builder.dim, product["BLOCK_D"])),
        parameters=product,
    )


def _add_max_dweight(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Add the kernel that computes the gradients of weight and bias for max pooling.

    Each program instance computes tiles of the weight's gradient, one after another. It lists the
    winners of a tile, the tokens with the largest logits, in scratch memory that no other instance
    uses.

    Args:
        builder: the plan so far.
        needs: which gradients are needed.
    """
    config = configs.constants_of(
        configs.DWEIGHT,
        builder.dtype,
        builder.setting,
        batch=builder.tokens.batch,
    )
    n_tiles = cdiv(builder.vocab, config["BLOCK_V"])
    if needs.weight:  # tiles of the bias alone have no second dimension
        n_tiles *= cdiv(builder.dim, config["BLOCK_D"])
    n_programs = min(n_tiles, builder.setting.multiprocessors * config["PROGRAMS"])
    max_listed = n_programs * config["BLOCK_B"] * config["BLOCK_V"]
    builder.add_buffer("code64", (max_listed,), torch.int64)  # column and row of a listed winner
    builder.add_buffer("own_grad", (max_listed,), builder.dtype)  # its gradient
    builder.add_launch(
        max_backward.dweight_kernel,
        grid=(n_programs,),
        parameters={**config, "ACCUMULATE": "weight" in builder.setting.accumulated},
        tensors={"grad_ptr": "own_grad"},
    )


# ---- sums and means


def _add_sum_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Add the kernel that computes the scores of sum and mean pooling.

    The scores are NaN if ``cu_seqlens`` is invalid, which another kernel checks before.

    Args:
        builder: the plan so far.
        training: whether a backward pass may follow.
    """
    config = configs.constants_of(configs.SUM, builder.dtype, builder.setting)
    builder.skip_result("winners")
    if builder.tokens.cu_seqlens is not None:
        builder.add_buffer("valid", (1,), torch.int32)
        builder.add_launch(sum_pooling.check_offsets_kernel, grid=(1,))
    builder.add_launch(
        sum_pooling.sum_forward_kernel,
        grid=(builder.tokens.batch, cdiv(builder.vocab, config["BLOCK_V"])),
        parameters=config,
    )


def _add_sum_backward(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Add the kernels that compute the gradients of sum and mean pooling.

    A kernel computes the logits again, and the gradients of the logits from them. These are then
    multiplied with hidden and with the weight: by kernels for few rows, otherwise by torch. For few
    rows, torch would spend most of the time on launches, and on a copy of the weight's gradient in
    fp32. In fp16, torch always multiplies: the gradients must be scaled, which kernels do not do.
    """
    dtype = builder.dtype
    hidden = builder.tokens.hidden
    config = configs.constants_of(configs.SUM, dtype, builder.setting)
    has_equal_dtypes = hidden.dtype == builder.tensors.weight.dtype == dtype
    has_few_rows = builder.tokens.n_rows <= config["FEW_ROWS"]
    if has_few_rows and has_equal_dtypes and dtype != torch.float16:
        _add_sum_backward_at_once(builder, needs, config)
    else:
        _add_sum_backward_by_slabs(builder, needs, config)


def _add_sum_backward_at_once(builder: HeadPlanBuilder, needs: Needs, config: Constants) -> None:
    """Add the gradients of sum and mean pooling for few rows, by kernels only.

    One kernel computes the gradients of all logits. The kernels of one-token pooling then multiply
    them, as if each row were a sequence of one token, and as if its logits were the scores.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        config: constants of the kernel that computes the gradients of the logits.
    """
    vocab = builder.vocab
    masked_rows = _add_dlogits_buffers(builder, needs, width=vocab)
    builder.add_buffer("sum", (0, vocab))  # unused, since a later kernel sums for the bias
    builder.set_parameters(stride_out=vocab, scale=1.0)
    _add_dlogits(
        builder,
        config,
        columns=slice(0, vocab),
        writes_masked_rows=masked_rows == "clean",
        sums_for_bias=False,
    )
    builder.set_parameters(
        B=builder.tokens.n_rows,
        length=1,
        stride_db=vocab,
        stride_dv=1,
        ACTIVATION="none",  # the slopes are in the gradients already
        PACKED=False,
        MASKED=False,
        LAST=False,
        NO_WINNER=-1,
    )
    _add_row_gradients(
        builder,
        needs,
        n_sequences=builder.tokens.n_rows,
        tensors={"dscores_ptr": "dlogits", "scores_ptr": "dlogits", "rows_ptr": masked_rows},
    )


def _add_sum_backward_by_slabs(builder: HeadPlanBuilder, needs: Needs, config: Constants) -> None:
    """Add the gradients of sum and mean pooling for many rows, one vocabulary slab at a time.

    For each slab, a kernel computes the gradients of the logits, and torch multiplies them with the
    weight and with hidden.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        config: constants of the kernel that computes the gradients of the logits.
    """
    tokens = builder.tokens
    vocab = builder.vocab
    width = _slab_width(config, tokens.n_rows, vocab)
    masked_rows = _add_dlogits_buffers(builder, needs, width)
    # sums of the gradients over the tokens of each sequence, for the bias
    builder.add_buffer("sum", (tokens.batch if needs.bias else 0, width))
    if builder.dtype == torch.float16:
        _add_scaling_of_dscores(builder)
    builder.set_parameters(stride_out=width, scale=builder.options.logit_scale)
    # Torch steps write the slabs of these results in place.
    if needs.weight:
        builder.add_buffer("dweight", (vocab, builder.dim), builder.tensors.weight.dtype)
    if needs.bias:
        builder.add_buffer("dbias", (vocab,), builder.options.bias_dtype or builder.dtype)
    for start in range(0, vocab, width):
        slab = slice(start, min(start + width, vocab))
        _add_dlogits(
            builder,
            config,
            columns=slab,
            writes_masked_rows=masked_rows == "clean" and start == 0,
            sums_for_bias=needs.bias,
        )
        _add_slab_products(builder, needs, slab, masked_rows)
    if needs.hidden:
        hidden_shape = tuple(tokens.hidden.shape)
        hidden_dtype = tokens.hidden.dtype
        builder.add_torch_step(
            lambda drows, unit: rescale(drows, unit).to(hidden_dtype).view(hidden_shape),
            ["drows", "unit"],
            output="dhidden",
        )


def _slab_width(config: Constants, n_rows: int, vocab: int) -> int:
    """Return how many vocabulary columns are processed at a time, to bound the memory.

    Args:
        config: configuration of the kernels.
        n_rows: number of rows of hidden.
        vocab: number of columns.
    """
    block_v: int = config["BLOCK_V"]
    bounded_width: int = config["SLAB_ELEMENTS"] // max(n_rows, 1) // block_v * block_v
    # Products in 16 bits need rows that begin at multiples of 16 bytes, hence of 8 columns.
    aligned_vocab = cdiv(vocab, 8) * 8
    return min(max(block_v, bounded_width), aligned_vocab)


def _add_dlogits_buffers(builder: HeadPlanBuilder, needs: Needs, width: int) -> str:
    """Add the buffers of the gradients of logits, and of token states without masked tokens.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        width: columns of the gradients.

    Returns:
        Name of the token states that the weight's gradient reads: ``"clean"``, a copy in which
        masked tokens are zero, or ``"hidden"`` if no copy is needed.
    """
    n_rows = builder.tokens.n_rows
    builder.add_buffer("dlogits", (n_rows, width), builder.dtype)
    if builder.tokens.attention_mask is None or not needs.weight:
        return "hidden"
    return builder.add_buffer("clean", (n_rows, builder.dim), builder.dtype)


def _add_dlogits(
    builder: HeadPlanBuilder,
    config: Constants,
    columns: slice,
    writes_masked_rows: bool,
    sums_for_bias: bool,
) -> None:
    """Add the kernel that computes the gradients of the logits of some vocabulary columns.

    Args:
        builder: the plan so far.
        config: constants of the kernel.
        columns: the columns.
        writes_masked_rows: whether the kernel also copies hidden to the buffer ``clean``, with
            zeros for masked tokens.
        sums_for_bias: whether the kernel also sums the gradients of each sequence.
    """
    builder.add_launch(
        sum_pooling.dlogits_kernel,
        grid=(builder.tokens.batch, cdiv(columns.stop - columns.start, config["BLOCK_V"])),
        parameters={
            **config,
            "v_start": columns.start,
            "v_end": columns.stop,
            "CLEAN": writes_masked_rows,
            "NEED_BIAS": sums_for_bias,
        },
    )


def _add_scaling_of_dscores(builder: HeadPlanBuilder) -> None:
    """Divide the gradients of the scores by a unit, so that fp16 holds the gradients of logits.

    The unit is a power of two. Later steps multiply the fp32 results by it. Without it, gradients
    of sums could overflow.
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
    builder.set_parameters(stride_db=builder.vocab, stride_dv=1)


def _add_slab_products(
    builder: HeadPlanBuilder,
    needs: Needs,
    slab: slice,
    masked_rows: str,
) -> None:
    """Add torch's part of the gradients of one vocabulary slab: products, and their storage.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        slab: columns of the vocabulary.
        masked_rows: name of the token states in which masked tokens are zero.
    """
    dim = builder.dim
    if needs.hidden:  # "drows" is the fp32 gradient of the token states, a sum over the slabs
        builder.add_torch_step(
            functools.partial(add_dhidden, slab),
            ["drows", "dlogits", "weight"],
            output="drows",
        )
    if needs.weight:
        builder.add_torch_step(
            lambda dlogits, rows: product_in_fp32(dlogits.t(), rows.view(-1, dim)),
            ["dlogits", masked_rows],
            output="slab_dweight",
        )
        builder.add_torch_step(
            functools.partial(write_slab, slab),
            ["dweight", "slab_dweight", "unit"],
            output="dweight",
        )
    if needs.bias:
        builder.add_torch_step(functools.partial(torch.sum, dim=0), ["sum"], output="slab_dbias")
        builder.add_torch_step(
            functools.partial(write_slab, slab),
            ["dbias", "slab_dbias", "unit"],
            output="dbias",
        )


# ---- one token per sequence


def _add_one_token_forward(builder: HeadPlanBuilder, training: bool) -> None:
    """Add the kernels that pool the first or the last valid token of each sequence.

    ``winners`` holds the positions of these tokens if a mask determines them. The kernel of the
    scores searches a small mask itself. For a large mask, a kernel before it finds the positions.

    Args:
        builder: the plan so far.
        training: whether backward may follow, which reads the positions.
    """
    tokens = builder.tokens
    has_mask = builder.mask_selects_tokens
    config = configs.constants_of(configs.ONE_TOKEN, builder.dtype, builder.setting)
    block_b = min(config["BLOCK_B"], power_of_two(tokens.batch))
    mask_is_small = block_b * tokens.length <= config["MAX_MASK"]
    searches_mask = has_mask and mask_is_small
    if not (has_mask and training):
        builder.skip_result("winners")
    positions = "winners"
    if has_mask and not mask_is_small:
        if not training:
            dtype = winner_dtype(tokens.length_bound)
            positions = builder.add_buffer("positions", (tokens.batch, 1), dtype)
        builder.add_launch(
            one_token.find_kernel,
            grid=(tokens.batch,),
            parameters={"BLOCK": config["FIND_BLOCK"]},
            tensors={"winner_ptr": positions},
        )
    builder.add_launch(
        one_token.forward_kernel,
        grid=(cdiv(builder.vocab, config["BLOCK_V"]), cdiv(tokens.batch, block_b)),
        parameters={
            **config,
            "BLOCK_B": block_b,
            "FIND": config["FIND"] if searches_mask else 0,
            "WITH_WINNERS": searches_mask and training,
        },
        tensors={"winner_ptr": positions},
    )


def _add_one_token_backward(builder: HeadPlanBuilder, needs: Needs) -> None:
    """Add the kernels that compute the gradients of poolings of one token per sequence."""
    _add_row_gradients(builder, needs, n_sequences=builder.tokens.batch)


def _add_row_gradients(
    builder: HeadPlanBuilder,
    needs: Needs,
    n_sequences: int,
    tensors: Mapping[str, str] = {},
) -> None:
    """Add the gradients of products of one row of hidden per sequence with the weight.

    Args:
        builder: the plan so far.
        needs: which gradients are computed.
        n_sequences: number of sequences.
        tensors: names of tensors by the names of the kernels' parameters, if they are not those of
            the pass.
    """
    config = configs.constants_of(configs.ONE_TOKEN_GRADIENTS, builder.dtype, builder.setting)
    n_tiles_v = cdiv(builder.vocab, config["BLOCK_V"])
    n_tiles_d = cdiv(builder.dim, config["BLOCK_D"])
    if needs.hidden:
        n_tiles_b = cdiv(n_sequences, config["BLOCK_B"])
        _add_split_dhidden(builder, config, n_sequences, (n_tiles_v, n_tiles_d, n_tiles_b), tensors)
    if needs.weight or needs.bias:
        builder.add_launch(
            one_token.weight_gradient_kernel,
            grid=(n_tiles_v * n_tiles_d if needs.weight else n_tiles_v,),
            parameters={**config, "num_warps": config["WEIGHT_WARPS"]},
            tensors=tensors,
        )


def _add_split_dhidden(
    builder: HeadPlanBuilder,
    config: Constants,
    n_sequences: int,
    n_tiles: tuple[int, int, int],
    tensors: Mapping[str, str],
) -> None:
    """Add the two kernels that compute the gradient of one row of hidden per sequence.

    The gradient is a sum over the vocabulary, which is split to occupy all multiprocessors. The
    first kernel computes the sum of each split, and fills ``dhidden`` with zeros. The second adds
    up the splits, and stores the rows.

    Args:
        builder: the plan so far.
        config: constants of the first kernel.
        n_sequences: number of sequences.
        n_tiles: numbers of tiles of the vocabulary, of D, and of the sequences.
        tensors: names of tensors by the names of the kernels' parameters, if they are not those of
            the pass.
    """
    n_tiles_v, n_tiles_d, n_tiles_b = n_tiles
    n_programs = config["PROGRAMS"] * builder.setting.multiprocessors
    target_splits = min(n_tiles_v, cdiv(n_programs, n_tiles_d * n_tiles_b))
    tiles_per_split = cdiv(n_tiles_v, max(1, target_splits))
    split_columns = tiles_per_split * config["BLOCK_V"]
    n_splits = cdiv(builder.vocab, split_columns)
    builder.add_buffer("part", (n_splits, n_sequences, builder.dim))
    builder.add_launch(
        one_token.split_gradient_kernel,
        grid=(n_tiles_d, n_splits, n_tiles_b),
        parameters={**config, "num_warps": config["HIDDEN_WARPS"], "split_v": split_columns},
        tensors=tensors,
    )
    store_block_d = min(256, power_of_two(builder.dim))
    builder.add_launch(
        one_token.store_rows_kernel,
        grid=(cdiv(n_sequences, STORE_BLOCK_B), cdiv(builder.dim, store_block_d)),
        parameters={"BLOCK_B": STORE_BLOCK_B, "BLOCK_D": store_block_d, "splits": n_splits},
        tensors=tensors,
    )


class Passes(NamedTuple):
    """Functions that add the launches of a pooling's forward and backward pass to a plan."""

    add_forward: Callable[[HeadPlanBuilder, bool], None]
    add_backward: Callable[[HeadPlanBuilder, Needs], None]


PASSES = {
    "max": Passes(_add_max_forward, _add_max_backward),
    "sum": Passes(_add_sum_forward, _add_sum_backward),
    "mean": Passes(_add_sum_forward, _add_sum_backward),
    "cls": Passes(_add_one_token_forward, _add_one_token_backward),
    "last": Passes(_add_one_token_forward, _add_one_token_backward),
}
