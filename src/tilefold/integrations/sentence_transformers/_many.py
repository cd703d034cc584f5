"""Many texts to one sparse matrix, through the stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from tilefold._csr import csr_tensor
from tilefold._typing import Model
from tilefold.integrations.sentence_transformers.stream import SparseStream, TextStream
from tilefold.modules.fused_pooling import SparseOptions
from tilefold.pipeline.rows import Batch, Begun, Window, WindowEnd, stacked
from tilefold.pipeline.truncated import watched

FIRST_TEXTS = 512  # of the first window, so that the device need not wait long for it
WINDOW_TEXTS = 2048


def encode_many(
    model: Model,
    texts: Sequence[str],
    task: str | None,
    prompt: str | None,
    options: SparseOptions,
    limits: Mapping[str, int | None],
    vocab_size: int,
    progress: Callable[[int], object] = lambda done: None,
) -> Tensor:
    """``[len(texts), V]`` CSR on the CPU; the model is accelerated and in eval mode.

    Args:
        limits: ``batch_size`` and ``batch_tokens``, as :class:`TextStream` takes them.
        progress: called with the number of texts that were encoded since the last call.

    Raises:
        Exception: what the model raised for the first text that could not be encoded.
    """
    stream = SparseStream(model, options, task=task, prompt=prompt, **limits)
    found = list(batches_of(stream, texts, progress))
    vocab_size = found[0].rows.vocab_size if found else vocab_size
    offsets, columns, values = stacked(found, len(texts))
    return csr_tensor(offsets, columns.long(), values, (len(texts), vocab_size))


def batches_of(stream: TextStream, texts: Sequence[str], progress: Callable[[int], object]) -> Iterator[Batch]:
    """Batches of texts through a stream, longest first; ``places`` are those in `texts`.

    Args:
        progress: called with the number of texts that were encoded since the last call.

    Raises:
        Exception: what the model raised for the first text that could not be encoded.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort(descending=True, stable=True)
    starts = [0, *range(FIRST_TEXTS, len(texts), WINDOW_TEXTS), len(texts)]
    windows = [order[start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    cut = 0
    with closing(stream(Window([texts[i] for i in window]) for window in windows)) as items:
        for item in items:
            if isinstance(item, WindowEnd):
                if (watch := watched()) is not None:  # of who called, whose thread tokenises nothing itself
                    watch.add(item.texts, cut, item.max_length)
                cut = 0
            if isinstance(item, (Begun, WindowEnd)):
                continue
            if isinstance(item.rows, Exception):
                raise item.rows
            cut += item.cut
            window = windows[item.window]
            yield item._replace(places=[window[place] for place in item.places])
            progress(len(item.places))
