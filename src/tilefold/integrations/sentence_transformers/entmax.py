"""Where checkpoints look for :class:`EntmaxTransformer`, by its name in ``modules.json``."""

from tilefold.integrations.transformers.entmax_transformer import EntmaxTransformer

__all__ = ["EntmaxTransformer"]
