"""Comparison of stored vectors with those that a model computes now, for a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tilefold._internal.arguments import check_encoder, check_least_count, check_mapping, path_of
from tilefold._internal.precision import computing_in
from tilefold._internal.typing import Model
from tilefold.retrieval.common.provenance import model_fingerprint, provenance_of
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.pages import DEFAULT_DPI
from tilefold.retrieval.encoding.job import IN_MEMORY, INVARIANT, Encoding
from tilefold.retrieval.encoding.pending_shards import encode_in_memory
from tilefold.retrieval.encoding.sparse import SparseEncoding
from tilefold.retrieval.encoding.tokens import DenseEncoding, TokenEncoding
from tilefold.retrieval.encoding.truncation import limited
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import Manifest, layout_of
from tilefold.retrieval.vectors.sparse import Floats, SparseVectors
from tilefold.retrieval.vectors.sparse_files import read_manifest, read_rows
from tilefold.retrieval.vectors.tokens import TokenVectors, open_dense, open_tokens

__all__ = ["Verification", "encoding_of", "manifest_of", "verify_vectors"]

_SHOWN_IDS = 5  # ids of vectors that differ


@dataclass(frozen=True)
class Verification:
    """The result of a comparison of stored vectors with newly computed ones.

    Attributes:
        n_compared: the number of compared vectors.
        n_different: the number of vectors that differ in a bit.
        largest_difference: the largest absolute difference of an entry; infinite if a text has
            another number of token vectors.
        different_ids: ids of the first vectors that differ.
        invariant: whether the stored vectors were encoded with ``invariant=True``.
        changes: ``"before -> now"`` of the model, the device and the libraries that have changed,
            by name. Only invariant vectors record the device and the libraries.
    """

    n_compared: int
    n_different: int
    largest_difference: float
    different_ids: list[str]
    invariant: bool
    changes: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether the model is the same, and invariant vectors have the same bits."""
        has_other_model = "model" in self.changes
        return not has_other_model and not (self.invariant and self.n_different)


class _StoredVectors(NamedTuple):
    """A folder of vectors of any layout.

    Attributes:
        manifest: its manifest.
        read: reads the vectors of some ids, in the order of the folder.
    """

    manifest: Any
    read: Callable[[list[str]], Any]


def verify_vectors(
    folder: str | Path,
    model: Model,
    texts: Mapping[str, Content],
    *,
    sample: int = 100,
    seed: int = 0,
) -> Verification:
    """Encode a sample of texts or pages again, and compare the bits with the vectors of a folder.

    Args:
        folder: a complete folder of sparse, token or dense vectors.
        model: the model of the vectors. If they were encoded with ``invariant=True``, the model
            must be accelerated with it, too.
        texts: all texts of the folder, id -> text; or pages, if the folder has those of a model of
            images.
        sample: the number of texts or pages that are encoded, at most.
        seed: equal seeds select equal texts or pages.

    Raises:
        DataError: if other texts were encoded into the folder, or it is incomplete or damaged.
        ValueError: if the vectors need a model that is accelerated with ``invariant=True``.
    """
    check_least_count("sample", sample)
    check_mapping("texts", texts, "id -> text")
    stored = _open(path_of("folder", folder))
    manifest = stored.manifest
    encoding = encoding_of(manifest)
    check_encoder("model", model, encoding.MODEL)
    provenance = provenance_of(texts)
    if "texts_sha256" in manifest.provenance.differing_fields(provenance):
        raise DataError(
            f"{folder}: expected the texts that were encoded, got {len(texts)} texts with another "
            "digest. Pass the same texts (--data).",
        )
    invariance = getattr(model, "invariance", None)
    is_invariant = INVARIANT in manifest.settings
    if is_invariant and invariance is None:
        raise ValueError(
            "model must be accelerated with invariant=True, because the vectors were encoded so, "
            "got a model without it; call accelerate(model, invariant=True).",
        )
    ids = _sample_ids(manifest, texts, sample, seed)
    expected = stored.read(ids)
    sampled_texts = {name: texts[name] for name in expected.ids}
    with computing_in(model, _dtype_of(manifest)):
        fingerprint = model_fingerprint(model)  # before the limits of the model are changed
        job = encoding.create_job(model, sampled_texts, IN_MEMORY, lambda: provenance)
        with limited(model, encoding.kind, encoding.max_length):
            actual = encode_in_memory(job, "texts")
        environment: dict[str, str] = {}
        if is_invariant and invariance is not None:
            environment = invariance.environment()
    # largest difference of each vector that differs in a bit
    differences = {
        name: difference
        for name, difference in zip(expected.ids, _compare(expected, actual), strict=True)
        if difference is not None
    }
    return Verification(
        n_compared=len(expected.ids),
        n_different=len(differences),
        largest_difference=max(differences.values(), default=0.0),
        different_ids=list(differences)[:_SHOWN_IDS],
        invariant=is_invariant,
        changes=_describe_changes(manifest, fingerprint, environment),
    )


def manifest_of(folder: str | Path) -> Any:
    """Return the manifest of a folder of sparse, token or dense vectors."""
    return _open(path_of("folder", folder)).manifest


def _open(folder: Path) -> _StoredVectors:
    """Open a folder of vectors of any layout.

    Args:
        folder: the folder.
    """
    layout = layout_of(folder)
    if layout == "sparse":
        return _StoredVectors(read_manifest(folder), lambda ids: read_rows(folder, ids))
    store = open_dense(folder) if layout == "dense" else open_tokens(folder)
    return _StoredVectors(store.manifest, store.read)


def encoding_of(manifest: Any) -> Encoding:
    """Return the options with which the vectors of a manifest were encoded.

    Args:
        manifest: the manifest of sparse, token or dense vectors.
    """
    settings = manifest.settings
    max_length = settings.get("max_length")
    if manifest.layout == "sparse":
        return SparseEncoding(
            kind=manifest.kind,
            max_length=max_length,
            top_k=settings.get("top_k"),
            min_weight=settings.get("min_weight", 0.0),
            special_tokens=settings.get("special_tokens", True),
        )
    if manifest.layout == "dense":
        return DenseEncoding(
            kind=manifest.kind,
            max_length=max_length,
            storage=manifest.storage,
            dimension=manifest.dimension,
        )
    return TokenEncoding(
        kind=manifest.kind,
        max_length=max_length,
        storage=manifest.storage,
        pool_factor=settings.get("pool_factor"),
        dpi=settings.get("dpi", DEFAULT_DPI),
    )


def _dtype_of(manifest: Manifest) -> Any:
    """Return the dtype in which all vectors were computed; None for several, or for fp8."""
    can_be_requested = manifest.precision in ("fp32", "bf16", "fp16")
    return manifest.precision if can_be_requested else None


def _sample_ids(
    manifest: Manifest,
    texts: Mapping[str, Content],
    sample: int,
    seed: int,
) -> list[str]:
    """Return random ids of texts that have a vector.

    Args:
        manifest: the manifest, which lists the texts that could not be encoded.
        texts: all texts by id.
        sample: the number of ids, at most.
        seed: equal seeds give equal ids.
    """
    ids = [name for name in texts if name not in manifest.failed]
    if len(ids) <= sample:
        return ids
    positions = np.random.default_rng(seed).choice(len(ids), sample, replace=False)
    return [ids[position] for position in positions]


def _compare(
    expected: SparseVectors | TokenVectors,
    actual: SparseVectors | TokenVectors,
) -> Iterator[float | None]:
    """Yield the largest difference of each vector, or None if all bits are equal.

    Args:
        expected: the stored vectors.
        actual: newly computed vectors of the same texts, in the same order.
    """
    for row in range(len(expected)):
        if isinstance(expected, SparseVectors) and isinstance(actual, SparseVectors):
            yield _sparse_difference(expected, actual, row)
        elif isinstance(expected, TokenVectors) and isinstance(actual, TokenVectors):
            yield _token_difference(expected, actual, row)


def _sparse_difference(
    expected: SparseVectors,
    actual: SparseVectors,
    row: int,
) -> float | None:
    """Return the largest difference of a sparse vector, or None if all bits are equal.

    Args:
        expected: the stored vectors.
        actual: the newly computed vectors.
        row: the position of the vector in both.
    """
    stored_weights = _dense_row(expected, row)
    new_weights = _dense_row(actual, row)
    if np.array_equal(stored_weights, new_weights):
        return None
    return float(np.abs(stored_weights - new_weights).max())


def _dense_row(vectors: SparseVectors, row: int) -> Floats:
    """Return the weights of all terms of a sparse vector, ``[V]``.

    Args:
        vectors: the vectors.
        row: the position of the vector.
    """
    entries = slice(vectors.indptr[row], vectors.indptr[row + 1])
    weights = np.zeros(vectors.vocab_size, np.float32)
    weights[vectors.indices[entries]] = vectors.data[entries]
    return weights


def _token_difference(
    expected: TokenVectors,
    actual: TokenVectors,
    row: int,
) -> float | None:
    """Return the largest difference of the token vectors of a text, or None if all are equal.

    Args:
        expected: the stored vectors.
        actual: the newly computed vectors.
        row: the position of the text in both.
    """
    stored_tokens = expected.rows(row).float()
    new_tokens = actual.rows(row).float()
    if stored_tokens.shape != new_tokens.shape:
        return float("inf")  # another number of tokens
    if torch.equal(stored_tokens, new_tokens):
        return None
    return float((stored_tokens - new_tokens).abs().max())


def _describe_changes(
    manifest: Manifest,
    fingerprint: str | None,
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Return ``"before -> now"`` of everything that has changed since the vectors were computed.

    Args:
        manifest: the manifest of the vectors.
        fingerprint: the fingerprint of the model.
        environment: the device and the libraries; empty if the manifest does not record them.
    """
    changes = {}
    stored_fingerprint = manifest.provenance.model_fingerprint
    if stored_fingerprint and stored_fingerprint != fingerprint:
        changes["model"] = f"{stored_fingerprint[:8]} -> {str(fingerprint)[:8]}"
    stored_environment = manifest.settings.get(INVARIANT) or {}
    for name in {**stored_environment, **environment}:
        before, now = stored_environment.get(name), environment.get(name)
        if before != now:
            changes[name] = f"{before} -> {now}"
    return changes
