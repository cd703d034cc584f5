"""What MaxSim is compared with: the einsum of late-interaction libraries, eager and compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.bench.maxsim.inputs import MaxSimBenchInputs, Score
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import Implementation


def materialised_scores(queries: Tensor, documents: Tensor) -> Tensor:
    """The einsum of late-interaction libraries: every similarity ``[Nq, Nd, Lq, Ld]``, then maximum and sum."""
    return torch.einsum("qid,njd->qnij", queries, documents).amax(dim=3).float().sum(dim=2)


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
    return inputs.bind(_padded(inputs, materialised_scores), "torch")


def _compiled(inputs: MaxSimBenchInputs) -> Runnable:
    score = torch.compile(_padded(inputs, materialised_scores), dynamic=False)
    return inputs.bind(score, "torch.compile")


BASELINES = (
    Implementation("eager", _eager, "baseline"),
    Implementation("compile", _compiled, "baseline", default_on=("cuda",)),
)
