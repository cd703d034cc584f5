"""Indexes that grow by segments.

An updated index has parts: the index that was built first, and segments. A part is never changed.
A segment is a complete index of the same backend in its own folder. ``segments/current.json`` in
the folder of the index lists the segments and the ids that were removed from each part.

An update writes a segment, and then replaces that file, so that readers see the index before or
after the update. Files of an interrupted update are removed by the next update. The score of a
document must not depend on the other documents of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tilefold._internal.typing import Tensor
from tilefold.retrieval.common.files import Json, read_json_object, write_json_object
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.index.exact import Postings
from tilefold.retrieval.index.protocol import REMEDY, SEGMENTS, Hit, SparseIndex, are_among

if TYPE_CHECKING:
    from tilefold.retrieval.index.devices import Devices
    from tilefold.retrieval.index.on_device import DeviceIndex

# Largest number of removed documents of a part for which a search retrieves that many extra hits
# and drops removed ones. If there are more, the search masks them.
_MAX_EXTRA_HITS = 32

# Name of the list of parts, in the folder of the segments.
LIST_NAME = "current.json"

__all__ = ["LIST_NAME", "ListedPart", "PartList", "Segments", "open_segments"]


@dataclass(frozen=True)
class ListedPart:
    """One part of an index, as the list of parts describes it.

    Attributes:
        name: name of the segment's folder; empty for the index that was built first.
        removed: ids of the documents that were removed from the part.
    """

    name: str
    removed: Set[str]

    def folder_in(self, index: Path) -> Path:
        """Return the folder of this part.

        Args:
            index: the folder of the index.
        """
        return index / SEGMENTS / self.name if self.name else index


@dataclass(frozen=True)
class PartList:
    """The parts of an index: the index that was built first, and then its segments.

    Attributes:
        parts: the parts, at least one.
        n_segments_written: number of segments that updates have ever written, which numbers the
            folder of the next one.
        is_updated: whether the index was updated since it was built or merged. An update that only
            removes documents adds no segment.
    """

    parts: Sequence[ListedPart]
    n_segments_written: int
    is_updated: bool

    @classmethod
    def read(cls, index: Path) -> PartList:
        """Read the list of the parts of an index.

        Args:
            index: the folder of the index.

        Raises:
            DataError: if the list is damaged.
        """
        file = index / SEGMENTS / LIST_NAME
        content: Json = {"parts": [], "written": 0}
        if file.exists():
            content = read_json_object(file, REMEDY)
        try:
            parts = [
                ListedPart(str(part["folder"]), set(part["removed"])) for part in content["parts"]
            ]
            n_segments_written = int(content["written"])
        except (KeyError, TypeError, ValueError) as error:  # a field is missing or has another type
            raise DataError(
                f"{file}: expected the folder and the removed ids of each part, and the number of "
                f"written segments, got {content!r:.200}. {REMEDY}",
            ) from error
        return cls(
            parts=parts or [ListedPart("", set())],
            n_segments_written=n_segments_written,
            is_updated=bool(parts),
        )

    def write(self, index: Path) -> None:
        """Write this list into the folder of an index, in place of the earlier list.

        This step makes an update visible: a reader that opens the index afterwards sees the parts
        of this list. The file is flushed to disk, so that the update also survives a crash of the
        machine.

        Args:
            index: the folder of the index.
        """
        parts = [{"folder": part.name, "removed": sorted(part.removed)} for part in self.parts]
        write_json_object(
            index / SEGMENTS / LIST_NAME,
            {"parts": parts, "written": self.n_segments_written},
            durable=True,
        )

    @property
    def segment_names(self) -> list[str]:
        """Names of the folders of the segments."""
        return [part.name for part in self.parts[1:]]


class Segments:
    """Parts of an index that are searched as one.

    Results are merged by score. Equal scores are in the order of the parts. Exact backends return
    the same as one index of all documents.
    """

    def __init__(self, parts: Sequence[Any], removed: Sequence[Collection[str]]) -> None:
        """Search several indexes as one.

        Args:
            parts: indexes of the same backend, at least one.
            removed: ids of removed documents, for each part.
        """
        self.parts = list(parts)
        self.removed = [set(ids) for ids in removed]
        first_part = self.parts[0]
        self.backend = first_part.backend
        self.vocab_size = first_part.vocab_size
        # Indexes of sparse vectors have no dimension and no similarity.
        self.dimension = getattr(first_part, "dimension", None)
        self.similarity = getattr(first_part, "similarity", None)
        # Parts with a known vocabulary have the same fingerprint, which an update checks.
        fingerprints = [part.fingerprint for part in self.parts if part.fingerprint]
        self.fingerprint = fingerprints[0] if fingerprints else None
        # The texts of all parts together have no recorded digest.
        self.provenance = replace(
            Provenance.shared(part.provenance for part in self.parts),
            texts_sha256=None,
        )

    def append(self, part: Any) -> None:
        """Add a part without removed documents after the others.

        Args:
            part: an index of the same backend.
        """
        self.parts.append(part)
        self.removed.append(set())

    def parts_with_removed(self) -> Iterator[tuple[Any, set[str]]]:
        """Iterate over the parts and the ids that were removed from each."""
        return zip(self.parts, self.removed, strict=True)

    @property
    def n_documents(self) -> int:
        return sum(part.n_documents - len(removed) for part, removed in self.parts_with_removed())

    @property
    def ids(self) -> list[str]:
        return [
            document_id
            for part, removed in self.parts_with_removed()
            for document_id in part.ids
            if document_id not in removed
        ]

    @cached_property
    def metadata(self) -> Metadata | None:
        """Metadata of the documents of all parts, including removed documents."""
        return Metadata.concatenate(
            [part.metadata for part in self.parts],
            [part.n_documents for part in self.parts],
        )

    @cached_property
    def _is_present(self) -> Mask:
        """Mask of the documents of all parts, False for removed documents."""
        return np.concatenate(
            [~are_among(part.ids, removed) for part, removed in self.parts_with_removed()],
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

        Args:
            queries: vectors of the queries, as the backend takes them.
            k: number of documents per query.
            where: filter of the documents' metadata.
            options: options of the backend's search.

        Returns:
            The hits of each query, best first.
        """
        merged: list[list[Hit]] = [[] for _ in range(len(queries))]
        # Mask of the documents of all parts, one part after the other; None without a filter.
        matching = allowed_by(self.metadata, where)
        begin = 0
        for part, removed in self.parts_with_removed():
            documents = slice(begin, begin + part.n_documents)
            begin = documents.stop
            n_extra_hits, allowed = self._exclude_removed(
                documents,
                len(removed),
                None if matching is None else matching[documents],
            )
            part_options = dict(options)
            if allowed is not None:
                part_options["allowed"] = allowed
            part_hits = part.search(queries, k + n_extra_hits, **part_options)
            for query_hits, hits in zip(merged, part_hits, strict=True):
                query_hits.extend(hit for hit in hits if hit.id not in removed)
        return [sorted(query_hits, key=lambda hit: -hit.score)[:k] for query_hits in merged]

    def _exclude_removed(
        self,
        documents: slice,
        n_removed: int,
        matching: Mask | None,
    ) -> tuple[int, Mask | None]:
        """Choose how a search of a part excludes removed documents: by extra hits, or by a mask.

        Args:
            documents: where the documents of the part are among those of all parts.
            n_removed: number of removed documents of the part.
            matching: mask of the part's documents that match a filter; None without a filter.

        Returns:
            The number of extra hits, which replace the removed documents that the caller drops;
            and the mask of the documents that the search may return, None for all.
        """
        # If a mask leaves Seismic with too few hits, it searches exactly again, which is slow.
        if n_removed <= _MAX_EXTRA_HITS or self.backend == "seismic":
            return n_removed, matching
        is_present = self._is_present[documents]
        return 0, is_present if matching is None else matching & is_present

    def vectors(self, document_ids: Iterable[str]) -> Tensor:
        """Return the vectors of documents of a dense index, as :meth:`DenseIndex.vectors` does."""
        import torch

        return torch.cat(
            [self._part_of(document_id).vectors([document_id]) for document_id in document_ids],
        )

    def token_vectors(self, document_ids: Iterable[str]) -> list[Tensor]:
        """Return the token vectors of documents, as :meth:`LateIndex.token_vectors` does."""
        documents: list[Tensor] = []
        for document_id in document_ids:
            documents += self._part_of(document_id).token_vectors([document_id])
        return documents

    def _part_of(self, document_id: str) -> Any:
        """Return the part with a document, or raise ``MissingDocumentError``."""
        for part, removed in self.parts_with_removed():
            if document_id not in removed and part.holds(document_id):
                return part
        raise MissingDocumentError("vectors", document_id)

    def on(self, device: Devices = "cuda") -> Segments | DeviceIndex:
        """Return an index that searches on one device, or on several that divide its documents.

        The parts of a dense or late index are moved one by one. The postings of exact parts are
        concatenated into one :class:`DeviceIndex`, which masks removed documents.

        Args:
            device: a device, or several for an exact or late index.

        Raises:
            ValueError: if the backend searches on the CPU only, or on one device only.
        """
        if self.backend in ("dense", "late"):
            return Segments([part.on(device) for part in self.parts], self.removed)
        if self.backend != "exact":
            raise ValueError(
                f"index.on: expected an index of backend 'exact', 'dense' or 'late', got "
                f"{self.backend!r}, which searches on the CPU only. Build one with "
                "backend='exact'.",
            )
        from tilefold.retrieval.index.on_device import DeviceIndex  # needs torch

        return DeviceIndex(
            [document_id for part in self.parts for document_id in part.ids],
            Postings.concatenate([part.postings() for part in self.parts]),
            cast("SparseIndex", self),
            device,
            self._is_present,
        )

    def merged(self, folder: Path) -> Any:
        """Merge the parts into one index, without removed documents.

        Args:
            folder: the folder that the caller saves the index in. An index of token vectors is
                written into it here, because it is not built in memory.

        Returns:
            The index, with the options of the first part.
        """
        rows_by_part = []
        metadata_by_part = []
        for part, removed in self.parts_with_removed():
            rows = np.flatnonzero(~are_among(part.ids, removed)).tolist()
            rows_by_part.append(rows)
            metadata_by_part.append(None if part.metadata is None else part.metadata.take(rows))
        return type(self.parts[0]).merge(
            self.parts,
            rows_by_part,
            folder,
            self.provenance,
            Metadata.concatenate(metadata_by_part, [len(rows) for rows in rows_by_part]),
        )


def open_segments(path: Path, index: Any, load: Callable[[Path], Any]) -> Any:
    """Open the segments of an index, which are the parts that updates have added to it.

    Args:
        path: the folder of the index.
        index: the index that was loaded from this folder, without its segments.
        load: a function that loads an index from the folder of a segment.

    Returns:
        :class:`Segments` of the index and its segments, or the index itself if it has none.

    Raises:
        DataError: if the list of segments is damaged.
    """
    part_list = PartList.read(path)
    if not part_list.is_updated:
        return index
    index_name = part_list.parts[0].name
    segment_names = part_list.segment_names
    # A segment's name must not lead out of the folder.
    are_valid = all(Path(name).name == name for name in segment_names)
    if index_name or not are_valid:
        raise DataError(
            f"{path / SEGMENTS}: expected names of folders, the index itself first, got "
            f"{[index_name, *segment_names]}. {REMEDY}",
        )
    segments = [load(path / SEGMENTS / name) for name in segment_names]
    return Segments([index, *segments], [part.removed for part in part_list.parts])
