"""Alpha-entmax attention for transformers' attention interface, and counts of its sparsity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    UNSUPPORTED_ARGUMENTS,
    joined_mask_functions,
    packed_heads,
)
from tilefold.nn.heads import EntmaxAlpha
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention import EntmaxStats, live_blocks

NAME = "entmax"
# Key of config.json that names the attention: transformers reads it, but does not write it.
MARK = "attn_implementation"
# Attribute of configurations and of attention modules that holds alphas.
ALPHA = "entmax_alpha"
# Its value in the configuration of a model whose alphas are parameters.
LEARNED = "learned"
DEFAULT = 1.5
# Qualified names of masks that are arguments of the attention. It would ignore any other mask.
_KNOWN_MASKS = (
    "causal_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    *BIDIRECTIONAL_WINDOWS,
)
_active_records: list[SparsityRecord] = []


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` run alpha-entmax attention in any transformers model.

    It registers an attention function and a mask function, without which padding would be ignored.
    Models with another ``attn_implementation`` do not change. A model takes its alphas from
    ``config.entmax_alpha`` (a number, or one per layer; 1.5 by default), and :func:`set_alpha` and
    :func:`learn_alpha` set them. A model that has run once stores ``name`` in its configuration.
    Its checkpoints therefore load with entmax attention again, see :func:`use_entmax`.

    Args:
        name: name of the attention in transformers.

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
    **kwargs: object,
) -> Tensor | None:
    """Return the padding mask of the keys, for transformers' mask interface.

    A mask function of transformers may also stand for causality or a sliding window. The attention
    gets both as arguments, so that they are not part of this mask.

    Args:
        batch_size: number of sequences; not used.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query; a tensor with a static cache.
        kv_offset: position of the first key.
        mask_function: which pairs of queries and keys are allowed.
        attention_mask: ``[B, N]``, of at least the keys.
        **kwargs: other arguments of transformers' mask functions.

    Returns:
        ``[B, kv_length]``, or ``None`` without an `attention_mask`.

    Raises:
        ValueError: for masks that are not arguments of the attention, and for a static cache.
    """
    if mask_function is not None and not _is_known_mask(mask_function, kwargs):
        name = getattr(mask_function, "__name__", mask_function)
        raise ValueError(
            "mask_function must be causal, bidirectional or a sliding window, got "
            f"{name}; pass cu_seq_lens_q and cu_seq_lens_k for packed sequences, or use "
            "attn_implementation='sdpa'.",
        )
    depends_on_positions = (
        mask_function is not None and mask_function is not bidirectional_mask_function
    )
    if depends_on_positions and q_offset is not None:
        # The attention aligns queries to the end of the keys. A static cache has empty slots there.
        is_static = not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length
        if is_static:
            raise ValueError(
                f"the keys of the cache must end with the {q_length} queries for entmax, got "
                f"{kv_length} keys from {kv_offset} and queries from {q_offset}; use a dynamic "
                "cache.",
            )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    if mask.size(1) != kv_length:
        raise ValueError(
            f"attention_mask must cover the {kv_length} keys, got {list(attention_mask.shape)}; "
            "use a dynamic cache.",
        )
    return mask


def _is_known_mask(function: Callable[..., object], options: Mapping[str, object]) -> bool:
    """Whether a mask function describes only causality and sliding windows.

    The attention gets these as arguments. It would ignore any other mask.

    Args:
        function: a mask function of transformers.
        options: other arguments of the call of :func:`entmax_mask`.
    """
    if function is causal_mask_function or function is bidirectional_mask_function:
        return True
    if torch.compiler.is_compiling():
        return _has_plain_mask_options(options)
    if getattr(function, "__qualname__", "") in _KNOWN_MASKS:
        return True
    functions = joined_mask_functions(function)
    return bool(functions) and all(_is_known_mask(joined, options) for joined in functions)


def _has_plain_mask_options(options: Mapping[str, object]) -> bool:
    """Whether other arguments of a call show that its mask is only causal, or a sliding window.

    This replaces :func:`_is_known_mask` under ``torch.compile``, which cannot look into closures.
    transformers may skip the mask for plain masks only: neither for those of packed sequences nor
    for those of callers.

    Args:
        options: other arguments of the call of :func:`entmax_mask`.
    """
    may_skip_mask = options.get("allow_is_causal_skip", False) or options.get(
        "allow_is_bidirectional_skip",
        False,
    )
    layer_types = getattr(options.get("config"), "layer_types", None) or ()
    is_chunked = "chunked_attention" in layer_types
    return bool(may_skip_mask) and not options.get("use_vmap", False) and not is_chunked


class _AttentionCall(NamedTuple):
    """Arguments of one call of :func:`tilefold.ops.entmax_attention`, for counts of its sparsity.

    Attributes:
        query: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        key: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``.
        alpha: one alpha, or ``[H]``.
        causal: whether a query sees no later keys.
        window: largest distance of a query and a key; ``None`` for no limit.
        scale: factor of the scores; ``None`` for ``D ** -0.5``.
        cu_seqlens_q: offsets of packed queries, ``[B + 1]``.
        cu_seqlens_k: offsets of packed keys, ``[B + 1]``.
        key_padding_mask: ``[B, Nk]``, of padded keys.
    """

    query: Tensor
    key: Tensor
    alpha: float | Tensor
    causal: bool
    window: int | None
    scale: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    key_padding_mask: Tensor | None


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
    """Compute alpha-entmax attention for transformers' attention interface.

    Args:
        module: the attention module that calls; its alpha is looked up there and in its
            configuration.
        query: ``[B, H, Nq, D]``; ``[1, H, T, D]`` if the tokens are packed.
        key: ``[B, Hkv, Nk, D]``.
        value: ``[B, Hkv, Nk, D]``.
        attention_mask: ``[B, Nk]``, as :func:`entmax_mask` returns it.
        dropout: probability that a weight is dropped.
        scaling: factor of the scores; ``D ** -0.5`` by default.
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
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None for entmax attention, got a value; use "
                "attn_implementation='eager'.",
            )
    _store_implementation(module)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    cu_seqlens_q = kwargs.get("cu_seq_lens_q")
    cu_seqlens_k = kwargs.get("cu_seq_lens_k")
    max_seqlen_k = None
    key_padding_mask = None
    is_packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if is_packed:
        query = packed_heads(query)
        key = packed_heads(key)
        value = packed_heads(value)
        longest = kwargs.get("max_length_k")
        if isinstance(longest, int):
            max_seqlen_k = int(longest)
    else:
        cu_seqlens_q = None
        cu_seqlens_k = None
        key_padding_mask = attention_mask
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be a padding mask [B, Nk], got {list(attention_mask.shape)}; "
                "pass 2D.",
            )
    call = _AttentionCall(
        query=query,
        key=key,
        alpha=layer_alpha(module),
        causal=bool(is_causal),
        window=None if sliding_window is None else sliding_window - 1,
        scale=scaling,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_padding_mask=key_padding_mask,
    )
    record = _record_of(module)
    result = entmax_attention(
        call.query,
        call.key,
        value,
        alpha=call.alpha,
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        key_padding_mask=call.key_padding_mask,
        dropout_p=dropout,
        return_stats=record is not None,
    )
    if isinstance(result, Tensor):
        output = result
    else:
        output, stats = result
        if record is not None:
            record._add(module, call, stats)
    output = output.unsqueeze(0) if is_packed else output.transpose(1, 2)
    return output, None


def _record_of(module: nn.Module) -> SparsityRecord | None:
    """Return the active record that counts an attention module, if there is one."""
    for record in _active_records:
        if module in record._counts:
            return record
    return None


def _store_implementation(module: nn.Module) -> None:
    """Store the name of the attention in the configuration that a checkpoint of the model gets.

    transformers reads the name ``attn_implementation`` from a checkpoint, but never writes it.

    Args:
        module: an attention module that runs.
    """
    config = getattr(module, "config", None)
    if config is not None and not torch.compiler.is_compiling() and MARK not in vars(config):
        setattr(config, MARK, getattr(config, "_attn_implementation", NAME))


def layer_alpha(module: nn.Module) -> float | Tensor:
    """Return the alpha of an attention module: one number, or ``[H]`` if it is learned.

    It is the module's ``entmax_alpha``, else that of its configuration, else 1.5. A list in the
    configuration holds one number per layer, at the position ``layer_idx`` of the module.

    Args:
        module: the attention module.

    Raises:
        ValueError: if the configuration says that alphas are learned, and the module has none, or
            if it has no alpha for this layer.
    """
    module_alpha: Any = getattr(module, ALPHA, None)
    if isinstance(module_alpha, EntmaxAlpha):
        learned: Tensor = module_alpha()
        return learned
    if module_alpha is not None:
        module_number: float = module_alpha
        return module_number
    config_alpha: Any = getattr(getattr(module, "config", None), ALPHA, DEFAULT)
    if config_alpha == LEARNED:
        raise ValueError(
            f"entmax_alpha of {type(module).__name__} is learned and must be loaded, got none; "
            "call load_alpha(model, folder) after from_pretrained(folder), or "
            "set_alpha(model, 1.5) for another.",
        )
    if not isinstance(config_alpha, (list, tuple)):
        config_number: float = config_alpha
        return config_number
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(config_alpha):
        raise ValueError(
            "config.entmax_alpha must be one number or one for every layer, got "
            f"{len(config_alpha)} for layer {layer}; use set_alpha(model, [...]) instead.",
        )
    return float(config_alpha[layer])


def attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """Return the modules that call transformers' attention interface, and their query heads.

    They are recognised by the attributes ``is_causal`` and ``config``, which the interface reads.

    Args:
        model: the model.

    Returns:
        Number of query heads by module, first layer first.
    """
    check_network(model)
    n_heads: dict[nn.Module, int] = {}
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "config"):
            n_module_heads = _query_heads(module)
            if n_module_heads is not None:
                n_heads[module] = n_module_heads
    return n_heads


def checked_attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """Return the attention modules of a model, with the number of query heads of each.

    Args:
        model: the model.

    Raises:
        ValueError: if the model has no module that calls transformers' attention interface.
    """
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            "model must have attention layers of transformers' attention interface, got "
            f"{type(model).__name__}.",
        )
    return modules


def _query_heads(module: nn.Module) -> int | None:
    """Return the number of query heads of an attention module, or ``None`` if it is not known.

    Architectures name it differently.

    Args:
        module: the attention module.
    """
    candidates = (
        getattr(module, "num_attention_heads", None),
        getattr(module, "num_heads", None),
        getattr(module.config, "num_attention_heads", None),
    )
    for candidate in candidates:
        if isinstance(candidate, int):
            return candidate
    return None


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
    """The counts of :func:`record_sparsity`.

    Reading them synchronises with the device.

    Args:
        model: a model with attention layers.
        blocks: whether live blocks are counted.
    """

    def __init__(self, model: nn.Module, blocks: bool) -> None:
        modules = checked_attention_modules(model)
        self._names = {module: name for name, module in model.named_modules() if module in modules}
        self._blocks = blocks
        # Counts int64 ``[5, H]`` on the device of each layer that ran. The rows are positive and
        # allowed weights, queries, live and visible blocks.
        self._counts: dict[nn.Module, Tensor | None] = dict.fromkeys(modules)

    def _add(self, module: nn.Module, call: _AttentionCall, stats: EntmaxStats) -> None:
        """Add the counts of one call of the attention to those of its layer.

        Counts are summed over the batch and the queries, separately for each head. Padding queries
        do not count.

        Args:
            module: the attention module that called.
            call: its arguments.
            stats: statistics of each query, ``[B, H, Nq]``; of packed queries ``[1, H, Tq]``.
                ``support`` is its number of positive weights, ``visible`` of allowed keys.
        """
        query_mask = _query_padding_mask(module, call)
        support = stats.support
        visible = stats.visible.expand_as(support)
        if query_mask is not None:
            support = support * query_mask[:, None]
            visible = visible * query_mask[:, None]
        batch_and_queries = (0, 2)  # dimensions
        counts = [
            support.sum(dim=batch_and_queries),
            visible.sum(dim=batch_and_queries),
            (visible > 0).sum(dim=batch_and_queries),  # queries that see any key
        ]
        if self._blocks:
            live, visible_blocks = live_blocks(
                call.query,
                call.key,
                stats.tau,
                alpha=call.alpha,
                causal=call.causal,
                window=call.window,
                cu_seqlens_q=call.cu_seqlens_q,
                cu_seqlens_k=call.cu_seqlens_k,
                key_padding_mask=call.key_padding_mask,
                query_padding_mask=query_mask,
                scale=call.scale,
            )
            counts += [live.sum(dim=0), visible_blocks.sum(dim=0)]
        else:
            not_counted = torch.zeros_like(counts[0])
            counts += [not_counted, not_counted]
        total = torch.stack(counts)
        previous = self._counts[module]
        self._counts[module] = total if previous is None else previous + total

    @property
    def layers(self) -> list[LayerSparsity]:
        """The layers that ran, first layer first.

        Raises:
            RuntimeError: if none ran entmax attention.
        """
        return [self._sparsity(name, counts) for name, counts in self._counts_by_name()]

    @property
    def total(self) -> LayerSparsity:
        """Sparsity over all layers and heads, in lists of one number.

        A layer weighs as much as it has counted weights, queries or blocks.
        """
        counts = [counts.sum(dim=1, keepdim=True) for _, counts in self._counts_by_name()]
        return self._sparsity("all layers", torch.stack(counts).sum(dim=0))

    def _counts_by_name(self) -> list[tuple[str, Tensor]]:
        """Return the names of the layers that ran, and their counts ``[5, H]`` on the CPU."""
        counts_by_name = [
            (self._names[module], counts.cpu())
            for module, counts in self._counts.items()
            if counts is not None
        ]
        if not counts_by_name:
            raise RuntimeError(
                "no attention layer of the model ran entmax attention while recorded; call "
                "use_entmax(model), and run the model inside the with block.",
            )
        return counts_by_name

    def _sparsity(self, name: str, counts: Tensor) -> LayerSparsity:
        """Convert the counts of a layer to shares.

        Args:
            name: name of the layer.
            counts: ``[5, H]`` for H heads. The rows are positive and allowed weights, queries, live
                and visible blocks.
        """
        positive, allowed, queries, live, visible = counts.double()
        return LayerSparsity(
            name=name,
            nonzero=(positive / allowed).tolist(),
            mean_support=(positive / queries).tolist(),
            live_blocks=(live / visible).tolist() if self._blocks else None,
            queries=int(queries.max()),
        )

    def __str__(self) -> str:
        """Return a table with one line per layer and one for all layers, of means over heads."""
        rows = [("layer", "nonzero", "support", "live blocks")]
        for layer in [*self.layers, self.total]:
            nonzero = _mean(layer.nonzero)
            support = _mean(layer.mean_support)
            live = "-" if layer.live_blocks is None else f"{_mean(layer.live_blocks):.1%}"
            rows.append((layer.name, f"{nonzero:.1%}", f"{support:.1f}", live))
        name_width = max(len(name) for name, *_ in rows)
        lines = []
        for name, *cells in rows:
            columns = "".join(f"  {cell:>11}" for cell in cells)
            lines.append(f"{name:<{name_width}}{columns}")
        return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _query_padding_mask(module: nn.Module, call: _AttentionCall) -> Tensor | None:
    """Return which queries of a call are tokens and which are padding.

    In self-attention, queries are aligned to the end of the keys, so that the end of the keys' mask
    is that of the queries. Cross-attention has keys of another sequence.

    Args:
        module: the attention module that called.
        call: its arguments.

    Returns:
        Bool ``[B, Nq]``, True for tokens; ``None`` without a mask, and in cross-attention.
    """
    mask = call.key_padding_mask
    # Some architectures show it in an attribute, others in the name of the class only.
    is_cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if mask is None or is_cross:
        return None
    n_queries = call.query.size(2)
    n_keys = mask.size(1)
    if n_keys < n_queries:
        return None
    return mask[:, n_keys - n_queries :] != 0


@contextmanager
def record_sparsity(model: nn.Module, *, blocks: bool = True) -> Iterator[SparsityRecord]:
    """Count how sparse the entmax attention of ``model`` is while a block runs.

    For example::

        with record_sparsity(model) as sparsity:
            model(**batch)  # once or several times
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
    if any(_record_of(module) is not None for module in record._counts):
        raise RuntimeError(
            "model must not be recorded already, got a record inside another one; use one of them.",
        )
    _active_records.append(record)
    try:
        yield record
    finally:
        _active_records.remove(record)
