"""``tilefold train``: trains a SPLADE or ColBERT model on a collection's training pairs."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold.cli import _common, _models


def train(
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    method: Annotated[str, typer.Option(help="splade (sparse vectors), or colbert (one vector per token).")] = "splade",
    data: Annotated[str, typer.Option(help=_common.DATA_HELP)] = "pydocs",
    model: Annotated[
        str, typer.Option(help="minilm, a folder, or a Hugging Face name: of a masked LM, for colbert of any encoder.")
    ] = "minilm",
    steps: Annotated[
        int | None, typer.Option(help="Training steps; by default --epochs decides, 0 saves the untrained start.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the training pairs.")] = 4.0,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.")] = 64,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Peak learning rate; by default 2e-4, for colbert 1e-4.")
    ] = None,
    regularizer: Annotated[
        float | None, typer.Option(help="splade: weight of the FLOPS terms, larger is sparser; by default 0.01.")
    ] = None,
    dimension: Annotated[
        int | None, typer.Option(help="colbert: dimension of a vector; by default 128, 0 for the backbone's own.")
    ] = None,
    query_length: Annotated[int | None, typer.Option(help="colbert: tokens per query; by default 32.")] = None,
    expand_queries: Annotated[
        bool, typer.Option("--expand-queries", help="colbert: pad queries with mask tokens that are scored.")
    ] = False,
    keep_punctuation: Annotated[
        bool, typer.Option("--keep-punctuation", help="colbert: keep the vectors of punctuation in documents.")
    ] = False,
    group_by_length: Annotated[
        bool, typer.Option("--group-by-length", help="splade: batches of documents of similar length, for speed.")
    ] = False,
    max_length: Annotated[int, typer.Option(help="Maximum tokens per text.")] = 128,
    train_max_length: Annotated[int | None, typer.Option(help="The same while training; fewer are faster.")] = None,
    attention: Annotated[str | None, typer.Option(help="softmax or entmax; by default the model's own.")] = None,
    alpha: Annotated[float | None, typer.Option(help="alpha of entmax, from 1 (softmax) to 2; by default 1.5.")] = None,
    anneal_alpha: Annotated[float, typer.Option(help="Share of the steps over which alpha rises from 1.")] = 0.0,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="By default the faster one on this hardware.")
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused/--plain", help="Fused head (splade) or similarity (colbert), or the stock one.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal models.")] = 0,
    save_steps: Annotated[int, typer.Option(help="A checkpoint after so many steps.")] = 25,
    save_minutes: Annotated[float, typer.Option(min=0, help="A checkpoint after this time at the latest.")] = 5.0,
    drop_unknown: Annotated[bool, typer.Option("--drop-unknown", help=_common.DROP_UNKNOWN_HELP)] = False,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Resume an interrupted run.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished model in --output.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the libraries' own logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Train a SPLADE or ColBERT model, saved as a stock sentence-transformers SparseEncoder or MultiVectorEncoder.

    The same command again resumes an interrupted run from its last checkpoint.
    """
    values = {
        "base_model": model,
        "max_steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_length": max_length,
        "train_max_length": train_max_length,
        "attention": attention,
        "alpha": alpha,
        "anneal_alpha": anneal_alpha,
        "bf16": bf16,
        "fused": fused,
        "save_steps": save_steps,
        "save_minutes": save_minutes,
        "seed": seed,
    }
    own: dict[str, dict[str, dict[str, Any]]] = {
        "splade": {
            "--regularizer": {"query_regularizer": regularizer, "document_regularizer": regularizer},
            "--group-by-length": {"group_by_length": group_by_length or None},
        },
        "colbert": {
            "--dimension": {"dimension": dimension},
            "--query-length": {"query_length": query_length},
            "--expand-queries": {"expand_queries": expand_queries or None},
            "--keep-punctuation": {"skip_punctuation": False if keep_punctuation else None},
        },
    }
    result = _train(method, values | _own_values(method, own), data, drop_unknown, output, resume, overwrite, verbose)
    if result.exploded:
        _common.note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to {result.ranking_loss:.3f}: the "
            "model did not learn; train with a smaller --lr"
        )
    if as_json:
        _common.print_json(asdict(result))
        return
    how = "already trained" if result.reused else f"trained {result.steps} steps in {result.seconds:.0f} s"
    if not result.steps:
        how = "untrained start"
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    typer.echo(f"{how}{loss}: {result.model_dir}")
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if method == "colbert" else "VECTORS"
    typer.echo(f"next: tilefold encode --model {output} --data {data} --output {vectors}")


def _own_values(method: str, own: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The fields that only the recipe of `method` has; options of another method are errors."""
    if method not in own:
        raise _common.UsageError(f"--method: expected one of {', '.join(own)}, got {method!r}.")
    for other, options in own.items():
        for name, values in options.items():
            if other != method and any(value is not None for value in values.values()):
                raise _common.UsageError(f"{name} belongs to --method {other}: leave it out for {method}.")
    fields = {name: value for values in own[method].values() for name, value in values.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _train(
    method: str,
    values: dict[str, Any],
    data: str,
    drop_unknown: bool,
    output: Path,
    resume: bool,
    overwrite: bool,
    verbose: bool,
) -> Any:
    from tilefold.recipes import colbert, splade
    from tilefold.recipes.loading import newest_step

    values = {name: value for name, value in values.items() if value is not None}
    if values.get("dimension") == 0:
        values["dimension"] = None
    recipe: Any
    module: Any
    try:
        if method == "colbert":
            module, recipe = colbert, colbert.ColbertRecipe.from_dict(values)
        else:
            module, recipe = splade, splade.SpladeRecipe.from_dict(values)
    except ValueError as error:
        raise _common.UsageError(str(error)) from error
    if recipe.base_model != _models.PACKAGED:
        _models.find_model(recipe.base_model, "--model")
    collection = _common.load_data(data, drop_unknown=drop_unknown)
    _common.keeps(lambda: newest_step(output) is not None)
    with _common.progress_bar("training") as update:

        def progress(step: int, steps: int, loss: float | None) -> None:
            update(step, steps, "" if loss is None else f"loss {loss:.3f}")

        return module.train(
            recipe,
            collection,
            output,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            verbose=verbose,
        )
