"""The place of :class:`EntmaxTransformer` in checkpoints, which name it in ``modules.json``."""

from tilefold.integrations.transformers.entmax_transformer import EntmaxTransformer

__all__ = ["EntmaxTransformer"]
