"""The correctness gate: a benchmark row is shown only if its implementation was right in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold import testing
from tilefold.bench.spec import DTYPES, Inputs, Runnable


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


@dataclass(frozen=True)
class GateResult:
    """Errors of one implementation against what is allowed; names that start with ``"d"`` are gradients."""

    errors: Mapping[str, float]  # relative, of each checked quantity; infinite where a value is not finite
    budget: Budget

    @property
    def failures(self) -> list[str]:
        """One readable line for each quantity over its budget."""
        limits = {name: self.budget.gradient if name.startswith("d") else self.budget.forward for name in self.errors}
        return [
            f"{name} error {error:.2e} > {limits[name]:.0e}"
            for name, error in self.errors.items()
            if not error <= limits[name]
        ]

    @property
    def passed(self) -> bool:
        """Whether something was checked and everything stayed within budget."""
        return bool(self.errors) and not self.failures

    def worst(self, gradients: bool) -> float | None:
        """The largest error among gradients, or among outputs; ``None`` if none was checked."""
        return max((error for name, error in self.errors.items() if name.startswith("d") is gradients), default=None)


@dataclass(frozen=True)
class Part:
    """A slice of a result that is small enough to be known exactly: how it is taken, and its value in fp64."""

    take: Callable[[Tensor], Tensor]
    truth: Tensor


@dataclass(frozen=True)
class Gate:
    """The ground truth of one case: slices are held to their values in fp64, everything else must be finite."""

    inputs: Inputs
    dtype: str
    outputs: Mapping[str, Part]
    gradients: Mapping[str, Part | None]  # of each leaf, by a name with "d"; None for one that is not checked
    ours: Budget | None = None  # what our implementations are allowed, by default that of the dtype

    def check(self, runnable: Runnable, kind: str) -> GateResult:
        """Run both phases of an implementation of ``kind`` once, over poisoned memory, and compare."""
        poison = (*self.inputs.leaves, self.inputs.grad_output)
        poison_allocator(poison)
        inferred = runnable.forward()
        errors = {} if inferred is None else self._output_errors(inferred, "inference ")
        del inferred
        if runnable.forward_backward is not None:
            poison_allocator(poison)
            out, gradients = runnable.forward_backward()
            errors |= self._output_errors(out, "")
            for (name, part), whole, leaf in zip(self.gradients.items(), gradients, self.inputs.leaves, strict=True):
                errors |= {} if part is None else {name: _part_error(whole, leaf, part)}
        allowed = (self.ours or BUDGETS[self.dtype]) if kind == "ours" else BASELINE_BUDGETS[self.dtype]
        return GateResult(errors, allowed)

    def _output_errors(self, out: Tensor, prefix: str) -> dict[str, float]:
        dense = out.to_dense() if out.layout == torch.sparse_csr else out
        like = self.inputs.grad_output
        return {f"{prefix}{name}": _part_error(dense, like, part) for name, part in self.outputs.items()}


def _part_error(whole: Tensor, like: Tensor, part: Part) -> float:
    """The relative error of a part, infinite if the whole has another shape than ``like`` or is not finite."""
    if whole.shape != like.shape or not bool(whole.isfinite().all()):
        return float("inf")
    return testing.relative_error(part.take(whole), part.truth)


def poison_allocator(like: Sequence[Tensor]) -> None:
    """Fill and free blocks of the sizes of ``like`` with NaN, which CUDA's allocator then hands out again."""
    blocks = [torch.full_like(tensor, float("nan")) for tensor in like if tensor.is_floating_point()]
    if blocks and blocks[0].is_cuda:
        torch.cuda.synchronize()
    del blocks
