"""``tilefold info plan``: what a model needs for training and encoding."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from tilefold.bench import plan as formulas
from tilefold.cli import _common, _models

_DEFAULTS: dict[str, Any] = {
    "length": 256, "query_length": 24, "gpu_memory": 80.0, "documents": 1_000_000, "terms": 200.0,
}  # fmt: skip


def plan(what: str | None, model: str | None, given: dict[str, Any], as_json: bool) -> None:
    """Print the plan of a model; `given` are the options that were."""
    if what != "plan" or model is None:
        raise _common.UsageError("a plan is asked for by: tilefold info plan --model FOLDER_OR_NAME")
    asked = _DEFAULTS | given
    shape = shape_of(model)
    found: dict[str, Any] = {"shape": asdict(shape), "parameters": shape.parameters, **asked}
    lengths = (asked["length"], asked["query_length"], asked["gpu_memory"])
    for name, checkpointing in (("training", False), ("training_checkpointed", True)):
        found[name] = asdict(formulas.training(shape, *lengths, checkpointing=checkpointing))
    rate = formulas.texts_per_second(shape, asked["length"])
    found["encoding"] = {
        "texts_per_second_on_an_h200": rate,
        "hours": asked["documents"] / rate / 3600,
        "vector_gigabytes_at_most": formulas.vector_bytes(asked["terms"]) * asked["documents"] / 1e9,
        "exact_index_gigabytes": formulas.index_bytes(asked["terms"]) * asked["documents"] / 1e9,
    }
    _common.print_json(found) if as_json else _print(model, found)


def shape_of(model: str) -> formulas.Shape:
    """The shape of an encoder like BERT, from its configuration."""
    from transformers import AutoConfig

    path = _models.find_model(model, "--model")
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    values = [getattr(config, name, None) for name in names]
    if not all(isinstance(value, int) for value in values):
        name, got = next(pair for pair in zip(names, values, strict=True) if not isinstance(pair[1], int))
        raise _common.UsageError(f"--model: expected a configuration with {', '.join(names)}, got {name}={got!r:.80}.")
    return formulas.Shape(*(int(value) for value in values if value is not None))


def _print(model: str, found: dict[str, Any]) -> None:
    encoding = found["encoding"]
    typer.echo(
        f"{model}: {found['parameters'] / 1e6:.0f} million parameters, V = {found['shape']['vocab']:,}\n"
        f"training SPLADE, documents of {found['length']} and queries of {found['query_length']} tokens, "
        f"{found['gpu_memory']:g} GiB, bf16 autocast, AdamW:"
    )
    for name, how in (("training", ""), ("training_checkpointed", " with gradient checkpointing")):
        step = found[name]
        typer.echo(
            f"  at most {step['largest_batch']:,} pairs{how}: {step['fixed_gib']:.1f} GiB and "
            f"{step['mib_a_pair']:.1f} MiB per pair"
        )
    typer.echo(
        f"encoding {found['documents']:,} documents of {found['terms']:g} terms on one H200: "
        f"{encoding['texts_per_second_on_an_h200']:,.0f} per second, {encoding['hours']:.3g} hours\n"
        f"  {encoding['vector_gigabytes_at_most']:.3g} GB of vectors at most, "
        f"{encoding['exact_index_gigabytes']:.3g} GB in the exact index\n"
        "worked out from one H200: BERT-base and XLM-R-base (batch, memory), BERT-base (rate); the rest is not measured"
    )
