"""Models of page images without a network: the processors of three architectures, with small grids.

A processor decides which token of a page stands for which part of its image. No network is needed to
test that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules.input_module import InputModule
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ColModernVBertProcessor,
    ColPaliProcessor,
    ColQwen2Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

WORDS = ("<unk>", "<pad>", "<bos>", "<eos>", "Describe", "the", "image", ".", "Question", "red")
PATCH_PIXELS = 8
COLPALI_SIDE = 4
QWEN_MERGE = 2
TILE_SIDE = 2


def _tokenizer(special_tokens: Sequence[str]) -> Any:
    """Return a tokenizer of a few words with some special tokens."""
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    fast_tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    return fast_tokenizer


def colpali_processor() -> Any:
    """A processor that resizes every image to 4 x 4 patches."""
    side = COLPALI_SIDE * PATCH_PIXELS
    image_processor = SiglipImageProcessorPil(size={"height": side, "width": side})
    image_processor.image_seq_length = COLPALI_SIDE**2
    return ColPaliProcessor(image_processor, _tokenizer([]))


def colqwen2_processor() -> Any:
    """A processor whose grid follows the image; 2 x 2 patches are merged into a token."""
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_PIXELS // QWEN_MERGE,
        merge_size=QWEN_MERGE,
        min_pixels=PATCH_PIXELS**2,
        max_pixels=64 * PATCH_PIXELS**2,
    )
    markers = ("im_start", "im_end", "vision_start", "vision_end", "endoftext", "image_pad")
    return ColQwen2Processor(image_processor, _tokenizer([f"<|{name}|>" for name in markers]))


def colmodernvbert_processor() -> Any:
    """A processor that divides an image into tiles of 2 x 2 tokens, and adds the complete image."""
    tile_pixels = TILE_SIDE * PATCH_PIXELS
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 4 * tile_pixels},
        max_image_size={"longest_edge": tile_pixels},
    )
    tile_tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return ColModernVBertProcessor(
        image_processor,
        _tokenizer(["<global-img>", "<|begin_of_text|>", *tile_tags]),
        image_seq_len=TILE_SIDE**2,
    )


class PageProcessor(InputModule):
    """The first module of a model of page images, which only preprocesses."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor
        self.tokenizer = processor.tokenizer

    @property
    def modalities(self) -> list[Any]:
        return ["text", "image"]

    def preprocess(self, inputs: Sequence[Any], **options: Any) -> dict[str, Any]:
        if isinstance(inputs[0], str):
            features = self.processor.process_queries(list(inputs))
        else:
            features = self.processor.process_images(list(inputs))
        return dict(features)

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        return features

    def save(self, output_path: str, *args: Any, **options: Any) -> None:
        raise NotImplementedError


def page_model(processor: Any, *, patches_only: bool = False) -> Any:
    """Return a model without a network.

    Args:
        processor: the processor.
        patches_only: whether only patches are scored, instead of all tokens of a page.
    """
    patch_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    mask = MultiVectorMask(keep_only_token_ids=[patch_id] if patches_only else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MultiVectorEncoder(modules=[PageProcessor(processor), mask], device="cpu")


def patch_brightness(processor: Any, features: dict[str, Any]) -> torch.Tensor:
    """Return the mean of the pixels of each patch, in the order of the patch tokens."""
    pixels = features["pixel_values"][0]
    if "image_grid_thw" in features:
        return pixels.reshape(-1, QWEN_MERGE**2 * pixels.size(1)).mean(dim=1)
    tiles = pixels if pixels.dim() == 4 else pixels[None]
    side = tiles.size(-1) // PATCH_PIXELS
    patches = tiles.reshape(len(tiles), 3, side, PATCH_PIXELS, side, PATCH_PIXELS)
    return patches.mean(dim=(1, 3, 5)).flatten()
