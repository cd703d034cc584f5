"""Token vectors that were made elsewhere: a safetensors or npz file of arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.tokens import TokenVectors, safetensors_package

__all__ = ["read_token_file"]

_LAYOUTS = (
    "Expected one array [n, D] for each text under its id; or values [T, D] with offsets [N + 1]; or embeddings "
    "[N, L, D], zero or left out by a mask [N, L] behind a text's end. The latter two may have ids: a list of N"
)


def read_token_file(path: str | Path) -> TokenVectors:
    """The vectors in a ``.safetensors`` or ``.npz`` file, in fp32, for
    :meth:`tilefold.retrieval.LateIndex.build`.

    The file has an array ``[n, D]`` for each text, named by its id; or ``values`` ``[T, D]`` and
    ``offsets`` ``[N + 1]``; or padded ``embeddings`` ``[N, L, D]``, as ColPali makes of pages, with
    a ``mask`` ``[N, L]`` (nonzero = keep), without which rows of zeros are left out. The latter two
    have ``ids``, in safetensors as UTF-8 bytes of a JSON list, else texts are numbered from 0.
    ``DataError`` for other arrays, and for NaN or infinity.
    """
    file = Path(path)
    found = _arrays(file)
    names = found.pop("ids", None)
    try:
        if "embeddings" in found:
            padded, mask = found["embeddings"].float(), found.get("mask")
            kept = padded.abs().amax(-1) > 0 if mask is None else mask != 0
            rows = [
                row[keep] for row, keep in zip(padded, kept | padded.isnan().any(-1), strict=True)
            ]
        elif "values" in found and "offsets" in found:
            rows = list(found["values"].float().split(found["offsets"].long().diff().tolist()))
        else:
            names, rows = list(found), [each.float() for each in found.values()]
        given = [str(number) for number in range(len(rows))] if names is None else names
        return TokenVectors.pack(given, rows, int(rows[0].size(-1)), "fp32")
    except (RuntimeError, IndexError, ValueError) as error:  # of shapes that do not fit
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in list(found.items())[:4])
        raise DataError(f"{file}: {_LAYOUTS}. Got {shapes or 'none'} ({error}).") from error


def _arrays(file: Path) -> dict[str, Any]:
    """Name -> tensor, and the ids as a list."""
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                arrays: Mapping[str, Any] = {name: archive[name] for name in archive.files}
            made: dict[str, Any] = {
                name: torch.from_numpy(each) for name, each in arrays.items() if name != "ids"
            }
            return made | (
                {"ids": list(map(str, arrays["ids"].tolist()))} if "ids" in arrays else {}
            )
        with safetensors_package().safe_open(str(file), framework="pt") as opened:
            made = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        raw: Tensor | None = made.pop("ids", None)
        return (
            made
            if raw is None
            else made | {"ids": json.loads(raw.numpy().tobytes().decode("utf-8"))}
        )
    except Exception as error:  # safetensors and numpy raise their own for damaged files
        raise DataError(
            f"{file}: expected a safetensors or npz file of token vectors, got ({error}).",
        ) from error
