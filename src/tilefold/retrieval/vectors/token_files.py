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

_SHOWN_ARRAYS = 4  # arrays that an error lists

_LAYOUTS = (
    "Expected one array [n, D] for each text under its id; or values [T, D] with offsets [N + 1]; "
    "or embeddings [N, L, D], zero or left out by a mask [N, L] after a text's end. The last two "
    "may have ids: a list of N"
)


def read_token_file(path: str | Path) -> TokenVectors:
    """Read a file of token vectors that was written by another program.

    The vectors are for :meth:`tilefold.retrieval.LateIndex.build`.

    The file has one of three layouts:

    * An array ``[n, D]`` for each text, named by its id.
    * Packed ``values`` ``[T, D]`` and ``offsets`` ``[N + 1]``. Integer values have ``scales``
      ``[T]``.
    * Padded ``embeddings`` ``[N, L, D]``, as ColPali returns for pages. A ``mask`` ``[N, L]`` is
      nonzero for vectors. Without it, rows of zeros are padding.

    The last two may have ``ids``, in safetensors as a tensor with the UTF-8 bytes of a JSON list.
    By default texts are numbered from 0.

    Args:
        path: a ``.safetensors`` or ``.npz`` file.

    Returns:
        The vectors in fp32.

    Raises:
        DataError: if the arrays have none of these layouts, or numbers are NaN or infinite.
    """
    file = path_of("path", path)
    tensors, stored_ids = _read_arrays(file)
    try:
        ids = stored_ids
        if "embeddings" in tensors:  # padded
            vectors = _remove_padding(tensors["embeddings"].float(), tensors.get("mask"))
        elif "values" in tensors and "offsets" in tensors:  # packed
            lengths = tensors["offsets"].long().diff().tolist()
            vectors = list(torch.split(_scale_values(tensors), lengths))
        else:  # an array for each text
            ids = list(tensors)
            vectors = [tensor.float() for tensor in tensors.values()]
        if ids is None:
            ids = [str(number) for number in range(len(vectors))]
        return TokenVectors.pack(ids, vectors, int(vectors[0].size(-1)), "fp32")
    except (RuntimeError, IndexError, ValueError) as error:  # the shapes are inconsistent
        shown = list(tensors.items())[:_SHOWN_ARRAYS]
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shown)
        raise DataError(f"{file}: {_LAYOUTS}. Got {shapes or 'none'} ({error}).") from error


def _scale_values(tensors: dict[str, Tensor]) -> Tensor:
    """Return packed token vectors ``[T, D]`` in fp32, multiplied by their scales.

    Args:
        tensors: ``values`` ``[T, D]``, with ``scales`` ``[T]`` if they are integers.

    Raises:
        ValueError: if integers have no scales, or the number of scales is wrong.
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


def _remove_padding(padded: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Split padded token vectors into the vectors ``[n, D]`` of each text.

    Args:
        padded: ``[N, L, D]``.
        mask: ``[N, L]``, nonzero for tokens. If it is None, vectors of zeros are padding.
    """
    is_token = padded.abs().amax(-1) > 0 if mask is None else mask != 0
    # A vector with NaN is kept, so that a later check reports it.
    keep = is_token | padded.isnan().any(-1)
    return [rows[is_kept] for rows, is_kept in zip(padded, keep, strict=True)]


def _read_arrays(file: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Read all tensors of a safetensors or npz file.

    Returns:
        Name -> tensor, without ``ids``, and the ids of the texts, or None if the file has no ids.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        if file.suffix == ".npz":
            return _read_npz(file)
        return _read_safetensors(file)
    except Exception as error:  # safetensors and numpy raise exceptions of their own
        raise DataError(
            f"{file}: expected a safetensors or npz file of token vectors, which could not be read "
            f"({error}).",
        ) from error


def _read_npz(file: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Read the tensors and the ids of an npz file, as :func:`_read_arrays` returns them."""
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    ids = arrays.pop("ids", None)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors, None if ids is None else list(map(str, ids.tolist()))


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Read the tensors and the ids of a safetensors file, as :func:`_read_arrays` returns them."""
    with safetensors_package().safe_open(str(file), framework="pt") as opened:
        # An opened file cannot be iterated over.
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    encoded_ids = tensors.pop("ids", None)
    if encoded_ids is None:
        return tensors, None
    # safetensors has no strings: the ids are a tensor with the UTF-8 bytes of a JSON list.
    return tensors, json.loads(encoded_ids.numpy().tobytes().decode("utf-8"))
