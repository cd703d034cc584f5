"""Launch configurations of MaxSim by architecture, dtype and shape.

Nothing is searched at run time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilefold.ops._shared._triton.releases import ALL_REGISTERS
from tilefold.ops._shared.plan import Constants, power_of_two
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.maxsim._problem import QUANTIZED_DTYPES

# Kernels that may be impossible to build; see `KernelFallback`.
BY_TMA = "maxsim's kernels with TMA"
BY_ROLES = "maxsim's kernel whose warps have roles"
MAX_BLOCK_K = 128  # largest part of a token vector that a tile holds
QUARTERS = 4  # in which the field PARTS counts the rows of a tile
MAX_STREAMED_ROWS = 64  # largest number of query tokens of the streaming kernel, of all queries
AMPERE = Between(most=(8, 9))
HOPPER = Between((9, 0), (9, 9))
BLACKWELL = Between(least=(10, 0))
INTERPRETED = {"capability": (0, 0)}

# Forward kernels.
#
# Facts: capability; dtype; dim; rows, the query tokens that can share a tile; tf32; winners,
# whether they are saved, which costs as much as the products since a thread then has more elements;
# even, whether tiles of 128 tokens pad the documents only little.
#
# - BLOCK_Q: query tokens of a tile; 0 chooses it by the number of rows
# - BLOCK_T: document tokens of a tile
# - BLOCK_K: the whole dimension where it fits, so that a query tile is loaded once
# - USE_TMA: whether documents are read through descriptors
# - PROGRAMS: programs of a multiprocessor
#
# Few query rows make the kernel a stream of document tokens: small tiles, many programs. Many rows
# make it a matrix product: 128 rows, so that each loaded document token is used by as many query
# tokens.
FEW = {"rows": Between(most=64)}
FP32 = {"dtype": torch.float32}
FORWARD = (
    ConfigRow(
        {},
        {
            "BLOCK_Q": 128,
            "BLOCK_T": 64,
            "BLOCK_K": MAX_BLOCK_K,
            "num_warps": 8,
            "num_stages": 3,
            "PROGRAMS": 2,
            "USE_TMA": False,
            "PRECISION": "ieee",
        },
        "H200",
    ),
    ConfigRow({"capability": Between(least=(9, 0))}, {"USE_TMA": True}, "H200"),
    ConfigRow(
        {"capability": AMPERE, "dim": Between(least=MAX_BLOCK_K + 1)},
        {"BLOCK_K": 64},
        "compile gates of 8.0",
    ),
    ConfigRow({"capability": HOPPER, "winners": True}, {"num_warps": 4}, "H200"),
    ConfigRow(
        {"capability": HOPPER, "winners": True, "even": True},
        {"BLOCK_Q": 64, "BLOCK_T": 128},
        "H200",
    ),
    ConfigRow(
        FEW,  # Hopper's instructions take 64 rows at least; Ampere's 16. 16 KB at D = 128
        {
            "BLOCK_Q": 64,
            "BLOCK_T": 64,
            "BLOCK_K": MAX_BLOCK_K,
            "num_warps": 4,
            "num_stages": 4,
            "USE_TMA": False,
        },
        "H200",
    ),
    ConfigRow(
        FEW | {"capability": AMPERE}, {"BLOCK_Q": 0, "num_stages": 3}, "compile gates of 8.0"
    ),
    ConfigRow(FEW | {"dtype": torch.int8}, {"BLOCK_T": 128}, "H200"),
    ConfigRow(
        FEW | {"dtype": torch.int8, "capability": HOPPER},
        {"num_stages": 3, "PROGRAMS": 3, "USE_TMA": True},
        "H200: as many programs as the shared memory of a multiprocessor holds",
    ),
    ConfigRow(
        FEW | {"capability": BLACKWELL},
        {"num_warps": 8},
        "compile gates of 10.0: products lie in a memory of their own, and their copies take "
        "registers",
    ),
    ConfigRow(
        {
            "rows": Between(least=65),
            "dtype": torch.int8,
            "capability": HOPPER,
            "release": Between(least=(3, 9)),
        },
        {"num_stages": 4},
        "H200, Triton 3.9, 128 x 32 with 128 x 300 and 64 x 32 with 64 x 1,030 in us: 203 and "
        "179, with 3 stages 220 and 192 (3.6: 204 and 178)",
    ),
    ConfigRow(
        FP32,
        {
            "BLOCK_Q": 64,
            "BLOCK_T": 32,
            "BLOCK_K": 32,
            "num_warps": 4,
            "num_stages": 2,
            "USE_TMA": False,
            "PRECISION": "tf32x3",
        },
        "H200",
    ),
    ConfigRow(FP32 | {"rows": Between(most=32)}, {"BLOCK_Q": 32}, "H200"),
    ConfigRow(FP32 | {"capability": BLACKWELL}, {"num_warps": 8}, "compile gates of 10.0"),
    ConfigRow(FP32 | {"tf32": True}, {"PRECISION": "tf32"}, "as it was asked for"),
    ConfigRow(
        INTERPRETED,
        {
            "BLOCK_Q": 32,
            "BLOCK_T": 16,
            "BLOCK_K": 32,
            "num_warps": 4,
            "num_stages": 1,
            "PROGRAMS": 2,
            "USE_TMA": False,
            "PRECISION": "ieee",
        },
        "small tiles",
    ),
    ConfigRow(INTERPRETED | {"rows": Between(least=17)}, {"USE_TMA": True}, "small tiles"),
)
# The streaming kernel, which holds all query rows and the whole dimension.
#
# Facts: capability; documents, their dtype; rows, a power of two; wide, whether queries are fp32.
# With fp8 documents, shared memory of wide queries limits the number of programs, else registers.
#
# - PROGRAMS: programs that a multiprocessor runs at a time; more would wait for all others to end
# - PREFETCH: document tokens that are requested before the query is read
INT8 = {"documents": torch.int8, "capability": HOPPER}
FP8 = {"documents": torch.float8_e4m3fn, "capability": HOPPER}
SMALL = {"rows": Between(most=32), "wide": False}
STREAM = (
    ConfigRow(
        {},
        {
            "BLOCK_T": 64,
            "num_warps": 4,
            "num_stages": 3,
            "PROGRAMS": 2,
            "USE_TMA": False,
            "PRECISION": "ieee",
            "PREFETCH": 0,
        },
        "compile gates of 8.0",
    ),
    ConfigRow({"capability": Between(least=(9, 0))}, {"USE_TMA": True}, "H200"),
    ConfigRow({"capability": HOPPER}, {"PREFETCH": 256}, "H200"),
    ConfigRow(INT8, {"PROGRAMS": 6}, "H200"),
    ConfigRow(
        INT8 | SMALL | {"release": Between(least=(3, 9))},
        {"PROGRAMS": 5, "maxnreg": 96},
        "H200, Triton 3.9, where six programs do not fit packed documents, 32 x 10,000 x 300 in "
        "us: 82, with six 98 (3.6: 76)",
    ),
    ConfigRow(INT8 | {"wide": True}, {"PROGRAMS": 5}, "H200"),
    ConfigRow(INT8 | {"rows": 64}, {"PROGRAMS": 4, "maxnreg": 128}, "H200"),
    ConfigRow(INT8 | {"rows": 64, "wide": True}, {"PROGRAMS": 3, "maxnreg": None}, "H200"),
    ConfigRow(FP8, {"PROGRAMS": 5}, "H200"),
    ConfigRow(
        FP8 | SMALL | {"release": Between(least=(3, 9))},
        {"PROGRAMS": 4, "maxnreg": 128},
        "H200, Triton 3.9, where five programs do not fit, 32 x 10,000 x 300 in us: 122, packed "
        "104; with five 153 and 118 (3.6: 111 and 89)",
    ),
    ConfigRow(FP8 | {"rows": 64}, {"PROGRAMS": 3}, "H200"),
    ConfigRow(FP8 | {"wide": True}, {"PROGRAMS": 3}, "H200"),
    ConfigRow(FP8 | {"rows": 64, "wide": True}, {"PROGRAMS": 2}, "H200"),
    ConfigRow(
        {"capability": BLACKWELL},
        {"num_warps": 8, "PROGRAMS": 2},
        "compile gates of 10.0: copies of products",
    ),
    ConfigRow({"capability": BLACKWELL, "rows": 32}, {"PROGRAMS": 3}, "compile gates of 10.0"),
    ConfigRow({"capability": BLACKWELL, "rows": 16}, {"PROGRAMS": 4}, "compile gates of 10.0"),
    ConfigRow(
        INTERPRETED,
        {"BLOCK_T": 16, "USE_TMA": True},
        "small tiles, so that small inputs take several steps",
    ),
)
# The pass over int8 documents that queries share.
#
# Facts: capability; slot, the rows of a query, a power of two; rows of all queries; tokens of a
# document on average.
#
# - BLOCK_Q: query rows of a tile; 0 if other kernels are faster
# - PARTS: quarters of BLOCK_Q that the rows of a query may take
SHARED_PASS = (
    ConfigRow(
        {},
        {
            "BLOCK_Q": 0,
            "PARTS": 4,
            "BLOCK_T": 64,
            "num_warps": 4,
            "num_stages": 3,
            "PROGRAMS": 2,
            "USE_TMA": True,
        },
        "no other GPU was timed",
    ),
    ConfigRow(
        {"capability": HOPPER, "slot": Between(most=32), "rows": Between(least=65)},
        {"BLOCK_Q": 128, "PROGRAMS": 4, "maxnreg": 128},
        "H200, 16 x 32 with 1,000,000 x 64 in ms: 12.4, by tiles of one document and other "
        "queries 44",
    ),
    ConfigRow(
        {"capability": HOPPER, "tokens": Between(65, 96)},
        {"BLOCK_T": 32, "num_stages": 4},
        "H200, 16 x 32 with 8,800,000 x 67 in ms: 219, with tiles of 64 253",
    ),
    ConfigRow(
        {"capability": HOPPER, "slot": 32, "rows": 64, "tokens": Between(most=64)},
        {"BLOCK_Q": 64, "num_stages": 4, "PROGRAMS": 4, "maxnreg": 128},
        "H200, 2 x 32 with 1,000,000 x 64 in ms: 2.5, as a stream of documents 5.6",
    ),
    ConfigRow(
        INTERPRETED, {"BLOCK_Q": 64, "BLOCK_T": 16}, "small tiles, so that there are several"
    ),
)
# The same pass over many padded documents, by warps with roles. Each of four groups of warps has a
# share of the rows and of the documents.
#
# Facts: capability; rows of all queries; documents; tokens of a document; half, whether programs of
# 256 rows leave fewer rows idle than those of 512.
#
# - BLOCK_Q: query rows of a tile; 0 if other kernels are faster
# - PARTS: parts that the documents are divided into
# - STAGES: tiles that are loaded ahead, a multiple of 4 for each part
# - GROUP: documents of a tile: 32, 16 or 8
MANY = {"capability": (9, 0), "documents": Between(least=65536)}
ROLES_PASS = (
    ConfigRow(
        {},
        {
            "BLOCK_Q": 0,
            "PARTS": 4,
            "STAGES": 16,
            "GROUP": 32,
            "REGISTERS": 112,
            "num_warps": 4,
            "num_stages": 1,
        },
        "no other GPU, and no fewer documents, were timed",
    ),
    ConfigRow(
        MANY | {"rows": Between(most=32)},
        {"BLOCK_Q": 32},
        "H200, 32 with 1,000,000 x 64 and 8,800,000 x 67 in ms: 2.0 and 19.7, as a stream of "
        "documents 2.4 and 33",
    ),
    ConfigRow(
        MANY | {"rows": Between(most=32), "tokens": Between(65, 127)},
        {"GROUP": 16},
        "H200, 32 with 13.6 GB of documents of 67 and 96 tokens in ms: 3.50 and 3.62, by tiles of "
        "32 documents 3.70 and 3.82",
    ),
    ConfigRow(
        MANY | {"rows": Between(most=32), "tokens": Between(least=128)},
        {"BLOCK_Q": 0},
        "H200, 32 with 13.6 GB of documents of 128, 300 and 1,030 tokens in ms: 3.4, 3.8 and 3.9, "
        "as a stream of documents 3.1, 3.2 and 3.2",
    ),
    ConfigRow(
        MANY | {"rows": Between(33, 64)},
        {"BLOCK_Q": 64},
        "H200, 2 x 32: 2.1 and 21.4, by the pass above 2.5",
    ),
    ConfigRow(MANY | {"rows": Between(65, 128)}, {"BLOCK_Q": 128}, "H200, 4 x 32: 2.4 and 26"),
    ConfigRow(
        MANY | {"rows": Between(least=129), "half": True},
        {"BLOCK_Q": 256, "PARTS": 2},
        "H200, 8 x 32: 4.0 and 41",
    ),
    ConfigRow(
        MANY | {"rows": Between(least=129), "half": False},
        {"BLOCK_Q": 512, "PARTS": 1, "STAGES": 8},
        "H200, 16 x 32: 7.7 and 73, by the pass above 12.3 and 216",
    ),
)
# Kernels of gradients.
#
# Facts: kernel; capability; fp32, whether tensors are fp32; tf32.
#
# - BLOCK_S, BLOCK_S_MANY: query rows whose winners are read at a time, and from 16,384 rows on
# - FEW_ROWS: query rows of all pairs up to which each row has a program
ROW = {"kernel": "row"}
ROWS = {"kernel": "rows"}
DOCUMENTS = {"kernel": "documents"}
LISTED = {"kernel": "listed"}
SMOOTH = {"kernel": "smooth"}
WIDE = {"fp32": True}
HALF = {"fp32": False}
BACKWARD = (
    ConfigRow({}, {"PRECISION": "ieee", "num_stages": 3}, "H200"),
    ConfigRow(ROW, {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 8, "FEW_ROWS": 1024}, "H200"),
    ConfigRow(ROWS, {"BLOCK_R": 8, "BLOCK_D": 128, "num_warps": 4}, "H200"),
    ConfigRow(DOCUMENTS, {"BLOCK_T": 128, "BLOCK_E": 64, "BLOCK_D": 128, "num_warps": 8}, "H200"),
    ConfigRow(
        LISTED,
        {
            "BLOCK_T": 64,
            "BLOCK_E": 32,
            "BLOCK_D": 128,
            "BLOCK_S": 512,
            "BLOCK_S_MANY": 2048,
            "num_warps": 4,
        },
        "H200",
    ),
    ConfigRow(
        SMOOTH,
        {
            "BLOCK_Q": 64,
            "BLOCK_T": 64,
            "BLOCK_K": 64,
            "BLOCK_D": 128,
            "num_warps": 8,
            "num_stages": 2,
        },
        "H200",
    ),
    ConfigRow(WIDE, {"PRECISION": "tf32x3"}, "fp32 in three TF32 parts"),
    ConfigRow(WIDE | {"tf32": True}, {"PRECISION": "tf32"}, "as it was asked for"),
    ConfigRow(ROW | WIDE, {"BLOCK_N": 32}, "H200"),
    ConfigRow(
        DOCUMENTS | WIDE,
        {"BLOCK_T": 32, "BLOCK_E": 32, "BLOCK_D": 64, "num_warps": 4, "num_stages": 2},
        "H200",
    ),
    ConfigRow(LISTED | WIDE, {"BLOCK_T": 16, "BLOCK_D": 64, "num_stages": 2}, "H200"),
    ConfigRow(
        SMOOTH | WIDE,
        {
            "BLOCK_Q": 32,
            "BLOCK_T": 16,
            "BLOCK_K": 16,
            "BLOCK_D": 64,
            "num_warps": 4,
            "num_stages": 1,
        },
        "H200",
    ),
    ConfigRow(DOCUMENTS | WIDE | {"capability": AMPERE}, {"num_stages": 1}, "compile gates of 8.0"),
    ConfigRow(
        LISTED | WIDE | {"capability": AMPERE},
        {"BLOCK_E": 16, "num_warps": 8, "maxnreg": ALL_REGISTERS},
        "compile gates of 8.0: assemblers hold lists to 64 to 96 registers by themselves, and "
        "these spill",
    ),
    ConfigRow(
        SMOOTH | WIDE | {"capability": AMPERE, "release": Between(least=(3, 7))},
        {"maxnreg": ALL_REGISTERS},
        "compile gates of 8.0: smooth maxima of packed queries are held to 128 registers from 3.7 "
        "on, and spill",
    ),
    ConfigRow(
        SMOOTH | WIDE | {"capability": AMPERE, "release": frozenset([(3, 4), (3, 9)])},
        {"num_stages": 2},
        "compile gates of 8.0: smooth maxima spill in 3.4 without a pipeline, and with ptxas "
        "13.4, which 3.9 brings",
    ),
    ConfigRow(
        SMOOTH | WIDE | {"capability": BLACKWELL}, {"num_stages": 2}, "compile gates of 10.0"
    ),
    ConfigRow(
        DOCUMENTS | HALF | {"capability": BLACKWELL},
        {"BLOCK_T": 64, "BLOCK_E": 32, "num_stages": 2},
        "compile gates of 10.0",
    ),
    ConfigRow(
        DOCUMENTS | HALF | {"capability": AMPERE},
        {"BLOCK_T": 64, "num_stages": 2},
        "compile gates of 8.0: where tokens are scaled and masked, tiles of 128 documents' tokens "
        "spill but in 3.6",
    ),
    ConfigRow(
        ROWS | HALF | {"capability": Between(least=(9, 0)), "release": (3, 4)},
        {"num_warps": 8},
        "compile gates of 9.0 and 10.0: queries of listed pairs spill in 3.4 with 4 warps",
    ),
    ConfigRow(INTERPRETED, {"PRECISION": "ieee", "num_stages": 3, "maxnreg": None}, "small tiles"),
    ConfigRow(
        INTERPRETED | ROW,
        {"BLOCK_N": 16, "BLOCK_D": 64, "num_warps": 8, "FEW_ROWS": 16},
        "small tiles",
    ),
    ConfigRow(INTERPRETED | ROWS, {"BLOCK_R": 32, "BLOCK_D": 64, "num_warps": 4}, "small tiles"),
    ConfigRow(
        INTERPRETED | DOCUMENTS,
        {"BLOCK_T": 16, "BLOCK_E": 32, "BLOCK_D": 64, "num_warps": 8},
        "small tiles",
    ),
    ConfigRow(
        INTERPRETED | LISTED,
        {
            "BLOCK_T": 16,
            "BLOCK_E": 16,
            "BLOCK_D": 64,
            "BLOCK_S": 32,
            "BLOCK_S_MANY": 32,
            "num_warps": 4,
        },
        "small tiles",
    ),
    ConfigRow(
        INTERPRETED | SMOOTH,
        {
            "BLOCK_Q": 16,
            "BLOCK_T": 16,
            "BLOCK_K": 32,
            "BLOCK_D": 64,
            "num_warps": 8,
            "num_stages": 2,
        },
        "small tiles",
    ),
)


def forward_config(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    rows: int,
    tf32: bool,
    *,
    saves_winners: bool = False,
    document_length: int = 0,
) -> Constants:
    """Return the compile-time constants of a forward kernel.

    Args:
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
        dtype: dtype of the operands of the products.
        dim: size D of a token vector.
        rows: number of query tokens that can share a tile.
        tf32: whether products of fp32 may run in TF32.
        saves_winners: whether the positions of the most similar tokens are saved for backward.
        document_length: number of tokens of each padded document; 0 for packed documents.
    """
    # whether tiles of 128 tokens are padded by at most a tenth of a document's length
    padding = -document_length % 128
    fills_tiles = document_length > 0 and padding <= document_length // 10
    config = lookup(
        FORWARD,
        capability=capability,
        dtype=dtype,
        dim=dim,
        rows=rows,
        tf32=tf32,
        winners=saves_winners,
        even=saves_winners and fills_tiles,
    )
    if not config["BLOCK_Q"]:
        config["BLOCK_Q"] = min(power_of_two(rows), 64)
    if capability != (0, 0):
        smallest_k = 32 if dtype == torch.int8 else 16  # of a tensor-core instruction
        config["BLOCK_K"] = min(power_of_two(dim, smallest_k), config["BLOCK_K"])
    return config


def stream_config(
    capability: tuple[int, int],
    document_dtype: torch.dtype,
    dim: int,
    n_query_rows: int,
    query_dtype: torch.dtype,
) -> Constants | None:
    """Return the constants of the streaming kernel, or ``None`` if other kernels are faster.

    The streaming kernel holds the tokens of all queries in one tile and reads each document once.
    That is faster for 8-bit documents and few query tokens.

    Args:
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
        document_dtype: dtype of the documents.
        dim: size D of a token vector.
        n_query_rows: number of tokens of all queries.
        query_dtype: dtype of the queries.
    """
    if (
        document_dtype not in QUANTIZED_DTYPES
        or n_query_rows > MAX_STREAMED_ROWS
        or dim > MAX_BLOCK_K
    ):
        return None
    tile_rows = power_of_two(n_query_rows)
    config = lookup(
        STREAM,
        capability=capability,
        documents=document_dtype,
        rows=tile_rows,
        wide=query_dtype == torch.float32,  # fp32 needs more registers than 16-bit dtypes
    )
    return {**config, "BLOCK_Q": tile_rows, "BLOCK_K": power_of_two(dim, 32)}


def pass_config(
    table: Iterable[ConfigRow],
    dim: int,
    rows_per_query: int,
    **conditions: object,
) -> Constants | None:
    """Return the constants of a pass over int8 documents, or ``None`` if other kernels are faster.

    Several queries share a tile, so that a document is read once for all of them. Other kernels are
    faster if the rows of one query fill more than ``PARTS`` quarters of the tile.

    Args:
        table: :data:`SHARED_PASS` or :data:`ROLES_PASS`.
        dim: size D of a token vector.
        rows_per_query: rows of a tile for each query, a power of two; 0 for packed queries.
        **conditions: values of the other conditions of the table's rows.
    """
    config = lookup(table, slot=rows_per_query, **conditions)
    max_rows_per_query = config["BLOCK_Q"] * config["PARTS"] // QUARTERS
    if dim > MAX_BLOCK_K or not 0 < rows_per_query <= max_rows_per_query:
        return None
    return {**config, "SLOT": rows_per_query, "BLOCK_K": power_of_two(dim, 32)}


def backward_config(
    kernel: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    tf32: bool,
) -> Constants:
    """Return the tile sizes and warps of a backward kernel for a GPU.

    Args:
        kernel: name of the kernel: ``"row"`` (query gradient, a program for each query token),
            ``"rows"`` (query gradient, a program for several query tokens), ``"documents"``
            (document gradient), ``"listed"`` (document gradient, from lists of query tokens) or
            ``"smooth"`` (gradients of smooth maxima).
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
        dtype: dtype of the tensors.
        tf32: whether products of fp32 may run in TF32.
    """
    return lookup(
        BACKWARD,
        kernel=kernel,
        capability=capability,
        fp32=dtype == torch.float32,
        tf32=tf32,
    )
