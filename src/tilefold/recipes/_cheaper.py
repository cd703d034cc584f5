"""Cheaper training steps with the same loss: batches with little padding, and frozen layers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from tilefold._typing import Model
from tilefold.recipes.backbone import layer_stacks

__all__ = ["freeze_lower_layers", "length_grouped_batches"]

POOL = 8  # batches per pool; the texts of a pool are sorted by length


def freeze_lower_layers(model: Model, layers: int) -> None:
    """Freeze the embeddings, a decoder tied to them, and the lowest `layers` layers of `model`.

    Autograd then stops above them: they have a forward pass and no backward pass.

    Raises:
        ValueError: if the model has fewer layers, or its layers are not found.
    """
    network = model[0].model
    stacks = layer_stacks(network)
    if not stacks:
        raise ValueError(f"frozen_layers: {type(network).__name__} has no list of layers that is known; use 0.")
    if layers > len(stacks[0]):
        raise ValueError(f"frozen_layers must not exceed the model's {len(stacks[0])} layers, got {layers}.")
    network.get_input_embeddings().requires_grad_(False)
    getattr(network.base_model, "embeddings", network.get_input_embeddings()).requires_grad_(False)
    for layer in stacks[0][:layers]:
        layer.requires_grad_(False)


def length_grouped_batches(dataset: Any, batch_size: int, **settings: Any) -> Any:
    """A sampler for sentence-transformers: batches without duplicates, of documents of similar length.

    The stock sampler draws pools of `POOL` batches, none of which holds a text twice; each is sorted by the length of
    its documents, cut into batches, and these are shuffled.
    """
    from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler

    lengths = [len(text) for text in dataset["document" if "document" in dataset.column_names else "positive"]]
    pools = NoDuplicatesBatchSampler(dataset, batch_size=POOL * batch_size, **settings)

    class LengthGrouped(DefaultBatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            pools.set_epoch(self.epoch)
            shuffle = random.Random(self.seed + self.epoch).shuffle  # noqa: S311 - a reproducible order, no secret
            for pool in pools:
                ordered = sorted(pool, key=lambda row: lengths[row])
                batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
                shuffle(batches)
                yield from batches

        def __len__(self) -> int:
            return math.ceil(len(lengths) / batch_size)

    return LengthGrouped(dataset, batch_size=batch_size, **settings)
