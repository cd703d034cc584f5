"""The benchmark of ``tilefold.ops.entmax_attention``.

The baselines are softmax attention, which is another function and not checked, and AdaSplash,
which is checked.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilefold import testing
from tilefold.bench import spec
from tilefold.ops.entmax_attention import chosen_impl, entmax_attention
from tilefold.testing.entmax_attention import entmax_attention_inputs

_ALPHA = 1.5
# Halley steps of AdaSplash in the paper's benchmarks; the default of the package is 10
_ADASPLASH_STEPS = 3
# standard deviation of the scores, by the distribution of the inputs
_SHARPNESS = {"iid": 1.0, "iid4": 4.0, "correlated": 2.0}
# number of queries of one head that are checked on a GPU
_N_CHECKED_QUERIES = 1024
# largest number of fp64 scores on a CPU, which limits the number of checked queries
_MAX_CHECKED_SCORES = 2**22
# allowed error of dq as a multiple of the error that unavoidable roundings cause
_UNAVOIDABLE_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True)
class AttentionInputs(spec.Inputs):
    """Inputs of entmax attention.

    Attributes:
        q: queries ``[B, H, N, D]``.
        k: keys ``[B, H, N, D]``.
        v: values ``[B, H, N, D]``.
        causal: whether a query attends only to its own and earlier positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        return (self.q, self.k, self.v)

    @property
    def constants(self) -> tuple[Any, ...]:
        """Whether attention is causal."""
        return (self.causal,)


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> AttentionInputs:
    """Create random queries, keys and values.

    Args:
        case: shape, dtype and variant. A variant is the distribution of the inputs: ``"iid"``
            (independent tokens), ``"iid4"`` (with larger scores) or ``"correlated"`` (neighbouring
            keys are alike). The suffix ``"-causal"`` makes attention causal.
        device: the device of the tensors.
        seed: seed of the random numbers.
    """
    batch, heads, n, dim = (case.dims[name] for name in ("B", "H", "N", "D"))
    distribution = case.variant.removesuffix("-causal")
    problem = entmax_attention_inputs(
        batch,
        heads,
        n,
        dim,
        correlated=distribution == "correlated",
        sharpness=_SHARPNESS[distribution],
        dtype=spec.DTYPES[case.dtype],
        device=device,
        seed=seed,
    )
    return AttentionInputs(
        q=problem.q.requires_grad_(),
        k=problem.k.requires_grad_(),
        v=problem.v.requires_grad_(),
        causal=case.variant.endswith("-causal"),
        grad_output=problem.dout,
    )


def _compute_rounded_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    tau: Tensor,
    dtype: torch.dtype,
    causal: bool,
) -> Tensor:
    """Compute dq of one head in fp64, with the roundings that products in ``dtype`` cannot avoid.

    For alpha = 1.5 the weights of a row are ``p = r^2`` with ``r = [s / 2 - tau]_+``, where ``s``
    are the scores. With the gradient of the weights ``dp = dout v^T``,

        ds = r (dp - sum(r dp) / sum(r)),    dq = scale ds k,

    and ``sum(r dp) / sum(r) = dout . o2`` with the second output ``o2 = r v / sum(r)``. The factors
    of matrix products are rounded: ``r``, ``o2`` and ``ds``.

    Args:
        q: the last ``rows`` queries ``[rows, D]`` of the sequence.
        k: keys ``[N, D]``.
        v: values ``[N, D]``.
        dout: gradient of the output ``[rows, D]``.
        tau: thresholds ``[rows]``.
        dtype: dtype of the factors of the products.
        causal: whether a query attends only to its own and earlier positions.

    Returns:
        The gradient of the queries, fp64 ``[rows, D]``.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).double()

    scale = q.size(-1) ** -0.5
    roots = ((_ALPHA - 1) * scale * (q @ k.T) - tau.double()[:, None]).clamp_min(0)
    if causal:
        key_positions = torch.arange(k.size(0), device=k.device)
        query_positions = key_positions[k.size(0) - q.size(0) :, None]
        roots = roots.masked_fill(key_positions > query_positions, 0)
    second_output = rounded(rounded(roots) @ v / roots.sum(dim=1, keepdim=True))
    mean_gradient = (dout * second_output).sum(dim=1, keepdim=True)
    dscores = roots * (dout @ v.T - mean_gradient)
    dq: Tensor = rounded(dscores) @ k * scale
    return dq


def make_gate(case: spec.BenchCase, inputs: AttentionInputs) -> spec.Gate:
    """Compute parts of the output and gradients in fp64, to check implementations with them.

    These parts are the output and dq of the last queries of the first head. Its dk and dv are sums
    over all queries, and are checked if the last queries are all of them.

    Nearly equal keys cancel in dq, which magnifies the rounding errors of any kernel with 16-bit
    products. The error of dq that these roundings cause in otherwise exact arithmetic is computed,
    and 1.5 times this error is allowed if it exceeds the usual budget.

    Args:
        case: the case.
        inputs: its inputs.
    """
    dout = inputs.grad_output
    n = dout.size(2)
    n_checked = _N_CHECKED_QUERIES if dout.is_cuda else max(1, _MAX_CHECKED_SCORES // n)
    first_query = max(0, n - n_checked)
    q, k, v = (leaf.detach()[:1, :1].double() for leaf in inputs.leaves)
    q = q[:, :, first_query:].clone().requires_grad_()
    k.requires_grad_()
    v.requires_grad_()
    result = entmax_attention(
        q,
        k,
        v,
        alpha=_ALPHA,
        causal=inputs.causal,
        impl="reference",
        return_stats=True,
    )
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = result
    checked_dout = dout[:1, :1, first_query:].double()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), checked_dout)

    rounded_dq = _compute_rounded_dq(
        q.detach()[0, 0],
        k.detach()[0, 0],
        v.detach()[0, 0],
        checked_dout[0, 0],
        stats.tau.detach()[0, 0],
        dtype=dout.dtype,
        causal=inputs.causal,
    )
    unavoidable_error = testing.relative_error(rounded_dq, dq[0, 0])

    def select_queries(tensor: Tensor) -> Tensor:
        return tensor[:1, :1, first_query:]

    def select_head(tensor: Tensor) -> Tensor:
        return tensor[:1, :1]

    # only then dk and dv, which are sums over queries, are complete
    has_all_queries = first_query == 0
    return spec.Gate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={"out": spec.CheckedSlice(select_queries, out.detach())},
        gradients={
            "dq": spec.CheckedSlice(select_queries, dq),
            "dk": spec.CheckedSlice(select_head, dk) if has_all_queries else None,
            "dv": spec.CheckedSlice(select_head, dv) if has_all_queries else None,
        },
        our_budget=spec.Budget(
            forward=testing.budget(dout.dtype, "gradient"),
            gradient=max(
                testing.budget(dout.dtype, "gradient_bound"),
                _UNAVOIDABLE_MARGIN * unavoidable_error,
            ),
        ),
    )


def _build_softmax_attention(backend: SDPBackend) -> spec.Build:
    """Return the function that binds torch's softmax attention to inputs, with one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return spec.bound(attend, backend.name.lower())


def _build_flex_attention(inputs: AttentionInputs) -> spec.Runnable:
    """Return softmax attention by torch's compiled FlexAttention, as a call on the inputs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if inputs.causal:
        n = inputs.q.size(2)
        block_mask = create_block_mask(
            lambda batch, head, query, key: query >= key,
            B=None,
            H=None,
            Q_LEN=n,
            KV_LEN=n,
            device=inputs.q.device.type,
        )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, _causal: bool) -> Tensor:
        # the block mask makes it causal
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return inputs.bind(attend, "flex_attention, compiled")


def _build_adasplash_v1(inputs: AttentionInputs, function: str) -> spec.Runnable:
    """Return AdaSplash attention with the paper's number of Halley steps, as a call on the inputs.

    Args:
        inputs: the inputs of the case.
        function: name of a function of the package ``adasplash``.
    """
    attention: Callable[..., Tensor] = getattr(importlib.import_module("adasplash"), function)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return attention(q, k, v, niter=_ADASPLASH_STEPS, is_causal=causal)

    return inputs.bind(attend, f"{function}, niter={_ADASPLASH_STEPS}")


def _build_adasplash_v2(inputs: AttentionInputs) -> spec.Runnable:
    """Return attention by AdaSplash-2, as a call on the inputs.

    Raises:
        spec.NotApplicable: if attention is not causal.
    """
    attention: Callable[..., Tensor] = importlib.import_module("adasplash").adasplash_v2
    if not inputs.causal:
        raise spec.NotApplicable("AdaSplash-2 is causal only")

    def attend(q: Tensor, k: Tensor, v: Tensor, _causal: bool) -> Tensor:
        return attention(q, k, v)

    return inputs.bind(attend, "adasplash_v2, default niter")


def _entmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, impl: str) -> Tensor:
    """Return the output of tilefold's attention."""
    # without return_stats, the result is a tensor
    result = entmax_attention(q, k, v, alpha=_ALPHA, causal=causal, impl=impl)
    return result if isinstance(result, Tensor) else result[0]


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_entmax_attention, chosen_impl, graph=True),
    spec.Implementation(
        "softmax-fa2",
        _build_softmax_attention(SDPBackend.FLASH_ATTENTION),
        "bare",
    ),
    spec.gpu_implementation(
        "softmax-cudnn",
        _build_softmax_attention(SDPBackend.CUDNN_ATTENTION),
        "bare",
    ),
    spec.Implementation(
        "softmax-flex",
        _build_flex_attention,
        "bare",
        default_on=("cuda",),
        slow=True,
    ),
    *spec.published_implementations(
        "adasplash",
        {
            "adasplash-v1": functools.partial(_build_adasplash_v1, function="adasplash_v1"),
            "adasplash-v1-no-mask": functools.partial(
                _build_adasplash_v1,
                function="adasplash_no_block_mask",
            ),
            "adasplash-v2": _build_adasplash_v2,
        },
        slow=True,
    ),
)


def work(case: spec.BenchCase, inputs: AttentionInputs, phase: spec.Phase) -> spec.Work:
    """Return a lower bound of the operations and of the memory traffic of entmax attention.

    Every score must be computed, because only its comparison with the threshold shows whether its
    weight is 0. Products with weights and with gradients are not counted, since nearly all weights
    may be 0. The operations of both phases are therefore the same.

    Args:
        case: the shape.
        inputs: tensors of the case, and whether attention is causal.
        phase: forward, or forward and backward.
    """
    batch, heads, n, dim = (case.dims[name] for name in ("B", "H", "N", "D"))
    n_scores = float(batch * heads * n * n)
    if inputs.causal:
        n_scores /= 2  # a query attends to half of the keys on average
    # a score is a sum of `dim` products
    flops = 2.0 * dim * n_scores
    tensor_bytes = float(inputs.q.numel() * inputs.q.element_size())
    # all tensors have the size of q; forward reads q, k and v, and writes the output
    n_tensors = 4
    if phase == "forward_backward":
        # backward reads q, k, v, the output and its gradient, and writes dq, dk and dv
        n_tensors += 8
    return spec.Work(flops, n_tensors * tensor_bytes)


def min_bytes(case: spec.BenchCase, impl: str) -> int:
    """Return a lower bound of the memory of an implementation.

    Args:
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        Bytes of five tensors of q's shape and, for the reference, of the fp64 score matrix.
    """
    batch, heads, n, dim = (case.dims[name] for name in ("B", "H", "N", "D"))
    tensor_bytes = batch * heads * n * dim * spec.DTYPES[case.dtype].itemsize
    score_bytes = 0
    if impl == "reference":
        score_bytes = batch * heads * n * n * torch.float64.itemsize
    n_tensors = 5  # q, k, v, the output and its gradient
    return score_bytes + n_tensors * tensor_bytes


SPEC = spec.BenchSpec(
    op="entmax_attention",
    implementations=IMPLEMENTATIONS,
    baseline="softmax-fa2",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"B": 1, "H": 1, "N": 32},
    work=work,
    min_bytes=min_bytes,
)
