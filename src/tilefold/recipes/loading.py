"""The kind of a saved model, read from its files, and the model itself, ready to encode."""
# ruff: noqa: PLC0415 - sentence-transformers is imported by the functions that need it

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilefold.recipes._attention import check_loaded_attention, register_entmax
from tilefold.recipes.precision import run_fast

__all__ = ["load_saved", "saved_kind", "saved_modules"]

_KINDS = {
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",  # PyLate's name
    "SentenceTransformer": "dense",
    "CrossEncoder": "cross-encoder",
}


def saved_kind(name_or_path: str) -> str:
    """``"sparse"``, ``"multi-vector"``, ``"dense"``, ``"cross-encoder"``, or ``"backbone"`` for any other model.

    A name that cannot be looked up counts as a backbone: loading it says what is wrong.
    """
    saved = _read(name_or_path, "config_sentence_transformers.json")
    if isinstance(saved, dict) and saved.get("model_type") in _KINDS:
        return _KINDS[saved["model_type"]]
    modules = saved_modules(name_or_path)
    if any(".sparse_encoder." in module for module in modules):
        return "sparse"
    if modules:
        return "dense"
    config = _read(name_or_path, "config.json")
    named = (config.get("architectures") or []) if isinstance(config, dict) else []
    late = any(name == "HF_ColBERT" or str(name).endswith("ForRetrieval") for name in named)
    return "multi-vector" if late else "backbone"


def saved_modules(name_or_path: str) -> list[str]:
    """The classes that ``modules.json`` of a saved model lists, in order; none without that file."""
    listed = _read(name_or_path, "modules.json")
    if not isinstance(listed, list):
        return []
    return [str(module.get("type", "")) for module in listed if isinstance(module, dict)]


def load_saved(name_or_path: str, kind: str) -> Any:
    """The ``MultiVectorEncoder`` of kind ``"multi-vector"``, or the ``SparseEncoder`` of any other, ready to encode.

    It runs with the attention that it was saved with, in the precision of
    :func:`tilefold.recipes.precision.fast_inference`. No remote code runs, and a folder is read without a look at the
    network.

    Raises:
        OSError: no such model, here or on the Hugging Face hub.
        ValueError: a model that was trained with entmax attention and would run softmax.
    """
    import sentence_transformers

    name = "MultiVectorEncoder" if kind == "multi-vector" else "SparseEncoder"
    register_entmax()
    local = Path(name_or_path).is_dir()
    model = getattr(sentence_transformers, name)(name_or_path, trust_remote_code=False, local_files_only=local)
    check_loaded_attention(model)
    model.model_card_data.local_files_only = True
    run_fast(model)
    return model


def _read(name_or_path: str, file: str) -> Any:
    from sentence_transformers.util import load_file_path

    try:
        found = load_file_path(name_or_path, file, local_files_only=Path(name_or_path).is_dir())
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
