"""``tilefold serve``: what it refuses before it loads a model, and a process that starts, answers and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.tiny import tiny_masked_lm
from tests.serve.running import Client
from tests.test_imports import HIDE, SOURCES, run_python


def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(call: Any, tmp_path: Path) -> None:
    empty = tmp_path / "key"
    empty.write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, code, message in (
            (("--default-side", "both"), 2, "--default-side: expected query or document, got 'both'."),
            (("--payload-limit", "0"), 2, "--payload-limit: expected at least 1, got 0."),
            (
                ("--max-client-batch-size", "600"),
                2,
                "--max-client-batch-size: expected at most max-concurrent-requests",
            ),
            (("--api-key-file", tmp_path / "none"), 2, "--api-key-file:"),
            (("--api-key-file", empty), 2, "--api-key-file: expected one line with the key"),
            (("--port", port), 1, f"cannot listen on 127.0.0.1:{port} (Address already in use); try --port 0."),
        ):
            outcome = call("serve", "--model", "minilm", *options)
            assert (outcome.code, message in outcome.err) == (code, True), outcome.err
    missing = call("serve", "--model", tmp_path / "no-model", "--port", "0")
    assert (missing.code, "--model: there is no folder" in missing.err) == (2, True)


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


def test_a_served_model_answers_and_ends_at_a_signal_with_code_0(tmp_path: Path, collection: Any) -> None:
    model = tiny_masked_lm(tmp_path / "tiny", collection)
    key = tmp_path / "key"
    key.write_text("sesam\n")
    command = [
        sys.executable,
        "-m",
        "tilefold.cli",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--api-key-file",
        str(key),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "http://" in line)
            port = int(re.search(r"tiny at http://127\.0\.0\.1:(\d+); Ctrl-C ends", line)[1])
            client = Client(port, {"authorization": "Bearer sesam"})
            (row,) = client.post("/embed_sparse", {"inputs": "read csv files", "top_k": 4, "format": "tokens"}).json
            assert (len(row), client.get("/info").json["model_id"]) == (4, "tiny")
            assert str(tmp_path) not in json.dumps(client.get("/info").json)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
