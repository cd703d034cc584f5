"""Tests of the command line in daily use: incomplete data, interruptions, progress and warnings."""

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
from tests.signals import default_action
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import cli
from tilefold.recipes import loading
from tilefold.retrieval import read_manifest, read_vectors, write_trec_run
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.encoding import sparse as encoding


@pytest.fixture
def encode_command(work: Path) -> tuple[str | Path, ...]:
    """The command that encodes the collection, without its output."""
    return ("encode", "--model", work / "model", "--data", work / "data")


def test_a_file_of_documents_is_encoded_and_indexed(work: Path, tmp_path: Path) -> None:
    corpus = work / "data" / "corpus.jsonl"
    run_steps(
        (
            "encode",
            "--model",
            work / "model",
            "--data",
            corpus,
            "--output",
            tmp_path / "vectors",
            "--top-k",
            "32",
        ),
        ("index", "--vectors", tmp_path / "vectors", "--output", tmp_path / "index"),
    )
    assert len(read_vectors(tmp_path / "vectors")) == len(SUBJECTS)


def test_a_file_of_documents_cannot_be_evaluated(call: Call, work: Path) -> None:
    outcome = call(
        "evaluate",
        "--data",
        work / "data" / "corpus.jsonl",
        "--index",
        work / "index",
        "--model",
        work / "model",
    )
    fails(outcome, 2, "--data: corpus has no judgements")


def test_queries_of_a_file_of_documents_cannot_be_encoded(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    outcome = call(
        "encode",
        "--queries",
        "--data",
        work / "data" / "corpus.jsonl",
        "--model",
        work / "model",
        "--output",
        tmp_path / "queries",
    )
    fails(outcome, 2, "corpus.jsonl, which has none")
    assert not (tmp_path / "queries").exists()


def test_judgements_of_unknown_documents_are_dropped_on_request(
    call: Call,
    tmp_path: Path,
) -> None:
    data = tmp_path / "sample"
    small_collection().save_beir(data)
    documents = (data / "corpus.jsonl").read_text().splitlines()
    (data / "corpus.jsonl").write_text("\n".join(documents[:-1]) + "\n")
    (tmp_path / "run.trec").write_text("q12 Q0 d12 1 1.0 x\n")
    evaluate = ("evaluate", "--data", data, "--run", tmp_path / "run.trec", "--json")
    fails(call(*evaluate), 1, "or load it with --drop-unknown to leave them out")
    measures = measured(call(*evaluate, "--drop-unknown"))["measures"]
    assert measures["nDCG@10"] == pytest.approx(1 / 3)


@pytest.fixture
def data_with_broken_test_split(tmp_path: Path) -> Path:
    """A collection whose judgements of the split "test" cannot be read."""
    folder = tmp_path / "data"
    small_collection().save_beir(folder)
    (folder / "qrels" / "test.tsv").write_text("not\tjudgements\n")
    return folder


@pytest.fixture
def train_run(tmp_path: Path) -> Path:
    """A run of two queries of the split "train"."""
    path = tmp_path / "run.trec"
    path.write_text("q1 Q0 d1 1 1.0 x\nq2 Q0 d1 1 1.0 x\n")
    return path


def test_encode_does_not_read_the_judgements_of_other_splits(
    call: Call,
    work: Path,
    data_with_broken_test_split: Path,
    tmp_path: Path,
) -> None:
    outcome = call(
        "encode",
        "--data",
        data_with_broken_test_split,
        "--model",
        work / "model",
        "--queries",
        "--split",
        "train",
        "--output",
        tmp_path / "vectors",
    )
    done(outcome)


def test_evaluate_reads_the_judgements_of_the_named_split_only(
    call: Call,
    data_with_broken_test_split: Path,
    train_run: Path,
) -> None:
    evaluate = ("evaluate", "--data", data_with_broken_test_split, "--run", train_run, "--split")
    done(call(*evaluate, "train"))
    fails(call(*evaluate, "test"), 1, "test.tsv:1: expected 3 tab-separated fields")


def test_compare_does_not_read_the_judgements_of_other_splits(
    call: Call,
    data_with_broken_test_split: Path,
    train_run: Path,
    tmp_path: Path,
) -> None:
    other_run = tmp_path / "other.trec"
    other_run.write_text("q1 Q0 d2 1 1.0 x\nq2 Q0 d2 1 1.0 x\n")
    outcome = call(
        "compare",
        "--data",
        data_with_broken_test_split,
        train_run,
        other_run,
        "--split",
        "train",
    )
    done(outcome)


def test_score_and_train_do_not_read_the_judgements_of_other_splits(
    call: Call,
    work: Path,
    data_with_broken_test_split: Path,
    train_run: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    data = ("--data", data_with_broken_test_split)
    mined = tmp_path / "mined.parquet"
    done(call("mine", "--data", work / "data", "--run", train_run, "--output", mined))
    scored = tmp_path / "scored.parquet"
    done(call("score", mined, *data, "--teacher", "bm25", "--output", scored))
    outcome = call(
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
    )
    done(outcome)


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("index", "exact|seismic|"),
        ("fuse", "rrf|interpolation"),
        ("evaluate", "average|rocchio"),
        ("evaluate", "keep|drop"),
        ("serve", "query|document"),
        ("export", "opensearch|vespa|onnx"),
        ("encode", "fp16|int8"),
    ],
)
def test_help_names_the_values_of_an_option(call: Call, command: str, choices: str) -> None:
    assert choices in call(command, "--help").out


def test_wide_characters_are_shown_in_80_columns(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = "東大寺は、8世紀に聖武天皇の発願で造立された盧舎那仏像、いわゆる「奈良の大仏」を本尊とする寺である。"
    text = 2 * sentence
    collection = Collection("wide", {"d": Document("d", "", text)}, {}, {})
    collection.save_beir(tmp_path / "data")
    data = ("--data", tmp_path / "data")
    run_steps(("index", "--backend", "bm25", *data, "--output", tmp_path / "bm25"))
    monkeypatch.setattr(common, "stdout", lambda: Console(width=80))
    lines = done(call("search", "東大寺", "--index", tmp_path / "bm25", *data)).out.splitlines()
    text_column = [line.split("│")[3].strip() for line in lines if line.startswith("│")]
    shown_text = "".join(text_column).replace(" ", "").rstrip("…")
    assert shown_text == text[:40]
    assert all(cell_len(line) <= 80 for line in lines)


@pytest.fixture
def unusual_texts(tmp_path: Path) -> tuple[str | Path, ...]:
    """``--index`` and ``--data`` of documents with control characters and half a surrogate pair."""
    documents = tmp_path / "unusual.jsonl"
    rows = [
        {"_id": "a\tb", "title": "\x1b[2Jcleared", "text": "card"},
        {"_id": "half", "title": "half \ud83d of a pair", "text": "card"},
    ]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    index = tmp_path / "unusual-index"
    run_steps(("index", "--backend", "bm25", "--data", documents, "--output", index))
    return ("--index", index, "--data", documents)


def test_characters_that_a_terminal_cannot_show_are_escaped(
    call: Call,
    unusual_texts: tuple[str | Path, ...],
) -> None:
    output = done(call("search", "card", *unusual_texts)).out
    assert "a\\tb" in output
    assert "\\x1b[2Jcleared" in output
    assert "half \\ud83d of a pair" in output


def test_json_of_a_text_that_utf_8_cannot_encode_is_read_back(
    call: Call,
    unusual_texts: tuple[str | Path, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = ["\x1b[2Jcleared", "half \ud83d of a pair"]
    one_query = measured(call("search", "card", *unusual_texts, "--json"))
    assert [hit["title"] for hit in one_query["hits"]] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("card\n"))
    queries = measured(call("search", "-", *unusual_texts, "--json"))
    assert [hit["title"] for hit in queries["hits"]] == expected


def test_a_query_that_is_not_utf_8_is_refused(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latin_1 = b"stra\xdfe".decode("utf-8", "surrogateescape")  # as Python reads a command line
    search = ("--index", work / "index", "--model", work / "model")
    message = r"expected UTF-8 text, got 'stra\udcdfe'"
    fails(call("search", latin_1, *search), 2, f"query: {message}")
    monkeypatch.setattr("sys.stdin", io.StringIO(latin_1 + "\n"))
    fails(call("search", "-", *search), 2, f"line 1 of standard input: {message}")


def test_progress_is_a_line_per_minute(
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


def test_work_of_unknown_length_reports_its_time(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "SECONDS_PER_LINE", 0.01)
    reported = ""

    def has_reported() -> bool:
        nonlocal reported
        reported += capsys.readouterr().err
        return reported.endswith("\n")

    with common.heartbeat("indexing (seismic)"):
        wait_until(has_reported)
    assert re.match(r"indexing \(seismic\): \d+ s so far\n", reported)


def test_vectors_with_other_settings_are_refused_unless_fresh(
    call: Call,
    encode_command: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    encode = (*encode_command, "--output", tmp_path / "v")
    done(call(*encode, "--top-k", "8"))
    refusal = call(*encode, "--top-k", "9")
    fails(refusal, 1, "top_k: 8 before, 9 now", "start again with --fresh")
    done(call(*encode, "--top-k", "9", "--fresh"))


def test_a_model_with_other_settings_is_refused_unless_overwritten(
    call: Call,
    work: Path,
    masked_lm: str,
) -> None:
    outcome = call(
        "train",
        "--data",
        work / "data",
        "--model",
        masked_lm,
        "--output",
        work / "model",
        "--steps",
        "0",
        "--seed",
        "1",
    )
    fails(outcome, 1, "replace it (overwrite=True or --overwrite)")


def test_a_path_with_the_name_of_a_setting_is_not_renamed_in_errors(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    output = tmp_path / "batch_size"
    train = ("train", "--data", work / "data", "--model", masked_lm, "--output", output)
    done(call(*train, "--steps", "1", "--lr", "1"))
    refusal = call(*train, "--steps", "2", "--lr", "2")
    assert f"{tmp_path}/batch_size holds" in refusal.err
    assert "differs in learning_rate, max_steps" in refusal.err


def test_a_batch_of_one_pair_is_refused(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    train = ("train", "--data", work / "data", "--model", masked_lm, "--output", tmp_path / "m")
    refusal = call(*train, "--batch-size", "1")
    fails(refusal, 2, "--batch-size: expected a whole number of at least 2")


def test_training_with_too_large_a_rate_warns_or_ends_with_an_error(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    outcome = call(
        "train",
        "--data",
        work / "data",
        "--model",
        masked_lm,
        "--output",
        tmp_path / "m",
        "--batch-size",
        "4",
        "--steps",
        "12",
        "--lr",
        "10",
    )
    # which of both it is depends on rounding, and so on the device
    if outcome.code == 0:
        message = "warning: the ranking loss rose from .* did not learn; train with a smaller --lr"
    else:
        assert outcome.code == 1, outcome.err
        message = "the model is dead|the gradient is zero .* the model no longer learns|training has diverged"
    assert re.search(message, outcome.err), outcome.err


@contextmanager
def interrupted(owner: Any, name: str, n_calls: int) -> Iterator[None]:
    """Raise KeyboardInterrupt after a number of calls of a function."""
    function = getattr(owner, name)
    remaining_calls = iter(range(n_calls))

    def count_and_call(*arguments: Any, **options: Any) -> Any:
        if next(remaining_calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count_and_call)
        yield


NOTHING_SAVED = "Interrupted. Nothing was kept.\n"


def test_ctrl_c_before_a_shard_is_written(
    call: Call,
    encode_command: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    with interrupted(pending_shards.PendingShard, "add_batch", 0):
        outcome = call(*encode_command, "--batch-size", "4", "--output", tmp_path)
    assert outcome.code == 130
    assert outcome.notes == NOTHING_SAVED.splitlines()


@pytest.mark.parametrize("sends_sigterm", [False, True], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_before_the_command_starts_ends_it_without_a_traceback(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sends_sigterm: bool,
) -> None:
    def interrupt_imports(*_: object) -> int:
        signal.raise_signal(signal.SIGTERM if sends_sigterm else signal.SIGINT)
        time.sleep(WAIT_SECONDS)  # the signal ends this wait
        return 0

    monkeypatch.setattr(cli, "_run", interrupt_imports)
    with default_action():
        outcome = call("info")
    cause, code = ("Ended by SIGTERM", 143) if sends_sigterm else ("Interrupted", 130)
    assert (outcome.code, outcome.err) == (code, f"{cause}. Nothing was kept.\n")


def test_a_second_ctrl_c_does_not_deny_that_finished_work_is_kept(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_command", interrupt)
    monkeypatch.setattr(cli, "_report_interruption", interrupt)
    outcome = call("info")
    assert (outcome.code, outcome.err) == (130, "")


def test_ctrl_c_during_a_search(call: Call, work: Path) -> None:
    with interrupted(encoding, "encode_batch", 0):
        outcome = call("search", "csv files", "--index", work / "index", "--model", work / "model")
    assert outcome.code == 130
    assert outcome.notes == NOTHING_SAVED.splitlines()


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Let writes beyond a number of bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_full_disk_is_named(
    call: Call, command: tuple[Any, ...], output: Path, file: str
) -> None:
    """Check that a command names the file that it could not write, and leaves no partial file."""
    with limited_file_size(2048):
        outcome = call(*command)
    message = rf"{file}[\w.]*: could not be written, the disk or the quota is full"
    assert outcome.code == 1
    assert re.search(f"Error: {output}/{message}", outcome.err), outcome.err
    assert not list(output.rglob("*.tmp"))


def test_index_names_a_full_disk(call: Call, work: Path, tmp_path: Path) -> None:
    command = ("index", "--vectors", work / "vectors", "--output", tmp_path / "index")
    assert_full_disk_is_named(call, command, tmp_path, "index")


def test_encode_names_a_full_disk(
    call: Call,
    encode_command: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    command = (*encode_command, "--output", tmp_path / "v")
    assert_full_disk_is_named(call, command, tmp_path, "v/part-")


def test_fuse_names_a_full_disk(call: Call, tmp_path: Path) -> None:
    scores = {f"d{number}": 1.0 for number in range(16)}
    run = tmp_path / "run"
    write_trec_run({f"q{number}": scores for number in range(12, 16)}, run)
    output = tmp_path / "out"
    command = ("fuse", "--run", run, "--run", run, "--save-run", output / "fused")
    assert_full_disk_is_named(call, command, output, "fused")


QUERIES = "how do I work with csv files\n\nq2\thow do I work with sockets\n"


@pytest.mark.parametrize("source", ["stdin", "file", "pipe"])
def test_a_model_is_loaded_once_for_many_queries(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: Any,
    source: str,
) -> None:
    loaded_models: list[Any] = []
    load_saved = loading.load_saved

    def record_and_load(*args: Any) -> Any:
        loaded_models.append(args)
        return load_saved(*args)

    monkeypatch.setattr(loading, "load_saved", record_and_load)
    monkeypatch.setattr("sys.stdin", io.StringIO("" if source == "file" else QUERIES))
    (tmp_path / "queries.txt").write_text(QUERIES)
    query_options = {
        "stdin": ("-",),
        "file": ("--queries", tmp_path / "queries.txt"),
        "pipe": (),
    }
    options = ("--index", work / "index", "--model", work / "model", "--k", "2", "--json")
    lines = done(call("search", *query_options[source], *options)).out.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["id"] for answer in answers] == ["1", "q2"]
    assert [len(answer["hits"]) for answer in answers] == [2, 2]
    assert len(loaded_models) == 1
    single_query = measured(call("search", answers[1]["query"], *options))
    assert single_query["hits"] == answers[1]["hits"]


class Terminal(io.StringIO):
    """Input that is typed by a user."""

    def isatty(self) -> bool:
        return True


def test_a_prompt_reads_queries_until_its_end(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("csv files\nsockets\n"))
    outcome = done(call("search", "--index", work / "index", "--model", work / "model"))
    assert outcome.out.count("search> ") == 3
    assert "one query per line; press Ctrl-D to finish" in outcome.err


def test_special_tokens_are_left_out_on_request(
    call: Call,
    work: Path,
    encode_command: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    run_steps(
        (*encode_command, "--output", tmp_path / "default"),
        (*encode_command, "--output", tmp_path / "v", "--no-special-tokens"),
    )
    special_ids = set(load_encoder(str(work / "model")).tokenizer.all_special_ids)
    assert special_ids & set(read_vectors(tmp_path / "default").indices)
    assert not special_ids & set(read_vectors(tmp_path / "v").indices)
    refusal = call(*encode_command, "--output", tmp_path / "v")
    fails(refusal, 1, "special_tokens: False before")


# in tokens: one document of the small collection, d12, has 25, all other texts have less
MAX_LENGTH = 24
TRUNCATION_REMEDY = "the truncated part of a document cannot be found: --passages encodes all of it"


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection with four documents above the limit of its untrained model, vectors and index.

    One of the four is d12.
    """
    folder = tmp_path_factory.mktemp("truncated")
    small = small_collection()
    documents = dict(small.documents)
    for id_, n_words in (("d0", 22), ("d3", 23), ("d7", 40), ("d9", 9000)):
        documents[id_] = Document(id_, "", "words " * n_words)
    collection = Collection("small", documents, small.queries, small.qrels)
    collection.save_beir(folder / "data")
    data = ("--data", folder / "data")
    run_steps(
        (
            "train",
            *data,
            "--model",
            masked_lm,
            "--output",
            folder / "model",
            "--steps",
            "0",
            "--max-length",
            MAX_LENGTH,
        ),
        (
            "encode",
            *data,
            "--model",
            folder / "model",
            "--output",
            folder / "vectors",
            "--top-k",
            "32",
        ),
        ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
    )
    return folder


def test_the_last_of_repeated_options_counts_and_a_note_says_so(
    call: Call,
    truncated: Path,
) -> None:
    search = (
        "search",
        "--index",
        truncated / "index",
        "--model",
        truncated / "model",
        "words",
        "--json",
    )
    once = done(call(*search, "--k", "2"))
    twice = done(call(*search, "--k", "1", "--k", "2"))
    assert twice.out == once.out
    assert twice.err.splitlines()[0] == "--k was given twice: the last one counts."


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_encode_reports_truncated_texts_with_one_and_with_several_processes(
    call: Call,
    truncated: Path,
    tmp_path: Path,
) -> None:
    encode = (
        "encode",
        "--model",
        truncated / "model",
        "--data",
        truncated / "data",
        "--shard-size",
        "4",
    )
    outcome = call(*encode, "--output", tmp_path / "one", "--json")
    assert outcome.notes == [TRUNCATION_REMEDY, "4 of 16 documents were truncated at 24 tokens"]
    expected = {"count": 4, "max_length": MAX_LENGTH}
    assert json.loads(outcome.out)["truncated"] == expected
    arguments = [str(word) for word in (*encode, "--output", tmp_path / "two", "--devices", "2")]
    process = programs.run("-m", "tilefold.cli", *arguments)
    assert process.returncode == 0
    assert process.stderr == outcome.err
    assert read_manifest(tmp_path / "two").shards == read_manifest(tmp_path / "one").shards
    queries = done(call(*encode, "--output", tmp_path / "queries", "--queries"))
    assert queries.notes == []


def test_train_reports_truncated_texts_also_when_a_run_is_reused(
    call: Call,
    truncated: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    train = (
        "train",
        "--data",
        truncated / "data",
        "--model",
        masked_lm,
        "--batch-size",
        "4",
        "--epochs",
        "2",
        "--lr",
        "1e-5",
        "--max-length",
        MAX_LENGTH,
        "--output",
        tmp_path / "m",
    )
    outcome = done(call(*train, "--json"))
    # 12 queries and 12 documents, twice
    expected = [{"texts": 48, "count": 6, "max_length": MAX_LENGTH}]
    assert json.loads(outcome.out)["truncated"] == expected
    message = "6 of 48 uses of training texts were truncated at 24 tokens"
    assert outcome.err.splitlines()[-1] == message
    assert message in call(*train).err


def test_search_reports_truncated_queries(call: Call, truncated: Path) -> None:
    index = ("--index", truncated / "index", "--model", truncated / "model", "--json")
    assert call("evaluate", *index, "--data", truncated / "data").notes == []
    long_query = call("search", "words " * 30, *index)
    assert long_query.notes == ["1 of 1 queries was truncated at 24 tokens"]


def test_evaluate_reports_truncated_documents_of_a_dense_model(
    call: Call,
    truncated: Path,
) -> None:
    data = ("--data", truncated / "data", "--json")
    outcome = call("evaluate", "--model", "minilm", "--max-length", "12", *data)
    reports = re.findall(r"\d+ of (\d+) (\w+) were truncated at 12 tokens", outcome.err)
    assert reports == [("16", "documents")], outcome.err


@pytest.mark.slow
def test_ctrl_c_ends_a_process_that_trains(work: Path, masked_lm: str, tmp_path: Path) -> None:
    train = (
        "train",
        "--data",
        work / "data",
        "--model",
        masked_lm,
        "--steps",
        10**5,
        "--batch-size",
        4,
        "--save-minutes",
        0,
        "--output",
        tmp_path / "m",
    )
    log = tmp_path / "stderr"
    with programs.start("-m", "tilefold.cli", *train, stderr=log) as process:
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not list(tmp_path.glob("m.training/checkpoint-*/tilefold_whole.json")):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_SECONDS) == 130
        finally:
            process.kill()
    assert "Finished work is kept" in log.read_text()
    note = r"It resumes at step [1-9]\d*: --save-steps or --save-minutes save more often\."
    assert re.search(note, log.read_text())
    assert "Traceback" not in log.read_text()


def test_encode_resumes_and_says_where(call: Call, truncated: Path, tmp_path: Path) -> None:
    output = tmp_path / "v"
    encode = (
        "encode",
        "--model",
        truncated / "model",
        "--data",
        truncated / "data",
        "--shard-size",
        "4",
        "--output",
        output,
    )
    with interrupted(pending_shards.PendingShard, "add_batch", 2):
        first = call(*encode)
    assert first.code == 130
    assert "resumes" not in first.err
    assert "Finished work is kept" in first.err
    n_encoded = read_manifest(output).n_documents
    assert 0 < n_encoded < 16
    assert call(*encode).notes == [
        f"encoding resumes: {n_encoded} of 16 were done before (--fresh starts over)",
        TRUNCATION_REMEDY,
        "4 of 16 documents were truncated at 24 tokens",
    ]
    nothing_to_do = (
        "encoding has nothing left to do: 16 of 16 were done before (--fresh starts over)"
    )
    assert call(*encode).notes[0] == nothing_to_do


def write_json_and_interrupt(path: Path, value: Any) -> None:
    """Write a JSON file; raise KeyboardInterrupt after a checkpoint is complete."""
    write_json(path, value)
    if path.name == "tilefold_whole.json":
        raise KeyboardInterrupt


def raise_import_error(*_: object) -> None:
    """Fail as an import of a package that is not installed."""
    raise ImportError("matplotlib")


def test_train_resumes_and_says_where(
    call: Call,
    truncated: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    train = (
        "train",
        "--data",
        truncated / "data",
        "--model",
        masked_lm,
        "--batch-size",
        "4",
        "--lr",
        "1e-5",
        "--steps",
        "4",
        "--save-steps",
        "2",
        "--output",
        tmp_path / "m",
    )
    with monkeypatch.context() as patch:
        patch.setattr("tilefold.recipes._watch.write_json", write_json_and_interrupt)
        assert call(*train).code == 130
    monkeypatch.setattr("tilefold.recipes._run.new_figure", raise_import_error)
    resumed = done(call(*train))
    losses = r", loss \d+\.\d+ \(ranking \d+\.\d+, penalties \d+\.\d+\): "
    assert re.search(losses, resumed.out), resumed.out
    assert re.match(r"trained 4 steps, resumed after step 2, in \d+ s, loss ", resumed.out)
    assert "training resumes: 2 of 4 were done before (--fresh starts over)" in resumed.err
    log = f"the log of the training is {tmp_path}/m/training_log.jsonl; if matplotlib"
    assert log in resumed.err


def test_a_trained_model_without_further_steps_is_not_called_untrained(
    call: Call,
    truncated: Path,
    work: Path,
    tmp_path: Path,
) -> None:
    outcome = call(
        "train",
        "--data",
        truncated / "data",
        "--model",
        work / "model",
        "--steps",
        "0",
        "--output",
        tmp_path / "m",
    )
    done(outcome)
    assert outcome.out.startswith("not trained: ")
    assert "untrained" not in outcome.out


def test_evaluate_warns_of_a_k_that_changes_nothing(
    call: Call,
    truncated: Path,
    tmp_path: Path,
) -> None:
    evaluate = (
        "evaluate",
        "--data",
        truncated / "data",
        "--index",
        truncated / "index",
        "--model",
        truncated / "model",
        "--json",
        "--k",
        "5",
        "--measure",
        "nDCG@10",
    )
    warning = "--k 5 has no effect without --save-run"
    assert call(*evaluate).err.startswith(warning)
    assert call(*evaluate, "--save-run", tmp_path / "run").notes == []


def test_train_warns_of_a_max_length_above_that_of_the_model(
    call: Call,
    truncated: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    outcome = call(
        "train",
        "--data",
        truncated / "data",
        "--model",
        masked_lm,
        "--steps",
        "0",
        "--max-length",
        "600",
        "--output",
        tmp_path / "m",
    )
    warning = "warning: the model reads at most 512 tokens of a text, fewer than max_length (600)."
    assert warning in outcome.err
