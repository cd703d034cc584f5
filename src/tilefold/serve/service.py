"""A service: models with their queues, permits, and the path of a request through both."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.serve.batching import Answer, Lane, Metrics, Permits
from tilefold.serve.bodies import ServeError, empty, invalid, wrong_model
from tilefold.serve.models import SIDES, Kind, Served, Side, Way
from tilefold.serve.settings import Limits

if TYPE_CHECKING:
    from tilefold.serve.searchable import Searchable

__all__ = ["Asked", "Outcome", "Service", "cut_inputs"]

R = TypeVar("R")
T = TypeVar("T")
Input = str | tuple[int, ...]
"""A text, or token ids."""
cut_inputs: ContextVar[list[int] | None] = ContextVar("tilefold_cut_inputs", default=None)
"""How many inputs were cut, by what encoded them for the request that is being answered."""
_CALL = "call"  # the key of payloads that are functions
_CHARACTERS_PER_TOKEN = (
    250  # of text-embeddings-inference; more than that many per token of a model are not read
)
_NO_MODEL = 512  # tokens that a query of a server without a model may have
PORTION = (
    16_384  # characters, tokens or numbers that a thread works on before others have their turn
)
_LITTLE = 1024  # characters, or numbers, of all items together
_SEARCHERS = 4  # searches at once, at least
_LEAVE_SECONDS = 5.0  # for searches that run when the service ends; a Qdrant server may be away
_REMEDIES: dict[Kind, str] = {
    "sparse": "sparse vectors come from a SparseEncoder: start the server with one as --model",
    "multi-vector": "token vectors and reranking come from a multi-vector model: start the server with one as --model",
    "dense": "dense vectors come from a SentenceTransformer: start the server with one as --model",
}


@dataclass(frozen=True)
class Asked:
    """Encoding that a request asks for, by its route and its body."""

    side: Side
    prompt_name: str | None = None
    truncate: bool | None = None
    direction: Literal["left", "right"] = "right"
    normalize: bool = True
    counted: Literal["embed", "predict"] | None = (
        "embed"  # among the metrics of vectors, of pairs of texts, or neither
    )


@dataclass
class Outcome:
    """Rows of a request's inputs, and what they took, for headers and metrics."""

    rows: list[Any] = field(default_factory=list)
    characters: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    tokenization: float = 0.0
    queue: float = 0.0
    inference: float = 0.0

    def headers(self, device: str) -> list[tuple[bytes, bytes]]:
        """Headers of text-embeddings-inference; times in milliseconds."""
        total = b"%.0f" % (1000 * (time.perf_counter() - self.started))
        return [
            (
                b"x-compute-type",
                b"gpu" if device.startswith("cuda") else device.partition(":")[0].encode(),
            ),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-compute-time", total),
            (b"x-total-time", total),
            (b"x-tokenization-time", b"%.0f" % (1000 * self.tokenization)),
            (b"x-queue-time", b"%.0f" % (1000 * self.queue)),
            (b"x-inference-time", b"%.0f" % (1000 * self.inference)),
        ]


class Service:
    """Models, loaded once, at most one of each kind, behind one queue per device, and an index that
    they belong to.

    `default_side` is that of the routes at the root; ``/query`` and ``/document`` have their own.

    Raises:
        ValueError: nothing to serve, two models of one kind, or an unknown side.
    """

    def __init__(
        self,
        models: Sequence[Served],
        limits: Limits | None = None,
        default_side: Side = "document",
        searchable: Searchable | None = None,
    ) -> None:
        if not models and searchable is None:
            raise ValueError("models: expected at least one, or an index, got neither.")
        if default_side not in ("query", "document"):
            raise ValueError(f"default_side: expected 'query' or 'document', got {default_side!r}.")
        self.models: dict[Kind, Served] = {model.kind: model for model in models}
        if len(self.models) < len(models):
            raise ValueError(
                f"models: expected one of a kind, got {', '.join(model.kind for model in models)}.",
            )
        self.limits, self.default_side, self.searchable = (
            limits or Limits(),
            default_side,
            searchable,
        )
        self.metrics, self.permits = Metrics(), Permits(self.limits.max_concurrent_requests)
        self.closing = False
        self.draining = False  # requests are taken, and clients are asked to go elsewhere
        self.alone: Callable[[], bool] = lambda: (
            False
        )  # whether a server has one request in work, and no other
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizers: ThreadPoolExecutor | None = None
        self._searching: set[threading.Thread] = set()
        self._search_turns = asyncio.Semaphore(max(_SEARCHERS, self.limits.tokenization_workers))
        self._lanes: dict[str, Lane] = {}
        self._cache: OrderedDict[tuple[Way, Input], Answer] = (
            OrderedDict()
        )  # used on the event loop only
        self._uncounted: dict[Hashable, list[tuple[str, asyncio.Future[int | None]]]] = {}
        self.known: dict[
            str,
            Callable[[Any], Awaitable[Any]],
        ] = {}  # what answers a POST to a path, once it was found
        self.metrics.gauge("te_queue_size", lambda: sum(map(len, self._lanes.values())))
        self.metrics.gauge("tilefold_inputs_in_flight", lambda: self.permits.taken)

    def warm_up(self) -> None:
        """Encode a word with every model, so that no first request waits for what first calls make;
        on a GPU graphs.
        """
        for model in self.models.values():
            for side in SIDES:
                encode = functools.partial(model.encode, model.way(side, None))
                encode(["a"])
                if (graphs := graphs_of(model.model)) is not None:
                    graphs.warm(encode)

    def start(self) -> None:
        """Start the threads: one per device, and those that help, tokenize and search; also after
        :meth:`close`.
        """
        self.closing = self.draining = False
        self._pool = ThreadPoolExecutor(self.limits.tokenization_workers, "tilefold-helper")
        self._tokenizers = ThreadPoolExecutor(
            self.limits.tokenization_workers,
            "tilefold-tokenizer",
        )
        self._search_turns = asyncio.Semaphore(max(_SEARCHERS, self.limits.tokenization_workers))
        for device in {model.device for model in self.models.values()}:
            self._lanes[device] = Lane(
                device,
                self._run,
                self.limits.max_batch_tokens,
                self.metrics,
            )
            self._lanes[device].start()

    def close(self) -> None:
        """Refuse what waits and end the threads; a search that a server does not answer is left
        behind after 5 s.
        """
        self.closing = True
        for lane in self._lanes.values():
            lane.close()
        for pool in (self._pool, self._tokenizers):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        until = time.monotonic() + _LEAVE_SECONDS
        for thread in list(self._searching):
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._searching):
            logging.getLogger("tilefold.serve").warning(
                "searches that nobody answers were left behind",
            )

    @property
    def healthy(self) -> bool:
        """Whether clients should send requests: the service runs, is not about to end, and every
        worker is alive.
        """
        return (
            self._pool is not None
            and not self.closing
            and not self.draining
            and all(lane.alive for lane in self._lanes.values())
        )

    def model(self, kind: Kind) -> Served:
        """The model of a kind."""
        if kind not in self.models:
            has = (
                " and ".join(f"{model.name} ({model.kind})" for model in self.models.values())
                or "no model"
            )
            raise wrong_model(f"this server has {has}; {_REMEDIES[kind]}")
        return self.models[kind]

    @property
    def first_model(self) -> Served:
        """The model that ``/info``, ``/tokenize`` and ``/decode`` are about."""
        if not self.models:
            raise wrong_model(
                "this server has an index of words, and no model: start it with one as --model",
            )
        return next(iter(self.models.values()))

    async def off_loop(self, work: Callable[..., T], *args: Any, tokenizes: bool = False) -> T:
        """Run something short in a helper thread; ``/tokenize`` and ``/decode`` have threads of
        their own.
        """
        pool = self._tokenizers if tokenizes else self._pool
        if pool is None or self.closing:
            raise ServeError("Unhealthy", "the service is closing")
        return await asyncio.get_running_loop().run_in_executor(
            pool,
            functools.partial(work, *args),
        )

    async def in_portions(
        self,
        items: Sequence[T],
        work: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
        *,
        tokenizes: bool = False,
    ) -> list[R]:
        """Results of `work` for items, portion by portion: other requests have their turn between
        two of them.
        """
        return [
            made
            for part in portions(items, size)
            for made in await self.off_loop(work, part, tokenizes=tokenizes)
        ]

    async def helped(
        self,
        items: Sequence[T],
        work: Callable[[list[T]], list[R]],
        size: Callable[[Any], int] = len,
    ) -> list[R]:
        """Results of `work` by helper threads, or at once where the items are little: to wake one
        would take longer.
        """
        return (
            work(list(items))
            if sum(map(size, items)) <= _LITTLE
            else await self.in_portions(items, work, size)
        )

    async def in_search(self, work: Callable[..., T], *args: Any) -> T:
        """Run a search in a daemon thread: an index on a server may take long, and must hold up
        nothing else.
        """
        loop, turns, found = asyncio.get_running_loop(), self._search_turns, Future[T]()
        await turns.acquire()
        if self._pool is None or self.closing:
            turns.release()
            raise ServeError("Unhealthy", "the service is closing")
        found.set_running_or_notify_cancel()

        def run() -> None:
            try:
                found.set_result(work(*args))
            except BaseException as error:  # belongs to whoever waits
                found.set_exception(error)
            self._searching.discard(thread)
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(turns.release)

        thread = threading.Thread(target=run, name="tilefold-searcher", daemon=True)
        self._searching.add(thread)
        thread.start()
        return await asyncio.wrap_future(found)

    async def on_device(self, model: Served, work: Callable[[], T]) -> T:
        """Run something on the device of a model, in its turn."""
        value: T = (await self._lanes[model.device].submit(_CALL, work, 0)).value
        return value

    def permit(
        self,
        inputs: Sequence[object],
        name: str = "inputs",
    ) -> AbstractContextManager[None]:
        """Hold a permit per input while the ``with`` block runs; see :class:`Permits`."""
        if not inputs:
            raise ServeError("Empty", f"`{name}` cannot be empty")
        self.check_batch(inputs)
        return self.permits.take(len(inputs))

    def check_batch(self, inputs: Sequence[object]) -> None:
        """Raise ``ServeError`` for more inputs than a request may have."""
        given, most = len(inputs), self.limits.max_client_batch_size
        if given > most:
            text = f"batch size {given} > maximum allowed batch size {most}"
            raise ServeError("Validation", text, label="batch_size")

    async def encode(self, kind: Kind, inputs: Sequence[Input], asked: Asked) -> Outcome:
        """One row per input, equal inputs encoded once; the caller holds the permits. Cancelling
        drops what waits.
        """
        model = self.model(kind)
        way = model.way(asked.side, asked.prompt_name, asked.direction, asked.normalize)
        outcome = Outcome(characters=sum(map(len, inputs)))
        limit, given = model.limit(way.side), inputs
        if self._truncates(asked):
            most = _CHARACTERS_PER_TOKEN * limit
            inputs = [
                each[:most] if asked.direction == "right" else each[-most:] for each in inputs
            ]
        if asked.counted:
            self.metrics.count(f"te_{asked.counted}_count", len(inputs))
        found = await self._lengths(model, way, inputs, self._truncates(asked))
        if (cut := cut_inputs.get()) is not None:
            triples = zip(found, inputs, given, strict=True)
            cut.append(
                sum(length > limit or len(kept) < len(whole) for length, kept, whole in triples),
            )
        lengths = [min(length, limit) for length in found]
        outcome.tokens, outcome.tokenization = sum(lengths), time.perf_counter() - outcome.started
        lane = self._lanes[model.device]
        distinct = dict(zip(inputs, lengths, strict=True))
        by_input = {
            each: kept for each in distinct if (kept := self._remembered(way, each)) is not None
        }
        new = (
            {each: length for each, length in distinct.items() if each not in by_input}
            if by_input
            else distinct
        )
        several = len(new) > 1
        at_once = (
            not several
            and self.alone()
            and all(isinstance(each, str) and model.quick(new[each]) for each in new)
        )
        waiting = [
            lane.submit(
                way if isinstance(each, str) else way._replace(ids=True),
                each,
                length,
                place,
                several,
                at_once,
            )
            for place, (each, length) in enumerate(new.items())
        ]
        by_input |= dict(zip(new, await all_of(waiting), strict=True))
        self._remember(way, {each: by_input[each] for each in new})
        answers = [by_input[each] for each in inputs]
        outcome.rows = [answer.value for answer in answers]
        outcome.queue = sum([answer.queue for answer in answers]) / len(answers)
        outcome.inference = sum([answer.inference for answer in answers]) / len(answers)
        if asked.counted:
            self.metrics.count(f"te_{asked.counted}_success", len(answers))
            for each in answers:
                parts = outcome.tokenization, each.queue, each.inference
                self.metrics.durations(f"te_{asked.counted}", sum(parts), *parts)
        return outcome

    def _remembered(self, way: Way, asked: Input) -> Answer | None:
        """The answer to a query that was asked before, if it is kept."""
        if (found := self._cache.get((way, asked))) is not None:
            self._cache.move_to_end((way, asked))
            self.metrics.count("tilefold_cached_count")
        return found

    def _remember(self, way: Way, answers: Mapping[Input, Answer]) -> None:
        """Keep answers to queries, those that were asked last."""
        if way.side == "query" and self.limits.cached_queries:
            self._cache |= {
                (way, asked): Answer(answer.value, 0.0, 0.0) for asked, answer in answers.items()
            }
        while len(self._cache) > self.limits.cached_queries:
            self._cache.popitem(last=False)

    def check_size(
        self,
        inputs: Sequence[Sized],
        model: Served | None,
        side: Side,
        name: str = "inputs",
    ) -> None:
        """Refuse more characters or ids than text-embeddings-inference tokenizes: 250 per token of
        the model.
        """
        most = _CHARACTERS_PER_TOKEN * (model.limit(side) if model else _NO_MODEL)
        if (given := sum(map(len, inputs))) > most:
            several = " in all" if len(inputs) > 1 else ""
            what = "characters" if isinstance(inputs[0], str) else "token ids"
            raise invalid(
                f"`{name}` must have less than {most} {what}{several}. Given: {given}",
                label="tokenization",
            )

    def _truncates(self, asked: Asked) -> bool:
        return self.limits.auto_truncate if asked.truncate is None else asked.truncate

    async def _lengths(
        self,
        model: Served,
        way: Way,
        inputs: Sequence[Input],
        truncate: bool,
    ) -> list[int]:
        """Tokens of each input."""
        if not all(inputs):
            raise empty("inputs")
        limit = model.limit(way.side)
        for each in inputs:
            self.check_size([each], model, way.side)
        texts = [each for each in inputs if isinstance(each, str)]
        lengths = functools.partial(model.lengths, way)
        if len(texts) == 1 and len(texts[0]) <= _LITTLE and not self.alone():
            counts = iter([await self._counted(lengths, way, texts[0])])
        else:
            counts = iter(await self.helped(texts, lengths))
        found = [next(counts) if isinstance(each, str) else len(each) for each in inputs]
        self.metrics.observe("te_request_input_length", *found)
        if not truncate and max(found) > limit:
            raise invalid(
                f"`inputs` must have less than {limit} tokens. Given: {max(found)}",
                label="tokenization",
            )
        return found

    async def _counted(
        self,
        lengths: Callable[[list[str]], list[int]],
        key: Hashable,
        text: str,
    ) -> int:
        """Tokens of a text; texts that come in one turn of the event loop are shared among the
        tokenizer's threads.
        """
        loop = asyncio.get_running_loop()
        asked = self._uncounted.setdefault(key, [])

        def count() -> None:
            del self._uncounted[key]
            try:
                found: Sequence[int | None] = lengths([text for text, _ in asked])
            except (
                BaseException
            ):  # of one of them, a panic of the tokenizer too: each is counted by itself
                found = [None] * len(asked)
            for (_, future), length in zip(asked, found, strict=True):
                if not future.done():
                    future.set_result(length)

        future: asyncio.Future[int | None] = loop.create_future()
        if not asked:
            loop.call_soon(count)
        asked.append((text, future))
        length = await future
        return lengths([text])[0] if length is None else length

    def _run(self, key: Way | str, payloads: list[Any]) -> list[Any]:
        """A batch, in the worker thread of a device."""
        return (
            [work() for work in payloads]
            if isinstance(key, str)
            else self.models[key.kind].encode(key, payloads)
        )

    def record(self, outcome: Outcome, method: str) -> None:
        """Note a request that was answered."""
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
        """Write an error that nobody expected to the log."""
        logging.getLogger("tilefold.serve").error(
            "a request failed: %s",
            type(error).__name__,
            exc_info=error,
        )


async def all_of(futures: Sequence[asyncio.Future[T]]) -> list[T]:
    """The results in their order; where one fails, or the client has gone, the others end before
    that is raised.
    """
    if len(futures) == 1:  # which is cancelled with who waits
        return [await futures[0]]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


def portions(items: Sequence[T], size: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Items in their order, as many at a time as have the size of a portion together, and at least
    one.
    """
    portion: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if portion and total > PORTION:
            yield portion
            portion, total = [], size(item)
        portion.append(item)
    if portion:
        yield portion
