"""Texts and a tiny masked LM over their words; random features of a batch, padded and packed, and
their head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.recipes import small
from tests.recipes.small import SUBJECTS

TEXTS = [f"Functions that read and write {subject}, with examples." for subject in SUBJECTS]
QUERIES = ["how do I read zip archives", "csv csv files"]
IGNORED = (0, 1)  # ids of special tokens; every text below begins and ends with id 1
LENGTHS = (5, 3, 7, 2)


class Batch(NamedTuple):
    """``hidden`` ``[B, S, D]`` (leaf), ``weight`` ``[V, D]`` and ``bias`` ``[V]`` (leaves), ids and
    mask ``[B, S]``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    ids: Tensor
    mask: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]

    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T + self.bias

    def features(self, tokens: Tensor, **more: Tensor) -> dict[str, Any]:
        return {
            "token_embeddings": tokens,
            "input_ids": self.ids,
            "attention_mask": self.mask,
            **more,
        }

    def packed(self, tokens: Tensor, **more: Tensor) -> dict[str, Any]:
        """As flash attention leaves them: one row of all valid tokens."""
        keep = self.mask.bool()
        offsets = torch.tensor([0, *self.mask.sum(1).cumsum(0).tolist()], dtype=torch.int32)
        every = {"token_embeddings": tokens, "input_ids": self.ids, **more}
        return {name: value[keep][None] for name, value in every.items()} | {
            "cu_seq_lens_q": offsets,
        }


def batch(dim: int = 6, vocab: int = 19, left: bool = False) -> Batch:
    torch.manual_seed(0)
    count, longest = len(LENGTHS), max(LENGTHS) + 1
    mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(2, vocab, (count, longest))
    ids[:, 0] = 1
    ids[torch.arange(count), torch.tensor(LENGTHS) - 1] = 1
    ids = ids * mask
    hidden = torch.randn(count, longest, dim, dtype=torch.float64)
    hidden[~mask] = 1e3  # what a masked token holds must not be seen
    if left:
        mask, ids, hidden = mask.flip(1), ids.flip(1), hidden.flip(1)
    weight, bias = (
        torch.randn(vocab, dim, dtype=torch.float64),
        torch.randn(vocab, dtype=torch.float64),
    )
    return Batch(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias.requires_grad_(),
        ids,
        mask.long(),
    )


def gradients(scores: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Those of a fixed weighted sum of the scores; zeros where there is none."""
    weights = torch.rand(
        scores.shape,
        dtype=scores.dtype,
        generator=torch.Generator().manual_seed(1),
    )
    found = torch.autograd.grad(
        (scores * weights).sum(),
        leaves,
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def same(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Scores and gradients, to the rounding of fp64."""
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def tiny_masked_lm(folder: Path, kind: str = "bert") -> Path:
    """A model of two narrow layers, whose decoder has a bias that is not 0."""
    return small.tiny_masked_lm(folder, [*TEXTS, *QUERIES], kind, layers=2, bias=0.1)
