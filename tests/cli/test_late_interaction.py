"""Multi-vector models, and Qdrant indexes, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Call, done, fails, measured
from tests.manifests import edit
from tests.recipes.small import small_collection
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval.index.qdrant import QdrantCollection


@pytest.fixture
def places(shared: Path, masked_lm: str) -> tuple[str | Path, ...]:
    return ("--model", masked_lm, "--index", shared / "index", "--data", shared / "data")


def test_training_and_encoding_again_report_what_is_there(
    call: Call,
    shared: Path,
    masked_lm: str,
) -> None:
    small = ("--steps", "2", "--batch-size", "4", "--dimension", "16", "--max-length", "24")
    folder_options = ("--data", shared / "data", "--model", masked_lm, "--output", shared / "late")
    same = ("train", "--recipe", "colbert", *folder_options)
    trained = call(*same, *small, "--json")
    result = json.loads(trained.out)
    assert (trained.code, result["reused"], result["steps"], result["fused"]) == (0, True, 2, True)
    assert "then index them with --backend late, or rerank" in call(*same, *small).out
    fails(call(*same, *small, "--query-length", "16"), 1, "differs in query_length")
    again = ("encode", "--model", shared / "late", "--data", shared / "data", "--shard-size", "10")
    actual = json.loads(call(*again, "--output", shared / "tokens", "--json").out)
    assert (actual["n"], actual["dimension"], actual["storage"], actual["shards"]) == (
        16,
        16,
        "fp16",
        2,
    )
    assert (actual["failed"], actual["mean_tokens"] * 16) == ({}, actual["n_tokens"])
    fails(
        call(*again, "--output", shared / "tokens", "--storage", "int8"),
        1,
        "storage: 'fp16' before, 'int8' now",
    )


def test_reranked_hits_have_the_scores_of_the_model_in_order(
    call: Call,
    shared: Path,
    places: Any,
) -> None:
    from sentence_transformers import MultiVectorEncoder

    query = "how do I work with csv files"
    explained = ("--vectors", shared / "vectors", "--rerank", shared / "tokens", "--json")
    hits = measured(call("search", query, *places, *explained))["hits"]
    assert [hit["rank"] for hit in hits] == list(range(1, len(hits) + 1))
    assert len(hits) == 10
    assert all(hit["terms"] for hit in hits)
    model = MultiVectorEncoder(str(shared / "late"), device="cpu", local_files_only=True)
    texts = [small_collection().documents[hit["id"]].contents for hit in hits]
    expected = model.similarity(model.encode_query([query]), model.encode_document(texts))[
        0
    ].tolist()
    # the program encodes in bf16 where the hardware has it: 8 bits a similarity, over at most 32
    # query tokens
    assert [hit["score"] for hit in hits] == pytest.approx(expected, abs=32 * 2**-8)
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    live = measured(call("search", query, *places, "--rerank", shared / "late", "--json"))["hits"]
    scores = {hit["id"]: hit["score"] for hit in hits}
    assert {hit["id"]: hit["score"] for hit in live} == pytest.approx(scores, abs=32 * 2**-8)
    plain = measured(call("search", query, *places, "--k", "16", "--json"))["hits"]
    before = {hit["id"]: {"rank": hit["rank"], "score": hit["score"]} for hit in plain}
    assert all(hit["first"] == before[hit["id"]] for hit in hits)
    table = call("search", query, *places, "--rerank", shared / "tokens")
    assert "before reranking: #, score" in table.out
    assert hits[0]["title"] in table.out


def test_a_reranked_index_and_run_have_the_same_numbers(
    call: Call,
    shared: Path,
    places: Any,
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.trec", tmp_path / "second.trec"
    assert call("evaluate", *places, "--save-run", first).code == 0
    tokens = ("encode", "--model", shared / "late", "--data", shared / "data", "--storage", "int8")
    assert call(*tokens, "--output", tmp_path / "tokens8").code == 0
    late = ("--rerank", tmp_path / "tokens8", "--json")
    measures = measured(call("evaluate", *places, *late, "--save-run", second))
    assert measures["rerank"] == str(tmp_path / "tokens8")
    read = call("evaluate", "--data", shared / "data", "--run", first, *late)
    assert json.loads(read.out)["measures"] == measures["measures"]
    again = call("evaluate", "--data", shared / "data", "--run", second, "--json")
    assert json.loads(again.out)["measures"] == measures["measures"]
    shallow = call("evaluate", *places, *late, "--rerank-depth", "1")
    untouched = measured(call("evaluate", "--data", shared / "data", "--run", first, "--json"))[
        "measures"
    ]
    assert json.loads(shallow.out)["measures"] == untouched  # the best candidate stays the best


def test_foreign_tokens_are_refused(
    call: Call,
    shared: Path,
    places: Any,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    from tilefold.recipes.colbert import ColbertRecipe

    def searched(*late: str | Path) -> str:
        outcome = call("search", "queues of threads", *places, *late)
        assert (outcome.code, outcome.out) == (1, ""), outcome.out
        assert len(outcome.notes) == 1
        return str(outcome.err)

    others = {name: tmp_path / name for name in ("wide", "seeded")}
    ColbertRecipe(base_model=masked_lm, dimension=24).build_model().save_pretrained(
        str(others["wide"])
    )
    ColbertRecipe(base_model=masked_lm, dimension=16).build_model().save_pretrained(
        str(others["seeded"])
    )
    stored = ("--rerank", shared / "tokens", "--rerank-model")
    assert "makes vectors of dimension 24, and" in searched(*stored, others["wide"])
    assert "its weights or settings differ" in searched(*stored, others["seeded"])

    part = small_collection()
    part.documents = dict(list(part.documents.items())[:9])
    part.qrels = {"test": {"q0": {"d0": 1}}}
    part.save_beir(tmp_path / "part")
    encode = (
        "encode",
        "--model",
        shared / "late",
        "--data",
        tmp_path / "part",
        "--output",
        tmp_path / "few",
    )
    assert call(*encode).code == 0
    assert "few holds token vectors of other documents" in searched("--rerank", tmp_path / "few")

    broken = tmp_path / "broken"
    shutil.copytree(shared / "tokens", broken)
    edit(broken / "manifest.json", complete=False)
    assert "of an unfinished run" in searched("--rerank", broken)
    edit(broken / "manifest.json", complete=True, model_source="/no/such/model")
    fails(call("search", "queues", *places, "--rerank", broken), 2, "name it with --rerank-model")
    done(call("search", "queues", *places, "--rerank", broken, "--rerank-model", shared / "late"))


def test_a_collection_is_searched_by_late_interaction(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    """The index finds what exact reranking of everything that BM25 and more could find, and grows."""
    place, model = tmp_path / "late-index", ("--model", shared / "late")
    index = ("index", "--backend", "late", "--output", place)
    made = measured(
        call(*index, "--tokens", shared / "tokens", "--queries", shared / "asked", "--json"),
    )
    assert (made["n_documents"], made["storage"], made["n_candidates"], made["recall"]) == (
        16,
        "int8",
        0,
        None,
    )
    again = done(call(*index, "--tokens", shared / "tokens", "--overwrite"))
    assert " kB of int8" in again.out
    assert f"next: tilefold search QUERY --index {place} --model MODEL" in again.out
    arguments = (
        "how do I work with csv files",
        "--index",
        place,
        *model,
        "--data",
        shared / "data",
        "--json",
    )
    hits = measured(call("search", *arguments))["hits"]
    assert len(hits) == 10 and hits[0]["title"]
    run = tmp_path / "all.trec"
    scored = measured(
        call(
            "evaluate",
            "--data",
            shared / "data",
            "--index",
            place,
            *model,
            "--k",
            "16",
            "--save-run",
            run,
            "--json",
        ),
    )
    reranked = call(
        "evaluate",
        "--data",
        shared / "data",
        "--run",
        run,
        "--rerank",
        shared / "tokens",
        "--json",
    )
    assert measured(reranked)["measures"] == scored["measures"], "fp16 and int8 rank these alike"
    half = done(
        call(
            "index",
            "--backend",
            "late",
            "--tokens",
            shared / "tokens",
            "--storage",
            "int4",
            "--pool-factor",
            "2",
            "--output",
            tmp_path / "small",
        ),
    )
    assert "int4" in half.out
    (tmp_path / "gone.txt").write_text(hits[0]["id"])
    change = ("index", "--output", place)
    assert measured(call(*change, "--delete", tmp_path / "gone.txt", "--json"))["deleted"] == 1
    assert measured(call("search", *arguments))["hits"][0]["id"] == hits[1]["id"]
    assert (
        measured(call(*change, "--update", "--tokens", shared / "tokens", "--json"))["written"]
        == 16
    )
    assert measured(call(*change, "--merge", "--json"))["n_documents"] == 16
    assert measured(call("search", *arguments))["hits"] == hits
    fails(
        call("index", "--backend", "late", "--output", tmp_path / "x"),
        2,
        "give them with --tokens",
    )
    fails(call(*index, "--vectors", shared / "vectors"), 2, "late reads --tokens")
    index = (*index[:-1], tmp_path / "other")
    fails(
        call(*index, "--tokens", shared / "asked"),
        2,
        "--tokens: expected token vectors of documents",
    )
    fails(
        call(*index, "--tokens", shared / "tokens", "--queries", shared / "tokens"),
        2,
        "encode --queries",
    )
    fails(
        call("index", "--vectors", shared / "vectors", "--storage", "int8", "--output", place),
        2,
        "requires --backend late",
    )
    fails(
        call(*change, "--update", "--vectors", shared / "vectors"),
        2,
        "is an index of backend late",
    )
    fails(call("search", *arguments, "--prf", "rocchio"), 2, "holds token vectors")
    fails(
        call("search", "x", "--index", place, "--model", "minilm"),
        1,
        "is not the model that made",
    )
    fails(
        call("search", "x", "--index", shared / "bm25", "--candidates", "5"),
        2,
        "requires an index of backend late",
    )


def test_qdrant_has_exact_figures(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    http = OverHttp()
    http.key = "sesame-77-open"
    monkeypatch.setenv("QDRANT_API_KEY", http.key)
    index = ("index", "--backend", "qdrant", "--vectors", shared / "vectors", "--output")
    folder_options = ("--data", shared / "data", "--model", masked_lm)
    exact = measured(call("evaluate", *folder_options, "--index", shared / "index", "--json"))
    for name, options in (("folder", ()), ("server", ("--url", http.url))):
        output = done(call(*index, tmp_path / name, *options, "--json"))
        assert json.loads(output.out)["n_documents"] == len(small_collection().documents)
        actual = call("evaluate", *folder_options, "--index", tmp_path / name, "--json")
        assert (actual.code, json.loads(actual.out)) == (0, exact), actual.err
        vectors = ("--vectors", shared / "vectors")
        hits = done(
            call(
                "search",
                "csv files",
                *folder_options,
                *vectors,
                "--index",
                tmp_path / name,
                "--json",
            ),
        )
        assert json.loads(hits.out)["hits"][0]["terms"], hits.err
        assert http.key not in output.err + actual.err + hits.err
    assert http.client.collection_exists("server")
    with QdrantCollection.embedded(tmp_path / "folder"):
        refused = call("search", "csv files", "--model", masked_lm, "--index", tmp_path / "folder")
        assert (refused.code, "the collection is open elsewhere" in refused.err) == (1, True)
    http.key = "changed"
    refused = call("search", "csv files", "--model", masked_lm, "--index", tmp_path / "server")
    assert (
        refused.code,
        "refused the API key (status 401)" in refused.err,
        "sesame" in refused.err,
    ) == (1, True, False)
    http.stop()


def test_index_says_that_it_resumes(
    call: Call,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = len(small_collection().documents)
    index = (
        "index",
        "--backend",
        "qdrant",
        "--vectors",
        shared / "vectors",
        "--output",
        tmp_path / "index",
    )

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tilefold.retrieval.index.qdrant.edge.EdgeEngine.optimize", interrupt)
        assert call(*index).code == 130
    fails(call(*index), 0, f"indexing resumes: {documents} of {documents} were done before")
    assert "resumes" not in done(call(*index, "--overwrite")).err


def test_an_index_is_added_to_and_deleted_from(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    http = OverHttp()
    new = tmp_path / "new.jsonl"
    texts = {
        "d0": "sockets alone, and nothing else",
        "extra": "a document about csv files that is new",
    }
    new.write_text(
        "".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items()),
    )
    encode = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        new,
        "--top-k",
        "64",
        "--output",
        tmp_path / "vectors",
    )
    assert call(*encode).code == 0
    gone = tmp_path / "gone.txt"
    gone.write_text("d3\nd4\n\nnever there\n")
    index = ("index", "--backend", "qdrant", "--output")
    update = ("--vectors", tmp_path / "vectors", "--update", "--delete", gone, "--json")
    for name, options in (("folder", ()), ("server", ("--url", http.url))):
        place = tmp_path / name
        assert call(*index, place, *options, "--vectors", shared / "vectors").code == 0
        made = done(call(*index, place, *update))
        expected = {
            "n_documents": len(small_collection().documents) - 1,
            "written": 2,
            "deleted": 2,
        }
        assert json.loads(made.out).items() >= expected.items()
        actual = call(
            "search",
            "csv files",
            "--model",
            masked_lm,
            "--index",
            place,
            "--k",
            "50",
            "--json",
        )
        names = {hit["id"] for hit in json.loads(actual.out)["hits"]}
        assert "extra" in names and not {"d3", "d4"} & names
        assert (
            json.loads((place / "index.json").read_text())["n_documents"] == expected["n_documents"]
        )
        again = call(*index, place, *update)
        assert (again.code, json.loads(again.out)["deleted"]) == (0, 0)
    http.stop()
    place = tmp_path / "folder"
    for wrong, code, message in (
        (("--update",), 2, "give them with --vectors"),
        (("--delete", tmp_path / "none"), 2, "--delete:"),
        (("--delete", gone, "--vectors", tmp_path / "vectors"), 2, "--vectors requires --update"),
        (("--delete", gone, "--weights", "float16"), 2, "--weights requires a new index"),
        (("--delete", gone, "--output", tmp_path / "nowhere"), 1, "no such file"),
        (
            ("--delete", gone, "--output", shared / "index"),
            2,
            "is an index of backend exact, got qdrant",
        ),
    ):
        output = () if "--output" in wrong else ("--output", place)
        fails(call("index", "--backend", "qdrant", *output, *wrong), code, message)
    refused = call(
        "index",
        "--backend",
        "exact",
        "--output",
        place,
        "--vectors",
        shared / "vectors",
        "--update",
    )
    fails(refused, 2, "is an index of backend qdrant, got exact")


def test_hits_of_late_interaction_are_explained_token_by_token(
    call: Call,
    shared: Path,
    places: Any,
) -> None:
    """`--explain` adds matches to the hits, and refuses what has no late interaction."""
    query = "csv files"
    reranked = (*places, "--rerank", shared / "tokens", "--k", "2", "--explain")
    hits = measured(call("search", query, *reranked, "--json"))["hits"]
    for hit in hits:
        content = [match["query_token"] for match in hit["matches"] if match["content"]]
        assert content == ["c", "##s", "##v", "files"]
        total = sum(match["similarity"] for match in hit["matches"])
        assert total == pytest.approx(hit["score"], abs=1e-2)
    table = done(call("search", query, *reranked))
    match = next(match for match in hits[0]["matches"] if match["query_token"] == "files")
    assert f"files: {match['document_token']} {match['similarity']:.2f}" in table.out
    fails(
        call("search", query, *places, "--explain"),
        2,
        "--explain: expected an index of token vectors, or reranking by late interaction",
    )
    without_data = places[:4]
    fails(
        call("search", query, *without_data, "--rerank", shared / "tokens", "--explain"),
        2,
        "got none; give the collection with --data",
    )
    many = ("search", "-", *places, "--rerank", shared / "tokens", "--explain")
    fails(call(*many, "--save-run", shared / "no.trec"), 2, "cannot be combined with --save-run")
