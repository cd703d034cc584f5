"""The benchmark of ``tilefold.ops.entmax_attention``.

The baselines are softmax attention, which is another function and not checked, and AdaSplash,
which is checked.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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
# standard deviation of the scores, by the first word of a variant
_SHARPNESS = {"iid": 1.0, "iid4": 4.0, "correlated": 2.0}
# queries of one head that are checked on a GPU
_N_CHECKED_QUERIES = 1024
# fp64 scores of the checked head on a CPU, which bound its checked queries
_MAX_CHECKED_SCORES = 2**22
# allowed error of dq as a multiple of the error that unavoidable roundings make
_UNAVOIDABLE_MARGIN = 1.5


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Create random queries, keys and values.

    Args:
        case: its variant is ``"iid"`` (independent tokens), ``"iid4"`` (with larger scores) or
            ``"correlated"`` (neighbouring keys are alike). ``"-causal"`` may follow.
        device: of the tensors.
        seed: of the random numbers.

    Returns:
        The leaves are q, k and v ``[B, H, N, D]``. The constant is whether attention is causal.
    """
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    distribution, _, suffix = case.variant.partition("-")
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
    return spec.Inputs(
        leaves=(
            problem.q.requires_grad_(),
            problem.k.requires_grad_(),
            problem.v.requires_grad_(),
        ),
        constants=(suffix == "causal",),
        grad_output=problem.dout,
    )


def _rounded_dq(
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

    and ``sum(r dp) / sum(r) = dout . o2`` with the second output ``o2 = r v / sum(r)``. Rounded
    are the factors of matrix products: ``r``, ``o2`` and ``ds``.

    Args:
        q: the last queries ``[rows, D]``.
        k: keys ``[N, D]``.
        v: values ``[N, D]``.
        dout: gradient of the output ``[rows, D]``.
        tau: thresholds ``[rows]``.
        dtype: dtype of the products.
        causal: whether a query attends to no later keys.

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


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Compute slices of the output and the gradients in fp64.

    The slices are the last queries of the first head, and, if these are all queries, its dk and
    dv. Keys that are nearly alike cancel in dq, so that the roundings of any kernel with 16-bit
    products show. The error that these roundings alone cause in exact numbers is computed, and
    1.5 times as much is allowed if that is more than the budget.
    """
    (causal,) = inputs.constants
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
        causal=causal,
        impl="reference",
        return_stats=True,
    )
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = result
    checked_dout = dout[:1, :1, first_query:].double()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), checked_dout)

    rounded_dq = _rounded_dq(
        q.detach()[0, 0],
        k.detach()[0, 0],
        v.detach()[0, 0],
        checked_dout[0, 0],
        stats.tau.detach()[0, 0],
        dtype=dout.dtype,
        causal=causal,
    )
    unavoidable_error = testing.relative_error(rounded_dq, dq[0, 0])

    def select_queries(tensor: Tensor) -> Tensor:
        return tensor[:1, :1, first_query:]

    def select_head(tensor: Tensor) -> Tensor:
        return tensor[:1, :1]

    # dk and dv are sums over all queries
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


def _softmax_attention(backend: SDPBackend) -> spec.Build:
    """Return the ``build`` of torch's softmax attention with a backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return spec.bound(attend, backend.name.lower())


def _build_flex_attention(inputs: spec.Inputs) -> spec.Runnable:
    """Bind torch's compiled FlexAttention with softmax."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (causal,) = inputs.constants
    block_mask = None
    if causal:
        n = inputs.grad_output.size(2)
        block_mask = create_block_mask(
            lambda batch, head, query, key: query >= key,
            B=None,
            H=None,
            Q_LEN=n,
            KV_LEN=n,
            device=inputs.grad_output.device.type,
        )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask)
        return out

    return inputs.bind(attend, "flex_attention, compiled")


def _build_adasplash_v1(inputs: spec.Inputs, function: str) -> spec.Runnable:
    """Bind a function of AdaSplash with the number of steps of the paper.

    Args:
        inputs: the inputs of the case.
        function: its name in the package ``adasplash``.
    """
    attention: Callable[..., Tensor] = getattr(importlib.import_module("adasplash"), function)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return attention(q, k, v, niter=_ADASPLASH_STEPS, is_causal=causal)

    return inputs.bind(attend, f"{function}, niter={_ADASPLASH_STEPS}")


def _build_adasplash_v2(inputs: spec.Inputs) -> spec.Runnable:
    """Bind AdaSplash-2.

    Raises:
        spec.NotApplicable: for attention that is not causal.
    """
    attention: Callable[..., Tensor] = importlib.import_module("adasplash").adasplash_v2
    (causal,) = inputs.constants
    if not causal:
        raise spec.NotApplicable("AdaSplash-2 is causal only")

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return attention(q, k, v)

    return inputs.bind(attend, "adasplash_v2, default niter")


def _entmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, impl: str) -> Tensor:
    """Call tilefold's attention with the leaves and the constant of a case."""
    result = entmax_attention(q, k, v, alpha=_ALPHA, causal=causal, impl=impl)
    return result if isinstance(result, Tensor) else result[0]


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_entmax_attention, chosen_impl, graph=True),
    spec.Implementation(
        "softmax-fa2",
        _softmax_attention(SDPBackend.FLASH_ATTENTION),
        "bare",
    ),
    spec.gpu_implementation(
        "softmax-cudnn",
        _softmax_attention(SDPBackend.CUDNN_ATTENTION),
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


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Return the least work of entmax attention.

    Every score is computed once, because only its comparison with the threshold says whether its
    weight is 0. The products with weights and with gradients are not counted: nearly all weights
    may be zero. The operations are therefore the same in both phases.

    Args:
        case: the shape.
        inputs: tensors of the case, and whether attention is causal.
        phase: forward, or forward and backward.
    """
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
    (causal,) = inputs.constants
    n_scores = float(batch * heads * n * n)
    if causal:
        n_scores /= 2  # a query sees half of the keys on average
    # a multiplication and an addition for each number of a query and a key
    flops = 2.0 * dim * n_scores
    tensor_bytes = float(inputs.grad_output.numel() * inputs.grad_output.element_size())
    # all tensors have the size of the output; forward reads q, k and v, and writes the output
    n_tensors = 4
    if phase == "forward_backward":
        # backward reads q, k, v, the output and its gradient, and writes dq, dk and dv
        n_tensors += 8
    return spec.Work(flops, n_tensors * tensor_bytes)


def needs_bytes(case: spec.BenchCase, impl: str) -> int:
    """Estimate the memory of an implementation from below.

    Args:
        case: the shape.
        impl: name of the implementation.

    Returns:
        Bytes of five tensors like q, and for the reference of the scores in fp64.
    """
    batch, heads, n, dim = (case.dims[name] for name in "BHND")
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
    needs_bytes=needs_bytes,
)
