"""One batch of texts to sparse rows, and what is asked of a model around it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold._csr import csr_tensor
from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._heads import base_linear
from tilefold.integrations.sentence_transformers._pooling import sparse_scores
from tilefold.integrations.sentence_transformers.packed_inputs import packed_inputs
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.ops.cpu_linear import fast_linear
from tilefold.ops.lsr_head.rows import CapacityRows
from tilefold.pipeline.rows import Batch, PendingRows, stacked


def sparse_options(model: Model, top_k: int | None, min_weight: float) -> SparseOptions:
    """Options of a row: by default the model's ``max_active_dims`` entries are kept."""
    return SparseOptions(model.max_active_dims if top_k is None else top_k, min_weight)


def prompt_of(model: Model, task: str | None, prompt_name: str | None = None) -> str | None:
    """The prompt that ``encode``, ``encode_query`` and ``encode_document`` choose."""
    if prompt_name is not None:
        if prompt_name not in model.prompts:
            raise ValueError(f"prompt_name must be one of {list(model.prompts)}, got {prompt_name!r}.")
        return str(model.prompts[prompt_name])
    names = {"query": ["query"], "document": ["document", "passage", "corpus"]}.get(task or "", [])
    found = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return model.prompts.get(found)  # type: ignore[no-any-return]


def fused_vocab_size(model: Model) -> int | None:
    """V of an accelerated model with an LM head, else None."""
    fused = (vars(module).get("forward") for module in model.modules())
    heads = [found for f in fused if (found := getattr(f, "head", None)) is not None]
    return int(base_linear(heads[0]).out_features) if heads else None


def encode_batch(
    model: Model, texts: Sequence[str], task: str | None, prompt: str | None, options: SparseOptions
) -> Batch:
    """Texts to sparse rows on the CPU, in one forward pass."""
    task_kwargs = {} if task is None else {"task": task}
    with packed_inputs():
        features = model.preprocess(list(texts), prompt=prompt, **task_kwargs)
    return Batch(0, range(len(texts)), pending_rows(model, features, task_kwargs, options).get())


def pending_rows(
    model: Model, features: Features, task_kwargs: dict[str, str], options: SparseOptions, capacity: int | None = None
) -> PendingRows:
    """Sparse rows of features, on their way to the host; with a `capacity` in rows of this size where they can be."""
    with torch.inference_mode(), sparse_scores(options, capacity):
        rows = encode_features(model, features, task_kwargs)["sentence_embedding"]
        if isinstance(rows, CapacityRows):
            return PendingRows((*rows,), capacity or 0)
        return PendingRows(rows if rows.layout == torch.sparse_csr else _pruned(rows.to_dense(), options))


def encode_features(model: Model, features: Features, task_kwargs: dict[str, str]) -> Features:
    """Run the model on features, moved to its device; a batch without any token gets a place of padding."""
    ids = features.get("input_ids")
    if isinstance(ids, Tensor) and "attention_mask" in features and ids.dim() == 2 and not ids.size(1):
        place = torch.zeros(ids.size(0), 1, dtype=torch.int64)
        features = features | {key: place for key, value in features.items() if isinstance(value, Tensor)}
    with fast_linear(model, torch.device(model.device)):
        found: Features = model(on_device(features, model.device), **task_kwargs)
    return found


def on_device(features: Mapping[str, Any], device: torch.device | str) -> Features:
    """Features whose tensors are there."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}


def as_csr(batches: Sequence[Batch], count: int, vocab_size: int) -> Tensor:
    """``[count, V]`` CSR of sparse rows in the order of the texts; `vocab_size` is that of no batch at all."""
    vocab_size = batches[0].rows.vocab_size if batches else vocab_size
    offsets, columns, values = stacked(batches, count)
    return csr_tensor(offsets, columns.long(), values, (count, vocab_size))


def _pruned(rows: Tensor, options: SparseOptions) -> Tensor:
    """Dense ``[B, V]`` to CSR, under the same options."""
    kept = rows.where(rows > options.min_weight, 0)
    if options.top_k is not None and options.top_k < rows.size(1):
        best = kept.topk(options.top_k, dim=1)
        kept = torch.zeros_like(kept).scatter_(1, best.indices, best.values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return kept.to_sparse_csr()
