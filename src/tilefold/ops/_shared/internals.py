"""Private parts of torch and Triton, which no other file names; it imports without Triton."""

from __future__ import annotations

import ctypes
import functools
import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

Addresses = tuple["int | None", ...]
LaunchAt = Callable[[Addresses], None]
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
Grid = tuple[int, int, int]
TMA_MAP_BYTES = 128
TMA_MAP_OFFSET = 128  # bytes, of the map in the object that Triton keeps it in


class Tma(NamedTuple):
    """Contiguous tensor that a kernel reads as a matrix of these sizes, through a TMA descriptor."""

    rows: int
    columns: int
    make: Callable[
        [Any, list[int], list[int]],
        Any,
    ]  # of what has a dtype and an address, a shape and strides


current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    int,
)  # its handle, by device


def is_eager(tensor: Tensor) -> bool:
    """Whether no mode and no transform is active, nor ``tensor`` several at once; not to be asked
    in a trace.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def in_function_transform() -> bool:
    """Whether ``torch.func`` differentiates (``grad``, ``vjp``, ``jacrev``; not ``vmap`` alone)."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    differentiating = torch._C._functorch.TransformType.Grad
    return any(
        level.key() == differentiating
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` past what torch does before it in Python, which is for transforms: not for
    calls under one.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _precision_reader() -> Callable[[], str]:
    # PyTorch 2.9 and newer: one setting behind all switches. Once it was used, the old ones refuse
    # to be read.
    reader: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if reader is not None:
        return functools.partial(reader, "cuda", "matmul")
    matmul = torch.backends.cuda.matmul
    return lambda: "tf32" if matmul.allow_tf32 else "ieee"


matmul_precision = (
    _precision_reader()
)  # of products on a GPU, by whichever switch; microseconds per call count


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` may run in TF32, as cuBLAS would now; never for another dtype
    than fp32.
    """
    return dtype == torch.float32 and matmul_precision() == "tf32"


def triton_cache() -> str:
    """The folder in which Triton keeps what it has built."""
    from triton import knobs

    return str(knobs.cache.dir)


def copy_each(to: list[Tensor], found: list[Tensor]) -> None:
    """Copy each tensor to its place, all in as few launches as can be."""
    torch._foreach_copy_(to, found)


@functools.cache
def _triton_runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def specialized(kernel: Any) -> list[bool]:
    """For which of its arguments Triton builds kernels of their own for 1 and for multiples of 16."""
    return [not parameter.do_not_specialize for parameter in kernel.params]


def hooked() -> bool:
    """Whether a profiler wants to hear of every launch, which Triton's own call tells it."""
    runtime = _triton_runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_facts(compiled: Any) -> tuple[str, list[str], Sequence[Any]] | None:
    """PTX, kinds of arguments and descriptions of TMA maps; ``None`` of a kernel that only Triton's
    call launches.
    """
    metadata = compiled.metadata
    special = (
        "global_scratch_size",
        "profile_scratch_size",
        "launch_cooperative_grid",
        "launch_pdl",
    )
    ptx = compiled.asm.get("ptx")  # which ROCm has not
    if (
        not ptx
        or getattr(metadata, "num_ctas", 1) != 1
        or any(getattr(metadata, name, 0) for name in special)
    ):
        return None  # Triton does more for this kernel
    return (
        ptx,
        [*map(str, compiled.src.signature.values())],
        getattr(metadata, "tensordesc_meta", None) or (),
    )


def tma_map(descriptor: Any, description: dict[str, Any] | None) -> bytes | None:
    """TMA map of a descriptor; ``None`` where the kernel reads it by pointers."""
    from triton.backends.nvidia import driver

    if not description:
        return None
    make, address = driver.make_tensordesc_arg, descriptor.base.data_ptr()
    others = (None,) * (
        len(inspect.signature(make).parameters) - 2
    )  # of Gluon's barriers, from 3.8 on
    owner = make(descriptor, description, *others)[0]
    if hasattr(owner, "tma_desc_cpu_ptr"):  # 3.4
        found = ctypes.string_at(owner.tma_desc_cpu_ptr(), TMA_MAP_BYTES)
    elif type(owner).__basicsize__ == TMA_MAP_OFFSET + TMA_MAP_BYTES:
        found = ctypes.string_at(id(owner) + TMA_MAP_OFFSET, TMA_MAP_BYTES)
    else:
        raise ValueError(f"{type(owner).__name__} holds no TMA map where it is looked for")
    if int.from_bytes(found[:8], "little") != address:
        raise ValueError("a TMA map does not begin with the address of its matrix")
    return found


def flash_attention_varlen(
    qkv: Heads,
    cu_seqlens: Tensor,
    longest: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Torch's flash attention of packed 16-bit ``[T, H, D]``, differentiable, with ``|i - j| <=
    window``.
    """
    side = -1 if window is None else window
    packing = cu_seqlens, cu_seqlens, longest, longest, dropout_p, False, False
    sides = {"window_size_left": side, "window_size_right": side}
    out: Tensor = torch.ops.aten._flash_attention_forward.default(
        *qkv,
        *packing,
        scale=scale,
        **sides,
    )[0]
    return out


def efficient_attention_varlen(
    qkv: Heads,
    cu_seqlens: Tensor,
    longest: int,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Torch's memory-efficient attention of packed ``[T, H, D]``, differentiable, in fp32 too."""
    tensors, packing = (
        (each[None] for each in qkv),
        (cu_seqlens, cu_seqlens, longest, longest, dropout_p),
    )
    out: Tensor = torch.ops.aten._efficient_attention_forward.default(
        *tensors,
        None,
        *packing,
        0,
        torch.is_grad_enabled(),
        scale=scale,
    )[0]
    return out[0]


@functools.cache
def has_onednn_linear() -> bool:
    """Whether torch has oneDNN's linear layer for x86, which its own compiler of code for the CPU
    uses.
    """
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return x86 and available and all(hasattr(torch.ops.mkldnn, name) for name in names)


@functools.cache
def has_int8_products() -> bool:
    """Whether torch multiplies int8 on the CPU faster than fp32: oneDNN, by AVX-512."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        available
        and hasattr(torch, "_int_mm")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def int8_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Product ``rows @ columns.T`` of int8 matrices, exact, in int32.

    oneDNN takes the leading dimension of a matrix from its strides. Strides of 0, and strides of
    dimensions of size 1, mislead it: it then reads outside the memory of the matrix. It is
    therefore given row-major matrices only.

    Args:
        rows: int8 ``[M, K]`` of any strides.
        columns: int8 ``[N, K]`` of any strides.

    Returns:
        int32 ``[M, N]``.
    """
    if rows.size(1) < 2:  # a matrix of one column and its transpose have the same strides
        return rows.int() @ columns.int().T
    product: Tensor = torch._int_mm(_row_major(rows), _row_major(columns).T)
    return product


def _row_major(matrix: Tensor) -> Tensor:
    """Matrix ``[M, K]`` with strides ``(K, 1)``, which is copied only where it has others.

    ``contiguous()`` alone keeps any stride of a dimension of size 1.
    """
    return matrix.contiguous().view(-1).view(matrix.shape)


def takes_onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`onednn_linear` computes this product as ``torch.nn.functional.linear`` does.

    oneDNN reads a bias as consecutive numbers whatever its strides, and has no product over an
    empty dimension.

    Args:
        rows: ``[.., K]`` of any strides.
        weight: ``[N, K]``.
        bias: ``[N]``, or what else ``linear`` accepts.
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
    """Product ``rows @ weight.T + bias`` in fp32 on the CPU.

    Args:
        rows: ``[.., K]``; :func:`takes_onednn_linear` must hold.
        weight: ``[N, K]``, or what :func:`onednn_packed` made of it.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[.., N]``.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def onednn_packed(weight: Tensor, rows: int) -> Tensor:
    """Weight in the blocks that suit this number of rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed
