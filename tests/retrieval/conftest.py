"""Small inputs for tests of retrieval: a BEIR folder, random vectors, and tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilefold.retrieval import (
    Collection,
    SparseVectors,
    TokenStore,
    TokenVectors,
    TokenVectorWriter,
    build_pydocs,
    open_dense,
)
from tilefold.retrieval.vectors.tokens import DenseManifest

DOCUMENTS = [
    {"_id": "d1", "title": "Cats", "text": "Cats sleep all day."},
    {"_id": "d2", "title": "", "text": "Dogs chase cats."},
    {"_id": "d3", "title": "Bäume", "text": "Trees grow \u2028 slowly."},
]
QUERIES = [{"_id": "q1", "text": "sleeping cats"}, {"_id": "q2", "text": "trees"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td3\t1\n"


@pytest.fixture(autouse=True)
def _seismic_is_installed(request: pytest.FixtureRequest) -> None:
    """Skip tests that name Seismic on a Python for which its package has no wheels."""
    if "seismic" in request.node.name and find_spec("seismic") is None:
        pytest.skip("pyseismic-lsr is not installed")


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """A BEIR folder of three documents, two queries and one split."""
    folder = tmp_path / "tiny"
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "qrels" / "test.tsv").write_text(QRELS, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def pydocs() -> Collection:
    """The collection of the documentation of Python, built once for all tests."""
    return build_pydocs()


def random_vectors(
    n: int,
    vocab_size: int = 500,
    terms: int = 20,
    seed: int = 0,
    prefix: str = "d",
    fingerprint: str | None = "f" * 64,
) -> SparseVectors:
    """Sparse vectors with ``terms`` random terms each, and ids of ``prefix`` and a number."""
    generator = np.random.default_rng(seed)
    rows: dict[str, dict[int, float]] = {}
    for number in range(n):
        weights: dict[int, float] = {}
        for term in generator.choice(vocab_size, terms, replace=False):
            weights[int(term)] = float(generator.exponential() + 0.01)
        rows[f"{prefix}{number}"] = weights
    return SparseVectors.from_rows(rows, vocab_size, fingerprint)


def dense_folder(folder: Path, ids: list[str], seed: int, dimension: int = 8) -> TokenStore:
    """A folder of random dense vectors, which are compared by dot product."""
    import torch

    manifest = DenseManifest(dimension, "fp32", settings={"similarity": "dot"})
    writer = TokenVectorWriter(folder, manifest)
    vectors = torch.randn(len(ids), 1, dimension, generator=torch.Generator().manual_seed(seed))
    writer.write_shard(0, TokenVectors.pack(ids, list(vectors), dimension, "fp32"))
    writer.finish()
    return open_dense(folder)


@pytest.fixture
def make_vectors() -> Callable[..., SparseVectors]:
    """The function :func:`random_vectors`."""
    return random_vectors


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SPLADE model of random weights, 32 wide, with a real tokenizer and a prompt of queries."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tests.recipes.small import VOCABULARY, make_tokenizer_folder, tiny_network

    folder = make_tokenizer_folder(tmp_path_factory.mktemp("splade"), VOCABULARY)
    tiny_network("bert", num_hidden_layers=1, bias=0.0).save_pretrained(str(folder))
    return SparseEncoder(
        modules=[Transformer(str(folder), transformer_task="fill-mask"), SpladePooling()],
        prompts={"query": "find: ", "document": ""},
        device="cpu",
    )


@pytest.fixture(scope="session")
def late(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A multi-vector model of random weights, 16 wide, with the tokenizer of MiniLM."""
    from sentence_transformers import MultiVectorEncoder

    from tests.recipes.small import small_masked_lm
    from tilefold.recipes.colbert import ColbertRecipe

    folder = small_masked_lm(tmp_path_factory.mktemp("late"))
    model = ColbertRecipe(
        base_model=str(folder),
        dimension=16,
        max_length=24,
        query_length=8,
    ).build_model()
    assert isinstance(model, MultiVectorEncoder)
    return model.to("cpu")
