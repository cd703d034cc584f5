"""Encodes texts to sparse rows, without the ``[B, S, V]`` logits and without a dense ``[B, V]``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from tilefold._typing import Model
from tilefold._vocabulary import vocabulary_fingerprint
from tilefold.integrations.sentence_transformers._accelerate import accelerate, is_accelerated
from tilefold.integrations.sentence_transformers._encoders import (
    batches_of,
    fused_vocab_size,
    prompt_of,
    sparse_options,
)
from tilefold.integrations.sentence_transformers.stream import (
    SparseStream,
    as_csr,
    encode_batch,
)
from tilefold.integrations.transformers.packed import in_eval_mode

FEW = 32  # texts that are encoded in one batch, without threads


def encode_sparse(
    model: Model,
    texts: Sequence[str],
    *,
    task: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Encode ``texts`` to a ``torch.sparse_csr`` matrix ``[len(texts), V]`` on the CPU, in the order of ``texts``.

    Rows equal those of ``model.encode(texts, max_active_dims=top_k)``, up to the order in which encoder and head
    evaluate sums. A model that is not accelerated is accelerated for the duration of the call. Routes without an LM
    head (static query embeddings) are encoded densely and made sparse afterwards. By the matrix's attribute
    ``vocabulary_fingerprint``, :class:`tilefold.retrieval.SparseVectors` refuses vectors of another vocabulary. More
    than 32 texts are tokenised ahead, and encoded in batches of equal numbers of tokens, without padding if possible.

    Args:
        model: a ``sentence_transformers.SparseEncoder``.
        texts: any number of texts.
        task: ``"query"``, ``"document"`` or ``None``: the route of a Router, and the name of the default prompt.
        prompt_name: name of a prompt of the model; by default that of the task, if the model has one.
        prompt: a prompt to put before every text; takes precedence over ``prompt_name``.
        batch_size: texts encoded at a time, at most.
        batch_tokens: tokens encoded at a time; by default what suits the device.
        top_k: keep at most this many entries per row; by default the model's ``max_active_dims``.
        min_weight: keep entries strictly greater than this.

    Raises:
        TypeError: if ``texts`` is one string, or ``model`` is not a SparseEncoder.
        ValueError: if ``batch_size`` or ``batch_tokens`` is not positive, or the model has no prompt of that name.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of strings, got one string; pass [text].")
    for name, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}.")
    with nullcontext() if is_accelerated(model) else accelerate(model):
        options = sparse_options(model, top_k, min_weight)
        prompt = prompt_of(model, task, prompt_name) if prompt is None else prompt
        with in_eval_mode(model):
            if len(texts) > FEW or batch_tokens is not None:
                limits = {"batch_size": batch_size, "batch_tokens": batch_tokens}
                stream = SparseStream(model, options, task=task, prompt=prompt, **limits)
                batches = list(batches_of(stream, texts, lambda done: None))
            else:
                order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
                size = batch_size or FEW
                cuts = [order[start : start + size] for start in range(0, len(order), size)]
                batches = [
                    encode_batch(model, [texts[i] for i in cut], task, prompt, options)._replace(places=cut)
                    for cut in cuts
                ]
            vocab_size = 0 if batches else fused_vocab_size(model) or int(model.get_embedding_dimension())
            rows = as_csr(batches, len(texts), vocab_size)
    rows.vocabulary_fingerprint = vocabulary_fingerprint(model.tokenizer)  # type: ignore[attr-defined]
    return rows
