"""Small real parts: a BEIR folder, sparse vectors, and a tiny SparseEncoder over the real MiniLM
tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilefold.retrieval import Collection, SparseVectors, build_pydocs

DOCUMENTS = [
    {"_id": "d1", "title": "Cats", "text": "Cats sleep all day."},
    {"_id": "d2", "title": "", "text": "Dogs chase cats."},
    {"_id": "d3", "title": "Bäume", "text": "Trees grow \u2028 slowly."},
]
QUERIES = [{"_id": "q1", "text": "sleeping cats"}, {"_id": "q2", "text": "trees"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td3\t1\n"


@pytest.fixture(autouse=True)
def _seismic_is_installed(request: pytest.FixtureRequest) -> None:
    """Skip what names Seismic on Pythons for which its package has no wheels, such as 3.13."""
    if "seismic" in request.node.name and find_spec("seismic") is None:
        pytest.skip("pyseismic-lsr is not installed")


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows),
            encoding="utf-8",
        )
    (folder / "qrels" / "test.tsv").write_text(QRELS, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def pydocs() -> Collection:
    return build_pydocs()


def random_vectors(
    n: int,
    vocab_size: int = 500,
    terms: int = 20,
    seed: int = 0,
    prefix: str = "d",
    fingerprint: str | None = "f" * 64,
) -> SparseVectors:
    generator = np.random.default_rng(seed)
    rows = {
        f"{prefix}{i}": {
            int(term): float(generator.exponential() + 0.01)
            for term in generator.choice(vocab_size, terms, replace=False)
        }
        for i in range(n)
    }
    return SparseVectors.from_rows(rows, vocab_size, fingerprint)


@pytest.fixture
def make_vectors() -> Callable[..., SparseVectors]:
    return random_vectors


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SPLADE model of random weights, 32 wide, with words of a real tokenizer and prompts for
    both sides.
    """
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
    """A multi-vector model of random weights, 16 wide, over the real MiniLM tokenizer; punctuation
    is skipped.
    """
    from sentence_transformers import MultiVectorEncoder

    from tests.recipes.small import small_masked_lm
    from tilefold.recipes.colbert import ColbertRecipe

    folder = small_masked_lm(tmp_path_factory.mktemp("late"))
    model = ColbertRecipe(
        base_model=str(folder),
        dimension=16,
        max_length=24,
        query_length=8,
    ).start()
    assert isinstance(model, MultiVectorEncoder)
    return model.to("cpu")
