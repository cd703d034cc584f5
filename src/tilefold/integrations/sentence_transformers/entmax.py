"""Module of ``EntmaxTransformer``, which checkpoints name in ``modules.json``."""

from tilefold.integrations.transformers.alpha import entmax_transformer

__all__ = ["EntmaxTransformer"]

EntmaxTransformer = entmax_transformer()
