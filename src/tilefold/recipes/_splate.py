"""SPLATE (arXiv 2404.13950): sparse vectors from the token states of a frozen ColBERT."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._internal.arguments import check_instance
from tilefold._internal.typing import (
    Module,
    MultiVectorEncoder,
    Network,
    SparseEncoder,
    Transformer,
)
from tilefold.recipes._encoder_spec import Base, EncoderSpec
from tilefold.recipes._masked_encoders import default_logit_scale, load_transformer
from tilefold.recipes._settings import BOOLEAN, MODEL_NAME, checked
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.loading import seeded, stay_offline

if TYPE_CHECKING:
    from tilefold.modules.splate import SplateHead


@dataclass(frozen=True, kw_only=True)
class SplateSpec(EncoderSpec, kind="splate"):
    """Configuration of an adapter between a frozen ColBERT, the base model, and an MLM head.

    Attributes:
        head_model: masked language model with the head, of the ColBERT's tokenizer and width.
        trainable: whether the bias of the head is trained, besides the adapter.
    """

    has_routes: ClassVar[bool] = True  # the ColBERT marks queries and documents by prefixes

    head_model: str = checked("minilm", MODEL_NAME)
    trainable: bool = checked(False, BOOLEAN)

    def build(self, base: Base) -> list[Module]:
        """Build the modules of SPLATE: a frozen ColBERT, and a head that makes sparse vectors.

        Args:
            base: base model, which is the ColBERT, maximum length and seed.

        Returns:
            The ColBERT's Transformer, and the MLM head with its new adapter.

        Raises:
            ValueError: if the ColBERT has prompts, or does not fit the head.
        """
        colbert = ColbertRecipe(
            self.base_model or base.base_model,
            max_length=base.max_length,
            seed=base.seed,
        ).build_model([])
        # the modules alone are returned, so that prompts of the model would be lost
        prompts = {name: text for name, text in colbert.prompts.items() if text}
        if prompts:
            raise ValueError(
                f"the ColBERT of kind 'splate' must have no prompts here, got {prompts}; build it "
                "with tilefold.recipes.encoders.splate_encoder, which keeps them, and a stock "
                "trainer.",
            )
        masked_lm = load_transformer(self.head_model, base, "fill-mask")
        with seeded(base.seed):
            return splate_modules(
                colbert,
                masked_lm,
                train_bias=self.trainable,
                logit_scale=default_logit_scale(masked_lm),
            )


def splate_encoder(
    colbert: MultiVectorEncoder,
    masked_lm: Transformer,
    *,
    device: str | None = None,
    **options: Any,
) -> SparseEncoder:
    """Build an untrained SPLATE: sparse vectors from a frozen ColBERT through an adapter.

    The adapter is new. It maps the ColBERT's token states to the input of a frozen MLM head.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) of the same tokenizer
            and width.
        device: as in sentence-transformers, which chooses by default.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.

    Raises:
        ValueError: if the two models do not fit together.
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
    """Build the two modules of SPLATE: a ColBERT's Transformer, frozen, and an MLM head on it.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) of the same tokenizer
            and width. Its MLM head is copied.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.

    Raises:
        ValueError: if `colbert` does not begin with a Transformer, or `masked_lm` has another
            width or tokenizer.
    """
    from sentence_transformers import MultiVectorEncoder as MultiVectorModel
    from sentence_transformers.base.modules import Transformer as TransformerModule

    from tilefold.modules.splate import FrozenTransformer

    check_instance("colbert", colbert, MultiVectorModel, "a loaded MultiVectorEncoder")
    check_instance(
        "masked_lm",
        masked_lm,
        TransformerModule,
        'Transformer(name, transformer_task="fill-mask")',
    )
    backbone = colbert[0]
    if not isinstance(backbone, TransformerModule):
        raise ValueError(f"colbert must begin with a Transformer, got {type(backbone).__name__}.")
    head = mlm_head(masked_lm.model, **options)
    width = backbone.get_embedding_dimension()
    colbert_vocabulary = colbert.tokenizer.get_vocab()
    head_vocabulary = masked_lm.tokenizer.get_vocab()
    if width != head.hidden_size or colbert_vocabulary != head_vocabulary:
        raise ValueError(
            f"masked_lm must have ColBERT's width {width} and its tokenizer of "
            f"{len(colbert_vocabulary)} tokens, got width {head.hidden_size} and "
            f"{len(head_vocabulary)} tokens; take the masked LM that the ColBERT was made of.",
        )
    # Saving and loading turns the Transformer into a FrozenTransformer with the same weights.
    with tempfile.TemporaryDirectory(prefix="tilefold-splate-") as folder:
        backbone.save(folder)
        frozen = FrozenTransformer.load(folder, local_files_only=True)
    # the name of the base model instead of that of the temporary folder
    frozen.model.config._name_or_path = backbone.model.config._name_or_path
    return [frozen, head]


@dataclass(frozen=True)
class _HeadLayout:
    """Where transformers keeps the parts of an MLM head.

    Attributes:
        dense: path of the dense layer in the network.
        layer_norm: path of the LayerNorm after it.
        activation: field of the configuration with the activation's name; ``None`` if it is GELU
            in all models.
    """

    dense: str
    layer_norm: str
    activation: str | None


_BERT_LAYOUT = _HeadLayout(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "hidden_act",
)
_ROBERTA_LAYOUT = _HeadLayout("lm_head.dense", "lm_head.layer_norm", None)  # XLM-R and MPNet, too
_DISTILBERT_LAYOUT = _HeadLayout("vocab_transform", "vocab_layer_norm", "activation")
_MODERNBERT_LAYOUT = _HeadLayout("head.dense", "head.norm", "classifier_activation")
_LAYOUTS = (_BERT_LAYOUT, _ROBERTA_LAYOUT, _DISTILBERT_LAYOUT, _MODERNBERT_LAYOUT)


def mlm_head(network: Network, **options: Any) -> SplateHead:
    """Copy the MLM head of a BERT-like ``...ForMaskedLM``, with a new adapter in front of it.

    The head is a dense layer, an activation, a LayerNorm and a linear layer to the vocabulary,
    which is called the decoder.

    Args:
        network: BERT, RoBERTa, MPNet, DistilBERT or ModernBERT with an MLM head.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.

    Raises:
        ValueError: if the network has no MLM head of a known layout.
    """
    from tilefold.modules.prosper import linear_head
    from tilefold.modules.splate import SplateHead

    decoder = linear_head(network)
    layout, dense, layer_norm = _find_head_layers(network)
    activation = "gelu"
    if layout.activation is not None:
        activation = getattr(network.config, layout.activation)
    head = SplateHead(
        decoder.in_features,
        decoder.out_features,
        activation=activation,
        layer_norm_eps=layer_norm.eps,
        norm_bias=layer_norm.bias is not None,
        transform_bias=dense.bias is not None,
        **options,
    )
    _copy_parameters(dense, head.get_submodule("transform"))
    _copy_parameters(layer_norm, head.get_submodule("norm"))
    _copy_parameters(decoder, head.get_submodule("decoder"))
    return head


def _find_head_layers(network: Network) -> tuple[_HeadLayout, Module, Module]:
    """Find the dense layer and the LayerNorm of a network's MLM head.

    Each family of networks in transformers has its own names for them, which a layout lists.

    Args:
        network: a ``...ForMaskedLM`` of transformers.

    Returns:
        The layout that fits the network, the dense layer and the LayerNorm.

    Raises:
        ValueError: if the network has no MLM head of a known layout.
    """
    for layout in _LAYOUTS:
        dense = _submodule(network, layout.dense)
        layer_norm = _submodule(network, layout.layer_norm)
        if dense is not None and layer_norm is not None:
            return layout, dense, layer_norm
    raise ValueError(
        "masked_lm must have the MLM head of BERT, RoBERTa, MPNet, DistilBERT or ModernBERT, got "
        f"{type(network).__name__}.",
    )


def _submodule(network: Network, path: str) -> Module | None:
    """Return the module at a dotted path in a network; ``None`` without one."""
    module = network
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _copy_parameters(source: Module, target: Module) -> None:
    """Copy the parameters of a layer to another layer.

    Args:
        source: layer of the masked language model.
        target: layer with the same parameters. A parameter that `source` lacks becomes zero.
    """
    import torch

    with torch.no_grad():
        for name, parameter in target.named_parameters():
            value = getattr(source, name, None)
            if value is None:
                parameter.zero_()
            else:
                parameter.copy_(value)
