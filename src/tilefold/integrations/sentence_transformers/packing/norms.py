"""RMSNorm in one kernel, for decoders that encode on a GPU.

The RMSNorm of transformers runs six kernels of torch, each of which reads or writes the states of
all tokens. ``torch.nn.functional.rms_norm`` is one kernel on GPUs, from torch 2.9 on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers.packing.inputs import pads_inputs

__all__ = ["FusedRMSNorm", "fuse_norms", "fused_rms_norm", "runs_fused", "separate_norms"]


class FusedRMSNorm(Replacement):
    """Replaces the forward of one RMSNorm, which then runs as one kernel on GPUs in inference.

    The result differs from that of the class by rounding only: in 16 bits, most classes round the
    normalised states before they multiply them by the weight, and the kernel rounds once.
    """

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Normalise the states: ``weight * x / sqrt(mean(x ** 2) + eps)`` for each token.

        Args:
            hidden_states: the states x, ``[..., D]``.

        Returns:
            The normalised states ``[..., D]``.
        """
        if runs_fused(self.owner, hidden_states):
            return fused_rms_norm(self.owner, hidden_states)
        outputs: Tensor = type(self.owner).forward(self.owner, hidden_states)
        return outputs


def runs_fused(norm: nn.Module, hidden_states: Tensor) -> bool:
    """Whether a call of an RMSNorm runs as one kernel.

    In training, the forward of the class runs, and also in compiled code, which fuses it itself.
    Padded runs are the reference with which ``accelerate`` compares packed ones.

    Args:
        norm: the RMSNorm.
        hidden_states: its input.
    """
    is_inference = not norm.training and not torch.is_grad_enabled()
    return (
        is_inference
        and hidden_states.is_cuda
        and hidden_states.dtype == norm.weight.dtype
        and not torch.compiler.is_compiling()
        and not pads_inputs()
    )


def fused_rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """Compute an RMSNorm of transformers by the function of torch.

    Args:
        norm: the RMSNorm, with ``weight`` ``[D]`` and ``variance_epsilon``.
        hidden_states: ``[..., D]``, in the dtype of the weight.
    """
    weight: Tensor = norm.weight
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, norm.variance_epsilon)


def fuse_norms(network: nn.Module) -> None:
    """Let the RMSNorms of a network run as one kernel each, where :func:`runs_fused` allows it.

    ``restore`` undoes it, as it does every :class:`Replacement`.

    Args:
        network: a model of transformers.
    """
    for module in network.modules():
        if _is_fusible_rms_norm(module):
            module.forward = FusedRMSNorm(module)


def separate_norms(network: nn.Module) -> None:
    """Undo :func:`fuse_norms`.

    Args:
        network: a model of transformers.
    """
    for module in network.modules():
        if isinstance(vars(module).get("forward"), FusedRMSNorm):
            del module.forward


def _is_fusible_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm like Llama's, whose forward was not replaced.

    All classes of transformers with such a name and a ``variance_epsilon`` compute this function.
    The norms of Gemma, which scale by ``1 + weight``, have an ``eps`` instead.

    Args:
        module: any module.
    """
    module_class = type(module)
    return (
        module_class.__module__.startswith("transformers.models.")
        and module_class.__name__.endswith("RMSNorm")
        and hasattr(module, "variance_epsilon")
        and "forward" not in vars(module)
    )
