from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import Stemmer

from tests.refusals import refused
from tests.test_imports import run_python
from tilefold import retrieval as r
from tilefold._internal.lazy import package_version
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.evaluation.measures import (
    check_measures,
    choose_weights,
    read_trec_provenance,
)
from tilefold.retrieval.index import bm25
from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer

A = {"q": {"x": 3.0, "y": 1.0}}
B = {"q": {"y": 10.0, "z": 5.0, "x": 0.0}}
D = math.sqrt(50 / 3)  # deviation of B


@pytest.mark.parametrize(
    ("runs", "options", "expected"),
    [
        (
            [A, B],
            ([0.5, 0.5],),
            {"x": 0.5, "y": 0.5, "z": 0.25},
        ),  # equal scores in the order of the runs
        ([A, B], ([0.5, 0.5], "min_max", 1), {"x": 0.5}),
        (
            [A, B],
            ([1.0, 1.0], "none"),
            {"y": 11.0, "z": 6.0, "x": 3.0},
        ),  # what is missing has the run's minimum
        ([A, B], ([1.0, 1.0], "z_score"), {"y": -1 + 5 / D, "x": 1 - 5 / D, "z": -1.0}),
        ([{"q": {"x": 7.0}}, {}], ([1.0, 1.0],), {"x": 1.0}),
        ([{"q": {"x": 7.0}}], ([1.0], "z_score"), {"x": 0.0}),
        ([{"q": {}}, {"q": {}}], (), {}),
    ],
)
def test_interpolation_follows_the_hand_computation(
    runs: Any,
    options: Any,
    expected: dict[str, float],
) -> None:
    fused = r.interpolate(runs, *options)["q"]
    assert fused == pytest.approx(expected) and list(fused) == list(expected)


def test_reciprocal_rank_fusion_follows_the_hand_computation() -> None:
    fused = r.reciprocal_rank_fusion([A, B])["q"]
    assert fused == pytest.approx({"y": 1 / 62 + 1 / 61, "x": 1 / 61 + 1 / 63, "z": 1 / 62})
    assert list(fused) == ["y", "x", "z"]
    assert r.reciprocal_rank_fusion([{"q": {"x": 7.0}}, {"q": {}}]) == {"q": {"x": 1 / 61}}


def test_scores_of_any_size_are_normalised_and_equal_ones_to_0() -> None:
    for score in (3.09, 0.3, 1e200, -7.7e-300):  # whatever their mean is rounded to
        equal, other = {"q": {f"d{i}": score for i in range(11)}}, {"q": {"d0": 2.0, "x": 1.0}}
        assert r.interpolate([equal], [1.0], "z_score") == {"q": dict.fromkeys(equal["q"], 0.0)}
        assert r.interpolate([equal, other], normalization="z_score")["q"]["x"] == -0.5
    for size in (5e-324, 1e-200, 1.0, 1e200, 4e307):
        run = {"q": {"a": 4 * size, "b": 2 * size, "c": -2 * size, "d": -4 * size}}
        assert r.interpolate([run], [1.0])["q"] == {"a": 1.0, "b": 0.75, "c": 0.25, "d": 0.0}
        far, near = 4 / math.sqrt(10), 2 / math.sqrt(10)
        scores = r.interpolate([run], [1.0], "z_score")["q"]
        assert scores == pytest.approx({"a": far, "b": near, "c": -near, "d": -far})


def test_fusion_refuses_wrong_arguments() -> None:
    huge, nan, text = (
        {"q": {"a": 1e308, "b": 1.0}},
        {"q": {"a": math.nan}},
        {"q": {"a": 1.0, "b": "high"}},
    )
    for message, call in (
        ("runs: expected at least one run, got an empty list", lambda: r.interpolate([])),
        ("one number for each of 2 runs, got 1", lambda: r.interpolate([A, B], [1.0])),
        ("expected finite", lambda: r.interpolate([A], [math.inf])),
        (
            "min_max, z_score, none, got 'softmax'",
            lambda: r.interpolate([A], normalization="softmax"),
        ),
        (
            "expected finite sums, got inf for query 'q'",
            lambda: r.interpolate([huge, huge], [1.0, 1.0], "none"),
        ),
        ("k: expected at least 1", lambda: r.reciprocal_rank_fusion([A], k=0)),
        (
            "runs: expected finite scores, got nan for 'a' of query 'q'",
            lambda: r.interpolate([A, nan]),
        ),
        (
            "runs: expected finite scores, got nan for 'a' of query 'q'",
            lambda: r.reciprocal_rank_fusion([A, nan]),
        ),
        (
            "runs: expected finite scores, got 'high' for 'b' of query 'q'",
            lambda: r.interpolate([A, text]),
        ),
    ):
        refused(ValueError, message, call)


def test_chosen_weights_are_the_best_of_the_grid() -> None:
    qrels: dict[str, dict[str, int]] = {"q1": {"a": 1}, "q2": {"b": 1}}
    right = {"q1": {"a": 2.0, "b": 1.0, "c": 0.5}, "q2": {"b": 3.0, "a": 1.0, "c": 0.5}}
    wrong = {"q1": {"b": 2.0, "c": 1.5, "a": 1.0}, "q2": {"a": 3.0, "c": 2.0, "b": 1.0}}
    weights, score = choose_weights((wrong, right), qrels, step=0.5)
    assert score == 1.0 == r.evaluate(right, qrels, ("nDCG@10",))["nDCG@10"]
    assert weights == (0.0, 1.0)
    said = "expected 1 to 300 combinations of weights, got 1001 for 5 runs"
    refused(ValueError, said, choose_weights, [wrong] * 5, qrels)
    for step in (0.0, 0.3, math.nan, 2.0):
        refused(
            ValueError,
            "step: expected 1 divided by a whole",
            choose_weights,
            [wrong, right],
            qrels,
            step=step,
        )


def test_evaluation_follows_the_hand_computation() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 2, "c": 1}, "silent": {"a": 1}}
    run = {"q1": {"x": 2.0, "a": 1.0}, "q2": {"b": 3.0}, "not judged": {"a": 1.0}}
    rows = r.evaluate_per_query(run, qrels)
    assert rows["q1"] == pytest.approx({"nDCG@10": 1 / math.log2(3), "R@100": 1.0, "RR@10": 0.5})
    assert rows["q2"] == pytest.approx(
        {"nDCG@10": 2 / (2 + 1 / math.log2(3)), "R@100": 0.5, "RR@10": 1.0},
    )
    assert rows["silent"] == {"nDCG@10": 0.0, "R@100": 0.0, "RR@10": 0.0}
    assert r.evaluate(run, qrels)["RR@10"] == pytest.approx(0.5)
    assert r.evaluate({"no query": {"a": 1.0}}, {"no query": {"a": 1}}) == {
        "nDCG@10": 1.0,
        "R@100": 1.0,
        "RR@10": 1.0,
    }
    assert r.evaluate({}, {"q": {"a": 1}}) == {"nDCG@10": 0.0, "R@100": 0.0, "RR@10": 0.0}
    numbers = {"q": {"a": np.float32(2.0), "b": np.float64(1.0)}}
    assert r.evaluate(numbers, {"q": {"b": np.int64(1)}}, ["RR"]) == {"RR": 0.5}  # type: ignore[dict-item]
    assert list(r.evaluate(run, qrels, ["AP", "nDCG@10"])) == ["AP", "nDCG@10"]
    assert r.evaluate(run, qrels, ["RR@10", "MRR@10"]) == pytest.approx(
        {"RR@10": 0.5, "MRR@10": 0.5},
    )


FOUND, GOOD = {"q": {"a": 1.0}}, {"q": {"a": 1}}
TEN = {f"d{i}": 10.0 - i for i in range(10)}


def test_judgements_that_are_all_negative_are_of_a_query_without_a_relevant_document() -> None:
    run, measures = (
        {"a": TEN, "b": TEN, "c": TEN},
        ["nDCG@10", "RR", "AP", "infAP", "Judged@10", "NumRet", "NumRel"],
    )
    for grade in (-1, -2, -7):
        qrels = {
            "a": {"d0": 1, "d1": 2},
            "b": {"d1": grade, "d2": grade, "d3": grade},
            "c": {"d1": 1},
        }
        for _ in range(20):  # an evaluation before may leave memory in which a fault shows
            rows = r.evaluate_per_query(run, qrels, measures)
        assert rows["b"] == dict.fromkeys(measures, 0.0) | {"Judged@10": 0.3, "NumRet": 10.0}
        assert (rows["a"]["AP"], rows["c"]["AP"]) == (1.0, 0.5)
        assert choose_weights([run, run], qrels, measure="AP")[1] == pytest.approx(0.5)


def test_negative_grades_beside_others_are_documents_of_the_pool_that_nobody_judged() -> None:
    qrels = {"q": {"d0": -1, "d1": 1, "d2": -2, "d3": 1}}
    found = r.evaluate({"q": TEN}, qrels, ["AP", "P(judged_only=True)@2", "Judged@10", "infAP"])
    by_hand = (1 / 2 + 1 / 2 * 1 / 2 + 1 / 4 + 3 / 4 * 3 / 3) / 2
    expected = {"AP": 0.5, "P(judged_only=True)@2": 1.0, "Judged@10": 0.4, "infAP": by_hand}
    assert found == pytest.approx(expected, abs=1e-4)


def test_what_would_end_or_mislead_the_evaluating_library_is_refused() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({"q": {"a\0b": 1.0}}, GOOD, "run: expected ids without zero bytes that UTF-8 can hold"),
        ({"q": {"a\ud800": 1.0}}, GOOD, "run: expected ids without zero bytes that UTF-8 can hold"),
        (
            FOUND,
            {"q": {"a": 1 << 62}},
            "qrels: expected grades of at most 1,000,000 for query 'q', got 4611686018",
        ),
        (FOUND, {"q": {}}, r"judged query, got no grade for any of 1, \['q'\] first"),
        (
            {"1": {"a": 1.0}},
            {"2": {"a": 1}},
            "got those of others: its first query is '1', .* judgements '2'",
        ),
    ]
    unlike = "run: query 'q' has a score that is not a number: .* for 'a'"
    cases += [({"q": {"a": score}}, GOOD, unlike) for score in (math.nan, "high", None, [1.0])]
    for run, qrels, message in cases:
        refused(ValueError, message, r.evaluate, run, qrels)
    refused(TypeError, "measures: expected a list", r.evaluate, FOUND, GOOD, "nDCG@10")
    refused(
        TypeError,
        r"qrels: expected integer grades for query 'q', got 1\.5",
        r.evaluate,
        FOUND,
        {"q": {"a": 1.5}},
    )
    said = r"runs\[1\]: expected results for a judged query, got .* '2', .* '1'"
    refused(
        ValueError,
        said,
        choose_weights,
        [{"1": {"a": 1.0}}, {"2": {"a": 1.0}}],
        {"1": {"a": 1}},
    )


@pytest.mark.skipif(shutil.which("perl") is None, reason="gdeval is a Perl program")
def test_what_gdeval_cannot_read_is_an_error_of_the_measures() -> None:
    said = r"measures: .* failed with code .* up to 4, and ids without white space"
    for document, grade in (("a", 5), ("a b", 1)):
        refused(
            ValueError,
            said,
            r.evaluate,
            {"q": {document: 1.0}},
            {"q": {document: grade}},
            ["ERR@10"],
        )


def test_integers_as_ids_are_refused_at_once(tmp_path: Path) -> None:
    for what, call in (
        ("run", lambda: r.evaluate({"1": {7: 1.0}}, {"1": {"7": 1}})),
        ("run", lambda: r.evaluate({1: {"7": 1.0}}, {"1": {"7": 1}})),
        ("qrels", lambda: r.evaluate({"1": {"7": 1.0}}, {1: {"7": 1}})),
        ("runs", lambda: r.interpolate([{"1": {7: 1.0}}])),
        ("runs", lambda: r.reciprocal_rank_fusion([{1: {"7": 1.0}}])),
        ("run", lambda: r.write_trec_run({"1": {7: 1.0}}, tmp_path / "x")),
        ("documents", lambda: r.BM25Index.build({7: "text"})),
        ("id", lambda: r.Document(7, "", "text")),
        ("documents", lambda: r.Collection("x", {7: r.Document("7", "", "text")}, {}, {})),
        ("queries", lambda: r.Collection("x", {}, {7: "text"}, {})),
        ("qrels", lambda: r.Collection("x", {}, {}, {"test": {"q": {7: 1}}})),
        ("texts", lambda: texts_digest(dict.fromkeys((7,), "text"))),
    ):
        refused(TypeError, rf"^{what}: expected .*got [17] \(int\).*str\([17]\)", call)


def test_measures_have_a_deepest_cut_off_and_unknown_ones_are_refused() -> None:
    assert check_measures(["nDCG@10", "R@500", "AP"]) == 500, "which a search must retrieve"
    assert check_measures(["AP"]) == 0
    names = "best nDCG@0 Success@0 RR@0 P@-1 nDCG@2.5 R(rel=0)@10 IPrec@1.5 alpha_nDCG@10 ndcg@10"
    for name in names.split():
        refused(
            ValueError,
            r"such as nDCG@10.*got '" + re.escape(name),
            check_measures,
            ["nDCG@10", name],
        )
    huge = "nDCG(gains={1: 4611686018427387904})@10"
    refused(ValueError, r"grades and gains are at most 1,000,000", check_measures, [huge])


def test_trec_runs_survive_writing_and_reading_and_say_what_made_them_in_their_tag(
    tmp_path: Path,
) -> None:
    run, file = {"q1": {"a": 0.1, "b": 1 / 3}, "q2": {"ü": 1e-30}}, tmp_path / "x.run"
    made = Provenance("ab" * 32, "cd" * 32)
    r.write_trec_run(run, file, tag="mine")
    assert file.read_text(encoding="utf-8").splitlines()[0] == f"q1 Q0 b 1 {1 / 3!r} mine"
    assert r.read_trec_run(file) == run and read_trec_provenance(file) == Provenance()
    r.write_trec_run(run, file, tag=made.tag, overwrite=True)
    found = read_trec_provenance(file)
    assert found == Provenance("ab" * 8, "cd" * 8)
    assert (found.differs(made), made.differs(found), found.differs(Provenance())) == ([], [], [])
    assert found.differs(Provenance("ab" * 32, "00" * 32)) == ["texts_sha256"]
    assert Provenance.shared([made, Provenance("ee" * 32, "cd" * 32)]) == Provenance(
        None,
        "cd" * 32,
    )


def test_bad_lines_of_a_trec_run_are_named_and_none_is_written(tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    refused(ValueError, r"document id: .*got 'a b'", r.write_trec_run, {"q": {"a b": 1.0}}, file)
    refused(
        ValueError,
        r"expected finite scores, got nan for 'a'",
        r.write_trec_run,
        {"q": {"a": math.nan}},
        file,
    )
    assert not list(tmp_path.iterdir())
    for line, message in (
        (b"q Q0 d 1 2.0", r":2: expected 6 fields .* got 5"),
        (b"q Q0 d 1 high tag", r":2: expected a finite score, got 'high'"),
        (b"q Q0 d 1 nan tag", r":2: expected a finite score, got 'nan'"),
        (b"q Q0 a 2 0.5 tag", r":2: document 'a' was already given for query 'q'"),
        (b"q Q0 d\xe9 1 1 tag", r"x.run:2: expected UTF-8 text"),
        (
            b"query_id Q0 doc_id rank score tag",
            r":2: expected a finite score, got 'score'.* remove it if it names col",
        ),
    ):
        file.write_bytes(b"q Q0 a 1 1.0 tag\n" + line + b"\n")
        refused(DataError, message, r.read_trec_run, file)


def test_sparsity_figures_follow_the_hand_computation() -> None:
    documents = r.SparseVectors.from_rows(
        {"a": {0: 1.0, 1: 0.0}, "b": {0: 1.0, 2: 1.0}, "c": {}, "d": {2: 1.0}},
        4,
    )
    queries = r.SparseVectors.from_rows({"q": {0: 1.0}, "p": {0: 1.0, 2: 3.0}}, 4)
    assert r.active_terms(documents) == 1.0
    assert r.flops(queries, documents) == pytest.approx(1.0 * 0.5 + 0.5 * 0.5)
    none = r.SparseVectors.from_rows({}, 4)
    assert r.active_terms(none) == r.flops(none, documents) == 0.0
    other = r.SparseVectors.from_rows({}, 5)
    refused(
        VocabularyMismatchError,
        "documents: expected the vocabulary of queries",
        r.flops,
        other,
        documents,
    )


def test_bm25_leaves_out_documents_and_queries_without_a_match() -> None:
    index = r.BM25Index.build({"a": "parse the json", "b": "sort a list", "c": ""})
    run = index.search({"q": "json parser", "none": "zebra", "empty": "", "stop": "the"}, 10)
    assert run == {"q": {"a": run["q"]["a"]}, "none": {}, "empty": {}, "stop": {}}
    assert run["q"]["a"] > 0
    refused(ValueError, "k: expected an integer", index.search, {"q": "json"}, 0)
    refused(
        ValueError,
        "documents: expected at least one, got an empty mapping",
        r.BM25Index.build,
        {},
    )
    refused(ValueError, "got only empty ones", r.BM25Index.build, {"a": "..."})
    for options in ({"k1": -1.0}, {"k1": math.inf}, {"b": 1.5}, {"b": math.nan}):
        refused(ValueError, next(iter(options)), r.BM25Index.build, {"a": "x y"}, **options)


def test_bm25_starts_no_jax_which_would_take_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax started')")
    (tmp_path / "jax/lax.py").write_text("def top_k(*args): print('jax ran')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from tilefold.retrieval import "
        "BM25Index;"
        "print(BM25Index.build({'a': 'parse the json'}).search({'q': 'json'}, 1)['q'].keys(), "
        "'jax' in sys.modules)"
    )
    assert run_python(code).split("\n")[0] == "dict_keys(['a']) False"


class OtherStemmer:
    """A stemmer of another release, which stems nothing."""

    def __init__(self, language: str) -> None:
        self.language = language

    def stemWord(self, word: str) -> str:  # noqa: N802 (PyStemmer's name)
        return word


def test_a_stored_bm25_index_refuses_a_stemmer_that_gives_other_stems(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = r.BM25Index.build({"a": "tea kettles", "b": "cup"})
    index.save(tmp_path / "built")
    index.updated({"c": "boiling"}).save(tmp_path / "updated")
    r.BM25Index.build({"a": "cup"}).updated({"c": "boiling"}).save(tmp_path / "grown")
    r.BM25Index.build({"a": "tea kettles"}, language="none").save(tmp_path / "unstemmed")
    for name in ("built", "updated", "grown"):
        assert r.BM25Index.load(tmp_path / name).n_documents > 1
    built_with = package_version("PyStemmer")
    monkeypatch.setattr(Stemmer, "Stemmer", OtherStemmer)
    monkeypatch.setattr(bm25, "package_version", lambda name: "9.9")
    for name in ("built", "updated", "grown"):
        refused(
            DataError,
            rf"{name}: expected the stem .* PyStemmer {re.escape(built_with)} .* from PyStemmer "
            r"9\.9, .* Build the index again",
            r.BM25Index.load,
            tmp_path / name,
        )
    assert r.BM25Index.load(tmp_path / "unstemmed").search({"q": "kettles"}, 1)["q"]


def test_a_stored_bm25_index_keeps_its_stop_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = {"a": "the tea", "b": "cup"}
    r.BM25Index.build(documents).save(tmp_path / "index")
    monkeypatch.setattr("bm25s.stopwords.STOPWORDS_EN", ("tea",))
    stored = r.BM25Index.load(tmp_path / "index")
    for index in (stored, stored.updated({"c": "the kettle"})):
        assert list(index.search({"q": "tea"}, 3)["q"]) == ["a"]
        assert not index.search({"q": "the"}, 3)["q"]


def test_a_bm25_index_of_an_earlier_release_has_no_record_of_its_stemmer_and_loads(
    tmp_path: Path,
) -> None:
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


def test_words_identifiers_stems_and_unspaced_scripts_are_cut_as_documented() -> None:
    english, plain = Tokenizer(BM25Options(identifiers=True)), Tokenizer(BM25Options("none"))
    assert english("Move_before_end of OrderedDict, queries!") == [
        "move",
        "befor",
        "end",
        "order",
        "dict",
        "queri",
    ]
    assert Tokenizer(BM25Options())("Move_to_end of OrderedDict") == ["move_to_end", "ordereddict"]
    assert plain("The names of OrderedDict") == ["the", "names", "of", "ordereddict"]
    assert plain("東大寺の仏像") == ["東大", "大寺", "寺の", "の仏", "仏像"]
    assert plain("寺 año ภาษา") == ["寺", "año", "ภา", "าษ", "ษา"]
    german = Tokenizer(BM25Options("de"))
    assert (
        german("Die Häuser und das Haus")
        == ["haus", "haus"]
        == Tokenizer(BM25Options("german"))("Häuser Haus")
    )
    assert Tokenizer(BM25Options("finnish"))("talossa ja") == [
        "talo",
        "ja",
    ]  # a stemmer, but no stop words
    refused(
        ValueError,
        r"language: expected one of .*english.*none, got 'klingon'",
        Tokenizer,
        BM25Options("klingon"),
    )


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4)])
def test_bm25_gives_the_scores_of_bm25s_with_a_snowball_stemmer(
    pydocs: r.Collection,
    k1: float,
    b: float,
) -> None:
    import bm25s
    import Stemmer

    documents = dict(list(pydocs.contents().items())[:500])
    queries = dict(list(pydocs.queries.items())[:50])
    stemmed = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    engine = bm25s.BM25(k1=k1, b=b)
    engine.index(bm25s.tokenize(list(documents.values()), **stemmed), show_progress=False)
    asked = bm25s.tokenize(list(queries.values()), **stemmed)
    _, scores = engine.retrieve(asked, k=10, show_progress=False)
    ours = r.BM25Index.build(documents, k1=k1, b=b).search(queries, 10)
    for name, values in zip(queries, scores.tolist(), strict=True):
        assert list(ours[name].values()) == pytest.approx(
            [value for value in values if value > 0],
            rel=1e-6,
        ), name


def test_a_saved_bm25_index_answers_as_before_and_says_what_it_holds(tmp_path: Path) -> None:
    texts = {"a": "parsing the json", "b": "sort a list", "c": ""}
    index = r.BM25Index.build(texts, language="en", k1=0.9, b=0.4)
    index.save(tmp_path / "bm25")
    again = r.BM25Index.load(tmp_path / "bm25")
    assert (again.options, again.n_documents) == (BM25Options("en", 0.9, 0.4), 3)
    assert again.provenance == index.provenance == Provenance(texts_sha256=texts_digest(texts))
    queries = {"q": "json parser", "p": "lists"}
    assert again.search(queries, 5) == index.search(queries, 5)
    index.save(tmp_path / "bm25", overwrite=True)
    refused(DataError, "got one of BM25", r.load_index, tmp_path / "bm25")
    (tmp_path / "bm25" / "vocab.index.json").write_text("{}")
    refused(DataError, r"vocab.index.json: damaged", r.BM25Index.load, tmp_path / "bm25")


@pytest.mark.parametrize(
    ("texts", "delete"),
    [
        pytest.param({}, ["a", "b"], id="all documents deleted"),
        pytest.param({"b": ""}, ["a"], id="all words replaced"),
    ],
)
def test_a_bm25_index_may_lose_all_its_words_and_grow_again(
    texts: dict[str, str],
    delete: list[str],
    tmp_path: Path,
) -> None:
    index = r.BM25Index.build({"a": "cat", "b": "dog cat"}, metadata={"a": {"n": 1}})
    index.updated(texts, delete, metadata={}).save(tmp_path / "index")
    emptied = r.BM25Index.load(tmp_path / "index")
    assert list(emptied.ids) == list(texts)
    assert emptied.search({"q": "cat"}, 3) == {"q": {}}
    assert r.Searcher(emptied).rank({"q": "cat"}, r.SearchRequest(3, r.Feedback())).run == {"q": {}}
    again = emptied.updated({"c": "cat sat", "d": "dog"}, metadata={})
    expected = r.BM25Index.build({**texts, "c": "cat sat", "d": "dog"})
    assert again.search({"q": "cat"}, 3) == expected.search({"q": "cat"}, 3)


def test_importing_the_package_imports_nothing_heavy_and_a_search_of_words_needs_no_torch() -> None:
    code = (
        "import sys, tilefold.retrieval as r; r.Collection; r.evaluate; r.BM25Index; r.build_index;"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'pyarrow', 'bm25s', "
        "'ir_measures',"
        " 'seismic', 'matplotlib'} & set(sys.modules);"
        "print(r.Searcher(r.BM25Index.build({'a': 'json'})).search('json')[0]['id'], 'torch' in "
        "sys.modules);"
        "print(sorted(heavy), all(hasattr(r, name) for name in r.__all__))"
    )
    assert run_python(code).split() == ["a", "False", "[]", "True"]
