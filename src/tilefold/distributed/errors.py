"""Errors of process groups."""

from __future__ import annotations

__all__ = ["RankError"]


class RankError(RuntimeError):
    """Another rank of a process group failed, ended, or did not join."""
