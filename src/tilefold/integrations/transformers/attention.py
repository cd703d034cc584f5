"""Alpha-entmax attention for transformers' attention interface, and counts of its sparsity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
    combined_mask_functions,
    largest_distance,
    packed_heads,
)
from tilefold.nn.heads import EntmaxAlpha
from tilefold.ops import entmax_attention
from tilefold.ops.entmax_attention import EntmaxStats, live_blocks

NAME = "entmax"
# The key of config.json that names the attention: transformers reads it, but does not write it.
MARK = "attn_implementation"
# The attribute of configurations and of attention modules that holds alphas.
ALPHA = "entmax_alpha"
# The value of that attribute in the configuration of a model whose alphas are parameters.
LEARNED = "learned"
DEFAULT = 1.5
# Qualified names of the mask functions that the attention gets as arguments.
_KNOWN_MASKS = (
    "causal_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    *BIDIRECTIONAL_WINDOWS,
)
_active_records: list[SparsityRecord] = []


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` run alpha-entmax attention in any transformers model.

    This registers an attention function and a mask function; without the mask function, padding
    would be attended to. Models with another ``attn_implementation`` do not change.

    See :func:`set_alpha` and :func:`learn_alpha` for the alphas of a model, which are 1.5 by
    default, and :func:`use_entmax` for its checkpoints.

    Args:
        name: the name of the attention in transformers.

    Raises:
        ValueError: if the name contains "flash", because transformers would treat it as
            FlashAttention.
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

    transformers also asks for masks of causality and of sliding windows. The attention gets both as
    arguments, so that this mask leaves them out.

    Args:
        batch_size: the number of sequences; not used.
        q_length: the number of queries.
        kv_length: the number of keys.
        q_offset: the position of the first query; a tensor if the cache is static.
        kv_offset: the position of the first key.
        mask_function: decides which pairs of a query and a key are allowed.
        attention_mask: the padding mask ``[B, N]``, which ends with the keys.
        **kwargs: the other arguments of transformers' mask functions.

    Returns:
        The mask ``[B, kv_length]``, or None without an ``attention_mask``.

    Raises:
        ValueError: if ``mask_function`` stands for another mask, which the attention would ignore,
            if the cache is static, or if the padding mask is shorter than the keys.
    """
    if mask_function is not None and not _is_causal_or_window(mask_function, kwargs):
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


def _is_causal_or_window(function: Callable[..., object], options: Mapping[str, object]) -> bool:
    """Whether a mask function expresses nothing but causality and sliding windows.

    The attention gets these as arguments instead of a mask. It would ignore any other mask.

    Args:
        function: a mask function of transformers. A function that ``and_masks`` has combined is
            known if all of its parts are.
        options: the other arguments of the call of :func:`entmax_mask`.
    """
    if function is causal_mask_function or function is bidirectional_mask_function:
        return True
    if torch.compiler.is_compiling():  # torch.compile cannot inspect closures
        return _has_plain_mask_options(options)
    if getattr(function, "__qualname__", "") in _KNOWN_MASKS:
        return True
    parts = combined_mask_functions(function)
    is_combined = parts != [function]
    return is_combined and all(_is_causal_or_window(part, options) for part in parts)


def _has_plain_mask_options(options: Mapping[str, object]) -> bool:
    """Whether the arguments of a call show that its mask is only causal or a sliding window.

    Under ``torch.compile`` the mask function itself cannot be inspected. But transformers allows an
    attention to do without a mask (``allow_*_skip``) for plain masks only: not for packed sequences
    or custom masks.

    Args:
        options: the other arguments of the call of :func:`entmax_mask`.
    """
    may_skip_mask = options.get("allow_is_causal_skip", False) or options.get(
        "allow_is_bidirectional_skip",
        False,
    )
    has_custom_function = bool(options.get("use_vmap", False))  # such functions need vmap
    layer_types = getattr(options.get("config"), "layer_types", None) or ()
    is_chunked = "chunked_attention" in layer_types  # a skip is allowed for chunks, too
    return bool(may_skip_mask) and not has_custom_function and not is_chunked


class _AttentionCall(NamedTuple):
    """Arguments of one call of :func:`tilefold.ops.entmax_attention`, also for its sparsity.

    Attributes:
        query: the queries ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        key: the keys ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``.
        alpha: one alpha for all heads, or one for each, ``[H]``.
        causal: whether a query attends to no later keys.
        window: the largest distance of a query and a key; ``None`` for no limit.
        scale: the factor of the scores; ``None`` for ``D ** -0.5``.
        cu_seqlens_q: the offsets of packed queries, ``[B + 1]``.
        cu_seqlens_k: the offsets of packed keys, ``[B + 1]``.
        key_padding_mask: the padding mask of the keys, ``[B, Nk]``.
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

    @property
    def is_packed(self) -> bool:
        """Whether the batch is packed."""
        return self.cu_seqlens_q is not None


def _attention_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scale: float | None,
    sliding_window: int | None,
    is_causal: bool,
    offsets: tuple[Tensor | None, Tensor | None],
) -> _AttentionCall:
    """Convert the arguments of transformers' attention interface to those of ``entmax_attention``.

    Args:
        module: the attention module, which has the alpha.
        query: the queries ``[B, H, Nq, D]``; ``[1, H, T, D]`` if the tokens are packed.
        key: the keys ``[B, Hkv, Nk, D]``.
        attention_mask: the padding mask ``[B, Nk]``, which packed tokens do not need.
        scale: the factor of the scores.
        sliding_window: the number of keys that a query attends to in one direction; None for all.
        is_causal: whether a query attends to no later keys.
        offsets: the offsets of packed queries and keys. The tokens are packed if both are tensors.

    Raises:
        ValueError: if the mask has another shape.
    """
    cu_seqlens_q, cu_seqlens_k = offsets
    key_padding_mask = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        query = packed_heads(query)
        key = packed_heads(key)
    else:
        cu_seqlens_q = None
        cu_seqlens_k = None
        key_padding_mask = attention_mask
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be a padding mask [B, Nk], got {list(attention_mask.shape)}; "
                "pass 2D.",
            )
    return _AttentionCall(
        query=query,
        key=key,
        alpha=layer_alpha(module),
        causal=is_causal,
        window=largest_distance(module, sliding_window, is_causal),
        scale=scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_padding_mask=key_padding_mask,
    )


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
        module: the calling attention module, which has the alpha, or whose configuration has it.
        query: the queries ``[B, H, Nq, D]``; ``[1, H, T, D]`` if the tokens are packed.
        key: the keys ``[B, Hkv, Nk, D]``.
        value: the values ``[B, Hkv, Nk, D]``.
        attention_mask: the padding mask ``[B, Nk]``, as :func:`entmax_mask` returns it.
        dropout: the probability that a weight is dropped.
        scaling: the factor of the scores; ``D ** -0.5`` by default.
        sliding_window: the number of keys that a query attends to in one direction, its own key
            included; all keys by default.
        is_causal: whether a query attends to no later keys; by default ``module.is_causal``.
        kwargs: the offsets ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of packed sequences in a batch
            of one. All other arguments are ignored.

    Returns:
        The output ``[B, Nq, H, D]``, and None for the weights, which are never stored.

    Raises:
        ValueError: if the mask has another shape, or for softcaps, sinks or biases, which are not
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
    call = _attention_call(
        module,
        query,
        key,
        attention_mask,
        scaling,
        sliding_window,
        bool(is_causal),
        offsets=(kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")),
    )
    max_seqlen_k = None
    if call.is_packed:
        value = packed_heads(value)
        longest = kwargs.get("max_length_k")
        if isinstance(longest, int):
            max_seqlen_k = int(longest)
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
    output = output.unsqueeze(0) if call.is_packed else output.transpose(1, 2)
    return output, None


def _record_of(module: nn.Module) -> SparsityRecord | None:
    """Return the active record of an attention module, or None if there is none."""
    for record in _active_records:
        if module in record._counts:
            return record
    return None


def _store_implementation(module: nn.Module) -> None:
    """Store the name of the attention in a model's configuration, which its checkpoints contain.

    transformers reads ``attn_implementation`` from a checkpoint, but never writes it.

    Args:
        module: an attention module that runs.
    """
    config = getattr(module, "config", None)
    if config is not None and not torch.compiler.is_compiling() and MARK not in vars(config):
        setattr(config, MARK, getattr(config, "_attn_implementation", NAME))


def layer_alpha(module: nn.Module) -> float | Tensor:
    """Return the alpha of an attention module: one number, or ``[H]`` if it is learned.

    The attribute ``entmax_alpha`` of the module comes first, then that of its configuration, then
    the default, 1.5. A list in the configuration has one number per layer, in the order of
    ``layer_idx``.

    Args:
        module: the attention module.

    Raises:
        ValueError: if the configuration says that alphas are learned, but the module has none, or
            if the list in the configuration has no alpha for this layer.
    """
    module_alpha: Any = getattr(module, ALPHA, None)
    if isinstance(module_alpha, EntmaxAlpha):
        return cast("Tensor", module_alpha())
    if module_alpha is not None:
        return cast("float", module_alpha)
    config_alpha: Any = getattr(getattr(module, "config", None), ALPHA, DEFAULT)
    if config_alpha == LEARNED:
        raise ValueError(
            f"entmax_alpha of {type(module).__name__} is learned and must be loaded, got none; "
            "call load_alpha(model, folder) after from_pretrained(folder), or set a fixed one "
            "with set_alpha(model, 1.5).",
        )
    if not isinstance(config_alpha, (list, tuple)):
        return cast("float", config_alpha)
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(config_alpha):
        raise ValueError(
            "config.entmax_alpha must be one number or one for every layer, got "
            f"{len(config_alpha)} for layer {layer}; use set_alpha(model, [...]) instead.",
        )
    return float(config_alpha[layer])


def attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """Find the modules that call transformers' attention interface, with their numbers of heads.

    These modules are recognised by the attributes ``is_causal`` and ``config``, which the interface
    reads.

    Args:
        model: the model.

    Returns:
        The number of query heads by module, first layer first.
    """
    check_network(model)
    n_heads: dict[nn.Module, int] = {}
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "config"):
            n_module_heads = _count_query_heads(module)
            if n_module_heads is not None:
                n_heads[module] = n_module_heads
    return n_heads


def checked_attention_modules(model: nn.Module) -> dict[nn.Module, int]:
    """Find the attention modules of a model, at least one, with their numbers of heads.

    Args:
        model: the model.

    Returns:
        The number of query heads by module, first layer first.

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


def _count_query_heads(module: nn.Module) -> int | None:
    """Return the number of query heads of an attention module, or None if it is not known.

    The name of the attribute depends on the architecture.

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

    The lists have one number per head.

    Attributes:
        name: the name of the module, or ``"all layers"``.
        nonzero: the fraction of weights that are positive, among those that masks, causality and
            windows allow.
        mean_support: the mean number of positive weights per query.
        live_blocks: the fraction of blocks of 64 queries by 64 keys that hold a positive weight,
            among the blocks in which masks, causality and windows allow one; ``None`` if blocks
            were not counted.
        queries: the number of queries per head, without padding; in a total, of all heads and
            layers.
    """

    name: str
    nonzero: list[float]
    mean_support: list[float]
    live_blocks: list[float] | None
    queries: int


class _HeadCounts(NamedTuple):
    """Counts of an attention layer, int64 ``[H]``: one number per head.

    Attributes:
        positive: positive weights.
        allowed: weights that masks, causality and windows allow.
        queries: queries that see a key.
        live_blocks: blocks of 64 queries by 64 keys that hold a positive weight.
        visible_blocks: blocks in which masks, causality and windows allow a weight.
    """

    positive: Tensor
    allowed: Tensor
    queries: Tensor
    live_blocks: Tensor
    visible_blocks: Tensor


class SparsityRecord:
    """The counts of :func:`record_sparsity`.

    Reading them synchronises with the device.

    Args:
        model: a model with attention layers.
        blocks: whether live blocks are counted.
    """

    def __init__(self, model: nn.Module, blocks: bool) -> None:
        """Prepare to count; nothing is counted before :func:`record_sparsity` activates the record.

        Args:
            model: a model with entmax attention.
            blocks: whether blocks with positive weights are counted.
        """
        modules = checked_attention_modules(model)
        self._names = {module: name for name, module in model.named_modules() if module in modules}
        self._blocks = blocks
        # The sum of the stacked _HeadCounts ``[5, H]`` of each layer, on its device; None for a
        # layer that has not run.
        self._counts: dict[nn.Module, Tensor | None] = dict.fromkeys(modules)

    def _add(self, module: nn.Module, call: _AttentionCall, stats: EntmaxStats) -> None:
        """Add the counts of one call of the attention to those of its layer.

        Counts are summed over the batch and the queries, separately for each head. Padding queries
        do not count.

        Args:
            module: the calling attention module.
            call: the arguments of the attention.
            stats: the statistics of each query, ``[B, H, Nq]``, or ``[1, H, Tq]`` if queries are
                packed: ``support`` is the number of its positive weights, ``visible`` the number of
                keys that it may attend to, ``tau`` the threshold below which weights are 0.
        """
        query_mask = _query_padding_mask(module, call)
        support = stats.support
        visible = stats.visible.expand_as(support)
        if query_mask is not None:
            support = support * query_mask[:, None]
            visible = visible * query_mask[:, None]
        batch_and_queries = (0, 2)  # dimensions
        positive = support.sum(dim=batch_and_queries)
        if self._blocks:
            live, visible_blocks = _count_blocks(call, stats.tau, query_mask)
        else:
            live = visible_blocks = torch.zeros_like(positive)
        counts = _HeadCounts(
            positive=positive,
            allowed=visible.sum(dim=batch_and_queries),
            queries=(visible > 0).sum(dim=batch_and_queries),
            live_blocks=live,
            visible_blocks=visible_blocks,
        )
        stacked = torch.stack(counts)
        previous = self._counts[module]
        self._counts[module] = stacked if previous is None else previous + stacked

    @property
    def layers(self) -> list[LayerSparsity]:
        """The layers that ran, first layer first.

        Raises:
            RuntimeError: if no layer ran entmax attention.
        """
        return [self._sparsity(name, counts) for name, counts in self._counts_by_name().items()]

    @property
    def total(self) -> LayerSparsity:
        """Sparsity over all layers and heads, in lists of one number.

        Each layer is weighted by its number of weights, queries or blocks.
        """
        layer_totals = [
            counts.sum(dim=1, keepdim=True) for counts in self._counts_by_name().values()
        ]
        return self._sparsity("all layers", torch.stack(layer_totals).sum(dim=0))

    def _counts_by_name(self) -> dict[str, Tensor]:
        """Return the stacked counts ``[5, H]`` of the layers that ran, on the CPU.

        Raises:
            RuntimeError: if no layer ran entmax attention.
        """
        counts_by_name = {
            self._names[module]: counts.cpu()
            for module, counts in self._counts.items()
            if counts is not None
        }
        if not counts_by_name:
            raise RuntimeError(
                "no attention layer of the model ran entmax attention inside the with block; call "
                "use_entmax(model) before, and run the model there.",
            )
        return counts_by_name

    def _sparsity(self, name: str, stacked_counts: Tensor) -> LayerSparsity:
        """Convert the counts of a layer to fractions.

        Args:
            name: the name of the layer.
            stacked_counts: the stacked :class:`_HeadCounts`, ``[5, H]``.
        """
        counts = _HeadCounts(*stacked_counts.double())
        live_fractions = None
        if self._blocks:
            live_fractions = (counts.live_blocks / counts.visible_blocks).tolist()
        return LayerSparsity(
            name=name,
            nonzero=(counts.positive / counts.allowed).tolist(),
            mean_support=(counts.positive / counts.queries).tolist(),
            live_blocks=live_fractions,
            queries=int(counts.queries.max()),  # the same for all heads
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
    """Return which queries of a call are tokens and which are padding, by the mask of the keys.

    In self-attention, the last Nq entries of the key mask belong to the queries. In
    cross-attention, the keys come from another sequence.

    Args:
        module: the calling attention module.
        call: the arguments of the attention.

    Returns:
        Bool ``[B, Nq]``, True for tokens; None if this is not known.
    """
    mask = call.key_padding_mask
    # Some architectures show it by an attribute, others only by the name of the class.
    is_cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if mask is None or is_cross:
        return None
    n_queries = call.query.size(2)
    n_keys = mask.size(1)
    if n_keys < n_queries:  # cross-attention of an architecture that shows it by neither
        return None
    return mask[:, n_keys - n_queries :] != 0


def _count_blocks(
    call: _AttentionCall,
    tau: Tensor,
    query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Count the live and the visible blocks of 64 queries by 64 keys.

    A block is visible if masks, causality and the window allow a query of the block to attend to a
    key of it. It is live if such a pair also has a positive weight.

    Args:
        call: the arguments of the attention.
        tau: the threshold of each query, ``[B, H, Nq]``: scores s with ``(alpha - 1) s <= tau``
            have the weight 0.
        query_mask: which queries are tokens and not padding, ``[B, Nq]``; None for all.

    Returns:
        The numbers of live and of visible blocks per head, ``[H]`` each, summed over the batch.
    """
    n_live, n_visible = live_blocks(
        call.query,
        call.key,
        tau,
        alpha=call.alpha,
        causal=call.causal,
        window=call.window,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        key_padding_mask=call.key_padding_mask,
        query_padding_mask=query_mask,
        scale=call.scale,
    )
    return n_live.sum(dim=0), n_visible.sum(dim=0)


@contextmanager
def record_sparsity(model: nn.Module, *, blocks: bool = True) -> Iterator[SparsityRecord]:
    """Count how sparse the entmax attention of a model is within a ``with`` statement.

    For example::

        with record_sparsity(model) as sparsity:
            model(**batch)  # once or several times
        print(sparsity)

    Counts stay on the device until they are read, so that nothing synchronises. Padding queries are
    not counted. With gradient checkpointing, layers run twice and are counted twice, which does not
    change the fractions.

    Args:
        model: a transformers model, or any module that contains one.
        blocks: whether to count live blocks, too: blocks of 64 queries by 64 keys that hold a
            positive weight. This computes the scores a second time, in fp32.

    Raises:
        ValueError: if the model has no attention layers.
        RuntimeError: within another record of the same layers.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from tilefold.integrations.transformers import use_entmax
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(config)
        >>> use_entmax(model, alpha=2.0)
        >>> with record_sparsity(model) as sparsity:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> len(sparsity.layers)
        2
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
