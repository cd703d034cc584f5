"""One learned weight per token, scattered to the vocabulary: term weighting without expansion."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilefold._internal.arguments import check_count, check_number, sorted_token_ids
from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, PoolingModule, ScoreOptions
from tilefold.ops import token_scatter, token_scatter_sparse

__all__ = ["TokenWeights"]

# token_scatter compares every token with each ignored id, which is slow for many ids
_MAX_OPERATOR_IGNORE_IDS = 64


class TokenWeights(PoolingModule):
    """Term weights that are the largest learned weight of the term's tokens.

    A linear layer gives every token a weight.

    With hidden states ``h[b, s]`` of a Transformer (feature extraction) and ``token_scatter``
    (:func:`tilefold.ops.token_scatter`), over the tokens that count::

        t[b, s] = scale * act(linear(h[b, s]))
        w[b, v] = max(0, max over s with input_ids[b, s] == v of t[b, s])

    With ``"none"`` weights may be negative. In training mode the ``max(0, ..)`` is then left out,
    so that a loss of the weights themselves, as DeepCT's, still reaches terms that fell below 0.

    With a ``saturation`` c, ``t`` is ``u / (u + c)``, ``u = max(0, scale * act(linear(h)))``, in
    evaluation mode alone: DeepCT indexes ``100 * weight`` as frequencies, of which BM25 without
    length normalisation makes ``c = k1 / 100``.

    The encoder of uniCOIL (arXiv 2106.14807, ``"relu"``), DeepImpact (arXiv 2104.12016,
    ``"relu"``), DeepCT (arXiv 1910.10687, ``"none"``), the query side of EPIC (arXiv 2004.14245,
    ``"log1p_softplus"``), and the "MLP" of the unified framework (arXiv 2303.13416,
    ``"log1p_relu"``). ``forward`` also leaves ``t`` in ``features["token_weights"]``, ``[B, S]``
    (packed: ``[T]``).

    Args:
        hidden_size, vocab_size: D and V.
        activation: name of an activation of :class:`HeadPooling`.
        scale: start of a learned factor on the weights; None has no such factor.
        ignore_ids: token ids that get no weight, for instance the special ones.
        saturation: the weight that counts half, or None to count weights as they are.

    Attributes:
        linear: ``nn.Linear(D, 1)``.
        scale: ``[1]`` parameter, or None.

    Raises:
        ValueError: if a name is unknown, or a number out of range.
    """

    reads_logits = False
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "hidden_size",
        "vocab_size",
        "activation",
        "has_scale",
        "ignore_ids",
        "saturation",
    ]

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        activation: str = "relu",
        scale: float | None = None,
        ignore_ids: Iterable[int] = (),
        has_scale: bool = False,
        saturation: float | None = None,
    ) -> None:
        """Create the linear layer and, if it is asked for, the factor on the weights.

        Args:
            hidden_size: D, the width of the hidden states.
            vocab_size: V, the number of terms.
            activation: activation of the weights, such as ``"relu"`` or ``"log1p_softplus"``.
            scale: start of a learned factor on the weights; ``None`` for no factor.
            ignore_ids: token ids that get no weight, for instance the special ones.
            has_scale: whether there is a factor, although ``scale`` is ``None``. The options of a
                saved module have this, and the factor's value is then loaded.
            saturation: the weight that counts half; ``None`` to count weights as they are.
        """
        super().__init__()
        if activation not in fused.ACTIVATIONS:
            raise ValueError(f"activation must be one of {fused.ACTIVATIONS}, got {activation!r}.")
        is_number = isinstance(saturation, (int, float))
        if saturation is not None and not (is_number and 0 < saturation < float("inf")):
            raise ValueError(
                f"saturation must be a finite number above 0 or None, got {saturation!r}.",
            )
        check_count("hidden_size", hidden_size)
        check_count("vocab_size", vocab_size)
        if scale is not None:
            check_number("scale", scale)
        self.hidden_size = hidden_size
        self.activation = activation
        self.saturation = saturation
        self.vocab_size = vocab_size
        self.embedding_dimension = vocab_size
        self.ignore_ids = sorted_token_ids("ignore_ids", ignore_ids)
        self.linear = nn.Linear(hidden_size, 1)
        if scale is None and not has_scale:
            self.register_parameter("scale", None)
        else:
            initial_scale = 1.0 if scale is None else float(scale)
            self.scale = nn.Parameter(torch.tensor([initial_scale]))

    @property
    def has_scale(self) -> bool:
        return self.scale is not None

    def weights(self, features: Features) -> Tensor:
        """Compute the weight of each token from its hidden state.

        The weight is the activation of a linear function of the state, times ``scale`` if the
        module has one. With a saturation c, in evaluation mode only, a negative weight becomes 0
        and another weight u becomes ``u / (u + c)``.

        Args:
            features: hidden states in ``token_embeddings``.

        Returns:
            Weights ``[B, S]``, or packed ``[T]``.
        """
        # [B, S, D], or [1, T, D] when inputs are flattened
        hidden: Tensor = features["token_embeddings"]
        if "cu_seq_lens_q" in features:
            hidden = hidden.squeeze(0)
        product = self.linear(hidden).squeeze(-1)
        if fused.autocast_applies(hidden):
            product = product.float()  # scores are fp32 under autocast
        weights = fused.activate(product, self.activation)
        if self.scale is not None:
            weights = weights * self.scale
        if self.saturation is None or self.training:
            return weights
        weights = weights.clamp(min=0)
        return weights / (weights + self.saturation)

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute a weight for each token, and scatter the weights to scores of the vocabulary.

        The score of a term is the largest weight of its tokens.

        Args:
            features: hidden states in ``token_embeddings``, and ``input_ids``, padded or packed.
                ``token_weights`` is added.
            head: not used.
            score_options: data type, implementation and layout of the result.

        Returns:
            Scores ``[B, V]``, dense or CSR. They may be negative in training without an activation.
        """
        weights = self.weights(features)
        features["token_weights"] = weights
        # The operator can ignore a few ids. If there are more, their tokens are not selected.
        ignore_in_operator = len(self.ignore_ids) <= _MAX_OPERATOR_IGNORE_IDS
        selection = fused.select_tokens(
            features,
            () if ignore_in_operator else tuple(self.ignore_ids),
        )
        ids = features["input_ids"]
        mask = selection.keep
        cu_seqlens = selection.cu_seqlens
        if cu_seqlens is not None:
            ids, _ = selection.select_packed(ids.reshape(-1))
            weights, cu_seqlens = selection.select_packed(weights)
            mask = None
        ignore_ids = self.ignore_ids if ignore_in_operator else None
        if score_options.sparse is not None:
            return token_scatter_sparse(
                weights,
                ids,
                self.vocab_size,
                attention_mask=mask,
                cu_seqlens=cu_seqlens,
                ignore_ids=ignore_ids,
                activation="none",
                out_dtype=score_options.out_dtype,
                top_k=score_options.sparse.top_k,
                min_weight=score_options.sparse.min_weight,
            )
        keep_negative = self.activation == "none" and self.training
        if keep_negative:
            return _scatter_signed(
                weights,
                ids,
                self.vocab_size,
                attention_mask=mask,
                cu_seqlens=cu_seqlens,
                ignore_ids=ignore_ids,
                out_dtype=score_options.out_dtype,
                impl=score_options.impl,
            )
        return token_scatter(
            weights,
            ids,
            self.vocab_size,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            ignore_ids=ignore_ids,
            activation="none",
            out_dtype=score_options.out_dtype,
            impl=score_options.impl,
        )


def _scatter_signed(
    weights: Tensor,
    ids: Tensor,
    vocab_size: int,
    *,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ignore_ids: list[int] | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> Tensor:
    """Return the largest weight of each term's tokens, even if it is negative.

    :func:`tilefold.ops.token_scatter` returns scores of at least 0. All weights are therefore
    shifted to 1 or more, scattered, and shifted back. This is not done in half precision, which
    would lose small weights.

    Args:
        weights: weight of each token, ``[B, S]``, or packed ``[T]``.
        ids: token ids, with the shape of the weights.
        vocab_size: V.
        attention_mask: bool ``[B, S]``, True for tokens that count; None for all.
        cu_seqlens: offsets ``[B + 1]`` of packed texts, or None.
        ignore_ids: token ids that do not count, or None.
        out_dtype: dtype of the scores; None takes that of the weights.
        impl: implementation of the operator.

    Returns:
        Scores ``[B, V]``, 0 for terms without a token.
    """
    exact_weights = weights if weights.dtype == torch.float64 else weights.float()
    kept_weights = exact_weights.detach()
    if attention_mask is not None:
        kept_weights = kept_weights.masked_fill(~attention_mask, 0)
    # The smallest weight becomes 1, so that the operator clamps none, and 0 marks missing terms.
    shift = kept_weights.amin() - 1 if kept_weights.numel() else kept_weights.new_zeros(())
    shifted = token_scatter(
        exact_weights - shift,
        ids,
        vocab_size,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        ignore_ids=ignore_ids,
        activation="none",
        out_dtype=exact_weights.dtype,
        impl=impl,
    )
    has_token = shifted != 0  # the shifted weight of a token is at least 1
    return (shifted + shift).where(has_token, 0).to(out_dtype or weights.dtype)
