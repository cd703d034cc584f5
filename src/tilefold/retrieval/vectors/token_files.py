"""Reading of token vectors that other programs wrote into safetensors or npz files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import path_of
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.tokens import TokenVectors, safetensors_package

__all__ = ["read_token_file"]

# Arrays that an error lists.
_SHOWN_ARRAYS = 4

_LAYOUTS = (
    "Expected one array [n, D] for each text under its id; or values [T, D] with offsets [N + 1]; "
    "or embeddings [N, L, D], zero or left out by a mask [N, L] behind a text's end. The latter "
    "two may have ids: a list of N"
)


def read_token_file(path: str | Path) -> TokenVectors:
    """Read token vectors of another program for :meth:`tilefold.retrieval.LateIndex.build`.

    The file has one of three layouts:

    * An array ``[n, D]`` for each text, named by its id.
    * Packed ``values`` ``[T, D]`` and ``offsets`` ``[N + 1]``. Integer values have ``scales``
      ``[T]``.
    * Padded ``embeddings`` ``[N, L, D]``, as ColPali makes of pages. A ``mask`` ``[N, L]`` is
      nonzero for vectors; without it, rows of zeros are padding.

    The latter two may have ``ids``, in safetensors as UTF-8 bytes of a JSON list. By default texts
    are numbered from 0.

    Args:
        path: a ``.safetensors`` or ``.npz`` file.

    Returns:
        The vectors in fp32.

    Raises:
        DataError: for other arrays, and for NaN or infinity.
    """
    file = path_of("path", path)
    tensors, ids = _read_arrays(file)
    try:
        if "embeddings" in tensors:
            vectors = _without_padding(tensors["embeddings"].float(), tensors.get("mask"))
        elif "values" in tensors and "offsets" in tensors:
            lengths = tensors["offsets"].long().diff().tolist()
            vectors = list(torch.split(_scaled_values(tensors), lengths))
        else:
            ids = list(tensors)
            vectors = [tensor.float() for tensor in tensors.values()]
        if ids is None:
            ids = [str(number) for number in range(len(vectors))]
        return TokenVectors.pack(ids, vectors, int(vectors[0].size(-1)), "fp32")
    except (RuntimeError, IndexError, ValueError) as error:  # of shapes that do not fit
        shown = list(tensors.items())[:_SHOWN_ARRAYS]
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shown)
        raise DataError(f"{file}: {_LAYOUTS}. Got {shapes or 'none'} ({error}).") from error


def _scaled_values(tensors: dict[str, Tensor]) -> Tensor:
    """Return packed token vectors ``[T, D]`` in fp32, multiplied by their scales.

    Args:
        tensors: ``values`` ``[T, D]``, with ``scales`` ``[T]`` if they are integers.

    Raises:
        ValueError: for integers without scales, or scales of another number.
    """
    values = tensors["values"]
    scales = tensors.get("scales")
    if scales is None:
        if not values.is_floating_point():
            raise ValueError(f"integer values need scales [T], got {values.dtype} without them")
        return values.float()
    if scales.shape != values.shape[:1]:
        expected = list(values.shape[:1])
        raise ValueError(f"expected scales {expected}, got {list(scales.shape)}")
    return values.float() * scales.float()[:, None]


def _without_padding(padded: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Split padded token vectors into the vectors ``[n, D]`` of each text.

    Args:
        padded: ``[N, L, D]``.
        mask: ``[N, L]``, nonzero for tokens. If it is None, vectors of zeros are padding.
    """
    is_token = padded.abs().amax(-1) > 0 if mask is None else mask != 0
    keep = is_token | padded.isnan().any(-1)  # a NaN must be reported
    return [rows[is_kept] for rows, is_kept in zip(padded, keep, strict=True)]


def _read_arrays(file: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Read all tensors of a safetensors or npz file.

    Returns:
        Name -> tensor, without ``ids``, and the ids of the texts, or None if the file has no ids.

    Raises:
        DataError: for a file that cannot be read.
    """
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            array_ids = arrays.pop("ids", None)
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            return tensors, None if array_ids is None else list(map(str, array_ids.tolist()))
        with safetensors_package().safe_open(str(file), framework="pt") as opened:
            # The opened file is no mapping.
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        encoded_ids = tensors.pop("ids", None)
        if encoded_ids is None:
            return tensors, None
        return tensors, json.loads(encoded_ids.numpy().tobytes().decode("utf-8"))
    except Exception as error:  # safetensors and numpy raise their own for damaged files
        raise DataError(
            f"{file}: expected a safetensors or npz file of token vectors, got ({error}).",
        ) from error
