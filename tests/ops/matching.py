"""Results of operators held to the budgets of tilefold.testing, against the reference in fp64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.token_scatter import zipf_ids
from tilefold.ops import token_scatter
from tilefold.ops.entmax import entmax
from tilefold.testing import (
    USUAL_SENSITIVITY,
    assert_within_budget,
    budget,
    padding,
    relative_error,
)
from tilefold.testing.entmax_attention import EntmaxAttentionInputs, entmax_attention_results
from tilefold.testing.lsr_head import (
    LSRHeadInputs,
    lsr_head_results,
    lsr_head_truth,
    with_one_answer,
)

REDUCTIONS = ("max", "sum")


def held_to_budgets(
    results: dict[str, Tensor],
    truth: Mapping[str, Tensor],
    kind: str,
    sensitivity: float = USUAL_SENSITIVITY,
) -> dict[str, Tensor]:
    """Check results against their budgets, and return them.

    Args:
        results: Scores and gradients by name.
        truth: The same in fp64.
        kind: Budget of the gradients. That of the scores is ``"forward"``.
        sensitivity: Sensitivity of the results to the rounding of scores.
    """
    if results.keys() != truth.keys():
        raise AssertionError(f"results must be {list(truth)}, got {list(results)}.")
    for name, out in results.items():
        part = "forward" if name == "scores" else kind
        assert_within_budget(out, truth[name], kind=part, name=name, sensitivity=sensitivity)
    return results


def slope_sensitivity(scores: Tensor, dscores: Tensor, activation: str, kind: str) -> float:
    """Sensitivity of a slope to the rounding of its score (exact, ``[B, V]``), called c in
    :mod:`tilefold.testing`.

    For the kind ``"gradient"`` it is the root mean square over the gradients of the logits, else
    the largest.
    """
    y = scores.double()
    if activation == "log1p_relu":
        c, slope = y, (-y).exp()
    elif activation == "log1p_log1p_relu":
        c, slope = y * (1 + y.exp()), (-y - y.expm1()).exp()
    elif activation == "softplus":
        c, slope = y / y.expm1().clamp(min=1e-300), -(-y).expm1()
    else:  # constant slopes
        return 0.0
    gradient = dscores.double() * slope * (y > 0)
    if kind != "gradient" or not gradient.any():
        return float(c.max()) if c.numel() else 0.0
    return float((c * gradient).norm() / gradient.norm())


def assert_lsr_head_matches(
    inputs: LSRHeadInputs,
    *,
    kind: str = "gradient",
    large_scores: bool = False,
    needs: Sequence[str] = ("hidden", "weight", "bias"),
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation and hold its scores and gradients to their budgets; return its results.

    Entries without one answer are taken out by :func:`with_one_answer`. ``kind`` is the budget of
    the gradients that ``needs`` asks for; with ``large_scores``, for poolings of one token, it is
    computed from these scores instead of usual ones. Options are the operator's, with ``impl``.
    """
    choices = {
        key: options[key] for key in ("pooling", "activation", "logit_scale") if key in options
    }
    inputs = with_one_answer(inputs, **choices)
    results = lsr_head_results(inputs, needs=needs, **options)
    truth = lsr_head_truth(inputs, needs=needs, **options)
    sensitivity = USUAL_SENSITIVITY
    if large_scores:
        activation = options.get("activation", "log1p_relu")
        sensitivity = slope_sensitivity(truth["scores"], inputs.dscores, activation, kind)
    return held_to_budgets(results, truth, kind, sensitivity)


@dataclasses.dataclass(frozen=True)
class TokenScatterInputs(padding.Problem):
    """One problem for :func:`tilefold.ops.token_scatter`, with the gradient that comes back.

    Attributes:
        weights, input_ids: ``[B, S]``, or packed ``[T]``; int64 ids.
        vocab_size: V.
        attention_mask: ``[B, S]`` or ``None``.
        cu_seqlens: ``[B + 1]`` int32 or ``None``.
        dscores: ``[B, V]``.
    """

    weights: Tensor
    input_ids: Tensor
    vocab_size: int
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    dscores: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, int]:
        """The positional arguments."""
        return self.weights, self.input_ids, self.vocab_size

    @property
    def layout(self) -> dict[str, Tensor | None]:
        """``attention_mask`` and ``cu_seqlens``, as keyword arguments."""
        return {"attention_mask": self.attention_mask, "cu_seqlens": self.cu_seqlens}

    def packed(self) -> TokenScatterInputs:
        """This problem with the valid tokens packed."""
        if self.attention_mask is None:
            valid = torch.ones_like(self.input_ids, dtype=torch.bool)
        else:
            valid = self.attention_mask != 0
        return dataclasses.replace(
            self,
            weights=self.weights[valid],
            input_ids=self.input_ids[valid],
            attention_mask=None,
            cu_seqlens=padding.offsets(valid.sum(dim=1)),
        )


def token_scatter_inputs(
    batch: int,
    length: int,
    vocab: int,
    *,
    layout: str = "full",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> TokenScatterInputs:
    """Random weights of standard deviation 1 at ids that repeat, the same on every device.

    Args:
        batch, length, vocab: B, S (the longest sequence of a packed input), V.
        layout: as in :func:`tilefold.testing.padding.padding_mask`.

    ``ValueError`` for an unknown layout.
    """
    padding.check_layout(layout)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(batch, length, generator=generator)
    ids = zipf_ids((batch, length), vocab, generator)
    dscores = torch.randn(batch, vocab, generator=generator)
    mask = padding.padding_mask(layout, batch, length, generator)
    inputs = TokenScatterInputs(weights, ids, vocab, mask, None, dscores).cast(dtype).to(device)
    return inputs.packed() if layout == "packed" else inputs


def token_scatter_results(
    inputs: TokenScatterInputs,
    *,
    needs: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Run forward, and backward if ``needs``; return ``scores`` and ``dweights``, with the
    operator's options.
    """
    weights = inputs.weights.detach().requires_grad_(needs)
    scores = token_scatter(
        weights,
        inputs.input_ids,
        inputs.vocab_size,
        attention_mask=inputs.attention_mask,
        cu_seqlens=inputs.cu_seqlens,
        **options,
    )
    gradients = padding.gradients(scores, {"weights": weights}, inputs.dscores)
    return {"scores": scores.detach(), **gradients}


def token_scatter_truth(
    inputs: TokenScatterInputs,
    *,
    needs: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """:func:`token_scatter_results` of the reference in fp64."""
    exact_options: dict[str, Any] = padding.without(options, "out_dtype", "impl")
    return token_scatter_results(
        inputs.cast(torch.float64),
        needs=needs,
        impl="reference",
        **exact_options,
    )


def assert_token_scatter_matches(
    inputs: TokenScatterInputs,
    *,
    kind: str = "gradient",
    needs: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation and hold its scores and gradient to their budgets; return its results.

    Winners are chosen on the weights as they were given, so every implementation has the same ones.
    ``kind`` is the budget of the gradient, which the weights want if ``needs``; options are the
    operator's, with ``impl``.
    """
    results = token_scatter_results(inputs, needs=needs, **options)
    return held_to_budgets(results, token_scatter_truth(inputs, needs=needs, **options), kind)


def entmax_by_sorting(x: Tensor, alpha: float) -> Tensor:
    """Entmax of the last dimension in fp64, by the sorted closed forms of alpha = 1.5 and 2.

    Raises:
        ValueError: for another alpha.
    """
    if alpha not in (1.5, 2.0):
        raise ValueError(f"alpha must be 1.5 or 2, got {alpha}.")
    z = (x.double() - x.double().amax(dim=-1, keepdim=True)) * (alpha - 1)
    # Nothing below -1 is in the support.
    ordered = z.sort(dim=-1, descending=True).values.clamp_min(-2)
    rank = torch.arange(1, x.size(-1) + 1, device=x.device).double()
    mean = ordered.cumsum(dim=-1) / rank
    if alpha == 2:
        tau = mean - 1 / rank
    else:
        spread = (ordered * ordered).cumsum(dim=-1) - rank * mean * mean
        tau = mean - ((1 - spread).clamp_min(0) / rank).sqrt()
    threshold = tau.gather(-1, (tau < ordered).sum(dim=-1, keepdim=True) - 1)
    return (z - threshold).clamp_min(0) ** (1 / (alpha - 1))


def entmax_results(
    x: Tensor,
    alpha: float | Tensor,
    dp: Tensor,
    *,
    impl: str = "auto",
) -> dict[str, Tensor]:
    """Probabilities ``p`` and gradients ``dx`` and, for a tensor, ``dalpha``."""
    x = x.detach().requires_grad_()
    leaves = [x]
    if isinstance(alpha, Tensor):
        alpha = alpha.detach().requires_grad_()
        leaves.append(alpha)
    p = entmax(x, alpha, impl=impl)
    if not isinstance(p, Tensor):
        raise TypeError("entmax returned a pair without being asked for one.")
    gradients = torch.autograd.grad(p, leaves, dp.to(p.dtype))
    return {"p": p.detach()} | dict(zip(("dx", "dalpha"), gradients, strict=False))


def assert_entmax_attention_matches(
    inputs: EntmaxAttentionInputs,
    *,
    kind: str = "gradient_bound",
    needs: Sequence[str] = ("q", "k", "v"),
    **options: Any,
) -> dict[str, Tensor]:
    """Run an implementation and hold its results to their budgets; return them.

    The output passes two roundings in 16 bits, of the weights and of itself, and gradients the
    rounding of a second output more: they are held to the budget ``kind``, the output to
    ``"gradient"``. The gradient of alpha is a small difference of large sums, so its budget is ten
    times that.
    """
    results = entmax_attention_results(inputs, needs=needs, **options)
    exact = dict(options, impl="reference")
    if isinstance(exact.get("alpha"), Tensor):
        exact["alpha"] = exact["alpha"].double()
    truth = entmax_attention_results(inputs.cast(torch.float64), needs=needs, **exact)
    if results.keys() != truth.keys():
        raise AssertionError(f"results must be {list(truth)}, got {list(results)}.")
    dtype = inputs.q.dtype
    assert_within_budget(results["out"], truth["out"], kind="gradient", name="out")
    residual = float(results["residual"].max())
    if residual > 1e-4:
        raise AssertionError(f"residual {residual:.1e} is over 1e-4.")
    for name in ("dq", "dk", "dv"):
        if name not in results:
            continue
        # Gradients that are zero but for rounding have no relative error.
        rounding = 1e-9 * math.sqrt(truth[name].numel())
        if float(truth[name].norm()) > rounding:
            assert_within_budget(results[name], truth[name], dtype, kind, name=name)
    if "dalpha" in results:
        error = relative_error(results["dalpha"], truth["dalpha"])
        allowed = 10 * budget(dtype, kind)
        if error > allowed:
            raise AssertionError(f"dalpha: relative error {error:.1e} is over {allowed:.1e}.")
    return results
