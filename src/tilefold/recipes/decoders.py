"""SPLADE on causal language models: Mistral-SPLADE (arXiv 2408.11119), CSPLADE (arXiv 2504.10816),
and PROSPER.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tilefold._internal.typing import Module, Network, Tokenizer, Transformer
from tilefold.recipes._builders import (
    Base,
    default_logit_scale,
    head_pooling,
    load_transformer,
    shared_network,
)
from tilefold.recipes._settings import EncoderSpec
from tilefold.recipes.loading import complete_weights, local_only, saved_architectures, seeded
from tilefold.retrieval.errors import MissingPackageError

VARIANTS = ("causal", "bidirectional", "echo")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LOGITS = {"text": {"method": "forward", "method_output_name": "logits"}}


def causal_transformer(
    base_model: str | Path,
    variant: str = "causal",
    *,
    max_length: int = 128,
    **options: Any,
) -> Transformer:
    """A ``Transformer`` on a causal language model (Llama, Mistral, Qwen2, Qwen3, ...): logits of
    all tokens.

    Padding is on the left.

    Args:
        base_model: a folder or Hugging Face name of a model with a causal LM head.
        variant: how a token sees the text after it: ``"causal"``, not at all; ``"bidirectional"``,
            by ``config.is_causal = False``, which transformers 5.2 and later read and which is
            saved; ``"echo"``, in a second copy of the text
            (:class:`tilefold.modules.echo.EchoTransformer`).
        max_length: maximum tokens of an input; the two copies of an echo, and its template, share
            them.
        options: ``query_template`` and ``document_template`` of an echo, ``model_kwargs`` of
            ``Transformer``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
    from sentence_transformers.base.modules import Transformer

    from tilefold.modules.echo import EchoTransformer

    base = str(base_model)
    _check_causal_lm(base)
    with complete_weights(base):
        transformer = (EchoTransformer if variant == "echo" else Transformer)(
            base,
            transformer_task="text-generation",
            modality_config=_LOGITS,
            module_output_name="token_embeddings",
            processing_kwargs={"text": {"logits_to_keep": 0}},
            **local_only(Path(base).is_dir(), model_kwargs=options.pop("model_kwargs", {})),
            **options,
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
    """Refuse a model whose configuration names no ``...ForCausalLM``."""
    packaged = name_or_path == "minilm"
    named = [] if packaged else saved_architectures(name_or_path) or []
    if packaged or (
        Path(name_or_path).is_dir() and not any(name.endswith("ForCausalLM") for name in named)
    ):
        got = f"{name_or_path}, whose config.json names {'BertModel' if packaged else ', '.join(named) or 'nothing'}"
        remedy = "name a causal model (Llama, Mistral, Qwen), or take a recipe for masked ones (splade-v2, splade-pp)."
        raise ValueError(f"base_model must have a causal LM head, got {got}; {remedy}")


def check_bidirectional(network: Network) -> None:
    """Refuse a model that ignores ``config.is_causal = False``: its first token must depend on its
    last.
    """
    import torch

    from tilefold.integrations.transformers.networks import in_eval_mode

    with in_eval_mode(network), torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=next(network.parameters()).device)
        ids %= network.get_input_embeddings().num_embeddings
        first = network.base_model(input_ids=ids).last_hidden_state[:, 0]
    if torch.equal(first[0], first[1]):
        got = f"{type(network).__name__}, whose first token does not see its last one"
        needs = "variant 'bidirectional' needs a model whose attention reads config.is_causal"
        raise ValueError(f"{needs}, got {got}; use variant 'echo', or transformers 5.2 or later.")


def add_lora(
    transformer: Transformer,
    *,
    rank: int = 16,
    alpha: int = 32,
    dropout: float = 0.05,
) -> list[str]:
    """Train low-rank updates of attention and MLP projections only (arXiv 2106.09685); returns
    their names.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingPackageError("LoRA needs the package peft: pip install peft") from error
    names = {name.rpartition(".")[2] for name, _ in transformer.model.named_modules()}
    if not (targets := [name for name in PROJECTIONS if name in names]):
        got = f"{type(transformer.model).__name__}; call model.add_adapter with target_modules of your own."
        raise ValueError(
            f"lora needs a model with projections named {', '.join(PROJECTIONS)}, got {got}",
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        bias="none",
    )
    transformer.model.add_adapter(config)
    return targets


def build_causal(spec: EncoderSpec, base: Base) -> list[Module]:
    """A causal language model, read causally, in both directions, or twice, and the pooling of its
    logits.
    """
    if spec.shared_network:
        transformer = shared_network(spec, base, "text-generation")
    else:
        transformer = causal_transformer(
            spec.base_model or base.base_model,
            spec.kind,
            max_length=base.max_length,
        )
        if spec.lora is not None:
            with seeded(base.seed):
                add_lora(transformer, rank=spec.lora, alpha=2 * spec.lora)
    return [transformer, head_pooling(spec, transformer, spec.pooling or "max")]


def build_prosper(spec: EncoderSpec, base: Base) -> list[Module]:
    """An LM head at one token with the literal residual network, then window and norm."""
    from tilefold.modules.prosper import ProsperTransformer
    from tilefold.modules.window import LexicalWindow

    if spec.shared_network:
        transformer = shared_network(spec, base, None)
        if not isinstance(transformer, ProsperTransformer):
            raise ValueError("shared_network: the document side must be of kind 'prosper' too.")
    else:
        with seeded(base.seed):
            transformer = _prosper_transformer(spec, base)
    return [transformer, LexicalWindow(spec.top_k, spec.normalize, transformer.vocab_size)]


def _prosper_transformer(spec: EncoderSpec, base: Base) -> Transformer:
    """A backbone with its LM head: masked or causal, by what its configuration names."""
    from tilefold.modules.prosper import ProsperTransformer

    name = spec.base_model or base.base_model
    if name != "minilm" and any(
        found.endswith("ForCausalLM") for found in saved_architectures(name) or []
    ):
        plain = causal_transformer(name, "causal", max_length=base.max_length)
    else:
        plain = load_transformer(name, base, "fill-mask")
    with tempfile.TemporaryDirectory(prefix="tilefold-prosper-") as folder:
        plain.save(folder)
        made = ProsperTransformer(
            folder,
            transformer_task=plain.transformer_task,
            modality_config=plain.modality_config,
            module_output_name=plain.module_output_name,
            processing_kwargs=plain.processing_kwargs,
            pooling=spec.pooling or "last",
            literal_residual=spec.literal_residual is not False,
            logit_scale=default_logit_scale(plain)
            if spec.logit_scale is None
            else spec.logit_scale,
            **local_only(),
        )
    made.model.config._name_or_path = plain.model.config._name_or_path
    made.max_seq_length = plain.max_seq_length
    return made
