"""Builds SPLATE's untrained encoder from a late-interaction model and a masked language model."""

from __future__ import annotations

import functools
import tempfile
from typing import TYPE_CHECKING, Any

from tilefold.recipes._builders import Base, load_transformer, usual_scale
from tilefold.recipes._settings import EncoderSpec
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.colbert import load_base_model as load_colbert
from tilefold.recipes.loading import seeded, stay_offline

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SparseEncoder
    from sentence_transformers.base.modules import Transformer

    from tilefold.modules.splate import SplateHead

__all__ = ["mlm_head", "splate_encoder", "splate_modules"]

# where transformers keeps dense layer and LayerNorm of an MLM head, and the name of its activation in the config
_HEADS = (
    ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "hidden_act"),  # BERT
    ("lm_head.dense", "lm_head.layer_norm", None),  # RoBERTa, XLM-R, MPNet: always gelu
    ("vocab_transform", "vocab_layer_norm", "activation"),  # DistilBERT
    ("head.dense", "head.norm", "classifier_activation"),  # ModernBERT
)


def splate_encoder(
    colbert: MultiVectorEncoder, masked_lm: Transformer, *, device: str | None = None, **options: Any
) -> SparseEncoder:
    """A ``SparseEncoder`` whose trainable part is an adapter between a frozen ColBERT and a frozen MLM head.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) of the same tokenizer and width.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of :class:`tilefold.modules.splate.SplateHead`.
    """
    from sentence_transformers import SparseEncoder

    modules = splate_modules(colbert, masked_lm, **options)
    return stay_offline(SparseEncoder(modules=modules, prompts=dict(colbert.prompts), device=device))


def splate_modules(colbert: MultiVectorEncoder, masked_lm: Transformer, **options: Any) -> list[Any]:
    """The modules of :func:`splate_encoder`: the ColBERT's Transformer, frozen, and the head."""
    from sentence_transformers.base.modules import Transformer as AnyTransformer

    from tilefold.modules.splate import FrozenTransformer

    trunk: Any = colbert[0]
    if not isinstance(trunk, AnyTransformer):
        raise ValueError(f"colbert must begin with a Transformer, got {type(trunk).__name__}.")
    head = mlm_head(masked_lm.model, **options)
    width = trunk.get_embedding_dimension()
    mine, other = (model.tokenizer.get_vocab() for model in (colbert, masked_lm))
    if width != head.hidden_size or mine != other:
        raise ValueError(
            f"masked_lm must have ColBERT's width {width} and its tokenizer of {len(mine)} tokens, got width "
            f"{head.hidden_size} and {len(other)} tokens; take the masked language model that the ColBERT was made of."
        )
    with tempfile.TemporaryDirectory(prefix="tilefold-splate-") as folder:
        trunk.save(folder)
        frozen = FrozenTransformer.load(folder, local_files_only=True)
    frozen.model.config._name_or_path = trunk.model.config._name_or_path
    return [frozen, head]


def mlm_head(network: Any, **options: Any) -> SplateHead:
    """A copy of the head of a BERT-like ``...ForMaskedLM`` with a fresh adapter before it; `options` of SplateHead."""
    import torch

    from tilefold.modules.splate import SplateHead

    decoder = network.get_output_embeddings()
    if not isinstance(decoder, torch.nn.Linear):
        raise ValueError(f"masked_lm must have a linear LM head, got {type(decoder).__name__}; merge adapters first.")
    found = [
        (dense, norm, named)
        for dense_path, norm_path, named in _HEADS
        if (dense := _inside(network, dense_path)) is not None and (norm := _inside(network, norm_path)) is not None
    ]
    if not found:
        raise ValueError(
            f"masked_lm must have the MLM head of BERT, RoBERTa, MPNet, DistilBERT or ModernBERT, got "
            f"{type(network).__name__}."
        )
    dense, norm, activation = found[0]
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


def _inside(network: Any, path: str) -> Any:
    return functools.reduce(lambda found, name: getattr(found, name, None), path.split("."), network)


def build_splate(spec: EncoderSpec, base: Base) -> list[Any]:
    """A frozen ColBERT's Transformer, an adapter, and the frozen head of a masked language model."""
    recipe = ColbertRecipe(spec.base_model or base.base_model, max_length=base.max_length, seed=base.seed)
    colbert = load_colbert(recipe)
    if prompts := {name: text for name, text in colbert.prompts.items() if text}:
        raise ValueError(
            f"the ColBERT of kind 'splate' must have no prompts here, got {prompts}; build it with "
            "tilefold.recipes.splate.splate_encoder, which keeps them, and train it with the stock trainer."
        )
    masked = load_transformer(spec.head_model or "minilm", base, "fill-mask")
    with seeded(base.seed):
        return splate_modules(colbert, masked, train_bias=spec.trainable is True, logit_scale=usual_scale(masked))
