"""Synthetic collections for benchmarks of search: sparse vectors, token vectors and their queries.

Sparse vectors have the published statistics of SPLADE on MS MARCO. Bruch, Nardini, Rulli and
Venturini (SIGIR 2024) count 119 terms in a document and 43 in a query. The heaviest 50 terms of a
document, and 10 of a query, hold 75% of the weights. Products of the 20 and 9 heaviest terms hold
85% of the scores of the best documents. The constants below were chosen to meet these numbers, and
tests check them.

The papers leave the rest open, and these choices are ours:

- Terms follow Zipf's law. The most common term is in two fifths of the documents. Common terms have
  small weights, as expansion terms have.
- Half of the terms of a document belong to one of ``documents / 200`` topics, with larger weights.
- A query asks for one document, by its heavy terms.

For GPUs, :func:`make_device_rows` draws the same distribution on a device, with other random
numbers. Token vectors for late interaction are random. The functions ``check_*`` compare search
results with exact scores.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from tilefold.retrieval.index.exact import Postings
from tilefold.retrieval.index.on_device import DeviceIndex
from tilefold.testing import relative_error

VOCABULARY = 30_522
FINGERPRINT = "0" * 64

# terms that are drawn for a document: the first are from its topic, the others from all terms
DRAWN_TERMS = 178
DRAWN_TOPIC_TERMS = 75
# terms of a topic, and documents per topic
TOPIC_VOCABULARY = 400
TOPIC_DOCUMENTS = 200
# a document retains a share of its drawn terms, uniform between this one and 1
MIN_RETAINED_SHARE = 0.5
# factor of the weights of common terms, where terms of the topic have 1
COMMON_WEIGHT = 0.45

QUERY_TERMS = 44
# a query has this many terms of its document, drawn from the heaviest ones
TARGET_TERMS = 12
HEAVIEST_TERMS = 14
# factor of the weights of these terms, where common terms of the query have 1
TARGET_WEIGHT = 8.0

# documents that are drawn together, to bound the memory
CHUNK_DOCUMENTS = 50_000
# documents whose checksums one thread computes
CHECKSUM_DOCUMENTS = 1000
# documents and sparse queries that are checked with exact scores
CHECKED_DOCUMENTS = 64
CHECKED_QUERIES = 8

# Weights are multiples of this step, so that they fit into 16 bits. A term and its weight are
# sorted as one 32-bit integer, with the term in the upper half.
_WEIGHT_STEP = 1 / 8192
_WEIGHT_BITS = 16
_MAX_WEIGHT = (1 << _WEIGHT_BITS) - 1
# about the root mean square of random integers from -127 to 127
_INT8_ROOT_MEAN_SQUARE = 73.3

Floats = npt.NDArray[np.float32]
# scores `[Q, k]` and positions of documents `[Q, k]`, the best first; -1 pads the positions
TopK = tuple[Tensor, Tensor]


class _Rows(NamedTuple):
    """Sparse rows of NumPy, one after another.

    Attributes:
        terms: ``[nnz]``, increasing in each row.
        weights: ``[nnz]``.
        lengths: ``[N]``, number of terms of each row.
    """

    terms: npt.NDArray[np.int32]
    weights: Floats
    lengths: npt.NDArray[np.int64]

    def vectors(self, id_prefix: str) -> SparseVectors:
        """Return the rows as sparse vectors with ids such as ``d0``, ``d1``."""
        return SparseVectors(
            _ids(id_prefix, len(self.lengths)),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)]),
            self.terms,
            self.weights,
            VOCABULARY,
            FINGERPRINT,
        )


def _ids(prefix: str, count: int) -> list[str]:
    """Return ids of a prefix and a position."""
    return [f"{prefix}{position}" for position in range(count)]


def make_documents(count: int, seed: int) -> SparseVectors:
    """Draw sparse vectors of about 119 terms, with ids ``d0``, ``d1`` and so on.

    Args:
        count: the number of documents.
        seed: the seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    terms_by_rank = rng.permutation(VOCABULARY).astype(np.uint32)
    topics = rng.integers(
        VOCABULARY,
        size=(1 + count // TOPIC_DOCUMENTS, TOPIC_VOCABULARY),
        dtype=np.uint32,
    )
    chunks = [
        _draw_documents(min(CHUNK_DOCUMENTS, count - start), terms_by_rank, topics, rng)
        for start in range(0, count, CHUNK_DOCUMENTS)
    ]
    rows = _Rows(
        terms=np.concatenate([chunk.terms for chunk in chunks]),
        weights=np.concatenate([chunk.weights for chunk in chunks]),
        lengths=np.concatenate([chunk.lengths for chunk in chunks]),
    )
    return rows.vectors("d")


def _draw_documents(
    count: int,
    terms_by_rank: npt.NDArray[np.uint32],
    topics: npt.NDArray[np.uint32],
    rng: np.random.Generator,
) -> _Rows:
    """Draw the rows of some documents.

    Args:
        count: the number of documents.
        terms_by_rank: ``[V]``, terms from the most common to the rarest.
        topics: ``[topics, TOPIC_VOCABULARY]``, terms of each topic in the same order.
        rng: generator of the random numbers.
    """
    terms = np.empty((count, DRAWN_TERMS), np.uint32)
    topic_of_document = rng.integers(len(topics), size=(count, 1))
    topic_ranks = _zipf_ranks(TOPIC_VOCABULARY, (count, DRAWN_TOPIC_TERMS), rng)
    terms[:, :DRAWN_TOPIC_TERMS] = topics[topic_of_document, topic_ranks]
    common_ranks = _zipf_ranks(VOCABULARY, (count, DRAWN_TERMS - DRAWN_TOPIC_TERMS), rng)
    terms[:, DRAWN_TOPIC_TERMS:] = terms_by_rank[common_ranks]
    weights = np.log1p(rng.standard_exponential(terms.shape, np.float32))
    weights[:, DRAWN_TOPIC_TERMS:] *= COMMON_WEIGHT
    # the order of both draws is part of the seed's meaning
    draws = rng.random((count, DRAWN_TERMS), np.float32)
    retained_shares = rng.uniform(MIN_RETAINED_SHARE, 1, (count, 1))
    return _sorted_rows(terms, weights, draws < retained_shares)


def _sorted_rows(
    terms: npt.NDArray[np.uint32],
    weights: Floats,
    retained: npt.NDArray[np.bool_],
) -> _Rows:
    """Sort the terms of each row, and retain one entry per term: the one of the largest weight.

    Args:
        terms: ``[N, drawn]``, with repetitions.
        weights: ``[N, drawn]``, rounded down to multiples of ``_WEIGHT_STEP``.
        retained: ``[N, drawn]``, False for entries that are left out.
    """
    quantized = np.clip(weights / _WEIGHT_STEP, 1, _MAX_WEIGHT).astype(np.uint32)
    keys = terms << _WEIGHT_BITS | quantized
    left_out = np.iinfo(np.uint32).max
    keys[~retained] = left_out
    keys.sort(axis=1)
    is_largest = keys != left_out
    is_largest[:, :-1] &= keys[:, 1:] >> _WEIGHT_BITS != keys[:, :-1] >> _WEIGHT_BITS
    entries = keys[is_largest]
    return _Rows(
        terms=(entries >> _WEIGHT_BITS).astype(np.int32),
        weights=(entries & _MAX_WEIGHT).astype(np.float32) * np.float32(_WEIGHT_STEP),
        lengths=is_largest.sum(axis=1),
    )


def make_queries(documents: SparseVectors, count: int, seed: int) -> SparseVectors:
    """Draw queries of about 43 terms, each of which asks for one document.

    12 terms are among the 14 heaviest of the document, and much heavier than the others.

    Args:
        documents: the collection, or a part of it.
        count: the number of queries.
        seed: the seed of the random numbers.

    Returns:
        Sparse vectors with ids ``q0``, ``q1`` and so on.
    """
    rng = np.random.default_rng([seed, 1])
    frequencies = np.bincount(documents.indices, minlength=VOCABULARY)
    terms_by_rank = frequencies.argsort()[::-1]
    terms = terms_by_rank[_zipf_ranks(VOCABULARY, (count, QUERY_TERMS), rng)].astype(np.uint32)
    weights = rng.standard_exponential(terms.shape, np.float32)
    for query, document in enumerate(rng.integers(len(documents), size=count)):
        document_terms, document_weights = documents.row(int(document))
        heaviest = np.argsort(-document_weights)[:HEAVIEST_TERMS]
        targets = rng.permutation(heaviest)[:TARGET_TERMS]
        terms[query, : len(targets)] = document_terms[targets]
        weights[query, : len(targets)] *= TARGET_WEIGHT * document_weights[targets]
    # weights of queries are smaller, so that they fit into 16 bits
    scaled_weights = weights * np.float32(1 / 8)
    rows = _sorted_rows(terms, scaled_weights, retained=np.ones(terms.shape, bool))
    return rows.vectors("q")


def _zipf_ranks(
    size: int,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """Draw ranks below ``size``, with probabilities proportional to ``1 / (rank + 10)``."""
    log_range = np.float32(np.log((size + 10) / 10))
    ranks = 10 * np.exp(rng.random(shape, np.float32) * log_range) - 10
    bounded: npt.NDArray[np.int64] = np.minimum(ranks.astype(np.int64), size - 1)
    return bounded


class DeviceRows(NamedTuple):
    """Sparse rows on a device, as CSR.

    Attributes:
        offsets: ``[N + 1]`` int64.
        terms: ``[nnz]`` int32, increasing in each row.
        weights: ``[nnz]`` fp32.
    """

    offsets: Tensor
    terms: Tensor
    weights: Tensor

    def first(self, count: int) -> SparseVectors:
        """Return the first ``count`` rows on the CPU, with ids ``d0``, ``d1`` and so on."""
        n_entries = int(self.offsets[count])
        return SparseVectors(
            _ids("d", count),
            self.offsets[: count + 1].cpu().numpy(),
            self.terms[:n_entries].cpu().numpy(),
            self.weights[:n_entries].cpu().numpy(),
            VOCABULARY,
            FINGERPRINT,
        )

    def on_device(self, devices: Sequence[str] | None = None) -> DeviceIndex:
        """Return what ``on(devices)`` of an :class:`ExactIndex` of these rows would return.

        Args:
            devices: names of the devices; None for the device of the rows.
        """
        count = len(self.offsets) - 1
        order = self.terms.argsort(stable=True)
        documents = torch.arange(count, dtype=torch.int32, device=order.device)
        document_of_entry = documents.repeat_interleave(self.offsets.diff())
        ends = torch.bincount(self.terms, minlength=VOCABULARY).cumsum(0)
        postings = Postings(
            offsets=torch.nn.functional.pad(ends, (1, 0)).cpu().numpy(),
            documents=document_of_entry[order].cpu().numpy(),
            weights=self.weights[order].cpu().numpy(),
            n_documents=count,
        )
        # stand-in for the description of an index on disk
        description: Any = SimpleNamespace(
            backend="exact",
            metadata=None,
            n_documents=count,
            vocab_size=VOCABULARY,
            fingerprint=FINGERPRINT,
            provenance=Provenance(),
        )
        return DeviceIndex(_ids("d", count), postings, description, devices or order.device)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the rows as torch's CSR matrix ``[N, V]``."""
        with warnings.catch_warnings():
            # torch warns that its CSR support is in beta
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(
                self.offsets.int(),
                self.terms,
                self.weights.to(dtype),
                (len(self.offsets) - 1, VOCABULARY),
            )

    def check_top_k(
        self,
        top_k: TopK,
        index: DeviceIndex,
        terms: Tensor,
        weights: Tensor,
    ) -> str:
        """Compare the scores of the first queries with products in fp64.

        Both the scores of the returned documents and the ``k`` best scores of all documents are
        compared. A search sums integers, so each of a query's terms may add an error of 2^-30 of
        the largest possible score. The result in fp32 may add 2^-22 of the score.

        Args:
            top_k: the scores and documents ``[Q, k]`` of a search by the index.
            index: the index of these rows.
            terms: ``[Q, terms]``, terms of the queries.
            weights: ``[Q, terms]``, their weights. Padding has 0.

        Returns:
            ``"ok"``, or the reason why the scores are wrong.
        """
        matrix = self.matrix(torch.float64)
        all_scores, all_documents = top_k
        for query in range(min(CHECKED_QUERIES, len(terms))):
            scores, documents = all_scores[query], all_documents[query]
            query_terms, query_weights = terms[query].long(), weights[query].double()
            dense_query = torch.zeros(index.vocab_size, dtype=torch.float64, device=terms.device)
            dense_query.scatter_add_(0, query_terms, query_weights)
            exact_scores = matrix @ dense_query
            best_scores = exact_scores.topk(len(scores)).values
            returned_scores = torch.where(
                documents >= 0,
                exact_scores[documents.clamp(min=0)],
                0,
            )
            largest_score = (query_weights * index.postings.largest[query_terms]).sum()
            n_terms = (query_weights > 0).sum()
            allowed = n_terms * 2.0**-30 * largest_score + 2.0**-22 * best_scores
            error = torch.maximum(
                (scores - best_scores).abs(),
                (scores - returned_scores).abs(),
            )
            ratio = error / allowed.clamp(min=1e-30)
            if not bool((ratio <= 1).all()):
                return f"scores are off by {float(ratio.max()):.3g} times what is allowed"
        return "ok"


def make_device_rows(count: int, seed: int, device: torch.device) -> DeviceRows:
    """Draw documents like those of :func:`make_documents` on a device.

    Args:
        count: the number of documents.
        seed: the seed of the random numbers. They differ from those of :func:`make_documents`.
        device: the device that draws and holds the rows.
    """
    generator = torch.Generator(device).manual_seed(seed)
    terms_by_rank = torch.randperm(
        VOCABULARY,
        dtype=torch.int32,
        generator=generator,
        device=device,
    )
    topics = torch.randint(
        VOCABULARY,
        (1 + count // TOPIC_DOCUMENTS, TOPIC_VOCABULARY),
        dtype=torch.int32,
        generator=generator,
        device=device,
    )
    chunks = [
        _draw_device_documents(
            min(CHUNK_DOCUMENTS, count - start),
            terms_by_rank,
            topics,
            generator,
        )
        for start in range(0, count, CHUNK_DOCUMENTS)
    ]
    terms, weights, lengths = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return DeviceRows(offsets, terms, weights)


def _draw_device_documents(
    count: int,
    terms_by_rank: Tensor,
    topics: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the rows of some documents on a device, as :func:`_draw_documents` does with NumPy.

    A document has terms of its topic and common terms. Of each, rank and weight are drawn, and a
    random share of the terms is left out. Of a term that was drawn twice, the larger weight counts.

    Args:
        count: the number of documents.
        terms_by_rank: ``[V]`` int32, terms from the most common to the rarest.
        topics: ``[topics, TOPIC_VOCABULARY]`` int32, terms of each topic in the same order.
        generator: generator of the random numbers, on the device of the tensors.

    Returns:
        Terms ``[nnz]`` int32, weights ``[nnz]`` fp32, and the number of terms of each row
        ``[count]``.
    """
    device = topics.device
    topic_of_document = torch.randint(
        len(topics),
        (count, 1),
        generator=generator,
        device=device,
    )
    common_ranks = _device_zipf_ranks(
        VOCABULARY,
        (count, DRAWN_TERMS - DRAWN_TOPIC_TERMS),
        generator,
    )
    topic_ranks = _device_zipf_ranks(TOPIC_VOCABULARY, (count, DRAWN_TOPIC_TERMS), generator)
    topic_terms = topics[topic_of_document, topic_ranks]
    terms = torch.cat([topic_terms, terms_by_rank[common_ranks]], dim=1)
    weights = torch.empty(terms.shape, device=device)
    weights.exponential_(generator=generator).log1p_()
    weights[:, DRAWN_TOPIC_TERMS:] *= COMMON_WEIGHT
    share_draws = torch.rand(count, 1, generator=generator, device=device)
    retained_shares = MIN_RETAINED_SHARE + (1 - MIN_RETAINED_SHARE) * share_draws
    # A term and its weight are one integer, so that sorting brings equal terms together.
    keys = terms << _WEIGHT_BITS | (weights / _WEIGHT_STEP).clamp(1, _MAX_WEIGHT).int()
    left_out = torch.iinfo(torch.int32).max
    draws = torch.rand(terms.shape, generator=generator, device=device)
    keys[draws >= retained_shares] = left_out
    keys = keys.sort(dim=1).values
    is_largest = keys != left_out
    is_largest[:, :-1] &= keys[:, 1:] >> _WEIGHT_BITS != keys[:, :-1] >> _WEIGHT_BITS
    entries = keys[is_largest]
    return (
        entries >> _WEIGHT_BITS,
        (entries & _MAX_WEIGHT) * _WEIGHT_STEP,
        is_largest.sum(dim=1),
    )


def _device_zipf_ranks(
    size: int,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> Tensor:
    """Draw ranks below ``size`` on a device, with probabilities ``~ 1 / (rank + 10)``."""
    draws = torch.rand(shape, generator=generator, device=generator.device)
    ranks = 10 * (draws * math.log((size + 10) / 10)).exp() - 10
    return torch.clamp(ranks.long(), max=size - 1)


def make_tokens(
    count: int,
    length: int,
    dims: int,
    seed: int,
    device: torch.device,
) -> QuantizedTokens:
    """Draw random int8 token vectors ``[count, length, dims]`` with norms of about 1.

    Args:
        count: the number of documents.
        length: the tokens of a document.
        dims: the dimensions of a token vector.
        seed: the seed of the random numbers.
        device: the device that draws and holds the vectors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(count, length, dims, dtype=torch.int8, device=device)
    for chunk in torch.split(values, CHUNK_DOCUMENTS):
        chunk.random_(-127, 128, generator=generator)
    scales = torch.empty(count, length, device=device).uniform_(0.5, 1.5, generator=generator)
    return QuantizedTokens(values, scales.div_(_INT8_ROOT_MEAN_SQUARE * math.sqrt(dims)))


def make_query_tokens(count: int, length: int, dims: int, device: torch.device) -> Tensor:
    """Draw random token vectors of queries, ``[count, length, dims]`` fp32, with norms of 1."""
    vectors = torch.randn(
        count,
        length,
        dims,
        generator=torch.Generator(device).manual_seed(1),
        device=device,
    )
    return torch.nn.functional.normalize(vectors, dim=-1)


def check_maxsim_top_k(
    top_k: TopK,
    scores: Tensor,
    exact_scores: Callable[[Tensor], Tensor],
) -> str:
    """Compare the result of a late-interaction search with exact scores.

    Args:
        top_k: the scores and documents ``[Q, k]`` of the search.
        scores: ``[Q, N]``, scores of all documents by the kernel.
        exact_scores: a function that returns scores ``[Q, n]`` in fp64 of the documents at ``n``
            positions.

    Returns:
        ``"ok"``, or the comparisons whose error is over the budget of fp32.
    """
    best_scores, best_documents = top_k
    spread = torch.linspace(
        0,
        scores.size(1) - 1,
        CHECKED_DOCUMENTS,
        dtype=torch.float64,
        device=scores.device,
    ).long()
    # some documents of the whole collection, and the hits of the first query
    checked = torch.cat([spread, best_documents[0]])
    k = best_scores.size(1)
    errors = {
        "scores": relative_error(scores[:, checked], exact_scores(checked)),
        "the best scores": relative_error(best_scores, scores.topk(k).values),
        "their documents": relative_error(best_scores, scores.gather(1, best_documents)),
    }
    failures = [
        f"{name} are off by {error:.1e}"
        for name, error in errors.items()
        if error > BUDGETS["float32"].forward
    ]
    return ", ".join(failures) if failures else "ok"


def make_late_index(
    folder: Path,
    storage: str,
    count: int,
    length: int,
    dims: int,
    device: torch.device,
) -> LateIndex:
    """Write and open a late-interaction index of random documents, without candidates.

    The files are those that :meth:`LateIndex.build` writes, but the vectors of all documents are
    never in memory together.

    Args:
        folder: the folder of the index, which must not exist.
        storage: the storage of token vectors, ``int8`` or ``int4``.
        count: the number of documents.
        length: the tokens of a document.
        dims: the dimensions of a token vector.
        device: the device that draws the vectors.
    """
    folder.mkdir()
    checksums: list[int] = []
    with (
        (folder / token_blocks.VALUES).open("wb") as values_file,
        (folder / token_blocks.SCALES).open("wb") as scales_file,
        ThreadPoolExecutor() as pool,
    ):
        for start in range(0, count, CHUNK_DOCUMENTS):
            tokens = make_tokens(min(CHUNK_DOCUMENTS, count - start), length, dims, start, device)
            packed = QuantizedTokens(tokens.values.flatten(0, 1), tokens.scales.flatten())
            stored = token_blocks.to_storage(packed, storage).map(Tensor.cpu)
            values, scales = token_blocks.file_arrays(stored)
            values_file.write(values.data)
            scales_file.write(scales.data)
            checksums += _checksums(pool, [values, scales], length)
    np.save(folder / token_blocks.OFFSETS, np.arange(count + 1) * length)
    np.save(folder / token_blocks.CHECKSUMS, np.array(checksums, np.uint32))
    return LateIndex(
        _ids("d", count),
        token_blocks.TokenFiles(folder, count, dims, storage),
        None,
        {"storage": storage},
        Provenance(),
    )


def _checksums(
    pool: ThreadPoolExecutor,
    arrays: list[npt.NDArray[Any]],
    length: int,
) -> list[int]:
    """Compute the checksums of documents of one length, with several threads.

    Args:
        pool: the threads.
        arrays: packed values and scales of the documents, as they are in the files.
        length: the tokens of a document.
    """
    n_tokens = len(arrays[0])

    def checksums_from(first_token: int) -> list[int]:
        """Compute the checksums of the documents of one task."""
        end = min(first_token + CHECKSUM_DOCUMENTS * length, n_tokens)
        starts = np.arange(first_token, end, length)
        results: list[int] = token_blocks.checksums(arrays, starts, starts + length).tolist()
        return results

    first_tokens = range(0, n_tokens, CHECKSUM_DOCUMENTS * length)
    return list(itertools.chain.from_iterable(pool.map(checksums_from, first_tokens)))
