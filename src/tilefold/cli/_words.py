"""Messages of the Python functions in the words of the command line."""

from __future__ import annotations

import re

# What a message says -> the option that does it. Names of arguments that are spelled like their option need no row.
_OPTIONS = {
    "resume=False": "--fresh",
    "overwrite=True": "--overwrite",
    "unknown='drop'": "--drop-unknown",
    "base_model": "--model",
    "max_steps": "--steps",
    "learning_rate": "--lr",
    "document_regularizer": "--regularizer",
    "query_regularizer": "--regularizer",
    "output_dir": "--output",
    "negatives=negatives.parquet": "--negatives negatives.parquet",
    "negatives=scores.parquet": "--negatives scores.parquet",
}
_SAME = (
    "batch_size", "max_length", "train_max_length", "query_length", "anneal_alpha", "save_steps", "save_minutes",
    "shard_size", "special_tokens", "top_k", "group_by_length", "expand_queries", "max_score_share", "worker_cpus",
    "batch_tokens",
)  # fmt: skip
_WORDS = (
    "address",
    "workers",
    "attention",
    "alpha",
    "bf16",
    "dimension",
    "epochs",
    "margin",
    "method",
    "seed",
    "storage",
)

_TABLE = _OPTIONS | {name: f"--{name.replace('_', '-')}" for name in _SAME}
_ANYWHERE = re.compile("|".join(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])" for name in _TABLE))
_AT_THE_START = re.compile(rf"^({'|'.join(_WORDS)})(?=:| must)")


def in_options(message: str) -> str:
    """`message` with options for arguments of Python: ``--fresh`` for ``resume=False``."""
    return _AT_THE_START.sub(r"--\1", _ANYWHERE.sub(lambda match: _TABLE[match[0]], message))
