"""Launch configurations of MaxSim by architecture, dtype and shape bin; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilefold.ops._shared._triton.releases import ALL_REGISTERS
from tilefold.ops._shared._triton.tensors import power_of_two
from tilefold.ops._shared.tuning import Between, Row, lookup
from tilefold.ops.maxsim._problem import QUANTIZED_DTYPES

BY_TMA = "maxsim's kernels with TMA"  # where they cannot be built, others read by pointers
MAX_BLOCK_K = 128
MAX_STREAMED_ROWS = 64  # query tokens of all queries together that one tile of the streaming kernel holds
AMPERE, HOPPER, BLACKWELL = Between(most=(8, 9)), Between((9, 0), (9, 9)), Between(least=(10, 0))
INTERPRETED = {"capability": (0, 0)}


@dataclass(frozen=True)
class ForwardConfig:
    """Tiles of the forward kernels."""

    block_q: int  # query and document tokens of a tile
    block_t: int
    block_k: int  # dimensions of a tile; the whole dimension where it fits, so that a query tile is loaded once
    num_warps: int  # warps of a program, depth of the load pipeline
    num_stages: int
    # programs for each multiprocessor; of the streaming kernel, more would wait for all others to end
    programs: int = 2
    use_tma: bool = False  # read documents through TMA descriptors (compute capability 9.0 and newer)
    precision: str = "ieee"  # input_precision of fp32 products
    prefetch: int = 0  # document tokens that a program of the streaming kernel asks for before it reads the query
    # what a thread of the streaming kernel may take at most, None for as many as the assembler likes
    registers: int | None = None


# Few query rows make the kernel a stream of document tokens: small tiles, many programs. Many make it a matrix product:
# 128 rows, so that each document token that is loaded meets as many query tokens. Facts: capability, dtype, dim, rows
# (query tokens that can share a tile), tf32, winners (whether they are kept, which costs as much as the products: more
# elements per thread), even (documents of a length that tiles of 128 tokens hardly pad). `block_q` of 0 is by rows.
FEW, FP32 = {"rows": Between(most=64)}, {"dtype": torch.float32}
FORWARD = (
    Row({}, {"block_q": 128, "block_t": 64, "block_k": MAX_BLOCK_K, "num_warps": 8, "num_stages": 3}, "H200"),
    Row({"capability": Between(least=(9, 0))}, {"use_tma": True}, "H200"),
    Row({"capability": AMPERE, "dim": Between(least=MAX_BLOCK_K + 1)}, {"block_k": 64}, "compile gates of 8.0"),
    Row({"capability": HOPPER, "winners": True}, {"num_warps": 4}, "H200"),
    Row({"capability": HOPPER, "winners": True, "even": True}, {"block_q": 64, "block_t": 128}, "H200"),
    Row(
        FEW,  # Hopper's instructions take 64 rows at least; Ampere's 16. 16 KB at D = 128
        {"block_q": 64, "block_t": 64, "block_k": MAX_BLOCK_K, "num_warps": 4, "num_stages": 4, "use_tma": False},
        "H200",
    ),
    Row(FEW | {"capability": AMPERE}, {"block_q": 0, "num_stages": 3}, "compile gates of 8.0"),
    Row(FEW | {"dtype": torch.int8}, {"block_t": 128}, "H200"),
    Row(
        FEW | {"dtype": torch.int8, "capability": HOPPER}, {"num_stages": 3, "programs": 3, "use_tma": True},
        "H200: as many programs as the shared memory of a multiprocessor holds",
    ),
    Row(
        FEW | {"capability": BLACKWELL}, {"num_warps": 8},
        "compile gates of 10.0: products lie in a memory of their own, and their copies take registers",
    ),
    Row(
        {"rows": Between(least=65), "dtype": torch.int8, "capability": HOPPER, "release": Between(least=(3, 9))},
        {"num_stages": 4},
        "H200, Triton 3.9, 128 x 32 with 128 x 300 and 64 x 32 with 64 x 1,030 in us: 203 and 179, with 3 stages 220 "
        "and 192 (3.6: 204 and 178)",
    ),
    Row(
        FP32,
        {
            "block_q": 64, "block_t": 32, "block_k": 32, "num_warps": 4, "num_stages": 2, "use_tma": False,
            "precision": "tf32x3",
        },
        "H200",
    ),
    Row(FP32 | {"rows": Between(most=32)}, {"block_q": 32}, "H200"),
    Row(FP32 | {"capability": BLACKWELL}, {"num_warps": 8}, "compile gates of 10.0"),
    Row(FP32 | {"tf32": True}, {"precision": "tf32"}, "as it was asked for"),
)  # fmt: skip
# It holds all query rows and the whole dimension. Facts: capability, documents (their dtype), rows (a power of two),
# wide (queries in fp32: with fp8 documents their shared memory decides how many programs fit, else their registers).
INT8, FP8 = {"documents": torch.int8, "capability": HOPPER}, {"documents": torch.float8_e4m3fn, "capability": HOPPER}
SMALL = {"rows": Between(most=32), "wide": False}
STREAM = (
    Row({}, {"block_t": 64, "num_warps": 4, "num_stages": 3}, "compile gates of 8.0"),
    Row({"capability": Between(least=(9, 0))}, {"use_tma": True}, "H200"),
    Row({"capability": HOPPER}, {"prefetch": 256}, "H200"),
    Row(INT8, {"programs": 6}, "H200"),
    Row(
        INT8 | SMALL | {"release": Between(least=(3, 9))},
        {"programs": 5, "registers": 96},
        "H200, Triton 3.9, where six programs do not fit packed documents, 32 x 10,000 x 300 in us: 82, with six 98 "
        "(3.6: 76)",
    ),
    Row(INT8 | {"wide": True}, {"programs": 5}, "H200"),
    Row(INT8 | {"rows": 64}, {"programs": 4, "registers": 128}, "H200"),
    Row(INT8 | {"rows": 64, "wide": True}, {"programs": 3, "registers": None}, "H200"),
    Row(FP8, {"programs": 5}, "H200"),
    Row(
        FP8 | SMALL | {"release": Between(least=(3, 9))},
        {"programs": 4, "registers": 128},
        "H200, Triton 3.9, where five programs do not fit, 32 x 10,000 x 300 in us: 122, packed 104; with five 153 and "
        "118 (3.6: 111 and 89)",
    ),
    Row(FP8 | {"rows": 64}, {"programs": 3}, "H200"),
    Row(FP8 | {"wide": True}, {"programs": 3}, "H200"),
    Row(FP8 | {"rows": 64, "wide": True}, {"programs": 2}, "H200"),
    Row({"capability": BLACKWELL}, {"num_warps": 8, "programs": 2}, "compile gates of 10.0: copies of products"),
    Row({"capability": BLACKWELL, "rows": 32}, {"programs": 3}, "compile gates of 10.0"),
    Row({"capability": BLACKWELL, "rows": 16}, {"programs": 4}, "compile gates of 10.0"),
    Row(INTERPRETED, {"block_t": 16, "use_tma": True}, "small tiles, so that small inputs take several steps"),
)
# Constants of the kernels of gradients. BLOCK_S and BLOCK_S_MANY: query rows whose winners are read at a time, and from
# 16,384 query rows on. FEW_ROWS: query rows of all pairs up to which each has a program of its own.
ROW, ROWS, DOCUMENTS = {"kernel": "row"}, {"kernel": "rows"}, {"kernel": "documents"}
LISTED, SMOOTH = {"kernel": "listed"}, {"kernel": "smooth"}
WIDE, HALF = {"fp32": True}, {"fp32": False}
BACKWARD = (
    Row({}, {"PRECISION": "ieee", "num_stages": 3}, "H200"),
    Row(ROW, {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 8, "FEW_ROWS": 1024}, "H200"),
    Row(ROWS, {"BLOCK_R": 8, "BLOCK_D": 128, "num_warps": 4}, "H200"),
    Row(DOCUMENTS, {"BLOCK_T": 128, "BLOCK_E": 64, "BLOCK_D": 128, "num_warps": 8}, "H200"),
    Row(
        LISTED, {"BLOCK_T": 64, "BLOCK_E": 32, "BLOCK_D": 128, "BLOCK_S": 512, "BLOCK_S_MANY": 2048, "num_warps": 4},
        "H200",
    ),
    Row(
        SMOOTH, {"BLOCK_Q": 64, "BLOCK_T": 64, "BLOCK_K": 64, "BLOCK_D": 128, "num_warps": 8, "num_stages": 2}, "H200"
    ),
    Row(WIDE, {"PRECISION": "tf32x3"}, "fp32 in three TF32 parts"),
    Row(WIDE | {"tf32": True}, {"PRECISION": "tf32"}, "as it was asked for"),
    Row(ROW | WIDE, {"BLOCK_N": 32}, "H200"),
    Row(DOCUMENTS | WIDE, {"BLOCK_T": 32, "BLOCK_E": 32, "BLOCK_D": 64, "num_warps": 4, "num_stages": 2}, "H200"),
    Row(LISTED | WIDE, {"BLOCK_T": 16, "BLOCK_D": 64, "num_stages": 2}, "H200"),
    Row(
        SMOOTH | WIDE, {"BLOCK_Q": 32, "BLOCK_T": 16, "BLOCK_K": 16, "BLOCK_D": 64, "num_warps": 4, "num_stages": 1},
        "H200",
    ),
    Row(DOCUMENTS | WIDE | {"capability": AMPERE}, {"num_stages": 1}, "compile gates of 8.0"),
    Row(LISTED | WIDE | {"capability": AMPERE}, {"BLOCK_E": 16, "num_warps": 8}, "compile gates of 8.0"),
    Row(
        LISTED | WIDE | {"capability": AMPERE, "release": Between(least=(3, 8))}, {"num_warps": 4},
        "compile gates of 8.0: lists spill with 4 warps in 3.4 and 3.6, with 8 in 3.8 and 3.9",
    ),
    Row(
        SMOOTH | WIDE | {"capability": AMPERE, "release": Between(least=(3, 7))}, {"maxnreg": ALL_REGISTERS},
        "compile gates of 8.0: smooth maxima of packed queries are held to 128 registers from 3.7 on, and spill",
    ),
    Row(
        SMOOTH | WIDE | {"capability": AMPERE, "release": frozenset([(3, 4), (3, 9)])}, {"num_stages": 2},
        "compile gates of 8.0: smooth maxima spill in 3.4 without a pipeline, and with ptxas 13.4, which 3.9 brings",
    ),
    Row(SMOOTH | WIDE | {"capability": BLACKWELL}, {"num_stages": 2}, "compile gates of 10.0"),
    Row(
        DOCUMENTS | HALF | {"capability": BLACKWELL}, {"BLOCK_T": 64, "BLOCK_E": 32, "num_stages": 2},
        "compile gates of 10.0",
    ),
    Row(
        DOCUMENTS | HALF | {"capability": AMPERE, "release": frozenset([(3, 4), (3, 7), (3, 8)])},
        {"BLOCK_T": 64, "num_stages": 2},
        "compile gates of 8.0: where tokens are scaled and masked, tiles of 128 documents' tokens spill there",
    ),
    Row(
        ROWS | HALF | {"capability": Between(least=(9, 0)), "release": (3, 4)}, {"num_warps": 8},
        "compile gates of 9.0 and 10.0: queries of listed pairs spill in 3.4 with 4 warps",
    ),
)  # fmt: skip
INTERPRETED_BACKWARD: dict[str, dict[str, Any]] = {
    "row": {"BLOCK_N": 16, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3, "FEW_ROWS": 16},
    "rows": {"BLOCK_R": 32, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3},
    "documents": {"BLOCK_T": 16, "BLOCK_E": 32, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3},
    "listed": {
        "BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_D": 64, "BLOCK_S": 32, "BLOCK_S_MANY": 32, "num_warps": 4, "num_stages": 3
    },
    "smooth": {"BLOCK_Q": 16, "BLOCK_T": 16, "BLOCK_K": 32, "BLOCK_D": 64, "num_warps": 8, "num_stages": 2},
}  # fmt: skip


def forward_config(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    query_rows: int,
    tf32: bool,
    winners_in: int | None = None,
) -> ForwardConfig:
    """The configuration for a compute capability, ``(0, 0)`` interpreted; ``query_rows`` of them can share a tile.

    Winners, if they are kept, are among ``winners_in`` tokens of each document, 0 for packed ones.
    """
    if capability == (0, 0):
        return ForwardConfig(32, 16, 32, num_warps=4, num_stages=1, use_tma=query_rows > 16)
    even = winners_in is not None and winners_in > 0 and -winners_in % 128 <= winners_in // 10
    found = lookup(
        FORWARD, capability=capability, dtype=dtype, dim=dim, rows=query_rows, tf32=tf32, even=even,
        winners=winners_in is not None,
    )  # fmt: skip
    found["block_q"] = found["block_q"] or min(power_of_two(query_rows), 64)
    least = 32 if dtype == torch.int8 else 16  # int8 products take 32 at least
    return ForwardConfig(**found | {"block_k": min(power_of_two(dim, least), found["block_k"])})


def stream_config(
    capability: tuple[int, int], documents: torch.dtype, dim: int, query_rows: int, queries: torch.dtype
) -> ForwardConfig | None:
    """The configuration of the streaming kernel, if it is better: where documents have 8 bits.

    Their scales, and the conversions of fp8, then fall on rows that are in use.
    """
    if documents not in QUANTIZED_DTYPES or query_rows > MAX_STREAMED_ROWS or dim > MAX_BLOCK_K:
        return None
    rows, wide = power_of_two(query_rows), queries == torch.float32
    found = lookup(STREAM, capability=capability, documents=documents, rows=rows, wide=wide)
    return ForwardConfig(block_q=rows, block_k=power_of_two(dim, 32), **found)


def backward_config(kernel: str, capability: tuple[int, int], dtype: torch.dtype, tf32: bool) -> dict[str, Any]:
    """Constants of a kernel of gradients: tiles that keep to the registers of a compute capability."""
    if capability == (0, 0):
        return INTERPRETED_BACKWARD[kernel] | {"PRECISION": "ieee"}
    return lookup(BACKWARD, kernel=kernel, capability=capability, fp32=dtype == torch.float32, tf32=tf32)
