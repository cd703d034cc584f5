"""The packaged MiniLM without training, ready to encode: what the two recipes save after no step."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold._files import InUseError, atomic_directory
from tilefold._version import __version__
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.colbert import load_base_model as load_colbert
from tilefold.recipes.loading import load_saved
from tilefold.recipes.precision import run_fast
from tilefold.recipes.quiet import quiet_libraries
from tilefold.recipes.splade import SpladeRecipe
from tilefold.retrieval.datasets import default_cache_dir
from tilefold.retrieval.provenance import texts_digest

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SparseEncoder

__all__ = ["untrained_colbert", "untrained_splade"]

_logger = logging.getLogger(__name__)


def untrained_splade(
    texts_sha256: str, texts: Callable[[], Mapping[str, str]] | None = None, *, cache_dir: str | Path | None = None
) -> SparseEncoder:
    """The SPLADE model that ``SpladeRecipe(max_steps=0)`` makes of the documents of a digest, in a cache.

    Its decoder bias is set from a sample of the documents: queries are encoded later by the very same weights, without
    them. `texts` gives id -> text, and is called only if the model is not in the cache.

    Raises:
        LookupError: the model is not in the cache, and there are no `texts`.
        ValueError: `texts` are others than those of the digest.
    """
    recipe = SpladeRecipe(max_steps=0)
    made_from = json.dumps([__version__, texts_sha256, recipe.to_dict()], sort_keys=True)
    parent = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = parent / "minilm-splade" / hashlib.sha256(made_from.encode()).hexdigest()[:32]
    with quiet_libraries():
        if folder.is_dir():
            try:
                return load_saved(str(folder), "sparse")
            except Exception as error:  # whatever a damaged file raises; it is made again
                _logger.warning("the cached model in %s is damaged and is made again: %s", folder, error)
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as made:
            if texts is None:
                raise LookupError("the untrained start of these documents is not in the cache, and is made from them.")
            found = texts()
            if texts_digest(found) != texts_sha256:
                raise ValueError(
                    f"texts: expected the documents of the digest {texts_sha256}, got {len(found)} of another. Give "
                    "those."
                )
            recipe.start(list(found.values())).save_pretrained(made)
            try:
                names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
                with atomic_directory(folder, own_names=names) as cached:
                    for file in Path(made).rglob("*"):
                        target = cached / file.relative_to(made)
                        target.mkdir(parents=True) if file.is_dir() else target.write_bytes(file.read_bytes())
            except (OSError, InUseError) as error:
                _logger.warning("the untrained start could not be cached: %s", error)
            return load_saved(made, "sparse")


def untrained_colbert() -> MultiVectorEncoder:
    """The model that ``ColbertRecipe(max_steps=0, dimension=None)`` saves: the token states of MiniLM."""
    with quiet_libraries():
        model = load_colbert(ColbertRecipe(max_steps=0, dimension=None))
        run_fast(model)
    return model
