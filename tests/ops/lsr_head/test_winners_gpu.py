"""The Hopper kernel looks for winners in two ways, by Triton's release; both find the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

import tilefold
from tilefold.ops._shared._triton import releases


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 150, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_find_the_winners_that_registers_find(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int
) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or releases.why_no_warp_roles() is not None:
        pytest.skip("the Hopper kernel does not run here")
    generator = torch.Generator("cuda").manual_seed(length)
    # few different numbers: ties, of which the lowest place wins
    hidden = torch.randint(-2, 3, (9, length, 128), device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randint(-2, 3, (1000, 128), device="cuda", generator=generator).to(dtype).requires_grad_()
    mask = torch.rand(9, length, device="cuda", generator=generator) > 0.3
    with torch.no_grad():
        hidden[0, 0, 0] = float("nan")
    results = []
    for lean in (False, True):
        monkeypatch.setattr(releases, "lean_places", lambda lean=lean: lean)
        for attention_mask in (None, mask):
            scores = tilefold.lsr_head(hidden, weight, attention_mask=attention_mask, out_dtype=torch.float32)
            results.append((scores, *torch.autograd.grad(scores.sum(), (hidden, weight))))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True))
