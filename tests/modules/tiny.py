"""Masked LMs with a vocabulary of some 150 terms and its WordPiece tokenizer: quick to load and to save."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.recipes.small import SUBJECTS

TEXTS = [f"Functions that read and write {subject}, with examples." for subject in SUBJECTS]
QUERIES = ["how do I read zip archives", "csv csv files"]


def tiny_masked_lm(folder: Path, kind: str = "bert", seed: int = 0) -> Path:
    """A BertForMaskedLM or ModernBertForMaskedLM; the words of the texts are terms, all others are spelled."""
    words = {word for text in [*TEXTS, *QUERIES] for word in text.lower().strip(".").replace(",", "").split()}
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words), *letters, *(f"##{x}" for x in letters)]
    vocabulary = list(dict.fromkeys(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.BertTokenizerFast(vocab={token: i for i, token in enumerate(vocabulary)})
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"vocab_size": len(vocabulary), "max_position_embeddings": 64, "pad_token_id": 0}
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    else:
        ids = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
        config = transformers.ModernBertConfig(**sizes, **ids, attn_implementation="sdpa")
        model = transformers.ModernBertForMaskedLM(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    torch.nn.init.normal_(model.get_output_embeddings().bias, std=0.1)
    model.save_pretrained(str(folder))
    return folder
