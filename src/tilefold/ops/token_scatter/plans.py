"""Launch plans of the token scatter and its gradient, and their configurations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Plan, PlanBuilder, Setting
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    batch_size,
)
from tilefold.ops.token_scatter._triton.scatter import gather_kernel, scatter_kernel

SCAN = 256  # offsets that the kernels check at a time
MAX_INSTANCES = 16  # program instances of a sequence in the kernel of the gradient
UINT16_POSITIONS = 1 << 16  # positions that the memory of a 16-bit score can hold
# Tensors of kernel parameters that do not have the names of their tensors.
PARAMETER_TENSORS = {
    "ids_ptr": "input_ids",
    "mask_ptr": "attention_mask",
    "cu_ptr": "cu_seqlens",
    "out_ptr": "scores",
    "slot_ptr": "slots",
    "slot_position_ptr": "slot_positions",
}
COMPILED = "at most 2 tokens a thread: compiled without spills for 8.0, 9.0 and 10.0"
# A program instance handles one sequence, BLOCK tokens at a time.
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
    """Record the plan of the forward pass: one kernel, with one program instance per sequence.

    The kernel finds tokens with the same id by a table ``[B, V]`` of token positions. The table
    uses the memory of the scores, or a buffer if scores have 16 bits and a position may need more.

    Args:
        tensors: layouts of weights, ids, mask and offsets.
        options: the checked options.
        training: whether the kernel marks the tokens that have a gradient, for backward.
        setting: the device.
    """
    batch = tensors.batch
    n_tokens = tensors.weights.numel()
    is_packed = tensors.cu_seqlens is not None
    if batch == 0 or (n_tokens == 0 and not is_packed):
        return Plan(fills={"scores": 0})
    sequences = _describe_sequences(tensors.weights, is_packed, setting)
    is_sum = options.reduce == "sum"
    builder = PlanBuilder(tensors=PARAMETER_TENSORS)
    builder.fill("scores", 0)
    builder.make_contiguous(tensors._asdict())
    table = "scores"
    if options.out_dtype.itemsize == 2 and sequences.length_bound > UINT16_POSITIONS:
        table = builder.add_buffer("table", (batch, options.vocab_size), torch.int32)
    # Scratch of the kernel, with a slot for each token. Sums need three positions, maxima one.
    builder.add_buffer("slots", (n_tokens,), torch.int64)
    n_positions = 3 * n_tokens if is_sum else n_tokens
    builder.add_buffer("slot_positions", (n_positions,), torch.int32)
    builder.add_launch(
        scatter_kernel,
        grid=(batch,),
        tensors={"table_ptr": table},
        parameters={
            "B": batch,
            "S": sequences.length,
            "T": n_tokens,
            "V": options.vocab_size,
            "SUM": is_sum,
            "ACTIVATION": options.activation,
            "IGNORE": tuple(options.ignore_ids),
            "IGNORED": len(options.ignore_ids),
            "HAS_MASK": tensors.attention_mask is not None,
            "PACKED": is_packed,
            "WITH_COUNTED": training,
            "SCAN": SCAN,
            **sequences.config,
        },
    )
    return builder.build()


def backward(
    dscores: Tensor,
    saved: ScatterSaved,
    options: ScatterOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Record the plan of the gradient of the weights: the launch of one kernel over the tokens.

    A token that is marked in ``counted`` gets the gradient of its score, times the slope of the
    activation. These are all valid tokens of a sum, and the largest token of a positive maximum.

    Args:
        dscores: layout of the gradient of the scores, ``[B, V]`` with any strides.
        saved: layouts of the saved tensors, with ``counted``.
        options: the checked options.
        needs: ignored, since only the weights have a gradient.
        setting: the device.
    """
    batch = batch_size(saved.weights, saved.cu_seqlens)
    n_tokens = saved.weights.numel()
    is_packed = saved.cu_seqlens is not None
    if batch == 0 or n_tokens == 0:
        return Plan(fills={"dweights": 0})
    sequences = _describe_sequences(saved.weights, is_packed, setting)
    # An instance handles one block of tokens at a time. The lengths of packed sequences are unknown
    # here, so each sequence gets as many instances as one of average length needs.
    average_blocks = n_tokens // (batch * sequences.config["BLOCK"])
    instances_per_sequence = max(1, min(MAX_INSTANCES, average_blocks))
    stride_b, stride_v = dscores.stride()
    builder = PlanBuilder(tensors=PARAMETER_TENSORS)
    builder.make_contiguous(saved._asdict())
    builder.add_launch(
        gather_kernel,
        grid=(batch, instances_per_sequence),
        parameters={
            "B": batch,
            "S": sequences.length,
            "T": n_tokens,
            "stride_db": stride_b,
            "stride_dv": stride_v,
            "ACTIVATION": options.activation,
            "PACKED": is_packed,
            "SCAN": SCAN,
            **sequences.config,
        },
    )
    return builder.build()


class _Sequences(NamedTuple):
    """Lengths of the sequences, and the launch configuration for them.

    Attributes:
        length_bound: largest number of tokens that a sequence can have.
        length: number of tokens of every sequence, or 0 if packed.
        config: constants of the kernels.
    """

    length_bound: int
    length: int
    config: dict[str, int]


def _describe_sequences(weights: Tensor, is_packed: bool, setting: Setting) -> _Sequences:
    """Describe the sequences of padded ``[B, S]`` or packed ``[T]`` weights."""
    length_bound = weights.numel() if is_packed else weights.size(1)
    return _Sequences(
        length_bound=length_bound,
        length=0 if is_packed else length_bound,
        config=lookup(CONFIGS, length=length_bound, capability=setting.capability),
    )
