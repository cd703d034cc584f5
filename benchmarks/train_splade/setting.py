"""What the training benchmark trains: encoders of published sizes with random weights, and batches of real text."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

CHARACTERS_PER_TOKEN = 8  # more than any language here has: a text of S times this many is never short of S tokens
QUERY_LENGTH = 32  # tokens, as SPLADE's authors train on MS MARCO
POOL = 512  # distinct pairs; larger batches repeat them
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPOT_VOCABULARY = 8000


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


def build_encoder(size: ModelSize, tokenizer: Any, device: torch.device, max_length: int, seed: int = 0) -> Any:
    """A stock SPLADE ``SparseEncoder`` of ``size`` with random weights, as a user would load it.

    The network is made from its configuration, saved to a temporary folder with the tokenizer and loaded back by
    sentence-transformers. Fresh weights make about half of all logits positive, hence every score of a text of some
    length: the most expensive case for a backward pass that follows the winners.

    Args:
        size: one of ``MODEL_SIZES``.
        tokenizer: of transformers; its ids must lie below ``size.vocab``.
        device: where the encoder ends up.
        max_length: tokens read of a text, at most 512.
        seed: of the weights.

    Raises:
        ValueError: for a tokenizer with more entries than the vocabulary, or a length out of range.
    """
    from sentence_transformers import SparseEncoder  # noqa: PLC0415
    from sentence_transformers.base.modules import Transformer  # noqa: PLC0415
    from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: PLC0415

    if len(tokenizer) > size.vocab:
        raise ValueError(f"tokenizer must have at most {size.vocab} entries for {size.name}, got {len(tokenizer)}.")
    if not 2 < max_length <= 512:
        raise ValueError(f"length must be from 3 to 512 tokens, got {max_length}.")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):  # normal numbers for 190 million entries take seconds on a CPU
            network = _network(size, tokenizer.pad_token_id)
    tokenizer.model_max_length = max_length
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del network
        transformer = Transformer(
            folder,
            transformer_task="fill-mask",
            max_seq_length=max_length,
            model_kwargs={"local_files_only": True, "dtype": torch.float32},
            processor_kwargs={"local_files_only": True},
        )
        encoder = SparseEncoder(modules=[transformer, SpladePooling("max")], device=str(device))
    encoder.model_card_data.local_files_only = True
    encoder.model_card_data.generate_widget_examples = False
    return encoder


def _network(size: ModelSize, pad_token_id: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM, XLMRobertaConfig, XLMRobertaForMaskedLM  # noqa: PLC0415

    sizes = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "pad_token_id": pad_token_id,
    }
    if size.architecture == "bert":
        return BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=512))
    # positions begin behind the padding's id
    config = XLMRobertaConfig(**sizes, max_position_embeddings=513 + pad_token_id, type_vocab_size=1)
    return XLMRobertaForMaskedLM(config)


def load_tokenizer(path: str | Path | None, texts: Sequence[str]) -> tuple[Any, str]:
    """A tokenizer and a word on where it comes from.

    Which entries of the vocabulary occur changes nothing that the head computes, so any tokenizer serves; without a
    path it is that of the packaged MiniLM, and without the package a WordPiece of 8,000 entries learnt from ``texts``.

    Raises:
        ValueError: if ``path`` holds no tokenizer.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    if path is not None:
        try:
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True), Path(path).name
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer must be a folder that transformers can load, got {path}: {error}") from error
    from tilefold.recipes.backbone import minilm_path  # noqa: PLC0415
    from tilefold.retrieval.errors import MissingPackageError  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(minilm_path(verify=False), local_files_only=True), "MiniLM"
    except MissingPackageError:
        return _learn_tokenizer(texts), f"WordPiece of {_SPOT_VOCABULARY} learnt here"


def _learn_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    pad, unknown, start, end, mask = _SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=_SPOT_VOCABULARY, special_tokens=list(_SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (start, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
    )


def text_pairs(collection: Collection, length: int, *, natural: bool = False) -> list[tuple[str, str]]:
    """Up to ``POOL`` pairs of a query and a document of about ``length`` tokens, from any split.

    Documents are filled up with those that follow them in the collection, so that no token is padding: without it, the
    fused head would win by skipping what the stock head computes. ``natural`` leaves them as they are.
    """
    splits = sorted(collection.qrels)
    named = list(dict.fromkeys(itertools.chain.from_iterable(collection.pairs(split) for split in splits)))[:POOL]
    if not named:
        raise ValueError(f"data must hold a positive judgement, got none in {collection.name} (splits: {splits}).")
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
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in features.items()}
