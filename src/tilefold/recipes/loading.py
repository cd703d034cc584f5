"""The kind of a saved model, read from its files, and the model itself, ready to encode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tilefold._typing import Model
from tilefold.recipes._run import newest_step
from tilefold.recipes.precision import run_fast

__all__ = ["load_saved", "newest_step", "saved_kind"]

_KINDS = {
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",  # PyLate's name
    "SentenceTransformer": "dense",
    "CrossEncoder": "cross-encoder",
}


def saved_kind(name_or_path: str) -> str:
    """Return "sparse", "multi-vector", "dense", "cross-encoder", or "backbone" for any other or unknown model."""
    saved = _read(name_or_path, "config_sentence_transformers.json")
    if isinstance(saved, dict) and saved.get("model_type") in _KINDS:
        return _KINDS[saved["model_type"]]
    modules = saved_modules(name_or_path)
    if any(".sparse_encoder." in module for module in modules):
        return "sparse"
    if modules:
        return "dense"
    named = saved_architectures(name_or_path)
    if any(name.endswith("ForSequenceClassification") for name in named):
        return "cross-encoder"
    late = any(name == "HF_ColBERT" or name.endswith("ForRetrieval") for name in named)
    return "multi-vector" if late else "backbone"


def check_masked_lm(name_or_path: str) -> None:
    """Refuse a backbone whose configuration names no ``...ForMaskedLM``: stock code would give it a random head."""
    named = _architectures(name_or_path)
    if named is not None and not any(name.endswith("ForMaskedLM") for name in named):
        raise ValueError(
            f"{name_or_path} has no masked-LM head (its config.json names {', '.join(named) or 'nothing'}), "
            "and sparse vectors come from one. Take a masked language model, or a SparseEncoder that was trained."
        )


def saved_architectures(name_or_path: str) -> list[str]:
    """The classes that ``config.json`` of a model names; none without that file."""
    return _architectures(name_or_path) or []


def _architectures(name_or_path: str) -> list[str] | None:
    config = _read(name_or_path, "config.json")
    return [str(name) for name in (config.get("architectures") or [])] if isinstance(config, dict) else None


def saved_modules(name_or_path: str) -> list[str]:
    """The classes that ``modules.json`` of a saved model lists, in order; none without that file."""
    listed = _read(name_or_path, "modules.json")
    if not isinstance(listed, list):
        return []
    return [str(module.get("type", "")) for module in listed if isinstance(module, dict)]


def load_saved(name_or_path: str, kind: str) -> Any:
    """The model of a kind of :func:`saved_kind`, ready to encode, with the attention that it was saved with.

    No remote code runs, and a folder is read without a look at the network.

    Raises:
        OSError: no such model, here or on the Hugging Face hub.
        ValueError: a model that was trained with entmax attention and would run softmax; one whose weights are not all
            in its files, or whose tokenizer is another's.
    """
    import sentence_transformers

    from tilefold.modules import load_encoder

    names = {"multi-vector": "MultiVectorEncoder", "dense": "SentenceTransformer", "cross-encoder": "CrossEncoder"}
    if kind == "backbone":
        check_masked_lm(name_or_path)
    entmax = register_entmax()
    local = Path(name_or_path).is_dir()
    made = getattr(sentence_transformers, names[kind]) if kind in names else load_encoder
    with whole_weights(name_or_path):
        model = made(name_or_path, trust_remote_code=False, local_files_only=local)
    check_tokenizer(model, name_or_path)
    if entmax is not None:  # refuses a model that has alphas and would run softmax
        entmax.runs_entmax(model)
    model.model_card_data.local_files_only = True
    run_fast(model)
    return model


def register_entmax() -> ModuleType | None:
    """Let transformers load entmax checkpoints, if it is new enough: else None, and it refuses them itself."""
    try:
        from tilefold.integrations import transformers

        transformers.register()
    except ImportError:
        return None
    return transformers


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's random numbers of the CPU from a seed; afterwards they go on where they were."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def local_only(local: bool = True, **options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of a ``Transformer`` module, which then asks no network if `local`."""
    names = ("model_kwargs", "processor_kwargs", "config_kwargs")
    return {name: {"local_files_only": local} | options.get(name, {}) for name in names}


def stay_offline(model: Model) -> Any:
    """The model, whose card asks no network and draws no examples."""
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    return model


@contextmanager
def whole_weights(name_or_path: str) -> Iterator[None]:
    """Refuse what transformers loads in this context if weights, but for poolers, are not in the files."""
    from transformers import PreTrainedModel

    stock = PreTrainedModel.__dict__["from_pretrained"]
    fresh: list[str] = []

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.pop("output_loading_info", False)
        model, info = stock.__func__(cls, *args, output_loading_info=True, **kwargs)
        if not getattr(model, "peft_config", None):  # then the report is the adapter's
            fresh.extend(sorted(key for key in info["missing_keys"] if "pooler" not in key))
        return (model, info) if asked else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = stock
    if fresh:
        raise ValueError(
            f"{name_or_path}: {len(fresh)} weights are not in its files and would be random, {fresh[0]} first. Fetch "
            "it whole, or save it again with the class that config.json names."
        )


def check_tokenizer(model: Model, name_or_path: str) -> None:
    """Refuse a model whose tokenizer has far fewer tokens than its embeddings, as without its files, or more."""
    try:
        tokens, rows = len(model.tokenizer), model[0].model.get_input_embeddings().num_embeddings
    except (AttributeError, TypeError, NotImplementedError):
        return  # static embeddings, routes, images: nothing to compare
    if not 0.5 * rows <= tokens <= 1.1 * rows:  # padded vocabularies and added tokens are well within
        raise ValueError(
            f"{name_or_path}: its tokenizer has {tokens} tokens and its embeddings {rows}: the tokenizer's files are "
            "missing or belong to another model. Put those of its own beside the weights."
        )


def _read(name_or_path: str, file: str) -> Any:
    from sentence_transformers.util import load_file_path

    try:
        found = load_file_path(name_or_path, file, local_files_only=Path(name_or_path).is_dir())
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
