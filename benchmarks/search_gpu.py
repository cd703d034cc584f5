"""Time searches of whole collections on one GPU.

    python -m benchmarks.search_gpu [--only sparse-1m] [--output benchmarks/results]

Timed: late interaction in memory, in 4 bits and streamed from mapped files; learned sparse vectors,
one query at a time and in batches; and texts to hits. Times are by the wall clock, with the part of
the CPU, until the device has finished. Ways of a comparison take turns. Collections are random and
made on the device (``search_data``).

Baseline: products of torch, torch's CSR matrix, copies from pinned memory, or int8 beside int4.
`goal` is what an H200 should reach: milliseconds, queries a second, or a `share`: of the rate of
copies from pinned memory, of the bytes of int8, or of the time in which the GPU is busy.

Gate: scores of some documents and of the best ones in fp64, within the budget of fp32. Sparse
scores may differ by the rounding of their integer sums. Single queries must find what they find in
the batch.

`--device cpu --tiny` shows that all of it runs.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.encode import Truth, busy_share
from benchmarks.encode_data import CASES, make_model
from benchmarks.job import Job, JobCase, JobOptions, Row, SearchMethod, main, time_methods
from benchmarks.queries import queries_of
from benchmarks.search_data import (
    Found,
    judged,
    made_asked,
    made_late,
    made_queries,
    made_rows,
    made_tokens,
)
from tilefold.bench.spec import Runnable, captured
from tilefold.bench.timing import TimeBudget
from tilefold.ops import QuantizedTokens, maxsim, maxsim_topk
from tilefold.ops.sparse_search import sparse_topk
from tilefold.pipeline.rows import Batch, SparseRows, Window, repeat_interleave
from tilefold.pipeline.threads import Prefetcher
from tilefold.retrieval import LateIndex, TokenVectors
from tilefold.retrieval.index import late, token_blocks

K, DIMS, QUERY_TOKENS, TOKENS = 100, 128, 32, 64
SEVERAL, BATCH, TURNS, TINY = (
    16,
    512,
    64,
    2000,
)  # queries of a pass, of a batch, and that take turns; documents
BATCHES, TOGETHER = 96, 4  # of texts; batches that one call encodes
COPY, PIECE = (
    1 << 28,
    1 << 16,
)  # bytes of a copy from pinned memory; documents that torch scores at a time
BUDGET, ONCE = TimeBudget(seconds=0.8, min_reps=7, max_reps=30), TimeBudget(0.0, 1, 1)


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of a case; an error is one, and leaves the other cases."""
    if options.device.type == "cpu" and not options.quick:
        raise ValueError("device: expected a GPU, or --tiny, got cpu.")
    count = min(case.numbers["documents"], TINY) if options.quick else case.numbers["documents"]
    try:
        for row in case.numbers["run"](case, count, options.device):
            yield {"case": case.name, "documents": count, "share": "", **row}
    except Exception as error:
        traceback.print_exc()
        yield {
            "case": case.name,
            "way": "error",
            "gate": " ".join(f"{type(error).__name__}: {error}".split())[:300],
        }
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def in_memory(case: JobCase, count: int, device: torch.device) -> Iterator[Row]:
    """MaxSim over all documents, padded and packed; where asked for, beside products and maxima of
    torch in bf16.
    """
    tokens = made_tokens(count, case.numbers["length"], DIMS, 0, device)
    asked = made_asked(SEVERAL, QUERY_TOKENS, DIMS, device)
    packed = QuantizedTokens(tokens.values.flatten(0, 1), tokens.scales.flatten())
    offsets = torch.arange(count + 1, dtype=torch.int32, device=device) * case.numbers["length"]

    def part(some: Any) -> QuantizedTokens:
        return QuantizedTokens(tokens.values[some], tokens.scales[some])

    def of_torch() -> Found:
        scores = torch.empty(count, device=device)
        for low in range(0, count, PIECE):
            products = (
                part(slice(low, low + PIECE)).dequantize(torch.bfloat16) @ asked[0].bfloat16().T
            )
            scores[low : low + PIECE] = products.amax(1).float().sum(1)
        return scores.topk(K)

    def way(
        queries: Tensor,
        documents: QuantizedTokens,
        cut: Tensor | None,
        goal: object = "",
    ) -> SearchMethod:
        call = partial(maxsim_topk, queries, documents, K, cu_seqlens_d=cut)
        scores = maxsim(queries, documents, cu_seqlens_d=cut)
        gate = judged(call(), scores, lambda some: maxsim(queries, part(some), impl="reference"))
        return SearchMethod(call, len(queries), tokens.nbytes, tokens.nbytes, goal, gate)

    for queries, goal in zip((asked[:1], asked), case.numbers["goals"], strict=True):
        name = f"maxsim_topk, {len(queries)}"
        ways = {
            name: way(queries, tokens, None, goal),
            f"{name}, packed": way(queries, packed, offsets),
        }
        yield from time_methods(ways, device, BUDGET)
    if case.numbers["peer"]:
        yield from time_methods(
            {"torch, 1": SearchMethod(of_torch, 1, tokens.nbytes)}, device, ONCE
        )


work = functools.cache(partial(tempfile.TemporaryDirectory, prefix="tilefold-search-gpu-"))


@functools.cache
def store(storage: str, count: int, device: torch.device) -> LateIndex:
    """The index of a storage, which two cases search."""
    return made_late(Path(work().name) / storage, storage, count, TOKENS, DIMS, device)


def late_ways(
    storage: str,
    count: int,
    device: torch.device,
    goal: object = "",
    read: bool = False,
) -> dict[str, SearchMethod]:
    """One query and several by an index that holds nothing yet; its first search reads and checks
    the files.
    """
    made = store(storage, count, device)
    index = LateIndex(made.ids, made.files, None, made.options, made.provenance).on(str(device))
    asked, ways = made_asked(SEVERAL, QUERY_TOKENS, DIMS, device), {}
    for number in (1, SEVERAL):
        rows, how = asked[:number].cpu(), token_blocks.QueryBatch(asked[:number], None)
        queries = TokenVectors.pack([f"q{at}" for at in range(number)], list(rows), DIMS, "fp32")
        hits = index.search(queries, K)
        best = torch.tensor([[score for _, score in row] for row in hits], device=device)
        documents = torch.tensor(
            [[int(name[1:]) for name, _ in row] for row in hits],
            device=device,
        )
        (share,) = index._documents_on(index._devices(device))
        scores = [
            token_blocks.maxsim_scores(how, part, cut, "sum") for _, _, part, cut in share.blocks()
        ]

        def truth(some: Tensor, rows: Tensor = rows) -> Tensor:
            packed, offsets = index.files.take(some.cpu().numpy())
            return maxsim(rows, packed.decoded(), cu_seqlens_d=offsets, impl="reference").to(device)

        gate, size = judged((best, documents), torch.cat(scores, 1), truth), index.files.nbytes
        gate = "the GPU holds the documents" if read and share.resident is not None else gate
        ways[f"{storage}, {number}"] = SearchMethod(
            partial(index.search, queries, K),
            number,
            size,
            size * read,
            goal,
            gate,
        )
    return ways


def four_bits(case: JobCase, count: int, device: torch.device) -> Iterator[Row]:
    """The index in memory, in 8 and in 4 bits."""
    eight, four = (
        late_ways("int8", count, device),
        late_ways("int4", count, device, case.numbers["goal"]),
    )
    for row in time_methods(eight | four, device, BUDGET):
        yield row | (
            {"share": row["gb"] * 1e9 / eight["int8, 1"].stored_bytes} if row["way"] in four else {}
        )


def streamed(case: JobCase, count: int, device: torch.device) -> Iterator[Row]:
    """The index in mapped files, of which the GPU may hold nothing, beside copies of as many bytes
    of pinned memory.
    """
    pinned = torch.empty(COPY, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, times = (
        torch.empty_like(pinned, device=device),
        1 + store("int8", count, device).files.nbytes // COPY,
    )

    def copies() -> None:
        for _ in range(times):
            there.copy_(pinned, non_blocking=True)

    with mock.patch.object(late, "_MEMORY_FRACTION", 0.0):
        ways = late_ways("int8", count, device, case.numbers["goal"], read=True)
        rows = list(
            time_methods(
                {"pinned": SearchMethod(copies, 0, times * COPY, times * COPY), **ways},
                device,
                BUDGET,
            ),
        )
    for row in rows:
        yield row | ({"share": row["tb_s"] / rows[0]["tb_s"]} if row["gate"] == "ok" else {})


def sparse(case: JobCase, count: int, device: torch.device) -> Iterator[Row]:
    """Time one query and a batch, on the device and from the host, against torch's CSR matrix."""
    rows, number = made_rows(count, 0, device), BATCH if count > TINY else SEVERAL
    index, queries = rows.on_device(), made_queries(rows.first(min(count, 20_000)), number, 0)
    singles = [queries.take([at]) for at in range(min(TURNS, number))]
    (terms, weights), *each = (
        [part.to(device) for part in index._padded(some)] for some in (queries, *singles)
    )
    dense = torch.zeros(number, index.vocab_size, device=device).scatter_add_(
        1,
        terms.long(),
        weights,
    )
    matrix, held = rows.matrix(), index.postings.nbytes

    def best(terms: Tensor, weights: Tensor) -> Found:
        return sparse_topk(index.postings, terms, weights, K)

    whole = best(terms, weights)
    right = rows.judged(whole, index, terms, weights)
    expected = [row[row >= 0].tolist() for row in whole[1]]

    def way(ask: Callable[[int], Any], goal: object = "", peer: bool = False) -> SearchMethod:
        wrong = (
            sum(documents_of(ask(at)) != expected[at] for at in range(len(singles)))
            if not peer
            else 0
        )
        turns = itertools.cycle(range(len(singles)))
        gate = f"{wrong} queries find others than in the batch" if wrong else right
        return SearchMethod(lambda: ask(next(turns)), 1, held, 0, goal, gate)

    goals = case.numbers["goals"]
    ways = {
        "sparse_topk, 1": way(lambda at: best(*each[at]), goals[0]),
        "DeviceIndex.search, 1": way(lambda at: index.search(singles[at], K)),
        "search_tensor, 1": way(lambda at: index.search_tensor(dense[at : at + 1], K)),
        "torch CSR and topk, 1": way(lambda at: (matrix @ dense[at]).topk(K), peer=True),
    }
    if device.type == "cuda":
        static: Any = [part[:1].clone() for part in (terms, weights)]
        capture: Any = lambda: best(*static)  # noqa: E731
        graph = captured(Runnable(capture, None, "")).forward

        def replayed(at: int) -> object:
            for held, part in zip(static, (terms, weights), strict=True):
                held.copy_(part[at : at + 1])
            return graph()

        ways["sparse_topk, 1, as a CUDA graph"] = way(replayed)
    yield from time_methods(ways, device, BUDGET)
    csr = dense.to_sparse_csr()
    batched: dict[str, tuple[Callable[[], object], object]] = {
        "sparse_topk, batch": (lambda: best(terms, weights), f"{goals[1]} a second"),
        "search_tensor, batch": (lambda: index.search_tensor(csr, K), ""),
        "DeviceIndex.search, batch": (lambda: index.search(queries, K), ""),
        "torch CSR, batch": (lambda: matrix @ dense.T, ""),
    }
    together = {
        name: SearchMethod(call, number, held, 0, goal, right)
        for name, (call, goal) in batched.items()
    }
    yield from time_methods(together, device, BUDGET)


def documents_of(found: Any) -> list[int]:
    """The documents of a single query."""
    if isinstance(found[0], list):
        return [int(name[1:]) for name, _ in found[0]]
    return [at for at in found[1][0].tolist() if at >= 0]


def encode_search(case: JobCase, count: int, device: torch.device) -> Iterator[Row]:
    """Texts to hits: batches one after the other, and encoded in a thread while others are
    searched.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    rows, small = made_rows(count, 0, device), count <= TINY
    index, texts = rows.on_device(), queries_of(BATCH * (TOGETHER if small else BATCHES))
    named = "tiny-cpu" if small else "bert-base"
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(
            next(one for one in CASES if one.name == named),
            texts,
            Path(folder),
            device,
        )
    truth = Truth(model, {str(place): text for place, text in enumerate(texts[:BATCH])})
    accelerate(model)
    encode: Callable[[Sequence[str]], Tensor] = partial(model.encode_query, show_progress_bar=False)

    def cut(size: int, start: int = 0) -> list[list[str]]:
        return [texts[low : low + size] for low in range(start, len(texts), size)]

    def one_by_one() -> None:
        for part in cut(BATCH):
            index.search_tensor(encode(part), K)

    def ahead(size: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            for found in pool.map(encode, cut(size)):
                index.search_tensor(found, K)

    def batches(windows: Sequence[list[str]]) -> Iterator[Batch]:
        items = model.encode_sparse_batch.stream(map(Window, windows), task="query", to_host=False)
        return (item for item in items if isinstance(item, Batch))

    def streamed(size: int) -> None:
        first = [
            texts[:BATCH],
            texts[BATCH : 3 * BATCH],
        ]  # small ones, for which the GPU waits less
        with (
            torch.inference_mode(),
            Prefetcher(batches([*first, *cut(size, 3 * BATCH)]), TOGETHER, "encoded") as found,
        ):
            for batch in found:
                index.search_tensor(batch.rows, K)

    def judged(queries: Tensor | SparseRows, dense: Tensor) -> str:
        weights, terms = dense.float().topk(int((dense > 0).sum(1).max()), dim=1)
        return rows.judged(index.search_tensor(queries, K), index, terms.int(), weights)

    some = encode(texts[:BATCH])
    gate = judged(some, some.to_dense())
    for batch in (
        batches([texts[:BATCH]]) if gate == "ok" else ()
    ):  # rows of the stream, searched as they are
        counts, columns, values, size = batch.rows
        dense = torch.zeros(len(counts), size, dtype=values.dtype, device=device)
        dense[repeat_interleave(torch.arange(len(counts)), counts, device), columns.long()] = values
        known = [
            (row, place) for row, place in enumerate(batch.positions) if place < len(truth.rows)
        ]
        errors = [
            float((dense[row].float().cpu() - truth.rows[place]).abs().max())
            for row, place in known
        ]
        gate = judged(batch.rows, dense) if gate == "ok" else gate
        if max(errors, default=0.0) > truth.allowed:
            gate = "rows of the stream differ from those of the stock encoder"
    calls: dict[str, Callable[[], None]] = {
        "one after the other": one_by_one,
        "encoded in a thread": partial(ahead, BATCH),
        f"encoded in a thread, {TOGETHER} batches together": partial(ahead, TOGETHER * BATCH),
        "a stream in a thread, 2 batches together": partial(streamed, 2 * BATCH),
        f"a stream in a thread, {TOGETHER} batches together": partial(streamed, TOGETHER * BATCH),
    }
    held, goal = index.postings.nbytes, case.numbers["goal"]
    ways = {
        name: SearchMethod(call, len(texts), held, 0, goal, gate) for name, call in calls.items()
    }
    for row in time_methods(ways, device, TimeBudget(2.0, 3, 7)):
        shares = [busy_share(calls[row["way"]], device) or 0.0 for _ in range(3)]
        yield row | {"share": statistics.median(shares) or ""}


def _case(name: str, run: Any, documents: int, **numbers: Any) -> JobCase:
    return JobCase(name, quick=True, numbers={"run": run, "documents": documents, **numbers})


JOB = Job(
    "search_gpu",
    (
        _case("maxsim-1m", in_memory, 1_000_000, length=TOKENS, goals=(2.3, 9), peer=True),
        _case("maxsim-8.8m", in_memory, 8_800_000, length=67, goals=(23, 80), peer=False),
        _case("maxsim-4bit", four_bits, 1_000_000, goal="half"),
        _case("streamed", streamed, 1_000_000, goal="80%"),
        _case("sparse-1m", sparse, 1_000_000, goals=(0.12, 25_000)),
        _case("sparse-8.8m", sparse, 8_800_000, goals=(0.4, 8_000)),
        _case("encode-search", encode_search, 1_000_000, goal="85%"),
    ),
    ("case", "way"),
    (
        "way",
        "queries",
        "gb",
        "p50_ms",
        "p20_ms",
        "p80_ms",
        "queries_s",
        "tb_s",
        "share",
        "goal",
        "gate",
    ),
    run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
