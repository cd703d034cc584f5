"""Encodes texts to sparse rows, without the ``[B, S, V]`` logits and without a dense ``[B, V]``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tilefold._csr import csr_tensor
from tilefold._vocabulary import vocabulary_fingerprint
from tilefold.integrations.sentence_transformers._accelerate import accelerate, is_accelerated
from tilefold.integrations.sentence_transformers._batch import encode_batch, evaluating, prompt_of, sparse_options
from tilefold.integrations.sentence_transformers._heads import base_linear


def encode_sparse(
    model: Any,
    texts: Sequence[str],
    *,
    task: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Encode ``texts`` to a ``torch.sparse_csr`` matrix ``[len(texts), V]`` on the CPU, in the order of ``texts``.

    Rows equal those of ``model.encode(texts, max_active_dims=top_k)``, up to the evaluation order of the head. A model
    that is not accelerated is accelerated for the duration of the call. Routes without an LM head (static query
    embeddings) are encoded densely and made sparse afterwards. The matrix has an attribute ``vocabulary_fingerprint``,
    by which :class:`tilefold.retrieval.SparseVectors` refuses to be compared with vectors of another vocabulary.

    Args:
        model: a ``sentence_transformers.SparseEncoder``.
        texts: any number of texts.
        task: ``"query"``, ``"document"`` or ``None``: the route of a Router, and the name of the default prompt.
        prompt_name: name of a prompt of the model; by default that of the task, if the model has one.
        prompt: a prompt to put before every text; takes precedence over ``prompt_name``.
        batch_size: texts encoded at a time; texts are sorted by length first.
        top_k: keep at most this many entries per row; by default the model's ``max_active_dims``.
        min_weight: keep entries strictly greater than this.

    Raises:
        TypeError: if ``texts`` is one string, or ``model`` is not a SparseEncoder.
        ValueError: if ``batch_size`` is not positive, or the model has no prompt of that name.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of strings, got one string; pass [text].")
    if batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size}.")
    with nullcontext() if is_accelerated(model) else accelerate(model):
        options = sparse_options(model, top_k, min_weight)
        prompt = prompt_of(model, task, prompt_name) if prompt is None else prompt
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        with evaluating(model):
            batches = [
                encode_batch(model, [texts[i] for i in order[start : start + batch_size]], task, prompt, options)
                for start in range(0, len(texts), batch_size)
            ]
        rows = _stack_rows(batches, order, _vocab_size(model))
    rows.vocabulary_fingerprint = vocabulary_fingerprint(model.tokenizer)  # type: ignore[attr-defined]
    return rows


def _vocab_size(model: Any) -> int:
    fused = (vars(module).get("forward") for module in model.modules())
    heads = [found for f in fused if (found := getattr(f, "head", None)) is not None]
    return base_linear(heads[0]).out_features if heads else int(model.get_embedding_dimension())


def _stack_rows(batches: list[Tensor], order: list[int], vocab_size: int) -> Tensor:
    """Row ``i`` of the stacked ``batches`` becomes row ``order[i]`` of the result."""
    if not batches:
        batches = [torch.zeros(0, vocab_size).to_sparse_csr()]
    counts = torch.cat([batch.crow_indices().diff() for batch in batches])
    columns = torch.cat([batch.col_indices() for batch in batches])
    values = torch.cat([batch.values() for batch in batches])
    rank = torch.empty(len(order), dtype=torch.int64)
    rank[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))  # row i's place in the stack
    starts = counts.cumsum(0) - counts
    offsets = torch.cat([counts.new_zeros(1), counts[rank].cumsum(0)])
    within = torch.arange(len(values)) - offsets[:-1].repeat_interleave(counts[rank])
    source = starts[rank].repeat_interleave(counts[rank]) + within
    return csr_tensor(offsets, columns[source], values[source], (len(order), vocab_size))
