"""Token vectors of pages: those of sentence-transformers, with damaged pages, pooled and resumed."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")
pytest.importorskip("sentence_transformers")

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from tests.retrieval.data.broken_pages import BROKEN_PAGES
from tilefold.retrieval import (
    Page,
    encode_collection,
    encode_dense_collection,
    encode_texts,
    encode_tokens,
    load_beir,
    open_tokens,
)
from tilefold.retrieval.data.collection import Content
from tilefold.retrieval.data.pages import pdfium_lock
from tilefold.retrieval.encoding import page_workers
from tilefold.retrieval.encoding import pages as page_encoding
from tilefold.retrieval.encoding.page_workers import default_page_workers, prepare_ahead
from tilefold.retrieval.encoding.pages import (
    EncodingStep,
    PageBatch,
    PagePreparation,
    encode_images,
)
from tilefold.retrieval.errors import DataError, WorkerError
from tilefold.testing.page_models import ARCHITECTURES, save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

WORDS = random_words(60)
SIZES = (
    (120, 160),
    (200, 90),
)  # of two groups of pages, which models of dynamic grids divide unlike


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random models of the three architectures."""
    root = tmp_path_factory.mktemp("models")
    return {
        architecture: MultiVectorEncoder(
            str(save_page_model(root / architecture, architecture, words=WORDS)),
            device="cpu",
        )
        for architecture in ARCHITECTURES
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight pages of two sizes."""
    folder = tmp_path_factory.mktemp("pages")
    pages = [
        page
        for number, size in enumerate(SIZES)
        for page in random_pages(4, WORDS, words_per_page=6, size=size, seed=number)
    ]
    save_page_collection(folder, pages, pages_per_pdf=2)
    return folder


@pytest.fixture
def contents(folder: Path) -> dict[str, Content]:
    """Id -> page of the folder."""
    return dict(load_beir(folder).content())


def stock_vectors(model: Any, page: Page) -> torch.Tensor:
    """The token vectors of a page by sentence-transformers."""
    image = page.image()
    if "input_ids" not in model.preprocess([image]):  # see image_features()
        features = {**model.processor.process_images([image]), "modality": "image"}
        with torch.inference_mode():
            output = model(features, task="document")
        return output["token_embeddings"][0][output["attention_mask"][0].bool()]
    (vectors,) = model.encode_document([image])
    return vectors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_of_pages_are_those_of_sentence_transformers(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    architecture: str,
) -> None:
    model = models[architecture]

    encode_tokens(model, contents, tmp_path / "vectors", batch_size=3, shard_size=5)

    store = open_tokens(tmp_path / "vectors")
    vectors = store.read(list(contents))
    assert vectors.ids == list(contents)
    for number, page in enumerate(contents.values()):
        start, end = vectors.offsets[number : number + 2].tolist()
        expected = stock_vectors(model, page)
        torch.testing.assert_close(
            vectors.values[start:end].float(),
            expected,
            rtol=2**-10,  # a rounding to fp16
            atol=1e-5,
        )


def test_dynamic_grids_give_pages_different_numbers_of_vectors(
    models: dict[str, Any],
    contents: dict[str, Content],
) -> None:
    vectors = encode_texts(models["colqwen2"], contents, kind="document")

    assert len(set(vectors.offsets.diff().tolist())) == len(SIZES)


@pytest.mark.parametrize(
    ("architecture", "tower"),
    [
        pytest.param("colqwen2", "visual", id="patches of ColQwen2"),
        pytest.param("colmodernvbert", "vision_model", id="tiles of ColModernVBERT"),
    ],
)
def test_the_vision_model_gets_no_padding(
    models: dict[str, Any],
    contents: dict[str, Content],
    architecture: str,
    tower: str,
) -> None:
    model = models[architecture]
    images = [content.image() for content in contents.values() if isinstance(content, Page)]
    n_rows: list[int] = []

    def count_rows(_: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        pixels = inputs[0] if inputs else options["pixel_values"]
        n_rows.append(pixels.size(0))

    (module,) = (part for name, part in model.named_modules() if name.endswith(f".{tower}"))
    hook = module.register_forward_pre_hook(count_rows, with_kwargs=True)
    try:
        for image in images:
            encode_images(model, [image])
        encode_images(model, images)
    finally:
        hook.remove()
    *rows_of_images, rows_of_batch = n_rows
    assert len(set(rows_of_images)) > 1, "some pages have more rows than others"
    assert rows_of_batch == sum(rows_of_images)


def test_images_are_encoded_alike_in_memory_and_in_a_folder(
    models: dict[str, Any],
    contents: dict[str, Content],
) -> None:
    model = models["colpali"]
    in_memory = encode_texts(model, contents, kind="document", batch_size=8)

    rows = encode_images(model, [page.image() for page in contents.values()])

    torch.testing.assert_close(in_memory.values, torch.cat(rows).half(), rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_pages_that_fail_are_recorded_and_the_others_are_encoded(
    models: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    storage: str,
) -> None:
    contents = dict(load_beir(folder).content())
    broken_file = BROKEN_PAGES["first half of JPEG"](tmp_path)
    good_ids = list(contents)
    contents = {"first": Page(broken_file), **contents, "last": Page(tmp_path / "missing.pdf", 3)}

    manifest = encode_tokens(
        models["colpali"],
        contents,
        tmp_path / "vectors",
        batch_size=4,
        storage=storage,
    )

    assert list(manifest.failed) == ["first", "last"]
    assert "broken.jpg" in manifest.failed["first"]
    assert "missing.pdf" in manifest.failed["last"]
    assert open_tokens(tmp_path / "vectors").read(good_ids).ids == good_ids


def test_a_page_that_the_processor_refuses_does_not_lose_its_batch(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    from PIL import Image

    Image.new("RGB", (1, 1000)).save(tmp_path / "line.png")  # ColQwen2 refuses such a shape

    manifest = encode_tokens(
        models["colqwen2"],
        {**contents, "line": Page(tmp_path / "line.png")},
        tmp_path / "vectors",
        batch_size=16,
    )

    assert list(manifest.failed) == ["line"]
    assert manifest.n_documents == len(contents)


def test_worker_processes_give_the_same_bytes(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    contents = {**contents, "missing": Page(tmp_path / "missing.png")}
    for n_workers in (0, 2):
        encode_tokens(
            models["colqwen2"],
            contents,
            tmp_path / f"{n_workers} workers",
            batch_size=2,
            shard_size=4,
            page_workers=n_workers,
        )

    files = sorted(file.name for file in (tmp_path / "0 workers").glob("part-*"))
    assert files
    for name in files:
        alone, shared = (tmp_path / f"{n_workers} workers" / name for n_workers in (0, 2))
        assert alone.read_bytes() == shared.read_bytes()


def end_process_at(
    fatal_page: Content,
    end_signal: signal.Signals,
    *,
    once: Path | None = None,
) -> Callable[..., Any]:
    """Return a replacement of `Page.image` that ends the process at a page.

    Args:
        fatal_page: the page.
        end_signal: the signal that ends the process.
        once: a file that is created the first time; later the page is decoded. None ends the
            process every time.
    """
    page_image = Page.image
    test_process = os.getpid()

    def image(page: Page, *arguments: Any) -> Any:
        if page == fatal_page and not (once and once.exists()):
            assert os.getpid() != test_process
            if once:
                once.touch()
            faulthandler.disable()  # prints nothing
            os.kill(os.getpid(), end_signal)
        return page_image(page, *arguments)

    return image


def test_a_page_that_crashes_its_worker_does_not_lose_the_others(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fatal_id = list(contents)[2]
    monkeypatch.setattr(Page, "image", end_process_at(contents[fatal_id], signal.SIGSEGV))

    manifest = encode_tokens(
        models["colpali"],
        contents,
        tmp_path / "vectors",
        batch_size=2,
        page_workers=2,
    )

    assert list(manifest.failed) == [fatal_id]
    assert "has ended its process (SIGSEGV)" in manifest.failed[fatal_id]
    assert manifest.n_documents == len(contents) - 1


def test_a_worker_that_is_killed_again_and_again_ends_the_run_with_a_remedy(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fatal_page = list(contents.values())[2]
    monkeypatch.setattr(Page, "image", end_process_at(fatal_page, signal.SIGKILL))

    with (
        pytest.warns(UserWarning, match="was killed"),
        pytest.raises(WorkerError, match=r"killed \(SIGKILL\) at page .* Fewer workers"),
    ):
        encode_tokens(
            models["colpali"],
            contents,
            tmp_path / "vectors",
            batch_size=2,
            page_workers=2,
        )


def test_pages_of_a_worker_that_was_killed_once_are_decoded_again(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killing_image = end_process_at(
        list(contents.values())[2],
        signal.SIGKILL,
        once=tmp_path / "killed",
    )
    monkeypatch.setattr(Page, "image", killing_image)

    with pytest.warns(UserWarning, match=r"was killed \(SIGKILL\), as happens when memory is"):
        manifest = encode_tokens(
            models["colpali"],
            contents,
            tmp_path / "vectors",
            batch_size=2,
            page_workers=2,
        )

    assert not manifest.failed
    assert manifest.n_documents == len(contents)


def test_workers_that_are_started_while_a_pdf_is_rendered_can_render_another(
    models: dict[str, Any],
    contents: dict[str, Content],
) -> None:
    page = next(page for page in contents.values() if isinstance(page, Page))
    assert page.file.suffix == ".pdf"
    pdfium_lock.acquire()  # as a thread that renders
    threading.Timer(0.1, pdfium_lock.release).start()

    step = EncodingStep(0, [page], [0])
    with prepare_ahead(models["colqwen2"], [step], 150, n_workers=1) as prepared_steps:
        ((_, prepared),) = prepared_steps

    assert prepared is not None
    assert not prepared.failures
    assert [positions for positions, _ in prepared.groups] == [[0]]


def test_an_error_that_a_message_does_not_make_fails_its_page_only(
    models: dict[str, Any],
    contents: dict[str, Content],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_error(*_: Any) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(Page, "image", raise_error)
    pages = [page for page in contents.values() if isinstance(page, Page)]

    prepared = PagePreparation(models["colqwen2"]).prepare(PageBatch([0], pages[:1]))

    assert str(prepared.failures[0]).startswith("UnicodeDecodeError: 'utf-8' codec")


def test_pooled_vectors_are_those_of_sentence_transformers(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    model = models["colpali"]
    images = [page.image() for page in contents.values()]
    expected = model.encode_document(images, token_pooling=HierarchicalTokenPooling(3))

    manifest = encode_tokens(model, contents, tmp_path / "vectors", pool_factor=3)

    vectors = open_tokens(tmp_path / "vectors").read(list(contents))
    torch.testing.assert_close(vectors.values.float(), torch.cat(expected), rtol=2e-3, atol=2e-3)
    assert manifest.settings["pool_factor"] == 3


def test_texts_and_pages_share_a_collection(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    model = models["colpali"]
    mixed = {"text": " ".join(WORDS[:3]), **contents}

    vectors = encode_texts(model, mixed, kind="document")

    assert vectors.ids == list(mixed)
    (expected,) = model.encode_document([mixed["text"]])
    first_end = int(vectors.offsets[1])
    torch.testing.assert_close(vectors.values[:first_end].float(), expected, rtol=2e-3, atol=2e-3)
    for n_workers in (0, 1):
        output = tmp_path / f"{n_workers} workers"
        encode_tokens(model, mixed, output, batch_size=8, page_workers=n_workers)
        stored = open_tokens(output).read(list(mixed))
        torch.testing.assert_close(stored.values, vectors.values, rtol=2e-3, atol=2e-3)


def test_an_interrupted_run_is_resumed(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models["colpali"]
    encode_tokens(model, contents, tmp_path / "whole", batch_size=2, shard_size=4)
    n_encoded = 0
    encode_features = page_encoding.encode_features

    def interrupt_the_third_batch(*arguments: Any) -> Any:
        nonlocal n_encoded
        n_encoded += 1
        if n_encoded == 3:
            raise KeyboardInterrupt
        return encode_features(*arguments)

    monkeypatch.setattr(
        "tilefold.retrieval.encoding.tokens.encode_features", interrupt_the_third_batch
    )
    with pytest.raises(KeyboardInterrupt):
        encode_tokens(model, contents, tmp_path / "resumed", batch_size=2, shard_size=4)
    encode_tokens(model, contents, tmp_path / "resumed", batch_size=2, shard_size=4)

    assert n_encoded == 3 + 2  # nothing of the first shard was encoded again
    for file in (tmp_path / "whole").glob("part-*"):
        assert (tmp_path / "resumed" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("change", ["dpi", "contents"])
def test_a_run_with_other_pages_is_refused(
    models: dict[str, Any],
    contents: dict[str, Content],
    tmp_path: Path,
    change: str,
) -> None:
    encode_tokens(models["colpali"], contents, tmp_path / "vectors")
    dpi = 200 if change == "dpi" else 150
    if change == "contents":
        contents = dict(reversed(contents.items()))

    with pytest.raises(DataError, match="dpi" if change == "dpi" else "texts_sha256"):
        encode_tokens(models["colpali"], contents, tmp_path / "vectors", dpi=dpi)


def test_a_model_of_texts_refuses_pages(
    late: Any,
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="model: expected a model of images for pages"):
        encode_tokens(late, contents, tmp_path / "vectors")
    with pytest.raises(ValueError, match="model: expected a model of images for pages"):
        encode_texts(late, contents, kind="document")


def test_sparse_vectors_of_pages_are_refused(
    splade: Any,
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="expected texts for a SparseEncoder, got page images"):
        encode_collection(splade, contents, tmp_path / "vectors")


def test_dense_vectors_of_pages_are_refused(
    contents: dict[str, Content],
    tmp_path: Path,
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")

    with pytest.raises(ValueError, match="expected texts for a SentenceTransformer, got page"):
        encode_dense_collection(model, contents, tmp_path / "vectors")


def test_few_pages_need_no_worker_processes() -> None:
    assert default_page_workers(63) == 0
    assert 1 <= default_page_workers(64) <= 16


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(page_workers, "share_of_cores", {1: 32, 4: 8}.__getitem__)

    assert default_page_workers(64) == 7


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute with one thread, so that batches have the same bits in all runs."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
