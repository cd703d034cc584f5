"""Texts to rows in a stream: tokenised ahead, encoded without padding, fetched a batch or two
later.

A thread gives windows of texts to the tokenizer; another makes batches of what comes out; the
caller's thread, which alone touches the model, launches the next batches before it waits for the
rows of the last one.
"""

from __future__ import annotations

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
from tilefold.integrations.transformers.packed import in_eval_mode, packed_arguments
from tilefold.modules.fused_pooling import Features, SparseOptions
from tilefold.modules.window import keep_heaviest
from tilefold.ops import quantize_tokens
from tilefold.ops.cpu_linear import fast_linear
from tilefold.ops.lsr_head import CapacityRows
from tilefold.pipeline import rows as pipeline_rows
from tilefold.pipeline.ragged import TokenIds, batches_by_tokens
from tilefold.pipeline.rows import (
    Batch,
    PendingSparseRows,
    PendingTokenRows,
    PendingTokenVectors,
    Window,
    WindowEnd,
    to_device,
)
from tilefold.pipeline.threads import Prefetcher
from tilefold.pipeline.truncation import Truncation, counting_truncation, ignoring_truncation

T = TypeVar("T")

GPU_TOKENS = 131072  # of a batch: the launches of 12 layers then take the host a fraction of what they take the GPU
SMALL_GPU_TOKENS = 32768
SMALL_GPU = 32 << 30  # bytes of memory
CPU_TOKENS = 4096  # measured beside half and a quarter of it, docs/performance.md
PADDED_TEXTS = 32  # of a batch whose texts are padded
AHEAD = 8  # batches of token ids that wait
_needed: WeakKeyDictionary[Any, int] = (
    WeakKeyDictionary()
)  # room of a model's rows, which its next streams begin with


def prompt_of(model: Model, task: str | None, prompt_name: str | None = None) -> str | None:
    """The prompt that ``encode``, ``encode_query`` and ``encode_document`` choose."""
    if prompt_name is not None:
        if prompt_name not in model.prompts:
            raise ValueError(
                f"prompt_name must be one of {list(model.prompts)}, got {prompt_name!r}.",
            )
        return str(model.prompts[prompt_name])
    names = {"query": ["query"], "document": ["document", "passage", "corpus"]}.get(task or "", [])
    found = next((name for name in names if name in model.prompts), model.default_prompt_name)
    prompt: str | None = model.prompts.get(found)
    return prompt


def encode_batch(
    model: Model,
    texts: Sequence[str],
    task: str | None,
    prompt: str | None,
    options: SparseOptions,
) -> Batch:
    """Texts to sparse rows on the CPU in one forward pass: by a graph where there is one, else in
    eval mode.
    """
    graphs = graphs_of(model)
    if (rows := graphs and graphs.sparse(texts, task=task, prompt=prompt, options=options)) is None:
        task_kwargs = {} if task is None else {"task": task}
        with in_eval_mode(model), packed_inputs():
            features = model.preprocess(list(texts), prompt=prompt, **task_kwargs)
            rows = _pending_rows(model, features, task_kwargs, options).get()
    return Batch(0, range(len(texts)), rows)


def _pending_rows(
    model: Model,
    features: Features,
    task_kwargs: dict[str, str],
    options: SparseOptions,
    capacity: int | None = None,
    to_host: bool = True,
) -> PendingSparseRows:
    """Sparse rows of features, on their way to the host; with a `capacity` in rows of this size
    where they can be.
    """
    with torch.inference_mode(), sparse_scores(options, capacity):
        rows = _encode_features(model, features, task_kwargs)["sentence_embedding"]
        if isinstance(rows, CapacityRows):
            return PendingSparseRows((*rows,), capacity or 0, to_host)
        return PendingSparseRows(
            rows if rows.layout == torch.sparse_csr else _pruned(rows.to_dense(), options),
            0,
            to_host,
        )


def _encode_features(model: Model, features: Features, task_kwargs: dict[str, str]) -> Features:
    """Run the model on features, moved to its device; a batch without any token gets a place of
    padding.
    """
    ids = features.get("input_ids")
    if (
        isinstance(ids, Tensor)
        and "attention_mask" in features
        and ids.dim() == 2
        and not ids.size(1)
    ):
        place = torch.zeros(ids.size(0), 1, dtype=torch.int64)
        features = features | {
            key: place for key, value in features.items() if isinstance(value, Tensor)
        }
    with fast_linear(model, torch.device(model.device)):
        found: Features = model(packing.on_device(features, model.device), **task_kwargs)
    return found


def as_csr(batches: Sequence[Batch], count: int, vocab_size: int) -> Tensor:
    """``[count, V]`` CSR of sparse rows in the order of the texts; `vocab_size` is that of no batch
    at all.
    """
    vocab_size = batches[0].rows.vocab_size if batches else vocab_size
    offsets, columns, values = pipeline_rows.concatenate_rows(batches, count)
    return csr_tensor(offsets, columns.long(), values, (count, vocab_size))


def _pruned(rows: Tensor, options: SparseOptions) -> Tensor:
    """Dense ``[B, V]`` to CSR, under the same options."""
    kept = rows.where(rows > options.min_weight, 0)
    return to_csr(kept if options.top_k is None else keep_heaviest(kept, options.top_k))


class Work(NamedTuple):
    """A batch before it is encoded: packed token ids, or features; neither where tokenising it
    failed.
    """

    window: int
    places: list[int]
    texts: list[str]
    ids: TokenIds | None = None
    features: Features | None = None
    skip: frozenset[int] = (
        frozenset()
    )  # places of texts whose rows are known, in batches of which others are not
    cut: int = 0  # how many of the other texts were cut
    max_length: int | None = None  # tokens that are read of a text


class _Begun(NamedTuple):
    """A window that was given to the tokenizer."""

    skip: frozenset[int]
    texts: list[str]
    finish: Callable[[], Features] | None  # its features; None where it is not tokenised as a whole
    cut: Truncation


def _or_none(make: Callable[..., T], *args: object, **kwargs: object) -> T | None:
    """The result, or None where texts could not be tokenised, which is told when they are encoded
    one by one.
    """
    try:
        with packed_inputs():
            return make(*args, **kwargs)
    except Exception:
        return None


class TextStream(ABC):
    """Encodes windows of texts with an accelerated model in eval mode, in batches of so many texts
    or tokens.
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
        self.model, self.prompt = model, prompt
        self.task: dict[str, str] = {} if task is None else {"task": task}
        self.device = torch.device(model.device)
        usual = CPU_TOKENS
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            usual = GPU_TOKENS if memory >= SMALL_GPU else SMALL_GPU_TOKENS
        self.batch_tokens, self.batch_size = batch_tokens or usual, batch_size
        self._lock = (
            threading.Lock()
        )  # held while texts are tokenised, which changes settings of the tokenizer
        with ignoring_truncation():
            features = _or_none(model.preprocess, ["a"], prompt=prompt, **self.task) or {}
        self.others = {
            key: value for key, value in features.items() if not isinstance(value, Tensor)
        }
        self.packed = (
            features.keys() - self.others.keys() == PACKED
        )  # packed tokens and nothing else
        if batch_tokens is not None and not self.packed:
            pipeline_rows.warn_unused_batch_tokens()
        self._tokenised: Any = (
            packing.texts_to(model) if self.packed else None
        ) or model.preprocess

    @abstractmethod
    def _pending(self, features: Features, *, again: bool = False) -> Any:
        """Run the model on features, `again` after a failure; ``get()`` of the result waits for the
        host's copy.
        """

    def _arrived(self, pending: Any) -> Any:
        return pending.get()

    def __call__(self, windows: Iterable[Window | None]) -> Generator[Any, None, None]:
        """Batches of all texts, then a :class:`WindowEnd`, window by window; a text that fails
        loses no other.
        """
        with self.tokenised(windows) as works:
            yield pipeline_rows.StreamStart()
            yield from self._run(works)

    def _run(self, works: Iterable[Work | WindowEnd]) -> Iterator[object]:
        waiting: deque[tuple[Work | WindowEnd, Any]] = deque()
        launched = 0
        for work in works:
            waiting.append((work, None if isinstance(work, WindowEnd) else self._launched(work)))
            launched += not isinstance(work, WindowEnd)
            while waiting and (
                launched > pipeline_rows.IN_FLIGHT or waiting[0][1] is None or waiting[0][1].ready()
            ):
                launched -= not isinstance(waiting[0][0], WindowEnd)
                yield from self._collected(*waiting.popleft())
        while waiting:
            yield from self._collected(*waiting.popleft())

    # in the threads that work ahead

    @contextmanager
    def tokenised(self, windows: Iterable[Window | None]) -> Iterator[Iterable[Work | WindowEnd]]:
        """Batches of token ids, made by two threads that work ahead."""
        stop = threading.Event()
        with (
            Prefetcher(self._begun(windows), 1, "tilefold-tokenizer", stop) as begun,
            Prefetcher[Work | WindowEnd](
                self._works(begun), AHEAD, "tilefold-tokens", stop
            ) as works,
        ):
            yield works

    def _begun(self, windows: Iterable[Window | None]) -> Iterator[_Begun | None]:
        """In the first thread: the Rust tokenizer at work, which leaves Python's lock to the
        others.
        """
        for window in windows:
            if window is None:
                yield None
                continue
            with self._lock, counting_truncation() as cut:
                texts = window.prepared_texts()
                begun = _or_none(self._begin, texts) if self.packed and texts else None
            yield _Begun(window.skip, texts, begun, cut)

    def _begin(self, texts: list[str]) -> Callable[[], Features]:
        if isinstance(self._tokenised, PackedInputs):
            return self._tokenised.begin(texts, prompt=self.prompt, **self.task)
        features = self._tokenised(texts, prompt=self.prompt, **self.task)
        return lambda: features

    def _works(self, begun: Iterable[_Begun]) -> Iterator[Work | WindowEnd]:
        """In the second thread: ids into one array, and batches cut from it."""
        for number, window in enumerate(begun):
            for work in self._works_of(number, window):
                if not work.skip.issuperset(work.places):
                    yield work
            yield WindowEnd(number)

    def _works_of(self, number: int, window: _Begun) -> Iterator[Work]:
        texts, features = window.texts, None if window.finish is None else _or_none(window.finish)
        if (
            features is None
            or {key for key, value in features.items() if isinstance(value, Tensor)} != PACKED
        ):
            lengths = np.fromiter(map(len, texts), np.int64, len(texts))
            for cut in batches_by_tokens(lengths, None, self.batch_size or PADDED_TEXTS):
                places, chosen = cut.tolist(), [texts[place] for place in cut]
                with self._lock, counting_truncation() as seen:
                    features = _or_none(self._tokenised, chosen, prompt=self.prompt, **self.task)
                count = sum(
                    places[row] not in window.skip for row in seen.cut_positions(len(chosen))
                )
                yield Work(
                    number,
                    places,
                    chosen,
                    None,
                    features,
                    window.skip,
                    count,
                    seen.max_length,
                )
            return
        ids, positions = (features[name][0].numpy() for name in ("input_ids", "position_ids"))
        whole = TokenIds(ids, positions, features["cu_seq_lens_q"].numpy().astype(np.int64))
        short = window.cut.cut_positions(len(texts)) - window.skip
        for cut in batches_by_tokens(whole.lengths, self.batch_tokens, self.batch_size):
            places = cut.tolist()
            chosen, count = (
                [texts[place] for place in places],
                sum(place in short for place in places),
            )
            yield Work(
                number,
                places,
                chosen,
                whole.take(cut),
                None,
                window.skip,
                count,
                window.cut.max_length,
            )

    # in the caller's thread

    def _launched(self, work: Work) -> Any:
        try:
            features = work.features if work.ids is None else self.packed_features(work.ids)
            return None if features is None else self._pending(features)
        except Exception:  # an error of one text must not lose the others
            return None

    def packed_features(self, ids: TokenIds) -> Features:
        """Features of packed token ids, on their way to the device."""
        parts = ids.ids, ids.positions, ids.offsets  # in one copy
        tokens, positions, offsets = torch.split(
            to_device(np.concatenate(parts), self.device),
            [*map(len, parts)],
        )
        return self.others | packed_arguments(
            tokens,
            positions,
            offsets.int(),
            int(ids.lengths.max(initial=0)),
        )

    def _collected(self, work: Work | WindowEnd, pending: Any) -> Iterator[object]:
        if isinstance(work, WindowEnd):
            yield work
            return
        whole = False  # may all of it be tried once more
        if pending is not None:
            try:
                rows = self._arrived(pending)
            except Exception as error:  # of the device, told late
                whole = isinstance(error, pipeline_rows.RowCapacityError)
            else:
                yield Batch(work.window, work.places, rows, work.cut, work.max_length)
                return
        yield from self._again(work, whole=whole)

    def _again(self, work: Work, *, whole: bool) -> Iterator[Batch]:
        """Without the pipeline: all texts together if `whole`, else the split_in_half."""
        seen = Truncation()

        def attempt(texts: range) -> Any:
            nonlocal seen
            with counting_truncation() as seen:
                return self._arrived(self._plain(work.texts[texts.start : texts.stop]))

        every = range(len(work.texts))
        for part in (every,) if whole or len(every) == 1 else pipeline_rows.split_in_half(every):
            for texts, rows in pipeline_rows.bisect_failures(part, attempt):
                places = work.places[texts.start : texts.stop]
                cut = sum(places[at] not in work.skip for at in seen.cut_positions(len(texts)))
                yield Batch(work.window, places, rows, cut, seen.max_length)

    def _plain(self, texts: list[str]) -> Any:
        with self._lock, packed_inputs():
            features = self.model.preprocess(texts, prompt=self.prompt, **self.task)
        return self._pending(features, again=True)


class SparseStream(TextStream):
    """Encodes windows of texts to :class:`tilefold.pipeline.rows.SparseRows`, whose entries may
    stay on the device.
    """

    def __init__(
        self,
        model: Model,
        options: SparseOptions,
        to_host: bool = True,
        /,
        **how: Any,
    ) -> None:
        super().__init__(model, **how)
        self.options, self.to_host, self.capacity = (
            options,
            to_host,
            max(CAPACITY, _needed.get(self.model, 0)),
        )

    def _pending(self, features: Features, *, again: bool = False) -> PendingSparseRows:
        capacity = None if again else self.capacity
        return _pending_rows(self.model, features, self.task, self.options, capacity, self.to_host)

    def _arrived(self, pending: PendingSparseRows) -> pipeline_rows.SparseRows:
        try:
            return pending.get()
        except pipeline_rows.RowCapacityError as error:
            while self.capacity < min(error.max_entries, MAX_CAPACITY):
                self.capacity *= 2
            _needed[self.model] = self.capacity
            raise


class TokenStream(TextStream):
    """Encodes windows of texts to packed token vectors in ``"fp16"`` or ``"int8"``."""

    def __init__(self, model: Model, storage: str, **how: Any) -> None:
        super().__init__(model, **how)
        self.storage = storage

    def _pending(self, features: Features, *, again: bool = False) -> PendingTokenRows:
        with torch.inference_mode():
            found = _encode_features(self.model, features, self.task)
            return PendingTokenRows(
                found["token_embeddings"], found["attention_mask"], self._stored
            )

    def _stored(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Token vectors ``[T, D]`` fp32 as they are stored, after which of them are finite then."""
        if self.storage == "fp16":
            half = rows.half()
            return half.isfinite().all(dim=1), half
        quantized = quantize_tokens(rows, "int8")
        return rows.isfinite().all(dim=1), quantized.values, quantized.scales


class VectorStream(TextStream):
    """Encodes windows of texts to token vectors ``[n, D]`` of each text, as the model makes them."""

    def __init__(self, model: Model, *, to_host: bool, normalize: bool, **how: Any) -> None:
        super().__init__(model, **how)
        self.to_host, self.normalize = to_host, normalize

    def _pending(self, features: Features, *, again: bool = False) -> PendingTokenVectors:
        with torch.inference_mode():
            found = _encode_features(self.model, features, self.task)
            vectors: Tensor = found["token_embeddings"]
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=-1)
            return PendingTokenVectors(vectors, found["attention_mask"], self.to_host)
