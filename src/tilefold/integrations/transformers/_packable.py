"""Whether a model computes the same of packed tokens as of padded ones, found by running it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tilefold._typing import Model
from tilefold.integrations.transformers._attention import NAME as ENTMAX
from tilefold.integrations.transformers.packed import PACKED, packed_hidden_states, register_packed

TOLERANCE = 0.02  # of the largest value: wide enough for bf16, far below attention to the neighbouring sequence
LENGTHS = (3, 11)
MAX_CHECKED = 160  # tokens of the longer sequence where a window must be seen to work


def use_packed(model: Model, *, check: bool = True) -> str | None:
    """Let a stock encoder take packed tokens, by ``attn_implementation="tilefold_packed"`` in this model's config.

    Padded inputs run as before, by transformers' ``"sdpa"``. Checkpoints do not change. A model with
    ``attn_implementation="entmax"`` stays as it is: its attention takes packed tokens already.

    Args:
        model: a transformers model.
        check: run two short sequences padded and packed, in eval mode, and compare.

    Returns:
        None if the model now takes packed tokens; else why it does not, and nothing is changed.
    """
    why = _why_not_by_its_kind(model)
    if why is not None:
        return why
    register_packed()
    before = model.config._attn_implementation
    if before != ENTMAX:
        model.set_attn_implementation(PACKED)
        if model.config._attn_implementation != PACKED:
            return f"{type(model).__name__} does not let its attention be chosen"
    why = _why_not_by_its_numbers(model) if check else None
    if why is not None and before != ENTMAX:
        model.set_attn_implementation(before)
    return why


def stop_packed(model: Model) -> None:
    """Undo :func:`use_packed`; does nothing to a model that it did not change."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED:
        model.set_attn_implementation("sdpa")


def _why_not_by_its_kind(model: Model) -> str | None:
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return f"{name} is no transformers model"
    if not getattr(model, "is_backend_compatible", lambda: False)():
        return f"the attention of {name} does not go through transformers' AttentionInterface"
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    if decodes or name.endswith("ForCausalLM") or any(getattr(part, "is_causal", False) for part in model.modules()):
        return f"{name} is no encoder"
    chosen = getattr(config, "_attn_implementation", None)
    if chosen not in ("sdpa", PACKED, ENTMAX):
        return f"attn_implementation={chosen!r} was chosen, and only 'sdpa' and 'entmax' give way to packed attention"
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return f"the parameters of {name} are sharded already; call accelerate(model) first"
    return None


def _why_not_by_its_numbers(model: Model) -> str | None:
    with _evaluating(model), torch.no_grad():
        try:
            ids, mask = _short_sequences(model)
            output = model(input_ids=ids, attention_mask=mask)
            expected = (output.logits if "logits" in output else output.last_hidden_state)[mask.bool()]
            lengths = mask.sum(1)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            got = packed_hidden_states(model, ids[mask.bool()], cu_seqlens, int(lengths.max()))
        except Exception as error:
            return f"two short sequences could not be run ({type(error).__name__}: {error})"
    if got.shape != expected.shape:
        return f"packed tokens gave {list(got.shape)} numbers, padded ones {list(expected.shape)}"
    scale = max(1e-6, float(expected.abs().max()))
    difference = float((got.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE * scale:
        return f"packed and padded tokens disagree by {difference:.3g} of {scale:.3g} on two short sequences"
    return None


def _short_sequences(model: Model) -> tuple[Tensor, Tensor]:
    """Token ids ``[2, S]`` and their mask; longer than the sliding window of the model, if that is short."""
    config = model.config
    device = next(model.parameters()).device
    window = getattr(config, "sliding_window", None)
    longest = max(LENGTHS[1], min(MAX_CHECKED, window + 8)) if isinstance(window, int) else LENGTHS[1]
    longest = min(longest, getattr(config, "max_position_embeddings", longest) - 4)
    lengths = torch.tensor([[LENGTHS[0]], [longest]], device=device)
    mask = (torch.arange(longest, device=device) < lengths).long()
    padding = getattr(config, "pad_token_id", None)
    padding = 0 if padding is None else padding
    ids = torch.arange(2 * longest, device=device).view(2, longest) * 7 % min(config.vocab_size - 4, 89) + 3
    return torch.where((mask == 0) | (ids == padding), torch.where(mask == 0, padding, ids + 1), ids), mask


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
