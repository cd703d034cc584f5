"""Contract of ``entmax_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.contracts.contract import (
    KernelCase,
    OffsetCall,
    OperatorContract,
    RepeatedCall,
    TypedCall,
)
from tests.ops.samples import MASK, OFFSETS, Sample
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention.api import ATTENTION

INTERPRETED = triton_interpreted()
PACKED = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
# Keys that take several tiles, which are smaller in the interpreter.
SEVERAL_TILES = 40 if INTERPRETED else 300
LISTED_TILES = 40 if INTERPRETED else 1100


def attend(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None, **options: Any) -> Any:
    """Entmax attention; alpha is learned from ``theta`` if that is given.

    Dropout drops the same weights in every call.
    """
    if "dropout_p" in options:
        options["generator"] = torch.Generator(q.device).manual_seed(0)
    if theta is not None:
        options["alpha"] = 1 + theta.sigmoid()
    return entmax_attention(q, k, v, **options)


def attend_with_statistics(*operands: Tensor, **options: Any) -> Tensor:
    output: Tensor = attend(*operands, return_stats=True, **options)[0]
    return output


def attention_sample(keys: int = 21, learned: bool = False, **options: Any) -> Sample:
    """A call with 7 queries, or with packed sequences; with a learned alpha if ``learned``."""
    if "cu_seqlens_k" in options:
        shapes = [(32, 1, 16)] * 3
    else:
        batch = 2 if "key_padding_mask" in options else 1
        shapes = [(batch, 1, length, 16) for length in (7, keys, keys)]
    if learned:
        shapes.append((1,))
    return Sample("entmax_attention", attend, tuple(shapes), options)


def repeated(sample: Sample, launches: int) -> RepeatedCall:
    options: tuple[dict[str, Any], ...] = ({}, {"scale": 0.3, "window": 5}, {"alpha": 1})
    learned = len(sample.shapes) == 4  # then alpha is no option
    return RepeatedCall(sample, (launches,), options[:2] if learned else options)


def offset_call(side: str) -> OffsetCall:
    """Six keys in all; where the offsets of keys are wrong, those of queries are correct."""
    name = f"cu_seqlens_{side}"
    tokens = torch.ones(6, 1, 8)

    def call(offsets: Tensor, impl: str) -> Any:
        queries, query_offsets = tokens, offsets
        if side == "k":
            sequences = len(offsets) - 1
            query_offsets = torch.tensor([0] + [6] * sequences)
            queries = tokens if sequences > 0 else tokens[:0]
        return entmax_attention(
            queries,
            tokens,
            tokens,
            cu_seqlens_q=query_offsets,
            cu_seqlens_k=offsets,
            impl=impl,
        )

    return OffsetCall(name, "rows", side, call)


def attend_to_itself(x: Tensor, impl: str) -> Any:
    heads = x[None].expand(1, 2, 3, 8)
    return entmax_attention(heads, heads, heads, impl=impl)


def attend_to_fixed_keys(x: Tensor, impl: str) -> Any:
    keys = torch.rand(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    return entmax_attention(x[None], keys, keys, impl=impl)


def attend_in_bf16(x: Tensor) -> Any:
    heads = x[None].to(torch.bfloat16)
    return entmax_attention(heads, heads, heads, impl="triton")


TOKENS = torch.zeros(1, 2, 3, 4)
PACKED_TOKENS = torch.zeros(6, 1, 4)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
PADDED_BF16 = ((3, 33, 2, 32),) * 3
PACKED_BF16 = ((66, 2, 32),) * 3
LONG_HEADS = ((2, 2, 150, 16),) * 3

CONTRACT = OperatorContract(
    name=ATTENTION.name,
    operator=ATTENTION,
    repeated={
        "entmax_attention masked, dropout": repeated(
            attention_sample(key_padding_mask=MASK, dropout_p=0.3),
            3,
        ),
        "entmax_attention packed": repeated(attention_sample(**PACKED), 6),
    },
    repeated_on_gpus={
        "entmax_attention": repeated(attention_sample(), 3),
        "entmax_attention causal, live blocks listed": repeated(
            attention_sample(keys=1100, causal=True),
            6,
        ),
        "entmax_attention, learned alpha": repeated(attention_sample(learned=True), 3),
    },
    repeated_in_interpreter=("entmax_attention packed",),
    kernels={
        "entmax_attention/backward.dkv_kernel": KernelCase(attention_sample()),
        "entmax_attention/backward.dq_kernel": KernelCase(attention_sample(alpha=1.7)),
        "entmax_attention/backward.key_lists_kernel": KernelCase(
            attention_sample(LISTED_TILES, causal=True),
        ),
        "entmax_attention/backward.query_lists_kernel": KernelCase(
            attention_sample(LISTED_TILES, causal=True),
        ),
        "entmax_attention/forward.output_kernel": KernelCase(attention_sample(SEVERAL_TILES)),
        "entmax_attention/forward.resident_kernel": KernelCase(attention_sample()),
        "entmax_attention/tiles.nan_if_broken_kernel": KernelCase(attention_sample(**PACKED)),
        "entmax_attention/tiles.tables_kernel": KernelCase(attention_sample(**PACKED)),
        "entmax_attention/roots.roots_kernel": KernelCase(
            attention_sample(SEVERAL_TILES, alpha=1.7),
        ),
    },
    typed_calls=(
        TypedCall(
            entmax_attention,
            {"q": TOKENS, "k": TOKENS, "v": TOKENS},
            {"key_padding_mask": torch.ones(1, 3)},
        ),
        TypedCall(
            entmax_attention,
            {"q": PACKED_TOKENS, "k": PACKED_TOKENS, "v": PACKED_TOKENS},
            {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS},
        ),
    ),
    offset_calls=(offset_call("q"), offset_call("k")),
    calls={"entmax_attention": attend_to_fixed_keys},
    whole_calls={"entmax_attention": lambda x: entmax_attention(x, x, x)},
    default_calls={
        "entmax_attention": lambda x: attend_to_itself(x, "auto"),
        "reference of entmax_attention": lambda x: attend_to_itself(x, "reference"),
    },
    bf16_calls={"entmax_attention": attend_in_bf16},
    finite_differences=tuple(
        Sample(
            "entmax_attention",
            attend,
            ((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3), (2,)),
            {"causal": True, "impl": impl},
            torch.float64,
        )
        for impl in ("reference", "tiled")
    ),
    masked={
        "entmax_attention ['key_padding_mask']": attention_sample(key_padding_mask=MASK),
        "entmax_attention ['cu_seqlens_q', 'cu_seqlens_k']": attention_sample(**PACKED),
    },
    compiled=(
        attention_sample(causal=True),
        attention_sample(learned=True, key_padding_mask=MASK),
    ),
    opchecked=(
        Sample(
            "entmax_attention",
            attend_with_statistics,
            LONG_HEADS,
            {"causal": True, "scale": 0.25},
        ),
        Sample(
            "entmax_attention",
            attend_with_statistics,
            (*LONG_HEADS, (2,)),
            {"key_padding_mask": [[1, 0] * 75, [0] * 150]},
        ),
        attention_sample(**PACKED),
    ),
    threads={
        "entmax_attention": Sample(
            "entmax_attention",
            attend,
            ((2, 2, 37, 64),) * 3,
            dtype=torch.bfloat16,
        ),
    },
    captured=(
        Sample("entmax_attention", attend, PADDED_BF16, dtype=torch.bfloat16),
        Sample(
            "entmax_attention",
            attend,
            PACKED_BF16,
            {"cu_seqlens_q": [0, 33, 40, 66], "cu_seqlens_k": [0, 33, 40, 66], "max_seqlen_k": 33},
            dtype=torch.bfloat16,
        ),
    ),
    benchmarks=(
        ("iid", {"B": 1, "H": 2, "N": 40, "D": 16}),
        ("correlated-causal", {"B": 1, "H": 2, "N": 40, "D": 16}),
    ),
    interpreted_files=(
        "entmax_attention/test_implementations.py",
        "entmax_attention/test_corner_cases.py",
        "entmax_attention/test_calls.py",
    ),
    interpreted_least=97,
)
