"""Every recipe by name: its row in the docs, two steps on the CPU, a search with what they leave; dead models."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from transformers import BertForMaskedLM

from tests.recipes.small import tiny_causal_lm
from tests.refusals import refused
from tilefold import retrieval
from tilefold.modules import load_encoder
from tilefold.recipes import ColbertRecipe, LsrRecipe, RegularizerSpec, TrainingError, get_recipe, train
from tilefold.recipes.catalogue import RECIPES, Entry
from tilefold.recipes.lsr import load_base_model, make_loss
from tilefold.retrieval.collection import Collection, Document
from tilefold.retrieval.errors import DataError

# saved with modules of sentence-transformers alone
STOCK = ("splade", "splade-v2", "splade-pp", "splade-v3", "splade-doc", "efficient-splade", "inference-free",
         "causal-splade", "colbert")  # fmt: skip
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SMALL: dict[str, Any] = {"max_steps": 2, "batch_size": 4, "max_length": 24, "bf16": False, "save_steps": 100}


@pytest.fixture(scope="session")
def bases(
    collection: Collection, teachers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A tiny base model of each kind that entries name."""
    folder, masked_lm = tmp_path_factory.mktemp("bases"), str(teachers[1])
    texts = [*collection.contents().values(), *collection.queries.values()]
    causal = str(tiny_causal_lm(folder / "causal-lm", texts=texts))
    return {"masked-lm": masked_lm, "encoder": masked_lm, "causal-lm": causal, "multi-vector": masked_lm}


def small_recipe(entry: Entry, bases: dict[str, str]) -> Any:
    recipe = get_recipe(entry.name, base_model=bases[entry.base], **SMALL)
    if entry.name == "splate":  # the head of the model that the ColBERT is made of
        recipe = replace(recipe, document=replace(recipe.document, head_model=bases["masked-lm"]))
    return replace(recipe, negatives=min(recipe.negatives, 3)) if isinstance(recipe, LsrRecipe) else recipe


@pytest.mark.parametrize("entry", RECIPES.values(), ids=RECIPES)
def test_two_steps_leave_a_model_that_searches(
    entry: Entry, bases: dict[str, str], scores: Path, collection: Collection, tmp_path: Path
) -> None:
    recipe = small_recipe(entry, bases)
    file = scores if "negatives" in entry.needs else None
    result = train(recipe, collection, tmp_path / "m", negatives=file)
    listed = [file.read_text() for name in ("modules.json", "router_config.json") for file in tmp_path.rglob(name)]
    assert any("tilefold" in text for text in listed) == (entry.name not in STOCK)
    assert (result.steps, result.reused) == (2, False)
    if isinstance(recipe, ColbertRecipe):
        late: Any = MultiVectorEncoder(str(tmp_path / "m"), device="cpu")
        vectors = late.encode_query(list(collection.queries.values()))
        assert late.similarity(vectors, late.encode_document(list(collection.contents().values()))).shape == (16, 16)
        return
    trust = {} if entry.name in STOCK else {"trust_remote_code": True}  # of modules in the installed tilefold
    model = SparseEncoder(str(tmp_path / "m"), device="cpu", **trust)
    retrieval.encode_collection(model, collection.contents(), tmp_path / "vectors")
    index = retrieval.build_index(retrieval.read_vectors(tmp_path / "vectors"), "exact")
    queries = retrieval.encode_queries(model, collection.split_queries("test"))
    assert len(queries) == 4 and queries.indices.size
    hits = retrieval.hits_to_run(queries, index.search(queries, k=16))
    assert all(len(found) > 1 and max(found.values()) > 0 for found in hits.values())


def test_idf_queries_are_fitted_and_learn_at_their_own_rate(
    bases: dict[str, str], scores: Path, collection: Collection, tmp_path: Path
) -> None:
    recipe = small_recipe(RECIPES["inference-free"], bases)
    assert isinstance(recipe, LsrRecipe) and recipe.query is not None
    texts = list(collection.contents().values())
    start = load_base_model(recipe, texts).cpu()[0].sub_modules["query"][0]
    (token,) = start.tokenizer("functions", add_special_tokens=False)["input_ids"]
    assert start.weight[token].item() == pytest.approx(math.log1p(0.5 / (len(texts) + 0.5)))  # it is in every document
    assert start.weight.max().item() == pytest.approx(math.log1p((len(texts) + 0.5) / 0.5))  # of a token in none
    moved = {}
    for rate in (1e-4, 1e-1):
        folder = tmp_path / str(rate)
        train(replace(recipe, idf_learning_rate=rate), collection, folder, negatives=scores)
        weight = load_encoder(str(folder), device="cpu")[0].sub_modules["query"][0].weight
        moved[rate] = (weight - start.weight.to(weight)).abs().max().item()
    assert 0 < moved[1e-4] < 1e-3
    assert moved[1e-1] > 1e-2
    fixed = replace(recipe, query=replace(recipe.query, trainable=False))
    train(fixed, collection, tmp_path / "fixed", negatives=scores)
    kept = SparseEncoder(str(tmp_path / "fixed"), device="cpu")[0].sub_modules["query"][0].weight
    assert torch.equal(kept, start.weight)
    more = {**collection.documents, "new": Document("new", "", "A text that changes every frequency.")}
    grown = replace(collection, documents=more)
    told = "made from other documents than those of small"
    refused(DataError, told, train, fixed, grown, tmp_path / "fixed", negatives=scores)
    from_pairs = small_recipe(RECIPES["deepct"], bases)
    train(from_pairs, collection, tmp_path / "pairs")
    refused(FileExistsError, "differs in training data", train, from_pairs, grown, tmp_path / "pairs")


def test_deepct_starts_at_an_idf_match_and_saturates(bases: Any, collection: Collection, tmp_path: Path) -> None:
    recipe = small_recipe(RECIPES["deepct"], bases)
    texts = list(collection.contents().values())
    start = load_base_model(recipe, texts).cpu().eval()
    rows = start.encode_document(texts, convert_to_sparse_tensor=False)
    assert set(rows[rows > 0].tolist()) == {0.5}  # all terms alike: queries' IDF decides
    train(recipe, collection, tmp_path / "m")
    model = load_encoder(str(tmp_path / "m"), device="cpu")
    assert model[0].sub_modules["document"][1].saturation == 0.1
    assert len(set(model.encode_document(texts, convert_to_sparse_tensor=False).flatten().tolist())) > 10


def test_documents_of_a_group_are_penalised_together_or_by_position() -> None:
    recipe = get_recipe("inference-free", negatives=2)
    rows = torch.rand(6, 9, generator=torch.Generator().manual_seed(0))  # two relevant ones, then negatives
    spec = RegularizerSpec(per_position=True)
    of_each = make_loss(None, replace(recipe, document_regularizer=spec)).document_regularizer
    together = make_loss(None, replace(recipe, document_regularizer=RegularizerSpec())).document_regularizer
    assert of_each(rows) == pytest.approx(sum(together(rows[low : low + 2]) for low in (0, 2, 4)))


def test_the_page_and_the_needs_of_recipes_are_those_of_the_catalogue() -> None:
    for entry in RECIPES.values():
        paper = f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})" if entry.paper else ""
        cells = (f"`{entry.name}`", entry.summary, ", ".join(entry.needs), paper, entry.published, entry.publishes)
        assert f"| {' | '.join(cells)} |" in PAGE, "write the row anew from the catalogue"
    asking = {name for name, entry in RECIPES.items() if "scores" in entry.needs}
    assert asking == {"splade-pp", "splade-v3", "efficient-splade", "inference-free", "splate"}
    assert get_recipe("splade-v3").needs == ("pairs", "negatives", "scores")
    assert get_recipe("splade-doc", seed=3).seed == 3
    refused(ValueError, "recipe must be one of splade, ", get_recipe, "spladee")


def test_a_dead_model_stops_the_training_with_a_remedy(collection: Collection, bases: Any, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    shutil.copytree(bases["masked-lm"], dead)
    network = BertForMaskedLM.from_pretrained(dead)
    with torch.no_grad():
        network.cls.predictions.bias.fill_(-100.0)
    network.save_pretrained(dead)
    recipe = LsrRecipe(base_model=str(dead), **SMALL | {"max_steps": 12})
    told = r"every query vector is zero after 10 steps: the model is dead.*smaller"
    refused(TrainingError, told, train, recipe, collection, tmp_path / "m")


def test_a_model_that_is_not_sparse_is_told_of(collection: Collection, bases: Any, tmp_path: Path) -> None:
    recipe = LsrRecipe(base_model=bases["masked-lm"], **SMALL)
    result = train(recipe, collection, tmp_path / "m")
    assert [text.split(" vectors have")[0] for text in result.warnings] == ["query", "document"]
    assert "larger weight of the penalties" in result.warnings[0]
    again = train(recipe, collection, tmp_path / "m")
    assert again.reused and again.warnings == result.warnings
