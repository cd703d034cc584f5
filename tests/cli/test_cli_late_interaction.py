"""Multi-vector models on the command line: train, encode, rerank in search and evaluate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.manifests import edit
from tests.recipes.small import small_collection


@pytest.fixture(scope="module")
def work(shared: Path) -> Path:
    return shared


@pytest.fixture
def places(work: Path, masked_lm: str) -> tuple[str | Path, ...]:
    return ("--model", masked_lm, "--index", work / "index", "--data", work / "data")


def test_training_again_returns_the_model_and_encoding_again_reports_what_is_there(
    call: Any, work: Path, masked_lm: str
) -> None:
    small = ("--steps", "2", "--batch-size", "4", "--dimension", "16", "--max-length", "24")
    same = ("train", "--recipe", "colbert", "--data", work / "data", "--model", masked_lm, "--output", work / "late")
    trained = call(*same, *small, "--json")
    result = json.loads(trained.out)
    assert (trained.code, result["reused"], result["steps"], result["fused"]) == (0, True, 2, True)
    other = call(*same, *small, "--query-length", "16")
    assert (other.code, "differs in --query-length" in other.err) == (1, True)
    again = ("encode", "--model", work / "late", "--data", work / "data", "--shard-size", "10")
    encoded = call(*again, "--output", work / "tokens", "--json")
    found = json.loads(encoded.out)
    assert (found["n"], found["dimension"], found["storage"], found["shards"]) == (16, 16, "fp16", 2)
    assert (found["failed"], found["mean_tokens"] * 16) == ({}, found["n_tokens"])
    changed = call(*again, "--output", work / "tokens", "--storage", "int8")
    assert (changed.code, "storage: 'fp16' before, 'int8' now" in changed.err) == (1, True)


def test_reranked_hits_have_the_scores_of_the_model_in_order(call: Any, work: Path, places: Any) -> None:
    from sentence_transformers import MultiVectorEncoder

    query = "how do I work with csv files"
    outcome = call("search", query, *places, "--vectors", work / "vectors", "--rerank", work / "tokens", "--json")
    assert outcome.code == 0, outcome.err
    hits = json.loads(outcome.out)["hits"]
    assert [hit["rank"] for hit in hits] == list(range(1, len(hits) + 1))
    assert len(hits) == 10
    assert all(hit["terms"] for hit in hits)
    model = MultiVectorEncoder(str(work / "late"), device="cpu", local_files_only=True)
    texts = [small_collection().documents[hit["id"]].contents for hit in hits]
    expected = model.similarity(model.encode_query([query]), model.encode_document(texts))[0].tolist()
    # the program encodes in bf16 where the hardware has it: 8 bits a similarity, over at most 32 query tokens
    assert [hit["score"] for hit in hits] == pytest.approx(expected, abs=32 * 2**-8)
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    plain = json.loads(call("search", query, *places, "--k", "16", "--json").out)["hits"]
    before = {hit["id"]: {"rank": hit["rank"], "score": hit["score"]} for hit in plain}
    assert all(hit["first"] == before[hit["id"]] for hit in hits)
    table = call("search", query, *places, "--rerank", work / "tokens")
    assert "before: #, score" in table.out
    assert hits[0]["title"] in table.out


def test_a_model_reranks_as_the_token_vectors_that_it_made(call: Any, work: Path, places: Any) -> None:
    query = "reading zip archives"
    stored, live = (
        json.loads(call("search", query, *places, "--rerank", work / name, "--rerank-depth", "12", "--json").out)[
            "hits"
        ]
        for name in ("tokens", "late")
    )
    scores = {hit["id"]: hit["score"] for hit in stored}
    assert {hit["id"]: hit["score"] for hit in live} == pytest.approx(scores, abs=32 * 2**-8)


def test_evaluating_a_reranked_index_and_its_reranked_run_gives_the_same_numbers(
    call: Any, work: Path, places: Any, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.trec", tmp_path / "second.trec"
    assert call("evaluate", *places, "--save-run", first).code == 0
    tokens = ("encode", "--model", work / "late", "--data", work / "data", "--shard-size", "10", "--storage", "int8")
    assert call(*tokens, "--output", tmp_path / "tokens8").code == 0
    late = ("--rerank", tmp_path / "tokens8", "--json")
    searched = call("evaluate", *places, *late, "--save-run", second)
    assert searched.code == 0, searched.err
    found = json.loads(searched.out)
    assert found["rerank"] == str(tmp_path / "tokens8")
    read = call("evaluate", "--data", work / "data", "--run", first, *late)
    assert json.loads(read.out)["measures"] == found["measures"]
    again = call("evaluate", "--data", work / "data", "--run", second, "--json")
    assert json.loads(again.out)["measures"] == found["measures"]
    shallow = call("evaluate", *places, *late, "--rerank-depth", "1")
    untouched = json.loads(call("evaluate", "--data", work / "data", "--run", first, "--json").out)["measures"]
    assert json.loads(shallow.out)["measures"] == untouched  # the best candidate stays the best


def test_token_vectors_that_do_not_fit_are_refused_with_the_reason(
    call: Any, work: Path, places: Any, masked_lm: str, tmp_path: Path
) -> None:
    from tilefold.recipes.colbert import ColbertRecipe, load_base_model

    def searched(*late: str | Path) -> str:
        outcome = call("search", "queues of threads", *places, *late)
        assert (outcome.code, outcome.out) == (1, ""), outcome.out
        assert len(outcome.err.splitlines()) == 1
        return str(outcome.err)

    others = {name: tmp_path / name for name in ("wide", "seeded")}
    load_base_model(ColbertRecipe(base_model=masked_lm, dimension=24)).save_pretrained(str(others["wide"]))
    load_base_model(ColbertRecipe(base_model=masked_lm, dimension=16)).save_pretrained(str(others["seeded"]))
    stored = ("--rerank", work / "tokens", "--rerank-model")
    assert "makes vectors of dimension 24, and" in searched(*stored, others["wide"])
    assert "its weights or settings differ" in searched(*stored, others["seeded"])

    part = small_collection()
    part.documents = dict(list(part.documents.items())[:9])
    part.qrels = {"test": {"q0": {"d0": 1}}}
    part.save_beir(tmp_path / "part")
    encode = ("encode", "--model", work / "late", "--data", tmp_path / "part", "--output", tmp_path / "few")
    assert call(*encode).code == 0
    assert "few holds token vectors of other documents" in searched("--rerank", tmp_path / "few")

    broken = tmp_path / "broken"
    shutil.copytree(work / "tokens", broken)
    shard = broken / "part-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert "part-00001.safetensors" in searched("--rerank", broken)
    shard.unlink()
    assert "part-00001.safetensors: listed in the manifest" in searched("--rerank", broken)
    shard.write_bytes(whole)
    edit(broken / "manifest.json", complete=False)
    assert "of an unfinished run" in searched("--rerank", broken)
    edit(broken / "manifest.json", complete=True, model_source="/no/such/model")
    moved = call("search", "queues", *places, "--rerank", broken)
    assert (moved.code, "name it with --rerank-model" in moved.err) == (2, True)
    named = call("search", "queues", *places, "--rerank", broken, "--rerank-model", work / "late")
    assert named.code == 0, named.err
