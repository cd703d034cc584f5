"""Checks of arguments that public functions share: sequences, mappings, models, numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MappingView, Set
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from tilefold._internal.sentence_transformers import check_release_of

__all__ = [
    "ArgumentError",
    "check_callable",
    "check_choice",
    "check_count",
    "check_encoder",
    "check_instance",
    "check_integer",
    "check_k",
    "check_least",
    "check_least_count",
    "check_mapping",
    "check_number",
    "check_optional_text",
    "check_share",
    "check_texts_by_id",
    "check_tokenizer",
    "list_of",
    "list_of_ids",
    "list_of_texts",
    "path_of",
    "sorted_token_ids",
    "suggestion",
]


class ArgumentError(ValueError):
    """Raised if the value of an argument, or a combination of arguments, is not valid.

    The message is ``argument: problem``. The names are attributes, too, so that the command line
    can replace each by the option of that argument.

    Args:
        argument: name of the argument, or the names of several.
        problem: what was expected and what was passed, with the remedy.

    Attributes:
        arguments: names of the arguments.
        problem: the message without the names.
    """

    def __init__(self, argument: str | tuple[str, ...], problem: str) -> None:
        # pickle creates the copy with the arguments of Exception
        super().__init__(argument, problem)
        self.arguments = (argument,) if isinstance(argument, str) else argument
        self.problem = problem

    def __str__(self) -> str:
        return f"{', '.join(self.arguments)}: {self.problem}"


def list_of(name: str, values: object, *, ordered: bool = True) -> list[Any]:
    """Convert any sequence to a list.

    Accepts lists, tuples, generators, views of dictionaries, numpy and Arrow arrays, pandas and
    polars Series, and columns of ``datasets``. Code that reads a Series itself may fail, because a
    Series is indexed by label and has no truth value.

    Args:
        name: name of the argument, for the error message.
        values: the sequence; a list is returned unchanged.
        ordered: whether to refuse sets, which have no order.

    Raises:
        TypeError: if the value is a string, a mapping, an array or table of several dimensions,
            not iterable, or a set that is refused.
    """
    if isinstance(values, list):
        return values
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: expected a list, got one string; pass [{values!r:.40}].")
    if isinstance(values, Mapping):
        raise TypeError(
            f"{name}: expected a list, got a mapping ({type(values).__name__}); "
            "pass its values() or its keys().",
        )
    if ordered and isinstance(values, Set) and not isinstance(values, MappingView):
        raise TypeError(
            f"{name}: expected a list, got a {type(values).__name__}, which has no order; "
            "pass sorted(...).",
        )
    dimensions = getattr(values, "ndim", None)
    if isinstance(dimensions, int) and dimensions != 1:
        raise TypeError(
            f"{name}: expected a list, got a {type(values).__name__} of {dimensions} dimensions; "
            "pass one column or row of it.",
        )
    # Arrow has `to_pylist`; numpy, pandas and torch have `tolist`.
    for method in ("to_pylist", "tolist"):
        convert = getattr(values, method, None)
        if callable(convert):
            return list(convert())
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list, got {type(values).__name__}.")
    return list(values)


def list_of_ids(name: str, ids: object) -> list[Any]:
    """Convert ids whose order does not matter to a list.

    Args:
        name: name of the argument, for the error message.
        ids: any sequence that :func:`list_of` accepts, a set, or a mapping whose keys are the ids.

    Raises:
        TypeError: if :func:`list_of` refuses the value.
    """
    if isinstance(ids, Mapping):
        ids = ids.keys()
    return list_of(name, ids, ordered=False)


def list_of_texts(name: str, texts: object) -> list[str]:
    """Convert a sequence of texts to a list.

    Args:
        name: name of the argument, for the error message.
        texts: any sequence that :func:`list_of` accepts.

    Raises:
        TypeError: if :func:`list_of` refuses the value, or a text is not a string, such as a
            missing value of a data frame.
    """
    listed = list_of(name, texts)
    for position, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(
                f"{name}: expected strings, got {text!r:.60} ({type(text).__name__}) at position "
                f"{position}; leave it out or give ''.",
            )
    return listed


def check_mapping(name: str, value: object, contents: str) -> None:
    """Raise ``TypeError`` unless an argument is a mapping.

    Args:
        name: name of the argument, for the error message.
        value: value of the argument.
        contents: keys and values of the mapping, such as ``"id -> text"``, for the error message.
    """
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping {contents}, got {_described(value)}; "
            "pass dict(zip(ids, values)).",
        )


def check_texts_by_id(name: str, texts: object) -> None:
    """Raise ``TypeError`` unless an argument is a mapping of ids to strings.

    Args:
        name: name of the argument, for the error message.
        texts: value of the argument.
    """
    check_mapping(name, texts, "id -> text")
    for text_id, text in texts.items():  # type: ignore[attr-defined]
        if not isinstance(text, str):
            raise TypeError(
                f"{name}: expected strings as texts, got {_described(text)} for {text_id!r}; "
                "pass its text; for a Document, pass document.contents.",
            )


def check_instance(
    name: str,
    value: object,
    expected: type | tuple[type, ...],
    remedy: str,
) -> None:
    """Raise ``TypeError`` unless an argument is an instance of a class.

    Args:
        name: name of the argument, for the error message.
        value: value of the argument.
        expected: the class, or a tuple of classes, as for ``isinstance``.
        remedy: an expression that creates such an object; the error message tells to pass it.
    """
    if not isinstance(value, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: expected {names}, got {_described(value)}; pass {remedy}.")


def check_callable(name: str, value: object, signature: str) -> None:
    """Raise ``TypeError`` unless an argument is a function or another callable.

    Args:
        name: name of the argument, for the error message.
        value: value of the argument.
        signature: how it is called, such as ``"progress(texts done, texts in all)"``, for the
            error message.
    """
    if not callable(value):
        raise TypeError(
            f"{name}: expected a function, got {_described(value)}; it is called as {signature}."
        )


def check_optional_text(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is None or a string."""
    if value is not None:
        check_instance(name, value, str, "a string or None")


def check_tokenizer(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is a transformers tokenizer."""
    if not callable(value) or not hasattr(value, "get_vocab"):
        raise TypeError(
            f"{name}: expected a tokenizer, got {_described(value)}; "
            "pass AutoTokenizer.from_pretrained(name) or model.tokenizer.",
        )


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ``ValueError`` unless an argument is one of the allowed strings."""
    # Values that are not strings are refused first, since a list cannot be looked up in a set.
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(name, f"expected one of {', '.join(allowed)}, got {value!r}.")


def suggestion(value: object, names: Iterable[str]) -> str:
    """Return the end of an error message for a misspelled name.

    Args:
        value: the unknown name.
        names: the known names.

    Returns:
        ``" Did you mean 'splade'?"`` with the most similar name, or the first one that begins with
        the unknown name; empty if there is none.
    """
    text = str(value)
    known = list(names)
    similar = get_close_matches(text, known, n=1)
    if not similar and text:
        similar = [name for name in known if name.startswith(text)]
    return f" Did you mean {similar[0]!r}?" if similar else ""


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ``ValueError`` unless an argument is an ``int`` of at least `least`.

    A boolean is refused, although it is an instance of ``int``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _not_a_count(name, value, least)


def check_k(k: object) -> None:
    """Raise ``ValueError`` unless `k` is an integer of at least 1; numpy integers are accepted."""
    if isinstance(k, bool) or not isinstance(k, Integral) or int(k) < 1:
        raise _not_a_count("k", k, least=1)


def _not_a_count(name: str, value: object, least: int) -> ArgumentError:
    """Return the error for an argument that is not an integer of at least `least`."""
    return ArgumentError(name, f"expected an integer of at least {least}, got {value!r}.")


def check_least(name: str, value: float | None, least: int = 1) -> None:
    """Raise an error unless an argument is None or a number of at least `least`.

    Raises:
        TypeError: if the value is neither None nor a number.
        ValueError: if the value is less than `least`, or NaN.
    """
    if value is None:
        return
    check_number(name, value)
    if not value >= least:  # NaN compares false, and is refused
        raise ArgumentError(name, f"expected at least {least}, got {value}.")


def check_least_count(name: str, value: int | None, least: int = 1) -> None:
    """Raise an error unless an argument is None or an integer of at least `least`.

    Raises:
        TypeError: if the value is neither None nor an integer; numpy integers are accepted.
        ValueError: if the value is less than `least`.
    """
    if value is None:
        return
    check_integer(name, value)
    check_least(name, value, least)


def check_share(name: str, value: float) -> None:
    """Raise an error unless an argument is a number in [0, 1].

    Raises:
        TypeError: if the value is not a number.
        ValueError: if the value is outside [0, 1], or NaN.
    """
    check_number(name, value)
    if not 0 <= value <= 1:
        raise ArgumentError(name, f"expected a number in [0, 1], got {value!r}.")


def check_number(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is a real number; numpy numbers are accepted.

    A boolean is refused, although it is an instance of ``int``. The caller checks the range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number, got {_described(value)}; pass an int or float.",
        )


def check_integer(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is an integer; numpy integers are accepted.

    A boolean is refused, although it is an instance of ``int``. The caller checks the range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer, got {_described(value)}; pass an int.")


def sorted_token_ids(name: str, ids: object) -> list[int]:
    """Sort token ids in ascending order, without duplicates.

    Args:
        name: name of the argument, for the error message.
        ids: integers of at least 0, in a set or any sequence that :func:`list_of` accepts.

    Raises:
        TypeError: if an id is not an integer.
        ValueError: if an id is negative.
    """
    token_ids = list_of(name, ids, ordered=False)
    for token_id in token_ids:
        check_integer(name, token_id)
        if token_id < 0:
            raise ArgumentError(name, f"expected token ids of at least 0, got {token_id}.")
    return sorted({int(token_id) for token_id in token_ids})


def path_of(name: str, path: object) -> Path:
    """Convert a string or a path object to a ``Path``.

    Raises:
        TypeError: if the value is neither.
    """
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"{name}: expected a path, got {_described(path)}; pass its str or Path.")
    return Path(path)


def check_encoder(name: str, model: object, class_name: str = "SparseEncoder") -> None:
    """Raise ``TypeError`` unless a model has the encoding methods of sentence-transformers.

    A model's name or path is refused, because functions that encode do not load models.

    Args:
        name: name of the argument, for the error message.
        model: value of the argument.
        class_name: class of sentence-transformers that the caller supports, for the error message.

    Raises:
        ImportError: if the model was loaded by a release of sentence-transformers that is too old.
    """
    has_methods = all(
        callable(getattr(model, method, None)) for method in ("encode_query", "encode_document")
    )
    if has_methods and not isinstance(model, type):
        check_release_of(model)
        return
    remedy = "pass a loaded model"
    if isinstance(model, str):
        loader = "load_encoder" if class_name == "SparseEncoder" else class_name
        remedy = f"pass a loaded model, such as {loader}({model!r})"
    raise TypeError(f"{name}: expected a {class_name}, got {_described(model)}; {remedy}.")


def _described(value: object) -> str:
    """Describe a value for an error message by its class, and a string or number by its value."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float)):
        return f"{value!r:.60} ({type(value).__name__})"
    return type(value).__name__
