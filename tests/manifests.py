"""Manifests that somebody edited."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def sha256_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def edit(file: Path, **changes: Any) -> None:
    """Change members of the JSON object in `file`; None removes one. It is left without a checksum
    of itself.
    """
    value = json.loads(file.read_text(encoding="utf-8"))
    for name, item in {**changes, "checksum": None}.items():
        value.pop(name, None) if item is None else value.update({name: item})
    file.write_text(json.dumps(value), encoding="utf-8")


def sum_shards(folder: Path) -> None:
    """Write the manifest of a folder of vectors whose shards were changed."""
    shards = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["shards"]
    edit(
        folder / "manifest.json",
        shards=[part | {"sha256": sha256_file(folder / part["file"])} for part in shards],
    )


def sum_terms(folder: Path) -> None:
    """Write the checksums by term of an exact index whose postings were changed."""
    offsets, documents, weights = (
        np.load(folder / f"{name}.npy") for name in ("offsets", "documents", "weights")
    )
    spans = [slice(*pair) for pair in itertools.pairwise(offsets)]
    sums = [
        zlib.crc32(weights[span].tobytes(), zlib.crc32(documents[span].tobytes())) for span in spans
    ]
    np.save(folder / "checksums.npy", np.array(sums, np.uint32))


def sum_files(folder: Path) -> None:
    """Write the manifest of an index whose files were changed."""
    files = {file.name: sha256_file(file) for file in folder.iterdir() if file.name != "index.json"}
    edit(folder / "index.json", files=files)
