"""Ids of queries and documents: text, in every file, index and run."""

from __future__ import annotations

from collections.abc import Collection

from tilefold.retrieval._files import is_unicode


def check_text_ids(what: str, ids: Collection[object]) -> None:
    """Raise an error for the first of `ids` that is not text, or that files and C libraries would read as another one.

    `what` is the argument that holds them. They are looked at as one string, since a run has millions.
    """
    try:
        whole = "".join(ids)  # type: ignore[arg-type]
    except TypeError:
        raise no_string(what, next(name for name in ids if not isinstance(name, str))) from None
    if "\0" in whole or not is_unicode(whole):
        wrong = next(name for name in ids if "\0" in str(name) or not is_unicode(str(name)))
        raise ValueError(f"{what}: expected ids without zero bytes that UTF-8 can hold, got {wrong!r}. Rename it.")


def no_string(what: str, name: object) -> TypeError:
    """Error for an id that is not a string."""
    return TypeError(
        f"{what}: expected strings as ids, as they are in files and indexes, got {name!r} ({type(name).__name__}). "
        f"Turn ids into strings: str({name!r})."
    )
