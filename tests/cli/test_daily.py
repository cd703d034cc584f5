"""The command line in daily use: collections of production, long work, its own words in errors,
what it says.
"""

from __future__ import annotations

import io
import json
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests import programs
from tests.cli.program import Call, done, fails, measured, run_steps
from tests.inside import common, load_encoder, pending_shards, write_json
from tests.recipes.small import SUBJECTS, small_collection
from tilefold.recipes import loading
from tilefold.retrieval import read_manifest, read_vectors, write_trec_run
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.encoding import sparse as encoding


def test_a_corpus_alone_is_encoded_and_indexed_and_cannot_be_evaluated(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    corpus, model = ("--data", work / "data" / "corpus.jsonl"), ("--model", work / "model")
    run_steps(
        ("encode", *model, *corpus, "--output", tmp_path / "vectors", "--top-k", "32"),
        ("index", "--vectors", tmp_path / "vectors", "--output", tmp_path / "index"),
    )
    assert len(read_vectors(tmp_path / "vectors")) == len(SUBJECTS)
    fails(
        call("evaluate", *corpus, "--index", tmp_path / "index", *model),
        2,
        "--data: corpus has no judgements",
    )
    asked = call("encode", "--queries", *corpus, *model, "--output", tmp_path / "asked")
    assert asked.code == 2 and "corpus.jsonl has no queries" in asked.err
    assert not (tmp_path / "asked").exists()


def test_judgements_of_a_sample_are_dropped_on_request(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    small_collection().save_beir(tmp_path / "sample")
    rows = (tmp_path / "sample" / "corpus.jsonl").read_text().splitlines()[:-1]
    (tmp_path / "sample" / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "run.trec").write_text("q12 Q0 d12 1 1.0 x\n")
    asked = ("evaluate", "--data", tmp_path / "sample", "--run", tmp_path / "run.trec", "--json")
    fails(call(*asked), 1, "or load it with --drop-unknown to leave them out")
    assert measured(call(*asked, "--drop-unknown"))["measures"]["nDCG@10"] == pytest.approx(1 / 3)


def test_the_judgements_of_other_splits_are_not_read(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    small_collection().save_beir(tmp_path / "data")
    (tmp_path / "data" / "qrels" / "test.tsv").write_text("not\tjudgements\n")
    data, queries = (
        ("--data", tmp_path / "data"),
        ("--queries", "--split", "train", "--output", tmp_path / "v"),
    )
    run = tmp_path / "run.trec"
    run.write_text("q1 Q0 d1 1 1.0 x\nq2 Q0 d1 1 1.0 x\n")
    mined = tmp_path / "mined.parquet"
    done(call("mine", "--data", work / "data", "--run", run, "--output", mined))
    for asked in (
        ("encode", *data, "--model", work / "model", *queries),
        ("evaluate", *data, "--run", run, "--split", "train"),
        ("compare", *data, run, work / "train.json", "--split", "train"),
        ("score", mined, *data, "--teacher", "bm25", "--output", tmp_path / "scored.parquet"),
        (
            "train",
            *data,
            "--model",
            masked_lm,
            "--steps",
            "1",
            "--batch-size",
            "2",
            "--output",
            tmp_path / "m",
        ),
    ):
        outcome = call(*asked)
        if asked[0] == "compare":
            fails(outcome, 1, "train.json:1: expected 6 fields")
        else:
            done(outcome)
    fails(
        call("evaluate", *data, "--run", run, "--split", "test"),
        1,
        "test.tsv:1: expected 3 tab-separated fields",
    )


def test_help_names_the_words_that_an_option_takes(call: Call) -> None:
    shown = {
        verb: call(verb, "--help").out
        for verb in ("index", "evaluate", "fuse", "export", "serve", "encode")
    }
    for verb, words in (
        ("index", "exact|seismic|"),
        ("fuse", "rrf|interpolation"),
        ("evaluate", "average|rocchio"),
        ("evaluate", "keep|drop"),
        ("serve", "query|document"),
        ("export", "opensearch|vespa|onnx"),
        ("encode", "fp16|int8"),
    ):
        assert words in shown[verb], shown[verb]


def test_wide_characters_are_shown_in_80_columns(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "東大寺は、8世紀に聖武天皇の発願で造立された盧舎那仏像、いわゆる「奈良の大仏」を本尊とする寺である。"
        * 2
    )
    Collection("wide", {"d": Document("d", "", text)}, {}, {}).save_beir(tmp_path / "data")
    run_steps(
        ("index", "--backend", "bm25", "--data", tmp_path / "data", "--output", tmp_path / "bm25"),
    )
    monkeypatch.setattr(common, "stdout", lambda: Console(width=80))
    shown = done(
        call("search", "東大寺", "--index", tmp_path / "bm25", "--data", tmp_path / "data"),
    ).out
    rows = [line.split("│")[3].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(rows).replace(" ", "").rstrip("…") == text[:40] and all(
        cell_len(line) <= 80 for line in shown.split("\n")
    )


def test_a_line_per_minute_tells_progress(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with common.progress_bar("training") as update:
        for minute, step in ((0.0, 40), (0.5, 50), (1.1, 62), (1.5, 70), (2.2, 84)):
            now = 60 * minute
            update(step, 240, "loss 1.234")
    assert capsys.readouterr().err.splitlines() == [
        "training: 62 of 240, loss 1.234, 0.333 per second, 9 min left",
        "training: 84 of 240, loss 1.234, 0.333 per second, 8 min left",
    ]
    monkeypatch.undo()
    monkeypatch.setattr(common, "SECONDS_PER_LINE", 0.01)
    with common.heartbeat("indexing (seismic)"):  # work of unknown length
        time.sleep(0.1)
    assert re.match(r"indexing \(seismic\): 0 s so far\n", capsys.readouterr().err)


def test_what_is_in_the_way_is_named_with_its_option(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    asked = (
        "encode",
        "--model",
        work / "model",
        "--data",
        work / "data",
        "--output",
        tmp_path / "v",
    )
    assert call(*asked, "--top-k", "8").code == 0
    fails(call(*asked, "--top-k", "9"), 1, "top_k: 8 before, 9 now", "resume=False (--fresh).")
    assert call(*asked, "--top-k", "9", "--fresh").code == 0
    start = (
        "train",
        "--data",
        work / "data",
        "--model",
        masked_lm,
        "--output",
        work / "model",
        "--steps",
        "0",
    )
    fails(call(*start, "--seed", "1"), 1, "replace it (overwrite=True or --overwrite)")
    other = done(call(*start[:-1], "1", "--lr", "1", "--output", tmp_path / "batch_size"))
    other = call(*start[:-1], "2", "--lr", "2", "--output", tmp_path / "batch_size")
    assert (
        f"{tmp_path}/batch_size holds" in other.err
        and "differs in learning_rate, max_steps" in other.err
    )


def test_training_that_cannot_learn_says_so(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    asked = ("train", "--data", work / "data", "--model", masked_lm, "--output", tmp_path / "m")
    fails(
        call(*asked, "--batch-size", "1"), 2, "--batch-size: expected a whole number of at least 2"
    )
    exploded = call(*asked, "--batch-size", "4", "--steps", "12", "--lr", "10")
    # where so large a rate ends depends on rounding, so on the device
    rose = re.search(
        r"warning: the ranking loss rose from .* did not learn; train with a smaller --lr",
        exploded.err,
    )
    dead = re.search(
        "the model is dead|the gradient is zero .* nothing is learnt|training has diverged",
        exploded.err,
    )
    assert (rose and exploded.code == 0) or (dead and exploded.code == 1), exploded.err


@contextmanager
def interrupted(owner: Any, name: str, calls: int) -> Iterator[None]:
    """Ctrl-C comes after so many calls of a function."""
    run, left = getattr(owner, name), iter(range(calls))

    def stop(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, stop)
        yield


def test_ctrl_c_before_anything_is_kept_says_so(call: Call, work: Path, tmp_path: Path) -> None:
    asked = (
        "encode",
        "--model",
        work / "model",
        "--data",
        work / "data",
        "--batch-size",
        "4",
        "--output",
        tmp_path,
    )
    searched = ("search", "csv files", "--index", work / "index", "--model", work / "model")
    for owner, name, command in (
        (pending_shards.PendingShard, "add_batch", asked),
        (encoding, "encode_batch", searched),
    ):
        with interrupted(owner, name, 0):
            outcome = call(*command)
        assert (outcome.code, outcome.err) == (130, "Interrupted. Nothing was kept.\n")


def test_a_full_disk_is_named(call: Call, work: Path, tmp_path: Path) -> None:
    many = {f"q{number}": {f"d{at}": 1.0 for at in range(16)} for number in range(12, 16)}
    write_trec_run(many, tmp_path / "run")
    fuse = (
        "fuse",
        "--run",
        tmp_path / "run",
        "--run",
        tmp_path / "run",
        "--save-run",
        tmp_path / "out" / "fused",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for command, name in (
        (("index", "--vectors", work / "vectors", "--output", tmp_path / "out" / "index"), "index"),
        (
            (
                "encode",
                "--model",
                work / "model",
                "--data",
                work / "data",
                "--output",
                tmp_path / "out" / "v",
            ),
            "v/part-",
        ),
        (fuse, "fused"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
        try:
            outcome = call(*command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said = rf"Error: {tmp_path}/out/{name}[\w.]*: could not be written, the disk or the quota is full"
        assert outcome.code == 1 and re.search(said, outcome.err), outcome.err
        assert not list((tmp_path / "out").rglob("*.tmp"))


QUERIES = "how do I work with csv files\n\nq2\thow do I work with sockets\n"


@pytest.mark.parametrize("way", ["-", "file", "shell"])
def test_many_queries_load_once(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: Any,
    way: str,
) -> None:
    loads: Any = []
    load = loading.load_saved
    monkeypatch.setattr(loading, "load_saved", lambda *given: loads.append(given) or load(*given))
    (tmp_path / "queries.txt").write_text(QUERIES)
    monkeypatch.setattr("sys.stdin", io.StringIO("" if way == "file" else QUERIES))
    asked = {"-": ("-",), "file": ("--queries", tmp_path / "queries.txt"), "shell": ()}[way]
    places = ("--index", work / "index", "--model", work / "model", "--k", "2", "--json")
    answers = [json.loads(line) for line in done(call("search", *asked, *places)).out.splitlines()]
    assert [answer["id"] for answer in answers] == ["1", "q2"]
    assert [len(answer["hits"]) for answer in answers] == [2, 2]
    assert len(loads) == 1
    assert measured(call("search", answers[1]["query"], *places))["hits"] == answers[1]["hits"]


def test_a_prompt_reads_queries_until_its_end(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("csv files\nsockets\n"))
    outcome = done(call("search", "--index", work / "index", "--model", work / "model"))
    assert outcome.out.count("search> ") == 3 and "a query per line; Ctrl-D ends" in outcome.err


def test_special_tokens_are_not_stored_on_request(call: Call, work: Path, tmp_path: Path) -> None:
    place = ("encode", "--model", work / "model", "--data", work / "data", "--output")
    run_steps((*place, tmp_path / "whole"), (*place, tmp_path / "v", "--no-special-tokens"))
    special = set(load_encoder(str(work / "model")).tokenizer.all_special_ids)
    kept = [special & set(read_vectors(tmp_path / name).indices) for name in ("whole", "v")]
    assert kept[0] and not kept[1]
    fails(call(*place, tmp_path / "v"), 1, "special_tokens: False before")


LENGTH = (
    24  # tokens; one document of the small collection, d12, has 25 of them, all other texts less
)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection of which four documents are cut, d12 among them, a model as training starts from
    it, its vectors.
    """
    folder, small = tmp_path_factory.mktemp("said"), small_collection()
    long = {
        f"d{i}": Document(f"d{i}", "", "words " * count)
        for i, count in ((0, 22), (3, 23), (7, 40), (9, 9000))
    }
    Collection("small", small.documents | long, small.queries, small.qrels).save_beir(
        folder / "data",
    )
    start = (
        "train",
        "--data",
        folder / "data",
        "--model",
        masked_lm,
        "--output",
        folder / "model",
        "--steps",
        "0",
    )
    encoded = (
        "--model",
        folder / "model",
        "--data",
        folder / "data",
        "--output",
        folder / "vectors",
        "--top-k",
        "32",
    )
    index = ("index", "--vectors", folder / "vectors", "--output", folder / "index")
    run_steps((*start, "--max-length", LENGTH), ("encode", *encoded), index)
    return folder


def test_of_a_setting_that_was_given_twice_the_last_one_counts_and_it_is_said(
    call: Call,
    cut: Path,
) -> None:
    searched = ("search", "--index", cut / "index", "--model", cut / "model", "words", "--json")
    once, twice = call(*searched, "--k", "2"), call(*searched, "--k", "1", "--k", "2")
    assert twice.code == once.code == 0 and twice.out == once.out
    assert twice.err.splitlines()[0] == "--k was given twice: the last one counts."


@pytest.mark.usefixtures("one_thread")
def test_encode_says_how_many_texts_were_cut_alone_and_with_others(
    call: Call,
    cut: Path,
    tmp_path: Path,
) -> None:
    asked = (
        "encode",
        "--model",
        cut / "model",
        "--data",
        cut / "data",
        "--shard-size",
        "4",
        "--output",
    )
    outcome = call(*asked, tmp_path / "one", "--json")
    assert outcome.err == "4 of 16 documents were cut at 24 tokens\n"
    assert json.loads(outcome.out)["truncated"] == {"count": 4, "max_length": LENGTH}
    args = (*map(str, asked), str(tmp_path / "two"), "--devices", "2")
    many = programs.run("-m", "tilefold.cli", *args)
    assert many.returncode == 0 and many.stderr == outcome.err
    assert read_manifest(tmp_path / "two").shards == read_manifest(tmp_path / "one").shards
    assert done(call(*asked, tmp_path / "q", "--queries")).err == ""


def test_training_says_how_many_texts_were_cut(
    call: Call,
    cut: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    trained = (
        "train",
        "--data",
        cut / "data",
        "--model",
        masked_lm,
        "--batch-size",
        "4",
        "--epochs",
        "2",
    )
    asked = (*trained, "--lr", "1e-5", "--max-length", LENGTH, "--output", tmp_path / "m")
    outcome = done(call(*asked, "--json"))
    assert json.loads(outcome.out)["truncated"] == [
        {"texts": 48, "count": 6, "max_length": LENGTH},
    ]  # 12 pairs twice
    assert outcome.err.splitlines()[-1] == "6 of 48 training texts were cut at 24 tokens"
    assert "6 of 48 training texts were cut at 24 tokens" in call(*asked).err, (
        "what was trained before says the same"
    )


def test_queries_and_dense_texts_that_were_cut_are_said(call: Call, cut: Path) -> None:
    index = ("--index", cut / "index", "--model", cut / "model")
    assert call("evaluate", *index, "--data", cut / "data", "--json").err == ""
    assert (
        call("search", "words " * 30, *index, "--json").err
        == "1 of 1 queries was cut at 24 tokens\n"
    )
    dense = call(
        "evaluate",
        "--model",
        "minilm",
        "--max-length",
        "12",
        "--data",
        cut / "data",
        "--json",
    )
    said = re.findall(r"(\d+) of (\d+) (\w+) were cut at 12 tokens", dense.err)
    assert [(total, what) for _, total, what in said] == [("16", "documents")], dense.err


def test_ctrl_c_ends_a_process_that_trains(work: Path, masked_lm: str, tmp_path: Path) -> None:
    asked = (
        "train",
        "--data",
        work / "data",
        "--model",
        masked_lm,
        "--steps",
        10**5,
        "--batch-size",
        4,
    )
    options, log = ("--save-minutes", 0, "--output", tmp_path / "m"), tmp_path / "stderr"
    with programs.start("-m", "tilefold.cli", *asked, *options, stderr=log) as process:
        try:
            until = time.monotonic() + 120
            while not list(tmp_path.glob("m.training/checkpoint-*/tilefold_whole.json")):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert "Finished work is kept" in log.read_text() and "Traceback" not in log.read_text()


def test_encode_says_where_it_resumes(call: Call, cut: Path, tmp_path: Path) -> None:
    made_of = ("encode", "--model", cut / "model", "--data", cut / "data")
    asked = (*made_of, "--shard-size", "4", "--output", tmp_path / "v")
    with interrupted(pending_shards.PendingShard, "add_batch", 2):
        first = call(*asked)
    assert first.code == 130 and "resumes" not in first.err and "Finished work is kept" in first.err
    kept = read_manifest(tmp_path / "v").n_documents
    again = call(*asked).err.splitlines()
    assert (
        again[0] == f"encoding resumes: {kept} of 16 were done before (--fresh does them again)"
        and 0 < kept < 16
    )
    assert again[1:] == ["4 of 16 documents were cut at 24 tokens"]
    nothing = call(*asked).err.splitlines()
    assert (
        nothing[0]
        == "encoding has nothing left to do: 16 of 16 were done before (--fresh does them again)"
    )


def test_train_says_that_it_resumes(
    call: Call,
    cut: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    trained = (
        "train",
        "--data",
        cut / "data",
        "--model",
        masked_lm,
        "--batch-size",
        "4",
        "--lr",
        "1e-5",
    )
    asked = (*trained, "--steps", "4", "--save-steps", "2", "--output", tmp_path / "m")

    def interrupted(path: Path, value: Any) -> None:
        write_json(path, value)
        if path.name == "tilefold_whole.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tilefold.recipes._watch.write_json", interrupted)
        assert call(*asked).code == 130

    def missing(*_: object) -> None:
        raise ImportError("matplotlib")

    monkeypatch.setattr("tilefold.recipes._run.new_figure", missing)
    again = done(call(*asked))
    assert re.search(r", loss \d+\.\d+ \(ranking \d+\.\d+, penalties \d+\.\d+\): ", again.out), (
        again.out
    )
    assert (
        f"the log of the training is {tmp_path}/m/training_log.jsonl; with matplotlib" in again.err
    )
    assert "training resumes: 2 of 4 were done before (--fresh does them again)" in again.err
    assert re.match(r"trained 4 steps, those after step 2 in \d+ s, loss ", again.out)
    begun = ("--model", tmp_path / "m", "--steps", "0", "--output", tmp_path / "s")
    start = done(call("train", "--data", cut / "data", *begun))
    assert start.out.startswith("no step of training, ") and "untrained" not in start.out


def test_what_changes_nothing_or_less_is_said(
    call: Call,
    cut: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    index = (
        "evaluate",
        "--data",
        cut / "data",
        "--index",
        cut / "index",
        "--model",
        cut / "model",
        "--json",
    )
    assert call(*index, "--k", "5", "--measure", "nDCG@10").err.startswith(
        "--k 5 changes nothing without --save-run",
    )
    assert (
        call(*index, "--k", "5", "--measure", "nDCG@10", "--save-run", tmp_path / "run").err == ""
    )
    start = (
        "train",
        "--data",
        cut / "data",
        "--model",
        masked_lm,
        "--steps",
        "0",
        "--max-length",
        "600",
    )
    outcome = call(*start, "--output", tmp_path / "m")
    assert (
        "warning: the model reads at most 512 tokens of a text, fewer than max_length (600)."
        in outcome.err
    )
