"""Top-k pruning and normalisation of sparse vectors (PROSPER, arXiv 2510.18527)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold._internal.arguments import check_count
from tilefold.modules.fused_pooling import Features, Head, PoolingModule, ScoreOptions
from tilefold.ops.checks import check_tensor

__all__ = ["LexicalWindow", "keep_heaviest"]


class LexicalWindow(PoolingModule):
    """Keeps the ``top_k`` heaviest terms of each row, and optionally normalises the row.

    It computes ``out = TopK_k(w) / ||TopK_k(w)||_2``, differentiable through the terms that are
    kept. A row with at most ``k`` nonzero terms keeps them, and a row of zeros stays zero. Put it
    after the module that writes ``sentence_embedding`` ``[B, V]``. Sparse (CSR) rows come out
    dense.

    Args:
        top_k: terms that are kept, at least 1; ``None`` keeps all.
        normalize: ``"l2"`` or ``None``.
        embedding_dimension: V, if it is known before the first forward.

    Raises:
        ValueError: if an option has another value.
    """

    reads_logits = False
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "top_k",
        "normalize",
        "embedding_dimension",
    ]

    def __init__(
        self,
        top_k: int | None = None,
        normalize: str | None = None,
        embedding_dimension: int | None = None,
    ) -> None:
        """Check and store the options; the module has no weights.

        Args:
            top_k: number of terms that are kept per row; ``None`` keeps all.
            normalize: ``"l2"`` scales each row to length 1; ``None`` does not scale.
            embedding_dimension: V, if it is known before the first forward.
        """
        super().__init__()
        check_pruning_options(top_k, normalize)
        self.top_k = top_k
        self.normalize = normalize
        self.embedding_dimension = embedding_dimension

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Prune and normalise the vectors of the preceding module.

        :class:`FusedPooling` defines the name and the arguments, for modules that compute a head
        and its pooling in one operator.

        Args:
            features: vectors ``[B, V]``, dense or CSR, in ``sentence_embedding``.
            head: ignored, because this module pools no logits.
            score_options: ignored.

        Returns:
            Dense vectors ``[B, V]``.
        """
        rows: Tensor = features["sentence_embedding"]
        if rows.layout != torch.strided:
            rows = rows.to_dense()
        self.embedding_dimension = rows.size(1)  # known from the first vectors on
        return prune_and_normalize(rows, self.top_k, self.normalize)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, normalize={self.normalize!r}"


def check_pruning_options(top_k: int | None, normalize: str | None) -> None:
    """Raise ``ValueError`` unless the options are valid for :class:`LexicalWindow`."""
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a whole number of at least 1 or None, got {top_k!r}.")
    if normalize not in (None, "l2"):
        raise ValueError(f"normalize must be 'l2' or None, got {normalize!r}.")


def prune_and_normalize(rows: Tensor, top_k: int | None, normalize: str | None) -> Tensor:
    """Keep the largest entries of each row, then scale the row to length 1.

    Both steps are optional.

    Args:
        rows: term weights of B texts, ``[B, V]``, not negative.
        top_k: number of entries that are kept of each row; the others become zero. ``None`` keeps
            all.
        normalize: ``"l2"`` divides each row by its Euclidean length after pruning. ``None`` leaves
            lengths unchanged.

    Returns:
        Rows ``[B, V]``. A row of zeros stays zero.
    """
    if top_k is not None:
        rows = keep_heaviest(rows, top_k)
    if normalize is None:
        return rows
    length: Tensor = rows.norm(dim=1, keepdim=True)
    nonzero_length = length.where(length > 0, 1)  # divides a row of zeros by 1
    return rows / nonzero_length


def keep_heaviest(rows: Tensor, count: int) -> Tensor:
    """Set all but the `count` largest entries of each row to zero.

    The gradient reaches only the entries that are kept.

    Args:
        rows: ``[B, V]``, not negative.
        count: entries to keep of each row. Among equal entries the choice is arbitrary.

    Returns:
        A new tensor ``[B, V]``; `rows` itself if it has at most `count` columns.

    Raises:
        TypeError: if `rows` is not a tensor.
        ValueError: if `count` is not an integer of at least 1.
    """
    check_tensor("rows", rows)
    check_count("count", count)
    if count >= rows.size(1):
        return rows
    heaviest = rows.topk(count, dim=1, sorted=False)
    return torch.zeros_like(rows).scatter(1, heaviest.indices, heaviest.values)
