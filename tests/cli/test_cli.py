from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import Call, done, fails, measured
from tests.recipes.small import small_collection
from tilefold import __version__, cli
from tilefold.retrieval import read_trec_run, read_vectors, write_vectors

VERBS = ("demo", "train", "encode", "index", "search", "evaluate", "fuse", "bench", "warmup", "info")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_the_program_a_version(verb: str, call: Call) -> None:
    outcome = done(call(verb, "--help"))
    assert f"tilefold {verb}" in outcome.out
    version = call("--version")
    assert (version.code, version.out) == (0, f"tilefold {__version__}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what machines without a GPU say")
def test_warmup_says_that_nothing_is_built_without_a_gpu(call: Call, tmp_path: Path) -> None:
    fails(call("warmup", "--model", tmp_path), 1, "torch sees none here; on a CPU nothing is built")


def test_the_steps_write_json_alone_to_stdout_and_no_progress_to_a_pipe(work: Path) -> None:
    trained, encoded, indexed = (
        json.loads((work / f"{verb}.json").read_text()) for verb in ("train", "encode", "index")
    )
    assert (trained["steps"], trained["fused"]) == (2, True)
    assert (encoded["n"], encoded["kind"], encoded["failed"]) == (16, "document", {})
    assert 0 < encoded["mean_active_terms"] <= 64
    assert (indexed["backend"], indexed["n_documents"]) == ("exact", 16)
    assert [(work / f"{verb}.err").read_text() for verb in ("encode", "index")] == ["", ""]
    said = (work / "train.err").read_text().splitlines()
    said = [line for line in said if "GPUs are visible" not in line]  # two steps leave vectors as full as they were
    assert [line.split(" vectors have ")[0] for line in said] == ["warning: query", "warning: document"]
    assert all("too many for an index" in line for line in said)


def test_search_explains_a_score_by_the_terms_that_matched(call: Call, work: Path) -> None:
    places = ("--model", work / "model", "--index", work / "index")
    explained = ("--data", work / "data", "--vectors", work / "vectors")
    hits = measured(call("search", "how do I work with csv files", *places, *explained, "--k", "3", "--json"))["hits"]
    assert [hit["rank"] for hit in hits] == [1, 2, 3]
    for hit in hits:
        shares = [term["contribution"] for term in hit["terms"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(hit["score"], rel=1e-5)  # fp32 sums of at most 64 terms
        assert all(term["share"] == pytest.approx(term["contribution"] / hit["score"]) for term in hit["terms"])
        assert not {"[CLS]", "[SEP]"} & {term["term"] for term in hit["terms"]}
        assert hit["title"].startswith("module")
    table = done(call("search", "how do I work with csv files", *places, *explained))
    first = hits[0]["terms"][0]
    assert hits[0]["title"] in table.out and f"{first['term']} {first['share']:.0%}" in table.out
    assert hits[0]["id"] in table.out and hits[0]["id"] in call("search", "csv files", *places).out


def test_search_agrees_with_evaluate(call: Call, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("--model", work / "model", "--index", work / "index")
    run, query = tmp_path / "run.trec", small_collection().queries["q13"]
    alone = small_collection()  # a query in a larger batch may round otherwise
    alone.qrels = {"test": {"q13": {"d13": 1}}}
    alone.save_beir(tmp_path / "data")
    scores: dict[bool, dict[str, float]] = {}
    for bf16 in (False, True):
        monkeypatch.setattr("tilefold.recipes.loading.supports_bf16", lambda bf16=bf16: bf16)
        assert call("evaluate", "--data", tmp_path / "data", *places, "--k", "3", "--save-run", run).code == 0
        hits = measured(call("search", query, *places, "--k", "3", "--json"))["hits"]
        scores[bf16] = {hit["id"]: hit["score"] for hit in hits}
        assert scores[bf16] == read_trec_run(run)["q13"]
    assert scores[True] != scores[False]


def test_search_reads_the_vectors_of_its_hits_only(call: Call, work: Path, tmp_path: Path) -> None:
    stored = read_vectors(work / "vectors")
    write_vectors(stored, tmp_path / "vectors", shard_size=4)
    places = ("--model", work / "model", "--index", work / "index", "--vectors", tmp_path / "vectors")
    search = ("search", "how do I work with csv files", *places, "--k", "2", "--json")
    whole = measured(call(*search))["hits"]
    others = [at for at in range(4) if not {hit["id"] for hit in whole} & set(stored.ids[4 * at : 4 * at + 4])]
    for at in others:
        shard = tmp_path / "vectors" / f"part-{at:05d}.parquet"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1  # among the weights
        shard.write_bytes(content)
    assert others and measured(call(*search))["hits"] == whole


def test_search_reads_the_documents_of_its_hits_only(call: Call, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefold.retrieval import datasets

    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(work / "cache"))
    monkeypatch.setattr(datasets, "SMALLEST", 0)
    monkeypatch.setattr(datasets, "SETTLED_SECONDS", 0.0)
    assert call("index", "--backend", "bm25", "--data", work / "data", "--output", work / "words").code == 0
    search = ("search", "csv files", "--index", work / "words", "--data", work / "data", "--json")
    first = done(call(*search))
    monkeypatch.setattr(datasets, "load_documents", lambda file: pytest.fail("the whole file was read"))
    again = call(*search)
    assert (again.code, again.out) == (0, first.out)


def test_queries_of_one_split_are_encoded_and_cannot_be_indexed(call: Call, work: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "queries"
    asked = ("--queries", "--split", "test", "--jsonl", tmp_path / "q.jsonl", "--json")
    outcome = call("encode", "--model", work / "model", "--data", work / "data", "--output", vectors, *asked)
    assert json.loads(outcome.out)["n"] == 4
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["q12", "q13", "q14", "q15"]
    assert lines[0]["contents"] == small_collection().queries["q12"]


def test_training_again_returns_the_finished_model(call: Call, work: Path, masked_lm: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(work)
    same = ("--data", "data", "--model", masked_lm, "--output", "model", "--batch-size", "4")
    again = call("train", *same, "--steps", "2")
    assert (again.code, "already trained" in again.out) == (0, True)
    fails(call("train", *same, "--steps", "3"), 1, "differs in --steps")


def test_damaged_weights_and_packages_are_said(call: Call, work: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(work / "model", broken := tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    encode = ("encode", "--data", work / "data", "--output", tmp_path / "v", "--model")
    fails(call(*encode, broken), 1, f"the weights in {broken} are damaged")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    fails(call(*encode, work / "model"), 1, 'pip install "tilefold[sentence-transformers]"')
    assert not (tmp_path / "v").exists()


def test_a_missing_demo_and_a_damaged_record_say_to_run_it(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="run tilefold demo first"):
        cli.main(["search", "x", "--debug"])
    (tmp_path / "demo.json").write_text("{")
    fails(call("search", "x", "--demo", tmp_path), 1, "is damaged: run tilefold demo again")
