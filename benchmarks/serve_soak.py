r"""Check that a server keeps its memory and its answers under minutes of mixed load with bad input.

    python -m benchmarks.serve_soak --model FOLDER --minutes 30 [--clients 8] \
        [--connections 10000] [--output FOLDER]

Measured: memory of the server, and the number of answers of each kind, every minute. Loopback only.

Gate: nothing may be lost, the server must be alive at the end, and its memory must be flat: the
median of the last third of the time is at most 5% above that of the second third. (In the first
third the server warms up.) Good clients send one to four queries of pydocs and expect the vectors
that each query has alone, up to rounding. A 429 counts as refused, any other answer as lost.

At the same time others (`serve_bad`) send bodies that are too large (declared, sent, and chunked
without end), are no JSON, are nested 50,000 deep, are Latin-1 or UTF-16, or have wrong fields or
another content type. They send half a head, half a body, or a byte each half second; read nothing
of their answer; or leave while their inputs wait. Each expects its code, or a closed connection.
`--connections` idle ones are opened in waves of 2,000. Each must stay open, or be answered with
429.
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
from collections.abc import Mapping, Sequence
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
# allowed growth of memory from the second third to the last
GROWTH = 0.05
# heaviest terms of a query that are compared, and the allowed relative and absolute difference of
# their weights, since another batch is rounded otherwise
COMPARED_TERMS = 8
RELATIVE_ERROR = 0.05
ABSOLUTE_ERROR = 0.02
N_QUERIES = 512
# terms of a query that are requested
TOP_K = 64
# the server closes a connection after 15 seconds without a request
IDLE_SECONDS = 10.0
# seconds between two looks at the memory
WATCH_SECONDS = 2.0
MIB = 2**20
# weights by term
Vector = dict[int, float]


@dataclass
class Watched:
    """Memory and counts over time.

    Attributes:
        rows: every two seconds, the seconds since the start, the bytes of memory, and the counts so
            far.
    """

    rows: list[tuple[float, int, Seen]] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """Return the median memory in MiB in the second third of the time and in the last."""
        end, last_memory, _ = self.rows[-1]
        medians = []
        for begin in (1 / 3, 2 / 3):
            memory_bytes = [
                memory
                for seconds, memory, _ in self.rows
                if begin <= seconds / end <= begin + 1 / 3
            ]
            medians.append(statistics.median(memory_bytes or [last_memory]) / MIB)
        second_third, last_third = medians
        return second_third, last_third

    def minutes(self) -> list[dict[str, Any]]:
        """Return a row per minute, with the memory at its end and the counts within it."""
        rows = []
        counts_before = Counter[str]()
        total_seconds, _, _ = self.rows[-1]
        for minute in range(1, int(total_seconds / 60) + 1):
            _, memory, counts = next(row for row in self.rows if row[0] >= 60 * minute)
            within = {name: counts[name] - counts_before[name] for name in counts}
            rows.append(
                {"minute": minute, "memory_mib": round(memory / MIB, 1), **summed(within)},
            )
            counts_before = counts
        return rows


def summed(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up counts for the columns of the results.

    Args:
        counts: event -> number of times that it happened.
    """

    def count_of(*ends: str) -> int:
        """Add up what was not lost, and whose name has one of these ends."""
        return sum(
            count
            for name, count in counts.items()
            if name.endswith(ends) and not name.startswith("LOST")
        )

    return {
        "answered": counts.get("answered", 0),
        "refused": counts.get("refused with 429", 0),
        "bad_input": count_of(": as expected", "left while waiting"),
        "connections_refused": count_of("idle connection: refused with 429"),
        "connections_kept": count_of("idle connection: kept", "its time was over"),
        "lost": sum(count for name, count in counts.items() if name.startswith("LOST")),
    }


async def alone(port: int, texts: Sequence[str]) -> list[Vector]:
    """Encode each text in a request that contains no other text, and return the vectors.

    Args:
        port: port of the server.
        texts: the texts.
    """
    reader, writer = await asyncio.open_connection(HOST, port)
    vectors = []
    for text in texts:
        writer.write(request(PATH, {"inputs": text, "top_k": TOP_K}))
        _, content = await answer(reader)
        (row,) = json.loads(content)
        vectors.append({entry["index"]: entry["value"] for entry in row})
    writer.close()
    return vectors


def same(row: Sequence[Mapping[str, Any]], expected: Vector) -> bool:
    """Return whether a row of an answer is a vector, up to the rounding of another batch.

    Args:
        row: the entries with ``index`` and ``value``.
        expected: the vector, whose heaviest terms are compared.
    """
    weights = {entry["index"]: entry["value"] for entry in row}
    heaviest_terms = sorted(expected, key=lambda term: -expected[term])[:COMPARED_TERMS]
    return all(
        abs(weights.get(term, 0.0) - expected[term])
        <= RELATIVE_ERROR * expected[term] + ABSOLUTE_ERROR
        for term in heaviest_terms
    )


async def good(
    port: int,
    texts: Sequence[str],
    expected: Sequence[Vector],
    until: float,
    seen: Seen,
) -> None:
    """Send one request after the other, and check each answer.

    Args:
        port: the port of the server.
        texts: the queries.
        expected: their vectors.
        until: the time at which to end.
        seen: the counter of the answers.
    """
    generator = random.Random(len(seen))  # noqa: S311 - a sample of texts, no secret
    reader, writer = await asyncio.open_connection(HOST, port)
    last_answer = time.monotonic()
    while time.monotonic() < until:
        # the connection may be closed if this process had no turn for so long
        if time.monotonic() - last_answer > IDLE_SECONDS:
            writer.close()
            reader, writer = await asyncio.open_connection(HOST, port)
        positions = generator.sample(range(len(texts)), generator.randint(1, 4))
        inputs = [texts[position] for position in positions]
        writer.write(request(PATH, {"inputs": inputs, "top_k": TOP_K}))
        try:
            code, content = await asyncio.wait_for(answer(reader), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            seen[f"LOST: {type(error).__name__}"] += 1
            # the next request needs a new connection
            last_answer = float("-inf")
            continue
        last_answer = time.monotonic()
        seen[_check_answer(code, content, [expected[position] for position in positions])] += 1
        await asyncio.sleep(0.2 if code == 429 else 0)
        if code == 429:
            # there may be too many connections, and then this one is closed
            last_answer = float("-inf")
    writer.close()


def _check_answer(code: int, content: bytes, expected: Sequence[Vector]) -> str:
    """Return the name under which an answer is counted.

    Args:
        code: the code of the answer.
        content: its body.
        expected: the vectors that it should have.
    """
    if code != 200:
        return "refused with 429" if code == 429 else f"LOST: code {code}"
    rows = json.loads(content)
    if len(rows) != len(expected):
        return "LOST: number of vectors"
    return "answered" if all(map(same, rows, expected)) else "LOST: another vector"


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmRSS"))
    _, kib, _ = line.split()
    return 1024 * int(kib)


async def watch(process: int, start: float, until: float, seen: Seen, watched: Watched) -> None:
    """Record memory and counts every two seconds, until the end and once after it.

    Args:
        process: id of the server's process.
        start: when the test began, by the monotonic clock.
        until: when it ends.
        seen: counts of the answers.
        watched: receives the rows.
    """
    while True:
        now = time.monotonic()
        watched.rows.append((now - start, resident_bytes(process), seen.copy()))
        if now >= until:
            return
        await asyncio.sleep(WATCH_SECONDS)


async def soak(
    port: int,
    process: int,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> tuple[Seen, Watched]:
    """Run all clients against a server.

    Args:
        port: the port of the server.
        process: its id.
        texts: the queries.
        options: the options of the command line.

    Returns:
        The counts, and memory and counts over time.
    """
    seen = Seen()
    watched = Watched()
    expected = await alone(port, texts)
    start = time.monotonic()
    until = start + min(60 * options.minutes, LONGEST_SECONDS)
    good_clients = [good(port, texts, expected, until, seen) for _ in range(options.clients)]
    bad_clients = serve_bad.jobs(port, until, seen, options.connections)
    watcher = watch(process, start, until, seen, watched)
    await asyncio.gather(*good_clients, watcher, *bad_clients)
    return seen, watched


def main(argv: Sequence[str]) -> int:
    """Run the load, print the counts, and save a row per minute.

    Returns:
        The exit code: 1 if the gate failed.
    """
    options = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (hard if hard != resource.RLIM_INFINITY else 65536, hard),
    )
    texts = list(load_collection("pydocs").queries.values())[:N_QUERIES]
    command = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    provenance = collect(torch.device("cpu"))
    with (
        tempfile.TemporaryDirectory() as folder,
        server(command, Path(folder) / "log") as (port, process),
    ):
        seen, watched = asyncio.run(soak(port, process, texts, options))
        alive = asyncio.run(serve_bad.send(port, serve_bad.sized(b'{"inputs": "a"}')))
        log_text = (Path(folder) / "log").read_text(errors="replace")
        log = log_text.partition("Ctrl-C ends\n")[2].splitlines()  # after the start
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
        # minutes of one run, not of several
        target.unlink(missing_ok=True)
        write_csv(target, rows, provenance, CSV_KEY)
        print(f"saved to {target}")
    has_losses = summed(seen)["lost"] > 0
    has_grown = last > (1 + GROWTH) * second
    return 1 if has_losses or has_grown or alive != 200 else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
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
