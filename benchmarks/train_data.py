"""Models and data of the training benchmarks: random weights, and pairs of random words."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

# tokens of a text that are read
MAX_LENGTH = 256
QUERY_CHARACTERS = 60
QUERY_WORDS = 12
# median, and standard deviation of the logarithm, of lognormal lengths in tokens: 28% of 256 tokens
# on average
RAGGED_MEDIAN = 50.0
RAGGED_DEVIATION = 0.85
# tokens of documents of full length
FULL_LENGTH = 240
# texts have this many times the tokens that are read, since the tokens of a word are an average
LENGTH_MARGIN = 1.15
# words that the tokens of a word are measured on
_N_SAMPLED_WORDS = 2000
# batches that the share of valid tokens is measured on
_N_SAMPLED_BATCHES = 4
# CLS and SEP
_SPECIAL_TOKENS = 2
# hidden size, layers, attention heads and intermediate size of a model
BASE = (768, 12, 12, 3072)
TINY = (64, 2, 2, 256)
# entries from which on a vocabulary is taken for that of XLM-R
_ROBERTA_VOCAB = 100_000
_MAX_POSITIONS = 512
# dimensions of ColBERT's token vectors
_TOKEN_DIMENSION = 128


def load_tokenizer(path: Path | None) -> Any:
    """Load a tokenizer.

    Args:
        path: its folder. By default that of the packaged MiniLM (WordPiece of 30,522).

    Raises:
        ValueError: if transformers cannot load it.
    """
    from transformers import AutoTokenizer

    if path is None:
        from tilefold.recipes.backbone import minilm_path

        path = minilm_path()
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer must be a folder that transformers can load, got {path}: {error}",
        ) from error


def words_of(tokenizer: Any) -> list[str]:
    """Return the entries of a vocabulary that are ASCII words of at least three letters."""
    # U+2581 marks the begin of a word in SentencePiece
    pieces = sorted(piece.lstrip("\u2581") for piece in tokenizer.get_vocab())
    return [
        piece
        for piece in dict.fromkeys(pieces)
        if piece.isascii() and piece.isalpha() and len(piece) > 2
    ]


def made_pairs(tokenizer: Any, count: int, ragged: bool, seed: int = 0) -> dict[str, list[str]]:
    """Make pairs of a query and a document from random words.

    Args:
        tokenizer: its vocabulary has the words.
        count: the number of pairs.
        ragged: whether documents have different lengths. Otherwise all have at least
            :data:`FULL_LENGTH` tokens.
        seed: the seed of the random numbers.

    Returns:
        Lists of texts: ``query``, of about 60 characters, and ``document``.
    """
    generator = np.random.default_rng(seed)
    words = np.array(words_of(tokenizer))

    def random_text(n_words: int) -> str:
        return " ".join(words[generator.integers(len(words), size=n_words)])

    sample = random_text(_N_SAMPLED_WORDS)
    sample_ids = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
    tokens_per_word = len(sample_ids) / _N_SAMPLED_WORDS
    lengths = np.full(count, LENGTH_MARGIN * FULL_LENGTH)
    if ragged:
        lengths = generator.lognormal(np.log(RAGGED_MEDIAN), RAGGED_DEVIATION, count)
        lengths = np.minimum(lengths, LENGTH_MARGIN * MAX_LENGTH)
    n_words = np.maximum(1, (lengths - _SPECIAL_TOKENS) / tokens_per_word).astype(int)
    queries = [random_text(QUERY_WORDS)[:QUERY_CHARACTERS] for _ in range(count)]
    documents = [random_text(number) for number in n_words]
    return {"query": queries, "document": documents}


def valid_share(tokenizer: Any, documents: list[str], batch: int, length: int) -> float:
    """Measure the share of the tokens of padded batches that are not padding.

    Args:
        tokenizer: the tokenizer.
        documents: the texts. The first few batches are measured.
        batch: the texts per batch.
        length: the tokens at which texts are truncated.
    """
    shares = []
    for start in range(0, min(len(documents), _N_SAMPLED_BATCHES * batch), batch):
        texts = documents[start : start + batch]
        tokenized = tokenizer(texts, truncation=True, max_length=length, verbose=False)
        lengths = [len(ids) for ids in tokenized["input_ids"]]
        shares.append(sum(lengths) / (len(lengths) * max(lengths)))
    return float(np.mean(shares))


def make_encoder(
    kind: str,
    vocab: int,
    sizes: tuple[int, int, int, int],
    tokenizer: Any,
    length: int,
    *,
    roberta: bool | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Make a stock model with random weights, loaded by sentence-transformers from a folder.

    Fresh weights make about half of all logits positive, hence every score of a longer text. This
    is the most expensive case for a backward pass that follows the winners.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        vocab: V.
        sizes: hidden, layers, heads and intermediate, such as ``BASE``.
        tokenizer: the tokenizer, whose ids must be below ``vocab``.
        length: the tokens that are read of a text, at most 512.
        roberta: whether to use XLM-R's embeddings in place of BERT's. By default from V = 100,000.
        device: the device on which the weights are drawn, and of the model.

    Raises:
        ValueError: if the tokenizer has more entries than the vocabulary, or the length is out of
            range.
    """
    import transformers
    from sentence_transformers.base.modules import Transformer

    if len(tokenizer) > vocab:
        raise ValueError(f"tokenizer must have at most {vocab} entries, got {len(tokenizer)}.")
    if not _SPECIAL_TOKENS < length <= _MAX_POSITIONS:
        raise ValueError(f"length must be from 3 to 512 tokens, got {length}.")
    if roberta is None:
        roberta = vocab >= _ROBERTA_VOCAB
    pad = tokenizer.pad_token_id
    config_class: Any = transformers.XLMRobertaConfig if roberta else transformers.BertConfig
    # RoBERTa's positions begin after the id of the padding
    n_positions = _MAX_POSITIONS + 1 + pad if roberta else _MAX_POSITIONS
    hidden, layers, heads, intermediate = sizes
    config = config_class(
        vocab_size=vocab,
        pad_token_id=pad,
        max_position_embeddings=n_positions,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
    )
    auto = transformers.AutoModelForMaskedLM if kind == "splade" else transformers.AutoModel
    torch.manual_seed(0)
    # normal numbers for 190 million entries take seconds on a CPU
    with torch.device(device):
        network = auto.from_config(config)
    tokenizer.model_max_length = length
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del network
        task = "fill-mask" if kind == "splade" else "feature-extraction"
        transformer = Transformer(
            folder,
            transformer_task=task,
            max_seq_length=length,
            model_kwargs={"local_files_only": True, "dtype": torch.float32},
            processor_kwargs={"local_files_only": True},
        )
        model = _splade(transformer, device) if kind == "splade" else _colbert(transformer, hidden)
        model = model.to(device)
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    model.model_card_data.widget = [{"text": "a"}]
    return model


def _splade(transformer: Any, device: torch.device | str) -> Any:
    """Create a SparseEncoder with max pooling."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return SparseEncoder(modules=[transformer, SpladePooling("max")], device=str(device))


def _colbert(transformer: Any, hidden: int) -> Any:
    """Create a MultiVectorEncoder with a projection of the hidden states."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    dense = Dense(
        hidden,
        _TOKEN_DIMENSION,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [
        transformer,
        dense,
        MultiVectorMask(),
        Normalize(module_input_name="token_embeddings"),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu")
