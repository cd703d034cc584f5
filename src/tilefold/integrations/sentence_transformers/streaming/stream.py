"""Streaming encoders: windows of texts to batches of rows, with tokenisation in background threads.

One thread passes windows of texts to the tokenizer. A second one divides the token ids into
batches. Only the caller's thread runs the model: it launches up to ``IN_FLIGHT`` batches before it
waits for the rows of the first of them.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilefold._internal.csr import csr_tensor, to_csr
from tilefold._internal.typing import Model
from tilefold.integrations.sentence_transformers._pooling import sparse_scores
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

# Tokens of a batch on a GPU. The CPU then launches 12 layers in a fraction of the time in which the
# GPU computes them.
GPU_TOKENS = 131072
SMALL_GPU_TOKENS = 32768
SMALL_GPU = 32 << 30  # bytes of memory below which a GPU is small
CPU_TOKENS = 4096  # measured against a half and a quarter of it, docs/performance.md
PADDED_TEXTS = 32  # texts of a padded batch
WAITING_BATCHES = 8  # batches of token ids that wait for the model

# Row capacity with which the next stream of a model starts, once a row needed more than CAPACITY.
_learned_capacities: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_TASK_PROMPTS = {"query": ["query"], "document": ["document", "passage", "corpus"]}


def prompt_of(model: Model, task: str | None, prompt_name: str | None = None) -> str | None:
    """Return the prompt that ``encode``, ``encode_query`` or ``encode_document`` would use.

    A task has a default prompt: the first of its usual names that the model has, such as
    ``"passage"`` for documents. Otherwise it is the default prompt of the model, if there is one.

    Args:
        model: a sentence-transformers model.
        task: ``"query"``, ``"document"`` or ``None``.
        prompt_name: name of a prompt; takes precedence over that of the task.

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


def encode_batch(
    model: Model,
    texts: Sequence[str],
    task: str | None,
    prompt: str | None,
    options: SparseOptions,
) -> Batch:
    """Encode texts to sparse rows on the CPU in one forward pass.

    The pass runs as a CUDA graph if the model has one for these texts. Otherwise the model runs in
    eval mode.

    Args:
        model: an accelerated SparseEncoder.
        texts: the texts.
        task: ``"query"``, ``"document"`` or ``None``.
        prompt: text that is put before every text.
        options: which entries of a row are kept.

    Returns:
        The rows as the only batch of a stream.
    """
    rows = None
    graphs = graphs_of(model)
    if graphs is not None:
        rows = graphs.sparse(texts, task=task, prompt=prompt, options=options)
    if rows is None:
        task_kwargs = {} if task is None else {"task": task}
        with in_eval_mode(model), packed_inputs():
            features = model.preprocess(list(texts), prompt=prompt, **task_kwargs)
            rows = _launch_sparse(model, features, task_kwargs, options).get()
    return Batch(window=0, positions=range(len(texts)), rows=rows)


def _launch_sparse(
    model: Model,
    features: Features,
    task_kwargs: dict[str, str],
    options: SparseOptions,
    capacity: int | None = None,
    to_host: bool = True,
) -> PendingSparseRows | PendingCapacityRows:
    """Run the model on features and start copying its sparse rows to the CPU.

    Args:
        model: an accelerated SparseEncoder.
        features: output of its ``preprocess``.
        task_kwargs: the argument ``task`` of the model's forward, if any.
        options: which entries of a row are kept.
        capacity: number of entries that a row may have. Poolings that can then return rows of
            fixed capacity, which need no synchronisation.
        to_host: whether entries are copied to the CPU, too.
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
        if scores.layout != torch.sparse_csr:
            scores = _prune(scores.to_dense(), options)
        return PendingSparseRows(scores, to_host=to_host)


def _run_model(model: Model, features: Features, task_kwargs: dict[str, str]) -> Features:
    """Run the model on features, which are moved to its device.

    Padded texts without any token get one padding token each, since models refuse tensors of
    length 0. Its entry of the attention mask is 0.

    Args:
        model: an accelerated model.
        features: output of its ``preprocess``.
        task_kwargs: the argument ``task`` of the model's forward, if any.

    Returns:
        The features with the outputs of all modules.
    """
    ids = features.get("input_ids")
    is_padded = isinstance(ids, Tensor) and ids.dim() == 2 and "attention_mask" in features
    if is_padded and features["input_ids"].size(1) == 0:
        n_texts = features["input_ids"].size(0)
        zeros = torch.zeros(n_texts, 1, dtype=torch.int64)
        tensor_names = [name for name, value in features.items() if isinstance(value, Tensor)]
        features = {**features, **dict.fromkeys(tensor_names, zeros)}
    with fast_linear(model, torch.device(model.device)):
        outputs: Features = model(packing.on_device(features, model.device), **task_kwargs)
    return outputs


def as_csr(batches: Sequence[Batch], count: int, vocab_size: int) -> Tensor:
    """Combine batches of sparse rows in the order of the texts.

    Args:
        batches: batches of :class:`SparseRows`.
        count: number of texts N.
        vocab_size: number of columns V if there is no batch.

    Returns:
        ``torch.sparse_csr`` matrix ``[N, V]``.
    """
    if batches:
        vocab_size = batches[0].rows.vocab_size
    offsets, columns, values = concatenate_rows(batches, count)
    return csr_tensor(offsets, columns.long(), values, (count, vocab_size))


def _prune(scores: Tensor, options: SparseOptions) -> Tensor:
    """Convert dense scores ``[B, V]`` to CSR with the entries that the options keep."""
    scores = scores.where(scores > options.min_weight, 0)
    if options.top_k is not None:
        scores = keep_heaviest(scores, options.top_k)
    return to_csr(scores)


class TokenBatch(NamedTuple):
    """A batch of a stream before it is encoded.

    It holds packed token ids, or features of padded texts, or neither of them if tokenisation
    failed.

    Attributes:
        window: number of the window.
        positions: positions of the texts in the window.
        texts: the texts.
        ids: packed token ids.
        features: output of the model's ``preprocess``.
        skip: positions of texts of the window that need no rows, see :class:`Window`.
        cut: number of texts that need rows and were truncated.
        max_length: tokens at which texts are truncated.
    """

    window: int
    positions: list[int]
    texts: list[str]
    ids: TokenIds | None = None
    features: Features | None = None
    skip: frozenset[int] = frozenset()
    cut: int = 0
    max_length: int | None = None


class _TokenizedWindow(NamedTuple):
    """A window that the tokenizer has received.

    Attributes:
        skip: positions of texts that need no rows.
        texts: the texts.
        finish: returns the features of all texts; ``None`` if batches are tokenised one by one.
        truncation: which texts were truncated.
    """

    skip: frozenset[int]
    texts: list[str]
    finish: Callable[[], Features] | None
    truncation: Truncation


def _tokenize_or_none(tokenize: Callable[..., T], *args: object, **kwargs: object) -> T | None:
    """Call a tokenizing function, and return None if it raises an error of any class.

    One text's error must not lose the other texts. They are encoded in smaller batches later, at
    last one by one, where the error of a text is raised again. The error here is logged, because
    one that only occurs for many texts together would otherwise be lost.

    Args:
        tokenize: the function.
        *args: its positional arguments.
        **kwargs: its arguments by name.
    """
    try:
        with packed_inputs():
            return tokenize(*args, **kwargs)
    except Exception:
        _logger.info("texts are tokenized in smaller batches after an error", exc_info=True)
        return None


def _tensor_names(features: Features) -> set[str]:
    return {name for name, value in features.items() if isinstance(value, Tensor)}


class TextStream(ABC):
    """Encodes windows of texts with an accelerated model in eval mode.

    Args:
        model: an accelerated model.
        task: ``"query"``, ``"document"`` or ``None``.
        prompt: text that is put before every text.
        batch_tokens: tokens per batch of packed texts; by default what suits the device.
        batch_size: texts per batch; by default not limited for packed texts, 32 for padded ones.
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
        """Prepare the stream; one tokenised text shows whether the model takes packed tokens.

        Args:
            model: an accelerated model.
            task: ``"query"``, ``"document"`` or ``None``.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default what suits the device.
            batch_size: texts per batch; by default not limited for packed texts, 32 for padded
                ones.
        """
        self.model = model
        self.prompt = prompt
        self.task_kwargs: dict[str, str] = {} if task is None else {"task": task}
        self.device = torch.device(model.device)
        self.batch_tokens = batch_tokens or _default_batch_tokens(self.device)
        self.batch_size = batch_size
        # Held while texts are tokenised, which changes settings of the tokenizer.
        self._lock = threading.Lock()
        probe_text = "a"
        with ignoring_truncation():
            features = self._features_or_none(model.preprocess, [probe_text]) or {}
        # Features that are the same for every batch.
        self.constant_features = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        self.packed = _tensor_names(features) == PACKED
        if batch_tokens is not None and not self.packed:
            warn_unused_batch_tokens()
        packed_preprocess = packing.texts_to(model) if self.packed else None
        self._preprocess: Any = packed_preprocess or model.preprocess

    @abstractmethod
    def _launch(self, features: Features, *, is_retry: bool = False) -> Any:
        """Run the model on features and return pending rows.

        Args:
            features: output of the model's ``preprocess``.
            is_retry: whether a batch with these texts has failed before.

        Returns:
            An object whose ``get()`` waits for the copy on the CPU, and whose ``ready()`` says
            whether it is there.
        """

    def _fetch(self, pending: Any) -> Any:
        """Wait for the rows of a launched batch."""
        return pending.get()

    def __call__(self, windows: Iterable[Window | None]) -> Generator[Item, None, None]:
        """Encode windows of texts. A text that fails does not affect the others.

        Args:
            windows: the windows; ``None`` means that none is ready yet.

        Yields:
            A :class:`StreamStart`, then the batches of each window and a :class:`WindowEnd`.
        """
        with self.token_batches(windows) as batches:
            yield StreamStart()
            yield from self._encode_batches(batches)

    def _encode_batches(self, batches: Iterable[TokenBatch | WindowEnd]) -> Iterator[Item]:
        """Launch batches, and yield their rows in the same order once they are on the CPU.

        Up to ``IN_FLIGHT`` batches run on the device before the first one is waited for.

        Args:
            batches: tokenised batches of all windows, with the end of each window.

        Yields:
            Batches of rows, and the ends of windows.
        """
        # Batches with their pending rows, which are None if a batch could not be launched.
        waiting: deque[tuple[TokenBatch | WindowEnd, Any]] = deque()
        n_launched = 0

        def may_collect() -> bool:
            _, pending = waiting[0]
            return n_launched > IN_FLIGHT or pending is None or pending.ready()

        for batch in batches:
            if isinstance(batch, WindowEnd):
                waiting.append((batch, None))
            else:
                waiting.append((batch, self._launch_or_none(batch)))
                n_launched += 1
            while waiting and may_collect():
                collected, pending = waiting.popleft()
                if not isinstance(collected, WindowEnd):
                    n_launched -= 1
                yield from self._collect(collected, pending)
        while waiting:
            yield from self._collect(*waiting.popleft())

    # Methods of the background threads

    @contextmanager
    def token_batches(
        self,
        windows: Iterable[Window | None],
    ) -> Iterator[Iterable[TokenBatch | WindowEnd]]:
        """Tokenise windows in two background threads, which stop at the end of the context.

        Args:
            windows: the windows; ``None`` means that none is ready yet.

        Yields:
            An iterable of tokenised batches, with the end of each window.
        """
        stop = threading.Event()
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
        """Pass windows to the Rust tokenizer, which releases the GIL (in the first thread).

        Args:
            windows: the windows; ``None`` means that none is ready yet.

        Yields:
            Each window with a function that makes features of its tokens; ``None`` for ``None``.
        """
        for window in windows:
            if window is None:
                yield None
                continue
            with self._lock, counting_truncation() as truncation:
                texts = window.prepared_texts()
                finish = None
                if self.packed and texts:
                    finish = _tokenize_or_none(self._start_tokenizing, texts)
            yield _TokenizedWindow(window.skip, texts, finish, truncation)

    def _start_tokenizing(self, texts: list[str]) -> Callable[[], Features]:
        """Tokenise texts and return a function that makes features of the result."""
        if isinstance(self._preprocess, PackedInputs):
            return self._preprocess.begin(texts, prompt=self.prompt, **self.task_kwargs)
        features = self._preprocess(texts, prompt=self.prompt, **self.task_kwargs)
        return lambda: features

    def _features_or_none(
        self,
        preprocess: Callable[..., Features],
        texts: list[str],
    ) -> Features | None:
        return _tokenize_or_none(preprocess, texts, prompt=self.prompt, **self.task_kwargs)

    def _divide_windows(
        self,
        windows: Iterable[_TokenizedWindow],
    ) -> Iterator[TokenBatch | WindowEnd]:
        """Divide tokenised windows into batches (in the second thread).

        Batches whose texts need no rows are left out. A window whose tokenisation failed is
        tokenised again, batch by batch.

        Args:
            windows: tokenised windows.

        Yields:
            The batches of each window, then its end.
        """
        for number, window in enumerate(windows):
            features = None if window.finish is None else _tokenize_or_none(window.finish)
            if features is not None and _tensor_names(features) == PACKED:
                batches = self._packed_batches(number, window, features)
            else:
                batches = self._separate_batches(number, window)
            for batch in batches:
                if not batch.skip.issuperset(batch.positions):
                    yield batch
            yield WindowEnd(number)

    def _packed_batches(
        self,
        number: int,
        window: _TokenizedWindow,
        features: Features,
    ) -> Iterator[TokenBatch]:
        """Divide the tokens of a window into batches of about equal numbers of tokens.

        Args:
            number: number of the window.
            window: the window.
            features: packed features of all its texts.
        """
        token_ids = TokenIds(
            ids=features["input_ids"][0].numpy(),
            positions=features["position_ids"][0].numpy(),
            offsets=features["cu_seq_lens_q"].numpy().astype(np.int64),
        )
        cut = window.truncation.truncated_positions(len(window.texts)) - window.skip
        batches = batches_by_tokens(token_ids.lengths, self.batch_tokens, self.batch_size)
        for batch_positions in batches:
            positions = batch_positions.tolist()
            yield TokenBatch(
                window=number,
                positions=positions,
                texts=[window.texts[position] for position in positions],
                ids=token_ids.take(batch_positions),
                skip=window.skip,
                cut=sum(position in cut for position in positions),
                max_length=window.truncation.max_length,
            )

    def _separate_batches(self, number: int, window: _TokenizedWindow) -> Iterator[TokenBatch]:
        """Divide a window into batches of equal numbers of texts, and tokenise each one by itself.

        Args:
            number: number of the window.
            window: the window, which has no packed tokens.
        """
        texts = window.texts
        # Texts of similar numbers of characters share a batch.
        n_characters = np.fromiter(map(len, texts), np.int64, len(texts))
        max_texts = self.batch_size or PADDED_TEXTS
        for batch_positions in batches_by_tokens(n_characters, None, max_texts):
            positions = batch_positions.tolist()
            batch_texts = [texts[position] for position in positions]
            with self._lock, counting_truncation() as truncation:
                features = self._features_or_none(self._preprocess, batch_texts)
            yield TokenBatch(
                window=number,
                positions=positions,
                texts=batch_texts,
                features=features,
                skip=window.skip,
                cut=_count_cut(truncation, positions, window.skip),
                max_length=truncation.max_length,
            )

    # Methods of the caller's thread

    def _launch_or_none(self, batch: TokenBatch) -> Any:
        """Launch a batch and return its pending rows, or None if that fails."""
        try:
            features = batch.features
            if batch.ids is not None:
                features = self.packed_features(batch.ids)
            return None if features is None else self._launch(features)
        except Exception:  # an error of one text must not lose the others
            return None

    def packed_features(self, ids: TokenIds) -> Features:
        """Return features of packed token ids on the device.

        Ids, positions and offsets are joined, so that one copy moves them.

        Args:
            ids: packed token ids on the CPU.
        """
        arrays = [ids.ids, ids.positions, ids.offsets]
        tokens, positions, offsets = torch.split(
            to_device(np.concatenate(arrays), self.device),
            [len(array) for array in arrays],
        )
        longest = int(ids.lengths.max(initial=0))
        packed = packed_arguments(tokens, positions, offsets.int(), longest)
        return {**self.constant_features, **packed}

    def _collect(self, batch: TokenBatch | WindowEnd, pending: Any) -> Iterator[Item]:
        """Wait for the rows of a batch; encode its texts again if it failed.

        Args:
            batch: the batch, or the end of a window, which is passed on.
            pending: its pending rows; ``None`` if it could not be launched.

        Yields:
            The batch with its rows; several smaller batches after a failure.
        """
        if isinstance(batch, WindowEnd):
            yield batch
            return
        too_many_entries = False
        if pending is not None:
            try:
                rows = self._fetch(pending)
            except Exception as error:  # the device reports errors late
                too_many_entries = isinstance(error, RowCapacityError)
            else:
                yield Batch(batch.window, batch.positions, rows, batch.cut, batch.max_length)
                return
        yield from self._encode_again(batch, together=too_many_entries)

    def _encode_again(self, batch: TokenBatch, *, together: bool) -> Iterator[Batch]:
        """Encode the texts of a failed batch at once, in ever smaller parts until they succeed.

        Args:
            batch: the batch.
            together: whether all texts are tried together first. Otherwise each half is.

        Yields:
            Batches of rows. A single text that fails has its error in place of rows.
        """
        truncation = Truncation()  # of the last part that was encoded

        def encode(texts: range) -> Any:
            """Encode some of the texts, given by their positions in the batch."""
            nonlocal truncation
            with counting_truncation() as truncation:
                return self._fetch(self._launch_texts(batch.texts[texts.start : texts.stop]))

        all_texts = range(len(batch.texts))
        parts: tuple[range, ...] = (all_texts,)
        if not together and len(all_texts) > 1:
            parts = split_in_half(all_texts)
        for part in parts:
            # ``bisect_failures`` divides a range of texts again and again while `encode` fails.
            for texts, rows in bisect_failures(part, encode):
                positions = batch.positions[texts.start : texts.stop]
                cut = _count_cut(truncation, positions, batch.skip)
                yield Batch(batch.window, positions, rows, cut, truncation.max_length)

    def _launch_texts(self, texts: list[str]) -> Any:
        """Tokenise texts and run the model on them, for a second attempt."""
        with self._lock, packed_inputs():
            features = self.model.preprocess(texts, prompt=self.prompt, **self.task_kwargs)
        return self._launch(features, is_retry=True)


def _default_batch_tokens(device: torch.device) -> int:
    """Return the number of tokens per batch that suits a device."""
    if device.type != "cuda":
        return CPU_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    return GPU_TOKENS if memory >= SMALL_GPU else SMALL_GPU_TOKENS


def _count_cut(truncation: Truncation, positions: Sequence[int], skip: frozenset[int]) -> int:
    """Count the truncated texts of a batch that need rows.

    Args:
        truncation: the tokenizer's calls for the texts of the batch.
        positions: positions of these texts in their window.
        skip: positions of texts that need no rows.
    """
    cut_texts = truncation.truncated_positions(len(positions))  # positions in the batch
    return sum(positions[text] not in skip for text in cut_texts)


class SparseStream(TextStream):
    """Encodes windows of texts to :class:`tilefold.pipeline.rows.SparseRows`.

    Args:
        model: an accelerated SparseEncoder.
        options: which entries of a row are kept.
        to_host: whether entries are copied to the CPU. Otherwise they stay on the device.
        task, prompt, batch_tokens, batch_size: see :class:`TextStream`.
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
        """Create the stream.

        Args:
            model: an accelerated SparseEncoder.
            options: which entries of a row are kept.
            to_host: whether entries are copied to the CPU. Otherwise they stay on the device.
            task: ``"query"``, ``"document"`` or ``None``.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default what suits the device.
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
        self.capacity = max(CAPACITY, _learned_capacities.get(self.model, 0))

    def _launch(
        self,
        features: Features,
        *,
        is_retry: bool = False,
    ) -> PendingSparseRows | PendingCapacityRows:
        """Run the model, and start copying its sparse rows to the CPU.

        A second attempt computes rows of any number of entries.
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
        try:
            return pending.get()
        except RowCapacityError as error:
            while self.capacity < min(error.max_entries, MAX_CAPACITY):
                self.capacity *= 2
            _learned_capacities[self.model] = self.capacity
            raise


class TokenStream(TextStream):
    """Encodes windows of texts to packed token vectors as a folder of vectors stores them.

    Args:
        model: an accelerated MultiVectorEncoder.
        storage: ``"fp16"`` or ``"int8"``.
        task, prompt, batch_tokens, batch_size: see :class:`TextStream`.
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
        """Create the stream.

        Args:
            model: an accelerated MultiVectorEncoder.
            storage: number type of stored vectors, ``"fp16"`` or ``"int8"``.
            task: ``"query"``, ``"document"`` or ``None``.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default what suits the device.
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
        """Run the model, and start copying its token vectors to the CPU in their stored form."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            return PendingTokenRows(
                outputs["token_embeddings"],
                outputs["attention_mask"],
                self._to_stored,
            )

    def _to_stored(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Convert token vectors to the stored number type.

        Args:
            vectors: fp32 ``[T, D]``.

        Returns:
            Whether each vector is finite ``[T]``, the values ``[T, D]``, and for int8 the scales
            ``[T]``.
        """
        if self.storage == "fp16":
            half = vectors.half()
            return half.isfinite().all(dim=1), half
        quantized = quantize_tokens(vectors, "int8")
        return vectors.isfinite().all(dim=1), quantized.values, quantized.scales


class VectorStream(TextStream):
    """Encodes windows of texts to token vectors ``[n, D]`` of each text, in the model's dtype.

    Args:
        model: an accelerated MultiVectorEncoder.
        to_host: whether vectors are copied to the CPU. Otherwise they stay on the device.
        normalize: whether vectors are scaled to length 1.
        task, prompt, batch_tokens, batch_size: see :class:`TextStream`.
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
        """Create the stream.

        Args:
            model: an accelerated MultiVectorEncoder.
            to_host: whether vectors are copied to the CPU. Otherwise they stay on the device.
            normalize: whether vectors are scaled to length 1.
            task: ``"query"``, ``"document"`` or ``None``.
            prompt: text that is put before every text.
            batch_tokens: tokens per batch of packed texts; by default what suits the device.
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
        """Run the model, and start copying its token vectors to the CPU if that is asked for."""
        with torch.inference_mode():
            outputs = _run_model(self.model, features, self.task_kwargs)
            vectors: Tensor = outputs["token_embeddings"]
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=-1)
            return PendingTokenVectors(vectors, outputs["attention_mask"], self.to_host)
