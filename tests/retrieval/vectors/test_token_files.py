"""Token vectors that other programs wrote, as npz archives or safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.token_files import read_token_file

INT8_VALUES = np.array([[64, -127], [127, 0]], np.int8)
SCALES = np.array([0.5, 0.25], np.float32)
OFFSETS = np.array([0, 1, 2])


@pytest.fixture
def documents() -> r.TokenVectors:
    """Token vectors of four texts, of which the third has none."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n_tokens, 16, generator=generator) for n_tokens in (5, 9, 0, 3)]
    return r.TokenVectors.pack(["a", "b", "c", "d"], rows, 16, "fp32")


def pad(documents: r.TokenVectors) -> torch.Tensor:
    """Token vectors ``[texts, longest, D]``, padded with zeros."""
    rows = [documents.rows(row) for row in range(len(documents.ids))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def check_is_read_as(file: Path, documents: r.TokenVectors) -> None:
    """Expect that ``file`` has the ids, offsets and values of ``documents``."""
    vectors = read_token_file(file)
    assert vectors.ids == documents.ids
    assert vectors.offsets.tolist() == documents.offsets.tolist()
    assert torch.equal(vectors.values, documents.values)


def test_an_archive_with_one_array_per_text(documents: r.TokenVectors, tmp_path: Path) -> None:
    arrays = {name: documents.rows(row).numpy() for row, name in enumerate(documents.ids)}
    np.savez(tmp_path / "arrays.npz", **arrays)
    check_is_read_as(tmp_path / "arrays.npz", documents)


def test_an_archive_with_padding_of_zeros(documents: r.TokenVectors, tmp_path: Path) -> None:
    ids = np.array(documents.ids)
    np.savez(tmp_path / "padded.npz", embeddings=pad(documents).numpy(), ids=ids)
    check_is_read_as(tmp_path / "padded.npz", documents)


def test_an_archive_with_padding_and_a_mask(documents: r.TokenVectors, tmp_path: Path) -> None:
    padded = pad(documents)
    mask = torch.arange(padded.size(1)) < documents.offsets.diff()[:, None]
    np.savez(
        tmp_path / "masked.npz",
        embeddings=padded.numpy(),
        mask=mask.numpy(),
        ids=np.array(documents.ids),
    )
    check_is_read_as(tmp_path / "masked.npz", documents)


def test_packed_vectors_in_safetensors(documents: r.TokenVectors, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    encoded_ids = np.frombuffer(json.dumps(documents.ids).encode(), np.uint8)
    tensors = {
        "values": documents.values,
        "offsets": documents.offsets,
        "ids": torch.from_numpy(encoded_ids.copy()),
    }
    safetensors.save_file(tensors, str(tmp_path / "packed.safetensors"))
    check_is_read_as(tmp_path / "packed.safetensors", documents)


def test_integer_values_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    file = tmp_path / "int8.npz"
    np.savez(file, values=INT8_VALUES, scales=SCALES, offsets=OFFSETS)
    assert read_token_file(file).values.tolist() == [[32.0, -63.5], [31.75, 0.0]]


def test_integer_values_without_scales_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "unscaled.npz"
    np.savez(file, values=INT8_VALUES, offsets=OFFSETS)
    with pytest.raises(DataError, match="integer values need scales"):
        read_token_file(file)


def test_too_few_scales_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.npz"
    np.savez(file, values=INT8_VALUES, scales=SCALES[:1], offsets=OFFSETS)
    with pytest.raises(DataError, match=r"expected scales \[2\], got \[1\]"):
        read_token_file(file)


def test_nan_is_refused_with_the_id_of_its_text(
    documents: r.TokenVectors,
    tmp_path: Path,
) -> None:
    padded = pad(documents)
    padded[1, 0, 0] = torch.nan
    file = tmp_path / "nan.npz"
    np.savez(file, embeddings=padded.numpy(), ids=np.array(documents.ids))
    with pytest.raises(DataError, match="nan for 'b'"):
        read_token_file(file)


def test_an_array_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "flat.npz", a=np.zeros(3))
    with pytest.raises(DataError, match="Expected one array"):
        read_token_file(tmp_path / "flat.npz")


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DataError, match="safetensors or npz"):
        read_token_file(tmp_path / "text.npz")
