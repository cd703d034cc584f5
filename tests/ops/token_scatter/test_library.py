"""The token scatter as torch operators: opcheck, torch.compile, what is kept and allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tilefold.ops import token_scatter
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.token_scatter import chosen_impl
from tilefold.testing.token_scatter import REDUCTIONS, TokenScatterInputs, token_scatter_inputs

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(inputs: TokenScatterInputs) -> Tensor:
    return inputs.weights.detach().clone().requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("layout", "dtype", "reduce"),
    [("full", torch.float32, "max"), ("right", torch.float16, "sum"), ("packed", torch.float32, "max"),
     ("packed", torch.bfloat16, "sum")],
)  # fmt: skip
def test_operators_pass_opcheck(layout: str, dtype: torch.dtype, reduce: str, device: str) -> None:
    inputs = token_scatter_inputs(5, 12, 21, layout=layout, dtype=dtype, device=device)
    place, impl = (inputs.input_ids, inputs.attention_mask, inputs.cu_seqlens, 21), chosen_impl(inputs.weights)
    options: tuple[Any, ...] = (reduce, "log1p_relu", [0, 3], dtype)
    forward, backward = torch.ops.tilefold.token_scatter, torch.ops.tilefold.token_scatter_backward
    torch.library.opcheck(forward.default, (leaf(inputs), *place, *options, True, impl))
    torch.library.opcheck(forward.default, (inputs.weights, *place, *options, False, impl))
    counted = forward(inputs.weights, *place, *options, True, impl)[1]
    saved = (inputs.weights, inputs.input_ids, counted, inputs.cu_seqlens)
    torch.library.opcheck(backward.default, (inputs.dscores, *saved, 21, *options, [True], impl))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["full", "right", "packed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_public_function_compiles_whole_with_gradients(device: str, reduce: str, layout: str) -> None:
    inputs = token_scatter_inputs(5, 12, 21, layout=layout, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(weights: Tensor, ids: Tensor, **layout: Tensor | None) -> Tensor:
        return token_scatter(2 * weights, ids, 21, reduce=reduce, ignore_ids=[2], **layout) + 1

    mine, theirs = leaf(inputs), leaf(inputs)
    out = compiled(mine, inputs.input_ids, **inputs.layout)
    expected = token_scatter(2 * theirs, inputs.input_ids, 21, reduce=reduce, ignore_ids=[2], **inputs.layout) + 1
    torch.testing.assert_close(out, expected)
    out.backward(inputs.dscores)
    expected.backward(inputs.dscores)
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_other_batch_sizes_and_lengths_do_not_compile_again() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(weights: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return token_scatter(weights, ids, 21, attention_mask=mask)

    for batch, length in ((3, 12), (4, 17), (7, 5)):
        inputs = token_scatter_inputs(batch, length, 21, layout="right")
        expected = token_scatter(*inputs.operands, **inputs.layout)
        torch.testing.assert_close(compiled(inputs.weights, inputs.input_ids, inputs.attention_mask), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_one_byte_a_token_is_kept_for_backward_beside_the_inputs(device: str) -> None:
    inputs = token_scatter_inputs(3, 12, 50_000, layout="right", device=device)
    weights = leaf(inputs)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_scatter(weights, inputs.input_ids, 50_000, **inputs.layout)
    own = [t for t in kept if t.data_ptr() not in (weights.data_ptr(), inputs.input_ids.data_ptr())]
    assert sum(t.numel() * t.element_size() for t in own) == 3 * 12


def test_no_tensor_of_the_size_of_the_membership_is_ever_allocated() -> None:
    batch, length, vocab = 8, 128, 20_000
    inputs = token_scatter_inputs(batch, length, vocab)
    weights = leaf(inputs)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        token_scatter(weights, inputs.input_ids, vocab).backward(inputs.dscores)
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sizes and max(sizes) <= 4 * batch * vocab
