"""Compiles Triton kernels for GPUs that are not here, and reads what the assembler made of them."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import release
from tests.ops.base import BUILD_OPTIONS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of stack. 3.4 keeps from item to item of a persistent kernel what others make again
# (`tl.range(disable_licm)`).
OUTSIDE_LOOPS = {(3, 4): 232}
LOCAL_ACCESSES = (
    0x983,
    0x387,
)  # LDL and STL: the lowest 12 bits of an instruction, on 8.0, 9.0 and 10.0 alike
INSTRUCTION = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)(?P<operands>[^;]*)",
)
LABEL = re.compile(r"(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
SPILLS = ("LDL", "STL")  # loads and stores of a thread's own memory

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel on one target; values that were spilled to memory lie on the stack."""

    registers: int  # a thread
    stack: int  # bytes a thread
    shared: int  # bytes a program
    wgmma: int  # Hopper's tensor-core instructions
    local_memory: int  # loads and stores of spilled values
    looped: (
        float  # the same as a share of the instructions of the innermost loop that has most of them
    )
    cubin: bytes = field(repr=False)


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    num_stages: int,
    divisible: frozenset[str] = frozenset(),
    registers: int | None = None,
    ptx_options: str | None = None,
) -> Compiled:
    """Compile ``kernel`` for ``sm_<capability>``; ``types`` gives the dtype of each run-time
    argument by name.

    ``divisible`` names the integers, strides for instance, that are multiples of 16 in the calls
    that matter, and ``registers`` caps what a thread may take, as ``maxnreg`` does in a launch;
    ``ptx_options`` are for the assembler.
    """
    source = source_of(kernel, types, constants, divisible)
    options = (
        BUILD_OPTIONS
        | {"num_warps": num_warps, "num_stages": num_stages}
        | ({"maxnreg": registers} if registers else {})
        | ({"ptx_options": ptx_options} if ptx_options else {})
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    used, stack = re.search(r"REG:(\d+) STACK:(\d+)", dump(cubin, "--dump-resource-usage")).groups()
    local_memory = local_accesses(cubin)
    return Compiled(
        int(used),
        int(stack),
        compiled.metadata.shared,
        compiled.asm["ptx"].count("wgmma.mma_async"),
        local_memory,
        spilled_share(dump(cubin, "-c", "nvdisasm")) if local_memory else 0.0,
        cubin,
    )


def source_of(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    divisible: frozenset[str],
) -> ASTSource:
    """What the compiler of any target gets for these arguments of :func:`compile_kernel`."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    # torch allocations are aligned: the launcher tells the compiler so, and wide loads depend on it
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in divisible
    }
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    return source_type(kernel, signature, constants, aligned)


def check_spills(
    compiled: Compiled,
    most: int = 0,
    looped: float = 0.0,
    name: str = "the kernel",
    others: int | None = None,
) -> None:
    """Spills of ``most`` bytes a thread, and in an innermost loop of a share of ``looped``, are
    what is known.

    Releases of Triton differ by some registers. ``most`` is what they were counted to with 3.6,
    which most GPU timings were taken with; with any other, values may be put away outside the loops
    that do the work: ``others`` bytes, or what that release is known for.
    """
    if release() != (3, 6):
        most = max(most, OUTSIDE_LOOPS.get(release(), 64) if others is None else others)
    assert compiled.stack <= most, f"{name} spills registers: {compiled}"
    assert compiled.looped <= looped, f"{name} spills registers in a loop: {compiled}"
    assert compiled.local_memory == 0 or compiled.stack > 0, (
        f"{name} has local memory and no stack: {compiled}"
    )


def check(
    compiled: Compiled,
    capability: int,
    wgmma: bool = False,
    name: str = "the kernel",
    **spills: Any,
) -> None:
    """No more spills than are known, shared memory that the chip has, and on 9.0 products by its
    tensor cores.
    """
    check_spills(compiled, name=name, **spills)
    assert compiled.shared <= SHARED_LIMIT[capability], (
        f"{name} needs too much shared memory: {compiled}"
    )
    assert not wgmma or capability != 90 or compiled.wgmma > 0, (
        f"products of {name} do not use wgmma: {compiled}"
    )


def local_accesses(cubin: bytes) -> int:
    """Loads and stores of local memory in the code; a disassembly says the same and takes as long
    as a build.
    """
    sections, (size, count, names) = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        struct.unpack_from("<HHH", cubin, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    found = 0
    for name, _, _, _, start, length in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            words = struct.unpack_from(f"<{length // 8}Q", cubin, start)[
                ::2
            ]  # an instruction has 16 bytes
            found += sum(word & 0xFFF in LOCAL_ACCESSES for word in words)
    return found


def dump(cubin: bytes, option: str, tool: str = "cuobjdump") -> str:
    """What a tool of NVIDIA's says of ``cubin``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [TOOLS / tool, option, file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


# Loops in a disassembly, and how much of them moves spilled values


def spilled_share(listing: str) -> float:
    """Spills as a share of the instructions of the worst innermost loop: others run once for many
    rounds of these.
    """
    spills = {place for place, name in enumerate(names_of(listing)) if name.startswith(SPILLS)}
    loops = list(loops_of(listing))
    innermost = (loop for loop in loops if not any(other < loop for other in loops))
    return max((len(spills & loop) / len(loop) for loop in innermost), default=0.0)


def names_of(listing: str) -> list[str]:
    return [found["name"] for line in listing.splitlines() if (found := INSTRUCTION.match(line))]


def loops_of(listing: str) -> Iterator[set[int]]:
    """The loops, each as the places of its instructions, those of the loops within it too."""
    rest = [_successors(listing)]
    while rest:
        graph = rest.pop()
        for loop in networkx.strongly_connected_components(graph):
            first = min(loop)
            if len(loop) > 1 or graph.has_edge(first, first):
                yield loop
                entries = {
                    place
                    for place in loop
                    if any(other not in loop for other in graph.predecessors(place))
                }
                rest.append(graph.subgraph(loop - (entries or {first})).copy())


def _successors(listing: str) -> networkx.DiGraph:
    """Edges from every instruction to those that may follow it; a called function counts as a part
    of its call.
    """
    instructions: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append(found)
    barriers: dict[str, set[int]] = {}  # where threads that parted go on together
    for found in instructions:
        if found["name"].startswith("BSSY"):
            target = TARGET.search(found["operands"])
            barriers.setdefault(_barrier(found["operands"]), set()).add(
                labels[target[1]] if target else 0,
            )
    after = networkx.DiGraph()
    for place, found in enumerate(instructions):
        kind, target = found["name"].split(".")[0], TARGET.search(found["operands"])
        following = {place + 1}
        if kind == "BRA" and target:
            always = (
                found["guard"] is None
                and "DIV" not in found["name"]
                and "P" not in found["operands"].split("`")[0]
            )
            following = {labels[target[1]]} | (set() if always else following)
        elif kind in ("EXIT", "RET") and found["guard"] is None:
            following = set()
        elif kind == "BSYNC":
            following |= barriers.get(_barrier(found["operands"]), set())
        after.add_edges_from((place, other) for other in following if other < len(instructions))
    return after


def _barrier(operands: str) -> str:
    found = re.search(r"\bB\d+", operands)
    return found[0] if found else ""
