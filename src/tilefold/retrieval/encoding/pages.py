"""Encoding pages: worker processes decode them and apply the model's processor ahead of the model.

A worker renders or decodes the pages of a batch and returns the features that the model reads. The
model computes in the process that asked for them, as ``encode_document`` of sentence-transformers
does with the images.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import bisect_failures
from tilefold.retrieval.data.pages import DEFAULT_DPI, Page

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
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
_BATCHES_AHEAD = 2  # prepared batches of each worker that wait for the model


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

    There are none for a few pages, and where processes cannot be forked.

    Args:
        n_pages: number of pages to decode.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if not can_fork or n_pages < _MIN_PAGES_FOR_WORKERS:
        return 0
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min((n_cores or 1) - 1, _MAX_WORKERS))


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
    """Return features of images that have token ids.

    sentence-transformers 6.2 passes images alone to the processor, and that of ColModernVBERT adds
    its prompt and the tokens of the image in ``process_images`` only.

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
        pool_factor: the quotient of the numbers of vectors before and after; None merges none.
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


@dataclass
class PreparedPages:
    """Features of the pages of a batch, and the pages that have none.

    Attributes:
        groups: positions of pages, and the features of all of them. There is one group, unless the
            processor fails on a page.
        failures: position of a page -> error while it was decoded or processed.
    """

    groups: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


class PagePreparation(Dataset[PreparedPages | None]):
    """Decodes the pages of a batch, and applies the processor of a model.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        dpi: dots per inch at which pages of PDFs are rendered.
    """

    def __init__(self, model: Model, dpi: int = DEFAULT_DPI) -> None:
        self._model = model
        self._dpi = dpi

    def __getitem__(self, batch: PageBatch | None) -> PreparedPages | None:
        """Return the features of a batch; None for None, a step without pages."""
        if batch is None:
            return None
        prepared = PreparedPages()
        images: dict[int, Image] = {}
        for position, page in zip(batch.positions, batch.pages, strict=True):
            try:
                images[position] = page.image(self._dpi)
            except Exception as error:  # an error of one page must not lose the others
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
    """Return an error that another process can read: of the same class if it is built in."""
    from tilefold.retrieval.errors import DataError

    if type(error).__module__ == "builtins" or type(error) is DataError:
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class _ArrayPreparation(PagePreparation):
    """Returns arrays in place of tensors, which go through a pipe and not through shared memory.

    Containers often have 64 MB of shared memory, less than a few batches of pages.
    """

    def __getitem__(self, batch: PageBatch | None) -> PreparedPages | None:
        prepared = super().__getitem__(batch)
        if prepared is not None:
            prepared.groups = [
                (positions, {name: _as_array(value) for name, value in features.items()})
                for positions, features in prepared.groups
            ]
        return prepared


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    import numpy as np

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def prepare_ahead(
    model: Model,
    batches: Iterator[PageBatch | None],
    dpi: int,
    n_workers: int,
) -> Iterator[PreparedPages | None]:
    """Prepare batches of pages in worker processes, while the caller uses earlier ones.

    Workers are forked, as those of torch's data loaders are by default, because they need the
    model's processor and none of its weights.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        batches: the batches, which are taken a few ahead of the results; None for a step without
            pages.
        dpi: dots per inch at which pages of PDFs are rendered.
        n_workers: number of processes; 0 prepares each batch in this process when it is needed.

    Yields:
        The features of each batch in order, and None for None.

    Raises:
        RuntimeError: if a worker is killed.
    """
    if not n_workers:
        preparation = PagePreparation(model, dpi)
        for batch in batches:
            yield preparation[batch]
        return
    loader: DataLoader[Any] = DataLoader(
        _ArrayPreparation(model, dpi),
        sampler=batches,
        batch_size=None,
        num_workers=n_workers,
        prefetch_factor=_BATCHES_AHEAD,
        multiprocessing_context="fork",
    )
    with warnings.catch_warnings():
        # Python warns that a fork of a process with threads may deadlock. The workers do not use
        # what these threads have locked.
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        prepared_batches = iter(loader)
    for prepared in prepared_batches:
        if prepared is not None:
            prepared.groups = [
                (positions, {name: _as_tensor(value) for name, value in features.items()})
                for positions, features in prepared.groups
            ]
        yield prepared
