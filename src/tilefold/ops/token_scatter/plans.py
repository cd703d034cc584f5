"""Launch plans of the token scatter and its gradient, for tensors of these layouts, and their
configurations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, contiguous
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    batch_size,
)
from tilefold.ops.token_scatter._triton.scatter import gather_kernel, scatter_kernel

SCAN = 256  # offsets that are checked at a time
# positions of a sequence fit the memory of a 16-bit score up to here
UINT16_POSITIONS = 1 << 16
COMPILED = "at most 2 tokens a thread: compiled without spills for 8.0, 9.0 and 10.0"
# one program walks one sequence, BLOCK tokens at a step
CONFIGS = (
    ConfigRow({}, {"BLOCK": 1024, "num_warps": 16}, COMPILED),
    ConfigRow({"length": Between(most=512)}, {"BLOCK": 512, "num_warps": 8}, COMPILED),
    ConfigRow({"length": Between(most=128)}, {"BLOCK": 128, "num_warps": 4}, COMPILED),
    ConfigRow(
        {"capability": (0, 0)},
        {"BLOCK": 16, "num_warps": 4},
        "interpreted: small, so that few tokens take more steps",
    ),
)


def forward(
    tensors: ScatterTensors,
    options: ScatterOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """The scores' own memory serves as the table where it can hold positions."""
    batch, tokens, packed = tensors.batch, tensors.weights.numel(), tensors.cu_seqlens is not None
    if batch == 0 or (tokens == 0 and not packed):
        return Plan(fills={"scores": 0})
    bound, length, config = _sequences(tensors.weights, packed, setting)
    sums, narrow = options.reduce == "sum", options.out_dtype.itemsize == 2
    own = (
        {"table": Buffer((batch, options.vocab_size), torch.int32)}
        if bound > UINT16_POSITIONS and narrow
        else {}
    )
    buffers = own | {
        "slots": Buffer((tokens,), torch.int64),
        "meets": Buffer(
            (3 * tokens if sums else tokens,),
            torch.int32,
        ),  # sums keep two more numbers beside these
    }
    constants = {
        "SUM": sums,
        "ACTIVATION": options.activation,
        "IGNORE": tuple(options.ignore_ids),
        "IGNORED": len(options.ignore_ids),
        "HAS_MASK": tensors.attention_mask is not None,
        "PACKED": packed,
        "WITH_COUNTED": training,
        "SCAN": SCAN,
    }
    names = f"weights input_ids attention_mask cu_seqlens scores {'table' if own else 'scores'} slots meets counted"
    scatter = Launch(
        scatter_kernel,
        (batch, 1, 1),
        names,
        (batch, length, tokens, options.vocab_size),
        constants | config,
    )
    return Plan((*contiguous(**tensors._asdict()), scatter), buffers, {"scores": 0})


def backward(
    dscores: Tensor,
    saved: ScatterSaved,
    options: ScatterOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Each token that counted takes the gradient of its entry, times its slope."""
    batch, packed = batch_size(saved.weights, saved.cu_seqlens), saved.cu_seqlens is not None
    tokens = saved.weights.numel()
    if batch == 0 or tokens == 0:
        return Plan(fills={"dweights": 0})
    _, length, config = _sequences(saved.weights, packed, setting)
    # packed lengths are not known here: as many programs per sequence as the average one can use
    programs = max(1, min(16, tokens // (batch * config["BLOCK"])))
    constants = {"ACTIVATION": options.activation, "PACKED": packed, "SCAN": SCAN} | config
    numbers = (batch, length, tokens, *dscores.stride())
    names = "dscores weights input_ids counted cu_seqlens dweights"
    gather = Launch(gather_kernel, (batch, programs, 1), names, numbers, constants)
    return Plan((*contiguous(**saved._asdict()), gather))


def _sequences(weights: Tensor, packed: bool, setting: Setting) -> tuple[int, int, dict[str, int]]:
    """The most tokens that a sequence can have, the length of all (0 if packed), and the
    configuration for them.
    """
    bound = weights.numel() if packed else weights.size(1)
    return (
        bound,
        0 if packed else bound,
        lookup(CONFIGS, length=bound, capability=setting.capability),
    )
