"""Late-interaction scores (MaxSim) without the query-token by document-token similarities."""

from tilefold.ops.maxsim._choice import chosen_impl
from tilefold.ops.maxsim.api import maxsim

__all__ = ["chosen_impl", "maxsim"]
