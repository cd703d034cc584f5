"""Queries of 12 tokens on a GPU: one at a time, 32 together, and 32,768 in bulk.

    python -m benchmarks.queries [--shape bert-base] [--output benchmarks/results]

Every way encodes the same queries with the same model of random weights, whose bias leaves some 230
terms of a query; rows of the stock model in fp32 are the gate, for queries and for texts of 1 to
512 tokens. The floor of a single query is the replay of its graph alone. Graphs are captured before
anything is timed, as the start of a server does it.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encode import CHECKED, Truth, busy_share, seconds_of
from benchmarks.encode_data import CASES, make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.sentence_transformers._heads import is_multi_vector

STOCK, EAGER, GRAPHS, FLOOR = "stock", "tilefold without graphs", "tilefold", "its graph alone"
WORDS = 6  # of a query, which are 12 tokens with the special ones, about
BULK, STOCK_BULK, SINGLE, JOINED = 32768, 4096, 1000, 100
SLOW = 5  # times fewer calls without graphs
GATED, LONGEST = 64, 512  # queries of the gate, before texts of up to so many tokens
TOKENS = 32  # of an expanded ColBERT query


def queries_of(count: int, seed: int = 0) -> list[str]:
    """Runs of words from the documentation of Python."""
    words = " ".join(make_texts(2000)).split()
    starts = np.random.default_rng(seed).integers(0, len(words) - WORDS, count)
    return [" ".join(words[at : at + WORDS]) for at in starts.tolist()]


def texts_of(count: int, seed: int = 1) -> list[str]:
    """Runs of words from the same, of 1 to 512 tokens."""
    words = " ".join(make_texts(2000)).split()
    generator = np.random.default_rng(seed)
    sizes, starts = (
        generator.integers(1, LONGEST // 2, count),
        generator.integers(0, len(words) - LONGEST, count),
    )
    return [
        " ".join(words[at : at + size])
        for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]


def colbert(folder: Path, device: torch.device) -> Any:
    """A MultiVectorEncoder of the same network: 128 dimensions, queries expanded to 32 tokens."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    expansion = {"strategy": "fixed", "attend": True, "length": TOKENS}
    trunk = Transformer(str(folder), query_expansion=expansion)
    plain = torch.nn.Identity()
    width = trunk.get_embedding_dimension()
    dense = Dense(
        width,
        128,
        bias=False,
        activation_function=plain,
        module_input_name="token_embeddings",
    )
    modules = [trunk, dense, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(device)).to(torch.bfloat16)


def times(
    run: Callable[[str], object],
    queries: Sequence[str],
    device: torch.device,
) -> dict[str, float]:
    """Percentiles of single calls, each to the end of what it gave the device."""
    for query in queries[:20]:
        run(query)
    found = [seconds_of(lambda query=query: run(query), device) for query in queries[20:]]  # type: ignore[misc]
    return {f"p{share}_ms": 1000 * float(np.percentile(found, share)) for share in (20, 50, 80, 99)}


def measured(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one model."""
    device, queries = options.device, queries_of(BULK)
    with tempfile.TemporaryDirectory() as folder:
        sparse = make_model(case, queries, Path(folder), device)
        late = colbert(Path(folder), device)
    sparse[0].max_seq_length = LONGEST
    known = [*queries[:GATED], *texts_of(CHECKED - GATED)]
    truth = Truth(sparse, dict(zip(map(str, range(CHECKED)), known, strict=True)))
    for name, model in (("query", sparse), ("ColBERT query", late)):
        yield from _single(case, name, model, queries[: SINGLE + 20], (known, truth), device)
    yield from _bulk(case, sparse, queries, truth, device)


def _single(
    case: JobCase,
    name: str,
    model: Any,
    queries: list[str],
    gated: tuple[list[str], Truth],
    device: torch.device,
) -> Iterator[Row]:
    def run(query: str | list[str]) -> Any:
        return model.encode_query(query, batch_size=64, show_progress_bar=False)

    stock = copy.deepcopy(model)
    for way in (STOCK, EAGER, GRAPHS):
        if way == EAGER:
            accelerate(model)
        if way != STOCK:
            model.encoding_graphs.failed = way == EAGER
        made: dict[str, object] = {}
        gate = (
            "the truth"
            if way == STOCK
            else _gate(model, stock, *gated)
            if way == EAGER
            else "not run"
        )
        if way == GRAPHS:
            torch.cuda.empty_cache()  # what calls before have left is not the graphs'
            before = torch.cuda.memory_reserved(device)
            seconds = seconds_of(lambda: model.encoding_graphs.warm(run), device)
            torch.cuda.empty_cache()
            made = {
                "mib": (torch.cuda.memory_reserved(device) - before) / 2**20,
                "note": f"captured in {seconds:.1f} s",
            }
            gate = _gate(model, stock, *gated)
            made["graphs"] = len(model.encoding_graphs.graphs)
        few = SLOW if way != GRAPHS else 1
        row: dict[str, object] = {"case": case.name, "way": way, "gate": gate}
        yield {
            **row,
            "work": f"one {name}",
            **made,
            **times(run, queries[: 20 + SINGLE // few], device),
        }
        together = times(lambda _: run(queries[:32]), queries[: 20 + JOINED // few], device)
        yield {**row, "work": f"32 {name}", **together}
    graphs = model.encoding_graphs
    late = made["graphs"] != len(graphs.graphs)
    inputs, graph = min(graphs.graphs.values(), key=lambda made: (made[0].texts, made[0].tokens))

    def replay(_: str) -> None:
        graph.launch()
        graph.wait()

    alone = {
        "case": case.name,
        "work": f"one {name}",
        "way": FLOOR,
        "graphs": len(graphs.graphs),
        "gate": gate,
    }
    note = f"{inputs.texts} text, {inputs.tokens} tokens" + (
        ", and one was captured while others were timed" * late
    )
    yield {**alone, **times(replay, queries, device), "note": note}


def _gate(model: Any, stock: Any, texts: list[str], truth: Truth) -> str:
    """Whether single and joined rows are those of the stock model, by the budget of its own dtype
    against fp32.
    """
    if is_multi_vector(model):
        found, expected = model.encode_query(texts[:4]), stock.encode_query(texts[:4])
        apart = max(
            float((got.float() - want.float()).abs().max())
            for got, want in zip(found, expected, strict=True)
        )
        return "ok" if apart <= 2.0**-5 else f"token vectors differ by {apart:.3g}"
    single = torch.stack([model.encode_query(text).to_dense() for text in texts])
    joined = torch.cat(
        [model.encode_query(texts[at : at + 32]).to_dense() for at in range(0, len(texts), 32)],
    )
    return _compared(truth, single, joined)


def _compared(truth: Truth, *found: torch.Tensor) -> str:
    error = max(float((rows.float().cpu() - truth.rows[: len(rows)]).abs().max()) for rows in found)
    return (
        "ok"
        if error <= truth.allowed
        else f"rows differ by {error:.3g}, allowed {truth.allowed:.3g}"
    )


def _bulk(
    case: JobCase,
    model: Any,
    queries: list[str],
    truth: Truth,
    device: torch.device,
) -> Iterator[Row]:
    from tilefold.integrations.sentence_transformers import encode_sparse, restore
    from tilefold.retrieval import encode_collection

    def rate(texts: list[str], run: Callable[[list[str]], Any]) -> float:
        """Texts a second; memory is fresh the first time, and slow, and the median of three counts
        after it.
        """
        run(texts)
        return len(texts) / sorted(seconds_of(lambda: run(texts), device) for _ in range(3))[1]

    def encode(texts: list[str], **how: Any) -> Any:
        return model.encode_query(texts, show_progress_bar=False, **how)

    row: dict[str, Any] = {"case": case.name, "work": f"{len(queries):,} queries"}
    first = torch.arange(GATED, device=device)
    row["gate"] = _compared(truth, encode(queries).index_select(0, first).to_dense())
    busy = busy_share(lambda: encode(queries), device)
    yield row | {"way": GRAPHS, "queries_s": rate(queries, encode), "gpu_busy": busy}
    sparse = partial(encode_sparse, model, task="query")
    row["gate"] = _compared(truth, sparse(queries[:GATED]).to_dense())
    yield row | {"way": f"{GRAPHS}, encode_sparse", "queries_s": rate(queries, sparse)}
    ids = dict(zip(map(str, range(len(queries))), queries, strict=True))

    def to_parquet(_: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            encode_collection(model, ids, Path(folder) / "vectors", kind="query", shard_size=8192)

    yield row | {
        "way": f"{GRAPHS}, to Parquet",
        "queries_s": rate(queries, to_parquet),
        "gate": "that of encode_sparse",
    }
    restore(model)
    for size in (32, 256):
        found = rate(queries[:STOCK_BULK], partial(encode, batch_size=size))
        yield row | {"way": f"{STOCK}, batch {size}", "queries_s": found, "gate": "the truth"}


QUERIES = Job(
    "queries",
    tuple(case for case in CASES if case.name in ("bert-base", "minilm")),
    ("case", "work", "way"),
    (
        "work",
        "way",
        "p20_ms",
        "p50_ms",
        "p80_ms",
        "p99_ms",
        "queries_s",
        "gpu_busy",
        "graphs",
        "mib",
        "gate",
    ),
    measured,
)

if __name__ == "__main__":
    sys.exit(main(QUERIES, __doc__))
