"""Layout of a collection, record of what made it, and conditions on the payload of its documents."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tilefold.retrieval._files import is_unicode
from tilefold.retrieval._ranking import check_choice, check_count
from tilefold.retrieval.errors import DataError, VocabularyMismatchError

SCHEMA_VERSION = 1
WEIGHTS = ("float32", "float16")
DISTANCES = ("dot", "cosine")
FIELDS = ("keyword", "integer", "float", "bool", "text")
ID = "_id"  # of the document, in the payload: Qdrant's own ids are numbers or UUIDs
_STEP = r'(?:[\w-]+|"[^"]+")(?:\[\d*\])*'
_FIELD = re.compile(rf"{_STEP}(?:\.{_STEP})*")
SPARSE, DENSE, TOKENS = "sparse", "dense", "tokens"  # names of the vectors
_BOUNDS = ("gt", "gte", "lt", "lte")


def _check_field(name: object, what: str) -> None:
    if not isinstance(name, str) or not _FIELD.fullmatch(name):
        raise ValueError(
            f'{what}: expected names of fields, with quotes ("a name") around what holds more than letters, digits, - '
            f"and _, got {name!r}. A dot reaches into an object, [] into a list of objects."
        )


@dataclass(frozen=True)
class Layout:
    """Vectors of a collection: any of sparse, dense and token vectors.

    Attributes:
        vocab_size, fingerprint: vocabulary of the sparse vectors, as in ``SparseVectors``; None without any.
        dense: length of the dense vectors, or None.
        tokens: length of a token vector (late interaction), or None.
        weights: how sparse weights are kept, ``"float32"`` or ``"float16"``.
        distance: of dense vectors, ``"dot"`` or ``"cosine"``.
        fields: fields of the payload that filters are quick on -> one of keyword, integer, float, bool, text.
        models: of ``"sparse"``, ``"dense"`` and ``"tokens"`` -> fingerprint of the model, as far as it is known.

    Raises:
        ValueError: no vectors at all, or a wrong value.
    """

    vocab_size: int | None = None
    fingerprint: str | None = None
    dense: int | None = None
    tokens: int | None = None
    weights: str = "float32"
    distance: str = "dot"
    fields: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in {"vocab_size": self.vocab_size, DENSE: self.dense, TOKENS: self.tokens}.items():
            if size is not None:
                check_count(name, size)
        if not self.kinds:
            raise ValueError("layout: expected vocab_size, dense or tokens, got None for all three.")
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("distance", self.distance, DISTANCES)
        for name, kind in self.fields.items():
            if kind not in FIELDS or name == ID:
                raise ValueError(f"fields: expected a name and one of {', '.join(FIELDS)}, got {name!r}: {kind!r}.")
            _check_field(name, "fields")

    @property
    def sizes(self) -> dict[str, int | None]:
        return {SPARSE: self.vocab_size, DENSE: self.dense, TOKENS: self.tokens}

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, size in self.sizes.items() if size is not None]

    def check_same(self, other: Layout, place: str) -> None:
        """Raise an error unless `other` may be asked for where this is: of the same vectors, vocabulary and models."""
        mine, others = (self.vocab_size, self.fingerprint), (other.vocab_size, other.fingerprint)
        if mine[0] != others[0] or (None not in (mine[1], others[1]) and mine[1] != others[1]):
            remedy = "Encode with the same model, or choose another collection."
            raise VocabularyMismatchError(f"layout: expected the vocabulary of {place} {mine}, got {others}. {remedy}")
        for name in ("dense", "tokens", "weights", "distance"):
            own, got = getattr(self, name), getattr(other, name)
            if own != got:
                raise DataError(f"layout: expected {name}={own!r} as in {place}, got {got!r}. Choose another.")
        check_models(self.models, other.models, place)


def check_models(mine: Mapping[str, str], others: Mapping[str, str], place: str) -> None:
    """Raise ``DataError`` where a model is known on both sides and differs."""
    for kind, model in others.items():
        if mine.get(kind, model) != model:
            raise DataError(
                f"documents: expected {kind} vectors of the model that made {place} ({mine[kind][:12]}), got those of "
                f"another ({model[:12]}). Encode with the same model, or choose another collection."
            )


@dataclass(frozen=True)
class Record:
    """Description of a collection that is kept with it."""

    layout: Layout
    texts_sha256: str | None = None  # of all its documents; None once single ones were added, replaced or deleted
    vectors_sha256: str | None = None  # that a build put there, so that it can be resumed; None as above
    complete: bool = True  # no build is unfinished

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], place: str) -> Record:
        remedy = "Build the index again (tilefold index), or update tilefold."
        if (got := value.get("schema_version")) != SCHEMA_VERSION:
            raise DataError(f"{place}: expected a collection of schema {SCHEMA_VERSION}, got {got!r}. {remedy}")
        try:
            known = {item.name for item in fields(Layout)}
            layout = Layout(**{name: item for name, item in value["layout"].items() if name in known})
            return cls(layout, value["texts_sha256"], value["vectors_sha256"], bool(value["complete"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            wrong = f"{dict(value)!r:.80} ({error!r})"
            raise DataError(f"{place}: expected the record of a collection, got {wrong}. {remedy}") from error


@dataclass(frozen=True)
class Filter:
    """Documents whose payload matches all of `must` and none of `must_not`.

    Both are field -> a text, integer or boolean; a list of texts or of integers, of which one must be there; or a range
    such as ``{"gte": 2000, "lt": 2010}``. A field that is a list itself matches with any of its values. ``"by.name"``
    is a field in an object, and ``'"a name"'`` one that holds more than letters, digits, ``-`` and ``_``.

    Raises:
        ValueError: no condition, or one of another form.
    """

    must: Mapping[str, Any] = field(default_factory=dict)
    must_not: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(self.conditions()):
            raise ValueError("where: expected at least one condition, got an empty filter. Leave it out to search all.")

    def conditions(self) -> tuple[list[tuple[str, list[Any] | dict[str, float]]], ...]:
        """Fields of `must` and of `must_not`, each with its values, of which one must be there, or with its bounds."""
        return tuple([(n, _wanted(n, value)) for n, value in part.items()] for part in (self.must, self.must_not))

    @classmethod
    def of(cls, where: Filter | Mapping[str, Any] | None) -> Filter | None:
        return where if where is None or isinstance(where, Filter) else cls(where)


def _wanted(name: str, value: Any) -> list[Any] | dict[str, float]:
    _check_field(name, "where")
    if isinstance(value, Mapping):
        numbers = [n for n in value.values() if isinstance(n, (int, float)) and not isinstance(n, bool)]
        if not value or {*value} - {*_BOUNDS} or len(numbers) < len(value) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"where: expected numbers under {', '.join(_BOUNDS)} for {name!r}, got {dict(value)!r}.")
        return {bound: float(number) for bound, number in value.items()}
    single = isinstance(value, (str, bool, int))
    several: list[Any] = [value] if single else list(value) if isinstance(value, Sequence) else []
    kinds = {type(item) for item in several}
    if not single and (len(kinds) != 1 or bool in kinds or not isinstance(several[0], (str, int))):
        wanted = f"a text, an integer, a boolean, a list of texts or of integers, or a range for {name!r}"
        raise ValueError(f"where: expected {wanted}, got {value!r}.")
    for item in several:
        if not (is_unicode(item) if isinstance(item, str) else -(1 << 63) <= item < 1 << 63):
            raise ValueError(f"where: expected Unicode or an integer of 64 bits for {name!r}, got {item!r}.")
    return several
