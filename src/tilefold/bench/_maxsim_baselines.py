"""What MaxSim is compared with: torch eager and compiled, and the fused kernels that others publish, if installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.bench.registry import Implementation, Runnable

if TYPE_CHECKING:
    from tilefold.bench.maxsim import MaxSimBenchInputs

Score = Callable[[Tensor, Tensor], Tensor]


def materialised_scores(queries: Tensor, documents: Tensor) -> Tensor:
    """The einsum of late-interaction libraries: every similarity ``[Nq, Nd, Lq, Ld]``, then maximum and sum."""
    return torch.einsum("qid,njd->qnij", queries, documents).amax(dim=3).float().sum(dim=2)


def runnable_scores(score: Score, inputs: MaxSimBenchInputs, label: str, train: Score | None = None) -> Runnable:
    """Bind ``score(queries, documents)`` to ``inputs``; ``train`` runs where a gradient is asked for, if given."""

    def forward() -> Tensor:
        with torch.no_grad():
            return score(inputs.queries, inputs.documents)

    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = (train or score)(inputs.queries, inputs.documents)
        grads = torch.autograd.grad(out, (inputs.queries, inputs.documents), inputs.grad_output.to(out.dtype))
        return out.detach(), grads

    return Runnable(forward, forward_backward, label)


def _padded(inputs: MaxSimBenchInputs, score: Score) -> Score:
    """``score`` for packed documents: what a library without them does, pad and mask (here: with zero rows)."""
    if inputs.cu_seqlens_d is None:
        return score
    lengths = inputs.cu_seqlens_d.diff()
    valid = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    place = valid.nonzero(as_tuple=True)

    def padded(queries: Tensor, documents: Tensor) -> Tensor:
        tokens = documents.new_zeros(*valid.shape, documents.size(1)).index_put(place, documents)
        similarities = torch.einsum("qid,njd->qnij", queries, tokens).masked_fill(~valid[:, None], float("-inf"))
        return similarities.amax(dim=3).float().sum(dim=2)

    return padded


def _eager(inputs: MaxSimBenchInputs) -> Runnable:
    return runnable_scores(_padded(inputs, materialised_scores), inputs, "torch")


def _compiled(inputs: MaxSimBenchInputs) -> Runnable:
    score = torch.compile(_padded(inputs, materialised_scores), dynamic=False)
    return runnable_scores(score, inputs, "torch.compile")


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

        return runnable_scores(rerank, inputs, "flash_maxsim", train=peer.flash_maxsim_batched_train)
    return runnable_scores(
        peer.flash_maxsim_batched, inputs, "flash_maxsim_batched", train=peer.flash_maxsim_batched_train
    )


def _late_interaction_kernels(inputs: MaxSimBenchInputs) -> Runnable:
    peer: Any = importlib.import_module("late_interaction_kernels")
    offsets = inputs.cu_seqlens_d
    if offsets is None:
        return runnable_scores(peer.maxsim, inputs, "late_interaction_kernels.maxsim")
    length = inputs.queries.size(1)
    query_offsets = torch.tensor([0, length], dtype=torch.int32, device=offsets.device)
    longest = int(offsets.diff().max())

    def packed(queries: Tensor, documents: Tensor) -> Tensor:
        scores: Tensor = peer.maxsim_varlen(
            queries[0], documents, query_offsets, offsets, max_seqlen_q=length, max_seqlen_d=longest
        )
        return scores

    return runnable_scores(packed, inputs, "maxsim_varlen")


def _if_installed(module: str) -> tuple[str, ...]:
    return ("cuda",) if importlib.util.find_spec(module) is not None else ()


BASELINES = (
    Implementation("eager", _eager, "baseline"),
    Implementation("compile", _compiled, "baseline", default_on=("cuda",)),
    Implementation("flash-maxsim", _flash_maxsim, "baseline", default_on=_if_installed("flash_maxsim")),
    Implementation(
        "late-interaction-kernels",
        _late_interaction_kernels,
        "baseline",
        default_on=_if_installed("late_interaction_kernels"),
    ),
)
