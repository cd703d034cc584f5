"""``accelerate(invariant=True)``: the vector of a text has the same bits in every batch.

A module is called invariant if its results for a text do not depend on the other texts. Four kinds
of computation are not, and each has its remedy:

- products of matrices, whose kernels depend on the number of rows: linear layers and fused heads
  multiply rows in groups (:mod:`tilefold.ops.row_groups`);
- sums along a row in norms other than LayerNorm, whose kernels depend on the number of rows if they
  are few: few rows are padded (:mod:`tilefold.ops.row_groups`);
- attention, whose kernels depend on the padded length: all texts run packed;
- functions that a CPU computes differently for the last few elements of an array: they are composed
  of functions that it computes alike.

LayerNorm, softmax, embeddings and the selection of terms treat every row by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor, nn
from transformers import activations

from tilefold._internal.environment import computing_environment
from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import pipelines_of
from tilefold.integrations.sentence_transformers._pooling import fused_forwards
from tilefold.integrations.sentence_transformers.packing.accelerate import require_packed
from tilefold.integrations.sentence_transformers.packing.inputs import on_device
from tilefold.integrations.sentence_transformers.packing.norms import (
    FusedRMSNorm,
    fused_rms_norm,
    runs_fused,
)
from tilefold.integrations.transformers.networks import in_eval_mode
from tilefold.integrations.transformers.packed import OFFSETS, PACKED
from tilefold.modules.fused_pooling import Features, pass_hidden_states
from tilefold.ops.row_groups import align, apply_rowwise, grouped_linear, normalize_rows

# Modules of sentence-transformers that compute a text alike in every batch.
_PIPELINE_MODULES = (
    Transformer,
    Pooling,
    Dense,
    Normalize,
    SpladePooling,
    SparseStaticEmbedding,
    MultiVectorMask,
    Router,
)
# Activations that a CPU computes alike for all elements of an array.
_UNIFORM_ACTIVATIONS = (nn.Identity, nn.ReLU, nn.Tanh, activations.LinearActivation)
# Poolings of dense vectors that select token states, or take their maximum.
_EXACT_POOLINGS = frozenset({"cls", "lasttoken", "max"})
# Coefficients of the tanh approximation of GELU.
_GELU_TANH_SCALE = math.sqrt(2 / math.pi)
_GELU_TANH_CUBIC = 0.044715
# Heads of transformers that call GELU as a function, and not as a module.
_HEADS_WITH_GELU = frozenset(
    {
        "CamembertLMHead",
        "Data2VecTextLMHead",
        "RobertaLMHead",
        "RobertaPreLayerNormLMHead",
        "XLMRobertaLMHead",
        "XLMRobertaXLLMHead",
    }
)
# Number of elements that fill the vector registers of every CPU a whole number of times.
_REGISTER_ELEMENTS = 64
# Words per text of the self-check. Products of few and of many rows differ most.
_CHECKED_WORDS = (1, 3, 10, 40, 2, 90)


class InvariantLinear(Replacement):
    """Replaces the forward of one linear layer, so that a row has the same bits in every batch.

    The layer multiplies rows in groups of fixed sizes, since kernels depend on the number of rows.
    """

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the layer; with gradients, as the class of the layer does.

        Args:
            rows: the inputs ``[..., K]``.
        """
        layer = self.owner
        if torch.is_grad_enabled():
            outputs: Tensor = type(layer).forward(layer, rows)
            return outputs
        return grouped_linear(rows, layer.weight, layer.bias)


class InvariantNorm(Replacement):
    """Replaces the forward of one norm, such as RMSNorm, so that a row has the same bits always.

    Few rows are padded, since kernels for few rows add in another order.

    Args:
        owner: the norm.

    Attributes:
        is_fusible: whether ``accelerate`` runs the norm as one kernel where it can.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__(owner)
        self.is_fusible = isinstance(vars(owner).get("forward"), FusedRMSNorm)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Normalise the states; with gradients, as the class of the norm does.

        Args:
            hidden_states: ``[..., D]``.
        """
        norm = self.owner
        class_forward = functools.partial(type(norm).forward, norm)
        if torch.is_grad_enabled():
            outputs: Tensor = class_forward(hidden_states)
            return outputs
        # ``apply_rowwise`` tests once for each name how few rows must be padded. Norms of several
        # architectures have one class name, such as RMSNorm, and run other kernels.
        name = f"{type(norm).__module__}.{type(norm).__qualname__}"
        if self.is_fusible and runs_fused(norm, hidden_states):
            fused_forward = functools.partial(fused_rms_norm, norm)
            return apply_rowwise(fused_forward, hidden_states, f"{name} in one kernel")
        return apply_rowwise(class_forward, hidden_states, name)


class InvariantNormalize(Replacement):
    """Replaces the forward of one ``Normalize``, so that a vector has the same bits in every batch.

    Few vectors are padded, since kernels for few rows add in another order.
    """

    def __call__(self, features: Features) -> Features:
        """Scale the vectors of one feature to length 1; with gradients, as ``Normalize`` does.

        Args:
            features: the output of the modules before.
        """
        module = self.owner
        vectors = features.get(module.module_input_name)
        if vectors is None or torch.is_grad_enabled():
            outputs: Features = type(module).forward(module, features)
            return outputs
        features[module.module_output_name] = normalize_rows(vectors)
        return features


class InvariantActivation(Replacement):
    """Replaces the forward of one activation, which a CPU computes differently at an array's end.

    Args:
        owner: the activation module.
        function: computes the activation in fp32, alike for all elements.
    """

    def __init__(self, owner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(owner)
        self.function = function

    def __call__(self, inputs: Tensor) -> Tensor:
        """Apply the activation elementwise; on GPUs and with gradients, as its class does.

        Args:
            inputs: a tensor of any shape.
        """
        if inputs.device.type == "cpu" and not torch.is_grad_enabled():
            return self.function(inputs.float()).to(inputs.dtype)
        outputs: Tensor = type(self.owner).forward(self.owner, inputs)
        return outputs


class InvariantHead(Replacement):
    """Replaces the forward of one LM head of RoBERTa's kind, which calls GELU as a function.

    A CPU computes GELU differently at the end of an array. The forward of such a head is a linear
    layer, GELU, a LayerNorm and the projection to the vocabulary.
    """

    def __call__(self, features: Tensor, **options: object) -> Tensor:
        """Compute the logits; on GPUs and with gradients, as the class of the head does.

        Args:
            features: token states ``[B, S, D]``.
            options: further arguments of the head.
        """
        head = self.owner
        if features.device.type != "cpu" or torch.is_grad_enabled():
            outputs: Tensor = type(head).forward(head, features, **options)
            return outputs
        states = head.dense(features)
        states = _gelu(states.float()).to(states.dtype)
        logits: Tensor = head.decoder(head.layer_norm(states))
        return logits


class InvariantMean(Replacement):
    """Replaces the forward of one mean pooling: the tokens of a packed text are added in order.

    sentence-transformers' pooling adds them by atomic operations on a GPU, whose order differs
    between calls.
    """

    def __call__(self, features: Features) -> Features:
        """Add ``sentence_embedding`` ``[B, D]``, the means of the token states of each text.

        Args:
            features: packed features with ``token_embeddings`` ``[1, T, D]``.
        """
        states: Tensor = features["token_embeddings"].squeeze(0)
        lengths = features[OFFSETS].diff().long()
        # Without checks of the lengths, for which the CPU would wait for the GPU.
        sums = torch.segment_reduce(states.float(), "sum", lengths=lengths, axis=0, unsafe=True)
        means = sums / lengths.clamp(min=1)[:, None]
        features["sentence_embedding"] = means.to(states.dtype)
        return features


class Invariance(Replacement):
    """Marks a model whose vectors have the same bits in every batch.

    ``accelerate(invariant=True)`` sets it as the attribute ``invariance``, so that other packages
    can tell such models without importing sentence-transformers.
    """

    def environment(self) -> dict[str, str]:
        """Return the device and the libraries on which the bits of the vectors depend."""
        return computing_environment(torch.device(self.owner.device))


def make_invariant(model: Model, padded: dict[str, str], check: bool) -> None:
    """Let an accelerated model compute the same bits for a text in every batch.

    Args:
        model: the model, whose Transformers run on packed tokens.
        padded: why networks of the model run on padded batches.
        check: whether vectors of a few texts are compared, each encoded alone and with the others.

    Raises:
        ValueError: if a module is not known to be invariant, or the comparison fails.
    """
    for name, reason in padded.items():
        raise _batch_dependence_error(name, f"it runs on padded batches: {reason}")
    _check_pipelines(model)
    # Every module is examined before the first one is changed.
    replacements = list(filter(None, map(_replacement_for, model.modules())))
    for replacement in replacements:
        _check_forward_is_not_replaced(replacement.owner)
    for replacement in replacements:
        replacement.owner.forward = replacement
    for fused in fused_forwards(model):
        fused.groups_rows = True
    _align_weights(model)
    require_packed(model)
    model.invariance = Invariance(model)
    if check:
        _check_invariance(model)


def _batch_dependence_error(name: str, reason: str) -> ValueError:
    """Return the error for a model whose vectors may depend on the batch.

    Args:
        name: the class of the module that is at fault.
        reason: why its results may depend on the batch.
    """
    return ValueError(
        f"invariant=True does not support {name}: {reason}. Leave out invariant=True; the vectors "
        "of such a model may differ in their last bits between batches.",
    )


def _check_pipelines(model: Model) -> None:
    """Raise ``ValueError`` for a module whose results for a text may depend on the batch.

    Only modules of sentence-transformers are examined, and their options.

    Args:
        model: the model.
    """
    for pipeline in pipelines_of(model):
        for module in pipeline:
            name = type(module).__name__
            if type(module) not in _PIPELINE_MODULES:
                raise _batch_dependence_error(name, "its sums may depend on the batch")
            if isinstance(module, Transformer):
                implementation = module.model.config._attn_implementation
                if implementation != PACKED:
                    raise _batch_dependence_error(
                        type(module.model).__name__,
                        f"its attention is {implementation!r}, and only softmax attention is "
                        "known to keep its bits",
                    )
            if isinstance(module, SpladePooling) and module.pooling_strategy != "max":
                raise _batch_dependence_error(
                    name, f"it has the pooling {module.pooling_strategy!r}, not 'max'"
                )
            if isinstance(module, Pooling):
                _check_dense_pooling(module)


def _check_dense_pooling(pooling: Pooling) -> None:
    """Raise ``ValueError`` for a pooling of dense vectors whose sums may depend on the batch."""
    modes = _modes_of(pooling)
    is_exact = _EXACT_POOLINGS.issuperset(modes)
    if modes != ("mean",) and not is_exact:
        raise _batch_dependence_error(
            "Pooling", f"it has the mode {'+'.join(modes)}, not mean, cls or max"
        )
    if not pooling.include_prompt:
        raise _batch_dependence_error("Pooling", "it leaves out the tokens of the prompt")


def _modes_of(pooling: Pooling) -> tuple[str, ...]:
    """Return the modes of a pooling of dense vectors, such as ``("mean",)``."""
    mode = pooling.pooling_mode
    return (mode,) if isinstance(mode, str) else tuple(mode)


def _replacement_for(module: nn.Module) -> Replacement | None:
    """Return a forward for a module that computes the same bits in every batch.

    Args:
        module: any module of a model.

    Returns:
        The replacement, or None if the module's own forward does so already.

    Raises:
        ValueError: if no such forward is known.
    """
    if isinstance(module, Pooling):
        return InvariantMean(module) if _modes_of(module) == ("mean",) else None
    if isinstance(module, nn.Linear):
        return _replacement_for_linear(module)
    if isinstance(module, Normalize):
        return InvariantNormalize(module)
    if type(module).__name__ in _HEADS_WITH_GELU:
        return InvariantHead(module)
    if _is_activation(module):
        function = _composed_activation(module)
        return None if function is None else InvariantActivation(module, function)
    if not isinstance(module, (nn.Embedding, SparseStaticEmbedding)):
        _check_has_no_matrix(module)
    return InvariantNorm(module) if _sums_rows(module) else None


def _check_forward_is_not_replaced(module: nn.Module) -> None:
    """Raise ``ValueError`` if another library or the user has replaced the forward of a module.

    ``accelerate(invariant=True)`` replaces it by a forward that computes the same as the module's
    class. What the other forward computes would be lost.

    Args:
        module: a module whose forward ``accelerate(invariant=True)`` is about to replace.
    """
    # A replaced forward is an attribute of the instance, which hides the method of the class.
    instance_forward = vars(module).get("forward")
    if instance_forward is not None and not isinstance(instance_forward, Replacement):
        raise _batch_dependence_error(
            type(module).__name__, "its forward was replaced on the instance"
        )


def _sums_rows(module: nn.Module) -> bool:
    """Whether a module is a norm whose sum along a row may depend on the number of rows.

    All norms count except for LayerNorm, whose kernels treat every row by itself. Norms are
    recognised by the names of their classes.
    """
    is_layer_norm = type(module).forward is nn.LayerNorm.forward
    is_leaf = next(module.children(), None) is None
    return is_leaf and not is_layer_norm and "norm" in type(module).__name__.lower()


def _replacement_for_linear(layer: nn.Linear) -> InvariantLinear | None:
    """Return a forward for a linear layer that computes the same bits in every batch.

    It is None for a fused LM head, whose forward multiplies nothing.

    Args:
        layer: the layer.

    Raises:
        ValueError: if the forward is not that of ``nn.Linear``, as in quantized layers.
    """
    if vars(layer).get("forward") is pass_hidden_states:
        return None  # the pooling multiplies by the weight of the head
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        raise _batch_dependence_error(
            type(layer).__name__, "its forward is not that of torch.nn.Linear"
        )
    return InvariantLinear(layer)


def _align_weights(model: nn.Module) -> None:
    """Copy the weights of linear layers that are mapped from a file to aligned addresses.

    Otherwise, each product would copy its weight, since kernels depend on the address too.

    Args:
        model: the model.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = align(module.weight.data)


def _check_has_no_matrix(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module has a matrix as a parameter.

    Its product may depend on the number of rows. Vectors, such as the scale of a LayerNorm, are
    multiplied elementwise.

    Args:
        module: a module that is neither a linear layer nor an embedding.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            raise _batch_dependence_error(
                type(module).__name__,
                f"the product with its parameter {name} of shape {list(parameter.shape)} may "
                "depend on the batch",
            )


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation of torch or of transformers, without parameters."""
    defined_in = type(module).__module__
    is_elementwise = defined_in in (nn.ReLU.__module__, activations.__name__)
    is_softmax_or_attention = isinstance(module, (nn.Softmax, nn.MultiheadAttention))
    return is_elementwise and not is_softmax_or_attention


def _composed_activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes an activation alike for all elements of an array on a CPU.

    The activation itself computes the last elements, which do not fill a vector register, in
    another way.

    Args:
        module: an activation.

    Returns:
        The function, or None if the activation itself computes all elements with the same bits.

    Raises:
        ValueError: if no such function is known.
    """
    if isinstance(module, _UNIFORM_ACTIVATIONS):
        return None
    if isinstance(module, (nn.SiLU, activations.SiLUActivation)):
        return _silu
    if isinstance(module, (nn.GELU, activations.GELUActivation)):
        return _gelu_tanh if getattr(module, "approximate", "none") == "tanh" else _gelu
    if isinstance(module, (activations.GELUTanh, activations.NewGELUActivation)):
        return _gelu_tanh
    raise _batch_dependence_error(
        type(module).__name__,
        "a CPU may compute the last elements of an array in another way, and only ReLU, tanh, GELU "
        "and SiLU are known to avoid it",
    )


def _silu(inputs: Tensor) -> Tensor:
    """Return ``x / (1 + exp(-x))`` of each element."""
    return inputs / inputs.neg().exp_().add_(1)


def _gelu(inputs: Tensor) -> Tensor:
    """Return GELU of each element.

    A CPU computes the last elements of an array, which do not fill a vector register, in another
    way. The array is padded, so that equal shares of all threads fill the registers. If torch lets
    only some of four or more threads take part, the end of a share may still not fill one.

    A CPU also has another kernel for inputs that are not contiguous. A half of the columns, as in
    gated layers, is contiguous for one row alone, so the inputs are always made contiguous.

    Args:
        inputs: fp32 of any shape.
    """
    elements = inputs.reshape(-1)  # contiguous
    n_missing = -elements.numel() % (_REGISTER_ELEMENTS * torch.get_num_threads())
    if n_missing == 0:
        return nn.functional.gelu(elements).view(inputs.shape)
    padded = nn.functional.pad(elements, (0, n_missing))
    return nn.functional.gelu(padded)[: elements.numel()].view(inputs.shape)


def _gelu_tanh(inputs: Tensor) -> Tensor:
    """Return the tanh approximation of GELU of each element."""
    cubic = inputs * inputs * inputs
    inner = (inputs + cubic.mul_(_GELU_TANH_CUBIC)).mul_(_GELU_TANH_SCALE)
    return inner.tanh_().add_(1).mul_(inputs).mul_(0.5)


def _check_invariance(model: Model) -> None:
    """Compare the vectors of a few texts, each encoded alone and together with the others.

    Args:
        model: a model whose modules all compute the same bits in every batch.

    Raises:
        ValueError: if a vector differs.
    """
    texts = [" ".join(["card"] * n_words) for n_words in _CHECKED_WORDS]
    tasks = ("query", "document") if _reads_task(model) else (None,)
    for task in tasks:
        vectors_of_batch = _vectors_of(model, texts, task)
        for text, expected in zip(texts, vectors_of_batch, strict=True):
            (vector,) = _vectors_of(model, [text], task)
            if not torch.equal(vector, expected):
                difference = float((vector.float() - expected.float()).abs().max())
                raise _batch_dependence_error(
                    type(model).__name__,
                    f"the vector of a short text differs by {difference:.3g} between batches",
                )


def _reads_task(model: Model) -> bool:
    """Whether a module of the model treats queries and documents differently."""
    return isinstance(model, MultiVectorEncoder) or "task" in model.get_model_kwargs()


def _vectors_of(model: Model, texts: Sequence[str], task: str | None) -> list[Tensor]:
    """Encode texts in one forward pass.

    Args:
        model: a model after :func:`make_invariant`.
        texts: the texts.
        task: ``"query"``, ``"document"`` or None.

    Returns:
        A vector ``[D]`` or token vectors ``[L, D]`` for each text.
    """
    task_kwargs = {} if task is None else {"task": task}
    with in_eval_mode(model), torch.inference_mode():
        features = model.preprocess(list(texts), **task_kwargs)
        outputs: Features = model(on_device(features, model.device), **task_kwargs)
        if isinstance(model, MultiVectorEncoder):
            mask = outputs["attention_mask"].bool()
            vectors = outputs["token_embeddings"]
            return [vectors[row][mask[row]] for row in range(len(texts))]
        return list(outputs["sentence_embedding"].to_dense())
