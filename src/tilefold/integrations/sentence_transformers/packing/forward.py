"""The original forward of a Transformer, and the tokens of its output that are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold._internal.typing import Transformer
from tilefold.integrations.transformers.packed import OFFSET_NAMES, OFFSETS, decoder_arguments
from tilefold.modules.echo import POOLED_COUNT, POOLING_MASK
from tilefold.modules.fused_pooling import Features

# Names of the packed features ``[1, T]`` of which the pooling reads the marked tokens only.
_POOLED_NAMES = ("input_ids", "position_ids")


@dataclass(frozen=True)
class PooledCount:
    """The entry ``POOLED_COUNT`` of packed features with a pooling mask.

    A loss that divides the features into mini-batches copies this entry. Then the number of tokens
    differs from that of the mask.

    Attributes:
        n_tokens: the number of all tokens.
        n_pooled: the number of tokens that the pooling mask marks.
    """

    n_tokens: int
    n_pooled: int


def original_forward(transformer: Transformer, features: Features, **kwargs: Any) -> Features:
    """Run the forward of a Transformer's class, with what its network needs for packed tokens.

    ``accelerate`` puts another ``forward`` on the instance, which calls this function.

    Args:
        transformer: the Transformer module.
        features: its input, packed or padded, to which the output is added.
        **kwargs: other arguments of the forward.
    """
    transformer_class = type(transformer)
    forward = transformer_class.forward
    is_packed = OFFSETS in features
    if is_packed:
        kwargs = {**decoder_arguments(transformer.model, features["input_ids"]), **kwargs}
        # The class for echo inputs, which repeat a text, has another forward for packed tokens.
        forward = getattr(transformer_class, "forward_packed", forward)
    outputs: Features = forward(transformer, features, **kwargs)
    return outputs


def keep_pooled_tokens(features: Features, output_name: str) -> None:
    """Remove the tokens that a pooling mask excludes from packed features, in place.

    Echo inputs have a pooling mask: they repeat a text, and only its second copy is pooled.

    Args:
        features: packed features with the output of the Transformer. Features without a pooling
            mask do not change.
        output_name: the name of the output, ``[1, T, D]``.
    """
    pooling_mask: Tensor | None = features.pop(POOLING_MASK, None)
    if pooling_mask is None:
        return
    count: PooledCount = features.pop(POOLED_COUNT)
    is_pooled = pooling_mask[0] != 0  # [T]
    n_pooled = count.n_pooled
    is_mini_batch = count.n_tokens != is_pooled.numel()
    if is_mini_batch:
        # The recorded number is that of the whole batch. The CPU waits for the GPU to count.
        n_pooled = int(is_pooled.sum())
    # A stable sort brings pooled tokens to the front. ``nonzero`` would wait for the GPU.
    pooled_tokens = torch.argsort((~is_pooled).int(), stable=True)[:n_pooled]
    n_pooled_before = torch.nn.functional.pad(is_pooled.cumsum(0), (1, 0))  # [T + 1]
    offsets = n_pooled_before[features[OFFSETS].long()].to(torch.int32)
    features.update(dict.fromkeys(OFFSET_NAMES, offsets))
    for name in (*_POOLED_NAMES, output_name):
        features[name] = features[name][:, pooled_tokens]
