"""The original forward of a Transformer, on packed or padded features."""

from __future__ import annotations

from typing import Any

from tilefold._internal.typing import Transformer
from tilefold.integrations.transformers.packed import OFFSETS, decoder_arguments
from tilefold.modules.fused_pooling import Features


def original_forward(transformer: Transformer, features: Features, **kwargs: Any) -> Features:
    """Run the forward of a Transformer's class, with what its network needs for packed tokens.

    ``accelerate`` puts another ``forward`` on the instance, which calls this function.

    Args:
        transformer: the Transformer module.
        features: its input, packed or padded, to which the output is added.
        **kwargs: other arguments of the forward.
    """
    if OFFSETS in features:
        kwargs = {**decoder_arguments(transformer.model, features["input_ids"]), **kwargs}
    outputs: Features = type(transformer).forward(transformer, features, **kwargs)
    return outputs
