"""Encoders without a network: a weight for each distinct token of a text."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tilefold._internal.typing import Module
from tilefold.recipes._encoder_spec import Base, EncoderSpec
from tilefold.recipes._settings import BOOLEAN, NOT_NEGATIVE, POSITIVE, checked, nonempty_text

IDF_BATCH_SIZE = 256  # texts that are tokenized at once to count document frequencies


@dataclass(frozen=True, kw_only=True)
class StaticSpec(EncoderSpec):
    """Configuration of an encoder without a network, with the tokenizer of the other encoder.

    Attributes:
        trainable: whether the weights are trained.
    """

    has_network: ClassVar[bool] = False

    trainable: bool = checked(False, BOOLEAN)

    @abstractmethod
    def initial_weights(self, base: Base) -> list[float]:
        """Return the weight of each vocabulary entry, or one weight of all entries."""

    def build(self, base: Base) -> list[Module]:
        """Build the module that looks up the weight of each distinct token of a text.

        Args:
            base: the tokenizer, maximum length and vocabulary size of the other encoder, whose
                network is ``base.network``.

        Returns:
            The ``SparseStaticEmbedding`` of sentence-transformers if it can hold the weights and
            they are not trained. Otherwise :class:`tilefold.modules.StaticQuery`.
        """
        import torch
        from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

        from tilefold.modules import StaticQuery

        weight = torch.tensor(self.initial_weights(base))
        tokenizer = base.network.tokenizer
        module: SparseStaticEmbedding = StaticQuery(
            tokenizer,
            weight,
            frozen=not self.trainable,
            vocab_size=base.vocab_size,
        )
        if not self.trainable and module.fits_stock():
            module = SparseStaticEmbedding(
                tokenizer,
                weight.expand(base.vocab_size).clone(),
                frozen=True,
            )
        # the network's limit, which is lower than max_length if it has few positions
        module.max_seq_length = base.network.max_seq_length
        return [module]


@dataclass(frozen=True, kw_only=True)
class BinarySpec(StaticSpec, kind="binary"):
    """Configuration of an encoder with the same weight for each distinct token.

    Attributes:
        scale: weight of every token.
    """

    scale: float = checked(0.3, POSITIVE)

    def initial_weights(self, base: Base) -> list[float]:
        """Return the weight of all vocabulary entries."""
        return [self.scale]


@dataclass(frozen=True, kw_only=True)
class IdfSpec(StaticSpec, kind="idf"):
    """Configuration of an encoder with the inverse document frequency of each distinct token.

    Attributes:
        idf: path of a JSON file of token -> weight; ``None`` counts document frequencies in the
            sample texts.
    """

    idf: str | None = checked(None, nonempty_text("the path of a file"))

    def initial_weights(self, base: Base) -> list[float]:
        """Return the weight of each vocabulary entry."""
        if self.idf is None:
            return _idf_of_texts(base)
        return _idf_of_file(self.idf, base)


def _idf_of_file(file: str, base: Base) -> list[float]:
    """Read the weight of each vocabulary entry from a JSON file of token -> weight.

    Tokens that the file does not list get weight 1, as in OpenSearch.

    Args:
        file: path of the file.
        base: the tokenizer, as ``base.network.tokenizer``, and the vocabulary size V.

    Returns:
        The V weights.

    Raises:
        ValueError: if the file is not such a JSON file, or has no token of the vocabulary.
    """
    try:
        weight_of_token = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"idf must name a JSON file of token -> weight, got {file}: {error}.",
        ) from error
    if not isinstance(weight_of_token, dict):
        weight_of_token = {}
    tokenizer = base.network.tokenizer
    weight_of_id: dict[int, float] = {}
    for token, weight in weight_of_token.items():
        NOT_NEGATIVE(f"idf: the weight of {token!r} in {file}", weight)
        token_id = tokenizer.convert_tokens_to_ids(token)
        is_in_vocabulary = token_id not in (None, tokenizer.unk_token_id)
        if is_in_vocabulary:
            weight_of_id[token_id] = float(weight)
    if not weight_of_id:
        raise ValueError(
            "idf must name a JSON file of token -> weight, got no token of the model in "
            f"{file}; take the file of this model's vocabulary, or leave idf out.",
        )
    return [weight_of_id.get(token_id, 1.0) for token_id in range(base.vocab_size)]


def _idf_of_texts(base: Base) -> list[float]:
    """Compute BM25's IDF of each vocabulary entry in the sample texts.

    It is ``log(1 + (N - df + 1/2) / (df + 1/2))`` for N texts, if df of them contain the token.

    Args:
        base: the sample texts, the tokenizer as ``base.network.tokenizer``, maximum length and the
            vocabulary size V.

    Returns:
        The V weights.

    Raises:
        ValueError: if there are no texts.
    """
    if not base.texts:
        raise ValueError(
            "kind 'idf' needs texts to count document frequencies in, got no text; pass "
            "texts=[..], or idf=, a JSON file of token -> weight.",
        )
    n_texts = len(base.texts)
    document_frequency: Counter[int] = Counter()
    for begin in range(0, n_texts, IDF_BATCH_SIZE):
        tokenized = base.network.tokenizer(
            list(base.texts[begin : begin + IDF_BATCH_SIZE]),
            add_special_tokens=False,
            truncation=True,
            max_length=base.max_length,
        )
        for token_ids in tokenized["input_ids"]:
            document_frequency.update(set(token_ids))
    idf = []
    for token_id in range(base.vocab_size):
        df = document_frequency[token_id]
        idf.append(math.log1p((n_texts - df + 0.5) / (df + 0.5)))
    return idf
