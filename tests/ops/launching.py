"""Private parts of launches, and kernels, that tests import from here. They need Triton."""

# ruff: noqa: F401

from __future__ import annotations

import threading

import triton
import triton.language as tl

from tests.waiting import wait_until
from tilefold.ops._shared import background
from tilefold.ops._shared._triton import cuda_driver, launch, program
from tilefold.ops._shared._triton.cuda_driver import bind, driver_launch
from tilefold.ops._shared._triton.launch import Build, KernelLauncher, Memory, recorded_builds
from tilefold.ops._shared._triton.program import Program
from tilefold.ops.entmax._triton import rows as entmax_kernels
from tilefold.ops.entmax_attention._triton.tiles import tables_kernel
from tilefold.ops.lsr_head._triton import pack as head_pack
from tilefold.ops.lsr_head._triton import quantize as head_quantize
from tilefold.ops.lsr_head._triton.max_backward import count_kernel
from tilefold.ops.lsr_head._triton.sum_pooling import check_offsets_kernel
from tilefold.ops.maxsim._triton.forward import combine_kernel
from tilefold.ops.maxsim._triton.norms import query_of
from tilefold.ops.token_scatter._triton.scatter import gather_kernel, scatter_kernel


@triton.jit  # type: ignore[untyped-decorator]
def owner_kernel(offset_ptr, out_ptr, n_rows, count, steps, BLOCK: tl.constexpr) -> None:
    """Store the query of each row, as :func:`query_of` finds it, for ``[n_rows]``."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row, query_of(offset_ptr, row, count, steps), mask=row < n_rows)


def wait_for_background_builds() -> None:
    """Wait until no background thread compiles kernels."""
    wait_until(
        lambda: all(thread.name != background.THREAD_NAME for thread in threading.enumerate()),
    )
