"""The published kernels of AdaSplash, if installed: gated, and last, since they compile or tune for long."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilefold.bench.entmax_attention.inputs import EntmaxAttentionBenchInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import Implementation, NotApplicable, gpu_if_installed

V1_STEPS = 3  # what the paper's benchmarks take; the package's default is 10


def _adasplash(function: str, **options: Any) -> Callable[[EntmaxAttentionBenchInputs], Runnable]:
    def build(inputs: EntmaxAttentionBenchInputs) -> Runnable:
        peer: Any = importlib.import_module("adasplash")
        known = dict(options)
        if function == "adasplash_v2":
            if not inputs.causal:
                raise NotApplicable("AdaSplash-2 is causal only")
        else:
            known["is_causal"] = inputs.causal

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = getattr(peer, function)(q, k, v, **known)
            return out

        steps = f"niter={options['niter']}" if options else "default niter"
        return inputs.bind(attend, f"{function}, {steps}")

    return build


PEERS = tuple(
    Implementation(name, build, "baseline", gpu_if_installed("adasplash"), slow=True)
    for name, build in (
        ("adasplash-v1", _adasplash("adasplash_v1", niter=V1_STEPS)),
        ("adasplash-v1-no-mask", _adasplash("adasplash_no_block_mask", niter=V1_STEPS)),
        ("adasplash-v2", _adasplash("adasplash_v2")),
    )
)
