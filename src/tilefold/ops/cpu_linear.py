"""Linear layers of any encoder by oneDNN, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from tilefold.ops._shared.internals import onednn_linear
from tilefold.ops._shared.onednn import serves

__all__ = ["fast_linear"]


def fast_linear(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which linear layers of fp32 on the CPU are multiplied by oneDNN, up to the order
    of sums.

    It changes nothing of the model, keeps no copy of a weight, and leaves alone gradients,
    autocast, other dtypes and devices, few rows, and models that ``torch.compile`` was asked to
    compile.

    Args:
        model: what runs within.
        device: of the model.
    """
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )
    return nullcontext() if device.type != "cpu" or compiled else _FastLinear()


class _FastLinear(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and _served(*args):
            return onednn_linear(args[0], args[1], args[2] if len(args) > 2 else None)
        return func(*args, **kwargs or {})


def _served(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    return (
        not torch.is_grad_enabled()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in operands)
        and rows.dim() > 1
        and serves(rows, rows.numel() // max(1, rows.size(-1)), weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
