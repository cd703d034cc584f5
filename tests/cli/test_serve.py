"""``tilefold serve``: what it refuses before it loads a model, and a process that starts, answers
and ends.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder

from tests import programs
from tests.cli.program import fails
from tests.processes import environment
from tests.serve.running import Client, served
from tests.test_imports import HIDE, run_python
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold.cli import serve as serve_command
from tilefold.cli._common import CommandError
from tilefold.cli.serve import ServeRequest, _load_service
from tilefold.integrations import sentence_transformers as sentence_transformers_integration
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.backbone import minilm_path
from tilefold.retrieval import DenseIndex, encode_dense_collection, open_dense
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.index.merging import update_index
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.search.searcher import Searcher
from tilefold.serve import searchable
from tilefold.serve import service as serve_service
from tilefold.serve.settings import Limits


def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(
    call: Any,
    tmp_path: Path,
) -> None:
    empty, several = tmp_path / "key", tmp_path / "keys"
    empty.write_text("\n")
    several.write_text("a\nb\n")
    one = "--api-key-file: expected one line with the key in"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, code, message in (
            (("--api-key-file", empty), 2, f"{one} {empty}, got an empty file"),
            (("--api-key-file", several), 2, f"{one} {several}, got 2 lines"),
            (
                ("--port", port),
                1,
                f"cannot listen on 127.0.0.1:{port} (Address already in use); try --port 0.",
            ),
        ):
            fails(call("serve", "--model", "minilm", *options), code, message)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(("--index", "missing"), 1, "missing", id="no index"),
        pytest.param(("--index", "{index}", "--data", "missing"), 1, "missing", id="no data"),
        pytest.param(("--index", "{index}", "--vectors", "missing"), 1, "missing", id="no vectors"),
        pytest.param(("--index", "{index}", "--bm25", "missing"), 1, "missing", id="no BM25 index"),
        pytest.param(
            ("--index", "{index}", "--bm25", "{index}"),
            2,
            "is an index of vectors",
            id="index of vectors as --bm25",
        ),
        pytest.param(
            ("--index", "{index}", "--heap-factor", "0.5"),
            2,
            "--heap-factor requires an index of backend seismic",
            id="option of another backend",
        ),
    ],
)
def test_files_that_options_name_are_checked_before_the_server_listens(
    call: Any,
    shared: Path,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    paths = [option.format(index=shared / "index") for option in options]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]  # listening would fail, with an error about the port
        outcome = call("serve", "--port", str(port), "--model", "minilm", *paths)
    fails(outcome, code, message)
    assert "cannot listen" not in outcome.err


@pytest.mark.parametrize(
    ("gpus", "n_searches"),
    [
        pytest.param([], [1], id="cpu"),
        # Threads search until CUDA graphs are captured; the first one has searched before.
        pytest.param(["cuda:0"], [10, 5, 5, 5], id="gpu"),
    ],
)
def test_the_index_is_searched_in_the_threads_of_searches_before_the_server_is_ready(
    gpus: list[str],
    n_searches: list[int],
    shared: Path,
    masked_lm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first search may copy the index to a GPU, and each thread needs handles of its own."""
    for module in (searchable, serve_service):
        monkeypatch.setattr(module, "gpus_of", lambda index: gpus)
    thread_names: list[str] = []
    rank = Searcher.rank

    def record_and_rank(searcher: Searcher, *arguments: Any) -> Any:
        thread_names.append(threading.current_thread().name)
        return rank(searcher, *arguments)

    def fail(searcher: Searcher, *arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    request = ServeRequest(model=masked_lm, index=shared / "index")
    stages: list[str] = []
    monkeypatch.setattr(Searcher, "rank", record_and_rank)
    _load_service(request, Limits(), stages.append)
    counts = Counter(thread_names)
    assert all(name.startswith("tilefold-searcher") for name in counts)
    assert sorted(counts.values(), reverse=True) == n_searches
    assert stages[-1] == "searching for a first word"
    monkeypatch.setattr(Searcher, "rank", fail)
    with pytest.raises(CommandError, match=r"--index: .* cannot be searched \(out of memory\)"):
        _load_service(request, Limits(), stages.append)


def test_an_index_that_only_one_thread_can_search_at_a_time_is_served(
    shared: Path,
    masked_lm: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in (searchable, serve_service):
        monkeypatch.setattr(module, "gpus_of", lambda index: ["cuda:0"])
    rank = Searcher.rank
    n_calls = 0

    def fail_once_while_searching_together(searcher: Searcher, *arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 6:  # the first of the searches at the same time
            raise RuntimeError("out of memory")
        return rank(searcher, *arguments)

    monkeypatch.setattr(Searcher, "rank", fail_once_while_searching_together)
    request = ServeRequest(model=masked_lm, index=shared / "index")
    with caplog.at_level("WARNING", "tilefold.serve"):
        service = _load_service(request, Limits(), lambda stage: None)
    assert service.searchable is not None
    assert "1 of 4 at the same time failed" in caplog.text
    assert "(RuntimeError: out of memory)" in caplog.text


def test_a_model_that_fails_in_the_self_check_is_served_without_acceleration(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(model: Any) -> None:
        raise RuntimeError("model must be able to score four short sequences")

    monkeypatch.setattr(sentence_transformers_integration, "accelerate", fail)
    service = _load_service(ServeRequest(model="minilm"), Limits(), print)
    assert service.models["dense"].acceleration is None
    assert "plain model: model must be able to score" in capsys.readouterr().err


@pytest.mark.parametrize("with_index", [False, True], ids=["model", "index"])
def test_dense_models_are_accelerated_before_they_are_served(
    with_index: bool,
    tmp_path: Path,
) -> None:
    index = None
    if with_index:
        minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
        encode_dense_collection(minilm, {"csv": "read files of rows"}, tmp_path / "vectors")
        index = tmp_path / "index"
        DenseIndex.build(open_dense(tmp_path / "vectors")).save(index)
    service = _load_service(ServeRequest(model="minilm", index=index), Limits(), print)
    assert service.models["dense"].acceleration == {"packed": True, "graphs": 0}


def test_an_index_that_changes_while_the_model_is_loaded_is_opened_again(
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(shared / "index", tmp_path / "index")
    deleted_id = open_index(tmp_path / "index").ids[0]
    load_with_index = serve_command._load_with_index

    def load_and_change(*arguments: Any) -> Any:
        searchable = load_with_index(*arguments)
        update_index(tmp_path / "index", delete=[deleted_id])  # as another process
        return searchable

    monkeypatch.setattr(serve_command, "_load_with_index", load_and_change)
    request = ServeRequest(model=masked_lm, index=tmp_path / "index", watch_seconds=0)
    service = _load_service(request, Limits(), lambda stage: None)

    assert service.searchable is not None
    assert service.searchable.generation == read_generation(tmp_path / "index").id
    assert deleted_id not in service.searchable.index.ids


def test_without_fastapi_the_error_says_what_to_install() -> None:
    code = """
from tilefold import cli
try:
    cli.main(["serve", "--model", "minilm"])
except SystemExit as leave:
    print(leave.code)
"""
    with pytest.raises(pytest.fail.Exception) as failed:
        run_python(HIDE.format(hidden={"fastapi"}) + code + "\nraise SystemExit(3)")
    assert 'pip install "tilefold[serve]"' in str(failed.value)


def test_paths_that_do_not_belong_together_are_refused(
    call: Any,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    Collection("other", {"a": Document("a", "", "of another collection")}, {}, {}).save_beir(
        tmp_path / "other",
    )
    assert (
        call(
            "index",
            "--backend",
            "bm25",
            "--data",
            tmp_path / "other",
            "--output",
            tmp_path / "words",
        ).code
        == 0
    )
    indexed = ("--model", masked_lm, "--index", shared / "index")
    for options, code, message in (
        ((*indexed, "--data", tmp_path / "other"), 1, "was made from other documents"),
        ((*indexed, "--bm25", tmp_path / "words"), 1, "--bm25:"),
    ):
        fails(call("serve", "--port", "0", *options), code, message)


def test_a_served_index_answers_and_ends_at_a_signal_with_code_0(
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text("sesam\n")
    options, model = ["--model", masked_lm], Path(masked_lm).name
    for name in ("index", "data", "vectors", "bm25", "tokens"):
        options += [f"--{name}", str(shared / name)]
    options += ["--name", "small", "--api-key-file", str(key)]
    options += [
        "--cors-allow-origin",
        "https://a.example",
        "--cors-allow-origin",
        "https://b.example",
    ]
    with served(*options) as (process, client, line):
        assert f"{model} and late and small at http://127.0.0.1:{client.port};" in line
        client.headers = {"authorization": "Bearer sesam"}
        (row,) = client.post(
            "/embed_sparse",
            {"inputs": "read csv files", "top_k": 4, "format": "tokens"},
        ).json
        assert (len(row), client.get("/info").json["model_id"]) == (4, model)
        reply = client.request("GET", "/info", Origin="https://b.example")
        assert reply.headers["access-control-allow-origin"] == "https://b.example"
        body = {"query": "csv files", "fusion": True, "prf": True, "rerank": True, "explain": True}
        answer = client.post("/v1/small/search", body)
        assert answer.json["candidates"][0]["explanation"]["stages"].keys() >= {"late"}
        assert (
            client.post("/rerank", {"query": "csv", "texts": ["csv files", "dates"]}).status == 200
        )
        assert str(shared) not in json.dumps(
            [client.get("/info").json, client.get("/v1/indexes").json, answer.json],
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0


def test_a_hangup_lets_a_server_open_the_changed_index(
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    shutil.copytree(shared / "index", path)
    options = ("--model", masked_lm, "--index", path, "--watch-seconds", "0")
    with served(*options) as (process, client, _):
        first_id = str(open_index(path).ids[0])
        update_index(path, delete=[first_id])
        process.send_signal(signal.SIGHUP)
        generation = read_generation(path).id
        wait_until(lambda: client.get("/info").json["index"]["generation"] == generation)
        (index,) = client.get("/v1/indexes").json["indexes"]
        assert index["documents"] == open_index(path).n_documents
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0
        log = process.stderr.read()
    assert f"index index: generation {generation} (exact, sparse model " in log


def test_a_model_that_cannot_encode_is_refused_before_it_is_served(
    call: Any,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    shutil.copytree(masked_lm, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    broken = {name: value * float("nan") for name, value in weights.items()}
    save_file(broken, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    fails(
        call("serve", "--port", "0", "--model", tmp_path / "broken"),
        1,
        "broken cannot encode a word",
    )


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tilefold import cli
cli.main(sys.argv[1:])
"""


def test_more_connections_than_files_are_refused_and_fill_no_log(
    masked_lm: str,
    tmp_path: Path,
) -> None:
    command = ("-c", FEW_FILES, "serve", "--model", masked_lm, "--port", "0")
    log = tmp_path / "log"
    log.touch()
    with programs.start(*command, env=environment(OMP_NUM_THREADS="1"), stderr=log) as process:
        try:
            wait_until(lambda: "Ctrl-C ends" in log.read_text())
            client = Client(int(re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())[1]))
            with ExitStack() as opened:
                for _ in range(120):
                    opened.enter_context(
                        socket.create_connection(("127.0.0.1", client.port), timeout=WAIT_SECONDS),
                    )
                time.sleep(2.5)  # asyncio tries again after 1 s
            wait_until(lambda: client.get("/health").status == 200)
            assert client.post("/embed_sparse", {"inputs": "a"}).status == 200
        finally:
            process.kill()
    lines = log.read_text().splitlines()
    (message,) = [line for line in lines if "max_connections" in line]
    assert re.search(
        r"max_connections: \d+ instead of 1024, since this process may have 64 files open",
        message,
    )
    assert len(lines) < 8, lines[:20]


def test_the_weights_of_a_model_are_freed_when_it_is_not_served_any_more(masked_lm: str) -> None:
    """Without the garbage collector, from which a server exempts its objects."""
    model = SparseEncoder(masked_lm, device="cpu")
    accelerate(model)
    weights = [*model.parameters(), *model.buffers()]
    encoder = serve_command._wrap_encoder(model, "exact", "model")
    with torch.inference_mode():  # as forwards of some models do
        model.register_buffer("created_by_forward", torch.ones(2))
    weights.append(model.created_by_forward)
    del model
    gc.freeze()
    try:
        assert encoder.model.encode_document(["a"]).shape[0] == 1
        assert all(weight.numel() for weight in weights)
        del encoder
        wait_until(lambda: not any(weight.numel() for weight in weights))
    finally:
        gc.unfreeze()


def test_the_weights_of_a_reranking_model_are_freed_when_it_is_not_served_any_more(
    shared: Path,
    masked_lm: str,
) -> None:
    tokens = str(shared / "tokens")
    request = ServeRequest(model=masked_lm, index=shared / "index", tokens=tokens)
    reranker = serve_command._load_reranker(request, tokens, encodes_texts=False)
    assert reranker.model is not None
    weights = list(reranker.model.model.parameters())
    gc.freeze()
    try:
        assert all(weight.numel() for weight in weights)
        del reranker
        wait_until(lambda: not any(weight.numel() for weight in weights))
    finally:
        gc.unfreeze()
