"""The way of ``hidden`` in docs/architecture.md is the one that a call takes, and the document counts it rightly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.ops.interpreter import NEEDS_INTERPRETER

ROOT = Path(__file__).resolve().parents[1]
SOURCES = f"{ROOT / 'src' / 'tilefold'}{os.sep}"
ROW = re.compile(r"^\| (\d*) ?\| `([\w.]+)` \| `([\w/.]+)` \|", re.MULTILINE)
COUNTS = re.compile(r"^\| (?:forward|backward) \| (\d+) in (\d+) files .*\| (\d+) in (\d+) files ", re.MULTILINE)

Function = tuple[str, str]  # name and file
pytestmark = [
    *NEEDS_INTERPRETER,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names"),
    pytest.mark.skipif(not importlib.util.find_spec("sentence_transformers"), reason="needs sentence-transformers"),
]


def test_the_way_of_hidden_is_the_one_that_is_written_down() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.test_architecture"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, forward, backward = re.split(r"^\| \| function \|.*$", document, flags=re.MULTILINE)
    counts = COUNTS.findall(document)
    for text, measured, counted in zip((forward, backward), json.loads(done.stdout), counts, strict=True):
        rows = ROW.findall(text)
        assert [[name, file] for _, name, file in rows] == measured["entered"]
        numbered = [[name, file] for number, name, file in rows if number]
        assert numbered in measured["launches"], "the numbered functions call one another, the last one a kernel"
        files = [len({file for _, file in functions}) for functions in (numbered, measured["entered"])]
        assert [int(n) for n in counted] == [len(numbered), files[0], len(rows), files[1]]


class Walk:
    """The functions of the package that a call enters, and those that are open at each launch of a kernel."""

    def __init__(self) -> None:
        self.entered: dict[Function, None] = {}
        self.launches: list[list[Function]] = []
        self._launch: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What ``sys.setprofile`` calls."""
        if self._launch is not None:
            if event == "return" and frame is self._launch:
                self._launch = None
        elif event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.entered[name_of(frame)] = None
        elif event == "call" and frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
            self._launch, opened, caller = frame, [], frame.f_back
            while caller is not None:
                if caller.f_code.co_filename.startswith(SOURCES):
                    opened.append(name_of(caller))
                caller = caller.f_back
            self.launches.append(opened[::-1])


def name_of(frame: FrameType) -> Function:
    """Lambdas and comprehensions have the name of the function around them."""
    code: Any = frame.f_code
    file = Path(code.co_filename.removeprefix(SOURCES)).as_posix()
    return code.co_qualname.partition(".<locals>")[0], file


def main() -> None:
    """Write what the third training step through an accelerated pooling enters, forward and backward."""
    import torch
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tests.ops.quick_interpreter import quicken
    from tilefold.integrations.sentence_transformers._pooling import FusedSpladePooling

    quicken()
    head, hidden = torch.nn.Linear(32, 64), torch.randn(2, 8, 32, requires_grad=True)
    pooling = FusedSpladePooling(SpladePooling(), head, "triton")
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    for _ in range(3):
        walks = Walk(), Walk()
        sys.setprofile(walks[0])
        scores = pooling({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]
        sys.setprofile(None)
        loss = scores.square().sum()
        sys.setprofile(walks[1])
        loss.backward()
        sys.setprofile(None)
    json.dump([{"entered": list(walk.entered), "launches": walk.launches} for walk in walks], sys.stdout)


if __name__ == "__main__":
    main()
