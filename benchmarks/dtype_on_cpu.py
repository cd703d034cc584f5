"""CPU time of encoding in fp32 and in bf16, by the instructions that a CPU has.

    python -m benchmarks.dtype_on_cpu --output results.csv

Timed: ``encode_document`` of an accelerated, untrained SPLADE model with the weights of MiniLM, and
its trunk alone. Each pair encodes the same texts in fp32 and in bf16, one after the other, on one
thread. ``speed_up`` is the median over the pairs of the CPU time in fp32 divided by that in bf16.
Each set of instructions is a process of its own: ``ONEDNN_MAX_CPU_ISA`` limits those of oneDNN, and
``ATEN_CPU_CAPABILITY`` those of torch.

Gate: the vectors in bf16 are within 10% of those in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilefold._internal.precision import Dtype
from tilefold.bench.results import collect, write_csv
from tilefold.integrations.sentence_transformers import accelerate, set_precision
from tilefold.recipes.backbone import minilm_splade
from tilefold.testing import relative_error

# name of a set of instructions -> environment variables that limit a process to it
INSTRUCTIONS = {
    "all of this CPU": {},
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
N_TEXTS = 16
WORDS_PER_TEXT = 100
N_PAIRS = 7
MAX_ERROR = 0.1


@dataclass(frozen=True)
class DtypeRow:
    """A row of the results.

    Attributes:
        instructions: the set of instructions.
        part: what is timed.
        fp32_ms: median CPU time in fp32, in milliseconds per text.
        bf16_ms: median CPU time in bf16, in milliseconds per text.
        speed_up: median over pairs of the time in fp32 divided by that in bf16.
        error: relative error of the vectors in bf16 against those in fp32.
    """

    instructions: str
    part: str
    fp32_ms: float
    bf16_ms: float
    speed_up: float
    error: float


def measure(instructions: str) -> list[DtypeRow]:
    """Time the model and its trunk in both dtypes, in this process.

    Args:
        instructions: the name of the set of instructions, for the rows.
    """
    torch.set_num_threads(1)
    words = ["read", "write", "file", "line", "list", "sort", "text", "number"]
    texts = [
        " ".join(words[(number + position) % len(words)] for position in range(WORDS_PER_TEXT))
        for number in range(N_TEXTS)
    ]
    model = minilm_splade(texts, device="cpu")
    accelerate(model)

    def encode_texts() -> torch.Tensor:
        vectors: torch.Tensor = model.encode_document(texts, convert_to_sparse_tensor=False)
        return vectors.to_dense()

    token_ids = model.tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
    trunk = torch.nn.Sequential(model[0].model.base_model)

    @torch.inference_mode()
    def run_trunk() -> torch.Tensor:
        hidden: torch.Tensor = trunk(token_ids).last_hidden_state
        return hidden

    return [
        _compare(instructions, "encode_document", model, encode_texts),
        _compare(instructions, "trunk", trunk, run_trunk),
    ]


def _compare(
    instructions: str,
    part: str,
    model: Any,
    run: Callable[[], torch.Tensor],
) -> DtypeRow:
    """Time pairs of calls in fp32 and bf16.

    Args:
        instructions: the name of the set of instructions.
        part: the name of what is timed.
        model: the model whose dtype is set.
        run: encodes all texts.
    """

    def timed(dtype: Dtype) -> tuple[float, torch.Tensor]:
        set_precision(model, dtype)
        started = time.process_time()
        result = run()
        return time.process_time() - started, result

    _, in_fp32 = timed("fp32")  # also a warm-up
    _, in_bf16 = timed("bf16")
    error = relative_error(in_bf16.double(), in_fp32.double())
    if error > MAX_ERROR:
        raise SystemExit(f"{part}: the error of bf16 is {error:.3g}, expected at most {MAX_ERROR}")
    pairs = [(timed("fp32")[0], timed("bf16")[0]) for _ in range(N_PAIRS)]
    milliseconds_per_text = 1000 / N_TEXTS
    return DtypeRow(
        instructions=instructions,
        part=part,
        fp32_ms=round(statistics.median(fp32 for fp32, _ in pairs) * milliseconds_per_text, 2),
        bf16_ms=round(statistics.median(bf16 for _, bf16 in pairs) * milliseconds_per_text, 2),
        speed_up=round(statistics.median(fp32 / bf16 for fp32, bf16 in pairs), 2),
        error=round(error, 5),
    )


def main() -> None:
    """Measure every set of instructions in a process of its own, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--only", choices=INSTRUCTIONS, help="only this set of instructions")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        print(json.dumps([asdict(row) for row in measure(arguments.only)]))
        return
    torch.set_num_threads(1)  # as in the measured processes
    for instructions, limits in INSTRUCTIONS.items():
        if arguments.only not in (None, instructions):
            continue
        command = ["-m", "benchmarks.dtype_on_cpu", "--in-this-process", "--only", instructions]
        process = subprocess.run(  # noqa: S603
            [sys.executable, *command],
            env={**os.environ, **limits},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows = json.loads(process.stdout.splitlines()[-1])
        for row in rows:
            print(row, flush=True)
        if arguments.output is not None:
            provenance = collect(torch.device("cpu"))
            write_csv(arguments.output, rows, provenance, ("instructions", "part"))


if __name__ == "__main__":
    main()
