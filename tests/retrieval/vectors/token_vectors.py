"""Random token vectors and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tilefold import retrieval as r

DIMENSION = 16


def unit_rows(n_tokens: int, seed: int) -> torch.Tensor:
    """Random vectors ``[n_tokens, DIMENSION]`` of norm 1."""
    rows = torch.randn(n_tokens, DIMENSION, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def random_token_vectors(
    lengths: list[int],
    storage: str = "fp16",
    prefix: str = "d",
    seed: int = 0,
) -> r.TokenVectors:
    """Token vectors of texts with these numbers of tokens, and ids of ``prefix`` and a number."""
    ids = [f"{prefix}{number}" for number in range(len(lengths))]
    rows = [unit_rows(length, seed + 31 * number) for number, length in enumerate(lengths)]
    return r.TokenVectors.pack(ids, rows, DIMENSION, storage)


def write_store(
    shards: list[r.TokenVectors],
    path: Path,
    storage: str = "fp16",
    **manifest: Any,
) -> r.TokenStore:
    """Write shards of token vectors into a folder, and open it."""
    writer = r.TokenVectorWriter(path, r.TokenManifest(DIMENSION, storage, **manifest))
    for number, vectors in enumerate(shards):
        writer.write_shard(number, vectors)
    writer.finish()
    return r.open_tokens(path)
