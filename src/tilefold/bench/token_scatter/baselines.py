"""What the token scatter is compared with: the published ways in plain torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilefold.bench.runnables import Runnable, compiled
from tilefold.bench.spec import Implementation, NotApplicable
from tilefold.bench.token_scatter.inputs import Scatter, TokenScatterBenchInputs


def membership_scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
    """FlagEmbedding's training of BGE-M3 (and tevatron's uniCOIL): ``[B, S, V]`` zeros, a scatter, a maximum."""
    every = torch.zeros(*input_ids.shape, vocab_size, dtype=weights.dtype, device=weights.device)
    every = torch.scatter(every, dim=-1, index=input_ids.unsqueeze(-1), src=weights.relu().unsqueeze(-1))
    return torch.max(every, dim=1).values.index_fill_(1, unused, 0)


def reduced_scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
    """FlagEmbedding's inference of BGE-M3: a ``scatter_reduce`` with amax.

    It clears the unused columns of the result in place, which autograd forbids here; so their tokens are cleared, which
    is also less work.
    """
    used = weights.relu().masked_fill(torch.isin(input_ids, unused), 0)
    scores = torch.zeros(input_ids.size(0), vocab_size, dtype=weights.dtype, device=weights.device)
    return scores.scatter_reduce(dim=-1, index=input_ids, src=used, reduce="amax")


def _eager(scatter: Scatter) -> Callable[[TokenScatterBenchInputs], Runnable]:
    return lambda inputs: _dense_only(inputs, scatter).bind(scatter, "torch")


def _compiled(scatter: Scatter) -> Callable[[TokenScatterBenchInputs], Runnable]:
    return lambda inputs: _dense_only(inputs, scatter).bind(compiled(scatter), "torch.compile")


def _dense_only(inputs: TokenScatterBenchInputs, scatter: Scatter) -> TokenScatterBenchInputs:
    if inputs.csr and scatter is membership_scatter:
        raise NotApplicable("nobody makes CSR scores in this way")
    return inputs


BASELINES = (
    Implementation("scatter-reduce", _eager(reduced_scatter), "baseline"),
    Implementation("scatter-reduce-compile", _compiled(reduced_scatter), "baseline", default_on=("cuda",)),
    Implementation("membership", _eager(membership_scatter), "baseline"),
    Implementation("membership-compile", _compiled(membership_scatter), "baseline", default_on=("cuda",)),
)
