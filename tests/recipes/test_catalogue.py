"""Every recipe by name: its row in the docs, two steps, a search; dead models; settings, and
examples for training.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from transformers import BertForMaskedLM

from tests.recipes.small import tiny_causal_lm
from tests.refusals import refused
from tilefold import recipes, retrieval
from tilefold.modules import fused_pooling, head_pooling, load_encoder
from tilefold.recipes import (
    BinarySpec,
    ColbertRecipe,
    EchoSpec,
    EncoderSpec,
    IdfSpec,
    LsrRecipe,
    MlmSpec,
    MlpSpec,
    RegularizerSpec,
    SparseEncoderSpec,
    _masked_encoders,
    get_recipe,
    train,
)
from tilefold.recipes.adaptation import AdaptationRecipe
from tilefold.recipes.catalogue import RECIPES, Entry
from tilefold.recipes.lsr import length_grouped_batches, make_examples, make_loss
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.errors import DataError

# saved with modules of sentence-transformers alone
STOCK = (
    "splade",
    "splade-v2",
    "splade-pp",
    "splade-v3",
    "splade-doc",
    "efficient-splade",
    "inference-free",
    "causal-splade",
    "colbert",
)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SMALL: dict[str, Any] = {
    "max_steps": 2,
    "batch_size": 4,
    "max_length": 24,
    "bf16": False,
    "save_steps": 100,
}


@pytest.fixture(scope="session")
def bases(
    collection: Collection,
    teachers: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """A tiny base model of each kind that entries name."""
    folder, masked_lm = tmp_path_factory.mktemp("bases"), str(teachers[1])
    texts = [*collection.contents().values(), *collection.queries.values()]
    causal = str(tiny_causal_lm(folder / "causal-lm", texts=texts))
    return {
        "masked-lm": masked_lm,
        "encoder": masked_lm,
        "causal-lm": causal,
        "multi-vector": masked_lm,
    }


def small_recipe(entry: Entry, bases: dict[str, str]) -> Any:
    recipe = get_recipe(entry.name, base_model=bases[entry.base], **SMALL)
    if entry.name == "splate":  # the head of the model that the ColBERT is made of
        recipe = replace(recipe, document=replace(recipe.document, head_model=bases["masked-lm"]))
    return (
        replace(recipe, negatives=min(recipe.negatives, 3))
        if isinstance(recipe, LsrRecipe)
        else recipe
    )


@pytest.mark.parametrize("entry", RECIPES.values(), ids=RECIPES)
def test_two_steps_leave_a_model_that_searches(
    entry: Entry,
    bases: dict[str, str],
    scores: Path,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = small_recipe(entry, bases)
    file = scores if "negatives" in entry.needs else None
    result = train(recipe, collection, tmp_path / "m", negatives=file)
    listed = [
        file.read_text()
        for name in ("modules.json", "router_config.json")
        for file in tmp_path.rglob(name)
    ]
    assert any("tilefold" in text for text in listed) == (entry.name not in STOCK)
    assert (result.steps, result.reused) == (2, False)
    measured = "" if isinstance(recipe, ColbertRecipe) else recipe.document.measured
    assert bool(measured) == (entry.name == "causal-splade")
    assert measured in (tmp_path / "m" / "README.md").read_text()
    if isinstance(recipe, ColbertRecipe):
        late: Any = MultiVectorEncoder(str(tmp_path / "m"), device="cpu")
        vectors = late.encode_query(list(collection.queries.values()))
        assert late.similarity(
            vectors,
            late.encode_document(list(collection.contents().values())),
        ).shape == (16, 16)
        return
    trust = (
        {} if entry.name in STOCK else {"trust_remote_code": True}
    )  # of modules in the installed tilefold
    model = SparseEncoder(str(tmp_path / "m"), device="cpu", **trust)
    retrieval.encode_collection(model, collection.contents(), tmp_path / "vectors")
    index = retrieval.build_index(retrieval.read_vectors(tmp_path / "vectors"), "exact")
    queries = retrieval.encode_queries(model, collection.split_queries("test"))
    assert len(queries) == 4 and queries.indices.size
    hits = retrieval.hits_to_run(queries, index.search(queries, k=16))
    assert all(len(actual) > 1 and max(actual.values()) > 0 for actual in hits.values())


def test_idf_queries_are_fitted_and_learn_at_their_own_rate(
    bases: dict[str, str],
    scores: Path,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = small_recipe(RECIPES["inference-free"], bases)
    assert isinstance(recipe, LsrRecipe) and recipe.query is not None
    texts = list(collection.contents().values())
    start = recipe.build_model(texts).cpu()[0].sub_modules["query"][0]
    (token,) = start.tokenizer("functions", add_special_tokens=False)["input_ids"]
    assert start.weight[token].item() == pytest.approx(
        math.log1p(0.5 / (len(texts) + 0.5)),
    )  # it is in every document
    assert start.weight.max().item() == pytest.approx(
        math.log1p((len(texts) + 0.5) / 0.5),
    )  # of a token in none
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
    more = {
        **collection.documents,
        "new": Document("new", "", "A text that changes every frequency."),
    }
    grown = replace(collection, documents=more)
    message = "made from other documents than those of small"
    refused(DataError, message, train, fixed, grown, tmp_path / "fixed", negatives=scores)
    from_pairs = small_recipe(RECIPES["deepct"], bases)
    train(from_pairs, collection, tmp_path / "pairs")
    refused(
        FileExistsError,
        "differs in training data",
        train,
        from_pairs,
        grown,
        tmp_path / "pairs",
    )


def test_deepct_starts_at_an_idf_match_and_saturates(
    bases: Any,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = small_recipe(RECIPES["deepct"], bases)
    texts = list(collection.contents().values())
    rows = (
        recipe.build_model(texts)
        .cpu()
        .eval()
        .encode_document(texts, convert_to_sparse_tensor=False)
    )
    assert set(rows[rows > 0].tolist()) == {0.5}  # all terms alike: queries' IDF decides
    train(recipe, collection, tmp_path / "m")
    model = load_encoder(str(tmp_path / "m"), device="cpu")
    assert model[0].sub_modules["document"][1].saturation == 0.1
    assert (
        len(set(model.encode_document(texts, convert_to_sparse_tensor=False).flatten().tolist()))
        > 10
    )


def test_documents_of_a_group_are_penalised_together_or_by_position() -> None:
    recipe = get_recipe("inference-free", negatives=2)
    rows = torch.rand(
        6,
        9,
        generator=torch.Generator().manual_seed(0),
    )  # two relevant ones, then negatives
    spec = RegularizerSpec(per_position=True)
    of_each = make_loss(None, replace(recipe, document_regularizer=spec)).document_regularizer
    together = make_loss(
        None,
        replace(recipe, document_regularizer=RegularizerSpec()),
    ).document_regularizer
    assert of_each(rows) == pytest.approx(sum(together(rows[low : low + 2]) for low in (0, 2, 4)))


def test_the_page_and_the_needs_of_recipes_are_those_of_the_catalogue() -> None:
    for entry in RECIPES.values():
        paper = f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})" if entry.paper else ""
        cells = (
            f"`{entry.name}`",
            entry.summary,
            ", ".join(entry.needs),
            paper,
            entry.published,
            entry.publishes,
        )
        assert f"| {' | '.join(cells)} |" in PAGE, "write the row anew from the catalogue"
    asking = {name for name, entry in RECIPES.items() if "scores" in entry.needs}
    assert asking == {"splade-pp", "splade-v3", "efficient-splade", "inference-free", "splate"}
    assert get_recipe("splade-v3").needs == ("pairs", "negatives", "scores")
    assert get_recipe("splade-doc", seed=3).seed == 3
    refused(ValueError, "recipe must be one of splade, ", get_recipe, "spladee")
    refused(ValueError, r"got 'spladee'\. Did you mean 'splade'\?", get_recipe, "spladee")
    message = "Did you mean 'batch_size'"
    refused(ValueError, message, get_recipe, "splade", batchsize=3)


def test_a_dead_model_stops_the_training_with_a_remedy(
    collection: Collection,
    bases: Any,
    tmp_path: Path,
) -> None:
    dead = tmp_path / "dead"
    shutil.copytree(bases["masked-lm"], dead)
    network = BertForMaskedLM.from_pretrained(dead)
    with torch.no_grad():
        network.cls.predictions.bias.fill_(-100.0)
    network.save_pretrained(dead)
    recipe = LsrRecipe(base_model=str(dead), **SMALL | {"max_steps": 12})
    message = r"every query vector is zero after 10 steps: the model is dead.*smaller"
    refused(recipes.TrainingError, message, train, recipe, collection, tmp_path / "m")


def test_a_model_that_is_not_sparse_is_told_of(
    collection: Collection,
    bases: Any,
    tmp_path: Path,
) -> None:
    recipe = LsrRecipe(base_model=bases["masked-lm"], **SMALL)
    result = train(recipe, collection, tmp_path / "m")
    few_steps, *dense = result.warnings
    assert few_steps.startswith("the training had 2 steps, which hardly change a model")
    assert [text.split(" vectors have")[0] for text in dense] == ["query", "document"]
    assert "larger weight of the penalties" in dense[0]
    again = train(recipe, collection, tmp_path / "m")
    assert again.reused and again.warnings == result.warnings


# Settings, and the examples that are made of pairs, mined negatives and teacher scores

EVERY = (ColbertRecipe, LsrRecipe)


def encoder_from_json(**values: Any) -> EncoderSpec:
    return EncoderSpec.from_dict(values)


# fields of all recipes; a value, and what it must be
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"base_model": ""}, "base_model: expected 'minilm', a folder or a model name, got ''"),
    ({"max_steps": -1}, "max_steps: expected a whole number of at least 0 or None, got -1"),
    ({"batch_size": 1}, "batch_size: expected a whole number of at least 2, got 1"),
    ({"epochs": float("nan")}, "epochs: expected a number greater than 0, got nan"),
    ({"learning_rate": -1.0}, "learning_rate: expected a number greater than 0"),
    ({"similarity_scale": float("inf")}, "similarity_scale: expected a number greater than 0"),
    ({"warmup_ratio": 1.0}, r"warmup_ratio: expected a number in \[0, 1\)"),
    ({"train_max_length": 512}, r"train_max_length: must not exceed max_length \(\d+\), got 512"),
    ({"max_length": 0}, "max_length: expected a whole number of at least 1"),
    ({"bf16": "yes"}, "bf16: expected True or False or None"),
    ({"graphs": 1}, "graphs: expected True or False, got 1"),
    ({"graphs": True, "fused": False}, "graphs, fused: graphs need the fused forward"),
    (
        {"graphs": True, "gradient_checkpointing": True},
        "graphs, gradient_checkpointing: expected one of them, got both",
    ),
    ({"save_steps": True}, "save_steps: expected a whole number"),
    ({"save_minutes": -1}, "save_minutes: expected a number of at least 0"),
    ({"seed": 2**32}, r"seed: expected a whole number of at least 0 and below 2\^32"),
    ({"attention": "sparse"}, "attention: expected one of softmax, entmax or None, got 'sparse'"),
    ({"attention": "entmax", "alpha": 2.5}, r"alpha: expected a number in \[1, 2\]"),
    ({"attention": "entmax", "anneal_alpha": -0.1}, r"anneal_alpha: expected a number in \[0, 1\]"),
    ({"alpha": 1.5}, "alpha: must be left out without attention 'entmax'"),
    ({"attention": "softmax", "anneal_alpha": 0.5}, "anneal_alpha: must be left out"),
]
OWN: list[tuple[Any, dict[str, Any], str]] = [
    (
        LsrRecipe,
        {"document_regularizer": -1e-3},
        "document_regularizer: weight: expected a number of at least 0",
    ),
    (
        LsrRecipe,
        {"document_regularizer": True},
        "document_regularizer: expected a RegularizerSpec, a dictionary of its fields or the weight",
    ),
    (
        LsrRecipe,
        {"query_regularizer": {"warmup_ratio": 0}},
        "query_regularizer: warmup_ratio: expected",
    ),
    (LsrRecipe, {"frozen_layers": 1.5}, "frozen_layers: expected a whole number"),
    (
        LsrRecipe,
        {"frozen_layers": 2, "query": BinarySpec()},
        "frozen_layers: must be 0 with a query encoder",
    ),
    (LsrRecipe, {"start_percentile": 100}, r"start_percentile: expected a number in \(0, 100\)"),
    (LsrRecipe, {"group_by_length": 1}, "group_by_length: expected True or False"),
    (
        LsrRecipe,
        {"split_vocabulary": True},
        "split_vocabulary, fsdp, fused: a split vocabulary needs both others",
    ),
    (LsrRecipe, {"fsdp": True, "graphs": True}, "fsdp, graphs: expected one of them, got both"),
    (
        ColbertRecipe,
        {"dimension": 12},
        "dimension: expected a multiple of 8 up to 4096 or None, got 12",
    ),
    (ColbertRecipe, {"query_length": 0}, "query_length: expected a whole number of at least 1"),
    (ColbertRecipe, {"expand_queries": "yes"}, "expand_queries: expected True or False"),
    (LsrRecipe, {"loss": {"hinge": 1.0}}, "loss: must map names out of infonce, kl"),
    (LsrRecipe, {"loss": {}}, "loss: must map names"),
    (
        LsrRecipe,
        {"loss": {"kl": 1.0}},
        "negatives: must be at least 1 for a loss that compares documents with a",
    ),
    (
        LsrRecipe,
        {"loss": {"pairwise_softmax": 1.0}},
        "negatives: must be at least 1 for the loss pairwise_softmax",
    ),
    (LsrRecipe, {"loss": {"infonce": 0}}, r"loss\['infonce'\]: expected a number greater than 0"),
    (LsrRecipe, {"query": {"kind": "word2vec"}}, "query: kind: expected one of"),
    (
        LsrRecipe,
        {"document_regularizer": {"kind": "l0"}},
        "document_regularizer: kind: expected one of flops, l1",
    ),
    (
        RegularizerSpec,
        {"kind": "df_flops", "per_position": True},
        "per_position: must be False for kind 'df_flops'",
    ),
    (
        LsrRecipe,
        {"query_regularizer": {"per_position": True}},
        "query_regularizer: per_position must be False",
    ),
    (LsrRecipe, {"document": None}, "document: expected an EncoderSpec, such as MlmSpec"),
    (LsrRecipe, {"negatives": -1}, "negatives: expected a whole number of at least 0"),
    (LsrRecipe, {"idf_learning_rate": 0}, "idf_learning_rate: expected a number greater than 0"),
    (
        encoder_from_json,
        {"kind": "mlm", "lora": 4},
        "lora: does not apply to an encoder of kind 'mlm'",
    ),
    (
        encoder_from_json,
        {"kind": "echo", "literal_residual": True},
        "literal_residual: does not apply",
    ),
    (encoder_from_json, {"kind": "bge_m3", "top_k": 3}, "top_k: does not apply"),
    (encoder_from_json, {"kind": "mlm", "trainable": 1}, "trainable: does not apply"),
    (
        encoder_from_json,
        {"kind": "idf", "trainable": 1},
        "trainable: expected True or False, got 1",
    ),
    (encoder_from_json, {"kind": []}, r"kind: expected one of .*, got \[\]"),
    (
        encoder_from_json,
        {"pooling": "avg"},
        "pooling: expected one of max, sum, mean, cls, last, got 'avg'",
    ),
    (
        encoder_from_json,
        {"kind": "prosper", "pooling": "sum"},
        "pooling: expected one of last, cls, max, got 'sum'",
    ),
    (
        encoder_from_json,
        {"pooling": "cls", "drop_special_tokens": True},
        "drop_special_tokens: must be left out with pooling",
    ),
    (
        encoder_from_json,
        {"activation": "gelu"},
        "activation: expected one of log1p_relu, .*, got 'gelu'",
    ),
    (encoder_from_json, {"normalize": "l1"}, "normalize: expected one of l2 or None, got 'l1'"),
    (
        encoder_from_json,
        {"base_model": 5},
        "base_model: expected .minilm., a folder or a model name or None, got 5",
    ),
    (
        encoder_from_json,
        {"kind": "idf", "idf": ""},
        "idf: expected the path of a file or None, got ''",
    ),
    (
        encoder_from_json,
        {"kind": "splate", "head_model": 1},
        "head_model: expected .minilm., a folder or a model name, got 1",
    ),
    (AdaptationRecipe, {"bf16": "yes"}, "bf16: expected True or False or None, got 'yes'"),
    (AdaptationRecipe, {"seed": -1}, "seed: expected a whole number of at least 0"),
    (AdaptationRecipe, {"length": 1}, "length: expected a whole number of at least 2, got 1"),
    (
        AdaptationRecipe,
        {"activated_weight": -1},
        "activated_weight: expected a number of at least 0",
    ),
]


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [*((kind, fields, text) for kind in EVERY for fields, text in COMMON), *OWN],
)
def test_a_recipe_names_the_field_that_is_wrong(
    kind: Any,
    fields: dict[str, Any],
    text: str,
) -> None:
    refused(ValueError, f"^{text}", kind, **fields)


@pytest.mark.parametrize(
    "recipe",
    [
        get_recipe("splade", base_model="folder", epochs=2, seed=3),
        ColbertRecipe("folder", epochs=2, seed=3, dimension=None),
        LsrRecipe(
            "named",
            "folder",
            IdfSpec(trainable=True),
            loss={"kl": 1.0, "margin_mse": 0.05},
            negatives=8,
            document_regularizer=RegularizerSpec("df_flops", 0.3, threshold=20),
        ),
        *(pytest.param(entry.recipe, id=entry.name) for entry in RECIPES.values()),
    ],
)
def test_a_recipe_survives_json_and_refuses_unknown_fields(recipe: Any) -> None:
    kind = type(recipe)
    assert kind.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    refused(ValueError, "unknown recipe fields", kind.from_dict, {"temperature": 1})


@pytest.mark.parametrize("kind", sorted(EncoderSpec.classes))
def test_an_encoder_of_any_kind_survives_json_and_refuses_unknown_fields(kind: str) -> None:
    spec = EncoderSpec.from_dict({"kind": kind, "base_model": "folder"})
    assert type(spec) is EncoderSpec.classes[kind]
    values = {"kind": kind, "base_model": "folder"}
    assert json.loads(json.dumps(spec.to_dict())) == values
    assert type(spec).from_dict(values) == spec
    with_defaults = {field.name: None for field in fields(spec)} | values
    assert EncoderSpec.from_dict(with_defaults) == spec
    text = f"temperature: does not apply to an encoder of kind '{kind}', which has the fields base_"
    refused(ValueError, text, EncoderSpec.from_dict, {"kind": kind, "temperature": 1})


def test_another_kind_of_encoder_takes_the_settings_that_were_set() -> None:
    values = get_recipe("causal-splade").to_dict()
    values["document"]["kind"] = "echo"
    assert LsrRecipe.from_dict(values).document == EchoSpec(lora=64)
    values["document"] |= {"kind": "mlp", "lora": None}
    assert LsrRecipe.from_dict(values).document == MlpSpec()


def test_an_encoder_class_refuses_the_json_of_another_kind() -> None:
    text = "kind: expected one of mlm, got 'mlp'"
    refused(ValueError, text, MlmSpec.from_dict, {"kind": "mlp"})


def test_json_of_the_former_splade_recipe_and_encoders_ends_in_an_error() -> None:
    splade = get_recipe("splade").to_dict()
    del splade["document"]
    refused(
        ValueError,
        r"unknown recipe fields \['regularizer_warmup_ratio'\]; the fields are",
        LsrRecipe.from_dict,
        splade | {"query_regularizer": 0.01, "regularizer_warmup_ratio": 0.5},
    )
    binary = {"kind": "binary", "pooling": None, "scale": 0.3, "shared_network": False}
    refused(
        ValueError,
        "query: shared_network: does not apply to an encoder of kind 'binary'",
        LsrRecipe.from_dict,
        {"query": binary},
    )


def test_the_splade_recipe_goes_on_from_all_modules_of_a_sparse_encoder(
    bases: dict[str, str],
    tmp_path: Path,
) -> None:
    texts = ["a text"]
    trained = LsrRecipe(
        base_model=bases["masked-lm"],
        document=MlmSpec(top_k=3),
        max_length=24,
    ).build_model(texts)
    trained.save_pretrained(str(tmp_path))
    model = get_recipe("splade", base_model=str(tmp_path), max_length=16).build_model(texts)
    assert model[1].top_k == 3
    assert model.max_seq_length == 16
    two_encoders = LsrRecipe(
        base_model=bases["masked-lm"],
        query=BinarySpec(),
        document=SparseEncoderSpec(),
    )
    refused(ValueError, "leave the query encoder out", two_encoders.build_model, texts)


def test_a_recipe_has_losses_of_its_own_and_the_names_of_the_module() -> None:
    arguments = {"infonce": 1.0}
    recipe = LsrRecipe(loss=MappingProxyType(arguments))
    arguments["infonce"] = -1.0
    assert recipe.loss == {"infonce": 1.0} and LsrRecipe.from_dict(recipe.to_dict()) == recipe
    assert (_masked_encoders.POOLINGS, _masked_encoders.ACTIVATIONS) == (
        head_pooling.POOLINGS,
        fused_pooling.ACTIVATIONS,
    )


def write_rows(
    path: Path,
    rows: list[tuple[str, str, int, float, bool]],
    **teachers: list[float],
) -> Path:
    names = ("query_id", "document_id", "rank", "score", "relevant")
    types = (pa.string(), pa.string(), pa.int32(), pa.float32(), pa.bool_())
    columns = {
        name: pa.array(values, kind)
        for name, values, kind in zip(names, zip(*rows, strict=True), types, strict=True)
    }
    columns |= {
        f"score:{name}": pa.array(values, pa.float32()) for name, values in teachers.items()
    }
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def mined(tmp_path: Path) -> Path:
    """Of two training queries; d15 is relevant to no one, d1 to q1."""
    rows = [
        ("q0", "d0", 1, 9.0, True),
        ("q0", "d1", 2, 8.0, False),
        ("q0", "d15", 3, 7.0, False),
        ("q1", "d1", 1, 9.0, True),
        ("q1", "d2", 2, 4.0, False),
    ]
    return write_rows(tmp_path / "mined.parquet", rows)


def test_pairs_alone_need_no_file_and_refuse_one(collection: Collection, mined: Path) -> None:
    recipe = get_recipe("splade-v2")
    made = make_examples(recipe, collection, None)
    assert (
        list(made.columns) == ["query", "positive"]
        and made.pairs == len(made.columns["query"]) == 12
    )
    refused(
        ValueError,
        "'splade-v2' does not read mined negatives",
        make_examples,
        recipe,
        collection,
        mined,
    )


def test_negatives_are_drawn_for_each_pass_and_never_relevant(
    collection: Collection,
    mined: Path,
) -> None:
    recipe = LsrRecipe(negatives=2, epochs=3, seed=4)
    made = make_examples(recipe, collection, mined)
    assert list(made.columns) == ["query", "positive", "negative_1", "negative_2"]
    assert made.pairs == 2 and len(made.columns["query"]) == 6
    assert [note[:39] for note in made.notes] == ["10 of 12 training pairs were left out: "]
    contents = collection.contents()
    for row in zip(*made.columns.values(), strict=True):
        query = next(name for name, text in collection.queries.items() if text == row[0])
        allowed = {"q0": {"d1", "d15"}, "q1": {"d2"}}[query]
        assert row[1] == contents["d" + query[1:]]
        assert set(row[2:]) == {contents[name] for name in allowed}  # a single one is repeated
    assert make_examples(recipe, collection, mined).digest() == made.digest()
    assert make_examples(replace(recipe, seed=5), collection, mined).digest() != made.digest()


def test_labels_are_the_teachers_scores_of_the_positive_and_the_negatives(
    collection: Any,
    tmp_path: Path,
) -> None:
    rows = [("q0", "d0", 1, 30.0, True), ("q0", "d1", 2, 12.0, False), ("q0", "d15", 3, 0.0, False)]
    scored = write_rows(tmp_path / "scored.parquet", rows, teacher=[5.0, 2.0, 0.0])
    columns = make_examples(
        LsrRecipe(loss={"kl": 1.0}, negatives=2, epochs=1),
        collection,
        scored,
    ).columns
    assert columns["query"][:] == [collection.queries["q0"]]
    score_of = {
        collection.documents[name].contents: score for name, score in (("d1", 12.0), ("d15", 0.0))
    }
    assert columns["label"].tolist() == [
        [30.0, score_of[columns["negative_1"][0]], score_of[columns["negative_2"][0]]],
    ]


@pytest.mark.parametrize(
    ("scores", "warned"),
    [
        pytest.param((0.99999, 0.99998, 0.99997), True, id="behind-a-sigmoid"),
        pytest.param((1.0, 1.0, 1.0), True, id="constant"),
        pytest.param((0.9, 0.5, 0.1), False, id="probabilities"),
        pytest.param((11.5, 3.0, -2.0), False, id="logits"),
    ],
)
def test_teachers_that_hardly_tell_documents_apart_are_warned_of(
    scores: tuple[float, ...],
    warned: bool,
    collection: Collection,
    tmp_path: Path,
) -> None:
    rows = [
        (f"q{query}", f"d{query + rank}", rank + 1, score, rank == 0)
        for query in range(12)
        for rank, score in enumerate(scores)
    ]
    normalized = [
        (query, document, rank, 3.0 * rank, flag) for query, document, rank, _, flag in rows
    ]
    raw = [score for _, _, _, score, _ in rows]
    file = write_rows(tmp_path / "scored.parquet", normalized, cross=raw)
    recipe = LsrRecipe(negatives=2, loss={"margin_mse": 1.0}, max_steps=1)
    notes = make_examples(recipe, collection, file).notes
    assert len(notes) == warned
    assert (
        not warned
        or "the teacher 'cross' scores all documents of a query within 0.0001" in notes[0]
    )


def test_missing_data_are_named_with_their_commands(
    collection: Collection,
    mined: Path,
    tmp_path: Path,
) -> None:
    needed = "the recipe 'splade-v3' needs mined negatives with teachers' scores"
    for file, text in ((None, needed), (mined, "has no teachers' scores")):
        with pytest.raises(ValueError, match=text) as message:
            make_examples(get_recipe("splade-v3"), collection, file)
        assert "tilefold mine --data small --index bm25-index --output negatives.parquet" in str(
            message.value,
        )
        assert (
            "tilefold score negatives.parquet --data small --teacher minilm --teacher bm25"
            in str(message.value)
        )
        assert str(message.value).endswith("negatives=scores.parquet")
    file = write_rows(tmp_path / "test.parquet", [("q12", "d0", 1, 1.0, False)])
    text = "has no negatives of the training queries of 'small'"
    refused(ValueError, text, make_examples, LsrRecipe(negatives=1), collection, file)


def test_batches_grouped_by_length_hold_every_pair_once_and_no_text_twice() -> None:
    texts = [f"{'word ' * (7 * i % 23)}{i}" for i in range(50)]
    texts[41] = texts[3]
    dataset = Dataset.from_dict({"query": [f"q{i}" for i in range(50)], "document": texts})
    sampler = length_grouped_batches(
        dataset,
        4,
        drop_last=False,
        generator=torch.Generator(),
        seed=5,
    )
    batches = list(sampler)
    assert sorted(row for batch in batches for row in batch) == list(range(50))
    assert batches == list(sampler), "an epoch has one order, so that a killed run can go on"
    assert not any({3, 41} <= set(batch) for batch in batches)
    sampler.set_epoch(1)
    assert batches != list(sampler)
    padded = sum(len(batch) * max(len(texts[row]) for row in batch) for batch in batches)
    random = sum(4 * max(map(len, texts[start : start + 4])) for start in range(0, 50, 4))
    assert padded < 0.8 * random
