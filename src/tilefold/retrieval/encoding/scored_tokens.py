"""The tokens of a text or an image for which a ``MultiVectorEncoder`` returns one vector each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tilefold._internal.arguments import check_choice, check_encoder
from tilefold._internal.vocabulary import term_names_of
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.encoding.pages import image_features, prompt_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from tilefold._internal.typing import Model

__all__ = ["ScoredTokens", "content_positions", "query_tokens", "scored_tokens"]

_KINDS = ("document", "query")


@dataclass(frozen=True)
class ScoredTokens:
    """The tokens of one input of a model, and those that MaxSim scores.

    Attributes:
        input_ids: ids of all T tokens that the model reads, ``[T]``.
        positions: positions among them of the n tokens that have a vector, ``[n]``.
        features: the output of the model's ``preprocess`` for this input.
        tokenizer: the model's tokenizer.
    """

    input_ids: Tensor
    positions: Tensor
    features: Mapping[str, Any]
    tokenizer: Any

    @cached_property
    def ids(self) -> list[int]:
        """Ids of the scored tokens."""
        ids: list[int] = self.input_ids[self.positions].tolist()
        return ids

    @cached_property
    def names(self) -> list[str]:
        """Scored tokens as strings, as the tokenizer spells them."""
        name_of = term_names_of(self.tokenizer)
        return [name_of[token_id] for token_id in self.ids]


def scored_tokens(
    model: Model,
    item: str | Image,
    kind: Literal["document", "query"],
) -> ScoredTokens:
    """Return the tokens of a text or an image that have a vector, without encoding it.

    Args:
        model: a ``MultiVectorEncoder``.
        item: a text or, for a model of page images, an image.
        kind: ``"document"`` or ``"query"``, which selects the prompt, the length and the tokens
            that are skipped.
    """
    check_encoder("model", model, "MultiVectorEncoder")
    check_choice("kind", kind, _KINDS)
    encoder: Any = model
    if isinstance(item, str):
        features = encoder.preprocess([item], prompt=prompt_of(encoder, kind), task=kind)
    else:
        features = image_features(encoder, [item], kind)
    input_ids = features["input_ids"]
    # Packed features of one input have no mask, because none of their tokens is padding.
    mask = features.get("attention_mask")
    mask_features = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids) if mask is None else mask,
    }
    if "query_expansion_positions" in features:
        mask_features["query_expansion_positions"] = features["query_expansion_positions"]
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    for module in encoder:
        if isinstance(module, MultiVectorMask):
            mask_features = module(mask_features, task=kind)
    return ScoredTokens(
        input_ids=input_ids[0].cpu(),
        positions=mask_features["attention_mask"][0].bool().nonzero().flatten().cpu(),
        features=features,
        tokenizer=encoder.tokenizer,
    )


def content_positions(model: Model, query: str, tokens: ScoredTokens) -> list[int]:
    """Return the positions of the scored tokens that spell the words of a query.

    Markers, prompts, special tokens and expansion tokens are left out. If the model has its
    ``Transformer`` inside of a ``Router``, only special tokens are left out.

    Args:
        model: the ``MultiVectorEncoder`` that encoded the query.
        query: text of the query.
        tokens: scored tokens of the query.

    Returns:
        Positions among the scored tokens, ascending.
    """
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.multi_vector_encoder.interpretability import real_query_token_slice

    encoder: Any = model
    if any(isinstance(module, Transformer) for module in encoder):
        content = real_query_token_slice(encoder, query)  # positions among all tokens of the model
        return [
            scored_position
            for scored_position, input_position in enumerate(tokens.positions.tolist())
            if content.start <= input_position < content.stop
        ]
    # `real_query_token_slice` does not support a Router, whose routes contain the Transformer.
    special_ids = set(tokens.tokenizer.all_special_ids)
    return [
        scored_position
        for scored_position, token_id in enumerate(tokens.ids)
        if token_id not in special_ids
    ]


def query_tokens(model: Model, query: str) -> list[Json]:
    """Return the scored tokens of a query, without encoding it.

    Args:
        model: a ``MultiVectorEncoder``.
        query: text of the query.

    Returns:
        For each token, the ``token`` and whether it is ``content``: part of a word of the query.
    """
    tokens = scored_tokens(model, query, "query")
    content = set(content_positions(model, query, tokens))
    return [
        {"token": name, "content": position in content}
        for position, name in enumerate(tokens.names)
    ]
