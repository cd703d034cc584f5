"""The correctness gate: a benchmark row is shown only if its implementation was right in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilefold import testing
from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable


@dataclass(frozen=True)
class Budget:
    """Largest allowed relative errors ``||out - ref|| / ||ref||`` of the output and of every gradient."""

    forward: float
    gradient: float


BUDGETS: Mapping[str, Budget] = {
    name: Budget(testing.budget(dtype), testing.budget(dtype, "gradient")) for name, dtype in DTYPES.items()
}

# Baselines that keep logits in the input's dtype pick another winner where two round to the same value, so their
# gradients are far off by construction, and a bias that cancels most of a rounded logit magnifies its error. They must
# only be the same function, not as exact; the error is shown.
BASELINE_BUDGETS: Mapping[str, Budget] = {
    "bfloat16": Budget(forward=6e-2, gradient=0.5),
    "float16": Budget(forward=5e-3, gradient=0.2),
    "float32": Budget(forward=2e-5, gradient=5e-5),
    "float64": Budget(forward=1e-12, gradient=1e-11),
}


def budget_of(kind: str, dtype: str) -> Budget:
    """What an implementation of ``kind`` is allowed; ``dtype`` is a name."""
    return (BUDGETS if kind == "ours" else BASELINE_BUDGETS)[dtype]


@dataclass(frozen=True)
class GateResult:
    """What the gate found.

    Attributes:
        errors: relative error of each checked quantity; infinite where a value is not finite.
        budget: what was allowed. Names that start with ``"d"`` are gradients.
    """

    errors: Mapping[str, float]
    budget: Budget

    def limit(self, name: str) -> float:
        """The budget that applies to the quantity ``name``."""
        return self.budget.gradient if name.startswith("d") else self.budget.forward

    @property
    def failures(self) -> list[str]:
        """One readable line for each quantity over its budget."""
        return [
            f"{name} error {error:.2e} > {self.limit(name):.0e}"
            for name, error in self.errors.items()
            if not error <= self.limit(name)
        ]

    @property
    def passed(self) -> bool:
        """Whether something was checked and everything stayed within budget."""
        return bool(self.errors) and not self.failures

    def worst(self, gradients: bool) -> float | None:
        """The largest error among gradients, or among outputs; ``None`` if none was checked."""
        values = [error for name, error in self.errors.items() if name.startswith("d") is gradients]
        return max(values) if values else None


class Gate(Protocol):
    """The ground truth of one case."""

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases of an implementation of ``kind`` once and compare."""


def check_phases(
    runnable: Runnable,
    poison: Sequence[Tensor],
    output_errors: Callable[[Tensor, str], dict[str, float]],
    gradient_errors: Callable[[tuple[Tensor, ...]], dict[str, float]],
) -> dict[str, float]:
    """Run both phases once over poisoned memory; the errors of both outputs and of the gradients by name.

    Args:
        runnable: what is checked.
        poison: tensors of the sizes that its results have.
        output_errors: ``(output, prefix)`` -> errors by name, each with the prefix.
        gradient_errors: gradients -> errors by name, each of which begins with ``"d"``.
    """
    poison_allocator(poison)
    inferred = runnable.forward()
    errors = {} if inferred is None else output_errors(inferred, "inference ")
    del inferred
    if runnable.forward_backward is not None:
        poison_allocator(poison)
        out, gradients = runnable.forward_backward()
        errors |= output_errors(out, "") | gradient_errors(gradients)
    return errors


def relative_error(out: Tensor, reference: Tensor) -> float:
    """:func:`tilefold.testing.relative_error`, and infinite for another shape: the row fails, the run goes on."""
    return testing.relative_error(out, reference) if out.shape == reference.shape else float("inf")


def part_error(whole: Tensor, part: Tensor, reference: Tensor) -> float:
    """The relative error of ``part``, infinite if anything in ``whole`` is not finite."""
    return relative_error(part, reference) if bool(whole.isfinite().all()) else float("inf")


def is_complete(out: Tensor, like: Tensor) -> bool:
    """Whether ``out`` has the shape of ``like`` and is finite throughout."""
    return out.shape == like.shape and bool(out.isfinite().all())


def poison_allocator(like: Sequence[Tensor]) -> None:
    """Fill and free blocks of the sizes of ``like`` with NaN, so that an element nobody writes shows up as one.

    Effective on CUDA, whose caching allocator hands the same blocks out again.
    """
    blocks = [torch.full_like(tensor, float("nan")) for tensor in like if tensor.is_floating_point()]
    if blocks and blocks[0].is_cuda:
        torch.cuda.synchronize()
    del blocks
