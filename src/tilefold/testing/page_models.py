"""Small random models of page images with the architectures of ColPali, ColQwen2, ColModernVBERT.

They are built from the configurations of transformers, saved to a folder without any download, and
loaded by ``MultiVectorEncoder(folder)`` of sentence-transformers 6.2 as the published models are.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["ARCHITECTURES", "COLPALI_3B", "PageModelSize", "build_page_model", "save_page_model"]

Architecture = Literal["colpali", "colqwen2", "colmodernvbert"]
ARCHITECTURES: tuple[Architecture, ...] = ("colpali", "colqwen2", "colmodernvbert")
# Special tokens that the processors of the three architectures use.
_PAD, _UNKNOWN, _BOS, _EOS, _MASK = "<pad>", "<unk>", "<bos>", "<eos>", "<mask>"
_IMAGE_TOKENS = {
    "colpali": ["<image>"],
    "colqwen2": [
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|video_pad|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    ],
    "colmodernvbert": [
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        "<|begin_of_text|>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ],
}
# Location and segmentation tokens, which the processor of ColPali adds to its tokenizer.
_N_PALIGEMMA_TOKENS = 1024 + 128


@dataclass(frozen=True)
class PageModelSize:
    """Sizes of a small model of page images.

    Attributes:
        hidden_size: width of the vision and the language model.
        n_layers: layers of each of them.
        n_heads: attention heads of each of them.
        patch_size: width and height of a patch in pixels.
        image_size: width and height in pixels to which ColPali and each tile of ColModernVBERT are
            resized; a multiple of the patch size.
        max_pixels: largest image of ColQwen2 in pixels.
        longest_edge: longest edge of an image of ColModernVBERT before it is divided into tiles.
        embedding_dim: entries of a token vector.
        intermediate_size: width of the feed-forward layers of the language model; None is twice the
            hidden size.
        n_key_value_heads: key and value heads of the language model of ColPali.
        vision: width, layers, heads and feed-forward width of the vision model, if they differ from
            those of the language model.
        vocab_size: least number of tokens of the language model.
    """

    hidden_size: int = 32
    n_layers: int = 1
    n_heads: int = 2
    patch_size: int = 8
    image_size: int = 32
    max_pixels: int = 64 * 64
    longest_edge: int = 64
    embedding_dim: int = 16
    intermediate_size: int | None = None
    n_key_value_heads: int = 1
    vision: tuple[int, int, int, int] | None = None
    vocab_size: int = 0


# The sizes of vidore/colpali-v1.3: PaliGemma of 3 billion weights, 1,024 patches per page.
COLPALI_3B = PageModelSize(
    hidden_size=2048,
    n_layers=18,
    n_heads=8,
    patch_size=14,
    image_size=448,
    embedding_dim=128,
    intermediate_size=16384,
    vision=(1152, 27, 16, 4304),
    vocab_size=257216,
)


def save_page_model(
    folder: Path,
    architecture: Architecture = "colpali",
    *,
    size: PageModelSize | None = None,
    words: Sequence[str] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save a random model of page images with its processor.

    Args:
        folder: the folder, which is created.
        architecture: the published model whose architecture it has.
        size: sizes of the model; by default a few thousand weights.
        words: words that are one token. Other words are split into letters.
        seed: seed of the weights.
        dtype: dtype of the saved weights.

    Returns:
        The folder.

    Raises:
        ValueError: for an unknown architecture.
    """
    model, processor = build_page_model(architecture, size=size, words=words, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(str(folder))
    processor.save_pretrained(str(folder))
    return folder


def build_page_model(
    architecture: Architecture = "colpali",
    *,
    size: PageModelSize | None = None,
    words: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return a random model of page images and its processor.

    The weights have torch's default dtype, and are on its default device.

    Args:
        architecture: the published model whose architecture it has.
        size: sizes of the model; by default a few thousand weights.
        words: words that are one token. Other words are split into letters.
        seed: seed of the weights.

    Returns:
        The ``PreTrainedModel`` and the ``ProcessorMixin`` of transformers.

    Raises:
        ValueError: for an unknown architecture.
    """
    size = PageModelSize() if size is None else size
    builders = {
        "colpali": _build_colpali,
        "colqwen2": _build_colqwen2,
        "colmodernvbert": _build_colmodernvbert,
    }
    if architecture not in builders:
        raise ValueError(
            f"architecture: expected one of {', '.join(builders)}, got {architecture!r}.",
        )
    tokenizer = _build_tokenizer(words, _IMAGE_TOKENS[architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builders[architecture](size, tokenizer)


def _build_tokenizer(words: Sequence[str], image_tokens: Sequence[str]) -> Any:
    """Return a lower-casing tokenizer of words, which splits unknown words into letters.

    Args:
        words: words that are one token.
        image_tokens: special tokens of the architecture.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special_tokens = [_PAD, _UNKNOWN, _BOS, _EOS, _MASK, *image_tokens]
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*letters, *(f"##{letter}" for letter in letters)]
    vocabulary = dict.fromkeys([*special_tokens, *pieces, *(word.lower() for word in words)])
    token_ids = {token: number for number, token in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(token_ids, unk_token=_UNKNOWN))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        bos_token=_BOS,
        eos_token=_EOS,
        mask_token=_MASK,
        extra_special_tokens=list(image_tokens),
        model_max_length=2048,
    )


def _text_sizes(size: PageModelSize, vocab_size: int) -> dict[str, Any]:
    """Return the options of a language model.

    Args:
        size: sizes of the model.
        vocab_size: the size of the vocabulary.
    """
    return {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size or 2 * size.hidden_size,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.n_heads,
        "max_position_embeddings": 2048,
    }


def _siglip_sizes(size: PageModelSize) -> dict[str, Any]:
    """Return the options of the vision model SigLIP."""
    default_sizes = (size.hidden_size, size.n_layers, size.n_heads, 2 * size.hidden_size)
    hidden_size, n_layers, n_heads, intermediate_size = size.vision or default_sizes
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "patch_size": size.patch_size,
        "image_size": size.image_size,
        "vision_use_head": False,
    }


def _build_colpali(size: PageModelSize, tokenizer: Any) -> tuple[Any, Any]:
    """Return a random ColPali model and its processor: a fixed grid of patches.

    Args:
        size: sizes of the model.
        tokenizer: its tokenizer.
    """
    from transformers import (
        ColPaliConfig,
        ColPaliForRetrieval,
        ColPaliProcessor,
        SiglipImageProcessorPil,
    )

    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    vocab_size = max(size.vocab_size, len(tokenizer) + _N_PALIGEMMA_TOKENS)
    config = ColPaliConfig(
        vlm_config={
            "model_type": "paligemma",
            "image_token_index": image_token_id,
            "vocab_size": vocab_size,
            "hidden_size": size.hidden_size,
            "projection_dim": size.hidden_size,
            "pad_token_id": tokenizer.pad_token_id,
            "vision_config": _siglip_sizes(size),
            "text_config": {
                "model_type": "gemma",
                "num_key_value_heads": size.n_key_value_heads,
                "head_dim": size.hidden_size // size.n_heads,
                "pad_token_id": tokenizer.pad_token_id,
                **_text_sizes(size, vocab_size),
            },
        },
        embedding_dim=size.embedding_dim,
    )
    image_processor = SiglipImageProcessorPil(
        size={"height": size.image_size, "width": size.image_size},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    image_processor.image_seq_length = (size.image_size // size.patch_size) ** 2
    processor = ColPaliProcessor(image_processor, tokenizer)
    return ColPaliForRetrieval(config), processor


def _build_colqwen2(size: PageModelSize, tokenizer: Any) -> tuple[Any, Any]:
    """Return a random ColQwen2 model and its processor: patches by the size of the image.

    Args:
        size: sizes of the model.
        tokenizer: its tokenizer.
    """
    from transformers import (
        ColQwen2Config,
        ColQwen2ForRetrieval,
        ColQwen2Processor,
        Qwen2VLImageProcessorPil,
    )

    head_dim = size.hidden_size // size.n_heads
    config = ColQwen2Config(
        vlm_config={
            "model_type": "qwen2_vl",
            "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
            "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
            "vision_config": {
                "model_type": "qwen2_vl_vision",
                "depth": size.n_layers,
                "embed_dim": size.hidden_size,
                "hidden_size": size.hidden_size,
                "num_heads": size.n_heads,
                "mlp_ratio": 2,
                "patch_size": size.patch_size,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "text_config": {
                "model_type": "qwen2_vl_text",
                "num_key_value_heads": size.n_heads,
                # The rotated pairs of a head are divided among time, height and width.
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": _mrope_section(head_dim),
                },
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                **_text_sizes(size, len(tokenizer)),
            },
        },
        embedding_dim=size.embedding_dim,
    )
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=size.patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 4 * size.patch_size**2, "longest_edge": size.max_pixels},
    )
    processor = ColQwen2Processor(image_processor, tokenizer)
    return ColQwen2ForRetrieval(config), processor


def _mrope_section(head_dim: int) -> list[int]:
    """Divide the rotated pairs of an attention head among time, height and width."""
    n_pairs = head_dim // 2
    n_spatial = 3 * n_pairs // 8  # the share of height, and of width, in Qwen2-VL
    return [n_pairs - 2 * n_spatial, n_spatial, n_spatial]


def _build_colmodernvbert(size: PageModelSize, tokenizer: Any) -> tuple[Any, Any]:
    """Return a random ColModernVBERT model and its processor: tiles and a global image.

    Args:
        size: sizes of the model.
        tokenizer: its tokenizer.
    """
    from transformers import (
        ColModernVBertConfig,
        ColModernVBertForRetrieval,
        ColModernVBertProcessor,
        Idefics3ImageProcessorPil,
    )

    shuffle_factor = 2
    config = ColModernVBertConfig(
        vlm_config={
            "model_type": "modernvbert",
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
            "pixel_shuffle_factor": shuffle_factor,
            "vision_config": _siglip_sizes(size),
            "text_config": {
                "model_type": "modernbert",
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "cls_token_id": tokenizer.bos_token_id,
                "sep_token_id": tokenizer.eos_token_id,
                **_text_sizes(size, len(tokenizer)),
            },
        },
        embedding_dim=size.embedding_dim,
    )
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": size.longest_edge},
        max_image_size={"longest_edge": size.image_size},
        do_image_splitting=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    n_patches = (size.image_size // size.patch_size) ** 2
    processor = ColModernVBertProcessor(
        image_processor,
        tokenizer,
        image_seq_len=n_patches // shuffle_factor**2,
    )
    return ColModernVBertForRetrieval(config), processor
