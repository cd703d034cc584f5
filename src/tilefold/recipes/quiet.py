"""Quiet third-party libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_libraries"]

LOGGERS = ("sentence_transformers", "accelerate", "datasets", "huggingface_hub")


@contextmanager
def quiet_libraries(verbose: bool = False) -> Iterator[None]:
    """Silence progress bars, logs and warnings of the Hugging Face libraries; put them back at the end."""
    if verbose:
        yield
        return
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for module in ("transformers", "sentence_transformers", "accelerate", "datasets", "torch"):
                warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
        for name, own in levels.items():
            logging.getLogger(name).setLevel(own)
