"""Public functions compile whole, once for batches of all sizes; their registered operators pass
opcheck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import triton_interpreted
from tests.ops.samples import (
    LAYOUTS,
    MASK,
    OFFSETS,
    Sample,
    attend,
    attention,
    dout,
    head,
    late,
    paired,
    quantized_documents,
    quantized_head,
    rows,
    scatter,
    scattered,
    searched,
)
from tilefold.ops import (
    QuantizedWeight,
    lsr_head,
    maxsim,
    quantize_tokens,
    quantize_weight,
    xtr_scores,
)
from tilefold.testing.maxsim import PAIRINGS

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
POOLINGS = ("max", "sum", "mean", "cls", "last")
SCATTERS = [
    scatter(reduce=reduce, ignore_ids=(2,), **layout)
    for reduce in ("max", "sum")
    for _, layout in LAYOUTS
]
HEADS = [head(pooling, *shape, **layout) for pooling in POOLINGS for shape, layout in LAYOUTS]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


SMOOTH = {"temperature": 0.5, "reduction": "mean", "normalize": True}
LATE = {
    (pairing, layout): [paired(pairing, layout), paired(pairing, layout, **SMOOTH)]
    for pairing in PAIRINGS
    for layout in ("full", "holes", "packed")
}
LENGTHS = LATE.pop(("index", "packed"))  # whose longest query is a value
XTR = Sample(
    "xtr_scores",
    xtr_scores,
    ((3, 5, 16), (4, 9, 16)),
    {"top_k": 7, "document_mask": [[1] * 8 + [0]] * 4},
)
CALLS = [
    rows(),
    rows((1,)),
    attention(causal=True),
    attention(learned=True, key_padding_mask=MASK),
    XTR,
]
CALLS += [*SCATTERS, *HEADS, *(sample for samples in LATE.values() for sample in samples)]


def named(sample: Sample) -> str:
    return f"{sample.name} {[*sample.options]}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", CALLS, ids=named)
def test_a_public_function_compiles_whole_with_gradients(sample: Sample, device: str) -> None:
    given = sample.given(device)

    def loss(*leaves: Tensor) -> Tensor:
        scores: Tensor = sample.function(*(2 * leaf for leaf in leaves), **given)
        return ((scores + 1) ** 2).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = sample.leaves(device)
        with torch.no_grad():
            alone = function(*leaves)
        function(*leaves).backward()
        results.append([alone, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


QUANTIZED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any]]] = {
    "lsr_head": (
        lambda x, weight: lsr_head(x, QuantizedWeight(weight.values, weight.scale)),
        quantize_weight,
    ),
    "maxsim": (maxsim, quantize_tokens),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_functions_of_quantized_operands_compile_whole(name: str, device: str) -> None:
    function, quantize = QUANTIZED[name]
    x, other = torch.randn(3, 16, 32, device=device), torch.randn(40, 32, device=device)
    operand = quantize(other if name == "lsr_head" else other.view(4, 10, 32))
    assert torch.equal(
        torch.compile(function, fullgraph=True, backend="aot_eager")(x, operand),
        function(x, operand),
    )


class Seen(TorchDispatchMode):
    """Calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilefold":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def operator_calls(
    sample: Sample,
    device: str,
    turned: bool = False,
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Operators that calls of a function make, with a gradient of all leaves, of the first, and of
    the second.
    """
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    count = len(sample.shapes)
    for needed in ([True] * count, [i == 0 for i in range(count)], [i == 1 for i in range(count)]):
        leaves = [
            leaf.detach().requires_grad_(need and not sample.inference)
            for leaf, need in zip(sample.leaves(device), needed, strict=True)
        ]
        if turned:
            leaves = [
                x.transpose(0, -1).contiguous().transpose(0, -1).detach().requires_grad_()
                for x in leaves
            ]
        with Seen() as seen:
            scores = sample.function(*leaves, **sample.given(device))
            if scores.requires_grad:
                scores.backward(dout(scores))
        for func, args in seen.calls:
            backward = func._opname.endswith("_backward")
            plain = [
                x.detach().requires_grad_(x.requires_grad and not backward)
                if isinstance(x, Tensor)
                else x
                for x in args
            ]
            found.setdefault(f"{func} {needed if backward else None}", (func, tuple(plain)))
    return list(found.values())


def counted(*operands: Tensor, **options: Any) -> Tensor:
    out: Tensor = attend(*operands, return_stats=True, **options)[0]
    return out


HEADS_OF_TWO = ((2, 2, 150, 16),) * 3
OPERATORS = [*CALLS, *LENGTHS, replace(XTR, options=XTR.options | {"impute": True}, inference=True)]
OPERATORS += [replace(sample, dtype=torch.float16) for sample in (HEADS[1], SCATTERS[4])]
OPERATORS += [
    replace(sample, dtype=torch.bfloat16, inference=True) for sample in (HEADS[2], SCATTERS[5])
]
OPERATORS += [
    Sample("entmax_attention", counted, HEADS_OF_TWO, {"causal": True, "scale": 0.25}),
    Sample(
        "entmax_attention",
        counted,
        (*HEADS_OF_TWO, (2,)),
        {"key_padding_mask": [[1, 0] * 75, [0] * 150]},
    ),
    attention(cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS),
    Sample("lsr_head", quantized_head, ((2, 16, 16), (40, 16)), inference=True),
    Sample("maxsim", quantized_documents, ((3, 5, 16), (4, 9, 16)), inference=True),
    Sample("sparse_topk", searched, ((2, 7),), inference=True),
]


def checks_of(args: tuple[Any, ...]) -> tuple[str, ...]:
    """All, but that of the schema compares inputs by arithmetic that fp8 does not have."""
    some = ("test_faketensor", "test_aot_dispatch_dynamic")
    fp8 = any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
    return some if fp8 else (*some, "test_schema", "test_autograd_registration")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", OPERATORS, ids=named)
def test_operators_pass_opcheck(sample: Sample, device: str) -> None:
    calls = operator_calls(sample, device)
    if "lsr_head" in sample.name and not sample.inference:
        calls += operator_calls(sample, device, turned=True)[:1]
    for func, args in calls:
        torch.library.opcheck(func, args, test_utils=checks_of(args))


def test_every_registered_operator_is_checked() -> None:
    names = {str(name).split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    seen = {func._schema.name for sample in OPERATORS for func, _ in operator_calls(sample, "cpu")}
    assert seen == {name for name in names if name.startswith("tilefold::") and "toy" not in name}


def holes(count: int, length: int) -> list[list[int]]:
    return (torch.arange(count * length).view(count, length) % 5).tolist()


def ends(count: int, length: int) -> list[int]:
    return [*range(0, count * length + 1, length)]


def a_head(pooling: str, packed: bool) -> Callable[[int, int], Sample]:
    def sample(count: int, length: int) -> Sample:
        if packed:
            return head(
                pooling,
                count * length,
                16,
                logit_scale=0.5,
                cu_seqlens=ends(count, length),
            )
        return head(
            pooling,
            count,
            length,
            16,
            logit_scale=0.5,
            attention_mask=holes(count, length),
        )

    return sample


def a_scatter(count: int, length: int) -> Sample:
    ids = (torch.arange(count * length).view(count, length) * 7 % 40).tolist()
    given = {"input_ids": ids, "attention_mask": holes(count, length)}
    return Sample("token_scatter", scattered, ((count, length),), given)


GROWING: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    **{
        f"lsr_head, {pooling}, {packed}": (a_head(pooling, packed == "packed"), 2)
        for pooling in ("max", "mean", "last")
        for packed in ("padded", "packed")
    },
    "maxsim": (lambda n, length: late((n, 4, 16), (n + 1, length, 16)), 2),
    "maxsim, packed": (
        lambda n, length: late(
            (4 * n, 16),
            (length * n + length, 16),
            cu_seqlens_q=ends(n, 4),
            cu_seqlens_d=ends(n + 1, length),
        ),
        2,
    ),
    "token_scatter": (a_scatter, 1),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", GROWING)
def test_batches_of_other_sizes_reuse_one_dynamic_graph(name: str) -> None:
    make, most = GROWING[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make(3, 8).function, fullgraph=True, dynamic=True, backend=counter)
    for count, length in ((3, 8), (5, 13), (6, 21), (9, 40)):
        sample = make(count, length)
        leaves, given = sample.leaves("cpu"), sample.given("cpu")
        results = []
        for call in (compiled, sample.function):
            scores = call(*leaves, **given)
            results.append([scores, *torch.autograd.grad(scores.sum(), leaves)])
        torch.testing.assert_close(*results)
    assert counter.frame_count <= most, f"{counter.frame_count} compilations for four shapes"
