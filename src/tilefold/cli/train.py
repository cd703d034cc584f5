"""``tilefold train`` and ``tilefold recipes``: models by the recipes of published systems."""

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
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.training_data.rows import RowsAhead

SAVE_MINUTES = 5.0
# Documents in a file of at least this size are read one by one when they are needed.
STREAMED_FILE_BYTES = 1 << 27
PAGE_WIDTH = 80  # characters of a line of `tilefold recipes NAME`
_RECIPE_DEFAULT = "by default the recipe's"
# Field of a recipe -> field of the request that sets it, where the two names differ. Empty for a
# field of a recipe that no option sets, though an option has its name.
_REQUEST_FIELDS = {
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
            f"Passes over the training pairs; {_RECIPE_DEFAULT}.",
            panel="Steps and batches",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        option(
            f"Pairs per step; {_RECIPE_DEFAULT}.",
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
            f"Peak learning rate; {_RECIPE_DEFAULT}.",
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
            f"Maximum tokens per text; {_RECIPE_DEFAULT}.",
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
    """Train a model by the recipe of a published system, saved for sentence-transformers.

    tilefold recipes lists the recipes.

    The same command again resumes an interrupted run from its last checkpoint. With --devices, or
    under torchrun or accelerate launch, several processes share the pairs of each step.

    Example:
        tilefold train --recipe splade --data DATA --output MODEL
    """
    splitter = request.passage_splitter()
    if splitter is not None:
        _options.bm25_language(request.language)  # checked before anything is loaded
    config = _configure(request.recipe, request)
    if config.base_model != _models.PACKAGED:
        _models.find_model(config.base_model, "--model")
    exit_code = _options.run_on_devices(request.devices)
    if exit_code is not None:
        raise typer.Exit(exit_code)
    with _options.option_errors(**_option_of_field()), join_ranks(training=True) as rank:
        result = _train_on_rank(config, request, splitter, rank)
    if rank == 0:
        _report(result, config, request, splitter)


def _train_on_rank(
    config: Any,
    request: TrainRequest,
    splitter: Passages | None,
    rank: int,
) -> TrainResult:
    """Load the data, and train with the other ranks.

    Args:
        config: the recipe.
        request: options of the command.
        splitter: how documents are split into passages; None trains on whole documents.
        rank: rank of this process. Rank 0 shows the progress.
    """
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step

    negatives = _open_negatives(config, request)
    with first_rank_first():  # the other ranks read what rank 0 has downloaded
        collection = _load_collection(config, request)
    if splitter is not None:
        collection = _split_documents(collection, splitter, request.language, rank)
    output = request.output
    _common.finished_work_checks.append(lambda: newest_step(output) is not None)
    resumed_step = 0
    if request.resume:
        resumed_step = newest_step(output) or 0
    bar: Any = nullcontext()
    if rank == 0:
        bar = _common.progress_bar("training", resumes=_common.FRESH)
    with bar as update:
        is_first_report = True

        def report_progress(step: int, steps: int, losses: Losses | None) -> None:
            nonlocal is_first_report
            if is_first_report:
                # The bar takes the first number for the steps of an earlier run.
                update(resumed_step, steps)
                is_first_report = False
            update(step, steps, losses)

        return catalogue.train(
            config,
            collection,
            output,
            negatives=negatives,
            progress=report_progress,
            resume=request.resume,
            overwrite=request.overwrite,
            verbose=request.verbose,
            hours=request.hours,
            report_to=request.report_to,
            command=shlex.join(["tilefold", *_options.command_line]),
        )


def _open_negatives(config: Any, request: TrainRequest) -> RowsAhead | Path | None:
    """Begin to read the rows of ``--negatives`` in the background, while the documents are loaded.

    Millions of rows take as long as the documents.

    Args:
        config: the recipe.
        request: options of the command.

    Returns:
        The rows that are being read. The path of the file, which the training reads or refuses
        later, if the recipe reads no negatives or the documents are missing. None without
        ``--negatives``.
    """
    from tilefold.retrieval.training_data.rows import RowsAhead

    if request.negatives is None:
        return None
    has_data = request.data == "pydocs" or Path(request.data).exists()
    if config.reads_negatives and has_data:
        return RowsAhead(request.negatives)
    return request.negatives


def _load_collection(config: Any, request: TrainRequest) -> Collection:
    """Load the collection of ``--data`` with the splits that are trained on and evaluated.

    Documents of a large file are read when they are needed, unless they are split into passages.

    Args:
        config: the recipe.
        request: options of the command.
    """
    splits = ["train"]
    if config.evaluate_steps is not None:
        splits.append(config.evaluate_split or "dev")
    return _common.load_data(
        request.data,
        drop_unknown=request.drop_unknown,
        splits=splits,
        stored=STREAMED_FILE_BYTES if request.passages is None else None,
    )


def _split_documents(
    collection: Collection,
    splitter: Passages,
    language: str | None,
    rank: int,
) -> Collection:
    """Return the collection with passages instead of documents.

    Args:
        collection: of documents.
        splitter: how documents are split.
        language: value of ``--language``, for the BM25 that chooses relevant passages.
        rank: rank of this process. Rank 0 notes the number of passages.
    """
    from tilefold.retrieval.training_data.passages import training_passages

    language = _options.bm25_language(language)
    passages = training_passages(splitter, collection, language=language)
    if rank == 0:
        note(
            f"{len(collection.documents):,} documents in {len(passages.documents):,} passages of "
            f"at most {splitter.length} words; BM25 chooses relevant ones with stop words and "
            f"stemmer of --language {language}",
        )
    return passages


def _report(
    result: TrainResult,
    config: Any,
    request: TrainRequest,
    splitter: Passages | None,
) -> None:
    """Print the result of a training, its warnings, and the command that encodes with the model.

    Args:
        result: of the training.
        config: the recipe.
        request: options of the command.
        splitter: how documents were split into passages; None for whole documents.
    """
    from tilefold.recipes.loading import LOG, PLOT

    _note_warnings(result)
    output = request.output
    if result.loss is not None and not (output / PLOT).is_file():
        note(
            f"the log of the training is {output / LOG}; with matplotlib (tilefold[plot]) there is "
            "a plot, too",
        )
    vectors = "TOKENS, then search or evaluate with --rerank TOKENS" if config.late else "VECTORS"
    encode = _common.next_command("encode", "--model", output, "--data", request.data, "--output")
    fields = asdict(result)
    if splitter is not None:
        fields["passages"] = {
            "length": splitter.length,
            "stride": splitter.stride,
            "language": _options.bm25_language(request.language),
        }
    _common.print_result(
        fields,
        request.as_json,
        f"{_summary(result, config)}: {result.model_dir}",
        f"{encode} {vectors}",
    )


def _note_warnings(result: TrainResult) -> None:
    """Print notes about a diverged loss, truncated texts and other problems of a training.

    Args:
        result: of the training.
    """
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    if result.exploded:
        note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to "
            f"{result.ranking_loss:.3f}: the model did not learn; train with a smaller --lr",
        )
    for truncation in result.truncated:
        report_manifest_truncation("training text", truncation["texts"], truncation)
    for warning in result.warnings:
        note(f"warning: {warning}")


def _summary(result: TrainResult, config: Any) -> str:
    """Return in words how many steps were trained, the last losses, and the best evaluation.

    Args:
        result: of the training.
        config: the recipe.
    """
    from tilefold.recipes import Losses

    if not result.steps:
        summary = f"no step of training, {config.base_model} as the recipe starts from it"
    elif result.reused:
        summary = "already trained"
    else:
        summary = f"trained {result.steps} steps"
        if result.resumed_from:
            summary += f", those after step {result.resumed_from}"
        summary += f" in {result.seconds:.0f} s"
    if result.ranks > 1 and not result.reused:
        summary += f" on {result.ranks} devices"
    if result.loss is not None:
        summary += f", {Losses(result.loss, result.ranking_loss, result.penalties)}"
    for evaluation in result.evaluations:
        if evaluation["kept"]:  # of the checkpoint that became the model
            summary += (
                f", nDCG@10 {evaluation['nDCG@10']:.3f} of {result.evaluated} at step "
                f"{evaluation['step']:,}, which was kept"
            )
    return summary


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
    """Return the option that sets each field of a recipe, such as ``--model`` of ``base_model``."""
    option_of_request_field = spellings(TrainRequest)
    option_of_field = dict(option_of_request_field)
    for field, request_field in _REQUEST_FIELDS.items():
        option_of_field.pop(field, None)
        if request_field:
            option_of_field[field] = option_of_request_field[request_field]
    return option_of_field


def _refuse_options_of_other_recipes(request: TrainRequest, name: str, late: bool) -> None:
    """Refuse options of sparse recipes for a late-interaction recipe, and the other way round.

    Args:
        request: options of the command.
        name: name of the recipe.
        late: whether it trains a late-interaction model.
    """
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
    """Set the fields of a late-interaction recipe whose options were given, in place."""
    if request.dimension is not None:
        # With 0, there is no projection: token vectors have the backbone's own dimension.
        recipe["dimension"] = None if request.dimension == 0 else request.dimension
    if request.query_length is not None:
        recipe["query_length"] = request.query_length
    if request.expand_queries:
        recipe["expand_queries"] = True
    if request.keep_punctuation:
        recipe["skip_punctuation"] = False


def _apply_sparse_options(recipe: dict[str, Any], request: TrainRequest) -> None:
    """Set the fields of a sparse recipe whose options were given, in place.

    Args:
        recipe: fields and values of the recipe.
        request: options of the command.

    Raises:
        UsageError: for ``--regularizer`` and a recipe without a penalty.
    """
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
    """Raise ``UsageError`` for a field of ``--set`` that is set twice, or by an option too."""
    option_of_request_field = spellings(TrainRequest)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainRequest)}
    # Fields of the assignments FIELD=VALUE. A field of an encoder has a path, such as FIELD.FIELD.
    paths = [assignment.partition("=")[0] for assignment in request.fields or []]
    for path in paths:
        request_field = _REQUEST_FIELDS.get(path, path)
        option = option_of_request_field.get(request_field)
        is_set_by_option = (
            option is not None and getattr(request, request_field) != defaults[request_field]
        )
        if is_set_by_option or paths.count(path) > 1:
            sources = f" (--set and {option})" if is_set_by_option else ""
            raise UsageError(
                f"--set: {path}: expected once, got it twice{sources}: leave one out.",
            )


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
    """List the published systems that can be trained by name.

    The list says what they need and what their papers report.

    Example:
        tilefold recipes splade-v3
    """
    from tilefold.recipes.catalogue import RECIPES

    _options.check_choice("recipe", request.name, RECIPES)
    if request.name:
        entry = RECIPES[request.name]
        if request.as_json:
            _common.print_json(entry.to_dict())
        else:
            _print_page(entry)
        return
    if request.as_json:
        _common.print_json([entry.to_dict() for entry in RECIPES.values()])
        return
    rows = []
    for entry in RECIPES.values():
        paper = f"arXiv {entry.paper}" if entry.paper else ""
        rows.append((entry.name, entry.summary, ", ".join(entry.needs), paper, entry.publishes))
    columns = ("recipe", "what it is", "needs", "paper", "published number")
    _common.print_table(columns, rows, fold=columns, box=None)


def _print_page(entry: Entry) -> None:
    """Print a recipe for people: what it is, the commands that it takes, and its fields."""
    from tilefold.recipes.catalogue import describe

    data = "DATA"  # stands for the user's collection in the commands
    commands = entry.recipe.preparation(data)
    negatives = ""
    if commands:
        prepared_file = commands[-1].split()[-1]  # value of --output of the last command
        negatives = f" --negatives {prepared_file}"
    paper = f"arXiv {entry.paper}; " if entry.paper else ""
    lines = [
        f"{entry.name}: {entry.summary}",
        f"paper: {paper}{entry.publishes}",
        f"published: {entry.published}",
        f"needs: {', '.join(entry.needs)}; a base model of kind {entry.base}",
        "",
        *commands,
        f"tilefold train --recipe {entry.name} --data {data}{negatives} --output MODEL",
        "",
        "Fields, their values in JSON, the option that changes each (else --set FIELD=VALUE), and "
        "what it is:",
    ]
    option_of_request_field = spellings(TrainRequest)
    for field, value, description in describe(entry.recipe):
        line = f"{field} = {json.dumps(value)}"
        option = option_of_request_field.get(_REQUEST_FIELDS.get(field, field))
        if option:
            line += f" ({option})"
        lines.append(line)
        lines.append(
            textwrap.fill(
                description,
                PAGE_WIDTH,
                initial_indent="    ",
                subsequent_indent="    ",
            ),
        )
    typer.echo("\n".join(lines))
