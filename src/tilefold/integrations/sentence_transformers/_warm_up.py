"""``warm_up``: build the kernels of a model before its first step or request.

Kernels are built for the model's own calls with synthetic texts of the lengths that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from tilefold._internal.arguments import check_instance, list_of
from tilefold._internal.typing import Model
from tilefold.integrations.sentence_transformers._accelerate import (
    accelerate,
    is_accelerated,
    restore,
)
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    SPECIAL_TOKENS,
    TEXT_COUNTS,
    graphs_of,
)
from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores
from tilefold.integrations.sentence_transformers.packing.inputs import on_device, packed_inputs
from tilefold.integrations.transformers.networks import in_eval_mode
from tilefold.modules.fused_pooling import Features
from tilefold.ops.implementations import switched_off
from tilefold.ops.warm_up import Built, build_kernels, check_kernels_can_be_built


def warm_up(
    model: Model,
    lengths: Sequence[int] = (32, 256),
    batch_size: int = 32,
    *,
    inference: bool = True,
    training: bool = True,
    dtype: torch.dtype | None = torch.bfloat16,
    workers: int | None = None,
) -> Built:
    """Build the kernels of a model ahead, so that no first call or step waits for a compiler.

    The model runs as :func:`accelerate` makes it, under autocast: for each length, it computes the
    scores of a batch, half of whose texts are shorter, and with ``training`` their gradients. A
    ``MultiVectorEncoder`` scores texts of the first length, as queries, with those of every length.
    With ``inference``, few texts of up to the greatest length are encoded, too, and an accelerated
    model keeps the CUDA graphs. Otherwise the model does not change. ``TILEFOLD_DISABLE=1`` builds
    nothing.

    Args:
        model: a ``SparseEncoder`` or ``MultiVectorEncoder`` on a CUDA device.
        lengths: tokens of the longest text of a batch; for a ``MultiVectorEncoder`` first those of
            queries.
        batch_size: texts in a batch. Launches are chosen by shape, so take that of the job.
        inference: whether to build the kernels of scores without gradients.
        training: whether to build the kernels of scores with gradients.
        dtype: of autocast; ``None`` for none.
        workers: threads that build; by default one per core, at most 16.

    Returns:
        The kernels that were built.

    Raises:
        RuntimeError: nothing can be built on this machine, or the model is not on a GPU.
        ValueError: for lengths, a batch or workers below 1, or if there is nothing to build.
        TypeError: for a model that :func:`accelerate` does not take.
    """
    check_instance("model", model, torch.nn.Module, "a loaded model")
    lengths = list_of("lengths", lengths, ordered=False)
    if not lengths or min(lengths) < 1 or batch_size < 1:
        raise ValueError(
            f"lengths and batch_size must be at least 1, got lengths={lengths}, "
            f"batch_size={batch_size}.",
        )
    if not (inference or training):
        raise ValueError(
            "inference or training must be true, got neither: there is nothing to build.",
        )
    if switched_off():
        return Built(kernels={}, failed=(), seconds=0.0, first_calls=(), cache=Path())
    check_kernels_can_be_built()
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(
            f"model must be on the GPU that will run it, got one on {device}; call "
            "model.to('cuda').",
        )
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        if not is_accelerated(model):
            # The check would build some kernels one after the other.
            accelerate(model, check=False)
            stack.callback(restore, model)
        stack.enter_context(in_eval_mode(model))
        calls = steps(model, lengths, batch_size, inference, training, dtype)
        # Dropout in the calls must not change the caller's random numbers.
        stack.enter_context(torch.random.fork_rng(devices=[device]))
        built = build_kernels(calls, workers)
        if inference:
            _capture_graphs(model, max(lengths))
        return built


def _capture_graphs(model: Model, longest: int) -> None:
    """Capture the CUDA graphs of ``encode`` for few queries or documents.

    Args:
        model: an accelerated model.
        longest: number of tokens of the longest text.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return
    for task in ("query", "document"):
        encode = partial(
            model.encode,
            task=task,
            batch_size=TEXT_COUNTS[-1],
            show_progress_bar=False,
        )
        graphs.warm(encode, longest)


def steps(
    model: Model,
    lengths: Sequence[int],
    batch_size: int,
    inference: bool,
    training: bool,
    dtype: torch.dtype | None,
) -> list[Callable[[], object]]:
    """Return functions that run the model on synthetic batches, so that its kernels are built.

    Args:
        model: an accelerated model.
        lengths: tokens of the longest text of each batch of documents. Queries have the first
            length.
        batch_size: texts in a batch.
        inference: whether to run each batch without gradients.
        training: whether to run each batch with gradients.
        dtype: dtype of autocast; ``None`` for none.

    Returns:
        One function per length and kind of run, without arguments.
    """
    queries = synthetic_batch(model, lengths[0], batch_size)
    calls: list[Callable[[], object]] = []
    for length in lengths:
        documents = synthetic_batch(model, length, batch_size)
        if inference:
            calls.append(
                partial(_run_step, model, queries, documents, trains=False, dtype=dtype),
            )
        if training:
            calls.append(
                partial(_run_step, model, queries, documents, trains=True, dtype=dtype),
            )
    return calls


def synthetic_batch(model: Model, length: int, batch_size: int) -> Features:
    """Return features of synthetic texts on the device of the model.

    Args:
        model: an accelerated model.
        length: number of tokens of the first and of every other text. The rest have half as many.
        batch_size: number of texts.
    """
    texts = []
    for position in range(batch_size):
        n_tokens = length if position % 2 == 0 else length // 2
        n_words = max(n_tokens - SPECIAL_TOKENS, 1)
        texts.append("a " * n_words)
    with packed_inputs():
        features = model.preprocess(texts)
    return on_device(features, next(model.parameters()).device)


def _run_step(
    model: Model,
    queries: Features,
    documents: Features,
    trains: bool,
    dtype: torch.dtype | None,
) -> None:
    """Run a forward pass on documents, and in training a backward pass, for their kernels.

    A SparseEncoder computes the documents' sparse scores. A MultiVectorEncoder, whose outputs are
    token vectors, scores the documents with the queries. The gradients are those of the sum of all
    scores. All results are dropped.

    Args:
        model: the model, which is set to training or eval mode.
        queries: features of as many queries, for a ``MultiVectorEncoder``.
        documents: features of documents.
        trains: whether to compute gradients.
        dtype: dtype of autocast; ``None`` for none.
    """
    parameters = [
        parameter for parameter in model.train(trains).parameters() if parameter.requires_grad
    ]
    device_type = next(model.parameters()).device.type
    autocast = torch.autocast(device_type, dtype, enabled=dtype is not None)
    with torch.set_grad_enabled(trains), autocast:
        document_outputs = model(dict(documents))
        scores = document_outputs.get("sentence_embedding")
        if scores is None:  # a MultiVectorEncoder
            query_outputs = model(dict(queries))
            scores = colbert_scores(
                query_outputs["token_embeddings"],
                document_outputs["token_embeddings"][:, None],
                query_outputs["attention_mask"],
                document_outputs["attention_mask"][:, None],
            )
    if trains:
        torch.autograd.grad(scores.float().sum(), parameters, allow_unused=True)
