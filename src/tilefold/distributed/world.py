"""The ranks that train one model together: what the first one decides, what they count, and what
ends them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tilefold.distributed.errors import RankError

T = TypeVar("T")
KEPT = "Checkpoints are kept: run the same again, with any number of ranks, to go on."
_LOST = re.compile(r"gloo|nccl|connection|broken pipe|timed? ?out|socket", re.IGNORECASE)


class World:
    """All ranks of the default process group, or this process alone; they talk over gloo, whatever
    the gradients do.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.size, self._group = 0, 1, None
        self._numbers: list[Any] = []  # of the call before: a tensor, and the work that fills it
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo")
            with (
                self.naming_lost_ranks()
            ):  # or a rank that fails at once closes what another still connects to
                dist.barrier(self._group)

    def close(self) -> None:
        if self._group is not None:
            self._dist.destroy_process_group(self._group)

    def call_on_first(self, make: Callable[[], T]) -> T:
        """Have the first rank call `make`; its result on every rank, or an error on every rank."""
        if self._group is None:
            return make()
        said: list[Any] = [None, None]
        error = None
        if self.rank == 0:
            try:
                said[0] = make()
            except Exception as raised:  # whatever it is, the others must hear of it
                error, said[1] = raised, f"rank 0: {type(raised).__name__}: {raised}"
        with self.naming_lost_ranks():
            self._dist.broadcast_object_list(said, 0, group=self._group)
        if error is not None:
            raise error
        if said[1] is not None:
            raise RankError(said[1])
        found: T = said[0]
        return found

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.naming_lost_ranks():
            self._dist.all_gather_object(found, value, group=self._group)
        return found

    def max_over_ranks(self, number: int) -> int:
        """The highest number of all ranks: of this call if there is one rank, else of the one
        before; nothing waits.

        Every rank calls this equally often.
        """
        if self._group is None:
            return number
        import torch

        before, mine = self._numbers, torch.tensor([number])
        with self.naming_lost_ranks():
            self._numbers = [
                mine,
                self._dist.all_reduce(
                    mine,
                    self._dist.ReduceOp.MAX,
                    group=self._group,
                    async_op=True,
                ),
            ]
            if before:
                before[1].wait()
        return int(before[0].item()) if before else 0

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turn what libraries say of a rank that is gone into an error that says what to do."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, RankError) or not _LOST.search(str(error)):
                raise
            said = " ".join(str(error).split())[:200]
            raise RankError(
                f"rank {self.rank}: another rank ended, or does not answer ({said}). {KEPT}",
            ) from error
