"""Transformers models on packed tokens: attention, input arguments, and the switch.

The models are encoders, such as BERT, and decoders, such as Llama.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    sdpa_mask,
)

from tilefold._internal.typing import Model
from tilefold.integrations.transformers.networks import (
    check_network,
    in_eval_mode,
    largest_difference,
)
from tilefold.ops.implementations import SWITCH, switched_off
from tilefold.ops.packed_attention import packed_softmax_attention, token_positions

# The ``attn_implementation`` of models that accept packed tokens.
PACKED = "tilefold_packed"

# Names of packed inputs in transformers and sentence-transformers. The offsets and the length of
# the longest sequence have two names, for queries and for keys, with one value in self-attention.
OFFSETS = "cu_seq_lens_q"
OFFSET_NAMES = (OFFSETS, "cu_seq_lens_k")
LONGEST = "max_length_q"
LONGEST_NAMES = (LONGEST, "max_length_k")
TOKEN_NAMES = ("input_ids", "position_ids", "token_type_ids")  # tensors ``[1, T]``

# The allowed difference of packed and padded outputs, relative to the largest value. It is wide
# enough for bf16, but far below the effect of attention to a neighbouring sequence.
TOLERANCE = 0.02
# The largest difference of packed and padded outputs in 16 bits that may come from rounding,
# relative to their norm. In bf16, the outputs of 12 layers of random weights differ by 0.05 to
# 0.11, and by 0.5 if a token of another text is read.
MAX_ROUNDING_DIFFERENCE = 0.25
# Qualified names of mask functions for sliding windows, which the attention applies itself.
BIDIRECTIONAL_WINDOWS = (
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)
# Arguments of attention functions that neither packed nor entmax attention can apply.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")
# Kinds of layers, in the ``layer_types`` of a configuration, that run on packed tokens. Others mix
# tokens in other ways than by attention, or attend within chunks.
_SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Lengths of the two sequences of the self-check. The second one is longer than a sliding window by
# a few tokens, unless it would exceed the maximum.
_SHORT_LENGTH = 3
_LONG_LENGTH = 11
_MAX_LENGTH = 160
_TOKENS_OUTSIDE_WINDOW = 8
# Positions that a model may reserve, such as those before RoBERTa's first token.
_RESERVED_POSITIONS = 4
# Ids below this often belong to special tokens, such as padding.
_FIRST_ID = 3


class ExpectedReason(str):
    """A reason to stay padded that a user expects, so that no warning is needed.

    It is the user's choice, or the model has an encoder and a decoder.
    """


class FailedCheck(str):
    """A reason to stay padded that only a comparison of outputs shows.

    Other reasons follow from the class and the settings of a model.
    """


def register_packed() -> None:
    """Register ``attn_implementation="tilefold_packed"`` in transformers.

    It runs packed attention on inputs with ``cu_seq_lens_q``, and ``"sdpa"`` on padded inputs.
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
    """Compute softmax attention for transformers' attention interface.

    Args:
        module: the calling attention module.
        query: the queries ``[B, H, N, D]``; ``[1, H, T, D]`` if the tokens are packed.
        key: the keys in the same layout; their number of heads is H or a divisor of H.
        value: the values, with the shape of the keys.
        attention_mask: the mask of padded inputs; for packed inputs None, or for a decoder the mask
            ``[1, 1, 1, 1]`` of :func:`decoder_arguments`, which is not used.
        dropout: the probability that a weight is dropped.
        scaling: the factor of the scores; ``D ** -0.5`` by default.
        sliding_window: the number of keys that a query attends to in one direction, its own key
            included; all keys by default.
        **kwargs: for packed tokens, the offsets ``cu_seq_lens_q``, int32 ``[B + 1]``, and the
            length of the longest sequence, ``max_length_q``. ``is_causal`` is by default that of
            ``module``. All other arguments are passed to the padded attention.

    Returns:
        The output ``[B, N, H, D]`` or ``[1, T, H, D]``, and None in place of the weights.

    Raises:
        ValueError: if packed inputs have a mask or unsupported arguments.
    """
    cu_seqlens: Tensor | None = kwargs.get(OFFSETS)
    is_causal = _is_causal_call(module, kwargs.get("is_causal"))
    window = largest_distance(module, sliding_window, is_causal)
    if cu_seqlens is None:
        if attention_mask is None and window is not None:
            attention_mask = _window_mask(query, window, is_causal)
        padded_output: Tensor
        padded_output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return padded_output, None
    _check_packed_call(query, attention_mask, kwargs)
    longest = kwargs.get(LONGEST)
    if longest is None:
        longest = cu_seqlens.diff().max()
    output = packed_softmax_attention(
        packed_heads(query),
        packed_heads(key),
        packed_heads(value),
        cu_seqlens,
        int(longest),
        scale=scaling,
        window=window,
        causal=is_causal,
        dropout_p=dropout,
    )
    return output[None], None


def _is_causal_call(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether queries of an attention module see no later keys, by the rule of ``"sdpa"``.

    Args:
        module: the calling attention module.
        is_causal: the argument of the call; None for the attribute of the module.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return bool(is_causal)


def largest_distance(
    module: nn.Module,
    sliding_window: int | None,
    is_causal: bool,
) -> int | None:
    """Return the largest distance of a key that a query attends to, or None for no limit.

    The window of an attention module is the number of keys that a query attends to in one
    direction, its own key included: one more than the distance. Decoders that
    ``config.is_causal = False`` makes bidirectional are an exception: the masks that transformers
    creates for them include a key at the distance of the window.

    Args:
        module: the calling attention module.
        sliding_window: the window of the module; None for no limit.
        is_causal: whether a query attends to no later keys.
    """
    if sliding_window is None:
        return None
    is_bidirectional_decoder = not is_causal and getattr(module, "is_causal", False)
    return sliding_window if is_bidirectional_decoder else sliding_window - 1


def packed_heads(tensor: Tensor) -> Tensor:
    """Return packed heads ``[1, H, T, D]`` as a view ``[T, H, D]``."""
    # ``squeeze`` also has a view as its backward. The backward of ``[0]`` copies the gradient.
    return tensor.squeeze(0).transpose(0, 1)


def _window_mask(query: Tensor, window: int, is_causal: bool) -> Tensor | None:
    """Return the mask of a sliding window for padded attention, True for keys within it.

    Args:
        query: the queries ``[B, H, N, D]``.
        window: the largest distance of a key that a query attends to.
        is_causal: whether a query attends to no later keys.

    Returns:
        The mask, bool ``[1, 1, N, N]``, or None if the window is no limit.
    """
    length = query.size(2)
    if window >= length - 1:
        return None
    positions = torch.arange(length, device=query.device)
    distances = positions[:, None] - positions  # of a query to an earlier key
    is_visible = distances.abs() <= window
    if is_causal:
        is_visible &= distances >= 0
    return is_visible[None, None]


def _check_packed_call(
    query: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Raise ``ValueError`` for packed inputs that packed attention does not support.

    Args:
        query: the packed queries ``[1, H, T, D]``.
        attention_mask: must be None or have one element, because packed inputs have no padding.
        kwargs: the other arguments of :func:`packed_attention_forward`.
    """
    if query.size(0) != 1:
        raise ValueError(
            f"packed sequences must be one row [1, T], got {query.size(0)} rows; concatenate the "
            "sequences.",
        )
    if attention_mask is not None and attention_mask.shape != _PLACEHOLDER_SHAPE:
        raise ValueError(
            "attention_mask must be None for packed sequences, which have no padding, got a mask; "
            "leave attention_mask out, and for a decoder pass the arguments of "
            "tilefold.integrations.transformers.packed.decoder_arguments.",
        )
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None for packed attention, got a value; use padded inputs.",
            )


def packed_mask(
    *args: Any,
    mask_function: Callable[..., object] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the attention mask of ``attn_implementation="tilefold_packed"`` for transformers.

    Without padding, attention to all keys or to a sliding window needs no tensor: packed attention
    applies the window itself. Otherwise this is the mask of ``"sdpa"``. Packed tokens of a decoder
    need no mask either, see :func:`decoder_arguments`.

    Args:
        *args: the positional arguments of transformers' mask functions.
        mask_function: decides which pairs of a query and a key are allowed.
        attention_mask: the padding mask ``[B, N]``; None without padding.
        **kwargs: the other arguments of transformers' mask functions.
    """
    functions = combined_mask_functions(mask_function)
    if attention_mask is None and all(_needs_no_mask(function) for function in functions):
        return None
    mask: Tensor | None = sdpa_mask(
        *args,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return mask


def _needs_no_mask(mask_function: Callable[..., object]) -> bool:
    """Whether a mask function allows all keys, or all keys within a sliding window."""
    if mask_function is bidirectional_mask_function:
        return True
    return getattr(mask_function, "__qualname__", "") in BIDIRECTIONAL_WINDOWS


def combined_mask_functions(function: Callable[..., object]) -> list[Callable[..., object]]:
    """Return the mask functions that transformers' ``and_masks`` has combined into one.

    Args:
        function: a mask function of transformers.

    Returns:
        The combined functions; only ``function`` itself if it was not combined.
    """
    if not getattr(function, "__qualname__", "").startswith("and_masks"):
        return [function]
    functions: list[Callable[..., object]] = []
    # ``and_masks`` returns a closure over the functions.
    for cell in getattr(function, "__closure__", None) or ():
        contents = cell.cell_contents
        if isinstance(contents, (tuple, list)):
            functions.extend(contents)
        else:
            functions.append(contents)
    return functions


def padding_position(model: nn.Module) -> int | None:
    """Return the position id of padding tokens in models like RoBERTa, or None in other models.

    In such a model, it equals the token id of padding, and the position ids of other tokens begin
    with the next number.

    Args:
        model: a transformers model.
    """
    for module in model.modules():
        position = getattr(module, "padding_idx", None)
        embeddings = getattr(module, "position_embeddings", None)
        if isinstance(position, int) and isinstance(embeddings, nn.Embedding):
            return position
    return None


def position_ids_of(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    padding_position_id: int | None = None,
) -> Tensor:
    """Return position ids of packed tokens within their sequences, int64 ``[T]``.

    Args:
        input_ids: token ids, ``[T]``.
        cu_seqlens: offsets of the sequences, ``[B + 1]``.
        padding_position_id: the token id and the position id of padding, in models like RoBERTa.
            Padding is not counted, and the first other token has the next position. None in other
            models, which count all tokens from 0 on.
    """
    sequences, positions = token_positions(cu_seqlens, input_ids.numel())
    if padding_position_id is None:
        return positions
    is_counted = (input_ids != padding_position_id).long()
    # Counted tokens before each token of the batch, and in total: [T + 1].
    n_counted_before = torch.cat([is_counted.new_zeros(1), is_counted.cumsum(0)])
    sequence_starts = cu_seqlens.long()[sequences]  # [T]
    n_counted_in_sequence = n_counted_before[1:] - n_counted_before[sequence_starts]
    return n_counted_in_sequence * is_counted + padding_position_id


def packed_arguments(
    ids: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> dict[str, Any]:
    """Return the arguments of a model's forward for packed tokens, by name.

    transformers and sentence-transformers use the same names. In self-attention, queries and keys
    have the same offsets and the same longest sequence. Decoders need the arguments of
    :func:`decoder_arguments`, too.

    Args:
        ids: token ids, ``[T]``.
        positions: position ids, ``[T]``.
        cu_seqlens: offsets of the sequences, int32 ``[B + 1]``.
        max_seqlen: the length of the longest sequence.
    """
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        **dict.fromkeys(OFFSET_NAMES, cu_seqlens),
        **dict.fromkeys(LONGEST_NAMES, max_seqlen),
    }


# Shape of the mask that a decoder gets with packed tokens.
_PLACEHOLDER_SHAPE = torch.Size([1, 1, 1, 1])
# Whether a model gets such a mask; found out by its modules.
_takes_placeholder: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def decoder_arguments(model: Model, input_ids: Tensor) -> dict[str, Any]:
    """Return the arguments that a decoder's forward needs for packed tokens; none for an encoder.

    Packed attention needs no mask. But without one, transformers would compare positions, for which
    the CPU waits for the GPU, and create a mask ``[1, 1, T, T]``. It passes on a mask of four
    dimensions as it is. So a decoder gets one of a single element, which is not used. Keys and
    values are not cached for later calls.

    Args:
        model: a transformers model.
        input_ids: the packed tokens, on the device of the model.
    """
    if model not in _takes_placeholder:
        _takes_placeholder[model] = _creates_causal_masks(model)
    if not _takes_placeholder[model]:
        return {}
    placeholder = input_ids.new_ones(_PLACEHOLDER_SHAPE, dtype=torch.bool)
    return {"attention_mask": placeholder, "use_cache": False}


def _creates_causal_masks(model: Model) -> bool:
    """Return whether a model creates the masks of a decoder in its forward.

    Decoder masks may also be bidirectional: those of Gemma 3 as an encoder are.

    Args:
        model: a transformers model.
    """
    if getattr(model.config, "use_bidirectional_attention", False):
        return True
    return any(getattr(module, "is_causal", False) for module in model.modules())


def packed_hidden_states(
    model: Model,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    """Run a transformers model on packed tokens and return its hidden states ``[T, D]``.

    A model with an LM head returns its logits ``[T, V]`` instead, unless ``accelerate`` has fused
    the head. The result is differentiable. The CPU does not wait for the GPU.

    Args:
        model: a transformers model that :func:`use_packed` has accepted.
        input_ids: the token ids of all sequences, ``[T]``.
        cu_seqlens: the offsets of the sequences, int32 ``[B + 1]``.
        max_seqlen: the length of the longest sequence.
        position_ids: the position ids ``[T]``; by default those of :func:`position_ids_of`.
        token_type_ids: the token types ``[T]``; zeros by default.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from tilefold.integrations.transformers import use_packed
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(config).eval()
        >>> use_packed(model)
        >>> input_ids = torch.tensor([1, 2, 3, 4, 5])  # a text of 3 tokens, and one of 2
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> packed_hidden_states(model, input_ids, cu_seqlens, max_seqlen=3).shape
        torch.Size([5, 32])
    """
    check_network(model)
    if position_ids is None:
        position_ids = position_ids_of(input_ids, cu_seqlens, padding_position(model))
    arguments = packed_arguments(input_ids, position_ids, cu_seqlens, max_seqlen)
    arguments.update(decoder_arguments(model, input_ids))
    if token_type_ids is not None:
        arguments["token_type_ids"] = token_type_ids[None]
    return _logits_or_hidden_states(model(**arguments)).squeeze(0)


def _logits_or_hidden_states(output: Any) -> Tensor:
    """Return the logits of a model's output if it has any, otherwise its hidden states."""
    tensor: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return tensor


def use_packed(model: Model, *, check: bool = True) -> str | None:
    """Make a transformers model accept packed tokens.

    This sets ``attn_implementation="tilefold_packed"`` in the model's configuration in memory.
    Checkpoints do not change. Padded inputs still run through transformers' ``"sdpa"``. A model
    with ``attn_implementation="entmax"`` is not changed, because its attention accepts packed
    tokens already.

    Decoders keep their attention: causal, or bidirectional by ``config.is_causal = False``. Those
    with attention that packed tokens do not have, such as soft caps, sinks and chunks, are not
    changed.

    Args:
        model: a transformers encoder or decoder.
        check: whether to compare the outputs of two short sequences, padded and packed. Every call
            then runs two forward passes in eval mode, and two more of a copy in fp32 if rounding to
            16 bits may be why they differ.

    Returns:
        None if the model now accepts packed tokens. Otherwise the reason why it does not; the model
        is unchanged then.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    check_network(model)
    if switched_off():
        return f"{SWITCH} is set"
    reason = _reason_against_packing(model)
    if reason is not None:
        return reason
    register_packed()
    previous: str = model.config._attn_implementation
    if previous == "entmax":
        return _compare_packed_and_padded(model) if check else None
    model.set_attn_implementation(PACKED)
    if model.config._attn_implementation != PACKED:
        return f"{type(model).__name__} does not support choosing an attention implementation"
    reason = _compare_packed_and_padded(model) if check else None
    if reason is not None:
        model.set_attn_implementation(previous)
    return reason


def stop_packed(model: Model) -> None:
    """Undo :func:`use_packed`, if it has changed the model."""
    check_network(model)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED:
        model.set_attn_implementation(_default_attention(model))


def _default_attention(model: Model) -> str:
    """Return the attention that transformers chooses for a model by default.

    Packed attention replaces only this one. Another one was chosen by the user.

    Args:
        model: a transformers model.

    Returns:
        A name of transformers' attention interface: ``"sdpa"`` or ``"eager"``.
    """
    supports_sdpa = getattr(type(model), "_supports_sdpa", True)  # Gemma 2 does not
    return "sdpa" if supports_sdpa else "eager"


def _reason_against_packing(model: Model) -> str | None:
    """Return why a model cannot accept packed tokens, or None if it can.

    Only its class, configuration and parameters are examined. Nothing runs.

    Args:
        model: the model.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is not a transformers model"
    if getattr(config, "is_encoder_decoder", False):
        return ExpectedReason(f"{name} has an encoder and a decoder")
    if not getattr(model, "is_backend_compatible", lambda: False)():
        return f"the attention of {name} does not use transformers' AttentionInterface"
    replaceable = _default_attention(model)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (replaceable, PACKED, "entmax"):
        return ExpectedReason(
            f"attn_implementation={implementation!r} was chosen, and only {replaceable!r} and "
            "'entmax' can be replaced by packed attention",
        )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return f"the parameters of {name} are sharded already; call accelerate(model) first"
    feature = _find_unsupported_feature(model)
    return None if feature is None else f"{name} has {feature}, which packed attention lacks"


def _find_unsupported_feature(model: Model) -> str | None:
    """Return the name of a feature that packed attention lacks for a model, or None.

    Args:
        model: a transformers model.
    """
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ())
    other_types = sorted(layer_types - _SUPPORTED_LAYER_TYPES)
    if other_types:
        return f"layers of type {', '.join(other_types)}"
    if getattr(config, "alibi", False):
        return "attention with linear biases (alibi=True)"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention (add_cross_attention=True)"
    for module in model.modules():
        softcap = getattr(module, "attn_logit_softcapping", None)
        if softcap is not None:
            return f"soft-capped attention (attn_logit_softcapping={softcap})"
        if isinstance(getattr(module, "sinks", None), Tensor):
            return "attention sinks"
    return None


def _compare_packed_and_padded(model: Model) -> FailedCheck | None:
    """Compare packed and padded outputs of two sequences.

    Args:
        model: a model whose attention accepts packed tokens.

    Returns:
        By how much the outputs differ, or why the model could not run; None if they agree.
    """
    try:
        packed, padded = _run_both_ways(model)
        if packed.shape != padded.shape:
            return FailedCheck(
                f"packed tokens gave shape {list(packed.shape)}, padded ones {list(padded.shape)}",
            )
        if _agree(packed, padded):
            return None
        if may_differ_by_rounding(model, packed, padded):
            # Rounding grows with the number of layers, so no fixed tolerance can tell it from a
            # bug. A copy in fp32 decides.
            fp32_packed, fp32_padded = _run_both_ways(copy.deepcopy(model).float())
            if _agree(fp32_packed, fp32_padded):
                return None
    except Exception as error:
        return FailedCheck(
            f"two short sequences could not be run ({type(error).__name__}: {error})",
        )
    difference = largest_difference(packed, padded)
    scale = float(padded.abs().max())
    return FailedCheck(
        f"packed and padded tokens disagree by {difference:.3g} (with values up to "
        f"{scale:.3g}) on two short sequences",
    )


def _agree(packed: Tensor, padded: Tensor) -> bool:
    """Whether packed and padded outputs are equal up to the tolerance; False for NaN."""
    scale = max(1e-6, float(padded.abs().max()))  # avoids 0 if all outputs are 0
    return largest_difference(packed, padded) <= TOLERANCE * scale


def may_differ_by_rounding(module: nn.Module, packed: Tensor, padded: Tensor) -> bool:
    """Whether rounding to 16 bits may be why packed and padded outputs differ.

    Args:
        module: the module that computes them, whose parameters have its dtype.
        packed: the outputs of packed tokens.
        padded: the outputs of the same tokens with padding.
    """
    is_16_bit = next(module.parameters()).dtype.itemsize == 2
    packed, padded = packed.float(), padded.float()
    relative_difference = float((packed - padded).norm() / padded.norm().clamp(min=1e-6))
    return is_16_bit and relative_difference <= MAX_ROUNDING_DIFFERENCE


def _run_both_ways(model: Model) -> tuple[Tensor, Tensor]:
    """Return the outputs of two short sequences, packed and padded, without padding ``[T, D]``.

    Args:
        model: a model whose attention accepts packed tokens. It runs twice in eval mode.
    """
    with in_eval_mode(model), torch.no_grad():
        ids, mask = _make_probe_sequences(model)
        is_token = mask.bool()
        lengths = mask.sum(1)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        output = model(input_ids=ids, attention_mask=mask)
        padded = _logits_or_hidden_states(output)[is_token]
        packed = packed_hidden_states(model, ids[is_token], cu_seqlens, int(lengths.max()))
    return packed, padded


def _make_probe_sequences(model: Model) -> tuple[Tensor, Tensor]:
    """Return token ids of two random sequences and their padding mask, int64 ``[2, S]`` each.

    Args:
        model: a transformers model, whose configuration limits lengths and ids.
    """
    config = model.config
    device = next(model.parameters()).device
    longest = _choose_probe_length(config)
    lengths = torch.tensor([[_SHORT_LENGTH], [longest]], device=device)
    mask = (torch.arange(longest, device=device) < lengths).long()
    padding_id = getattr(config, "pad_token_id", None)
    if padding_id is None:
        padding_id = 0
    last_id = config.vocab_size - 1
    generator = torch.Generator().manual_seed(0)
    # The last id is not drawn, so that every id has a successor, which replaces the padding's.
    ids = torch.randint(_FIRST_ID, last_id, (2, longest), generator=generator).to(device)
    ids = torch.where(ids == padding_id, ids + 1, ids)
    return torch.where(mask == 0, padding_id, ids), mask


def _choose_probe_length(config: Any) -> int:
    """Return the length of the longer probe, which exceeds a short sliding window.

    Args:
        config: the configuration of a transformers model.
    """
    length = _LONG_LENGTH
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int):
        length = max(length, min(_MAX_LENGTH, window + _TOKENS_OUTSIDE_WINDOW))
    n_positions: int = getattr(config, "max_position_embeddings", length)
    return min(length, n_positions - _RESERVED_POSITIONS)
