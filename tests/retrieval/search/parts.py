"""Everything that a searcher takes, made of one set of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold import retrieval as r


@dataclass(frozen=True)
class SearchParts:
    """The arguments of a :class:`Searcher`; use :func:`dataclasses.replace` to change some.

    Attributes:
        index: a sparse index of the texts.
        model: the sparse encoder that made the index.
        documents: the documents by id.
        vectors: the sparse vectors, or the folder that they are in.
        second: a BM25 index of the same texts.
        late: a late-interaction model.
        tokens: token vectors of the texts; ``None`` encodes candidates when they are reranked.
    """

    index: Any
    model: Any
    documents: Mapping[str, r.Document]
    vectors: r.SparseVectors | Path
    second: r.BM25Index
    late: Any
    tokens: r.TokenStore | None

    def searcher(self) -> r.Searcher:
        return r.Searcher(
            self.index,
            self.model,
            documents=self.documents,
            vectors=self.vectors,
            second=self.second,
            late=self.late,
            tokens=self.tokens,
        )
