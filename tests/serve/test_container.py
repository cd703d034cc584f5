"""The container file: what each image is made of, and its start command and health check as
processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.processes import environment
from tests.serve.running import served

ROOT = Path(__file__).parents[2]
FILE = ROOT / "containers" / "Dockerfile"


def instructions(stage: str) -> list[tuple[str, str]]:
    """The instructions of an image, those of the stage that it begins with first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            start, _, name = rest.partition(" AS ")
            found[name] = [*found.get(start, [])]
        elif word and word != "#":
            found[name].append((word, rest))
    return found[stage]


def test_images_run_as_a_user_and_listen_on_the_loopback_address_unless_told() -> None:
    for stage in ("cpu", "cuda"):
        made = instructions(stage)
        words = dict(made)
        assert made[-1] == ("USER", "tilefold"), (
            "the last instruction, so that nothing runs as root"
        )
        assert (words["ENTRYPOINT"], words["CMD"]) == (
            '["tilefold", "serve"]',
            '["--model", "/model"]',
        )
        assert "0.0.0.0" not in FILE.read_text(encoding="utf-8")  # noqa: S104 - what must not be there
        copied = [place for word, rest in made if word == "COPY" for place in rest.split()[:-1]]
        kept = (FILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
        for place in copied:
            assert (ROOT / place).exists() and f"!{place}" in kept
        extras = {
            extra
            for _, rest in made
            for found in re.findall(r"/source\[(.*?)\]", rest)
            for extra in found.split(",")
        }
        declared = re.findall(
            r"^([a-z-]+) = \[",
            (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert "serve" in extras and extras <= set(declared)


def test_the_command_of_an_image_starts_a_server_that_its_health_check_finds(
    masked_lm: str,
) -> None:
    words = dict(instructions("cpu"))
    command = json.loads(words["ENTRYPOINT"]) + json.loads(words["CMD"])
    assert command[:2] == ["tilefold", "serve"]
    options = [masked_lm if word == "/model" else word for word in command[2:]]
    check = json.loads(words["HEALTHCHECK"].partition(" CMD ")[2])
    with served(*options) as (_, client, line):
        assert (
            "http://127.0.0.1:" in line
            and client.post("/embed_sparse", {"inputs": "a"}).status == 200
        )
        assert check[0] == "python" and ":8080/" in check[-1]
        probe = [sys.executable, *check[1:-1], check[-1].replace(":8080/", f":{client.port}/")]
        assert subprocess.run(probe, env=environment(), check=False).returncode == 0
    assert (
        subprocess.run(probe, env=environment(), check=False, stderr=subprocess.DEVNULL).returncode
        != 0
    )
