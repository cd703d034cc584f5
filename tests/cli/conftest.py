from __future__ import annotations

import pytest

from tests.recipes.small import small_collection, small_masked_lm
from tilefold.retrieval.collection import Collection


@pytest.fixture(scope="session")
def collection() -> Collection:
    return small_collection()


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("masked-lm")))
