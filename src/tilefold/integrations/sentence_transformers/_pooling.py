"""Forwards that ``accelerate`` puts on LM heads and poolings, and the check that compares them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import (
    SpladePair,
    base_linear,
    head_operands,
)
from tilefold.integrations.sentence_transformers.packing.inputs import on_device
from tilefold.integrations.transformers.networks import in_eval_mode, largest_difference
from tilefold.modules import fused_pooling as poolings
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    ScoreOptions,
    SparseOptions,
)
from tilefold.modules.static_query import counted_tokens
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head import CapacityRows, lsr_head_rows

TEXTS = ["one", "a second text, with a few more tokens than the first"]
# Allowed difference relative to the largest score: wide enough for bf16 logits and TF32, far below
# the difference that a wrong formula makes.
TOLERANCE = 0.02
SCALE_TOLERANCE = 1e-2
LONGEST = 64  # tokens, more than either text has
# Largest number of position embeddings that a model does not use for tokens.
RESERVED_POSITIONS = 4


class _SparseOutput(NamedTuple):
    """Form in which fused poolings return scores: CSR with some options, or rows of a capacity."""

    options: SparseOptions | None = None
    capacity: int | None = None


_DENSE_OUTPUT = _SparseOutput()
_sparse_output: ContextVar[_SparseOutput] = ContextVar("tilefold_sparse", default=_DENSE_OUTPUT)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Let fused poolings return sparse scores in this thread.

    Args:
        options: which entries of a row are kept.
        capacity: number of entries per row. Poolings that can then return rows of this capacity
            instead of CSR.
    """
    token = _sparse_output.set(_SparseOutput(options, capacity))
    try:
        yield
    finally:
        _sparse_output.reset(token)


class StockPooling(FusedPooling):
    """Computes the scores of a stock ``SpladePooling`` without logits.

    Args:
        pooling: the stock module, whose options are read at every call.
        screen: see ``accelerate``.
    """

    def __init__(self, pooling: SpladePooling, screen: bool) -> None:
        self.stock = pooling
        self.screen = screen

    @property
    def quantizable(self) -> bool:
        return bool(self.stock.pooling_strategy == "max")

    @property
    def pooling(self) -> str:
        """Its name, for messages."""
        return str(self.stock.pooling_strategy)

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        if head is None:
            raise ValueError("a SpladePooling must follow an LM head, got no head.")
        stock = self.stock
        cu_seqlens = features.get("cu_seq_lens_q")
        out_dtype = score_options.out_dtype
        if poolings.autocasts(head.hidden):
            device_type = head.hidden.device.type
            out_dtype = stock_output_dtype(
                device_type,
                torch.get_autocast_dtype(device_type),
                stock.pooling_strategy,
                stock.activation_function,
                training=stock.training,
                flattened=cu_seqlens is not None,
            )
        attention_mask = features["attention_mask"] if cu_seqlens is None else None
        activation = poolings.STOCK_ACTIVATIONS[stock.activation_function]
        scores: Any = None
        if score_options.sparse is None:
            scores = lsr_head(
                head.hidden,
                head.weight,
                head.bias,
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                pooling=stock.pooling_strategy,
                activation=activation,
                out_dtype=out_dtype,
                screen=self.screen,
                impl=score_options.impl,
            )
        else:
            capacity = _sparse_output.get().capacity
            if capacity is not None:
                scores = lsr_head_rows(
                    head.hidden,
                    head.weight,
                    head.bias,
                    capacity=capacity,
                    attention_mask=attention_mask,
                    cu_seqlens=cu_seqlens,
                    pooling=stock.pooling_strategy,
                    activation=activation,
                    out_dtype=out_dtype,
                    top_k=score_options.sparse.top_k,
                    min_weight=score_options.sparse.min_weight,
                    screen=self.screen,
                    impl=score_options.impl,
                )
            if scores is None:  # no capacity, or this call cannot return rows of a capacity
                scores = lsr_head_sparse(
                    head.hidden,
                    head.weight,
                    head.bias,
                    attention_mask=attention_mask,
                    cu_seqlens=cu_seqlens,
                    pooling=stock.pooling_strategy,
                    activation=activation,
                    out_dtype=out_dtype,
                    top_k=score_options.sparse.top_k,
                    min_weight=score_options.sparse.min_weight,
                    impl=score_options.impl,
                )
        if stock.embedding_dimension is None:
            is_capacity_rows = isinstance(scores, CapacityRows)
            stock.embedding_dimension = scores.vocab_size if is_capacity_rows else scores.shape[1]
        result: Tensor = scores
        return result


def fused_pooling(pooling: FusedPooling | SpladePooling, screen: bool = False) -> FusedPooling:
    """Return a module of :mod:`tilefold.modules`, or an adapter of a stock ``SpladePooling``."""
    return pooling if isinstance(pooling, FusedPooling) else StockPooling(pooling, screen)


class FusedForward(Replacement):
    """Replaces the forward of one pooling.

    Options of the pooling and weights of the head, if there is one, are read (and rounded to
    ``"fp8"``) at every call, since some changes of a weight cannot be detected (``weight.data``,
    numpy, a move).

    Args:
        pooling: the pooling.
        head: the LM head before it, if the pooling reads logits.
        impl: implementation of the operator.
        quantize: ``"fp8"`` or ``None``.
        last: whether the pooling is the model's last module. Only that one may return CSR rows.
        screen: see ``accelerate``.
    """

    def __init__(
        self,
        pooling: FusedPooling | SpladePooling,
        head: nn.Module | None,
        impl: str,
        quantize: str | None = None,
        last: bool = True,
        screen: bool = False,
    ) -> None:
        super().__init__(pooling)
        self.pooling = fused_pooling(pooling, screen)
        self.head = head
        self.impl = impl
        self.quantize = quantize
        self.last = last

    def __call__(self, features: Features) -> Features:
        """Compute ``sentence_embedding`` ``[B, V]`` and remove the head's hidden states.

        Args:
            features: output of the Transformer. Its ``token_embeddings`` are hidden states
                ``[B, S, D]``, or ``[1, T, D]`` of packed texts.
        """
        operands = None
        out_dtype = None
        if self.head is not None:
            hidden: Tensor = features.pop("token_embeddings")
            out_dtype = hidden.dtype
            is_packed = "cu_seq_lens_q" in features
            operands = head_operands(self.head, hidden.squeeze(0) if is_packed else hidden)
            if not poolings.autocasts(hidden):
                # Some models return fp32 from a half-precision head.
                cast_hidden = operands.hidden.to(operands.weight.dtype)
                operands = operands._replace(hidden=cast_hidden)
            if self.quantize is not None and not torch.is_grad_enabled():
                operands = operands._replace(weight=quantize_weight(operands.weight))
        sparse = None
        if self.last and not torch.compiler.is_compiling():
            sparse = _sparse_output.get().options
        features["sentence_embedding"] = self.pooling.fused_scores(
            features,
            operands,
            ScoreOptions(out_dtype, self.impl, sparse),
        )
        return features

    # Python puts this name into the errors of wrong calls, which then read like those of the stock
    # forward.
    __call__.__qualname__ = "SpladePooling.forward"


def fused_forwards(model: nn.Module) -> list[FusedForward]:
    """Return the fused forwards of an accelerated model's poolings."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedForward)]


class StaticTokens(Replacement):
    """Forward of a stock ``SparseStaticEmbedding`` that gives ``[PAD]`` in a text no weight."""

    def __call__(self, features: Features) -> Features:
        features["attention_mask"] = counted_tokens(features, self.owner.tokenizer)
        outputs: Features = type(self.owner).forward(self.owner, features)
        return outputs


def count_no_padding(model: nn.Module) -> None:
    """Put :class:`StaticTokens` on the stock static modules of a model."""
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
    flattened: bool,
) -> torch.dtype:
    """Return the dtype of stock ``SpladePooling`` scores under autocast, by running it once.

    It depends on autocast's lists of operations, on the mode and on the version, so that no table
    can hold it.

    Args:
        device: type of the device, such as ``"cuda"``.
        autocast_dtype: dtype of autocast on this device.
        pooling: the module's ``pooling_strategy``.
        activation: its ``activation_function``.
        training: whether the module is in training mode.
        flattened: whether texts are packed.
    """
    stock = SpladePooling(pooling, activation).train(training)
    with torch.no_grad(), torch.autocast(device, dtype=autocast_dtype):
        token = torch.zeros(1, 1, 1, device=device)
        features = {
            "token_embeddings": linear(token, token[0]),
            "attention_mask": torch.ones(1, 1, device=device),
        }
        if flattened:
            features["cu_seq_lens_q"] = torch.tensor([0, 1])
        dtype: torch.dtype = stock(features)["sentence_embedding"].dtype
    return dtype


class HeadProbe:
    """A forward of the LM head that returns logits known in advance.

    They show whether the model changes logits after its head.

    Attributes:
        hidden: the input of each call.
        logits: the output of each call.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` between -250 and 250, in the dtype of ``hidden``."""
        n_tokens = hidden[..., 0].numel()
        numbers = torch.arange(n_tokens * self.vocab_size, device=hidden.device)
        ramp = numbers * 37 % 2003 - 1001
        logits = (ramp * 0.25 + 0.125).to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)
        self.hidden.append(hidden)
        self.logits.append(logits)
        return logits


def check_pair(pair: SpladePair, impl: str) -> None:
    """Compare stock and fused scores of two short texts.

    Parameters, modes and the random state do not change.

    Args:
        pair: the modules.
        impl: implementation of the operator.

    Raises:
        ValueError: if scores differ, or the model changes logits after its LM head.
        RuntimeError: if the model cannot run, or is sharded.
    """
    if any(type(parameter).__name__ == "DTensor" for parameter in pair.transformer.parameters()):
        raise RuntimeError(
            "model must be whole for the check of accelerate(), got a sharded one; "
            "call it before fully_shard(model), or pass check=False.",
        )
    with as_evaluated((pair.transformer, pair.pooling)):
        try:
            features = tiny_batch(pair.transformer)
            probe = HeadProbe(base_linear(pair.head).out_features)
            with _replaced_forward(pair.head, probe):
                probe_output = pair.transformer(dict(features))["token_embeddings"]
            expected = pair.pooling(pair.transformer(dict(features)))["sentence_embedding"]
        except Exception as error:
            raise RuntimeError(
                "model must be able to encode two short texts on its device for the check of "
                f"accelerate(), but it raised {type(error).__name__}: {error}; "
                "move it to its device first, or pass check=False.",
            ) from error
        _check_logits_untouched(pair, probe, probe_output, features)
        fused = FusedForward(pair.pooling, pair.head, impl)
        with _replaced_forward(pair.head, poolings.pass_hidden_states):
            scores = fused(pair.transformer(dict(features)))["sentence_embedding"]
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        difference = largest_difference(scores, expected)
        if not difference <= allowed:  # a NaN is no small difference
            raise ValueError(
                f"fused scores must equal stock scores within {allowed:.3g} on two short texts, "
                f"got a difference of {difference:.3g} (shapes {list(scores.shape)} and "
                f"{list(expected.shape)}); leave it stock; report it.",
            )


@contextmanager
def _replaced_forward(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the forward of an LM head on the instance within the context."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _check_logits_untouched(
    pair: SpladePair,
    probe: HeadProbe,
    output: Tensor,
    features: Features,
) -> None:
    """Raise an error if the model changes logits after its LM head.

    Args:
        pair: the modules.
        probe: the head's forward in a run of the model.
        output: what the Transformer returned in this run.
        features: the input of the run.
    """
    name = type(pair.transformer.model).__name__
    if len(probe.logits) != 1:
        raise ValueError(
            f"the LM head must run once per forward, got {len(probe.logits)} in {name}; "
            "leave it stock.",
        )
    logits = probe.logits[0]
    expected_shape = features["input_ids"].shape
    if logits.shape[:-1] != expected_shape:
        raise ValueError(
            f"the LM head must see every token {list(expected_shape)}, "
            f"got {list(logits.shape[:-1])} in {name}; load it with "
            'Transformer(..., processing_kwargs={"text": {"logits_to_keep": 0}}).',
        )
    if output.shape == logits.shape:
        if torch.equal(output.to(logits.dtype), logits):
            return
        scale = (output.flatten()[0] / logits.flatten()[0]).float()
        scaled_logits = scale * logits.float()
        is_scaled = torch.allclose(output.float(), scaled_logits, rtol=SCALE_TOLERANCE)
        # Without a bias, a factor on the hidden states is the same factor on the logits.
        if is_scaled and head_operands(pair.head, probe.hidden[0]).bias is None:
            return
    raise ValueError(
        "logits must reach SpladePooling as the LM head computes them, "
        f"got changed ones in {name} (soft-capping, a scale on a biased head or a cut of the "
        "vocabulary); leave the model stock, or call tilefold.ops.lsr_head.",
    )


def tiny_batch(transformer: Transformer) -> Features:
    """Return features of two short texts on the module's device.

    A smaller limit of the module is raised, so that the texts keep different lengths.
    """
    device = next(transformer.parameters()).device
    if type(transformer).preprocess is not Transformer.preprocess:
        return on_device(transformer.preprocess(TEXTS), device)
    n_positions = getattr(transformer.model.config, "max_position_embeddings", None)
    if not n_positions:
        n_positions = LONGEST + RESERVED_POSITIONS
    max_length = max(1, min(LONGEST, n_positions - RESERVED_POSITIONS))
    options = {"text": {"max_length": max_length}}
    features = transformer.preprocess(TEXTS, processing_kwargs=options)
    # This restores the module's limit in the tokenizer, which is saved with the model.
    Transformer.preprocess(transformer, TEXTS)
    return on_device(features, device)


@contextmanager
def as_evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode without gradients, and restore modes and dimensions at the end."""
    dimensions = [
        (module, module.embedding_dimension)
        for module in modules
        if "embedding_dimension" in vars(module)
    ]
    try:
        with in_eval_mode(*modules), torch.no_grad():
            yield
    finally:
        for module, dimension in dimensions:
            module.embedding_dimension = dimension
