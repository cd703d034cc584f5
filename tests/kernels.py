"""Facts of the operators' base that tests of all rooms ask for: what of Triton is here, and its release."""

from __future__ import annotations

from tilefold.ops._shared._triton.releases import release
from tilefold.ops._shared.impl import triton_installed, triton_interpreted

__all__ = ["release", "triton_installed", "triton_interpreted"]
