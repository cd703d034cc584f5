"""Indexes that grow: segments that are never changed, beside the index that was built first, and
what was removed.

``segments/current.json`` in the folder of an index lists its segments, each a whole index of the
same backend in a folder of its own, and the ids that are gone from each part. An update writes a
segment, and then replaces that file: whoever reads sees the index before or after, and what a
killed update left is removed by the next one. A backend takes part with ``ids`` and
``search(queries, k)``, whose scores must not depend on the other documents of its part.
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

_FEW = 32  # documents removed from a part that a search looks past; more are masked

__all__ = ["Segments", "listed_parts", "open_segments"]


class Segments:
    """Parts of an index, searched as one: results are merged by score, equal ones in the order of
    the parts.

    Exact backends give what one index of all the documents would give. The texts of an index that
    was updated have no fingerprint, so that comparisons with those of a collection are left out.
    """

    def __init__(self, parts: Sequence[Any], removed: Sequence[Collection[str]]) -> None:
        self.parts, self.removed = list(parts), [set(names) for names in removed]
        first = self.parts[0]
        self.backend, self.vocab_size = first.backend, first.vocab_size
        self.dimension, self.similarity = (
            getattr(first, name, None) for name in ("dimension", "similarity")
        )
        self.fingerprint = next((part.fingerprint for part in self.parts if part.fingerprint), None)
        self.provenance = replace(
            Provenance.shared(part.provenance for part in self.parts),
            texts_sha256=None,
        )

    def pairs(self) -> Iterator[tuple[Any, set[str]]]:
        """Parts, and what is removed of each."""
        return zip(self.parts, self.removed, strict=True)

    @property
    def n_documents(self) -> int:
        return sum(part.n_documents - len(gone) for part, gone in self.pairs())

    @property
    def ids(self) -> list[str]:
        return [name for part, gone in self.pairs() for name in part.ids if name not in gone]

    @cached_property
    def metadata(self) -> Metadata | None:
        """Metadata of the documents of all parts, those that were removed too."""
        return Metadata.concatenate(
            [part.metadata for part in self.parts],
            [part.n_documents for part in self.parts],
        )

    @cached_property
    def _there(self) -> Mask:
        """Which documents of all parts are not removed."""
        return np.array(
            [name not in gone for part, gone in self.pairs() for name in part.ids],
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
        """The `k` best documents of all parts for each query, of those that match `where`; see the
        backend.
        """
        found: list[list[Hit]] = [[] for _ in range(len(queries))]
        allowed, high = allowed_by(self.metadata, where), 0
        for part, gone in self.pairs():
            low, high = high, high + part.n_documents
            mask, more = (None if allowed is None else allowed[low:high]), len(gone)
            if more > _FEW and self.backend != "seismic":
                mask, more = (
                    self._there[low:high] if mask is None else mask & self._there[low:high],
                    0,
                )
            of_part = options if mask is None else options | {"allowed": mask}
            for row, hits in zip(found, part.search(queries, k + more, **of_part), strict=True):
                row += [hit for hit in hits if hit.id not in gone]
        return [sorted(row, key=lambda hit: -hit.score)[:k] for row in found]

    def vectors(self, names: Iterable[str]) -> Tensor:
        """The dense vectors of documents, as :meth:`DenseIndex.vectors`."""
        import torch

        rows = []
        for name in names:
            there = (p for p, gone in self.pairs() if name not in gone and p.holds(name))
            if (part := next(there, None)) is None:
                raise MissingDocumentError("vectors", name)
            rows.append(part.vectors([name]))
        return torch.cat(rows)

    def on(self, device: str = "cuda") -> Any:
        """The index on a device: exact parts joined there as one, others each."""
        if self.backend in ("dense", "late"):
            return Segments([part.on(device) for part in self.parts], self.removed)
        from tilefold.retrieval.index.on_device import DeviceIndex  # brings torch

        described: Any = self
        ids, postings = (
            [name for part in self.parts for name in part.ids],
            [part.postings() for part in self.parts],
        )
        return DeviceIndex(ids, Postings.joined(postings), described, device, self._there)

    def merged(self, folder: Path) -> Any:
        """One index of all the documents, with the options of the first part, to be saved in
        `folder`.
        """
        chosen = [
            [row for row, name in enumerate(part.ids) if name not in gone]
            for part, gone in self.pairs()
        ]
        metadata = [
            part.metadata and part.metadata.take(rows)
            for part, rows in zip(self.parts, chosen, strict=True)
        ]
        fields = Metadata.concatenate(metadata, [len(rows) for rows in chosen])
        if self.backend == "late":
            return type(self.parts[0]).merged(self.parts, chosen, folder, self.provenance, fields)
        kept: list[Any] = [
            part.stored().take(rows) for part, rows in zip(self.parts, chosen, strict=True)
        ]
        first, vectors = self.parts[0], type(kept[0]).concatenate(kept)
        build = type(first).of_any if isinstance(vectors, SparseVectors) else type(first).build
        built = build(vectors, **first.settings)
        built.provenance = self.provenance
        built.metadata = fields
        return built


def open_segments(path: Path, first: Any, load: Callable[[Path], Any]) -> Any:
    """The index `first` of a folder with its segments, which `load` reads; itself without any."""
    listed = listed_parts(path)
    if not listed["parts"]:
        return first
    names = [str(part["folder"]) for part in listed["parts"]]
    if names[0] or any(Path(name).name != name for name in names[1:]):
        raise DataError(
            f"{path / SEGMENTS}: expected names of folders, the index itself first, got {names}. {REMEDY}",
        )
    parts = [first, *(load(path / SEGMENTS / name) for name in names[1:])]
    return Segments(parts, [part["removed"] for part in listed["parts"]])


def listed_parts(path: Path) -> Json:
    """``parts`` of an index, each with its ``folder`` and ids ``removed``, and how many were ever
    ``written``.
    """
    file = path / SEGMENTS / "current.json"
    return read_json_object(file, REMEDY) if file.exists() else {"parts": [], "written": 0}
