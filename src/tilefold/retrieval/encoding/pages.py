"""Encoding pages: worker processes decode them and apply the model's processor ahead of the model.

A worker renders or decodes the pages of a batch and returns the features that the model reads. The
model computes in the process that asked for them, as ``encode_document`` of sentence-transformers
does with the images.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model
from tilefold.distributed.ranks import share_of_cores
from tilefold.pipeline.rows import bisect_failures
from tilefold.pipeline.threads import Prefetcher
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.pages import DEFAULT_DPI, Page, pdfium_lock
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "EncodingStep",
    "PageBatch",
    "PreparedPages",
    "add_image_tokens",
    "check_encodes_images",
    "contains_pages",
    "default_page_workers",
    "encode_features",
    "encode_images",
    "encodes_images",
    "image_features",
    "pool_tokens",
    "prepare_ahead",
    "prompt_of",
]

_MAX_WORKERS = 8
# Prompts that `encode_document` looks for, in this order.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Fewer pages are decoded in this process, because starting workers takes longer.
_MIN_PAGES_FOR_WORKERS = 64
_BATCHES_AHEAD = 2  # batches of each worker that are in preparation or wait for the model
_PARENT_CHECK_SECONDS = 2.0  # time after which an idle worker checks whether its parent has ended


def contains_pages(contents: Mapping[str, object]) -> bool:
    """Return whether some of the documents to encode are pages.

    Mappings other than ``dict`` read texts from a file one by one, and have no pages.
    """
    return isinstance(contents, dict) and any(
        isinstance(content, Page) for content in contents.values()
    )


def encodes_images(model: Model) -> bool:
    """Return whether a model of sentence-transformers reads images."""
    supports = getattr(model, "supports", None)
    return supports is not None and bool(supports("image"))


def check_encodes_images(model: Model) -> None:
    """Raise ``ArgumentError`` if a ``MultiVectorEncoder`` does not encode images."""
    if encodes_images(model):
        return
    modalities = ", ".join(map(str, getattr(model, "modalities", ["text"])))
    raise ArgumentError(
        "model",
        f"expected a model of images for pages, such as ColPali, got one of {modalities}. Choose "
        "another model, or encode texts.",
    )


def default_page_workers(n_pages: int) -> int:
    """Return the number of worker processes that decode pages: one per spare core, at most 8.

    Ranks of the same machine share its cores. There are no workers for a few pages, and where
    processes cannot be forked.

    Args:
        n_pages: number of pages to decode.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if not can_fork or n_pages < _MIN_PAGES_FOR_WORKERS:
        return 0
    ranks_of_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    n_cores = share_of_cores(max(1, ranks_of_machine))
    return max(1, min(n_cores - 1, _MAX_WORKERS))


def prompt_of(model: Any, kind: str) -> str | None:
    """Return the prompt that ``encode_document`` or ``encode_query`` puts before an input."""
    names = _DOCUMENT_PROMPTS if kind == "document" else ("query",)
    for name in names:
        if name in model.prompts:
            prompt: str | None = model.prompts[name]
            return prompt
    if model.default_prompt_name is not None:
        default_prompt: str | None = model.prompts.get(model.default_prompt_name)
        return default_prompt
    return None


def image_features(
    model: Model,
    images: Sequence[Image],
    kind: Literal["document", "query"] = "document",
) -> dict[str, Any]:
    """Apply the processor of a model to images.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        images: the images of a batch, in RGB.
        kind: ``"document"`` or ``"query"``, which selects the prompt.

    Returns:
        What the model reads: tensors on the CPU, and the modality.
    """
    encoder: Any = model
    features = encoder.preprocess(list(images), prompt=prompt_of(encoder, kind), task=kind)
    return _with_image_tokens(features, encoder, images)


def _with_image_tokens(features: Any, model: Any, images: Sequence[Image]) -> dict[str, Any]:
    """Return the features of images, with the token ids if ``preprocess`` lacks them.

    sentence-transformers 6.2 calls the processor with images only. The processor of ColModernVBERT
    then returns no token ids: it adds its prompt and the image tokens in ``process_images``.

    Args:
        features: the result of the model's ``preprocess``.
        model: the ``MultiVectorEncoder``.
        images: the images, in RGB.
    """
    process_images = getattr(model.processor, "process_images", None)
    if "input_ids" in features or process_images is None:
        return dict(features)
    return {**process_images(list(images)), "modality": "image"}


def add_image_tokens(model: Model) -> None:
    """Let ``preprocess`` of a model return the token ids of images, as :func:`image_features` does.

    The trainer and the evaluators of sentence-transformers call ``preprocess``. The model is
    changed in place until it is saved.

    Args:
        model: a ``MultiVectorEncoder`` of images.
    """
    encoder: Any = model
    transformer = encoder[0]
    stock_preprocess = transformer.preprocess

    def preprocess(inputs: Sequence[Any], *args: Any, **options: Any) -> dict[str, Any]:
        features = stock_preprocess(inputs, *args, **options)
        if not inputs or any(isinstance(item, str) for item in inputs):
            return dict(features)
        return _with_image_tokens(features, encoder, inputs)

    transformer.preprocess = preprocess


@torch.inference_mode()
def encode_features(
    model: Model,
    features: Mapping[str, Any],
    kind: Literal["document", "query"] = "document",
) -> list[Tensor]:
    """Compute the token vectors of prepared images, as ``encode_document`` does.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        features: the result of :func:`image_features`.
        kind: ``"document"`` or ``"query"``, which selects the scored tokens.

    Returns:
        A tensor ``[tokens, D]`` for each image, on the model's device.
    """
    encoder: Any = model
    encoder.eval()
    device_features = {
        name: value.to(encoder.device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in features.items()
    }
    output = encoder(device_features, task=kind)
    masks = output["attention_mask"].bool()
    return [vectors[mask] for vectors, mask in zip(output["token_embeddings"], masks, strict=True)]


def encode_images(
    model: Model,
    images: Sequence[Image],
    kind: Literal["document", "query"] = "document",
) -> list[Tensor]:
    """Compute the token vectors of images in one forward pass.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        images: the images, in RGB.
        kind: ``"document"`` or ``"query"``, which selects the prompt and the scored tokens.

    Returns:
        A tensor ``[tokens, D]`` for each image, on the model's device.

    Raises:
        ValueError: if the model does not encode images.
    """
    check_encodes_images(model)
    return encode_features(model, image_features(model, images, kind), kind)


def pool_tokens(rows: list[Tensor], pool_factor: float | None) -> list[Tensor]:
    """Merge similar token vectors of each document, as sentence-transformers does.

    Args:
        rows: a tensor ``[tokens, D]`` for each document.
        pool_factor: number of vectors before, divided by the number after; None merges none.
    """
    if pool_factor is None:
        return rows
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    pooled_rows: list[Tensor] = HierarchicalTokenPooling(pool_factor).pool(rows, task="document")
    return pooled_rows


@dataclass(frozen=True)
class PageBatch:
    """Pages of a window that are encoded together.

    Attributes:
        positions: positions of the pages in their window.
        pages: the pages.
    """

    positions: Sequence[int]
    pages: Sequence[Page]


@dataclass(frozen=True)
class EncodingStep:
    """A batch of a window, the end of a window, or a pause while no window is ready.

    Attributes:
        window: number of the window.
        contents: texts and pages of the window.
        positions: positions of the batch in `contents`; empty for the end and for a pause.
        ends_window: whether all batches of the window have been encoded.
    """

    window: int
    contents: Sequence[Content] = ()
    positions: Sequence[int] = ()
    ends_window: bool = False

    @property
    def is_pause(self) -> bool:
        """Whether no window is ready yet."""
        return not self.positions and not self.ends_window

    @property
    def pages(self) -> PageBatch | None:
        """The pages of the batch; None for a batch of texts, and for another step."""
        contents = [self.contents[position] for position in self.positions]
        pages = [content for content in contents if isinstance(content, Page)]
        return PageBatch(self.positions, pages) if pages else None


@dataclass
class PreparedPages:
    """Features of the pages of a batch, and the errors of pages that failed.

    Attributes:
        groups: positions of pages, and the features of all of them. There is one group, unless the
            processor fails on a page.
        failures: position of a page -> error while it was decoded or processed.
    """

    groups: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


class PagePreparation:
    """Decodes the pages of batches, and applies the processor of a model.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        dpi: dots per inch at which pages of PDFs are rendered.
    """

    def __init__(self, model: Model, dpi: int = DEFAULT_DPI) -> None:
        self._model = model
        self._dpi = dpi

    def prepare(self, batch: PageBatch) -> PreparedPages:
        """Return the features of a batch. An error of one page does not lose the others."""
        prepared = PreparedPages()
        images: dict[int, Image] = {}
        for position, page in zip(batch.positions, batch.pages, strict=True):
            try:
                images[position] = page.image(self._dpi)
            except Exception as error:
                prepared.failures[position] = _picklable(error)

        def features_of(positions: list[int]) -> dict[str, Any]:
            return image_features(self._model, [images[position] for position in positions])

        if images:
            for positions, outcome in bisect_failures(list(images), features_of):
                if isinstance(outcome, Exception):
                    prepared.failures[positions[0]] = _picklable(outcome)
                else:
                    prepared.groups.append((positions, outcome))
        return prepared


def _picklable(error: Exception) -> Exception:
    """Return an error that another process can read, of the same class if it is built in."""
    if type(error).__module__ == "builtins" or type(error) is DataError:
        with suppress(TypeError):  # some, such as UnicodeDecodeError, need more than a message
            return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def prepare_ahead(
    model: Model,
    steps: Iterable[EncodingStep],
    dpi: int,
    n_workers: int,
) -> Generator[tuple[EncodingStep, PreparedPages | None], None, None]:
    """Prepare the pages of steps in worker processes, while the caller encodes earlier ones.

    A thread takes the steps and receives the features from the workers, so that the caller waits
    only for features that are not ready yet.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        steps: the steps, which are taken a few ahead of the results.
        dpi: dots per inch at which pages of PDFs are rendered.
        n_workers: number of processes; 0 prepares each batch in this process when it is needed.

    Yields:
        The steps in order, without pauses, and the features of their pages; None for a step
        without pages.
    """
    preparation = PagePreparation(model, dpi)
    if not n_workers:
        for step in steps:
            if not step.is_pause:
                batch = step.pages
                yield step, None if batch is None else preparation.prepare(batch)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(preparation)) for _ in range(n_workers)]
        prefetcher = stack.enter_context(
            Prefetcher(_prepare_with_workers(steps, workers), depth=1, name="tilefold-pages"),
        )
        yield from prefetcher


def _prepare_with_workers(
    steps: Iterable[EncodingStep],
    workers: Sequence[_Worker],
) -> Iterator[tuple[EncodingStep, PreparedPages | None] | None]:
    """Submit the batches of steps to workers in turn, and yield the results in order.

    Args:
        steps: the steps.
        workers: the processes.

    Yields:
        Each step with the features of its pages; None for a pause.
    """
    in_flight: deque[tuple[EncodingStep, _Worker | None]] = deque()
    next_workers = itertools.cycle(workers)

    def oldest_step() -> tuple[EncodingStep, PreparedPages | None]:
        step, worker = in_flight.popleft()
        return step, None if worker is None else worker.receive()

    for step in steps:
        if step.is_pause:  # finish all steps, because the next window may wait for them
            while in_flight:
                yield oldest_step()
            yield None
            continue
        batch = step.pages
        worker = None
        if batch is not None:
            worker = next(next_workers)
            worker.submit(batch)
        in_flight.append((step, worker))
        if len(in_flight) > _BATCHES_AHEAD * len(workers):
            yield oldest_step()
    while in_flight:
        yield oldest_step()


class _Worker:
    """A process that prepares batches of pages one after the other.

    The process is forked, because it needs the model's processor and none of its weights. If a page
    ends the process, as a decoder written in C may do, the page has failed, and a new process
    continues.

    Args:
        preparation: decodes the pages.
    """

    def __init__(self, preparation: PagePreparation) -> None:
        self._preparation = preparation
        self._pending: deque[PageBatch] = deque()
        self._start()

    def _start(self) -> None:
        """Fork a process that waits for batches."""
        context = multiprocessing.get_context("fork")
        # A queue never blocks its writer, so that both sides cannot wait for one another.
        self._batches: Any = context.Queue()
        self._results, results_of_process = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_prepare_batches,
            args=(self._batches, results_of_process, self._results, self._preparation),
            daemon=True,
        )
        with warnings.catch_warnings(), pdfium_lock:
            # Python warns that a fork of a process with threads may deadlock. The new process does
            # not use what these threads have locked, except PDFium, which no thread calls now.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            self._process.start()
        # The process has the only end now, so that its death ends the connection.
        results_of_process.close()

    def submit(self, batch: PageBatch) -> None:
        """Let the process prepare a batch after those that were submitted before."""
        self._pending.append(batch)
        self._batches.put(batch)

    def receive(self) -> PreparedPages:
        """Return the features of the oldest batch that was submitted, once it is prepared."""
        batch = self._pending.popleft()
        prepared = self._receive()
        if prepared is None:
            self._restart()
            prepared = self._prepare_one_by_one(batch)
            for pending_batch in self._pending:
                self._batches.put(pending_batch)
        return prepared

    def _receive(self) -> PreparedPages | None:
        """Wait for the features of a batch; None if the process has ended instead."""
        try:
            prepared: PreparedPages = self._results.recv()
        except (EOFError, OSError):
            return None
        prepared.groups = [
            (positions, {name: _as_tensor(value) for name, value in features.items()})
            for positions, features in prepared.groups
        ]
        return prepared

    def _prepare_one_by_one(self, batch: PageBatch) -> PreparedPages:
        """Prepare pages one by one, to find the one on which the process ends."""
        all_prepared = PreparedPages()
        for position, page in zip(batch.positions, batch.pages, strict=True):
            self._batches.put(PageBatch([position], [page]))
            prepared = self._receive()
            if prepared is None:
                self._restart()
                all_prepared.failures[position] = DataError(
                    f"{page.file}: decoding page {page.number} has ended its process. Replace the "
                    "file, or leave it out.",
                )
                continue
            all_prepared.groups += prepared.groups
            all_prepared.failures.update(prepared.failures)
        return all_prepared

    def _restart(self) -> None:
        """Replace a process that has ended."""
        self._stop()
        self._start()

    def _stop(self) -> None:
        """End the process, which has nothing to save."""
        self._process.kill()
        self._process.join()
        self._batches.close()
        self._batches.cancel_join_thread()
        self._results.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _prepare_batches(
    batches: Any,
    results: Any,
    results_of_parent: Any,
    preparation: PagePreparation,
) -> None:
    """Prepare batches in a worker process, until its parent ends.

    Features are sent as arrays, which go through a pipe. Tensors would go through shared memory, of
    which containers often have 64 MB, less than a few batches of pages.

    Args:
        batches: queue of batches.
        results: connection that takes a result for each batch.
        results_of_parent: the end of this connection that the parent reads.
        preparation: decodes the pages.
    """
    pdfium_lock.release()  # held by the thread that has forked this process
    # A copy of the reading end would keep the pipe open, so that writing to it could wait for ever
    # after the parent has ended.
    results_of_parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            batch: PageBatch = batches.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
            continue
        prepared = preparation.prepare(batch)
        prepared.groups = [
            (positions, {name: _as_array(value) for name, value in features.items()})
            for positions, features in prepared.groups
        ]
        try:
            results.send(prepared)
        except OSError:  # the parent has ended
            return


def _as_array(value: Any) -> Any:
    """Convert a tensor to a numpy array, and return any other value unchanged."""
    return value.numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    """Convert a numpy array to a tensor, and return any other value unchanged."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
