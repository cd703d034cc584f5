"""``tilefold train``, a model by the recipe of a published system, and ``tilefold recipes``, which
lists them.
"""

from __future__ import annotations

import inspect
import json
import shlex
import textwrap
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilefold.cli import _common, _models, _options, _retrievers
from tilefold.cli._common import Asked, UsageError, Values, note
from tilefold.cli._options import (
    Count,
    Number,
    Place,
    Text,
    Words,
    argument,
    flag,
    option,
    preset,
    required,
)
from tilefold.distributed.ranks import first_rank_first, join_ranks

if TYPE_CHECKING:
    from tilefold.recipes import Losses, TrainResult
    from tilefold.recipes.catalogue import Entry
    from tilefold.retrieval.data.passages import Passages

_OWN = "by default the recipe's"
STORED = 1 << 27  # bytes of documents that stay in their file
_FIELDS = (  # of every recipe, called like the parameter
    "epochs batch_size mini_batch_size learning_rate max_length train_max_length attention alpha anneal_alpha "
    "bf16 fused save_steps save_minutes evaluate_steps evaluate_split evaluate_documents patience seed"
)
# parameters of train that some recipes have
_SPARSE = ("regularizer", "group_by_length")
_COLBERT = ("dimension", "query_length", "expand_queries", "keep_punctuation")
# field of a recipe -> parameter of the command that sets it, where its own name does not
_PARAMETERS = {
    "negatives": "",
    "base_model": "model",
    "max_steps": "steps",
    "skip_punctuation": "keep_punctuation",
    "query_regularizer": "regularizer",
    "document_regularizer": "regularizer",
    "output_dir": "output",
    "query_regularizer.weight": "regularizer",
    "document_regularizer.weight": "regularizer",
}


def train(
    output: Path = required("Folder for the trained model."),
    recipe: str = preset("splade", "A name of tilefold recipes; colbert for one vector per token."),
    data: str = required(_common.DATA_HELP),
    negatives: Place = option(
        "Mined negatives or teacher scores: Parquet of tilefold mine or score, or MS MARCO's triples or JSON.",
    ),
    model: Text = option(
        "minilm (the usual default), a folder, or a Hugging Face name of a fitting model.",
    ),
    steps: Count = option(
        "Training steps; by default --epochs decides, 0 saves the model as it starts.",
    ),
    epochs: Number = option(f"Passes over the training pairs; {_OWN}."),
    batch_size: Count = option(f"Pairs per step; {_OWN}."),
    fill_batches: bool = flag(
        "Fill short batches with pairs that an epoch has had already, as several GPUs always do.",
        "--fill-batches",
    ),
    mini_batch_size: Count = option(
        "Texts of each forward, for batches that do not fit: they are encoded twice.",
    ),
    learning_rate: Number = option(f"Peak learning rate; {_OWN}.", "--lr"),
    regularizer: Number = option("Sparse recipes: weight of the penalties, larger is sparser."),
    fields: Words = option(
        "Any field of the recipe, such as document.pooling=sum; may be repeated.",
        "--set",
    ),
    dimension: Count = option(
        "colbert: dimension of a vector; by default 128, 0 for the backbone's own.",
    ),
    query_length: Count = option("colbert: tokens per query; by default 32."),
    expand_queries: bool = flag(
        "colbert: pad queries with mask tokens that are scored.",
        "--expand-queries",
    ),
    keep_punctuation: bool = flag(
        "colbert: keep the vectors of punctuation in documents.",
        "--keep-punctuation",
    ),
    group_by_length: bool = flag(
        "Sparse recipes: batches of documents of similar length.",
        "--group-by-length",
    ),
    max_length: Count = option(f"Maximum tokens per text; {_OWN}."),
    train_max_length: Count = option("The same while training; fewer are faster."),
    passages: Count = option(
        "Train on passages of at most so many words; of a relevant document, the best by BM25.",
    ),
    stride: Count = _retrievers.STRIDE,
    cut: Text = _retrievers.CUT,
    attention: Text = option("By default the model's own.", metavar="softmax|entmax"),
    alpha: Number = option("alpha of entmax, from 1 (softmax) to 2; by default 1.5."),
    anneal_alpha: float = preset(0.0, "Share of the steps over which alpha rises from 1."),
    bf16: bool | None = option("By default the faster one on this hardware.", "--bf16/--fp32"),
    fused: bool = preset(
        True,
        "Fused head (sparse) or similarity (colbert), or the stock one.",
        "--fused/--plain",
    ),
    graphs: bool = flag("GPU: capture the encoder as CUDA graphs; see docs/cli.md.", "--graphs"),
    devices: Text = option(
        "GPUs to use, a number or all: a process for each, with a share of every step.",
    ),
    seed: int = preset(0, "Equal seeds give equal models."),
    save_steps: Count = option(
        "A checkpoint after so many steps; by default 25, more where it takes long.",
    ),
    save_minutes: float = preset(5.0, "A checkpoint after this time at the latest.", min=0),
    evaluate_steps: Count = option(
        "nDCG@10 of a split after every so many steps; the best model is kept.",
    ),
    evaluate_split: Text = option("By default dev, or the one beside train and test."),
    evaluate_documents: Count = option(
        "Search its queries among so many documents; by default 10,000.",
    ),
    patience: Count = option("Stop after so many evaluations in a row that are not better."),
    hours: Number = option("Stop after this time, with a checkpoint; the same command goes on."),
    report_to: str = preset(
        "none",
        "tensorboard (in OUTPUT.logs), wandb, or another name that the trainer knows.",
    ),
    drop_unknown: bool = flag(_common.DROP_UNKNOWN_HELP, "--drop-unknown"),
    resume: bool = preset(True, "Resume an interrupted run.", "--resume/--fresh"),
    overwrite: bool = flag("Replace a finished model in --output.", "--overwrite"),
    verbose: bool = flag("Show the libraries' own logs.", "--verbose"),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Train a model by the recipe of a published system (tilefold recipes lists them), saved for
    sentence-transformers.

    The same command again resumes an interrupted run from its last checkpoint. With --devices, or
    under torchrun or accelerate launch, several processes share the pairs of each step.
    """
    asked = locals()
    if hours is not None and not hours > 0:
        raise UsageError(f"--hours: expected more than 0, got {hours:g}.")
    cuts = _retrievers.passages(asked)
    config = _configure(recipe, asked)
    if config.base_model != _models.PACKAGED:
        _models.find_model(config.base_model, "--model")
    if (code := _options.on_devices(devices)) is not None:
        raise typer.Exit(code)
    with join_ranks(training=True) as rank:
        result = _train(config, asked, cuts, rank)
    if rank == 0:
        _tell(result, config, asked)


def _tell(result: TrainResult, config: Any, asked: Asked) -> None:
    from tilefold.recipes import Losses
    from tilefold.recipes.loading import LOG, PLOT
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    output = asked["output"]
    if result.exploded:
        note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to {result.ranking_loss:.3f}: the "
            "model did not learn; train with a smaller --lr",
        )
    for found in result.truncated:
        report_manifest_truncation("training text", found["texts"], found)
    for text in result.warnings:
        note(f"warning: {_options.in_options(text)}")
    how = (
        "already trained"
        if result.reused
        else f"trained {result.steps} steps in {result.seconds:.0f} s"
    )
    if result.resumed_from and not result.reused:
        how = f"trained {result.steps} steps, those after step {result.resumed_from} in {result.seconds:.0f} s"
    if not result.steps:
        how = f"no step of training, {config.base_model} as the recipe starts from it"
    loss = (
        ""
        if result.loss is None
        else f", {Losses(result.loss, result.ranking_loss, result.penalties)}"
    )
    for kept in (row for row in result.evaluations if row["kept"]):
        loss += f", nDCG@10 {kept['nDCG@10']:.3f} of {result.evaluated} at step {kept['step']:,}, which was kept"
    if result.loss is not None and not (output / PLOT).is_file():
        note(
            f"the log of the training is {output / LOG}; with matplotlib (tilefold[plot]) there is a plot, too",
        )
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if config.late else "VECTORS"
    if result.ranks > 1 and not result.reused:
        how += f" on {result.ranks} devices"
    following = (
        _common.next_command("encode", "--model", output, "--data", asked["data"], "--output")
        + f" {vectors}"
    )
    _common.print_result(
        asdict(result),
        asked["as_json"],
        f"{how}{loss}: {result.model_dir}",
        following,
    )


def _train(config: Any, asked: Asked, cuts: Passages | None, rank: int) -> TrainResult:
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step
    from tilefold.retrieval.training_data.passages import training_passages
    from tilefold.retrieval.training_data.rows import RowsAhead

    output = asked["output"]
    splits = (
        ["train"] if config.evaluate_steps is None else ["train", config.evaluate_split or "dev"]
    )
    parts: Values = {"splits": splits, "stored": STORED if cuts is None else None}
    negatives = asked["negatives"]
    if (
        negatives
        and getattr(config, "negatives", 0)
        and (asked["data"] == "pydocs" or Path(asked["data"]).exists())
    ):
        negatives = RowsAhead(negatives)  # millions of rows take as long as the documents
    with first_rank_first():  # what it fetches, the others find
        collection = _common.load_data(asked["data"], drop_unknown=asked["drop_unknown"], **parts)
    if cuts is not None:
        whole = len(collection.documents)
        collection = training_passages(cuts, collection)
        if rank == 0:
            note(
                f"{whole:,} documents in {len(collection.documents):,} passages of at most {cuts.length} words",
            )
    _common.kept.append(lambda: newest_step(output) is not None)
    before = (
        [newest_step(output) or 0] if asked["resume"] else [0]
    )  # reported once, with the first step
    bar: Any = nullcontext() if rank else _common.progress_bar("training", resumes=_common.FRESH)
    with bar as update:

        def progress(step: int, steps: int, losses: Losses | None) -> None:
            if before:
                update(before.pop(), steps)
            update(step, steps, losses)

        options = {
            name: asked[name] for name in ("resume", "overwrite", "verbose", "hours", "report_to")
        }
        options["command"] = shlex.join(["tilefold", *_options.arguments])
        return catalogue.train(
            config,
            collection,
            output,
            negatives=negatives,
            progress=progress,
            **options,
        )


def _configure(name: str, asked: Asked) -> Any:
    """The recipe `name` with the options for its fields, those of some recipes only, and --set."""
    from tilefold.recipes.catalogue import RECIPES, get_recipe

    _options.check_choice("--recipe", name, RECIPES)
    values = {field: asked[field] for field in _FIELDS.split()}
    values |= {
        "base_model": asked["model"],
        "max_steps": asked["steps"],
        "graphs": asked["graphs"] or None,
        "fill_batches": asked["fill_batches"] or None,
    }
    _options.options.update(
        {field: _options.options[option] for field, option in _PARAMETERS.items() if option},
    )
    late = RECIPES[name].recipe.late
    whose = "the sparse recipes" if late else "--recipe colbert"
    _options.refuse(_SPARSE if late else _COLBERT, f"belongs to {whose}: leave it out for {name}")
    own = {option: asked[option] for option in (*_SPARSE, *_COLBERT) if option in _options.given}
    try:
        recipe = get_recipe(name, **_common.known(values))
        return type(recipe).from_dict(_changed(recipe.to_dict(), own, asked["fields"] or []))
    except ValueError as error:
        raise UsageError(_options.in_options(str(error))) from error


def _changed(recipe: Values, own: Asked, fields: list[str]) -> Values:
    for name, value in own.items():
        if name == "regularizer":
            sides = {side: recipe[side] for side in ("query_regularizer", "document_regularizer")}
            put = {
                side: old
                for side, old in sides.items()
                if not isinstance(old, dict) or old["kind"] != "none"
            }
            recipe |= {
                side: old | {"weight": value} if isinstance(old, dict) else value
                for side, old in put.items()
            }
            if not put:
                raise UsageError(
                    "--regularizer does nothing for this recipe, which has no penalty: leave it out.",
                )
        elif name == "keep_punctuation":
            recipe["skip_punctuation"] = False
        else:
            recipe[name] = value or None if name == "dimension" else value
    places = [text.partition("=")[0] for text in fields]
    for place in places:
        also = _options.given.get(_PARAMETERS.get(place, place))
        if also is not None or places.count(place) > 1:
            both = f" (--set and {also})" if also else ""
            raise UsageError(f"--set: {place}: expected once, got it twice{both}: leave one out.")
    for text in fields:
        _set(recipe, text)
    return recipe


def _set(recipe: Values, text: str) -> None:
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
    name: Text = argument(
        "Only this one, as a page: its needs, its fields and the options that change them.",
    ),
    as_json: bool = flag("All settings as JSON on stdout.", "--json"),
) -> None:
    """List the published systems that can be trained by name, what they need, and what their papers
    report.
    """
    from tilefold.recipes.catalogue import RECIPES

    _options.check_choice("recipe", name, RECIPES)
    chosen = [entry for entry in RECIPES.values() if name in (None, entry.name)]
    if as_json:
        _common.print_json(chosen[0].to_dict() if name else [entry.to_dict() for entry in chosen])
        return
    if name:
        _print_page(chosen[0])
        return
    papers = [f"arXiv {entry.paper}" if entry.paper else "" for entry in chosen]
    rows = (
        (e.name, e.summary, ", ".join(e.needs), p, e.publishes)
        for e, p in zip(chosen, papers, strict=True)
    )
    columns = ("recipe", "what it is", "needs", "paper", "published number")
    _common.print_table(columns, rows, fold=columns, box=None)


def _print_page(entry: Entry) -> None:
    """A recipe for people: what it is, the commands that it takes, and its fields."""
    data = "DATA"
    commands = entry.recipe.preparation(data)
    negatives = f" --negatives {commands[-1].rpartition(' ')[2]}" if commands else ""
    commands.append(f"tilefold train --recipe {entry.name} --data {data}{negatives} --output MODEL")
    paper = f"arXiv {entry.paper}; " if entry.paper else ""
    lines = [
        f"{entry.name}: {entry.summary}",
        f"paper: {paper}{entry.publishes}",
        f"published: {entry.published}",
    ]
    lines += [
        f"needs: {', '.join(entry.needs)}; a base model of kind {entry.base}",
        "",
        *commands,
        "",
    ]
    lines.append(
        "Fields, their values in JSON, the option that changes each (else --set FIELD=VALUE), and what it is:",
    )

    from tilefold.recipes.catalogue import describe

    named = inspect.signature(train).parameters.items()
    spelled = {
        name: "".join(each.default.param_decls) or f"--{name.replace('_', '-')}"
        for name, each in named
    }
    for field, value, text in describe(entry.recipe):
        option = spelled.get(_PARAMETERS.get(field, field))
        lines.append(f"{field} = {json.dumps(value)}" + (f" ({option})" if option else ""))
        lines.append(textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    "))
    typer.echo("\n".join(lines))
