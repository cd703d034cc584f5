"""Sparse encoders of causal language models, PROSPER, BGE-M3 and SPLATE."""

from __future__ import annotations

from tilefold.recipes._entry import Entry

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = ()
