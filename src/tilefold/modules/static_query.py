"""Query encoders without a network, with options that ``SparseStaticEmbedding`` lacks."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from torch import Tensor

from tilefold._internal.arguments import check_count, check_tokenizer
from tilefold._internal.typing import Tokenizer
from tilefold._internal.vocabulary import id_bound
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    ScoreOptions,
    load_tokenizer,
    location_arguments,
)
from tilefold.ops import token_scatter, token_scatter_sparse
from tilefold.ops.checks import check_tensor

__all__ = ["StaticQuery", "mask_without_padding"]


def mask_without_padding(features: Features, tokenizer: Tokenizer) -> Tensor:
    """Return the attention mask with 0 at every padding token, even one that a text contains.

    Args:
        features: ``input_ids`` and ``attention_mask``, ``[B, S]``.
        tokenizer: the tokenizer, for the id of its padding token.

    Returns:
        The mask ``[B, S]``.
    """
    mask: Tensor = features["attention_mask"]
    if tokenizer.pad_token_id is None:
        return mask
    is_text: Tensor = features["input_ids"] != tokenizer.pad_token_id
    return mask * is_text


class StaticQuery(FusedPooling, SparseStaticEmbedding):
    """A query encoder that looks up one learned weight per token.

    A query has the weight ``max(0, weight[v])`` at each of its distinct tokens v except padding,
    and 0 elsewhere.

    It differs from ``SparseStaticEmbedding`` of sentence-transformers in four points. A padding
    token that a text contains has no weight (:func:`mask_without_padding`). Weights never become
    negative (the trained IDF of arXiv 2411.04403). All terms may share one learned number (the
    binary encoder of the unified framework, arXiv 2303.13416). The vocabulary may be larger than
    the tokenizer's.
    :meth:`stock` returns the ``SparseStaticEmbedding`` that computes the same.

    Args:
        tokenizer: tokenizer of the queries; special tokens are not added.
        weight: ``[V]``, or ``[1]`` for one number for all terms; ones by default. ``frozen`` ones
            are not trained.
        vocab_size: V; by default the length of ``weight``, or the smallest number above all ids of
            the tokenizer.

    Raises:
        ValueError: if ``weight`` has another shape.
    """

    reads_logits = False
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "frozen",
        "vocab_size",
    ]

    def __init__(
        self,
        tokenizer: Tokenizer,
        weight: Tensor | None = None,
        frozen: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """Check the weight, and derive the vocabulary size if it is not given.

        Args:
            tokenizer: tokenizer of the queries.
            weight: weight of each term, ``[V]``, or ``[1]`` for all terms; ones by default.
            frozen: whether the weights are not trained.
            vocab_size: V.
        """
        check_tokenizer("tokenizer", tokenizer)
        if weight is not None:
            check_tensor("weight", weight)
        if vocab_size is not None:
            check_count("vocab_size", vocab_size)
        elif weight is None or weight.numel() == 1:
            vocab_size = id_bound(tokenizer.get_vocab())  # one more than the largest id
        else:
            vocab_size = weight.numel()
        if weight is None:
            weight = torch.ones(vocab_size)
        if weight.dim() != 1 or weight.numel() not in (1, vocab_size):
            raise ValueError(
                f"weight must have shape [1] or [{vocab_size}], got {list(weight.shape)}.",
            )
        super().__init__(tokenizer, weight, frozen)
        self.vocab_size = vocab_size
        # SparseStaticEmbedding takes this from the length of the weight, which may be 1.
        self.num_dimensions = vocab_size

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Look up the weight of each token, and scatter the weights to vectors of V terms.

        Terms have one weight each, or a single one for all.

        Args:
            features: ``input_ids`` and ``attention_mask``, ``[B, S]``.
            head: ignored, because a static query has no network.
            score_options: data type, implementation and layout of the result.

        Returns:
            Scores ``[B, V]``, dense or CSR.
        """
        ids = features["input_ids"]
        mask = mask_without_padding(features, self.tokenizer)
        is_shared = self.weight.numel() == 1
        weights = self.weight.expand(ids.shape) if is_shared else self.weight[ids]
        if score_options.sparse is not None:
            return token_scatter_sparse(
                weights,
                ids,
                self.vocab_size,
                attention_mask=mask,
                out_dtype=score_options.out_dtype,
                top_k=score_options.sparse.top_k,
                min_weight=score_options.sparse.min_weight,
            )
        return token_scatter(
            weights,
            ids,
            self.vocab_size,
            attention_mask=mask,
            out_dtype=score_options.out_dtype,
            impl=score_options.impl,
        )

    def fits_stock(self) -> bool:
        """Return whether ``SparseStaticEmbedding`` can hold these weights: one per token id."""
        vocabulary = self.tokenizer.get_vocab()
        return self.vocab_size == len(vocabulary) == id_bound(vocabulary)

    def stock(self) -> SparseStaticEmbedding:
        """Create a frozen ``SparseStaticEmbedding`` that computes the same vectors.

        A model that uses it loads without tilefold installed.

        Raises:
            ValueError: if there is not exactly one weight per token of the tokenizer.
                ``SparseStaticEmbedding`` cannot load other weights.
        """
        if not self.fits_stock():
            vocabulary = self.tokenizer.get_vocab()
            raise ValueError(
                f"SparseStaticEmbedding needs vocab_size={len(vocabulary)}, the number of tokens, "
                f"and token ids without gaps, got vocab_size={self.vocab_size} and ids up to "
                f"{id_bound(vocabulary) - 1}; keep the StaticQuery.",
            )
        embedding = SparseStaticEmbedding(
            self.tokenizer,
            self.weight.detach().relu().expand(self.vocab_size).clone(),
            frozen=True,
        )
        embedding.max_seq_length = self.max_seq_length
        return embedding

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> StaticQuery:
        """Read the tokenizer, the options and the weights that ``save`` wrote."""
        location = location_arguments(kwargs)
        config = cls.load_config(model_name_or_path, subfolder=subfolder, **location)
        weights = cls.load_torch_weights(model_name_or_path, subfolder=subfolder, **location)
        tokenizer = load_tokenizer(model_name_or_path, subfolder, location)
        return cls(tokenizer, weights["weight"], **config)

    def __repr__(self) -> str:
        return f"StaticQuery({self.get_config_dict()}, weights={self.weight.numel()})"
