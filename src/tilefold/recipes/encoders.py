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

    The modules of a saved SparseEncoder are kept. A masked language model gets the stock SPLADE
    pooling, and ``"minilm"`` is :func:`tilefold.recipes.minilm_splade`.
    """

    def build(self, base: Base) -> list[Module]:
        """Refuse to be one of two encoders."""
        raise ValueError(
            f"kind {self.kind!r} encodes queries and documents: leave the query encoder out, or "
            "take kind 'mlm'.",
        )

    def build_model(self, base: Base, device: str | None = None) -> SparseEncoder:
        """Load a ``SparseEncoder``, or build one on a masked language model.

        Args:
            base: base model and maximum length; sample texts and seed for ``"minilm"``.
            device: as in sentence-transformers, which chooses by default.

        Raises:
            ValueError: if the base model has no masked-LM head.
        """
        base_model = self.base_model or base.base_model
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
                "trains. Take a masked LM, a SparseEncoder, or 'minilm'; colbert trains dense and "
                "multi-vector models.",
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
        query: encoder of queries; ``None`` takes the encoder of documents, with one set of weights.
        document: encoder of documents.
        base: base model, lengths, sample texts and seed; equal ones give equal models.
        device: as in sentence-transformers, which chooses by default.

    Raises:
        TypeError: for an encoder that is no :class:`EncoderSpec`, such as the name of its kind.
        ValueError: if no encoder has a network, the vocabularies differ, or a model lacks what its
            kind needs.
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
        # A model has one limit of active terms, which must not cut the vectors of either side.
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

    The document encoder is built first if it has a network, because a query encoder may share its
    network, and a static one takes its tokenizer. Otherwise the query encoder is built first.

    Args:
        query: configuration of the query encoder.
        document: configuration of the document encoder.
        base: base model, maximum length, sample texts and seed.

    Returns:
        The modules of the query encoder, and of the document encoder.

    Raises:
        ValueError: if no encoder has a network, or if the vocabularies differ.
    """
    if document.shares_network:
        raise ArgumentError(
            "shared_network",
            "set it on the query side, which then runs the network of the document side.",
        )
    if not document.has_network and not query.has_network:
        raise ValueError(
            f"one side must have a network, got kinds {query.kind!r} and {document.kind!r}.",
        )
    if document.has_network:
        document_modules = document.build(base)
        query_modules = query.build(_with_network(base, document_modules))
    else:
        query_modules = query.build(base)
        document_modules = document.build(_with_network(base, query_modules))
    _check_one_vocabulary(query_modules, document_modules)
    return query_modules, document_modules


def _with_network(base: Base, modules: list[Module]) -> Base:
    """Return the starting points of the second encoder, with the network of the first one.

    Args:
        base: starting points of the first encoder.
        modules: modules of the first encoder. The first module is the network. The output dimension
            of the last one is the vocabulary size.
    """
    return replace(
        base,
        network=modules[0],
        vocab_size=modules[-1].get_embedding_dimension(),
    )


def _check_one_vocabulary(query_modules: list[Module], document_modules: list[Module]) -> None:
    """Refuse two encoders whose sparse vectors have different terms.

    Args:
        query_modules: modules of the query encoder, from the network to the pooling.
        document_modules: modules of the document encoder.

    Raises:
        ValueError: if the vectors have different dimensions, or the tokenizers differ.
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
        f"both sides must have one vocabulary, got {n_query_terms} terms of queries and "
        f"{n_document_terms} terms of documents, of {tokenizers}; take base models that share one.",
    )
