"""Indexes that grow by segments.

An index that was updated has parts: the index that was built first, and segments, which are never
changed. ``segments/current.json`` in the folder of the index lists the segments and the ids that
were removed from each part. A segment is a complete index of the same backend in a folder of its
own.

An update writes a segment, and then replaces that file, so that readers see the index before or
after the update. Files of an interrupted update are removed by the next one. A backend needs
``ids`` and ``search(queries, k)``, and its scores must not depend on other documents of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilefold._internal.typing import Tensor
from tilefold.retrieval.common.files import Json, read_json_object
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.index.exact import Postings
from tilefold.retrieval.index.protocol import REMEDY, SEGMENTS, Hit
from tilefold.retrieval.vectors.sparse import SparseVectors

# Removed documents of a part up to which a search retrieves that many more hits and drops them.
# More removed documents are masked.
_MAX_DROPPED_HITS = 32

__all__ = ["Segments", "listed_parts", "open_segments"]


class Segments:
    """Parts of an index that are searched as one.

    Results are merged by score. Equal scores are in the order of the parts. Exact backends return
    the same as one index of all documents. The texts of an index that was updated have no
    fingerprint, so that they are not compared with those of a collection.

    Args:
        parts: indexes of the same backend.
        removed: ids of removed documents, for each part.
    """

    def __init__(self, parts: Sequence[Any], removed: Sequence[Collection[str]]) -> None:
        """Join indexes into one that is searched.

        Args:
            parts: indexes of the same backend, at least one.
            removed: ids of removed documents, for each part.
        """
        self.parts = list(parts)
        self.removed = [set(names) for names in removed]
        first_part = self.parts[0]
        self.backend = first_part.backend
        self.vocab_size = first_part.vocab_size
        self.dimension = getattr(first_part, "dimension", None)  # of dense vectors
        self.similarity = getattr(first_part, "similarity", None)  # of dense vectors
        fingerprints = [part.fingerprint for part in self.parts if part.fingerprint]
        self.fingerprint = fingerprints[0] if fingerprints else None
        self.provenance = replace(
            Provenance.shared(part.provenance for part in self.parts),
            texts_sha256=None,
        )

    def pairs(self) -> Iterator[tuple[Any, set[str]]]:
        """Iterate over the parts and the ids that were removed from each."""
        return zip(self.parts, self.removed, strict=True)

    @property
    def n_documents(self) -> int:
        return sum(part.n_documents - len(removed) for part, removed in self.pairs())

    @property
    def ids(self) -> list[str]:
        return [name for part, removed in self.pairs() for name in part.ids if name not in removed]

    @cached_property
    def metadata(self) -> Metadata | None:
        """Metadata of the documents of all parts, including removed documents."""
        return Metadata.concatenate(
            [part.metadata for part in self.parts],
            [part.n_documents for part in self.parts],
        )

    @cached_property
    def _present(self) -> Mask:
        """Mask of the documents of all parts, False for removed documents."""
        return np.array(
            [name not in removed for part, removed in self.pairs() for name in part.ids],
            bool,
        )

    def search(
        self,
        queries: Any,
        k: int,
        *,
        where: Where = None,
        **options: object,
    ) -> list[list[Hit]]:
        """Search all parts, and merge their hits by score.

        Removed documents are still in the parts. If a part has few of them, it is searched for so
        many more hits, and removed ones are dropped. If it has many, they are masked.

        Args:
            queries: vectors of the queries, of the type that the backend searches with.
            k: documents per query.
            where: filter of the documents' metadata.
            options: options of the backend's search.

        Returns:
            The hits of each query, best first.
        """
        merged: list[list[Hit]] = [[] for _ in range(len(queries))]
        allowed = allowed_by(self.metadata, where)
        begin = 0
        for part, removed in self.pairs():
            end = begin + part.n_documents
            mask = None if allowed is None else allowed[begin:end]
            n_more_hits = len(removed)
            # Under a mask, Seismic completes short results by an exact search, which is slow.
            if n_more_hits > _MAX_DROPPED_HITS and self.backend != "seismic":
                present = self._present[begin:end]
                mask = present if mask is None else mask & present
                n_more_hits = 0
            part_options = dict(options)
            if mask is not None:
                part_options["allowed"] = mask
            part_hits = part.search(queries, k + n_more_hits, **part_options)
            for query_hits, hits in zip(merged, part_hits, strict=True):
                query_hits.extend(hit for hit in hits if hit.id not in removed)
            begin = end
        return [sorted(query_hits, key=lambda hit: -hit.score)[:k] for query_hits in merged]

    def vectors(self, names: Iterable[str]) -> Tensor:
        """Return the dense vectors of documents, as :meth:`DenseIndex.vectors`."""
        import torch

        return torch.cat([self._part_of(name).vectors([name]) for name in names])

    def _part_of(self, name: str) -> Any:
        """Return the part with a document, or raise ``MissingDocumentError``."""
        for part, removed in self.pairs():
            if name not in removed and part.holds(name):
                return part
        raise MissingDocumentError("vectors", name)

    def on(self, device: str = "cuda") -> Any:
        """Return an index that searches on a device.

        Dense and token vectors stay in parts. The postings of exact sparse parts are joined to one
        :class:`DeviceIndex`.

        Raises:
            ValueError: for a backend that searches on the CPU only.
        """
        if self.backend in ("dense", "late"):
            return Segments([part.on(device) for part in self.parts], self.removed)
        if self.backend != "exact":
            raise ValueError(
                f"index.on: expected an exact, dense or late index, got {self.backend}, which "
                "searches on the CPU only. Build one with backend='exact'.",
            )
        from tilefold.retrieval.index.on_device import DeviceIndex  # brings torch

        index: Any = self
        ids = [name for part in self.parts for name in part.ids]
        postings = Postings.joined([part.postings() for part in self.parts])
        return DeviceIndex(ids, postings, index, device, self._present)

    def merged(self, folder: Path) -> Any:
        """Merge the parts into one index, without removed documents.

        Args:
            folder: folder that the caller saves the index in. An index of token vectors is written
                into it here.

        Returns:
            The index, with the options of the first part.
        """
        # For each part, the rows of the documents that were not removed, and their metadata.
        rows_by_part = []
        part_metadata = []
        for part, removed in self.pairs():
            rows = [row for row, name in enumerate(part.ids) if name not in removed]
            rows_by_part.append(rows)
            part_metadata.append(part.metadata and part.metadata.take(rows))
        metadata = Metadata.concatenate(part_metadata, [len(rows) for rows in rows_by_part])
        first_part = self.parts[0]
        index_type = type(first_part)
        if self.backend == "late":
            return index_type.merged(self.parts, rows_by_part, folder, self.provenance, metadata)
        part_vectors: list[Any] = [
            part.stored().take(rows) for part, rows in zip(self.parts, rows_by_part, strict=True)
        ]
        vectors = type(part_vectors[0]).concatenate(part_vectors)
        # Sparse vectors may all be empty after documents were removed.
        build = index_type.of_any if isinstance(vectors, SparseVectors) else index_type.build
        index = build(vectors, **first_part.settings)
        index.provenance = self.provenance
        index.metadata = metadata
        return index


def open_segments(path: Path, first: Any, load: Callable[[Path], Any]) -> Any:
    """Open the segments of an index.

    Args:
        path: folder of the index.
        first: the open index of that folder, without segments.
        load: function that opens the folder of a segment.

    Returns:
        :class:`Segments` of `first` and its segments, or `first` if it has none.

    Raises:
        DataError: for a list of segments that is damaged.
    """
    listed = listed_parts(path)["parts"]
    if not listed:
        return first
    names = [str(part["folder"]) for part in listed]
    # The first name is empty. The others must not lead out of the folder.
    if names[0] or any(Path(name).name != name for name in names[1:]):
        raise DataError(
            f"{path / SEGMENTS}: expected names of folders, the index itself first, got {names}. "
            f"{REMEDY}",
        )
    segments = [load(path / SEGMENTS / name) for name in names[1:]]
    return Segments([first, *segments], [part["removed"] for part in listed])


def listed_parts(path: Path) -> Json:
    """Read the list of the segments of an index.

    Returns:
        ``parts``, each with its ``folder`` and ids ``removed``, and ``written``, the number of
        segments that were ever written.
    """
    file = path / SEGMENTS / "current.json"
    if not file.exists():
        return {"parts": [], "written": 0}
    return read_json_object(file, REMEDY)
