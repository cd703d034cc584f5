"""Plans: what a call allocates and launches, worked out once for tensors of these shapes, strides and dtypes.

The tensors of a call lie in numbered places: those that it gets first, then what its stages make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import without_memory
from tilefold.ops._shared.call_cache import ALIGNMENT
from tilefold.ops._shared.internals import hooked

# The operands come first; what backward gets besides follows.
(
    QUERIES, DOCUMENTS, QUERY_MASK, DOCUMENT_MASK, CU_QUERIES, CU_DOCUMENTS, INDEX, DOCUMENT_SCALE, SAVED, DSCORES,
    ROW_FACTS, QUERY_SCALE, SCORES, PARTS, INT8_QUERIES, ROW_QUERY, LARGEST, LISTS, ORDER, FIRST, WIDE, DQUERIES,
    DDOCUMENTS, NARROW,
) = range(24)  # fmt: skip

Places = list[Any]  # tensors, pieces of scratch, and None
Stage = Callable[[Places, bool], None]


class Make:
    """Memory for a result, or for scratch, in a place.

    Args:
        place: where it goes.
        like: a tensor of the device.
        shape, dtype: of the tensor.
        fill: for all its entries; ``None`` where kernels write every one.
    """

    __slots__ = ("_fill", "_like", "_place")

    def __init__(
        self, place: int, like: Tensor, shape: Sequence[int], dtype: torch.dtype, fill: float | None = None
    ) -> None:
        self._place, self._like, self._fill = place, without_memory(tuple(shape), dtype, like.device), fill

    def __call__(self, places: Places, same: bool) -> None:
        made = torch.empty_like(self._like)
        if self._fill == 0:
            made.zero_()
        elif self._fill is not None:
            # few operations know uint16, in which every bit set is what -1 is in signed integers
            (made.view(torch.int16) if made.dtype == torch.uint16 else made).fill_(self._fill)
        places[self._place] = made


class Derive:
    """What torch makes of the tensors of some places, in another: ``places[target] = function(*sources)``."""

    __slots__ = ("_function", "_sources", "_target")

    def __init__(self, target: int, function: Callable[..., Tensor | None], *sources: int) -> None:
        self._target, self._function, self._sources = target, function, sources

    def __call__(self, places: Places, same: bool) -> None:
        places[self._target] = self._function(*[places[source] for source in self._sources])


class Run:
    """A launch with the tensors of these places; what lies in ``last`` is not needed after it."""

    __slots__ = ("_last", "_pick", "_step")

    def __init__(self, step: Step, places: Sequence[int], last: Sequence[int] = ()) -> None:
        self._step, self._last = step, last
        self._pick: Callable[[Places], tuple[Tensor | None, ...]] = itemgetter(*places)

    def __call__(self, places: Places, same: bool) -> None:
        bound = self._step.bound
        if same and bound is not None:  # as the step would: one function fewer
            bound(self._pick(places))
        else:
            self._step(same, *self._pick(places))
        for place in self._last:
            places[place] = None


@dataclass(frozen=True)
class Plan:
    """The stages of a call, in order.

    Attributes:
        stages: what is made, derived and launched.
        results: the places of what it returns.
        aligned: whether all tensors of its calls begin at multiples of 16 bytes.
        by_tma: whether a kernel reads documents through a TMA descriptor.
    """

    stages: tuple[Stage, ...]
    results: tuple[int, ...]
    aligned: bool = False
    by_tma: bool = False

    def __call__(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Run every stage on the current device and stream."""
        if (
            not self.aligned
        ):  # kernels are built for aligned tensors: a copy costs less than another build, and adds up alike
            tensors = tuple([x if x is None or x.data_ptr() % ALIGNMENT == 0 else _copy(x) for x in tensors])
        same = not hooked()
        places: Places = [*tensors, *_BLANK[len(tensors) :]]
        for stage in self.stages:
            stage(places, same)
        return tuple([places[place] for place in self.results])


_BLANK = (None,) * (NARROW + 1)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
