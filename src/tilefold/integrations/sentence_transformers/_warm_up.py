"""``warm_up``: build the kernels of a model before its first step or request.

The model runs on synthetic texts of the lengths that matter, and all kernels that it needs are
built.
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
    GRAPH_TEXT_COUNTS,
    SPECIAL_TOKENS,
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
    """Build the kernels of a model ahead of time, so that no call waits for a compiler.

    For each length, the accelerated model computes the scores of a batch under autocast, and with
    ``training`` also their gradients. Half of the texts of a batch are shorter. A
    ``MultiVectorEncoder`` scores queries of the first length with documents of every length. With
    ``inference``, CUDA graphs are captured for a few texts of up to the largest length, and an
    accelerated model keeps them. Otherwise the model does not change. ``TILEFOLD_DISABLE=1`` builds
    nothing.

    Args:
        model: a ``SparseEncoder`` or ``MultiVectorEncoder`` on a CUDA device.
        lengths: the number of tokens of the longest text of each batch; the first one is also that
            of a ``MultiVectorEncoder``'s queries.
        batch_size: the number of texts per batch. Kernels are chosen by shape, so use that of the
            job.
        inference: whether to build the kernels of scores without gradients.
        training: whether to build the kernels of scores with gradients.
        dtype: the dtype of autocast; None for no autocast.
        workers: the number of threads that build; by default one per core, at most 16.

    Returns:
        The kernels that were built.

    Raises:
        RuntimeError: if nothing can be built on this machine, or the model is not on a GPU.
        ValueError: if lengths, the batch size or workers are below 1, or if there is nothing to
            build.
        TypeError: if :func:`accelerate` does not accept the model.
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
            # The check would build kernels one after another.
            accelerate(model, check=False)
            stack.callback(restore, model)
        stack.enter_context(in_eval_mode(model))
        calls = warm_up_calls(model, lengths, batch_size, inference, training, dtype)
        # Dropout must not change the caller's random numbers.
        stack.enter_context(torch.random.fork_rng(devices=[device]))
        built = build_kernels(calls, workers)
        if inference:
            _capture_graphs(model, max(lengths))
        return built


def _capture_graphs(model: Model, max_tokens: int) -> None:
    """Capture the CUDA graphs with which ``encode`` encodes a few queries or documents.

    A graph exists for some numbers of texts, ``GRAPH_TEXT_COUNTS``, and of tokens of all texts.

    Args:
        model: an accelerated model.
        max_tokens: the number of tokens of the longest text that graphs are captured for.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return
    most_texts = GRAPH_TEXT_COUNTS[-1]
    for task in ("query", "document"):
        encode = partial(
            model.encode,
            task=task,
            batch_size=most_texts,  # so that the texts of one graph are one batch
            show_progress_bar=False,
        )
        graphs.capture_all_sizes(encode, max_tokens)


def warm_up_calls(
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
        lengths: the number of tokens of the longest document of each batch. The longest query has
            the first of them, since queries of a job have one limit.
        batch_size: the number of texts per batch.
        inference: whether to run each batch without gradients.
        training: whether to run each batch with gradients.
        dtype: the dtype of autocast; None for no autocast.

    Returns:
        Functions without arguments: for each length, one without and one with gradients, if both
        are asked for.
    """
    query_length = lengths[0]
    queries = synthetic_batch(model, query_length, batch_size)
    gradient_modes: list[bool] = []  # whether a run computes gradients
    if inference:
        gradient_modes.append(False)
    if training:
        gradient_modes.append(True)
    calls: list[Callable[[], object]] = []
    for length in lengths:
        documents = synthetic_batch(model, length, batch_size)
        calls += [
            partial(_warm_up_step, model, queries, documents, trains=trains, dtype=dtype)
            for trains in gradient_modes
        ]
    return calls


def synthetic_batch(model: Model, length: int, batch_size: int) -> Features:
    """Return the features of synthetic texts on the device of the model.

    Args:
        model: an accelerated model.
        length: the number of tokens of every second text. The others have half as many.
        batch_size: the number of texts.
    """
    texts = []
    for position in range(batch_size):
        n_tokens = length if position % 2 == 0 else length // 2
        n_words = max(n_tokens - SPECIAL_TOKENS, 1)
        texts.append("a " * n_words)
    with packed_inputs():
        features = model.preprocess(texts)
    return on_device(features, next(model.parameters()).device)


def _warm_up_step(
    model: Model,
    queries: Features,
    documents: Features,
    trains: bool,
    dtype: torch.dtype | None,
) -> None:
    """Run one forward pass, and in training a backward pass, so that their kernels are built.

    A SparseEncoder computes the sparse scores of the documents. A MultiVectorEncoder, whose outputs
    are token vectors, scores the documents with the queries. The loss is the sum of all scores. All
    results are dropped.

    Args:
        model: the model, which is set to training or eval mode.
        queries: the features of one query per document, for a ``MultiVectorEncoder``.
        documents: the features of the documents.
        trains: whether to compute gradients.
        dtype: the dtype of autocast; None for no autocast.
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
