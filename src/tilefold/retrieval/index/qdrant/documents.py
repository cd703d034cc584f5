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
# The token vectors of a document must have fewer numbers than this.
_MAX_TOKEN_FLOATS = 1_048_576
# Range of the integers that a payload stores without rounding.
_MIN_PAYLOAD_INTEGER = -(1 << 63)
_MAX_PAYLOAD_INTEGER = (1 << 64) - 1
# Estimates of the bytes of a number in a request, and of the size of the rest of a document, in
# numbers.
_BYTES_PER_NUMBER = 20
_NUMBERS_PER_DOCUMENT = 64


def key_of(document_id: str) -> str:
    """Return the UUID of a document's id. Equal ids have equal UUIDs."""
    return str(uuid.uuid5(_NAMESPACE, document_id))


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return ids as a list, and raise ``TypeError`` if they are one string instead of several."""
    id_list = list_of_ids("ids", ids)
    check_text_ids("ids", id_list)
    return id_list


@dataclass
class Queries:
    """N queries with any of the kinds of vectors of a collection.

    Attributes:
        ids: ids of the queries, unique and not empty.
        sparse: sparse vectors with the same ids in the same order; None for none.
        dense: dense vectors, finite float32 ``[N, D]``; None for none.
        tokens: token vectors with the same ids in the same order; None for none.

    Raises:
        DataError: if there are no vectors, if ids differ, or if a number is not finite.
    """

    ids: list[str]
    sparse: SparseVectors | None = None
    dense: Dense | None = None
    tokens: TokenVectors | None = None

    def __post_init__(self) -> None:
        """Check that all vectors are finite and have the attribute `ids` as their ids."""
        self.ids = list(list_of("ids", self.ids))
        check_ids(self.ids)
        if self.sparse is None and self.dense is None and self.tokens is None:
            raise ArgumentDataError(
                "vectors",
                "expected sparse, dense or tokens, got None for all three.",
            )
        if self.sparse is not None:
            check_vectors("sparse", self.sparse)
            self._check_same_ids("sparse", self.sparse.ids)
        if self.dense is not None:
            self.dense = _to_finite_array(self.dense, self.ids)
        if self.tokens is not None:
            check_instance("tokens", self.tokens, TokenVectors, "encode_texts(model, texts)")
            self._check_same_ids("tokens", self.tokens.ids)
            _check_finite_tokens(self.tokens)

    def _check_same_ids(self, name: str, ids: Sequence[str]) -> None:
        """Raise ``DataError`` if vectors do not have the attribute `ids` as their ids.

        Args:
            name: the name of the argument, for the error.
            ids: ids of the vectors.
        """
        if len(ids) != len(self.ids):
            raise DataError(f"{name}: expected the {len(self.ids)} ids of `ids`, got {len(ids)}.")
        for vector_id, expected_id in zip(ids, self.ids, strict=True):
            if vector_id != expected_id:
                raise DataError(
                    f"{name}: expected the {len(self.ids)} ids of `ids` in the same order, got "
                    f"{vector_id!r} instead of {expected_id!r}.",
                )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def _sizes(self) -> dict[str, int]:
        """Kind of vectors -> their dimension, for the kinds that are not None."""
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
        """Kinds of vectors that are not None, such as ``["sparse", "dense"]``."""
        return list(self._sizes)

    @property
    def _argument(self) -> str:
        """Name of the argument that this object is passed as, for errors."""
        return "queries"

    def check_compatible(self, layout: Layout, location: str) -> None:
        """Raise an error if a collection cannot be searched with these vectors.

        Args:
            layout: kinds and dimensions of the vectors of the collection.
            location: folder or address of the collection, for errors.

        Raises:
            VocabularyMismatchError: if the vocabularies differ.
            DataError: if the collection does not have a kind of vectors, or if dimensions differ.
        """
        argument = self._argument
        if self.sparse is not None and layout.vocab_size is not None:
            check_same_vocabulary(layout, self.sparse, location, argument)
        for kind, size in self._sizes.items():
            expected_size = layout.sizes[kind]
            if expected_size is None:
                raise DataError(
                    f"{argument}: expected {', '.join(layout.kinds)} vectors, as {location} has, "
                    f"got {kind} vectors.",
                )
            if size != expected_size:
                raise DataError(
                    f"{argument}: expected {kind} vectors of dimension {expected_size} as in "
                    f"{location}, got {size}.",
                )

    def vectors(self, row: int) -> Json:
        """Convert the vectors of one query or document to Python lists for Qdrant.

        Args:
            row: the row of the query or document.

        Returns:
            ``"sparse"`` -> a pair of terms and positive weights, ``"dense"`` -> a list of numbers,
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
        payloads: document id -> fields to filter by, with values that JSON can represent. Documents
            may be missing. Floats that equal a 64-bit integer are stored as that integer, because
            Qdrant does not match 5.0 with 5.
        models: ``"dense"`` or ``"tokens"`` -> fingerprint of the model. The provenance of sparse
            vectors has their model.
        precisions: ``"dense"`` or ``"tokens"`` -> number types in which the vectors were computed,
            such as ``"bf16"``. The provenance of sparse vectors has their precision.

    Raises:
        DataError: if ids differ, if a number is not finite, or if a payload cannot be stored.
    """

    payloads: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the vectors and payloads, and add the model and precision of sparse vectors."""
        super().__post_init__()
        check_text_ids("ids", self.ids)
        document_ids = set(self.ids)
        check_fields_by_id("payloads", self.payloads)
        check_mapping("models", self.models, "kind of vectors -> fingerprint")
        check_mapping("precisions", self.precisions, "kind of vectors -> precision")
        normalized_payloads = {}
        for document_id, payload in self.payloads.items():
            if document_id not in document_ids:
                raise DataError(f"payloads: expected ids of the documents, got {document_id!r}.")
            _check_payload(document_id, payload)
            normalized_payloads[document_id] = _normalize_fields(payload)
        self.payloads = normalized_payloads
        if self.sparse is not None:
            provenance = self.sparse.provenance
            if provenance.model_fingerprint:
                self.models = {**self.models, SPARSE: provenance.model_fingerprint}
            if provenance.precision:
                self.precisions = {**self.precisions, SPARSE: provenance.precision}

    @property
    def field_kinds(self) -> dict[str, list[str]]:
        """Field of the payloads -> types of its values."""
        return kinds_by_field(self.payloads.values())

    def check_compatible(self, layout: Layout, location: str) -> None:
        """Raise an error if a collection cannot store these documents.

        Args:
            layout: the layout of the collection.
            location: folder or address of the collection, for errors.

        Raises:
            VocabularyMismatchError: if the vocabularies differ.
            ArgumentDataError: if a kind of vectors is missing, if models or passages differ, or if
                the collection cannot store a number.
        """
        super().check_compatible(layout, location)
        for kind in layout.kinds:
            if kind not in self.kinds:
                raise ArgumentDataError(
                    "documents",
                    f"{location} stores {kind} vectors, got only {', '.join(self.kinds)}. "
                    f"Pass {kind} vectors of all documents, too.",
                )
        check_models(layout.models, self.models, location)
        self._check_integers(layout)
        if self.sparse is not None:
            _check_passages_and_weights(self.sparse, layout, location)
        if self.tokens is not None:
            _check_token_counts(self.tokens)

    @property
    def _argument(self) -> str:
        return "documents"

    def _check_integers(self, layout: Layout) -> None:
        """Raise ``DataError`` if a payload has a float in a field that is declared as integer.

        Qdrant's index of the field would not contain the float.
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
        """Return the documents in some rows as an engine stores them."""
        points = []
        for row in rows:
            document_id = self.ids[row]
            payload = {**self.payloads.get(document_id, {}), ID: document_id}
            points.append(Point(key_of(document_id), payload, self.vectors(row)))
        return points

    def batches(self, max_documents: int, max_bytes: int) -> Iterator[list[int]]:
        """Divide the documents among requests to the engine.

        The size of a request is estimated from the numbers in its vectors and the length of its
        payloads.

        Args:
            max_documents: largest number of documents of a request.
            max_bytes: largest estimated size of a request. A larger document is a request by
                itself.

        Yields:
            Rows of the documents of each request, in order.
        """
        # Numbers of each document. A sparse entry has two numbers, its term and its weight.
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
        """Return a SHA-256 of the documents and of the layout that they are stored with.

        An interrupted build is resumed only if this digest has not changed.

        Args:
            layout: the layout of the collection.
        """
        # The dimensions of dense and token vectors are part of the documents.
        settings = [layout.weights, layout.distance, layout.vocab_size]
        hasher = hashlib.sha256(json.dumps(settings).encode())
        for document_id in self.ids:
            entry = [document_id, self.payloads.get(document_id, {})]
            hasher.update(json.dumps(entry, sort_keys=True).encode())
        arrays: list[object] = []
        if self.sparse is not None:
            arrays += [self.sparse.indptr, self.sparse.indices, self.sparse.data]
        arrays.append(self.dense)
        if self.tokens is not None:
            arrays += [self.tokens.offsets, self.tokens.values, self.tokens.scales]
        for array in arrays:
            if array is not None:
                hasher.update(np.asarray(array).tobytes())
        return hasher.hexdigest()


def _describe_passages(passages: str | None) -> str:
    """Describe how documents were divided, for an error."""
    return f"passages ({passages})" if passages else "whole documents"


def _check_passages_and_weights(sparse: SparseVectors, layout: Layout, location: str) -> None:
    """Raise ``ArgumentDataError`` if a collection cannot store sparse vectors of documents.

    Args:
        sparse: the sparse vectors.
        layout: the layout of the collection.
        location: folder or address of the collection, for errors.
    """
    if sparse.provenance.passages != layout.passages:
        expected = _describe_passages(layout.passages)
        actual = _describe_passages(sparse.provenance.passages)
        raise ArgumentDataError(
            "documents",
            f"expected {expected} as in {location}, got {actual}. Encode the documents with the "
            "same passages.",
        )
    heaviest = float(sparse.data.max(initial=0.0))
    if layout.weights == "float16" and heaviest > _MAX_FLOAT16:
        raise ArgumentDataError(
            "documents",
            f"expected weights up to {_MAX_FLOAT16:.0f} for float16, got {heaviest:g}. Scale the "
            "weights, or use float32.",
        )


def _check_token_counts(tokens: TokenVectors) -> None:
    """Raise ``ArgumentDataError`` if a document has more token vectors than Qdrant can store."""
    if not len(tokens):
        return
    lengths = tokens.offsets.diff()
    longest = int(lengths.argmax())
    n_floats = int(lengths[longest]) * tokens.dimension
    if n_floats >= _MAX_TOKEN_FLOATS:
        raise ArgumentDataError(
            "documents",
            f"expected fewer than {_MAX_TOKEN_FLOATS:,} numbers of token vectors per document, got "
            f"{n_floats:,} in {tokens.ids[longest]!r}. Truncate the document, or pool its tokens.",
        )


def _check_finite_tokens(tokens: TokenVectors) -> None:
    """Raise ``ArgumentDataError`` if a number of token vectors is NaN or infinite."""
    is_finite = tokens.values.float().isfinite()
    if not bool(is_finite.all()):
        value = tokens.values[~is_finite][0].item()
        raise ArgumentDataError(
            "tokens",
            f"expected finite numbers, got {value}. Check the model's output.",
        )


def _to_finite_array(dense: object, ids: list[str]) -> Dense:
    """Return dense vectors as float32 ``[N, D]`` on the CPU.

    Args:
        dense: an array of floats, or a torch tensor on any device.
        ids: ids of the N vectors.

    Raises:
        DataError: if the shape or dtype is wrong, or if a number is NaN or infinite.
    """
    # Only torch tensors have this method.
    if hasattr(dense, "detach"):
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


def _normalize_fields(payload: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a payload with one form of each number."""
    return {name: _normalize(value) for name, value in payload.items()}


def _normalize(value: object) -> object:
    """Return a value of a payload with one form of each number.

    A float that equals a 64-bit integer becomes that integer.
    """
    if isinstance(value, Mapping):
        return _normalize_fields(value)
    if isinstance(value, list | tuple):
        return [_normalize(item) for item in value]
    return canonical_number(value) if isinstance(value, float) else value


def _payload_integer(digits: str) -> int:
    """Return an integer of JSON, or raise ``ValueError`` if Qdrant would round it."""
    if not _MIN_PAYLOAD_INTEGER <= int(digits) <= _MAX_PAYLOAD_INTEGER:
        raise ValueError("an integer of more than 64 bits, which would be rounded")
    return int(digits)


def _check_payload(document_id: str, payload: Mapping[str, object]) -> None:
    """Raise ``DataError`` if Qdrant cannot store a payload, or would change it.

    Args:
        document_id: the id of the document, for the error.
        payload: fields of the document.
    """
    if ID in payload:
        raise DataError(
            f"payloads: the field {ID!r} is reserved for the id, got it for {document_id!r}. "
            "Rename that field.",
        )
    try:
        if not all(isinstance(name, str) for name in payload):
            raise TypeError("a field name that is not a string")
        # Values that JSON cannot represent, such as NaN, raise an error.
        text = json.dumps(dict(payload), allow_nan=False)
        # Integers that Qdrant would round raise an error.
        stored = json.loads(text, parse_int=_payload_integer)
        if not is_unicode(json.dumps(stored, ensure_ascii=False)):
            raise ValueError("an unpaired surrogate")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"payloads: expected values that JSON can represent for {document_id!r}, got other "
            f"values ({error}).",
        ) from error
