"""Profile of a training step, host and device together.

    python -m benchmarks.training_profile --shape ragged-128 --side packed

Trains as `benchmarks.train` does, then prints, per step: the time; what the Python stack of the
thread that trains stood in, sampled every half millisecond without a profiler (so the device's own
time shows as a wait, if it is the limit); and, of further steps under torch's profiler, the time of
the kernels by name, and between which kernels the GPU had nothing to do for longest. ``autograd``
is the host's part of the backward pass, which runs in a thread of its own.
"""

from __future__ import annotations

import argparse
import collections
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.train import JOB, LARGE
from benchmarks.train_data import (
    BASE,
    FULL_LENGTH,
    MAX_LENGTH,
    TINY,
    load_tokenizer,
    made_pairs,
    make_encoder,
)
from benchmarks.train_run import GATE_STEPS, GRAPH_WARM_STEPS, GRAPHS, PROFILED_STEPS, Watch, run

STEPS = 30
PERIOD_S = 5e-4
# functions of transformers, accelerate, torch and ours, outermost first in the stack of a step
PARTS = (
    "get_batch_samples",
    "compute_loss",
    "backward",
    "clip_grad_norm_",
    "step",
    "zero_grad",
    "synchronize",
)
ROWS = 30


class Profile(Watch):
    """Samples the stack during the timed steps, and keeps the kernels of those behind them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.samples: collections.Counter[tuple[str, ...]] = collections.Counter()
        self.kernels: list[tuple[str, float, int]] = []
        self.gaps: list[tuple[float, str, str]] = []
        self.sampling = threading.Event()

    def end(self, step: int) -> None:
        """After step number ``step``."""
        if step == self.first + self.steps:
            self.sampling.clear()
        super().end(step)
        if step == self.first:
            self.sampling.set()
            threading.Thread(
                target=self._sample,
                args=(threading.get_ident(),),
                daemon=True,
            ).start()
        if step == self.total and self.profiler is not None:
            found = [
                event for event in self.profiler.key_averages() if event.self_device_time_total
            ]
            self.kernels = [
                (event.key, event.self_device_time_total / 1e3, event.count) for event in found
            ]
            self.gaps = _gaps(self.profiler)

    def _sample(self, thread: int) -> None:
        while self.sampling.is_set():
            frame = sys._current_frames().get(thread)
            names = []
            while frame is not None:
                names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
                frame = frame.f_back
            self.samples[tuple(reversed(names))] += 1
            time.sleep(PERIOD_S)

    def report(self) -> None:
        """Print it."""
        measured = self.measured()
        print(
            f"{measured.step_ms:.1f} ms a step, GPU busy {measured.busy}, {measured.peak_gib:.1f} "
            "GiB",
        )
        per_sample = measured.step_ms / max(1, sum(self.samples.values()))
        inclusive: collections.Counter[str] = collections.Counter()
        own: collections.Counter[str] = collections.Counter()
        parts: collections.Counter[str] = collections.Counter()
        for names, count in self.samples.items():
            own[names[-1]] += count
            for name in set(names):
                inclusive[name] += count
            plain = [name.split(".", 1)[1] for name in names]
            parts[next((part for part in PARTS if part in plain), "other")] += count
        for title, counts in (("parts", parts), ("inclusive", inclusive), ("own", own)):
            print(f"host, {title}, ms a step")
            for name, count in counts.most_common(2 * ROWS if title == "inclusive" else ROWS):
                print(f"  {count * per_sample:8.2f}  {name}")
        total = sum(time for _, time, _ in self.kernels)
        print(
            f"device: {total / PROFILED_STEPS:.1f} ms of kernels a step; ms a step, launches a "
            "step",
        )
        for name, milliseconds, count in sorted(self.kernels, key=lambda row: -row[1])[:ROWS]:
            print(
                f"  {milliseconds / PROFILED_STEPS:8.3f} {count / PROFILED_STEPS:6.0f}  "
                f"{name[:120]}",
            )
        print(
            f"device: nothing to do for {sum(gap for gap, *_ in self.gaps) / PROFILED_STEPS:.1f} "
            "ms a step; the longest",
        )
        for gap, before, after in sorted(self.gaps, reverse=True)[:ROWS]:
            print(f"  {gap:8.3f}  {before[:60]} -> {after[:60]}")


def _gaps(profiler: Any) -> list[tuple[float, str, str]]:
    """Milliseconds without a kernel, and the names of those before and after."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    found, reached, last = [], spans[0][0] if spans else 0, ""
    for start, end, name in spans:
        if start > reached:
            found.append(((start - reached) / 1e3, last, name))
        if end > reached:
            reached, last = end, name
    return found


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="ragged-128")
    parser.add_argument("--side", default="packed", choices=["stock", "padded", "packed", *GRAPHS])
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of V = 250,002")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (case,) = JOB.chosen([options.shape], device.type, False)
    numbers = case.numbers
    tokenizer = load_tokenizer(options.tokenizer if numbers["vocab"] == LARGE else None)
    ragged = numbers["documents"] != "full"
    length = MAX_LENGTH if ragged else FULL_LENGTH
    batch, kind = numbers["batch"], numbers["kind"]
    model = make_encoder(
        kind,
        numbers["vocab"],
        TINY if "tiny" in numbers else BASE,
        tokenizer,
        length,
    )
    rows = made_pairs(
        tokenizer,
        batch * (options.steps + GATE_STEPS + GRAPH_WARM_STEPS + PROFILED_STEPS),
        ragged,
    )
    on_gpu = device.type == "cuda"
    start = time.perf_counter()
    watch = run(kind, model, options.side, rows, batch, options.steps, device, on_gpu, Profile)
    print(f"{time.perf_counter() - start:.1f} s in all")
    if isinstance(watch, Profile):
        watch.report()


if __name__ == "__main__":
    main()
