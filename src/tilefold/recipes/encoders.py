"""Builds a ``SparseEncoder`` from a record of each side (arXiv 2303.13416): any query encoder with any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilefold._vocabulary import vocabulary_fingerprint
from tilefold.recipes import _builders as builders
from tilefold.recipes._builders import Base
from tilefold.recipes._settings import KINDS, EncoderSpec
from tilefold.recipes.bge_m3 import build_bge_m3
from tilefold.recipes.decoders import build_causal, build_prosper
from tilefold.recipes.loading import stay_offline
from tilefold.recipes.quiet import quiet_libraries
from tilefold.recipes.splate import build_splate

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

__all__ = ["BUILDERS", "KINDS", "Base", "EncoderSpec", "build_encoder"]

BUILDERS: Mapping[str, Callable[[EncoderSpec, Base], list[Any]]] = {
    "mlm": builders.build_mlm,
    "cls_mlm": builders.build_mlm,
    "epic": builders.build_epic,
    "mlp": builders.build_mlp,
    "binary": builders.build_binary,
    "idf": builders.build_idf,
    "causal": build_causal,
    "bidirectional": build_causal,
    "echo": build_causal,
    "prosper": build_prosper,
    "bge_m3": build_bge_m3,
    "splate": build_splate,
}
EPIC_TERMS = 1000  # that the paper keeps of a passage, whose weights are all positive


def build_encoder(
    query: EncoderSpec | None, document: EncoderSpec, base: Base, device: str | None = None
) -> SparseEncoder:
    """An untrained ``SparseEncoder`` of two sides.

    Args:
        query: the encoder of queries; None shares that of documents, with one set of weights.
        document: the encoder of documents.
        base: base model, lengths, sample texts and seed; equal ones give equal models.
        device: as in sentence-transformers, which chooses by default.

    Returns:
        Modules in a row, or a ``Router`` with the routes ``"query"`` and ``"document"``.

    Raises:
        ValueError: if no side has a network, the vocabularies differ, or a model lacks what its kind needs.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router

    if query is None and not document.has_network:
        raise ValueError(f"a shared encoder needs a network, which kind {document.kind!r} has not.")
    with quiet_libraries():
        if query is None:
            modules = BUILDERS[document.kind](document, base)
        else:
            modules = [Router.for_query_document(*_both_sides(query, document, base))]
        epic = (side for side in (query, document) if side and side.kind == "epic")
        most = max((EPIC_TERMS if side.top_k is None else side.top_k for side in epic), default=None)
        model = SparseEncoder(modules=modules, device=device, similarity_fn_name="dot", max_active_dims=most)
    return stay_offline(model)


def _both_sides(query: EncoderSpec, document: EncoderSpec, base: Base) -> tuple[list[Any], list[Any]]:
    """Modules of queries and of documents; a side with a network comes first, and the other one learns from it."""
    if document.shared_network:
        raise ValueError("shared_network: set it on the query side, which then runs the network of the document side.")
    first, second = (document, query) if document.has_network else (query, document)
    if not first.has_network:
        raise ValueError(f"one side must have a network, got kinds {query.kind!r} and {document.kind!r}.")
    modules = BUILDERS[first.kind](first, base)
    network, vocab_size = modules[0], modules[-1].get_embedding_dimension()
    others = BUILDERS[second.kind](
        second, replace(base, tokenizer=network.tokenizer, vocab_size=vocab_size, network=network)
    )
    sizes = [side[-1].get_embedding_dimension() for side in (modules, others)]
    prints = [vocabulary_fingerprint(side[0].tokenizer) for side in (modules, others)]
    if sizes[0] != sizes[1] or prints[0] != prints[1]:
        raise ValueError(
            f"both sides must have one vocabulary, got {sizes[0]} and {sizes[1]} terms of "
            f"{'the same' if prints[0] == prints[1] else 'different'} tokenizers; take base models that share theirs."
        )
    return (modules, others) if first is query else (others, modules)
