"""Tests of the container file: its images, start command and health check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment
from tests.serve.running import served
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "containers" / "Dockerfile"


STAGES = pytest.mark.parametrize("stage", ["cpu", "cuda"])


def instructions(stage: str) -> list[tuple[str, str]]:
    """Return the instructions of an image and their arguments.

    Instructions of the stage from which the image starts come first.
    """
    by_stage: dict[str, list[tuple[str, str]]] = {}
    stage_name = ""
    for line in DOCKERFILE.read_text(encoding="utf-8").splitlines():
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            base, _, stage_name = arguments.partition(" AS ")
            by_stage[stage_name] = list(by_stage.get(base, []))
        elif instruction and instruction != "#":
            by_stage[stage_name].append((instruction, arguments))
    return by_stage[stage]


@STAGES
def test_an_image_does_not_run_as_root(stage: str) -> None:
    assert instructions(stage)[-1] == ("USER", "tilefold")


@STAGES
def test_an_image_starts_a_server_on_the_loopback_address(stage: str) -> None:
    arguments = dict(instructions(stage))
    assert arguments["ENTRYPOINT"] == '["tilefold", "serve"]'
    assert arguments["CMD"] == '["--model", "/model"]'
    every_address = "0.0.0.0"  # noqa: S104 - it must not be in the file
    assert every_address not in DOCKERFILE.read_text(encoding="utf-8")


@STAGES
def test_copied_files_exist_and_are_in_the_build_context(stage: str) -> None:
    ignore_file = DOCKERFILE.parent / "Dockerfile.dockerignore"
    ignore_rules = ignore_file.read_text(encoding="utf-8").split()
    for instruction, arguments in instructions(stage):
        if instruction == "COPY":
            *sources, _ = arguments.split()
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignore_rules


@STAGES
def test_installed_extras_are_declared(stage: str) -> None:
    installed: set[str] = set()
    for _, arguments in instructions(stage):
        for extras in re.findall(r"/source\[(.*?)\]", arguments):
            installed.update(extras.split(","))
    project_file = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r"^([a-z-]+) = \[", project_file, re.MULTILINE)
    assert "serve" in installed
    assert installed <= set(declared)


def test_the_health_check_of_an_image_finds_the_server_of_its_command(masked_lm: str) -> None:
    arguments = dict(instructions("cpu"))
    program, subcommand, *options = json.loads(arguments["ENTRYPOINT"]) + json.loads(
        arguments["CMD"],
    )
    assert (program, subcommand) == ("tilefold", "serve")
    options = [masked_lm if option == "/model" else option for option in options]
    interpreter, *check_options, check_code = json.loads(
        arguments["HEALTHCHECK"].partition(" CMD ")[2],
    )
    assert interpreter == "python"
    assert ":8080/" in check_code
    with served(*options) as (_, client, address_line):
        assert "http://127.0.0.1:" in address_line
        assert client.post("/embed_sparse", {"inputs": "a"}).status == 200
        code_for_port = check_code.replace(":8080/", f":{client.port}/")
        patient_code, n_timeouts = re.subn(r"timeout=\d+", f"timeout={WAIT_SECONDS}", code_for_port)
        assert n_timeouts == 1
        health_check = [sys.executable, *check_options, patient_code]
        while_served = subprocess.run(health_check, env=environment(), check=False)
    after_end = subprocess.run(
        health_check,
        env=environment(),
        check=False,
        stderr=subprocess.DEVNULL,
    )
    assert while_served.returncode == 0
    assert after_end.returncode != 0
