"""Private names whose contracts tests ask for although nobody outside of the package may use them."""

from __future__ import annotations

from tilefold._internal.arguments import list_of_ids, list_of_texts
from tilefold._internal.files import (
    LOCK,
    DiskFullError,
    InUseError,
    atomic_file,
    lock_path,
    swap_directory,
    write_json,
)
from tilefold.cli import _common as common
from tilefold.cli import _demo_steps as demo_steps
from tilefold.cli import _models as models
from tilefold.cli._demo_states import SharedStates
from tilefold.cli._models import load_encoder, load_model
from tilefold.distributed import ranks
from tilefold.integrations._sparse_source import ServerError, SparseSource
from tilefold.ops._shared import fallback
from tilefold.ops._shared._triton import releases
from tilefold.retrieval.encoding import pending_shards

__all__ = [
    "LOCK",
    "DiskFullError",
    "InUseError",
    "ServerError",
    "SharedStates",
    "SparseSource",
    "atomic_file",
    "common",
    "demo_steps",
    "fallback",
    "list_of_ids",
    "list_of_texts",
    "load_encoder",
    "load_model",
    "lock_path",
    "models",
    "pending_shards",
    "ranks",
    "releases",
    "swap_directory",
    "write_json",
]
