"""The number type in which a model computes, and the scores of cross-encoders in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilefold._internal.arguments import ArgumentError, check_choice
from tilefold._internal.typing import Model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# torch's name of a dtype -> the short name that tilefold uses in files, messages and options.
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
# What a user may request; "auto" leaves the choice to `choose_precision`.
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
DTYPES = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Precision:
    """The dtype in which a model computes, and why.

    Attributes:
        dtype: the dtype of the matrix products: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"fp64"``;
            ``"fp8"`` if the trunk of a model multiplies in fp8; ``"int8"`` for a quantized ONNX
            graph.
        device: the type of the model's device, such as ``"cuda"``.
        reason: why this dtype, such as ``"the default on CPUs"``.
    """

    dtype: str
    device: str
    reason: str

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device} ({self.reason})"


def choose_precision(dtype: Dtype, device: str, weights: str = "fp32") -> Precision:
    """Decide in which dtype a model computes on a device.

    ``"auto"`` is bf16 on GPUs with bf16 instructions, and fp32 elsewhere. CPUs take fp32 because
    bf16 is faster only on those with bf16 instructions: in encoding, it has 1.8 times the speed of
    fp32 with AVX512-BF16, and half of it with AVX-512 alone.

    Args:
        dtype: the requested dtype, one of :data:`DTYPES`.
        device: the type of the model's device, such as ``"cuda"`` or ``"cpu"``.
        weights: the dtype of the model's weights. Models in ``"fp64"`` compute in fp64.

    Raises:
        ArgumentError: if torch cannot compute in `dtype` on this device, or `weights` is
            ``"fp64"`` and another dtype is requested.
    """
    check_choice("dtype", dtype, DTYPES)
    if weights == "fp64":
        if dtype != "auto":
            raise ArgumentError(
                "dtype",
                f"expected 'auto' for a model with fp64 weights, got {dtype!r}. Convert the "
                "weights first: model.float().",
            )
        return Precision("fp64", device, "the dtype of its weights")
    if dtype != "auto":
        _check_dtype_of_device(dtype, device)
        return Precision(dtype, device, "as requested")
    if device != "cuda":
        kind_of_device = "CPUs" if device == "cpu" else f"{device} devices"
        return Precision("fp32", device, f"the default on {kind_of_device}")
    if gpu_has_bf16():
        return Precision("bf16", device, "the default on GPUs")
    return Precision("fp32", device, "the default on GPUs without bf16")


def gpu_has_bf16() -> bool:
    """Return whether the GPU has bf16 instructions; False without a GPU."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def _check_dtype_of_device(dtype: str, device: str) -> None:
    """Raise ``ArgumentError`` if torch cannot compute in `dtype` on a type of device."""
    import torch

    if dtype == "fp32":
        return
    if not torch.amp.is_autocast_available(device):
        raise ArgumentError(
            "dtype",
            f"expected 'auto' or 'fp32' on {device}, where torch has no autocast, got {dtype!r}.",
        )
    if device == "cuda" and dtype == "bf16" and not gpu_has_bf16():
        raise ArgumentError(
            "dtype",
            "expected 'auto', 'fp32' or 'fp16' on this GPU, which has no bf16 instructions, got "
            "'bf16'.",
        )


def set_precision(model: Model, dtype: Dtype = "auto") -> Precision:
    """Let a model compute in a dtype, which replaces an earlier choice.

    In bf16 and fp16, the trunk and the head multiply weights and activations that are rounded to
    this dtype (torch's autocast). Products accumulate in fp32, and the scores of fused heads and of
    MaxSim are fp32. The stored weights keep their dtype, and the model its fingerprint. In fp32,
    weights that are stored in bf16 or fp16 are widened, which changes no value. The next choice of
    another dtype narrows them again.

    Vectors in bf16 differ from those in fp32 by about 1%, and those in fp16 by about 0.1%. fp16
    overflows above 65,504, which some models reach.

    Args:
        model: a model of sentence-transformers, plain or accelerated.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``"auto"`` is bf16 on GPUs with bf16
            instructions, and fp32 elsewhere.

    Returns:
        The dtype, the device and the reason for the choice.

    Raises:
        ArgumentError: if the model cannot compute in `dtype` on its device.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> set_precision(model, "bf16").dtype
        'bf16'
    """
    check_choice("dtype", dtype, DTYPES)
    graph = onnx_graph_of(model)
    if graph is not None:
        precision = _precision_of_graph(graph)
        if dtype not in ("auto", precision.dtype):
            raise ArgumentError(
                "dtype",
                f"expected 'auto' for a model that was exported to ONNX in {precision.dtype}, got "
                f"{dtype!r}. Use the original model, or export it again.",
            )
        return precision
    # Before any change of the model, since it may raise an error.
    precision = choose_precision(dtype, _device_of(model), _dtype_of_weights(model))
    _restore_forward(model)
    forward = ForwardInPrecision(model, dtype)
    if precision.dtype == "fp32":
        forward.narrow_dtypes = _widen_weights(model)
    model.forward = forward
    return precision


@contextmanager
def computing_in(model: Model, dtype: Dtype | None) -> Iterator[None]:
    """Let a model compute in a dtype while the context is open.

    Afterwards it computes in the dtype of an earlier :func:`set_precision`, or as it was loaded.

    Args:
        model: a model of sentence-transformers.
        dtype: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``; None changes nothing.
    """
    if dtype is None:
        yield
        return
    earlier_dtype = requested_dtype(model)
    set_precision(model, dtype)
    try:
        yield
    finally:
        if earlier_dtype is None:
            _restore_forward(model)
        else:
            set_precision(model, earlier_dtype)


def requested_dtype(model: Model) -> Dtype | None:
    """Return the argument of the last :func:`set_precision`; None if there was no call."""
    forward = vars(model).get("forward")
    return forward.dtype if isinstance(forward, ForwardInPrecision) else None


def autocast_of(model: Model) -> AbstractContextManager[None]:
    """Return the context of torch's autocast in which a model computes after :func:`set_precision`.

    It changes nothing for other models.
    """
    forward = vars(model).get("forward")
    return forward.autocast() if isinstance(forward, ForwardInPrecision) else nullcontext()


def stored_dtypes(model: Model) -> dict[str, torch.dtype]:
    """Return name -> stored dtype of the weights that :func:`set_precision` has widened."""
    forward = vars(model).get("forward")
    return forward.narrow_dtypes if isinstance(forward, ForwardInPrecision) else {}


class ForwardInPrecision:
    """Replacement of a model's ``forward``, which computes in the dtype of :func:`set_precision`.

    ``"auto"`` is decided in each call, because a model may have been moved to another device.

    Args:
        model: the model whose ``forward`` is replaced.
        dtype: the requested dtype.

    Attributes:
        narrow_dtypes: name -> stored dtype of the weights that were widened to fp32.
    """

    def __init__(self, model: Model, dtype: Dtype) -> None:
        self.model = model
        self.dtype = dtype
        # The attribute of the instance, if another library has replaced `forward` before.
        self.replaced_forward: Callable[..., Any] | None = vars(model).get("forward")
        self.narrow_dtypes: dict[str, torch.dtype] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced ``forward`` in the dtype."""
        forward = self.replaced_forward
        with self.autocast():
            if forward is None:
                return type(self.model).forward(self.model, *args, **kwargs)
            return forward(*args, **kwargs)

    def precision(self) -> Precision:
        """Return the dtype on the current device of the model."""
        device = _device_of(self.model)
        weights = _dtype_of_weights(self.model)
        precision = choose_precision(self.dtype, device, weights)
        if precision.dtype == "fp32" and weights in ("bf16", "fp16"):
            # The choice was made on a GPU in bf16, so that no weights were widened to fp32, and the
            # model was moved to a CPU afterwards.
            return Precision(weights, device, "the dtype of its weights")
        return precision

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of torch's autocast in which the model computes."""
        return _autocast(self.precision())


def _autocast(precision: Precision) -> AbstractContextManager[None]:
    """Return torch's autocast to bf16 or fp16, or a context in which it is disabled."""
    import torch

    if not torch.amp.is_autocast_available(precision.device):
        return nullcontext()
    if precision.dtype in ("bf16", "fp16"):
        dtype = torch.bfloat16 if precision.dtype == "bf16" else torch.float16
        return torch.autocast(precision.device, dtype)
    return torch.autocast(precision.device, enabled=False)


def _restore_forward(model: Model) -> None:
    """Undo :func:`set_precision`, if it was called for a model.

    Weights that were widened to fp32 get their stored dtype again.
    """
    forward = vars(model).get("forward")
    if not isinstance(forward, ForwardInPrecision):
        return
    for name, tensor in _tensors_by_name(model):
        narrow_dtype = forward.narrow_dtypes.get(name)
        if narrow_dtype is not None:
            tensor.data = tensor.data.to(narrow_dtype)
    if forward.replaced_forward is None:
        del model.forward
    else:
        model.forward = forward.replaced_forward


def _widen_weights(model: Model) -> dict[str, torch.dtype]:
    """Convert the bf16 and fp16 weights of a model to fp32, in place.

    Returns:
        Name -> earlier dtype of each converted weight. A weight that several modules share is
        listed under the name in each of them.
    """
    import torch

    earlier_dtypes = {
        name: tensor.dtype
        for name, tensor in _tensors_by_name(model)
        if tensor.dtype in (torch.bfloat16, torch.float16)
    }
    for name, tensor in _tensors_by_name(model):
        if name in earlier_dtypes:
            tensor.data = tensor.data.float()
    return earlier_dtypes


def _tensors_by_name(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all parameters and buffers, shared ones by every name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _first_weight(model: Model) -> Tensor:
    """Return the first floating-point weight of a model; a scalar in fp32 if it has none."""
    import torch

    floating = (weight for weight in model.parameters() if weight.is_floating_point())
    return next(floating, torch.zeros(()))


def _device_of(model: Model) -> str:
    """Return the type of the device of a model's weights."""
    return _first_weight(model).device.type


def _dtype_of_weights(model: Model) -> str:
    """Return the short name of the dtype of a model's weights."""
    return _short_name(_first_weight(model).dtype)


def _short_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as ``"bf16"``."""
    name = str(dtype).removeprefix("torch.")
    return NAMES.get(name, name)


def _precision_of_graph(graph: Any) -> Precision:
    """Return the precision of an ONNX graph, which ignores autocast.

    Args:
        graph: the model's :class:`tilefold.modules.OnnxGraph`.
    """
    dtype = "fp32" if graph.made_of["quantize"] is None else "int8"
    return Precision(dtype, "cpu", "the dtype of its ONNX graph")


def precision_of(model: Model) -> Precision:
    """Return the dtype in which a model computes its matrix products, with the reason.

    The first of these that applies: fp8 if the trunk multiplies in fp8 (``accelerate(model,
    fp8=True)``); the dtype of :func:`set_precision` if that was called; the dtype of torch's
    autocast if it is on around this call; the dtype of the weights.

    Args:
        model: a sentence-transformers model.
    """
    import torch  # retrieval without models is imported without it

    graph = onnx_graph_of(model)
    if graph is not None:
        return _precision_of_graph(graph)
    device = _device_of(model)
    if _multiplies_fp8(model):
        return Precision("fp8", device, "accelerate(model, fp8=True)")
    forward = vars(model).get("forward")
    if isinstance(forward, ForwardInPrecision):
        return forward.precision()
    dtype = _dtype_of_weights(model)
    # Autocast leaves products of float64 as they are.
    if dtype != "fp64" and torch.is_autocast_enabled(device):
        dtype = _short_name(torch.get_autocast_dtype(device))
        return Precision(dtype, device, "the dtype of torch's autocast")
    return Precision(dtype, device, "the dtype of its weights")


def inference_precision(model: Model) -> str:
    """Return the name of the dtype in which a model computes its matrix products.

    Args:
        model: a sentence-transformers model.

    Returns:
        ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp64"`` or ``"fp8"``; ``"int8"`` for a quantized ONNX
        graph.
    """
    return precision_of(model).dtype


def _multiplies_fp8(model: Model) -> bool:
    """Return whether linear layers of a model's trunk multiply in fp8.

    Their class is above this package and cannot be imported here. It is recognised by its attribute
    ``products``.
    """
    return any(getattr(type(module), "products", None) == "fp8" for module in model.modules())


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
    would be rounded to 0 or a few steps. In this context, the layers after the trunk (pooler,
    classification head, LM head) and the modules after the Transformer convert their inputs and
    weights to fp32 and ignore autocast. The trunk itself, which dominates the run time, runs as
    before. The stored weights are not changed.

    Args:
        model: a sentence-transformers ``CrossEncoder``.
    """
    with ExitStack() as stack:
        for layer in _score_layers(model):
            stack.enter_context(_forward_in_fp32(layer))
        yield


def _score_layers(model: Model) -> list[nn.Module]:
    """Return the layers of a cross-encoder that compute its score from hidden states, in order.

    They are the head of the transformers model, such as a pooler and a classifier, and the modules
    of sentence-transformers after that model.

    Args:
        model: a ``CrossEncoder``, whose first module wraps the transformers model.
    """
    from torch import nn

    modules: list[nn.Module] = list(model.children())
    wrapper = modules[0]
    later_modules = modules[1:]
    transformers_model = getattr(wrapper, "model", None)
    if not isinstance(transformers_model, nn.Module):  # another backend, such as ONNX
        return later_modules
    # In transformers, `base_model` is the trunk. It is the model itself if there is no head.
    trunk = getattr(transformers_model, "base_model", transformers_model)
    has_head = trunk is not transformers_model
    if not has_head:
        return later_modules
    head_layers = [layer for layer in transformers_model.children() if layer is not trunk]
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
            """Store the layer and its original ``forward``."""
            super().__init__()
            self.layer = layer
            self.run: Callable[..., Any] = layer.forward

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Run the original ``forward``."""
            return self.run(*args, **kwargs)

    unpatched = UnpatchedLayer()

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the layer with inputs, weights and buffers in fp32, without autocast."""
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
