"""``tilefold train``, a model by the recipe of a published system, and ``tilefold recipes``, which
lists them.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold.cli import _common, _models, _options, _retrievers
from tilefold.cli._common import UsageError, note
from tilefold.cli._options import (
    DocumentFieldOptions,
    Options,
    argument,
    option,
    refuse_options,
    spellings,
)
from tilefold.distributed.ranks import first_rank_first, join_ranks

if TYPE_CHECKING:
    from tilefold.recipes import Losses, TrainResult
    from tilefold.recipes.catalogue import Entry
    from tilefold.retrieval.data.passages import Passages

SAVE_MINUTES = 5.0
_OWN = "by default the recipe's"
STORED = 1 << 27  # bytes of documents that stay in their file
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


@dataclass(frozen=True, kw_only=True)
class TrainRequest(_retrievers.PassageOptions, DocumentFieldOptions):
    """Options of ``tilefold train``."""

    output: Annotated[
        Path,
        option(
            "Folder for the trained model.",
        ),
    ]
    recipe: Annotated[
        str,
        option(
            "A name of tilefold recipes; colbert for one vector per token.",
        ),
    ] = "splade"
    data: Annotated[
        str,
        option(
            _common.DATA_HELP,
        ),
    ]
    negatives: Annotated[
        Path | None,
        option(
            "Mined negatives or teacher scores: Parquet of tilefold mine or score, or MS MARCO's "
            "triples or JSON.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "minilm (the usual default), a folder, or a Hugging Face name of a fitting model.",
        ),
    ] = None
    steps: Annotated[
        int | None,
        option(
            "Training steps; by default --epochs decides, 0 saves the model as it starts.",
            panel="Steps and batches",
        ),
    ] = None
    epochs: Annotated[
        float | None,
        option(
            f"Passes over the training pairs; {_OWN}.",
            panel="Steps and batches",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        option(
            f"Pairs per step; {_OWN}.",
            panel="Steps and batches",
        ),
    ] = None
    fill_batches: Annotated[
        bool,
        option(
            "Fill short batches with pairs that an epoch has had already, as several GPUs always "
            "do.",
            "--fill-batches",
            panel="Steps and batches",
        ),
    ] = False
    mini_batch_size: Annotated[
        int | None,
        option(
            "Texts of each forward, for batches that do not fit: they are encoded twice.",
            panel="Steps and batches",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        option(
            f"Peak learning rate; {_OWN}.",
            "--lr",
            panel="Steps and batches",
        ),
    ] = None
    regularizer: Annotated[
        float | None,
        option(
            "Sparse recipes: weight of the penalties, larger is sparser.",
            panel="Sparse recipes",
        ),
    ] = None
    fields: Annotated[
        list[str] | None,
        option(
            "Any field of the recipe, such as document.pooling=sum; may be repeated.",
            "--set",
        ),
    ] = None
    dimension: Annotated[
        int | None,
        option(
            "colbert: dimension of a vector; by default 128, 0 for the backbone's own.",
            panel="ColBERT",
        ),
    ] = None
    query_length: Annotated[
        int | None,
        option(
            "colbert: tokens per query; by default 32.",
            panel="ColBERT",
        ),
    ] = None
    expand_queries: Annotated[
        bool,
        option(
            "colbert: pad queries with mask tokens that are scored.",
            "--expand-queries",
            panel="ColBERT",
        ),
    ] = False
    keep_punctuation: Annotated[
        bool,
        option(
            "colbert: keep the vectors of punctuation in documents.",
            "--keep-punctuation",
            panel="ColBERT",
        ),
    ] = False
    group_by_length: Annotated[
        bool,
        option(
            "Sparse recipes: batches of documents of similar length.",
            "--group-by-length",
            panel="Sparse recipes",
        ),
    ] = False
    max_length: Annotated[
        int | None,
        option(
            f"Maximum tokens per text; {_OWN}.",
            panel="Model",
        ),
    ] = None
    train_max_length: Annotated[
        int | None,
        option(
            "The same while training; fewer are faster.",
            panel="Model",
        ),
    ] = None
    passages: Annotated[
        int | None,
        option(
            "Train on passages of at most so many words; of a relevant document, the best by BM25.",
            panel="Passages",
        ),
    ] = None
    language: Annotated[
        str | None,
        option(
            "Of the stop words and stemmer of that BM25, or none for neither; by default english.",
            panel="Passages",
        ),
    ] = None
    attention: Annotated[
        Literal["softmax", "entmax"] | None,
        option(
            "By default the model's own.",
            panel="Model",
        ),
    ] = None
    alpha: Annotated[
        float | None,
        option(
            "alpha of entmax, from 1 (softmax) to 2; by default 1.5.",
            panel="Model",
        ),
    ] = None
    anneal_alpha: Annotated[
        float,
        option(
            "Share of the steps over which alpha rises from 1.",
            panel="Model",
        ),
    ] = 0.0
    bf16: Annotated[
        bool | None,
        option(
            "By default the faster one on this hardware.",
            "--bf16/--fp32",
            panel="Hardware",
        ),
    ] = None
    fused: Annotated[
        bool,
        option(
            "Fused head (sparse) or similarity (colbert), or the stock one.",
            "--fused/--plain",
            panel="Hardware",
        ),
    ] = True
    graphs: Annotated[
        bool,
        option(
            "GPU: capture the encoder as CUDA graphs; see docs/cli.md.",
            "--graphs",
            panel="Hardware",
        ),
    ] = False
    devices: Annotated[
        str | None,
        option(
            "GPUs to use, a number or all: a process for each, with a share of every step.",
            panel="Hardware",
        ),
    ] = None
    seed: Annotated[
        int,
        option(
            "Equal seeds give equal models.",
            panel="Steps and batches",
        ),
    ] = 0
    save_steps: Annotated[
        int | None,
        option(
            "A checkpoint after so many steps; by default 25, more where it takes long.",
            panel="Checkpoints and logs",
        ),
    ] = None
    save_minutes: Annotated[
        float,
        option(
            "A checkpoint after this time at the latest.",
            min=0,
            panel="Checkpoints and logs",
        ),
    ] = SAVE_MINUTES
    evaluate_steps: Annotated[
        int | None,
        option(
            "nDCG@10 of a split after every so many steps; the best model is kept.",
            panel="Evaluation while training",
        ),
    ] = None
    evaluate_split: Annotated[
        str | None,
        option(
            "By default dev, or the one beside train and test.",
            panel="Evaluation while training",
        ),
    ] = None
    evaluate_documents: Annotated[
        int | None,
        option(
            "Search its queries among so many documents; by default 10,000.",
            panel="Evaluation while training",
        ),
    ] = None
    patience: Annotated[
        int | None,
        option(
            "Stop after so many evaluations in a row that are not better.",
            panel="Evaluation while training",
        ),
    ] = None
    hours: Annotated[
        float | None,
        option(
            "Stop after this time, with a checkpoint; the same command goes on.",
            panel="Steps and batches",
        ),
    ] = None
    report_to: Annotated[
        str,
        option(
            "tensorboard (in OUTPUT.logs), wandb, or another name that the trainer knows.",
            panel="Checkpoints and logs",
        ),
    ] = "none"
    drop_unknown: Annotated[
        bool,
        option(
            _common.DROP_UNKNOWN_HELP,
            "--drop-unknown",
        ),
    ] = False
    resume: Annotated[
        bool,
        option(
            "Resume an interrupted run.",
            "--resume/--fresh",
            panel="Checkpoints and logs",
        ),
    ] = True
    overwrite: Annotated[
        bool,
        option(
            "Replace a finished model in --output.",
            "--overwrite",
        ),
    ] = False
    verbose: Annotated[
        bool,
        option(
            "Show the libraries' own logs.",
            "--verbose",
            panel="Checkpoints and logs",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.hours is not None and not self.hours > 0:
            raise UsageError(f"--hours: expected more than 0, got {self.hours:g}.")
        if self.steps == 0:
            self._refuse_options_of_training()
        if self.evaluate_steps is None:
            refuse_options(
                {
                    "--evaluate-split": self.evaluate_split,
                    "--evaluate-documents": self.evaluate_documents,
                    "--patience": self.patience,
                },
                "goes together with --evaluate-steps",
            )
        if self.steps is not None:
            refuse_options(
                {"--epochs": self.epochs},
                "does nothing with --steps, which says how many: leave it out",
            )
        if self.passages is None:
            refuse_options({"--language": self.language}, "goes with --passages")
        else:
            refuse_options(
                {"--negatives": self.negatives},
                "names whole documents, and goes without --passages",
            )

    def _refuse_options_of_training(self) -> None:
        """Refuse options that do nothing if no step is trained."""
        refuse_options(
            {
                "--epochs": self.epochs,
                "--negatives": self.negatives,
                "--batch-size": self.batch_size,
                "--fill-batches": self.fill_batches,
                "--mini-batch-size": self.mini_batch_size,
                "--lr": self.learning_rate,
                "--regularizer": self.regularizer,
                "--group-by-length": self.group_by_length,
                "--train-max-length": self.train_max_length,
                "--anneal-alpha": self.anneal_alpha != 0.0,
                "--bf16/--fp32": self.bf16 is not None,
                "--fused/--plain": not self.fused,
                "--graphs": self.graphs,
                "--save-steps": self.save_steps,
                "--save-minutes": self.save_minutes != SAVE_MINUTES,
                "--devices": self.devices,
                "--hours": self.hours,
                "--report-to": self.report_to != "none",
                "--evaluate-steps": self.evaluate_steps,
            },
            "does nothing with --steps 0, which trains nothing: leave it out",
        )


def train(request: TrainRequest) -> None:
    """Train a model by the recipe of a published system (tilefold recipes lists them), saved for
    sentence-transformers.

    The same command again resumes an interrupted run from its last checkpoint. With --devices, or
    under torchrun or accelerate launch, several processes share the pairs of each step.

    Example:
        tilefold train --recipe splade --data DATA --output MODEL
    """
    cuts = request.passage_splitter()
    if cuts is not None:
        _options.bm25_language(request.language)  # checked before anything is loaded
    config = _configure(request.recipe, request)
    if config.base_model != _models.PACKAGED:
        _models.find_model(config.base_model, "--model")
    if (code := _options.run_on_devices(request.devices)) is not None:
        raise typer.Exit(code)
    with _options.option_errors(**_option_of_field()), join_ranks(training=True) as rank:
        result = _train(config, request, cuts, rank)
    if rank == 0:
        _tell(result, config, request)


def _tell(result: TrainResult, config: Any, request: TrainRequest) -> None:
    from tilefold.recipes import Losses
    from tilefold.recipes.loading import LOG, PLOT
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    output = request.output
    if result.exploded:
        note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to "
            f"{result.ranking_loss:.3f}: the "
            "model did not learn; train with a smaller --lr",
        )
    for found in result.truncated:
        report_manifest_truncation("training text", found["texts"], found)
    for text in result.warnings:
        note(f"warning: {text}")
    how = (
        "already trained"
        if result.reused
        else f"trained {result.steps} steps in {result.seconds:.0f} s"
    )
    if result.resumed_from and not result.reused:
        how = (
            f"trained {result.steps} steps, those after step {result.resumed_from} "
            f"in {result.seconds:.0f} s"
        )
    if not result.steps:
        how = f"no step of training, {config.base_model} as the recipe starts from it"
    loss = (
        ""
        if result.loss is None
        else f", {Losses(result.loss, result.ranking_loss, result.penalties)}"
    )
    for kept in (row for row in result.evaluations if row["kept"]):
        loss += (
            f", nDCG@10 {kept['nDCG@10']:.3f} of {result.evaluated} at step {kept['step']:,}, "
            "which was kept"
        )
    if result.loss is not None and not (output / PLOT).is_file():
        note(
            f"the log of the training is {output / LOG}; with matplotlib (tilefold[plot]) there is "
            "a plot, too",
        )
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if config.late else "VECTORS"
    if result.ranks > 1 and not result.reused:
        how += f" on {result.ranks} devices"
    following = (
        _common.next_command("encode", "--model", output, "--data", request.data, "--output")
        + f" {vectors}"
    )
    fields = asdict(result)
    cuts = request.passage_splitter()
    if cuts is not None:
        fields["passages"] = {
            "length": cuts.length,
            "stride": cuts.stride,
            "language": _options.bm25_language(request.language),
        }
    _common.print_result(
        fields,
        request.as_json,
        f"{how}{loss}: {result.model_dir}",
        following,
    )


def _train(config: Any, request: TrainRequest, cuts: Passages | None, rank: int) -> TrainResult:
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step
    from tilefold.retrieval.training_data.passages import training_passages
    from tilefold.retrieval.training_data.rows import RowsAhead

    output = request.output
    splits = (
        ["train"] if config.evaluate_steps is None else ["train", config.evaluate_split or "dev"]
    )
    negatives: RowsAhead | Path | None = request.negatives
    has_data = request.data == "pydocs" or Path(request.data).exists()
    if request.negatives is not None and config.reads_negatives and has_data:
        # millions of rows take as long as the documents
        negatives = RowsAhead(request.negatives)
    with first_rank_first():  # what it fetches, the others find
        collection = _common.load_data(
            request.data,
            drop_unknown=request.drop_unknown,
            splits=splits,
            stored=STORED if cuts is None else None,
        )
    if cuts is not None:
        whole = len(collection.documents)
        language = _options.bm25_language(request.language)
        collection = training_passages(cuts, collection, language=language)
        if rank == 0:
            note(
                f"{whole:,} documents in {len(collection.documents):,} passages of at most "
                f"{cuts.length} words; BM25 chooses relevant ones with stop words and stemmer of "
                f"--language {language}",
            )
    _common.kept.append(lambda: newest_step(output) is not None)
    before = (
        [newest_step(output) or 0] if request.resume else [0]
    )  # reported once, with the first step
    bar: Any = nullcontext() if rank else _common.progress_bar("training", resumes=_common.FRESH)
    with bar as update:

        def progress(step: int, steps: int, losses: Losses | None) -> None:
            if before:
                update(before.pop(), steps)
            update(step, steps, losses)

        return catalogue.train(
            config,
            collection,
            output,
            negatives=negatives,
            progress=progress,
            resume=request.resume,
            overwrite=request.overwrite,
            verbose=request.verbose,
            hours=request.hours,
            report_to=request.report_to,
            command=shlex.join(["tilefold", *_options.command_line]),
        )


def _configure(name: str, request: TrainRequest) -> Any:
    """Create a recipe of the catalogue with the options and ``--set`` of a command.

    Args:
        name: name of the recipe.
        request: the options, which take precedence over the fields of the recipe.

    Raises:
        UsageError: for an unknown name or field, a value out of range, an option of other recipes,
            or a field that is set twice.
    """
    from tilefold.recipes.catalogue import RECIPES, get_recipe

    _options.check_choice("--recipe", name, RECIPES)
    options: dict[str, object] = {
        "epochs": request.epochs,
        "batch_size": request.batch_size,
        "mini_batch_size": request.mini_batch_size,
        "learning_rate": request.learning_rate,
        "max_length": request.max_length,
        "train_max_length": request.train_max_length,
        "attention": request.attention,
        "alpha": request.alpha,
        "anneal_alpha": request.anneal_alpha,
        "bf16": request.bf16,
        "fused": request.fused,
        "save_steps": request.save_steps,
        "save_minutes": request.save_minutes,
        "evaluate_steps": request.evaluate_steps,
        "evaluate_split": request.evaluate_split,
        "evaluate_documents": request.evaluate_documents,
        "patience": request.patience,
        "seed": request.seed,
        "base_model": request.model,
        "max_steps": request.steps,
        "graphs": request.graphs or None,
        "fill_batches": request.fill_batches or None,
    }
    overrides = {field: value for field, value in options.items() if value is not None}
    late = RECIPES[name].recipe.late
    _refuse_options_of_other_recipes(request, name, late)
    try:
        with _options.option_errors(**_option_of_field()):
            recipe = get_recipe(name, **overrides)
            values = recipe.to_dict()
            if late:
                _apply_colbert_options(values, request)
            else:
                _apply_sparse_options(values, request)
            _check_repetitions(request)
            for assignment in request.fields or []:
                _set(values, assignment)
            return type(recipe).from_dict(values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _option_of_field() -> dict[str, str]:
    """Return the option that sets each field of a recipe."""
    option_of_parameter = spellings(TrainRequest)
    option_of_field = dict(option_of_parameter)
    for field, parameter in _PARAMETERS.items():
        option_of_field.pop(field, None)
        if parameter:
            option_of_field[field] = option_of_parameter[parameter]
    return option_of_field


def _refuse_options_of_other_recipes(request: TrainRequest, name: str, late: bool) -> None:
    """Refuse options of sparse recipes for a late-interaction recipe, and the other way round."""
    if late:
        refuse_options(
            {
                "--regularizer": request.regularizer,
                "--group-by-length": request.group_by_length,
            },
            f"belongs to the sparse recipes: leave it out for {name}",
        )
    else:
        refuse_options(
            {
                "--dimension": request.dimension,
                "--query-length": request.query_length,
                "--expand-queries": request.expand_queries,
                "--keep-punctuation": request.keep_punctuation,
            },
            f"belongs to --recipe colbert: leave it out for {name}",
        )


def _apply_colbert_options(recipe: dict[str, Any], request: TrainRequest) -> None:
    """Set the fields of a late-interaction recipe that were given."""
    if request.dimension is not None:
        recipe["dimension"] = request.dimension or None  # 0 is the backbone's own
    if request.query_length is not None:
        recipe["query_length"] = request.query_length
    if request.expand_queries:
        recipe["expand_queries"] = True
    if request.keep_punctuation:
        recipe["skip_punctuation"] = False


def _apply_sparse_options(recipe: dict[str, Any], request: TrainRequest) -> None:
    """Set the fields of a sparse recipe that were given."""
    if request.group_by_length:
        recipe["group_by_length"] = True
    if request.regularizer is None:
        return
    penalties = [
        recipe[name]
        for name in ("query_regularizer", "document_regularizer")
        if recipe[name]["kind"] != "none"
    ]
    if not penalties:
        raise UsageError(
            "--regularizer does nothing for this recipe, which has no penalty: leave it out.",
        )
    for penalty in penalties:
        penalty["weight"] = request.regularizer


def _check_repetitions(request: TrainRequest) -> None:
    """Refuse a field of ``--set`` that is set twice, or by an option too."""
    spelled = spellings(TrainRequest)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainRequest)}
    paths = [assignment.partition("=")[0] for assignment in request.fields or []]
    for path in paths:
        parameter = _PARAMETERS.get(path, path)
        option = ""
        if parameter in spelled and getattr(request, parameter) != defaults[parameter]:
            option = f" (--set and {spelled[parameter]})"
        if option or paths.count(path) > 1:
            raise UsageError(f"--set: {path}: expected once, got it twice{option}: leave one out.")


def _set(recipe: dict[str, Any], assignment: str) -> None:
    """Set a field of a recipe, or of an encoder or a penalty in it, in place.

    Unknown fields of encoders and penalties are refused when the recipe is created.

    Args:
        recipe: fields and values of the recipe.
        assignment: ``FIELD=VALUE`` or ``FIELD.FIELD=VALUE``; the value is JSON, or a word.

    Raises:
        UsageError: for an unknown field, or text without a value.
    """
    path, equals_sign, text = assignment.partition("=")
    *parent_names, field = path.split(".")
    if not equals_sign or not field:
        raise UsageError(f"--set: expected FIELD=VALUE, got {assignment!r}.")
    settings: Any = recipe
    for name in parent_names:
        settings = settings.get(name) if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or (settings is recipe and field not in recipe):
        raise UsageError(f"--set: there is no field {path!r}; the fields are {', '.join(recipe)}.")
    try:
        settings[field] = json.loads(text)
    except ValueError:
        settings[field] = text


@dataclass(frozen=True, kw_only=True)
class RecipesRequest(Options):
    """Options of ``tilefold recipes``."""

    name: Annotated[
        str | None,
        argument(
            "Only this one, as a page: its needs, its fields and the options that change them.",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "All settings as JSON on stdout.",
            "--json",
        ),
    ] = False


def recipes(request: RecipesRequest) -> None:
    """List the published systems that can be trained by name, what they need, and what their papers
    report.

    Example:
        tilefold recipes splade-v3
    """
    from tilefold.recipes.catalogue import RECIPES

    _options.check_choice("recipe", request.name, RECIPES)
    chosen = [entry for entry in RECIPES.values() if request.name in (None, entry.name)]
    if request.as_json:
        _common.print_json(
            chosen[0].to_dict() if request.name else [entry.to_dict() for entry in chosen]
        )
        return
    if request.name:
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
        "Fields, their values in JSON, the option that changes each (else --set FIELD=VALUE), and "
        "what it is:",
    )

    from tilefold.recipes.catalogue import describe

    spelled = spellings(TrainRequest)
    for field, value, text in describe(entry.recipe):
        option = spelled.get(_PARAMETERS.get(field, field))
        lines.append(f"{field} = {json.dumps(value)}" + (f" ({option})" if option else ""))
        lines.append(textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    "))
    typer.echo("\n".join(lines))
