"""``tilefold migrate``: an index moves to another model, and a server follows it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.cli.program import Call, done, fails, measured, run_steps
from tests.processes import environment
from tests.recipes.small import small_masked_lm
from tests.serve.running import served
from tests.waiting import wait_until
from tilefold import retrieval as r
from tilefold.cli.migrate import Preview, _describe_preview
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.encoding import throttle
from tilefold.retrieval.index.opening import open_index
from tilefold.serve.document_log import Change, DocumentLog

N_RANDOM_KILLS = 12
NEW_DOCUMENT = {"_id": "kettles", "title": "Kettles", "text": "Read and write about kettles."}


@pytest.fixture(autouse=True)
def keep_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process keep its priority, which a command may lower but not raise again."""
    monkeypatch.setattr("tilefold.cli.migrate.lower_priority", lambda: None)


@pytest.fixture(scope="session")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model than ``masked_lm``, which has encoded the shared index."""
    return str(small_masked_lm(tmp_path_factory.mktemp("new-model"), seed=1))


@pytest.fixture
def live(shared: Path, tmp_path: Path) -> Path:
    """A copy of the shared index."""
    return Path(shutil.copytree(shared / "index", tmp_path / "live"))


@pytest.fixture
def new_documents(tmp_path: Path) -> Path:
    file = tmp_path / "new.jsonl"
    file.write_text(json.dumps(NEW_DOCUMENT), encoding="utf-8")
    return file


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in the folder -> content, of all files."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def start(call: Call, live: Path, model: str, data: Path, *options: str) -> Any:
    command = ("migrate", "--index", live, "--model", model, "--data", data, "--top-k", "64")
    return call(*command, *options)


def test_an_index_moves_to_another_model_and_back(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    old_files = files_of(live)
    started = done(start(call, live, new_model, shared / "data", "--old-model", masked_lm))
    assert f"the new index (sparse, {new_model}) has all 16 documents" in started.out
    assert f"{live} is still the old one (sparse, {masked_lm})" in started.out
    assert "--old-model" not in started.err
    assert files_of(live) == old_files

    queries = r.load_queries(shared / "data" / "queries.jsonl")
    (tmp_path / "queries.tsv").write_text(
        "".join(f"{query}\t{text}\n" for query, text in queries.items()),
    )
    preview = measured(
        call("migrate", "--index", live, "--preview", tmp_path / "queries.tsv", "--json"),
    )
    assert preview["queries"] == len(queries)
    assert preview["changed"].keys() == queries.keys()
    assert preview["judged"]["measure"] == "nDCG@10"
    report = done(call("migrate", "--index", live, "--preview", tmp_path / "queries.tsv")).out
    assert "nDCG@10 on 4 judged queries:" in report

    state = measured(call("migrate", "--index", live, "--cut-over", "--json"))
    assert state["cut_over"]
    assert state["documents"] == 16
    vectors = tmp_path / "vectors"
    data = ("--data", shared / "data")
    run_steps(
        ("encode", "--model", new_model, *data, "--output", vectors, "--top-k", "64"),
        ("index", "--vectors", vectors, "--output", tmp_path / "fresh"),
    )
    assert files_of(live) == files_of(tmp_path / "fresh")
    fails(
        call("migrate", "--index", live, "--model", masked_lm, "--data", shared / "data"),
        2,
        f"--model: the migration of {live} was started with {new_model}, got {masked_lm}.",
    )
    again = done(call("migrate", "--index", live, "--cut-over"))
    assert f"{live} is the new index (sparse, {new_model}), with 16 documents" in again.out

    rolled_back = done(call("migrate", "--index", live, "--rollback"))
    assert (
        f"{live} is the old index again (sparse, {masked_lm}), with 16 documents; the new one "
        f"(sparse, {new_model}) is in {live}.migration/index" in rolled_back.out
    )
    assert files_of(live) == old_files
    done(call("migrate", "--index", live, "--discard"))
    fails(
        call("migrate", "--index", live, "--rollback"),
        1,
        f"--rollback: there is no old index to return to, because {live} has no migration",
        f"tilefold migrate --index {live} --model OLD_MODEL",
    )
    assert not live.with_name("live.migration").exists()
    assert files_of(live) == old_files


def test_documents_that_are_added_meanwhile_come_into_both_indexes(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    new_documents: Path,
    tmp_path: Path,
) -> None:
    started = done(start(call, live, new_model, shared / "data"))
    assert "--old-model was not given: pass it to --preview" in started.err
    assert "--preview QUERIES --old-model OLD_MODEL" in started.out
    vectors = tmp_path / "new-vectors"
    encode = ("encode", "--model", masked_lm, "--data", new_documents, "--output", vectors)
    done(call(*encode, "--top-k", "64"))
    update = ("index", "--update", "--vectors", vectors, "--output", live)
    fails(call(*update), 2, "--data: expected the documents of all new vectors, because")
    done(call(*update, "--data", new_documents))
    fails(
        call("index", "--vectors", vectors, "--output", live, "--overwrite"),
        1,
        f"--overwrite: expected an index without a migration, got {live}",
    )
    old_ids = set(r.load_index(live).ids)
    done(call("migrate", "--index", live, "--cut-over"))
    index: Any = r.load_index(live)
    assert set(index.ids) == old_ids
    assert "kettles" in old_ids

    (tmp_path / "gone.txt").write_text("d1\n")
    done(call("index", "--delete", tmp_path / "gone.txt", "--output", live))
    done(call("migrate", "--index", live, "--rollback"))
    assert set(r.load_index(live).ids) == old_ids - {"d1"}


@pytest.mark.parametrize(
    "failed",
    [pytest.param({"kettles": "no tokens"}, id="failed"), pytest.param(None, id="pending")],
)
def test_documents_of_the_log_that_are_not_in_the_index_are_left_out(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    failed: dict[str, str] | None,
) -> None:
    log = DocumentLog(live)
    log.lock()
    sequence = log.append([Change("kettles", Document("kettles", "", "Kettles."))])
    if failed is not None:
        log.mark_applied(sequence, failed)
    log.unlock()
    done(start(call, live, new_model, shared / "data"))
    standby: Any = open_index(live.with_name("live.migration") / "index")
    assert set(standby.ids) == set(r.load_index(live).ids)


def test_documents_of_the_log_are_encoded_after_a_merge(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    new_documents: Path,
    tmp_path: Path,
) -> None:
    vectors = tmp_path / "new-vectors"
    done(call("encode", "--model", masked_lm, "--data", new_documents, "--output", vectors))
    update = ("index", "--update", "--vectors", vectors, "--data", new_documents)
    done(call(*update, "--output", live))
    done(call("index", "--merge", "--output", live))
    log = DocumentLog(live)
    log.lock()
    document = Document("kettles", NEW_DOCUMENT["title"], NEW_DOCUMENT["text"])
    log.mark_applied(log.append([Change("kettles", document)]), {})
    log.unlock()
    done(start(call, live, new_model, shared / "data"))
    standby: Any = open_index(live.with_name("live.migration") / "index")
    assert set(standby.ids) == set(r.load_index(live).ids)
    assert "kettles" in standby.ids


def test_a_rollback_encodes_documents_that_arrived_after_the_cut_over(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    new_documents: Path,
    tmp_path: Path,
) -> None:
    done(start(call, live, new_model, shared / "data", "--cut-over"))
    vectors = tmp_path / "new-vectors"
    done(call("encode", "--model", new_model, "--data", new_documents, "--output", vectors))
    update = ("index", "--update", "--vectors", vectors, "--output", live)
    done(call(*update, "--data", new_documents))
    rollback = ("migrate", "--index", live, "--rollback")
    fails(call(*rollback), 1, "Give the old model, which encodes them (--old-model)")
    fails(call(*rollback, "--old-model", new_model), 1, "expected the old model of the migration")
    done(call(*rollback, "--old-model", masked_lm))
    index: Any = open_index(live)
    assert "kettles" in set(index.ids)
    assert (
        index.provenance.model_fingerprint
        == r.load_index(shared / "index").provenance.model_fingerprint
    )


def test_an_interrupted_migration_is_resumed_by_its_index_alone(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(self: throttle.Throttle) -> None:
        raise KeyboardInterrupt

    old_files = files_of(live)
    with monkeypatch.context() as patch:
        patch.setattr(throttle.Throttle, "pause", interrupt)
        outcome = start(call, live, new_model, shared / "data")
    assert outcome.code == 130
    assert "run the same command again to resume" in outcome.err
    assert files_of(live) == old_files
    fails(
        call("migrate", "--index", live, "--preview", shared / "data" / "queries.jsonl"),
        1,
        "--preview: expected a complete new index, got one that is not built yet",
    )
    fails(
        call("migrate", "--index", live, "--top-k", "32"),
        2,
        "--top-k: expected 64, with which the migration was started, got 32",
    )
    fails(
        call("migrate", "--index", live, "--model", shared / "late"),
        2,
        "--top-k requires a sparse model",
    )
    resumed = done(call("migrate", "--index", live))
    assert f"resuming the migration of {live} to {new_model}" in resumed.err
    fails(
        call("migrate", "--index", live, "--model", masked_lm, "--cut-over"),
        2,
        f"--model: the migration of {live} was started with {new_model}, got {masked_lm}",
    )
    cut_over = done(call("migrate", "--index", live, "--cut-over"))
    assert "computes in" not in cut_over.err, "without changes, no model is loaded"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param((), 2, "--model: required to start a migration", id="no model"),
        pytest.param(("--model", "minilm"), 2, "--data: required to start", id="no data"),
        pytest.param(
            ("--model", "{model}", "--data", "{data}", "--share", "0"),
            2,
            "--share: expected a number above 0 and up to 1, got 0",
            id="no share",
        ),
        pytest.param(
            ("--cut-over", "--rollback"),
            2,
            "--cut-over cannot be combined with --rollback",
            id="two actions",
        ),
        pytest.param(
            ("--discard", "--model", "minilm"),
            2,
            "--model has no effect with --discard",
            id="model of a discarded migration",
        ),
        pytest.param(("--split", "dev"), 2, "--split requires --preview", id="split alone"),
        pytest.param(("--discard",), 1, "expected a migration of", id="nothing to discard"),
        pytest.param(("--rollback",), 1, "there is no old index", id="nothing to roll back"),
        pytest.param(
            ("--model", "./missing", "--data", "{data}"),
            2,
            "--model: there is no folder ./missing",
            id="missing model",
        ),
        pytest.param(
            ("--model", "{broken}", "--data", "{data}"),
            1,
            "--model: the weights in {broken} are damaged",
            id="damaged model",
        ),
        pytest.param(
            ("--model", "{old}", "--data", "{data}"),
            1,
            "got one that this model has encoded",
            id="same model",
        ),
    ],
)
def test_migrations_that_cannot_be_are_refused_and_the_index_stays(
    call: Call,
    live: Path,
    shared: Path,
    masked_lm: str,
    new_model: str,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(new_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    values = {
        "model": new_model,
        "data": shared / "data",
        "broken": broken,
        "old": masked_lm,
    }
    before = files_of(live)
    words = [option.format(**values) for option in options]
    fails(call("migrate", "--index", live, *words), code, message.format(**values))
    assert files_of(live) == before
    assert not live.with_name("live.migration").exists()


def test_the_cut_over_needs_the_folder_of_the_new_model(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(new_model, model)
    done(start(call, live, str(model), shared / "data"))
    before = files_of(live)
    model.rename(tmp_path / "moved")
    cut_over = ("migrate", "--index", live, "--cut-over")
    fails(call(*cut_over), 2, f"--model: there is no folder {model}")
    assert files_of(live) == before
    done(call(*cut_over, "--model", tmp_path / "moved"))
    assert files_of(live) != before


@pytest.mark.parametrize(
    ("n_documents", "text", "message"),
    [
        pytest.param(
            13,
            None,
            "expected the texts of all 16 documents of {live}, got 13; 3 are missing (",
            id="too few",
        ),
        pytest.param(
            16,
            "Another text.",
            "--data: {data} has the ids of {live}, but other texts or another order",
            id="other text",
        ),
    ],
)
def test_other_documents_than_those_of_the_index_are_described(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    tmp_path: Path,
    n_documents: int,
    text: str | None,
    message: str,
) -> None:
    lines = (shared / "data" / "corpus.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:n_documents]]
    if text is not None:
        rows[-1]["text"] = text
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    outcome = start(call, live, new_model, data)
    fails(outcome, 1, str(data), message.format(live=live, data=data))
    assert "--save-run" not in outcome.err
    assert not live.with_name("live.migration").exists()


def test_an_index_of_words_is_refused_before_a_model_is_loaded(
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    data = ("--data", shared / "data")
    words = tmp_path / "words"
    done(call("index", "--backend", "bm25", *data, "--output", words))
    (tmp_path / "no-model").mkdir()
    fails(
        call("migrate", "--index", words, "--model", tmp_path / "no-model", *data),
        1,
        "one of BM25, which has no model, so that there is nothing to migrate",
    )


def test_a_folder_without_permission_is_named(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path) -> Iterator[None]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tilefold.retrieval.index.migration.lock_path", refuse)
    fails(
        start(call, live, new_model, shared / "data"),
        1,
        f"--index: {live.parent} must be writable, because the new index is built next to {live}",
        "Permission denied",
    )


def test_a_preview_counts_changed_documents() -> None:
    old_run = {"q1": {"a": 3.0, "b": 2.0, "c": 1.0}, "q2": {"a": 1.0}, "q3": {"a": 1.0}}
    new_run = {"q1": {"b": 9.0, "a": 8.0, "d": 7.0}, "q2": {"a": 5.0}}
    queries = {"q1": "one", "q2": "two", "q3": "three"}
    preview = Preview.of(old_run, new_run, queries, depth=2)
    assert preview.changed == {"q1": 0, "q2": 0, "q3": 0}
    assert preview.other_first == 2
    assert preview.other_first_queries == ["q1", "q3"]
    assert _describe_preview(preview, None)[1] == "another first document: q1, q3"
    preview = Preview.of(old_run, new_run, queries, depth=3)
    assert preview.changed == {"q1": 1, "q2": 0, "q3": 0}
    assert preview.mean_changed == pytest.approx(1 / 3)
    assert preview.same_set == 2


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("dense", "dense", id="sparse to dense"),
        pytest.param("tokens", "late", id="sparse to late interaction"),
    ],
)
def test_an_index_moves_to_a_model_of_another_kind(
    call: Call,
    live: Path,
    shared: Path,
    tmp_path: Path,
    kind: str,
    backend: str,
) -> None:
    model = "minilm" if kind == "dense" else str(shared / "late")
    data = ("--data", shared / "data")
    migrate = ("migrate", "--index", live, "--model", model, "--kind", kind, *data)
    cut_over = done(call(*migrate, "--cut-over"))
    assert f"{live} is the new index ({kind}, {model})" in cut_over.out
    assert "the old one (sparse) is in" in cut_over.out
    assert json.loads((live / "index.json").read_text())["backend"] == backend
    vectors, fresh = tmp_path / "vectors", tmp_path / "fresh"
    vectors_option = "--tokens" if kind == "tokens" else "--vectors"
    index = ("--backend", "late") if kind == "tokens" else ()
    run_steps(
        ("encode", "--model", model, "--kind", kind, *data, "--output", vectors),
        ("index", *index, vectors_option, vectors, "--output", fresh),
    )
    assert files_of(live) == files_of(fresh)
    done(call("migrate", "--index", live, "--rollback"))
    assert files_of(live) == files_of(shared / "index")


def test_an_index_of_passages_counts_passages(
    call: Call,
    shared: Path,
    new_model: str,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    live = tmp_path / "live"
    data = ("--data", shared / "data")
    passages = ("--passages", "6", "--top-k", "64")
    run_steps(
        ("encode", "--model", masked_lm, *data, "--output", tmp_path / "vectors", *passages),
        ("index", "--vectors", tmp_path / "vectors", "--output", live),
    )
    n_passages = r.load_index(live).n_documents
    started = done(start(call, live, new_model, shared / "data"))
    assert f"has all {n_passages} passages: " in started.out
    cut_over = done(call("migrate", "--index", live, "--cut-over"))
    assert f"with {n_passages} passages; the old one" in cut_over.out


def test_field_names_are_recorded_for_the_preview(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(shared / "data", data)
    rows = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({"key": row["_id"], "head": row["title"], "body": row["text"]}) for row in rows
    ]
    (data / "corpus.jsonl").write_text("\n".join(lines))
    fields = ("--id-field", "key", "--title-field", "head", "--text-field", "body")
    done(start(call, live, new_model, data, *fields, "--old-model", masked_lm))
    preview = measured(
        call("migrate", "--index", live, "--preview", data / "queries.jsonl", "--json"),
    )
    assert preview["judged"] is not None


@pytest.mark.slow
def test_processes_that_are_killed_at_random_leave_the_old_or_the_new_index(
    live: Path,
    shared: Path,
    new_model: str,
    tmp_path: Path,
) -> None:
    old_files = files_of(live)
    migration = ("migrate", "--index", live, "--share", "1")
    start_options = ("--model", new_model, "--data", shared / "data", "--top-k", "64")
    vectors, fresh = tmp_path / "vectors", tmp_path / "fresh"
    run_steps(
        ("encode", *start_options, "--output", vectors),
        ("index", "--vectors", vectors, "--output", fresh),
        (*migration, *start_options),
        ("migrate", "--index", live, "--discard"),
    )
    new_files = files_of(fresh)
    generator = random.Random(0)  # noqa: S311 - not for cryptography
    for _ in range(N_RANDOM_KILLS):
        command = ("-m", "tilefold.cli", *migration, *start_options, "--cut-over")
        with programs.start(*command, env=environment()) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(generator.uniform(0.2, 4.0))
            process.kill()
        assert files_of(live) in (old_files, new_files)
        if files_of(live) == new_files:
            run_steps((*migration, "--rollback"), ("migrate", "--index", live, "--discard"))
            assert files_of(live) == old_files
    run_steps((*migration, *start_options, "--cut-over"))
    assert files_of(live) == new_files


@pytest.mark.slow
def test_a_server_follows_a_migration_and_its_rollback_with_the_right_model(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
) -> None:
    """No request fails, and every answer is that of the old or of the new model."""
    done(start(call, live, new_model, shared / "data"))
    searched = ("--model", masked_lm, "--index", live, "--data", shared / "data")
    query = "how do I work with sockets"
    with served(*searched, "--watch-seconds", "0.05") as (_, client, _):

        def hits() -> list[tuple[str, float]]:
            reply = client.get(f"/v1/live/search?hits=16&query={query.replace(' ', '+')}")
            assert reply.status == 200, reply.raw
            return [(hit["docid"], hit["score"]) for hit in reply.json["candidates"]]

        def expected(model: str) -> list[tuple[str, float]]:
            command = ("search", query, "--index", live, "--model", model, "--k", "16", "--json")
            return [(hit["id"], hit["score"]) for hit in measured(call(*command))["hits"]]

        old_hits = expected(masked_lm)
        assert [name for name, _ in hits()] == [name for name, _ in old_hits]
        done(call("migrate", "--index", live, "--cut-over"))
        new_hits = expected(new_model)
        assert new_hits != old_hits

        def answers_like(expected_hits: list[tuple[str, float]]) -> bool:
            actual = hits()
            names = [name for name, _ in actual]
            is_old = names == [name for name, _ in old_hits]
            is_new = names == [name for name, _ in new_hits]
            assert is_old or is_new
            return names == [name for name, _ in expected_hits]

        wait_until(lambda: answers_like(new_hits))
        assert [score for _, score in hits()] == pytest.approx(
            [score for _, score in new_hits],
            rel=1e-3,
        )
        assert client.get("/info").json["model_id"] == Path(new_model).name
        done(call("migrate", "--index", live, "--rollback"))
        wait_until(lambda: answers_like(old_hits))


@pytest.mark.slow
def test_a_server_keeps_the_old_index_if_the_new_model_cannot_be_loaded(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(new_model, model)
    done(start(call, live, str(model), shared / "data", "--old-model", masked_lm))
    key = tmp_path / "key"
    key.write_text("open sesame")
    options = ("--model", masked_lm, "--index", live, "--watch-seconds", "0")
    with served(*options, "--admin-key-file", key) as (_, client, _):
        client.headers = {"authorization": "Bearer open sesame"}
        search = "/v1/live/search?hits=3&query=sockets"
        hits = client.get(search).json
        weights = model / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(b"no weights")
        done(call("migrate", "--index", live, "--cut-over"))
        reply = client.request("POST", "/admin/reload")
        assert reply.status == 409
        assert f"the weights in {model} are damaged" in reply.json["error"]
        assert client.get(search).json == hits
        weights.write_bytes(content)
        assert client.request("POST", "/admin/reload").status == 200
        assert client.get("/info").json["model_id"] == model.name


@pytest.mark.slow
def test_documents_over_http_come_into_both_indexes(
    call: Call,
    live: Path,
    shared: Path,
    new_model: str,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    """Those of before, during and after the migration, which ``--data`` does not have."""
    key = tmp_path / "key"
    key.write_text("open sesame")
    searched = ("--model", masked_lm, "--index", live, "--data", shared / "data")
    with served(*searched, "--watch-seconds", "0.05", "--admin-key-file", key) as (_, client, _):

        def put(name: str) -> None:
            content = {"documents": [{"id": name, "text": f"Read and write {name}."}]}
            reply = client.request(
                "PUT",
                "/documents?wait=true",
                json.dumps(content).encode(),
                content_type="application/json",
                authorization="Bearer open sesame",
            )
            assert reply.status == 200, reply.raw
            assert reply.json["visible"], reply.raw

        def generation_is_new() -> bool:
            return bool(client.get("/info").json["model_id"] == Path(new_model).name)

        put("before")
        done(start(call, live, new_model, shared / "data", "--old-model", masked_lm))
        put("during")
        done(call("migrate", "--index", live, "--cut-over"))
        assert {"before", "during"} < set(r.load_index(live).ids)
        wait_until(generation_is_new)
        put("after")
        done(call("migrate", "--index", live, "--rollback"))
        index: Any = open_index(live)
        assert {"before", "during", "after"} < set(index.ids)
        assert set(index.ids) == set(r.load_index(live.with_name("live.migration") / "index").ids)
        wait_until(lambda: not generation_is_new())
        reply = client.get("/v1/live/search?hits=20&query=after")
        assert "after" in {hit["docid"] for hit in reply.json["candidates"]}
