"""The modules of one side, from its record: masked language models, token weights, and sides
without a network.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold._internal.typing import Module, Transformer
from tilefold.recipes._settings import NOT_NEGATIVE, EncoderSpec
from tilefold.recipes.backbone import keep_lowest_layers, minilm_path, minilm_splade
from tilefold.recipes.loading import (
    check_masked_lm,
    local_only,
    saved_modules,
    seeded,
    whole_weights,
)

SMALL_HEAD_SCALE = (
    1 / 16
)  # of backbones whose LM head gives logits of a large norm (arXiv 2606.18811)
SMALL_HEAD_MODELS = ("modernbert", "modernbert-decoder")  # Ettin has these types too
BINARY_SCALE = 0.3


@dataclass(frozen=True)
class Base:
    """Start of the encoders of both sides."""

    base_model: str  # of sides that name none: "minilm", a folder or a Hugging Face name
    max_length: int  # tokens of a text; saved with the model
    texts: Sequence[
        str
    ] = ()  # sample documents, for the decoder bias of "minilm" and for document frequencies
    seed: int = 0  # of fresh parameters and samples
    start_percentile: float = 99.95  # as in `minilm_splade`
    vocab_size: int = 0  # of the side with a network, which is built first
    network: Transformer = (
        None  # of the same side, for a query side that shares it, or its tokenizer
    )


def build_mlm(spec: EncoderSpec, base: Base) -> list[Module]:
    """A masked language model, and the pooling of its logits, or those at the first token alone."""
    first = spec.kind == "cls_mlm"
    transformer = network_of(spec, base, "fill-mask", first)
    return [transformer, head_pooling(spec, transformer, "cls" if first else spec.pooling or "max")]


def head_pooling(spec: EncoderSpec, transformer: Transformer, pooling: str) -> Module:
    """``SpladePooling`` if the options are its own, else :class:`tilefold.modules.HeadPooling`."""
    from tilefold.modules import stock_module
    from tilefold.modules.head_pooling import HeadPooling

    made = HeadPooling(
        pooling,
        spec.activation or "log1p_relu",
        usual_scale(transformer) if spec.logit_scale is None else spec.logit_scale,
        transformer.tokenizer.all_special_ids if spec.drop_special_tokens else [],
        spec.top_k,
        spec.normalize,
        embedding_dimension=head_rows(transformer),
    )
    return stock_module(made) or made


def _ignored(spec: EncoderSpec, transformer: Transformer) -> Sequence[int]:
    """Ids that get no weight, of an encoder of token weights: the special ones, unless `spec` keeps
    them.
    """
    return () if spec.drop_special_tokens is False else transformer.tokenizer.all_special_ids


def build_epic(spec: EncoderSpec, base: Base) -> list[Module]:
    """A masked language model that puts out its hidden states, and EPIC's pooling of both."""
    from tilefold.modules import EpicPooling

    transformer = network_of(spec, base, "fill-mask", output_hidden_states=True)
    with seeded(base.seed):
        pooling = EpicPooling(
            transformer.model.config.hidden_size,
            ignore_ids=_ignored(spec, transformer),
            embedding_dimension=head_rows(transformer),
        )
    return [transformer, pooling]


def usual_scale(transformer: Transformer) -> float:
    """The factor on the logits that a backbone starts with."""
    return (
        SMALL_HEAD_SCALE
        if str(getattr(transformer.model.config, "model_type", "")) in SMALL_HEAD_MODELS
        else 1.0
    )


def build_mlp(spec: EncoderSpec, base: Base) -> list[Module]:
    """A Transformer without its LM head, and a learned weight for every token."""
    import torch

    from tilefold.modules import TokenWeights

    transformer = network_of(spec, base, "feature-extraction")
    rows = transformer.model.get_input_embeddings().num_embeddings
    with seeded(base.seed):
        weights = TokenWeights(
            transformer.get_embedding_dimension(),
            base.vocab_size or rows,
            activation=spec.activation or "relu",
            scale=spec.scale,
            ignore_ids=_ignored(spec, transformer),
            saturation=spec.saturation,
        )
        # every token counts at the start: else half of them, or all of a text, would have no weight
        # and no gradient
        torch.nn.init.constant_(
            weights.linear.bias,
            1.0 if spec.saturation is None else spec.saturation,
        )
        if spec.saturation is not None:
            torch.nn.init.zeros_(weights.linear.weight)
    _continue_weights(weights, spec.base_model or base.base_model)
    return [transformer, weights]


def _continue_weights(weights: Module, base_model: str) -> None:
    """Take over the token weights of a base model that was trained with some, in place."""
    from tilefold.modules import TokenWeights, load_encoder

    if base_model == "minilm" or not any(
        path.endswith(".TokenWeights") for path in saved_modules(base_model)
    ):
        return
    saved = load_encoder(base_model, device="cpu", local_files_only=Path(base_model).is_dir())
    trained = next(module for module in saved.children() if isinstance(module, TokenWeights))
    states = (module.state_dict() for module in (weights, trained))
    ours, theirs = ({name: list(value.shape) for name, value in state.items()} for state in states)
    if ours != theirs:
        asked = (
            f"and the encoder asked for {ours}; set scale as it was, or start from another model."
        )
        raise ValueError(
            f"base_model: the token weights of {base_model} have the parameters {theirs}, {asked}",
        )
    weights.load_state_dict(trained.state_dict())


def _listed_idf(file: str, base: Base) -> list[float]:
    """The weights of a JSON file of token -> weight; 1 for tokens that it does not list, as
    OpenSearch has it.
    """
    try:
        listed = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"idf must name a JSON file of token -> weight, got {file}: {error}.",
        ) from error
    weights, tokenizer = dict[int, float](), base.network.tokenizer
    for token, weight in listed.items() if isinstance(listed, dict) else ():
        NOT_NEGATIVE(f"idf: the weight of {token!r} in {file}", weight)
        if (place := tokenizer.convert_tokens_to_ids(token)) not in (None, tokenizer.unk_token_id):
            weights[place] = float(weight)
    if not weights:
        remedy = "take the file of this model's vocabulary, or leave idf out."
        raise ValueError(
            f"idf must name a JSON file of token -> weight, got no token of the model in {file}; {remedy}",
        )
    return [weights.get(place, 1.0) for place in range(base.vocab_size)]


def _counted_idf(base: Base) -> list[float]:
    """``log(1 + (N - df + 1/2) / (df + 1/2))``, the IDF of BM25."""
    if not base.texts:
        remedy = "pass texts=[..], or idf=, a JSON file of token -> weight."
        raise ValueError(
            f"kind 'idf' needs texts to count document frequencies in, got no text; {remedy}",
        )
    found: Counter[int] = Counter()
    for begin in range(0, len(base.texts), 256):
        batch = list(base.texts[begin : begin + 256])
        rows = base.network.tokenizer(
            batch,
            add_special_tokens=False,
            truncation=True,
            max_length=base.max_length,
        )
        for row in rows["input_ids"]:
            found.update(set(row))
    return [
        math.log1p((len(base.texts) - found[v] + 0.5) / (found[v] + 0.5))
        for v in range(base.vocab_size)
    ]


def build_static(spec: EncoderSpec, base: Base) -> list[Module]:
    """A number for each distinct token, or its inverse document frequency; in the stock module
    where that holds it.
    """
    import torch
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    from tilefold.modules import StaticQuery

    if spec.kind == "binary":
        weights = [BINARY_SCALE if spec.scale is None else spec.scale]
    else:
        weights = _counted_idf(base) if spec.idf is None else _listed_idf(spec.idf, base)
    vocab_size, weight, tokenizer = base.vocab_size, torch.tensor(weights), base.network.tokenizer
    module: SparseStaticEmbedding
    module = StaticQuery(tokenizer, weight, frozen=not spec.trainable, vocab_size=vocab_size)
    if not spec.trainable and module.fits_stock():
        module = SparseStaticEmbedding(tokenizer, weight.expand(vocab_size).clone(), frozen=True)
    module.max_seq_length = base.network.max_seq_length  # which a short position table may have cut
    return [module]


def head_rows(transformer: Transformer) -> int:
    """V of a Transformer with an LM head."""
    return int(transformer.model.get_output_embeddings().weight.shape[0])


def network_of(
    spec: EncoderSpec,
    base: Base,
    task: str,
    first_token: bool = False,
    **config: object,
) -> Transformer:
    """The network of a side: of its own base model, or that of the document side."""
    if not spec.shared_network:
        name = spec.base_model or base.base_model
        return load_transformer(name, base, task, first_token, layers=spec.layers, **config)
    return shared_network(spec, base, task)


def shared_network(spec: EncoderSpec, base: Base, task: str | None) -> Transformer:
    """The network of the document side; options of the network itself belong there."""
    for name in (
        "lora",
        "literal_residual",
        *(("pooling", "logit_scale") if spec.kind == "prosper" else ()),
    ):
        if getattr(spec, name) is not None:
            raise ValueError(
                f"{name}: set it on the document side, whose network shared_network runs.",
            )
    if base.network is None or (task is not None and base.network.transformer_task != task):
        needed = "a network" if task is None else f"a network for the task {task!r}"
        remedy = "leave it out, and the query side gets a network of its own."
        expected = f"{needed}, as kind {spec.kind!r} does"
        raise ValueError(f"shared_network: the document side must have {expected}; {remedy}")
    return base.network


def load_transformer(
    base_model: str,
    base: Base,
    task: str,
    first_token: bool = False,
    layers: int | None = None,
    **config: object,
) -> Transformer:
    """The stock ``Transformer`` of a base model; `config` is saved in the configuration, and no
    remote code runs.

    ``"fill-mask"`` keeps the LM head, ``"feature-extraction"`` leaves it out. With `first_token`
    only the logits of first tokens are read, which the decoder bias of ``"minilm"`` follows.
    """
    from sentence_transformers.base.modules import Transformer

    if base_model == "minilm" and task == "fill-mask":
        options: dict[str, Any] = {
            "percentile": base.start_percentile,
            "max_length": base.max_length,
        }
        options |= {"seed": base.seed, "device": "cpu"}
        model = minilm_splade(base.texts, first_token=first_token, layers=layers, **options)
        for name, value in config.items():
            setattr(model[0].model.config, name, value)
        return model[0]
    path = str(minilm_path()) if base_model == "minilm" else base_model
    if task == "fill-mask":
        check_masked_lm(path)
    safe = {"trust_remote_code": False}
    asked = dict.fromkeys(("model_kwargs", "processor_kwargs"), safe) | {
        "config_kwargs": safe | config,
    }
    with whole_weights(path):
        transformer = Transformer(
            path,
            transformer_task=task,
            **local_only(Path(path).is_dir(), **asked),
        )
    transformer.max_seq_length = min(base.max_length, transformer.max_seq_length or base.max_length)
    if layers is not None:
        keep_lowest_layers(transformer.model, layers)
    return transformer
