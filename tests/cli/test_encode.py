"""``tilefold encode`` in several processes, on Ray and as a dry run; ``export``; ``mine`` and
``score``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import programs
from tests.cli.program import Call, done, fails, measured, run_cli, run_steps
from tests.inside import load_encoder, ranks
from tests.recipes.small import small_collection, tiny_masked_lm
from tests.retrieval.training_data.test_teachers import reranker
from tilefold import retrieval as r
from tilefold._internal.precision import gpu_has_bf16
from tilefold.recipes import RECIPES
from tilefold.retrieval import SparseVectors, read_vectors, write_vectors
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.training_data import teachers
from tilefold.retrieval.training_data.mining import (
    FalseNegatives,
    Window,
    drop_false_negatives,
    mine_negatives,
)
from tilefold.retrieval.training_data.teachers import ensemble


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_processes_write_what_one_writes_and_say_it_once(tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"_id": f"d{i}", "text": "cats sleep " * (i % 5 + 1)}) for i in range(20)
        ),
    )
    arguments = (
        "encode",
        "--model",
        "minilm",
        "--data",
        data,
        "--shard-size",
        "4",
        "--top-k",
        "16",
        "--json",
    )
    assert run_cli(*arguments, "--output", tmp_path / "one") == 0
    done = programs.run(
        "-m",
        "tilefold.cli",
        *arguments,
        "--output",
        tmp_path / "two",
        "--devices",
        "2",
    )
    assert done.returncode == 0, done.stderr
    # Only rank 0 prints in which dtype its model computes.
    assert len(done.stderr.splitlines()) == 1
    assert "minilm computes in" in done.stderr
    message = json.loads(done.stdout)
    assert (message["n"], message["shards"]) == (20, 5)
    one, two = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


def test_numbers_of_devices_that_make_no_sense_are_refused(
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    data = ("--data", tmp_path / "data")
    arguments = ("encode", *data, "--model", "minilm", "--output", tmp_path / "v", "--devices")
    for devices in ("0", "none", "1.5"):
        assert run_cli(*arguments, devices) == 2
        gpus = torch.cuda.device_count()
        most = f"from 1 to {gpus}, the GPUs of this machine" if gpus else "1 or more"
        error = f"--devices: expected 'all' or a whole number, {most}, got '{devices}'"
        assert error in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert run_cli(*arguments, "2") == 2 and "leave --devices out" in capsys.readouterr().err


FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
print("broken", file=sys.stderr)
sys.exit(3)
"""


def test_what_a_later_rank_says_is_shown(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.2)
    assert ranks.run_ranks([sys.executable, "-c", FAILS], 2) == 3
    assert capfd.readouterr().err.count("broken") == 1


def test_ranks_that_do_not_notice_a_kill_are_ended(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_KILLED_SECONDS", 0.2)
    assert (
        ranks.run_ranks(
            [sys.executable, "-c", FAILS.replace("sys.exit(3)", "os.kill(os.getpid(), 9)")],
            2,
        )
        == 1
    )
    assert (
        "Error: rank 1 was ended by signal 9. Run the same command again" in capfd.readouterr().err
    )


def test_a_rank_that_fails_does_not_wait_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "RAYON_NUM_THREADS": "1",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **_: calls.append(backend),
    )
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("ended"))
    with pytest.raises(ValueError, match=r"^mine$"), ranks.join_ranks(training=True):
        raise ValueError("mine")
    assert calls == ["cpu:gloo,cuda:nccl"]
    with ranks.join_ranks(training=True):
        pass
    assert calls[1:] == ["cpu:gloo,cuda:nccl", "ended"]


def test_a_dry_run_says_all_that_a_run_writes(
    call: Call,
    masked_lm: str,
    shared: Path,
    tmp_path: Path,
) -> None:
    folder_options = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        shared / "data",
        "--output",
        tmp_path / "v",
    )
    arguments = (*folder_options, "--shard-size", "5", "--dry-run")
    printed = call(*arguments)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu with"
    assert printed.code == 0 and "16 texts in 4 shards of 5" in printed.out
    assert (
        "with 1 worker (" in printed.out
        and f"measured on this {where}" in printed.out
        and "assumed:" in printed.out
    )
    measures = measured(
        call(*arguments, "--json", "--engine", "ray", "--workers", "8", "--rate", "2")
    )
    assert (measures["texts"], measures["shards"], measures["workers"]) == (16, 4, 8)
    assert (
        measures["hours"] == pytest.approx(16 / (2 * 8) / 3600)
        and measures["rate_from"] == "given with --rate"
    )
    assert (
        measures["tokens"] == round(measures["tokens_per_text"] * 16)
        and 8 < measures["tokens_per_text"] < 30
    )
    assert measures["gigabytes"] == pytest.approx(measures["bytes_per_text"] * 16 / 1e9)
    assert (
        "4 texts in 1 shards"
        in call(*folder_options, "--queries", "--split", "test", "--dry-run").out
    )
    assert not (tmp_path / "v").exists()
    finished = call(*folder_options).out
    assert "16 vectors" in finished and "not encoded" not in finished
    index_command = f"next: tilefold index --vectors {tmp_path / 'v'} --data "
    assert index_command in finished, "with --data, the index stores the metadata"
    assert measured(call(*folder_options, "--json"))["texts"] == 16
    assert (
        json.loads((tmp_path / "v" / "manifest.json").read_text(encoding="utf-8"))["n_texts"] == 16
    )
    written = sum(file.stat().st_size for file in (tmp_path / "v").glob("*.parquet"))
    assert written / 16 == pytest.approx(measures["bytes_per_text"], rel=0.01), (
        "all texts are in the sample"
    )


def test_a_dry_run_leaves_texts_out_that_the_tokenizer_refuses(
    call: Call,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    rows = [
        {"_id": f"d{number}", "title": "", "text": f"cats sleep {number}"} for number in range(3)
    ]
    rows.insert(1, {"_id": "half", "title": "", "text": "half a character \ud800"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        tmp_path / "rows.jsonl",
        "--output",
        "v",
        "--dry-run",
    )
    printed = done(call(*arguments))
    assert (
        "4 texts in 1 shards" in printed.out
        and "a sample of 3; the tokenizer refused 1 more" in printed.out
    )
    assert measured(call(*arguments, "--json"))["refused_texts"] == 1
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]))
    fails(
        call(*arguments),
        1,
        "--data: the tokenizer refuses all 1 texts of the sample (TextEncodeInput",
    )


def test_a_missing_cluster_is_said(
    call: Call,
    masked_lm: str,
    shared: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    pytest.importorskip("ray")
    arguments = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        shared / "data",
        "--output",
        tmp_path / "v",
        "--engine",
        "ray",
    )
    fails(call(*arguments, "--address", "nowhere"), 2, "--address: expected host:port")
    monkeypatch.setitem(sys.modules, "ray.data", None)
    fails(call(*arguments), 1, "pip install 'tilefold[ray]'")
    assert not (tmp_path / "v").exists()


def test_documents_are_exported_with_tokens_and_texts(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    folder_options = (
        "--vectors",
        shared / "vectors",
        "--model",
        masked_lm,
        "--data",
        shared / "data",
    )
    vespa = ("--to", "vespa", "--output", tmp_path / "vespa", "--document", "article", "--json")
    vectors, report = (
        read_vectors(shared / "vectors"),
        measured(call("export", *vespa, *folder_options)),
    )
    assert (report["n_documents"], report["n_weights"]) == (len(vectors), len(vectors.data))
    assert report["files"] == ["article.sd", "feed.jsonl"]
    puts = [
        json.loads(line) for line in (tmp_path / "vespa" / "feed.jsonl").read_bytes().splitlines()
    ]
    assert [put["put"] for put in puts] == [f"id:tilefold:article::{name}" for name in vectors.ids]
    assert puts[0]["fields"]["text"] == small_collection().contents()[vectors.ids[0]]
    output = done(
        call(
            "export",
            "--to",
            "opensearch",
            *folder_options,
            "--output",
            tmp_path / "bulk",
            "--dots",
            "keep",
        ),
    )
    assert f"{len(vectors)} documents written for opensearch" in output.out
    source = json.loads((tmp_path / "bulk" / "bulk-00000.ndjson").read_bytes().splitlines()[1])
    assert {
        "id": vectors.ids[0],
        "sparse": puts[0]["fields"]["sparse"]["cells"],
    }.items() <= source.items()


def test_export_refuses_what_does_not_belong_together(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    here = ("--vectors", shared / "vectors", "--output", tmp_path / "out")
    wrong = {
        ("--to", "lucene"): "--to: expected one of opensearch, vespa, onnx, got 'lucene'",
        ("--to", "vespa"): "--model: give the model that made the vectors, or --names numbers",
        ("--to", "vespa", "--dots", "keep"): "--dots requires --to opensearch",
        (
            "--to",
            "vespa",
            "--names",
            "words",
        ): "--names: expected one of tokens, numbers, got 'words'",
        ("--to", "vespa", "--names", "numbers", "--field", "a.b"): "--field: expected letters",
        (
            "--to",
            "opensearch",
            "--names",
            "tokens",
            "--field-type",
            "sparse_vector",
        ): "sparse_vector are numbers",
        (
            "--to",
            "opensearch",
            "--model",
            masked_lm,
            "--dots",
            "x",
        ): "--dots: expected one of refuse, keep, got 'x'",
        (
            "--to",
            "opensearch",
            "--names",
            "numbers",
            "--dots",
            "keep",
        ): "--dots has no effect if terms are named",
    }
    for options, message in wrong.items():
        fails(call("export", *options, *here), 2, message)
    other: Any = small_collection()
    other.documents.popitem()
    other.save_beir(tmp_path / "other")
    numbered = ("export", "--to", "vespa", "--names", "numbers", *here)
    fails(call(*numbered, "--data", tmp_path / "other"), 1, "made from other documents than those")
    write_vectors(SparseVectors.from_rows({"a": {1012: 1.0}}, 30522), tmp_path / "dotted")
    out = ("--output", tmp_path / "out")
    dotted = (
        "export",
        "--to",
        "opensearch",
        "--vectors",
        tmp_path / "dotted",
        *out,
        "--model",
        "minilm",
    )
    fails(
        call(*dotted),
        1,
        "holds a dot, got '.' (term 1012). Name terms by their numbers: tokens=None, or --names",
    )
    write_vectors(SparseVectors.from_rows({"a": {7: 1.0}}, 30522, "0" * 64), tmp_path / "foreign")
    foreign = (
        "export",
        "--to",
        "vespa",
        "--vectors",
        tmp_path / "foreign",
        *out,
        "--model",
        masked_lm,
    )
    fails(call(*foreign), 1, "(fingerprint 000000000000), got that of")
    assert not (tmp_path / "out").exists()
    done(call("export", "--to", "opensearch", "--field-type", "sparse_vector", *here))


def test_vectors_are_mined_as_by_python_functions(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    output, collection = tmp_path / "negatives.parquet", small_collection()
    folder_options = (
        "--data",
        shared / "data",
        "--vectors",
        shared / "vectors",
        "--model",
        masked_lm,
        "--seed",
        "3",
    )
    ranks = ("--ranks", "1-4", "--per-query", "2", "--ranks", "1-16", "--per-query", "3")
    measures = measured(call("mine", *folder_options, *ranks, "--output", output, "--json"))
    assert (
        measures["queries"],
        measures["relevant"],
        measures["negatives"],
        measures["queries_short"],
    ) == (
        12,
        12,
        60,
        0,
    )
    index = r.build_index(r.read_vectors(shared / "vectors"))
    queries = r.encode_queries(load_encoder(masked_lm), collection.split_queries("train"))
    run = r.hits_to_run(queries, index.search(queries, 16))
    expected = mine_negatives(
        run.items(),
        collection,
        "train",
        [Window(1, 4, 2), Window(1, 16, 3)],
        seed=3,
    ).rows({})
    rows = r.read_training_rows(output)
    assert [group.documents for group in rows.groups()] == [
        group.documents for group in expected.groups()
    ]
    np.testing.assert_array_equal(rows.rank, expected.rank)
    rows.check_collection(collection)
    assert rows.provenance == index.provenance
    assert rows.made_by["queries_sha256"] == texts_digest(collection.split_queries("train"))
    assert rows.made_by["windows"] == [[1, 4, 2], [1, 16, 3]] and rows.made_by["seed"] == 3
    assert rows.made_by["retriever"] == f"--vectors {shared / 'vectors'}"


def test_a_run_a_bm25_index_and_a_dense_model_are_mined(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    collection, output = small_collection(), tmp_path / "negatives.parquet"
    data = ("--data", shared / "data", "--output", output, "--ranks", "1-3", "--per-query", "2")
    every = {}
    for name, source in (
        ("run", shared / "bm25.trec"),
        ("index", shared / "bm25"),
        ("model", "minilm"),
    ):
        outcome = call("mine", *data, "--overwrite", f"--{name}", source)
        if (
            name == "model"
        ):  # the words of two documents are in no other: nothing to draw for most queries
            assert outcome.code == 0 and "24 negatives for 12 queries" in outcome.out, outcome.err
            assert f"next: tilefold score {output}" in outcome.out
        else:
            assert (
                outcome.code == 0 and "queries have no negative and are left out" in outcome.err
            ), outcome.err
        every[name] = [
            (group.query, group.documents) for group in r.read_training_rows(output).groups()
        ]
    assert every["run"] == every["index"]
    for query, documents in every["model"]:
        assert set(documents) & set(collection.qrels["train"][query]) == {documents[0]}


def test_possible_false_negatives_are_left_out_by_option(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    command = (
        "mine",
        "--data",
        shared / "data",
        "--model",
        "minilm",
        "--output",
        tmp_path / "negatives.parquet",
    )
    measures = measured(call(*command, "--max-score-share", "0.6", "--json"))
    rows = r.read_training_rows(tmp_path / "negatives.parquet")
    assert measures["left_out_by_score"] > 0 and rows.made_by["max_score_share"] == 0.6
    for group in rows.groups():
        assert group.retrieved[~group.relevant].max() <= 0.6 * group.retrieved[group.relevant].max()
    again = (*command, "--overwrite")
    fails(call(*again, "--margin", "5"), 1, "there is no negative for any query")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, negatives mined with minilm, and a small reranker."""
    folder = tmp_path_factory.mktemp("score")
    small_collection().save_beir(folder / "data")
    reranker(folder / "reranker")
    mined = ("--model", "minilm", "--per-query", "4", "--output", folder / "mined.parquet")
    run_steps(("mine", "--data", folder / "data", *mined))
    return folder


def test_teachers_and_their_ensemble_are_written_and_more_can_be_added(
    call: Call,
    work: Path,
) -> None:
    data, output = ("--data", work / "data"), work / "scored.parquet"
    measures = measured(
        call(
            "score",
            work / "mined.parquet",
            *data,
            "--teacher",
            "bm25",
            "--teacher",
            work / "reranker",
            "--output",
            output,
            "--json",
        ),
    )
    assert (measures["rows"], measures["teachers"]) == (60, ["bm25", "reranker"])
    mined, rows = r.read_training_rows(work / "mined.parquet"), r.read_training_rows(output)
    np.testing.assert_array_equal(rows.retrieved, mined.retrieved)
    run = r.BM25Index.build(small_collection().contents()).search(small_collection().queries, 16)
    own = [run[group.query].get(name, 0.0) for group in rows.groups() for name in group.documents]
    np.testing.assert_allclose(rows.teachers["bm25"], own, rtol=1e-5)
    assert rows.target is not None
    np.testing.assert_allclose(rows.target, ensemble(rows, rows.teachers), rtol=1e-6)
    assert rows.target.max() <= 30 and rows.target.min() == 0
    assert (
        rows.made_by["teachers"].keys() == {"bm25", "reranker"} and rows.made_by["split"] == "train"
    )
    made_by = rows.made_by["teachers"]
    assert made_by["reranker"]["precision"] == ("bf16" if gpu_has_bf16() else "fp32")
    assert "precision" not in made_by["bm25"]
    scores = torch.tensor(rows.teachers["reranker"])
    assert (scores != scores.bfloat16().float()).float().mean() > 0.9
    rows.check_collection(small_collection())
    more = (
        "--teacher",
        "minilm",
        "--like",
        "minilm",
        "--max-score-share",
        "0.7",
        "--output",
        work / "more.parquet",
    )
    added = done(call("score", output, *data, *more))
    assert "rows were dropped" in added.err and "scored by bm25, reranker, minilm" in added.out
    three = r.read_training_rows(work / "more.parquet")
    assert list(three.teachers) == ["bm25", "reranker", "minilm"]
    full = r.TrainingRows(**vars(rows) | {"teachers": rows.teachers | {"minilm": mined.retrieved}})
    full.target = ensemble(full, full.teachers, like="minilm")
    left = drop_false_negatives(full, FalseNegatives(max_share=0.7))
    assert [group.documents for group in three.groups()] == [
        group.documents for group in left.groups()
    ]
    np.testing.assert_allclose(
        three.target,
        left.target,
        atol=2**-5,
    )  # minilm mined and scores in batches of its own
    assert not list(work.glob(".*scoring")), "what was kept is removed when the file is written"


def test_an_interrupted_command_goes_on(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    from sentence_transformers import CrossEncoder

    monkeypatch.setattr(teachers, "PAIRS_PER_SHARD", 16)
    stock, calls = CrossEncoder.predict, []

    def predict(self: Any, pairs: Any, **options: Any) -> Any:
        calls.append(len(pairs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stock(self, pairs, **options)

    monkeypatch.setattr(CrossEncoder, "predict", predict)
    command = (
        "score",
        work / "mined.parquet",
        "--data",
        work / "data",
        "--teacher",
        work / "reranker",
        "--output",
        tmp_path / "scored.parquet",
    )
    stopped = call(*command)
    assert (
        stopped.code == 130 and "Finished work is kept: run the same command again" in stopped.err
    )
    assert not (tmp_path / "scored.parquet").exists()
    assert call(*command).code == 0 and calls == [16, 16, 16, 16, 12], (
        "two of the four parts were kept"
    )
    assert call(*command, "--fresh", "--overwrite").code == 0 and calls[5:] == [16, 16, 16, 12]


def test_a_length_limit_is_that_of_the_models(call: Call, work: Path, tmp_path: Path) -> None:
    command = (
        "score",
        work / "mined.parquet",
        "--data",
        work / "data",
        "--output",
        tmp_path / "scored.parquet",
        "--overwrite",
    )
    results = []
    for length in ("6", "64"):
        assert call(*command, "--teacher", work / "reranker", "--max-length", length).code == 0
        results.append(r.read_training_rows(tmp_path / "scored.parquet").teachers["reranker"])
    assert np.abs(results[0] - results[1]).max() > 0.01
    r.BM25Index.build(small_collection().contents()).save(tmp_path / "bm25")
    assert call(*command, "--teacher", tmp_path / "bm25").code == 0, (
        "the folder of an index is a teacher"
    )


def test_rows_of_another_collection_and_no_rows_are_refused(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    other = small_collection()
    other.documents["d0"] = r.Document("d0", "", "another text")
    other.save_beir(tmp_path / "other")
    command = (
        "--teacher",
        "bm25",
        "--output",
        tmp_path / "x.parquet",
        "--data",
        tmp_path / "other",
    )
    fails(
        call("score", work / "mined.parquet", *command),
        1,
        "made from other documents than those of other",
    )
    fails(call("score", tmp_path / "none.parquet", *command), 1, "Create one with: tilefold mine")


def test_what_needs_no_download_is_suggested(
    call: Call,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = tmp_path / "hub" / "models--some--reranker" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    drawn = (
        "mine",
        "--data",
        shared / "data",
        "--run",
        shared / "bm25.trec",
        "--output",
        tmp_path / "m.parquet",
    )
    out = done(call(*drawn)).out
    (following,) = [
        line.removeprefix("next: tilefold ")
        for line in out.splitlines()
        if line.startswith("next: ")
    ]
    assert "(in the cache of this machine: some/reranker)" in out
    done(
        call(
            *(
                str(tmp_path / "s.parquet") if word == "scored.parquet" else word
                for word in following.split()
            ),
        ),
    )
    assert r.read_training_rows(tmp_path / "s.parquet").teachers.keys() == {"minilm", "bm25"}
    fails(
        call("mine", "--data", shared / "data", "--output", tmp_path / "n.parquet"),
        2,
        "--model such as minilm, which needs",
    )


def test_recipes_are_listed_with_what_they_need_and_what_their_papers_report(call: Call) -> None:
    table = done(call("recipes"))
    assert all(name in table.out for name in RECIPES)
    listed = measured(call("recipes", "--json"))
    assert [entry["name"] for entry in listed] == list(RECIPES)
    assert all(entry["publishes"] and entry["summary"] and entry["published"] for entry in listed)
    one = measured(call("recipes", "splade-v3", "--json"))
    assert one["needs"] == ["pairs", "negatives", "scores"] and one["recipe"]["negatives"] == 8


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_of_a_recipe_says_what_each_field_does_and_the_command_that_changes_it(
    call: Call,
    name: str,
) -> None:
    page, entry = done(call("recipes", name)).out, RECIPES[name]
    assert entry.summary in page and entry.publishes in page
    fields = dict(re.findall(r"^(\w[\w.]*) = (.*)\n    \S", page, re.MULTILINE))
    for field, value in entry.recipe.to_dict().items():
        inside = (
            {f"{field}.{part}" for part in value}
            if isinstance(value, dict) and field != "loss"
            else {field}
        )
        assert inside & fields.keys() or field == "name", (
            f"{field} has no line, or nothing is said of it"
        )
    assert fields["learning_rate"].endswith("(--lr)") and "warmup_ratio" in fields
    commands = [line.split() for line in page.splitlines() if line.startswith("tilefold ")]
    verbs = ["index", "mine", "score"][: len(entry.needs)] if "negatives" in entry.needs else []
    assert [words[1] for words in commands] == [*verbs, "train"]


def test_options_and_fields_reach_the_recipe(call: Call, shared: Path, tmp_path: Path) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    arguments = (
        "--steps",
        "1",
        "--batch-size",
        "4",
        "--max-length",
        "24",
        "--regularizer",
        "0.5",
        "--fp32",
    )
    folder_options = ("--data", shared / "data", "--model", model, "--output", tmp_path / "m")
    asked = ("train", "--recipe", "splade-doc", *folder_options, *arguments)
    output = done(
        call(
            *asked,
            "--set",
            "document.pooling=sum",
            "--set",
            "document_regularizer.threshold=3",
            "--json",
        ),
    )
    recipe = json.loads((tmp_path / "m/tilefold_training.json").read_text())["settings"]["recipe"]
    assert (recipe["query"]["kind"], recipe["document"]["pooling"]) == ("binary", "sum")
    assert recipe["query_regularizer"]["weight"] == 0.0  # there is none, and no weight makes one
    assert (
        recipe["document_regularizer"]["weight"] == 0.5
        and recipe["document_regularizer"]["threshold"] == 3
    )
    assert "warning: document vectors have" in output.err


def test_what_mine_and_score_write_is_what_training_reads(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    mined, scored = shared / "mined.parquet", tmp_path / "scored.parquet"
    assert (
        call(
            "score",
            mined,
            "--data",
            shared / "data",
            "--teacher",
            "bm25",
            "--output",
            scored,
        ).code
        == 0
    )
    arguments = (
        "--steps",
        "1",
        "--batch-size",
        "4",
        "--max-length",
        "24",
        "--fp32",
        "--model",
        model,
        "--json",
    )
    asked = (
        "train",
        "--recipe",
        "splade-v3",
        "--data",
        shared / "data",
        "--set",
        "negatives=3",
        *arguments,
    )
    fails(
        call(*asked, "--negatives", mined, "--output", tmp_path / "m"),
        2,
        "has no teachers' scores",
    )
    output = done(call(*asked, "--negatives", scored, "--output", tmp_path / "m"))
    assert json.loads(output.out)["steps"] == 1
    assert (
        "of 12 training pairs were left out" in output.err
    )  # BM25 found no other document for them


def test_a_dry_run_counts_the_tokens_up_to_the_document_length_of_the_model(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    model = tmp_path / "late"
    shutil.copytree(shared / "late", model)
    config_file = model / "sentence_bert_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    assert "document_length" in config
    config["document_length"] = 5
    config_file.write_text(json.dumps(config), encoding="utf-8")
    arguments = (
        "encode",
        "--model",
        model,
        "--data",
        shared / "data",
        "--output",
        "v",
        "--dry-run",
        "--json",
    )
    assert measured(call(*arguments))["tokens_per_text"] == 5
    assert measured(call(*arguments, "--max-length", "6"))["tokens_per_text"] == 6
