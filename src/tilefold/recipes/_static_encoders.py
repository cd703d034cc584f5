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
    """Configuration of an encoder without a network, with the other encoder's tokenizer.

    Attributes:
        trainable: whether the weights are trained.
    """

    has_network: ClassVar[bool] = False

    trainable: bool = checked(False, BOOLEAN)

    @abstractmethod
    def initial_weights(self, base: Base) -> list[float]:
        """Return the weight of each vocabulary entry, or one weight for all entries."""

    def build(self, base: Base) -> list[Module]:
        """Build the module that looks up the weight of each distinct token of a text.

        Args:
            base: settings of the model. ``base.network`` is the Transformer of the other encoder,
                usually the document encoder, and ``base.vocab_size`` its vocabulary size.

        Returns:
            The ``SparseStaticEmbedding`` of sentence-transformers if the weights are not trained
            and there is one for each token id. Otherwise :class:`tilefold.modules.StaticQuery`.
        """
        import torch
        from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

        from tilefold.modules import StaticQuery

        weights = torch.tensor(self.initial_weights(base))  # [V], or [1] for all entries
        tokenizer = base.network.tokenizer
        module: SparseStaticEmbedding = StaticQuery(
            tokenizer,
            weights,
            frozen=not self.trainable,
            vocab_size=base.vocab_size,
        )
        if not self.trainable and module.fits_stock():  # the model then loads without tilefold
            weight_of_each_id = weights.expand(base.vocab_size).clone()
            module = SparseStaticEmbedding(tokenizer, weight_of_each_id, frozen=True)
        # The network's limit is lower than base.max_length if it has few position embeddings.
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
        """Return one weight for all vocabulary entries."""
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
        base: settings of the model, with the tokenizer ``base.network.tokenizer`` and the
            vocabulary size V.

    Returns:
        The V weights.

    Raises:
        ValueError: if the file is not a JSON object of token -> weight, a weight is negative, or no
            token is in the vocabulary.
    """
    try:
        weight_of_token = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"idf must name a JSON file of token -> weight, got {file}: {error}.",
        ) from error
    if not isinstance(weight_of_token, dict):
        raise ValueError(
            "idf must name a JSON file of token -> weight, got a "
            f"{type(weight_of_token).__name__} in {file}.",
        )
    tokenizer = base.network.tokenizer
    weight_of_id: dict[int, float] = {}
    for token, weight in weight_of_token.items():
        # This validator raises an error if the weight is not a number of at least 0.
        NOT_NEGATIVE(f"idf: the weight of {token!r} in {file}", weight)
        token_id = tokenizer.convert_tokens_to_ids(token)
        is_in_vocabulary = token_id not in (None, tokenizer.unk_token_id)
        if is_in_vocabulary:
            weight_of_id[token_id] = float(weight)
    if not weight_of_id:
        raise ValueError(
            "idf must name a JSON file of token -> weight, got no token of the model in "
            f"{file}; use a file for this model's vocabulary, or leave idf out.",
        )
    return [weight_of_id.get(token_id, 1.0) for token_id in range(base.vocab_size)]


def _idf_of_texts(base: Base) -> list[float]:
    """Compute BM25's IDF of each vocabulary entry in the sample texts.

    The IDF is ``log(1 + (N - df + 1/2) / (df + 1/2))`` for N texts, df of which have the token.

    Args:
        base: settings of the model, with the sample texts, the tokenizer
            ``base.network.tokenizer``, the maximum length and the vocabulary size V.

    Returns:
        The V weights.

    Raises:
        ValueError: if there are no texts.
    """
    if not base.texts:
        raise ValueError(
            "kind 'idf' counts document frequencies in sample texts, got no text; pass "
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
