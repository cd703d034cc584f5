"""Encoders of transformers on packed tokens: attention, input arguments, and the switch."""

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

# The ``attn_implementation`` of models that accept packed tokens.
PACKED = "tilefold_packed"

# Names of packed inputs in transformers and sentence-transformers. The offsets and the length of
# the longest sequence have two names, for queries and for keys, with one value in an encoder.
OFFSETS = "cu_seq_lens_q"
OFFSET_NAMES = (OFFSETS, "cu_seq_lens_k")
LONGEST = "max_length_q"
LONGEST_NAMES = (LONGEST, "max_length_k")
TOKEN_NAMES = ("input_ids", "position_ids", "token_type_ids")  # tensors ``[1, T]``

# The allowed difference of packed and padded outputs, relative to the largest value. It is wide
# enough for bf16, but far below the effect of attention to a neighbouring sequence.
TOLERANCE = 0.02
# Qualified names of mask functions for sliding windows, which the attention applies itself.
BIDIRECTIONAL_WINDOWS = (
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)
# Arguments of attention functions that neither packed nor entmax attention can apply.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")
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

    It is the user's choice, or the model is not an encoder.
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
        attention_mask: the mask of padded inputs; None for packed inputs.
        dropout: the probability that a weight is dropped.
        scaling: the factor of the scores; ``D ** -0.5`` by default.
        sliding_window: a query sees the keys at a distance below this; all keys by default.
        **kwargs: for packed tokens, the offsets ``cu_seq_lens_q``, int32 ``[B + 1]``, and the
            length of the longest sequence, ``max_length_q``. ``is_causal`` is by default that of
            ``module``. All other arguments are passed to the padded attention.

    Returns:
        The output ``[B, N, H, D]`` or ``[1, T, H, D]``, and None in place of the weights.

    Raises:
        ValueError: if packed inputs have a mask, causal attention or unsupported arguments.
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
    # ``squeeze`` also has a view as its backward. The backward of ``[0]`` copies the gradient.
    return tensor.squeeze(0).transpose(0, 1)


def _window_mask(query: Tensor, sliding_window: int) -> Tensor | None:
    """Return the mask of a sliding window for padded attention, True for visible keys.

    Args:
        query: the queries ``[B, H, N, D]``.
        sliding_window: a query sees the keys at a distance below this.

    Returns:
        The mask, bool ``[1, 1, N, N]``, or None if every query sees all keys.
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
        module: the calling attention module.
        query: the packed queries ``[1, H, T, D]``.
        attention_mask: must be None, because packed inputs have no padding.
        kwargs: the other arguments of :func:`packed_attention_forward`.
    """
    if query.size(0) != 1:
        raise ValueError(
            f"packed sequences must be one row [1, T], got {query.size(0)} rows; concatenate the "
            "sequences.",
        )
    if attention_mask is not None:
        raise ValueError(
            "attention_mask must be None for packed sequences, which have no padding, got a mask; "
            "leave attention_mask out.",
        )
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    if is_causal:
        raise ValueError(
            "is_causal must be False for packed sequences, got True; use an encoder, or padded "
            "inputs.",
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
    applies the window itself. Otherwise this is the mask of ``"sdpa"``.

    Args:
        *args: the positional arguments of transformers' mask functions.
        mask_function: decides which pairs of a query and a key are allowed.
        attention_mask: the padding mask ``[B, N]``; None without padding.
        **kwargs: the other arguments of transformers' mask functions.
    """
    functions = joined_mask_functions(mask_function)
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

    It equals the id of the padding token. The position ids of other tokens begin after it.

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
        padding: :func:`padding_position` of the model. Padding tokens have this id and this
            position, and are not counted. The first other token has the next position.
    """
    sequences, positions = token_positions(cu_seqlens, input_ids.numel())
    if padding is None:
        return positions
    is_counted = (input_ids != padding).long()
    # Counted tokens before each token of the batch, and in total: [T + 1].
    n_counted_before = torch.cat([is_counted.new_zeros(1), is_counted.cumsum(0)])
    sequence_starts = cu_seqlens.long()[sequences]  # [T]
    n_counted_in_sequence = n_counted_before[1:] - n_counted_before[sequence_starts]
    return n_counted_in_sequence * is_counted + padding


def packed_arguments(
    ids: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> dict[str, Any]:
    """Return the arguments of an encoder's forward for packed tokens, by name.

    transformers and sentence-transformers use the same names. Queries and keys have the same
    offsets and the same longest sequence.

    Args:
        ids: token ids, ``[T]``.
        positions: position ids, ``[T]``.
        cu_seqlens: offsets of the sequences, int32 ``[B + 1]``.
        longest: the length of the longest sequence.
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
    """Run a transformers encoder on packed tokens and return its hidden states ``[T, D]``.

    A model with an LM head returns its logits ``[T, V]`` instead, unless ``accelerate`` has fused
    the head. The result is differentiable. The CPU does not wait for the GPU.

    Args:
        model: a transformers encoder that :func:`use_packed` has accepted.
        input_ids: the token ids of all sequences, ``[T]``.
        cu_seqlens: the offsets of the sequences, int32 ``[B + 1]``.
        max_seqlen: the length of the longest sequence.
        position_ids: the position ids ``[T]``; by default those of :func:`position_ids_of`.
        token_type_ids: the token types ``[T]``; zeros by default.
    """
    check_network(model)
    if position_ids is None:
        position_ids = position_ids_of(input_ids, cu_seqlens, padding_position(model))
    arguments = packed_arguments(input_ids, position_ids, cu_seqlens, max_seqlen)
    if token_type_ids is not None:
        arguments["token_type_ids"] = token_type_ids[None]
    return _logits_or_hidden_states(model(**arguments)).squeeze(0)


def _logits_or_hidden_states(output: Any) -> Tensor:
    """Return the logits of a model's output if it has any, otherwise its hidden states."""
    tensor: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return tensor


def use_packed(model: Model, *, check: bool = True) -> str | None:
    """Make a transformers encoder accept packed tokens.

    This sets ``attn_implementation="tilefold_packed"`` in the model's configuration in memory.
    Checkpoints do not change. Padded inputs still run through transformers' ``"sdpa"``. A model
    with ``attn_implementation="entmax"`` is not changed, because its attention accepts packed
    tokens already.

    Args:
        model: a transformers encoder.
        check: whether to compare the outputs of two short sequences, padded and packed. Every call
            then runs two forward passes in eval mode.

    Returns:
        None if the model now accepts packed tokens. Otherwise the reason why it does not; the model
        is unchanged then.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    check_network(model)
    if switched_off():
        return f"{SWITCH} is set"
    reason = _unsupported_reason(model)
    if reason is not None:
        return reason
    register_packed()
    previous: str = model.config._attn_implementation
    if previous == "entmax":
        return _mismatch_reason(model) if check else None
    model.set_attn_implementation(PACKED)
    if model.config._attn_implementation != PACKED:
        return f"{type(model).__name__} does not support choosing an attention implementation"
    reason = _mismatch_reason(model) if check else None
    if reason is not None:
        model.set_attn_implementation(previous)
    return reason


def stop_packed(model: Model) -> None:
    """Undo :func:`use_packed`, if it has changed the model."""
    check_network(model)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED:
        model.set_attn_implementation("sdpa")


def _unsupported_reason(model: Model) -> str | None:
    """Return why a model cannot accept packed tokens, or None if it can.

    Only its class, configuration and parameters are examined. Nothing runs.

    Args:
        model: the model.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is not a transformers model"
    if not getattr(model, "is_backend_compatible", lambda: False)():
        return f"the attention of {name} does not use transformers' AttentionInterface"
    if _is_decoder(model):
        return ExpectedReason(f"{name} is not an encoder")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", PACKED, "entmax"):
        return ExpectedReason(
            f"attn_implementation={implementation!r} was chosen, and only 'sdpa' and 'entmax' can "
            "be replaced by packed attention",
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


def _mismatch_reason(model: Model) -> FailedCheck | None:
    """Compare packed and padded outputs of two sequences, in two forward passes.

    Args:
        model: a model whose attention accepts packed tokens.

    Returns:
        By how much the outputs differ, or why the model could not run; None if they agree.
    """
    with in_eval_mode(model), torch.no_grad():
        try:
            ids, mask = _probe_sequences(model)
            is_token = mask.bool()
            lengths = mask.sum(1)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            output = model(input_ids=ids, attention_mask=mask)
            expected = _logits_or_hidden_states(output)[is_token]
            packed = packed_hidden_states(model, ids[is_token], cu_seqlens, int(lengths.max()))
        except Exception as error:
            return FailedCheck(
                f"two short sequences could not be run ({type(error).__name__}: {error})",
            )
    if packed.shape != expected.shape:
        return FailedCheck(
            f"packed tokens gave shape {list(packed.shape)}, padded ones {list(expected.shape)}",
        )
    difference = largest_difference(packed, expected)
    scale = max(1e-6, float(expected.abs().max()))  # avoids 0 if all outputs are 0
    if not difference <= TOLERANCE * scale:  # also catches NaN
        return FailedCheck(
            f"packed and padded tokens disagree by {difference:.3g} (with values up to "
            f"{scale:.3g}) on two short sequences",
        )
    return None


def _probe_sequences(model: Model) -> tuple[Tensor, Tensor]:
    """Return token ids of two random sequences and their padding mask, int64 ``[2, S]`` each.

    Args:
        model: a transformers encoder, whose configuration limits lengths and ids.
    """
    config = model.config
    device = next(model.parameters()).device
    longest = _probe_length(config)
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


def _probe_length(config: Any) -> int:
    """Return the length of the longer probe, which exceeds a short sliding window.

    Args:
        config: the configuration of a transformers encoder.
    """
    length = _LONG_LENGTH
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int):
        length = max(length, min(_MAX_LENGTH, window + _TOKENS_OUTSIDE_WINDOW))
    n_positions: int = getattr(config, "max_position_embeddings", length)
    return min(length, n_positions - _RESERVED_POSITIONS)
