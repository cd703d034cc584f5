"""Sparse vectors made with published statistics of SPLADE's on MS MARCO, and queries for them.

Bruch, Nardini, Rulli and Venturini (SIGIR 2024) count 119 terms in a document and 43 in a query;
the heaviest 50 and 10 of them hold 75% of the weights, and products of the 20 and 9 heaviest 85% of
the scores of the best documents. The numbers below were chosen to meet these (tested). What the
papers do not say is ours: terms fall as Zipf's law, so that the commonest is in two fifths of the
documents with small weights, as expansions are; half of a document's terms are of one of `documents
/ 200` topics, heavier; and a query asks for one document, by its heavy terms.

For GPUs, the same is made on a device, with other numbers, and random token vectors for late
interaction, with gates for what is found.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.bench.spec import BUDGETS
from tilefold.ops import QuantizedTokens
from tilefold.retrieval import LateIndex, SparseVectors
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.index import token_blocks
from tilefold.retrieval.index.on_device import DeviceIndex
from tilefold.testing import relative_error

VOCABULARY, FINGERPRINT = 30_522, "0" * 64
TERMS, TOPIC_TERMS, TOPIC_VOCABULARY, TOPIC_DOCUMENTS = 178, 75, 400, 200
SHORTEST, COMMON_WEIGHT = (
    0.5,
    0.45,
)  # of the terms drawn, in a document; of a common term beside one of the topic
QUERY_TERMS, ASKED, HEAVIEST = 44, 12, 14
ASKED_WEIGHT = 8.0  # of a term of the document that is asked for, beside a common one
PIECE = 50_000  # documents made at a time, for memory
SAMPLE, GATED = 64, 8  # documents of a gate, beside those found; sparse queries of one
_STEP = (
    1 / 8192
)  # weights are multiples of it: a term and a weight are sorted as one integer of 32 bits

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float32]
Found = tuple[Tensor, Tensor]  # scores and documents


def made_documents(count: int, seed: int) -> SparseVectors:
    """`count` vectors of about 119 terms."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(VOCABULARY).astype(np.uint32)
    topics = rng.integers(
        VOCABULARY,
        size=(1 + count // TOPIC_DOCUMENTS, TOPIC_VOCABULARY),
        dtype=np.uint32,
    )
    pieces = [
        _piece(min(PIECE, count - start), names, topics, rng) for start in range(0, count, PIECE)
    ]
    terms, weights, lengths = (np.concatenate(part) for part in zip(*pieces, strict=True))
    del pieces
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return SparseVectors(
        [f"d{i}" for i in range(count)],
        offsets,
        terms,
        weights,
        VOCABULARY,
        FINGERPRINT,
    )


def _piece(
    count: int,
    names: npt.NDArray[np.uint32],
    topics: npt.NDArray[np.uint32],
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.int64]]:
    """Terms, weights, and numbers of terms of `count` documents."""
    terms = np.empty((count, TERMS), np.uint32)
    own = rng.integers(len(topics), size=(count, 1))
    terms[:, :TOPIC_TERMS] = topics[own, _zipf(TOPIC_VOCABULARY, (count, TOPIC_TERMS), rng)]
    terms[:, TOPIC_TERMS:] = names[_zipf(VOCABULARY, (count, TERMS - TOPIC_TERMS), rng)]
    weights = np.log1p(rng.standard_exponential(terms.shape, np.float32))
    weights[:, TOPIC_TERMS:] *= COMMON_WEIGHT
    kept = rng.random((count, TERMS), np.float32) < rng.uniform(SHORTEST, 1, (count, 1))
    return _rows(terms, weights, kept)


def _rows(
    terms: npt.NDArray[np.uint32],
    weights: Floats,
    kept: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.int64]]:
    """Rows in the order of their terms, each term once, with its largest weight."""
    keys = terms << 16 | np.clip(weights / _STEP, 1, 65535).astype(np.uint32)
    keys[~kept] = np.iinfo(np.uint32).max
    keys.sort(axis=1)
    last = np.ones(keys.shape, bool)
    last[:, :-1] = keys[:, 1:] >> 16 != keys[:, :-1] >> 16
    last &= keys != np.iinfo(np.uint32).max
    flat = keys[last]
    return (
        (flat >> 16).astype(np.int32),
        (flat & 65535).astype(np.float32) * np.float32(_STEP),
        last.sum(axis=1),
    )


def made_queries(documents: SparseVectors, count: int, seed: int) -> SparseVectors:
    """Vectors of about 43 terms, 12 of them among the 14 heaviest of a document, and by far heavier
    than the others.
    """
    rng = np.random.default_rng([seed, 1])
    common = np.bincount(documents.indices, minlength=VOCABULARY).argsort()[::-1]
    terms = common[_zipf(VOCABULARY, (count, QUERY_TERMS), rng)].astype(np.uint32)
    weights = rng.standard_exponential(terms.shape, np.float32)
    for at, document in enumerate(rng.integers(len(documents), size=count)):
        own, theirs = documents.row(int(document))
        heavy = rng.permutation(np.argsort(-theirs)[:HEAVIEST])[:ASKED]
        terms[at, : len(heavy)] = own[heavy]
        weights[at, : len(heavy)] *= ASKED_WEIGHT * theirs[heavy]
    indices, data, lengths = _rows(terms, weights * np.float32(1 / 8), np.ones(terms.shape, bool))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return SparseVectors(
        [f"q{i}" for i in range(count)],
        offsets,
        indices,
        data,
        VOCABULARY,
        FINGERPRINT,
    )


def _zipf(size: int, shape: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks from 0, with probabilities that fall as 1 / (rank + 10)."""
    ranks = 10 * np.exp(rng.random(shape, np.float32) * np.float32(np.log((size + 10) / 10))) - 10
    whole: npt.NDArray[np.int64] = np.minimum(ranks.astype(np.int64), size - 1)
    return whole


class DeviceRows(NamedTuple):
    """Sparse rows on a device, as CSR."""

    offsets: Tensor  # [N + 1] int64
    terms: Tensor  # [nnz] int32, rising in each row
    weights: Tensor  # [nnz] fp32

    def first(self, count: int) -> SparseVectors:
        """The first rows, on the host."""
        parts = self.offsets[: count + 1], *(part[: int(self.offsets[count])] for part in self[1:])
        arrays = (part.cpu().numpy() for part in parts)
        return SparseVectors([f"d{i}" for i in range(count)], *arrays, VOCABULARY, FINGERPRINT)

    def on_device(self) -> DeviceIndex:
        """What an :class:`ExactIndex` of these rows is there."""
        order, count = self.terms.argsort(stable=True), len(self.offsets) - 1
        rows = torch.arange(count, dtype=torch.int32, device=order.device).repeat_interleave(
            self.offsets.diff(),
        )
        ends = torch.bincount(self.terms, minlength=VOCABULARY).cumsum(0)
        lists = torch.nn.functional.pad(ends, (1, 0)), rows[order], self.weights[order]
        names = ("offsets", "documents", "weights")
        found: Any = SimpleNamespace(
            **dict(zip(names, (part.cpu().numpy() for part in lists), strict=True)),
        )
        described: Any = SimpleNamespace(
            backend="exact",
            metadata=None,
            n_documents=count,
            vocab_size=VOCABULARY,
            fingerprint=FINGERPRINT,
            provenance=Provenance(),
        )
        return DeviceIndex([f"d{i}" for i in range(count)], found, described, order.device)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[N, V]`` as torch's CSR."""
        shape = len(self.offsets) - 1, VOCABULARY
        with warnings.catch_warnings():  # that this layout is young
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(
                self.offsets.int(),
                self.terms,
                self.weights.to(dtype),
                shape,
            )

    def judged(self, found: Found, index: DeviceIndex, terms: Tensor, weights: Tensor) -> str:
        """The gate: products in fp64 of some queries, and the best, to 2^-30 of the highest
        possible for each term.
        """
        matrix = self.matrix(torch.float64)
        for values, documents, asked, given in zip(
            *(part[:GATED] for part in (*found, terms, weights)),
            strict=True,
        ):
            query = torch.zeros(index.vocab_size, dtype=torch.float64, device=asked.device)
            scores = matrix @ query.scatter_add_(0, asked.long(), given.double())
            most = (given.double() * index.postings.largest[asked.long()]).sum()
            best = scores.topk(len(values)).values
            shown = torch.where(documents >= 0, scores[documents.clamp(min=0)], 0)
            allowed = (given > 0).sum() * 2.0**-30 * most + 2.0**-22 * best
            error = torch.maximum((values - best).abs(), (values - shown).abs()) / allowed.clamp(
                min=1e-30,
            )
            if not bool((error <= 1).all()):
                return f"scores are off by {float(error.max()):.3g} times what is allowed"
        return "ok"


def made_rows(count: int, seed: int, device: torch.device) -> DeviceRows:
    """What :func:`made_documents` makes, on a device."""
    generator = torch.Generator(device).manual_seed(seed)
    how: dict[str, Any] = {"generator": generator, "device": device}
    names = torch.randperm(VOCABULARY, dtype=torch.int32, **how)
    topics = torch.randint(
        VOCABULARY,
        (1 + count // TOPIC_DOCUMENTS, TOPIC_VOCABULARY),
        dtype=torch.int32,
        **how,
    )

    def zipf(size: int, *shape: int) -> Tensor:
        ranks = 10 * (torch.rand(shape, **how) * math.log((size + 10) / 10)).exp() - 10
        return torch.clamp(ranks.long(), max=size - 1)

    def pieces() -> Iterator[tuple[Tensor, ...]]:
        for low in range(0, count, PIECE):
            size = min(PIECE, count - low)
            own = torch.randint(len(topics), (size, 1), **how)
            common = names[zipf(VOCABULARY, size, TERMS - TOPIC_TERMS)]
            terms = torch.cat([topics[own, zipf(TOPIC_VOCABULARY, size, TOPIC_TERMS)], common], 1)
            weights = (
                torch.empty(terms.shape, device=device).exponential_(generator=generator).log1p_()
            )
            weights[:, TOPIC_TERMS:] *= COMMON_WEIGHT
            shares = SHORTEST + (1 - SHORTEST) * torch.rand(size, 1, **how)
            keys = terms << 16 | (weights / _STEP).clamp(1, 65535).int()
            keys[torch.rand(terms.shape, **how) >= shares] = (gone := torch.iinfo(torch.int32).max)
            keys = keys.sort(dim=1).values
            last = keys != gone
            last[:, :-1] &= keys[:, 1:] >> 16 != keys[:, :-1] >> 16
            flat = keys[last]
            yield flat >> 16, (flat & 65535) * _STEP, last.sum(dim=1)

    terms, weights, lengths = map(torch.cat, zip(*pieces(), strict=True))
    return DeviceRows(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), terms, weights)


def made_tokens(
    count: int,
    length: int,
    dims: int,
    seed: int,
    device: torch.device,
) -> QuantizedTokens:
    """Random int8 token vectors ``[count, length, dims]`` of norm 1, about."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(count, length, dims, dtype=torch.int8, device=device)
    for part in torch.split(values, PIECE):
        part.random_(-127, 128, generator=generator)
    scales = torch.empty(count, length, device=device).uniform_(0.5, 1.5, generator=generator)
    return QuantizedTokens(values, scales.div_(73.3 * math.sqrt(dims)))


def made_asked(count: int, length: int, dims: int, device: torch.device) -> Tensor:
    """Queries ``[count, length, dims]`` for them, of norm 1."""
    made = torch.randn(
        count,
        length,
        dims,
        generator=torch.Generator(device).manual_seed(1),
        device=device,
    )
    return torch.nn.functional.normalize(made, dim=-1)


def judged(found: Found, scores: Tensor, truth: Callable[[Tensor], Tensor]) -> str:
    """The gate of MaxSim: `scores` are of all documents, `truth` gives some in fp64."""
    spread = torch.linspace(
        0,
        scores.size(1) - 1,
        SAMPLE,
        dtype=torch.float64,
        device=scores.device,
    ).long()
    some = torch.cat([spread, found[1][0]])
    errors = {
        "scores": relative_error(scores[:, some], truth(some)),
        "the best scores": relative_error(found[0], scores.topk(found[0].size(1)).values),
        "their documents": relative_error(found[0], scores.gather(1, found[1])),
    }
    wrong = [
        f"{name} are off by {error:.1e}"
        for name, error in errors.items()
        if error > BUDGETS["float32"].forward
    ]
    return ", ".join(wrong) or "ok"


def made_late(
    folder: Path,
    storage: str,
    count: int,
    length: int,
    dims: int,
    device: torch.device,
) -> LateIndex:
    """An index of such documents without candidates, by files as :meth:`LateIndex.build` writes
    them.
    """
    folder.mkdir()
    sums = list[int]()

    def checked(arrays: list[npt.NDArray[np.generic]], start: int) -> list[int]:
        rows = np.arange(start, min(start + 1000 * length, len(arrays[0])), length)
        found: list[int] = token_blocks.checksums(arrays, rows, rows + length).tolist()
        return found

    values, scales = (
        (folder / name).open("wb") for name in (token_blocks.VALUES, token_blocks.SCALES)
    )
    with values, scales, ThreadPoolExecutor() as pool:
        for low in range(0, count, PIECE):
            made = made_tokens(min(PIECE, count - low), length, dims, low, device)
            flat = QuantizedTokens(made.values.flatten(0, 1), made.scales.flatten())
            arrays = token_blocks.file_arrays(
                token_blocks.to_storage(flat, storage).map(Tensor.cpu),
            )
            for stream, array in zip((values, scales), arrays, strict=True):
                stream.write(array.data)
            sums += chain.from_iterable(
                pool.map(partial(checked, arrays), range(0, len(arrays[0]), 1000 * length)),
            )
    np.save(folder / token_blocks.OFFSETS, np.arange(count + 1) * length)
    np.save(folder / token_blocks.CHECKSUMS, np.array(sums, np.uint32))
    files = token_blocks.TokenFiles(folder, count, dims, storage)
    return LateIndex(
        [f"d{i}" for i in range(count)],
        files,
        None,
        {"storage": storage},
        Provenance(),
    )
