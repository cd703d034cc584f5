"""Requests of commands check their options, and ``--help`` shows all of them in 80 columns."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.cli.program import Call, done
from tilefold import cli
from tilefold.cli._common import UsageError
from tilefold.cli._options import DocumentFieldOptions, declared_options, spellings
from tilefold.cli.encode import EncodeRequest
from tilefold.cli.index import IndexRequest
from tilefold.cli.search import SearchCommandRequest

COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def encode_request(**options: object) -> EncodeRequest:
    """Return a request of ``tilefold encode`` with its required options."""
    return EncodeRequest(model="m", data="d", output=Path("o"), **options)  # type: ignore[arg-type]


def test_a_request_has_the_defaults_of_the_command_line() -> None:
    request = encode_request()
    assert request.shard_size == 1024
    assert request.resume
    assert request.top_k is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"engine": "spark"},
            "--engine: expected one of local, ray, got 'spark'",
            id="an unknown choice",
        ),
        pytest.param(
            {"dry_run": True, "resume": False},
            "--resume/--fresh has no effect with --dry-run",
            id="a flag that is off",
        ),
        pytest.param(
            {"stride": 10},
            "--stride requires --passages",
            id="an option of a group",
        ),
        pytest.param(
            {"data": "pydocs", "text_field": "body"},
            "--text-field cannot be combined with --data pydocs",
            id="a field of documents",
        ),
    ],
)
def test_a_request_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(encode_request(), **options)  # type: ignore[arg-type]


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        encode_request().top_k = 3  # type: ignore[misc]


def test_own_options_precede_those_of_groups() -> None:
    names = list(declared_options(SearchCommandRequest))
    assert names[0] == "query"
    assert names.index("save_run") < names.index("rerank") < names.index("id_field")


def test_spellings_name_both_forms_of_a_flag() -> None:
    names = spellings(EncodeRequest)
    assert names["resume"] == "--resume/--fresh"
    assert names["shard_size"] == "--shard-size"
    assert "query" not in spellings(SearchCommandRequest)  # an argument


def test_an_index_is_exact_unless_another_backend_is_given() -> None:
    assert IndexRequest(output=Path("i")).new_backend == "exact"
    assert issubclass(IndexRequest, DocumentFieldOptions)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_whole_and_an_example(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = done(call(command, "--help")).out
    group = typer.main.get_command(cli.app)
    for parameter in group.commands[command].params:  # type: ignore[attr-defined]
        if getattr(parameter, "hidden", False):
            continue
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name in text
    assert "…" not in text
    assert "Example:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_usage_error_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    command = ["encode", "--model", "m", "--data", "d", "--output", "o", "--split", "dev"]
    code = (
        "import sys\n"
        "from tilefold import cli\n"
        "try:\n"
        f"    cli.main({command!r})\n"
        "except SystemExit as leave:\n"
        "    assert leave.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    # a program of its own: those of tests.programs have imported torch already
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "--split requires --queries" in outcome.stderr
