"""The files of a training run: complete checkpoints, and a model that is moved into place atomically."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tilefold._files import LOCK, hold_folder, read_json, release_folder, swap_directory, write_json
from tilefold._typing import Model

RECORD = "tilefold_training.json"
WHOLE = "tilefold_whole.json"


class TrainingRun:
    """The folders of a run: ``<output_dir>`` when done, ``<output_dir>.training`` until then."""

    def __init__(self, output_dir: Path, recipe: dict[str, Any], data: str) -> None:
        self.output_dir, self.work_dir = output_dir, work_folder(output_dir)
        self.settings: dict[str, Any] = {"recipe": recipe, "data": data}
        self.checkpoint: Path | None = None
        self.resumed_from = 0

    def finished(self, *, overwrite: bool, resume: bool) -> dict[str, Any] | None:
        """The result of a finished run in this folder, if it has the same recipe and data."""
        if not self.output_dir.exists() or (self.output_dir.is_dir() and not any(self.output_dir.iterdir())):
            return None
        record = read_json(self.output_dir / RECORD)
        if record is None:
            raise FileExistsError(
                f"output_dir {self.output_dir} exists and holds no model that tilefold trained; choose another one."
            )
        if resume and self._same(record):
            left = read_json(self.work_dir / RECORD)
            if left is not None and self._same(left):  # interrupted after the model was in place
                shutil.rmtree(self.work_dir)
            result = record.get("result")
            return result if isinstance(result, dict) else None
        if overwrite:
            return None
        raise FileExistsError(
            f"output_dir {self.output_dir} holds a model of other settings ({self._difference(record)}); "
            "choose another one, or replace it with --overwrite (overwrite=True)."
        )

    def open(self, *, resume: bool) -> None:
        """Prepare the work folder, and find its newest complete checkpoint."""
        self._lock = hold_folder(self.work_dir)
        left = read_json(self.work_dir / RECORD)
        found = _complete_checkpoints(self.work_dir) if resume else {}
        if found and left is not None:
            if not self._same(left):
                raise ValueError(
                    f"{self.work_dir} holds an interrupted run with other settings ({self._difference(left)}); go on "
                    "with the same settings, or discard it with resume=False (with --fresh on the command line)."
                )
            self.resumed_from, self.checkpoint = max(found.items())
        for entry in self.work_dir.iterdir():
            if entry.is_dir() and entry not in found.values():
                shutil.rmtree(entry)
            elif entry.is_file() and entry.name != LOCK and not found:
                entry.unlink()
        if not found:
            write_json(self.work_dir / RECORD, {"settings": self.settings})

    def finish(self, model: Model, result: dict[str, Any]) -> None:
        """Save `model` in a temporary folder, move it into place, and delete the checkpoints."""
        made = self.work_dir / "model"
        if made.exists():
            shutil.rmtree(made)
        model.save_pretrained(str(made))
        write_json(made / RECORD, {"settings": self.settings, "result": result})
        swap_directory(made, self.output_dir)
        shutil.rmtree(self.work_dir)
        release_folder(self._lock)

    def close(self) -> None:
        """Drop a work folder that training never began in."""
        if self.checkpoint is None:
            shutil.rmtree(self.work_dir)
        release_folder(self._lock)

    def _same(self, record: dict[str, Any]) -> bool:
        """Whether a record has this run's settings, but for those that change nothing in the model."""
        settings = record.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("recipe"), dict):
            return False
        ours = self.settings
        return settings.get("data") == ours["data"] and _training(settings["recipe"]) == _training(ours["recipe"])

    def _difference(self, record: dict[str, Any]) -> str:
        other = record.get("settings") or {}
        theirs, ours = _training(other.get("recipe") or {}), _training(self.settings["recipe"])
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if other.get("data") != self.settings["data"]:
            names.append("training data")
        return "differs in " + ", ".join(names) if names else "unreadable record"


def _training(recipe: dict[str, Any]) -> dict[str, Any]:
    """The fields that change the model; records from before ``graphs`` have none, which is False."""
    fields = {"graphs": False} | recipe
    return {name: value for name, value in fields.items() if name not in ("save_steps", "save_minutes")}


def newest_step(output_dir: Path) -> int | None:
    """The step of the newest complete checkpoint of an interrupted run into `output_dir`, None without one."""
    return max(_complete_checkpoints(work_folder(output_dir)), default=None)


def _complete_checkpoints(work_dir: Path) -> dict[int, Path]:
    """Step -> folder."""
    marks = {path.parent: read_json(path) for path in work_dir.glob(f"checkpoint-*/{WHOLE}")}
    return {mark["step"]: path for path, mark in marks.items() if mark and isinstance(mark.get("step"), int)}


def work_folder(output_dir: Path) -> Path:
    """Folder of the checkpoints until a run is finished."""
    return output_dir.with_name(output_dir.name + ".training")


class TrainingError(RuntimeError):
    """The training cannot lead to a model."""


def make_watcher(
    progress: Callable[[int, int, float | None], None] | None, run: TrainingRun, save_minutes: float
) -> Any:
    """A trainer callback that reports steps, keeps losses, stops where one is not finite, and asks for checkpoints."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        first_ranking_loss: float | None = None
        ranking_loss: float | None = None
        loss: float | None = None
        interrupted = False
        saved = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                self.loss = float(logs["loss"])
                if not math.isfinite(self.loss):
                    raise TrainingError(
                        f"the loss is {self.loss} after {state.global_step} steps: the training has diverged. Train "
                        "with a smaller learning_rate, from the start (resume=False, --fresh)."
                    )
                # without regularisers
                self.ranking_loss = float(logs.get("base_loss", self.loss))
                if self.first_ranking_loss is None:
                    self.first_ranking_loss = self.ranking_loss

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            if progress is not None:
                progress(state.global_step, state.max_steps, self.loss)
            if time.monotonic() - self.saved >= 60 * save_minutes:
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = run.work_dir / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                write_json(folder / WHOLE, {"step": state.global_step})
            self.saved = time.monotonic()

    return Watcher()


@contextmanager
def heeding_interrupts(watcher: Any) -> Iterator[None]:
    """Make Ctrl-C stop training at the next step: Python drops what is raised in a destructor or a callback from C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        watcher.interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    """SHA-256 of the training rows, in order."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(json.dumps(row).encode())
    return sha.hexdigest()
