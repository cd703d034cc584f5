"""Time queries of 12 tokens on a GPU: one at a time, 32 together, and 32,768 in bulk.

    python -m benchmarks.queries [--shape bert-base] [--output benchmarks/results]

Timed: the same queries with one model of random weights, whose bias leaves some 230 terms of a
query, and with a ColBERT model of the same network. Single calls are timed by the wall clock, to
the end of what the device got. Graphs are captured before anything is timed, as at the start of a
server.

Baseline: the stock model, and tilefold without CUDA graphs. The floor of a single query is the
replay of its graph alone.

Gate: rows of the stock model in fp32, for queries and for texts of 1 to 512 tokens.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encode import CHECKED, MIB, Truth, busy_share, seconds_of
from benchmarks.encode_data import CASES, make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.sentence_transformers._heads import is_multi_vector

STOCK = "stock"
EAGER = "tilefold without graphs"
GRAPHS = "tilefold"
FLOOR = "its graph alone"
# words of a query, which has about 12 tokens with the special ones
QUERY_WORDS = 6
BULK_QUERIES = 32768
STOCK_BULK_QUERIES = 4096
STOCK_BULK_BATCHES = (32, 256)  # batch sizes of the stock model for many queries
# timed calls with one query, and with 32
SINGLE_CALLS = 1000
JOINED_CALLS = 100
JOINED_QUERIES = 32
WARMUP_CALLS = 20
# without graphs, calls are slower, and this many times fewer are timed
SLOW_FACTOR = 5
# queries of the gate, which has texts of up to 512 tokens too
GATE_QUERIES = 64
LONGEST_TEXT = 512
# tokens of an expanded ColBERT query, and dimensions of its vectors
COLBERT_TOKENS = 32
COLBERT_DIMENSION = 128
# ColBERT queries of the gate, and the allowed difference of their normalised vectors in bf16
COLBERT_GATE_QUERIES = 4
COLBERT_ERROR = 2.0**-5
# texts whose words queries are made of
SOURCE_TEXTS = 2000


def _words() -> list[str]:
    """Return words from the documentation of Python."""
    return " ".join(make_texts(SOURCE_TEXTS)).split()


def queries_of(count: int, seed: int = 0) -> list[str]:
    """Make queries: runs of words from the documentation of Python."""
    words = _words()
    starts = np.random.default_rng(seed).integers(0, len(words) - QUERY_WORDS, count)
    return [" ".join(words[start : start + QUERY_WORDS]) for start in starts.tolist()]


def texts_of(count: int, seed: int = 1) -> list[str]:
    """Make texts of 1 to 512 tokens: runs of words from the documentation of Python.

    Args:
        count: the number of texts.
        seed: seed of the lengths and of the places of the runs.
    """
    words = _words()
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, LONGEST_TEXT // 2, count)
    starts = generator.integers(0, len(words) - LONGEST_TEXT, count)
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def make_colbert(folder: Path, device: torch.device) -> Any:
    """Make a MultiVectorEncoder of the network in a folder, whose queries have 32 tokens."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    expansion = {"strategy": "fixed", "attend": True, "length": COLBERT_TOKENS}
    transformer = Transformer(str(folder), query_expansion=expansion)
    projection = Dense(
        transformer.get_embedding_dimension(),
        COLBERT_DIMENSION,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [
        transformer,
        projection,
        MultiVectorMask(),
        Normalize(module_input_name="token_embeddings"),
    ]
    return MultiVectorEncoder(modules=modules, device=str(device)).to(torch.bfloat16)


def time_calls(
    run: Callable[[str], object],
    queries: Sequence[str],
    device: torch.device,
) -> dict[str, float]:
    """Time single calls, each until the device has finished.

    Args:
        run: the call.
        queries: the argument of each call. The first 20 warm up.
        device: the device.

    Returns:
        Percentiles in milliseconds, by the name of the column.
    """
    for query in queries[:WARMUP_CALLS]:
        run(query)
    seconds = [seconds_of(partial(run, query), device) for query in queries[WARMUP_CALLS:]]
    return {
        f"p{percentile}_ms": 1000 * float(np.percentile(seconds, percentile))
        for percentile in (20, 50, 80, 99)
    }


def measure(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Time one query, 32 and all of them with a model, and yield the rows.

    Args:
        case: the case.
        options: the options of the command line.
    """
    device = options.device
    queries = queries_of(BULK_QUERIES)
    with tempfile.TemporaryDirectory() as folder:
        sparse = make_model(case, queries, Path(folder), device)
        colbert = make_colbert(Path(folder), device)
    sparse[0].max_seq_length = LONGEST_TEXT
    gate_texts = [*queries[:GATE_QUERIES], *texts_of(CHECKED - GATE_QUERIES)]
    truth = Truth(sparse, {str(position): text for position, text in enumerate(gate_texts)})
    for name, model in (("query", sparse), ("ColBERT query", colbert)):
        single = SingleQueries(case, name, model, queries, gate_texts, truth, device)
        yield from single.rows()
    yield from _time_bulk(case, sparse, queries, truth, device)


class SingleQueries:
    """Times a model with one query and with 32.

    Args:
        case: the case.
        name: the name of a query of the model in the results.
        model: a stock model, which is accelerated.
        queries: the queries to time.
        gate_texts: the texts that the gate compares.
        truth: their rows, for a sparse model.
        device: the device.
    """

    def __init__(
        self,
        case: JobCase,
        name: str,
        model: Any,
        queries: Sequence[str],
        gate_texts: list[str],
        truth: Truth,
        device: torch.device,
    ) -> None:
        """Prepare the measurement of single queries; nothing is timed yet.

        Args:
            case: the case.
            name: the name of the kind of query, for the rows.
            model: the stock model, which is accelerated later.
            queries: at least as many queries as calls.
            gate_texts: the texts of the check.
            truth: the vectors of these texts.
            device: the device.
        """
        self.case = case
        self.name = name
        self.model = model
        self.stock = copy.deepcopy(model)
        self.queries = queries[: WARMUP_CALLS + SINGLE_CALLS]
        self.gate_texts = gate_texts
        self.truth = truth
        self.device = device

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the stock model, of tilefold without and with graphs, and the floor.

        The stock model is not checked, because the check compares with it.
        """
        yield from self._time(STOCK, "ok", SLOW_FACTOR)
        accelerate(self.model)
        # An earlier failure is simulated, so that no graph is captured.
        self.model.encoding_graphs.failed = True
        yield from self._time(EAGER, self._check(), SLOW_FACTOR)
        self.model.encoding_graphs.failed = False
        capture_cells = self._capture()
        gate = self._check()
        n_graphs = len(self.model.encoding_graphs.graphs)
        yield from self._time(GRAPHS, gate, 1, {**capture_cells, "graphs": n_graphs})
        yield self._floor(gate, n_graphs)

    def _encode(self, queries: str | list[str]) -> Any:
        """Encode one query or several."""
        return self.model.encode_query(queries, batch_size=64, show_progress_bar=False)

    def _time(
        self,
        way: str,
        gate: str,
        slow_factor: int,
        cells: dict[str, object] | None = None,
    ) -> Iterator[Row]:
        """Time single queries and batches of 32.

        Args:
            way: the name of the way in the results.
            gate: the result of its check.
            slow_factor: the factor by which fewer calls are timed.
            cells: further cells of the row of single queries.
        """
        n_single = WARMUP_CALLS + SINGLE_CALLS // slow_factor
        n_joined = WARMUP_CALLS + JOINED_CALLS // slow_factor
        row: dict[str, object] = {"case": self.case.name, "way": way, "gate": gate}
        single_times = time_calls(self._encode, self.queries[:n_single], self.device)
        yield {**row, "work": f"one {self.name}", **(cells or {}), **single_times}
        joined = list(self.queries[:JOINED_QUERIES])
        joined_times = time_calls(
            lambda _: self._encode(joined),
            self.queries[:n_joined],
            self.device,
        )
        yield {**row, "work": f"{JOINED_QUERIES} {self.name}", **joined_times}

    def _capture(self) -> dict[str, object]:
        """Capture the graphs, and return cells with their memory and the time that it took."""
        # memory of calls before is not that of graphs
        torch.cuda.empty_cache()
        reserved_before = torch.cuda.memory_reserved(self.device)
        graphs = self.model.encoding_graphs
        seconds = seconds_of(lambda: graphs.capture_all_sizes(self._encode), self.device)
        torch.cuda.empty_cache()
        n_bytes = torch.cuda.memory_reserved(self.device) - reserved_before
        return {"mib": n_bytes / MIB, "note": f"captured in {seconds:.1f} s"}

    def _floor(self, gate: str, graphs_before: int) -> Row:
        """Time the replay of the smallest graph.

        Args:
            gate: the result of the check of the graphs.
            graphs_before: the number of graphs before queries were timed.
        """
        graphs = self.model.encoding_graphs.graphs
        inputs, graph = min(graphs.values(), key=lambda item: (item[0].texts, item[0].tokens))
        note = f"{inputs.texts} text, {inputs.tokens} tokens"
        if len(graphs) != graphs_before:
            note += ", and one was captured while others were timed"

        def replay(_: str) -> None:
            graph.launch()
            graph.wait()

        return {
            "case": self.case.name,
            "work": f"one {self.name}",
            "way": FLOOR,
            "graphs": len(graphs),
            "gate": gate,
            **time_calls(replay, self.queries, self.device),
            "note": note,
        }

    def _check(self) -> str:
        """Compare vectors of the model with those of the stock model.

        Sparse rows of single and of joined texts must be within the error of the stock model
        against fp32, times a small factor.

        Returns:
            ``"ok"``, or the difference.
        """
        if is_multi_vector(self.model):
            texts = self.gate_texts[:COLBERT_GATE_QUERIES]
            largest_error = 0.0
            for vectors, stock_vectors in zip(
                self.model.encode_query(texts),
                self.stock.encode_query(texts),
                strict=True,
            ):
                difference = (vectors.float() - stock_vectors.float()).abs().max()
                largest_error = max(largest_error, float(difference))
            if largest_error <= COLBERT_ERROR:
                return "ok"
            return f"token vectors differ by {largest_error:.3g}"
        single = [self.model.encode_query(text).to_dense() for text in self.gate_texts]
        joined = [
            self.model.encode_query(self.gate_texts[start : start + JOINED_QUERIES]).to_dense()
            for start in range(0, len(self.gate_texts), JOINED_QUERIES)
        ]
        return _compare(self.truth, torch.stack(single), torch.cat(joined))


def _compare(truth: Truth, *row_sets: torch.Tensor) -> str:
    """Compare dense rows ``[N, V]`` with the first rows of the truth.

    Returns:
        ``"ok"``, or the difference.
    """
    error = max(
        float((rows.float().cpu() - truth.rows[: len(rows)]).abs().max()) for rows in row_sets
    )
    if error <= truth.allowed:
        return "ok"
    return f"rows differ by {error:.3g}, allowed {truth.allowed:.3g}"


def _time_bulk(
    case: JobCase,
    model: Any,
    queries: list[str],
    truth: Truth,
    device: torch.device,
) -> Iterator[Row]:
    """Time the encoding of all queries in one call, and yield a row for each way.

    The ways of tilefold are a tensor, sparse rows and Parquet files. The stock model follows, with
    two batch sizes.

    Args:
        case: the case.
        model: an accelerated SparseEncoder, which is restored at the end.
        queries: the queries.
        truth: the vectors of the first queries.
        device: the device.
    """
    from tilefold.integrations.sentence_transformers import encode_sparse, restore

    def to_tensor(texts: list[str]) -> Any:
        return model.encode_query(texts, show_progress_bar=False)

    def to_rows(texts: list[str]) -> Any:
        return encode_sparse(model, texts, task="query")

    row: dict[str, Any] = {"case": case.name, "work": f"{len(queries):,} queries"}
    checked_rows = torch.arange(GATE_QUERIES, device=device)
    yield {
        **row,
        "gate": _compare(truth, to_tensor(queries).index_select(0, checked_rows).to_dense()),
        "gpu_busy": busy_share(lambda: to_tensor(queries), device),
        "way": GRAPHS,
        "queries_s": _queries_per_second(to_tensor, queries, device),
    }
    rows_gate = _compare(truth, to_rows(queries[:GATE_QUERIES]).to_dense())
    yield {
        **row,
        "gate": rows_gate,
        "way": f"{GRAPHS}, encode_sparse",
        "queries_s": _queries_per_second(to_rows, queries, device),
    }
    yield {
        **row,
        "gate": rows_gate,  # the files contain the same rows
        "way": f"{GRAPHS}, to Parquet",
        "queries_s": _queries_per_second(partial(_to_parquet, model), queries, device),
    }
    restore(model)
    for batch_size in STOCK_BULK_BATCHES:
        encode_stock = partial(
            model.encode_query,
            batch_size=batch_size,
            show_progress_bar=False,
        )
        yield {
            **row,
            "gate": "ok",
            "way": f"{STOCK}, batch {batch_size}",
            "queries_s": _queries_per_second(encode_stock, queries[:STOCK_BULK_QUERIES], device),
        }


def _to_parquet(model: Any, queries: list[str]) -> None:
    """Encode queries to Parquet files in a temporary folder.

    Args:
        model: an accelerated SparseEncoder.
        queries: the queries.
    """
    from tilefold.retrieval import encode_collection

    texts_by_id = {str(position): query for position, query in enumerate(queries)}
    with tempfile.TemporaryDirectory() as folder:
        encode_collection(
            model,
            texts_by_id,
            Path(folder) / "vectors",
            kind="query",
            shard_size=8192,
        )


def _queries_per_second(
    encode: Callable[[list[str]], Any],
    queries: list[str],
    device: torch.device,
) -> float:
    """Return the rate of the median of three calls, after one that allocates memory.

    Args:
        encode: encodes queries.
        queries: the queries of a call.
        device: the device of the model.
    """
    encode(queries)
    seconds = [seconds_of(partial(encode, queries), device) for _ in range(3)]
    return len(queries) / statistics.median(seconds)


QUERIES = Job(
    name="queries",
    cases=tuple(case for case in CASES if case.name in ("bert-base", "minilm")),
    key=("case", "work", "way"),
    shown=(
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
    run=measure,
)

if __name__ == "__main__":
    sys.exit(main(QUERIES, __doc__))
