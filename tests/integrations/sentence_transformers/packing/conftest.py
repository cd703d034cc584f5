"""Tiny decoders on disk, for the tests of packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.decoder_models import save_tiny_decoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns the folder of a tiny decoder, which is saved at the first call."""
    root = tmp_path_factory.mktemp("decoders")

    def folder_of(kind: str, **options: Any) -> str:
        name = "-".join([kind, *map(str, options.values())])
        if not (root / name).exists():
            save_tiny_decoder(kind, root / name, **options)
        return str(root / name)

    return folder_of
