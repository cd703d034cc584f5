"""``tilefold train``: trains a model on a collection's training pairs, by the recipe of a published system."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold.cli import _common, _models, _recipes

_OWN = "by default the recipe's"
_FIELDS = (  # of every recipe, called like the parameter
    "epochs batch_size learning_rate max_length train_max_length attention alpha anneal_alpha bf16 fused save_steps "
    "save_minutes seed"
)


def train(
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    recipe: Annotated[
        str, typer.Option(help="A name of tilefold recipes; colbert for one vector per token.")
    ] = "splade",
    data: Annotated[str, typer.Option(help=_common.DATA_HELP)] = "pydocs",
    negatives: Annotated[
        Path | None, typer.Option(help="Mined negatives or teacher scores: Parquet of tilefold mine or score.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="minilm (the usual default), a folder, or a Hugging Face name of a fitting model."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps; by default --epochs decides, 0 saves the model as it starts.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help=f"Passes over the training pairs; {_OWN}.")] = None,
    batch_size: Annotated[int | None, typer.Option(help=f"Pairs per step; {_OWN}.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help=f"Peak learning rate; {_OWN}.")] = None,
    regularizer: Annotated[
        float | None, typer.Option(help="Sparse recipes: weight of the penalties, larger is sparser.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field of the recipe, such as document.pooling=sum; may be repeated."),
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
        bool, typer.Option("--group-by-length", help="Sparse recipes: batches of documents of similar length.")
    ] = False,
    max_length: Annotated[int | None, typer.Option(help=f"Maximum tokens per text; {_OWN}.")] = None,
    train_max_length: Annotated[int | None, typer.Option(help="The same while training; fewer are faster.")] = None,
    attention: Annotated[str | None, typer.Option(help="softmax or entmax; by default the model's own.")] = None,
    alpha: Annotated[float | None, typer.Option(help="alpha of entmax, from 1 (softmax) to 2; by default 1.5.")] = None,
    anneal_alpha: Annotated[float, typer.Option(help="Share of the steps over which alpha rises from 1.")] = 0.0,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="By default the faster one on this hardware.")
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused/--plain", help="Fused head (sparse) or similarity (colbert), or the stock one.")
    ] = True,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="GPU: capture the encoder as CUDA graphs; see docs/cli.md.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal models.")] = 0,
    save_steps: Annotated[int, typer.Option(help="A checkpoint after so many steps.")] = 25,
    save_minutes: Annotated[float, typer.Option(min=0, help="A checkpoint after this time at the latest.")] = 5.0,
    drop_unknown: Annotated[bool, typer.Option("--drop-unknown", help=_common.DROP_UNKNOWN_HELP)] = False,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Resume an interrupted run.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished model in --output.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the libraries' own logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Train a model by the recipe of a published system (tilefold recipes lists them), saved for sentence-transformers.

    The same command again resumes an interrupted run from its last checkpoint.
    """
    asked = locals()
    from tilefold.retrieval.truncation import tell_truncated

    values = {name: asked[name] for name in _FIELDS.split()}
    values |= {"base_model": model, "max_steps": steps, "graphs": graphs or None}
    config = _recipes.configure(recipe, values, asked)
    result = _train(config, data, negatives, drop_unknown, output, resume, overwrite, verbose)
    if result.exploded:
        _common.note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to {result.ranking_loss:.3f}: the "
            "model did not learn; train with a smaller --lr"
        )
    for found in result.truncated:
        tell_truncated("training text", found["texts"], found)
    for text in result.warnings:
        _common.note(f"warning: {_common.in_options(text)}")
    if as_json:
        _common.print_json(asdict(result))
        return
    how = "already trained" if result.reused else f"trained {result.steps} steps in {result.seconds:.0f} s"
    if result.resumed_from and not result.reused:
        how = f"trained {result.steps} steps, those after step {result.resumed_from} in {result.seconds:.0f} s"
    if not result.steps:
        how = f"no step of training, {config.base_model} as the recipe starts from it"
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    typer.echo(f"{how}{loss}: {result.model_dir}")
    late = type(config).__name__ == "ColbertRecipe"
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if late else "VECTORS"
    typer.echo(f"next: tilefold encode --model {output} --data {data} --output {vectors}")


def _train(
    config: Any,
    data: str,
    negatives: Path | None,
    drop_unknown: bool,
    output: Path,
    resume: bool,
    overwrite: bool,
    verbose: bool,
) -> Any:
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step

    if config.base_model != _models.PACKAGED:
        _models.find_model(config.base_model, "--model")
    collection = _common.load_data(data, drop_unknown=drop_unknown)
    _common.keeps(lambda: newest_step(output) is not None)
    before = [newest_step(output) or 0] if resume else [0]  # reported once, with the first step
    with _common.progress_bar("training", resumes=_common.FRESH) as update:

        def progress(step: int, steps: int, loss: float | None) -> None:
            if before:
                update(before.pop(), steps, "")
            update(step, steps, "" if loss is None else f"loss {loss:.3f}")

        return catalogue.train(
            config,
            collection,
            output,
            negatives=negatives,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            verbose=verbose,
        )
