"""A training on data of MS MARCO's size: seconds to the first step, memory of the host, and how
busy the GPU is.

    python -m benchmarks.train_size --folder size
    python -m benchmarks.train_size --folder size --steps 20 --device cpu --tiny --passages 100000 --queries 5000

`--folder` gets 8.8 million passages (``collection.tsv``), 500,000 queries, their judgements, and 40
million rows of negatives with the scores of four teachers (``scores.parquet``), all made, unless
they are there; 5 GB, in a minute or two. Then the recipe splade-v3 trains on them in a process of
its own, twice: with an empty cache, and with a filled one a tenth of the steps (20 at least). A row
has the seconds from the start of the process to the end of the first step (`first_step_s`; Python's
and torch's imports are among them), the most memory of the process by the kernel's count
(`host_gib`), pairs a second of the steps after the first tenth, and the mean utilisation of the GPU
then by ``nvidia-smi`` (the share of time in which a kernel ran). A loss that is not finite ends the
training with an error, and there is no row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train_data import load_tokenizer, words_of
from benchmarks.train_scale import make_base
from tilefold.bench.results import collect, write_csv

FILE = "train_size.csv"
NEGATIVES, TEACHERS = 80, 4
BATCH, DRAWN = 128, 8  # pairs of a step, and negatives of a pair
_AT_ONCE = 100_000  # lines
_START = "TILEFOLD_SIZE_START"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing, and train in two processes."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=8_841_823)
    parser.add_argument("--queries", type=int, default=502_939)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args(arguments)
    data = options.folder / "data"
    if _START in os.environ:
        train(options, data)
        return 0
    began = time.perf_counter()
    make(data, options.passages, options.queries)
    make_base(options.folder / "base", "splade", options.tiny)
    print(f"the data took {time.perf_counter() - began:.0f} s", flush=True)
    cache = options.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    for filled in (False, True):
        environment = os.environ | {_START: str(time.time()), "TILEFOLD_CACHE_DIR": str(cache)}
        given = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "benchmarks.train_size", *given]
        command += ["--steps", str(max(20, options.steps // 10))] * filled
        found = subprocess.run(  # noqa: S603
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = {"run": "cached" if filled else "first", **json.loads(found.stdout.splitlines()[-1])}
        print(json.dumps(row), flush=True)
        import torch

        write_csv(
            options.output / FILE,
            [row],
            collect(torch.device(options.device)),
            ("run", "passages"),
        )
    return 0


def make(folder: Path, passages: int, queries: int) -> None:
    """The collection in MS MARCO's own files."""
    if (folder / "scores.parquet").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    words = np.array(words_of(load_tokenizer(None)))
    pieces = [
        " ".join(words[chance.integers(len(words), size=size)])
        for size in chance.integers(8, 28, 20_000)
    ]
    _write(folder / "collection.tsv", _texts(pieces, chance, passages, 3))  # 54 words
    _write(
        folder / "queries.train.tsv",
        _texts([piece[:40] for piece in pieces], chance, queries, 1),
    )
    relevant = chance.integers(passages, size=queries)
    lines = (f"{query}\t0\t{document}\t1\n" for query, document in enumerate(relevant.tolist()))
    _write(folder / "qrels.train.tsv", lines)
    _write_scores(folder / "scores.parquet", relevant, passages, chance)


def _texts(pieces: list[str], chance: np.random.Generator, count: int, parts: int) -> Iterator[str]:
    for low in range(0, count, _AT_ONCE):
        chosen = chance.integers(len(pieces), size=(min(_AT_ONCE, count - low), parts)).tolist()
        yield from (
            f"{low + i}\t{' '.join(pieces[at] for at in row)} {low + i}\n"
            for i, row in enumerate(chosen)
        )


def _write(file: Path, lines: Iterator[str]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(lines)


def _write_scores(file: Path, relevant: Any, passages: int, chance: np.random.Generator) -> None:
    """Of each query, its relevant document and :data:`NEGATIVES` others, in a table as `tilefold
    score` writes it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    teachers = [f"score:teacher{number}" for number in range(TEACHERS)]
    fields = [
        ("query_id", pa.string()),
        ("document_id", pa.string()),
        ("rank", pa.int32()),
        ("score", pa.float32()),
    ]
    fields += [
        ("relevant", pa.bool_()),
        ("retriever_score", pa.float32()),
        *((name, pa.float32()) for name in teachers),
    ]
    schema, rows = pa.schema(fields), NEGATIVES + 1
    with pq.ParquetWriter(file.with_suffix(".part"), schema) as writer:
        for low in range(0, len(relevant), 5000):
            part = relevant[low : low + 5000]
            step = 1 + chance.integers(passages // rows - 1, size=len(part))
            documents = (
                part[:, None] + step[:, None] * np.arange(rows)
            ) % passages  # the first one is relevant
            count = len(part) * rows
            numbers = [pa.array(chance.random(count, np.float32)) for _ in range(2 + TEACHERS)]
            columns = [
                pa.array(np.repeat(np.arange(low, low + len(part)), rows)).cast(pa.string()),
                pa.array(documents.ravel()).cast(pa.string()),
                pa.array(np.tile(np.arange(1, rows + 1, dtype=np.int32), len(part))),
                numbers[0],
                pa.array(np.tile(np.arange(rows) == 0, len(part))),
                *numbers[1:],
            ]
            writer.write_table(pa.table(columns, schema=schema))
    file.with_suffix(".part").replace(file)


def train(options: argparse.Namespace, data: Path) -> None:
    """Train, and print the row."""
    from tilefold.cli.train import STORED
    from tilefold.recipes import get_recipe
    from tilefold.recipes import train as run
    from tilefold.retrieval import load_collection
    from tilefold.retrieval.training_rows import RowsAhead

    rows = RowsAhead(data / "scores.parquet")  # as `tilefold train` does
    collection = load_collection(data, stored=STORED)
    warm, times = options.steps // 10, list[float]()
    busy: Any = None

    def progress(step: int, steps: int, losses: object) -> None:
        nonlocal busy
        import torch

        if step in (1, warm, steps):
            if options.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.time())
        if step == warm and options.device == "cuda":
            one = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # else the mean is of all GPUs of the machine
            command = [
                "nvidia-smi",
                one,
                "--query-gpu=utilization.gpu",
                "--format=csv,noheader,nounits",
                "-lms",
                "500",
            ]
            busy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603

    base = make_base(options.folder / "base", "splade", options.tiny)
    settings = {"base_model": str(base), "max_steps": options.steps, "negatives": DRAWN}
    settings |= {
        "max_length": 16 if options.tiny else 128,
        "batch_size": 2 if options.tiny else BATCH,
    }
    settings |= {"save_steps": 10**6, "save_minutes": 1e6}  # at the end alone
    recipe = get_recipe("splade-v3", **settings)
    run(
        recipe,
        collection,
        options.folder / "model",
        negatives=rows,
        progress=progress,
        resume=False,
        overwrite=True,
    )
    row = {"passages": options.passages, "queries": options.queries, "steps": options.steps}
    if busy is not None:
        busy.terminate()
        shares = [int(line) for line in busy.communicate()[0].split()]
        row["gpu_busy"] = sum(shares) / max(1, len(shares)) / 100
    row |= {
        "first_step_s": times[0] - float(os.environ[_START]),
        "pairs_per_s": recipe.batch_size * (options.steps - warm) / (times[2] - times[1]),
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "gate": "ok",
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
