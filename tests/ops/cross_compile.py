"""Compiles Triton kernels for GPUs that this machine lacks, and reads the assembler's output."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import release
from tests.ops.base import BUILD_OPTIONS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of stack by release. 3.4 keeps values from item to item of a persistent kernel that other
# releases compute again (`tl.range(disable_licm)`).
OUTSIDE_LOOPS = {(3, 4): 232}
# LDL and STL: the lowest 12 bits of an instruction, on 8.0, 9.0 and 10.0 alike.
LOCAL_ACCESSES = (0x983, 0x387)
INSTRUCTION_BYTES = 16
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
    """Resources of one kernel on one target.

    Attributes:
        registers: Registers of a thread.
        stack: Bytes of stack of a thread, which hold spilled values.
        shared: Bytes of shared memory of a program.
        wgmma: Number of Hopper's tensor-core instructions.
        local_memory: Number of loads and stores of spilled values.
        looped: The largest share of such loads and stores in an innermost loop.
        cubin: The binary.
    """

    registers: int
    stack: int
    shared: int
    wgmma: int
    local_memory: int
    looped: float
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
    """Compile ``kernel`` for ``sm_<capability>``.

    Args:
        kernel: The kernel.
        types: Types of the run-time arguments by name.
        constants: Values of the other arguments by name.
        capability: Compute capability, such as 90.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
        divisible: Integers, such as strides, that are multiples of 16.
        registers: The most registers of a thread, as ``maxnreg`` of a launch.
        ptx_options: Options of the assembler.
    """
    source = source_of(kernel, types, constants, divisible)
    options: dict[str, Any] = BUILD_OPTIONS | {"num_warps": num_warps, "num_stages": num_stages}
    if registers:
        options["maxnreg"] = registers
    if ptx_options:
        options["ptx_options"] = ptx_options
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump(cubin, "--dump-resource-usage"))
    local_memory = local_accesses(cubin)
    return Compiled(
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=compiled.metadata.shared,
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        local_memory=local_memory,
        looped=spilled_share(dump(cubin, "-c", "nvdisasm")) if local_memory else 0.0,
        cubin=cubin,
    )


def source_of(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    divisible: frozenset[str],
) -> ASTSource:
    """The input of the compiler for these arguments of :func:`compile_kernel`."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    # Allocations of torch are aligned. The launcher tells the compiler, which wide loads need.
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
    """Check that a kernel spills no more than it is known to.

    Releases of Triton differ by some registers. With any but 3.6, which most GPU timings were taken
    with, values may be spilled outside the loops that do the work.

    Args:
        compiled: The kernel.
        most: Bytes that a thread may spill with Triton 3.6.
        looped: Share of an innermost loop that may move spilled values.
        name: Name of the kernel in messages.
        others: Bytes that a thread may spill with other releases; by default what the release is
            known for.
    """
    if release() != (3, 6):
        if others is None:
            others = OUTSIDE_LOOPS.get(release(), 64)
        most = max(most, others)
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
    """Check spills, shared memory and, on 9.0, the use of tensor cores.

    Args:
        compiled: The kernel.
        capability: Compute capability that it was compiled for.
        wgmma: Whether it must use wgmma on 9.0.
        name: Name of the kernel in messages.
        spills: Options of :func:`check_spills`.
    """
    check_spills(compiled, name=name, **spills)
    assert compiled.shared <= SHARED_LIMIT[capability], (
        f"{name} needs too much shared memory: {compiled}"
    )
    if wgmma and capability == 90:
        assert compiled.wgmma > 0, f"products of {name} do not use wgmma: {compiled}"


def local_accesses(cubin: bytes) -> int:
    """Count loads and stores of local memory in a binary (ELF).

    A disassembly has the same counts, and takes as long as a build.
    """
    (headers_at,) = struct.unpack_from("<Q", cubin, 0x28)
    header_size, n_sections, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", cubin, headers_at + i * header_size)
        for i in range(n_sections)
    ]
    names_at = headers[names_index][4]
    n_accesses = 0
    for name_offset, _, _, _, start, length in headers:
        if not cubin.startswith(b".text.", names_at + name_offset):
            continue
        for at in range(start, start + length, INSTRUCTION_BYTES):
            (word,) = struct.unpack_from("<Q", cubin, at)
            n_accesses += word & 0xFFF in LOCAL_ACCESSES
    return n_accesses


def dump(cubin: bytes, option: str, tool: str = "cuobjdump") -> str:
    """The output of one of NVIDIA's tools for ``cubin``."""
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
    """Moves of spilled values as a share of the instructions of the worst innermost loop.

    Other loops run once for many rounds of an innermost one.
    """
    names = enumerate(names_of(listing))
    spills = {position for position, name in names if name.startswith(SPILLS)}
    loops = list(loops_of(listing))
    innermost = [loop for loop in loops if not any(inner < loop for inner in loops)]
    return max((len(spills & loop) / len(loop) for loop in innermost), default=0.0)


def names_of(listing: str) -> list[str]:
    """Names of all instructions of a disassembly."""
    matches = [INSTRUCTION.match(line) for line in listing.splitlines()]
    return [instruction["name"] for instruction in matches if instruction is not None]


def loops_of(listing: str) -> Iterator[set[int]]:
    """Yield every loop as the positions of its instructions, with those of inner loops."""
    graphs = [_successors(listing)]
    while graphs:
        graph = graphs.pop()
        for loop in networkx.strongly_connected_components(graph):
            first = min(loop)
            if len(loop) == 1 and not graph.has_edge(first, first):
                continue
            yield loop
            entries = {
                position
                for position in loop
                if any(predecessor not in loop for predecessor in graph.predecessors(position))
            }
            # Without the entries of the loop, only the loops within it are left.
            graphs.append(graph.subgraph(loop - (entries or {first})).copy())


class Disassembly(NamedTuple):
    """Instructions of a kernel, and the position that each label stands for."""

    instructions: list[re.Match[str]]
    labels: dict[str, int]


def _parse(listing: str) -> Disassembly:
    instructions: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = LABEL.match(line)
        instruction = INSTRUCTION.match(line)
        if label is not None:
            labels[label[1]] = len(instructions)
        elif instruction is not None:
            instructions.append(instruction)
    return Disassembly(instructions, labels)


def _successors(listing: str) -> networkx.DiGraph:
    """Edges from the position of every instruction to those that may follow it.

    A called function counts as a part of its call.
    """
    instructions, labels = _parse(listing)
    # Where threads that diverged continue together, by barrier.
    barriers: dict[str, set[int]] = {}
    for instruction in instructions:
        if instruction["name"].startswith("BSSY"):
            target = TARGET.search(instruction["operands"])
            position = labels[target[1]] if target else 0
            barriers.setdefault(_barrier(instruction["operands"]), set()).add(position)
    graph = networkx.DiGraph()
    for position, instruction in enumerate(instructions):
        kind = instruction["name"].split(".")[0]
        target = TARGET.search(instruction["operands"])
        successors = {position + 1}
        if kind == "BRA" and target:
            is_unconditional = (
                instruction["guard"] is None
                and "DIV" not in instruction["name"]
                and "P" not in instruction["operands"].split("`")[0]
            )
            if is_unconditional:
                successors = set()
            successors.add(labels[target[1]])
        elif kind in ("EXIT", "RET") and instruction["guard"] is None:
            successors = set()
        elif kind == "BSYNC":
            successors |= barriers.get(_barrier(instruction["operands"]), set())
        for successor in successors:
            if successor < len(instructions):
                graph.add_edge(position, successor)
    return graph


def _barrier(operands: str) -> str:
    """The name of the barrier among the operands of an instruction."""
    barrier = re.search(r"\bB\d+", operands)
    return barrier[0] if barrier else ""
