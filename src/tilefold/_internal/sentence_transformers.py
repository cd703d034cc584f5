"""Checks that the release of sentence-transformers is supported."""

from __future__ import annotations

OLDEST_RELEASE = "6.2"


def check_sentence_transformers() -> None:
    """Check that sentence-transformers 6.2 or later is installed.

    Older releases silently store and compute different values: they do not normalise pooled token
    vectors, do not save ``max_active_dims`` with a model, and encode queries with the default
    prompt. ``CachedSpladeLoss`` with a budget of tokens hangs under DDP if ranks have different
    numbers of mini-batches.

    Raises:
        ImportError: if sentence-transformers is not installed, or the release is older.
    """
    from packaging.version import Version  # a dependency of transformers

    expected = f"tilefold needs sentence-transformers {OLDEST_RELEASE} or later"
    try:
        from sentence_transformers import __version__ as release
    except ImportError as error:
        remedy = 'pip install "tilefold[sentence-transformers]"'
        raise ImportError(f"{expected}, which cannot be imported ({error}): {remedy}") from error
    if Version(release) < Version(OLDEST_RELEASE):
        remedy = 'pip install -U "tilefold[sentence-transformers]"'
        raise ImportError(
            f"{expected}, got {release}, which stores and computes different values: {remedy}",
        )


def check_release_of(model: object) -> None:
    """Check that a model of sentence-transformers was loaded by a supported release.

    Models of other libraries are accepted.

    Raises:
        ImportError: if the release of sentence-transformers is too old.
    """
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "sentence_transformers" in packages:
        check_sentence_transformers()
