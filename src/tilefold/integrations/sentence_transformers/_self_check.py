"""Self-checks of ``accelerate(check=True)``, which compare the accelerated with the stock model.

They run at every call of ``accelerate``, so also at every load of a model by a command:

| check | called by | forward passes |
|---|---|---|
| :func:`check_pair` | ``_accelerate._fuse_heads`` | three for each LM head |
| ``transformers.packed.use_packed`` | ``packing.accelerate.pack_inputs`` | two for each network |
| ``packing.accelerate.pack_inputs`` | ``_accelerate._pack`` | two for each route of a model |
| :func:`check_similarity` | ``_accelerate._fuse_similarity`` | none, only scores of vectors |

A route in 16 bits, whose packed and padded outputs differ by what may be rounding, runs twice more
as a copy in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold._internal.typing import Model
from tilefold.integrations.sentence_transformers._heads import (
    SpladePair,
    base_linear,
    head_operands,
)
from tilefold.integrations.sentence_transformers._pooling import FusedForward
from tilefold.integrations.sentence_transformers.packing.inputs import on_device
from tilefold.integrations.transformers.networks import in_eval_mode, largest_difference
from tilefold.modules.fused_pooling import Features, pass_hidden_states

_TEXTS = ["one", "a second text, with a few more tokens than the first"]
# Allowed difference relative to the largest score: wide enough for bf16 logits and TF32, far below
# the difference that a wrong formula makes.
TOLERANCE = 0.02
# Allowed relative difference of a factor between all logits.
_SCALE_TOLERANCE = 1e-2
# Length in tokens at which the two texts are truncated, which is more than either has.
_MAX_LENGTH = 64
# Largest number of position embeddings that a model does not use for tokens.
_RESERVED_POSITIONS = 4
# Allowed difference of similarities, relative to the largest score: the stock function rounds
# similarities to bf16.
_SIMILARITY_TOLERANCE = 2**-6


class HeadProbe:
    """A forward of the LM head that returns logits known in advance.

    They show whether the model changes logits after its head.

    Attributes:
        hidden: the input of each call.
        logits: the output of each call.
    """

    def __init__(self, vocab_size: int) -> None:
        """Create the probe of a head with ``vocab_size`` logits per token."""
        self.vocab_size = vocab_size
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` between -251 and 251, in the dtype of ``hidden``.

        The values are large enough that a soft cap on logits would change them.

        Args:
            hidden: hidden states ``[..., D]``. Only their shape, dtype and device matter.
        """
        n_tokens = hidden[..., 0].numel()
        numbers = torch.arange(n_tokens * self.vocab_size, device=hidden.device)
        # Whole numbers from -1001 to 1001. Neighbours differ much: 37 and the prime 2003 share no
        # factor.
        spread = numbers * 37 % 2003 - 1001
        # Quarters with an offset, so that no logit is 0, which a factor would not change.
        logits = (spread * 0.25 + 0.125).to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)
        self.hidden.append(hidden)
        self.logits.append(logits)
        return logits


def check_pair(pair: SpladePair, impl: str) -> None:
    """Compare stock and fused scores of two short texts, in three forward passes.

    The first one probes whether the model changes logits after its LM head, the second one computes
    stock scores and the third one fused scores. Parameters, modes and the random state do not
    change.

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
        with _replaced_forward(pair.head, pass_hidden_states):
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

    The head's forward was replaced by a probe in a run of the model. The Transformer must have
    returned the probe's logits, or the logits times a factor if the head has no bias.

    Args:
        pair: the modules.
        probe: the probe after the run.
        output: logits that the Transformer returned in this run.
        features: the input of the run.

    Raises:
        ValueError: if the logits were changed, or the head did not see every token once.
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
        is_scaled = torch.allclose(output.float(), scaled_logits, rtol=_SCALE_TOLERANCE)
        # Without a bias, a factor on the hidden states is the same factor on the logits.
        if is_scaled and head_operands(pair.head, probe.hidden[0]).bias is None:
            return
    raise ValueError(
        "logits must reach SpladePooling as the LM head computes them, "
        f"got changed ones in {name} (soft-capping, a scale on a biased head or a cut of the "
        "vocabulary); leave the model stock, or call tilefold.ops.lsr_head.",
    )


def tiny_batch(transformer: Transformer) -> Features:
    """Return features of two short texts of different lengths on the module's device.

    Different lengths are needed, so that the shorter text has padding. A module that truncates
    texts to a few tokens would give both the same length. Its limit is raised for this call.

    Args:
        transformer: the Transformer module, whose ``preprocess`` tokenises the texts.
    """
    device = next(transformer.parameters()).device
    if type(transformer).preprocess is not Transformer.preprocess:
        return on_device(transformer.preprocess(_TEXTS), device)
    n_positions = getattr(transformer.model.config, "max_position_embeddings", None)
    if not n_positions:
        n_positions = _MAX_LENGTH + _RESERVED_POSITIONS
    max_length = max(1, min(_MAX_LENGTH, n_positions - _RESERVED_POSITIONS))
    options = {"text": {"max_length": max_length}}
    features = transformer.preprocess(_TEXTS, processing_kwargs=options)
    # This restores the module's limit in the tokenizer, which is saved with the model.
    Transformer.preprocess(transformer, _TEXTS)
    return on_device(features, device)


@contextmanager
def as_evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode without gradients within a context, and restore them at the end.

    The modes are restored, and ``embedding_dimension``, which the first forward of a pooling sets.

    Args:
        modules: the modules.
    """
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


def check_similarity(model: Model, name: str, function: Callable[..., Tensor]) -> None:
    """Compare fused and stock scores of a few vectors, on the model's device and in its dtype.

    Args:
        model: a MultiVectorEncoder.
        name: name of its method.
        function: the function that will replace the method.

    Raises:
        ValueError: if scores differ.
        RuntimeError: if the model cannot score.
    """
    floating_parameters = (
        parameter for parameter in model.parameters() if parameter.is_floating_point()
    )
    parameter = next(floating_parameters, torch.zeros(1))
    # Two queries of 3 and 1 vectors, and two documents of 4 and 2 vectors.
    n_vectors = 10
    dim = 16
    vectors = torch.arange(n_vectors * dim, dtype=torch.float32).sin().view(n_vectors, dim)
    vectors = vectors.to(parameter.device, parameter.dtype)
    queries = [vectors[:3], vectors[3:4]]
    documents = [vectors[4:8], vectors[8:]]
    try:
        with torch.no_grad():
            expected = getattr(model, name)(queries, documents)
            scores = function(queries, documents)
        difference = largest_difference(scores, expected)
        allowed = _SIMILARITY_TOLERANCE * expected.abs().max().item()
    except Exception as error:
        raise RuntimeError(
            f"model must be able to score four short sequences on {parameter.device} for the check "
            f"of accelerate(), but it raised {type(error).__name__}: {error}; "
            "move it to its device first, or pass check=False.",
        ) from error
    if not difference <= allowed:  # a NaN is no small difference
        raise ValueError(
            f"fused scores must equal those of model.{name} within {allowed:.3g} on four "
            f"short sequences, got {difference:.3g} (shapes {list(scores.shape)} and "
            f"{list(expected.shape)}); leave such a model stock.",
        )
