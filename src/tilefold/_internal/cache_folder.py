"""The folder of the cache."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return the folder of the cache.

    It is ``$TILEFOLD_CACHE_DIR``, else ``$XDG_CACHE_HOME/tilefold``, else ``~/.cache/tilefold``.
    """
    folder = os.environ.get("TILEFOLD_CACHE_DIR")
    if folder:
        return Path(folder)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    parent = Path(user_cache) if user_cache else Path.home() / ".cache"
    return parent / "tilefold"
