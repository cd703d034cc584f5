"""Requests a second, and how long they take: tilefold serve beside sentence-transformers behind the
same route.

    python -m benchmarks.serve_load --model FOLDER [--clients 1 --clients 8] [--seconds 8] [--device cuda]

Each client sends a query of pydocs to /embed_sparse on one connection, waits for the answer, and
sends the next. The servers run one after the other, in processes of their own; the clients share
the cores with them. Requests go to the loopback address only, for `--seconds` per row after a
second of warm-up, and everything ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_clients import Measured, load, server
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.retrieval import load_collection

CSV_KEY = ("server", "clients", "texts")
PATH = "/embed_sparse"


def main(argv: Sequence[str]) -> int:
    """Measure every server with every number of clients; print and save the rows."""
    options = parse(argv)
    queries = list(load_collection("pydocs").queries.values())[:512]
    bodies = [
        {"inputs": queries[at : at + options.texts]} for at in range(len(queries) - options.texts)
    ]
    serve = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    peer = ["-m", "benchmarks.serve_peer", "--model", options.model, "--device", options.device]
    servers = {"tilefold": serve, "stock": peer, "stock, one thread": [*peer, "--one-thread"]}
    provenance, rows = collect(torch.device(options.device)), []
    for name, command in servers.items():
        if name not in (options.server or servers):
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            server(command, Path(folder) / "log") as (port, _),
        ):
            for clients in options.clients or (1, 8, 64, 256):
                asyncio.run(load(port, PATH, bodies, min(clients, 8), 1.0))  # warm
                found = asyncio.run(load(port, PATH, bodies, clients, options.seconds))
                rows.append(row(name, clients, options.texts, found))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.output is not None:
        target = results_file(options.output, "serve_load", provenance)
        write_csv(target, rows, provenance, CSV_KEY)
        print(f"saved to {target}")
    return 0


def row(name: str, clients: int, texts: int, found: Measured) -> dict[str, Any]:
    """What a table shows of some seconds of load."""
    return {
        "server": name,
        "clients": clients,
        "texts": texts,
        "requests_s": round(found.rate, 1),
        "p50_ms": round(found.quantile(0.5), 1),
        "p99_ms": round(found.quantile(0.99), 1),
        "refused": found.refused,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
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
