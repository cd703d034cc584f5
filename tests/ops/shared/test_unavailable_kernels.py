"""Every kernel is made unavailable in turn: a call then takes the tiled path, forward and backward,
after one warning.

In Triton's interpreter the launcher says so; on a GPU Triton's own build of that kernel raises what
its assembler would.
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
from tests.ops.launching import launch
from tests.ops.samples import (
    MASK,
    OFFSETS,
    Sample,
    attention,
    dout,
    head,
    late,
    quantized_documents,
    quantized_head,
    rows,
    scatter,
    searched,
    unaligned,
)
from tests.ops.samples import forget as forget_calls
from tests.ops.toy import TWO_LAUNCHES, toy
from tests.refusals import refused
from tilefold.ops import lsr_head, maxsim, quantize_tokens, xtr_scores
from tilefold.ops.lsr_head import lsr_head_rows

OPS = Path(impl.__file__).resolve().parents[1]
INTERPRETED = triton_interpreted()
kernels = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu


def results(case: Sample, impl: str, compiled: bool = False, made: Any = None) -> list[Tensor]:
    """The result, and the gradients of the leaves."""
    leaves, options = (case.leaves(), case.given()) if made is None else made

    def call(*leaves: Tensor) -> Any:
        return case.function(*leaves, **options, impl=impl)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    scores = run(*leaves)
    return [
        scores.detach(),
        *([] if case.inference else torch.autograd.grad(scores, leaves, dout(scores))),
    ]


def capacity(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    """In dense form; of what a caller runs where there are no rows, if there are none."""
    found = lsr_head_rows(hidden, weight, capacity=40, impl=impl)
    return lsr_head(hidden, weight, impl=impl) if found is None else found.counts


def inference(name: str, function: Any, *shapes: tuple[int, ...], **options: Any) -> Sample:
    return Sample(name, function, shapes, options, inference=True)


def fp8_documents(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "fp8"), **options)


SCREENED = Sample(
    "lsr_head",
    lsr_head,
    ((32, 512, 768), (32768, 768)),
    {"screen": True},
    dtype=torch.bfloat16,
    inference=True,
)
LONG_MASK = [[1] * 40 + [0] * 2060, [0] * 2100]
PACKED = {"cu_seqlens": OFFSETS}
PACKS = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
PAIRS = [[0, 1], [1, 1], [1, 0]]
QUERIES, DOCUMENTS = (2, 17, 16), (3, 5, 16)

# by folder, file and name: a call that launches the kernel
CASES: dict[str, Sample] = {
    "entmax/rows._forward_kernel": rows(alpha=1.5),
    "entmax/rows._backward_kernel": rows(alpha=1.7),
    "entmax_attention/backward.dkv_kernel": attention(21),
    "entmax_attention/backward.dq_kernel": attention(21, alpha=1.7),
    "entmax_attention/backward.key_lists_kernel": attention(
        40 if INTERPRETED else 1100,
        causal=True,
    ),
    "entmax_attention/backward.query_lists_kernel": attention(
        40 if INTERPRETED else 1100,
        causal=True,
    ),
    "entmax_attention/forward.output_kernel": attention(40 if INTERPRETED else 300),
    "entmax_attention/forward.resident_kernel": attention(21),
    "entmax_attention/tiles.nan_if_broken_kernel": attention(**PACKS),
    "entmax_attention/tiles.tables_kernel": attention(**PACKS),
    "entmax_attention/roots.roots_kernel": attention(40 if INTERPRETED else 300, alpha=1.7),
    "lsr_head/compact.append_kernel": inference(
        "lsr_head's compaction of rows",
        capacity,
        (2, 16, 16),
        (40, 16),
    ),
    "lsr_head/max_backward.count_kernel": head(),
    "lsr_head/max_backward.dhidden_kernel": head(),
    "lsr_head/max_backward.dweight_kernel": head("max", 2, 21, 16, attention_mask=MASK),
    "lsr_head/max_backward.list_kernel": head("max", 32, 16, **PACKED),
    "lsr_head/max_forward.combine_kernel": head(
        "max",
        512,
        16,
        cu_seqlens=[0, 300, 300, 512],
        vocab=16,
    ),
    "lsr_head/max_forward.max_forward_kernel": head(),
    "lsr_head/max_forward_hopper.max_forward_hopper_kernel": head(dtype=torch.bfloat16),
    "lsr_head/one_token.find_kernel": head("cls", 2, 2100, 16, attention_mask=LONG_MASK),
    "lsr_head/one_token.forward_kernel": head("last"),
    "lsr_head/one_token.split_gradient_kernel": head("last", 32, 16, **PACKED),
    "lsr_head/one_token.store_rows_kernel": head("cls"),
    "lsr_head/one_token.weight_gradient_kernel": head("cls"),
    "lsr_head/pack.copy_packed_kernel": head("max", 32, 16, **PACKED),
    "lsr_head/pack.copy_padded_kernel": head("max", 2, 21, 16, attention_mask=MASK),
    "lsr_head/pack.count_kernel": head("max", 2, 2100, 16, attention_mask=LONG_MASK),
    "lsr_head/quantize.quantize_rows_kernel": inference(
        "lsr_head with an fp8 weight",
        quantized_head,
        (2, 16, 16),
        (40, 16),
    ),
    "lsr_head/screen.largest_kernel": SCREENED,
    "lsr_head/screen.list_kernel": SCREENED,
    "lsr_head/screen.refine_kernel": SCREENED,
    "lsr_head/screen.round_kernel": SCREENED,
    "lsr_head/screen.sample_kernel": SCREENED,
    "lsr_head/screen_hopper.screen_hopper_kernel": SCREENED,
    "lsr_head/sum_pooling.check_offsets_kernel": head("sum", 32, 16, **PACKED),
    "lsr_head/sum_pooling.dlogits_kernel": head("mean", 2, 21, 16, attention_mask=MASK),
    "lsr_head/sum_pooling.sum_forward_kernel": head("sum"),
    "maxsim/backward.ddocuments_kernel": late(QUERIES, (2, 2, 5, 16), pairing="grouped"),
    "maxsim/backward.dqueries_kernel": late(QUERIES, (2, 5, 16), pairing="aligned"),
    "maxsim/backward.dqueries_row_kernel": late((2, 5, 16), DOCUMENTS),
    "maxsim/forward.all_pairs_kernel": late(QUERIES, DOCUMENTS),
    "maxsim/forward.combine_kernel": late((2, 300, 16), DOCUMENTS),
    "maxsim/forward.ends_kernel": late(
        QUERIES,
        (2, 300, 16),
        document_mask=[[1] * 200 + [0] * 100] * 2,
    ),
    "maxsim/forward.listed_pairs_kernel": late(QUERIES, (2, 5, 16), pairing="aligned"),
    "maxsim/norms.inverse_norms_kernel": late(QUERIES, DOCUMENTS, normalize=True),
    "maxsim/norms.quantize_kernel": inference(
        "maxsim",
        quantized_documents,
        QUERIES,
        (2, 5, 16),
        pairing="aligned",
    ),
    "maxsim/norms.unit_gradient_kernel": late(
        QUERIES,
        (2, 2, 5, 16),
        pairing="grouped",
        normalize=True,
    ),
    "maxsim/smooth.smooth_ddocuments_kernel": late(QUERIES, DOCUMENTS, temperature=0.5),
    "maxsim/smooth.smooth_dqueries_kernel": late(
        QUERIES,
        DOCUMENTS,
        temperature=0.5,
        mask_mode="zero",
    ),
    "maxsim/shared.shared_pass_kernel": inference(
        "maxsim",
        quantized_documents,
        QUERIES,
        DOCUMENTS,
    ),
    "maxsim/shared_hopper.shared_hopper_kernel": inference(
        "maxsim",
        quantized_documents,
        (5, 32, 16),
        (65536, 3, 16),
    ),
    "maxsim/stream.stream_kernel": inference("maxsim", fp8_documents, QUERIES, DOCUMENTS),
    "maxsim/backward.ddocuments_listed_kernel": late(QUERIES, DOCUMENTS),
    "sparse_search/search.best_kernel": inference("sparse_topk", searched, (2, 7)),
    "sparse_search/search.block_scores_kernel": inference("sparse_topk", searched, (2, 7)),
    "token_scatter/scatter.gather_kernel": scatter(),
    "token_scatter/scatter.scatter_kernel": scatter(reduce="sum"),
}
HOPPER = (
    "lsr_head/max_forward_hopper.max_forward_hopper_kernel",
    "maxsim/shared_hopper.shared_hopper_kernel",
)
ONLY_ON = dict.fromkeys(
    (*HOPPER, *(name for name, case in CASES.items() if case is SCREENED)),
    (9, 0),
)
every_kernel = pytest.mark.parametrize("name", CASES)
COMPILED = [
    name
    for name, case in CASES.items()
    if case.function not in (capacity, quantized_head, searched)
]


def test_every_kernel_that_is_launched_has_its_case() -> None:
    """A jitted function that no other one names is a kernel."""
    jitted: dict[str, str] = {}
    named: set[str] = set()
    for path in sorted(OPS.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                folder = (
                    path.relative_to(OPS).as_posix().removesuffix(".py").replace("_triton/", "")
                )
                jitted[f"{folder}.{function.name}"] = function.name
                named |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                named |= {
                    node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)
                }
    assert sorted(CASES) == sorted(kernel for kernel, name in jitted.items() if name not in named)


def kernel_name(kernel: Any) -> str:
    """As :data:`CASES` has it."""
    module = (
        kernel.fn.__module__.removeprefix("tilefold.ops.").replace("._triton", "").replace(".", "/")
    )
    return f"{module}.{kernel.fn.__name__}"


def forget() -> None:
    fallback.GIVEN_UP.clear()
    forget_plans()


def forget_plans() -> None:
    launch.BUILT.clear()
    forget_calls()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, nothing_given_up: None) -> Iterator[set[str]]:
    """The kernels that cannot be built; those that were asked for are put in beside them with a
    dash in front.
    """
    names: set[str] = set()

    def refuse(kernel: Any) -> bool:
        name = kernel_name(kernel)
        if name in names:
            names.add(f"-{name}")
        return name in names

    forget_plans()
    if INTERPRETED:
        monkeypatch.setattr(impl, "takes_kernels", lambda device: True)
        honest = launch.KernelLauncher.run_with_triton

        def call(self: launch.KernelLauncher, build: launch.Build) -> Any:
            if refuse(build.kernel):
                raise KernelUnavailableError(
                    build.kernel.__name__,
                    "PTXASError: no such instruction",
                    build.fallback,
                )
            return honest(self, build)

        monkeypatch.setattr(launch.KernelLauncher, "run_with_triton", call)
    else:
        for method in ("run", "warmup"):
            build = getattr(JITFunction, method)

            def run(self: Any, *arguments: Any, build: Any = build, **options: Any) -> Any:
                if refuse(self):
                    raise TritonError("no such instruction")
                return build(self, *arguments, **options)

            monkeypatch.setattr(JITFunction, method, run)
    yield names
    forget_plans()


def case_of(name: str) -> Sample:
    if name in ONLY_ON and (INTERPRETED or torch.cuda.get_device_capability() != ONLY_ON[name]):
        pytest.skip("another kernel runs on this device")
    return CASES[name]


def assert_falls_back(name: str, broken: set[str], compiled: bool = False) -> None:
    """The first call warns once, of what the operator is called; it and the next one give the tiled
    path's results.
    """
    case = case_of(name)
    broken.add(name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = results(case, "auto", compiled)
    assert f"-{name}" in broken, "the case does not launch the kernel"
    texts = [
        str(warning.message) for warning in seen if issubclass(warning.category, FallbackWarning)
    ]
    assert any("no such instruction" in text for text in texts), texts
    last = [
        text
        for text in texts
        if "tiled torch path runs instead" in text or "lsr_head_sparse" in text
    ]
    if name not in ONLY_ON:  # which has another kernel behind it
        assert [text.split(" cannot run on ")[0] for text in last] == [case.name], texts
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        again, expected = results(case, "auto", compiled), results(case, "tiled")
    tolerance = (
        {"atol": 0.05, "rtol": 0.05}
        if case.dtype == torch.bfloat16
        else {"atol": 1e-4, "rtol": 1e-4}
    )
    for found in (first, again):
        torch.testing.assert_close(found, expected, **tolerance)
    if INTERPRETED and case.function is not capacity:
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@kernels
@every_kernel
def test_the_tiled_path_takes_the_place_of_a_kernel_that_cannot_be_built(
    name: str,
    broken: set[str],
) -> None:
    assert_falls_back(name, broken)


@kernels
@pytest.mark.parametrize("name", COMPILED)
def test_and_in_a_compiled_function(name: str, broken: set[str]) -> None:
    torch._dynamo.reset()
    assert_falls_back(name, broken, compiled=True)


@kernels
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.inference])
def test_gradients_of_tensors_of_another_alignment_fall_back_too(
    name: str,
    broken: set[str],
) -> None:
    """Their plan is known, and Triton would build another kernel for them; forward ran as it was
    built.
    """
    case = case_of(name)
    for _ in range(3):  # launches are bound
        results(case, "auto")
    broken.add(name)
    with (
        warnings.catch_warnings(record=True),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, unaligned),
    ):
        warnings.simplefilter("always")
        found = results(case, "auto")
    torch.testing.assert_close(found, results(case, "tiled"), atol=0.05, rtol=0.05)


@kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_kernel_with_another_one_behind_it_gives_way_to_that_one(
    name: str,
    compiled: bool,
    broken: set[str],
) -> None:
    """The toy stands for all operators on the common base; behind its last kernel is the tiled
    path, for "auto".
    """
    torch._dynamo.reset()
    case = Sample("toy", toy, ((5, 16), (16,)))
    expected, tiled = results(case, "triton"), results(case, "tiled")
    forget_plans()
    broken.add("tests/ops/toy.dot_kernel")
    assert_gives_way(case, name, compiled, TWO_LAUNCHES.kernel, expected)
    forget_plans()
    broken.add("tests/ops/toy.products_kernel")
    if name == "auto":
        assert_gives_way(case, name, compiled, "toy", tiled)
    else:
        refused(
            KernelUnavailableError,
            "products_kernel cannot be built",
            results,
            case,
            name,
            compiled,
        )


def assert_gives_way(
    case: Sample,
    name: str,
    compiled: bool,
    warned: str,
    expected: list[Tensor],
) -> None:
    with pytest.warns(FallbackWarning) as seen:
        first = results(case, name, compiled)
    assert [str(warning.message).split(" cannot run on ")[0] for warning in seen] == [warned]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        again = results(case, name, compiled)
    for found in (first, again):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@every_kernel
def test_a_graph_cannot_take_the_tiled_path(name: str, broken: set[str]) -> None:
    case = case_of(name)
    if name in ONLY_ON or case.function in (capacity, xtr_scores):
        pytest.skip("another kernel takes its place, or none, or it is not launched in eager mode")
    stream, made = torch.cuda.Stream(), (case.leaves(), case.given())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            results(case, "auto", made=made)
        forget()
        broken.add(name)
        for _ in range(2):  # at the failure, and where it is known
            with (
                pytest.raises(
                    RuntimeError,
                    match=f"{case.name} cannot be captured in a CUDA graph.*no such instr",
                ),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
            ):
                results(case, "auto", made=made)
    torch.cuda.synchronize()


def test_a_fallback_under_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(fallback, "is_capturing", lambda device: True)
    monkeypatch.setattr(fallback, "GIVEN_UP", {("toy", cpu): "_some_kernel cannot be built"})
    for asked in ("auto", "tiled"):
        with pytest.raises(
            RuntimeError,
            match=r"toy cannot be captured .*_some_kernel cannot be built.*Leave",
        ):
            toy(torch.ones(2, 3), torch.ones(3), impl=asked)
    monkeypatch.setattr(fallback, "GIVEN_UP", {("another", cpu): "_some_kernel cannot be built"})
    assert torch.equal(toy(torch.ones(2, 3), torch.ones(3), impl="tiled"), torch.tensor([9.0, 9.0]))
