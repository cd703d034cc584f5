"""The files of a training run: complete checkpoints, and a model that is moved into place
atomically.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tilefold._internal.figures import new_figure, save_figure
from tilefold._internal.files import (
    LOCK,
    lock_folder,
    read_json,
    swap_directory,
    unlock_folder,
    write_json,
)
from tilefold._internal.typing import Model
from tilefold.recipes._card import extend_card

RECORD = "tilefold_training.json"
WHOLE = "tilefold_whole.json"
NDCG = "nDCG@10"
LOG, PLOT = "training_log.jsonl", "training.png"
Record = Mapping[str, Any]


class Losses(NamedTuple):
    """Means over the steps since the last log: the loss, and its parts where it has some."""

    loss: float  # the ranking loss plus the weighted penalties, whose weights rise at first
    ranking: float | None = None
    penalties: float | None = None  # of queries and documents together
    ndcg: float | None = None  # nDCG@10 of the last evaluation
    best: tuple[float, int] | None = None  # nDCG@10 and step of the best one

    def __str__(self) -> str:
        parts = (
            ""
            if self.penalties is None
            else f" (ranking {self.ranking:.3f}, penalties {self.penalties:.3f})"
        )
        best = "" if self.best is None else f" (best {self.best[0]:.3f} at step {self.best[1]:,})"
        return f"loss {self.loss:.3f}{parts}" + (
            "" if self.ndcg is None else f", {NDCG} {self.ndcg:.3f}{best}"
        )


Progress = Callable[[int, int, "Losses | None"], None]


class TrainingRun:
    """The folders of a run: ``<output_dir>`` when done, ``<output_dir>.training`` until then."""

    def __init__(self, output_dir: Path, recipe: Record, data: str) -> None:
        self.output_dir, self.work_dir = output_dir, work_folder(output_dir)
        self.settings: dict[str, Any] = {"recipe": recipe, "data": data}
        self.checkpoint: Path | None = None
        self.resumed_from = 0
        self.full_batches = False  # whether short ones are filled, as several ranks need it
        self.history: list[dict[str, float]] = []  # what was logged, a row for each time

    def finished(self, *, overwrite: bool, resume: bool) -> dict[str, Any] | None:
        """The result of a finished run in this folder, if it has the same recipe and data."""
        if not self.output_dir.exists() or (
            self.output_dir.is_dir() and not any(self.output_dir.iterdir())
        ):
            return None
        if (record := read_json(self.output_dir / RECORD)) is None:
            held = "exists and holds no model that tilefold trained; choose another one."
            raise FileExistsError(f"{self.output_dir} {held}")
        if resume and not self._difference(record):
            left = read_json(self.work_dir / RECORD)
            if left is not None and not self._difference(
                left,
            ):  # interrupted after the model was in place
                shutil.rmtree(self.work_dir)
            result = record.get("result")
            return result if isinstance(result, dict) else None
        if overwrite:
            return None
        remedy = "choose another one, or replace it (overwrite=True or --overwrite)."
        got = f"a model of other settings ({self._difference(record)})"
        raise FileExistsError(f"{self.output_dir} holds {got}; {remedy}")

    def open(self, *, resume: bool, full_batches: bool) -> tuple[Path | None, int, bool]:
        """Prepare the work folder.

        A run goes on with the batches that it began with, whatever the number of ranks; only from
        one to several ranks may short batches become full. The number of steps of an epoch is the
        same for both.

        Args:
            resume: whether to go on from a checkpoint.
            full_batches: whether this call needs full batches.

        Returns:
            The newest complete checkpoint, its step, and whether short batches are filled.
        """
        self._lock = lock_folder(self.work_dir)
        left = read_json(self.work_dir / RECORD)
        found = complete_checkpoints(self.work_dir) if resume else {}
        if found and left is not None:
            if self._difference(left):
                got = f"an interrupted run with other settings ({self._difference(left)})"
                remedy = "or discard it with resume=False (--fresh)."
                raise ValueError(
                    f"{self.work_dir} holds {got}; go on with the same settings, {remedy}",
                )
            self.resumed_from, self.checkpoint = max(found.items())
        self.full_batches = full_batches or bool(
            self.checkpoint and left and left.get("full_batches"),
        )
        for entry in self.work_dir.iterdir():
            if entry.is_dir() and entry not in found.values():
                shutil.rmtree(entry)
            elif entry.is_file() and entry.name != LOCK and not found:
                entry.unlink()
        if not found:
            write_json(
                self.work_dir / RECORD,
                {"settings": self.settings, "full_batches": self.full_batches},
            )
        return self.checkpoint, self.resumed_from, self.full_batches

    def finish(self, model: Model, result: Record, told: str = "") -> None:
        """Save `model`, a card with what is `told`, log and plot in a temporary folder, and move
        that into place.
        """
        made = self.work_dir / "model"
        if made.exists():
            shutil.rmtree(made)
        model.save_pretrained(str(made))
        extend_card(made / "README.md", told)
        if self.history:
            (made / LOG).write_text(
                "".join(json.dumps(row) + "\n" for row in self.history),
                encoding="utf-8",
            )
            with suppress(ImportError):  # of matplotlib
                draw(self.history, made / PLOT)
        write_json(made / RECORD, {"settings": self.settings, "result": result})
        swap_directory(made, self.output_dir)
        shutil.rmtree(self.work_dir)
        unlock_folder(self._lock)

    def close(self) -> None:
        """Drop a work folder that training never began in."""
        try:
            if self.checkpoint is None:
                shutil.rmtree(self.work_dir)
        finally:
            unlock_folder(self._lock)

    def _difference(self, record: Record) -> str:
        """Names of the settings in which a record differs from this run's; empty if it does not."""
        theirs, ours = record.get("settings"), self.settings
        if not isinstance(theirs, dict) or not isinstance(theirs.get("recipe"), dict):
            return "unreadable record"
        fields, own = _training(theirs["recipe"]), _training(ours["recipe"])
        names = sorted(name for name in {*fields, *own} if fields.get(name) != own.get(name))
        if theirs.get("data") != ours["data"]:
            names.append("training data")
        return "differs in " + ", ".join(names) if names else ""


def _training(recipe: Record) -> Record:
    """The fields that change the model."""
    return {
        name: value
        for name, value in recipe.items()
        if name not in ("save_steps", "save_minutes", "log_steps")
    }


def draw(history: list[dict[str, float]], picture: Path) -> None:
    """Plot a log: losses and weighted penalties over the steps; below, if counted, the terms of a
    vector, and nDCG.
    """
    names = dict.fromkeys(name for row in history for name in row)
    groups = [
        [name for name in names if name.endswith(ends)]
        for ends in ("loss", "penalty", "_active_terms", NDCG)
    ]
    panels = [part for part in (groups[0] + groups[1], *groups[2:]) if part]
    figure = new_figure((7, 3.5 * len(panels)))
    for axes, lines in zip(
        figure.subplots(len(panels), 1, squeeze=False).flat,
        panels,
        strict=True,
    ):
        for name in lines:
            points = [(row["step"], row[name]) for row in history if name in row]
            axes.plot(
                *zip(*points, strict=True),
                label=name.replace("_", " "),
                marker=".",
                linewidth=1,
            )
        for row in (row for row in history if lines == groups[3] and row.get("kept")):
            axes.axvline(row["step"], label="kept", linestyle=":")
        axes.set_xlabel("step")
        axes.legend()
    save_figure(figure, picture)


def newest_step(output_dir: Path) -> int | None:
    """The step of the newest complete checkpoint of an interrupted run into `output_dir`, None
    without one.
    """
    return max(complete_checkpoints(work_folder(output_dir)), default=None)


def complete_checkpoints(work_dir: Path) -> dict[int, Path]:
    """Step -> folder."""
    marks = {path.parent: read_json(path) for path in work_dir.glob(f"checkpoint-*/{WHOLE}")}
    return {
        mark["step"]: path
        for path, mark in marks.items()
        if mark and isinstance(mark.get("step"), int)
    }


def work_folder(output_dir: Path) -> Path:
    """Folder of the checkpoints until a run is finished."""
    return output_dir.with_name(output_dir.name + ".training")


class TrainingError(RuntimeError):
    """The training cannot lead to a model."""


class OutOfTimeError(TrainingError):
    """The hours of a call are over; a checkpoint is kept."""
