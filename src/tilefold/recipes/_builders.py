"""Builders of the modules of an encoder, from its :class:`EncoderSpec`.

They cover masked language models, token weights, and encoders without a network.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold._internal.typing import Module, Transformer
from tilefold.recipes._settings import NOT_NEGATIVE, EncoderSpec
from tilefold.recipes.backbone import keep_lowest_layers, minilm_path, minilm_splade
from tilefold.recipes.loading import (
    check_masked_lm,
    complete_weights,
    local_only,
    saved_modules,
    seeded,
)

# initial factor on the logits of backbones whose LM head gives large logits (arXiv 2606.18811)
SMALL_HEAD_SCALE = 1 / 16
SMALL_HEAD_MODELS = ("modernbert", "modernbert-decoder")  # model types; Ettin has them too
BINARY_SCALE = 0.3  # default weight of each distinct token
IDF_BATCH_SIZE = 256  # texts that are tokenized at once to count document frequencies


@dataclass(frozen=True)
class Base:
    """Starting points of the query encoder and the document encoder of a model.

    Attributes:
        base_model: base model of encoders that name none: ``"minilm"``, a folder or a Hugging Face
            name.
        max_length: maximum tokens per text; saved with the model.
        texts: sample documents, for the decoder bias of ``"minilm"`` and for document frequencies.
        seed: seed of new parameters and of samples.
        start_percentile: initial decoder bias of ``"minilm"``, see
            :func:`tilefold.recipes.minilm_splade`.
        vocab_size: vocabulary size of the encoder with a network, which is built first.
        network: network of that encoder, for a query encoder that shares it or its tokenizer.
    """

    base_model: str
    max_length: int
    texts: Sequence[str] = ()
    seed: int = 0
    start_percentile: float = 99.95
    vocab_size: int = 0
    network: Transformer = None


def build_mlm(spec: EncoderSpec, base: Base) -> list[Module]:
    """Build a masked language model and the pooling of its logits.

    Kind ``"cls_mlm"`` reads only the logits of the first token.
    """
    first_token = spec.kind == "cls_mlm"
    transformer = network_of(spec, base, "fill-mask", first_token)
    pooling = "cls" if first_token else spec.pooling or "max"
    return [transformer, head_pooling(spec, transformer, pooling)]


def head_pooling(spec: EncoderSpec, transformer: Transformer, pooling: str) -> Module:
    """Build the pooling of an LM head.

    Args:
        spec: options of the pooling.
        transformer: network with an LM head.
        pooling: name of the pooling.

    Returns:
        The stock ``SpladePooling`` if it has these options, else
        :class:`tilefold.modules.HeadPooling`.
    """
    from tilefold.modules import stock_module
    from tilefold.modules.head_pooling import HeadPooling

    scale = default_logit_scale(transformer) if spec.logit_scale is None else spec.logit_scale
    ignored_ids = transformer.tokenizer.all_special_ids if spec.drop_special_tokens else []
    module = HeadPooling(
        pooling,
        spec.activation or "log1p_relu",
        scale,
        ignored_ids,
        spec.top_k,
        spec.normalize,
        embedding_dimension=head_rows(transformer),
    )
    return stock_module(module) or module


def _ignored_ids(spec: EncoderSpec, transformer: Transformer) -> Sequence[int]:
    """Return the token ids without a weight: the special tokens, unless the spec keeps them."""
    return () if spec.drop_special_tokens is False else transformer.tokenizer.all_special_ids


def build_epic(spec: EncoderSpec, base: Base) -> list[Module]:
    """Build a masked language model that returns its hidden states too, and EPIC's pooling."""
    from tilefold.modules import EpicPooling

    transformer = network_of(spec, base, "fill-mask", output_hidden_states=True)
    with seeded(base.seed):
        pooling = EpicPooling(
            transformer.model.config.hidden_size,
            ignore_ids=_ignored_ids(spec, transformer),
            embedding_dimension=head_rows(transformer),
        )
    return [transformer, pooling]


def default_logit_scale(transformer: Transformer) -> float:
    """Return the initial factor on the logits of a backbone."""
    model_type = str(getattr(transformer.model.config, "model_type", ""))
    return SMALL_HEAD_SCALE if model_type in SMALL_HEAD_MODELS else 1.0


def build_mlp(spec: EncoderSpec, base: Base) -> list[Module]:
    """Build a transformer without its LM head, and a learned weight for every token."""
    import torch

    from tilefold.modules import TokenWeights

    transformer = network_of(spec, base, "feature-extraction")
    n_embeddings = transformer.model.get_input_embeddings().num_embeddings
    with seeded(base.seed):
        weights = TokenWeights(
            transformer.get_embedding_dimension(),
            base.vocab_size or n_embeddings,
            activation=spec.activation or "relu",
            scale=spec.scale,
            ignore_ids=_ignored_ids(spec, transformer),
            saturation=spec.saturation,
        )
        # Every token starts with a positive weight. Otherwise half of the tokens, or all of a
        # text, would have no weight and no gradient.
        initial_weight = 1.0 if spec.saturation is None else spec.saturation
        torch.nn.init.constant_(weights.linear.bias, initial_weight)
        if spec.saturation is not None:
            torch.nn.init.zeros_(weights.linear.weight)
    _load_token_weights(weights, spec.base_model or base.base_model)
    return [transformer, weights]


def _load_token_weights(weights: Module, base_model: str) -> None:
    """Load the token weights of a base model that has trained ones, in place.

    Raises:
        ValueError: if their parameters have other names or shapes.
    """
    from tilefold.modules import TokenWeights, load_encoder

    if base_model == "minilm":
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
            f"and the encoder asked for {expected_shapes}; set scale as it was, or start from "
            "another model.",
        )
    weights.load_state_dict(trained.state_dict())


def _parameter_shapes(module: Module) -> dict[str, list[int]]:
    """Return the shape of each parameter of a module."""
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def _idf_of_file(file: str, base: Base) -> list[float]:
    """Read the weight of each vocabulary entry from a JSON file of token -> weight.

    Tokens that the file does not list get weight 1, as in OpenSearch.

    Raises:
        ValueError: if the file is not such a JSON file, or has no token of the vocabulary.
    """
    try:
        weight_of_token = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"idf must name a JSON file of token -> weight, got {file}: {error}.",
        ) from error
    if not isinstance(weight_of_token, dict):
        weight_of_token = {}
    tokenizer = base.network.tokenizer
    weight_of_id: dict[int, float] = {}
    for token, weight in weight_of_token.items():
        NOT_NEGATIVE(f"idf: the weight of {token!r} in {file}", weight)
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id not in (None, tokenizer.unk_token_id):
            weight_of_id[token_id] = float(weight)
    if not weight_of_id:
        raise ValueError(
            "idf must name a JSON file of token -> weight, got no token of the model in "
            f"{file}; take the file of this model's vocabulary, or leave idf out.",
        )
    return [weight_of_id.get(token_id, 1.0) for token_id in range(base.vocab_size)]


def _idf_of_texts(base: Base) -> list[float]:
    """Compute BM25's IDF of each vocabulary entry in the sample texts.

    It is ``log(1 + (N - df + 1/2) / (df + 1/2))`` for N texts and document frequency df.

    Raises:
        ValueError: if there are no texts.
    """
    if not base.texts:
        raise ValueError(
            "kind 'idf' needs texts to count document frequencies in, got no text; pass "
            "texts=[..], or idf=, a JSON file of token -> weight.",
        )
    n_texts = len(base.texts)
    document_frequency: Counter[int] = Counter()
    for begin in range(0, n_texts, IDF_BATCH_SIZE):
        tokenized = base.network.tokenizer(
            list(base.texts[begin : begin + IDF_BATCH_SIZE]),
            add_special_tokens=False,
            truncation=True,
            max_length=base.max_length,
        )
        for token_ids in tokenized["input_ids"]:
            document_frequency.update(set(token_ids))
    idf = []
    for token_id in range(base.vocab_size):
        df = document_frequency[token_id]
        idf.append(math.log1p((n_texts - df + 0.5) / (df + 0.5)))
    return idf


def build_static(spec: EncoderSpec, base: Base) -> list[Module]:
    """Build an encoder with a fixed weight for each distinct token, or its IDF.

    Returns:
        The stock ``SparseStaticEmbedding`` if it can hold the weights and they are not trained,
        else :class:`tilefold.modules.StaticQuery`.
    """
    import torch
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    from tilefold.modules import StaticQuery

    if spec.kind == "binary":
        weights = [BINARY_SCALE if spec.scale is None else spec.scale]
    elif spec.idf is None:
        weights = _idf_of_texts(base)
    else:
        weights = _idf_of_file(spec.idf, base)
    weight = torch.tensor(weights)
    tokenizer = base.network.tokenizer
    module: SparseStaticEmbedding = StaticQuery(
        tokenizer,
        weight,
        frozen=not spec.trainable,
        vocab_size=base.vocab_size,
    )
    if not spec.trainable and module.fits_stock():
        module = SparseStaticEmbedding(
            tokenizer,
            weight.expand(base.vocab_size).clone(),
            frozen=True,
        )
    # the network's limit, which is lower than max_length if it has few positions
    module.max_seq_length = base.network.max_seq_length
    return [module]


def head_rows(transformer: Transformer) -> int:
    """Return the vocabulary size of a transformer's LM head."""
    return int(transformer.model.get_output_embeddings().weight.shape[0])


def network_of(
    spec: EncoderSpec,
    base: Base,
    task: str,
    first_token: bool = False,
    **config: object,
) -> Transformer:
    """Load the network of an encoder, or return the document encoder's if it is shared.

    Args:
        spec: the encoder.
        base: base model, and the network of the document encoder.
        task: ``"fill-mask"`` or ``"feature-extraction"``.
        first_token: whether only the logits of first tokens are read.
        config: settings for the network's configuration.
    """
    if spec.shared_network:
        return shared_network(spec, base, task)
    return load_transformer(
        spec.base_model or base.base_model,
        base,
        task,
        first_token,
        layers=spec.layers,
        **config,
    )


def shared_network(spec: EncoderSpec, base: Base, task: str | None) -> Transformer:
    """Return the network of the document encoder.

    Args:
        spec: the query encoder, which has no options of the network itself.
        base: network of the document encoder.
        task: task that the network must have; ``None`` allows any.

    Raises:
        ValueError: if the query encoder sets options of the network, or if the document encoder
            has no network for the task.
    """
    network_options = ["lora", "literal_residual"]
    if spec.kind == "prosper":
        network_options += ["pooling", "logit_scale"]
    for name in network_options:
        if getattr(spec, name) is not None:
            raise ValueError(
                f"{name}: set it on the document side, whose network shared_network runs.",
            )
    if base.network is None or (task is not None and base.network.transformer_task != task):
        network = "a network" if task is None else f"a network for the task {task!r}"
        raise ValueError(
            f"shared_network: the document side must have {network}, as kind {spec.kind!r} does; "
            "leave it out, and the query side gets a network of its own.",
        )
    return base.network


def load_transformer(
    base_model: str,
    base: Base,
    task: str,
    first_token: bool = False,
    layers: int | None = None,
    **config: object,
) -> Transformer:
    """Load the stock ``Transformer`` of a base model. No remote code runs.

    Args:
        base_model: ``"minilm"``, a folder or a Hugging Face name.
        base: maximum length, seed and sample texts.
        task: ``"fill-mask"`` keeps the LM head, ``"feature-extraction"`` drops it.
        first_token: whether only the logits of first tokens are read; the decoder bias of
            ``"minilm"`` depends on it.
        layers: number of lowest layers to keep; ``None`` keeps all.
        config: settings that are saved in the network's configuration.
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
        for name, value in config.items():
            setattr(model[0].model.config, name, value)
        return model[0]
    path = str(minilm_path()) if base_model == "minilm" else base_model
    if task == "fill-mask":
        check_masked_lm(path)
    loading_options = local_only(
        Path(path).is_dir(),
        model_kwargs={"trust_remote_code": False},
        processor_kwargs={"trust_remote_code": False},
        config_kwargs={"trust_remote_code": False, **config},
    )
    with complete_weights(path):
        transformer = Transformer(path, transformer_task=task, **loading_options)
    transformer.max_seq_length = min(base.max_length, transformer.max_seq_length or base.max_length)
    if layers is not None:
        keep_lowest_layers(transformer.model, layers)
    return transformer
