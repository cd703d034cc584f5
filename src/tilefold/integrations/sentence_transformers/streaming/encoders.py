"""``encode``, ``encode_sparse_batch`` and ``encode_token_batch`` of an accelerated model: texts
through a stream.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.arguments import list_of
from tilefold._internal.csr import coo_tensor
from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import base_linear, is_multi_vector
from tilefold.integrations.sentence_transformers._pooling import fused_forwards
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.integrations.sentence_transformers.packing.inputs import packed_inputs
from tilefold.integrations.sentence_transformers.streaming import stream as streams
from tilefold.integrations.sentence_transformers.streaming.stream import (
    SparseStream,
    TextStream,
    prompt_of,
)
from tilefold.integrations.transformers.packed import in_eval_mode
from tilefold.modules.fused_pooling import Options, SparseOptions
from tilefold.pipeline.rows import (
    Batch,
    Item,
    StreamStart,
    Window,
    WindowEnd,
    concatenate_rows,
    repeat_interleave,
)
from tilefold.pipeline.truncation import current_truncation

FIRST_TEXTS, GROWTH = (
    512,
    4,
)  # of the first window, so that the device need not wait long, for a later one neither
WINDOW_TEXTS, WINDOW_CHARACTERS = (
    2048,
    1 << 18,
)  # of a later one, at least; half the tokens of a batch on a GPU
_USUAL = 32  # the stock batch size, from which on batches are cut by tokens


def sparse_options(model: Model, top_k: int | None, min_weight: float) -> SparseOptions:
    """Options of a row: by default the model's ``max_active_dims`` entries are kept."""
    return SparseOptions(model.max_active_dims if top_k is None else top_k, min_weight)


def fused_vocab_size(model: Model) -> int | None:
    """V of an accelerated model with an LM head, else None."""
    heads = [fused.head for fused in fused_forwards(model) if fused.head is not None]
    return base_linear(heads[0]).out_features if heads else None


def batches_of(
    stream: TextStream,
    texts: Sequence[str],
    progress: Callable[[int], object],
) -> Iterator[Batch]:
    """Batches of texts through a stream, longest first; ``positions`` are those in `texts`.

    Raises what the model raised for the first text that could not be encoded; `progress` gets
    numbers of new texts.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort(descending=True, stable=True)
    windows = [
        order[start:stop].tolist() for start, stop in itertools.pairwise(_starts(lengths[order]))
    ]
    with closing(stream(Window([texts[i] for i in window]) for window in windows)) as items:
        for item in items:
            if isinstance(item, (StreamStart, WindowEnd)):
                continue
            if isinstance(item.rows, Exception):
                raise item.rows
            if (
                watch := current_truncation()
            ) is not None:  # of who called, whose thread tokenises nothing itself
                watch.add(len(item.positions), item.cut, item.max_length)
            window = windows[item.window]
            yield item._replace(positions=[window[place] for place in item.positions])
            progress(len(item.positions))


def _starts(lengths: Tensor) -> list[int]:
    """Where windows of texts with so many characters, which fall, begin and end."""
    ends, starts = lengths.cumsum(0), [0, min(FIRST_TEXTS, len(lengths))]
    while starts[-1] < len(lengths):
        last = starts[-1]
        enough = int(torch.searchsorted(ends, ends[last - 1] + WINDOW_CHARACTERS))
        size = min(max(enough - last, WINDOW_TEXTS), GROWTH * (last - starts[-2]))
        starts.append(min(last + size, len(lengths)))
    return starts


class SparseBatchEncoder(Replacement):
    """``encode_sparse_batch`` of an accelerated SparseEncoder, by which others need not know
    tilefold.
    """

    def __call__(
        self,
        texts: Sequence[str],
        *,
        task: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Tensor:
        """``[len(texts), V]`` CSR on the CPU, in one forward pass; arguments as in
        ``encode_sparse``.
        """
        texts = list_of("texts", texts)
        return streams.as_csr(
            [self.batch(texts, task=task, top_k=top_k, min_weight=min_weight)],
            len(texts),
            0,
        )

    def batch(
        self,
        texts: Sequence[str],
        *,
        task: str | None = None,
        prompt_name: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Batch:
        """Rows as of the call, without a matrix around them."""
        options = sparse_options(self.owner, top_k, min_weight)
        return streams.encode_batch(
            self.owner,
            list_of("texts", texts),
            task,
            prompt_of(self.owner, task, prompt_name),
            options,
        )

    @property
    def vocab_size(self) -> int | None:
        """V, if the model has an LM head."""
        return fused_vocab_size(self.owner)

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
        to_host: bool = True,
        **limits: int | None,
    ) -> Generator[Item, None, None]:
        """Rows of many texts, with entries on the device unless `to_host`; limits as
        :class:`TextStream` takes them.
        """
        options, prompt = sparse_options(self.owner, top_k, min_weight), prompt_of(self.owner, task)
        with in_eval_mode(self.owner):
            stream = SparseStream(self.owner, options, to_host, task=task, prompt=prompt, **limits)
            yield from stream(windows)


class TokenBatchEncoder(Replacement):
    """``encode_token_batch`` of an accelerated MultiVectorEncoder."""

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str,
        storage: str,
        **limits: int | None,
    ) -> Generator[Item, None, None]:
        """Token vectors of many texts, stored as ``"fp16"`` or ``"int8"``; limits as for sparse
        rows.
        """
        with in_eval_mode(self.owner):
            stream = streams.TokenStream(
                self.owner,
                storage,
                task=task,
                prompt=prompt_of(self.owner, task),
                **limits,
            )
            yield from stream(windows)


class FusedEncode(Replacement):
    """Replaces ``encode`` of one model: few texts go through a CUDA graph, many through a stream,
    all else is as stock.

    A ``batch_size`` below 32 bounds the texts of a batch; otherwise batches hold a number of tokens
    that suits the device. Neither serves inputs but strings, several processes, or options of the
    processor.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Arguments and result of the stock ``encode``."""
        model, stock = self.owner, type(self.owner).encode
        if args:
            args = (_listed_inputs(model, args[0]), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = _listed_inputs(model, kwargs["inputs"])
        if (asked := _served(stock, model, args, kwargs)) is None:
            with packed_inputs():
                return stock(model, *args, **kwargs)
        single, size = isinstance(asked["inputs"], str), asked["batch_size"]
        texts = [asked["inputs"]] if single else asked["inputs"]
        prompt, show = (
            model._resolve_prompt(asked["prompt"], asked["prompt_name"]),
            asked["show_progress_bar"],
        )
        if show is None:
            show = logging.getLogger(stock.__module__).getEffectiveLevel() <= logging.INFO
        several = is_multi_vector(model)
        if len(texts) > size:
            model.eval()
            how = {"prompt": prompt, "batch_size": size if size < _USUAL else None}
            return (_vectors if several else _rows)(model, asked, how, show)
        found = (
            None if show else (_few_vectors if several else _few_rows)(model, asked, texts, prompt)
        )
        if found is None:
            with packed_inputs():
                return stock(model, *args, **kwargs)
        return found[0] if single else found


def _listed_inputs(model: Model, inputs: object) -> object:
    """Return the inputs of ``encode`` by position: one input as it is, several as a list.

    sentence-transformers takes a Series, a generator or a view of a dictionary for one input, and
    refuses it.
    """
    if isinstance(inputs, (str, list)):
        return inputs
    is_array = isinstance(inputs, (np.ndarray, Tensor))  # one image, or one recording
    is_series = not is_array and getattr(inputs, "ndim", None) == 1
    if is_series or isinstance(inputs, (Iterator, MappingView)):
        return list_of("inputs", inputs)
    return inputs if model.is_singular_input(inputs) else list_of("inputs", inputs)


def _served(stock: Any, model: Model, args: tuple[object, ...], kwargs: Options) -> Options | None:
    """The arguments by name of a call that is no stock one: for strings, on the model's device, in
    this process.
    """
    names, defaults = _parameters(stock)
    given = dict(zip(names, args, strict=False))
    if len(given) < len(args) or given.keys() & kwargs.keys():  # of which the stock method tells
        return None
    asked = defaults | given | kwargs
    asked["kwargs"] = {name: asked.pop(name) for name in kwargs.keys() - names.keys()}
    texts, size = asked.get("inputs"), asked["batch_size"]
    if not (isinstance(texts, (str, list)) and isinstance(size, int) and size > 0):
        return None
    graphs, single = graphs_of(model), isinstance(texts, str)
    graphless = graphs is None or not (
        graphs.graphs or graphs.may_run([texts] if isinstance(texts, str) else texts)
    )
    if graphless and (single or len(texts) <= size):
        return None
    here = asked.get("device") is None or asked["device"] in (model.device, str(model.device))
    here = (
        here
        and asked.get("pool") is None
        and getattr(model, "_distributed_inference", None) is None
    )
    if not here or not (single or all(isinstance(text, str) for text in texts)):
        return None
    if is_multi_vector(model):  # no raw features, and no pooling of tokens for this call
        plain = (
            asked.get("output_value") == "token_embeddings" and asked.get("token_pooling") is None
        )
        return asked if plain and not asked["kwargs"] else None
    return (
        asked
        if graphs is not None and graphs.splade and not set(asked["kwargs"]) - {"task"}
        else None
    )


@functools.cache
def _parameters(stock: Any) -> tuple[Mapping[str, object], Options]:
    """The parameters of ``encode`` in their order, without ``self`` and those that take the rest;
    and the defaults.
    """
    _, *every = inspect.signature(stock).parameters.values()
    named = {
        each.name: each for each in every if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    return named, {
        name: each.default
        for name, each in named.items()
        if each.default is not inspect.Parameter.empty
    }


def _few_rows(model: Model, asked: Options, texts: list[str], prompt: str | None) -> Any:
    """Rows of one batch as ``encode`` returns them, None where no graph made them."""
    options, task = (
        sparse_options(model, asked["max_active_dims"], 0.0),
        asked["kwargs"].get("task"),
    )
    graphs = graphs_of(model)
    to_host, how = bool(asked["save_to_cpu"]), {"task": task, "prompt": prompt, "options": options}
    if graphs is None or (rows := graphs.sparse(texts, to_host=to_host, **how)) is None:
        return None
    device = torch.device("cpu") if to_host else graphs.device
    if len(texts) > 1:
        return _as_asked(
            _as_coo(rows.counts, rows.columns, rows.values, rows.vocab_size, device),
            asked,
        )
    # one row needs no matrix, of which sparse tensors are slow to select a row
    columns, values = rows.columns.long()[None].to(device), rows.values.to(device)
    one = coo_tensor(columns, values, (rows.vocab_size,))
    if isinstance(asked["inputs"], str):
        return [one if asked["convert_to_sparse_tensor"] else one.to_dense()]
    return _as_asked(one[None], asked)


def _few_vectors(model: Model, asked: Options, texts: list[str], prompt: str | None) -> Any:
    """Likewise, token vectors."""
    numpy, graphs = bool(asked["convert_to_numpy"]), graphs_of(model)
    how = {
        "normalize": bool(asked["normalize_embeddings"]),
        "to_host": numpy,
        "task": asked["task"],
        "prompt": prompt,
    }
    found = graphs and graphs.vectors(texts, **how)
    return [_as_numpy(vectors) for vectors in found] if found and numpy else found


def _shown(stream: TextStream, texts: list[str], show: bool, title: str) -> Iterator[Batch]:
    """Batches of the texts, under a progress bar."""
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]  # the one of stock

    with tqdm(total=len(texts), desc=title, disable=not show) as shown:
        yield from batches_of(stream, texts, shown.update)


def _rows(model: Model, asked: Options, how: Options, show: bool) -> object:
    options, texts = sparse_options(model, asked["max_active_dims"], 0.0), asked["inputs"]
    to_host = asked["save_to_cpu"] or model.device.type == "cpu"
    stream = SparseStream(model, options, to_host, task=asked["kwargs"].get("task"), **how)
    batches = list(_shown(stream, texts, show, "Texts"))
    offsets, columns, values = concatenate_rows(batches, len(texts))
    return _as_asked(
        _as_coo(offsets.diff(), columns, values, batches[0].rows.vocab_size, values.device),
        asked,
    )


def _as_asked(found: Tensor, asked: Options) -> object:
    """Rows in the form that a call of ``encode`` asks for."""
    if not asked["convert_to_sparse_tensor"]:
        found = found.to_dense()
    return found if asked["convert_to_tensor"] else list(found)


def _vectors(model: Model, asked: Options, how: Options, show: bool) -> object:
    texts, task, numpy = asked["inputs"], asked["task"], bool(asked["convert_to_numpy"])
    stream = streams.VectorStream(
        model,
        to_host=numpy,
        normalize=bool(asked["normalize_embeddings"]),
        task=task,
        **how,
    )
    found: list[object] = [None] * len(texts)
    for batch in _shown(
        stream,
        texts,
        show,
        f"Encoding {'queries' if task == 'query' else 'documents'}",
    ):
        for place, vectors in zip(batch.positions, batch.rows, strict=True):
            found[place] = _as_numpy(vectors) if numpy else vectors
    return found


def _as_coo(
    counts: Tensor,
    columns: Tensor,
    values: Tensor,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Rows with so many entries as coalesced COO on `device`, as ``encode`` returns it."""
    indices = torch.empty(2, len(values), dtype=torch.int64, device=device)
    indices[0] = repeat_interleave(torch.arange(len(counts)), counts, device)
    indices[1] = columns
    return coo_tensor(indices, values.to(device), (len(counts), vocab_size))


def _as_numpy(vectors: Tensor) -> object:
    return (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
