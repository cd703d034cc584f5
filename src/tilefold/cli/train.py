"""``tilefold train`` and ``tilefold recipes``: train models by the recipes of published systems."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold._internal.arguments import suggestion
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
PAGE_WIDTH = 80  # width in characters of the page of `tilefold recipes NAME`
_RECIPE_DEFAULT = "by default the recipe's"
# Field of a recipe -> field of the request that sets it, if the two names differ. Empty for a field
# that shares its name with an option that does not set it.
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
            "Name of a recipe, see tilefold recipes; colbert trains token vectors.",
        ),
    ] = "splade"
    data: Annotated[
        str,
        option(
            _common.DATA_HELP
            + " With --steps 0, a file of documents, such as a .jsonl, is enough.",
        ),
    ]
    negatives: Annotated[
        Path | None,
        option(
            "Mined negatives or teacher scores: a Parquet file of tilefold mine or score, or the "
            "triples or JSON of MS MARCO.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "Model to start from: minilm (the default of most recipes), a folder, or a Hugging "
            "Face name.",
        ),
    ] = None
    steps: Annotated[
        int | None,
        option(
            "Training steps; by default --epochs decides; 0 saves the initial model.",
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
            "Fill short batches with pairs that the epoch has already used, as several GPUs "
            "always do.",
            "--fill-batches",
            panel="Steps and batches",
        ),
    ] = False
    mini_batch_size: Annotated[
        int | None,
        option(
            "Texts per forward pass, for batches that do not fit into memory; texts are then "
            "encoded twice.",
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
            "Sparse recipes: weight of the penalties; larger is sparser.",
            panel="Sparse recipes",
        ),
    ] = None
    fields: Annotated[
        list[str] | None,
        option(
            "Set any field of the recipe, such as document.pooling=sum; may be repeated.",
            "--set",
        ),
    ] = None
    dimension: Annotated[
        int | None,
        option(
            "colbert: dimension of a token vector; by default 128; 0 for that of the backbone.",
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
            "colbert: pad queries with mask tokens, which are scored.",
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
            "Sparse recipes: form batches of documents with similar length.",
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
            "Maximum tokens per text in training; fewer are faster.",
            panel="Model",
        ),
    ] = None
    passages: Annotated[
        int | None,
        option(
            "Largest number of words of a passage. Trains on passages instead of documents, and on "
            "the best passage by BM25 of each relevant document.",
            panel="Passages",
        ),
    ] = None
    language: Annotated[
        str | None,
        option(
            "Language of the stop words and the stemmer of that BM25, or none for neither; by "
            "default english.",
            panel="Passages",
        ),
    ] = None
    attention: Annotated[
        Literal["softmax", "entmax"] | None,
        option(
            "Attention of the encoder; by default that of the model.",
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
            "Share of the training steps over which alpha rises from 1.",
            panel="Model",
        ),
    ] = 0.0
    bf16: Annotated[
        bool | None,
        option(
            "Precision of the training; by default the faster one on this hardware.",
            "--bf16/--fp32",
            panel="Hardware",
        ),
    ] = None
    fused: Annotated[
        bool,
        option(
            "Use the fused head (sparse) or similarity (colbert), or the original one.",
            "--fused/--plain",
            panel="Hardware",
        ),
    ] = True
    graphs: Annotated[
        bool,
        option(
            "GPU: capture the encoder as CUDA graphs; docs/integrations.md has the limits.",
            "--graphs",
            panel="Hardware",
        ),
    ] = False
    devices: Annotated[
        str | None,
        option(
            "Number of GPUs to use, or all, with a process for each that trains on a share of "
            "every step.",
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
            "Steps between checkpoints; by default 25, or more if saving takes long.",
            panel="Checkpoints and logs",
        ),
    ] = None
    save_minutes: Annotated[
        float,
        option(
            "Maximum minutes between checkpoints.",
            min=0,
            panel="Checkpoints and logs",
        ),
    ] = SAVE_MINUTES
    evaluate_steps: Annotated[
        int | None,
        option(
            "Steps between evaluations (nDCG@10 of a split); the best model is kept.",
            panel="Evaluation while training",
        ),
    ] = None
    evaluate_split: Annotated[
        str | None,
        option(
            "Split to evaluate; by default dev, or the only split besides train and test.",
            panel="Evaluation while training",
        ),
    ] = None
    evaluate_documents: Annotated[
        int | None,
        option(
            "Number of documents to search for the queries of the split; by default 10,000.",
            panel="Evaluation while training",
        ),
    ] = None
    patience: Annotated[
        int | None,
        option(
            "Number of evaluations in a row without an improvement after which training stops.",
            panel="Evaluation while training",
        ),
    ] = None
    hours: Annotated[
        float | None,
        option(
            "Stop after this time with a checkpoint, from which the same command resumes.",
            panel="Steps and batches",
        ),
    ] = None
    report_to: Annotated[
        str,
        option(
            "Where to log: tensorboard (in OUTPUT.logs), wandb, or another integration of the "
            "trainer.",
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
            "Show the logs of the libraries.",
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
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
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
                "requires --evaluate-steps",
            )
        if self.steps is not None:
            refuse_options(
                {"--epochs": self.epochs},
                "has no effect with --steps, which sets the number of steps: leave it out",
            )
        if self.passages is None:
            refuse_options({"--language": self.language}, "requires --passages")
        else:
            refuse_options(
                {"--negatives": self.negatives},
                "cannot be combined with --passages, because it names whole documents",
            )

    def _refuse_options_of_training(self) -> None:
        """Raise ``UsageError`` for options that have no effect if no step is trained."""
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
            "has no effect with --steps 0, which trains nothing: leave it out",
        )


def train(request: TrainRequest) -> None:
    """Train a model with the recipe of a published system, and save it for sentence-transformers.

    List the recipes with: tilefold recipes

    Run the same command again to resume an interrupted run from its last checkpoint. With
    --devices, or under torchrun or accelerate launch, several processes share the pairs of each
    step.

    Example:
        tilefold train --recipe splade --data DATA --output MODEL
    """
    splitter = request.passage_splitter()
    if splitter is not None:
        _options.checked_bm25_language(request.language)  # raises an error before any work
    config = _configure(request)
    _refuse_documents_alone(config, request)
    if config.base_model != _models.PACKAGED:
        _models.checked_model_name(config.base_model, "--model")
    exit_code = _options.run_on_devices(request.devices)
    if exit_code is not None:
        raise typer.Exit(exit_code)
    with (
        _options.errors_name_options(**_map_fields_to_options()),
        join_ranks(training=True) as rank,
    ):
        result = _train_on_rank(config, request, splitter, rank)
    if rank == 0:
        _report(result, config, request, splitter)


def _refuse_documents_alone(config: Any, request: TrainRequest) -> None:
    """Raise ``UsageError`` if ``--data`` is a file of documents, which has no pairs to train on.

    Args:
        config: the recipe. Without training steps, it needs documents only.
        request: the options of the command.
    """
    if config.max_steps != 0 and Path(request.data).is_file():
        raise UsageError(
            "--data: training needs pairs of a query and a document: expected a folder with "
            f"corpus.jsonl, queries.jsonl and qrels/train.tsv, got the file {request.data}. The "
            "tutorial 'Train on your own pairs' makes such a folder of a CSV file.",
        )


def _train_on_rank(
    config: Any,
    request: TrainRequest,
    splitter: Passages | None,
    rank: int,
) -> TrainResult:
    """Load the data, and train together with the other processes of ``--devices`` (the ranks).

    Args:
        config: the recipe.
        request: the options of the command.
        splitter: the splitter of documents into passages; None trains on whole documents.
        rank: the rank of this process. Rank 0 shows the progress.
    """
    from tilefold.recipes import catalogue
    from tilefold.recipes.loading import newest_step

    negatives = _read_negatives_ahead(config, request) or request.negatives
    with first_rank_first():  # the other ranks read what rank 0 has downloaded
        collection = _load_collection(config, request)
    if splitter is not None:
        collection = _split_documents(collection, splitter, request.language, rank)
    output = request.output
    # After an interruption, the user is told whether there is a checkpoint.
    _common.finished_work_checks.append(lambda: newest_step(output) is not None)
    _common.resume_notes.append(lambda: _describe_resume_point(newest_step(output)))
    resumed_step = 0
    if request.resume:
        resumed_step = newest_step(output) or 0
    progress_bar: Any = nullcontext()  # the other ranks show no progress
    if rank == 0:
        progress_bar = _common.resumable_progress_bar("training", _common.FRESH_HINT)
    with progress_bar as update:
        return catalogue.train(
            config,
            collection,
            output,
            negatives=negatives,
            progress=_create_progress_reporter(update, resumed_step),
            resume=request.resume,
            overwrite=request.overwrite,
            verbose=request.verbose,
            hours=request.hours,
            report_to=request.report_to,
            command=shlex.join(["tilefold", *_options.command_line]),
        )


def _create_progress_reporter(
    update: Callable[..., None], resumed_step: int
) -> Callable[[int, int, Losses | None], None]:
    """Return a function that shows the finished steps of a training on a progress bar.

    Args:
        update: function that shows the number of finished steps, their total, and the losses. At
            its first call, it prints the number as the steps that an earlier run has finished.
        resumed_step: the last step of an earlier run; 0 without one.

    Returns:
        A function of the finished steps, all steps, and the losses.
    """
    is_first_report = True

    def report(step: int, steps: int, losses: Losses | None) -> None:
        nonlocal is_first_report
        if is_first_report:
            update(resumed_step, steps)  # prints the steps of the earlier run
            is_first_report = False
        update(step, steps, losses)

    return report


def _read_negatives_ahead(config: Any, request: TrainRequest) -> RowsAhead | None:
    """Start reading ``--negatives`` in the background, while the documents are loaded.

    Reading millions of rows takes as long as loading the documents.

    Args:
        config: the recipe.
        request: the options of the command.

    Returns:
        The rows that are being read. None without ``--negatives``, and if the training will raise
        an error, because the recipe reads no negatives or the collection is missing.
    """
    from tilefold.retrieval.training_data.rows import RowsAhead

    has_collection = request.data == "pydocs" or Path(request.data).exists()
    if request.negatives is None or not config.reads_negatives or not has_collection:
        return None
    return RowsAhead(request.negatives)


def _load_collection(config: Any, request: TrainRequest) -> Collection:
    """Load the collection of ``--data`` with the splits for training and evaluation.

    Documents in a large file are read one by one when they are needed, unless they are split into
    passages.

    Args:
        config: the recipe.
        request: the options of the command.
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
    """Split the documents of a collection into passages, and move judgements to passages.

    A document that is judged relevant is replaced by its best passage by BM25.

    Args:
        collection: the collection of documents.
        splitter: the splitter.
        language: the value of ``--language``, for BM25; None takes the default language.
        rank: the rank of this process. Rank 0 prints the number of passages.
    """
    from tilefold.retrieval.training_data.passages import training_passages

    bm25_language = _options.checked_bm25_language(language)
    passages = training_passages(splitter, collection, language=bm25_language)
    if rank == 0:
        note(
            f"{len(collection.documents):,} documents were split into "
            f"{len(passages.documents):,} passages of at most {splitter.length} words; BM25 "
            "chooses the relevant passages, with the stop words and the stemmer of --language "
            f"{bm25_language}",
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
        result: the result of the training.
        config: the recipe.
        request: the options of the command.
        splitter: the splitter of documents into passages; None for whole documents.
    """
    from tilefold.recipes.loading import LOG, PLOT

    _note_warnings(result)
    output = request.output
    if result.loss is not None and not (output / PLOT).is_file():
        note(
            f"the log of the training is {output / LOG}; if matplotlib is installed "
            "(tilefold[plot]), a plot is drawn as well",
        )
    fields = asdict(result)
    if splitter is not None:
        fields["passages"] = {
            "length": splitter.length,
            "stride": splitter.stride,
            "language": _options.checked_bm25_language(request.language),
        }
    _common.print_result(
        fields,
        request.as_json,
        f"{_summarise_training(result, config)}: {result.model_dir}",
        _describe_next_command(request, trains_token_vectors=config.late),
    )


def _describe_next_command(request: TrainRequest, *, trains_token_vectors: bool) -> str:
    """Return the line with the command that encodes the documents with the trained model.

    Args:
        request: the options of the command.
        trains_token_vectors: whether the model is a late-interaction model.
    """
    encode = _common.next_command(
        "encode",
        "--model",
        request.output,
        "--data",
        request.data,
        "--output",
        "TOKENS" if trains_token_vectors else "VECTORS",
    )
    if trains_token_vectors:
        return f"{encode}, then index them with --backend late, or rerank with --rerank TOKENS"
    return encode


def _note_warnings(result: TrainResult) -> None:
    """Print warnings about a finished training, such as a diverged loss or truncated texts.

    Args:
        result: the result of the training.
    """
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    if result.exploded:
        note(
            f"warning: the ranking loss rose from {result.first_ranking_loss:.3f} to "
            f"{result.ranking_loss:.3f}: the model did not learn; train with a smaller --lr",
        )
    for truncation in result.truncated:
        report_manifest_truncation("use of training texts", truncation["texts"], truncation)
    for warning in result.warnings:
        note(f"warning: {warning}")


def _describe_resume_point(newest_step: int | None) -> str:
    """Describe where an interrupted training would resume.

    Args:
        newest_step: the step of the newest checkpoint; None if there is no checkpoint.
    """
    if newest_step is None:
        return "There is no checkpoint yet: --save-steps or --save-minutes save more often."
    return f"It resumes at step {newest_step:,}: --save-steps or --save-minutes save more often."


def _summarise_training(result: TrainResult, config: Any) -> str:
    """Summarise a training: its steps and time, the last losses, and the best evaluation.

    Args:
        result: the result of the training.
        config: the recipe.
    """
    from tilefold.recipes import Losses

    parts = [_summarise_steps(result, config.base_model)]
    if result.loss is not None:
        parts.append(str(Losses(result.loss, result.ranking_loss, result.penalties)))
    for evaluation in result.evaluations:
        if evaluation["kept"]:  # its checkpoint became the model
            parts.append(
                f"kept step {evaluation['step']:,} with nDCG@10 {evaluation['nDCG@10']:.3f} on "
                f"{result.evaluated}",
            )
    return ", ".join(parts)


def _summarise_steps(result: TrainResult, base_model: str) -> str:
    """Describe how many steps were trained, in which time, and on how many devices.

    Args:
        result: the result of the training.
        base_model: the model that the recipe starts from.
    """
    if result.reused:
        return "already trained"
    devices = f" on {result.ranks} devices" if result.ranks > 1 else ""
    if not result.steps:
        return f"not trained: the initial model of the recipe, from {base_model}{devices}"
    resumed = f", resumed after step {result.resumed_from}," if result.resumed_from else ""
    return f"trained {result.steps} steps{resumed} in {result.seconds:.0f} s{devices}"


def _configure(request: TrainRequest) -> Any:
    """Create the recipe of ``--recipe``, whose fields the options and ``--set`` override.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if a recipe or a field is unknown, a value is out of range, an option is for
            other recipes, or a field is set twice.
    """
    from tilefold.recipes.catalogue import RECIPES, get_recipe

    name = request.recipe
    _options.check_choice("--recipe", name, RECIPES)
    is_late_interaction = RECIPES[name].recipe.late
    _refuse_options_of_other_recipes(request, name, is_late_interaction)
    try:
        with _options.errors_name_options(**_map_fields_to_options()):
            recipe = get_recipe(name, **_collect_common_fields(request))
            values = recipe.to_dict()
            if is_late_interaction:
                _apply_colbert_options(values, request)
            else:
                _apply_sparse_options(values, request)
            _check_repetitions(request)
            for assignment in request.fields or []:
                _apply_assignment(values, assignment)
            return type(recipe).from_dict(values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _collect_common_fields(request: TrainRequest) -> dict[str, object]:
    """Return field of a recipe -> value, for options that were given and that all recipes have.

    Args:
        request: the options of the command.
    """
    values: dict[str, object] = {
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
    return {field: value for field, value in values.items() if value is not None}


def _map_fields_to_options() -> dict[str, str]:
    """Return field of a recipe -> option that sets it, such as ``base_model`` -> ``--model``.

    Most fields have the name of their option, such as ``max_length`` for ``--max-length``.
    """
    option_of_request_field = spellings(TrainRequest)
    option_of_field = dict(option_of_request_field)
    for field, request_field in _REQUEST_FIELDS.items():  # the two names differ
        option_of_field.pop(field, None)
        if request_field:  # empty if no option sets the field
            option_of_field[field] = option_of_request_field[request_field]
    return option_of_field


def _refuse_options_of_other_recipes(
    request: TrainRequest,
    name: str,
    is_late_interaction: bool,
) -> None:
    """Raise ``UsageError`` for an option that only recipes of the other kind of model have.

    Args:
        request: the options of the command.
        name: the name of the recipe.
        is_late_interaction: whether it trains a late-interaction model, instead of a sparse one.
    """
    if is_late_interaction:
        refuse_options(
            {
                "--regularizer": request.regularizer,
                "--group-by-length": request.group_by_length,
            },
            f"requires a sparse recipe: leave it out for {name}",
        )
    else:
        refuse_options(
            {
                "--dimension": request.dimension,
                "--query-length": request.query_length,
                "--expand-queries": request.expand_queries,
                "--keep-punctuation": request.keep_punctuation,
            },
            f"requires --recipe colbert: leave it out for {name}",
        )


def _apply_colbert_options(recipe: dict[str, Any], request: TrainRequest) -> None:
    """Override fields of a late-interaction recipe, in place, by the given options.

    Args:
        recipe: field of the recipe -> value.
        request: the options of the command.
    """
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
    """Override fields of a sparse recipe, in place, by the given options.

    Args:
        recipe: field of the recipe -> value.
        request: the options of the command.

    Raises:
        UsageError: if ``--regularizer`` is given for a recipe without a penalty.
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
            "--regularizer has no effect on this recipe, which has no penalty: leave it out.",
        )
    for penalty in penalties:
        penalty["weight"] = request.regularizer


def _check_repetitions(request: TrainRequest) -> None:
    """Raise ``UsageError`` for a field that is set twice, by ``--set`` or also by an option."""
    option_of_request_field = spellings(TrainRequest)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainRequest)}
    # Fields of the assignments FIELD=VALUE. A field of an encoder has a path, such as FIELD.FIELD.
    paths = [assignment.partition("=")[0] for assignment in request.fields or []]
    for path in paths:
        request_field = _REQUEST_FIELDS.get(path, path)
        option = option_of_request_field.get(request_field)
        if option is not None and getattr(request, request_field) != defaults[request_field]:
            raise UsageError(
                f"--set: {path} was given twice, by --set and {option}: leave one out.",
            )
        if paths.count(path) > 1:
            raise UsageError(f"--set: {path} was given twice: leave one out.")


def _apply_assignment(recipe: dict[str, Any], assignment: str) -> None:
    """Set the field that an assignment of ``--set`` names, in place.

    ``FIELD.FIELD`` is a field of an encoder or a penalty in the recipe. Unknown fields of these are
    refused later, when the recipe is created.

    Args:
        recipe: field of the recipe -> value.
        assignment: ``FIELD=VALUE`` or ``FIELD.FIELD=VALUE``; the value is JSON or plain text.

    Raises:
        UsageError: if the field is unknown, or the assignment has no value.
    """
    path, equals_sign, text = assignment.partition("=")
    *parent_names, field = path.split(".")
    if not equals_sign or not field:
        raise UsageError(f"--set: expected FIELD=VALUE, got {assignment!r}.")
    unknown_field_error = UsageError(
        f"--set: there is no field {path!r}; the fields are {', '.join(recipe)}."
        f"{suggestion(path, recipe)}",
    )
    settings: Any = recipe
    for name in parent_names:
        settings = settings.get(name)
        if not isinstance(settings, dict):
            raise unknown_field_error
    if settings is recipe and field not in recipe:
        raise unknown_field_error
    try:
        settings[field] = json.loads(text)
    except ValueError:  # plain text, which is not in quotes
        settings[field] = text


@dataclass(frozen=True, kw_only=True)
class RecipesRequest(Options):
    """Options of ``tilefold recipes``."""

    name: Annotated[
        str | None,
        argument(
            "Show this recipe: what it needs, its fields, and the options that change them.",
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
    """List the recipes of published systems, or show one.

    The list says what the recipes need, and what their papers report.

    Example:
        tilefold recipes splade-v3
    """
    from tilefold.recipes.catalogue import RECIPES

    _options.check_choice("recipe", request.name, RECIPES)
    entries = list(RECIPES.values())
    if request.name and request.as_json:
        _common.print_json(RECIPES[request.name].to_dict())
    elif request.name:
        _print_page(RECIPES[request.name])
    elif request.as_json:
        _common.print_json([entry.to_dict() for entry in entries])
    else:
        _print_list(entries)


def _print_list(entries: Sequence[Entry]) -> None:
    """Print a table of recipes."""
    rows = []
    for entry in entries:
        paper = f"arXiv {entry.paper}" if entry.paper else ""
        rows.append((entry.name, entry.summary, ", ".join(entry.needs), paper, entry.publishes))
    columns = ("recipe", "what it is", "needs", "paper", "published number")
    _common.print_table(columns, rows, wrapped=columns, box=None)


def _print_page(entry: Entry) -> None:
    """Print a recipe: a description, the commands that run it, and its fields."""
    from tilefold.recipes.catalogue import describe

    data = "DATA"  # stands for the user's collection in the commands
    commands = entry.recipe.preparation(data)
    negatives = ""
    if commands:
        prepared_file = commands[-1].split()[-1]  # the last command ends in --output FILE
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
        "Fields as JSON, with the option that changes a field (without an option: --set "
        "FIELD=VALUE):",
    ]
    option_of_field = _map_fields_to_options()
    for field, value, description in describe(entry.recipe):
        line = f"{field} = {json.dumps(value)}"
        option = option_of_field.get(field)
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
