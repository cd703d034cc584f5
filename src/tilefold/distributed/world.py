"""Communication of the ranks that train one model, with clear errors if one of them is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tilefold.distributed.errors import RankError

T = TypeVar("T")
_MAX_REASON_LENGTH = 200  # characters of a message of torch in our error
RESUME_HINT = "Checkpoints are kept: run the same again, with any number of ranks, to go on."
# What torch's messages contain if another rank does not answer.
_LOST_RANK = re.compile(r"gloo|nccl|connection|broken pipe|timed? ?out|socket", re.IGNORECASE)


class _PendingMaximum(NamedTuple):
    """A maximum over ranks that is being computed.

    Attributes:
        tensor: the number of this rank, which `work` replaces by the maximum.
        work: the asynchronous all-reduce.
    """

    tensor: Any
    work: Any


class World:
    """All ranks of the default process group, or this process if there is no group.

    Messages go over gloo, even if another backend reduces the gradients.

    Attributes:
        rank: number of this process, 0 without a group.
        size: number of ranks, 1 without a group.
    """

    def __init__(self) -> None:
        """Create a gloo group of all ranks, if there are several.

        Raises:
            RankError: if a rank does not join.
        """
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank = 0
        self.size = 1
        self._group: Any = None  # None for a single rank
        self._pending_maximum: _PendingMaximum | None = None  # of previous_max_over_ranks()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self._group = dist.new_group(backend="gloo")
            # A rank that fails later must not close its connections while others still connect.
            with self.explaining_lost_ranks():
                dist.barrier(self._group)

    def close(self) -> None:
        """Destroy the process group of the messages."""
        if self._group is not None:
            self._dist.destroy_process_group(self._group)

    def call_on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on every rank.

        Args:
            function: the function. Its result is sent to the other ranks by pickle.

        Raises:
            Exception: on rank 0, the error of the function.
            RankError: on the other ranks, if the function fails on rank 0.
        """
        if self._group is None:
            return function()
        result: Any = None
        error: Exception | None = None  # on rank 0 only; the other ranks get its text
        error_text: str | None = None
        if self.rank == 0:
            try:
                result = function()
            except Exception as raised:  # of any kind, because the other ranks wait for a message
                error = raised
                error_text = f"rank 0: {type(raised).__name__}: {raised}"
        # torch replaces the entries of this list by those of rank 0.
        message = [result, error_text]
        with self.explaining_lost_ranks():
            self._dist.broadcast_object_list(message, 0, group=self._group)
        if error is not None:
            raise error
        result_of_rank_0, error_of_rank_0 = message
        if error_of_rank_0 is not None:
            raise RankError(error_of_rank_0)
        shared_result: T = result_of_rank_0
        return shared_result

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self.explaining_lost_ranks():
            self._dist.all_gather_object(values, value, group=self._group)
        return values

    def previous_max_over_ranks(self, number: int) -> int:
        """Return the maximum of the numbers that all ranks passed in the previous call.

        The maximum of the current numbers is computed in the background, and returned by the next
        call, so that no rank waits for the slowest one. Every rank must call this method the same
        number of times.

        Args:
            number: number of this rank.

        Returns:
            The previous maximum; 0 in the first call. With a single rank, `number` itself.

        Raises:
            RankError: if another rank is lost.
        """
        if self._group is None:
            return number
        import torch

        previous = self._pending_maximum
        tensor = torch.tensor([number])  # the all-reduce replaces the number by the maximum
        with self.explaining_lost_ranks():
            work = self._dist.all_reduce(
                tensor,
                self._dist.ReduceOp.MAX,
                group=self._group,
                async_op=True,
            )
            self._pending_maximum = _PendingMaximum(tensor, work)
            if previous is None:
                return 0
            previous.work.wait()
        return int(previous.tensor.item())

    @contextmanager
    def explaining_lost_ranks(self) -> Iterator[None]:
        """Convert torch's errors about a lost rank to a :class:`RankError` that says what to do."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, RankError) or not _LOST_RANK.search(str(error)):
                raise
            reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            raise RankError(
                f"rank {self.rank}: another rank ended, or does not answer ({reason}). "
                f"{RESUME_HINT}",
            ) from error
