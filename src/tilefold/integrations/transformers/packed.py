"""Stock encoders of transformers on packed tokens: attention, input arguments, and their switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

# Value of ``attn_implementation`` of models that take packed tokens.
PACKED = "tilefold_packed"

# Names of packed inputs in transformers and sentence-transformers. Offsets and the length of the
# longest sequence have a name for queries and one for keys, with the same value in an encoder.
OFFSETS = "cu_seq_lens_q"
OFFSET_NAMES = (OFFSETS, "cu_seq_lens_k")
LONGEST = "max_length_q"
LONGEST_NAMES = (LONGEST, "max_length_k")
TOKEN_NAMES = ("input_ids", "position_ids", "token_type_ids")  # tensors ``[1, T]``

# Allowed difference of packed and padded outputs, relative to the largest value: wide enough for
# bf16, far below the effect of attention to a neighbouring sequence.
TOLERANCE = 0.02
# Qualified names of mask functions for sliding windows, which the attention applies itself.
BIDIRECTIONAL_WINDOWS = (
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)
# Arguments of attention functions that neither packed nor entmax attention can apply.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")
# Lengths of the two sequences of the self-check. The second one grows with a sliding window.
_SHORT_LENGTH = 3
_LONG_LENGTH = 11
_LONGEST_CHECKED = 160
# Positions that a model may reserve, such as those before RoBERTa's first token.
_RESERVED_POSITIONS = 4


def register_packed() -> None:
    """Register ``attn_implementation="tilefold_packed"`` in transformers.

    It runs packed attention on inputs with ``cu_seq_lens_q``, and ``"sdpa"`` on others.
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
        module: the attention module that calls.
        query: ``[B, H, N, D]``; ``[1, H, T, D]`` if the tokens are packed.
        key: as `query`, with H heads or a divisor of H.
        value: as `key`.
        attention_mask: mask of padded inputs; ``None`` for packed ones.
        dropout: probability that a weight is dropped.
        scaling: factor of the scores; ``D ** -0.5`` by default.
        sliding_window: keys at a distance below this are seen; all of them by default.
        **kwargs: ``cu_seq_lens_q``, offsets int32 ``[B + 1]``, if the tokens are packed, and
            ``max_length_q``, the length of the longest sequence. ``is_causal`` by default is that
            of `module`. Others go to the padded attention.

    Returns:
        Output ``[B, N, H, D]`` or ``[1, T, H, D]``, and ``None`` in place of the weights.

    Raises:
        ValueError: for packed inputs with a mask, causal attention or unsupported arguments.
    """
    cu_seqlens: Tensor | None = kwargs.get(OFFSETS)
    if cu_seqlens is None:
        if attention_mask is None and sliding_window is not None:
            attention_mask = _window_mask(query, sliding_window)
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
    _check_packed_call(module, query, attention_mask, kwargs)
    longest = kwargs.get(LONGEST)
    if longest is None:
        longest = cu_seqlens.diff().max()
    n_repeats = query.size(1) // key.size(1)
    if n_repeats > 1:  # grouped-query attention
        key = key.repeat_interleave(n_repeats, dim=1)
        value = value.repeat_interleave(n_repeats, dim=1)
    output = packed_softmax_attention(
        packed_heads(query),
        packed_heads(key),
        packed_heads(value),
        cu_seqlens,
        int(longest),
        scale=scaling,
        window=None if sliding_window is None else sliding_window - 1,
        dropout_p=dropout,
    )
    return output[None], None


def packed_heads(tensor: Tensor) -> Tensor:
    """Return packed heads ``[1, H, T, D]`` as a view ``[T, H, D]``."""
    # ``squeeze``, whose backward is a view, too: that of ``[0]`` copies the gradient into zeros.
    return tensor.squeeze(0).transpose(0, 1)


def _window_mask(query: Tensor, sliding_window: int) -> Tensor | None:
    """Return the mask of a sliding window for padded attention, True for keys that are seen.

    Args:
        query: ``[B, H, N, D]``.
        sliding_window: keys at a distance below this are seen.

    Returns:
        Bool ``[1, 1, N, N]``, or ``None`` if every query sees all keys.
    """
    length = query.size(2)
    if sliding_window >= length:
        return None
    positions = torch.arange(length, device=query.device)
    is_near = (positions[:, None] - positions).abs() < sliding_window
    return is_near[None, None]


def _check_packed_call(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Raise ``ValueError`` for packed inputs that packed attention does not support.

    Args:
        module: the attention module that calls.
        query: packed queries, which must be one row ``[1, H, T, D]``.
        attention_mask: must be ``None``, because packed inputs have no padding.
        kwargs: other arguments of :func:`packed_attention_forward`.
    """
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    if query.size(0) != 1 or attention_mask is not None or is_causal:
        mask = "no mask" if attention_mask is None else "a mask"
        raise ValueError(
            "packed sequences must be one row [1, T] without a mask in an encoder, got "
            f"{query.size(0)} rows, {mask}, causal={bool(is_causal)}; leave attention_mask out.",
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
    """Return the mask that transformers' ``"sdpa"`` attention uses, or ``None`` without padding.

    A sliding window alone needs no mask, because the attention applies it itself.

    Args:
        *args: positional arguments of transformers' mask functions.
        mask_function: which pairs of queries and keys are allowed.
        attention_mask: padding mask ``[B, N]``.
        **kwargs: other arguments of transformers' mask functions.
    """
    functions = joined_mask_functions(mask_function) or [mask_function]
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


def joined_mask_functions(function: Callable[..., object]) -> list[Callable[..., object]]:
    """Return the mask functions of which a mask function is the conjunction.

    transformers' ``and_masks`` makes such a function. It holds the others in its closure.

    Args:
        function: a mask function of transformers.

    Returns:
        The joined functions; an empty list if `function` is no conjunction.
    """
    if not getattr(function, "__qualname__", "").startswith("and_masks"):
        return []
    functions: list[Callable[..., object]] = []
    for cell in getattr(function, "__closure__", None) or ():
        contents = cell.cell_contents
        if isinstance(contents, (tuple, list)):
            functions.extend(contents)
        else:
            functions.append(contents)
    return functions


def padding_position(model: nn.Module) -> int | None:
    """Return the position id of padding tokens, or ``None`` in models without one.

    RoBERTa and models derived from it have one, which equals the id of the padding token. The
    position ids of their other tokens begin after it.

    Args:
        model: a transformers model.
    """
    for module in model.modules():
        position = getattr(module, "padding_idx", None)
        embeddings = getattr(module, "position_embeddings", None)
        if isinstance(position, int) and isinstance(embeddings, nn.Embedding):
            return position
    return None


def position_ids_of(input_ids: Tensor, cu_seqlens: Tensor, padding: int | None = None) -> Tensor:
    """Return position ids of packed tokens within their sequences, int64 ``[T]``.

    Args:
        input_ids: token ids, ``[T]``.
        cu_seqlens: offsets of the sequences, ``[B + 1]``.
        padding: :func:`padding_position` of the model. Positions then begin after it. A token with
            this id has it as its position and is not counted.
    """
    sequences, positions = token_positions(cu_seqlens, input_ids.numel())
    if padding is None:
        return positions
    is_counted = (input_ids != padding).long()
    # Number of counted tokens before each token of the batch, and of all: [T + 1].
    n_counted_before = torch.cat([is_counted.new_zeros(1), is_counted.cumsum(0)])
    sequence_starts = cu_seqlens.long()[sequences]  # of the sequence of each token, [T]
    n_counted_in_sequence = n_counted_before[1:] - n_counted_before[sequence_starts]
    return n_counted_in_sequence * is_counted + padding


def packed_arguments(
    ids: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> dict[str, Any]:
    """Return arguments for the forward of an encoder on packed tokens, by name.

    transformers and sentence-transformers use the same names.

    Args:
        ids: token ids, ``[T]``.
        positions: position ids, ``[T]``.
        cu_seqlens: offsets of the sequences, int32 ``[B + 1]``.
        longest: length of the longest sequence.
    """
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        **dict.fromkeys(OFFSET_NAMES, cu_seqlens),
        **dict.fromkeys(LONGEST_NAMES, longest),
    }


def packed_hidden_states(
    model: Model,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    """Compute the hidden states ``[T, H]`` of packed tokens by a stock encoder.

    The result is differentiable, and nothing waits for the GPU.

    Args:
        model: a transformers encoder that :func:`use_packed` accepted. A model with an LM head
            returns its logits. If ``accelerate`` fused that head, it returns the head's input.
        input_ids: token ids of all sequences, ``[T]``.
        cu_seqlens: offsets of the sequences, int32 ``[B + 1]``.
        max_seqlen: length of the longest sequence.
        position_ids: ``[T]``; by default as the model counts, see :func:`position_ids_of`.
        token_type_ids: ``[T]``; zeros by default.
    """
    check_network(model)
    if position_ids is None:
        position_ids = position_ids_of(input_ids, cu_seqlens, padding_position(model))
    arguments = packed_arguments(input_ids, position_ids, cu_seqlens, max_seqlen)
    if token_type_ids is not None:
        arguments["token_type_ids"] = token_type_ids[None]
    return _output_tensor(model(**arguments)).squeeze(0)


def _output_tensor(output: Any) -> Tensor:
    """Return the logits of a model's output if it has some, else its hidden states."""
    tensor: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return tensor


def use_packed(model: Model, *, check: bool = True) -> str | None:
    """Let a stock encoder take packed tokens, by ``attn_implementation="tilefold_packed"``.

    Only the configuration of this model in memory changes. Padded inputs run as before, by
    transformers' ``"sdpa"``. Checkpoints do not change. A model with
    ``attn_implementation="entmax"`` is not changed: its attention takes packed tokens already.

    Args:
        model: a transformers encoder.
        check: run two short sequences padded and packed, in eval mode, and compare the outputs.
            These are two forward passes at every call.

    Returns:
        ``None`` if the model now takes packed tokens. Otherwise the reason why it does not, and the
        model is unchanged.

    Raises:
        TypeError: if `model` is no module.
    """
    check_network(model)
    if switched_off():
        return f"{SWITCH} is set"
    reason = _unsupported_reason(model)
    if reason is not None:
        return reason
    register_packed()
    previous: str = model.config._attn_implementation
    if previous != "entmax":
        model.set_attn_implementation(PACKED)
        if model.config._attn_implementation != PACKED:
            return f"{type(model).__name__} does not let its attention be chosen"
    if check:
        reason = _mismatch_reason(model)
    if reason is not None and previous != "entmax":
        model.set_attn_implementation(previous)
    return reason


def stop_packed(model: Model) -> None:
    """Undo :func:`use_packed`, if it changed the model."""
    check_network(model)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED:
        model.set_attn_implementation("sdpa")


def _unsupported_reason(model: Model) -> str | None:
    """Return the reason why a model cannot take packed tokens, or ``None`` without one.

    Only its class, configuration and parameters are examined. Nothing runs.

    Args:
        model: the model.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is no transformers model"
    if not getattr(model, "is_backend_compatible", lambda: False)():
        return f"the attention of {name} does not go through transformers' AttentionInterface"
    if _is_decoder(model):
        return f"{name} is no encoder"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", PACKED, "entmax"):
        return (
            f"attn_implementation={implementation!r} was chosen, and only 'sdpa' and 'entmax' give "
            "way to packed attention"
        )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return f"the parameters of {name} are sharded already; call accelerate(model) first"
    return None


def _is_decoder(model: Model) -> bool:
    """Whether any part of a transformers model decodes or has causal attention."""
    config = model.config
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return True
    if type(model).__name__.endswith("ForCausalLM"):
        return True
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _mismatch_reason(model: Model) -> str | None:
    """Compare packed and padded outputs of two short sequences, in two forward passes.

    Args:
        model: a model whose attention takes packed tokens.

    Returns:
        A phrase that says by how much they disagree, or why the model could not run; ``None`` if
        they agree.
    """
    with in_eval_mode(model), torch.no_grad():
        try:
            ids, mask = _short_sequences(model)
            is_token = mask.bool()
            lengths = mask.sum(1)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            expected = _output_tensor(model(input_ids=ids, attention_mask=mask))[is_token]
            packed = packed_hidden_states(model, ids[is_token], cu_seqlens, int(lengths.max()))
        except Exception as error:
            return f"two short sequences could not be run ({type(error).__name__}: {error})"
    if packed.shape != expected.shape:
        return (
            f"packed tokens gave {list(packed.shape)} numbers, padded ones {list(expected.shape)}"
        )
    difference = largest_difference(packed, expected)
    scale = max(1e-6, float(expected.abs().max()))  # not 0, for outputs of zeros
    if not difference <= TOLERANCE * scale:  # a NaN is no small difference
        return (
            f"packed and padded tokens disagree by {difference:.3g} of {scale:.3g} on two short "
            "sequences"
        )
    return None


def _short_sequences(model: Model) -> tuple[Tensor, Tensor]:
    """Return token ids of two sequences and their padding mask, int64 ``[2, S]`` each.

    The longer one exceeds the model's sliding window if that is short.

    Args:
        model: a transformers encoder, whose configuration limits lengths and ids.
    """
    config = model.config
    device = next(model.parameters()).device
    longest = _LONG_LENGTH
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int):
        # A few tokens lie outside of the window then.
        longest = max(_LONG_LENGTH, min(_LONGEST_CHECKED, window + 8))
    n_positions = getattr(config, "max_position_embeddings", longest)
    longest = min(longest, n_positions - _RESERVED_POSITIONS)
    lengths = torch.tensor([[_SHORT_LENGTH], [longest]], device=device)
    mask = (torch.arange(longest, device=device) < lengths).long()
    padding_id = getattr(config, "pad_token_id", None)
    if padding_id is None:
        padding_id = 0
    # Ids from 3 on, after the first special tokens. Steps of 7 modulo the prime 89 visit all 89 ids
    # before the first one recurs. A smaller vocabulary has fewer ids, of which 4 are left out: 0 to
    # 2, and the last one, which may replace the padding's.
    n_ids = min(config.vocab_size - 4, 89)
    ids = torch.arange(2 * longest, device=device).view(2, longest) * 7 % n_ids + 3
    ids = torch.where(ids == padding_id, ids + 1, ids)
    return torch.where(mask == 0, padding_id, ids), mask
