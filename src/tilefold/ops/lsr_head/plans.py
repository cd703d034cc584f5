"""Launch plans of the LSR head and its gradients, for tensors of these layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import rows_fit_descriptor
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.plan import Plan, Setting, Steps, cdiv, contiguous, power_of_two
from tilefold.ops._shared.tuning import lookup
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs
from tilefold.ops.lsr_head._slabs import add_rows, fill, times, unit_of_dlogits, wide_product
from tilefold.ops.lsr_head._triton import (
    max_backward,
    one_token,
    pack,
    quantize,
    screen,
    sum_pooling,
)
from tilefold.ops.lsr_head._triton.max_forward import combine_kernel, max_forward_kernel

COMBINE_BLOCK = 1024
MAX_ADDED = 8192  # counts that every program adds up itself: more launches take the host longer
PLACES = {  # of tensors, by their kernels' names
    "rows_ptr": "hidden",
    "rows_src": "hidden",
    "rows_desc": "hidden",
    "mask_ptr": "attention_mask",
    "cu_ptr": "cu_seqlens",
    "winner_ptr": "winners",
    "out_ptr": "scores",
}


class HeadSteps(Steps):
    """The steps of a plan in the making."""

    def __init__(
        self,
        tensors: HeadTensors | HeadSaved,
        options: HeadOptions,
        setting: Setting,
    ) -> None:
        self.tensors, self.options, self.setting, self.tokens = (
            tensors,
            options,
            setting,
            tensors.tokens,
        )
        self.quantized = isinstance(tensors, HeadTensors) and tensors.weight_scale is not None
        # of the rows: products of quantised ones take that of the weight
        self.dtype = self.tokens.hidden.dtype if self.quantized else options.compute_dtype
        masked, packed = tensors.attention_mask is not None, tensors.cu_seqlens is not None
        winners = getattr(
            tensors,
            "winners",
            None,
        )  # where a mask hid all tokens but one, its place; else nothing
        values = dict.fromkeys(("length", "uniform_length", "S"), self.tokens.length) | {
            "B": self.tokens.batch,
            "V": tensors.weight.size(0),
            "D": tensors.weight.size(1),
            "N": self.tokens.n_rows,
            "T": self.tokens.n_rows,
            "logit_scale": options.logit_scale,
            "ACTIVATION": options.activation,
            "NO_WINNER": no_winner(winner_dtype(self.tokens.length_bound)),
            "HAS_BIAS": tensors.bias is not None,
            "HAS_MASK": masked,
            "PACKED": packed,
            "MASKED": masked if winners is None else winners.size(0) > 0,
            "UNIFORM": not packed,
            "LAST": options.pooling == "last",
            "MEAN": options.pooling == "mean",
            "SCALED": self.dtype == torch.float16,
        }
        super().__init__(values, PLACES)


def forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Scores, and winners where a gradient may be asked for."""
    tokens, steps = tensors.tokens, HeadSteps(tensors, options, setting)
    check_interpreted(setting, steps.dtype, options.out_dtype)
    if tokens.batch == 0 or (tokens.cu_seqlens is None and tokens.length == 0):
        return Plan(fills={"scores": 0, "winners": no_winner(winner_dtype(tokens.length_bound))})
    steps.steps += contiguous(steps.dtype, hidden=tensors.hidden)
    steps.steps += contiguous(None if steps.quantized else steps.dtype, weight=tensors.weight)
    steps.steps += contiguous(**(tensors._asdict() | {"hidden": None, "weight": None}))
    POOLINGS[options.pooling][0](steps, training)
    return steps.plan()


def backward(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Gradients of hidden, weight and bias, where they are needed."""
    wanted, steps, sums = (
        Needs(*needs),
        HeadSteps(saved, options, setting),
        options.pooling in ("sum", "mean"),
    )
    if saved.tokens.batch == 0 or saved.tokens.n_rows == 0:
        return Plan(fills={"dhidden": 0, "dweight": 0, "dbias": 0})
    steps.values["stride_db"], steps.values["stride_dv"] = dscores.stride()
    steps.values |= {"NEED_WEIGHT": wanted.weight, "NEED_BIAS": wanted.bias}
    steps.steps += contiguous(**(saved._asdict() | {"hidden": None, "weight": None}))
    if wanted.hidden or sums:
        steps.steps += contiguous(steps.dtype, weight=saved.weight)
    if wanted.weight or wanted.bias or sums:
        steps.steps += contiguous(steps.dtype, hidden=saved.hidden)
    POOLINGS[options.pooling][1](steps, wanted)
    return steps.plan()


# ---- max pooling


def _max_forward(steps: HeadSteps, training: bool) -> None:
    """The persistent kernel, of packed rows where sequences are no whole groups of rows, and what
    finishes its cuts.
    """
    tensors, setting, (vocab, dim) = steps.tensors, steps.setting, steps.tensors.weight.shape
    dtype = tensors.weight.dtype if steps.quantized else steps.dtype
    on_hopper, why = (
        setting.capability == (9, 0) and dtype != torch.float32,
        releases.why_no_warp_roles(),
    )
    if on_hopper and why is not None and configs.BY_ROLES not in setting.given_up:
        raise KernelUnavailableError(
            "max_forward_hopper_kernel",
            why,
            configs.INSTEAD[configs.BY_ROLES],
        )
    config = configs.max_forward(
        dtype,
        setting,
        setting.aligned and rows_fit_descriptor(tensors.weight.to(dtype)),
    )
    block_t, block_k = config["BLOCK_T"], config["BLOCK_K"]
    steps.values |= {"WITH_WINNERS": training, "GROUP": config["GROUP"]}
    packed, length = _pack(steps, config["GROUP"], training), steps.tokens.length
    total, length = (steps.tokens.n_rows, length) if packed is None else (packed, 0)
    splits, multiple = configs.plan_splits(
        total,
        vocab,
        length,
        config["BLOCK_V"],
        block_t,
        setting.multiprocessors,
    )
    steps.values |= {
        "T": total,
        "uniform_length": length,
        "splits": splits,
        "multiple": multiple,
        "UNIFORM": packed is None,
        "HAS_POSITIONS": packed is not None and training,
        "QUANTIZED": steps.quantized,
        "BLOCK_T": block_t,
        "HAS_SCALE": steps.options.logit_scale != 1.0,
    }
    if not training:
        steps.buffers["winners"] = None
    if steps.quantized:
        scales = cdiv(total, block_t) * block_t  # whole tiles, as the kernel reads them
        steps.buffer("row_scale", (scales,))
        own = {"N": scales, **quantize.row_constants(dim)}
        steps.launch(quantize.quantize_rows_kernel, (cdiv(scales, quantize.BLOCK_ROWS),), own)
        steps.renamed["hidden"] = steps.buffer("values", (total, dim), dtype)
    # without a cut nothing is partial
    cuts = splits > 1 and (not length or multiple * block_t % length != 0)
    parts = (2 * splits * vocab if cuts else 0,)
    steps.buffer("part", parts)
    steps.buffer("part_winner", parts if training else (0,), torch.int32)
    name, kernel, block_v, make = (
        configs.kernel_name(config),
        max_forward_kernel,
        config["BLOCK_V"],
        _descriptor,
    )
    if config["WARP_ROLES"]:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # needs Gluon

        kernel, block_v, make = (
            hopper.max_forward_hopper_kernel,
            hopper.HALF_V.value,
            hopper.hopper_descriptor,
        )
        config["STAGES"] = config.pop("num_stages")
    described = {
        "weight": (vocab, block_v),
        steps.renamed.get("hidden", "hidden"): (total, block_t),
    }
    tma = (
        {}
        if name == configs.PORTABLE
        else {
            given: Tma(rows, dim, make(block, block_k, dtype))
            for given, (rows, block) in described.items()
        }
    )
    instead = None if setting.capability == (0, 0) else configs.INSTEAD.get(name)
    steps.values |= {"SCREENED": False, "sample_limit": 0, "limit": 0}
    if config["WARP_ROLES"] and configs.may_screen(steps.options, setting, total, vocab, dim):
        _screen(steps, total, length)
    steps.launch(kernel, (setting.multiprocessors,), config, tma=tma, fallback=instead)
    if cuts:
        steps.launch(
            combine_kernel,
            (steps.tokens.batch, cdiv(vocab, COMBINE_BLOCK)),
            {"BLOCK": COMBINE_BLOCK},
        )


def _screen(steps: HeadSteps, total: int, length: int) -> None:
    """Launches that leave out scores which cannot be positive; the kernel after them runs where too
    many can.
    """
    from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper
    from tilefold.ops.lsr_head._triton import screen_hopper

    batch, (vocab, dim), group = (
        steps.tokens.batch,
        steps.tensors.weight.shape,
        steps.values["GROUP"],
    )
    block_v, block_t, block_k = (
        2 * hopper.HALF_V.value,
        configs.SCREEN["BLOCK_T"],
        configs.SCREEN["BLOCK_K"],
    )
    programs, sampled = steps.setting.multiprocessors, min(batch, configs.SAMPLED)
    sample, groups, when = (
        (sampled, max(1, programs // sampled)),
        cdiv(total, group),
        lookup(configs.WHEN_SCREENED),
    )
    steps.values |= {
        "SCREENED": True,
        "limit": int(when["MOST_KEPT"] * batch * vocab),
        "BLOCK_D": power_of_two(dim),
        "sample_limit": int(
            when["MOST_SAMPLED"] * sample[0] * sample[1] * configs.SAMPLE["BLOCK_V"],
        ),
    }
    steps.buffer("rows8", (total, dim), torch.int8)
    steps.buffer("weight8", (vocab, dim), torch.int8)
    steps.buffer("terms", (3, vocab))
    steps.buffer("list", (batch, vocab), torch.int32)
    steps.buffer("state", (screen.STATE.value + screen.PER_SEQUENCE.value * batch,), torch.int32)
    steps.buffer("kept", (batch, vocab), torch.int8)
    steps.buffer("counts", sample, torch.int32)
    steps.launch(screen.sample_kernel, sample, configs.SAMPLE)
    own = {"samples": sample[0] * sample[1], "BLOCK_SAMPLES": power_of_two(sample[0] * sample[1])}
    steps.launch(screen.largest_kernel, (groups,), configs.ROUND | own)
    named = {"values_ptr": "rows8", "weight_values_ptr": "weight8"}
    grid = (min(cdiv(vocab, group) + groups, programs * configs.ROUND["PROGRAMS"]),)
    steps.launch(screen.round_kernel, grid, configs.ROUND, named)
    tma = {
        name: Tma(rows, dim, hopper.hopper_descriptor(block, block_k, torch.int8))
        for name, rows, block in (
            ("weight8", vocab, hopper.HALF_V.value),
            ("rows8", total, block_t),
        )
    }
    splits, multiple = configs.plan_splits(total, vocab, length, block_v, block_t, programs)
    own = {**configs.SCREEN, "splits": splits, "multiple": multiple}
    places = {"weight_desc": "weight8", "rows_desc": "rows8"}
    instead = configs.INSTEAD[configs.BY_SCREEN]
    steps.launch(screen_hopper.screen_hopper_kernel, (programs,), own, places, tma, instead)
    steps.launch(
        screen.list_kernel,
        (batch, cdiv(vocab, screen.BLOCK_LIST)),
        {"BLOCK": screen.BLOCK_LIST},
    )
    own = dict(configs.REFINE) | {"BLOCK_B": min(1024, power_of_two(batch))}
    steps.launch(screen.refine_kernel, (programs * own.pop("PROGRAMS"),), own)


def _descriptor(rows: int, columns: int, dtype: torch.dtype) -> Callable[..., TensorDescriptor]:
    return functools.partial(TensorDescriptor, block_shape=[rows, columns])


def _pack(steps: HeadSteps, group: int, training: bool) -> int | None:
    """Pack the valid tokens, score empty sequences, and return the room for rows; ``None`` if all
    are whole groups.

    Of ``rows`` the first ``offset[B]`` are meant; ``position`` is theirs in their sequences, where
    winners are kept.
    """
    tokens, mask, batch, length = (
        steps.tokens,
        steps.tokens.attention_mask,
        steps.tokens.batch,
        steps.tokens.length,
    )
    if tokens.cu_seqlens is None and mask is None and length % group == 0:
        return None
    own = {
        "BLOCK_ROWS": pack.BLOCK_ROWS,
        "BLOCK_D": pack.BLOCK_D,
        "BLOCK_EMPTY": pack.BLOCK_EMPTY,
        "SCAN_B": 64,
    }
    total = max(1, tokens.n_rows + batch * (group - 1))
    kernel, grid = pack.copy_packed_kernel, (max(1, cdiv(tokens.n_rows, pack.BLOCK_ROWS)), 1)
    if tokens.cu_seqlens is None:
        total = batch * cdiv(length, group) * group
        kernel, grid = pack.copy_padded_kernel, (batch, cdiv(length, pack.BLOCK_ROWS))
        blocks = power_of_two(batch, 1), power_of_two(length)
        if mask is None or blocks[0] * blocks[1] > pack.MAX_MASK:
            blocks = 0, 0
        if mask is not None and blocks[0] == 0:
            for name in ("count", "first"):
                steps.buffer(name, (batch,), torch.int32)
            steps.launch(pack.count_kernel, (batch,), {"SCAN": pack.SCAN})
        own |= {"SCAN": pack.SCAN, "BLOCK_B": blocks[0], "BLOCK_S": blocks[1]}
    rows = steps.buffer("rows", (total, tokens.hidden.size(-1)), steps.dtype)
    steps.buffer("offset", (batch + 1,), torch.int32)
    if training:
        steps.buffer("position", (total,), torch.int32)
    steps.launch(kernel, grid, own, {"rows_ptr": rows})
    steps.renamed["hidden"] = rows
    return total


def _max_backward(steps: HeadSteps, needs: Needs) -> None:
    """Lists of what the rows of hidden won, and their products with the weight; what the rows of
    the weight won.
    """
    dtype, setting, tokens, (vocab, dim) = (
        steps.dtype,
        steps.setting,
        steps.tokens,
        steps.tensors.weight.shape,
    )
    if vocab > max_backward.MAX_VOCAB:
        raise ValueError(
            f"weight must have at most {max_backward.MAX_VOCAB} rows for the Triton backward, got {vocab}.",
        )
    steps.values["ALWAYS_ACTIVE"] = steps.options.activation in {"softplus", "none"}
    if needs.hidden:
        scan = configs.constants_of(configs.SCAN, dtype, setting)
        product = configs.constants_of(configs.DHIDDEN, dtype, setting) | {
            "BLOCK_R": scan["BLOCK_R"],
        }
        splits, tiles = cdiv(vocab, scan["SPLIT_V"]), cdiv(tokens.n_rows, scan["BLOCK_R"])
        added_up = tiles * splits > MAX_ADDED  # by torch
        steps.values |= {"SPLITS": splits, "split_v": scan["SPLIT_V"], "ADDED_UP": added_up}
        steps.launch(max_backward.count_kernel, (tiles, splits), scan)
        if added_up:
            steps.torch("place", lambda counts: counts.cumsum(0), "count")
        steps.launch(max_backward.list_kernel, (tiles, splits), scan)
        steps.launch(max_backward.dhidden_kernel, (tiles, cdiv(dim, product["BLOCK_D"])), product)
        steps.buffer("count", (tiles * splits,), torch.int32)
        steps.buffer("code", (tokens.batch * vocab,), torch.int32)
        steps.buffer(
            "grad",
            (tokens.batch * vocab,),
            torch.float32 if dtype == torch.float16 else dtype,
        )
    if needs.weight or needs.bias:
        config = configs.constants_of(configs.DWEIGHT, dtype, setting, batch=tokens.batch)
        items = cdiv(vocab, config["BLOCK_V"]) * (
            cdiv(dim, config["BLOCK_D"]) if needs.weight else 1
        )
        programs = min(items, setting.multiprocessors * config["PROGRAMS"])
        entries = (
            programs * config["BLOCK_B"] * config["BLOCK_V"],
        )  # its programs list entries of their own
        steps.buffer("code64", entries, torch.int64)
        own = config | {"ACCUMULATE": "weight" in setting.accumulated}
        named = {"grad_ptr": steps.buffer("own_grad", entries, dtype)}
        steps.launch(max_backward.dweight_kernel, (programs,), own, named)


# ---- sums and means


def _sum_forward(steps: HeadSteps, training: bool) -> None:
    """Scores; NaN where ``cu_seqlens`` is broken."""
    config = configs.constants_of(configs.SUM, steps.dtype, steps.setting)
    steps.buffers["winners"] = None
    if steps.tokens.cu_seqlens is not None:
        steps.buffer("ok", (1,), torch.int32)
        steps.launch(sum_pooling.check_offsets_kernel, (1,))
    grid = steps.tokens.batch, cdiv(steps.values["V"], config["BLOCK_V"])
    steps.launch(sum_pooling.sum_forward_kernel, grid, config)


def _sum_backward(steps: HeadSteps, needs: Needs) -> None:
    """A slab of the vocabulary at a time: its logits are computed again, and their gradients
    multiplied by torch.

    Of few rows, the kernels of one token per sequence multiply those of all logits: a library's
    products of few rows are bound by the weight's gradient, stored in fp32 and then in its dtype,
    and the host.
    """
    tokens, options, dtype, (vocab, dim) = (
        steps.tokens,
        steps.options,
        steps.dtype,
        steps.tensors.weight.shape,
    )
    batch, n_rows, given = (
        tokens.batch,
        tokens.n_rows,
        (tokens.hidden.dtype, steps.tensors.weight.dtype),
    )
    config = configs.constants_of(configs.SUM, dtype, steps.setting)
    scaled, block_v = dtype == torch.float16, config["BLOCK_V"]
    few = n_rows <= config["FEW_ROWS"] and not scaled and given == (dtype, dtype)
    slab = max(block_v, config["SLAB_ELEMENTS"] // max(n_rows, 1) // block_v * block_v)
    width = vocab if few else min(slab, cdiv(vocab, 8) * 8)
    steps.buffer("dlogits", (n_rows, width), dtype)
    clean = (
        tokens.attention_mask is not None and needs.weight
    )  # a copy of rows without what is masked
    if clean:
        steps.buffer("clean", (n_rows, dim), dtype)
    steps.buffer(
        "sum",
        (batch if needs.bias and not few else 0, width),
    )  # of each sequence's dlogits
    if scaled:
        # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
        # in fp16 those of a mean, not yet divided by the length, would not fit
        unit = functools.partial(
            unit_of_dlogits,
            mean=options.pooling == "mean",
            length=tokens.length,
            scale=options.logit_scale,
        )
        steps.torch("dscores", lambda dscores: dscores.float().contiguous(), "dscores")
        steps.torch("unit", unit, "dscores attention_mask cu_seqlens")
        steps.torch("dscores", torch.div, "dscores unit")
        steps.values |= {"stride_db": vocab, "stride_dv": 1}
    steps.values |= {"stride_out": width, "scale": 1.0 if few else options.logit_scale}
    rows, shape = "clean" if clean else "hidden", tuple(tokens.hidden.shape)
    if needs.weight and not few:  # torch fills slabs of these
        steps.buffer("dweight", (vocab, dim), given[1])
    if needs.bias and not few:
        steps.buffer("dbias", (vocab,), options.bias_dtype or dtype)
    for v0 in range(0, vocab, width):
        slab = slice(v0, min(v0 + width, vocab))
        own = config | {"v_start": v0, "v_end": slab.stop, "CLEAN": clean and v0 == 0}
        grid = batch, cdiv(slab.stop - v0, block_v)
        steps.launch(sum_pooling.dlogits_kernel, grid, own | {"NEED_BIAS": needs.bias and not few})
        if few:
            # each row stands for a sequence, and slopes are in the gradients already
            steps.values |= {
                "B": n_rows,
                "length": 1,
                "stride_db": vocab,
                "stride_dv": 1,
                "ACTIVATION": "none",
            }
            steps.values |= {"PACKED": False, "MASKED": False, "LAST": False, "NO_WINNER": -1}
            steps.renamed |= {"dscores": "dlogits", "scores": "dlogits", "hidden": rows}
            _row_gradients(steps, needs)
            return
        if needs.hidden:
            steps.torch("drows", functools.partial(add_rows, slab), "drows dlogits weight")
        if needs.weight:
            steps.torch(
                "product",
                lambda dlogits, rows: wide_product(dlogits.t(), rows.view(-1, dim)),
                f"dlogits {rows}",
            )
            steps.torch("dweight", functools.partial(fill, slab), "dweight product unit")
        if needs.bias:
            steps.torch("total", functools.partial(torch.sum, dim=0), "sum")
            steps.torch("dbias", functools.partial(fill, slab), "dbias total unit")
    if needs.hidden:
        steps.torch(
            "dhidden",
            lambda drows, unit: times(drows, unit).to(given[0]).view(shape),
            "drows unit",
        )


# ---- one token per sequence


def _one_token_forward(steps: HeadSteps, training: bool) -> None:
    """Winners are the places of the tokens, kept where a mask hides them."""
    tokens, masked, vocab = steps.tokens, steps.values["MASKED"], steps.values["V"]
    config = configs.constants_of(configs.ONE_TOKEN, steps.dtype, steps.setting)
    block_b = config["BLOCK_B"] = min(config["BLOCK_B"], power_of_two(tokens.batch))
    finds = masked and block_b * tokens.length <= config["MAX_MASK"]
    if not (masked and training):
        steps.buffers["winners"] = None
    if masked and not finds:
        if not training:  # what no backward reads is scratch
            places = steps.buffer("places", (tokens.batch, 1), winner_dtype(tokens.length_bound))
            steps.renamed["winners"] = places
        steps.launch(one_token.find_kernel, (tokens.batch,), {"BLOCK": config["FIND_BLOCK"]})
    config |= {"FIND": config["FIND"] if finds else 0, "WITH_WINNERS": finds and training}
    grid = cdiv(vocab, config["BLOCK_V"]), cdiv(tokens.batch, block_b)
    steps.launch(one_token.forward_kernel, grid, config)


def _row_gradients(steps: HeadSteps, needs: Needs) -> None:
    """Gradients of rows of hidden, one a sequence: ``dhidden`` is zero where none was taken."""
    batch, vocab, dim = (steps.values[name] for name in "BVD")
    config = configs.constants_of(configs.ONE_TOKEN_GRADIENTS, steps.dtype, steps.setting)
    tiles, width, blocks = (
        cdiv(vocab, config["BLOCK_V"]),
        cdiv(dim, config["BLOCK_D"]),
        cdiv(batch, config["BLOCK_B"]),
    )
    # splits of the vocabulary that keep the device busy, whole tiles long
    wanted = cdiv(config["PROGRAMS"] * steps.setting.multiprocessors, width * blocks)
    split_v = cdiv(tiles, max(1, min(tiles, wanted))) * config["BLOCK_V"]
    splits = cdiv(vocab, split_v)
    if needs.hidden:
        steps.buffer("part", (splits, batch, dim))
        own = config | {"num_warps": config["HIDDEN_WARPS"], "split_v": split_v}
        steps.launch(one_token.split_gradient_kernel, (width, splits, blocks), own)
        own = {"BLOCK_B": 4, "BLOCK_D": min(256, power_of_two(dim)), "splits": splits}
        steps.launch(one_token.store_rows_kernel, (cdiv(batch, 4), cdiv(dim, own["BLOCK_D"])), own)
    if needs.weight or needs.bias:
        grid = (tiles * (width if needs.weight else 1),)
        steps.launch(
            one_token.weight_gradient_kernel,
            grid,
            config | {"num_warps": config["WEIGHT_WARPS"]},
        )


_SUMS, _ONE_TOKEN = (_sum_forward, _sum_backward), (_one_token_forward, _row_gradients)
POOLINGS: dict[
    str,
    tuple[Callable[[HeadSteps, bool], None], Callable[[HeadSteps, Needs], None]],
] = {
    "max": (_max_forward, _max_backward),
    "sum": _SUMS,
    "mean": _SUMS,
    "cls": _ONE_TOKEN,
    "last": _ONE_TOKEN,
}
