"""Kernels of a SparseEncoder that threads compile ahead of its calls, here recorded instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder

from tilefold.integrations.sentence_transformers import _ahead as compiled_ahead
from tilefold.integrations.sentence_transformers import accelerate

CHECKS = list(compiled_ahead._CHECKS)
DOCUMENTS = list(compiled_ahead._DOCUMENTS)


class Recorded:
    """Arguments of the functions that start to compile kernels.

    Attributes:
        calls: the expected calls of each request.
        arguments: the other arguments of the last request.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.arguments: dict[str, Any] = {}

    def record(self, calls: Any, weight: Any, bias: Any, **arguments: Any) -> None:
        self.calls.append(list(calls))
        self.arguments = {**arguments, "weight": weight, "bias": bias}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(compiled_ahead, "compile_ahead", recorded.record)
    monkeypatch.setattr(
        compiled_ahead,
        "compile_training_ahead",
        lambda call, *arguments, **options: recorded.record([call], *arguments, **options),
    )
    return recorded


def test_kernels_of_checks_come_before_those_of_documents(
    tiny: SparseEncoder,
    recorded: Recorded,
) -> None:
    accelerate(tiny, check="always", screen=False)
    assert recorded.calls == [CHECKS + DOCUMENTS]
    head = tiny.transformers_model.get_output_embeddings()
    assert recorded.arguments["weight"] is head.weight
    assert recorded.arguments["bias"] is head.bias
    assert recorded.arguments["pooling"] == "max"
    assert recorded.arguments["activation"] == "log1p_relu"
    assert recorded.arguments["screen"] is False


def test_without_checks_their_kernels_are_not_compiled(
    tiny: SparseEncoder,
    recorded: Recorded,
) -> None:
    accelerate(tiny, check=False)
    assert recorded.calls == [DOCUMENTS]


def test_a_head_in_fp8_is_compiled_at_its_first_call(
    tiny: SparseEncoder,
    recorded: Recorded,
) -> None:
    accelerate(tiny, check=False, quantize="fp8")
    assert recorded.calls == []


def test_training_compiles_kernels_for_the_dtype_of_autocast(
    tiny: SparseEncoder,
    recorded: Recorded,
) -> None:
    accelerate(tiny, check=False)
    recorded.calls.clear()
    arguments = SimpleNamespace(bf16=True, fp16=False, per_device_train_batch_size=8)
    trainer = SimpleNamespace(args=arguments, model=tiny)
    compiled_ahead.compile_training_head_ahead(trainer)
    assert [call.texts for calls in recorded.calls for call in calls] == [8]
    assert recorded.arguments["compute_dtype"] == torch.bfloat16


def test_a_training_on_a_cpu_is_not_prepared(
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_ahead, "start_compiler", lambda: pytest.fail("it was started"))
    model = SimpleNamespace(device=torch.device("cpu"))
    compiled_ahead.prepare_training(SimpleNamespace(model=model), compiled=True)
    assert recorded.calls == []


@pytest.mark.parametrize("compiled", [True, False])
def test_torchs_compiler_starts_before_a_training_that_compiles_layers(
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(compiled_ahead, "start_compiler", lambda: prepared.append("compiler"))
    monkeypatch.setattr(
        compiled_ahead,
        "compile_training_head_ahead",
        lambda trainer: prepared.append("head"),
    )
    model = SimpleNamespace(device=torch.device("cuda", 0))
    compiled_ahead.prepare_training(SimpleNamespace(model=model), compiled)
    assert prepared == (["head", "compiler"] if compiled else ["head"])
