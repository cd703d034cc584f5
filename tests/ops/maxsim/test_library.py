"""MaxSim under autocast, what it keeps for backward, and its scratch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import triton_interpreted
from tests.ops.base import MaxSimOptions, MaxSimSaved, MaxSimTensors
from tests.ops.base import maxsim_tiled as _tiled
from tests.ops.maxsim.matching import maxsim_results, with_one_answer
from tests.ops.samples import allocations, saved_for_backward
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import quantize_tokens
from tilefold.ops.maxsim.tiles import BOOKKEEPING_BYTES, SCRATCH_BYTES
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [(pairing, layout) for pairing in PAIRINGS for layout in ("full", "holes", "packed")]


def operator_arguments(
    device: str,
    pairing: str,
    layout: str,
    temperature: float,
) -> tuple[Any, ...]:
    inputs = maxsim_inputs(3, 4, 5, 9, 16, pairing=pairing, layout=layout, device=device)
    pairs = inputs.pairing if pairing == "index" else None
    masks, offsets = (
        (inputs.query_mask, inputs.document_mask),
        (inputs.cu_seqlens_q, inputs.cu_seqlens_d),
    )
    mean = layout == "full"
    return (
        inputs.queries,
        inputs.documents,
        *masks,
        *offsets,
        pairs,
        None,
        pairing,
        False,
        temperature,
        True,
        mean,
        5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_takes_its_dtype_and_leaves_gradients_that_of_their_parameters(
    device: str,
    dtype: torch.dtype,
) -> None:
    inputs = with_one_answer(
        maxsim_inputs(4, 5, 6, 9, 16, layout="holes", dtype=dtype, device=device),
    ).cast(torch.float32)
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
    length: int,
    dtype: torch.dtype,
) -> None:
    inputs = maxsim_inputs(2, 2, 3, length, 2)
    saved = saved_for_backward(lambda: maxsim(inputs.queries.requires_grad_(), inputs.documents))
    assert [t.shape for t in saved if t.dtype == dtype] == [(2, 6)]
    scores, winners, *rest = torch.ops.tilefold.maxsim(
        inputs.queries.detach(),
        inputs.documents,
        *[None] * 6,
        "all",
        False,
        0.0,
        False,
        False,
        0,
        False,
        "tiled",
    )
    assert scores.shape == (2, 2) and not any(t.numel() for t in (winners, *rest))


ALLOWED_ON_UINT16 = (
    "_to_copy",
    "copy_",
    "clone",
    "detach",
    "empty",
    "slice",
    "view",
    "alias",
    "transpose",
    "expand",
)


class NoArithmeticOnUint16(TorchDispatchMode):
    """Refuse what CUDA cannot do with uint16: all but allocation, copies, casts and views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values = [v for v in (*args, out) if isinstance(v, Tensor)]
        if (
            any(v.dtype == torch.uint16 for v in values)
            and func.overloadpacket.__name__ not in ALLOWED_ON_UINT16
        ):
            raise NotImplementedError(f"{func} on uint16")
        return out


@pytest.mark.parametrize(("pairing", "layout"), CASES)
def test_the_tiled_path_asks_of_uint16_what_cuda_can_do(pairing: str, layout: str) -> None:
    arguments = operator_arguments("cpu", pairing, layout, 0.0)
    tensors, options = MaxSimTensors(*arguments[:8]), MaxSimOptions(*arguments[8:])
    with NoArithmeticOnUint16():
        scores, *saved = _tiled.forward(tensors, options, True)
        given = MaxSimSaved(*arguments[:7], *saved)
        dqueries, ddocuments = _tiled.backward(
            torch.ones_like(scores),
            given,
            options,
            (True, True),
        )
    assert saved[0].dtype == torch.uint16 and dqueries.shape == tensors.queries.shape
    assert bool(ddocuments.isfinite().all())


# The tiled path holds no more than its bound beyond inputs, outputs and what backward saves


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that were allocated on the CPU at a time while ``call`` ran, its results
    included.
    """
    return max(itertools.accumulate(allocations(call)))


def offsets(*lengths: int) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def skewed(count: int, longest: int, dim: int) -> tuple[Tensor, Tensor]:
    """``count`` packed sequences of one token and a long one."""
    cu = offsets(*[1] * count, longest)
    return torch.randn(count + longest, dim), cu


def shapes() -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    """Queries, documents and options of layouts whose padded or gathered copies would be far above
    the bound.
    """
    short, short_cu = skewed(700, 700, 8)
    long_rows, long_cu = skewed(3, 30000, 8)
    pairs = torch.stack([torch.zeros(400, dtype=torch.int64), torch.arange(400)], dim=1)
    return {
        "skewed queries": (short, torch.randn(48, 1, 8), {"cu_seqlens_q": short_cu}),
        "skewed documents": (torch.randn(1, 1500, 8), long_rows, {"cu_seqlens_d": long_cu}),
        "index": (torch.randn(1, 1024, 128), torch.randn(400, 1, 128), {"pairing": pairs}),
        "grouped": (torch.randn(1, 1024, 128), torch.randn(1, 400, 1, 128), {"pairing": "grouped"}),
        "aligned": (torch.randn(1, 6000, 4), torch.randn(1, 7000, 4), {"pairing": "aligned"}),
        "aligned, skewed": (
            short,
            torch.randn(701, 3, 8),
            {"cu_seqlens_q": short_cu, "pairing": "aligned"},
        ),
        "one long pair": (torch.randn(1, 6000, 4), torch.randn(1, 7000, 4), {}),
        "wide rows": (torch.randn(1, 200, 4096), torch.randn(60, 20, 4096), {}),
        "one-token documents": (torch.randn(2, 5000, 4), torch.randn(600, 1, 4), {}),
    }


LAYOUTS = list(shapes())
OPTIONS: dict[str, dict[str, Any]] = {
    "maximum": {"normalize": True},
    "smooth": {"temperature": 1.0},
}


def allowed(queries: Tensor, documents: Tensor, held: int) -> int:
    """The documented bound, without what must be ``held`` anyway; here are no more sequences and
    pairs than tokens.
    """
    wide = 2 if queries.dtype == torch.float64 else 1
    tokens = sum(side.shape[:-1].numel() for side in (queries, documents))
    return wide * SCRATCH_BYTES + 3 * tokens * BOOKKEEPING_BYTES + held


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_scratch_stays_below_its_bound_in_every_layout(name: str, options: str) -> None:
    queries, documents, layout = shapes()[name]
    masked = {"document_mask": torch.rand(documents.shape[:-1]) < 0.9, "mask_mode": "zero"}
    chosen: dict[str, Any] = {**layout, **OPTIONS[options], **masked}
    leaves = [side.requires_grad_() for side in (queries, documents)]
    with torch.no_grad():
        scores = maxsim(*leaves, **chosen)
        peak = peak_bytes(lambda: maxsim(*leaves, **chosen))
    assert scores.nbytes <= peak <= allowed(queries, documents, scores.nbytes)

    def train() -> tuple[Tensor, ...]:
        scores = maxsim(*leaves, **chosen)
        return (scores, *torch.autograd.grad(scores.sum(), leaves))

    rows = queries.shape[:-1].numel()
    met = (
        documents.shape[:-2].numel() if documents.dim() > 2 else layout["cu_seqlens_d"].numel() - 1
    )
    places = rows if layout.get("pairing") == "aligned" else rows * met
    saved = places * (2 if options != "smooth" else 4)
    gradients = sum(side.nbytes for side in leaves)
    assert peak_bytes(train) <= allowed(queries, documents, scores.nbytes + saved + gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_scratch_stays_below_its_bound_in_other_dtypes(dtype: torch.dtype) -> None:
    queries, documents = torch.randn(1, 6000, 4, dtype=dtype), torch.randn(1, 7000, 4, dtype=dtype)
    leaves = [side.requires_grad_() for side in (queries, documents)]
    for options in OPTIONS.values():
        peak = peak_bytes(lambda: torch.autograd.grad(maxsim(*leaves, **options).sum(), leaves))  # noqa: B023
        held = sum(side.numel() * (side.element_size() + 8) for side in leaves) + 8 * 6000
        assert peak <= allowed(queries, documents, held)


def test_scratch_of_quantized_and_xtr_scores_stays_below_the_bound() -> None:
    queries, documents = torch.randn(100, 1000, 128), torch.randn(8, 1, 128)
    stored = quantize_tokens(documents)
    held = 2 * queries.numel()  # int8, put together from parts
    assert peak_bytes(lambda: maxsim(queries, stored)) <= allowed(queries, documents, held)
    queries, documents = torch.randn(1, 6000, 4), torch.randn(1, 7000, 4)
    short, cu = skewed(700, 700, 8)
    for q, d, layout in (
        (queries, documents, {}),
        (short, torch.randn(64, 1, 8), {"cu_seqlens_q": cu}),
    ):
        scores = xtr_scores(q, d, top_k=5, **layout)
        peak = peak_bytes(lambda: xtr_scores(q, d, top_k=5, **layout))  # noqa: B023
        assert peak <= allowed(q, d, 2 * scores.nbytes)
