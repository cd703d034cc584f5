"""Kernels of the head that are compiled before the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="plans need triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.base import Launch, Setting
from tests.ops.base import head_problem as _problem
from tests.ops.samples import meta
from tilefold.ops.lsr_head import ExpectedCall, ahead, compile_ahead, plans
from tilefold.ops.lsr_head.api import HEAD

BF16 = torch.bfloat16
VOCAB = 30522
DIM = 384


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[_problem.HeadTensors]:
    """Layouts of the calls whose kernels are compiled, on a machine with four cores."""
    calls: list[_problem.HeadTensors] = []

    def record(tensors: Any, options: Any, device: torch.device) -> None:
        assert device.type == "cuda"
        calls.append(tensors)

    monkeypatch.setattr(HEAD, "compile_ahead", record)
    monkeypatch.setattr(HEAD, "chosen_impl", lambda first, impl: "triton")
    monkeypatch.setattr(ahead, "usable_cores", lambda: 4)
    return calls


def compile_for(call: ExpectedCall, device: str = "cuda") -> None:
    """Compile the kernels of a call with a weight that has no memory."""
    with FakeTensorMode():
        weight = torch.empty(VOCAB, DIM, dtype=BF16, device=device)
    compile_ahead([call], weight, None, pooling="max", activation="log1p_relu", screen=True)


def test_padded_and_packed_texts_are_described(compiled_calls: Any) -> None:
    compile_for(ExpectedCall(texts=2, tokens=30, packed=False))
    compile_for(ExpectedCall(texts=2, tokens=18))
    padded, packed = compiled_calls
    assert padded.hidden.shape == (2, 15, DIM)
    assert padded.attention_mask.shape == (2, 15)
    assert padded.cu_seqlens is None
    assert packed.hidden.shape == (18, DIM)
    assert packed.attention_mask is None
    assert packed.cu_seqlens.shape == (3,)


def test_both_widths_of_blocks_of_the_vocabulary_are_compiled(
    compiled_calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilefold.ops.lsr_head._triton import compact

    monkeypatch.setattr(compact, "start_append_build", lambda *_: None)
    compile_for(ExpectedCall(texts=8192, tokens=131072, capacity=1024))
    assert [tensors.weight.size(0) for tensors in compiled_calls] == [4096, VOCAB % 4096]


def test_nothing_is_compiled_on_a_cpu(compiled_calls: Any) -> None:
    compile_for(ExpectedCall(texts=2, tokens=18), device="cpu")
    assert not compiled_calls


def test_nothing_is_compiled_with_few_cores(
    compiled_calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "usable_cores", lambda: 3)
    compile_for(ExpectedCall(texts=2, tokens=18))
    assert not compiled_calls


def kernels_of_inference(tokens: int) -> list[tuple[Any, Any]]:
    """Kernels with their constants, for packed documents with ``tokens`` tokens in all."""
    tensors = _problem.HeadTensors(
        hidden=meta(tokens, DIM, dtype=BF16),
        attention_mask=None,
        cu_seqlens=meta(501, dtype=torch.int32),
        weight=meta(VOCAB, DIM, dtype=BF16),
        weight_scale=None,
        bias=None,
    )
    options = _problem.HeadOptions("max", "log1p_relu", 1.0, torch.float32, BF16, None, True)
    setting = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
    plan = plans.forward(tensors, options, False, setting)
    return [(step.kernel, step.constants) for step in plan.steps if isinstance(step, Launch)]


def test_batches_of_few_and_of_many_tokens_share_kernels() -> None:
    assert kernels_of_inference(60_000) == kernels_of_inference(120_000)
