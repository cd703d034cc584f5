"""Linear layers of any encoder by oneDNN, within a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from tilefold.ops._shared.internals import onednn_linear
from tilefold.ops._shared.onednn import onednn_is_faster

__all__ = ["fast_linear"]


def fast_linear(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which oneDNN computes linear layers of fp32 on the CPU.

    The results are equal up to the order of sums. The model is not changed, and no weight is
    copied. Torch's own kernel still computes layers with few rows, gradients, autocast, or other
    dtypes and devices. The context does nothing for a model that ``torch.compile`` compiles.

    Args:
        model: the model that runs within the context.
        device: device of the model.
    """
    is_compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )
    if device.type != "cpu" or is_compiled:
        return nullcontext()
    return _FastLinear()


class _FastLinear(TorchFunctionMode):
    """Mode that sends ``torch.nn.functional.linear`` to oneDNN if it is faster."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace ``linear`` by oneDNN if that is faster, and call any other function unchanged."""
        if func is linear and not kwargs and _should_use_onednn(*args):
            return onednn_linear(*args, *[None] * (3 - len(args)))  # no bias is None
        return func(*args, **kwargs or {})


def _should_use_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether oneDNN computes ``linear(rows, weight, bias)`` faster, with the same result.

    Tensor subclasses, gradients, autocast and traces need torch's own function.
    """
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    n_rows = rows.numel() // max(1, rows.size(-1)) if rows.dim() > 1 else 1
    return (
        not torch.is_grad_enabled()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in operands)
        and rows.dim() > 1
        and onednn_is_faster(rows, n_rows, weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
