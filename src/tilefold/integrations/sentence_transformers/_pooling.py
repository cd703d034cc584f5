"""Forwards that ``accelerate`` puts on poolings, and the form of the scores that they return."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.distributed.vocabulary import SharedVocabulary
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import base_linear, head_operands
from tilefold.modules import fused_pooling as poolings
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    ScoreOptions,
    SparseOptions,
)
from tilefold.modules.static_query import mask_without_padding
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head import lsr_head_rows
from tilefold.ops.row_groups import grouping_rows


class _OutputForm(NamedTuple):
    """Form in which fused poolings return scores.

    Attributes:
        options: which entries of a row sparse scores keep; ``None`` for dense scores.
        capacity: the number of entries that is reserved for each sparse row; ``None`` for CSR.
    """

    options: SparseOptions | None = None
    capacity: int | None = None


_DENSE_OUTPUT = _OutputForm()
_output_form: ContextVar[_OutputForm] = ContextVar("tilefold_sparse", default=_DENSE_OUTPUT)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Let fused poolings of this thread return sparse scores.

    Args:
        options: which entries of a row are kept.
        capacity: the number of entries to reserve for each row. Poolings that support it then
            return rows of fixed capacity, which need no synchronisation with the GPU. All others
            return CSR, and every pooling does if this is None.
    """
    token = _output_form.set(_OutputForm(options, capacity))
    try:
        yield
    finally:
        _output_form.reset(token)


class StockPooling(FusedPooling):
    """Computes the scores of sentence-transformers' ``SpladePooling`` without logits.

    Args:
        pooling: the ``SpladePooling``, whose options are read at every call.
        screens_int8: whether a product in int8 first finds the scores that can be positive, so
            that the exact product computes no others.
    """

    def __init__(self, pooling: SpladePooling, screens_int8: bool) -> None:
        self.splade_pooling = pooling
        self.screens_int8 = screens_int8

    @property
    def quantizable(self) -> bool:
        return bool(self.splade_pooling.pooling_strategy == "max")

    @property
    def pooling(self) -> str:
        """The name of the pooling, for messages."""
        return str(self.splade_pooling.pooling_strategy)

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the scores that the ``SpladePooling`` would compute from logits.

        Args:
            features: the output of the Transformer, padded or packed.
            head: the hidden states and the weights of the LM head.
            score_options: the dtype of the scores without autocast, the implementation of the
                operator, and which entries sparse scores keep.

        Returns:
            Scores ``[B, V]``: dense, or in CSR if ``score_options.sparse`` is set. Within the
            context ``sparse_scores(options, capacity)``, a :class:`CapacityRows`, which reserves
            ``capacity`` entries for each row.
        """
        if head is None:
            raise ValueError("a SpladePooling must follow an LM head, got no head.")
        splade_pooling = self.splade_pooling
        cu_seqlens = features.get("cu_seq_lens_q")
        attention_mask = features["attention_mask"] if cu_seqlens is None else None
        out_dtype = score_options.out_dtype
        if poolings.autocast_applies(
            head.hidden
        ):  # autocast decides the dtype, as in SpladePooling
            device_type = head.hidden.device.type
            out_dtype = stock_output_dtype(
                device_type,
                torch.get_autocast_dtype(device_type),
                splade_pooling.pooling_strategy,
                splade_pooling.activation_function,
                training=splade_pooling.training,
                packed=cu_seqlens is not None,
            )
        if score_options.sparse is not None:
            rows: Tensor = self._compute_sparse_scores(
                head,
                attention_mask,
                cu_seqlens,
                out_dtype,
                score_options.sparse,
                score_options.impl,
            )
            return rows
        scores: Tensor = lsr_head(
            head.hidden,
            head.weight,
            head.bias,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            pooling=splade_pooling.pooling_strategy,
            activation=poolings.STOCK_ACTIVATIONS[splade_pooling.activation_function],
            out_dtype=out_dtype,
            screen=self.screens_int8,  # an int8 product first finds the scores that can be positive
            impl=score_options.impl,
        )
        self._store_embedding_dimension(scores.shape[1])
        return scores

    def _compute_sparse_scores(
        self,
        head: Head,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        out_dtype: torch.dtype | None,
        sparse: SparseOptions,
        impl: str,
    ) -> Any:
        """Compute sparse scores, in CSR or as rows with a fixed number of reserved entries.

        The context ``sparse_scores(options, capacity)`` asks for the latter: they need no
        synchronisation with the GPU, and some calls of the operator cannot return them.

        Args:
            head: the hidden states and the weights of the LM head.
            attention_mask: the mask ``[B, S]`` of padded texts.
            cu_seqlens: the offsets ``[B + 1]`` of packed texts.
            out_dtype: the dtype of the scores.
            sparse: which entries are kept.
            impl: the implementation of the operator.
        """
        strategy = self.splade_pooling.pooling_strategy
        activation = poolings.STOCK_ACTIVATIONS[self.splade_pooling.activation_function]
        capacity = _output_form.get().capacity
        if capacity is not None:
            rows = lsr_head_rows(
                head.hidden,
                head.weight,
                head.bias,
                capacity=capacity,
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                pooling=strategy,
                activation=activation,
                out_dtype=out_dtype,
                top_k=sparse.top_k,
                min_weight=sparse.min_weight,
                screen=self.screens_int8,
                impl=impl,
            )
            if rows is not None:  # this call could return them
                self._store_embedding_dimension(rows.vocab_size)
                return rows
        scores = lsr_head_sparse(
            head.hidden,
            head.weight,
            head.bias,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            pooling=strategy,
            activation=activation,
            out_dtype=out_dtype,
            top_k=sparse.top_k,
            min_weight=sparse.min_weight,
            impl=impl,
        )
        self._store_embedding_dimension(scores.shape[1])
        return scores

    def _store_embedding_dimension(self, vocab_size: int) -> None:
        """Store the number of columns V in the ``SpladePooling``, as its first forward does."""
        if self.splade_pooling.embedding_dimension is None:
            self.splade_pooling.embedding_dimension = vocab_size


def fused_pooling(
    pooling: FusedPooling | SpladePooling,
    screens_int8: bool = False,
) -> FusedPooling:
    """Return the fused pooling of a module: itself, or an adapter of a ``SpladePooling``.

    Args:
        pooling: the pooling.
        screens_int8: whether a product in int8 first finds the scores that can be positive; only
            for a ``SpladePooling``.
    """
    return pooling if isinstance(pooling, FusedPooling) else StockPooling(pooling, screens_int8)


class FusedForward(Replacement):
    """Replaces the forward of one pooling, which then computes scores without logits.

    Options of the pooling and weights of the head are read at every call, because changes of a
    weight cannot always be detected (through ``weight.data`` or numpy, or by a move). For the same
    reason, they are rounded to fp8 at every call.

    Attributes:
        pooling: the fused pooling.
        head: the LM head before the pooling; ``None`` if the pooling reads no logits.
        impl: the implementation of the operator.
        quantize: ``"fp8"`` to round head and hidden states if no gradient is needed, or ``None``.
        is_last: whether the pooling is the last module of the model. Only the last module may
            return sparse scores.
        groups_rows: whether the scores of a text must have the same bits in every batch, see
            :mod:`tilefold.ops.row_groups`.
        vocabulary: the ranks that divide the rows of the head among them; ``None`` if this rank has
            the whole head.
    """

    groups_rows = False
    vocabulary: SharedVocabulary | None = None

    def __init__(
        self,
        pooling: FusedPooling | SpladePooling,
        head: nn.Module | None,
        impl: str,
        quantize: str | None = None,
        is_last: bool = True,
        screens_int8: bool = False,
    ) -> None:
        """Store the parts of the fused forward.

        Args:
            pooling: the pooling.
            head: the LM head before the pooling; None if the pooling reads no logits.
            impl: the implementation of the operator.
            quantize: ``"fp8"`` or None.
            is_last: whether the pooling is the last module of the model.
            screens_int8: whether a product in 8 bits first finds the scores that can be positive.
        """
        super().__init__(pooling)
        self.pooling = fused_pooling(pooling, screens_int8)
        self.head = head
        self.impl = impl
        self.quantize = quantize
        self.is_last = is_last

    def __call__(self, features: Features) -> Features:
        """Add the scores ``sentence_embedding``, ``[B, V]``, to the output of the Transformer.

        If the pooling reads an LM head, the hidden states ``token_embeddings`` (``[B, S, D]`` or
        packed ``[1, T, D]``) are removed. Modules after the pooling expect logits there, which are
        not computed.

        Args:
            features: the output of the Transformer.

        Returns:
            The same features with the scores.
        """
        operands = None
        out_dtype = None
        if self.head is not None and self.vocabulary is not None:
            features["sentence_embedding"] = self._compute_shared_scores(
                features,
                self.head,
                self.vocabulary,
            )
            return features
        if self.head is not None:
            hidden: Tensor = features.pop("token_embeddings")
            out_dtype = hidden.dtype
            is_packed = "cu_seq_lens_q" in features
            operands = self._prepare_operands(self.head, hidden.squeeze(0) if is_packed else hidden)
        sparse = None  # dense scores
        # Modules after this one expect dense scores. Compiled code cannot read a context variable.
        if self.is_last and not torch.compiler.is_compiling():
            sparse = _output_form.get().options
        with grouping_rows(self.groups_rows):
            features["sentence_embedding"] = self.pooling.fused_scores(
                features,
                operands,
                ScoreOptions(out_dtype, self.impl, sparse),
            )
        return features

    def _compute_shared_scores(
        self,
        features: Features,
        head: nn.Module,
        vocabulary: SharedVocabulary,
    ) -> Tensor:
        """Compute scores with an LM head whose weight ``[V, D]`` is divided among ranks by rows.

        Each rank gathers the hidden states of all ranks, and computes the scores of all texts for
        its terms. Then the ranks exchange scores, and each gets all terms of its own texts.

        Args:
            features: the output of the Transformer for packed texts. The hidden states are removed.
            head: the LM head, whose weight is a DTensor.
            vocabulary: the ranks that share the head, with their collective operations.

        Returns:
            Scores ``[B, V]`` of this rank's texts.

        Raises:
            RuntimeError: if texts are padded.
        """
        if "cu_seq_lens_q" not in features:
            raise RuntimeError(
                "texts must be packed for a head that ranks share, got padded ones; leave "
                "split_vocabulary out.",
            )
        hidden: Tensor = features.pop("token_embeddings")
        tokens = vocabulary.gather_tokens(hidden.squeeze(0), features["cu_seq_lens_q"])
        linear = base_linear(head)
        all_hidden = tokens.hidden
        if not poolings.autocast_applies(all_hidden):
            all_hidden = all_hidden.to(linear.weight.dtype)
        scores = self.pooling.fused_scores(
            {"cu_seq_lens_q": tokens.cu_seqlens},
            Head(all_hidden, linear.weight, linear.bias),
            ScoreOptions(hidden.dtype, self.impl, None),
        )
        return vocabulary.own_rows(scores)

    def _prepare_operands(self, head: nn.Module, hidden: Tensor) -> Head:
        """Return hidden states and the weights of the LM head, in the dtypes of their product.

        Args:
            head: the LM head.
            hidden: hidden states ``[B, S, D]`` or packed ``[T, D]``.
        """
        operands = head_operands(head, hidden)
        if not poolings.autocast_applies(hidden):
            # Some models convert the output of a half-precision head to fp32. The output of a fused
            # head is the hidden states, which are converted back.
            cast_hidden = operands.hidden.to(operands.weight.dtype)
            operands = operands._replace(hidden=cast_hidden)
        if self.quantize is not None and not torch.is_grad_enabled():
            operands = operands._replace(weight=quantize_weight(operands.weight))
        return operands

    # Python puts this name into the errors of wrong calls. So they read like errors of the original
    # forward.
    __call__.__qualname__ = "SpladePooling.forward"


def fused_forwards(model: nn.Module) -> list[FusedForward]:
    """Return the fused forwards of an accelerated model's poolings."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedForward)]


class StaticTokens(Replacement):
    """Replaces the forward of a ``SparseStaticEmbedding``, which then ignores ``[PAD]`` tokens."""

    def __call__(self, features: Features) -> Features:
        """Run the original forward with a mask that excludes padding tokens."""
        features["attention_mask"] = mask_without_padding(features, self.owner.tokenizer)
        outputs: Features = type(self.owner).forward(self.owner, features)
        return outputs


def count_no_padding(model: nn.Module) -> None:
    """Put :class:`StaticTokens` on every ``SparseStaticEmbedding`` of a model."""
    for module in model.modules():
        if type(module) is SparseStaticEmbedding and "forward" not in vars(module):
            module.forward = StaticTokens(module)


@functools.lru_cache(maxsize=64)
def stock_output_dtype(
    device: str,
    autocast_dtype: torch.dtype,
    pooling: str,
    activation: str,
    training: bool,
    packed: bool,
) -> torch.dtype:
    """Return the dtype of the scores that sentence-transformers' ``SpladePooling`` computes.

    Under autocast, the dtype depends on the operations that autocast converts, on the mode of the
    module and on torch's version. So it is measured by pooling a single logit.

    Args:
        device: the type of the device, such as ``"cuda"``.
        autocast_dtype: the dtype of autocast on this device.
        pooling: the ``pooling_strategy`` of the module.
        activation: the ``activation_function`` of the module.
        training: whether the module is in training mode.
        packed: whether texts are packed.
    """
    splade_pooling = SpladePooling(pooling, activation).train(training)
    with torch.no_grad(), torch.autocast(device, dtype=autocast_dtype):
        hidden = torch.zeros(1, 1, 1, device=device)
        weight = torch.zeros(1, 1, device=device)
        features = {
            # Autocast chooses the dtype of the logit, as it does for those of an LM head.
            "token_embeddings": linear(hidden, weight),
            "attention_mask": torch.ones(1, 1, device=device),
        }
        if packed:
            features["cu_seq_lens_q"] = torch.tensor([0, 1])  # one text of one token
        dtype: torch.dtype = splade_pooling(features)["sentence_embedding"].dtype
    return dtype
