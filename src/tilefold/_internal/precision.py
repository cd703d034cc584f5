"""The number type in which a model computes, and the scores of cross-encoders in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tilefold._internal.typing import Model

if TYPE_CHECKING:
    from torch import Tensor, nn

# torch's name of a dtype -> the short name that tilefold uses in files, messages and options.
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def inference_precision(model: Model) -> str:
    """Return the name of the dtype in which a model computes its matrix products.

    It is the dtype of autocast if autocast is on, either around this call or in the model itself
    (:func:`tilefold.recipes.loading.run_fast`). Otherwise it is the dtype of the weights.

    Args:
        model: a sentence-transformers model.

    Returns:
        ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"fp64"``; ``"int8"`` for a quantized ONNX graph.
    """
    import torch  # retrieval without models is imported without it

    graph = onnx_graph_of(model)
    if graph is not None:  # ONNX Runtime ignores autocast
        return "fp32" if graph.made_of["quantize"] is None else "int8"
    floating = (weight for weight in model.parameters() if weight.is_floating_point())
    weight = next(floating, torch.zeros(()))  # a model without weights computes in fp32 on the CPU
    dtype = weight.dtype
    device = weight.device.type
    with getattr(model, "inference_context", nullcontext)():
        # Autocast leaves products of float64 as they are.
        if dtype != torch.float64 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
    name = str(dtype).removeprefix("torch.")
    return NAMES.get(name, name)


def onnx_graph_of(model: Model) -> Any | None:
    """Return the :class:`tilefold.modules.OnnxGraph` of a model, or None if it has none.

    Its class is above this package and cannot be imported here. It is recognised by its attribute
    ``made_of``, which describes the exported model.
    """
    return next((module for module in model.modules() if hasattr(module, "made_of")), None)


@contextmanager
def scores_in_fp32(model: Model) -> Iterator[None]:
    """Compute the scores of a cross-encoder in fp32 while the context is open.

    In bf16, scores between 8 and 16 are multiples of 1/16, so that most score margins of a teacher
    would be rounded to 0 or a few steps. In this context, the layers after the encoder (pooler,
    classification head, LM head) and the modules after the Transformer convert their inputs and
    weights to fp32 and ignore autocast. The encoder itself, which dominates the run time, runs as
    before. The stored weights are not changed.

    Args:
        model: a sentence-transformers ``CrossEncoder``.
    """
    with ExitStack() as stack:
        for layer in _score_layers(model):
            stack.enter_context(_forward_in_fp32(layer))
        yield


def _score_layers(model: Model) -> list[nn.Module]:
    """Return the layers of a cross-encoder after its encoder, in order.

    They compute the scores from the encoder's hidden states.

    Args:
        model: a ``CrossEncoder``, whose first module wraps a transformers model.
    """
    from torch import nn

    modules: list[nn.Module] = list(model.children())
    transformer = modules[0]
    later_modules = modules[1:]
    network = getattr(transformer, "model", None)
    if not isinstance(network, nn.Module):  # another backend, such as ONNX
        return later_modules
    # transformers: ``base_model`` is the encoder, or the model itself if it has no head.
    encoder = getattr(network, "base_model", network)
    if encoder is network:
        return later_modules
    head_layers = [layer for layer in network.children() if layer is not encoder]
    return [*head_layers, *later_modules]


@contextmanager
def _forward_in_fp32(layer: nn.Module) -> Iterator[None]:
    """Let one layer compute in fp32 while the context is open.

    Its ``forward`` is replaced by one that converts inputs, weights and buffers to fp32 for the
    call and switches autocast off. At the end, the original ``forward`` is restored.

    Args:
        layer: the layer. Its stored weights keep their dtype.
    """
    import torch
    from torch.func import functional_call

    class UnpatchedLayer(torch.nn.Module):
        """The layer with its original ``forward``, for calls with other weights."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.run: Callable[..., Any] = layer.forward

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    unpatched = UnpatchedLayer()

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {**dict(unpatched.named_parameters()), **dict(unpatched.named_buffers())}
        in_fp32 = {name: _to_fp32(weight) for name, weight in weights.items()}
        arguments = tuple(_to_fp32(value) for value in args)
        options = {name: _to_fp32(value) for name, value in kwargs.items()}
        with ExitStack() as stack:
            for device in {weight.device.type for weight in weights.values()} | {"cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
            return functional_call(unpatched, in_fp32, arguments, options)

    # A library may have patched this layer before: its ``forward`` is then an instance attribute.
    was_patched = "forward" in vars(layer)
    layer.forward = forward
    try:
        yield
    finally:
        if was_patched:
            layer.forward = unpatched.run
        else:
            del layer.forward


def _to_fp32(value: Any) -> Any:
    """Convert a bf16 or fp16 tensor, or the tensors of a dictionary, to fp32.

    Other values are returned unchanged.
    """
    import torch

    if isinstance(value, dict):
        return {name: _to_fp32(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        widened: Tensor = value.float()
        return widened
    return value
