"""Cache keys of calls, which torch's modes they see, and the private parts of torch and Triton
behind that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilefold
from tests.ops.base import call_key, calls, fallback, internals, operator
from tests.ops.toy import TOY

SOURCES = Path(tilefold.__file__).parent
INTERNALS = "ops/_shared/internals.py"
PRIVATE = (
    r"torch\._(?!dynamo|_)\w|aten\._\w|_functorch|forward_ad\._|\bknobs\b|packed_metadata|launch_pdl|backends\.nvidia"
    r"|\.do_not_specialize"
)


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (PRIVATE, {INTERNALS}),
        (r"(allow_tf32|fp32_precision)\b", {INTERNALS}),
        (
            r"triton\.__version__|version\(\"triton\"\)",
            {"_internal/environment.py", "bench/results.py"},  # which record the release
        ),  # operators ask releases.py
    ],
)
def test_few_files_name_what_is_private_the_switches_of_tf32_and_the_release_of_triton(
    names: str,
    files: set[str],
) -> None:
    naming = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if re.search(names, path.read_text())
    }
    assert naming == files


def test_an_operator_runs_with_the_gpu_of_its_first_tensor_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        now.append(index)
        yield

    monkeypatch.setattr(operator, "current_gpu", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    program: Any = type("", (), {"bound": True, "__call__": lambda self, tensor: [now[-1]]})()
    call = calls.Pass("toy", None, "triton", False, False, True, program=program)
    for index in (1, 0):
        where = torch.device("cuda", index)
        gpu: Any = SimpleNamespace(is_cuda=True, get_device=lambda index=index: index, device=where)
        assert [*TOY.compute(call, (gpu,))] == [index]
    assert now == [1, 0]
    with torch.autocast("cpu", torch.bfloat16):
        assert not calls.call_on_device(
            torch.device("cpu"),
            torch.is_autocast_enabled,
            "cpu",
        )


def test_the_names_for_gpus_exist() -> None:
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        assert hasattr(torch._C, name) or not torch.backends.cuda.is_built()
    assert internals.matmul_precision() in ("ieee", "tf32", "none")


def key(*tensors: object, options: tuple[object, ...] = ()) -> object:
    return call_key(tensors, options)


def test_calls_are_told_apart_by_layouts_options_and_settings_and_by_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, 6)[:, :3].contiguous()
    alike = key(x, None)
    assert (
        alike
        == key(torch.zeros(2, 3), None)
        == key(torch.nn.Parameter(x.clone()), None)
        is not None
    )
    others = [key(x), key(None, x), key(x, x), key(torch.ones(3, 2), None), key(x.bfloat16(), None)]
    others += [
        key(torch.ones(3, 2).T, None),
        key(torch.ones(2, 6)[:, ::2], None),
        key(torch.ones(7)[1:].view(2, 3), None),
    ]
    others += [key(x, None, options=(value,)) for value in (1, 1.0, True, "1", None)]
    with torch.autocast("cpu", torch.bfloat16):
        others.append(key(x, None))
    with monkeypatch.context() as patch:
        patch.setattr(calls, "matmul_precision", lambda: "tf32")
        others += [
            key(x, None),
            key(x.bfloat16(), None),
        ]  # a gradient in 16 bits, of products in fp32
    with monkeypatch.context() as patch:
        patch.setattr(fallback, "FAILURES", {("a kernel", x.device): "why"})
        others.append(key(x, None))
    assert others.pop(1) is None and len({alike, *others}) == 1 + len(others)
    aligned = [call_key((tensor, None), ()) for tensor in (torch.ones(9)[4:8], torch.ones(9)[1:5])]
    assert [each and each[0] for each in aligned] == [True, False]


def test_calls_that_others_must_see_have_no_key() -> None:
    x = torch.ones(2)

    class Subclass(torch.Tensor):
        pass

    assert key(x.as_subclass(Subclass)) is None and key(x, x.as_subclass(Subclass)) is None
    assert key(x, [1, 2]) is None and key(None) is None and key("hidden") is None
    assert key(torch.empty(2, device="meta")) is None
    assert key(x, torch.ones(2, 2).to_sparse()) is None
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert key(x) is None
    with torch.autograd.forward_ad.dual_level():
        assert key(x) is None
    assert torch.func.vmap(lambda y: torch.tensor(key(y) is None))(torch.ones(3, 2)).all()
    recorded: Any = []
    torch.compile(
        lambda y: (recorded.append(call_key((y,), ())), y + 1)[1],
        backend="eager",
        fullgraph=True,
    )(x)
    assert recorded == [None]


def test_gradients_are_told_apart_by_what_comes_back_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, grad, x = object(), torch.ones(2, 4), torch.ones(9)

    def key_of(
        grad: torch.Tensor = grad,
        saved: torch.Tensor = x[:4],
        call: object = call,
        *needs: bool,
    ) -> object:
        return call_key((grad, None, saved), (call, needs or (True,)), of_gradient=True)

    alike = key_of()
    assert alike == key_of() == key_of(torch.zeros(2, 4), x[4:8]) is not None
    others = [
        key_of(torch.ones(4, 2).T),
        key_of(saved=x[:8:2]),
        key_of(saved=x[:4].int()),
        key_of(saved=x[1:5]),
    ]
    others += [key_of(call=object()), key_of(grad, x[:4], call, False)]
    monkeypatch.setattr(calls, "matmul_precision", lambda: "tf32")
    others.append(key_of())
    assert len({alike, *others}) == 8

    class Subclass(torch.Tensor):
        pass

    assert (
        key_of(grad.as_subclass(Subclass)) is None and key_of(saved=x.as_subclass(Subclass)) is None
    )
