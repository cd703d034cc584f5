r"""Time requests to tilefold serve, and to sentence-transformers behind the same route.

    python -m benchmarks.serve_load --model FOLDER [--clients 1 --clients 8] [--seconds 8] \
        [--device cuda]

Timed: each client sends a query of pydocs to /embed_sparse on one connection, waits for the answer,
and sends the next, for `--seconds` per row after a second of warm-up. A row has requests per second
and the time of a request. Requests go to the loopback address only. The servers run one after the
other, in processes of their own, and share the cores with the clients.

Baseline: the stock model behind the same FastAPI route (``serve_peer``), with calls in a pool of
threads, and one at a time.

Gate: answers with another code than 200 are counted as refused, and have no time. Their contents
are compared in ``serve_soak``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_clients import Measured, load, server
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.retrieval import load_collection

CSV_KEY = ("server", "clients", "texts")
PATH = "/embed_sparse"
N_QUERIES = 512
DEFAULT_CLIENTS = (1, 8, 64, 256)
WARMUP_SECONDS = 1.0
WARMUP_CLIENTS = 8


def main(argv: Sequence[str]) -> int:
    """Measure every server with every number of clients, print and save the rows."""
    options = parse(argv)
    queries = list(load_collection("pydocs").queries.values())[:N_QUERIES]
    bodies = [
        {"inputs": queries[start : start + options.texts]}
        for start in range(len(queries) - options.texts)
    ]
    provenance = collect(torch.device(options.device))
    rows: list[dict[str, Any]] = []
    for name, command in commands(options).items():
        if options.server and name not in options.server:
            continue
        for cells in measure_server(name, command, bodies, options):
            rows.append(cells)
            print("  ".join(f"{key} {value}" for key, value in cells.items()), flush=True)
    if options.output is not None:
        target = results_file(options.output, "serve_load", provenance)
        write_csv(target, rows, provenance, CSV_KEY)
        print(f"saved to {target}")
    return 0


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the arguments of Python that start each server, by its name in the results."""
    tilefold = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    stock = ["-m", "benchmarks.serve_peer", "--model", options.model, "--device", options.device]
    return {
        "tilefold": tilefold,
        "stock": stock,
        "stock, one thread": [*stock, "--one-thread"],
    }


def measure_server(
    name: str,
    command: Sequence[str],
    bodies: Sequence[Any],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Start a server, and yield a row for each number of clients.

    Args:
        name: the name of the server in the results.
        command: arguments of Python that start it.
        bodies: JSON bodies of the requests.
        options: the options of the command line.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        server(command, Path(folder) / "log") as (port, _),
    ):
        for clients in options.clients or DEFAULT_CLIENTS:
            warm_clients = min(clients, WARMUP_CLIENTS)
            asyncio.run(load(port, PATH, bodies, warm_clients, WARMUP_SECONDS))
            measured = asyncio.run(load(port, PATH, bodies, clients, options.seconds))
            yield row(name, clients, options.texts, measured)


def row(name: str, clients: int, texts: int, measured: Measured) -> dict[str, Any]:
    """Return a row of the results.

    Args:
        name: the name of the server.
        clients: the number of clients.
        texts: the texts per request.
        measured: the answers that they received.
    """
    return {
        "server": name,
        "clients": clients,
        "texts": texts,
        "requests_s": round(measured.rate, 1),
        "p50_ms": round(measured.quantile(0.5), 1),
        "p99_ms": round(measured.quantile(0.99), 1),
        "refused": measured.refused,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of a SparseEncoder")
    parser.add_argument(
        "--clients",
        type=int,
        action="append",
        help="may be repeated; by default 1, 8, 64, 256",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of load per row")
    parser.add_argument(
        "--server",
        action="append",
        help="tilefold, stock, or stock, one thread; by default all",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="of stock; tilefold serve takes the GPU where there is one",
    )
    parser.add_argument("--texts", type=int, default=1, help="per request")
    parser.add_argument("--output", type=Path, help="folder of results, such as benchmarks/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
