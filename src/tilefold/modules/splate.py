"""SPLATE (arXiv 2404.13950): sparse vectors from a frozen ColBERT through a trained adapter."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tilefold._internal.arguments import check_count, check_number
from tilefold.modules import fused_pooling as fused
from tilefold.modules.fused_pooling import Features, Head, PoolingModule, ScoreOptions

__all__ = ["FrozenTransformer", "SplateHead"]


class FrozenTransformer(Transformer):
    """A ``Transformer`` that is never trained.

    It computes no gradients, and applies no dropout in training mode either.
    """

    def __init__(self, model_name_or_path: str, **options: Any) -> None:
        super().__init__(model_name_or_path, **options)
        self.requires_grad_(False)
        self.model.eval()

    def train(self, mode: bool = True) -> FrozenTransformer:
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, features: Features, **kwargs: Any) -> Features:
        with torch.no_grad():
            out: Features = super().forward(dict(features), **kwargs)
        return out


class SplateHead(PoolingModule):
    """A residual adapter and a frozen masked-LM head over the token states of a frozen encoder.

    With token states ``h_s`` ``[D]`` and the MLM head ``t -> E LayerNorm(act(T t + c)) + b``::

        x_s   = h_s + W2 gelu(W1 h_s + b1) + b2        only this is trained
        out_v = max_s log1p(relu(logit_scale * MLM(x_s)_v))    over the tokens of the attention mask

    ``W2`` and ``b2`` start at zero, so the untrained model is the MLM head on ColBERT's states.
    Logits of all tokens never exist. The states before ColBERT's projection are read: an MLM head
    of the same backbone can decode these, and one pass of the backbone serves both this module and
    the projection that reranks.

    Args:
        hidden_size, vocab_size: D and V.
        adapter_size: rows of W1.
        activation: ``act`` of the MLM head, a name of transformers; ``None`` for a head that is
            only a decoder.
        layer_norm_eps, norm_bias: epsilon of the MLM head's LayerNorm, and whether it has a bias.
        transform_bias: whether ``T`` has a bias c.
        logit_scale: factor on the logits, bias included.
        train_bias: train ``b`` too, from which the sparsity starts.

    Attributes:
        adapter: W1 and W2.
        transform, norm, decoder: T, LayerNorm, E with b.
    """

    # the Transformer before this module has no LM head
    reads_logits = False
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "hidden_size",
        "vocab_size",
        "adapter_size",
        "activation",
        "layer_norm_eps",
        "norm_bias",
        "transform_bias",
        "logit_scale",
        "train_bias",
    ]

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        adapter_size: int | None = None,
        activation: str | None = "gelu",
        layer_norm_eps: float = 1e-12,
        norm_bias: bool = True,
        transform_bias: bool = True,
        logit_scale: float = 1.0,
        train_bias: bool = False,
    ) -> None:
        """Create the adapter, and the layers of the MLM head, whose weights are loaded later.

        Args:
            hidden_size: D, the width of the token states.
            vocab_size: V, the number of terms.
            adapter_size: width of the adapter's inner layer; D by default.
            activation: activation of the MLM head's transform; ``None`` for a head that is only a
                decoder.
            layer_norm_eps: epsilon of the MLM head's LayerNorm.
            norm_bias: whether that LayerNorm has a bias.
            transform_bias: whether the MLM head's transform has a bias.
            logit_scale: factor on the logits, bias included.
            train_bias: whether the bias of the decoder is trained.
        """
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("vocab_size", vocab_size)
        if adapter_size is not None:
            check_count("adapter_size", adapter_size)
        check_number("layer_norm_eps", layer_norm_eps)
        check_number("logit_scale", logit_scale)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.embedding_dimension = vocab_size
        self.adapter_size = hidden_size if adapter_size is None else adapter_size
        self.activation = activation
        self.layer_norm_eps = layer_norm_eps
        self.norm_bias = norm_bias
        self.transform_bias = transform_bias
        self.logit_scale = logit_scale
        self.train_bias = train_bias
        # An up-projection of zeros: the untrained adapter adds nothing to the states.
        up_projection = nn.Linear(self.adapter_size, hidden_size)
        nn.init.zeros_(up_projection.weight)
        nn.init.zeros_(up_projection.bias)
        self.adapter = nn.Sequential(
            nn.Linear(hidden_size, self.adapter_size),
            nn.GELU(),
            up_projection,
        )
        self.transform: nn.Module | None = None
        self.norm: nn.Module | None = None
        if activation is not None:
            self.transform = nn.Linear(hidden_size, hidden_size, bias=transform_bias)
            self.norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps, bias=norm_bias)
        self.decoder = nn.Linear(hidden_size, vocab_size)
        # Only the adapter is trained, and the decoder's bias if that is asked for.
        self.requires_grad_(False)
        self.adapter.requires_grad_(True)
        self.decoder.bias.requires_grad_(bool(train_bias))

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the sparse vectors of a batch from the token states of a ColBERT model.

        The states pass through the adapter and the layers of the MLM head before its decoder. The
        fused head then computes logits, activation and maximum together.

        Args:
            features: token states ``[B, S, D]``, or packed ``[1, T, D]``, in ``token_embeddings``.
            head: ignored, because the module has a head of its own.
            score_options: data type, implementation and layout of the result.

        Returns:
            Scores ``[B, V]``.
        """
        hidden: Tensor = features["token_embeddings"]
        states = hidden + self.adapter(hidden)
        if self.transform is not None and self.norm is not None and self.activation is not None:
            states = self.norm(ACT2FN[self.activation](self.transform(states)))
        if not fused.autocast_applies(states):
            # the operator takes states and weight of one dtype
            states = states.to(self.decoder.weight.dtype)
        selection = fused.select_tokens(features)
        if selection.cu_seqlens is not None:  # packed: [1, T, D]
            states = states.squeeze(0)
        head = Head(states, self.decoder.weight, self.decoder.bias)
        return fused.head_scores(head, selection, score_options, logit_scale=self.logit_scale)
