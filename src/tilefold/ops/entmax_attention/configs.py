"""Launch configurations of alpha-entmax attention, and the strategy for its rows.

Nothing is searched at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared._triton.releases import ALL_REGISTERS
from tilefold.ops._shared.entmax_root import (
    ENTMAX15,
    GENERIC,
    GENERIC16,
    GENTLE,
    SOFTMAX,
    STEEP,
    kernel_formula,
)
from tilefold.ops._shared.plan import Constants, cdiv
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.entmax_attention._problem import AttentionOptions, AttentionTensors

# Strategies of the forward pass for the scores of a row:
RESIDENT = "resident"  # all scores stay on chip
SHORT = "short"  # all blocks of keys are visited twice
LISTS = (
    "lists"  # blocks with a positive weight, the live ones, are listed, and only they are visited
)

WORD_BITS = 32  # blocks in an int32 word of the map of live blocks

FP32 = {"dtype": torch.float32}
# In 16 bits: rows of fp32 follow, which override these.
HOPPER = {"capability": (9, 0), "head_dim": Between(most=64)}
ANY_ALPHA = frozenset({GENERIC, GENERIC16, GENTLE, STEEP})
NO_LIMITS = {"registers": None, "wide_registers": None, "dkv_registers": None}
COMPILED = "compiled without spills with Triton 3.6, not timed"

# Default properties of a call. Simple rows need few registers: alpha is a number with a closed
# form, and neither causality, a window nor dropout hides a pair.
USUAL = {
    "kind": ENTMAX15,
    "strategy": LISTS,
    "tf32": False,
    "dropout": False,
    "simple": False,
    "training": True,
}

# Fields of a configuration:
#
# - rows, keys: tile. For LISTS they are the granularity of the map of live blocks. They depend on
#   the dtype, the head dimension and the device only, so that forward and backward agree.
# - num_warps: warps of the kernels that visit blocks of keys
# - num_stages: stages of the kernel of dq
# - forward_stages: stages of the forward kernels
# - precision: precision of fp32 products
# - max_resident_keys: largest number of keys of the strategy RESIDENT, whose scores stay on chip
#   without spills; -1 if its kernel is never built
# - resident_rows, resident_warps: rows of a tile and warps of that kernel
# - max_short_keys: largest number of keys of the strategy SHORT
# - dkv_keys, dkv_queries: tile of the kernel of dk and dv, a multiple of keys and a divisor of rows
# - dkv_warps, dkv_stages: warps and stages of that kernel
# - programs: programs of the persistent kernel, for each multiprocessor
# - registers: limit per thread of kernels with at most one accumulator, of which four programs of 4
#   warps share a multiprocessor; None leaves the number to the assembler
# - wide_registers: limit of the output kernel with two accumulators, and of dq with the sums of
#   alpha, of which three programs share a multiprocessor
# - dkv_registers: limit of the kernel of dk and dv
#
# Every tile fits the 99 KB of shared memory of 8.6, 8.9 and 12.0.
TABLE = (
    ConfigRow(
        {},
        {
            "rows": 64,
            "keys": 64,
            "num_warps": 8,
            "num_stages": 2,
            "forward_stages": 2,
            "precision": "ieee",
            "max_resident_keys": 0,
            "resident_rows": 64,
            "resident_warps": 8,
            "max_short_keys": 1024,
            "dkv_keys": 64,
            "dkv_queries": 64,
            "dkv_warps": 8,
            "dkv_stages": 1,
            "programs": 2,
            **NO_LIMITS,
        },
        COMPILED,
    ),
    ConfigRow({"head_dim": Between(most=64)}, {"max_resident_keys": 128}, COMPILED),
    ConfigRow({"capability": Between((10, 0), (10, 9))}, {"dkv_stages": 2}, COMPILED),
    ConfigRow(
        {"capability": (9, 0), "head_dim": Between(65, 128)},
        {
            "rows": 128,
            "max_resident_keys": 128,
            "resident_warps": 4,
            "dkv_queries": 128,
            "programs": 1,
        },
        COMPILED,
    ),
    ConfigRow(
        HOPPER,
        {
            "num_warps": 4,
            "forward_stages": 3,
            "resident_warps": 4,
            "dkv_warps": 4,
            "dkv_stages": 2,
            "programs": 4,
            "registers": 128,
            "wide_registers": 168,
            "dkv_registers": 168,
        },
        "H200, Triton 3.6",
    ),
    ConfigRow(HOPPER | {"simple": True}, {"max_resident_keys": 256}, "H200, Triton 3.6"),
    ConfigRow(
        HOPPER
        | {
            "strategy": SHORT,
            "training": False,
            "kind": frozenset({SOFTMAX, ENTMAX15}),
            "release": Between(most=(3, 8)),
        },
        {"rows": 128, "num_warps": 8, "registers": 128},
        # Other forms spill in wide tiles.
        "H200, Triton 3.6, 768 keys, ms with tiles of 128 and of 64 queries: an alpha in memory "
        "0.181 and 0.153, 1.75 0.161 and 0.146, 1.25 0.133 and 0.121, 2 0.111 and 0.103; 3.9, "
        "alpha 1.5: 0.129 and 0.099 causal, of 512 keys 0.070 and 0.064",
    ),
    ConfigRow(
        HOPPER | {"kind": ANY_ALPHA, "release": frozenset({(3, 5), (3, 8)})},
        {"registers": 168, "wide_registers": ALL_REGISTERS},
        "compiled: roots and inference of these forms spill in 128, the gradient of alpha wants "
        "all",
    ),
    ConfigRow(
        HOPPER | {"kind": ANY_ALPHA, "release": (3, 8)},
        {"resident_warps": 8},
        "compiled: with 4 warps it spills",
    ),
    ConfigRow(
        HOPPER | {"release": Between(least=(3, 9))},
        {"ptx_options": "--regAllocOptLevel=4"},
        "H200: 3.9 asks its assembler for level 2, which puts away 50 to 100 bytes more under the "
        "same limits",
    ),
    ConfigRow(
        HOPPER | {"kind": ANY_ALPHA, "release": Between(least=(3, 9))},
        {"wide_registers": ALL_REGISTERS},
        "compiled: in 168 registers the gradient of alpha puts away 224 bytes, 4% of a loop",
    ),
    ConfigRow(
        {"head_dim": Between(least=129)},
        {
            "rows": 32,
            "keys": 32,
            "max_resident_keys": 64,
            "resident_rows": 32,
            "dkv_keys": 32,
            "dkv_queries": 32,
            "dkv_stages": 1,
        },
        COMPILED,
    ),
    ConfigRow(
        FP32,  # products of three TF32 products hold every operand twice
        {
            "rows": 32,
            "keys": 32,
            "num_warps": 8,
            "num_stages": 1,
            "forward_stages": 1,
            "precision": "tf32x3",
            "max_resident_keys": 64,
            "resident_rows": 32,
            "resident_warps": 8,
            "dkv_keys": 32,
            "dkv_queries": 32,
            "dkv_warps": 8,
            "dkv_stages": 1,
            "programs": 2,
            **NO_LIMITS,
        },
        COMPILED,
    ),
    ConfigRow(
        FP32 | {"head_dim": Between(least=65)},
        {
            "rows": 16,
            "keys": 16,
            "num_warps": 4,
            "max_resident_keys": 32,
            "resident_rows": 16,
            "resident_warps": 4,
            "dkv_keys": 16,
            "dkv_queries": 16,
            "dkv_warps": 4,
        },
        COMPILED,
    ),
    ConfigRow(FP32 | {"tf32": True}, {"precision": "tf32"}, "as it was asked for"),
    ConfigRow(
        FP32
        | {"head_dim": Between(least=129), "capability": Between(most=(8, 9)), "release": (3, 4)},
        {"forward_stages": 2},
        "compiled for 8.0: with one stage its assembler gives the kernel of the roots 32 registers",
    ),
    ConfigRow(
        {"kind": GENERIC}, NO_LIMITS, "compiled: this form does not keep to limits without spills"
    ),
    ConfigRow(
        {"dropout": True},
        NO_LIMITS | {"resident_warps": 8},
        "compiled: random words take registers too",
    ),
    ConfigRow(
        FP32 | {"head_dim": Between(least=65), "release": (3, 8)},
        {"dkv_warps": 8, "dkv_registers": ALL_REGISTERS},
        "compiled: its assembler gives the kernel of dk and dv 32 registers, and spills in its "
        "loop",
    ),
    ConfigRow(
        {"capability": Between(least=(10, 0))},
        {"max_resident_keys": -1},
        "Triton 3.6 fails to build that kernel there",
    ),
    ConfigRow(
        {"capability": (0, 0)},
        {
            "rows": 32,
            "keys": 16,
            "num_warps": 4,
            "num_stages": 1,
            "forward_stages": 2,
            "precision": "ieee",
            "max_resident_keys": 32,
            "resident_rows": 16,
            "resident_warps": 4,
            "max_short_keys": 0,
            "dkv_keys": 32,
            "dkv_queries": 16,
            "dkv_warps": 4,
            "dkv_stages": 1,
            "programs": 2,
            **NO_LIMITS,
        },
        "interpreted: small tiles, so that few rows take every way",
    ),
)


def lookup_config(
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    **properties: object,
) -> Constants:
    """Return the configuration of the kernels for tensors of a dtype and a head size.

    Args:
        dtype: dtype of q, k and v.
        head_dim: size D of a head.
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
        **properties: properties of the call that differ from :data:`USUAL`, such as ``strategy``.

    Returns:
        Tile sizes, warps, stages and limits by name. ``ptx_options`` is ``None`` if the table has
        none.
    """
    config = lookup(
        TABLE,
        **{
            "dtype": dtype,
            "head_dim": head_dim,
            "capability": capability,
            **USUAL,
            **properties,
        },
    )
    return {"ptx_options": None, **config}


def config_of_call(
    tensors: AttentionTensors,
    options: AttentionOptions,
    capability: tuple[int, int],
    strategy: str = LISTS,
    *,
    tf32: bool = False,
    training: bool = True,
) -> Constants:
    """Return the configuration of the kernels for a call, from its tensors and options.

    Args:
        tensors: tensors of the call.
        options: checked options.
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
        strategy: strategy for the rows, as :func:`choose_row_strategy` chooses it.
        tf32: whether products of fp32 may run in TF32.
        training: whether backward may follow.
    """
    q = tensors.q
    has_dropout = tensors.seed is not None
    has_closed_form = tensors.alpha is None and options.alpha_value in (1.5, 2.0)
    hides_pairs = options.causal or options.has_window or has_dropout  # dropout hides weights
    is_simple = has_closed_form and not hides_pairs
    return lookup_config(
        q.dtype,
        int(q.size(-1)),  # a tile's size is never symbolic
        capability,
        kind=kernel_formula(q.dtype, tensors.alpha, options.alpha_value),
        strategy=strategy,
        tf32=tf32,
        dropout=has_dropout,
        simple=is_simple,
        training=training,
    )


def key_span(rows: int, options: AttentionOptions) -> int:
    """Return the largest number of keys that ``rows`` consecutive queries can attend to."""
    bound = options.max_seqlen_k
    return bound if not options.has_window else min(bound, rows + 2 * options.window)


def choose_row_strategy(
    tensors: AttentionTensors,
    options: AttentionOptions,
    capability: tuple[int, int],
) -> str:
    """Choose the strategy of the forward pass.

    The strategies, from the shortest to the longest rows, are:

    - ``RESIDENT``: the scores of a row stay on chip;
    - ``SHORT``: all blocks of keys are visited;
    - ``LISTS``: the live blocks, which have a positive weight, are listed, and the others are
      skipped. That saves more time than the lists cost.

    Args:
        tensors: tensors of the call.
        options: checked options.
        capability: compute capability, ``(0, 0)`` if kernels run in the interpreter.
    """
    config = config_of_call(tensors, options, capability)
    visible_keys = key_span(config["resident_rows"], options)
    if visible_keys <= config["max_resident_keys"]:
        return RESIDENT
    # The decision is the same for training and inference: it depends on the widest tile of both.
    widest = lookup_config(
        tensors.q.dtype,
        int(tensors.q.size(-1)),
        capability,
        strategy=SHORT,
        training=False,
    )
    visible_keys = key_span(widest["rows"], options)
    return SHORT if visible_keys <= config["max_short_keys"] else LISTS


def row_tiles(tensor: Tensor, rows: int, tensors: AttentionTensors) -> int:
    """Return the number of tiles of all sequences, for a packed batch an upper bound.

    A tile has rows of one sequence only. The lengths of packed sequences are not known on the CPU.

    Args:
        tensor: q-like or k-like tensor.
        rows: rows of a tile.
        tensors: tensors of the call.
    """
    if tensors.packed:  # complete tiles, and at most one incomplete tile of each sequence
        return tensor.size(0) // rows + tensors.batch
    return tensors.batch * cdiv(tensor.size(2), rows)
