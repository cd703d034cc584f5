"""Encoding pages: they are decoded, the model's processor is applied, and the model computes.

The vectors are those that ``encode_document`` of sentence-transformers computes for the images.
Worker processes may decode pages ahead of the model
(:mod:`tilefold.retrieval.encoding.page_workers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import bisect_failures
from tilefold.retrieval.common.files import require
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.pages import DEFAULT_DPI, Page
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "EncodingStep",
    "PageBatch",
    "PagePreparation",
    "PreparedPages",
    "add_image_tokens",
    "check_encodes_images",
    "contains_pages",
    "encode_features",
    "encode_images",
    "encodes_images",
    "has_fixed_shapes",
    "image_features",
    "picklable_error",
    "pool_tokens",
    "prompt_of",
]

# Prompts that `encode_document` looks for, in this order.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Sizes of pages, of unlike areas and shapes, by which a processor of dynamic shapes is recognised.
_PROBE_SIZES = ((40, 40), (80, 80), (160, 40), (90, 200))


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


def prompt_of(model: Any, kind: str) -> str | None:
    """Return the prompt that ``encode_document`` or ``encode_query`` puts before an input.

    Args:
        model: a model of sentence-transformers.
        kind: ``"document"`` or ``"query"``.
    """
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
    """Let ``preprocess`` of a model return the token ids of images, which some models leave out.

    The trainer and the evaluators of sentence-transformers call ``preprocess``. The model is
    changed in place. A saved model does not have the change.

    Args:
        model: a ``MultiVectorEncoder`` of images.
    """
    encoder: Any = model
    transformer = encoder[0]
    original_preprocess = transformer.preprocess

    def preprocess(inputs: Sequence[Any], *args: Any, **options: Any) -> dict[str, Any]:
        features = original_preprocess(inputs, *args, **options)
        if not inputs or any(isinstance(item, str) for item in inputs):
            return dict(features)
        return _with_image_tokens(features, encoder, inputs)

    transformer.preprocess = preprocess


def has_fixed_shapes(model: Model) -> bool:
    """Return whether the features of all pages have the same shapes, whatever the pages' sizes.

    This is so for ColPali. The processor of ColQwen2 instead divides larger pages into more
    patches, and pads the pages of a batch to the largest page. The function decides by processing
    blank images of different sizes.

    Args:
        model: a ``MultiVectorEncoder`` of images.
    """
    pillow = require("PIL.Image", "Pillow", "an image", extra="pages")
    shapes: list[dict[str, torch.Size]] = []
    for size in _PROBE_SIZES:
        try:
            features = image_features(model, [pillow.new("RGB", size)])
        except Exception:  # a processor that refuses a size may refuse some of the pages, too
            return False
        shapes.append(
            {name: value.shape for name, value in features.items() if isinstance(value, Tensor)},
        )
    return all(shapes_of_page == shapes[0] for shapes_of_page in shapes)


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

    def divide(self, size: int | None) -> list[PageBatch]:
        """Divide the batch into consecutive parts.

        Args:
            size: pages of a part, of which the last one may have fewer; None leaves the batch as it
                is.
        """
        if size is None:
            return [self]
        return [
            PageBatch(self.positions[start : start + size], self.pages[start : start + size])
            for start in range(0, len(self.pages), size)
        ]


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
        """Decode the pages of a batch, and compute their features with the model's processor.

        A page that fails does not stop the others.

        Args:
            batch: pages, and their positions in the window of texts and pages.

        Returns:
            The features of the other pages, and the error of each page that failed.
        """
        prepared = PreparedPages()
        images: dict[int, Image] = {}
        for position, page in zip(batch.positions, batch.pages, strict=True):
            try:
                images[position] = page.image(self._dpi)
            except Exception as error:
                prepared.failures[position] = picklable_error(error)

        def features_of(positions: list[int]) -> dict[str, Any]:
            return image_features(self._model, [images[position] for position in positions])

        if images:
            # The processor takes all images at once. If it fails, ever smaller groups are tried,
            # until the images at fault are alone.
            for positions, outcome in bisect_failures(list(images), features_of):
                if isinstance(outcome, Exception):
                    prepared.failures[positions[0]] = picklable_error(outcome)
                else:
                    prepared.groups.append((positions, outcome))
        return prepared


def picklable_error(error: Exception) -> Exception:
    """Return an error that another process can read, of the same class if it is built in."""
    if type(error).__module__ == "builtins" or type(error) is DataError:
        with suppress(TypeError):  # some, such as UnicodeDecodeError, need more than a message
            return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
