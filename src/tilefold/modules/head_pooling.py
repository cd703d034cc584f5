"""Pooling of the logits of an LM head, with the options that stock ``SpladePooling`` lacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length

from tilefold.modules.fused_pooling import (
    ACTIVATIONS,
    FUSED_ACTIVATIONS,
    Features,
    Head,
    Options,
    PoolingModule,
    Wanted,
    activate,
    autocasts,
    head_scores,
    places_of,
)
from tilefold.modules.window import keep_heaviest

__all__ = ["HeadPooling"]

POOLINGS = ("max", "sum", "mean", "cls", "last")


class HeadPooling(PoolingModule):
    """Pools the logits of an LM head over the tokens of a text.

    With ``logit[b, s, v]`` from the Transformer before it and the tokens s that count (attended to, not in
    `ignore_ids`)::

        max:       w[b, v] = act(max_s logit_scale * logit[b, s, v])
        sum, mean: w[b, v] = sum_s or mean_s act(logit_scale * logit[b, s, v])
        cls, last: w[b, v] = act(logit_scale * logit[b, s*, v]), s* the first or the last such token

    then the window ``top_k`` and the length 1, if they are asked for. A text without a token that counts is 0. After
    :func:`tilefold.integrations.sentence_transformers.accelerate` the logits never exist; the scores are the same.

    ``HeadPooling("cls")`` is the document encoder of TILDE (Zhuang and Zuccon, SIGIR 2021); ``logit_scale=1/16`` is
    what ModernBERT and Ettin start with (arXiv 2606.18811); ``top_k`` and ``normalize`` are the lexical focusing window
    and the query-only norm of PROSPER (arXiv 2510.18527).

    Args:
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"``, ``"relu"``, ``"softplus"``, ``"log1p_softplus"``
            (EPIC) or ``"none"``.
        logit_scale: factor on the logits, bias included.
        ignore_ids: token ids whose positions do not count, for instance those of CLS and SEP.
        top_k: keep only the largest weights of a text that has more than this many.
        normalize: ``"l2"`` divides by the Euclidean length, or None.
        embedding_dimension: V, if it is known before the first forward.

    Raises:
        ValueError: for an unknown name, or a number out of range.
    """

    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the stock base class
        "pooling", "activation", "logit_scale", "ignore_ids", "top_k", "normalize", "embedding_dimension",
    ]  # fmt: skip

    def __init__(
        self,
        pooling: str = "max",
        activation: str = "log1p_relu",
        logit_scale: float = 1.0,
        ignore_ids: Iterable[int] = (),
        top_k: int | None = None,
        normalize: str | None = None,
        embedding_dimension: int | None = None,
    ) -> None:
        super().__init__()
        self.pooling, self.activation, self.logit_scale = pooling, activation, logit_scale
        self.ignore_ids = sorted({int(i) for i in ignore_ids})
        self.top_k, self.normalize, self.embedding_dimension = top_k, normalize, embedding_dimension
        self._check()

    @property
    def quantizable(self) -> bool:
        return self.pooling == "max"

    def forward(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, from logits in ``token_embeddings``."""
        logits: Tensor = features["token_embeddings"]  # [B, S, V], or [1, T, V] when inputs are flattened
        places = places_of(features, tuple(self.ignore_ids))
        if places.cu_seqlens is None:
            keep = logits.new_ones(logits.shape[:2], dtype=torch.bool) if places.keep is None else places.keep
            scores = self._pool(logits, keep)
        else:  # one sequence at a time: padding them would take the most memory
            tokens, offsets = places.packed(logits.squeeze(0))
            rows = [tokens[start:end][None] for start, end in itertools.pairwise(offsets.tolist())]
            pooled = [self._pool(row, row.new_ones(row.shape[:2], dtype=torch.bool)) for row in rows]
            scores = torch.cat([tokens.new_zeros(0, tokens.size(1)), *pooled])
        features["sentence_embedding"] = self._finish(scores.float() if autocasts(logits) else scores)
        return features

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        if head is None:
            raise ValueError("HeadPooling must follow an LM head, got no head.")
        activation, more = FUSED_ACTIVATIONS[self.activation]
        places = places_of(features, tuple(self.ignore_ids))
        options: Options = {"pooling": self.pooling, "activation": activation, "logit_scale": self.logit_scale}
        if wanted.sparse is not None and not more and self.normalize is None:
            smaller = [k for k in (self.top_k, wanted.sparse.top_k) if k is not None]
            fewer = wanted.sparse._replace(top_k=min(smaller, default=None))
            return head_scores(head, places, wanted._replace(sparse=fewer), **options)
        scores = head_scores(head, places, wanted._replace(sparse=None), **options)
        for _ in range(more):
            scores = scores.log1p()
        return self._finish(scores)

    def check_fusable(self) -> None:
        """Refuse the one combination that the operator has not: log1p(softplus) of every token, summed."""
        if FUSED_ACTIVATIONS[self.activation][1] and self.pooling in ("sum", "mean"):
            raise ValueError(
                f"activation {self.activation!r} with pooling {self.pooling!r} cannot be fused: log1p has to be taken "
                "of every token before the sum; leave the model stock, or pool by 'max'."
            )

    def __repr__(self) -> str:
        return f"HeadPooling({self.get_config_dict()})"

    def _pool(self, logits: Tensor, keep: Tensor) -> Tensor:
        scaled = logits if self.logit_scale == 1 else logits * self.logit_scale
        return pool_logits(scaled, keep, self.pooling, self.activation)

    def _finish(self, scores: Tensor) -> Tensor:
        """The window and the length; ``[B, V]``."""
        self.embedding_dimension = scores.size(1)
        if self.top_k is not None:
            scores = keep_heaviest(scores, self.top_k)
        return unit_length(scores, dim=1) if self.normalize == "l2" else scores

    def _check(self) -> None:
        for name, allowed in (("pooling", POOLINGS), ("activation", ACTIVATIONS), ("normalize", ("l2", None))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        scale, top_k = self.logit_scale, self.top_k
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ValueError(f"logit_scale must be a number greater than 0, got {scale!r}.")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, or None, got {top_k!r}.")
        if self.ignore_ids and self.pooling == "cls":
            raise ValueError(f"ignore_ids must be empty with pooling 'cls', which reads one, got {self.ignore_ids}.")


def pool_logits(logits: Tensor, keep: Tensor, pooling: str, activation: str) -> Tensor:
    """``[B, S, V]`` logits and ``[B, S]`` bool to activated ``[B, V]``; 0 of a text without a token that counts."""
    outside, empty = ~keep[..., None], ~keep.any(dim=1, keepdim=True)
    if pooling in ("sum", "mean"):
        tokens = activate(logits.masked_fill(outside, 0), activation).masked_fill(outside, 0)
        total = tokens.sum(dim=1)
        return total if pooling == "sum" else total / keep.sum(dim=1, keepdim=True).clamp(min=1)
    if logits.size(1) == 0:
        return logits.new_zeros(logits.size(0), logits.size(2))
    if pooling == "max":
        best = logits.masked_fill(outside, -torch.inf).max(dim=1).values
    else:
        at = torch.arange(keep.size(1), device=keep.device)
        place = at.where(keep, keep.size(1) if pooling == "cls" else -1)
        place = place.amin(dim=1) if pooling == "cls" else place.amax(dim=1)
        place = place.clamp(0, keep.size(1) - 1)
        best = logits[torch.arange(logits.size(0), device=keep.device), place]
    return activate(best.masked_fill(empty, 0), activation).masked_fill(empty, 0)
