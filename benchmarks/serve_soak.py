"""Minutes of mixed load with bad input: does a server of tilefold keep its memory, its answers and its life?

    python -m benchmarks.serve_soak --model FOLDER --minutes 30 [--clients 8] [--connections 10000]

Good clients send one to four queries of pydocs and expect as many vectors; a 429 counts as refused, anything else as
lost. Bad ones send, in turn, bodies that are too large (declared, and chunked without end), are no JSON, are nested
50,000 deep, are Latin-1 or UTF-16, have wrong fields; send half a head or half a body and wait; leave while their
inputs wait. Each expects its code, or a closed connection. In between, `--connections` are opened, in waves of 2,000:
each must be kept, or be answered with 429. Loopback only; it ends by itself, with 1 if something was lost, the server
died, or its memory grew by more than 10% from the second third to the last (before, it warms up).
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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks.serve_clients import HOST, LONGEST_SECONDS, answer, request, server
from tilefold.retrieval import load_collection

PATH = "/embed_sparse"
PATIENCE = 60.0
WAVE = 2000
Seen = Counter[str]
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\ncontent-type: application/json\r\n"


def _sized(body: bytes) -> bytes:
    return f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body


# what is sent, and the codes that may come back; 0 is a closed connection
BAD: dict[str, tuple[bytes, set[int]]] = {
    "declared too large": (f"{HEAD}content-length: 90000000\r\n\r\n".encode(), {413}),
    "chunked without end": (
        f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + b"10000\r\n" + b"x" * 65536,
        {413, 408},
    ),
    "no JSON": (_sized(b'{"inputs": '), {400}),
    "deep": (_sized(b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), {400}),
    "Latin-1": (_sized('{"inputs": "ä"}'.encode("latin-1")), {400}),
    "UTF-16": (_sized('{"inputs": "ä"}'.encode("utf-16")), {400}),
    "wrong fields": (_sized(b'{"inputs": {"a": 1}, "truncate": 3}'), {422}),
    "too many": (_sized(json.dumps({"inputs": ["a"] * 400}).encode()), {422}),
    "no HTTP": (b"\x00\x01\x02\x03\r\n\r\n", {400, 0}),
    "half a head": (b"POST /embed", {0}),
    "half a body": (_sized(b'{"inputs": "a"}')[:-5], {408, 0}),
}


async def good(port: int, texts: Sequence[str], until: float, seen: Seen) -> None:
    """One request after the other, each checked."""
    draw = random.Random(len(seen))  # noqa: S311 - of texts
    reader, writer = await asyncio.open_connection(HOST, port)
    while time.monotonic() < until:
        inputs = draw.sample(list(texts), draw.randint(1, 4))
        writer.write(request(PATH, {"inputs": inputs, "top_k": 64}))
        try:
            code, raw = await asyncio.wait_for(answer(reader), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            seen[f"LOST: {type(error).__name__}"] += 1
            reader, writer = await asyncio.open_connection(HOST, port)
            continue
        whole = code == 200 and len(json.loads(raw)) == len(inputs)
        seen["answered" if whole else "refused with 429" if code == 429 else f"LOST: code {code}"] += 1
        await asyncio.sleep(0.2 if code == 429 else 0)
    writer.close()


async def bad(port: int, until: float, seen: Seen) -> None:
    """Each kind of bad input in turn."""
    while time.monotonic() < until:
        for name, (sent, codes) in BAD.items():
            code = await _sent(port, sent)
            expected = code in codes or code == 429  # of too many connections
            seen[f"{name}: as expected" if expected else f"LOST: {name} got {code}"] += 1
        await _leave(port)
        seen["left while waiting"] += 1


async def _sent(port: int, sent: bytes) -> int:
    """The code that comes back, 0 for a connection that was closed without one."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        first = await asyncio.wait_for(reader.readline(), PATIENCE)
        writer.close()
        return int(first.split(b" ")[1]) if first.startswith(b"HTTP") else 0
    except OSError:
        return 0


async def _leave(port: int) -> None:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request(PATH, {"inputs": ["left"] * 16}))
        await asyncio.sleep(0.01)
        writer.transport.abort()
    except OSError:
        return


async def flood(port: int, connections: int, seen: Seen) -> None:
    """Idle connections in waves; those that are above the limit must be told so."""
    for start in range(0, connections, WAVE):
        wave = [_idle(port) for _ in range(min(WAVE, connections - start))]
        seen.update(await asyncio.gather(*wave))


async def _idle(port: int) -> str:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), PATIENCE)
        try:
            first = await asyncio.wait_for(reader.readline(), 1.0)
            return f"idle connection: {first.split(b' ')[1].decode() if first else 'closed'}"
        except asyncio.TimeoutError:
            return "idle connection: kept"
        finally:
            writer.transport.abort()
    except (OSError, asyncio.TimeoutError) as error:
        return f"idle connection: {type(error).__name__}"


def resident(process: int) -> int:
    """Bytes of memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


async def watch(process: int, until: float, memory: list[int]) -> None:
    """The memory, every two seconds."""
    while time.monotonic() < until:
        memory.append(resident(process))
        await asyncio.sleep(2.0)


async def soak(port: int, process: int, texts: Sequence[str], options: argparse.Namespace) -> tuple[Seen, list[int]]:
    """All of it."""
    seen: Seen = Counter()
    memory: list[int] = []
    until = time.monotonic() + min(60 * options.minutes, LONGEST_SECONDS)
    jobs: list[Callable[[], Awaitable[None]]] = [lambda: good(port, texts, until, seen)] * options.clients
    jobs += [lambda: bad(port, until, seen), lambda: watch(process, until, memory)]
    if options.connections:
        jobs.append(lambda: flood(port, options.connections, seen))
    await asyncio.gather(*(job() for job in jobs))
    return seen, memory


def main(argv: Sequence[str]) -> int:
    """Run it; print what was seen."""
    options = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
    texts = list(load_collection("pydocs").queries.values())[:512]
    command = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder, server(command, Path(folder) / "log") as (port, process):
        seen, memory = asyncio.run(soak(port, process, texts, options))
        alive = asyncio.run(_sent(port, _sized(b'{"inputs": "a"}')))
        log = (Path(folder) / "log").read_text(errors="replace").splitlines()[1:]
    for name, count in sorted(seen.items()):
        print(f"{count:8d}  {name}")
    third = max(1, len(memory) // 3)
    second, last = (statistics.median(part) / 2**20 for part in (memory[third : 2 * third] or memory, memory[-third:]))
    tenths = memory[:: max(1, len(memory) // 10)]
    print("memory, MiB, over time:", *(f"{each / 2**20:.0f}" for each in tenths))
    print(f"memory, MiB: {second:.0f} in the second third, {last:.0f} in the last, {max(memory) / 2**20:.0f} at most")
    print(f"at the end the server answers {alive}; lines in its log: {len(log)}", *log[:3], sep="\n")
    lost = any(name.startswith("LOST") for name in seen)
    return int(lost or alive != 200 or last > 1.1 * second)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of a SparseEncoder")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most 60")
    parser.add_argument("--clients", type=int, default=8, help="good ones")
    parser.add_argument("--connections", type=int, default=10_000, help="idle ones, in waves of 2,000")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
