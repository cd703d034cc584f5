"""Models and data of the training benchmark: encoders with random weights, and batches of real
text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmarks.train_data import make_encoder

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection

CHARACTERS_PER_TOKEN = (
    8  # more than any language here has: a text of S times this many is never short of S tokens
)
QUERY_LENGTH = 32  # tokens, as SPLADE's authors train on MS MARCO
POOL = 512  # distinct pairs; larger batches repeat them


@dataclass(frozen=True)
class ModelSize:
    """The size of a masked language model.

    Attributes:
        name: what ``--model`` takes.
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
    """The size called ``name``; ``ValueError`` with the known names otherwise."""
    if name not in MODEL_SIZES:
        raise ValueError(f"model must be one of {', '.join(MODEL_SIZES)}, got {name!r}.")
    return MODEL_SIZES[name]


def build_encoder(size: ModelSize, tokenizer: Any, device: torch.device, max_length: int) -> Any:
    """A stock SPLADE ``SparseEncoder`` of ``size`` with random weights:
    :func:`benchmarks.train_data.make_encoder`.
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
    """Up to ``POOL`` pairs of a query and a document of about ``length`` tokens, from any split.

    Documents are filled up with those that follow them in the collection, so that no token is
    padding: without it, the fused head would win by skipping what the stock head computes.
    ``natural`` leaves them as they are.
    """
    splits = sorted(collection.qrels)
    named = list(
        dict.fromkeys(itertools.chain.from_iterable(collection.pairs(split) for split in splits)),
    )[:POOL]
    if not named:
        raise ValueError(
            f"data must hold a positive judgement, got none in {collection.name} (splits: "
            f"{splits}).",
        )
    contents = list(collection.contents().values())
    place = {name: i for i, name in enumerate(collection.documents)}
    pairs: list[tuple[str, str]] = []
    for query, document in named:
        text = contents[place[document]]
        if not natural:
            text = _filled(contents, place[document], CHARACTERS_PER_TOKEN * length)
        pairs.append((collection.queries[query], text))
    return pairs


def _filled(contents: Sequence[str], start: int, characters: int) -> str:
    found, size = [], 0
    for text in _from(contents, start):
        found.append(text)
        size += len(text) + 1
        if size >= characters:
            break
    return "\n".join(found)


def _from(contents: Sequence[str], start: int) -> Iterator[str]:
    return itertools.chain(contents[start:], itertools.cycle(contents))


class Batches:
    """Training batches of any size from tokenised pairs that lie on the device.

    Args:
        encoder: whose tokenizer and modules prepare the texts.
        pairs: (query, document) texts.
        length: tokens of a document at most.
        query_length: tokens of a query at most.
        device: where the batches lie.
    """

    def __init__(
        self,
        encoder: Any,
        pairs: Sequence[tuple[str, str]],
        length: int,
        device: torch.device,
        query_length: int = QUERY_LENGTH,
    ) -> None:
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
        """The first ``batch`` pairs, over and over, as the trainer's collator names its columns."""
        rows = torch.arange(batch, device=self._device) % self._pool
        columns = {"query": self.queries, "document": self.documents}
        return {
            f"{column}_{name}": value[rows] if isinstance(value, Tensor) else value
            for column, features in columns.items()
            for name, value in features.items()
        }


def _prepare(encoder: Any, texts: list[str], length: int, device: torch.device) -> dict[str, Any]:
    kept = encoder.max_seq_length
    encoder.max_seq_length = length
    try:
        features = encoder.preprocess(texts)
    finally:
        encoder.max_seq_length = kept
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in features.items()
    }
