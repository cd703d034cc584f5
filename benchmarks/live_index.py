r"""Search a served index at a constant rate while it changes: failed requests, p50 and p99.

    python -m benchmarks.live_index --work FOLDER [--model minilm] [--documents 20000] [--rate 20] \
        [--seconds 30] [--kind sparse] [--backend seismic] [--device cuda] [--new-model FOLDER] \
        [--fill-gpu]

Timed: a search from the moment at which it is due, at `--rate` per second, to its answer. Searches
are sent whether or not earlier ones were answered. A row is a phase of at least `--seconds`: at
rest, during an update from the command line, a deletion, a merge, documents that are put and
deleted over HTTP, and at rest again. With `--new-model`, the first phases are a migration to this
model, its cut-over and its rollback. A phase ends when the change has been visible for a moment, so
that the release of the old generation belongs to it. Changes from the command line have a lower
priority than the server (`nice`), as the page on serving recommends. `p99_of_rest` is the p99 of a
phase, divided by the median p99 of the phases at rest.

With `--fill-gpu`, another process takes the memory of the GPU before a last merge. The server must
refuse the new generation, answer from the old one, and open the new one once memory is free.

Gate: every answer has code 200 and hits, and each change is visible at the end of its phase.

`--work` keeps the model's vectors and the index between runs, of one model, kind and backend. The
documents are random words of pydocs, and the queries are its queries. Clients, server and changes
share the cores. With `--output`, the rows so far are saved after each phase. The metrics of the
server after each phase are in the folder `metrics` of `--work`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_clients import HOST, Measured, answer, request, server
from tilefold.bench.results import collect, results_file, write_csv
from tilefold.retrieval import load_collection
from tilefold.retrieval.index import LATE
from tilefold.retrieval.index.generations import read_generation

CSV_KEY = ("model", "backend", "documents", "rate", "phase")
ADMIN_KEY = "benchmark"
INDEX_NAME = "live"
SEARCH_PATH = f"/v1/{INDEX_NAME}/search"
WORDS_PER_DOCUMENT = 16
N_NEW = 500  # documents of an update from the command line
N_DELETED = 200
N_PUT = 100  # documents that are put over HTTP
NICE = ("nice", "-n", "10")
# A server on a GPU compiles kernels and captures graphs for queries of each length.
WARMUP_SECONDS = 10.0
# Memory of the GPU that --fill-gpu leaves to the server, which is too small for another generation.
FREE_GPU_BYTES = 64 << 20
GPU_BLOCK_BYTES = 16 << 20
# The phase goes on after the change is visible.
AFTER_CHANGE_SECONDS = 3.0
LONGEST_REQUEST_SECONDS = 300.0
LONGEST_CHANGE_SECONDS = 3600.0

# Program that takes the memory of the GPU, prints a line, and holds the memory until it is ended.
FILL_GPU = f"""
import time, torch
blocks = []
while torch.cuda.mem_get_info()[0] > {FREE_GPU_BYTES + GPU_BLOCK_BYTES}:
    blocks.append(torch.empty({GPU_BLOCK_BYTES}, dtype=torch.uint8, device="cuda"))
print("full", flush=True)
time.sleep({LONGEST_CHANGE_SECONDS})
"""


@dataclass(frozen=True)
class Files:
    """Files of a benchmark.

    Attributes:
        work: folder that is kept between runs.
        index: copy of the index that is served and changed.
        new_vectors: vectors of the documents that are added from the command line.
        deleted: file with the ids of documents that are deleted.
        key: file with the admin key.
    """

    work: Path
    index: Path
    new_vectors: Path
    deleted: Path
    key: Path


def main(argv: Sequence[str]) -> int:
    """Measure every phase, print and save the rows."""
    options = parse(argv)
    files = prepare(options)
    queries = list(load_collection("pydocs").queries.values())
    rows = asyncio.run(measure(options, files, queries))
    for row in rows:
        print(f"p99 of {row['phase']}: {row['p99_of_rest']} times that at rest")
    failed = sum(row["failed"] for row in rows)
    print(f"{failed} failed requests")
    return 1 if failed else 0


def save(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Save the rows of the phases so far, if there is a folder of results.

    Args:
        rows: the rows.
        options: the options of the benchmark.
    """
    if options.output is None:
        return
    provenance = collect(torch.device(options.device or "cpu"))
    write_csv(
        results_file(options.output, "live_index", provenance),
        rows,
        provenance,
        CSV_KEY,
    )


def compare_to_rest(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``p99_of_rest`` of each row: its p99 divided by the median p99 of the phases at rest.

    Args:
        rows: the rows, of which the first is at rest.
    """
    at_rest = statistics.median(row["p99_ms"] for row in rows if row["phase"].startswith("rest"))
    for row in rows:
        row["p99_of_rest"] = round(row["p99_ms"] / at_rest, 2)


def described_model(model: str) -> str:
    """Return the name of a model, or the architecture of a folder, such as ``"bert 6x384"``.

    The path of a folder says nothing to a reader of the results.

    Args:
        model: the name or the folder.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return f"{config['model_type']} {config['num_hidden_layers']}x{config['hidden_size']}"


def tilefold(*arguments: str | Path) -> None:
    """Run a command of tilefold.

    Raises:
        RuntimeError: if it fails, with the end of its output.
    """
    process = subprocess.run(  # noqa: S603 - the arguments are those of this program
        [*NICE, sys.executable, "-m", "tilefold.cli", *map(str, arguments)],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"tilefold {arguments[0]} failed: {process.stderr[-1000:]}")


def prepare(options: argparse.Namespace) -> Files:
    """Encode and index the documents unless an earlier run did, and copy the index."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    words = sorted(
        {word for text in load_collection("pydocs").contents().values() for word in text.split()},
    )
    generator = random.Random(0)  # noqa: S311
    for name, count in (("old", options.documents), ("new", N_NEW)):
        write_documents(work / f"{name}.jsonl", name, count, words, generator)
        tilefold(
            "encode",
            *("--model", options.model),
            *("--data", work / f"{name}.jsonl"),
            *encoding_options(options),
            *("--output", work / f"{name}-vectors"),  # vectors of an earlier run are kept
        )
    if not (work / "index").exists():
        backend = () if options.backend is None else ("--backend", options.backend)
        vectors = (vectors_option(options), work / "old-vectors")
        tilefold("index", *backend, *vectors, "--output", work / "index")
    index = work / INDEX_NAME
    for path in (
        index,
        work / f"{INDEX_NAME}.documents",
        work / f"{INDEX_NAME}.migration",
    ):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(work / "index", index)
    deleted = work / "deleted.txt"
    deleted.write_text("".join(f"old{number}\n" for number in range(N_DELETED)))
    key = work / "key.txt"
    key.write_text(ADMIN_KEY)
    return Files(work, index, work / "new-vectors", deleted, key)


def encoding_options(options: argparse.Namespace) -> list[str]:
    """Return the options of ``tilefold encode`` and ``tilefold migrate``.

    Args:
        options: the options of the benchmark.
    """
    arguments = []
    if options.kind is not None:
        arguments += ["--kind", options.kind]
    if options.top_k is not None:
        arguments += ["--top-k", str(options.top_k)]
    return arguments


def vectors_option(options: argparse.Namespace) -> str:
    """Return the option of ``tilefold index`` that names the folder of vectors."""
    return "--tokens" if options.backend == LATE else "--vectors"


def write_documents(
    path: Path,
    prefix: str,
    count: int,
    words: Sequence[str],
    generator: random.Random,
) -> None:
    """Write documents of random words.

    Args:
        path: the file of JSON lines.
        prefix: beginning of their ids.
        count: number of documents.
        words: the words.
        generator: chooses the words.
    """
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = " ".join(generator.choices(words, k=WORDS_PER_DOCUMENT))
            file.write(json.dumps({"_id": f"{prefix}{number}", "title": "", "text": text}) + "\n")


async def measure(
    options: argparse.Namespace,
    files: Files,
    queries: Sequence[str],
) -> list[dict[str, Any]]:
    """Serve the index, search it during each phase, and return a row for each.

    Args:
        options: the options of the command line.
        files: paths of the index, of the key and of the server's log.
        queries: texts of the searches.
    """
    command = ["-m", "tilefold.cli", "serve", "--model", options.model, "--port", "0"]
    command += ["--index", str(files.index), "--admin-key-file", str(files.key)]
    if options.device is not None:
        command += ["--device", options.device]
    bodies = [request(SEARCH_PATH, {"query": query, "hits": 10}) for query in queries]
    rows: list[dict[str, Any]] = []
    with server(command, files.work / "server.log") as (port, _):
        await search_while(port, bodies, options.rate, WARMUP_SECONDS, None)
        backend = read_generation(files.index).backend
        all_phases = phases(options, files, port)
        if options.new_model is not None:
            all_phases = {**migration_phases(options, files, port), **all_phases}
        for phase, change in all_phases.items():
            measured, visible_after = await search_while(
                port,
                bodies,
                options.rate,
                options.seconds,
                change,
            )
            row = {
                "model": described_model(options.model),
                "backend": backend,
                "documents": options.documents,
                "rate": options.rate,
                "phase": phase,
                "requests": len(measured.seconds) + measured.refused,
                "failed": measured.refused,
                "p50_ms": round(measured.quantile(0.5), 1),
                "p99_ms": round(measured.quantile(0.99), 1),
                "visible_s": "" if visible_after is None else round(visible_after, 1),
            }
            rows.append(row)
            save_metrics(files.work, phase, port)
            compare_to_rest(rows)
            save(rows, options)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def save_metrics(work: Path, phase: str, port: int) -> None:
    """Save the metrics of the server after a phase, which tell queues, model and search apart.

    Args:
        work: folder that is kept between runs; the file is ``metrics/PHASE.txt``.
        phase: name of the phase.
        port: port of the server.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=LONGEST_REQUEST_SECONDS)
    try:
        connection.request("GET", "/metrics")
        content = connection.getresponse().read()
    finally:
        connection.close()
    folder = work / "metrics"
    folder.mkdir(exist_ok=True)
    (folder / f"{phase}.txt").write_bytes(content)


def phases(
    options: argparse.Namespace,
    files: Files,
    port: int,
) -> dict[str, Callable[[], None] | None]:
    """Return phase -> function that makes its change and returns when it is visible, or None.

    Args:
        options: the options of the benchmark.
        files: the files of the benchmark.
        port: port of the server.
    """
    vectors = (vectors_option(options), files.new_vectors)
    update = ("index", "--update", *vectors, "--output", files.index)
    delete = ("index", "--delete", files.deleted, "--output", files.index)
    merge = ("index", "--merge", "--output", files.index)
    documents = [{"id": f"put{number}", "text": f"parcel {number}"} for number in range(N_PUT)]
    ids = [document["id"] for document in documents]
    all_phases: dict[str, Callable[[], None] | None] = {
        "rest": None,
        "update": partial(change_files, port, *update),
        "delete": partial(change_files, port, *delete),
        "merge": partial(change_files, port, *merge),
        "put": partial(change_documents, port, "PUT", {"documents": documents}),
        "put deleted": partial(change_documents, port, "DELETE", {"ids": ids}),
    }
    if options.fill_gpu:
        all_phases["merge on a full GPU"] = partial(merge_on_full_gpu, port, files.index)
    all_phases["rest again"] = None
    return all_phases


def migration_phases(
    options: argparse.Namespace,
    files: Files,
    port: int,
) -> dict[str, Callable[[], None] | None]:
    """Return the phases of a migration to ``--new-model`` and back, which come first.

    Args:
        options: the options of the benchmark.
        files: the files of the benchmark.
        port: port of the server.
    """
    migrate = ("migrate", "--index", files.index)
    start: list[str | Path] = [*migrate, "--model", options.new_model, "--old-model", options.model]
    start += ["--data", files.work / "old.jsonl", "--share", str(options.share)]
    start += encoding_options(options)

    def roll_back() -> None:
        change_files(port, *migrate, "--rollback")
        tilefold(*migrate, "--discard")

    return {
        "rest before migration": None,
        "migrate": partial(tilefold, *start),
        "cut over": partial(change_files, port, *migrate, "--cut-over"),
        "roll back": roll_back,
    }


def change_files(port: int, *arguments: str | Path) -> None:
    """Change the index from the command line, and wait until the server has followed."""
    generation = served_generation(port)
    tilefold(*arguments)
    while served_generation(port) == generation:
        time.sleep(0.1)


def merge_on_full_gpu(port: int, index: Path) -> None:
    """Merge an index while the GPU has no memory for another generation.

    Args:
        port: port of the server.
        index: the folder of the index.

    Raises:
        RuntimeError: if the server does not refuse the merged generation, or does not open it once
            there is memory.
    """
    generation = served_generation(port)
    with full_gpu():
        tilefold("index", "--merge", "--output", index)
        refusal = send(port, "POST", "/admin/reload")
        print(f"reload on a full GPU: {refusal}", flush=True)
        if "next to the served one" not in refusal.get("error", ""):
            raise RuntimeError(f"the server did not refuse the generation: {refusal}")
        if served_generation(port) != generation:
            raise RuntimeError("the server did not keep its generation")
    reply = send(port, "POST", "/admin/reload")
    if reply.get("generation") in (None, generation):
        raise RuntimeError(f"the server did not open the merged generation: {reply}")


@contextmanager
def full_gpu() -> Iterator[None]:
    """Let another process hold the free memory of the GPU within the context."""
    with subprocess.Popen(  # noqa: S603 - the program is constant
        [sys.executable, "-c", FILL_GPU],
        stdout=subprocess.PIPE,
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"full\n":
                raise RuntimeError("the memory of the GPU could not be filled")
            yield
        finally:
            process.terminate()


def change_documents(port: int, method: str, body: Any) -> None:
    """Change documents over HTTP, and wait until they are visible."""
    reply = send(port, method, "/documents?wait=true", body)
    if not reply["visible"]:
        raise RuntimeError(f"the documents are not visible: {reply}")


def served_generation(port: int) -> str:
    """Return the generation from which the server answers."""
    return str(send(port, "GET", "/info")["index"]["generation"])


def send(port: int, method: str, path: str, body: Any = None) -> Any:
    """Send a request with the admin key, and return the JSON of the answer.

    Args:
        port: port of the server.
        method: HTTP method.
        path: path of the endpoint.
        body: what is sent as JSON; ``None`` sends nothing.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=LONGEST_REQUEST_SECONDS)
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


async def search_while(
    port: int,
    bodies: Sequence[bytes],
    rate: float,
    seconds: float,
    change: Callable[[], None] | None,
) -> tuple[Measured, float | None]:
    """Search at a constant rate for some seconds, and until a change of the index is visible.

    Args:
        port: port of the server.
        bodies: the requests, which are sent one after another, and again from the first one.
        rate: searches per second.
        seconds: the least time.
        change: function that changes the index, and returns once the change is visible; ``None``
            for a phase without a change.

    Returns:
        The answers, and the seconds after which the change was visible.

    Raises:
        RuntimeError: if the change is not visible after ``LONGEST_CHANGE_SECONDS`` more.
    """
    loop = asyncio.get_running_loop()
    measured = Measured()
    start = time.perf_counter()
    changing = None if change is None else loop.run_in_executor(None, change)
    visible_after: float | None = None
    searches: list[asyncio.Task[None]] = []
    while True:
        due = start + len(searches) / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        searches.append(
            loop.create_task(search(port, bodies[len(searches) % len(bodies)], due, measured))
        )
        elapsed = time.perf_counter() - start
        if changing is not None and visible_after is None and changing.done():
            await changing
            visible_after = elapsed
        is_changed = changing is None or visible_after is not None
        if (
            elapsed > seconds
            and is_changed
            and elapsed > (visible_after or 0) + AFTER_CHANGE_SECONDS
        ):
            break
        if elapsed > seconds + LONGEST_CHANGE_SECONDS:
            raise RuntimeError(f"the change was not visible after {elapsed:.0f} s")
    await asyncio.gather(*searches)
    measured.wall = time.perf_counter() - start
    return measured, visible_after


async def search(port: int, content: bytes, due: float, measured: Measured) -> None:
    """Send a search on a new connection, and record its time or its failure.

    Args:
        port: port of the server.
        content: the request.
        due: ``time.perf_counter()`` at which the request was due.
        measured: collects the answers.
    """
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(content)
            code, body = await answer(reader)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError):
        measured.refused += 1
        return
    if code != 200 or not json.loads(body)["candidates"]:
        measured.refused += 1
        return
    measured.seconds.append(time.perf_counter() - due)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder that is kept")
    parser.add_argument("--model", default="minilm", help="of documents and queries")
    parser.add_argument("--kind", help="of vectors, such as dense; by default as the model")
    parser.add_argument("--backend", help="of the index, such as seismic or late")
    parser.add_argument("--top-k", type=int, help="terms of a sparse vector, such as 128")
    parser.add_argument("--new-model", help="first migrate to this model, and back")
    parser.add_argument("--share", type=float, default=0.5, help="of the machine, to migrate")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=20.0, help="searches per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase at least")
    parser.add_argument("--device", help="of the index, such as cuda")
    parser.add_argument("--fill-gpu", action="store_true", help="merge also on a full GPU")
    parser.add_argument("--output", type=Path, help="folder of results, such as benchmarks/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
