from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_collection
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval.qdrant import QdrantCollection


@pytest.fixture(scope="module")
def work(shared: Path) -> Path:
    return shared


def test_evaluate_and_search_give_the_figures_of_an_exact_index(
    call: Any, work: Path, masked_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = OverHttp()
    http.key = "sesame-77-open"
    monkeypatch.setenv("QDRANT_API_KEY", http.key)
    index = ("index", "--backend", "qdrant", "--vectors", work / "vectors", "--output")
    places = ("--data", work / "data", "--model", masked_lm)
    exact = json.loads(call("evaluate", *places, "--index", work / "index", "--json").out)
    for name, options in (("folder", ()), ("server", ("--url", http.url))):
        made = call(*index, tmp_path / name, *options, "--json")
        assert made.code == 0, made.err
        assert json.loads(made.out)["n_documents"] == len(small_collection().documents)
        found = call("evaluate", *places, "--index", tmp_path / name, "--json")
        assert (found.code, json.loads(found.out)) == (0, exact), found.err
        vectors = ("--vectors", work / "vectors")
        hits = call("search", "csv files", *places, *vectors, "--index", tmp_path / name, "--json")
        assert hits.code == 0 and json.loads(hits.out)["hits"][0]["terms"], hits.err
        assert http.key not in made.err + found.err + hits.err
    assert http.client.collection_exists("server")
    with QdrantCollection.embedded(tmp_path / "folder"):
        refused = call("search", "csv files", "--model", masked_lm, "--index", tmp_path / "folder")
        assert (refused.code, "the collection is open elsewhere" in refused.err) == (1, True)
    http.key = "changed"
    refused = call("search", "csv files", "--model", masked_lm, "--index", tmp_path / "server")
    assert (refused.code, "answered 401 to the key given" in refused.err, "sesame" in refused.err) == (1, True, False)
    http.stop()


def test_index_says_that_it_resumes(call: Any, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = len(small_collection().documents)
    index = ("index", "--backend", "qdrant", "--vectors", work / "vectors", "--output", tmp_path / "index")

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tilefold.retrieval.qdrant.edge.EdgeEngine.optimize", interrupt)
        assert call(*index).code == 130
    made = call(*index)
    assert made.code == 0 and f"indexing resumes: {documents} of {documents} were done before" in made.err
    assert "resumes" not in call(*index).err


def test_an_index_is_added_to_and_deleted_from(call: Any, work: Path, masked_lm: str, tmp_path: Path) -> None:
    http = OverHttp()
    new = tmp_path / "new.jsonl"
    texts = {"d0": "sockets alone, and nothing else", "extra": "a document about csv files that is new"}
    new.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items()))
    encode = ("encode", "--model", masked_lm, "--data", new, "--top-k", "64", "--output", tmp_path / "vectors")
    assert call(*encode).code == 0
    gone = tmp_path / "gone.txt"
    gone.write_text("d3\nd4\n\nnever there\n")
    index = ("index", "--backend", "qdrant", "--output")
    update = ("--vectors", tmp_path / "vectors", "--update", "--delete", gone, "--json")
    for name, options in (("folder", ()), ("server", ("--url", http.url))):
        place = tmp_path / name
        assert call(*index, place, *options, "--vectors", work / "vectors").code == 0
        made = call(*index, place, *update)
        assert made.code == 0, made.err
        expected = {"n_documents": len(small_collection().documents) - 1, "written": 2, "deleted": 2}
        assert json.loads(made.out).items() >= expected.items()
        found = call("search", "csv files", "--model", masked_lm, "--index", place, "--k", "50", "--json")
        names = {hit["id"] for hit in json.loads(found.out)["hits"]}
        assert "extra" in names and not {"d3", "d4"} & names
        assert json.loads((place / "index.json").read_text())["n_documents"] == expected["n_documents"]
        again = call(*index, place, *update)
        assert (again.code, json.loads(again.out)["deleted"]) == (0, 0)
    http.stop()
    place = tmp_path / "folder"
    for wrong, code, message in (
        (("--update",), 2, "give them with --vectors"),
        (("--delete", tmp_path / "none"), 2, "--delete:"),
        (("--delete", gone, "--vectors", tmp_path / "vectors"), 2, "--vectors goes with --update"),
        (("--delete", gone, "--weights", "float16"), 2, "--weights is for a new index"),
        (("--delete", gone, "--output", tmp_path / "nowhere"), 1, "no such file"),
        (("--delete", gone, "--output", work / "index"), 1, "expected an index of backend 'qdrant', got 'exact'"),
    ):
        output = () if "--output" in wrong else ("--output", place)
        refused = call("index", "--backend", "qdrant", *output, *wrong)
        assert (refused.code, message in refused.err) == (code, True), refused.err
    refused = call("index", "--output", place, "--vectors", work / "vectors", "--update")
    assert (refused.code, "--update goes with --backend qdrant" in refused.err) == (2, True)
