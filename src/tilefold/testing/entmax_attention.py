"""Test problems of alpha-entmax attention, and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.entmax_attention import EntmaxStats, entmax_attention
from tilefold.testing import padding


@dataclasses.dataclass(frozen=True)
class EntmaxAttentionInputs(padding.Problem):
    """A test problem of :func:`tilefold.ops.entmax_attention`, with the gradient of its output.

    Attributes:
        q: queries ``[B, H, Nq, D]``, or packed ``[T, H, D]``.
        k: keys ``[B, Hkv, Nk, D]``, or packed.
        v: values, with the shape of ``k``.
        dout: gradient of the output, with the shape of ``q``.
        layout: the arguments that describe padding: ``key_padding_mask``, or ``cu_seqlens_q`` and
            ``cu_seqlens_k``. Empty without padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    layout: dict[str, Any]


def entmax_attention_inputs(
    batch: int,
    heads: int,
    nq: int,
    dim: int,
    *,
    nk: int | None = None,
    kv_heads: int | None = None,
    layout: str = "full",
    correlated: bool = False,
    sharpness: float = 2.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> EntmaxAttentionInputs:
    """Create random inputs of entmax attention, equal on every device.

    Args:
        batch: number of sequences B.
        heads: number of query heads H.
        nq: number of queries of the longest sequence.
        dim: width D of a head.
        nk: number of keys of the longest sequence. By default ``nq``.
        kv_heads: number of heads of keys and values. By default ``heads``.
        layout: padding of the keys, one of :data:`tilefold.testing.padding.LAYOUTS`. With B >= 2,
            all but ``"full"`` and ``"right"`` have a sequence without keys.
        correlated: whether neighbouring keys are alike, so that most blocks have weight zero.
        sharpness: standard deviation of the scores.
        dtype: dtype of all tensors but the mask and the offsets.
        device: the device of all tensors.
        seed: seed of the random numbers.

    Raises:
        ValueError: for an unknown layout.
    """
    padding.check_layout(layout)
    generator = torch.Generator().manual_seed(seed)
    nk = nq if nk is None else nk
    kv_heads = heads if kv_heads is None else kv_heads
    q = sharpness * torch.randn(batch, heads, nq, dim, generator=generator)
    k = torch.randn(batch, kv_heads, nk, dim, generator=generator)
    v = torch.randn(batch, kv_heads, nk, dim, generator=generator)
    if correlated:
        # Each dimension of a head is a cosine of the position. The phase is random in [0, 2 pi).
        # The angle between neighbours is small, about 0.12 radians. The amplitude is the square
        # root of 2, for values of variance 1.
        phase = 6.28 * torch.rand(kv_heads, 1, dim, generator=generator)
        speed = 0.12 * torch.randn(1, 1, dim, generator=generator)
        wave = 1.4 * torch.cos(phase + speed * torch.arange(max(nq, nk))[:, None])
        k = wave[:, :nk].expand(batch, -1, -1, -1).clone()
        # Queries follow the waves of their key heads, so that near keys have the largest scores.
        query_waves = wave[:, :nq].repeat_interleave(heads // kv_heads, dim=0)
        q = sharpness * query_waves.expand(batch, -1, -1, -1).clone()
    dout = torch.randn(batch, heads, nq, dim, generator=generator)
    if layout == "packed":
        inputs = _pack_random_lengths(q, k, v, dout, generator)
    else:
        masks: dict[str, Any] = {}
        if layout != "full":
            mask = padding.random_mask(layout, batch, nk, generator)
            if layout != "right" and batch >= 2:
                mask[batch // 2] = False  # a sequence without keys
            masks["key_padding_mask"] = mask
        inputs = EntmaxAttentionInputs(q, k, v, dout, masks)
    layout_on_device = {name: value.to(device) for name, value in inputs.layout.items()}
    return dataclasses.replace(inputs.cast(dtype).to(device), layout=layout_on_device)


def _pack_random_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    generator: torch.Generator,
) -> EntmaxAttentionInputs:
    """Draw a random length for each padded sequence, and pack the tokens up to it.

    Args:
        q: queries ``[B, H, Nq, D]``.
        k: keys ``[B, Hkv, Nk, D]``.
        v: values, with the shape of ``k``.
        dout: gradient of the output, with the shape of ``q``.
        generator: source of the random lengths.

    Returns:
        The packed inputs: tensors ``[T, H, D]``, and offsets ``[B + 1]`` of queries and keys.
    """
    query_mask = _random_length_mask(q, generator)
    key_mask = _random_length_mask(k, generator)
    return EntmaxAttentionInputs(
        q=q.transpose(1, 2)[query_mask],
        k=k.transpose(1, 2)[key_mask],
        v=v.transpose(1, 2)[key_mask],
        dout=dout.transpose(1, 2)[query_mask],
        layout={
            "cu_seqlens_q": padding.offsets(query_mask.sum(1)),
            "cu_seqlens_k": padding.offsets(key_mask.sum(1)),
        },
    )


def _random_length_mask(padded: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a random length for each sequence, and mark the tokens up to it.

    The first sequence is full. With B >= 2, the middle one is empty.

    Args:
        padded: ``[B, H, N, D]``. Only its shape matters.
        generator: source of the random lengths.

    Returns:
        Bool ``[B, N]``, True for tokens that are packed.
    """
    batch, length = padded.size(0), padded.size(2)
    mask = padding.random_mask("right", batch, length, generator)
    mask[0] = True
    if batch >= 2:
        mask[batch // 2] = False
    return mask


def entmax_attention_results(
    inputs: EntmaxAttentionInputs,
    *,
    needs: Sequence[str] = ("q", "k", "v"),
    dropout_seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """Run the forward and backward pass of entmax attention on a test problem.

    Args:
        inputs: queries, keys, values and the gradient of the output.
        needs: which of q, k and v require a gradient. A tensor ``alpha`` always requires one.
        dropout_seed: seed of the dropout mask.
        options: options of :func:`tilefold.ops.entmax_attention`.

    Returns:
        ``out``, the statistics of every row, and the gradients that are required: ``dq``, ``dk``,
        ``dv`` and ``dalpha``.
    """
    # new leaf tensors, so that gradients do not accumulate in the problem
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_(name in needs)
        for name in ("q", "k", "v")
    }
    if isinstance(options.get("alpha"), Tensor):
        leaves["alpha"] = options["alpha"].detach().requires_grad_()
        options["alpha"] = leaves["alpha"]  # gradients are computed for the leaf
    if options.get("dropout_p"):
        options["generator"] = torch.Generator(inputs.q.device).manual_seed(dropout_seed)
    result = entmax_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        **inputs.layout,
        **options,
        return_stats=True,
    )
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    out, stats = result
    statistics = {
        name: value for name, value in EntmaxStats(*stats)._asdict().items() if value is not None
    }
    gradients = padding.gradients(out, leaves, inputs.dout)
    return {"out": out.detach(), **statistics, **gradients}
