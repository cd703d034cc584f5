"""Texts and a tiny masked LM over their words; random features of a batch, padded and packed."""

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
    """Random features of texts, and a head.

    Attributes:
        hidden: ``[B, S, D]`` hidden states, a leaf.
        weight: ``[V, D]`` weight of the head, a leaf.
        bias: ``[V]`` bias of the head, a leaf.
        ids: ``[B, S]`` token ids.
        mask: ``[B, S]`` attention mask.
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

    def features(self, tokens: Tensor, **others: Tensor) -> dict[str, Any]:
        """Features of padded texts."""
        return {
            "token_embeddings": tokens,
            "input_ids": self.ids,
            "attention_mask": self.mask,
            **others,
        }

    def packed(self, tokens: Tensor, **others: Tensor) -> dict[str, Any]:
        """Features as flash attention returns them: one row of all valid tokens."""
        valid = self.mask.bool()
        lengths = self.mask.sum(1)
        padded = {"token_embeddings": tokens, "input_ids": self.ids, **others}
        features: dict[str, Any] = {name: value[valid][None] for name, value in padded.items()}
        features["cu_seq_lens_q"] = torch.tensor(
            [0, *lengths.cumsum(0).tolist()],
            dtype=torch.int32,
        )
        return features


def batch(dim: int = 6, vocab: int = 19, left: bool = False) -> Batch:
    """A random batch of :data:`LENGTHS`, the same at every call.

    Args:
        dim: Dimension of the hidden states.
        vocab: Size of the vocabulary.
        left: Whether padding is on the left.
    """
    torch.manual_seed(0)
    count = len(LENGTHS)
    longest = max(LENGTHS) + 1
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(2, vocab, (count, longest))
    ids[:, 0] = 1
    ids[torch.arange(count), lengths - 1] = 1
    ids = ids * mask
    hidden = torch.randn(count, longest, dim, dtype=torch.float64)
    hidden[~mask] = 1e3  # a masked token must not count
    if left:
        mask = mask.flip(1)
        ids = ids.flip(1)
        hidden = hidden.flip(1)
    weight = torch.randn(vocab, dim, dtype=torch.float64)
    bias = torch.randn(vocab, dtype=torch.float64)
    return Batch(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias.requires_grad_(),
        ids,
        mask.long(),
    )


def gradients(scores: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed weighted sum of the scores, zeros for leaves that it does not use."""
    weights = torch.rand(
        scores.shape,
        dtype=scores.dtype,
        generator=torch.Generator().manual_seed(1),
    )
    leaf_gradients = torch.autograd.grad(
        (scores * weights).sum(),
        leaves,
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, leaf_gradients, strict=True)
    ]


def same(scores: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Check that scores and their gradients are the same to the rounding of fp64."""
    torch.testing.assert_close(scores, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        gradients(scores, leaves),
        gradients(expected, leaves),
        rtol=1e-9,
        atol=1e-11,
    )


def tiny_masked_lm(folder: Path, kind: str = "bert") -> Path:
    """A model of two narrow layers, whose decoder has a bias that is not 0."""
    return small.tiny_masked_lm(folder, [*TEXTS, *QUERIES], kind, layers=2, bias=0.1)
