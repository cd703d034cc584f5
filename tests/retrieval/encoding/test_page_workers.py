"""Worker processes prepare parts of a batch at the same time, and share memory with their parent."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("sentence_transformers")

import torch
from PIL import Image
from sentence_transformers import MultiVectorEncoder

from tilefold.retrieval import Page, encode_tokens, open_tokens
from tilefold.retrieval.encoding import pages as page_encoding
from tilefold.retrieval.encoding.page_workers import (
    FeatureCollector,
    SharedBuffer,
    prepare_ahead,
)
from tilefold.retrieval.encoding.pages import (
    EncodingStep,
    PreparedPages,
    has_fixed_shapes,
    image_features,
)
from tilefold.retrieval.vectors.tokens import TokenVectorWriter
from tilefold.testing.page_models import save_page_model

CPU_MODEL: Any = SimpleNamespace(device="cpu")  # for processors that a test replaces


@pytest.fixture
def pages(tmp_path: Path) -> list[Page]:
    """Eight images of one color each, and of two sizes."""
    pages: list[Page] = []
    for number in range(8):
        file = tmp_path / f"{number}.png"
        size = (20, 30) if number < 6 else (50, 40)
        Image.new("RGB", size, (20 * number, 0, 0)).save(file)
        pages.append(Page(file))
    return pages


@pytest.fixture(scope="module")
def colpali(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model whose processor gives all pages the same shapes."""
    folder = save_page_model(tmp_path_factory.mktemp("models") / "colpali", "colpali")
    return MultiVectorEncoder(str(folder), device="cpu")


def prepared_batch(model: Any, pages: Sequence[Page], n_workers: int) -> PreparedPages:
    """Prepare pages as one batch."""
    step = EncodingStep(0, pages, range(len(pages)))
    ((_, prepared),) = prepare_ahead(model, [step], 150, n_workers)
    assert prepared is not None
    return prepared


def assert_same_features(features: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the bits of tensors, and other values."""
    assert features.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(features[name], value, rtol=0, atol=0)
        else:
            assert features[name] == value


@pytest.mark.parametrize("n_workers", [0, 2])
def test_features_of_parts_are_those_of_the_batch(
    colpali: Any,
    pages: list[Page],
    n_workers: int,
) -> None:
    expected = image_features(colpali, [page.image() for page in pages])

    prepared = prepared_batch(colpali, pages, n_workers)

    ((positions, features),) = prepared.groups
    assert positions == list(range(len(pages)))
    assert_same_features(features, expected)


def test_workers_share_the_pages_of_a_batch(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def process_ids(_model: Any, images: Sequence[Any], *_: Any) -> dict[str, Any]:
        return {"process_id": torch.full((len(images),), os.getpid())}

    monkeypatch.setattr(page_encoding, "image_features", process_ids)

    prepared = prepared_batch(CPU_MODEL, pages, n_workers=2)

    ((_, features),) = prepared.groups
    assert len(features["process_id"].unique()) == 2
    assert os.getpid() not in features["process_id"]


def test_a_processor_of_dynamic_shapes_sees_all_pages_of_a_batch(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def padded_to_largest(_model: Any, images: Sequence[Any], *_: Any) -> dict[str, Any]:
        n_patches = max(image.width * image.height for image in images) // 100
        return {"pixel_values": torch.zeros(len(images), n_patches)}

    monkeypatch.setattr(page_encoding, "image_features", padded_to_largest)

    prepared = prepared_batch(CPU_MODEL, pages, n_workers=2)

    assert not has_fixed_shapes(CPU_MODEL)
    ((_, features),) = prepared.groups
    assert features["pixel_values"].shape == (len(pages), 50 * 40 // 100)


def test_a_worker_computes_with_one_thread(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count_threads(_model: Any, images: Sequence[Any], *_: Any) -> dict[str, Any]:
        return {"threads": torch.full((len(images),), torch.get_num_threads())}

    monkeypatch.setattr(page_encoding, "image_features", count_threads)

    prepared = prepared_batch(CPU_MODEL, pages, n_workers=2)

    assert prepared.groups[0][1]["threads"].tolist() == [1] * len(pages)


def test_a_worker_that_cannot_be_started_is_the_reason_of_the_error(
    colpali: Any,
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        prepared_batch(colpali, pages, n_workers=2)


@pytest.mark.parametrize(
    "other_features",
    [
        pytest.param({"pixels": torch.ones(1, 5), "modality": "image"}, id="shape"),
        pytest.param({"pixels": torch.ones(1, 4).half(), "modality": "image"}, id="dtype"),
        pytest.param({"pixels": torch.ones(1, 4), "modality": "text"}, id="modality"),
        pytest.param({"pixels": torch.ones(1, 4)}, id="missing feature"),
        pytest.param(
            {"pixels": torch.ones(1, 4), "mask": torch.ones(1), "modality": "image"},
            id="further feature",
        ),
    ],
)
def test_parts_of_other_shapes_are_groups_of_their_own(other_features: dict[str, Any]) -> None:
    collector = FeatureCollector(n_pages=4)

    collector.add(PreparedPages([([0, 2], {"pixels": torch.zeros(2, 4), "modality": "image"})]))
    collector.add(PreparedPages([([3], other_features)], failures={1: ValueError("damaged")}))

    prepared = collector.prepared()
    assert [positions for positions, _ in prepared.groups] == [[0, 2], [3]]
    assert prepared.groups[0][1]["pixels"].shape == (2, 4)
    assert_same_features(prepared.groups[1][1], other_features)
    assert list(prepared.failures) == [1]


@pytest.mark.parametrize(
    "features",
    [
        pytest.param({"offsets": torch.arange(3)}, id="a tensor without a row for each page"),
        pytest.param({"scale": torch.tensor(1.5)}, id="a tensor without dimensions"),
        pytest.param({"names": ["a", "b"]}, id="a list"),
    ],
)
def test_features_that_are_not_of_single_pages_are_not_joined(features: dict[str, Any]) -> None:
    collector = FeatureCollector(n_pages=4)

    collector.add(PreparedPages([([0, 1], features)]))
    collector.add(PreparedPages([([2, 3], features)]))

    groups = collector.prepared().groups
    assert [positions for positions, _ in groups] == [[0, 1], [2, 3]]
    for _, group_features in groups:
        assert_same_features(group_features, features)


def test_a_shared_buffer_grows_and_keeps_number_types() -> None:
    buffer = SharedBuffer()
    small = [torch.tensor([True, False, True]), torch.tensor(7)]
    large = [torch.randn(3, 1000).bfloat16(), torch.zeros(0, 4), torch.arange(5)]

    for tensors in (small, large, small):
        copies = [buffer.read(place).clone() for place in buffer.write(tensors)]
        torch.testing.assert_close(copies, tensors, rtol=0, atol=0)
    buffer.close()


def test_a_shard_is_written_while_the_next_one_is_encoded(
    colpali: Any,
    pages: list[Page],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second_shard_is_encoded = threading.Event()
    n_encoded = 0
    encode_features = page_encoding.encode_features
    write_shard = TokenVectorWriter.write_shard
    was_encoded_in_time: list[bool] = []

    def count_batches(*arguments: Any) -> Any:
        nonlocal n_encoded
        n_encoded += 1
        if n_encoded == 2:
            second_shard_is_encoded.set()
        return encode_features(*arguments)

    def wait_for_second_shard(*arguments: Any) -> Any:
        was_encoded_in_time.append(second_shard_is_encoded.wait(timeout=5))
        return write_shard(*arguments)

    monkeypatch.setattr("tilefold.retrieval.encoding.tokens.encode_features", count_batches)
    monkeypatch.setattr(TokenVectorWriter, "write_shard", wait_for_second_shard)
    contents = {str(number): page for number, page in enumerate(pages)}

    encode_tokens(colpali, contents, tmp_path / "vectors", batch_size=4, shard_size=4)

    assert was_encoded_in_time == [True, True]
    assert list(open_tokens(tmp_path / "vectors").ids) == list(contents)
