"""One attention function and one mask function for transformers' registries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tilefold.integrations.transformers._alpha import layer_alpha
from tilefold.ops import entmax_attention

NAME = "entmax"
# What the attention does by itself, by arguments; any other mask function would silently be dropped.
_KNOWN_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` run alpha-entmax attention in any transformers model.

    Registers an attention function and a mask function, without which padding would be ignored. Nothing changes for
    models that do not ask for ``name``. Alphas: ``config.entmax_alpha`` (a number, or one a layer; 1.5 by default),
    :func:`set_alpha` or :func:`learn_alpha`.

    Args:
        name: the implementation's name; one with "flash" in it would be taken for a FlashAttention.

    Raises:
        ValueError: for a name with "flash" in it.
    """
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which transformers treats as FlashAttention, got {name!r}.")
    AttentionInterface.register(name, entmax_attention_forward)
    AttentionMaskInterface.register(name, entmax_mask)


def unregister(name: str = NAME) -> None:
    """Take :func:`register` back."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def entmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The ``[B, kv_length]`` padding mask as it is: causality and windows are arguments of the attention itself.

    Raises:
        ValueError: for masks that the attention cannot take by its arguments.
    """
    if mask_function is not None and not _is_known(mask_function):
        raise ValueError(
            f"mask_function must be causal, bidirectional or a sliding window for entmax attention, got "
            f"{getattr(mask_function, '__qualname__', mask_function)}; pass cu_seq_lens_q and cu_seq_lens_k for packed "
            "sequences, or use attn_implementation='sdpa'."
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    if mask.size(1) != kv_length:
        raise ValueError(
            f"attention_mask must cover the {kv_length} keys of the cache, got {list(attention_mask.shape)}; use a "
            "dynamic cache."
        )
    return mask


def _is_known(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__qualname__", "")
    if name in _KNOWN_MASKS:
        return True
    if not name.startswith("and_masks"):
        return False
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    functions = [f for part in parts for f in (part if isinstance(part, (tuple, list)) else (part,))]
    return bool(functions) and all(_is_known(f) for f in functions)


def entmax_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query`` ``[B, H, Nq, D]`` over ``key`` and ``value`` ``[B, Hkv, Nk, D]`` for transformers.

    Args:
        module: the attention module that calls; its alpha is looked up there and in its configuration.
        query, key, value: as transformers passes them, transposed views included.
        attention_mask: ``[B, Nk]``, as :func:`entmax_mask` returns it.
        dropout: probability that a weight is dropped.
        scaling: of the scores.
        sliding_window: keys at a distance below this are seen.
        is_causal: by default what ``module.is_causal`` says.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of packed sequences in a batch of one; others are not used.

    Returns:
        ``[B, Nq, H, D]``, and ``None`` for the weights, which do not exist.

    Raises:
        ValueError: for masks of another shape, and for softcaps, sinks or biases, which are not supported.
    """
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None for entmax attention, got a value; use attn_implementation='eager'.")
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else bool(is_causal)
    options: dict[str, Any] = {
        "alpha": layer_alpha(module),
        "causal": causal,
        "window": None if sliding_window is None else sliding_window - 1,
        "scale": scaling,
        "dropout_p": dropout,
    }
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is not None and cu_k is not None:
        packed = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        longest = kwargs.get("max_length_k")
        out = entmax_attention(
            *packed,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_k=int(longest) if isinstance(longest, int) else None,
            **options,
        )
        return _only_output(out).unsqueeze(0), None
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be a padding mask [B, Nk] for entmax attention, got shape "
            f"{list(attention_mask.shape)}; pass a 2D mask to the model."
        )
    out = _only_output(entmax_attention(query, key, value, key_padding_mask=attention_mask, **options))
    return out.transpose(1, 2), None


def _only_output(result: Tensor | tuple[Tensor, Any]) -> Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]
