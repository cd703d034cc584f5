"""``SpladeLoss`` whose penalties see the vectors before a residual, a window and a norm (PROSPER, arXiv 2510.18527)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor

__all__ = ["BaseSpladeLoss"]


class BaseSpladeLoss(SpladeLoss):
    """Ranks by ``sentence_embedding`` and penalises ``base_embedding``, both of which the model must give.

    Arguments, weights and their schedule are those of ``SpladeLoss``. Each column of texts is one forward.

    Raises:
        ValueError: in forward, for a model without ``base_embedding``.
    """

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The losses by name, as ``SpladeLoss`` gives them."""
        outputs: list[dict[str, Any]] = [self.model(features) for features in sentence_features]
        if missing := next((sorted(map(str, out)) for out in outputs if "base_embedding" not in out), None):
            raise ValueError(
                f"model must give base_embedding for penalties on base weights, got {missing}; use SpladeLoss for "
                "models without a literal residual."
            )
        final = [out["sentence_embedding"] for out in outputs]
        base = [out["base_embedding"] for out in outputs]
        ranking = self.loss.compute_loss_from_embeddings(final, labels)
        losses: dict[str, Tensor] = dict(ranking) if isinstance(ranking, dict) else {"base_loss": ranking}
        documents = base if self.use_document_regularizer_only else base[1:]
        penalty = self.document_regularizer.compute_loss_from_embeddings(torch.cat(documents))
        losses["document_regularizer_loss"] = penalty * self.document_regularizer_weight
        if self.query_regularizer_weight is not None:
            penalty = self.query_regularizer.compute_loss_from_embeddings(base[0])
            losses["query_regularizer_loss"] = penalty * self.query_regularizer_weight
        return losses
