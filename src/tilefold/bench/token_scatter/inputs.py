"""Inputs of the token scatter's benchmark: ids as frequent as words, and a weight for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable, bind
from tilefold.bench.spec import BenchCase
from tilefold.testing.token_scatter import zipf_ids

Scatter = Callable[[Tensor, Tensor, Tensor, int], Tensor]

# CLS, PAD, SEP and UNK, as XLM-R numbers them
SPECIAL_IDS = (0, 1, 2, 3)
_RAGGED_SHARES = (0.02, 0.64)  # sequence lengths as a share of S, evenly spread: 33% of the tokens are no padding


@dataclass(frozen=True)
class TokenScatterBenchInputs:
    """Inputs of one case, all on one device.

    Attributes:
        weights: ``[B, S]``, requires a gradient; half of them are negative, as before a relu.
        input_ids: ``[B, S]`` int64, as frequent as the words of a text; CLS first, SEP last, then PAD.
        unused: the special ids, which score nothing.
        grad_output: ``[B, V]``.
        valid_tokens: tokens that are not special.
        active: share of positive scores.
        csr: whether the scores are wanted in CSR form, for encoding, which has no gradient.
    """

    weights: Tensor
    input_ids: Tensor
    unused: Tensor
    grad_output: Tensor
    valid_tokens: int
    active: float
    csr: bool = False

    def bind(self, scatter: Scatter, label: str) -> Runnable:
        """``scatter(weights, input_ids, unused, vocab_size)`` of these inputs; its dense scores to CSR if asked for."""
        arguments = (self.weights, self.input_ids, self.unused, self.grad_output.size(1))
        if self.csr:
            return self.bind_csr(lambda: _to_csr(scatter(*arguments)), f"{label}, to_sparse_csr")
        return bind(scatter, arguments, (self.weights,), self.grad_output, label)

    def bind_csr(self, scatter: Callable[[], Tensor], label: str) -> Runnable:
        """``scatter()``, which returns CSR scores of these inputs."""

        def forward() -> Tensor:
            with torch.no_grad():
                return scatter()

        return Runnable(forward, label=label)


def _to_csr(scores: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return scores.to_sparse_csr()


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> TokenScatterBenchInputs:
    """Random inputs of ``case``; ``"ragged"`` ones are padded on the right to three times their length.

    Of ``"csr"`` ones the scores are wanted in CSR form.
    """
    batch, length, vocab = (case.dims[name] for name in "BSV")
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = torch.randn(batch, length, generator=generator, device=device).to(DTYPES[case.dtype])
    ids = zipf_ids((batch, length), vocab - len(SPECIAL_IDS), generator) + len(SPECIAL_IDS)
    lengths = torch.full((batch,), length, device=device)
    if case.variant == "ragged":
        shares = torch.linspace(*_RAGGED_SHARES, batch, device=device)
        lengths = (shares * length).round().long().clamp(min=2)
    places = torch.arange(length, device=device)
    ids[:, 0] = SPECIAL_IDS[0]
    ids = torch.where(places == lengths[:, None] - 1, SPECIAL_IDS[2], ids)
    ids = torch.where(places >= lengths[:, None], SPECIAL_IDS[1], ids)
    unused = torch.tensor(SPECIAL_IDS, device=device)
    counts = ~torch.isin(ids, unused)
    entry = (torch.arange(batch, device=device)[:, None] * vocab + ids)[counts & (weights > 0)]
    active = torch.unique(entry).numel() / (batch * vocab)
    grad_output = torch.randn(batch, vocab, generator=generator, device=device).to(weights.dtype)
    weights.requires_grad_()
    valid = int(counts.sum().item())
    return TokenScatterBenchInputs(weights, ids, unused, grad_output, valid, active, case.variant == "csr")
