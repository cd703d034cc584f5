"""Texts to token vectors in a stream; ``encode_token_batch``, which an accelerated MultiVectorEncoder carries."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch

from tilefold.integrations.sentence_transformers._batch import encode_features, evaluating, prompt_of
from tilefold.integrations.sentence_transformers.stream import TextStream
from tilefold.ops import quantize_tokens
from tilefold.pipeline.rows import Window
from tilefold.pipeline.tokens import PendingTokens


class TokenStream(TextStream):
    """Encodes windows of texts to packed token vectors, :class:`tilefold.pipeline.tokens.TokenRows`.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        storage: ``"fp16"`` or ``"int8"``.
        how: as :class:`TextStream` takes them.
    """

    def __init__(self, model: Any, storage: str, **how: Any) -> None:
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


class TokenBatchEncoder:
    """What an accelerated MultiVectorEncoder carries as ``encode_token_batch``.

    Args:
        model: the MultiVectorEncoder.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str,
        storage: str,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
    ) -> Generator[Any, None, None]:
        """Token vectors of many texts, tokenised ahead and encoded without padding; see :class:`TokenStream`.

        Args:
            windows: texts, taken by a thread that works ahead.
            task: ``"query"`` or ``"document"``.
            storage: ``"fp16"`` or ``"int8"``.
            batch_size: texts of a batch, at most.
            batch_tokens: tokens of a batch; by default what suits the device.
        """
        how = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        with evaluating(self.model):
            stream = TokenStream(self.model, storage, task=task, prompt=prompt_of(self.model, task), **how)
            yield from stream(windows)
