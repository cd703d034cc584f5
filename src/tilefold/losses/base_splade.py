"""``SpladeLoss`` with penalties on other vectors, and ``CachedSpladeLoss`` with mini-batches of all
columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers.sparse_encoder.losses import CachedSpladeLoss, SpladeLoss
from torch import Tensor

from tilefold._internal.sentence_transformers import check_sentence_transformers

check_sentence_transformers()

__all__ = ["JOINED", "BaseSpladeLoss", "JoinedSpladeLoss"]

JOINED = "joined_columns"  # key of a packed column's place among those of its batch


class BaseSpladeLoss(SpladeLoss):
    """Ranks by ``sentence_embedding`` and penalises ``base_embedding``, both of which the model
    must give.

    That is before a residual, a window and a norm (PROSPER, arXiv 2510.18527). Arguments, weights
    and their schedule are those of ``SpladeLoss``. Each column of texts is one forward.

    Raises:
        ValueError: in forward, for a model without ``base_embedding``.
    """

    def forward(
        self,
        sentence_features: Iterable[dict[str, Tensor]],
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The losses by name, as ``SpladeLoss`` gives them."""
        outputs: list[dict[str, Any]] = [self.model(features) for features in sentence_features]
        if missing := next(
            (sorted(map(str, out)) for out in outputs if "base_embedding" not in out),
            None,
        ):
            raise ValueError(
                f"model must give base_embedding for penalties on base weights, got {missing}; use SpladeLoss for "
                "models without a literal residual.",
            )
        final = [out["sentence_embedding"] for out in outputs]
        base = [out["base_embedding"] for out in outputs]
        ranking = self.loss.compute_loss_from_embeddings(final, labels)
        losses: dict[str, Tensor] = (
            dict(ranking) if isinstance(ranking, dict) else {"base_loss": ranking}
        )
        documents = base if self.use_document_regularizer_only else base[1:]
        penalty = self.document_regularizer.compute_loss_from_embeddings(torch.cat(documents))
        losses["document_regularizer_loss"] = penalty * self.document_regularizer_weight
        if self.query_regularizer_weight is not None:
            penalty = self.query_regularizer.compute_loss_from_embeddings(base[0])
            losses["query_regularizer_loss"] = penalty * self.query_regularizer_weight
        return losses


class JoinedSpladeLoss(CachedSpladeLoss):
    """The stock loss, with its arguments and results, for batches of which ``collate_ahead`` joins
    the columns.

    A stock mini-batch is of one column, that of queries too short for the time of its launches, and
    waits for the GPU five times, to learn where its tokens lie. Here it holds the same texts of
    every column, and nothing waits.
    """

    mini_batch_size: int
    _joined = 1  # columns of a mini-batch

    def forward_cached(
        self,
        sentence_features: Iterable[dict[str, Any]],
        labels: Tensor | None = None,
    ) -> Tensor:
        features, size = list(sentence_features), self.mini_batch_size
        columns, _ = features[0].get(JOINED, (None, 0))
        rows = None if columns is None or self.mini_batch_num_tokens else columns.rows(features)
        self._joined = 1 if rows is None else len(features)
        self.mini_batch_size = size * self._joined
        try:
            loss: Tensor = super().forward_cached(features if rows is None else [rows], labels)
        finally:
            self.mini_batch_size = size
        return loss

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        if self._joined > 1:
            rows = [rep.view(-1, self._joined, rep.size(1)).unbind(1) for rep in reps[0]]
            reps = [list(column) for column in zip(*rows, strict=True)]
        return super().calculate_loss(reps, labels, with_backward=with_backward)  # type: ignore[no-any-return]
