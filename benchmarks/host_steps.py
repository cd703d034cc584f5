"""What the calls of ``host_time`` take of the host, without a GPU: microseconds, Python and C
calls, torch, launches.

    python -m benchmarks.host_steps --only lsr_head

Tensors lie on the CPU and no kernel runs: the function of the CUDA driver that launches is replaced
by one that does nothing, and all that leads to it stays. The microseconds lack what the driver
takes for a launch and the CUDA allocator for memory, and hold products that torch computes: they
compare two commits on one machine. Backward runs in the thread that asks for it, not in the GPU's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import host_time
from tilefold.ops._shared import calls, impl, internals, operator
from tilefold.ops._shared._triton import cuda_driver, launch
from tilefold.ops.entmax_attention import configs as attention_configs

HERE, PACKAGE = Path(__file__).parent, Path(operator.__file__).parents[2]


def main() -> int:
    """Parse arguments, and print a row per call."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=16, help="calls in a sample")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="text in the names of the calls",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_a_gpu()
    gc.collect()
    gc.freeze()  # to look through what was imported would take longer than all else, several times a row
    head = f"{'call':44s} {'us':>8s} {'python':>7s} {'C':>6s} {'torch':>6s} {'launches':>9s}"
    print(f"{head} {'functions':>10s} {'files':>6s}")
    for name, prepare in host_time.cases():
        if options.only and not any(text in name for text in options.only):
            continue
        try:
            call = prepare()
            for _ in range(5):
                call()
            least = timed(call, options.calls, options.samples)
        except Exception as error:
            print(f"{name:44s} {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        python, of_c, launches, functions, files = entered(
            call,
            "backward" if name.endswith("f+b") else None,
        )
        row = f"{name:44s} {least:8.1f} {python:7d} {of_c:6d} {operations(call):6d} {launches:9d}"
        print(f"{row} {functions:10d} {files:6d}", flush=True)
    return 0


def without_a_gpu() -> None:
    """Let tensors on the CPU take the way of those on a GPU, up to the C function that launches."""
    host_time.DEVICE = "cpu"
    modules: tuple[Any, ...] = (impl, internals, launch, cuda_driver, operator)
    implementations, private, launching, driver, operators = modules
    attention: Any = attention_configs
    implementations.resolve_impl = lambda *_: "triton"
    implementations.INTERPRETER_FAULTS = {}
    private.current_stream = abs
    private.tma_map = lambda descriptor, description: bytes(128)
    torch.cuda.current_device = lambda: 0
    operators.host_may_read = lambda device, impl: False  # the host looks at values on the CPU only
    operators.capability_of = attention.capability_of = lambda device: (9, 0)
    operators.sm_count = lambda device: 132
    driver.enter_context = lambda index: None
    driver.driver_function = lambda name: (
        ctypes.CDLL(None).sched_yield
    )  # takes whatever it is given, and returns 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    launching.KernelLauncher.run_with_triton = lambda self, build: compiled(
        build.arguments, build.constants
    )


def compiled(arguments: tuple[Any, ...], constants: dict[str, Any]) -> SimpleNamespace:
    """What stands for a kernel that was compiled for these arguments."""
    kinds = [
        "constexpr" if x is None else "*" if hasattr(x, "data_ptr") else "value" for x in arguments
    ]
    kinds += ["constexpr"] * len(constants)
    declared: list[str] = []
    for argument in arguments:
        if type(argument).__name__ == "TensorDescriptor":
            declared += [".param .align 64 .b8 map[128]", *[".param .u64 size"] * 4]
        elif argument is not None:
            declared.append(f".param .{'f32' if isinstance(argument, float) else 'u64'} value")
    metadata = SimpleNamespace(name="kernel", num_warps=4, shared=0)
    signature = SimpleNamespace(signature=dict(enumerate(kinds)))
    return SimpleNamespace(
        metadata=metadata,
        src=signature,
        function=1,
        asm={"ptx": f".entry kernel({','.join(declared)})"},
    )


def timed(call: host_time.Call, count: int, samples: int) -> float:
    """Microseconds of this thread per call; the fewest, which others on the machine disturb least."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples):
            begin = time.thread_time()
            for _ in range(count):
                call()
            times.append(1e6 * (time.thread_time() - begin) / count)
    finally:
        gc.enable()
    return min(times)


def entered(call: host_time.Call, within: str | None = None) -> tuple[int, int, int, int, int]:
    """Functions of Python and of C that one call enters, and launches; the fewest of three calls.

    Then the different functions of Python of the package and of torch, and files of the package,
    within the pass of this name, ``None`` for all of the call. Now and then the interpreter has
    something of its own to do within one.
    """
    return min(_entered_once(call, within) for _ in range(3))


def _entered_once(call: host_time.Call, within: str | None) -> tuple[int, int, int, int, int]:
    counts, launches, inside = {"call": 0, "c_call": 0}, 0, within is None
    functions = set[tuple[str, str]]()

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal launches, inside
        if event in counts:
            counts[event] += 1
        code = frame.f_code
        launches += (
            event == "call"
            and code.co_name == "launch"
            and code.co_filename == cuda_driver.__file__
        )
        if code.co_filename == calls.__file__ and code.co_name == within:
            inside = event != "return"
        if event == "call" and inside and not code.co_filename.startswith(str(HERE)):
            functions.add((code.co_filename, code.co_name))

    gc.collect()
    gc.disable()  # what it ends may have functions to call
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    files = {name for name, _ in functions if name.startswith(str(PACKAGE))}
    # without what ends the profile
    return counts["call"] - 1, counts["c_call"] - 1, launches, len(functions), len(files)


def operations(call: host_time.Call) -> int:
    """Torch operations of one call, those included that others are made of."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))


if __name__ == "__main__":
    sys.exit(main())
