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
# Kind of a value -> its Arrow type.
_KINDS = {"text": "string", "integer": "int64", "float": "float64", "boolean": "bool_"}
_NUMBERS = ("integer", "float")
# Characters of a text, and values of a list, that an index stores at most.
_LONGEST_TEXT = 1000
_LONGEST_LIST = 100
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
# Condition on a field: the values of which it must have one, or the bounds of its numbers. An empty
# list is the condition of a document without the field.
Condition = list[object] | dict[str, Number]


def check_field(name: object, argument: str) -> None:
    """Raise ``ValueError`` for a name that is not a path to a field of metadata.

    Args:
        name: the path, such as ``year``, ``by.name`` or ``"a name"``.
        argument: name of the argument, for the error.
    """
    if not isinstance(name, str) or not _FIELD.fullmatch(name):
        raise ValueError(
            f'{argument}: expected names of fields, with quotes ("a name") around what holds more '
            f"than letters, digits, - and _, got {name!r}. A dot reaches into an object, [] into a "
            "list.",
        )


@dataclass(frozen=True)
class Filter:
    """Conditions on the metadata of documents.

    The value of a condition has one of these forms:

    * A text, an integer or a boolean, which may be numpy's. The field must equal it.
    * A list of texts or of integers. The field must equal one of them.
    * A range such as ``{"gte": 2000, "lt": 2010}``.
    * None, for documents without the field.

    Numbers are compared by value, whatever their type: 5 matches 5.0, and 2^53 + 1 does not match
    2^53. A field that is a list matches if any of its values does. ``"by.name"`` is a field in an
    object. A name with more than letters, digits, ``-`` and ``_`` is in quotes (``'"a name"'``). An
    object is a field, but has no value to match.

    Attributes:
        must: field -> value. A document must meet all of these conditions.
        must_not: field -> value. A document may meet none of these conditions.

    Raises:
        ValueError: without any condition, or for a condition of another form.
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
        """Check the conditions.

        Returns:
            Fields and conditions of `must`, and of `must_not`.
        """
        must = [(name, _parse_condition(name, value)) for name, value in self.must.items()]
        must_not = [(name, _parse_condition(name, value)) for name, value in self.must_not.items()]
        return must, must_not

    @classmethod
    def of(cls, where: Filter | Fields | None) -> Filter | None:
        """Return a filter, which may be passed as its `must`.

        It is None without any filter.
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
            kinds: field -> kinds of its values. Values of a field that has only texts are texts,
                also those that look like numbers. None if the kinds are unknown.

        Raises:
            ValueError: for a text that is no such condition, and for two conditions on one field
                that are not a lower and an upper bound.
        """
        must: dict[str, Any] = {}
        must_not: dict[str, Any] = {}
        for text in list_of_texts("where", conditions):
            match = _CONDITION.fullmatch(text)
            if match is None:
                raise ArgumentError(
                    "where", f"expected a condition such as {_FORMS}, got {text!r}."
                )
            name, operator, written = match.groups()
            value = _parse_value(operator, written, (kinds or {}).get(name))
            fields = must_not if operator == "!=" else must
            # A second condition on a field must be the other bound of a range.
            if name in fields:
                both_ranges = isinstance(value, dict) and isinstance(fields[name], dict)
                if not both_ranges or not value.keys().isdisjoint(fields[name]):
                    raise ArgumentError(
                        "where",
                        f"expected one condition for {name!r}, got {text!r} too. Join values by "
                        "commas.",
                    )
                value.update(fields[name])
            fields[name] = value
        return cls(must, must_not)


Where = Filter | Fields | None


def _parse_value(operator: str, written: str, kinds: Sequence[str] | None) -> Any:
    """Read the right side of a condition.

    Args:
        operator: ``=``, ``!=`` or a bound.
        written: the values, separated by commas.
        kinds: kinds of the values of the field, None if unknown.

    Returns:
        A value, a list of several, or bounds.
    """
    is_bound = operator in _BOUNDS
    items = _VALUE.findall(written) or [""]
    values = [_typed(item.strip(), None if is_bound else kinds) for item in items]
    value = values if len(values) > 1 else values[0]
    if is_bound:
        return {_BOUNDS[operator]: value}
    # Conditions list no floats. The range that holds one float is equal to it.
    if isinstance(value, float):
        return {"gte": value, "lte": value}
    return value


def _typed(text: str, kinds: Sequence[str] | None) -> object:
    """Interpret a value of a condition as a number, boolean, null or quoted text.

    Any other value is a text without quotes.

    Args:
        text: one value of a condition.
        kinds: kinds of the values of the field; a field of texts has no numbers or booleans.
    """
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict | list):
        return text
    if kinds == ["text"] and not isinstance(value, str) and value is not None:
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


def _without_numpy(value: object) -> object:
    """Return the value of a condition with Python's scalars and lists in place of numpy's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {bound: _without_numpy(number) for bound, number in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numpy(item) for item in value]
    return value


def _parse_condition(name: str, value: object) -> Condition:
    """Check the value of a condition.

    Args:
        name: the field.
        value: a text, integer, boolean, list of texts or of integers, range or None.

    Returns:
        The condition.

    Raises:
        ValueError: for another value.
    """
    check_field(name, "where")
    value = _without_numpy(value)
    if value is None:
        return []
    if isinstance(value, Mapping):
        bounds = _BOUNDS.values()
        if not value or {*value} - {*bounds} or not all(map(_is_bound, value.values())):
            raise ArgumentError(
                "where",
                f"expected numbers under {', '.join(bounds)} for {name!r}, "
                f"got {dict(value)!r:.200}.",
            )
        return dict(value)
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
        is_stored = is_unicode(item) if isinstance(item, str) else item in INT64
        if not is_stored:
            raise ArgumentError(
                "where",
                f"expected Unicode or an integer of 64 bits for {name!r}, got {item!r}.",
            )
    return values


def kept_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields that an index stores.

    These are texts, integers, floats and booleans, lists of them, and objects of such fields.
    Dates become texts (ISO 8601), tuples lists, and numpy's numbers Python's. Lists in a list
    become part of it. Texts that are empty or above 1,000 characters, lists of floats or of more
    than 100 values, integers above 64 bits, numbers that are not finite, and other values are left
    out.
    """
    stored = {str(name): _stored_value(value) for name, value in fields.items()}
    return {name: value for name, value in stored.items() if value is not None}


def _stored_value(value: object) -> object:
    """Convert a value of metadata to the form that an index stores.

    numpy's scalars become Python's, and dates become texts in ISO format. Long lists, lists with
    floats and values of other types are not stored.

    Returns:
        The value, or None if it is not stored.
    """
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
    """Whether an index stores a single value."""
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST_TEXT and is_unicode(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value in INT64


def _stored_items(values: Iterable[object]) -> Iterator[object]:
    """Yield the items of a list, and of lists in it, as an index stores them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _stored_items(value)
            continue
        stored = _stored_value(value)
        if stored is not None:
            yield stored


def check_fields_by_id(argument: str, metadata: object) -> None:
    """Raise ``TypeError`` for metadata that is not a mapping document id -> fields.

    Args:
        argument: name of the argument, for the error.
        metadata: value of the argument. None is valid, too.
    """
    if metadata is None:
        return
    check_mapping(argument, metadata, "document id -> fields")
    for name, fields in cast("Mapping[object, object]", metadata).items():
        check_mapping(f"{argument} of {name!r}", fields, "field -> value")


def fields_by_id(
    metadata: Mapping[str, Fields],
    ids: Iterable[str],
    passages: str | None,
) -> dict[str, dict[str, Any]]:
    """Return the metadata that an index stores for its entries.

    Args:
        metadata: document id -> fields.
        ids: ids of documents or passages.
        passages: how documents were cut; None for ids of documents. A passage has the fields of its
            document.

    Returns:
        Id -> stored fields, for the entries that have any.
    """
    by_id: dict[str, dict[str, Any]] = {}
    for name in ids:
        # The id of a passage is the id of its document, "#" and the range of the passage.
        document = name if passages is None else name.rpartition("#")[0]
        stored = kept_fields(metadata.get(document, {}))
        if stored:
            by_id[name] = stored
    return by_id


def field_values(fields: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in the fields of a document, with its path.

    Args:
        fields: the fields, or in a recursive call a part of them: an object, a list or a value.
        path: path of `fields`, such as ``by.name`` or ``authors[].name``; empty for all fields.

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
    """Return field -> kinds of its values in some documents: text, integer, float, boolean."""
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
    """Return the kinds of fields that either side has, sorted by field."""
    joined = {}
    for name in sorted({*left, *right}):
        kinds = {*left.get(name, ()), *right.get(name, ())}
        joined[name] = [kind for kind in _KINDS if kind in kinds]
    return joined


def paths_of(name: str, known_paths: Iterable[str]) -> list[str]:
    """Return the paths of the values of a field: a value, an object or a list of objects.

    Args:
        name: the field.
        known_paths: paths of the values of all documents.
    """
    inside = (f"{name}.", f"{name}[")
    return [path for path in known_paths if path == name or path.startswith(inside)]


def comparable_kinds(
    name: str, condition: Condition, kinds: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the kinds of a field's values that a condition can match.

    Args:
        name: the field.
        condition: on the field; not an empty list.
        kinds: field -> kinds of its values, of all documents.

    Raises:
        ValueError: for a field that no document has, or without values of a comparable kind.
    """
    if name not in kinds:
        raise _unknown_field(name, kinds)
    value_kind = "float" if isinstance(condition, dict) else _kind(condition[0])
    comparable = _NUMBERS if value_kind in _NUMBERS else (value_kind,)
    compared_kinds = [kind for kind in kinds[name] if kind in comparable]
    if not compared_kinds:
        got = "a range" if isinstance(condition, dict) else f"{condition[0]!r} ({value_kind})"
        raise ArgumentError(
            "where",
            f"expected a value of {name!r}, which is {' or '.join(kinds[name])}, got {got}.",
        )
    return compared_kinds


def check_condition(
    name: str,
    condition: Condition,
    kinds: Mapping[str, Sequence[str]] | None,
) -> None:
    """Raise ``ValueError`` for a field, or a kind of values, that no document has.

    Args:
        name: the field.
        condition: on the field.
        kinds: field -> kinds of its values, of all documents; None if they are unknown.
    """
    if kinds is None:
        return
    if condition:
        comparable_kinds(name, condition, kinds)
    elif not paths_of(name, kinds):
        raise _unknown_field(name, kinds)


def _unknown_field(name: str, kinds: Mapping[str, Sequence[str]]) -> ValueError:
    """Return the error for a field that no document has."""
    if not kinds:
        return no_metadata_error()
    fields = ", ".join(
        f"{path} ({' or '.join(field_kinds)})" for path, field_kinds in kinds.items()
    )
    return ArgumentError("where", f"expected a field of the index, {fields}; got {name!r}.")


def no_metadata_error() -> ValueError:
    """Return the error for a filter on an index without metadata."""
    return ArgumentError(
        "where",
        "expected an index that keeps metadata of its documents, got one without. Build "
        "it again with them: tilefold index --data, or metadata= in Python.",
    )


def _matching(column: Any, kind: str, condition: Condition) -> Mask:
    """Compute which values of a column satisfy a condition.

    Numbers are compared exactly. Integers are not rounded to floats, nor floats to integers.

    Args:
        column: Arrow array ``[rows]``.
        kind: kind of its values, such as ``"text"``, ``"integer"`` or ``"float"``.
        condition: a list of values of which one must be equal, not empty, or bounds of a range.

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
    # A condition has integers here. One that no float64 represents equals none of the values.
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
        table: Arrow table with a row per value: its field, the row of its document, and the value
            in the column of its kind.
        n_documents: N.
    """

    def __init__(self, table: Any, n_documents: int) -> None:
        self.table = table
        self.n_documents = n_documents
        self._rows_by_field: dict[str, Any] = {}  # field -> the rows of the table

    @classmethod
    def of(
        cls,
        metadata: Mapping[str, Fields] | None,
        ids: Iterable[str],
        passages: str | None,
    ) -> Metadata | None:
        """Make the metadata of an index from the fields of documents.

        Args:
            metadata: document id -> fields.
            ids: ids of the documents or passages, in the order of the index.
            passages: how documents were cut; None for ids of documents.

        Returns:
            The metadata, or None if no document has any.
        """
        check_fields_by_id("metadata", metadata)
        if not metadata:
            return None
        names = list(ids)
        stored = fields_by_id(metadata, names, passages)
        if not stored:
            return None
        # The table has a row for each value: its field, its document, and a column for each kind
        # of value, of which all but one are null.
        columns: dict[str, list[Any]] = {column: [] for column in _schema().names}
        for row, name in enumerate(names):
            for path, value in field_values(stored.get(name, {})):
                entry = {"field": path, "document": row, _kind(value): value}
                for column, values in columns.items():
                    values.append(entry.get(column))
        return cls(_arrow().table(columns, _schema()), len(names))

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Field -> kinds of its values: text, integer, float, boolean."""
        kinds = {}
        for name in sorted(self.table["field"].unique().to_pylist()):
            rows = self._rows_of(name)
            kinds[name] = [kind for kind in _KINDS if rows[kind].null_count < len(rows)]
        return kinds

    def _rows_of(self, name: str) -> Any:
        """Return the rows of the table with values of a field."""
        if name not in self._rows_by_field:
            is_field = _arrow(".compute").equal(self.table["field"], name)
            self._rows_by_field[name] = self.table.filter(is_field)
        return self._rows_by_field[name]

    def mask(self, where: Filter) -> Mask:
        """Return which documents match a filter, bool ``[N]``.

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

    def _documents_with(self, name: str, condition: Condition) -> Mask:
        """Return which documents meet a condition of :meth:`Filter.conditions`, bool ``[N]``."""
        if not condition:
            return ~self._mask_of(self._documents_having(name))
        return self._mask_of(self._documents_matching(name, condition))

    def _mask_of(self, documents: npt.NDArray[np.int64]) -> Mask:
        """Return bool ``[N]`` that is true for the rows of some documents."""
        mask = np.zeros(self.n_documents, bool)
        mask[documents] = True
        return mask

    def _documents_having(self, name: str) -> npt.NDArray[np.int64]:
        """Return the rows of documents with a field: a value, an object or a list of objects."""
        paths = paths_of(name, self.kinds)
        if not paths:
            raise _unknown_field(name, self.kinds)
        return np.concatenate([self._rows_of(path)["document"].to_numpy() for path in paths])

    def _documents_matching(self, name: str, condition: Condition) -> npt.NDArray[np.int64]:
        """Find the documents whose field satisfies a condition.

        Args:
            name: the field.
            condition: a list of values of which one must be equal, not empty, or bounds of a range.

        Returns:
            Rows of the documents, int64. A document with several matching values is repeated.

        Raises:
            ValueError: for an unknown field, or a field without values of this kind.
        """
        compared_kinds = comparable_kinds(name, condition, self.kinds)
        field_rows = self._rows_of(name)
        documents = []
        # A value is in the column of its kind. The other columns are null in its row.
        for kind in compared_kinds:
            rows = field_rows.filter(field_rows[kind].is_valid())
            matches = _matching(rows[kind], kind, condition)
            documents.append(rows["document"].to_numpy()[matches])
        return np.concatenate(documents)

    def take(self, rows: Sequence[int]) -> Metadata:
        """Return the metadata of some documents, in the order of `rows`."""
        new_rows = np.full(self.n_documents, -1, np.int64)
        new_rows[np.asarray(rows, np.int64)] = np.arange(len(rows))
        documents = new_rows[self.table["document"].to_numpy()]
        return Metadata(self._with_documents(documents), len(rows))

    def _with_documents(self, documents: npt.NDArray[np.int64]) -> Any:
        """Return the table with other rows of documents, without the values whose row is -1."""
        arrow = _arrow()
        return self.table.set_column(1, "document", arrow.array(documents)).filter(
            arrow.array(documents >= 0),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Metadata | None], sizes: Sequence[int]) -> Metadata | None:
        """Join the metadata of several indexes, whose documents follow one another.

        Args:
            parts: metadata of each index, None for an index without.
            sizes: number of documents of each index.

        Returns:
            The metadata, or None if no index has any.
        """
        *first_rows, n_documents = np.cumsum([0, *sizes]).tolist()
        tables = []
        for part, first_row in zip(parts, first_rows, strict=True):
            if part is not None:
                documents = part.table["document"].to_numpy() + first_row
                tables.append(part._with_documents(documents))
        return cls(_arrow().concat_tables(tables), n_documents) if tables else None

    def save(self, folder: Path) -> None:
        """Write the table into a folder."""
        _arrow(".parquet").write_table(self.table, folder / FILE)

    @classmethod
    def load(cls, folder: Path, n_documents: int) -> Metadata | None:
        """Read the table that :meth:`save` wrote.

        Args:
            folder: the folder of the index.
            n_documents: number of documents of the index.

        Returns:
            The metadata, or None if the folder has none.

        Raises:
            DataError: for another file, or metadata of another number of documents.
        """
        if not (folder / FILE).exists():
            return None
        try:
            table = _arrow(".parquet").read_table(folder / FILE)
        except _arrow().ArrowException as error:
            raise DataError(
                f"{folder / FILE}: expected metadata of an index, got ({error}).",
            ) from error
        # -1 is the row of no document, so that a table of another schema is refused below.
        rows = table["document"].to_numpy() if table.schema.equals(_schema()) else np.array([-1])
        if rows.size and not 0 <= rows.min() <= rows.max() < n_documents:
            raise DataError(
                f"{folder / FILE}: expected metadata of {n_documents} documents, got others.",
            )
        return cls(table, n_documents)


def allowed_by(metadata: Metadata | None, where: Where, allowed: Mask | None = None) -> Mask | None:
    """Combine a filter and a mask into a mask of the documents that a search may return.

    Args:
        metadata: metadata of the N documents, None for an index without.
        where: the filter; None for all documents.
        allowed: bool ``[N]``, documents to which the search is restricted; None for all.

    Returns:
        bool ``[N]``, or None for all documents.

    Raises:
        ValueError: for a filter, where the index has no metadata.
    """
    parsed_filter = Filter.of(where)
    if parsed_filter is None:
        return allowed
    if metadata is None:
        raise no_metadata_error()
    matching = metadata.mask(parsed_filter)
    return matching if allowed is None else matching & allowed


def check_metadata(stored: Metadata | None, new: Mapping[str, Fields] | None) -> None:
    """Raise ``ValueError`` if new documents lack metadata and the index they are added to has some.

    Args:
        stored: metadata of the documents of the index; None if it has none.
        new: document id -> fields of the new documents. None means that the caller passed no
            metadata. An empty mapping means that the documents have no fields, and is accepted.
    """
    if stored is None or new is not None:
        return
    raise ArgumentError(
        "metadata",
        f"expected the fields of the new documents, because the index keeps metadata "
        f"({', '.join(stored.kinds)}), got none. Without them, filters would not find the "
        "documents.",
    )


def _arrow(module: str = "") -> Any:
    """Import pyarrow, or a module of it such as ``.compute``."""
    return require(f"pyarrow{module}", "pyarrow", "Metadata of documents")


def _schema() -> Any:
    """Return the Arrow schema of the table of :class:`Metadata`."""
    types = {"field": "string", "document": "int64", **_KINDS}
    return _arrow().schema([(name, getattr(_arrow(), kind)()) for name, kind in types.items()])
