"""Metadata of documents, kept with an index, and conditions on them: one grammar for every backend."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_mapping
from tilefold.retrieval.common.files import is_unicode, require
from tilefold.retrieval.data.numbers import INT64, Number, floats_within, integers_within
from tilefold.retrieval.errors import DataError

__all__ = [
    "Filter",
    "Metadata",
    "Where",
    "allowed_by",
    "check_field",
    "field_values",
    "fields_by_id",
    "kept_fields",
]

FILE = "metadata.parquet"
_KINDS = {
    "text": "string",
    "integer": "int64",
    "float": "float64",
    "boolean": "bool_",
}  # and their Arrow types
_NUMBERS = ("integer", "float")
_LONGEST_TEXT, _LONGEST_LIST = 1000, 100
_STEP = r'(?:[\w-]+|"[^"]+")(?:\[\d*\])*'
_FIELD = re.compile(rf"{_STEP}(?:\.{_STEP})*")
_CONDITION = re.compile(rf"\s*({_FIELD.pattern})\s*(!=|>=|<=|=|>|<)(.*)", re.DOTALL)
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|[^,]+')
_BOUNDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
_FORMS = "lang=de, lang=de,en, lang!=de, year>=2000 or lang=null"

Mask = npt.NDArray[np.bool_]
Fields = Mapping[str, object]  # of a document
Wanted = list[object] | dict[str, Number]


def check_field(name: object, what: str) -> None:
    """Raise ``ValueError`` for what is no path to a field."""
    if not isinstance(name, str) or not _FIELD.fullmatch(name):
        form = 'names of fields, with quotes ("a name") around what holds more than letters, digits, - and _'
        raise ValueError(
            f"{what}: expected {form}, got {name!r}. A dot reaches into an object, [] into a list.",
        )


@dataclass(frozen=True)
class Filter:
    """Documents whose metadata match all of `must` and none of `must_not`.

    Both are field -> a text, integer or boolean; a list of texts or of integers, of which one must
    be there; a range such as ``{"gte": 2000, "lt": 2010}``; or None, for documents without the
    field. Numbers are compared by value, whatever their type: 5 matches 5.0, and 2^53 + 1 does not
    match 2^53. A field that is a list itself matches with any of its values. ``"by.name"`` is a
    field in an object, and ``'"a name"'`` one that holds more than letters, digits, ``-`` and
    ``_``. An object has no value to match, but it is a field. No condition, or one of another form,
    is a ``ValueError``.
    """

    must: Fields = field(default_factory=dict)
    must_not: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(self.conditions()):
            raise ValueError(
                "where: expected at least one condition, got an empty filter. Leave it out to search all.",
            )

    def conditions(self) -> tuple[list[tuple[str, Wanted]], ...]:
        """Fields of `must` and of `must_not`: values, of which one must be there, none for no
        field; or bounds.
        """
        return tuple(
            [(n, _wanted(n, value)) for n, value in part.items()]
            for part in (self.must, self.must_not)
        )

    @classmethod
    def of(cls, where: Filter | Fields | None) -> Filter | None:
        if where is None or isinstance(where, Filter):
            return where
        check_mapping("where", where, "field -> value, values or range")
        return cls(where)

    @classmethod
    def parse(
        cls,
        conditions: Iterable[str],
        kinds: Mapping[str, Sequence[str]] | None = None,
    ) -> Filter:
        """From texts: ``lang=de``, ``lang=de,en`` (one of them), ``lang!=de``, ``year>=2000``,
        ``lang=null`` (missing).

        Values are numbers, true or false where they are written so, and texts where `kinds` (field
        -> kinds of its values) has texts alone or they stand in double quotes. Two bounds of a
        field make a range.
        """
        parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for text in conditions:
            if (match := _CONDITION.fullmatch(text)) is None:
                raise ValueError(f"where: expected a condition such as {_FORMS}, got {text!r}.")
            name, sign, rest = match.groups()
            known = None if sign in _BOUNDS else (kinds or {}).get(name)
            found = [_typed(each.strip(), known) for each in _VALUE.findall(rest) or [""]]
            value: Any = found if len(found) > 1 else found[0]
            if sign in _BOUNDS:
                value = {_BOUNDS[sign]: value}
            elif isinstance(value, float):
                value = {"gte": value, "lte": value}
            part = parts[sign == "!="]
            if name in part:
                ranges = isinstance(value, dict) and isinstance(part[name], dict)
                if not ranges or not value.keys().isdisjoint(part[name]):
                    said = f"one condition for {name!r}, got {text!r} too. Join values by commas"
                    raise ValueError(f"where: expected {said}.")
                value |= part[name]
            part[name] = value
        return cls(*parts)


Where = Filter | Fields | None


def _typed(text: str, kinds: Sequence[str] | None) -> object:
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict | list) or (
        kinds == ["text"] and not isinstance(value, str) and value is not None
    ):
        return text
    return value


def _is_bound(value: object) -> bool:
    """Whether a value is a number that float64 can hold, rounded or not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above the largest float64
        return False


def _wanted(name: str, value: object) -> Wanted:
    """Values of a condition, one of which a field must have; or bounds; or ``[]`` for no field."""
    check_field(name, "where")
    if value is None:
        return []
    if isinstance(value, Mapping):
        bounds = _BOUNDS.values()
        if not value or {*value} - {*bounds} or not all(map(_is_bound, value.values())):
            raise ValueError(
                f"where: expected numbers under {', '.join(bounds)} for {name!r}, "
                f"got {dict(value)!r:.200}.",
            )
        return dict(value)
    single = isinstance(value, (str, bool, int))
    several: list[Any] = [value] if single else list(value) if isinstance(value, Sequence) else []
    kinds = {type(item) for item in several}
    if not single and (len(kinds) != 1 or bool in kinds or not isinstance(several[0], (str, int))):
        wanted = f"a text, an integer, a boolean, a list of texts or of integers, a range or None for {name!r}"
        raise ValueError(f"where: expected {wanted}, got {value!r}.")
    for item in several:
        if not (is_unicode(item) if isinstance(item, str) else item in INT64):
            raise ValueError(
                f"where: expected Unicode or an integer of 64 bits for {name!r}, got {item!r}.",
            )
    return several


def kept_fields(fields: Fields) -> dict[str, Any]:
    """Fields that an index stores: texts, integers, floats and booleans, lists of them, and objects
    of such fields.

    Dates become texts (ISO 8601), tuples lists, and numpy's numbers Python's. Lists in a list
    become part of it. Texts that are empty or above 1,000 characters, lists of floats or of more
    than 100 values, integers above 64 bits, numbers that are not finite, and other values are left
    out.
    """
    stored = {str(name): _stored_value(value) for name, value in fields.items()}
    return {name: value for name, value in stored.items() if value is not None}


def _stored_value(value: object) -> object:
    """A value as an index stores it; None for one that is left out."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return kept_fields(value) or None
    if isinstance(value, list | tuple):
        items = list(itertools.islice(_stored_items(value), _LONGEST_LIST + 1))
        if len(items) > _LONGEST_LIST or any(isinstance(item, float) for item in items):
            return None
        return items or None
    if isinstance(value, date | time):
        return value.isoformat()
    return value if _is_storable(value) else None


def _is_storable(value: object) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST_TEXT and is_unicode(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value in INT64


def _stored_items(values: Iterable[object]) -> Iterator[object]:
    """Items of a list as an index stores them, with those of the lists in it."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _stored_items(value)
        elif (stored := _stored_value(value)) is not None:
            yield stored


def check_fields_by_id(metadata: object) -> None:
    """Raise ``TypeError`` unless an argument is None or a mapping of documents to their fields."""
    if metadata is None:
        return
    check_mapping("metadata", metadata, "document id -> fields")
    for name, fields in cast("Mapping[object, object]", metadata).items():
        check_mapping(f"metadata of {name!r}", fields, "field -> value")


def fields_by_id(
    metadata: Mapping[str, Fields],
    ids: Iterable[str],
    passages: str | None,
) -> dict[str, dict[str, Any]]:
    """Fields of each of the `ids` that has any; those of `passages` have the fields of their
    documents.
    """
    owners = ((name, name if passages is None else name.rpartition("#")[0]) for name in ids)
    return {name: kept for name, owner in owners if (kept := kept_fields(metadata.get(owner, {})))}


def field_values(fields: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of all that is in the fields of a document."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            step = name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
            yield from field_values(value, f"{path}.{step}" if path else step)
    elif isinstance(fields, list):
        for value in fields:
            yield from field_values(value, f"{path}[]" if isinstance(value, Mapping) else path)
    else:
        yield path, fields


def _kind(value: object) -> str:
    kinds = ((bool, "boolean"), (str, "text"), (int, "integer"))
    return next((kind for each, kind in kinds if isinstance(value, each)), "float")


def _matching(column: Any, kind: str, wanted: Wanted) -> Mask:
    """Which values of a column of one kind are among some values, or within bounds, bool ``[rows]``.

    Numbers are compared exactly: an integer is not rounded to a float, or the other way round.
    """
    if kind not in _NUMBERS:
        among = _arrow(".compute").is_in(column, _arrow().array(wanted, column.type))
        matching: Mask = among.to_numpy(zero_copy_only=False)
        return matching
    numbers = column.to_numpy()
    low: float
    high: float
    if isinstance(wanted, dict):
        if kind == "float":
            low, high = floats_within(wanted)
        else:
            integers = integers_within(wanted)
            if not integers:
                return np.zeros(len(numbers), bool)
            low, high = integers[0], integers[-1]
        within: Mask = (numbers >= low) & (numbers <= high)
        return within
    if kind == "integer":
        return np.isin(numbers, np.array(wanted, np.int64))
    integral: list[Any] = wanted
    exact_floats = [float(number) for number in integral if float(number) == number]
    return np.isin(numbers, np.array(exact_floats, np.float64))


class Metadata:
    """Fields of the documents of an index: a table of a row per value, with its field, and the row
    of its document.
    """

    def __init__(self, table: Any, n_documents: int) -> None:
        self.table, self.n_documents = table, n_documents
        self._parts: dict[str, Any] = {}

    @classmethod
    def of(
        cls,
        metadata: Mapping[str, Fields] | None,
        ids: Iterable[str],
        passages: str | None,
    ) -> Metadata | None:
        """The metadata (document id -> fields) of the documents, or `passages`, of an index; None
        without any.
        """
        check_fields_by_id(metadata)
        names = list(ids) if metadata else []
        if not (found := fields_by_id(metadata or {}, names, passages)):
            return None
        columns: dict[str, list[Any]] = {column: [] for column in _schema().names}
        for row, name in enumerate(names):
            for path, value in field_values(found.get(name, {})):
                entry = {"field": path, "document": row, _kind(value): value}
                for column, values in columns.items():
                    values.append(entry.get(column))
        return cls(_arrow().table(columns, _schema()), len(names))

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Field -> kinds of its values: text, integer, float, boolean."""
        parts = {
            name: self._part(name) for name in sorted(self.table["field"].unique().to_pylist())
        }
        return {
            name: [kind for kind in _KINDS if part[kind].null_count < len(part)]
            for name, part in parts.items()
        }

    def _part(self, name: str) -> Any:
        if name not in self._parts:
            self._parts[name] = self.table.filter(
                _arrow(".compute").equal(self.table["field"], name),
            )
        return self._parts[name]

    def mask(self, where: Filter) -> Mask:
        """Which documents match, bool ``[N]``.

        Raises:
            ValueError: for a field, or a kind of values, that no document has.
        """
        matching = np.ones(self.n_documents, bool)
        must, must_not = where.conditions()
        for name, values in must:
            matching &= self._documents_with(name, values)
        for name, values in must_not:
            matching &= ~self._documents_with(name, values)
        return matching

    def _documents_with(self, name: str, wanted: Wanted) -> Mask:
        """Which documents meet one condition, bool ``[N]``: see :meth:`Filter.conditions`."""
        if not wanted:
            return ~self._mask_of(self._documents_having(name))
        return self._mask_of(self._documents_matching(name, wanted))

    def _mask_of(self, documents: npt.NDArray[np.int64]) -> Mask:
        mask = np.zeros(self.n_documents, bool)
        mask[documents] = True
        return mask

    def _documents_having(self, name: str) -> npt.NDArray[np.int64]:
        """Rows of the documents with a field, which may be an object, or a list of objects."""
        inside = (f"{name}.", f"{name}[")
        paths = [path for path in self.kinds if path == name or path.startswith(inside)]
        if not paths:
            raise self._unknown_field(name)
        return np.concatenate([self._part(path)["document"].to_numpy() for path in paths])

    def _documents_matching(self, name: str, wanted: Wanted) -> npt.NDArray[np.int64]:
        """Rows of the documents that have one of some values, or a number within bounds."""
        kinds = self.kinds.get(name)
        if kinds is None:
            raise self._unknown_field(name)
        wanted_kind = "float" if isinstance(wanted, dict) else _kind(wanted[0])
        comparable = _NUMBERS if wanted_kind in _NUMBERS else (wanted_kind,)
        chosen = [kind for kind in kinds if kind in comparable]
        if not chosen:
            what = "a range" if isinstance(wanted, dict) else f"{wanted[0]!r} ({wanted_kind})"
            raise ValueError(
                f"where: expected a value of {name!r}, which is {' or '.join(kinds)}, got {what}.",
            )
        part = self._part(name)
        documents = []
        for kind in chosen:
            rows = part.filter(part[kind].is_valid())
            hits = _matching(rows[kind], kind, wanted)
            documents.append(rows["document"].to_numpy()[hits])
        return np.concatenate(documents)

    def _unknown_field(self, name: str) -> ValueError:
        known = ", ".join(f"{path} ({' or '.join(kinds)})" for path, kinds in self.kinds.items())
        return ValueError(f"where: expected a field of the index, {known}; got {name!r}.")

    def take(self, rows: Sequence[int]) -> Metadata:
        """Metadata of some of the documents, in the order of `rows`."""
        place = np.full(self.n_documents, -1, np.int64)
        place[np.asarray(rows, np.int64)] = np.arange(len(rows))
        return Metadata(self._moved(place[self.table["document"].to_numpy()]), len(rows))

    def _moved(self, documents: npt.NDArray[np.int64]) -> Any:
        """The table with other rows of documents, without those below 0."""
        arrow = _arrow()
        return self.table.set_column(1, "document", arrow.array(documents)).filter(
            arrow.array(documents >= 0),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Metadata | None], sizes: Sequence[int]) -> Metadata | None:
        """Metadata of the documents of several indexes, of given sizes, one after the other; None
        without any.
        """
        lows = np.cumsum([0, *sizes]).tolist()
        pairs = [
            (part, low) for part, low in zip(parts, lows[:-1], strict=True) if part is not None
        ]
        tables = [part._moved(part.table["document"].to_numpy() + low) for part, low in pairs]
        return cls(_arrow().concat_tables(tables), lows[-1]) if tables else None

    def save(self, folder: Path) -> None:
        _arrow(".parquet").write_table(self.table, folder / FILE)

    @classmethod
    def load(cls, folder: Path, n_documents: int) -> Metadata | None:
        """Read what :meth:`save` wrote, None where there is none; ``DataError`` for another file."""
        if not (folder / FILE).exists():
            return None
        try:
            table = _arrow(".parquet").read_table(folder / FILE)
        except _arrow().ArrowException as error:
            raise DataError(
                f"{folder / FILE}: expected metadata of an index, got ({error}).",
            ) from error
        rows = table["document"].to_numpy() if table.schema.equals(_schema()) else np.array([-1])
        if rows.size and not 0 <= rows.min() <= rows.max() < n_documents:
            raise DataError(
                f"{folder / FILE}: expected metadata of {n_documents} documents, got others.",
            )
        return cls(table, n_documents)


def allowed_by(metadata: Metadata | None, where: Where, allowed: Mask | None = None) -> Mask | None:
    """Mask ``[N]`` of the documents of an index, with its `metadata`, that match, of those
    `allowed`; None for all.
    """
    if (chosen := Filter.of(where)) is None:
        return allowed
    if metadata is None:
        remedy = "Build it again with them: tilefold index --data, or metadata= in Python"
        raise ValueError(
            f"where: expected an index that keeps metadata of its documents, got one without. {remedy}.",
        )
    found = metadata.mask(chosen)
    return found if allowed is None else found & allowed


def check_metadata(stored: Metadata | None, new: Mapping[str, Fields] | None) -> None:
    """Raise ValueError where new documents come without metadata into an index that keeps some.

    Args:
        stored: metadata of the documents of the index.
        new: document id -> fields of the new documents; an empty mapping says that they have none.
    """
    if stored is None or new is not None:
        return
    raise ValueError(
        f"metadata: expected the fields of the new documents, because the index keeps metadata "
        f"({', '.join(stored.kinds)}), got none. Without them, filters would not find the documents.",
    )


def _arrow(module: str = "") -> Any:
    return require(f"pyarrow{module}", "pyarrow", "Metadata of documents")


def _schema() -> Any:
    types = {"field": "string", "document": "int64", **_KINDS}
    return _arrow().schema([(name, getattr(_arrow(), kind)()) for name, kind in types.items()])
