"""Time encoding to Parquet with one GPU and with several, in turns.

    python -m benchmarks.encode_two_gpus --output results

Timed: a process for each GPU (`--devices`) encodes as `tilefold encode --devices` does, with the
model and texts of `benchmarks.encode`. The first turn of each warms up on few texts, and the best
of the others counts. In one more turn, torch's profiler measures how busy each GPU is.

Baseline: one GPU, while the others wait.

Gate: the files of all turns must be equal byte by byte. Otherwise no result is printed.

About a minute on H200s. `--device cpu --case tiny-cpu --texts 256` shows that it runs.
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
    """Start a process for each device, or encode if this is one of them.

    Returns:
        The exit code.
    """
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


# share of the texts that warm up, and the fewest
WARMUP_SHARE = 1 / 16
FEWEST_WARMUP_TEXTS = 16
# bytes of a path that rank 0 sends
MAX_PATH_BYTES = 256


def measure(options: argparse.Namespace, rank: int) -> int:
    """Encode in turns with one rank and with all.

    Args:
        options: the options of the command line.
        rank: the number of this process.

    Returns:
        The exit code: 1 if files differ.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.encode_data import make_texts

    log = ProgressLog(rank)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    strings = make_texts(options.texts)
    texts = {f"d{i}": text for i, text in enumerate(strings)}
    folder = shared_folder(rank)
    try:
        model = load_model(options, strings, folder / "model", device, rank)
        log.print("models are ready")
        n_warmup = max(FEWEST_WARMUP_TEXTS, int(options.texts * WARMUP_SHARE))
        warmup_texts = dict(list(texts.items())[:n_warmup])
        time_encoding(model, warmup_texts, folder / f"warm-{rank}", group=None)
        time_encoding(model, warmup_texts, folder / "warm", group="world")
        log.print("warm")
        one_seconds: list[float] = []
        all_seconds: list[float] = []
        output_folders: list[Path] = []
        for turn in range(options.turns):
            one_folder = folder / f"one-{turn}"
            all_folder = folder / f"all-{turn}"
            output_folders += [one_folder, all_folder]
            dist.barrier()
            if rank == 0:
                one_seconds.append(time_encoding(model, texts, one_folder, group=None))
            dist.barrier()
            all_seconds.append(time_encoding(model, texts, all_folder, group="world"))
            log.print(f"turn {turn + 1}")
        busy = busy_shares(model, texts, folder / "watched", device)
        exit_code = 0
        if rank == 0:
            exit_code = report(options, one_seconds, all_seconds, busy, sorted(output_folders))
        dist.barrier()
        return exit_code
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


class ProgressLog:
    """Prints progress messages with the elapsed seconds, on rank 0.

    Args:
        rank: the number of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.start = time.perf_counter()

    def print(self, message: str) -> None:
        """Print a message on stderr, on rank 0."""
        if self.rank == 0:
            seconds = time.perf_counter() - self.start
            print(f"{seconds:5.1f} s: {message}", file=sys.stderr, flush=True)


def shared_folder(rank: int) -> Path:
    """Create a temporary folder on rank 0, and return its path on all ranks."""
    import torch
    import torch.distributed as dist

    path_bytes = torch.zeros(MAX_PATH_BYTES, dtype=torch.uint8)
    if rank == 0:
        path = tempfile.mkdtemp(prefix="tilefold-two-gpus-").encode()
        path_bytes[: len(path)] = torch.tensor(list(path), dtype=torch.uint8)
    dist.broadcast(path_bytes, 0)
    return Path(bytes(path_bytes.tolist()).rstrip(b"\0").decode())


def load_model(
    options: argparse.Namespace,
    texts: list[str],
    folder: Path,
    device: Any,
    rank: int,
) -> Any:
    """Make the model on rank 0, and load it on all ranks with the same weights.

    Args:
        options: the options of the command line.
        texts: the decoder's bias is chosen on the first of these.
        folder: the folder for the model's files, which does not exist.
        device: the torch device of this rank.
        rank: the number of this process.

    Returns:
        The accelerated model.
    """
    import torch.distributed as dist

    from benchmarks.encode_data import CASES, make_model, read_model
    from tilefold.bench.spec import DTYPES
    from tilefold.integrations.sentence_transformers import accelerate

    case = next(case for case in CASES if case.name == options.case)
    case = replace(case, numbers={**case.numbers, "texts": options.texts})
    if rank == 0:
        folder.mkdir()
        model = make_model(case, texts, folder, device)
    dist.barrier()
    if rank != 0:
        model = read_model(folder, device).to(DTYPES[case.numbers["dtype"]])
    broadcast_weights(model)
    accelerate(model)
    model.eval()
    return model


def broadcast_weights(model: Any) -> None:
    """Copy the weights of rank 0 to all ranks."""
    import torch
    import torch.distributed as dist

    for tensor in model.state_dict().values():
        # as bytes: gloo does not send all dtypes
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(data, 0)
        tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def time_encoding(model: Any, texts: Mapping[str, str], folder: Path, group: object) -> float:
    """Encode texts to Parquet, and return the seconds.

    Args:
        model: the model.
        texts: texts by id.
        folder: the folder for the vectors.
        group: ``"world"`` to divide the texts among all ranks, None to encode them here.
    """
    from tilefold.retrieval import encode_collection

    start = time.perf_counter()
    encode_collection(model, texts, folder, group=group)
    return time.perf_counter() - start


def busy_shares(model: Any, texts: Mapping[str, str], folder: Path, device: Any) -> list[float]:
    """Encode texts with all ranks, and return the share of the time that each GPU is busy.

    Args:
        model: an accelerated model.
        texts: texts by id.
        folder: folder for the vectors.
        device: the device of this rank.

    Returns:
        A share for each rank, or an empty list on a CPU.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.encode import busy_share

    share = busy_share(lambda: time_encoding(model, texts, folder, "world"), device)
    shares = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    shares[dist.get_rank()] = -1.0 if share is None else share
    dist.all_reduce(shares)
    return [] if share is None else shares.tolist()


def report(
    options: argparse.Namespace,
    one_seconds: list[float],
    all_seconds: list[float],
    busy: list[float],
    folders: list[Path],
) -> int:
    """Print and write the rows, if all files are equal.

    Args:
        options: the options of the command line.
        one_seconds: the times with one device.
        all_seconds: the times with all devices.
        busy: the share of the time that each GPU is busy.
        folders: the vectors of all turns.

    Returns:
        The exit code: 1 if files differ.
    """
    import torch

    from tilefold.bench.results import collect, write_csv

    error = compare_folders(folders)
    if error:
        print(f"gate: {error}; nothing counts", file=sys.stderr)
        return 1
    shares = " ".join(f"{share:.3f}" for share in busy)
    rows: list[dict[str, object]] = []
    for n_devices, seconds, gpu_busy in (
        (1, one_seconds, ""),
        (options.devices, all_seconds, shares),
    ):
        rate = options.texts / min(seconds)
        speedup = min(one_seconds) / min(seconds)
        turns = " ".join(f"{value:.2f}" for value in seconds)
        rows.append(
            {
                "gpu_busy": gpu_busy,
                "case": options.case,
                "devices": n_devices,
                "texts": options.texts,
                "seconds": min(seconds),
                "docs_per_s": rate,
                "x_one": speedup,
                "turns": turns,
                "gate": "ok",
            },
        )
        print(
            f"{n_devices} x {options.case}: {rate:,.0f} documents/s, {speedup:.2f} times one; "
            f"turns {turns} s; GPU busy {gpu_busy or '-'}",
        )
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        provenance = collect(torch.device(options.device))
        write_csv(options.output / "encode_two_gpus.csv", rows, provenance, ("case", "devices"))
    return 0


def compare_folders(folders: list[Path]) -> str:
    """Compare the files of folders of vectors.

    Returns:
        The first difference in words, or ``""`` if all are equal.
    """
    first_folder, *other_folders = folders
    first_files = {file.name: file.read_bytes() for file in first_folder.iterdir()}
    for folder in other_folders:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        names = sorted(
            name
            for name in first_files.keys() | files.keys()
            if first_files.get(name) != files.get(name)
        )
        if names:
            return (
                f"{folder.name} differs from {first_folder.name} in {len(names)} file(s), "
                f"{names[0]} first"
            )
    return ""


if __name__ == "__main__":
    sys.exit(main())
