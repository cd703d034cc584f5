"""``tilefold verify`` and ``encode --invariant``: bits, changes and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sentence_transformers.base.modules import Transformer

from tests.cli.program import Call, run_steps
from tests.recipes.small import small_masked_lm
from tilefold.cli.verify import _lines_of
from tilefold.integrations.sentence_transformers import _invariant
from tilefold.retrieval.encoding.verification import Verification


@pytest.fixture(scope="module")
def invariant(shared: Path, masked_lm: str) -> Path:
    """Vectors of ``encode --invariant``; to be read only."""
    folder = shared / "invariant"
    data = ("--data", shared / "data")
    run_steps(("encode", "--model", masked_lm, *data, "--output", folder, "--invariant"))
    return folder


def test_vectors_of_an_unchanged_model_have_the_same_bits(
    call: Call,
    shared: Path,
    invariant: Path,
    masked_lm: str,
) -> None:
    data = ("--data", shared / "data")
    outcome = call("verify", invariant, "--model", masked_lm, *data, "--sample", "7")
    assert outcome.code == 0, outcome.err
    assert outcome.out == "7 vectors have the same bits\n"


def test_queries_and_token_vectors_are_verified(call: Call, shared: Path, tmp_path: Path) -> None:
    vectors, model = tmp_path / "queries", ("--model", shared / "late")
    data = ("--data", shared / "data")
    encoded = call("encode", *model, *data, "--output", vectors, "--queries", "--invariant")
    assert encoded.code == 0, encoded.err
    outcome = call("verify", vectors, *model, *data, "--sample", "3", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert (result["n_compared"], result["n_different"], result["passed"]) == (3, 0, True)


@pytest.mark.slow
def test_dense_vectors_are_verified(call: Call, shared: Path, tmp_path: Path) -> None:
    vectors, model = tmp_path / "dense", ("--model", "minilm")
    data = ("--data", shared / "data")
    kind = ("--kind", "dense", "--storage", "fp16")
    encoded = call("encode", *model, *data, "--output", vectors, *kind, "--invariant")
    assert encoded.code == 0, encoded.err
    outcome = call("verify", vectors, *model, *data, "--sample", "5")
    assert outcome.out == "5 vectors have the same bits\n"


def test_another_model_fails(
    call: Call,
    shared: Path,
    invariant: Path,
    tmp_path: Path,
) -> None:
    other = small_masked_lm(tmp_path / "other", seed=1)
    outcome = call("verify", invariant, "--model", other, "--data", shared / "data")
    assert outcome.code == 1
    model_line, difference_line = outcome.out.splitlines()
    assert model_line.startswith("model has changed: ")
    assert "vectors differ, by at most" in difference_line
    assert "rounding" not in difference_line


@pytest.mark.parametrize(
    ("n_different", "difference", "expected"),
    [
        pytest.param(
            7,
            1.75e-07,
            "7 of 30 vectors differ, by at most 1.75e-07, which is rounding: a, b, ...",
            id="rounding",
        ),
        pytest.param(
            2,
            0.5,
            "2 of 30 vectors differ, by at most 0.5: a, b",
            id="more than rounding",
        ),
    ],
)
def test_small_differences_without_the_promise_are_called_rounding(
    n_different: int,
    difference: float,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verification = Verification(
        n_compared=30,
        n_different=n_different,
        largest_difference=difference,
        different_ids=["a", "b"],
        invariant=False,
        changes={},
    )
    assert _lines_of(verification) == [expected]
    assert "--invariant" in capsys.readouterr().err


def test_a_model_of_another_kind_is_refused_with_advice_for_verify(
    call: Call,
    shared: Path,
    invariant: Path,
) -> None:
    model = ("--model", shared / "late")
    outcome = call("verify", invariant, *model, "--data", shared / "data")
    assert outcome.code == 2
    assert f"Pass the model that has computed {invariant}." in outcome.err
    assert "--rerank" not in outcome.err


def test_changed_libraries_are_listed(
    call: Call,
    shared: Path,
    invariant: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    vectors = shutil.copytree(invariant, tmp_path / "vectors")
    manifest = json.loads((vectors / "manifest.json").read_text(encoding="utf-8"))
    manifest["settings"]["invariant"]["torch"] = "2.0.0"
    del manifest["checksum"]
    (vectors / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    data = ("--data", shared / "data")
    outcome = call("verify", vectors, "--model", masked_lm, *data, "--sample", "1")
    assert outcome.code == 0, outcome.err
    assert "torch has changed: 2.0.0 -> " in outcome.out


def test_other_texts_are_refused(
    call: Call,
    invariant: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text('{"_id": "a", "text": "another text"}\n', encoding="utf-8")
    outcome = call("verify", invariant, "--model", masked_lm, "--data", data)
    assert outcome.code == 1
    assert "expected the texts that were encoded" in outcome.err


def test_vectors_without_the_promise_may_differ(
    call: Call,
    shared: Path,
    masked_lm: str,
) -> None:
    data = ("--data", shared / "data")
    outcome = call("verify", shared / "vectors", "--model", masked_lm, *data, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["invariant"] is False
    assert result["largest_difference"] < 1e-4
    if result["n_different"]:
        assert "encode them with --invariant" not in outcome.out


def test_a_run_with_the_promise_does_not_continue_one_without(
    call: Call,
    shared: Path,
    invariant: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    vectors = shutil.copytree(invariant, tmp_path / "vectors")
    data = ("--data", shared / "data")
    outcome = call("encode", "--model", masked_lm, *data, "--output", vectors)
    assert outcome.code == 1
    assert "holds vectors with other settings (invariant: " in outcome.err


def test_a_model_that_cannot_keep_the_promise_is_refused(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_invariant, "_PIPELINE_MODULES", (Transformer,))
    data = ("--data", shared / "data")
    outcome = call("encode", "--model", masked_lm, *data, "--output", tmp_path, "--invariant")
    assert outcome.code == 2
    assert "--invariant: " in outcome.err
    assert "invariant=True does not support SpladePooling" in outcome.err
