"""``tilefold train``: a SPLADE model from a collection's training pairs."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold.cli import _common


def train(
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    data: Annotated[str, typer.Option(help="pydocs, or a folder in the BEIR layout.")] = "pydocs",
    model: Annotated[str, typer.Option(help="minilm, a folder, or a Hugging Face name of a masked LM.")] = "minilm",
    steps: Annotated[int | None, typer.Option(help="Training steps; by default --epochs decides.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the training pairs.")] = 4.0,
    batch_size: Annotated[int, typer.Option(help="Pairs in a step.")] = 64,
    learning_rate: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 2e-4,
    regularizer: Annotated[float, typer.Option(help="Weight of the FLOPS terms: more is sparser.")] = 1e-2,
    max_length: Annotated[int, typer.Option(help="Tokens that the model reads of a text.")] = 128,
    train_max_length: Annotated[int | None, typer.Option(help="Fewer tokens while training, for speed.")] = None,
    attention: Annotated[str | None, typer.Option(help="softmax or entmax; by default the model's own.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Of entmax, from 1 (softmax) to 2; 1.5 if not given.")] = None,
    anneal_alpha: Annotated[float, typer.Option(help="Share of the steps over which alpha rises from 1.")] = 0.0,
    bf16: Annotated[bool | None, typer.Option("--bf16/--fp32", help="By default what the hardware is good at.")] = None,
    fused: Annotated[bool, typer.Option("--fused/--plain", help="Fused head, or the stock one.")] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal models.")] = 0,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on from what a killed run left.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished model in --output.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the libraries' own logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Train a SPLADE model; what it saves is a stock sentence-transformers SparseEncoder.

    A killed run goes on from its last checkpoint when the same command is given again.
    """
    values = {
        "base_model": model,
        "max_steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "query_regularizer": regularizer,
        "document_regularizer": regularizer,
        "max_length": max_length,
        "train_max_length": train_max_length,
        "attention": attention,
        "alpha": alpha,
        "anneal_alpha": anneal_alpha,
        "bf16": bf16,
        "fused": fused,
        "seed": seed,
    }
    result = _train(values, data, output, resume, overwrite, verbose)
    if as_json:
        _common.print_json(asdict(result))
        return
    how = "already trained" if result.reused else f"trained {result.steps} steps in {result.seconds:.0f} s"
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    typer.echo(f"{how}{loss}: {result.model_dir}")
    typer.echo(f"next: tilefold encode --model {output} --data {data} --output VECTORS")


def _train(values: dict[str, Any], data: str, output: Path, resume: bool, overwrite: bool, verbose: bool) -> Any:
    from tilefold.recipes import splade

    try:
        recipe = splade.SpladeRecipe.from_dict(values)
    except ValueError as error:
        raise _common.UsageError(str(error)) from error
    collection = _common.load_data(data)
    with _common.progress_bar("training") as update:

        def progress(step: int, steps: int, loss: float | None) -> None:
            update(step, steps, "" if loss is None else f"loss {loss:.3f}")

        return splade.train(
            recipe,
            collection,
            output,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            verbose=verbose,
        )
