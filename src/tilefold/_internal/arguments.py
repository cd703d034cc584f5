"""Checks of arguments that public functions share: sequences, mappings, models, numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MappingView, Set
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
]


class ArgumentError(ValueError):
    """A value of an argument is wrong, or values of several arguments together.

    The message is ``argument: problem``. The names are attributes too, so that the command line
    can write the option of each argument in their place.

    Args:
        argument: name of the argument, or the names of several.
        problem: what was expected and what was passed, with the remedy.

    Attributes:
        arguments: names of the arguments.
        problem: the message without the names.
    """

    def __init__(self, argument: str | tuple[str, ...], problem: str) -> None:
        super().__init__(argument, problem)  # `args` as passed, from which pickle restores
        self.arguments = (argument,) if isinstance(argument, str) else argument
        self.problem = problem

    def __str__(self) -> str:
        return f"{', '.join(self.arguments)}: {self.problem}"


def list_of(name: str, values: object, *, ordered: bool = True) -> list[Any]:
    """Return the values of a sequence by position, as a list.

    Takes what users hold their data in: lists, tuples, generators, views of dictionaries, numpy
    and Arrow arrays, pandas and polars Series, columns of ``datasets``. A Series is indexed by
    label and has no truth value, so it is converted before any other code reads it.

    Args:
        name: the argument, for the error.
        values: a sequence; a list is returned as it is.
        ordered: whether the order matters, which refuses sets.

    Raises:
        TypeError: for one string, a mapping, an array or a table of several dimensions, a value
            that is not iterable, and for a set where the order matters.
    """
    if isinstance(values, list):
        return values
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: expected a list, got one string; pass [{values!r:.40}].")
    if isinstance(values, Mapping):
        raise TypeError(
            f"{name}: expected a list, got a mapping ({type(values).__name__}); pass its values() "
            "or its keys().",
        )
    if ordered and isinstance(values, Set) and not isinstance(values, MappingView):
        raise TypeError(
            f"{name}: expected a list, got a {type(values).__name__}, which has no order; pass "
            "sorted(...).",
        )
    dimensions = getattr(values, "ndim", None)
    if isinstance(dimensions, int) and dimensions != 1:
        raise TypeError(
            f"{name}: expected a list, got a {type(values).__name__} of {dimensions} dimensions; "
            "pass one column or row of it.",
        )
    for method in ("to_pylist", "tolist"):  # of Arrow; of numpy, pandas and torch
        convert = getattr(values, method, None)
        if callable(convert):
            return list(convert())
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list, got {type(values).__name__}.")
    return list(values)


def list_of_ids(name: str, ids: object) -> list[Any]:
    """Return ids whose order does not matter, as a list: also those of a set or a mapping's keys.

    Raises:
        TypeError: for one string, whose letters may be ids too, and as in :func:`list_of`.
    """
    if isinstance(ids, Mapping):
        ids = ids.keys()
    return list_of(name, ids, ordered=False)


def list_of_texts(name: str, texts: object) -> list[str]:
    """Return texts by position, as a list.

    The arguments and errors are those of :func:`list_of`.

    Raises:
        TypeError: also for a text that is no string, such as a missing value of a data frame.
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
        name: the argument, for the error.
        value: what was passed.
        contents: keys and values of the mapping, such as ``"id -> text"``.
    """
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping {contents}, got {_described(value)}; pass "
            "dict(zip(ids, values)).",
        )


def check_texts_by_id(name: str, texts: object) -> None:
    """Raise ``TypeError`` unless an argument is a mapping id -> text, whose texts are strings.

    Args:
        name: the argument, for the error.
        texts: what was passed; it is read once.
    """
    check_mapping(name, texts, "id -> text")
    for identifier, text in texts.items():  # type: ignore[attr-defined]
        if not isinstance(text, str):
            raise TypeError(
                f"{name}: expected strings as texts, got {_described(text)} for {identifier!r}; "
                "pass its text, of a Document its contents.",
            )


def check_instance(
    name: str,
    value: object,
    expected: type | tuple[type, ...],
    remedy: str,
) -> None:
    """Raise ``TypeError`` unless an argument is an instance of a class.

    Args:
        name: the argument, for the error.
        value: what was passed.
        expected: a class, or several of which one is enough.
        remedy: how to make such an object, after "pass".
    """
    if not isinstance(value, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: expected {names}, got {_described(value)}; pass {remedy}.")


def check_callable(name: str, value: object, signature: str) -> None:
    """Raise ``TypeError`` unless an argument is a function or another callable.

    Args:
        name: the argument, for the error.
        value: what was passed.
        signature: how it is called, such as ``"progress(texts done, texts in all)"``.
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
    """Raise ``TypeError`` unless an argument is a tokenizer of transformers."""
    if not callable(value) or not hasattr(value, "get_vocab"):
        raise TypeError(
            f"{name}: expected a tokenizer, got {_described(value)}; pass "
            "AutoTokenizer.from_pretrained(name) or model.tokenizer.",
        )


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ``ValueError`` unless an argument is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:  # a list cannot be looked up
        raise ArgumentError(name, f"expected one of {', '.join(allowed)}, got {value!r}.")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ``ValueError`` unless an argument is an ``int`` of at least `least`.

    A boolean is refused, although it is an instance of ``int``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _not_a_count(name, value, least)


def check_k(k: object) -> None:
    """Raise ``ValueError`` unless `k` is an integer of at least 1, which may be one of numpy."""
    if isinstance(k, bool) or not isinstance(k, Integral) or int(k) < 1:
        raise _not_a_count("k", k, least=1)


def _not_a_count(name: str, value: object, least: int) -> ArgumentError:
    """Return the error for an argument that is not an integer of at least `least`."""
    return ArgumentError(name, f"expected an integer of at least {least}, got {value!r}.")


def check_least(name: str, value: float | None, least: int = 1) -> None:
    """Raise an error unless an argument is None or a number of at least `least`.

    Raises:
        TypeError: for anything but None and numbers.
        ValueError: for a smaller number, and NaN.
    """
    if value is None:
        return
    check_number(name, value)
    if not value >= least:  # a NaN is refused too
        raise ArgumentError(name, f"expected at least {least}, got {value}.")


def check_least_count(name: str, value: int | None, least: int = 1) -> None:
    """Raise an error unless an argument is None or an integer of at least `least`.

    Raises:
        TypeError: for anything but None and integers, which may be of numpy.
        ValueError: for a smaller integer.
    """
    if value is None:
        return
    check_integer(name, value)
    check_least(name, value, least)


def check_share(name: str, value: float) -> None:
    """Raise an error unless an argument is a number in [0, 1].

    Raises:
        TypeError: for anything but numbers.
        ValueError: for a number outside [0, 1], and NaN.
    """
    check_number(name, value)
    if not 0 <= value <= 1:
        raise ArgumentError(name, f"expected a number in [0, 1], got {value!r}.")


def check_number(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is a real number, which may be one of numpy.

    A boolean is refused, although it is an instance of ``int``. The range is left to the caller.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number, got {_described(value)}; pass an int or float."
        )


def check_integer(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is an integer, which may be one of numpy.

    A boolean is refused. The range is left to the caller.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer, got {_described(value)}; pass an int.")


def sorted_token_ids(name: str, ids: object) -> list[int]:
    """Return distinct token ids in ascending order.

    Args:
        name: the argument, for the error.
        ids: integers of at least 0 in any order, also a set or an array.

    Raises:
        TypeError: for anything but integers.
        ValueError: for a negative id.
    """
    token_ids = list_of(name, ids, ordered=False)
    for token_id in token_ids:
        check_integer(name, token_id)
        if token_id < 0:
            raise ArgumentError(name, f"expected token ids of at least 0, got {token_id}.")
    return sorted({int(token_id) for token_id in token_ids})


def path_of(name: str, path: object) -> Path:
    """Return a path, which may be given as text, or raise ``TypeError`` for anything else."""
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"{name}: expected a path, got {_described(path)}; pass its str or Path.")
    return Path(path)


def check_encoder(name: str, model: object, expected: str = "SparseEncoder") -> None:
    """Raise ``TypeError`` unless a model has the encoding methods of sentence-transformers.

    Args:
        name: the argument, for the error.
        model: what was passed; a name or a path of a model is refused, since a function that
            encodes loads nothing.
        expected: the class of sentence-transformers, or several, that the function works with.

    Raises:
        ImportError: for a model of a sentence-transformers that is too old.
    """
    encodes = all(
        callable(getattr(model, method, None)) for method in ("encode_query", "encode_document")
    )
    if encodes and not isinstance(model, type):
        check_release_of(model)
        return
    remedy = "pass a loaded model"
    if isinstance(model, str):
        loader = "load_encoder" if "SparseEncoder" in expected else expected.split(maxsplit=1)[0]
        remedy = f"pass a loaded model, such as {loader}({model!r})"
    raise TypeError(f"{name}: expected a {expected}, got {_described(model)}; {remedy}.")


def _described(value: object) -> str:
    """Return the kind of a value for an error, with the value if it is short text or a number."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float)):
        return f"{value!r:.60} ({type(value).__name__})"
    return type(value).__name__
