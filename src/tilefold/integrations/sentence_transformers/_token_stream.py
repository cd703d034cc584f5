"""Texts to token vectors in a stream."""

from __future__ import annotations

from typing import Any

import torch

from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._batch import encode_features
from tilefold.integrations.sentence_transformers.stream import TextStream
from tilefold.ops import quantize_tokens
from tilefold.pipeline.tokens import PendingTokens, PendingVectors


class TokenStream(TextStream):
    """Encodes windows of texts to packed token vectors, :class:`tilefold.pipeline.tokens.TokenRows`.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        storage: ``"fp16"`` or ``"int8"``.
        how: as :class:`TextStream` takes them.
    """

    def __init__(self, model: Model, storage: str, **how: Any) -> None:
        super().__init__(model, **how)
        self.storage = storage

    def _pending(self, features: dict[str, Any], *, again: bool = False) -> PendingTokens:
        with torch.inference_mode():
            found = encode_features(self.model, features, self.task)
            return PendingTokens(found["token_embeddings"], found["attention_mask"], self._stored)

    def _stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Token vectors ``[T, D]`` fp32 as they are stored, after which of them are finite then."""
        if self.storage == "fp16":
            half = rows.half()
            return half.isfinite().all(dim=1), half
        quantized = quantize_tokens(rows, "int8")
        return rows.isfinite().all(dim=1), quantized.values, quantized.scales


class VectorStream(TextStream):
    """Encodes windows of texts to token vectors ``[n, D]`` of each text, as the model makes them.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        to_host: copy the vectors to the CPU; else they stay on the device.
        normalize: make each vector of length 1.
        how: as :class:`TextStream` takes them.
    """

    def __init__(self, model: Model, *, to_host: bool, normalize: bool, **how: Any) -> None:
        super().__init__(model, **how)
        self.to_host, self.normalize = to_host, normalize

    def _pending(self, features: dict[str, Any], *, again: bool = False) -> PendingVectors:
        with torch.inference_mode():
            found = encode_features(self.model, features, self.task)
            vectors: torch.Tensor = found["token_embeddings"]
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=-1)
            return PendingVectors(vectors, found["attention_mask"], self.to_host)
