"""The files of a training run: checkpoints, and a model that appears atomically when it is done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tilefold._internal.figures import new_figure, save_figure
from tilefold._internal.files import (
    LOCK,
    give_default_permissions,
    lock_folder,
    read_json,
    swap_directory,
    unlock_folder,
    write_json,
)
from tilefold._internal.typing import Model
from tilefold.recipes._card import extend_card

RECORD_FILE = "tilefold_training.json"
"""File with the settings of a run, and with its result in a finished model."""
COMPLETE_FILE = "tilefold_whole.json"
"""File that is written into a checkpoint last: a checkpoint without it is not complete."""
NDCG = "nDCG@10"
LOG = "training_log.jsonl"
PLOT = "training.png"
PANEL_INCHES = (7, 3.5)  # width and height of a panel of the plot
RUN_FIELDS = (
    "save_steps",
    "save_minutes",
    "log_steps",
    "gradient_checkpointing",
    "fsdp",
    "split_vocabulary",
)
"""Fields of a recipe that do not change the model; a resumed run may have other values."""
Record = Mapping[str, Any]


class Losses(NamedTuple):
    """Mean losses of the steps between two logs, and the evaluations so far.

    Attributes:
        loss: the ranking loss plus the weighted penalties, whose weights rise at first.
        ranking: the ranking loss; ``None`` if it was not logged.
        penalties: sum of the weighted penalties of queries and documents; ``None`` without any.
        ndcg: nDCG@10 of the last evaluation; ``None`` before it.
        best: nDCG@10 and step of the best evaluation; ``None`` before it.
    """

    loss: float
    ranking: float | None = None
    penalties: float | None = None
    ndcg: float | None = None
    best: tuple[float, int] | None = None

    def __str__(self) -> str:
        """Return the losses and the evaluations on one line, for progress messages."""
        text = f"loss {self.loss:.3f}"
        if self.penalties is not None:
            text += f" (ranking {self.ranking:.3f}, penalties {self.penalties:.3f})"
        if self.ndcg is not None:
            text += f", {NDCG} {self.ndcg:.3f}"
            if self.best is not None:
                best_ndcg, best_step = self.best
                text += f" (best {best_ndcg:.3f} at step {best_step:,})"
        return text


Progress = Callable[[int, int, "Losses | None"], None]
"""Function of the step, the number of all steps and the last losses, called after every step."""


class ResumePoint(NamedTuple):
    """Step from which a call of ``train`` continues a run.

    Attributes:
        checkpoint: folder of the newest complete checkpoint; ``None`` for a new run.
        step: step of the checkpoint, 0 for a new run.
        fill_batches: whether short batches are filled with rows that the epoch already had.
    """

    checkpoint: Path | None = None
    step: int = 0
    fill_batches: bool = False


class TrainingRun:
    """The folders of a run: ``<output_dir>`` when done, ``<output_dir>.training`` until then.

    Args:
        output_dir: folder of the finished model.
        recipe: fields of the recipe.
        data: digest of the training data.

    Attributes:
        work_dir: folder of the checkpoints.
        settings: the recipe and the digest of the data, which must be equal in a resumed run.
        resume_point: step from which this call continues the run.
        history: rows of the log.
    """

    def __init__(self, output_dir: Path, recipe: Record, data: str) -> None:
        """Describe a run; no file is read or written.

        Args:
            output_dir: folder of the finished model.
            recipe: fields of the recipe.
            data: digest of the training data.
        """
        self.output_dir = output_dir
        self.work_dir = work_folder(output_dir)
        self.settings: dict[str, Any] = {"recipe": recipe, "data": data}
        self.resume_point = ResumePoint()
        self.history: list[dict[str, float]] = []

    def finished_result(self, *, overwrite: bool, resume: bool) -> dict[str, Any] | None:
        """Return the result of a finished run with the same recipe and data, if there is one.

        Leftover checkpoints of that run are removed.

        Args:
            overwrite: whether a trained model in the folder may be replaced.
            resume: whether to return the result of a finished run. Otherwise the run is repeated,
                which replaces its model.

        Returns:
            The result; ``None`` if training has to run.

        Raises:
            FileExistsError: if the folder holds something other than a model of tilefold, or a
                model that would be replaced without `overwrite`.
        """
        if not self.output_dir.exists():
            return None
        if self.output_dir.is_dir() and not any(self.output_dir.iterdir()):
            return None
        record = read_json(self.output_dir / RECORD_FILE)
        if record is None:
            raise FileExistsError(
                f"{self.output_dir} exists and holds no model that tilefold trained; choose "
                "another folder.",
            )
        difference = self._describe_difference(record)
        if resume and not difference:
            self._remove_leftover_checkpoints()
            result = record.get("result")
            return result if isinstance(result, dict) else None
        if overwrite:
            return None
        if not difference:  # resume=False repeats the finished run
            raise FileExistsError(
                f"{self.output_dir} holds the finished model of this run; return it (resume=True, "
                "without --fresh), or replace it (overwrite=True or --overwrite).",
            )
        raise FileExistsError(
            f"{self.output_dir} holds a model trained with other settings ({difference}); choose "
            "another folder, or replace it (overwrite=True or --overwrite).",
        )

    def _remove_leftover_checkpoints(self) -> None:
        """Remove the checkpoints of a run that was interrupted after it had saved its model."""
        record = read_json(self.work_dir / RECORD_FILE)
        if record is not None and not self._describe_difference(record):
            shutil.rmtree(self.work_dir)

    def lock_and_resume(self, *, resume: bool, fill_batches: bool) -> ResumePoint:
        """Lock the work folder, and find the newest checkpoint of an interrupted run.

        Folders and files that cannot be resumed are removed. Short batches are filled if either the
        interrupted call or this one needs full batches; an epoch has the same number of batches
        with and without filling.

        Args:
            resume: whether to resume from a checkpoint.
            fill_batches: whether this call needs full batches.

        Returns:
            The step from which this call continues. Only rank 0 calls this method, so the caller
            has to store it in `resume_point` on all ranks.

        Raises:
            ValueError: if the checkpoints belong to a run with other settings.
        """
        self._lock = lock_folder(self.work_dir)
        record = read_json(self.work_dir / RECORD_FILE)
        checkpoints = complete_checkpoints(self.work_dir) if resume else {}
        resume_point = ResumePoint(fill_batches=fill_batches)
        if checkpoints and record is not None:
            difference = self._describe_difference(record)
            if difference:
                raise ValueError(
                    f"{self.work_dir} holds an interrupted run with other settings ({difference}); "
                    "continue it with the same settings, or discard it with --fresh "
                    "(resume=False in Python).",
                )
            step, checkpoint = max(checkpoints.items())
            filled_batches = bool(record.get("full_batches"))
            resume_point = ResumePoint(checkpoint, step, fill_batches or filled_batches)
        self._remove_incomplete(checkpoints)
        if not checkpoints:
            new_record = {"settings": self.settings, "full_batches": fill_batches}
            write_json(self.work_dir / RECORD_FILE, new_record)
        return resume_point

    def _remove_incomplete(self, checkpoints: Mapping[int, Path]) -> None:
        """Remove incomplete checkpoints, and also all files if no checkpoint is complete.

        Args:
            checkpoints: step -> folder of each complete checkpoint.
        """
        for entry in self.work_dir.iterdir():
            if entry.is_dir() and entry not in checkpoints.values():
                shutil.rmtree(entry)
            elif entry.is_file() and entry.name != LOCK and not checkpoints:
                entry.unlink()

    def finish(self, model: Model, result: Record, card: str = "") -> None:
        """Save the trained model with its card, log and plot, and close the run.

        The log and the plot are saved if the run has a history. The model is written into the work
        folder, and moved to the output folder atomically. The work folder with all checkpoints is
        then removed.

        Args:
            model: the trained model.
            result: the fields of the :class:`TrainResult`, as JSON values.
            card: Markdown section about the training for the model card.
        """
        model_dir = self.work_dir / "model"
        if model_dir.exists():
            shutil.rmtree(model_dir)
        model.save_pretrained(str(model_dir))
        give_default_permissions(*model_dir.rglob("*.safetensors"))
        extend_card(model_dir / "README.md", card)
        if self.history:
            lines = [json.dumps(row) + "\n" for row in self.history]
            (model_dir / LOG).write_text("".join(lines), encoding="utf-8")
            with suppress(ImportError):  # matplotlib is optional
                plot_history(self.history, model_dir / PLOT)
        write_json(model_dir / RECORD_FILE, {"settings": self.settings, "result": result})
        swap_directory(model_dir, self.output_dir)
        shutil.rmtree(self.work_dir)
        unlock_folder(self._lock)

    def close(self) -> None:
        """Unlock the work folder, and remove it if it has no checkpoint to resume from."""
        try:
            if self.resume_point.checkpoint is None:
                shutil.rmtree(self.work_dir)
        finally:
            unlock_folder(self._lock)

    def _describe_difference(self, record: Record) -> str:
        """Describe how the settings of a stored run differ from the settings of this run.

        Fields of the recipe that do not change the model are not compared.

        Args:
            record: content of the stored run's JSON file. Its ``"settings"`` are the fields of the
                recipe and the digest of the training data.

        Returns:
            ``"differs in <fields>"``, ``"unreadable record"``, or an empty string if the settings
            are equal.
        """
        settings = record.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("recipe"), dict):
            return "unreadable record"
        stored_recipe = settings["recipe"]
        recipe = self.settings["recipe"]
        names = sorted(
            name
            for name in {*stored_recipe, *recipe} - {*RUN_FIELDS}
            if stored_recipe.get(name) != recipe.get(name)
        )
        if settings.get("data") != self.settings["data"]:
            names.append("training data")
        return "differs in " + ", ".join(names) if names else ""


def plot_history(history: Sequence[Mapping[str, float]], picture: Path) -> None:
    """Plot the log of a training run over its steps.

    The panels, from top to bottom, show losses and weighted penalties, active terms, and nDCG@10.
    A panel without values is left out.

    Args:
        history: rows of the log, each with a step and the values that were logged after it.
        picture: path of the image file, which is created.
    """
    names = list(dict.fromkeys(name for row in history for name in row))
    losses = [name for name in names if name.endswith("loss")]
    penalties = [name for name in names if name.endswith("penalty")]
    active_terms = [name for name in names if name.endswith("_active_terms")]
    evaluations = [name for name in names if name.endswith(NDCG)]
    panels = [panel for panel in (losses + penalties, active_terms, evaluations) if panel]
    width, height = PANEL_INCHES
    figure = new_figure((width, height * len(panels)))
    all_axes = figure.subplots(len(panels), 1, squeeze=False).flat
    for axes, panel in zip(all_axes, panels, strict=True):
        for name in panel:
            rows = [row for row in history if name in row]
            axes.plot(
                [row["step"] for row in rows],
                [row[name] for row in rows],
                label=name.replace("_", " "),
                marker=".",
                linewidth=1,
            )
        if panel == evaluations:  # mark the step whose model was kept
            for row in history:
                if row.get("kept"):
                    axes.axvline(row["step"], label="kept", linestyle=":")
        axes.set_xlabel("step")
        axes.legend()
    save_figure(figure, picture)


def newest_step(output_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint of an interrupted run.

    Args:
        output_dir: folder that the finished model would have.

    Returns:
        The step; ``None`` without a checkpoint.
    """
    return max(complete_checkpoints(work_folder(output_dir)), default=None)


def complete_checkpoints(work_dir: Path) -> dict[int, Path]:
    """Return step -> folder of each complete checkpoint of a run."""
    checkpoints = {}
    for file in work_dir.glob(f"checkpoint-*/{COMPLETE_FILE}"):
        record = read_json(file)
        if record and isinstance(record.get("step"), int):
            checkpoints[record["step"]] = file.parent
    return checkpoints


def work_folder(output_dir: Path) -> Path:
    """Return the folder in which an unfinished run stores its checkpoints."""
    return output_dir.with_name(output_dir.name + ".training")


class TrainingError(RuntimeError):
    """The training cannot lead to a model."""


class OutOfTimeError(TrainingError):
    """The time limit of a call is reached; a checkpoint has been saved."""
