"""The operators: one room each, the public functions re-exported here."""

from tilefold.ops.lsr_head import lsr_head, lsr_head_sparse

__all__ = ["lsr_head", "lsr_head_sparse"]
