"""``tilefold train``, a model by the recipe of a published system, and ``tilefold recipes``, which lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefold.cli import _common, _models
from tilefold.cli._common import Asked, Count, Number, Place, Text, UsageError, note, option

_OWN = "by default the recipe's"
_FIELDS = (  # of every recipe, called like the parameter
    "epochs batch_size learning_rate max_length train_max_length attention alpha anneal_alpha bf16 fused save_steps "
    "save_minutes seed"
)
# parameters of train that some recipes have
_SPARSE = ("regularizer", "group_by_length")
_COLBERT = ("dimension", "query_length", "expand_queries", "keep_punctuation")
# field of a recipe -> parameter of the command that sets it, where its own name does not
_PARAMETERS = {
    "negatives": "",    "base_model": "model", "max_steps": "steps", "skip_punctuation": "keep_punctuation",
    "query_regularizer": "regularizer", "document_regularizer": "regularizer",
    "output_dir": "output", "query_regularizer.weight": "regularizer", "document_regularizer.weight": "regularizer",
}  # fmt: skip


def train(
    output: Annotated[Path, option("Folder for the trained model.")],
    recipe: Annotated[str, option("A name of tilefold recipes; colbert for one vector per token.")] = "splade",
    data: Annotated[str, option(_common.DATA_HELP)] = "pydocs",
    negatives: Annotated[Place, option("Mined negatives or teacher scores: Parquet of tilefold mine or score.")] = None,
    model: Annotated[
        Text, option("minilm (the usual default), a folder, or a Hugging Face name of a fitting model.")
    ] = None,
    steps: Annotated[
        Count, option("Training steps; by default --epochs decides, 0 saves the model as it starts.")
    ] = None,
    epochs: Annotated[Number, option(f"Passes over the training pairs; {_OWN}.")] = None,
    batch_size: Annotated[Count, option(f"Pairs per step; {_OWN}.")] = None,
    learning_rate: Annotated[Number, option(f"Peak learning rate; {_OWN}.", "--lr")] = None,
    regularizer: Annotated[Number, option("Sparse recipes: weight of the penalties, larger is sparser.")] = None,
    fields: Annotated[
        list[str] | None, option("Any field of the recipe, such as document.pooling=sum; may be repeated.", "--set")
    ] = None,
    dimension: Annotated[
        Count, option("colbert: dimension of a vector; by default 128, 0 for the backbone's own.")
    ] = None,
    query_length: Annotated[Count, option("colbert: tokens per query; by default 32.")] = None,
    expand_queries: Annotated[
        bool, option("colbert: pad queries with mask tokens that are scored.", "--expand-queries")
    ] = False,
    keep_punctuation: Annotated[
        bool, option("colbert: keep the vectors of punctuation in documents.", "--keep-punctuation")
    ] = False,
    group_by_length: Annotated[
        bool, option("Sparse recipes: batches of documents of similar length.", "--group-by-length")
    ] = False,
    max_length: Annotated[Count, option(f"Maximum tokens per text; {_OWN}.")] = None,
    train_max_length: Annotated[Count, option("The same while training; fewer are faster.")] = None,
    attention: Annotated[Text, option("softmax or entmax; by default the model's own.")] = None,
    alpha: Annotated[Number, option("alpha of entmax, from 1 (softmax) to 2; by default 1.5.")] = None,
    anneal_alpha: Annotated[float, option("Share of the steps over which alpha rises from 1.")] = 0.0,
    bf16: Annotated[bool | None, option("By default the faster one on this hardware.", "--bf16/--fp32")] = None,
    fused: Annotated[
        bool, option("Fused head (sparse) or similarity (colbert), or the stock one.", "--fused/--plain")
    ] = True,
    graphs: Annotated[bool, option("GPU: capture the encoder as CUDA graphs; see docs/cli.md.", "--graphs")] = False,
    seed: Annotated[int, option("Equal seeds give equal models.")] = 0,
    save_steps: Annotated[int, option("A checkpoint after so many steps.")] = 25,
    save_minutes: Annotated[float, option("A checkpoint after this time at the latest.", min=0)] = 5.0,
    drop_unknown: Annotated[bool, option(_common.DROP_UNKNOWN_HELP, "--drop-unknown")] = False,
    resume: Annotated[bool, option("Resume an interrupted run.", "--resume/--fresh")] = True,
    overwrite: Annotated[bool, option("Replace a finished model in --output.", "--overwrite")] = False,
    verbose: Annotated[bool, option("Show the libraries' own logs.", "--verbose")] = False,
    as_json: Annotated[bool, option("The result as JSON on stdout.", "--json")] = False,
) -> None:
    """Train a model by the recipe of a published system (tilefold recipes lists them), saved for sentence-transformers.

    The same command again resumes an interrupted run from its last checkpoint.
    """
    asked = locals()
    from tilefold.retrieval.truncation import tell_truncated

    config = _configure(recipe, asked)
    result = _train(config, asked)
    if result.exploded:
        note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to {result.ranking_loss:.3f}: the "
            "model did not learn; train with a smaller --lr"
        )
    for found in result.truncated:
        tell_truncated("training text", found["texts"], found)
    for text in result.warnings:
        note(f"warning: {_common.in_options(text)}")
    how = "already trained" if result.reused else f"trained {result.steps} steps in {result.seconds:.0f} s"
    if result.resumed_from and not result.reused:
        how = f"trained {result.steps} steps, those after step {result.resumed_from} in {result.seconds:.0f} s"
    if not result.steps:
        how = f"no step of training, {config.base_model} as the recipe starts from it"
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if _is_late(config) else "VECTORS"
    following = f"next: tilefold encode --model {output} --data {data} --output {vectors}"
    _common.print_result(asdict(result), as_json, f"{how}{loss}: {result.model_dir}", following)


def _train(config: Any, asked: Asked) -> Any:
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step

    output = asked["output"]
    if config.base_model != _models.PACKAGED:
        _models.find_model(config.base_model, "--model")
    collection = _common.load_data(asked["data"], drop_unknown=asked["drop_unknown"])
    _common.keeps(lambda: newest_step(output) is not None)
    before = [newest_step(output) or 0] if asked["resume"] else [0]  # reported once, with the first step
    with _common.progress_bar("training", resumes=_common.FRESH) as update:

        def progress(step: int, steps: int, loss: float | None) -> None:
            if before:
                update(before.pop(), steps, "")
            update(step, steps, "" if loss is None else f"loss {loss:.3f}")

        options = {name: asked[name] for name in ("negatives", "resume", "overwrite", "verbose")}
        return catalogue.train(config, collection, output, progress=progress, **options)


def _is_late(recipe: object) -> bool:
    return type(recipe).__name__ == "ColbertRecipe"


def _configure(name: str, asked: Asked) -> Any:
    """The recipe `name` with the options for its fields, those of some recipes only, and --set."""
    from tilefold.recipes.catalogue import RECIPES, get_recipe

    _common.check_choice("--recipe", name, RECIPES)
    values = {field: asked[field] for field in _FIELDS.split()}
    values |= {"base_model": asked["model"], "max_steps": asked["steps"], "graphs": asked["graphs"] or None}
    _common.options.update({field: _common.options[option] for field, option in _PARAMETERS.items() if option})
    late = _is_late(RECIPES[name].recipe)
    whose = "the sparse recipes" if late else "--recipe colbert"
    _common.refuse(_SPARSE if late else _COLBERT, f"belongs to {whose}: leave it out for {name}")
    own = {option: asked[option] for option in (*_SPARSE, *_COLBERT) if option in _common.given}
    try:
        recipe = get_recipe(name, **_common.known(values))
        return type(recipe).from_dict(_changed(recipe.to_dict(), own, asked["fields"] or []))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _changed(recipe: dict[str, Any], own: Mapping[str, Any], fields: list[str]) -> dict[str, Any]:
    for name, value in own.items():
        if name == "regularizer":
            put = [_put_weight(recipe, side, value) for side in ("query_regularizer", "document_regularizer")]
            if not any(put):
                raise UsageError("--regularizer does nothing for this recipe, which has no penalty: leave it out.")
        elif name == "keep_punctuation":
            recipe["skip_punctuation"] = False
        else:
            recipe[name] = value or None if name == "dimension" else value
    places = [text.partition("=")[0] for text in fields]
    for place in places:
        also = _common.given.get(_PARAMETERS.get(place, place))
        if also is not None or places.count(place) > 1:
            both = f" (--set and {also})" if also else ""
            raise UsageError(f"--set: {place}: expected once, got it twice{both}: leave one out.")
    for text in fields:
        _set(recipe, text)
    return recipe


def _put_weight(recipe: dict[str, Any], side: str, weight: float) -> bool:
    """Whether the side has a penalty that now has this weight."""
    if not isinstance(recipe[side], dict):
        recipe[side] = weight
    elif recipe[side]["kind"] != "none":
        recipe[side]["weight"] = weight
    else:
        return False
    return True


def _set(recipe: dict[str, Any], text: str) -> None:
    """Apply ``field=value`` or ``field.field=value``; the value is JSON, or a word."""
    path, mark, word = text.partition("=")
    *parents, last = path.split(".")
    if not mark or not last:
        raise UsageError(f"--set: expected FIELD=VALUE, got {text!r}.")
    place: Any = recipe
    for name in parents:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or (not parents and last not in place):
        inside = place if isinstance(place, dict) else recipe
        raise UsageError(f"--set: there is no field {path!r}; the fields are {', '.join(inside)}.")
    try:
        place[last] = json.loads(word)
    except ValueError:
        place[last] = word


def recipes(
    name: Annotated[Text, typer.Argument(help="Only this one, with its settings.")] = None,
    as_json: Annotated[bool, option("All settings as JSON on stdout.", "--json")] = False,
) -> None:
    """List the published systems that can be trained by name, what they need, and what their papers report."""
    from tilefold.recipes.catalogue import RECIPES

    _common.check_choice("recipe", name, RECIPES)
    chosen = [entry for entry in RECIPES.values() if name in (None, entry.name)]
    if as_json:
        _common.print_json(chosen[0].to_dict() if name else [entry.to_dict() for entry in chosen])
        return
    from rich.table import Table

    table = Table(box=None)
    for column in ("recipe", "what it is", "needs", "paper", "published number"):
        table.add_column(column, overflow="fold")
    for entry in chosen:
        paper = f"arXiv {entry.paper}" if entry.paper else ""
        table.add_row(entry.name, entry.summary, ", ".join(entry.needs), paper, entry.publishes)
    _common.stdout().print(table)
    if name:
        for field, value in chosen[0].recipe.to_dict().items():
            said = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
            typer.echo(f"{field} = {said}")
        typer.echo(f"published: {chosen[0].published}")
