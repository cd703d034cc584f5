"""The fused MaxSim kernels that others publish, if they are installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.maxsim.inputs import MaxSimBenchInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import Implementation, gpu_if_installed


def _flash_maxsim(inputs: MaxSimBenchInputs) -> Runnable:
    peer: Any = importlib.import_module("flash_maxsim")
    offsets = inputs.cu_seqlens_d
    if offsets is not None:
        query = inputs.queries[0].detach()
        longest = int(offsets.diff().max())

        def packed() -> Tensor:
            scores: Tensor = peer.flash_maxsim_packed(query, inputs.documents.detach(), offsets, max_seqlen_d=longest)
            return scores[None]

        return Runnable(packed, None, "flash_maxsim_packed")
    if inputs.queries.size(0) == 1:

        def rerank(queries: Tensor, documents: Tensor) -> Tensor:
            scores: Tensor = peer.flash_maxsim(queries[0], documents)
            return scores[None]

        return inputs.bind(rerank, "flash_maxsim", train=peer.flash_maxsim_batched_train)
    return inputs.bind(peer.flash_maxsim_batched, "flash_maxsim_batched", train=peer.flash_maxsim_batched_train)


def _late_interaction_kernels(inputs: MaxSimBenchInputs) -> Runnable:
    peer: Any = importlib.import_module("late_interaction_kernels")
    offsets = inputs.cu_seqlens_d
    if offsets is None:
        return inputs.bind(peer.maxsim, "late_interaction_kernels.maxsim")
    length = inputs.queries.size(1)
    query_offsets = torch.tensor([0, length], dtype=torch.int32, device=offsets.device)
    longest = int(offsets.diff().max())

    def packed(queries: Tensor, documents: Tensor) -> Tensor:
        scores: Tensor = peer.maxsim_varlen(
            queries[0], documents, query_offsets, offsets, max_seqlen_q=length, max_seqlen_d=longest
        )
        return scores

    return inputs.bind(packed, "maxsim_varlen")


PEERS = (
    Implementation("flash-maxsim", _flash_maxsim, "baseline", gpu_if_installed("flash_maxsim")),
    Implementation(
        "late-interaction-kernels",
        _late_interaction_kernels,
        "baseline",
        gpu_if_installed("late_interaction_kernels"),
    ),
)
