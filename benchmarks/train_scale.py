"""Time the training of recipes on one GPU and on several.

    python -m benchmarks.train_scale --devices 1 --run splade --run curve-0 --output one
    python -m benchmarks.train_scale --devices 2 --run splade --run curve-0 --output two --one one
    python -m benchmarks.train_scale --devices 2 --killed --resume-devices 1 --output killed

Timed: :func:`tilefold.recipes.train`, as `tilefold train` runs it, on made pairs of texts and a
BERT-base without pretrained weights under bf16 autocast. Ranks are started as `--devices` starts
them. A row has pairs per second and milliseconds of the timed steps, with data loader, optimizer
and a log every fifty steps, between two waits for the device; the median of groups of ten steps by
the device's clock; how many graphs were captured in them (a capture takes as long as several
steps), and how many batches ran without one; memory; and from a few more steps under torch's
profiler, for how much of the time a kernel ran on the first GPU. The kernels that ran longest are
in a text file.

Baseline: one device, whose rows are in the folder `--one`. Rates are compared at equal pairs per
GPU.

Gate: the log of `curve-SEED` is compared with that of one device. These runs train the packaged
MiniLM without dropout for 60 steps of 128 pairs, in the order of the seed, with queries of words of
their documents. A curve may not differ from the mean curve of one device by more than three
standard deviations of one more seed, pooled over the log. `fresh-curve-SEED` trains two layers
of fresh weights in place of MiniLM, for machines that have only a tokenizer (`--tokenizer`).

`--killed` trains with `tilefold train --devices`, kills the second rank with signal 9 after the
first checkpoint, reports how long the command takes to end and its error, and runs the same command
again, with as many devices or with `--resume-devices`. `--killed decoder` trains all weights of a
decoder with `fsdp` and `split_vocabulary`. `--device cpu --tiny` shows that all of it runs.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.train_data import BASE, MAX_LENGTH, TINY, load_tokenizer, made_pairs
from benchmarks.train_run import busy_seconds
from tilefold.bench.results import collect, read_csv, write_csv
from tilefold.distributed.ranks import first_rank_first, is_rank, join_ranks, run_ranks

FILE = "train_scale.csv"
# kernels in the text file
N_KERNELS = 25
# steps of a group, of whose times the median is taken
GROUP_STEPS = 10
VOCAB_SIZE = 30_522
# over V, factor of scores and penalties: those of fresh weights are dense, and grow with V
SCALE = 30.0
# seeds of curves, and allowed standard deviations of one more seed
SEEDS = (0, 1, 2)
SIGMAS = 3.0
# of curves of fresh weights, whose vectors are dense
FRESH_LEARNING_RATE = 5e-4
FRESH_PENALTY = 1e-6
# steps between two losses in the log of a curve
CURVE_LOG_STEPS = 10
# steps for which there are different pairs
STEPS_OF_PAIRS = 20
# with --tiny, pairs and steps are divided by these
TINY_PAIRS = 16
TINY_STEPS = 8
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        kind: ``"splade"`` or ``"colbert"``.
        batch: the pairs per step on each GPU, for a curve on all GPUs together.
        warm: steps before those that are timed.
        timed: the steps that are timed.
        mini: the pairs of a forward pass, if a step has several. None if it has one.
        graphs: whether it uses CUDA graphs.
        seed: the seed of a curve. None for other runs.
        fresh: whether a curve begins with fresh weights, and not with those of MiniLM.
        profiled: steps under the profiler, after the timed ones.
    """

    kind: str
    batch: int
    warm: int
    timed: int
    mini: int | None = None
    graphs: bool = False
    seed: int | None = None
    fresh: bool = False
    profiled: int = 3

    @property
    def is_curve(self) -> bool:
        """Whether the losses of the run are compared."""
        return self.seed is not None

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.warm + self.timed + self.profiled

    def tiny(self) -> Setting:
        """Return the setting with fewer pairs and steps."""
        return replace(
            self,
            batch=self.batch // TINY_PAIRS,
            mini=None if self.mini is None else self.mini // TINY_PAIRS,
            warm=max(1, self.warm // TINY_STEPS),
            timed=max(1, self.timed // TINY_STEPS),
        )


RUNS = {
    "splade": Setting("splade", 128, 10, 50),
    "splade-graphs": Setting("splade", 128, 250, 100, graphs=True),
    "colbert": Setting("colbert", 128, 10, 50),
    "colbert-graphs": Setting("colbert", 128, 250, 100, graphs=True),
    "splade-512": Setting("splade", 512, 5, 25),
    "splade-4096": Setting("splade", 4096, 2, 3, mini=512, profiled=1),
    "splade-4096-by-2048": Setting("splade", 4096, 2, 3, mini=2048, profiled=1),
    "splade-16384": Setting("splade", 16384, 1, 2, mini=1024, profiled=1),
}
RUNS |= {f"curve-{seed}": Setting("splade", 128, 10, 50, seed=seed) for seed in SEEDS}
RUNS |= {
    f"fresh-curve-{seed}": Setting("splade", 128, 10, 50, seed=seed, fresh=True) for seed in SEEDS
}
# what `--killed` trains
KILLED = ("splade", "decoder")
# sizes of that decoder, and with --tiny: hidden, layers, heads, heads of keys and intermediate
KILLED_DECODER = (1024, 16, 16, 8, 4096)
TINY_KILLED_DECODER = (64, 2, 4, 2, 128)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a process for each device, or train if this is one of them.

    Returns:
        The exit code.
    """
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if not is_rank():
        shutil.rmtree(options.output / "work", ignore_errors=True)
    if options.killed:
        return kill_and_resume(options)
    if not is_rank() and options.devices > 1:
        return run_ranks(
            [sys.executable, "-m", "benchmarks.train_scale", *sys.argv[1:]],
            options.devices,
        )
    with join_ranks(training=True) as rank:
        for name in options.run:
            setting = RUNS[name].tiny() if options.tiny else RUNS[name]
            try:
                row = measure(setting, options, name, rank)
                row.update(compare_with_one(name, row, options))
            except (RuntimeError, ValueError) as error:
                # all ranks raise it alike, and the other runs are measured
                traceback.print_exc()
                row = {"gate": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            if rank == 0:
                save({"run": name, "devices": options.devices, **row}, options)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
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
        nargs="?",
        const="splade",
        choices=KILLED,
        help="kill a rank of the command that trains this, and run it again (default: splade)",
    )
    parser.add_argument(
        "--resume-devices",
        type=int,
        help="devices of the command that resumes, by default those of the killed one",
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
        help="steps between losses of the log, except for curves",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for train_scale.csv and profiles",
    )
    parser.add_argument("--one", type=Path, help="folder of the rows of one device")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a WordPiece tokenizer, by default that of the packaged MiniLM",
    )
    return parser.parse_args(arguments)


def measure(setting: Setting, options: argparse.Namespace, name: str, rank: int) -> dict[str, Any]:
    """Train with a setting.

    Args:
        setting: the setting.
        options: the options of the command line.
        name: the name of the run.
        rank: the number of this process.

    Returns:
        On rank 0, the cells of the row. On other ranks, nothing.
    """
    from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
    from tilefold.recipes import train

    batch = setting.batch if setting.is_curve else setting.batch * options.devices
    work = options.output / "work"
    with first_rank_first():
        if setting.fresh:
            base = make_small_without_dropout(work / "small", options.tokenizer)
        elif setting.is_curve:
            base = make_minilm_without_dropout(work / "minilm")
        else:
            base = make_base(work / "base", setting.kind, options.tiny, options.tokenizer)
    log_steps = CURVE_LOG_STEPS if setting.is_curve else options.log_steps
    recipe = make_recipe(setting, base, batch, log_steps)
    # the same pairs on any number of devices
    if setting.is_curve:
        n_pairs = batch * STEPS_OF_PAIRS
    else:
        n_pairs = 2 * setting.batch * min(setting.steps, STEPS_OF_PAIRS)
    clock = Clock(setting, options.device == "cuda")
    capture = clock.count_captures(StepGraphs._capture_or_fall_back)
    with (
        mock.patch.object(StepGraphs, "_capture_or_fall_back", capture),
        mock.patch.object(StepGraphs, "__call__", clock.count_eager(StepGraphs.__call__)),
    ):
        pairs = make_collection(
            n_pairs,
            queries_from_documents=setting.is_curve,
            tokenizer_folder=options.tokenizer,
        )
        train(recipe, pairs, work / name, progress=clock)
    if rank != 0:
        return {}
    if clock.kernels:
        kernels_file = options.output / f"{name}-{options.devices}.txt"
        kernels_file.write_text("\n".join(clock.kernels) + "\n")
    log = (work / name / "training_log.jsonl").read_text().splitlines()
    return {
        "batch": batch,
        "mini_batch": setting.mini or "",
        "steps": setting.steps,
        "log": log_steps,
        **clock.cells(batch),
        "losses": " ".join(f"{json.loads(line)['loss']:.5g}" for line in log),
    }


def make_base(
    folder: Path,
    kind: str,
    tiny: bool,
    tokenizer_folder: Path | None = None,
) -> Path:
    """Save an untrained BERT with a tokenizer, unless it exists.

    Args:
        folder: begin of the folder's path. The kind follows.
        kind: ``"splade"`` or ``"colbert"``.
        tiny: whether the model is tiny.
        tokenizer_folder: folder of the tokenizer. None for that of the packaged MiniLM.

    Returns:
        The folder.
    """
    import torch
    import transformers

    folder = folder.with_name(f"{folder.name}-{kind}")
    if folder.exists():
        return folder
    hidden, layers, heads, intermediate = TINY if tiny else BASE
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForMaskedLM if kind == "splade" else transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)
    load_tokenizer(tokenizer_folder).save_pretrained(folder)
    return folder


def make_small_without_dropout(folder: Path, tokenizer_folder: Path | None) -> Path:
    """Save a BERT of MiniLM's width with two layers and no dropout, unless it exists.

    Args:
        folder: the folder of the model, which is returned.
        tokenizer_folder: folder of the tokenizer. None for that of the packaged MiniLM.
    """
    import torch
    import transformers

    if folder.exists():
        return folder
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForMaskedLM
    auto.from_config(config).save_pretrained(folder)
    load_tokenizer(tokenizer_folder).save_pretrained(folder)
    return folder


def make_minilm_without_dropout(folder: Path) -> Path:
    """Save the packaged MiniLM as a SPLADE model without dropout, unless it exists."""
    from tilefold.recipes.backbone import minilm_splade

    if not folder.exists():
        texts = made_pairs(load_tokenizer(None), 128, ragged=True)["document"]
        model = minilm_splade(texts)
        config = model[0].model.config
        config.hidden_dropout_prob = 0.0
        config.attention_probs_dropout_prob = 0.0
        model.save_pretrained(str(folder))
    return folder


def make_recipe(setting: Setting, base: Path, batch: int, log_steps: int) -> Any:
    """Return the recipe of a run, which saves nothing before its end.

    Args:
        setting: the run.
        base: the folder of the base model.
        batch: the pairs per step on all GPUs together.
        log_steps: steps between two losses of the log.
    """
    from tilefold.recipes import ColbertRecipe, get_recipe

    fields: dict[str, Any] = {
        "base_model": str(base),
        "max_steps": setting.steps,
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
        return ColbertRecipe(**fields)
    if setting.fresh:
        fields["learning_rate"] = FRESH_LEARNING_RATE
        return get_recipe(
            "splade",
            similarity_scale=SCALE / VOCAB_SIZE,
            query_regularizer=FRESH_PENALTY,
            document_regularizer=FRESH_PENALTY,
            **fields,
        )
    if setting.is_curve:
        return get_recipe("splade", **fields)
    return get_recipe(
        "splade",
        similarity_scale=SCALE / VOCAB_SIZE,
        query_regularizer=SCALE / VOCAB_SIZE,
        document_regularizer=SCALE / VOCAB_SIZE,
        **fields,
    )


def make_collection(
    count: int,
    *,
    queries_from_documents: bool = False,
    tokenizer_folder: Path | None = None,
) -> Any:
    """Make a collection of pairs of random words, with documents of different lengths.

    Args:
        count: the number of pairs.
        queries_from_documents: whether queries are words of their documents.
        tokenizer_folder: folder of the tokenizer that has the words. None for that of the packaged
            MiniLM.
    """
    from tilefold.retrieval.data.collection import Collection, Document

    pairs = made_pairs(load_tokenizer(tokenizer_folder), count, ragged=True)
    query_texts = pairs["query"]
    if queries_from_documents:
        # the first, fourth and seventh word
        query_texts = [" ".join(text.split()[:9:3]) for text in pairs["document"]]
    documents = {f"d{i}": Document(f"d{i}", "", text) for i, text in enumerate(pairs["document"])}
    queries = {f"q{i}": text for i, text in enumerate(query_texts)}
    judgements = {f"q{i}": {f"d{i}": 1} for i in range(count)}
    return Collection("made", documents, queries, {"train": judgements})


class Clock:
    """Measures the timed steps of a training, and profiles the steps after them.

    It is called after every step.

    Args:
        setting: the training.
        on_gpu: whether it runs on a GPU.

    Attributes:
        kernels: a line for each of the kernels that ran longest.
    """

    def __init__(self, setting: Setting, on_gpu: bool) -> None:
        """Prepare to time a training.

        Args:
            setting: how many steps are timed and profiled.
            on_gpu: whether the training runs on a GPU.
        """
        self.setting = setting
        self.on_gpu = on_gpu
        self.kernels: list[str] = []
        # when the timed steps began and ended, and when the profiled ones ended
        self._times: list[float] = []
        # ends of groups of timed steps: CUDA events, on a CPU seconds
        self._group_ends: list[Any] = []
        # when a graph was captured, and when a batch ran without one
        self._captures: list[float] = []
        self._eager_batches: list[float] = []
        self._gpu_cells: dict[str, Any] = {"peak_gib": 0.0, "reserved_gib": 0.0, "busy": ""}

    def __call__(self, step: int, steps: int, losses: object) -> None:
        """Note the time after a step.

        Args:
            step: the number of steps that have ended.
            steps: the number of all steps.
            losses: not used.
        """
        import torch

        first_timed = self.setting.warm
        last_timed = self.setting.warm + self.setting.timed
        if first_timed <= step <= last_timed and (step - first_timed) % GROUP_STEPS == 0:
            self._end_group()
        if step not in (first_timed, last_timed, steps):
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        self._times.append(time.perf_counter())
        if not self.on_gpu:
            return
        if step == first_timed:
            torch.cuda.reset_peak_memory_stats()
        elif step == last_timed:
            self._gpu_cells["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            self._gpu_cells["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            self._start_profile()
        else:
            self._end_profile()

    def _end_group(self) -> None:
        """Record when a group of steps ends: by an event on a GPU, else by the clock of the CPU."""
        import torch

        if not self.on_gpu:
            self._group_ends.append(time.perf_counter())
            return
        new_event: Any = torch.cuda.Event
        event = new_event(enable_timing=True)
        event.record()
        self._group_ends.append(event)

    def _start_profile(self) -> None:
        """Start the profiler."""
        import torch

        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA],
        )
        self._profiler.start()
        self._profile_start = time.perf_counter()

    def _end_profile(self) -> None:
        """Stop the profiler, and note for how long the GPU was busy, and the longest kernels."""
        self._profiler.stop()
        seconds = self._times[-1] - self._profile_start
        self._gpu_cells["busy"] = busy_seconds(self._profiler) / seconds
        longest_first = sorted(
            self._profiler.key_averages(),
            key=lambda event: -event.self_device_time_total,
        )
        for event in longest_first[:N_KERNELS]:
            milliseconds = event.self_device_time_total / 1e3 / self.setting.profiled
            launches = event.count / self.setting.profiled
            self.kernels.append(f"{milliseconds:9.3f} ms {launches:6.0f} x {event.key[:110]}")

    def cells(self, batch: int) -> dict[str, Any]:
        """Return the cells of the timed steps.

        The median of groups of steps is that of steps without captures, as a rule.

        Args:
            batch: the pairs per step on all GPUs together.
        """
        begin, end = self._times[:2]
        step_seconds = (end - begin) / self.setting.timed
        cells = {
            "step_ms": 1e3 * step_seconds,
            "pairs_per_s": batch / step_seconds,
            "captures": sum(begin < moment < end for moment in self._captures),
            "without_graph": sum(begin < moment < end for moment in self._eager_batches),
        }
        group_ms = []
        for group_begin, group_end in pairwise(self._group_ends):
            if self.on_gpu:
                group_ms.append(group_begin.elapsed_time(group_end) / GROUP_STEPS)
            else:
                group_ms.append(1e3 * (group_end - group_begin) / GROUP_STEPS)
        if group_ms:
            cells["median_ms"] = statistics.median(group_ms)
        return {**cells, **self._gpu_cells}

    def count_captures(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that captures a graph, so that captures are noted."""

        def capture_and_note(*arguments: Any) -> Any:
            self._captures.append(time.perf_counter())
            return capture(*arguments)

        return capture_and_note

    def count_eager(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that runs a batch as a graph, so that batches without one are noted.

        The method returns None for a batch that must run without a graph.
        """

        def run_and_note(*arguments: Any) -> Any:
            output = run(*arguments)
            if output is None:
                self._eager_batches.append(time.perf_counter())
            return output

        return run_and_note


def compare_with_one(
    name: str,
    row: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Compare a run with the same run on one device.

    Args:
        name: the name of the run.
        row: its row.
        options: the options of the command line.

    Returns:
        Cells with the ratio of rates, and for a curve its difference and the gate. Nothing if
        there are no rows of one device.
    """
    one_rows = rows_of_one_device(options.one, FILE)
    if "pairs_per_s" not in row or name not in one_rows:
        return {}
    one_row = one_rows[name]
    cells = compare_rates_and_curves(name, row, one_rows)
    if row.get("median_ms") and one_row.get("median_ms"):
        one_pairs_per_ms = float(one_row["batch"]) / float(one_row["median_ms"])
        cells["x_one_by_medians"] = row["batch"] / row["median_ms"] / one_pairs_per_ms
    return cells


def rows_of_one_device(folder: Path | None, file: str) -> dict[str, Mapping[str, str]]:
    """Return name -> row of the runs on one device that passed their gate.

    Args:
        folder: the folder of the results of one device; None if there are none.
        file: the name of the CSV file.
    """
    if folder is None or not (folder / file).is_file():
        return {}
    rows = read_csv(folder / file)
    return {row["run"]: row for row in rows if row["devices"] == "1" and row["gate"] == "ok"}


def compare_rates_and_curves(
    name: str,
    row: Mapping[str, Any],
    one_rows: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Compare the rate of a run, and its curve if it is one of several seeds, with one device.

    Args:
        name: the name of the run, such as ``"curve-0"`` for a curve of the seed 0.
        row: its row.
        one_rows: name -> row of one device, with `name`.
    """
    one_row = one_rows[name]
    cells: dict[str, Any] = {"x_one": row["pairs_per_s"] / float(one_row["pairs_per_s"])}
    curve, _, seed = name.rpartition("-")
    if curve.endswith("curve") and seed.isdigit():
        seed_curves = [
            losses_of(seed_row) for run, seed_row in one_rows.items() if run.startswith(f"{curve}-")
        ]
        cells.update(compare_curves(losses_of(row), losses_of(one_row), seed_curves))
    return cells


def losses_of(row: Mapping[str, Any]) -> list[float]:
    """Return the losses of the log of a row."""
    return [float(loss) for loss in row["losses"].split()]


def compare_curves(
    curve: Sequence[float],
    one_curve: Sequence[float],
    seed_curves: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Check that a curve differs no more from those of one device than another seed would.

    Args:
        curve: the losses of several devices.
        one_curve: the losses of one device with the same seed.
        seed_curves: the losses of one device with all seeds.

    Returns:
        Cells: relative differences, and the gate.
    """
    error = max(
        abs(loss - one_loss) / one_loss for loss, one_loss in zip(curve, one_curve, strict=True)
    )
    if len(seed_curves) < 2:
        gate = "the curves of one device must be of two seeds at least"
        return {"curve_error": error, "gate": gate}
    deviations = []
    differences = []
    for loss, *seed_losses in zip(curve, *seed_curves, strict=True):
        mean = statistics.mean(seed_losses)
        deviations.append(statistics.stdev(seed_losses) / mean)
        differences.append(abs(loss / mean - 1))
    # of the difference of one more seed and the mean of the others, pooled over the log
    variance = statistics.mean(deviation**2 for deviation in deviations)
    spread = math.sqrt(variance * (1 + 1 / len(seed_curves)))
    largest_difference = max(differences)
    gate = "ok"
    # a NaN is not within the spread
    if not largest_difference <= SIGMAS * spread:
        gate = f"{largest_difference:.2g} from seeds, whose next may be {spread:.2g}"
    return {
        "curve_error": error,
        "from_seeds": largest_difference,
        "spread_of_seeds": spread,
        "gate": gate,
    }


def kill_and_resume(options: argparse.Namespace) -> int:
    """Kill the second rank of a training, check how the command ends, and run it again.

    Args:
        options: the options of the command line.

    Returns:
        The exit code: 1 if the command did not report the signal, or did not resume.

    Raises:
        RuntimeError: if the command ended before its first checkpoint.
    """
    from tilefold.recipes.loading import newest_step

    work = options.output / "work"
    model_folder = work / "m"
    command = train_command(options, work, model_folder)
    killed = _kill_second_rank(
        [*command, "--devices", str(options.devices)],
        model_folder,
        error_file=work / "errors",
    )
    saved_step = newest_step(model_folder) or 0

    resume_devices = options.resume_devices or options.devices
    resume_command = [*command, "--devices", str(resume_devices), "--hours", "0.0005"]
    begin = time.perf_counter()
    resumed = subprocess.run(  # noqa: S603
        resume_command,
        capture_output=True,
        text=True,
        check=False,
    )
    resume_seconds = time.perf_counter() - begin
    resumed_step = newest_step(model_folder) or 0
    was_reported = killed.exit_code == 1 and "signal 9" in killed.message
    was_resumed = resumed_step > saved_step >= killed.first_step > 0
    passed = was_reported and was_resumed
    save(
        {
            "run": "killed" if options.killed == "splade" else f"killed-{options.killed}",
            "devices": options.devices,
            "seconds_to_first_checkpoint": killed.seconds_to_checkpoint,
            "seconds_to_end": killed.seconds_to_end,
            "code": killed.exit_code,
            "said": killed.message[-400:],
            "kept_step": saved_step,
            "again_devices": resume_devices,
            "again_seconds": resume_seconds,
            "again_step": resumed_step,
            "again_said": " ".join(resumed.stderr.split())[-200:],
            "gate": "ok" if passed else "failed",
        },
        options,
    )
    return 0 if passed else 1


@dataclass(frozen=True)
class KilledTraining:
    """How a training ended after its second rank was killed.

    Attributes:
        seconds_to_checkpoint: time until the first checkpoint.
        first_step: the step of this checkpoint.
        exit_code: the exit code of the command.
        seconds_to_end: time from the kill to the end of the command.
        message: the lines of the output with errors.
    """

    seconds_to_checkpoint: float
    first_step: int
    exit_code: int
    seconds_to_end: float
    message: str


def _kill_second_rank(
    command: Sequence[str],
    model_folder: Path,
    error_file: Path,
) -> KilledTraining:
    """Run a training, kill its second rank after the first checkpoint, and wait for the end.

    Args:
        command: the command of the training.
        model_folder: the folder of its model.
        error_file: the file for its output.

    Raises:
        RuntimeError: if the command ended before its first checkpoint.
    """
    from tilefold.recipes.loading import newest_step

    begin = time.perf_counter()
    with (
        error_file.open("wb") as log,
        subprocess.Popen(command, stderr=log) as process,  # noqa: S603
    ):
        while not newest_step(model_folder) and process.poll() is None:
            time.sleep(0.05)
        seconds_to_checkpoint = time.perf_counter() - begin
        if process.poll() is not None:
            raise RuntimeError(
                "the training must reach its first checkpoint, but it ended with code "
                f"{process.returncode}: {error_file.read_text(errors='replace')[-2000:]}",
            )
        first_step = newest_step(model_folder) or 0
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        begin = time.perf_counter()
        exit_code = process.wait()
        seconds_to_end = time.perf_counter() - begin
    lines = error_file.read_text(errors="replace").splitlines()
    message = " ".join(line for line in lines if "Error" in line)
    return KilledTraining(
        seconds_to_checkpoint,
        first_step,
        exit_code,
        seconds_to_end,
        message,
    )


def train_command(options: argparse.Namespace, work: Path, model_folder: Path) -> list[str]:
    """Make a collection and a base model, and return the command that trains on them.

    The number of devices is left to the caller.

    Args:
        options: the options of the command line.
        work: the folder for both.
        model_folder: the folder for the trained model.
    """
    pairs = make_collection(2048, tokenizer_folder=options.tokenizer)
    pairs.save_beir(work / "data", overwrite=True)
    if options.killed == "decoder":
        base = make_decoder_base(work / "base-decoder", options)
        recipe = "causal-splade"
        assignments = [
            "document.lora=null",
            "fsdp=true",
            "split_vocabulary=true",
            "gradient_checkpointing=true",
            "max_length=256",
        ]
    else:
        base = make_base(work / "base", "splade", options.tiny, options.tokenizer)
        recipe = "splade"
        assignments = []
    command = [sys.executable, "-m", "tilefold.cli", "train", "--recipe", recipe, "--json"]
    command += ["--model", str(base)]
    command += ["--data", str(work / "data")]
    command += ["--output", str(model_folder)]
    command += ["--batch-size", "16" if options.tiny else "256"]
    command += ["--steps", "100000"]
    command += ["--save-steps", "20"]
    command += ["--lr", "2e-5"]
    command += ["--regularizer", "1e-3"]
    for assignment in [f"similarity_scale={SCALE / VOCAB_SIZE}", *assignments]:
        command += ["--set", assignment]
    return command


def make_decoder_base(folder: Path, options: argparse.Namespace) -> Path:
    """Save a Llama of random weights with the tokenizer, and return the folder.

    Args:
        folder: the folder.
        options: the options of the command line.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = TINY_KILLED_DECODER if options.tiny else KILLED_DECODER
    hidden, layers, heads, key_heads, intermediate = sizes
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        network = LlamaForCausalLM(config)
    network.to(torch.bfloat16).save_pretrained(str(folder))
    load_tokenizer(options.tokenizer).save_pretrained(str(folder))
    return folder


def rank_of(parent: int, rank: int) -> int:
    """Return the id of the process of a rank.

    Args:
        parent: the id of the process that started it.
        rank: the number of the rank.

    Raises:
        RuntimeError: if there is no such process.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        # processes may end meanwhile
        with contextlib.suppress(OSError):
            is_child = f"PPid:\t{parent}\n" in (entry / "status").read_text()
            if not is_child:
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={rank}".encode() in variables:
                return int(entry.name)
    raise RuntimeError(f"process {parent} must have a rank {rank}, found none.")


def save(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a row, and write it to the results."""
    import torch

    row = {"gate": "ok", **row}
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()
    }
    print(json.dumps(rounded), flush=True)
    provenance = collect(torch.device(options.device))
    write_csv(options.output / FILE, [row], provenance, ("run", "devices"))


if __name__ == "__main__":
    sys.exit(main())
