"""Following an index folder: another generation is opened next to the served one and takes over."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tilefold._internal.memory import drop_memory, free_device_bytes, memory_left
from tilefold.retrieval.common.files import FileIdentity
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.generations import (
    IndexGeneration,
    open_current,
    opening_memory,
    read_generation,
    verify_files,
)
from tilefold.retrieval.index.opening import gpus_of, mapped_tensors, opened_parts
from tilefold.serve.bodies import ServeError
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.threads import switch_interval

__all__ = ["IndexFollower", "IndexSource", "Refusal"]

# Time after which a refused generation is tried again: memory may be free by then.
_RETRY_SECONDS = 30.0
# Share of the free memory that a new generation may take.
_MEMORY_SHARE = 0.9
# Dense indexes of which a copy takes half of the GPU's free memory stay on the CPU.
_DEVICE_MEMORY_SHARE = 0.5
# Interval of Python's thread switches while a generation is opened. Loading a model computes in
# Python for seconds, and requests must not wait for it.
_SWITCH_SECONDS = 0.0001
# Time until references to a deleted generation are gone.
_DROP_SECONDS = 1.0
# Time between two looks for a requested reload, if the folder is not watched.
_REQUEST_SECONDS = 1.0

# A logger of its own, so that `tilefold serve` can show its messages of level INFO.
_logger = logging.getLogger("tilefold.serve.following")


@dataclass(frozen=True)
class IndexSource:
    """Where the generations (committed states) of a served index come from.

    Attributes:
        path: the folder of the index.
        open: function that opens the current generation with everything that belongs to it. It gets
            the served generation, whose models it may reuse, and the id of the new generation. It
            is called in a thread.
        watch_seconds: time between two looks at the folder; 0 opens another generation on request
            only.
    """

    path: Path
    open: Callable[[Searchable, str], Searchable]
    watch_seconds: float = 1.0


@dataclass(frozen=True)
class Refusal:
    """A generation (committed state) of the index that was not opened in place of the served one.

    Attributes:
        generation: id of the generation; ``None`` if it could not be read.
        reason: what was wrong.
        time: ``time.monotonic()`` of the refusal.
    """

    generation: str | None
    reason: str
    time: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _OpenedGeneration:
    """A generation of the index that was opened and is not served yet.

    Attributes:
        generation: the generation.
        searchable: the index with everything that belongs to it.
        files: its files, whose checksums were compared.
    """

    generation: IndexGeneration
    searchable: Searchable
    files: set[FileIdentity]


class IndexFollower:
    """Keeps a service at the current generation of its index folder.

    A generation is a committed state of the index. A new one is opened in a thread: its checksums
    are compared, and it is searched once. Then it replaces the served one between two requests. A
    generation that cannot be opened, or for which there is no memory, is refused, and the served
    one stays.

    Attributes:
        service: the service. Its ``searchable`` is the served generation.
        source: where generations come from.
        n_segments: number of segments of the served generation.
        refusal: the last refusal; ``None`` once a generation has taken over since.
    """

    def __init__(self, service: Service, source: IndexSource, generation: IndexGeneration) -> None:
        """Prepare to follow an index; :meth:`start` starts to watch the folder.

        Args:
            service: service whose ``searchable`` was opened from the source.
            source: where generations come from.
            generation: the generation that the service has opened.
        """
        self.service = service
        self.source = source
        self.n_segments = generation.n_segments
        self.refusal: Refusal | None = None
        self._verified_files: set[FileIdentity] = set()
        self._open_generations: weakref.WeakSet[Searchable] = weakref.WeakSet()
        if service.searchable is not None:
            self._open_generations.add(service.searchable)
        self._lock = asyncio.Lock()
        self._is_reload_requested = False
        self._watching: asyncio.Task[None] | None = None
        self._watch_failure: str | None = None  # the last unexpected error, which is logged once
        service.follower = self
        metrics = service.metrics
        metrics.label("tilefold_index_generation", "generation", lambda: self.generation or "")
        metrics.gauge(
            "tilefold_index_open_generations",
            lambda: float(len(self._open_generations)),
        )

    @property
    def served(self) -> Searchable:
        """The served generation of the index."""
        searchable = self.service.searchable
        if searchable is None:
            raise ServeError("Backend", "this server has no index")
        return searchable

    @property
    def generation(self) -> str | None:
        """Id of the served generation."""
        return self.served.generation

    def info(self) -> dict[str, object]:
        """Describe the served generation and the refused one, for ``/info``."""
        return {
            "name": self.served.name,
            "generation": self.generation,
            "segments": self.n_segments,
            "refused_generation": None if self.refusal is None else self.refusal.generation,
        }

    def start(self) -> None:
        """Start to watch the folder, on the event loop of the server."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching the folder. A generation that is being opened is abandoned."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None

    def request_reload(self) -> None:
        """Let the watching task open the current generation now; a signal handler may call this."""
        self._is_reload_requested = True

    async def reload(self) -> Searchable:
        """Open the current generation (committed state) of the index, and let it take over.

        It is opened even if it is the served one, because the documents and vectors that belong to
        the index may have changed.

        Returns:
            The generation that has taken over.

        Raises:
            ServeError: if the generation is refused. The served generation stays.
        """
        async with self._lock:
            return await self._open_and_replace()

    async def _watch(self) -> None:
        """Check the folder periodically, and open new generations, until the task is cancelled.

        An error does not end the task: otherwise the server would keep an old index unnoticed.
        """
        interval = self.source.watch_seconds
        while True:
            await asyncio.sleep(interval if interval > 0 else _REQUEST_SECONDS)
            try:
                await self._check_folder()
                self._watch_failure = None
            except Exception as error:
                self._log_watch_failure(error)

    async def _check_folder(self) -> None:
        """Open the current state of the index if a reload was requested, or if it is a new one."""
        must_open = self._is_reload_requested
        self._is_reload_requested = False
        if not must_open and self.source.watch_seconds > 0:
            must_open = await self.service.run_in_background(self._has_new_generation)
        if must_open:
            with suppress(ServeError):  # the refusal was logged
                await self.reload()

    def _log_watch_failure(self, error: Exception) -> None:
        """Log an unexpected error of a check of the folder.

        The check is repeated periodically. An error that equals the last one is not logged again.

        Args:
            error: the error.
        """
        failure = f"{type(error).__name__}: {error}"
        if failure != self._watch_failure:
            _logger.error(
                "%s could not be checked for a new generation, and will be checked again: %s",
                self.source.path,
                failure,
                exc_info=error,
            )
        self._watch_failure = failure

    def _has_new_generation(self) -> bool:
        """Return whether the folder has a generation that is neither served nor refused.

        A generation is a committed state of the index. One that was refused, for example because
        the memory was too small, counts as new again after ``_RETRY_SECONDS``.
        """
        try:
            current = read_generation(self.source.path).id
        except (OSError, DataError) as error:
            # On some systems the folder is missing for a moment while it is replaced.
            self._refuse(None, error)
            return False
        if current == self.generation:
            self.refusal = None
            return False
        refusal = self.refusal
        if refusal is None or refusal.generation != current:
            return True
        return time.monotonic() - refusal.time > _RETRY_SECONDS

    async def _open_and_replace(self) -> Searchable:
        """Open the current generation of the index, search it once, and let it take over.

        A generation is a committed state of the index. If the current one cannot be opened and
        searched, it is refused, and the served one stays.

        Raises:
            ServeError: if the generation is refused.
        """
        service = self.service
        started = time.perf_counter()
        generation: IndexGeneration | None = None
        try:
            generation = await service.run_in_background(read_generation, self.source.path)
            with switch_interval(_SWITCH_SECONDS):
                opened = await service.run_in_background(self._open)
                generation = opened.generation
                await self._search_once(opened.searchable)
        except Exception as error:  # of files, of memory, of the model, or of the device
            self._refuse(generation, error)
            raise ServeError(
                "Backend",
                f"the index was not replaced: {_reason(error)}; the server still answers from "
                f"generation {self.generation}",
                status=409,
                label="reload",
            ) from error
        old_generation = self.generation
        self._open_generations.add(opened.searchable)
        _free_without_gil(self.served)
        service.replace_searchable(opened.searchable)
        self.n_segments = opened.generation.n_segments
        self._verified_files = opened.files
        self.refusal = None
        service.metrics.count("tilefold_index_reload_count")
        _logger.info(
            "index %s: generation %s (%s) replaced %s after %.1f s",
            opened.searchable.name,
            generation.id,
            _kind_and_model(opened.searchable),
            old_generation,
            time.perf_counter() - started,
        )
        return opened.searchable

    def _open(self) -> _OpenedGeneration:
        """Open the current generation completely; runs in a thread."""
        return open_current(self.source.path, self._check_and_open)

    def _check_and_open(self, generation: IndexGeneration) -> _OpenedGeneration:
        """Check the memory and the checksums of the current state of the index, and open it.

        Args:
            generation: the current generation, which describes this state.
        """
        self._check_memory()
        files = verify_files(self.source.path, self._verified_files)
        searchable = self.source.open(self.served, generation.id)
        return _OpenedGeneration(generation, searchable, files)

    def _check_memory(self) -> None:
        """Raise ``MemoryError`` if the memory is too small for two generations of the index.

        The served generation stays in memory until its last request ends, next to the new one.
        Segments that both have are in memory once.
        """
        gpus = gpus_of(self.served.index)
        needed = opening_memory(
            self.source.path,
            on_gpu=bool(gpus),
            opened=opened_parts(self.served.index),
        )
        free_bytes = memory_left()
        if free_bytes is not None and needed.cpu_bytes > _MEMORY_SHARE * free_bytes:
            raise MemoryError(_memory_message("memory", needed.cpu_bytes, free_bytes))
        # An index that is too large for the GPUs is searched block by block. This is much slower,
        # so that an index on GPUs is not replaced by one that does not fit.
        if not gpus:
            return
        # GPUs get equal shares, so that the one with the least free memory limits all of them.
        free_bytes = len(gpus) * min(map(free_device_bytes, gpus))
        if needed.device_bytes > _DEVICE_MEMORY_SHARE * free_bytes:
            raise MemoryError(_memory_message("GPU memory", needed.device_bytes, free_bytes))

    async def _search_once(self, searchable: Searchable) -> None:
        """Search an opened index, so that no request waits for its initialisation.

        Models that are not served yet encode some texts first.

        Args:
            searchable: the generation of the index, with its models, which is not served yet.
        """
        service = self.service
        for model in searchable.models:
            if model not in self.served.models:
                await service.run_in_background(service.warm_up_model, model)
        encoder = searchable.encoder
        if encoder is not None and encoder in self.served.models:
            # Only the batch worker may use a model that is served.
            encoded_word = await service.run_on_device(encoder, searchable.encode_probe)
        else:
            encoded_word = await service.run_in_background(searchable.encode_probe)
        await service.run_search(searchable.search_probe, encoded_word)

    def _refuse(self, generation: IndexGeneration | None, error: BaseException) -> None:
        """Record that a generation does not take over, and log it the first time.

        Args:
            generation: the refused state of the index; ``None`` if it could not be read.
            error: what was wrong.
        """
        refusal = Refusal(None if generation is None else generation.id, _reason(error))
        previous = self.refusal
        self.refusal = refusal
        is_repeated = (
            previous is not None
            and previous.generation == refusal.generation
            and previous.reason == refusal.reason
        )
        if is_repeated:
            return
        self.service.metrics.count("tilefold_index_refused_count")
        _logger.warning(
            "the index was not replaced: %s; generation %s still answers",
            refusal.reason,
            self.generation,
        )


def _free_without_gil(searchable: Searchable) -> None:
    """Let files that a generation has mapped into memory be freed without the GIL.

    A generation is a committed state of the index. While its memory is unmapped with the GIL, no
    request would be answered. Files that another generation also uses stay mapped.

    Args:
        searchable: a generation that is going to be replaced.
    """
    # These references keep the files mapped until drop_memory(), which does not hold the GIL.
    references = [tensor.detach() for tensor in mapped_tensors(searchable.index)]
    if references:
        finalizer = weakref.finalize(searchable, _drop_later, references)
        finalizer.atexit = False  # the memory of an ending process need not be freed


def _drop_later(references: list[Tensor]) -> None:
    """Free memory in a thread, some time after a generation was deleted.

    Other references of the generation are gone by then, so that the thread drops the last one.

    Args:
        references: tensors that nothing else uses.
    """
    # Not a daemon thread: torch might crash if the interpreter ended before the thread does.
    threading.Timer(_DROP_SECONDS, drop_memory, [references]).start()


def _memory_message(memory: str, needed_bytes: int, free_bytes: int) -> str:
    """Describe that a generation does not fit next to the served one.

    Args:
        memory: name of the memory, such as ``"GPU memory"``.
        needed_bytes: number of bytes that the generation takes.
        free_bytes: number of free bytes.
    """
    return (
        f"the new generation takes {needed_bytes / 1e6:,.0f} MB of {memory} next to the served "
        f"one, and {free_bytes / 1e6:,.0f} MB are free. Free memory, or restart the server"
    )


def _kind_and_model(searchable: Searchable) -> str:
    """Return the backend of an index and the model of its queries, for the log.

    Args:
        searchable: the index with its models.
    """
    backend = searchable.index.backend
    encoder = searchable.encoder
    if encoder is None:  # BM25 reads texts
        return backend
    return f"{backend}, {encoder.kind} model {encoder.name}"


def _reason(error: BaseException) -> str:
    """Describe an error as a part of a sentence: its first line, without the final period.

    An error without a message is described by the name of its class. torch's message for missing
    GPU memory does not say what to do, so that another one replaces it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU has too little free memory to open the new generation next to the served one. "
            "Free memory, or restart the server"
        )
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
