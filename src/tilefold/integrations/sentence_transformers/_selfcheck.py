"""Checks on two short texts, when a pair is accelerated, that the fused head computes what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from tilefold.integrations.sentence_transformers._batch import on_device
from tilefold.integrations.sentence_transformers._heads import SpladePair, base_linear, head_operands
from tilefold.integrations.sentence_transformers._pooling import FusedForward, pass_hidden_states
from tilefold.integrations.transformers.packed import in_eval_mode
from tilefold.modules.fused_pooling import Features

TEXTS = ["one", "a second text, with a few more tokens than the first"]
TOLERANCE = 0.02  # of the largest score: wide enough for bf16 logits and TF32, far below a wrong formula
SCALE_TOLERANCE = 1e-2
LONGEST = 64  # tokens, more than either text has
POSITIONS = 4  # of a model that are not for tokens, at most


class HeadProbe:
    """A forward of the head that returns known large logits, to see whether the model changes them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits between -250 and 250, ``[..., V]``, in the dtype of ``hidden``."""
        count = hidden[..., 0].numel() * self.vocab_size
        ramp = torch.arange(count, device=hidden.device) * 37 % 2003 - 1001
        logits = (ramp * 0.25 + 0.125).to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)
        self.hidden.append(hidden)
        self.logits.append(logits)
        return logits


def check_pair(pair: SpladePair, impl: str) -> None:
    """Run the stock and the fused pair on two short texts; parameters, modes and random state do not change."""
    if any(type(parameter).__name__ == "DTensor" for parameter in pair.transformer.parameters()):
        raise RuntimeError(
            "model must be whole for the check of accelerate(), got one whose parameters are sharded; call "
            "accelerate(model) before fully_shard(model), or pass check=False."
        )
    with as_evaluated((pair.transformer, pair.pooling)):
        try:
            features, probe = tiny_batch(pair.transformer), HeadProbe(base_linear(pair.head).out_features)
            with _in_place_of(pair.head, probe):
                output = pair.transformer(dict(features))["token_embeddings"]
            expected = pair.pooling(pair.transformer(dict(features)))["sentence_embedding"]
        except Exception as error:
            raise RuntimeError(
                f"model must be able to encode two short texts on its device for the check of accelerate(), but it "
                f"raised {type(error).__name__}: {error}; move it to its device first, or pass check=False."
            ) from error
        _check_logits_untouched(pair, probe, output, features)
        fused = FusedForward(pair.pooling, pair.head, impl)
        with _in_place_of(pair.head, pass_hidden_states):
            got = fused(pair.transformer(dict(features)))["sentence_embedding"]
        _check_scores(got, expected)


@contextmanager
def _in_place_of(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _check_logits_untouched(pair: SpladePair, probe: HeadProbe, output: Tensor, features: Features) -> None:
    name = type(pair.transformer.model).__name__
    if len(probe.logits) != 1:
        raise ValueError(
            f"the LM head must run once per forward, got {len(probe.logits)} calls in {name}; this architecture "
            "applies its vocabulary matrix elsewhere and cannot be accelerated."
        )
    logits, tokens = probe.logits[0], features["input_ids"].shape
    if logits.shape[:-1] != tokens:
        raise ValueError(
            f"the LM head must see every token {list(tokens)}, got {list(logits.shape[:-1])} in {name}; load causal "
            'models with Transformer(..., processing_kwargs={"text": {"logits_to_keep": 0}}), which needs '
            "sentence-transformers 6.2 or later."
        )
    if output.shape == logits.shape and torch.equal(output.to(logits.dtype), logits):
        return
    scale = (output.flatten()[0] / logits.flatten()[0]) if output.shape == logits.shape else None
    if scale is not None and torch.allclose(output.float(), scale.float() * logits.float(), rtol=SCALE_TOLERANCE):
        bias = head_operands(pair.head, probe.hidden[0]).bias
        if bias is None:
            return  # a constant factor on the hidden states is the same factor on the logits
    raise ValueError(
        f"logits must reach SpladePooling as the LM head computes them, got changed ones in {name} (soft-capping, a "
        "scale on a biased head or a cut of the vocabulary); call tilefold.ops.lsr_head where such logits are not "
        "wanted, or leave the model stock."
    )


def _check_scores(got: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    difference = float((got.float() - expected.float()).abs().max()) if got.shape == expected.shape else float("nan")
    if not difference <= TOLERANCE * scale:
        raise ValueError(
            f"fused scores must equal stock scores within {TOLERANCE * scale:.3g} on two short texts, got a "
            f"difference of {difference:.3g} (shapes {list(got.shape)} and {list(expected.shape)}); please report the "
            "model, and leave it stock."
        )


def tiny_batch(transformer: Any) -> Features:
    """Features of two short texts on the module's device, whole where its own limit would cut them to one length."""
    device = next(transformer.parameters()).device
    if type(transformer).preprocess is Transformer.preprocess:
        positions = getattr(transformer.model.config, "max_position_embeddings", None) or LONGEST + POSITIONS
        whole = {"text": {"max_length": max(1, min(LONGEST, positions - POSITIONS))}}
        features = transformer.preprocess(TEXTS, processing_kwargs=whole)
        Transformer.preprocess(transformer, TEXTS)  # which leaves its own limit in the tokenizer, and in its files
    else:
        features = transformer.preprocess(TEXTS)
    return on_device(features, device)


@contextmanager
def as_evaluated(modules: Sequence[Any]) -> Iterator[None]:
    """Modules in eval mode, and without a graph; afterwards each has its former mode and dimension."""
    dimensions = [(module, module.embedding_dimension) for module in modules if "embedding_dimension" in vars(module)]
    try:
        with in_eval_mode(*modules), torch.no_grad():
            yield
    finally:
        for module, dimension in dimensions:
            module.embedding_dimension = dimension
