"""Late interaction over a whole collection: packed token vectors, searched exactly, or through
candidates on a CPU.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold._internal.arguments import check_choice, check_count, check_instance, check_k
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
    STREAMED,
    Asked,
    Chunk,
    Share,
    TokenFiles,
    scores_of,
)
from tilefold.retrieval.vectors.sparse import check_ids
from tilefold.retrieval.vectors.tokens import TokenManifest, TokenStore, TokenVectors

__all__ = ["LateIndex"]

_BLOCK = 1 << 17  # tokens of a block on a CPU
_QUERIES = 64  # that share the pass over the documents
_ROOM = 0.75  # of a GPU's free memory
_SCORES = 1 << 29  # of queries and documents that are held at a time
_CANDIDATES = (250, 500, 1000, 2000, 4000)
_RECALL, _ASKED, _WORDS = (
    0.985,
    32,
    16,
)  # of the ten best; queries that it is measured on, and tokens of each


class LateIndex(TorchIndex):
    """Search by MaxSim over the token vectors of a collection, in a folder that is memory-mapped.

    ``score(q, d) = sum over query tokens i of max over document tokens j of q_i . d_j``, in fp32 of
    what is stored, as :func:`tilefold.ops.maxsim` computes it: the same on a CPU and a GPU within
    rounding. A GPU scores every document. So does a CPU without candidates; with them, it scores
    those that :class:`Centroids` estimates to be the best. Documents without tokens are never
    found, and a query without tokens finds nothing.

    Attributes:
        n_candidates: documents that a CPU scores for a query, chosen when the index was built so
            that .985 of the ten best are among them; 0 for a small collection, which has no
            centroids.
        recall: share of the ten best that was then found, on queries that were held out; None
            without centroids.
    """

    backend = "late"
    own_files, unread = (*token_blocks.FILES, *centroids.FILES), token_blocks.FILES[:2]

    def __init__(
        self,
        ids: Sequence[str],
        files: TokenFiles,
        nearest: Centroids | None,
        options: Json,
        provenance: Provenance,
    ) -> None:
        self.ids, self.files, self.provenance = ids, files, provenance
        self.options: Json = options
        self.vocab_size = self.dimension = files.dimension
        self._nearest = nearest
        self._with = files.lengths > 0  # tokens
        self._shares: dict[tuple[str, ...], list[Share]] = {}

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
            vectors: of documents, of :func:`tilefold.retrieval.open_tokens` or in memory.
            storage: ``"int8"``; ``"fp16"``, twice as large; or ``"int4"``, half as large (see
                ``packed``).
            pool_factor: keep one vector for so many tokens of a document, the mean of a cluster of
                them (Ward's method, as ``HierarchicalTokenPooling`` of sentence-transformers, arXiv
                2409.14683). All vectors are then brought to length 1; the first one of a document
                is in no cluster.
            queries: on which candidates are chosen and recall is measured; by default pieces of the
                documents, which do not count as found themselves.
            metadata: as in :func:`tilefold.retrieval.build_index`.
            overwrite: replace an earlier index of this backend in `folder`; without, that is a
                ``FileExistsError``.

        ``ValueError`` for vectors of queries, none at all, another storage or factor; ``DataError``
        for damaged ones.
        """
        check_instance("vectors", vectors, (TokenStore, TokenVectors), "open_tokens(folder)")
        check_choice("storage", storage, STORAGES)
        check_count("pool_factor", pool_factor)
        made_by, shards = Provenance(), iter([vectors] if isinstance(vectors, TokenVectors) else [])
        if isinstance(vectors, TokenStore):
            manifest = vectors.manifest
            if manifest.layout != TokenManifest.LAYOUT or manifest.kind != "document":
                got = f"{manifest.kind} vectors of layout {manifest.layout!r} in {vectors.folder}"
                raise ValueError(f"vectors: expected token vectors of documents, got {got}.")
            made_by, shards = manifest.provenance, vectors.each()
        if storage == "int4" and vectors.dimension % 2:
            raise ValueError(
                f"storage: int4 packs two entries to a byte, got vectors of {vectors.dimension}.",
            )
        options: Json = {
            "storage": storage,
            "pool_factor": pool_factor,
            "dimension": vectors.dimension,
        }
        if pool_factor > 1:
            options["pooling"] = token_blocks.POOLING
        chunks = token_blocks.chunks_of(shards, storage, pool_factor)
        return cls._made(
            Path(folder),
            chunks,
            options,
            made_by,
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
        """Write an index of further documents, stored and pooled as those of this one.

        Args:
            vectors: token vectors of the documents.
            folder: where the index is written.
            metadata: as in :meth:`build`.

        Raises:
            DataError: the vectors of this index were pooled in another way, or in one that it does
                not tell.
        """
        pool_factor = self.options["pool_factor"]
        pooling = self.options.get("pooling")
        if pool_factor > 1 and pooling != token_blocks.POOLING:
            expected = f"an index of documents that were pooled as {token_blocks.POOLING}"
            got = "one that does not tell how" if pooling is None else f"{pooling}"
            raise DataError(
                f"{self.files.folder}: expected {expected}, got {got}; new documents would have "
                "other "
                "scores. Build the index again, from the token vectors of all documents.",
            )
        return self.build(
            vectors,
            folder,
            storage=self.options["storage"],
            pool_factor=pool_factor,
            metadata=metadata,
        )

    @classmethod
    def _made(
        cls,
        folder: Path,
        chunks: Iterable[Chunk],
        options: Json,
        made_by: Provenance,
        metadata: Mapping[str, Fields] | Metadata | None,
        queries: TokenVectors | None = None,
        *,
        overwrite: bool,
    ) -> LateIndex:
        with cls._new_folder(folder, overwrite=overwrite) as made:
            ids, lengths, sums = (
                list[str](),
                list[npt.NDArray[np.int64]](),
                list[npt.NDArray[np.uint32]](),
            )
            with (
                (made / token_blocks.VALUES).open("wb") as values,
                (made / token_blocks.SCALES).open("wb") as scales,
            ):
                for names, counts, found in chunks:
                    ids += names
                    lengths.append(counts)
                    arrays = token_blocks.arrays(found)
                    for stream, array in zip((values, scales), arrays, strict=False):
                        stream.write(array.data)
                    ends = np.cumsum(counts)
                    sums.append(token_blocks.checksums(arrays, ends - counts, ends))
            check_ids(ids)
            offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
            if not offsets[-1]:
                raise ValueError(
                    f"vectors: expected at least one, got none of {len(ids)} texts. Check the "
                    "texts.",
                )
            np.save(made / token_blocks.OFFSETS, offsets)
            np.save(made / token_blocks.SUMS, np.concatenate(sums))
            files = TokenFiles(made, len(ids), options["dimension"], options["storage"])
            nearest = None
            if files.n_tokens >= centroids.FEWEST_TOKENS:
                nearest = Centroids.of(lambda: files.blocks(_BLOCK), len(ids), files.n_tokens)
                nearest.save(made)
            index = cls(ids, files, nearest, options | {"n_candidates": 0, "recall": None}, made_by)
            if nearest is not None:
                index.options |= index._measured(nearest, queries)
            made_of = made_by.passages
            index.metadata = (
                metadata if isinstance(metadata, Metadata) else Metadata.of(metadata, ids, made_of)
            )
            index._finish(made)
        return cls.load(folder)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> LateIndex:
        options = manifest["options"]
        if (
            options.get("storage") not in STORAGES
            or options.get("dimension") != manifest["vocab_size"]
        ):
            wanted = f"a storage of {', '.join(STORAGES)} and a dimension"
            raise DataError(f"{folder}: expected {wanted}, got {options}. {REMEDY}")
        files = TokenFiles(folder, len(ids), options["dimension"], options["storage"])
        return cls(
            ids,
            files,
            Centroids.load(folder, files.dimension),
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
        """Copy the index to another folder; its own needs no copy. See :meth:`FolderIndex.save`."""
        if Path(path).resolve() != self.files.folder.resolve():
            with self._new_folder(path, overwrite=overwrite) as folder:
                self._write(folder)

    @classmethod
    def merged(
        cls,
        parts: Sequence[LateIndex],
        chosen: Sequence[Sequence[int]],
        folder: Path,
        made_by: Provenance,
        metadata: Metadata | None,
    ) -> LateIndex:
        """One index of the chosen documents of several, which replaces the one in `folder`."""

        def chunks() -> Iterator[Chunk]:
            for part, rows in zip(parts, chosen, strict=True):
                for low in range(0, len(rows), 1024):
                    at = np.array(rows[low : low + 1024], np.int64)
                    yield (
                        [part.ids[row] for row in at.tolist()],
                        part.files.lengths[at],
                        part.files.take(at)[0],
                    )

        options = {name: parts[0].options[name] for name in ("storage", "pool_factor", "dimension")}
        if all(part.options.get("pooling") == token_blocks.POOLING for part in parts):
            options["pooling"] = token_blocks.POOLING
        return cls._made(folder, chunks(), options, made_by, metadata, overwrite=True)

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
        """The `k` best documents of each query, best first; all that have tokens, where there are
        fewer.

        Args:
            queries: token vectors in fp16 or fp32, of the index's dimension.
            k: how many.
            device: by default a GPU if there is one. What does not fit into its free memory is
                spread over the GPUs of the machine, or else copied there block by block behind the
                computation. A list names several.
            candidates: on a CPU, documents that are scored for each query, at least ten times `k`;
                0 scores all. By default :attr:`n_candidates`.
            where: finds those documents alone whose metadata match.
            allowed: bool ``[N]``, leaves documents out.
            reduction: ``"mean"`` divides by the query's tokens.

        Equal scores are in document order; of those equal to the last, a GPU may give any.
        ``ValueError`` for vectors of another dimension, or with NaN or infinity; ``DataError``
        where those read are damaged.
        """
        check_k(k)
        all_finite = np.isfinite(
            queries.values.detach().cpu().numpy(),
        ).all()  # torch wakes all threads, which takes ms
        if queries.dimension != self.dimension or queries.scales is not None or not all_finite:
            finite = "" if queries.scales is not None or all_finite else " with NaN or infinity"
            got = f"{queries.values.dtype} of dimension {queries.dimension}{finite}"
            raise ValueError(
                f"queries: expected finite fp16 or fp32 of dimension {self.dimension}, got {got}.",
            )
        allowed = allowed_by(self.metadata, where, allowed)
        usable = self._with if allowed is None else allowed & self._with
        places = self._places(device or self.device)
        asked = [row for row, length in enumerate(queries.offsets.diff().tolist()) if length]
        found: list[list[Hit]] = [[] for _ in range(len(queries))]
        count = self.n_candidates if candidates is None else candidates
        scored = max(count, 10 * k) if count else 0
        if (
            places[0].type == "cpu"
            and self._nearest is not None
            and 0 < scored < self.n_documents // 2
        ):
            there = np.flatnonzero(usable)
            for row in asked:
                near = (
                    there
                    if len(there) <= scored
                    else self._nearest.candidates(queries.rows(row), scored, usable)
                )
                scores = scores_of(
                    Asked.of([queries.rows(row)], places[0]),
                    *self.files.take(near),
                    reduction,
                )
                best, columns = top_columns(scores, k)
                (found[row],) = hits_of(self.ids, near[columns.numpy()], best.numpy())
            return found
        most = max(1, min(_QUERIES, _SCORES // max(1, self.n_documents)))
        for low in range(0, len(asked), most):
            part = asked[low : low + most]
            top, at = self._best([queries.rows(row) for row in part], k, places, usable, reduction)
            for row, hits in zip(part, hits_of(self.ids, at, top), strict=True):
                found[row] = hits
        return found

    def _best(
        self,
        queries: list[Tensor],
        k: int,
        places: Sequence[torch.device],
        usable: Mask,
        reduction: str = "sum",
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Scores and positions ``[Nq, k]`` of the best of all documents, found in one pass for all
        queries.
        """
        passes = [self._pass(share, queries, k, usable, reduction) for share in self._on(places)]
        latest: list[Any] = [None] * len(passes)
        for found in itertools.zip_longest(
            *passes,
        ):  # in turns, so that the devices work at the same time
            latest = [new or old for new, old in zip(found, latest, strict=True)]
        scores, at = (
            np.concatenate([found[part].cpu().numpy() for found in latest], 1) for part in (0, 1)
        )
        order = np.lexsort((at, -scores))[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(at, order, 1)

    def _pass(
        self,
        share: Share,
        queries: list[Tensor],
        k: int,
        usable: Mask,
        reduction: str,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The best documents of a share, after each of its blocks; a GPU is not waited for."""
        asked, on_cpu = Asked.of(queries, share.device), share.device.type == "cpu"
        best, left_out = None, share.without
        if usable is not self._with:  # which the device has
            left_out = torch.from_numpy(~usable[share.low : share.high]).to(share.device)
        for low, high, vectors, offsets in share.blocks(_BLOCK if on_cpu else STREAMED):
            scores = scores_of(asked, vectors, offsets, reduction)
            if left_out is not None:
                scores = scores.masked_fill_(
                    left_out[low - share.low : high - share.low],
                    -float("inf"),
                )
            scores, at = (
                top_columns(scores, k) if on_cpu else scores.topk(min(k, high - low), dim=1)
            )
            at += low
            if best is not None:
                both, rows = (torch.cat(pair, 1) for pair in zip(best, (scores, at), strict=True))
                order = both.sort(dim=1, descending=True, stable=True).indices[:, :k]
                scores, at = both.gather(1, order), rows.gather(1, order)
            best = scores, at
            yield best

    def _places(self, device: str | torch.device | Sequence[str] | None) -> list[torch.device]:
        if device is not None and not isinstance(device, str | torch.device):
            return [torch.device(name) for name in device]
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        several = (
            str(place) == "cuda" and ("cuda",) not in self._shares and torch.cuda.device_count() > 1
        )
        if several and not self._fits(place, self.files.nbytes):
            return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        return [place]

    def _on(self, places: Sequence[torch.device]) -> list[Share]:
        """The documents in as many shares, of about as many tokens."""
        if (key := tuple(map(str, places))) not in self._shares:
            ends = np.searchsorted(
                self.files.offsets,
                np.linspace(0, self.files.n_tokens, len(places) + 1)[1:-1],
            )
            bounds = [0, *ends.tolist(), self.n_documents]
            each = self.files.nbytes // len(places)
            self._shares[key] = [
                Share(self.files, place, low, high, self._fits(place, each))
                for place, low, high in zip(places, bounds, bounds[1:], strict=False)
                if low < high
            ]
        return self._shares[key]

    def _fits(self, place: torch.device, size: int) -> bool:
        return place.type == "cuda" and size < torch.cuda.mem_get_info(place)[0] * _ROOM

    def _measured(self, nearest: Centroids, queries: TokenVectors | None) -> Json:
        """How many candidates hold enough of the ten best, and the share that they hold."""
        lengths, chooser, own = self.files.lengths, np.random.default_rng(0), list[int]()
        if queries is not None:
            asked = [
                rows for rows in map(queries.rows, range(min(len(queries), _ASKED))) if rows.numel()
            ]
        else:
            own = chooser.choice(
                np.flatnonzero(lengths),
                min(_ASKED, int((lengths > 0).sum())),
                replace=False,
            ).tolist()
            starts = [int(chooser.integers(max(1, int(lengths[row]) - _WORDS))) for row in own]
            rows = [self.files.between(row, row + 1).floats() for row in own]
            asked = [row[start : start + _WORDS] for row, start in zip(rows, starts, strict=True)]
        found = self._best(asked, 11 if own else 10, [torch.device("cpu")], self._with)[1].tolist()
        mine = own or [-1] * len(found)
        best = [
            [at for at in row if at != not_it][:10] for row, not_it in zip(found, mine, strict=True)
        ]
        count, share = 0, 0.0
        for count in _CANDIDATES:
            near = [set(nearest.candidates(query, count, self._with).tolist()) for query in asked]
            shares = [
                len(these.intersection(row)) / len(row)
                for these, row in zip(near, best, strict=True)
                if row
            ]
            if (share := float(np.mean(shares))) >= _RECALL:
                break
        return {"n_candidates": count, "recall": round(share, 4)}
