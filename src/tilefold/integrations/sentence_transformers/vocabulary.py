"""The LM head of an accelerated model, with its rows divided among ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model
from tilefold.distributed.vocabulary import SharedEmbedding, SharedVocabulary
from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_forwards
from tilefold.integrations.sentence_transformers.packing.collator import has_one_packed_encoder


def divide_head(model: Model, vocabulary: SharedVocabulary) -> set[Any]:
    """Divide the rows of a model's LM head, and of embeddings that share its weight.

    Args:
        model: an accelerated model, changed in place.
        vocabulary: the ranks that share the rows.

    Returns:
        The divided parameters, which FSDP must not divide again.

    Raises:
        ValueError: if the model has several heads, a head with a bias or an adapter, padded texts,
            or another pooling than sentence-transformers' ``SpladePooling``.
    """
    forwards = fused_forwards(model)
    head: Any = forwards[0].head if len(forwards) == 1 else None
    is_supported = (
        isinstance(head, nn.Linear)
        and getattr(head, "bias", None) is None
        and isinstance(forwards[0].pooling, StockPooling)
        and has_one_packed_encoder(model)
    )
    if not is_supported:
        raise ArgumentError(
            "split_vocabulary",
            "expected a decoder on packed tokens whose LM head has neither bias nor adapter and is "
            "pooled by SpladePooling, got another model; leave split_vocabulary out.",
        )
    embedding = model[0].model.get_input_embeddings()
    is_tied = embedding.weight is head.weight
    weight = vocabulary.divide(head.weight)
    head.weight = weight
    forwards[0].vocabulary = vocabulary
    if is_tied:
        embedding.weight = weight
        embedding.forward = SharedEmbedding(embedding, vocabulary)
    return {weight}
