"""The part of a model's card that tells of its training, after what sentence-transformers writes of
the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tilefold._version import __version__
from tilefold.recipes._steps import describe_negatives, describe_steps

_BEFORE = "## Training Details"  # of the card that sentence-transformers writes
_LOAD = """\
```python
from sentence_transformers import {0}

model = {0}("FOLDER")  # this folder, or where it is on the Hugging Face hub
queries = model.encode_query(["a question"])
documents = model.encode_document(["a text", "another one"])
print(model.similarity(queries, documents))
```
"""


def describe(
    recipe: Any,
    result: Any,
    data: str,
    pairs: int,
    history: Sequence[Mapping[str, float]],
    command: str,
) -> str:
    """The section in Markdown: what was trained, on what, with which command, and what came of it."""
    standard = {each.name: each.default for each in fields(recipe)}
    settings = {
        name: value for name, value in recipe.to_dict().items() if value != standard.get(name)
    }
    trained = [
        row
        for row in history
        if "loss" in row and row["step"] <= (result.kept_step or result.steps)
    ]
    last = trained[-1] if trained else {}
    rows = {
        "recipe": f"`{getattr(recipe, 'name', type(recipe).__name__)}` of tilefold {__version__}",
        "data": f"{data}, {pairs:,} pairs",
        "command": f"`{command}`" if command else "",
        "training": describe_steps(result),
        "negatives of a query": describe_negatives(result),
        "trained weights": _trained_weights(result),
        "processes": str(result.ranks),
        "last losses": ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in last.items()
            if name.endswith(("loss", "penalty"))
        ),
        f"nDCG@10 of {result.evaluated}": ", ".join(
            f"{row['nDCG@10']:.4f} at step {row['step']:,}{' (kept)' * row['kept']}"
            for row in result.evaluations
        ),
        "terms of a vector": ", ".join(
            f"{name.removesuffix('_active_terms')} {value:.0f}"
            for name, value in last.items()
            if "active" in name
        ),
    }
    table = "".join(
        f"| {name} | {value.replace('|', chr(92) + '|')} |\n"
        for name, value in rows.items()
        if value
    )
    warned = "".join(f"- {text}\n" for text in result.warnings)
    parts = [
        "## Made with tilefold\n",
        f"| | |\n|---|---|\n{table}",
        _LOAD.format("MultiVectorEncoder" if recipe.late else "SparseEncoder"),
        "Settings that differ from those of the recipe's "
        f"class:\n\n```json\n{json.dumps(settings, indent=1)}\n```\n",
        f"Warnings of the training:\n\n{warned}" if warned else "",
        "Losses and terms are means over the last logged steps of training"
        + (
            " up to the step that was kept, which nDCG@10 on these documents chose"
            if result.evaluations
            else ""
        )
        + "; this card says nothing of search quality (`tilefold evaluate` measures it).\n",
    ]
    return "\n".join(filter(None, parts))


def _trained_weights(result: Any) -> str:
    if result.trained_weights is None:
        return ""
    if result.trained_weights == result.weights:
        return f"all {result.weights:,}"
    return f"{result.trained_weights:,} of {result.weights:,}, the others were frozen"


def extend_card(card: Path, section: str) -> None:
    """Put a section into a card, before the details of training, or at its end."""
    if not section:
        return
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    before, mark, after = text.partition(_BEFORE)
    card.write_text(f"{before.rstrip()}\n\n{section}\n{mark}{after}".lstrip(), encoding="utf-8")
