"""Private parts of torch and Triton, which only this file names.

Triton is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import platform
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

Addresses = tuple["int | None", ...]  # of tensors; None for a tensor that does not exist
LaunchAt = Callable[[Addresses], None]  # launches a kernel for tensors at these addresses
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
Grid = tuple[int, int, int]
TMA_MAP_BYTES = 128
TMA_MAP_OFFSET = 128  # bytes from the beginning of Triton's object to the TMA map in it


class Tma(NamedTuple):
    """How a contiguous tensor is described to TMA.

    Attributes:
        rows: rows of the matrix that a kernel reads the tensor as.
        columns: columns of the matrix.
        make: makes a descriptor of a stand-in for the tensor, a shape and strides.
    """

    rows: int
    columns: int
    make: Callable[[Any, list[int], list[int]], Any]


# number of the current GPU
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
# handle of the current CUDA stream, by the number of the GPU
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


def is_eager(tensor: Tensor) -> bool:
    """Return whether no mode and no transform is active, and ``tensor`` is not a batched one.

    It must not be called in a trace.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def in_function_transform() -> bool:
    """Return whether ``torch.func`` differentiates, by ``grad``, ``vjp`` or ``jacrev``."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    differentiating = torch._C._functorch.TransformType.Grad
    return any(
        level.key() == differentiating
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without the Python code that torch runs before it.

    That code is for transforms, so calls under a transform must use ``function.apply``.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _precision_reader(backend: str) -> Callable[[], str]:
    """Return a function that reads the precision of fp32 products.

    Args:
        backend: ``"cuda"`` for GPUs, or ``"mkldnn"`` for CPUs.
    """
    # PyTorch 2.9 and newer have one setting for all switches. Once it was used, the old switches
    # cannot be read any more.
    reader: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if reader is not None:
        return functools.partial(reader, backend, "matmul")
    if backend == "mkldnn":
        return torch.get_float32_matmul_precision
    matmul = torch.backends.cuda.matmul
    return lambda: "tf32" if matmul.allow_tf32 else "ieee"


# Reads the precision of fp32 products on a GPU: "tf32" or another. It is chosen once, since every
# call of an operator needs it.
matmul_precision = _precision_reader("cuda")
# Reads the precision of fp32 products on a CPU.
cpu_matmul_precision = _precision_reader("mkldnn")


def half_matmul_settings() -> tuple[Hashable, ...]:
    """Return torch's settings that may change the bits of 16-bit products on a GPU.

    They allow sums in 16 bits, and choose the library of products.
    """
    return (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_blas_preferred_backend(),
    )


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Return whether products of ``dtype`` may run in TF32, as those of cuBLAS.

    Only fp32 can.
    """
    return dtype == torch.float32 and matmul_precision() == "tf32"


def triton_cache() -> str:
    """Return the folder in which Triton stores compiled kernels."""
    from triton import knobs

    return str(knobs.cache.dir)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to other tensors, in as few launches as possible."""
    torch._foreach_copy_(targets, sources)


class _SharedWarnings:
    """Stand-in for the module ``warnings`` in Triton's code generator, for several threads.

    The generator ignores deprecations around every node of a syntax tree. That replaces the filters
    of the whole process, so two threads leave wrong filters behind, and other threads lose
    warnings. With the releases of Python that we support, there is no deprecation to ignore.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def catch_warnings(self) -> AbstractContextManager[None]:
        """Return a context that leaves the filters as they are."""
        return contextlib.nullcontext()

    def simplefilter(self, *_: object) -> None:
        """Leave the filters as they are."""


@functools.cache
def share_warning_filters() -> None:
    """Let Triton's code generator run in several threads without changing warning filters."""
    code_generator = importlib.import_module("triton.compiler.code_generator")
    if getattr(code_generator, "warnings", None) is warnings:
        code_generator.warnings = _SharedWarnings()  # type: ignore[attr-defined]


@functools.cache
def _triton_driver() -> Any:
    """Return Triton's driver, with the C module that it compiles when it is first used."""
    from triton.runtime import driver

    driver.active.get_current_target()
    return driver.active


# Held while Triton's driver is used for the first time, so that its module is compiled once.
_driver_lock = threading.Lock()


def load_driver() -> Any:
    """Return Triton's driver. Any thread may call this."""
    with _driver_lock:
        return _triton_driver()


def build_launcher(compiled: Any) -> None:
    """Compile the C function by which Triton launches a compiled kernel.

    Triton would compile it at the first launch. It is stored on disk, and the GPU is not used.
    Releases that need no such function do nothing.
    """
    load_driver().launcher_cls(compiled.src, compiled.metadata)


def start_compiler() -> None:
    """Start the processes in which torch's compiler compiles kernels, and import the compiler.

    The processes need seconds to start. Until then torch compiles kernels one after another.
    """
    workers = importlib.import_module("torch._inductor.async_compile")
    workers.AsyncCompile.use_process_pool()
    importlib.import_module("torch._inductor.compile_fx")  # while the processes start


@functools.cache
def _triton_runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def specialized(kernel: Any) -> list[bool]:
    """Return whether Triton specializes a kernel for 1 and multiples of 16, by parameter."""
    return [not parameter.do_not_specialize for parameter in kernel.params]


def has_launch_hooks() -> bool:
    """Return whether a profiler has installed hooks, which only Triton's own launches call."""
    runtime = _triton_runtime()
    enter_hook = runtime.launch_enter_hook
    exit_hook = runtime.launch_exit_hook
    # Newer releases have an object that lists the hooks.
    return bool(getattr(enter_hook, "calls", enter_hook) or getattr(exit_hook, "calls", exit_hook))


class LaunchFacts(NamedTuple):
    """Facts that the CUDA driver needs to launch a kernel.

    Attributes:
        ptx: the kernel's PTX.
        types: types of the kernel's parameters.
        descriptors: Triton's metadata of the TMA descriptors among the parameters.
    """

    ptx: str
    types: list[str]
    descriptors: Sequence[Any]


def launch_facts(compiled: Any) -> LaunchFacts | None:
    """Return what the CUDA driver needs to launch a kernel.

    The result is ``None`` if only Triton's own call can launch it.
    """
    metadata = compiled.metadata
    unsupported = (
        "global_scratch_size",
        "profile_scratch_size",
        "launch_cooperative_grid",
        "launch_pdl",
    )
    ptx = compiled.asm.get("ptx")  # ROCm has none
    if (
        not ptx
        or getattr(metadata, "num_ctas", 1) != 1
        or any(getattr(metadata, name, 0) for name in unsupported)
    ):
        return None
    types = [str(type_) for type_ in compiled.src.signature.values()]
    descriptors = getattr(metadata, "tensordesc_meta", None) or ()
    return LaunchFacts(ptx, types, descriptors)


def tma_map(descriptor: Any, description: dict[str, Any] | None) -> bytes | None:
    """Copy the 128-byte ``CUtensorMap`` out of the object that Triton makes of a descriptor.

    Triton 3.4 has a method for the map's address. In later releases the map is inside the object,
    at a fixed offset. The address of the matrix, with which a map begins, is checked.

    Args:
        descriptor: Triton's descriptor of a tensor.
        description: Triton's metadata of the kernel's parameter.

    Returns:
        The map, or ``None`` if the kernel reads the tensor by pointers.

    Raises:
        ValueError: if this release of Triton stores the map in another way.
    """
    from triton.backends.nvidia import driver

    if not description:
        return None
    make = driver.make_tensordesc_arg
    # Its parameters are a descriptor, its metadata and, from 3.8 on, barriers of Gluon, which are
    # None here.
    n_barriers = len(inspect.signature(make).parameters) - 2
    owner = make(descriptor, description, *[None] * n_barriers)[0]
    if hasattr(owner, "tma_desc_cpu_ptr"):  # 3.4
        tma_map_address = owner.tma_desc_cpu_ptr()
    elif type(owner).__basicsize__ == TMA_MAP_OFFSET + TMA_MAP_BYTES:
        tma_map_address = id(owner) + TMA_MAP_OFFSET
    else:
        raise ValueError(f"{type(owner).__name__} holds no TMA map at the expected offset")
    tma_map_bytes = ctypes.string_at(tma_map_address, TMA_MAP_BYTES)
    if int.from_bytes(tma_map_bytes[:8], "little") != descriptor.base.data_ptr():
        raise ValueError("a TMA map does not begin with the address of its matrix")
    return tma_map_bytes


class AttentionOptions(NamedTuple):
    """Options of softmax attention within packed sequences.

    Attributes:
        scale: factor of the scores; ``None`` uses ``D ** -0.5``.
        window: largest distance at which a query attends to a key; ``None`` for no limit.
        is_causal: whether a query attends to no later key.
        dropout_p: probability that a weight is dropped.
    """

    scale: float | None = None
    window: int | None = None
    is_causal: bool = False
    dropout_p: float = 0.0


def flash_attention_varlen(
    qkv: Heads,
    cu_seqlens: Tensor,
    longest: int,
    options: AttentionOptions,
) -> Tensor:
    """Compute torch's flash attention within packed sequences, differentiably, for 16 bits.

    Args:
        qkv: query ``[T, H, D]``, key and value ``[T, Hkv, D]``. Hkv divides H; heads of key and
            value that several heads of the query share are not copied.
        cu_seqlens: int32 ``[B + 1]`` offsets.
        longest: at least the length of the longest sequence.
        options: which keys a query attends to, the scale and the dropout.
    """
    window_left = -1 if options.window is None else options.window
    window_right = 0 if options.is_causal else window_left
    # For sequences of at most one token, torch regroups heads that share a head of key and value,
    # and would need exactly one token in each.
    if longest == 1:
        longest = 2
    out: Tensor = torch.ops.aten._flash_attention_forward.default(
        *qkv,
        cu_seqlens,  # of queries
        cu_seqlens,  # of keys
        longest,
        longest,
        options.dropout_p,
        options.is_causal,
        False,  # return_debug_mask
        scale=options.scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )[0]
    return out


# Values of ``custom_mask_type`` of torch's memory-efficient attention.
_NO_MASK = 0
_CAUSAL_FROM_TOP_LEFT = 1


def efficient_attention_varlen(
    qkv: Heads,
    cu_seqlens: Tensor,
    longest: int,
    options: AttentionOptions,
) -> Tensor:
    """Compute torch's memory-efficient attention within packed sequences, differentiably.

    It supports fp32, too, but no window.

    Args:
        qkv: query, key and value, ``[T, H, D]`` each.
        cu_seqlens: int32 ``[B + 1]`` offsets.
        longest: at least the length of the longest sequence.
        options: the scale, the dropout, and whether attention is causal.
    """
    query, key, value = qkv
    out: Tensor = torch.ops.aten._efficient_attention_forward.default(
        query[None],  # the operator takes a batch, of one pack here
        key[None],
        value[None],
        None,  # bias
        cu_seqlens,  # of queries
        cu_seqlens,  # of keys
        longest,
        longest,
        options.dropout_p,
        _CAUSAL_FROM_TOP_LEFT if options.is_causal else _NO_MASK,
        torch.is_grad_enabled(),  # compute_log_sumexp, for backward
        scale=options.scale,
    )[0]
    return out[0]


@functools.cache
def has_onednn_linear() -> bool:
    """Return whether torch has oneDNN's linear layer for x86, as its compiler for CPUs uses it."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    return is_x86 and available and all(hasattr(torch.ops.mkldnn, name) for name in operators)


@functools.cache
def has_int8_products() -> bool:
    """Return whether torch multiplies int8 on the CPU faster than fp32: oneDNN, by AVX-512."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        available
        and hasattr(torch, "_int_mm")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def int8_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the exact product ``rows @ columns.T`` of int8 matrices, in int32.

    oneDNN takes the leading dimension of a matrix from its strides. Strides of 0, and strides of
    dimensions of size 1, make it read outside the memory of the matrix. It is therefore given
    row-major matrices only.

    Args:
        rows: int8 ``[M, K]`` with any strides.
        columns: int8 ``[N, K]`` with any strides.

    Returns:
        int32 ``[M, N]``.
    """
    # A matrix of one column has the strides of its transpose, which oneDNN may take it for.
    if rows.size(1) < 2:
        return rows.int() @ columns.int().T
    product: Tensor = torch._int_mm(_row_major(rows), _row_major(columns).T)
    return product


def scaled_fp8_products(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return ``(rows @ weight.T) * row_scale * weight_scale + bias`` of fp8 matrices, in bf16.

    ``torch.nn.functional.scaled_mm`` is its public form, which torch 2.8 does not have.

    Args:
        rows: fp8 ``[N, K]``, with at least one row.
        row_scale: fp32 ``[N]``.
        weight: fp8 ``[M, K]``. K and M are multiples of 16.
        weight_scale: fp32 ``[M]``.
        bias: bf16 ``[M]``.
    """
    product: Tensor = torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scale[:, None],
        scale_b=weight_scale[None],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product


def _row_major(matrix: Tensor) -> Tensor:
    """Return a matrix ``[M, K]`` with strides ``(K, 1)``, a copy if it has others.

    ``contiguous()`` alone keeps any stride of a dimension of size 1.
    """
    return matrix.contiguous().view(-1).view(matrix.shape)


def can_use_onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether :func:`onednn_linear` computes what ``torch.nn.functional.linear`` does.

    oneDNN reads a bias as consecutive numbers for any strides, and does not support empty
    dimensions.

    Args:
        rows: ``[..., K]`` with any strides.
        weight: ``[N, K]``.
        bias: ``[N]``, or anything else that ``linear`` accepts.
    """
    return (
        all(
            tensor.device.type == "cpu"
            and tensor.dtype == torch.float32
            and tensor.layout == torch.strided
            for tensor in (rows, weight, bias)
            if tensor is not None
        )
        and weight.dim() == 2
        and weight.numel() > 0
        and weight.is_contiguous()
        and rows.size(-1) == weight.size(1)
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``rows @ weight.T + bias`` in fp32 on the CPU.

    Args:
        rows: ``[..., K]``; :func:`can_use_onednn_linear` must hold.
        weight: ``[N, K]``, or a weight packed by :func:`onednn_packed`.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[..., N]``.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows,
        weight,
        bias,
        "none",  # no activation, hence no scalars and no algorithm for it
        [],
        "",
    )
    return product


def onednn_packed(weight: Tensor, rows: int) -> Tensor:
    """Return a weight in the memory layout that is fast for this number of rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed
