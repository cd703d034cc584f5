"""The section about training in a model card, which sentence-transformers has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilefold._version import __version__
from tilefold.recipes._steps import describe_negatives, describe_steps

TRAINING_HEADING = "## Training Details"
"""Heading in the card of sentence-transformers before which the section is inserted."""
USAGE = """\
```python
from sentence_transformers import {model_class}

model = {model_class}("FOLDER")  # this folder, or its name on the Hugging Face hub
queries = model.encode_query(["a question"])
documents = model.encode_document(["a text", "another one"])
print(model.similarity(queries, documents))
```
"""


def describe(
    recipe: Any,
    result: Any,
    data: str,
    n_pairs: int,
    history: Sequence[Mapping[str, float]],
    command: str,
) -> str:
    """Describe a training run in Markdown, for the model card.

    The section has a table of data, command and losses, a usage example, the recipe's settings,
    what was measured with encoders of its kind, and the warnings of the run.

    Args:
        recipe: the :class:`Recipe`.
        result: the :class:`TrainResult`.
        data: name of the collection.
        n_pairs: number of training pairs.
        history: rows of the run's log, each a mapping from names to values.
        command: command that repeats the training, or an empty string.
    """
    parts = [
        "## Made with tilefold\n",
        _summary_table(recipe, result, data, n_pairs, history, command),
        USAGE.format(model_class="MultiVectorEncoder" if recipe.late else "SparseEncoder"),
        _settings_section(recipe),
    ]
    if not recipe.late and recipe.document.measured:
        parts.append(f"{recipe.document.measured}\n")
    if result.warnings:
        bullets = "".join(f"- {warning}\n" for warning in result.warnings)
        parts.append(f"Warnings of the training:\n\n{bullets}")
    if result.evaluations:
        parts.append(
            "Losses and terms are means over the last logged steps up to the saved step. That step "
            "was chosen by nDCG@10 on the evaluated documents.",
        )
    else:
        parts.append("Losses and terms are means over the last logged steps of training.")
    parts.append(
        "These numbers do not measure search quality; `tilefold evaluate` measures it.\n",
    )
    return "\n".join(parts)


def _summary_table(
    recipe: Any,
    result: Any,
    data: str,
    n_pairs: int,
    history: Sequence[Mapping[str, float]],
    command: str,
) -> str:
    """Return a Markdown table that summarizes a training run: its recipe, data, steps and losses.

    Rows without a value are left out.

    Args:
        recipe: the :class:`Recipe`.
        result: the :class:`TrainResult`.
        data: name of the collection.
        n_pairs: number of training pairs.
        history: rows of the run's log.
        command: command that repeats the training, or an empty string.
    """
    name = getattr(recipe, "name", type(recipe).__name__)
    saved_step = result.kept_step or result.steps  # without evaluations, the last step is saved
    last_log = _last_log(history, saved_step)
    values = {
        "recipe": f"`{name}` of tilefold {__version__}",
        "data": f"{data}, {n_pairs:,} pairs",
        "command": f"`{command}`" if command else "",
        "training": describe_steps(result),
        "negatives of a query": describe_negatives(result),
        "trained weights": _describe_trained_weights(result),
        "processes": str(result.ranks),
        "last losses": _describe_losses(last_log),
        f"nDCG@10 of {result.evaluated}": _describe_evaluations(result),
        "terms of a vector": _describe_active_terms(last_log),
    }
    rows = ["| | |", "|---|---|"]
    for label, value in values.items():
        if value:
            escaped = value.replace("|", r"\|")
            rows.append(f"| {label} | {escaped} |")
    return "\n".join(rows) + "\n"


def _last_log(history: Sequence[Mapping[str, float]], last_step: int) -> Mapping[str, float]:
    """Return the last row of the log with losses, up to a step; empty if there is none."""
    for row in reversed(history):
        if "loss" in row and row["step"] <= last_step:
            return row
    return {}


def _describe_losses(row: Mapping[str, float]) -> str:
    """Describe the losses and penalties in a row of the log."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in row.items()
        if name.endswith(("loss", "penalty"))
    )


def _describe_active_terms(row: Mapping[str, float]) -> str:
    """Describe the mean numbers of active terms in a row of the log."""
    suffix = "_active_terms"
    return ", ".join(
        f"{name.removesuffix(suffix)} {value:.0f}"
        for name, value in row.items()
        if name.endswith(suffix)
    )


def _describe_evaluations(result: Any) -> str:
    """Describe the evaluations of a :class:`TrainResult`, and mark the saved step."""
    texts = []
    for row in result.evaluations:
        marker = " (kept)" if row["kept"] else ""
        texts.append(f"{row['nDCG@10']:.4f} at step {row['step']:,}{marker}")
    return ", ".join(texts)


def _settings_section(recipe: Any) -> str:
    """Return the settings of a recipe that differ from the defaults of its class, as JSON."""
    defaults = type(recipe)().to_dict()
    settings = {name: value for name, value in recipe.to_dict().items() if value != defaults[name]}
    return (
        "Settings that differ from the defaults of the recipe's class:\n\n"
        f"```json\n{json.dumps(settings, indent=1)}\n```\n"
    )


def _describe_trained_weights(result: Any) -> str:
    """Describe how many weights were trained; empty if a :class:`TrainResult` has no number."""
    if result.trained_weights is None:
        return ""
    if result.trained_weights == result.weights:
        return f"all {result.weights:,}"
    return f"{result.trained_weights:,} of {result.weights:,}, the others were frozen"


def extend_card(card: Path, section: str) -> None:
    """Insert a section into a model card, before its training details or at the end.

    Args:
        card: path of the model's ``README.md``; created if it is missing.
        section: the section in Markdown; an empty one changes nothing.
    """
    if not section:
        return
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    # without the heading, `before` is the complete text
    before, heading, after = text.partition(TRAINING_HEADING)
    extended = f"{before.rstrip()}\n\n{section}\n{heading}{after}"
    card.write_text(extended.lstrip(), encoding="utf-8")
