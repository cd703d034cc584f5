"""Recipes on one GPU and on several: pairs a second, batches that do not fit, loss curves, and a
rank that is killed.

    python -m benchmarks.train_scale --devices 1 --run splade --run curve-0 --output one
    python -m benchmarks.train_scale --devices 2 --run splade --run curve-0 --output two --one one
    python -m benchmarks.train_scale --devices 2 --killed --output killed

Everything goes through :func:`tilefold.recipes.train`, as `tilefold train` does, on made pairs of
texts and a BERT-base without pretrained weights under bf16 autocast; ranks are started as
`--devices` starts them. A row has the pairs a second and the milliseconds of the timed steps (data
loader, optimizer and a log every fifty steps included; the device is waited for before and after),
the median of tens of them by the device's clock, how often a graph was captured in them, which
takes as long as several, or a batch ran without one, the memory at most, and of a few more steps
under torch's profiler how much of the time a kernel ran on the first GPU and which ran longest.
`--one` is the folder of the rows of one device, with which those of several are compared: the rate
at equal pairs a GPU, and the log of `curve-SEED` (the packaged MiniLM without dropout, queries of
words of their documents, the pairs of 128 in the order of the seed, 60 steps), which may not differ
from the mean of those of one device by more than three standard deviations of one more seed, pooled
over the log.

`--killed` trains with `tilefold train --devices`, kills the second rank with signal 9 after the
first checkpoint, tells how long it takes until the command ends and what it says, and runs the same
command again. `--device cpu --tiny` shows that all of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.train_data import BASE, MAX_LENGTH, TINY, load_tokenizer, made_pairs
from benchmarks.train_run import busy_seconds
from tilefold.bench.results import collect, read_csv, write_csv
from tilefold.distributed.ranks import first_rank_first, is_rank, join_ranks, run_ranks

FILE = "train_scale.csv"
KERNELS = 25
TEN = 10  # steps of which the median is taken
SCALE = 30.0  # over V, of scores and penalties: those of fresh weights are dense, and grow with V
SEEDS, SIGMAS = (0, 1, 2), 3.0


@dataclass(frozen=True)
class Setting:
    """A training: pairs a step on each GPU (of curves: on all together), and steps before those
    that are timed.
    """

    kind: str
    batch: int
    warm: int
    timed: int
    mini: int | None = None
    graphs: bool = False
    seed: int | None = None  # of a curve
    profiled: int = 3  # further steps under the profiler


RUNS = {
    "splade": Setting("splade", 128, 10, 50),
    "splade-graphs": Setting("splade", 128, 250, 100, graphs=True),
    "colbert": Setting("colbert", 128, 10, 50),
    "colbert-graphs": Setting("colbert", 128, 250, 100, graphs=True),
    "splade-512": Setting("splade", 512, 5, 25),
    "splade-4096": Setting("splade", 4096, 2, 3, mini=512, profiled=1),
    "splade-4096-by-2048": Setting("splade", 4096, 2, 3, mini=2048, profiled=1),
    "splade-16384": Setting("splade", 16384, 1, 2, mini=1024, profiled=1),
} | {f"curve-{seed}": Setting("splade", 128, 10, 50, seed=seed) for seed in SEEDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks; each of them comes here again."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        choices=list(RUNS),
        help="a training; repeat for several",
    )
    parser.add_argument(
        "--killed",
        action="store_true",
        help="kill a rank of the command, and run it again",
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a tiny model, and a sixteenth of the pairs",
    )
    parser.add_argument(
        "--log-steps",
        type=int,
        default=50,
        help="steps between losses of the log, but of curves",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for train_scale.csv and profiles",
    )
    parser.add_argument("--one", type=Path, help="folder of the rows of one device")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if not is_rank():
        shutil.rmtree(options.output / "work", ignore_errors=True)
    if options.killed:
        return killed(options)
    if not is_rank() and options.devices > 1:
        return run_ranks(
            [sys.executable, "-m", "benchmarks.train_scale", *sys.argv[1:]],
            options.devices,
        )
    with join_ranks(training=True) as rank:
        for name in options.run:
            setting = RUNS[name]
            if options.tiny:
                few: dict[str, Any] = {
                    "batch": setting.batch // 16,
                    "mini": setting.mini and setting.mini // 16,
                }
                setting = replace(
                    setting,
                    warm=setting.warm // 8 or 1,
                    timed=setting.timed // 8 or 1,
                    **few,
                )
            try:
                row = measure(setting, options, name, rank)
                row |= beside_one(name, row, options)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # of all ranks alike; the others are measured
                traceback.print_exc()
                row = {"gate": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            if rank == 0:
                save({"run": name, "devices": options.devices, **row}, options)
    return 0


def measure(setting: Setting, options: argparse.Namespace, name: str, rank: int) -> dict[str, Any]:
    """Train, and tell what the clock saw, and the losses of the log."""
    from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
    from tilefold.recipes import train

    curve = setting.seed is not None
    batch = setting.batch * (1 if curve else options.devices)
    steps = setting.warm + setting.timed + setting.profiled
    work = options.output / "work"
    with first_rank_first():
        base = (
            still_minilm(work / "minilm")
            if curve
            else make_base(work / "base", setting.kind, options.tiny)
        )
    clock = Clock(setting, options.device == "cuda")
    recipe = make_recipe(setting, base, batch, steps, TEN if curve else options.log_steps)
    made, run = clock.counting(StepGraphs._made), clock.seeing(StepGraphs.__call__)
    with (
        mock.patch.object(StepGraphs, "_made", made),
        mock.patch.object(StepGraphs, "__call__", run),
    ):
        pairs = (
            batch * 20 if curve else 2 * setting.batch * min(steps, 20)
        )  # the same on any number of devices
        train(recipe, collection(pairs, found=curve), work / name, progress=clock)
    if rank:
        return {}
    if clock.kernels:
        (options.output / f"{name}-{options.devices}.txt").write_text(
            "\n".join(clock.kernels) + "\n",
        )
    log = (work / name / "training_log.jsonl").read_text().splitlines()
    losses = " ".join(f"{json.loads(line)['loss']:.5g}" for line in log)
    return {
        "batch": batch,
        "mini_batch": setting.mini or "",
        "steps": steps,
        "log": recipe.log_steps,
        **clock.row(batch),
        "losses": losses,
    }


def make_base(folder: Path, kind: str, tiny: bool) -> Path:
    """The folder of an untrained BERT with the packaged tokenizer, made where it is not there."""
    import torch
    import transformers

    folder = folder.with_name(f"{folder.name}-{kind}")
    if not folder.exists():
        sizes = dict(
            zip(
                ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
                TINY if tiny else BASE,
                strict=True,
            ),
        )
        config = transformers.BertConfig(vocab_size=30_522, **sizes)
        torch.manual_seed(0)
        auto: Any = (
            transformers.AutoModelForMaskedLM if kind == "splade" else transformers.AutoModel
        )
        auto.from_config(config).save_pretrained(folder)
        load_tokenizer(None).save_pretrained(folder)
    return folder


def still_minilm(folder: Path) -> Path:
    """The folder of the packaged MiniLM as a SPLADE without dropout, made where it is not there."""
    from tilefold.recipes.backbone import minilm_splade

    if not folder.exists():
        model = minilm_splade(made_pairs(load_tokenizer(None), 128, ragged=True)["document"])
        config = model[0].model.config
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        model.save_pretrained(str(folder))
    return folder


def make_recipe(setting: Setting, base: Path, batch: int, steps: int, log_steps: int) -> Any:
    """The recipe of a run; nothing is saved before the end."""
    from tilefold.recipes import ColbertRecipe, get_recipe

    shared = {
        "base_model": str(base),
        "max_steps": steps,
        "batch_size": batch,
        "mini_batch_size": setting.mini,
        "learning_rate": 2e-5,
        "max_length": MAX_LENGTH,
        "graphs": setting.graphs,
        "seed": setting.seed or 0,
        "save_steps": 10**6,
        "save_minutes": 1e6,
        "log_steps": log_steps,
    }
    if setting.kind == "colbert":
        return ColbertRecipe(**shared)
    if setting.seed is not None:
        return get_recipe("splade", **shared)
    weights = dict.fromkeys(("query_regularizer", "document_regularizer"), SCALE / 30_522)
    return get_recipe("splade", similarity_scale=SCALE / 30_522, **weights, **shared)


def collection(count: int, *, found: bool = False) -> Any:
    """So many made pairs, ragged; `found` queries are words of their documents."""
    from tilefold.retrieval.data.collection import Collection, Document

    made = made_pairs(load_tokenizer(None), count, ragged=True)
    documents = {f"d{i}": Document(f"d{i}", "", text) for i, text in enumerate(made["document"])}
    asked = [" ".join(text.split()[:9:3]) for text in made["document"]] if found else made["query"]
    queries = {f"q{i}": text for i, text in enumerate(asked)}
    return Collection(
        "made",
        documents,
        queries,
        {"train": {f"q{i}": {f"d{i}": 1} for i in range(count)}},
    )


class Clock:
    """Called after every step: when the timed ones began and ended, and which kernels ran in those
    after them.
    """

    def __init__(self, setting: Setting, on_gpu: bool) -> None:
        self.setting, self.on_gpu = setting, on_gpu
        self.times: list[float] = []
        self.tens: list[
            Any
        ] = []  # when tens of the timed steps were computed: events, on a CPU seconds
        self.captures: list[float] = []  # when a graph was captured
        self.plain: list[float] = []  # when a batch ran without one
        self.kernels: list[str] = []
        self.facts: dict[str, Any] = {"peak_gib": 0.0, "reserved_gib": 0.0, "busy": ""}

    def __call__(self, step: int, steps: int, losses: object) -> None:
        import torch

        marks = (self.setting.warm, self.setting.warm + self.setting.timed, steps)
        if marks[0] <= step <= marks[1] and (step - marks[0]) % TEN == 0:
            event: Any = torch.cuda.Event
            self.tens.append(event(enable_timing=True) if self.on_gpu else time.perf_counter())
            if self.on_gpu:
                self.tens[-1].record()
        if step not in marks:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if not self.on_gpu:
            return
        if step == marks[0]:
            torch.cuda.reset_peak_memory_stats()
        elif step == marks[1]:
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.facts |= {"peak_gib": peaks[0] / 2**30, "reserved_gib": peaks[1] / 2**30}
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
            )
            self.profiler.start()
            self.began = time.perf_counter()
        else:
            self.profiler.stop()
            self.facts["busy"] = busy_seconds(self.profiler) / (self.times[-1] - self.began)
            found = sorted(
                self.profiler.key_averages(),
                key=lambda event: -event.self_device_time_total,
            )
            count = self.setting.profiled
            self.kernels = [
                f"{event.self_device_time_total / 1e3 / count:9.3f} ms {event.count / count:6.0f} "
                f"x {event.key[:110]}"
                for event in found[:KERNELS]
            ]

    def row(self, batch: int) -> dict[str, Any]:
        """Rates of the timed steps: of all of them, and the median of tens, in which no graph is
        captured as a rule.
        """
        seconds = (self.times[1] - self.times[0]) / self.setting.timed
        between = zip(self.tens, self.tens[1:], strict=False)
        tens = [a.elapsed_time(b) / TEN if self.on_gpu else 1e3 * (b - a) / TEN for a, b in between]
        made, plain = (
            sum(self.times[0] < at < self.times[1] for at in each)
            for each in (self.captures, self.plain)
        )
        facts = {
            "step_ms": 1e3 * seconds,
            "pairs_per_s": batch / seconds,
            "captures": made,
            "without_graph": plain,
        }
        return facts | ({"median_ms": statistics.median(tens)} if tens else {}) | self.facts

    def counting(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """What captures a graph, and is noted."""

        def noted(*arguments: Any) -> Any:
            self.captures.append(time.perf_counter())
            return capture(*arguments)

        return noted

    def seeing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a batch as a graph, or says that it must run without, which is noted."""

        def noted(*arguments: Any) -> Any:
            output = run(*arguments)
            if output is None:
                self.plain.append(time.perf_counter())
            return output

        return noted


def beside_one(name: str, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What several devices have to do with one: the ratio of rates, or the difference of two
    curves.
    """
    if options.one is None or "pairs_per_s" not in row or not (options.one / FILE).is_file():
        return {}
    ones = {found["run"]: found for found in read_csv(options.one / FILE) if found["gate"] == "ok"}
    if name not in ones:
        return {}
    ratio = {"x_one": row["pairs_per_s"] / float(ones[name]["pairs_per_s"])}
    if row.get("median_ms") and ones[name].get("median_ms"):
        per_step = float(ones[name]["batch"]) / float(ones[name]["median_ms"])
        ratio["x_one_by_medians"] = row["batch"] / row["median_ms"] / per_step
    if not name.startswith("curve"):
        return ratio
    mine, one = ([float(loss) for loss in each["losses"].split()] for each in (row, ones[name]))
    error = max(abs(a - b) / b for a, b in zip(mine, one, strict=True))
    seeds = [found["losses"].split() for key, found in ones.items() if key.startswith("curve")]
    if len(seeds) < 2:
        return ratio | {
            "curve_error": error,
            "gate": "the curves of one device must be of two seeds at least",
        }
    spreads, apart = [], []  # relative, of each row of the log
    for loss, *each in zip(mine, *seeds, strict=True):
        losses = [float(other) for other in each]
        spreads.append(statistics.stdev(losses) / statistics.mean(losses))
        apart.append(abs(loss / statistics.mean(losses) - 1))
    spread = math.sqrt(statistics.mean(each**2 for each in spreads) * (1 + 1 / len(seeds)))
    gate = (
        "ok"
        if max(apart) <= SIGMAS * spread
        else f"{max(apart):.2g} from seeds, whose next may be {spread:.2g}"
    )
    return ratio | {
        "curve_error": error,
        "from_seeds": max(apart),
        "spread_of_seeds": spread,
        "gate": gate,
    }


def killed(options: argparse.Namespace) -> int:
    """Kill the second rank of the command, and run it again."""
    from tilefold.recipes.loading import newest_step

    work = options.output / "work"
    collection(2048).save_beir(work / "data", overwrite=True)
    base, output, errors = (
        make_base(work / "base", "splade", options.tiny),
        work / "m",
        work / "errors",
    )
    command = [
        sys.executable,
        "-m",
        "tilefold.cli",
        "train",
        "--recipe",
        "splade",
        "--model",
        str(base),
        "--data",
        str(work / "data"),
        "--output",
        str(output),
        "--devices",
        str(options.devices),
        "--json",
        "--batch-size",
        "16" if options.tiny else "256",
        "--save-steps",
        "20",
        "--lr",
        "2e-5",
        "--regularizer",
        "1e-3",
        "--set",
        f"similarity_scale={SCALE / 30_522}",
    ]
    began = time.perf_counter()
    with (
        errors.open("wb") as log,
        subprocess.Popen([*command, "--steps", "100000"], stderr=log) as run,  # noqa: S603
    ):
        while not newest_step(output) and run.poll() is None:
            time.sleep(0.05)
        first, step = time.perf_counter() - began, newest_step(output) or 0
        os.kill(rank_of(run.pid, 1), signal.SIGKILL)
        began = time.perf_counter()
        code = run.wait()
        ended = time.perf_counter() - began
    said = " ".join(
        line for line in errors.read_text(errors="replace").splitlines() if "Error" in line
    )
    last = newest_step(output) or 0
    more = [*command, "--steps", "100000", "--hours", "0.0005"]
    began = time.perf_counter()
    again = subprocess.run(more, capture_output=True, text=True, check=False)  # noqa: S603
    tail = " ".join(again.stderr.split())[-200:]
    resumed = newest_step(output) or 0
    ok = code == 1 and "signal 9" in said and resumed > last >= step > 0
    save(
        {
            "run": "killed",
            "devices": options.devices,
            "seconds_to_first_checkpoint": first,
            "seconds_to_end": ended,
            "code": code,
            "said": said[-400:],
            "kept_step": last,
            "again_seconds": time.perf_counter() - began,
            "again_step": resumed,
            "again_said": tail,
            "gate": "ok" if ok else "failed",
        },
        options,
    )
    return int(not ok)


def rank_of(parent: int, rank: int) -> int:
    """The process of a rank that another process has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"PPid:\t{parent}\n" in (entry / "status").read_text()
            if mine and f"LOCAL_RANK={rank}".encode() in (entry / "environ").read_bytes().split(
                b"\0",
            ):
                return int(entry.name)
    raise RuntimeError(f"process {parent} must have a rank {rank}, found none.")


def save(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a row, and keep it."""
    import torch

    row = {"gate": "ok", **row}
    print(
        json.dumps(
            {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in row.items()
            },
        ),
        flush=True,
    )
    write_csv(
        options.output / FILE,
        [row],
        collect(torch.device(options.device)),
        ("run", "devices"),
    )


if __name__ == "__main__":
    sys.exit(main())
