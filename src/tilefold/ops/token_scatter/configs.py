"""Launch configurations of the token scatter by sequence length; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScatterConfig:
    """One program walks one sequence.

    Attributes:
        block: tokens of a step, and scores of a step where a row is filled with NaN.
        num_warps: warps of the program.
    """

    block: int
    num_warps: int


SHORT = ScatterConfig(128, num_warps=4)
MEDIUM = ScatterConfig(512, num_warps=8)
LONG = ScatterConfig(1024, num_warps=16)
INTERPRETED = ScatterConfig(16, num_warps=4)


def scatter_config(length_bound: int, interpreted: bool = False) -> ScatterConfig:
    """The configuration for sequences of at most ``length_bound`` tokens."""
    if interpreted:
        return INTERPRETED
    return next((config for config in (SHORT, MEDIUM) if length_bound <= config.block), LONG)
