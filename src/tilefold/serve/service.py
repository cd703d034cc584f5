"""Service that encodes the inputs of requests with models, batch workers and helper threads."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tilefold._internal.arguments import ArgumentError
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.serve.batching import Answer, BatchWorker, InputLimit, Metrics
from tilefold.serve.bodies import ServeError, empty, invalid, wrong_model
from tilefold.serve.models import SIDES, BatchKey, Kind, Served, Side
from tilefold.serve.settings import Limits

if TYPE_CHECKING:
    from tilefold.serve.searchable import Searchable

__all__ = ["EncodeOptions", "Outcome", "Service", "truncated_inputs"]

R = TypeVar("R")
T = TypeVar("T")
Input = str | tuple[int, ...]
"""A text, or token ids."""
truncated_inputs: ContextVar[list[int] | None] = ContextVar(
    "tilefold_truncated_inputs",
    default=None,
)
"""Numbers of truncated inputs, one for each encoding of the request that is being answered."""

# Batch key of payloads that are functions.
_FUNCTION_KEY = "call"
# Characters per token of a model's limit that are read, as in text-embeddings-inference.
_CHARACTERS_PER_TOKEN = 250
# Largest number of tokens of a query, for a server without a model.
_DEFAULT_MAX_LENGTH = 512
PORTION = 16_384
"""Characters, tokens or numbers that a helper thread processes before it serves other requests."""
# Total of characters or numbers up to which inputs are processed on the event loop.
_SMALL_SIZE = 1024
# Smallest number of concurrent searches.
_MIN_SEARCHES = 4
# Seconds that the last searches have to end. A Qdrant server may be unreachable.
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
        side: encode as queries or as documents.
        prompt_name: name of a prompt of the model; ``None`` takes the prompt of the side.
        truncate: whether inputs over the limit are truncated or refused; ``None`` takes
            ``Limits.auto_truncate``.
        direction: end from which inputs are truncated.
        normalize: whether a dense model normalises its vectors, if it does so by default.
        counted: metrics that count the inputs; ``None`` for no metrics.
    """

    side: Side
    prompt_name: str | None = None
    truncate: bool | None = None
    direction: Literal["left", "right"] = "right"
    normalize: bool = True
    counted: Literal["embed", "predict"] | None = "embed"


@dataclass
class Outcome:
    """Rows of a request's inputs, with counts and durations for headers and metrics.

    Attributes:
        rows: one row per input.
        characters: number of characters, or of token ids.
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

    def headers(self, device: str) -> list[tuple[bytes, bytes]]:
        """Return the headers of text-embeddings-inference, with times in milliseconds.

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


class _AnswerCache:
    """Cache of the answers to the latest queries. Used on the event loop only.

    Args:
        size: largest number of answers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[tuple[BatchKey, Input], Answer] = OrderedDict()

    def get(self, key: BatchKey, query: Input) -> Answer | None:
        """Return the cached answer to a query."""
        answer = self._answers.get((key, query))
        if answer is not None:
            self._answers.move_to_end((key, query))
        return answer

    def put(self, key: BatchKey, answers: Mapping[Input, Answer]) -> None:
        """Cache answers to queries, without their durations; answers to documents are ignored."""
        if key.side == "query" and self._size:
            for query, answer in answers.items():
                self._answers[key, query] = Answer(answer.value, queue=0.0, inference=0.0)
        while len(self._answers) > self._size:
            self._answers.popitem(last=False)


class _TextCounter:
    """Counts tokens of single texts together that arrive in one iteration of the event loop.

    The tokenizer counts several texts in parallel.
    """

    def __init__(self) -> None:
        self._pending: dict[BatchKey, list[tuple[str, asyncio.Future[int | None]]]] = {}

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
            count_tokens: returns the number of tokens of each text.
            key: texts of equal keys are counted together.
            text: text to count.
        """
        loop = asyncio.get_running_loop()
        pending = self._pending.setdefault(key, [])

        def count_pending() -> None:
            del self._pending[key]
            lengths: Sequence[int | None]
            try:
                lengths = count_tokens([pending_text for pending_text, _ in pending])
            except BaseException:
                # One text failed, or made the tokenizer panic. Every waiting request then counts
                # its own text, so that only the request of that text fails.
                lengths = [None] * len(pending)
            for (_, waiting), length in zip(pending, lengths, strict=True):
                if not waiting.done():
                    waiting.set_result(length)

        future: asyncio.Future[int | None] = loop.create_future()
        if not pending:
            loop.call_soon(count_pending)
        pending.append((text, future))
        length = await future
        return count_tokens([text])[0] if length is None else length


class Service:
    """Models with a batch worker per device, and an index that they search.

    Args:
        models: models to serve, at most one of each kind.
        limits: limits of requests; ``None`` takes the defaults.
        default_side: side of the routes at the root; ``/query`` and ``/document`` have their own.
        searchable: index to search.

    Attributes:
        draining: whether requests are still accepted but clients should use another server.
        is_only_request: whether the request that is being answered is the only one.
        handlers: functions that answer a POST, by path, of paths that were requested before.

    Raises:
        ValueError: if there is nothing to serve, for two models of one kind, or for an unknown
            side.
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
            limits: limits of requests; ``None`` takes the defaults.
            default_side: side of the routes at the root.
            searchable: index to search; ``None`` serves models only.
        """
        if not models and searchable is None:
            raise ArgumentError("models", "expected at least one, or an index, got neither.")
        if default_side not in ("query", "document"):
            raise ArgumentError(
                "default_side", f"expected 'query' or 'document', got {default_side!r}."
            )
        self.models: dict[Kind, Served] = {model.kind: model for model in models}
        if len(self.models) < len(models):
            kinds = ", ".join(model.kind for model in models)
            raise ArgumentError("models", f"expected one of a kind, got {kinds}.")
        self.limits = Limits() if limits is None else limits
        self.default_side = default_side
        self.searchable = searchable
        self.metrics = Metrics()
        self.input_limit = InputLimit(self.limits.max_concurrent_requests)
        self.closing = False
        self.draining = False
        self.is_only_request: Callable[[], bool] = lambda: False
        self.handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self._helpers: ThreadPoolExecutor | None = None
        self._tokenizers: ThreadPoolExecutor | None = None
        self._search_threads: set[threading.Thread] = set()
        self._search_slots = self._new_search_slots()
        self._workers: dict[str, BatchWorker] = {}
        self._cache = _AnswerCache(self.limits.cached_queries)
        self._text_counter = _TextCounter()
        self.metrics.gauge("te_queue_size", lambda: sum(map(len, self._workers.values())))
        self.metrics.gauge("tilefold_inputs_in_flight", lambda: self.input_limit.in_use)

    def _new_search_slots(self) -> asyncio.Semaphore:
        """Create the semaphore that limits concurrent searches."""
        return asyncio.Semaphore(max(_MIN_SEARCHES, self.limits.tokenization_workers))

    def warm_up(self) -> None:
        """Encode a word with every model, so that no request waits for lazy initialisation.

        For accelerated models on a GPU, this also captures CUDA graphs of short texts.
        """
        for model in self.models.values():
            for side in SIDES:
                encode = functools.partial(model.encode, model.batch_key(side, None))
                encode(["a"])
                graphs = graphs_of(model.model)
                if graphs is not None:
                    graphs.warm(encode)

    def start(self) -> None:
        """Start the threads: a batch worker per device, helpers and tokenizers.

        A closed service may be started again.
        """
        self.closing = False
        self.draining = False
        n_threads = self.limits.tokenization_workers
        self._helpers = ThreadPoolExecutor(n_threads, "tilefold-helper")
        self._tokenizers = ThreadPoolExecutor(n_threads, "tilefold-tokenizer")
        self._search_slots = self._new_search_slots()
        for device in {model.device for model in self.models.values()}:
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

        Searches that do not end within 5 s, because a server does not answer, are abandoned.
        """
        self.closing = True
        for worker in self._workers.values():
            worker.close()
        for pool in (self._helpers, self._tokenizers):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in list(self._search_threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._search_threads):
            _logger.warning("searches were abandoned, because the server of the index is silent")

    @property
    def healthy(self) -> bool:
        """Whether clients should send requests.

        The service has started, is not about to end, and every batch worker is alive.
        """
        return (
            self._helpers is not None
            and not self.closing
            and not self.draining
            and all(worker.alive for worker in self._workers.values())
        )

    def model(self, kind: Kind) -> Served:
        """Return the model of a kind.

        Raises:
            ServeError: if this server has no such model.
        """
        if kind not in self.models:
            names = [f"{model.name} ({model.kind})" for model in self.models.values()]
            available = " and ".join(names) if names else "no model"
            raise wrong_model(f"this server has {available}; {_REMEDIES[kind]}")
        return self.models[kind]

    @property
    def first_model(self) -> Served:
        """The model of ``/info``, ``/tokenize`` and ``/decode``."""
        if not self.models:
            raise wrong_model(
                "this server has an index of words, and no model: start it with one as --model",
            )
        return next(iter(self.models.values()))

    async def run_in_helper(
        self,
        function: Callable[..., T],
        *arguments: Any,
        tokenizes: bool = False,
    ) -> T:
        """Run a short function in a helper thread.

        Args:
            function: function to run.
            arguments: its arguments.
            tokenizes: use the threads of ``/tokenize`` and ``/decode``.

        Raises:
            ServeError: if the service is closing.
        """
        pool = self._tokenizers if tokenizes else self._helpers
        if pool is None or self.closing:
            raise ServeError("Unhealthy", "the service is closing")
        return await asyncio.get_running_loop().run_in_executor(
            pool,
            functools.partial(function, *arguments),
        )

    async def map_in_portions(
        self,
        items: Sequence[T],
        function: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
        *,
        tokenizes: bool = False,
    ) -> list[R]:
        """Map items in helper threads, portion by portion.

        Other requests are served between two portions.

        Args:
            items: items to map.
            function: returns the results of some items.
            size: size of an item, in characters, tokens or numbers; see :data:`PORTION`.
            tokenizes: use the threads of ``/tokenize`` and ``/decode``.
        """
        results: list[R] = []
        for portion in portions(items, size):
            results += await self.run_in_helper(function, portion, tokenizes=tokenizes)
        return results

    async def map_items(
        self,
        items: Sequence[T],
        function: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
    ) -> list[R]:
        """Map items in helper threads, or directly if they are small.

        Waking a thread takes longer than mapping small items.

        Args:
            items: items to map.
            function: returns one result for each of some items.
            size: size of an item, in characters, tokens or numbers.
        """
        if sum(map(size, items)) <= _SMALL_SIZE:
            return function(list(items))
        return await self.map_in_portions(items, function, size)

    async def run_search(self, search: Callable[..., T], *arguments: Any) -> T:
        """Run a search in a daemon thread of its own.

        An index on a server may take long, and must not hold up anything else. A daemon thread does
        not keep the process alive. A semaphore limits the number of these threads.

        Args:
            search: function that searches.
            arguments: arguments of `search`.

        Raises:
            ServeError: if the service is closing.
        """
        loop = asyncio.get_running_loop()
        slots = self._search_slots
        result = Future[T]()
        await slots.acquire()
        if self._helpers is None or self.closing:
            slots.release()
            raise ServeError("Unhealthy", "the service is closing")
        result.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result.set_result(search(*arguments))
            except BaseException as error:  # is raised where the result is awaited
                result.set_exception(error)
            self._search_threads.discard(thread)
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(slots.release)

        thread = threading.Thread(target=run, name="tilefold-searcher", daemon=True)
        self._search_threads.add(thread)
        thread.start()
        return await asyncio.wrap_future(result)

    async def run_on_device(self, model: Served, function: Callable[[], T]) -> T:
        """Run a function in the batch worker of a model's device."""
        answer = await self._workers[model.device].submit(_FUNCTION_KEY, function, 0)
        value: T = answer.value
        return value

    def acquire_inputs(
        self,
        inputs: Sequence[object],
        name: str = "inputs",
    ) -> AbstractContextManager[None]:
        """Hold a permit per input in a ``with`` block; see :class:`InputLimit`.

        Args:
            inputs: inputs of a request.
            name: field of the request, for error messages.

        Raises:
            ServeError: for no inputs, or for too many.
        """
        if not inputs:
            raise ServeError("Empty", f"`{name}` cannot be empty")
        self.check_batch_size(inputs)
        return self.input_limit.acquire(len(inputs))

    def check_batch_size(self, inputs: Sequence[object]) -> None:
        """Raise ``ServeError`` for more inputs than a request may have."""
        limit = self.limits.max_client_batch_size
        if len(inputs) > limit:
            message = f"batch size {len(inputs)} > maximum allowed batch size {limit}"
            raise ServeError("Validation", message, label="batch_size")

    async def encode(
        self,
        kind: Kind,
        inputs: Sequence[Input],
        options: EncodeOptions,
    ) -> Outcome:
        """Encode inputs; equal inputs are encoded once.

        The caller holds the permits. Cancelling drops the inputs that still wait.

        Args:
            kind: kind of the model.
            inputs: texts or token ids.
            options: how they are encoded.

        Returns:
            One row per input, with counts and durations.
        """
        model = self.model(kind)
        key = model.batch_key(
            options.side,
            options.prompt_name,
            options.direction,
            options.normalize,
        )
        outcome = Outcome(characters=sum(map(len, inputs)))
        truncate = self.limits.auto_truncate if options.truncate is None else options.truncate
        readable = inputs
        if truncate:
            readable = _readable_part(inputs, model.limit(key.side), options.direction)
        if options.counted:
            self.metrics.count(f"te_{options.counted}_count", len(readable))
        full_lengths = await self._count_tokens(model, key, readable, truncate)
        limit = model.limit(key.side)
        _report_truncated(inputs, readable, full_lengths, limit)
        lengths = [min(length, limit) for length in full_lengths]
        outcome.tokens = sum(lengths)
        outcome.tokenization = time.perf_counter() - outcome.started
        answers_by_input = await self._answer_distinct(
            model,
            key,
            dict(zip(readable, lengths, strict=True)),
        )
        answers = [answers_by_input[item] for item in readable]
        outcome.rows = [answer.value for answer in answers]
        outcome.queue = sum(answer.queue for answer in answers) / len(answers)
        outcome.inference = sum(answer.inference for answer in answers) / len(answers)
        if options.counted:
            self._record_inputs(options.counted, outcome.tokenization, answers)
        return outcome

    async def _answer_distinct(
        self,
        model: Served,
        key: BatchKey,
        lengths: Mapping[Input, int],
    ) -> dict[Input, Answer]:
        """Answer distinct inputs from the cache, or by the batch worker.

        Args:
            model: model that encodes.
            key: batch key of texts.
            lengths: number of tokens of each input.

        Returns:
            Input -> its answer.
        """
        answers: dict[Input, Answer] = {}
        new_lengths: dict[Input, int] = {}
        for item, length in lengths.items():
            cached = self._cache.get(key, item)
            if cached is None:
                new_lengths[item] = length
            else:
                self.metrics.count("tilefold_cached_count")
                answers[item] = cached
        multi_input = len(new_lengths) > 1
        # A short text of the only request runs on the event loop: waking the worker takes longer.
        at_once = (
            not multi_input
            and self.is_only_request()
            and all(
                isinstance(item, str) and model.is_quick(length)
                for item, length in new_lengths.items()
            )
        )
        worker = self._workers[model.device]
        futures = []
        for position, (item, length) in enumerate(new_lengths.items()):
            item_key = key if isinstance(item, str) else key._replace(ids=True)
            future = worker.submit(item_key, item, length, position, multi_input, at_once)
            futures.append(future)
        new_answers = dict(zip(new_lengths, await all_of(futures), strict=True))
        self._cache.put(key, new_answers)
        answers.update(new_answers)
        return answers

    def _record_inputs(
        self,
        counted: Literal["embed", "predict"],
        tokenization: float,
        answers: Sequence[Answer],
    ) -> None:
        """Count encoded inputs and their durations in the metrics.

        Args:
            counted: metrics that count the inputs.
            tokenization: seconds of tokenization of the request.
            answers: one answer per input.
        """
        self.metrics.count(f"te_{counted}_success", len(answers))
        for answer in answers:
            total = tokenization + answer.queue + answer.inference
            self.metrics.durations(
                f"te_{counted}",
                total,
                tokenization,
                answer.queue,
                answer.inference,
            )

    def check_size(
        self,
        inputs: Sequence[Sized],
        model: Served | None,
        side: Side,
        name: str = "inputs",
    ) -> None:
        """Refuse more characters or token ids than text-embeddings-inference tokenizes.

        Args:
            inputs: texts or lists of token ids.
            model: model whose limit of tokens applies; ``None`` for a server without one.
            side: side of the inputs.
            name: field of the request, for the error message.

        Raises:
            ServeError: for more than 250 per token of the limit.
        """
        max_length = model.limit(side) if model else _DEFAULT_MAX_LENGTH
        max_size = _CHARACTERS_PER_TOKEN * max_length
        size = sum(map(len, inputs))
        if size > max_size:
            in_all = " in all" if len(inputs) > 1 else ""
            unit = "characters" if isinstance(inputs[0], str) else "token ids"
            raise invalid(
                f"`{name}` must have less than {max_size} {unit}{in_all}. Given: {size}",
                label="tokenization",
            )

    async def _count_tokens(
        self,
        model: Served,
        key: BatchKey,
        inputs: Sequence[Input],
        truncate: bool,
    ) -> list[int]:
        """Return the number of tokens of each input, before truncation.

        Args:
            model: model whose tokenizer counts.
            key: encoding of the texts, which includes their prompt.
            inputs: texts, or token ids, which are their own tokens.
            truncate: whether inputs over the model's limit are allowed.

        Raises:
            ServeError: for an empty input, or for one over the limit if it may not be truncated.
        """
        if not all(inputs):
            raise empty("inputs")
        for item in inputs:
            self.check_size([item], model, key.side)
        texts = [item for item in inputs if isinstance(item, str)]
        count_tokens = functools.partial(model.lengths, key)
        # Small texts of concurrent requests are counted together, in one call of the tokenizer.
        is_small_text = len(texts) == 1 and len(texts[0]) <= _SMALL_SIZE
        if is_small_text and not self.is_only_request():
            text_lengths = [await self._text_counter.count(count_tokens, key, texts[0])]
        else:
            text_lengths = await self.map_items(texts, count_tokens)
        # Text lengths and lengths of token ids in the order of the inputs.
        remaining_text_lengths = iter(text_lengths)
        lengths = [
            next(remaining_text_lengths) if isinstance(item, str) else len(item) for item in inputs
        ]
        self.metrics.observe("te_request_input_length", *lengths)
        limit = model.limit(key.side)
        if not truncate and max(lengths) > limit:
            raise invalid(
                f"`inputs` must have less than {limit} tokens. Given: {max(lengths)}",
                label="tokenization",
            )
        return lengths

    def _run_batch(self, key: BatchKey | str, payloads: list[Any]) -> list[Any]:
        """Encode inputs, or call functions; runs in the batch worker of a device."""
        if isinstance(key, str):
            return [function() for function in payloads]
        return self.models[key.kind].encode(key, payloads)

    def record(self, outcome: Outcome, method: str) -> None:
        """Count an answered request and its durations in the metrics.

        Args:
            outcome: durations of the request.
            method: ``"single"`` for one input, or ``"batch"`` for a list; a label of the metrics.
        """
        total = time.perf_counter() - outcome.started
        self.metrics.count("te_request_success", method=method)
        self.metrics.durations(
            "te_request",
            total,
            outcome.tokenization,
            outcome.queue,
            outcome.inference,
        )

    def log_failure(self, error: BaseException) -> None:
        """Log an unexpected error with its traceback."""
        _logger.error("a request failed: %s", type(error).__name__, exc_info=error)


def _readable_part(
    inputs: Sequence[Input],
    limit: int,
    direction: Literal["left", "right"],
) -> list[Input]:
    """Shorten inputs to the characters or token ids that may matter before truncation.

    The tokenizer reads at most 250 characters per token of the model's limit, as in
    text-embeddings-inference.

    Args:
        inputs: texts or token ids.
        limit: largest number of tokens that the model reads.
        direction: end from which inputs are shortened.
    """
    size = _CHARACTERS_PER_TOKEN * limit
    if direction == "right":
        return [item[:size] for item in inputs]
    return [item[-size:] for item in inputs]


def _report_truncated(
    inputs: Sequence[Input],
    readable: Sequence[Input],
    lengths: Sequence[int],
    limit: int,
) -> None:
    """Add the number of truncated inputs to ``truncated_inputs``, if the request reports it.

    Args:
        inputs: the inputs of the request.
        readable: the inputs after :func:`_readable_part`.
        lengths: number of tokens of each readable input.
        limit: largest number of tokens that the model reads.
    """
    counts = truncated_inputs.get()
    if counts is None:
        return
    n_truncated = 0
    for full, read, length in zip(inputs, readable, lengths, strict=True):
        if length > limit or len(read) < len(full):
            n_truncated += 1
    counts.append(n_truncated)


async def all_of(futures: Sequence[asyncio.Future[T]]) -> list[T]:
    """Await futures, and return their results in order.

    If one fails, or if the caller is cancelled, the others are cancelled and have ended before the
    error is raised.
    """
    if len(futures) == 1:  # a future that is awaited directly is cancelled with its caller
        return [await futures[0]]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


def portions(items: Sequence[T], size: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Split items into consecutive portions of at most :data:`PORTION`, or of a single item.

    Args:
        items: items to split.
        size: size of an item.
    """
    portion: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if portion and total > PORTION:
            yield portion
            portion = []
            total = size(item)
        portion.append(item)
    if portion:
        yield portion
