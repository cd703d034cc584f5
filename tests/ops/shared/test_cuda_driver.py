"""A bound launch gives the CUDA driver what the kernel's PTX declares.

That is the stream, addresses, numbers and TMA maps. A fake driver records them without a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels import triton_interpreted
from tests.ops.base import BUILD_OPTIONS, Launch, fallback, internals
from tests.ops.launching import Build, KernelLauncher, Memory, bind, cuda_driver, driver_launch

compiles = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)


@triton.jit
def _scale_kernel(x_ptr, out_ptr, absent_ptr, n, offset, scale, BLOCK: tl.constexpr):
    """Store ``x * scale + offset`` for ``[n]`` numbers, in one program."""
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * scale + offset, mask=i < n)


@triton.jit
def _described_kernel(x, out_ptr, n, BLOCK: tl.constexpr):
    """Store the sum of each row of a tile ``x``, which is read by TMA, plus ``n``."""
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.sum(x.load([0, 0]), 1) + n)


# Parameters c and d are scratch.
PTX = (
    ".visible .entry kernel(.param .u64 .ptr .global .align 1 a, .param .u32 b, "
    ".param .u64 c, .param .u64 d)"
)
METADATA = SimpleNamespace(name="kernel", num_warps=1, shared=0)
LOADED_KERNEL = SimpleNamespace(function=7, metadata=METADATA)
ADDRESS: tuple[Any, Any] = (0, None)  # the first of the addresses
NUMBER: tuple[Any, Any] = (None, 3)


class DriverCall(NamedTuple):
    """What the driver is given for a launch.

    Attributes:
        grid: Numbers of blocks.
        threads: Threads of a block.
        shared: Bytes of shared memory.
        stream: Handle of the CUDA stream.
        function: Handle of the kernel.
        parameters: Address of the memory of each parameter.
    """

    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    function: int
    parameters: list[int]


class FakeDriver:
    """Records calls of the driver's cuLaunchKernelEx, which needs a GPU.

    Args:
        monkeypatch: Replaces the driver's functions until the end of the test.
        count: Number of parameters of a launch.
        errors: Results of the first launches. Later ones return 0, which is success.

    Attributes:
        calls: The launches.
        replaced_addresses: Addresses that were written into TMA maps.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int = 4,
        errors: list[int] | None = None,
    ) -> None:
        self.calls: list[DriverCall] = []
        self.replaced_addresses: list[int] = []
        self.count = count
        self._errors = errors or []
        functions = {
            "cuLaunchKernelEx": self.launch,
            "cuTensorMapReplaceAddress": self.replace_address,
        }
        monkeypatch.setattr(cuda_driver, "driver_function", functions.__getitem__)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(internals, "current_stream", lambda index: 100 + index)

    def launch(self, config_at: Any, function: Any, parameters_at: Any, extra: None) -> int:
        config = cuda_driver._Config.from_address(config_at.value)
        parameters = (ctypes.c_void_p * self.count).from_address(parameters_at.value)
        call = DriverCall(
            grid=(config.grid_x, config.grid_y, config.grid_z),
            threads=config.block_x,
            shared=config.shared,
            stream=config.stream,
            function=function.value,
            parameters=[address or 0 for address in parameters],
        )
        self.calls.append(call)
        return self._errors.pop(0) if self._errors else 0

    def replace_address(self, map_at: Any, address: Any) -> int:
        assert map_at.value % 64 == 0
        self.replaced_addresses.append(address.value)
        ctypes.c_uint64.from_address(map_at.value).value = address.value
        return 0

    def pointers(self) -> list[int]:
        """The present values of the first two parameters of the last launch."""
        first_two = self.calls[-1].parameters[:2]
        return [ctypes.c_uint64.from_address(address).value for address in first_two]


def values_at(addresses: list[int], types: tuple[Any, ...]) -> list[Any]:
    """Values of C types at the first of these addresses."""
    pairs = zip(types, addresses, strict=False)
    return [c_type.from_address(address).value for c_type, address in pairs]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """Compile a kernel for Hopper.

    Args:
        kernel: The kernel.
        types: Types of its run-time arguments.
        constants: Values of all other arguments.

    Returns:
        The compiled kernel as a launch sees it, with a function handle of 1234.
    """
    signature = types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    result = triton.compile(
        ASTSource(kernel, signature, constants),
        GPUTarget("cuda", 90, 32),
        {"num_warps": 8} | BUILD_OPTIONS,
    )
    return SimpleNamespace(metadata=result.metadata, src=result.src, asm=result.asm, function=1234)


@compiles
def test_parameters_are_laid_out_as_the_kernel_declares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(monkeypatch)
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "offset": "i64", "scale": "fp32"}
    kernel = compiled(_scale_kernel, types, {"absent_ptr": None, "BLOCK": 64})
    declared = cuda_driver.parameters(kernel.asm["ptx"])
    assert declared[:5] == [("u", 8), ("u", 8), ("u", 4), ("u", 8), ("f", 4)]
    driver.count = len(declared)
    x = torch.ones(64)
    out = torch.ones(64)
    numbers = [-7, 1 << 40, 0.25]
    launch_at = bind(kernel, (5, 6, 1), (x, out, None, *numbers), ())
    assert launch_at is not None
    launch_at((x.data_ptr(), out.data_ptr(), None))
    assert driver.pointers() == [x.data_ptr(), out.data_ptr()]
    launch_at((out.data_ptr(), x.data_ptr(), None))
    assert driver.pointers() == [out.data_ptr(), x.data_ptr()]
    first, second = driver.calls
    assert first == second
    assert first[:5] == ((5, 6, 1), 256, kernel.metadata.shared, 103, 1234)
    number_types = (ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
    assert values_at(first.parameters[2:], number_types) == numbers
    scratch_addresses = first.parameters[5:]
    scratch = [ctypes.c_uint64.from_address(address).value for address in scratch_addresses]
    assert scratch == [0] * len(scratch_addresses)


@compiles
def test_a_map_gets_the_address_of_its_matrix_and_is_followed_by_shape_and_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(monkeypatch, count=9)
    kernel = compiled(
        _described_kernel,
        {"x": "tensordesc<fp32[64, 32]>", "out_ptr": "*fp32", "n": "i32"},
        {"BLOCK": 64},
    )
    declared = cuda_driver.parameters(kernel.asm["ptx"])
    assert declared[0] == ("b", 128)
    assert [size for _, size in declared[1:7]] == [4, 4, 8, 8, 8, 4]
    tma_map = bytes(range(128))
    monkeypatch.setattr(internals, "tma_map", lambda descriptor, description: tma_map)
    matrix = SimpleNamespace(shape=(64, 48), strides=(48, 1))
    descriptor = internals.Tma(64, 48, lambda *_: matrix)
    out = torch.ones(64)
    launch_at = bind(kernel, (1, 1, 1), (matrix, out, 9), (descriptor,))
    assert launch_at is not None
    for address in (16, 16, 32, 16):
        launch_at((address, out.data_ptr()))
        map_of_launch = ctypes.string_at(driver.calls[-1].parameters[0], 128)
        assert map_of_launch == address.to_bytes(8, "little") + tma_map[8:]
    assert driver.replaced_addresses == [16, 32, 16]
    types = (
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_int32,
    )
    values = values_at(driver.calls[0].parameters[1:], types)
    assert values == [64, 48, 48, 1, out.data_ptr(), 9]


class MapHolder:
    """As large as Triton's object, with an address where that object has its map."""

    __slots__ = tuple(f"field_{number:02}" for number in range(30))


def test_a_map_is_made_by_the_function_of_the_installed_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import driver

    assert MapHolder.__basicsize__ == internals.TMA_MAP_OFFSET + internals.TMA_MAP_BYTES
    marker = object()
    address = id(marker)
    calls: list[tuple[Any, ...]] = []

    def fill(*arguments: Any) -> object:
        calls.append(arguments)
        is_triton_34 = isinstance(arguments[5], list) and not isinstance(arguments[4], list)
        if is_triton_34:  # it writes the map to an address
            map_at, matrix_at = arguments[:2]
            ctypes.c_uint64.from_address(map_at).value = matrix_at
            return None
        holder = MapHolder()
        holder.field_14 = marker  # type: ignore[attr-defined]
        return holder

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active_driver = "active" if "active" in vars(driver) else "_active"
    monkeypatch.setattr(driver, active_driver, SimpleNamespace(utils=utils))
    # The stock one checks the alignment of the address.
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda self: None)
    descriptor = TensorDescriptor(Memory(torch.float32, address), [64, 48], [48, 1], [64, 32])
    description = {
        "swizzle": 3,
        "elem_size": 4,
        "elem_type": 7,
        "block_size": [64, 32],
        "fp4_padded": False,
        "is_im2col": False,
    }
    tma_map = internals.tma_map(descriptor, description)
    assert tma_map is not None
    assert len(tma_map) == 128
    assert tma_map[:8] == address.to_bytes(8, "little")
    assert address in calls[-1]
    assert internals.tma_map(descriptor, None) is None


def compiled_without_gpu(asm: dict[str, str], **metadata_options: bool) -> Any:
    """A compiled kernel of a pointer and an integer, as Triton returns it from a launch."""
    metadata = SimpleNamespace(name="kernel", num_warps=4, shared=0, **metadata_options)
    src = SimpleNamespace(signature={"x_ptr": "*fp32", "n": "i32"})
    return SimpleNamespace(metadata=metadata, src=src, asm=asm, function=7)


def test_a_kernel_of_unexpected_parameters_is_not_bound_and_warns_once(
    monkeypatch: pytest.MonkeyPatch,
    no_failed_kernel: None,
) -> None:
    FakeDriver(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    kernel = compiled_without_gpu({"ptx": PTX.replace(".u32 b", ".u64 b")})
    with pytest.warns(
        fallback.FallbackWarning,
        match="past Triton .* parameter 1 of kernel is .u64, and 1.5 was given",
    ) as warnings:
        for _ in range(2):
            assert bind(kernel, (1, 1, 1), (torch.ones(4), 1.5), ()) is None
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("kernel", "is_bound"),
    [
        pytest.param(compiled_without_gpu({"ptx": PTX}), True, id="plain"),
        pytest.param(compiled_without_gpu({"amdgcn": ""}), False, id="for AMD"),
        pytest.param(
            compiled_without_gpu({"ptx": PTX}, launch_cooperative_grid=True),
            False,
            id="cooperative",
        ),
    ],
)
def test_kernels_that_only_triton_launches_are_not_bound(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    is_bound: bool,
) -> None:
    FakeDriver(monkeypatch)
    launch_at = bind(kernel, (1, 1, 1), (torch.ones(4), 9), ())
    assert (launch_at is not None) == is_bound


def test_the_first_argument_of_a_name_is_its_descriptor_and_others_are_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds: list[Build] = []

    def record_build(self: KernelLauncher, build: Build) -> None:
        builds.append(build)

    def describe(*arguments: Any) -> tuple[Any, ...]:
        return arguments

    monkeypatch.setattr(KernelLauncher, "run_with_triton", record_build)
    tma = {"x": internals.Tma(2, 3, describe)}
    launcher = KernelLauncher(
        Launch(_scale_kernel, (1, 1, 1), ("y", "x", "x", "nothing"), (9,), {}, tma),
    )
    dtypes = (torch.bool, torch.float32, torch.float32, None)
    launcher(True, (32, 64, 64, None), dtypes)
    mask, descriptor, x, nothing, number = builds[0].arguments
    described_x, shape, strides = descriptor
    assert shape == [2, 3]
    assert strides == [3, 1]
    assert nothing is None
    assert number == 9
    if not triton_interpreted():
        assert described_x == x == Memory(torch.float32, 64)
        assert mask == Memory(torch.uint8, 32)


@compiles
def test_builds_differ_by_the_blocks_of_descriptors_and_not_by_their_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = Memory(torch.float32, 64)

    def key(rows: int, block_rows: int) -> Any:
        descriptor = TensorDescriptor(x, [rows, 48], [48, 1], [block_rows, 32])
        return Build(_described_kernel, (1, 1, 1), (descriptor, x, 9), {"BLOCK": 64}).key

    assert key(64, 32) != key(64, 64)
    assert key(64, 64) == key(70, 64)


def test_a_launch_is_bound_once_it_was_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    launched: list[Any] = []

    def launch_with_triton(self: KernelLauncher, build: Build) -> Any:
        launched.append(build.arguments)
        return compiled_without_gpu({"ptx": PTX})

    monkeypatch.setattr(KernelLauncher, "run_with_triton", launch_with_triton)
    launcher = KernelLauncher(Launch(_scale_kernel, (1, 1, 1), ("x",), (9,), {}))
    tensor = torch.ones(4)

    def launch(may_bind: bool) -> None:
        launched.clear()
        launcher(may_bind, (tensor.data_ptr(),), (torch.float32,))
        x, number = launched[0]
        assert x.data_ptr() == tensor.data_ptr()
        assert number == 9
        assert not driver.calls

    launch(may_bind=True)
    launch(may_bind=False)
    launch(may_bind=True)
    assert launcher.bound is not None
    launched.clear()
    launcher.bound((tensor.data_ptr(),))
    assert not launched
    assert driver.pointers()[0] == tensor.data_ptr()
    driver.calls.clear()
    launch(may_bind=False)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([ADDRESS, (1, None)], id="two addresses"),
        pytest.param([ADDRESS], id="no number"),
        pytest.param([ADDRESS, NUMBER, (None, 4), (None, 5), (None, 6)], id="too many numbers"),
        pytest.param([(0, bytes(128)), NUMBER], id="map in place of an address"),
        pytest.param([ADDRESS, (None, 0.5)], id="float in place of an integer"),
    ],
)
def test_other_arguments_than_declared_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[Any],
) -> None:
    FakeDriver(monkeypatch)
    with pytest.raises(ValueError, match="kernel"):
        driver_launch(LOADED_KERNEL, PTX, (1, 1, 1), arguments)


def test_more_than_two_undeclared_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    driver_launch(LOADED_KERNEL, PTX, (1, 1, 1), [ADDRESS, NUMBER])
    ptx = PTX.replace(")", ", .param .u64 e)")  # two parameters may be scratch, not three
    with pytest.raises(ValueError, match="kernel"):
        driver_launch(LOADED_KERNEL, ptx, (1, 1, 1), [ADDRESS, NUMBER])


class LoadedKernel:
    """A kernel that can be referenced weakly."""

    function = 7
    metadata = METADATA


def test_a_launch_holds_its_kernel_which_triton_unloads_with_the_last_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeDriver(monkeypatch)
    kernel = LoadedKernel()
    kernel_reference = weakref.ref(kernel)
    launch = driver_launch(kernel, PTX, (1, 1, 1), [ADDRESS, NUMBER])
    del kernel
    gc.collect()
    assert kernel_reference() is not None
    del launch
    gc.collect()
    assert kernel_reference() is None


def test_a_thread_without_a_context_enters_it_and_an_error_is_raised_with_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(monkeypatch, errors=[201, 0, 719])  # 201: there is no context
    entered_devices: list[int] = []
    monkeypatch.setattr(cuda_driver, "enter_context", entered_devices.append)
    monkeypatch.setattr(cuda_driver, "error_text", lambda error: f"text of {error}")
    launch = driver_launch(LOADED_KERNEL, PTX, (1, 1, 1), [ADDRESS, NUMBER])
    launch((64,))
    assert entered_devices == [3]
    assert len(driver.calls) == 2
    message = r"kernel could not be launched: CUDA error 719 \(text of 719\)"
    with pytest.raises(RuntimeError, match=message):
        launch((64,))


def test_threads_do_not_mix_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_addresses: list[tuple[int, int]] = []
    expected = threading.local()

    def check_address(config_at: Any, function: Any, parameters_at: Any, extra: None) -> int:
        first_parameter = (ctypes.c_void_p * 1).from_address(parameters_at.value)[0]
        address = ctypes.c_uint64.from_address(first_parameter or 0).value
        if address != expected.address:
            wrong_addresses.append((address, expected.address))
        return 0

    FakeDriver(monkeypatch)
    monkeypatch.setattr(cuda_driver, "driver_function", lambda name: check_address)
    launch = driver_launch(LOADED_KERNEL, PTX, (1, 1, 1), [ADDRESS, NUMBER])

    def launch_many(first_address: int) -> None:
        for address in range(first_address, first_address + 2000):
            expected.address = address
            launch((address,))

    threads = [threading.Thread(target=launch_many, args=(10000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_addresses


def launch_again(
    launcher: KernelLauncher,
    addresses: tuple[int | None, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> None:
    """Launch once more, as a program does."""
    if launcher.bound is None:
        launcher(True, addresses, dtypes)
    else:
        launcher.bound(addresses)


@pytest.mark.gpu
def test_the_driver_launches_kernels_that_triton_launched_before() -> None:
    constants = {"BLOCK": 64, "num_warps": 4}
    launcher = KernelLauncher(
        Launch(_scale_kernel, (1, 1, 1), ("x", "out", "absent"), (64, 1, 0.5), constants),
    )
    x = torch.randn(64, 32, device="cuda")
    other = torch.randn(64, 32, device="cuda")
    for source in (x, other, x, other):
        out = torch.full((64,), float("nan"), device="cuda")
        addresses = (source.data_ptr(), out.data_ptr(), None)
        launch_again(launcher, addresses, (torch.float32, torch.float32, None))
        assert torch.equal(out, source.flatten()[:64] * 0.5 + 1)
    assert launcher.bound is not None


@pytest.mark.gpu
def test_the_driver_launches_kernels_with_tma_maps() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no TMA on this GPU")
    tma = {"x": internals.Tma(64, 32, partial(TensorDescriptor, block_shape=[64, 32]))}
    constants = {"BLOCK": 64, "num_warps": 4}
    launcher = KernelLauncher(
        Launch(_described_kernel, (1, 1, 1), ("x", "out"), (3,), constants, tma),
    )
    x = torch.randn(64, 32, device="cuda")
    other = torch.randn(64, 32, device="cuda")
    for source in (x, other, x, other):
        out = torch.full((64,), float("nan"), device="cuda")
        addresses = (source.data_ptr(), out.data_ptr())
        launch_again(launcher, addresses, (torch.float32, torch.float32))
        torch.testing.assert_close(out, source.sum(1) + 3)
    assert launcher.bound is not None
