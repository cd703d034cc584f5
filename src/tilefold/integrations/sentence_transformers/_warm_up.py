"""The kernels that a model needs, built ahead: its steps and calls with made texts of the lengths
that matter.
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
from tilefold.integrations.sentence_transformers.graphs.encoding import TEXTS, graphs_of
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

    Runs the model as :func:`accelerate` makes it: for each length scores of a batch, half of whose
    texts are shorter, and with ``training`` their gradients too, under autocast. A
    ``MultiVectorEncoder`` scores texts of the first length, as queries, with those of every length.
    With ``inference``, few texts of up to the greatest length are encoded, too, and an accelerated
    model keeps the CUDA graphs. The model stays as it was. ``TILEFOLD_DISABLE=1`` builds nothing.

    Args:
        model: a ``SparseEncoder`` or ``MultiVectorEncoder`` on a CUDA device.
        lengths: tokens of the longest text of a batch; for a ``MultiVectorEncoder`` first those of
            queries.
        batch_size: texts in a batch. Launches are chosen by shape, so take that of the job.
        inference, training: whether to build what scores without a gradient, and gradients need.
        dtype: of autocast; ``None`` for none.
        workers: threads that build; by default one per core, at most 16.

    Raises:
        RuntimeError: nothing can be built on this machine, or the model is not on a GPU.
        ValueError: for lengths, a batch or workers below 1, or if there is nothing to build.
        TypeError: for a model that :func:`accelerate` does not take.
    """
    check_instance("model", model, torch.nn.Module, "a loaded model")
    lengths = list_of("lengths", lengths, ordered=False)
    if not lengths or min(lengths) < 1 or batch_size < 1:
        got = f"lengths={lengths}, batch_size={batch_size}"
        raise ValueError(f"lengths and batch_size must be at least 1, got {got}.")
    if not (inference or training):
        raise ValueError(
            "inference or training must be true, got neither: there is nothing to build.",
        )
    if switched_off():
        return Built({}, (), 0.0, (), Path())
    check_kernels_can_be_built()
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(
            f"model must be on the GPU that will run it, got one on {device}; call "
            "model.to('cuda').",
        )
    with ExitStack() as undo:
        undo.enter_context(torch.cuda.device(device))
        if not is_accelerated(model):
            accelerate(model, check=False)  # which would build some of them one after the other
            undo.callback(restore, model)
        undo.enter_context(in_eval_mode(model))
        calls = steps(model, lengths, batch_size, inference, training, dtype)
        with torch.random.fork_rng(devices=[device]):
            built = build_kernels(calls, workers)
            if inference and (graphs := graphs_of(model)) is not None:
                for task in ("query", "document"):
                    run = partial(
                        model.encode,
                        task=task,
                        batch_size=TEXTS[-1],
                        show_progress_bar=False,
                    )
                    graphs.warm(run, max(lengths))
            return built


def steps(
    model: Model,
    lengths: Sequence[int],
    batch_size: int,
    inference: bool,
    training: bool,
    dtype: torch.dtype | None,
) -> list[Callable[[], object]]:
    """One function for each length, with and without gradients, as asked for."""
    queries = made_batch(model, lengths[0], batch_size)
    batches = [made_batch(model, length, batch_size) for length in lengths]
    wanted = [trains for trains, asked in ((False, inference), (True, training)) if asked]
    return [
        partial(_step, model, queries, documents, trains, dtype)
        for documents in batches
        for trains in wanted
    ]


def made_batch(model: Model, length: int, batch_size: int) -> Features:
    """Features of made texts on the device of the model: the first has about ``length`` tokens,
    half of them fewer.
    """
    sizes = [length if i % 2 == 0 else max(length // 2, 1) for i in range(batch_size)]
    with packed_inputs():
        features = model.preprocess(
            ["a " * max(size - 2, 1) for size in sizes],
        )  # two special tokens
    return on_device(features, next(model.parameters()).device)


def _step(
    model: Model,
    queries: Features,
    documents: Features,
    trains: bool,
    dtype: torch.dtype | None,
) -> None:
    parameters = [
        parameter for parameter in model.train(trains).parameters() if parameter.requires_grad
    ]
    device = next(model.parameters()).device.type
    with torch.set_grad_enabled(trains), torch.autocast(device, dtype, enabled=dtype is not None):
        out = model(dict(documents))
        if (scores := out.get("sentence_embedding")) is None:
            asked, sides = model(dict(queries)), ("token_embeddings", "attention_mask")
            (query, query_mask), (rows, mask) = (
                [found[side] for side in sides] for found in (asked, out)
            )
            scores = colbert_scores(query, rows[:, None], query_mask, mask[:, None])
    if trains:
        torch.autograd.grad(scores.float().sum(), parameters, allow_unused=True)
