"""What the compile gates read in machine code is what NVIDIA's disassembler reads there."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import compile_kernel, dump
from tests.ops.test_token_scatter_compile import FLOATS, TYPES
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.token_scatter import configs
from tilefold.ops.token_scatter._triton.scatter import SCAN, _gather_kernel

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="kernels are interpreted in this run, not compiled")


@pytest.mark.parametrize("registers", [None, 24], ids=["free", "capped"])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_spills_are_counted_as_the_disassembler_counts_them(capability: int, registers: int | None) -> None:
    types = TYPES | dict.fromkeys(FLOATS, "*fp32")
    constants = {"ACTIVATION": "log1p_log1p_relu", "PACKED": True, "BLOCK": configs.LONG.block, "SCAN": SCAN}
    compiled = compile_kernel(_gather_kernel, types, constants, capability, 1, 3, registers=registers)
    disassembled = re.findall(r"\b(?:LDL|STL)\b", dump(compiled.cubin, "--dump-sass"))
    assert compiled.local_memory == len(disassembled)
    assert (compiled.local_memory > 0) == (compiled.stack > 0) == (registers is not None)
