"""Texts, and a tiny masked LM over their words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.recipes import small
from tests.recipes.small import SUBJECTS

TEXTS = [f"Functions that read and write {subject}, with examples." for subject in SUBJECTS]
QUERIES = ["how do I read zip archives", "csv csv files"]


def tiny_masked_lm(folder: Path, kind: str = "bert", seed: int = 0) -> Path:
    """A model of two narrow layers, whose decoder has a bias that is not 0."""
    small.tiny_masked_lm(folder, [*TEXTS, *QUERIES], kind, layers=2, seed=seed)
    model = transformers.AutoModelForMaskedLM.from_pretrained(str(folder))
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.get_output_embeddings().bias, std=0.1)
    model.save_pretrained(str(folder))
    return folder
