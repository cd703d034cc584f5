"""A repeated launch gives the CUDA driver what the kernel's PTX declares: stream, addresses,
numbers, TMA maps.
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
from tests.refusals import refused

compiles = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)


@triton.jit
def _scale_kernel(x_ptr, out_ptr, absent_ptr, n, offset, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * scale + offset, mask=i < n)


@triton.jit
def _described_kernel(x, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.sum(x.load([0, 0]), 1) + n)


class Seen(NamedTuple):
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    function: int
    parameters: list[int]  # addresses of their memory


class Driver:
    """Stands where the driver's cuLaunchKernelEx does, which needs a GPU; notes what it is given."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int = 4,
        errors: list[int] | None = None,
    ) -> None:
        self.seen: list[Seen] = []
        self.replaced: list[int] = []
        self.count, self._errors = count, errors or []
        functions = {"cuLaunchKernelEx": self, "cuTensorMapReplaceAddress": self.replace}
        monkeypatch.setattr(cuda_driver, "driver_function", functions.__getitem__)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(internals, "current_stream", lambda index: 100 + index)

    def __call__(self, config_at: Any, function: Any, parameters_at: Any, extra: None) -> int:
        config = cuda_driver._Config.from_address(config_at.value)
        parameters = (ctypes.c_void_p * self.count).from_address(parameters_at.value)
        grid = config.grid_x, config.grid_y, config.grid_z
        seen = Seen(
            grid,
            config.block_x,
            config.shared,
            config.stream,
            function.value,
            [p or 0 for p in parameters],
        )
        self.seen.append(seen)
        return self._errors.pop(0) if self._errors else 0

    def replace(self, map_at: Any, address: Any) -> int:
        assert map_at.value % 64 == 0
        self.replaced.append(address.value)
        ctypes.c_uint64.from_address(map_at.value).value = address.value
        return 0

    def pointers(self) -> list[int]:
        """What the first two parameters of the last launch hold now."""
        return [ctypes.c_uint64.from_address(place).value for place in self.seen[-1].parameters[:2]]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    signature = types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    options = {"num_warps": 8} | BUILD_OPTIONS
    built = triton.compile(
        ASTSource(kernel, signature, constants),
        GPUTarget("cuda", 90, 32),
        options,
    )
    return SimpleNamespace(metadata=built.metadata, src=built.src, asm=built.asm, function=1234)


@compiles
def test_parameters_are_laid_out_as_the_kernel_declares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "offset": "i64", "scale": "fp32"}
    kernel = compiled(_scale_kernel, types, {"absent_ptr": None, "BLOCK": 64})
    assert cuda_driver.parameters(kernel.asm["ptx"])[:5] == [
        ("u", 8),
        ("u", 8),
        ("u", 4),
        ("u", 8),
        ("f", 4),
    ]
    driver.count = len(cuda_driver.parameters(kernel.asm["ptx"]))
    x, out = torch.ones(64), torch.ones(64)
    numbers = (-7, 1 << 40, 0.25)
    launch_at = bind(kernel, (5, 6, 1), (x, out, None, *numbers), ())
    assert launch_at is not None
    launch_at((x.data_ptr(), out.data_ptr(), None))
    assert driver.pointers() == [x.data_ptr(), out.data_ptr()]
    launch_at((out.data_ptr(), x.data_ptr(), None))
    assert driver.pointers() == [out.data_ptr(), x.data_ptr()]
    first, second = driver.seen
    assert first == second and first[:5] == ((5, 6, 1), 256, kernel.metadata.shared, 103, 1234)
    places = first.parameters
    kinds: tuple[Any, ...] = (ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
    found = [kind.from_address(place).value for kind, place in zip(kinds, places[2:], strict=False)]
    assert tuple(found) == numbers
    assert [ctypes.c_uint64.from_address(place).value for place in places[5:]] == [0] * len(
        places[5:],
    )  # no scratch


@compiles
def test_a_map_gets_the_address_of_its_matrix_and_is_followed_by_shape_and_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, count=9)
    kernel = compiled(
        _described_kernel,
        {"x": "tensordesc<fp32[64, 32]>", "out_ptr": "*fp32", "n": "i32"},
        {"BLOCK": 64},
    )
    declared = cuda_driver.parameters(kernel.asm["ptx"])
    assert declared[0] == ("b", 128) and [size for _, size in declared[1:7]] == [4, 4, 8, 8, 8, 4]
    like = bytes(range(128))
    monkeypatch.setattr(internals, "tma_map", lambda descriptor, description: like)
    matrix = SimpleNamespace(shape=(64, 48), strides=(48, 1))
    out = torch.ones(64)
    launch_at = bind(
        kernel,
        (1, 1, 1),
        (matrix, out, 9),
        (internals.Tma(64, 48, lambda *_: matrix),),
    )
    assert launch_at is not None
    for address in (16, 16, 32, 16):
        launch_at((address, out.data_ptr()))
        held = ctypes.string_at(driver.seen[-1].parameters[0], 128)
        assert held == address.to_bytes(8, "little") + like[8:]
    assert driver.replaced == [16, 32, 16]
    places = driver.seen[0].parameters
    kinds = (
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_int32,
    )
    found = [kind.from_address(place).value for kind, place in zip(kinds, places[1:], strict=False)]
    assert found == [64, 48, 48, 1, out.data_ptr(), 9]


def test_a_map_is_made_by_the_function_of_the_installed_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import driver

    here = object()

    class Holder:  # as large as Triton's object, with an address where that has its map
        __slots__ = tuple(f"place_{number:02}" for number in range(30))

    assert Holder.__basicsize__ == internals.TMA_MAP_OFFSET + internals.TMA_MAP_BYTES
    filled: list[tuple[Any, ...]] = []

    def fill(*given: Any) -> object:
        filled.append(given)
        if isinstance(given[5], list) and not isinstance(
            given[4],
            list,
        ):  # 3.4: where to, and then the address
            ctypes.c_uint64.from_address(given[0]).value = given[1]
            return None
        holder = Holder()
        holder.place_14 = here  # type: ignore[attr-defined]
        return holder

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(
        driver,
        "active" if "active" in vars(driver) else "_active",
        SimpleNamespace(utils=utils),
    )
    description = {
        "swizzle": 3,
        "elem_size": 4,
        "elem_type": 7,
        "block_size": [64, 32],
        "fp4_padded": False,
        "is_im2col": False,
    }
    monkeypatch.setattr(
        TensorDescriptor,
        "__post_init__",
        lambda self: None,
    )  # which looks at the alignment
    descriptor = TensorDescriptor(Memory(torch.float32, id(here)), [64, 48], [48, 1], [64, 32])
    found = internals.tma_map(descriptor, description)
    assert found is not None and len(found) == 128 and found[:8] == id(here).to_bytes(8, "little")
    assert id(here) in filled[-1]
    assert internals.tma_map(descriptor, None) is None


def unbound(asm: dict[str, str], **special: bool) -> Any:
    metadata = SimpleNamespace(name="kernel", num_warps=4, shared=0, **special)
    src = SimpleNamespace(signature={"x_ptr": "*fp32", "n": "i32"})
    return SimpleNamespace(metadata=metadata, src=src, asm=asm, function=7)


def test_a_changed_release_is_said_once_and_what_only_triton_launches_is_not_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch)
    monkeypatch.setattr(fallback, "GIVEN_UP", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    compiled = unbound({"ptx": PTX.replace(".u32 b", ".u64 b")})
    with pytest.warns(
        fallback.FallbackWarning,
        match="past Triton .* parameter 1 of kernel is .u64, and 1.5 was given",
    ) as said:
        for _ in range(2):
            assert bind(compiled, (1, 1, 1), (torch.ones(4), 1.5), ()) is None
    assert len(said) == 1
    assert bind(unbound({"ptx": PTX}), (1, 1, 1), (torch.ones(4), 9), ()) is not None
    for other in (
        unbound({"amdgcn": ""}),
        unbound({"ptx": PTX}, launch_cooperative_grid=True),
    ):  # only by Triton
        assert bind(other, (1, 1, 1), (torch.ones(4), 9), ()) is None


def test_the_first_argument_of_a_name_is_its_descriptor_and_others_are_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[Build] = []
    monkeypatch.setattr(
        KernelLauncher, "run_with_triton", lambda self, build: launched.append(build)
    )
    described = internals.Tma(2, 3, lambda *given: given)
    dtypes = torch.bool, torch.float32, torch.float32, None
    KernelLauncher(Launch(_scale_kernel, (1, 1, 1), "y x x nothing", (9,), {}, {"x": described}))(
        True,
        (32, 64, 64, None),
        dtypes,
    )
    mask, (matrix, shape, strides), again, nothing, number = launched[0].arguments
    assert shape == [2, 3] and strides == [3, 1] and nothing is None and number == 9
    if not triton_interpreted():
        assert matrix == again == Memory(torch.float32, 64) and mask == Memory(torch.uint8, 32)


@compiles
def test_descriptors_of_every_release_are_told_apart_by_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = Memory(torch.float32, 64)
    described = [
        TensorDescriptor(x, [rows, 48], [48, 1], [block, 32])
        for rows, block in ((64, 32), (64, 64), (70, 64))
    ]
    keys = [
        Build(_described_kernel, (1, 1, 1), (each, x, 9), {"BLOCK": 64}).key for each in described
    ]
    assert keys[0] != keys[1] == keys[2]


def test_a_step_is_bound_when_it_is_repeated_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, launched = Driver(monkeypatch), list[Any]()

    def call(self: KernelLauncher, build: Build) -> Any:
        launched.append(build.arguments)
        return unbound({"ptx": PTX})

    monkeypatch.setattr(KernelLauncher, "run_with_triton", call)
    step, dtypes = KernelLauncher(Launch(_scale_kernel, (1, 1, 1), "x", (9,), {})), (torch.float32,)
    tensor = torch.ones(4)
    for same, bound in ((True, 0), (False, 0), (True, 0), (True, 1), (False, 0)):
        launched.clear()
        driver.seen.clear()
        if bound:
            assert step.bound is not None
            step.bound((tensor.data_ptr(),))
            assert not launched and driver.pointers()[0] == tensor.data_ptr()
        else:
            step(same, (tensor.data_ptr(),), dtypes)
            assert (
                launched[0][1] == 9
                and launched[0][0].data_ptr() == tensor.data_ptr()
                and not driver.seen
            )


PTX = ".visible .entry kernel(.param .u64 .ptr .global .align 1 a, .param .u32 b, .param .u64 c, .param .u64 d)"
METADATA = SimpleNamespace(name="kernel", num_warps=1, shared=0)
FIXED = SimpleNamespace(function=7, metadata=METADATA), PTX, (1, 1, 1)
ONE: list[tuple[Any, Any]] = [(0, None), (None, 3)]  # an address, and a number


def test_other_parameters_than_declared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    driver_launch(*FIXED, ONE)
    for arguments in (
        [ONE[0], (1, None)],
        ONE[:1],
        [*ONE, *[(None, n) for n in (4, 5, 6)]],
        [(0, bytes(128)), ONE[1]],
        [ONE[0], (None, 0.5)],
    ):
        refused(ValueError, "kernel", driver_launch, *FIXED, arguments)
    more = PTX.replace(")", ", .param .u64 e)")  # of which the first three are no scratch
    refused(ValueError, "kernel", driver_launch, FIXED[0], more, (1, 1, 1), ONE)


def test_a_launch_keeps_its_kernel_which_triton_unloads_with_the_last_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch)
    compiled = type("Compiled", (), {"function": 7, "metadata": METADATA})()
    alive = weakref.ref(compiled)
    launch = driver_launch(compiled, *FIXED[1:], ONE)
    del compiled
    gc.collect()
    assert alive() is not None
    del launch
    gc.collect()
    assert alive() is None


def test_a_thread_without_a_context_enters_it_and_an_error_is_raised_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, entered = Driver(monkeypatch, errors=[201, 0, 719]), list[int]()
    monkeypatch.setattr(cuda_driver, "enter_context", entered.append)
    monkeypatch.setattr(cuda_driver, "error_text", lambda error: f"text of {error}")
    launch = driver_launch(*FIXED, ONE)
    launch((64,))
    assert entered == [3] and len(driver.seen) == 2
    refused(
        RuntimeError,
        r"kernel could not be launched: CUDA error 719 \(text of 719\)",
        launch,
        (64,),
    )


def test_threads_do_not_mix_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed: list[tuple[int, int]] = []
    expected = threading.local()

    def check(config_at: Any, function: Any, parameters_at: Any, extra: None) -> int:
        place = (ctypes.c_void_p * 1).from_address(parameters_at.value)[0]
        found = ctypes.c_uint64.from_address(place or 0).value
        if found != expected.address:
            mixed.append((found, expected.address))
        return 0

    Driver(monkeypatch)
    monkeypatch.setattr(cuda_driver, "driver_function", lambda name: check)
    launch = driver_launch(*FIXED, ONE)

    def work(address: int) -> None:
        for expected.address in range(address, address + 2000):
            launch((expected.address,))

    threads = [threading.Thread(target=work, args=(10000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def again(
    step: KernelLauncher,
    addresses: tuple[int | None, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> None:
    """Launch once more, as a program does."""
    if step.bound is None:
        step(True, addresses, dtypes)
    else:
        step.bound(addresses)


@pytest.mark.gpu
def test_the_driver_launches_what_triton_launched_before() -> None:
    x, other = torch.randn(64, 32, device="cuda"), torch.randn(64, 32, device="cuda")
    tma: dict[str, internals.Tma] = {}
    if torch.cuda.get_device_capability() >= (9, 0):
        tma["x"] = internals.Tma(64, 32, partial(TensorDescriptor, block_shape=[64, 32]))
    constants, grid = {"BLOCK": 64, "num_warps": 4}, (1, 1, 1)
    plain = KernelLauncher(Launch(_scale_kernel, grid, "x out absent", (64, 1, 0.5), constants))
    described = (
        KernelLauncher(Launch(_described_kernel, grid, "x out", (3,), constants, tma))
        if tma
        else None
    )
    dtypes = torch.float32, torch.float32
    for source in (x, other, x, other):
        out = torch.full((64,), float("nan"), device="cuda")
        again(plain, (source.data_ptr(), out.data_ptr(), None), (*dtypes, None))
        assert torch.equal(out, source.flatten()[:64] * 0.5 + 1)
        if described is not None:
            again(described, (source.data_ptr(), out.data_ptr()), dtypes)
            torch.testing.assert_close(out, source.sum(1) + 3)
    assert plain.bound is not None
    assert described is None or described.bound is not None
