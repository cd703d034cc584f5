"""The files of a training run: complete checkpoints, and a model that is moved into place atomically."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tilefold._files import read_json, write_json

RECORD = "tilefold_training.json"
WHOLE = "tilefold_whole.json"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int


class TrainingRun:
    """The folders of a run: ``<output_dir>`` when done, ``<output_dir>.training`` until then."""

    def __init__(self, output_dir: Path, recipe: dict[str, Any], data: str) -> None:
        self.output_dir = output_dir
        self.work_dir = output_dir.with_name(output_dir.name + ".training")
        self.recipe = recipe
        self.data = data
        self.settings: dict[str, Any] = {"recipe": recipe, "data": data}

    def finished(self, *, overwrite: bool, resume: bool) -> dict[str, Any] | None:
        """The result of a finished run in this folder, if it has the same recipe and data.

        Raises:
            FileExistsError: if the folder holds something else and `overwrite` is not set.
        """
        if not self.output_dir.exists() or (self.output_dir.is_dir() and not any(self.output_dir.iterdir())):
            return None
        record = read_json(self.output_dir / RECORD)
        if record is None:
            raise FileExistsError(
                f"output_dir {self.output_dir} exists and holds no model that tilefold trained; choose another one."
            )
        if resume and record.get("settings") == self.settings:
            left = read_json(self.work_dir / RECORD)
            if left is not None and left.get("settings") == self.settings:  # interrupted after the model was in place
                shutil.rmtree(self.work_dir)
            return self._result(record)
        if overwrite:
            return None
        raise FileExistsError(
            f"output_dir {self.output_dir} holds a model of other settings ({self._difference(record)}); "
            "choose another one, or allow it to be overwritten."
        )

    def open(self, *, resume: bool) -> Checkpoint | None:
        """Prepare the work folder; return its newest complete checkpoint, or ``None`` for a new run."""
        left = read_json(self.work_dir / RECORD)
        if resume and left is not None:
            if left.get("settings") != self.settings:
                raise ValueError(
                    f"{self.work_dir} holds an interrupted run with other settings ({self._difference(left)}); go on "
                    "with the same settings, or discard it by training without resume."
                )
            return self._newest_checkpoint()
        if self.work_dir.exists():
            shutil.rmtree(self.work_dir)
        self.work_dir.mkdir(parents=True)
        write_json(self.work_dir / RECORD, {"settings": self.settings})
        return None

    def finish(self, model: Any, result: dict[str, Any]) -> None:
        """Save `model` in a temporary folder, move it into place, and delete the checkpoints."""
        made = self.work_dir / "model"
        if made.exists():
            shutil.rmtree(made)
        model.save_pretrained(str(made))
        write_json(made / RECORD, {"settings": self.settings, "result": result})
        replace_dir(made, self.output_dir)
        shutil.rmtree(self.work_dir)

    def close(self, checkpoint: Checkpoint | None) -> None:
        """Drop a work folder that training never began in."""
        if checkpoint is None:
            shutil.rmtree(self.work_dir)

    def _newest_checkpoint(self) -> Checkpoint | None:
        found: list[Checkpoint] = []
        for path in self.work_dir.glob("checkpoint-*"):
            mark = read_json(path / WHOLE)
            if mark is None or not isinstance(mark.get("step"), int):
                shutil.rmtree(path)
            else:
                found.append(Checkpoint(path, mark["step"]))
        return max(found, key=lambda checkpoint: checkpoint.step, default=None)

    @staticmethod
    def _result(record: dict[str, Any]) -> dict[str, Any] | None:
        result = record.get("result")
        return result if isinstance(result, dict) else None

    def _difference(self, record: dict[str, Any]) -> str:
        other = record.get("settings") or {}
        theirs, ours = other.get("recipe") or {}, self.recipe
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if other.get("data") != self.data:
            names.append("training data")
        return "differs in " + ", ".join(names) if names else "unreadable record"


def make_watcher(progress: Callable[[int, int, float | None], None] | None, run: TrainingRun) -> Any:
    """A trainer callback that reports steps, keeps the last loss and marks complete checkpoints."""
    from transformers import TrainerCallback  # noqa: PLC0415 - heavy

    class Watcher(TrainerCallback):  # type: ignore[misc]
        loss: float | None = None
        interrupted = False

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                self.loss = float(logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            if progress is not None:
                progress(state.global_step, state.max_steps, self.loss)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = run.work_dir / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                write_json(folder / WHOLE, {"step": state.global_step})

    return Watcher()


@contextmanager
def heeding_interrupts(watcher: Any) -> Iterator[None]:
    """Make Ctrl-C stop training at the next step at the latest.

    Python drops a ``KeyboardInterrupt`` that is raised while a destructor or a callback from C runs, and the training
    would go on.
    """
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


def digest(pairs: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of the training pairs, in order."""
    sha = hashlib.sha256()
    for pair in pairs:
        sha.update(json.dumps(pair).encode())
    return sha.hexdigest()


def replace_dir(source: Path, target: Path) -> None:
    """Move `source` to `target`, replacing what was there."""
    old = target.with_name(target.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.replace(old)
    source.replace(target)
    if old.exists():
        shutil.rmtree(old)
