"""Stock encoders of transformers on packed tokens: softmax attention that knows where each sequence begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from tilefold._typing import Model
from tilefold.ops.packed_attention import packed_softmax_attention, places_of_tokens

PACKED = "tilefold_packed"
_BIDIRECTIONAL_WINDOWS = (
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)


def register_packed() -> None:
    """Make ``attn_implementation="tilefold_packed"`` known to transformers; models that do not ask for it stay.

    With ``cu_seq_lens_q`` among the arguments of the model it runs
    :func:`tilefold.ops.packed_attention.packed_softmax_attention`, without them transformers' own ``"sdpa"``.
    """
    AttentionInterface.register(PACKED, packed_attention_forward)
    AttentionMaskInterface.register(PACKED, packed_mask)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: ``[1, H, T, D]`` with ``cu_seq_lens_q`` and ``max_length_q``, else padded.

    Returns:
        ``[B, N, H, D]``, and ``None`` for the weights, which are never stored.

    Raises:
        ValueError: for packed sequences with a mask, a causal layer, or a batch of more than one row.
    """
    cu_seqlens: Tensor | None = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        mask = attention_mask
        if mask is None and sliding_window is not None and sliding_window < query.size(2):
            places = torch.arange(query.size(2), device=query.device)
            mask = ((places[:, None] - places).abs() < sliding_window)[None, None]
        padded: Tensor
        padded, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return padded, None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    if query.size(0) != 1 or attention_mask is not None or causal:
        raise ValueError(
            f"packed sequences must be one row [1, T] without a mask in an encoder, got {query.size(0)} rows, "
            f"{'no' if attention_mask is None else 'a'} mask, causal={bool(causal)}; leave attention_mask out."
        )
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None for packed attention, got a value; use padded inputs.")
    longest = kwargs.get("max_length_q")
    heads = query.size(1) // key.size(1)
    if heads > 1:
        key, value = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
    # squeeze, whose backward is a view: that of [0] is a copy into zeros
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = packed_softmax_attention(
        query,
        key,
        value,
        cu_seqlens,
        int(cu_seqlens.diff().max()) if longest is None else int(longest),
        scale=scaling,
        window=None if sliding_window is None else sliding_window - 1,
        dropout_p=dropout,
    )
    return out[None], None


def packed_mask(
    *args: Any, mask_function: Callable[..., Any] = bidirectional_mask_function, attention_mask: Any = None, **how: Any
) -> Tensor | None:
    """The mask of ``"sdpa"``, but none where nothing is padded: the attention applies windows itself."""
    bidirectional = mask_function is bidirectional_mask_function
    window = getattr(mask_function, "__qualname__", "") in _BIDIRECTIONAL_WINDOWS or _is_window(mask_function)
    if attention_mask is None and (bidirectional or window):
        return None
    found: Tensor | None = sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **how)
    return found


def _is_window(function: Callable[..., Any]) -> bool:
    """Whether it is the conjunction of both directions and a window."""
    functions = conjuncts(function)
    return bool(functions) and all(
        f is bidirectional_mask_function or getattr(f, "__qualname__", "") in _BIDIRECTIONAL_WINDOWS for f in functions
    )


def conjuncts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The mask functions that transformers' ``and_masks`` joined to this one; none if it is no such conjunction."""
    if not getattr(function, "__qualname__", "").startswith("and_masks"):
        return []
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [f for part in parts for f in (part if isinstance(part, (tuple, list)) else (part,))]


def padding_position(model: nn.Module) -> int | None:
    """The position of padding in models that count positions from behind it (RoBERTa and its kin), else None."""
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        if isinstance(index, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return index
    return None


def position_ids_of(input_ids: Tensor, cu_seqlens: Tensor, padding: int | None = None) -> Tensor:
    """``[T]`` int64 positions of packed tokens within their sequences.

    Args:
        input_ids: ``[T]``.
        cu_seqlens: ``[B + 1]``.
        padding: see :func:`padding_position`; positions then begin at ``padding + 1``, and a token with this id keeps
            it as its position and is not counted, as in the padded model.
    """
    sequence, place = places_of_tokens(cu_seqlens, input_ids.numel())
    if padding is None:
        return place
    counted = (input_ids != padding).long()
    before = torch.cat([counted.new_zeros(1), counted.cumsum(0)])  # [T + 1]
    positions: Tensor = (before[1:] - before[cu_seqlens.long()[sequence]]) * counted + padding
    return positions


def packed_arguments(
    model: nn.Module,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Keywords of ``model.forward`` for packed tokens; arguments as in :func:`packed_hidden_states`."""
    if position_ids is None:
        position_ids = position_ids_of(input_ids, cu_seqlens, padding_position(model))
    found: dict[str, Any] = {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }
    if token_type_ids is not None:
        found["token_type_ids"] = token_type_ids[None]
    return found


def packed_hidden_states(
    model: Model,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    """Hidden states of packed tokens by a stock encoder, ``[T, H]``, with no padding anywhere and no wait for the GPU.

    Differentiable; dropout, autocast and gradient checkpointing are those of the model.

    Args:
        model: a transformers encoder that :func:`use_packed` accepted. Of one with an LM head, the logits are returned
            (of one whose head is fused by ``accelerate``: the input of the head).
        input_ids: integer ``[T]``, the tokens of all sequences, one after the other.
        cu_seqlens: int32 ``[B + 1]`` offsets of the sequences, on the device of ``input_ids``.
        max_seqlen: length of the longest sequence, known to the host.
        position_ids: ``[T]``; by default those of the model, see :func:`position_ids_of`.
        token_type_ids: ``[T]``; by default zeros.
    """
    arguments = packed_arguments(
        model, input_ids, cu_seqlens, max_seqlen, position_ids=position_ids, token_type_ids=token_type_ids
    )
    output = model(**arguments)
    hidden: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return hidden.squeeze(0)
