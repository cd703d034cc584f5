"""Service that encodes the inputs of requests with models, batch workers and helper threads."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from tilefold._internal.arguments import ArgumentError
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.retrieval.errors import MissingDocumentError
from tilefold.retrieval.index.opening import gpus_of
from tilefold.serve.batching import Answer, BatchWorker, Durations, InputLimit, Metrics
from tilefold.serve.bodies import (
    ImageData,
    ServeError,
    empty_input_error,
    invalid_input_error,
    wrong_model_error,
)
from tilefold.serve.images import ImageInput, blank_page, count_pixels, decode_image
from tilefold.serve.models import SIDES, BatchKey, Kind, Served, Side
from tilefold.serve.settings import Limits
from tilefold.serve.threads import Call, DaemonPool

if TYPE_CHECKING:
    from tilefold.serve.searchable import Searchable

__all__ = [
    "EncodeOptions",
    "Follower",
    "Outcome",
    "Service",
    "gather_or_cancel",
    "truncation_counts",
]

R = TypeVar("R")
T = TypeVar("T")
Input = str | tuple[int, ...]
"""A text, or token ids."""
Pool = Literal["helpers", "tokenizers"]
"""Name of a thread pool. ``/tokenize`` and ``/decode`` use the tokenizers, so that their long texts
do not delay other requests, whose tokens are counted by the helpers. Images use them, too."""
truncation_counts: ContextVar[list[int] | None] = ContextVar(
    "tilefold_truncation_counts",
    default=None,
)
"""A list to which each encoding of the current request adds its number of truncated inputs.

It is ``None`` if the response does not report them."""

# Batch key of payloads that are functions.
_FUNCTION_KEY = "call"
# Number of characters of an input that are read for each token of the model's limit, like
# text-embeddings-inference.
_CHARACTERS_PER_TOKEN = 250
# Largest number of tokens of a query, for a server without a model.
_DEFAULT_MAX_LENGTH = 512
MAX_PORTION_SIZE = 16_384
"""Characters, tokens or numbers that a helper thread processes before it serves other requests."""
# Total number of characters or numbers up to which inputs are processed on the event loop.
_SMALL_SIZE = 1024
# Pixels that are decoded at the same time, as a multiple of the limit on the pixels of an image.
_IMAGES_IN_FLIGHT = 4
# Numbers of texts, and of words of each, that a model encodes before the server is ready: those of
# the usual queries, and on a GPU also those of documents.
_QUERY_BATCHES = ((1, 1), (1, 16), (1, 64), (4, 16), (4, 64))
_DOCUMENT_BATCHES = ((1, 512), (16, 256), (64, 64))
_WARM_UP_WORD = "a"  # short text that every model can encode
# Longest time in which the threads of the first searches wait for each other.
_WARM_UP_SECONDS = 10.0
# Searches that have decoded some pages of the collection, which are encoded, at the same time.
_SEARCHES_WITH_PAGES = 4
# Smallest limit on concurrent searches.
_MIN_SEARCHES = 4
# Time for running searches to end when the service closes. A Qdrant server may be unreachable.
_LEAVE_SECONDS = 5.0
_REMEDIES: dict[Kind, str] = {
    "sparse": "sparse vectors come from a SparseEncoder: start the server with one as --model",
    "multi-vector": (
        "token vectors and reranking come from a multi-vector model: start the server with one as "
        "--model"
    ),
    "dense": "dense vectors come from a SentenceTransformer: start the server with one as --model",
}

_logger = logging.getLogger("tilefold.serve")


@dataclass(frozen=True)
class EncodeOptions:
    """How the inputs of a request are encoded.

    Attributes:
        side: whether inputs are encoded as queries or as documents.
        prompt_name: name of a prompt of the model; ``None`` uses the prompt of the side.
        truncate: whether inputs over the limit are truncated. Otherwise they are refused. ``None``
            uses ``Limits.auto_truncate``.
        truncation_side: end from which inputs are truncated.
        normalize: whether a dense model normalises its vectors, if it does so by default.
        counted: which metrics count the inputs: ``"embed"``; ``"predict"`` for texts that are
            scored with a query; or ``None`` for no metrics.
    """

    side: Side
    prompt_name: str | None = None
    truncate: bool | None = None
    truncation_side: Literal["left", "right"] = "right"
    normalize: bool = True
    counted: Literal["embed", "predict"] | None = "embed"


@dataclass
class Outcome:
    """Encoded inputs of a request, with counts and durations for headers and metrics.

    Attributes:
        rows: the encoded inputs.
        characters: number of characters or token ids of the inputs.
        tokens: number of tokens after truncation.
        started: ``time.perf_counter()`` at the start of the request.
        tokenization: seconds of tokenization.
        queue: mean seconds of an input in the queue.
        inference: mean seconds of an input in the model.
    """

    rows: list[Any] = field(default_factory=list)
    characters: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    tokenization: float = 0.0
    queue: float = 0.0
    inference: float = 0.0

    def set_answers(self, answers: Sequence[Answer]) -> None:
        """Set the rows, and the mean times of an input.

        Args:
            answers: the answer for each input, at least one.
        """
        self.rows = [answer.value for answer in answers]
        self.queue = sum(answer.queue for answer in answers) / len(answers)
        self.inference = sum(answer.inference for answer in answers) / len(answers)

    def headers(self, device: str) -> list[tuple[bytes, bytes]]:
        """Return the response headers of text-embeddings-inference, with times in milliseconds.

        Args:
            device: device of the model, such as ``"cuda:0"``.
        """
        total = b"%.0f" % (1000 * (time.perf_counter() - self.started))
        device_type = "gpu" if device.startswith("cuda") else device.partition(":")[0]
        return [
            (b"x-compute-type", device_type.encode()),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-compute-time", total),
            (b"x-total-time", total),
            (b"x-tokenization-time", b"%.0f" % (1000 * self.tokenization)),
            (b"x-queue-time", b"%.0f" % (1000 * self.queue)),
            (b"x-inference-time", b"%.0f" % (1000 * self.inference)),
        ]


class Follower(Protocol):
    """Opens further generations of the index that a service searches."""

    def start(self) -> None:
        """Start to watch the index, on the event loop of the server."""

    async def stop(self) -> None:
        """Stop watching the index."""

    async def reload(self) -> Searchable:
        """Open the current generation, and let it take over."""

    def request_reload(self) -> None:
        """Let the current generation be opened soon; a signal handler may call this."""

    def info(self) -> dict[str, object]:
        """Describe the served generation, for ``/info``."""


class Writer(Protocol):
    """Writes documents into the index that a service searches."""

    def start(self) -> None:
        """Start to write, on the event loop of the server."""

    async def stop(self) -> None:
        """Stop writing."""

    async def accept(self, changes: Sequence[Any], *, wait: bool) -> Any:
        """Accept changes, and return a :class:`tilefold.serve.writing.Receipt`."""

    def info(self) -> dict[str, object]:
        """Describe the pending changes."""


class _AnswerCache:
    """Cache of the encoded queries of the latest requests. Used on the event loop only."""

    def __init__(self, size: int) -> None:
        """Create an empty cache for `size` queries."""
        self._size = size
        self._answers: OrderedDict[tuple[BatchKey, Input], Answer] = OrderedDict()

    def get(self, key: BatchKey, query: Input) -> Answer | None:
        """Return the cached answer for a query, or ``None``."""
        answer = self._answers.get((key, query))
        if answer is not None:
            self._answers.move_to_end((key, query))
        return answer

    def put(self, key: BatchKey, answers: Mapping[Input, Answer]) -> None:
        """Add answers for queries, without their durations; answers for documents are ignored."""
        if key.side == "query" and self._size:
            for query, answer in answers.items():
                self._answers[key, query] = Answer(answer.value, queue=0.0, inference=0.0)
        while len(self._answers) > self._size:
            self._answers.popitem(last=False)


class _PendingText(NamedTuple):
    """A text whose tokens will be counted in the next iteration of the event loop.

    Attributes:
        text: the text.
        length: the future of its number of tokens.
    """

    text: str
    length: asyncio.Future[int]


class _TextCounter:
    """Counts the tokens of texts together that arrive in the same iteration of the event loop.

    A tokenizer counts several texts of one call in parallel.
    """

    def __init__(self) -> None:
        """Create a counter without pending texts."""
        self._pending: dict[BatchKey, list[_PendingText]] = {}

    async def count(
        self,
        count_tokens: Callable[[list[str]], list[int]],
        key: BatchKey,
        text: str,
    ) -> int:
        """Return the number of tokens of a text.

        The first text of a key schedules the count for the next iteration of the event loop. Texts
        of other requests that arrive until then are counted by the same call.

        Args:
            count_tokens: function that returns the number of tokens of each text.
            key: texts with equal keys are counted together.
            text: the text.
        """
        loop = asyncio.get_running_loop()
        pending = self._pending.setdefault(key, [])
        if not pending:
            loop.call_soon(self._count_pending, count_tokens, key)
        future: asyncio.Future[int] = loop.create_future()
        pending.append(_PendingText(text, future))
        return await future

    def _count_pending(
        self,
        count_tokens: Callable[[list[str]], list[int]],
        key: BatchKey,
    ) -> None:
        """Count all pending texts of a key in one call, and resolve their futures.

        If the call fails, each text is counted alone, so that only the request of the text that
        caused the failure gets the error.
        """
        pending = self._pending.pop(key)
        try:
            lengths = count_tokens([text for text, _ in pending])
        except BaseException:  # a panic of a Rust tokenizer is not an Exception
            for item in pending:
                _count_alone(count_tokens, item)
            return
        for (_, future), length in zip(pending, lengths, strict=True):
            if not future.done():  # it is done if the client has disconnected
                future.set_result(length)


def _count_alone(count_tokens: Callable[[list[str]], list[int]], item: _PendingText) -> None:
    """Count the tokens of one text, and resolve its future with the number or the error."""
    if item.length.done():  # the client has disconnected
        return
    try:
        item.length.set_result(count_tokens([item.text])[0])
    except BaseException as error:
        item.length.set_exception(error)


class Service:
    """Models with a batch worker per device, and an index that they search.

    Attributes:
        models: kind -> the model of that kind.
        limits: limits of requests.
        default_side: whether routes such as ``/embed`` encode queries or documents, if their path
            does not begin with ``/query`` or ``/document``.
        searchable: the index to search, of one generation; ``None`` without an index.
        follower: opens further generations of the index; ``None`` if the index is not followed.
        writer: writes documents into the index; ``None`` if the index takes none.
        metrics: metrics of the service.
        input_limit: limit on the number of inputs that are encoded or wait.
        pixel_limit: limit on the number of pixels of the images of requests that are decoded.
        decoded_pages: limits the searches that hold decoded pages of the collection; others wait.
        closing: whether the service refuses all work, because it ends or has ended.
        draining: whether the service will end soon. It still accepts requests, but health checks
            fail, so that clients use another server.
        is_only_request: function that returns whether the current request is the only one. The
            HTTP server sets it.
    """

    def __init__(
        self,
        models: Sequence[Served],
        limits: Limits | None = None,
        default_side: Side = "document",
        searchable: Searchable | None = None,
    ) -> None:
        """Create a service that is not started; :meth:`start` starts its threads.

        Args:
            models: models to serve, at most one of each kind.
            limits: limits of requests; ``None`` uses the defaults.
            default_side: side of the routes whose path does not name one.
            searchable: index to search; ``None`` serves models only.

        Raises:
            ValueError: if there is nothing to serve, two models have the same kind, or the side is
                unknown.
        """
        if not models and searchable is None:
            raise ArgumentError(
                "models",
                "expected at least one model, or an index in `searchable`, got neither.",
            )
        if default_side not in ("query", "document"):
            raise ArgumentError(
                "default_side", f"expected 'query' or 'document', got {default_side!r}."
            )
        self.models: dict[Kind, Served] = {model.kind: model for model in models}
        if len(self.models) < len(models):
            kinds = ", ".join(model.kind for model in models)
            raise ArgumentError(
                "models",
                f"expected at most one model of each kind, got {kinds}. Start a server for each.",
            )
        self.limits = Limits() if limits is None else limits
        self.default_side = default_side
        self.searchable = searchable
        self.follower: Follower | None = None
        self.writer: Writer | None = None
        self.metrics = Metrics()
        self.input_limit = InputLimit(self.limits.max_concurrent_requests)
        self.pixel_limit = InputLimit(_IMAGES_IN_FLIGHT * self.limits.max_image_pixels)
        self.decoded_pages = asyncio.Semaphore(_SEARCHES_WITH_PAGES)
        self.closing = False
        self.draining = False
        self.is_only_request: Callable[[], bool] = lambda: False

        self._cache = _AnswerCache(self.limits.cached_queries)
        self._text_counter = _TextCounter()
        # Threads, which start() creates.
        self._workers: dict[str, BatchWorker] = {}  # by device
        self._pools: dict[Pool, ThreadPoolExecutor] = {}
        self._search_threads = self._new_search_threads()
        self.metrics.gauge("te_queue_size", lambda: sum(map(len, self._workers.values())))
        self.metrics.gauge("tilefold_inputs_in_flight", lambda: self.input_limit.in_use)
        self.metrics.gauge("tilefold_ready", lambda: float(self.healthy))

    def _new_search_threads(self) -> DaemonPool:
        """Create the threads that search, which start when they are needed."""
        n_threads = max(_MIN_SEARCHES, self.limits.tokenization_workers)
        return DaemonPool("tilefold-searcher", n_threads)

    def warm_up(self) -> None:
        """Encode texts with every model, so that no request waits for initialisation.

        There are one and a few texts of the lengths of usual queries, and on a GPU also batches of
        documents, for which kernels are compiled. For accelerated models on a GPU, CUDA graphs for
        short texts are captured, too. A model of page images encodes a blank page as a document.

        A model must encode a word and a blank page. If it fails for longer texts, a warning is
        logged, because requests may have none.
        """
        for model in self.models.values():
            self.warm_up_model(model)

    def warm_up_model(self, model: Served) -> None:
        """Encode texts with one model, so that no request waits for its initialisation.

        These are a word and texts of several lengths, as queries and as documents. A model of page
        images encodes a blank page as a document.

        Args:
            model: the model, which need not be served yet.
        """
        for side in SIDES:
            key = model.batch_key(side, prompt_name=None)
            if side == "document" and model.takes_images:
                model.encode(key._replace(has_images=True), [blank_page()])
                continue
            encode = functools.partial(model.encode, key)
            encode([_WARM_UP_WORD])
            try:
                self._warm_up_lengths(model, side, encode)
            except Exception as error:  # of long texts or of memory, which requests may not need
                _logger.warning(
                    "%s: the first %s texts of some lengths will take longer, because encoding "
                    "them before the server is ready failed (%s: %s)",
                    model.name,
                    side,
                    type(error).__name__,
                    error,
                )
                # Some errors of a GPU leave it unusable. Encoding a word then raises.
                encode([_WARM_UP_WORD])

    def _warm_up_lengths(
        self,
        model: Served,
        side: Side,
        encode: Callable[[list[str]], object],
    ) -> None:
        """Encode synthetic texts of several lengths, and capture CUDA graphs for short ones.

        Args:
            model: the model.
            side: whether the texts are encoded as queries or as documents.
            encode: encodes texts of this side.
        """
        graphs = graphs_of(model.model)
        if graphs is not None:
            graphs.capture_all_sizes(encode)
        for texts in self._warm_up_batches(model, side):
            encode(texts)

    def _warm_up_batches(self, model: Served, side: Side) -> Iterator[list[str]]:
        """Yield batches of synthetic texts that the model encodes before the server is ready.

        Args:
            model: the model.
            side: whether the texts are encoded as queries or as documents.
        """
        batches: Sequence[tuple[int, int]] = ()
        if side == "query":
            batches = _QUERY_BATCHES
        elif model.device.startswith("cuda"):
            batches = _DOCUMENT_BATCHES
        for n_texts, n_words in batches:
            if n_texts * n_words <= self.limits.max_batch_tokens:
                yield [f"{_WARM_UP_WORD} " * n_words] * n_texts

    def warm_up_search(self) -> None:
        """Search once in every thread that searches later, so that no request waits for its start.

        On a GPU, several threads search at the same time, because each thread has its own handles
        of the GPU's libraries and its own CUDA graph of the search. Without an index, nothing
        happens.
        """
        searchable = self.searchable
        if searchable is None:
            return
        encoded_word = searchable.encode_probe()
        self._search_threads.submit(searchable.search_probe, encoded_word).result()
        if not gpus_of(searchable.index):
            return
        # Each search waits until all have begun, so that each runs in a thread of its own.
        barrier = threading.Barrier(_MIN_SEARCHES, timeout=_WARM_UP_SECONDS)

        def search_together() -> None:
            barrier.wait()
            searchable.search_probe(encoded_word)

        futures = [self._search_threads.submit(search_together) for _ in range(_MIN_SEARCHES)]
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:  # too little memory for several searches at a time, or too few threads
            _logger.warning(
                "the first searches will take longer, because %d of %d at the same time failed "
                "before the server was ready (%s: %s)",
                len(errors),
                _MIN_SEARCHES,
                type(errors[0]).__name__,
                errors[0],
            )
            # After some errors, the GPU can no longer be used. Then this search raises, too.
            self._search_threads.submit(searchable.search_probe, encoded_word).result()

    def start(self) -> None:
        """Start the threads: a batch worker per device, helpers and tokenizers.

        A closed service may be started again.
        """
        if self.closing:
            self._search_threads = self._new_search_threads()
        self.closing = False
        self.draining = False
        n_threads = self.limits.tokenization_workers
        self._pools = {
            "helpers": ThreadPoolExecutor(n_threads, "tilefold-helper"),
            "tokenizers": ThreadPoolExecutor(n_threads, "tilefold-tokenizer"),
        }
        self._workers.clear()
        self._start_workers()

    def _start_workers(self) -> None:
        """Start a batch worker for each device of a model that has none."""
        for device in {model.device for model in self.models.values()} - set(self._workers):
            worker = BatchWorker(
                device,
                self._run_batch,
                self.limits.max_batch_tokens,
                self.metrics,
            )
            self._workers[device] = worker
            worker.start()

    def close(self) -> None:
        """Refuse waiting inputs and end the threads.

        Searches that do not end within ``_LEAVE_SECONDS``, because the index is on a server that
        does not answer, are abandoned.
        """
        self.closing = True
        for worker in self._workers.values():
            worker.close()
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        if not self._search_threads.close(_closing_error(), _LEAVE_SECONDS):
            _logger.warning("searches were abandoned, because the index's server does not answer")

    @property
    def _is_open(self) -> bool:
        """Whether the service has started and accepts work."""
        return bool(self._pools) and not self.closing

    @property
    def healthy(self) -> bool:
        """Whether clients should send requests to this service.

        It accepts work, is not going to end soon, and every batch worker is alive.
        """
        return self._is_open and not self.draining and self.live

    @property
    def live(self) -> bool:
        """Whether every batch worker is alive, or ends because the service does."""
        return self.closing or all(worker.alive for worker in self._workers.values())

    def model(self, kind: Kind) -> Served:
        """Return the model of a kind.

        Raises:
            ServeError: if this server has no such model.
        """
        if kind not in self.models:
            names = [f"{model.name} ({model.kind})" for model in self.models.values()]
            available = " and ".join(names) if names else "no model"
            raise wrong_model_error(f"this server has {available}; {_REMEDIES[kind]}")
        return self.models[kind]

    @property
    def first_model(self) -> Served:
        """The model that ``/info``, ``/tokenize`` and ``/decode`` use."""
        if not self.models:
            raise wrong_model_error(
                "this server has an index of words, and no model: start it with one as --model",
            )
        return next(iter(self.models.values()))

    async def run_in_thread(
        self,
        function: Callable[..., T],
        *arguments: Any,
        pool: Pool = "helpers",
    ) -> T:
        """Run a short function in a thread of a pool.

        Args:
            function: the function.
            arguments: positional arguments of the function.
            pool: the threads that run it.

        Raises:
            ServeError: if the service is closing.
        """
        if not self._is_open:
            raise _closing_error()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[pool], function, *arguments)

    async def map_in_portions(
        self,
        items: Sequence[T],
        function: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
        *,
        pool: Pool = "helpers",
    ) -> list[R]:
        """Map a list of items to a list of results in the threads of a pool.

        The threads serve other requests between two portions of the items.

        Args:
            items: the items.
            function: function that maps a list of items to a list with a result for each.
            size: function that returns the size of an item in characters, tokens or numbers. The
                total size of a portion is limited to :data:`MAX_PORTION_SIZE`.
            pool: the threads that call the function.
        """
        results: list[R] = []
        for portion in _portions(items, size):
            results += await self.run_in_thread(function, portion, pool=pool)
        return results

    async def map_items(
        self,
        items: Sequence[T],
        function: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
    ) -> list[R]:
        """Map a list of items to a list of results in helper threads, or directly if it is small.

        Waking a thread takes longer than mapping items whose total size is small.

        Args:
            items: the items.
            function: function that maps a list of items to a list with a result for each.
            size: function that returns the size of an item in characters, tokens or numbers.
        """
        if sum(map(size, items)) <= _SMALL_SIZE:
            return function(list(items))
        return await self.map_in_portions(items, function, size)

    async def run_search(self, search: Callable[..., T], *arguments: Any) -> T:
        """Run a search in one of the threads for searches.

        A search may be slow if the index is on a server, and must not block other requests. The
        threads are daemon threads, so that they do not block the end of the process either. If all
        of them are busy, the search waits. Cancelling drops it if it still waits.

        Args:
            search: function that searches.
            arguments: positional arguments of the function.

        Raises:
            ServeError: if the service is closing.
        """
        if not self._is_open:
            raise _closing_error()
        return await asyncio.wrap_future(self._search_threads.submit(search, *arguments))

    async def run_in_background(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that may take long in a new daemon thread, without a limit of threads.

        Args:
            function: the function.
            arguments: positional arguments of the function.
        """
        call = Call(function, arguments)
        result = call.result  # read before the thread starts, which deletes the attribute
        threading.Thread(target=call.run, name="tilefold-background", daemon=True).start()
        return await asyncio.wrap_future(result)

    def replace_searchable(self, searchable: Searchable) -> None:
        """Let another generation of the index, with its models, answer new requests.

        A generation is a committed state of the index. Running requests keep the old one, which is
        released when the last of them ends. Called on the event loop.

        Args:
            searchable: the new generation, with its models and documents.
        """
        old = self.searchable
        old_models = [] if old is None else old.models
        for model in old_models:
            if self.models.get(model.kind) is model:
                del self.models[model.kind]
        for model in searchable.models:
            self.models[model.kind] = model
        if set(searchable.models) != set(old_models):
            # The answers of another model would keep the old one in memory.
            self._cache = _AnswerCache(self.limits.cached_queries)
            self._start_workers()
        self.searchable = searchable

    async def run_on_device(self, model: Served, function: Callable[[], T]) -> T:
        """Run a function between two batches, in the thread that encodes on a model's device.

        Args:
            model: the model, which only this worker may use.
            function: the function.

        Raises:
            MissingDocumentError: if the function raises it. Other errors become a ``ServeError``.
        """

        def run() -> T | MissingDocumentError:
            try:
                return function()
            except MissingDocumentError as error:  # the worker would replace it by a ServeError
                return error

        answer = await self._workers[model.device].submit(_FUNCTION_KEY, run, tokens=0)
        value: T | MissingDocumentError = answer.value
        if isinstance(value, MissingDocumentError):
            raise value
        return value

    def acquire_inputs(
        self,
        inputs: Sequence[object],
        name: str = "inputs",
    ) -> AbstractContextManager[None]:
        """Return a context in which inputs of a request count as being encoded.

        The service limits the number of inputs that are encoded or wait (``input_limit``).

        Args:
            inputs: inputs of a request.
            name: field of the request, for error messages.

        Raises:
            ServeError: if there are no inputs, or too many for a request or for the limit.
        """
        if not inputs:
            raise ServeError("Empty", f"`{name}` cannot be empty")
        self.check_batch_size(inputs)
        return self.input_limit.acquire(len(inputs))

    def check_batch_size(self, inputs: Sequence[object]) -> None:
        """Raise ``ServeError`` if a request has too many inputs."""
        limit = self.limits.max_client_batch_size
        if len(inputs) > limit:
            message = f"batch size {len(inputs)} > maximum allowed batch size {limit}"
            raise ServeError("Validation", message, label="batch_size")

    async def encode(
        self,
        model: Served,
        inputs: Sequence[Input],
        options: EncodeOptions,
    ) -> Outcome:
        """Encode inputs; equal inputs are encoded once.

        The caller must have counted the inputs in ``input_limit``, for example with
        :meth:`acquire_inputs`. Cancelling drops the inputs that still wait.

        Args:
            model: the model.
            inputs: texts or token ids.
            options: how the inputs are encoded.

        Returns:
            The encoded inputs, with counts and durations.
        """
        key = model.batch_key(
            options.side,
            options.prompt_name,
            options.truncation_side,
            options.normalize,
        )
        limit = model.limit(key.side)
        outcome = Outcome(characters=sum(map(len, inputs)))
        truncate = self.limits.auto_truncate if options.truncate is None else options.truncate
        shortened = inputs
        if truncate:
            # The tokenizer truncates to the limit of tokens, but would first read all of the text.
            shortened = _shorten(inputs, limit, options.truncation_side)
        if options.counted:
            self.metrics.count(f"te_{options.counted}_count", len(shortened))
        full_lengths = await self._check_and_count_tokens(model, key, shortened, truncate)
        _report_truncated(inputs, shortened, full_lengths, limit)
        lengths = [min(length, limit) for length in full_lengths]
        outcome.tokens = sum(lengths)
        outcome.tokenization = time.perf_counter() - outcome.started
        answers_by_input = await self._encode_distinct(
            model,
            key,
            dict(zip(shortened, lengths, strict=True)),
        )
        answers = [answers_by_input[item] for item in shortened]
        outcome.set_answers(answers)
        if options.counted:
            self._record_inputs(options.counted, outcome.tokenization, answers)
        return outcome

    async def encode_all(
        self,
        model: Served,
        inputs: Sequence[Input | ImageData | ImageInput],
        options: EncodeOptions,
    ) -> Outcome:
        """Encode texts, token ids and images; equal inputs are encoded once.

        Args:
            model: the model.
            inputs: texts, token ids or images.
            options: how the inputs are encoded.

        Returns:
            The encoded inputs in their order, with counts and durations.

        Raises:
            ServeError: if there is an image, and the model reads texts only.
        """
        images = [item for item in inputs if isinstance(item, ImageData | ImageInput)]
        others = [item for item in inputs if not isinstance(item, ImageData | ImageInput)]
        if not images:
            return await self.encode(model, others, options)
        image_outcome = await self.encode_images(model, images, options)
        if not others:
            return image_outcome
        outcome = await self.encode(model, others, options)
        image_rows = iter(image_outcome.rows)
        other_rows = iter(outcome.rows)
        rows = [
            next(image_rows if isinstance(item, ImageData | ImageInput) else other_rows)
            for item in inputs
        ]
        return Outcome(
            rows=rows,
            characters=outcome.characters,
            tokens=outcome.tokens + image_outcome.tokens,
            started=image_outcome.started,
            tokenization=outcome.tokenization + image_outcome.tokenization,
            queue=_weighted_mean(image_outcome.queue, len(images), outcome.queue, len(others)),
            inference=_weighted_mean(
                image_outcome.inference,
                len(images),
                outcome.inference,
                len(others),
            ),
        )

    async def encode_images(
        self,
        model: Served,
        images: Sequence[ImageData | ImageInput],
        options: EncodeOptions,
    ) -> Outcome:
        """Decode and encode images; equal images are encoded once.

        Images are decoded in threads, so that neither requests of texts nor the device wait.
        The caller must have counted the images in ``input_limit``.

        Args:
            model: the model.
            images: the images, which may have been decoded before.
            options: how the images are encoded.

        Returns:
            Token vectors of each image, with counts and durations.

        Raises:
            ServeError: if the model reads texts only, an image cannot be decoded, or the images
                have too many pixels, alone or together with those that are being encoded.
        """
        if not model.takes_images:
            raise wrong_model_error(
                f"the model {model.name} ({model.kind}) reads texts, and no images: start the "
                "server with a model of page images, such as ColPali, as --model",
            )
        key = model.batch_key(options.side, options.prompt_name)._replace(has_images=True)
        outcome = Outcome()
        if options.counted:
            self.metrics.count(f"te_{options.counted}_count", len(images))
        with self.pixel_limit.acquire(await self._count_pixels(images)):
            decoded = await self._decode_images(images)
            # The keys are the distinct images: images with the same digest are equal.
            length_of_image = {image: model.image_tokens(image) for image in decoded}
            outcome.tokens = sum(length_of_image[image] for image in decoded)
            outcome.tokenization = time.perf_counter() - outcome.started
            worker = self._workers[model.device]
            has_several = len(length_of_image) > 1
            futures = [
                worker.submit(key, image, length, position, multi_input=has_several)
                for position, (image, length) in enumerate(length_of_image.items())
            ]
            answer_of_image: dict[ImageInput, Answer] = dict(
                zip(length_of_image, await gather_or_cancel(futures), strict=True),
            )
        answers = [answer_of_image[image] for image in decoded]
        outcome.set_answers(answers)
        if options.counted:
            self._record_inputs(options.counted, outcome.tokenization, answers)
        return outcome

    async def _count_pixels(self, images: Sequence[ImageData | ImageInput]) -> int:
        """Return the number of pixels of all images that must be decoded.

        Args:
            images: the images of a request.

        Raises:
            ServeError: if an image cannot be opened, or they have more pixels than the limit.
        """
        limit = self.limits.max_image_pixels
        n_pixels = 0
        for image in images:
            if isinstance(image, ImageData):
                n_pixels += await self.run_in_thread(count_pixels, image, limit, pool="tokenizers")
        if n_pixels > self.pixel_limit.total:
            raise ServeError(
                "Validation",
                f"the images of the request have {n_pixels} pixels, more than the limit of "
                f"{self.pixel_limit.total}; send them in several requests",
                status=413,
            )
        return n_pixels

    async def _decode_images(
        self,
        images: Sequence[ImageData | ImageInput],
    ) -> list[ImageInput]:
        """Decode the images that have not been decoded before.

        Args:
            images: the images of a request.

        Raises:
            ServeError: if an image is damaged.
        """
        limit = self.limits.max_image_pixels
        decoded: list[ImageInput] = []
        for image in images:
            if isinstance(image, ImageInput):
                decoded.append(image)
            else:
                decoded.append(
                    await self.run_in_thread(decode_image, image, limit, pool="tokenizers"),
                )
        return decoded

    async def _encode_distinct(
        self,
        model: Served,
        key: BatchKey,
        lengths: Mapping[Input, int],
    ) -> dict[Input, Answer]:
        """Encode distinct inputs with the batch worker, unless the cache has them.

        Args:
            model: the model.
            key: batch key of the texts among the inputs.
            lengths: input -> its number of tokens.

        Returns:
            Input -> its answer.
        """
        # Another generation may take over, with a cache of its own, before the inputs are encoded.
        # Answers of the old model in the new cache would keep that model in memory.
        cache = self._cache
        answers: dict[Input, Answer] = {}
        new_lengths: dict[Input, int] = {}
        for item, length in lengths.items():
            cached = cache.get(key, item)
            if cached is None:
                new_lengths[item] = length
            else:
                self.metrics.count("tilefold_cached_count")
                answers[item] = cached
        at_once = self._may_run_at_once(model, key, new_lengths)
        worker = self._workers[model.device]
        futures = []
        for position, (item, length) in enumerate(new_lengths.items()):
            future = worker.submit(
                key if isinstance(item, str) else key._replace(has_token_ids=True),
                item,
                length,
                position,
                multi_input=len(new_lengths) > 1,
                at_once=at_once,
            )
            futures.append(future)
        new_answers = dict(zip(new_lengths, await gather_or_cancel(futures), strict=True))
        cache.put(key, new_answers)
        answers.update(new_answers)
        return answers

    def _may_run_at_once(
        self,
        model: Served,
        key: BatchKey,
        lengths: Mapping[Input, int],
    ) -> bool:
        """Return whether inputs may be encoded on the event loop, instead of by the batch worker.

        For a single short text this is faster than waking the worker's thread. It delays nobody if
        there is no other request. The text must be quick: a CUDA graph encodes it, which is not
        used for vectors that are not normalised.

        Args:
            model: the model.
            key: batch key of the texts among the inputs.
            lengths: input -> its number of tokens.
        """
        if len(lengths) != 1 or not key.normalize or not self.is_only_request():
            return False
        ((item, length),) = lengths.items()  # the only input
        return isinstance(item, str) and model.is_quick(length)

    def _record_inputs(
        self,
        counted: Literal["embed", "predict"],
        tokenization: float,
        answers: Sequence[Answer],
    ) -> None:
        """Add encoded inputs and their durations to the metrics.

        Args:
            counted: which metrics: ``"embed"`` for inputs whose vectors are returned, ``"predict"``
                for texts that are scored with a query.
            tokenization: seconds that tokenization of the whole request took.
            answers: the answer for each input, with its seconds in the queue and in the model.
        """
        self.metrics.count(f"te_{counted}_success", len(answers))
        for answer in answers:
            durations = Durations(
                total=tokenization + answer.queue + answer.inference,
                tokenization=tokenization,
                queue=answer.queue,
                inference=answer.inference,
            )
            self.metrics.observe_durations(counted, durations)

    def check_size(
        self,
        inputs: Sequence[Sized],
        model: Served | None,
        side: Side,
        name: str = "inputs",
    ) -> None:
        """Refuse inputs that are too long to be tokenized.

        Args:
            inputs: texts or lists of token ids.
            model: model whose limit of tokens applies; ``None`` for a server without a model.
            side: side of the inputs.
            name: field of the request, for the error message.

        Raises:
            ServeError: if the inputs have, altogether, more than 250 characters or token ids for
                each token of the model's limit, like text-embeddings-inference.
        """
        max_length = model.limit(side) if model else _DEFAULT_MAX_LENGTH
        max_size = _CHARACTERS_PER_TOKEN * max_length
        size = sum(map(len, inputs))
        if size > max_size:
            in_all = " in all" if len(inputs) > 1 else ""
            unit = "characters" if isinstance(inputs[0], str) else "token ids"
            # The message, which says "less than" although `max_size` is allowed, is the one of
            # text-embeddings-inference.
            raise invalid_input_error(
                f"`{name}` must have less than {max_size} {unit}{in_all}. Given: {size}",
                label="tokenization",
            )

    async def _check_and_count_tokens(
        self,
        model: Served,
        key: BatchKey,
        inputs: Sequence[Input],
        truncate: bool,
    ) -> list[int]:
        """Check the sizes of inputs, and return their numbers of tokens before truncation.

        Args:
            model: the model that encodes the inputs.
            key: encoding of the texts, which includes their prompt.
            inputs: texts or token ids.
            truncate: whether inputs over the model's limit are allowed.

        Raises:
            ServeError: if an input is empty, or over the limit and may not be truncated.
        """
        if not all(inputs):
            raise empty_input_error("inputs")
        for item in inputs:
            self.check_size([item], model, key.side)
        texts = [item for item in inputs if isinstance(item, str)]
        text_lengths = await self._count_tokens(model, key, texts)
        length_of_text = dict(zip(texts, text_lengths, strict=True))
        lengths = [length_of_text[item] if isinstance(item, str) else len(item) for item in inputs]
        self.metrics.observe("te_request_input_length", *lengths)
        limit = model.limit(key.side)
        if not truncate and max(lengths) > limit:
            # The message, which says "less than" although `limit` is allowed, is the one of
            # text-embeddings-inference.
            raise invalid_input_error(
                f"`inputs` must have less than {limit} tokens. Given: {max(lengths)}",
                label="tokenization",
            )
        return lengths

    async def _count_tokens(
        self,
        model: Served,
        key: BatchKey,
        texts: Sequence[str],
    ) -> list[int]:
        """Return the number of tokens of each text with its prompt, before truncation.

        A small text is counted together with the small texts of concurrent requests.

        Args:
            model: the model whose tokenizer counts.
            key: encoding of the texts, which includes their prompt.
            texts: the texts of a request.
        """
        count_tokens = functools.partial(model.lengths, key)
        is_small_text = len(texts) == 1 and len(texts[0]) <= _SMALL_SIZE
        if is_small_text and not self.is_only_request():
            return [await self._text_counter.count(count_tokens, key, texts[0])]
        return await self.map_items(texts, count_tokens)

    def _run_batch(self, key: BatchKey | str, payloads: list[Any]) -> list[Any]:
        """Encode inputs, or call functions, in the batch worker of a device.

        Args:
            key: encoding of the inputs, or ``_FUNCTION_KEY``.
            payloads: the inputs, or the functions.
        """
        if isinstance(key, str):
            return [function() for function in payloads]
        return key.model.encode(key, payloads)

    def record(self, outcome: Outcome, method: str) -> None:
        """Add an answered request and its durations to the metrics.

        Args:
            outcome: outcome of the request, with its durations.
            method: ``"single"`` for one input, or ``"batch"`` for a list; a label of the metrics.
        """
        durations = Durations(
            total=time.perf_counter() - outcome.started,
            tokenization=outcome.tokenization,
            queue=outcome.queue,
            inference=outcome.inference,
        )
        self.metrics.count("te_request_success", method=method)
        self.metrics.observe_durations("request", durations)

    def log_failure(self, error: BaseException) -> None:
        """Log an unexpected error with its traceback."""
        _logger.error("a request failed: %s", type(error).__name__, exc_info=error)


def _weighted_mean(first: float, n_first: int, second: float, n_second: int) -> float:
    """Return the mean over the inputs of two groups.

    Args:
        first: mean of the first group.
        n_first: number of inputs of the first group.
        second: mean of the second group.
        n_second: number of inputs of the second group.
    """
    return (first * n_first + second * n_second) / (n_first + n_second)


def _closing_error() -> ServeError:
    """Return the error for a request that a closing service refuses."""
    return ServeError("Unhealthy", "the service is closing")


def _shorten(
    inputs: Sequence[Input],
    limit: int,
    truncation_side: Literal["left", "right"],
) -> list[Input]:
    """Shorten very long inputs to a size that the tokenizer reads in a limited time.

    At most 250 characters are kept for each token of the model's limit, like in
    text-embeddings-inference. The same bound on token ids is always above the limit of tokens.

    Args:
        inputs: texts or token ids.
        limit: largest number of tokens that the model reads.
        truncation_side: end from which inputs are shortened.
    """
    max_size = _CHARACTERS_PER_TOKEN * limit
    if truncation_side == "right":
        return [item[:max_size] for item in inputs]
    return [item[-max_size:] for item in inputs]


def _report_truncated(
    inputs: Sequence[Input],
    shortened: Sequence[Input],
    lengths: Sequence[int],
    limit: int,
) -> None:
    """Add the number of truncated inputs to ``truncation_counts``, if the response reports it.

    An input is truncated if its characters were shortened, or if it has more tokens than the limit.

    Args:
        inputs: the inputs of the request.
        shortened: the same inputs, of which very long ones were shortened by :func:`_shorten`.
        lengths: number of tokens of each shortened input.
        limit: largest number of tokens that the model reads.
    """
    counts = truncation_counts.get()
    if counts is None:
        return
    n_truncated = sum(
        length > limit or len(shortened_item) < len(item)
        for item, shortened_item, length in zip(inputs, shortened, lengths, strict=True)
    )
    counts.append(n_truncated)


async def gather_or_cancel(futures: Sequence[asyncio.Future[T]]) -> list[T]:
    """Await futures, and return their results in order.

    If one fails, or the caller is cancelled, the others are cancelled and awaited before the error
    is raised.
    """
    if len(futures) == 1:  # faster for the usual request; cancelling the caller cancels the future
        return [await futures[0]]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


def _portions(items: Sequence[T], size: Callable[[Any], int]) -> Iterator[list[T]]:
    """Split items into consecutive portions whose total size is at most :data:`MAX_PORTION_SIZE`.

    A larger item is a portion by itself.

    Args:
        items: the items.
        size: function that returns the size of an item.
    """
    portion: list[T] = []
    portion_size = 0
    for item in items:
        item_size = size(item)
        if portion and portion_size + item_size > MAX_PORTION_SIZE:
            yield portion
            portion = []
            portion_size = 0
        portion.append(item)
        portion_size += item_size
    if portion:
        yield portion
