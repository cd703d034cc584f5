"""Launch configurations of the LSR head by architecture and dtype; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.tensors import power_of_two
from tilefold.ops._shared.operator import setting_of
from tilefold.ops._shared.plan import Setting
from tilefold.ops._shared.tuning import Between, Row, lookup


@dataclass(frozen=True)
class MaxForwardConfig:
    """Tiles of the max-pooling forward kernel.

    Attributes:
        block_v, block_t, block_k: vocabulary entries, tokens and hidden dimensions of a tile.
        group: rows that sequences are aligned to.
        num_warps, num_stages: warps of a program, depth of the load pipeline.
        use_tma: read operands through TMA descriptors (compute capability 9.0 and newer).
        precision: ``input_precision`` of fp32 products.
        warp_roles: take the kernel whose warps load or compute (compute capability 9.0); ``num_warps`` is then that
            of one of its two computing groups.
    """

    block_v: int
    block_t: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int
    use_tma: bool
    precision: str = "ieee"
    warp_roles: bool = False


HOPPER_16BIT = MaxForwardConfig(128, 256, 64, 16, num_warps=4, num_stages=4, use_tma=True, warp_roles=True)
TMA_16BIT = MaxForwardConfig(128, 256, 64, 16, num_warps=8, num_stages=3, use_tma=True)
# copies of products, which lie in a memory of their own, and places of winners: 256 tokens spill from Triton 3.7 on
BLACKWELL_16BIT = replace(TMA_16BIT, block_t=128)
AMPERE_16BIT = MaxForwardConfig(128, 128, 32, 16, num_warps=8, num_stages=3, use_tma=False)
HOPPER_8BIT = replace(HOPPER_16BIT, block_k=128)
TMA_8BIT = replace(TMA_16BIT, block_k=128)
ADA_8BIT = replace(AMPERE_16BIT, block_k=64)
FP32 = MaxForwardConfig(64, 64, 32, 16, num_warps=4, num_stages=2, use_tma=False, precision="tf32x3")
# what runs where a kernel cannot be built
NEXT_BEST = {
    HOPPER_16BIT: TMA_16BIT, TMA_16BIT: AMPERE_16BIT, BLACKWELL_16BIT: AMPERE_16BIT,
    HOPPER_8BIT: TMA_8BIT, TMA_8BIT: ADA_8BIT,
}  # fmt: skip
INTERPRETED = MaxForwardConfig(16, 32, 16, 16, num_warps=4, num_stages=1, use_tma=True)


def max_forward_config_for(capability: tuple[int, int], dtype: torch.dtype, tf32: bool) -> MaxForwardConfig:
    """The forward configuration for a compute capability; ``tf32`` allows TF32 products of fp32 input."""
    if dtype == torch.float32:
        return replace(FP32, precision="tf32") if tf32 else FP32
    eight = dtype == torch.float8_e4m3fn
    if capability == (9, 0) and releases.why_no_warp_roles() is None:
        return HOPPER_8BIT if eight else HOPPER_16BIT
    if not (9, 0) <= capability < (12, 0):  # 12.0 has TMA, but no more shared memory than 8.9
        return ADA_8BIT if eight else AMPERE_16BIT
    if eight:
        return TMA_8BIT
    return TMA_16BIT if capability == (9, 0) else BLACKWELL_16BIT


def without_tma(config: MaxForwardConfig) -> MaxForwardConfig:
    """The configuration for operands that TMA cannot read, with sequences aligned as in ``config``."""
    behind = NEXT_BEST.get(config, config)
    return without_tma(behind) if behind is not config else replace(config, use_tma=False)


def max_forward_config(dtype: torch.dtype, setting: Setting) -> MaxForwardConfig:
    """The forward configuration for ``dtype``, of those whose kernels were not given up."""
    if setting.capability == (0, 0):
        return INTERPRETED
    config = max_forward_config_for(setting.capability, dtype, setting.tf32)
    while config in NEXT_BEST and kernel_name(config) in setting.given_up:
        config = NEXT_BEST[config]
    return config


def kernel_name(config: MaxForwardConfig) -> str:
    """The family of forward kernels that ``config`` belongs to."""
    if config.warp_roles:
        return "lsr_head's kernel whose warps load or compute"
    return "lsr_head's portable kernel with TMA" if config.use_tma else "lsr_head's portable kernel"


def instead_of(config: MaxForwardConfig) -> str:
    """Describe the fallback of ``config``, and its price."""
    return f"Max pooling runs {kernel_name(NEXT_BEST[config])} instead: the same results, a slower forward pass."


def describe(device: torch.device) -> dict[str, dict[str, object]]:
    """The configurations in use on ``device``, by dtype, for reports."""
    setting = setting_of(device)
    return {
        str(dtype).removeprefix("torch."): asdict(max_forward_config(dtype, setting))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }


@dataclass(frozen=True)
class MaxBackwardConfig:
    """Tiles of the max-pooling backward kernels.

    Attributes:
        block_r: hidden rows that own one list of entries; at most 32.
        split_v, scan_block, scan_warps: vocabulary entries of one scan program, of one step of it, and its warps.
        block_e, dhidden_block_d: entries and hidden dimensions of a tile of the hidden gradient.
        dweight_block_v, dweight_block_d: vocabulary entries and hidden dimensions of a tile of the weight gradient.
        dweight_block_b, dweight_block_e: sequences whose entries are listed at a time, entries of one product.
        dweight_programs: programs of the weight gradient on a multiprocessor.
        dweight_registers: what a thread of it may take at most, ``None`` for as many as the assembler likes.
        precision: ``input_precision`` of fp32 products.
    """

    block_r: int = 32
    split_v: int = 8192
    scan_block: int = 1024
    scan_warps: int = 4
    block_e: int = 128
    dhidden_block_d: int = 128
    dhidden_warps: int = 4
    dhidden_stages: int = 2
    dweight_block_v: int = 16
    dweight_block_d: int = 128
    dweight_block_b: int = 32
    dweight_block_e: int = 32
    dweight_programs: int = 8
    dweight_warps: int = 4
    dweight_stages: int = 2
    dweight_registers: int | None = None
    precision: str = "ieee"


INTERPRETED_HERE, FP32_HERE, FP16_HERE = {"capability": (0, 0)}, {"dtype": torch.float32}, {"dtype": torch.float16}
HOPPER = {"capability": (9, 0), "dtype": frozenset({torch.bfloat16, torch.float16})}
LARGE_BATCH = HOPPER | {"batch": Between(least=33)}  # sequences
BEFORE_HOPPER, BLACKWELL = Between(most=(8, 9)), Between(least=(9, 1))
MEASURED, COMPILED = "H200, Triton 3.6", "compiled without spills with Triton 3.4 to 3.9, not timed"
# facts: capability, dtype, batch; what no row sets is the default
BACKWARD = (
    Row(FP32_HERE, {"block_e": 32, "dweight_block_e": 16}, MEASURED),
    Row(
        {"capability": BEFORE_HOPPER, "release": Between(most=(3, 5))},
        {"dweight_stages": 1},
        "compiled: lists spill in a pipeline, in fp32 with 3.4, in 16 bits with 3.5",
    ),
    Row({"capability": BLACKWELL} | FP16_HERE, {"dweight_block_e": 16}, "compiled: with 32, scaling spills on some"),
    Row(
        HOPPER,
        {"dweight_block_d": 256, "dweight_block_b": 16, "dweight_block_e": 16, "dweight_stages": 1},
        MEASURED,
    ),
    Row(LARGE_BATCH, {"dweight_block_b": 32}, MEASURED),
    Row(LARGE_BATCH | {"release": (3, 7)}, {"dweight_stages": 2}, "compiled: long lists spill without a pipeline"),
    Row(
        LARGE_BATCH | FP16_HERE,
        {"dweight_registers": 128},
        "H200, Triton 3.6: scaling would take 152, and a multiprocessor then holds three programs where four do",
    ),
    Row(
        LARGE_BATCH | FP16_HERE | {"release": (3, 4)},
        {"dweight_registers": 168},
        "compiled: scaled entries with offsets in int64 spill in 128",
    ),
    Row(
        INTERPRETED_HERE,
        {
            "block_r": 16, "split_v": 64, "scan_block": 32, "block_e": 16, "dhidden_block_d": 16,
            "dweight_block_v": 16, "dweight_block_d": 16, "dweight_block_b": 4, "dweight_block_e": 16,
            "dweight_programs": 1, "dweight_stages": 2,
        },
        "small, for tests",
    ),
)  # fmt: skip


def max_backward_config(capability: tuple[int, int], dtype: torch.dtype, batch: int) -> MaxBackwardConfig:
    """The backward configuration for a compute capability, ``(0, 0)`` where kernels are interpreted."""
    return MaxBackwardConfig(**lookup(BACKWARD, capability=capability, dtype=dtype, batch=batch))


@dataclass(frozen=True)
class SumConfig:
    """Tiles of the sum-pooling kernels.

    Attributes:
        slab_elements: a bound of the ``dlogits`` that backward holds at a time.
        few_rows: at most so many rows of hidden are multiplied by kernels of ours.
    """

    block_v: int = 128
    block_t: int = 64
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    slab_elements: int = 1 << 25
    few_rows: int = 64
    precision: str = "ieee"


# facts: capability, dtype, tf32
SUM = (
    Row({"capability": BEFORE_HOPPER}, {"block_k": 32}, COMPILED),
    Row({"capability": BLACKWELL}, {"num_warps": 16}, "compiled: copies of products in their memory take registers"),
    Row(
        FP32_HERE,
        {"block_v": 32, "block_t": 32, "block_k": 32, "num_warps": 4, "num_stages": 2, "precision": "tf32x3"},
        MEASURED,
    ),
    Row(
        {"capability": BEFORE_HOPPER} | FP32_HERE,
        {"block_k": 16},
        "compiled: with 32, some of Triton 3.6 to 3.8 spill at any depth",
    ),
    Row(FP32_HERE | {"tf32": True}, {"precision": "tf32"}, COMPILED),
    Row(
        INTERPRETED_HERE,
        {
            "block_v": 16, "block_t": 16, "block_k": 16, "num_warps": 4, "num_stages": 1, "slab_elements": 4096,
            "few_rows": 32, "precision": "ieee",
        },
        "small, for tests",
    ),
)  # fmt: skip


def sum_config(capability: tuple[int, int], dtype: torch.dtype, tf32: bool) -> SumConfig:
    """The sum-pooling configuration for a compute capability; ``tf32`` allows TF32 products of fp32 input."""
    return SumConfig(**lookup(SUM, capability=capability, dtype=dtype, tf32=tf32))


@dataclass(frozen=True)
class OneTokenConfig:
    """Tiles of the kernels that take one token per sequence.

    Attributes:
        max_rows: sequences of a forward tile at most, where there are as many.
        gradient_rows: sequences of a gradient's tile.
        block_v, block_k: vocabulary entries and hidden dimensions of a forward tile.
        num_warps, num_stages: warps of a forward program, depth of its load pipeline.
        gradient_block_v, gradient_block_d: vocabulary entries and hidden dimensions of the gradients' tiles.
        weight_warps, hidden_warps, gradient_stages: of the gradients' programs.
        hidden_programs: programs of the hidden gradient on a multiprocessor.
        precision: ``input_precision`` of fp32 products.
    """

    max_rows: int = 64
    gradient_rows: int = 32
    block_v: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4
    gradient_block_v: int = 64
    gradient_block_d: int = 128
    weight_warps: int = 8
    hidden_warps: int = 4
    gradient_stages: int = 3
    hidden_programs: int = 2
    precision: str = "ieee"

    def rows(self, batch: int) -> int:
        """Sequences of a forward tile."""
        return min(self.max_rows, power_of_two(batch))


# facts: capability, dtype, tf32
ONE_TOKEN = (
    Row(
        FP32_HERE,
        {
            "max_rows": 32, "block_k": 32, "num_stages": 2, "gradient_block_v": 32, "gradient_block_d": 64,
            "gradient_stages": 2, "precision": "tf32x3",
        },
        MEASURED,
    ),
    Row(FP32_HERE | {"tf32": True}, {"precision": "tf32"}, COMPILED),
    Row(
        INTERPRETED_HERE,
        {
            "max_rows": 16, "gradient_rows": 16, "block_v": 16, "block_k": 16, "num_stages": 1, "gradient_block_v": 16,
            "gradient_block_d": 16, "gradient_stages": 1, "hidden_programs": 1, "precision": "ieee",
        },
        "small, for tests",
    ),
)  # fmt: skip


def one_token_config(capability: tuple[int, int], dtype: torch.dtype, tf32: bool) -> OneTokenConfig:
    """The configuration for poolings of one token; ``tf32`` allows TF32 products of fp32 input."""
    return OneTokenConfig(**lookup(ONE_TOKEN, capability=capability, dtype=dtype, tf32=tf32))
