"""Encode the same texts to Parquet with one GPU and with several, in turns, and compare the files
byte by byte.

    python -m benchmarks.encode_two_gpus --output results

A process for each GPU (`--devices`) encodes as `tilefold encode --devices` does; while one GPU is
timed the others wait. Model and texts are those of `benchmarks.encode`. The first turn of each
warms up on few texts, the best of the others counts, and one more turn is watched by torch's
profiler for how busy each GPU is. Nothing is printed as a result unless all files are equal. About
a minute on H200s. `--device cpu --case tiny-cpu --texts 256` shows that it runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilefold.distributed.ranks import is_rank, join_ranks, run_ranks


def main() -> int:
    """Start the ranks; each of them comes here again."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder for encode_two_gpus.csv")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--case", default="bert-base", help="a case of benchmarks.encode")
    parser.add_argument("--texts", type=int, default=65536)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    if not is_rank():
        return run_ranks(
            [sys.executable, "-m", "benchmarks.encode_two_gpus", *sys.argv[1:]],
            options.devices,
        )
    with join_ranks() as rank:
        return measure(options, rank)


def measure(options: argparse.Namespace, rank: int) -> int:
    """All turns; 0 if the files were equal."""
    import torch
    import torch.distributed as dist

    from benchmarks.encode_data import CASES, make_model, make_texts, read_model
    from tilefold.bench.spec import DTYPES
    from tilefold.integrations.sentence_transformers import accelerate

    clock = Clock(rank)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    case = next(case for case in CASES if case.name == options.case)
    case = replace(case, numbers={**case.numbers, "texts": options.texts})
    strings = make_texts(options.texts)
    texts = {f"d{i}": text for i, text in enumerate(strings)}
    home = Path(_told_to_all(tempfile.mkdtemp(prefix="tilefold-two-gpus-") if rank == 0 else ""))
    try:
        folder = home / "model"
        if rank == 0:
            folder.mkdir()
            model = make_model(case, strings, folder, device)
        dist.barrier()
        if rank:
            model = read_model(folder, device).to(DTYPES[case.numbers["dtype"]])
        share_weights(model)
        accelerate(model)
        model.eval()
        clock.say("models are ready")
        few = dict(list(texts.items())[: max(16, options.texts // 16)])
        turn(model, few, home / f"warm-{rank}", None)
        turn(model, few, home / "warm", "world")
        clock.say("warm")
        seconds: dict[str, list[float]] = {"one": [], "all": []}
        for number in range(options.turns):
            dist.barrier()
            if rank == 0:
                seconds["one"].append(turn(model, texts, home / f"one-{number}", None))
            dist.barrier()
            seconds["all"].append(turn(model, texts, home / f"all-{number}", "world"))
            clock.say(f"turn {number + 1}")
        busy = watched(model, texts, home / "watched", device)
        folders = sorted(path for path in home.iterdir() if path.name.startswith(("one-", "all-")))
        code = report(options, seconds, busy, folders) if rank == 0 else 0
        dist.barrier()
        return code
    finally:
        if rank == 0:
            shutil.rmtree(home, ignore_errors=True)


class Clock:
    """Says on the first rank what is done, and after how many seconds."""

    def __init__(self, rank: int) -> None:
        self.rank, self.start = rank, time.perf_counter()

    def say(self, what: str) -> None:
        """To stderr."""
        if self.rank == 0:
            print(f"{time.perf_counter() - self.start:5.1f} s: {what}", file=sys.stderr, flush=True)


def _told_to_all(text: str) -> str:
    import torch
    import torch.distributed as dist

    told = torch.zeros(256, dtype=torch.uint8)
    told[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.broadcast(told, 0)
    return bytes(told.tolist()).rstrip(b"\0").decode()


def share_weights(model: Any) -> None:
    """The first rank's weights on all."""
    import torch
    import torch.distributed as dist

    for tensor in model.state_dict().values():
        sent = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(sent, 0)
        tensor.copy_(sent.view(tensor.dtype).reshape(tensor.shape))


def turn(model: Any, texts: Mapping[str, str], folder: Path, group: object) -> float:
    """Seconds of one encoding."""
    from tilefold.retrieval import encode_collection

    start = time.perf_counter()
    encode_collection(model, texts, folder, group=group)
    return time.perf_counter() - start


def watched(model: Any, texts: Mapping[str, str], folder: Path, device: Any) -> list[float]:
    """The share of an encoding by all in which each GPU was busy; empty on a CPU."""
    import torch
    import torch.distributed as dist

    from benchmarks.encode import busy_share

    mine = busy_share(lambda: turn(model, texts, folder, "world"), device)
    shares = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    shares[dist.get_rank()] = -1.0 if mine is None else mine
    dist.all_reduce(shares)
    return [] if mine is None else shares.tolist()


def report(
    options: argparse.Namespace,
    seconds: dict[str, list[float]],
    busy: list[float],
    folders: list[Path],
) -> int:
    """Print and write the rows, if all files are equal."""
    import torch

    from tilefold.bench.results import collect, write_csv

    problem = difference(folders)
    if problem:
        print(f"gate: {problem}; nothing counts", file=sys.stderr)
        return 1
    best = {what: min(times) for what, times in seconds.items()}
    rows: list[dict[str, object]] = []
    for what, count in (("one", 1), ("all", options.devices)):
        row: dict[str, object] = {"case": options.case, "devices": count, "texts": options.texts}
        row |= {
            "seconds": best[what],
            "docs_per_s": options.texts / best[what],
            "x_one": best["one"] / best[what],
        }
        row |= {"gpu_busy": " ".join(f"{share:.3f}" for share in busy)} if what == "all" else {}
        row |= {"turns": " ".join(f"{value:.2f}" for value in seconds[what]), "gate": "ok"}
        rows.append({"gpu_busy": "", **row})
        print(
            f"{count} x {options.case}: {options.texts / best[what]:,.0f} documents/s, "
            f"{row['x_one']:.2f} times one; "
            f"turns {row['turns']} s; GPU busy {row.get('gpu_busy') or '-'}",
        )
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        provenance = collect(torch.device(options.device))
        write_csv(options.output / "encode_two_gpus.csv", rows, provenance, ("case", "devices"))
    return 0


def difference(folders: list[Path]) -> str:
    """What is not equal in folders of vectors, in words; empty if nothing."""
    first, *others = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders
    )
    for other, folder in zip(others, folders[1:], strict=True):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return f"{folder.name} differs from {folders[0].name} in {len(names)} file(s), {sorted(names)[0]} first"
    return ""


if __name__ == "__main__":
    sys.exit(main())
