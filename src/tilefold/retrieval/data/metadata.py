"""Metadata of documents in an index, and filters by them, with one grammar for all backends."""

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

from tilefold._internal.arguments import ArgumentError, check_mapping, list_of_texts
from tilefold.retrieval.common.files import is_unicode, require
from tilefold.retrieval.data.numbers import (
    INT64,
    Bounds,
    Number,
    floats_within,
    integers_within,
)
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
# Kind of a value -> name of its Arrow type.
_KINDS = {"text": "string", "integer": "int64", "float": "float64", "boolean": "bool_"}
_NUMBERS = ("integer", "float")
_LONGEST_TEXT = 1000  # characters of a text that an index stores
_LONGEST_LIST = 100  # values of a list that an index stores
# A path to a field is names, such as by, "a name" or authors[], with dots between them.
_STEP = r'(?:[\w-]+|"[^"]+")(?:\[\d*\])*'
_FIELD = re.compile(rf"{_STEP}(?:\.{_STEP})*")
_CONDITION = re.compile(rf"\s*({_FIELD.pattern})\s*(!=|>=|<=|=|>|<)(.*)", re.DOTALL)
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|[^,]+')
_BOUNDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
_FORMS = "lang=de, lang=de,en, lang!=de, year>=2000 or lang=null"

Mask = npt.NDArray[np.bool_]
# Fields of a document and their values.
Fields = Mapping[str, object]
# Condition on a field: a list of accepted values, or the bounds of a range. An empty list accepts
# documents without the field.
Condition = list[object] | dict[str, Number]


def check_field(name: object, argument: str) -> None:
    """Raise ``ValueError`` if a name is not a path to a field of metadata.

    Args:
        name: the path, such as ``year``, ``by.name`` or ``"a name"``.
        argument: name of the argument, for the error.
    """
    if not isinstance(name, str) or not _FIELD.fullmatch(name):
        raise ValueError(
            f"{argument}: expected field names, got {name!r}. Quote a name that has other "
            'characters than letters, digits, - and _ ("a name"). Use . for a member of an object '
            "and [] for the items of a list.",
        )


@dataclass(frozen=True)
class Filter:
    """Conditions on the metadata of documents.

    The value of a condition has one of these forms:

    * A text, an integer or a boolean, also of numpy. The field must equal it.
    * A list of texts or of integers. The field must equal one of them.
    * A range such as ``{"gte": 2000, "lt": 2010}``.
    * None, for documents without the field.

    Numbers are compared by value, whatever their type: 5 matches 5.0, and 2^53 + 1 does not match
    2^53. A field that is a list matches if any of its values matches. ``"by.name"`` is a field in
    an object. A name with other characters than letters, digits, ``-`` and ``_`` is in quotes
    (``'"a name"'``). An object is a field, but has no value to match.

    Attributes:
        must: field -> value. A document must meet all of these conditions.
        must_not: field -> value. A document may meet none of these conditions.

    Raises:
        ValueError: if there is no condition, or a condition has another form.

    Examples:
        >>> condition = Filter(must={"lang": "en", "year": {"gte": 2021}})
        >>> Filter.parse(["lang=en", "year>=2021"]) == condition
        True
    """

    must: Fields = field(default_factory=dict)
    must_not: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mapping("where", self.must, "field -> value, values or range")
        check_mapping("where", self.must_not, "field -> value, values or range")
        if not any(self.conditions()):
            raise ArgumentError(
                "where",
                "expected at least one condition, got an empty filter. Leave it out to search all.",
            )

    def conditions(self) -> tuple[list[tuple[str, Condition]], ...]:
        """Check the conditions, and convert them to one form.

        Returns:
            ``(field, condition)`` for each condition of `must`, and for each one of `must_not`.
        """
        must = [(name, _parse_condition(name, value)) for name, value in self.must.items()]
        must_not = [(name, _parse_condition(name, value)) for name, value in self.must_not.items()]
        return must, must_not

    @classmethod
    def of(cls, where: Filter | Fields | None) -> Filter | None:
        """Return an argument as a filter.

        Args:
            where: a filter, the `must` of a filter, or None for no filter.
        """
        if where is None or isinstance(where, Filter):
            return where
        return cls(where)

    @classmethod
    def parse(
        cls,
        conditions: Iterable[str],
        kinds: Mapping[str, Sequence[str]] | None = None,
    ) -> Filter:
        """Parse a filter from conditions as they are written on the command line.

        Forms are ``lang=de``, ``lang=de,en`` (one of them), ``lang!=de``, ``year>=2000`` and
        ``lang=null`` (missing). Two bounds of a field make a range. A value in double quotes is a
        text. A number, ``true`` and ``false`` are read as in JSON. Any other value is a text.

        Args:
            conditions: the conditions, one text each.
            kinds: field -> kinds of its values; None if unknown. If a field has only texts, its
                values are read as texts, even if they look like numbers.

        Raises:
            ValueError: if a text is not a condition of these forms, or a field has two conditions
                that are not a lower and an upper bound.
        """
        must: dict[str, Any] = {}
        must_not: dict[str, Any] = {}
        for text in list_of_texts("where", conditions):
            match = _CONDITION.fullmatch(text)
            if match is None:
                raise ArgumentError(
                    "where",
                    f"expected a condition such as {_FORMS}, got {text!r}.",
                )
            name, operator, right_side = match.groups()
            value = _parse_right_side(operator, right_side, (kinds or {}).get(name))
            fields = must_not if operator == "!=" else must
            if name in fields:
                value = _join_bounds(fields[name], value, name, text)
            fields[name] = value
        return cls(must, must_not)


Where = Filter | Fields | None


def _join_bounds(earlier: Any, value: Any, name: str, text: str) -> dict[str, object]:
    """Join two conditions on a field to a range. They must be its lower and its upper bound.

    Args:
        earlier: value of the first condition.
        value: value of the second condition.
        name: the field.
        text: the second condition, for the error.

    Raises:
        ValueError: if the conditions are not a lower and an upper bound.
    """
    are_bounds = isinstance(earlier, dict) and isinstance(value, dict)
    if not are_bounds or not value.keys().isdisjoint(earlier):
        raise ArgumentError(
            "where",
            f"expected one condition for {name!r}, got {text!r} too. Join values by commas.",
        )
    return {**value, **earlier}


def _parse_right_side(operator: str, text: str, kinds: Sequence[str] | None) -> Any:
    """Parse the right side of a condition, such as ``de,en`` or ``2000``.

    Args:
        operator: ``=``, ``!=``, ``>``, ``>=``, ``<`` or ``<=``.
        text: the values, separated by commas.
        kinds: kinds of the values of the field; None if unknown.

    Returns:
        A value such as ``"de"``, a list such as ``["de", "en"]``, or a range such as
        ``{"gte": 2000}``.
    """
    is_bound = operator in _BOUNDS
    is_text_field = kinds == ["text"] and not is_bound  # a bound is a number in any field
    items = _VALUE.findall(text) or [""]
    values = [_parse_value(item.strip(), is_text_field=is_text_field) for item in items]
    value = values if len(values) > 1 else values[0]
    if is_bound:
        return {_BOUNDS[operator]: value}
    if isinstance(value, float):
        # Filters do not match lists of floats, so one float becomes a range that contains only it.
        return {"gte": value, "lte": value}
    return value


def _parse_value(text: str, *, is_text_field: bool) -> object:
    """Parse one value of a condition: a number, a boolean, null or a quoted text.

    Anything else is kept as a text, also JSON's lists and objects.

    Args:
        text: the value.
        is_text_field: whether the field has only texts. Numbers and booleans are then texts.
    """
    try:
        value = json.loads(text, parse_constant=str)  # NaN and Infinity stay texts
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict | list):
        return text
    if is_text_field and value is not None and not isinstance(value, str):
        return text
    return value


def _parse_range(name: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Check the bounds of a range.

    Args:
        name: the field.
        value: name of a bound, such as ``"gte"`` -> number.

    Raises:
        ValueError: if there is no bound, a name is unknown, or a bound is not a finite number.
    """
    names = _BOUNDS.values()
    has_unknown_names = not value.keys() <= set(names)
    if not value or has_unknown_names or not all(map(_is_bound, value.values())):
        raise ArgumentError(
            "where",
            f"expected numbers under {', '.join(names)} for {name!r}, got {dict(value)!r:.200}.",
        )
    return dict(value)


def _is_bound(value: object) -> bool:
    """Whether a value is a finite number in the range of float64."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above the largest float64
        return False


def _without_numpy(value: object) -> object:
    """Convert numpy's scalars and arrays in the value of a condition to Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {bound: _without_numpy(number) for bound, number in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numpy(item) for item in value]
    return value


def _parse_condition(name: str, value: object) -> Condition:
    """Check the value of a condition, and convert it to a list or a range.

    Args:
        name: the field.
        value: a text, integer, boolean, list of texts or of integers, range or None.

    Returns:
        A list of accepted values, or the bounds of a range. The list is empty for None.

    Raises:
        ValueError: if the value has another type, or is out of range.
    """
    check_field(name, "where")
    value = _without_numpy(value)
    if value is None:
        return []
    if isinstance(value, Mapping):
        return _parse_range(name, value)
    values: list[Any]
    if isinstance(value, (str, bool, int)):
        values = [value]
    else:
        values = list(value) if isinstance(value, Sequence) else []
        types = {type(item) for item in values}
        if len(types) != 1 or bool in types or not isinstance(values[0], (str, int)):
            raise ArgumentError(
                "where",
                "expected a text, an integer, a boolean, a list of texts or of integers, a "
                f"range or None for {name!r}, got {value!r}.",
            )
    for item in values:
        is_storable = is_unicode(item) if isinstance(item, str) else item in INT64
        if not is_storable:
            raise ArgumentError(
                "where",
                f"expected Unicode text or a 64-bit integer for {name!r}, got {item!r}.",
            )
    return values


def kept_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields that an index stores, in the form in which it stores them.

    Texts, integers, floats, booleans, lists of them, and objects of such fields are stored. Dates
    become ISO 8601 strings, and tuples become lists. Lists in a list are flattened. Left out are
    empty texts, texts of more than 1,000 characters, lists with floats or more than 100 values,
    integers of more than 64 bits, numbers that are not finite, and values of other types.

    Args:
        fields: field -> value.
    """
    stored = {str(name): _stored_value(value) for name, value in fields.items()}
    return {name: value for name, value in stored.items() if value is not None}


def _stored_value(value: object) -> object:
    """Convert a value of metadata to the form in which an index stores it.

    Returns:
        The value; None for an empty, too long or infinite value, a list with floats, and a value of
        a type that an index does not store.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return kept_fields(value) or None
    if isinstance(value, list | tuple):
        items = list(itertools.islice(_stored_items(value), _LONGEST_LIST + 1))
        is_too_long = len(items) > _LONGEST_LIST
        # Filters do not match lists of floats.
        has_floats = any(isinstance(item, float) for item in items)
        if is_too_long or has_floats:
            return None
        return items or None
    if isinstance(value, date | time):
        return value.isoformat()
    return value if _is_storable(value) else None


def _is_storable(value: object) -> bool:
    """Whether an index stores a text, a number or a boolean."""
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST_TEXT and is_unicode(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value in INT64


def _stored_items(values: Iterable[object]) -> Iterator[object]:
    """Yield the items of a list as an index stores them. Lists in the list are flattened."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _stored_items(value)
            continue
        stored = _stored_value(value)
        if stored is not None:
            yield stored


def check_fields_by_id(argument: str, metadata: object) -> None:
    """Raise ``TypeError`` if metadata is neither a mapping document id -> fields nor None.

    Args:
        argument: name of the argument, for the error.
        metadata: value of the argument.
    """
    if metadata is None:
        return
    check_mapping(argument, metadata, "document id -> fields")
    for name, fields in cast("Mapping[object, object]", metadata).items():
        check_mapping(f"{argument} of {name!r}", fields, "field -> value")


def fields_by_id(
    metadata: Mapping[str, Fields],
    ids: Iterable[str],
    *,
    ids_are_passages: bool,
) -> dict[str, dict[str, Any]]:
    """Return the fields that an index stores for its entries.

    Args:
        metadata: document id -> fields.
        ids: ids of the entries.
        ids_are_passages: whether the entries are passages. A passage has the fields of its
            document.

    Returns:
        Id of an entry -> fields. Entries without fields are left out.
    """
    fields_of_entries: dict[str, dict[str, Any]] = {}
    for entry_id in ids:
        # The id of a passage is the id of its document, "#" and the range of the passage.
        document_id = entry_id.rpartition("#")[0] if ids_are_passages else entry_id
        fields = kept_fields(metadata.get(document_id, {}))
        if fields:
            fields_of_entries[entry_id] = fields
    return fields_of_entries


def field_values(fields: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in the fields of a document, with its path.

    A path has names joined by dots. A name with other characters than letters, digits, ``-`` and
    ``_`` is in quotes. ``[]`` marks a list of objects, as in ``authors[].name``.

    Args:
        fields: the fields of a document, or an object, a list or a value in them.
        path: path of `fields`; empty for the fields of a document.

    Yields:
        Path and value.
    """
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
    """Return the kind of a stored value."""
    if isinstance(value, bool):  # before integers, of which it is a subclass
        return "boolean"
    if isinstance(value, str):
        return "text"
    return "integer" if isinstance(value, int) else "float"


def kinds_by_field(rows: Iterable[Fields]) -> dict[str, list[str]]:
    """Return the kinds of the values of each field: text, integer, float or boolean.

    Args:
        rows: the fields of documents.

    Returns:
        Field -> kinds of its values in all documents.
    """
    kinds: dict[str, set[str]] = {}
    for fields in rows:
        for path, value in field_values(fields):
            if value is not None:
                kinds.setdefault(path, set()).add(_kind(value))
    return joined_kinds(kinds, {})


def joined_kinds(
    left: Mapping[str, Iterable[str]],
    right: Mapping[str, Iterable[str]],
) -> dict[str, list[str]]:
    """Return the kinds of the values of each field in either of two collections.

    Args:
        left: field -> kinds of its values in the first collection.
        right: field -> kinds of its values in the second collection.

    Returns:
        Field -> kinds, sorted by field.
    """
    joined = {}
    for name in sorted({*left, *right}):
        kinds = {*left.get(name, ()), *right.get(name, ())}
        joined[name] = [kind for kind in _KINDS if kind in kinds]
    return joined


def paths_of(name: str, known_paths: Iterable[str]) -> list[str]:
    """Return the paths of the values in a field: the field itself, or members of its objects.

    For ``by``, these are paths such as ``by``, ``by.name`` and ``by[].name``.

    Args:
        name: the field.
        known_paths: paths of the values of all documents.
    """
    prefixes = (f"{name}.", f"{name}[")
    return [path for path in known_paths if path == name or path.startswith(prefixes)]


def comparable_kinds(
    name: str, condition: Condition, kinds: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the kinds of a field's values that a condition can match.

    Args:
        name: the field.
        condition: a nonempty list of accepted values, or the bounds of a range.
        kinds: field -> kinds of its values in all documents.

    Raises:
        ValueError: if no document has the field, or none of its values has a comparable kind.
    """
    if name not in kinds:
        raise _unknown_field_error(name, kinds)
    if isinstance(condition, dict):
        comparable: tuple[str, ...] = _NUMBERS
        got = "a range"
    else:
        value_kind = _kind(condition[0])
        comparable = _NUMBERS if value_kind in _NUMBERS else (value_kind,)
        got = f"{condition[0]!r} ({value_kind})"
    compared_kinds = [kind for kind in kinds[name] if kind in comparable]
    if not compared_kinds:
        raise ArgumentError(
            "where",
            f"expected a value of {name!r}, which is {' or '.join(kinds[name])}, got {got}.",
        )
    return compared_kinds


def check_comparable(
    name: str,
    condition: Condition,
    kinds: Mapping[str, Sequence[str]] | None,
) -> None:
    """Raise ``ValueError`` if no document has a value that a condition can be compared with.

    Args:
        name: the field.
        condition: a list of accepted values, or the bounds of a range. An empty list accepts
            documents without the field, so the field only has to exist.
        kinds: field -> kinds of its values in all documents; None if unknown.
    """
    if kinds is None:
        return
    if condition:
        comparable_kinds(name, condition, kinds)  # raises the error
    elif not paths_of(name, kinds):
        raise _unknown_field_error(name, kinds)


def _unknown_field_error(name: str, kinds: Mapping[str, Sequence[str]]) -> ValueError:
    """Create the error for a field that no document has.

    Args:
        name: the field.
        kinds: field of some document -> kinds of its values, which the message lists.
    """
    if not kinds:
        return no_metadata_error()
    fields = ", ".join(
        f"{path} ({' or '.join(field_kinds)})" for path, field_kinds in kinds.items()
    )
    return ArgumentError("where", f"expected a field of the index, {fields}; got {name!r}.")


def no_metadata_error() -> ValueError:
    """Create the error for a filter on an index without metadata."""
    return ArgumentError(
        "where",
        "expected an index that stores metadata of its documents, got one without metadata. Build "
        "it again with metadata: tilefold index --data, or metadata= in Python.",
    )


def _match_values(column: Any, kind: str, condition: Condition) -> Mask:
    """Compute which values of a column satisfy a condition.

    Numbers are compared exactly: neither integers nor floats are rounded.

    Args:
        column: Arrow array ``[rows]``.
        kind: kind of its values, such as ``"text"``, ``"integer"`` or ``"float"``.
        condition: a nonempty list of accepted values, or the bounds of a range.

    Returns:
        bool ``[rows]``.
    """
    if kind not in _NUMBERS:
        is_equal = _arrow(".compute").is_in(column, _arrow().array(condition, column.type))
        mask: Mask = is_equal.to_numpy(zero_copy_only=False)
        return mask
    numbers = column.to_numpy()
    if isinstance(condition, dict):
        return _within_bounds(numbers, kind, condition)
    if kind == "integer":
        return np.isin(numbers, np.array(condition, np.int64))
    # The accepted values are integers. Those that float64 cannot represent equal no value.
    integers: list[Any] = condition
    exact_floats = [float(number) for number in integers if float(number) == number]
    return np.isin(numbers, np.array(exact_floats, np.float64))


def _within_bounds(numbers: npt.NDArray[Any], kind: str, bounds: Bounds) -> Mask:
    """Compute which numbers are within bounds, exactly.

    The bounds are first replaced by the least and the greatest number of the column's type that
    satisfy them, so that the comparison rounds nothing.

    Args:
        numbers: int64 or float64 ``[rows]``.
        kind: ``"integer"`` or ``"float"``.
        bounds: ``gt``, ``gte``, ``lt`` or ``lte`` -> number.

    Returns:
        bool ``[rows]``.
    """
    low: float
    high: float
    if kind == "float":
        low, high = floats_within(bounds)
    else:
        integers = integers_within(bounds)
        if not integers:
            return np.zeros(len(numbers), bool)
        low = integers[0]
        high = integers[-1]
    within: Mask = (numbers >= low) & (numbers <= high)
    return within


class Metadata:
    """The metadata of the N documents of an index.

    Args:
        table: Arrow table with a row per value. The columns are the field, the number of the
            document, and one column per kind of value. The value is in the column of its kind, and
            the other columns are null.
        n_documents: number of documents, N.
    """

    def __init__(self, table: Any, n_documents: int) -> None:
        self.table = table
        self.n_documents = n_documents
        self._rows_by_field: dict[str, Any] = {}  # field -> its rows of the table

    @classmethod
    def from_fields(
        cls,
        metadata: Mapping[str, Fields] | None,
        ids: Iterable[str],
        passages: str | None,
    ) -> Metadata | None:
        """Create the metadata of an index from the fields of documents.

        Args:
            metadata: document id -> fields.
            ids: ids of the documents or passages, in the order of the index.
            passages: settings of the passages; None if `ids` are ids of documents.

        Returns:
            The metadata, or None if no document has fields that an index stores.
        """
        check_fields_by_id("metadata", metadata)
        if not metadata:
            return None
        entry_ids = list(ids)
        fields_of_entries = fields_by_id(
            metadata,
            entry_ids,
            ids_are_passages=passages is not None,
        )
        if not fields_of_entries:
            return None
        columns: dict[str, list[Any]] = {column: [] for column in _schema().names}
        for document, entry_id in enumerate(entry_ids):
            for path, value in field_values(fields_of_entries.get(entry_id, {})):
                row = {"field": path, "document": document, _kind(value): value}
                for column, values in columns.items():
                    values.append(row.get(column))  # None in the columns of other kinds
        return cls(_arrow().table(columns, _schema()), len(entry_ids))

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Field -> kinds of its values: text, integer, float, boolean."""
        kinds = {}
        for name in sorted(self.table["field"].unique().to_pylist()):
            rows = self._rows_of(name)
            kinds[name] = [kind for kind in _KINDS if rows[kind].null_count < len(rows)]
        return kinds

    def _rows_of(self, name: str) -> Any:
        """Return the rows of the table that have values of a field."""
        if name not in self._rows_by_field:
            is_field = _arrow(".compute").equal(self.table["field"], name)
            self._rows_by_field[name] = self.table.filter(is_field)
        return self._rows_by_field[name]

    def mask(self, where: Filter) -> Mask:
        """Return which documents match a filter, bool ``[N]``.

        Raises:
            ValueError: if no document has a field, or a value of a comparable kind.
        """
        matching = np.ones(self.n_documents, bool)
        must, must_not = where.conditions()
        for name, values in must:
            matching &= self._mask_of_condition(name, values)
        for name, values in must_not:
            matching &= ~self._mask_of_condition(name, values)
        return matching

    def _mask_of_condition(self, name: str, condition: Condition) -> Mask:
        """Return which documents meet a condition, bool ``[N]``.

        Args:
            name: the field.
            condition: a list of accepted values, or the bounds of a range. An empty list accepts
                documents without the field.
        """
        if not condition:
            return ~self._mask_of(self._find_with_field(name))
        return self._mask_of(self._find_matching(name, condition))

    def _mask_of(self, documents: npt.NDArray[np.int64]) -> Mask:
        """Return a mask bool ``[N]`` that is true for the documents with these numbers."""
        mask = np.zeros(self.n_documents, bool)
        mask[documents] = True
        return mask

    def _find_with_field(self, name: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents that have a field, int64.

        A document with several values of the field is repeated.

        Args:
            name: the field: a value, an object or a list of objects.

        Raises:
            ValueError: if no document has the field.
        """
        paths = paths_of(name, self.kinds)
        if not paths:
            raise _unknown_field_error(name, self.kinds)
        return np.concatenate([self._rows_of(path)["document"].to_numpy() for path in paths])

    def _find_matching(self, name: str, condition: Condition) -> npt.NDArray[np.int64]:
        """Find the documents with a value of a field that satisfies a condition.

        Args:
            name: the field.
            condition: a nonempty list of accepted values, or the bounds of a range.

        Returns:
            Numbers of the documents, int64. A document with several matching values is repeated.

        Raises:
            ValueError: if no document has the field, or none of its values has a comparable kind.
        """
        compared_kinds = comparable_kinds(name, condition, self.kinds)
        field_rows = self._rows_of(name)
        documents = []
        # A value is in the column of its kind. The other columns are null in its row.
        for kind in compared_kinds:
            rows = field_rows.filter(field_rows[kind].is_valid())
            matches = _match_values(rows[kind], kind, condition)
            documents.append(rows["document"].to_numpy()[matches])
        return np.concatenate(documents)

    def take(self, rows: Sequence[int]) -> Metadata:
        """Return the metadata of some documents, which get new numbers.

        Args:
            rows: number of each document to keep, in the order of the new numbers.
        """
        new_numbers = np.full(self.n_documents, -1, np.int64)  # -1 for documents that are left out
        new_numbers[np.asarray(rows, np.int64)] = np.arange(len(rows))
        documents = new_numbers[self.table["document"].to_numpy()]
        return Metadata(self._with_documents(documents), len(rows))

    def _with_documents(self, documents: npt.NDArray[np.int64]) -> Any:
        """Return the table with new document numbers.

        Args:
            documents: new number of the document of each row; -1 removes the row.
        """
        arrow = _arrow()
        column = self.table.schema.get_field_index("document")
        table = self.table.set_column(column, "document", arrow.array(documents))
        return table.filter(arrow.array(documents >= 0))

    @classmethod
    def concatenate(cls, parts: Sequence[Metadata | None], sizes: Sequence[int]) -> Metadata | None:
        """Join the metadata of several indexes into the metadata of one.

        Args:
            parts: metadata of each index; None for an index without metadata.
            sizes: number of documents of each index.

        Returns:
            The metadata, or None if no index has metadata.
        """
        # The documents of an index get numbers after those of the indexes before it.
        *first_numbers, n_documents = np.cumsum([0, *sizes]).tolist()
        tables = []
        for part, first_number in zip(parts, first_numbers, strict=True):
            if part is not None:
                documents = part.table["document"].to_numpy() + first_number
                tables.append(part._with_documents(documents))
        return cls(_arrow().concat_tables(tables), n_documents) if tables else None

    def save(self, folder: Path) -> None:
        """Write the metadata into the folder of an index."""
        _arrow(".parquet").write_table(self.table, folder / FILE)

    @classmethod
    def load(cls, folder: Path, n_documents: int) -> Metadata | None:
        """Read the metadata that :meth:`save` wrote.

        Args:
            folder: the folder of the index.
            n_documents: number of documents of the index.

        Returns:
            The metadata, or None if the folder has none.

        Raises:
            DataError: if the file is damaged, or has metadata of more documents.
        """
        file = folder / FILE
        if not file.exists():
            return None
        try:
            table = _arrow(".parquet").read_table(file)
        except _arrow().ArrowException as error:
            raise DataError(
                f"{file}: expected metadata of an index, which could not be read ({error}).",
            ) from error
        if not table.schema.equals(_schema()):
            raise DataError(
                f"{file}: expected metadata of an index with the columns "
                f"{', '.join(_schema().names)}, got other columns: "
                f"{', '.join(table.schema.names)}.",
            )
        documents = table["document"].to_numpy()
        if documents.size and not 0 <= documents.min() <= documents.max() < n_documents:
            raise DataError(
                f"{file}: expected metadata of {n_documents} documents, got document numbers from "
                f"{documents.min()} to {documents.max()}.",
            )
        return cls(table, n_documents)


def allowed_by(metadata: Metadata | None, where: Where, allowed: Mask | None = None) -> Mask | None:
    """Combine a filter and a mask into a mask of the documents that a search may return.

    Args:
        metadata: metadata of the N documents; None for an index without metadata.
        where: the filter; None for all documents.
        allowed: documents to which the search is restricted, bool ``[N]``; None for all.

    Returns:
        The documents, bool ``[N]``; None for all.

    Raises:
        ValueError: if there is a filter, but the index has no metadata.
    """
    parsed_filter = Filter.of(where)
    if parsed_filter is None:
        return allowed
    if metadata is None:
        raise no_metadata_error()
    matching = metadata.mask(parsed_filter)
    return matching if allowed is None else matching & allowed


def check_metadata(stored: Metadata | None, new: Mapping[str, Fields] | None) -> None:
    """Raise ``ValueError`` if documents without metadata are added to an index with metadata.

    Args:
        stored: metadata of the index; None if it has none.
        new: document id -> fields of the new documents. None means that the caller passed no
            metadata. An empty mapping means that the documents have no fields, and is accepted.
    """
    if stored is None or new is not None:
        return
    raise ArgumentError(
        "metadata",
        f"expected the fields of the new documents, because the index stores metadata "
        f"({', '.join(stored.kinds)}), got none. Without them, filters would not find the "
        "documents.",
    )


def _arrow(module: str = "") -> Any:
    """Import pyarrow, or one of its modules.

    Args:
        module: the module, such as ``.compute``; empty for pyarrow itself.
    """
    return require(f"pyarrow{module}", "pyarrow", "Metadata of documents")


def _schema() -> Any:
    """Return the Arrow schema of the table of :class:`Metadata`."""
    types = {"field": "string", "document": "int64", **_KINDS}
    return _arrow().schema([(name, getattr(_arrow(), kind)()) for name, kind in types.items()])
