"""A kernel that cannot be built is replaced, with one warning; the fault is put where Triton would
raise it.
"""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton", reason="the kernels need triton")

import tilefold
from tests.kernels import release, triton_interpreted
from tests.ops.base import (
    FallbackWarning,
    HeadOptions,
    HeadTensors,
    KernelUnavailableError,
    Setting,
    fallback,
    releases,
)
from tests.ops.base import impl as shared_impl
from tilefold.ops.entmax_attention.api import ATTENTION
from tilefold.ops.lsr_head import configs, plans

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="the interpreter builds nothing"),
    pytest.mark.usefixtures("no_failed_kernel"),
]


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape,
        generator=torch.Generator().manual_seed(sum(shape)),
        requires_grad=True,
    )


@pytest.fixture
def no_kernel_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels Triton cannot build: "auto" takes them, and so does "triton"."""

    def fails(*given: object) -> None:
        raise KernelUnavailableError("_some_kernel", "PTXASError: no such instruction")

    monkeypatch.setattr(ATTENTION, "plans", lambda: SimpleNamespace(forward=fails, backward=fails))
    monkeypatch.setattr(shared_impl, "takes_kernels", lambda device: True)


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("n", [20, 150])  # without and with a map of live blocks
def test_a_compiler_is_told_the_shapes_that_come_whichever_path_runs(
    no_kernel_builds: None,
    with_gradient: bool,
    n: int,
) -> None:
    operator = torch.ops.tilefold.entmax_attention.default
    tensors = [seeded(2, 2, n, 16).detach() for _ in range(3)]

    def shapes(fake: bool) -> list[torch.Size]:
        mode = FakeTensorMode()
        given = [mode.from_tensor(t) for t in tensors] if fake else tensors
        with mode if fake else contextlib.nullcontext():
            results = operator(
                *given,
                *[None] * 5,
                1.7,
                False,
                -1,
                0.25,
                0.0,
                n,
                False,
                with_gradient,
                "auto",
            )
        return [result.shape for result in results]

    promised = shapes(fake=True)
    assert (promised[3].numel() > 0) == (n == 150)
    with pytest.warns(FallbackWarning, match="^entmax_attention cannot run"):
        assert shapes(fake=False) == promised  # the path is changed in the call
    assert shapes(fake=False) == promised  # and before the call
    assert shapes(fake=True) == promised


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference"])
def test_offsets_that_nobody_looked_at_are_checked_by_the_path_that_reads_them(
    no_kernel_builds: None,
    host_reads_no_values: None,
    impl: str,
) -> None:
    rows, good, bad = seeded(5, 2, 8), torch.tensor([0, 3, 5]), torch.tensor([0, 3, 4])
    for cu_q, cu_k, bound, text in (
        (bad, good, 5, "cu_seqlens_q must start with 0"),
        (good, bad, 5, "cu_seqlens_k must start with 0"),
        (good, good, 2, "max_seqlen_k must be at least 3"),
    ):
        fallback.FAILURES.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            with pytest.raises(ValueError, match=text):
                tilefold.entmax_attention(
                    rows,
                    rows,
                    rows,
                    cu_seqlens_q=cu_q,
                    cu_seqlens_k=cu_k,
                    max_seqlen_k=bound,
                    impl=impl,
                )


def head_plan(dtype: torch.dtype, *failed_kernels: str) -> Any:
    """What the head plans on a Hopper GPU without the kernels that were given up: the launch of its
    products.
    """
    hidden, weight = torch.empty(2, 16, 64, device="meta"), torch.empty(100, 64, device="meta")
    scale = torch.empty(100, device="meta") if dtype == torch.float8_e4m3fn else None
    compute = torch.bfloat16 if scale is not None else dtype
    tensors = HeadTensors(hidden.to(compute), None, None, weight.to(dtype), scale, None)
    options = HeadOptions("max", "relu", 1.0, compute, compute, bias_dtype=None)
    setting = Setting(
        (9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset(failed_kernels)
    )
    return plans.forward(tensors, options, False, setting).steps[-1]


@pytest.mark.skipif(release() == (3, 4), reason="its Gluon has no products of warp groups")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_head_steps_down_from_kernel_to_kernel(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(releases, "why_no_warp_roles", lambda: None)
    failed_kernels: list[str] = []
    recorded = []
    while (launch := head_plan(dtype, *failed_kernels)).fallback is not None:
        assert launch.fallback.sentence.endswith(
            "instead: the same results, a slower forward pass."
        )
        failed_kernels.append(launch.fallback.kernel)
        recorded.append((launch.kernel.__name__, bool(launch.tma)))
    assert recorded == [("max_forward_hopper_kernel", True), ("max_forward_kernel", True)]
    assert launch.kernel.__name__ == "max_forward_kernel" and not launch.tma


def test_the_head_gives_up_what_the_release_cannot_build_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "why_no_warp_roles", lambda: "Triton 3.4 cannot")
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        with pytest.raises(KernelUnavailableError, match=r"Triton 3\.4 cannot") as raised:
            head_plan(dtype)
        assert raised.value.fallback is not None
        kernel, sentence = raised.value.fallback
        assert (
            kernel == "lsr_head's kernel whose warps load or compute"
            and "portable kernel with TMA" in sentence
        )
        assert head_plan(dtype, kernel).tma
    assert head_plan(torch.float32).fallback is None  # which has no such kernel


def test_devices_with_little_shared_memory_get_small_tiles() -> None:
    def constants(*capability: int) -> dict[str, Any]:
        return configs.max_forward(torch.bfloat16, Setting(capability, 1, False, True, frozenset()))

    assert (
        constants(8, 6)
        == constants(8, 9)
        == constants(12, 0)
        == constants(8, 0)
        != constants(10, 0)
    )
    assert constants(8, 0)["BLOCK_T"] == 128 and not constants(8, 0)["USE_TMA"]
