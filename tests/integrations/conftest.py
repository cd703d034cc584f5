"""Tiny SPLADE models with the real tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder

from tests.integrations.multi_vector_models import build_colbert
from tests.integrations.splade_models import build_tiny_splade, without_dropout
from tests.recipes.small import VOCABULARY, make_tokenizer_folder


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), VOCABULARY)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A checkpoint of a stock SparseEncoder with a tiny BERT."""
    folder = tmp_path_factory.mktemp("tiny-splade")
    build_tiny_splade("bert", tokenizer_folder).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def colbert() -> Any:
    return build_colbert()


@pytest.fixture
def model(tiny_folder: Path) -> SparseEncoder:
    return SparseEncoder(str(tiny_folder), device="cpu")


@pytest.fixture
def tiny(model: SparseEncoder) -> SparseEncoder:
    return without_dropout(model)  # type: ignore[no-any-return]
