"""Counts how sparse the attention of a model is while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.integrations.transformers._alpha import checked_attention_modules, heads_of
from tilefold.ops.entmax_attention import EntmaxStats, live_blocks

_active: list[SparsityRecord] = []


@dataclass(frozen=True)
class LayerSparsity:
    """Sparsity of the heads of an attention layer, over all forward passes of a record.

    Attributes:
        name: of the module, or ``"all layers"``.
        nonzero: share of the weights that are positive, among those that masks, causality and windows allow; one
            number per head, like the others.
        mean_support: positive weights per query.
        live_blocks: share of blocks of 64 queries by 64 keys with a positive weight, among those with an allowed one;
            ``None`` if they were not counted.
        queries: rows that were counted per head (in a total, over all heads and layers), without padding.
    """

    name: str
    nonzero: list[float]
    mean_support: list[float]
    live_blocks: list[float] | None
    queries: int


class Recorder:
    """The counts of one layer; they stay on its device until they are read."""

    def __init__(self, name: str, heads: int, blocks: bool) -> None:
        self.name, self.heads, self.blocks = name, heads, blocks
        self.counts: Tensor | None = None  # [5, H] int64: positive, allowed, queries, live and visible blocks

    def add(self, query: Tensor, key: Tensor, stats: EntmaxStats, options: dict[str, Any], cross: bool) -> None:
        """Count one call of the attention."""
        mask = options.get("key_padding_mask")
        rows = None
        if mask is not None and not cross and mask.size(1) >= query.size(2):
            rows = mask[:, mask.size(1) - query.size(2) :] != 0  # queries are aligned to the end of the keys
        support, visible = stats.support, stats.visible.expand_as(stats.support)
        if rows is not None:
            support, visible = support * rows[:, None], visible * rows[:, None]
        found = [support.sum(dim=(0, 2)), visible.sum(dim=(0, 2)), (visible > 0).sum(dim=(0, 2))]
        if self.blocks:
            places = {name: value for name, value in options.items() if name != "dropout_p"}
            if rows is not None and query.dim() == 4:
                places["query_padding_mask"] = rows
            found += [count.sum(dim=0) for count in live_blocks(query, key, stats.tau, **places)]
        else:
            found += [torch.zeros_like(found[0])] * 2
        counts = torch.stack(found)
        self.counts = counts if self.counts is None else self.counts + counts

    def described(self, counts: Tensor) -> LayerSparsity:
        """The shares computed from ``[5, H]`` counts."""
        positive, allowed, queries, live, visible = counts.double()
        return LayerSparsity(
            self.name,
            (positive / allowed).tolist(),
            (positive / queries).tolist(),
            (live / visible).tolist() if self.blocks else None,
            int(queries.max()),
        )


class SparsityRecord:
    """The counts of :func:`record_sparsity`; reading them synchronises with the device."""

    def __init__(self, model: nn.Module, blocks: bool) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._recorders = {
            module: Recorder(names[module], heads_of(module) or 1, blocks)
            for module in checked_attention_modules(model)
        }

    @property
    def layers(self) -> list[LayerSparsity]:
        """The layers that ran, first layer first.

        Raises:
            RuntimeError: if none ran entmax attention while this was recorded.
        """
        return [r.described(r.counts.cpu()) for r in self._ran() if r.counts is not None]

    @property
    def total(self) -> LayerSparsity:
        """All layers and heads together: lists of one number, weighted by how much was counted.

        Raises:
            RuntimeError: if no layer ran entmax attention while this was recorded.
        """
        ran = self._ran()
        counts = [r.counts.cpu().sum(dim=1, keepdim=True) for r in ran if r.counts is not None]
        return Recorder("all layers", 1, ran[0].blocks).described(torch.stack(counts).sum(dim=0))

    def _ran(self) -> list[Recorder]:
        ran = [recorder for recorder in self._recorders.values() if recorder.counts is not None]
        if not ran:
            raise RuntimeError(
                "no attention layer of the model ran entmax attention while sparsity was recorded; load the model with "
                "attn_implementation='entmax' or call use_entmax(model), and run it inside the with block."
            )
        return ran

    def __str__(self) -> str:
        """A table of means over heads."""
        rows = [("layer", "nonzero", "support", "live blocks")]
        for layer in [*self.layers, self.total]:
            heads = len(layer.nonzero)
            live = "-" if layer.live_blocks is None else f"{sum(layer.live_blocks) / heads:.1%}"
            nonzero, support = sum(layer.nonzero) / heads, sum(layer.mean_support) / heads
            rows.append((layer.name, f"{nonzero:.1%}", f"{support:.1f}", live))
        width = max(len(row[0]) for row in rows)
        return "\n".join(f"{row[0]:<{width}}" + "".join(f"  {cell:>11}" for cell in row[1:]) for row in rows)


@contextmanager
def record_sparsity(model: nn.Module, *, blocks: bool = True) -> Iterator[SparsityRecord]:
    """Count how sparse the entmax attention of ``model`` is while a block runs.

    with record_sparsity(model) as sparsity:
        model(**batch)  # as often as wanted
    print(sparsity)

    Counts stay on the device until they are read, so nothing synchronises inside the block. Padding queries are
    not counted. With gradient checkpointing a layer that runs twice is counted twice, which leaves shares as they are.

    Args:
        model: a transformers model, or any module with one inside, such as a sentence-transformers model.
        blocks: also count live blocks, which computes the scores a second time, in fp32.

    Raises:
        ValueError: for a model without attention layers.
        RuntimeError: inside another record of the same layers.
    """
    record = SparsityRecord(model, blocks)
    if any(module in other._recorders for other in _active for module in record._recorders):
        raise RuntimeError("model must not be recorded already, got a record inside another one; use one of them.")
    _active.append(record)
    try:
        yield record
    finally:
        _active.remove(record)


def recorder_of(module: nn.Module) -> Recorder | None:
    """The recorder of an attention module, or ``None``."""
    for record in _active:
        if module in record._recorders:
            return record._recorders[module]
    return None
