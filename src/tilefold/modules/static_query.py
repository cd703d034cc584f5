"""Query encoders without a network, where the stock ``SparseStaticEmbedding`` does not do the job."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from torch import Tensor
from transformers import AutoTokenizer

from tilefold._internal.typing import Tokenizer
from tilefold._internal.vocabulary import id_bound
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    Options,
    Wanted,
    place_of_files,
)
from tilefold.ops import token_scatter, token_scatter_sparse

__all__ = ["StaticQuery", "counted_tokens"]


def counted_tokens(features: Features, tokenizer: Tokenizer) -> Tensor:
    """``attention_mask`` ``[B, S]`` without padding tokens that stand in a text, which count beside
    no longer one.
    """
    mask: Tensor = features["attention_mask"]
    return (
        mask
        if tokenizer.pad_token_id is None
        else mask * (features["input_ids"] != tokenizer.pad_token_id)
    )


class StaticQuery(FusedPooling, SparseStaticEmbedding):
    """A query has the weight ``max(0, weight[v])`` at each of its distinct tokens v but padding,
    and 0 elsewhere.

    Unlike the stock module, it never counts a padding token in a text (see :func:`counted_tokens`),
    and it has one learned number for all terms (the binary encoder of the unified framework, arXiv
    2303.13416), weights that never become negative (the trained IDF of arXiv 2411.04403), and a
    vocabulary whose matrix may have more rows than the tokenizer has tokens. :meth:`stock` gives
    the stock module that computes the same.

    Args:
        tokenizer: of the texts; special tokens are not added.
        weight: ``[V]``, or ``[1]`` for one number for all terms; ones by default. ``frozen`` ones
            are not trained.
        vocab_size: V; by default the length of ``weight``, or the smallest number above all ids of
            the tokenizer.

    Raises:
        ValueError: for a ``weight`` of another shape.
    """

    reads_logits = False
    config_keys: list[str] = ["frozen", "vocab_size"]  # noqa: RUF012 - the attribute of the stock base class

    def __init__(
        self,
        tokenizer: Tokenizer,
        weight: Tensor | None = None,
        frozen: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        if vocab_size is None:
            vocab_size = (
                id_bound(tokenizer.get_vocab())
                if weight is None or weight.numel() == 1
                else weight.numel()
            )
        weight = torch.ones(vocab_size) if weight is None else weight
        if weight.dim() != 1 or weight.numel() not in (1, vocab_size):
            raise ValueError(
                f"weight must have shape [1] or [{vocab_size}], got {list(weight.shape)}.",
            )
        super().__init__(tokenizer, weight, frozen)
        self.vocab_size = self.num_dimensions = vocab_size

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        ids, mask = features["input_ids"], counted_tokens(features, self.tokenizer)
        weights = self.weight.expand(ids.shape) if self.weight.numel() == 1 else self.weight[ids]
        options: Options = {"attention_mask": mask, "out_dtype": wanted.out_dtype}
        if wanted.sparse is not None:
            return token_scatter_sparse(
                weights,
                ids,
                self.vocab_size,
                **options,
                **wanted.sparse._asdict(),
            )
        return token_scatter(weights, ids, self.vocab_size, **options, impl=wanted.impl)

    def fits_stock(self) -> bool:
        """Whether a ``SparseStaticEmbedding`` can have these weights: one for each token's id."""
        vocabulary = self.tokenizer.get_vocab()
        return self.vocab_size == len(vocabulary) == id_bound(vocabulary)

    def stock(self) -> SparseStaticEmbedding:
        """A frozen ``SparseStaticEmbedding`` with the same vectors, which loads without tilefold.

        Raises:
            ValueError: if the vocabulary is not that of the tokenizer; stock cannot load such
                weights.
        """
        if not self.fits_stock():
            tokens = len(self.tokenizer.get_vocab())
            raise ValueError(
                f"vocab_size must be {tokens}, the tokens, whose ids must have no gaps, for stock, got "
                f"{self.vocab_size} and ids up to {id_bound(self.tokenizer.get_vocab()) - 1}; keep the "
                "StaticQuery.",
            )
        made = SparseStaticEmbedding(
            self.tokenizer,
            self.weight.detach().relu().expand(self.vocab_size).clone(),
            frozen=True,
        )
        made.max_seq_length = self.max_seq_length
        return made

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> StaticQuery:
        """Read what ``save`` wrote: the tokenizer, the options and the weights, of whatever length."""
        given = place_of_files(kwargs)
        config = cls.load_config(model_name_or_path, subfolder=subfolder, **given)
        weights = cls.load_torch_weights(model_name_or_path, subfolder=subfolder, **given)
        cache = {"cache_dir": given.pop("cache_folder")} if "cache_folder" in given else {}
        tokenizer = AutoTokenizer.from_pretrained(
            model_name_or_path,
            subfolder=subfolder,
            **given,
            **cache,
        )
        return cls(tokenizer, weights["weight"], **config)

    def __repr__(self) -> str:
        return f"StaticQuery({self.get_config_dict()}, weights={self.weight.numel()})"
