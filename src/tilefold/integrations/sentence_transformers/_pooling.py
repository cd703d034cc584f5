"""The forwards of an accelerated pair (the head returns its input, the pooling applies it), and
their check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
from tilefold.integrations.transformers.packed import apart, in_eval_mode
from tilefold.modules import fused_pooling as poolings
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    Options,
    ScoreOptions,
    SparseOptions,
)
from tilefold.modules.static_query import counted_tokens
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head import CapacityRows, lsr_head_rows

TEXTS = ["one", "a second text, with a few more tokens than the first"]
TOLERANCE = (
    0.02  # of the largest score: wide enough for bf16 logits and TF32, far below a wrong formula
)
SCALE_TOLERANCE = 1e-2
LONGEST = 64  # tokens, more than either text has
POSITIONS = 4  # of a model that are not for tokens, at most
# options of sparse rows, and their capacity
_sparse: ContextVar[tuple[SparseOptions | None, int | None]] = ContextVar(
    "tilefold_sparse",
    default=(None, None),
)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Within it, in this thread, fused poolings give CSR scores, or rows of a `capacity` where they
    can.
    """
    token = _sparse.set((options, capacity))
    try:
        yield
    finally:
        _sparse.reset(token)


class StockPooling(FusedPooling):
    """The fused scores of a stock ``SpladePooling``, whose options are read at every call."""

    def __init__(self, pooling: SpladePooling, screen: bool) -> None:
        self.stock, self.screen = pooling, screen

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
        stock, cu_seqlens = self.stock, features.get("cu_seq_lens_q")
        out_dtype, sparse = score_options.out_dtype, score_options.sparse
        if poolings.autocasts(head.hidden):
            kind = head.hidden.device.type
            how = (
                stock.pooling_strategy,
                stock.activation_function,
                stock.training,
                cu_seqlens is not None,
            )
            out_dtype = stock_output_dtype(kind, torch.get_autocast_dtype(kind), *how)
        arguments: Options = {
            "attention_mask": features["attention_mask"] if cu_seqlens is None else None,
            "cu_seqlens": cu_seqlens,
            "pooling": stock.pooling_strategy,
            "activation": poolings.STOCK_ACTIVATIONS[stock.activation_function],
            "out_dtype": out_dtype,
            "impl": score_options.impl,
        }
        scores: Any = None
        if sparse is None:
            scores = lsr_head(*head, **arguments, screen=self.screen)
        else:
            arguments |= sparse._asdict()
            if (capacity := _sparse.get()[1]) is not None:
                scores = lsr_head_rows(*head, **arguments, screen=self.screen, capacity=capacity)
            if scores is None:
                scores = lsr_head_sparse(*head, **arguments)
        if stock.embedding_dimension is None:
            stock.embedding_dimension = (
                scores.vocab_size if isinstance(scores, CapacityRows) else scores.shape[1]
            )
        found: Tensor = scores
        return found


def fused_pooling(pooling: FusedPooling | SpladePooling, screen: bool = False) -> FusedPooling:
    """The fused scores of a module: of one of ours its own, of a stock ``SpladePooling`` an
    adapter's.
    """
    return pooling if isinstance(pooling, FusedPooling) else StockPooling(pooling, screen)


class FusedForward(Replacement):
    """Replaces the forward of one pooling.

    Options of the pooling and weights of the head, if there is one, are read (and rounded to
    ``"fp8"``) at every call, since some changes of a weight cannot be detected (``weight.data``,
    numpy, a move). Only the last module of a model may give CSR rows.
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
        self.head, self.impl, self.quantize, self.last = head, impl, quantize, last

    def __call__(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, and take the hidden states of a
        head out of them.
        """
        head, out_dtype = None, None
        if self.head is not None:
            hidden: Tensor = features.pop(
                "token_embeddings",
            )  # [B, S, D], or [1, T, D] when inputs are flattened
            out_dtype = hidden.dtype
            head = head_operands(
                self.head,
                hidden.squeeze(0) if "cu_seq_lens_q" in features else hidden,
            )
            if not poolings.autocasts(hidden):  # some models return fp32 from a half-precision head
                head = head._replace(hidden=head.hidden.to(head.weight.dtype))
            if self.quantize is not None and not torch.is_grad_enabled():
                head = head._replace(weight=quantize_weight(head.weight))
        sparse = None if torch.compiler.is_compiling() or not self.last else _sparse.get()[0]
        features["sentence_embedding"] = self.pooling.fused_scores(
            features,
            head,
            ScoreOptions(out_dtype, self.impl, sparse),
        )
        return features

    # Python puts this name into errors of wrong calls, which then read like those of the stock
    # forward
    __call__.__qualname__ = "SpladePooling.forward"


def fused_forwards(model: nn.Module) -> list[FusedForward]:
    """The forwards of an accelerated model's poolings."""
    found = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in found if isinstance(forward, FusedForward)]


class StaticTokens(Replacement):
    """Replaces the forward of one stock ``SparseStaticEmbedding``: ``[PAD]`` in a text counts in no
    batch.
    """

    def __call__(self, features: Features) -> Features:
        features["attention_mask"] = counted_tokens(features, self.owner.tokenizer)
        found: Features = type(self.owner).forward(self.owner, features)
        return found


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
    """The dtype that stock ``SpladePooling`` returns under autocast, found by running it on one
    token.

    It depends on autocast's lists of operations, on the mode and on the version, so it cannot be
    tabulated.
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
    """A forward of the head that returns known large logits, to see whether the model changes them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits between -250 and 250, ``[..., V]``, in the dtype of ``hidden``."""
        ramp = (
            torch.arange(hidden[..., 0].numel() * self.vocab_size, device=hidden.device) * 37 % 2003
            - 1001
        )
        logits = (ramp * 0.25 + 0.125).to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)
        self.hidden.append(hidden)
        self.logits.append(logits)
        return logits


def check_pair(pair: SpladePair, impl: str) -> None:
    """Run the stock and the fused pair on two short texts; parameters, modes and random state do
    not change.
    """
    if any(type(parameter).__name__ == "DTensor" for parameter in pair.transformer.parameters()):
        remedy = "call it before fully_shard(model), or pass check=False."
        raise RuntimeError(
            f"model must be whole for the check of accelerate(), got a sharded one; {remedy}",
        )
    with as_evaluated((pair.transformer, pair.pooling)):
        try:
            features, probe = (
                tiny_batch(pair.transformer),
                HeadProbe(base_linear(pair.head).out_features),
            )
            with _in_place_of(pair.head, probe):
                output = pair.transformer(dict(features))["token_embeddings"]
            expected = pair.pooling(pair.transformer(dict(features)))["sentence_embedding"]
        except Exception as error:
            why = f"it raised {type(error).__name__}: {error}; move it to its device first, or pass check=False."
            check = "encode two short texts on its device for the check of accelerate()"
            raise RuntimeError(f"model must be able to {check}, but {why}") from error
        _check_logits_untouched(pair, probe, output, features)
        fused = FusedForward(pair.pooling, pair.head, impl)
        with _in_place_of(pair.head, poolings.pass_hidden_states):
            got = fused(pair.transformer(dict(features)))["sentence_embedding"]
        allowed, difference = (
            TOLERANCE * max(1.0, float(expected.abs().max())),
            apart(got, expected),
        )
        if not difference <= allowed:
            far = f"{difference:.3g} (shapes {list(got.shape)} and {list(expected.shape)}); leave it stock; report it."
            stock = f"stock scores within {allowed:.3g} on two short texts"
            raise ValueError(f"fused scores must equal {stock}, got a difference of {far}")


@contextmanager
def _in_place_of(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
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
    name = type(pair.transformer.model).__name__
    if len(probe.logits) != 1:
        raise ValueError(
            f"the LM head must run once per forward, got {len(probe.logits)} in {name}; leave it stock.",
        )
    logits, tokens = probe.logits[0], features["input_ids"].shape
    if logits.shape[:-1] != tokens:
        got = f"{list(logits.shape[:-1])} in {name}"
        how = 'Transformer(..., processing_kwargs={"text": {"logits_to_keep": 0}})'
        remedy = f"load it with {how}."
        raise ValueError(f"the LM head must see every token {list(tokens)}, got {got}; {remedy}")
    if output.shape == logits.shape and torch.equal(output.to(logits.dtype), logits):
        return
    scale = (output.flatten()[0] / logits.flatten()[0]) if output.shape == logits.shape else None
    if scale is not None and torch.allclose(
        output.float(),
        scale.float() * logits.float(),
        rtol=SCALE_TOLERANCE,
    ):
        bias = head_operands(pair.head, probe.hidden[0]).bias
        if bias is None:
            return  # a constant factor on the hidden states is the same factor on the logits
    got = f"changed ones in {name} (soft-capping, a scale on a biased head or a cut of the vocabulary)"
    remedy = "leave the model stock, or call tilefold.ops.lsr_head."
    raise ValueError(
        f"logits must reach SpladePooling as the LM head computes them, got {got}; {remedy}",
    )


def tiny_batch(transformer: Transformer) -> Features:
    """Features of two short texts on the module's device, whole where its own limit would cut them
    to one length.
    """
    device = next(transformer.parameters()).device
    if type(transformer).preprocess is Transformer.preprocess:
        positions = (
            getattr(transformer.model.config, "max_position_embeddings", None)
            or LONGEST + POSITIONS
        )
        whole = {"text": {"max_length": max(1, min(LONGEST, positions - POSITIONS))}}
        features = transformer.preprocess(TEXTS, processing_kwargs=whole)
        Transformer.preprocess(
            transformer,
            TEXTS,
        )  # which leaves its own limit in the tokenizer, and in its files
    else:
        features = transformer.preprocess(TEXTS)
    return on_device(features, device)


@contextmanager
def as_evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in eval mode, and without a graph; afterwards each has its former mode and dimension."""
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
