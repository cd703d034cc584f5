"""The messages of ``tilefold demo`` before and after each stage, and the first answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common
from tilefold.cli._demo_data import EXAMPLE, EXAMPLE_ID

if TYPE_CHECKING:
    from tilefold.cli._demo_plan import Plan
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run

ANSWERS = 3
NOTICED = 1.15  # a stage that took this many times its prediction, or that fraction of it, is reported
MINUTE = 60.0


class Stages:
    """Reports stages on stderr, measures their times, and compares them with the plan."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.record: dict[str, dict[str, Any]] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._started

    def announce(self, plan: Plan) -> None:
        """Print the plan."""
        size, seconds = plan.size, plan.seconds
        operations, expected = sum(plan.operations.values()), sum(seconds.values())
        _common.note(
            f"plan: {plan.documents} documents of up to {size.max_length} tokens, {plan.steps} training steps of "
            f"{size.batch_size} pairs; about {operations / 1e12:.1f} TFLOP at "
            f"{operations / (expected - seconds['other']) / 1e9:,.0f} GFLOP/s, {duration(expected)} from here"
        )
        if not isinstance(plan.minutes, str) and expected + self.elapsed > 1.1 * MINUTE * plan.minutes:
            _common.note(
                f"  {plan.minutes:g} minutes are too few for a result on this machine: the smallest plan that shows "
                f"one will take {duration(expected + self.elapsed)}"
            )

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Print what begins, and afterwards its result and time."""
        started = time.monotonic()
        _common.note(f"{text} ...")
        said: list[str] = []
        yield said.append
        _common.note(f"  {''.join(f'{line}, ' for line in said)}{time.monotonic() - started:.1f} s")

    @contextmanager
    def model_step(self, name: str, text: str, plan: Plan) -> Iterator[Callable[..., None]]:
        """A step that runs the model: prints its operations and expected seconds, and afterwards its time.

        Yields a function of the step's result, whether it was there already, and the share of the work that was left to
        do.
        """
        operations, expected = plan.operations[name], plan.seconds[name]
        started = time.monotonic()
        _common.note(f"{text}, {operations / 1e12:.1f} TFLOP, {duration(expected)} ...")
        outcome: dict[str, Any] = {"text": "", "reused": False, "share": 1.0}

        def done(text: str, reused: bool = False, share: float = 1.0) -> None:
            outcome.update(text=text, reused=reused, share=share)

        yield done
        seconds = time.monotonic() - started
        self.record[name] = {
            "seconds": seconds,
            "predicted_seconds": expected,
            "operations": operations * outcome["share"],
            "share": outcome["share"],
            "reused": outcome["reused"],
        }
        rate = operations * outcome["share"] / seconds / 1e9
        how = "reused" if outcome["reused"] else f"{seconds:.1f} s, {rate:,.0f} GFLOP/s"
        _common.note(f"  {outcome['text']}, {how}")

    def slowdown(self, name: str) -> float | None:
        """How many times longer than expected a stage took; None for one that was there already."""
        entry = self.record[name]
        if entry["reused"] or not entry["share"]:
            return None
        return float(entry["seconds"] / (entry["predicted_seconds"] * entry["share"]))

    def say_change(self, old: Plan, new: Plan, done: tuple[str, ...]) -> None:
        """Print how the plan changed after a stage took longer, or less long, than expected."""
        slowdown = self.slowdown(done[-1]) or 1.0
        if 1 / NOTICED < slowdown < NOTICED and (old.steps, old.head_shapes) == (new.steps, new.head_shapes):
            return
        changes = [f"{new.steps} training steps instead of {old.steps}"] if new.steps != old.steps else []
        if new.head_shapes != old.head_shapes:
            changes.append(f"{new.head_shapes} batches for the heads instead of {old.head_shapes}")
        rest = sum(seconds for stage, seconds in new.seconds.items() if stage not in done)
        _common.note(
            f"  {slowdown:.2f} times the expected time; {', '.join(changes) or 'the plan stays'}, {duration(rest)} left"
        )

    def answers(self, system: str, collection: Collection, run: Run) -> None:
        """Print the first documents for the example query."""
        best = sorted(run.get(EXAMPLE_ID, {}).items(), key=lambda item: -item[1])[:ANSWERS]
        titles = [collection.documents[name].title or name for name, _ in best]
        _common.note(f'  {system} answers "{EXAMPLE}": {", ".join(titles) or "nothing"}')


def duration(seconds: float) -> str:
    """``about 40 s``, ``about 3.5 minutes``."""
    return f"about {seconds:.0f} s" if seconds < 1.5 * MINUTE else f"about {seconds / MINUTE:.1f} minutes"
