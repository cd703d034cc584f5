"""BM25, dense retrieval, fusion and interpolated reranking from the shell, with the numbers of the Python functions."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import run_cli
from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.recipes.backbone import load_dense_minilm
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.tuning import choose_weights

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
MEASURES = ("nDCG@10", "RR@10")


def with_dev() -> Collection:
    """The small collection with four of its training queries as a split of their own."""
    collection = small_collection()
    train = collection.qrels["train"]
    names = list(train)
    collection.qrels = {
        "train": {name: train[name] for name in names[:8]},
        "dev": {name: train[name] for name in names[8:]},
        "test": collection.qrels["test"],
    }
    return collection


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """BM25 and dense runs of two splits, made by the program, with the shared index and token vectors."""
    folder = tmp_path_factory.mktemp("by-hand")
    with_dev().save_beir(folder / "data")
    data = ("--data", folder / "data")
    splits = ("--split", "test", "--split", "dev", "--k", "8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for step in (
            ("index", "--backend", "bm25", *data, "--output", folder / "bm25", "--k1", "0.9"),
            ("evaluate", *data, *splits, "--index", folder / "bm25", "--save-run", folder / "bm25.trec"),
            ("evaluate", *data, *splits, "--model", "minilm", "--save-run", folder / "dense.trec"),
        ):
            assert run_cli(*step) == 0, step
    for name in ("vectors", "index", "tokens"):
        (folder / name).symlink_to(shared / name)
    return folder


def measured(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_bm25_and_dense_runs_are_those_of_the_python_functions(call: Any, work: Path) -> None:
    collection = with_dev()
    queries = collection.split_queries("test") | collection.split_queries("dev")
    expected = r.BM25Index.build(collection.contents(), k1=0.9).search(queries, 8)
    assert r.read_trec_run(work / "bm25.trec") == expected
    dense = r.dense_run(load_dense_minilm(), collection.contents(), queries, 8)
    found = r.read_trec_run(work / "dense.trec")
    # the program encodes in bf16 where the hardware has it: 8 bits of cosines
    assert {q: pytest.approx(dict(scores), abs=2**-6) for q, scores in found.items()} == {
        q: {name: dense[q].get(name, score) for name, score in found[q].items()} for q in found
    }
    for name in ("bm25", "dense"):
        both = measured(call("evaluate", "--data", work / "data", "--run", work / f"{name}.trec", "--split", "dev",
                             "--split", "test", "--json"))  # fmt: skip
        assert list(both["splits"]) == ["dev", "test"]
        assert both["measures"] == both["splits"]["dev"]
        assert both["splits"]["test"] == r.evaluate(r.read_trec_run(work / f"{name}.trec"), collection.qrels["test"])


def test_search_answers_from_words_without_a_model(call: Any, work: Path, masked_lm: str) -> None:
    place = ("--index", work / "bm25")
    hits = measured(call("search", "random numbers", *place, "--data", work / "data", "--json"))["hits"]
    assert (hits[0]["id"], hits[0]["title"], hits[0]["terms"]) == ("d8", "module8", [])
    reranked = call("search", "random numbers", *place, "--rerank", work / "tokens", "--rerank-weight", "0.1", "--json")
    assert measured(reranked)["hits"][0]["first"]["rank"] >= 1


def test_fused_runs_and_chosen_weights_are_those_of_the_python_functions(call: Any, work: Path, tmp_path: Path) -> None:
    collection = with_dev()
    runs = [r.read_trec_run(work / f"{name}.trec") for name in ("bm25", "dense")]
    qrels = collection.qrels
    fuse = ("fuse", "--run", work / "bm25.trec", "--run", work / "dense.trec")
    data = ("--data", work / "data", "--measure", MEASURES[0], "--measure", MEASURES[1], "--json")
    assert measured(call(*fuse, *data))["measures"] == r.evaluate(
        r.reciprocal_rank_fusion(runs), qrels["test"], MEASURES
    )
    weights, _ = choose_weights(runs, qrels["dev"])
    tuned = measured(call(*fuse, *data, "--method", "interpolation", "--tune", "dev", "--save-run", tmp_path / "f"))
    assert tuned["weights"] == list(weights)
    assert tuned["measures"] == r.evaluate(r.interpolate(runs, weights), qrels["test"], MEASURES)
    given = [part for weight in weights for part in ("--weight", str(weight))]
    assert measured(call(*fuse, *data, "--method", "interpolation", *given))["measures"] == tuned["measures"]
    again = call("evaluate", "--data", work / "data", "--run", tmp_path / "f", "--measure", "nDCG@10", "--json")
    assert measured(again)["measures"]["nDCG@10"] == tuned["measures"]["nDCG@10"]
    assert call(*fuse, "--save-run", tmp_path / "g").code == 0  # no collection is needed to write it
    shown = call(*fuse, *data[:-1], "--method", "interpolation", "--tune", "dev")
    assert "weights: " in shown.out and "nDCG@10" in shown.out


def test_interpolated_reranking_is_that_of_the_python_functions(
    call: Any, work: Path, masked_lm: str, tmp_path: Path
) -> None:
    whole_run = ("--data", work / "data", "--index", work / "index", "--model", masked_lm, "--json")
    places = (*whole_run, "--k", "8")
    late = ("--rerank", work / "tokens", "--rerank-depth", "4")
    first, dropped, mixed = (tmp_path / name for name in ("first", "dropped", "mixed"))
    assert call("evaluate", *places, "--save-run", first).code == 0
    assert call("evaluate", *places, *late, "--rerank-tail", "drop", "--save-run", dropped).code == 0
    assert call("evaluate", *places, *late, "--rerank-weight", "0.3", "--save-run", mixed).code == 0
    plain, reranked, found = (r.read_trec_run(path) for path in (first, dropped, mixed))
    assert {len(scores) for scores in reranked.values()} == {4}
    whole = measured(call("evaluate", *whole_run, "--k", "16", "--save-run", tmp_path / "whole"))
    assert whole["collection"] == "data"
    # 100 candidates are there for recall@100, so that the floor of the first scores is that of all 16
    expected = r.interpolate([r.read_trec_run(tmp_path / "whole"), reranked], [0.7, 0.3], k=8)
    assert {q: pytest.approx(scores, rel=1e-6, abs=1e-6) for q, scores in found.items()} == expected
    assert found.keys() == plain.keys()


def test_seismic_takes_its_options_and_is_advised_against_where_it_loses(
    call: Any, work: Path, masked_lm: str, tmp_path: Path
) -> None:
    build = ("index", "--vectors", work / "vectors", "--output", tmp_path / "s", "--backend", "seismic")
    built = call(*build, "--n-postings", "50", "--doc-cut", "8", "--threads", "1", "--json")
    assert built.code == 0, built.err
    assert "16 documents are few for seismic" in built.err
    options = json.loads((tmp_path / "s" / "index.json").read_text())["options"]
    assert (options["n_postings"], options["doc_cut"], options["num_threads"]) == (50, 8, 1)
    place = ("--data", work / "data", "--index", tmp_path / "s", "--model", masked_lm, "--json")
    exact = measured(
        call("evaluate", "--data", work / "data", "--index", work / "index", "--model", masked_lm, "--json")
    )
    near = measured(call("evaluate", *place, "--heap-factor", "0", "--query-cut", "64"))
    assert near["measures"].keys() == exact["measures"].keys()
    encode = ("encode", "--model", masked_lm, "--data", work / "data", "--output", tmp_path / "long", "--top-k", "300")
    assert call(*encode).code == 0
    long = ("index", "--vectors", tmp_path / "long", "--output", tmp_path / "l", "--backend", "seismic")
    advised = call(*long, "--n-postings", "20", "--threads", "1")
    assert "terms per document are many for seismic" in advised.err


def walk_through() -> list[list[str]]:
    """The commands of docs/cli.md from a collection to late interaction, as words; a server, which does not end, has
    tests of its own."""
    text = DOCS.read_text(encoding="utf-8")
    part = text[text.index("## From a collection to nDCG") : text.index("## bench")]
    blocks = re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[1] != "serve"]


@pytest.mark.filterwarnings("ignore")
def test_the_walk_through_of_the_documents_runs_from_its_first_line_to_its_last(
    call: Any, masked_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    small_collection().save_beir(tmp_path / "small")
    commands = walk_through()
    assert len(commands) > 15
    Path("queries.txt").write_text("how do I work with sockets\n", encoding="utf-8")
    Path("topics.trec").write_text("<top><num>7</num><title>sockets</title></top>", encoding="utf-8")
    for words in commands:
        words, given = (words[:-2], words[-1]) if "<" in words else (words, None)  # noqa: PLW2901
        monkeypatch.setattr("sys.stdin", io.StringIO(Path(given).read_text(encoding="utf-8") if given else ""))
        small = [{"pydocs": "small"}.get(word, word) for word in words]
        if words[0] == "train":
            small += ["--model", masked_lm, "--steps", "1", "--batch-size", "2"]
        outcome = call(*small)
        assert outcome.code == 0, (words, outcome.err)
