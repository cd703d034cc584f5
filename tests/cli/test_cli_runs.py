"""Runs and judgements on the command line: what is reported, what is said beside it, and what is refused first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.program import Outcome
from tests.recipes.small import small_collection
from tilefold.cli import _retrievers
from tilefold.retrieval import Document, read_trec_run, write_trec_run
from tilefold.retrieval.tuning import choose_weights

Call = Callable[..., Outcome]
Parts = tuple[str | Path, ...]


@pytest.fixture
def runs(tmp_path: Path) -> Parts:
    """A collection whose split `dev` has two of the four queries of `test`, and two runs of all queries."""
    collection = small_collection()
    test = collection.qrels["test"]
    collection.qrels = {**collection.qrels, "dev": dict(list(test.items())[:2])}
    collection.save_beir(tmp_path / "data")
    for name, size, (first, last) in (("a", 1.0, ("d0", "d1")), ("b", 1e3, ("d1", "d0"))):  # right only together
        scores = {query: {first: 3 * size, f"d{query[1:]}": 2 * size, last: 0.0} for query in collection.queries}
        write_trec_run(scores, tmp_path / name)
    return "fuse", "--data", tmp_path / "data", "--run", tmp_path / "a", "--run", tmp_path / "b"


def test_weights_chosen_on_reported_queries_are_refused_or_said_to_be_in_sample(call: Call, runs: Parts) -> None:
    tuned = (*runs, "--method", "interpolation", "--tune")
    for split, count in (("test", 4), ("dev", 2)):
        refused = call(*tuned, split)
        assert (refused.code, refused.out) == (2, "")
        assert f"would be chosen on {count} of the 4 queries of test, whose numbers are reported" in refused.err
        assert "--in-sample" in refused.err
        shown = call(*tuned, split, "--in-sample")
        assert f"in sample: the weights were chosen on {count} of the 4 queries of test" in shown.out
        found = json.loads(call(*tuned, split, "--in-sample", "--json").out)
        assert (found["tuned_on"], found["in_sample"]) == (split, {"test": count})
    clean = call(*tuned, "train", "--json")
    assert (json.loads(clean.out)["tuned_on"], json.loads(clean.out)["in_sample"]) == ("train", {})
    assert "in sample" not in call(*tuned, "train").out
    refused = call(*runs, "--in-sample")
    assert (refused.code, "--in-sample goes with --tune" in refused.err) == (2, True)


def test_weights_are_chosen_for_the_normalisation_they_are_used_with(call: Call, runs: Parts) -> None:
    pair, qrels = [read_trec_run(path) for path in runs[4::2]], small_collection().qrels["train"]
    chosen = [choose_weights(pair, qrels, normalization=name)[0] for name in ("min_max", "none")]
    assert chosen[0] != chosen[1]
    for name, weights in zip(("min_max", "none"), chosen, strict=True):
        tuned = call(*runs, "--method", "interpolation", "--tune", "train", "--normalization", name, "--json")
        assert json.loads(tuned.out)["weights"] == list(weights)


def test_a_query_of_junk_alone_counts_as_one_without_a_relevant_document(call: Call, runs: Parts) -> None:
    qrels = Path(runs[2]) / "qrels"
    for name in ("test", "train"):
        lines = (qrels / f"{name}.tsv").read_text().replace("q1\td1\t1", "q1\td1\t-2")
        (qrels / f"{name}.tsv").write_text(lines.replace("q13\td13\t1", "q13\td13\t-2"))
    for verb, value in (
        (("evaluate", *runs[1:5]), 3 / 2 / 4),
        (runs, 3 / 3 / 4),
        ((*runs, "--method", "interpolation", "--tune", "train"), 3 / 4),
    ):
        found = call(*verb, "--measure", "RR", "--json")
        assert found.code == 0
        assert "1 of the 4 queries of test have no relevant document and count as 0" in found.err
        assert json.loads(found.out)["measures"]["RR"] == pytest.approx(value)


def test_ids_that_a_saved_run_cannot_hold_are_refused_before_any_work(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = small_collection()
    collection.documents = {"my doc.txt": Document("my doc.txt", "", "About csv files.")} | dict(collection.documents)
    collection.save_beir(tmp_path / "data")
    for work in ("load_index", "open_dense"):
        monkeypatch.setattr(_retrievers, work, lambda *_, **__: pytest.fail("work was done"))
    for source in (("--index", tmp_path / "index"), ("--model", "minilm")):
        refused = call("evaluate", "--data", tmp_path / "data", *source, "--save-run", tmp_path / "run")
        assert (refused.code, refused.out) == (2, "")
        assert "--save-run: document id: a TREC run needs words without white space, got 'my doc.txt'" in refused.err


def test_only_the_judgements_that_are_asked_for_are_read(call: Call, runs: Parts) -> None:
    with (Path(runs[2]) / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q1\tgone\t1\n")
    assert call("evaluate", *runs[1:5], "--split", "train").code == 0
    assert call(*runs, "--split", "dev", "--method", "interpolation", "--tune", "train").code == 0
    assert "unknown document 'gone'" in call("evaluate", *runs[1:5]).err
