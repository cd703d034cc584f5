"""Encoder specs of every kind, and ``build_encoder``, which combines any two of them.

Query and document encoders are combined as in arXiv 2303.13416.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefold._internal.arguments import ArgumentError, check_instance
from tilefold._internal.typing import Module, SparseEncoder
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.recipes._bge_m3 import BgeM3Spec, load_sparse_linear
from tilefold.recipes._encoder_spec import Base, EncoderSpec
from tilefold.recipes._masked_encoders import ClsMlmSpec, EpicSpec, MlmSpec, MlpSpec
from tilefold.recipes._splate import SplateSpec, mlm_head, splate_encoder, splate_modules
from tilefold.recipes._static_encoders import BinarySpec, IdfSpec
from tilefold.recipes.backbone import minilm_splade
from tilefold.recipes.decoders import BidirectionalSpec, CausalSpec, EchoSpec, ProsperSpec
from tilefold.recipes.loading import (
    check_masked_lm,
    load_complete,
    quiet_libraries,
    saved_kind,
    stay_offline,
)

__all__ = [
    "Base",
    "BgeM3Spec",
    "BidirectionalSpec",
    "BinarySpec",
    "CausalSpec",
    "ClsMlmSpec",
    "EchoSpec",
    "EncoderSpec",
    "EpicSpec",
    "IdfSpec",
    "MlmSpec",
    "MlpSpec",
    "ProsperSpec",
    "SparseEncoderSpec",
    "SplateSpec",
    "build_encoder",
    "load_sparse_linear",
    "mlm_head",
    "splate_encoder",
    "splate_modules",
]


@dataclass(frozen=True, kw_only=True)
class SparseEncoderSpec(EncoderSpec, kind="sparse_encoder"):
    """Configuration of the model that ``SparseEncoder(base_model)`` loads, for both sides.

    The modules of a saved SparseEncoder are kept. A masked language model gets the SPLADE pooling
    of sentence-transformers, and ``"minilm"`` is :func:`tilefold.recipes.minilm_splade`.
    """

    def build(self, base: Base) -> list[Module]:
        """Raise a ``ValueError``: this kind of encoder serves queries and documents together."""
        raise ValueError(
            f"kind {self.kind!r} encodes queries and documents: leave the query encoder out, or "
            "use kind 'mlm'.",
        )

    def build_model(self, base: Base, device: str | None = None) -> SparseEncoder:
        """Load a saved ``SparseEncoder``, or build one on a masked language model.

        Args:
            base: the recipe's base model and maximum length; and the sample texts and seed for
                ``"minilm"``.
            device: device of the model; default: chosen by sentence-transformers.

        Raises:
            ValueError: if the base model has no masked-LM head, or lacks weights.
        """
        base_model = self.model_name(base)
        if base_model == "minilm":
            return minilm_splade(
                base.texts,
                percentile=base.start_percentile,
                max_length=base.max_length,
                seed=base.seed,
                device=device,
            )
        from tilefold.modules import load_encoder

        model_kind = saved_kind(base_model)
        if model_kind not in ("sparse", "backbone"):
            raise ArgumentError(
                "base_model",
                f"{base_model} is a {model_kind} model, without the masked-LM head that SPLADE "
                "trains. Use a masked language model, a SparseEncoder or 'minilm', or the recipe "
                "colbert, which trains dense and multi-vector models.",
            )
        if model_kind == "backbone":
            check_masked_lm(base_model)
        model = load_complete(load_encoder, base_model)
        model.max_seq_length = min(base.max_length, model.max_seq_length or base.max_length)
        if device is not None:
            model.to(device)
        return model


def build_encoder(
    query: EncoderSpec | None,
    document: EncoderSpec,
    base: Base,
    device: str | None = None,
) -> SparseEncoder:
    """Build an untrained ``SparseEncoder`` of one encoder, or of a query and a document encoder.

    Two encoders become the routes of a ``Router``.

    Args:
        query: spec of the query encoder; ``None`` for one encoder of queries and documents.
        document: spec of the document encoder.
        base: base model, maximum length, sample texts and seed. Equal values give equal models.
        device: device of the model; default: chosen by sentence-transformers.

    Raises:
        TypeError: if an encoder is not an :class:`EncoderSpec`, for example a name.
        ValueError: if neither encoder runs a network, the vocabularies differ, or a base model does
            not suit the kind of its encoder.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router

    expected_spec = "a spec such as MlmSpec()"
    if query is not None:
        check_instance("query", query, EncoderSpec, expected_spec)
    check_instance("document", document, EncoderSpec, expected_spec)
    check_instance("base", base, Base, "Base(base_model, max_length)")
    with quiet_libraries():
        if query is None:
            return stay_offline(document.build_model(base, device))
        query_modules, document_modules = _build_both(query, document, base)
        # A model has one limit of active terms for both sides, so take the larger one.
        limits = [query.max_active_terms, document.max_active_terms]
        max_active_terms = max((limit for limit in limits if limit is not None), default=None)
        model = SparseEncoder(
            modules=[Router.for_query_document(query_modules, document_modules)],
            device=device,
            similarity_fn_name="dot",
            max_active_dims=max_active_terms,
        )
    return stay_offline(model)


def _build_both(
    query: EncoderSpec,
    document: EncoderSpec,
    base: Base,
) -> tuple[list[Module], list[Module]]:
    """Build a query encoder and a document encoder with one vocabulary.

    The encoder with a network is built first, because the other encoder may need the network or
    its tokenizer. If both encoders have a network, the document encoder is first.

    Args:
        query: spec of the query encoder.
        document: spec of the document encoder.
        base: base model, maximum length, sample texts and seed.

    Returns:
        The modules of the query encoder, and of the document encoder.

    Raises:
        ValueError: if neither encoder runs a network, or if the vocabularies differ.
    """
    if document.shares_network:
        raise ArgumentError(
            "shared_network",
            "set shared_network on the query encoder instead, which then runs the network of the "
            "document encoder.",
        )
    if not document.has_network and not query.has_network:
        raise ValueError(
            "the query encoder or the document encoder must have a network, got kinds "
            f"{query.kind!r} and {document.kind!r}.",
        )
    if document.has_network:
        document_modules = document.build(base)
        query_modules = query.build(_base_of_second_encoder(base, document_modules))
    else:
        query_modules = query.build(base)
        document_modules = document.build(_base_of_second_encoder(base, query_modules))
    _check_one_vocabulary(query_modules, document_modules)
    return query_modules, document_modules


def _base_of_second_encoder(base: Base, modules: list[Module]) -> Base:
    """Return the settings of the second encoder, which may reuse the first encoder's network.

    Args:
        base: settings of the first encoder.
        modules: modules of the first encoder, from the network to the pooling.
    """
    network, pooling = modules[0], modules[-1]
    return replace(base, network=network, vocab_size=pooling.get_embedding_dimension())


def _check_one_vocabulary(query_modules: list[Module], document_modules: list[Module]) -> None:
    """Raise an error if the sparse vectors of two encoders have different terms.

    Args:
        query_modules: modules of the query encoder, from the network to the pooling.
        document_modules: modules of the document encoder, from the network to the pooling.

    Raises:
        ValueError: if the dimensions of the vectors, or the tokenizers, differ.
    """
    n_query_terms = query_modules[-1].get_embedding_dimension()
    n_document_terms = document_modules[-1].get_embedding_dimension()
    query_fingerprint = vocabulary_fingerprint(query_modules[0].tokenizer)
    document_fingerprint = vocabulary_fingerprint(document_modules[0].tokenizer)
    same_tokenizer = query_fingerprint == document_fingerprint
    if n_query_terms == n_document_terms and same_tokenizer:
        return
    tokenizers = "the same tokenizer" if same_tokenizer else "different tokenizers"
    raise ValueError(
        f"query and document encoders must share a vocabulary, got {n_query_terms} and "
        f"{n_document_terms} terms from {tokenizers}; use base models with the same vocabulary.",
    )
