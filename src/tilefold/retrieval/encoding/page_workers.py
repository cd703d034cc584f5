"""Worker processes that prepare pages: they decode them and apply the model's processor.

A batch is divided into parts of a few pages, which several workers prepare at the same time. So the
first batch is ready soon, and all workers take part in it. A worker writes the features of a part
to memory that it shares with its parent, whose thread copies them into the tensors of the batch.

All workers are forked from one process without threads
(:mod:`tilefold.retrieval.encoding.worker_template`).
"""

from __future__ import annotations

import functools
import itertools
import mmap
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
from torch import Tensor

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.processes import describe_exit
from tilefold._internal.typing import Model
from tilefold.distributed.ranks import share_of_cores
from tilefold.pipeline.threads import Prefetcher
from tilefold.retrieval.data.pages import pdfium_lock
from tilefold.retrieval.encoding.pages import (
    EncodingStep,
    PageBatch,
    PagePreparation,
    PreparedPages,
    has_fixed_shapes,
    picklable_error,
)
from tilefold.retrieval.encoding.worker_template import WorkerTemplate
from tilefold.retrieval.errors import DataError, WorkerError

__all__ = [
    "FeatureCollector",
    "PageWorkers",
    "PendingStep",
    "SharedBuffer",
    "default_page_workers",
    "prepare_ahead",
]

_MAX_WORKERS = 16
# Fewer pages are decoded in this process, because starting workers takes longer.
_MIN_PAGES_FOR_WORKERS = 64
_PAGES_PER_PART = 4
_BUFFERS_PER_WORKER = 2  # parts of each worker that are in preparation or wait for their batch
# Exit codes of a worker that another process has killed. The system does so if memory is short. A
# decoder that fails ends its process by other signals.
_KILLED = (-signal.SIGTERM, -9)  # 9 is SIGKILL, which Windows does not have
_LESS_MEMORY = (
    "Fewer workers (page_workers, --page-workers) or a lower resolution (dpi, --dpi) take less "
    "memory."
)
_ALIGNMENT = 64  # bytes, a cache line


def default_page_workers(n_pages: int) -> int:
    """Return the number of worker processes that decode pages: one per spare core, at most 16.

    Ranks of the same machine share its cores. There are no workers for a few pages, and where they
    cannot be started.

    Args:
        n_pages: number of pages to decode.
    """
    if n_pages < _MIN_PAGES_FOR_WORKERS or _obstacle_to_workers() is not None:
        return 0
    ranks_of_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    n_cores = share_of_cores(max(1, ranks_of_machine))
    return max(1, min(n_cores - 1, _MAX_WORKERS))


def _obstacle_to_workers() -> str | None:
    """Return why this process cannot start workers; None if it can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this system cannot fork a process"
    if multiprocessing.current_process().daemon:  # a worker of a Pool or of a DataLoader, say
        return "this process is a daemon of multiprocessing, which may not start others"
    return None


@contextmanager
def prepare_ahead(
    model: Model,
    steps: Iterable[EncodingStep],
    dpi: int,
    n_workers: int,
) -> Iterator[Iterator[tuple[EncodingStep, PreparedPages | None]]]:
    """Prepare the pages of batches in worker processes, while the caller encodes earlier batches.

    A step is a batch, the end of a window of documents, or a pause while no window is ready. A
    thread takes the steps and receives the features from the workers, so that the caller waits only
    for features that are not ready yet. For a model on a GPU, features are in pinned memory.
    Leaving the context ends the thread and the workers.

    Batches have the same features for every number of workers.

    Args:
        model: a ``MultiVectorEncoder`` of images.
        steps: the steps, which are taken a few ahead of the results.
        dpi: dots per inch at which pages of PDFs are rendered.
        n_workers: number of processes; 0 prepares each batch in this process when it is needed.

    Yields:
        An iterator over the steps in order, without pauses, and the features of their pages; None
        for a step without pages.

    Raises:
        ValueError: if this process cannot start workers.
    """
    obstacle = _obstacle_to_workers()
    if n_workers and obstacle is not None:
        raise ArgumentError(
            "page_workers",
            f"expected 0, because {obstacle}, got {n_workers}. Leave it out.",
        )
    preparation = PagePreparation(model, dpi)
    # A processor of dynamic shapes pads the pages of a batch to the largest page, so it must
    # process all of them together.
    part_size = _PAGES_PER_PART if has_fixed_shapes(model) else None
    pin_memory = torch.device(getattr(model, "device", "cpu")).type == "cuda"
    pending_steps = (PendingStep(step, part_size, pin_memory) for step in steps)
    if not n_workers:
        yield _prepare_without_workers(pending_steps, preparation)
        return
    with (
        PageWorkers(preparation, n_workers) as workers,  # forks before the thread starts
        Prefetcher(
            _prepare_with_workers(pending_steps, workers),
            depth=1,
            name="tilefold-pages",
        ) as prefetcher,
    ):
        yield iter(prefetcher)


class PendingStep:
    """A step whose pages are prepared in parts.

    Attributes:
        step: the step.
        parts: the pages of the batch, divided; empty for a step without pages.

    Args:
        step: the step.
        part_size: pages of a part; None does not divide the batch.
        pin_memory: whether the features are in pinned memory.
    """

    def __init__(self, step: EncodingStep, part_size: int | None, pin_memory: bool) -> None:
        self.step = step
        batch = step.pages
        self._has_pages = batch is not None
        self.parts = [] if batch is None else batch.divide(part_size)
        self._n_missing = len(self.parts)
        n_pages = sum(len(part.pages) for part in self.parts)
        self._collector = FeatureCollector(n_pages, pin_memory)

    @property
    def is_complete(self) -> bool:
        """Whether all parts have been added."""
        return self._n_missing == 0

    def add(self, prepared: PreparedPages) -> None:
        """Copy the features of the next part."""
        self._collector.add(prepared)
        self._n_missing -= 1

    def result(self) -> tuple[EncodingStep, PreparedPages | None]:
        """Return the step and the features of its pages; None for a step without pages."""
        features = self._collector.prepared() if self._has_pages else None
        return self.step, features


def _prepare_without_workers(
    pending_steps: Iterable[PendingStep],
    preparation: PagePreparation,
) -> Iterator[tuple[EncodingStep, PreparedPages | None]]:
    """Prepare the pages of steps in this process, and yield the steps without pauses.

    Args:
        pending_steps: the steps, in order.
        preparation: decodes the pages and applies the processor.
    """
    for pending in pending_steps:
        if pending.step.is_pause:
            continue
        for part in pending.parts:
            pending.add(preparation.prepare(part))
        yield pending.result()


def _prepare_with_workers(
    pending_steps: Iterable[PendingStep],
    workers: PageWorkers,
) -> Iterator[tuple[EncodingStep, PreparedPages | None] | None]:
    """Submit the parts of steps to workers in turn, and yield complete steps in order.

    Args:
        pending_steps: the steps.
        workers: the processes.

    Yields:
        Each step with the features of its pages; None for a pause.
    """
    waiting_steps: deque[PendingStep] = deque()
    parts_in_flight: deque[tuple[_PageWorker, PendingStep]] = deque()
    next_workers = itertools.cycle(workers)

    def receive_oldest_part() -> None:
        worker, pending = parts_in_flight.popleft()
        worker.receive_into(pending)

    def finished_steps() -> Iterator[tuple[EncodingStep, PreparedPages | None]]:
        while waiting_steps and waiting_steps[0].is_complete:
            yield waiting_steps.popleft().result()

    for pending in pending_steps:
        if pending.step.is_pause:  # finish all steps, because the next window may wait for them
            while parts_in_flight:
                receive_oldest_part()
                yield from finished_steps()
            yield None
            continue
        waiting_steps.append(pending)
        for part in pending.parts:
            worker = next(next_workers)
            if not worker.has_free_buffer:  # then the oldest part is one of this worker
                receive_oldest_part()
                yield from finished_steps()
            worker.submit(part)
            parts_in_flight.append((worker, pending))
        yield from finished_steps()  # a step without pages waits only for the steps before it
    while parts_in_flight:
        receive_oldest_part()
        yield from finished_steps()
    workers.begin_close()  # while the model computes the last batches


class FeatureCollector:
    """Joins the features of the parts of a batch.

    Parts whose features have the same shapes for every page become one group, as if the processor
    had been applied to all of their pages at once. Others become groups of their own.

    Args:
        n_pages: number of pages of the batch.
        pin_memory: whether the features are in pinned memory, from which a GPU copies them while
            the CPU goes on.
    """

    def __init__(self, n_pages: int, pin_memory: bool = False) -> None:
        self._n_expected = n_pages  # pages of the batch that were not added yet
        self._pin_memory = pin_memory
        self._groups: list[_FeatureGroup] = []
        self._failures: dict[int, Exception] = {}

    def add(self, part: PreparedPages) -> None:
        """Copy the features of the next part of the batch, and record which of its pages failed.

        Args:
            part: features of the part's pages in groups, and errors of the other pages.
        """
        self._failures.update(part.failures)
        self._n_expected -= len(part.failures)
        for positions, features in part.groups:
            fits_last_group = self._groups and self._groups[-1].accepts(positions, features)
            if not fits_last_group:
                group = _FeatureGroup(positions, features, self._n_expected, self._pin_memory)
                self._groups.append(group)
            self._groups[-1].append(positions, features)
            self._n_expected -= len(positions)

    def prepared(self) -> PreparedPages:
        """Return the features and the failures of all parts."""
        groups = [(group.positions, group.features()) for group in self._groups]
        return PreparedPages(groups, self._failures)


class _FeatureGroup:
    """Features of pages that the model reads together, in tensors with room for further pages.

    Attributes:
        positions: positions of the pages so far.

    Args:
        positions: positions of the first pages.
        features: their features, which decide shapes and number types, and are not copied yet.
        capacity: number of pages for which there is room.
        pin_memory: whether the tensors are in pinned memory.
    """

    def __init__(
        self,
        positions: Sequence[int],
        features: Mapping[str, Any],
        capacity: int,
        pin_memory: bool,
    ) -> None:
        self.positions: list[int] = []
        tensors = _tensors_of(features)
        self._other_features = _other_features_of(features)
        # Further pages can be appended if every tensor has a row for each page, and every other
        # feature describes all pages, such as the modality. A list may have an entry for each page.
        self._can_grow = all(
            value.dim() > 0 and value.size(0) == len(positions) for value in tensors.values()
        ) and all(
            value is None or isinstance(value, str | int | float)
            for value in self._other_features.values()
        )
        self._tensors = {
            name: torch.empty(
                (capacity, *value.shape[1:]) if self._can_grow else value.shape,
                dtype=value.dtype,
                pin_memory=pin_memory,
            )
            for name, value in tensors.items()
        }

    def accepts(self, positions: Sequence[int], features: Mapping[str, Any]) -> bool:
        """Return whether features can be appended: they may differ only in the number of pages.

        All other sizes, the number types and the features that are not tensors must be equal.

        Args:
            positions: positions of further pages.
            features: their features.
        """
        tensors = _tensors_of(features)
        if not self._can_grow or tensors.keys() != self._tensors.keys():
            return False
        if _other_features_of(features) != self._other_features:
            return False
        return all(
            value.dtype == self._tensors[name].dtype
            and value.shape == (len(positions), *self._tensors[name].shape[1:])
            for name, value in tensors.items()
        )

    def append(self, positions: Sequence[int], features: Mapping[str, Any]) -> None:
        """Copy the features of further pages.

        Args:
            positions: positions of the pages.
            features: their features. :meth:`accepts` is true for them, or they are the first ones.
        """
        start = len(self.positions)
        self.positions.extend(positions)
        for name, value in _tensors_of(features).items():
            tensor = self._tensors[name]
            rows = tensor[start : len(self.positions)] if self._can_grow else tensor
            rows.copy_(value)

    def features(self) -> dict[str, Any]:
        """Return the features of all pages so far."""
        tensors = self._tensors
        if self._can_grow:
            n_pages = len(self.positions)
            tensors = {name: tensor[:n_pages] for name, tensor in tensors.items()}
        return {**tensors, **self._other_features}


def _tensors_of(features: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the features that are tensors."""
    return {name: value for name, value in features.items() if isinstance(value, Tensor)}


def _other_features_of(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features that are not tensors."""
    return {name: value for name, value in features.items() if not isinstance(value, Tensor)}


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in a :class:`SharedBuffer`.

    Attributes:
        dtype: number type.
        shape: sizes.
        offset: position of the first byte in the buffer.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SharedBuffer:
    """Memory that a worker process writes and its parent reads.

    It is a file in memory without a name, which grows as far as the worker needs it. The tensors
    that torch shares lie in ``/dev/shm`` instead, which has only 64 MB in many containers.
    """

    def __init__(self) -> None:
        self._file = _open_memory_file()
        self._memory: mmap.mmap | None = None

    def write(self, tensors: Sequence[Tensor]) -> list[SharedTensor]:
        """Copy tensors into the memory, in place of earlier ones.

        Args:
            tensors: tensors on the CPU.

        Returns:
            The number type, shape and offset of each tensor.
        """
        shared_tensors: list[SharedTensor] = []
        end = 0
        for tensor in tensors:
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT  # `end`, rounded up to a cache line
            shared_tensors.append(SharedTensor(tensor.dtype, tuple(tensor.shape), offset))
            end = offset + tensor.numel() * tensor.element_size()
        if os.fstat(self._file.fileno()).st_size < end:
            os.truncate(self._file.fileno(), end)
        for tensor, shared_tensor in zip(tensors, shared_tensors, strict=True):
            self.read(shared_tensor).copy_(tensor)
        return shared_tensors

    def read(self, shared_tensor: SharedTensor) -> Tensor:
        """Return a tensor that shares the buffer's memory, which `write` overwrites.

        Args:
            shared_tensor: number type, shape and offset of the tensor.
        """
        tensor = torch.empty(0, dtype=shared_tensor.dtype)
        n_values = torch.Size(shared_tensor.shape).numel()
        if n_values == 0:
            return tensor.reshape(shared_tensor.shape)
        end = shared_tensor.offset + n_values * tensor.element_size()
        if self._memory is None or len(self._memory) < end:
            self._memory = mmap.mmap(self._file.fileno(), 0)  # 0 maps the whole file
        values = torch.frombuffer(
            self._memory,
            dtype=shared_tensor.dtype,
            count=n_values,
            offset=shared_tensor.offset,
        )
        return values.view(shared_tensor.shape)

    def close(self) -> None:
        """Release the memory, once no tensor uses it any more."""
        self._memory = None
        self._file.close()


def _open_memory_file() -> IO[bytes]:
    """Open a file without a name: in memory on Linux, and in the folder of such files elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tilefold-pages"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


@dataclass(frozen=True)
class _Task:
    """Pages that a worker prepares, and the buffer to which it writes their features.

    Attributes:
        pages: the pages.
        buffer: number of the buffer, which is used for nothing else until they are received.
    """

    pages: PageBatch
    buffer: int


class PageWorkers:
    """Processes that prepare parts of batches, and share memory with this process.

    They are forked from a template process, so that they have the model's processor. They need none
    of the model's weights.

    The template is forked when this object is created, which must be before a prefetching thread
    starts: that thread could fork while another one imports a module.

    Args:
        preparation: decodes the pages.
        n_workers: number of processes.
    """

    def __init__(self, preparation: PagePreparation, n_workers: int) -> None:
        """Fork the template process, and create the workers, which start later.

        Args:
            preparation: decodes the pages.
            n_workers: number of processes.
        """
        buffers_of_workers = [
            [SharedBuffer() for _ in range(_BUFFERS_PER_WORKER)] for _ in range(n_workers)
        ]
        with ExitStack() as stack:
            for buffer in itertools.chain.from_iterable(buffers_of_workers):
                stack.callback(buffer.close)
            self._template = WorkerTemplate(
                functools.partial(_prepare_tasks, buffers_of_workers, preparation),
                fork_lock=pdfium_lock,
            )
            self._workers = [
                _PageWorker(number, self._template, buffers)
                for number, buffers in enumerate(buffers_of_workers)
            ]
            for worker in self._workers:
                stack.callback(worker.disconnect)
            stack.callback(self._template.close)
            self._open_resources = stack.pop_all()

    def __iter__(self) -> Iterator[_PageWorker]:
        return iter(self._workers)

    def begin_close(self) -> None:
        """Let all processes end, without waiting for them."""
        self._template.begin_close()

    def close(self) -> None:
        """End all processes, and release the buffers."""
        self._open_resources.close()

    def __enter__(self) -> PageWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PageWorker:
    """A process that prepares parts of batches one after the other.

    The process starts when it has its first part. If it ends while it prepares pages, another
    process prepares these pages again, one by one. A page that ends this process too, as a decoder
    written in C may do, has failed. But if the processes were killed, the page may be sound and
    memory too small, so that an error is raised.

    Args:
        number: number of the worker.
        template: forks the process.
        buffers: take the features of the parts.
    """

    def __init__(
        self,
        number: int,
        template: WorkerTemplate,
        buffers: Sequence[SharedBuffer],
    ) -> None:
        """Create a worker without a process.

        Args:
            number: number of the worker.
            template: forks the process.
            buffers: take the features of the parts.
        """
        self._number = number
        self._template = template
        self._buffers = buffers
        self._free_buffers = deque(range(len(buffers)))
        self._pending: deque[_Task] = deque()
        self._connection: Connection | None = None

    @property
    def has_free_buffer(self) -> bool:
        """Whether the process can be given another part."""
        return bool(self._free_buffers)

    def submit(self, part: PageBatch) -> None:
        """Let the process prepare pages after those that were submitted before.

        Args:
            part: the pages. There must be a free buffer for their features.
        """
        task = _Task(part, self._free_buffers.popleft())
        self._pending.append(task)
        self._send(task)

    def _send(self, task: _Task) -> None:
        """Send a task to the process, which is started if there is none."""
        if self._connection is None:
            self._connection = self._template.start_worker(self._number)
        with suppress(OSError):  # the process has ended, which is noticed when it should answer
            self._connection.send(task)

    def receive_into(self, pending: PendingStep) -> None:
        """Wait for the features of the part that was submitted first, and add them to its step.

        Args:
            pending: the step of this part.

        Raises:
            WorkerError: if the process was killed twice while it prepared the same page.
            OSError: if the process cannot be started.
        """
        task = self._pending.popleft()
        prepared = self._receive(task)
        if prepared is None:
            exit_code = self._end()
            if exit_code in _KILLED:
                warnings.warn(
                    f"a process that decodes pages was killed ({describe_exit(exit_code)}), as "
                    f"happens when memory is short. Its pages are decoded again. {_LESS_MEMORY}",
                    stacklevel=2,
                )
            prepared = self._prepare_one_by_one(task)
            for waiting_task in self._pending:
                self._send(waiting_task)
        pending.add(prepared)
        self._free_buffers.append(task.buffer)

    def _receive(self, task: _Task) -> PreparedPages | None:
        """Wait for the features of a task's pages; None if the process has ended instead.

        The process returns the results of tasks in their order. It has written the tensors of the
        features to the task's buffer, memory that it shares with this process.

        Args:
            task: the oldest task without a result.

        Raises:
            Exception: if the process could not hand over the features, as when memory is short.
        """
        if self._connection is None:
            return None
        try:
            # features with a SharedTensor, the address in the buffer, in place of each tensor
            result: PreparedPages | Exception = self._connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(result, Exception):
            raise result
        buffer = self._buffers[task.buffer]
        result.groups = [
            (positions, _read_tensors(buffer, received)) for positions, received in result.groups
        ]
        return result

    def _prepare_one_by_one(self, task: _Task) -> PreparedPages:
        """Prepare pages in another process, one by one, to find one that ends the process.

        Raises:
            WorkerError: if the process is killed.
        """
        collector = FeatureCollector(len(task.pages.pages))
        for single_page in task.pages.divide(1):
            single_task = replace(task, pages=single_page)
            self._send(single_task)
            prepared = self._receive(single_task)
            if prepared is None:
                prepared = self._failure_of(single_page, exit_code=self._end())
            collector.add(prepared)
        return collector.prepared()

    def _failure_of(self, single_page: PageBatch, exit_code: int) -> PreparedPages:
        """Return the failure of a page that has ended a process.

        Args:
            single_page: the page.
            exit_code: exit code of the process.

        Raises:
            WorkerError: if the process was killed.
        """
        (position,) = single_page.positions
        (page,) = single_page.pages
        cause = describe_exit(exit_code)
        if exit_code in _KILLED:
            raise WorkerError(
                f"a process that decodes pages was killed ({cause}) at page {page.number} of "
                f"{page.file}, after another one had ended at the same pages. Probably memory is "
                f"short. {_LESS_MEMORY} Finished shards are kept: encode into the same folder "
                "again to resume.",
            )
        error = DataError(
            f"{page.file}: decoding page {page.number} has ended its process ({cause}). Replace "
            "the file, or leave it out.",
        )
        return PreparedPages(failures={position: error})

    def _end(self) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises:
            OSError: if the process could not be started.
        """
        self.disconnect()
        return self._template.end_worker(self._number)

    def disconnect(self) -> None:
        """Close the connection to the process, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _prepare_tasks(
    buffers_of_workers: Sequence[Sequence[SharedBuffer]],
    preparation: PagePreparation,
    number: int,
    connection: Connection,
) -> None:
    """Prepare the pages of tasks in a worker process, until its parent closes the connection.

    Args:
        buffers_of_workers: the buffers of all workers.
        preparation: decodes the pages.
        number: number of this worker.
        connection: sends tasks, and takes a result for each one.
    """
    torch.set_num_threads(1)  # there is a worker for each core
    buffers = buffers_of_workers[number]
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(connection, tasks), daemon=True).start()
    while True:
        task = tasks.get()
        result: PreparedPages | Exception
        try:
            result = preparation.prepare(task.pages)
            _write_features(buffers[task.buffer], result)
        except Exception as error:  # errors of single pages are part of the result
            result = picklable_error(error)
        try:
            connection.send(result)
        except OSError:  # the parent has closed the connection
            return


def _receive_tasks(connection: Connection, tasks: queue.SimpleQueue[_Task]) -> None:
    """Receive tasks in a thread as soon as they are sent, until the parent closes the connection.

    Then the process ends. Without the thread, the parent, which sends a task, and the worker, which
    sends a result, could wait for one another.

    Args:
        connection: sends tasks.
        tasks: queue of received tasks.
    """
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # no process waits for further results


def _write_features(buffer: SharedBuffer, prepared: PreparedPages) -> None:
    """Move the tensors of features into a buffer, and replace each by a ``SharedTensor``.

    Args:
        buffer: memory that is shared with the parent.
        prepared: features of pages, changed in place.
    """
    tensors = [
        tensor for _, features in prepared.groups for tensor in _tensors_of(features).values()
    ]
    shared_tensors = iter(buffer.write(tensors))
    for _, features in prepared.groups:
        for name, value in features.items():
            if isinstance(value, Tensor):
                features[name] = next(shared_tensors)


def _read_tensors(buffer: SharedBuffer, received: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each ``SharedTensor`` of received features by its tensor, without a copy.

    Args:
        buffer: memory that the worker process has written.
        received: name of a feature -> value, or ``SharedTensor`` for a tensor.
    """
    return {
        name: buffer.read(value) if isinstance(value, SharedTensor) else value
        for name, value in received.items()
    }
