"""Streams of an accelerated model's batches: ``encode_sparse_batch``, which encodes one too, ``encode_token_batch``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from torch import Tensor

from tilefold._csr import csr_tensor
from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._batch import (
    encode_batch,
    evaluating,
    fused_vocab_size,
    prompt_of,
    sparse_options,
)
from tilefold.integrations.sentence_transformers._token_stream import TokenStream
from tilefold.integrations.sentence_transformers.stream import SparseStream
from tilefold.pipeline.rows import Item, Window


class SparseBatchEncoder:
    """``encode_sparse_batch`` of an accelerated SparseEncoder, by which others need not know tilefold.

    Args:
        model: the SparseEncoder.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(
        self, texts: Sequence[str], *, task: str | None = None, top_k: int | None = None, min_weight: float = 0.0
    ) -> Tensor:
        """``[len(texts), V]`` CSR on the CPU, in one forward pass; arguments as in ``encode_sparse``."""
        options = sparse_options(self.model, top_k, min_weight)
        with evaluating(self.model):
            rows = encode_batch(self.model, texts, task, prompt_of(self.model, task), options)
        # clones: tensors of inference mode cannot be used freely outside of it
        offsets, columns, values = (part.clone() for part in (rows.crow_indices(), rows.col_indices(), rows.values()))
        return csr_tensor(offsets, columns, values, (rows.size(0), rows.size(1)))

    @property
    def vocab_size(self) -> int | None:
        """V, if the model has an LM head."""
        return fused_vocab_size(self.model)

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
    ) -> Generator[Item, None, None]:
        """Rows of many texts, tokenised ahead and encoded without padding; see :class:`SparseStream`.

        Args:
            windows: texts, taken by a thread that works ahead.
            task, top_k, min_weight: as in ``encode_sparse``.
            batch_size: texts of a batch, at most.
            batch_tokens: tokens of a batch; by default what suits the device.
        """
        options = sparse_options(self.model, top_k, min_weight)
        with evaluating(self.model):
            stream = SparseStream(
                self.model,
                options,
                task=task,
                prompt=prompt_of(self.model, task),
                batch_size=batch_size,
                batch_tokens=batch_tokens,
            )
            yield from stream(windows)


class TokenBatchEncoder:
    """``encode_token_batch`` of an accelerated MultiVectorEncoder.

    Args:
        model: the MultiVectorEncoder.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str,
        storage: str,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
    ) -> Generator[Item, None, None]:
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
