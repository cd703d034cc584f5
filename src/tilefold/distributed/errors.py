"""Errors of process groups."""

from __future__ import annotations

__all__ = ["RankError"]


class RankError(RuntimeError):
    """Raised if another rank of a process group failed, ended, or did not join."""
