"""One attention function and one mask function for transformers' registries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, causal_mask_function

from tilefold.integrations.transformers._alpha import layer_alpha
from tilefold.integrations.transformers._sparsity import Recorder, recorder_of
from tilefold.integrations.transformers.packed import conjuncts
from tilefold.ops import entmax_attention

NAME = "entmax"
MARK = "attn_implementation"  # in config.json, where transformers reads it but does not write it
# Masks that are arguments of the attention; any other mask function would silently be ignored.
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
    models that do not ask for ``name``. Alphas: ``config.entmax_alpha`` (a number, or one per layer; 1.5 by default),
    :func:`set_alpha` or :func:`learn_alpha`. A model that has run once stores ``name`` in its configuration, so that
    its checkpoints load with it again; see :func:`use_entmax`.

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
    """Undo :func:`register`."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def entmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **how: Any,
) -> Tensor | None:
    """The ``[B, kv_length]`` padding mask unchanged: causality and windows are arguments of the attention.

    Raises:
        ValueError: for masks that are not arguments of the attention, and for a static cache.
    """
    if mask_function is not None and not _is_known(mask_function, how):
        raise ValueError(
            f"mask_function must be causal, bidirectional or a sliding window for entmax attention, got "
            f"{getattr(mask_function, '__name__', mask_function)}; pass cu_seq_lens_q and cu_seq_lens_k for packed "
            "sequences, or use attn_implementation='sdpa'."
        )
    # queries are at the end of the keys; a static cache has empty slots after them
    bidirectional = mask_function is bidirectional_mask_function
    static = not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length
    if mask_function is not None and not bidirectional and q_offset is not None and static:
        raise ValueError(
            f"the keys of the cache must end with the {q_length} queries for entmax attention, got {kv_length} keys "
            f"from {kv_offset} and queries from {q_offset}; use a dynamic cache."
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


def _is_known(function: Callable[..., Any], how: dict[str, Any]) -> bool:
    if function is causal_mask_function or function is bidirectional_mask_function:
        return True
    if torch.compiler.is_compiling():  # which cannot look into closures; masks of packs and of callers forbid both
        skips = how.get("allow_is_causal_skip", False) or how.get("allow_is_bidirectional_skip", False)
        chunked = "chunked_attention" in (getattr(how.get("config"), "layer_types", None) or ())
        return bool(skips) and not how.get("use_vmap", False) and not chunked
    if getattr(function, "__qualname__", "") in _KNOWN_MASKS:
        return True
    functions = conjuncts(function)
    return bool(functions) and all(_is_known(f, how) for f in functions)


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
        ``[B, Nq, H, D]``, and ``None`` for the weights, which are never stored.

    Raises:
        ValueError: for masks of another shape, and for softcaps, sinks or biases, which are not supported.
    """
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None for entmax attention, got a value; use attn_implementation='eager'.")
    _remember(module)
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else bool(is_causal)
    options: dict[str, Any] = {
        "alpha": layer_alpha(module),
        "causal": causal,
        "window": None if sliding_window is None else sliding_window - 1,
        "scale": scaling,
        "dropout_p": dropout,
    }
    recorder = recorder_of(module)
    cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is not None and cu_k is not None:
        longest = kwargs.get("max_length_k")
        longest = int(longest) if isinstance(longest, int) else None
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        return _attention(recorder, query, key, value, options, longest, cross).unsqueeze(0), None
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be a padding mask [B, Nk] for entmax attention, got shape "
            f"{list(attention_mask.shape)}; pass a 2D mask to the model."
        )
    options["key_padding_mask"] = attention_mask
    return _attention(recorder, query, key, value, options, None, cross).transpose(1, 2), None


def _attention(
    recorder: Recorder | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    max_seqlen_k: int | None,
    cross: bool,
) -> Tensor:
    if recorder is None:
        out = entmax_attention(query, key, value, max_seqlen_k=max_seqlen_k, **options)
        return out if isinstance(out, Tensor) else out[0]
    result = entmax_attention(query, key, value, max_seqlen_k=max_seqlen_k, **options, return_stats=True)
    if isinstance(result, Tensor):
        raise TypeError("entmax_attention returned no statistics.")
    recorder.add(query, key, result[1], options, cross)
    return result[0]


def _remember(module: nn.Module) -> None:
    """Store the implementation in the configuration: transformers reads it from checkpoints, but never writes it."""
    config = getattr(module, "config", None)
    if config is not None and not torch.compiler.is_compiling() and MARK not in vars(config):
        setattr(config, MARK, getattr(config, "_attn_implementation", NAME))
