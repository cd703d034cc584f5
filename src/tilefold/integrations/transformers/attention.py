"""Alpha-entmax attention for transformers' registries, and counts of how sparse it is while a model
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
)

from tilefold.integrations.transformers.networks import check_network
from tilefold.integrations.transformers.packed import (
    BIDIRECTIONAL_WINDOWS,
    joined_mask_functions,
)
from tilefold.nn.heads import EntmaxAlpha
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention import EntmaxStats, live_blocks

NAME = "entmax"
MARK = "attn_implementation"  # in config.json, where transformers reads it but does not write it
ALPHA = "entmax_alpha"  # attribute of configurations and of attention modules
LEARNED = "learned"  # its value in a configuration where alphas are parameters
DEFAULT = 1.5
# Masks that are arguments of the attention; any other mask function would silently be ignored.
_KNOWN_MASKS = (
    "causal_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    *BIDIRECTIONAL_WINDOWS,
)
_active: list[SparsityRecord] = []


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` run alpha-entmax attention in any transformers model.

    Registers an attention function and a mask function, without which padding would be ignored.
    Nothing changes for models that do not ask for ``name``. Alphas: ``config.entmax_alpha`` (a
    number, or one per layer; 1.5 by default), :func:`set_alpha` or :func:`learn_alpha`. A model
    that has run once stores ``name`` in its configuration, so that its checkpoints load with it
    again; see :func:`use_entmax`.

    Raises:
        ValueError: for a name with "flash" in it, which would be taken for a FlashAttention.
    """
    if "flash" in name:
        raise ValueError(
            "name must not contain 'flash', which transformers treats as FlashAttention, got "
            f"{name!r}.",
        )
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
    mask_function: Callable[..., object] | None = None,
    attention_mask: Tensor | None = None,
    **how: object,
) -> Tensor | None:
    """The ``[B, kv_length]`` padding mask unchanged: causality and windows are arguments of the
    attention.

    Raises:
        ValueError: for masks that are not arguments of the attention, and for a static cache.
    """
    if mask_function is not None and not _is_known(mask_function, how):
        got = getattr(mask_function, "__name__", mask_function)
        remedy = "pass cu_seq_lens_q and cu_seq_lens_k for packed sequences, or use attn_implementation='sdpa'."
        raise ValueError(
            f"mask_function must be causal, bidirectional or a sliding window, got {got}; {remedy}",
        )
    # queries are at the end of the keys; a static cache has empty slots after them
    bidirectional = mask_function is bidirectional_mask_function
    static = not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length
    if mask_function is not None and not bidirectional and q_offset is not None and static:
        got = f"{kv_length} keys from {kv_offset} and queries from {q_offset}; use a dynamic cache."
        raise ValueError(
            f"the keys of the cache must end with the {q_length} queries for entmax, got {got}",
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    if mask.size(1) != kv_length:
        got = f"{list(attention_mask.shape)}; use a dynamic cache."
        raise ValueError(f"attention_mask must cover the {kv_length} keys, got {got}")
    return mask


def _is_known(function: Callable[..., object], how: Mapping[str, object]) -> bool:
    if function is causal_mask_function or function is bidirectional_mask_function:
        return True
    if (
        torch.compiler.is_compiling()
    ):  # which cannot look into closures; masks of packs and of callers forbid both
        skips = how.get("allow_is_causal_skip", False) or how.get(
            "allow_is_bidirectional_skip",
            False,
        )
        chunked = "chunked_attention" in (getattr(how.get("config"), "layer_types", None) or ())
        return bool(skips) and not how.get("use_vmap", False) and not chunked
    if getattr(function, "__qualname__", "") in _KNOWN_MASKS:
        return True
    functions = joined_mask_functions(function)
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
    """Attention of ``query`` ``[B, H, Nq, D]`` over ``key`` and ``value`` ``[B, Hkv, Nk, D]`` for
    transformers.

    Args:
        module: the attention module that calls; its alpha is looked up there and in its
            configuration.
        query, key, value, dropout, scaling: as transformers passes them.
        attention_mask: ``[B, Nk]``, as :func:`entmax_mask` returns it.
        sliding_window: keys at a distance below this are seen.
        is_causal: by default what ``module.is_causal`` says.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of packed sequences in a batch of one;
            others are not used.

    Returns:
        ``[B, Nq, H, D]``, and ``None`` for the weights, which are never stored.

    Raises:
        ValueError: for masks of another shape, and for softcaps, sinks or biases, which are not
            supported.
    """
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None for entmax attention, got a value; use "
                "attn_implementation='eager'.",
            )
    _remember(module)
    options: dict[str, Any] = {
        "alpha": layer_alpha(module),
        "causal": bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
        "window": None if sliding_window is None else sliding_window - 1,
        "scale": scaling,
        "dropout_p": dropout,
    }
    cu_q, cu_k, longest = (
        kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_k")
    )
    packed = cu_q is not None and cu_k is not None
    if packed:
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    elif attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be a padding mask [B, Nk], got {list(attention_mask.shape)}; "
            "pass 2D.",
        )
    else:
        options["key_padding_mask"] = attention_mask
    most = int(longest) if packed and isinstance(longest, int) else None
    record = next((record for record in _active if module in record._counts), None)
    found = entmax_attention(
        query,
        key,
        value,
        max_seqlen_k=most,
        return_stats=record is not None,
        **options,
    )
    out = found if isinstance(found, Tensor) else found[0]
    if record is not None and not isinstance(found, Tensor):
        record._add(module, query, key, found[1], options)
    return out.unsqueeze(0) if packed else out.transpose(1, 2), None


def _remember(module: nn.Module) -> None:
    """Store the implementation in the configuration: transformers reads it from checkpoints, but
    never writes it.
    """
    config = getattr(module, "config", None)
    if config is not None and not torch.compiler.is_compiling() and MARK not in vars(config):
        setattr(config, MARK, getattr(config, "_attn_implementation", NAME))


def layer_alpha(module: nn.Module) -> float | Tensor:
    """The alpha of an attention module: its ``entmax_alpha``, else its configuration's (one, or a
    list), else 1.5.
    """
    own = getattr(module, ALPHA, None)
    given: Any = (
        own if own is not None else getattr(getattr(module, "config", None), ALPHA, DEFAULT)
    )
    if isinstance(given, EntmaxAlpha):
        given = given()
    elif own is None and given == LEARNED:
        remedy = "call load_alpha(model, folder) after from_pretrained(folder), or set_alpha(model, 1.5) for another."
        raise ValueError(
            f"entmax_alpha of {type(module).__name__} is learned and must be loaded, got none; "
            f"{remedy}",
        )
    elif own is None and isinstance(given, (list, tuple)):
        if (layer := getattr(module, "layer_idx", None)) is None or layer >= len(given):
            got = f"{len(given)} for layer {layer}; use set_alpha(model, [...]) instead."
            raise ValueError(
                f"config.entmax_alpha must be one number or one for every layer, got {got}",
            )
        given = float(given[layer])
    alpha: float | Tensor = given
    return alpha


def attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """The modules that call the attention interface, first layer first, and their numbers of query
    heads.
    """
    check_network(model)
    asking = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal") and hasattr(module, "config")
    ]
    return {module: heads for module in asking if (heads := _heads_of(module)) is not None}


def checked_attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """:func:`attention_modules`, at least one."""
    if not (modules := attention_modules(model)):
        expected = "attention layers of transformers' attention interface"
        raise ValueError(f"model must have {expected}, got {type(model).__name__}.")
    return modules


def _heads_of(module: nn.Module) -> int | None:
    names = ("num_attention_heads", "num_heads")
    values = [
        *(getattr(module, name, None) for name in names),
        getattr(module.config, names[0], None),
    ]
    return next((value for value in values if isinstance(value, int)), None)


@dataclass(frozen=True)
class LayerSparsity:
    """Sparsity of the heads of an attention layer, over all forward passes of a record.

    Attributes:
        name: of the module, or ``"all layers"``.
        nonzero: share of positive weights among those that masks, causality and windows allow; one
            number per head, like the others.
        mean_support: positive weights per query.
        live_blocks: share of blocks of 64 queries by 64 keys with a positive weight, among those
            with an allowed one; ``None`` if they were not counted.
        queries: rows that were counted per head (in a total, over all heads and layers), without
            padding.
    """

    name: str
    nonzero: list[float]
    mean_support: list[float]
    live_blocks: list[float] | None
    queries: int


class SparsityRecord:
    """The counts of :func:`record_sparsity`; reading them synchronises with the device."""

    def __init__(self, model: nn.Module, blocks: bool) -> None:
        modules = checked_attention_modules(model)
        self._names = {module: name for name, module in model.named_modules() if module in modules}
        self._blocks = blocks
        # of each layer [5, H] int64 on its device: positive, allowed, queries, live and visible
        # blocks
        self._counts: dict[nn.Module, Tensor | None] = dict.fromkeys(modules)

    def _add(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        stats: EntmaxStats,
        options: dict[str, Any],
    ) -> None:
        cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
        mask, rows = options.get("key_padding_mask"), None
        support, visible = stats.support, stats.visible.expand_as(stats.support)
        if mask is not None and not cross and mask.size(1) >= query.size(2):
            rows = (
                mask[:, mask.size(1) - query.size(2) :] != 0
            )  # queries are aligned to the end of the keys
            support, visible = support * rows[:, None], visible * rows[:, None]
        found = [support.sum(dim=(0, 2)), visible.sum(dim=(0, 2)), (visible > 0).sum(dim=(0, 2))]
        if self._blocks:
            places = {name: value for name, value in options.items() if name != "dropout_p"}
            if rows is not None and query.dim() == 4:
                places["query_padding_mask"] = rows
            found += [count.sum(dim=0) for count in live_blocks(query, key, stats.tau, **places)]
        else:
            found += [torch.zeros_like(found[0])] * 2
        counts, before = torch.stack(found), self._counts[module]
        self._counts[module] = counts if before is None else before + counts

    @property
    def layers(self) -> list[LayerSparsity]:
        """The layers that ran, first layer first; a RuntimeError if none ran entmax attention."""
        return [self._described(name, counts) for name, counts in self._ran()]

    @property
    def total(self) -> LayerSparsity:
        """All layers and heads together: lists of one number, weighted by how much was counted."""
        counts = [counts.sum(dim=1, keepdim=True) for _, counts in self._ran()]
        return self._described("all layers", torch.stack(counts).sum(dim=0))

    def _ran(self) -> list[tuple[str, Tensor]]:
        ran = [
            (self._names[module], counts.cpu())
            for module, counts in self._counts.items()
            if counts is not None
        ]
        if not ran:
            remedy = "call use_entmax(model), and run the model inside the with block."
            raise RuntimeError(
                f"no attention layer of the model ran entmax attention while recorded; {remedy}",
            )
        return ran

    def _described(self, name: str, counts: Tensor) -> LayerSparsity:
        positive, allowed, queries, live, visible = counts.double()
        blocks = (live / visible).tolist() if self._blocks else None
        shares = (positive / allowed).tolist(), (positive / queries).tolist()
        return LayerSparsity(name, *shares, blocks, int(queries.max()))

    def __str__(self) -> str:
        """A table of means over heads."""
        rows = [("layer", "nonzero", "support", "live blocks")]
        for layer in [*self.layers, self.total]:
            heads = len(layer.nonzero)
            live = "-" if layer.live_blocks is None else f"{sum(layer.live_blocks) / heads:.1%}"
            nonzero, support = sum(layer.nonzero) / heads, sum(layer.mean_support) / heads
            rows.append((layer.name, f"{nonzero:.1%}", f"{support:.1f}", live))
        width = max(len(row[0]) for row in rows)
        return "\n".join(
            f"{row[0]:<{width}}" + "".join(f"  {cell:>11}" for cell in row[1:]) for row in rows
        )


@contextmanager
def record_sparsity(model: nn.Module, *, blocks: bool = True) -> Iterator[SparsityRecord]:
    """Count how sparse the entmax attention of ``model`` is while a block runs.

    with record_sparsity(model) as sparsity:
        model(**batch)  # as often as wanted
    print(sparsity)

    Counts stay on the device until they are read, so nothing synchronises inside the block. Padding
    queries are not counted. With gradient checkpointing a layer that runs twice is counted twice,
    which leaves shares as they are.

    Args:
        model: as for :func:`set_alpha`.
        blocks: also count live blocks, which computes the scores a second time, in fp32.

    Raises:
        ValueError: for a model without attention layers.
        RuntimeError: inside another record of the same layers.
    """
    record = SparsityRecord(model, blocks)
    if any(module in other._counts for other in _active for module in record._counts):
        raise RuntimeError(
            "model must not be recorded already, got a record inside another one; use one of them.",
        )
    _active.append(record)
    try:
        yield record
    finally:
        _active.remove(record)
