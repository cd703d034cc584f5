"""Inputs of entmax attention's benchmark: queries, keys and values, independent or alike along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable, bind
from tilefold.bench.spec import BenchCase
from tilefold.testing.entmax_attention import entmax_attention_inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

ALPHA = 1.5
_SHARPNESS = {"iid": 1.0, "iid4": 4.0, "correlated": 2.0}


@dataclass(frozen=True)
class EntmaxAttentionBenchInputs:
    """Inputs of one case: q, k and v ``[B, H, N, D]`` want gradients, ``dout`` comes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool

    def bind(self, attend: Attend, label: str) -> Runnable:
        """``attend(q, k, v)`` of these inputs."""
        leaves = (self.q, self.k, self.v)
        return bind(attend, leaves, leaves, self.dout, label)


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> EntmaxAttentionBenchInputs:
    """Random inputs of ``case``: independent scores, or ones that are alike along the sequence."""
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    kind, _, causal = case.variant.partition("-")
    made = entmax_attention_inputs(
        batch,
        heads,
        n,
        dim,
        correlated=kind == "correlated",
        sharpness=_SHARPNESS[kind],
        dtype=DTYPES[case.dtype],
        device=device,
        seed=seed,
    )
    q, k, v = (t.requires_grad_() for t in (made.q, made.k, made.v))
    return EntmaxAttentionBenchInputs(q, k, v, made.dout, causal == "causal")
