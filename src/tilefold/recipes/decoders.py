"""Encoders on causal language models, and PROSPER.

SPLADE on causal language models follows Mistral-SPLADE (arXiv 2408.11119) and CSPLADE (arXiv
2504.10816). PROSPER is arXiv 2510.18527.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Module, Network, Tokenizer, Transformer
from tilefold.recipes._encoder_spec import Base, SharableSpec
from tilefold.recipes._masked_encoders import (
    PooledHeadSpec,
    default_logit_scale,
    load_transformer,
)
from tilefold.recipes._settings import BOOLEAN, POSITIVE, checked, integer, one_of
from tilefold.recipes.loading import complete_weights, local_only, saved_architectures, seeded
from tilefold.retrieval.errors import MissingPackageError

VARIANTS = ("causal", "bidirectional", "echo")
# names of the linear layers of attention and MLP in Llama, Mistral, Qwen and similar models
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_ALPHA_PER_RANK = 2  # LoRA's alpha divided by its rank, as in CSPLADE
LORA_DROPOUT = 0.05  # probability
TEXT_TO_LOGITS = {"text": {"method": "forward", "method_output_name": "logits"}}
"""Modality configuration of a ``Transformer`` module: texts go to ``forward``, logits come out."""


@dataclass(frozen=True, kw_only=True)
class CausalLmSpec(PooledHeadSpec):
    """Configuration of an encoder that pools the logits of a causal language model.

    Attributes:
        lora: rank of LoRA updates, which are the only trained weights of the network and are merged
            at the end; ``None`` trains all weights.
    """

    network_fields: ClassVar[tuple[str, ...]] = ("base_model", "lora")
    transformer_task: ClassVar[str] = "text-generation"
    measured: ClassVar[str] = (
        "Decoders are trained on packed tokens, without padding. In a test of tilefold on 400 "
        "documents of SciFact, a Llama of three layers improved in 48 steps from an nDCG@10 of "
        ".100 to .304, and to .295 on padded tokens (means of three seeds)."
    )

    lora: int | None = checked(None, integer())

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the encoder, and merges them at the end."""
        return self.lora is not None

    def build(self, base: Base) -> list[Module]:
        """Build a causal language model, with LoRA if it is set, and the pooling of its logits.

        Args:
            base: the recipe's base model, maximum length and seed. ``base.network`` is the document
                encoder's Transformer, which is reused if `shared_network` is set.
        """
        if self.shared_network:
            transformer = self.document_network(base)
        else:
            transformer = causal_transformer(
                self.model_name(base),
                self.kind,
                max_length=base.max_length,
            )
            if self.lora is not None:
                with seeded(base.seed):
                    add_lora(transformer, rank=self.lora, alpha=LORA_ALPHA_PER_RANK * self.lora)
        return [
            transformer,
            self.head_pooling(transformer, self.pooling, self.drop_special_tokens),
        ]


@dataclass(frozen=True, kw_only=True)
class CausalSpec(CausalLmSpec, kind="causal"):
    """Configuration of a causal language model whose tokens attend only to earlier tokens."""


@dataclass(frozen=True, kw_only=True)
class BidirectionalSpec(CausalLmSpec, kind="bidirectional"):
    """Configuration of a causal language model whose tokens attend to all tokens."""


@dataclass(frozen=True, kw_only=True)
class EchoSpec(CausalLmSpec, kind="echo"):
    """Configuration of a causal language model that reads each text twice.

    The second copy is pooled. Its tokens attend to all tokens of the first copy.
    """

    has_routes: ClassVar[bool] = True  # queries and documents have different templates


@dataclass(frozen=True, kw_only=True)
class ProsperSpec(SharableSpec, kind="prosper"):
    """Configuration of PROSPER: logits of one token, plus weights of the tokens of the text.

    The part that computes the weights of the text's own tokens is called the literal residual.

    Attributes:
        pooling: token whose logits are read, ``"last"`` or ``"cls"``, or ``"max"`` over all tokens.
        logit_scale: factor on the logits; by default 1, or 1/16 for ModernBERT and Ettin (arXiv
            2606.18811).
        top_k: number of largest weights that are kept per text; by default all of them.
        normalize: ``"l2"`` for vectors of length 1.
        literal_residual: whether weights of the text's own tokens are added.
    """

    network_fields: ClassVar[tuple[str, ...]] = (
        "base_model",
        "pooling",
        "logit_scale",
        "literal_residual",
    )

    pooling: str = checked("last", one_of("last", "cls", "max"))
    logit_scale: float | None = checked(None, POSITIVE)
    top_k: int | None = checked(None, integer())
    normalize: str | None = checked(None, one_of("l2"))
    literal_residual: bool = checked(True, BOOLEAN)

    def build(self, base: Base) -> list[Module]:
        """Build PROSPER's network, and the module that keeps the largest weights of a text.

        Args:
            base: the recipe's base model, maximum length and seed. ``base.network`` is the document
                encoder's Transformer, which is reused if `shared_network` is set.

        Returns:
            The network with its LM head and literal residual, and a
            :class:`tilefold.modules.window.LexicalWindow`.

        Raises:
            ValueError: if the shared network is not a PROSPER network.
        """
        from tilefold.modules.prosper import ProsperTransformer
        from tilefold.modules.window import LexicalWindow

        if self.shared_network:
            transformer = self.document_network(base)
            if not isinstance(transformer, ProsperTransformer):
                raise ArgumentError(
                    "shared_network",
                    "the document encoder must also be of kind 'prosper'.",
                )
        else:
            with seeded(base.seed):
                transformer = self._build_transformer(base)
        return [transformer, LexicalWindow(self.top_k, self.normalize, transformer.vocab_size)]

    def _build_transformer(self, base: Base) -> Transformer:
        """Build the network of PROSPER on a causal or a masked language model.

        The base model is loaded as causal if its configuration lists a class with a causal LM head.

        Args:
            base: the recipe's base model, maximum length and seed.
        """
        from tilefold.modules.prosper import ProsperTransformer

        base_model = self.model_name(base)
        if _is_causal_lm(base_model):
            backbone = causal_transformer(base_model, "causal", max_length=base.max_length)
        else:
            backbone = load_transformer(base_model, base, "fill-mask")
        logit_scale = self.logit_scale
        if logit_scale is None:
            logit_scale = default_logit_scale(backbone)
        # Saving and loading turns the Transformer into a ProsperTransformer with the same weights.
        with tempfile.TemporaryDirectory(prefix="tilefold-prosper-") as folder:
            backbone.save(folder)
            transformer = ProsperTransformer(
                folder,
                transformer_task=backbone.transformer_task,
                modality_config=backbone.modality_config,
                module_output_name=backbone.module_output_name,
                processing_kwargs=backbone.processing_kwargs,
                pooling=self.pooling,
                literal_residual=self.literal_residual,
                logit_scale=logit_scale,
                **local_only(),
            )
        # The configuration names the temporary folder otherwise.
        transformer.model.config._name_or_path = backbone.model.config._name_or_path
        transformer.max_seq_length = backbone.max_seq_length
        return transformer


def _is_causal_lm(base_model: str) -> bool:
    """Return whether the configuration of a base model lists a class with a causal LM head."""
    if base_model == "minilm":
        return False
    architectures = saved_architectures(base_model) or []
    return any(name.endswith("ForCausalLM") for name in architectures)


def causal_transformer(
    base_model: str | Path,
    variant: str = "causal",
    *,
    max_length: int = 128,
    model_kwargs: Mapping[str, object] | None = None,
    **templates: str,
) -> Transformer:
    """Load a causal language model as a ``Transformer`` module that returns logits of all tokens.

    Models such as Llama, Mistral, Qwen2 and Qwen3 are supported. Padding is on the left.

    Args:
        base_model: a folder or Hugging Face name of a model with a causal LM head.
        variant: ``"causal"`` if tokens attend only to earlier tokens; ``"bidirectional"`` if they
            attend to all tokens, by the saved setting ``config.is_causal = False``, which needs
            transformers 5.2 or later; ``"echo"`` if the text is read twice, so that tokens attend
            to all tokens of the first copy (:class:`tilefold.modules.echo.EchoTransformer`).
        max_length: maximum number of tokens of an input. For ``"echo"``, both copies and the
            template count.
        model_kwargs: arguments for loading the network, as in ``Transformer``.
        templates: ``query_template`` and ``document_template`` for ``"echo"``.

    Raises:
        ValueError: if the variant is unknown, the model has no causal LM head, or a bidirectional
            model ignores ``config.is_causal``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
    from sentence_transformers.base.modules import Transformer

    from tilefold.modules.echo import EchoTransformer

    name_or_path = str(base_model)
    _check_causal_lm(name_or_path)
    transformer_class = EchoTransformer if variant == "echo" else Transformer
    loading_options = local_only(
        Path(name_or_path).is_dir(),
        model_kwargs={} if model_kwargs is None else model_kwargs,
    )
    with complete_weights(name_or_path):
        transformer = transformer_class(
            name_or_path,
            transformer_task="text-generation",
            modality_config=TEXT_TO_LOGITS,
            module_output_name="token_embeddings",
            processing_kwargs={"text": {"logits_to_keep": 0}},  # 0 keeps the logits of all tokens
            **loading_options,
            **templates,
        )
    tokenizer: Tokenizer = transformer.tokenizer
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    transformer.max_seq_length = min(max_length, transformer.max_seq_length or max_length)
    if variant == "bidirectional":
        transformer.model.config.is_causal = False
        check_bidirectional(transformer.model)
    return transformer


def _check_causal_lm(name_or_path: str) -> None:
    """Raise an error if the configuration of a local model lists no class with a causal LM head.

    A Hugging Face name is not checked, because its configuration may not be on this machine.

    Args:
        name_or_path: ``"minilm"``, a folder or a Hugging Face name.

    Raises:
        ValueError: if a local model has no causal LM head.
    """
    is_local = name_or_path == "minilm" or Path(name_or_path).is_dir()
    if not is_local or _is_causal_lm(name_or_path):
        return
    if name_or_path == "minilm":
        architectures = ["BertModel"]
    else:
        architectures = saved_architectures(name_or_path) or ["no architecture"]
    raise ValueError(
        f"base_model must have a causal LM head, got {name_or_path}, whose config.json lists "
        f"{', '.join(architectures)}; use a causal model (Llama, Mistral, Qwen), or a recipe for "
        "masked language models (splade-v2, splade-pp).",
    )


def check_bidirectional(network: Network) -> None:
    """Raise an error if a model has causal attention although ``config.is_causal`` is False.

    The check encodes two inputs that differ only in their last token. With causal attention, their
    first tokens have equal states.

    Args:
        network: the transformers model.

    Raises:
        ValueError: if the attention is causal.
    """
    import torch

    from tilefold.integrations.transformers.networks import in_eval_mode

    device = next(network.parameters()).device
    with in_eval_mode(network), torch.no_grad():
        token_ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=device)
        token_ids %= network.get_input_embeddings().num_embeddings  # tiny vocabularies of tests
        hidden = network.base_model(input_ids=token_ids).last_hidden_state
    first_token_states = hidden[:, 0]
    if torch.equal(first_token_states[0], first_token_states[1]):
        raise ValueError(
            "variant 'bidirectional' needs a model whose attention reads config.is_causal, got "
            f"{type(network).__name__}, whose first token does not attend to its last one; use "
            "variant 'echo', or transformers 5.2 or later.",
        )


def add_lora(
    transformer: Transformer,
    *,
    rank: int = 16,
    alpha: int = 32,
    dropout: float = LORA_DROPOUT,
    excluded_parts: Sequence[str] = (),
    other_targets: Sequence[str] = (),
) -> list[str]:
    """Add LoRA updates to the projections of attention and MLP, and freeze all other weights.

    LoRA (arXiv 2106.09685) adds a trained product of two low-rank matrices to a frozen weight.

    Args:
        transformer: module with the network, changed in place.
        rank: rank of the updates.
        alpha: scale of the updates, which are multiplied by ``alpha / rank``.
        dropout: dropout probability for the inputs of the updates.
        excluded_parts: parts of the paths of layers that get no update, such as ``"vision"``.
        other_targets: names of further layers that get an update, where a network has them.

    Returns:
        The names of the layers with updates, such as ``"q_proj"``.

    Raises:
        ImportError: if PEFT is not installed.
        ValueError: if the network has no projection with a known name.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingPackageError("LoRA needs the package peft: pip install peft") from error
    layer_names = (*PROJECTIONS, *other_targets)
    target_paths = []
    for path, _ in transformer.model.named_modules():
        # The last part of the path "layers.0.self_attn.q_proj" is "q_proj".
        is_excluded = any(part in path for part in excluded_parts)
        if path.rpartition(".")[2] in layer_names and not is_excluded:
            target_paths.append(path)
    target_names = {path.rpartition(".")[2] for path in target_paths}
    targets = [name for name in layer_names if name in target_names]
    if not target_names & set(PROJECTIONS):
        raise ValueError(
            f"lora needs a model with projections named {', '.join(PROJECTIONS)}, got "
            f"{type(transformer.model).__name__}; call model.add_adapter with your own "
            "target_modules.",
        )
    # PEFT adds updates to all layers with a listed name. To exclude some of them, it needs paths.
    target_modules = target_paths if excluded_parts else targets
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        bias="none",
    )
    transformer.model.add_adapter(config)
    return targets
