"""One learned weight per token, scattered to the vocabulary: term weighting without expansion."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, Options, PoolingModule, Wanted
from tilefold.ops import token_scatter, token_scatter_sparse

__all__ = ["TokenWeights"]

_MAX_IGNORED = 64  # of token_scatter


class TokenWeights(PoolingModule):
    """A linear layer gives every token a weight; a term of the vocabulary has the largest one of
    its tokens.

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
        activation: as in :class:`HeadPooling`.
        scale: start of a learned factor on the weights; None has no such factor.
        ignore_ids: token ids that get no weight, for instance the special ones.
        saturation: the weight that counts half, or None to count weights as they are.

    Attributes:
        linear: ``nn.Linear(D, 1)``.
        scale: ``[1]`` parameter, or None.

    Raises:
        ValueError: for an unknown name, or a number out of range.
    """

    reads_logits = False
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the stock base class
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
        super().__init__()
        if activation not in fused.ACTIVATIONS:
            raise ValueError(f"activation must be one of {fused.ACTIVATIONS}, got {activation!r}.")
        if saturation is not None and not (
            isinstance(saturation, (int, float)) and 0 < saturation < float("inf")
        ):
            raise ValueError(
                f"saturation must be a finite number above 0 or None, got {saturation!r}.",
            )
        self.hidden_size, self.activation, self.saturation = hidden_size, activation, saturation
        self.vocab_size = self.embedding_dimension = vocab_size
        self.ignore_ids = sorted({int(i) for i in ignore_ids})
        self.linear = nn.Linear(hidden_size, 1)
        if scale is None and not has_scale:
            self.register_parameter("scale", None)
        else:
            self.scale = nn.Parameter(torch.tensor([1.0 if scale is None else float(scale)]))

    @property
    def has_scale(self) -> bool:
        return self.scale is not None

    def weights(self, features: Features) -> Tensor:
        """``[B, S]`` or packed ``[T]`` weights of the tokens in ``token_embeddings``."""
        hidden: Tensor = features[
            "token_embeddings"
        ]  # [B, S, D], or [1, T, D] when inputs are flattened
        if "cu_seq_lens_q" in features:
            hidden = hidden.squeeze(0)
        product = self.linear(hidden).squeeze(-1)
        weights = fused.activate(
            product.float() if fused.autocasts(hidden) else product,
            self.activation,
        )
        if self.scale is not None:
            weights = weights * self.scale
        if self.saturation is None or self.training:
            return weights
        weights = weights.clamp(min=0)
        return weights / (weights + self.saturation)

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        features["token_weights"] = weights = self.weights(features)
        few = len(self.ignore_ids) <= _MAX_IGNORED  # the operator compares with each of them
        places = fused.places_of(features, () if few else tuple(self.ignore_ids))
        ids, mask, cu_seqlens = features["input_ids"], places.keep, places.cu_seqlens
        if cu_seqlens is not None:
            ids, _ = places.packed(ids.reshape(-1))
            weights, cu_seqlens = places.packed(weights)
            mask = None
        ignored = self.ignore_ids if few else None
        arguments: Options = {
            "attention_mask": mask,
            "cu_seqlens": cu_seqlens,
            "ignore_ids": ignored,
        }
        arguments |= {"activation": "none", "out_dtype": wanted.out_dtype}
        if wanted.sparse is not None:
            return token_scatter_sparse(
                weights,
                ids,
                self.vocab_size,
                **arguments,
                **wanted.sparse._asdict(),
            )
        if self.activation != "none" or not self.training:
            return token_scatter(weights, ids, self.vocab_size, **arguments, impl=wanted.impl)
        # the largest weight of each term's tokens, also where it is negative: all are moved above 0
        # and back, not in half precision, which would lose the small ones
        wide = weights if weights.dtype == torch.float64 else weights.float()
        counted = wide.detach() if mask is None else wide.detach().masked_fill(~mask, 0)
        least = counted.amin() - 1 if counted.numel() else counted.new_zeros(())
        arguments["out_dtype"] = wide.dtype
        moved = token_scatter(wide - least, ids, self.vocab_size, **arguments, impl=wanted.impl)
        return (moved + least).where(moved != 0, 0).to(wanted.out_dtype or weights.dtype)
