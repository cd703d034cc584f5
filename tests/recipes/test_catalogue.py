"""Every recipe by name: two steps on the CPU, saved, loaded by sentence-transformers, encoded and searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import MultiVectorEncoder

from tests.recipes.decoder_models import tiny_causal_lm
from tests.recipes.tiny import tiny_masked_lm
from tilefold import retrieval
from tilefold.modules import load_encoder
from tilefold.recipes import ColbertRecipe, LsrRecipe, get_recipe, train
from tilefold.recipes.catalogue import RECIPES, Entry
from tilefold.retrieval.collection import Collection

SMALL: dict[str, Any] = {"max_steps": 2, "batch_size": 4, "max_length": 24, "bf16": False, "save_steps": 100}


@pytest.fixture(scope="session")
def bases(collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny base model of each kind that entries name."""
    folder = tmp_path_factory.mktemp("bases")
    masked_lm = str(tiny_masked_lm(folder / "masked-lm", collection))
    texts = [*collection.contents().values(), *collection.queries.values()]
    causal = str(tiny_causal_lm(folder / "causal-lm", texts=texts))
    return {"masked-lm": masked_lm, "encoder": masked_lm, "causal-lm": causal, "multi-vector": masked_lm}


@pytest.fixture(scope="session")
def scores(collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten mined documents per training query, and one teacher."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("query_id", "document_id", "rank", "score", "relevant", "score:teacher")
    }
    for query, judged in collection.qrels["train"].items():
        others = [name for name in collection.documents if name not in judged]
        for rank, name in enumerate([*judged, *others[:9]]):
            values = (query, name, rank + 1, 30.0 - 3 * rank, name in judged, 1.0 - 0.1 * rank)
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
    types = [pa.string(), pa.string(), pa.int32(), pa.float32(), pa.bool_(), pa.float32()]
    table = pa.table({name: pa.array(rows[name], kind) for name, kind in zip(rows, types, strict=True)})
    path = tmp_path_factory.mktemp("scores") / "scores.parquet"
    pq.write_table(table, path)
    return path


def small_recipe(entry: Entry, bases: dict[str, str]) -> Any:
    recipe = get_recipe(entry.name, base_model=bases[entry.base], **SMALL)
    if entry.name == "splate":  # the head of the model that the ColBERT is made of
        recipe = replace(recipe, document=replace(recipe.document, head_model=bases["masked-lm"]))
    return replace(recipe, negatives=min(recipe.negatives, 3)) if isinstance(recipe, LsrRecipe) else recipe


@pytest.mark.parametrize("entry", RECIPES.values(), ids=RECIPES)
def test_two_steps_leave_a_model_that_sentence_transformers_loads_and_searches_with(
    entry: Entry, bases: dict[str, str], scores: Path, collection: Collection, tmp_path: Path
) -> None:
    recipe = small_recipe(entry, bases)
    file = scores if "negatives" in entry.needs else None
    result = train(recipe, collection, tmp_path / "m", negatives=file)
    assert (result.steps, result.reused) == (2, False)
    if isinstance(recipe, ColbertRecipe):
        late: Any = MultiVectorEncoder(str(tmp_path / "m"), device="cpu")
        vectors = late.encode_query(list(collection.queries.values()))
        assert late.similarity(vectors, late.encode_document(list(collection.contents().values()))).shape == (16, 16)
        return
    model = load_encoder(str(tmp_path / "m"), device="cpu")
    retrieval.encode_collection(model, collection.contents(), tmp_path / "vectors")
    index = retrieval.build_index(retrieval.read_vectors(tmp_path / "vectors"), "exact")
    queries = retrieval.encode_queries(model, collection.split_queries("test"))
    assert len(queries) == 4 and queries.indices.size
    hits = retrieval.hits_to_run(queries, index.search(queries, k=16))
    assert all(len(found) > 1 and max(found.values()) > 0 for found in hits.values())
