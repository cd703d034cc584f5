"""A kernel that cannot be built is replaced, with one warning; the fault is put where Triton would raise it."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton", reason="the kernels need triton")

from triton.errors import TritonError

import tilefold
from tilefold.ops._shared import fallback, operator
from tilefold.ops._shared._triton import launch
from tilefold.ops._shared.fallback import FallbackWarning, KernelUnavailableError, give_up, given_up
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.lsr_head import QuantizedWeight, configs
from tilefold.ops.lsr_head._quantized import quantize_rows
from tilefold.ops.maxsim.quantized import quantize_tokens

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="the interpreter builds nothing")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_given_up() -> Iterator[None]:
    before = dict(fallback._GIVEN_UP)
    fallback._GIVEN_UP.clear()
    yield
    fallback._GIVEN_UP.clear()
    fallback._GIVEN_UP.update(before)


def head(impl: str) -> tuple[torch.Tensor, ...]:
    hidden, weight = seeded(2, 5, 16), seeded(40, 16)
    scores = tilefold.lsr_head(hidden, weight, impl=impl)
    return scores, *torch.autograd.grad(scores.square().sum(), (hidden, weight))


def sum_head(impl: str) -> tuple[torch.Tensor, ...]:
    hidden, weight = seeded(2, 5, 16), seeded(40, 16)
    scores = tilefold.lsr_head(hidden, weight, pooling="sum", impl=impl)
    return scores, *torch.autograd.grad(scores.square().sum(), (hidden, weight))


def fp8_head(impl: str) -> tuple[torch.Tensor, ...]:
    weight = QuantizedWeight(*quantize_rows(seeded(40, 16).detach()))
    return (tilefold.lsr_head(seeded(2, 5, 16).detach(), weight, impl=impl),)


def scatter(impl: str) -> tuple[torch.Tensor, ...]:
    weights = seeded(2, 5)
    scores = tilefold.token_scatter(weights, torch.arange(10).view(2, 5) % 7, 9, impl=impl)
    return scores, *torch.autograd.grad(scores.square().sum(), weights)


def late_interaction(impl: str) -> tuple[torch.Tensor, ...]:
    queries, documents = seeded(2, 3, 8), seeded(4, 5, 8)
    scores = tilefold.maxsim(queries, documents, impl=impl)
    return scores, *torch.autograd.grad(scores.square().sum(), (queries, documents))


def quantized_late_interaction(impl: str) -> tuple[torch.Tensor, ...]:
    documents = quantize_tokens(seeded(4, 5, 8).detach(), "int8")
    return (tilefold.maxsim(seeded(2, 3, 8).detach(), documents, impl=impl),)


def rows(impl: str) -> tuple[torch.Tensor, ...]:
    x = seeded(3, 7)
    p = tilefold.entmax(x, 1.5, impl=impl)
    return p, *torch.autograd.grad(p.square().sum(), x)


def attention(impl: str) -> tuple[torch.Tensor, ...]:
    q, k, v = seeded(1, 2, 5, 8), seeded(1, 2, 6, 8), seeded(1, 2, 6, 8)
    out = tilefold.entmax_attention(q, k, v, impl=impl)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


CALLS = {
    "lsr_head": head, "lsr_head sum": sum_head, "lsr_head with an fp8 weight": fp8_head, "token_scatter": scatter,
    "maxsim": late_interaction, "maxsim quantized": quantized_late_interaction, "entmax": rows,
    "entmax_attention": attention,
}  # fmt: skip


class Unbuildable(ModuleType):
    """Kernels of which none can be built."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # what ``inspect`` asks every module for
            raise AttributeError(name)

        def fails(*args: Any, **kwargs: Any) -> None:
            raise KernelUnavailableError("_some_kernel", "PTXASError: no such instruction")

        return fails


def put_kernels(monkeypatch: pytest.MonkeyPatch, room: str, kernels: ModuleType) -> None:
    name = kernels.__name__
    monkeypatch.setitem(sys.modules, f"tilefold.ops.{room}.{name}", kernels)
    monkeypatch.setattr(importlib.import_module(f"tilefold.ops.{room}"), name, kernels, raising=False)


@pytest.fixture
def no_kernel_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU whose kernels Triton cannot build: "auto" takes them, and so does "triton"."""
    for room in ("lsr_head", "maxsim"):
        put_kernels(monkeypatch, room, Unbuildable("_triton"))
    for room in ("token_scatter", "entmax", "entmax_attention"):
        put_kernels(monkeypatch, room, Unbuildable("plans"))

    def resolve(impl: str, device: torch.device, operator: str = "") -> str:
        if impl == "auto":
            return "triton" if given_up(operator, device) is None else "tiled"
        return impl

    from tilefold.ops._shared import impl as shared_impl
    from tilefold.ops.lsr_head import _quantized
    from tilefold.ops.maxsim import _torch_ops as maxsim_ops

    for module in (shared_impl, _quantized):
        monkeypatch.setattr(module, "resolve_impl", resolve)
    maxsim_ops._kernels.cache_clear()
    yield
    maxsim_ops._kernels.cache_clear()


@pytest.mark.parametrize("name", CALLS)
def test_auto_takes_the_tiled_path_after_one_warning(no_kernel_builds: None, name: str) -> None:
    call = CALLS[name]
    expected = call("tiled")
    operator = name.removesuffix(" sum").removesuffix(" quantized")
    with pytest.warns(
        FallbackWarning, match=rf"^{operator} cannot run on cpu with Triton \d.*PTXASError.*tiled"
    ) as seen:
        results = call("auto")
    assert len([w for w in seen if issubclass(w.category, FallbackWarning)]) == 1
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call("auto")[0], expected[0])


@pytest.mark.parametrize("name", CALLS)
def test_an_explicit_name_raises(no_kernel_builds: None, name: str) -> None:
    with pytest.raises(KernelUnavailableError, match=r"_some_kernel cannot be built \(PTXASError: no such"):
        CALLS[name]("triton")


def test_a_gradient_that_cannot_be_built_is_computed_by_the_tiled_path(
    no_kernel_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefold.ops.lsr_head import _tiled

    kernels = Unbuildable("_triton")
    kernels.forward = lambda *call: (None, _tiled.forward(*call[:3]))  # type: ignore[attr-defined]
    put_kernels(monkeypatch, "lsr_head", kernels)
    hidden, weight = seeded(2, 5, 16), seeded(40, 16)
    scores = tilefold.lsr_head(hidden, weight)
    with pytest.warns(FallbackWarning, match="^lsr_head cannot run"):
        grads = torch.autograd.grad(scores.square().sum(), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(grads, head("tiled")[1:], strict=True))


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("n", [20, 150])  # without and with a map of live blocks
def test_a_compiler_is_told_the_shapes_that_come_whichever_path_runs(
    no_kernel_builds: None, with_gradient: bool, n: int
) -> None:
    operator = torch.ops.tilefold.entmax_attention.default
    tensors = [seeded(2, 2, n, 16).detach() for _ in range(3)]

    def shapes(fake: bool) -> list[torch.Size]:
        mode = FakeTensorMode()
        given = [mode.from_tensor(t) for t in tensors] if fake else tensors
        with mode if fake else contextlib.nullcontext():
            results = operator(*given, *[None] * 5, 1.7, False, -1, 0.25, 0.0, n, False, with_gradient, "auto")
        return [result.shape for result in results]

    promised = shapes(fake=True)
    assert (promised[3].numel() > 0) == (n == 150)
    with pytest.warns(FallbackWarning, match="^entmax_attention cannot run"):
        assert shapes(fake=False) == promised  # the path is changed in the call
    assert shapes(fake=False) == promised  # and before the call
    assert shapes(fake=True) == promised


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference"])
def test_offsets_that_nobody_looked_at_are_checked_by_the_path_that_reads_them(
    no_kernel_builds: None, monkeypatch: pytest.MonkeyPatch, impl: str
) -> None:
    # as on a GPU, where nobody looks before the path is chosen
    monkeypatch.setattr(operator, "may_look", lambda first: False)
    rows, good, bad = seeded(5, 2, 8), torch.tensor([0, 3, 5]), torch.tensor([0, 3, 4])
    for cu_q, cu_k, bound, text in (
        (bad, good, 5, "cu_seqlens_q must start with 0"),
        (good, bad, 5, "cu_seqlens_k must start with 0"),
        (good, good, 2, "max_seqlen_k must be at least 3"),
    ):
        fallback._GIVEN_UP.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            with pytest.raises(ValueError, match=text):
                tilefold.entmax_attention(
                    rows, rows, rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_k=bound, impl=impl
                )


class Failing:
    """A kernel whose build raises; see ``JITFunction``."""

    arg_names: tuple[str, ...] = ()
    params: tuple[Any, ...] = ()
    __name__ = "_failing_kernel"

    def __init__(self, error: Exception) -> None:
        self.error, self.builds = error, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def build(*args: Any, **kwargs: Any) -> None:
            self.builds += 1
            raise self.error

        return build


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[Failing], launch.Launcher]:
    monkeypatch.setattr(launch, "JITFunction", Failing)
    monkeypatch.setattr(launch, "enter_context", lambda index: None)
    monkeypatch.setattr(launch, "graph_owns_memory", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda kernel: launch.Launcher(kernel, {})


BUILD_FAULTS = [
    TritonError("out of resource: shared memory, Required: 150000, Hardware limit: 101376."),
    RuntimeError("PassManager::run failed"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    subprocess.CalledProcessError(1, ["gcc"]),
]


@pytest.mark.parametrize("fault", BUILD_FAULTS, ids=str)
def test_a_failed_build_is_named_and_not_tried_again(
    launcher: Callable[[Failing], launch.Launcher], fault: Exception
) -> None:
    kernel = Failing(fault)
    run = launcher(kernel)
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match=f"_failing_kernel cannot be built .{type(fault).__name__}"):
            run((1, 1, 1), ())
    assert kernel.builds == 1


@pytest.mark.parametrize(
    "fault",
    [RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), torch.OutOfMemoryError("full"),
     TypeError("no such argument")],
    ids=str,
)  # fmt: skip
def test_a_launch_that_goes_wrong_is_not_mistaken_for_a_build(
    launcher: Callable[[Failing], launch.Launcher], fault: Exception
) -> None:
    with pytest.raises(type(fault), match=str(fault).split("[")[0]) as raised:
        launcher(Failing(fault))((1, 1, 1), ())
    assert not isinstance(raised.value, KernelUnavailableError)


def test_the_head_steps_down_from_kernel_to_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(configs, "tf32_allowed", lambda dtype: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "a Hopper GPU")
    monkeypatch.setattr(configs.releases, "why_no_warp_roles", lambda: None)
    for dtype, ladder in (
        (torch.bfloat16, (configs.HOPPER_16BIT, configs.TMA_16BIT, configs.AMPERE_16BIT)),
        (torch.float8_e4m3fn, (configs.HOPPER_8BIT, configs.TMA_8BIT, configs.ADA_8BIT)),
    ):
        fallback._GIVEN_UP.clear()
        for config in ladder:
            assert configs.max_forward_config(dtype, device) == config
            if config in configs.NEXT_BEST:
                with pytest.warns(FallbackWarning, match="a Hopper GPU .* instead: the same results, a slower"):
                    give_up(configs.kernel_name(config), device, "broken", configs.instead_of(config))
        assert config not in configs.NEXT_BEST


def test_a_release_without_warp_roles_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "a Hopper GPU")
    monkeypatch.setattr(configs.releases, "why_no_warp_roles", lambda: "Triton 3.4 cannot")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs.max_forward_config(torch.bfloat16, device) == configs.TMA_16BIT  # asking warns of nothing
        configs.give_up_missing(torch.float32, device)  # which has no such kernel
    with pytest.warns(
        FallbackWarning, match="lsr_head's kernel whose warps load or compute cannot run on a Hopper GPU"
    ):
        configs.give_up_missing(torch.bfloat16, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs.give_up_missing(torch.float16, device)
        assert configs.max_forward_config(torch.float16, device) == configs.TMA_16BIT


def test_a_launch_gives_up_what_the_release_cannot_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefold.ops.lsr_head._problem import HeadOptions, Tokens, Vocabulary
    from tilefold.ops.lsr_head._triton import launch_forward

    asked: list[tuple[torch.dtype, torch.device]] = []
    monkeypatch.setattr(launch_forward, "give_up_missing", lambda dtype, device: asked.append((dtype, device)))
    monkeypatch.setattr(launch_forward, "plan_max_forward", lambda *call: lambda tokens, vocabulary: None)
    tokens, dtype = Tokens(torch.empty(1, 3, 16), None, None), torch.bfloat16
    vocabulary = Vocabulary(torch.empty(8, 16), None, None)
    launch_forward.max_forward(
        tokens, vocabulary, HeadOptions("max", "none", 1.0, dtype, dtype, training=False, impl="triton"), True
    )
    assert asked == [(torch.bfloat16, CPU)]


def test_a_kernel_that_cannot_be_built_is_planned_anew_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefold.ops.lsr_head._problem import HeadOptions, Tokens, Vocabulary
    from tilefold.ops.lsr_head._triton import launch_forward

    class Plan:
        def __init__(self) -> None:
            self.config = next(c for c in ladder if given_up(configs.kernel_name(c), CPU) is None)

        def __call__(self, tokens: Tokens, vocabulary: Vocabulary) -> str:
            tried.append(self.config)
            if self.config in configs.NEXT_BEST:
                raise KernelUnavailableError("_max_forward_kernel", "broken")
            return "scores"

    ladder = (configs.HOPPER_16BIT, configs.TMA_16BIT, configs.AMPERE_16BIT)
    tried: list[Any] = []
    monkeypatch.setattr(launch_forward, "plan_max_forward", lambda *call: Plan())
    vocabulary, dtype = Vocabulary(torch.empty(8, 16), None, None), torch.bfloat16
    options = HeadOptions("max", "none", 1.0, dtype, dtype, training=False, impl="triton")
    with pytest.warns(FallbackWarning, match="the same results, a slower forward pass"):
        plan, scores = launch_forward.max_forward(Tokens(torch.empty(1, 3, 16), None, None), vocabulary, options, True)
    assert tried == list(ladder) and plan.config == ladder[-1] and scores == "scores"


def test_devices_with_little_shared_memory_get_small_tiles() -> None:
    for capability in ((8, 6), (8, 9), (12, 0)):
        assert configs.max_forward_config_for(capability, torch.bfloat16, tf32=False) == configs.AMPERE_16BIT
