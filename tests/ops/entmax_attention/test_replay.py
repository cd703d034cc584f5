"""Calls like one that was seen: what is kept of it spares work and changes nothing, neither results nor errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.ops.conftest import Target
from tilefold.ops import entmax_attention
from tilefold.ops._shared import call_cache
from tilefold.ops._shared.impl import triton_installed, triton_interpreted
from tilefold.ops.entmax_attention import _torch_ops
from tilefold.testing.entmax_attention import (
    EntmaxAttentionInputs,
    assert_entmax_attention_matches,
    entmax_attention_inputs,
    entmax_attention_results,
)

INTERPRETED = triton_interpreted()
SHORT = 10
no_interpreter = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter, or what it cannot do")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for cache in (_torch_ops.CALLS, _torch_ops._BACKWARD):
        cache._plans.clear()


def long(target: Target) -> int:
    """A length whose live blocks the kernels list."""
    return 34 if INTERPRETED or target.device == "cpu" else 1100


def problem(target: Target, n: int = SHORT, seed: int = 0, **options: Any) -> EntmaxAttentionInputs:
    sizes: dict[str, Any] = {"kv_heads": 1, "dtype": torch.float32} | options
    batch = 2 if "layout" in options or not INTERPRETED else 1
    return entmax_attention_inputs(batch, 2, n, 16, device=target.device, seed=seed, **sizes)


def assert_replayed(
    target: Target, first: EntmaxAttentionInputs, second: EntmaxAttentionInputs, **options: Any
) -> None:
    """``second`` gives the same bits after a call like it as it gives afresh."""
    entmax_attention_results(first, impl=target.impl, **options)
    assert (len(_torch_ops.CALLS) == 1) == (target.impl == "triton"), (
        "the first call was not kept, or the second is new"
    )
    replayed = entmax_attention_results(second, impl=target.impl, **options)
    assert len(_torch_ops.CALLS) <= 1, "the second call is not like the first"
    forget()
    afresh = entmax_attention_results(second, impl=target.impl, **options)
    assert replayed.keys() == afresh.keys()
    for name, value in afresh.items():
        assert value.stride() == replayed[name].stride(), name
        torch.testing.assert_close(replayed[name], value, rtol=0, atol=0, equal_nan=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window": 5, "scale": 0.3},
    {"alpha": 1.3},
    {"dropout_p": 0.3},
    {"needs": ("v",)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_values_after_a_call_like_it(target: Target, options: dict[str, Any]) -> None:
    if INTERPRETED and options and "dropout_p" not in options:
        pytest.skip("interpreting takes seconds a case")
    for n in (SHORT, long(target)) if not (INTERPRETED and options) else (SHORT,):
        forget()
        assert_replayed(target, problem(target, n), problem(target, n, seed=1), **options)


@pytest.mark.parametrize("layout", ["holes", "packed"])
def test_another_mask_and_other_lengths_of_the_same_shapes(target: Target, layout: str) -> None:
    first = problem(target, layout=layout)
    second = problem(target, layout=layout)
    for name, tensor in second.layout.items():
        if layout == "holes":
            second.layout[name] = tensor.flip(1)
        else:
            second.layout[name] = torch.cat([tensor[:1], tensor[1:-1] - 1, tensor[-1:]])
        assert not torch.equal(second.layout[name], first.layout[name])
    assert_replayed(target, first, second)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32], ids=str)
def test_masks_of_every_dtype_mean_the_same(target: Target, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype not in (torch.int8, torch.int64):
        pytest.skip("interpreting takes seconds a case")
    inputs = problem(target, layout="holes")
    mask = inputs.layout["key_padding_mask"]
    out = entmax_attention(inputs.q, inputs.k, inputs.v, key_padding_mask=mask, impl=target.impl)
    other = (mask * (-3 if dtype.is_signed else 2)).to(dtype)
    for given in (other, other.T.contiguous().T):
        assert torch.equal(
            out, entmax_attention(inputs.q, inputs.k, inputs.v, key_padding_mask=given, impl=target.impl)
        )


def laid_out(tensor: Tensor, how: str) -> Tensor:
    if how == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "part of a wider one":
        return torch.cat([tensor, tensor], dim=-1)[..., : tensor.size(-1)]
    if how == "last dimension apart":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if how == "last dimension first":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)  # begins at no 16 bytes


@pytest.mark.parametrize(
    "how", ["tokens first", "part of a wider one", "last dimension apart", "last dimension first", "beside 16 bytes"]
)
def test_other_strides_and_addresses_are_other_calls(target: Target, how: str) -> None:
    if INTERPRETED and how not in ("tokens first", "last dimension first"):
        pytest.skip("interpreting takes seconds a case")
    inputs = problem(target)
    plain = entmax_attention_results(inputs, impl=target.impl)
    q, k, v = (laid_out(tensor, how) for tensor in (inputs.q, inputs.k, inputs.v))
    strange = EntmaxAttentionInputs(q, k, v, laid_out(inputs.dout, how), {})
    found = assert_entmax_attention_matches(strange, impl=target.impl)  # other strides may add up in another order
    again = entmax_attention_results(strange, impl=target.impl)
    assert all(torch.equal(again[name], value) for name, value in found.items())
    assert again["out"].stride() == torch.empty_like(q).stride()
    assert again["dk"].stride() == torch.empty_like(k).stride()
    assert torch.equal(entmax_attention_results(inputs, impl=target.impl)["dq"], plain["dq"])


def test_alphas_are_read_at_every_call(target: Target) -> None:
    first, second = (torch.tensor(values, device=target.device) for values in ([1.2, 1.6], [1.9, 1.0]))
    inputs = problem(target)
    entmax_attention_results(inputs, impl=target.impl, alpha=first)
    replayed = entmax_attention_results(inputs, impl=target.impl, alpha=second)
    forget()
    afresh = entmax_attention_results(inputs, impl=target.impl, alpha=second)
    for name, value in afresh.items():
        torch.testing.assert_close(replayed[name], value, rtol=0, atol=0, equal_nan=True)
    constant = entmax_attention(inputs.q, inputs.k, inputs.v, alpha=second, impl=target.impl)  # wants no gradient
    assert torch.equal(constant, afresh["out"])


def test_dropout_draws_at_every_call(target: Target) -> None:
    inputs = problem(target)
    outs = [entmax_attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, impl=target.impl) for _ in range(2)]
    assert not torch.equal(*outs)


def test_an_operand_alone_gets_the_gradient_that_it_gets_among_others(target: Target) -> None:
    inputs = problem(target)
    together = entmax_attention_results(inputs, impl=target.impl)
    for needs in (("k",), ("v", "q"), ("k",)):
        found = entmax_attention_results(inputs, impl=target.impl, needs=needs)
        for name in needs:
            assert torch.equal(found[f"d{name}"], together[f"d{name}"]), name


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"alpha": 1.0}, {"alpha": True}, "alpha must be a number in"),
    ({"alpha": 1.5}, {"alpha": [1.5]}, "alpha must be a number in"),
    ({"window": 1}, {"window": True}, "window must be an integer"),
    ({"window": 2}, {"window": 2.0}, "window must be an integer"),
    ({"dropout_p": 0}, {"dropout_p": False}, "dropout_p must be a number"),
    ({"max_seqlen_k": 1}, {"max_seqlen_k": True}, "max_seqlen_k must be an integer"),
    ({}, {"return_stats": "all"}, "return_stats must be one of"),
    ({}, {"impl": "flash"}, "impl must be one of"),
]


@pytest.mark.parametrize(("good", "bad", "text"), WRONG, ids=[str(w[1]) for w in WRONG])
def test_what_equals_a_good_argument_is_no_good_argument(
    target: Target, good: dict[str, Any], bad: dict[str, Any], text: str
) -> None:
    q = torch.randn(1, 1, 4, 16, device=target.device)
    for _ in range(2):
        entmax_attention(q, q, q, **{"impl": target.impl} | good)
        with pytest.raises(ValueError, match=text):
            entmax_attention(q, q, q, **{"impl": target.impl} | bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_something_else_than_a_tensor_is_named_under_autocast_too(target: Target, dtype: torch.dtype) -> None:
    q: Any = torch.randn(1, 1, 4, 16, device=target.device).to(dtype)
    with torch.autocast(torch.device(target.device).type, dtype=torch.bfloat16):
        for wrong in ((None, q, q), (q, None, q), (q, q, [q])):
            with pytest.raises(TypeError, match=r"[qkv] must be a torch.Tensor, got"):
                entmax_attention(*wrong, impl=target.impl)


def test_values_are_checked_at_every_call_where_the_host_may_look(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("looking would wait for the device")
    q, rows = torch.randn(1, 2, 4, 16), torch.randn(4, 2, 16)
    entmax_attention(q, q, q, alpha=torch.tensor([1.2, 2.0]), impl=target.impl)
    with pytest.raises(ValueError, match=r"alpha must lie in \[1, 2\]"):
        entmax_attention(q, q, q, alpha=torch.tensor([1.2, 2.1]), impl=target.impl)
    good, bad = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 2])
    entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, impl=target.impl)
    with pytest.raises(ValueError, match="cu_seqlens_k must start with 0"):
        entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=bad, impl=target.impl)


def test_broken_offsets_of_a_gpu_make_everything_nan_at_every_call(target: Target) -> None:
    if target.device == "cpu" or target.impl != "triton":
        pytest.skip("the host looks")
    rows = torch.randn(100, 2, 16, device=target.device)
    good = torch.tensor([0, 40, 100], device=target.device)
    for _ in range(2):
        for bad in ([0, 40, 99], [1, 40, 100], [0, 120, 100]):
            wrong = torch.tensor(bad, device=target.device)
            for pair in ((wrong, good), (good, wrong)):
                out = entmax_attention(rows, rows, rows, cu_seqlens_q=pair[0], cu_seqlens_k=pair[1])
                assert isinstance(out, Tensor) and bool(out.isnan().all())
        for bound, broken in ((59, True), (60, False), (None, False)):  # the longest has 60 keys
            out = entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, max_seqlen_k=bound)
            assert isinstance(out, Tensor) and bool(out.isnan().all()) == broken == bool(out.isnan().any())


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0, 2**32 + 20]),  # cut to 32 bits these two describe the rows
        torch.tensor([0, 7 - 2**32, 20]),
        torch.tensor([0, 2**31 - 1, -2, 20], dtype=torch.int32),  # in 32 bits no difference is negative
    ],
    ids=["too large", "too small", "wraps"],
)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_offsets_beyond_32_bits_give_nan_and_no_plausible_number(
    target: Target, monkeypatch: pytest.MonkeyPatch, bad: Tensor, side: str
) -> None:
    if target.impl != "triton":
        pytest.skip("the host looks")
    # on the CPU too it must not look, as it does not on a GPU
    monkeypatch.setattr(_torch_ops, "check_values", lambda *arguments: None)
    rows = torch.randn(20, 1, 16, device=target.device, requires_grad=True)
    good = torch.arange(bad.numel()).clamp(max=1) * 20
    cu_q, cu_k = (bad if side in (name, "both") else good for name in "qk")
    offsets = {"cu_seqlens_q": cu_q.to(target.device), "cu_seqlens_k": cu_k.to(target.device)}
    out = entmax_attention(rows, rows, rows, impl=target.impl, **offsets)
    assert isinstance(out, Tensor) and bool(out.isnan().all())
    out.sum().backward()  # reads nothing elsewhere


def test_a_second_derivative_is_an_error_after_any_number_of_calls(target: Target) -> None:
    q = torch.randn(1, 1, 4, 16, device=target.device, requires_grad=True)
    for _ in range(2):
        out = entmax_attention(q, q, q, impl=target.impl)
        (first,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"entmax_attention can be differentiated once.*impl='reference'"):
            first.sum().backward()


def test_saved_tensors_may_come_back_with_other_strides(target: Target) -> None:
    inputs = problem(target)
    leaves = [laid_out(t, "tokens first").requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    found = []
    for packing in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().contiguous(), _same)):
        with packing:
            out = entmax_attention(*leaves, impl=target.impl)
        assert isinstance(out, Tensor)
        found.append(torch.autograd.grad(out, leaves, inputs.dout))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_a_changed_operand_is_noticed_in_backward(target: Target) -> None:
    q, k = (torch.randn(1, 1, 4, 16, device=target.device, requires_grad=wanted) for wanted in (True, False))
    for _ in range(2):
        out = entmax_attention(q, k, k, impl=target.impl)
        assert isinstance(out, Tensor)
        k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@no_interpreter
def test_autocast_after_a_call_without_it_and_before_one(target: Target) -> None:
    inputs = problem(target)
    kind = torch.device(target.device).type
    rounded = inputs.cast(torch.bfloat16)
    plain = entmax_attention_results(rounded, impl=target.impl)
    wide = entmax_attention_results(inputs, impl=target.impl)
    for _ in range(2):
        with torch.autocast(kind, dtype=torch.bfloat16):
            narrow = entmax_attention_results(rounded, impl=target.impl)
            cast = entmax_attention_results(inputs, impl=target.impl)
        for name, value in plain.items():
            assert torch.equal(narrow[name], value), name
        assert cast["out"].dtype == torch.bfloat16 and torch.equal(cast["out"], plain["out"])
        assert cast["dq"].dtype == torch.float32
        assert torch.equal(entmax_attention_results(inputs, impl=target.impl)["dq"], wide["dq"])


@no_interpreter
def test_transforms_and_compilers_see_the_registered_operator_after_eager_calls(target: Target) -> None:
    inputs = problem(target)

    def loss(q: Tensor) -> Tensor:
        out = entmax_attention(q, inputs.k, inputs.v, impl=target.impl)
        assert isinstance(out, Tensor)
        return (out * inputs.dout).sum()

    eager = entmax_attention_results(inputs, impl=target.impl, needs=("q",))["dq"]
    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(loss)(inputs.q)
    leaf = inputs.q.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, eager)
    assert torch.equal(entmax_attention_results(inputs, impl=target.impl, needs=("q",))["dq"], eager)


def test_forward_mode_is_an_error_after_calls_without_it(target: Target) -> None:
    q = torch.randn(1, 1, 4, 16, device=target.device)
    entmax_attention(q, q, q, impl=target.impl)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="impl must be 'reference' in forward-mode"):
        entmax_attention(forward_ad.make_dual(q, torch.ones_like(q)), q, q, impl=target.impl)


@no_interpreter
def test_threads_share_what_is_known(target: Target) -> None:
    kinds = [problem(target, 20 + 4 * n) for n in range(4)]
    expected = [entmax_attention_results(inputs, impl=target.impl)["dq"] for inputs in kinds]
    forget()
    wrong: list[int] = []

    def work() -> None:
        for place, inputs in enumerate(kinds * 3):
            if not torch.equal(entmax_attention_results(inputs, impl=target.impl)["dq"], expected[place % 4]):
                wrong.append(place)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_tables_stay_small(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_CALLS", 2)
    for n in (2, 3, 4, 5):
        q = torch.randn(1, 1, n, 16, device=target.device)
        out = entmax_attention(q, q, q, impl=target.impl)
        assert isinstance(out, Tensor) and out.shape == q.shape
        assert len(_torch_ops.CALLS) <= 2


def torch_table(offsets: Tensor, block: int, tiles: int) -> tuple[Tensor, Tensor]:
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    every = torch.arange(tiles, device=offsets.device)
    of_tile = torch.searchsorted(ends, every, right=True)
    return of_tile.to(torch.int32), torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@pytest.mark.parametrize("keys", [32, 0])
@pytest.mark.parametrize("lengths", [[5], [0, 70, 0, 16, 15, 0], [33] * 70, [20, -7, 40], []], ids=str)
def test_tables_of_packed_batches(target: Target, lengths: list[int], keys: int) -> None:
    if target.impl != "triton":
        pytest.skip("only the kernels need tables")
    from tilefold.ops.entmax_attention._triton.packing import Tables

    cu_q = torch.tensor([0, *lengths], device=target.device).cumsum(0).to(torch.int32)
    cu_k = 2 * cu_q
    batch = len(lengths)
    sizes = (int(cu_q.max()) // 16 + batch + 2, int(cu_k.max()) // 32 + batch + 3)
    for _ in range(2):
        made = Tables(batch, sizes[0], 16, sizes[1] if keys else 0, keys)(True, cu_q, cu_k)
        wanted: tuple[Tensor, ...] = torch_table(cu_q, 16, sizes[0])
        if keys:
            wanted += torch_table(cu_k, keys, sizes[1])
        for found, table in zip(made, wanted, strict=False):
            assert found is not None and torch.equal(found, table)
        assert keys or made[2:] == [None, None]


@no_interpreter
@pytest.mark.skipif(not triton_installed(), reason="the kernels need triton")
@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_packed_batches_build_without_spills(capability: int, offsets: str) -> None:
    from tests.ops.cross_compile import compile_kernel
    from tilefold.ops.entmax_attention._triton.packing import _OFFSETS, _TILES, nan_if_broken_kernel, tables_kernel

    tables = dict.fromkeys(["cu_q_ptr", "cu_k_ptr", "q_batch_ptr", "q_start_ptr", "k_batch_ptr", "k_start_ptr"], "*i32")
    types = {
        **tables,
        "out_ptr": "*bf16",
        **dict.fromkeys(["B", "q_tiles", "k_tiles", "q_rows", "k_rows", "longest"], "i32"),
    }
    types |= {"size": "i64", "cu_q_ptr": offsets, "cu_k_ptr": offsets}
    for kernel, constants in (
        (tables_kernel, {"ROWS": 64, "KEYS": 64, "BLOCK": _TILES}),
        (tables_kernel, {"ROWS": 64, "KEYS": 0, "BLOCK": _TILES, "k_batch_ptr": None, "k_start_ptr": None}),
        (nan_if_broken_kernel, {"BLOCK": _OFFSETS}),
    ):
        compiled = compile_kernel(kernel, types, constants, capability, 4, 1)
        assert compiled.stack == 0 and compiled.local_memory == 0


@no_interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("n", [SHORT, 1100])
def test_a_graph_of_settled_calls_follows_its_inputs(n: int) -> None:
    target = Target("triton", "cuda")
    inputs, others = (problem(target, n, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]

    def train() -> list[Tensor]:
        out = entmax_attention(*leaves)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    with torch.no_grad():
        for leaf, value in zip(leaves, (others.q, others.k, others.v), strict=True):
            leaf.copy_(value)
    graph.replay()
    expected = train()
    for found, value in zip(captured, expected, strict=True):
        assert torch.equal(found, value)


@no_interpreter
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_call_waits_for_the_device() -> None:
    target = Target("triton", "cuda")
    cases: list[tuple[EntmaxAttentionInputs, dict[str, Any]]] = [
        (problem(target), {}),
        (problem(target, 1100), {"causal": True}),
        (problem(target, layout="holes"), {"alpha": torch.tensor([1.2, 1.7], device="cuda")}),
        (problem(target, layout="packed"), {}),
    ]
    for again in (False, True):
        for inputs, options in cases:
            leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
            try:
                torch.cuda.set_sync_debug_mode("error" if again else "default")  # the first call compiles
                out = entmax_attention(*leaves, **inputs.layout, **options)
                assert isinstance(out, Tensor)
                torch.autograd.grad(out, leaves, inputs.dout)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@no_interpreter
@pytest.mark.gpu
def test_tensors_of_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here, there = (problem(Target("triton", f"cuda:{index}")) for index in (0, 1))
    for _ in range(3):
        found = [entmax_attention_results(inputs) for inputs in (here, there)]
        for name, value in found[0].items():
            assert found[1][name].device.index == 1
            assert torch.equal(found[1][name].cpu(), value.cpu()), name
