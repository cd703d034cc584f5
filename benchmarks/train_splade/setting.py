"""Models and data of the training benchmark: encoders with random weights, and batches of real
text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmarks.train_data import make_encoder

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection

# More than a token has in the data's languages, so that S times as many characters have S tokens.
CHARACTERS_PER_TOKEN = 8
# tokens of a query, as in SPLADE's training on MS MARCO
QUERY_LENGTH = 32
# distinct pairs, which larger batches repeat
POOL = 512


@dataclass(frozen=True)
class ModelSize:
    """The size of a masked language model.

    Attributes:
        name: the value of ``--model``.
        architecture: the family of transformers.
        vocab, hidden, layers, heads, intermediate: V, D and the encoder's sizes.
    """

    name: str
    architecture: Literal["bert", "xlm-roberta"]
    vocab: int
    hidden: int
    layers: int
    heads: int
    intermediate: int


MODEL_SIZES: dict[str, ModelSize] = {
    size.name: size
    for size in (
        ModelSize("bert-base", "bert", 30522, 768, 12, 12, 3072),
        ModelSize("xlmr-base", "xlm-roberta", 250002, 768, 12, 12, 3072),
        ModelSize("tiny", "bert", 30522, 64, 2, 2, 128),
    )
}


def model_size(name: str) -> ModelSize:
    """Return the size of a model by its name.

    Raises:
        ValueError: if there is no model of that name.
    """
    if name not in MODEL_SIZES:
        raise ValueError(f"model must be one of {', '.join(MODEL_SIZES)}, got {name!r}.")
    return MODEL_SIZES[name]


def build_encoder(size: ModelSize, tokenizer: Any, device: torch.device, max_length: int) -> Any:
    """Build a stock SPLADE model with random weights.

    Args:
        size: the size of the model.
        tokenizer: the tokenizer.
        device: the device of the model.
        max_length: the tokens at which texts are truncated.
    """
    sizes = (size.hidden, size.layers, size.heads, size.intermediate)
    roberta = size.architecture == "xlm-roberta"
    return make_encoder(
        "splade",
        size.vocab,
        sizes,
        tokenizer,
        max_length,
        roberta=roberta,
        device=device,
    )


def text_pairs(
    collection: Collection,
    length: int,
    *,
    natural: bool = False,
) -> list[tuple[str, str]]:
    """Return up to ``POOL`` pairs of a query and a relevant document, from all splits.

    The next documents of the collection are appended to a document, so that no token is padding.
    Otherwise the fused head would be faster because it skips padding.

    Args:
        collection: the collection.
        length: the tokens that each document has at least.
        natural: whether documents are left as they are.

    Raises:
        ValueError: if the collection has no positive judgement.
    """
    splits = sorted(collection.qrels)
    pairs_of_splits = (collection.pairs(split) for split in splits)
    unique_pairs = dict.fromkeys(itertools.chain.from_iterable(pairs_of_splits))
    id_pairs = list(unique_pairs)[:POOL]
    if not id_pairs:
        raise ValueError(
            f"data must hold a positive judgement, got none in {collection.name} (splits: "
            f"{splits}).",
        )
    contents = list(collection.contents().values())
    positions = {name: position for position, name in enumerate(collection.documents)}
    pairs: list[tuple[str, str]] = []
    for query, document in id_pairs:
        position = positions[document]
        if natural:
            text = contents[position]
        else:
            text = _long_text(contents, position, CHARACTERS_PER_TOKEN * length)
        pairs.append((collection.queries[query], text))
    return pairs


def _long_text(contents: Sequence[str], start: int, characters: int) -> str:
    """Join documents from a position on, until they have a number of characters.

    After the last document come the first ones.

    Args:
        contents: texts of all documents.
        start: position of the first document.
        characters: the least number of characters.
    """
    texts: list[str] = []
    n_characters = 0
    for text in itertools.chain(contents[start:], itertools.cycle(contents)):
        texts.append(text)
        n_characters += len(text) + 1
        if n_characters >= characters:
            break
    return "\n".join(texts)


class Batches:
    """Training batches of any size from tokenized pairs on the device.

    Args:
        encoder: the encoder that tokenizes the texts.
        pairs: (query, document) texts.
        length: the largest number of tokens of a document.
        device: the device of the batches.
        query_length: the largest number of tokens of a query.
    """

    def __init__(
        self,
        encoder: Any,
        pairs: Sequence[tuple[str, str]],
        length: int,
        device: torch.device,
        query_length: int = QUERY_LENGTH,
    ) -> None:
        """Tokenise the pairs.

        Args:
            encoder: the model.
            pairs: queries and documents.
            length: tokens of a document.
            device: the device of the features.
            query_length: tokens of a query.
        """
        self.queries = _prepare(encoder, [query for query, _ in pairs], query_length, device)
        self.documents = _prepare(encoder, [text for _, text in pairs], length, device)
        self._pool = len(pairs)
        self._device = device

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens that a query and a document are padded to."""
        return self.queries["input_ids"].size(1), self.documents["input_ids"].size(1)

    @property
    def valid(self) -> float:
        """Share of the documents' tokens that are not padding."""
        return float(self.documents["attention_mask"].float().mean())

    def inputs(self, batch: int) -> dict[str, Any]:
        """Return a batch with the column names of the trainer's collator.

        Args:
            batch: the number of pairs. Pairs are repeated if there are fewer.
        """
        rows = torch.arange(batch, device=self._device) % self._pool
        columns = {"query": self.queries, "document": self.documents}
        return {
            f"{column}_{name}": value[rows] if isinstance(value, Tensor) else value
            for column, features in columns.items()
            for name, value in features.items()
        }


def _prepare(encoder: Any, texts: list[str], length: int, device: torch.device) -> dict[str, Any]:
    """Tokenize texts with a limit of tokens, and copy the features to the device.

    Args:
        encoder: the model.
        texts: the texts.
        length: the largest number of tokens of a text.
        device: the device.
    """
    previous_length = encoder.max_seq_length
    encoder.max_seq_length = length
    try:
        features = encoder.preprocess(texts)
    finally:
        encoder.max_seq_length = previous_length
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in features.items()
    }
