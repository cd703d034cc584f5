"""Pooling of the logits of an LM head, with the options that stock ``SpladePooling`` lacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, Options, Places, PoolingModule, Wanted
from tilefold.modules.window import check_window, windowed

__all__ = ["HeadPooling"]

POOLINGS = ("max", "sum", "mean", "cls", "last")


class HeadPooling(PoolingModule):
    """Pools the logits of an LM head over the tokens of a text.

    With ``logit[b, s, v]`` from the Transformer before it and the tokens s that count (attended to,
    not in `ignore_ids`)::

        max:       w[b, v] = act(max_s logit_scale * logit[b, s, v])
        sum, mean: w[b, v] = sum_s or mean_s act(logit_scale * logit[b, s, v])
        cls, last: w[b, v] = act(logit_scale * logit[b, s*, v]), s* the first or the last such token

    then the window ``top_k`` and the length 1, if they are asked for. A text without a token that
    counts is 0. After :func:`tilefold.integrations.sentence_transformers.accelerate` the logits
    never exist; the scores are the same.

    ``HeadPooling("cls")`` is the document encoder of TILDE (Zhuang and Zuccon, SIGIR 2021);
    ``logit_scale=1/16`` is what ModernBERT and Ettin start with (arXiv 2606.18811); ``top_k`` and
    ``normalize`` are the lexical focusing window and the query-only norm of PROSPER (arXiv
    2510.18527).

    Args:
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"``, ``"relu"``, ``"softplus"``,
            ``"log1p_softplus"`` (EPIC) or ``"none"``.
        logit_scale: factor on the logits, bias included.
        ignore_ids: token ids whose positions do not count, for instance those of CLS and SEP.
        top_k: keep only the largest weights of a text that has more than this many.
        normalize: ``"l2"`` divides by the Euclidean length, or None.
        embedding_dimension: V, if it is known before the first forward.

    Raises:
        ValueError: for an unknown name, or a number out of range.
    """

    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the stock base class
        "pooling",
        "activation",
        "logit_scale",
        "ignore_ids",
        "top_k",
        "normalize",
        "embedding_dimension",
    ]

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
        check_window(top_k, normalize)
        for name, allowed in (("pooling", POOLINGS), ("activation", fused.ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if (
            isinstance(logit_scale, bool)
            or not isinstance(logit_scale, (int, float))
            or not 0 < logit_scale < math.inf
        ):
            raise ValueError(f"logit_scale must be a number greater than 0, got {logit_scale!r}.")
        if self.ignore_ids and pooling == "cls":
            raise ValueError(
                f"ignore_ids must be empty with pooling 'cls', which reads one, got {self.ignore_ids}.",
            )

    @property
    def quantizable(self) -> bool:
        return self.pooling == "max"

    def forward(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, from logits in
        ``token_embeddings``.
        """
        logits: Tensor = features[
            "token_embeddings"
        ]  # [B, S, V], or [1, T, V] when inputs are flattened
        places = fused.places_of(features, tuple(self.ignore_ids))
        scores = pool_places(logits, places, self.pooling, self.activation, self.logit_scale)
        features["sentence_embedding"] = self._finish(
            scores.float() if fused.autocasts(logits) else scores,
        )
        return features

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        if head is None:
            raise ValueError("HeadPooling must follow an LM head, got no head.")
        activation, more = fused.FUSED_ACTIVATIONS[self.activation]
        places = fused.places_of(features, tuple(self.ignore_ids))
        options: Options = {
            "pooling": self.pooling,
            "activation": activation,
            "logit_scale": self.logit_scale,
        }
        if wanted.sparse is not None and not more and self.normalize is None:
            smaller = [k for k in (self.top_k, wanted.sparse.top_k) if k is not None]
            fewer = wanted.sparse._replace(top_k=min(smaller, default=None))
            return fused.head_scores(head, places, wanted._replace(sparse=fewer), **options)
        scores = fused.head_scores(head, places, wanted._replace(sparse=None), **options)
        for _ in range(more):
            scores = scores.log1p()
        return self._finish(scores)

    def check_fusable(self) -> None:
        """Refuse the one combination that the operator has not: log1p(softplus) of every token,
        summed.
        """
        if fused.FUSED_ACTIVATIONS[self.activation][1] and self.pooling in ("sum", "mean"):
            raise ValueError(
                f"activation {self.activation!r} with pooling {self.pooling!r} cannot be fused: log1p has to be taken "
                "of every token before the sum; leave the model stock, or pool by 'max'.",
            )

    def __repr__(self) -> str:
        return f"HeadPooling({self.get_config_dict()})"

    def _finish(self, scores: Tensor) -> Tensor:
        """The window and the length; ``[B, V]``."""
        self.embedding_dimension = scores.size(1)
        return windowed(scores, self.top_k, self.normalize)


def pool_places(
    logits: Tensor,
    places: Places,
    pooling: str,
    activation: str,
    scale: float = 1.0,
) -> Tensor:
    """``[B, S, V]`` logits, or packed ones ``[1, T, V]``, to activated ``[B, V]``."""
    logits = logits if scale == 1 else logits * scale
    if places.cu_seqlens is None:
        keep = (
            logits.new_ones(logits.shape[:2], dtype=torch.bool)
            if places.keep is None
            else places.keep
        )
        return pool_logits(logits, keep, pooling, activation)
    tokens, offsets = places.packed(logits.squeeze(0))
    rows = [tokens.new_zeros(0, tokens.size(1))]
    for start, end in itertools.pairwise(
        offsets.tolist(),
    ):  # padding them would take the most memory
        text = tokens[None, start:end]
        rows.append(
            pool_logits(text, text.new_ones(text.shape[:2], dtype=torch.bool), pooling, activation),
        )
    return torch.cat(rows)


def pool_logits(logits: Tensor, keep: Tensor, pooling: str, activation: str) -> Tensor:
    """``[B, S, V]`` logits and ``[B, S]`` bool to activated ``[B, V]``; 0 of a text without a token
    that counts.
    """
    outside, empty = ~keep[..., None], ~keep.any(dim=1, keepdim=True)
    if pooling in ("sum", "mean"):
        total = (
            fused.activate(logits.masked_fill(outside, 0), activation)
            .masked_fill(outside, 0)
            .sum(dim=1)
        )
        return total if pooling == "sum" else total / keep.sum(dim=1, keepdim=True).clamp(min=1)
    if logits.size(1) == 0:
        return logits.new_zeros(logits.size(0), logits.size(2))
    if pooling == "max":
        best = logits.masked_fill(outside, -torch.inf).max(dim=1).values
    else:
        place = torch.arange(keep.size(1), device=keep.device).where(
            keep,
            keep.size(1) if pooling == "cls" else -1,
        )
        place = place.amin(dim=1) if pooling == "cls" else place.amax(dim=1)
        place = place.clamp(0, keep.size(1) - 1)
        best = logits[torch.arange(logits.size(0), device=keep.device), place]
    return fused.activate(best.masked_fill(empty, 0), activation).masked_fill(empty, 0)
