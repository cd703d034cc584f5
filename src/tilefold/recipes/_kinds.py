"""What a saved model is, read from its files before anything is loaded."""
# ruff: noqa: PLC0415 - sentence-transformers is imported by the function that needs it

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["saved_kind", "saved_modules"]

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


def _read(name_or_path: str, file: str) -> Any:
    from sentence_transformers.util import load_file_path

    try:
        found = load_file_path(name_or_path, file, local_files_only=Path(name_or_path).is_dir())
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
