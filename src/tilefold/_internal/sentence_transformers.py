"""The oldest release of sentence-transformers that is supported, and the refusal of older ones."""

from __future__ import annotations

OLDEST_RELEASE = "6.2"


def check_sentence_transformers() -> None:
    """Refuse a release of sentence-transformers before 6.2.

    Older releases differ in what they store and compute without an error: pooled token vectors are
    not normalised, ``max_active_dims`` is not saved with a model, queries fall back to the default
    prompt, and ``CachedSpladeLoss`` with a budget of tokens waits for ever under DDP where ranks
    have other numbers of mini-batches.

    Raises:
        ImportError: sentence-transformers is not installed, or older.
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
            f"{expected}, got {release}, which stores and computes other values: {remedy}",
        )


def check_release_of(model: object) -> None:
    """Refuse a model that an older release of sentence-transformers has loaded.

    Models of other libraries are accepted.

    Raises:
        ImportError: as in :func:`check_sentence_transformers`.
    """
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "sentence_transformers" in packages:
        check_sentence_transformers()
