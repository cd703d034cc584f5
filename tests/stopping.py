"""A command that stands still on its way, until a test kills it."""

from __future__ import annotations

_CODE = """
import sys, time
from tilefold import cli
from tilefold.retrieval.vectors.tokens import TokenVectorWriter

write_shard = TokenVectorWriter.write_shard

def write_or_stop(writer, number, *arguments, **options):
    if number == {n_shards}:
        time.sleep(3600)
    return write_shard(writer, number, *arguments, **options)

TokenVectorWriter.write_shard = write_or_stop
cli.main(sys.argv[1:])
"""


def stopping_after_shards(n_shards: int) -> str:
    """Return Python code that runs a command of tilefold, which writes these shards and no other.

    The arguments of the program are those of the command, which encodes pages or tokens.
    """
    return _CODE.format(n_shards=n_shards)
