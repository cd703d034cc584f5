"""Builds a ``SparseEncoder`` from a record of each side (arXiv 2303.13416); BGE-M3's and SPLATE's
encoders.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import check_instance
from tilefold._internal.typing import (
    Module,
    MultiVectorEncoder,
    Network,
    SparseEncoder,
    Tensor,
    Transformer,
)
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.recipes import _builders as builders
from tilefold.recipes._builders import Base, default_logit_scale, load_transformer, network_of
from tilefold.recipes._settings import FIELDS_BY_KIND, EncoderSpec
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.decoders import build_causal, build_prosper
from tilefold.recipes.loading import quiet_libraries, seeded, stay_offline

if TYPE_CHECKING:
    from tilefold.modules.splate import SplateHead

__all__ = [
    "BUILDERS",
    "FIELDS_BY_KIND",
    "Base",
    "EncoderSpec",
    "build_encoder",
    "load_sparse_linear",
    "mlm_head",
    "splate_encoder",
    "splate_modules",
]

EPIC_TERMS = 1000  # that the paper keeps of a passage, whose weights are all positive
SPARSE_LINEAR = (
    "sparse_linear.safetensors",
    "sparse_linear.pt",
)  # of BGE-M3: the first that is beside its weights
SILENT = ("cls", "sep", "bos", "eos", "pad", "unk")  # tokens of BGE-M3 that get no weight
FRESH = 0.1  # factor on the random weights of a new head
# where transformers keeps dense layer and LayerNorm of an MLM head, and the name of its activation
# in the config
_HEADS = (
    (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "hidden_act",
    ),  # BERT
    ("lm_head.dense", "lm_head.layer_norm", None),  # RoBERTa, XLM-R, MPNet: always gelu
    ("vocab_transform", "vocab_layer_norm", "activation"),  # DistilBERT
    ("head.dense", "head.norm", "classifier_activation"),  # ModernBERT
)


def build_encoder(
    query: EncoderSpec | None,
    document: EncoderSpec,
    base: Base,
    device: str | None = None,
) -> SparseEncoder:
    """An untrained ``SparseEncoder`` of two sides: modules in a row, or a ``Router`` with routes of
    both.

    Args:
        query: the encoder of queries; None shares that of documents, with one set of weights.
        document: the encoder of documents.
        base: base model, lengths, sample texts and seed; equal ones give equal models.
        device: as in sentence-transformers, which chooses by default.

    Raises:
        TypeError: for a side that is no :class:`EncoderSpec`, such as the name of its kind.
        ValueError: if no side has a network, the vocabularies differ, or a model lacks what its
            kind needs.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router

    if query is not None:
        check_instance("query", query, EncoderSpec, "EncoderSpec(kind=...)")
    check_instance("document", document, EncoderSpec, "EncoderSpec(kind=...)")
    check_instance("base", base, Base, "Base(base_model, max_length)")
    if query is None and not document.has_network:
        raise ValueError(f"a shared encoder needs a network, which kind {document.kind!r} has not.")
    with quiet_libraries():
        if query is None:
            modules = BUILDERS[document.kind](document, base)
        else:
            modules = [Router.for_query_document(*_both_sides(query, document, base))]
        epic = (side for side in (query, document) if side and side.kind == "epic")
        most = max(
            (EPIC_TERMS if side.top_k is None else side.top_k for side in epic),
            default=None,
        )
        model = SparseEncoder(
            modules=modules,
            device=device,
            similarity_fn_name="dot",
            max_active_dims=most,
        )
    return stay_offline(model)


def _both_sides(
    query: EncoderSpec,
    document: EncoderSpec,
    base: Base,
) -> tuple[list[Module], list[Module]]:
    """Modules of queries and of documents; a side with a network comes first, and the other one
    learns from it.
    """
    if document.shared_network:
        raise ValueError(
            "shared_network: set it on the query side, which then runs the network of the document "
            "side.",
        )
    first, second = (document, query) if document.has_network else (query, document)
    if not first.has_network:
        raise ValueError(
            f"one side must have a network, got kinds {query.kind!r} and {document.kind!r}.",
        )
    modules = BUILDERS[first.kind](first, base)
    network, vocab_size = modules[0], modules[-1].get_embedding_dimension()
    others = BUILDERS[second.kind](second, replace(base, vocab_size=vocab_size, network=network))
    sizes = [side[-1].get_embedding_dimension() for side in (modules, others)]
    prints = [vocabulary_fingerprint(side[0].tokenizer) for side in (modules, others)]
    if sizes[0] != sizes[1] or prints[0] != prints[1]:
        whose = f"{'the same' if prints[0] == prints[1] else 'different'} tokenizers; take base models that share one."
        raise ValueError(
            f"both sides must have one vocabulary, got {sizes[0]} and {sizes[1]} terms of {whose}",
        )
    return (modules, others) if first is query else (others, modules)


def load_sparse_linear(path: str | Path) -> dict[str, Tensor]:
    """Read ``{"weight": [1, D], "bias": [1]}`` of an ``nn.Linear(D, 1)``, as FlagEmbedding saves
    BGE-M3's sparse head.

    A ``.pt`` file is a pickle: it is read as tensors alone, and runs no code; a ``ValueError`` for
    anything else.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    try:
        state = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, "cpu", weights_only=True)
        )
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        EOFError,
        AttributeError,
    ) as error:
        remedy = "Load it where you trust it, and save its state_dict with safetensors as sparse_linear.safetensors."
        got = "a file that cannot be read as such; it was not run"
        raise ValueError(f"{path} must hold tensors alone, got {got}. {remedy}") from error
    tensors = state.items() if isinstance(state, dict) else ()
    shapes = {name: list(value.shape) for name, value in tensors if isinstance(value, torch.Tensor)}
    weight = shapes.get("weight", [])
    if (
        set(shapes) != {"weight", "bias"}
        or len(weight) != 2
        or weight[0] != 1
        or shapes["bias"] != [1]
    ):
        expected = "weight [1, D] and bias [1] of a linear layer to one number"
        raise ValueError(f"{path} must hold {expected}, got {shapes or type(state)}.")
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise ValueError(
            f"{path} must hold finite numbers, got NaN or infinity; fetch the file again.",
        )
    return {name: value.float() for name, value in state.items()}


def _build_bge_m3(spec: EncoderSpec, base: Base) -> list[Module]:
    """BGE-M3 (arXiv 2402.03216): a weight for each token, by the head of the base model if it has
    one.
    """
    import torch
    from sentence_transformers.util import load_file_path

    from tilefold.modules import TokenWeights

    name = spec.base_model or base.base_model
    transformer = network_of(spec, base, "feature-extraction")
    ids = (getattr(transformer.tokenizer, f"{token}_token_id", None) for token in SILENT)
    silent = sorted({id_ for id_ in ids if id_ is not None})
    with seeded(base.seed):
        rows = transformer.model.get_input_embeddings().num_embeddings
        head = TokenWeights(transformer.get_embedding_dimension(), rows, ignore_ids=silent)
    files = SPARSE_LINEAR if name != "minilm" else ()
    local = Path(name).is_dir()
    found = next(
        filter(None, (load_file_path(name, file, local_files_only=local) for file in files)),
        None,
    )
    if found is not None:
        state = load_sparse_linear(found)
        if state["weight"].shape != head.linear.weight.shape:
            got = f"{list(state['weight'].shape)}; it belongs to another model."
            raise ValueError(f"{found} must fit states of width {head.hidden_size}, got {got}")
        head.linear.load_state_dict(state)
    else:  # every token begins with a weight near 1: relu of a random layer leaves many texts without any
        with torch.no_grad():
            head.linear.weight.mul_(FRESH)
            head.linear.bias.fill_(1.0)
    return [transformer, head]


def splate_encoder(
    colbert: MultiVectorEncoder,
    masked_lm: Transformer,
    *,
    device: str | None = None,
    **options: Any,
) -> SparseEncoder:
    """A ``SparseEncoder`` whose trainable part is an adapter between a frozen ColBERT and a frozen
    MLM head.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) of the same tokenizer
            and width.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.
    """
    from sentence_transformers import SparseEncoder

    modules = splate_modules(colbert, masked_lm, **options)
    return stay_offline(
        SparseEncoder(modules=modules, prompts=dict(colbert.prompts), device=device),
    )


def splate_modules(
    colbert: MultiVectorEncoder,
    masked_lm: Transformer,
    **options: Any,
) -> list[Module]:
    """The modules of :func:`splate_encoder`: the ColBERT's Transformer, frozen, and the head."""
    from sentence_transformers.base.modules import Transformer as AnyTransformer

    from tilefold.modules.splate import FrozenTransformer

    trunk = colbert[0]
    if not isinstance(trunk, AnyTransformer):
        raise ValueError(f"colbert must begin with a Transformer, got {type(trunk).__name__}.")
    head = mlm_head(masked_lm.model, **options)
    width = trunk.get_embedding_dimension()
    mine, other = (model.tokenizer.get_vocab() for model in (colbert, masked_lm))
    if width != head.hidden_size or mine != other:
        got = f"{head.hidden_size} and {len(other)} tokens; take the masked LM that the ColBERT was made of."
        expected = f"ColBERT's width {width} and its tokenizer of {len(mine)} tokens"
        raise ValueError(f"masked_lm must have {expected}, got width {got}")
    with tempfile.TemporaryDirectory(prefix="tilefold-splate-") as folder:
        trunk.save(folder)
        frozen = FrozenTransformer.load(folder, local_files_only=True)
    frozen.model.config._name_or_path = trunk.model.config._name_or_path
    return [frozen, head]


def mlm_head(network: Network, **options: Any) -> SplateHead:
    """A copy of the head of a BERT-like ``...ForMaskedLM`` with a fresh adapter before it;
    `options` of SplateHead.
    """
    import torch

    from tilefold.modules.prosper import linear_head
    from tilefold.modules.splate import SplateHead

    decoder = linear_head(network)
    heads = [
        (_inside(network, dense), _inside(network, norm), activation)
        for dense, norm, activation in _HEADS
    ]
    dense, norm, activation = next(
        (head for head in heads if head[0] and head[1]),
        (None, None, None),
    )
    if dense is None or norm is None:
        kinds = "BERT, RoBERTa, MPNet, DistilBERT or ModernBERT"
        raise ValueError(
            f"masked_lm must have the MLM head of {kinds}, got {type(network).__name__}.",
        )
    head = SplateHead(
        decoder.in_features,
        decoder.out_features,
        activation=getattr(network.config, activation) if activation else "gelu",
        layer_norm_eps=norm.eps,
        norm_bias=norm.bias is not None,
        transform_bias=dense.bias is not None,
        **options,
    )
    with torch.no_grad():
        for own, source in (("transform", dense), ("norm", norm), ("decoder", decoder)):
            for name, value in head.get_submodule(own).named_parameters():
                given = getattr(source, name, None)
                value.copy_(torch.zeros_like(value) if given is None else given)
    return head


def _inside(network: Network, path: str) -> Module | None:
    return functools.reduce(
        lambda found, name: getattr(found, name, None),
        path.split("."),
        network,
    )


def _build_splate(spec: EncoderSpec, base: Base) -> list[Module]:
    """A frozen ColBERT's Transformer, an adapter, and the frozen head of a masked language model."""
    colbert = ColbertRecipe(
        spec.base_model or base.base_model,
        max_length=base.max_length,
        seed=base.seed,
    ).start([])
    if prompts := {name: text for name, text in colbert.prompts.items() if text}:
        remedy = "build it with tilefold.recipes.encoders.splate_encoder, which keeps them, and a stock trainer."
        raise ValueError(
            f"the ColBERT of kind 'splate' must have no prompts here, got {prompts}; {remedy}",
        )
    masked = load_transformer(spec.head_model or "minilm", base, "fill-mask")
    with seeded(base.seed):
        return splate_modules(
            colbert,
            masked,
            train_bias=spec.trainable is True,
            logit_scale=default_logit_scale(masked),
        )


BUILDERS: Mapping[str, Callable[[EncoderSpec, Base], list[Module]]] = {
    "mlm": builders.build_mlm,
    "cls_mlm": builders.build_mlm,
    "epic": builders.build_epic,
    "mlp": builders.build_mlp,
    "binary": builders.build_static,
    "idf": builders.build_static,
    "causal": build_causal,
    "bidirectional": build_causal,
    "echo": build_causal,
    "prosper": build_prosper,
    "bge_m3": _build_bge_m3,
    "splate": _build_splate,
}
