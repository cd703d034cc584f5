"""``tilefold score`` writes teachers' scores and their ensemble, and goes on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.program import Outcome, run_cli
from tests.recipes.small import small_collection
from tests.retrieval.test_retrieval_teachers import reranker
from tilefold import retrieval as r
from tilefold.retrieval import teachers
from tilefold.retrieval.ensembles import ensemble
from tilefold.retrieval.mining import FalseNegatives, drop_false_negatives

Call = Callable[..., Outcome]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, negatives mined with minilm, and a small reranker."""
    folder = tmp_path_factory.mktemp("score")
    small_collection().save_beir(folder / "data")
    reranker(folder / "reranker")
    mined = ("--model", "minilm", "--per-query", "4", "--output", folder / "mined.parquet")
    assert run_cli("mine", "--data", folder / "data", *mined) == 0
    return folder


def measured(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_teachers_and_their_ensemble_are_written_and_more_can_be_added(call: Call, work: Path) -> None:
    data, output = ("--data", work / "data"), work / "scored.parquet"
    found = measured(call("score", work / "mined.parquet", *data, "--teacher", "bm25", "--teacher", work / "reranker",
                          "--output", output, "--json"))  # fmt: skip
    assert (found["rows"], found["teachers"]) == (60, ["bm25", "reranker"])
    mined, rows = r.read_training_rows(work / "mined.parquet"), r.read_training_rows(output)
    np.testing.assert_array_equal(rows.retrieved, mined.retrieved)
    run = r.BM25Index.build(small_collection().contents()).search(small_collection().queries, 16)
    own = [run[group.query].get(name, 0.0) for group in rows.groups() for name in group.documents]
    np.testing.assert_allclose(rows.teachers["bm25"], own, rtol=1e-5)
    assert rows.target is not None
    np.testing.assert_allclose(rows.target, ensemble(rows, rows.teachers), rtol=1e-6)
    assert rows.target.max() <= 30 and rows.target.min() == 0
    assert rows.made_by["teachers"].keys() == {"bm25", "reranker"} and rows.made_by["split"] == "train"
    rows.check_collection(small_collection())
    more = ("--teacher", "minilm", "--like", "minilm", "--max-score-share", "0.7", "--output", work / "more.parquet")
    added = call("score", output, *data, *more)
    assert added.code == 0 and "rows were left out" in added.err and "scored by bm25, reranker, minilm" in added.out
    three = r.read_training_rows(work / "more.parquet")
    assert list(three.teachers) == ["bm25", "reranker", "minilm"]
    whole = r.TrainingRows(**vars(rows) | {"teachers": rows.teachers | {"minilm": mined.retrieved}})
    whole.target = ensemble(whole, whole.teachers, like="minilm")
    left = drop_false_negatives(whole, FalseNegatives(max_share=0.7))
    assert [group.documents for group in three.groups()] == [group.documents for group in left.groups()]
    np.testing.assert_allclose(three.target, left.target, atol=2**-5)  # minilm mined and scores in batches of its own
    assert not list(work.glob(".*scoring")), "what was kept is removed when the file is written"


def test_an_interrupted_command_goes_on(call: Call, work: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from sentence_transformers import CrossEncoder

    monkeypatch.setattr(teachers, "SHARD", 16)
    stock, calls = CrossEncoder.predict, []

    def predict(self: Any, pairs: Any, **options: Any) -> Any:
        calls.append(len(pairs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stock(self, pairs, **options)

    monkeypatch.setattr(CrossEncoder, "predict", predict)
    command = ("score", work / "mined.parquet", "--data", work / "data", "--teacher", work / "reranker", "--output",
               tmp_path / "scored.parquet")  # fmt: skip
    stopped = call(*command)
    assert stopped.code == 130 and "Finished work is kept: run the same command again" in stopped.err
    assert not (tmp_path / "scored.parquet").exists()
    assert call(*command).code == 0 and calls == [16, 16, 16, 16, 12], "two of the four parts were kept"
    assert call(*command, "--fresh").code == 0 and calls[5:] == [16, 16, 16, 12]


def test_a_length_limit_is_that_of_the_models(call: Call, work: Path, tmp_path: Path) -> None:
    command = ("score", work / "mined.parquet", "--data", work / "data", "--output", tmp_path / "scored.parquet")
    found = []
    for length in ("6", "64"):
        assert call(*command, "--teacher", work / "reranker", "--max-length", length).code == 0
        found.append(r.read_training_rows(tmp_path / "scored.parquet").teachers["reranker"])
    assert np.abs(found[0] - found[1]).max() > 0.01
    r.BM25Index.build(small_collection().contents()).save(tmp_path / "bm25")
    assert call(*command, "--teacher", tmp_path / "bm25").code == 0, "the folder of an index is a teacher"


def test_rows_of_another_collection_and_no_rows_are_refused(call: Call, work: Path, tmp_path: Path) -> None:
    other = small_collection()
    other.documents["d0"] = r.Document("d0", "", "another text")
    other.save_beir(tmp_path / "other")
    command = ("--teacher", "bm25", "--output", tmp_path / "x.parquet", "--data", tmp_path / "other")
    refused = call("score", work / "mined.parquet", *command)
    assert refused.code == 1 and "made from other documents than those of other" in refused.err
    missing = call("score", tmp_path / "none.parquet", *command)
    assert missing.code == 1 and "Make one with: tilefold mine" in missing.err
