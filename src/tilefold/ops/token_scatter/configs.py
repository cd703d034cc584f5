"""Launch configurations of the token scatter by sequence length; nothing is searched at run time."""

from __future__ import annotations

from typing import NamedTuple

from tilefold.ops._shared.tuning import Between, Row, lookup


class ScatterConfig(NamedTuple):
    """One program walks one sequence.

    Attributes:
        block: tokens of a step, and scores of a step where a row is filled with NaN.
        num_warps: warps of the program.
    """

    block: int
    num_warps: int


COMPILED = "at most 2 tokens a thread: compiled without spills for 8.0, 9.0 and 10.0"
TABLE = (
    Row({}, {"block": 1024, "num_warps": 16}, COMPILED),
    Row({"length": Between(most=512)}, {"block": 512, "num_warps": 8}, COMPILED),
    Row({"length": Between(most=128)}, {"block": 128, "num_warps": 4}, COMPILED),
    Row(
        {"capability": (0, 0)}, {"block": 16, "num_warps": 4}, "interpreted: small, so that few tokens take more steps"
    ),
)


def scatter_config(length: int, capability: tuple[int, int]) -> ScatterConfig:
    """The configuration for sequences of at most ``length`` tokens; ``(0, 0)`` where kernels are interpreted."""
    return ScatterConfig(**lookup(TABLE, length=length, capability=capability))
