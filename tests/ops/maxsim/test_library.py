"""MaxSim as torch operators: opcheck, torch.compile, autocast, second derivatives, what is kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import triton_interpreted
from tests.ops.base import MaxSimOptions, MaxSimSaved, MaxSimTensors
from tests.ops.base import maxsim_tiled as _tiled
from tilefold.ops import maxsim
from tilefold.ops.maxsim import chosen_impl
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs, maxsim_results, with_one_answer

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [(pairing, layout) for pairing in PAIRINGS for layout in ("full", "holes", "packed")]


def operator_arguments(device: str, pairing: str, layout: str, temperature: float) -> tuple[Any, ...]:
    inputs = maxsim_inputs(3, 4, 5, 9, 16, pairing=pairing, layout=layout, device=device)
    pairs = inputs.pairing if pairing == "index" else None
    masks, offsets = (inputs.query_mask, inputs.document_mask), (inputs.cu_seqlens_q, inputs.cu_seqlens_d)
    mean = layout == "full"
    return inputs.queries, inputs.documents, *masks, *offsets, pairs, None, pairing, False, temperature, True, mean, 5


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(("pairing", "layout"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str, pairing: str, layout: str, temperature: float) -> None:
    arguments = operator_arguments(device, pairing, layout, temperature)
    impl = chosen_impl(arguments[0])
    with torch.no_grad():
        scores, *saved = torch.ops.tilefold.maxsim(*arguments, True, impl)
    leaves = tuple(t.clone().requires_grad_() for t in arguments[:2])
    torch.library.opcheck(torch.ops.tilefold.maxsim.default, (*leaves, *arguments[2:], True, impl))
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(
            torch.ops.tilefold.maxsim_backward.default,
            (torch.randn_like(scores), *arguments[:7], *saved, *arguments[8:], needs, impl),
        )


@pytest.mark.parametrize(("pairing", "layout"), [c for c in CASES if c != ("index", "packed")])
@pytest.mark.parametrize("device", DEVICES)
def test_the_public_function_compiles_whole_with_gradients(device: str, pairing: str, layout: str) -> None:
    inputs = maxsim_inputs(3, 4, 5, 9, 16, pairing=pairing, layout=layout, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
        return maxsim(2 * queries, documents, **options) + 1

    for options in ({}, {"temperature": 0.5, "reduction": "mean", "normalize": True}):
        leaves = [t.clone().requires_grad_() for t in (inputs.queries, inputs.documents)]
        found = compiled(*leaves, **inputs.layout, **options)
        expected = maxsim(2 * leaves[0], leaves[1], **inputs.layout, **options) + 1
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x, leaves, inputs.dscores) for x in (found, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_takes_its_dtype_and_leaves_gradients_that_of_their_parameters(
    device: str, dtype: torch.dtype
) -> None:
    inputs = with_one_answer(maxsim_inputs(4, 5, 6, 9, 16, layout="holes", dtype=dtype, device=device)).cast(
        torch.float32
    )
    queries = inputs.queries.clone().requires_grad_()
    documents = inputs.documents.to(dtype).requires_grad_()
    with torch.autocast(device, dtype=dtype):
        scores = maxsim(queries, documents, **inputs.layout)
    scores.backward(inputs.dscores)
    truth = maxsim_results(inputs.cast(torch.float64), impl="reference")
    assert scores.dtype == queries.grad.dtype == torch.float32 and documents.grad.dtype == dtype
    assert_within_budget(scores, truth["scores"])
    assert_within_budget(queries.grad, truth["dqueries"], dtype, "gradient_bound")
    assert_within_budget(documents.grad, truth["ddocuments"], kind="gradient_bound")


@pytest.mark.parametrize(("length", "dtype"), [(9, torch.uint16), (65536, torch.int32)], ids=str)
def test_winners_take_two_bytes_up_to_65535_tokens_and_are_kept_only_for_a_gradient(
    length: int, dtype: torch.dtype
) -> None:
    inputs = maxsim_inputs(2, 2, 3, length, 2)
    saved: Any = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        maxsim(inputs.queries.requires_grad_(), inputs.documents)
    assert [t.shape for t in saved if t.dtype == dtype] == [(2, 6)]
    scores, winners, *rest = torch.ops.tilefold.maxsim(
        inputs.queries.detach(), inputs.documents, *[None] * 6, "all", False, 0.0, False, False, 0, False, "tiled"
    )
    assert scores.shape == (2, 2) and not any(t.numel() for t in (winners, *rest))


ALLOWED_ON_UINT16 = ("_to_copy", "copy_", "clone", "detach", "empty", "slice", "view", "alias", "transpose", "expand")


class NoArithmeticOnUint16(TorchDispatchMode):
    """Refuse what CUDA cannot do with uint16: all but allocation, copies, casts and views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values = [v for v in (*args, out) if isinstance(v, Tensor)]
        if any(v.dtype == torch.uint16 for v in values) and func.overloadpacket.__name__ not in ALLOWED_ON_UINT16:
            raise NotImplementedError(f"{func} on uint16")
        return out


@pytest.mark.parametrize(("pairing", "layout"), CASES)
def test_the_tiled_path_asks_of_uint16_what_cuda_can_do(pairing: str, layout: str) -> None:
    arguments = operator_arguments("cpu", pairing, layout, 0.0)
    tensors, options = MaxSimTensors(*arguments[:8]), MaxSimOptions(*arguments[8:])
    with NoArithmeticOnUint16():
        scores, *saved = _tiled.forward(tensors, options, True)
        given = MaxSimSaved(*arguments[:7], *saved)
        dqueries, ddocuments = _tiled.backward(torch.ones_like(scores), given, options, (True, True))
    assert saved[0].dtype == torch.uint16 and dqueries.shape == tensors.queries.shape
    assert bool(ddocuments.isfinite().all())
