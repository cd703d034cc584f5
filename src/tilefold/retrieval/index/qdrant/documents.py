"""Documents and queries with several kinds of vectors, checked against a layout."""

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
_SPACE = uuid.UUID("6b0f2f0e-6f0c-5a54-9f7e-2b1a3c1d9e41")  # of document ids
_LARGEST_HALF = 65504.0
_FLOATS_OF_A_POINT = 1_048_576  # of token vectors; Qdrant takes fewer
_INTEGERS = -(1 << 63), (1 << 64) - 1  # that a payload keeps
_BYTES_OF_A_NUMBER = 20  # in a request, about


def key_of(name: str) -> str:
    """UUID of a document's id, always the same."""
    return str(uuid.uuid5(_SPACE, name))


def checked_ids(ids: Iterable[str]) -> list[str]:
    """List of the ids that somebody asks for: a ``TypeError`` for one text, whose letters may be
    ids too.
    """
    names = list_of_ids("ids", ids)
    check_text_ids("ids", names)
    return names


@dataclass
class Queries:
    """Queries with any of the vectors of a collection's layout, one row each in every part.

    Attributes:
        ids: unique, non-empty strings.
        sparse, tokens: vectors with the same ids in the same order, or None.
        dense: ``[N, D]`` finite, as float32, or None.
    """

    ids: list[str]
    sparse: SparseVectors | None = None
    dense: Dense | None = None
    tokens: TokenVectors | None = None

    def __post_init__(self) -> None:
        self.ids = list(list_of("ids", self.ids))
        check_ids(self.ids)
        if self.sparse is None and self.dense is None and self.tokens is None:
            raise ArgumentDataError(
                "vectors", "expected sparse, dense or tokens, got None for all three."
            )
        if self.sparse is not None:
            check_vectors("sparse", self.sparse)
        if self.tokens is not None:
            check_instance("tokens", self.tokens, TokenVectors, "encode_texts(model, texts)")
        for name, vectors in (("sparse", self.sparse), ("tokens", self.tokens)):
            if vectors is not None and list(vectors.ids) != self.ids:
                pairs = zip(vectors.ids, self.ids, strict=False)
                got = next((own for own, wanted in pairs if own != wanted), len(vectors.ids))
                raise DataError(
                    f"{name}: expected the ids of the {len(self.ids)} others in their order, got "
                    f"{got!r}.",
                )
        if self.dense is not None:
            self.dense = _finite(self.dense, self.ids)
        if self.tokens is not None and not bool(
            (finite := self.tokens.values.float().isfinite()).all(),
        ):
            value = self.tokens.values[~finite][0].item()
            raise ArgumentDataError(
                "tokens",
                f"expected finite numbers, got {value}. Check the model's output.",
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {
            SPARSE: None if self.sparse is None else self.sparse.vocab_size,
            DENSE: None if self.dense is None else self.dense.shape[1],
            TOKENS: None if self.tokens is None else self.tokens.dimension,
        }
        return {kind: size for kind, size in sizes.items() if size is not None}

    @property
    def kinds(self) -> list[str]:
        """Kinds that there are of ``"sparse"``, ``"dense"`` and ``"tokens"``."""
        return list(self._sizes)

    def check(self, layout: Layout, place: str) -> None:
        """Raise ``VocabularyMismatchError`` or ``DataError`` unless a collection of this layout can
        answer.
        """
        what = "documents" if isinstance(self, Documents) else "queries"
        if self.sparse is not None and layout.vocab_size is not None:
            check_same_vocabulary(layout, self.sparse, place, what)
        for kind, size in self._sizes.items():
            if (wanted := layout.sizes[kind]) is None:
                raise DataError(
                    f"{what}: {place} has no {kind} vectors, got some. It has: "
                    f"{', '.join(layout.kinds)}.",
                )
            if size != wanted:
                raise DataError(
                    f"{what}: expected {kind} vectors of length {wanted} as in {place}, got "
                    f"{size}.",
                )

    def vectors(self, row: int) -> Json:
        """Vectors of a row that are not empty, by their kind."""
        found: Json = {}
        if self.sparse is not None:
            terms, weights = self.sparse.row(row)
            keep = weights > 0
            if keep.any():
                found[SPARSE] = (terms[keep].tolist(), weights[keep].tolist())
        if self.dense is not None:
            found[DENSE] = self.dense[row].tolist()
        if self.tokens is not None and int(self.tokens.offsets[row + 1]) > int(
            self.tokens.offsets[row],
        ):
            found[TOKENS] = self.tokens.rows(row).tolist()
        return found


@dataclass
class Documents(Queries):
    """Documents with all vectors of a collection's layout; the first four attributes are those of
    :class:`Queries`.

    Attributes:
        payloads: id -> fields to filter by, of what JSON can hold; documents may be missing. Floats
            that equal a 64-bit integer are stored as that integer: Qdrant does not match 5.0 by 5.
        models: of ``"dense"`` and ``"tokens"`` -> fingerprint; that of sparse vectors is in their
            provenance.
        precisions: of ``"dense"`` and ``"tokens"`` -> number types in which the vectors were
            computed, such as ``"bf16"``; that of sparse vectors is in their provenance.

    Parts that do not fit together, numbers that are not finite, or what cannot be stored are a
    ``DataError``.
    """

    payloads: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text_ids("ids", self.ids)
        known = set(self.ids)
        check_fields_by_id("payloads", self.payloads)
        check_mapping("models", self.models, "kind of vectors -> fingerprint")
        check_mapping("precisions", self.precisions, "kind of vectors -> precision")
        for name, payload in self.payloads.items():
            if name not in known:
                raise DataError(f"payloads: expected ids of the documents, got {name!r}.")
            _check_payload(name, payload)
        self.payloads = {
            name: {field_name: _canonical(value) for field_name, value in payload.items()}
            for name, payload in self.payloads.items()
        }
        if self.sparse is not None:
            made_by = self.sparse.provenance
            if made_by.model_fingerprint:
                self.models = {**self.models, SPARSE: made_by.model_fingerprint}
            if made_by.precision:
                self.precisions = {**self.precisions, SPARSE: made_by.precision}

    @property
    def field_kinds(self) -> dict[str, list[str]]:
        """Field of the payloads -> kinds of its values."""
        return kinds_by_field(self.payloads.values())

    def check(self, layout: Layout, place: str) -> None:
        """Raise an error unless the documents have all vectors of this layout and Qdrant can keep
        them.
        """
        super().check(layout, place)
        for kind in layout.kinds:
            if kind not in self.kinds:
                got = ", ".join(self.kinds)
                raise ArgumentDataError(
                    "documents",
                    f"{place} keeps {kind} vectors, got only {got}. Give those of all as well.",
                )
        check_models(layout.models, self.models, place)
        self._check_integers(layout)
        cut = layout.passages if self.sparse is None else self.sparse.provenance.passages
        if cut != layout.passages:
            own, got = (
                f"passages ({each})" if each else "whole documents"
                for each in (layout.passages, cut)
            )
            raise ArgumentDataError(
                "documents",
                f"expected {own} as in {place}, got {got}. Encode them alike.",
            )
        heaviest = 0.0 if self.sparse is None else float(self.sparse.data.max(initial=0.0))
        if layout.weights == "float16" and heaviest > _LARGEST_HALF:
            most = f"up to {_LARGEST_HALF:.0f}"
            raise ArgumentDataError(
                "documents",
                f"float16 keeps weights {most}, got {heaviest:g}. Scale them.",
            )
        if self.tokens is not None and len(self):
            lengths = self.tokens.offsets.diff()
            longest = int(lengths.argmax())
            if (floats := int(lengths[longest]) * self.tokens.dimension) >= _FLOATS_OF_A_POINT:
                most = f"fewer than {_FLOATS_OF_A_POINT:,} numbers of token vectors in one"
                got = f"{floats:,} in {self.ids[longest]!r}. Cut it, or pool its tokens"
                raise ArgumentDataError("documents", f"Qdrant takes {most}, got {got}.")

    def _check_integers(self, layout: Layout) -> None:
        """Raise ``DataError`` for a fraction in a field of integers, which its index would lose."""
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
        """Some of the documents as the engine takes them; an empty vector is left out of its point."""
        named = [(self.ids[row], row) for row in rows]
        return [
            Point(key_of(n), {**self.payloads.get(n, {}), ID: n}, self.vectors(row))
            for n, row in named
        ]

    def batches(self, largest: int, largest_bytes: int) -> Iterator[list[int]]:
        """Rows in order, at most `largest` and about `largest_bytes` of a request at a time."""
        batch: list[int] = []
        size = 0
        numbers = np.full(len(self), 64 + (0 if self.dense is None else self.dense.shape[1]))
        if self.sparse is not None:
            numbers += 2 * np.diff(self.sparse.indptr)
        if self.tokens is not None:
            numbers += (
                np.array(self.tokens.offsets.diff().tolist(), np.int64) * self.tokens.dimension
            )
        for row, count in enumerate(numbers.tolist()):
            needed = count * _BYTES_OF_A_NUMBER + len(
                json.dumps(self.payloads.get(self.ids[row], {})),
            )
            if batch and (len(batch) == largest or size + needed > largest_bytes):
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += needed
        if batch:
            yield batch

    def digest(self, layout: Layout) -> str:
        """SHA-256 of all that a build would store."""
        digest = hashlib.sha256(
            json.dumps([layout.weights, layout.distance, layout.vocab_size]).encode(),
        )
        for name in self.ids:
            digest.update(json.dumps([name, self.payloads.get(name, {})], sort_keys=True).encode())
        sparse, tokens = self.sparse, self.tokens
        of_sparse = () if sparse is None else (sparse.indptr, sparse.indices, sparse.data)
        of_tokens = () if tokens is None else (tokens.offsets, tokens.values, tokens.scales)
        for array in (*of_sparse, self.dense, *of_tokens):
            if array is not None:
                digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()


def _finite(dense: object, ids: list[str]) -> Dense:
    array = dense.detach().cpu().float().numpy() if hasattr(dense, "detach") else np.asarray(dense)
    if array.ndim != 2 or array.shape[0] != len(ids) or not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"dense: expected floats [{len(ids)}, D], got {array.dtype} {list(array.shape)}.",
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    for row, column in np.argwhere(~np.isfinite(array))[:1]:
        raise DataError(
            f"dense: expected finite numbers, got {array[row, column]} for {ids[row]!r}. Check the "
            "model.",
        )
    return array


def _canonical(value: object) -> object:
    """A value of a payload whose numbers have one form each: see :func:`canonical_number`."""
    if isinstance(value, Mapping):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return canonical_number(value) if isinstance(value, float) else value


def _int64(digits: str) -> int:
    if not _INTEGERS[0] <= int(digits) <= _INTEGERS[1]:
        raise ValueError("an integer of more than 64 bits, which would be rounded")
    return int(digits)


def _check_payload(name: str, payload: Mapping[str, object]) -> None:
    if ID in payload:
        raise DataError(
            f"payloads: {ID!r} is where the id is kept, got it for {name!r}. Rename that field.",
        )
    try:
        text = json.dumps(dict(payload), allow_nan=False)
        if not all(isinstance(key, str) for key in payload):
            raise TypeError("a field whose name is no text")
        if not is_unicode(json.dumps(json.loads(text, parse_int=_int64), ensure_ascii=False)):
            raise ValueError("half a surrogate pair")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"payloads: expected what JSON can hold for {name!r}, got other values ({error}).",
        ) from error
