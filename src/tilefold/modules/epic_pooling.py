"""The document encoder of EPIC: an LM head whose logits are weighted by learned token importance
and text quality.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilefold._internal.sigmoid import sigmoid
from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, PoolingModule, Wanted
from tilefold.modules.head_pooling import pool_places

__all__ = ["EpicPooling"]

_ALIGNMENT = (
    8  # columns that are added to the head come in eights, so that rows of the weight stay aligned
)


class EpicPooling(PoolingModule):
    """Passage vectors of EPIC (MacAvaney et al., arXiv 2004.14245), in the order of the unified
    framework.

    With the last hidden states ``h[b, s]`` of the encoder, the logits of its LM head, and the
    tokens s that count::

        m[b, s] = log1p(softplus(importance(h[b, s]))), 0 for ignored tokens
        w[b, v] = log1p(softplus(max(0, max_s m[b, s] * logit[b, s, v]))) * sigmoid(quality(h[b, first]))

    The importance weighs logits *before* the activation. The framework lets masked tokens take part
    in the maximum, as 0, so that terms of a text with a special token have at least
    ``log1p(softplus(0)) = 0.5265`` times the quality; here this floor is always there. All V
    weights are positive, of a text without tokens 0: encode with ``max_active_dims`` (the paper
    keeps 1,000 terms).

    The Transformer before it must put out its hidden states:
    ``config_kwargs={"output_hidden_states": True}``.

    ``accelerate`` fuses it exactly: ``m * (W t + b)`` is the product of ``[m * t, m]`` with ``[W,
    b]``, for a copy of the head's weight, ``V (D + 8)`` numbers, per forward, and one of its
    gradient.

    Args:
        hidden_size: D.
        ignore_ids: token ids whose positions have the importance 0, for instance those of CLS and
            SEP.
        embedding_dimension: V, if it is known before the first forward.

    Attributes:
        importance, quality: ``nn.Linear(D, 1)``.
    """

    config_keys: list[str] = ["hidden_size", "ignore_ids", "embedding_dimension"]  # noqa: RUF012 - of the base class

    def __init__(
        self,
        hidden_size: int,
        ignore_ids: Iterable[int] = (),
        embedding_dimension: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ignore_ids = sorted({int(i) for i in ignore_ids})
        self.embedding_dimension = embedding_dimension
        self.importance = nn.Linear(hidden_size, 1)
        self.quality = nn.Linear(hidden_size, 1)

    def forward(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, from logits in
        ``token_embeddings``.
        """
        states, importance = self._importance(features)
        logits: Tensor = features["token_embeddings"]
        wide = logits.float() if fused.autocasts(logits) else logits
        weighted = wide * importance.view(wide.shape[:2])[..., None]
        best = pool_places(weighted, fused.places_of(features), "max", "none")
        features["sentence_embedding"] = self._scores(best, states, features)
        return features

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        if head is None:
            raise ValueError("EpicPooling must follow an LM head, got no head.")
        states, importance = self._importance(features)
        weighted, places = _weighted(head, importance), fused.places_of(features)
        # rows are dense: all weights are positive
        best = fused.head_scores(weighted, places, wanted._replace(sparse=None), activation="none")
        return self._scores(best, states, features)

    def _importance(self, features: Features) -> tuple[Tensor, Tensor]:
        """Last hidden states ``[B, S, D]`` (packed: ``[T, D]``) and the importance of each token."""
        if (layers := features.pop("all_layer_embeddings", None)) is None:
            raise ValueError(
                f"features must have all_layer_embeddings for EpicPooling, got {sorted(features)}; "
                'load the Transformer with config_kwargs={"output_hidden_states": True}.',
            )
        states: Tensor = layers[-1]
        if "cu_seq_lens_q" in features:
            states = states.squeeze(0)
        places = fused.places_of(features, tuple(self.ignore_ids))
        product = self.importance(states).squeeze(-1)
        weights = fused.activate(
            product.float() if fused.autocasts(states) else product,
            "log1p_softplus",
        )
        return states, weights if places.keep is None else weights * places.keep

    def _scores(self, best: Tensor, states: Tensor, features: Features) -> Tensor:
        """The floor, the activation and the quality of each text: 0 of one without tokens."""
        if (offsets := features.get("cu_seq_lens_q")) is None:
            mask = features["attention_mask"] != 0
            some, texts = mask.any(dim=1), torch.arange(states.size(0), device=states.device)
            opening = states[texts, mask.int().argmax(dim=1)] if mask.size(1) else states.sum(1)
        else:
            some, last = offsets.diff() > 0, states.size(0) - 1
            at = offsets[:-1].long().clamp(max=last)
            opening = states[at] if last >= 0 else states.new_zeros(len(some), states.size(1))
        logit: Tensor = self.quality(opening)
        if fused.autocasts(states):
            logit = logit.float()
        quality = sigmoid(logit) * some[:, None]
        self.embedding_dimension = best.size(1)
        scores: Tensor = fused.activate(best.relu(), "log1p_softplus") * quality
        return scores


def _weighted(head: Head, importance: Tensor) -> Head:
    """The head whose logits are those of ``head`` times ``importance``, bias included."""
    hidden, weight, bias = head
    factor = importance.to(hidden.dtype)[..., None]
    if bias is None:
        return Head(hidden * factor, weight, None)
    more = hidden.new_zeros(*hidden.shape[:-1], _ALIGNMENT - 1)
    columns = [
        weight,
        bias.to(weight.dtype)[:, None],
        weight.new_zeros(weight.size(0), _ALIGNMENT - 1),
    ]
    return Head(torch.cat([hidden * factor, factor, more], dim=-1), torch.cat(columns, dim=1), None)
