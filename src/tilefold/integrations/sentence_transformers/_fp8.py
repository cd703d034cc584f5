"""Linear layers of a model's trunks in fp8, for encoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold._internal.typing import Model
from tilefold.nn.fp8_linear import fp8_linear, fp8_rows, has_fp8_sizes
from tilefold.ops import QuantizedWeight
from tilefold.ops.fp8_products import check_fp8_device

# Names of layers of one module that read the same hidden states, in transformers' models. The
# hidden states do not change between the calls of these layers.
_SAME_INPUT = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"query", "key", "value"}),
    frozenset({"q_lin", "k_lin", "v_lin"}),
)
# Names of layers that choose the experts of a token, which must not change by rounding.
_EXCLUDED = frozenset({"gate", "router"})


class _RoundedInput(threading.local):
    """The hidden states that the calling thread has rounded last; every thread has its own.

    Attributes:
        hidden: the hidden states ``[..., K]``; None if the last layer has read them.
        rows: the same in fp8.
        n_uses: the number of layers that have read them.
    """

    hidden: Tensor | None = None
    rows: QuantizedWeight | None = None
    n_uses = 0


class SharedRows:
    """Hidden states that several layers read, rounded to fp8 once for all of them.

    The layers are, for example, the projections of queries, keys and values in an attention module.
    Several threads may run them at the same time, each with its own hidden states.

    Args:
        n_layers: the number of layers that read the same hidden states.
    """

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self._input = _RoundedInput()

    def __getstate__(self) -> dict[str, Any]:
        return {"n_layers": self.n_layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n_layers = state["n_layers"]
        self._input = _RoundedInput()

    def rows_of(self, hidden: Tensor) -> QuantizedWeight:
        """Return hidden states in fp8, which are rounded once for all layers that read them.

        Args:
            hidden: hidden states ``[..., K]``.
        """
        if self.n_layers == 1 or torch.compiler.is_compiling():
            return fp8_rows(hidden)  # compiled code shares equal expressions itself
        last = self._input
        rows = last.rows
        # The first of the layers rounds. The others get the same tensor object as input.
        if rows is None or last.hidden is not hidden:
            rows = fp8_rows(hidden)
            last.hidden = hidden
            last.rows = rows
            last.n_uses = 0
        last.n_uses += 1
        if last.n_uses == self.n_layers:  # frees the memory
            last.hidden = None
            last.rows = None
        return rows


class Fp8Linear(nn.Linear):
    """Linear layer that multiplies in fp8 if no gradient is needed.

    The weight is rounded at every call, see :func:`tilefold.nn.fp8_linear.fp8_linear`. Layers get
    this class while a model is accelerated. A replaced ``forward`` on the instances would let
    ``torch.compile`` compile every layer of a model by itself.

    Attributes:
        rounded_input: the rounded hidden states that the layer shares with others.
        products: the number type in which the layer multiplies, which
            :func:`tilefold._internal.precision.precision_of` reads.
    """

    rounded_input: SharedRows
    products = "fp8"

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer for hidden states ``[..., K]``.

        Args:
            hidden: the input of the layer.
        """
        if torch.is_grad_enabled():
            return super().forward(hidden)
        out_dtype = hidden.dtype
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
        output = fp8_linear(
            self.rounded_input.rows_of(hidden),
            self.weight,
            self.bias,
            out_dtype=out_dtype,
        )
        return output.view(*hidden.shape[:-1], output.size(1))


def use_fp8(model: Model) -> None:
    """Let the linear layers of a model's trunks multiply in fp8, if no gradient is needed.

    LM heads, poolings and projections keep their precision, and so do layers whose sizes are no
    multiples of 16. :func:`stop_fp8` undoes this.

    Args:
        model: an accelerated model.

    Raises:
        ValueError: if the device cannot multiply fp8, or no layer can.
    """
    check_fp8_device(torch.device(model.device))
    for transformer in _find_transformers(model):
        _install_fp8(transformer.model)


def stop_fp8(model: Model) -> None:
    """Undo :func:`use_fp8`: all layers multiply in their own dtype again.

    A model that does not multiply in fp8 does not change.

    Args:
        model: the model.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is Fp8Linear]
    for layer in layers:
        del layer.rounded_input
        layer.__class__ = nn.Linear


def _find_transformers(model: Model) -> list[Transformer]:
    """Return the Transformers of a model that run on torch, not on another backend.

    Raises:
        ValueError: if there is none.
    """
    transformers = [
        module
        for module in model.modules()
        if isinstance(module, Transformer) and isinstance(module.model, nn.Module)
    ]
    if not transformers:
        raise ValueError(
            f"fp8 needs a Transformer on the backend 'torch', and this {type(model).__name__} has "
            "none; leave fp8 out.",
        )
    return transformers


def _install_fp8(network: Any) -> None:
    """Turn the linear layers below a network's head into :class:`Fp8Linear`, if their sizes allow.

    Args:
        network: a transformers model, whose ``base_model`` is the trunk below its head.

    Raises:
        ValueError: if there is no such layer.
    """
    trunk = network.base_model
    for parent in trunk.modules():
        for siblings in _layers_by_input(parent):
            # Layers with the same input, such as those of queries, keys and values, round it once.
            shared_input = SharedRows(len(siblings))
            for layer in siblings:
                # A change of the class keeps the module's name, weights and hooks.
                layer.__class__ = Fp8Linear
                layer.rounded_input = shared_input
    # If another Transformer of the model has the same network, its layers were changed before.
    if not any(type(layer) is Fp8Linear for layer in trunk.modules()):
        raise ValueError(
            "fp8 needs linear layers whose sizes are multiples of 16, and "
            f"{type(network).__name__} has none; leave fp8 out.",
        )


def _layers_by_input(parent: nn.Module) -> Iterator[list[Any]]:
    """Yield lists of a module's linear layers that can run in fp8 and read the same input.

    Layers with a replaced forward are left out.

    Args:
        parent: a module of the network, such as an attention module with its projections.
    """
    layers = {
        name: child
        for name, child in parent.named_children()
        if has_fp8_sizes(child) and name not in _EXCLUDED and "forward" not in vars(child)
    }
    for names in _SAME_INPUT:
        if names <= layers.keys():
            yield [layers.pop(name) for name in sorted(names)]
    for layer in layers.values():
        yield [layer]
