"""BM25, dense retrieval, fusion, feedback and reranking from the shell, with the numbers of the
Python functions.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Call, commands_of, done, fails, measured, run_steps, write_articles
from tests.inside import load_encoder, load_model
from tests.recipes.small import ranked_by_itself, small_collection, with_dev
from tilefold import retrieval as r
from tilefold.recipes.backbone import load_dense_minilm
from tilefold.retrieval.evaluation.measures import choose_weights

MEASURES = ("nDCG@10", "RR@10")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, shared: Path, masked_lm: str) -> Path:
    """BM25 and dense runs of two splits, vectors without special tokens, and the shared indexes and
    vectors.
    """
    folder = tmp_path_factory.mktemp("by-hand")
    with_dev().save_beir(folder / "data")
    data = ("--data", folder / "data")
    splits = ("--split", "test", "--split", "dev", "--k", "8")
    run_steps(
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25", "--k1", "0.9"),
        (
            "evaluate",
            *data,
            *splits,
            "--index",
            folder / "bm25",
            "--save-run",
            folder / "bm25.trec",
        ),
        ("evaluate", *data, *splits, "--model", "minilm", "--save-run", folder / "dense.trec"),
        (
            "encode",
            "--model",
            masked_lm,
            *data,
            "--output",
            folder / "words",
            "--top-k",
            "24",
            "--no-special-tokens",
        ),
        ("index", "--vectors", folder / "words", "--output", folder / "index-of-words"),
    )
    for name in ("vectors", "index", "tokens"):
        (folder / name).symlink_to(shared / name)
    return folder


def test_bm25_and_dense_runs_are_those_of_the_python_functions(call: Call, work: Path) -> None:
    collection = with_dev()
    queries = collection.split_queries("test") | collection.split_queries("dev")
    expected = r.BM25Index.build(collection.contents(), k1=0.9).search(queries, 8)
    assert r.read_trec_run(work / "bm25.trec") == expected
    dense = ranked_by_itself(load_dense_minilm(), collection.contents(), queries)
    # the program encodes in bf16 where the hardware has it: 8 bits of cosines
    for query, scores in r.read_trec_run(work / "dense.trec").items():
        assert scores == pytest.approx({name: dense[query][name] for name in scores}, abs=2**-6)
    for name in ("bm25", "dense"):
        both = measured(
            call(
                "evaluate",
                "--data",
                work / "data",
                "--run",
                work / f"{name}.trec",
                "--split",
                "dev",
                "--split",
                "test",
                "--json",
            ),
        )
        assert list(both["splits"]) == ["dev", "test"]
        assert both["measures"] == both["splits"]["dev"]
        assert both["splits"]["test"] == r.evaluate(
            r.read_trec_run(work / f"{name}.trec"),
            collection.qrels["test"],
        )


def test_search_answers_from_words_without_a_model(call: Call, work: Path, masked_lm: str) -> None:
    folder_options = ("--index", work / "bm25")
    hits = measured(
        call("search", "random numbers", *folder_options, "--data", work / "data", "--json")
    )["hits"]
    assert (hits[0]["id"], hits[0]["title"], hits[0]["terms"]) == ("d8", "module8", None)
    reranked = call(
        "search",
        "random numbers",
        *folder_options,
        "--rerank",
        work / "tokens",
        "--rerank-weight",
        "0.1",
        "--json",
    )
    assert measured(reranked)["hits"][0]["first"]["rank"] >= 1


def test_fused_runs_and_chosen_weights_are_those_of_python(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    collection = with_dev()
    runs = [r.read_trec_run(work / f"{name}.trec") for name in ("bm25", "dense")]
    qrels = collection.qrels
    fuse = ("fuse", "--run", work / "bm25.trec", "--run", work / "dense.trec")
    data = ("--data", work / "data", "--measure", MEASURES[0], "--measure", MEASURES[1], "--json")
    fused = r.reciprocal_rank_fusion(runs)
    assert measured(call(*fuse, *data))["measures"] == r.evaluate(fused, qrels["test"], MEASURES)
    weights, _ = choose_weights(runs, qrels["dev"])
    tuned = measured(
        call(
            *fuse,
            *data,
            "--method",
            "interpolation",
            "--tune",
            "dev",
            "--save-run",
            tmp_path / "f",
        ),
    )
    assert tuned["weights"] == list(weights)
    assert tuned["measures"] == r.evaluate(r.interpolate(runs, weights), qrels["test"], MEASURES)
    given = [part for weight in weights for part in ("--weight", str(weight))]
    assert (
        measured(call(*fuse, *data, "--method", "interpolation", *given))["measures"]
        == tuned["measures"]
    )
    again = call(
        "evaluate",
        "--data",
        work / "data",
        "--run",
        tmp_path / "f",
        "--measure",
        "nDCG@10",
        "--json",
    )
    assert measured(again)["measures"]["nDCG@10"] == tuned["measures"]["nDCG@10"]
    assert (
        call(*fuse, "--save-run", tmp_path / "g").code == 0
    )  # no collection is needed to write it
    shown = call(*fuse, *data[:-1], "--method", "interpolation", "--tune", "dev")
    assert "weights: " in shown.out and "nDCG@10" in shown.out


def test_interpolated_reranking_is_that_of_python(
    call: Call,
    work: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    whole_run = ("--data", work / "data", "--index", work / "index", "--model", masked_lm, "--json")
    folder_options = (*whole_run, "--k", "8")
    late = ("--rerank", work / "tokens", "--rerank-depth", "4")
    first, dropped, mixed = (tmp_path / name for name in ("first", "dropped", "mixed"))
    assert call("evaluate", *folder_options, "--save-run", first).code == 0
    assert (
        call(
            "evaluate", *folder_options, *late, "--rerank-tail", "drop", "--save-run", dropped
        ).code
        == 0
    )
    assert (
        call("evaluate", *folder_options, *late, "--rerank-weight", "0.3", "--save-run", mixed).code
        == 0
    )
    plain, reranked, actual = (r.read_trec_run(path) for path in (first, dropped, mixed))
    assert {len(scores) for scores in reranked.values()} == {4}
    full = measured(call("evaluate", *whole_run, "--k", "16", "--save-run", tmp_path / "whole"))
    assert full["collection"] == "data"
    # 100 candidates are there for recall@100, so that the floor of the first scores is that of all
    # 16
    expected = r.interpolate([r.read_trec_run(tmp_path / "whole"), reranked], [0.7, 0.3], k=8)
    assert {
        q: pytest.approx(scores, rel=1e-6, abs=1e-6) for q, scores in actual.items()
    } == expected
    assert actual.keys() == plain.keys()


def test_seismic_takes_options_and_is_advised_against(
    call: Call,
    work: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    pytest.importorskip("seismic")
    build = (
        "index",
        "--vectors",
        work / "vectors",
        "--output",
        tmp_path / "s",
        "--backend",
        "seismic",
    )
    built = done(call(*build, "--n-postings", "50", "--doc-cut", "8", "--threads", "1", "--json"))
    assert "16 documents are few for seismic" in built.err
    options = json.loads((tmp_path / "s" / "index.json").read_text())["options"]
    assert (options["n_postings"], options["doc_cut"], options["num_threads"]) == (50, 8, 1)
    evaluate = ("evaluate", "--data", work / "data", "--model", masked_lm, "--json", "--index")
    exact = measured(call(*evaluate, work / "index"))
    near = measured(call(*evaluate, tmp_path / "s", "--heap-factor", "0", "--query-cut", "64"))
    assert near["measures"].keys() == exact["measures"].keys()
    encode = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        work / "data",
        "--output",
        tmp_path / "long",
        "--top-k",
        "300",
    )
    assert call(*encode).code == 0
    long = (
        "index",
        "--vectors",
        tmp_path / "long",
        "--output",
        tmp_path / "l",
        "--backend",
        "seismic",
    )
    assert (
        "terms per document are many for seismic"
        in call(*long, "--n-postings", "20", "--threads", "1").err
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_commands_that_combine_options_run(
    call: Call,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("small", "my-collection"):
        small_collection().save_beir(tmp_path / name)
    Path("new-documents.jsonl").write_text('{"_id": "new", "text": "kettles"}', encoding="utf-8")
    Path("gone.txt").write_text("d1", encoding="utf-8")
    write_articles()
    Path("queries.txt").write_text("how do I work with sockets\n", encoding="utf-8")
    Path("topics.trec").write_text(
        "<top><num>7</num><title>sockets</title></top>",
        encoding="utf-8",
    )
    for words in commands_of("options"):
        words, given = (words[:-2], words[-1]) if "<" in words else (words, None)  # noqa: PLW2901
        monkeypatch.setattr(
            "sys.stdin",
            io.StringIO(Path(given).read_text(encoding="utf-8") if given else ""),
        )
        small = [{"pydocs": "small"}.get(word, word) for word in words]
        if words[0] == "train":
            small += ["--model", masked_lm, "--steps", "1", "--batch-size", "2"]
        outcome = call(*small)
        assert outcome.code == 0, (words, outcome.err)


QUERY = "how do I work with csv files"


def test_search_explains_queries_after_feedback(
    call: Call,
    work: Path,
    masked_lm: str,
    shared: Path,
) -> None:
    vectors = r.read_vectors(work / "words")
    index, encoder = r.load_index(work / "index-of-words"), load_encoder(masked_lm)
    queries = r.encode_queries(encoder, {"query": QUERY}, top_k=4)
    run = r.hits_to_run(queries, index.search(queries, 10))
    expanded = r.expand_sparse(queries, vectors, run, r.Feedback("average", 2, top_terms=40))
    expected = r.hits_to_run(expanded, index.search(expanded, 10))["query"]
    folder_options = (
        "--index",
        work / "index-of-words",
        "--model",
        masked_lm,
        "--vectors",
        work / "words",
    )
    arguments = (
        "search",
        QUERY,
        *folder_options,
        "--prf",
        "average",
        "--prf-depth",
        "2",
        "--prf-terms",
        "40",
        "--query-top-k",
        "4",
    )
    hits = measured(call(*arguments, "--json"))["hits"]
    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(expected)
    own = set(encoder.tokenizer.convert_ids_to_tokens(queries.row(0)[0].tolist()))
    for hit in hits:  # no special token is stored, so that the terms are the whole score
        assert sum(term["contribution"] for term in hit["terms"]) == pytest.approx(
            hit["score"],
            rel=1e-5,
        )
        assert sum(term["share"] for term in hit["terms"]) == pytest.approx(1, rel=1e-5)
        assert all(term["feedback"] == (term["term"] not in own) for term in hit["terms"])
    added = [term["term"] for term in hits[0]["terms"][:6] if term["feedback"]]
    shown = call(*arguments)
    assert added and shown.code == 0 and all(f"+{term}" in shown.out for term in added)
    mixed = ("--prf", "rocchio", "--prf-with", shared / "bm25", "--prf-weight", "0.9", "--json")
    hits = measured(call("search", QUERY, *folder_options, *mixed, "--k", "3"))["hits"]
    assert hits[0]["id"] == "d0" and hits[0]["score"] == pytest.approx(1, abs=0.1), (
        "normalised scores, not products"
    )
    assert sum(term["share"] for term in hits[0]["terms"]) == pytest.approx(1, rel=1e-5)
    late = call("search", QUERY, *folder_options, *mixed, "--prf-place", "before", "--k", "3")
    assert measured(late)["hits"][0]["score"] > 1, "the last ranking is not interpolated"


def test_evaluate_with_feedback_from_words_is_the_python_functions(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    collection = small_collection()
    index, queries = r.BM25Index.build(collection.contents()), collection.split_queries("test")
    vectors, asked = index.document_vectors(), index.query_vectors(collection.split_queries("test"))
    exact = r.build_index(vectors)
    rocchio = r.Feedback("rocchio", 2, alpha=0.9, beta=0.3, gamma=0.1, bottom=2)
    expanded = r.expand_sparse(asked, vectors, index.search(queries, 1000), rocchio)
    expected = r.hits_to_run(expanded, exact.search(expanded, 100))
    options = {"depth": 2, "alpha": 0.9, "beta": 0.3, "gamma": 0.1, "bottom": 2}
    given = [word for name, value in options.items() for word in (f"--prf-{name}", str(value))]
    command = (
        "evaluate",
        "--data",
        shared / "data",
        "--index",
        shared / "bm25",
        "--prf",
        "rocchio",
        *given,
    )
    measures = call(*command, "--save-run", tmp_path / "run.trec", "--json")
    found = measured(measures)
    assert found["measures"] == pytest.approx(r.evaluate(expected, collection.qrels["test"]))
    without = r.evaluate(index.search(queries, 100), collection.qrels["test"])["nDCG@10"]
    change = found["feedback"]["test"]["difference"]["mean"]
    assert change == pytest.approx(found["measures"]["nDCG@10"] - without, abs=1e-9)
    assert f"test: feedback changes nDCG@10 by {change:+.4f} (p" in measures.err
    saved = r.read_trec_run(tmp_path / "run.trec")
    assert {query: pytest.approx(scores, rel=1e-5) for query, scores in expected.items()} == saved
    again = measured(
        call("evaluate", "--data", shared / "data", "--run", tmp_path / "run.trec", "--json"),
    )
    assert again["measures"] == found["measures"], (
        "the saved run carries the fingerprint of its texts"
    )
    collection.documents = dict(list(collection.documents.items())[1:])
    r.BM25Index.build(collection.contents()).save(tmp_path / "other")
    fails(call(*command[:7], "--prf-with", tmp_path / "other"), 1, "was made from other documents")


def test_evaluate_with_dense_feedback_is_the_python_functions(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    collection, model = small_collection(), load_model("minilm", kinds=("dense",))[0]
    texts, queries = collection.contents(), collection.split_queries("test")
    index, asked = r.encoded_index(model, texts), r.encode_dense(model, queries, kind="query")

    def search(vectors_of_queries: Any) -> Any:
        actual = zip(queries, index.search(vectors_of_queries, 1000), strict=True)
        return {query: {hit.id: hit.score for hit in hits} for query, hits in actual}

    def again(basis: Any) -> Any:
        return search(
            r.expand_dense(
                asked,
                list(queries),
                index.vectors(texts),
                list(texts),
                basis,
                r.Feedback(),
            ),
        )

    second, mix = r.read_trec_run(shared / "bm25.trec"), r.Interpolation("both", 0.3)
    expected = r.with_feedback(search(asked), again, 1000, second, mix)
    command = (
        "evaluate",
        "--data",
        shared / "data",
        "--model",
        "minilm",
        "--prf",
        "average",
        "--prf-with",
        shared / "bm25.trec",
        "--prf-weight",
        "0.3",
        "--save-run",
        tmp_path / "run.trec",
        "--json",
    )
    assert measured(call(*command))["measures"] == pytest.approx(
        r.evaluate(expected, collection.qrels["test"]),
    )
    for query, scores in r.read_trec_run(tmp_path / "run.trec").items():
        assert scores == pytest.approx(expected[query], abs=1e-6)
