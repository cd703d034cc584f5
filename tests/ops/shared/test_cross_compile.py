"""What the compile gates read in machine code is what NVIDIA's disassembler reads there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import release, triton_interpreted
from tests.ops.amd import BUILDS, PTX, Gates
from tests.ops.cross_compile import compile_kernel, dump, loops_of, names_of, spilled_share
from tests.ops.launching import entmax_kernels, gather_kernel
from tests.ops.token_scatter.test_compile import FLOATS, TYPES
from tilefold.ops.entmax.plans import rows_config
from tilefold.ops.token_scatter.plans import SCAN

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)


@pytest.mark.parametrize("registers", [None, 24], ids=["free", "capped"])
@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(number, marks=pytest.mark.slow) for number in (80, 89, 100))],
)
def test_spills_are_counted_as_the_disassembler_counts_them(
    capability: int,
    registers: int | None,
) -> None:
    types = TYPES | dict.fromkeys(FLOATS, "*fp32")
    constants = {"ACTIVATION": "log1p_log1p_relu", "PACKED": True, "BLOCK": 1024, "SCAN": SCAN}
    compiled = compile_kernel(
        gather_kernel,
        types,
        constants,
        capability,
        1,
        3,
        registers=registers,
    )
    disassembled = re.findall(r"\b(?:LDL|STL)\b", dump(compiled.cubin, "--dump-sass"))
    assert compiled.local_memory == len(disassembled)
    assert (compiled.local_memory > 0) == (compiled.stack > 0)
    assert (
        registers is None or compiled.local_memory > 0
    )  # without a limit, some releases put a register away too


@pytest.mark.slow  # no test of make test compiles for AMD
@pytest.mark.skipif(release() == (3, 4), reason="its wheel has no linker for AMD's code")
def test_amds_compiler_takes_kernels_without_ptx() -> None:
    # in a process that has compiled nothing yet: a compiler's threads are not in the forks that
    # this compiles in
    code = (
        "from tests.ops.shared.test_cross_compile import check_amds_compiler; check_amds_compiler()"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-c", code]
    child = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-5000:]


def check_amds_compiler() -> None:
    gates = Gates()
    constants = {"ACTIVATION": "log1p_relu", "PACKED": True, "BLOCK": 1024, "SCAN": SCAN}
    gates.compile_kernel(gather_kernel, TYPES | dict.fromkeys(FLOATS, "*bf16"), constants, 80, 4, 3)
    types = {
        "x_ptr": "*bf16",
        "out_ptr": "*bf16",
        "support_ptr": "*i32",
        "R": "i32",
        "n": "i32",
        "alpha_value": "fp32",
    }
    constants = rows_config(200) | {"KIND": "generic16", "HAS_ALPHA": True, "TOLERANCE": 1e-6}
    warps = constants.pop("num_warps")
    gates.compile_kernel(
        entmax_kernels._forward_kernel,
        types | {"alpha_ptr": "*fp32"},
        constants,
        80,
        warps,
        3,
    )
    result = {
        (kernel.split(".")[0], arch): message for (kernel, _, arch), message in gates.found.items()
    }
    for arch in ("gfx942", "gfx950"):
        assert result["token_scatter", arch] == {BUILDS: 1}
        assert result["entmax", arch] == {BUILDS if release() >= (3, 8) else PTX: 1}


# an outer loop of 6 instructions around one of 3, then a branch that jumps over the end
NESTED = """
        /*0000*/                   STL [R1], R8 ;
.L_x_0:
        /*0010*/                   STL.64 [R1+0x8], R2 ;
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0030*/                   LDL.LU R8, [R1] ;
        /*0040*/                   ISETP.NE.AND P0, PT, R2, RZ, PT ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/              @!P1 BRA `(.L_x_0) ;
        /*0070*/                   BRA `(.L_x_2) ;
        /*0080*/                   LDL R9, [R1] ;
.L_x_2:
        /*0090*/                   LDL R9, [R1] ;
        /*00a0*/                   EXIT ;
"""


def test_loops_are_found_and_spills_count_in_innermost_ones_only() -> None:
    assert names_of(NESTED)[:2] == ["STL", "STL.64"]
    assert sorted(map(sorted, loops_of(NESTED))) == [[1, 2, 3, 4, 5, 6], [3, 4, 5]]
    assert spilled_share(NESTED) == 1 / 3
    assert spilled_share(NESTED.replace("LDL.LU R8, [R1]", "MOV R8, R9")) == 0
