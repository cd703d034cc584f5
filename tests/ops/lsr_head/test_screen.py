"""The screened head: the bits of the plain one, whatever is scored; and the bound behind it, in
exact arithmetic.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import Launch, Setting, head_problem, why_no_warp_roles
from tests.ops.samples import meta
from tests.refusals import refused
from tilefold.ops import lsr_head

SIZES = B, S, D, V = 48, 512, 768, 30522  # enough work for the screen: see the test of plans
FORCED = {"LEAST_WORK": 0.0, "WIDEST": 4096, "MOST_SAMPLED": 2.0, "MOST_KEPT": 64.0}


def states(
    kind: str,
    generator: torch.Generator,
    device: str,
    sizes: tuple[int, int, int, int] = SIZES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token states, weight and bias whose largest logits are mostly negative, as those of a trained
    model.
    """
    B, S, D, V = sizes
    hidden = torch.randn(B, S, D, generator=generator, device=device)
    weight = torch.randn(V, D, generator=generator, device=device) * 0.05
    bias = torch.full((V,), -0.2 * D**0.5, device=device)
    if kind == "outliers":
        hidden[:, ::37, 3] *= 60
        weight[::11, 5] *= 40
    elif kind == "equal":
        hidden[:] = hidden[:1, :1]
    elif kind == "zeros":
        hidden[0], hidden[-1, 5:], weight[::7] = 0, 0, 0
    elif kind == "tiny":
        hidden[0] *= 1e-30
        weight[::5] *= 1e-35
    elif kind == "broken":
        hidden[0, 0, 0], hidden[-1, 2, 3], weight[5, 5], weight[6, 0], bias[8] = (
            float("nan"),
            float("inf"),
            float("nan"),
            float("-inf"),
            float("nan"),
        )
    elif kind == "huge":
        hidden, bias = hidden * 2e3, bias * 2e3
    elif kind == "touching":  # integers, whose largest logits are 0 and -1 and 1 with such a bias
        hidden, weight = hidden.round(), (weight * 40).round()
        bias = (-(hidden.flatten(0, 1)[:99] @ weight.T).amax(0)).round()
    elif kind == "untrained":
        bias[:] = 0
    return hidden, weight, bias


def laid_out(hidden: Tensor, layout: str, generator: torch.Generator) -> dict[str, Tensor]:
    """``hidden`` with the arguments that say which of its tokens count; packed sequences are twice
    as many.
    """
    B, S = hidden.shape[:2]
    lengths = torch.randint(0, S + 1, (B,), generator=generator, device=hidden.device)
    if layout == "masked":
        return {
            "hidden": hidden,
            "attention_mask": torch.arange(S, device=hidden.device) < lengths[:, None],
        }
    if layout == "full":
        return {"hidden": hidden}
    lengths[-1] = S
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    hidden = torch.cat([row[:n] for row, n in zip(hidden, lengths.tolist(), strict=True)])
    return {
        "hidden": torch.cat([hidden, hidden]),
        "cu_seqlens": torch.cat([offsets, offsets[1:] + offsets[-1]]).int(),
    }


def assert_same_bits(
    given: dict[str, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    **options: object,
) -> None:
    results = []
    for screen in (False, True):
        named = {"weight": weight, "bias": bias, **given}
        named = {
            name: x.clone().requires_grad_(x.is_floating_point())
            for name, x in named.items()
            if x is not None
        }
        scores = lsr_head(**named, **options, screen=screen, impl="triton")
        scores.backward(
            torch.linspace(0.5, 1.5, scores.numel(), device=scores.device)
            .view_as(scores)
            .to(scores.dtype),
        )
        results.append(
            [scores.detach(), *[leaf.grad for leaf in named.values() if leaf.grad is not None]],
        )
    for plain, screened in zip(*results, strict=True):
        torch.testing.assert_close(screened, plain, rtol=0, atol=0, equal_nan=True)


KINDS = ["trained", "outliers", "equal", "zeros", "tiny", "huge", "touching", "broken", "untrained"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["full", "masked", "packed"])
def test_screened_scores_and_gradients_have_the_bits_of_plain_ones(kind: str, layout: str) -> None:
    generator = torch.Generator("cuda").manual_seed(len(kind))
    hidden, weight, bias = (each.bfloat16() for each in states(kind, generator, "cuda"))
    assert_same_bits(laid_out(hidden, layout, generator), weight, bias)


@pytest.fixture
def always_screened(empty_call_caches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the work is, up to the longest rows, and however much stays."""
    pytest.importorskip("triton", reason="configurations of kernels")
    from tilefold.ops._shared.tuning import ConfigRow
    from tilefold.ops.lsr_head import configs

    monkeypatch.setattr(
        configs,
        "WHEN_SCREENED",
        (*configs.WHEN_SCREENED, ConfigRow({}, FORCED, "forced")),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_small_cases_that_are_always_screened(
    kind: str,
    dtype: torch.dtype,
    always_screened: None,
) -> None:
    draw, generator = (
        torch.Generator(each).manual_seed(KINDS.index(kind)) for each in ("cpu", "cuda")
    )

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    for case in range(24):
        layout = ["full", "masked", "packed"][below(3)]
        sizes = 1 + below(20), 16 + 16 * below(40), [48, 768, 2048, 4096][below(4)], 9 + below(2000)
        hidden, weight, bias = (each.to(dtype) for each in states(kind, generator, "cuda", sizes))
        scale, activation = (0.5, "relu") if case % 2 else (1.0, "log1p_relu")
        given = laid_out(hidden, layout, generator)
        assert_same_bits(
            given,
            weight,
            bias if case % 3 else None,
            logit_scale=scale,
            activation=activation,
        )


@pytest.mark.parametrize("layout", ["full", "masked", "packed"])
def test_these_cases_are_large_enough_for_the_screen(layout: str) -> None:
    pytest.importorskip("triton", reason="plans name kernels")
    if why_no_warp_roles() is not None or triton_interpreted():
        pytest.skip("the screen's kernels cannot be built")
    from tilefold.ops.lsr_head import plans

    hidden = meta(*((B * S - 400, D) if layout == "packed" else (B, S, D)), dtype=torch.bfloat16)
    mask = meta(B, S, dtype=torch.bool) if layout == "masked" else None
    offsets = meta(2 * B + 1, dtype=torch.int32) if layout == "packed" else None
    weight, bias = meta(V, D, dtype=torch.bfloat16), meta(V, dtype=torch.bfloat16)
    tensors = head_problem.HeadTensors(hidden, mask, offsets, weight, None, bias)
    setting = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
    for screen in (False, True):
        options = head_problem.HeadOptions(
            "max",
            "log1p_relu",
            1.0,
            torch.bfloat16,
            torch.bfloat16,
            torch.bfloat16,
            screen,
        )
        names = [
            step.kernel.__name__
            for step in plans.forward(tensors, options, True, setting).steps
            if isinstance(step, Launch)
        ]
        assert ("refine_kernel" in names, names.count("screen_hopper_kernel")) == (
            screen,
            int(screen),
        )


def test_a_screen_is_asked_for_by_name() -> None:
    hidden, weight = torch.randn(2, 3, 8), torch.randn(9, 8)
    assert torch.equal(lsr_head(hidden, weight, screen=True), lsr_head(hidden, weight))
    refused(
        TypeError,
        "screen must be True or False, got 'auto'",
        lsr_head,
        hidden,
        weight,
        screen="auto",
    )


@pytest.mark.parametrize("kind", ["trained", "outliers", "zeros"])
def test_integer_products_and_norms_of_what_was_rounded_bound_every_logit(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, _ = (each.bfloat16().double() for each in states(kind, generator, "cpu"))
    hidden, weight = hidden[:3].flatten(0, 1), weight[:500]
    rounded = []
    for rows in (hidden, weight):
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-300) / 127
        near = (rows / scale).round()
        rounded.append((scale, near, near.norm(dim=1), (rows / scale - near).norm(dim=1)))
    (s, q, q_norm, e), (t, p, p_norm, f) = rounded
    bound = q @ p.T + e[:, None] * (p_norm + f) + q_norm[:, None] * f
    assert bool((hidden @ weight.T <= bound * s * t.T + 1e-9).all())
