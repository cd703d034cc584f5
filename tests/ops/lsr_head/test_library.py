"""The LSR head as torch operators: opcheck, torch.compile, autocast, inference mode, second derivatives, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.ops.lsr_head.helpers import F16, F32, F64, INTERPRETED, POOLINGS, leaves_of
from tilefold.ops import lsr_head, quantize_weight
from tilefold.ops.lsr_head import _problem, chosen_impl
from tilefold.testing import assert_within_budget
from tilefold.testing.lsr_head import lsr_head_inputs, lsr_head_results, lsr_head_truth, with_one_answer

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def op_samples(device: str) -> list[tuple[str, str, tuple[Any, ...]]]:
    """(name, case, arguments) for every operator that the LSR head registers.

    Each pooling and each layout meets every choice of gradients, but not all three of them each other.
    """
    samples: list[tuple[str, str, tuple[Any, ...]]] = []
    forward = torch.ops.tilefold.lsr_head
    layouts = (("full", F32), ("right", F16), ("packed", F32))
    for (row, pooling), (column, (layout, dtype)) in itertools.product(enumerate(POOLINGS), enumerate(layouts)):
        inputs = lsr_head_inputs(5, 9, 16, 21, layout=layout, dtype=dtype, device=device)
        options, impl = (pooling, "softplus", 0.5, dtype, dtype, dtype), chosen_impl(inputs.hidden)
        hidden, weight, bias = leaves_of(inputs)
        place, case = (inputs.attention_mask, inputs.cu_seqlens), f"{pooling}-{layout}-{dtype}"
        samples.append(("lsr_head", case, (hidden, *place, weight, None, bias, *options, True, impl)))
        plain = (inputs.hidden, *place, inputs.weight, None, inputs.bias)
        with torch.no_grad():
            results = forward(*plain, *options, True, impl)
        names = ("hidden", "attention_mask", "cu_seqlens", "weight", "bias", "scores", "winners")
        values = zip(names, (*plain[:4], inputs.bias, *results), strict=True)
        saved = [value if name in _problem.POOLINGS[pooling].reads else None for name, value in values]
        needs = ([True, True, True], [False, True, False], [True, False, False])[(row + column) % 3]
        back = (inputs.dscores, *saved, *options, needs, impl)
        samples.append(("lsr_head_backward", f"{case}-{needs}", back))
        if pooling == "max":
            rounded = quantize_weight(inputs.weight)
            quantized = (inputs.hidden, *place, rounded.values, rounded.scale, inputs.bias, *options, False, "auto")
            samples.append(("lsr_head", f"fp8-{case}", quantized))
    return samples


def test_every_registered_operator_has_a_sample() -> None:
    prefix = "tilefold::"
    names = [str(name) for name in torch._C._dispatch_get_all_op_names()]
    ours = {n.removeprefix(prefix).split(".")[0] for n in names if n.startswith(prefix)}
    ours = {name for name in ours if name.startswith("lsr_head")}
    assert ours == {name for name, _, _ in op_samples("cpu")}


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    for name, case, arguments in op_samples(device):
        operator = getattr(torch.ops.tilefold, name).default
        # the schema check compares inputs by arithmetic that fp8 does not have
        checks = ("test_faketensor", "test_aot_dispatch_dynamic") if case.startswith("fp8") else ALL_CHECKS
        try:
            torch.library.opcheck(operator, arguments, test_utils=checks)
        except Exception as error:
            raise AssertionError(f"tilefold::{name} fails opcheck for {case}: {error}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_transposed_operands_have_the_strides_that_the_fake_kernels_promise(device: str) -> None:
    for layout in ("right", "packed"):
        inputs = lsr_head_inputs(5, 9, 16, 24, layout=layout, device=device)
        hidden = inputs.hidden.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        weight = inputs.weight.T.contiguous().T.requires_grad_()
        place = (inputs.attention_mask, inputs.cu_seqlens)
        for pooling in POOLINGS:
            options = (pooling, "relu", 1.0, F32, F32, None, True, chosen_impl(hidden))
            torch.library.opcheck(torch.ops.tilefold.lsr_head.default, (hidden, *place, weight, None, None, *options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["full", "right", "packed"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_public_function_compiles_whole_with_gradients(device: str, pooling: str, layout: str) -> None:
    inputs = lsr_head_inputs(5, 9, 16, 21, layout=layout, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(hidden: Tensor, weight: Tensor, bias: Tensor | None, **layout: Tensor | None) -> Tensor:
        return lsr_head(2 * hidden, weight, bias, pooling=pooling, **layout) + 1

    with torch.no_grad():
        operands = (inputs.hidden, inputs.weight, inputs.bias)
        expected = lsr_head(2 * inputs.hidden, *operands[1:], pooling=pooling, **inputs.layout) + 1
        torch.testing.assert_close(compiled(*operands, **inputs.layout), expected)
    mine, theirs = leaves_of(inputs), leaves_of(inputs)
    compiled(*mine, **inputs.layout).backward(inputs.dscores)
    (lsr_head(2 * theirs[0], *theirs[1:], pooling=pooling, **inputs.layout) + 1).backward(inputs.dscores)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("device", DEVICES)
def test_inductor_compiles_the_head_between_other_operations(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its usual cache may hold code for the instructions of another run's (emulated) CPU, which then gives NaN
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # four small kernels are built sooner than the headers that they would share, or than trials of each instruction set
    for config, name, value in (
        (torch._inductor.config, "cpp_cache_precompile_headers", False),
        (torch._inductor.config.cpp, "vec_isa_ok", True),
    ):
        monkeypatch.setattr(config, name, value, raising=False)
    inputs = lsr_head_inputs(3, 9, 16, 21, layout="right", device=device)

    @torch.compile(fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scores = lsr_head(torch.nn.functional.gelu(hidden), weight, bias, **inputs.layout)
        return (scores.mean(dim=0) ** 2).sum()

    mine, theirs = leaves_of(inputs), leaves_of(inputs)
    loss(*mine).backward()
    scores = lsr_head(torch.nn.functional.gelu(theirs[0]), *theirs[1:], **inputs.layout)
    (scores.mean(dim=0) ** 2).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize("pooling", ["max", "mean", "last"])
def test_batches_of_other_sizes_reuse_one_dynamic_graph(pooling: str, layout: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(hidden: Tensor, weight: Tensor, bias: Tensor, scale: float, **layout: Tensor | None) -> Tensor:
        return lsr_head(hidden, weight, bias, pooling=pooling, logit_scale=scale, **layout)

    for batch, length in ((3, 8), (5, 13), (6, 21), (9, 40)):
        inputs = lsr_head_inputs(batch, length, 16, 21, layout=layout)
        hidden, weight, bias = leaves_of(inputs)
        out = compiled(hidden, weight, bias, 0.5, **inputs.layout)
        out.backward(inputs.dscores)
        expected = lsr_head_results(inputs, pooling=pooling, logit_scale=0.5)
        torch.testing.assert_close(out.detach(), expected["scores"])
        torch.testing.assert_close(weight.grad, expected["dweight"])
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for four shapes"


def test_a_changing_scale_does_not_break_the_graph() -> None:
    inputs = lsr_head_inputs(3, 8, 16, 21)
    compiled = torch.compile(lsr_head, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 0.5, 0.25, 0.125):
        expected = lsr_head(inputs.hidden, inputs.weight, logit_scale=scale)
        torch.testing.assert_close(compiled(inputs.hidden, inputs.weight, logit_scale=scale), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_autocast_sets_the_dtype_of_scores_and_leaves_gradients_that_of_their_parameters(
    pooling: str, device: str, dtype: torch.dtype
) -> None:
    inputs = with_one_answer(
        lsr_head_inputs(5, 9, 16, 21, layout="right", device=device).cast(dtype).cast(F32), pooling
    )
    hidden = inputs.hidden.to(dtype).requires_grad_()  # what layers before the head hand out under autocast
    _, weight, bias = leaves_of(inputs)
    with torch.autocast(device, dtype=dtype):
        scores = lsr_head(hidden, weight, bias, pooling=pooling, **inputs.layout)
    scores.backward(inputs.dscores.to(dtype))
    assert scores.dtype == dtype
    truth = lsr_head_truth(inputs, pooling=pooling)
    assert_within_budget(scores, truth["scores"])
    for name, leaf, kind in (("dhidden", hidden, dtype), ("dweight", weight, F32), ("dbias", bias, F32)):
        assert leaf.grad.dtype == kind
        assert_within_budget(leaf.grad, truth[name], dtype, "gradient_bound", name=name)


def test_autocast_leaves_fp64_alone() -> None:
    inputs = lsr_head_inputs(2, 3, 8, 5, dtype=F64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lsr_head(inputs.hidden, inputs.weight).dtype == F64


@pytest.mark.parametrize("pooling", POOLINGS)
def test_inference_mode_gives_the_scores_of_training(pooling: str) -> None:
    inputs = lsr_head_inputs(5, 9, 16, 21, layout="right")
    hidden, weight, bias = leaves_of(inputs)
    with torch.inference_mode():
        scores = lsr_head(hidden, weight, bias, pooling=pooling, **inputs.layout)
    assert scores.is_inference()
    assert torch.equal(scores, lsr_head(hidden, weight, bias, pooling=pooling, **inputs.layout))


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_no_tensor_of_the_size_of_the_logits_is_ever_allocated(pooling: str) -> None:
    batch, length, vocab = 8, 128, 20_000  # 82 MB of logits in fp32
    inputs = lsr_head_inputs(batch, length, 32, vocab, layout="right")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        lsr_head_results(inputs, pooling=pooling)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert allocated, "the profiler saw no allocation"
    logits = 4 * batch * length * vocab
    assert max(allocated) <= logits / 8
    assert max(itertools.accumulate(allocated)) <= logits / 2
