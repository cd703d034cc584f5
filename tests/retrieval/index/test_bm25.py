"""BM25: words, scores of bm25s, saved indexes, and indexes that lose all their words."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import Stemmer

from tests.test_imports import run_python
from tilefold import retrieval as r
from tilefold._internal.lazy import package_version
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import bm25
from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer


def test_documents_and_queries_without_a_match_are_left_out() -> None:
    index = r.BM25Index.build({"a": "parse the json", "b": "sort a list", "c": ""})
    run = index.search({"q": "json parser", "none": "zebra", "empty": "", "stop": "the"}, 10)
    assert list(run["q"]) == ["a"]
    assert run["q"]["a"] > 0
    assert run["none"] == {}
    assert run["empty"] == {}
    assert run["stop"] == {}
    assert run.keys() == {"q", "none", "empty", "stop"}


def test_documents_without_words_cannot_be_indexed() -> None:
    with pytest.raises(ValueError, match="documents: expected at least one, got an empty mapping"):
        r.BM25Index.build({})
    with pytest.raises(ValueError, match="got only documents without words"):
        r.BM25Index.build({"a": "..."})


def test_a_k_of_zero_is_refused() -> None:
    index = r.BM25Index.build({"a": "parse the json"})
    with pytest.raises(ValueError, match="k: expected an integer"):
        index.search({"q": "json"}, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("k1", -1.0), ("k1", math.inf), ("b", 1.5), ("b", math.nan)],
)
def test_wrong_parameters_are_refused(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        r.BM25Index.build({"a": "x y"}, **options)


@pytest.mark.parametrize(
    ("options", "text", "words"),
    [
        pytest.param(
            BM25Options(identifiers=True),
            "Move_before_end of OrderedDict, queries!",
            ["move", "befor", "end", "order", "dict", "queri"],
            id="parts of identifiers are stemmed",
        ),
        pytest.param(
            BM25Options(),
            "Move_to_end of OrderedDict",
            ["move_to_end", "ordereddict"],
            id="identifiers are words by default",
        ),
        pytest.param(
            BM25Options("none"),
            "The names of OrderedDict",
            ["the", "names", "of", "ordereddict"],
            id="no language: no stems and no stop words",
        ),
        pytest.param(
            BM25Options("none"),
            "東大寺の仏像",
            ["東大", "大寺", "寺の", "の仏", "仏像"],
            id="pairs of letters of an unspaced script",
        ),
        pytest.param(
            BM25Options("none"),
            "寺 año ภาษา",
            ["寺", "año", "ภา", "าษ", "ษา"],
            id="several scripts",
        ),
        pytest.param(
            BM25Options("de"),
            "Die Häuser und das Haus",
            ["haus", "haus"],
            id="German by its code",
        ),
        pytest.param(
            BM25Options("german"),
            "Häuser Haus",
            ["haus", "haus"],
            id="German by its name",
        ),
        pytest.param(
            BM25Options("finnish"),
            "talossa ja",
            ["talo", "ja"],
            id="Finnish has a stemmer, but no stop words",
        ),
    ],
)
def test_texts_are_cut_into_words_as_documented(
    options: BM25Options,
    text: str,
    words: list[str],
) -> None:
    assert Tokenizer(options)(text) == words


def test_an_unknown_language_is_refused() -> None:
    message = r"language: expected one of .*english.*none, got 'klingon'"
    with pytest.raises(ValueError, match=message):
        Tokenizer(BM25Options("klingon"))


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4)])
def test_scores_are_those_of_bm25s_with_a_snowball_stemmer(
    pydocs: r.Collection,
    k1: float,
    b: float,
) -> None:
    import bm25s

    documents = dict(list(pydocs.contents().items())[:500])
    queries = dict(list(pydocs.queries.items())[:50])
    stemmer = Stemmer.Stemmer("english")
    document_words = bm25s.tokenize(
        list(documents.values()),
        stopwords="en",
        stemmer=stemmer,
        show_progress=False,
    )
    query_words = bm25s.tokenize(
        list(queries.values()),
        stopwords="en",
        stemmer=stemmer,
        show_progress=False,
    )
    engine = bm25s.BM25(k1=k1, b=b)
    engine.index(document_words, show_progress=False)
    _, scores = engine.retrieve(query_words, k=10, show_progress=False)

    run = r.BM25Index.build(documents, k1=k1, b=b).search(queries, 10)

    for query, row in zip(queries, scores.tolist(), strict=True):
        expected = [score for score in row if score > 0]
        assert list(run[query].values()) == pytest.approx(expected, rel=1e-6), query


def test_a_saved_index_answers_as_before_and_records_options_and_texts(tmp_path: Path) -> None:
    texts = {"a": "parsing the json", "b": "sort a list", "c": ""}
    queries = {"q": "json parser", "p": "lists"}
    index = r.BM25Index.build(texts, language="en", k1=0.9, b=0.4)
    index.save(tmp_path / "bm25")
    loaded = r.BM25Index.load(tmp_path / "bm25")
    assert loaded.options == BM25Options("en", 0.9, 0.4)
    assert loaded.n_documents == 3
    assert index.provenance == Provenance(texts_sha256=texts_digest(texts))
    assert loaded.provenance == index.provenance
    assert loaded.search(queries, 5) == index.search(queries, 5)


def test_a_saved_index_is_replaced_and_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bm25"
    index = r.BM25Index.build({"a": "parsing the json"})
    index.save(path)
    index.save(path, overwrite=True)
    with pytest.raises(DataError, match="got one of BM25"):
        r.load_index(path)
    (path / "vocab.index.json").write_text("{}")
    with pytest.raises(DataError, match=r"vocab.index.json: damaged"):
        r.BM25Index.load(path)


class OtherStemmer:
    """A stemmer of another release, which stems nothing."""

    def __init__(self, language: str) -> None:
        self.language = language

    def stemWord(self, word: str) -> str:  # noqa: N802 (PyStemmer's name)
        return word


@pytest.fixture
def _other_stemmer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install another release of PyStemmer, 9.9, which returns other stems."""
    monkeypatch.setattr(Stemmer, "Stemmer", OtherStemmer)
    monkeypatch.setattr(bm25, "package_version", lambda name: "9.9")


@pytest.fixture(params=["built", "updated", "only the update has a stem"])
def saved_index(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of an index with words that its stemmer shortens."""
    index = r.BM25Index.build({"a": "tea kettles", "b": "cup"})
    if request.param == "updated":
        index = index.updated({"c": "boiling"})
    elif request.param == "only the update has a stem":
        index = r.BM25Index.build({"a": "cup"}).updated({"c": "boiling"})
    index.save(tmp_path / "index")
    return tmp_path / "index"


def test_a_saved_index_loads_with_the_stemmer_that_built_it(saved_index: Path) -> None:
    assert r.BM25Index.load(saved_index).n_documents > 1


def test_a_saved_index_refuses_a_stemmer_with_other_stems(
    saved_index: Path,
    request: pytest.FixtureRequest,
) -> None:
    built_with = re.escape(package_version("PyStemmer"))
    request.getfixturevalue("_other_stemmer")
    message = (
        rf"index: expected the stem .* PyStemmer {built_with} .* from PyStemmer 9\.9, "
        r".* Build the index again"
    )
    with pytest.raises(DataError, match=message):
        r.BM25Index.load(saved_index)


def test_a_saved_index_without_stems_takes_any_stemmer(
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    r.BM25Index.build({"a": "tea kettles"}, language="none").save(tmp_path / "index")
    request.getfixturevalue("_other_stemmer")
    assert r.BM25Index.load(tmp_path / "index").search({"q": "kettles"}, 1)["q"]


def test_a_saved_index_keeps_its_stop_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r.BM25Index.build({"a": "the tea", "b": "cup"}).save(tmp_path / "index")
    monkeypatch.setattr("bm25s.stopwords.STOPWORDS_EN", ("tea",))
    loaded = r.BM25Index.load(tmp_path / "index")
    updated = loaded.updated({"c": "the kettle"})
    for index in (loaded, updated):
        assert list(index.search({"q": "tea"}, 3)["q"]) == ["a"]
        assert not index.search({"q": "the"}, 3)["q"]


def test_an_index_without_a_record_of_its_stemmer_loads(tmp_path: Path) -> None:
    """Earlier releases wrote no such record."""
    folder = tmp_path / "index"
    r.BM25Index.build({"a": "tea kettles"}).save(folder)
    manifest = json.loads((folder / "index.json").read_text())
    del manifest["files"]["stemming.json"]
    del manifest["checksum"]
    (folder / "index.json").write_text(json.dumps(manifest))
    (folder / "stemming.json").unlink()
    index = r.BM25Index.load(folder).updated({"b": "kettle"})
    index.save(folder, overwrite=True)
    assert set(r.BM25Index.load(folder).search({"q": "kettles"}, 2)["q"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("texts", "delete"),
    [
        pytest.param({}, ["a", "b"], id="all documents deleted"),
        pytest.param({"b": ""}, ["a"], id="all words replaced"),
    ],
)
def test_an_index_may_lose_all_its_words_and_grow_again(
    texts: dict[str, str],
    delete: list[str],
    tmp_path: Path,
) -> None:
    index = r.BM25Index.build({"a": "cat", "b": "dog cat"}, metadata={"a": {"n": 1}})
    index.updated(texts, delete, metadata={}).save(tmp_path / "index")
    emptied = r.BM25Index.load(tmp_path / "index")
    assert list(emptied.ids) == list(texts)
    assert emptied.search({"q": "cat"}, 3) == {"q": {}}
    request = r.SearchRequest(3, r.Feedback())
    assert r.Searcher(emptied).rank({"q": "cat"}, request).run == {"q": {}}

    grown = emptied.updated({"c": "cat sat", "d": "dog"}, metadata={})
    expected = r.BM25Index.build({**texts, "c": "cat sat", "d": "dog"})
    assert grown.search({"q": "cat"}, 3) == expected.search({"q": "cat"}, 3)


def test_a_search_starts_no_jax_which_would_take_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax started')")
    (tmp_path / "jax/lax.py").write_text("def top_k(*args): print('jax ran')")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from tilefold.retrieval import BM25Index
run = BM25Index.build({{'a': 'parse the json'}}).search({{'q': 'json'}}, 1)
print(list(run['q']), 'jax' in sys.modules)
"""
    assert run_python(code).splitlines()[0] == "['a'] False"


def test_importing_retrieval_imports_nothing_heavy() -> None:
    code = """
import sys
import tilefold.retrieval as r
r.Collection, r.evaluate, r.BM25Index, r.build_index
heavy = {
    'bm25s', 'ir_measures', 'matplotlib', 'pyarrow', 'seismic', 'sentence_transformers',
    'torch', 'transformers',
}
print(sorted(heavy & set(sys.modules)))
print(all(hasattr(r, name) for name in r.__all__))
"""
    assert run_python(code).split() == ["[]", "True"]


def test_a_search_of_words_needs_no_torch() -> None:
    code = """
import sys
import tilefold.retrieval as r
hits = r.Searcher(r.BM25Index.build({'a': 'json'})).search('json')
print(hits[0]['id'], 'torch' in sys.modules)
"""
    assert run_python(code).split() == ["a", "False"]
