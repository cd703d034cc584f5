"""Contract of ``lsr_head``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import head_problem
from tests.ops.contracts.contract import (
    GrowingCall,
    KernelCase,
    OffsetCall,
    OperatorContract,
    RepeatedCall,
    TypedCall,
)
from tests.ops.samples import FP32, MASK, OFFSETS, Sample, Shape
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops._shared.activation import ACTIVATIONS
from tilefold.ops.lsr_head import lsr_head_rows
from tilefold.ops.lsr_head.api import HEAD

INTERPRETED = triton_interpreted()
BF16 = torch.bfloat16
POOLINGS = tuple(head_problem.POOLINGS)
HIDDEN: Shape = (
    2,
    16,
    16,
)  # rows of 16 values are read through TMA descriptors where there are some
PADDED: Shape = (2, 21, 16)
PACKED: Shape = (32, 16)
LAYOUTS: list[tuple[Shape, dict[str, Any]]] = [
    (HIDDEN, {}),
    (PADDED, {"attention_mask": MASK}),
    (PACKED, {"cu_seqlens": OFFSETS}),
]
LONG_MASK = [[1] * 40 + [0] * 2060, [0] * 2100]
FOUR_TOKENS_MASK = [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]


def head_sample(
    pooling: str = "max",
    hidden: Shape = HIDDEN,
    vocab: int = 40,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> Sample:
    """A call of :func:`tilefold.ops.lsr_head` with a weight ``[vocab, D]`` and a bias."""
    shapes = (hidden, (vocab, hidden[-1]), (vocab,))
    return Sample("lsr_head", lsr_head, shapes, {"pooling": pooling, **options}, dtype)


def repeated(sample: Sample, *launches: int) -> RepeatedCall:
    """A call with each kind of options, which launches one of these numbers of kernels."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"activation": "softplus"},
        {"logit_scale": 0.5},
        {"logit_scale": 1},
    )
    return RepeatedCall(sample, launches, options)


def head_of_quantized_weight(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return lsr_head(hidden, quantize_weight(weight), **options)


def compacted_counts(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    """Return the numbers of entries of compacted rows, or dense scores if there are no rows."""
    rows = lsr_head_rows(hidden, weight, capacity=40, impl=impl)
    return lsr_head(hidden, weight, impl=impl) if rows is None else rows.counts


SCREENED = Sample(
    "lsr_head",
    lsr_head,
    ((32, 512, 768), (32768, 768)),
    {"screen": True},
    dtype=BF16,
    inference=True,
)
QUANTIZED = Sample(
    "lsr_head with an fp8 weight",
    head_of_quantized_weight,
    ((2, 16, 16), (40, 16)),
    inference=True,
)
COMPACTED = Sample(
    "lsr_head's compaction of rows",
    compacted_counts,
    ((2, 16, 16), (40, 16)),
    inference=True,
)
KERNELS = {
    "compact.append_kernel": KernelCase(COMPACTED, compiles=False, tiled_equivalent=False),
    "max_backward.count_kernel": KernelCase(head_sample()),
    "max_backward.dhidden_kernel": KernelCase(head_sample()),
    "max_backward.dweight_kernel": KernelCase(head_sample("max", PADDED, attention_mask=MASK)),
    "max_backward.list_kernel": KernelCase(head_sample("max", PACKED, cu_seqlens=OFFSETS)),
    "max_forward.combine_kernel": KernelCase(
        head_sample("max", (512, 16), vocab=16, cu_seqlens=[0, 300, 300, 512]),
    ),
    "max_forward.max_forward_kernel": KernelCase(head_sample()),
    "max_forward_hopper.max_forward_hopper_kernel": KernelCase(
        head_sample(dtype=BF16),
        hopper_only=True,
    ),
    "one_token.find_kernel": KernelCase(
        head_sample("cls", (2, 2100, 16), attention_mask=LONG_MASK),
    ),
    "one_token.forward_kernel": KernelCase(head_sample("last")),
    "one_token.split_gradient_kernel": KernelCase(
        head_sample("last", PACKED, cu_seqlens=OFFSETS),
    ),
    "one_token.store_rows_kernel": KernelCase(head_sample("cls")),
    "one_token.weight_gradient_kernel": KernelCase(head_sample("cls")),
    "pack.copy_packed_kernel": KernelCase(head_sample("max", PACKED, cu_seqlens=OFFSETS)),
    "pack.copy_padded_kernel": KernelCase(head_sample("max", PADDED, attention_mask=MASK)),
    "pack.count_kernel": KernelCase(head_sample("max", (2, 2100, 16), attention_mask=LONG_MASK)),
    "quantize.quantize_rows_kernel": KernelCase(QUANTIZED, compiles=False),
    "screen.largest_kernel": KernelCase(SCREENED, hopper_only=True),
    "screen.list_kernel": KernelCase(SCREENED, hopper_only=True),
    "screen.refine_kernel": KernelCase(SCREENED, hopper_only=True),
    "screen.round_kernel": KernelCase(SCREENED, hopper_only=True),
    "screen.sample_kernel": KernelCase(SCREENED, hopper_only=True),
    "screen_hopper.screen_hopper_kernel": KernelCase(SCREENED, hopper_only=True),
    "sum_pooling.check_offsets_kernel": KernelCase(head_sample("sum", PACKED, cu_seqlens=OFFSETS)),
    "sum_pooling.dlogits_kernel": KernelCase(head_sample("mean", PADDED, attention_mask=MASK)),
    "sum_pooling.sum_forward_kernel": KernelCase(head_sample("sum")),
}

REPEATED = {
    "lsr_head": repeated(head_sample(), 5),
    "lsr_head masked": repeated(head_sample("max", PADDED, attention_mask=MASK), 6),
    "lsr_head packed": repeated(head_sample("max", PACKED, cu_seqlens=OFFSETS), 6, 7),
    "lsr_head sum": repeated(head_sample("sum"), 5),
    "lsr_head mean, masked": repeated(  # few rows, or many
        head_sample("mean", PADDED, attention_mask=MASK),
        2,
        5,
    ),
    "lsr_head cls, masked": repeated(head_sample("cls", PADDED, attention_mask=MASK), 4),
    "lsr_head last": repeated(head_sample("last"), 4),
    "lsr_head last, packed": repeated(head_sample("last", PACKED, cu_seqlens=OFFSETS), 4),
}

WEIGHT = torch.zeros(5, 4)
BIAS = torch.zeros(5)
ROWS_OF_SIX = torch.ones(6, 8)


def typed_calls() -> list[TypedCall]:
    hidden = torch.zeros(2, 3, 4)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    calls = []
    for function in (lsr_head, lsr_head_sparse):
        weights = {"weight": WEIGHT, "bias": BIAS}
        padded = {"hidden": hidden, **weights}
        packed = {"hidden": hidden.flatten(0, 1), **weights}
        mask = torch.ones(2, 3)
        calls.append(TypedCall(function, padded, {"attention_mask": mask}, ("weight",)))
        calls.append(TypedCall(function, packed, {"cu_seqlens": ends}, ("weight",)))
    return calls


def offset_call(pooling: str) -> OffsetCall:
    weight = torch.ones(3, 8)

    def call(offsets: Tensor, impl: str) -> Tensor:
        return lsr_head(ROWS_OF_SIX, weight, cu_seqlens=offsets, pooling=pooling, impl=impl)

    return OffsetCall("cu_seqlens", "rows", "hidden", call)


def head_of(x: Tensor, impl: str, **options: Any) -> Tensor:
    """The head with a fixed weight ``[3, 8]``."""
    weight = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    return lsr_head(x, weight, impl=impl, **options)


def growing_padded(pooling: str) -> GrowingCall:
    def sample(count: int, length: int) -> Sample:
        mask = (torch.arange(count * length).view(count, length) % 5).tolist()
        return head_sample(pooling, (count, length, 16), logit_scale=0.5, attention_mask=mask)

    return GrowingCall(sample, compilations=2)


def growing_packed(pooling: str) -> GrowingCall:
    def sample(count: int, length: int) -> Sample:
        offsets = [*range(0, count * length + 1, length)]
        return head_sample(pooling, (count * length, 16), logit_scale=0.5, cu_seqlens=offsets)

    return GrowingCall(sample, compilations=2)


def exact_integer_samples() -> dict[str, Sample]:
    """Calls whose logits, sums and means of small integers are numbers of fp32."""
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    # B, S, D: the number of tokens is a power of two, so that means are exact
    hidden = (4, 256, 192) if on_gpu else (2, 16, 32)
    vocab = 1000 if on_gpu else 40
    samples = {}
    for pooling in ("max", "sum", "mean", "last"):
        for activation, scale in (("none", 0.5), ("relu", 1.0)):
            samples[f"lsr_head {pooling} {activation} {scale}"] = head_sample(
                pooling,
                hidden,
                vocab=vocab,
                activation=activation,
                logit_scale=scale,
            )
    samples["lsr_head max relu screened"] = head_sample(
        "max",
        hidden,
        vocab=vocab,
        activation="relu",
        screen=True,
    )
    return samples


PADDED_BF16: Shape = (3, 33, 64)
PACKED_BF16: Shape = (66, 64)
THREAD_HIDDEN: Shape = (3, 37, 64)
HEADS = [head_sample(pooling, shape, **layout) for pooling in POOLINGS for shape, layout in LAYOUTS]

CONTRACT = OperatorContract(
    name=HEAD.name,
    operator=HEAD,
    repeated=REPEATED,
    repeated_in_interpreter=("lsr_head", "lsr_head last, packed"),
    kernels={f"lsr_head/{name}": case for name, case in KERNELS.items()},
    typed_calls=tuple(typed_calls()),
    offset_calls=tuple(offset_call(pooling) for pooling in POOLINGS),
    unhashable_options={
        lsr_head: ("pooling", "activation", "out_dtype", "impl", "logit_scale"),
    },
    calls={
        "lsr_head": head_of,
        "lsr_head sum": lambda x, impl: head_of(x, impl, pooling="sum"),
        "lsr_head cls": lambda x, impl: head_of(x, impl, pooling="cls"),
    },
    default_calls={
        "lsr_head_sparse": lambda x: lsr_head_sparse(
            x.expand(2, 3, 8),
            x.new_ones(9, 8),
            top_k=3,
        ),
    },
    bf16_calls={
        "lsr_head": lambda x: head_of(x.to(BF16), "triton"),
        "lsr_head cls": lambda x: head_of(x.to(BF16), "triton", pooling="cls"),
        "scores of lsr_head": lambda x: head_of(x, "triton", out_dtype=BF16),
        "fp8 lsr_head": lambda x: lsr_head(x.to(BF16), quantize_weight(x[0]), impl="triton"),
    },
    finite_differences=tuple(
        head_sample(
            pooling,
            (3, 4, 3),
            vocab=5,
            dtype=torch.float64,
            activation=activation,
            logit_scale=-1.5,
            attention_mask=FOUR_TOKENS_MASK,
        )
        for pooling, activation in itertools.product(POOLINGS, ACTIVATIONS)
    ),
    strided={
        f"lsr_head {pooling} {[*layout]}": head_sample(pooling, shape, **layout)
        for pooling, (shape, layout) in itertools.product(("max", "sum", "cls", "last"), LAYOUTS)
    },
    tolerance=1e-6,
    # A mask of another dtype is compiled to sums in another order.
    masked_tolerance={f"lsr_head sum {[*layout]}": 1e-6 for _, layout in LAYOUTS},
    compiled=tuple(HEADS),
    opchecked=(
        replace(HEADS[1], dtype=torch.float16),
        replace(HEADS[2], dtype=BF16, inference=True),
        Sample("lsr_head", head_of_quantized_weight, ((2, 16, 16), (40, 16)), inference=True),
    ),
    growing={
        **{f"lsr_head, {name}, padded": growing_padded(name) for name in ("max", "mean", "last")},
        **{f"lsr_head, {name}, packed": growing_packed(name) for name in ("max", "mean", "last")},
    },
    threads={
        "lsr_head": head_sample("max", THREAD_HIDDEN, vocab=1024, dtype=BF16),
        "lsr_head, sum": head_sample("sum", THREAD_HIDDEN, vocab=1024, dtype=BF16),
        "lsr_head, inference": replace(
            head_sample("max", THREAD_HIDDEN, vocab=1024, dtype=BF16),
            inference=True,
        ),
    },
    captured=(
        *(
            head_sample(pooling, PADDED_BF16, vocab=257, dtype=BF16)
            for pooling in ("max", "sum", "mean", "cls")
        ),
        *(
            head_sample(pooling, PACKED_BF16, vocab=257, dtype=BF16, cu_seqlens=[0, 33, 40, 66])
            for pooling in ("max", "sum")
        ),
    ),
    exact_integers=exact_integer_samples(),
    benchmarks=(("ragged-2pct", {"B": 3, "S": 17, "D": 24, "V": 301}),),
    interpreted_files=(
        "lsr_head/test_calls.py",
        "lsr_head/test_corner_cases.py",
        "lsr_head/test_implementations.py",
        "lsr_head/test_quantized.py",
        "lsr_head/test_screen_kernels.py",
        "lsr_head/test_sparse.py",
        "test_properties.py",
    ),
    interpreted_least=278,
)
