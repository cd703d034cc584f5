"""The correctness gates of all operators: what they accept and what they catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.bench.gate import Budget, GateResult
from tilefold.bench.spec import BenchCase, Runnable, get_spec, operators
from tilefold.ops import lsr_head

CASES = {
    "lsr_head": [("ragged-2pct", {"B": 3, "S": 17, "D": 24, "V": 301})],
    "maxsim": [(variant, {"Nq": 3, "Lq": 5, "Nd": 4, "Ld": 12, "D": 16}) for variant in ("in-batch", "packed")],
    "token_scatter": [("ragged", {"B": 3, "S": 40, "V": 60})],
    "entmax": [("normal", {"R": 11, "N": 200})],
    "entmax_attention": [(variant, {"B": 1, "H": 2, "N": 40, "D": 16}) for variant in ("iid", "correlated-causal")],
}


@dataclass
class Checked:
    """A gate with the implementation that it lets pass."""

    inputs: Any
    gate: Any
    right: Runnable

    def failures(self, wrong: Runnable) -> list[str]:
        return self.gate.check(wrong, "ours").failures


@pytest.fixture(params=[(op, *case) for op, cases in CASES.items() for case in cases], ids=lambda p: f"{p[0]}-{p[1]}")
def checked(request: pytest.FixtureRequest) -> Checked:
    op, variant, dims = request.param
    spec, case = get_spec(op), BenchCase("tiny", "cpu", "float32", dims, variant)
    inputs = spec.make_inputs(case, torch.device("cpu"), 0)
    return Checked(inputs, spec.make_gate(case, inputs), spec.implementation("tilefold").build(inputs))


def test_every_operator_with_a_benchmark_is_checked_here() -> None:
    assert set(CASES) == set(operators())


def test_our_implementation_passes(checked: Checked) -> None:
    result = checked.gate.check(checked.right, "ours")
    assert result.passed, result.failures
    assert result.worst(gradients=False) is not None and result.worst(gradients=True) is not None


def in_forward(change: Callable[[Tensor], Tensor], right: Runnable) -> Runnable:
    return replace(right, forward=lambda: change(right.forward()))


def in_training(change: Callable[[Tensor], Tensor], right: Runnable) -> Runnable:
    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out, gradients = right.forward_backward()
        return change(out), gradients

    return replace(right, forward_backward=forward_backward)


def in_gradient(which: int, change: Callable[[Tensor], Tensor], right: Runnable) -> Runnable:
    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out, gradients = right.forward_backward()
        return out, tuple(change(g) if i == which else g for i, g in enumerate(gradients))

    return replace(right, forward_backward=forward_backward)


def scaled(tensor: Tensor) -> Tensor:
    return tensor * 1.01


def with_nan(tensor: Tensor) -> Tensor:
    broken = tensor.clone()
    broken.flatten()[broken.numel() // 2] = float("nan")
    return broken


@pytest.mark.parametrize("change", [scaled, with_nan])
@pytest.mark.parametrize("place", [in_forward, in_training])
def test_a_wrong_output_is_caught_in_inference_and_in_training(
    checked: Checked, place: Callable[..., Runnable], change: Callable[[Tensor], Tensor]
) -> None:
    assert checked.failures(place(change, checked.right))


@pytest.mark.parametrize("change", [scaled, with_nan])
def test_every_wrong_gradient_is_caught(checked: Checked, change: Callable[[Tensor], Tensor]) -> None:
    count = len(checked.right.forward_backward()[1])
    for which in range(count):
        assert checked.failures(in_gradient(which, change, checked.right)), f"gradient {which}"


def test_a_head_that_ignores_padding_is_caught() -> None:
    spec = get_spec("lsr_head")
    case = BenchCase("tiny", "cpu", "float32", CASES["lsr_head"][0][1], "ragged-2pct")
    inputs = spec.make_inputs(case, torch.device("cpu"), 0)
    blind = inputs.bind(lambda hidden, weight, bias, mask: lsr_head(hidden, weight, bias), "no mask")
    assert spec.make_gate(case, inputs).check(blind, "ours").failures


def test_an_output_of_another_shape_is_caught(checked: Checked) -> None:
    wrong = in_forward(lambda out: out[..., :-1], checked.right)
    assert any("inf" in failure for failure in checked.failures(wrong))


def test_a_gate_that_checked_nothing_does_not_pass() -> None:
    assert not GateResult({}, Budget(1, 1)).passed
    assert not GateResult({"out": float("nan")}, Budget(1, 1)).passed
    assert GateResult({"out": 0.5, "dweight": 0.5}, Budget(1, 1)).passed
