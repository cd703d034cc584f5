"""Manifests that somebody edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit(file: Path, **changes: Any) -> None:
    """Change members of the JSON object in `file`; None removes one. It is left without a checksum of itself."""
    value = json.loads(file.read_text(encoding="utf-8"))
    for name, item in {**changes, "checksum": None}.items():
        value.pop(name, None) if item is None else value.update({name: item})
    file.write_text(json.dumps(value), encoding="utf-8")
