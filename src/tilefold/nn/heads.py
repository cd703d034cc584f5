"""Fused sparse-retrieval heads, and learned alphas of entmax attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilefold._internal.sigmoid import sigmoid
from tilefold.ops import lsr_head, token_scatter, token_scatter_sparse

_REMEDY = "pass the output embeddings of the model, for instance model.get_output_embeddings()."


class LinearParameters(nn.Module):
    """Base class of heads with the parameters of an ``nn.Linear``.

    Attributes:
        weight: ``[out_features, D]``.
        bias: ``[out_features]`` or None.
        option_names: attributes that are options of the operator. They are printed by ``repr``.
    """

    weight: Tensor
    bias: Tensor | None
    option_names: tuple[str, ...]

    def __init__(
        self,
        hidden_size: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Create the parameters as ``nn.Linear(hidden_size, out_features)`` does.

        Args:
            hidden_size: D.
            out_features: number of outputs.
            bias: whether there is a bias.
            device: device of the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__()
        weight = torch.empty(out_features, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
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
        """List the sizes and the options of the operator."""
        values = {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "bias": self.bias is not None,
        }
        for name in self.option_names:
            values[name] = getattr(self, name)
        return ", ".join(f"{name}={value!r}" for name, value in values.items())


class LSRHead(LinearParameters):
    """Scores of a sequence over the vocabulary, without the ``[B, S, V]`` logits.

    It holds ``weight`` and ``bias`` for :func:`tilefold.ops.lsr_head`, which documents the
    mathematics. The paper is Sparton (arXiv 2603.25011); ``forward(hidden, mask)`` has the
    signature of its ``SpartonHead``.

    Args:
        hidden_size, vocab_size: D, the width of the hidden states, and V, the number of output
            terms.
        bias: whether each term has a bias.
        pooling: ``"max"``, ``"sum"``, ``"mean"``, ``"cls"`` or ``"last"``, over the tokens of a
            sequence.
        activation: ``"log1p_relu"`` (SPLADE), ``"log1p_log1p_relu"``, ``"relu"``, ``"softplus"`` or
            ``"none"``.
        logit_scale: factor on ``hidden @ weight.T``, before the bias.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``.
        device, dtype: device and dtype of the parameters: ``weight`` ``[V, D]``, and ``bias``
            ``[V]`` or ``None``.

    Examples:
        >>> import torch
        >>> head = LSRHead(hidden_size=16, vocab_size=100)
        >>> head(torch.randn(2, 5, 16), torch.ones(2, 5)).shape
        torch.Size([2, 100])
        >>> LSRHead.from_linear(torch.nn.Linear(16, 100)).vocab_size  # shares weight and bias
        100
    """

    option_names = ("pooling", "activation", "logit_scale", "impl")

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
        """Create random parameters ``[V, D]`` and ``[V]``, and store the operator's options.

        Args:
            hidden_size: D, the width of the hidden states.
            vocab_size: V, the number of output terms.
            bias: whether each term has a bias.
            pooling: reduction over the tokens of a sequence.
            activation: name of the activation.
            logit_scale: factor on the logits, before the bias.
            impl: implementation of the operator.
            device: device of the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.pooling = pooling
        self.activation = activation
        self.logit_scale = logit_scale
        self.impl = impl

    @property
    def vocab_size(self) -> int:
        return self.weight.size(0)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LSRHead:
        """Create a head that shares the parameters of a linear layer.

        Args:
            linear: layer with a weight ``[V, D]``, which may be tied to an embedding. For instance
                ``model.get_output_embeddings()`` of a masked language model.
            options: ``pooling``, ``activation``, ``logit_scale`` and ``impl`` of the constructor.

        Raises:
            TypeError: if ``linear`` is no ``nn.Linear``.
        """
        _check_linear("linear", linear, _REMEDY)
        head = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",  # no memory for parameters that are replaced at once
            **options,
        )
        head.tie_weights(linear)
        return head

    def tie_weights(self, linear: nn.Linear) -> None:
        """Share ``weight`` and ``bias`` with ``linear`` from now on.

        Gradients and updates reach both modules.

        Raises:
            TypeError: if ``linear`` is no ``nn.Linear``.
        """
        _check_linear("linear", linear, _REMEDY)
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute the score of each vocabulary term for each of B sequences.

        Args:
            hidden: hidden states ``[B, S, D]``, or packed ``[T, D]`` with ``cu_seqlens``.
            attention_mask: ``[B, S]``, nonzero = keep. All tokens are kept without it.
            cu_seqlens: ``[B + 1]`` int32 offsets of packed sequences.

        Returns:
            Scores ``[B, V]``.
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


def _check_linear(name: str, linear: object, remedy: str) -> None:
    """Raise ``TypeError`` unless an argument is an ``nn.Linear``."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{name} must be a torch.nn.Linear, got {type(linear).__name__}; {remedy}")


class TokenWeightHead(LinearParameters):
    """Scores over the vocabulary from one learned weight per token, without term expansion.

    It holds ``weight`` and ``bias`` for :func:`tilefold.ops.token_scatter`, which documents the
    mathematics. This is the head of uniCOIL (arXiv 2106.14807) and the lexical one of
    BGE-M3 (arXiv 2402.03216). The parameters have the names and shapes of ``nn.Linear(hidden_size,
    1)``, so the state dict of such a layer loads unchanged: BGE-M3's ``sparse_linear.pt`` with
    ``head.load_state_dict(torch.load(path, weights_only=True))``.

    Args:
        hidden_size, vocab_size, bias, impl, device, dtype: see :class:`LSRHead`; ``weight`` is
            ``[1, D]``, ``bias`` ``[1]`` or ``None``.
        reduce: ``"max"`` or ``"sum"`` over the tokens with the same id.
        activation: ``"relu"``, ``"log1p_relu"``, ``"log1p_log1p_relu"``, ``"softplus"`` or
            ``"none"``.
        ignore_ids: ids whose tokens get no score, for instance those of CLS, SEP, PAD and UNK.

    Examples:
        >>> import torch
        >>> head = TokenWeightHead(hidden_size=16, vocab_size=100)
        >>> input_ids = torch.randint(100, (2, 5))
        >>> head(torch.randn(2, 5, 16), input_ids).shape
        torch.Size([2, 100])
    """

    option_names = ("reduce", "activation", "ignore_ids", "impl")

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
        """Create a linear layer that weights tokens, with the options of ``token_scatter``.

        Args:
            hidden_size: D, the width of the hidden states.
            vocab_size: V, the number of ids of the tokenizer, which is the width of the scores.
            bias: whether to add a bias to the weight of a token.
            reduce: ``"max"`` or ``"sum"`` over the tokens with the same id.
            activation: name of the activation.
            ignore_ids: ids whose tokens get no score.
            impl: implementation of the operator.
            device: device of the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__(hidden_size, 1, bias, device, dtype)
        self.vocab_size = vocab_size
        self.reduce = reduce
        self.activation = activation
        self.impl = impl
        self.ignore_ids = tuple(ignore_ids or ())

    @classmethod
    def from_linear(cls, layer: nn.Linear, vocab_size: int, **options: Any) -> TokenWeightHead:
        """Create a head that shares the parameters of a linear layer with one output.

        Args:
            layer: for instance the ``sparse_linear`` of a BGE-M3 model, or the ``tok_proj`` of a
                uniCOIL model.
            vocab_size: V, the number of ids of the tokenizer, which is the width of the scores.
            options: ``reduce``, ``activation``, ``ignore_ids`` and ``impl`` of the constructor.

        Raises:
            TypeError: if ``layer`` is not an ``nn.Linear``.
            ValueError: if the layer has more than one output.
        """
        _check_linear(
            "layer",
            layer,
            "for a layer of any other kind, call tilefold.token_scatter on its output.",
        )
        if layer.out_features != 1:
            raise ValueError(
                f"layer must have one output, got {layer.out_features}; for a decoder use LSRHead.",
            )
        head = cls(
            layer.in_features,
            vocab_size,
            layer.bias is not None,
            device="meta",  # no memory for parameters that are replaced at once
            **options,
        )
        head.weight = layer.weight
        head.bias = layer.bias
        return head

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute a weight for each token, and scatter the weights to scores of the vocabulary.

        Args:
            hidden: hidden states ``[B, S, D]``, or packed ``[T, D]`` with ``cu_seqlens``.
            input_ids: token ids ``[B, S]``, or packed ``[T]``: the term of each token.
            attention_mask: ``[B, S]``, nonzero = keep. All tokens are kept without it.
            cu_seqlens: ``[B + 1]`` int32 offsets of packed sequences.

        Returns:
            Scores ``[B, V]``, 0 for terms that a sequence does not have.
        """
        return token_scatter(
            functional.linear(hidden, self.weight, self.bias),
            input_ids,
            self.vocab_size,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            reduce=self.reduce,
            activation=self.activation,
            ignore_ids=self.ignore_ids,
            impl=self.impl,
        )

    def encode(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
    ) -> Tensor:
        """Compute the scores as a sparse ``[B, V]`` CSR tensor, without gradients.

        Each token gets a weight, and the weights of tokens with the same id are reduced to a score.

        Args:
            hidden: hidden states ``[B, S, D]``, or packed ``[T, D]`` with ``cu_seqlens``.
            input_ids: token ids ``[B, S]``, or packed ``[T]``: the term of each token.
            attention_mask: ``[B, S]``, nonzero = keep. All tokens are kept without it.
            cu_seqlens: ``[B + 1]`` int32 offsets of packed sequences.
            top_k: most entries per row, or None for all.
            min_weight: entries must be larger than this.
        """
        with torch.no_grad():
            return token_scatter_sparse(
                functional.linear(hidden, self.weight, self.bias),
                input_ids,
                self.vocab_size,
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                reduce=self.reduce,
                activation=self.activation,
                ignore_ids=self.ignore_ids,
                top_k=top_k,
                min_weight=min_weight,
            )


class EntmaxAlpha(nn.Module):
    """One learned alpha in (1, 2) per attention head.

    Alpha is ``1 + sigmoid(theta)``, so that no optimiser step leaves the range.

    Args:
        heads: number of heads.
        initial: alpha at the start, strictly between 1 and 2.

    Raises:
        ValueError: if there are no heads, or ``initial`` is outside (1, 2).

    Examples:
        >>> import torch
        >>> from tilefold.ops import entmax_attention
        >>> alpha = EntmaxAlpha(heads=4)
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16).unbind()
        >>> entmax_attention(q, k, v, alpha=alpha()).sum().backward()
        >>> alpha.theta.grad.shape
        torch.Size([4])
    """

    def __init__(self, heads: int, initial: float = 1.5) -> None:
        """Create one learnable ``theta`` per head, such that each alpha is ``initial``.

        Args:
            heads: number of heads.
            initial: alpha at the start, strictly between 1 and 2.
        """
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}.")
        if not 1 < initial < 2:
            raise ValueError(
                f"initial must lie strictly between 1 and 2, got {initial}; "
                "theta would be infinite at 1 and 2.",
            )
        # Solves initial = 1 + sigmoid(theta).
        initial_theta = math.log((initial - 1) / (2 - initial))
        self.theta = nn.Parameter(torch.full((heads,), initial_theta))

    def forward(self) -> Tensor:
        """Return the alphas, ``[heads]`` fp32."""
        return 1 + sigmoid(self.theta.float())

    def extra_repr(self) -> str:
        return f"heads={self.theta.numel()}"
