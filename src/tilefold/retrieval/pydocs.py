"""``pydocs``: a retrieval collection from the documentation of the installed Python."""

from __future__ import annotations

from tilefold.retrieval.collection import Collection


def build_pydocs() -> Collection:
    raise NotImplementedError
