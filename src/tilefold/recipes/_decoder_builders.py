"""The modules of one side, from its record: causal language models, PROSPER, BGE-M3 and SPLATE."""

from __future__ import annotations

from typing import Any

from tilefold.recipes._encoder_builders import head_pooling, load_transformer, shared_network, usual_scale
from tilefold.recipes._encoder_spec import Base, EncoderSpec
from tilefold.recipes.loading import saved_architectures, seeded

__all__ = ["build_bge_m3", "build_causal", "build_prosper", "build_splate"]

FRESH = 0.1


def build_causal(spec: EncoderSpec, base: Base) -> list[Any]:
    """A causal language model, read causally, in both directions, or twice, and the pooling of its logits."""
    from tilefold.recipes.decoders import add_lora, causal_transformer

    if spec.shared_network:
        transformer = shared_network(spec, base, "text-generation")
    else:
        transformer = causal_transformer(spec.base_model or base.base_model, spec.kind, max_length=base.max_length)
        if spec.lora is not None:
            with seeded(base.seed):
                add_lora(transformer, rank=spec.lora, alpha=2 * spec.lora)
    return [transformer, head_pooling(spec, transformer, spec.pooling or "max")]


def build_prosper(spec: EncoderSpec, base: Base) -> list[Any]:
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


def build_bge_m3(spec: EncoderSpec, base: Base) -> list[Any]:
    """A weight for each token; that of the base model if it has one (``sparse_linear.pt``), else a fresh one."""
    import torch

    from tilefold.modules import TokenWeights
    from tilefold.recipes.bge_m3 import find_sparse_linear, load_sparse_linear, silent_ids

    name = spec.base_model or base.base_model
    transformer = (
        shared_network(spec, base, "feature-extraction")
        if spec.shared_network
        else load_transformer(name, base, "feature-extraction")
    )
    rows = transformer.model.get_input_embeddings().num_embeddings
    with seeded(base.seed):
        head = TokenWeights(transformer.get_embedding_dimension(), rows, ignore_ids=silent_ids(transformer.tokenizer))
    found = None if name == "minilm" else find_sparse_linear(name)
    if found is not None:
        state = load_sparse_linear(found)
        if state["weight"].shape != head.linear.weight.shape:
            raise ValueError(
                f"{found} must fit states of width {head.hidden_size}, got {list(state['weight'].shape)}; it belongs "
                "to another model."
            )
        head.linear.load_state_dict(state)
    else:  # every token begins with a weight near 1: relu of a random layer leaves many texts without any
        with torch.no_grad():
            head.linear.weight.mul_(FRESH)
            head.linear.bias.fill_(1.0)
    return [transformer, head]


def build_splate(spec: EncoderSpec, base: Base) -> list[Any]:
    """A frozen ColBERT's Transformer, an adapter, and the frozen head of a masked language model."""
    from tilefold.recipes.colbert import ColbertRecipe
    from tilefold.recipes.colbert import load_base_model as load_colbert
    from tilefold.recipes.splate import splate_modules

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


def _prosper_transformer(spec: EncoderSpec, base: Base) -> Any:
    """The backbone with its LM head: masked or causal, by what its configuration names."""
    import tempfile

    from tilefold.modules.prosper import ProsperTransformer
    from tilefold.recipes.decoders import causal_transformer

    name = spec.base_model or base.base_model
    if name != "minilm" and any(found.endswith("ForCausalLM") for found in saved_architectures(name)):
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
            logit_scale=usual_scale(plain) if spec.logit_scale is None else spec.logit_scale,
            model_kwargs={"local_files_only": True},
            processor_kwargs={"local_files_only": True},
            config_kwargs={"local_files_only": True},
        )
    made.model.config._name_or_path = plain.model.config._name_or_path
    made.max_seq_length = plain.max_seq_length
    return made
