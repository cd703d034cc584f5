"""What the command line cut, resumed or could not use is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.cli.program import Call, run_steps
from tests.recipes.small import small_collection
from tilefold._files import write_json
from tilefold.recipes import _run
from tilefold.retrieval import read_manifest
from tilefold.retrieval._made import Shard
from tilefold.retrieval.collection import Collection, Document

LENGTH = 24  # tokens; one document of the small collection, d12, has 25 of them, all other texts less


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection of which four documents are cut, d12 among them, a model as training starts from it, its vectors."""
    folder, small = tmp_path_factory.mktemp("said"), small_collection()
    long = {f"d{i}": Document(f"d{i}", "", "words " * count) for i, count in ((0, 22), (3, 23), (7, 40), (9, 9000))}
    Collection("small", small.documents | long, small.queries, small.qrels).save_beir(folder / "data")
    start = ("train", "--data", folder / "data", "--model", masked_lm, "--output", folder / "model", "--steps", "0")
    encoded = ("--model", folder / "model", "--data", folder / "data", "--output", folder / "vectors", "--top-k", "32")
    index = ("index", "--vectors", folder / "vectors", "--output", folder / "index")
    run_steps((*start, "--max-length", LENGTH), ("encode", *encoded), index)
    return folder


def test_of_a_setting_that_was_given_twice_the_last_one_counts_and_it_is_said(call: Call, work: Path) -> None:
    searched = ("search", "--index", work / "index", "--model", work / "model", "words", "--json")
    once, twice = call(*searched, "--k", "2"), call(*searched, "--k", "1", "--k", "2")
    assert twice.code == once.code == 0 and twice.out == once.out
    assert twice.err.splitlines()[0] == "--k was given twice: the last one counts."


def test_options_that_are_lists_are_repeated(call: Call, work: Path, tmp_path: Path) -> None:
    searched = ("--index", work / "index", "--model", work / "model", "--data", work / "data")
    outcome = call("evaluate", *searched, "--split", "test", "--split", "train", "--json")
    assert outcome.code == 0 and set(json.loads(outcome.out)["splits"]) == {"test", "train"}


def test_encode_says_how_many_texts_were_cut_alone_and_with_others(call: Call, work: Path, tmp_path: Path) -> None:
    asked = ("encode", "--model", work / "model", "--data", work / "data", "--shard-size", "4", "--output")
    outcome = call(*asked, tmp_path / "one", "--json")
    assert outcome.err == "4 of 16 documents were cut at 24 tokens\n"
    assert json.loads(outcome.out)["truncated"] == {"count": 4, "max_length": LENGTH}
    args = (*map(str, asked), str(tmp_path / "two"), "--devices", "2")
    many = programs.run("-m", "tilefold.cli", *args)
    assert many.returncode == 0 and many.stderr == outcome.err
    assert read_manifest(tmp_path / "two").shards == read_manifest(tmp_path / "one").shards
    queries = call(*asked, tmp_path / "q", "--queries")
    assert queries.code == 0 and queries.err == ""


def test_training_says_how_many_texts_were_cut(call: Call, work: Path, masked_lm: str, tmp_path: Path) -> None:
    trained = ("train", "--data", work / "data", "--model", masked_lm, "--batch-size", "4", "--epochs", "2")
    asked = (*trained, "--lr", "1e-5", "--max-length", LENGTH, "--output", tmp_path / "m")
    outcome = call(*asked, "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)["truncated"]
    assert told == [{"texts": 48, "count": 6, "max_length": LENGTH}]  # 12 pairs twice
    assert outcome.err.splitlines()[-1] == "6 of 48 training texts were cut at 24 tokens"
    assert "6 of 48 training texts were cut at 24 tokens" in call(*asked).err, "what was trained before says the same"


def test_queries_and_dense_texts_that_were_cut_are_said(call: Call, work: Path) -> None:
    index = ("--index", work / "index", "--model", work / "model")
    assert call("evaluate", *index, "--data", work / "data", "--json").err == ""
    searched = call("search", "words " * 30, *index, "--json")
    assert searched.err == "1 of 1 queries was cut at 24 tokens\n"
    dense = call("evaluate", "--model", "minilm", "--max-length", "12", "--data", work / "data", "--json")
    said = re.findall(r"(\d+) of (\d+) (\w+) were cut at 12 tokens", dense.err)
    assert [(total, what) for _, total, what in said] == [("16", "documents")], dense.err


def test_encode_says_where_it_resumes(call: Call, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of = ("encode", "--model", work / "model", "--data", work / "data")
    asked = (*made_of, "--shard-size", "4", "--output", tmp_path / "v")
    take, left = Shard.take, iter(range(2))

    def stop(*arguments: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        take(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Shard, "take", stop)
        first = call(*asked)
    assert first.code == 130 and "resumes" not in first.err
    kept = read_manifest(tmp_path / "v").n_documents
    again = call(*asked).err.splitlines()
    assert again[0] == f"encoding resumes: {kept} of 16 were done before (--fresh does them again)" and 0 < kept < 16
    assert again[1:] == ["4 of 16 documents were cut at 24 tokens"]
    nothing = call(*asked).err.splitlines()
    assert nothing[0] == "encoding has nothing left to do: 16 of 16 were done before (--fresh does them again)"


def test_train_says_that_it_resumes_and_what_it_starts_from(
    call: Call, work: Path, masked_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = ("train", "--data", work / "data", "--model", masked_lm, "--batch-size", "4", "--lr", "1e-5")
    asked = (*trained, "--steps", "4", "--save-steps", "2", "--output", tmp_path / "m")

    def interrupted(path: Path, value: Any) -> None:
        write_json(path, value)
        if path.name == _run.WHOLE:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_run, "write_json", interrupted)
        assert call(*asked).code == 130
    again = call(*asked)
    assert again.code == 0 and "training resumes: 2 of 4 were done before (--fresh does them again)" in again.err
    assert re.match(r"trained 4 steps, those after step 2 in \d+ s, loss ", again.out)
    start = call(
        "train", "--data", work / "data", "--model", tmp_path / "m", "--steps", "0", "--output", tmp_path / "s"
    )
    assert start.code == 0 and start.out.startswith("no step of training, ") and "untrained" not in start.out


def test_what_changes_nothing_or_less_is_said(call: Call, work: Path, masked_lm: str, tmp_path: Path) -> None:
    index = ("evaluate", "--data", work / "data", "--index", work / "index", "--model", work / "model", "--json")
    assert call(*index, "--k", "5", "--measure", "nDCG@10").err.startswith("--k 5 changes nothing without --save-run")
    assert call(*index, "--k", "5", "--measure", "nDCG@10", "--save-run", tmp_path / "run").err == ""
    start = ("train", "--data", work / "data", "--model", masked_lm, "--steps", "0", "--max-length", "600")
    outcome = call(*start, "--output", tmp_path / "m")
    assert "warning: the model reads at most 512 tokens of a text, fewer than --max-length (600)." in outcome.err
