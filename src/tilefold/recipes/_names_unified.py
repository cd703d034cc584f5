"""The systems of the unified framework (arXiv 2303.13416): any query encoder with any document encoder."""

from __future__ import annotations

from tilefold.recipes._entry import Entry

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = ()
