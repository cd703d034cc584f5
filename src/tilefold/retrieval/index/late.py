"""Late interaction over a collection: exact search of packed token vectors by MaxSim.

A CPU scores only the candidates that centroids find, if the collection is large.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_count,
    check_instance,
    check_k,
    path_of,
)
from tilefold._internal.memory import free_device_bytes
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Fields, Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.index import token_blocks
from tilefold.retrieval.index.centroids import CENTROID_FILES, FEWEST_TOKENS, Centroids
from tilefold.retrieval.index.dense import TorchIndex, top_columns
from tilefold.retrieval.index.devices import DeviceCopies, Devices, device_list, numbered
from tilefold.retrieval.index.protocol import REMEDY, SEGMENTS, Hit, StoredIds, hits_of
from tilefold.retrieval.index.token_blocks import (
    STORAGES,
    STREAMED_TOKENS,
    Chunk,
    DeviceDocuments,
    QueryBatch,
    TokenFiles,
    maxsim_scores,
)
from tilefold.retrieval.vectors.sparse import check_ids
from tilefold.retrieval.vectors.tokens import TokenManifest, TokenStore, TokenVectors

__all__ = ["LateIndex"]

# Smallest number of candidates that a CPU scores for each hit that is returned.
_MIN_CANDIDATES_PER_HIT = 10
# Number of tokens of a block on a CPU.
_CPU_BLOCK_TOKENS = 1 << 17
# Largest number of queries that share a pass over the documents.
_MAX_QUERIES_PER_PASS = 64
# Largest number of scores of a pass: queries times documents.
_MAX_SCORES_PER_PASS = 1 << 29
# Fraction of a GPU's free memory that documents may take.
_MEMORY_FRACTION = 0.75
# Number of documents that are copied at a time while segments are merged.
_MERGED_DOCUMENTS = 1024

# The number of candidates is the smallest of these with which the mean recall of the ten best
# documents is high enough.
_CANDIDATE_COUNTS = (250, 500, 1000, 2000, 4000)
_RECALL_DEPTH = 10
_MIN_RECALL = 0.985
# Number of queries that recall is measured on, and tokens of a query that is a piece of a document.
_MEASURED_QUERIES = 32
_PIECE_TOKENS = 16

_QUERIES_REMEDY = "encode_texts(model, queries, kind='query')"


class LateIndex(TorchIndex):
    """Index of token vectors in a memory-mapped folder, searched by MaxSim.

    ``score(q, d) = sum over query tokens i of max over document tokens j of q_i . d_j``, in fp32
    from the stored vectors, as :func:`tilefold.ops.maxsim` computes it. A CPU and a GPU give the
    same scores within rounding.

    A GPU scores every document. A CPU scores only candidates, whose scores are the highest by an
    estimate (:class:`Centroids`), or every document of a small collection. Documents without tokens
    are never returned, and a query without tokens has no results.

    Attributes:
        n_candidates: number of documents that a CPU scores for a query. It was chosen when the
            index was built, so that on average 98.5% of the ten best documents are candidates. 0
            for a small collection, which has no centroids.
        recall: fraction of the ten best documents that were among the candidates, on held-out
            queries; None without centroids.

    Examples:
        >>> import torch
        >>> from tilefold.retrieval import TokenVectors
        >>> tokens = torch.nn.functional.normalize(torch.randn(3, 12, 16), dim=-1)
        >>> documents = TokenVectors.pack(["a", "b", "c"], list(tokens), 16, "fp16")
        >>> index = LateIndex.build(documents, "late-index")
        >>> queries = TokenVectors.pack(["q"], [tokens[1, :4]], 16, "fp16")
        >>> index.search(queries, k=3)[0][0].id
        'b'
    """

    backend = "late"
    is_divisible = True
    own_files = (*token_blocks.FILES, *CENTROID_FILES)
    # Each document has a checksum in them, which is compared when a query reads it.
    checked_lazily = (token_blocks.VALUES, token_blocks.SCALES)

    def __init__(
        self,
        ids: Sequence[str],
        files: TokenFiles,
        centroids: Centroids | None,
        options: Json,
        provenance: Provenance,
    ) -> None:
        """Wrap token files as an index.

        Args:
            ids: ids of the documents.
            files: token vectors of the documents.
            centroids: centroids that find candidates; None for a small collection.
            options: storage, pooling, dimension, number of candidates and their recall.
            provenance: model and texts that the vectors were computed from.
        """
        self.ids = ids
        self.files = files
        self.provenance = provenance
        self.options: Json = options
        self.dimension = files.dimension
        # The manifests of all indexes have a vocab_size. Token vectors store their dimension in it.
        self.vocab_size = self.dimension
        self._centroids = centroids
        self._has_tokens = files.lengths > 0
        # Names of devices that search together -> the documents of each device.
        self._device_documents: DeviceCopies[list[DeviceDocuments]] = DeviceCopies()

    @classmethod
    def build(
        cls,
        vectors: TokenStore | TokenVectors,
        folder: str | Path,
        *,
        storage: str = "int8",
        pool_factor: int = 1,
        queries: TokenVectors | None = None,
        metadata: Mapping[str, Fields] | None = None,
        overwrite: bool = False,
    ) -> LateIndex:
        """Write an index of token vectors into `folder`, shard by shard, and open it.

        Args:
            vectors: token vectors of documents, from :func:`tilefold.retrieval.open_tokens` or in
                memory.
            folder: the folder to write, new or empty.
            storage: ``"int8"``; ``"fp16"``, twice as large; or ``"int4"``, half as large (see
                :func:`tilefold.retrieval.index.token_blocks.to_storage`).
            pool_factor: number of tokens of a document per stored vector, on average. A stored
                vector is the mean of a cluster of tokens by Ward's method, as
                ``HierarchicalTokenPooling`` of sentence-transformers computes it (arXiv
                2409.14683). All vectors are then normalized to unit length. The first token of a
                document is kept as it is.
            queries: token vectors of queries, on which the number of candidates is chosen and
                recall is measured. None uses pieces of documents, and ignores the document that a
                piece was taken from.
            metadata: document id -> fields, which ``search(where=...)`` filters by.
            overwrite: whether to replace an existing index of this backend in `folder`.

        Raises:
            ValueError: if the vectors are those of queries, if there are no vectors, or if the
                storage or the factor is unknown.
            DataError: if the vectors are damaged.
            FileExistsError: if `folder` has an index and `overwrite` is False.
        """
        check_instance("vectors", vectors, (TokenStore, TokenVectors), "open_tokens(folder)")
        check_choice("storage", storage, STORAGES)
        check_count("pool_factor", pool_factor)
        if queries is not None:
            check_instance("queries", queries, TokenVectors, _QUERIES_REMEDY)
        provenance = Provenance()
        shards: Iterable[TokenVectors]
        if isinstance(vectors, TokenStore):
            _check_document_tokens(vectors)
            provenance = vectors.manifest.provenance
            shards = vectors.iter_shards()
        else:
            shards = [vectors]
        if storage == "int4" and vectors.dimension % 2:
            raise ArgumentError(
                "storage",
                f"expected vectors of an even dimension for 'int4', which packs two entries into a "
                f"byte, got dimension {vectors.dimension}.",
            )
        options: Json = {
            "storage": storage,
            "pool_factor": pool_factor,
            "dimension": vectors.dimension,
        }
        if pool_factor > 1:
            options["pooling"] = token_blocks.POOLING
        return cls._write_index(
            path_of("folder", folder),
            token_blocks.chunks_of(shards, storage, pool_factor),
            options,
            provenance,
            metadata,
            queries,
            overwrite=overwrite,
        )

    def build_segment(
        self,
        vectors: TokenStore | TokenVectors,
        folder: Path,
        metadata: Mapping[str, Fields] | None,
    ) -> LateIndex:
        """Write an index of new documents with the storage and pooling of this index.

        Args:
            vectors: token vectors of the documents.
            folder: the folder of the new index.
            metadata: document id -> fields of the new documents.

        Raises:
            DataError: if the vectors of this index were pooled in another or an unknown way.
        """
        pool_factor = self.options["pool_factor"]
        pooling = self.options.get("pooling")
        if pool_factor > 1 and pooling != token_blocks.POOLING:
            recorded = "no record of the pooling" if pooling is None else f"{pooling}"
            raise DataError(
                f"{self.files.folder}: expected vectors that were pooled as "
                f"{token_blocks.POOLING}, got {recorded}; the scores of new documents would not be "
                "comparable. Build the index again, from the token vectors of all documents.",
            )
        return self.build(
            vectors,
            folder,
            storage=self.options["storage"],
            pool_factor=pool_factor,
            metadata=metadata,
        )

    @classmethod
    def _write_index(
        cls,
        folder: Path,
        chunks: Iterable[Chunk],
        options: Json,
        provenance: Provenance,
        metadata: Mapping[str, Fields] | Metadata | None,
        queries: TokenVectors | None = None,
        *,
        overwrite: bool,
    ) -> LateIndex:
        """Write an index atomically, and open it.

        A large collection gets centroids, which find the candidates of a query.

        Args:
            folder: the folder of the index.
            chunks: all documents, a few at a time.
            options: options of the index, without the number of candidates and their recall.
            provenance: model and texts that the vectors were computed from.
            metadata: metadata of the documents, by id or as another index stores them.
            queries: queries that recall is measured on; None uses pieces of documents.
            overwrite: whether to replace an existing index.
        """
        with cls._new_folder(folder, overwrite=overwrite) as new_folder:
            ids = _write_chunks(new_folder, chunks)
            files = TokenFiles(new_folder, len(ids), options["dimension"], options["storage"])
            index_centroids = None
            if files.n_tokens >= FEWEST_TOKENS:
                index_centroids = Centroids.fit(
                    lambda: files.blocks(_CPU_BLOCK_TOKENS),
                    len(ids),
                    files.n_tokens,
                )
                index_centroids.save(new_folder)
            index_options = {**options, "n_candidates": 0, "recall": None}
            index = cls(ids, files, index_centroids, index_options, provenance)
            if index_centroids is not None:
                n_candidates, recall = index._choose_candidates(index_centroids, queries)
                index.options["n_candidates"] = n_candidates
                index.options["recall"] = recall
            if isinstance(metadata, Metadata):
                index.metadata = metadata
            else:
                index.metadata = Metadata.from_fields(metadata, ids, provenance.passages)
            index._finish(new_folder)
        return cls.load(folder)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> LateIndex:
        """Map the token files of a saved index into memory, and open its centroids.

        Args:
            folder: the folder of the index.
            manifest: the manifest of the index.
            ids: ids of the documents.

        Raises:
            DataError: if an option is wrong, or a file is damaged.
        """
        options = manifest["options"]
        storage = options.get("storage")  # the number type of the stored vectors
        if storage not in STORAGES:
            raise DataError(
                f"{folder}: expected a storage of {', '.join(STORAGES)}, got {storage!r}. {REMEDY}",
            )
        dimension = options.get("dimension")
        # The vocab_size of a manifest is the dimension of token vectors.
        if dimension != manifest["vocab_size"]:
            raise DataError(
                f"{folder}: expected the dimension {manifest['vocab_size']} among the options, "
                f"got {dimension!r}. {REMEDY}",
            )
        return cls(
            ids,
            TokenFiles(folder, len(ids), dimension, storage),
            Centroids.load(folder, dimension),
            options,
            Provenance.from_dict(manifest),
        )

    def _write(self, folder: Path) -> None:
        shutil.copytree(
            self.files.folder,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(SEGMENTS, ".*"),
        )

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Copy the index to another folder, or do nothing if it is in that folder.

        Args:
            path: the folder, new or empty.
            overwrite: whether to replace an existing index of this backend.
        """
        if path_of("path", path).resolve() != self.files.folder.resolve():
            with self._new_folder(path, overwrite=overwrite) as folder:
                self._write(folder)

    @classmethod
    def merge(
        cls,
        parts: Sequence[LateIndex],
        rows_by_part: Sequence[Sequence[int]],
        folder: Path,
        provenance: Provenance,
        metadata: Metadata | None,
    ) -> LateIndex:
        """Write one index of selected documents of several indexes, and open it.

        Args:
            parts: the indexes, built with the same options.
            rows_by_part: the rows of the documents that are copied from each part.
            folder: the folder of the new index. An index in it is replaced.
            provenance: model and texts that the vectors were computed from.
            metadata: metadata of the copied documents; None if there are none.
        """
        first_options = parts[0].options
        options: Json = {
            name: first_options[name] for name in ("storage", "pool_factor", "dimension")
        }
        # The pooling is recorded only if all parts record it. Indexes of old releases do not.
        if all(part.options.get("pooling") == token_blocks.POOLING for part in parts):
            options["pooling"] = token_blocks.POOLING
        chunks = itertools.chain.from_iterable(
            part._iterate_chunks(rows) for part, rows in zip(parts, rows_by_part, strict=True)
        )
        return cls._write_index(folder, chunks, options, provenance, metadata, overwrite=True)

    def _iterate_chunks(self, rows: Sequence[int]) -> Iterator[Chunk]:
        """Iterate over some documents of this index, a few at a time, with their stored vectors.

        Args:
            rows: rows of the documents.
        """
        for low in range(0, len(rows), _MERGED_DOCUMENTS):
            documents = np.array(rows[low : low + _MERGED_DOCUMENTS], np.int64)
            vectors, _ = self.files.take(documents)
            ids = [self.ids[row] for row in documents.tolist()]
            yield Chunk(ids, self.files.lengths[documents], vectors)

    def token_vectors(self, document_ids: Iterable[str]) -> list[Tensor]:
        """Return the stored token vectors of documents, one fp32 tensor ``[tokens, D]`` per id.

        Raises:
            MissingDocumentError: if the index does not have a document.
        """
        documents = []
        for document_id in document_ids:
            if not self.holds(document_id):
                raise MissingDocumentError("document_ids", document_id)
            row = self._row_of[document_id]
            documents.append(self.files.document_range(row, row + 1).floats())
        return documents

    @property
    def n_candidates(self) -> int:
        return int(self.options.get("n_candidates") or 0)

    @property
    def recall(self) -> float | None:
        return self.options.get("recall")

    def search(
        self,
        queries: TokenVectors,
        k: int,
        *,
        device: Devices | None = None,
        candidates: int | None = None,
        where: Where = None,
        allowed: Mask | None = None,
        reduction: str = "sum",
    ) -> list[list[Hit]]:
        """Return the `k` best documents of each query, best first.

        If fewer than `k` documents have tokens, all of them are returned. Documents of equal scores
        are in the order of the index; if some of them tie for the last place, a GPU scores the
        documents a second time to choose the first of them. If both `where` and `allowed` are
        passed, documents must match both.

        Args:
            queries: token vectors in fp16 or fp32, of the index's dimension.
            k: number of documents per query.
            device: a device, or a list of devices among which the documents are divided. None uses
                those of :meth:`on`, or a GPU if there is one. Documents that do not fit into its
                free memory are spread over all GPUs of the machine. If they do not fit there
                either, they are copied block by block during the search.
            candidates: number of documents that a CPU scores for each query, at least ten times
                `k`; 0 scores all. None uses :attr:`n_candidates`.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"``, or ``"mean"`` over the tokens of a query.

        Raises:
            ValueError: if the vectors have another dimension, or contain NaN or infinity.
            DataError: if the vectors of a document are damaged.
        """
        check_k(k)
        self._check_queries(queries)
        allowed = allowed_by(self.metadata, where, allowed)
        devices = self._choose_devices(self.devices if device is None else device)
        n_candidates = self.n_candidates if candidates is None else candidates
        if n_candidates:
            n_candidates = max(n_candidates, _MIN_CANDIDATES_PER_HIT * k)
        # A query without tokens has no results.
        query_lengths = queries.offsets.diff().tolist()
        query_rows = [row for row, length in enumerate(query_lengths) if length]
        query_vectors = [queries.rows(row) for row in query_rows]
        is_on_cpu = devices[0].type == "cpu"
        # Candidates save little time if they are half of the documents or more. 0 means all.
        few_candidates = 0 < n_candidates < self.n_documents // 2
        if is_on_cpu and few_candidates and self._centroids is not None:
            hits_of_queries = self._search_candidates(
                self._centroids,
                query_vectors,
                k,
                n_candidates,
                allowed,
                reduction,
            )
        else:
            hits_of_queries = self._search_all(query_vectors, k, devices, allowed, reduction)
        hits: list[list[Hit]] = [[] for _ in range(len(queries))]
        for row, query_hits in zip(query_rows, hits_of_queries, strict=True):
            hits[row] = query_hits
        return hits

    def _check_queries(self, queries: TokenVectors) -> None:
        """Raise an error if queries are not finite floats of the index's dimension.

        Raises:
            TypeError: if `queries` are not ``TokenVectors``.
            ArgumentError: if the vectors are quantized, have another dimension, or are not finite.
        """
        check_instance("queries", queries, TokenVectors, _QUERIES_REMEDY)
        expected = f"expected finite fp16 or fp32 of dimension {self.dimension}"
        if queries.scales is not None:
            raise ArgumentError("queries", f"{expected}, got {queries.values.dtype}.")
        if queries.dimension != self.dimension:
            raise ArgumentError("queries", f"{expected}, got dimension {queries.dimension}.")
        # numpy is used because torch would wake all its threads, which takes milliseconds.
        if not np.isfinite(queries.values.detach().cpu().numpy()).all():
            raise ArgumentError("queries", f"{expected}, got NaN or infinity.")

    def _search_candidates(
        self,
        centroids: Centroids,
        queries: Sequence[Tensor],
        k: int,
        n_candidates: int,
        allowed: Mask | None,
        reduction: str,
    ) -> list[list[Hit]]:
        """Return the `k` best candidates of each query, scored on a CPU.

        Args:
            centroids: centroids that find the candidates of a query.
            queries: token vectors of each query, ``[L, D]``.
            k: number of documents per query.
            n_candidates: number of candidates to score exactly.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        """
        can_be_returned = self._has_tokens if allowed is None else allowed & self._has_tokens
        all_rows = np.flatnonzero(can_be_returned)
        hits = []
        for query in queries:
            candidate_rows = all_rows
            if len(all_rows) > n_candidates:
                candidate_rows = centroids.candidates(query, n_candidates, can_be_returned)
            vectors, offsets = self.files.take(candidate_rows)
            batch = QueryBatch.pad([query], torch.device("cpu"))
            scores = maxsim_scores(batch, vectors, offsets, reduction)
            best_scores, best_columns = top_columns(scores, k)
            # Column i of the scores is the i-th candidate.
            best_rows = candidate_rows[best_columns.numpy()]
            hits += hits_of(self.ids, best_rows, best_scores.numpy())
        return hits

    def _search_all(
        self,
        queries: Sequence[Tensor],
        k: int,
        devices: Sequence[torch.device],
        allowed: Mask | None,
        reduction: str,
    ) -> list[list[Hit]]:
        """Return the `k` best of all documents for each query.

        A pass over the documents scores several queries. Their number is limited by the memory of
        the scores.

        Args:
            queries: token vectors of each query, ``[L, D]``.
            k: number of documents per query.
            devices: devices among which the documents are divided.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        """
        queries_that_fit = _MAX_SCORES_PER_PASS // max(1, self.n_documents)
        queries_per_pass = max(1, min(_MAX_QUERIES_PER_PASS, queries_that_fit))
        hits = []
        for start in range(0, len(queries), queries_per_pass):
            pass_queries = queries[start : start + queries_per_pass]
            scores, rows = self._top_documents(pass_queries, k, devices, allowed, reduction)
            hits += hits_of(self.ids, rows, scores)
        return hits

    def _top_documents(
        self,
        queries: Sequence[Tensor],
        k: int,
        devices: Sequence[torch.device],
        allowed: Mask | None = None,
        reduction: str = "sum",
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Find the best of all documents for some queries in one pass.

        Args:
            queries: token vectors of Nq queries.
            k: number of documents per query.
            devices: devices among which the documents are divided.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.

        Returns:
            Scores and rows of the best documents, both ``[Nq, min(k, N)]``, best first.
        """
        batch = QueryBatch.pad(queries, torch.device("cpu"))
        parts = self._documents_on(devices)
        if not any(_runs_ahead(part.device) for part in parts):
            return self._scan_all(batch, parts, k, allowed, reduction, resolves_ties=True)
        # Documents of equal scores are ranked in the order of the index. Ensuring this takes a wait
        # for the GPU after each block. It matters only if documents k and k + 1 have equal scores,
        # which a search for k + 1 documents finds out.
        scores, rows = self._scan_all(
            batch,
            parts,
            k + 1,
            allowed,
            reduction,
            resolves_ties=False,
        )
        if _ties_at_last_place(scores, k):
            return self._scan_all(batch, parts, k, allowed, reduction, resolves_ties=True)
        return scores[:, :k], rows[:, :k]

    def _scan_all(
        self,
        batch: QueryBatch,
        parts: Sequence[DeviceDocuments],
        k: int,
        allowed: Mask | None,
        reduction: str,
        *,
        resolves_ties: bool,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Score the documents of all devices at the same time, and select the best.

        Args:
            batch: Nq queries on the CPU.
            parts: the documents of each device.
            k: number of documents per query.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
            resolves_ties: whether the first documents in the order of the index are chosen among
                those that tie for the last place. Otherwise the choice is arbitrary.

        Returns:
            Scores and rows of the best documents, both ``[Nq, min(k, N)]``, best first.
        """
        # Generators that score one block per step.
        scans = [
            self._scan(
                documents,
                batch.to(documents.device),
                k,
                allowed,
                reduction,
                resolves_ties=resolves_ties,
            )
            for documents in parts
        ]
        # Number of the scan -> its last result, which is the best of all its documents.
        last_results: dict[int, tuple[Tensor, Tensor]] = {}
        # Each iteration starts one block on every device without waiting for it, so that the
        # devices work at the same time. A scan that has ended yields None.
        for results in itertools.zip_longest(*scans):
            for number, result in enumerate(results):
                if result is not None:
                    last_results[number] = result
        best = last_results.values()
        scores = np.concatenate([device_scores.cpu().numpy() for device_scores, _ in best], 1)
        rows = np.concatenate([device_rows.cpu().numpy() for _, device_rows in best], 1)
        # lexsort sorts by its last key first: by descending score, then by ascending row.
        order = np.lexsort((rows, -scores))[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _scan(
        self,
        documents: DeviceDocuments,
        batch: QueryBatch,
        k: int,
        allowed: Mask | None,
        reduction: str,
        *,
        resolves_ties: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Score the documents of a device block by block.

        Args:
            documents: the documents that the device searches.
            batch: Nq queries on the device.
            k: number of documents per query.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
            resolves_ties: whether the first documents are chosen among those that tie for the last
                place, which waits for the device after each block. Otherwise the choice is
                arbitrary.

        Yields:
            After each block, the scores and the rows of the best documents so far, both
            ``[Nq, k]`` and best first. There are fewer columns while fewer documents were scored.
        """
        on_cpu = documents.device.type == "cpu"
        first_of_device = documents.first_document
        excluded = documents.without_tokens  # bool, over the documents of the device
        if allowed is not None:
            can_be_returned = allowed & self._has_tokens
            device_mask = can_be_returned[first_of_device : documents.end_document]
            excluded = torch.from_numpy(~device_mask).to(documents.device)
        best: tuple[Tensor, Tensor] | None = None
        for block in documents.blocks(_CPU_BLOCK_TOKENS if on_cpu else STREAMED_TOKENS):
            scores = maxsim_scores(batch, block.vectors, block.offsets, reduction)
            if excluded is not None:
                begin = block.first_document - first_of_device
                end = block.end_document - first_of_device
                scores = scores.masked_fill_(excluded[begin:end], -float("inf"))
            if resolves_ties:
                top_scores, rows = top_columns(scores, k)
            else:
                top_scores, rows = scores.topk(min(k, scores.size(1)), dim=1)
            rows += block.first_document  # from columns of the block to rows of the index
            best = (top_scores, rows) if best is None else _merge_top(best, (top_scores, rows), k)
            yield best

    def _choose_devices(self, device: Devices | None) -> list[torch.device]:
        """Choose the devices of a search.

        Args:
            device: one device, a list of devices, or None for a GPU if there is one. ``"cuda"`` is
                spread over all GPUs if the documents do not fit into the free memory of one GPU.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        devices = device_list(device)
        if len(devices) > 1:
            return devices
        (single_device,) = devices
        # "cuda:1" names one GPU, and "cuda" allows any number of GPUs.
        names_one_device = str(single_device) != "cuda"
        n_gpus = torch.cuda.device_count()
        if names_one_device or n_gpus < 2:
            return [single_device]
        with self._device_documents.lock:  # a copy that is being made takes up the memory
            already_on_one_gpu = (numbered(single_device),) in self._device_documents
            if already_on_one_gpu or self._fits(single_device, self.files.nbytes):
                return [single_device]
        return [torch.device("cuda", number) for number in range(n_gpus)]

    @property
    def gpus(self) -> list[torch.device]:
        return [
            documents.resident.values.device
            for documents_of_devices in self._device_documents.all()
            for documents in documents_of_devices
            if documents.resident is not None
        ]

    def _documents_on(self, devices: Sequence[torch.device]) -> list[DeviceDocuments]:
        """Divide the documents among devices, so that each gets about the same number of tokens.

        The result is cached. The first call copies the documents to GPUs that have enough memory.

        Args:
            devices: devices that search together.

        Returns:
            Consecutive documents for each device. A device without documents is left out.
        """
        numbered_devices = tuple(map(numbered, devices))
        return self._device_documents.get(
            numbered_devices,
            lambda: self._divide_documents(numbered_devices),
        )

    def _divide_documents(self, devices: Sequence[torch.device]) -> list[DeviceDocuments]:
        """Divide the documents among devices, and copy them to GPUs that have enough memory.

        Args:
            devices: devices that search together.

        Returns:
            Consecutive documents for each device. A device without documents is left out.
        """
        n_devices = len(devices)
        # Token offsets at which equal shares would end. A device ends before the first document
        # at or after its offset.
        ideal_offsets = np.linspace(0, self.files.n_tokens, n_devices + 1)[1:-1]
        inner_bounds = np.searchsorted(self.files.offsets, ideal_offsets)
        bounds = [0, *inner_bounds.tolist(), self.n_documents]
        n_bytes = self.files.nbytes // n_devices
        parts = []
        for device, (first, end) in zip(devices, itertools.pairwise(bounds), strict=True):
            if first < end:
                fits = self._fits(device, n_bytes)
                parts.append(DeviceDocuments(self.files, device, first, end, copy=fits))
        return parts

    def _fits(self, device: torch.device, n_bytes: int) -> bool:
        """Return whether a device is a GPU whose free memory has room for a number of bytes."""
        if device.type != "cuda":
            return False
        return n_bytes < free_device_bytes(device) * _MEMORY_FRACTION

    def _choose_candidates(
        self,
        centroids: Centroids,
        queries: TokenVectors | None,
    ) -> tuple[int, float]:
        """Choose the number of candidates by their recall of the best documents.

        An exact search finds the ten best documents of some queries. The result is the smallest of
        a few numbers with which, on average, 98.5% of these documents are among the candidates.

        Args:
            centroids: centroids that find the candidates of a query.
            queries: token vectors of queries. None uses pieces of documents as queries.

        Returns:
            The number of candidates, and the mean fraction of the best documents among them.
        """
        # The row of the document that each query was taken from, or None.
        sources: Sequence[int | None]
        if queries is None:
            query_vectors, sources = self._take_document_pieces()
        else:
            n_queries = min(len(queries), _MEASURED_QUERIES)
            query_vectors = [queries.rows(row) for row in range(n_queries)]
            query_vectors = [vectors for vectors in query_vectors if vectors.numel()]
            sources = [None] * len(query_vectors)
        # One extra document, because the source of a piece does not count.
        depth = _RECALL_DEPTH if queries is not None else _RECALL_DEPTH + 1
        _, ranked = self._top_documents(query_vectors, depth, [torch.device("cpu")])
        best_documents = [
            [row for row in rows if row != source][:_RECALL_DEPTH]
            for rows, source in zip(ranked.tolist(), sources, strict=True)
        ]
        n_candidates = 0
        recall = 0.0
        for n_candidates in _CANDIDATE_COUNTS:  # ascending; the last one is used if none is enough
            recalls = []
            for vectors, best in zip(query_vectors, best_documents, strict=True):
                retrieved = centroids.candidates(vectors, n_candidates, self._has_tokens)
                if best:  # empty if the piece's own document is the only one
                    n_retrieved = len(set(retrieved.tolist()).intersection(best))
                    recalls.append(n_retrieved / len(best))
            recall = float(np.mean(recalls))
            if recall >= _MIN_RECALL:
                break
        return n_candidates, round(recall, 4)

    def _take_document_pieces(self) -> tuple[list[Tensor], list[int]]:
        """Take consecutive tokens of random documents, which serve as queries.

        The random numbers have a fixed seed, so that every build gives the same index.

        Returns:
            Token vectors of the pieces, and the row of the document of each piece.
        """
        generator = np.random.default_rng(0)
        documents = np.flatnonzero(self._has_tokens)
        n_pieces = min(_MEASURED_QUERIES, len(documents))
        rows: list[int] = generator.choice(documents, n_pieces, replace=False).tolist()
        pieces = []
        for row in rows:
            n_starts = max(1, int(self.files.lengths[row]) - _PIECE_TOKENS)
            start = int(generator.integers(n_starts))
            vectors = self.files.document_range(row, row + 1).floats()
            pieces.append(vectors[start : start + _PIECE_TOKENS])
        return pieces, rows


def _check_document_tokens(store: TokenStore) -> None:
    """Raise an error if a folder does not hold token vectors of documents.

    Args:
        store: the opened folder.
    """
    manifest = store.manifest
    if manifest.layout != TokenManifest.LAYOUT or manifest.kind != "document":
        raise ArgumentError(
            "vectors",
            "expected token vectors of documents, got "
            f"{manifest.kind} vectors of layout {manifest.layout!r} in {store.folder}.",
        )


def _runs_ahead(device: torch.device) -> bool:
    """Return whether a device computes asynchronously, while this process goes on: a GPU does."""
    return device.type != "cpu"


def _merge_top(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    k: int,
) -> tuple[Tensor, Tensor]:
    """Return the best `k` of two rankings, best first. Equal scores are in the order of `first`.

    Args:
        first: scores and rows of documents, both ``[Nq, n]``, best first.
        second: scores and rows of other documents, both ``[Nq, m]``, best first.
        k: number of documents per query.

    Returns:
        Scores and rows, both ``[Nq, min(k, n + m)]``.
    """
    scores = torch.cat([first[0], second[0]], dim=1)
    rows = torch.cat([first[1], second[1]], dim=1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order), rows.gather(1, order)


def _ties_at_last_place(scores: npt.NDArray[np.float32], k: int) -> bool:
    """Return whether, for some query, documents `k` and `k` + 1 have the same score.

    Args:
        scores: ``[Nq, n]``, descending; -infinity for documents that are left out.
        k: number of documents per query.
    """
    if scores.shape[1] <= k:
        return False
    last_scores = scores[:, k - 1]
    next_scores = scores[:, k]
    return bool(((last_scores == next_scores) & np.isfinite(last_scores)).any())


def _write_chunks(folder: Path, chunks: Iterable[Chunk]) -> list[str]:
    """Write the token vectors, offsets and checksums of an index into its folder.

    Args:
        folder: the folder of the index.
        chunks: all documents, a few at a time.

    Returns:
        Ids of the documents.

    Raises:
        ArgumentError: if there are no tokens.
        DataError: if an id is empty or repeated.
    """
    ids: list[str] = []
    lengths: list[npt.NDArray[np.int64]] = []
    checksums: list[npt.NDArray[np.uint32]] = []
    with (
        (folder / token_blocks.VALUES).open("wb") as values_file,
        (folder / token_blocks.SCALES).open("wb") as scales_file,
    ):
        for chunk in chunks:
            ids += chunk.ids
            lengths.append(chunk.lengths)
            arrays = token_blocks.file_arrays(chunk.vectors)
            values_file.write(arrays[0].data)
            # fp16 vectors have no scales, so their file stays empty.
            if chunk.vectors.scales is not None:
                scales_file.write(arrays[1].data)
            # Exclusive end of each document, as an offset in the chunk.
            ends = np.cumsum(chunk.lengths)
            checksums.append(token_blocks.checksums(arrays, ends - chunk.lengths, ends))
    check_ids(ids)
    no_lengths = np.zeros(0, np.int64)  # lets concatenate work without documents
    offsets = offsets_of(np.concatenate([no_lengths, *lengths]))
    if not offsets[-1]:
        raise ArgumentError(
            "vectors",
            f"expected at least one token vector, but none of the {len(ids)} texts has one. "
            "Check the texts.",
        )
    np.save(folder / token_blocks.OFFSETS, offsets)
    np.save(folder / token_blocks.CHECKSUMS, np.concatenate(checksums))
    return ids
