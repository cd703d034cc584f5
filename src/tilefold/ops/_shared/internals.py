"""What tilefold uses of torch and Triton that neither promises; no other file names a private of either.

``tests/ops/shared/test_internals.py`` fails with a release that changed one of them. This file imports without Triton.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilefold.ops._shared._triton.releases import launches_by_address

Launch = Callable[[Sequence[Any]], None]  # of tensors, of what has an address like them, and of None
Addresses = tuple["int | None", ...]
LaunchAt = Callable[[Addresses], None]
Grid = tuple[int, int, int]
MAX_DESCRIPTORS = 64  # kept per launch; blocks of a vocabulary lie at addresses of their own


class Tma(NamedTuple):
    """How a kernel reads a contiguous tensor through a TMA descriptor.

    Attributes:
        rows, columns: the matrix that the tensor holds.
        make: what makes the descriptor of such a matrix.
    """

    rows: int
    columns: int
    make: Callable[[Tensor], Any]

    def of(self, tensor: Any) -> Any:
        """The descriptor of this tensor."""
        return self.make(tensor.view(self.rows, self.columns))


def is_on_current(tensor: Tensor) -> bool:
    """Whether the GPU of the tensor is the current one; true of all that lie on none."""
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def no_dispatch_mode() -> bool:
    """Whether no dispatch mode and no functorch transform is active. Not to be called under torch.compile."""
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def in_function_transform() -> bool:
    """Whether ``torch.func`` differentiates what runs (``grad``, ``vjp``, ``jacrev``; not ``vmap`` alone)."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    differentiating = torch._C._functorch.TransformType.Grad
    return any(level.key() == differentiating for level in torch._C._functorch.get_interpreter_stack() or ())


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` past what torch does before it in Python, which is for transforms: not for calls under one."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor stands for several gradients at once (``is_grads_batched``)."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def precision_reader() -> Callable[[str, str], str] | None:
    """What reads the precision of fp32 products of a backend, ``None`` before torch 2.9."""
    reader: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    return reader


def triton_cache() -> str:
    """The folder in which Triton keeps what it has built."""
    from triton import knobs  # noqa: PLC0415

    return str(knobs.cache.dir)


def copy_each(to: list[Tensor], found: list[Tensor]) -> None:
    """Copy each tensor to its place, all in as few launches as can be."""
    torch._foreach_copy_(to, found)


@functools.cache
def _triton_runtime() -> Any:
    from triton import knobs  # noqa: PLC0415

    return knobs.runtime


def specialized(kernel: Any) -> list[bool]:
    """For which of its arguments Triton builds kernels of their own for 1 and for multiples of 16."""
    return [not parameter.do_not_specialize for parameter in kernel.params]


def hooked() -> bool:
    """Whether a profiler wants to hear of every launch, which Triton's own call tells it."""
    runtime = _triton_runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Bound(NamedTuple):
    """How a kernel that ran before is launched again, on the current device and its current stream.

    Nobody checks what it is given: tensors must lie on the device and be aligned as they were when it was compiled.

    Attributes:
        launch: with tensors.
        launch_at: with their addresses; ``None`` where the launcher's arguments are not known.
    """

    launch: Launch
    launch_at: LaunchAt | None


def bind(compiled: Any, grid: Grid, tail: tuple[Any, ...], tma: Sequence[Tma | None] = ()) -> Bound:
    """What launches a compiled kernel.

    Triton's own call asks for the device, collects metadata for hooks and has the driver look at every pointer, which
    takes the host as long as a small kernel takes the device. Where the launcher's arguments are known it is called
    directly; elsewhere through ``compiled[grid]``. Both take addresses: the driver, which Triton asks about tensors,
    does not know all that a CUDA graph owns.

    Args:
        compiled: the compiled kernel.
        grid: its programs.
        tail: the arguments after the tensors, constants included.
        tma: by argument, how the tensor is described; those after the last one are plain pointers.
    """
    found = _launcher_function(compiled, sum(entry is not None for entry in tma))
    if found is None:
        run = compiled[grid]

        def by_triton(tensors: Sequence[Any]) -> None:
            pairs = zip_longest(tensors, tma[: len(tensors)])
            run(*[None if x is None else x.data_ptr() if by is None else by.of(x) for x, by in pairs], *tail)

        return Bound(by_triton, None)
    function, metadata = found
    cooperative, overlapped = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl
    between = compiled.function, cooperative, overlapped, None, None, compiled.packed_metadata, None, None, None
    stream, index = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()
    described = _Described(tma, metadata)
    count, known = described.count, described.known
    x, y, z = grid

    def launch(tensors: Sequence[Any]) -> None:
        given = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
        if count:
            given = *(known.get(given[:count]) or described(given[:count])), *given[count:]
        function(x, y, z, stream(index), *between, *given, *tail)

    def launch_at(given: Addresses) -> None:
        if count:
            given = *(known.get(given[:count]) or described(given[:count])), *given[count:]
        function(x, y, z, stream(index), *between, *given, *tail)

    return Bound(launch, launch_at)


def _launcher_function(compiled: Any, descriptors: int) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The C function that launches a compiled kernel, and the metadata of its ``descriptors``.

    ``None`` where its arguments are not known for sure.
    """
    launcher = compiled.run
    if not launches_by_address() or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    function: Callable[..., None] = launcher.launch
    if not descriptors:
        return None if hasattr(function, "__code__") else (function, ())
    # a Python function, which takes descriptors apart, holds the one that launches
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "launcher" not in names or "tensordesc_meta" not in names:
        return None
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
    metadata = cells["tensordesc_meta"].cell_contents
    if len(metadata) != descriptors or not all(metadata):
        return None
    return cells["launcher"].cell_contents, metadata


class _Described:
    """What stands among a launch's arguments for its first tensors, some of which a kernel reads by TMA, by address.

    A descriptor holds an address, a shape and strides and no contents, so it may be used again for any matrix there.

    Attributes:
        count: how many tensors come first.
        known: the arguments by the addresses of those.
    """

    def __init__(self, tma: Sequence[Tma | None], metadata: Sequence[Any]) -> None:
        given = iter(metadata)
        self._how = [(entry, None if entry is None else next(given)) for entry in tma]
        self.count = len(tma)
        self.known: dict[Addresses, list[Any]] = {}

    def __call__(self, addresses: Addresses) -> list[Any]:
        found: list[Any] = []
        for address, (entry, metadata) in zip(addresses, self._how, strict=True):
            found += (address,) if entry is None or address is None else _descriptor(address, entry, metadata)
        if len(self.known) >= MAX_DESCRIPTORS:
            self.known.clear()
        self.known[addresses] = found
        return found


def _descriptor(address: int, tma: Tma, metadata: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415

    from tilefold.ops._shared._triton.context import enter_context  # noqa: PLC0415 (needs a GPU)

    enter_context(torch.cuda.current_device())
    # what Triton reads of a TensorDescriptor, whose checks the first call passed
    matrix = SimpleNamespace(
        base=SimpleNamespace(data_ptr=address.__index__), shape=[tma.rows, tma.columns], strides=[tma.columns, 1],
        padding="zero",
    )  # fmt: skip
    found: list[Any] = make_tensordesc_arg(matrix, metadata)
    return found


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Torch's flash attention of packed 16-bit ``[T, H, D]``, differentiable, with ``|i - j| <= window``.

    ``torch.nn.attention.varlen`` calls the same kernels, but has no dropout and costs the host more per call.
    """
    side = -1 if window is None else window
    found = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        False,
        False,
        scale=scale,
        window_size_left=side,
        window_size_right=side,
    )
    out: Tensor = found[0]
    return out


def efficient_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Torch's memory-efficient attention of packed ``[T, H, D]``, differentiable, in fp32 too."""
    found = torch.ops.aten._efficient_attention_forward.default(
        query[None],
        key[None],
        value[None],
        None,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        0,
        torch.is_grad_enabled(),
        scale=scale,
    )
    out: Tensor = found[0]
    return out[0]


@functools.cache
def has_onednn_linear() -> bool:
    """Whether torch has oneDNN's linear layer for x86, which its own compiler of code for the CPU uses."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return x86 and available and all(hasattr(torch.ops.mkldnn, name) for name in names)


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` in fp32 on the CPU; the weight ``[N, K]`` as it is, or as :func:`onednn_packed`."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def onednn_packed(weight: Tensor, rows: int) -> Tensor:
    """The weight in the blocks that suit this number of rows."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return found
