"""Encoders on masked language models: LM heads over the vocabulary, and weights of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Module, Transformer
from tilefold.recipes._encoder_spec import Base, EncoderSpec, SharableSpec
from tilefold.recipes._settings import BOOLEAN, POSITIVE, checked, integer, one_of
from tilefold.recipes.backbone import keep_lowest_layers, minilm_path, minilm_splade
from tilefold.recipes.loading import (
    check_masked_lm,
    complete_weights,
    local_only,
    saved_modules,
    seeded,
)

# The poolings and activations of HeadPooling are repeated here, because its module imports torch.
POOLINGS = ("max", "sum", "mean", "cls", "last")
ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu", "softplus", "log1p_softplus", "none")
# initial factor on the logits of networks whose LM head computes large logits (arXiv 2606.18811)
LARGE_LOGITS_SCALE = 1 / 16
LARGE_LOGITS_MODELS = ("modernbert", "modernbert-decoder")  # model types, also of Ettin
EPIC_TERMS = 1000  # number of terms per passage in the paper of EPIC


@dataclass(frozen=True, kw_only=True)
class HeadSpec(SharableSpec):
    """Configuration of an encoder that reduces the logits of an LM head to one sparse vector.

    Attributes:
        activation: activation of the logits (:class:`tilefold.modules.HeadPooling`).
        logit_scale: factor on the logits; by default 1, or 1/16 for ModernBERT and Ettin (arXiv
            2606.18811).
        top_k: number of largest weights that are kept per text; by default all of them.
        normalize: ``"l2"`` for vectors of length 1.
    """

    activation: str = checked("log1p_relu", one_of(*ACTIVATIONS))
    logit_scale: float | None = checked(None, POSITIVE)
    top_k: int | None = checked(None, integer())
    normalize: str | None = checked(None, one_of("l2"))

    def head_pooling(
        self,
        transformer: Transformer,
        pooling: str,
        drop_special_tokens: bool = False,
    ) -> Module:
        """Build the module that reduces the logits of an LM head to one sparse vector.

        Args:
            transformer: network with an LM head.
            pooling: reduction over the tokens of a text, such as ``"max"``.
            drop_special_tokens: whether special tokens get no weight.

        Returns:
            The ``SpladePooling`` of sentence-transformers if it has the options of this spec, so
            that the model loads without tilefold. Otherwise :class:`tilefold.modules.HeadPooling`.
        """
        from tilefold.modules import stock_module
        from tilefold.modules.head_pooling import HeadPooling

        logit_scale = self.logit_scale
        if logit_scale is None:
            logit_scale = default_logit_scale(transformer)
        module = HeadPooling(
            pooling=pooling,
            activation=self.activation,
            logit_scale=logit_scale,
            ignore_ids=transformer.tokenizer.all_special_ids if drop_special_tokens else [],
            top_k=self.top_k,
            normalize=self.normalize,
            embedding_dimension=head_rows(transformer),
        )
        return stock_module(module) or module


@dataclass(frozen=True, kw_only=True)
class PooledHeadSpec(HeadSpec):
    """Configuration of an encoder that pools the logits of all tokens.

    Attributes:
        pooling: pooling of the logits (:class:`tilefold.modules.HeadPooling`).
        drop_special_tokens: whether special tokens get no weight.
    """

    pooling: str = checked("max", one_of(*POOLINGS))
    drop_special_tokens: bool = checked(False, BOOLEAN)

    def __post_init__(self) -> None:
        """Check each field, and that the pooled token is not dropped."""
        super().__post_init__()
        if self.pooling == "cls" and self.drop_special_tokens:
            raise ArgumentError(
                "drop_special_tokens",
                "must be left out with pooling 'cls', which reads one of them, got True.",
            )


@dataclass(frozen=True, kw_only=True)
class MlmSpec(PooledHeadSpec, kind="mlm"):
    """Configuration of an encoder that pools the logits of a masked language model (SPLADE).

    Attributes:
        layers: number of lowest layers of the base model that are kept; ``None`` keeps all.
    """

    network_fields: ClassVar[tuple[str, ...]] = ("base_model", "layers")
    transformer_task: ClassVar[str] = "fill-mask"

    layers: int | None = checked(None, integer())

    def build(self, base: Base) -> list[Module]:
        """Build a masked language model and the pooling of its logits.

        Args:
            base: the recipe's base model, maximum length and seed. ``base.network`` is the document
                encoder's Transformer, which is reused if `shared_network` is set.
        """
        if self.shared_network:
            transformer = self.document_network(base)
        else:
            transformer = load_transformer(
                self.model_name(base),
                base,
                self.transformer_task,
                layers=self.layers,
            )
        return [
            transformer,
            self.head_pooling(transformer, self.pooling, self.drop_special_tokens),
        ]


@dataclass(frozen=True, kw_only=True)
class ClsMlmSpec(HeadSpec, kind="cls_mlm"):
    """Configuration of an encoder that reads only the logits of the first token (TILDE).

    Attributes:
        layers: number of lowest layers of the base model that are kept; ``None`` keeps all.
    """

    network_fields: ClassVar[tuple[str, ...]] = ("base_model", "layers")
    transformer_task: ClassVar[str] = "fill-mask"

    layers: int | None = checked(None, integer())

    def build(self, base: Base) -> list[Module]:
        """Build a masked language model and a pooling that reads the first token's logits.

        Args:
            base: the recipe's base model, maximum length and seed. ``base.network`` is the document
                encoder's Transformer, which is reused if `shared_network` is set.
        """
        if self.shared_network:
            transformer = self.document_network(base)
        else:
            transformer = load_transformer(
                self.model_name(base),
                base,
                self.transformer_task,
                first_token=True,
                layers=self.layers,
            )
        return [transformer, self.head_pooling(transformer, "cls")]


@dataclass(frozen=True, kw_only=True)
class EpicSpec(EncoderSpec, kind="epic"):
    """Configuration of an LM head whose logits are weighted by importance and quality (EPIC).

    Attributes:
        layers: number of lowest layers of the base model that are kept; ``None`` keeps all.
        drop_special_tokens: whether special tokens get no weight.
        top_k: number of largest weights that are kept per text (the model's ``max_active_dims``),
            because all weights are positive.
    """

    layers: int | None = checked(None, integer())
    drop_special_tokens: bool = checked(True, BOOLEAN)
    top_k: int = checked(EPIC_TERMS, integer())

    @property
    def max_active_terms(self) -> int:
        """Number of largest weights that the model keeps of a text."""
        return self.top_k

    def build(self, base: Base) -> list[Module]:
        """Build a masked language model, and EPIC's pooling of its logits and hidden states.

        EPIC is arXiv 2004.14245.

        Args:
            base: the recipe's base model, maximum length and seed.
        """
        from tilefold.modules import EpicPooling

        transformer = load_transformer(
            self.model_name(base),
            base,
            "fill-mask",
            layers=self.layers,
            output_hidden_states=True,
        )
        special_ids = transformer.tokenizer.all_special_ids
        with seeded(base.seed):
            pooling = EpicPooling(
                transformer.model.config.hidden_size,
                ignore_ids=special_ids if self.drop_special_tokens else (),
                embedding_dimension=head_rows(transformer),
            )
        return [transformer, pooling]


@dataclass(frozen=True, kw_only=True)
class MlpSpec(SharableSpec, kind="mlp"):
    """Configuration of an encoder with a learned weight for each token (uniCOIL, DeepImpact).

    Attributes:
        activation: activation of the weights (:class:`tilefold.modules.TokenWeights`).
        scale: initial value of a learned factor; ``None`` for no factor.
        drop_special_tokens: whether special tokens get no weight.
        saturation: weight that counts half when texts are encoded, as BM25 saturates frequencies,
            and that all tokens start with; the loss reads unsaturated weights.
        layers: number of lowest layers of the base model that are kept; ``None`` keeps all.
    """

    network_fields: ClassVar[tuple[str, ...]] = ("base_model", "layers")
    transformer_task: ClassVar[str] = "feature-extraction"  # no LM head

    activation: str = checked("relu", one_of(*ACTIVATIONS))
    scale: float | None = checked(None, POSITIVE)
    drop_special_tokens: bool = checked(True, BOOLEAN)
    saturation: float | None = checked(None, POSITIVE)
    layers: int | None = checked(None, integer())

    def build(self, base: Base) -> list[Module]:
        """Build a transformer without its LM head, and a layer that computes a weight per token.

        If the base model has trained token weights, they are loaded.

        Args:
            base: the recipe's base model, maximum length and seed; and the vocabulary size of the
                document encoder. ``base.network`` is the document encoder's Transformer, which is
                reused if `shared_network` is set.
        """
        from tilefold.modules import TokenWeights

        if self.shared_network:
            transformer = self.document_network(base)
        else:
            transformer = load_transformer(
                self.model_name(base),
                base,
                self.transformer_task,
                layers=self.layers,
            )
        # A document encoder, if there is one, has set the vocabulary size.
        n_embeddings = transformer.model.get_input_embeddings().num_embeddings
        vocab_size = base.vocab_size or n_embeddings
        special_ids = transformer.tokenizer.all_special_ids
        with seeded(base.seed):
            weights = TokenWeights(
                transformer.get_embedding_dimension(),
                vocab_size,
                activation=self.activation,
                scale=self.scale,
                ignore_ids=special_ids if self.drop_special_tokens else (),
                saturation=self.saturation,
            )
            _set_initial_token_weights(weights, self.saturation)
        _load_token_weights(weights, self.model_name(base))
        return [transformer, weights]


def _set_initial_token_weights(weights: Module, saturation: float | None) -> None:
    """Let every token start with a positive weight.

    Otherwise relu would set the weights of about half of the tokens to 0, without a gradient.

    Args:
        weights: the new :class:`tilefold.modules.TokenWeights`, changed in place.
        saturation: weight that counts half when texts are encoded, with which all tokens start;
            ``None`` for weights that start near 1.
    """
    import torch

    if saturation is None:
        torch.nn.init.constant_(weights.linear.bias, 1.0)
    else:
        torch.nn.init.constant_(weights.linear.bias, saturation)
        torch.nn.init.zeros_(weights.linear.weight)


def _load_token_weights(weights: Module, base_model: str) -> None:
    """Load trained token weights from a base model, if it has any.

    Args:
        weights: the new :class:`tilefold.modules.TokenWeights`, changed in place.
        base_model: ``"minilm"``, a folder or a Hugging Face name.

    Raises:
        ValueError: if the saved parameters and the new ones differ in names or shapes.
    """
    from tilefold.modules import TokenWeights, load_encoder

    if base_model == "minilm":  # the packaged model, which has no token weights
        return
    if not any(name.endswith(".TokenWeights") for name in saved_modules(base_model)):
        return
    saved = load_encoder(base_model, device="cpu", local_files_only=Path(base_model).is_dir())
    trained = next(module for module in saved.children() if isinstance(module, TokenWeights))
    expected_shapes = _parameter_shapes(weights)
    saved_shapes = _parameter_shapes(trained)
    if expected_shapes != saved_shapes:
        raise ValueError(
            f"base_model: the token weights of {base_model} have the parameters {saved_shapes}, "
            f"but the encoder has {expected_shapes}; set scale only if the base model was trained "
            "with it, or use another base model.",
        )
    weights.load_state_dict(trained.state_dict())


def _parameter_shapes(module: Module) -> dict[str, list[int]]:
    """Return the shape of each parameter of a module."""
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def default_logit_scale(transformer: Transformer) -> float:
    """Return the initial factor on a network's logits: 1/16 for ModernBERT and Ettin, or else 1."""
    model_type = str(getattr(transformer.model.config, "model_type", ""))
    return LARGE_LOGITS_SCALE if model_type in LARGE_LOGITS_MODELS else 1.0


def head_rows(transformer: Transformer) -> int:
    """Return the vocabulary size of a transformer's LM head."""
    return int(transformer.model.get_output_embeddings().weight.shape[0])


def load_transformer(
    base_model: str,
    base: Base,
    task: str,
    first_token: bool = False,
    layers: int | None = None,
    output_hidden_states: bool = False,
) -> Transformer:
    """Load a base model as a ``Transformer`` module, without running remote code.

    Args:
        base_model: ``"minilm"``, a folder or a Hugging Face name.
        base: the maximum length; and the seed and sample texts for ``"minilm"``. Its own
            ``base_model`` is not read.
        task: ``"fill-mask"`` to load the LM head, ``"feature-extraction"`` to drop it.
        first_token: whether only the logits of first tokens are read; the decoder bias of
            ``"minilm"`` depends on it.
        layers: number of lowest layers to keep; ``None`` keeps all.
        output_hidden_states: whether the network also returns its hidden states; saved in its
            configuration.
    """
    from sentence_transformers.base.modules import Transformer

    if base_model == "minilm" and task == "fill-mask":
        model = minilm_splade(
            base.texts,
            percentile=base.start_percentile,
            max_length=base.max_length,
            seed=base.seed,
            device="cpu",
            first_token=first_token,
            layers=layers,
        )
        if output_hidden_states:
            model[0].model.config.output_hidden_states = True
        return model[0]
    path = str(minilm_path()) if base_model == "minilm" else base_model
    if task == "fill-mask":
        check_masked_lm(path)
    no_remote_code = {"trust_remote_code": False}
    config_options = dict(no_remote_code)
    if output_hidden_states:
        config_options["output_hidden_states"] = True
    loading_options = local_only(
        Path(path).is_dir(),
        model_kwargs=no_remote_code,
        processor_kwargs=no_remote_code,
        config_kwargs=config_options,
    )
    with complete_weights(path):
        transformer = Transformer(path, transformer_task=task, **loading_options)
    transformer.max_seq_length = min(base.max_length, transformer.max_seq_length or base.max_length)
    if layers is not None:
        keep_lowest_layers(transformer.model, layers)
    return transformer
