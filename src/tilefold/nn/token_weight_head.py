"""Token weights as a module: a linear layer to one number per token, scattered to the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.nn.lsr_head import LinearParameters
from tilefold.ops import token_scatter, token_scatter_sparse


class TokenWeightHead(LinearParameters):
    """Scores over the vocabulary from one learned weight per token, without term expansion.

    A thin owner of ``weight`` and ``bias`` around :func:`tilefold.ops.token_scatter`, which documents the mathematics.
    This is the head of uniCOIL (arXiv 2106.14807) and the lexical one of BGE-M3 (arXiv 2402.03216). The parameters have
    the names and shapes of ``nn.Linear(hidden_size, 1)``, so the state dict of such a layer loads unchanged: BGE-M3's
    ``sparse_linear.pt`` with ``head.load_state_dict(torch.load(path, weights_only=True))``.

    Args:
        hidden_size: D, the width of the hidden states.
        vocab_size: V, the number of columns of the scores.
        bias: whether there is one.
        reduce: ``"max"`` or ``"sum"`` over the tokens with the same id.
        activation: ``"relu"``, ``"log1p_relu"``, ``"log1p_log1p_relu"``, ``"softplus"`` or ``"none"``.
        ignore_ids: ids whose tokens do not count, for instance those of CLS, SEP, PAD and UNK.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``.
        device: where the parameters are made.
        dtype: dtype of the parameters.

    Attributes:
        weight: ``[1, D]``.
        bias: ``[1]`` or ``None``.
    """

    shown = ("reduce", "activation", "ignore_ids", "impl")

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = True,
        reduce: str = "max",
        activation: str = "relu",
        ignore_ids: Iterable[int] | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, 1, bias, device, dtype)
        self.vocab_size, self.reduce, self.activation, self.impl = vocab_size, reduce, activation, impl
        self.ignore_ids = tuple(ignore_ids or ())

    @classmethod
    def from_linear(cls, layer: nn.Linear, vocab_size: int, **options: Any) -> TokenWeightHead:
        """A head that shares the parameters of ``layer``, an ``nn.Linear(D, 1)``.

        Args:
            layer: for instance the ``sparse_linear`` of a BGE-M3 model, or the ``tok_proj`` of a uniCOIL model.
            vocab_size: V.
            options: ``reduce``, ``activation``, ``ignore_ids`` and ``impl`` of the constructor.

        Raises:
            TypeError: if ``layer`` is not an ``nn.Linear``.
            ValueError: if it has more than one output.
        """
        if not isinstance(layer, nn.Linear):
            raise TypeError(
                f"layer must be a torch.nn.Linear, got {type(layer).__name__}; "
                "call tilefold.token_scatter on the weights that other layers give."
            )
        if layer.out_features != 1:
            raise ValueError(f"layer must have one output, got {layer.out_features}; a decoder goes into LSRHead.")
        head = cls(layer.in_features, vocab_size, layer.bias is not None, device="meta", **options)
        head.weight, head.bias = layer.weight, layer.bias
        return head

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """``[B, V]`` scores.

        Args:
            hidden: ``[B, S, D]``, or packed ``[T, D]`` with ``cu_seqlens``.
            input_ids: ``[B, S]`` or packed ``[T]``.
            attention_mask: ``[B, S]``, nonzero = keep; all tokens are kept without it.
            cu_seqlens: ``[B + 1]`` int32 offsets of packed sequences.
        """
        operands, options = self._arguments(hidden, input_ids, attention_mask, cu_seqlens)
        return token_scatter(*operands, **options, impl=self.impl)

    def encode(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Tensor:
        """The scores above ``min_weight`` as a ``[B, V]`` CSR tensor, at most ``top_k`` per row; not differentiable.

        The other arguments are those of :meth:`forward`; see :func:`tilefold.ops.token_scatter_sparse`.
        """
        with torch.no_grad():
            operands, options = self._arguments(hidden, input_ids, attention_mask, cu_seqlens)
            return token_scatter_sparse(*operands, **options, top_k=top_k, min_weight=min_weight)

    def _arguments(self, hidden: Tensor, input_ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Any:
        options: dict[str, Any] = {"attention_mask": mask, "cu_seqlens": cu_seqlens, "reduce": self.reduce}
        options |= {"activation": self.activation, "ignore_ids": self.ignore_ids}
        return (linear(hidden, self.weight, self.bias), input_ids, self.vocab_size), options
