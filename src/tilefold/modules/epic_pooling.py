"""The document encoder of EPIC: an LM head whose logits are weighted by learned token importance
and text quality.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilefold._internal.arguments import check_count, sorted_token_ids
from tilefold._internal.sigmoid import sigmoid
from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, PoolingModule, ScoreOptions
from tilefold.modules.head_pooling import pool_selected_tokens

__all__ = ["EpicPooling"]

# columns are added to the head in groups of eight, so that rows of the weight stay aligned
_ALIGNMENT = 8


class EpicPooling(PoolingModule):
    """Passage vectors of EPIC (MacAvaney et al., arXiv 2004.14245).

    The order of the steps is that of the unified framework (arXiv 2303.13416).
    With the last hidden states ``h[b, s]`` of the encoder, the logits of its LM head, and the
    tokens s that count::

        m[b, s] = log1p(softplus(importance(h[b, s]))), 0 for ignored tokens
        w[b, v] = (
            log1p(softplus(max(0, max_s m[b, s] * logit[b, s, v])))
            * sigmoid(quality(h[b, first]))
        )

    The importance weighs logits *before* the activation. The framework lets masked tokens take part
    in the maximum, as 0, so that terms of a text with a special token have at least
    ``log1p(softplus(0)) = 0.5265`` times the quality; here this floor is always there. All V
    weights of a text with tokens are positive, so encode with ``max_active_dims`` (the paper keeps
    1,000 terms).

    The Transformer before this module must return its hidden states:
    ``config_kwargs={"output_hidden_states": True}``.

    ``accelerate`` computes the same scores without logits: ``m * (W t + b)`` is the product of
    ``[m * t, m]`` with ``[W, b]``. Each forward copies the head's weight, ``V (D + 8)`` numbers,
    and each backward its gradient.

    Args:
        hidden_size: D.
        ignore_ids: token ids whose positions have the importance 0, for instance those of CLS and
            SEP.
        embedding_dimension: V, if it is known before the first forward.

    Attributes:
        importance, quality: ``nn.Linear(D, 1)``.
    """

    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "hidden_size",
        "ignore_ids",
        "embedding_dimension",
    ]

    def __init__(
        self,
        hidden_size: int,
        ignore_ids: Iterable[int] = (),
        embedding_dimension: int | None = None,
    ) -> None:
        """Create two linear layers with random weights.

        One computes the importance of each token, a factor of its logits. The other computes the
        quality of each text, a factor of its scores.

        Args:
            hidden_size: D.
            ignore_ids: token ids whose positions have zero importance.
            embedding_dimension: V, if it is known before the first forward.
        """
        super().__init__()
        check_count("hidden_size", hidden_size)
        self.hidden_size = hidden_size
        self.ignore_ids = sorted_token_ids("ignore_ids", ignore_ids)
        self.embedding_dimension = embedding_dimension
        self.importance = nn.Linear(hidden_size, 1)
        self.quality = nn.Linear(hidden_size, 1)

    def forward(self, features: Features) -> Features:
        """Compute the sparse vectors of a batch from the logits of an LM head.

        Args:
            features: logits ``[B, S, V]`` in ``token_embeddings``, and the hidden states of all
                layers in ``all_layer_embeddings``, which are removed.

        Returns:
            The features, with the vectors ``[B, V]`` in ``sentence_embedding``.
        """
        states = _pop_states(features)
        importance = self._token_importance(states, features)
        logits: Tensor = features["token_embeddings"]
        if fused.autocast_applies(logits):
            logits = logits.float()  # scores are fp32 under autocast
        # Packed logits are [1, T, V], with an importance [T].
        weighted_logits = logits * importance.view(*logits.shape[:2], 1)
        max_logits = pool_selected_tokens(
            weighted_logits,
            fused.select_tokens(features),
            pooling="max",
            activation="none",
        )
        self.embedding_dimension = max_logits.size(1)
        features["sentence_embedding"] = self._scores_from_logits(max_logits, states, features)
        return features

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the sparse vectors of a batch without its logits ``[B, S, V]``.

        Each token's logits are multiplied by its importance. The hidden state of the token is
        multiplied instead, before the LM head, which has the same effect. The fused head then
        computes the maximum of the weighted logits.

        Args:
            features: the input of the module, with hidden states but without logits.
            head: states, weight and bias of the LM head.
            score_options: data type and implementation of the result.

        Returns:
            Dense scores ``[B, V]``.
        """
        if head is None:
            raise ValueError("EpicPooling must follow an LM head, got no head.")
        states = _pop_states(features)
        importance = self._token_importance(states, features)
        max_logits = fused.head_scores(
            _weight_by_importance(head, importance),
            fused.select_tokens(features),
            # all weights are positive, so sparse rows would save nothing
            score_options._replace(sparse=None),
            activation="none",  # it follows in _scores_from_logits
        )
        self.embedding_dimension = max_logits.size(1)
        return self._scores_from_logits(max_logits, states, features)

    def _token_importance(self, states: Tensor, features: Features) -> Tensor:
        """Compute the importance of each token, ``[B, S]`` or packed ``[T]``.

        It is ``log1p(softplus(linear(state)))``, and 0 for ignored and padding tokens.

        Args:
            states: last hidden states, ``[B, S, D]`` or packed ``[T, D]``.
            features: the input of the module.
        """
        selection = fused.select_tokens(features, tuple(self.ignore_ids))
        product = self.importance(states).squeeze(-1)
        if fused.autocast_applies(states):
            product = product.float()  # scores are fp32 under autocast
        importance = fused.activate(product, "log1p_softplus")
        if selection.keep is not None:  # a bool mask, True for pooled tokens
            importance = importance * selection.keep
        return importance

    def _scores_from_logits(self, max_logits: Tensor, states: Tensor, features: Features) -> Tensor:
        """Turn the largest weighted logit of each term into scores.

        A score is ``log1p(softplus(max(0, logit)))`` times the quality of the text. The quality is
        a sigmoid of a linear function of the first token's state.

        Args:
            max_logits: ``[B, V]``, the largest weighted logit of each term.
            states: last hidden states ``[B, S, D]`` or packed ``[T, D]``.
            features: the input of the module.

        Returns:
            Scores ``[B, V]``, 0 for a text without tokens.
        """
        first_states, has_tokens = _first_states(states, features)
        logit: Tensor = self.quality(first_states)
        if fused.autocast_applies(states):
            logit = logit.float()  # scores are fp32 under autocast
        quality = sigmoid(logit) * has_tokens[:, None]
        scores: Tensor = fused.activate(max_logits.relu(), "log1p_softplus") * quality
        return scores


def _pop_states(features: Features) -> Tensor:
    """Remove the hidden states of all layers from the features, and return the last ones.

    Args:
        features: the input of the module; ``all_layer_embeddings`` is removed.

    Returns:
        Last hidden states, ``[B, S, D]`` or packed ``[T, D]``.

    Raises:
        ValueError: if the Transformer did not return its hidden states.
    """
    layers = features.pop("all_layer_embeddings", None)
    if layers is None:
        raise ValueError(
            f"features must have all_layer_embeddings for EpicPooling, got {sorted(features)}; "
            'load the Transformer with config_kwargs={"output_hidden_states": True}.',
        )
    states: Tensor = layers[-1]
    if "cu_seq_lens_q" in features:  # packed: [1, T, D]
        states = states.squeeze(0)
    return states


def _first_states(states: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """Return the state of the first token of each text, and which texts have tokens.

    Args:
        states: hidden states ``[B, S, D]``, or packed ``[T, D]``.
        features: padded texts have an ``attention_mask`` ``[B, S]``, and packed ones the offsets
            ``cu_seq_lens_q`` ``[B + 1]`` of the texts.

    Returns:
        States ``[B, D]``, arbitrary for texts without tokens, and a bool mask ``[B]``.
    """
    offsets = features.get("cu_seq_lens_q")
    if offsets is not None:
        return _first_states_of_packed(states, offsets), offsets.diff() > 0
    mask = features["attention_mask"] != 0
    return _first_states_of_padded(states, mask), mask.any(dim=1)


def _first_states_of_packed(states: Tensor, offsets: Tensor) -> Tensor:
    """Return the state ``[B, D]`` of the first token of each packed text.

    Args:
        states: ``[T, D]``.
        offsets: ``[B + 1]`` offsets of the texts.
    """
    n_tokens = states.size(0)
    if n_tokens == 0:
        return states.new_zeros(offsets.numel() - 1, states.size(1))
    # An empty text at the end begins at n_tokens, where there is no state.
    positions = offsets[:-1].long().clamp(max=n_tokens - 1)
    return states[positions]


def _first_states_of_padded(states: Tensor, mask: Tensor) -> Tensor:
    """Return the state ``[B, D]`` of the first token of each padded text.

    Args:
        states: ``[B, S, D]``.
        mask: bool ``[B, S]``.
    """
    if mask.size(1) == 0:
        return states.new_zeros(states.size(0), states.size(2))
    texts = torch.arange(states.size(0), device=states.device)
    first_positions = mask.int().argmax(dim=1)  # argmax returns the first of equal values
    return states[texts, first_positions]


def _weight_by_importance(head: Head, importance: Tensor) -> Head:
    """Return an LM head whose logits are multiplied by the importance of the token.

    The logits ``m * (h @ W.T + b)`` are ``[m * h, m] @ [W, b].T``. The bias becomes a column of the
    weight, and the importance the matching column of the states. Columns of zeros follow, so that
    rows stay aligned.

    Args:
        head: the original head: states ``[..., D]``, weight ``[V, D]`` and bias ``[V]`` or None.
        importance: ``[...]``, the factor m of each token.

    Returns:
        A head without bias. If `head` has a bias, its states and weight have ``D + _ALIGNMENT``
        columns.
    """
    hidden, weight, bias = head
    factor = importance.to(hidden.dtype)[..., None]
    if bias is None:
        return Head(hidden * factor, weight, None)
    hidden_padding = hidden.new_zeros(*hidden.shape[:-1], _ALIGNMENT - 1)
    weight_padding = weight.new_zeros(weight.size(0), _ALIGNMENT - 1)
    bias_column = bias.to(weight.dtype)[:, None]
    return Head(
        hidden=torch.cat([hidden * factor, factor, hidden_padding], dim=-1),
        weight=torch.cat([weight, bias_column, weight_padding], dim=1),
        bias=None,
    )
