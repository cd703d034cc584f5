"""Minutes of mixed load with bad input: does a server of tilefold keep its memory, its answers and
its life?

    python -m benchmarks.serve_soak --model FOLDER --minutes 30 [--clients 8] [--connections 10000] [--output FOLDER]

Good clients send one to four queries of pydocs and expect the vectors that each query has alone, up
to rounding; a 429 counts as refused, anything else as lost. Beside them (`serve_bad.py`) others
send bodies that are too large (declared, sent, and chunked without end), are no JSON, are nested
50,000 deep, are Latin-1 or UTF-16, have wrong fields or another content type; send half a head,
half a body, or a byte each half second; read nothing of their answer; leave while their inputs
wait. Each expects its code, or a closed connection. In between, `--connections` are opened, in
waves of 2,000: each must be kept, or be answered with 429. Loopback only; it ends by itself.

It fails if something was lost, if the server died, or if memory is not flat. Flat: the median of
the last third of the time is at most 5% above that of the second third (in the first the server
warms up).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import serve_bad
from benchmarks.serve_bad import PATH, PATIENCE, Seen
from benchmarks.serve_clients import HOST, LONGEST_SECONDS, answer, request, server
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.retrieval import load_collection

CSV_KEY = ("minute",)
GROWTH = 0.05
COMPARED = 8  # heaviest terms of a query
IDLE_SECONDS = 10.0  # the server closes a connection after 15 without a request
Vector = dict[int, float]


@dataclass
class Watched:
    """What was seen each two seconds: seconds since the start, bytes of memory, answers and bad
    input so far.
    """

    rows: list[tuple[float, int, Seen]] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """MiB in the second third of the time and in the last."""
        end = self.rows[-1][0]
        thirds = [
            [memory for at, memory, _ in self.rows if low <= at / end <= low + 1 / 3]
            for low in (1 / 3, 2 / 3)
        ]
        second, last = (statistics.median(third or [self.rows[-1][1]]) / 2**20 for third in thirds)
        return second, last

    def minutes(self) -> list[dict[str, Any]]:
        """A row per minute, with the memory at its end and what came in it."""
        rows, before = [], Counter[str]()
        for minute in range(1, int(self.rows[-1][0] / 60) + 1):
            _, memory, seen = next(row for row in self.rows if row[0] >= 60 * minute)
            counts = {name: seen[name] - before[name] for name in seen}
            rows.append(
                {"minute": minute, "memory_mib": round(memory / 2**20, 1), **summed(counts)},
            )
            before = seen
        return rows


def summed(counts: Mapping[str, int]) -> dict[str, int]:
    """The columns of the result."""

    def those(*ends: str) -> int:
        return sum(
            count
            for name, count in counts.items()
            if name.endswith(ends) and not name.startswith("LOST")
        )

    return {
        "answered": counts.get("answered", 0),
        "refused": counts.get("refused with 429", 0),
        "bad_input": those(": as expected", "left while waiting"),
        "connections_refused": those("idle connection: refused with 429"),
        "connections_kept": those("idle connection: kept", "its time was over"),
        "lost": sum(count for name, count in counts.items() if name.startswith("LOST")),
    }


async def alone(port: int, texts: Sequence[str]) -> list[Vector]:
    """The vector of each text, one per request."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found = []
    for text in texts:
        writer.write(request(PATH, {"inputs": text, "top_k": 64}))
        _, raw = await answer(reader)
        found.append({entry["index"]: entry["value"] for entry in json.loads(raw)[0]})
    writer.close()
    return found


def same(row: Sequence[Mapping[str, Any]], expected: Vector) -> bool:
    """Whether a row is that vector up to the rounding of another batch, by its heaviest terms."""
    got = {entry["index"]: entry["value"] for entry in row}
    heaviest = sorted(expected, key=lambda index: -expected[index])[:COMPARED]
    return all(
        abs(got.get(index, 0.0) - expected[index]) <= 0.05 * expected[index] + 0.02
        for index in heaviest
    )


async def good(
    port: int,
    texts: Sequence[str],
    expected: Sequence[Vector],
    until: float,
    seen: Seen,
) -> None:
    """One request after the other, each checked."""
    draw = random.Random(len(seen))  # noqa: S311 - of texts
    reader, writer = await asyncio.open_connection(HOST, port)
    answered = time.monotonic()
    while time.monotonic() < until:
        if time.monotonic() - answered > IDLE_SECONDS:  # this process was not asked for so long
            writer.close()
            reader, writer = await asyncio.open_connection(HOST, port)
        chosen = draw.sample(range(len(texts)), draw.randint(1, 4))
        writer.write(request(PATH, {"inputs": [texts[each] for each in chosen], "top_k": 64}))
        try:
            code, raw = await asyncio.wait_for(answer(reader), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            seen[f"LOST: {type(error).__name__}"] += 1
            answered = float("-inf")
            continue
        answered = time.monotonic()
        seen[_judged(code, raw, [expected[each] for each in chosen])] += 1
        await asyncio.sleep(0.2 if code == 429 else 0)
        if code == 429:  # of too many connections, perhaps, and then this one is closed
            answered = float("-inf")
    writer.close()


def _judged(code: int, raw: bytes, expected: Sequence[Vector]) -> str:
    if code != 200:
        return "refused with 429" if code == 429 else f"LOST: code {code}"
    rows = json.loads(raw)
    if len(rows) != len(expected):
        return "LOST: number of vectors"
    return "answered" if all(map(same, rows, expected)) else "LOST: another vector"


def resident(process: int) -> int:
    """Bytes of memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


async def watch(process: int, began: float, until: float, seen: Seen, watched: Watched) -> None:
    """Memory and counts every two seconds, until the end and once after it."""
    while True:
        now = time.monotonic()
        watched.rows.append((now - began, resident(process), seen.copy()))
        if now >= until:
            return
        await asyncio.sleep(2.0)


async def soak(
    port: int,
    process: int,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> tuple[Seen, Watched]:
    """All of it."""
    seen, watched = Seen(), Watched()
    expected = await alone(port, texts)
    began = time.monotonic()
    until = began + min(60 * options.minutes, LONGEST_SECONDS)
    jobs: list[Callable[[], Awaitable[None]]] = [
        lambda: good(port, texts, expected, until, seen),
    ] * options.clients
    jobs += [lambda: watch(process, began, until, seen, watched)]
    jobs += serve_bad.jobs(port, until, seen, options.connections)
    await asyncio.gather(*(job() for job in jobs))
    return seen, watched


def main(argv: Sequence[str]) -> int:
    """Run it; print what was seen, and save a row per minute."""
    options = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (hard if hard != resource.RLIM_INFINITY else 65536, hard),
    )
    texts = list(load_collection("pydocs").queries.values())[:512]
    command = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    provenance = collect(torch.device("cpu"))
    with (
        tempfile.TemporaryDirectory() as folder,
        server(command, Path(folder) / "log") as (port, process),
    ):
        seen, watched = asyncio.run(soak(port, process, texts, options))
        alive = asyncio.run(serve_bad.send(port, serve_bad.sized(b'{"inputs": "a"}')))
        log = (Path(folder) / "log").read_text(errors="replace").splitlines()[1:]
    for name, count in sorted(seen.items()):
        print(f"{count:8d}  {name}")
    second, last = watched.medians()
    rows = watched.minutes()
    print("memory, MiB, at the end of each minute:", *(row["memory_mib"] for row in rows))
    print(
        f"memory, MiB: {second:.0f} in the second third, {last:.0f} in the last: "
        f"{100 * (last / second - 1):+.1f}%",
    )
    print(
        f"at the end the server answers {alive}; lines in its log: {len(log)}",
        *log[:3],
        sep="\n",
    )
    if options.output is not None and rows:
        target = results_file(options.output, "serve_soak", provenance)
        target.unlink(missing_ok=True)  # minutes of one run, not of several
        write_csv(target, rows, provenance, CSV_KEY)
        print(f"saved to {target}")
    return int(summed(seen)["lost"] > 0 or alive != 200 or last > (1 + GROWTH) * second)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of a SparseEncoder")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most 60")
    parser.add_argument("--clients", type=int, default=8, help="good ones")
    parser.add_argument(
        "--connections",
        type=int,
        default=10_000,
        help="idle ones, in waves of 2,000",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="a folder for the rows, such as benchmarks/results",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
