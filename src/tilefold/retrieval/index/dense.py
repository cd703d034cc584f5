"""Exact search of dense vectors: matrix products in blocks, on a CPU or a GPU, by torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tilefold._internal.arguments import check_choice, check_instance, check_k, list_of
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Fields, Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.index.protocol import REMEDY, FolderIndex, Hit, StoredIds, hits_of
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
_BLOCK, _QUERIES = 1 << 16, 256  # documents and queries of a block of scores: 64 MB
T = TypeVar("T", bound="TorchIndex")


class TorchIndex(FolderIndex):
    """Base of the indexes that torch searches, on a CPU or a GPU."""

    package = "torch"
    device: torch.device | None = None  # that searches; None is a GPU if there is one

    dimension: int  # D, the length of a vector

    def on(self: T, device: str = "cuda") -> T:
        """The index, searched on a device."""
        placed = copy.copy(self)
        placed.device = torch.device(device)
        torch.empty(1, device=placed.device)  # an error where there is none
        return placed


class DenseIndex(TorchIndex):
    """Exact search of dense vectors by the similarity that they were made for.

    Scores are taken in float32, whatever the storage, on a GPU if there is one and on the CPU
    otherwise: equal up to the order in which sums are evaluated. Equal scores are in document
    order. Every document has a score, so that a query finds `k` of them. A GPU keeps the vectors
    where they fit into half of its free memory.
    """

    backend, own_files = "dense", (_FILE,)

    def __init__(
        self,
        ids: Sequence[str],
        values: Tensor,
        scales: Tensor | None,
        similarity: str,
        provenance: Provenance,
    ) -> None:
        ids = ids if isinstance(ids, StoredIds) else list_of("ids", ids)
        check_choice("similarity", similarity, SIMILARITIES)
        check_values(values, scales)
        if not values.numel() or len(values) != len(ids):
            raise DataError(
                f"vectors: expected [{len(ids)}, D], at least one, got {list(values.shape)}.",
            )
        self.ids, self.similarity, self.provenance = ids, similarity, provenance
        self.options = {"similarity": similarity}
        self.vocab_size = self.dimension = int(values.size(1))
        self._values, self._scales = values, scales
        self._placed: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    @classmethod
    def build(
        cls,
        vectors: TokenStore | TokenVectors,
        similarity: str = "cosine",
        metadata: Mapping[str, Fields] | None = None,
    ) -> DenseIndex:
        """Index vectors of ``open_dense``, which know their similarity, or one of each text in
        memory.

        `metadata` is as in :func:`tilefold.retrieval.build_index`.
        """
        check_instance("vectors", vectors, (TokenStore, TokenVectors), "open_dense(folder)")
        made_by = Provenance()
        if isinstance(vectors, TokenStore):
            manifest = vectors.manifest
            if not isinstance(manifest, DenseManifest) or manifest.kind != "document":
                got = f"{manifest.kind} vectors of layout {manifest.layout!r} in {vectors.folder}"
                raise DataError(f"vectors: expected dense vectors of documents, got {got}.")
            if not len(vectors):
                raise ValueError(
                    f"vectors: expected at least one, got none in {vectors.folder}. Check the texts.",
                )
            similarity, made_by = manifest.similarity, manifest.provenance
            vectors = TokenVectors.concatenate(
                [vectors.shard(number) for number in range(len(manifest.shards))],
            )
        index = cls(vectors.ids, vectors.values, vectors.scales, similarity, made_by)
        index.metadata = Metadata.of(metadata, index.ids, made_by.passages)
        return index

    def search(
        self,
        queries: Tensor,
        k: int,
        *,
        device: str | torch.device | None = None,
        where: Where = None,
        allowed: Mask | None = None,
    ) -> list[list[Hit]]:
        """The `k` best documents of each query ``[Q, D]``, best first.

        Queries of more entries are cut to those that the documents kept; `allowed`, bool ``[N]``,
        leaves documents out, and so does `where`, by their metadata. A ``ValueError`` for shorter
        queries, and for numbers that are not finite.
        """
        check_instance("queries", queries, Tensor, "encode_dense(model, {id: text}, kind='query')")
        check_k(k)
        as_searched = queries.to(torch.float32)  # where large numbers of 64 bits become infinite
        all_finite = bool(as_searched.isfinite().all())
        if queries.dim() != 2 or queries.size(1) < self.dimension or not all_finite:
            got = f"{list(queries.shape)}" + ("" if all_finite else " with NaN or infinity")
            raise ValueError(
                f"queries: expected finite vectors [Q, {self.dimension}], got {got}. Take the same model.",
            )
        allowed = allowed_by(self.metadata, where, allowed)
        place = torch.device(
            device or self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
        asked = as_searched[:, : self.dimension].to(place)
        if self.similarity == "cosine":
            asked = torch.nn.functional.normalize(asked)
        found: list[list[Hit]] = []
        for part in torch.split(asked, _QUERIES):
            scores, rows = (each.cpu().numpy() for each in self._best(part, k, allowed))
            found += hits_of(self.ids, rows, scores)
        return found

    def _best(self, asked: Tensor, k: int, allowed: Mask | None) -> tuple[Tensor, Tensor]:
        best, rows = (
            asked.new_empty(len(asked), 0),
            torch.empty(len(asked), 0, dtype=torch.int64, device=asked.device),
        )
        values, scales = self._on(asked.device)
        for low in range(0, len(values), _BLOCK):
            block = values[low : low + _BLOCK].to(asked.device).float()
            if scales is not None:
                block = block * scales[low : low + _BLOCK, None].to(asked.device)
            scores = self._scores(asked, block)
            if allowed is not None:
                left_out = torch.from_numpy(~allowed[low : low + _BLOCK]).to(asked.device)
                scores = scores.masked_fill(left_out, -float("inf"))
            top, at = top_columns(scores, k)
            both, places = torch.cat([best, top], 1), torch.cat([rows, at + low], 1)
            best, at = top_columns(both, k)
            rows = places.gather(1, at)
        return best, rows

    def _scores(self, asked: Tensor, block: Tensor) -> Tensor:
        if self.similarity in ("cosine", "dot"):
            return asked @ block.T
        return -torch.cdist(asked, block, p=2 if self.similarity == "euclidean" else 1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The vectors on a device, if they fit there, else where they are."""
        if device.type == "cpu":
            return self._values, self._scales
        if device not in self._placed:
            fits = self._values.nbytes < torch.cuda.mem_get_info(device)[0] // 2
            scales = None if self._scales is None else self._scales.to(device)
            self._placed[device] = (self._values.to(device) if fits else self._values, scales)
        return self._placed[device]

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.ids)}

    def holds(self, name: str) -> bool:
        return name in self._rows

    def stored(self) -> TokenVectors:
        """The vectors of the documents as they are stored, one of each."""
        return TokenVectors(
            list(self.ids),
            torch.arange(len(self.ids) + 1),
            self._values,
            self._scales,
        )

    def vectors(self, names: Iterable[str]) -> Tensor:
        """The vectors of documents, float32 ``[n, D]``; a ``MissingDocumentError`` for one that is
        not there.
        """
        try:
            rows = torch.tensor([self._rows[name] for name in names], dtype=torch.int64)
        except KeyError as error:
            raise MissingDocumentError("vectors", str(error.args[0])) from error
        values = self._values[rows].float()
        return values if self._scales is None else values * self._scales[rows, None]

    def _write(self, folder: Path) -> None:
        save_tensors(folder / _FILE, values=self._values, scales=self._scales)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> DenseIndex:
        found, made_by = read_tensors(folder / _FILE, "values"), Provenance.from_dict(manifest)
        try:
            return cls(
                ids,
                found["values"],
                found.get("scales"),
                manifest["options"].get("similarity"),
                made_by,
            )
        except ValueError as error:
            raise DataError(f"{folder}: {error} {REMEDY}") from error


def top_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row and their columns, largest first, equal ones by column."""
    values, columns = scores.topk(min(k, scores.size(1)), dim=1)
    tied = (scores >= values[:, -1:]).sum(1) > values.size(1)
    for row in tied.nonzero().flatten().tolist():
        columns[row] = scores[row].sort(descending=True, stable=True).indices[: columns.size(1)]
    columns = columns.sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)
