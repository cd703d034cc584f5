"""Pooling of the logits of an LM head, with the options that ``SpladePooling`` lacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tilefold._internal.arguments import sorted_token_ids
from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import (
    Features,
    Head,
    PoolingModule,
    ScoreOptions,
    TokenSelection,
)
from tilefold.modules.window import check_pruning_options, prune_and_normalize

__all__ = ["HeadPooling"]

POOLINGS = ("max", "sum", "mean", "cls", "last")


class HeadPooling(PoolingModule):
    """Pools the logits of an LM head over the tokens of a text.

    With ``logit[b, s, v]`` from the Transformer before it and the tokens s that count (attended to,
    not in `ignore_ids`)::

        max:       w[b, v] = act(max_s logit_scale * logit[b, s, v])
        sum, mean: w[b, v] = sum_s or mean_s act(logit_scale * logit[b, s, v])
        cls, last: w[b, v] = act(logit_scale * logit[b, s*, v]), s* the first or the last such token

    then keeps the ``top_k`` largest weights and normalises them, if these options are set. A text
    without a token that counts has the scores 0. After
    :func:`tilefold.integrations.sentence_transformers.accelerate` the logits never exist, and the
    scores are the same.

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
        ValueError: if a name is unknown, or a number out of range.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> from sentence_transformers.sparse_encoder.modules import MLMTransformer
        >>> network = MLMTransformer("masked-lm")
        >>> model = SparseEncoder(modules=[network, HeadPooling("sum", top_k=16)], device="cpu")
        >>> model.encode(["a lost card"]).shape[0]
        1
    """

    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
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
        """Store and check the options; the module has no weights.

        Args:
            pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``.
            activation: name of the activation, such as ``"log1p_relu"``.
            logit_scale: factor on the logits, bias included.
            ignore_ids: token ids whose positions are not pooled.
            top_k: number of weights that are kept per text; ``None`` keeps all.
            normalize: ``"l2"`` scales vectors to length 1; ``None`` does not scale.
            embedding_dimension: V, if it is known before the first forward.
        """
        super().__init__()
        self.pooling = pooling
        self.activation = activation
        self.logit_scale = logit_scale
        self.ignore_ids = sorted_token_ids("ignore_ids", ignore_ids)
        self.top_k = top_k
        self.normalize = normalize
        self.embedding_dimension = embedding_dimension
        check_pruning_options(top_k, normalize)
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {POOLINGS}, got {pooling!r}.")
        if activation not in fused.ACTIVATIONS:
            raise ValueError(f"activation must be one of {fused.ACTIVATIONS}, got {activation!r}.")
        if (
            isinstance(logit_scale, bool)
            or not isinstance(logit_scale, (int, float))
            or not 0 < logit_scale < math.inf
        ):
            raise ValueError(f"logit_scale must be a number greater than 0, got {logit_scale!r}.")
        if self.ignore_ids and pooling == "cls":
            raise ValueError(
                "ignore_ids must be empty with pooling 'cls', which reads a single position, "
                f"got {self.ignore_ids}.",
            )

    @property
    def quantizable(self) -> bool:
        return self.pooling == "max"

    def forward(self, features: Features) -> Features:
        """Compute the sparse vectors of a batch from the logits of an LM head.

        Args:
            features: logits in ``token_embeddings``, and the attention mask of padded tokens or the
                offsets of packed ones.

        Returns:
            The features, with the vectors ``[B, V]`` in ``sentence_embedding``.
        """
        # [B, S, V], or [1, T, V] when inputs are flattened
        logits: Tensor = features["token_embeddings"]
        selection = fused.select_tokens(features, tuple(self.ignore_ids))
        scores = pool_selected_tokens(
            logits,
            selection,
            self.pooling,
            self.activation,
            self.logit_scale,
        )
        if fused.autocast_applies(logits):
            scores = scores.float()  # even if autocast computed the logits in half precision
        features["sentence_embedding"] = self._prune_and_normalize(scores)
        return features

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the sparse vectors of a batch without its logits ``[B, S, V]``.

        Args:
            features: the input of the module, without logits.
            head: states, weight and bias of the LM head.
            score_options: data type, implementation and layout of the result.

        Returns:
            Scores ``[B, V]``, dense or CSR.
        """
        if head is None:
            raise ValueError("HeadPooling must follow an LM head, got no head.")
        # The operator lacks log1p_softplus: it applies softplus, and log1p follows here.
        activation, needs_log1p = fused.FUSED_ACTIVATIONS[self.activation]
        # The operator can only prune rows if no step changes the weights after it.
        can_prune = not needs_log1p and self.normalize is None
        sparse = score_options.sparse if can_prune else None
        if sparse is not None and self.top_k is not None:
            top_k = self.top_k if sparse.top_k is None else min(self.top_k, sparse.top_k)
            sparse = sparse._replace(top_k=top_k)
        scores = fused.head_scores(
            head,
            fused.select_tokens(features, tuple(self.ignore_ids)),
            score_options._replace(sparse=sparse),
            pooling=self.pooling,
            activation=activation,
            logit_scale=self.logit_scale,
        )
        if sparse is not None:
            return scores
        if needs_log1p:
            scores = scores.log1p()
        return self._prune_and_normalize(scores)

    def check_fusable(self) -> None:
        """Refuse ``log1p_softplus`` with ``sum`` or ``mean``, which the operator lacks."""
        _, needs_log1p = fused.FUSED_ACTIVATIONS[self.activation]
        if needs_log1p and self.pooling in ("sum", "mean"):
            raise ValueError(
                f"activation {self.activation!r} with pooling {self.pooling!r} cannot be fused: "
                "log1p has to be taken of every token before the sum; leave the model stock, or "
                "pool by 'max'.",
            )

    def __repr__(self) -> str:
        return f"HeadPooling({self.get_config_dict()})"

    def _prune_and_normalize(self, scores: Tensor) -> Tensor:
        """Apply ``top_k`` and ``normalize`` to dense scores ``[B, V]``, and remember V."""
        self.embedding_dimension = scores.size(1)
        return prune_and_normalize(scores, self.top_k, self.normalize)


def pool_selected_tokens(
    logits: Tensor,
    selection: TokenSelection,
    pooling: str,
    activation: str,
    scale: float = 1.0,
) -> Tensor:
    """Pool the logits of the selected tokens of each text.

    Args:
        logits: ``[B, S, V]``, or packed ``[1, T, V]``.
        selection: the tokens that are pooled.
        pooling: one of :data:`POOLINGS`.
        activation: one of :data:`tilefold.modules.fused_pooling.ACTIVATIONS`.
        scale: factor on the logits.

    Returns:
        Activated scores ``[B, V]``.
    """
    if scale != 1:
        logits = logits * scale
    if selection.cu_seqlens is None:
        keep = selection.keep
        if keep is None:
            keep = _all_tokens(logits)
        return pool_logits(logits, keep, pooling, activation)
    token_logits, offsets = selection.select_packed(logits.squeeze(0))
    # An empty tensor comes first, so that a batch without texts has a result, too.
    rows = [token_logits.new_zeros(0, token_logits.size(1))]
    # One text at a time. Padding the logits would need more memory than anything else.
    for start, end in itertools.pairwise(offsets.tolist()):
        text_logits = token_logits[None, start:end]
        rows.append(pool_logits(text_logits, _all_tokens(text_logits), pooling, activation))
    return torch.cat(rows)


def _all_tokens(logits: Tensor) -> Tensor:
    """Return a mask ``[B, S]`` that keeps every token of logits ``[B, S, V]``."""
    return logits.new_ones(logits.shape[:2], dtype=torch.bool)


def pool_logits(logits: Tensor, keep: Tensor, pooling: str, activation: str) -> Tensor:
    """Reduce padded logits over the tokens of each text, and apply the activation.

    Sums and means are taken over activated logits. A maximum is taken before the activation, which
    is monotone, to save work.

    Args:
        logits: ``[B, S, V]``.
        keep: bool ``[B, S]``, True for tokens that are pooled.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` (first token) or ``"last"`` (token).
        activation: one of :data:`tilefold.modules.fused_pooling.ACTIVATIONS`.

    Returns:
        Scores ``[B, V]``, 0 for a text in which no token is pooled.
    """
    if pooling in ("sum", "mean"):
        total = _sum_of_activated(logits, keep, activation)
        return total if pooling == "sum" else total / keep.sum(dim=1, keepdim=True).clamp(min=1)
    if logits.size(1) == 0:
        return logits.new_zeros(logits.size(0), logits.size(2))
    if pooling == "max":
        pooled = logits.masked_fill(~keep[..., None], -torch.inf).max(dim=1).values
    else:
        texts = torch.arange(logits.size(0), device=keep.device)
        pooled = logits[texts, _first_or_last_positions(keep, pooling)]
    # Without a token, the pooled value is -inf or arbitrary. It is set to 0 before the activation,
    # and again after it, because the activation of 0 may be positive.
    has_no_token = ~keep.any(dim=1, keepdim=True)
    activated = fused.activate(pooled.masked_fill(has_no_token, 0), activation)
    return activated.masked_fill(has_no_token, 0)


def _sum_of_activated(logits: Tensor, keep: Tensor, activation: str) -> Tensor:
    """Return the sum of the activated logits of the pooled tokens, ``[B, V]``.

    Args:
        logits: ``[B, S, V]``.
        keep: bool ``[B, S]``, True for tokens that are pooled.
        activation: name of the activation.
    """
    is_masked = ~keep[..., None]
    # Masked before the activation, in which NaN would spread, and after it, because the activation
    # of 0 may be positive, such as softplus(0).
    activated = fused.activate(logits.masked_fill(is_masked, 0), activation)
    return activated.masked_fill(is_masked, 0).sum(dim=1)


def _first_or_last_positions(keep: Tensor, pooling: str) -> Tensor:
    """Return the position of the first or the last pooled token of each text.

    Args:
        keep: bool ``[B, S]``, True for tokens that are pooled.
        pooling: ``"cls"`` for the first token, anything else for the last one.

    Returns:
        Positions ``[B]``, arbitrary but below S for a text in which no token is pooled.
    """
    length = keep.size(1)
    positions = torch.arange(length, device=keep.device)
    if pooling == "cls":
        ends = positions.where(keep, length).amin(dim=1)
    else:
        ends = positions.where(keep, -1).amax(dim=1)
    return ends.clamp(0, length - 1)
