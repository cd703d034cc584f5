"""Count what the calls of ``host_time`` do on the CPU up to the launch of their kernels.

    python -m benchmarks.host_steps --only lsr_head

It needs no GPU: tensors are on the CPU and no kernel runs. The function of the CUDA driver that
launches is replaced by one that does nothing, and all code that leads to it is ours.

Timed: CPU microseconds of a call. They lack the time of the driver for a launch and of the CUDA
allocator for memory, and include products that torch computes. Backward runs in the thread that
calls it, not in a thread of the GPU. Counted: functions of Python and of C that are entered,
operations of torch, launches, and the different functions and files of a pass.

Baseline: another commit on the same machine. Gate: none here. The counts are bounded by
``tests/benchmarks/test_host_steps.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import host_time
from tilefold.ops._shared import calls, impl, internals, operator
from tilefold.ops._shared._triton import cuda_driver, launch
from tilefold.ops.entmax_attention import configs as attention_configs

BENCHMARKS_FOLDER = Path(__file__).parent
PACKAGE_FOLDER = Path(operator.__file__).parents[2]
WARMUP_CALLS = 5
# counts of a call are the fewest of these, because the interpreter now and then adds its own
COUNTED_CALLS = 3
# the GPU that kernels are chosen for: an H200
CAPABILITY = (9, 0)
SM_COUNT = 132
# bytes of a tensor map, the descriptor of the Tensor Memory Accelerator
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, order=True)
class CallCounts:
    """The functions and operations that a call enters.

    Attributes:
        python_calls: functions of Python, with repetitions.
        c_calls: functions of C, with repetitions.
        launches: launches of kernels.
        functions: different functions of Python, of all packages.
        files: different files of tilefold.
    """

    python_calls: int
    c_calls: int
    launches: int
    functions: int
    files: int


def main() -> int:
    """Print a row per call."""
    options = parse_arguments()
    torch.set_num_threads(1)
    replace_gpu()
    gc.collect()
    # otherwise every collection looks through all that was imported, several times a row
    gc.freeze()
    print(
        f"{'call':44s} {'us':>8s} {'python':>7s} {'C':>6s} {'torch':>6s} {'launches':>9s} "
        f"{'functions':>10s} {'files':>6s}",
    )
    for name, prepare in host_time.cases():
        if options.only and not any(text in name for text in options.only):
            continue
        try:
            call = prepare()
            for _ in range(WARMUP_CALLS):
                call()
            microseconds = fewest_microseconds(call, options.calls, options.samples)
        except Exception as error:
            print(f"{name:44s} {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        is_training = name.endswith(host_time.TRAINING_SUFFIX)
        counts = count_calls(call, within="backward" if is_training else None)
        print(
            f"{name:44s} {microseconds:8.1f} {counts.python_calls:7d} {counts.c_calls:6d} "
            f"{count_operations(call):6d} {counts.launches:9d} {counts.functions:10d} "
            f"{counts.files:6d}",
            flush=True,
        )
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
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
    return parser.parse_args()


def replace_gpu() -> None:
    """Replace the functions that need a GPU, so that calls with CPU tensors take its path.

    Kernels are neither compiled nor run. Everything up to the C function that launches them stays.
    """
    host_time.DEVICE = "cpu"
    implementations: Any = impl
    private_interfaces: Any = internals
    launching: Any = launch
    driver: Any = cuda_driver
    operators: Any = operator
    attention: Any = attention_configs

    implementations.resolve_impl = lambda *_: "triton"
    implementations.INTERPRETER_FAULTS = {}
    # a C function of one argument costs as little as the original
    private_interfaces.current_stream = abs
    private_interfaces.tma_map = lambda descriptor, description: bytes(TENSOR_MAP_BYTES)
    # values of CPU tensors can be read without waiting, those of a GPU cannot
    operators.host_may_read = lambda device, impl: False
    operators.capability_of = lambda device: CAPABILITY
    attention.capability_of = lambda device: CAPABILITY
    operators.sm_count = lambda device: SM_COUNT
    driver.enter_context = lambda index: None
    # accepts any arguments, and returns 0
    driver.driver_function = lambda name: ctypes.CDLL(None).sched_yield
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY

    def compile_nothing(self: Any, build: Any) -> SimpleNamespace:
        return imitate_kernel(build.arguments, build.constants)

    launching.KernelLauncher.run_with_triton = compile_nothing


def imitate_kernel(arguments: tuple[Any, ...], constants: dict[str, Any]) -> SimpleNamespace:
    """Return an object with the attributes of a compiled Triton kernel.

    Args:
        arguments: the arguments that the kernel would be compiled for. None, tensors, numbers and
            tensor descriptors.
        constants: its compile-time constants.
    """
    kinds = []
    ptx_parameters: list[str] = []
    for argument in arguments:
        if argument is None:
            kinds.append("constexpr")
            continue
        kinds.append("*" if hasattr(argument, "data_ptr") else "value")
        if type(argument).__name__ == "TensorDescriptor":
            ptx_parameters.append(f".param .align 64 .b8 map[{TENSOR_MAP_BYTES}]")
            # sizes and strides of the two dimensions
            ptx_parameters += [".param .u64 size"] * 4
        else:
            ptx_type = "f32" if isinstance(argument, float) else "u64"
            ptx_parameters.append(f".param .{ptx_type} value")
    kinds += ["constexpr"] * len(constants)
    return SimpleNamespace(
        metadata=SimpleNamespace(name="kernel", num_warps=4, shared=0),
        src=SimpleNamespace(signature=dict(enumerate(kinds))),
        function=1,
        asm={"ptx": f".entry kernel({','.join(ptx_parameters)})"},
    )


def fewest_microseconds(call: host_time.Call, n_calls: int, n_samples: int) -> float:
    """Return the CPU microseconds of a call in the fastest sample.

    Other programs on the machine disturb the fastest sample least.

    Args:
        call: the call.
        n_calls: the calls per sample.
        n_samples: the number of samples.
    """
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(n_samples):
            begin = time.thread_time()
            for _ in range(n_calls):
                call()
            samples.append(1e6 * (time.thread_time() - begin) / n_calls)
    finally:
        gc.enable()
    return min(samples)


def count_calls(call: host_time.Call, within: str | None = None) -> CallCounts:
    """Count the functions that a call enters.

    Args:
        call: the call.
        within: the name of the method of an operator to which ``functions`` and ``files`` are
            restricted. None counts those of the whole call.

    Returns:
        The fewest of several calls.
    """
    return min(_count_calls_once(call, within) for _ in range(COUNTED_CALLS))


def _count_calls_once(call: host_time.Call, within: str | None) -> CallCounts:
    """Count the functions that one call enters, with the profiling hook of the interpreter."""
    events = {"call": 0, "c_call": 0}
    launches = 0
    is_inside = within is None
    functions = set[tuple[str, str]]()

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal launches, is_inside
        if event in events:
            events[event] += 1
        file = frame.f_code.co_filename
        function = frame.f_code.co_name
        if event == "call" and function == "launch" and file == cuda_driver.__file__:
            launches += 1
        if file == calls.__file__ and function == within:
            is_inside = event != "return"
        if event == "call" and is_inside and not file.startswith(str(BENCHMARKS_FOLDER)):
            functions.add((file, function))

    gc.collect()
    # finalizers of collected objects would be counted
    gc.disable()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    files = {file for file, _ in functions if file.startswith(str(PACKAGE_FOLDER))}
    return CallCounts(
        # one of each is the end of profiling
        python_calls=events["call"] - 1,
        c_calls=events["c_call"] - 1,
        launches=launches,
        functions=len(functions),
        files=len(files),
    )


def count_operations(call: host_time.Call) -> int:
    """Count the torch operations of a call, with those that are parts of others."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))


if __name__ == "__main__":
    sys.exit(main())
