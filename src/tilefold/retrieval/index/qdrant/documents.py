"""Documents and queries with several kinds of vectors, and their checks against a layout."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_instance, check_mapping, list_of, list_of_ids
from tilefold.retrieval.common.files import Json, check_text_ids, is_unicode
from tilefold.retrieval.data.metadata import check_fields_by_id, field_values, kinds_by_field
from tilefold.retrieval.data.numbers import canonical_number
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.index.qdrant.engine import (
    DENSE,
    ID,
    SPARSE,
    TOKENS,
    Layout,
    Point,
    check_models,
)
from tilefold.retrieval.vectors.sparse import (
    SparseVectors,
    check_ids,
    check_same_vocabulary,
    check_vectors,
)
from tilefold.retrieval.vectors.tokens import TokenVectors

Dense = npt.NDArray[np.float32]
# Namespace of the UUIDs of documents.
_NAMESPACE = uuid.UUID("6b0f2f0e-6f0c-5a54-9f7e-2b1a3c1d9e41")
_MAX_FLOAT16 = 65504.0
# Qdrant takes fewer numbers of token vectors in one document.
_MAX_TOKEN_FLOATS = 1_048_576
# Integers that a payload stores without rounding.
_MIN_PAYLOAD_INTEGER = -(1 << 63)
_MAX_PAYLOAD_INTEGER = (1 << 64) - 1
# About how many bytes a number takes in a request, and how many numbers the rest of a document.
_BYTES_PER_NUMBER = 20
_NUMBERS_PER_DOCUMENT = 64


def key_of(name: str) -> str:
    """Return the UUID of a document's id, which is always the same."""
    return str(uuid.uuid5(_NAMESPACE, name))


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return ids as a list, and raise ``TypeError`` for one text, whose letters may be ids too."""
    names = list_of_ids("ids", ids)
    check_text_ids("ids", names)
    return names


@dataclass
class Queries:
    """N queries with any of the kinds of vectors of a collection.

    Attributes:
        ids: unique, non-empty strings.
        sparse: vectors with the same ids in the same order, or None.
        dense: ``[N, D]`` finite float32, or None.
        tokens: vectors with the same ids in the same order, or None.

    Raises:
        DataError: without vectors, for other ids, and for numbers that are not finite.
    """

    ids: list[str]
    sparse: SparseVectors | None = None
    dense: Dense | None = None
    tokens: TokenVectors | None = None

    def __post_init__(self) -> None:
        """Check that all vectors are finite and have the ids of the queries."""
        self.ids = list(list_of("ids", self.ids))
        check_ids(self.ids)
        if self.sparse is None and self.dense is None and self.tokens is None:
            raise ArgumentDataError(
                "vectors", "expected sparse, dense or tokens, got None for all three."
            )
        if self.sparse is not None:
            check_vectors("sparse", self.sparse)
            self._check_same_ids("sparse", self.sparse.ids)
        if self.tokens is not None:
            check_instance("tokens", self.tokens, TokenVectors, "encode_texts(model, texts)")
            self._check_same_ids("tokens", self.tokens.ids)
        if self.dense is not None:
            self.dense = _finite_array(self.dense, self.ids)
        if self.tokens is not None:
            is_finite = self.tokens.values.float().isfinite()
            if not bool(is_finite.all()):
                value = self.tokens.values[~is_finite][0].item()
                raise ArgumentDataError(
                    "tokens",
                    f"expected finite numbers, got {value}. Check the model's output.",
                )

    def _check_same_ids(self, name: str, ids: Sequence[str]) -> None:
        """Raise ``DataError`` unless vectors have the ids of the queries, in their order.

        Args:
            name: name of the argument, for the error.
            ids: ids of the vectors.
        """
        if list(ids) == self.ids:
            return
        # The error shows the first id that differs, or the number of ids if none does.
        got: str | int = len(ids)
        for vector_id, query_id in zip(ids, self.ids, strict=False):
            if vector_id != query_id:
                got = vector_id
                break
        raise DataError(
            f"{name}: expected the ids of the {len(self.ids)} others in their order, got {got!r}.",
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def _sizes(self) -> dict[str, int]:
        """Kind -> length of its vectors, of the kinds that are not None."""
        sizes = {}
        if self.sparse is not None:
            sizes[SPARSE] = self.sparse.vocab_size
        if self.dense is not None:
            sizes[DENSE] = self.dense.shape[1]
        if self.tokens is not None:
            sizes[TOKENS] = self.tokens.dimension
        return sizes

    @property
    def kinds(self) -> list[str]:
        """Kinds of vectors that are not None, of ``"sparse"``, ``"dense"`` and ``"tokens"``."""
        return list(self._sizes)

    def check(self, layout: Layout, place: str) -> None:
        """Raise an error unless a collection can be searched with these vectors.

        Args:
            layout: kinds and lengths of the vectors of the collection.
            place: folder or address of the collection, for errors.

        Raises:
            VocabularyMismatchError: for another vocabulary.
            DataError: for vectors of a kind or length that the collection lacks.
        """
        argument = "documents" if isinstance(self, Documents) else "queries"
        if self.sparse is not None and layout.vocab_size is not None:
            check_same_vocabulary(layout, self.sparse, place, argument)
        for kind, size in self._sizes.items():
            expected_size = layout.sizes[kind]
            if expected_size is None:
                raise DataError(
                    f"{argument}: {place} has no {kind} vectors, got some. It has: "
                    f"{', '.join(layout.kinds)}.",
                )
            if size != expected_size:
                raise DataError(
                    f"{argument}: expected {kind} vectors of length {expected_size} as in {place}, "
                    f"got {size}.",
                )

    def vectors(self, row: int) -> Json:
        """Convert the vectors of one query or document to Python lists for Qdrant.

        Args:
            row: position of the query or document.

        Returns:
            ``"sparse"`` -> terms and positive weights, ``"dense"`` -> a list of numbers,
            ``"tokens"`` -> a list of numbers per token. Vectors without entries are left out.
        """
        vector_by_kind: Json = {}
        if self.sparse is not None:
            terms, weights = self.sparse.row(row)
            is_positive = weights > 0
            if is_positive.any():
                vector_by_kind[SPARSE] = (
                    terms[is_positive].tolist(),
                    weights[is_positive].tolist(),
                )
        if self.dense is not None:
            vector_by_kind[DENSE] = self.dense[row].tolist()
        if self.tokens is not None:
            token_vectors = self.tokens.rows(row)
            if len(token_vectors):
                vector_by_kind[TOKENS] = token_vectors.tolist()
        return vector_by_kind


@dataclass
class Documents(Queries):
    """Documents with all kinds of vectors of a collection.

    The first four attributes are those of :class:`Queries`.

    Attributes:
        payloads: id -> fields to filter by, with values that JSON can hold. Documents may be
            missing. Floats that equal a 64-bit integer are stored as that integer, because Qdrant
            does not match 5.0 by 5.
        models: of ``"dense"`` and ``"tokens"`` -> fingerprint of the model. That of sparse vectors
            is in their provenance.
        precisions: of ``"dense"`` and ``"tokens"`` -> number types in which the vectors were
            computed, such as ``"bf16"``. That of sparse vectors is in their provenance.

    Raises:
        DataError: for parts that do not fit together, numbers that are not finite, and payloads
            that cannot be stored.
    """

    payloads: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the payloads, and record the model and the precision of the sparse vectors.

        Sparse vectors carry their provenance. For dense and token vectors, the caller passes it.
        """
        super().__post_init__()
        check_text_ids("ids", self.ids)
        document_ids = set(self.ids)
        check_fields_by_id("payloads", self.payloads)
        check_mapping("models", self.models, "kind of vectors -> fingerprint")
        check_mapping("precisions", self.precisions, "kind of vectors -> precision")
        for name, payload in self.payloads.items():
            if name not in document_ids:
                raise DataError(f"payloads: expected ids of the documents, got {name!r}.")
            _check_payload(name, payload)
        self.payloads = {
            name: {field_name: _canonical(value) for field_name, value in payload.items()}
            for name, payload in self.payloads.items()
        }
        if self.sparse is not None:
            provenance = self.sparse.provenance
            if provenance.model_fingerprint:
                self.models = {**self.models, SPARSE: provenance.model_fingerprint}
            if provenance.precision:
                self.precisions = {**self.precisions, SPARSE: provenance.precision}

    @property
    def field_kinds(self) -> dict[str, list[str]]:
        """Field of the payloads -> kinds of its values."""
        return kinds_by_field(self.payloads.values())

    def check(self, layout: Layout, place: str) -> None:
        """Raise an error unless a collection can store these documents.

        Args:
            layout: of the collection.
            place: where it is, for errors.

        Raises:
            VocabularyMismatchError: for another vocabulary.
            DataError: for a missing kind of vectors, another model or other passages, and numbers
                that the collection cannot store.
        """
        super().check(layout, place)
        for kind in layout.kinds:
            if kind not in self.kinds:
                raise ArgumentDataError(
                    "documents",
                    f"{place} keeps {kind} vectors, got only {', '.join(self.kinds)}. "
                    "Give those of all as well.",
                )
        check_models(layout.models, self.models, place)
        self._check_integers(layout)
        if self.sparse is not None and self.sparse.provenance.passages != layout.passages:
            expected = _described_passages(layout.passages)
            actual = _described_passages(self.sparse.provenance.passages)
            raise ArgumentDataError(
                "documents",
                f"expected {expected} as in {place}, got {actual}. Encode them alike.",
            )
        if self.sparse is not None and layout.weights == "float16":
            heaviest = float(self.sparse.data.max(initial=0.0))
            if heaviest > _MAX_FLOAT16:
                raise ArgumentDataError(
                    "documents",
                    f"float16 keeps weights up to {_MAX_FLOAT16:.0f}, got {heaviest:g}. "
                    "Scale them.",
                )
        if self.tokens is not None and len(self):
            lengths = self.tokens.offsets.diff()
            longest = int(lengths.argmax())
            n_floats = int(lengths[longest]) * self.tokens.dimension
            if n_floats >= _MAX_TOKEN_FLOATS:
                raise ArgumentDataError(
                    "documents",
                    f"Qdrant takes fewer than {_MAX_TOKEN_FLOATS:,} numbers of token vectors in "
                    f"one, got {n_floats:,} in {self.ids[longest]!r}. Cut it, or pool its tokens.",
                )

    def _check_integers(self, layout: Layout) -> None:
        """Raise ``DataError`` for a float in a payload field that is declared as integers.

        Qdrant's index of the field would not find it.
        """
        integer_fields = {name for name, kind in layout.fields.items() if kind == "integer"}
        if not integer_fields:
            return
        for document, payload in self.payloads.items():
            for path, value in field_values(payload):
                if path in integer_fields and isinstance(value, float):
                    raise DataError(
                        f"payloads: expected integers in the field {path!r}, got {value!r} for "
                        f"{document!r}. Declare the field as float.",
                    )

    def points(self, rows: Sequence[int]) -> list[Point]:
        """Return some of the documents for an engine."""
        points = []
        for row in rows:
            name = self.ids[row]
            payload = {**self.payloads.get(name, {}), ID: name}
            points.append(Point(key_of(name), payload, self.vectors(row)))
        return points

    def batches(self, max_documents: int, max_bytes: int) -> Iterator[list[int]]:
        """Divide the documents among requests to the engine.

        The size of a request is estimated from the numbers in its vectors and its payloads.

        Args:
            max_documents: the most documents of a request.
            max_bytes: the most bytes of a request, by the estimate. A larger document is a request
                by itself.

        Yields:
            Rows of the documents of each request, in order.
        """
        # Numbers of each document. A sparse entry has two, its term and its weight.
        n_numbers = np.full(len(self), _NUMBERS_PER_DOCUMENT)
        if self.dense is not None:
            n_numbers += self.dense.shape[1]
        if self.sparse is not None:
            n_numbers += 2 * np.diff(self.sparse.indptr)
        if self.tokens is not None:
            n_numbers += self.tokens.offsets.diff().numpy() * self.tokens.dimension
        batch: list[int] = []
        batch_bytes = 0
        for row, count in enumerate(n_numbers.tolist()):
            payload = json.dumps(self.payloads.get(self.ids[row], {}))
            row_bytes = count * _BYTES_PER_NUMBER + len(payload)
            is_full = len(batch) == max_documents or batch_bytes + row_bytes > max_bytes
            if batch and is_full:
                yield batch
                batch = []
                batch_bytes = 0
            batch.append(row)
            batch_bytes += row_bytes
        if batch:
            yield batch

    def digest(self, layout: Layout) -> str:
        """Return the SHA-256 of everything that a build with a layout would store.

        An interrupted build is resumed only if the digest is the same.

        Args:
            layout: layout of the collection.
        """
        digest = hashlib.sha256(
            json.dumps([layout.weights, layout.distance, layout.vocab_size]).encode(),
        )
        for name in self.ids:
            digest.update(json.dumps([name, self.payloads.get(name, {})], sort_keys=True).encode())
        arrays: list[object] = []
        if self.sparse is not None:
            arrays += [self.sparse.indptr, self.sparse.indices, self.sparse.data]
        arrays.append(self.dense)
        if self.tokens is not None:
            arrays += [self.tokens.offsets, self.tokens.values, self.tokens.scales]
        for array in arrays:
            if array is not None:
                digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()


def _described_passages(passages: str | None) -> str:
    """Describe how documents were divided, for an error."""
    return f"passages ({passages})" if passages else "whole documents"


def _finite_array(dense: object, ids: list[str]) -> Dense:
    """Return dense vectors as float32 ``[N, D]`` on the CPU.

    Args:
        dense: an array of floats, or a torch tensor on any device.
        ids: ids of the N vectors.

    Raises:
        DataError: for another shape or dtype, NaN or infinity.
    """
    if hasattr(dense, "detach"):  # a torch tensor
        dense = dense.detach().cpu().float().numpy()
    array = np.asarray(dense)
    if array.ndim != 2 or array.shape[0] != len(ids) or not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"dense: expected floats [{len(ids)}, D], got {array.dtype} {list(array.shape)}.",
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    invalid = np.argwhere(~np.isfinite(array))
    if len(invalid):
        row, column = invalid[0]
        raise DataError(
            f"dense: expected finite numbers, got {array[row, column]} for {ids[row]!r}. Check the "
            "model.",
        )
    return array


def _canonical(value: object) -> object:
    """Return a value of a payload with one form of each number: see :func:`canonical_number`."""
    if isinstance(value, Mapping):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return canonical_number(value) if isinstance(value, float) else value


def _payload_integer(digits: str) -> int:
    """Return an integer of JSON, or raise ``ValueError`` if Qdrant would round it."""
    if not _MIN_PAYLOAD_INTEGER <= int(digits) <= _MAX_PAYLOAD_INTEGER:
        raise ValueError("an integer of more than 64 bits, which would be rounded")
    return int(digits)


def _check_payload(name: str, payload: Mapping[str, object]) -> None:
    """Raise ``DataError`` for a payload that Qdrant cannot store, or would change.

    The payload is written as JSON and read again, which finds values that JSON lacks, integers that
    Qdrant would round, and text that is not valid Unicode.

    Args:
        name: id of the document, for the error.
        payload: fields of the document.
    """
    if ID in payload:
        raise DataError(
            f"payloads: {ID!r} is where the id is kept, got it for {name!r}. Rename that field.",
        )
    try:
        text = json.dumps(dict(payload), allow_nan=False)
        if not all(isinstance(key, str) for key in payload):
            raise TypeError("a field whose name is no text")
        stored = json.loads(text, parse_int=_payload_integer)
        if not is_unicode(json.dumps(stored, ensure_ascii=False)):
            raise ValueError("half a surrogate pair")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"payloads: expected what JSON can hold for {name!r}, got other values ({error}).",
        ) from error
