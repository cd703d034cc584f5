"""Max pooling, backward: what is launched, and launching it again for calls like one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import launcher
from tilefold.ops._shared.library import PLAIN
from tilefold.ops.lsr_head._layout import Plans, no_winner
from tilefold.ops.lsr_head._triton.launch import cdiv, sm_count
from tilefold.ops.lsr_head._triton.max_backward import (
    MAX_VOCAB,
    _count_kernel,
    _dhidden_kernel,
    _dweight_kernel,
    _list_kernel,
    _scan_kernel,
)
from tilefold.ops.lsr_head._triton.steps import (
    ALIGNMENT,
    Piece,
    Plan,
    Replay,
    Step,
    address_of,
    never,
    not_here,
    remembered,
    run_plan,
    second_time,
)
from tilefold.ops.lsr_head.configs import MaxBackwardConfig, max_backward_config

SCAN_BLOCK = 2048
MOST_SCANNED = 8192  # counts that one program adds up faster than a library's kernels begin

HIDDEN_ORDER = ("dscores", "scores", "winners", "cu_seqlens", "weight", "dhidden")
WEIGHT_ORDER = ("dscores", "scores", "winners", "rows", "cu_seqlens", "dweight", "dbias")


class Problem(NamedTuple):
    """What the gradients' launches depend on, besides tensors.

    Attributes:
        sizes: B, V, rows of hidden, and the length of every sequence (0 if they differ).
        dim: D.
        strides: of the scores' gradient.
    """

    sizes: tuple[int, int, int, int]
    dim: int
    strides: tuple[int, ...]
    activation: str
    logit_scale: float
    device: torch.device
    dtype: torch.dtype
    flags: dict[str, Any]
    config: MaxBackwardConfig

    @property
    def scaled(self) -> bool:
        """Whether products need powers of two, for entries that the dtype's range does not hold."""
        return self.dtype == torch.float16


def max_backward(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    needs: tuple[bool, bool, bool],
    main_grad: Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, each in its parameter's dtype; ``None`` where not needed.

    With ``main_grad``, fp32 ``[V, D]``, the weight's gradient is added to it, in fp32, and not returned. ``plans``
    receive how calls of this signature are repeated.
    """
    need_hidden, need_weight, need_bias = needs
    device, dim = hidden.device, hidden.size(-1)
    batch, vocab = scores.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {vocab}.")
    rows = hidden.reshape(-1, dim)
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if need_hidden else None
    bias_dtype = bias_dtype or torch.float32
    if batch == 0 or rows.size(0) == 0:
        return (
            None if dhidden is None else dhidden.zero_(),
            torch.zeros_like(weight) if need_weight and main_grad is None else None,
            torch.zeros(vocab, dtype=bias_dtype, device=device) if need_bias else None,
        )
    config = max_backward_config(compute_dtype, device, batch)
    sizes = (batch, vocab, rows.size(0), hidden.size(1) if cu_seqlens is None else 0)
    flags = {
        "ALWAYS_ACTIVE": activation in {"softplus", "none"},
        "NO_WINNER": no_winner(winners.dtype),
        "UNIFORM": cu_seqlens is None,
    }
    problem = Problem(
        sizes, dim, dscores.stride(), activation, float(logit_scale), device, compute_dtype, flags, config
    )
    tensors: dict[str, Tensor | None] = {"dscores": dscores, "scores": scores, "winners": winners}
    tensors["cu_seqlens"] = None if cu_seqlens is None else cu_seqlens.contiguous()
    name = ("gradients", dscores.stride(), needs)
    keep = (plans, name) if plans is not None and name not in plans and second_time(plans, name) else None
    parts: list[Replay | None] = []
    if dhidden is not None:
        tensors |= {"weight": weight.to(compute_dtype).contiguous(), "dhidden": dhidden}
        parts.append(_hidden_gradient(problem, tensors, keep))
    # The lists of the hidden gradient are gone by now: the peak is that of the results.
    dweight = main_grad
    if need_weight and dweight is None:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    dbias = torch.empty(vocab, dtype=bias_dtype, device=device) if need_bias else None
    if need_weight or need_bias:
        tensors |= {"rows": rows.to(compute_dtype).contiguous(), "dweight": dweight, "dbias": dbias}
        plan = _weight_plan(problem, need_weight, need_bias, main_grad is not None)
        used = run_plan(plan, tensors, device)
        parts.append(None if keep is None else remembered(plan, used, WEIGHT_ORDER, device, *keep))
    if plans is not None and keep is not None and None not in parts:
        plans[name] = Gradients(parts, needs, hidden, weight, main_grad is not None, compute_dtype, bias_dtype)
    return dhidden, dweight if main_grad is None else None, dbias


def _hidden_gradient(
    problem: Problem, tensors: Mapping[str, Tensor | None], keep: tuple[Plans, object] | None
) -> Replay | None:
    """Fill ``"dhidden"``; returns how that is repeated, if it can be and there is where to ``keep`` it, by its name."""
    count, scan, fill, pieces = _hidden_steps(problem)
    if scan is not None:
        plan = Plan((count, scan, *fill), pieces)
        used = run_plan(plan, tensors, problem.device)
        return None if keep is None else remembered(plan, used, HIDDEN_ORDER, problem.device, *keep)
    if keep is not None:
        never(*keep)  # the library's sum is no launch of ours
    used = run_plan(Plan((count,), pieces), tensors, problem.device)
    counts = used["counts"]
    used["places"] = None if counts is None else counts.cumsum(0)
    run_plan(Plan(fill, ()), used, problem.device)
    return None


def _hidden_steps(problem: Problem) -> tuple[Step, Step | None, tuple[Step, ...], tuple[Piece, ...]]:
    """The launch that counts, the one that adds counts up (a library's for many), those that follow; their scratch."""
    p, config = problem, problem.config
    batch, vocab, n_rows, _ = p.sizes
    splits = cdiv(vocab, config.split_v)
    tiles = cdiv(n_rows, config.block_r)
    block = {"BLOCK_R": config.block_r, "BLOCK": config.scan_block, "num_warps": config.scan_warps, **p.flags}
    lists = (*p.sizes, splits, config.split_v)
    count = Step(
        launcher(_count_kernel, block), (tiles, splits, 1), ("scores", "winners", "cu_seqlens", "counts", *lists)
    )
    slots = tiles * splits
    scan = None
    if slots <= MOST_SCANNED:
        run = launcher(_scan_kernel, {"BLOCK": SCAN_BLOCK, "num_warps": 8})
        scan = Step(run, (1, 1, 1), ("counts", "places", slots))
    listing = Step(
        launcher(_list_kernel, block | {"ACTIVATION": p.activation}),
        (tiles, splits, 1),
        ("dscores", "scores", "winners", "cu_seqlens", "places", "counts", "codes", "grads", *lists, *p.strides),
    )
    constants = {
        "D": p.dim, "BLOCK_R": config.block_r, "BLOCK_D": config.dhidden_block_d, "BLOCK_E": config.block_e,
        "SCALED": p.scaled, "PRECISION": config.precision, "num_warps": config.dhidden_warps,
        "num_stages": config.dhidden_stages,
    }  # fmt: skip
    product = Step(
        launcher(_dhidden_kernel, constants),
        (tiles, cdiv(p.dim, config.dhidden_block_d), 1),
        ("weight", "places", "codes", "grads", "dhidden", n_rows, splits, p.logit_scale),
    )
    pieces = (
        Piece("counts", (slots,), torch.int32),
        Piece("places", (slots if scan is not None else 0,), torch.int64),
        Piece("codes", (batch * vocab,), torch.int32),
        Piece("grads", (batch * vocab,), torch.float32 if p.scaled else p.dtype),
    )
    return count, scan, (listing, product), pieces


def _weight_plan(problem: Problem, need_weight: bool, need_bias: bool, accumulate: bool) -> Plan:
    p, config = problem, problem.config
    items = cdiv(p.sizes[1], config.dweight_block_v) * (cdiv(p.dim, config.dweight_block_d) if need_weight else 1)
    programs = min(items, sm_count(p.device) * config.dweight_programs)
    entries = programs * config.dweight_block_b * config.dweight_block_v
    constants = {
        "D": p.dim, "BLOCK_B": config.dweight_block_b, "BLOCK_V": config.dweight_block_v,
        "BLOCK_D": config.dweight_block_d, "BLOCK_E": config.dweight_block_e, "ACTIVATION": p.activation,
        "NEED_WEIGHT": need_weight, "NEED_BIAS": need_bias, "ACCUMULATE": accumulate, "SCALED": p.scaled,
        "PRECISION": config.precision,
        "num_warps": config.dweight_warps, "num_stages": config.dweight_stages, **p.flags,
    }  # fmt: skip
    if config.dweight_registers is not None:
        constants["maxnreg"] = config.dweight_registers
    given = ("dscores", "scores", "winners", "rows", "cu_seqlens", "own_codes", "own_grads", "dweight", "dbias")
    numbers = (*p.sizes, p.logit_scale, *p.strides)
    pieces = (Piece("own_codes", (entries,), torch.int64), Piece("own_grads", (entries,), p.dtype))
    return Plan((Step(launcher(_dweight_kernel, constants), (programs, 1, 1), (*given, *numbers)),), pieces)


class Gradients:
    """The launches of gradients that were made before, for calls of the same signature, needs and strides.

    It holds no tensor of a call.
    """

    def __init__(
        self,
        parts: list[Replay | None],
        needs: tuple[bool, bool, bool],
        hidden: Tensor,
        weight: Tensor,
        accumulate: bool,
        dtype: torch.dtype,
        bias_dtype: torch.dtype,
    ) -> None:
        self._need_hidden, self._need_weight, self._need_bias = needs
        self._of_hidden = parts[0] if self._need_hidden else None
        self._of_weight = parts[-1] if self._need_weight or self._need_bias else None
        self._device, self._index = hidden.device, hidden.get_device()
        self._hidden, self._weight = (hidden.shape, hidden.dtype), (weight.shape, weight.dtype)
        self._allocates = self._need_weight and not accumulate
        self._dtype, self._bias_dtype = dtype, bias_dtype

    def __call__(
        self,
        dscores: Tensor,
        scores: Tensor,
        winners: Tensor,
        hidden: Tensor,
        weight: Tensor,
        cu_seqlens: Tensor | None,
        main_grad: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """The gradients asked for, or ``None`` if the compiled kernels cannot take the tensors as they are."""
        index = self._index
        if not_here(index) or type(dscores) not in PLAIN:
            return None
        if not dscores.get_device() == scores.get_device() == hidden.get_device() == weight.get_device() == index:
            return None  # what was saved may have been packed and unpacked
        if hidden.dtype != self._dtype:
            hidden = hidden.to(self._dtype)
        if weight.dtype != self._dtype and self._of_hidden is not None:
            weight = weight.to(self._dtype)
        g, s, n = dscores.data_ptr(), address_of(scores), address_of(winners)
        h, w = address_of(hidden), address_of(weight)
        c = None if cu_seqlens is None else address_of(cu_seqlens)
        m = None if main_grad is None else address_of(main_grad)
        if (g | s | n | h | w | (c or 0) | (m or 0)) % ALIGNMENT:
            return None
        dhidden = dweight = dbias = None
        if self._of_hidden is not None:
            shape, dtype = self._hidden
            dhidden = torch.empty(shape, dtype=dtype, device=self._device)
            self._of_hidden(g, s, n, c, w, dhidden.data_ptr())
        if self._of_weight is not None:
            b = None
            if self._allocates:
                shape, dtype = self._weight
                dweight = torch.empty(shape, dtype=dtype, device=self._device)
                m = dweight.data_ptr()
            if self._need_bias:
                dbias = torch.empty(self._weight[0][:1], dtype=self._bias_dtype, device=self._device)
                b = dbias.data_ptr()
            self._of_weight(g, s, n, h, c, m, b)
        return dhidden, dweight, dbias
