"""Token vectors of packed features for modules that take padded ones, without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops.packed_attention import places_of_tokens

PACKED_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")


class PackedMask:
    """Replaces the forward of one ``MultiVectorMask``, which cuts packed token vectors one text at a time.

    Args:
        module: the stock module, whose own forward then runs on the padded features.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        """The features with ``[B, S, ..]`` token vectors and ids, and the mask of the tokens that are scored."""
        if "cu_seq_lens_q" in features:
            repad(features)
        found: dict[str, Any] = type(self.module).forward(self.module, features, task=task)
        return found


def repad(features: dict[str, Any]) -> None:
    """Put padded ``token_embeddings``, ``input_ids`` and ``attention_mask`` in the place of packed ones."""
    cu_seqlens: Tensor = features["cu_seq_lens_q"]
    count, longest = cu_seqlens.numel() - 1, int(features["max_length_q"])
    ids, vectors = features["input_ids"][0], features["token_embeddings"][0]
    sequence, place = places_of_tokens(cu_seqlens, ids.numel())
    rows = sequence * longest + place
    features["input_ids"] = ids.new_zeros(count * longest).index_copy(0, rows, ids).view(count, longest)
    padded = vectors.new_zeros(count * longest, vectors.size(1)).index_copy(0, rows, vectors)
    features["token_embeddings"] = padded.view(count, longest, vectors.size(1))
    features["attention_mask"] = torch.arange(longest, device=ids.device) < cu_seqlens.diff()[:, None]
    for key in PACKED_KEYS:
        features.pop(key, None)
