"""Module of :class:`EntmaxTransformer` that checkpoints name in ``modules.json``."""

from tilefold.integrations.transformers.entmax_transformer import EntmaxTransformer

__all__ = ["EntmaxTransformer"]
