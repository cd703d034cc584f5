"""What the scripts share that make a small language model offline, over the words of the packaged
MiniLM.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from tilefold.recipes import minilm_path


def arguments(
    doc: str | None,
    *,
    batch_size: int,
    length: int,
    learning_rate: float,
) -> argparse.ArgumentParser:
    """Arguments of data, size and training, with these defaults; ``doc`` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", required=True, help="a BEIR folder, or pydocs")
    add("--steps", type=int, default=2000, help="of training")
    add("--batch-size", type=int, default=batch_size, help="texts, or blocks of tokens, per step")
    add("--length", type=int, default=length, help="tokens of each")
    add("--layers", type=int, default=6)
    add("--learning-rate", type=float, default=learning_rate)
    add("--documents", type=int, help="this many documents alone")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def minilm_words() -> tuple[Any, Tensor]:
    """MiniLM's tokenizer, for up to 512 tokens, and its word embeddings ``[V, D]``."""
    path = str(minilm_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.model_max_length = 512
    return tokenizer, AutoModel.from_pretrained(
        path,
        local_files_only=True,
    ).get_input_embeddings().weight
