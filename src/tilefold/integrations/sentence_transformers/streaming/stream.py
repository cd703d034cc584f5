"""Streaming encoders: windows of texts to batches of rows, with tokenisation in background threads.

The first thread passes windows of texts to the tokenizer. The second thread divides the token ids
into batches. Only the caller's thread runs the model: it launches up to ``IN_FLIGHT`` batches
before it waits for the rows of the first one.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.csr import csr_tensor, to_csr
from tilefold._internal.typing import Model
from tilefold.integrations.sentence_transformers._pooling import sparse_scores
from tilefold.integrations.sentence_transformers._unit_vectors import (
    is_batch_invariant,
    unit_vectors,
)
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    CAPACITY,
    MAX_CAPACITY,
    graphs_of,
)
from tilefold.integrations.sentence_transformers.packing import inputs as packing
from tilefold.integrations.sentence_transformers.packing.inputs import (
    PACKED,
    PackedInputs,
    packed_inputs,
)
from tilefold.integrations.transformers.networks import in_eval_mode
from tilefold.integrations.transformers.packed import packed_arguments
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.modules.window import keep_heaviest
from tilefold.ops import quantize_tokens
from tilefold.ops.cpu_linear import fast_linear
from tilefold.ops.lsr_head import CapacityRows
from tilefold.pipeline.ragged import TokenIds, batches_by_tokens
from tilefold.pipeline.rows import (
    IN_FLIGHT,
    Batch,
    Item,
    PendingCapacityRows,
    PendingSparseRows,
    PendingTokenRows,
    PendingTokenVectors,
    RowCapacityError,
    SparseRows,
    StreamStart,
    Window,
    WindowEnd,
    bisect_failures,
    concatenate_rows,
    split_in_half,
    to_device,
    warn_unused_batch_tokens,
)
from tilefold.pipeline.threads import Prefetcher
from tilefold.pipeline.truncation import Truncation, counting_truncation, ignoring_truncation

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# Tokens per batch on a GPU. The CPU then launches 12 layers in a fraction of the time that
# the GPU takes to compute them.
GPU_TOKENS = 131072
SMALL_GPU_TOKENS = 32768
SMALL_GPU = 32 << 30  # a GPU with less memory than this, in bytes, is small
CPU_TOKENS = 4096  # faster than a half and a quarter of it, see benchmarks/notes/jobs.md
PADDED_TEXTS = 32  # texts per padded batch
WAITING_BATCHES = 8  # batches of token ids that wait for the model

# The number of entries that a model's next stream reserves for each row, if a row of an earlier
# stream had more than CAPACITY.
_learned_capacities: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_TASK_PROMPTS = {"query": ["query"], "document": ["document", "passage", "corpus"]}


def prompt_of(model: Model, task: str | None, prompt_name: str | None = None) -> str | None:
    """Return the prompt that ``encode``, ``encode_query`` or ``encode_document`` would use.

    The default for a task is the first of its usual prompt names that the model has, such as
    ``"passage"`` for documents. If it has none, this is the default prompt of the model, if any.

    Args:
        model: a sentence-transformers model.
        task: ``"query"``, ``"document"`` or None.
        prompt_name: the name of a prompt; takes precedence over the default of the task.

    Raises:
        ValueError: if the model has no prompt of that name.
    """
    if prompt_name is not None:
        if prompt_name not in model.prompts:
            raise ValueError(
                f"prompt_name must be one of {list(model.prompts)}, got {prompt_name!r}.",
            )
        return str(model.prompts[prompt_name])
    task_names = [name for name in _TASK_PROMPTS.get(task or "", []) if name in model.prompts]
    default_name = task_names[0] if task_names else model.default_prompt_name
    prompt: str | None = model.prompts.get(default_name)
    return prompt


class PendingRows(Protocol):
    """Rows of a launched batch, which are being computed and copied to the CPU."""

    def ready(self) -> bool:
        """Whether the copies have finished."""

    def get(self) -> Any:
        """Wait for the copies and return the rows."""


def encode_sparse_rows(
    model: Model,
    texts: Sequence[str],
    task: str | None,
    prompt: str | None,
    options: SparseOptions,
) -> SparseRows:
    """Encode texts to sparse rows on the CPU in one forward pass.

    The pass runs as a CUDA graph if possible, otherwise in eval mode.

    Args:
        model: an accelerated SparseEncoder.
        texts: the texts.
        task: ``"query"``, ``"document"`` or None.
        prompt: text that is put before every text.
        options: which entries of a row are kept.
    """
    graphs = graphs_of(model)
    if graphs is not None:
        rows = graphs.encode_sparse(texts, task=task, prompt=prompt, options=options)
        if rows is not None:
            return rows
    task_kwargs = {} if task is None else {"task": task}
    with in_eval_mode(model), packed_inputs():
        features = model.preprocess(list(texts), prompt=prompt, **task_kwargs)
        return _launch_sparse(model, features, task_kwargs, options).get()


def _launch_sparse(
    model: Model,
    features: Features,
    task_kwargs: dict[str, str],
    options: SparseOptions,
    capacity: int | None = None,
    to_host: bool = True,
) -> PendingSparseRows | PendingCapacityRows:
    """Run the model on a batch of texts, and start copying the sparse rows to the CPU.

    Args:
        model: an accelerated SparseEncoder.
        features: the output of the model's ``preprocess``.
        task_kwargs: ``{"task": ...}`` for the model's forward, or an empty dictionary.
        options: which entries of a row are kept.
        capacity: the number of entries to reserve for each row, for poolings that support it. Rows
            of a fixed size avoid a synchronisation with the GPU. None for rows of any size.
        to_host: whether columns and values are copied, besides the number of entries of each row.
    """
    with torch.inference_mode(), sparse_scores(options, capacity):
        scores = _run_model(model, features, task_kwargs)["sentence_embedding"]
        if isinstance(scores, CapacityRows):
            return PendingCapacityRows(
                scores.counts,
                scores.n_stored,
                scores.columns,
                scores.values,
                capacity=capacity or 0,
                vocab_size=scores.vocab_size,
                to_host=to_host,
            )
        if scores.layout != torch.sparse_csr:  # dense or COO, from a module that is not fused
            scores = _prune(scores.to_dense(), options)
        return PendingSparseRows(scores, to_host=to_host)


def _run_model(model: Model, features: Features, task_kwargs: dict[str, str]) -> Features:
    """Move features to the model's device and run the model on them.

    Args:
        model: an accelerated model.
        features: the output of the model's ``preprocess``.
        task_kwargs: ``{"task": ...}`` for the model's forward, or an empty dictionary.

    Returns:
        The features with the outputs of all modules.
    """
    features = _with_dummy_tokens(features)
    # Linear layers of a batch-invariant model must not change: the same bits in every batch depend
    # on how they multiply. All others are replaced by faster ones on a CPU.
    faster_layers: AbstractContextManager[object] = nullcontext()
    if not is_batch_invariant(model):
        faster_layers = fast_linear(model, torch.device(model.device))
    with faster_layers:
        outputs: Features = model(packing.on_device(features, model.device), **task_kwargs)
    return outputs


def _with_dummy_tokens(features: Features) -> Features:
    """Add one dummy token to each text of a padded batch without any tokens.

    Models refuse tensors of length 0. The dummy token has the id 0, and the mask hides it.

    Args:
        features: features, which are returned unchanged if they are not such a batch.
    """
    ids = features.get("input_ids")
    is_padded = isinstance(ids, Tensor) and ids.dim() == 2 and "attention_mask" in features
    if ids is None or not is_padded or ids.size(1) > 0:
        return features
    zeros = torch.zeros(ids.size(0), 1, dtype=torch.int64)
    return {name: zeros if isinstance(value, Tensor) else value for name, value in features.items()}


def as_csr(batches: Sequence[Batch], n_texts: int) -> Tensor:
    """Combine batches of sparse rows in the order of the texts.

    Args:
        batches: batches of :class:`SparseRows`, at least one.
        n_texts: the number of texts N.

    Returns:
        A ``torch.sparse_csr`` matrix ``[N, V]``.
    """
    offsets, columns, values = concatenate_rows(batches, n_texts)
    return csr_tensor(offsets, columns.long(), values, (n_texts, batches[0].rows.vocab_size))


def no_rows(vocab_size: int) -> Tensor:
    """Return a ``torch.sparse_csr`` matrix without rows, ``[0, V]``."""
    offsets = torch.zeros(1, dtype=torch.int64)
    columns = torch.zeros(0, dtype=torch.int64)
    return csr_tensor(offsets, columns, torch.zeros(0), (0, vocab_size))


def _prune(scores: Tensor, options: SparseOptions) -> Tensor:
    """Convert dense scores ``[B, V]`` to CSR, and drop entries below the minimum or the top k."""
    scores = scores.where(scores > options.min_weight, 0)
    if options.top_k is not None:
        scores = keep_heaviest(scores, options.top_k)
    return to_csr(scores)


class TokenBatch(NamedTuple):
    """A tokenised batch of a stream.

    It has either packed token ids or features of padded texts. It has neither if tokenisation
    failed.

    Attributes:
        window: the number of the window.
        positions: the positions of the texts in the window.
        texts: the texts.
        ids: the packed token ids.
        features: the output of the model's ``preprocess``.
        skip: the positions of texts of the window that need no rows, see :class:`Window`.
        n_truncated: the number of truncated texts, without those that need no rows.
        max_length: the number of tokens at which texts are truncated.
    """

    window: int
    positions: list[int]
    texts: list[str]
    ids: TokenIds | None = None
    features: Features | None = None
    skip: frozenset[int] = frozenset()
    n_truncated: int = 0
    max_length: int | None = None


class _TokenizedWindow(NamedTuple):
    """A window of texts that the first thread passes to the second one.

    Attributes:
        skip: the positions of texts that need no rows.
        texts: the texts.
        make_features: returns the features of all texts; ``None`` if the window is not tokenised
            yet, because texts are padded or because that failed.
        truncation: which texts were truncated.
    """

    skip: frozenset[int]
    texts: list[str]
    make_features: Callable[[], Features] | None
    truncation: Truncation


class _LaunchedBatch(NamedTuple):
    """A batch that the model has started to encode.

    Attributes:
        batch: the tokenised batch.
        pending: the rows; ``None`` if the batch could not be launched.
    """

    batch: TokenBatch
    pending: PendingRows | None


def _result_or_none(function: Callable[..., T], *args: object, **kwargs: object) -> T | None:
    """Call a function that tokenises texts, and return None if it raises an error.

    One faulty text must not prevent the encoding of the others. So the caller tokenises all texts
    again in smaller batches, and finally one by one, which raises the error of the faulty text. The
    error is logged here, because it may not occur again in smaller batches.

    Args:
        function: the function.
        *args: the positional arguments of the function.
        **kwargs: the keyword arguments of the function.
    """
    try:
        return function(*args, **kwargs)
    except Exception:
        _logger.info("texts are tokenized in smaller batches after an error", exc_info=True)
        return None


def _is_ready(item: _LaunchedBatch | WindowEnd) -> bool:
    """Whether an item of a stream can be passed on without waiting for the device."""
    return isinstance(item, WindowEnd) or item.pending is None or item.pending.ready()


def _tensor_names(features: Features) -> set[str]:
    return {name for name, value in features.items() if isinstance(value, Tensor)}


class TextStream(ABC):
    """Encodes windows of texts with an accelerated model in eval mode.

    Attributes:
        model: the accelerated model.
        prompt: text that is put before every text.
        task_kwargs: ``{"task": ...}`` for the model's methods, or an empty dictionary.
        device: the device of the model.
        batch_tokens: the number of tokens per batch of packed texts.
        batch_size: the largest number of texts per batch, or ``None``.
        constant_features: the features that do not depend on the texts, such as the modality.
        packed: whether the model accepts packed tokens.
    """

    def __init__(
        self,
        model: Model,
        *,
        task: str | None,
        prompt: str | None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare the stream, which starts when it is called with windows of texts.

        Args:
            model: an accelerated model.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default chosen for the device.
            batch_size: texts per batch; by default not limited for packed texts, and 32 for padded
                ones.
        """
        self.model = model
        self.prompt = prompt
        self.task_kwargs: dict[str, str] = {} if task is None else {"task": task}
        self.device = torch.device(model.device)
        self.batch_tokens = batch_tokens or _default_batch_tokens(self.device)
        self.batch_size = batch_size
        # A thread holds it while it tokenises, because that changes settings of the tokenizer.
        self._lock = threading.Lock()
        features = self._probe_features()
        self.constant_features = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        self.packed = _tensor_names(features) == PACKED
        if batch_tokens is not None and not self.packed:
            warn_unused_batch_tokens()
        # Texts can skip the model's ``preprocess``, which examines the type of every input.
        direct_preprocess = packing.direct_preprocess_of(model) if self.packed else None
        self._preprocess: Any = direct_preprocess or model.preprocess

    def _probe_features(self) -> Features:
        """Return the features of a short text, which show the form of the model's inputs."""
        probe_text = "a"
        with ignoring_truncation():
            return self._features_or_none(self.model.preprocess, [probe_text]) or {}

    @abstractmethod
    def _launch(self, features: Features, *, is_retry: bool = False) -> PendingRows:
        """Run the model on features and start copying the rows to the CPU.

        Args:
            features: the output of the model's ``preprocess``.
            is_retry: whether a batch with these texts has failed before. Sparse rows may then have
                any number of entries.
        """

    def _fetch(self, pending: Any) -> Any:
        """Wait until the rows of a launched batch are on the CPU."""
        return pending.get()

    def __call__(self, windows: Iterable[Window | None]) -> Generator[Item, None, None]:
        """Encode windows of texts. A text that fails does not affect the others.

        Args:
            windows: groups of texts that are tokenised together. None in place of a window lets the
                tokenising thread check whether it should stop, while a source waits for texts.

        Yields:
            A :class:`StreamStart` when tokenisation has begun, then the batches of each window and
            a :class:`WindowEnd`.
        """
        with self.token_batches(windows) as batches:
            yield StreamStart()
            yield from self._encode_batches(batches)

    def _encode_batches(self, batches: Iterable[TokenBatch | WindowEnd]) -> Iterator[Item]:
        """Launch batches, and yield their rows in the same order once they are on the CPU.

        Up to ``IN_FLIGHT`` batches run on the device before the CPU waits for the first one.

        Args:
            batches: the tokenised batches of all windows, with the end of each window.

        Yields:
            Batches of rows, and the ends of windows.
        """
        waiting: deque[_LaunchedBatch | WindowEnd] = deque()
        n_batches = 0  # batches in ``waiting``, which also holds ends of windows
        for batch in batches:
            if isinstance(batch, WindowEnd):
                waiting.append(batch)
            else:
                waiting.append(_LaunchedBatch(batch, self._launch_or_none(batch)))
                n_batches += 1
            while waiting and (n_batches > IN_FLIGHT or _is_ready(waiting[0])):
                item = waiting.popleft()
                if isinstance(item, _LaunchedBatch):
                    n_batches -= 1
                yield from self._fetch_or_retry(item)
        for item in waiting:
            yield from self._fetch_or_retry(item)

    # Methods of the background threads

    @contextmanager
    def token_batches(
        self,
        windows: Iterable[Window | None],
    ) -> Iterator[Iterable[TokenBatch | WindowEnd]]:
        """Tokenise windows in one background thread, and divide them into batches in another.

        A window is a group of texts that are tokenised together. Both threads stop at the end of
        the context.

        Args:
            windows: the windows. None in place of a window lets the thread check whether it should
                stop, while a source of windows waits for texts.

        Yields:
            An iterable of the tokenised batches of each window, followed by a :class:`WindowEnd`.
        """
        stop = threading.Event()
        # ``depth`` is how many finished items a thread holds: one window, which may have the tokens
        # of several batches, or several batches, so that the model never waits for tokens.
        with (
            Prefetcher(
                self._tokenize_windows(windows),
                depth=1,
                name="tilefold-tokenizer",
                stop=stop,
            ) as tokenized,
            Prefetcher[TokenBatch | WindowEnd](
                self._divide_windows(tokenized),
                depth=WAITING_BATCHES,
                name="tilefold-tokens",
                stop=stop,
            ) as batches,
        ):
            yield batches

    def _tokenize_windows(
        self,
        windows: Iterable[Window | None],
    ) -> Iterator[_TokenizedWindow | None]:
        """Tokenise windows one after another, if the model accepts packed tokens.

        This runs in the first background thread. The Rust tokenizer releases the GIL.

        Args:
            windows: groups of texts that are tokenised together; None while there are no texts yet.

        Yields:
            For each window, its texts with a function that makes their features, or with None if
            each batch must be tokenised by itself. None is passed on.
        """
        for window in windows:
            if window is None:
                yield None
                continue
            with self._lock, counting_truncation() as truncation:
                texts = window.prepared_texts()
                make_features = None
                if self.packed and texts:
                    with packed_inputs():
                        make_features = _result_or_none(self._tokenize, texts)
            yield _TokenizedWindow(window.skip, texts, make_features, truncation)

    def _tokenize(self, texts: list[str]) -> Callable[[], Features]:
        """Tokenise texts and return a function that makes their features."""
        if isinstance(self._preprocess, PackedInputs):
            return self._preprocess.tokenize(texts, prompt=self.prompt, **self.task_kwargs)
        features = self._preprocess(texts, prompt=self.prompt, **self.task_kwargs)
        return lambda: features

    def _features_or_none(
        self,
        preprocess: Callable[..., Features],
        texts: list[str],
    ) -> Features | None:
        """Return the features of texts, packed if possible; None if they cannot be tokenised."""
        with packed_inputs():
            return _result_or_none(preprocess, texts, prompt=self.prompt, **self.task_kwargs)

    def _divide_windows(
        self,
        windows: Iterable[_TokenizedWindow],
    ) -> Iterator[TokenBatch | WindowEnd]:
        """Divide tokenised windows into batches; this runs in the second background thread.

        A window that is not tokenised yet is tokenised batch by batch. Batches are left out if none
        of their texts needs a row (``skip``), for example because it was encoded before.

        Args:
            windows: groups of texts that the first thread has tokenised.

        Yields:
            The batches of each window, then the end of the window.
        """
        for window_number, window in enumerate(windows):
            features = None
            if window.make_features is not None:
                features = _result_or_none(window.make_features)
            if features is not None and _tensor_names(features) == PACKED:
                batches = self._packed_batches(window_number, window, features)
            else:
                batches = self._batches_tokenised_separately(window_number, window)
            for batch in batches:
                are_all_skipped = batch.skip.issuperset(batch.positions)
                if not are_all_skipped:
                    yield batch
            yield WindowEnd(window_number)

    def _packed_batches(
        self,
        window_number: int,
        window: _TokenizedWindow,
        features: Features,
    ) -> Iterator[TokenBatch]:
        """Divide the texts of a window into batches with about the same number of tokens.

        Args:
            window_number: the number of the window.
            window: the window.
            features: the packed features of all texts of the window.
        """
        token_ids = TokenIds(
            ids=features["input_ids"][0].numpy(),
            positions=features["position_ids"][0].numpy(),
            offsets=features["cu_seq_lens_q"].numpy().astype(np.int64),
        )
        # Texts of ``skip`` need no rows. They are encoded with their batch, but not counted.
        truncated = window.truncation.truncated_positions(len(window.texts)) - window.skip
        batches = batches_by_tokens(token_ids.lengths, self.batch_tokens, self.batch_size)
        for batch_positions in batches:
            positions = batch_positions.tolist()
            yield TokenBatch(
                window=window_number,
                positions=positions,
                texts=[window.texts[position] for position in positions],
                ids=token_ids.take(batch_positions),
                skip=window.skip,
                n_truncated=sum(position in truncated for position in positions),
                max_length=window.truncation.max_length,
            )

    def _batches_tokenised_separately(
        self,
        window_number: int,
        window: _TokenizedWindow,
    ) -> Iterator[TokenBatch]:
        """Divide the texts of a window into batches of one size, and tokenise each batch by itself.

        Models that do not accept packed tokens need it, and windows that could not be tokenised as
        one.

        Args:
            window_number: the number of the window.
            window: a group of texts that are not tokenised yet.

        Yields:
            The batches, with texts of similar length together.
        """
        texts = window.texts
        # Texts of similar numbers of characters share a batch.
        n_characters = np.fromiter(map(len, texts), np.int64, len(texts))
        max_texts = self.batch_size or PADDED_TEXTS
        for batch_positions in batches_by_tokens(n_characters, None, max_texts):
            positions = batch_positions.tolist()
            batch_texts = [texts[position] for position in positions]
            # The other thread uses the same tokenizer, hence the lock.
            with self._lock, counting_truncation() as truncation:
                features = self._features_or_none(self._preprocess, batch_texts)
            yield TokenBatch(
                window=window_number,
                positions=positions,
                texts=batch_texts,
                features=features,
                skip=window.skip,
                n_truncated=_count_truncated(truncation, positions, window.skip),
                max_length=truncation.max_length,
            )

    # Methods of the caller's thread

    def _launch_or_none(self, batch: TokenBatch) -> PendingRows | None:
        """Launch a batch and return its pending rows, or None if that fails."""
        try:
            features = batch.features
            if batch.ids is not None:
                features = self.packed_features(batch.ids)
            return None if features is None else self._launch(features)
        except Exception:  # the texts are encoded again in smaller batches
            return None

    def packed_features(self, ids: TokenIds) -> Features:
        """Return features on the device for packed token ids on the CPU.

        Ids, positions and offsets are concatenated, so that one copy moves all of them.

        Args:
            ids: the packed token ids with their positions and offsets.
        """
        arrays = [ids.ids, ids.positions, ids.offsets]
        tokens, positions, offsets = torch.split(
            to_device(np.concatenate(arrays), self.device),
            [len(array) for array in arrays],
        )
        longest = int(ids.lengths.max(initial=0))
        packed = packed_arguments(tokens, positions, offsets.int(), longest)
        return {**self.constant_features, **packed}

    def _fetch_or_retry(self, item: _LaunchedBatch | WindowEnd) -> Iterator[Item]:
        """Wait for the rows of a batch, or encode its texts again if that failed.

        Args:
            item: the launched batch. The end of a window is passed on.

        Yields:
            The batch with its rows; several smaller batches after a failure.
        """
        if isinstance(item, WindowEnd):
            yield item
            return
        batch = item.batch
        exceeded_capacity = False
        if item.pending is not None:
            try:
                rows = self._fetch(item.pending)
            except Exception as error:  # a GPU reports errors of a launch here, not at the launch
                exceeded_capacity = isinstance(error, RowCapacityError)
            else:
                yield Batch(
                    window=batch.window,
                    positions=batch.positions,
                    rows=rows,
                    cut=batch.n_truncated,  # the number of truncated texts
                    max_length=batch.max_length,
                )
                return
        # A row with too many entries is no fault of a text. A retry has no row capacity, so all
        # texts can be tried together. After other errors, the batch is divided at once.
        yield from self._retry_in_parts(batch, starts_with_halves=not exceeded_capacity)

    def _retry_in_parts(self, batch: TokenBatch, *, starts_with_halves: bool) -> Iterator[Batch]:
        """Encode the texts of a failed batch in smaller and smaller parts until they succeed.

        Args:
            batch: the batch.
            starts_with_halves: whether the first parts are the halves of the batch. Otherwise the
                whole batch is tried once more.

        Yields:
            Batches of rows. A single text that fails has its error in place of rows.
        """
        truncation = Truncation()  # of the part that was encoded last

        def encode(texts: range) -> Any:
            """Encode consecutive texts of the batch."""
            nonlocal truncation
            with counting_truncation() as truncation:
                return self._fetch(self._launch_texts(batch.texts[texts.start : texts.stop]))

        all_texts = range(len(batch.texts))
        parts: tuple[range, ...] = (all_texts,)
        if starts_with_halves and len(all_texts) > 1:
            parts = split_in_half(all_texts)
        for part in parts:
            # ``bisect_failures`` divides a part further while ``encode`` fails.
            for texts, rows in bisect_failures(part, encode):
                positions = batch.positions[texts.start : texts.stop]
                yield Batch(
                    window=batch.window,
                    positions=positions,
                    rows=rows,
                    cut=_count_truncated(truncation, positions, batch.skip),  # truncated texts
                    max_length=truncation.max_length,
                )

    def _launch_texts(self, texts: list[str]) -> Any:
        """Tokenise texts and run the model on them, for a second attempt."""
        with self._lock, packed_inputs():
            features = self.model.preprocess(texts, prompt=self.prompt, **self.task_kwargs)
        return self._launch(features, is_retry=True)


def _default_batch_tokens(device: torch.device) -> int:
    """Return the default number of tokens per batch for a device."""
    if device.type != "cuda":
        return CPU_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    return GPU_TOKENS if memory >= SMALL_GPU else SMALL_GPU_TOKENS


def _count_truncated(
    truncation: Truncation,
    positions: Sequence[int],
    skip: frozenset[int],
) -> int:
    """Count the truncated texts of a batch, without those that need no rows.

    Args:
        truncation: the recorded calls of the tokenizer for the texts of the batch.
        positions: the positions of these texts in their window.
        skip: the positions of texts that need no rows.
    """
    truncated = truncation.truncated_positions(len(positions))  # positions in the batch
    return sum(positions[text] not in skip for text in truncated)


class SparseStream(TextStream):
    """Encodes windows of texts to :class:`tilefold.pipeline.rows.SparseRows`.

    Attributes:
        options: which entries of a row are kept.
        to_host: whether entries are copied to the CPU instead of staying on the device.
        capacity: the number of entries that is reserved for each row.
    """

    def __init__(
        self,
        model: Model,
        options: SparseOptions,
        to_host: bool = True,
        *,
        task: str | None,
        prompt: str | None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare a stream of sparse rows.

        Args:
            model: an accelerated SparseEncoder.
            options: which entries of a row are kept.
            to_host: whether entries are copied to the CPU instead of staying on the device.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default chosen for the device.
            batch_size: texts per batch; by default not limited for packed texts.
        """
        super().__init__(
            model,
            task=task,
            prompt=prompt,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )
        self.options = options
        self.to_host = to_host
        # A row of an earlier stream may have exceeded the usual capacity.
        self.capacity = max(CAPACITY, _learned_capacities.get(self.model, 0))

    def _launch(
        self,
        features: Features,
        *,
        is_retry: bool = False,
    ) -> PendingSparseRows | PendingCapacityRows:
        """Run the model on a batch of texts, and start copying the sparse rows to the CPU.

        Args:
            features: the output of the model's ``preprocess``.
            is_retry: whether rows may have any number of entries, at the cost of a
                synchronisation.
        """
        return _launch_sparse(
            self.model,
            features,
            self.task_kwargs,
            self.options,
            capacity=None if is_retry else self.capacity,
            to_host=self.to_host,
        )

    def _fetch(self, pending: PendingSparseRows | PendingCapacityRows) -> SparseRows:
        """Return the rows of a batch; if a row exceeds the capacity, raise that of later batches.

        The capacity is the number of entries that are reserved for each sparse row.

        Args:
            pending: the rows, which may still be copied.

        Raises:
            RowCapacityError: if a row has more entries than fit. The caller encodes the batch
                again.
        """
        try:
            return pending.get()
        except RowCapacityError as error:
            while self.capacity < min(error.max_entries, MAX_CAPACITY):
                self.capacity *= 2
            _learned_capacities[self.model] = self.capacity
            raise


class TokenStream(TextStream):
    """Encodes windows of texts to packed token vectors in the number type of a vectors folder.

    Attributes:
        storage: the number type, ``"fp16"`` or ``"int8"``.
    """

    def __init__(
        self,
        model: Model,
        storage: str,
        *,
        task: str | None,
        prompt: str | None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare a stream of token vectors for storage.

        Args:
            model: an accelerated MultiVectorEncoder.
            storage: the number type of stored vectors, ``"fp16"`` or ``"int8"``.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default chosen for the device.
            batch_size: texts per batch; by default not limited for packed texts.
        """
        super().__init__(
            model,
            task=task,
            prompt=prompt,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )
        self.storage = storage

    def _launch(self, features: Features, *, is_retry: bool = False) -> PendingTokenRows:
        """Run the model on features and start copying its stored token vectors to the CPU."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            return PendingTokenRows(
                outputs["token_embeddings"],
                outputs["attention_mask"],
                self._to_stored,
            )

    def _to_stored(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Convert vectors to the number type in which a vectors folder stores them.

        Args:
            vectors: the vectors, fp32 ``[T, D]``.

        Returns:
            Whether each vector is finite ``[T]``, so that it can be stored; the values ``[T, D]``;
            and for int8 the scales ``[T]``.
        """
        if self.storage == "fp32":
            return vectors.isfinite().all(dim=1), vectors
        if self.storage == "fp16":
            half = vectors.half()
            return half.isfinite().all(dim=1), half  # after the conversion, which can overflow
        quantized = quantize_tokens(vectors, "int8")
        return vectors.isfinite().all(dim=1), quantized.values, quantized.scales


class VectorStream(TextStream):
    """Encodes windows of texts to the token vectors ``[n, D]`` of each text, in the model's dtype.

    Attributes:
        to_host: whether vectors are copied to the CPU instead of staying on the device.
        normalize: whether vectors are scaled to length 1.
    """

    def __init__(
        self,
        model: Model,
        *,
        to_host: bool,
        normalize: bool,
        task: str | None,
        prompt: str | None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare a stream of token vectors.

        Args:
            model: an accelerated MultiVectorEncoder.
            to_host: whether vectors are copied to the CPU instead of staying on the device.
            normalize: whether vectors are scaled to length 1.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default chosen for the device.
            batch_size: texts per batch; by default not limited for packed texts.
        """
        super().__init__(
            model,
            task=task,
            prompt=prompt,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )
        self.to_host = to_host
        self.normalize = normalize

    def _launch(self, features: Features, *, is_retry: bool = False) -> PendingTokenVectors:
        """Run the model on features and, with ``to_host``, start copying its token vectors."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            vectors: Tensor = outputs["token_embeddings"]
            if self.normalize:
                vectors = unit_vectors(vectors, self.model)
            return PendingTokenVectors(vectors, outputs["attention_mask"], self.to_host)


class DenseStorageStream(TokenStream):
    """Encodes windows of texts to dense vectors in the number type of a vectors folder.

    A vector is stored as the only token vector of its text.

    Attributes:
        dimension: the number of leading entries of a vector that are stored.
        normalize: whether vectors are scaled to length 1, after other entries were dropped.
    """

    def __init__(
        self,
        model: Model,
        storage: str,
        *,
        dimension: int,
        normalize: bool,
        task: str | None,
        prompt: str | None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare a stream of dense vectors for storage.

        Args:
            model: an accelerated SentenceTransformer.
            storage: the number type of stored vectors, ``"fp32"``, ``"fp16"`` or ``"int8"``.
            dimension: the number of leading entries of a vector that are stored.
            normalize: whether vectors are scaled to length 1, after other entries were dropped.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default chosen for the device.
            batch_size: texts per batch; by default not limited for packed texts.
        """
        super().__init__(
            model,
            storage,
            task=task,
            prompt=prompt,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )
        self.dimension = dimension
        self.normalize = normalize

    def _launch(self, features: Features, *, is_retry: bool = False) -> PendingTokenRows:
        """Run the model on features and start copying its stored vectors to the CPU."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            vectors = outputs["sentence_embedding"][:, : self.dimension].float()
            if self.normalize:
                vectors = unit_vectors(vectors, self.model)
            return PendingTokenRows(vectors[:, None], _one_token_mask(vectors), self._to_stored)


class DenseStream(VectorStream):
    """Encodes windows of texts to dense vectors, a tensor ``[1, D]`` of each text.

    Attributes:
        dimension: the number of leading entries of a vector that are returned; ``None`` for all.
    """

    def __init__(
        self,
        model: Model,
        *,
        to_host: bool,
        normalize: bool,
        dimension: int | None,
        task: str | None,
        prompt: str | None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare a stream of dense vectors.

        Args:
            model: an accelerated SentenceTransformer.
            to_host: whether vectors are copied to the CPU instead of staying on the device.
            normalize: whether vectors are scaled to length 1, after other entries were dropped.
            dimension: the number of leading entries of a vector that are returned; None for all.
            task: ``"query"``, ``"document"`` or None.
            prompt: text that is put before every text.
            batch_size: texts per batch; by default not limited for packed texts.
        """
        super().__init__(
            model,
            to_host=to_host,
            normalize=normalize,
            task=task,
            prompt=prompt,
            batch_size=batch_size,
        )
        self.dimension = dimension

    def _launch(self, features: Features, *, is_retry: bool = False) -> PendingTokenVectors:
        """Run the model on features and, with ``to_host``, start copying its vectors."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            vectors = outputs["sentence_embedding"][:, : self.dimension]
            if self.normalize:
                vectors = unit_vectors(vectors, self.model)
            return PendingTokenVectors(vectors[:, None], _one_token_mask(vectors), self.to_host)


def _one_token_mask(vectors: Tensor) -> Tensor:
    """Return the mask ``[B, 1]`` of dense vectors ``[B, D]`` as one token vector of each text."""
    return torch.ones(len(vectors), 1, dtype=torch.bool, device=vectors.device)
