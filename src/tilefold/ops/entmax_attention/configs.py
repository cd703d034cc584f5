"""Launch configurations of alpha-entmax attention; nothing is searched at run time."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.releases import ALL_REGISTERS
from tilefold.ops._shared.entmax_root import ENTMAX15, GENERIC, SOFTMAX, SPARSEMAX
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.tf32 import tf32_allowed
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options

CLOSED = (SOFTMAX, ENTMAX15, SPARSEMAX)


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of the attention kernels.

    ``rows`` and ``keys`` are the granularity of the map of live blocks, the same in every kernel and in backward: they
    depend on the dtype, the head dimension and the device, on nothing that may change between the two.

    Attributes:
        rows: queries of a tile.
        keys: keys of a block.
        num_warps: of the kernels that walk blocks of keys.
        num_stages: of that of dq.
        precision: ``input_precision`` of fp32 products.
        resident: the most keys whose scores stay on chip without spills.
        resident_rows: queries of a tile of that kernel.
        resident_warps: its warps, and
        general_warps: where alpha is any number, if these are others.
        dkv_keys: keys of a tile of the kernel of dk and dv, a multiple of ``keys``.
        dkv_queries: queries that it takes in a step, a divisor of ``rows``.
        dkv_warps: its warps.
        dkv_stages: its stages.
        forward_stages: of the kernels of forward that walk blocks.
        programs: of the persistent kernel, for each multiprocessor.
        registers: the most a thread may take in the kernels with one accumulator or none: four programs of 4 warps then
            share a multiprocessor; ``None`` leaves it to the assembler.
        wide_registers: the same of the kernel of the output with two accumulators, and of that of dq with the sums of
            alpha, for three programs.
        dkv_registers: the same of the kernel of dk and dv.
        resident_simple: ``resident`` of a closed form without causality, window and dropout, which takes less.
        short: the most keys of a row whose blocks are all visited, without a map of live ones.
        short_rows: queries of a tile of the kernels that do so without a gradient; see :func:`short_rows`.
        short_warps: their warps.
        short_registers: the most a thread may take in them, for two programs of 8 warps.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    precision: str
    resident: int
    resident_rows: int
    resident_warps: int
    dkv_keys: int
    dkv_queries: int
    dkv_warps: int
    dkv_stages: int
    forward_stages: int = 2
    programs: int = 2
    registers: int | None = None
    resident_simple: int = 0
    short: int = 1024
    wide_registers: int | None = None
    dkv_registers: int | None = None
    general_warps: int = 0
    short_rows: int = 64
    short_warps: int = 8
    short_registers: int | None = None


INTERPRETED = AttentionConfig(32, 16, 4, 1, "ieee", 32, 16, 4, 32, 16, 4, 1, short=0, short_rows=32, short_warps=4)


@functools.lru_cache(maxsize=256)
def config_for(dtype: torch.dtype, head_dim: int, tf32: bool, capability: tuple[int, int]) -> AttentionConfig:
    """The configuration for a compute capability; ``tf32`` allows TF32 products of fp32 input.

    Every tile fits the 99 KB of shared memory of 8.6, 8.9 and 12.0.
    """
    hopper = capability == (9, 0)
    if dtype == torch.float32:  # three TF32 products hold every operand twice
        block, warps, resident = (32, 8, 64) if head_dim <= 64 else (16, 4, 32)
        precision = "tf32" if tf32 else "tf32x3"
        config = AttentionConfig(block, block, warps, 1, precision, resident, block, warps, block, block, warps, 1, 1)
        if head_dim > 128 and capability < (9, 0) and releases.roots_want_stages():
            config = replace(config, forward_stages=2)
        if head_dim > 64 and releases.wide_gradients_want_warps():
            config = replace(config, dkv_warps=8, dkv_registers=ALL_REGISTERS)
        return replace(config, short_rows=block, short_warps=warps)
    if head_dim > 128:
        return AttentionConfig(32, 32, 8, 2, "ieee", 64, 32, 8, 32, 32, 8, 1, short_rows=32)
    if hopper and head_dim <= 64:
        config = AttentionConfig(64, 64, 4, 2, "ieee", 128, 64, 4, 64, 64, 4, 2, forward_stages=3, programs=4)
        config = replace(config, resident_simple=256, short_rows=128, dkv_registers=168)
        config = replace(config, short_registers=128, general_warps=8 if releases.general_form_needs_warps() else 0)
        if releases.hopper_needs_more_registers():
            # on one H200 512 keys take 70 us in tiles of 128 queries and 64 in tiles of 64, 768 causal ones 129 and 99
            config = replace(config, short_rows=64)
            # under the others' limits 2% of the instructions of a loop move spilled values: short rows are then up to
            # 9% slower with gradients, rows of 4,096 keys 1 to 3% faster
            return replace(config, registers=168, programs=3, wide_registers=ALL_REGISTERS)
        return replace(config, registers=128, wide_registers=168)
    if hopper:
        return AttentionConfig(128, 64, 8, 2, "ieee", 128, 64, 4, 64, 128, 8, 1, programs=1, short_rows=128)
    resident = 128 if head_dim <= 64 else 0
    return AttentionConfig(64, 64, 8, 2, "ieee", resident, 64, 8, 64, 64, 8, 2 if capability[0] == 10 else 1)


def attention_config(q: Tensor, dropout: bool = False) -> AttentionConfig:
    """The configuration for the dtype, head dimension and device of ``q``; random words take registers too."""
    if q.device.type != "cuda" or triton_interpreted():
        return INTERPRETED
    capability = torch.cuda.get_device_capability(q.device)
    head_dim = int(q.size(-1))  # a tile of the kernels: never symbolic
    config = config_for(q.dtype, head_dim, tf32_allowed(q.dtype), capability)
    return replace(config, resident_warps=8) if dropout else config


def span(rows: int, options: Options) -> int:
    """The most keys that a tile of ``rows`` queries can see."""
    bound = options.max_seqlen_k
    return bound if options.window < 0 else min(bound, rows + 2 * options.window)


def is_simple(tensors: AttentionTensors, options: Options) -> bool:
    """Whether scores need few registers: a closed form of a constant alpha, nothing hidden."""
    closed = tensors.alpha is None and options.alpha_value in (1.5, 2.0)
    return closed and not (options.causal or options.window >= 0 or tensors.seed is not None)


def is_resident(tensors: AttentionTensors, options: Options) -> bool:
    """Whether the scores of a tile of rows stay on chip; else live blocks are listed."""
    q = tensors.q
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (10, 0):
        return False  # Triton 3.6 fails to build that kernel there
    config = attention_config(q)
    longest = max(config.resident, config.resident_simple) if is_simple(tensors, options) else config.resident
    return span(config.resident_rows, options) <= longest


def is_short(q: Tensor, options: Options) -> bool:
    """Whether rows have so few blocks that looking for dead ones costs more than it saves."""
    config = attention_config(q)
    return span(config.short_rows, options) <= config.short


def short_rows(config: AttentionConfig, kind: str) -> int:
    """Queries of a tile of the kernels that visit all blocks without a gradient.

    Forms that need more registers than that of alpha 1.5 put values away in wide tiles: 768 keys on one H200 take, with
    tiles of 128 and of 64 queries, 0.181 and 0.153 ms for an alpha in memory, 0.161 and 0.146 for 1.75, 0.133 and 0.121
    for 1.25, 0.111 and 0.103 for 2.
    """
    return config.short_rows if kind in (SOFTMAX, ENTMAX15) else config.rows


def resident_warps(config: AttentionConfig, kind: str) -> int:
    """Warps of the resident kernel."""
    return config.general_warps if kind not in CLOSED and config.general_warps else config.resident_warps


def caps(config: AttentionConfig, kind: str, dropout: bool) -> AttentionConfig:
    """The configuration with limits of registers only for forms that keep to them without spills."""
    if kind == GENERIC or dropout:
        dkv = ALL_REGISTERS if config.dkv_registers == ALL_REGISTERS else None
        return replace(config, registers=None, wide_registers=None, dkv_registers=dkv, short_registers=None)
    if config.registers and kind not in CLOSED and releases.any_alpha_wants_registers():
        return replace(config, registers=168, wide_registers=ALL_REGISTERS)
    return config


def row_tiles(t: Tensor, rows: int, tensors: AttentionTensors) -> int:
    """Tiles of the rows of ``t``, q-like or k-like, of all sequences; for packed ones the most there can be."""
    return t.size(0) // rows + tensors.batch if tensors.packed else tensors.batch * -(-t.size(2) // rows)


def live_shape(tensors: AttentionTensors, options: Options) -> tuple[int, int, int]:
    """``[H, row tiles, words]`` of the map of live blocks, one bit per block; empty where nothing reads it."""
    q = tensors.q
    if is_resident(tensors, options) or is_short(q, options):
        return 0, 0, 0
    config = attention_config(q)
    blocks = -(-options.max_seqlen_k // config.keys)
    return q.size(1), row_tiles(q, config.rows, tensors), -(-blocks // 32)


def tolerance(dtype: torch.dtype) -> float:
    """Of the mass of a row; what is left is divided out. 16 bits round the weights themselves by far more."""
    return 1e-6 if dtype == torch.float32 else 1e-5


def nearness(dtype: torch.dtype) -> float:
    """What a last step of a row's root may leave out of its weights, relative to their sum: a quarter of an ulp."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 4
