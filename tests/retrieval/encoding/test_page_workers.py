"""Worker processes prepare parts of a batch at the same time, and share memory with their parent."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("sentence_transformers")

import torch
from PIL import Image
from sentence_transformers import MultiVectorEncoder

from tests.waiting import WAIT_SECONDS
from tilefold.retrieval import Page, encode_tokens, open_tokens
from tilefold.retrieval.encoding import pages as page_encoding
from tilefold.retrieval.encoding import worker_template
from tilefold.retrieval.encoding.page_workers import (
    FeatureCollector,
    SharedBuffer,
    default_page_workers,
    prepare_ahead,
)
from tilefold.retrieval.encoding.pages import (
    EncodingStep,
    PreparedPages,
    has_fixed_shapes,
    image_features,
)
from tilefold.retrieval.errors import WorkerError
from tilefold.retrieval.vectors.tokens import TokenVectorWriter
from tilefold.testing.page_models import save_page_model


@dataclass
class SlowImport:
    """An import that lasts until it is released.

    Attributes:
        process: process in which the import is slow.
        started: whether it has begun.
        release: ends it.
    """

    process: int
    started: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


SLOW_IMPORT = SlowImport(0)  # which a test replaces, and a module reads
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
    with prepare_ahead(model, [step], 150, n_workers) as prepared_steps:
        ((_, prepared),) = prepared_steps
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


@pytest.mark.parametrize("fails_in_test_process", [True, False])
def test_a_worker_that_cannot_be_started_is_the_reason_of_the_error(
    colpali: Any,
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
    fails_in_test_process: bool,
) -> None:
    test_process = os.getpid()
    fork = os.fork

    def fail_in_one_process() -> int:
        is_test_process = os.getpid() == test_process  # or the template from which workers come
        if is_test_process == fails_in_test_process:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fail_in_one_process)
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        prepared_batch(colpali, pages, n_workers=2)


def test_a_connection_that_cannot_be_sent_is_the_reason_of_the_error(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(page_encoding, "image_features", lambda *_: {"x": torch.zeros(1)})
    monkeypatch.setattr(worker_template, "send_handle", fail)
    with pytest.raises(OSError, match="Too many open files"):
        prepared_batch(CPU_MODEL, pages, n_workers=1)


@pytest.fixture
def _signal_handlers_of_a_program() -> Iterator[None]:
    """A program that exits at SIGTERM, and ignores the ends of its children."""
    terminate_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, terminate_handler)
    signal.signal(signal.SIGCHLD, child_handler)


@pytest.mark.usefixtures("_signal_handlers_of_a_program")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_handlers_of_the_program_do_not_hide_that_a_worker_was_killed(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    test_process = os.getpid()

    def kill_worker(*_: Any) -> dict[str, Any]:
        if os.getpid() != test_process:
            os.kill(os.getpid(), number)
            time.sleep(WAIT_SECONDS)
        return {"x": torch.zeros(1)}

    monkeypatch.setattr(page_encoding, "image_features", kill_worker)
    with (
        pytest.warns(UserWarning, match=f"was killed .{number.name}."),
        pytest.raises(WorkerError, match=f"killed .{number.name}. at page"),
    ):
        prepared_batch(CPU_MODEL, pages, n_workers=1)


def test_a_process_that_may_not_start_others_decodes_pages_itself(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert default_page_workers(1000) > 0
    daemon = SimpleNamespace(daemon=True)  # as a worker of a DataLoader is

    monkeypatch.setattr(multiprocessing, "current_process", lambda: daemon)

    assert default_page_workers(1000) == 0
    with pytest.raises(ValueError, match="page_workers: expected 0, because this process is a"):
        prepared_batch(CPU_MODEL, pages, n_workers=2)


def test_a_worker_can_import_what_another_thread_is_importing(
    pages: list[Page],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The import in this process lasts until it is released. A worker does not wait.
    (tmp_path / "slow_module.py").write_text(
        "import importlib, os\n"
        "test = importlib.import_module('tests.retrieval.encoding.test_page_workers')\n"
        "if os.getpid() == test.SLOW_IMPORT.process:\n"
        "    test.SLOW_IMPORT.started.set()\n"
        "    test.SLOW_IMPORT.release.wait(test.WAIT_SECONDS)\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "SLOW_IMPORT", SlowImport(os.getpid()))
    importing = threading.Thread(target=importlib.import_module, args=("slow_module",))

    def import_and_count(_model: Any, images: Sequence[Any], *_: Any) -> dict[str, Any]:
        if os.getpid() != SLOW_IMPORT.process:
            importlib.import_module("slow_module")
        return {"pages": torch.zeros(len(images))}

    def steps() -> Iterator[EncodingStep]:
        assert SLOW_IMPORT.started.wait(WAIT_SECONDS)
        yield EncodingStep(0, pages, range(len(pages)))

    monkeypatch.setattr(page_encoding, "image_features", import_and_count)
    with prepare_ahead(CPU_MODEL, steps(), 150, n_workers=1) as prepared_steps:
        importing.start()
        try:
            ((_, prepared),) = prepared_steps
        finally:
            SLOW_IMPORT.release.set()
            importing.join()

    assert prepared is not None
    assert [positions for positions, _ in prepared.groups] == [list(range(len(pages)))]


def test_an_error_of_a_worker_is_raised_in_its_parent(
    pages: list[Page],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(page_encoding, "image_features", lambda *_: {"x": torch.zeros(1)})
    monkeypatch.setattr(SharedBuffer, "write", fail)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        prepared_batch(CPU_MODEL, pages, n_workers=2)


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
        was_encoded_in_time.append(second_shard_is_encoded.wait(WAIT_SECONDS))
        return write_shard(*arguments)

    monkeypatch.setattr("tilefold.retrieval.encoding.tokens.encode_features", count_batches)
    monkeypatch.setattr(TokenVectorWriter, "write_shard", wait_for_second_shard)
    contents = {str(number): page for number, page in enumerate(pages)}

    encode_tokens(colpali, contents, tmp_path / "vectors", batch_size=4, shard_size=4)

    assert was_encoded_in_time == [True, True]
    assert list(open_tokens(tmp_path / "vectors").ids) == list(contents)
