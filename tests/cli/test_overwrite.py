"""What was written before is replaced only where --overwrite says so, and an index keeps its
metadata.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.program import Call, done, fails, measured, write_articles
from tilefold import retrieval as r
from tilefold.retrieval.index.opening import open_index

BM25, EXACT, QDRANT, LATE = "bm25", "exact", "qdrant", "late"


def sources(backend: str, shared: Path) -> tuple[str | Path, ...]:
    """The options that name what an index of a backend is built of."""
    if backend == BM25:
        return ("--backend", BM25, "--data", shared / "data")
    if backend == LATE:
        return ("--backend", LATE, "--tokens", shared / "tokens")
    return ("--backend", backend, "--vectors", shared / "vectors")


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file in a folder."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("backend", [EXACT, "seismic", QDRANT, BM25, LATE])
def test_an_index_is_replaced_only_with_overwrite(
    call: Call,
    shared: Path,
    tmp_path: Path,
    backend: str,
) -> None:
    pytest.importorskip({"seismic": "seismic", QDRANT: "qdrant_edge"}.get(backend, "numpy"))
    output = tmp_path / "index"
    (tmp_path / "other.tsv").write_text("x1\tother words\nx2\tof another collection\n")
    other = ("index", "--backend", BM25, "--data", tmp_path / "other.tsv", "--output", output)
    build = ("index", *sources(backend, shared), "--output", output)
    count = measured(call(*build, "--json"))["n_documents"]
    before = contents(output)
    refused = f"--output: {output} holds an index already ({backend}, {count} documents)."
    for again in (build, other):
        fails(call(*again), 1, refused, "--update", "--overwrite", "nothing was overwritten")
        assert contents(output) == before
    done(call(*build, "--overwrite"))
    assert open_index(output).n_documents == count
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["index", "other.tsv"]


def test_an_index_of_another_kind_is_never_replaced(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "index"
    shutil.copytree(shared / "bm25", output)
    build = ("index", *sources(EXACT, shared), "--output", output, "--overwrite")
    fails(call(*build), 1, "got one with other files", "or move the other files away")
    assert contents(output) == contents(shared / "bm25")


def test_a_damaged_index_is_refused_and_may_be_replaced(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "index"
    shutil.copytree(shared / "index", output)
    (output / "index.json").write_text("{")
    build = ("index", *sources(EXACT, shared), "--output", output)
    fails(call(*build), 1, "holds an index that cannot be read", "tilefold index --overwrite")
    done(call(*build, "--overwrite"))


def test_vectors_are_replaced_by_a_merge_only_with_overwrite(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "more.tsv").write_text("x1\tother words\n")
    encode = ("encode", "--model", masked_lm, "--data", tmp_path / "more.tsv", "--top-k", "64")
    done(call(*encode, "--output", tmp_path / "more"))
    done(call(*encode, "--output", tmp_path / "there"))
    before = contents(tmp_path / "there")
    merge = ("merge", shared / "vectors", tmp_path / "more", "--output", tmp_path / "there")
    fails(
        call(*merge),
        1,
        "got one with 1 vectors",
        "(overwrite=True or --overwrite); nothing was overwritten",
    )
    assert contents(tmp_path / "there") == before
    done(call(*merge, "--overwrite"))
    done(call(*merge[:-1], tmp_path / "new"))


def test_an_export_is_replaced_only_with_overwrite(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    export = ("export", "--to", "opensearch", "--vectors", shared / "vectors", "--names", "numbers")
    done(call(*export, "--output", tmp_path / "out"))
    before = contents(tmp_path / "out")
    more = (*export, "--output", tmp_path / "out", "--field", "splade")
    fails(call(*more), 1, "(overwrite=True or --overwrite); nothing was overwritten")
    assert contents(tmp_path / "out") == before
    done(call(*more, "--overwrite"))
    assert contents(tmp_path / "out") != before


DATA, RUN, WORDS = "DATA", "RUN", "WORDS"
WRITERS = [
    pytest.param("mine --data DATA --run RUN --output", "m.parquet", id="mine"),
    pytest.param("score MINED --data DATA --teacher bm25 --output", "s.parquet", id="score"),
    pytest.param("evaluate --data DATA --run RUN --save-run", "r.trec", id="evaluate --save-run"),
    pytest.param("evaluate --data DATA --run RUN --per-query", "q.tsv", id="evaluate --per-query"),
    pytest.param("search --queries QUERIES --index WORDS --save-run", "r.trec", id="search"),
    pytest.param("fuse --run RUN --run OTHER --save-run", "f.trec", id="fuse"),
    pytest.param("compare RUN OTHER --data DATA --plot", "p.png", id="compare --plot"),
    pytest.param("encode --model MODEL --data DATA --output v --jsonl", "v.jsonl", id="encode"),
]


@pytest.fixture
def words(shared: Path, masked_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Function that replaces the words in capitals of a command by files in this folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        shutil.copy(shared / "bm25.trec", name)
    shutil.copy(shared / "mined.parquet", "mined.parquet")
    places = {"DATA": shared / "data", "WORDS": shared / "bm25", "RUN": "a.trec", "OTHER": "b.trec"}
    places |= {"MINED": "mined.parquet", "MODEL": masked_lm}
    places["QUERIES"] = shared / "data" / "queries.jsonl"

    def replaced(command: str) -> Sequence[str | Path]:
        return [places.get(word, word) for word in command.split()]

    return replaced


@pytest.mark.parametrize(("command", "name"), WRITERS)
def test_a_file_is_replaced_only_with_overwrite(
    call: Call,
    words: object,
    command: str,
    name: str,
) -> None:
    assert callable(words)
    if name == "p.png":
        pytest.importorskip("matplotlib")
    Path(name).write_text("weeks of work")
    fails(call(*words(command), name), 1, f"{name} exists. Give --overwrite", "nothing was over")
    assert Path(name).read_text() == "weeks of work"
    done(call(*words(command), name, "--overwrite"))
    assert Path(name).read_bytes() != b"weeks of work"


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        pytest.param(
            "mine --data DATA --run RUN --output",
            "m.csv",
            "--output: a Parquet file is written, whose name ends in .parquet, got m.csv",
            id="mined negatives",
        ),
        pytest.param(
            "score MINED --data DATA --teacher bm25 --output",
            "scored",
            "--output: a Parquet file is written, whose name ends in .parquet, got scored",
            id="scores",
        ),
        pytest.param(
            "fuse --run RUN --run OTHER --save-run",
            "f.trec.gz",
            "--save-run: a TREC run is written, whose name ends in .trec or .run or .txt",
            id="a run that is not compressed",
        ),
        pytest.param(
            "evaluate --data DATA --run RUN --per-query",
            "q.csv",
            "--per-query: a table of tab-separated columns is written",
            id="measures",
        ),
        pytest.param(
            "encode --model MODEL --data DATA --output v --jsonl",
            "v.parquet",
            "--jsonl: a file of JSON lines is written",
            id="JSON lines",
        ),
    ],
)
def test_a_name_that_ends_like_another_format_is_refused(
    call: Call,
    words: object,
    command: str,
    name: str,
    message: str,
) -> None:
    assert callable(words)
    fails(call(*words(command), name), 2, message)
    assert not Path(name).exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(
            "score MINED --data DATA --teacher bm25 --overwrite --output",
            "mined.parquet",
            id="score",
        ),
        pytest.param("fuse --run RUN --run OTHER --overwrite --save-run", "b.trec", id="fuse"),
    ],
)
def test_an_input_is_not_replaced_with_overwrite_either(
    call: Call,
    words: object,
    command: str,
    name: str,
) -> None:
    assert callable(words)
    before = Path(name).read_bytes()
    fails(call(*words(command), name), 2, f"expected a path of its own, got {name}")
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("backend", [EXACT, QDRANT])
def test_new_documents_come_with_their_metadata_into_an_index_that_keeps_some(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    pytest.importorskip("qdrant_edge" if backend == QDRANT else "numpy")
    monkeypatch.chdir(tmp_path)
    write_articles()
    for name in ("articles", "new-articles"):
        output = ("--data", f"{name}.jsonl", "--output", name)
        done(call("encode", "--model", masked_lm, "--top-k", "32", *output))
    first = ("--vectors", "articles", "--data", "articles.jsonl", "--backend", backend)
    done(call("index", *first, "--output", "index"))
    update = ("index", "--update", "--vectors", "new-articles", "--output", "index")
    message = "--data: expected the fields of the new documents, because the index stores metadata"
    fails(call(*update), 2, message)
    search = ("search", "kettles", "--index", "index", "--model", masked_lm, "--where", "lang=en")
    hits = measured(call(*search, "--json"))["hits"]
    assert "k0" not in {hit["id"] for hit in hits}, "nothing was changed"
    done(call(*update, "--data", "new-articles.jsonl"))
    hits = measured(call(*search, "--json"))["hits"]
    assert "k0" in {hit["id"] for hit in hits}


def evaluation(folder: Path) -> tuple[str | Path, ...]:
    """A command that evaluates a new BM25 index, ``index`` in the folder."""
    documents = {"a": r.Document("a", "", "hot tea"), "b": r.Document("b", "", "ships")}
    collection = r.Collection("tea", documents, {"q": "tea"}, {"test": {"q": {"a": 1}}})
    collection.save_beir(folder / "data")
    r.BM25Index.build(collection.contents()).save(folder / "index")
    return ("evaluate", "--data", folder / "data", "--index", folder / "index")


@pytest.mark.parametrize("name", ["index", "vectors"])
def test_no_file_is_written_into_an_index_or_a_folder_of_vectors(
    call: Call,
    tmp_path: Path,
    name: str,
) -> None:
    evaluate = evaluation(tmp_path)
    r.write_vectors(r.SparseVectors.from_rows({"a": {1: 1.0}}, 10), tmp_path / "vectors")
    folder = tmp_path / name
    before = contents(folder)
    for file in (*before, "new.trec", "below/new.trec"):
        message = "--save-run: expected a file outside indexes and folders of vectors"
        fails(call(*evaluate, "--overwrite", "--save-run", folder / file), 2, message)
    assert contents(folder) == before and not (folder / "below").exists()


def test_a_file_is_written_next_to_a_manifest_of_another_program(
    call: Call,
    tmp_path: Path,
) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    done(call(*evaluation(tmp_path), "--save-run", tmp_path / "run.trec"))
    assert (tmp_path / "run.trec").is_file()


def test_an_update_of_bm25_without_metadata_is_noted(call: Call, tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    new = tmp_path / "new.tsv"
    index = tmp_path / "index"
    old.write_text('{"_id": "a", "text": "hot tea", "year": 1999}\n')
    new.write_text("a\tcold tea\n")
    done(call("index", "--backend", BM25, "--data", old, "--output", index))
    updated = done(call("index", "--update", "--data", new, "--output", index))
    assert f"--data: the documents of {new} have no metadata" in " ".join(updated.err.split())
