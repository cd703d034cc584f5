"""Stock encoders of transformers on packed tokens: their attention, whether they compute the same;
trainers of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from tilefold._internal.arguments import check_instance
from tilefold._internal.typing import Model
from tilefold.ops.implementations import SWITCH, switched_off
from tilefold.ops.packed_attention import packed_softmax_attention, token_positions

PACKED = "tilefold_packed"
TOLERANCE = 0.02  # of the largest value: wide enough for bf16, far below attention to the neighbouring sequence
BIDIRECTIONAL_WINDOWS = (
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_mask_function.<locals>.inner_mask",
)


def register_packed() -> None:
    """Make ``attn_implementation="tilefold_packed"`` known: packed attention given
    ``cu_seq_lens_q``, else ``sdpa``.
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
    """Attention of ``[1, H, T, D]`` with ``cu_seq_lens_q`` and ``max_length_q``, else padded, to
    ``[B, N, H, D]``.
    """
    cu_seqlens: Tensor | None = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        mask = attention_mask
        if mask is None and sliding_window is not None and sliding_window < query.size(2):
            places = torch.arange(query.size(2), device=query.device)
            mask = ((places[:, None] - places).abs() < sliding_window)[None, None]
        padded: Tensor
        padded, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return padded, None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    if query.size(0) != 1 or attention_mask is not None or causal:
        masked = f"{'no' if attention_mask is None else 'a'} mask, causal={bool(causal)}; leave attention_mask out."
        expected = "one row [1, T] without a mask in an encoder"
        raise ValueError(f"packed sequences must be {expected}, got {query.size(0)} rows, {masked}")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None for packed attention, got a value; use padded inputs.",
            )
    window = None if sliding_window is None else sliding_window - 1
    longest = kwargs.get("max_length_q")
    longest = int(cu_seqlens.diff().max()) if longest is None else int(longest)
    if (heads := query.size(1) // key.size(1)) > 1:
        key, value = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
    # squeeze, whose backward is a view: that of [0] is a copy into zeros
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = packed_softmax_attention(
        query,
        key,
        value,
        cu_seqlens,
        longest,
        scale=scaling,
        window=window,
        dropout_p=dropout,
    )
    return out[None], None


def packed_mask(
    *args: Any,
    mask_function: Callable[..., object] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **how: Any,
) -> Tensor | None:
    """The mask of ``"sdpa"``, but none where nothing is padded: the attention applies windows
    itself.
    """
    plain = all(
        f is bidirectional_mask_function or getattr(f, "__qualname__", "") in BIDIRECTIONAL_WINDOWS
        for f in conjuncts(mask_function) or [mask_function]
    )
    if attention_mask is None and plain:
        return None
    found: Tensor | None = sdpa_mask(
        *args,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **how,
    )
    return found


def conjuncts(function: Callable[..., object]) -> list[Callable[..., object]]:
    """The mask functions that transformers' ``and_masks`` joined to this one; none if it is no such
    conjunction.
    """
    if not getattr(function, "__qualname__", "").startswith("and_masks"):
        return []
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [f for part in parts for f in (part if isinstance(part, (tuple, list)) else (part,))]


def padding_position(model: nn.Module) -> int | None:
    """The position of padding in models that count positions from behind it (RoBERTa and its kin),
    else None.
    """
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        if isinstance(index, int) and isinstance(
            getattr(module, "position_embeddings", None),
            nn.Embedding,
        ):
            return index
    return None


def position_ids_of(input_ids: Tensor, cu_seqlens: Tensor, padding: int | None = None) -> Tensor:
    """``[T]`` int64 positions of packed tokens within their sequences.

    With a ``padding`` (see :func:`padding_position`) they begin behind it; a token with this id
    keeps it as its position and is not counted.
    """
    sequence, place = token_positions(cu_seqlens, input_ids.numel())
    if padding is None:
        return place
    counted = (input_ids != padding).long()
    before = torch.cat([counted.new_zeros(1), counted.cumsum(0)])  # [T + 1]
    return (before[1:] - before[cu_seqlens.long()[sequence]]) * counted + padding


def packed_arguments(
    ids: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> dict[str, Any]:
    """Packed tokens ``[T]`` and their sequences, under the names that models and
    sentence-transformers give them.
    """
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
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
    """Hidden states ``[T, H]`` of packed tokens by a stock encoder, differentiable, with no wait
    for the GPU.

    Args:
        model: a transformers encoder that :func:`use_packed` accepted. Of one with an LM head, the
            logits are returned (of one whose head is fused by ``accelerate``: the input of the
            head).
        input_ids, cu_seqlens: integer ``[T]`` tokens of all sequences, and their int32 offsets ``[B
            + 1]``.
        max_seqlen: length of the longest sequence, known to the host.
        position_ids, token_type_ids: ``[T]``; by default those of the model, see
            :func:`position_ids_of`, and zeros.
    """
    check_network(model)
    if position_ids is None:
        position_ids = position_ids_of(input_ids, cu_seqlens, padding_position(model))
    arguments = packed_arguments(input_ids, position_ids, cu_seqlens, max_seqlen)
    if token_type_ids is not None:
        arguments["token_type_ids"] = token_type_ids[None]
    output = model(**arguments)
    hidden: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return hidden.squeeze(0)


def check_network(model: object) -> None:
    """Raise ``TypeError`` unless a model is a module, such as for its name or path."""
    check_instance("model", model, nn.Module, "a loaded model")


def use_packed(model: Model, *, check: bool = True) -> str | None:
    """Let a stock encoder take packed tokens, by ``attn_implementation="tilefold_packed"`` in this
    model's config.

    Padded inputs run as before, by transformers' ``"sdpa"``. Checkpoints do not change. A model
    with ``attn_implementation="entmax"`` stays as it is: its attention takes packed tokens already.
    With ``check``, two short sequences are run padded and packed, in eval mode, and compared.

    Returns:
        None if the model now takes packed tokens; else why it does not, and nothing is changed.

    Raises:
        TypeError: for what is no module.
    """
    check_network(model)
    why = f"{SWITCH} is set" if switched_off() else _why_not_by_its_kind(model)
    if why is not None:
        return why
    register_packed()
    if (before := model.config._attn_implementation) != "entmax":
        model.set_attn_implementation(PACKED)
        if model.config._attn_implementation != PACKED:
            return f"{type(model).__name__} does not let its attention be chosen"
    why = _why_not_by_its_numbers(model) if check else None
    if why is not None and before != "entmax":
        model.set_attn_implementation(before)
    return why


def stop_packed(model: Model) -> None:
    """Undo :func:`use_packed`; does nothing to a model that it did not change."""
    check_network(model)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED:
        model.set_attn_implementation("sdpa")


def _why_not_by_its_kind(model: Model) -> str | None:
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is no transformers model"
    if not getattr(model, "is_backend_compatible", lambda: False)():
        return f"the attention of {name} does not go through transformers' AttentionInterface"
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    if (
        decodes
        or name.endswith("ForCausalLM")
        or any(getattr(part, "is_causal", False) for part in model.modules())
    ):
        return f"{name} is no encoder"
    if (chosen := getattr(config, "_attn_implementation", None)) not in ("sdpa", PACKED, "entmax"):
        return f"attn_implementation={chosen!r} was chosen, and only 'sdpa' and 'entmax' give way to packed attention"
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return f"the parameters of {name} are sharded already; call accelerate(model) first"
    return None


def _why_not_by_its_numbers(model: Model) -> str | None:
    with in_eval_mode(model), torch.no_grad():
        try:
            ids, mask = _short_sequences(model)
            output = model(input_ids=ids, attention_mask=mask)
            expected = (output.logits if "logits" in output else output.last_hidden_state)[
                mask.bool()
            ]
            lengths = mask.sum(1)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            got = packed_hidden_states(model, ids[mask.bool()], cu_seqlens, int(lengths.max()))
        except Exception as error:
            return f"two short sequences could not be run ({type(error).__name__}: {error})"
    scale, difference = max(1e-6, float(expected.abs().max())), apart(got, expected)
    if got.shape != expected.shape:
        return f"packed tokens gave {list(got.shape)} numbers, padded ones {list(expected.shape)}"
    if not difference <= TOLERANCE * scale:
        return f"packed and padded tokens disagree by {difference:.3g} of {scale:.3g} on two short sequences"
    return None


def apart(got: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN of other shapes."""
    return (
        float((got.float() - expected.float()).abs().max())
        if got.shape == expected.shape
        else float("nan")
    )


def _short_sequences(model: Model) -> tuple[Tensor, Tensor]:
    """Token ids ``[2, S]`` and their mask; longer than the sliding window of the model, if that is
    short.
    """
    config = model.config
    device = next(model.parameters()).device
    window = getattr(config, "sliding_window", None)
    longest = max(11, min(160, window + 8)) if isinstance(window, int) else 11
    longest = min(longest, getattr(config, "max_position_embeddings", longest) - 4)
    lengths = torch.tensor([[3], [longest]], device=device)
    mask = (torch.arange(longest, device=device) < lengths).long()
    padding = getattr(config, "pad_token_id", None)
    padding = 0 if padding is None else padding
    ids = (
        torch.arange(2 * longest, device=device).view(2, longest)
        * 7
        % min(config.vocab_size - 4, 89)
        + 3
    )
    return torch.where(
        (mask == 0) | (ids == padding),
        torch.where(mask == 0, padding, ids + 1),
        ids,
    ), mask


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Modules in eval mode; afterwards each part has its former one."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@functools.cache
def one_gpu(arguments_class: Any) -> Any:
    """Training arguments with which a Trainer that no launcher started uses one GPU, however many
    are visible.

    There transformers' Trainer would wrap the model in ``torch.nn.DataParallel``, which an
    accelerated model refuses. Under a launcher (``torchrun``, ``accelerate launch``), on one GPU
    and on the CPU they change nothing::

        arguments = one_gpu(SparseEncoderTrainingArguments)(output_dir="model", per_device_train_batch_size=32)

    Args:
        arguments_class: ``transformers.TrainingArguments``, or a class derived from it.

    Returns:
        A class derived from it, whose ``n_gpu`` is at most 1. What is pickled of its instances (``training_args.bin``)
        is an instance of ``arguments_class``, and loads without tilefold.

    Raises:
        TypeError: for anything else.
    """
    from transformers import TrainingArguments

    if not (isinstance(arguments_class, type) and issubclass(arguments_class, TrainingArguments)):
        raise TypeError(
            "arguments_class must be transformers.TrainingArguments or derived, got "
            f"{arguments_class!r}.",
        )

    class OneGpu(arguments_class):
        @property
        def n_gpu(self) -> int:
            return min(1, int(super().n_gpu))

        def __reduce__(self) -> Any:
            stock = object.__new__(arguments_class)
            vars(stock).update(vars(self))
            return stock.__reduce_ex__(
                1,
            )  # from protocol 2 on pickle wants the class of the object itself

    OneGpu.__name__ = OneGpu.__qualname__ = f"OneGpu{arguments_class.__name__}"
    OneGpu.__doc__ = (
        f"``{arguments_class.__name__}`` whose ``n_gpu`` is at most 1; see :func:`one_gpu`."
    )
    return OneGpu
