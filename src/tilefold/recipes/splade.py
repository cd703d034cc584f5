"""The untrained SPLADE encoder with the packaged MiniLM, which is cached."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.cache_folder import default_cache_dir
from tilefold._internal.files import InUseError, atomic_directory
from tilefold._internal.precision import Dtype
from tilefold._internal.typing import SparseEncoder
from tilefold._version import __version__
from tilefold.recipes import loading
from tilefold.recipes.catalogue import get_recipe
from tilefold.retrieval.common.provenance import texts_digest

__all__ = ["untrained_splade"]

_logger = logging.getLogger(__name__)


def untrained_splade(
    texts_sha256: str,
    texts: Callable[[], Mapping[str, str]] | None = None,
    *,
    cache_dir: str | Path | None = None,
    dtype: Dtype = "auto",
) -> SparseEncoder:
    """Return the untrained model of the recipe ``"splade"`` for a set of documents.

    The decoder bias of the model depends on a sample of the documents. The model is cached, because
    queries must later be encoded by the same weights, when the documents may be gone.

    Args:
        texts_sha256: digest of the documents.
        texts: returns the documents, id -> text; called only if the model is not in the cache.
        cache_dir: folder of the cache; ``None`` for the default folder.
        dtype: the dtype in which the model computes, see :func:`loading.load_saved`.

    Raises:
        LookupError: if the model is not in the cache, and `texts` is ``None``.
        ValueError: if `texts` returns documents with another digest.
    """
    recipe = get_recipe("splade", max_steps=0)
    key = json.dumps([__version__, texts_sha256, recipe.to_dict()], sort_keys=True)
    key_digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    cache_root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache_root / "minilm-splade" / key_digest
    with loading.quiet_libraries():
        if folder.is_dir():
            try:
                return loading.load_saved(str(folder), "sparse", dtype)
            except Exception as error:  # a damaged file may raise anything
                _logger.warning(
                    "the cached model in %s is damaged and is built again: %s",
                    folder,
                    error,
                )
        if texts is None:
            raise LookupError(
                "the untrained model for these documents is not in the cache; pass texts, from "
                "which it is built.",
            )
        documents = texts()
        if texts_digest(documents) != texts_sha256:
            raise ArgumentError(
                "texts",
                f"must return the documents with the digest {texts_sha256}, got "
                f"{len(documents)} documents with another digest.",
            )
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as model_dir:
            recipe.build_model(list(documents.values())).save_pretrained(model_dir)
            _cache_model(Path(model_dir), folder)
            return loading.load_saved(model_dir, "sparse", dtype)


def _cache_model(model_dir: Path, folder: Path) -> None:
    """Copy a saved model into the cache, and only log a failure to do so.

    Args:
        model_dir: folder of the model.
        folder: folder in the cache. A damaged model in it is replaced.
    """
    try:
        # atomic_directory replaces a folder only if it knows the names of all files in it.
        damaged_files = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        with atomic_directory(folder, own_names=damaged_files, overwrite=True) as new_folder:
            shutil.copytree(
                model_dir,
                new_folder,
                copy_function=shutil.copyfile,
                dirs_exist_ok=True,
            )
    except (OSError, InUseError) as error:
        _logger.warning("the untrained model could not be cached: %s", error)
