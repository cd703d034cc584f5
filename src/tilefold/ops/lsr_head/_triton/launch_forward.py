"""Max pooling, forward: what is launched, and launching it again for calls like one before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import launcher, rows_fit_descriptor
from tilefold.ops._shared.fallback import KernelUnavailableError, give_up
from tilefold.ops.lsr_head._layout import Plans, batch_size, no_winner, winner_dtype
from tilefold.ops.lsr_head._triton.launch import as_bytes, cdiv, sm_count, tma_descriptor
from tilefold.ops.lsr_head._triton.max_forward import _combine_kernel, _max_forward_kernel
from tilefold.ops.lsr_head._triton.pack import Alignment, alignment
from tilefold.ops.lsr_head._triton.quantize import quantization
from tilefold.ops.lsr_head._triton.steps import (
    ALIGNMENT,
    Descriptor,
    Piece,
    Plan,
    Replay,
    Step,
    address_of,
    not_here,
    remembered,
    run_plan,
    second_time,
)
from tilefold.ops.lsr_head.configs import (
    NEXT_BEST,
    MaxForwardConfig,
    give_up_missing,
    instead_of,
    kernel_name,
    max_forward_config,
    without_tma,
)

MAX_UNITS = 32
MAX_RAGGED_UNITS = 8  # where sequences differ, each unit looks for its first one
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one unit
COMBINE_BLOCK = 1024
FOLDING = ("max_forward_hopper_kernel", "_max_forward_kernel")

ORDER = ("hidden", "weight", "weight_scale", "bias", "mask", "cu_seqlens", "scores", "winners")
PARTS = ("row_scale", "weight_scale", "bias", "offsets", "positions", "scores", "winners", "part", "part_winner")


def max_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    with_winners: bool,
    length_bound: int,
    weight_scale: Tensor | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]`` in ``out_dtype``, and winners ``[B, V]`` (uint16 or int32; empty unless asked for).

    With ``weight_scale``, fp32 ``[V]``, ``weight`` is fp8, and the token states are rounded to fp8 too. ``plans``
    receive how calls of this signature are repeated.
    """
    batch, vocab = batch_size(hidden, cu_seqlens), weight.size(0)
    dtype = winner_dtype(length_bound)
    scores = torch.empty(batch, vocab, dtype=out_dtype, device=hidden.device)
    winners = torch.empty(batch if with_winners else 0, vocab, dtype=dtype, device=hidden.device)
    if batch == 0 or (hidden.dim() == 3 and hidden.size(1) == 0):
        return scores.zero_(), winners.fill_(no_winner(dtype))
    tensors: dict[str, Tensor | None] = {
        "hidden": hidden.to(compute_dtype).contiguous(),
        "weight": (weight if weight_scale is not None else weight.to(compute_dtype)).contiguous(),
        "weight_scale": weight_scale,
        "bias": None if bias is None else bias.contiguous(),
        "mask": as_bytes(attention_mask),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "scores": scores,
        "winners": winners,
    }
    asked = Asked(batch, activation, float(logit_scale), with_winners, cu_seqlens is not None)
    plan, tensors = _ran(tensors, asked, hidden.device)
    name = ("forward", with_winners)
    if plans is not None and name not in plans and second_time(plans, name):
        replay = remembered(plan, tensors, ORDER, hidden.device, plans, name)
        if replay is not None:
            given = weight.dtype if weight_scale is not None else compute_dtype
            plans[name] = Forward(replay, scores, winners if with_winners else None, (compute_dtype, given))
    return scores, winners


class Asked(NamedTuple):
    """What a call asks for, besides tensors."""

    batch: int
    activation: str
    logit_scale: float
    with_winners: bool
    packed: bool


def _ran(
    tensors: dict[str, Tensor | None], asked: Asked, device: torch.device
) -> tuple[Plan, dict[str, Tensor | None]]:
    """The plan of the fastest kernel that can be built, and the tensors that it ran with."""
    if (weight := tensors["weight"]) is not None:
        give_up_missing(weight.dtype, device)
    while True:
        plan, config = planned(tensors, asked)
        try:
            return plan, run_plan(plan, tensors, device)
        except KernelUnavailableError as error:
            if error.kernel not in FOLDING or config not in NEXT_BEST:
                raise  # nothing is behind it
            give_up(kernel_name(config), device, str(error), instead_of(config))


def planned(tensors: dict[str, Tensor | None], asked: Asked) -> tuple[Plan, MaxForwardConfig]:
    """The launches for tensors named as in :data:`ORDER`, of which those of a kind have one plan."""
    hidden, weight, winners = tensors["hidden"], tensors["weight"], tensors["winners"]
    if hidden is None or weight is None or winners is None:
        raise LookupError("hidden, weight and winners must be tensors, got None.")
    quantized, dim, vocab = tensors["weight_scale"] is not None, hidden.size(-1), weight.size(0)
    config = max_forward_config(weight.dtype, hidden.device)
    batch = asked.batch if asked.packed else None
    aligned = alignment(hidden.shape, hidden.dtype, tensors["mask"] is not None, batch, config.group)
    if config.use_tma and not _can_use_tma(hidden, weight, aligned.in_place and not quantized):
        config = without_tma(config)
    total, length = aligned.total, aligned.uniform_length
    units, round_to = plan_units(total, vocab, length, config.block_v, config.block_t, sm_count(hidden.device))
    steps, pieces, rows = list(aligned.steps), list(aligned.pieces), "hidden" if aligned.in_place else "rows"
    if quantized:
        rounding, room = quantization(rows, total, dim, config.block_t)
        steps.append(rounding)
        pieces += room
        rows = "values"
    finishes = not aligned.in_place or units_cut_sequences(aligned, round_to, config)
    parts = 2 * units * vocab if finishes else 0  # without a cut nothing is partial
    pieces.append(Piece("part", (parts,), torch.float32))
    pieces.append(Piece("part_winner", (parts if asked.with_winners else 0,), torch.int32))
    sizes = (asked.batch, vocab, total, length, units, round_to)
    names = {piece.name for piece in pieces} | set(ORDER)
    pointers = tuple(name if name in names else None for name in PARTS)
    flags = {
        "ACTIVATION": asked.activation,
        "HAS_BIAS": tensors["bias"] is not None,
        "HAS_POSITIONS": "positions" in names,
        "WITH_WINNERS": asked.with_winners,
        "UNIFORM": aligned.in_place,
        "QUANTIZED": quantized,
        "BLOCK_T": config.block_t,
    }
    numbers = (*sizes, asked.logit_scale)
    tiles = {"D": dim, "BLOCK_K": config.block_k, "GROUP": config.group, "HAS_SCALE": asked.logit_scale != 1.0}
    steps.append(_folding(config, hidden.device, weight.shape, weight.dtype, (rows, total), (*pointers, *numbers),
                          tiles | flags))  # fmt: skip
    if finishes:
        ok = "ok" if "ok" in names else None
        flags |= {"BLOCK": COMBINE_BLOCK, "NO_WINNER": no_winner(winners.dtype), "CHECKED": ok is not None}
        given = (*pointers[1:5], ok, *pointers[5:], *sizes)
        grid = (asked.batch, cdiv(vocab, COMBINE_BLOCK), 1)
        steps.append(Step(launcher(_combine_kernel, flags), grid, given))
    return Plan(tuple(steps), tuple(pieces)), config


def _can_use_tma(hidden: Tensor, weight: Tensor, in_place: bool) -> bool:
    """Whether weight and rows can be read through TMA descriptors: 16-byte aligned bases and rows."""
    aligned = weight.data_ptr() % ALIGNMENT == 0 and (not in_place or hidden.data_ptr() % ALIGNMENT == 0)
    return aligned and rows_fit_descriptor(weight)


def _folding(
    config: MaxForwardConfig,
    device: torch.device,
    shape: torch.Size,
    dtype: torch.dtype,
    rows: tuple[str, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> Step:
    """The launch of the persistent kernel; ``shape`` and ``dtype`` are the weight's, ``rows`` a name and a number."""
    vocab, dim = shape
    kernel: Any = _max_forward_kernel
    make: Callable[..., Any] = tma_descriptor
    block_v = config.block_v
    constants |= {"num_warps": config.num_warps}
    if config.warp_roles:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # noqa: PLC0415 (needs Gluon)

        kernel, make, block_v = hopper.max_forward_hopper_kernel, hopper.hopper_descriptor, hopper.HALF_V.value
        constants |= {"STAGES": config.num_stages, "LEAN_PLACES": releases.lean_places()}
    else:
        constants |= {"BLOCK_V": block_v, "USE_TMA": config.use_tma, "PRECISION": config.precision}
        constants |= {"num_stages": config.num_stages}
    sources: tuple[Any, ...] = ("weight", rows[0])
    if config.use_tma:
        sources = (
            Descriptor("weight", vocab, dim, make(block_v, config.block_k, dtype)),
            Descriptor(rows[0], rows[1], dim, make(config.block_t, config.block_k, dtype)),
        )
    return Step(launcher(kernel, constants), (sm_count(device), 1, 1), (*sources, *arguments))


class Forward:
    """The launches of scores that were made before, for calls of the same signature. It holds no tensor of a call."""

    def __init__(
        self, replay: Replay, scores: Tensor, winners: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self._replay, (self._hidden_dtype, self._weight_dtype) = replay, dtypes
        self._device, self._index = scores.device, scores.get_device()
        self._shape, self._dtype = scores.shape, scores.dtype
        self._winner_dtype = None if winners is None else winners.dtype

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Scores, and winners if the first call kept them; ``None`` if the kernels cannot take the tensors so."""
        if not_here(self._index):
            return None
        if hidden.dtype != self._hidden_dtype:
            hidden = hidden.to(self._hidden_dtype)
        if weight.dtype != self._weight_dtype:
            weight = weight.to(self._weight_dtype)
        h = hidden.data_ptr() if hidden.is_contiguous() else 1
        w = weight.data_ptr() if weight.is_contiguous() else 1
        s = None if weight_scale is None else address_of(weight_scale)
        b = None if bias is None else address_of(bias)
        m = None if mask is None else address_of(mask)
        c = None if cu_seqlens is None else address_of(cu_seqlens)
        if (h | w | (s or 0) | (b or 0) | (m or 0) | (c or 0)) % ALIGNMENT:
            return None
        scores = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._winner_dtype is None:
            self._replay(h, w, s, b, m, c, scores.data_ptr(), None)
            return scores, None
        winners = torch.empty(self._shape, dtype=self._winner_dtype, device=self._device)
        self._replay(h, w, s, b, m, c, scores.data_ptr(), winners.data_ptr())
        return scores, winners


@functools.lru_cache(maxsize=4096)
def plan_units(
    rows: int, vocab: int, uniform_length: int, block_v: int, block_t: int, programs: int
) -> tuple[int, int]:
    """Into how many units the token tiles are split, and the number of tiles that a unit's size is a multiple of.

    The split that leaves the fewest tiles to the busiest program, at a price an item: 0.1 tile where all sequences have
    one length (``uniform_length``, else 0), 0.15 where the first one has to be looked for. Units end with sequences if
    that length is a multiple of ``block_t``. How many of ragged ``rows`` are valid only the device knows: the split is
    then the best on average over several shares.
    """
    tiles_per_sequence = uniform_length // block_t if uniform_length % block_t == 0 else 0
    round_to = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    shares, price = ((1.0,), 0.1) if uniform_length else (RAGGED_SHARES, 0.15)
    counts = [max(1, cdiv(int(rows * share), block_t)) for share in shares]
    n_vocab = cdiv(vocab, block_v)

    def busiest(units: int) -> float:
        total = 0.0
        for n_tiles in counts:
            tiles = cdiv(cdiv(n_tiles, units), round_to) * round_to
            total += cdiv(n_vocab * cdiv(n_tiles, tiles), programs) * (tiles + price) / n_tiles
        return total

    most = MAX_UNITS if uniform_length else MAX_RAGGED_UNITS
    return min(range(1, min(counts[-1], most) + 1), key=busiest), round_to


def units_cut_sequences(aligned: Alignment, round_to: int, config: MaxForwardConfig) -> bool:
    """Whether the border of two units can lie inside a sequence of uniform input."""
    return (round_to * config.block_t) % max(aligned.uniform_length, 1) != 0
