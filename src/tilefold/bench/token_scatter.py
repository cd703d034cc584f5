"""The benchmark of ``tilefold.ops.token_scatter``: shapes, inputs, floor and gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench._token_scatter_baselines import BASELINES, runnable_scatter
from tilefold.bench._token_scatter_gate import TokenScatterGate
from tilefold.bench.registry import DTYPES, BenchCase, BenchSpec, Implementation, Phase, Requirement, Runnable, Work
from tilefold.ops._shared.impl import resolve_impl
from tilefold.testing.token_scatter import zipf_ids

# CLS, PAD, SEP and UNK, as XLM-R numbers them
SPECIAL_IDS = (0, 1, 2, 3)
_RAGGED_SHARES = (0.02, 0.64)  # sequence lengths as a share of S, evenly spread: 33% of the tokens are no padding


@dataclass(frozen=True)
class TokenScatterBenchInputs:
    """Inputs of one case, all on one device.

    Attributes:
        weights: ``[B, S]``, requires a gradient; half of them are negative, as before a relu.
        input_ids: ``[B, S]`` int64, as frequent as the words of a text; CLS first, SEP last, then PAD.
        unused: the special ids, which score nothing.
        grad_output: ``[B, V]``.
        valid_tokens: tokens that are not special.
        active: share of positive scores.
    """

    weights: Tensor
    input_ids: Tensor
    unused: Tensor
    grad_output: Tensor
    valid_tokens: int
    active: float


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> TokenScatterBenchInputs:
    """Random inputs of ``case``; ``"ragged"`` ones are padded on the right to three times their length."""
    batch, length, vocab = (case.dims[name] for name in "BSV")
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = torch.randn(batch, length, generator=generator, device=device).to(DTYPES[case.dtype])
    ids = zipf_ids((batch, length), vocab - len(SPECIAL_IDS), generator) + len(SPECIAL_IDS)
    lengths = torch.full((batch,), length, device=device)
    if case.variant == "ragged":
        shares = torch.linspace(*_RAGGED_SHARES, batch, device=device)
        lengths = (shares * length).round().long().clamp(min=2)
    places = torch.arange(length, device=device)
    ids[:, 0] = SPECIAL_IDS[0]
    ids = torch.where(places == lengths[:, None] - 1, SPECIAL_IDS[2], ids)
    ids = torch.where(places >= lengths[:, None], SPECIAL_IDS[1], ids)
    unused = torch.tensor(SPECIAL_IDS, device=device)
    counts = ~torch.isin(ids, unused)
    entry = (torch.arange(batch, device=device)[:, None] * vocab + ids)[counts & (weights > 0)]
    active = torch.unique(entry).numel() / (batch * vocab)
    grad_output = torch.randn(batch, vocab, generator=generator, device=device).to(weights.dtype)
    return TokenScatterBenchInputs(weights.requires_grad_(), ids, unused, grad_output, int(counts.sum().item()), active)


def make_probe(case: BenchCase, device: torch.device, seed: int = 0) -> TokenScatterBenchInputs:
    """The case with tiny dimensions: loads libraries and thread pools, allocates next to nothing."""
    return make_inputs(
        BenchCase("probe", case.device, case.dtype, {"B": 2, "S": 8, "V": 96}, case.variant), device, seed
    )


def work(case: BenchCase, inputs: TokenScatterBenchInputs, phase: Phase) -> Work:
    """Least work: every id and every weight that counts is read, every score written; backward visits winners."""
    item, tokens = inputs.weights.element_size(), inputs.valid_tokens
    ids = inputs.input_ids.numel() * inputs.input_ids.element_size()
    nbytes = float(ids + item * (tokens + inputs.grad_output.numel()))
    if phase == "forward_backward":
        # a byte a token that says who won, written and read; a gradient read a winner, one written a token
        winners = inputs.active * inputs.grad_output.numel()
        nbytes += 2 * inputs.weights.numel() + item * (winners + inputs.weights.numel())
    return Work(float(tokens), nbytes)


def needs_bytes(case: BenchCase, impl: str) -> int:
    """A low estimate of the extra memory of ``impl`` in training, in bytes."""
    batch, length, vocab = (case.dims[name] for name in "BSV")
    item = DTYPES[case.dtype].itemsize
    copies = {"membership": 3, "membership-compile": 2}
    members = 8 * batch * length * vocab if impl == "reference" else 0
    return copies.get(impl, 0) * batch * length * vocab * item + members + batch * vocab * item


def _ours(impl: str) -> Callable[[TokenScatterBenchInputs], Runnable]:
    def build(inputs: TokenScatterBenchInputs) -> Runnable:
        from tilefold.ops import token_scatter  # noqa: PLC0415

        def scatter(weights: Tensor, input_ids: Tensor, unused: Tensor, vocab_size: int) -> Tensor:
            return token_scatter(weights, input_ids, vocab_size, ignore_ids=SPECIAL_IDS, impl=impl)

        return runnable_scatter(scatter, inputs, resolve_impl(impl, inputs.weights.device))

    return build


def _case(B: int, S: int, V: int, variant: str = "max", device: str = "cuda", *, quick: bool = False) -> BenchCase:
    dtype = "bfloat16" if device == "cuda" else "float32"
    name = f"{'cpu-' if device == 'cpu' else ''}{B}x{S}x{V}-{variant}"
    return BenchCase(name, device, dtype, {"B": B, "S": S, "V": V}, variant, quick)


CPU_TRAIN = _case(8, 256, 30522, device="cpu")

CASES = (
    _case(32, 512, 250002, quick=True),
    _case(32, 512, 250002, "ragged"),
    _case(32, 512, 30522, quick=True),
    _case(256, 512, 30522),
    _case(4, 8192, 250002),
    _case(32, 8192, 250002),
    _case(64, 32, 30522, quick=True),
    CPU_TRAIN,
    _case(8, 256, 30522, "ragged", "cpu"),
    _case(32, 512, 30522, device="cpu"),
    _case(4, 512, 250002, device="cpu"),
    _case(16, 32, 30522, device="cpu", quick=True),
)

REQUIREMENTS = (
    Requirement(
        case=CPU_TRAIN.name,
        claim="peak memory of forward + backward is at least 20x below the [B, S, V] membership",
        left=("tilefold", "forward_backward_peak_mib"),
        right=("membership", "forward_backward_peak_mib"),
        limit=1 / 20,
    ),
    Requirement(
        case=CPU_TRAIN.name,
        claim="forward + backward takes no longer than scatter_reduce",
        left=("tilefold", "forward_backward_p50_ms"),
        right=("scatter-reduce", "forward_backward_p50_ms"),
        limit=1.0,
    ),
)

SPEC = BenchSpec(
    op="token_scatter",
    cases=CASES,
    implementations=(
        Implementation("tilefold", _ours("auto"), "ours"),
        Implementation("tiled", _ours("tiled"), "ours", default_on=()),
        Implementation("reference", _ours("reference"), "ours", default_on=()),
        *BASELINES,
    ),
    baseline="scatter-reduce",
    make_inputs=make_inputs,
    make_gate=TokenScatterGate,
    make_probe=make_probe,
    work=work,
    needs_bytes=needs_bytes,
    requirements=REQUIREMENTS,
)
