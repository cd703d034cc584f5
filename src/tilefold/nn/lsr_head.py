"""The LSR head as a module: a linear layer to the vocabulary, fused with its pooling and activation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.ops import lsr_head


class LinearParameters(nn.Module):
    """``weight`` ``[rows, D]`` and ``bias`` ``[rows]`` or ``None``, drawn as ``nn.Linear`` draws them."""

    weight: Tensor
    bias: Tensor | None
    shown: tuple[str, ...]  # options that are printed

    def __init__(
        self, hidden_size: int, rows: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def hidden_size(self) -> int:
        return self.weight.size(1)

    def reset_parameters(self) -> None:
        """Draw fresh parameters as ``nn.Linear`` does: uniform within ``1 / sqrt(D)``."""
        bound = 1 / math.sqrt(max(self.hidden_size, 1))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        shown = "".join(f", {name}={getattr(self, name)!r}" for name in self.shown)
        return f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, bias={self.bias is not None}{shown}"


class LSRHead(LinearParameters):
    """Scores of a sequence over the vocabulary, without the ``[B, S, V]`` logits.

    A thin owner of ``weight`` and ``bias`` around :func:`tilefold.ops.lsr_head`, which documents the mathematics. The
    paper is Sparton (arXiv 2603.25011); ``forward(hidden, mask)`` has the signature of its ``SpartonHead``.

    Args:
        hidden_size: D, the width of the hidden states.
        vocab_size: V, the number of output terms.
        bias: whether each term has a bias.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``, over the tokens of a sequence.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"``, ``"relu"``, ``"softplus"`` or ``"none"``.
        logit_scale: factor on ``hidden @ weight.T``, before the bias.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``.
        device: where the parameters are made.
        dtype: dtype of the parameters.

    Attributes:
        weight: ``[V, D]``.
        bias: ``[V]`` or ``None``.
    """

    shown = ("pooling", "activation", "logit_scale", "impl")

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = True,
        pooling: str = "max",
        activation: str = "log1p_relu",
        logit_scale: float = 1.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.pooling, self.activation, self.logit_scale, self.impl = pooling, activation, logit_scale, impl

    @property
    def vocab_size(self) -> int:
        return self.weight.size(0)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LSRHead:
        """A head that shares the parameters of ``linear`` (``[V, D]``), which may itself be tied to an embedding.

        Args:
            linear: for instance ``model.get_output_embeddings()`` of a masked language model.
            options: ``pooling``, ``activation``, ``logit_scale`` and ``impl`` of the constructor.

        Raises:
            TypeError: if ``linear`` is no ``nn.Linear``.
        """
        _check_linear(linear)
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        head.tie_weights(linear)
        return head

    def tie_weights(self, linear: nn.Linear) -> None:
        """Share ``weight`` and ``bias`` with ``linear`` from now on; gradients and updates reach both.

        Raises:
            TypeError: if ``linear`` is no ``nn.Linear``.
        """
        _check_linear(linear)
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """``[B, V]`` scores.

        Args:
            hidden: ``[B, S, D]``, or packed ``[T, D]`` with ``cu_seqlens``.
            attention_mask: ``[B, S]``, nonzero = keep; all tokens are kept without it.
            cu_seqlens: ``[B + 1]`` int32 offsets of packed sequences.
        """
        return lsr_head(
            hidden,
            self.weight,
            self.bias,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            pooling=self.pooling,
            activation=self.activation,
            logit_scale=self.logit_scale,
            impl=self.impl,
        )


def _check_linear(linear: object) -> None:
    if not isinstance(linear, nn.Linear):
        raise TypeError(
            f"linear must be a torch.nn.Linear, got {type(linear).__name__}; "
            "pass the output embeddings of the model, for instance model.get_output_embeddings()."
        )
