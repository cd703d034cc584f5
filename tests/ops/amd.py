"""What Triton's AMD backend makes of the portable kernels: ``python -m tests.ops.amd`` prints a
table. Nothing is run.

The compile gates of all operators, with their plans for compute capability 8.0, compile for AMD's
GPUs instead, each kernel in a process of its own, because a compiler that gives up may end it.
Paths of gates and options of pytest choose some of them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ops import cross_compile

SHARED_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}  # bytes a program
BUILDS, PTX = "builds", "PTX"
IN_PTX = re.compile(
    "for constraint|unexpected token|invalid instruction",
)  # its operands, or itself
PRODUCTS = re.compile(r"input_precision must be one of .*Got (\w+)")
REASON = re.compile(r"error: (.*)|LLVM ERROR: (.*)|(?:Error|Exception)[:(] ?(.*)")


def outcome(source: ASTSource, arch: str, options: dict[str, Any]) -> str:
    """:data:`BUILDS`, or why it does not: :data:`PTX` for instructions of NVIDIA's in the kernel."""
    with tempfile.NamedTemporaryFile("w+") as message:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_build, args=(source, arch, options, message.name))
        child.start()
        child.join()
        text = message.read()
    if child.exitcode == 0:
        shared = int(text.rsplit("shared ", 1)[1])
        return BUILDS if shared <= SHARED_LIMIT[arch] else f"{shared // 1024} KB of shared memory"
    if IN_PTX.search(text):
        return PTX
    if products := PRODUCTS.search(text):
        return f"no {products[1]} products"
    result = [next(filter(None, match.groups()), "") for match in REASON.finditer(text)]
    return result[0] if result else f"the compiler ended with {child.exitcode}"


def _build(source: ASTSource, arch: str, options: dict[str, Any], said: str) -> None:
    file = os.open(said, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        compiled = triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)
    except Exception as error:  # pytest has what Python would print
        os.write(1, f"error: {str(error.__cause__ or error).strip().splitlines()[-1]}".encode())
        os._exit(1)
    os.write(1, f"shared {compiled.metadata.shared}".encode())
    os._exit(0 if compiled.asm["hsaco"] else 1)


class Gates:
    """In pytest: keeps the gates of 8.0 (8.9 of what only that has), and notes what AMD's compiler
    says.

    Attributes:
        found: outcomes by kernel, dtype of its first tensor, and architecture.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def capability(item: Any) -> int:
            result: int = (
                item.callspec.params.get("capability", 90) if hasattr(item, "callspec") else 90
            )
            return result

        portable = {item.originalname for item in items if capability(item) == 80}
        items[:] = [
            item
            for item in items
            if capability(item) == (80 if item.originalname in portable else 89)
        ]

    def compile_kernel(
        self,
        kernel: Any,
        types: dict[str, str],
        constants: dict[str, Any],
        capability: int,
        num_warps: int,
        num_stages: int,
        **others: Any,
    ) -> cross_compile.Compiled:
        """Stand in for :func:`tests.ops.cross_compile.compile_kernel`."""
        source = cross_compile.source_of(
            kernel,
            types,
            constants,
            others.get("divisible", frozenset()),
        )
        room = kernel.fn.__module__.removeprefix("tilefold.ops.").replace("._triton", "")
        dtype = next(kind for kind in source.signature.values() if kind.startswith("*"))[1:]
        for arch in SHARED_LIMIT:
            message = outcome(source, arch, {"num_warps": num_warps, "num_stages": num_stages})
            self.found[f"{room}.{kernel.fn.__name__}", dtype, arch][message] += 1
        return cross_compile.Compiled(0, 0, 0, wgmma=1, local_memory=0, looped=0.0, cubin=b"")


def main(arguments: list[str]) -> None:
    """Print a table of Markdown."""
    gates = Gates()
    vars(cross_compile)["compile_kernel"] = gates.compile_kernel  # for all that call it
    rooms = (
        []
        if any(Path(x).exists() for x in arguments)
        else map(str, Path(__file__).parent.glob("*/test_compile.py"))
    )
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *rooms, *arguments], plugins=[gates])
    lines = [
        "| kernel | first tensor | " + " | ".join(SHARED_LIMIT) + " |",
        "|---|---|" + "---|" * len(SHARED_LIMIT),
    ]
    for kernel, dtype in sorted({key[:2] for key in gates.found}):
        cells = (gates.found[kernel, dtype, arch].items() for arch in SHARED_LIMIT)
        cell = " | ".join(", ".join(f"{n} {message}" for message, n in each) for each in cells)
        lines.append(f"| `{kernel}` | {dtype} | {cell} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
