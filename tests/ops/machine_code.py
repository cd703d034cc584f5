"""Loops in the machine code of a kernel, and how much of them moves spilled values."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)(?P<operands>[^;]*)"
)
LABEL = re.compile(r"(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
SPILLS = ("LDL", "STL")  # loads and stores of a thread's own memory

Graph = list[set[int]]


def looped_spills(cubin: bytes) -> float:
    """Spills as a share of the instructions of the worst innermost loop: others run once for many rounds of these."""
    return spilled_share(disassembled(cubin))


def spilled_share(listing: str) -> float:
    spills = {place for place, name in enumerate(names_of(listing)) if name.startswith(SPILLS)}
    loops = list(loops_of(listing))
    innermost = (loop for loop in loops if not any(other < loop for other in loops))
    return max((len(spills & loop) / len(loop) for loop in innermost), default=0.0)


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout


def names_of(listing: str) -> list[str]:
    return [found["name"] for line in listing.splitlines() if (found := INSTRUCTION.match(line))]


def loops_of(listing: str) -> Iterator[set[int]]:
    """The loops, each as the places of its instructions, those of the loops within it too."""
    after = _successors(listing)
    before: Graph = [set() for _ in after]
    for place, following in enumerate(after):
        for other in following:
            before[other].add(place)
    # only where paths meet or part can a loop begin or end: blocks are what lies between
    starts = [p for p in range(len(after)) if before[p] != {p - 1} or after[p - 1] != {p}]
    blocks = [range(start, end) for start, end in zip(starts, [*starts[1:], len(after)], strict=True)]
    number = {start: i for i, start in enumerate(starts)}
    forward: Graph = [{number[place] for place in after[block[-1]]} for block in blocks]
    backward: Graph = [set() for _ in blocks]
    for i, following in enumerate(forward):
        for other in following:
            backward[other].add(i)
    for loop in _cycles(forward, backward, set(range(len(blocks)))):
        yield {place for i in loop for place in blocks[i]}


def _successors(listing: str) -> Graph:
    """For every instruction, those that may follow it; a called function counts as a part of its call."""
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
            barriers.setdefault(_barrier(found["operands"]), set()).add(labels[target[1]] if target else 0)
    after: Graph = []
    for place, found in enumerate(instructions):
        kind, target = found["name"].split(".")[0], TARGET.search(found["operands"])
        following = {place + 1}
        if kind == "BRA" and target:
            always = (
                found["guard"] is None and "DIV" not in found["name"] and "P" not in found["operands"].split("`")[0]
            )
            following = {labels[target[1]]} | (set() if always else following)
        elif kind in ("EXIT", "RET") and found["guard"] is None:
            following = set()
        elif kind == "BSYNC":
            following |= barriers.get(_barrier(found["operands"]), set())
        after.append({other for other in following if other < len(instructions)})
    return after


def _barrier(operands: str) -> str:
    found = re.search(r"\bB\d+", operands)
    return found[0] if found else ""


def _reached(start: int, edges: Graph, within: set[int]) -> set[int]:
    """What lies one step or more from ``start``: itself too, if it lies on a cycle."""
    seen, todo = set[int](), [start]
    while todo:
        new = (edges[todo.pop()] & within) - seen
        seen |= new
        todo += new
    return seen


def _cycles(forward: Graph, backward: Graph, within: set[int]) -> Iterator[set[int]]:
    """Strongly connected parts, and those that are left of each without its entries."""
    rest = set(within)
    while rest:
        start = rest.pop()
        loop = _reached(start, forward, within) & _reached(start, backward, within)
        if loop:
            rest -= loop
            yield loop
            entries = {block for block in loop if backward[block] - loop} or {min(loop)}
            yield from _cycles(forward, backward, loop - entries)
