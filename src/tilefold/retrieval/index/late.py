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
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Fields, Mask, Metadata, Where, allowed_by
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import centroids, token_blocks
from tilefold.retrieval.index.centroids import Centroids
from tilefold.retrieval.index.dense import TorchIndex, top_columns
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

# Tokens of a block on a CPU.
_CPU_BLOCK_TOKENS = 1 << 17
# Queries that share a pass over the documents.
_PASS_QUERIES = 64
# Scores of a pass, which is queries times documents.
_PASS_SCORES = 1 << 29
# Fraction of a GPU's free memory that documents may take.
_MEMORY_FRACTION = 0.75
# Documents that are copied at a time while segments are merged.
_MERGED_DOCUMENTS = 1024

# How the number of candidates is chosen: the least of these numbers with which a mean recall of
# the ten best documents is reached.
_CANDIDATE_COUNTS = (250, 500, 1000, 2000, 4000)
_RECALL_DEPTH = 10
_MIN_RECALL = 0.985
# Queries that recall is measured on, and tokens of each that is a piece of a document.
_MEASURED_QUERIES = 32
_PIECE_TOKENS = 16

_QUERIES_REMEDY = "encode_texts(model, queries, kind='query')"


class LateIndex(TorchIndex):
    """Index of token vectors in a memory-mapped folder, searched by MaxSim.

    ``score(q, d) = sum over query tokens i of max over document tokens j of q_i . d_j``, in fp32
    from the stored vectors, as :func:`tilefold.ops.maxsim` computes it. A CPU and a GPU give the
    same scores within rounding.

    A GPU scores every document, and so does a CPU without candidates. With candidates, a CPU scores
    the documents that :class:`Centroids` estimates to be the best. Documents without tokens are
    never returned, and a query without tokens has no results.

    Attributes:
        n_candidates: documents that a CPU scores for a query. It was chosen when the index was
            built, so that .985 of the ten best documents are among them. 0 for a small collection,
            which has no centroids.
        recall: fraction of the ten best documents that were among the candidates, on held-out
            queries. None without centroids.
    """

    backend = "late"
    own_files = (*token_blocks.FILES, *centroids.FILES)
    # Their documents have checksums, which are compared when a query reads them.
    unread = (token_blocks.VALUES, token_blocks.SCALES)

    def __init__(
        self,
        ids: Sequence[str],
        files: TokenFiles,
        candidate_lists: Centroids | None,
        options: Json,
        provenance: Provenance,
    ) -> None:
        """Create an index of token files.

        Args:
            ids: ids of the documents.
            files: token vectors of the documents.
            candidate_lists: centroids that find candidates; None for a small collection.
            options: storage, pooling, dimension, number of candidates and their recall.
            provenance: model and texts that the vectors were computed from.
        """
        self.ids = ids
        self.files = files
        self.provenance = provenance
        self.options: Json = options
        self.dimension = files.dimension
        self.vocab_size = files.dimension
        self._centroids = candidate_lists
        self._has_tokens = files.lengths > 0
        # Names of devices that search together -> the part of the documents of each device.
        self._device_documents: dict[tuple[str, ...], list[DeviceDocuments]] = {}

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
            vectors: of documents, from :func:`tilefold.retrieval.open_tokens` or in memory.
            folder: to write, new or empty.
            storage: ``"int8"``; ``"fp16"``, twice as large; or ``"int4"``, half as large (see
                :func:`tilefold.retrieval.index.token_blocks.to_storage`).
            pool_factor: tokens of a document per stored vector, on average. A stored vector is the
                mean of a cluster of tokens by Ward's method, as ``HierarchicalTokenPooling`` of
                sentence-transformers computes it (arXiv 2409.14683). All vectors are then brought
                to length 1. The first token of a document is in no cluster.
            queries: on which the number of candidates is chosen and recall is measured. By default
                pieces of documents, whose own documents do not count.
            metadata: as in :func:`tilefold.retrieval.build_index`.
            overwrite: replace an earlier index of this backend in `folder`.

        Raises:
            ValueError: for vectors of queries, no vectors, and an unknown storage or factor.
            DataError: for damaged vectors.
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
            manifest = vectors.manifest
            if manifest.layout != TokenManifest.LAYOUT or manifest.kind != "document":
                raise ArgumentError(
                    "vectors",
                    "expected token vectors of documents, got "
                    f"{manifest.kind} vectors of layout {manifest.layout!r} in {vectors.folder}.",
                )
            provenance = manifest.provenance
            shards = vectors.iter_shards()
        else:
            shards = [vectors]
        if storage == "int4" and vectors.dimension % 2:
            raise ArgumentError(
                "storage",
                f"int4 packs two entries to a byte, got vectors of {vectors.dimension}.",
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
        """Write an index of further documents with the storage and pooling of this one.

        Args:
            vectors: token vectors of the documents.
            folder: where the index is written.
            metadata: as in :meth:`build`.

        Raises:
            DataError: the vectors of this index were pooled in another way, or in an unknown one.
        """
        pool_factor = self.options["pool_factor"]
        pooling = self.options.get("pooling")
        if pool_factor > 1 and pooling != token_blocks.POOLING:
            expected = f"an index of documents that were pooled as {token_blocks.POOLING}"
            got = "one that does not tell how" if pooling is None else f"{pooling}"
            raise DataError(
                f"{self.files.folder}: expected {expected}, got {got}; new documents would have "
                "other scores. Build the index again, from the token vectors of all documents.",
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

        Args:
            folder: of the index.
            chunks: all documents.
            options: of the index, without the number of candidates and their recall.
            provenance: of the vectors.
            metadata: of the documents.
            queries: see :meth:`build`.
            overwrite: replace an earlier index.
        """
        with cls._new_folder(folder, overwrite=overwrite) as new_folder:
            ids = _write_chunks(new_folder, chunks)
            files = TokenFiles(new_folder, len(ids), options["dimension"], options["storage"])
            candidate_lists = None
            if files.n_tokens >= centroids.FEWEST_TOKENS:
                candidate_lists = Centroids.of(
                    lambda: files.blocks(_CPU_BLOCK_TOKENS),
                    len(ids),
                    files.n_tokens,
                )
                candidate_lists.save(new_folder)
            index_options = {**options, "n_candidates": 0, "recall": None}
            index = cls(ids, files, candidate_lists, index_options, provenance)
            if candidate_lists is not None:
                n_candidates, recall = index._choose_candidates(candidate_lists, queries)
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
        """Map the token files of a saved index into memory, and open its centroids."""
        options = manifest["options"]
        storage = options.get("storage")
        dimension = options.get("dimension")
        if storage not in STORAGES or dimension != manifest["vocab_size"]:
            raise DataError(
                f"{folder}: expected a storage of {', '.join(STORAGES)} and a dimension, "
                f"got {options}. {REMEDY}",
            )
        files = TokenFiles(folder, len(ids), dimension, storage)
        candidate_lists = Centroids.load(folder, dimension)
        return cls(ids, files, candidate_lists, options, Provenance.from_dict(manifest))

    def _write(self, folder: Path) -> None:
        shutil.copytree(
            self.files.folder,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(SEGMENTS, ".*"),
        )

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Copy the index to another folder, or do nothing if it is in that folder.

        See :meth:`FolderIndex.save`.
        """
        if path_of("path", path).resolve() != self.files.folder.resolve():
            with self._new_folder(path, overwrite=overwrite) as folder:
                self._write(folder)

    @classmethod
    def merged(
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
            rows_by_part: for each part, the rows of the documents that are copied.
            folder: folder of the new index. An index in it is replaced.
            provenance: model and texts that the vectors were computed from.
            metadata: metadata of the copied documents; None if there are none.
        """
        first_options = parts[0].options
        options: Json = {
            name: first_options[name] for name in ("storage", "pool_factor", "dimension")
        }
        # An index that does not record how it was pooled has no pooling, or is an old one. The new
        # index then records nothing either.
        if all(part.options.get("pooling") == token_blocks.POOLING for part in parts):
            options["pooling"] = token_blocks.POOLING
        chunks = itertools.chain.from_iterable(
            part._chunks(rows) for part, rows in zip(parts, rows_by_part, strict=True)
        )
        return cls._write_index(folder, chunks, options, provenance, metadata, overwrite=True)

    def _chunks(self, rows: Sequence[int]) -> Iterator[Chunk]:
        """Iterate over some documents of this index, with their vectors as they are stored."""
        for low in range(0, len(rows), _MERGED_DOCUMENTS):
            documents = np.array(rows[low : low + _MERGED_DOCUMENTS], np.int64)
            vectors, _ = self.files.take(documents)
            ids = [self.ids[row] for row in documents.tolist()]
            yield Chunk(ids, self.files.lengths[documents], vectors)

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
        device: str | torch.device | Sequence[str] | None = None,
        candidates: int | None = None,
        where: Where = None,
        allowed: Mask | None = None,
        reduction: str = "sum",
    ) -> list[list[Hit]]:
        """Return the `k` best documents of each query, best first.

        If fewer than `k` documents have tokens, all of them are returned. Equal scores are in
        document order. A GPU may return any of the documents whose scores equal the last one.

        Args:
            queries: token vectors in fp16 or fp32, of the index's dimension.
            k: documents per query.
            device: by default a GPU if there is one. Documents that do not fit into its free memory
                are spread over all GPUs of the machine, or else copied there block by block during
                the computation. A list names several devices.
            candidates: on a CPU, documents that are scored for each query, at least ten times `k`;
                0 scores all. By default :attr:`n_candidates`.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out.
            reduction: ``"sum"``, or ``"mean"`` over the tokens of a query.

        Raises:
            ValueError: for vectors of another dimension, or with NaN or infinity.
            DataError: if the vectors that are read are damaged.
        """
        check_k(k)
        self._check_queries(queries)
        mask = allowed_by(self.metadata, where, allowed)
        devices = self._devices(device or self.device)
        n_candidates = self.n_candidates if candidates is None else candidates
        if n_candidates:
            n_candidates = max(n_candidates, 10 * k)
        query_lengths = queries.offsets.diff().tolist()
        query_rows = [row for row, length in enumerate(query_lengths) if length]
        query_vectors = [queries.rows(row) for row in query_rows]
        if (
            devices[0].type == "cpu"
            and self._centroids is not None
            and 0 < n_candidates < self.n_documents // 2
        ):
            hits_of_queries = self._search_candidates(
                self._centroids,
                query_vectors,
                k,
                n_candidates,
                mask,
                reduction,
            )
        else:
            hits_of_queries = self._search_all(query_vectors, k, devices, mask, reduction)
        hits: list[list[Hit]] = [[] for _ in range(len(queries))]
        for row, query_hits in zip(query_rows, hits_of_queries, strict=True):
            hits[row] = query_hits
        return hits

    def _check_queries(self, queries: TokenVectors) -> None:
        """Raise an error unless queries are finite floats of the index's dimension.

        Raises:
            TypeError: if `queries` are not ``TokenVectors``.
            ValueError: for quantized vectors, NaN, infinity, or another dimension.
        """
        check_instance("queries", queries, TokenVectors, _QUERIES_REMEDY)
        # numpy checks the values, because torch would wake all its threads, which takes
        # milliseconds.
        all_finite = bool(np.isfinite(queries.values.detach().cpu().numpy()).all())
        is_quantized = queries.scales is not None
        if queries.dimension == self.dimension and all_finite and not is_quantized:
            return
        suffix = "" if is_quantized or all_finite else " with NaN or infinity"
        raise ArgumentError(
            "queries",
            f"expected finite fp16 or fp32 of dimension {self.dimension}, "
            f"got {queries.values.dtype} of dimension {queries.dimension}{suffix}.",
        )

    def _search_candidates(
        self,
        candidate_lists: Centroids,
        queries: Sequence[Tensor],
        k: int,
        n_candidates: int,
        mask: Mask | None,
        reduction: str,
    ) -> list[list[Hit]]:
        """Return the `k` best candidates of each query, scored on a CPU.

        Args:
            candidate_lists: centroids that find the candidates of a query.
            queries: token vectors of each query, ``[L, D]``.
            k: documents per query.
            n_candidates: number of candidates, which are scored exactly. If there are no more
                documents than this, all are scored.
            mask: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        """
        usable = self._has_tokens if mask is None else mask & self._has_tokens
        usable_rows = np.flatnonzero(usable)
        hits = []
        for query in queries:
            documents = usable_rows
            if len(usable_rows) > n_candidates:
                documents = candidate_lists.candidates(query, n_candidates, usable)
            vectors, offsets = self.files.take(documents)
            batch = QueryBatch.pad([query], torch.device("cpu"))
            scores = maxsim_scores(batch, vectors, offsets, reduction)
            top_scores, columns = top_columns(scores, k)
            hits += hits_of(self.ids, documents[columns.numpy()], top_scores.numpy())
        return hits

    def _search_all(
        self,
        queries: Sequence[Tensor],
        k: int,
        devices: Sequence[torch.device],
        mask: Mask | None,
        reduction: str,
    ) -> list[list[Hit]]:
        """Return the `k` best of all documents for each query.

        Several queries share a pass over the documents. Their number is limited by the memory that
        the scores of a pass take.

        Args:
            queries: token vectors of each query, ``[L, D]``.
            k: documents per query.
            devices: devices among which the documents are divided.
            mask: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        """
        most_queries = _PASS_SCORES // max(1, self.n_documents)
        queries_per_pass = max(1, min(_PASS_QUERIES, most_queries))
        hits = []
        for low in range(0, len(queries), queries_per_pass):
            pass_queries = queries[low : low + queries_per_pass]
            scores, documents = self._top_documents(pass_queries, k, devices, mask, reduction)
            hits += hits_of(self.ids, documents, scores)
        return hits

    def _top_documents(
        self,
        queries: Sequence[Tensor],
        k: int,
        devices: Sequence[torch.device],
        mask: Mask | None = None,
        reduction: str = "sum",
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Score all documents for all queries in one pass.

        Args:
            queries: token vectors of Nq queries.
            k: documents per query.
            devices: devices among which the documents are divided.
            mask: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.

        Returns:
            Scores and rows of the best documents, both ``[Nq, min(k, N)]``, best first.
        """
        scans = [
            self._scan(documents, queries, k, mask, reduction)
            for documents in self._documents_on(devices)
        ]
        best_by_device: dict[int, tuple[Tensor, Tensor]] = {}
        # Each scan yields the best documents of a device after each of its blocks. A step starts
        # one block on every device without waiting, so that the devices work at the same time.
        for results in itertools.zip_longest(*scans):
            for number, result in enumerate(results):
                if result is not None:  # a scan that has ended gives None
                    best_by_device[number] = result
        best = best_by_device.values()
        scores = np.concatenate([device_scores.cpu().numpy() for device_scores, _ in best], 1)
        rows = np.concatenate([device_rows.cpu().numpy() for _, device_rows in best], 1)
        # By falling score, then by rising row.
        order = np.lexsort((rows, -scores))[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _scan(
        self,
        documents: DeviceDocuments,
        queries: Sequence[Tensor],
        k: int,
        mask: Mask | None,
        reduction: str,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Score the documents of a device block by block, without waiting for a GPU.

        Args:
            documents: the documents that the device searches.
            queries: token vectors of Nq queries.
            k: documents per query.
            mask: bool ``[N]``, False for documents that are left out; None allows all.
            reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.

        Yields:
            After each block, the scores and the rows of the best documents so far, both
            ``[Nq, k]`` and best first. There are fewer columns while fewer documents were scored.
        """
        batch = QueryBatch.pad(queries, documents.device)
        on_cpu = documents.device.type == "cpu"
        left_out = documents.without_tokens
        if mask is not None:
            usable = (mask & self._has_tokens)[documents.low : documents.high]
            left_out = torch.from_numpy(~usable).to(documents.device)
        best: tuple[Tensor, Tensor] | None = None
        for block in documents.blocks(_CPU_BLOCK_TOKENS if on_cpu else STREAMED_TOKENS):
            scores = maxsim_scores(batch, block.vectors, block.offsets, reduction)
            if left_out is not None:
                block_left_out = left_out[block.low - documents.low : block.high - documents.low]
                scores = scores.masked_fill_(block_left_out, -float("inf"))
            if on_cpu:
                top_scores, rows = top_columns(scores, k)
            else:
                # topk chooses any of equal scores. top_columns would wait for the GPU.
                top_scores, rows = scores.topk(min(k, block.high - block.low), dim=1)
            rows += block.low
            if best is not None:
                best_scores, best_rows = best
                both_scores = torch.cat([best_scores, top_scores], 1)
                both_rows = torch.cat([best_rows, rows], 1)
                order = both_scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
                top_scores = both_scores.gather(1, order)
                rows = both_rows.gather(1, order)
            best = (top_scores, rows)
            yield best

    def _devices(self, device: str | torch.device | Sequence[str] | None) -> list[torch.device]:
        """Choose the devices of a search.

        Args:
            device: one device, a list of names, or None for a GPU if there is one. ``"cuda"``
                becomes all GPUs if the documents do not fit into the free memory of one.
        """
        if device is not None and not isinstance(device, str | torch.device):
            return [torch.device(name) for name in device]
        default_device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = torch.device(device or default_device)
        # "cuda:1" names one GPU. Documents that "cuda" has searched before stay on that GPU.
        may_spread = str(chosen) == "cuda" and ("cuda",) not in self._device_documents
        n_gpus = torch.cuda.device_count()
        if may_spread and n_gpus > 1 and not self._fits(chosen, self.files.nbytes):
            return [torch.device("cuda", number) for number in range(n_gpus)]
        return [chosen]

    def _documents_on(self, devices: Sequence[torch.device]) -> list[DeviceDocuments]:
        """Divide the documents among devices, by about the same number of tokens.

        The result is cached. The first call copies the documents to GPUs where they fit.

        Args:
            devices: devices that search together.

        Returns:
            Consecutive documents for each device. A device without documents is left out.
        """
        key = tuple(str(device) for device in devices)
        if key not in self._device_documents:
            n_devices = len(devices)
            # Equal numbers of tokens end at these offsets. The documents that begin there are the
            # bounds between devices.
            inner_offsets = np.linspace(0, self.files.n_tokens, n_devices + 1)[1:-1]
            inner_bounds = np.searchsorted(self.files.offsets, inner_offsets)
            bounds = [0, *inner_bounds.tolist(), self.n_documents]
            n_bytes = self.files.nbytes // n_devices
            self._device_documents[key] = [
                DeviceDocuments(self.files, device, low, high, self._fits(device, n_bytes))
                for device, low, high in zip(devices, bounds[:-1], bounds[1:], strict=True)
                if low < high
            ]
        return self._device_documents[key]

    def _fits(self, device: torch.device, n_bytes: int) -> bool:
        """Whether a device is a GPU with enough free memory."""
        if device.type != "cuda":
            return False
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return n_bytes < free_bytes * _MEMORY_FRACTION

    def _choose_candidates(
        self,
        candidate_lists: Centroids,
        queries: TokenVectors | None,
    ) -> tuple[int, float]:
        """Choose the number of candidates by their recall of the best documents.

        An exact search finds the ten best documents of some queries. The result is the smallest of
        a few numbers with which, on average, 98.5% of these documents are among the candidates.

        Args:
            candidate_lists: centroids that find the candidates of a query.
            queries: token vectors of queries. None takes pieces of documents as queries.

        Returns:
            The number of candidates, and the mean fraction of the best documents among them.
        """
        # The document that a query was taken from, or None.
        sources: Sequence[int | None]
        if queries is None:
            query_vectors, sources = self._document_pieces()
        else:
            n_queries = min(len(queries), _MEASURED_QUERIES)
            query_vectors = [queries.rows(row) for row in range(n_queries)]
            query_vectors = [vectors for vectors in query_vectors if vectors.numel()]
            sources = [None] * len(query_vectors)
        # One document more, because the source of a piece does not count.
        depth = _RECALL_DEPTH if queries is not None else _RECALL_DEPTH + 1
        _, ranked = self._top_documents(query_vectors, depth, [torch.device("cpu")])
        best_documents = [
            [row for row in rows if row != source][:_RECALL_DEPTH]
            for rows, source in zip(ranked.tolist(), sources, strict=True)
        ]
        n_candidates = 0
        recall = 0.0
        for n_candidates in _CANDIDATE_COUNTS:
            recalls = []
            for vectors, best in zip(query_vectors, best_documents, strict=True):
                retrieved = candidate_lists.candidates(vectors, n_candidates, self._has_tokens)
                if best:
                    n_retrieved = len(set(retrieved.tolist()).intersection(best))
                    recalls.append(n_retrieved / len(best))
            recall = float(np.mean(recalls))
            if recall >= _MIN_RECALL:
                break
        return n_candidates, round(recall, 4)

    def _document_pieces(self) -> tuple[list[Tensor], list[int]]:
        """Take consecutive tokens of random documents, to serve as queries.

        The random numbers have a fixed seed, so that a build gives the same index every time.

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


def _write_chunks(folder: Path, chunks: Iterable[Chunk]) -> list[str]:
    """Write the token vectors, offsets and checksums of an index into its folder.

    Args:
        folder: folder of the index.
        chunks: all documents, a few at a time.

    Returns:
        Ids of the documents.

    Raises:
        ValueError: if there are no tokens.
        DataError: for an empty or a repeated id.
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
            # fp16 vectors have no scales, so there is one array and the second file stays empty.
            arrays = token_blocks.file_arrays(chunk.vectors)
            for file, array in zip((values_file, scales_file), arrays, strict=False):
                file.write(array.data)
            # Token after the last one of each document, within the chunk.
            ends = np.cumsum(chunk.lengths)
            checksums.append(token_blocks.checksums(arrays, ends - chunk.lengths, ends))
    check_ids(ids)
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    if not offsets[-1]:
        raise ArgumentError(
            "vectors",
            f"expected at least one, got none of {len(ids)} texts. Check the texts.",
        )
    np.save(folder / token_blocks.OFFSETS, offsets)
    np.save(folder / token_blocks.CHECKSUMS, np.concatenate(checksums))
    return ids
