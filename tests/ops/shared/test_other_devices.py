"""The torch path runs on a device that is neither a CPU nor a CUDA device: one that a process of
its own makes here.

That device computes on the CPU, in tensors that say that they are elsewhere, so results must have
the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from tests.kernels import triton_interpreted
from tests.ops.samples import Sample, output_gradient
from tests.processes import ROOT, environment

make_device = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)


@pytest.mark.slow
@pytest.mark.skipif(triton_interpreted(), reason="needs no interpreter")
@pytest.mark.skipif(make_device is None, reason="this torch makes no devices in Python")
def test_every_operator_runs_on_a_device_that_torch_does_not_know() -> None:
    call = [sys.executable, "-m", "tests.ops.shared.test_other_devices"]
    run = subprocess.run(
        call,
        env=environment(ROOT),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.endswith("same bits\n"), run.stdout + run.stderr


class Elsewhere(Tensor):
    """A tensor of the device ``elsewhere``, around the one on the CPU that has its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="elsewhere:0",
        )
        made.here = inner.detach()
        return made

    def tolist(self) -> Any:
        return self.here.tolist()  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.namespace == "tilefold":  # its own code runs with these tensors
            return func._op_dk(
                torch._C.DispatchKey.CompositeExplicitAutograd,
                *args,
                **(kwargs or {}),
            )
        return elsewhere(func, *args, **(kwargs or {}))


def elsewhere(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``func`` on the CPU; its result is elsewhere, and the same tensor where it is an
    argument.
    """
    known = {id(x.here): x for x in tree_leaves((args, kwargs)) if isinstance(x, Elsewhere)}
    asked = kwargs.get("device")
    if asked is not None:
        kwargs["device"] = "cpu"
    args, kwargs = tree_map(lambda x: x.here if isinstance(x, Elsewhere) else x, (args, kwargs))
    result = func(*args, **kwargs)
    if asked is not None and torch.device(asked).type == "cpu":
        return result
    return tree_map(
        lambda x: (
            (known[id(x)] if id(x) in known else Elsewhere(x)) if isinstance(x, Tensor) else x
        ),
        result,
    )


def copy(source: Tensor, target: Elsewhere, non_blocking: bool = False) -> Tensor:
    target.here.copy_(source.here if isinstance(source, Elsewhere) else source)
    return target


def results(sample: Sample, device: str) -> list[Tensor]:
    leaves = sample.leaves(device)
    scores = sample.function(*leaves, **sample.arguments(device))
    assert scores.device.type == device, sample
    gradient = output_gradient(scores.detach().cpu()).to(device)
    return [x.detach().cpu() for x in (scores, *torch.autograd.grad(scores, leaves, gradient))]


def main() -> None:
    from tests.ops.contracts import listed

    make_device("elsewhere")
    library, aten = torch.library.Library("aten", "IMPL"), torch.ops.aten
    makers = (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
    )
    for maker in makers:
        library.impl(
            maker,
            lambda *args, maker=maker, **options: elsewhere(maker, *args, **options),
            "PrivateUse1",
        )
    library.impl("_copy_from", copy, "PrivateUse1")
    for sample in [*listed("compiled"), *listed("elsewhere")]:
        pairs = zip(results(sample, "elsewhere"), results(sample, "cpu"), strict=True)
        assert all(torch.equal(result, expected) for result, expected in pairs), sample
    sys.stdout.write("same bits\n")
    sys.stdout.flush()
    os._exit(0)  # threads of such a device are not ended


if __name__ == "__main__":
    main()
