"""Encode texts into a folder of vectors, by one process or by the ranks of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilefold._process_group import ranks_of
from tilefold._typing import Model
from tilefold.retrieval._meeting import RankShards, meeting
from tilefold.retrieval._streamed import Encoding, FolderShards, Kind, Output
from tilefold.retrieval.provenance import texts_digest

__all__ = ["Encoding", "Kind", "Output", "encode_to_folder"]


def encode_to_folder(
    encoding: Encoding, model: Model, texts: Mapping[str, str], output: Output, group: object = None
) -> Any:
    """Encode texts with a model of this process, or with those of all ranks of a group; the complete manifest.

    Arguments and errors are those of :func:`tilefold.retrieval.encode_collection`.
    """
    encoding.check()
    output.check()
    if not texts:
        raise ValueError("texts: expected at least one, got an empty mapping.")
    job = encoding.job(model, texts, output, lambda: texts_digest(texts))
    ranks = ranks_of(group)
    if ranks is None:
        return FolderShards(job).run()
    with meeting(ranks) as found, found.stopping():
        shards = RankShards(job, found)
        return shards.lead() if found.rank == 0 else shards.help()
