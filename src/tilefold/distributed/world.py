"""Communication of the ranks that train one model together, and errors when one of them is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tilefold.distributed.errors import RankError

T = TypeVar("T")
KEPT = "Checkpoints are kept: run the same again, with any number of ranks, to go on."
# Parts of the messages by which torch reports that another rank does not answer.
_LOST_RANK = re.compile(r"gloo|nccl|connection|broken pipe|timed? ?out|socket", re.IGNORECASE)


class World:
    """All ranks of the default process group, or this process if there is no group.

    Messages go over gloo, whichever backend reduces the gradients.

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
        # Tensor of the last call of max_over_ranks(), and the work that fills it.
        self._pending_maximum: tuple[Any, Any] | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self._group = dist.new_group(backend="gloo")
            # Without the barrier, a rank that fails at once would close its connections while
            # others still connect to it.
            with self.naming_lost_ranks():
                dist.barrier(self._group)

    def close(self) -> None:
        """Destroy the process group of the messages."""
        if self._group is not None:
            self._dist.destroy_process_group(self._group)

    def call_on_first(self, make: Callable[[], T]) -> T:
        """Call a function on the first rank, and return its result on every rank.

        Args:
            make: the function, whose result is sent to the other ranks by pickle.

        Returns:
            The result of the function.

        Raises:
            RankError: on the other ranks, if the function fails on the first one. The first rank
                raises the error of the function.
        """
        if self._group is None:
            return make()
        message: list[Any] = [None, None]  # the result, and the text of an error
        error: Exception | None = None
        if self.rank == 0:
            try:
                message[0] = make()
            except Exception as raised:  # of any kind: the other ranks wait for a message
                error = raised
                message[1] = f"rank 0: {type(raised).__name__}: {raised}"
        with self.naming_lost_ranks():
            self._dist.broadcast_object_list(message, 0, group=self._group)
        if error is not None:
            raise error
        result: T = message[0]
        reason = message[1]
        if reason is not None:
            raise RankError(reason)
        return result

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self.naming_lost_ranks():
            self._dist.all_gather_object(values, value, group=self._group)
        return values

    def max_over_ranks(self, number: int) -> int:
        """Return the maximum, over all ranks, of the numbers that they passed in the previous call.

        The maximum of the present numbers is computed while the ranks go on, and returned by the
        next call. No rank therefore waits for the slowest one. Every rank must call this equally
        often.

        Args:
            number: number of this rank.

        Returns:
            The previous maximum; 0 in the first call. A rank without others gets `number` itself.

        Raises:
            RankError: if another rank is lost.
        """
        if self._group is None:
            return number
        import torch

        previous = self._pending_maximum
        # all_reduce replaces the number in the tensor by the maximum.
        maximum = torch.tensor([number])
        with self.naming_lost_ranks():
            work = self._dist.all_reduce(
                maximum,
                self._dist.ReduceOp.MAX,
                group=self._group,
                async_op=True,
            )
            self._pending_maximum = (maximum, work)
            if previous is None:
                return 0
            previous_maximum, previous_work = previous
            previous_work.wait()
        return int(previous_maximum.item())

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turn torch's errors about a lost rank into a :class:`RankError` with a remedy."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, RankError) or not _LOST_RANK.search(str(error)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise RankError(
                f"rank {self.rank}: another rank ended, or does not answer ({reason}). {KEPT}",
            ) from error
