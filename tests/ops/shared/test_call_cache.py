"""What makes two calls alike, and that plans are found by it."""

from __future__ import annotations

import pytest
import torch

from tilefold.ops._shared import calls, fallback
from tilefold.ops._shared.calls import call_key, gradient_key


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "triton_interpreted", lambda: True)


def key(*tensors: object, options: tuple[object, ...] = ()) -> object:
    return call_key(tensors, options)


def test_calls_that_differ_in_nothing_but_values_are_alike() -> None:
    assert key(torch.ones(2, 3), None) == key(torch.zeros(2, 3), None)
    assert key(torch.ones(2, 3)) == key(torch.nn.Parameter(torch.ones(2, 3)))


@pytest.mark.parametrize(
    "other",
    [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2).T, torch.ones(2, 6)[:, ::2]],
    ids=["shape", "dtype", "strides", "steps"],
)
def test_shapes_strides_and_dtypes_tell_calls_apart(other: torch.Tensor) -> None:
    assert key(torch.ones(2, 3)) != key(other)


def test_alignment_tells_calls_apart() -> None:
    x = torch.ones(9)
    given = [call_key((tensor, None), ()) for tensor in (x[:4], x[4:8], x[1:5])]
    assert given[0] is not None and given[2] is not None
    assert given[0] == given[1] != given[2]
    assert given[0][0] and not given[2][0]


def test_options_are_told_apart_by_type_too() -> None:
    x = torch.ones(2)
    assert len({key(x, options=(value,)) for value in (1, 1.0, True, "1", None)}) == 5


def test_autocast_and_tf32_tell_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    plain = key(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert key(x) != plain
    narrow = key(x.bfloat16())
    monkeypatch.setattr(calls, "matmul_precision", lambda: "tf32")
    assert key(x) != plain
    assert key(x.bfloat16()) != narrow  # a gradient in 16 bits, of products in fp32


def test_what_was_given_up_tells_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    plain = key(x)
    monkeypatch.setattr(fallback, "GIVEN_UP", {("a kernel", x.device): "why"})
    assert key(x) != plain


def test_calls_that_others_must_see_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(calls, "triton_interpreted", lambda: False)
    assert key(x) is None


def test_a_compiler_sees_no_key() -> None:
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(call_key((x,), ()))
        return x + 1

    call(torch.ones(2))
    assert seen == [None]


def test_gradients_are_told_apart_by_what_comes_back_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, grad, x = object(), torch.ones(2, 4), torch.ones(9)

    def key_of(grad: torch.Tensor = grad, saved: torch.Tensor = x[:4], call: object = call, *needs: bool) -> object:
        return gradient_key(call, needs or (True,), grad, (None, saved))

    alike = key_of()
    assert alike == key_of() == key_of(torch.zeros(2, 4), x[4:8]) is not None
    others = [key_of(torch.ones(4, 2).T), key_of(saved=x[:8:2]), key_of(saved=x[:4].int()), key_of(saved=x[1:5])]
    others += [key_of(call=object()), key_of(grad, x[:4], call, False)]
    monkeypatch.setattr(calls, "matmul_precision", lambda: "tf32")
    others.append(key_of())
    assert len({alike, *others}) == 8

    class Subclass(torch.Tensor):
        pass

    assert key_of(grad.as_subclass(Subclass)) is None and key_of(saved=x.as_subclass(Subclass)) is None
