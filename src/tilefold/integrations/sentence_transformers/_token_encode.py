"""``encode`` of an accelerated MultiVectorEncoder: many texts in a stream, everything else as stock."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers._batch import encode_features
from tilefold.integrations.sentence_transformers._fused_encode import asked_of, bar, prompt_of_call, serves_texts, usual
from tilefold.integrations.sentence_transformers._many import batches_of
from tilefold.integrations.sentence_transformers._packed_inputs import packed_inputs
from tilefold.integrations.sentence_transformers.stream import TextStream
from tilefold.pipeline.tokens import PendingVectors

_logger = logging.getLogger("sentence_transformers.multi_vector_encoder.model")  # whose level decides about bars


class VectorStream(TextStream):
    """Encodes windows of texts to token vectors ``[n, D]`` of each text, as the model makes them.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        to_host: copy the vectors to the CPU; else they stay on the device.
        normalize: make each vector of length 1.
        how: as :class:`TextStream` takes them.
    """

    def __init__(self, model: Any, *, to_host: bool, normalize: bool, **how: Any) -> None:
        super().__init__(model, **how)
        self.to_host, self.normalize = to_host, normalize

    def _pending(self, features: dict[str, Any], *, again: bool = False) -> PendingVectors:
        with torch.inference_mode():
            found = encode_features(self.model, features, self.task)
            vectors: Tensor = found["token_embeddings"]
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=-1)
            return PendingVectors(vectors, found["attention_mask"], self.to_host)


class FusedTokenEncode:
    """Replaces ``encode`` of one MultiVectorEncoder; not a module, so the state dict does not change.

    More texts than ``batch_size`` go through :class:`VectorStream`; what it cannot serve (other inputs than strings,
    several processes, options of the processor, pooling of tokens for this call, raw features) goes to the stock
    method.

    Args:
        model: the MultiVectorEncoder.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and result of ``MultiVectorEncoder.encode``; ``batch_size`` as in :class:`FusedEncode`."""
        model, stock = self.model, type(self.model).encode
        asked = asked_of(stock, model, args, kwargs)
        if asked is None or not self._serves(asked):
            with packed_inputs():
                return stock(model, *args, **kwargs)
        model.eval()
        texts, numpy, task = asked["inputs"], bool(asked["convert_to_numpy"]), asked["task"]
        stream = VectorStream(
            model,
            to_host=numpy,
            normalize=bool(asked["normalize_embeddings"]),
            task=task,
            prompt=prompt_of_call(model, asked),
            batch_size=usual(asked),
        )
        title = f"Encoding {'queries' if task == 'query' else 'documents'}"
        found: list[Any] = [None] * len(texts)
        with bar(len(texts), asked["show_progress_bar"], _logger, title) as shown:
            for batch in batches_of(stream, texts, shown.update):
                for place, vectors in zip(batch.places, batch.rows, strict=True):
                    found[place] = _as_numpy(vectors) if numpy else vectors
        return found

    def _serves(self, asked: dict[str, Any]) -> bool:
        plain = asked.get("output_value") == "token_embeddings" and asked.get("token_pooling") is None
        return plain and not asked["kwargs"] and serves_texts(self.model, asked)


def _as_numpy(vectors: Tensor) -> Any:
    return (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
