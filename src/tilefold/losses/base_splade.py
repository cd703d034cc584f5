"""Variants of ``SpladeLoss`` and ``CachedSpladeLoss``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers.sparse_encoder.losses import CachedSpladeLoss, SpladeLoss
from torch import Tensor

from tilefold._internal.sentence_transformers import check_sentence_transformers

check_sentence_transformers()

__all__ = ["JOINED", "BaseSpladeLoss", "JoinedSpladeLoss"]

# feature that holds the joined columns of a batch, and the position of a column among them
JOINED = "joined_columns"


class BaseSpladeLoss(SpladeLoss):
    """A ``SpladeLoss`` that ranks by ``sentence_embedding`` and penalises ``base_embedding``.

    The model writes both. The base embedding is the vector before weight is added for the terms of
    the text itself, before pruning and before normalisation (PROSPER, arXiv 2510.18527). Arguments,
    weights and their schedule are those of ``SpladeLoss``. Each column of texts is one forward.

    Raises:
        ValueError: in forward, if the model returns no ``base_embedding``.
    """

    def forward(
        self,
        sentence_features: Iterable[dict[str, Tensor]],
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the ranking loss of the final vectors, and the penalties of the base vectors.

        A model first predicts a base vector. The final vector has additional weight for the terms
        of the text itself, holds only the largest scores, and is normalised.

        Args:
            sentence_features: the columns of the batch: queries, relevant documents, and negatives
                if there are any. The model returns two vectors of a text ``[B, V]``, the final one
                as ``sentence_embedding`` and the base vector as ``base_embedding``.
            labels: labels of the ranking loss, such as teacher scores.

        Returns:
            The losses and weighted penalties by name, as ``SpladeLoss`` returns them.
        """
        outputs: list[dict[str, Any]] = [self.model(features) for features in sentence_features]
        for output in outputs:
            if "base_embedding" not in output:
                raise ValueError(
                    "model must return base_embedding, on which the penalties are computed, "
                    f"got {sorted(map(str, output))}; use SpladeLoss for a model without it.",
                )
        final_vectors = [output["sentence_embedding"] for output in outputs]
        base_vectors = [output["base_embedding"] for output in outputs]
        ranking_loss = self.loss.compute_loss_from_embeddings(final_vectors, labels)
        losses: dict[str, Tensor] = {}
        if isinstance(ranking_loss, dict):
            losses.update(ranking_loss)
        else:
            losses["base_loss"] = ranking_loss  # the name of SpladeLoss for the ranking loss
        documents = base_vectors[1:]
        # If SpladeLoss has no regulariser for queries, that of documents penalises all texts.
        penalized = base_vectors if self.use_document_regularizer_only else documents
        penalty = self.document_regularizer.compute_loss_from_embeddings(torch.cat(penalized))
        losses["document_regularizer_loss"] = penalty * self.document_regularizer_weight
        if self.query_regularizer_weight is not None:
            penalty = self.query_regularizer.compute_loss_from_embeddings(base_vectors[0])
            losses["query_regularizer_loss"] = penalty * self.query_regularizer_weight
        return losses


class JoinedSpladeLoss(CachedSpladeLoss):
    """A ``CachedSpladeLoss`` whose mini-batches hold texts of all columns.

    Arguments and results are those of ``CachedSpladeLoss``, whose mini-batches hold texts of one
    column: queries, documents or negatives. Queries are so short that their launches take longer
    than the kernels, and each mini-batch waits for the GPU five times to read the positions of its
    tokens. A joined mini-batch holds the same rows of every column, as ``collate_ahead`` tokenised
    them together, and never waits.
    """

    mini_batch_size: int
    # number of columns that are joined in a mini-batch
    _n_joined = 1

    def forward_cached(
        self,
        sentence_features: Iterable[dict[str, Any]],
        labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss in mini-batches, which hold all columns if they were tokenised together.

        Args:
            sentence_features: the columns of the batch: queries, relevant documents and negatives.
            labels: labels of the ranking loss.
        """
        features = list(sentence_features)
        joined_features = self._joined_features(features)
        if joined_features is None:
            self._n_joined = 1
        else:
            self._n_joined = len(features)
            features = [joined_features]
        # CachedSpladeLoss gets one column, whose mini-batches have the rows of all joined columns.
        mini_batch_size = self.mini_batch_size
        self.mini_batch_size = mini_batch_size * self._n_joined
        try:
            loss: Tensor = super().forward_cached(features, labels)
        finally:
            self.mini_batch_size = mini_batch_size
        return loss

    def _joined_features(self, features: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the input of one forward for the texts of all columns of a batch.

        Args:
            features: the input of one forward for each column.

        Returns:
            The joined input. ``None`` if the columns were not tokenised together, if some of them
            are missing, or if mini-batches are limited by tokens, which applies to each column
            separately.
        """
        if self.mini_batch_num_tokens or JOINED not in features[0]:
            return None
        joined: dict[str, Any] | None = features[0][JOINED].columns.rows(features)
        return joined

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """Compute the loss of ``CachedSpladeLoss``, after splitting joined mini-batches by column.

        Args:
            reps: embeddings of each column, as a list with one tensor ``[rows, V]`` per mini-batch.
                Joined columns are one column, in which the rows of all columns alternate.
            labels: labels of the ranking loss.
            with_backward: whether to call backward at once, as in ``CachedSpladeLoss``.
        """
        if self._n_joined > 1:
            # The rows of a joined mini-batch alternate between the columns: a view
            # [rows per column, columns, V] separates them.
            mini_batches = [
                embeddings.view(-1, self._n_joined, embeddings.size(1)).unbind(1)
                for embeddings in reps[0]
            ]
            reps = [list(column) for column in zip(*mini_batches, strict=True)]
        loss: Tensor = super().calculate_loss(reps, labels, with_backward=with_backward)
        return loss
