"""Where a kernel cannot be built, a call takes the tiled path, forward and backward, and warns once.

Every kernel is made unavailable in turn. In Triton's interpreter the launcher raises the error. On
a GPU Triton's own build of the kernel raises what its assembler would.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from triton import JITFunction
from triton.errors import TritonError

from tests.kernels import triton_interpreted
from tests.ops.base import FallbackWarning, KernelUnavailableError, fallback, impl
from tests.ops.contracts import cases, forget_calls
from tests.ops.contracts.contract import KernelCase
from tests.ops.launching import launch, wait_for_background_builds
from tests.ops.samples import Sample, unaligned
from tests.ops.toy import TWO_LAUNCHES, toy

OPS = Path(impl.__file__).resolve().parents[1]
INTERPRETED = triton_interpreted()
kernels = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu

CASES: dict[str, KernelCase] = cases("kernels")
# They belong to no operator. Tests of the groups of rows make them unavailable.
KERNELS_OF_ROW_GROUPS = {"_shared/ordered_product.ordered_product_kernel"}
COMPILED = [name for name, case in CASES.items() if case.compiles]
DIFFERENTIABLE = [name for name, case in CASES.items() if not case.sample.inference]
every_kernel = pytest.mark.parametrize("name", CASES)


def results(sample: Sample, impl: str, compiled: bool = False) -> list[Tensor]:
    """Return the output of a call and the gradients of its leaves."""
    return results_of(sample, sample.leaves(), sample.arguments(), impl, compiled)


def results_of(
    sample: Sample,
    leaves: list[Tensor],
    arguments: dict[str, Any],
    impl: str,
    compiled: bool = False,
) -> list[Tensor]:
    """Return the output and the gradients of these leaves, in a compiled function if asked for."""

    def call(*leaves: Tensor, **_: Any) -> Any:
        return sample.function(*leaves, **arguments, impl=impl)

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    return Sample(sample.name, call, (), inference=sample.inference).results(leaves, {})


def is_jitted(node: ast.AST) -> bool:
    """Whether a node is a function that Triton compiles."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def jitted_functions(path: Path) -> list[Any]:
    """Return the functions of a file that Triton compiles."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if is_jitted(node)]


def names_used(function: ast.FunctionDef) -> set[str]:
    """Return the names and attributes that a function uses."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def test_every_kernel_has_a_case() -> None:
    """A jitted function that no other jitted function uses is a kernel."""
    jitted: dict[str, str] = {}
    used: set[str] = set()
    for path in sorted(OPS.rglob("*.py")):
        module = path.relative_to(OPS).with_suffix("").as_posix().replace("_triton/", "")
        for function in jitted_functions(path):
            jitted[f"{module}.{function.name}"] = function.name
            used |= names_used(function)
    kernels = {kernel for kernel, name in jitted.items() if name not in used}
    assert sorted(CASES) == sorted(kernels - KERNELS_OF_ROW_GROUPS)


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel in the contracts: ``folder/file.name``."""
    module = kernel.fn.__module__.removeprefix("tilefold.ops.").replace("._triton", "")
    return f"{module.replace('.', '/')}.{kernel.fn.__name__}"


def forget_plans() -> None:
    # Otherwise a thread could store a kernel later, and a test would find it built.
    wait_for_background_builds()
    launch.BUILT.clear()
    forget_calls()


class BrokenKernels:
    """Names of kernels that cannot be built, and of those among them that were asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.requested: set[str] = set()

    def refuses(self, kernel: Any) -> bool:
        """Whether a kernel cannot be built; this notes that it was asked for."""
        name = kernel_name(kernel)
        if name not in self.names:
            return False
        self.requested.add(name)
        return True


def break_interpreted_kernels(monkeypatch: pytest.MonkeyPatch, broken: BrokenKernels) -> None:
    """Let the launcher refuse broken kernels."""
    monkeypatch.setattr(impl, "takes_kernels", lambda device: True)
    run_with_triton = launch.KernelLauncher.run_with_triton

    def run(self: launch.KernelLauncher, build: launch.Build) -> Any:
        if broken.refuses(build.kernel):
            raise KernelUnavailableError(
                build.kernel.__name__,
                "PTXASError: no such instruction",
                build.fallback,
            )
        return run_with_triton(self, build)

    monkeypatch.setattr(launch.KernelLauncher, "run_with_triton", run)


def break_compiled_kernels(monkeypatch: pytest.MonkeyPatch, broken: BrokenKernels) -> None:
    """Let Triton refuse to build broken kernels."""
    for method in ("run", "warmup"):
        original = getattr(JITFunction, method)

        def run(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            if broken.refuses(self):
                raise TritonError("no such instruction")
            return original(self, *arguments, **options)

        monkeypatch.setattr(JITFunction, method, run)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, no_failed_kernel: None) -> Iterator[BrokenKernels]:
    """Kernels that cannot be built: none, until a test adds names."""
    broken = BrokenKernels()
    forget_plans()
    if INTERPRETED:
        break_interpreted_kernels(monkeypatch, broken)
    else:
        break_compiled_kernels(monkeypatch, broken)
    yield broken
    forget_plans()


def case_that_runs_here(name: str) -> KernelCase:
    """Return the case of a kernel; skip the test if another kernel runs on this device."""
    case = CASES[name]
    if case.hopper_only and (INTERPRETED or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("another kernel runs on this device")
    return case


def assert_falls_back(name: str, broken: BrokenKernels, compiled: bool = False) -> None:
    """Check a first call, which warns once, and a second against the results of the tiled path."""
    case = case_that_runs_here(name)
    sample = case.sample
    broken.names.add(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = results(sample, "auto", compiled)
    assert name in broken.requested, "the case does not launch the kernel"
    messages = [
        str(warning.message) for warning in caught if issubclass(warning.category, FallbackWarning)
    ]
    assert any("no such instruction" in message for message in messages), messages
    if not case.hopper_only:  # another kernel replaces those
        operators = [
            message.split(" cannot run on ")[0]
            for message in messages
            if "tiled torch path runs instead" in message or "lsr_head_sparse" in message
        ]
        assert operators == [sample.name], messages
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        second = results(sample, "auto", compiled)
        expected = results(sample, "tiled")
    tolerance = 0.05 if sample.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(first, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(second, expected, atol=tolerance, rtol=tolerance)
    if INTERPRETED and case.tiled_equivalent:
        assert all(torch.equal(a, b) for a, b in zip(second, expected, strict=True))


@kernels
@every_kernel
def test_the_tiled_path_replaces_a_kernel_that_cannot_be_built(
    name: str,
    broken: BrokenKernels,
) -> None:
    assert_falls_back(name, broken)


@kernels
@pytest.mark.parametrize("name", COMPILED)
def test_the_tiled_path_replaces_a_kernel_in_a_compiled_function(
    name: str,
    broken: BrokenKernels,
) -> None:
    torch._dynamo.reset()
    assert_falls_back(name, broken, compiled=True)


@kernels
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_tensors_of_another_alignment_fall_back_too(
    name: str,
    broken: BrokenKernels,
) -> None:
    """The plan is known, and another alignment needs another build, which fails in backward only."""
    sample = case_that_runs_here(name).sample
    for _ in range(3):  # launches are bound
        results(sample, "auto")
    broken.names.add(name)
    with (
        warnings.catch_warnings(record=True),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unaligned),
    ):
        warnings.simplefilter("always")
        unaligned_results = results(sample, "auto")
    torch.testing.assert_close(unaligned_results, results(sample, "tiled"), atol=0.05, rtol=0.05)


@kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("impl_name", ["auto", "triton"])
def test_a_kernel_with_another_kernel_as_fallback_is_replaced_by_that_one(
    impl_name: str,
    compiled: bool,
    broken: BrokenKernels,
) -> None:
    """The toy stands for all operators. Its last fallback is the tiled path, for ``"auto"``."""
    torch._dynamo.reset()
    sample = Sample("toy", toy, ((5, 16), (16,)))
    by_kernels = results(sample, "triton")
    by_tiles = results(sample, "tiled")
    forget_plans()
    broken.names.add("tests/ops/toy.dot_kernel")
    assert_replaced(sample, impl_name, compiled, TWO_LAUNCHES.kernel, by_kernels)
    forget_plans()
    broken.names.add("tests/ops/toy.products_kernel")
    if impl_name == "auto":
        assert_replaced(sample, impl_name, compiled, "toy", by_tiles)
    else:
        with pytest.raises(KernelUnavailableError, match="products_kernel cannot be built"):
            results(sample, impl_name, compiled)


def assert_replaced(
    sample: Sample,
    impl_name: str,
    compiled: bool,
    warned: str,
    expected: list[Tensor],
) -> None:
    """Check that the first call warns of ``warned``, and the results of the first two calls."""
    with pytest.warns(FallbackWarning) as caught:
        first = results(sample, impl_name, compiled)
    assert [str(warning.message).split(" cannot run on ")[0] for warning in caught] == [warned]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        second = results(sample, impl_name, compiled)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)


@pytest.mark.gpu
@every_kernel
def test_a_captured_graph_cannot_take_the_tiled_path(name: str, broken: BrokenKernels) -> None:
    case = case_that_runs_here(name)
    if case.hopper_only or not case.tiled_equivalent:
        pytest.skip("another kernel replaces this one, or nothing does")
    sample = case.sample
    stream = torch.cuda.Stream()
    leaves, arguments = sample.leaves(), sample.arguments()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            results_of(sample, leaves, arguments, "auto")
        fallback.FAILURES.clear()
        forget_plans()
        broken.names.add(name)
        for _ in range(2):  # at the failure, and where it is known
            with (
                pytest.raises(
                    RuntimeError,
                    match=f"{sample.name} cannot be captured in a CUDA graph.*no such instr",
                ),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
            ):
                results_of(sample, leaves, arguments, "auto")
    torch.cuda.synchronize()


def test_a_fallback_under_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(fallback, "is_capturing", lambda device: True)
    monkeypatch.setattr(fallback, "FAILURES", {("toy", cpu): "_some_kernel cannot be built"})
    for impl_name in ("auto", "tiled"):
        with pytest.raises(
            RuntimeError,
            match=r"toy cannot be captured .*_some_kernel cannot be built.*Leave",
        ):
            toy(torch.ones(2, 3), torch.ones(3), impl=impl_name)
    monkeypatch.setattr(fallback, "FAILURES", {("another", cpu): "_some_kernel cannot be built"})
    assert torch.equal(toy(torch.ones(2, 3), torch.ones(3), impl="tiled"), torch.tensor([9.0, 9.0]))
