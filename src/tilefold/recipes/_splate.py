"""SPLATE (arXiv 2404.13950): sparse vectors from the token states of a frozen ColBERT."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    """Configuration of SPLATE: a frozen ColBERT, a trained adapter, and an MLM head.

    The base model is the ColBERT.

    Attributes:
        head_model: masked language model with the head, and with the ColBERT's tokenizer and width.
        trainable: whether the bias of the head is trained, besides the adapter.
    """

    has_routes: ClassVar[bool] = True  # the ColBERT marks queries and documents by prefixes

    head_model: str = checked("minilm", MODEL_NAME)
    trainable: bool = checked(False, BOOLEAN)

    def build(self, base: Base) -> list[Module]:
        """Build the modules of SPLATE: a frozen ColBERT, and a head that computes sparse vectors.

        Args:
            base: the name of the ColBERT, the maximum length and the seed.

        Returns:
            The ColBERT's Transformer, and the MLM head with its new adapter.

        Raises:
            ValueError: if the ColBERT has prompts, or does not have the tokenizer and width of the
                head's model.
        """
        colbert_recipe = ColbertRecipe(
            self.model_name(base),
            max_length=base.max_length,
            seed=base.seed,
        )
        colbert = colbert_recipe.build_model()
        # Only modules are returned, so prompts of the ColBERT would be lost.
        prompts = {name: text for name, text in colbert.prompts.items() if text}
        if prompts:
            raise ValueError(
                f"kind 'splate' needs a ColBERT without prompts, got {prompts}; build the model "
                "with tilefold.recipes.encoders.splate_encoder, which keeps prompts, and train it "
                "with the SparseEncoderTrainer of sentence-transformers.",
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

    A new adapter maps the ColBERT's token states to the input of a frozen MLM head.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) with the same
            tokenizer and width.
        device: device of the model; default: chosen by sentence-transformers.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.

    Raises:
        ValueError: if the two models have different tokenizers or widths.
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
    """Build the two modules of SPLATE: a ColBERT's frozen Transformer, and an MLM head on it.

    Args:
        colbert: any ``MultiVectorEncoder`` on a text Transformer.
        masked_lm: a ``Transformer`` module (``transformer_task="fill-mask"``) with the same
            tokenizer and width. Its MLM head is copied.
        options: ``adapter_size``, ``train_bias`` and ``logit_scale`` of
            :class:`tilefold.modules.splate.SplateHead`.

    Raises:
        ValueError: if `colbert` does not begin with a Transformer, or if the two models have
            different tokenizers or widths.
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
            f"{len(head_vocabulary)} tokens; use the masked language model that the ColBERT was "
            "trained from.",
        )
    # Saving and loading turns the Transformer into a FrozenTransformer with the same weights.
    with tempfile.TemporaryDirectory(prefix="tilefold-splate-") as folder:
        backbone.save(folder)
        frozen = FrozenTransformer.load(folder, local_files_only=True)
    # The configuration names the temporary folder otherwise.
    frozen.model.config._name_or_path = backbone.model.config._name_or_path
    return [frozen, head]


@dataclass(frozen=True)
class _HeadLayout:
    """Names of the parts of an MLM head in one family of transformers models.

    Attributes:
        dense: path of the dense layer in the network.
        layer_norm: path of the LayerNorm after the dense layer.
        activation_field: field of the configuration that names the activation; ``None`` for a
            family that always uses GELU.
    """

    dense: str
    layer_norm: str
    activation_field: str | None


class _HeadLayers(NamedTuple):
    """Layers of an MLM head before its linear layer to the vocabulary.

    Attributes:
        dense: the dense layer.
        activation: name of the activation after the dense layer.
        layer_norm: the LayerNorm after the activation.
    """

    dense: Module
    activation: str
    layer_norm: Module


_BERT_LAYOUT = _HeadLayout(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "hidden_act",
)
_ROBERTA_LAYOUT = _HeadLayout("lm_head.dense", "lm_head.layer_norm", None)  # also XLM-R and MPNet
_DISTILBERT_LAYOUT = _HeadLayout("vocab_transform", "vocab_layer_norm", "activation")
_MODERNBERT_LAYOUT = _HeadLayout("head.dense", "head.norm", "classifier_activation")
_LAYOUTS = (_BERT_LAYOUT, _ROBERTA_LAYOUT, _DISTILBERT_LAYOUT, _MODERNBERT_LAYOUT)


def mlm_head(network: Network, **options: Any) -> SplateHead:
    """Copy the MLM head of a BERT-like ``...ForMaskedLM``, after SPLATE's new adapter.

    The head is a dense layer, an activation, a LayerNorm and a linear layer to the vocabulary,
    which is called the decoder. The adapter is a small MLP with a residual connection.

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
    layers = _find_head_layers(network)
    head = SplateHead(
        decoder.in_features,
        decoder.out_features,
        activation=layers.activation,
        layer_norm_eps=layers.layer_norm.eps,
        norm_bias=layers.layer_norm.bias is not None,
        transform_bias=layers.dense.bias is not None,
        **options,
    )
    _copy_parameters(layers.dense, head.get_submodule("transform"))
    _copy_parameters(layers.layer_norm, head.get_submodule("norm"))
    _copy_parameters(decoder, head.get_submodule("decoder"))
    return head


def _find_head_layers(network: Network) -> _HeadLayers:
    """Find the dense layer, the activation and the LayerNorm of a network's MLM head.

    Each family of transformers models has its own names for them, which a layout lists.

    Args:
        network: a ``...ForMaskedLM`` of transformers.

    Raises:
        ValueError: if the network has no MLM head of a known layout.
    """
    for layout in _LAYOUTS:
        dense = _submodule(network, layout.dense)
        layer_norm = _submodule(network, layout.layer_norm)
        if dense is None or layer_norm is None:
            continue
        activation = "gelu"
        if layout.activation_field is not None:
            activation = getattr(network.config, layout.activation_field)
        return _HeadLayers(dense, activation, layer_norm)
    raise ValueError(
        "masked_lm must have the MLM head of BERT, RoBERTa, MPNet, DistilBERT or ModernBERT, got "
        f"{type(network).__name__}.",
    )


def _submodule(network: Network, path: str) -> Module | None:
    """Return the module at a dotted path in a network, or ``None`` if there is none."""
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
