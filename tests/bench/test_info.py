"""``tilefold info``: versions, devices and what runs on them."""

from __future__ import annotations

import json

import torch
import typer
from typer.testing import CliRunner

import tilefold
from tilefold.cli.info import OPTIONAL_PACKAGES, info


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(info)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_json_says_what_auto_runs_on_every_device_and_what_is_installed() -> None:
    facts = json.loads(run("--json"))
    assert facts["tilefold"] == tilefold.__version__
    assert facts["torch"] == torch.__version__
    assert facts["operators"]["lsr_head"]["cpu"]["auto"] == "tiled"
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert set(facts["packages"]) == set(OPTIONAL_PACKAGES)


def test_the_text_names_the_version_the_operators_and_the_packages() -> None:
    printed = run()
    assert f"tilefold {tilefold.__version__}" in printed
    assert "lsr_head_sparse" in printed
    assert "sentence-transformers" in printed
