"""``encode``, ``encode_sparse_batch`` and ``encode_token_batch`` of an accelerated model."""

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
from tilefold.integrations.transformers.networks import in_eval_mode
from tilefold.modules.fused_pooling import Options, SparseOptions
from tilefold.pipeline.rows import (
    Batch,
    Item,
    Window,
    concatenate_rows,
    repeat_interleave,
)
from tilefold.pipeline.truncation import current_truncation

# Texts of the first window: few, so that the device starts early.
FIRST_TEXTS = 512
# How many times as many texts a window has as the one before it, at most.
GROWTH = 4
# Texts and characters of a later window, at least: about half the tokens of a batch on a GPU.
WINDOW_TEXTS = 2048
WINDOW_CHARACTERS = 1 << 18
# The default batch size of ``encode``. From it on batches are limited by tokens instead.
_DEFAULT_BATCH_SIZE = 32


def sparse_options(model: Model, top_k: int | None, min_weight: float) -> SparseOptions:
    """Return which entries of a row are kept: by default as many as ``max_active_dims`` says."""
    return SparseOptions(model.max_active_dims if top_k is None else top_k, min_weight)


def fused_vocab_size(model: Model) -> int | None:
    """Return the vocabulary size V of an accelerated model with an LM head, else None."""
    heads = [fused.head for fused in fused_forwards(model) if fused.head is not None]
    return base_linear(heads[0]).out_features if heads else None


def batches_of(
    stream: TextStream,
    texts: Sequence[str],
    progress: Callable[[int], object],
) -> Iterator[Batch]:
    """Encode texts by a stream, the longest first.

    Args:
        stream: the stream.
        texts: texts of any number.
        progress: called with the number of texts of each batch.

    Yields:
        Batches, whose positions are those in `texts`.

    Raises:
        Exception: the error of the first text that cannot be encoded.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort(descending=True, stable=True)
    boundaries = _window_boundaries(lengths[order])
    windows = [order[start:stop].tolist() for start, stop in itertools.pairwise(boundaries)]
    # The tokenizer runs in the stream's thread, so its counts are added to those of this thread.
    truncation = current_truncation()
    text_windows = (Window([texts[position] for position in window]) for window in windows)
    with closing(stream(text_windows)) as items:
        for item in items:
            if not isinstance(item, Batch):
                continue
            if isinstance(item.rows, Exception):  # of a text that failed by itself
                raise item.rows
            n_texts = len(item.positions)
            if truncation is not None:
                truncation.add(n_texts, item.cut, item.max_length)
            window = windows[item.window]
            yield item._replace(positions=[window[position] for position in item.positions])
            progress(n_texts)


def _window_boundaries(lengths: Tensor) -> list[int]:
    """Divide texts into windows, which are tokenised one after another.

    The first window is small, so that the device starts early. Each later window has at least
    ``WINDOW_TEXTS`` texts and about ``WINDOW_CHARACTERS`` characters, but at most ``GROWTH`` times
    as many texts as the one before it.

    Args:
        lengths: numbers of characters in descending order, ``[N]``.

    Returns:
        Positions at which the windows begin, and N.
    """
    n_texts = len(lengths)
    ends = lengths.cumsum(0)  # characters up to the end of each text
    boundaries = [0, min(FIRST_TEXTS, n_texts)]
    while boundaries[-1] < n_texts:
        start = boundaries[-1]
        last_size = start - boundaries[-2]
        end = int(torch.searchsorted(ends, ends[start - 1] + WINDOW_CHARACTERS))
        size = min(max(end - start, WINDOW_TEXTS), GROWTH * last_size)
        boundaries.append(min(start + size, n_texts))
    return boundaries


class SparseBatchEncoder(Replacement):
    """``encode_sparse_batch`` of an accelerated SparseEncoder.

    It lets other packages encode sparse rows without importing tilefold.
    """

    def __call__(
        self,
        texts: Sequence[str],
        *,
        task: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Tensor:
        """Encode texts in one forward pass.

        Args:
            texts: the texts.
            task: ``"query"``, ``"document"`` or ``None``.
            top_k: keep at most this many entries per row; by default ``max_active_dims``.
            min_weight: keep entries strictly greater than this.

        Returns:
            CSR ``[len(texts), V]`` on the CPU.
        """
        texts = list_of("texts", texts)
        batch = self.batch(texts, task=task, top_k=top_k, min_weight=min_weight)
        return streams.as_csr([batch], len(texts), vocab_size=0)

    def batch(
        self,
        texts: Sequence[str],
        *,
        task: str | None = None,
        prompt_name: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Batch:
        """Encode texts in one forward pass and return their rows without building a matrix.

        Args:
            texts: the texts.
            task: ``"query"``, ``"document"`` or ``None``.
            prompt_name: name of a prompt of the model; by default that of the task.
            top_k: keep at most this many entries per row; by default ``max_active_dims``.
            min_weight: keep entries strictly greater than this.
        """
        return streams.encode_batch(
            self.owner,
            list_of("texts", texts),
            task,
            prompt_of(self.owner, task, prompt_name),
            sparse_options(self.owner, top_k, min_weight),
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
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> Generator[Item, None, None]:
        """Encode many texts to sparse rows.

        Args:
            windows: windows of texts, which are encoded one after another.
            task: ``"query"``, ``"document"`` or ``None``.
            top_k: keep at most this many entries per row; by default ``max_active_dims``.
            min_weight: keep entries strictly greater than this.
            to_host: whether entries are copied to the CPU. Otherwise they stay on the device.
            batch_tokens: tokens per batch; by default what suits the device.
            batch_size: texts per batch; by default not limited.

        Yields:
            The items of :meth:`TextStream.__call__`.
        """
        with in_eval_mode(self.owner):
            stream = SparseStream(
                self.owner,
                sparse_options(self.owner, top_k, min_weight),
                to_host,
                task=task,
                prompt=prompt_of(self.owner, task),
                batch_tokens=batch_tokens,
                batch_size=batch_size,
            )
            yield from stream(windows)


class TokenBatchEncoder(Replacement):
    """``encode_token_batch`` of an accelerated MultiVectorEncoder."""

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str,
        storage: str,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> Generator[Item, None, None]:
        """Encode many texts to stored token vectors.

        Args:
            windows: windows of texts, which are encoded one after another.
            task: ``"query"`` or ``"document"``.
            storage: number type of stored vectors, ``"fp16"`` or ``"int8"``.
            batch_tokens: tokens per batch; by default what suits the device.
            batch_size: texts per batch; by default not limited.

        Yields:
            The items of :meth:`TextStream.__call__`.
        """
        with in_eval_mode(self.owner):
            stream = streams.TokenStream(
                self.owner,
                storage,
                task=task,
                prompt=prompt_of(self.owner, task),
                batch_tokens=batch_tokens,
                batch_size=batch_size,
            )
            yield from stream(windows)


class FusedEncode(Replacement):
    """Replaces ``encode`` of one model.

    Few texts are encoded by a CUDA graph, many by a stream. The stock method runs for everything
    else: inputs that are no strings, several processes, options of the processor.

    A ``batch_size`` below 32 limits the texts of a batch. Otherwise batches hold a number of tokens
    that suits the device.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Encode inputs, with the arguments and the result of the stock ``encode``."""
        model = self.owner
        stock = type(model).encode
        if args:
            args = (_listed_inputs(model, args[0]), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = _listed_inputs(model, kwargs["inputs"])
        arguments = _bind_arguments(stock, args, kwargs)
        if arguments is not None and _is_supported(model, arguments):
            result = _encode(model, stock, arguments)
            if result is not None:
                return result
        with packed_inputs():
            return stock(model, *args, **kwargs)


def _encode(model: Model, stock: Any, arguments: Options) -> Any:
    """Encode texts by a CUDA graph if they are one batch, else by a stream.

    Args:
        model: an accelerated model.
        stock: the stock ``encode``, whose logger decides about progress bars.
        arguments: its arguments by name.

    Returns:
        The result that the stock method would return, or None if the stock method must run.
    """
    inputs = arguments["inputs"]
    is_single = isinstance(inputs, str)
    texts = [inputs] if is_single else inputs
    batch_size = arguments["batch_size"]
    prompt = model._resolve_prompt(arguments["prompt"], arguments["prompt_name"])
    show_progress = arguments["show_progress_bar"]
    if show_progress is None:
        level = logging.getLogger(stock.__module__).getEffectiveLevel()
        show_progress = level <= logging.INFO
    if len(texts) > batch_size:
        model.eval()
        encode_many = _encode_many_tokens if is_multi_vector(model) else _encode_many_sparse
        limit = batch_size if batch_size < _DEFAULT_BATCH_SIZE else None
        return encode_many(model, arguments, prompt, limit, show_progress)
    if show_progress:
        return None  # the stock method shows the bar
    encode_few = _encode_few_tokens if is_multi_vector(model) else _encode_few_sparse
    rows = encode_few(model, arguments, texts, prompt)
    if rows is None:
        return None
    return rows[0] if is_single else rows


def _listed_inputs(model: Model, inputs: object) -> object:
    """Return several inputs of ``encode`` as a list, and a single input unchanged.

    Without this, sentence-transformers would treat a pandas Series, a generator or a view of a
    dictionary as a single input, and refuse it.

    Args:
        model: the model, which knows the single inputs of its modalities.
        inputs: one input or several, in any sequence or iterator.
    """
    if isinstance(inputs, (str, list)):
        return inputs
    is_array = isinstance(inputs, (np.ndarray, Tensor))  # one image, or one recording
    is_series = not is_array and getattr(inputs, "ndim", None) == 1
    if is_series or isinstance(inputs, (Iterator, MappingView)):
        return list_of("inputs", inputs)
    return inputs if model.is_singular_input(inputs) else list_of("inputs", inputs)


def _bind_arguments(stock: Any, args: tuple[object, ...], kwargs: Options) -> Options | None:
    """Return the arguments of a call of ``encode`` by name, with defaults.

    This is ``inspect.Signature.bind`` with a cached signature and without its errors. Arguments
    that the method collects in ``**kwargs`` are a dictionary under the name ``kwargs``.

    Args:
        stock: the stock ``encode``.
        args: positional arguments without ``self``.
        kwargs: arguments by name.

    Returns:
        The arguments, or None for a wrong call, about which the stock method raises an error.
    """
    names, defaults = _parameters(stock)
    positional = dict(zip(names, args, strict=False))
    has_too_many = len(positional) < len(args)
    if has_too_many or positional.keys() & kwargs.keys():
        return None
    arguments = {**defaults, **positional, **kwargs}
    extra_names = kwargs.keys() - set(names)
    arguments["kwargs"] = {name: arguments.pop(name) for name in extra_names}
    return arguments


@functools.cache
def _parameters(stock: Any) -> tuple[tuple[str, ...], Options]:
    """Return the parameters of ``encode`` without ``self`` and ``**kwargs``.

    Args:
        stock: the stock ``encode``.

    Returns:
        Names of the parameters in their order, and the default values by name.
    """
    _, *parameters = inspect.signature(stock).parameters.values()
    named = [
        parameter
        for parameter in parameters
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    defaults = {
        parameter.name: parameter.default
        for parameter in named
        if parameter.default is not inspect.Parameter.empty
    }
    return tuple(parameter.name for parameter in named), defaults


def _is_supported(model: Model, arguments: Options) -> bool:
    """Whether a graph or a stream can encode the inputs of a call of ``encode``.

    The inputs must be strings. They must be encoded on the model's device in this process, with
    options that graphs and streams support.

    Args:
        model: an accelerated model.
        arguments: arguments of the call by name.
    """
    inputs = arguments.get("inputs")
    batch_size = arguments["batch_size"]
    if not (isinstance(inputs, (str, list)) and isinstance(batch_size, int) and batch_size > 0):
        return False
    texts = [inputs] if isinstance(inputs, str) else inputs
    graphs = graphs_of(model)
    has_graph = graphs is not None and (bool(graphs.graphs) or graphs.may_run(texts))
    # A stream pays off for several batches only.
    is_one_batch = isinstance(inputs, str) or len(texts) <= batch_size
    if is_one_batch and not has_graph:
        return False
    if _runs_elsewhere(model, arguments) or not all(isinstance(text, str) for text in texts):
        return False
    if is_multi_vector(model):
        returns_tokens = arguments.get("output_value") == "token_embeddings"
        pools_tokens = arguments.get("token_pooling") is not None
        return returns_tokens and not pools_tokens and not arguments["kwargs"]
    ends_in_splade_pooling = graphs is not None and graphs.splade
    return ends_in_splade_pooling and arguments["kwargs"].keys() <= {"task"}


def _runs_elsewhere(model: Model, arguments: Options) -> bool:
    """Whether a call of ``encode`` uses another device or other processes."""
    device = arguments.get("device")
    has_other_device = device is not None and device not in (model.device, str(model.device))
    is_distributed = getattr(model, "_distributed_inference", None) is not None
    return has_other_device or is_distributed or arguments.get("pool") is not None


def _encode_few_sparse(
    model: Model,
    arguments: Options,
    texts: list[str],
    prompt: str | None,
) -> Any:
    """Encode texts to sparse rows by one CUDA graph.

    Args:
        model: an accelerated SparseEncoder.
        arguments: arguments of the call of ``encode`` by name.
        texts: its inputs as a list.
        prompt: text that is put before every text.

    Returns:
        Rows as the stock ``encode`` returns them for a list, or None if no graph can run.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return None
    to_host = bool(arguments["save_to_cpu"])
    rows = graphs.sparse(
        texts,
        task=arguments["kwargs"].get("task"),
        prompt=prompt,
        options=sparse_options(model, arguments["max_active_dims"], min_weight=0.0),
        to_host=to_host,
    )
    if rows is None:
        return None
    device = torch.device("cpu") if to_host else graphs.device
    if len(texts) > 1:
        matrix = _as_coo(rows.counts, rows.columns, rows.values, rows.vocab_size, device)
        return _convert_rows(matrix, arguments)
    # One row needs no matrix: it is slow to select a row of a sparse tensor.
    columns = rows.columns.long()[None].to(device)
    row = coo_tensor(columns, rows.values.to(device), (rows.vocab_size,))
    if isinstance(arguments["inputs"], str):
        return [row if arguments["convert_to_sparse_tensor"] else row.to_dense()]
    return _convert_rows(row[None], arguments)


def _encode_few_tokens(
    model: Model,
    arguments: Options,
    texts: list[str],
    prompt: str | None,
) -> Any:
    """Encode texts to token vectors by one CUDA graph.

    Args:
        model: an accelerated MultiVectorEncoder.
        arguments: arguments of the call of ``encode`` by name.
        texts: its inputs as a list.
        prompt: text that is put before every text.

    Returns:
        Vectors ``[n, D]`` of each text as the stock ``encode`` returns them, or None if no graph
        can run.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return None
    to_numpy = bool(arguments["convert_to_numpy"])
    vectors = graphs.vectors(
        texts,
        task=arguments["task"],
        prompt=prompt,
        normalize=bool(arguments["normalize_embeddings"]),
        to_host=to_numpy,
    )
    if vectors is None or not to_numpy:
        return vectors
    return [_as_numpy(text_vectors) for text_vectors in vectors]


def _batches_with_progress(
    stream: TextStream,
    texts: list[str],
    show_progress: bool,
    title: str,
) -> Iterator[Batch]:
    """Encode texts by a stream under a progress bar.

    Args:
        stream: the stream.
        texts: the texts.
        show_progress: whether the bar is shown.
        title: title of the bar.

    Yields:
        Batches, whose positions are those in `texts`.
    """
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]  # the one of stock

    with tqdm(total=len(texts), desc=title, disable=not show_progress) as bar:
        yield from batches_of(stream, texts, bar.update)


def _encode_many_sparse(
    model: Model,
    arguments: Options,
    prompt: str | None,
    batch_size: int | None,
    show_progress: bool,
) -> object:
    """Encode texts to sparse rows by a stream, with the result of the stock ``encode``.

    Args:
        model: an accelerated SparseEncoder in eval mode.
        arguments: arguments of the call of ``encode`` by name.
        prompt: text that is put before every text.
        batch_size: largest number of texts of a batch; ``None`` for no limit.
        show_progress: whether a progress bar is shown.
    """
    texts = arguments["inputs"]
    stream = SparseStream(
        model,
        sparse_options(model, arguments["max_active_dims"], min_weight=0.0),
        to_host=arguments["save_to_cpu"] or model.device.type == "cpu",
        task=arguments["kwargs"].get("task"),
        prompt=prompt,
        batch_size=batch_size,
    )
    batches = list(_batches_with_progress(stream, texts, show_progress, "Texts"))
    offsets, columns, values = concatenate_rows(batches, len(texts))
    vocab_size = batches[0].rows.vocab_size
    matrix = _as_coo(offsets.diff(), columns, values, vocab_size, values.device)
    return _convert_rows(matrix, arguments)


def _encode_many_tokens(
    model: Model,
    arguments: Options,
    prompt: str | None,
    batch_size: int | None,
    show_progress: bool,
) -> object:
    """Encode texts to token vectors by a stream, with the result of the stock ``encode``.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        arguments: arguments of the call of ``encode`` by name.
        prompt: text that is put before every text.
        batch_size: largest number of texts of a batch; ``None`` for no limit.
        show_progress: whether a progress bar is shown.

    Returns:
        Vectors ``[n, D]`` of each text, in the order of the texts.
    """
    texts = arguments["inputs"]
    to_numpy = bool(arguments["convert_to_numpy"])
    stream = streams.VectorStream(
        model,
        to_host=to_numpy,
        normalize=bool(arguments["normalize_embeddings"]),
        task=arguments["task"],
        prompt=prompt,
        batch_size=batch_size,
    )
    title = "Encoding queries" if arguments["task"] == "query" else "Encoding documents"
    all_vectors: list[object] = [None] * len(texts)
    for batch in _batches_with_progress(stream, texts, show_progress, title):
        for position, vectors in zip(batch.positions, batch.rows, strict=True):
            all_vectors[position] = _as_numpy(vectors) if to_numpy else vectors
    return all_vectors


def _convert_rows(rows: Tensor, arguments: Options) -> object:
    """Convert a COO matrix to the type that a call of ``encode`` asks for."""
    if not arguments["convert_to_sparse_tensor"]:
        rows = rows.to_dense()
    return rows if arguments["convert_to_tensor"] else list(rows)


def _as_coo(
    counts: Tensor,
    columns: Tensor,
    values: Tensor,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Build a coalesced COO matrix from the entries of sparse rows, as ``encode`` returns it.

    Args:
        counts: number of entries of each row, ``[N]`` on the CPU.
        columns: column of each entry, ``[sum(counts)]``.
        values: ``[sum(counts)]``.
        vocab_size: number of columns V.
        device: device of the matrix ``[N, V]``.
    """
    indices = torch.empty(2, len(values), dtype=torch.int64, device=device)
    indices[0] = repeat_interleave(torch.arange(len(counts)), counts, device)
    indices[1] = columns
    return coo_tensor(indices, values.to(device), (len(counts), vocab_size))


def _as_numpy(vectors: Tensor) -> object:
    """Convert vectors to numpy, which has no bf16."""
    if vectors.dtype == torch.bfloat16:
        vectors = vectors.float()
    return vectors.numpy()
