"""Collections by name: ``pydocs`` with its cache, or a BEIR folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tilefold._files import InUseError
from tilefold.retrieval import pydocs
from tilefold.retrieval.collection import BEIR_LAYOUT, Collection, load_beir
from tilefold.retrieval.errors import DataError

__all__ = ["default_cache_dir", "load_collection"]

_logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """``$TILEFOLD_CACHE_DIR``, else ``$XDG_CACHE_HOME/tilefold``, else ``~/.cache/tilefold``."""
    if chosen := os.environ.get("TILEFOLD_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilefold"


def load_collection(
    name_or_path: str | Path,
    cache_dir: str | Path | None = None,
    *,
    unknown: Literal["error", "drop"] = "error",
    documents_only: bool = False,
    splits: Sequence[str] | None = None,
) -> Collection:
    """The built-in collection ``"pydocs"``, or what :func:`tilefold.retrieval.load_beir` reads at a path.

    ``pydocs`` is built once for each Python installation and kept as a BEIR folder under `cache_dir`
    (:func:`default_cache_dir` when None). A damaged or unwritable cache costs only the time to build again.
    """
    if str(name_or_path) == "pydocs":
        return _cached_pydocs(default_cache_dir() if cache_dir is None else Path(cache_dir))
    path = Path(name_or_path)
    if not path.exists():
        wanted = "'pydocs' or the path of a BEIR folder or of documents"
        raise FileNotFoundError(
            f"collection: expected {wanted}, got {str(name_or_path)!r}, which is neither. {BEIR_LAYOUT}"
        )
    return load_beir(path, unknown, documents_only=documents_only, splits=splits)


def _cached_pydocs(cache_dir: Path) -> Collection:
    folder = cache_dir / "pydocs" / pydocs.cache_key()
    if folder.is_dir():
        try:
            return replace(load_beir(folder), name="pydocs")
        except (DataError, OSError) as error:
            _logger.warning("cached pydocs is damaged and is built again: %s", error)
    collection = pydocs.build_pydocs()
    try:
        collection.save_beir(folder)
    except (OSError, InUseError) as error:
        _logger.warning("pydocs could not be cached: %s", error)
    return collection
