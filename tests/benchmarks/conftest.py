from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.plots import trainings_without_plots  # noqa: F401 - an autouse fixture
from tests.recipes.small import small_collection


@pytest.fixture(scope="session")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small collection in the layout of BEIR."""
    folder = tmp_path_factory.mktemp("data") / "small"
    small_collection().save_beir(folder)
    return folder
