"""Self-checks of ``accelerate(check=True)``, which compare a model before and after.

They run until a model has passed them (:mod:`._check_record`):

| check | called by | forward passes |
|---|---|---|
| :func:`check_fused_head` | ``_accelerate._fuse_heads`` | one for each LM head, which runs thrice |
| ``transformers.packed.use_packed`` | ``packing.accelerate.pack_inputs`` | two for each network |
| ``packing.accelerate.pack_inputs`` | ``_accelerate.accelerate`` | two for each route of a model |
| :func:`check_fused_similarity` | ``_accelerate._fuse_similarity`` | none, only scores of vectors |

A route in 16 bits, whose packed and padded outputs differ by what may be rounding, runs twice more
as a copy in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold._internal.typing import Model
from tilefold.integrations.sentence_transformers._heads import (
    FusablePooling,
    base_linear,
    head_operands,
)
from tilefold.integrations.sentence_transformers._pooling import FusedForward
from tilefold.integrations.sentence_transformers.packing.inputs import on_device
from tilefold.integrations.transformers.networks import in_eval_mode, largest_difference
from tilefold.modules.fused_pooling import Features, pass_hidden_states

_TEXTS = ["one", "a second text, with a few more tokens than the first"]
# The allowed difference of scores, relative to the largest score. It is wide enough for bf16 logits
# and TF32, but far below the difference that a wrong formula makes.
TOLERANCE = 0.02
# The allowed relative error of a factor that all logits have in common.
_SCALE_TOLERANCE = 1e-2
# The number of tokens at which the two texts are truncated, more than either has.
_MAX_LENGTH = 64
# The largest number of position embeddings that a model does not use for tokens.
_RESERVED_POSITIONS = 4
# The allowed difference of similarities, relative to the largest score. The original function
# rounds similarities to bf16.
_SIMILARITY_TOLERANCE = 2**-6
# Logits of the probe: multiples of a step between two limits. The multiplier and the prime modulus
# have no common factor, so that neighbouring logits differ a lot and repeat late.
_PROBE_MULTIPLIER = 37
_PROBE_MODULUS = 2003
_PROBE_STEP = 0.25
# Makes every logit different from 0, since scaling would not change a 0.
_PROBE_OFFSET = 0.125


class HeadProbe:
    """Stand-in for the forward of an LM head, which returns known logits and records its calls.

    Comparing these logits with the output of the model shows whether the model changes logits after
    its head.

    Attributes:
        vocab_size: the number of logits V of each token.
        hidden: the input of each call.
        logits: the output of each call.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return deterministic logits ``[..., V]`` from -251 to 251, and record the call.

        A soft cap would change logits as large as these.

        Args:
            hidden: hidden states ``[..., D]``. Only their shape, dtype and device matter.
        """
        n_tokens = hidden[..., 0].numel()
        numbers = torch.arange(n_tokens * self.vocab_size, device=hidden.device)
        spread = numbers * _PROBE_MULTIPLIER % _PROBE_MODULUS - _PROBE_MODULUS // 2
        flat_logits = (spread * _PROBE_STEP + _PROBE_OFFSET).to(hidden.dtype)
        logits = flat_logits.view(*hidden.shape[:-1], self.vocab_size)
        self.hidden.append(hidden)
        self.logits.append(logits)
        return logits


class _ProbeRun(NamedTuple):
    """A forward pass of a Transformer whose LM head was replaced by a probe.

    Attributes:
        probe: the probe, which has recorded its calls.
        output: the logits that the Transformer returned.
    """

    probe: HeadProbe
    output: Tensor


def check_fused_head(fusable: FusablePooling, impl: str) -> None:
    """Compare the fused scores of two short texts with those of the unchanged model.

    The network runs three times: with a probe in place of its LM head, which shows whether the
    model changes logits after the head; unchanged; and fused. Its backbone, which is equal in all
    three, runs once. Parameters, training modes and the random state do not change.

    Args:
        fusable: the pooling with its Transformer and its LM head.
        impl: the implementation of the operator.

    Raises:
        ValueError: if the scores differ, or the model changes logits after its LM head.
        RuntimeError: if the model cannot run, or is sharded.
    """
    transformer = fusable.transformer
    if any(type(parameter).__name__ == "DTensor" for parameter in transformer.parameters()):
        raise RuntimeError(
            "model must not be sharded for the check of accelerate(), got a sharded model; "
            "call accelerate() before fully_shard(model), or pass check=False.",
        )
    with temporarily_evaluating((transformer, fusable.pooling)), _backbone_run_once(fusable):
        try:
            features = short_texts_features(transformer)
            probe_run = _run_with_probe(fusable, features)
            expected = fusable.pooling(transformer(dict(features)))["sentence_embedding"]
        except Exception as error:
            raise RuntimeError(
                "model must be able to encode two short texts on its device for the check of "
                f"accelerate(), but it raised {type(error).__name__}: {error}; "
                "move it to its device first, or pass check=False.",
            ) from error
        _check_logits_untouched(fusable, probe_run, features)
        scores = _compute_fused_scores(fusable, features, impl)
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        difference = largest_difference(scores, expected)
        if not difference <= allowed:  # also catches NaN
            raise ValueError(
                f"fused scores must equal stock scores within {allowed:.3g} on two short texts, "
                f"got a difference of {difference:.3g} (shapes {list(scores.shape)} and "
                f"{list(expected.shape)}); do not accelerate this model, and please report it.",
            )


def _run_with_probe(fusable: FusablePooling, features: Features) -> _ProbeRun:
    """Run a Transformer with a probe in place of its LM head, which returns known logits."""
    probe = HeadProbe(base_linear(fusable.head).out_features)
    with _replaced_forward(fusable.head, probe):
        output = fusable.transformer(dict(features))["token_embeddings"]
    return _ProbeRun(probe, output)


def _compute_fused_scores(fusable: FusablePooling, features: Features, impl: str) -> Tensor:
    """Return the fused scores ``[B, V]`` of a batch, without changing the modules."""
    fused_forward = FusedForward(fusable.pooling, fusable.head, impl)
    with _replaced_forward(fusable.head, pass_hidden_states):
        scores: Tensor = fused_forward(fusable.transformer(dict(features)))["sentence_embedding"]
    return scores


@contextmanager
def _backbone_run_once(fusable: FusablePooling) -> Iterator[None]:
    """Run the backbone of a network once within the context, and reuse its output in later calls.

    The backbone is the network below its LM head. It runs again for other arguments. Nothing is
    reused if the network has no backbone apart from its head.

    Args:
        fusable: the pooling with its Transformer and its LM head.
    """
    network = fusable.transformer.model
    backbone = getattr(network, "base_model", network)
    holds_head = any(module is fusable.head for module in backbone.modules())
    if holds_head or "forward" in vars(backbone):
        yield
        return
    run = backbone.forward
    first_arguments: list[object] = []
    first_output: list[Any] = []

    def run_once(*args: object, **kwargs: object) -> Any:
        """Return the output of the first call, or run the backbone on other arguments."""
        arguments = [*args, *sorted(kwargs), *(kwargs[name] for name in sorted(kwargs))]
        if first_output and _are_identical(arguments, first_arguments):
            return copy.copy(first_output[0])
        output = run(*args, **kwargs)
        if not first_output:
            first_arguments.extend(arguments)
            first_output.append(copy.copy(output))
        return output

    with _replaced_forward(backbone, run_once):
        yield


def _are_identical(arguments: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists of arguments hold the same tensors and equal other values."""
    return len(arguments) == len(others) and all(
        argument is other or (not isinstance(argument, Tensor) and argument == other)
        for argument, other in zip(arguments, others, strict=True)
    )


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module on the instance within the context."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _check_logits_untouched(
    fusable: FusablePooling,
    probe_run: _ProbeRun,
    features: Features,
) -> None:
    """Raise an error if the model changes logits after its LM head.

    The Transformer must have returned the logits of the probe, or these logits times a factor if
    the head has no bias.

    Args:
        fusable: the pooling with its Transformer and its LM head.
        probe_run: the forward pass with the probe.
        features: the input of this pass.

    Raises:
        ValueError: if the logits were changed, or the head did not see every token once.
    """
    name = type(fusable.transformer.model).__name__
    probe = probe_run.probe
    output = probe_run.output
    if len(probe.logits) != 1:
        raise ValueError(
            f"the LM head must run once per forward, got {len(probe.logits)} in {name}; "
            "do not accelerate this model.",
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
        # The network scales the output of its head. A fused head outputs hidden states, so these
        # are scaled instead: without a bias, the logits are the same.
        if is_scaled and head_operands(fusable.head, probe.hidden[0]).bias is None:
            return
    raise ValueError(
        "the LM head's logits must reach SpladePooling unchanged, "
        f"got changed logits in {name} (by soft-capping, a factor after a head with a bias, or a "
        "smaller vocabulary); do not accelerate this model, or call tilefold.ops.lsr_head in it.",
    )


def short_texts_features(transformer: Transformer) -> Features:
    """Return the features of two short texts of different lengths on the module's device.

    The lengths must differ, so that the shorter text has padding. If the module truncated texts to
    a few tokens, both would have the same length. So its limit is raised for this call.

    Args:
        transformer: the Transformer module, whose ``preprocess`` tokenises the texts.
    """
    device = next(transformer.parameters()).device
    if type(transformer).preprocess is not Transformer.preprocess:
        return on_device(transformer.preprocess(_TEXTS), device)
    n_positions = getattr(transformer.model.config, "max_position_embeddings", None)
    max_length = _MAX_LENGTH
    if n_positions:
        max_length = max(1, min(_MAX_LENGTH, n_positions - _RESERVED_POSITIONS))
    options = {"text": {"max_length": max_length}}
    features = transformer.preprocess(_TEXTS, processing_kwargs=options)
    # The limit is stored in the tokenizer, which is saved with the model. A call without options
    # stores the module's limit again.
    Transformer.preprocess(transformer, _TEXTS)
    return on_device(features, device)


@contextmanager
def temporarily_evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode without gradients within a context.

    On exit, this restores their modes and ``embedding_dimension``, which the first forward of a
    pooling sets.

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


def check_fused_similarity(model: Model, name: str, function: Callable[..., Tensor]) -> None:
    """Compare the fused scores of a few vectors with those of a MultiVectorEncoder.

    The vectors have the device and the dtype of the model.

    Args:
        model: a MultiVectorEncoder.
        name: the name of its similarity method.
        function: the function that will replace the method.

    Raises:
        ValueError: if scores differ.
        RuntimeError: if the model cannot score.
    """
    floating_parameters = (
        parameter for parameter in model.parameters() if parameter.is_floating_point()
    )
    # A model without floating parameters is checked on the CPU in fp32.
    reference = next(floating_parameters, torch.zeros(1))
    # Two queries of 3 and 1 vectors, and two documents of 4 and 2 vectors.
    n_vectors = 10
    dim = 16
    vectors = torch.arange(n_vectors * dim, dtype=torch.float32).sin().view(n_vectors, dim)
    vectors = vectors.to(reference.device, reference.dtype)
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
            f"model must be able to score four short sequences on {reference.device} for the check "
            f"of accelerate(), but it raised {type(error).__name__}: {error}; "
            "move it to its device first, or pass check=False.",
        ) from error
    if not difference <= allowed:  # also catches NaN
        raise ValueError(
            f"fused scores must equal those of model.{name} within {allowed:.3g} on four "
            f"short sequences, got a difference of {difference:.3g} (shapes {list(scores.shape)} "
            f"and {list(expected.shape)}); do not accelerate this model.",
        )
