"""The untrained SPLADE encoder on the packaged MiniLM, in a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.files import InUseError, atomic_directory
from tilefold._internal.typing import SparseEncoder
from tilefold._version import __version__
from tilefold.recipes import loading
from tilefold.recipes.catalogue import get_recipe
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.datasets import default_cache_dir

__all__ = ["untrained_splade"]

_logger = logging.getLogger(__name__)


def untrained_splade(
    texts_sha256: str,
    texts: Callable[[], Mapping[str, str]] | None = None,
    *,
    cache_dir: str | Path | None = None,
) -> SparseEncoder:
    """Return the model that the recipe ``"splade"`` starts from, from a cache or made from texts.

    The decoder bias of the model is set from a sample of the documents. Queries are encoded later
    by the same weights, when the documents may be gone: so the model is cached.

    Args:
        texts_sha256: digest of the documents.
        texts: returns the documents, id -> text; called only if the model is not in the cache.
        cache_dir: folder of the cache; ``None`` takes the default one.

    Raises:
        LookupError: if the model is not in the cache, and there are no `texts`.
        ValueError: if `texts` are not the documents of the digest.
    """
    recipe = get_recipe("splade", max_steps=0)
    key = json.dumps([__version__, texts_sha256, recipe.to_dict()], sort_keys=True)
    key_digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    cache_root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache_root / "minilm-splade" / key_digest
    with loading.quiet_libraries():
        if folder.is_dir():
            try:
                return loading.load_saved(str(folder), "sparse")
            except Exception as error:  # a damaged file may raise anything
                _logger.warning(
                    "the cached model in %s is damaged and is made again: %s",
                    folder,
                    error,
                )
        if texts is None:
            raise LookupError(
                "the untrained start of these documents is not in the cache, and is made from "
                "them.",
            )
        documents = texts()
        if texts_digest(documents) != texts_sha256:
            raise ArgumentError(
                "texts",
                f"expected the documents of the digest {texts_sha256}, got {len(documents)} of "
                "another. Give those.",
            )
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as model_dir:
            recipe.build_model(list(documents.values())).save_pretrained(model_dir)
            _cache_model(Path(model_dir), folder)
            return loading.load_saved(model_dir, "sparse")


def _cache_model(model_dir: Path, folder: Path) -> None:
    """Copy a saved model into the cache; a failure is logged, since the model works without it.

    Args:
        model_dir: folder of the model.
        folder: folder in the cache. A damaged model in it is replaced.
    """
    try:
        replaceable_names = []  # all files of a damaged model
        if folder.is_dir():
            replaceable_names = [entry.name for entry in folder.iterdir()]
        with atomic_directory(folder, own_names=replaceable_names, overwrite=True) as new_folder:
            shutil.copytree(
                model_dir,
                new_folder,
                copy_function=shutil.copyfile,
                dirs_exist_ok=True,
            )
    except (OSError, InUseError) as error:
        _logger.warning("the untrained start could not be cached: %s", error)
