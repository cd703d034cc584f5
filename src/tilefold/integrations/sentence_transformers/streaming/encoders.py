"""Methods of an accelerated model: ``encode``, and ``encode_*_batch`` for each kind of vectors."""

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
from tilefold.integrations.sentence_transformers._heads import (
    base_linear,
    is_dense,
    is_multi_vector,
)
from tilefold.integrations.sentence_transformers._pooling import fused_forwards
from tilefold.integrations.sentence_transformers._unit_vectors import is_batch_invariant
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.integrations.sentence_transformers.packing.inputs import (
    packed_inputs,
    padded_inputs,
)
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
    SparseRows,
    Window,
    concatenate_rows,
    repeat_interleave,
)
from tilefold.pipeline.truncation import current_truncation

# Texts of the first window: few, so that the device starts early.
FIRST_TEXTS = 512
# A window has at most this many times the texts of the window before.
GROWTH = 4
# The smallest numbers of texts and characters of a later window, about half the tokens of a batch
# on a GPU.
WINDOW_TEXTS = 2048
WINDOW_CHARACTERS = 1 << 18
# The default batch size of ``encode``. Batches of this size or more are limited by their tokens.
_DEFAULT_BATCH_SIZE = 32


def sparse_options(model: Model, top_k: int | None, min_weight: float) -> SparseOptions:
    """Return which entries of a sparse row are kept.

    Args:
        model: the model, whose ``max_active_dims`` is the default of ``top_k``.
        top_k: the largest number of entries, the largest values first; None for the default.
        min_weight: only entries strictly greater than this are kept.
    """
    return SparseOptions(model.max_active_dims if top_k is None else top_k, min_weight)


def fused_vocab_size(model: Model) -> int | None:
    """Return the vocabulary size V of an accelerated model, or None if it has no LM head."""
    heads = [fused.head for fused in fused_forwards(model) if fused.head is not None]
    return base_linear(heads[0]).out_features if heads else None


def batches_of(
    stream: TextStream,
    texts: Sequence[str],
    progress: Callable[[int], object],
) -> Iterator[Batch]:
    """Encode texts in batches, the longest texts first, while threads tokenise the next ones.

    Args:
        stream: the encoder, which reads windows of texts: groups that are tokenised together.
        texts: any number of texts.
        progress: is called with the number of texts of each batch.

    Yields:
        The batches, each with the positions of its texts in ``texts``.

    Raises:
        Exception: the error of the first text that cannot be encoded.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort(descending=True, stable=True)
    boundaries = _divide_into_windows(lengths[order])
    # The positions of the texts of each window.
    windows = [order[start:stop].tolist() for start, stop in itertools.pairwise(boundaries)]
    # The tokenizer runs in the stream's thread, so its counts are added to those of this thread.
    truncation = current_truncation()
    text_windows = (Window([texts[position] for position in window]) for window in windows)
    with closing(stream(text_windows)) as items:
        for item in items:
            if not isinstance(item, Batch):  # the start of the stream or the end of a window
                continue
            if isinstance(item.rows, Exception):  # of a text that could not be encoded by itself
                raise item.rows
            n_texts = len(item.positions)
            if truncation is not None:
                truncation.add(n_texts, item.cut, item.max_length)
            # The batch has positions in its window. Return positions in ``texts`` instead.
            window = windows[item.window]
            yield item._replace(positions=[window[position] for position in item.positions])
            progress(n_texts)


def _divide_into_windows(lengths: Tensor) -> list[int]:
    """Divide texts into windows: groups that are tokenised together, one after another.

    The first window is small, so that the device starts early. Each later window has at least
    ``WINDOW_TEXTS`` texts and about ``WINDOW_CHARACTERS`` characters, but at most ``GROWTH`` times
    the texts of the window before.

    Args:
        lengths: the number of characters of each text, the longest first, ``[N]``.

    Returns:
        The positions at which the windows begin, and N.
    """
    n_texts = len(lengths)
    cumulative_characters = lengths.cumsum(0)
    boundaries = [0, min(FIRST_TEXTS, n_texts)]
    while boundaries[-1] < n_texts:
        start = boundaries[-1]
        previous_size = start - boundaries[-2]
        # The first text that is WINDOW_CHARACTERS characters or more after the start.
        n_characters = cumulative_characters[start - 1] + WINDOW_CHARACTERS
        end = int(torch.searchsorted(cumulative_characters, n_characters))
        size = min(max(end - start, WINDOW_TEXTS), GROWTH * previous_size)
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
            task: ``"query"``, ``"document"`` or None.
            top_k: the largest number of entries per row; by default the model's
                ``max_active_dims``.
            min_weight: only entries strictly greater than this are kept.

        Returns:
            A ``torch.sparse_csr`` matrix ``[len(texts), V]`` on the CPU.
        """
        texts = list_of("texts", texts)
        rows = self.encode_rows(texts, task=task, top_k=top_k, min_weight=min_weight)
        batch = Batch(window=0, positions=range(len(texts)), rows=rows)
        return streams.as_csr([batch], len(texts))

    def encode_rows(
        self,
        texts: Sequence[str],
        *,
        task: str | None = None,
        prompt_name: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> SparseRows:
        """Encode texts in one forward pass and return their rows without building a matrix.

        Args:
            texts: the texts.
            task: ``"query"``, ``"document"`` or None.
            prompt_name: the name of a prompt of the model; by default that of the task.
            top_k: the largest number of entries per row; by default the model's
                ``max_active_dims``.
            min_weight: only entries strictly greater than this are kept.
        """
        return streams.encode_sparse_rows(
            self.owner,
            list_of("texts", texts),
            task,
            prompt_of(self.owner, task, prompt_name),
            sparse_options(self.owner, top_k, min_weight),
        )

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size V; ``None`` if the model has no LM head."""
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
            windows: groups of texts. Each is tokenised as one, and divided into batches.
            task: ``"query"``, ``"document"`` or None.
            top_k: the largest number of entries per row; by default the model's
                ``max_active_dims``.
            min_weight: only entries strictly greater than this are kept.
            to_host: whether entries are copied to the CPU instead of staying on the device.
            batch_tokens: tokens per batch; by default chosen for the device.
            batch_size: texts per batch; by default not limited.

        Yields:
            A :class:`StreamStart`, then the batches of each window and a :class:`WindowEnd`.
        """
        with in_eval_mode(self.owner):
            stream = SparseStream(
                self.owner,
                sparse_options(self.owner, top_k, min_weight),
                to_host=to_host,
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
        """Encode many texts to token vectors in a number type for storage.

        Args:
            windows: groups of texts. Each is tokenised as one, and divided into batches.
            task: ``"query"`` or ``"document"``.
            storage: the number type, ``"fp16"`` or ``"int8"``.
            batch_tokens: tokens per batch; by default chosen for the device.
            batch_size: texts per batch; by default not limited.

        Yields:
            A :class:`StreamStart`, then the batches of each window and a :class:`WindowEnd`.
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


class DenseBatchEncoder(Replacement):
    """``encode_dense_batch`` of an accelerated SentenceTransformer."""

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str,
        storage: str,
        dimension: int,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> Generator[Item, None, None]:
        """Encode many texts to dense vectors in a number type for storage.

        Vectors are scaled to length 1 if the model uses cosine similarity.

        Args:
            windows: groups of texts. Each is tokenised as one, and divided into batches.
            task: ``"query"`` or ``"document"``.
            storage: the number type, ``"fp32"``, ``"fp16"`` or ``"int8"``.
            dimension: the number of leading entries of a vector that are stored.
            batch_tokens: tokens per batch; by default chosen for the device.
            batch_size: texts per batch; by default not limited.

        Yields:
            A :class:`StreamStart`, then the batches of each window and a :class:`WindowEnd`.
        """
        with in_eval_mode(self.owner):
            stream = streams.DenseStorageStream(
                self.owner,
                storage,
                dimension=dimension,
                normalize=self.owner.similarity_fn_name == "cosine",
                task=task,
                prompt=prompt_of(self.owner, task),
                batch_tokens=batch_tokens,
                batch_size=batch_size,
            )
            yield from stream(windows)


class FusedEncode(Replacement):
    """Replaces ``encode`` of one model.

    A CUDA graph encodes the texts of a single batch. More texts are encoded in a stream: background
    threads tokenise the next texts meanwhile. sentence-transformers' own method runs for
    everything else, such as inputs that are not strings, several processes, or options of the
    processor.

    A ``batch_size`` below 32 limits the texts of a batch. Otherwise batches are limited by a number
    of tokens that is chosen for the device.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Encode inputs, with the arguments and the result of sentence-transformers' ``encode``.

        Raises:
            ValueError: if a SentenceTransformer with ``invariant=True`` is asked for other outputs
                than vectors.
        """
        model = self.owner
        library_encode = type(model).encode
        if args:
            args = (_listed_inputs(model, args[0]), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = _listed_inputs(model, kwargs["inputs"])
        arguments = _bind_arguments(library_encode, args, kwargs)
        if arguments is not None and _can_encode_faster(model, arguments):
            show_progress = _shows_progress(library_encode, arguments)
            if not _is_one_batch(arguments):
                return _encode_many(model, arguments, show_progress)
            # sentence-transformers' ``encode`` runs if a single batch needs a progress bar.
            result = None if show_progress else _encode_few(model, arguments)
            if result is not None:
                return result
            if _must_normalize_batch_invariantly(model, arguments):
                vectors = _encode_many(model, _with_listed_texts(arguments), show_progress)
                return vectors[0] if isinstance(arguments["inputs"], str) else vectors
        # A SentenceTransformer can also return token states. They have padding, as those of
        # sentence-transformers have.
        returns_tokens = False
        if arguments is not None and is_dense(model):
            returns_tokens = arguments["output_value"] != "sentence_embedding"
            if returns_tokens and is_batch_invariant(model):
                raise ValueError(
                    "output_value must be 'sentence_embedding' with invariant=True, got "
                    f"{arguments['output_value']!r}, which is computed with padding and so depends "
                    "on the batch; leave output_value out, or call accelerate(model) without "
                    "invariant=True.",
                )
        with padded_inputs() if returns_tokens else packed_inputs():
            return library_encode(model, *args, **kwargs)


def _texts_of(arguments: Options) -> list[str]:
    """Return the inputs of a call of ``encode`` as a list, also a single input."""
    inputs = arguments["inputs"]
    return [inputs] if isinstance(inputs, str) else inputs


def _prompt_of_call(model: Model, arguments: Options) -> str | None:
    """Return the prompt of a call of ``encode``."""
    prompt: str | None = model._resolve_prompt(arguments["prompt"], arguments["prompt_name"])
    return prompt


def _is_one_batch(arguments: Options) -> bool:
    """Whether the inputs of a call of ``encode`` fit into a single batch."""
    batch_size: int = arguments["batch_size"]
    return len(_texts_of(arguments)) <= batch_size


def _must_normalize_batch_invariantly(model: Model, arguments: Options) -> bool:
    """Whether ``encode`` must scale vectors to length 1 with the same bits for any number of texts.

    ``accelerate(invariant=True)`` promises vectors that have the same bits in every batch.
    sentence-transformers' own ``encode`` would scale them with a kernel that depends on the batch.

    Args:
        model: an accelerated model.
        arguments: the arguments of ``encode`` by name.
    """
    has_texts = arguments["inputs"] != []
    return has_texts and is_batch_invariant(model) and bool(arguments.get("normalize_embeddings"))


def _with_listed_texts(arguments: Options) -> Options:
    """Return the arguments of a call of ``encode`` with its inputs as a list."""
    return {**arguments, "inputs": _texts_of(arguments)}


def _shows_progress(library_encode: Any, arguments: Options) -> bool:
    """Whether a call of ``encode`` shows a progress bar; by default its logger decides.

    Args:
        library_encode: the ``encode`` of the model's class in sentence-transformers.
        arguments: the arguments of ``encode`` by name.
    """
    if arguments["show_progress_bar"] is not None:
        return bool(arguments["show_progress_bar"])
    return logging.getLogger(library_encode.__module__).getEffectiveLevel() <= logging.INFO


def _encode_many(model: Model, arguments: Options, show_progress: bool) -> Any:
    """Encode the texts of a call of ``encode``, while background threads tokenise the next ones.

    Args:
        model: an accelerated model. It stays in eval mode, as after sentence-transformers' own
            ``encode``.
        arguments: the arguments of ``encode`` by name.
        show_progress: whether a progress bar is shown.

    Returns:
        The result of the call: vectors in the form that the arguments ask for.
    """
    model.eval()
    batch_size = arguments["batch_size"]
    # A small batch size limits the texts of a batch, for example to save memory. With the default
    # or a larger one (None), only the number of tokens is limited, which suits the device better.
    limit = batch_size if batch_size < _DEFAULT_BATCH_SIZE else None
    if is_dense(model):
        return _encode_many_dense(model, arguments, limit, show_progress)
    encode = _encode_many_tokens if is_multi_vector(model) else _encode_many_sparse
    return encode(model, arguments, limit, show_progress)


def _encode_few(model: Model, arguments: Options) -> Any:
    """Encode the texts of a call of ``encode`` with a CUDA graph, if possible.

    Args:
        model: an accelerated model.
        arguments: the arguments of ``encode`` by name.

    Returns:
        The result of the call, or None if sentence-transformers' own ``encode`` must run.
    """
    if is_dense(model):
        encode = _encode_few_dense
    elif is_multi_vector(model):
        encode = _encode_few_tokens
    else:
        encode = _encode_few_sparse
    rows = encode(model, arguments)
    is_single_input = isinstance(arguments["inputs"], str)
    return rows[0] if rows is not None and is_single_input else rows


def _listed_inputs(model: Model, inputs: object) -> object:
    """Return several inputs of ``encode`` as a list, and a single input unchanged.

    Without this, sentence-transformers would treat a pandas Series, a generator or a view of a
    dictionary as a single input, and refuse it.

    Args:
        model: the model, which decides what a single input is.
        inputs: one input, or several in any sequence or iterator.
    """
    if isinstance(inputs, (str, list)):
        return inputs
    is_array = isinstance(inputs, (np.ndarray, Tensor))  # an array is a single image or recording
    is_series = not is_array and getattr(inputs, "ndim", None) == 1  # of pandas or Polars
    if is_series or isinstance(inputs, (Iterator, MappingView)):
        return list_of("inputs", inputs)
    return inputs if model.is_singular_input(inputs) else list_of("inputs", inputs)


def _bind_arguments(
    library_encode: Any,
    args: tuple[object, ...],
    kwargs: Options,
) -> Options | None:
    """Return the arguments of a call of ``encode`` by name, with defaults.

    This is ``inspect.Signature.bind`` with a cached signature and without its errors. Arguments
    that the method collects in ``**kwargs`` are a dictionary under the name ``kwargs``.

    Args:
        library_encode: the ``encode`` of the model's class in sentence-transformers.
        args: the positional arguments without ``self``.
        kwargs: the keyword arguments.

    Returns:
        The arguments, or None if the call is wrong; ``library_encode`` then raises the error.
    """
    names, defaults = _parameters_of(library_encode)
    if len(args) > len(names):
        return None
    positional = dict(zip(names, args, strict=False))
    if positional.keys() & kwargs.keys():
        return None
    arguments = {**defaults, **positional, **kwargs}
    extra_names = kwargs.keys() - set(names)
    arguments["kwargs"] = {name: arguments.pop(name) for name in extra_names}
    return arguments


@functools.cache
def _parameters_of(library_encode: Any) -> tuple[tuple[str, ...], Options]:
    """Return the parameters of ``encode`` without ``self`` and ``**kwargs``.

    Args:
        library_encode: the ``encode`` of a model's class in sentence-transformers.

    Returns:
        The names of the parameters in their order, and the default values by name.
    """
    _, *parameters = inspect.signature(library_encode).parameters.values()
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


def _can_encode_faster(model: Model, arguments: Options) -> bool:
    """Whether a faster way than sentence-transformers' ``encode`` returns the result of a call.

    Several batches are faster if background threads tokenise the next texts meanwhile. A single
    batch is faster if a CUDA graph can encode it.

    Args:
        model: an accelerated model.
        arguments: the arguments of ``encode`` by name.
    """
    inputs = arguments.get("inputs")
    batch_size = arguments["batch_size"]
    if not (isinstance(inputs, (str, list)) and isinstance(batch_size, int) and batch_size > 0):
        return False
    is_batch_without_graph = _is_one_batch(arguments) and not _may_use_graph(model, arguments)
    # Such a batch gains no time. Our way is still needed to normalize vectors with equal bits.
    if is_batch_without_graph and not _must_normalize_batch_invariantly(model, arguments):
        return False
    if _uses_other_device_or_processes(model, arguments):
        return False
    if not all(isinstance(text, str) for text in _texts_of(arguments)):
        return False
    return _returns_plain_vectors(model, arguments)


def _returns_plain_vectors(model: Model, arguments: Options) -> bool:
    """Whether a call of ``encode`` asks for the vectors of the model as they are.

    These are sparse, dense or token vectors, by the class of the model. Other calls ask for
    quantized or pooled vectors, or for other outputs.

    Args:
        model: an accelerated model.
        arguments: the arguments of ``encode`` by name.
    """
    if is_dense(model):
        return _returns_dense_vectors(arguments)
    if is_multi_vector(model):
        return _returns_token_vectors(arguments)
    return _returns_splade_scores(model, arguments)


def _may_use_graph(model: Model, arguments: Options) -> bool:
    """Whether a CUDA graph might encode the inputs of a call of ``encode``."""
    graphs = graphs_of(model)
    if graphs is None:
        return False
    has_captured_graphs = bool(graphs.graphs)  # saves a check, which the encoding repeats
    return has_captured_graphs or graphs.may_run(_texts_of(arguments))


def _returns_token_vectors(arguments: Options) -> bool:
    """Whether a call of ``MultiVectorEncoder.encode`` returns the vectors of all tokens."""
    returns_tokens = arguments.get("output_value") == "token_embeddings"
    pools_tokens = arguments.get("token_pooling") is not None
    return returns_tokens and not pools_tokens and not arguments["kwargs"]


def _returns_dense_vectors(arguments: Options) -> bool:
    """Whether a call of ``SentenceTransformer.encode`` returns vectors that are not quantized."""
    returns_vectors = arguments["output_value"] == "sentence_embedding"
    is_quantized = arguments["precision"] not in (None, "float32")
    return returns_vectors and not is_quantized and arguments["kwargs"].keys() <= {"task"}


def _returns_splade_scores(model: Model, arguments: Options) -> bool:
    """Whether a call of ``SparseEncoder.encode`` returns the scores of a SpladePooling."""
    graphs = graphs_of(model)
    ends_in_splade = graphs is not None and graphs.ends_in_splade
    return ends_in_splade and arguments["kwargs"].keys() <= {"task"}


def _uses_other_device_or_processes(model: Model, arguments: Options) -> bool:
    """Whether a call of ``encode`` uses another device than the model's, or other processes."""
    device = arguments.get("device")
    has_other_device = device is not None and device not in (model.device, str(model.device))
    is_distributed = getattr(model, "_distributed_inference", None) is not None
    return has_other_device or is_distributed or arguments.get("pool") is not None


def _encode_few_sparse(model: Model, arguments: Options) -> Any:
    """Encode a few texts to sparse rows with a CUDA graph, if possible.

    Args:
        model: an accelerated SparseEncoder.
        arguments: the arguments of ``encode`` by name.

    Returns:
        A matrix ``[N, V]`` or a list of its rows, as the arguments ask for; N is 1 for a single
        input. None if no graph can run.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return None
    to_host = bool(arguments["save_to_cpu"])
    rows = graphs.encode_sparse(
        _texts_of(arguments),
        task=arguments["kwargs"].get("task"),
        prompt=_prompt_of_call(model, arguments),
        options=sparse_options(model, arguments["max_active_dims"], min_weight=0.0),
        to_host=to_host,
    )
    if rows is None:
        return None
    device = torch.device("cpu") if to_host else graphs.device
    if len(rows.counts) > 1:
        matrix = _as_coo(rows.counts, rows.columns, rows.values, rows.vocab_size, device)
        return _convert_rows(matrix, arguments)
    row = _as_sparse_vector(rows, device)
    is_single_input = isinstance(arguments["inputs"], str)
    if is_single_input:  # without a matrix, since selecting a row of a sparse tensor is slow
        return [row if arguments["convert_to_sparse_tensor"] else row.to_dense()]
    return _convert_rows(row[None], arguments)


def _as_sparse_vector(rows: SparseRows, device: torch.device) -> Tensor:
    """Return a single sparse row as a COO tensor ``[V]`` on a device."""
    columns = rows.columns.long()[None].to(device)
    return coo_tensor(columns, rows.values.to(device), (rows.vocab_size,))


def _encode_few_tokens(model: Model, arguments: Options) -> Any:
    """Encode a few texts to token vectors with a CUDA graph, if possible.

    Args:
        model: an accelerated MultiVectorEncoder.
        arguments: the arguments of ``encode`` by name.

    Returns:
        The vectors ``[n, D]`` of each text as sentence-transformers returns them, or None if no
        graph can run.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return None
    to_numpy = bool(arguments["convert_to_numpy"])
    vectors = graphs.encode_vectors(
        _texts_of(arguments),
        task=arguments["task"],
        prompt=_prompt_of_call(model, arguments),
        normalize=bool(arguments["normalize_embeddings"]),
        to_host=to_numpy,
    )
    if vectors is None or not to_numpy:
        return vectors
    return [_as_numpy(text_vectors) for text_vectors in vectors]


def _encode_few_dense(model: Model, arguments: Options) -> Any:
    """Encode a few texts to dense vectors with a CUDA graph, if possible.

    Args:
        model: an accelerated SentenceTransformer.
        arguments: the arguments of ``encode`` by name.

    Returns:
        The vectors ``[N, D]`` as an array, a tensor or a list of vectors, as the arguments ask for;
        N is 1 for a single input. None if no graph can run.
    """
    graphs = graphs_of(model)
    if graphs is None:
        return None
    to_numpy = _returns_arrays(arguments)
    vectors = graphs.encode_dense(
        _texts_of(arguments),
        task=arguments["kwargs"].get("task"),
        prompt=_prompt_of_call(model, arguments),
        normalize=bool(arguments["normalize_embeddings"]),
        dimension=_dense_dimension(model, arguments),
        to_host=to_numpy,
    )
    return None if vectors is None else _convert_dense(vectors, arguments)


def _returns_arrays(arguments: Options) -> bool:
    """Whether a call of ``SentenceTransformer.encode`` returns arrays of numpy."""
    return bool(arguments["convert_to_numpy"]) and not arguments["convert_to_tensor"]


def _dense_dimension(model: Model, arguments: Options) -> int | None:
    """Return how many leading entries of a dense vector ``encode`` returns, or None for all."""
    dimension: int | None = arguments["truncate_dim"]
    return model.truncate_dim if dimension is None else dimension


def _convert_dense(vectors: Tensor, arguments: Options) -> object:
    """Convert dense vectors ``[N, D]`` to the type that the arguments of ``encode`` ask for."""
    if _returns_arrays(arguments):
        return _as_numpy(vectors)
    return vectors if arguments["convert_to_tensor"] else list(vectors)


def _batches_with_progress(
    stream: TextStream,
    texts: list[str],
    show_progress: bool,
    title: str,
) -> Iterator[Batch]:
    """Encode texts in batches, the longest texts first, and show a progress bar.

    Args:
        stream: the encoder, whose background threads tokenise the next texts.
        texts: the texts.
        show_progress: whether the bar is shown.
        title: the title of the bar.

    Yields:
        The batches, each with the positions of its texts in ``texts``.
    """
    # sentence-transformers shows the same progress bar.
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]

    with tqdm(total=len(texts), desc=title, disable=not show_progress) as bar:
        yield from batches_of(stream, texts, bar.update)


def _encode_many_sparse(
    model: Model,
    arguments: Options,
    batch_size: int | None,
    show_progress: bool,
) -> object:
    """Encode many texts to sparse rows, while background threads tokenise the next ones.

    Args:
        model: an accelerated SparseEncoder in eval mode.
        arguments: the arguments of ``encode`` by name. ``arguments["kwargs"]`` holds those that
            ``encode`` collects in ``**kwargs``.
        batch_size: the largest number of texts per batch; None for no limit.
        show_progress: whether a progress bar is shown.

    Returns:
        The result of ``SparseEncoder.encode``: a sparse or dense matrix ``[N, V]`` or a list of its
        rows, as the arguments ask for.
    """
    texts = arguments["inputs"]
    stays_on_gpu = model.device.type != "cpu" and not arguments["save_to_cpu"]
    stream = SparseStream(
        model,
        sparse_options(model, arguments["max_active_dims"], min_weight=0.0),
        to_host=not stays_on_gpu,
        task=arguments["kwargs"].get("task"),
        prompt=_prompt_of_call(model, arguments),
        batch_size=batch_size,
    )
    batches = list(_batches_with_progress(stream, texts, show_progress, "Texts"))
    offsets, columns, values = concatenate_rows(batches, len(texts))
    matrix = _as_coo(
        counts=offsets.diff(),  # entries per row
        columns=columns,
        values=values,
        vocab_size=batches[0].rows.vocab_size,
        device=values.device,
    )
    return _convert_rows(matrix, arguments)


def _encode_many_tokens(
    model: Model,
    arguments: Options,
    batch_size: int | None,
    show_progress: bool,
) -> object:
    """Encode many texts to token vectors, while background threads tokenise the next ones.

    Args:
        model: an accelerated MultiVectorEncoder in eval mode.
        arguments: the arguments of ``encode`` by name.
        batch_size: the largest number of texts per batch; None for no limit.
        show_progress: whether a progress bar is shown.

    Returns:
        The result of ``MultiVectorEncoder.encode``: the vectors ``[n, D]`` of each text, in the
        order of the texts.
    """
    texts = arguments["inputs"]
    to_numpy = bool(arguments["convert_to_numpy"])
    stream = streams.VectorStream(
        model,
        to_host=to_numpy,
        normalize=bool(arguments["normalize_embeddings"]),
        task=arguments["task"],
        prompt=_prompt_of_call(model, arguments),
        batch_size=batch_size,
    )
    title = "Encoding queries" if arguments["task"] == "query" else "Encoding documents"
    all_vectors: list[object] = [None] * len(texts)
    for batch in _batches_with_progress(stream, texts, show_progress, title):
        for position, vectors in zip(batch.positions, batch.rows, strict=True):
            all_vectors[position] = _as_numpy(vectors) if to_numpy else vectors
    return all_vectors


def _encode_many_dense(
    model: Model,
    arguments: Options,
    batch_size: int | None,
    show_progress: bool,
) -> object:
    """Encode many texts to dense vectors, while background threads tokenise the next ones.

    Args:
        model: an accelerated SentenceTransformer in eval mode.
        arguments: the arguments of ``encode`` by name.
        batch_size: the largest number of texts per batch; None for no limit.
        show_progress: whether a progress bar is shown.

    Returns:
        The result of ``SentenceTransformer.encode``: an array, a tensor or a list, as the arguments
        ask for.
    """
    texts = arguments["inputs"]
    stream = streams.DenseStream(
        model,
        to_host=_returns_arrays(arguments),
        normalize=bool(arguments["normalize_embeddings"]),
        dimension=_dense_dimension(model, arguments),
        task=arguments["kwargs"].get("task"),
        prompt=_prompt_of_call(model, arguments),
        batch_size=batch_size,
    )
    batches = list(_batches_with_progress(stream, texts, show_progress, "Batches"))
    # Batches hold the longest texts first. The inverse permutation restores the order of the texts.
    positions = torch.tensor([position for batch in batches for position in batch.positions])
    rows = torch.cat([row for batch in batches for row in batch.rows])  # [N, D]
    vectors = rows[positions.argsort().to(rows.device)]
    return _convert_dense(vectors, arguments)


def _convert_rows(rows: Tensor, arguments: Options) -> object:
    """Convert a COO matrix to the type that the arguments of ``encode`` ask for."""
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
        counts: the number of entries of each row, ``[N]`` on the CPU.
        columns: the column of each entry, ``[sum(counts)]``.
        values: the value of each entry, ``[sum(counts)]``.
        vocab_size: the number of columns V.
        device: the device of the matrix ``[N, V]``.
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
