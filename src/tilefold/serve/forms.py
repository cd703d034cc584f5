"""Bodies of ``multipart/form-data`` (RFC 7578), in which browsers and curl send files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tilefold.serve.bodies import ImageData, ServeError, empty_input_error, invalid_input_error

FORM = "multipart/form-data"
_MAX_PARTS = 1000
_MAX_HEAD_BYTES = 8192  # of the headers of a part
# Fields that are lists, so that a form may have several parts of this name.
_LIST_FIELDS = frozenset({"inputs", "texts", "documents"})
_IMAGE_FIELDS = frozenset({"inputs", "documents"})
# A parameter of a header, such as `; name="inputs"`. Values may be in quotes.
_PARAMETER = re.compile(
    r"""
    ;[ \t]*([^\s;="]+)[ \t]*=[ \t]*  # the name
    (?:"((?:[^"\\]|\\.)*)"         # a value in quotes
    |([^\s;"]*))                   # a value without quotes
    """,
    re.VERBOSE,
)
_ESCAPED_CHARACTER = re.compile(r"""\\(["\\])""")


class _Header(NamedTuple):
    """A header with parameters, such as ``Content-Type``.

    Attributes:
        value: the text before the parameters, in lower case.
        parameters: name in lower case -> value, without its quotes.
    """

    value: str
    parameters: dict[str, str]


class _Part(NamedTuple):
    """A part of a form.

    Attributes:
        name: name of the field.
        content: the bytes of the part.
        is_file: whether the part is a file. Otherwise it is a text.
    """

    name: str
    content: bytes
    is_file: bool


@lru_cache(256)
def form_boundary(content_type: bytes) -> bytes | None:
    """Return the boundary between the parts of a form.

    Args:
        content_type: value of the header ``Content-Type``.

    Returns:
        The boundary; ``None`` for another type than ``multipart/form-data``, or without a boundary.
    """
    header = _parse_header(content_type.decode("latin-1"))
    boundary = header.parameters.get("boundary")
    if header.value != FORM or not boundary:
        return None
    return boundary.encode("latin-1")


def parse_form(body: bytes, boundary: bytes) -> dict[str, Any]:
    """Return the fields of a form with the types that they have in a JSON body.

    A part that is a file becomes an image. The fields ``inputs``, ``texts`` and ``documents`` may
    have several parts each, whose values become a list.

    Args:
        body: the body of the request.
        boundary: the boundary, from :func:`form_boundary`.

    Returns:
        Name of a field -> :class:`ImageData`, a text, or a list of both.

    Raises:
        ServeError: if the body is no form (status 400), or has too many parts, an empty file, or
            several parts of a field that is no list (422).
    """
    values: dict[str, list[str | ImageData]] = {}
    for part in _split_parts(body, boundary):
        values.setdefault(part.name, []).append(_part_value(part))
    fields: dict[str, Any] = {}
    for name, field_values in values.items():
        if name in _LIST_FIELDS:
            fields[name] = field_values
        elif len(field_values) == 1:
            fields[name] = field_values[0]
        else:
            raise invalid_input_error(f"`{name}`: expected one part, got {len(field_values)}")
    return fields


def form_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI schema of a form from that of a JSON body.

    Args:
        schema: schema of the body, without references.
    """
    properties = dict(schema["properties"])
    for name in _LIST_FIELDS & properties.keys():
        item = {"type": "string"}
        if name in _IMAGE_FIELDS:
            item["format"] = "binary"  # a file, or a text
        properties[name] = {"type": "array", "items": item}
    return {**schema, "properties": properties}


def _part_value(part: _Part) -> str | ImageData:
    """Return the image or the text of a part."""
    if part.is_file:
        if not part.content:
            raise empty_input_error(part.name)
        return ImageData(part.content)
    try:
        return part.content.decode("utf-8")
    except UnicodeDecodeError:
        raise _malformed(f"the part {part.name!r} is not UTF-8") from None


def _split_parts(body: bytes, boundary: bytes) -> list[_Part]:
    """Divide a form into its parts.

    Args:
        body: the body of the request.
        boundary: the boundary. In the body it follows a line break and two hyphens, and two more
            hyphens follow the last one.
    """
    delimiter = b"\r\n--" + boundary
    max_pieces = _MAX_PARTS + 1  # the text after the last boundary is a piece, too
    # A body may begin with a boundary. A line break is put before it, so that the first piece is
    # always the text before the first boundary, which is ignored.
    _, *pieces = (b"\r\n" + body).split(delimiter, max_pieces + 1)
    if len(pieces) > max_pieces:
        raise invalid_input_error(f"expected at most {_MAX_PARTS} parts in a form")
    for position, piece in enumerate(pieces):
        follows_last_boundary = piece.startswith(b"--")
        if follows_last_boundary:
            return [_parse_part(part) for part in pieces[:position]]
    raise _malformed("its last boundary is missing")


def _parse_part(piece: bytes) -> _Part:
    """Parse the headers of a part.

    Args:
        piece: the bytes between two boundaries. They begin with the rest of the line of the first
            boundary, which may have spaces only.
    """
    rest_of_line, line_break, lines = piece.partition(b"\r\n")
    head, blank_line, content = lines.partition(b"\r\n\r\n")
    if rest_of_line.strip(b" \t") or not line_break or not blank_line:
        raise _malformed("a part has no headers")
    if len(head) > _MAX_HEAD_BYTES:
        raise _malformed("the headers of a part are too long")
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    disposition = _parse_header(headers.get("content-disposition", ""))
    field_name = disposition.parameters.get("name")
    if disposition.value != "form-data" or field_name is None:
        raise _malformed("a part has no name")
    # The name of a file may have an encoding (RFC 5987), which the asterisk announces.
    has_file_name = not disposition.parameters.keys().isdisjoint({"filename", "filename*"})
    # An image that was sent without the name of a file is a file, too.
    is_image = headers.get("content-type", "").lower().startswith("image/")
    return _Part(field_name, content, is_file=has_file_name or is_image)


def _parse_header(text: str) -> _Header:
    """Divide the text of a header into its value and its parameters.

    The parser of the module ``email`` takes quadratic time, and fails for some malformed headers.
    Of several parameters with the same name, the first one counts.
    """
    value, _, _ = text.partition(";")
    parameters: dict[str, str] = {}
    for match in _PARAMETER.finditer(text, len(value)):
        name, quoted, token = match.groups()
        parameter = token if quoted is None else _ESCAPED_CHARACTER.sub(r"\1", quoted)
        parameters.setdefault(name.lower(), parameter)
    return _Header(value.strip().lower(), parameters)


def _malformed(reason: str) -> ServeError:
    """Create the error for a body that is no form, with status 400."""
    return ServeError("Validation", f"the body is not a valid form: {reason}", status=400)
