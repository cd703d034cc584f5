"""Launch configurations of MaxSim by architecture, dtype and shape bin; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilefold.ops._shared._triton.releases import ALL_REGISTERS
from tilefold.ops._shared.tuning import Between, Row, lookup


@dataclass(frozen=True)
class ForwardConfig:
    """Tiles of the forward kernels.

    Attributes:
        block_q, block_t: query and document tokens of a tile.
        block_k: dimensions of a tile; the whole dimension where it fits, so that a query tile is loaded once.
        num_warps, num_stages: warps of a program, depth of the load pipeline.
        programs: programs for each multiprocessor.
        use_tma: read documents through TMA descriptors (compute capability 9.0 and newer).
        precision: ``input_precision`` of fp32 products.
        prefetch: document tokens that a program of the streaming kernel asks for before it reads the query.
        registers: what a thread of the streaming kernel may take at most, ``None`` for as many as the assembler likes.
    """

    block_q: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 2
    use_tma: bool = False
    precision: str = "ieee"
    prefetch: int = 0
    registers: int | None = None


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the backward kernels.

    Attributes:
        block_r, block_d: query rows and dimensions of a tile of the query gradient.
        warps_q, stages_q: of its kernel.
        few_rows: query rows of all pairs up to which each has a program of its own, with block_n documents at a time.
        warps_few: of its kernel.
        block_t, block_e: document tokens, and query rows added at a time, of a tile of the document gradient of
            grouped and listed pairs.
        block_dd: dimensions of a tile of document gradients.
        warps_d, stages_d: of its kernel.
        list_t, list_e: as block_t and block_e, for all pairs.
        list_s, list_s_many: query rows whose winners are read at a time, and from 16,384 query rows on.
        list_warps, list_stages: of its kernel.
        smooth_r, smooth_t, smooth_k: query rows, document tokens and dimensions of a tile of the smooth maximum.
        smooth_warps, smooth_stages: of its kernels.
        smooth_registers: what a thread of them may take at most, ``None`` for as many as the assembler likes.
        precision: ``input_precision`` of fp32 products.
    """

    block_r: int = 8
    block_d: int = 128
    warps_q: int = 4
    stages_q: int = 3
    few_rows: int = 1024
    block_n: int = 64
    warps_few: int = 8
    block_t: int = 128
    block_e: int = 64
    block_dd: int = 128
    warps_d: int = 8
    stages_d: int = 3
    list_t: int = 64
    list_e: int = 32
    list_s: int = 512
    list_s_many: int = 2048
    list_warps: int = 4
    list_stages: int = 3
    smooth_r: int = 64
    smooth_t: int = 64
    smooth_k: int = 64
    smooth_warps: int = 8
    smooth_stages: int = 2
    smooth_registers: int | None = None
    precision: str = "ieee"


BACKWARD_16BIT = BackwardConfig()
BACKWARD_FP32 = BackwardConfig(
    block_n=32, block_t=32, block_e=32, block_dd=64, warps_d=4, stages_d=2, list_t=16, list_e=32, list_stages=2,
    smooth_r=32, smooth_t=16, smooth_k=16, smooth_warps=4, smooth_stages=1, precision="tf32x3",
)  # fmt: skip
BACKWARD_INTERPRETED = BackwardConfig(
    block_r=32, block_d=64, few_rows=16, block_n=16, block_t=16, block_e=32, block_dd=64, list_t=16, list_e=16,
    list_s=32, list_s_many=32, smooth_r=16, smooth_t=16, smooth_k=32,
)  # fmt: skip
INTERPRETED = ForwardConfig(32, 16, 32, num_warps=4, num_stages=1, use_tma=True)
BY_TMA = "maxsim's kernels with TMA"  # where they cannot be built, others read by pointers
MAX_BLOCK_K = 128
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
STREAM_PREFETCH = 256  # document tokens, on compute capability 9.0; 0 for none
MAX_STREAMED_ROWS = 64  # query tokens of all queries together that one tile of the streaming kernel holds


def _power_of_two(size: int, low: int, high: int) -> int:
    block = low
    while block < min(size, high):
        block *= 2
    return block


def forward_config(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    query_rows: int,
    tf32: bool,
    winners_in: int | None = None,
) -> ForwardConfig:
    """The configuration for a compute capability, ``(0, 0)`` interpreted; ``query_rows`` of them can share a tile.

    Few query rows make the kernel a stream of document tokens: small tiles, many programs. Many make it a matrix
    product: 128 rows, so that each document token that is loaded meets as many query tokens. Winners, if they are
    kept (``winners_in`` documents of that many tokens, 0 for packed ones), cost as much as the products: more
    elements per thread, and more tokens per tile where that makes no padding.
    """
    if capability == (0, 0):
        return replace(INTERPRETED, use_tma=query_rows > 16)
    if dtype == torch.float32:
        block_k = _power_of_two(dim, 16, 32)
        block_q, warps = 32 if query_rows <= 32 else 64, 8 if capability >= (10, 0) else 4
        config = ForwardConfig(block_q, 32, block_k, num_warps=warps, num_stages=2, precision="tf32x3")
        return replace(config, precision="tf32") if tf32 else config
    block_k = _power_of_two(dim, 32 if dtype == torch.int8 else 16, MAX_BLOCK_K)  # int8 products take 32 at least
    if query_rows <= 64:
        return _few_rows(capability, dtype, query_rows, block_k)
    if capability < (9, 0) and dim > MAX_BLOCK_K:
        block_k = min(block_k, 64)
    config = ForwardConfig(128, 64, block_k, num_warps=8, num_stages=3, use_tma=capability >= (9, 0))
    if (9, 0) <= capability < (10, 0) and winners_in is not None:
        config = replace(config, num_warps=4)
        if winners_in and -winners_in % 128 <= winners_in // 10:
            config = replace(config, block_q=64, block_t=128)
    return config


def _few_rows(capability: tuple[int, int], dtype: torch.dtype, query_rows: int, block_k: int) -> ForwardConfig:
    # Hopper's instructions take 64 rows at least; Ampere's 16
    block_q = 64 if capability >= (9, 0) else _power_of_two(query_rows, 16, 64)
    block_t = 128 if dtype == torch.int8 else 64  # 16 KB at D = 128
    if capability >= (10, 0):  # products lie in a memory of their own: their copies take registers
        return ForwardConfig(block_q, block_t, block_k, num_warps=8, num_stages=4)
    config = ForwardConfig(block_q, block_t, block_k, num_warps=4, num_stages=3)
    if capability < (9, 0):
        return config
    # as many programs as the shared memory of a multiprocessor holds
    return replace(config, programs=3, use_tma=True) if dtype == torch.int8 else replace(config, num_stages=4)


def stream_config(
    capability: tuple[int, int],
    documents: torch.dtype,
    dim: int,
    query_rows: int,
    queries: torch.dtype = torch.bfloat16,
) -> ForwardConfig | None:
    """The configuration of the streaming kernel, which holds all query rows and the whole dimension, if it is better.

    It is where documents have 8 bits: their scales, and the conversions of fp8, then fall on rows that are in use.
    """
    if documents not in QUANTIZED_DTYPES or query_rows > MAX_STREAMED_ROWS or dim > MAX_BLOCK_K:
        return None
    block_q = _power_of_two(query_rows, 16, MAX_STREAMED_ROWS)
    block_k = _power_of_two(dim, 32, MAX_BLOCK_K)  # int8 products take 32 at least
    if capability == (0, 0):
        return ForwardConfig(block_q, INTERPRETED.block_t, block_k, num_warps=4, num_stages=3, use_tma=True)
    if capability < (9, 0):
        return ForwardConfig(block_q, 64, block_k, num_warps=4, num_stages=3)
    programs, registers = _streams_at_a_time(capability, documents, block_q, queries == torch.float32)
    warps = 8 if capability >= (10, 0) else 4  # products lie in a memory of their own: their copies take registers
    return ForwardConfig(
        block_q, 64, block_k, num_warps=warps, num_stages=3, programs=programs, use_tma=True, registers=registers,
        prefetch=STREAM_PREFETCH if capability < (10, 0) else 0,
    )  # fmt: skip


def _streams_at_a_time(
    capability: tuple[int, int], documents: torch.dtype, block_q: int, wide: bool
) -> tuple[int, int | None]:
    """Programs of the streaming kernel on a multiprocessor at a time, and a limit of registers if one helps.

    Programs beyond those wait for all others to end. Their registers decide, and for fp8 with ``wide`` queries in fp32
    their shared memory.
    """
    if capability >= (10, 0):
        return {16: 4, 32: 3, 64: 2}[block_q], None
    if documents == torch.int8:
        if block_q <= 32:
            return 5 if wide else 6, None
        return (3, None) if wide else (4, 128)
    if wide:
        return 3 if block_q <= 32 else 2, None
    return 5 if block_q <= 32 else 3, None


AMPERE, BLACKWELL = Between(most=(8, 9)), Between(least=(10, 0))
BACKWARD = (
    Row({"fp32": True, "capability": AMPERE}, {"stages_d": 1, "list_e": 16, "list_warps": 8}, "compile gates of 8.0"),
    Row(
        {"fp32": True, "capability": AMPERE, "release": Between(least=(3, 8))}, {"list_warps": 4},
        "compile gates of 8.0: lists spill with 4 warps in 3.4 and 3.6, with 8 in 3.8 and 3.9",
    ),
    Row(
        {"fp32": True, "capability": AMPERE, "release": Between(least=(3, 7))}, {"smooth_registers": ALL_REGISTERS},
        "compile gates of 8.0: smooth maxima of packed queries are held to 128 registers from 3.7 on, and spill",
    ),
    Row(
        {"fp32": True, "capability": AMPERE, "release": (3, 4)}, {"smooth_stages": 2},
        "compile gates of 8.0: smooth maxima spill in 3.4 without a pipeline",
    ),
    Row(
        {"fp32": True, "capability": AMPERE, "release": Between(least=(3, 9))}, {"smooth_stages": 2},
        "compile gates of 8.0: so they do with ptxas 13.4, which 3.9 brings",
    ),
    Row({"fp32": True, "capability": BLACKWELL}, {"smooth_stages": 2}, "compile gates of 10.0"),
    Row(
        {"fp32": False, "capability": BLACKWELL}, {"block_t": 64, "block_e": 32, "stages_d": 2},
        "compile gates of 10.0",
    ),
    Row(
        {"fp32": False, "capability": AMPERE, "release": frozenset([(3, 4), (3, 7), (3, 8)])},
        {"block_t": 64, "stages_d": 2},
        "compile gates of 8.0: where tokens are scaled and masked, tiles of 128 documents' tokens spill there",
    ),
    Row(
        {"fp32": False, "capability": Between(least=(9, 0)), "release": (3, 4)}, {"warps_q": 8},
        "compile gates of 9.0 and 10.0: queries of listed pairs spill in 3.4 with 4 warps",
    ),
)  # fmt: skip


def backward_config(capability: tuple[int, int], dtype: torch.dtype, tf32: bool) -> BackwardConfig:
    """The backward configuration for a compute capability: tiles that keep to the registers there."""
    if capability == (0, 0):
        return BACKWARD_INTERPRETED
    fp32 = dtype == torch.float32
    config = replace(BACKWARD_FP32 if fp32 else BACKWARD_16BIT, **lookup(BACKWARD, fp32=fp32, capability=capability))
    return replace(config, precision="tf32") if fp32 and tf32 else config
