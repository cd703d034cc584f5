"""The tiled path of MaxSim holds no more than its bound beyond inputs, outputs and what backward saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import quantize_tokens
from tilefold.ops.maxsim.tiles import BOOKKEEPING_BYTES, SCRATCH_BYTES

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="the other files interpret the kernels")


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that were allocated on the CPU at a time while ``call`` ran, its results included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del kept
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def offsets(*lengths: int) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def skewed(count: int, longest: int, dim: int) -> tuple[Tensor, Tensor]:
    """``count`` packed sequences of one token and a long one."""
    cu = offsets(*[1] * count, longest)
    return torch.randn(count + longest, dim), cu


def shapes() -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    """Queries, documents and options of layouts whose padded or gathered copies would be far above the bound."""
    short, short_cu = skewed(700, 700, 8)
    long_rows, long_cu = skewed(3, 30000, 8)
    pairs = torch.stack([torch.zeros(400, dtype=torch.int64), torch.arange(400)], dim=1)
    return {
        "skewed queries": (short, torch.randn(48, 1, 8), {"cu_seqlens_q": short_cu}),
        "skewed documents": (torch.randn(1, 1500, 8), long_rows, {"cu_seqlens_d": long_cu}),
        "index": (torch.randn(1, 1024, 128), torch.randn(400, 1, 128), {"pairing": pairs}),
        "grouped": (torch.randn(1, 1024, 128), torch.randn(1, 400, 1, 128), {"pairing": "grouped"}),
        "aligned": (torch.randn(1, 6000, 4), torch.randn(1, 7000, 4), {"pairing": "aligned"}),
        "aligned, skewed": (short, torch.randn(701, 3, 8), {"cu_seqlens_q": short_cu, "pairing": "aligned"}),
        "one long pair": (torch.randn(1, 6000, 4), torch.randn(1, 7000, 4), {}),
        "wide rows": (torch.randn(1, 200, 4096), torch.randn(60, 20, 4096), {}),
        "one-token documents": (torch.randn(2, 5000, 4), torch.randn(600, 1, 4), {}),
    }


LAYOUTS = list(shapes())
OPTIONS: dict[str, dict[str, Any]] = {"maximum": {"normalize": True}, "smooth": {"temperature": 1.0}}


def allowed(queries: Tensor, documents: Tensor, held: int) -> int:
    """The documented bound, without what must be ``held`` anyway; here are no more sequences and pairs than tokens."""
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
    met = documents.shape[:-2].numel() if documents.dim() > 2 else layout["cu_seqlens_d"].numel() - 1
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
    for q, d, layout in ((queries, documents, {}), (short, torch.randn(64, 1, 8), {"cu_seqlens_q": cu})):
        scores = xtr_scores(q, d, top_k=5, **layout)
        peak = peak_bytes(lambda: xtr_scores(q, d, top_k=5, **layout))  # noqa: B023
        assert peak <= allowed(q, d, 2 * scores.nbytes)
