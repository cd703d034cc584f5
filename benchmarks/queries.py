"""Queries of 12 tokens on a GPU: one at a time, 32 together, and 32,768 in bulk.

    python -m benchmarks.queries [--shape bert-base] [--output benchmarks/results]

Every way encodes the same queries with the same model of random weights, whose bias leaves some 230 terms of a query;
stock rows are the gate. The floor of a single query is the replay of its graph alone.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encode import Truth, seconds_of
from benchmarks.encode_data import CASES, make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from tilefold.integrations.sentence_transformers import accelerate

STOCK, EAGER, GRAPHS, FLOOR = "stock", "tilefold without graphs", "tilefold", "its graph alone"
WORDS = 6  # of a query, which are 12 tokens with the special ones, about
BULK, STOCK_BULK, SINGLE, JOINED = 32768, 4096, 200, 60
TOKENS = 32  # of an expanded ColBERT query


def queries_of(count: int, seed: int = 0) -> list[str]:
    """Runs of words from the documentation of Python."""
    words = " ".join(make_texts(2000)).split()
    starts = np.random.default_rng(seed).integers(0, len(words) - WORDS, count)
    return [" ".join(words[at : at + WORDS]) for at in starts.tolist()]


def colbert(folder: Path, device: torch.device) -> Any:
    """A MultiVectorEncoder of the same network: 128 dimensions, queries expanded to 32 tokens."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    expansion = {"strategy": "fixed", "attend": True, "length": TOKENS}
    trunk = Transformer(str(folder), query_expansion=expansion)
    plain = torch.nn.Identity()
    width = trunk.get_embedding_dimension()
    dense = Dense(width, 128, bias=False, activation_function=plain, module_input_name="token_embeddings")
    modules = [trunk, dense, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(device)).to(torch.bfloat16)


def times(run: Callable[[str], object], queries: Sequence[str], device: torch.device) -> dict[str, float]:
    """p50 and p99 of single calls, each to the end of what it gave the device."""
    for query in queries[:20]:
        run(query)
    found = [seconds_of(lambda query=query: run(query), device) for query in queries[20:]]  # type: ignore[misc]
    return {"p50_ms": 1000 * float(np.percentile(found, 50)), "p99_ms": 1000 * float(np.percentile(found, 99))}


def measured(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one model."""
    device, queries = options.device, queries_of(BULK)
    with tempfile.TemporaryDirectory() as folder:
        sparse = make_model(case, queries, Path(folder), device)
        late = colbert(Path(folder), device)
    known = dict(zip(map(str, range(96)), queries, strict=False))
    truth = Truth(sparse, known)
    for name, model in (("query", sparse), ("ColBERT query", late)):
        yield from _single(case, name, model, queries[: SINGLE + 20], truth if model is sparse else None, device)
    yield from _bulk(case, sparse, queries, device)


def _single(
    case: JobCase, name: str, model: Any, queries: list[str], truth: Truth | None, device: torch.device
) -> Iterator[Row]:
    def run(query: str | list[str]) -> Any:
        return model.encode_query(query, show_progress_bar=False)

    stock, gate = copy.deepcopy(model), "ok"
    for way in (STOCK, EAGER, GRAPHS):
        if way == EAGER:
            accelerate(model)
        if way != STOCK:
            model.encoding_graphs.failed = way == EAGER
        if way == GRAPHS:
            run(queries[0])
            for size in (1, 4, 16, 32):
                run(queries[:size])
            gate = _gate(model, stock, queries, truth)
        yield {"case": case.name, "work": f"one {name}", "way": way, **times(run, queries, device), "gate": gate}
        together = times(lambda _: run(queries[:32]), queries[: JOINED + 20], device)
        yield {"case": case.name, "work": f"32 {name}", "way": way, **together, "gate": gate}
    graphs = model.encoding_graphs
    inputs, graph = min(graphs.graphs.values(), key=lambda made: (made[0].texts, made[0].tokens))

    def replay(_: str) -> None:
        graph.launch()
        graph.wait()

    alone = {"case": case.name, "work": f"one {name}", "way": FLOOR, **times(replay, queries, device), "gate": gate}
    yield {**alone, "graphs": len(graphs.graphs), "note": f"{inputs.texts} text, {inputs.tokens} tokens"}


def _gate(model: Any, stock: Any, queries: list[str], truth: Truth | None) -> str:
    """Whether single and joined rows are those of the stock model, by the budget of its own dtype against fp32."""
    if truth is None:
        found, expected = model.encode_query(queries[:4]), stock.encode_query(queries[:4])
        apart = max(float((got.float() - want.float()).abs().max()) for got, want in zip(found, expected, strict=True))
        return "ok" if apart <= 2.0**-5 else f"token vectors differ by {apart:.3g}"
    single = torch.stack([model.encode_query(query).to_dense() for query in queries[:16]]).float().cpu()
    joined = model.encode_query(queries[:32]).to_dense().float().cpu()
    error = max(float((rows - truth.rows[: len(rows)]).abs().max()) for rows in (single, joined))
    return "ok" if error <= truth.allowed else f"rows differ by {error:.3g}, allowed {truth.allowed:.3g}"


def _bulk(case: JobCase, model: Any, queries: list[str], device: torch.device) -> Iterator[Row]:
    from tilefold.integrations.sentence_transformers import restore
    from tilefold.retrieval import encode_collection

    def encode(texts: list[str], **how: Any) -> float:  # the second time: memory is fresh the first, and slow
        seconds_of(lambda: model.encode_query(texts, show_progress_bar=False, **how), device)
        return seconds_of(lambda: model.encode_query(texts, show_progress_bar=False, **how), device)

    row = {"case": case.name, "work": f"{len(queries):,} queries", "gate": "ok"}
    ids = dict(zip(map(str, range(len(queries))), queries, strict=True))
    yield row | {"way": GRAPHS, "queries_s": len(queries) / encode(queries)}
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            encode_collection(model, ids, Path(folder) / "vectors", kind="query")
            seconds = time.perf_counter() - start
    yield row | {"way": f"{GRAPHS}, to Parquet", "queries_s": len(queries) / seconds}
    restore(model)
    yield row | {"way": f"{STOCK}, batch 256", "queries_s": STOCK_BULK / encode(queries[:STOCK_BULK], batch_size=256)}


QUERIES = Job(
    "queries",
    tuple(case for case in CASES if case.name in ("bert-base", "minilm")),
    ("case", "work", "way"),
    ("work", "way", "p50_ms", "p99_ms", "queries_s", "graphs", "gate"),
    measured,
)

if __name__ == "__main__":
    sys.exit(main(QUERIES, __doc__))
