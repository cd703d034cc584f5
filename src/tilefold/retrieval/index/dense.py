"""Exact search of dense vectors: matrix products in blocks, on a CPU or a GPU, by torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_instance,
    check_k,
    list_of,
)
from tilefold._internal.memory import free_device_bytes
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Fields, Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import ArgumentDataError, DataError, MissingDocumentError
from tilefold.retrieval.index.devices import (
    DeviceCopies,
    Devices,
    check_devices,
    copy_to_device,
    device_list,
    numbered,
)
from tilefold.retrieval.index.protocol import (
    REMEDY,
    FolderIndex,
    GrowingIndex,
    Hit,
    StoredIds,
    hits_of,
)
from tilefold.retrieval.vectors.tokens import (
    DenseManifest,
    TokenStore,
    TokenVectors,
    check_values,
    read_tensors,
    save_tensors,
)

__all__ = ["DenseIndex"]

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_FILE = "vectors.safetensors"
# Numbers of documents and queries of a block of scores, which takes 64 MB. The best of as many
# scores are selected together, of fewer queries and more documents.
_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_QUERIES = 256
T = TypeVar("T", bound="TorchIndex")


class TorchIndex(FolderIndex):
    """Base of the indexes that torch searches, on a CPU or a GPU.

    Attributes:
        is_divisible: whether several devices can search the index together.
        devices: the devices of a search; None uses a GPU if there is one.
        dimension: number of entries of a vector, D.
    """

    package = "torch"
    is_divisible: ClassVar[bool] = False
    devices: list[torch.device] | None = None

    dimension: int

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs whose memory has a copy of the documents, or of some of them."""
        raise NotImplementedError

    def on(self: T, device: Devices = "cuda") -> T:
        """Return a copy of the index that searches on a device.

        Args:
            device: the device. An index of token vectors also takes several, among which its
                documents are divided.

        Raises:
            ValueError: if the index cannot be divided among several devices.
            RuntimeError: if there is no such device.
        """
        devices = device_list(device)
        if len(devices) > 1 and not self.is_divisible:
            raise ArgumentError(
                "device",
                f"expected one device for an index of backend {self.backend!r}, got "
                f"{len(devices)}. Indexes of the backends 'exact' and 'late' are divided among "
                "several devices.",
            )
        check_devices(devices)
        index = copy.copy(self)
        index.devices = devices
        return index

    @property
    def device(self) -> torch.device | None:
        """The first device of a search; None uses a GPU if there is one."""
        return None if self.devices is None else self.devices[0]

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {document_id: row for row, document_id in enumerate(self.ids)}

    def holds(self, document_id: str) -> bool:
        """Return whether the index has a document."""
        return document_id in self._row_of


class DenseIndex(TorchIndex, GrowingIndex):
    """Exact search of dense vectors by the similarity that they were trained for.

    Scores are computed in float32 for every storage. The scores of a GPU and a CPU differ only by
    the order of sums. Equal scores are in document order. Every document has a score, so a query
    has `k` results if there are `k` documents. A GPU caches the vectors if they fit into half of
    its free memory.

    Examples:
        >>> import torch
        >>> from tilefold.retrieval import TokenVectors
        >>> rows = torch.eye(3)[:, None]  # a vector for each of three texts
        >>> vectors = TokenVectors.pack(["a", "b", "c"], list(rows), 3, "fp32")
        >>> index = DenseIndex.build(vectors, similarity="cosine")
        >>> [hit.id for hit in index.search(torch.tensor([[0.1, 0.9, 0.0]]), k=2)[0]]
        ['b', 'a']
    """

    backend = "dense"
    own_files = (_FILE,)

    def __init__(
        self,
        ids: Sequence[str],
        values: Tensor,
        scales: Tensor | None,
        similarity: str,
        provenance: Provenance,
    ) -> None:
        """Check the vectors of N documents. They are kept in the number type in which they come.

        Args:
            ids: ids of the documents.
            values: ``[N, D]``, floats or int8.
            scales: ``[N]``, factors of int8 values; None for floats.
            similarity: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``.
            provenance: model and texts that the vectors were computed from.

        Raises:
            ArgumentDataError: if there are no documents, or a different number of vectors and ids.
        """
        ids = ids if isinstance(ids, StoredIds) else list_of("ids", ids)
        check_choice("similarity", similarity, SIMILARITIES)
        check_values(values, scales)
        if not values.numel() or len(values) != len(ids):
            raise ArgumentDataError(
                "vectors",
                f"expected [{len(ids)}, D] with at least one vector, got {list(values.shape)}.",
            )
        self.ids = ids
        self.similarity = similarity
        self.provenance = provenance
        self.options = {"similarity": similarity}
        self.dimension = int(values.size(1))
        # The manifests of all indexes have a vocab_size. Dense vectors store their dimension in it.
        self.vocab_size = self.dimension
        self._values = values
        self._scales = scales
        # Values and scales per device.
        self._copies: DeviceCopies[tuple[Tensor, Tensor | None]] = DeviceCopies()

    @classmethod
    def build(
        cls,
        vectors: TokenStore | TokenVectors,
        similarity: str = "cosine",
        metadata: Mapping[str, Fields] | None = None,
    ) -> DenseIndex:
        """Build an index of dense vectors.

        Args:
            vectors: a folder of vectors that ``open_dense`` opened, or vectors in memory, with one
                vector per document.
            similarity: similarity of vectors in memory. It is ignored for a folder, which records
                the similarity.
            metadata: document id -> fields, which ``search(where=...)`` filters by.

        Raises:
            ArgumentDataError: if the vectors are not dense vectors of documents.
            ValueError: if there are no vectors, or the similarity is unknown.
        """
        check_instance("vectors", vectors, (TokenStore, TokenVectors), "open_dense(folder)")
        provenance = Provenance()
        if isinstance(vectors, TokenVectors):
            in_memory = vectors
        else:
            manifest = vectors.manifest
            if not isinstance(manifest, DenseManifest) or manifest.kind != "document":
                raise ArgumentDataError(
                    "vectors",
                    "expected dense vectors of documents, got "
                    f"{manifest.kind} vectors of layout {manifest.layout!r} in {vectors.folder}.",
                )
            if not len(vectors):
                raise ArgumentError(
                    "vectors",
                    f"expected at least one vector, got none in {vectors.folder}. Check the texts.",
                )
            similarity = manifest.similarity
            provenance = manifest.provenance
            in_memory = TokenVectors.concatenate(
                [vectors.shard(number) for number in range(len(manifest.shards))],
            )
        index = cls(
            in_memory.ids,
            in_memory.values,
            in_memory.scales,
            similarity,
            provenance,
        )
        index.metadata = Metadata.from_fields(metadata, index.ids, provenance.passages)
        return index

    @classmethod
    def build_unchecked(
        cls,
        vectors: TokenStore | TokenVectors,
        **options: Any,
    ) -> DenseIndex:
        """Build an index of dense vectors, with the arguments and the checks of :meth:`build`.

        Other backends skip a check here, that some vector is not empty. Dense vectors never are.
        """
        return cls.build(vectors, **options)

    def search(
        self,
        queries: Tensor,
        k: int,
        *,
        device: str | torch.device | None = None,
        where: Where = None,
        allowed: Mask | None = None,
    ) -> list[list[Hit]]:
        """Return the `k` best documents of each query, best first.

        If both `where` and `allowed` are passed, documents must match both.

        Args:
            queries: ``[Q, D]``. Longer vectors are truncated to the dimension of the documents.
            k: number of documents per query.
            device: the device that computes the scores. None uses the device of the index or, if
                the index has none, a GPU if there is one.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.

        Raises:
            ValueError: if the queries have fewer dimensions than the documents, or are not finite.
        """
        check_instance("queries", queries, Tensor, "encode_dense(model, {id: text}, kind='query')")
        check_k(k)
        # Large float64 numbers become infinite, which the check below refuses.
        queries = queries.to(torch.float32)
        all_finite = bool(queries.isfinite().all())
        if queries.dim() != 2 or queries.size(1) < self.dimension or not all_finite:
            suffix = "" if all_finite else " with NaN or infinity"
            raise ArgumentError(
                "queries",
                f"expected finite vectors [Q, {self.dimension}], "
                f"got {list(queries.shape)}{suffix}. Use the model of the documents.",
            )
        allowed = allowed_by(self.metadata, where, allowed)
        default_device = "cuda" if torch.cuda.is_available() else "cpu"
        search_device = torch.device(device or self.device or default_device)
        queries = queries[:, : self.dimension].to(search_device)
        if self.similarity == "cosine":
            queries = torch.nn.functional.normalize(queries)
        hits: list[list[Hit]] = []
        # Scores are computed in fp32, even if the caller has enabled autocast.
        with torch.autocast(search_device.type, enabled=False):
            for block in torch.split(queries, _BLOCK_QUERIES):
                scores, rows = self._search_block(block, k, allowed)
                hits += hits_of(self.ids, rows.cpu().numpy(), scores.cpu().numpy())
        return hits

    def _search_block(
        self,
        queries: Tensor,
        k: int,
        allowed: Mask | None,
    ) -> tuple[Tensor, Tensor]:
        """Find the best of all documents for a block of queries.

        Args:
            queries: ``[Q, D]`` float32, on the device of the search.
            k: number of documents per query.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.

        Returns:
            The scores and the rows of the best documents, both ``[Q, min(k, N)]``, best first. A
            document that is left out has a score of -infinity.
        """
        # The CPU waits for each selection of the best documents. With fewer queries, more documents
        # are scored per selection, in the same memory.
        n_blocks = max(1, _BLOCK_QUERIES // max(1, len(queries)))
        n_documents = n_blocks * _BLOCK_DOCUMENTS
        best_scores, best_rows = self._search_documents(queries, k, allowed, 0, n_documents)
        for start in range(n_documents, len(self.ids), n_documents):
            new_scores, new_rows = self._search_documents(
                queries, k, allowed, start, start + n_documents
            )
            # Earlier documents come first, so that equal scores stay in document order.
            candidate_scores = torch.cat([best_scores, new_scores], 1)
            candidate_rows = torch.cat([best_rows, new_rows], 1)
            best_scores, columns = top_columns(candidate_scores, k)
            best_rows = candidate_rows.gather(1, columns)
        return best_scores, best_rows

    def _search_documents(
        self,
        queries: Tensor,
        k: int,
        allowed: Mask | None,
        start: int,
        end: int,
    ) -> tuple[Tensor, Tensor]:
        """Find the best of consecutive documents for a block of queries.

        Args:
            queries: ``[Q, D]`` float32, on the device of the search.
            k: number of documents per query.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            start: row of the first document.
            end: row after the last document, which may exceed N.

        Returns:
            Scores and rows ``[Q, min(k, n)]`` of the best of the n documents, as
            :meth:`_search_block` returns them.
        """
        device = queries.device
        values, scales = self._copy_vectors_to(device)
        end = min(end, len(values))
        scores_of_blocks = []
        for block_start in range(start, end, _BLOCK_DOCUMENTS):
            rows = slice(block_start, min(block_start + _BLOCK_DOCUMENTS, end))
            documents = values[rows].to(device).float()
            if scales is not None:
                documents = documents * scales[rows, None].to(device)
            scores_of_blocks.append(self._score(queries, documents))
        scores = scores_of_blocks[0]
        if len(scores_of_blocks) > 1:
            scores = torch.cat(scores_of_blocks, 1)
        if allowed is not None:
            left_out = torch.from_numpy(~allowed[start:end]).to(device)
            scores = scores.masked_fill(left_out, -float("inf"))
        best_scores, columns = top_columns(scores, k)
        return best_scores, columns + start

    def _score(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return the scores ``[Q, N]`` of queries ``[Q, D]`` and documents ``[N, D]``."""
        if self.similarity in ("cosine", "dot"):  # the vectors are normalized for cosine
            return queries @ documents.T
        norm = 2 if self.similarity == "euclidean" else 1
        return -torch.cdist(queries, documents, p=norm)  # a smaller distance is a higher score

    def _copy_vectors_to(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the values and scales for a search on a device.

        Copies on a GPU are cached. Values that do not fit into half of the GPU's free memory stay
        on the CPU, and the search copies them block by block.
        """
        if device.type == "cpu":
            return self._values, self._scales
        device = numbered(device)

        def copy_vectors() -> tuple[Tensor, Tensor | None]:
            fits = self._values.nbytes < free_device_bytes(device) // 2
            values = copy_to_device(self._values, device) if fits else self._values
            scales = None if self._scales is None else copy_to_device(self._scales, device)
            return values, scales

        return self._copies.get(device, copy_vectors)

    @property
    def gpus(self) -> list[torch.device]:
        return [values.device for values, _ in self._copies.all() if values.is_cuda]

    @property
    def stored_tensors(self) -> list[Tensor]:
        """The values, and the scales of int8 values, as they are stored."""
        return [self._values] if self._scales is None else [self._values, self._scales]

    def stored(self) -> TokenVectors:
        """Return the vectors of the documents in their storage, one vector per document."""
        return TokenVectors(
            list(self.ids),
            torch.arange(len(self.ids) + 1),
            self._values,
            self._scales,
        )

    def vectors(self, document_ids: Iterable[str]) -> Tensor:
        """Return the vectors of n documents, float32 ``[n, D]``.

        Raises:
            MissingDocumentError: if the index does not have a document.
        """
        try:
            rows = torch.tensor(
                [self._row_of[document_id] for document_id in document_ids],
                dtype=torch.int64,
            )
        except KeyError as error:
            raise MissingDocumentError("vectors", str(error.args[0])) from error
        values = self._values[rows].float()
        return values if self._scales is None else values * self._scales[rows, None]

    def _write(self, folder: Path) -> None:
        save_tensors(folder / _FILE, values=self._values, scales=self._scales)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> DenseIndex:
        """Read the vectors of a saved index.

        Args:
            folder: the folder of the index.
            manifest: the manifest of the index.
            ids: ids of the documents.

        Raises:
            DataError: if the vectors are damaged.
        """
        tensors = read_tensors(folder / _FILE, "values", optional=("scales",))
        try:
            return cls(
                ids,
                tensors["values"],
                tensors.get("scales"),
                manifest["options"].get("similarity"),
                Provenance.from_dict(manifest),
            )
        except ValueError as error:
            raise DataError(f"{folder}: {error} {REMEDY}") from error


def top_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest values of each row and their columns, largest first.

    Lower columns win ties.

    Args:
        scores: ``[R, C]``.
        k: number of values per row. If it exceeds C, all values are returned.

    Returns:
        The values and their columns, both ``[R, min(k, C)]``.
    """
    values, columns = scores.topk(min(k, scores.size(1)), dim=1)
    # If more than k columns reach the k-th value, topk chooses arbitrarily among columns of equal
    # values. A stable sort of such a row chooses the lowest columns.
    n_selected = values.size(1)
    has_ties = (scores >= values[:, -1:]).sum(1) > n_selected
    for row in has_ties.cpu().nonzero().flatten().tolist():  # the CPU waits for the device once
        columns[row] = scores[row].sort(descending=True, stable=True).indices[:n_selected]
    # Sorting by column first makes the stable sort by value keep ties in the order of columns.
    columns = columns.sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)
