"""The environment of Python processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """That of this process, with packages from these folders, then from the sources and from where
    it has them.
    """
    path = [*map(str, folders), str(SOURCES), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)} | variables
