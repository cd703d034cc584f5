"""What recipes share: the error of a missing optional package, and quiet third-party libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingPackageError", "quiet_libraries"]


class MissingPackageError(ImportError):
    """An optional package is missing; the message says which extra installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f'{purpose} need the package {package}, which is not installed: pip install "tilefold[{extra}]"',
            name=package,
        )
        self.package = package
        self.extra = extra


@contextmanager
def quiet_libraries(verbose: bool = False) -> Iterator[None]:
    """Silence the progress bars and warnings of transformers and sentence-transformers, and put them back after."""
    if verbose:
        yield
        return
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    logger = logging.getLogger("sentence_transformers")
    own_level = logger.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
        logger.setLevel(own_level)
